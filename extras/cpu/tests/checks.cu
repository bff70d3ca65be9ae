// Checks: a fault of a kernel or of the host, and what takes too long, is told in one line.
#include "tests.h"

static __device__ int on_each_device = 1;
__global__ void assert_kernel(unsigned most) {
    if (threadIdx.x > most) fprintf(stderr, "expected: %s:%d:\n", __FILE__, __LINE__ + 1);
    assert(threadIdx.x <= most);
}

// Accesses to memory that is not mapped, by a kernel that got its address as a number
#if defined(CUDA_CPU_ASAN) || defined(CUDA_CPU_TSAN)
#define FAULT(...) "Sanitizer: "
#define FAULTS_HERE REPORTED
#else
#define FAULT(...) __VA_ARGS__, "cudaErrorIllegalAddress"
#define FAULTS_HERE WRONG_HERE
#endif
__global__ void hidden_kernel(uintptr_t address, int i) { ((float *)address)[i] += 1; }
static void access_by_host(volatile float *p) { FAULTS_HERE(p[2] = 1); }
[[maybe_unused]] static void unchecked_in_kernel() {
    setenv("CUDA_CPU_MEMORY", "8", 1);
    float *p = nullptr;
    cudaMalloc(&p, 20 << 20);
    FAULTS_HERE(assign_kernel<<<1, 1>>>(p, 1));
    OK(cudaDeviceSynchronize());
}
struct Pointer {
    float *p;
};
__global__ void found_kernel(const Pointer *found) { *found->p = 1; }
static void found_in_memory() {
    const Pointer found = {memory(0, 10)};
    float *copy = memory(0, sizeof found);
    OK(cudaMemcpy(copy, (const char *)&found, sizeof found, up)); // of bytes, as far as it knows
    FAULTS_HERE(found_kernel<<<1, 1>>>((const Pointer *)copy));
}
__global__ void dynamic_kernel(float *x, int i) {
    extern __shared__ float t[];
    t[i] = 1;
    *x = t[i];
}
__global__ void late_kernel(uintptr_t address) {
    __syncthreads();
    if (threadIdx.x == 3) *(float *)address = 1;
}
__global__ void misaligned_kernel(float4 *y, const float *x) { *y = *(const float4 *)(x + 1); }
static void hidden_access(int device, float *p, int i) {
    FAULTS_HERE(OnDevice{device}, hidden_kernel<<<1, 1>>>((uintptr_t)cuda_cpu::real(p), i));
}
// A fault of no device's memory belongs to the program: to its handler, if it has one.
static struct sigaction before_handler;
static void install_handler(bool passes_on) {
    struct sigaction action = {};
    action.sa_handler = [](int) {
        if (write(STDERR_FILENO, "the program's handler\n", 22)) _exit(1);
        _exit(1);
    };
    if (passes_on)
        action.sa_handler = [](int signal) { sigaction(signal, &before_handler, nullptr); };
    sigaction(SIGSEGV, &action, &before_handler);
}
static void access_nothing() { *(volatile uintptr_t *)sizeof(uintptr_t) = 1; }
static void fault_of_the_host() {
    fprintf(stderr, "expected: the program's handler\n");
    install_handler(false);
    memory(0, 1);
    access_nothing();
}
#if defined(CUDA_CPU_ASAN) && !defined(__clang__)
template <bool shared> __global__ void unwritten_kernel(int *y, const int *x) {
    __shared__ int list[3];
    if (shared) list[0] = 1;
    WRONG_HERE(*y = (shared ? list : x)[1]);
}
template <bool shared> static void read_unwritten() {
    auto x = floats_on(0, 3), y = floats_on(0, 1);
    OK_LAUNCH(unwritten_kernel<shared><<<1, 1>>>((int *)y.get(), (int *)x.get()));
    OK(cudaDeviceSynchronize());
    throw std::runtime_error("told, then went on");
}
#endif
#if !defined(CUDA_CPU_ASAN) && !defined(CUDA_CPU_TSAN)
static void read_by_library(float *p) { FAULTS_HERE(*p = strtof((char *)p, nullptr)); }
static void fault_without_line() {
    siginfo_t info = {};
    info.si_addr = memory(1, 10);
    fprintf(stderr, "expected: the host accesses\n");
    cuda_cpu::on_fault(SIGSEGV, &info, nullptr); // whose search for a line faults
}
__global__ void divide_kernel(int *x, int n) { *x = 7 / n; }
template <bool barrier> __global__ void large_array_kernel(float *x, int n) {
    volatile float a[40000];
    if (barrier) __syncthreads();
    for (int i = 0; i < n; i++) a[i] = i;
    *x = a[0];
}
__device__ __noinline__ int depth(int n) { return n < 0 ? 0 : depth(n + 1) + depth(n + 2); }
__global__ void recursive_kernel(int *x) { *x = depth(1); }
// The second block waits for what nobody can set. It ends the program after 2.2 s of processor
// time: the report, which is its own thread's, comes after 2.
static double seconds_used(clockid_t by = CLOCK_THREAD_CPUTIME_ID) {
    timespec t;
    clock_gettime(by, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}
__global__ void spin_kernel(volatile int *flag) {
    const double begin = seconds_used();
    for (unsigned turn = 0; blockIdx.x == 1 && threadIdx.x == 3 && !*flag; turn++)
        if (turn % (1 << 20) == 0 && seconds_used() - begin > 2.2) _exit(1);
}
static void spin() {
    setenv("CUDA_CPU_WATCHDOG", "1", 1);
    unsetenv("CUDA_CPU_LANES");
    int *flag = nullptr;
    OK(cudaMalloc(&flag, sizeof *flag));
    OK(cudaMemset(flag, 0, sizeof *flag));
    WRONG_HERE(spin_kernel<<<2, 5>>>(flag));
    OK(cudaDeviceSynchronize());
}
// It calls nothing, so that the compiler need not store which of its threads runs.
__global__ void silent_kernel(unsigned *last, unsigned end) {
    for (unsigned i = threadIdx.x; i != end; i = 4 * i + 1) *last = i;
}
static void spin_silently() {
    setenv("CUDA_CPU_WATCHDOG", "1", 1);
    unsetenv("CUDA_CPU_LANES");
    unsigned *last = nullptr;
    OK(cudaMalloc(&last, sizeof *last));
    std::thread([] {
        while (seconds_used(CLOCK_PROCESS_CPUTIME_ID) < 4) usleep(100000);
        _exit(1);
    }).detach();
    WRONG_HERE(silent_kernel<<<1, 5>>>(last, 0));
    OK(cudaDeviceSynchronize());
}
static void fault_with_handlers(bool before) {
    if (before) install_handler(false);
    volatile float *p = freed(1, 10);
    if (!before) install_handler(true);
    FAULTS_HERE(p[2] = 1);
}
// The host's own mistakes end it as ever, by this signal, but the line is named.
static void host_ends_by(int wanted, void (*program)()) {
    if (const pid_t child = fork()) {
        int status = 0;
        waitpid(child, &status, 0);
        expect(WIFSIGNALED(status) && WTERMSIG(status) == wanted, "status", status);
        _exit(1);
    }
    const rlimit no_core = {0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    memory(0, 1);
    program();
}
// A process that is forked after the first CUDA call
static void forked() {
    memory(0, 1);
    if (fork()) {
        int status = 0;
        wait(&status);
        _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 0);
    }
    LACKING_HERE(cudaDeviceSynchronize());
    _exit(0);
}
static void host_throws() {
    host_ends_by(SIGABRT, []() noexcept { WRONG_HERE(std::vector<int>().at(1) = 1); });
}
static void host_asserts() {
    host_ends_by(SIGABRT, [] { WRONG_HERE(assert(getpid() == 0)); });
}
static void fault_without_handler() {
    host_ends_by(SIGSEGV, [] { WRONG_HERE(*(volatile uintptr_t *)sizeof(uintptr_t) = 1); });
}
static void index_beyond_list() {
    static const std::vector<int> list(3);
    static volatile int host_value;
    host_ends_by(SIGABRT, [] { WRONG_HERE(host_value = list[list.size()]); });
}
static void host_without_end(bool interrupt) {
    setenv("CUDA_CPU_WATCHDOG", interrupt ? "100" : "1", 1);
    memory(0, 1);
    static volatile bool more = true;
    cuda_cpu::begin_range();
    cuda_cpu::host_enters("f, k = 2");
    cuda_cpu::begin_range();
    cuda_cpu::host_enters("g");
    cuda_cpu::end_range(); // it is in f again
    if (interrupt) kill(getpid(), SIGINT);
    WRONG_HERE((void)0); while (more) {}
}
static void interrupted_elsewhere() {
    host_ends_by(SIGINT, [] {
        cuda_cpu::begin_range();
        cuda_cpu::host_enters("f");
        cuda_cpu::end_range();
        WRONG_HERE(fprintf(stderr, "%s:%d: the host is in nothing\n", __FILE__, __LINE__));
        raise(SIGINT);
    });
}
#endif
#ifdef CUDA_CPU_ASAN
static const char *const poison = "AddressSanitizer: use-after-poison";
__global__ void static_overrun_kernel(float *x, int i) {
    __shared__ float first[10], second[10];
    first[threadIdx.x] = second[threadIdx.x] = 0;
    __syncthreads();
    const float *begin = first; // of which UBSan does not know the length
    *x = begin[i] + second[0];
}
// Beyond a tile, or in it beyond a row: UBSan knows the length of both
__global__ void tile_overrun_kernel(float *x, int row, int column) {
    __shared__ float tile[4][5];
    tile[threadIdx.y][threadIdx.x] = 0;
    __syncthreads();
    WRONG_HERE(*x = tile[row][column]);
}
template <class T> __global__ void end_overrun_kernel(float *x, int i) {
    __shared__ T numbers[3];
    __shared__ volatile T others[3];
    numbers[threadIdx.x] = others[threadIdx.x] = 0;
    __syncthreads();
    const T *begin = numbers;
    *x = i < 0 ? begin[i + 6] : others[i];
}
static void overrun_tile(int row, int column) {
    tile_overrun_kernel<<<1, dim3(5, 4)>>>(memory(0, 1), row, column);
}
static const char *const beyond_tile = " out of bounds for type 'float [";
#endif

static const bool wrong_checks = add(wrong_programs, {
    WRONG("assert in a kernel", (OnDevice{1}, assert_kernel<<<3, dim3(5, 1)>>>(3)),
          "assert_kernel on device 1: block (",
          ",0,0), thread (4,0,0): assertion `threadIdx.x <= mo", "cudaErrorAssert"),
    WRONG("access, after cudaFree", hidden_access(1, freed(1, 10), 3),
          FAULT("hidden_kernel on device 1, in " __FILE__ ":",
                ": access to memory of device 1",
                ", byte 12 of the 40 bytes that extras/cpu/tests/tests.h:", "has freed")),
    WRONG("access, a page past the end", hidden_access(0, memory(0, 10), 1024),
          FAULT("hidden_kernel on device 0, in " __FILE__ ":",
                ": access to memory of device 0",
                ", byte 4096 of the 40 bytes that extras/cpu/tests/tests.h:", "allocated")),
    WRONG("access, through a null pointer", hidden_access(1, (float *)16, 100000),
          FAULT("hidden_kernel on device 1, in extras/cpu/",
                ": access through a null pointer: is a tensor")),
    WRONG("access, through a null pointer after a barrier", // AddressSanitizer repeats it
          FAULTS_HERE(late_kernel<<<small_only ? 1 : 9, 5>>>(16)),
          FAULT("late_kernel on device 0, in extras/cpu/",
                ": access through a null pointer: is a tensor")),
#if defined(__x86_64__) && !defined(CUDA_CPU_ASAN) && !defined(CUDA_CPU_TSAN)
#ifndef __clang__ // it loads a float4 by instructions that take any address
    WRONG("access, misaligned",
          WRONG_HERE(misaligned_kernel<<<1, 1>>>((float4 *)memory(0, 4), memory(0, 8))),
          "misaligned_kernel on device 0, in " __FILE__ ":",
          ": misaligned access (the address of a float4 ",
          "cudaErrorMisalignedAddress"),
#endif
    WRONG("division by zero", WRONG_HERE(divide_kernel<<<1, 1>>>((int *)memory(0, 1), 0)),
          "divide_kernel on device 0, in " __FILE__ ":", ": an integer is divided by zero",
          "or the least one by -1"),
#endif
    WRONG("access, by a pointer found in memory", found_in_memory(),
          FAULT("found_kernel on device 0, in " __FILE__ ":",
                ": access to memory of device 0, byte 0 of the 40 bytes that "
                "extras/cpu/tests/tests.h:",
                "through a pointer that it read from memory")),
    WRONG("access, no dynamic shared memory",
          FAULTS_HERE(dynamic_kernel<<<1, 1>>>(memory(0, 1), 3)),
          FAULT("dynamic_kernel on device 0, in " __FILE__ ":",
                ": access to byte 12 of dynamic ",
                "shared memory, but the launch asked for 0 bytes")),
    WRONG("access, beyond dynamic shared memory",
          FAULTS_HERE(dynamic_kernel<<<1, 1, 16>>>(memory(0, 1), 4)),
          FAULT(": access to byte 16 of dynamic shared memory, but the launch asked for 16 bytes")),
    WRONG("access, by the host", access_by_host(memory(1, 10)),
          FAULT("the host accesses memory of device 1, byte 8 of the 40 bytes that "
                "extras/cpu/tests/tests.h:",
                "allocated: copy it with cudaMemcpy")),
    WRONG("access, by the host after cudaFree", access_by_host(freed(1, 10)),
          FAULT("the host accesses memory of device 1, byte 8 of the 40 bytes that "
                "extras/cpu/tests/tests.h:",
                "has freed")),
    WRONG("access, by the host to a __device__ variable", FAULTS_HERE(on_each_device++),
          FAULT("on_each_device, which " __FILE__ ":", "declares as a device variable")),
    WRONG("access, by the host to memory of no device", fault_of_the_host(),
          "the program's handler"),
#if !defined(CUDA_CPU_ASAN) && !defined(CUDA_CPU_TSAN)
    WRONG("no addresses", LACKING_HERE(few_addresses("8192")),
          "cannot reserve addresses for the memory of device 0 (",
          " GB): raise ulimit -v, or set CUDA_CPU_ME"),
    WRONG("out of memory, unchecked, in a kernel", unchecked_in_kernel(),
          "assign_kernel on device 0",
          "access through a null pointer: cudaMalloc in " __FILE__ ":",
          "cudaErrorIllegalAddress"),
    WRONG("no thread", LACKING_HERE(no_thread()),
          "cannot start a thread for device 1: ", "raise ulimit -u", "CUDA_CPU_CORES=1"),
    WRONG("stack, a large array",
          WRONG_HERE(large_array_kernel<false><<<1, 1>>>(memory(0, 1), 40000)),
          "large_array_kernel<false> on device 0, in extras/cpu/",
          "do not fit into its stack of 128 KiB"),
    WRONG("stack, a large array of many threads",
          WRONG_HERE(large_array_kernel<true><<<1, 64>>>(memory(0, 1), 40000)),
          "large_array_kernel<true> on device 0, in extras/cpu/",
          "do not fit into its stack of 128 KiB"),
    WRONG("stack, endless recursion", WRONG_HERE(recursive_kernel<<<1, 1>>>((int *)memory(0, 1))),
          "recursive_kernel on device 0, in " __FILE__ ":", "is there endless recursion"),
    WRONG("access, by the host, in a function of a library",
          read_by_library(memory(1, 10)),
          "the host accesses memory of device 1, byte 0 of the 40 bytes that "
          "extras/cpu/tests/tests.h:"),
    WRONG("access, after a printed line", (printf("before\n"), access_by_host(memory(0, 10))),
          "the host accesses memory of device 0"),
    WRONG("fork after a CUDA call", forked(),
          "this process was forked after the first CUDA call", "call fork() first"),
    WRONG("fault without a handler", fault_without_handler(),
          "the host accesses memory that is not there: is an index out of range, a pointer null"),
    WRONG("host, an index beyond a list", index_beyond_list(),
          "the host aborts: is an index out of range?"),
    WRONG("host, an exception", host_throws(), "the host aborts: nobody catches the exception"),
    WRONG("host, an assertion", host_asserts(), "assertion `getpid() == 0' failed"),
    WRONG("host without an end", host_without_end(false),
          "the host has been in f, k = 2 for more than 1 s: is there an endless loop?"),
    WRONG("host without an end, at Ctrl-C", host_without_end(true),
          "the host is in f, k = 2: is there an endless loop?"),
    WRONG("Ctrl-C in nothing", interrupted_elsewhere(), "in nothing"),
    WRONG("spinning on what nobody can set", spin(),
          "spin_kernel on device 0: block (1,0,0) has been running for 1 seconds and is at ",
          "thread (3,0,0), in " __FILE__ ":",
          "No thread of its block sets the flag that it waits for: does a block that has yet to"),
    WRONG("spinning without a call", spin_silently(),
          "silent_kernel on device 0: block (0,0,0) has been running for 1 seconds",
          ", in " __FILE__ ":",
          "Does it wait for a value that another thread sets?"),
    WRONG("access, by the host, in a line that cannot be found", fault_without_line(),
          "memory of device 1, byte 0 of the 40 bytes that extras/cpu/tests/tests.h:",
          "cudaErrorIllegalAddress"),
    WRONG("access, by the host, a handler was installed before", fault_with_handlers(true),
          "byte 8 of the 40 bytes that extras/cpu/tests/tests.h:", "has freed"),
    WRONG("access, by the host, a handler is installed later", fault_with_handlers(false),
          "byte 8 of the 40 bytes that extras/cpu/tests/tests.h:", "has freed"),
#elif defined(CUDA_CPU_ASAN) // Accesses to memory that is mapped, but not theirs
#ifndef __clang__
    WRONG("memory that nothing has been written to", read_unwritten<false>(),
          "unwritten_kernel<shared> on device 0 reads byte 4 of the 12 bytes that extras/cpu/",
          "but nothing has been written there"),
    WRONG("shared memory that nothing has been written to", read_unwritten<true>(),
          "on device 0 reads shared memory (list), but nothing has been written there"),
#endif
    WRONG("access, one past the end", hidden_access(0, memory(0, 10), 10), poison),
    WRONG("access, one before the beginning", hidden_access(0, memory(0, 10), -1), poison),
    WRONG("access, one past a shared array",
          REPORTED(static_overrun_kernel<<<1, 10>>>(memory(0, 1), 10)), poison),
    WRONG("access, the last column of a shared tile, and one further", overrun_tile(1, 5),
          beyond_tile),
    WRONG("access, one row past a shared tile", overrun_tile(4, 2), beyond_tile),
    WRONG("access, one past a shared array of volatile int",
          REPORTED(end_overrun_kernel<int><<<1, 3>>>(memory(0, 1), 3)), poison),
    WRONG("access, one past a shared array of char",
          REPORTED(end_overrun_kernel<char><<<1, 3>>>(memory(0, 1), -3)), poison),
    WRONG("access, one past dynamic shared memory",
          REPORTED(dynamic_kernel<<<1, 1, 40>>>(memory(0, 1), 10)), poison),
    WRONG("access, a copy past the end of host memory",
          REPORTED(OK(cudaMemcpy(Floats(9).data(), memory(0, 10), 40, down))),
          "AddressSanitizer: heap-buffer-overflow"),
    WRONG("access, a copy past the end of pinned memory",
          REPORTED(OK(cudaMemcpy(memory(0, 10), pinned<float>(9).get(), 40, up))), poison),
#endif
});

#if !defined(CUDA_CPU_ASAN) && !defined(CUDA_CPU_TSAN)
TEST_CASE("a program that a mistake ends has printed what it printed before, also into a pipe") {
    int status = 0;
    const std::string output = output_of("access, after a printed line", status);
    CAPTURE(output);
    CHECK(output.find("before\n") != std::string::npos);
}
#endif
