// Counts, times and draws what mgpu.cu does, which it includes and watches from
// outside (watch.h).
// defines: run_measure, main
//
//     measure bench|trace|profile|summary|dry-run NAME=value ...    mgpu's options, and some of its own
#define MGPU_NO_MAIN
#include "../watch/watch.h"

#ifndef PROGRAM
#define PROGRAM "../../mgpu.cu"
#endif
#include PROGRAM

#ifdef FAST // only extras/fast/ tells what kernels use
static const bool counting = [] {
    on_use = [](const Tensor &tensor) { watch::touch(size(tensor)); };
    return watch::touches_told = true;
}();
#endif

#include "bench.h"
#include "profile.h"
#include "summary.h"
#include "trace.h"

struct Command {
    const char *name, *help;
    void (*run)();
};
static const Command commands[] = {
    {"bench", "time step, allreduce, kernels, or all: build/bench.csv", bench},
    {"trace", "print the operations of three steps and their times, as CSV (make trace)", trace},
    {"profile", "print the times of the kernels and copies of a step", profile},
    {"summary", "print the operators: shapes, parameters, FLOPs, memory (for 1 image)", summary},
    {"dry-run", "print the operations of an exchange on devices that do not exist", dry_run},
};
static const Command *command = nullptr;

static const std::vector<Option> measure_options = {
    {"BENCH", &bench_what, "part of make bench: step, allreduce, kernels or all (all)"},
};
static const Option step_count = {"STEPS", &steps,
                                  "steps that are recorded (3; of profile: for 1 s)"};
static const Option dry_gpus = {"DRY_GPUS", &dry_devices, "devices (8)", 1, 1024};
static const Option dry_nodes = {"DRY_NODE", &dry_node, "devices of a process (all)", 1, 1024};

static void run_measure() {
    const bool bench = command->run == ::bench;
    if (given("BENCH") && !bench) error("BENCH does not apply to %s", command->name);
    const std::set<std::string> parts = {"all", "step", "allreduce", "kernels"};
    if (!parts.count(bench_what))
        error("BENCH=%s is unknown: choose one of all, step, allreduce, kernels",
              bench_what.c_str());
    const bool few = bench_what != "all" && bench_what != "allreduce";
    const int devices = !bench || few || given("GPUS") ? options.gpus : 4;
    if (!on_cpu && !bench) watch::show_devices(devices);
    // As run_program() without the data: the samples are random ones
    if (on_cpu) setenv("CUDA_CPU_DEVICES", std::to_string(devices).c_str(), 0);
    use_devices(devices, bench);
    rng.seed(options.seed);
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
    if (command->run == dry_run) option_table.insert(option_table.end(), {dry_gpus, dry_nodes});
    if (command->run == trace || command->run == profile) option_table.push_back(step_count);
    run = run_measure;
    return mgpu_main(argc - 1, argv + 1);
}

#ifndef MEASURE_NO_MAIN // its tests have a main of their own
int main(int argc, char **argv) { return measure_main(argc, argv); }
#endif
