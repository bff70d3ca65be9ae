// Errors: CUDA's codes, and how a mistake is reported with the line that made it.
#pragma once

#include "types.h"

#ifdef CUDA_CPU_TSAN
#include <sanitizer/tsan_interface.h>
extern "C" void AnnotateIgnoreReadsBegin(const char *file, int line);
extern "C" void AnnotateIgnoreReadsEnd(const char *file, int line);
extern "C" void AnnotateIgnoreWritesBegin(const char *file, int line);
extern "C" void AnnotateIgnoreWritesEnd(const char *file, int line);
extern "C" void AnnotateIgnoreSyncBegin(const char *file, int line);
extern "C" void AnnotateIgnoreSyncEnd(const char *file, int line);
#endif

// clang-format off
// Each code, its number and what is said of it
#define CUDA_CPU_ERRORS(X)                                                                         \
    X(cudaSuccess, 0, "no error")                                                                  \
    X(cudaErrorInvalidValue, 1, "invalid argument")                                                \
    X(cudaErrorMemoryAllocation, 2, "out of memory")                                               \
    X(cudaErrorInitializationError, 3, "initialization error")                                     \
    X(cudaErrorCudartUnloading, 4, "driver shutting down")                                         \
    X(cudaErrorInvalidConfiguration, 9, "invalid configuration argument")                          \
    X(cudaErrorInvalidPitchValue, 12, "invalid pitch argument")                                    \
    X(cudaErrorInvalidSymbol, 13, "invalid device symbol")                                         \
    X(cudaErrorInvalidDevicePointer, 17, "invalid device pointer")                                 \
    X(cudaErrorInvalidMemcpyDirection, 21, "invalid copy direction for memcpy")                    \
    X(cudaErrorInsufficientDriver, 35,                                                             \
      "CUDA driver version is insufficient for CUDA runtime version")                              \
    X(cudaErrorMissingConfiguration, 52, "__global__ function call is not configured")             \
    X(cudaErrorInvalidDeviceFunction, 98, "invalid device function")                               \
    X(cudaErrorNoDevice, 100, "no CUDA-capable device is detected")                                \
    X(cudaErrorInvalidDevice, 101, "invalid device ordinal")                                       \
    X(cudaErrorDeviceUninitialized, 201, "invalid device context")                                 \
    X(cudaErrorNoKernelImageForDevice, 209,                                                        \
      "no kernel image is available for execution on the device")                                  \
    X(cudaErrorECCUncorrectable, 214, "uncorrectable ECC error encountered")                       \
    X(cudaErrorUnsupportedLimit, 215, "limit is not supported on this architecture")               \
    X(cudaErrorPeerAccessUnsupported, 217,                                                         \
      "peer access is not supported between these two devices")                                    \
    X(cudaErrorInvalidPtx, 218, "a PTX JIT compilation failed")                                    \
    X(cudaErrorFileNotFound, 301, "file not found")                                                \
    X(cudaErrorInvalidResourceHandle, 400, "invalid resource handle")                              \
    X(cudaErrorIllegalState, 401, "the operation cannot be performed in the present state")        \
    X(cudaErrorSymbolNotFound, 500, "named symbol not found")                                      \
    X(cudaErrorNotReady, 600, "device not ready")                                                  \
    X(cudaErrorIllegalAddress, 700, "an illegal memory access was encountered")                    \
    X(cudaErrorLaunchOutOfResources, 701, "too many resources requested for launch")               \
    X(cudaErrorLaunchTimeout, 702, "the launch timed out and was terminated")                      \
    X(cudaErrorPeerAccessAlreadyEnabled, 704, "peer access is already enabled")                    \
    X(cudaErrorPeerAccessNotEnabled, 705, "peer access has not been enabled")                      \
    X(cudaErrorSetOnActiveProcess, 708, "cannot set while device is active in this process")       \
    X(cudaErrorAssert, 710, "device-side assert triggered")                                        \
    X(cudaErrorTooManyPeers, 711, "peer mapping resources exhausted")                              \
    X(cudaErrorHostMemoryAlreadyRegistered, 712,                                                   \
      "part or all of the requested memory range is already mapped")                               \
    X(cudaErrorHostMemoryNotRegistered, 713,                                                       \
      "pointer does not correspond to a registered memory region")                                 \
    X(cudaErrorIllegalInstruction, 715, "an illegal instruction was encountered")                  \
    X(cudaErrorMisalignedAddress, 716, "misaligned address")                                       \
    X(cudaErrorInvalidAddressSpace, 717,                                                           \
      "operation not supported on global/shared address space")                                    \
    X(cudaErrorInvalidPc, 718, "invalid program counter")                                          \
    X(cudaErrorLaunchFailure, 719, "unspecified launch failure")                                   \
    X(cudaErrorCooperativeLaunchTooLarge, 720, "too many blocks in cooperative launch")            \
    X(cudaErrorNotPermitted, 800, "operation not permitted")                                       \
    X(cudaErrorNotSupported, 801, "operation not supported")                                       \
    X(cudaErrorSystemNotReady, 802, "system not yet initialized")                                  \
    X(cudaErrorStreamCaptureUnsupported, 900, "operation not permitted when stream is capturing")  \
    X(cudaErrorStreamCaptureInvalidated, 901,                                                      \
      "operation failed due to a previous error during capture")                                   \
    X(cudaErrorStreamCaptureMerge, 902,                                                            \
      "operation would result in a merge of separate capture sequences")                           \
    X(cudaErrorStreamCaptureUnmatched, 903,                                                        \
      "capture was not ended in the same stream as it began")                                      \
    X(cudaErrorStreamCaptureUnjoined, 904, "capturing stream has unjoined work")                   \
    X(cudaErrorStreamCaptureIsolation, 905,                                                        \
      "dependency created on uncaptured work in another stream")                                   \
    X(cudaErrorStreamCaptureImplicit, 906,                                                         \
      "operation would make the legacy stream depend on a capturing blocking stream")              \
    X(cudaErrorCapturedEvent, 907,                                                                 \
      "operation not permitted on an event last recorded in a capturing stream")                   \
    X(cudaErrorUnknown, 999, "unknown error")
