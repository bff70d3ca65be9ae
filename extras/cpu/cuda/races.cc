// Races: what ThreadSanitizer is told of who enqueued what, and its reports as one line each.
#include "checks.h"
#include "machine.h"
#include "workers.h"

#ifdef CUDA_CPU_TSAN
#include <unistd.h>

#include <set>

#include <sanitizer/common_interface_defs.h>
#include <unwind.h>
extern "C" void __tsan_func_entry(void *pc);
extern "C" void __tsan_func_exit();
extern "C" void __tsan_read_range(void *p, unsigned long bytes);
extern "C" void __tsan_write_range(void *p, unsigned long bytes);
extern "C" void __tsan_on_report(void *report); // called when one is printed
extern "C" int __tsan_get_report_data(void *report, const char **description, int *count,
                                      int *stack_count, int *mop_count, int *loc_count,
                                      int *mutex_count, int *thread_count, int *unique_tid_count,
                                      void **sleep_trace, unsigned long trace_size);
extern "C" int __tsan_get_report_mop(void *report, unsigned long i, int *tid, void **address,
                                     int *size, int *write, int *atomic, void **trace,
                                     unsigned long trace_size);
extern "C" void __sanitizer_symbolize_pc(void *pc, const char *format, char *text, size_t size);

namespace cuda_cpu {

// --- callers

void note_callers(Running &r) {
    Hidden hidden;
    void *frames[32], *const function = _Unwind_FindEnclosingFunction(r.where.pc);
    const int n = call_stack(frames, 32);
    int first = 0;
    while (first < n && _Unwind_FindEnclosingFunction((char *)frames[first] - 1) != function)
        first++;
    for (int i = 0; i < 8 && first + 1 + i < n; i++) r.callers[i] = frames[first + 1 + i];
}
void enter_callers() {
    if (!running.where.pc) return;
    for (int i = 7; i >= 0; i--)
        if (running.callers[i]) __tsan_func_entry(running.callers[i]);
    __tsan_func_entry(running.where.pc);
}
void leave_callers() {
    if (!running.where.pc) return;
    __tsan_func_exit();
    for (void *caller : running.callers)
        if (caller) __tsan_func_exit();
}

// --- volatile memory

// To a GPU a volatile access is one that nothing tears, so that threads may poll a flag, and that
// orders no other. As with an atomic function, what a thread has written before is seen only if
// __threadfence() stands in between. (The host has no such fence. In shared memory volatile is no
// help to other warps.) These are called just before the access.
static void *polled[256]; // what each thread of the operating system has read last
CUDA_CPU_UNSEEN static void *&polled_by_me() {
    static int threads;
    thread_local void *&mine = polled[__atomic_fetch_add(&threads, 1, __ATOMIC_RELAXED) % 256];
    return mine;
}
template <class T> static void read_volatile(T *p) {
    __atomic_store_n(&polled_by_me(), p, __ATOMIC_RELAXED);
    __atomic_load_n(p, __ATOMIC_RELAXED);
    observed(&fenced_system);
    if (worker) observed(&fenced_on[running.device]);
}
template <class T> static void write_volatile(T *p) {
    if (!worker) published(&fenced_system);
    __atomic_fetch_or(p, T(0), __ATOMIC_RELAXED);
    // Who polls may have observed before the fence, and not yet read: let it find the old value,
    // and come again
    for (void *&at : polled) {
        void *expected = p;
        if (&at == &polled_by_me() ||
            !__atomic_compare_exchange_n(&at, &expected, nullptr, false, __ATOMIC_RELAXED,
                                         __ATOMIC_RELAXED))
            continue;
        for (int ms = 0; ms < 20 && !__atomic_load_n(&at, __ATOMIC_RELAXED); ms++) usleep(1000);
    }
}
template <class T> static void access_volatile(T *p, bool writes) {
    const bool in_one_step = sizeof(T) <= 8 && shared_name(p).empty();
    if (!in_one_step) writes ? __tsan_write_range(p, sizeof(T)) : __tsan_read_range(p, sizeof(T));
    else writes ? write_volatile(p) : read_volatile(p);
}
} // namespace cuda_cpu
#define CUDA_CPU_VOLATILE(name, T)                                                                 \
    extern "C" void __tsan_##name(void *p) {                                                       \
        cuda_cpu::access_volatile((T *)p, strstr(#name, "write"));                                 \
    }
#define CUDA_CPU_VOLATILES(bytes, T)                                                               \
    CUDA_CPU_VOLATILE(volatile_read##bytes, T)                                                     \
    CUDA_CPU_VOLATILE(volatile_write##bytes, T)                                                    \
    CUDA_CPU_VOLATILE(unaligned_volatile_read##bytes, T)                                           \
    CUDA_CPU_VOLATILE(unaligned_volatile_write##bytes, T)
CUDA_CPU_VOLATILES(1, unsigned char)
CUDA_CPU_VOLATILES(2, unsigned short)
CUDA_CPU_VOLATILES(4, unsigned)
CUDA_CPU_VOLATILES(8, unsigned long)
CUDA_CPU_VOLATILES(16, unsigned __int128)
namespace cuda_cpu {

// --- reports

// ThreadSanitizer has printed a report, of many lines; this says it in one: whose memory it is, the
// two operations, and the lines that have enqueued them. A pair of lines is reported once.
struct Frame {
    std::string function, line;
};
// Split a stack into the program's own frames, innermost first: those that run, and those that
// enqueued them. `what` becomes the name of an operation that is not a kernel.
static void own_frames(void **stack, int n, std::vector<Frame> (&frames)[2], std::string &what) {
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
            // A lambda's frame has no name of its own, but std::function's around it have
            auto is_in = [&](const char *name) { return function.find(name) != std::string::npos; };
            if (!enqueued && what.empty())
                what = is_in("cudaMemcpyPeer")   ? "a message"
                       : is_in("cuda_cpu::Copy") ? "a copy"
                       : is_in("set_async")      ? "a memset"
                                                 : "";
            if (function.find("cuda_cpu::here") == 0) enqueued = 1;
            if (length && !strncmp(line, folder, length) && line[length] == '/') line += length + 1;
            if (strchr("<?", *line) || !is_own(line) || strstr(line, "sanitizer")) continue;
            frames[enqueued].push_back({function.substr(0, function.find_first_of("(<")), line});
        }
    }
}
// "add_ enqueued at mgpu.cu:860": in an allreduce where there is one, not in the tool that it calls
static std::string raced(void **stack, int n, std::string &inside) {
    std::vector<Frame> frames[2];
    std::string what;
    own_frames(stack, n, frames, what);
    const std::vector<Frame> &inner = frames[0], &outer = frames[1];
    if (!inner.empty()) what = inner[0].function, inside = inner[0].line; // a kernel, or the host
    if (!n || !stack[0]) return "an earlier access, whose line ThreadSanitizer has forgotten";
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
    int stacks, mops, more[6], size, write, atomic, atomics = 0;
    __tsan_get_report_data(report, &description, &more[0], &stacks, &mops, &more[1], &more[2],
                           &more[3], &more[4], sleep, 1);
    Hidden hidden;
    std::string two[2], inside[2];
    for (int i = 0; i < mops && i < 2; i++) {
        memset(stack, 0, sizeof stack);
        __tsan_get_report_mop(report, i, &more[5], &address, &size, &write, &atomic, stack, 64);
        two[i] = raced(stack, 64, inside[i]);
        atomics += atomic;
    }
    static std::set<std::string> said;
    const bool swapped = two[0] < two[1];
    if (mops < 2 || !said.insert(two[swapped] + two[!swapped]).second) return;
    const Device *owner = owner_of(address);
    const std::string shared = shared_name(address);
    const std::string where = !shared.empty()
                                  ? shared + " of gpu(" + std::to_string(running.device) + ")"
                              : owner ? "gpu(" + std::to_string(owner->id) + ")"
                                      : "the host";
    const bool one_kernel = two[0] == two[1] && !inside[0].empty(),
               one_line = inside[0] == inside[1];
    const std::string between =
        one_line ? "threads in " + inside[0] : "its lines " + inside[1] + " and " + inside[0];
    if (one_kernel)
        fprintf(stderr, "race on %s: %s, between %s: is %s?\n", where.c_str(), two[0].c_str(),
                between.c_str(),
                atomics    ? "an atomic function missing, or volatile for a first guess"
                : one_line ? "__syncthreads() missing, an atomicAdd, or an index that only one "
                             "thread uses"
                           : "__syncthreads() missing");
    else
        fprintf(stderr, "race on %s: %s and %s: is a wait missing?\n", where.c_str(),
                two[1].c_str(), two[0].c_str());
}
#endif
