// Devices: how many there are, what they can do, and which may use another's memory.
#pragma once

#include "errors.h"

// What a CPU has nothing of, such as registers of a multiprocessor, textures or a PCI bus, is 0.
struct cudaDeviceProp {
    char name[256], uuid[16], luid[8];
    size_t totalGlobalMem, totalConstMem, memPitch;
    size_t sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor,
        reservedSharedMemPerBlock;
    int major, minor, multiProcessorCount, warpSize;
    int maxThreadsPerBlock, maxThreadsPerMultiProcessor, maxBlocksPerMultiProcessor,
        maxThreadsDim[3], maxGridSize[3];
    int regsPerBlock, regsPerMultiprocessor, l2CacheSize, persistingL2CacheMaxSize,
        accessPolicyMaxWindowSize, memoryBusWidth, asyncEngineCount, ECCEnabled, tccDriver,
        integrated, globalL1CacheSupported, localL1CacheSupported;
    int concurrentKernels, cooperativeLaunch, clusterLaunch, computePreemptionSupported,
        streamPrioritiesSupported;
    int unifiedAddressing, managedMemory, concurrentManagedAccess, directManagedMemAccessFromHost,
        pageableMemoryAccess, pageableMemoryAccessUsesHostPageTables, hostNativeAtomicSupported,
        canMapHostMemory, canUseHostPointerForRegisteredMem, hostRegisterSupported,
        hostRegisterReadOnlySupported, memoryPoolsSupported, gpuDirectRDMASupported,
        gpuDirectRDMAWritesOrdering, ipcEventSupported, unifiedFunctionPointers;
    int pciBusID, pciDeviceID, pciDomainID, isMultiGpuBoard, multiGpuBoardGroupID, deviceNumaConfig,
        deviceNumaId, hostNumaId, mpsEnabled;
    unsigned luidDeviceNodeMask, gpuDirectRDMAFlushWritesOptions, memoryPoolSupportedHandleTypes;
    size_t textureAlignment, texturePitchAlignment, surfaceAlignment;
    int maxTexture1D, maxTexture1DMipmap, maxTexture2D[2], maxTexture2DMipmap[2],
        maxTexture2DLinear[3], maxTexture2DGather[2], maxTexture3D[3], maxTexture3DAlt[3],
        maxTextureCubemap, maxTexture1DLayered[2], maxTexture2DLayered[3],
        maxTextureCubemapLayered[2], maxSurface1D, maxSurface2D[2], maxSurface3D[3],
        maxSurface1DLayered[2], maxSurface2DLayered[3], maxSurfaceCubemap,
        maxSurfaceCubemapLayered[2], sparseCudaArraySupported, deferredMappingCudaArraySupported,
        timelineSemaphoreInteropSupported;
};

CUDA_CPU_CALL(cudaRuntimeGetVersion, (version), int *version);
CUDA_CPU_CALL(cudaDriverGetVersion, (version), int *version);
CUDA_CPU_CALL(cudaGetDeviceCount, (count), int *count);
CUDA_CPU_CALL(cudaSetDevice, (device), int device);
// How the host waits, and that it has mapped memory, changes nothing.
constexpr unsigned cudaDeviceScheduleAuto = 0, cudaDeviceScheduleSpin = 1,
                   cudaDeviceScheduleYield = 2, cudaDeviceScheduleBlockingSync = 4,
                   cudaDeviceMapHost = 8, cudaDeviceLmemResizeToMax = 16;
inline cudaError_t cudaSetDeviceFlags(unsigned) { return cudaSuccess; }
// A thread's stack and the heap are as large as they are; a larger stack is an error.
enum cudaLimit {
    cudaLimitStackSize,
    cudaLimitPrintfFifoSize,
    cudaLimitMallocHeapSize,
    cudaLimitDevRuntimeSyncDepth,
    cudaLimitDevRuntimePendingLaunchCount,
    cudaLimitMaxL2FetchGranularity,
    cudaLimitPersistingL2CacheSize
};
CUDA_CPU_CALL(cudaDeviceSetLimit, (limit, value), cudaLimit limit, size_t value);
CUDA_CPU_CALL(cudaDeviceGetLimit, (value, limit), size_t *value, cudaLimit limit);
CUDA_CPU_CALL(cudaGetDevice, (device), int *device);
CUDA_CPU_CALL(cudaGetDeviceProperties, (prop, device), cudaDeviceProp *prop, int device);

