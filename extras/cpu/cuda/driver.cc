// This file implements the driver API of ../cuda.h.
#include "../cuda.h"
#include "machine.h"

#include <atomic>

namespace cuda_cpu {
static std::atomic<bool> initialized{false}; // by cuInit()

static CUresult check_device(const void *result, CUdevice device) {
    if (!initialized) return CUDA_ERROR_NOT_INITIALIZED;
    if (!valid_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    return result ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
} // namespace cuda_cpu

using namespace cuda_cpu;

CUresult cuInit(unsigned flags) {
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    initialized = true;
    return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int *version) {
    if (!version) return CUDA_ERROR_INVALID_VALUE;
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char **name) {
    if (!name) return CUDA_ERROR_INVALID_VALUE;
    *name = nullptr;
    switch (error) {
#define CUDA_CPU_NAME(value, number)                                                               \
    case value: *name = #value; return CUDA_SUCCESS;
        CUDA_CPU_DRIVER_ERRORS(CUDA_CPU_NAME)
#undef CUDA_CPU_NAME
    }
    return CUDA_ERROR_INVALID_VALUE;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
    if (!text) return CUDA_ERROR_INVALID_VALUE;
    const char *name;
    *text = nullptr;
    if (CUresult unknown = cuGetErrorName(error, &name)) return unknown;
    *text = cudaGetErrorString((cudaError_t)error);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    if (CUresult error = check_device(count, 0)) return error;
    return (CUresult)cudaGetDeviceCount(count);
}
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    if (CUresult error = check_device(device, ordinal)) return error;
    *device = ordinal;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char *name, int bytes, CUdevice device) {
    if (CUresult error = check_device(name, device)) return error;
    cudaDeviceProp prop;
    cudaGetDeviceProperties(&prop, device);
    if (bytes <= 0) return CUDA_ERROR_INVALID_VALUE;
    snprintf(name, bytes, "%s", prop.name);
    return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    if (CUresult error = check_device(bytes, device)) return error;
    *bytes = machine().devices[device]->total;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    if (CUresult error = check_device(value, device)) return error;
    return (CUresult)cudaDeviceGetAttribute(value, attribute, device);
}
