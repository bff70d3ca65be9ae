// Graphs: a stream's work is captured instead of done, and can then be launched again and again.
//
// A graph is a list of operations, which run in the order in which they were captured. Its streams
// and events allow that order. But the branches of a graph then run one after another, and
// ThreadSanitizer sees no race between them.
#pragma once

#include "streams.h"

namespace cuda_cpu {
struct Graph;
struct GraphExec;
} // namespace cuda_cpu
typedef cuda_cpu::Graph *cudaGraph_t;
typedef cuda_cpu::GraphExec *cudaGraphExec_t;
typedef struct CUgraphNode_st *cudaGraphNode_t;

enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal,
    cudaStreamCaptureModeThreadLocal,
    cudaStreamCaptureModeRelaxed // calls such as cudaMalloc are allowed meanwhile
};
enum cudaStreamCaptureStatus {
    cudaStreamCaptureStatusNone,
    cudaStreamCaptureStatusActive,
    cudaStreamCaptureStatusInvalidated
};
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode, CUDA_CPU_WHERE);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph, CUDA_CPU_WHERE);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status,
                                  CUDA_CPU_WHERE);

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph,
                                 unsigned long long flags = 0, CUDA_CPU_WHERE);
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, cudaGraphNode_t *,
                                        char *, size_t, CUDA_CPU_WHERE) {
    return cudaGraphInstantiate(exec, graph, 0, where);
}
inline cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph,
                                                 unsigned long long flags = 0, CUDA_CPU_WHERE) {
    return cudaGraphInstantiate(exec, graph, flags, where);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream, CUDA_CPU_WHERE);
// Tell how many nodes the graph has: `nodes` must be null.
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count,
                              CUDA_CPU_WHERE);
cudaError_t cudaGraphDestroy(cudaGraph_t graph, CUDA_CPU_WHERE);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec, CUDA_CPU_WHERE);
