// The stopwatch of NVIDIA's samples, in milliseconds. A header of this name beside a program comes
// first.
#pragma once

#include <chrono>

struct StopWatchInterface {
    using Clock = std::chrono::steady_clock;
    Clock::time_point began = {};
    bool runs = false;
    double total = 0; // of the times that it has run
    int times = 0;

    float since() const {
        return std::chrono::duration<float, std::milli>(Clock::now() - began).count();
    }
    void start() {
        began = Clock::now();
        runs = true;
    }
    void stop() {
        total += since();
        runs = false;
        times++;
    }
    void reset() {
        total = times = 0;
        began = Clock::now();
    }
    float getTime() const { return total + (runs ? since() : 0); }
    float getAverageTime() const { return times ? total / times : 0; }
};

inline bool sdkCreateTimer(StopWatchInterface **timer) {
    *timer = new StopWatchInterface;
    return true;
}
inline bool sdkDeleteTimer(StopWatchInterface **timer) {
    delete *timer;
    *timer = nullptr;
    return true;
}
#define CUDA_CPU_TIMER(Result, name, value)                                                        \
    inline Result name(StopWatchInterface **timer) { return timer && *timer ? (value) : 0; }
CUDA_CPU_TIMER(bool, sdkStartTimer, ((*timer)->start(), true))
CUDA_CPU_TIMER(bool, sdkStopTimer, ((*timer)->stop(), true))
CUDA_CPU_TIMER(bool, sdkResetTimer, ((*timer)->reset(), true))
CUDA_CPU_TIMER(float, sdkGetTimerValue, (*timer)->getTime())
CUDA_CPU_TIMER(float, sdkGetAverageTimerValue, (*timer)->getAverageTime())
#undef CUDA_CPU_TIMER
