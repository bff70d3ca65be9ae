// Tests of the other allreduces and of OVERLAP.
//
//     make test T='-tc=sum_in_groups*'
//
// defines: main

#define MGPU_NO_MAIN
#include PROGRAM

#include "../tests.h"

// The algorithms of this folder, and whether one takes tensors from any place in memory
static const std::pair<std::string, bool> others[] = {
    {"host", false}, {"by_tensor", true}, {"sharded", false},  {"ring", false},
    {"tree", false}, {"one_shot", false}, {"two_shot", false}};
static const std::vector<std::string> every = {"naive",     "bucket",  "yours", "host",
                                               "by_tensor", "sharded", "ring",  "tree",
                                               "one_shot",  "two_shot"};

// Puts the settings back, and OVERLAP's.
struct OverlapKept : Kept {
    const size_t bytes = group_bytes;
    ~OverlapKept() { group_bytes = bytes; }
};

TEST_CASE("allreduce_*: every device holds the exact sum of all, for any k and any length") {
    for (const auto &[name, any_place] : others) {
        if (works_here(name)) check_algorithm(name, any_place);
    }
}

TEST_CASE("allreduce_*: of so many devices, then of others, while one is late") {
    for (const auto &[name, any_place] : others) {
        if (works_here(name)) check_late_devices(name, name == "host");
    }
}

// ---------------------------------------------------------------------------------------------
// OVERLAP

// Sum the gradients one after another, the last first, without other streams.
static void sum_singly(const std::string &name, const PerDevice &grads) {
    for (size_t i = grads[0].size(); i-- > 0;) {
        PerDevice group;
        for (const Tensors &list : grads) group.push_back({list[i]});
        run_allreduce(name, group);
    }
}

// Return a network of three layers after some steps on k devices.
static Training train_small(int k, int steps) {
    net = [](const Tensor &X, const Tensors &p) {
        return linear(relu(linear(relu(linear(X, p[0], p[1])), p[2], p[3])), p[4], p[5]);
    };
    Tensors start;
    for (const Ints &shape : {Ints{6, 7}, {7}, {7, 5}, {5}, {5, 3}, {3}}) {
        start.push_back(random_tensor(shape, start.size()));
    }
    Training training(k, start);
    const int n = 4 * k - (k > 1); // shards differ in size
    Floats y(n);
    for (int i = 0; i < n; i++) y[i] = i % 3;
    for (int step = 0; step < steps; step++) {
        training.step({random_tensor({n, 6}, step), on_host(y, {n})}, 0.1f);
    }
    return training;
}

TEST_CASE("sum_in_groups: OVERLAP=1 gives the same bits as without, and the replicas are equal") {
    OverlapKept kept;
    const int steps = small_only ? 2 : 4;
    for (int k = 1; k <= (small_only ? 3 : 4); k += no_training ? 2 : 1) {
        CHECK(parse("") == "");
        const Floats naive = train_small(k, 1).grads(0);
        for (const std::string &name : every) {
            INFO("k ", k, ", ", name);
            if (!works_here(name)) continue;
            group_bytes = 1; // each gradient is a group
            CHECK(parse("OVERLAP=1 ALLREDUCE=" + name) == "");
            check_close(train_small(k, 1).grads(0), naive, 1e-6); // they may sum in another order
            const Training with = train_small(k, steps);
            with.check_replicas_equal();
            check_close(train_small(k, steps).params(0), with.params(0), 0);
            CHECK(parse("OVERLAP=0") == "");
            exchange = [&, name = name](const PerDevice &grads) { sum_singly(name, grads); };
            check_close(train_small(k, steps).params(0), with.params(0), 0);
        }
    }
}

TEST_CASE("sum_in_groups: groups of so many bytes, the last layers first") {
    OverlapKept kept;
    static std::string groups; // the shapes in each of them
    algorithms.push_back({"probed", [](const PerDevice &grads) {
                              for (const Tensor &t : grads[0]) groups += in_parentheses(t.shape);
                              groups += " ";
                          }});
    typed["ALLREDUCE"] = "probed";
    auto groups_of = [](size_t bytes) {
        group_bytes = bytes;
        groups = "";
        sum_in_groups(new_grads(2, {3, 2, 4, 1, 5}));
        return groups;
    };
    CHECK(groups_of(1) == "(1,5) (1,1) (1,4) (1,2) (1,3) ");
    CHECK(groups_of(24) == "(1,1)(1,5) (1,2)(1,4) (1,3) ");
    CHECK(groups_of(25) == "(1,4)(1,1)(1,5) (1,3)(1,2) ");
    CHECK(groups_of(1000) == "(1,3)(1,2)(1,4)(1,1)(1,5) ");
}

TEST_CASE("sum_in_groups: each group waits for its own gradients alone, later work for all") {
    OverlapKept kept;
    group_bytes = 1;
    static std::vector<cudaEvent_t> summed; // behind each group
    algorithms.push_back({"recorded", [](const PerDevice &grads) {
                              allreduce_naive(grads);
                              summed.emplace_back();
                              CUDA_CHECK(cudaEventCreate(&summed.back()));
                              CUDA_CHECK(cudaEventRecord(summed.back(), stream_of(gpu(0))));
                          }});
    typed["ALLREDUCE"] = "recorded";
    const PerDevice p = Training(2, {arange(3), arange(2)}).device_params;
    auto write = [&](int i) { // as backward() does
        for (int c : {0, 1}) {
            fill(*p[c][i].grad, c + 1);
            record_written(*p[c][i].grad);
        }
    };
    write(1);
    write(0);
    sum_in_groups(gradients(p)); // allocates what it needs
    waitall();
    summed.clear();
    write(1);
    Hold hold_0(gpu(0)), hold_1(gpu(1));
    write(0);
    sum_in_groups(gradients(p));
    REQUIRE(summed.size() == 2);
    CHECK(cudaEventSynchronize(summed[0]) == cudaSuccess); // or the holds end, and the next fails
    // (A copy through the host has waited until the holds ended)
    if (peers_can_read(2)) CHECK(cudaEventQuery(summed[1]) == cudaErrorNotReady);
    hold_0.release();
    hold_1.release();
    for (const Tensors &list : p) {
        CHECK(all_to_host({*list[0].grad, *list[1].grad}) == Floats(5, 3));
    }
}

TEST_CASE("parse_options: OVERLAP") {
    OverlapKept kept;
    CHECK(parse("OVERLAP=1 ALLREDUCE=tree") == "");
    CHECK(bool(after_gradient == record_written));
    auto called = [] { return *exchange.target<void (*)(const PerDevice &)>(); };
    CHECK(bool(called() == sum_in_groups));
    CHECK(option_text("ALLREDUCE") == "tree");
    CHECK(parse("OVERLAP=0") == "");
    CHECK(bool(after_gradient == nullptr));
    CHECK(bool(called() == plain_sum_gradients));
    check_says(parse("OVERLAP=2"), "OVERLAP=2: expected a whole number from 0 to 1");
    check_says(parse("ALLREDUCE=magic"), "choose one of naive, bucket, yours, host, by_tensor");
}

int main(int argc, char **argv) { return tests_main(argc, argv); }
