// Launches: every thread of a grid runs once, and to_cpp.sed translates every spelling of a launch.
#include "tests.h"

// counts[i] += 1 for the one i that this thread is, in x fastest, blocks slowest.
template <bool barriers> __global__ void count_kernel(float *counts) {
    if (barriers) __syncthreads();
    const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    if (barriers) __syncthreads();
    const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    counts[block * (blockDim.x * blockDim.y * blockDim.z) + thread] += 1;
}

TEST_CASE("launch: every index of a grid comes once") {
    const std::pair<dim3, dim3> cases[] = {
        {dim3(1), dim3(1)},          {dim3(3, 2, 4), dim3(5, 3, 2)}, {dim3(7), dim3(1, 1, 64)},
        {dim3(2, 1, 3), dim3(1, 9)}, {dim3(1, 500), dim3(3)},        {dim3(2), dim3(1024)},
        {dim3(1), dim3(32, 32)},     {dim3(1, 1, 65535), dim3(1)},   {dim3(70000), dim3(2)}};
    for (auto [grid, block] : cases) {
        const size_t n = (size_t)grid.x * grid.y * grid.z * block.x * block.y * block.z;
        if (small_only && n > 1000) continue;
        auto counts = floats_on(0, n);
        OK(cudaMemset(counts.get(), 0, n * sizeof(float)));
        OK_LAUNCH(count_kernel<false><<<grid, block>>>(counts.get()));
        OK_LAUNCH(count_kernel<true><<<grid, block>>>(counts.get()));
        CHECK(fetch(counts, n) == Floats(n, 2));
    }
}

struct Large {
    int x[8188];
};
template <bool barriers> __global__ void large_kernel(int *sum, Large by_value) {
    int part = 0;
    if (barriers) __syncthreads();
    for (int i = threadIdx.x; i < 8188; i += blockDim.x) part += by_value.x[i];
    by_value.x[threadIdx.x] = 0; // of this thread's copy
    if (barriers) __syncthreads();
    atomicAdd(sum, part + by_value.x[threadIdx.x]);
}
TEST_CASE("launch: arguments of 32 KiB, as many as nvcc takes") {
    auto large = std::make_unique<Large>();
    for (int i = 0; i < 8188; i++) large->x[i] = i;
    auto sum = pinned<int>(1);
    *sum = 0;
    OK_LAUNCH(large_kernel<false><<<2, 64>>>(sum.get(), *large));
    OK_LAUNCH(large_kernel<true><<<1, 600>>>(sum.get(), *large));
    OK(cudaDeviceSynchronize());
    CHECK(*sum == 3 * 8187 * 8188 / 2);
}

// The compiler runs several of these threads at once, by vector instructions.
__global__ void guarded_kernel(float *y, const float *x, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] < 0 ? threadIdx.x : x[i] + 1;
}

TEST_CASE("launch: the threads of the last block that have nothing to do") {
    for (const int n : {1, 15, 100, 1023, 1024, 1500})
        for (const int threads : {1, 7, 33, 256, 1024})
            for (const bool in_place : {false, true}) {
                Floats x(n + 40), right;
                for (int i = 0; i < n + 40; i++) x[i] = i % 3 ? i : -i;
                right = x;
                for (int i = 0; i < n; i++) right[i] = x[i] < 0 ? i % threads : x[i] + 1;
                auto from = device_copy(x), to = device_copy(x);
                const float *source = in_place ? to.get() : from.get();
                const int blocks = (n + threads - 1) / threads;
                OK_LAUNCH(guarded_kernel<<<blocks, threads>>>(to.get(), source, n));
                CHECK(fetch(to, n + 40) == right);
            }
}

// Launches that extras/cpu/to_cpp.sed has to understand besides those that mgpu.cu writes.
namespace odd {
template <class Pair, int add> __global__ void pair_kernel(float *x, Pair pair) {
    x[threadIdx.x] = pair.first + pair.second + add + 10 * blockIdx.x;
}
} // namespace odd

