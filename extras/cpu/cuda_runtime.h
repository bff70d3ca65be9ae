// A stand-in for the CUDA runtime on machines without a GPU: the same .cu file, compiled by g++ or
// clang++ (C++17, Linux, no library), runs on emulated devices, with CUDA's own names and codes.
//
// It is stricter than a GPU. Every emulated device has its own memory, filled with NaN when fresh,
// and its own cores; every stream is a thread with an in-order queue, so devices and streams really
// run at the same time and a missing event is a real race. What a GPU turns into a crash, a hang or
// a wrong number is named here with the line that did it: pointers of another device or of the
// host, wrong device numbers, copies and accesses out of bounds, use after free, bad launch
// configurations, barriers that only some threads of a block reach, warp functions that only some
// lanes reach.
//
//   CUDA_CPU_DEVICES   number of devices to emulate   (default: 1)
//   CUDA_CPU_CORES     cores of each device           (default: the machine's, divided among them)
//   CUDA_CPU_SLOWDOWN  such as 1,3: kernels of device 1 take 3 times as long   (default: 1 each)
//   CUDA_CPU_MEMORY    memory of each device, in MiB  (default: the machine's, divided among them)
//   CUDA_CPU_PEERS     0: no device can access another's memory. Copies between devices then go
//                      through the host, which waits in the call, as it may on a real machine
//   CUDA_CPU_WATCHDOG  seconds after which a block that has not ended is reported, or a host that
//                      is still in the range that nvtxMarkA has named; 0: never (default: 10)
//   CUDA_CPU_LANES     forwards, backwards or a seed: every block runs warp by warp, its warps and
//                      lanes in this order, or shuffled; a right kernel does not depend on it
//                      (default: forwards, and only kernels that call a warp function)
//   CUDA_CPU_LAUNCHES  1 prints a line for each launch: kernel, grid, block, bytes of dynamic
//                      shared memory, warps
//
// kernel<<<grid, block, shared, stream>>>(args), __shared__, and __device__ and __constant__
// variables are not C++. extras/cpu/to_cpp.sed turns them into calls of functions below:
// configured(), shared_memory(), device_variable() and constant_variable().
// make compiles the inline functions of several lines only once, see extras/cpu/split.awk.
//
//   1. The language     qualifiers, built-in variables, vector types
//   2. Errors           codes, strings, and how a mistake is reported
//   3. Devices          memory: one address range a device, a table of what is allocated in it
//   4. Streams          queues, events, waits
//   5. Fibers           the threads of a block, switched at __syncthreads()
//   6. Warps            shuffles, votes, __syncwarp(); the order of warps and lanes
//   7. Launch           a grid's blocks over a device's cores
//   8. The runtime API  cudaMalloc, cudaMemcpyPeerAsync, cudaStreamWaitEvent, ...
//   9. Atomics, fences, intrinsics
//  10. What the stand-in lacks
#ifndef CUDA_CPU
#define CUDA_CPU 1

#include <atomic>
#include <cassert>
#include <cmath>
#include <condition_variable>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include <execinfo.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#if defined(__SANITIZE_THREAD__)
#define CUDA_CPU_TSAN 1
#elif defined(__SANITIZE_ADDRESS__)
#define CUDA_CPU_ASAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define CUDA_CPU_TSAN 1
#elif __has_feature(address_sanitizer)
#define CUDA_CPU_ASAN 1
#endif
#endif
#ifdef CUDA_CPU_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef CUDA_CPU_TSAN
#include <sanitizer/common_interface_defs.h>
#include <sanitizer/tsan_interface.h>
#include <unwind.h>
extern "C" void __tsan_func_entry(void *pc);
extern "C" void __tsan_func_exit();
extern "C" void __tsan_on_report(void *report); // called when one is printed
extern "C" int __tsan_get_report_data(void *report, const char **description, int *count,
                                      int *stack_count, int *mop_count, int *loc_count,
                                      int *mutex_count, int *thread_count, int *unique_tid_count,
                                      void **sleep_trace, unsigned long trace_size);
extern "C" int __tsan_get_report_mop(void *report, unsigned long i, int *tid, void **address,
                                     int *size, int *write, int *atomic, void **trace,
                                     unsigned long trace_size);
extern "C" void __sanitizer_symbolize_pc(void *pc, const char *format, char *text, size_t size);
extern "C" void AnnotateIgnoreReadsBegin(const char *file, int line);
extern "C" void AnnotateIgnoreReadsEnd(const char *file, int line);
extern "C" void AnnotateIgnoreWritesBegin(const char *file, int line);
extern "C" void AnnotateIgnoreWritesEnd(const char *file, int line);
extern "C" void AnnotateIgnoreSyncBegin(const char *file, int line);
extern "C" void AnnotateIgnoreSyncEnd(const char *file, int line);
#endif
#if !defined(__x86_64__) || defined(CUDA_CPU_PORTABLE)
#undef CUDA_CPU_PORTABLE
#define CUDA_CPU_PORTABLE 1
#include <setjmp.h>
#endif

// ---------------------------------------------------------------------------------------------
// 1. The language

// Kernels and what they call are always fully optimized, so that the host's code, which is much
// more, need not be. A stack that overflows does so in the page below it, not in another stack.
#if defined(__clang__) || defined(CUDA_CPU_ASAN) || defined(CUDA_CPU_TSAN)
#define CUDA_CPU_OPTIMIZED
#else
#define CUDA_CPU_OPTIMIZED __attribute__((optimize("O3", "stack-clash-protection")))
#endif
#define __global__ inline CUDA_CPU_OPTIMIZED
#define __device__ CUDA_CPU_OPTIMIZED
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...) __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define CUDART_CB
#define __syncthreads() ::cuda_cpu::barrier(__FILE__, __LINE__)

// float1, float2, ..., make_float2(x, y), ...: two and four are aligned to be read at once.
#define CUDA_CPU_VECTORS(name, T)                                                                  \
    struct name##1 {                                                                               \
        T x;                                                                                       \
    };                                                                                             \
    struct alignas(2 * sizeof(T)) name##2 {                                                        \
        T x, y;                                                                                    \
    };                                                                                             \
    struct name##3 {                                                                               \
        T x, y, z;                                                                                 \
    };                                                                                             \
    struct alignas(sizeof(T) < 4 ? 4 * sizeof(T) : 16) name##4 {                                   \
        T x, y, z, w;                                                                              \
    };                                                                                             \
    inline name##1 make_##name##1(T x) { return {x}; }                                             \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                     \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                             \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CUDA_CPU_VECTORS(float, float)
CUDA_CPU_VECTORS(double, double)
CUDA_CPU_VECTORS(char, signed char)
CUDA_CPU_VECTORS(uchar, unsigned char)
CUDA_CPU_VECTORS(short, short)
CUDA_CPU_VECTORS(ushort, unsigned short)
CUDA_CPU_VECTORS(int, int)
CUDA_CPU_VECTORS(uint, unsigned)
CUDA_CPU_VECTORS(long, long)
CUDA_CPU_VECTORS(ulong, unsigned long)
CUDA_CPU_VECTORS(longlong, long long)
CUDA_CPU_VECTORS(ulonglong, unsigned long long)
#undef CUDA_CPU_VECTORS
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    constexpr operator uint3() const { return {x, y, z}; }
};

// Of the CUDA thread that this core runs at the moment.
inline __thread uint3 threadIdx, blockIdx;
inline __thread dim3 blockDim, gridDim;

template <class T> __forceinline__ constexpr T min(T a, T b) { return b < a ? b : a; }
template <class T> __forceinline__ constexpr T max(T a, T b) { return a < b ? b : a; }
template <class A, class B>
__forceinline__ constexpr auto min(A a, B b) -> std::common_type_t<A, B> {
    return min<std::common_type_t<A, B>>(a, b);
}
template <class A, class B>
__forceinline__ constexpr auto max(A a, B b) -> std::common_type_t<A, B> {
    return max<std::common_type_t<A, B>>(a, b);
}

// ---------------------------------------------------------------------------------------------
// 2. Errors

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
};

inline const char *cudaGetErrorName(cudaError_t error) {
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
#undef CUDA_CPU_NAME
    }
    return "unrecognized error code";
}
inline const char *cudaGetErrorString(cudaError_t error) {
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
    }
    return "unrecognized error code";
}

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

inline __thread cudaError_t last_error = cudaSuccess; // of this host thread, for cudaGetLastError

inline cudaError_t fail(cudaError_t error) { return last_error = error; }

// Say on stderr, in one line, what is wrong and where, then fail with CUDA's code for it.
__attribute__((format(printf, 3, 4), cold)) inline cudaError_t fail(cudaError_t error, Where where,
                                                                    const char *format, ...) {
    char text[1000];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fprintf(stderr, "%s:%d: %s [%s]\n", where.file, where.line, text, cudaGetErrorName(error));
    return fail(error);
}

// Of several threads that end the program the first says why; the others stay here until the end.
inline void say_alone() {
    static std::atomic<bool> said{false};
    while (said.exchange(true)) pause();
}

// The machine lacks something: say on stderr, in one line, what it is and what to try, and end.
[[noreturn]] __attribute__((format(printf, 1, 2), cold)) inline void give_up(const char *format,
                                                                             ...) {
    char text[1000];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    say_alone();
    fprintf(stderr, "cuda_runtime.h: %s\n", text);
    _exit(1);
}

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

// ---------------------------------------------------------------------------------------------
// 3. Devices
// Each device has one range of addresses, so a pointer tells whose it is. An allocation ends at a
// page's end and an unmapped page follows it; freed memory is unmapped and, while addresses last,
// not handed out again, so that an access to either is caught. So is one by the host: the addresses
// that a program holds are never mapped. The memory itself lies in a second range, and where a
// kernel, copy or fill is given one of the first, it gets that of the second.

struct Stream;
struct Team;

struct Allocation {
    size_t bytes;
    char *pages; // what is mapped: from here to the end of the allocation
    Where made, freed;
    bool live;
    const char *by = "cudaMalloc"; // or another call
    bool mapped = true;            // cudaFreeAsync: no more live, but still in use
};

struct Device {
    int id = 0, cores = 1;
    char memory_of[32] = "every device"; // or one of them, for messages
    double slowdown = 1;                 // factor by which kernels take longer
    char *base = nullptr, *next = nullptr,
         *end = nullptr;        // range of addresses that the program holds, and its unused rest
    ptrdiff_t away = 0;         // from there to the memory itself; 0 if it is managed
    size_t total = 0, used = 0; // bytes
    std::map<const char *, Allocation> allocations; // by first byte
    Stream *default_stream = nullptr;
    std::vector<Stream *> streams;               // the default stream and the others
    std::vector<bool> peers;                     // to which access was enabled
    std::atomic<cudaError_t> fault{cudaSuccess}; // of a kernel; stays, as on a GPU
    std::map<std::string, int> more_shared;      // kernels: see cudaFuncSetAttribute
    std::mutex kernel_lock;                      // one kernel at a time; copies run beside it
    Team *team = nullptr;
};

// A __device__ or __constant__ variable. Each device has a copy in its memory, which begins with
// the value of the declaration. The host has addresses in its place that nobody can access.
struct Symbol {
    const char *name;
    Where where;
    const void *initial;
    size_t bytes;
    char *host_side;
    std::map<int, void *> copies; // by device
};
struct Pinned {
    size_t bytes;
    const char *by;           // cudaMallocHost or cudaHostRegister
    std::shared_ptr<int> use; // copied by each enqueued operation that uses the memory
    Where used;               // where the last of these was enqueued
};
// The last one that the program seems not to know of: cudaGetLastError() has not told it, nor has
// it tried again with the same pointer.
struct FailedAllocation {
    const char *by = nullptr; // no call: there is none
    void **pointer = nullptr;
    size_t bytes = 0, free = 0;
    int device = 0;
    Where where = {};
};
struct Machine {
    std::vector<Device *> devices;
    FailedAllocation failed;
    Device managed; // cudaMallocManaged: memory of every device and of the host
    std::map<const char *, Pinned> pinned; // host memory, by first byte
    std::vector<Symbol *> symbols;
    std::map<const void *, const Device *> handles; // of the streams and events that exist
    std::mutex lock;                // guards the tables of allocations, symbols and handles
    bool peers;                     // whether devices can access each other's memory
    int watchdog;                   // seconds
    int spinning; // helpers of each device that spin before they sleep; 0 if workers share cores
    Machine();
};
inline Machine &machine() {
    static Machine *machine = new Machine; // never destroyed: its threads outlive main
    return *machine;
}
inline __thread int current_device = 0;

inline Device &current() { return *machine().devices[current_device]; }
inline bool valid_device(int id) { return id >= 0 && id < (int)machine().devices.size(); }

inline Device *owner_of(const void *pointer) {
    const char *p = (const char *)pointer;
    for (Device *device : machine().devices)
        if (p >= device->base && p < device->end + device->away) return device;
    Device &managed = machine().managed;
    return p >= managed.base && p < managed.end ? &managed : nullptr;
}
// An address of device memory as the program holds it, and where that memory is; either is made of
// either. Other addresses stay as they are.
inline const char *held(const void *pointer) {
    const Device *owner = owner_of(pointer);
    return (const char *)pointer - (owner && pointer >= owner->end ? owner->away : 0);
}
inline char *real(const void *pointer) {
    const Device *owner = owner_of(pointer);
    return (char *)pointer + (owner && pointer < owner->end ? owner->away : 0);
}

// Which device's range p lies in, and the allocation there or just before it; null where none is.
struct Place {
    Device *device;
    const char *first;
    const Allocation *allocation;
};
inline Place locate(const void *pointer) {
    const char *p = held(pointer);
    Device *owner = owner_of(p);
    if (!owner) return {nullptr, nullptr, nullptr};
    auto found = owner->allocations.upper_bound(p);
    if (found == owner->allocations.begin()) return {owner, nullptr, nullptr};
    --found;
    return {owner, found->first, &found->second};
}
// What CUDA's unified addressing lets a call or kernel on `device` use: its own memory, managed
// memory, and that of peers to which access is enabled.
inline bool is_managed(const Device *owner) { return owner == &machine().managed; }
inline bool reaches(const Device &device, const Device *owner) {
    return owner == &device || is_managed(owner) || device.peers[owner->id];
}
inline Pinned *find_pinned(const void *pointer) {
    auto found = machine().pinned.upper_bound((const char *)pointer);
    if (found == machine().pinned.begin()) return nullptr;
    --found;
    return (const char *)pointer < found->first + found->second.bytes ? &found->second : nullptr;
}
inline bool is_pinned(const void *pointer) { return find_pinned(pointer); }
inline bool is_pinned_now(const void *pointer) {
    std::lock_guard<std::mutex> guard(machine().lock);
    return is_pinned(pointer);
}
// To be kept by what is queued and uses the memory at `pointer`, if that is pinned.
inline std::shared_ptr<int> use_of(const void *pointer, Where where) {
    std::lock_guard<std::mutex> guard(machine().lock);
    Pinned *pinned = find_pinned(pointer);
    if (!pinned) return nullptr;
    pinned->used = where;
    return pinned->use;
}

inline Symbol *find_symbol(const void *pointer) {
    const char *p = (const char *)pointer;
    for (Symbol *symbol : machine().symbols)
        if (p >= symbol->host_side && p < symbol->host_side + symbol->bytes) return symbol;
    return nullptr;
}

inline cudaError_t no_result(const char *call, Where where) {
    return fail(cudaErrorInvalidValue, where, "%s: the pointer to its result is null", call);
}
// What a null pointer may come from.
inline std::string null_may_be() {
    const FailedAllocation &failed = machine().failed;
    if (!failed.by) return ": is a tensor or vector empty, or an index out of range?";
    char text[300];
    snprintf(text, sizeof text,
             ": %s in %s:%d failed, which asked for %zu bytes when device %d had %zu free",
             failed.by, failed.where.file, failed.where.line, failed.bytes, failed.device,
             failed.free);
    return text;
}

// Check that [pointer, pointer + bytes) is live memory that `device` reaches, not of the host;
// `what` names call and argument.
inline cudaError_t check_memory(const Device &device, const void *pointer, size_t bytes,
                                Where where, const char *what) {
    if (!pointer)
        return fail(cudaErrorInvalidValue, where, "%s: the pointer is null%s", what,
                    null_may_be().c_str());
    std::lock_guard<std::mutex> guard(machine().lock);
    Place at = locate(pointer);
    if (const Symbol *symbol = find_symbol(pointer))
        return fail(cudaErrorInvalidValue, where,
                    "%s: %s is a device variable, which has no address on the host: copy it with "
                    "cudaMemcpyToSymbol, and use its name in kernels",
                    what, symbol->name);
    if (!at.device)
        return fail(cudaErrorInvalidValue, where,
                    "%s: %p is %s memory, not memory of device %d: allocate it with cudaMalloc",
                    what, pointer, is_pinned(pointer) ? "pinned host" : "host", device.id);
    if (!reaches(device, at.device))
        return fail(cudaErrorInvalidValue, where, "%s: %p is memory of device %d, not of device %d",
                    what, pointer, at.device->id, device.id);
    const char *p = held(pointer);
    if (!at.allocation || p > at.first + at.allocation->bytes)
        return fail(cudaErrorInvalidValue, where, "%s: nothing is allocated at %p on %s", what,
                    pointer, at.device->memory_of);
    if (!at.allocation->live)
        return fail(cudaErrorInvalidValue, where, "%s: %p is memory of %s that %s:%d has freed",
                    what, pointer, at.device->memory_of, at.allocation->freed.file,
                    at.allocation->freed.line);
    size_t offset = p - at.first;
    if (offset + bytes > at.allocation->bytes)
        return fail(cudaErrorInvalidValue, where,
                    "%s: %zu bytes at offset %zu overrun the %zu bytes that %s:%d allocated on %s",
                    what, bytes, offset, at.allocation->bytes, at.allocation->made.file,
                    at.allocation->made.line, at.device->memory_of);
    return cudaSuccess;
}

inline size_t page_size() {
    static const size_t bytes = sysconf(_SC_PAGESIZE);
    return bytes;
}

// The arrays that kernels declare __shared__ get fixed places, one behind the other, in an arena
// that every worker has a copy of. Before and behind each lies a gap, which holds poison: a kernel
// that reads there computes with NaN or with absurd integers, and one that writes there is found
// when its block ends. Tag is a type of its own for each declaration, and knows its name and line.
constexpr size_t shared_gap = 64, usual_shared_bytes = 48 * 1024,
                 dynamic_shared_bytes = 99 * 1024; // with cudaFuncSetAttribute
struct SharedArray {
    const char *name, *file;
    int line;
    size_t offset, bytes, end; // end: of the gap behind it
    unsigned char poison;      // each byte of that gap
};
struct SharedPlace {
    size_t offset, number;
};
inline std::vector<SharedArray> &shared_arrays() {
    static auto *arrays = new std::vector<SharedArray>; // as the machine: never destroyed
    return *arrays;
}
inline size_t shared_arena_bytes() {
    return shared_arrays().empty() ? shared_gap : shared_arrays().back().end;
}
inline size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }
// A gap is as long as a row, t[i] of t[8][9], as far as that is no waste: one too many is likely.
inline SharedPlace reserve_shared(const char *name, const char *file, int line, size_t bytes,
                                  size_t row, bool integers) {
    const size_t offset = shared_arena_bytes(), number = shared_arrays().size();
    const size_t gap = min(round_up(row, shared_gap), 8 * shared_gap);
    const unsigned char poison = integers ? 0x7F : 0xFF; // -1 would pass for a number
    const size_t end = offset + round_up(bytes, shared_gap) + gap;
    shared_arrays().push_back({name, file, line, offset, bytes, end, poison});
    return {offset, number};
}
template <class T, class Tag>
inline const SharedPlace shared_place = reserve_shared(
    Tag::name(), Tag::file(), Tag::line(), sizeof(T), sizeof(std::remove_extent_t<T>),
    std::is_integral<std::remove_all_extents_t<T>>::value);

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
inline char host_is_in[200]; // what nvtxMarkA has named, until the range ends: an allreduce

// Under ThreadSanitizer a stack goes on, from an operation on a device, to the call that has
// enqueued it, here(), and to that one's callers. enter_callers() begins what leave_callers() ends;
// both would be functions of that stack if they were not hidden.
#ifdef CUDA_CPU_TSAN
inline void note_callers(Running &r) {
    Hidden hidden;
    void *frames[32], *const function = _Unwind_FindEnclosingFunction(r.where.pc);
    const int n = backtrace(frames, 32);
    int first = 0;
    while (first < n && _Unwind_FindEnclosingFunction((char *)frames[first] - 1) != function)
        first++;
    for (int i = 0; i < 8 && first + 1 + i < n; i++) r.callers[i] = frames[first + 1 + i];
}
__attribute__((noinline, no_sanitize("thread"))) inline void enter_callers() {
    if (!running.where.pc) return;
    for (int i = 7; i >= 0; i--)
        if (running.callers[i]) __tsan_func_entry(running.callers[i]);
    __tsan_func_entry(running.where.pc);
}
__attribute__((noinline, no_sanitize("thread"))) inline void leave_callers() {
    if (!running.where.pc) return;
    __tsan_func_exit();
    for (void *caller : running.callers)
        if (caller) __tsan_func_exit();
}
#else
inline void note_callers(Running &) {}
inline void enter_callers() {}
inline void leave_callers() {}
#endif

