// Complex numbers, as float2 and double2: cuComplex.h of CUDA's toolkit.
#pragma once

#include "cuda_runtime.h"

#define CUDA_CPU_COMPLEX(Complex, T, make, f)                                                      \
    typedef T##2 Complex;                                                                          \
    inline Complex make(T x, T y) { return {x, y}; }                                               \
    inline T cuCreal##f(Complex z) { return z.x; }                                                 \
    inline T cuCimag##f(Complex z) { return z.y; }                                                 \
    inline T cuCabs##f(Complex z) { return hypot(z.x, z.y); }                                      \
    inline Complex cuConj##f(Complex z) { return {z.x, -z.y}; }                                    \
    inline Complex cuCadd##f(Complex a, Complex b) { return {a.x + b.x, a.y + b.y}; }              \
    inline Complex cuCsub##f(Complex a, Complex b) { return {a.x - b.x, a.y - b.y}; }              \
    inline Complex cuCmul##f(Complex a, Complex b) {                                               \
        return {a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x};                                     \
    }                                                                                              \
    inline Complex cuCdiv##f(Complex a, Complex b) {                                               \
        const T s = fabs(b.x) + fabs(b.y), x = b.x / s, y = b.y / s, n = (x * x + y * y) * s;      \
        return {(a.x * x + a.y * y) / n, (a.y * x - a.x * y) / n};                                 \
    }                                                                                              \
    inline Complex cuCfma##f(Complex a, Complex b, Complex c) {                                    \
        return cuCadd##f(cuCmul##f(a, b), c);                                                      \
    }
CUDA_CPU_COMPLEX(cuFloatComplex, float, make_cuFloatComplex, f)
CUDA_CPU_COMPLEX(cuDoubleComplex, double, make_cuDoubleComplex, )
#undef CUDA_CPU_COMPLEX
typedef cuFloatComplex cuComplex;
inline cuComplex make_cuComplex(float x, float y) { return {x, y}; }
inline cuDoubleComplex cuComplexFloatToDouble(cuFloatComplex z) { return {z.x, z.y}; }
inline cuFloatComplex cuComplexDoubleToFloat(cuDoubleComplex z) { return {(float)z.x, (float)z.y}; }
