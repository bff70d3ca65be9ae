// Wrong allreduces, one in a file, with what the judge has to say in its first line: the judge's
// own tests. `make exercise SUBMISSION=extras/exercise/wrong/mean.cu` shows one.
// defines: YOURS, chunks
#pragma once
#include "../../../mgpu.cu"
#if __has_include("../../algorithms/algorithms.cu") // some call others
#include "../../algorithms/algorithms.cu"
#endif

// View `count` consecutive chunks of a tensor (n), beginning with chunk j of k.
inline Tensor chunks(const Tensor &t, long j, int k, int count) {
    return rows(t, size(t) * j / k, size(t) * (j + count) / k);
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