// clang-format off
TEST_CASE("launch: in every spelling") {
    auto memory = floats_on(0, 64);
    float *x = memory.get();
    const int n = 64;
    const bool large = n > 32;
    TestStream stream;

    odd::pair_kernel<std::pair<int, float>, 5><<<1, n>>>(x, std::make_pair(1, 2.5f));
    OK(cudaGetLastError());
    CHECK(fetch(memory, n) == Floats(n, 8.5f));

    assign_kernel<<<n >> 5, 1 << 5>>>(x, 1); // as 2 blocks of 32
    CHECK(fetch(memory, n) == Floats(n, 1));
    assign_kernel<<<large ? n / 8 : 1, n < 32 ? n : 8>>>(x, 2);
    CHECK(fetch(memory, n) == Floats(n, 2));

    plus_kernel<<< // a comment may mention <<< and __shared__
        dim3(n / 16), dim3(4, 1, 1), /* shared */ 0,
        stream
    >>> (
        x,
        std::max(0.5f,
                 0.25f)
    );
    OK(cudaStreamSynchronize(stream));
    Floats want(n, 2);
    std::fill_n(want.begin(), 16, 2.5f); // 4 blocks of 4
    CHECK(fetch(memory, n) == want);

    assign_kernel<<<1, n>>>(x, 1); plus_kernel<<<1, n>>>(x, 2); plus_kernel<<<1, n>>>(x, 4);
    CHECK(fetch(memory, n) == Floats(n, 7));

    void (*kernel)(float *, float) = large ? plus_kernel : assign_kernel;
    kernel<<<1, n>>>(x, 3);
    CHECK(fetch(memory, n) == Floats(n, 10));

    if (large) assign_kernel<<<1, n>>>(x, 20);
    else assign_kernel<<<1, n>>>(x, 30);
    for (int i = 0; i < 3; i++) plus_kernel<<<1, n>>>(x, i);
    CHECK(fetch(memory, n) == Floats(n, 23));

    /* No launch: plus_kernel<<<1, n>>>, <<<
     * nor a variable: __shared__ memory, __device__ x; // and no end: */
    CHECK(std::string("data/*.gz").size() == 9); // such as data/*.gz begins no comment
    plus_kernel<<<1, n>>>(x, /* nor is this one: <<< **/ 2); //*** nor does this
    plus_kernel<<<1, n>>>(x, 4); /**/
    CHECK(fetch(memory, n) == Floats(n, 29));

    // Braces, and the spaces that some editors put between the brackets
    assign_kernel<<<dim3{2, 1}, 32>>>(x, 1);
    plus_kernel<<<dim3{dim3{2, 1}.x}, {32, 1}>>>(x, 1);
    CHECK(fetch(memory, n) == Floats(n, 2));
    plus_kernel << <1, n >> > (x, 1); plus_kernel<< <n >> 6, dim3{64}>> >(x, 2);
    CHECK(fetch(memory, n) == Floats(n, 5));
    // Pointers to kernels, in lists and members
    struct { int n; void (*run)(float *, float); } forms[] = {{1, plus_kernel}}, *p = forms;
    void (*list[])(float *, float) = {assign_kernel, plus_kernel};
    for (auto &form : forms) { form.run<<<1, n>>>(x, 1); p->run<<<1, n>>>(x, 1); }
    list[p - forms]<<<1, 32>>>(x, 7); forms[0].run<<<1, 32>>>(x, 0);
    Floats halves(n, 7);
    CHECK(fetch(memory, n) == halves);
    // Names and pointers in parentheses, template arguments over two lines or with a comparison
    (odd::pair_kernel<std::pair<int, float>, 5>)<<<1, n>>>(x, {1, 2.5f});
    CHECK(fetch(memory, n) == Floats(n, 8.5f));
    (*kernel)<<<1, n>>>(x, 1); (large ? plus_kernel : assign_kernel)<<<1, n>>>(x, 1);
    auto chosen = [](bool plus) { return plus ? plus_kernel : assign_kernel; };
    chosen(true)<<<1, n>>>(x, 1);
#define ASSIGN_TO(n) assign_kernel<<<1, n>>>
    ASSIGN_TO(n)(x, 8.5f); (*kernel)<<<1, n>>>(x, 1); chosen(true)<<<1, n>>>(x, 2);
    CHECK(fetch(memory, n) == Floats(n, 11.5f));
    const int line = __LINE__;
    odd::pair_kernel<std::pair<int, float>,
                     (5 > 4)><<<1, 32>>>(x, {1, 2.5f}); CHECK(__LINE__ == line + 2);
    std::fill_n(halves.begin(), 32, 4.5f); std::fill_n(halves.begin() + 32, 32, 11.5f);
    CHECK(fetch(memory, n) == halves);
    // No launches: << <1, 1>> >(
    CHECK(std::vector<std::vector<std::vector<int>> >(3).size() == 3);
    CHECK(std::string("a << <1, 1>> >(b)").size() == 17);

    CHECK(std::string("a<<<1, 1>>>(b)").size() == 14);
    CHECK(std::string(R"x(a<<<1, "1">>>(b) "
__shared__)x").size() == 29);
    CHECK(std::string("__shared__ float t[1];").size() == 22);
}
// clang-format on

// Arguments become what the kernel's parameters are, as in any call
__global__ void pointers_kernel(int *y, const int *x, dim3 d, int n = 7, const float *z = nullptr) {
    *y = x || z ? -1 : n + d.x + d.y;
}
template <class T> __global__ void pointers_of_kernel(T *y, const int *x, long n) {
    *y = x ? T(-1) : T(n);
}
template __global__ void pointers_of_kernel<double>(double *, const int *, long);
static inline __global__ void inline_kernel(int *y) { *y = 5; }
template <int V> __global__ void width_kernel(int *y) { *y = V; }
__global__ void __launch_bounds__(2 * (30 + 2), 1) bounded_kernel(int *y, int value = {1}) {
    y[threadIdx.x] = value;
}
TEST_CASE("launch: NULL, 0, braces and defaults as arguments") {
    auto y = device_copy(std::vector<int>(64));
    const auto run = [&](auto launch) {
        launch(y.get());
        OK(cudaGetLastError());
        return fetch(y, 1)[0];
    };
    CHECK(run([](int *y) { pointers_kernel<<<1, 1>>>(y, NULL, {2, 3}, 7, 0); }) == 12);
    CHECK(run([](int *y) { pointers_kernel<<<1, 1>>>(y, 0, 4, 'a' - 96, NULL); }) == 6);
    CHECK(run([](int *y) { pointers_kernel<<<1, 1>>>(y, 0, {2, 3}); }) == 12);
    CHECK(run([](int *y) { pointers_of_kernel<<<1, 1>>>(y, NULL, 8); }) == 8);
    CHECK(run([](int *y) { pointers_of_kernel<int><<<1, 1>>>(y, 0, 9); }) == 9);
    CHECK(run([](int *y) { inline_kernel<<<1, 1>>>(y); }) == 5);
    CHECK(run([](int *y) { bounded_kernel<<<1, 64>>>(y); }) == 1);
    auto with_width = [&](auto V) { return run([=](int *y) { width_kernel<V()><<<1, 1>>>(y); }); };
    CHECK(with_width(std::integral_constant<int, 6>()) == 6);
}

TEST_CASE("launch: arguments are copied, structs with pointers in them too") {
    auto x = floats_on(0, 8), y = floats_on(0, 8);
    auto offset = pinned<double>(1);
    TestStream stream;
    *offset = 0.5;
    assign_kernel<<<1, 8>>>(x.get(), 3);
    OK(cudaDeviceSynchronize());
    Hold hold(stream, y.get(), 0);
    Line line = {y.get(), x.get(), 2, 0, 8};
    OK_LAUNCH(line_kernel<<<1, 8, 0, stream>>>(line, offset.get(), true, 8));
    line = {nullptr, nullptr, 0, 0, 0};
    hold.release_and_wait_for(stream);
    CHECK(fetch(y, 8) == Floats(8, -6.5f));
}

namespace large {
template <class T> __global__ void shared_kernel(T *y, int n) { // y[i] = n - 1 - i
    extern __shared__ T all[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) all[i] = T(i);
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = all[n - 1 - i];
}
} // namespace large
TEST_CASE("cudaFuncSetAttribute: 64 KiB of dynamic shared memory, on one device") {
    const int n = 16 * 1024, bytes = n * sizeof(float), size = cudaDevAttrMaxThreadsPerBlock;
    const auto most = cudaFuncAttributeMaxDynamicSharedMemorySize;
    auto y = floats_on(0, n);
    const cudaError_t code = cudaErrorInvalidConfiguration;
    const std::string says =
        "large::shared_kernel<float> on device 0: the launch asks for 65536 bytes of shared "
        "memory, but a block has 49152 unless you call cudaFuncSetAttribute(large::shared_kernel<f";
    REFUSED_LAUNCH(code, large::shared_kernel<float><<<1, 8, bytes>>>(y.get(), n), says);
    OK(cudaFuncSetAttribute(large::shared_kernel<float>, most, bytes));
    OK_LAUNCH(large::shared_kernel<float><<<1, 8, bytes>>>(y.get(), n));
    const Floats got = fetch(y, n);
    for (int i = 0; i < n; i++) REQUIRE(got[i] == n - 1 - i);
    REFUSED(value, cudaFuncSetAttribute(empty_kernel, most, 300000), "300000 bytes of shared");
    float *y1 = memory(1, n);
    OnDevice current(1);
    REFUSED_LAUNCH(code, large::shared_kernel<float><<<1, 8, bytes>>>(y1, n), "on device 1: the");
    auto kernel = large::shared_kernel<float>; // it may be any
    OK(cudaFuncSetAttribute((const void *)kernel, most, bytes));
    OK_LAUNCH(large::shared_kernel<float><<<1, 8, bytes>>>(y1, n));
    int value = 0;
    OK(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, 1));
    CHECK(value >= bytes);
    OK(cudaDeviceGetAttribute(&value, cudaDeviceAttr(size), 1));
    CHECK(value == 1024);
}

