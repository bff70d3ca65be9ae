// Which line of the lesson has enqueued an operation, or thrown an exception: the chain of calls
// that has led there, read from the program's debug information. (A GPU's program has none.)
// defines: watch::Stack, watch::call_stack, watch::thrown_by, watch::Frame, watch::frames_of
#pragma once
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

#ifdef CUDA_CPU
extern "C" char __executable_start;
// Return the calls of a stack as the source has them, the innermost first.
inline const std::vector<Frame> &frames_of(const Stack &stack) {
    static std::map<std::vector<void *>, std::vector<Frame>> known;
    auto [found, is_new] = known.insert({{stack.frames, stack.frames + stack.n}, {}});
    std::vector<Frame> &frames = found->second;
    if (!is_new) return frames;
    std::string command = "addr2line -Cfie /proc/" + std::to_string(getpid()) + "/exe";
    for (void *address : found->first) {
        size_t at = (size_t)address - 1;
#ifdef __PIE__
        at -= (size_t)&__executable_start;
#endif
        char text[20];
        snprintf(text, sizeof text, " 0x%zx", at);
        command += text;
    }
    char function[4000], line[1000];
    FILE *lines = popen((command + " 2>/dev/null").c_str(), "r");
    while (lines && fgets(function, sizeof function, lines) && fgets(line, sizeof line, lines)) {
        const std::string text = line;
        const size_t colon = text.rfind(':');
        if (colon >= text.size() || text[0] == '?') continue;
        frames.push_back({function, text.substr(0, colon), atoi(&text[colon + 1])});
    }
    if (lines) pclose(lines);
    return frames;
}
#else
inline const std::vector<Frame> &frames_of(const Stack &) {
    static const std::vector<Frame> none;
    return none;
}
#endif

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