// Return the line of the program that this thread has reached, as "FILE:LINE": that of the address
// `interrupted`, which is on the stack of `n` frames, or of its caller. Library functions are
// skipped in favour of their callers. In an allreduce its own line comes first, then ", in " and
// the line of the tool that it called. Empty if addr2line is not installed, or the program has no
// line numbers (-g1).
extern "C" char __executable_start;
inline bool is_own(const char *file) { // the program's, not a library's
    return strncmp(file, "/usr/", 5) && !strstr(file, "cuda_runtime.h") && !strstr(file, "watch.h");
}
inline std::string line_of(void **frames, int n, void *interrupted, bool exact) {
    std::string command = "addr2line -f -i -e /proc/" + std::to_string(getpid()) + "/exe";
    bool found = false;
    for (int i = 0; i < n; i++) {
        found = found || frames[i] == interrupted;
        if (!found) continue;
        // All but the first are where a call returns to.
        size_t address = (size_t)frames[i] - (!exact || frames[i] != interrupted);
#ifdef __PIE__
        address -= (size_t)&__executable_start;
#endif
        char text[32];
        snprintf(text, sizeof text, " 0x%zx", address);
        command += text;
    }
    FILE *lines = found ? popen((command + " 2>/dev/null").c_str(), "r") : nullptr;
    if (!lines) return "";
    char function[4000], line[1000], folder[1000];
    std::string library, first, last; // first, last: of the program's own
    bool in_allreduce = false;
    const size_t inside = getcwd(folder, sizeof folder) ? strlen(folder) : 0;
    while (fgets(function, sizeof function, lines) && fgets(line, sizeof line, lines)) {
        line[strcspn(line, "\n")] = 0;
        if (char *rest = strstr(line, " (discriminator")) *rest = 0; // a path may have a space
        if (*line == '?' || strstr(line, "/worker.cu:")) continue;   // nobody's mistake
        const bool here = inside && !strncmp(line, folder, inside) && line[inside] == '/';
        const std::string where = line + (here ? inside + 1 : 0);
        if (!is_own(line) && library.empty()) library = where;
        if (!is_own(line)) continue;
        if ((in_allreduce = strstr(function, "run_allreduce"))) break;
        if (first.empty()) first = where;
        last = where;
        if (!*host_is_in) break;
    }
    pclose(lines);
    if (first.empty()) return library;
    return in_allreduce && last != first ? last + ", in " + first : first;
}
// Of a signal's handler.
inline void *interrupted(void *context) {
#if defined(__x86_64__)
    return (void *)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
#elif defined(__aarch64__)
    return (void *)((ucontext_t *)context)->uc_mcontext.pc;
#else
    return nullptr;
#endif
}
inline std::string interrupted_line(void *context) {
    void *frames[64];
    const int n = backtrace(frames, 64);
    return line_of(frames, n, interrupted(context), true);
}

inline bool in_dynamic_shared(const void *pointer, ptrdiff_t &offset, size_t &bytes);
inline bool below_stack(const void *pointer);
#if defined(CUDA_CPU_ASAN) || defined(CUDA_CPU_TSAN)
constexpr size_t stack_bytes = 256 * 1024; // of a thread of a block
#else
constexpr size_t stack_bytes = 64 * 1024;
#endif

// What is or was allocated there, for the fault handler: "byte 8 of the 40 bytes that FILE:LINE
// allocated", and how to get there, if the program may.
inline std::string allocated_there(const Place &at, const void *p) {
    const Allocation *a = at.allocation;
    if (!a) return "where nothing is allocated";
    const Where &where = a->live ? a->made : a->freed;
    char text[300];
    snprintf(text, sizeof text, "byte %td of the %zu bytes that %s:%d %s", held(p) - at.first,
             a->bytes, where.file, where.line, a->live ? "allocated" : "has freed");
    if (!a->live || held(p) != p || held(p) >= at.first + a->bytes) return text;
    return text + std::string(
                      running.name
                          ? ", through a pointer that it read from memory: the stand-in translates "
                            "only pointers that are arguments, members of arguments, copied to a T "
                            "** by cudaMemcpy, or copied to a pointer by cudaMemcpyToSymbol"
                          : ": copy it with cudaMemcpy");
}

// What the program did there, in words.
inline void fault_words(char (&what)[600], const void *p, const Place &at, const Symbol *symbol,
                        bool stack, bool division, bool odd) {
    ptrdiff_t offset = 0;
    size_t bytes = 0;
    if (symbol) {
        snprintf(what, sizeof what,
                 "accesses %s, which %s:%d declares as a device variable: copy it with "
                 "cudaMemcpyFromSymbol or cudaMemcpyToSymbol",
                 symbol->name, symbol->where.file, symbol->where.line);
    } else if (running.name && in_dynamic_shared(p, offset, bytes)) {
        snprintf(what, sizeof what,
                 "access to byte %td of dynamic shared memory, but the launch asked for %zu bytes "
                 "(the third value between <<< and >>>)",
                 offset, bytes);
    } else if (stack) {
        snprintf(what, sizeof what,
                 "a thread's local variables do not fit into its stack of %zu KiB: is there "
                 "endless recursion, or a large array that belongs in memory from cudaMalloc?",
                 stack_bytes >> 10);
    } else if (division) {
        snprintf(what, sizeof what,
                 "an integer is divided by zero (a GPU would go on with a meaningless number)");
    } else if (!at.device && odd) {
        snprintf(what, sizeof what,
                 "misaligned access (the address of a float4 must be a multiple of 16 bytes), or "
                 "access through an invalid pointer");
    } else if (!at.device) {
        snprintf(what, sizeof what, "access through a null pointer%s", null_may_be().c_str());
    } else {
        snprintf(what, sizeof what, "%s memory of %s, %s", running.name ? "access to" : "accesses",
                 at.device->memory_of, allocated_there(at, p).c_str());
    }
}

// Print the line in which the host crashed or aborted, if it can be found.
inline void say_where_host_stopped(int signal, const void *p, void *context) {
    char what[300];
    alarm(10); // the heap may be in any state: no message is better than one that never comes
    const std::string line = interrupted_line(context);
    if (signal == SIGABRT) snprintf(what, sizeof what, "aborts: is an index out of range?");
    else if (signal == SIGFPE) snprintf(what, sizeof what, "divides by zero");
    else
        snprintf(
            what, sizeof what,
            "accesses %s: is an index out of range, a pointer null, or is there endless recursion?",
            p ? "memory that is not there" : "address 0");
    if (!line.empty()) fprintf(stderr, "%s: the host %s\n", line.c_str(), what);
}

// SIGSEGV or SIGBUS: where the address belongs to a device, say whose memory was missed by whom.
// Any other fault is left to the handler that was installed before this one, but those of a kernel
// by a null pointer, its stack or a division (SIGFPE): the access is tried again on return, and
// faults again. Should finding the line fault itself, this is called once more, and does without.
inline struct sigaction before_fault[NSIG];
inline __thread siginfo_t *without_line = nullptr;
inline void on_fault(int signal, siginfo_t *info, void *context) {
    const bool again = without_line;
    if (again) info = without_line;
    const bool division = signal == SIGFPE;
    const void *p = division || signal == SIGABRT ? nullptr : info->si_addr;
    // Other threads may be changing the tables, such as one that starts and finds its variables.
    // Should this thread itself have been, nobody unlocks them.
    bool locked = machine().lock.try_lock();
    for (int ms = 0; !locked && ms < 1000; ms++, locked = machine().lock.try_lock()) usleep(1000);
    Place at = locate(p);
    // Linux loads no program below 4 MiB.
    const bool null = info->si_code == SEGV_MAPERR && (size_t)p < 4 << 20;
    // The processor refuses a vector at an address that does not divide by its size, and addresses
    // that no memory can have.
    const bool odd = info->si_code == SI_KERNEL;
    const Symbol *symbol = find_symbol(p);
    if (locked) machine().lock.unlock();
    ptrdiff_t offset = 0;
    size_t bytes = 0;
    const bool shared = running.name && in_dynamic_shared(p, offset, bytes);
    const bool stack = running.name && below_stack(p);
    if (!at.device && !symbol && !shared && !stack &&
        !(running.name && (null || odd || division))) {
        without_line = info;
        if (!again && !running.name) say_where_host_stopped(signal, p, context);
        without_line = nullptr;
        sigaction(signal, &before_fault[signal], nullptr);
        if (signal == SIGABRT) raise(signal);
        return;
    }
    if (!again) say_alone();
    without_line = info;
    const std::string line = again ? "" : interrupted_line(context);
    char who[400], what[600];
    if (running.name)
        snprintf(who, sizeof who, "%s:%d: %s on device %d%s%s:", running.where.file,
                 running.where.line, running.name, running.device, line.empty() ? "" : ", in ",
                 line.c_str());
    else snprintf(who, sizeof who, "%s%sthe host", line.c_str(), line.empty() ? "" : ": ");
    fault_words(what, p, at, symbol, stack, division, odd);
    const cudaError_t error = division ? cudaErrorLaunchFailure
                              : odd    ? cudaErrorMisalignedAddress
                                       : cudaErrorIllegalAddress;
    fprintf(stderr, "%s %s [%s]\n", who, what, cudaGetErrorName(error));
    _exit(1);
}

