// The driver API, which programs ask for the devices, beside the runtime.
// prints: before cuInit: CUDA_ERROR_NOT_INITIALIZED, initialization error
// prints: CUDA 13 or later, devices: as many as cudaGetDeviceCount says
// prints: warps of 32 threads, blocks of 1024, the same name and memory
// prints: the device after the last: CUDA_ERROR_INVALID_DEVICE, invalid device ordinal
#include "check.h"
#include <cstring>
#include <cuda.h>

static void say(const char *what, CUresult result) {
    const char *name = nullptr, *text = nullptr;
    cuGetErrorName(result, &name);
    cuGetErrorString(result, &text);
    printf("%s: %s, %s\n", what, name, text);
}
#define DRIVER_CHECK(call)                                                                         \
    do {                                                                                           \
        const CUresult result = (call);                                                            \
        if (result != CUDA_SUCCESS) say(#call, result);                                            \
    } while (0)

int main() {
    int count = 0, devices = 0, version = 0, driver = 0, threads = 0, lanes = 0;
    say("before cuInit", cuDeviceGetCount(&count));
    DRIVER_CHECK(cuInit(0));
    DRIVER_CHECK(cuDeviceGetCount(&count));
    DRIVER_CHECK(cuDriverGetVersion(&version));
    CHECK(cudaDriverGetVersion(&driver));
    CHECK(cudaGetDeviceCount(&devices));
    printf("CUDA %s, devices: %s\n", version == driver && version >= 13000 ? "13 or later" : "?",
           count == devices ? "as many as cudaGetDeviceCount says" : "another number");
    CUdevice device;
    char name[100];
    size_t bytes = 0;
    cudaDeviceProp prop;
    DRIVER_CHECK(cuDeviceGet(&device, count - 1));
    DRIVER_CHECK(cuDeviceGetName(name, sizeof name, device));
    DRIVER_CHECK(cuDeviceTotalMem(&bytes, device));
    DRIVER_CHECK(cuDeviceGetAttribute(&threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, device));
    DRIVER_CHECK(cuDeviceGetAttribute(&lanes, CU_DEVICE_ATTRIBUTE_WARP_SIZE, device));
    CHECK(cudaGetDeviceProperties(&prop, device));
    const bool same = strcmp(name, prop.name) == 0 && bytes == prop.totalGlobalMem;
    printf("warps of %d threads, blocks of %d, %s name and memory\n", lanes, threads,
           same ? "the same" : "another");
    say("the device after the last", cuDeviceGet(&device, count));
}
