// The names that NVIDIA's samples check errors with. A header of this name beside a program comes
// first.
#pragma once

#include "cuda_runtime.h"
#include "helper_string.h"

#define checkCudaErrors(call) cuda_cpu::end_on_error(call, #call, __FILE__, __LINE__)
#define getLastCudaError(what) cuda_cpu::end_on_error(cudaGetLastError(), what, __FILE__, __LINE__)
#define printLastCudaError getLastCudaError

namespace cuda_cpu {
inline void end_on_error(cudaError_t error, const char *what, const char *file, int line) {
    if (error == cudaSuccess) return;
    fprintf(stderr, "%s:%d: %s: %s (%s)\n", file, line, what, cudaGetErrorString(error),
            cudaGetErrorName(error));
    exit(EXIT_FAILURE);
}
} // namespace cuda_cpu

inline const char *_cudaGetErrorEnum(cudaError_t error) { return cudaGetErrorName(error); }
inline int gpuGetMaxGflopsDeviceId() { return 0; } // all emulated devices are equal
inline int gpuDeviceInit(int device) {
    checkCudaErrors(cudaSetDevice(device));
    return device;
}
// Use the device of -device=1, or the first one.
inline int findCudaDevice(int argc, const char **argv) {
    return gpuDeviceInit(getCmdLineArgumentInt(argc, argv, "device="));
}
