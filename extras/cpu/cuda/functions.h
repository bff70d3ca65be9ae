// Device functions: fast mathematics, bits of numbers, the clock.
#pragma once

#include "types.h"

template <class T> T __ldg(const T *p) { return *p; }

// A GPU's fast functions have a few bits less; here they are the exact ones.
#define __expf expf
#define __exp10f exp10f
#define __logf logf
#define __log2f log2f
#define __log10f log10f
#define __sinf sinf
#define __cosf cosf
#define __tanf tanf
#define __powf powf
#define __fmaf_rn fmaf
inline float __fdividef(float x, float y) { return x / y; }
inline float __saturatef(float x) { return x > 0 ? x < 1 ? x : 1 : 0; } // of NaN: 0
extern "C" { // as in C libraries that have them too
inline float rsqrtf(float x) noexcept { return 1 / sqrtf(x); }
inline double rsqrt(double x) noexcept { return 1 / sqrt(x); }
}
namespace cuda_cpu {
template <class To, class From> To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
} // namespace cuda_cpu
inline float __int_as_float(int x) { return cuda_cpu::bits_as<float>(x); }
inline float __uint_as_float(unsigned x) { return cuda_cpu::bits_as<float>(x); }
__forceinline__ unsigned __umulhi(unsigned a, unsigned b) {
    return (unsigned long long)a * b >> 32;
}
inline int __float_as_int(float x) { return cuda_cpu::bits_as<int>(x); }
inline unsigned __float_as_uint(float x) { return cuda_cpu::bits_as<unsigned>(x); }
inline double __longlong_as_double(long long x) { return cuda_cpu::bits_as<double>(x); }
inline long long __double_as_longlong(double x) { return cuda_cpu::bits_as<long long>(x); }

// Counts nanoseconds; clock() is the C library's.
inline long long clock64() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}
