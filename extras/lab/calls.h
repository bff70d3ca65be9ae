// The operators that a network calls, written down.
// defines: Call, calls_of
#pragma once
#include "common.h"

struct Call { // of an operator
    std::string op;
    std::vector<int> how; // stride, padding; KH, KW, stride, max
    std::vector<Tensor> inputs;
    Tensor y;
};
// The calls of operators in `work`, by functions in the table that write each down. They make the
// call with the table as it was: with the operators that are there, or with mgpu.cu's own.
static std::vector<Call> *calls = nullptr;
static Operators before_calls;
static void watch_operators();
template <class Work>
static Tensor write_down(const char *op, std::vector<int> how, std::vector<Tensor> inputs,
                         const Work &work) {
    operators = before_calls;
    const Tensor y = work();
    calls->push_back({op, std::move(how), std::move(inputs), y});
    watch_operators();
    return y;
}
static void watch_operators() {
    operators.conv2d = [](const Tensor &X, const Tensor &W, const Tensor &b, const ConvShape &s) {
        return write_down("conv2d", {s.stride, s.padding}, {X, W, b},
                          [&] { return conv2d(X, W, b, s.stride, s.padding); });
    };
    operators.linear = [](const Tensor &X, const Tensor &W, const Tensor &b) {
        return write_down("linear", {}, {X, W, b}, [&] { return linear(X, W, b); });
    };
    operators.relu = [](const Tensor &X) {
        return write_down("relu", {}, {X}, [&] { return relu(X); });
    };
    operators.add = [](const Tensor &A, const Tensor &B) {
        return write_down("add", {}, {A, B}, [&] { return add(A, B); });
    };
    operators.pool2d = [](const char *op, const Tensor &X, const PoolShape &s) {
        return write_down(op, {s.KH, s.KW, s.S, s.max}, {X},
                          [&] { return pool2d(op, X, s.KH, s.KW, s.S, s.max); });
    };
    operators.batch_norm = [](const Tensor &X, const Tensor &gamma, const Tensor &beta,
                              const Tensor &mean, const Tensor &var) {
        return write_down("batch_norm", {}, {X, gamma, beta, mean, var},
                          [&] { return batch_norm(X, gamma, beta, mean, var); });
    };
}
static std::vector<Call> calls_of(const std::function<void()> &work) {
    std::vector<Call> list;
    calls = &list;
    before_calls = operators;
    watch_operators();
    work();
    operators = before_calls;
    return list;
}
