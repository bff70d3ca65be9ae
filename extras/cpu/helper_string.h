// What NVIDIA's samples read their command lines with: -name, --name or -name=value, whose last one
// counts. A header of this name beside a program comes first.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <strings.h>

#ifndef EXIT_WAIVED
#define EXIT_WAIVED 2
#endif

namespace cuda_cpu {
inline const char *without_dashes(const char *word) { return word + strspn(word, "-"); }
// Return what stands behind the name, and behind a =, in the last word that begins with the name,
// or null.
inline const char *value_of(int argc, const char **argv, const char *name) {
    const size_t length = strlen(name);
    for (int i = argc - 1; i > 0; i--) {
        const char *word = without_dashes(argv[i]);
        if (strncasecmp(word, name, length) == 0) return word + length + (word[length] == '=');
    }
    return nullptr;
}
} // namespace cuda_cpu

// Tell whether there is a word -name or -name=value.
inline bool checkCmdLineFlag(int argc, const char **argv, const char *name) {
    for (int i = 1; i < argc; i++) {
        const char *word = cuda_cpu::without_dashes(argv[i]);
        const size_t length = strcspn(word, "=");
        if (length == strlen(name) && strncasecmp(word, name, length) == 0) return true;
    }
    return false;
}
inline int getCmdLineArgumentInt(int argc, const char **argv, const char *name) {
    const char *value = cuda_cpu::value_of(argc, argv, name);
    return value ? atoi(value) : 0;
}
inline float getCmdLineArgumentFloat(int argc, const char **argv, const char *name) {
    const char *value = cuda_cpu::value_of(argc, argv, name);
    return value ? atof(value) : 0;
}
inline bool getCmdLineArgumentString(int argc, const char **argv, const char *name, char **value) {
    *value = (char *)cuda_cpu::value_of(argc, argv, name);
    return *value;
}
template <class T>
bool getCmdLineArgumentValue(int argc, const char **argv, const char *name, T *value) {
    const char *text = cuda_cpu::value_of(argc, argv, name);
    if (text) *value = (T)atoi(text);
    return text;
}
// Return the path of a file here or in ./data, for free(), or null.
inline char *sdkFindFilePath(const char *file, const char *) {
    for (const std::string folder : {"", "data/"})
        if (std::ifstream((folder + file).c_str())) return strdup((folder + file).c_str());
    fprintf(stderr, "sdkFindFilePath: %s is neither here nor in data/\n", file);
    return nullptr;
}