// 40 KiB of static shared memory, where a kernel says so or a function that it calls
__device__ void large_function() {
    __shared__ float t[10240];
    t[threadIdx.x] = 0;
}
__global__ void large_static_kernel() {
    __shared__ float t[10240];
    t[threadIdx.x] = 0;
}
__global__ void large_caller_kernel() { large_function(); }
__global__ void explicitly_bounded_kernel() { CUDA_CPU_LAUNCH_BOUNDS(64); }
TEST_CASE("launch: static and dynamic shared memory, and __launch_bounds__, limit it at once") {
    OK_LAUNCH(large_static_kernel<<<1, 8, 8192>>>());
    OK_LAUNCH(large_caller_kernel<<<1, 8, 8192>>>());
    OK_LAUNCH(explicitly_bounded_kernel<<<1, 64>>>());
#ifndef __clang__ // which tells the kernel that they belong to only when it runs
    const cudaError_t code = cudaErrorInvalidConfiguration;
    const std::string says =
        "large_static_kernel on device 0: the launch asks for 10240 bytes of shared memory beside "
        "the kernel's 40960, but a block has 49152 unless you call cudaFuncSetAttribute(";
    REFUSED_LAUNCH(code, large_static_kernel<<<1, 8, 10240>>>(), says);
    REFUSED_LAUNCH(code, large_static_kernel<<<1, 8, 61440>>>(), "has at most 101376");
    REFUSED_LAUNCH(cudaErrorLaunchOutOfResources, explicitly_bounded_kernel<<<1, 65>>>(),
                   "65 threads, but the kernel's __launch_bounds__ allow 64");
#endif
    const auto most = cudaFuncAttributeMaxDynamicSharedMemorySize;
    OK(cudaFuncSetAttribute(large_static_kernel, most, 10240));
    OK_LAUNCH(large_static_kernel<<<1, 8, 10240>>>());
    OK(cudaFuncSetAttribute(large_static_kernel, most, 0)); // of later launches
    OK(cudaDeviceSynchronize());
}

