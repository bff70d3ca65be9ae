// The words of CUDA C++ that are not C++: qualifiers, vector types, the variables of a thread.
#pragma once

// No more of namespace std than nvcc brings by itself: a program may have a `size` of its own
#include <assert.h>
#include <ctype.h>
#include <limits.h>
#include <math.h> // as nvcc: abs(x) of a float is a float's, and isnan(x) needs no std::
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <type_traits>
#include <utility>

#define CUDART_VERSION 13000 // of the CUDA whose names and codes these are

#if defined(__SANITIZE_THREAD__)
#define CUDA_CPU_TSAN 1
#elif defined(__SANITIZE_ADDRESS__)
#define CUDA_CPU_ASAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define CUDA_CPU_TSAN 1
#elif __has_feature(address_sanitizer)
#define CUDA_CPU_ASAN 1
#endif
#endif

// Kernels and what they call are always fully optimized, so that the host's code, which is much
// more, need not be. A stack that overflows does so in the page below it, not in another stack.
#if defined(__clang__) || defined(CUDA_CPU_ASAN) || defined(CUDA_CPU_TSAN)
#define CUDA_CPU_OPTIMIZED
#else
#define CUDA_CPU_OPTIMIZED                                                                         \
    __attribute__((optimize("O3", "strict-aliasing", "stack-clash-protection")))
#endif
// The same of a lambda that calls a kernel. g++ before 12 rejects it there: kernels are slower.
#if !defined(__clang__) && __GNUC__ >= 12
#define CUDA_CPU_CALLER CUDA_CPU_OPTIMIZED
#else
#define CUDA_CPU_CALLER
#endif
#define __global__ inline CUDA_CPU_OPTIMIZED
#define __device__ CUDA_CPU_OPTIMIZED
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...) __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __maxnreg__(registers)
#define __grid_constant__
#define CUDART_CB
// The host's variables in this section are those of every device, too.
#define __managed__ __attribute__((section("cuda_cpu_managed")))

// Of what is an error where it is used. g++ before 12 tells it when it generates code.
#if defined(__has_attribute)
#if __has_attribute(unavailable)
#define CUDA_CPU_REFUSED(why) __attribute__((unavailable(why)))
#define CUDA_CPU_REFUSED_TYPE(why) CUDA_CPU_REFUSED(why)
#endif
#endif
#ifndef CUDA_CPU_REFUSED
#define CUDA_CPU_REFUSED(why) __attribute__((error(why)))
#define CUDA_CPU_REFUSED_TYPE(why) // the type is never defined
#endif
#define CUDA_CPU_REFERENCE_TEXT                                                                    \
    "a kernel's parameter cannot be a reference: on a GPU it would be one to memory of the host"
#define CUDA_CPU_REFERENCE CUDA_CPU_REFUSED(CUDA_CPU_REFERENCE_TEXT)

namespace cuda_cpu {
template <class T> constexpr bool is_vector = false; // but of float1, float2, ...
}
// float1, float2, ..., make_float2(x, y), ...: two and four are aligned to be read at once.
#define CUDA_CPU_VECTORS(name, T)                                                                  \
    struct name##1 {                                                                               \
        T x;                                                                                       \
    };                                                                                             \
    struct alignas(2 * sizeof(T)) name##2 {                                                        \
        T x, y;                                                                                    \
    };                                                                                             \
    struct name##3 {                                                                               \
        T x, y, z;                                                                                 \
    };                                                                                             \
    struct alignas(sizeof(T) < 4 ? 4 * sizeof(T) : 16) name##4 {                                   \
        T x, y, z, w;                                                                              \
    };                                                                                             \
    template <> inline constexpr bool cuda_cpu::is_vector<name##1> = true;                         \
    template <> inline constexpr bool cuda_cpu::is_vector<name##2> = true;                         \
    template <> inline constexpr bool cuda_cpu::is_vector<name##3> = true;                         \
    template <> inline constexpr bool cuda_cpu::is_vector<name##4> = true;                         \
    inline name##1 make_##name##1(T x) { return {x}; }                                             \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                     \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                             \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CUDA_CPU_VECTORS(float, float)
