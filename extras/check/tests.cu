// Tests of make check: it says nothing of what is right, and names what is wrong.
//
//     make test T='-tc=check_*'
//
// defines: main

#define MGPU_NO_MAIN
#include "../watch/watch.h"
#include "launches.h"
#include PROGRAM
#include "check.cu"

#include "../tests.h"

typedef std::function<void(const PerDevice &grads)> Exchange;

// Select a network and initialize its parameters. Kept puts the last one back.
static void set_model(const std::string &name, int seed) {
    use_model(name);
    rng.seed(seed);
    experiment.init_params();
}

TEST_CASE("check_copies: says that a wait is missing" * doctest::skip(no_training)) {
    CHECK(error_of(check_copies) == "");
    watch::no_waits = true;
    check_says(
        error_of(check_copies),
        "the data of copyto from gpu(0) to gpu(1) arrives changed from index 0 of 16384 on: src "
        "was read too early or too late: are both calls of make_wait there?");
    watch::no_waits = false;
}

// What make check says of a step that `spoil` has changed, and what it prints.
typedef std::function<void(Training &training, Tensors &losses, const Tensor &X, const Tensor &y)>
    Spoil;
static std::string checked_step(int k, int n, const Spoil &spoil = nullptr,
                                std::string *line = nullptr) {
    const auto batch = minibatch(n, 3);
    const Tensor &X = batch.first, &y = batch.second;
    Training training(k, params);
    Seen seen(&training.device_params);
    Tensors losses = train_batch(X, y, training.device_params, training.devices, option("LR"));
    seen.stop();
    if (spoil) spoil(training, losses, X, y);
    std::string said;
    const std::string out = printed([&] {
        said = error_of([&] {
            check_step("", X, y, losses, training.device_params, option("LR"), seen);
            check_slopes("", X, y);
        });
    });
    if (line) *line = out;
    else check_lacks(out, "notice");
    return said;
}

TEST_CASE("check_step, check_slopes: right steps pass" * doctest::skip(no_training)) {
    Kept kept;
    for (std::string model : {"lenet", "lab_cnn"})
        for (const auto &sizes : {std::pair(1, 7), std::pair(2, 1), std::pair(5, 7)}) {
            const int k = sizes.first, n = sizes.second;
            if (small_only && (model != "lab_cnn" || k != 2)) continue;
            set_model(model, k); // k is the seed too
            INFO(model, ", k ", k, ", n ", n);
            CHECK(checked_step(k, n) == "");
        }
    set_model("lenet", 0);
    for (float c : {0.1f, 1.0f, 10.0f, 0.0f}) { // equal logits, large ones, gradients that are 0
        CAPTURE(c);
        for (int i : {0, 2, 4, 6}) params[i] = full(params[i].shape, c, cpu());
        std::string line;
        CHECK(checked_step(2, 16, nullptr, &line) == "");
        if (c == 0) // with equal weights, too, the gradient is 0 but for rounding
            check_parts(line, "notice: the gradient of W1, b1, W2, b2, W3, b3, W4 is 0 everywhere");
        check_lacks(line, "b4");
    }
}

TEST_CASE("extras/check/kernels lists the kernels that mgpu.cu comes with, and no other") {
    std::string names;
    for (const std::string &line : lines_of(read_text("mgpu.cu")))
        if (line.find("__global__ ") == 0) {
            const std::string head = line.substr(0, line.find('('));
            names += head.substr(head.rfind(' ') + 1) + "\n";
        }
    CHECK(read_text("extras/check/kernels") == names);
}
TEST_CASE("place: names the one line of a function that has this code, or none") {
    check_parts(place("train", "timer.stop("), " (mgpu.cu:");
    CHECK(place("rain", "timer.stop(") == "");
    CHECK(place("train_batch", "timer.stop(") == "");
    CHECK(place("train", "train_iter") == ""); // it stands there more than once
}

