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
CUDA_CPU_CALL(cudaStreamBeginCapture, (stream, mode), cudaStream_t stream,
              cudaStreamCaptureMode mode);
CUDA_CPU_CALL(cudaStreamEndCapture, (stream, graph), cudaStream_t stream, cudaGraph_t *graph);
CUDA_CPU_CALL(cudaStreamIsCapturing, (stream, status), cudaStream_t stream,
              cudaStreamCaptureStatus *status);

CUDA_CPU_CALL(cudaGraphInstantiate, (exec, graph, flags), cudaGraphExec_t *exec, cudaGraph_t graph,
              unsigned long long flags = 0);
CUDA_CPU_CALL(cudaGraphInstantiate, (exec, graph, node, text, bytes), cudaGraphExec_t *exec,
              cudaGraph_t graph, cudaGraphNode_t *node, char *text, size_t bytes);
CUDA_CPU_CALL(cudaGraphInstantiateWithFlags, (exec, graph, flags), cudaGraphExec_t *exec,
              cudaGraph_t graph, unsigned long long flags);
CUDA_CPU_CALL(cudaGraphLaunch, (exec, stream), cudaGraphExec_t exec, cudaStream_t stream);
// Tell how many nodes the graph has: `nodes` must be null.
CUDA_CPU_CALL(cudaGraphGetNodes, (graph, nodes, count), cudaGraph_t graph, cudaGraphNode_t *nodes,
              size_t *count);
CUDA_CPU_CALL(cudaGraphDestroy, (graph), cudaGraph_t graph);
CUDA_CPU_CALL(cudaGraphExecDestroy, (exec), cudaGraphExec_t exec);
