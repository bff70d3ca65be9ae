// Streams and events: the order in which devices do what they are given.
#pragma once

#include "errors.h"

namespace cuda_cpu {
struct Stream;
}
struct cudaEvent;
typedef cuda_cpu::Stream *cudaStream_t;
typedef cudaEvent *cudaEvent_t;
constexpr unsigned cudaStreamDefault = 0, cudaStreamNonBlocking = 1;
constexpr unsigned cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2;

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags, CUDA_CPU_WHERE);
cudaError_t cudaStreamCreate(cudaStream_t *stream, CUDA_CPU_WHERE);
// The operating system shares the cores out: a priority changes nothing.
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int, CUDA_CPU_WHERE);
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest);
namespace cuda_cpu {
// A stream of the calling host thread on the current device. It is never destroyed.
cudaStream_t stream_of_thread();
} // namespace cuda_cpu
#define cudaStreamPerThread ::cuda_cpu::stream_of_thread()
#define cudaStreamLegacy ((cudaStream_t) nullptr)
cudaError_t cudaStreamDestroy(cudaStream_t stream, CUDA_CPU_WHERE);
cudaError_t cudaStreamSynchronize(cudaStream_t stream, CUDA_CPU_WHERE);
cudaError_t cudaStreamQuery(cudaStream_t stream, CUDA_CPU_WHERE);

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags, CUDA_CPU_WHERE);
cudaError_t cudaEventCreate(cudaEvent_t *event, unsigned flags = cudaEventDefault, CUDA_CPU_WHERE);
cudaError_t cudaEventDestroy(cudaEvent_t event, CUDA_CPU_WHERE);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr, CUDA_CPU_WHERE);
// Waits for the event as it was last recorded; one that never was is no wait at all.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0,
                                CUDA_CPU_WHERE);
cudaError_t cudaEventSynchronize(cudaEvent_t event, CUDA_CPU_WHERE);
cudaError_t cudaEventQuery(cudaEvent_t event, CUDA_CPU_WHERE);
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end,
                                 CUDA_CPU_WHERE);

namespace cuda_cpu {
// Return when the event was reached that has been recorded and waited for, by the host's clock.
double seconds_of(cudaEvent_t event);
} // namespace cuda_cpu

// The stream calls f(data), on a thread of the host, where its turn comes. As on a GPU, f may not
// call CUDA: it would wait for the stream that waits for it.
typedef void (*cudaHostFn_t)(void *);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t f, void *data, CUDA_CPU_WHERE);
