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
// The operators of a training step on one device, of BATCH images (1): their results' shapes and
// memory, their parameters, their FLOPs.
void summary() {
    const int N = given("BATCH") ? options.batch : 1;
    empty_cache(); // of what making the parameters has taken
    const size_t before = watch::taken_bytes;
    const std::vector<Tensor> p = get_params(params, gpu(0));
    const Tensor X = full({N, 1, 28, 28}, 0, gpu(0)), y = full({N}, 0, gpu(0));
    std::vector<Call> list;
    {
        const Tensor l = loss(net(X, p), y);
        list = calls_of(l);
        backward(l);
    }
    long parameters = 0, bytes = 0;
    double forward = 0, both = 0;
    printf("%-22s %-18s %12s %13s %13s %9s\n", format("operator, batch %d", N).c_str(), "result",
           "parameters", "MFLOP forward", "backward", "result MB");
    for (const Call &c : list) {
        long own = 0, memory = sizeof(float) * size(c.y);
        for (const Tensor &t : p)
            for (const Tensor &input : c.inputs) own += t.data == input.data ? size(t) : 0;
        const auto [flop, back] = flops(c);
        printf("%-22s %-18s %12ld %13.3f %13.3f %9.3f\n", c.op.c_str(), str(c.y.shape).c_str(), own,
               flop / 1e6, back / 1e6, memory / 1e6);
        parameters += own;
        forward += flop;
        both += flop + back;
        bytes += memory;
    }
    printf("%-22s %-18s %12ld %13.3f %13.3f %9.3f\n", experiment.name.c_str(), "", parameters,
           forward / 1e6, (both - forward) / 1e6, bytes / 1e6);
    waitall();
    printf("device memory of a step, parameters and gradients included: %.1f MB\n",
           (watch::taken_bytes - before) / 1e6);
}