// clang-format off
enum cudaDeviceAttr { // without a number: one more than the one before
    cudaDevAttrMaxThreadsPerBlock = 1, cudaDevAttrMaxBlockDimX, cudaDevAttrMaxBlockDimY,
    cudaDevAttrMaxBlockDimZ, cudaDevAttrMaxGridDimX, cudaDevAttrMaxGridDimY, cudaDevAttrMaxGridDimZ,
    cudaDevAttrMaxSharedMemoryPerBlock, cudaDevAttrTotalConstantMemory, cudaDevAttrWarpSize,
    cudaDevAttrMaxPitch, cudaDevAttrMaxRegistersPerBlock, cudaDevAttrClockRate,
    cudaDevAttrTextureAlignment, cudaDevAttrGpuOverlap, cudaDevAttrMultiProcessorCount,
    cudaDevAttrKernelExecTimeout, cudaDevAttrIntegrated, cudaDevAttrCanMapHostMemory,
    cudaDevAttrComputeMode, cudaDevAttrMaxTexture1DWidth, cudaDevAttrMaxTexture2DWidth,
    cudaDevAttrMaxTexture2DHeight, cudaDevAttrMaxTexture3DWidth, cudaDevAttrMaxTexture3DHeight,
    cudaDevAttrMaxTexture3DDepth, cudaDevAttrMaxTexture2DLayeredWidth,
    cudaDevAttrMaxTexture2DLayeredHeight, cudaDevAttrMaxTexture2DLayeredLayers,
    cudaDevAttrSurfaceAlignment, cudaDevAttrConcurrentKernels, cudaDevAttrEccEnabled,
    cudaDevAttrPciBusId, cudaDevAttrPciDeviceId, cudaDevAttrTccDriver, cudaDevAttrMemoryClockRate,
    cudaDevAttrGlobalMemoryBusWidth, cudaDevAttrL2CacheSize, cudaDevAttrMaxThreadsPerMultiProcessor,
    cudaDevAttrAsyncEngineCount, cudaDevAttrUnifiedAddressing, cudaDevAttrMaxTexture1DLayeredWidth,
    cudaDevAttrMaxTexture1DLayeredLayers, cudaDevAttrMaxTexture2DGatherWidth = 45,
    cudaDevAttrMaxTexture2DGatherHeight, cudaDevAttrMaxTexture3DWidthAlt,
    cudaDevAttrMaxTexture3DHeightAlt, cudaDevAttrMaxTexture3DDepthAlt, cudaDevAttrPciDomainId,
    cudaDevAttrTexturePitchAlignment, cudaDevAttrMaxTextureCubemapWidth,
    cudaDevAttrMaxTextureCubemapLayeredWidth, cudaDevAttrMaxTextureCubemapLayeredLayers,
    cudaDevAttrMaxSurface1DWidth, cudaDevAttrMaxSurface2DWidth, cudaDevAttrMaxSurface2DHeight,
    cudaDevAttrMaxSurface3DWidth, cudaDevAttrMaxSurface3DHeight, cudaDevAttrMaxSurface3DDepth,
    cudaDevAttrMaxSurface1DLayeredWidth, cudaDevAttrMaxSurface1DLayeredLayers,
    cudaDevAttrMaxSurface2DLayeredWidth, cudaDevAttrMaxSurface2DLayeredHeight,
    cudaDevAttrMaxSurface2DLayeredLayers, cudaDevAttrMaxSurfaceCubemapWidth,
    cudaDevAttrMaxSurfaceCubemapLayeredWidth, cudaDevAttrMaxSurfaceCubemapLayeredLayers,
    cudaDevAttrMaxTexture1DLinearWidth, cudaDevAttrMaxTexture2DLinearWidth,
    cudaDevAttrMaxTexture2DLinearHeight, cudaDevAttrMaxTexture2DLinearPitch,
    cudaDevAttrMaxTexture2DMipmappedWidth, cudaDevAttrMaxTexture2DMipmappedHeight,
    cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor,
    cudaDevAttrMaxTexture1DMipmappedWidth, cudaDevAttrStreamPrioritiesSupported,
    cudaDevAttrGlobalL1CacheSupported, cudaDevAttrLocalL1CacheSupported,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor, cudaDevAttrMaxRegistersPerMultiprocessor,
    cudaDevAttrManagedMemory, cudaDevAttrIsMultiGpuBoard, cudaDevAttrMultiGpuBoardGroupID,
    cudaDevAttrHostNativeAtomicSupported, cudaDevAttrSingleToDoublePrecisionPerfRatio,
    cudaDevAttrPageableMemoryAccess, cudaDevAttrConcurrentManagedAccess,
    cudaDevAttrComputePreemptionSupported, cudaDevAttrCanUseHostPointerForRegisteredMem,
    cudaDevAttrCooperativeLaunch = 95, cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
    cudaDevAttrCanFlushRemoteWrites, cudaDevAttrHostRegisterSupported,
    cudaDevAttrPageableMemoryAccessUsesHostPageTables, cudaDevAttrDirectManagedMemAccessFromHost,
    cudaDevAttrMaxBlocksPerMultiprocessor = 106, cudaDevAttrMaxPersistingL2CacheSize = 108,
    cudaDevAttrMaxAccessPolicyWindowSize, cudaDevAttrReservedSharedMemoryPerBlock = 111,
    cudaDevAttrSparseCudaArraySupported, cudaDevAttrHostRegisterReadOnlySupported,
    cudaDevAttrTimelineSemaphoreInteropSupported, cudaDevAttrMemoryPoolsSupported,
    cudaDevAttrGPUDirectRDMASupported, cudaDevAttrGPUDirectRDMAFlushWritesOptions,
    cudaDevAttrGPUDirectRDMAWritesOrdering, cudaDevAttrMemoryPoolSupportedHandleTypes,
    cudaDevAttrClusterLaunch, cudaDevAttrDeferredMappingCudaArraySupported,
    cudaDevAttrIpcEventSupport = 125, cudaDevAttrMemSyncDomainCount, cudaDevAttrNumaConfig = 130,
    cudaDevAttrNumaId, cudaDevAttrMpsEnabled = 133, cudaDevAttrHostNumaId,
    cudaDevAttrD3D12CigSupported, cudaDevAttrVulkanCigSupported = 138, cudaDevAttrGpuPciDeviceId,
    cudaDevAttrGpuPciSubsystemId, cudaDevAttrHostNumaMemoryPoolsSupported = 142,
    cudaDevAttrHostNumaMultinodeIpcSupported, cudaDevAttrHostMemoryPoolsSupported,
    cudaDevAttrOnlyPartialHostNativeAtomicSupported = 147
};
// clang-format on
// Of the emulated device: a multiprocessor is a core, and a core runs one block at a time. As in
// cudaDeviceProp, what a CPU has nothing of is 0.
CUDA_CPU_CALL(cudaDeviceGetAttribute, (value, attribute, device), int *value,
              cudaDeviceAttr attribute, int device);

