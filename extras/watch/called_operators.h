// The operators that a network has called, read from autograd's tape.
// defines: Call, calls_of
#pragma once
#include "training_steps.h"

struct Call { // of an operator
    std::string op;
    std::vector<int> how; // stride, padding; kernel size
    std::vector<Tensor> inputs;
    Tensor y;
    size_t number; // on the tape
};

// Return what conv2d was called with, as far as the shapes of X, W and y tell.
static std::vector<int> stride_and_padding(const Tensor &X, const Tensor &W, const Tensor &y) {
    const int K = W.shape[2];
    for (int stride = 1; stride <= K + 1; stride++)
        for (int padding = 0; padding < K; padding++)
            if ((X.shape[2] + 2 * padding - K) / stride + 1 == y.shape[2] &&
                (X.shape[3] + 2 * padding - K) / stride + 1 == y.shape[3])
                return {stride, padding};
    return {1, 0};
}
static std::vector<int> kernel_size(const Tensor &X, const Tensor &y) { // of a pool
    for (int K = X.shape[2]; K > 1; K--)
        if (X.shape[2] / K == y.shape[2] && X.shape[3] / K == y.shape[3]) return {K};
    return {1};
}

// Return the operators on the tape of y's device, in order, the last of which made y.
static std::vector<Call> calls_of(const Tensor &y) {
    const std::vector<TapeEntry> &tape = tapes[y.device.id];
    std::vector<Call> list;
    for (size_t i = 0; i < tape.size(); i++) {
        Call call = {tape[i].op, {}, tape[i].inputs, y, i};
        bool used = tape[i].dy == y.grad;
        for (size_t j = i + 1; j < tape.size(); j++)
            for (const Tensor &X : tape[j].inputs)
                if (X.grad == tape[i].dy) call.y = X, used = true;
        if (!used) continue; // its numbers are not known
        call.y.shape = tape[i].dy->shape;
        if (call.op == "conv2d")
            call.how = stride_and_padding(call.inputs[0], call.inputs[1], call.y);
        if (call.op == "avg_pool2d" || call.op == "max_pool2d")
            call.how = kernel_size(call.inputs[0], call.y);
        list.push_back(call);
    }
    return list;
}
