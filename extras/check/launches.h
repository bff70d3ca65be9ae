// make check: which kernels are launched, and on which stream. Included after watch.h and before
// mgpu.cu, this header sees the check for errors that LAUNCH makes after each launch.
// defines: launched, stray, before_launch
#pragma once

// Kernels that were launched, while a Recorder lived, on a stream that mgpu.cu has not created: the
// default stream, for example.
inline std::vector<std::string> stray;

// Return the kernels of a recording, each once, in order.
inline std::vector<std::string> launched(const std::deque<watch::Op> &ops) {
    std::vector<std::string> names;
    for (const watch::Op &op : ops) {
        const std::string name =
            strchr(op.name, '<') || strchr(op.name, '"') ? watch::kernel_name(op.name) : "";
        const bool there = std::find(names.begin(), names.end(), name) != names.end();
        if (!name.empty() && !there) names.push_back(name);
    }
    return names;
}

inline cudaError_t error_after_launch() {
    if (watch::innermost && !watch::innermost->lane)
        stray.push_back(watch::kernel_name(watch::innermost->text));
    return cudaGetLastError();
}
#define cudaGetLastError error_after_launch

inline void (*before_launch)() = nullptr; // by LAUNCH
#undef LAUNCH
#define LAUNCH(...)                                                                                \
    do {                                                                                           \
        if (before_launch) before_launch();                                                        \
        const watch::Launch watched(#__VA_ARGS__);                                                 \
        __VA_ARGS__;                                                                               \
        check_launch(__FILE__, __LINE__);                                                          \
    } while (0)
