// What clang++'s CUDA front end includes first: the stand-in's headers, whose functions it may take
// for a device's, then the qualifiers as CUDA has them. See refused_by_nvcc in cu.sh.
#include <algorithm> // the host's alone
#include <string>
#include <vector>
#pragma clang force_cuda_host_device begin
#include <cmath>
#include <cstdio>
#include <new>
#include "cuComplex.h"
#include "cuda_runtime.h"
cudaError_t cudaConfigureCall(dim3, dim3, size_t = 0, cudaStream_t = nullptr);
#pragma clang force_cuda_host_device end
#undef __global__
#undef __device__
#undef __host__
#undef __managed__
#undef __launch_bounds__
#undef threadIdx
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __managed__ __device__
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))
extern const __device__ uint3 thread_of_device, block_of_device;
extern const __device__ dim3 threads_of_device, blocks_of_device;
#define threadIdx thread_of_device
#define blockIdx block_of_device
#define blockDim threads_of_device
#define gridDim blocks_of_device