TEST_CASE("check_step: what is wrong is named by what it looks like" * doctest::skip(small_only)) {
    Kept kept;
    // The gradients become sums of the shards', factors[c][d] times device d's on device c
    auto gradients_are = [](const Arrays &factors) {
        return [=](Training &t, Tensors &, const Tensor &X, const Tensor &y) {
            const int k = t.devices.size();
            const auto [X_shards, y_shards] = split_batch(X, y, t.devices);
            std::vector<Flat> shards;
            for (int c = 0; c < k; c++)
                shards.push_back(alone(X_shards[c], y_shards[c]).gradient);
            for (int c = 0; c < k; c++)
                for (size_t i = 0, at = 0; i < params.size(); i++) {
                    Floats sum, moved = to_host(params[i]);
                    for (float &x : moved) {
                        sum.push_back(0);
                        for (int d = 0; d < k; d++) sum.back() += factors[c][d] * shards[d][at];
                        x -= option("LR") * sum.back() / X.shape[0];
                        at++;
                    }
                    copyto(on_host(sum, params[i].shape), gradient(t.device_params[c][i]));
                    copyto(on_host(moved, params[i].shape), t.device_params[c][i]);
                }
        };
    };
    // Each update becomes `ratio` times itself, on all devices or on the last one
    auto updates_are = [](double ratio, bool last = false) {
        return [=](Training &t, Tensors &, const Tensor &, const Tensor &) {
            for (const Tensors &list : t.device_params)
                for (size_t i = 0; i < params.size() && (!last || &list == &t.device_params.back());
                     i++) {
                    Floats after = to_host(list[i]), before = to_host(params[i]);
                    for (size_t j = 0; j < after.size(); j++)
                        after[j] = before[j] + ratio * (after[j] - before[j]);
                    copyto(on_host(after, list[i].shape), list[i]);
                }
        };
    };
    auto one_gradient = [](float value, bool all) { // b4's on device 1
        return [=](Training &t, Tensors &, const Tensor &, const Tensor &) {
            Floats numbers = to_host(gradient(t.device_params[1][7]));
            for (size_t j = 0; j < (all ? numbers.size() : 1); j++) numbers[j] = value * (j % 3);
            if (!all) numbers[0] = value;
            copyto(on_host(numbers, {10}), gradient(t.device_params[1][7]));
        };
    };
    const float n = 6, lr = 0.2f;
    const std::string sum = "the sum of gradients (mgpu.cu:", update = "the update (mgpu.cu:",
                      g0 = "gpu(0)'s gradient", g1 = "gpu(1)'s gradient",
                      of_sum = " times the sum of gradients; it is ";
    const struct {
        Spoil spoil;
        std::string says;
    } mistakes[] = {
        {gradients_are({{.5, .5}, {.5, .5}}),
         sum + " ... ) on gpu(0) is ... at W1[0], not ... : it equals 1 / k times " + g0 + " + 1 / "
             "k times " + g1},
        {gradients_are({{-1, -1}, {-1, -1}}), "it equals -1 times " + g0 + " + -1 times " + g1},
        {gradients_are({{1, 0}, {0, 1}}), sum + " ... ) on gpu(0) is ... it equals " + g0},
        {gradients_are({{1, 1}, {1, 0}}), sum + " ... ) on gpu(1) is ... it equals " + g0},
        {gradients_are({{3, 1}, {3, 1}}), "it equals 3 times " + g0 + " + " + g1},
        {gradients_are({{1.05, 1}, {1.05, 1}}), "it equals 1.05 times " + g0 + " + " + g1},
        {gradients_are({{0, 0}, {0, 0}}), sum + " ... it equals 0"},
        {one_gradient(NAN, false), sum + " ... it equals nan, as memory that was not written"},
        {one_gradient(7, true), sum + " ... (10 of 129068 numbers are wrong, b4[0] to [9])"},
        {updates_are(0), "is 0 at W1[0], not ... it equals 0; gpu(0)'s parameters are unchanged"},
        {updates_are(-1), "it equals -lr / n" + of_sum + "-1 times"},
        {updates_are(n), "it equals lr" + of_sum + "6 times"},
        {updates_are(1 / n), "it equals lr / n / n" + of_sum + "0.1667 = 1 / n times the right "
                                                               "one: divided by n twice"},
        {updates_are(2), "it equals lr / gpu(0)'s samples" + of_sum + "2 times"},
        {updates_are(lr), "it equals lr * lr / n" + of_sum + "0.2 = lr times"},
        {updates_are(1 / lr), "it equals 1 / n" + of_sum + "5 times"},
        {updates_are(2, true), update + " ... ) on gpu(1) is ... of the same parameter and the "
                               "same sum: the update keeps something that the devices share"},
        {updates_are(0, true), update + " ... ) on gpu(1) is 0 ... gpu(1)'s parameters are "
                               "unchanged"},
        {[](Training &, Tensors &l, const Tensor &, const Tensor &) { l.pop_back(); },
         "train_batch returns the losses of 1 devices, but there are 2"},
        {[](Training &, Tensors &losses, const Tensor &, const Tensor &) {
             losses[1] = rows(losses[1], 0, 2);
         },
         "train_batch returns 2 losses of 3 samples on gpu(1) (mgpu.cu:"},
        {[](Training &, Tensors &losses, const Tensor &, const Tensor &) {
             copyto(full({1}, NAN, gpu(1)), rows(losses[1], 2, 3));
         },
         "the loss on gpu(1) is nan at sample 2"}};
    set_model("lenet", 0);
    for (const auto &mistake : mistakes) {
        CAPTURE(mistake.says);
        check_says(checked_step(2, n, mistake.spoil), mistake.says);
    }
    check_says(checked_step(3, n, gradients_are({{1, 0, 4}, {1, 0, 4}, {1, 0, 4}})),
               "it equals gpu(0)'s gradient + 4 times gpu(2)'s gradient");
    // The sum of the step before is still in it; a right step comes first.
    Flat before;
    CHECK(checked_step(2, n, [&](Training &t, Tensors &, const Tensor &, const Tensor &) {
              before = t.grads(0);
          }) == "");
    check_says(checked_step(2, n, [&](Training &t, Tensors &, const Tensor &, const Tensor &) {
                   for (size_t i = 0, at = 0; i < params.size(); at += size(params[i++])) {
                       const Floats part(&before[at], &before[at] + size(params[i]));
                       const Tensor g = gradient(t.device_params[0][i]);
                       add_(g, on_device(part, g.shape));
                   }
               }),
               "it equals 2 times the sum of the step before"); // both had the same minibatch
}