// --- mistakes

struct Pointers {
    int n;
    float *p[2];
};
__global__ void struct_kernel(Pointers s) { *s.p[1] = s.n; }
TEST_CASE("launch: a pointer argument that is not of the device is refused") {
    const Memories m;
    float x = 0;
    REFUSED_LAUNCH(value, assign_kernel<<<1, 1>>>(&x, 1), "assign_kernel on device 0: argument 1",
                   on_host);
    Line line = {m.x0, m.y0, 2, 0, 8};
    REFUSED_LAUNCH(value, line_kernel<<<1, 8>>>(line, (double *)m.y1, false, 8),
                   "line_kernel on device 0: argument 2", on_1_not_0);
    REFUSED_LAUNCH(value, assign_kernel<<<1, 1>>>(m.freed0, 1), "argument 1",
                   "is memory of device 0 that extras/cpu/tests/tests.h:", "has freed");
    REFUSED_LAUNCH(value, assign_kernel<<<1, 1>>>(m.x0 + 100000, 1),
                   "assign_kernel on device 0: argument 1: nothing is allocated at", "on device 0");
    OnDevice current(1);
    Pointers s = {1, {m.x1, m.x0}};
    REFUSED_LAUNCH(value, struct_kernel<<<1, 1>>>(s), "struct_kernel on device 1: argument 1",
                   on_0_not_1);
    s = {1, {m.x0 + 100000, m.x1}}; // where nothing is allocated: it may be no pointer
    OK_LAUNCH(struct_kernel<<<1, 1>>>(s));
}