// ThreadSanitizer has printed a report, of many lines; this says it in one: whose memory it is, the
// two operations, and the lines that have enqueued them. A pair of lines is reported once.
#ifdef CUDA_CPU_TSAN
struct Frame {
    std::string function, line;
};
// Split a stack into the program's own frames, innermost first: those that run, and those that
// enqueued them. `what` becomes the name of an operation that is not a kernel.
inline void own_frames(void **stack, int n, std::vector<Frame> (&frames)[2], std::string &what) {
    char folder[1000], text[4000];
    const size_t length = getcwd(folder, sizeof folder) ? strlen(folder) : 0;
    int enqueued = 0;
    for (int i = 0; i < n && stack[i]; i++) {
        if (i > 0 && stack[i] == stack[i - 1]) continue; // once for each function inlined there
        __sanitizer_symbolize_pc(stack[i], "%f\n%s:%l", text, sizeof text);
        for (const char *frame = text; *frame; frame += strlen(frame) + 1) {
            const char *line = strchr(frame, '\n');
            if (!line) continue;
            std::string function(frame, line++);
            if (!enqueued && what.empty())
                what = function.find("cudaMemcpyPeer") == 0        ? "a message"
                       : function.find("cuda_cpu::Copy::") == 0    ? "a copy"
                       : function.find("cuda_cpu::set_async") == 0 ? "a memset"
                                                                   : "";
            if (function.find("cuda_cpu::here") == 0) enqueued = 1;
            if (length && !strncmp(line, folder, length) && line[length] == '/') line += length + 1;
            if (strchr("<?", *line) || !is_own(line) || strstr(line, "sanitizer")) continue;
            frames[enqueued].push_back({function.substr(0, function.find_first_of("(<")), line});
        }
    }
}
// "add_ enqueued at mgpu.cu:860": in an allreduce where there is one, not in the tool that it calls
inline std::string raced(void **stack, int n, std::string &inside) {
    std::vector<Frame> frames[2];
    std::string what;
    own_frames(stack, n, frames, what);
    const std::vector<Frame> &inner = frames[0], &outer = frames[1];
    if (!inner.empty()) what = inner[0].function, inside = inner[0].line; // a kernel, or the host
    if (outer.empty())
        return inner.empty() ? "the host" : "the host's " + what + " at " + inner[0].line;
    size_t at = 0;
    while (at < outer.size() && outer[at].function != "run_allreduce") at++;
    at = at == 0 || at == outer.size() ? 0 : at - 1; // the function that it called
    const std::string by = at > 0 ? outer[at - 1].function : "";
    if (what.empty()) what = "an operation";
    if (!by.empty() && !inner.empty()) what = by;
    else if (inner.empty()) what += " (" + (by.empty() ? outer[at].function : by) + ")";
    return what + " enqueued at " + outer[at].line;
}
} // namespace cuda_cpu
extern "C" void __tsan_on_report(void *report) {
    using namespace cuda_cpu;
    const char *description;
    void *sleep[1], *stack[64], *address = nullptr;
    int stacks, mops, more[6], size, write, atomic;
    __tsan_get_report_data(report, &description, &more[0], &stacks, &mops, &more[1], &more[2],
                           &more[3], &more[4], sleep, 1);
    Hidden hidden;
    std::string two[2], inside[2];
    for (int i = 0; i < mops && i < 2; i++) {
        memset(stack, 0, sizeof stack);
        __tsan_get_report_mop(report, i, &more[5], &address, &size, &write, &atomic, stack, 64);
        two[i] = raced(stack, 64, inside[i]);
    }
    static std::set<std::string> said;
    const bool swapped = two[0] < two[1];
    if (mops < 2 || !said.insert(two[swapped] + two[!swapped]).second) return;
    const Device *owner = owner_of(address);
    const std::string where = owner ? "gpu(" + std::to_string(owner->id) + ")" : "the host";
    if (two[0] == two[1] && !inside[0].empty())
        fprintf(stderr,
                "race on %s: %s, between its lines %s and %s: is __syncthreads() missing?\n",
                where.c_str(), two[0].c_str(), inside[1].c_str(), inside[0].c_str());
    else
        fprintf(stderr, "race on %s: %s and %s: is a wait missing?\n", where.c_str(),
                two[1].c_str(), two[0].c_str());
}
namespace cuda_cpu {
#endif

// ---------------------------------------------------------------------------------------------
// 4. Streams
// A stream is a thread that works off a queue of tasks in order. A mark is a point in a stream that
// others wait for: what an event stands for, once it is recorded.

struct Mark {
    std::mutex lock;
    std::condition_variable changed;
    std::atomic<bool> reached{false};
    double seconds = 0; // when it was reached
};

struct Task {
    std::function<void()> run;
    Running running;
    bool is_mark; // a mark counts as finished before its waiters are told
};

// A function of the program's, or the stand-in itself, has thrown where nobody could catch it.
__attribute__((cold)) inline void uncaught() {
    auto end = [](const char *what) {
        if (!running.name)
            give_up("a thread of a device failed: %s: raise ulimit -v, or set CUDA_CPU_CORES=1",
                    what);
        say_alone();
        fail(cudaErrorLaunchFailure, running.where, "%s on device %d: uncaught exception: %s",
             running.name, running.device, what);
        _exit(1);
    };
    try {
        throw;
    } catch (const std::exception &e) { end(e.what()); } catch (...) {
        end("not a std::exception");
    }
}

inline __thread int device_of_thread = -1;            // -1: a thread of the program's
inline std::vector<void (*)()> &on_start() {          // what a device's thread calls first
    static auto *calls = new std::vector<void (*)()>; // as the machine: never destroyed
    return *calls;
}

// All threads of the stand-in begin here.
template <class F> std::thread start_thread(int device, F run) {
    try {
        return std::thread([device, run] {
            try {
                device_of_thread = current_device = device;
                for (auto call : on_start()) call();
                run();
            } catch (...) { uncaught(); }
        });
    } catch (const std::exception &e) {
        give_up("cannot start a thread for device %d: %s: raise ulimit -u and ulimit -v, or set "
                "CUDA_CPU_CORES=1",
                device, e.what());
    }
}

struct Stream {
    // As on a GPU, no more tasks are pending. The host then waits until half of them are done: if
    // each one woke it, it would take a device from its core each time.
    static constexpr size_t most = 1024;
    Device *device;
    bool blocking; // ordered with the default stream
    std::mutex lock;
    std::condition_variable pushed, popped;
    std::deque<Task *> queue;
    bool stopping = false;
    bool used = false;              // since the default stream last waited for this one
    std::atomic<int> unfinished{0}; // tasks
    std::shared_ptr<Mark>
        default_mark; // of the default stream, that this stream has yet to wait for
    std::thread thread;
    Stream(Device *device, bool blocking) : device(device), blocking(blocking) {
        thread = start_thread(device->id, [this] { work(); });
    }
    void push(Running running, std::function<void()> run, bool is_mark = false);
    void work();
};

inline __thread bool in_host_function = false; // of cudaLaunchHostFunc

// Put a task at the end of the stream's queue.
inline void Stream::push(Running running, std::function<void()> run, bool is_mark) {
    if (in_host_function) {
        const Running &host = cuda_cpu::running;
        fail(cudaErrorNotPermitted, host.where,
             "cudaLaunchHostFunc: its function must not call CUDA, which would wait for that "
             "function");
        _exit(1);
    }
    if (device_of_thread >= 0) {
        const Running &kernel = cuda_cpu::running;
        say_alone();
        fail(cudaErrorNotPermitted, running.where.file ? running.where : kernel.where,
             "%s on device %d launches a kernel, or calls CUDA: the stand-in lacks dynamic "
             "parallelism",
             kernel.name, kernel.device);
        _exit(1);
    }
    if (running.where.pc) note_callers(running);
    Task *task = new Task{std::move(run), running, is_mark};
    published(task);
    Hidden hidden;
    std::unique_lock<std::mutex> guard(lock);
    if (queue.size() == most) popped.wait(guard, [&] { return queue.size() <= most / 2; });
    queue.push_back(task);
    unfinished++;
    used = true;
    guard.unlock();
    pushed.notify_one();
}

inline void start_worker();
inline void stop_worker();

inline void Stream::work() {
    start_worker();
    for (;;) {
        Task *task;
        {
            Hidden hidden;
            std::unique_lock<std::mutex> guard(lock);
            pushed.wait(guard, [&] { return stopping || !queue.empty(); });
            if (queue.empty()) {
                guard.unlock();
                return stop_worker();
            }
            task = queue.front();
            queue.pop_front();
            if (queue.size() == most / 2) popped.notify_all();
        }
        observed(task);
        running = task->running;
        enter_callers();
        task->run();
        leave_callers();
        running.name = nullptr;
        Hidden hidden;
        const bool is_mark = task->is_mark;
        delete task; // before the stream becomes idle: then its memory may be freed
        if (!is_mark) unfinished--;
    }
}

inline double seconds_now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

// Mark the end of what the stream has been given so far.
inline std::shared_ptr<Mark> mark(Stream *stream) {
    Hidden hidden;
    auto mark = std::make_shared<Mark>();
    auto reach = [mark, stream] {
        published(mark.get());
        Hidden hidden;
        stream->unfinished--;
        {
            std::lock_guard<std::mutex> guard(mark->lock);
            mark->reached = true;
            mark->seconds = seconds_now();
        }
        mark->changed.notify_all();
    };
    stream->push({nullptr, {nullptr, 0, nullptr}, stream->device->id}, reach, true);
    return mark;
}
inline bool is_reached(Mark &mark) {
    bool reached;
    {
        Hidden hidden;
        std::lock_guard<std::mutex> guard(mark.lock);
        reached = mark.reached;
    }
    if (reached) observed(&mark);
    return reached;
}
// The calling thread waits for the mark. If devices do not share cores, a stream first looks for it
// for 50 us: to be woken takes as long, and in an allreduce devices wait for each other in turn.
inline void wait(Mark &mark) {
    {
        Hidden hidden;
        if (device_of_thread >= 0 && machine().spinning)
            for (double end = seconds_now() + 5e-5; !mark.reached && seconds_now() < end;)
                ;
        std::unique_lock<std::mutex> guard(mark.lock);
        mark.changed.wait(guard, [&] { return mark.reached.load(); });
    }
    observed(&mark);
}
// The stream waits for the mark before it goes on to what it is given later.
inline void wait(Stream *stream, std::shared_ptr<Mark> mark) {
    Hidden hidden;
    stream->push({nullptr, {nullptr, 0, nullptr}, stream->device->id}, [mark] { wait(*mark); });
}

// Held by a host thread while it looks through the streams of devices or enqueues in their order:
// several may use one device.
struct Enqueuing {
    static std::recursive_mutex &lock() {
        static auto *lock = new std::recursive_mutex; // as the machine: never destroyed
        return *lock;
    }
    Enqueuing() {
        Hidden hidden;
        lock().lock();
    }
    ~Enqueuing() {
        Hidden hidden;
        lock().unlock();
    }
};

// The default stream (stream 0, or none given) waits for what the other streams of its device were
// given so far, and they for it: CUDA's "legacy default stream". cudaStreamNonBlocking opts out.
inline Stream *ordered(Stream *stream, Device &device) {
    Hidden hidden;
    if (!stream) stream = device.default_stream;
    if (stream == device.default_stream) {
        for (Stream *other : device.streams)
            if (other != stream && other->blocking && other->used) {
                other->used = false;
                wait(stream, mark(other));
            }
    } else if (stream->default_mark) {
        wait(stream, stream->default_mark);
        stream->default_mark = nullptr;
    }
    return stream;
}
// To be called after a push to the stream that ordered() returned.
inline void pushed(Stream *stream) {
    Hidden hidden;
    Device &device = *stream->device;
    if (stream != device.default_stream || device.streams.size() == 1) return;
    auto last = mark(stream);
    for (Stream *other : device.streams)
        if (other != stream && other->blocking) other->default_mark = last;
}
inline void submit(Stream *stream, Device &device, Running running, std::function<void()> run) {
    const Enqueuing one_at_a_time;
    stream = ordered(stream, device);
    stream->push(running, std::move(run));
    pushed(stream);
}

// Check a stream or an event that a call is given. There is always a default stream.
inline cudaError_t check_handle(const void *handle, Where where, const char *call,
                                bool is_stream = true) {
    if (is_stream && !handle) return cudaSuccess;
    Hidden hidden;
    std::lock_guard<std::mutex> guard(machine().lock);
    if (machine().handles.count(handle)) return cudaSuccess;
    return fail(cudaErrorInvalidResourceHandle, where,
                "%s: %p is not %s: was it never created, or is it already destroyed?", call, handle,
                is_stream ? "a stream" : "an event");
}

// The host waits for a stream, or for a device; returns the device's fault.
inline cudaError_t synchronize(Stream *stream) {
    const Device &device = *stream->device;
    std::shared_ptr<Mark> last;
    {
        const Enqueuing one_at_a_time;
        Hidden hidden;
#ifndef CUDA_CPU_TSAN // which must be told even that a stream was done long ago
        const bool is_default = stream == device.default_stream;
        if (stream->unfinished == 0 && !stream->default_mark && !is_default) return device.fault;
#endif
        last = mark(ordered(stream, *stream->device));
    }
    wait(*last);
    Hidden hidden;
    last.reset();
    return device.fault;
}
inline cudaError_t synchronize(Device &device) {
    std::vector<std::shared_ptr<Mark>> last;
    {
        const Enqueuing one_at_a_time;
        Hidden hidden;
        for (Stream *stream : device.streams) {
#ifndef CUDA_CPU_TSAN
            if (stream->unfinished == 0) continue;
#endif
            last.push_back(mark(ordered(stream, device)));
        }
    }
    for (auto &mark : last) wait(*mark);
    Hidden hidden;
    last.clear();
    return device.fault;
}

// ---------------------------------------------------------------------------------------------
// 5. Fibers
// The threads of a block share one core. Thread 0 runs on a stack of its own. If it ends without
// having met a barrier, the kernel has none, and the other threads run one after another in a plain
// loop, into which the compiler inlines the kernel. If it meets one, every other thread gets a
// stack too, and at each barrier thread t hands over to thread t+1, the last one back to thread 0.
// From the first warp function that a thread of the block meets, section 6 chooses the next thread.

struct Fiber {
    char *stack = nullptr; // lowest byte
#ifdef CUDA_CPU_PORTABLE
    bool fresh = false; // not yet switched to
    jmp_buf registers;
    ucontext_t start;
#else
    void *sp = nullptr;
#endif
#ifdef CUDA_CPU_TSAN
    void *tsan = nullptr;
#endif
#ifdef CUDA_CPU_ASAN
    void *fake_stack = nullptr;
    const void *bottom = nullptr;
    size_t size = 0;
#endif
};

struct Stacks { // one mapping
    char *pages;
    size_t bytes;
    int guarded; // stacks with an unmapped page below each
};

// Who runs after a thread of a block: the next one, in the plain loop, or when this one has met a
// barrier or ended; or a lane that next_lane() chooses.
enum Mode { in_loop, in_turns, by_lanes };
struct Warp;

// Who was last at an element of shared memory that is declared volatile; see touch_volatile().
struct Touch {
    unsigned long long block = 0; // by Worker::blocks
    unsigned phase = 0;           // barriers of the block before it
    unsigned calls = 0;           // of warp functions by the lane before it
    int thread = -1;
    const volatile void *at = nullptr;
    size_t bytes = 0;
    unsigned long long value = 0; // before the thread may have written
};
struct Touched {
    Touch by[2], written; // the last two threads, and the last that wrote
};

struct Worker {
    char *shared = nullptr;                    // arrays of a fixed size
    std::vector<unsigned long long> filled_by; // the last block that has filled each with NaN
    std::vector<unsigned> filled;              // those that the block has used
    std::vector<Touched> touched;              // by its distance from the first shared byte
    Touch last_touch, conflict;                // conflict: the last write that another lane was at
    char *dynamic_end = nullptr;    // of the block's dynamic shared memory; no access beyond it
    char *dynamic_shared = nullptr; // where that begins
    size_t dynamic_bytes = 0;
    int timer = -1;             // of the watchdog
    std::vector<Fiber> fibers;  // for thread 0; from a block's first barrier on for all its threads
    std::vector<Stacks> stacks; // theirs
    Fiber scheduler;            // the stack of the operating system's thread
    // The block that is running:
    void (*run)(const void *, bool) = nullptr;
    const void *kernel = nullptr;
    int threads = 0, current = 0;
    Mode mode = in_loop;
    bool met_barrier = false, thread0_ended = false, failed = false;
    cudaError_t error = cudaErrorLaunchFailure; // if it has failed
    unsigned phase = 0;         // barriers that thread 0 has met; by_lanes: that the block has left
    const char *file = nullptr; // where thread 0 met the last one
    int line = 0;
    int count[2] = {};             // of __syncthreads_count(), by the phase's parity
    unsigned long long blocks = 0; // that have begun
    // by_lanes:
    Warp *warps = nullptr;
    int warp = 0;         // the one whose turn it is
    unsigned todo = 0;    // its lanes that have yet to run in this round
    int looped = -1;      // the thread that the plain loop runs, on no fiber
    bool *stop = nullptr; // ends the plain loop after that thread
    unsigned long long random = 0;
    char begin = 0, end = 0, barrier[2] = {}; // addresses that stand for an order, see published()
};
inline __thread Worker *worker = nullptr;

// Leave the fiber `from`, continue `to`; returns when somebody continues `from`.
#ifdef CUDA_CPU_PORTABLE
__attribute__((noinline)) inline void switch_stack(Fiber &from, Fiber &to) {
    if (_setjmp(from.registers)) return;
    if (to.fresh) {
        to.fresh = false;
        setcontext(&to.start);
    }
    _longjmp(to.registers, 1);
}
#else
#ifdef __AVX512F__
#define CUDA_CPU_MORE_REGISTERS                                                                    \
    , "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25",    \
        "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "xmm31", "k0", "k1", "k2", "k3", "k4", "k5",  \
        "k6", "k7"
#else
#define CUDA_CPU_MORE_REGISTERS
#endif
// Inline, so that each barrier's jump is predicted by itself and only live registers are saved.
__attribute__((always_inline)) inline void switch_stack(Fiber &from, Fiber &to) {
    void **save = &from.sp, *load = to.sp;
    asm volatile("leaq -128(%%rsp), %%rsp\n\t" // step over the red zone
                 "pushq %%rbp\n\t"
                 "pushq %%rbx\n\t"
                 "leaq 1f(%%rip), %%rax\n\t"
                 "pushq %%rax\n\t"
                 "movq %%rsp, (%0)\n\t"
                 "movq %1, %%rsp\n\t"
                 "popq %%rax\n\t"
                 "jmpq *%%rax\n\t"
                 ".p2align 4\n"
                 "1:\n\t"
                 "popq %%rbx\n\t"
                 "popq %%rbp\n\t"
                 "leaq 128(%%rsp), %%rsp\n\t"
                 : "+D"(save), "+S"(load)
                 :
                 : "memory", "cc", "rax", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13",
                   "r14", "r15", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7",
                   "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14",
                   "xmm15" CUDA_CPU_MORE_REGISTERS);
}
#endif

// What hands over from fiber to fiber is inlined, for speed, or hidden from ThreadSanitizer.
#ifdef CUDA_CPU_TSAN
#define CUDA_CPU_SWITCHING __attribute__((noinline, no_sanitize("thread")))
#else
#define CUDA_CPU_SWITCHING __attribute__((always_inline))
#endif
// Functions that switch no fiber need only be hidden from the sanitizer.
#define CUDA_CPU_UNSEEN CUDA_CPU_OPTIMIZED __attribute__((noinline, no_sanitize("thread")))
// A sanitizer must be told which stack a switch leaves. So under one, every switch to a lane leaves
// the scheduler's stack.
#if defined(CUDA_CPU_ASAN) || defined(CUDA_CPU_TSAN)
constexpr bool from_lane_to_lane = false;
#else
constexpr bool from_lane_to_lane = true;
#endif

// `ends`: the fiber `from` will not be continued.
CUDA_CPU_SWITCHING inline void switch_fiber(Fiber &from, Fiber &to, bool ends = false) {
    (void)ends;
#ifdef CUDA_CPU_TSAN
    __tsan_switch_to_fiber(to.tsan, __tsan_switch_to_fiber_no_sync);
#endif
#ifdef CUDA_CPU_ASAN
    __sanitizer_start_switch_fiber(ends ? nullptr : &from.fake_stack, to.bottom, to.size);
#endif
    switch_stack(from, to);
#ifdef CUDA_CPU_ASAN
    __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

CUDA_CPU_OPTIMIZED inline uint3 thread_index(int t) {
    const unsigned x = blockDim.x, y = blockDim.y;
    if ((unsigned)t < x) return {(unsigned)t, 0, 0}; // divisions are slow
    return {t % x, t / x % y, t / (x * y)};
}

// Thread `t` of the block did something else than thread 0: report it, and give the block up.
__attribute__((noinline, cold, no_sanitize("thread"))) inline void
diverged(int t, const char *file, int line, const char *did) {
    Worker &w = *worker;
    uint3 thread = thread_index(t);
    char zero[300];
    if (w.thread0_ended || !w.met_barrier)
        snprintf(zero, sizeof zero, "thread (0,0,0) %s",
                 w.met_barrier ? "has ended" : "ended without reaching it");
    else
        snprintf(zero, sizeof zero, "thread (0,0,0) waits at the barrier in %s:%d", w.file, w.line);
    fail(cudaErrorLaunchFailure, {file, line, nullptr},
         "%s on device %d: divergent barrier in block (%u,%u,%u): thread (%u,%u,%u) %s, but %s",
         running.name, running.device, blockIdx.x, blockIdx.y, blockIdx.z, thread.x, thread.y,
         thread.z, did, zero);
    w.failed = true;
}
struct BlockFailed {};

// Of section 6: a lane has ended; a thread that does not take turns has met a barrier.
__attribute__((cold, no_sanitize("thread"))) inline void lane_ended(Worker &w, int t);
__attribute__((no_sanitize("thread"))) inline Fiber &after_lane(Worker &w);
__attribute__((cold, no_sanitize("thread"))) inline void wait_for_block(const char *file, int line);

// What runs on a new stack: the kernel, for the thread whose turn it is.
__attribute__((no_sanitize("thread"))) CUDA_CPU_OPTIMIZED inline void fiber_main() {
    Worker &w = *worker;
#ifdef CUDA_CPU_ASAN
    const bool scheduled = w.current == 0 || !w.met_barrier || w.mode == by_lanes;
    const void **bottom = scheduled ? &w.scheduler.bottom : nullptr;
    size_t *size = bottom ? &w.scheduler.size : nullptr;
    __sanitizer_finish_switch_fiber(nullptr, bottom, size);
#endif
    observed(&w.begin);
    const int t = w.current;
    threadIdx = thread_index(t);
    enter_callers();
    try {
        w.run(w.kernel, false);
    } catch (...) { uncaught(); }
    leave_callers();
    published(&w.end);
    Fiber *next = &w.scheduler;
    if (w.mode == by_lanes) {
        lane_ended(w, t);
        next = &after_lane(w);
    } else if (w.met_barrier) {
        if (t == 0) w.thread0_ended = true;
        else if (!w.thread0_ended) diverged(t, w.file, w.line, "has ended");
        if (!w.failed && t + 1 < w.threads) {
            w.current = t + 1;
            next = &w.fibers[t + 1];
        }
    }
    switch_fiber(w.fibers[t], *next, true);
    __builtin_unreachable();
}

// Make fiber t start at fiber_main when it is first switched to.
CUDA_CPU_OPTIMIZED __attribute__((no_sanitize("thread"), no_sanitize("address"))) inline void
prepare(Worker &w, int t) {
    Fiber &fiber = w.fibers[t];
#ifdef CUDA_CPU_ASAN
    fiber.bottom = fiber.stack;
    fiber.size = stack_bytes;
    ASAN_UNPOISON_MEMORY_REGION(fiber.stack, stack_bytes);
#endif
#ifdef CUDA_CPU_PORTABLE
    fiber.fresh = true;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack;
    fiber.start.uc_stack.ss_size = stack_bytes;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, fiber_main, 0);
#else
    // Neighbours' stacks start a few cache lines apart: their locals do not share cache sets.
    void **sp = (void **)(fiber.stack + stack_bytes - 64 - t % 32 * 192);
    *--sp = nullptr; // fiber_main's return address: none
    *--sp = (void *)fiber_main;
    fiber.sp = sp;
#endif
}

// Give the worker stacks for that many threads in all. Linux allows a process 65530 mappings
// (vm.max_map_count), and a stack with an unmapped page below it, which catches its overflow, takes
// two. So all stacks have such a page only until most_guarded have one, over all workers; beyond
// that only the lowest stack of a growth has one, as thread 0's, which grows alone, always does.
constexpr int most_guarded = 8192;
inline std::atomic<int> guarded_stacks{0};

__attribute__((noinline, cold)) inline void grow_fibers(Worker &w, int threads) {
    Hidden hidden;
    const int more = threads - (int)w.fibers.size();
    const bool guard_each = (guarded_stacks += more) <= most_guarded;
    if (!guard_each) guarded_stacks -= more;
    const size_t page = page_size(), stride = stack_bytes + (guard_each ? page : 0);
    const size_t bytes = page + more * stride;
    char *p = (char *)mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    bool failed = p == MAP_FAILED;
    // Most of a stack is never touched: a huge page would make it all resident.
    if (!failed) madvise(p, bytes, MADV_NOHUGEPAGE);
    for (int i = 0; i < more && !failed; i++) {
        w.fibers.emplace_back();
        w.fibers.back().stack = p + page + i * stride;
        if (i == 0 || guard_each) failed = mprotect(p + i * stride, page, PROT_NONE);
#ifdef CUDA_CPU_TSAN
        w.fibers.back().tsan = __tsan_create_fiber(0);
#endif
    }
    if (failed)
        give_up("no memory for the stacks of %d threads of %s: raise ulimit -v, or set "
                "CUDA_CPU_CORES=1",
                threads, running.name);
    w.stacks.push_back({p, bytes, guard_each ? more : 0});
#ifdef CUDA_CPU_TSAN
    w.scheduler.tsan = __tsan_get_current_fiber();
#endif
}

// Whether the address lies in one of those pages.
inline bool below_stack(const void *pointer) {
    if (!worker) return false;
    for (const Stacks &stacks : worker->stacks) {
        const size_t offset = (const char *)pointer - stacks.pages;
        const size_t stride = stacks.guarded ? stack_bytes + page_size() : stacks.bytes;
        if (offset < stacks.bytes && offset % stride < page_size()) return true;
    }
    return false;
}

CUDA_CPU_SWITCHING inline void barrier(const char *file, int line) {
    Worker &w = *worker;
    const int t = w.current;
    if (w.mode != in_turns) return wait_for_block(file, line);
    if (t == 0) {
        if (!w.met_barrier) {
            w.met_barrier = true;
            if ((int)w.fibers.size() < w.threads) grow_fibers(w, w.threads);
            for (int i = 1; i < w.threads; i++) prepare(w, i);
        }
        w.phase++;
        w.file = file;
        w.line = line;
    } else if (w.thread0_ended || !w.met_barrier || line != w.line) {
        diverged(t, file, line, "waits at a barrier");
        switch_fiber(w.fibers[t], w.scheduler, true);
    }
    if (w.threads == 1) return;
    const int next = t + 1 == w.threads ? 0 : t + 1;
    const unsigned parity = w.phase % 2;
    published(&w.barrier[parity]);
    w.current = next;
    const uint3 index = threadIdx;
    switch_fiber(w.fibers[t], w.fibers[next]);
    threadIdx = index;
    observed(&worker->barrier[parity]);
}

__attribute__((noinline, no_sanitize("address"), no_sanitize("thread"))) inline void
fill_shared(Worker &w, char *p, size_t bytes, size_t number) {
    if (w.filled_by[number] == w.blocks) return;
    Hidden hidden;
    w.filled_by[number] = w.blocks;
    w.filled.push_back(number);
    memset(p, 0xFF, bytes);
}

// Lanes that hand values on through shared memory, with nothing between the one's write and the
// other's read, were right on GPUs up to 2016, if the memory was declared volatile: the lanes of a
// warp ran in lockstep. Since Volta (SM 70) CUDA no longer promises that, and __syncwarp() must
// come in between. Here they do not run in lockstep, so the numbers are wrong, and the user is
// told why. extras/cpu/to_cpp.sed declares a volatile T * as a Volatile<T>, which notes the lanes
// that look up an element. A write in between is seen by the changed value. A single element, such
// as a flag that many lanes set, is not reported.
template <class = void> CUDA_CPU_UNSEEN void touch_volatile(const volatile void *p, size_t bytes);
template <class T> struct Volatile {
    T *p;
    Volatile(T *p) : p(p) {}
    __forceinline__ T &touched(T *at) const {
        if (std::is_volatile<T>::value && worker) touch_volatile<>(at, sizeof *at);
        return *at;
    }
    template <class I> __forceinline__ T &operator[](I i) const { return touched(p + i); }
    __forceinline__ T &operator*() const { return touched(p); }
    T *operator->() const { return p; }
    T **operator&() { return &p; }
    Volatile &operator++() { return ++p, *this; }
    Volatile &operator--() { return --p, *this; }
    T *operator++(int) { return p++; }
    T *operator--(int) { return p--; }
    template <class I> Volatile &operator+=(I i) { return p += i, *this; }
    template <class I> Volatile &operator-=(I i) { return p -= i, *this; }
    operator T *() const { return p; }
    template <class U> explicit operator U *() const { return (U *)p; }
};
template <class T> struct VolatileArray;
template <class T, size_t n> struct VolatileArray<T[n]> {
    T elements[n];
    template <class I> __forceinline__ T &operator[](I i) { return Volatile<T>(elements)[i]; }
    T &operator*() { return (*this)[0]; }
    operator T *() { return elements; }
    template <class U> explicit operator U *() { return (U *)elements; }
};
template <class T>
using Watched =
    std::conditional_t<std::rank<T>::value == 1 &&
                           std::is_volatile<std::remove_all_extents_t<T>>::value,
                       VolatileArray<T>, T>;

// A __shared__ array: its place in the worker's arena, filled with NaN by the first thread that
// gets to it, which is thread 0, except by_lanes. Once a block: a function may be called again.
template <class T, class Tag> __attribute__((always_inline)) inline auto &shared_memory() {
    static_assert(sizeof(T) <= 48 * 1024, "a block has at most 48 KiB of static shared memory");
    Worker &w = *worker;
    char *p = w.shared + shared_place<T, Tag>.offset;
#ifdef CUDA_CPU_ASAN
    ASAN_UNPOISON_MEMORY_REGION(p, sizeof(T));
#endif
    if (w.current == 0 || w.mode == by_lanes)
        fill_shared(w, p, sizeof(T), shared_place<T, Tag>.number);
    return *(Watched<T> *)p;
}

// The first of the bytes [begin, end) of a gap that is no more poison; null if none is.
CUDA_CPU_OPTIMIZED __attribute__((no_sanitize("thread"))) inline char *
first_changed(char *begin, char *end, unsigned char poison) {
    unsigned char changed = 0;
    for (char *p = begin; p < end; p++) changed |= (unsigned char)*p ^ poison;
    if (!changed) return nullptr;
    while ((unsigned char)*begin == poison) begin++;
    return begin;
}
// The block has written to a gap: report it, and give the block up.
__attribute__((noinline, cold, no_sanitize("thread"), format(printf, 2, 3))) inline void
wrote_to_gap(Worker &w, const char *format, ...) {
    char text[400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    w.error = cudaErrorIllegalAddress;
    w.failed = true;
    fail(w.error, running.where, "%s on device %d: block (%u,%u,%u) has written to %s",
         running.name, running.device, blockIdx.x, blockIdx.y, blockIdx.z, text);
}
// Called when a block has ended. AddressSanitizer finds more, and what reads a gap, too.
__attribute__((no_sanitize("thread"))) inline void check_gaps(Worker &w) {
#ifndef CUDA_CPU_ASAN
    for (unsigned i : w.filled) {
        const SharedArray *a = &shared_arrays()[i];
        char *p = w.shared + a->offset, *end = w.shared + a->end;
        char *at = first_changed(p + a->bytes, end, a->poison);
        if (!at) at = first_changed(p - shared_gap, p, i ? a[-1].poison : 0xFF);
        if (!at) continue;
        wrote_to_gap(w, "byte %td of the %zu bytes of %s, which %s:%d declares __shared__", at - p,
                     a->bytes, a->name, a->file, a->line);
        memset(p + a->bytes, a->poison, end - p - a->bytes);
        memset(p - shared_gap, i ? a[-1].poison : 0xFF, shared_gap);
        return;
    }
    if (!w.dynamic_bytes) return;
    char *p = w.dynamic_shared, *at = first_changed(p + w.dynamic_bytes, w.dynamic_end, 0xFF);
    if (!at) at = first_changed(p - shared_gap, p, 0xFF);
    if (at)
        wrote_to_gap(w,
                     "byte %td of dynamic shared memory, but the launch asked for %zu bytes (the "
                     "third value between <<< and >>>)",
                     at - p, w.dynamic_bytes);
#else
    (void)w;
#endif
}
template <class T> T *dynamic_shared() { return (T *)worker->dynamic_shared; }
constexpr size_t dynamic_room = 100 * 1024, dynamic_guard = 1 << 20; // bytes, in whole pages
inline bool in_dynamic_shared(const void *pointer, ptrdiff_t &offset, size_t &bytes) {
    const char *p = (const char *)pointer;
    if (!worker || p < worker->dynamic_end || p >= worker->dynamic_end + dynamic_guard)
        return false;
    offset = p - worker->dynamic_shared;
    bytes = worker->dynamic_bytes;
    return true;
}

// The host, in what nvtxMarkA has named: it has taken too long, or somebody else asks where it is.
// In a library malloc may be at work, which finding the line needs: a little later the host is back
// in its own code, or it waits there for good, after which nothing is at work.
inline __thread int host_timer = -1;
inline void set_watchdog(int timer, double seconds) { // of processor time, repeated; 0: never
    itimerspec every = {};
    every.it_value.tv_sec = seconds;
    every.it_value.tv_nsec = 1e9 * (seconds - every.it_value.tv_sec);
    every.it_interval = every.it_value;
    syscall(SYS_timer_settime, timer, 0, &every, nullptr);
}
extern "C" char etext; // where the program's own code ends
inline void say_where_host_is(siginfo_t *info, void *context) {
    static bool asked = false;
    static int tries = 0;
    asked = asked || info->si_code != SI_TIMER;
    if (!*host_is_in) {
        if (asked) _exit(1); // as without this handler
        return;
    }
    const char *at = (const char *)interrupted(context);
    if ((at < &__executable_start || at >= &etext) && tries++ < 50)
        return set_watchdog(host_timer, 1e-3);
    alarm(10);
    const std::string line = interrupted_line(context);
    fprintf(stderr, "%s%sthe host %s in %s", line.c_str(), line.empty() ? "" : ": ",
            asked ? "is" : "has been", host_is_in);
    if (!asked) fprintf(stderr, " for more than %d s", machine().watchdog);
    fprintf(stderr, ": is there an endless loop?\n");
    _exit(1);
}

// A block that runs on and on is reported once. Each worker has a timer of its own processor time,
// whose signal comes to itself: it can say where it is. Not under sanitizers, which are slow.
inline void on_watchdog(int, siginfo_t *info, void *context) {
    if (!worker) return say_where_host_is(info, context);
    if (info->si_code != SI_TIMER) { // somebody asks the process: that is the host's to answer
        syscall(SYS_tgkill, getpid(), getpid(), SIGVTALRM);
        return;
    }
    static std::atomic<bool> said{false};
    static __thread unsigned long long last = 0;
    Worker &w = *worker;
    const bool again = running.name && w.threads > 0 && w.blocks == last;
    last = w.blocks;
    if (!again || said.exchange(true)) return;
    const std::string line = interrupted_line(context);
    const uint3 thread = thread_index(w.current);
    fprintf(stderr,
            "%s:%d: %s on device %d: block (%u,%u,%u) has been running for %d seconds and is at "
            "thread (%u,%u,%u)%s%s. Does it wait for a value that another thread sets? Here each "
            "thread runs alone until it reaches a barrier or ends, and each block runs until it "
            "ends, %d at a time\n",
            running.where.file, running.where.line, running.name, running.device, blockIdx.x,
            blockIdx.y, blockIdx.z, machine().watchdog, thread.x, thread.y, thread.z,
            line.empty() ? "" : ", in ", line.c_str(), machine().devices[running.device]->cores);
}
inline int start_watchdog() { // of the calling thread; -1: it has none
    int timer = -1;
#if !defined(CUDA_CPU_ASAN) && !defined(CUDA_CPU_TSAN)
    const int seconds = machine().watchdog;
    if (seconds == 0) return -1;
    struct sigaction action = {};
    action.sa_sigaction = on_watchdog;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    sigaction(SIGVTALRM, &action, nullptr);
    struct sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = SIGVTALRM;
    event._sigev_un._tid = syscall(SYS_gettid);
    if (syscall(SYS_timer_create, CLOCK_THREAD_CPUTIME_ID, &event, &timer)) return -1;
    set_watchdog(timer, seconds);
#endif
    return timer;
}
// The host is in this from now on, until it is in nothing, "".
inline void host_enters(const char *what) {
    if (!*what && !*host_is_in) return;
    snprintf(host_is_in, sizeof host_is_in, "%s", what);
    if (host_timer < 0) host_timer = start_watchdog();
    if (host_timer >= 0) set_watchdog(host_timer, *what ? machine().watchdog : 0);
}

// What a thread of the operating system needs to run blocks, or to be told what it did wrong.
inline void start_worker() {
    sigset_t all; // signals are for the host thread
    sigfillset(&all);
    for (int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGVTALRM}) sigdelset(&all, own);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    worker = new Worker;
    const size_t bytes = shared_arena_bytes();
    worker->shared = (char *)aligned_alloc(shared_gap, bytes);
    worker->filled_by.resize(shared_arrays().size());
    void *dynamic = mmap(nullptr, dynamic_room + dynamic_guard, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!worker->shared || dynamic == MAP_FAILED ||
        mprotect(dynamic, dynamic_room, PROT_READ | PROT_WRITE))
        throw std::bad_alloc();
    worker->dynamic_end = (char *)dynamic + dynamic_room;
    memset(worker->shared, 0xFF, bytes);
    for (const SharedArray &a : shared_arrays())
        memset(worker->shared + a.offset + a.bytes, a.poison, a.end - a.offset - a.bytes);
#ifdef CUDA_CPU_ASAN
    ASAN_POISON_MEMORY_REGION(worker->shared, bytes);
    ASAN_POISON_MEMORY_REGION(dynamic, dynamic_room + dynamic_guard);
#endif
#if !defined(CUDA_CPU_ASAN) && !defined(CUDA_CPU_TSAN)
    stack_t stack = {}; // a fiber whose stack overflowed cannot run the fault handler on it
    stack.ss_size = 64 * 1024;
    stack.ss_sp = malloc(stack.ss_size);
    sigaltstack(&stack, nullptr);
#endif
    worker->timer = start_watchdog();
}

// What start_worker() and grow_fibers() took goes back.
inline void delete_warps(Warp *warps);
inline void stop_worker() {
    if (worker->timer >= 0) syscall(SYS_timer_delete, worker->timer);
    delete_warps(worker->warps);
#ifdef CUDA_CPU_TSAN
    for (Fiber &fiber : worker->fibers) __tsan_destroy_fiber(fiber.tsan);
#endif
    for (const Stacks &stacks : worker->stacks) {
#ifdef CUDA_CPU_ASAN
        ASAN_UNPOISON_MEMORY_REGION(stacks.pages, stacks.bytes);
#endif
        munmap(stacks.pages, stacks.bytes);
        guarded_stacks -= stacks.guarded;
    }
#ifdef CUDA_CPU_ASAN
    ASAN_UNPOISON_MEMORY_REGION(worker->shared, shared_arena_bytes());
    ASAN_UNPOISON_MEMORY_REGION(worker->dynamic_end - dynamic_room, dynamic_room + dynamic_guard);
#endif
    free(worker->shared);
    munmap(worker->dynamic_end - dynamic_room, dynamic_room + dynamic_guard);
    delete worker;
    worker = nullptr;
#if !defined(CUDA_CPU_ASAN) && !defined(CUDA_CPU_TSAN)
    stack_t stack = {}, none = {};
    none.ss_flags = SS_DISABLE;
    if (sigaltstack(&none, &stack) == 0) free(stack.ss_sp);
#endif
}

// ---------------------------------------------------------------------------------------------
// 6. Warps
// A warp is 32 threads of a block with neighbouring numbers, its lanes. A lane that calls a warp
// function waits until every lane that its mask names has come to the same call. From the first
// such call in a block on, all its threads have a stack, and a lane runs until it waits or ends;
// next_lane() then chooses the next one. If a lane waits for one that has ended, or waits
// elsewhere, that is an error. Lanes that a block is too small to have are never waited for.

struct Lane { // Where it waits, what it brings there, and then what it takes from there
    const char *call, *file;
    int line;
    unsigned mask;
    int source; // the lane whose value it takes; -1: the set of lanes with a value that is not 0
    unsigned long long value;
    unsigned syncs; // calls of __syncwarp()
    unsigned calls; // of any warp function, in this block
    char order[2];  // by the parity of syncs, see published()
};
struct Warp { // Bit l says it of lane l. A lane that exists and is none of the rest is at a barrier
    unsigned exists, ready, waits, ended;
    Lane lanes[32];
};

struct LaneOrder {
    bool always = false; // every block, not only where a warp function is called
    enum { forwards, backwards, shuffled } order = forwards;
    unsigned long long seed = 0;
};
inline LaneOrder lane_order;

inline void set_lane_order(const char *text) {
    if (!text || !*text) return;
    char *end;
    lane_order.always = true;
    if (!strcmp(text, "forwards")) return;
    lane_order.order = LaneOrder::backwards;
    if (!strcmp(text, "backwards")) return;
    lane_order.order = LaneOrder::shuffled;
    lane_order.seed = strtoull(text, &end, 10);
    if (*text >= '0' && *text <= '9' && !*end) return;
    fprintf(stderr, "CUDA_CPU_LANES=%s: expected forwards, backwards or a whole number\n", text);
    _exit(1);
}

// The next of several warps, or of several lanes.
CUDA_CPU_UNSEEN inline int choose(Worker &w, unsigned bits) {
    if (lane_order.order == LaneOrder::forwards) return __builtin_ctz(bits);
    if (lane_order.order == LaneOrder::backwards) return 31 - __builtin_clz(bits);
    w.random = w.random * 6364136223846793005 + 1442695040888963407;
    for (int skip = (w.random >> 33) % __builtin_popcount(bits); skip > 0; skip--) bits &= bits - 1;
    return __builtin_ctz(bits);
}

// From now on lanes are chosen. If the block has begun, then a thread of it calls this; those
// before it have ended or are at the next barrier, those behind it have yet to leave the last
// barrier, or to begin.
CUDA_CPU_UNSEEN inline void start_lanes(Worker &w, unsigned block) {
    const bool fresh = lane_order.always;
    const int t = fresh ? 0 : w.current;
    {
        Hidden hidden;
        if ((int)w.fibers.size() < w.threads) grow_fibers(w, w.threads);
        if (!w.warps) w.warps = new Warp[32]();
    }
    const bool at_barrier = t > 0 && w.met_barrier && !w.thread0_ended;
    for (int first = 0; first < w.threads; first += 32) {
        Warp &warp = w.warps[first / 32];
        const int lanes = min(32, w.threads - first), before = max(0, min(lanes, t - first));
        warp.exists = ~0u >> (32 - lanes);
        const unsigned earlier = before ? ~0u >> (32 - before) : 0;
        warp.ready = warp.exists & ~earlier;
        warp.ended = at_barrier ? 0 : earlier;
        warp.waits = 0;
        for (int l = 0; l < lanes; l++) {
            warp.lanes[l].calls = 0;
            warp.lanes[l].file = w.file; // of the barrier
            warp.lanes[l].line = w.line;
            if (fresh || (!w.met_barrier && first + l > t)) prepare(w, first + l);
        }
    }
    if (at_barrier) w.phase--; // which is not left yet
    else w.count[(w.phase + 1) % 2] = 0;
    w.looped = w.mode == in_loop ? t : -1;
    if (w.mode == in_loop) *w.stop = true;
    w.mode = by_lanes;
    w.warp = t / 32;
    w.todo = fresh ? 0 : w.warps[w.warp].ready & ~(1u << t % 32);
    w.random = lane_order.seed + block * 0x9E3779B97F4A7C15;
}

// Lane `t` waits for lane `other` of its warp in vain: report it, and give the block up.
__attribute__((noinline, cold, no_sanitize("thread"))) inline void lane_missing(Worker &w, int t,
                                                                                int other) {
    const Warp &warp = w.warps[t / 32];
    const Lane &lane = warp.lanes[t % 32], &missing = warp.lanes[other % 32];
    const unsigned bit = 1u << other % 32;
    char did[300];
    if (warp.ended & bit) snprintf(did, sizeof did, "has ended");
    else if (!(warp.waits & bit))
        snprintf(did, sizeof did, "waits at the barrier in %s:%d", missing.file, missing.line);
    else if (missing.line == lane.line && !strcmp(missing.call, lane.call))
        snprintf(did, sizeof did, "waits there with mask 0x%08x", missing.mask);
    else
        snprintf(did, sizeof did, "waits at %s in %s:%d", missing.call, missing.file, missing.line);
    const uint3 a = thread_index(t), b = thread_index(other);
    fail(
        cudaErrorLaunchFailure, {lane.file, lane.line, nullptr},
        "%s on device %d: divergent %s in block (%u,%u,%u): thread (%u,%u,%u), lane %d, waits with "
        "mask 0x%08x, but thread (%u,%u,%u), lane %d, %s",
        running.name, running.device, lane.call, blockIdx.x, blockIdx.y, blockIdx.z, a.x, a.y, a.z,
        t % 32, lane.mask, b.x, b.y, b.z, other % 32, did);
    w.failed = true;
}

// The lanes `members` have all come to a call: each gets its value and can go on.
CUDA_CPU_UNSEEN inline void release(Warp &warp, unsigned members) {
    unsigned long long values[32];
    unsigned votes = 0;
    for (int l = 0; l < 32; l++)
        if (members >> l & 1) {
            values[l] = warp.lanes[l].value;
            if (values[l]) votes |= 1u << l;
        }
    for (int l = 0; l < 32; l++) {
        Lane &lane = warp.lanes[l];
        if (!(members >> l & 1)) continue;
        // The value of a lane that takes no part is undefined: NaN, or all bits of an integer
        if (lane.source >= 0) lane.value = members >> lane.source & 1 ? values[lane.source] : ~0ull;
        else lane.value = votes;
    }
    warp.waits &= ~members;
    warp.ready |= members;
}

// No lane of the warp can run. Those at one __activemask() can go on, as a GPU's lanes do that come
// to it together; otherwise, if one waits in a warp function, then in vain.
CUDA_CPU_UNSEEN inline void settle(Worker &w, int number) {
    Warp &warp = w.warps[number];
    unsigned together = 0;
    int line = 0;
    for (int l = 0; l < 32; l++)
        if (warp.waits >> l & 1 && !warp.lanes[l].mask &&
            (!together || warp.lanes[l].line == line)) {
            together |= 1u << l;
            line = warp.lanes[l].line;
            warp.lanes[l].value = 1;
        }
    if (together) return release(warp, together);
    if (!warp.waits) return;
    const int first = __builtin_ctz(warp.waits);
    const Lane &lane = warp.lanes[first];
    for (int l = 0; l < 32; l++) {
        const Lane &other = warp.lanes[l];
        if (!(lane.mask & warp.exists & 1u << l)) continue;
        if (!(warp.waits >> l & 1) || other.line != lane.line || other.mask != lane.mask ||
            strcmp(other.call, lane.call))
            return lane_missing(w, number * 32 + first, number * 32 + l);
    }
}

// No lane of the block can run: all are at one barrier and leave it, or something is wrong. False
// where nobody goes on.
CUDA_CPU_UNSEEN inline bool leave_barrier(Worker &w) {
    int ended = -1, waits = -1, elsewhere = -1; // the first thread that does so
    for (int t = w.threads - 1; t >= 0; t--) {
        const Warp &warp = w.warps[t / 32];
        if (warp.ended >> t % 32 & 1) ended = t;
        else waits = t;
        if (waits == t && warp.lanes[t % 32].line != w.line) elsewhere = t;
    }
    if (waits < 0) return false;
    const Lane *at = &w.warps[waits / 32].lanes[waits % 32];
    if (waits > 0) {
        diverged(waits, at->file, at->line, "waits at a barrier");
    } else if (ended > 0 && (elsewhere < 0 || ended < elsewhere)) {
        diverged(ended, w.file, w.line, "has ended");
    } else if (elsewhere > 0) {
        at = &w.warps[elsewhere / 32].lanes[elsewhere % 32];
        diverged(elsewhere, at->file, at->line, "waits at a barrier");
    }
    if (w.failed) return false;
    w.phase++;
    w.count[(w.phase + 1) % 2] = 0;
    for (int first = 0; first < w.threads; first += 32)
        w.warps[first / 32].ready = w.warps[first / 32].exists;
    return true;
}

// The thread that runs next; -1 after the last one, or where the block has failed. In a round every
// lane of a warp that can run does so once. A warp has rounds until none of its lanes can run, but
// shuffled warps alternate.
CUDA_CPU_UNSEEN inline int next_lane(Worker &w) {
    while (!w.todo) {
        if (!w.warps[w.warp].ready) settle(w, w.warp);
        unsigned ready = 0;
        for (int i = 0; i < (w.threads + 31) / 32; i++)
            if (w.warps[i].ready) ready |= 1u << i;
        if (w.failed || (!ready && !leave_barrier(w))) return -1;
        if (!ready) continue;
        w.warp = choose(w, ready);
        w.todo = w.warps[w.warp].ready;
    }
    const int l = choose(w, w.todo);
    w.todo &= ~(1u << l);
    return w.warp * 32 + l;
}

// Run all lanes to their end, or until it is the turn of the thread that has no fiber.
CUDA_CPU_UNSEEN inline void run_lanes(Worker &w) {
    while (!w.failed && (w.current = next_lane(w)) >= 0 && w.current != w.looped) {
        switch_fiber(w.scheduler, w.fibers[w.current]);
        if (from_lane_to_lane) return; // the last lane that could run has come back
    }
}
// Who is switched to by a lane that cannot go on.
inline Fiber &after_lane(Worker &w) {
    if (!from_lane_to_lane || w.failed) return w.scheduler;
    w.current = next_lane(w);
    return w.current >= 0 && w.current != w.looped ? w.fibers[w.current] : w.scheduler;
}
inline void lane_ended(Worker &w, int t) {
    w.warps[t / 32].ready &= ~(1u << t % 32);
    w.warps[t / 32].ended |= 1u << t % 32;
    if (t == 0 && w.met_barrier) w.thread0_ended = true;
}
// The plain loop has come to the end of its last thread.
CUDA_CPU_UNSEEN inline void run_lanes_after_loop(Worker &w) {
    lane_ended(w, w.looped);
    w.looped = -1;
    run_lanes(w);
}

// Lane `t` cannot go on, or never will: others do until it can.
CUDA_CPU_UNSEEN inline void run_others(Worker &w, int t) {
    const uint3 index = threadIdx;
    if (t != w.looped) {
        Fiber &next = after_lane(w);
        if (&next != &w.fibers[t]) switch_fiber(w.fibers[t], next, w.failed);
    } else {
        run_lanes(w);
        if (w.failed) throw BlockFailed();
    }
    threadIdx = index;
}

CUDA_CPU_UNSEEN inline void wait_for_lanes(Worker &w, int t, const char *file, int line) {
    Warp &warp = w.warps[t / 32];
    Lane &lane = warp.lanes[t % 32];
    lane.file = file;
    lane.line = line;
    if (t == 0) {
        w.met_barrier = true;
        w.file = file;
        w.line = line;
    }
    warp.ready &= ~(1u << t % 32);
    const unsigned parity = (w.phase + 1) % 2;
    published(&w.barrier[parity]);
    run_others(w, t);
    observed(&w.barrier[parity]);
}
// What barrier() does where threads do not take turns.
inline void wait_for_block(const char *file, int line) {
    Worker &w = *worker;
    if (w.mode == by_lanes) return wait_for_lanes(w, w.current, file, line);
    diverged(w.current, file, line, "waits at a barrier");
    throw BlockFailed();
}
// Of __syncthreads_count(): how many threads of the block say yes.
CUDA_CPU_UNSEEN inline int count_block(bool yes, Where where) {
    Worker &w = *worker;
    const bool first = w.mode == in_turns && w.current == 0;
    const unsigned parity = (w.phase + (first || w.mode == by_lanes)) % 2;
    if (first) w.count[parity] = 0;
    w.count[parity] += yes;
    barrier(where.file, where.line);
    return w.count[parity];
}

// A warp function: wait for the lanes of `mask`, 0 for those that come too. Returns the value of
// lane `source`, or for -1 which lanes bring a value that is not 0.
CUDA_CPU_UNSEEN inline unsigned long long meet(const char *call, Where where, unsigned mask,
                                               int source, unsigned long long value) {
    Worker &w = *worker;
    if (w.mode != by_lanes) start_lanes(w, 0);
    const int t = w.current, l = t % 32;
    Warp &warp = w.warps[t / 32];
    Lane &lane = warp.lanes[l];
    lane.call = call;
    lane.calls++;
    lane.file = where.file;
    lane.line = where.line;
    lane.mask = mask;
    lane.source = source;
    lane.value = value;
    warp.ready &= ~(1u << l);
    warp.waits |= 1u << l;
    const unsigned members = mask & warp.exists;
    bool all = mask && (warp.waits & members) == members;
    for (int m = 0; m < 32 && all; m++) {
        const Lane &other = warp.lanes[m];
        if (members >> m & 1)
            all = other.line == lane.line && other.mask == mask &&
                  (other.call == call || !strcmp(other.call, call));
    }
    if (all) release(warp, members);
    run_others(w, t);
    return lane.value;
}
// A wrong argument: report it, and give the block up.
__attribute__((noinline, cold, no_sanitize("thread"), format(printf, 3, 4))) inline void
wrong_lane(const char *call, Where where, const char *format, ...) {
    Worker &w = *worker;
    if (w.mode != by_lanes) start_lanes(w, 0);
    char text[200];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    const uint3 thread = thread_index(w.current);
    fail(cudaErrorLaunchFailure, where,
         "%s on device %d: %s in block (%u,%u,%u): thread (%u,%u,%u), lane %d, %s", running.name,
         running.device, call, blockIdx.x, blockIdx.y, blockIdx.z, thread.x, thread.y, thread.z,
         w.current % 32, text);
    w.failed = true;
    run_others(w, w.current);
}
CUDA_CPU_UNSEEN inline int lane_of_thread() { return worker->current % 32; }

CUDA_CPU_OPTIMIZED inline void check_mask(const char *call, Where where, unsigned mask) {
    if (!(mask >> lane_of_thread() & 1))
        wrong_lane(call, where, "is not in its own mask 0x%08x", mask);
}
CUDA_CPU_OPTIMIZED inline unsigned vote(const char *call, Where where, unsigned mask, bool value) {
    check_mask(call, where, mask);
    return meet(call, where, mask, -1, value);
}
// `source` maps a lane and the first and last lane of its `width` neighbours to a lane.
template <class T, class Source>
T shuffle(const char *call, Where where, unsigned mask, T value, int width, Source source) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle takes numbers of 4 or 8 bytes");
    check_mask(call, where, mask);
    if (width < 1 || width > 32 || (width & (width - 1)))
        wrong_lane(call, where, "has width %d, which must be a power of two up to 32", width);
    const int lane = lane_of_thread(), first = lane & -width;
    unsigned long long word = 0;
    memcpy(&word, &value, sizeof value);
    word = meet(call, where, mask, source(lane, first, first + width - 1), word);
    memcpy(&value, &word, sizeof value);
    return value;
}

