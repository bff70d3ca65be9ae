// Wrong allreduces, one in a file, with what the judge has to say in its first line: the judge's
// own tests. `make exercise SUBMISSION=extras/exercise/wrong/mean.cu` shows one.
// defines: YOURS, chunks, Others, wait_for_others
#pragma once
#include "../../../mgpu.cu"
#include "../../hooks.h"
#if __has_include("../../algorithms/algorithms.cu") // some call others
#include "../../algorithms/algorithms.cu"
#endif

// View `count` consecutive chunks of a tensor (n), beginning with chunk j of k.
inline Tensor chunks(const Tensor &t, long j, int k, int count) {
    return rows(t, size(t) * j / k, size(t) * (j + count) / k);
}

// What a kernel needs that reads other devices' memory
struct Others {
    const float *x[8];
    int k;
};
inline Others others(const std::vector<Tensor> &flat) {
    Others o = {{}, (int)flat.size()};
    for (int c = 0; c < o.k; c++) o.x[c] = flat[c].ptr();
    return o;
}
__global__ void sum_others_kernel(float *sum, Others o, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float s = 0;
    for (int c = 0; c < o.k; c++) s += o.x[c][i];
    sum[i] = s;
}
inline void wait_for_others(int k) {
    for (int c = 0; c < k; c++)
        for (int d = 0; d < k; d++)
            if (c != d) make_wait(gpu(c), gpu(d));
}

// YOURS(name) { ... } defines an allreduce of `grads`. The judge finds it as `name` and, where the
// file is compiled alone, as `yours`.
struct Yours {
    Yours(const char *name, void (*run)(const PerDevice &grads),
          bool (*supports)(int k) = nullptr) {
#ifdef ALL_WRONG
        algorithms.push_back({name, run, supports});
#else
        for (Algorithm &a : algorithms)
            if (std::string(a.name) == "yours") a = {"yours", run, supports};
        (void)name;
#endif
    }
};
#define YOURS(name, ...)                                                                           \
    static void allreduce_##name(const PerDevice &grads);                                          \
    static const Yours name##_is_there(#name, allreduce_##name, ##__VA_ARGS__);                    \
    static void allreduce_##name([[maybe_unused]] const PerDevice &grads)
