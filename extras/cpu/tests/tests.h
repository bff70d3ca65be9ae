// What the tests of all rooms share: calls that must succeed, or be refused; memory, streams and
// events that end with their test; programs that each run in a process of their own.
#pragma once

#include "cuda_runtime.h"
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

#include "./cuda/checks.h" // "cuda/...": to_cpp.sed would take it for one of CUDA's
#include "./cuda/queues.h"

#include "../../run_tests.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <dirent.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(CUDA_CPU_TSAN) || defined(CUDA_CPU_ASAN)
constexpr bool small_only = true; // a sanitizer is up to 300 times slower
#else
constexpr bool small_only = false;
#endif

typedef std::vector<float> Floats;
constexpr size_t one_float = sizeof(float);
constexpr auto up = cudaMemcpyHostToDevice, down = cudaMemcpyDeviceToHost,
               within = cudaMemcpyDeviceToDevice;

// A call or launch that must succeed: a failure ends the test, or the program of section 6.
#define OK(call) succeed((call), #call, __FILE__, __LINE__)
#define OK_LAUNCH(launch) OK((launch, cudaGetLastError()))
static void succeed(cudaError_t code, const char *call, const char *file, int line) {
    if (code == cudaSuccess) return;
    throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + call + ": " +
                             cudaGetErrorString(code) + " (" + cudaGetErrorName(code) + ")");
}

// Makes a device current up to the end of the block, or of the statement: OnDevice{1}, call(...);
// Device 0 is current afterwards.
struct OnDevice {
    explicit OnDevice(int device) { OK(cudaSetDevice(device)); }
    ~OnDevice() { OK(cudaSetDevice(0)); }
};

// n floats in a device's memory, never freed, or freed with the last handle.
static float *memory(int device, size_t n) {
    float *p = nullptr;
    OnDevice{device}, OK(cudaMalloc(&p, n * sizeof(float)));
    return p;
}
static std::shared_ptr<float> floats_on(int device, size_t n) {
    return std::shared_ptr<float>(memory(device, n), [](float *p) { cudaFree(p); });
}
static float *freed(int device, size_t n) { return floats_on(device, n).get(); }
template <class T> static std::shared_ptr<T> pinned(size_t n) {
    T *p = nullptr;
    OK(cudaMallocHost(&p, n * sizeof(T)));
    std::fill_n(p, n, T());
    return std::shared_ptr<T>(p, [](T *p) { // nothing that is queued may use it any more
        int devices = 0, current = 0;
        cudaGetDevice(&current);
        cudaGetDeviceCount(&devices);
        for (int id = 0; id < devices; id++) cudaSetDevice(id), cudaDeviceSynchronize();
        cudaSetDevice(current);
        cudaFreeHost(p);
    });
}
template <class T>
static std::shared_ptr<T> device_copy(const std::vector<T> &host, int device = 0) {
    const size_t bytes = host.size() * sizeof(T);
    const auto memory = floats_on(device, (bytes + one_float - 1) / one_float);
    const std::shared_ptr<T> p(memory, (T *)memory.get());
    OK(cudaMemcpy(p.get(), host.data(), bytes, up)); // of a T *: pointers in it are followed
    return p;
}
template <class T> static std::vector<T> fetch(const std::shared_ptr<T> &p, size_t n) {
    std::vector<T> host(n);
    OK(cudaDeviceSynchronize());
    OK(cudaMemcpy(host.data(), p.get(), n * sizeof(T), down));
    return host;
}
template <class... Pointers> static std::string values(const Pointers &...p) { // as "5 0 7"
    std::ostringstream text;
    text.precision(9);
    ((text << (text.str().empty() ? "" : " ") << fetch(p, 1)[0]), ...);
    return text.str();
}

