// Checks while a program runs: faults of kernels and of the host, and what takes too long.
#pragma once

#include "errors.h"

#include <csignal>
#include <string>

namespace cuda_cpu {

// Remember that the host is now in `what`, such as an allreduce; "" is nothing.
void host_enters(const char *what);
// Begin a range. Its end restores what the host was in before. Like NVTX's functions, begin_range()
// returns the number of ranges around the new one. end_range() returns the number that are left, or
// -2 if no range was open.
int begin_range();
int end_range();
bool is_in_range();

// Put where each caller of this thread goes on into `frames`, innermost first, and return how many:
// as backtrace(), which not every C library has.
int call_stack(void **frames, int most);
// Return the line of the program that this thread has reached, as "FILE:LINE": that of the address
// `interrupted`, which is on the stack of `n` frames, or of its caller. Library functions are
// skipped in favour of their callers; `in_library` tells whether there were such. In an allreduce
// its own line comes first, then ", in " and the line of the tool that it called. Empty if there is
// no addr2line, or the program has no line numbers (-g1).
std::string line_of(void **frames, int n, void *interrupted, bool exact,
                    bool *in_library = nullptr);
// Return the address at which a signal has interrupted its thread, and the line of that address.
void *interrupted(void *context);
std::string interrupted_line(void *context, bool *in_library = nullptr);
// Return true the first time that this is asked about a kernel and a notice.
bool is_new(const char *notice, const char *kernel);
// Whether a file is the program's, not a library's or the stand-in's.
bool is_own(const char *file);

// SIGSEGV or SIGBUS: where the address belongs to a device, say whose memory was missed by whom.
// Any other fault is left to the handler that was installed before this one, but those of a kernel
// by a null pointer, its stack or a division (SIGFPE): the access is tried again on return, and
// faults again. Should finding the line fault itself, this is called once more, and does without.
inline struct sigaction before_fault[NSIG];
void on_fault(int signal, siginfo_t *info, void *context);

// Start a watchdog of the calling thread. Returns its timer, or -1: it has none.
int start_watchdog();

// Under ThreadSanitizer a stack goes on, from an operation on a device, to the call that has
// enqueued it, here(), and to that one's callers. enter_callers() begins what leave_callers() ends;
// both would be functions of that stack if they were not hidden.
#ifdef CUDA_CPU_TSAN
void note_callers(Running &r);
__attribute__((noinline, no_sanitize("thread"))) void enter_callers();
__attribute__((noinline, no_sanitize("thread"))) void leave_callers();
#else
inline void note_callers(Running &) {}
inline void enter_callers() {}
inline void leave_callers() {}
#endif

} // namespace cuda_cpu
