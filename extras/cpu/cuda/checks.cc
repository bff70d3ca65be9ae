// Checks: a fault is told with its line, a block or a host function without end is reported once.
#include "checks.h"
#include "machine.h"
#include "queues.h"
#include "workers.h"

#include <atomic>
#include <cstdarg>
#include <set>

#include <cxxabi.h>
#include <dlfcn.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>
#include <unwind.h>

#ifndef sigev_notify_thread_id // musl and newer versions of glibc have this name
#define sigev_notify_thread_id _sigev_un._tid
#endif

namespace cuda_cpu {

// --- lines of the program

extern "C" char __executable_start;

static bool is_stand_in(const char *file) {
    return strstr(file, std::string(__FILE__, sizeof __FILE__ - sizeof "checks.cc").c_str());
}
bool is_own(const char *file) {
    if (is_stand_in(file)) return false;
    for (const char *tool : {"watch/watch.h", "check/reference.h"})
        if (strstr(file, tool)) return false;
    return strncmp(file, "/usr/", 5);
}

static char host_is_in[200]; // what nvtxMarkA has named, until the range ends: an allreduce

std::string line_of(void **frames, int n, void *interrupted, bool exact, bool *in_library) {
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
        if (!is_own(line) && !is_stand_in(line) && library.empty()) library = where;
        if (!is_own(line)) continue;
        if ((in_allreduce = strstr(function, "run_allreduce"))) break;
        if (first.empty()) first = where;
        last = where;
        if (!*host_is_in) break;
    }
    pclose(lines);
    if (in_library) *in_library = !library.empty();
    if (first.empty()) return library;
    return in_allreduce && last != first ? last + ", in " + first : first;
}

void *interrupted(void *context) {
#if defined(__x86_64__)
    return (void *)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
#elif defined(__aarch64__)
    return (void *)((ucontext_t *)context)->uc_mcontext.pc;
#else
    return nullptr;
#endif
}
int call_stack(void **frames, int most) {
    struct Stack {
        void **frames;
        int n, most;
    } stack = {frames, 0, most};
    auto add = [](_Unwind_Context *context, void *to) {
        Stack &s = *(Stack *)to;
        if (s.n == s.most) return _URC_END_OF_STACK;
        s.frames[s.n++] = (void *)_Unwind_GetIP(context);
        return _URC_NO_REASON;
    };
    _Unwind_Backtrace(add, &stack);
    return stack.n;
}
std::string interrupted_line(void *context, bool *in_library) {
    void *frames[64];
    const int n = call_stack(frames, 64);
    return line_of(frames, n, interrupted(context), true, in_library);
}

// --- faults

// What is or was allocated there, for the fault handler: "byte 8 of the 40 bytes that FILE:LINE
// allocated", and how to get there, if the program may.
static std::string allocated_there(const Place &at, const void *p) {
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
                            "only pointers that are arguments or members of arguments, or that "
                            "cudaMemcpy or cudaMemcpyToSymbol copies as pointers or in structs"
                          : ": copy it with cudaMemcpy");
}

