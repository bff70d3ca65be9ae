// Blocks: the threads of a block, their barriers and their shared memory.
//
// One core runs all threads of a block. Thread 0 runs on a stack of its own. If it ends without
// having met a barrier, the kernel has none, and the other threads run one after another in a plain
// loop, into which the compiler inlines the kernel. If it meets one, every other thread gets a
// stack too, and at each barrier thread t hands over to thread t+1, the last one back to thread 0.
// From the first warp function that a thread of the block meets, or the first barrier that some
// threads do not meet because they have ended, warps.cc chooses the next thread.
#pragma once

#include "errors.h"

#ifdef CUDA_CPU_ASAN
#include <sanitizer/asan_interface.h>
#endif
#if defined(CUDA_CPU_ASAN) || defined(CUDA_CPU_TSAN)
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__) || defined(CUDA_CPU_PORTABLE)
#undef CUDA_CPU_PORTABLE
#define CUDA_CPU_PORTABLE 1
#include <setjmp.h>
#include <ucontext.h>
#endif

// __COUNTER__ gives each barrier a number, because several may stand on one line.
#define __syncthreads() ::cuda_cpu::barrier(__FILE__, __LINE__, __COUNTER__)

namespace cuda_cpu {

#if defined(CUDA_CPU_ASAN) || defined(CUDA_CPU_TSAN)
constexpr size_t stack_bytes = 256 * 1024; // of a thread of a block
#else
constexpr size_t stack_bytes = 128 * 1024; // arguments of 32 KiB may be there three times
#endif

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

// Who runs after a thread of a block: the next one, in the plain loop, or when this one has met a
// barrier or ended; or a lane that next_lane() chooses.
enum Mode { in_loop, in_turns, by_lanes };
struct Warp;
struct Lists; // what has no fixed size: in workers.h, since <vector> would bring names of std

// Who was last at an element of memory that is declared volatile; see touch_volatile().
struct Touch {
    unsigned long long block = 0; // by Worker::blocks
    unsigned phase = 0;           // barriers of the block before it
    unsigned calls = 0;           // of warp functions by the lane before it
    int thread = -1;
    const volatile void *at = nullptr;
    size_t bytes = 0;
    unsigned long long value = 0; // before the thread may have written
};
struct Worker {
    Lists *lists = nullptr;
    char *shared = nullptr;         // arrays of a fixed size
    Touch last_touch, conflict;     // conflict: the last write that another lane was at
    char *dynamic_end = nullptr;    // of the block's dynamic shared memory; no access beyond it
    char *dynamic_shared = nullptr; // where that begins
    size_t dynamic_bytes = 0, dynamic_allowed = 0; // allowed: by cudaFuncSetAttribute
    int timer = -1;          // of the watchdog
    Fiber *fibers = nullptr; // for thread 0; from a block's first barrier on for all its threads
    Fiber scheduler;         // the stack of the operating system's thread
    // The block that is running:
    void (*run)(const void *, bool) = nullptr;
    const void *kernel = nullptr;
    int threads = 0;
    int current = 0; // the thread that runs; in_loop only that it is not 0: see current_thread()
    Mode mode = in_loop;
    bool met_barrier = false, thread0_ended = false, failed = false;
    cudaError_t error = cudaErrorLaunchFailure; // if it has failed
    unsigned phase = 0;         // barriers that thread 0 has met; by_lanes: that the block has left
    const char *file = nullptr; // where thread 0 met the last one
    int line = 0, number = 0;
    int count[2] = {};             // of __syncthreads_count(), by the phase's parity
    unsigned long long blocks = 0; // that have begun
    // by_lanes:
    Warp *warps = nullptr;
    int warp = 0;      // the one whose turn it is
    unsigned todo = 0; // its lanes that have yet to run in this round
    int looped = -1;   // the thread that the plain loop runs, on no fiber
    unsigned long long random = 0;
    unsigned long long asker = 0; // block and thread that has looked at flags, and found as before
    int times = 0;                // that it has
    bool yields = false;          // lets other warps run, too
    char begin = 0, end = 0, barrier[2] = {}; // addresses that stand for an order, see published()
};
inline __thread Worker *worker = nullptr;
inline int current_thread(const Worker &w) {
    return w.mode == in_loop ? thread->number : w.current;
}

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

// Functions that switch fibers are inlined for speed, but hidden from ThreadSanitizer.
#ifdef CUDA_CPU_TSAN
#define CUDA_CPU_SWITCHING __attribute__((noinline, no_sanitize("thread")))
#else
#define CUDA_CPU_SWITCHING __attribute__((always_inline))
#endif
// Functions that switch no fiber need only be hidden from the sanitizer.
#define CUDA_CPU_UNSEEN CUDA_CPU_OPTIMIZED __attribute__((noinline, no_sanitize("thread")))
// A sanitizer must be told which stack a switch leaves. That is simple if every switch to a lane
// starts from the scheduler's stack, so under a sanitizer it does.
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

// Return thread number t of the block as an index.
CUDA_CPU_OPTIMIZED inline uint3 thread_index(int t) {
    const unsigned x = blockDim.x, y = blockDim.y;
    if ((unsigned)t < x) return {(unsigned)t, 0, 0}; // divisions are slow
    return {t % x, t / x % y, t / (x * y)};
}

// Report that two threads wait at different barriers, thread `t` at `at` and thread `other` at
// `there`, and give the block up.
struct Barrier {
    const char *file;
    int line;
};
__attribute__((noinline, cold, no_sanitize("thread"))) void diverged(int t, Barrier at, int other,
                                                                     Barrier there);
// What barrier() does for thread 0 of a block at its first barrier: every thread gets a stack.
CUDA_CPU_UNSEEN void first_barrier(Worker &w);
// What barrier() does where threads do not take turns.
__attribute__((cold, no_sanitize("thread"))) void wait_for_block(const char *file, int line,
                                                                 int number);
// Return whether the threads before this one have ended, and so never meet this barrier.
CUDA_CPU_OPTIMIZED inline bool others_have_ended(const Worker &w) {
    return w.mode == in_loop ||
           (w.mode == in_turns && w.current > 0 && (w.thread0_ended || !w.met_barrier));
}

// __syncthreads(): hand over to the next thread, and come back when all that have not ended have
// met the barrier.
CUDA_CPU_SWITCHING inline void barrier(const char *file, int line, int number = -1) {
    Worker &w = *worker;
    const int t = w.current;
    if (w.mode != in_turns) return wait_for_block(file, line, number);
    if (t == 0) {
        if (!w.met_barrier) first_barrier(w);
        w.phase++;
        w.file = file;
        w.line = line;
        w.number = number;
    } else if (w.thread0_ended || !w.met_barrier) {
        return wait_for_block(file, line, number);
    } else if (line != w.line || number != w.number) {
        diverged(t, {file, line}, 0, {w.file, w.line});
        switch_fiber(w.fibers[t], w.scheduler, true);
    }
    if (w.threads == 1) return;
    const int next = t + 1 == w.threads ? 0 : t + 1;
    const unsigned parity = w.phase % 2;
    published(&w.barrier[parity]);
    w.current = next;
    Thread *const me = thread;
    switch_fiber(w.fibers[t], w.fibers[next]);
    thread = me;
    observed(&worker->barrier[parity]);
}

// The function that a type belongs to, such as "... [with Tag = sum(int*)::t_shared]". clang++ does
// not name it.
template <class Tag> const char *text_of() { return __PRETTY_FUNCTION__; }

// See __launch_bounds__. Where a kernel begins with CUDA_CPU_LAUNCH_BOUNDS, its launch is refused.
CUDA_CPU_UNSEEN void too_many_threads(int most);
__forceinline__ void launch_bounds(int most) {
    if (__builtin_expect(worker->threads > most, false)) too_many_threads(most);
}
bool note_bounds(const char *text, const char *file, int most);
template <class Tag>
inline const bool bounds_noted = note_bounds(text_of<Tag>(), Tag::file(), Tag::most());
template <class Tag> __forceinline__ void launch_bounds() {
    (void)&bounds_noted<Tag>;
    launch_bounds(Tag::most());
}
#define CUDA_CPU_LAUNCH_BOUNDS(threads)                                                            \
    struct cuda_cpu_bounds {                                                                       \
        static const char *file() { return __FILE__; }                                             \
        static int most() { return threads; }                                                      \
    };                                                                                             \
    ::cuda_cpu::launch_bounds<cuda_cpu_bounds>()
// A thread has looked at a flag and found what was there before. If it goes on and on, at this one
// or at several, it waits for another thread, and the others have their turns.
CUDA_CPU_UNSEEN void asked_again();

// --- shared memory

// Each __shared__ array has a fixed place in a worker's memory. Tag is a type of its own for each
// declaration, and knows its name and line.
struct SharedPlace {
    size_t offset, number;
};
SharedPlace reserve_shared(const char *text, const char *name, const char *file, int line,
                           size_t bytes, size_t row);
template <class T, class Tag>
inline const SharedPlace shared_place =
    reserve_shared(text_of<Tag>(), Tag::name(), Tag::file(), Tag::line(), sizeof(T),
                   sizeof(std::remove_extent_t<T>));
// Fill a shared array as unwritten memory, unless a thread of this block has already.
__attribute__((noinline, no_sanitize("address"), no_sanitize("thread"))) void
fill_shared(Worker &w, char *p, size_t bytes, size_t number);

// Lanes that hand values on through memory, with nothing between the one's write and the
// other's read, were right on GPUs up to 2016, if the memory was declared volatile: the lanes of a
// warp ran in lockstep. Since Volta (SM 70) CUDA no longer promises that, and __syncwarp() must
// come in between. Here they do not run in lockstep, so the numbers are wrong, and the user is
// told why. extras/cpu/to_cpp.sed declares a volatile T * as a Volatile<T>, which notes the lanes
// that look up an element. A write in between is seen by the changed value. A single element, such
// as a flag that many lanes set, is not reported.
CUDA_CPU_UNSEEN void touch_volatile(const volatile void *p, size_t bytes);
template <class T> struct Volatile {
    T *p;
    Volatile(T *p) : p(p) {}
    __forceinline__ T &touched(T *at) const {
        if (std::is_volatile<T>::value && worker) touch_volatile(at, sizeof *at);
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
template <class T> struct VolatileNumber { // such as a flag
    T number;
    operator T &() { return *Volatile<T>(&number); }
    template <class U> U operator=(U x) { return number = x, x; }
};
template <class T>
using Watched =
    std::conditional_t<std::is_volatile<T>::value && std::is_integral<T>::value, VolatileNumber<T>,
                       std::conditional_t<std::rank<T>::value == 1 &&
                                              std::is_volatile<std::remove_all_extents_t<T>>::value,
                                          VolatileArray<T>, T>>;

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
// An extern __shared__ array: what the launch asked for.
template <class T> T *dynamic_shared() { return (T *)worker->dynamic_shared; }
// A __shared__ variable that is declared outside of all functions: of an array, x[i] and x are as
// in a kernel; any other one is *x.
template <class T, class Tag = void> struct SharedOfFile {
    auto &operator*() const {
        if constexpr (std::is_void<Tag>::value) return *dynamic_shared<T>();
        else return shared_memory<T, Tag>();
    }
};
template <class T, size_t n, class Tag> struct SharedOfFile<T[n], Tag> {
    auto &operator[](size_t i) const { return shared_memory<T[n], Tag>()[i]; }
    operator auto *() const { return &shared_memory<T[n], Tag>()[0]; }
};
template <class T> struct SharedOfFile<T[], void> {
    T &operator[](size_t i) const { return dynamic_shared<T>()[i]; }
    operator T *() const { return dynamic_shared<T>(); }
};

} // namespace cuda_cpu