// clang-format on
enum cudaError_t {
#define CUDA_CPU_CODE(name, number, text) name = number,
    CUDA_CPU_ERRORS(CUDA_CPU_CODE)
#undef CUDA_CPU_CODE
};

const char *cudaGetErrorName(cudaError_t error);
const char *cudaGetErrorString(cudaError_t error);
// Return this host thread's last error, or its device's fault; the first of them forgets the error.
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();

namespace cuda_cpu {

// Where in the user's file a call stands: a last, defaulted argument of a function in cuda_cpu::at.
struct Where {
    const char *file;
    int line;
    void *pc; // the same as an address of code, for ThreadSanitizer's reports
};
inline constexpr char by_pointer[] = "a call by a pointer to a function"; // a file, with line 0
__attribute__((always_inline)) inline void *here() {
    void *pc = nullptr;
#if defined(CUDA_CPU_TSAN) && defined(__x86_64__)
    asm volatile("leaq 0(%%rip), %0" : "=r"(pc));
#elif defined(CUDA_CPU_TSAN) && defined(__aarch64__)
    asm volatile("adr %0, ." : "=r"(pc));
#endif
    return pc;
}
#define CUDA_CPU_WHERE                                                                             \
    ::cuda_cpu::Where where = {__builtin_FILE(), __builtin_LINE(), ::cuda_cpu::here()}
// Declare a function of the API, and define what CUDA calls by that name, as a value: see calls.h.
// Then only the stack tells the line, if something is wrong.
#define CUDA_CPU_CALL(name, arguments, ...)                                                        \
    namespace cuda_cpu::at {                                                                       \
    cudaError_t name(__VA_ARGS__, CUDA_CPU_WHERE);                                                 \
    }                                                                                              \
    inline cudaError_t name(__VA_ARGS__) {                                                         \
        return cuda_cpu::at::name(CUDA_CPU_LIST arguments,                                         \
                                  {cuda_cpu::by_pointer, 0, cuda_cpu::here()});                    \
    }                                                                                              \
    using cuda_cpu_call = void // for the semicolon
#define CUDA_CPU_CALL_OF_NONE(name)                                                                \
    namespace cuda_cpu::at {                                                                       \
    cudaError_t name(CUDA_CPU_WHERE);                                                              \
    }                                                                                              \
    inline cudaError_t name() {                                                                    \
        return cuda_cpu::at::name({cuda_cpu::by_pointer, 0, cuda_cpu::here()});                    \
    }                                                                                              \
    using cuda_cpu_call = void
#define CUDA_CPU_LIST(...) __VA_ARGS__
// A function whose first parameter is a pointer to a pointer of any type
#define CUDA_CPU_ALLOCATION(name, arguments, ...)                                                  \
    CUDA_CPU_CALL(name, (pointer, CUDA_CPU_LIST arguments), void **pointer, __VA_ARGS__);          \
    namespace cuda_cpu::at {                                                                       \
    CUDA_CPU_OF_ANY(name, arguments, __VA_ARGS__)                                                  \
    }                                                                                              \
    CUDA_CPU_OF_ANY(name, arguments, __VA_ARGS__)                                                  \
    using cuda_cpu_call = void
#define CUDA_CPU_OF_ANY(name, arguments, ...)                                                      \
    template <class T> cudaError_t name(T **pointer, __VA_ARGS__, CUDA_CPU_WHERE) {                \
        return cuda_cpu::at::name((void **)pointer, CUDA_CPU_LIST arguments, where);               \
    }

// Note an error for cudaGetLastError(), and return it.
cudaError_t fail(cudaError_t error);
// Say on stderr, in one line, what is wrong and where, then fail with CUDA's code for it.
__attribute__((format(printf, 3, 4), cold)) cudaError_t fail(cudaError_t error, Where where,
                                                             const char *format, ...);
// Fail because a pointer to a result is null.
cudaError_t no_result(const char *call, Where where);

// Of several threads that end the program the first says why; the others stay here until the end.
void say_alone();

// End the program at once, with status 1, after what it has printed; but not if another thread
// prints at the moment.
[[noreturn]] void end_program();
// The machine lacks something: say on stderr, in one line, what it is and what to try, and end.
[[noreturn]] __attribute__((format(printf, 1, 2), cold)) void give_up(const char *format, ...);

// What the operating system thread is running, for the messages of the fault handler.
struct Running {
    const char *name;
    Where where;
    int device;
#ifdef CUDA_CPU_TSAN
    void *callers[8] = {}; // of the function that has enqueued it
#endif
};
inline __thread Running running = {nullptr, {nullptr, 0, nullptr}, -1};

// ThreadSanitizer must see the order that the CUDA program establishes, and nothing else: the locks
// of the queues below would order far more than the program does and hide its races. So everything
// that the stand-in does for itself is Hidden; published() and observed() tell CUDA's order.
#ifdef CUDA_CPU_TSAN
struct Hidden {
    Hidden() {
        AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
        AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
        AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    }
    ~Hidden() {
        AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
        AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
        AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
    }
};
inline void published(void *order) { __tsan_release(order); }
inline void observed(void *order) { __tsan_acquire(order); }
#else
struct Hidden {
    Hidden() {}
};
inline void published(void *) {}
inline void observed(void *) {}
#endif

} // namespace cuda_cpu