// An operator with this result, whose backward adds dX(dy)
typedef std::function<Tensor(const Tensor &)> Of;
static Tensor own(const char *op, const Tensor &X, const Of &y, const Of &dX) {
    return add_to_tape(op, y(X), {X}, [=](const Tensor &dy) {
        grad_ptr(X);
        add_(*X.grad, dX(dy));
    });
}
static Tensor same(const Tensor &t) { return copyto(t, t.device); }
static Tensor zeros(const Tensor &t) { return full(t.shape, 0, t.device); }
static Of times(float factor) {
    return [=](const Tensor &t) {
        Tensor y = same(t);
        y.grad = std::make_shared<Tensor>(same(t));
        sgd({y}, 1 - factor, 1);
        return y;
    };
}
// What is said of the operators of a network that is lenet with `more` behind it
static std::string checked_network(const Of &more) {
    net = [=](const Tensor &X, const std::vector<Tensor> &p) { return more(plain_lenet(X, p)); };
    const auto [X, y] = minibatch(4, 3);
    const std::string said = error_of([&, X = X, y = y] { check_slopes("", X, y); });
    tapes.clear();
    return said;
}
static std::string said(const Of &y, const Of &dX) { // of one's own operator
    return checked_network([=](const Tensor &X) { return own("own", X, y, dX); });
}
TEST_CASE("check_slopes: an operator of one's own is compared with its own slopes" *
          doctest::skip(small_only)) {
    Kept kept;
    set_model("lenet", 0);
    CHECK(said(same, same) == "");
    CHECK(said(times(3), times(3)) == "");
    check_says(said(times(3), times(6)),
               "operator 10 of the network, own(X (2,10)) ... dX is 2 times the slope of its y");
    for (float factor : {-1.0f, 0.3f, 3.0f})
        check_says(said(same, times(factor)), format("dX is %g times the slope of its y", factor));
    check_says(said(times(3), zeros), "own(X (2,10)) ... : dX is 0, but not the slope of its y");
    check_says(said(zeros, same), "own(X (2,10)) ... dX is");
    check_says(checked_network([&](const Tensor &y) {
                   add_(y, same(y));
                   return y;
               }),
               "operator 9 of the network, linear(X (2,128), W (128,10), b (10)) ... : y has been "
               "changed since it returned, by add_kernel");
    check_says(checked_network([&](const Tensor &y) {
                   return add_to_tape("set", same(y), {y}, [=](const Tensor &dy) {
                       grad_ptr(y);
                       copyto(dy, *y.grad);
                   });
               }),
               "set(X (2,10)) ... : dX is set by its backward, which must add to it");
    auto noise = [](const Tensor &t) { return copyto(normal(1, t.shape), t.device); };
    check_says(said(noise, same), "under NoGrad, as in the evaluation, ... draws random numbers");
    check_says(said([&](const Tensor &t) { return recording ? noise(t) : same(t); }, same),
               "own(X (2,10)) ... in two passes over the same minibatch ... draws random numbers");
}
TEST_CASE("check_slopes: waits, memory that is kept, and the evaluation" *
          doctest::skip(small_only)) {
    Kept kept;
    set_model("lenet", 0);
    auto early = [](const Tensor &t) { // on another stream
        const Tensor copy = empty(t.shape, t.device);
        enqueue_message(t, copy, link_stream(t.device, t.device));
        return copy;
    };
    check_says(said(early, same), "own(X (2,10)) ... y is right only if the host waits");
    check_says(said(same, early), "own(X (2,10)) ... dX is ... a wait is missing");
    for (bool result : {false, true}) // of the operator, freed only when the next one has run
        check_says(checked_network([&](const Tensor &X) {
                       const Tensor freed = same(X);
                       const std::shared_ptr<float> address(freed.ptr(), [](float *) {});
                       const Tensor kept = {X.device, X.shape, address};
                       auto y = [=](const Tensor &t) { return result ? freed : same(t); };
                       auto dX = [=](const Tensor &) { return kept; };
                       return own("next", own("own", X, y, dX), same, same);
                   }),
                   "own(X (2,10)) ... it reads memory that has been freed");
    static int calls;
    check_says(said(
                   [](const Tensor &t) {
                       calls++;
                       return same(t);
                   },
                   [](const Tensor &dy) { return calls % 2 ? dy : zeros(dy); }),
               "own(X (2,10)) ... later calls change something that it uses, such as a static");
    check_says(checked_network([](const Tensor &y) {
                   if (!recording) add_(y, same(y));
                   return y;
               }),
               "under NoGrad, as in the evaluation, y_hat[0,0] is ... all of them 2 times the "
               "right ones): in training it is another");
}