TEST_CASE("launch: a configuration that no GPU takes is refused") {
    const cudaError_t code = cudaErrorInvalidConfiguration;
    REFUSED_LAUNCH(code, empty_kernel<<<1, 0>>>(),
                   "empty_kernel on device 0: a block cannot have 0 x 1 x 1 threads");
    REFUSED_LAUNCH(code, empty_kernel<<<1, dim3(1, 1, 65)>>>(),
                   "a block cannot have 1 x 1 x 65 threads");
    REFUSED_LAUNCH(code, count_kernel<true><<<0, 32>>>(nullptr),
                   "count_kernel<true> on device 0: a grid cannot have 0 x 1 x 1 blocks");
    REFUSED_LAUNCH(code, empty_kernel<<<dim3(1, 65536), 1>>>(),
                   "a grid cannot have 1 x 65536 x 1 blocks");
    REFUSED_LAUNCH(code, empty_kernel<<<1 << 21, 1024>>>(),
                   "grids of 2097152 x 1024 threads in x: it takes at most 2147482623");
    REFUSED_LAUNCH(code, empty_kernel<<<1, 1, 48 * 1024 + 1>>>(),
                   "empty_kernel on device 0: the launch asks for 49153 bytes of shared memory");
    TestStream stream(1);
    REFUSED_LAUNCH(cudaErrorInvalidResourceHandle, empty_kernel<<<1, 1, 0, stream>>>(),
                   "empty_kernel: the stream belongs to device 1, but the current device is 0");
    REFUSED_LAUNCH(code, (OnDevice{1}, empty_kernel<<<1, dim3(2, 1000)>>>()),
                   "empty_kernel on device 1: a block cannot have 2 x 1000 x 1 threads");
    OK(cudaDeviceSynchronize());
}