// __syncwarp() orders memory, shuffles and votes do not.
CUDA_CPU_UNSEEN inline void sync_warp(unsigned mask, Where where) {
    check_mask("__syncwarp", where, mask);
    if (worker->mode != by_lanes) start_lanes(*worker, 0);
    Lane *lanes = worker->warps[worker->current / 32].lanes;
    const unsigned exists = worker->warps[worker->current / 32].exists;
    Lane &lane = lanes[lane_of_thread()];
    const unsigned parity = lane.syncs++ % 2;
    published(&lane.order[parity]);
    const unsigned parities = vote("__syncwarp", where, mask, parity);
    for (int l = 0; l < 32; l++)
        if (mask & exists & 1u << l) observed(&lanes[l].order[parities >> l & 1]);
}
inline void delete_warps(Warp *warps) { delete[] warps; }

// See Volatile. Where the kernel goes on between two elements of volatile shared memory, it may
// have written the first of them; two threads were there at the same time if they are lanes of one
// warp and neither a barrier nor a warp function stands between them.
CUDA_CPU_UNSEEN inline bool at_once(const Touch &a, const Touch &b) {
    return a.block == b.block && a.phase == b.phase && a.calls == b.calls &&
           a.thread != b.thread && a.thread / 32 == b.thread / 32;
}
CUDA_CPU_UNSEEN inline unsigned long long value_of(const Touch &touch) {
    unsigned long long value = 0;
    memcpy(&value, (const void *)touch.at, min(touch.bytes, sizeof value));
    return value;
}
__attribute__((noinline, cold, no_sanitize("thread"))) inline void
not_in_step(const Touch &writer, const Touch &other, void *pc) {
    Hidden hidden;
    static std::mutex lock;
    static std::set<std::string> said;
    {
        std::lock_guard<std::mutex> guard(lock);
        if (!said.insert(running.name).second) return;
    }
    const std::string line = line_of(&pc, 1, pc, false);
    fprintf(stderr,
            "%s:%d: notice: %s on device %d%s%s: lane %d writes to volatile shared memory that "
            "lane %d also accesses, with no __syncwarp() in between. The lanes of a warp do not "
            "run in lockstep, neither here nor, since Volta, on a GPU: the numbers may be wrong\n",
            running.where.file, running.where.line, running.name, running.device,
            line.empty() ? "" : ", in ", line.c_str(), writer.thread % 32, other.thread % 32);
}
template <class> CUDA_CPU_UNSEEN void touch_volatile(const volatile void *p, size_t bytes) {
    Worker &w = *worker;
    const size_t fixed = shared_arena_bytes();
    const bool is_fixed = size_t((const char *)p - w.shared) < fixed;
    const char *const dynamic = w.dynamic_end - dynamic_room;
    if (!is_fixed && size_t((const char *)p - dynamic) >= dynamic_room) return;
    Hidden hidden;
    if (w.touched.empty()) w.touched.resize(fixed + dynamic_room);
    auto touched = [&](const volatile void *p) -> Touched & {
        const size_t at = (const char *)p - w.shared;
        return w.touched[at < fixed ? at : fixed + ((const char *)p - dynamic)];
    };
    const int t = w.current;
    const bool before_barrier = // which thread 0 has met already
        w.mode == in_turns && t > 0 && w.met_barrier && !w.thread0_ended;
    const unsigned calls = w.mode == by_lanes ? w.warps[t / 32].lanes[t % 32].calls : 0;
    Touch now = {w.blocks, w.phase - before_barrier, calls, t, p, bytes, 0};
    const Touch *writer = nullptr, *other = nullptr;
    const Touch &last = w.last_touch;
    if (last.block == now.block && last.phase == now.phase && last.calls == calls &&
        value_of(last) != last.value) {
        Touched &there = touched(last.at);
        there.written = last;
        for (const Touch &by : there.by)
            if (at_once(by, last)) writer = &last, other = &by;
    }
    now.value = value_of(now);
    Touched &here = touched(p);
    if (at_once(here.written, now)) writer = &here.written, other = &now;
    if (writer) {
        if (w.conflict.block == now.block && w.conflict.at != writer->at)
            not_in_step(*writer, *other, __builtin_return_address(0));
        w.conflict = *writer;
    }
    if (here.by[0].thread != t || here.by[0].block != now.block) here.by[1] = here.by[0];
    here.by[0] = now;
    w.last_touch = now;
}

} // namespace cuda_cpu

