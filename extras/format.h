// printf into a string, for the programs in extras/.
// defines: format
#ifndef MGPU_FORMAT // its translated copy may be included, too
#define MGPU_FORMAT

#include <cstdarg>
#include <cstdio>
#include <string>

__attribute__((format(printf, 1, 2))) inline std::string format(const char *format, ...) {
    char text[1000];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return text;
}
#endif
