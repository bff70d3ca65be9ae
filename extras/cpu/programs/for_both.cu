// Functions for the host and the device: a header that other compilers read too tells nvcc by
// __CUDACC__, and code for a kind of GPU by __CUDA_ARCH__.
// prints: host: the square root of 16 is 4
// prints: device: the square roots add up to 10.5
#include "check.h"

#ifdef __CUDACC__
#define FOR_BOTH __host__ __device__
#else
#define FOR_BOTH
#endif

FOR_BOTH inline double root(double x) {
#ifdef __CUDA_ARCH__
    return x * rsqrt(x);
#else
    return std::sqrt(x);
#endif
}

// As CUDA's guide has it for GPUs before Pascal
#if __CUDA_ARCH__ < 600 && defined(__CUDA_ARCH__)
__device__ double atomicAdd(double *address, double value) {
    unsigned long long int *bits = (unsigned long long int *)address, old = *bits, assumed;
    do {
        assumed = old;
        old = atomicCAS(bits, assumed, __double_as_longlong(value + __longlong_as_double(assumed)));
    } while (assumed != old);
    return __longlong_as_double(old);
}
#endif

__global__ void add_roots(double *sum, const double *x) {
#if __CUDA_ARCH__ >= 600
    atomicAdd(sum, root(x[threadIdx.x]));
#endif
}

int main() {
    const double x[4] = {16, 9, 4, 2.25};
    double *on_device, *sum, got = 0;
    CHECK(cudaMalloc(&on_device, sizeof x));
    CHECK(cudaMalloc(&sum, sizeof *sum));
    CHECK(cudaMemset(sum, 0, sizeof *sum));
    CHECK(cudaMemcpy(on_device, x, sizeof x, cudaMemcpyHostToDevice));
    add_roots<<<1, 4>>>(sum, on_device);
    CHECK(cudaMemcpy(&got, sum, sizeof got, cudaMemcpyDeviceToHost));
    printf("host: the square root of 16 is %g\n", root(16));
    printf("device: the square roots add up to %g\n", got);
    CHECK(cudaFree(on_device));
    CHECK(cudaFree(sum));
}
