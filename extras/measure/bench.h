// make bench: how long does a training step take, an allreduce, a kernel?
// defines: bench
#pragma once
#include "../watch/training_steps.h"

#include <filesystem>

// A row of build/bench.csv, which has those before it
static std::string bench_rows;
static void bench_row(const std::string &row) {
    printf("%s\n", row.c_str());
    std::filesystem::create_directories("build");
    std::ofstream file("build/bench.csv");
    file << (bench_rows += row + "\n");
    if (!file.flush()) error("cannot write build/bench.csv");
}

// A training step, one minibatch again and again: the median of 5 blocks of steps.
static void bench_step(const std::string &model) {
    use_model(model);
    choose_exchange();
    experiment.init_params();
    const int k = option("GPUS"), batch = option("BATCH");
    const auto step = training_step(replicate(first_devices(k)), batch);
    const double seconds = time_calls(3, 0.5, 5, step);
    bench_row(format("step,%s,%s%s,%d,%d,,%.1f,%.0f,images/s", model.c_str(),
                     option_text("ALLREDUCE").c_str(), overlaps() ? "+overlap" : "", k, batch,
                     seconds * 1e6, batch / seconds));
}

static Tensor convolution(const std::vector<Tensor> &in, [[maybe_unused]] int padding) {
#ifdef NETWORKS
    return conv2d(in[0], in[1], in[2], 1, padding);
#else
    return conv2d(in[0], in[1], in[2]);
#endif
}
// Time three layers, or those of network `only`, forward and backward: by the rung that KERNELS or
// PRECISION chooses, or by each of the tuned operators.
static void bench_kernels(const std::string &only) {
    std::vector<std::string> rungs = {"plain"};
#ifdef FAST
    rungs = {"plain", "tiled", "fast"};
    if (!given("PRECISION")) rungs.push_back("tf32");
    if (given("KERNELS")) rungs = {option_text("KERNELS")};
    if (option_text("PRECISION") == "tf32") rungs = {"tf32"};
#endif
    struct Layer {
        const char *name;
        int N, C, size, O, K, padding;
    };
    const int N = given("BATCH") ? (int)option("BATCH") : on_cpu ? 16 : 256;
    for (const Layer &l :
         {Layer{"lenet conv2", N, 20, 13, 50, 5, 0}, Layer{"resnet18 3x3", N, 64, 28, 64, 3, 1},
          Layer{"lenet dense1", N, 800, 1, 128, 1, 0}}) {
#ifndef NETWORKS
        if (l.padding) continue;
#endif
        if (std::string(l.name).rfind(only, 0) != 0) continue;
        const std::vector<Tensor> inputs =
            get_params({normal(1, {l.N, l.C, l.size, l.size}), normal(0.1f, {l.O, l.C, l.K, l.K}),
                        normal(1, {l.O})},
                       gpu(0));
        const double plane = std::pow(l.size + 2 * l.padding - l.K + 1, 2);
        const double flop = 6.0 * l.N * l.O * plane * l.C * l.K * l.K;
        for (const std::string &rung : rungs) {
#ifdef FAST
            use_kernels(rung);
#endif
            const double us = 1e6 * time_calls(1, 0.05, 3, [&] {
                                  backward(convolution(inputs, l.padding));
                              });
            bench_row(format("kernels,%s,%s,1,%d,,%.1f,%.1f,GFLOP/s", l.name, rung.c_str(),
                             l.N, us, flop / us / 1e3));
        }
    }
}

// allreduce of 8 equal tensors, 4 KB to 256 MB in all, by each algorithm but yours, once if it has
// two names, or by the one that ALLREDUCE names.
static void bench_allreduce(int k) {
    int count = 0;
    CUDA_CHECK(cudaGetDeviceCount(&count));
    const int sharing = k > count ? k : 1; // logical devices that share one memory
    for (long bytes = 4096; bytes <= 256 << 20; bytes *= 4) {
        size_t free = 0, total = 0;
        stream_of(gpu(0));
        CUDA_CHECK(cudaMemGetInfo(&free, &total));
        if (free / sharing < 5 * (size_t)bytes) {
            printf("%ld bytes and more: skipped, the devices have too little memory\n", bytes);
            break;
        }
        const PerDevice grads = make_grads(k, std::vector<int>(8, bytes / 8 / sizeof(float)));
        std::set<void (*)(const PerDevice &)> timed = {allreduce_yours};
        for (const Algorithm &a : algorithms) {
            const bool wanted = given("ALLREDUCE") ? a.name == option_text("ALLREDUCE")
                                                   : timed.insert(a.run).second;
            if (!wanted) continue;
            if (a.supports && !a.supports(k)) continue;
            const double us = time_allreduce(a.name, grads) * 1e6;
            bench_row(format("allreduce,,%s,%d,,%ld,%.1f,%.3f,GB/s", a.name, k, bytes, us,
                             bytes / us * 2 * (k - 1) / k / 1e3));
        }
        empty_cache();
    }
}

void bench() {
    bench_row("what,model,by,gpus,batch,bytes,us,rate,unit");
    auto wanted = [what = option_text("BENCH")](const char *name) {
        return what == name || what == "all";
    };
    const std::string chosen = has_option("MODEL") && given("MODEL") ? experiment.name : "";
    for (const std::string &name : model_names()) {
        if (!wanted("step")) break;
        const bool slow = on_cpu && name == "resnet18"; // it would take minutes
        if (chosen.empty() ? !slow : name == chosen) bench_step(name);
    }
    for (int k = 2; k <= (int)device_states.size() && wanted("allreduce"); k++) bench_allreduce(k);
    if (wanted("kernels")) bench_kernels(chosen);
}
