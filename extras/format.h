// printf into a string, and where a program runs, for the programs in extras/.
// defines: format, on_cpu
#ifndef MGPU_FORMAT // its translated copy may be included, too
#define MGPU_FORMAT

#include <cstdarg>
#include <cstdio>
#include <string>

#ifdef CUDA_CPU
constexpr bool on_cpu = true; // compiled by g++, with emulated devices
#else
constexpr bool on_cpu = false;
#endif

__attribute__((format(printf, 1, 2))) inline std::string format(const char *format, ...) {
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    std::string text(vsnprintf(nullptr, 0, format, args), 0);
    va_end(args);
    vsnprintf(&text[0], text.size() + 1, format, again);
    va_end(again);
    return text;
}
#endif