static cudaStream_t new_stream(int device, unsigned flags = cudaStreamNonBlocking) {
    cudaStream_t stream;
    OnDevice{device}, OK(cudaStreamCreateWithFlags(&stream, flags));
    return stream;
}
static cudaEvent_t new_event(int device, unsigned flags = cudaEventDefault) {
    cudaEvent_t event;
    OnDevice{device}, OK(cudaEventCreateWithFlags(&event, flags));
    return event;
}
struct TestStream { // of a device, and not ordered with its default stream
    const cudaStream_t stream;
    explicit TestStream(int device = 0, unsigned flags = cudaStreamNonBlocking)
        : stream(new_stream(device, flags)) {}
    ~TestStream() { cudaStreamDestroy(stream); }
    operator cudaStream_t() const { return stream; }
};
struct TestEvent {
    const cudaEvent_t event;
    explicit TestEvent(int device = 0, unsigned flags = cudaEventDefault)
        : event(new_event(device, flags)) {}
    ~TestEvent() { cudaEventDestroy(event); }
    operator cudaEvent_t() const { return event; }
};

static void expect(bool holds, const char *what, long value) {
    if (!holds) throw std::runtime_error(what + (": " + std::to_string(value)));
}

__global__ void assign_kernel(float *x, float value) {
    x[blockIdx.x * blockDim.x + threadIdx.x] = value;
}
__global__ void plus_kernel(float *x, float value) {
    x[blockIdx.x * blockDim.x + threadIdx.x] += value;
}

// Keeps its stream busy until the host lets go, and only then sets x. It gives up after ten
// seconds and leaves x as it was: where a call waits that must not, a test fails and does not hang.
__global__ void hold_kernel(const int *go, float *x, float value) {
    for (int i = 0; i < 100000 && !__atomic_load_n(go, __ATOMIC_RELAXED); i++) usleep(100);
    if (__atomic_load_n(go, __ATOMIC_RELAXED)) *x = value;
}
struct Hold {
    const std::shared_ptr<int> go = pinned<int>(1);
    Hold(cudaStream_t stream, float *x, float value = 5, int device = 0) {
        OnDevice current(device);
        OK_LAUNCH(hold_kernel<<<1, 1, 0, stream>>>(go.get(), x, value));
    }
    // First, time enough for what should wait and does not to give itself away.
    void release_later() {
        usleep(20000);
        __atomic_store_n(go.get(), 1, __ATOMIC_RELAXED);
    }
    template <class... Streams> void release_and_wait_for(const Streams &...streams) {
        release_later();
        (OK(cudaStreamSynchronize(streams)), ...);
    }
    ~Hold() { __atomic_store_n(go.get(), 1, __ATOMIC_RELAXED); } // also where a test fails
};

struct Line {
    float *y;
    const float *x;
    float slope;
    char unused; // and padding
    int n;
};
__global__ void line_kernel(Line l, const double *offset, bool negative, short n) {
    const int i = threadIdx.x;
    if (i < l.n && i < n) l.y[i] = (negative ? -1 : 1) * (l.slope * l.x[i] + (float)*offset);
}
__global__ void empty_kernel() {}

// --- calls that must be refused
// A wrong call fails with CUDA's code and says on stderr, in one line, where it stands and what is
// wrong with it. These macros' line is the one that it has to name.

#define REFUSED(code, call, ...)                                                                   \
    refused([&] { return call; }, __FILE__, __LINE__, code, {__VA_ARGS__})
#define REFUSED_LAUNCH(code, launch, ...)                                                          \
    REFUSED(code, (launch, cudaPeekAtLastError()), __VA_ARGS__)
static void refused(const std::function<cudaError_t()> &call, const char *file, int line,
                    cudaError_t want, const std::vector<std::string> &says) {
    int pipe_ends[2];
    REQUIRE(pipe(pipe_ends) == 0);
    const int terminal = dup(STDERR_FILENO);
    dup2(pipe_ends[1], STDERR_FILENO);
    const cudaError_t code = call();
    dup2(terminal, STDERR_FILENO);
    close(terminal);
    close(pipe_ends[1]);
    std::string text;
    for (char buffer[4096]; ssize_t n = read(pipe_ends[0], buffer, sizeof buffer);)
        text.append(buffer, n);
    close(pipe_ends[0]);

    CAPTURE(line);
    CAPTURE(text);
    CHECK(code == want);
    CHECK(cudaGetLastError() == want);
    const size_t path = strlen(file); // the text begins with "file:line: "
    REQUIRE(text.compare(0, path + 1, std::string(file) + ":") == 0);
    const int said = atoi(text.c_str() + path + 1);
#ifdef __clang__ // its __LINE__ is the last one of a macro's call
    CHECK(said >= line - 2);
    CHECK(said <= line);
#else
    CHECK(said == line);
#endif
    CHECK(text.find(": ", path) == text.find(':', path + 1));
    const std::string end = std::string(" [") + cudaGetErrorName(want) + "]\n";
    CHECK(text.find(end) + end.size() == text.find('\n') + 1);
    CHECK(text.find('\n') + 1 == text.size());
    for (const std::string &part : says) {
        CAPTURE(part);
        CHECK(text.find(part) != std::string::npos);
    }
}