// What the program did there, in words.
static void fault_words(char (&what)[600], const void *p, const Place &at, const Symbol *symbol,
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
        snprintf(
            what, sizeof what,
            "an integer is divided by zero (a GPU would go on with a meaningless number), or the "
            "least one by -1 (a GPU: the least one, and no rest)");
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

// Print the line in which the host crashed or aborted, if it can be found. The C++ library aborts
// where an index is out of range.
static bool assertion_is_told = false;
static void say_where_host_stopped(int signal, const void *p, void *context) {
    char what[300];
    bool in_library = false;
    if (assertion_is_told) return;
    alarm(10); // the heap may be in any state: no message is better than one that never comes
    const std::string line = interrupted_line(context, &in_library);
    if (signal == SIGABRT)
        snprintf(what, sizeof what, "aborts%s",
                 abi::__cxa_current_exception_type() ? ": nobody catches the exception"
                 : in_library                        ? ": is an index out of range?"
                                                     : "");
    else if (signal == SIGFPE) snprintf(what, sizeof what, "divides by zero");
    else
        snprintf(
            what, sizeof what,
            "accesses %s: is an index out of range, a pointer null, or is there endless recursion?",
            p ? "memory that is not there" : "address 0");
    if (!line.empty()) fprintf(stderr, "%s: the host %s\n", line.c_str(), what);
}

static __thread siginfo_t *without_line = nullptr;
void on_fault(int signal, siginfo_t *info, void *context) {
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
    end_program();
}

// --- what takes too long

// The host, in what nvtxMarkA has named: it has taken too long, or somebody else asks where it is.
// In a library malloc may be at work, which finding the line needs: a little later the host is back
// in its own code, or it waits there for good, after which nothing is at work.
static __thread int host_timer = -1;
static void set_watchdog(int timer, double seconds) { // of processor time, repeated; 0: never
    itimerspec every = {};
    every.it_value.tv_sec = seconds;
    every.it_value.tv_nsec = 1e9 * (seconds - every.it_value.tv_sec);
    every.it_interval = every.it_value;
    syscall(SYS_timer_settime, timer, 0, &every, nullptr);
}
extern "C" char etext; // where the program's own code ends
static void say_where_host_is(int signal, siginfo_t *info, void *context) {
    static bool asked = false;
    static int tries = 0;
    asked = asked || info->si_code != SI_TIMER;
    if (!*host_is_in && signal == SIGINT) { // as without this handler
        ::signal(SIGINT, SIG_DFL);
        raise(SIGINT);
        return;
    }
    if (!*host_is_in) {
        if (asked) end_program();
        return;
    }
    const char *at = (const char *)interrupted(context);
    if ((at < &__executable_start || at >= &etext) && tries++ < 50) {
        if (signal == SIGINT) alarm(1); // Ctrl-C ends the program even if the host waits for good
        return set_watchdog(host_timer, 1e-3);
    }
    alarm(10);
    const std::string line = interrupted_line(context);
    fprintf(stderr, "%s%sthe host %s in %s", line.c_str(), line.empty() ? "" : ": ",
            asked ? "is" : "has been", host_is_in);
    if (!asked) fprintf(stderr, " for more than %d s", machine().watchdog);
    fprintf(stderr, ": is there an endless loop?\n");
    end_program();
}

// A block that runs on and on is reported once. Each worker has a timer of its own processor time,
// whose signal comes to itself: it can say where it is. Not under sanitizers, which are slow.
[[maybe_unused]] static void on_watchdog(int signal, siginfo_t *info, void *context) {
    if (!worker) return say_where_host_is(signal, info, context);
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
    const int t = current_thread(w);
    const uint3 at = thread_index(t);
    char in_block[60] = "";
    if (t >= 0)
        snprintf(in_block, sizeof in_block, " and is at thread (%u,%u,%u)", at.x, at.y, at.z);
    // A flag that the thread looks at again and again, and so lets the others of its block run
    const bool asks = w.times > 3 && w.asker >> 10 == w.blocks;
    fprintf(stderr,
            "%s:%d: %s on device %d: block (%u,%u,%u) has been running for %d seconds%s%s%s. %s "
            "Here each block runs until it ends, %d at a time%s\n",
            running.where.file, running.where.line, running.name, running.device, blockIdx.x,
            blockIdx.y, blockIdx.z, machine().watchdog, in_block,
            line.empty() ? "" : ", in ", line.c_str(),
            asks ? "No thread of its block sets the flag that it waits for: does a block that has "
                   "yet to begin?"
                 : "Does it wait for a value that another thread sets?",
            machine().devices[running.device]->cores,
            asks ? ", the first ones first: let a block wait for earlier ones only, or launch a "
                   "second kernel"
                 : ", and a thread lets others run only at a barrier, or where it looks at "
                   "volatile memory or calls an atomic function again and again");
}
int start_watchdog() { // of the calling thread; -1: it has none
    int timer = -1;
#if !defined(CUDA_CPU_ASAN) && !defined(CUDA_CPU_TSAN)
    const int seconds = machine().watchdog;
    if (seconds == 0) return -1;
    struct sigaction action = {};
    action.sa_sigaction = on_watchdog;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    sigaction(SIGVTALRM, &action, nullptr);
    struct sigaction before;
    sigaction(SIGINT, nullptr, &before);
    if (!worker && before.sa_handler == SIG_DFL) sigaction(SIGINT, &action, nullptr); // Ctrl-C
    struct sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = SIGVTALRM;
    event.sigev_notify_thread_id = syscall(SYS_gettid);
    if (syscall(SYS_timer_create, CLOCK_THREAD_CPUTIME_ID, &event, &timer)) return -1;
    set_watchdog(timer, seconds);
#endif
    return timer;
}
void host_enters(const char *what) {
    const bool was_in = *host_is_in, is_in = *what;
    snprintf(host_is_in, sizeof host_is_in, "%s", what);
    if (was_in == is_in) return; // the time goes on
    if (host_timer < 0) host_timer = start_watchdog();
    if (host_timer >= 0) set_watchdog(host_timer, is_in ? machine().watchdog : 0);
}
static thread_local std::vector<std::string> outer; // what the host was in when each range began
bool is_in_range() { return !outer.empty(); }
int begin_range() {
    outer.push_back(host_is_in);
    return outer.size() - 1;
}
int end_range() {
    if (outer.empty()) return -2;
    host_enters(outer.back().c_str());
    outer.pop_back();
    return outer.size();
}

// --- notices

bool is_new(const char *notice, const char *kernel) {
    static std::mutex lock;
    static std::set<std::string> said;
    std::lock_guard<std::mutex> guard(lock);
    return said.insert(notice + std::string(" ") + kernel).second;
}

// --- volatile memory

// See Volatile. Where the kernel goes on between two elements of volatile memory, it may
// have written the first of them; two threads were there at the same time if they are lanes of one
// warp and neither a barrier nor a warp function stands between them.
static CUDA_CPU_UNSEEN bool at_once(const Touch &a, const Touch &b) {
    return a.block == b.block && a.phase == b.phase && a.calls == b.calls && a.thread != b.thread &&
           a.thread / 32 == b.thread / 32;
}
static CUDA_CPU_UNSEEN unsigned long long value_of(const Touch &touch) {
    unsigned long long value = 0;
    memcpy(&value, (const void *)touch.at, min(touch.bytes, sizeof value));
    return value;
}
static __attribute__((noinline, cold, no_sanitize("thread"))) void
not_in_step(const Touch &writer, const Touch &other, void *pc) {
    Hidden hidden;
    if (!is_new("volatile", running.name)) return;
    const std::string line = line_of(&pc, 1, pc, false);
    fprintf(stderr,
            "%s:%d: notice: %s on device %d%s%s: lane %d writes to volatile memory that "
            "lane %d also accesses, with no __syncwarp() in between. The lanes of a warp do not "
            "run in lockstep, neither here nor, since Volta, on a GPU: the numbers may be wrong\n",
            running.where.file, running.where.line, running.name, running.device,
            line.empty() ? "" : ", in ", line.c_str(), writer.thread % 32, other.thread % 32);
}
// Return whether the thread has found there what it has just found there before.
static CUDA_CPU_UNSEEN bool touch(Worker &w, const volatile void *p, size_t bytes, void *pc) {
    Hidden hidden;
    if (w.lists->touched.empty()) w.lists->touched.resize(4096);
    auto touched = [&](const volatile void *p) -> Touched & {
        Touched &there = w.lists->touched[(size_t)p * 0x9E3779B97F4A7C15 >> 52];
        if (there.at != p) there = {p, {}, {}, false};
        return there;
    };
    const int t = current_thread(w);
    const bool before_barrier = // which thread 0 has met already
        w.mode == in_turns && t > 0 && w.met_barrier && !w.thread0_ended;
    const unsigned calls = w.mode == by_lanes ? w.warps[t / 32].lanes[t % 32].calls : 0;
    Touch now = {w.blocks, w.phase - before_barrier, calls, t, p, bytes, 0};
    const Touch *writer = nullptr, *other = nullptr;
    const Touch last = w.last_touch;
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
    const Touch &before = here.by[0];
    const bool known = before.block == now.block && before.thread == t;
    const bool again = known && before.value == now.value;
    if (known && !again) w.times = 0;
    here.polled = here.polled || (again && w.times > 100); // (see asked_again(): no other runs yet)
    if (writer && !touched(writer->at).polled) {
        if (w.conflict.block == now.block && w.conflict.at != writer->at)
            not_in_step(*writer, *other, pc);
        w.conflict = *writer;
    }
    if (here.by[0].thread != t || here.by[0].block != now.block) here.by[1] = here.by[0];
    here.by[0] = now;
    w.last_touch = now;
    return again;
}
CUDA_CPU_UNSEEN void touch_volatile(const volatile void *p, size_t bytes) {
    if (touch(*worker, p, bytes, __builtin_return_address(0))) asked_again();
}

} // namespace cuda_cpu

