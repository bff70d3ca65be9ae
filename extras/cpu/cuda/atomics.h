// Atomic functions and fences.
#pragma once

#include "blocks.h"

namespace cuda_cpu {
// On a GPU an atomic function orders no other access: what a thread has written before it is seen
// by those that come after it only if __threadfence() stands in between. ThreadSanitizer is told
// just that, and that the first atomic function after a fence is seen itself: who finds that it was
// the last to come may write there. Elsewhere nothing is gained by being weaker than the processor.
inline char fenced_on[64], fenced_system; // stand for that order, see published()
#ifdef CUDA_CPU_TSAN
constexpr int atomic_order = __ATOMIC_RELAXED;
#else
constexpr int atomic_order = __ATOMIC_ACQ_REL;
#endif

// *p = after(*p) as one step; returns what *p was before.
template <class T, class F> __attribute__((always_inline)) inline T atomic_update(T *p, F after) {
    T old, value;
    __atomic_load(p, &old, __ATOMIC_RELAXED);
    do value = after(old);
    while (!__atomic_compare_exchange(p, &old, &value, false, atomic_order, __ATOMIC_RELAXED));
    for (char *order : {&fenced_on[max(0, running.device)], &fenced_system}) {
        observed(order);
#ifdef CUDA_CPU_TSAN
        if (thread->fenced) published(order);
#endif
    }
#ifdef CUDA_CPU_TSAN
    thread->fenced = false;
#endif
    if (worker && !memcmp(&old, &value, sizeof old)) asked_again();
    return old;
}
} // namespace cuda_cpu

#define CUDA_CPU_ATOMIC(name, T, after)                                                            \
    inline T name(T *p, T x) {                                                                     \
        return ::cuda_cpu::atomic_update(p, [x](T old) -> T { return after; });                    \
    }                                                                                              \
    inline T name##_block(T *p, T x) { return name(p, x); }                                        \
    inline T name##_system(T *p, T x) { return name(p, x); }
// clang-format off
#define CUDA_CPU_ATOMICS(T)                                                                        \
    CUDA_CPU_ATOMIC(atomicExch, T, (void(old), x))                                                 \
    CUDA_CPU_ATOMIC(atomicMin, T, x < old ? x : old)                                               \
    CUDA_CPU_ATOMIC(atomicMax, T, old < x ? x : old)                                               \
    CUDA_CPU_ATOMIC(atomicAnd, T, old & x)                                                         \
    CUDA_CPU_ATOMIC(atomicOr, T, old | x)                                                          \
    CUDA_CPU_ATOMIC(atomicXor, T, old ^ x)                                                         \
    inline T atomicCAS(T *p, T compare, T x) {                                                     \
        return ::cuda_cpu::atomic_update(p, [=](T old) { return old == compare ? x : old; });      \
    }
// clang-format on
CUDA_CPU_ATOMICS(int)
CUDA_CPU_ATOMICS(unsigned)
CUDA_CPU_ATOMICS(unsigned long long)
inline unsigned short atomicCAS(unsigned short *p, unsigned short compare, unsigned short x) {
    return ::cuda_cpu::atomic_update(p,
                                     [=](unsigned short old) { return old == compare ? x : old; });
}
CUDA_CPU_ATOMIC(atomicMin, long long, x < old ? x : old)
CUDA_CPU_ATOMIC(atomicMax, long long, old < x ? x : old)
CUDA_CPU_ATOMIC(atomicExch, float, (void(old), x))
CUDA_CPU_ATOMIC(atomicAdd, int, unsigned(old) + x)
CUDA_CPU_ATOMIC(atomicAdd, unsigned, old + x)
CUDA_CPU_ATOMIC(atomicAdd, unsigned long long, old + x)
CUDA_CPU_ATOMIC(atomicAdd, float, old + x)
CUDA_CPU_ATOMIC(atomicAdd, double, old + x)
CUDA_CPU_ATOMIC(atomicSub, int, unsigned(old) - x)
CUDA_CPU_ATOMIC(atomicSub, unsigned, old - x)
CUDA_CPU_ATOMIC(atomicInc, unsigned, old >= x ? 0 : old + 1)
CUDA_CPU_ATOMIC(atomicDec, unsigned, old == 0 || old > x ? x : old - 1)
#undef CUDA_CPU_ATOMICS
#undef CUDA_CPU_ATOMIC

namespace cuda_cpu {
inline void fence(char *order) {
#ifdef CUDA_CPU_TSAN
    thread->fenced = true;
#else
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
    published(order);
    observed(order);
}
} // namespace cuda_cpu
inline void __threadfence() {
    cuda_cpu::fence(&cuda_cpu::fenced_on[::max(0, cuda_cpu::running.device)]);
}
inline void __threadfence_block() { __threadfence(); }
inline void __threadfence_system() { cuda_cpu::fence(&cuda_cpu::fenced_system); }