// The code and the words of most refusals
static const cudaError_t value = cudaErrorInvalidValue;
static const std::string on_host = "is host memory, not memory of device 0",
                         on_0_not_1 = "is memory of device 0, not of device 1",
                         on_1_not_0 = "is memory of device 1, not of device 0";
static std::string overrun(int bytes = 40, int begin = 0) {
    return ": " + std::to_string(bytes) + " bytes at offset " + std::to_string(begin) +
           " overrun the 36 bytes that extras/cpu/tests/tests.h:";
}

// 10 and 9 floats on both devices, what a device has freed, and memory of the host.
struct Memories {
    std::shared_ptr<float> x[2] = {floats_on(0, 10), floats_on(1, 10)},
                           y[2] = {floats_on(0, 9), floats_on(1, 9)}, fixed = pinned<float>(10);
    float *x0 = x[0].get(), *x1 = x[1].get(), *y0 = y[0].get(), *y1 = y[1].get();
    float *freed0 = freed(0, 10), *freed1 = freed(1, 10);
    float *pinned_host = fixed.get(), host[10] = {};
};

// --- programs, right and wrong
// What is noticed only while a kernel runs ends the program. Each of these is a process of its own
// with two devices, `runtime_tests --wrong NAME`. A wrong one has to end with exit status 1 and a
// message that begins with the line it is wrong in and contains the words of its table. A
// right one, often the same but for one thing, has to end with status 0 and print nothing.

// What is wrong stands in one line with one of these, or a sanitizer's report is expected for it,
// or the machine lacks something.
#define WRONG_HERE(...) (fprintf(stderr, "expected: %s:%d:\n", __FILE__, __LINE__), __VA_ARGS__)
#define REPORTED(...) (fprintf(stderr, "expected: ==%d==ERROR: \n", getpid()), __VA_ARGS__)
#define LACKING_HERE(...) (fprintf(stderr, "expected: cuda_runtime.h: \n"), __VA_ARGS__)

struct Program {
    const char *name;
    void (*run)();
    std::vector<const char *> says = {}; // a wrong one's message
};
inline std::vector<Program> right_programs, wrong_programs;
static bool add(std::vector<Program> &programs, const std::vector<Program> &more) {
    programs.insert(programs.end(), more.begin(), more.end());
    return true;
}
#define WRONG(name, program, ...) Program({name, [] { program; }, {__VA_ARGS__}})

// What a command prints to stdout, and its exit status, which is not 0 after a signal either.
static std::string output_of_shell(const std::string &command, int &status) {
    FILE *pipe = popen(command.c_str(), "r");
    REQUIRE(pipe);
    std::string output;
    for (char text[4096]; size_t n = fread(text, 1, sizeof text, pipe);) output.append(text, n);
    status = pclose(pipe);
    return output;
}
// Everything that a program prints, and its exit status.
// ThreadSanitizer would give unfinished threads a second at the end, and AddressSanitizer would
// report what these programs do not free: neither is tested here.
static std::string output_of(const std::string &name, int &status) {
    const std::string command =
        "CUDA_CPU_DEVICES=2 TSAN_OPTIONS=\"$TSAN_OPTIONS log_path=stderr atexit_sleep_ms=0 "
        "exitcode=66\" "
        "ASAN_OPTIONS=\"$ASAN_OPTIONS detect_leaks=0\" /proc/" +
        std::to_string(getpid()) + "/exe --wrong '" + name + "' 2>&1 </dev/null";
    return output_of_shell(command, status);
}
static void check_silent(const std::string &name) { // and right
    int status = 0;
    CAPTURE(name);
    CHECK(output_of(name, status) == "");
    CHECK(status == 0);
}