#ifdef FAST // for its table of operators
// What check_operators says where the result of linear is spoilt
static std::string checked_operators(const std::function<Tensor(Tensor)> &spoil) {
    static std::function<Tensor(Tensor)> after; // the entry cannot capture
    const Operators kept = operators;
    static Operators before;
    before = kept, after = spoil;
    operators.linear = [](const Tensor &X, const Tensor &W, const Tensor &b) {
        const Operators watched = std::exchange(operators, before);
        const Tensor y = after(linear(X, W, b));
        operators = watched;
        return y;
    };
    const std::string said = error_of(check_operators);
    operators = kept;
    tapes.clear();
    return said;
}
TEST_CASE("check_operators: which operator is wrong, and how" * doctest::skip(small_only)) {
    CHECK(checked_operators([](Tensor y) { return y; }) == "");
    check_says(checked_operators([](Tensor y) {
                   copyto(full({1}, 7, y.device), rows(reshape(y, {-1}), 1, 2));
                   return y;
               }),
               "linear(X (5,3), W (3,2), b (2)): y[0,1] is 7, not ... (1 of 10 numbers are wrong, "
               "in y[0,1]): ");
    check_says(checked_operators([](Tensor y) {
                   if (y.grad) tapes[y.device.id].back().grad_fn = [](const Tensor &) {};
                   return y;
               }),
               "linear(X (5,3), W (3,2), b (2)): dX[0,0] is 0, not ... (15 of 15 numbers are "
               "wrong, in dX[:,:], all of them 0): ");
    check_says(checked_operators([](Tensor y) {
                   return reshape(y, {-1, 1});
               }),
               "the result has shape (10,1), but must have 10 numbers for 5 samples");
    check_says(checked_operators([](Tensor y) { return rows(y, 0, 1); }),
               "the result has shape (1,2), but must have 10 numbers for 5 samples");
}
TEST_CASE("check_operators: CHECKS=0 lets another result through" *
          doctest::skip(small_only)) {
    Kept kept;
    set_option("CHECKS=0");
    std::string said;
    const std::string out = printed([&] {
        said = checked_operators([](Tensor y) {
            copyto(full({1}, 7, y.device), rows(reshape(y, {-1}), 1, 2));
            return y;
        });
    });
    CHECK(said == "");
    check_parts(out, "notice: linear(X (5,3), W (3,2), b (2)): y[0,1] is 7, not ");
}
#endif
// train(), with a mistake
static std::string mistake;
static void train_with_mistake(int num_gpus, int batch_size, float lr) {
    auto is = [](const char *name) { return mistake == name; };
    auto [train_iter, test_iter] = load_data_fashion_mnist(batch_size);
    const std::vector<Device> devices = first_devices(num_gpus);
    PerDevice device_params = replicate(devices);
    Animator animator = {train_iter.X.shape[0]};
    Timer timer;
    float acc = 0;
    auto minibatches = train_iter.epoch();
    for (int epoch = 0; epoch < (is("one epoch") ? 1 : 2); epoch++) {
        if (epoch > 0 && !is("one order")) minibatches = train_iter.epoch();
        timer.start();
        for (auto [X, y] : minibatches) {
            if (is("first parameters")) device_params = replicate(devices);
            if (is("decay")) lr /= 2;
            auto losses = train_batch(X, y, device_params, devices, lr);
            for (const Tensor &p : device_params[0])
                if (is("update in place")) add_(*p.grad, copyto(*p.grad, p.device));
            if (!is("no waitall")) waitall();
            if (is("last loss")) animator.pending.clear();
            animator.add_losses(losses);
            if (is("one minibatch")) break;
        }
        timer.stop();
        const PerDevice fresh = replicate(devices);
        const PerDevice &tested = is("untrained") ? fresh : device_params;
        auto model = [&](const Tensor &x) { return net(x, tested[0]); };
        const float now = evaluate_accuracy_gpu(model, is("training set") ? train_iter : test_iter,
                                                devices[0]);
        animator.add(epoch + 1, is("old accuracy") ? acc : now, timer.times.back());
        acc = now;
        after_epoch(animator, is("save untrained") ? fresh[0] : device_params[0]);
    }
}
TEST_CASE("check_train: what train does is told by what net gets" * doctest::skip(small_only)) {
    Kept kept;
    set_model("lenet", 0);
    params = lively_params();
    set_option("GPUS=2");
    set_option("BATCH=8");
    set_option("ALLREDUCE=naive");
    train_set = learnable_set(20, 1);
    test_set = learnable_set(15, 2);
    experiment.train = train_with_mistake;
    auto says = [](const char *name) {
        mistake = name;
        return error_of([] { check_train(""); });
    };
    CHECK(says("") == "");
    check_says(says("update in place"), "the gradient after an update of train on gpu(0) is ... it "
                                        "equals 2 times the sum of gradients: does the update");
    check_says(says("one epoch"), "train calls after_epoch 1 times in 2 epochs, after 3 ");
    check_says(says("one order"), "epoch 2 of train has the samples in the order of epoch 1; "
                                  "train_iter.epoch() has shuffled them 0 times in this epoch");
    check_says(says("one minibatch"), "epoch 1 of train has 1 steps, and of 20 samples number ... "
                                      " does not occur (12 are not there once)");
    check_says(says("first parameters"), "step 2 of train begins with the parameters with which");
    check_says(says("decay"), "lr is 0.2, but the steps of train have lr = 0.1, 0.05, 0.025, "
                              "0.0125, 0.00625, by what the parameters move");
    check_says(says("last loss"), "the loss of epoch 1 of train is ... it equals the sum of");
    check_says(says("no waitall"), "epoch 1 of train takes ... the host does not wait (waitall)");
    check_says(says("untrained"), "the accuracy of epoch 1 of train is that of other parameters");
    check_says(says("training set"), "the accuracy of epoch 1 of train: of 15 samples some are");
    check_says(says("old accuracy"), "it is what was known before");
    check_says(says("save untrained"), "after_epoch gets other parameters than those that are "
                                       "trained: those that train began with");
    train_set = test_set = {};
}

