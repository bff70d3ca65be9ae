// What the stand-in lacks: names whose use is an error of the compiler's that says so.
//
// Headers that are lacking, and inline PTX, are found by extras/cpu/to_cpp.sed.
#pragma once

#include "errors.h"

#define CUDA_CPU_LACKING CUDA_CPU_REFUSED("the stand-in lacks it")
#define CUDA_CPU_LACKING_TYPE CUDA_CPU_REFUSED_TYPE("the stand-in lacks it")
// clang-format off
#define CUDA_CPU_LACKS(name) template <class... A> CUDA_CPU_LACKING cudaError_t name(A &&...);
#define CUDA_CPU_LACKS_FETCH(name) template <class T, class... A> CUDA_CPU_LACKING T name(A &&...);
#define CUDA_CPU_LACKS_TYPE(name) struct CUDA_CPU_LACKING_TYPE name;

CUDA_CPU_LACKS(cudaGraphCreate) CUDA_CPU_LACKS(cudaGraphAddKernelNode)
CUDA_CPU_LACKS(cudaGraphAddMemcpyNode) CUDA_CPU_LACKS(cudaGraphAddMemcpyNode1D)
CUDA_CPU_LACKS(cudaGraphAddMemsetNode) CUDA_CPU_LACKS(cudaGraphAddHostNode)
CUDA_CPU_LACKS(cudaGraphAddDependencies) CUDA_CPU_LACKS(cudaGraphAddChildGraphNode)
CUDA_CPU_LACKS(cudaGraphExecUpdate) CUDA_CPU_LACKS(cudaGraphExecKernelNodeSetParams)
CUDA_CPU_LACKS(cudaGraphClone) CUDA_CPU_LACKS(cudaGraphDebugDotPrint)
CUDA_CPU_LACKS_TYPE(cudaKernelNodeParams) CUDA_CPU_LACKS_TYPE(cudaHostNodeParams)
CUDA_CPU_LACKS_TYPE(cudaMemsetParams)

CUDA_CPU_LACKS(cudaCreateTextureObject) CUDA_CPU_LACKS(cudaDestroyTextureObject)
CUDA_CPU_LACKS(cudaCreateSurfaceObject) CUDA_CPU_LACKS(cudaDestroySurfaceObject)
CUDA_CPU_LACKS(cudaMallocArray) CUDA_CPU_LACKS(cudaFreeArray) CUDA_CPU_LACKS(cudaMemcpy2DToArray)
CUDA_CPU_LACKS_FETCH(tex1Dfetch) CUDA_CPU_LACKS_FETCH(tex1D) CUDA_CPU_LACKS_FETCH(tex2D)
CUDA_CPU_LACKS_FETCH(tex3D) CUDA_CPU_LACKS_FETCH(surf2Dread) CUDA_CPU_LACKS(surf2Dwrite)
CUDA_CPU_LACKS_TYPE(cudaTextureObject_t) CUDA_CPU_LACKS_TYPE(cudaSurfaceObject_t)
CUDA_CPU_LACKS_TYPE(cudaArray_t) CUDA_CPU_LACKS_TYPE(cudaResourceDesc)
CUDA_CPU_LACKS_TYPE(cudaTextureDesc) CUDA_CPU_LACKS_TYPE(cudaChannelFormatDesc)

CUDA_CPU_LACKS(cudaMalloc3D) CUDA_CPU_LACKS(cudaMemset3D) CUDA_CPU_LACKS(cudaMemcpy3D)
CUDA_CPU_LACKS_TYPE(cudaExtent) CUDA_CPU_LACKS_TYPE(cudaPitchedPtr)
CUDA_CPU_LACKS_TYPE(cudaMemcpy3DParms)

CUDA_CPU_LACKS(cudaIpcGetMemHandle) CUDA_CPU_LACKS(cudaIpcOpenMemHandle)
CUDA_CPU_LACKS(cudaIpcGetEventHandle) CUDA_CPU_LACKS(cudaIpcOpenEventHandle)
CUDA_CPU_LACKS_TYPE(cudaIpcMemHandle_t) CUDA_CPU_LACKS_TYPE(cudaIpcEventHandle_t)

CUDA_CPU_LACKS(cudaLaunchKernel) CUDA_CPU_LACKS(cudaLaunchKernelEx)
CUDA_CPU_LACKS(cudaLaunchCooperativeKernel) CUDA_CPU_LACKS(cudaStreamAddCallback)
CUDA_CPU_LACKS(cudaMallocFromPoolAsync) CUDA_CPU_LACKS(cudaMemPoolCreate)
CUDA_CPU_LACKS(cudaDeviceGetDefaultMemPool)
CUDA_CPU_LACKS_TYPE(cudaLaunchConfig_t) CUDA_CPU_LACKS_TYPE(cudaMemPool_t)
CUDA_CPU_LACKS(cudaFuncGetAttributes)
CUDA_CPU_LACKS_TYPE(cudaFuncAttributes)
CUDA_CPU_LACKS(cuCtxCreate) CUDA_CPU_LACKS(cuModuleLoad) CUDA_CPU_LACKS(cuModuleLoadData)
CUDA_CPU_LACKS(cuModuleGetFunction) CUDA_CPU_LACKS(cuLaunchKernel) CUDA_CPU_LACKS(cuMemAlloc)
CUDA_CPU_LACKS(cuMemFree) CUDA_CPU_LACKS(cuMemcpyHtoD) CUDA_CPU_LACKS(cuMemcpyDtoH)
CUDA_CPU_LACKS(__trap)
namespace cooperative_groups {
CUDA_CPU_LACKS_TYPE(grid_group) CUDA_CPU_LACKS_TYPE(cluster_group)
CUDA_CPU_LACKS(this_grid) CUDA_CPU_LACKS(this_cluster)
}
// clang-format on
#undef CUDA_CPU_LACKS
#undef CUDA_CPU_LACKS_FETCH
#undef CUDA_CPU_LACKS_TYPE

#define CUDA_CPU_LACKS_ASSEMBLY static_assert(false, "inline PTX: the stand-in lacks it");
#define CUDA_CPU_NOT_UNDERSTOOD                                                                    \
    static_assert(false,                                                                           \
                  "declare one __device__ or __constant__ variable per line, of a type that has "  \
                  "a name: extras/cpu/to_cpp.sed understands nothing else");