// Wait until the current device has done all that it was given.
CUDA_CPU_CALL_OF_NONE(cudaDeviceSynchronize);
// The current device is as at the program's start: its memory is freed, its streams and events are
// no more, its variables have their first values, a kernel's fault is forgotten. Pinned and managed
// memory, which is no single device's, stays.
CUDA_CPU_CALL_OF_NONE(cudaDeviceReset);

// With peer access a copy need not be staged through the host, and kernels of the current device
// may use the peer's memory.
CUDA_CPU_CALL(cudaDeviceCanAccessPeer, (can, device, peer), int *can, int device, int peer);
CUDA_CPU_CALL(cudaDeviceEnablePeerAccess, (peer, flags), int peer, unsigned flags);
CUDA_CPU_CALL(cudaDeviceDisablePeerAccess, (peer), int peer);
// Of a copy or an access between two devices; rank 0 is the best, and no device has arrays.
enum cudaDeviceP2PAttr {
    cudaDevP2PAttrPerformanceRank = 1,
    cudaDevP2PAttrAccessSupported,
    cudaDevP2PAttrNativeAtomicSupported,
    cudaDevP2PAttrCudaArrayAccessSupported,
    cudaDevP2PAttrOnlyPartialNativeAtomicSupported
};
CUDA_CPU_CALL(cudaDeviceGetP2PAttribute, (value, attribute, device, peer), int *value,
              cudaDeviceP2PAttr attribute, int device, int peer);
