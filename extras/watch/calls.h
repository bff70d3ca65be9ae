// Which line of the lesson has enqueued an operation, or thrown an exception: the chain of calls
// that has led there, read from the program's debug information. (A GPU's program has none.)
// defines: watch::Stack, watch::call_stack, watch::thrown_by, watch::Frame, watch::calls_at,
// watch::look_up, watch::frames_of
#pragma once
#include "../format.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include <dlfcn.h>
#include <unistd.h>
#include <unwind.h>

namespace watch {

// Where each caller of this goes on, the innermost first
struct Stack {
    int n = 0;
    void *frames[64];
};
inline Stack call_stack() {
    Stack stack;
    auto add = [](_Unwind_Context *context, void *to) {
        Stack &s = *(Stack *)to;
        if (s.n < 64) s.frames[s.n++] = (void *)_Unwind_GetIP(context);
        return s.n < 64 ? _URC_NO_REASON : _URC_END_OF_STACK;
    };
    _Unwind_Backtrace(add, &stack);
    return stack;
}

struct Frame {
    std::string function, file;
    int line;
};
inline Stack thrown_by; // who has thrown the last exception

// The calls at each address that was looked up, as the source has them: several where functions are
// inlined, the innermost first
inline std::map<void *, std::vector<Frame>> calls_at;
extern "C" char __executable_start;
// Look up addresses, all of them at once: it takes longer to start addr2line than to find one more.
inline void look_up([[maybe_unused]] const std::vector<void *> &addresses) {
#ifdef CUDA_CPU
    size_t base = 1; // a call is before what it returns to
#ifdef __PIE__
    base += (size_t)&__executable_start;
#endif
    std::string list;
    for (void *address : addresses)
        if (calls_at.insert({address, {}}).second) list += format(" 0x%zx", (size_t)address - base);
    if (list.empty()) return;
    const std::string options = format("-Cfiae /proc/%d/exe", getpid()); // -a prints addresses, too
    FILE *lines = popen(("addr2line " + options + list + " 2>/dev/null").c_str(), "r");
    std::vector<Frame> *calls = nullptr;
    char function[4000], line[1000];
    while (lines && fgets(function, sizeof function, lines)) {
        if (strncmp(function, "0x", 2) == 0) {
            calls = &calls_at[(void *)(strtoull(function, nullptr, 16) + base)];
            continue;
        }
        if (!fgets(line, sizeof line, lines)) break;
        char *const colon = strrchr(line, ':');
        if (!calls || !colon || line[0] == '?') continue;
        calls->push_back({function, std::string(line, colon), atoi(colon + 1)});
    }
    if (lines) pclose(lines);
#endif
}
// Return the calls of a stack, the innermost first.
inline const std::vector<Frame> &frames_of(const Stack &stack) {
    static std::map<std::vector<void *>, std::vector<Frame>> known;
    const std::vector<void *> addresses(stack.frames, stack.frames + stack.n);
    auto [found, is_new] = known.insert({addresses, {}});
    std::vector<Frame> &frames = found->second;
    if (!is_new) return frames;
    look_up(addresses);
    for (void *address : addresses)
        for (const Frame &call : calls_at[address]) frames.push_back(call);
    return frames;
}

} // namespace watch

// In place of the C++ library's function for `throw`, which it calls
extern "C" __attribute__((noreturn, used)) void note_throw(void *exception, void *type,
                                                           void (*destroy)(void *))
    __asm__("__cxa_throw");
void note_throw(void *exception, void *type, void (*destroy)(void *)) {
    watch::thrown_by = watch::call_stack();
    ((decltype(&note_throw))dlsym(RTLD_NEXT, "__cxa_throw"))(exception, type, destroy);
    abort();
}
