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

CUresult cuInit(unsigned flags) {
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    cuda_cpu::initialized = true;
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
#define CUDA_CPU_NAME(value)                                                                       \
    case value: *name = #value; return CUDA_SUCCESS;
        CUDA_CPU_NAME(CUDA_SUCCESS)
        CUDA_CPU_NAME(CUDA_ERROR_INVALID_VALUE)
        CUDA_CPU_NAME(CUDA_ERROR_OUT_OF_MEMORY)
        CUDA_CPU_NAME(CUDA_ERROR_NOT_INITIALIZED)
        CUDA_CPU_NAME(CUDA_ERROR_DEINITIALIZED)
        CUDA_CPU_NAME(CUDA_ERROR_NO_DEVICE)
        CUDA_CPU_NAME(CUDA_ERROR_INVALID_DEVICE)
        CUDA_CPU_NAME(CUDA_ERROR_INVALID_CONTEXT)
        CUDA_CPU_NAME(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)
        CUDA_CPU_NAME(CUDA_ERROR_INVALID_HANDLE)
        CUDA_CPU_NAME(CUDA_ERROR_NOT_FOUND)
        CUDA_CPU_NAME(CUDA_ERROR_NOT_READY)
        CUDA_CPU_NAME(CUDA_ERROR_ILLEGAL_ADDRESS)
        CUDA_CPU_NAME(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)
        CUDA_CPU_NAME(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED)
        CUDA_CPU_NAME(CUDA_ERROR_TOO_MANY_PEERS)
        CUDA_CPU_NAME(CUDA_ERROR_LAUNCH_FAILED)
        CUDA_CPU_NAME(CUDA_ERROR_NOT_PERMITTED)
        CUDA_CPU_NAME(CUDA_ERROR_NOT_SUPPORTED)
        CUDA_CPU_NAME(CUDA_ERROR_UNKNOWN)
#undef CUDA_CPU_NAME
    }
    return CUDA_ERROR_INVALID_VALUE;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
    if (!text) return CUDA_ERROR_INVALID_VALUE;
    const char *name;
    *text = nullptr;
    if (CUresult unknown = cuGetErrorName(error, &name)) return unknown;
    switch (error) { // those that the runtime has no number for here
    case CUDA_ERROR_NOT_INITIALIZED: *text = "initialization error"; break;
    case CUDA_ERROR_DEINITIALIZED: *text = "driver shutting down"; break;
    case CUDA_ERROR_INVALID_CONTEXT: *text = "invalid device context"; break;
    case CUDA_ERROR_NOT_FOUND: *text = "named symbol not found"; break;
    case CUDA_ERROR_NOT_SUPPORTED: *text = "operation not supported"; break;
    case CUDA_ERROR_UNKNOWN: *text = "unknown error"; break;
    default: *text = cudaGetErrorString((cudaError_t)error);
    }
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    if (CUresult error = cuda_cpu::check_device(count, 0)) return error;
    return (CUresult)cudaGetDeviceCount(count);
}
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    if (CUresult error = cuda_cpu::check_device(device, ordinal)) return error;
    *device = ordinal;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char *name, int bytes, CUdevice device) {
    if (CUresult error = cuda_cpu::check_device(name, device)) return error;
    cudaDeviceProp prop;
    cudaGetDeviceProperties(&prop, device);
    if (bytes <= 0) return CUDA_ERROR_INVALID_VALUE;
    snprintf(name, bytes, "%s", prop.name);
    return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    if (CUresult error = cuda_cpu::check_device(bytes, device)) return error;
    *bytes = cuda_cpu::machine().devices[device]->total;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    if (CUresult error = cuda_cpu::check_device(value, device)) return error;
    return (CUresult)cudaDeviceGetAttribute(value, attribute, device);
}
