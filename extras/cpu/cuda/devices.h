// Devices: how many there are, what they can do, and which may use another's memory.
#pragma once

#include "errors.h"

struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor,
        totalConstMem;
    int multiProcessorCount, maxThreadsPerBlock, maxThreadsPerMultiProcessor, maxThreadsDim[3],
        maxGridSize[3], warpSize, major, minor, concurrentKernels, cooperativeLaunch,
        unifiedAddressing, managedMemory, canMapHostMemory;
};

cudaError_t cudaGetDeviceCount(int *count, CUDA_CPU_WHERE);
cudaError_t cudaSetDevice(int device, CUDA_CPU_WHERE);
cudaError_t cudaGetDevice(int *device, CUDA_CPU_WHERE);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *prop, int device, CUDA_CPU_WHERE);

enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1,
    cudaDevAttrMaxBlockDimX = 2,
    cudaDevAttrMaxBlockDimY = 3,
    cudaDevAttrMaxBlockDimZ = 4,
    cudaDevAttrMaxGridDimX = 5,
    cudaDevAttrMaxGridDimY = 6,
    cudaDevAttrMaxGridDimZ = 7,
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrTotalConstantMemory = 9,
    cudaDevAttrWarpSize = 10,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrConcurrentKernels = 31,
    cudaDevAttrMaxThreadsPerMultiProcessor = 39,
    cudaDevAttrUnifiedAddressing = 41,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrStreamPrioritiesSupported = 78,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
    cudaDevAttrManagedMemory = 83,
    cudaDevAttrConcurrentManagedAccess = 89,
    cudaDevAttrCooperativeLaunch = 95,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
    cudaDevAttrHostRegisterSupported = 99,
    cudaDevAttrMaxBlocksPerMultiprocessor = 106,
    cudaDevAttrMemoryPoolsSupported = 115
};
// Of the emulated device: a multiprocessor is a core, and a core runs one block at a time.
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device,
                                   CUDA_CPU_WHERE);

// Wait until the current device has done all that it was given.
cudaError_t cudaDeviceSynchronize();
// The current device is as at the program's start: its memory is freed, its streams and events are
// no more, its variables have their first values, a kernel's fault is forgotten. Pinned and managed
// memory, which is no single device's, stays.
cudaError_t cudaDeviceReset(CUDA_CPU_WHERE);

// With peer access a copy need not be staged through the host, and kernels of the current device
// may use the peer's memory.
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer, CUDA_CPU_WHERE);
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags, CUDA_CPU_WHERE);
cudaError_t cudaDeviceDisablePeerAccess(int peer, CUDA_CPU_WHERE);