constexpr int warpSize = 32;

template <class T, class Promoted = decltype(+T())>
Promoted __shfl_sync(unsigned mask, T value, int from, int width = warpSize, CUDA_CPU_WHERE) {
    return cuda_cpu::shuffle(
        "__shfl_sync", where, mask, Promoted(value), width,
        [=](int, int first, int last) { return first + (from & (last - first)); });
}
template <class T, class Promoted = decltype(+T())>
Promoted __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize,
                        CUDA_CPU_WHERE) {
    return cuda_cpu::shuffle("__shfl_up_sync", where, mask, Promoted(value), width,
                             [=](int lane, int first, int) {
                                 const int from = lane - (int)(delta % 32);
                                 return from < first ? lane : from;
                             });
}
template <class T, class Promoted = decltype(+T())>
Promoted __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize,
                          CUDA_CPU_WHERE) {
    return cuda_cpu::shuffle("__shfl_down_sync", where, mask, Promoted(value), width,
                             [=](int lane, int, int last) {
                                 const int from = lane + (int)(delta % 32);
                                 return from > last ? lane : from;
                             });
}
template <class T, class Promoted = decltype(+T())>
Promoted __shfl_xor_sync(unsigned mask, T value, int bits, int width = warpSize, CUDA_CPU_WHERE) {
    return cuda_cpu::shuffle("__shfl_xor_sync", where, mask, Promoted(value), width,
                             [=](int lane, int, int last) {
                                 const int from = lane ^ (bits & 31);
                                 return from > last ? lane : from;
                             });
}
inline unsigned __ballot_sync(unsigned mask, int predicate, CUDA_CPU_WHERE) {
    return cuda_cpu::vote("__ballot_sync", where, mask, predicate);
}
inline int __any_sync(unsigned mask, int predicate, CUDA_CPU_WHERE) {
    return cuda_cpu::vote("__any_sync", where, mask, predicate) != 0;
}
inline int __all_sync(unsigned mask, int predicate, CUDA_CPU_WHERE) {
    return cuda_cpu::vote("__all_sync", where, mask, !predicate) == 0;
}
inline unsigned __activemask(CUDA_CPU_WHERE) {
    return cuda_cpu::meet("__activemask", where, 0, -1, 1);
}
inline void __syncwarp(unsigned mask = ~0u, CUDA_CPU_WHERE) { cuda_cpu::sync_warp(mask, where); }

inline int __syncthreads_count(int predicate, CUDA_CPU_WHERE) {
    return cuda_cpu::count_block(predicate, where);
}
inline int __syncthreads_and(int predicate, CUDA_CPU_WHERE) {
    return cuda_cpu::count_block(!predicate, where) == 0;
}
inline int __syncthreads_or(int predicate, CUDA_CPU_WHERE) {
    return cuda_cpu::count_block(predicate, where) != 0;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }

// Groups of threads, as objects: a block, and tiles of N neighbouring lanes of it.
namespace cooperative_groups {
struct thread_block {
    static unsigned size() { return blockDim.x * blockDim.y * blockDim.z; }
    static unsigned num_threads() { return size(); }
    static unsigned thread_rank() {
        return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    }
    static dim3 group_index() { return {blockIdx.x, blockIdx.y, blockIdx.z}; }
    static dim3 thread_index() { return {threadIdx.x, threadIdx.y, threadIdx.z}; }
    static dim3 dim_threads() { return blockDim; }
    static void sync(CUDA_CPU_WHERE) { cuda_cpu::barrier(where.file, where.line); }
};
inline thread_block this_thread_block() { return {}; }

template <unsigned N, class Parent = thread_block> struct thread_block_tile {
    static_assert(N >= 1 && N <= 32 && (N & (N - 1)) == 0, "a tile has 1, 2, 4, 8, 16 or 32 lanes");
    static unsigned size() { return N; }
    static unsigned num_threads() { return N; }
    static unsigned thread_rank() { return thread_block::thread_rank() % N; }
    static unsigned meta_group_rank() { return thread_block::thread_rank() / N; }
    static unsigned meta_group_size() { return (thread_block::size() + N - 1) / N; }
    static unsigned first() { return thread_block::thread_rank() % 32 / N * N; } // its lane
    static unsigned mask() { return ~0u >> (32 - N) << first(); }
    static void sync(CUDA_CPU_WHERE) { __syncwarp(mask(), where); }
    template <class T> static T shfl(T value, int from, CUDA_CPU_WHERE) {
        return __shfl_sync(mask(), value, from, N, where);
    }
    template <class T> static T shfl_up(T value, unsigned delta, CUDA_CPU_WHERE) {
        return __shfl_up_sync(mask(), value, delta, N, where);
    }
    template <class T> static T shfl_down(T value, unsigned delta, CUDA_CPU_WHERE) {
        return __shfl_down_sync(mask(), value, delta, N, where);
    }
    template <class T> static T shfl_xor(T value, int bits, CUDA_CPU_WHERE) {
        return __shfl_xor_sync(mask(), value, bits, N, where);
    }
    static int any(int yes, CUDA_CPU_WHERE) { return __any_sync(mask(), yes, where); }
    static int all(int yes, CUDA_CPU_WHERE) { return __all_sync(mask(), yes, where); }
    static unsigned ballot(int yes, CUDA_CPU_WHERE) {
        return __ballot_sync(mask(), yes, where) >> first();
    }
};
template <unsigned N, class Parent> thread_block_tile<N, Parent> tiled_partition(const Parent &) {
    return {};
}
template <class Group> void sync(const Group &group, CUDA_CPU_WHERE) { group.sync(where); }

template <class T = void> struct plus {
    template <class V> V operator()(V a, V b) const { return a + b; }
};
template <class T = void> struct less { // the lesser
    template <class V> V operator()(V a, V b) const { return b < a ? b : a; }
};
template <class T = void> struct greater {
    template <class V> V operator()(V a, V b) const { return a < b ? b : a; }
};
template <unsigned N, class Parent, class T, class F>
T reduce(const thread_block_tile<N, Parent> &tile, T value, F f, CUDA_CPU_WHERE) {
    for (unsigned bit = N / 2; bit > 0; bit /= 2)
        value = f(value, tile.shfl_xor(value, bit, where));
    return value;
}
} // namespace cooperative_groups

namespace cuda_cpu {

// ---------------------------------------------------------------------------------------------
// 7. Launch

// The configuration of a launch: what stands between <<< and >>>, and where.
struct Launch {
    const char *name;
    Where where;
    dim3 grid, block;
    size_t shared;
    Stream *stream;
    Launch(const char *name, const char *file, int line, dim3 grid, dim3 block, size_t shared = 0,
           Stream *stream = nullptr, void *pc = here())
        : name(name), where{file, line, pc}, grid(grid), block(block), shared(shared),
          stream(stream) {}
};

// A kernel with its arguments, as bytes. Only run_threads() knows their types: all else is compiled
// once, not for each launch in the source.
struct Kernel {
    Launch launch;
    std::string bytes;
    void (*run)(const void *bytes, bool rest);
    std::vector<std::shared_ptr<int>> uses; // of pinned memory
};

// The thread that threadIdx says; or all of the block but thread 0, one after another: a kernel
// without barriers. One function for both, since kernels that are inlined are compiled for each.
// Where the kernel has no warp function, the compiler sees that nothing sets `stop`.
template <class K>
CUDA_CPU_OPTIMIZED __attribute__((flatten)) void run_threads(const void *bytes, bool rest) {
#ifdef CUDA_CPU_TSAN // which would take the loop's thread-local variables for shared ones
    (void)rest;
    (*(const K *)bytes)();
#else
    const K kernel = *(const K *)bytes; // a copy that nothing else points to
    const dim3 begin = rest ? dim3(1, 0, 0) : dim3(threadIdx.x, threadIdx.y, threadIdx.z);
    const unsigned X = blockDim.x, Y = blockDim.y;
    const dim3 end = rest ? blockDim : dim3(begin.x + 1, begin.y + 1, begin.z + 1);
    int &current = worker->current;
    bool stop = false;
    worker->stop = &stop;
    unsigned x = begin.x;
    for (unsigned z = begin.z; z < end.z; z++)
        for (unsigned y = begin.y; y < end.y; y++, x = 0)
            for (; x < end.x; x++) {
                threadIdx = {x, y, z};
                current = x + X * (y + Y * z);
                kernel();
                if (stop) return;
            }
#endif
}

__attribute__((no_sanitize("thread"))) inline void run_threads_of(const Kernel &kernel,
                                                                  unsigned block) {
    const Launch &launch = kernel.launch;
    Worker &w = *worker;
    blockDim = launch.block;
    gridDim = launch.grid;
    blockIdx = {block % gridDim.x, block / gridDim.x % gridDim.y, block / gridDim.x / gridDim.y};
    w.threads = blockDim.x * blockDim.y * blockDim.z;
#ifdef CUDA_CPU_TSAN
    if ((int)w.fibers.size() < w.threads) grow_fibers(w, w.threads);
#else
    if (w.fibers.empty()) grow_fibers(w, 1); // the others at the first barrier
#endif
    w.run = kernel.run;
    w.kernel = kernel.bytes.data();
    w.current = 0;
    w.met_barrier = w.thread0_ended = w.failed = false;
    w.error = cudaErrorLaunchFailure;
    w.filled.clear();
    w.phase = 0;
    w.blocks++;
    w.mode = in_turns;
    w.dynamic_bytes = launch.shared;
    w.dynamic_shared = w.dynamic_end - round_up(launch.shared, 16);
#ifdef CUDA_CPU_ASAN
    ASAN_POISON_MEMORY_REGION(w.dynamic_end - dynamic_room, dynamic_room);
    ASAN_UNPOISON_MEMORY_REGION(w.dynamic_shared, launch.shared);
    memset(w.dynamic_shared, 0xFF, launch.shared);
#else
    if (launch.shared)
        memset(w.dynamic_shared - shared_gap, 0xFF, w.dynamic_end - w.dynamic_shared + shared_gap);
#endif
    published(&w.begin);
    if (lane_order.always) {
        start_lanes(w, block);
        run_lanes(w);
        observed(&w.end);
        return;
    }
    prepare(w, 0);
    switch_fiber(w.scheduler, w.fibers[0]);
#ifdef CUDA_CPU_TSAN // every thread on a fiber of its own, so that races between them are seen
    for (int t = 1; t < w.threads && w.mode == in_turns && !w.met_barrier && !w.failed; t++) {
        w.current = t;
        prepare(w, t);
        switch_fiber(w.scheduler, w.fibers[t]);
    }
    if (w.mode == by_lanes) run_lanes(w);
#else
    if (w.mode == by_lanes) {
        run_lanes(w);
    } else if (!w.met_barrier && w.threads > 1) {
        w.mode = in_loop;
        try {
            kernel.run(w.kernel, true);
            if (w.mode == by_lanes) run_lanes_after_loop(w);
        } catch (BlockFailed) {
        } catch (...) { // here, while the grid that other cores work on still exists
            uncaught();
        }
    }
#endif
    observed(&w.end);
}
inline void run_block(const Kernel &kernel, unsigned block) {
    run_threads_of(kernel, block);
    Worker &w = *worker;
    if (!w.failed && (w.dynamic_bytes || !w.filled.empty())) check_gaps(w);
}

// The cores of a device: core 0 is the thread of the stream whose kernel runs, the others are
// helpers that sleep until they are called. A call that comes to nothing is taken back, so that the
// launch need not wait until the helper has woken up.
struct Grid;
struct Team {
    struct Helper {
        alignas(64) std::atomic<bool> called{false};
        std::mutex lock;
        std::condition_variable changed;
    };
    const int size;
    std::deque<Helper> helpers; // helpers[0] is not used
    std::atomic<int> busy{0};   // helpers that were called and have not finished
    Grid *grid = nullptr;
    char begin = 0, end = 0; // see published()

    Team(int device, int size) : size(size), helpers(size) {
        for (int i = 1; i < size; i++) start_thread(device, [this, i] { help(i); }).detach();
    }
    void call(int i) {
        Hidden hidden;
        busy++;
        {
            std::lock_guard<std::mutex> guard(helpers[i].lock);
            helpers[i].called = true;
        }
        helpers[i].changed.notify_one();
    }
    void run(Grid &grid);
    void help(int i);
};

struct Grid {
    const Kernel &kernel;
    Running running;
    Device &device;
    unsigned blocks, chunk;
    std::atomic<unsigned> next{0};

    // One core's share: chunks of blocks, taken as the core gets to them. Under ThreadSanitizer
    // blocks are dealt round-robin, so that neighbouring blocks always run on different cores.
    // While blocks are left, each core first calls eight others: for one core to call a hundred
    // would take longer than many a kernel.
    void work(int core) {
        cuda_cpu::running = running;
        Team &team = *device.team;
        const int cores = min<unsigned>(team.size, blocks);
        for (int i = 8 * core + 1; i <= 8 * core + 8 && i < cores && next < blocks; i++)
            team.call(i);
#ifdef CUDA_CPU_TSAN
        for (unsigned b = core; b < blocks && !device.fault; b += team.size) one(b);
#else
        for (unsigned first; (first = next.fetch_add(chunk)) < blocks && !device.fault;)
            for (unsigned b = first; b < min(first + chunk, blocks) && !device.fault; b++) one(b);
#endif
    }
    void one(unsigned b) {
        run_block(kernel, b);
        worker->threads = 0;
        if (worker->failed) device.fault = worker->error;
    }
};

inline void Team::run(Grid &grid) {
    published(&begin);
    {
        Hidden hidden;
        this->grid = &grid;
    }
    grid.work(0);
    {
        Hidden hidden;
#ifndef CUDA_CPU_TSAN // where every helper has blocks of its own
        for (int i = 1; busy && i < size; i++)
            if (helpers[i].called && helpers[i].called.exchange(false)) busy--;
#endif
        for (int spin = 0; busy; spin++)
            if (!machine().spinning || spin > 10000) sched_yield();
    }
    observed(&end);
}
inline void Team::help(int i) {
    start_worker();
    Helper &me = helpers[i];
    for (;;) {
        {
            Hidden hidden;
            for (int spin = 0; i <= machine().spinning && spin < 20000 && !me.called; spin++)
                ;
            if (!me.called) {
                std::unique_lock<std::mutex> guard(me.lock);
                me.changed.wait(guard, [&] { return me.called.load(); });
            }
            if (!me.called.exchange(false)) continue;
        }
        observed(&begin);
        grid->work(i);
        published(&end);
        Hidden hidden;
        busy--;
    }
}

// Run a whole grid on the device's cores; called on the stream's thread.
inline void run_grid(const Kernel &kernel, Device &device) {
    const Launch &launch = kernel.launch;
    std::unique_ptr<std::lock_guard<std::mutex>> guard;
    {
        Hidden hidden;
        guard.reset(new std::lock_guard<std::mutex>(device.kernel_lock));
    }
    const unsigned blocks = launch.grid.x * launch.grid.y * launch.grid.z;
    const unsigned chunk = max(1u, min(16u, blocks / (8 * device.team->size)));
    Grid grid{kernel, running, device, blocks, chunk};
    if (!device.fault) {
        if (device.team->size == 1 || blocks == 1)
            while (grid.next < blocks && !device.fault) grid.one(grid.next++);
        else device.team->run(grid);
    }
    Hidden hidden;
    guard.reset();
}

// An argument of a kernel. A pointer must point to memory of the device, or to pinned memory, which
// a GPU reads too. In a struct, words that are addresses of memory that is or was allocated on a
// device are taken for pointers; no others, because two numbers in a word, or what padding holds by
// chance, may look like one.
struct Argument {
    void *p;
    size_t bytes;
    bool is_pointer, is_struct;
};
// Check the pointers in an argument, and turn them to where the memory is.
inline cudaError_t check_argument(Kernel &kernel, const Device &device, int i, Argument arg) {
    const void *word;
    if (!arg.is_pointer && !arg.is_struct) return cudaSuccess;
    for (size_t at = 0; at + sizeof word <= arg.bytes; at += sizeof word) {
        memcpy(&word, (const char *)arg.p + at, sizeof word);
        if (!word) continue;
        if (arg.is_pointer)
            if (auto use = use_of(word, kernel.launch.where)) {
                kernel.uses.push_back(use);
                continue;
            }
        if (arg.is_struct) {
            std::lock_guard<std::mutex> guard(machine().lock);
            const Place place = locate(word);
            if (!place.allocation || held(word) > place.first + place.allocation->bytes) continue;
        }
        char what[300];
        snprintf(what, sizeof what, "%s on device %d: argument %d", kernel.launch.name, device.id,
                 i);
        if (cudaError_t error = check_memory(device, word, 0, kernel.launch.where, what))
            return error;
        word = real(word);
        memcpy((char *)arg.p + at, &word, sizeof word);
    }
    return cudaSuccess;
}

// The bytes that cudaFuncSetAttribute allowed a kernel, or a pointer that may be to any kernel.
inline std::string kernel_name(const char *text) { // without arguments and namespaces
    const std::string name(text, strcspn(text, "<, "));
    return name.substr(name.rfind(':') + 1);
}
inline size_t more_shared(const Device &device, const char *kernel) {
    std::lock_guard<std::mutex> guard(machine().lock);
    int bytes = 0;
    for (const std::string &name : {kernel_name(kernel), std::string()})
        if (device.more_shared.count(name)) bytes = max(bytes, device.more_shared.at(name));
    return bytes;
}

inline cudaError_t check_launch(const Launch &l, const Device &device) {
    const unsigned long long threads = (unsigned long long)l.block.x * l.block.y * l.block.z;
    const unsigned long long blocks = (unsigned long long)l.grid.x * l.grid.y * l.grid.z;
    if (threads == 0 || threads > 1024 || l.block.x > 1024 || l.block.y > 1024 || l.block.z > 64)
        return fail(cudaErrorInvalidConfiguration, l.where,
                    "%s on device %d: a block cannot have %u x %u x %u threads: it must have 1 to "
                    "1024 in all, and z at most 64",
                    l.name, device.id, l.block.x, l.block.y, l.block.z);
    if (blocks == 0 || l.grid.x > 0x7fffffff || l.grid.y > 65535 || l.grid.z > 65535 ||
        blocks > 0xffffff00)
        return fail(cudaErrorInvalidConfiguration, l.where,
                    "%s on device %d: a grid cannot have %u x %u x %u blocks: it must have at "
                    "least 1, and y and z at most 65535",
                    l.name, device.id, l.grid.x, l.grid.y, l.grid.z);
    if (l.shared > dynamic_shared_bytes)
        return fail(cudaErrorInvalidConfiguration, l.where,
                    "%s on device %d: the launch asks for %zu bytes of shared memory, but a block "
                    "has at most %zu",
                    l.name, device.id, l.shared, dynamic_shared_bytes);
    if (l.shared > usual_shared_bytes && l.shared > more_shared(device, l.name))
        return fail(cudaErrorInvalidConfiguration, l.where,
                    "%s on device %d: the launch asks for %zu bytes of shared memory, but a block "
                    "has 49152 unless you call cudaFuncSetAttribute(%s, "
                    "cudaFuncAttributeMaxDynamicSharedMemorySize, %zu) first",
                    l.name, device.id, l.shared, l.name, l.shared);
    if (cudaError_t error = check_handle(l.stream, l.where, l.name)) return error;
    if (l.stream && l.stream->device != &device)
        return fail(cudaErrorInvalidResourceHandle, l.where,
                    "%s: the stream belongs to device %d, but the current device is %d: call "
                    "cudaSetDevice(%d)",
                    l.name, l.stream->device->id, device.id, l.stream->device->id);
    return cudaSuccess;
}

// A slow device's stream sleeps; for short times they are saved up, since sleep is not exact.
inline void fall_behind(double seconds) {
    static thread_local double behind = 0;
    behind += seconds;
    if (behind < 1e-3) return;
    const double begin = seconds_now();
    usleep(behind * 1e6);
    behind -= seconds_now() - begin;
}

// The kernel, if the launch can be with these arguments, whose pointers are changed; else null.
inline std::unique_ptr<Kernel> accept(const Launch &launch,
                                      std::initializer_list<Argument> arguments) {
    const Device &device = current();
    if (check_launch(launch, device)) return nullptr;
    static const bool listed = getenv("CUDA_CPU_LAUNCHES") != nullptr;
    if (listed) {
        const dim3 g = launch.grid, b = launch.block;
        fprintf(stderr, "launch %s grid %ux%ux%u block %ux%ux%u shared %zu warps %llu\n",
                launch.name, g.x, g.y, g.z, b.x, b.y, b.z, launch.shared,
                (unsigned long long)g.x * g.y * g.z * ((b.x * b.y * b.z + 31) / 32));
    }
    auto kernel = std::make_unique<Kernel>(Kernel{launch, {}, nullptr, {}});
    int i = 0;
    for (const Argument &argument : arguments)
        if (check_argument(*kernel, device, ++i, argument)) return nullptr;
    return kernel;
}
inline void enqueue(std::unique_ptr<Kernel> accepted, const void *call, size_t bytes,
                    void (*run)(const void *bytes, bool rest)) {
    Device *device = &current();
    const Launch launch = accepted->launch;
    accepted->bytes.assign((const char *)call, bytes);
    accepted->run = run;
    submit(launch.stream, *device, {launch.name, launch.where, device->id},
           [kernel = std::move(*accepted), device] {
               const double begin = seconds_now();
               run_grid(kernel, *device);
               if (device->slowdown > 1)
                   fall_behind((seconds_now() - begin) * (device->slowdown - 1));
           });
}

template <class F> struct Configured {
    const Launch &launch;
    F f;
    template <class... A> void operator()(A... args) const {
        static_assert(!(std::is_function<std::remove_pointer_t<A>>::value || ...),
                      "a function pointer as a kernel's argument: the stand-in lacks it, but takes "
                      "a struct with an operator()");
        auto kernel = accept(launch, {{(void *)&args, sizeof args, std::is_pointer<A>::value,
                                       std::is_class<A>::value}...});
        if (!kernel) return;
        auto call = [f = f, args...] { f(args...); };
        using K = decltype(call);
        static_assert(std::is_trivially_copy_constructible<K>::value &&
                          std::is_trivially_destructible<K>::value && alignof(K) <= 16,
                      "a kernel's arguments must be copyable as bytes");
        enqueue(std::move(kernel), &call, sizeof call, run_threads<K>);
    }
};
template <class F> Configured<F> configured(const Launch &launch, F f) { return {launch, f}; }

// ---------------------------------------------------------------------------------------------
// 8. The runtime API

inline long setting(const char *name, long otherwise, long least, long most) {
    const char *text = getenv(name);
    if (!text || !*text) return otherwise;
    char *end;
    long value = strtol(text, &end, 10);
    if (*end || value < least || value > most) {
        fprintf(stderr, "%s=%s: expected a whole number from %ld to %ld\n", name, text, least,
                most);
        _exit(1);
    }
    return value;
}

// Return where memory begins in a range of addresses, such that the lower half of an address is
// never a small number. Otherwise an int of a struct and the padding after it, which often holds
// the upper half of an earlier pointer, would look like an address.
inline char *first_address(void *range, size_t bytes) {
    const size_t gib = size_t(1) << 30, skipped = (gib - (uintptr_t)range) % (4 * gib);
    return (char *)range + (skipped < bytes / 2 ? skipped : 0);
}

// Reserve addresses for a device's memory, and as many that are never used; fewer under ulimit -v.
inline char *reserve(size_t &range, size_t memory, int device) {
    const size_t least = min(range, memory + min(memory, size_t(1) << 30));
    for (size_t bytes : {range, least}) {
        range = bytes;
        void *p =
            mmap(nullptr, 2 * range, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p != MAP_FAILED) return (char *)p;
    }
    give_up("cannot reserve addresses for the memory of device %d (%.1f GB): raise ulimit -v, or "
            "set CUDA_CPU_MEMORY below %zu (MiB)",
            device, 2 * range / 1e9, memory >> 20);
}
// The first number of a list such as 1,3, which then begins with the next; 1 if it is empty.
inline double next_slowdown(const char *&list) {
    if (!list || !*list) return 1;
    char *end;
    const double slowdown = strtod(list, &end);
    if (end == list || (*end && *end != ',') || !(slowdown >= 1)) {
        fprintf(stderr, "CUDA_CPU_SLOWDOWN=%s: expected numbers of at least 1, such as 1,3\n",
                getenv("CUDA_CPU_SLOWDOWN"));
        _exit(1);
    }
    list = *end ? end + 1 : nullptr;
    return slowdown;
}
inline Machine::Machine() {
    set_lane_order(getenv("CUDA_CPU_LANES"));
    if (const char *visible = getenv("CUDA_VISIBLE_DEVICES"))
        fprintf(stderr,
                "CUDA_VISIBLE_DEVICES=%s has no effect without a GPU: CUDA_CPU_DEVICES says how "
                "many devices are emulated\n",
                visible);
    const size_t gib = size_t(1) << 30;
    int devices_shown = setting("CUDA_CPU_DEVICES", 1, 1, 64);
    peers = setting("CUDA_CPU_PEERS", 1, 0, 1);
    watchdog = setting("CUDA_CPU_WATCHDOG", 10, 0, 1 << 20);
    cpu_set_t set;
    CPU_ZERO(&set);
    int cores = sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
    const char *slowdown = getenv("CUDA_CPU_SLOWDOWN");
    int cores_each = setting("CUDA_CPU_CORES", max(1, cores / devices_shown), 1, 1024);
    spinning = cores_each * devices_shown <= cores ? max(1, 64 / devices_shown) : 0;
    size_t physical = (size_t)sysconf(_SC_PHYS_PAGES) * page_size();
    size_t total = (size_t)setting("CUDA_CPU_MEMORY", physical / devices_shown >> 20, 1, 1 << 24)
                   << 20;
#if defined(CUDA_CPU_ASAN) || defined(CUDA_CPU_TSAN)
    size_t range = min(total, 4 * gib) + 5 * gib;
#else
    size_t range = 8 * total + 16 * gib; // addresses cost nothing, but ulimit -v may limit them
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGABRT})
        sigaction(signal, &action, &before_fault[signal]);
    static char memory[64 << 10]; // the host's stack may be what overflows
    stack_t stack = {}, before = {};
    stack.ss_sp = memory;
    stack.ss_size = sizeof memory;
    if (!sigaltstack(nullptr, &before) && before.ss_flags & SS_DISABLE)
        sigaltstack(&stack, nullptr);
