// Blocks: the stacks of their threads, their shared memory, and the workers that run them.
#include "workers.h"
#include "checks.h"
#include "queues.h"

#include <atomic>
#include <csignal>
#include <cstdarg>

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace cuda_cpu {

void diverged(int t, Barrier at, int other, Barrier there) {
    const uint3 a = thread_index(t), b = thread_index(other);
    fail(cudaErrorLaunchFailure, {at.file, at.line, nullptr},
         "%s on device %d: divergent barrier in block (%u,%u,%u): thread (%u,%u,%u) waits at a "
         "barrier, but thread (%u,%u,%u) waits at %s in %s:%d",
         running.name, running.device, blockIdx.x, blockIdx.y, blockIdx.z, a.x, a.y, a.z, b.x, b.y,
         b.z, at.line == there.line ? "another barrier" : "the barrier", there.file, there.line);
    worker->failed = true;
}

// Run the kernel on a new stack, for the thread whose turn it is.
static __attribute__((no_sanitize("thread"))) CUDA_CPU_OPTIMIZED void fiber_main() {
    Worker &w = *worker;
#ifdef CUDA_CPU_ASAN
    const bool scheduled = w.current == 0 || !w.met_barrier || w.mode == by_lanes;
    const void **bottom = scheduled ? &w.scheduler.bottom : nullptr;
    size_t *size = bottom ? &w.scheduler.size : nullptr;
    __sanitizer_finish_switch_fiber(nullptr, bottom, size);
#endif
    observed(&w.begin);
    const int t = w.current;
    Thread me = {thread_index(t), t, false};
    thread = &me;
    enter_callers();
    try {
        w.run(w.kernel, false);
    } catch (...) {
        uncaught();
    }
    leave_callers();
    published(&w.end);
    Fiber *next = &w.scheduler;
    if (w.mode == in_turns && t > 0 && w.met_barrier && !w.thread0_ended)
        start_lanes(w, 0); // thread 0 waits at a barrier that this thread will not meet
    if (w.mode == by_lanes) {
        lane_ended(w, t);
        next = &after_lane(w);
    } else if (w.met_barrier) {
        if (t == 0) w.thread0_ended = true;
        if (t + 1 < w.threads) {
            w.current = t + 1;
            next = &w.fibers[t + 1];
        }
    }
    switch_fiber(w.fibers[t], *next, true);
    __builtin_unreachable();
}

CUDA_CPU_OPTIMIZED void prepare(Worker &w, int t) {
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
static std::atomic<int> guarded_stacks{0};

void grow_fibers(Worker &w, int threads) {
    Hidden hidden;
    const int more = threads - (int)w.lists->fibers.size();
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
        w.lists->fibers.emplace_back();
        w.lists->fibers.back().stack = p + page + i * stride;
        if (i == 0 || guard_each) failed = mprotect(p + i * stride, page, PROT_NONE);
#ifdef CUDA_CPU_TSAN
        w.lists->fibers.back().tsan = __tsan_create_fiber(0);
#endif
    }
    if (failed)
        give_up("no memory for the stacks of %d threads of %s: raise ulimit -v, or set "
                "CUDA_CPU_CORES=1",
                threads, running.name);
    w.fibers = w.lists->fibers.data();
    w.lists->stacks.push_back({p, bytes, guard_each ? more : 0});
#ifdef CUDA_CPU_TSAN
    w.scheduler.tsan = __tsan_get_current_fiber();
#endif
}

CUDA_CPU_UNSEEN __attribute__((flatten)) void first_barrier(Worker &w) {
    w.met_barrier = true;
    if ((int)w.lists->fibers.size() < w.threads) grow_fibers(w, w.threads);
    for (int i = 1; i < w.threads; i++) prepare(w, i);
}

bool below_stack(const void *pointer) {
    if (!worker) return false;
    for (const Stacks &stacks : worker->lists->stacks) {
        const size_t offset = (const char *)pointer - stacks.pages;
        const size_t stride = stacks.guarded ? stack_bytes + page_size() : stacks.bytes;
        if (offset < stacks.bytes && offset % stride < page_size()) return true;
    }
    return false;
}

// --- shared memory

std::vector<SharedArray> &shared_arrays() {
    static auto *arrays = new std::vector<SharedArray>; // as the machine: never destroyed
    return *arrays;
}
__attribute__((no_sanitize("address"), no_sanitize("thread"))) std::string
shared_name(const void *pointer) {
    const char *p = (const char *)pointer;
    if (!worker) return "";
    if (size_t(p - worker->dynamic_shared) < worker->dynamic_bytes) return "dynamic shared memory";
    for (const SharedArray &a : shared_arrays())
        if (size_t(p - worker->shared - a.offset) < a.bytes)
            return std::string("shared memory (") + a.name + ")";
    return "";
}
// Reserve a place in the arena, with a gap behind it. The gap is as long as a row, t[i] of t[8][9],
// up to a limit, because programs often access one row too many.
SharedPlace reserve_shared(const char *text, const char *name, const char *file, int line,
                           size_t bytes, size_t row) {
    const size_t offset = shared_arena_bytes(), number = shared_arrays().size();
    const size_t gap = min(round_up(row, shared_gap), 8 * shared_gap);
    const size_t end = offset + round_up(bytes, shared_gap) + gap;
    shared_arrays().push_back({text, name, file, line, offset, bytes, end});
    return {offset, number};
}
void fill_shared(Worker &w, char *p, size_t bytes, size_t number) {
    if (w.lists->filled_by[number] == w.blocks) return;
    size_t fixed = 0;
    {
        Hidden hidden;
        w.lists->filled_by[number] = w.blocks;
        w.lists->filled.push_back(number);
        fill_unwritten(p, bytes);
        for (unsigned i : w.lists->filled) fixed += shared_arrays()[i].bytes;
        if (!too_much_shared(fixed, w.dynamic_bytes, w.dynamic_allowed)) return;
    }
    char text[200];
    snprintf(text, sizeof text,
             "the kernel has %zu bytes of static and %zu of dynamic shared memory, but a block has "
             "at most %zu",
             fixed, w.dynamic_bytes, usual_shared_bytes);
    give_up_block(cudaErrorInvalidConfiguration, running.where, text);
}

#ifndef CUDA_CPU_ASAN
// Return the first byte of the gap [begin, end) that has been overwritten, or null.
static CUDA_CPU_OPTIMIZED __attribute__((no_sanitize("thread"))) char *first_changed(char *begin,
                                                                                     char *end) {
    Hidden hidden;
    static const std::vector<unsigned> gap(10 * shared_gap / sizeof unwritten, unwritten);
    const char *same = (const char *)gap.data() + (uintptr_t)begin % sizeof unwritten;
    if (!memcmp(begin, same, end - begin)) return nullptr;
    while (*begin == *same) begin++, same++;
    return begin;
}
// Report that the block has written to a gap, and give the block up.
static __attribute__((noinline, cold, no_sanitize("thread"), format(printf, 2, 3))) void
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
void check_gaps(Worker &w) {
    for (unsigned i : w.lists->filled) {
        const SharedArray *a = &shared_arrays()[i];
        char *p = w.shared + a->offset, *end = w.shared + a->end;
        char *at = first_changed(p + a->bytes, end);
        if (!at) at = first_changed(p - shared_gap, p);
        if (!at) continue;
        wrote_to_gap(w, "byte %td of the %zu bytes of %s, which %s:%d declares __shared__", at - p,
                     a->bytes, a->name, a->file, a->line);
        fill_unwritten(p + a->bytes, end - p - a->bytes);
        fill_unwritten(p - shared_gap, shared_gap);
        return;
    }
    if (!w.dynamic_bytes) return;
    char *p = w.dynamic_shared, *at = first_changed(p + w.dynamic_bytes, w.dynamic_end);
    if (!at) at = first_changed(p - shared_gap, p);
    if (at)
        wrote_to_gap(w,
                     "byte %td of dynamic shared memory, but the launch asked for %zu bytes (the "
                     "third value between <<< and >>>)",
                     at - p, w.dynamic_bytes);
}
#else
void check_gaps(Worker &) {}
#endif
bool in_dynamic_shared(const void *pointer, ptrdiff_t &offset, size_t &bytes) {
    const char *p = (const char *)pointer;
    if (!worker || p < worker->dynamic_end || p >= worker->dynamic_end + dynamic_guard)
        return false;
    offset = p - worker->dynamic_shared;
    bytes = worker->dynamic_bytes;
    return true;
}

// --- workers

// Prepare a thread of the operating system to run blocks and to report their faults.
void start_worker() {
    sigset_t all; // signals are for the host thread
    sigfillset(&all);
    for (int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGVTALRM}) sigdelset(&all, own);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    worker = new Worker;
    worker->lists = new Lists;
    const size_t bytes = shared_arena_bytes();
    worker->shared = (char *)aligned_alloc(shared_gap, bytes);
    worker->lists->filled_by.resize(shared_arrays().size());
    void *dynamic = mmap(nullptr, dynamic_room + dynamic_guard, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!worker->shared || dynamic == MAP_FAILED ||
        mprotect(dynamic, dynamic_room, PROT_READ | PROT_WRITE))
        throw std::bad_alloc();
    worker->dynamic_end = (char *)dynamic + dynamic_room;
    fill_unwritten(worker->shared, bytes);
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

void stop_worker() {
    if (worker->timer >= 0) syscall(SYS_timer_delete, worker->timer);
    delete_warps(worker->warps);
#ifdef CUDA_CPU_TSAN
    for (Fiber &fiber : worker->lists->fibers) __tsan_destroy_fiber(fiber.tsan);
#endif
    for (const Stacks &stacks : worker->lists->stacks) {
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
    delete worker->lists;
    delete worker;
    worker = nullptr;
#if !defined(CUDA_CPU_ASAN) && !defined(CUDA_CPU_TSAN)
    stack_t stack = {}, none = {};
    none.ss_flags = SS_DISABLE;
    if (sigaltstack(&none, &stack) == 0) free(stack.ss_sp);
#endif
}

} // namespace cuda_cpu
