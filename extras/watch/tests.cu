// Tests of watch.h: what it records is what happened.
//
//     make test T='-tc=Recorder*'
//
// defines: main

#define MGPU_NO_MAIN
#include "../watch/watch.h"
#include PROGRAM

#include "../watch/training_steps.h"

#include "../tests.h"

// Some training steps of the model on k devices, recorded with their times.
struct Recorded {
    watch::Recorder r;
    PerDevice grads;
    Floats after; // device 0's parameters
    Recorded(int k, int batch, int steps, bool timed = true, bool records = true) : r(timed) {
        watch::recorder = nullptr;
        rng.seed(1);
        experiment.init_params();
        auto device_params = replicate(first_devices(k));
        const auto step = training_step(device_params, batch);
        step();
        waitall();
        if (records) watch::recorder = &r;
        for (int i = 0; i < steps; i++) step();
        if (timed) r.read_times();
        watch::recorder = nullptr;
        grads = gradients(device_params);
        after = all_to_host(device_params[0]);
    }
};

// Sum with this algorithm, watched. Kept puts back what was there.
static void sum_by(const std::string &allreduce, [[maybe_unused]] bool overlapping) {
    typed["ALLREDUCE"] = allreduce;
#ifdef ALGORITHMS
    typed["OVERLAP"] = overlapping ? "1" : "0";
#endif
    choose_exchange(true);
#ifdef ALGORITHMS
    typed.erase("OVERLAP");
#endif
}
TEST_CASE("Recorder: streams in order, waits end after what they are for, every message counts") {
    Kept kept;
    const int k = 3, steps = 2;
    for (const std::string allreduce : {"naive", "bucket", "ring", "host"})
        for (bool overlapping : {false, true}) {
            if (!has_algorithm(allreduce)) continue;
            sum_by(allreduce, overlapping);
            INFO(allreduce, ", overlap ", overlapping);
            const Recorded recorded(k, 6, steps);
            std::vector<double> until(recorded.r.count), sum(recorded.r.count);
            std::map<std::string, int> kinds, names;
            double begin = INFINITY, end = 0;
            for (const watch::Op &op : recorded.r.ops) {
                REQUIRE((op.lane >= 0 && op.lane < recorded.r.count));
                REQUIRE((op.begin >= until[op.lane] && op.end >= op.begin));
                until[op.lane] = op.end;
                sum[op.lane] += op.end - op.begin;
                begin = std::min(begin, op.begin), end = std::max(end, op.end);
                kinds[op.kind]++;
                names[op.name]++;
                if (op.after >= 0) { // a gradient's event stands between the times of its row
                    const watch::Op &other = recorded.r.ops[op.after];
                    const bool gradient = std::string(other.name) == "gradient";
                    const double apart = on_cpu ? 1e-6 : 1e-3; // clocks of several GPUs
                    CHECK(op.end >= (gradient ? other.begin : other.end) - apart);
                }
                CHECK((op.src >= -1) == (std::string(op.kind) == "message"));
            }
            for (double s : sum) CHECK(s <= end - begin);
            for (const char *kind : {"input", "forward", "backward", "sum", "message", "update"}) {
                CAPTURE(std::string(kind));
                const bool on_host = std::string(kind) == "sum" && allreduce == "host";
                CHECK(kinds[kind] >= steps * (on_host ? 0 : std::string(kind) == "sum" ? 1 : k));
            }
            CHECK(kinds.size() == 7);
            CHECK((names["host"] > 0) == (allreduce == "host")); // it waits
            CHECK(names["gradient"] == steps * k * (int)recorded.grads[0].size());
        }
}
TEST_CASE("Recorder: what it records stays as it was") {
    Kept kept;
    sum_by("naive", true);
    const Floats want = Recorded(2, 4, 2, false, false).after;
    for (bool timed : {false, true}) CHECK(Recorded(2, 4, 2, timed).after == want);
}

TEST_CASE("kernel_name: of a launch, in CUDA and in C++") {
    CHECK(watch::kernel_name("relu_kernel<<"
                             "<blocks(n), threads>>"
                             ">(y)") == "relu_kernel");
    CHECK(watch::kernel_name("pool2d_kernel<Window, fixed> <<"
                             "<1, block>>"
                             ">(y)") == "pool2d_kernel");
    CHECK(watch::kernel_name(
              "(::cuda_cpu::configured(::cuda_cpu::Launch(\"product_kernel<tm, tn>\", \"f\"") ==
          "product_kernel");
    CHECK(watch::kernel_name("copy in") == "copy in");
}

int main(int argc, char **argv) { return tests_main(argc, argv); }
