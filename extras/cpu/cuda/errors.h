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

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInvalidPitchValue = 12,
    cudaErrorInvalidSymbol = 13,
    cudaErrorInvalidMemcpyDirection = 21,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorPeerAccessUnsupported = 217,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorIllegalState = 401,
    cudaErrorNotReady = 600,
    cudaErrorIllegalAddress = 700,
    cudaErrorPeerAccessAlreadyEnabled = 704,
    cudaErrorPeerAccessNotEnabled = 705,
    cudaErrorAssert = 710,
    cudaErrorMisalignedAddress = 716,
    cudaErrorTooManyPeers = 711,
    cudaErrorHostMemoryAlreadyRegistered = 712,
    cudaErrorHostMemoryNotRegistered = 713,
    cudaErrorLaunchFailure = 719,
    cudaErrorNotPermitted = 800,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorStreamCaptureInvalidated = 901,
    cudaErrorStreamCaptureMerge = 902,
    cudaErrorStreamCaptureUnmatched = 903,
    cudaErrorStreamCaptureUnjoined = 904,
    cudaErrorStreamCaptureIsolation = 905,
    cudaErrorStreamCaptureImplicit = 906,
    cudaErrorCapturedEvent = 907,
};

const char *cudaGetErrorName(cudaError_t error);
const char *cudaGetErrorString(cudaError_t error);
// Return this host thread's last error, or its device's fault; the first of them forgets the error.
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();

namespace cuda_cpu {

// Where in the user's file a call stands: a last, defaulted argument of the API's functions.
struct Where {
    const char *file;
    int line;
    void *pc; // the same as an address of code, for ThreadSanitizer's reports
};
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