// --- numbers that a GPU makes otherwise

// What g++ and clang++ call, with -fsanitize=float-cast-overflow,shift-exponent, where a conversion
// or a shift has no result in C++. A GPU has one, and this processor often another.
namespace cuda_cpu {
struct TypeOf {
    unsigned short kind, info; // kind 0: an integer, of 2^(info / 2) bits, signed if info is odd
    char name[1];
    int bits() const { return kind ? info : 1 << info / 2; }
};
struct CheckedConversion {
    const char *file;
    unsigned line, column;
    const TypeOf *from, *to;
};
static void say_number(const CheckedConversion &at, const char *format, ...) {
    char text[300];
    Hidden hidden;
    snprintf(text, sizeof text, "number %s:%u:%u", at.file, at.line, at.column);
    if (!worker || !worker->threads || !is_new(text, running.name)) return;
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fprintf(stderr, "%s:%u: notice: %s on device %d: %s, but this processor may not\n", at.file,
            at.line, running.name, running.device, text);
}
__attribute__((weak)) void conversion(const CheckedConversion &at,
                                      void *bits) asm("__ubsan_handle_float_cast_overflow");
void conversion(const CheckedConversion &at, void *bits) {
    float f = 0;
    double x = 0;
    if (at.from->bits() > 64) return;
    memcpy(&f, &bits, sizeof f);
    if (at.from->bits() == 32) x = f;
    else memcpy(&x, &bits, sizeof x);
    // Numbers of less than 32 bits are the lowest bits of one that has 32
    const int bits_there = at.to->bits(), wide = bits_there > 32 ? 64 : 32;
    const bool is_signed = at.to->info % 2;
    const double least = is_signed ? -ldexp(1, wide - 1) : 0, end = ldexp(1, wide - is_signed);
    if (bits_there < 32 && x >= least && x < 0x1p31) return; // as here
    const unsigned long long most = ~0ull >> (64 - wide + is_signed),
                             lowest = is_signed ? ~most : 0;
    unsigned long long n = x != x      ? 0
                           : x < least ? lowest
                           : x >= end  ? most
                           : is_signed ? (long long)x
                                       : (unsigned long long)x;
    if (bits_there < 64) n &= ~(~0ull << bits_there);
    const bool negative = is_signed && n >> (bits_there - 1);
    if (negative && bits_there < 64) n |= ~0ull << bits_there;
    say_number(at, negative ? "a GPU converts %g to %s as %lld" : "a GPU converts %g to %s as %llu",
               x, at.to->name, n);
}
__attribute__((weak)) void shift(const CheckedConversion &at, void *x,
                                 void *by) asm("__ubsan_handle_shift_out_of_bounds");
void shift(const CheckedConversion &at, void *, void *) {
    say_number(at, "a GPU shifts by as many bits as %s has, or more, so that none of them is left",
               at.from->name);
}

#if defined(CUDA_CPU_ASAN) && !defined(__clang__)
// With --param asan-instrumentation-with-call-threshold=0 g++ calls these before each load.
static __attribute__((noinline, no_sanitize("address"))) void before_load(const void *p, void *pc) {
    const Worker *w = worker;
    if (!w || !w->threads || *(const unsigned *)((uintptr_t)p & ~3) != unwritten) return;
    std::string what = shared_name(p);
    std::lock_guard<std::mutex> guard(machine().lock);
    const Place at = locate(p);
    if (at.allocation && held(p) < at.first + at.allocation->bytes) what = allocated_there(at, p);
    if (what.empty() || !is_new("unwritten", running.name)) return;
    void *frames[32];
    fprintf(stderr, "%s: notice: %s on device %d reads %s, but nothing has been written there\n",
            line_of(frames, call_stack(frames, 32), pc, false).c_str(), running.name,
            running.device, what.c_str());
}
#define CUDA_CPU_BEFORE_LOAD(name, sizes, size)                                                    \
    extern "C" __attribute__((optimize("O2"), no_sanitize("address"))) void name sizes {           \
        static const auto real = (void(*) sizes)dlsym(RTLD_NEXT, #name);                           \
        before_load(p, __builtin_return_address(0));                                               \
        real size;                                                                                 \
    }
CUDA_CPU_BEFORE_LOAD(__asan_load1, (const void *p), (p))
CUDA_CPU_BEFORE_LOAD(__asan_load2, (const void *p), (p))
CUDA_CPU_BEFORE_LOAD(__asan_load4, (const void *p), (p))
CUDA_CPU_BEFORE_LOAD(__asan_load8, (const void *p), (p))
CUDA_CPU_BEFORE_LOAD(__asan_load16, (const void *p), (p))
CUDA_CPU_BEFORE_LOAD(__asan_loadN, (const void *p, size_t bytes), (p, bytes))
#endif

// In a kernel printf returns how many arguments it has printed.
#if !defined(CUDA_CPU_ASAN) && !defined(CUDA_CPU_TSAN)
static int printed(const char *format, va_list args) {
    const int characters = vprintf(format, args);
    if (!worker || !worker->threads) return characters;
    int n = 0;
    for (const char *p = format; (p = strchr(p, '%')); p++) {
        if (p[1] == '%') p++;
        else n++;
        for (; strchr("-+ #*.0123456789", p[1]) && p[1]; p++) n += p[1] == '*';
    }
    return n;
}
int print(const char *format, ...) asm("printf");
int print(const char *format, ...) {
    va_list args;
    va_start(args, format);
    const int result = printed(format, args);
    va_end(args);
    return result;
}
int print_checked(int, const char *format, ...) asm("__printf_chk");
int print_checked(int, const char *format, ...) {
    va_list args;
    va_start(args, format);
    const int result = printed(format, args);
    va_end(args);
    return result;
}
#endif
} // namespace cuda_cpu

// An assert() that fails in a kernel ends the program and names the thread. In place of the C
// library's function, which the macro calls, and which each library declares in its own way.
namespace cuda_cpu {
__attribute__((noreturn, cold)) void assertion_failed(const char *condition, const char *file,
                                                      unsigned line,
                                                      const char *function) asm("__assert_fail");
void assertion_failed(const char *condition, const char *file, unsigned line,
                      const char *function) {
    if (!worker || !running.name || in_host_function) {
        fprintf(stderr, "%s:%u: %s: assertion `%s' failed\n", file, line, function, condition);
        assertion_is_told = true;
        abort();
    }
    say_alone();
    fail(cudaErrorAssert, {file, (int)line, nullptr},
         "%s on device %d: block (%u,%u,%u), thread (%u,%u,%u): assertion `%s' failed",
         running.name, running.device, blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y,
         threadIdx.z, condition);
    end_program();
}
} // namespace cuda_cpu