#endif
#ifdef CUDA_CPU_TSAN
    cores_each = max(2, cores_each); // two blocks of a grid never share all of their order
#endif
    for (int id = 0; id < devices_shown; id++) {
        Device *device = new Device;
        char *memory = reserve(range, total, id);
        device->id = id;
        snprintf(device->memory_of, sizeof device->memory_of, "device %d", id);
        device->cores = cores_each;
        device->slowdown = next_slowdown(slowdown);
        device->base = memory;
        device->next = first_address(memory, range);
        device->end = device->base + range;
        device->away = range;
        device->total = total;
        device->peers.resize(devices_shown);
        device->default_stream = new Stream(device, true);
        device->streams.push_back(device->default_stream);
        device->team = new Team(id, cores_each);
        devices.push_back(device);
    }
    managed.total = physical;
}

} // namespace cuda_cpu

struct cudaEvent {
    cuda_cpu::Device *device;
    bool timing;
    std::shared_ptr<cuda_cpu::Mark> mark; // null until it is recorded
};
typedef cuda_cpu::Stream *cudaStream_t;
typedef cudaEvent *cudaEvent_t;

enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault // what the pointers say
};
constexpr unsigned cudaStreamDefault = 0, cudaStreamNonBlocking = 1;
constexpr unsigned cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2;

struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor,
        totalConstMem;
    int multiProcessorCount, maxThreadsPerBlock, maxThreadsPerMultiProcessor, maxThreadsDim[3],
        maxGridSize[3], warpSize, major, minor, concurrentKernels, cooperativeLaunch,
        unifiedAddressing, managedMemory, canMapHostMemory;
};

// --- errors and devices

inline cudaError_t cudaGetLastError() {
    cudaError_t error = cuda_cpu::last_error, fault = cuda_cpu::current().fault;
    cuda_cpu::last_error = cudaSuccess;
    if (error == cudaErrorMemoryAllocation) {
        std::lock_guard<std::mutex> guard(cuda_cpu::machine().lock);
        cuda_cpu::machine().failed = {};
    }
    return error ? error : fault;
}
inline cudaError_t cudaPeekAtLastError() {
    cudaError_t error = cuda_cpu::last_error, fault = cuda_cpu::current().fault;
    return error ? error : fault;
}
inline cudaError_t cudaGetDeviceCount(int *count, CUDA_CPU_WHERE) {
    if (!count) return cuda_cpu::no_result("cudaGetDeviceCount", where);
    *count = cuda_cpu::machine().devices.size();
    return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device, CUDA_CPU_WHERE) {
    if (!cuda_cpu::valid_device(device))
        return cuda_cpu::fail(cudaErrorInvalidDevice, where,
                              "cudaSetDevice: there is no device %d: the device count is %zu",
                              device, cuda_cpu::machine().devices.size());
    cuda_cpu::current_device = device;
    return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int *device, CUDA_CPU_WHERE) {
    if (!device) return cuda_cpu::no_result("cudaGetDevice", where);
    *device = cuda_cpu::current_device;
    return cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *prop, int device, CUDA_CPU_WHERE) {
    if (!prop) return cuda_cpu::no_result("cudaGetDeviceProperties", where);
    if (!cuda_cpu::valid_device(device))
        return cuda_cpu::fail(
            cudaErrorInvalidDevice, where,
            "cudaGetDeviceProperties: there is no device %d: the device count is %zu", device,
            cuda_cpu::machine().devices.size());
    const cuda_cpu::Device &d = *cuda_cpu::machine().devices[device];
    *prop = {};
    snprintf(prop->name, sizeof prop->name, "CPU stand-in, %d core%s", d.cores,
             d.cores == 1 ? "" : "s");
    prop->totalGlobalMem = d.total;
    prop->sharedMemPerBlock = cuda_cpu::usual_shared_bytes;
    prop->sharedMemPerBlockOptin = prop->sharedMemPerMultiprocessor =
        cuda_cpu::dynamic_shared_bytes;
    prop->totalConstMem = 65536;
    prop->multiProcessorCount = d.cores;
    prop->maxThreadsPerBlock = prop->maxThreadsPerMultiProcessor = 1024;
    prop->maxThreadsDim[0] = prop->maxThreadsDim[1] = 1024;
    prop->maxThreadsDim[2] = 64;
    prop->maxGridSize[0] = 0x7fffffff;
    prop->maxGridSize[1] = prop->maxGridSize[2] = 65535;
    prop->warpSize = 32;
    prop->unifiedAddressing = prop->managedMemory = prop->canMapHostMemory = 1;
    return cudaSuccess;
}
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
inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device,
                                          CUDA_CPU_WHERE) {
    if (!value) return cuda_cpu::no_result("cudaDeviceGetAttribute", where);
    if (!cuda_cpu::valid_device(device))
        return cuda_cpu::fail(
            cudaErrorInvalidDevice, where,
            "cudaDeviceGetAttribute: there is no device %d: the device count is %zu", device,
            cuda_cpu::machine().devices.size());
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = 0x7fffffff; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = cuda_cpu::usual_shared_bytes; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        *value = cuda_cpu::dynamic_shared_bytes;
        break;
    case cudaDevAttrTotalConstantMemory: *value = 65536; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMultiProcessorCount: *value = cuda_cpu::machine().devices[device]->cores; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrConcurrentManagedAccess:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrMemoryPoolsSupported: *value = 1; break;
    case cudaDevAttrComputeCapabilityMajor: // as in cudaDeviceProp
    case cudaDevAttrComputeCapabilityMinor:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrCooperativeLaunch: *value = 0; break;
    default:
        return cuda_cpu::fail(cudaErrorInvalidValue, where,
                              "cudaDeviceGetAttribute: the stand-in lacks attribute %d", attribute);
    }
    return cudaSuccess;
}

// A block may have more dynamic shared memory than 48 KiB if this has said so for its kernel.
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9
};
namespace cuda_cpu {
template <class F>
cudaError_t set_attribute(const char *call, F &&, cudaFuncAttribute attribute, int value,
                          CUDA_CPU_WHERE) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (value < 0 || value > (int)dynamic_shared_bytes)
        return fail(
            cudaErrorInvalidValue, where,
            "cudaFuncSetAttribute: cannot allow %d bytes of shared memory: a block has at most %zu",
            value, dynamic_shared_bytes);
    const bool named = std::is_function<std::remove_reference_t<F>>::value;
    std::lock_guard<std::mutex> guard(machine().lock);
    current().more_shared[named ? kernel_name(call) : ""] = value;
    return cudaSuccess;
}
} // namespace cuda_cpu
#define cudaFuncSetAttribute(...) ::cuda_cpu::set_attribute(#__VA_ARGS__, __VA_ARGS__)

template <class F>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, F &&, int threads,
                                                          size_t shared, CUDA_CPU_WHERE) {
    if (!blocks)
        return cuda_cpu::no_result("cudaOccupancyMaxActiveBlocksPerMultiprocessor", where);
    if (threads <= 0)
        return cuda_cpu::fail(
            cudaErrorInvalidValue, where,
            "cudaOccupancyMaxActiveBlocksPerMultiprocessor: a block cannot have %d threads",
            threads);
    *blocks = threads <= 1024 && shared <= cuda_cpu::dynamic_shared_bytes;
    return cudaSuccess;
}
template <class F>
cudaError_t cudaOccupancyMaxPotentialBlockSize(int *blocks, int *threads, F &&, size_t = 0,
                                               int most = 0, CUDA_CPU_WHERE) {
    if (!blocks || !threads)
        return cuda_cpu::no_result("cudaOccupancyMaxPotentialBlockSize", where);
    *blocks = cuda_cpu::current().cores;
    *threads = most ? min(most, 1024) : 1024;
    return cudaSuccess;
}

inline cudaError_t cudaDeviceSynchronize() { return cuda_cpu::synchronize(cuda_cpu::current()); }

// With peer access a copy need not be staged through the host, and kernels of the current device
// may use the peer's memory.
inline cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer, CUDA_CPU_WHERE) {
    if (!can) return cuda_cpu::no_result("cudaDeviceCanAccessPeer", where);
    if (!cuda_cpu::valid_device(device) || !cuda_cpu::valid_device(peer))
        return cuda_cpu::fail(cudaErrorInvalidDevice, where,
                              "cudaDeviceCanAccessPeer: there is no device %d or no device %d: the "
                              "device count is %zu",
                              device, peer, cuda_cpu::machine().devices.size());
    *can = device != peer && cuda_cpu::machine().peers;
    return cudaSuccess;
}
namespace cuda_cpu {
constexpr int most_peers = 8; // of a device, as CUDA has it on machines without an NVSwitch
}
inline cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags, CUDA_CPU_WHERE) {
    if (flags)
        return cuda_cpu::fail(cudaErrorInvalidValue, where,
                              "cudaDeviceEnablePeerAccess: flags are %u, but must be 0", flags);
    if (!cuda_cpu::machine().peers)
        return cuda_cpu::fail(cudaErrorPeerAccessUnsupported, where,
                              "cudaDeviceEnablePeerAccess: CUDA_CPU_PEERS=0 allows no peer access");
    if (!cuda_cpu::valid_device(peer) || peer == cuda_cpu::current_device)
        return cuda_cpu::fail(
            cudaErrorInvalidDevice, where,
            "cudaDeviceEnablePeerAccess: device %d cannot have device %d as a peer",
            cuda_cpu::current_device, peer);
    std::vector<bool> &peers = cuda_cpu::current().peers;
    if (peers[peer]) return cuda_cpu::fail(cudaErrorPeerAccessAlreadyEnabled);
    int enabled = 0;
    for (bool is_peer : peers) enabled += is_peer;
    if (enabled == cuda_cpu::most_peers) return cuda_cpu::fail(cudaErrorTooManyPeers);
    peers[peer] = true;
    return cudaSuccess;
}
inline cudaError_t cudaDeviceDisablePeerAccess(int peer, CUDA_CPU_WHERE) {
    if (!cuda_cpu::valid_device(peer))
        return cuda_cpu::fail(cudaErrorInvalidDevice, where,
                              "cudaDeviceDisablePeerAccess: there is no device %d", peer);
    if (!cuda_cpu::current().peers[peer]) return cuda_cpu::fail(cudaErrorPeerAccessNotEnabled);
    cuda_cpu::current().peers[peer] = false;
    return cudaSuccess;
}

// --- memory

namespace cuda_cpu {
inline size_t mapped_bytes(const char *first, const Allocation &a) {
    return first + (a.bytes + 255) / 256 * 256 - a.pages;
}
// Fresh memory is filled with NaN. That of variables does not count as used.
inline cudaError_t allocate(Device &device, void **pointer, size_t bytes, Where where,
                            const char *by, bool counts = true) {
    if (!pointer) return no_result(by, where);
    *pointer = nullptr;
    if (bytes == 0) return cudaSuccess;
    const size_t page = page_size(), rounded = (bytes + 255) / 256 * 256;
    const size_t mapped = (rounded + page - 1) / page * page;
    std::lock_guard<std::mutex> guard(machine().lock);
    auto no_memory = [&] {
        const size_t free = device.total - device.used;
        machine().failed = {by, pointer, bytes, free, device.id, where};
        return fail(cudaErrorMemoryAllocation);
    };
    if (counts && (bytes > device.total || device.used + mapped > device.total))
        return no_memory();
    char *pages = device.next;
    if (mapped + page >
        size_t(device.end - device.next)) { // out of addresses: use freed ones again
        pages = nullptr;
        for (auto &entry : device.allocations) {
            Allocation &a = entry.second;
            if (a.mapped || mapped_bytes(entry.first, a) != mapped) continue;
            pages = a.pages;
            device.allocations.erase(entry.first);
            break;
        }
        if (!pages) return no_memory();
    } else {
        device.next += mapped + page;
    }
    char *first = pages + mapped - rounded, *memory = first + device.away;
    if (mprotect(pages + device.away, mapped, PROT_READ | PROT_WRITE))
        return no_memory();
    {
        Hidden hidden;
#ifdef CUDA_CPU_ASAN
        ASAN_UNPOISON_MEMORY_REGION(pages + device.away, mapped);
#endif
        memset(memory, 0xFF, bytes);
    }
#ifdef CUDA_CPU_ASAN
    ASAN_POISON_MEMORY_REGION(pages + device.away, first - pages);
    ASAN_POISON_MEMORY_REGION(memory + bytes, rounded - bytes);
#endif
    device.allocations[first] = {bytes, pages, where, {nullptr, 0, nullptr}, true, by, true};
    if (counts) device.used += mapped;
    if (pointer == machine().failed.pointer) machine().failed = {};
    *pointer = first;
    return cudaSuccess;
}
// A new mapping in its place: no access, and the memory goes back to the system.
inline void unmap(Device &device, const char *first) {
    std::lock_guard<std::mutex> guard(machine().lock);
    Allocation &a = device.allocations[first];
    const size_t mapped = mapped_bytes(first, a);
#ifdef CUDA_CPU_ASAN
    ASAN_POISON_MEMORY_REGION(a.pages + device.away, mapped);
#endif
    mmap(a.pages + device.away, mapped, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    a.mapped = false;
    device.used -= mapped;
}
// An allocation that `call` frees is found, and from now on no more live.
inline cudaError_t end_of(Place &at, void *pointer, Where where, const char *call, const char *by) {
    std::lock_guard<std::mutex> guard(machine().lock);
    at = locate(pointer);
    if (!at.device || !at.allocation || at.first != held(pointer) ||
        strncmp(at.allocation->by, by, strlen(by)))
        return fail(cudaErrorInvalidValue, where, "%s: %p was not returned by %s", call, pointer,
                    by);
    Allocation &a = at.device->allocations[at.first];
    if (!a.live)
        return fail(cudaErrorInvalidValue, where, "%s: %p on %s was already freed by %s:%d", call,
                    pointer, at.device->memory_of, a.freed.file, a.freed.line);
    a.live = false;
    a.freed = where;
    return cudaSuccess;
}
} // namespace cuda_cpu

inline cudaError_t cudaMalloc(void **pointer, size_t bytes, CUDA_CPU_WHERE) {
    return cuda_cpu::allocate(cuda_cpu::current(), pointer, bytes, where, "cudaMalloc");
}
template <class T> cudaError_t cudaMalloc(T **pointer, size_t bytes, CUDA_CPU_WHERE) {
    return cudaMalloc((void **)pointer, bytes, where);
}

// Waits for the device first, as CUDA does.
inline cudaError_t cudaFree(void *pointer, CUDA_CPU_WHERE) {
    using namespace cuda_cpu;
    if (!pointer) return cudaSuccess;
    Place at;
    if (cudaError_t error = end_of(at, pointer, where, "cudaFree", "cudaMalloc")) return error;
    for (Device *device : machine().devices)
        if (device == at.device || is_managed(at.device)) synchronize(*device);
    unmap(*at.device, at.first);
    return cudaSuccess;
}

// In the stream's order. What another stream enqueues later with memory that is freed is refused;
// what it enqueued before and has not done by then faults.
inline cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream,
                                   CUDA_CPU_WHERE) {
    using namespace cuda_cpu;
    const char *by = "cudaMallocAsync";
    if (cudaError_t error = check_handle(stream, where, by)) return error;
    Device &device = stream ? *stream->device : current();
    const cudaError_t before = last_error, error = allocate(device, pointer, bytes, where, by);
    if (error != cudaErrorMemoryAllocation) return error;
    last_error = before;
    synchronize(stream ? stream : device.default_stream); // it may be about to free some
    return allocate(device, pointer, bytes, where, by);
}
template <class T>
cudaError_t cudaMallocAsync(T **pointer, size_t bytes, cudaStream_t stream, CUDA_CPU_WHERE) {
    return cudaMallocAsync((void **)pointer, bytes, stream, where);
}
inline cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream, CUDA_CPU_WHERE) {
    using namespace cuda_cpu;
    if (!pointer) return cudaSuccess;
    const char *call = "cudaFreeAsync";
    if (cudaError_t error = check_handle(stream, where, call)) return error;
    Device &device = stream ? *stream->device : current();
    Place at;
    if (cudaError_t error = check_memory(device, pointer, 0, where, call)) return error;
    if (cudaError_t error = end_of(at, pointer, where, call, "cudaMallocAsync")) return error;
    submit(stream, device, {call, where, device.id}, [at] {
        Hidden hidden;
        unmap(*at.device, at.first);
    });
    return cudaSuccess;
}

