// Errors: their names and texts, and the one line on stderr that says what is wrong and where.
#include "machine.h"

#include <atomic>
#include <cstdarg>

#include <unistd.h>

const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
#define CUDA_CPU_NAME(name)                                                                        \
    case name: return #name;
        CUDA_CPU_NAME(cudaSuccess)
        CUDA_CPU_NAME(cudaErrorInvalidValue)
        CUDA_CPU_NAME(cudaErrorMemoryAllocation)
        CUDA_CPU_NAME(cudaErrorInvalidConfiguration)
        CUDA_CPU_NAME(cudaErrorInvalidPitchValue)
        CUDA_CPU_NAME(cudaErrorInvalidSymbol)
        CUDA_CPU_NAME(cudaErrorInvalidMemcpyDirection)
        CUDA_CPU_NAME(cudaErrorNoDevice)
        CUDA_CPU_NAME(cudaErrorInvalidDevice)
        CUDA_CPU_NAME(cudaErrorPeerAccessUnsupported)
        CUDA_CPU_NAME(cudaErrorInvalidResourceHandle)
        CUDA_CPU_NAME(cudaErrorIllegalState)
        CUDA_CPU_NAME(cudaErrorNotReady)
        CUDA_CPU_NAME(cudaErrorIllegalAddress)
        CUDA_CPU_NAME(cudaErrorMisalignedAddress)
        CUDA_CPU_NAME(cudaErrorPeerAccessAlreadyEnabled)
        CUDA_CPU_NAME(cudaErrorPeerAccessNotEnabled)
        CUDA_CPU_NAME(cudaErrorTooManyPeers)
        CUDA_CPU_NAME(cudaErrorAssert)
        CUDA_CPU_NAME(cudaErrorHostMemoryAlreadyRegistered)
        CUDA_CPU_NAME(cudaErrorHostMemoryNotRegistered)
        CUDA_CPU_NAME(cudaErrorLaunchFailure)
        CUDA_CPU_NAME(cudaErrorNotPermitted)
        CUDA_CPU_NAME(cudaErrorStreamCaptureUnsupported)
        CUDA_CPU_NAME(cudaErrorStreamCaptureInvalidated)
        CUDA_CPU_NAME(cudaErrorStreamCaptureMerge)
        CUDA_CPU_NAME(cudaErrorStreamCaptureUnmatched)
        CUDA_CPU_NAME(cudaErrorStreamCaptureUnjoined)
        CUDA_CPU_NAME(cudaErrorStreamCaptureIsolation)
        CUDA_CPU_NAME(cudaErrorStreamCaptureImplicit)
        CUDA_CPU_NAME(cudaErrorCapturedEvent)
#undef CUDA_CPU_NAME
    }
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidPitchValue: return "invalid pitch argument";
    case cudaErrorInvalidSymbol: return "invalid device symbol";
    case cudaErrorInvalidMemcpyDirection: return "invalid copy direction for memcpy";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorPeerAccessUnsupported:
        return "peer access is not supported between these two devices";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorIllegalState: return "the operation cannot be performed in the present state";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorMisalignedAddress: return "misaligned address";
    case cudaErrorPeerAccessAlreadyEnabled: return "peer access is already enabled";
    case cudaErrorPeerAccessNotEnabled: return "peer access has not been enabled";
    case cudaErrorTooManyPeers: return "peer mapping resources exhausted";
    case cudaErrorAssert: return "device-side assert triggered";
    case cudaErrorHostMemoryAlreadyRegistered:
        return "part or all of the requested memory range is already mapped";
    case cudaErrorHostMemoryNotRegistered:
        return "pointer does not correspond to a registered memory region";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorNotPermitted: return "operation not permitted";
    case cudaErrorStreamCaptureUnsupported:
        return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
        return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureMerge:
        return "operation would result in a merge of separate capture sequences";
    case cudaErrorStreamCaptureUnmatched:
        return "capture was not ended in the same stream as it began";
    case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation:
        return "dependency created on uncaptured work in another stream";
    case cudaErrorStreamCaptureImplicit:
        return "operation would make the legacy stream depend on a capturing blocking stream";
    case cudaErrorCapturedEvent:
        return "operation not permitted on an event last recorded in a capturing stream";
    }
    return "unrecognized error code";
}

namespace cuda_cpu {

cudaError_t fail(cudaError_t error) { return last_error = error; }

cudaError_t fail(cudaError_t error, Where where, const char *format, ...) {
    char text[1000];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fprintf(stderr, "%s:%d: %s [%s]\n", where.file, where.line, text, cudaGetErrorName(error));
    return fail(error);
}

cudaError_t no_result(const char *call, Where where) {
    return fail(cudaErrorInvalidValue, where, "%s: the pointer to its result is null", call);
}

void say_alone() {
    static std::atomic<bool> said{false};
    while (said.exchange(true)) pause();
}

[[noreturn]] void end_program() {
    if (ftrylockfile(stdout) == 0) fflush_unlocked(stdout);
    _exit(1);
}

[[noreturn]] void give_up(const char *format, ...) {
    char text[1000];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    say_alone();
    fprintf(stderr, "cuda_runtime.h: %s\n", text);
    end_program();
}

} // namespace cuda_cpu

cudaError_t cudaGetLastError() {
    cudaError_t error = cuda_cpu::last_error, fault = cuda_cpu::current().fault;
    cuda_cpu::last_error = cudaSuccess;
    if (error == cudaErrorMemoryAllocation) {
        std::lock_guard<std::mutex> guard(cuda_cpu::machine().lock);
        cuda_cpu::machine().failed = {};
    }
    return error ? error : fault;
}

cudaError_t cudaPeekAtLastError() {
    cudaError_t error = cuda_cpu::last_error, fault = cuda_cpu::current().fault;
    return error ? error : fault;
}