// --- programs

template <bool barrier> __global__ void throwing_kernel(unsigned thread) {
    if (barrier) __syncthreads();
    if (threadIdx.x == thread) throws(nullptr);
}
__global__ void throwing_lane_kernel(unsigned from) {
    if (threadIdx.x < from) return;
    if (__shfl_sync(~0u << from, threadIdx.x, 7) == 7 && threadIdx.x == 6) throws(nullptr);
}
__global__ void nested_kernel() { WRONG_HERE(empty_kernel<<<1, 1>>>()); }
// A launch wakes as many cores as it has blocks for: /proc counts how often threads went to sleep.
static long sleeps() {
    long sum = 0;
    DIR *threads = opendir("/proc/self/task");
    while (const dirent *thread = readdir(threads)) {
        std::ifstream status(std::string("/proc/self/task/") + thread->d_name + "/status");
        for (std::string word; status >> word;)
            if (long n; word == "voluntary_ctxt_switches:" && status >> n) sum += n;
    }
    closedir(threads);
    return sum;
}
static void few_blocks_on_many_cores() {
    setenv("CUDA_CPU_CORES", "100", 1);
    auto x = floats_on(0, 2);
    const int launches = 50;
    OK(cudaDeviceSynchronize());
    usleep(100000); // until all threads have begun
    const long before = sleeps();
    for (int i = 0; i < launches; i++) {
        OK_LAUNCH(assign_kernel<<<2, 1>>>(x.get(), i));
        OK(cudaDeviceSynchronize());
    }
    const long mean = (sleeps() - before) / launches;
    expect(mean < 20, "threads that slept for each launch", mean);
}

static const bool right_launches = add(right_programs, {
    {"few blocks on many cores", few_blocks_on_many_cores},
});
static const bool wrong_launches = add(wrong_programs, {
    WRONG("kernel that throws, thread 0", WRONG_HERE(throwing_kernel<false><<<1, 5>>>(0)),
          "throwing_kernel<false> on device 0: uncaught exception: beyond the end"),
    WRONG("kernel that throws, thread 3", WRONG_HERE(throwing_kernel<false><<<9, 5>>>(3)),
          "throwing_kernel<false> on device 0: uncaught exception: beyond the end"),
    WRONG("kernel that throws after a barrier", WRONG_HERE(throwing_kernel<true><<<1, 5>>>(3)),
          "throwing_kernel<true> on device 0: uncaught exception: beyond the end"),
    WRONG("kernel that throws after a shuffle", WRONG_HERE(throwing_lane_kernel<<<1, 32>>>(0)),
          "throwing_lane_kernel on device 0: uncaught exception: beyond the end"),
    WRONG("kernel that throws after a shuffle, thread 0 not", // thread 6 calls it in the plain loop
          WRONG_HERE(throwing_lane_kernel<<<1, 32>>>(6)),
          "throwing_lane_kernel on device 0: uncaught exception: beyond the end"),
    WRONG("more threads than __launch_bounds__ allow",
          WRONG_HERE(bounded_kernel<<<1, 65>>>((int *)memory(0, 65))),
          "bounded_kernel on device 0: a block has 65 threads, but the kernel's __launch_bounds__ ",
          "allow 64", "cudaErrorLaunchOutOfResources"),
    WRONG("more shared memory than a block has, in a function",
          WRONG_HERE(large_caller_kernel<<<1, 8, 10240>>>()),
          "large_caller_kernel on device 0: the kernel has 40960 bytes of static and 10240 of ",
          "dynamic shared memory, but a block has at most 49152", "cudaErrorInvalidConfiguration"),
    WRONG("kernel that launches a kernel", nested_kernel<<<1, 1>>>(),
          "nested_kernel on device 0 launches a kernel", "lacks dynamic parallelism"),
});
