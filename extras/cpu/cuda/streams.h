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

CUDA_CPU_CALL(cudaStreamCreateWithFlags, (stream, flags), cudaStream_t *stream, unsigned flags);
CUDA_CPU_CALL(cudaStreamCreate, (stream), cudaStream_t *stream);
// The operating system shares the cores out: a priority changes nothing.
CUDA_CPU_CALL(cudaStreamCreateWithPriority, (stream, flags, priority), cudaStream_t *stream,
              unsigned flags, int priority);
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest);
namespace cuda_cpu {
// A stream of the calling host thread on the current device. It is never destroyed.
cudaStream_t stream_of_thread();
} // namespace cuda_cpu
#define cudaStreamPerThread ::cuda_cpu::stream_of_thread()
#define cudaStreamLegacy ((cudaStream_t) nullptr)
CUDA_CPU_CALL(cudaStreamDestroy, (stream), cudaStream_t stream);
CUDA_CPU_CALL(cudaStreamSynchronize, (stream), cudaStream_t stream);
CUDA_CPU_CALL(cudaStreamQuery, (stream), cudaStream_t stream);

CUDA_CPU_CALL(cudaEventCreateWithFlags, (event, flags), cudaEvent_t *event, unsigned flags);
CUDA_CPU_CALL(cudaEventCreate, (event), cudaEvent_t *event);
CUDA_CPU_CALL(cudaEventCreate, (event, flags), cudaEvent_t *event, unsigned flags);
CUDA_CPU_CALL(cudaEventDestroy, (event), cudaEvent_t event);
CUDA_CPU_CALL(cudaEventRecord, (event, stream), cudaEvent_t event, cudaStream_t stream = nullptr);
// Waits for the event as it was last recorded; one that never was is no wait at all.
CUDA_CPU_CALL(cudaStreamWaitEvent, (stream, event, flags), cudaStream_t stream, cudaEvent_t event,
              unsigned flags = 0);
CUDA_CPU_CALL(cudaEventSynchronize, (event), cudaEvent_t event);
CUDA_CPU_CALL(cudaEventQuery, (event), cudaEvent_t event);
CUDA_CPU_CALL(cudaEventElapsedTime, (milliseconds, start, end), float *milliseconds,
              cudaEvent_t start, cudaEvent_t end);

namespace cuda_cpu {
// Return when the event was reached that has been recorded and waited for, by the host's clock.
double seconds_of(cudaEvent_t event);
} // namespace cuda_cpu

// The stream calls f(data), on a thread of the host, where its turn comes. As on a GPU, f may not
// call CUDA: it would wait for the stream that waits for it.
typedef void (*cudaHostFn_t)(void *);
CUDA_CPU_CALL(cudaLaunchHostFunc, (stream, f, data), cudaStream_t stream, cudaHostFn_t f,
              void *data);
