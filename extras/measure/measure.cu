// Counts, times and draws what mgpu.cu does, which it includes and watches from
// outside (watch.h).
// defines: run_measure, main
//
//     measure bench|trace|profile|summary|scale NAME=value ...   mgpu's options, and its own
#define MGPU_NO_MAIN
#include "../watch/watch.h"

#ifndef PROGRAM
#define PROGRAM "../../mgpu.cu"
#endif
#include PROGRAM

#ifdef FAST // only extras/fast/ tells what kernels use
static const bool counting = [] {
    on_use = [](const Tensor &tensor) { watch::touch(size(tensor)); };
    return true;
}();
#endif

#ifdef ALGORITHMS
static const bool counting_reads = [] {
    on_peers = [](const Tensors &read) {
        for (const Tensor &x : read)
            watch::read_by_kernel(x.device.id, sizeof(float) * size(x), x.ptr());
    };
    return true;
}();
#endif

#include "bench.h"
#include "profile.h"
#include "scale.h"
#include "summary.h"
#include "timeline.h"

struct Command {
    const char *name, *help;
    void (*run)();
};
static const Command commands[] = {
    {"bench", "time step, allreduce, kernels, or all: build/bench.csv", bench},
    {"trace", "write the operations of three steps and their times to build/trace.csv", trace},
    {"profile", "print the times of the kernels and copies of a step", profile},
    {"summary", "print the operators: shapes, parameters, FLOPs, memory (for 1 image)", summary},
    {"scale", "predict a step on 1 to 16 devices: build/scale.csv", scale},
};
static const Command *command = nullptr;

static const std::vector<Option> measure_options = {
    {"BENCH", "text", "all", "part of make bench: step, allreduce, kernels or all"},
};
static const Option step_count = {"STEPS", "whole number", "3; of profile: for 1 s",
                                  "steps that are recorded", 1};
static const Option network_option = {"FABRIC", "text", "of scale: pcie",
                                      "network of another machine"};
static const Option profile_option = {"PROFILE", "text", "none", "times of kernels for FABRIC"};
static const Option step_time = {"STEP_MS", "number", "measured", "milliseconds of a step", 1e-6};

static void run_measure() {
    const bool bench = command->run == ::bench;
    if (given("BENCH") && !bench) error("BENCH does not apply to %s", command->name);
    const std::string part = option_text("BENCH");
    const std::set<std::string> parts = {"all", "step", "allreduce", "kernels"};
    if (!parts.count(part))
        error("BENCH=%s is unknown: choose one of all, step, allreduce, kernels", part.c_str());
    const bool few = part != "all" && part != "allreduce";
    const bool scaled = command->run == ::scale;
    const bool chosen = !bench || few || given("GPUS");
    const int devices = scaled ? most_scaled : chosen ? option("GPUS") : 4;
    if (!on_cpu && !bench) watch::show_devices(devices);
    // As run_program() without the data: the samples are random ones
    if (on_cpu) setenv("CUDA_CPU_DEVICES", std::to_string(devices).c_str(), 0);
    use_devices(devices, bench);
    rng.seed(option("SEED"));
    experiment.init_params();
    choose_exchange(!bench);
    command->run();
    params.clear();
}
// The command is the first word; what follows is mgpu's command line with these options.
int measure_main(int argc, char **argv) {
    const std::string word = argc > 1 ? argv[1] : "";
    for (const Command &c : commands)
        if (word == c.name) command = &c;
    if (!command) {
        fprintf(stderr, "measure: the first word must be one of these:\n");
        for (const Command &c : commands) fprintf(stderr, "  %-8s %s\n", c.name, c.help);
        return 1;
    }
    option_table.insert(option_table.end(), measure_options.begin(), measure_options.end());
    if (command->run == trace || command->run == profile) option_table.push_back(step_count);
    if (command->run == trace || command->run == scale) option_table.push_back(network_option);
    if (command->run == trace) option_table.push_back(profile_option);
    if (command->run == scale) option_table.push_back(step_time);
    run = run_measure;
    return mgpu_main(argc - 1, argv + 1);
}

#ifndef MEASURE_NO_MAIN // its tests have a main of their own
int main(int argc, char **argv) { return measure_main(argc, argv); }
#endif
