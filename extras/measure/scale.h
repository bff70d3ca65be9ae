// make scale: what a training step would take on more devices, from one that is measured here.
// defines: scale
#pragma once
#include "timeline.h"

static constexpr int most_scaled = 16;

// Seconds of a step on gpu(0).
static double seconds_of_step(int batch) {
    const auto replicas = replicate(first_devices(1));
    return time_calls(2, 0.3, 3, training_step(replicas, batch));
}
// What an exchange of gradients sends.
static network::Traffic traffic_of(const std::string &algorithm, const PerDevice &grads) {
    waitall();
    watch::Recorder r(false);
    sum_with(algorithm, grads);
    waitall();
    const network::Traffic traffic = traffic_of(r.ops);
    if (traffic.rounds == 0)
        error("ALLREDUCE=%s sends no message that make scale counts: of kernels that read other "
              "devices' memory it counts what Peers names",
              algorithm.c_str());
    return traffic;
}
// A step of n samples takes a + b * n: two are measured, with the whole minibatch and an eighth of
// it. The exchange follows it and takes what network.h says.
void scale() {
    const std::string fabric = given("FABRIC") ? option_text("FABRIC") : "pcie";
    const network::Network network = network::find_network(fabric);
    const float step_ms = given("STEP_MS") ? option("STEP_MS") : 0;
    const std::string allreduce = option_text("ALLREDUCE");
    const int batch = option("BATCH"), eighth = std::max(1, batch / 8);
    const double whole = seconds_of_step(batch);
    const double part = eighth < batch ? std::min(whole, seconds_of_step(eighth)) : whole;
    const double unit = step_ms > 0 ? step_ms / 1e3 / whole : 1;
    const double most = whole / batch; // a is not negative
    const double slope = eighth < batch ? std::min((whole - part) / (batch - eighth), most) : most;
    auto computes = [&](double n) { return unit * (whole - slope * (batch - n)); };
    const Algorithm &chosen = find_algorithm(allreduce);
    printf(
        "%s, batch %d, on %s: a step on k devices, predicted from one measured here on a single "
        "device%s.\nstrong: one minibatch for all; weak: one for each. Efficiency is relative to "
        "k times the speed.\n%5s %11s %12s %11s %12s %11s   %s\n",
        experiment.name.c_str(), batch, network.name.c_str(),
        step_ms > 0 ? format(", as if it took %g ms", step_ms).c_str() : "", "k", "exchange, ms",
        "strong, ms", "efficiency", "weak, ms", "efficiency", allreduce.c_str());
    std::ofstream file("build/scale.csv");
    file << "k,strong_ms,strong,weak_ms,weak\n";
    const auto sizes = trained_sizes();
    for (int k = 1; k <= std::min(batch, most_scaled); k *= 2) {
        if (chosen.supports && !chosen.supports(k)) continue;
        const double exchange =
            k < 2 ? 0 : traffic_of(allreduce, make_grads(k, sizes)).seconds(network);
        const double strong = computes((double)batch / k) + exchange;
        const double weak = computes(batch) + exchange, one = computes(batch);
        printf("%5d %12.3f %12.3f %10.0f%% %12.3f %10.0f%%\n", k, 1e3 * exchange, 1e3 * strong,
               100 * one / strong / k, 1e3 * weak, 100 * one / weak);
        file << format("%d,%.3f,%.4f,%.3f,%.4f\n", k, 1e3 * strong, one / strong / k, 1e3 * weak,
                       one / weak);
        empty_cache();
    }
    if (!file.flush()) error("cannot write build/scale.csv");
}