// Memory that the host and all devices read and write under one address. It is the machine's own,
// so nothing moves. That the host waits for the devices before it looks is up to the program.
constexpr unsigned cudaMemAttachGlobal = 1, cudaMemAttachHost = 2;
inline cudaError_t cudaMallocManaged(void **pointer, size_t bytes,
                                     unsigned flags = cudaMemAttachGlobal, CUDA_CPU_WHERE) {
    using namespace cuda_cpu;
    if (bytes == 0 || flags < cudaMemAttachGlobal || flags > cudaMemAttachHost)
        return fail(cudaErrorInvalidValue, where,
                    "cudaMallocManaged: cannot allocate %zu bytes with flags %u", bytes, flags);
    Device &managed = machine().managed;
    {
        std::lock_guard<std::mutex> guard(machine().lock);
        if (!managed.base) {
            const size_t range = size_t(current().end - current().base);
            void *p =
                mmap(nullptr, range, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (p == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
            managed.next = (char *)p;
            managed.end = managed.next + range;
            managed.base = managed.next;
        }
    }
    return allocate(managed, pointer, bytes, where, "cudaMallocManaged");
}
template <class T>
cudaError_t cudaMallocManaged(T **pointer, size_t bytes, unsigned flags = cudaMemAttachGlobal,
                              CUDA_CPU_WHERE) {
    return cudaMallocManaged((void **)pointer, bytes, flags, where);
}
constexpr int cudaCpuDeviceId = -1;
inline cudaError_t cudaMemPrefetchAsync(const void *pointer, size_t bytes, int device,
                                        cudaStream_t = nullptr, CUDA_CPU_WHERE) {
    using namespace cuda_cpu;
    if (device != cudaCpuDeviceId && !valid_device(device))
        return fail(cudaErrorInvalidDevice, where,
                    "cudaMemPrefetchAsync: there is no device %d: the device count is %zu", device,
                    machine().devices.size());
    bool managed;
    {
        std::lock_guard<std::mutex> guard(machine().lock);
        managed = is_managed(locate(pointer).device);
    }
    if (!managed)
        return fail(cudaErrorInvalidValue, where,
                    "cudaMemPrefetchAsync: %p was not returned by cudaMallocManaged", pointer);
    return check_memory(machine().managed, pointer, bytes, where, "cudaMemPrefetchAsync");
}

// Filled with NaN when fresh.
constexpr unsigned cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2,
                   cudaHostAllocWriteCombined = 4;
inline cudaError_t cudaMallocHost(void **pointer, size_t bytes, unsigned flags = 0,
                                  CUDA_CPU_WHERE) {
    using namespace cuda_cpu;
    if (!pointer) return no_result("cudaMallocHost", where);
    if (flags > 7)
        return fail(cudaErrorInvalidValue, where, "cudaHostAlloc: invalid flags %u", flags);
    *pointer = bytes ? aligned_alloc(256, (bytes + 255) / 256 * 256) : nullptr;
    if (!*pointer) return bytes ? fail(cudaErrorMemoryAllocation) : cudaSuccess;
#ifdef CUDA_CPU_ASAN
    ASAN_POISON_MEMORY_REGION((char *)*pointer + bytes, (bytes + 255) / 256 * 256 - bytes);
#endif
    memset(*pointer, 0xFF, bytes);
    std::lock_guard<std::mutex> guard(machine().lock);
    machine().pinned[(const char *)*pointer] = {
        bytes, "cudaMallocHost", std::make_shared<int>(), {}};
    return cudaSuccess;
}
template <class T>
cudaError_t cudaMallocHost(T **pointer, size_t bytes, unsigned flags = 0, CUDA_CPU_WHERE) {
    return cudaMallocHost((void **)pointer, bytes, flags, where);
}
template <class T>
cudaError_t cudaHostAlloc(T **pointer, size_t bytes, unsigned flags, CUDA_CPU_WHERE) {
    return cudaMallocHost((void **)pointer, bytes, flags, where);
}
namespace cuda_cpu {
// Pinned memory is forgotten. A GPU's driver may wait for what is queued and uses it, or not.
inline cudaError_t unpin(void *pointer, Where where, const char *call, const char *by,
                         cudaError_t error) {
    std::lock_guard<std::mutex> guard(machine().lock);
    auto found = machine().pinned.find((const char *)pointer);
    if (found == machine().pinned.end() || found->second.by != std::string(by))
        return fail(error, where, "%s: %p was not %s %s", call, pointer,
                    error == cudaErrorInvalidValue ? "returned by" : "given to", by);
    const Pinned &pinned = found->second;
    if (pinned.use.use_count() > 1)
        return fail(cudaErrorInvalidValue, where,
                    "%s: %p is still in use by the operation that %s:%d enqueued: wait for its "
                    "stream first",
                    call, pointer, pinned.used.file, pinned.used.line);
    machine().pinned.erase(found);
    return cudaSuccess;
}
} // namespace cuda_cpu
inline cudaError_t cudaFreeHost(void *pointer, CUDA_CPU_WHERE) {
    if (!pointer) return cudaSuccess;
    cudaError_t error =
        cuda_cpu::unpin(pointer, where, "cudaFreeHost", "cudaMallocHost", cudaErrorInvalidValue);
    if (!error) free(pointer);
    return error;
}
// Memory of the host becomes pinned memory.
constexpr unsigned cudaHostRegisterDefault = 0, cudaHostRegisterPortable = 1,
                   cudaHostRegisterMapped = 2, cudaHostRegisterReadOnly = 8;
inline cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags, CUDA_CPU_WHERE) {
    using namespace cuda_cpu;
    if (flags > 15)
        return fail(cudaErrorInvalidValue, where, "cudaHostRegister: invalid flags %u", flags);
    if (!pointer || bytes == 0)
        return fail(cudaErrorInvalidValue, where, "cudaHostRegister: cannot pin %zu bytes at %p",
                    bytes, pointer);
    const char *p = (const char *)pointer;
    std::lock_guard<std::mutex> guard(machine().lock);
    if (const Device *owner = locate(p).device)
        return fail(cudaErrorInvalidValue, where,
                    "cudaHostRegister: %p is memory of %s, not of "
                    "the host",
                    pointer, owner->memory_of);
    auto next = machine().pinned.lower_bound(p);
    if (is_pinned(p) || (next != machine().pinned.end() && next->first < p + bytes))
        return fail(cudaErrorHostMemoryAlreadyRegistered, where,
                    "cudaHostRegister: some or all of the %zu bytes at %p are already pinned",
                    bytes, pointer);
    machine().pinned[p] = {bytes, "cudaHostRegister", std::make_shared<int>(), {}};
    return cudaSuccess;
}
inline cudaError_t cudaHostUnregister(void *pointer, CUDA_CPU_WHERE) {
    return cuda_cpu::unpin(pointer, where, "cudaHostUnregister", "cudaHostRegister",
                           cudaErrorHostMemoryNotRegistered);
}
inline cudaError_t cudaMemGetInfo(size_t *free, size_t *total, CUDA_CPU_WHERE) {
    if (!free || !total) return cuda_cpu::no_result("cudaMemGetInfo", where);
    std::lock_guard<std::mutex> guard(cuda_cpu::machine().lock);
    *total = cuda_cpu::current().total;
    *free = *total - cuda_cpu::current().used;
    return cudaSuccess;
}

namespace cuda_cpu {
// A copy that is not between devices: `height` rows of `width` bytes, whose beginnings lie `pitch`
// bytes apart; mostly it is one row.
struct Copy {
    const char *call;
    void *to;
    size_t to_pitch;
    const void *from;
    size_t from_pitch, width, height;
    cudaMemcpyKind kind;
    bool pointers = false; // what is copied: each becomes one that a kernel can follow

    void operator()() const {
        for (size_t i = 0; i < height; i++)
            memcpy(real(to) + i * to_pitch, real(from) + i * from_pitch, width);
        if (!pointers || height > 1) return;
        for (void **p = (void **)real(to), **end = p + width / sizeof *p; p < end; p++)
            if (kind == cudaMemcpyHostToDevice) *p = real(*p);
            else if (kind == cudaMemcpyDeviceToHost) *p = (void *)held(*p);
    }
    size_t extent(size_t pitch) const { return (height - 1) * pitch + width; }
};

// Both ends; `device` becomes the one whose memory takes part, `other` the one that the source is
// on, if that is another.
inline cudaError_t check_copy(Device *&device, Device *&other, Copy &copy, Where where) {
    const char *call = copy.call;
    for (size_t pitch : {copy.to_pitch, copy.from_pitch})
        if (pitch < copy.width)
            return fail(cudaErrorInvalidPitchValue, where,
                        "%s: rows of %zu bytes do not fit into a pitch of %zu", call, copy.width,
                        pitch);
    Device *to_device, *from_device;
    {
        std::lock_guard<std::mutex> guard(machine().lock);
        to_device = locate(copy.to).device;
        from_device = locate(copy.from).device;
    }
    auto of_one = [](Device *owner) { return owner && !is_managed(owner); };
    if (copy.kind == cudaMemcpyDefault)
        copy.kind = of_one(to_device)
                        ? of_one(from_device) ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice
                    : of_one(from_device) ? cudaMemcpyDeviceToHost
                                          : cudaMemcpyHostToHost;
    if (Device *owner = copy.kind == cudaMemcpyDeviceToHost ? from_device : to_device)
        if (of_one(owner)) device = owner;
    other = copy.kind == cudaMemcpyDeviceToDevice && of_one(from_device) ? from_device : device;
    auto check = [&](const void *p, Device *owner, size_t pitch, bool host, const char *end) {
        char what[100];
        snprintf(what, sizeof what, "%s, %s", call, end);
        if (!host && !owner && is_pinned_now(p)) return cudaSuccess; // a device's address, too
        if (!host || (owner && is_managed(owner)))
            return check_memory(of_one(owner) ? *owner : *device, p, copy.extent(pitch), where,
                                what);
        if (!p)
            return fail(cudaErrorInvalidValue, where, "%s: the pointer is null%s", what,
                        null_may_be().c_str());
        if (!owner) return cudaSuccess;
        return fail(cudaErrorInvalidValue, where,
                    "%s: the %s %p is memory of device %d, not of the host", call, end, p,
                    owner->id);
    };
    const unsigned kind = copy.kind;
    if (kind > cudaMemcpyDeviceToDevice) return fail(cudaErrorInvalidMemcpyDirection);
    const bool to_host = kind == cudaMemcpyHostToHost || kind == cudaMemcpyDeviceToHost,
               from_host = kind == cudaMemcpyHostToHost || kind == cudaMemcpyHostToDevice;
    auto check_to = [&] {
        return check(copy.to, to_device, copy.to_pitch, to_host, "destination");
    };
    auto check_from = [&] {
        return check(copy.from, from_device, copy.from_pitch, from_host, "source");
    };
    const bool from_first = kind == cudaMemcpyDeviceToHost; // the device's end
    cudaError_t error = from_first ? check_from() : check_to();
    return error ? error : from_first ? check_to() : check_from();
}

// Pageable host memory is read before the call returns, or written before it returns, as on a GPU;
// only pinned memory is copied while the host goes on.
inline cudaError_t copy_async(Copy copy, cudaStream_t stream, Where where) {
    if (copy.width == 0 || copy.height == 0) return cudaSuccess;
    if (cudaError_t error = check_handle(stream, where, copy.call)) return error;
    Device *device = stream ? stream->device : &current();
    Device *queue = device, *other = device;
    if (cudaError_t error = check_copy(device, other, copy, where)) return error;
    auto pageable = [](const void *p) { return !is_pinned(p) && !locate(p).device; };
    bool pageable_source = false, pageable_target = false;
    {
        std::lock_guard<std::mutex> guard(machine().lock);
        if (copy.kind == cudaMemcpyHostToDevice || copy.kind == cudaMemcpyHostToHost)
            pageable_source = pageable(copy.from);
        if (copy.kind == cudaMemcpyDeviceToHost || copy.kind == cudaMemcpyHostToHost)
            pageable_target = pageable(copy.to);
    }
    Running what = {copy.call, where, queue->id};
    if (pageable_source && !pageable_target) {
        std::shared_ptr<char> staged((char *)malloc(copy.width * copy.height), free);
        if (!staged) return fail(cudaErrorMemoryAllocation);
        Copy stage = copy;
        stage.to = staged.get();
        copy.from = staged.get();
        stage.to_pitch = copy.from_pitch = copy.width;
        stage();
        submit(stream, *queue, what, [copy, staged = std::move(staged)] { copy(); });
    } else {
        submit(stream, *queue, what,
               [copy, to = use_of(copy.to, where), from = use_of(copy.from, where)] { copy(); });
        if (pageable_target || (other != device && !machine().peers))
            return synchronize(stream ? stream : queue->default_stream);
    }
    return cudaSuccess;
}
// A copy between devices that names no stream. The host goes on; all that either device was given
// before, or is given later, is ordered with it.
inline void between_devices(Device &to, Device &from, Running running,
                            const std::function<void()> &copy) {
    const Enqueuing one_at_a_time;
    std::vector<Stream *> all;
    for (Device *device : {&to, &from}) {
        Hidden hidden;
        for (Stream *stream : device->streams) all.push_back(stream);
    }
    Stream *stream = to.default_stream;
    for (Stream *other : all)
        if (other != stream) wait(stream, mark(other));
    stream->push(running, copy);
    auto done = mark(stream);
    for (Stream *other : all)
        if (other != stream) wait(other, done);
}
// Waits until the copy is done, unless it is one between devices.
inline cudaError_t copy_and_wait(Copy copy, Where where) {
    Device *device = &current(), *other = device;
    if (copy.width == 0 || copy.height == 0) return cudaSuccess;
    if (cudaError_t error = check_copy(device, other, copy, where)) return error;
    if (other != device) {
        between_devices(*device, *other, {copy.call, where, device->id}, copy);
        return machine().peers ? cudaSuccess : synchronize(device->default_stream);
    }
    submit(nullptr, *device, {copy.call, where, device->id}, copy);
    return synchronize(device->default_stream);
}
} // namespace cuda_cpu

inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream = nullptr, CUDA_CPU_WHERE) {
    return cuda_cpu::copy_async({"cudaMemcpyAsync", to, bytes, from, bytes, bytes, 1, kind}, stream,
                                where);
}
inline cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                              CUDA_CPU_WHERE) {
    return cuda_cpu::copy_and_wait({"cudaMemcpy", to, bytes, from, bytes, bytes, 1, kind}, where);
}
// To an array of pointers.
template <class T>
cudaError_t cudaMemcpyAsync(T **to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr, CUDA_CPU_WHERE) {
    return cuda_cpu::copy_async({"cudaMemcpyAsync", to, bytes, from, bytes, bytes, 1, kind, true},
                                stream, where);
}
template <class T>
cudaError_t cudaMemcpy(T **to, const void *from, size_t bytes, cudaMemcpyKind kind,
                       CUDA_CPU_WHERE) {
    return cuda_cpu::copy_and_wait({"cudaMemcpy", to, bytes, from, bytes, bytes, 1, kind, true},
                                   where);
}
inline cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                                     size_t width, size_t height, cudaMemcpyKind kind,
                                     cudaStream_t stream = nullptr, CUDA_CPU_WHERE) {
    return cuda_cpu::copy_async(
        {"cudaMemcpy2DAsync", to, to_pitch, from, from_pitch, width, height, kind}, stream, where);
}
inline cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                                size_t width, size_t height, cudaMemcpyKind kind, CUDA_CPU_WHERE) {
    return cuda_cpu::copy_and_wait(
        {"cudaMemcpy2D", to, to_pitch, from, from_pitch, width, height, kind}, where);
}

namespace cuda_cpu {
inline cudaError_t set_async(const char *call, void *to, size_t pitch, int value, size_t width,
                             size_t height, cudaStream_t stream, Where where) {
    if (width == 0 || height == 0) return cudaSuccess;
    if (cudaError_t error = check_handle(stream, where, call)) return error;
    Device &device = stream ? *stream->device : current();
    if (pitch < width)
        return fail(cudaErrorInvalidPitchValue, where,
                    "%s: rows of %zu bytes do not fit into a pitch of %zu", call, width, pitch);
    auto pinned = use_of(to, where);
    cudaError_t error = pinned ? cudaSuccess
                               : check_memory(device, to, (height - 1) * pitch + width, where,
                                              call);
    if (error) return error;
    submit(stream, device, {call, where, device.id}, [=] {
        (void)pinned;
        for (size_t i = 0; i < height; i++) memset(real(to) + i * pitch, value, width);
    });
    return cudaSuccess;
}
} // namespace cuda_cpu
inline cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream = nullptr,
                                   CUDA_CPU_WHERE) {
    return cuda_cpu::set_async("cudaMemsetAsync", to, bytes, value, bytes, 1, stream, where);
}
inline cudaError_t cudaMemset(void *to, int value, size_t bytes, CUDA_CPU_WHERE) {
    return cuda_cpu::set_async("cudaMemset", to, bytes, value, bytes, 1, nullptr, where);
}
inline cudaError_t cudaMemset2DAsync(void *to, size_t pitch, int value, size_t width, size_t height,
                                     cudaStream_t stream = nullptr, CUDA_CPU_WHERE) {
    return cuda_cpu::set_async("cudaMemset2DAsync", to, pitch, value, width, height, stream, where);
}
inline cudaError_t cudaMemset2D(void *to, size_t pitch, int value, size_t width, size_t height,
                                CUDA_CPU_WHERE) {
    return cuda_cpu::set_async("cudaMemset2D", to, pitch, value, width, height, nullptr, where);
}
// Rows of an allocation begin at multiples of 512 bytes.
template <class T>
cudaError_t cudaMallocPitch(T **pointer, size_t *pitch, size_t width, size_t height,
                            CUDA_CPU_WHERE) {
    if (!pitch) return cuda_cpu::no_result("cudaMallocPitch", where);
    *pitch = (width + 511) / 512 * 512;
    return cudaMalloc((void **)pointer, *pitch * height, where);
}

// --- variables of a device

namespace cuda_cpu {
inline void *copy_on(Symbol &symbol, Device &device) {
    Hidden hidden;
    static std::mutex lock;
    std::lock_guard<std::mutex> guard(lock);
    void *&copy = symbol.copies[device.id];
    if (copy) return copy;
    if (allocate(device, &copy, symbol.bytes, symbol.where, "its declaration", false))
        give_up("no memory for %s on device %d", symbol.name, device.id);
    return memcpy(real(copy), symbol.initial, symbol.bytes), copy;
}
// Where the calling thread finds the variable whose first value is `initial`.
__attribute__((noinline, cold)) inline void *find_variable(const void *initial, size_t bytes,
                                                           const char *name, Where where) {
    machine(); // its threads are started in the open
    Hidden hidden;
    Symbol *found = nullptr;
    {
        std::lock_guard<std::mutex> guard(machine().lock);
        for (Symbol *symbol : machine().symbols)
            if (symbol->initial == initial) found = symbol;
        if (!found) {
            void *p =
                mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (p == MAP_FAILED) give_up("cannot reserve addresses for %s", name);
            found = new Symbol{name, where, initial, bytes, (char *)p, {}};
            machine().symbols.push_back(found);
        }
    }
    if (device_of_thread < 0) return found->host_side;
    return real(copy_on(*found, *machine().devices[device_of_thread]));
}
template <class T> T &device_variable(T &initial, const char *name, const char *file, int line) {
    static_assert(std::is_trivially_copyable<T>::value,
                  "a device variable must be copyable as bytes");
    return *(T *)find_variable((const void *)&initial, sizeof initial, name, {file, line, nullptr});
}
template <class T> T &constant_variable(T &initial, const char *name, const char *file, int line) {
    static_assert(sizeof initial <= 65536, "a device has 64 KiB of constant memory");
    return device_variable(initial, name, file, line);
}
// A device's threads find their variables before they run a kernel.
inline bool add_on_start(void (*call)()) {
    on_start().push_back(call);
    return true;
}

template <class T>
constexpr bool holds_pointers = std::is_pointer<typename std::remove_all_extents<T>::type>::value;

// The current device's copy of a variable, for a call that is given its name.
inline cudaError_t find_copy(char *&copy, const void *variable, Where where, const char *call) {
    Symbol *symbol;
    {
        std::lock_guard<std::mutex> guard(machine().lock);
        symbol = find_symbol(variable);
    }
    if (!symbol)
        return fail(cudaErrorInvalidSymbol, where,
                    "%s: pass the name of a __device__ or __constant__ variable, not its address",
                    call);
    copy = (char *)copy_on(*symbol, current());
    return cudaSuccess;
}
} // namespace cuda_cpu

template <class T>
cudaError_t cudaGetSymbolAddress(void **pointer, const T &variable, CUDA_CPU_WHERE) {
    char *copy = nullptr;
    if (!pointer) return cuda_cpu::no_result("cudaGetSymbolAddress", where);
    cudaError_t error = cuda_cpu::find_copy(copy, &variable, where, "cudaGetSymbolAddress");
    *pointer = copy;
    return error;
}
template <class T> cudaError_t cudaGetSymbolSize(size_t *bytes, const T &variable, CUDA_CPU_WHERE) {
    char *copy = nullptr;
    if (!bytes) return cuda_cpu::no_result("cudaGetSymbolSize", where);
    *bytes = sizeof variable;
    return cuda_cpu::find_copy(copy, &variable, where, "cudaGetSymbolSize");
}
template <class T>
cudaError_t cudaMemcpyToSymbol(const T &variable, const void *from, size_t bytes, size_t offset = 0,
                               cudaMemcpyKind kind = cudaMemcpyHostToDevice, CUDA_CPU_WHERE) {
    const char *call = "cudaMemcpyToSymbol";
    char *to = nullptr;
    if (cudaError_t error = cuda_cpu::find_copy(to, &variable, where, call)) return error;
    return cuda_cpu::copy_and_wait(
        {call, to + offset, bytes, from, bytes, bytes, 1, kind, cuda_cpu::holds_pointers<T>},
        where);
}
template <class T>
cudaError_t cudaMemcpyFromSymbol(void *to, const T &variable, size_t bytes, size_t offset = 0,
                                 cudaMemcpyKind kind = cudaMemcpyDeviceToHost, CUDA_CPU_WHERE) {
    const char *call = "cudaMemcpyFromSymbol";
    char *from = nullptr;
    if (cudaError_t error = cuda_cpu::find_copy(from, &variable, where, call)) return error;
    return cuda_cpu::copy_and_wait(
        {call, to, bytes, from + offset, bytes, bytes, 1, kind, cuda_cpu::holds_pointers<T>},
        where);
}
template <class T>
cudaError_t cudaMemcpyToSymbolAsync(const T &variable, const void *from, size_t bytes,
                                    size_t offset, cudaMemcpyKind kind,
                                    cudaStream_t stream = nullptr, CUDA_CPU_WHERE) {
    const char *call = "cudaMemcpyToSymbolAsync";
    char *to = nullptr;
    if (cudaError_t error = cuda_cpu::find_copy(to, &variable, where, call)) return error;
    return cuda_cpu::copy_async(
        {call, to + offset, bytes, from, bytes, bytes, 1, kind, cuda_cpu::holds_pointers<T>},
        stream, where);
}
template <class T>
cudaError_t cudaMemcpyFromSymbolAsync(void *to, const T &variable, size_t bytes, size_t offset,
                                      cudaMemcpyKind kind, cudaStream_t stream = nullptr,
                                      CUDA_CPU_WHERE) {
    const char *call = "cudaMemcpyFromSymbolAsync";
    char *from = nullptr;
    if (cudaError_t error = cuda_cpu::find_copy(from, &variable, where, call)) return error;
    return cuda_cpu::copy_async(
        {call, to, bytes, from + offset, bytes, bytes, 1, kind, cuda_cpu::holds_pointers<T>},
        stream, where);
}

