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
    char text[1000];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return text;
}
#endif