TEST_CASE("check_exchange: whose numbers are missing, and a wait" * doctest::skip(no_training)) {
    Kept kept;
    set_model("lenet", 0);
    set_option("GPUS=2");
    auto says = [](const Exchange &wrong) {
        exchange = wrong;
        return error_of(check_exchange);
    };
    CHECK(says(allreduce_naive) == "");
    check_says(
        says([](const PerDevice &) {}),
        "number 0, on gpu(0) is 1, not 9 (all numbers are wrong): it equals gpu(0)'s");
    check_says(says([](const PerDevice &g) { allreduce({g[0][0], g[1][0]}); }), "the sum of b1, ");
    check_says(says([](const PerDevice &g) {
                   allreduce_naive(g);
                   add_(g[1][2], g[1][2]);
               }),
               "W2, number 0, on gpu(1) is 18, not 9 (25000 of ... all others right): it "
               "equals 2 times gpu(0)'s + 2 times gpu(1)'s");
    check_says(says([](const PerDevice &g) { // W1's sum is put one further on
                   allreduce_naive(g);
                   const Tensor W1 = reshape(g[0][0], {-1}), shifted = copyto(W1, gpu(0));
                   copyto(rows(shifted, 0, 179), rows(W1, 1, 180));
               }),
               "W1, number 1, on gpu(0) is 9, not 18 ... it equals the sum at another index");
    check_says(says([](const PerDevice &g) { // divided by k twice
                   allreduce_naive(g);
                   for (const std::vector<Tensor> &list : g)
                       for (const Tensor &t : list) copyto(times(0.25f)(t), t);
               }),
               "on gpu(0) is 2.25, not 9 ... it equals 0.25 = 1 / k / k times the sum");
    watch::no_waits = true;
    // (which number is wrong first is a matter of time)
    check_says(says(allreduce_naive), "the sum of ... after each operation: a wait is missing");
    watch::no_waits = false;
}

int main(int argc, char **argv) { return tests_main(argc, argv); }