// --- copies between devices, functions of the host

namespace cuda_cpu {
inline cudaError_t check_peers(const void *to, int to_device, const void *from, int from_device,
                               size_t bytes, Where where, const char *call) {
    if (!valid_device(to_device) || !valid_device(from_device))
        return fail(cudaErrorInvalidDevice, where,
                    "%s: cannot copy from device %d to device %d: the device count is %zu", call,
                    from_device, to_device, machine().devices.size());
    char dst[100], src[100];
    snprintf(dst, sizeof dst, "%s, destination", call);
    snprintf(src, sizeof src, "%s, source", call);
    cudaError_t error = check_memory(*machine().devices[to_device], to, bytes, where, dst);
    return error ? error : check_memory(*machine().devices[from_device], from, bytes, where, src);
}
} // namespace cuda_cpu

// In the order of its stream alone: that the source is ready, and stays so, takes events.
inline cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                                       size_t bytes, cudaStream_t stream = nullptr,
                                       CUDA_CPU_WHERE) {
    using namespace cuda_cpu;
    if (bytes == 0) return cudaSuccess;
    const char *call = "cudaMemcpyPeerAsync";
    if (cudaError_t error = check_peers(to, to_device, from, from_device, bytes, where, call))
        return error;
    if (cudaError_t error = check_handle(stream, where, call)) return error;
    Device &device = stream ? *stream->device : current();
    submit(stream, device, {call, where, device.id}, [=] { memcpy(real(to), real(from), bytes); });
    if (!machine().peers && to_device != from_device)
        return synchronize(stream ? stream : device.default_stream);
    return cudaSuccess;
}
inline cudaError_t cudaMemcpyPeer(void *to, int to_device, const void *from, int from_device,
                                  size_t bytes, CUDA_CPU_WHERE) {
    using namespace cuda_cpu;
    if (bytes == 0) return cudaSuccess;
    const char *call = "cudaMemcpyPeer";
    if (cudaError_t error = check_peers(to, to_device, from, from_device, bytes, where, call))
        return error;
    between_devices(*machine().devices[to_device], *machine().devices[from_device],
                    {call, where, to_device}, [=] { memcpy(real(to), real(from), bytes); });
    return cudaSuccess;
}

// The stream calls f(data), on a thread of the host, where its turn comes. As on a GPU, f may not
// call CUDA: it would wait for the stream that waits for it.
typedef void (*cudaHostFn_t)(void *);
inline cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t f, void *data,
                                      CUDA_CPU_WHERE) {
    using namespace cuda_cpu;
    if (!f) return fail(cudaErrorInvalidValue, where, "cudaLaunchHostFunc: the function is null");
    if (cudaError_t error = check_handle(stream, where, "cudaLaunchHostFunc")) return error;
    Device &device = stream ? *stream->device : current();
    submit(stream, device, {"cudaLaunchHostFunc", where, device.id}, [=] {
        in_host_function = true;
        f(data);
        in_host_function = false;
    });
    return cudaSuccess;
}

// --- streams and events

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags,
                                             CUDA_CPU_WHERE) {
    using namespace cuda_cpu;
    if (!stream) return no_result("cudaStreamCreate", where);
    if (flags > cudaStreamNonBlocking)
        return fail(cudaErrorInvalidValue, where, "cudaStreamCreateWithFlags: invalid flags %u",
                    flags);
    const Enqueuing one_at_a_time;
    std::lock_guard<std::mutex> guard(machine().lock);
    *stream = new Stream(&current(), flags != cudaStreamNonBlocking);
    current().streams.push_back(*stream);
    machine().handles[*stream] = &current();
    return cudaSuccess;
}
inline cudaError_t cudaStreamCreate(cudaStream_t *stream, CUDA_CPU_WHERE) {
    return cudaStreamCreateWithFlags(stream, 0, where);
}
// The operating system shares the cores out: a priority changes nothing.
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int,
                                                CUDA_CPU_WHERE) {
    return cudaStreamCreateWithFlags(stream, flags, where);
}
inline cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream, CUDA_CPU_WHERE) {
    using namespace cuda_cpu;
    if (cudaError_t error = check_handle(stream, where, "cudaStreamSynchronize")) return error;
    return synchronize(stream ? stream : current().default_stream);
}
namespace cuda_cpu {
inline void destroy(Stream *stream) {
    {
        Hidden hidden;
        std::lock_guard<std::mutex> guard(machine().lock);
        machine().handles.erase(stream);
    }
    synchronize(stream);
    auto &streams = stream->device->streams;
    {
        const Enqueuing one_at_a_time;
        Hidden hidden;
        for (size_t i = 0; i < streams.size(); i++)
            if (streams[i] == stream) streams.erase(streams.begin() + i);
    }
    {
        Hidden hidden;
        std::unique_lock<std::mutex> guard(stream->lock);
        stream->stopping = true;
        stream->pushed.notify_all();
        guard.unlock();
        stream->thread.join();
        delete stream;
    }
}
} // namespace cuda_cpu
inline cudaError_t cudaStreamDestroy(cudaStream_t stream, CUDA_CPU_WHERE) {
    using namespace cuda_cpu;
    if (!stream) return fail(cudaErrorInvalidResourceHandle);
    if (cudaError_t error = check_handle(stream, where, "cudaStreamDestroy")) return error;
    destroy(stream);
    return cudaSuccess;
}
inline cudaError_t cudaStreamQuery(cudaStream_t stream, CUDA_CPU_WHERE) {
    using namespace cuda_cpu;
    if (cudaError_t error = check_handle(stream, where, "cudaStreamQuery")) return error;
    if (!stream) stream = current().default_stream;
    if (stream->unfinished > 0) return cudaErrorNotReady;
    return synchronize(stream); // which orders what the host does next
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags, CUDA_CPU_WHERE) {
    using namespace cuda_cpu;
    if (!event) return no_result("cudaEventCreate", where);
    if (flags > (cudaEventBlockingSync | cudaEventDisableTiming))
        return fail(cudaErrorInvalidValue, where, "cudaEventCreateWithFlags: invalid flags %u",
                    flags);
    *event = new cudaEvent{&current(), !(flags & cudaEventDisableTiming), nullptr};
    Hidden hidden;
    std::lock_guard<std::mutex> guard(machine().lock);
    machine().handles[*event] = &current();
    return cudaSuccess;
}
inline cudaError_t cudaEventCreate(cudaEvent_t *event, unsigned flags = cudaEventDefault,
                                   CUDA_CPU_WHERE) {
    return cudaEventCreateWithFlags(event, flags, where);
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event, CUDA_CPU_WHERE) {
    using namespace cuda_cpu;
    if (cudaError_t error = check_handle(event, where, "cudaEventDestroy", false)) return error;
    Hidden hidden;
    std::lock_guard<std::mutex> guard(machine().lock);
    machine().handles.erase(event);
    delete event;
    return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr,
                                   CUDA_CPU_WHERE) {
    using namespace cuda_cpu;
    const char *call = "cudaEventRecord";
    if (cudaError_t error = check_handle(event, where, call, false)) return error;
    if (cudaError_t error = check_handle(stream, where, call)) return error;
    Hidden hidden;
    if (!stream) stream = current().default_stream;
    if (event->device != stream->device)
        return fail(cudaErrorInvalidResourceHandle, where,
                    "cudaEventRecord: the event belongs to device %d, the stream to device %d",
                    event->device->id, stream->device->id);
    const Enqueuing one_at_a_time;
    event->mark = mark(ordered(stream, *stream->device));
    return cudaSuccess;
}
// Waits for the event as it was last recorded; one that never was is no wait at all.
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0,
                                       CUDA_CPU_WHERE) {
    using namespace cuda_cpu;
    const char *call = "cudaStreamWaitEvent";
    if (flags)
        return fail(cudaErrorInvalidValue, where, "%s: flags are %u, but must be 0", call, flags);
    if (cudaError_t error = check_handle(event, where, call, false)) return error;
    if (cudaError_t error = check_handle(stream, where, call)) return error;
    if (!event->mark) return cudaSuccess;
    const Enqueuing one_at_a_time;
    Hidden hidden;
    stream = ordered(stream, stream ? *stream->device : current());
    wait(stream, event->mark);
    pushed(stream);
    return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event, CUDA_CPU_WHERE) {
    using namespace cuda_cpu;
    if (cudaError_t error = check_handle(event, where, "cudaEventSynchronize", false)) return error;
    if (event->mark) wait(*event->mark);
    return event->device->fault;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event, CUDA_CPU_WHERE) {
    using namespace cuda_cpu;
    if (cudaError_t error = check_handle(event, where, "cudaEventQuery", false)) return error;
    return !event->mark || is_reached(*event->mark) ? cudaSuccess : cudaErrorNotReady;
}
inline cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end,
                                        CUDA_CPU_WHERE) {
    using namespace cuda_cpu;
    if (!milliseconds) return no_result("cudaEventElapsedTime", where);
    for (cudaEvent_t event : {start, end})
        if (cudaError_t error = check_handle(event, where, "cudaEventElapsedTime", false))
            return error;
    if (start->device != end->device)
        return fail(cudaErrorInvalidResourceHandle, where,
                    "cudaEventElapsedTime: the start belongs to device %d and the end to device "
                    "%d, but both must be on one device",
                    start->device->id, end->device->id);
    if (!start->timing || !end->timing || !start->mark || !end->mark)
        return fail(cudaErrorInvalidResourceHandle);
    if (!is_reached(*start->mark) || !is_reached(*end->mark)) return cudaErrorNotReady;
    Hidden hidden;
    *milliseconds = (end->mark->seconds - start->mark->seconds) * 1e3;
    return cudaSuccess;
}

// The current device is as at the program's start: its memory is freed, its streams and events are
// no more, its variables have their first values, a kernel's fault is forgotten. Pinned and managed
// memory, which is no single device's, stays.
inline cudaError_t cudaDeviceReset(CUDA_CPU_WHERE) {
    using namespace cuda_cpu;
    Device &device = current();
    synchronize(device);
    while (device.streams.size() > 1) destroy(device.streams.back());
    Hidden hidden;
    std::vector<const char *> freed;
    {
        std::lock_guard<std::mutex> guard(machine().lock);
        for (auto i = machine().handles.begin(); i != machine().handles.end();)
            i = i->second == &device ? machine().handles.erase(i) : std::next(i);
        for (auto &[first, a] : device.allocations)
            if (a.live && !strncmp(a.by, "cudaMalloc", 10)) {
                a.live = false;
                a.freed = where;
                freed.push_back(first);
            }
        for (Symbol *symbol : machine().symbols)
            if (symbol->copies.count(device.id))
                memcpy(real(symbol->copies[device.id]), symbol->initial, symbol->bytes);
        device.more_shared.clear();
        device.peers.assign(device.peers.size(), false);
    }
    for (const char *first : freed) unmap(device, first);
    device.fault = last_error = cudaSuccess;
    return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------
// 9. Atomics, fences, intrinsics

namespace cuda_cpu {
// On a GPU an atomic function orders no other access: what a thread has written before it is seen
// by those that come after it only if __threadfence() stands in between. ThreadSanitizer is told
// just that; elsewhere nothing is gained by being weaker than the processor.
inline char fenced_on[64], fenced_system; // stand for that order, see published()
#ifdef CUDA_CPU_TSAN
constexpr int atomic_order = __ATOMIC_RELAXED;
#else
constexpr int atomic_order = __ATOMIC_ACQ_REL;
#endif

// *p = after(*p) as one step; returns what *p was before.
template <class T, class F> __attribute__((always_inline)) inline T atomic_update(T *p, F after) {
    T old, value;
    __atomic_load(p, &old, __ATOMIC_RELAXED);
    do value = after(old);
    while (!__atomic_compare_exchange(p, &old, &value, false, atomic_order, __ATOMIC_RELAXED));
    observed(&fenced_on[max(0, running.device)]);
    observed(&fenced_system);
    return old;
}
} // namespace cuda_cpu

#define CUDA_CPU_ATOMIC(name, T, after)                                                            \
    inline T name(T *p, T x) {                                                                     \
        return ::cuda_cpu::atomic_update(p, [x](T old) -> T { return after; });                    \
    }
// clang-format off
#define CUDA_CPU_ATOMICS(T)                                                                        \
    CUDA_CPU_ATOMIC(atomicExch, T, (void(old), x))                                                 \
    CUDA_CPU_ATOMIC(atomicMin, T, x < old ? x : old)                                               \
    CUDA_CPU_ATOMIC(atomicMax, T, old < x ? x : old)                                               \
    CUDA_CPU_ATOMIC(atomicAnd, T, old & x)                                                         \
    CUDA_CPU_ATOMIC(atomicOr, T, old | x)                                                          \
    CUDA_CPU_ATOMIC(atomicXor, T, old ^ x)                                                         \
    inline T atomicCAS(T *p, T compare, T x) {                                                     \
        return ::cuda_cpu::atomic_update(p, [=](T old) { return old == compare ? x : old; });      \
    }
// clang-format on
CUDA_CPU_ATOMICS(int)
CUDA_CPU_ATOMICS(unsigned)
CUDA_CPU_ATOMICS(unsigned long long)
CUDA_CPU_ATOMIC(atomicMin, long long, x < old ? x : old)
CUDA_CPU_ATOMIC(atomicMax, long long, old < x ? x : old)
CUDA_CPU_ATOMIC(atomicExch, float, (void(old), x))
CUDA_CPU_ATOMIC(atomicAdd, int, unsigned(old) + x)
CUDA_CPU_ATOMIC(atomicAdd, unsigned, old + x)
CUDA_CPU_ATOMIC(atomicAdd, unsigned long long, old + x)
CUDA_CPU_ATOMIC(atomicAdd, float, old + x)
CUDA_CPU_ATOMIC(atomicAdd, double, old + x)
CUDA_CPU_ATOMIC(atomicSub, int, unsigned(old) - x)
CUDA_CPU_ATOMIC(atomicSub, unsigned, old - x)
CUDA_CPU_ATOMIC(atomicInc, unsigned, old >= x ? 0 : old + 1)
CUDA_CPU_ATOMIC(atomicDec, unsigned, old == 0 || old > x ? x : old - 1)
#undef CUDA_CPU_ATOMICS
#undef CUDA_CPU_ATOMIC

namespace cuda_cpu {
inline void fence(char *order) {
#ifndef CUDA_CPU_TSAN
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
    published(order);
    observed(order);
}
} // namespace cuda_cpu
inline void __threadfence() {
    cuda_cpu::fence(&cuda_cpu::fenced_on[::max(0, cuda_cpu::running.device)]);
}
inline void __threadfence_block() { __threadfence(); }
inline void __threadfence_system() { cuda_cpu::fence(&cuda_cpu::fenced_system); }

template <class T> T __ldg(const T *p) { return *p; }

// A GPU's fast functions have a few bits less; here they are the exact ones.
#define __expf expf
#define __exp10f exp10f
#define __logf logf
#define __log2f log2f
#define __log10f log10f
#define __sinf sinf
#define __cosf cosf
#define __tanf tanf
#define __powf powf
#define __fmaf_rn fmaf
inline float __fdividef(float x, float y) { return x / y; }
inline float __saturatef(float x) { return x > 0 ? x < 1 ? x : 1 : 0; } // of NaN: 0
extern "C" { // as in C libraries that have them too
inline float rsqrtf(float x) noexcept { return 1 / sqrtf(x); }
inline double rsqrt(double x) noexcept { return 1 / sqrt(x); }
}
namespace cuda_cpu {
template <class To, class From> To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
} // namespace cuda_cpu
inline float __int_as_float(int x) { return cuda_cpu::bits_as<float>(x); }
inline float __uint_as_float(unsigned x) { return cuda_cpu::bits_as<float>(x); }
__forceinline__ unsigned __umulhi(unsigned a, unsigned b) {
    return (unsigned long long)a * b >> 32;
}
inline int __float_as_int(float x) { return cuda_cpu::bits_as<int>(x); }
inline unsigned __float_as_uint(float x) { return cuda_cpu::bits_as<unsigned>(x); }
inline double __longlong_as_double(long long x) { return cuda_cpu::bits_as<double>(x); }
inline long long __double_as_longlong(double x) { return cuda_cpu::bits_as<long long>(x); }

// Counts nanoseconds; clock() is the C library's.
inline long long clock64() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// An assert() that fails in a kernel ends the program and names the thread. In place of the C
// library's function, which the macro calls.
extern "C" __attribute__((noreturn, cold)) inline void
__assert_fail(const char *condition, const char *file, unsigned line,
              const char *function) noexcept {
    using namespace cuda_cpu;
    if (!worker || !running.name || in_host_function) {
        fprintf(stderr, "%s:%u: %s: assertion `%s' failed\n", file, line, function, condition);
        abort();
    }
    say_alone();
    fail(cudaErrorAssert, {file, (int)line, nullptr},
         "%s on device %d: block (%u,%u,%u), thread (%u,%u,%u): assertion `%s' failed",
         running.name, running.device, blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y,
         threadIdx.z, condition);
    _exit(1);
}

// ---------------------------------------------------------------------------------------------
// 10. What the stand-in lacks
// It is an error of the compiler's that says so. Headers that are lacking, and inline PTX, are
// found by extras/cpu/to_cpp.sed.

#if defined(__has_attribute)
#if __has_attribute(unavailable)
#define CUDA_CPU_LACKING __attribute__((unavailable("the stand-in lacks it")))
#define CUDA_CPU_LACKING_TYPE CUDA_CPU_LACKING
#endif
#endif
#ifndef CUDA_CPU_LACKING // g++ before 12: when it generates code; types stay incomplete
#define CUDA_CPU_LACKING __attribute__((error("the stand-in lacks it")))
#define CUDA_CPU_LACKING_TYPE
#endif
// clang-format off
#define CUDA_CPU_LACKS(name) template <class... A> CUDA_CPU_LACKING cudaError_t name(A &&...);
#define CUDA_CPU_LACKS_FETCH(name) template <class T, class... A> CUDA_CPU_LACKING T name(A &&...);
#define CUDA_CPU_LACKS_TYPE(name) struct CUDA_CPU_LACKING_TYPE name;

CUDA_CPU_LACKS(cudaGraphCreate) CUDA_CPU_LACKS(cudaGraphInstantiate) CUDA_CPU_LACKS(cudaGraphLaunch)
CUDA_CPU_LACKS(cudaStreamBeginCapture) CUDA_CPU_LACKS(cudaStreamEndCapture)
CUDA_CPU_LACKS_TYPE(cudaGraph_t) CUDA_CPU_LACKS_TYPE(cudaGraphExec_t)

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
CUDA_CPU_LACKS(cudaDeviceSetLimit)
CUDA_CPU_LACKS(cudaPointerGetAttributes) CUDA_CPU_LACKS(cudaHostGetDevicePointer)
CUDA_CPU_LACKS(cudaMallocFromPoolAsync) CUDA_CPU_LACKS(cudaMemPoolCreate)
CUDA_CPU_LACKS(cudaMemAdvise) CUDA_CPU_LACKS(cudaDeviceGetDefaultMemPool)
CUDA_CPU_LACKS_TYPE(cudaLaunchConfig_t) CUDA_CPU_LACKS_TYPE(cudaPointerAttributes)
CUDA_CPU_LACKS_TYPE(cudaMemPool_t)
CUDA_CPU_LACKS(cudaFuncGetAttributes) CUDA_CPU_LACKS(cudaFuncSetCacheConfig)
CUDA_CPU_LACKS(cudaSetDeviceFlags) CUDA_CPU_LACKS(cudaDeviceGetP2PAttribute)
CUDA_CPU_LACKS(cudaRuntimeGetVersion) CUDA_CPU_LACKS(cudaDriverGetVersion)
CUDA_CPU_LACKS_TYPE(cudaFuncAttributes)
CUDA_CPU_LACKS(__reduce_add_sync) CUDA_CPU_LACKS(__reduce_max_sync)
CUDA_CPU_LACKS(__reduce_min_sync) CUDA_CPU_LACKS(__match_any_sync)
CUDA_CPU_LACKS(__match_all_sync) CUDA_CPU_LACKS(__nanosleep) CUDA_CPU_LACKS(__trap)
CUDA_CPU_LACKS(atomicAdd_block) CUDA_CPU_LACKS(atomicAdd_system)
namespace cooperative_groups {
CUDA_CPU_LACKS_TYPE(thread_group) CUDA_CPU_LACKS_TYPE(grid_group)
CUDA_CPU_LACKS_TYPE(cluster_group) CUDA_CPU_LACKS_TYPE(coalesced_group)
CUDA_CPU_LACKS(this_grid) CUDA_CPU_LACKS(this_cluster) CUDA_CPU_LACKS(coalesced_threads)
}
// clang-format on
#undef CUDA_CPU_LACKS
#undef CUDA_CPU_LACKS_FETCH
#undef CUDA_CPU_LACKS_TYPE

#define __managed__ static_assert(false, "__managed__: the stand-in lacks it");
#define CUDA_CPU_LACKS_ASSEMBLY static_assert(false, "inline PTX: the stand-in lacks it");
#define CUDA_CPU_NOT_UNDERSTOOD                                                                    \
    static_assert(false,                                                                           \
                  "declare one __device__ or __constant__ variable per line, of a type that has "  \
                  "a name: extras/cpu/to_cpp.sed understands nothing else");
#endif // CUDA_CPU