CUDA_CPU_VECTORS(double, double)
CUDA_CPU_VECTORS(char, signed char)
CUDA_CPU_VECTORS(uchar, unsigned char)
CUDA_CPU_VECTORS(short, short)
CUDA_CPU_VECTORS(ushort, unsigned short)
CUDA_CPU_VECTORS(int, int)
CUDA_CPU_VECTORS(uint, unsigned)
CUDA_CPU_VECTORS(long, long)
CUDA_CPU_VECTORS(ulong, unsigned long)
CUDA_CPU_VECTORS(longlong, long long)
CUDA_CPU_VECTORS(ulonglong, unsigned long long)
#undef CUDA_CPU_VECTORS
// CUDA 13: four numbers of 8 bytes, aligned to 16 or 32.
#define CUDA_CPU_ALIGNED_VECTOR(name, T, bytes)                                                    \
    struct alignas(bytes) name {                                                                   \
        T x, y, z, w;                                                                              \
    };                                                                                             \
    template <> inline constexpr bool cuda_cpu::is_vector<name> = true;                            \
    inline name make_##name(T x, T y, T z, T w) { return {x, y, z, w}; }
#define CUDA_CPU_ALIGNED_VECTORS(name, T)                                                          \
    CUDA_CPU_ALIGNED_VECTOR(name##_16a, T, 16)                                                     \
    CUDA_CPU_ALIGNED_VECTOR(name##_32a, T, 32)
CUDA_CPU_ALIGNED_VECTORS(double4, double)
CUDA_CPU_ALIGNED_VECTORS(long4, long)
CUDA_CPU_ALIGNED_VECTORS(ulong4, unsigned long)
CUDA_CPU_ALIGNED_VECTORS(longlong4, long long)
CUDA_CPU_ALIGNED_VECTORS(ulonglong4, unsigned long long)
#undef CUDA_CPU_ALIGNED_VECTORS
#undef CUDA_CPU_ALIGNED_VECTOR
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    constexpr operator uint3() const { return {x, y, z}; }
};

// The CUDA thread that this core runs at the moment. It is a local variable of run_threads(), or of
// fiber_main() before that; between kernels it is no_thread.
namespace cuda_cpu {
struct Thread {
    uint3 index;
    int number; // in its block; -1: unknown
    bool stop;  // ends the plain loop after this thread
#ifdef CUDA_CPU_TSAN
    bool fenced = false; // has called __threadfence() since its last atomic function
#endif
};
inline Thread no_thread = {{0, 0, 0}, -1, false};
inline __thread Thread *thread = &no_thread;
} // namespace cuda_cpu
#define threadIdx (::cuda_cpu::thread->index)
// The block of that thread
inline __thread uint3 blockIdx;
inline __thread dim3 blockDim, gridDim;

// For each pair of types that CUDA has them for, and no template, so that they match better than
// std::min and std::max. Of a number and NaN they return the number.
#define CUDA_CPU_MIN_MAX(Result, A, B)                                                             \
    __forceinline__ constexpr Result min(A a, B b) {                                               \
        const Result x = a, y = b;                                                                 \
        return y < x || x != x ? y : x;                                                            \
    }                                                                                              \
    __forceinline__ constexpr Result max(A a, B b) {                                               \
        const Result x = a, y = b;                                                                 \
        return x < y || x != x ? y : x;                                                            \
    }
#define CUDA_CPU_MIN_MAX_OF(type)                                                                  \
    CUDA_CPU_MIN_MAX(type, type, type)                                                             \
    CUDA_CPU_MIN_MAX(unsigned type, unsigned type, unsigned type)                                  \
    CUDA_CPU_MIN_MAX(unsigned type, type, unsigned type)                                           \
    CUDA_CPU_MIN_MAX(unsigned type, unsigned type, type)
CUDA_CPU_MIN_MAX_OF(int)
CUDA_CPU_MIN_MAX_OF(long)
CUDA_CPU_MIN_MAX_OF(long long)
CUDA_CPU_MIN_MAX(float, float, float)
CUDA_CPU_MIN_MAX(double, double, double)
CUDA_CPU_MIN_MAX(double, float, double)
CUDA_CPU_MIN_MAX(double, double, float)
#undef CUDA_CPU_MIN_MAX_OF
#undef CUDA_CPU_MIN_MAX
