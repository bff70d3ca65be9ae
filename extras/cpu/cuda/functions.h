// Device functions: fast mathematics, rounding, bits of numbers, the clock.
#pragma once

#include "blocks.h"

#include <fenv.h>

template <class T> T __ldg(const T *p) { return *p; }
#define __ldca __ldg
#define __ldcg __ldg
#define __ldcs __ldg
#define __ldcv __ldg
#define __ldlu __ldg
template <class T> void __stwb(T *p, std::common_type_t<T> value) { *p = value; }
#define __stcg __stwb
#define __stcs __stwb
#define __stwt __stwb

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
#define __sincosf sincosf
#define __fdividef fdividef
inline float fdividef(float x, float y) { return x / y; }
inline float __saturatef(float x) { return x > 0 ? x < 1 ? x : 1 : 0; } // of NaN: 0
extern "C" { // as in C libraries that have them too
inline float rsqrtf(float x) noexcept { return 1 / sqrtf(x); }
inline double rsqrt(double x) noexcept { return 1 / sqrt(x); }
}

// What CUDA has and the C library lacks, of doubles and, with an f, of floats
#define CUDA_CPU_MATH(name, parameters, value)                                                     \
    CUDA_CPU_MATH_OF(double, name, parameters, value)                                              \
    CUDA_CPU_MATH_OF(float, name##f, parameters, value)
#define CUDA_CPU_MATH_OF(T, name, parameters, value)                                               \
    inline T name parameters(T) { return (T)(value); }
#define CUDA_CPU_1(T) (T x)
#define CUDA_CPU_2(T) (T x, T y)
#define CUDA_CPU_3(T) (T x, T y, T z)
#define CUDA_CPU_4(T) (T x, T y, T z, T w)
CUDA_CPU_MATH(rcbrt, CUDA_CPU_1, 1 / cbrt((double)x))
CUDA_CPU_MATH(sinpi, CUDA_CPU_1, sin(M_PI *remainder((double)x, 2)))
CUDA_CPU_MATH(cospi, CUDA_CPU_1, cos(M_PI *remainder((double)x, 2)))
CUDA_CPU_MATH(normcdf, CUDA_CPU_1, erfc(-x *M_SQRT1_2) / 2)
CUDA_CPU_MATH(rhypot, CUDA_CPU_2, 1 / hypot((double)x, (double)y))
CUDA_CPU_MATH(norm3d, CUDA_CPU_3, hypot(hypot((double)x, y), (double)z))
CUDA_CPU_MATH(rnorm3d, CUDA_CPU_3, 1 / hypot(hypot((double)x, y), (double)z))
CUDA_CPU_MATH(norm4d, CUDA_CPU_4, hypot(hypot((double)x, y), hypot((double)z, w)))
CUDA_CPU_MATH(rnorm4d, CUDA_CPU_4, 1 / hypot(hypot((double)x, y), hypot((double)z, w)))
inline void sincospi(double x, double *s, double *c) { *s = sinpi(x), *c = cospi(x); }
inline void sincospif(float x, float *s, float *c) { *s = sinpif(x), *c = cospif(x); }

// One operation, rounded to the nearest number, towards zero, up or down
namespace cuda_cpu {
template <class T> void settle(T &x) { asm volatile("" : "+m"(x) : : "memory"); }
template <class To, class F, class... T> To rounded(int mode, F f, T... x) {
    const int before = fegetround();
    fesetround(mode);
    (settle(x), ...); // no operation is moved over these
    To result = f(x...);
    settle(result);
    fesetround(before);
    return result;
}
// A number that is too large becomes the largest, and NaN zero.
template <class To> To saturated(double x) {
    const double end = ldexp(1, 8 * sizeof(To) - std::is_signed<To>::value);
    const To most = std::is_signed<To>::value ? To(~0ull >> (65 - 8 * sizeof(To))) : To(~0ull);
    const double least = std::is_signed<To>::value ? -end : 0;
    return x != x ? 0 : x >= end ? most : x <= least ? To(least) : To(x);
}
} // namespace cuda_cpu
#define CUDA_CPU_ROUNDED(name, To, parameters, T, value, ...)                                      \
    CUDA_CPU_ROUNDED_BY(name##_rn, FE_TONEAREST, To, parameters, T, value, __VA_ARGS__)            \
    CUDA_CPU_ROUNDED_BY(name##_rz, FE_TOWARDZERO, To, parameters, T, value, __VA_ARGS__)           \
    CUDA_CPU_ROUNDED_BY(name##_ru, FE_UPWARD, To, parameters, T, value, __VA_ARGS__)               \
    CUDA_CPU_ROUNDED_BY(name##_rd, FE_DOWNWARD, To, parameters, T, value, __VA_ARGS__)
#define CUDA_CPU_ROUNDED_BY(name, mode, To, parameters, T, value, ...)                             \
    inline To name parameters(T) {                                                                 \
        return cuda_cpu::rounded<To>(                                                              \
            mode, [] parameters(T) -> To { return value; }, __VA_ARGS__);                          \
    }
#define CUDA_CPU_ARITHMETIC(prefix, T, fused)                                                      \
    CUDA_CPU_ROUNDED(prefix##add, T, CUDA_CPU_2, T, x + y, x, y)                                   \
    CUDA_CPU_ROUNDED(prefix##sub, T, CUDA_CPU_2, T, x - y, x, y)                                   \
    CUDA_CPU_ROUNDED(prefix##mul, T, CUDA_CPU_2, T, x *y, x, y)                                    \
    CUDA_CPU_ROUNDED(prefix##div, T, CUDA_CPU_2, T, x / y, x, y)                                   \
    CUDA_CPU_ROUNDED(prefix##rcp, T, CUDA_CPU_1, T, 1 / x, x)                                      \
    CUDA_CPU_ROUNDED(prefix##sqrt, T, CUDA_CPU_1, T, sqrt((T)x), x)                                \
    CUDA_CPU_ROUNDED(fused, T, CUDA_CPU_3, T, fma((T)x, (T)y, (T)z), x, y, z)
CUDA_CPU_ARITHMETIC(__f, float, __fmaf)
CUDA_CPU_ARITHMETIC(__d, double, __fma)
#define CUDA_CPU_CONVERSIONS(name, T)                                                              \
    CUDA_CPU_ROUNDED(__float2##name, T, CUDA_CPU_1, float, cuda_cpu::saturated<T>(rint(x)), x)     \
    CUDA_CPU_ROUNDED(__double2##name, T, CUDA_CPU_1, double, cuda_cpu::saturated<T>(rint(x)), x)   \
    CUDA_CPU_ROUNDED(__##name##2float, float, CUDA_CPU_1, T, (float)x, x)                          \
    CUDA_CPU_ROUNDED(__##name##2double, double, CUDA_CPU_1, T, (double)x, x)
CUDA_CPU_CONVERSIONS(int, int)
CUDA_CPU_CONVERSIONS(uint, unsigned)
CUDA_CPU_CONVERSIONS(ll, long long)
CUDA_CPU_CONVERSIONS(ull, unsigned long long)
CUDA_CPU_ROUNDED(__double2float, float, CUDA_CPU_1, double, (float)x, x)
inline float __frsqrt_rn(float x) { return 1 / sqrt((double)x); }
#undef CUDA_CPU_MATH
#undef CUDA_CPU_CONVERSIONS
#undef CUDA_CPU_ARITHMETIC

// The bits of numbers. (-Og would not inline them in kernels.)
namespace cuda_cpu {
template <class To, class From> __forceinline__ To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
} // namespace cuda_cpu
__forceinline__ float __int_as_float(int x) { return cuda_cpu::bits_as<float>(x); }
__forceinline__ float __uint_as_float(unsigned x) { return cuda_cpu::bits_as<float>(x); }
__forceinline__ int __float_as_int(float x) { return cuda_cpu::bits_as<int>(x); }
__forceinline__ unsigned __float_as_uint(float x) { return cuda_cpu::bits_as<unsigned>(x); }
__forceinline__ double __longlong_as_double(long long x) { return cuda_cpu::bits_as<double>(x); }
__forceinline__ long long __double_as_longlong(double x) { return cuda_cpu::bits_as<long long>(x); }
inline int __double2hiint(double x) { return __double_as_longlong(x) >> 32; }
inline int __double2loint(double x) { return (int)__double_as_longlong(x); }
inline double __hiloint2double(int high, int low) {
    return __longlong_as_double((long long)((unsigned long long)high << 32 | (unsigned)low));
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline unsigned long long __brevll(unsigned long long x) {
    unsigned long long reversed = 0;
    for (int bit = 0; bit < 64; bit++) reversed |= (x >> bit & 1) << (63 - bit);
    return reversed;
}
inline unsigned __brev(unsigned x) { return __brevll(x) >> 32; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    unsigned bytes = 0;
    for (int i = 0; i < 4; i++)
        bytes |= unsigned(((unsigned long long)y << 32 | x) >> 8 * (selector >> 4 * i & 7) & 255)
                 << 8 * i;
    return bytes;
}
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned by) {
    return ((unsigned long long)high << 32 | low) << min(by, 32u) >> 32;
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned by) {
    return (unsigned)(((unsigned long long)high << 32 | low) >> min(by, 32u));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
    return __funnelshift_lc(low, high, by % 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return __funnelshift_rc(low, high, by % 32);
}

// Products, means and differences of integers
__forceinline__ unsigned __umulhi(unsigned a, unsigned b) {
    return (unsigned long long)a * b >> 32;
}
inline int __mulhi(int a, int b) { return (long long)a * b >> 32; }
__extension__ inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned __int128)a * b >> 64;
}
__extension__ inline long long __mul64hi(long long a, long long b) { return (__int128)a * b >> 64; }
inline unsigned __umul24(unsigned a, unsigned b) { return (a & 0xffffff) * (b & 0xffffff); }
inline int __mul24(int a, int b) {
    return int(unsigned(int((unsigned)a << 8) >> 8) * unsigned(int((unsigned)b << 8) >> 8));
}
inline unsigned __sad(int x, int y, unsigned z) { return z + (x < y ? 0u + y - x : 0u + x - y); }
inline unsigned __usad(unsigned x, unsigned y, unsigned z) { return z + max(x, y) - min(x, y); }
inline int __hadd(int a, int b) { return ((long long)a + b) >> 1; }
inline int __rhadd(int a, int b) { return ((long long)a + b + 1) >> 1; }
inline unsigned __uhadd(unsigned a, unsigned b) { return ((unsigned long long)a + b) >> 1; }
inline unsigned __urhadd(unsigned a, unsigned b) { return ((unsigned long long)a + b + 1) >> 1; }
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 32; i += 8) c += (signed char)(a >> i) * (signed char)(b >> i);
    return c;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    for (int i = 0; i < 32; i += 8) c += (a >> i & 255) * (b >> i & 255);
    return c;
}
#define CUDA_CPU_MIN_MAX(prefix, T)                                                                \
    inline T prefix##min(T a, T b) { return b < a ? b : a; }                                       \
    inline T prefix##max(T a, T b) { return a < b ? b : a; }
CUDA_CPU_MIN_MAX(u, unsigned)
CUDA_CPU_MIN_MAX(ll, long long)
CUDA_CPU_MIN_MAX(ull, unsigned long long)
#undef CUDA_CPU_MIN_MAX

// Of math_constants.h
#define CUDART_INF_F INFINITY
#define CUDART_NAN_F NAN
#define CUDART_PI_F 3.14159274f
#define CUDART_PIO2_F 1.57079637f
#define CUDART_SQRT_TWO_F 1.41421356f
#define CUDART_INF ((double)INFINITY)
#define CUDART_NAN ((double)NAN)
#define CUDART_PI M_PI
#define CUDART_PIO2 M_PI_2
#define CUDART_SQRT_TWO M_SQRT2

// Returns at once: who waits asks again.
inline void __nanosleep(unsigned) {}
// Counts nanoseconds; clock() is the C library's.
inline long long clock64() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}
