// make summary: the network's operators, and how many FLOPs they are.
// defines: flops, summary
#pragma once
#include "../watch/called_operators.h"

// The FLOPs of an operator's sums of products (a product and an addition are two). A backward has
// as many for dW and, but for the first layer, for dX.
static std::pair<double, double> flops(const Call &c) {         // forward, backward
    const bool products = c.op == "conv2d" || c.op == "linear"; // of X, W, b
    const double terms = products ? size(c.inputs[1]) / size(c.inputs[2]) : 0;
    const double flop = 2 * terms * size(c.y);
    return {flop, c.inputs[0].grad ? 2 * flop : flop};
}
// Return how many bytes of a device's memory have an owner.
static size_t used_bytes(Device device) {
    size_t bytes = 0;
    for (const auto &[p, memory] : watch::allocations)
        if (memory.device == device.id) bytes += memory.bytes;
    return bytes - free_bytes(device);
}
// The operators of a training step, of the first device's part of BATCH images (1 on each): shapes
// and memory of results, parameters, FLOPs. Then the memory of a whole step on each device.
void summary() {
    const int k = option("GPUS"), batch = given("BATCH") ? option("BATCH") : k;
    const int N = ceil_div(batch, k);
    empty_cache(); // of what making the parameters has taken
    const size_t before = watch::taken_bytes;
    const PerDevice device_params = replicate(first_devices(k));
    const size_t parameter_bytes = used_bytes(gpu(0));
    long parameters = 0, result_bytes = 0, all_kept = 0;
    double forward = 0, both = 0;
    std::vector<std::string> rows;
    {
        const Tensor X = full({N, 1, 28, 28}, 0, gpu(0)), y = full({N}, 0, gpu(0));
        for (const Call &c : calls_of(loss(net(X, device_params[0]), y))) {
            long own = 0, memory = sizeof(float) * size(c.y);
            for (const Tensor &t : device_params[0])
                for (const Tensor &input : c.inputs) own += t.data == input.data ? size(t) : 0;
            const auto [flop, back] = flops(c);
            rows.push_back(format("%-22s %-18s %12ld %13.3f %13.3f %9.3f", c.op.c_str(),
                                  str(c.y.shape).c_str(), own, flop / 1e6, back / 1e6,
                                  memory / 1e6));
            parameters += own;
            forward += flop;
            both += flop + back;
            result_bytes += memory;
        }
    }
    stream_of(gpu(0)); // extras/fast/ enqueues what waits
    std::vector<TapeEntry> &tape = tapes[0];
    for (size_t i = rows.size(); i-- > 0; tape.pop_back()) { // what is freed with its entry
        const size_t bytes = used_bytes(gpu(0));
        tape.back() = {};
        rows[i] += format(" %9.3f\n", (bytes - used_bytes(gpu(0))) / 1e6);
        all_kept += bytes - used_bytes(gpu(0));
    }
    printf("%-22s %-18s %12s %13s %13s %9s %9s\n", format("operator, batch %d", N).c_str(),
           "result", "parameters", "MFLOP forward", "backward", "result MB", "kept MB");
    for (const std::string &row : rows) printf("%s", row.c_str());
    printf("%-22s %-18s %12ld %13.3f %13.3f %9.3f %9.3f\n", experiment.name.c_str(), "", parameters,
           forward / 1e6, (both - forward) / 1e6, result_bytes / 1e6, all_kept / 1e6);
    const auto step = training_step(device_params, batch);
    step(); // allocates
    const watch::Recorder recorder(false);
    static std::vector<std::pair<size_t, std::string>> peaks(k); // bytes; in which operation
    watch::on_record = [] {
        const watch::Op &op = watch::recorder->ops.back();
        for (size_t c = 0; c < peaks.size(); c++)
            if (const size_t bytes = used_bytes(gpu(c)); bytes > peaks[c].first)
                peaks[c] = {bytes, std::string(op.kind) + ": " + watch::kernel_name(op.name)};
    };
    step();
    watch::on_record = nullptr;
    for (int c = 0; c < k; c++)
        printf("memory of a step on %s: %.1f MB for parameters and gradients, at most %.1f MB in "
               "all (%s)\n", str(gpu(c)).c_str(), parameter_bytes / 1e6, peaks[c].first / 1e6,
               peaks[c].second.c_str());
    printf("taken from CUDA: %.1f MB\n", (watch::taken_bytes - before) / 1e6);
}
