// Errors: their names and texts, and the one line on stderr that says what is wrong and where.
#include "checks.h"
#include "machine.h"

#include <atomic>
#include <cstdarg>

#include <unistd.h>

const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
#define CUDA_CPU_NAME(name, number, text)                                                          \
    case name: return #name;
        CUDA_CPU_ERRORS(CUDA_CPU_NAME)
#undef CUDA_CPU_NAME
    }
    return "unrecognized error code";
}
const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
#define CUDA_CPU_TEXT(name, number, text)                                                          \
    case name: return text;
        CUDA_CPU_ERRORS(CUDA_CPU_TEXT)
#undef CUDA_CPU_TEXT
    }
    return "unrecognized error code";
}

namespace cuda_cpu {

cudaError_t fail(cudaError_t error) { return last_error = error; }

cudaError_t fail(cudaError_t error, Where where, const char *format, ...) {
    char text[1000];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    std::string line = where.file + (":" + std::to_string(where.line));
    if (where.file == by_pointer) {
        void *frames[32];
        const int n = call_stack(frames, 32);
        const std::string own = line_of(frames, n, frames[0], false);
        if (!own.empty()) line = own;
    }
    fprintf(stderr, "%s: %s [%s]\n", line.c_str(), text, cudaGetErrorName(error));
    return fail(error);
}

cudaError_t no_result(const char *call, Where where) {
    return fail(cudaErrorInvalidValue, where, "%s: the pointer to its result is null", call);
}

void say_alone() {
    static std::atomic<bool> said{false};
    while (said.exchange(true)) pause();
}

[[noreturn]] void end_program() {
    if (ftrylockfile(stdout) == 0) fflush_unlocked(stdout);
    _exit(1);
}

[[noreturn]] void give_up(const char *format, ...) {
    char text[1000];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    say_alone();
    fprintf(stderr, "cuda_runtime.h: %s\n", text);
    end_program();
}

} // namespace cuda_cpu

cudaError_t cudaGetLastError() {
    cudaError_t error = cuda_cpu::last_error, fault = cuda_cpu::current().fault;
    cuda_cpu::last_error = cudaSuccess;
    if (error == cudaErrorMemoryAllocation) {
        std::lock_guard<std::mutex> guard(cuda_cpu::machine().lock);
        cuda_cpu::machine().failed = {};
    }
    return error ? error : fault;
}

cudaError_t cudaPeekAtLastError() {
    cudaError_t error = cuda_cpu::last_error, fault = cuda_cpu::current().fault;
    return error ? error : fault;
}
