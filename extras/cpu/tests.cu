// Tests of cuda_runtime.h, the CUDA runtime without a GPU: does it do what CUDA promises, and does
// it name the mistakes that it promises to name? mgpu.cu takes no part in them.
//
//     make test T='-tc=cuda*'         the tests of the runtime's functions
//     make asan, make race            the same under AddressSanitizer and ThreadSanitizer
//
//   1. Kernels and launches
//   2. Streams, events, copies
//   3. Memory
//   4. Devices and errors
//   5. Mistakes
//   6. Programs, right and wrong
//   7. Races
//   8. Students' programs

#include "cuda_runtime.h"
#include "./cuda/checks.h" // "cuda/...": to_cpp.sed takes that for one of CUDA's
#include "./cuda/queues.h"
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

#ifndef DOCTEST_LINKED
#define DOCTEST_CONFIG_IMPLEMENT
#endif
#include "doctest.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <fstream>
#include <numeric>
#include <sstream>
#include <stdexcept>

#include <dirent.h>
#include <sys/resource.h>
#include <sys/wait.h>

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

// ---------------------------------------------------------------------------------------------
// 1. Kernels and launches
// Every thread of a grid runs once, barriers and shared memory belong to a block, and
// extras/cpu/to_cpp.sed translates every spelling of a launch.

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

// y of each block: x of that block, reversed, plus what a table says. Two arrays in static shared
// memory and one in dynamic shared memory must not meet.
template <class T, int N> __global__ void reverse_kernel(T *y, const T *x) {
    __shared__ T tile[N];
    __shared__ int table[2][N / 2];
    extern __shared__ T dynamic[];
    const int t = threadIdx.x;
    tile[t] = x[blockIdx.x * N + t];
    table[t % 2][t / 2] = t;
    dynamic[N - 1 - t] = T(0.5);
    __syncthreads();
    dynamic[t] += tile[N - 1 - t];
    __syncthreads();
    y[blockIdx.x * N + t] = dynamic[t] + table[t % 2][t / 2];
}
template <class T, int N> static void test_reverse(int blocks) {
    std::vector<T> x(blocks * N), want(blocks * N);
    for (size_t i = 0; i < x.size(); i++) x[i] = i * i % 101;
    for (int i = 0; i < blocks * N; i++) want[i] = x[i / N * N + N - 1 - i % N] + T(0.5) + i % N;
    auto X = device_copy(x), y = device_copy(x);
    OK_LAUNCH(reverse_kernel<T, N><<<blocks, N, N * sizeof(T)>>>(y.get(), X.get()));
    CHECK(fetch(y, x.size()) == want);
}
TEST_CASE("__shared__: static and dynamic shared memory") {
    test_reverse<float, 2>(3);
    test_reverse<float, 64>(5);
    test_reverse<double, 64>(5);
    if (!small_only) test_reverse<float, 1024>(200);
}

// Spellings of declarations: y[t] = 31 - t + 3
__device__ __constant__ __align__(16) float three[2] = {0, 3};
__device__ __noinline__ float third(const volatile float *x) { return x[2]; }
template <class T> __global__ void specifiers_kernel(T *y) {
    static __shared__ volatile T a[32], b[32];
    volatile __shared__ __align__(sizeof(float4)) T c[32];
    extern __shared__ __align__(16) unsigned char bytes[];
    const int t = threadIdx.x;
    a[t] = b[t] = ((T *)bytes)[t] = t;
    c[t] = three[1];
    __syncthreads();
    y[t] = a[31 - t] + b[31 - t] - ((T *)bytes)[31 - t] + third(c);
}
TEST_CASE("__shared__, __constant__: in every spelling") {
    auto y = floats_on(0, 32);
    OK_LAUNCH(specifiers_kernel<<<1, 32, 32 * one_float>>>(y.get()));
    Floats want(32);
    for (int i = 0; i < 32; i++) want[i] = 34 - i;
    CHECK(fetch(y, 32) == want);
}

// The block's sum. The first barrier lets all threads read the sum of the call before.
__device__ float shared_sum(float x) {
    __shared__ float part[32];
    __syncthreads();
    part[threadIdx.x] = x;
    for (int width = 16; width > 0; width /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < width) part[threadIdx.x] += part[threadIdx.x + width];
    }
    __syncthreads();
    return part[0];
}
__global__ void two_sums_kernel(float *y) {
    const float sum = shared_sum(1);
    y[blockIdx.x * 32 + threadIdx.x] = sum + shared_sum(blockIdx.x);
}
TEST_CASE("__shared__: a function's array is kept from call to call") {
    auto y = floats_on(0, 64);
    OK_LAUNCH(two_sums_kernel<<<2, 32>>>(y.get()));
    Floats want(64, 32);
    std::fill_n(want.begin() + 32, 32, 64.f);
    CHECK(fetch(y, 64) == want);
}

// sums[b] = the sum of block b's part of x, by a tree whose loop meets log2(threads) barriers
__global__ void tree_kernel(float *sums, const float *x) {
    extern __shared__ float part[];
    const int t = threadIdx.x;
    part[t] = x[blockIdx.x * blockDim.x + t];
    for (int width = blockDim.x / 2; width > 0; width /= 2) {
        __syncthreads();
        if (t < width) part[t] += part[t + width];
    }
    if (t == 0) sums[blockIdx.x] = part[0];
}
// As many barriers as the block's number says, in a function that the kernel calls:
// x[b] = b * threads.
__device__ void add_up(float *x, int turn) {
    if ((int)threadIdx.x == turn % (int)blockDim.x) *x += blockDim.x;
    __syncthreads();
}
__global__ void turns_kernel(float *x) {
    if (threadIdx.x == 0) x[blockIdx.x] = 0;
    __syncthreads();
    for (unsigned turn = 0; turn < blockIdx.x; turn++) add_up(&x[blockIdx.x], turn);
}
TEST_CASE("__syncthreads: barriers in loops") {
    for (int threads : {1, 2, 64, 1024}) {
        const int blocks = small_only ? 3 : 37, n = blocks * threads;
        if (small_only && threads > 64) continue;
        Floats numbers(n), want(blocks), turns(blocks);
        for (int i = 0; i < n; i++) // sums below 2^24: exact
            want[i / threads] += numbers[i] = i * 7 % 1000;
        for (int b = 0; b < blocks; b++) turns[b] = b * threads;
        auto x = device_copy(numbers), sums = floats_on(0, blocks);
        OK_LAUNCH(tree_kernel<<<blocks, threads, threads * sizeof(float)>>>(sums.get(), x.get()));
        CHECK(fetch(sums, blocks) == want);
        OK_LAUNCH(turns_kernel<<<blocks, threads>>>(sums.get()));
        CHECK(fetch(sums, blocks) == turns);
    }
}

// Of a warp's values v[0..31], in the words of CUDA's manual: what lane l gets by __shfl_sync, _up,
// _down and _xor, in this order, by `delta` among `width` neighbours.
template <class T> static std::array<T, 4> shuffled(const T *v, int l, int delta, int width) {
    const int first = l / width * width, end = first + width;
    return {v[first + delta % width], v[l - delta < first ? l : l - delta],
            v[l + delta >= end ? l : l + delta], v[(l ^ delta) >= end ? l : l ^ delta]};
}
template <class T> __global__ void shuffle_kernel(T *y, const T *v, int delta, int width) {
    const int t = threadIdx.x;
    y[4 * t] = __shfl_sync(~0u, v[t], delta, width);
    y[4 * t + 1] = __shfl_up_sync(~0u, v[t], delta, width);
    y[4 * t + 2] = __shfl_down_sync(~0u, v[t], delta, width);
    y[4 * t + 3] = __shfl_xor_sync(~0u, v[t], delta, width);
}
template <class T> static void test_shuffles() {
    auto v = pinned<T>(64), y = pinned<T>(4 * 64);
    for (int t = 0; t < 64; t++) // the upper bytes differ, and so do the lower ones
        v.get()[t] = T(t + 1) * T(sizeof(T) == 8 ? 1ll << 33 : 1 << 9) + T(t);
    for (int width = 1; width <= 32; width *= 2)
        for (int delta = 0; delta < 32; delta += small_only ? 7 : 1) {
            OK_LAUNCH(shuffle_kernel<T><<<1, 64>>>(y.get(), v.get(), delta, width));
            OK(cudaDeviceSynchronize());
            for (int t = 0; t < 64; t++) {
                const T *warp = v.get() + t / 32 * 32;
                const auto want = shuffled(warp, t % 32, delta, width);
                REQUIRE(std::equal(want.begin(), want.end(), y.get() + 4 * t));
            }
        }
}
TEST_CASE("__shfl_sync, _up, _down, _xor: every width and distance, numbers of 4 and 8 bytes") {
    test_shuffles<int>();
    test_shuffles<unsigned>();
    test_shuffles<long long>();
    test_shuffles<float>();
    test_shuffles<double>();
}

// What a lane gets from one that takes no part: from behind the block's end, or outside the mask
__global__ void no_part_kernel(float *y, int *n) {
    y[threadIdx.x] = __shfl_down_sync(~0u, 1.0f, 1);
    if (threadIdx.x < 4) n[threadIdx.x] = __shfl_xor_sync(0xf, 5, threadIdx.x == 1 ? 4 : 2);
}
TEST_CASE("__shfl_sync: the value of a lane that takes no part is NaN, or -1") {
    auto y = floats_on(0, 8);
    auto n = pinned<int>(4);
    OK_LAUNCH(no_part_kernel<<<1, 8>>>(y.get(), n.get()));
    const Floats got = fetch(y, 8);
    CHECK(Floats(got.begin(), got.begin() + 7) == Floats(7, 1));
    CHECK(std::isnan(got[7]));
    CHECK(std::vector<int>(n.get(), n.get() + 4) == std::vector<int>{5, -1, 5, 5});
}

// sums[b] = the sum of block b's part of x: in each warp, then over the warps' sums.
__global__ void warps_kernel(float *sums, const float *x) {
    __shared__ float parts[32];
    const int t = threadIdx.x, warps = blockDim.x / warpSize;
    float sum = x[blockIdx.x * blockDim.x + t];
    for (int half = warpSize / 2; half > 0; half /= 2) sum += __shfl_down_sync(~0u, sum, half);
    if (t % warpSize == 0) parts[t / warpSize] = sum;
    __syncthreads();
    if (t >= warpSize) return;
    sum = t < warps ? parts[t] : 0;
    for (int bit = 1; bit < warpSize; bit *= 2) sum += __shfl_xor_sync(~0u, sum, bit);
    if (t == 31) sums[blockIdx.x] = sum;
}
// The same for a warp by a tree in shared memory, with its root at lane 0, or mirrored at lane 31
template <bool synced> __global__ void warp_tree_kernel(float *sums, const float *x, bool mirror) {
    __shared__ float part[32];
    const int t = threadIdx.x, l = mirror ? 31 - t : t;
    part[l] = x[blockIdx.x * 32 + t];
    for (int half = 16; half > 0; half /= 2) {
        if (synced) __syncwarp();
        if (l < half) part[l] += part[l + half];
    }
    if (l == 0) sums[blockIdx.x] = part[0];
}
static void test_warp_sums() {
    for (int threads : {32, 64, 1024}) {
        const int blocks = small_only ? 3 : 37, n = blocks * threads;
        Floats numbers(n), want(blocks);
        for (int i = 0; i < n; i++) want[i / threads] += numbers[i] = i * 7 % 1000;
        auto x = device_copy(numbers), sums = floats_on(0, blocks);
        OK_LAUNCH(warps_kernel<<<blocks, threads>>>(sums.get(), x.get()));
        if (fetch(sums, blocks) != want) throw std::runtime_error("wrong sums over warps");
        for (bool mirror : {false, true}) {
            if (threads > 32) continue;
            OK_LAUNCH(warp_tree_kernel<true><<<blocks, 32>>>(sums.get(), x.get(), mirror));
            if (fetch(sums, blocks) != want) throw std::runtime_error("wrong sums by a tree");
        }
    }
}
TEST_CASE("__shfl_sync, __syncwarp: sums over warps and blocks") { test_warp_sums(); }

// Each thread runs once, whoever is the first to call a warp function: thread 0, a thread of the
// plain loop, or one that takes turns with thread 0. y[t] += ... shows who came twice.
enum First { thread_0, in_plain_loop, after_barrier, before_barrier };
__global__ void first_kernel(unsigned *y, First first) {
    const unsigned t = threadIdx.x, only = first == thread_0 ? 0 : first == in_plain_loop ? 5 : 37;
    const unsigned mask = t / 32 == only / 32 ? ~0u << only % 32 : ~0u;
    __shared__ unsigned parts[80];
    if (first == after_barrier || first == before_barrier) {
        parts[79 - t] = t;
        __syncthreads();
        y[t] += parts[t] == 79 - t ? 1000000 : 0;
    }
    if (t >= only) {
        y[t] += __shfl_sync(mask, t, 31);
        y[t] += 100 * __popc(__ballot_sync(mask, t % 2));
        __syncwarp(mask);
        y[t] += __any_sync(mask, t == 70) * 10000 + __all_sync(mask, t >= 64) * 20000;
    }
    if (first == before_barrier) {
        y[t] += 100000 * __syncthreads_count(t < 3);
        y[t] += 2000000 * __syncthreads_and(t < 80) + 4000000 * __syncthreads_or(t == 79);
    }
}
static void test_first() {
    for (First first : {thread_0, in_plain_loop, after_barrier, before_barrier}) {
        const bool barriers = first == after_barrier || first == before_barrier;
        const unsigned only = first == thread_0 ? 0 : first == in_plain_loop ? 5 : 37;
        auto y = pinned<unsigned>(80);
        OK_LAUNCH(first_kernel<<<1, 80>>>(y.get(), first));
        OK(cudaDeviceSynchronize());
        for (unsigned t = 0; t < 80; t++) {
            unsigned odd = 0, want = barriers ? 1000000 : 0;
            for (unsigned l = std::max(only, t / 32 * 32); l < std::min(80u, t / 32 * 32 + 32); l++)
                odd += l % 2;
            if (t >= only) // lane 31 of the last warp does not exist
                want += (t < 64 ? t / 32 * 32 + 31 : ~0u) + 100 * odd + (t >= 64) * 30000;
            if (first == before_barrier) want += 300000 + 6000000;
            expect(y.get()[t] == want, "first_kernel, a thread's result", y.get()[t]);
        }
    }
}
TEST_CASE("warp functions: whichever thread of a block is the first to call one") { test_first(); }

// Takes the x that are odd, in any order: lanes in a branch choose a leader that makes room.
__global__ void filter_kernel(int *taken, int *count, const int *x) {
    const int value = x[threadIdx.x], lane = threadIdx.x % warpSize;
    if (value % 2 == 0) return;
    const unsigned lanes = __activemask();
    const int leader = __ffs(lanes) - 1;
    int at = 0;
    if (lane == leader) at = __atomic_fetch_add(count, __popc(lanes), __ATOMIC_RELAXED);
    at = __shfl_sync(lanes, at, leader) + __popc(lanes & ((1u << lane) - 1));
    taken[at] = value;
}
static void test_filter() {
    auto taken = pinned<int>(70), count = pinned<int>(1), x = pinned<int>(70);
    std::vector<int> want;
    for (int i = 0; i < 70; i++) {
        x.get()[i] = i < 33 ? 2 * i : i * i % 101;
        if (x.get()[i] % 2) want.push_back(x.get()[i]);
    }
    OK_LAUNCH(filter_kernel<<<1, 70>>>(taken.get(), count.get(), x.get()));
    OK(cudaDeviceSynchronize());
    expect(*count == (int)want.size(), "numbers taken", *count);
    std::vector<int> got(taken.get(), taken.get() + *count);
    std::sort(got.begin(), got.end());
    std::sort(want.begin(), want.end());
    expect(got == want, "the sum of what was taken", std::accumulate(got.begin(), got.end(), 0));
}
TEST_CASE("__activemask: the lanes of a branch") { test_filter(); }

TEST_CASE("__popc, __ffs, __clz") {
    CHECK(__popc(0xf0f0u) == 8);
    CHECK(__popcll(~0ull) == 64);
    CHECK(__ffs(0) == 0);
    CHECK(__ffs(24) == 4);
    CHECK(__ffsll(1ll << 40) == 41);
    CHECK(__clz(0) == 32);
    CHECK(__clz(-1) == 0);
    CHECK(__clzll(1) == 63);
    CHECK(__clzll(0) == 64);
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
    // No launches: << <1, 1>> >(
    CHECK(std::vector<std::vector<std::vector<int>> >(3).size() == 3);
    CHECK(std::string("a << <1, 1>> >(b)").size() == 17);

    CHECK(std::string("a<<<1, 1>>>(b)").size() == 14);
    CHECK(std::string("__shared__ float t[1];").size() == 22);
}
// clang-format on

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

// The host cannot access the address that it holds; a kernel gets where the memory is.
__global__ void follow_kernel(float **list, int n, float value) {
    for (int i = 0; i < n; i++) *list[i] = value + i;
}
__device__ float *target;
__global__ void target_kernel(float value) { *target = value; }
TEST_CASE("launch: an int in a struct, and what lies behind it, is no address") {
    for (size_t range : {0x7f0000000000, 0x7f0000001000, 0x7f0040000000, 0x7f00fffff000}) {
        const size_t first = (size_t)cuda_cpu::first_address((void *)range, size_t(1) << 34);
        CHECK((first >= range && first < range + (size_t(1) << 32)));
        CHECK(uint32_t(first) == 1u << 30);
    }
    float *first = nullptr;
    CHECK(cudaMalloc(&first, sizeof(float)) == cudaSuccess);
    CHECK(uint32_t((uintptr_t)first) >= 1u << 30);
    cudaFree(first);
}

TEST_CASE("launch: pointers in an array of pointers, or in a variable, are followed too") {
    auto x = floats_on(0, 1), y = floats_on(0, 1);
    const std::vector<float *> pointers = {x.get(), y.get()};
    auto list = device_copy(pointers);
    OK_LAUNCH(follow_kernel<<<1, 1>>>(list.get(), 2, 3));
    CHECK(values(x, y) == "3 4");
    CHECK(fetch(list, 2) == pointers);
    OK(cudaMemcpyAsync(list.get(), &pointers[1], sizeof pointers[1], up));
    OK_LAUNCH(follow_kernel<<<1, 1>>>(list.get(), 2, 5));
    CHECK(values(x, y) == "3 6");
    OK(cudaMemcpyToSymbol(target, &pointers[0], sizeof target));
    OK_LAUNCH(target_kernel<<<1, 1>>>(7));
    CHECK(values(x, y) == "7 6");
    float *back = nullptr;
    OK(cudaMemcpyFromSymbol(&back, target, sizeof target));
    CHECK(back == pointers[0]);
}

// ---------------------------------------------------------------------------------------------
// 2. Streams, events, copies
// Work of different streams runs at the same time, except where CUDA makes it wait.

TEST_CASE("stream: keeps its order") {
    const int n = small_only ? 1100 : 3000; // more than a queue holds: the host waits for room
    auto x = floats_on(0, 1), y = floats_on(0, 1);
    TestStream stream;
    assign_kernel<<<1, 1, 0, stream>>>(x.get(), 0);
    for (int i = 0; i < n; i++) {
        plus_kernel<<<1, 1, 0, stream>>>(x.get(), 1);
        OK(cudaMemcpyAsync(y.get(), x.get(), one_float, within, stream));
        std::swap(x, y);
    }
    OK(cudaStreamSynchronize(stream));
    CHECK(values(x, y) == std::to_string(n) + " " + std::to_string(n));
}

TEST_CASE("cudaLaunchHostFunc: runs in the stream's order, while the host goes on") {
    auto x = floats_on(0, 1);
    auto host = pinned<float>(2);
    TestStream stream;
    Hold hold(stream, x.get());
    OK(cudaMemcpyAsync(&host.get()[0], x.get(), one_float, down, stream));
    auto add_2 = [](void *p) { ((float *)p)[1] = ((float *)p)[0] + 2; };
    OK(cudaLaunchHostFunc(stream, add_2, host.get()));
    OK(cudaMemcpyAsync(x.get(), &host.get()[1], one_float, up, stream));
    hold.release_and_wait_for(stream);
    CHECK(values(x) == "7");
}

__global__ void meet_kernel(int *mine, const int *other, float *x) {
    __atomic_store_n(mine, 1, __ATOMIC_RELAXED);
    hold_kernel(other, x, 1);
}
TEST_CASE("stream: the host, streams and devices run at the same time") {
    auto x = floats_on(0, 1), y = floats_on(0, 1), z = floats_on(1, 1), w = floats_on(1, 1);
    TestStream a, b, c(1);
    TestEvent held;
    Hold hold(a, x.get());
    OK(cudaEventRecord(held, a));
    // A copy beside a kernel on one device, and work on another device
    OK(cudaMemsetAsync(y.get(), 0, one_float, b));
    OK(cudaStreamSynchronize(b));
    OnDevice{1}, assign_kernel<<<1, 1, 0, c>>>(z.get(), 7);
    OK(cudaStreamSynchronize(c));
    CHECK(cudaEventQuery(held) == cudaErrorNotReady);
    hold.release_and_wait_for(a);
    OK(cudaEventQuery(held));
    CHECK(values(x, y, z) == "5 0 7");
    // Kernels of two devices that each wait for the other to have begun
    auto flags = pinned<int>(2);
    meet_kernel<<<1, 1, 0, a>>>(&flags.get()[0], &flags.get()[1], y.get());
    OnDevice{1}, meet_kernel<<<1, 1, 0, c>>>(&flags.get()[1], &flags.get()[0], w.get());
    OK(cudaStreamSynchronize(c));
    OK(cudaStreamSynchronize(a));
    CHECK(values(y, w) == "1 1");
}

TEST_CASE("cudaStreamWaitEvent: events order streams and devices") {
    auto x = floats_on(0, 1), y = floats_on(0, 1), z = floats_on(1, 1);
    TestStream a, b, c(1);
    TestEvent ready_a, ready_b, ready_c(1);
    Hold hold(a, x.get());
    OK(cudaEventRecord(ready_a, a));
    OK(cudaStreamWaitEvent(b, ready_a));
    OK(cudaMemcpyAsync(y.get(), x.get(), one_float, within, b));
    OK(cudaEventRecord(ready_b, b));
    OK(cudaStreamWaitEvent(c, ready_a, 0));
    OK(cudaMemcpyPeerAsync(z.get(), 1, x.get(), 0, one_float, c));
    OK(cudaEventRecord(ready_c, c));
    OK(cudaStreamWaitEvent(a, ready_b));
    OK(cudaStreamWaitEvent(a, ready_c));
    assign_kernel<<<1, 1, 0, a>>>(x.get(), 6); // after both copies
    hold.release_later();
    OK(cudaEventSynchronize(ready_c));
    OK(cudaStreamSynchronize(a));
    OK(cudaStreamSynchronize(b));
    CHECK(values(x, y, z) == "6 5 5");
}

TEST_CASE("cudaEventRecord: an event stands for its last record before the wait") {
    auto x = floats_on(0, 1), y = floats_on(0, 1);
    TestStream a, b;
    TestEvent event;
    OK(cudaEventQuery(event)); // one that was never recorded holds nobody up
    OK(cudaEventSynchronize(event));
    OK(cudaStreamWaitEvent(b, event));
    OK(cudaStreamSynchronize(b));
    OK(cudaEventRecord(event, a));
    OK(cudaStreamWaitEvent(b, event));
    Hold hold(a, x.get(), 1);
    OK(cudaEventRecord(event, a)); // the wait above is for the earlier record
    OK(cudaMemsetAsync(y.get(), 0, one_float, b));
    OK(cudaStreamSynchronize(b));
    CHECK(cudaEventQuery(event) == cudaErrorNotReady);
    hold.release_later();
    OK(cudaEventSynchronize(event));
    OK(cudaEventQuery(event));
    CHECK(values(x) == "1");
}

TEST_CASE("cudaEventElapsedTime: milliseconds, or why there are none") {
    auto x = floats_on(0, 1);
    TestStream a;
    TestEvent begin, end, untimed(0, cudaEventDisableTiming);
    float milliseconds = -1;
    CHECK(cudaEventElapsedTime(&milliseconds, begin, end) == cudaErrorInvalidResourceHandle);
    CHECK(cudaGetLastError() == cudaErrorInvalidResourceHandle);
    OK(cudaEventRecord(begin, a));
    Hold hold(a, x.get(), 1);
    OK(cudaEventRecord(end, a));
    OK(cudaEventRecord(untimed, a));
    OK(cudaEventSynchronize(begin));
    CHECK(cudaEventElapsedTime(&milliseconds, begin, end) == cudaErrorNotReady);
    hold.release_later(); // at least 20 ms after `begin` was reached
    OK(cudaEventSynchronize(end));
    OK(cudaEventElapsedTime(&milliseconds, begin, end));
    CHECK(milliseconds >= 20);
    CHECK(milliseconds < 10000);
    CHECK(cudaEventElapsedTime(&milliseconds, begin, untimed) == cudaErrorInvalidResourceHandle);
    CHECK(cudaGetLastError() == cudaErrorInvalidResourceHandle);
}

TEST_CASE("stream: the default stream and the others wait for each other") {
    TestStream blocking(0, cudaStreamDefault), free(0, cudaStreamNonBlocking);
    for (bool default_first : {false, true}) {
        CAPTURE(default_first);
        auto x = floats_on(0, 1), y = floats_on(0, 1), z = floats_on(0, 1);
        const cudaStream_t first = default_first ? nullptr : blocking.stream,
                           second = default_first ? blocking.stream : nullptr;
        Hold hold(first, x.get());
        OK(cudaMemcpyAsync(y.get(), x.get(), one_float, within, second));
        OK(cudaMemsetAsync(z.get(), 0, one_float, free)); // for which neither of them matters
        OK(cudaStreamSynchronize(free));
        hold.release_and_wait_for(second);
        CHECK(values(x, y, z) == "5 5 0");
    }
}

TEST_CASE("cudaStreamWaitEvent: what the default stream waits for, the others wait for, too") {
    auto x = floats_on(0, 1), y = floats_on(0, 1);
    TestStream blocking(0, cudaStreamDefault), free;
    TestEvent event;
    Hold hold(free, x.get());
    OK(cudaEventRecord(event, free));
    OK(cudaStreamWaitEvent(nullptr, event));
    OK(cudaMemcpyAsync(y.get(), x.get(), one_float, within, blocking));
    hold.release_and_wait_for(blocking);
    CHECK(values(y) == "5");
}

TEST_CASE("cudaMemcpyPeer: is ordered with all of both devices, and the host goes on") {
    auto x = floats_on(0, 1), y = floats_on(1, 1), z = floats_on(1, 1), w = floats_on(0, 1);
    TestStream a(0), b(1);
    SUBCASE("after the source's work, before what follows on either") {
        Hold hold(a, x.get());
        OK(cudaMemcpyPeer(y.get(), 1, x.get(), 0, one_float));
        OK(cudaMemcpyAsync(z.get(), y.get(), one_float, within, b));
        assign_kernel<<<1, 1, 0, a>>>(x.get(), 6);
        hold.release_and_wait_for(a, b);
        CHECK(values(x, y, z) == "6 5 5");
    }
    SUBCASE("after the target's work") {
        assign_kernel<<<1, 1, 0, a>>>(x.get(), 5);
        Hold hold(b, y.get(), 6, 1);
        OK(cudaMemcpyPeer(y.get(), 1, x.get(), 0, one_float));
        OK(cudaMemcpyAsync(w.get(), x.get(), one_float, within, a));
        assign_kernel<<<1, 1, 0, a>>>(x.get(), 7); // has to wait for the copy, and it for device 1
        hold.release_and_wait_for(a, b);
        CHECK(values(y, w, x) == "5 5 7");
    }
}

TEST_CASE("cudaMemcpy between devices: the addresses say which, in the order of cudaMemcpyPeer") {
    TestStream a(0), b(1);
    for (cudaMemcpyKind kind : {within, cudaMemcpyDefault})
        for (int current : {0, 1}) {
            auto x = floats_on(0, 1), y = floats_on(1, 1), z = floats_on(1, 1);
            Hold hold(a, x.get());
            OnDevice set(current);
            OK(cudaMemcpy(y.get(), x.get(), one_float, kind));
            OK(cudaMemcpyAsync(z.get(), y.get(), one_float, kind, b));
            OK(cudaSetDevice(0));
            assign_kernel<<<1, 1, 0, a>>>(x.get(), 6);
            hold.release_and_wait_for(a, b);
            OK(cudaMemcpyAsync(x.get(), z.get(), one_float, kind, a)); // any device's stream
            OK(cudaStreamSynchronize(a));
            CHECK(values(x, y, z) == "5 5 5");
        }
    Floats got(4);
    auto X = device_copy(Floats{1, 2, 3, 4}, 0), Y = device_copy(Floats{5, 6, 7, 8}, 1);
    OK(cudaMemcpy2D(Y.get(), 8, X.get(), 8, 4, 2, cudaMemcpyDefault));
    CHECK(fetch(Y, 4) == Floats{1, 6, 3, 8});
}

TEST_CASE("pinned memory: a device's address, too") {
    auto x = device_copy(Floats{1, 2}), fixed = pinned<float>(2), other = pinned<float>(2);
    Floats host = {7, 8};
    OK(cudaMemset(fixed.get(), 0xFF, one_float));
    OK(cudaDeviceSynchronize());
    CHECK(std::isnan(fixed.get()[0]));
    CHECK(fixed.get()[1] == 0);
    OK(cudaMemcpy(fixed.get(), host.data(), 2 * one_float, up));
    CHECK(fixed.get()[1] == 8);
    OK(cudaMemcpy(x.get(), fixed.get(), one_float, within));
    OK(cudaMemcpyAsync(other.get(), x.get(), 2 * one_float, within));
    OK(cudaMemcpy(host.data(), other.get(), 2 * one_float, down));
    CHECK(host == Floats{7, 2});
}

TEST_CASE("cudaStreamQuery: whether all is done") {
    auto x = floats_on(0, 1);
    TestStream a;
    OK(cudaStreamQuery(a));
    Hold hold(a, x.get());
    CHECK(cudaStreamQuery(a) == cudaErrorNotReady);
    hold.release_and_wait_for(a);
    OK(cudaStreamQuery(a));
    CHECK(values(x) == "5");
}

TEST_CASE("cudaMemcpyAsync: pageable memory is free after it, pinned memory is copied later") {
    auto x = floats_on(0, 2), y = floats_on(0, 1);
    auto fixed = pinned<float>(2);
    Floats host = {1, 2};
    TestStream a;
    TestEvent event;
    Hold hold(a, y.get());
    OK(cudaMemcpyAsync(x.get(), host.data(), 2 * one_float, up, a));
    host = {3, 4};
    OK(cudaMemcpyAsync(fixed.get(), x.get(), 2 * one_float, down, a));
    OK(cudaEventRecord(event, a));
    CHECK(cudaEventQuery(event) == cudaErrorNotReady);
    hold.release_later();
    OK(cudaEventSynchronize(event));
    CHECK(Floats(fixed.get(), fixed.get() + 2) == Floats{1, 2});
    // To pageable memory the call waits; from pinned memory it need not, and the host must
    fixed.get()[0] = 8;
    OK(cudaMemcpyAsync(x.get(), fixed.get(), one_float, up, a));
    OK(cudaMemcpyAsync(host.data(), x.get(), 2 * one_float, down, a));
    CHECK(host == Floats{8, 2});
    OK(cudaMemcpy(host.data(), fixed.get(), one_float, cudaMemcpyHostToHost));
    CHECK(host == Floats{8, 2});
    OK(cudaMemcpy(nullptr, nullptr, 0, up)); // nothing to copy is no mistake
}

TEST_CASE("cudaFree, cudaStreamDestroy: wait for the device") {
    auto x = floats_on(0, 1);
    TestEvent event;
    for (bool destroy : {false, true}) {
        auto y = floats_on(0, 1);
        auto a = std::make_unique<TestStream>();
        Hold hold(*a, x.get());
        OK(cudaEventRecord(event, *a));
        std::thread release([&] { hold.release_later(); });
        if (destroy) a.reset();
        else y.reset();
        CHECK(cudaEventQuery(event) == cudaSuccess);
        release.join();
        CHECK(values(x) == "5");
    }
}

TEST_CASE("stream: 1024 tasks fit its queue, then the host waits") {
    auto x = floats_on(0, 1);
    TestStream a;
    Hold hold(a, x.get());
    auto fill = [&](int n) {
        for (int i = 0; i < n; i++) OK(cudaMemsetAsync(x.get(), 0, one_float, a));
    };
    fill(1000);
    CHECK(*hold.go == 0); // up to here nobody waits
    std::thread release([&] { hold.release_later(); });
    fill(100);
    CHECK(__atomic_load_n(hold.go.get(), __ATOMIC_RELAXED) == 1);
    release.join();
    OK(cudaStreamSynchronize(a));
}

TEST_CASE("stream: a host that waits for its queue is not woken by each task") {
    const int n = 1 << 16;
    auto x = floats_on(0, n);
    auto switches = [] {
        rusage usage;
        getrusage(RUSAGE_THREAD, &usage);
        return usage.ru_nvcsw;
    };
    const long before = switches();
    for (int i = 0; i < 5000; i++) OK(cudaMemsetAsync(x.get(), 0, n * one_float));
    CHECK(switches() - before < 300);
    OK(cudaDeviceSynchronize());
}

// ---------------------------------------------------------------------------------------------
// 3. Memory
// Every device counts the memory it allocates, and memory is NaN until it is written.

__global__ void fresh_kernel(float *nan) { // counts the NaN that it finds, and leaves none
    __shared__ float fixed[50];
    extern __shared__ float dynamic[];
    if (threadIdx.x == 0) {
        int count = 0;
        for (int i = 0; i < 50; i++) count += std::isnan(fixed[i]) + std::isnan(dynamic[i]);
        nan[blockIdx.x] = count;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 50; i += blockDim.x) fixed[i] = dynamic[i] = 1;
}
TEST_CASE("cudaMalloc, __shared__: fresh memory is NaN") {
    for (int n : {1, 63, 1024, 5000}) { // 1: the rest of a page, 1024: a whole page
        auto x = floats_on(0, n);
        for (float value : fetch(x, n)) REQUIRE(std::isnan(value));
        OK(cudaMemset(x.get(), 0, n * sizeof(float)));
    }
    float *fixed = nullptr;
    OK(cudaMallocHost(&fixed, 100 * one_float));
    for (int i = 0; i < 100; i++) CHECK(std::isnan(fixed[i]));
    OK(cudaFreeHost(fixed));
    auto nan = floats_on(0, 20);
    for (int launch = 0; launch < 2; launch++) {
        OK_LAUNCH(fresh_kernel<<<20, 3, 50 * sizeof(float)>>>(nan.get()));
        CHECK(fetch(nan, 20) == Floats(20, 100));
    }
}

#ifndef CUDA_CPU_ASAN // which reports it
// What lies i elements behind the beginning of an array, and one row behind the end
template <class T> __global__ void beyond_kernel(double *y, int i) {
    __shared__ T before[3], t[5], rows[3][70], after[4];
    const T *first = t, *row = rows[0];
    before[0] = t[0] = rows[0][0] = after[0] = T();
    y[0] = first[i];
    y[1] = row[3 * 70];
}
template <class T> static void test_beyond() {
    auto y = pinned<double>(2);
    for (int i : {-1, 5, 6}) {
        OK_LAUNCH(beyond_kernel<T><<<1, 1>>>(y.get(), i));
        OK(cudaDeviceSynchronize());
        for (int at : {0, 1}) {
            const double found = y.get()[at];
            CHECK((std::isnan(found) || fabs(found) >= 127));
        }
    }
}
TEST_CASE("__shared__: what lies behind and before an array is NaN, or no usual integer") {
    test_beyond<float>();
    test_beyond<double>();
    test_beyond<int>();
    test_beyond<unsigned>();
    test_beyond<short>();
    test_beyond<long long>();
    test_beyond<char>();
    test_beyond<unsigned char>();
}
#endif

TEST_CASE("cudaMemset: bytes") {
    auto x = floats_on(0, 6);
    float bits;
    memset(&bits, 0x40, sizeof bits); // 3.0039...
    OK(cudaMemset(x.get(), 0, 6 * sizeof(float)));
    OK(cudaMemset(x.get() + 1, 0x40, 2 * sizeof(float)));
    CHECK(fetch(x, 6) == Floats{0, bits, bits, 0, 0, 0});
}

TEST_CASE("cudaMemGetInfo: the current device's; freeing nothing is no mistake") {
    auto free_on = [](int device) {
        size_t free = 0, total = 0;
        OnDevice{device}, OK(cudaMemGetInfo(&free, &total));
        CHECK(free <= total);
        return free;
    };
    const size_t before = free_on(0), other = free_on(1), bytes = 4 << 20;
    {
        auto y = floats_on(0, bytes / sizeof(float));
        CHECK(before - free_on(0) >= bytes);
        CHECK(before - free_on(0) <= bytes + 65536); // at most a page more
        CHECK(free_on(1) == other);
    }
    CHECK(free_on(0) == before);
    OK(cudaFree(nullptr));
    OK(cudaFreeHost(nullptr));
}

// ---------------------------------------------------------------------------------------------
// 4. Devices and errors
// Devices are numbered, and errors are numbered, named and worded, as in CUDA.

TEST_CASE("cudaGetDevice: each host thread has its own; cudaGetDeviceProperties") {
    int count = 0, device = -1;
    OK(cudaGetDeviceCount(&count));
    CHECK(count >= 1);
    cudaDeviceProp prop;
    OK(cudaGetDeviceProperties(&prop, count - 1));
    CHECK(strlen(prop.name) > 0);
    CHECK(prop.maxThreadsPerBlock == 1024);
    CHECK(prop.multiProcessorCount >= 1);
    CHECK(prop.sharedMemPerBlock == 48 * 1024);
    CHECK(prop.maxGridSize[1] == 65535);
    CHECK(prop.warpSize == 32);
    OnDevice current(count - 1);
    std::thread([&] { cudaGetDevice(&device); }).join(); // a new thread's is 0
    CHECK(device == 0);
    OK(cudaGetDevice(&device));
    CHECK(device == count - 1);
}

TEST_CASE("cudaGetLastError: forgets; cudaPeekAtLastError does not") {
    float *p = (float *)1, *x = nullptr;
    OK(cudaGetLastError());
    CHECK(cudaMalloc(&p, size_t(1) << 60) == cudaErrorMemoryAllocation);
    CHECK(p == nullptr);
    OK(cudaMalloc(&x, 4)); // a success in between does not reset it
    CHECK(cudaPeekAtLastError() == cudaErrorMemoryAllocation);
    CHECK(cudaPeekAtLastError() == cudaErrorMemoryAllocation);
    CHECK(cudaGetLastError() == cudaErrorMemoryAllocation);
    OK(cudaGetLastError());
    OK(cudaPeekAtLastError());
    OK(cudaFree(x));
}

TEST_CASE("cudaGetErrorName, cudaGetErrorString: CUDA's numbers, names and texts") {
    auto check = [](cudaError_t error, int number, const std::string &name, const char *text) {
        CHECK((int)error == number);
        CHECK(cudaGetErrorName(error) == name);
        CHECK(cudaGetErrorString(error) == std::string(text));
    };
#define ERROR(name, number, text) check(cudaError##name, number, "cudaError" #name, text)
    check(cudaSuccess, 0, "cudaSuccess", "no error");
    ERROR(InvalidValue, 1, "invalid argument");
    ERROR(MemoryAllocation, 2, "out of memory");
    ERROR(InvalidConfiguration, 9, "invalid configuration argument");
    ERROR(InvalidMemcpyDirection, 21, "invalid copy direction for memcpy");
    ERROR(NoDevice, 100, "no CUDA-capable device is detected");
    ERROR(InvalidDevice, 101, "invalid device ordinal");
    ERROR(PeerAccessUnsupported, 217, "peer access is not supported between these two devices");
    ERROR(InvalidResourceHandle, 400, "invalid resource handle");
    ERROR(NotReady, 600, "device not ready");
    ERROR(IllegalAddress, 700, "an illegal memory access was encountered");
    ERROR(PeerAccessAlreadyEnabled, 704, "peer access is already enabled");
    ERROR(TooManyPeers, 711, "peer mapping resources exhausted");
    ERROR(PeerAccessNotEnabled, 705, "peer access has not been enabled");
    ERROR(LaunchFailure, 719, "unspecified launch failure");
    ERROR(NotPermitted, 800, "operation not permitted");
    ERROR(InvalidPitchValue, 12, "invalid pitch argument");
    ERROR(InvalidSymbol, 13, "invalid device symbol");
    ERROR(Assert, 710, "device-side assert triggered");
    ERROR(MisalignedAddress, 716, "misaligned address");
    ERROR(HostMemoryAlreadyRegistered, 712,
          "part or all of the requested memory range is already mapped");
    ERROR(HostMemoryNotRegistered, 713,
          "pointer does not correspond to a registered memory region");
    check((cudaError_t)1001, 1001, "unrecognized error code", "unrecognized error code");
}

// ---------------------------------------------------------------------------------------------
// 5. Mistakes
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
           " overrun the 36 bytes that extras/cpu/tests.cu:";
}

// 10 and 9 floats on both devices, what a device has freed, and memory of the host.
struct Memories {
    std::shared_ptr<float> x[2] = {floats_on(0, 10), floats_on(1, 10)},
                           y[2] = {floats_on(0, 9), floats_on(1, 9)}, fixed = pinned<float>(10);
    float *x0 = x[0].get(), *x1 = x[1].get(), *y0 = y[0].get(), *y1 = y[1].get();
    float *freed0 = freed(0, 10), *freed1 = freed(1, 10);
    float *pinned_host = fixed.get(), host[10] = {};
};

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
                   "is memory of device 0 that extras/cpu/tests.cu:", "has freed");
    REFUSED_LAUNCH(value, assign_kernel<<<1, 1>>>(m.x0 + 100000, 1),
                   "assign_kernel on device 0: argument 1: nothing is allocated at", "on device 0");
    OnDevice current(1);
    Pointers s = {1, {m.x1, m.x0}};
    REFUSED_LAUNCH(value, struct_kernel<<<1, 1>>>(s), "struct_kernel on device 1: argument 1",
                   on_0_not_1);
    s = {1, {m.x0 + 100000, m.x1}}; // where nothing is allocated: it may be no pointer
    OK_LAUNCH(struct_kernel<<<1, 1>>>(s));
}

__global__ void empty_kernel() {}
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
    REFUSED_LAUNCH(code, empty_kernel<<<1, 1, 48 * 1024 + 1>>>(),
                   "empty_kernel on device 0: the launch asks for 49153 bytes of shared memory");
    TestStream stream(1);
    REFUSED_LAUNCH(cudaErrorInvalidResourceHandle, empty_kernel<<<1, 1, 0, stream>>>(),
                   "empty_kernel: the stream belongs to device 1, but the current device is 0");
    REFUSED_LAUNCH(code, (OnDevice{1}, empty_kernel<<<1, dim3(2, 1000)>>>()),
                   "empty_kernel on device 1: a block cannot have 2 x 1000 x 1 threads");
    OK(cudaDeviceSynchronize());
}

TEST_CASE("cudaDeviceEnablePeerAccess: once, to another device") {
    int can = -1;
    OK(cudaDeviceCanAccessPeer(&can, 0, 0));
    CHECK(can == 0);
    OK(cudaDeviceCanAccessPeer(&can, 0, 1));
    CHECK(can == 1);
    CHECK(cudaDeviceDisablePeerAccess(1) == cudaErrorPeerAccessNotEnabled);
    CHECK(cudaGetLastError() == cudaErrorPeerAccessNotEnabled);
    REFUSED(value, cudaDeviceEnablePeerAccess(1, 1),
            "cudaDeviceEnablePeerAccess: flags are 1, but must be 0");
    OK(cudaDeviceEnablePeerAccess(1, 0));
    CHECK(cudaDeviceEnablePeerAccess(1, 0) == cudaErrorPeerAccessAlreadyEnabled);
    CHECK(cudaGetLastError() == cudaErrorPeerAccessAlreadyEnabled);
    // Kernels and cudaMemset may use the peer's memory now, but not the other way round
    auto x = device_copy(Floats{1, 2}), y = device_copy(Floats{3, 4}, 1);
    OK_LAUNCH(plus_kernel<<<1, 2>>>(y.get(), 10));
    OK(cudaDeviceSynchronize());
    CHECK(fetch(y, 2) == Floats{13, 14});
    OK(cudaMemset(y.get(), 0, one_float));
    OK(cudaDeviceSynchronize());
    CHECK(fetch(y, 2) == Floats{0, 14});
    REFUSED_LAUNCH(value, (OnDevice{1}, plus_kernel<<<1, 2>>>(x.get(), 1)), "argument 1",
                   on_0_not_1);
    OK(cudaDeviceDisablePeerAccess(1));
    REFUSED_LAUNCH(value, plus_kernel<<<1, 2>>>(y.get(), 1), "argument 1", on_1_not_0);
    CHECK(cudaDeviceDisablePeerAccess(1) == cudaErrorPeerAccessNotEnabled);
    cudaGetLastError();
    OK(cudaGetLastError());
}

TEST_CASE("cudaMemcpyPeer, cudaMemcpyPeerAsync: wrong devices and sizes are refused") {
    const Memories m;
    TestStream on_1(1);
    REFUSED(cudaErrorInvalidDevice, cudaMemcpyPeer(m.x1, 2, m.x0, 0, 4),
            "cudaMemcpyPeer: cannot copy from device 0 to device 2: the device count is 2");
    REFUSED(cudaErrorInvalidDevice, cudaMemcpyPeerAsync(m.x1, 1, m.x0, -1, 4),
            "cudaMemcpyPeerAsync: cannot copy from device -1 to device 1: the device count is 2");
    REFUSED(value, cudaMemcpyPeer(m.x1, 0, m.x0, 1, 4), "cudaMemcpyPeer, destination", on_1_not_0);
    REFUSED(value, cudaMemcpyPeer(m.x1, 1, m.x0, 1, 4), "cudaMemcpyPeer, source", on_0_not_1);
    REFUSED(value, cudaMemcpyPeerAsync(m.x1, 0, m.x0, 1, 4, on_1),
            "cudaMemcpyPeerAsync, destination", on_1_not_0);
    REFUSED(value, cudaMemcpyPeer(m.x1, 1, m.y0 + 1, 0, 36),
            "cudaMemcpyPeer, source" + overrun(36, 4), "allocated on device 0");
    REFUSED(value, cudaMemcpyPeerAsync(m.y1, 1, m.x0, 0, 40),
            "cudaMemcpyPeerAsync, destination" + overrun(), "allocated on device 1");
    REFUSED(value, cudaMemcpyPeer(m.x1, 1, m.pinned_host, 0, 16), "cudaMemcpyPeer, source",
            "is pinned host memory, not memory of device 0");
}

TEST_CASE("cudaMemcpy, cudaMemcpyAsync, cudaMemset: wrong memory and sizes are refused") {
    Memories m;
    TestStream stream;
    const std::string allocate = on_host + ": allocate it with cudaMalloc";
    float x = 0;
    REFUSED(value, cudaMemcpy(m.y0, m.host, 40, up), "cudaMemcpy, destination" + overrun(),
            "allocated on device 0");
    REFUSED(value, cudaMemcpyAsync(m.y0, m.host, 40, up, stream),
            "cudaMemcpyAsync, destination" + overrun());
    REFUSED(value, cudaMemcpy(m.y0, m.x0, 40, within), "cudaMemcpy, destination" + overrun());
    REFUSED(value, cudaMemcpyAsync(m.x0, m.y0, 40, within), "cudaMemcpyAsync, source" + overrun());
    REFUSED(value, cudaMemset(m.y0, 0, 40), "cudaMemset", overrun());
    REFUSED(value, cudaMemset(&x, 0, 4), "cudaMemset", on_host);
    REFUSED(value, cudaMemcpy(m.host, &x, 4, up), "cudaMemcpy, destination", allocate);
    REFUSED(value, cudaMemcpy(m.host, &x, 4, down), "cudaMemcpy, source", allocate);
    REFUSED(value, cudaMemcpy(m.x0, m.x1, 4, up), "cudaMemcpy: the source",
            "is memory of device 1, not of the host");
    REFUSED(value, cudaMemcpy(m.x0, m.y0, 4, down), "cudaMemcpy: the destination",
            "is memory of device 0, not of the host");
    REFUSED(value, cudaMemcpy(m.x0, m.y1, 40, within), "cudaMemcpy, source" + overrun(),
            "allocated on device 1");
    REFUSED(value, cudaMemset(m.x1, 0, 4), "cudaMemset", on_1_not_0);
    REFUSED(value, cudaMemcpyAsync(m.host, m.freed0, 4, down), "cudaMemcpyAsync, source",
            "is memory of device 0 that extras/cpu/tests.cu:", "has freed");
    OnDevice current(1);
    REFUSED(value, cudaMemcpy(m.host, m.y1 + 8, 8, down), "cudaMemcpy, source" + overrun(8, 32),
            "allocated on device 1");
}

TEST_CASE("copies, launches: a null pointer is named, but where it is not used it is no mistake") {
    Memories m;
    const std::string null = ": the pointer is null: is a tensor or vector empty";
    REFUSED(value, cudaMemcpy(nullptr, m.host, 4, up), "cudaMemcpy, destination" + null);
    REFUSED(value, cudaMemcpy(m.x0, nullptr, 4, up), "cudaMemcpy, source" + null);
    REFUSED(value, cudaMemcpyAsync(nullptr, m.x0, 4, down), "cudaMemcpyAsync, destination" + null);
    REFUSED(value, cudaMemcpyAsync(m.host, nullptr, 4, down), "cudaMemcpyAsync, source" + null);
    REFUSED(value, cudaMemcpyPeerAsync(m.x1, 1, nullptr, 0, 4),
            "cudaMemcpyPeerAsync, source" + null);
    REFUSED(value, cudaMemcpyPeer(nullptr, 1, m.x0, 0, 4), "cudaMemcpyPeer, destination" + null);
    REFUSED(value, cudaMemset(nullptr, 0, 4), "cudaMemset" + null);
    OK(cudaMemcpyAsync(nullptr, nullptr, 0, down));
    OK(cudaMemcpyPeerAsync(nullptr, 1, nullptr, 0, 0));
    OK(cudaMemcpyPeer(nullptr, 1, nullptr, 0, 0));
    OK(cudaMemset(nullptr, 0, 0));
    OK_LAUNCH(line_kernel<<<1, 8>>>(Line{nullptr, nullptr, 1, 0, 0}, nullptr, false, 8));
    OK(cudaDeviceSynchronize());
}

TEST_CASE("cudaFreeHost, cudaStreamQuery: a stream is idle when its last task uses nothing") {
    struct Use { // such as that of pinned memory, by a task
        std::atomic<bool> &ended;
        ~Use() { usleep(20000), ended = true; }
    };
    TestStream stream;
    for (int i = 0; i < 3; i++) {
        std::atomic<bool> ended{false};
        std::shared_ptr<Use> use(new Use{ended});
        stream.stream->push({}, [use = std::move(use)] {});
        while (cudaStreamQuery(stream) == cudaErrorNotReady) {}
        CHECK(ended);
    }
}

TEST_CASE("cudaFree, cudaFreeHost, devices, events, functions: what is wrong is refused") {
    Memories m;
    const cudaError_t device = cudaErrorInvalidDevice;
    REFUSED(value, cudaFree(m.host), "cudaFree:", "was not returned by cudaMalloc");
    REFUSED(value, cudaFree(m.x0 + 1), "cudaFree:", "was not returned by cudaMalloc");
    REFUSED(value, cudaFree(m.freed1),
            "cudaFree:", "on device 1 was already freed by extras/cpu/tests.cu:");
    float *twice = m.pinned_host;
    m.fixed.reset();
    REFUSED(value, cudaFreeHost(twice), "cudaFreeHost:", "not returned by cudaMallocHost");
    {
        auto x = floats_on(0, 1);
        TestStream stream;
        float *in_use = nullptr;
        OK(cudaMallocHost(&in_use, one_float));
        Hold hold(stream, x.get());
        OK(cudaMemcpyAsync(in_use, x.get(), one_float, down, stream));
        REFUSED(value, cudaFreeHost(in_use), "cudaFreeHost:",
                "is still in use by the operation that extras/cpu/tests.cu:",
                " enqueued: wait for its stream first");
        REFUSED(value, cudaFreeHost(hold.go.get()),
                "is still in use by the operation that extras/cpu/tests.cu:");
        hold.release_and_wait_for(stream);
        CHECK(*in_use == 5);
        OK(cudaFreeHost(in_use));
    }
    REFUSED(device, cudaSetDevice(2), "cudaSetDevice: there is no device 2: the device count is 2");
    int can;
    REFUSED(device, cudaDeviceCanAccessPeer(&can, 0, 2),
            "cudaDeviceCanAccessPeer: there is no device 0 or no device 2: the device count is 2");
    REFUSED(device, cudaDeviceEnablePeerAccess(0, 0),
            "cudaDeviceEnablePeerAccess: device 0 cannot have device 0 as a peer");
    TestEvent event;
    TestStream stream(1);
    REFUSED(cudaErrorInvalidResourceHandle, cudaEventRecord(event, stream),
            "cudaEventRecord: the event belongs to device 0, the stream to device 1");
    REFUSED(value, cudaLaunchHostFunc(stream, nullptr, nullptr), "cudaLaunchHostFunc: the func");
}

TEST_CASE("null pointers for results, flags that do not exist: are refused") {
    const std::string null = ": the pointer to its result is null";
    int n = 0, *const none = nullptr;
    size_t bytes = 0;
    float *x = nullptr;
    cudaStream_t stream = nullptr;
    cudaEvent_t event = nullptr;
    TestEvent begin, end, on_1(1);
    REFUSED(value, cudaGetDevice(nullptr), "cudaGetDevice" + null);
    REFUSED(value, cudaGetDeviceCount(nullptr), "cudaGetDeviceCount" + null);
    REFUSED(value, cudaGetDeviceProperties(nullptr, 0), "cudaGetDeviceProperties" + null);
    REFUSED(value, cudaDeviceGetAttribute(nullptr, cudaDevAttrWarpSize, 0), null);
    REFUSED(value, cudaDeviceCanAccessPeer(nullptr, 0, 1), "cudaDeviceCanAccessPeer" + null);
    REFUSED(value, cudaMalloc((void **)nullptr, 4), "cudaMalloc" + null);
    REFUSED(value, cudaMalloc((float **)nullptr, 4), "cudaMalloc" + null);
    REFUSED(value, cudaMallocAsync((float **)nullptr, 4, nullptr), "cudaMallocAsync" + null);
    REFUSED(value, cudaMallocManaged((float **)nullptr, 4), "cudaMallocManaged" + null);
    REFUSED(value, cudaMallocHost((float **)nullptr, 4), "cudaMallocHost" + null);
    REFUSED(value, cudaHostAlloc((float **)nullptr, 4, 0), "cudaMallocHost" + null);
    REFUSED(value, cudaMallocPitch(&x, nullptr, 4, 4), "cudaMallocPitch" + null);
    REFUSED(value, cudaMemGetInfo(nullptr, &bytes), "cudaMemGetInfo" + null);
    REFUSED(value, cudaGetSymbolSize(nullptr, target), "cudaGetSymbolSize" + null);
    REFUSED(value, cudaGetSymbolAddress(nullptr, target), "cudaGetSymbolAddress" + null);
    REFUSED(value, cudaStreamCreate(nullptr), "cudaStreamCreate" + null);
    REFUSED(value, cudaEventCreate(nullptr), "cudaEventCreate" + null);
    REFUSED(value, cudaEventElapsedTime(nullptr, begin, end), "cudaEventElapsedTime" + null);
    REFUSED(value, cudaOccupancyMaxActiveBlocksPerMultiprocessor(none, empty_kernel, 32, 0), null);
    REFUSED(value, cudaOccupancyMaxPotentialBlockSize(none, &n, empty_kernel), null);
    REFUSED(value, cudaStreamCreateWithFlags(&stream, 2),
            "cudaStreamCreateWithFlags: invalid flags 2");
    REFUSED(value, cudaEventCreateWithFlags(&event, 8),
            "cudaEventCreateWithFlags: invalid flags 8");
    REFUSED(value, cudaHostAlloc(&x, 4, 8), "cudaHostAlloc: invalid flags 8");
    REFUSED(value, cudaHostRegister(&n, 4, 16), "cudaHostRegister: invalid flags 16");
    REFUSED(value, cudaMallocManaged(&x, 4, 0),
            "cudaMallocManaged: cannot allocate 4 bytes with flags 0");
    REFUSED(value, cudaMallocManaged(&x, 0),
            "cudaMallocManaged: cannot allocate 0 bytes with flags 1");
    REFUSED(value, cudaStreamWaitEvent(nullptr, begin, 2),
            "cudaStreamWaitEvent: flags are 2, but must be 0");
    float ms = 0;
    OK(cudaEventRecord(begin));
    OnDevice{1}, OK(cudaEventRecord(on_1));
    REFUSED(cudaErrorInvalidResourceHandle, cudaEventElapsedTime(&ms, begin, on_1),
            "cudaEventElapsedTime: the start belongs to device 0 and the end to device 1");
}

TEST_CASE("streams, events: one that was destroyed or never created is refused") {
    const cudaError_t handle = cudaErrorInvalidResourceHandle;
    const std::string no_stream = " is not a stream: was it never created, or is it already "
                                  "destroyed?",
                      no_event = " is not an event: was it never created, or is it already "
                                 "destroyed?";
    Memories m;
    TestEvent event;
    cudaEvent_t none = nullptr, gone = new_event(0);
    cudaStream_t stream = new_stream(0), never = (cudaStream_t)0x4141414141414141;
    OK(cudaStreamDestroy(stream));
    OK(cudaEventDestroy(gone));
    REFUSED(handle, cudaStreamDestroy(stream), "cudaStreamDestroy: ", no_stream);
    REFUSED(handle, cudaStreamSynchronize(stream), "cudaStreamSynchronize: ", no_stream);
    REFUSED(handle, cudaEventRecord(event, stream), "cudaEventRecord: ", no_stream);
    REFUSED(handle, cudaStreamWaitEvent(stream, event), "cudaStreamWaitEvent: ", no_stream);
    REFUSED(handle, cudaMemcpyAsync(m.x0, m.y0, 4, within, never), "cudaMemcpyAsync: ", no_stream);
    REFUSED(handle, cudaMemcpyPeerAsync(m.x1, 1, m.x0, 0, 4, never), no_stream);
    REFUSED(handle, cudaMemsetAsync(m.x0, 0, 4, never), "cudaMemsetAsync: ", no_stream);
    REFUSED(handle, cudaMallocAsync(&m.x0, 4, never), "cudaMallocAsync: ", no_stream);
    REFUSED(handle, cudaFreeAsync(m.y0, never), "cudaFreeAsync: ", no_stream);
    REFUSED(handle, cudaLaunchHostFunc(never, [](void *) {}, nullptr), no_stream);
    REFUSED_LAUNCH(handle, empty_kernel<<<1, 1, 0, never>>>(), "empty_kernel: ", no_stream);
    float ms = 0;
    for (cudaEvent_t wrong : {none, gone}) {
        REFUSED(handle, cudaEventRecord(wrong), "cudaEventRecord: ", no_event);
        REFUSED(handle, cudaStreamWaitEvent(nullptr, wrong), "cudaStreamWaitEvent: ", no_event);
        REFUSED(handle, cudaEventSynchronize(wrong), "cudaEventSynchronize: ", no_event);
        REFUSED(handle, cudaEventQuery(wrong), "cudaEventQuery: ", no_event);
        REFUSED(handle, cudaEventElapsedTime(&ms, event, wrong), no_event);
        REFUSED(handle, cudaEventDestroy(wrong), "cudaEventDestroy: ", no_event);
    }
}

// ---------------------------------------------------------------------------------------------
// 6. Programs, right and wrong
// What is noticed only while a kernel runs ends the program. Each of these is a process of its own
// with two devices, `runtime_tests --wrong NAME`. A wrong one has to end with exit status 1 and a
// message that begins with the line it is wrong in and contains the words of the table below. A
// right one, often the same but for one thing, has to end with status 0 and print nothing.

// What is wrong stands in one line with one of these, or a sanitizer's report is expected for it,
// or the machine lacks something.
#define WRONG_HERE(...) (fprintf(stderr, "expected: %s:%d:\n", __FILE__, __LINE__), __VA_ARGS__)
#define REPORTED(...) (fprintf(stderr, "expected: ==%d==ERROR: \n", getpid()), __VA_ARGS__)
#define LACKING_HERE(...) (fprintf(stderr, "expected: cuda_runtime.h: \n"), __VA_ARGS__)

// Barriers that not all threads meet
__global__ void misses_kernel(unsigned thread) {
    if (threadIdx.x != thread) WRONG_HERE(__syncthreads());
}
__global__ void different_kernel() {
    if (threadIdx.x < 3) __syncthreads();
    else WRONG_HERE(__syncthreads());
}
__global__ void leave_kernel(unsigned leaves) {
    for (int i = 0; i < 4; i++) {
        if (i == 2 && threadIdx.x + threadIdx.y == leaves) return;
        WRONG_HERE(__syncthreads());
    }
}
__global__ void turns_differ_kernel() {
    for (unsigned i = 0; i <= threadIdx.x; i++) WRONG_HERE(__syncthreads());
}

// Warp functions that not all lanes come to
__global__ void leaves_kernel(int *y, unsigned first, unsigned end) {
    if (threadIdx.x < first || threadIdx.x >= end) return;
    WRONG_HERE(*y = __shfl_down_sync(~0u, 1, 1));
}
__global__ void some_turns_kernel(int lane) {
    for (int i = 0; i < 3; i++)
        if (i < 2 || (int)threadIdx.x % 32 != lane) WRONG_HERE(__syncwarp());
}
__global__ void barrier_in_branch_kernel() {
    if (threadIdx.x % 32 < 16) WRONG_HERE(__syncthreads());
    else __shfl_sync(0xffff0000, 1, 20);
}
__global__ void shuffle_beside_barrier_kernel(unsigned lane) {
    if (threadIdx.x < lane) __syncthreads();
    else WRONG_HERE(__shfl_xor_sync(~0u, 1.0, 1));
    __syncthreads();
}
__global__ void two_calls_kernel() {
    if (threadIdx.x < 16) WRONG_HERE(__any_sync(~0u, 1));
    else __all_sync(~0u, 1);
}
__global__ void mask_kernel(unsigned first, unsigned others) {
    WRONG_HERE(__ballot_sync(threadIdx.x == 0 ? first : others, 1));
}
__global__ void width_kernel(int width) { WRONG_HERE(__shfl_sync(~0u, 1, 0, width)); }

// The sum of 0, 1, ..., 31 by a tree without __syncwarp(): right if a warp runs in lockstep
static void lockstep(const char *order, bool mirrored) {
    setenv("CUDA_CPU_LANES", order, 1);
    fprintf(stderr, "expected: lanes %s: the sum is \n", order);
    Floats numbers(32);
    std::iota(numbers.begin(), numbers.end(), 0);
    auto x = device_copy(numbers), sum = floats_on(0, 1);
    OK_LAUNCH(warp_tree_kernel<false><<<1, 32>>>(sum.get(), x.get(), mirrored));
    if (values(sum) == "496") return;
    throw std::runtime_error(std::string("lanes ") + order + ": the sum is " + values(sum));
}
// The sum of 64 ones, its last warp by volatile memory: as an argument of a function, a variable of
// the kernel, an array, dynamic shared memory
enum Spelling { argument, variable, array, dynamic };
template <class T, bool synced> __device__ void last_warp(volatile T *part, int t) {
    for (int half = 32; half > 0; half /= 2) {
        if (synced) __syncwarp();
        const T other = part[t + half];
        if (synced) __syncwarp();
        part[t] = part[t] + other;
    }
}
template <Spelling spelling, bool synced> __global__ void last_warp_kernel(float *sum) {
    __shared__ volatile float list[96];
    extern __shared__ volatile float more[];
    const int t = threadIdx.x;
    volatile float *part = spelling == dynamic ? more : list;
    list[t] = more[t] = 1;
    if (t < 32) list[t + 64] = more[t + 64] = 0;
    __syncthreads();
    if (t >= 32) return;
    if (spelling == argument) last_warp<float, synced>(list, t);
    for (int half = spelling == argument ? 0 : 32; half > 0; half /= 2) {
        if (synced) __syncwarp();
        const float other = spelling == array     ? list[t + half]
                            : spelling == dynamic ? more[t + half]
                                                  : part[t + half];
        if (synced) __syncwarp();
        if (spelling == array) list[t] += other;
        else if (spelling == dynamic) more[t] += other;
        else part[t] += other;
    }
    if (t == 0) *sum = part[0];
}
template <Spelling spelling, bool synced> static void last_warp() {
    auto sum = floats_on(0, 1);
    const int bytes = 96 * one_float;
    if (synced) {
        OK_LAUNCH(last_warp_kernel<spelling, true><<<1, 64, bytes>>>(sum.get()));
        if (values(sum) != "64") throw std::runtime_error("the sum is " + values(sum));
    } else {
        WRONG_HERE(last_warp_kernel<spelling, false><<<1, 64, bytes>>>(sum.get()));
        values(sum);
        throw std::runtime_error("told, then went on");
    }
}
// Volatile memory that lanes do not use to hand values on, or only between barriers
__global__ void volatile_flag_kernel(float *sum) {
    __shared__ volatile int flag[1], list[64];
    const int t = threadIdx.x;
    if (t % 3 == 0) flag[0] = 1; // whoever is first
    list[t] = t;
    list[t] += 1;
    __syncthreads();
    for (int half = 32; half > 0; half /= 2) {
        if (t < half) list[t] += list[t + half];
        __syncthreads();
    }
    if (t == 0) *sum = list[0] + flag[0];
}
[[maybe_unused]] static void volatile_flag() {
    auto sum = floats_on(0, 1);
    OK_LAUNCH(volatile_flag_kernel<<<1, 64>>>(sum.get()));
    expect(values(sum) == "2081", "the sum", fetch(sum, 1)[0]);
}

// What does not depend on the order of warps and lanes
static void lanes_in_order(const char *order) {
    setenv("CUDA_CPU_LANES", order, 1);
    test_warp_sums();
    test_first();
    test_filter();
}
// What does: each block's last warp, and the last lane of its warp 0
__global__ void last_kernel(int *y) {
    const int t = threadIdx.x;
    __atomic_store_n(&y[2 * blockIdx.x], t / 32, __ATOMIC_RELAXED);
    if (t < 32) __atomic_store_n(&y[2 * blockIdx.x + 1], t, __ATOMIC_RELAXED);
}
static void lanes_are_shuffled() {
    setenv("CUDA_CPU_LANES", "3", 1);
    auto y = pinned<int>(2 * 2 * 20);
    for (int launch : {0, 1}) OK_LAUNCH(last_kernel<<<20, 128>>>(y.get() + launch * 40));
    OK(cudaDeviceSynchronize());
    int warps = 0, lanes = 0, differ = 0;
    for (int i = 0; i < 20; i++) {
        warps += y.get()[2 * i] != y.get()[0];
        lanes += y.get()[2 * i + 1] != y.get()[1];
    }
    for (int i = 0; i < 40; i++) differ += y.get()[i] != y.get()[40 + i];
    expect(warps > 5, "blocks whose last warp is another than block 0's", warps);
    expect(lanes > 10, "blocks whose last lane is another than block 0's", lanes);
    expect(differ == 0, "differences between two launches with one seed", differ);
}

static void host_function_calls_cuda() {
    auto call_cuda = [](void *) { (void)cudaDeviceSynchronize(); };
    WRONG_HERE(OK(cudaLaunchHostFunc(new_stream(0), call_cuda, nullptr)));
}
static __device__ int on_each_device = 1;
static void throws(void *) { throw std::out_of_range("beyond the end"); }
static void host_function_that_throws() {
    WRONG_HERE(OK(cudaLaunchHostFunc(new_stream(1), throws, nullptr)));
}
static void catches(void *data) {
    try {
        throws(data);
    } catch (const std::out_of_range &) {
        *(int *)data = 1;
    }
}
static void host_function_that_catches() {
    auto caught = pinned<int>(1);
    TestStream stream;
    OK(cudaLaunchHostFunc(stream, catches, caught.get()));
    OK(cudaStreamSynchronize(stream));
    expect(*caught == 1, "exceptions caught", *caught);
}
template <bool barrier> __global__ void throwing_kernel(unsigned thread) {
    if (barrier) __syncthreads();
    if (threadIdx.x == thread) throws(nullptr);
}
__global__ void throwing_lane_kernel(unsigned from) {
    if (threadIdx.x < from) return;
    if (__shfl_sync(~0u << from, threadIdx.x, 7) == 7 && threadIdx.x == 6) throws(nullptr);
}
__global__ void nested_kernel() { WRONG_HERE(misses_kernel<<<1, 1>>>(0)); }
__global__ void assert_kernel(unsigned most) {
    if (threadIdx.x > most) fprintf(stderr, "expected: %s:%d:\n", __FILE__, __LINE__ + 1);
    assert(threadIdx.x <= most);
}
static void out_of_memory() {
    setenv("CUDA_CPU_MEMORY", "16", 1);                         // MiB per device
    float *p = memory(0, 3 << 20), *q = memory(1, 4 << 20), *r; // 12 MiB, 16 MiB
    OK(cudaFree(p));
    p = memory(0, 3 << 20);
    OK(cudaFree(q));
    WRONG_HERE(OK(cudaMalloc(&r, 5 << 20)), _exit(0));
}
static void wrong_setting(const char *name, const char *value) {
    setenv(name, value, 1);
    fprintf(stderr, "expected: %s=%s\n", name, value);
    memory(0, 1);
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
static void unchecked_allocation() {
    setenv("CUDA_CPU_MEMORY", "8", 1);
    memory(1, 1 << 20);
    OnDevice current(1);
    float *p = nullptr, x = 0;
    cudaMalloc(&p, 20 << 20);
    WRONG_HERE(OK(cudaMemcpy(&x, p, 4, down)));
}
[[maybe_unused]] static void unchecked_in_kernel() {
    setenv("CUDA_CPU_MEMORY", "8", 1);
    float *p = nullptr;
    cudaMalloc(&p, 20 << 20);
    FAULTS_HERE(assign_kernel<<<1, 1>>>(p, 1));
    OK(cudaDeviceSynchronize());
}
static void visible_devices() {
    setenv("CUDA_VISIBLE_DEVICES", "0", 1);
    fprintf(stderr, "expected: CUDA_VISIBLE_DEVICES=0 \n");
    memory(1, 1);
    throw std::runtime_error("told, then went on");
}
struct Pointer {
    float *p;
};
__global__ void found_kernel(const Pointer *found) { *found->p = 1; }
static void found_in_memory() {
    auto found = device_copy(std::vector<Pointer>{{memory(0, 10)}});
    FAULTS_HERE(found_kernel<<<1, 1>>>(found.get()));
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
    volatile float a[20000];
    if (barrier) __syncthreads();
    for (int i = 0; i < n; i++) a[i] = i;
    *x = a[0];
}
__device__ __noinline__ int depth(int n) { return n < 0 ? 0 : depth(n + 1) + depth(n + 2); }
__global__ void recursive_kernel(int *x) { *x = depth(1); }
// The second block waits for what nobody can set. It ends the program after 2.2 s of processor
// time: the report, which is its own thread's, comes after 2.
static double seconds_used() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
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
static void fault_without_handler() {
    host_ends_by(SIGSEGV, [] { WRONG_HERE(*(volatile uintptr_t *)sizeof(uintptr_t) = 1); });
}
static void index_beyond_list() {
    static const std::vector<int> list(3);
    host_ends_by(SIGABRT, [] { WRONG_HERE((void)*(volatile const int *)&list[list.size()]); });
}
static void host_without_end() {
    setenv("CUDA_CPU_WATCHDOG", "1", 1);
    memory(0, 1);
    static volatile bool more = true;
    cuda_cpu::host_enters("f, k = 2");
    WRONG_HERE((void)0); while (more) {}
}
#endif
#ifndef CUDA_CPU_ASAN
// Writes beyond what the block has of shared memory: found when it ends
template <class T> __global__ void beyond_write_kernel(int i, T value) {
    __shared__ T first[6], second[3];
    T *t = first;
    second[0] = value;
    t[i + (int)threadIdx.x] = value;
}
__global__ void beyond_row_kernel(int row) {
    __shared__ float rows[2][33];
    float(*const r)[33] = rows;
    if (threadIdx.x == 1) r[row][31] = 1;
}
template <class T> __global__ void beyond_dynamic_kernel(int i) {
    extern __shared__ T t[];
    t[0] = 0;
    t[i] = 1;
}
#else
static const char *const poison = "AddressSanitizer: use-after-poison";
__global__ void static_overrun_kernel(float *x, int i) {
    __shared__ float first[10], second[10];
    first[threadIdx.x] = second[threadIdx.x] = 0;
    __syncthreads();
    const float *begin = first; // of which UBSan does not know the length
    *x = begin[i] + second[0];
}
#endif

// What a machine with many cores needs. /proc tells what the process takes of it.
static int mappings() {
    std::ifstream maps("/proc/self/maps");
    return std::count(std::istreambuf_iterator<char>(maps), {}, '\n');
}
static long mapped_mib() {
    long pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    return pages * sysconf(_SC_PAGESIZE) >> 20;
}
// No block ends before all have begun, so each has a core to itself.
template <bool barrier> __global__ void together_kernel(int *begun) {
    if (threadIdx.x == 0) {
        __atomic_add_fetch(begun, 1, __ATOMIC_RELAXED);
        for (int i = 0; i < 100000; i++, usleep(100))
            if (__atomic_load_n(begun, __ATOMIC_RELAXED) == (int)gridDim.x) break;
    }
    if (barrier) __syncthreads();
}
static void stacks_of_many_cores() {
    unsetenv("CUDA_CPU_LANES"); // with which every kernel needs a stack for each thread
    setenv("CUDA_CPU_CORES", "20", 1);
    auto begun = pinned<int>(2);
    const int threads = small_only ? 2 : 1024, before = mappings();
    OK_LAUNCH(together_kernel<false><<<20, threads>>>(&begun.get()[0]));
    OK(cudaDeviceSynchronize());
    const int without_barrier = mappings() - before;
    OK_LAUNCH(together_kernel<true><<<20, threads>>>(&begun.get()[1]));
    OK(cudaDeviceSynchronize());
    const int with_barrier = mappings() - before;
    for (int i : {0, 1}) expect(begun.get()[i] == 20, "blocks at once", begun.get()[i]);
    if (small_only) return;
    expect(without_barrier < 1000, "mappings for one stack on each core", without_barrier);
    expect(with_barrier > 14000, "mappings while the stacks have guard pages", with_barrier);
    expect(with_barrier < 18000, "mappings for 20480 stacks", with_barrier);
}
static void stacks_of_many_streams() {
    setenv("CUDA_CPU_CORES", "1", 1);
    auto begun = pinned<int>(10);
    int first = 0;
    long first_mib = 0;
    for (int i = 0; i < 10; i++) {
        auto stream = std::make_unique<TestStream>();
        together_kernel<true><<<1, small_only ? 2 : 1024, 0, *stream>>>(&begun.get()[i]);
        OK(cudaStreamSynchronize(*stream));
        const int now = mappings();
        stream.reset();
        if (i == 0) first = now, first_mib = mapped_mib();
        if (i < 9 || small_only) continue;
        expect(abs(now - first) < 200, "more mappings in the tenth stream", now - first);
        const long kept = mapped_mib() - first_mib;
        expect(kept < 300, "MiB kept by nine streams", kept);
    }
}

#if !defined(CUDA_CPU_ASAN) && !defined(CUDA_CPU_TSAN) // which need addresses by the terabyte
// What a machine lacks: addresses, because of ulimit -v, and so a thread's stack
static void limit_addresses(long mib) {
    rlimit limit;
    limit.rlim_cur = limit.rlim_max = mib << 20;
    if (setrlimit(RLIMIT_AS, &limit)) throw std::runtime_error("setrlimit failed");
}
static void few_addresses(const char *memory_mib) {
    setenv("CUDA_CPU_MEMORY", memory_mib, 1);
    setenv("CUDA_CPU_CORES", "1", 1);
    limit_addresses(4096);
    memory(1, 1);
}
static void no_thread() {
    setenv("CUDA_CPU_CORES", "1", 1);
    auto x = floats_on(0, 1), y = floats_on(1, 1);
    OK(cudaMemset(x.get(), 0, one_float));
    OK(cudaMemcpyPeer(y.get(), 1, x.get(), 0, one_float));
    fetch(y, 1);
    limit_addresses(mapped_mib() + 2); // a thread's stack alone is 8, or 2
    new_stream(1);
}
#endif

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

// Host threads that share a device: streams come and go, and the default stream waits for all.
static void host_threads() {
    constexpr int turns = small_only ? 20 : 300;
    std::vector<std::thread> threads;
    std::atomic<int> right{0};
    for (int t = 0; t < 6; t++)
        threads.emplace_back([&right] {
            for (int i = 0; i < turns; i++) {
                auto x = floats_on(0, 1);
                TestStream stream(0, cudaStreamDefault);
                float got = 0;
                assign_kernel<<<1, 1, 0, stream>>>(x.get(), 1);
                plus_kernel<<<1, 1>>>(x.get(), 2);
                OK(cudaMemcpyAsync(&got, x.get(), one_float, down, stream));
                right += got == 3;
            }
        });
    for (std::thread &thread : threads) thread.join();
    expect(right == 6 * turns, "right sums", right);
}

static __device__ int first_value = 3;
__global__ void change_kernel(int *x) { *x = first_value++; }
static void device_reset() {
    OnDevice current(1);
    float *p = nullptr, *other = memory(0, 1);
    auto x = pinned<int>(1);
    size_t before = 0, after = 0, total = 0;
    cudaStream_t stream = new_stream(1, cudaStreamDefault);
    OK(cudaSetDevice(1));
    OK(cudaMemGetInfo(&before, &total));
    OK(cudaMalloc(&p, 1 << 20));
    cudaEvent_t event = nullptr;
    OK(cudaEventCreate(&event));
    OK(cudaDeviceEnablePeerAccess(0, 0));
    for (int want : {3, 3}) {
        change_kernel<<<1, 1, 0, want == 3 ? nullptr : stream>>>(x.get());
        change_kernel<<<1, 1>>>(x.get());
        OK(cudaDeviceSynchronize());
        expect(*x == want + 1, "a variable's value", *x);
        OK(cudaDeviceReset());
    }
    OK(cudaMemGetInfo(&after, &total));
    expect(after == before, "bytes that were not freed", before - after);
    OK(cudaDeviceEnablePeerAccess(0, 0)); // which was forgotten
    fclose(stderr);                       // three mistakes that are named there
    expect(cudaStreamSynchronize(stream) == cudaErrorInvalidResourceHandle, "a stream", 0);
    expect(cudaEventSynchronize(event) == cudaErrorInvalidResourceHandle, "an event", 0);
    expect(cudaFree(p) == cudaErrorInvalidValue, "memory", 0);
    cudaGetLastError();
    OK(cudaSetDevice(0));
    OK(cudaFree(other));
}
static void eight_peers() {
    setenv("CUDA_CPU_DEVICES", "11", 1);
    setenv("CUDA_CPU_CORES", "1", 1);
    for (int peer = 10; peer > 0; peer--) {
        const cudaError_t code = cudaDeviceEnablePeerAccess(peer, 0);
        expect(code == (peer > 2 ? cudaSuccess : cudaErrorTooManyPeers), "peer", peer);
    }
    OK(cudaDeviceDisablePeerAccess(5));
    OK(cudaDeviceEnablePeerAccess(1, 0));
    expect(cudaGetLastError() == cudaErrorTooManyPeers, "the last error", 0);
}

// CUDA_CPU_PEERS=0: the host waits in a copy between devices, as for a driver that stages it.
static void staged_copies() {
    setenv("CUDA_CPU_PEERS", "0", 1);
    auto x = floats_on(0, 1), y = floats_on(1, 1);
    int can = -1;
    OK(cudaDeviceCanAccessPeer(&can, 0, 1));
    expect(can == 0, "access to a peer", can);
    TestStream stream;
    static bool called = false;
    auto call = [](void *) {
        usleep(20000);
        called = true;
    };
    assign_kernel<<<1, 1, 0, stream>>>(x.get(), 3);
    OK(cudaLaunchHostFunc(stream, call, nullptr));
    OK(cudaMemcpyPeerAsync(y.get(), 1, x.get(), 0, one_float, stream));
    expect(called, "what was queued before has been done", called);
    OnDevice current(1);
    expect(fetch(y, 1)[0] == 3, "copied", fetch(y, 1)[0]);
}

struct Program {
    const char *name;
    void (*run)();
    std::vector<const char *> says = {}; // a wrong one's message
};
static const Program right_programs[] = {
    {"stacks of many cores", stacks_of_many_cores},
    {"stacks of many streams", stacks_of_many_streams},
    {"few blocks on many cores", few_blocks_on_many_cores},
    {"host function that catches", host_function_that_catches},
    {"host threads", host_threads},
    {"copies that the host stages", staged_copies},
    {"volatile, an argument", last_warp<argument, true>},
    {"volatile, a variable", last_warp<variable, true>},
    {"volatile, an array", last_warp<array, true>},
    {"volatile, dynamic shared memory", last_warp<dynamic, true>},
#ifndef CUDA_CPU_TSAN // to which any two writes are a race
    {"volatile, a flag and barriers", volatile_flag},
#endif
    {"cudaDeviceReset", device_reset},
    {"eight peers", eight_peers},
    {"lanes forwards", [] { lanes_in_order("forwards"); }},
    {"lanes backwards", [] { lanes_in_order("backwards"); }},
    {"lanes shuffled", [] { lanes_in_order("1"); }},
    {"lanes shuffled by a seed", lanes_are_shuffled},
#if !defined(CUDA_CPU_ASAN) && !defined(CUDA_CPU_TSAN)
    {"few addresses", [] { few_addresses("64"); }},
#endif
};

#define WRONG(name, program, ...) Program({name, [] { program; }, {__VA_ARGS__}})
static const Program wrong_programs[] = {
    WRONG("barrier, thread 0 misses it", misses_kernel<<<3, 5>>>(0),
          "misses_kernel on device 0: divergent barrier in block (", ",0,0): thread (1,0,0) waits",
          "but thread (0,0,0) ended without reaching it", "cudaErrorLaunchFailure"),
    WRONG("barrier, thread 3 misses it", (OnDevice{1}, misses_kernel<<<1, 5>>>(3)),
          "misses_kernel on device 1: divergent barrier in block (0,0,0): thread (3,0,0) has ended",
          "but thread (0,0,0) waits at the barrier in extras/cpu/tests.cu:",
          "cudaErrorLaunchFailure"),
    WRONG("barrier, two at once", different_kernel<<<1, 5>>>(),
          "different_kernel on device 0: divergent barrier in block (0,0,0): thread (3,0,0) waits",
          "but thread (0,0,0) waits at the barrier in extras/cpu/tests.cu:"),
    WRONG("barrier, a thread leaves early", (leave_kernel<<<1, dim3(5, 2)>>>(5)),
          "leave_kernel on device 0: divergent barrier in block (0,0,0): thread (4,1,0) has ended"),
    WRONG("barrier, thread 0 leaves early", leave_kernel<<<1, 5>>>(0),
          "leave_kernel on device 0: divergent barrier", "thread (1,0,0) waits",
          "but thread (0,0,0) has ended"),
    WRONG("barrier, more turns for some", turns_differ_kernel<<<1, 2>>>(),
          "turns_differ_kernel on device 0: divergent barrier", "thread (1,0,0) waits",
          "but thread (0,0,0) has ended"),

    WRONG("shuffle, a lane has left", (leaves_kernel<<<3, 64>>>((int *)memory(0, 1), 0, 40)),
          "leaves_kernel on device 0: divergent __shfl_down_sync in block (",
          ",0,0): thread (32,0,0), lane 0, waits with mask 0xffffffff, but thread (40,0,0), lane 8",
          ", lane 8, has ended", "cudaErrorLaunchFailure"),
    WRONG("shuffle, thread 0 has left", (leaves_kernel<<<1, 32>>>((int *)memory(0, 1), 1, 32)),
          "leaves_kernel on device 0: divergent __shfl_down_sync in block (0,0,0): thread (1,0,0)",
          "but thread (0,0,0), lane 0, has ended"),
    WRONG("shuffle, a lane is at a barrier", shuffle_beside_barrier_kernel<<<1, 32>>>(16),
          "divergent __shfl_xor_sync in block (0,0,0): thread (16,0,0), lane 16, waits",
          "but thread (0,0,0), lane 0, waits at the barrier in extras/cpu/tests.cu:"),
    WRONG("__syncwarp, a lane has left the loop", some_turns_kernel<<<2, 64>>>(7),
          "some_turns_kernel on device 0: divergent __syncwarp in block (",
          ", lane 7, has ended"),
    WRONG("barrier, in half of a warp", barrier_in_branch_kernel<<<1, 64>>>(),
          "barrier_in_branch_kernel on device 0: divergent barrier in block (0,0,0): thread (16,0,",
          "has ended, but thread (0,0,0) waits at the barrier in extras/cpu/tests.cu:"),
    WRONG("warp functions, two at once", two_calls_kernel<<<1, 32>>>(),
          "two_calls_kernel on device 0: divergent __any_sync in block (0,0,0): thread (0,0,0)",
          "but thread (16,0,0), lane 16, waits at __all_sync in extras/cpu/tests.cu:"),
    WRONG("mask, two at once", (mask_kernel<<<1, 32>>>(3, ~0u)),
          "mask_kernel on device 0: divergent __ballot_sync in block (0,0,0): thread (0,0,0), ",
          "lane 0, waits with mask 0x00000003, but thread (1,0,0), lane 1, waits there with mask "
           "0xffffffff"),
    WRONG("mask, without the lane itself", (mask_kernel<<<1, 32>>>(~0u, 1)),
          "mask_kernel on device 0: __ballot_sync in block (0,0,0): thread (",
          "is not in its own mask 0x00000001", "cudaErrorLaunchFailure"),
    WRONG("shuffle, width", width_kernel<<<1, 32>>>(12), "__shfl_sync in block (0,0,0): thread (",
          "has width 12, which must be a power of two up to 32"),
    WRONG("lockstep, forwards", lockstep("forwards", false), "nan"),
    WRONG("lockstep, backwards", lockstep("backwards", true), "nan"),
    WRONG("lockstep, shuffled", lockstep("1", false), "nan"),
    WRONG("lockstep, shuffled, mirrored", lockstep("1", true), "nan"),

#if !defined(CUDA_CPU_ASAN) && !defined(CUDA_CPU_TSAN) // which print a report of their own
    WRONG("volatile without __syncwarp, an argument", (last_warp<argument, false>()),
          "notice: last_warp_kernel<spelling, false> on device 0, in extras/cpu/tests.cu:",
          "writes to volatile shared memory that lane ", "with no __syncwarp() in between"),
    WRONG("volatile without __syncwarp, a variable", (last_warp<variable, false>()), "notice: "),
    WRONG("volatile without __syncwarp, an array", (last_warp<array, false>()), "notice: "),
    WRONG("volatile without __syncwarp, dynamic", (last_warp<dynamic, false>()), "notice: "),
#endif

    WRONG("host function that calls CUDA", host_function_calls_cuda(),
          "cudaLaunchHostFunc: its function must not call CUDA", "cudaErrorNotPermitted"),
    WRONG("host function that throws", host_function_that_throws(),
          "cudaLaunchHostFunc on device 1: uncaught exception: beyond the end"),
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
    WRONG("kernel that launches a kernel", nested_kernel<<<1, 1>>>(),
          "nested_kernel on device 0 launches a kernel", "lacks dynamic parallelism"),
    WRONG("assert in a kernel", (OnDevice{1}, assert_kernel<<<3, dim3(5, 1)>>>(3)),
          "assert_kernel on device 1: block (",
          ",0,0), thread (4,0,0): assertion `threadIdx.x <= mo", "cudaErrorAssert"),
    WRONG("out of memory", out_of_memory(), "out of memory", "cudaErrorMemoryAllocation"),
    WRONG("out of memory, unchecked", unchecked_allocation(),
          "cudaMemcpy, source: the pointer is null: cudaMalloc in extras/cpu/tests.cu:",
          " failed, which asked for 20971520 bytes when device 1 had 4194304 free"),
    WRONG("CUDA_VISIBLE_DEVICES", visible_devices(),
          "has no effect without a GPU: CUDA_CPU_DEVICES says how many devices are emulated"),
    WRONG("wrong setting", wrong_setting("CUDA_CPU_CORES", "two"), "a whole number from 1"),
    WRONG("wrong word for peers", wrong_setting("CUDA_CPU_PEERS", "2"),
          ": expected a whole number from 0 to 1"),
    WRONG("wrong order of lanes", wrong_setting("CUDA_CPU_LANES", "sideways"),
          "expected forwards, backwards or a whole number"),

    WRONG("access, after cudaFree", hidden_access(1, freed(1, 10), 3),
          FAULT("hidden_kernel on device 1, in extras/cpu/tests.cu:",
                ": access to memory of device 1",
                ", byte 12 of the 40 bytes that extras/cpu/tests.cu:", "has freed")),
    WRONG("access, a page past the end", hidden_access(0, memory(0, 10), 1024),
          FAULT("hidden_kernel on device 0, in extras/cpu/tests.cu:",
                ": access to memory of device 0",
                ", byte 4096 of the 40 bytes that extras/cpu/tests.cu:", "allocated")),
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
          "misaligned_kernel on device 0, in extras/cpu/tests.cu:",
          ": misaligned access (the address of a float4 ",
          "cudaErrorMisalignedAddress"),
#endif
    WRONG("division by zero", WRONG_HERE(divide_kernel<<<1, 1>>>((int *)memory(0, 1), 0)),
          "divide_kernel on device 0, in extras/cpu/tests.cu:", ": an integer is divided by zero"),
#endif
    WRONG("access, by a pointer found in memory", found_in_memory(),
          FAULT("found_kernel on device 0, in extras/cpu/tests.cu:",
                ": access to memory of device 0, byte 0 of the 40 bytes that extras/cpu/tests.cu:",
                "through a pointer that it read from memory")),
    WRONG("access, no dynamic shared memory",
          FAULTS_HERE(dynamic_kernel<<<1, 1>>>(memory(0, 1), 3)),
          FAULT("dynamic_kernel on device 0, in extras/cpu/tests.cu:",
                ": access to byte 12 of dynamic ",
                "shared memory, but the launch asked for 0 bytes")),
    WRONG("access, beyond dynamic shared memory",
          FAULTS_HERE(dynamic_kernel<<<1, 1, 16>>>(memory(0, 1), 4)),
          FAULT(": access to byte 16 of dynamic shared memory, but the launch asked for 16 bytes")),
#ifndef CUDA_CPU_ASAN
    WRONG("access, a write one past a shared array",
          WRONG_HERE(beyond_write_kernel<float><<<3, 2>>>(5, 1.5f)),
          "beyond_write_kernel<float> on device 0: block (", ",0,0) has written to byte 24 of the ",
          "24 bytes of first, which extras/cpu/tests.cu:", "declares __shared__", "IllegalAddress"),
    WRONG("access, a write one before a shared array",
          WRONG_HERE(beyond_write_kernel<double><<<1, 1>>>(-1, 1)),
          "has written to byte -8 of the 48 bytes of first"),
    WRONG("access, a write one past a shared array of int",
          WRONG_HERE(beyond_write_kernel<int><<<1, 1>>>(6, -1)),
          "has written to byte 24 of the 24 bytes of first"),
    WRONG("access, a write one past a shared array of vectors",
          WRONG_HERE(beyond_write_kernel<float4><<<1, 7>>>(0, make_float4(1, 2, 3, 4))),
          "has written to byte 96 of the 96 bytes of first"),
    WRONG("access, a write one past a shared array of char",
          WRONG_HERE(beyond_write_kernel<char><<<1, 7>>>(0, 1)),
          "has written to byte 6 of the 6 bytes of first"),
    WRONG("access, a write one row past a shared array",
          WRONG_HERE(beyond_row_kernel<<<1, 2>>>(2)),
          "has written to byte 388 of the 264 bytes of rows"),
    WRONG("access, a write past dynamic shared memory that fills no 16 bytes",
          WRONG_HERE(beyond_dynamic_kernel<short><<<1, 1, 20>>>(10)),
          "beyond_dynamic_kernel<short> on device 0: block (0,0,0) has written to byte 20 of dyn",
          "the launch asked for 20 bytes"),
    WRONG("access, a write before dynamic shared memory",
          WRONG_HERE(beyond_dynamic_kernel<double><<<1, 1, 16>>>(-2)),
          "has written to byte -16 of dynamic shared memory"),
#endif
    WRONG("access, by the host", access_by_host(memory(1, 10)),
          FAULT("the host accesses memory of device 1, byte 8 of the 40 bytes that "
                "extras/cpu/tests.cu:",
                "allocated: copy it with cudaMemcpy")),
    WRONG("access, by the host after cudaFree", access_by_host(freed(1, 10)),
          FAULT("the host accesses memory of device 1, byte 8 of the 40 bytes that "
                "extras/cpu/tests.cu:",
                "has freed")),
    WRONG("access, by the host to a __device__ variable", FAULTS_HERE(on_each_device++),
          FAULT("on_each_device, which extras/cpu/tests.cu:", "declares as a device variable")),
    WRONG("access, by the host to memory of no device", fault_of_the_host(),
          "the program's handler"),
#if !defined(CUDA_CPU_ASAN) && !defined(CUDA_CPU_TSAN)
    WRONG("no addresses", LACKING_HERE(few_addresses("8192")),
          "cannot reserve addresses for the memory of device 0 (",
          " GB): raise ulimit -v, or set CUDA_CPU_ME"),
    WRONG("out of memory, unchecked, in a kernel", unchecked_in_kernel(),
          "assign_kernel on device 0",
          "access through a null pointer: cudaMalloc in extras/cpu/tests.cu:",
          "cudaErrorIllegalAddress"),
    WRONG("no thread", LACKING_HERE(no_thread()),
          "cannot start a thread for device 1: ", "raise ulimit -u", "CUDA_CPU_CORES=1"),
    WRONG("stack, a large array",
          WRONG_HERE(large_array_kernel<false><<<1, 1>>>(memory(0, 1), 20000)),
          "large_array_kernel<false> on device 0, in extras/cpu/",
          "do not fit into its stack of 64 KiB"),
    WRONG("stack, a large array of many threads",
          WRONG_HERE(large_array_kernel<true><<<1, 64>>>(memory(0, 1), 20000)),
          "large_array_kernel<true> on device 0, in extras/cpu/",
          "do not fit into its stack of 64 KiB"),
    WRONG("stack, endless recursion", WRONG_HERE(recursive_kernel<<<1, 1>>>((int *)memory(0, 1))),
          "recursive_kernel on device 0, in extras/cpu/tests.cu:", "is there endless recursion"),
    WRONG("access, by the host, in a function of a library",
          read_by_library(memory(1, 10)),
          "the host accesses memory of device 1, byte 0 of the 40 bytes that extras/cpu/tests.cu:"),
    WRONG("fault without a handler", fault_without_handler(),
          "the host accesses memory that is not there: is an index out of range, a pointer null"),
    WRONG("host, an index beyond a list", index_beyond_list(),
          "the host aborts: is an index out of range?"),
    WRONG("host without an end", host_without_end(),
          "the host has been in f, k = 2 for more than 1 s: is there an endless loop?"),
    WRONG("spinning on what nobody can set", spin(),
          "spin_kernel on device 0: block (1,0,0) has been running for 1 seconds and is at ",
          "thread (3,0,0), in extras/cpu/tests.cu:",
          "Does it wait for a value that another thread sets?"),
    WRONG("access, by the host, in a line that cannot be found", fault_without_line(),
          "memory of device 1, byte 0 of the 40 bytes that extras/cpu/tests.cu:",
          "cudaErrorIllegalAddress"),
    WRONG("access, by the host, a handler was installed before", fault_with_handlers(true),
          "byte 8 of the 40 bytes that extras/cpu/tests.cu:", "has freed"),
    WRONG("access, by the host, a handler is installed later", fault_with_handlers(false),
          "byte 8 of the 40 bytes that extras/cpu/tests.cu:", "has freed"),
#elif defined(CUDA_CPU_ASAN) // Accesses to memory that is mapped, but not theirs
    WRONG("access, one past the end", hidden_access(0, memory(0, 10), 10), poison),
    WRONG("access, one before the beginning", hidden_access(0, memory(0, 10), -1), poison),
    WRONG("access, one past a shared array",
          REPORTED(static_overrun_kernel<<<1, 10>>>(memory(0, 1), 10)), poison),
    WRONG("access, one past dynamic shared memory",
          REPORTED(dynamic_kernel<<<1, 1, 40>>>(memory(0, 1), 10)), poison),
    WRONG("access, a copy past the end of host memory",
          REPORTED(OK(cudaMemcpy(Floats(9).data(), memory(0, 10), 40, down))),
          "AddressSanitizer: heap-buffer-overflow"),
    WRONG("access, a copy past the end of pinned memory",
          REPORTED(OK(cudaMemcpy(memory(0, 10), pinned<float>(9).get(), 40, up))), poison),
#endif
};

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

TEST_CASE("right programs: are told nothing") {
    for (const Program &program : right_programs) check_silent(program.name);
}

TEST_CASE("wrong programs: are told what is wrong, and in which line") {
    for (const Program &program : wrong_programs) {
        int status = 0;
        const std::string output = output_of(program.name, status);
        CAPTURE(std::string(program.name));
        CAPTURE(output);
#ifdef CUDA_CPU_TSAN // whose reports have another status
        CHECK(status != 0);
#else
        CHECK(WEXITSTATUS(status) == 1);
#endif
        std::string line, place, message; // the first line that begins with the place
        for (std::istringstream lines(output); std::getline(lines, line);)
            if (place.empty() && line.rfind("expected: ", 0) == 0) place = line.substr(10);
            else if (!place.empty() && message.empty() && line.rfind(place, 0) == 0) message = line;
        CHECK(place != "");
        CHECK(message != "");
        CAPTURE(message);
        for (const std::string part : program.says) {
            CAPTURE(part);
            CHECK(message.find(part) != std::string::npos);
        }
    }
}

// ---------------------------------------------------------------------------------------------
// 7. Races
// ThreadSanitizer tells a program that lacks one thing, `runtime_tests --wrong 'race: NAME'`, from
// the same program with it, `runtime_tests --wrong 'right: NAME'`.

struct Race {
    bool right;
    float *x = memory(0, 4), *y = memory(1, 4), *host = nullptr; // host: pinned
    cudaStream_t a = new_stream(0), b = new_stream(0), c = new_stream(1);
    explicit Race(bool right) : right(right) { OK(cudaMallocHost(&host, 4 * sizeof(float))); }
};
struct RaceProgram {
    const char *name;
    void (*run)(bool right);
};
static std::vector<RaceProgram> race_programs;

#define RACE(name) RACE_2(__COUNTER__, name)
#define RACE_2(n, name) RACE_3(n, name)
#define RACE_3(n, name)                                                                            \
    struct Race##n : Race {                                                                        \
        void run();                                                                                \
    };                                                                                             \
    static const bool race_added_##n =                                                             \
        (race_programs.push_back({name, [](bool right) { Race##n{Race(right)}.run(); }}), true);   \
    void Race##n::run()

__global__ void neighbour_kernel(float *x, bool right) { // one more barrier: written, then read
    __shared__ float t[4];
    t[threadIdx.x] = threadIdx.x;
    if (right) __syncthreads();
    x[threadIdx.x] = t[3 - threadIdx.x];
}
RACE("barrier before reading") { neighbour_kernel<<<1, 4>>>(x, right); }
__global__ void loop_kernel(float *x, bool right) { // one more barrier: read, then written
    extern __shared__ float t[];
    for (int i = 0; i < 3; i++) {
        t[threadIdx.x] = i;
        __syncthreads();
        x[threadIdx.x] = t[3 - threadIdx.x];
        if (right) __syncthreads();
    }
}
RACE("barrier before writing again") { loop_kernel<<<1, 4, 16>>>(x, right); }
__global__ void threads_kernel(float *x, bool right) { x[right ? threadIdx.x : 0] = threadIdx.x; }
__global__ void warp_neighbour_kernel(float *x, bool right) { // a shuffle does not order memory
    __shared__ float t[4];
    t[threadIdx.x] = threadIdx.x;
    if (right) __syncwarp();
    else __shfl_sync(0xf, 1, 0);
    x[threadIdx.x] = t[3 - threadIdx.x];
    if (right) __syncwarp();
    t[threadIdx.x] = 0;
}
RACE("__syncwarp before reading") { warp_neighbour_kernel<<<1, 4>>>(x, right); }
RACE("an element for each thread") { threads_kernel<<<1, 2>>>(x, right); }
__global__ void blocks_kernel(float *x, bool right) { x[right ? blockIdx.x : 0] = blockIdx.x; }
RACE("an element for each block") { blocks_kernel<<<2, 1>>>(x, right); }

// Work enqueued on `waiting` from now on starts only when all work now on `stream` has finished.
static void wait_for(cudaStream_t waiting, int device, cudaStream_t stream) {
    cudaEvent_t event = new_event(device, cudaEventDisableTiming);
    OK(cudaEventRecord(event, stream));
    OK(cudaStreamWaitEvent(waiting, event));
}
RACE("event between streams") {
    assign_kernel<<<1, 1, 0, a>>>(x, 1);
    if (right) wait_for(b, 0, a);
    plus_kernel<<<1, 1, 0, b>>>(x, 2);
}
RACE("event recorded after the work") {
    if (!right) wait_for(b, 0, a);
    assign_kernel<<<1, 1, 0, a>>>(x, 1);
    if (right) wait_for(b, 0, a);
    plus_kernel<<<1, 1, 0, b>>>(x, 2);
}
RACE("event before a copy between devices") {
    assign_kernel<<<1, 1, 0, a>>>(x, 1);
    if (right) wait_for(c, 0, a);
    OK(cudaMemcpyPeerAsync(y, 1, x, 0, 4, c));
}
RACE("event after a copy between devices") {
    OK(cudaMemcpyPeerAsync(y, 1, x, 0, 4, c));
    if (right) wait_for(a, 1, c);
    assign_kernel<<<1, 1, 0, a>>>(x, 1);
}
RACE("cudaMemcpyPeer orders, cudaMemcpyPeerAsync does not") {
    assign_kernel<<<1, 1, 0, a>>>(x, 1);
    OK((right ? cudaMemcpyPeer(y, 1, x, 0, 4) : cudaMemcpyPeerAsync(y, 1, x, 0, 4)));
    OnDevice{1}, plus_kernel<<<1, 1, 0, c>>>(y, 1);
}
RACE("the default stream orders a stream that blocks") {
    a = new_stream(0, right ? cudaStreamDefault : cudaStreamNonBlocking);
    assign_kernel<<<1, 1, 0, a>>>(x, 1);
    plus_kernel<<<1, 1>>>(x, 2);
    plus_kernel<<<1, 1, 0, a>>>(x, 3);
}

__global__ void ready_kernel(float *x, unsigned *ready, bool right) { // a fence before the flag
    if (blockIdx.x == 0) {
        x[0] = 1;
        if (right) __threadfence();
        atomicExch(ready, 1u);
    } else {
        while (!atomicAdd(ready, 0u)) usleep(100);
        x[1] = x[0];
    }
}
RACE("fence before an atomic function tells that all is written") {
    OK(cudaMemset(y = memory(0, 1), 0, 4));
    ready_kernel<<<2, 1>>>(x, (unsigned *)y, right);
}
__global__ void sum_kernel(float *x, bool right) {
    if (right) atomicAdd(x, 1.f);
    else *x += 1;
}
__device__ int turns;
__global__ void turn_kernel(bool right) {
    if (right) atomicAdd(&turns, 1);
    else turns++;
}
RACE("a variable of the device, by two blocks") { turn_kernel<<<2, 1>>>(right); }
RACE("a variable of each device needs no event between devices") {
    turn_kernel<<<1, 1, 0, a>>>(false);
    if (right) OnDevice{1}, turn_kernel<<<1, 1, 0, c>>>(false);
    else turn_kernel<<<1, 1, 0, b>>>(false);
}
RACE("atomicAdd by two blocks") { sum_kernel<<<2, 1>>>(x, right); }

static void read_by_host(const volatile float *p) { (void)*p; }
RACE("wait before writing pinned memory again") {
    *host = 1;
    cudaEvent_t copied = new_event(0);
    OK(cudaMemcpyAsync(x, host, 4, up, a));
    OK(cudaEventRecord(copied, a));
    if (right) OK(cudaEventSynchronize(copied));
    *host = 2;
}
RACE("wait before reading pinned memory") {
    assign_kernel<<<1, 1, 0, a>>>(x, 1);
    OK(cudaMemcpyAsync(host, x, 4, down, a));
    if (right) OK(cudaStreamSynchronize(a));
    read_by_host(host);
}
RACE("host function after the copy that it reads") {
    assign_kernel<<<1, 1, 0, a>>>(x, 1);
    OK(cudaMemcpyAsync(host, x, 4, down, a));
    auto read = [](void *p) { ((float *)p)[1] = ((float *)p)[0]; };
    OK(cudaLaunchHostFunc(right ? a : b, read, host));
}
RACE("query before reading what a kernel writes") {
    cudaEvent_t set = new_event(0);
    assign_kernel<<<1, 1, 0, a>>>(host, 1);
    OK(cudaEventRecord(set, a));
    while (right && cudaEventQuery(set) == cudaErrorNotReady) usleep(100);
    read_by_host(host);
}

TEST_CASE("races: right programs are told nothing") {
    int status = 0;
    CHECK(output_of("no such name", status).find("no program is called") != std::string::npos);
    CHECK(status != 0);
    for (const RaceProgram &program : race_programs) // in any build
        check_silent(std::string("right: ") + program.name);
}

TEST_CASE("races: ThreadSanitizer sees each missing barrier, event and wait") {
#ifdef CUDA_CPU_TSAN
    for (const RaceProgram &program : race_programs) {
        int status = 0;
        std::string output; // it may miss two accesses at the very same moment: once, not thrice
        for (int i = 0; i < 3 && status == 0; i++)
            output = output_of(std::string("race: ") + program.name, status);
        CAPTURE(std::string(program.name));
        CAPTURE(output);
        CHECK(status != 0);
        CHECK(output.find("ThreadSanitizer: data race") != std::string::npos);
        // the line of one of the two
        CHECK(output.find("extras/cpu/tests.cu:") != std::string::npos);
    }
#else
    MESSAGE("skipped: needs ThreadSanitizer (make race)");
#endif
}

// ---------------------------------------------------------------------------------------------
// 8. Students' programs
// What a course's kernels use besides: each program's numbers are those that a GPU gives.

static std::vector<int> numbers(int n) { // 0, 7, 14, ... modulo 101
    std::vector<int> x(n);
    for (int i = 0; i < n; i++) x[i] = i * 7 % 101;
    return x;
}
constexpr int many = small_only ? 200 : 20000;

// counts[c] += how many x[i] are c modulo 8: in shared memory first, as every textbook does it
__global__ void histogram_kernel(int *counts, const int *x, int n) {
    __shared__ int local[8];
    if (threadIdx.x < 8) local[threadIdx.x] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&local[__ldg(&x[i]) % 8], 1);
    __syncthreads();
    if (threadIdx.x < 8) atomicAdd(&counts[threadIdx.x], local[threadIdx.x]);
}
TEST_CASE("atomicAdd: a histogram in shared memory") {
    const std::vector<int> x = numbers(many);
    std::vector<int> want(8);
    for (int value : x) want[value % 8]++;
    auto X = device_copy(x), counts = device_copy(std::vector<int>(8));
    OK_LAUNCH(histogram_kernel<<<6, 16>>>(counts.get(), X.get(), many));
    CHECK(fetch(counts, 8) == want);
}

template <class T> __global__ void dot_kernel(T *sum, const int *x, const int *y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(sum, T(x[i] * y[i] % 64));
}
template <class T> static void test_dot() {
    const std::vector<int> x = numbers(many);
    T want = 0; // exact in any order
    for (int value : x) want += value * value % 64;
    auto X = device_copy(x);
    auto sum = device_copy(std::vector<T>(1));
    OK_LAUNCH(dot_kernel<<<(many + 63) / 64, 64>>>(sum.get(), X.get(), X.get(), many));
    CHECK(fetch(sum, 1)[0] == want);
}
TEST_CASE("atomicAdd: a dot product in every type") {
    test_dot<int>();
    test_dot<unsigned>();
    test_dot<unsigned long long>();
    test_dot<float>();
    test_dot<double>();
}

// *sum = the sum of x, added up by whichever block is done last
__global__ void last_block_kernel(float *sum, float *partial, unsigned *done, const int *x, int n) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        float mine = 0;
        for (int i = blockIdx.x; i < n; i += gridDim.x) mine += x[i];
        partial[blockIdx.x] = mine;
        __threadfence();
        last = atomicInc(done, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last || threadIdx.x > 0) return;
    *sum = 0;
    for (unsigned b = 0; b < gridDim.x; b++) *sum += partial[b];
}
TEST_CASE("__threadfence: the last block adds up what the others have written") {
    const std::vector<int> x = numbers(many);
    auto X = device_copy(x);
    auto done = device_copy(std::vector<unsigned>(1));
    auto partial = floats_on(0, 37), sum = floats_on(0, 1);
    for (int i = 0; i < (small_only ? 1 : 50); i++) // the counter is 0 again after each
        last_block_kernel<<<37, 3>>>(sum.get(), partial.get(), done.get(), X.get(), many);
    CHECK(fetch(sum, 1)[0] == std::accumulate(x.begin(), x.end(), 0.0f));
}

__device__ float atomic_max(float *p, float x) { // as in CUDA's manual
    int *bits = (int *)p, old = atomicOr(bits, 0), seen;
    do {
        seen = old;
        if (__int_as_float(seen) >= x) break;
        old = atomicCAS(bits, seen, __float_as_int(x));
    } while (old != seen);
    return __int_as_float(old);
}
__global__ void max_kernel(float *most, const int *x, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomic_max(most, x[i] - 200.5f);
}
TEST_CASE("atomicCAS: the greatest of floats") {
    auto x = device_copy(numbers(many));
    auto most = floats_on(0, 1);
    assign_kernel<<<1, 1>>>(most.get(), -1e9f);
    OK_LAUNCH(max_kernel<<<(many + 31) / 32, 32>>>(most.get(), x.get(), many));
    CHECK(values(most) == "-100.5");
}

// Each thread's operations; which thread comes first does not matter.
__global__ void all_atomics_kernel(int *i, unsigned *u, unsigned long long *l, float *f) {
    const int t = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
    atomicSub(&i[0], t);
    atomicMin(&i[1], -t);
    atomicMax(&i[2], t);
    atomicAnd(&i[3], ~(1 << t % 8));
    atomicOr(&u[0], 1u << t % 32);
    atomicXor(&u[1], t + 1);
    atomicInc(&u[2], 4);
    atomicDec(&u[3], 4);
    atomicSub(&u[4], 1u);
    atomicMax(&l[0], (1ull << 40) + t);
    atomicMin(&l[1], (1ull << 40) - t);
    atomicOr(&l[2], 1ull << t % 64);
    atomicAdd(&f[0], atomicExch(&f[1 + t % 3], 1.f));               // sums n - 3, and 3 are left
    if (t < n) atomicExch(&l[3], atomicCAS(&l[4], 5ull, 6ull) | 1); // 5 or 7
}
TEST_CASE("atomicSub, Min, Max, And, Or, Xor, Inc, Dec, Exch, CAS") {
    auto i = device_copy(std::vector<int>{0, 0, 0, -1});
    auto u = device_copy(std::vector<unsigned>{0, 0, 3, 3, 0});
    auto l = device_copy(std::vector<unsigned long long>{0, ~0ull, 0, 0, 5});
    auto f = device_copy(Floats(4));
    OK_LAUNCH(all_atomics_kernel<<<8, 12>>>(i.get(), u.get(), l.get(), f.get())); // 96 threads
    CHECK(fetch(i, 4) == std::vector<int>{-95 * 48, -95, 95, ~255});
    // 1 ^ 2 ^ ... ^ 96; 3 + 96 modulo 5; 3 - 96 modulo 5; -96
    CHECK(fetch(u, 5) == std::vector<unsigned>{~0u, 96, 4, 2, 0u - 96});
    const auto L = fetch(l, 5);
    CHECK(L[0] == (1ull << 40) + 95);
    CHECK(L[1] == (1ull << 40) - 95);
    CHECK(L[2] == ~0ull);
    CHECK((L[3] == 5 || L[3] == 7));
    CHECK(L[4] == 6);
    CHECK(fetch(f, 4) == Floats{93, 1, 1, 1});
}

__global__ void vectors_kernel(float4 *y, const float4 *x, int2 i, double2 d) {
    const float4 v = x[threadIdx.x];
    y[threadIdx.x] = make_float4(v.w + i.x, v.z + i.y, v.y + d.x, v.x + d.y);
}
TEST_CASE("float4: four floats at once") {
    Floats x(8), want = {4, 4, 4, 4, 8, 8, 8, 8};
    for (int i = 0; i < 8; i++) x[i] = i;
    auto X = device_copy(x), Y = floats_on(0, 8);
    OK_LAUNCH(vectors_kernel<<<1, 2>>>((float4 *)Y.get(), (float4 *)X.get(), make_int2(1, 2),
                                       make_double2(3, 4)));
    CHECK(fetch(Y, 8) == want);
    CHECK(sizeof(float3) == 12);
    CHECK(alignof(float2) == 8);
    CHECK(alignof(int4) == 16);
    CHECK(make_uint4(1, 2, 3, 4).w + make_int3(1, 2, 3).z + make_float3(1, 2, 3).y == 9);
}

__global__ void intrinsics_kernel(float *y, float x, long long *ticks) {
    const long long begin = clock64();
    y[0] = rsqrtf(x);
    y[1] = __logf(__expf(x)) + __sinf(0) + __cosf(0);
    y[2] = __powf(x, 2) + __fdividef(x, 2);
    y[3] = __fmaf_rn(x, x, 1) - fmaf(x, x, 2);
    y[4] = __saturatef(x) + __saturatef(-x) + __saturatef(0.5f) + __saturatef(NAN);
    y[5] = __int_as_float(__float_as_int(x));
    y[6] = min(7, blockDim.x) + max(0.5f, 1.0);
    y[7] = __umulhi(0x80000000u, blockDim.x * 6) + __umulhi(~0u, 1);
    *ticks = clock64() - begin;
}
TEST_CASE("rsqrtf, __expf, __saturatef, __int_as_float, ..., clock64") {
    auto y = floats_on(0, 8);
    auto ticks = pinned<long long>(1);
    OK_LAUNCH(intrinsics_kernel<<<1, 1>>>(y.get(), 4, ticks.get()));
    CHECK(fetch(y, 8) == Floats{0.5, 5, 18, -1, 1.5, 4, 2, 3});
    CHECK(*ticks >= 0);
}

// y = filter applied to x, over the middle of x
__constant__ float filter[3] = {1, 2, 1};
__device__ float scale = 1, offsets[2];
__global__ void filter_kernel(float *y, const float *x, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i + 3 > n) return;
    float sum = offsets[0] + offsets[1];
    for (int k = 0; k < 3; k++) sum += filter[k] * x[i + k];
    y[i] = sum * scale;
}
TEST_CASE("__constant__: a filter, one on each device") {
    const float other[3] = {0, 1, -1}, offset[2] = {10, 20}, half = 0.5f;
    Floats x(10), want(8);
    OK(cudaMemcpyToSymbol(offsets, offset, sizeof offset));
    OnDevice current(1);
    OK(cudaMemcpyToSymbol(filter, other, sizeof other));
    OK(cudaMemcpyToSymbol(offsets, offset, 4, 4)); // only one of two
    OK(cudaMemcpyToSymbol(offsets, offset, 4));
    OK(cudaMemcpyToSymbol(scale, &half, 4));
    for (int i = 0; i < 10; i++) x[i] = i * i;
    for (int device : {0, 1}) {
        auto X = device_copy(x, device), y = floats_on(device, 8);
        OK(cudaSetDevice(device));
        OK_LAUNCH(filter_kernel<<<2, 5>>>(y.get(), X.get(), 10));
        for (int i = 0; i < 8; i++)
            want[i] = device ? (20 + x[i + 1] - x[i + 2]) / 2 : 30 + x[i] + 2 * x[i + 1] + x[i + 2];
        CHECK(fetch(y, 8) == want);
    }
    Floats got(3, -1);
    OK(cudaMemcpyFromSymbol(got.data(), filter, 8, 4));
    CHECK(got == Floats{1, -1, -1});
}

__device__ unsigned calls;
__device__ float grid[2][3], *row = nullptr;
__global__ void count_calls_kernel() {
    atomicAdd(&calls, 1);
    if (blockIdx.x + threadIdx.x == 0) row = grid[1];
}
__global__ void row_kernel() { row[threadIdx.x] = threadIdx.x + calls; }
TEST_CASE("__device__: a counter of each device, pointers to variables") {
    for (int device : {0, 1}) {
        TestStream stream(device);
        OnDevice current(device);
        OK_LAUNCH(count_calls_kernel<<<device + 5, 4, 0, stream>>>());
        OK_LAUNCH(row_kernel<<<1, 3, 0, stream>>>());
        unsigned n = 0;
        OK(cudaMemcpyFromSymbolAsync(&n, calls, sizeof n, 0, down, stream));
        CHECK(n == 4 * (device + 5u));
        float *p = nullptr, got[2] = {};
        size_t bytes = 0;
        OK(cudaGetSymbolAddress((void **)&p, grid));
        OK(cudaGetSymbolSize(&bytes, grid));
        CHECK(bytes == 24);
        OK(cudaMemset(p, 0, 12));
        OK_LAUNCH(plus_kernel<<<1, 6>>>(p, 1)); // as any memory of the device
        OK(cudaMemcpy(got, p + 2, 8, down));
        CHECK(got[0] == 1);
        CHECK(got[1] == 1 + n);
        OK(cudaMemcpyToSymbolAsync(calls, &bytes, 4, 0, up, stream));
        OK(cudaStreamSynchronize(stream));
        OK(cudaMemcpyFromSymbol(&n, calls, sizeof n));
        CHECK(n == 24);
    }
    float x = 0, *p = nullptr, list[9] = {};
    const cudaError_t no_symbol = cudaErrorInvalidSymbol;
    REFUSED(no_symbol, cudaMemcpyToSymbol(&scale, &x, 4), "cudaMemcpyToSymbol: pass the name of");
    REFUSED(no_symbol, cudaMemcpyFromSymbol(&x, "scale", 4), "cudaMemcpyFromSymbol: pass the name");
    REFUSED(value, cudaMemcpyToSymbol(filter, list, 16),
            "cudaMemcpyToSymbol, destination: 16 bytes at offset 0 overrun the 12 bytes that");
    REFUSED(value, cudaMemcpy(filter, list, 12, up),
            "cudaMemcpy, destination: filter is a device variable, which has no address");
    REFUSED_LAUNCH(value, assign_kernel<<<1, 1>>>(&scale, 1), "argument 1: scale is a device vari");
    OK(cudaGetSymbolAddress((void **)&p, scale));
    REFUSED(value, cudaFree(p), "was not returned by cudaMalloc");
}

namespace cg = cooperative_groups;
template <int lanes> __global__ void groups_kernel(float *y, const float *x, int n) {
    __shared__ float sums[32];
    const cg::thread_block block = cg::this_thread_block();
    const auto tile = cg::tiled_partition<lanes>(block);
    float sum = 0, greatest = 0;
    for (unsigned i = block.thread_rank(); i < (unsigned)n; i += block.size()) {
        sum += x[i];
        greatest = max(greatest, x[i]);
    }
    sum = cg::reduce(tile, sum, cg::plus<float>());
    greatest = cg::reduce(tile, greatest, cg::greater<float>());
    const unsigned odd = tile.ballot(tile.thread_rank() % 2);
    const int rank = tile.thread_rank();
    const int near = 10 * tile.shfl_up(rank, 2) + tile.shfl_down(rank, 1); // of lane 5: 36
    const int votes = tile.shfl(near, 5) + tile.any(rank == 0) + tile.all(rank == 0);
    greatest = tile.shfl(greatest, 0);
    if (tile.thread_rank() == 0) {
        sums[tile.meta_group_rank()] = sum;
        if (greatest == n - 1) y[1] = greatest; // one tile has read it
    }
    cg::sync(block);
    if (block.thread_rank() == 0) {
        for (unsigned i = 1; i < tile.meta_group_size(); i++) sum += sums[i];
        y[0] = sum, y[2] = odd, y[3] = votes;
    }
    tile.sync();
}
TEST_CASE("cooperative groups: a block, and tiles of it") {
    const int n = 300;
    Floats host(n);
    std::iota(host.begin(), host.end(), 0);
    auto x = device_copy(host), y = floats_on(0, 4);
    for (bool warps : {true, false}) {
        if (warps) OK_LAUNCH(groups_kernel<32><<<1, 128>>>(y.get(), x.get(), n));
        else OK_LAUNCH(groups_kernel<8><<<1, dim3(16, 4)>>>(y.get(), x.get(), n));
        const unsigned odd = warps ? 0xaaaaaaaa : 0xaa;
        CHECK(fetch(y, 4) == Floats{n * (n - 1) / 2, n - 1, float(odd), 37});
    }
}

// A program's lines, and what the compiler says of those that use what is lacking.
struct Lacking {
    std::string line, says;
};
static const std::string unavailable = "is unavailable: the stand-in lacks it";
static const Lacking lacking[] = {
    {"#include <thrust/device_vector.h>", "thrust/device_vector.h: the stand-in lacks it"},
    {"#include <curand_kernel.h>", "curand_kernel.h: the stand-in lacks it"},
    {"#include <cuda_runtime.h>", ""},
    {"#include <device_launch_parameters.h>", ""},
    {"void graph() { cudaGraphCreate(nullptr, 0); }", unavailable},
    {"void object(cudaTextureObject_t) {}", unavailable},
    {"float fetch() { return tex2D<float>(0, 1); }", unavailable},
    {"void volume() { cudaMalloc3D(nullptr, 3); }", unavailable},
    {"void ipc() { cudaIpcGetMemHandle(0, 1); }", unavailable},
    {"void lane() { \141sm volatile(\"exit;\"); }", "inline PTX: the stand-in lacks it"},
    {"__device__ __managed__ int all = 1;", "__managed__: the stand-in lacks it"},
    {"__device__ float *several, *pointers;",
     "declare one __device__ or __constant__ variable per line"},
    {"struct A { __device__ A &operator=(const A &) = default; };", ""},
    {"__constant__ struct { float x; } no_name;", "of a type that has a name"},
    {"struct __align__(16) Four { float x[4]; };", ""},
    {"void CUDART_CB called(void *) {}", ""},
    {"void attributes(cudaFuncAttributes *a) {}", unavailable},
    {"__global__ void match_kernel(int *x) { __match_any_sync(~0u, *x); }", unavailable},
    {"void group(cooperative_groups::thread_group) {}", unavailable},
    {"__global__ void smallest_kernel(long long *x) { atomicMin(x, atomicMax(x, 3)); }", ""},
    {"__global__ void dim_kernel(dim3 *x) { *x = blockIdx; uint3 y = blockDim; x->x = y.x; }", ""},
    {"ushort4 vector(char1 x) { return make_ushort4(x.x, 1, 2, make_longlong2(3, 4).y); }", ""},
    {"template <class F> __global__ void apply_kernel(float *x, F f) { *x = f(*x); }", ""},
    {"void pass(float (*f)(float)) { apply_kernel<<<1, 1>>>(nullptr, f); }",
     "a function pointer as a kernel's argument: the stand-in lacks it"},
    {"__device__ constexpr int n = 2, m = 3;", ""},
    {"__constant__ float several_arrays[n], of_floats[n][m];", ""},
    {"template <class T> __device__ T twice(T x, int y = 1) { return x + x + y; }", ""},
};
TEST_CASE("what the stand-in lacks is an error of the compiler's that says so") {
#if defined(__clang__)
    const std::string compiler = "clang++";
#else
    const std::string compiler = "g++";
#endif
#if defined(__clang__) || __GNUC__ >= 12
    const std::string file = "build/lacking." + std::to_string(getpid());
    {
        std::ofstream program(file);
        for (const Lacking &l : lacking) program << l.line << "\n";
    }
    const std::string command = "command -v " + compiler + " >/dev/null || exit 3; LC_ALL=C sed " +
                                "-zEf extras/cpu/to_cpp.sed " + file + " | LC_ALL=C " + compiler +
                                " -std=c++17 -Iextras/cpu -fsyntax-only -w -x c++ - 2>&1";
    int status = 0;
    const std::string output = "\n" + output_of_shell(command, status);
    unlink(file.c_str());
    if (WEXITSTATUS(status) != 3) {
        for (size_t i = 0; i < std::size(lacking); i++) { // each is named by the line it stands in
            const std::string here = "\n<stdin>:" + std::to_string(i + 1) + ":";
            CAPTURE(lacking[i].line);
            CAPTURE(output);
            CHECK((output.find(here) != std::string::npos) == (lacking[i].says != ""));
            CHECK(output.find(lacking[i].says) != std::string::npos);
        }
        return;
    }
#endif
    MESSAGE("skipped: needs g++ 12 or clang++, not " << compiler);
}

__global__ void transpose_kernel(float *y, size_t pitch, const float *x, int rows, int columns) {
    const int r = threadIdx.y, c = threadIdx.x;
    float *row = (float *)((char *)y + c * pitch);
    if (r < rows && c < columns) row[r] = x[r * columns + c];
}
TEST_CASE("cudaMemcpy2D, cudaMemset2D: rows with a pitch") {
    const int rows = 3, columns = 5;
    float *y = nullptr;
    size_t pitch = 0;
    OK(cudaMallocPitch(&y, &pitch, rows * one_float, columns));
    CHECK(pitch == 512);
    OK(cudaMemset2D(y, pitch, 0, rows * one_float, columns));
    Floats x(rows * columns), want, got(columns * 4, -1);
    for (int i = 0; i < rows * columns; i++) x[i] = i;
    for (int c = 0; c < columns; c++) want.insert(want.end(), {x[c], x[c + 5], x[c + 10], -1});
    auto X = device_copy(x);
    OK_LAUNCH(transpose_kernel<<<1, dim3(8, 4)>>>(y, pitch, X.get(), rows, columns));
    const size_t to = 4 * one_float, width = rows * one_float;
    OK(cudaMemcpy2D(got.data(), to, y, pitch, width, columns, cudaMemcpyDefault));
    CHECK(got == want);
    TestStream stream; // from pageable memory, which is free at once, and back
    OK(cudaMemset2DAsync(y, pitch, 0xFF, width, columns, stream));
    OK(cudaMemcpy2DAsync(y, pitch, got.data(), to, 4, 2, up, stream));
    std::fill(got.begin(), got.end(), -1);
    OK(cudaMemcpy2DAsync(got.data(), to, y, pitch, width, 2, down, stream));
    CHECK(got[0] == 0);
    CHECK(got[4] == 1);
    CHECK(std::isnan(got[1]));
    CHECK(got[3] == -1);
    REFUSED(cudaErrorInvalidPitchValue, cudaMemcpy2D(got.data(), 8, y, pitch, width, 2, down),
            "cudaMemcpy2D: rows of 12 bytes do not fit into a pitch of 8");
    REFUSED(value, cudaMemcpy2D(y, pitch, got.data(), to, width, columns + 1, up),
            "cudaMemcpy2D, destination: 2572 bytes at offset 0 overrun the 2560 bytes that");
    REFUSED(value, cudaMemset2D(y + 1, pitch, 0, pitch, columns), "cudaMemset2D: 2560 bytes at");
    OK(cudaFree(y));
}

TEST_CASE("cudaMallocManaged: one address for the host and every device") {
    float *x = nullptr, *y = memory(1, 1), *z = memory(0, 4);
    OK(cudaMallocManaged(&x, 4 * one_float));
    CHECK(std::isnan(x[3]));
    std::fill_n(x, 4, 1);
    OK(cudaMemPrefetchAsync(x, 4 * one_float, 1));
    for (int device : {0, 1}) {
        OnDevice current(device);
        OK_LAUNCH(plus_kernel<<<1, 4>>>(x, device + 1));
        OK(cudaDeviceSynchronize());
    }
    CHECK(Floats(x, x + 4) == Floats(4, 4));
    OK(cudaMemset(x, 0, 4));
    OK(cudaMemcpy(y, x + 1, 4, cudaMemcpyDefault));
    OK(cudaMemcpy(x + 2, y, 4, down));
    OK(cudaMemcpyPeer(z, 0, x, 1, 16));
    OK(cudaDeviceSynchronize());
    CHECK(Floats(x, x + 4) == Floats{0, 4, 4, 4});
    REFUSED(value, cudaMemcpy(z, x, 20, up), "cudaMemcpy, destination: 20 bytes");
    REFUSED(value, cudaMemset(x + 1, 0, 16), "overrun the 16 bytes that", "on every device");
    REFUSED(value, cudaFreeHost(x), "was not returned by cudaMallocHost");
    REFUSED(value, cudaMemPrefetchAsync(z, 16, 0), "was not returned by cudaMallocManaged");
    OK(cudaFree(x));
    REFUSED_LAUNCH(value, plus_kernel<<<1, 4>>>(x, 1), "is memory of every device that", "freed");
    REFUSED(value, cudaFree(x), "on every device was already freed by extras/cpu/tests.cu:");
}

TEST_CASE("cudaMallocAsync, cudaFreeAsync: in the stream's order") {
    auto y = floats_on(0, 1);
    TestStream stream, on_1(1);
    float *x = nullptr;
    OK(cudaMallocAsync(&x, one_float, stream));
    Hold hold(stream, x);
    OK(cudaMemcpyAsync(y.get(), x, one_float, within, stream));
    OK(cudaFreeAsync(x, stream)); // the copy before it has not even begun
    REFUSED_LAUNCH(value, (plus_kernel<<<1, 1, 0, stream>>>(x, 1)), "argument 1", "has freed");
    REFUSED(value, cudaFreeAsync(x, stream), "cudaFreeAsync", "has freed");
    hold.release_and_wait_for(stream);
    CHECK(values(y) == "5");
    float *z = memory(0, 1);
    REFUSED(value, cudaFreeAsync(z, stream), "was not returned by cudaMallocAsync");
    OK(cudaMallocAsync(&x, one_float, nullptr));
    REFUSED(value, cudaFreeAsync(x, on_1), "is memory of device 0, not of device 1");
    OK(cudaFree(x)); // allowed too
}

TEST_CASE("cudaHostRegister: memory of the host becomes pinned") {
    Floats host = {1, 2, 3, 4};
    auto x = floats_on(0, 1);
    TestStream stream;
    REFUSED_LAUNCH(value, plus_kernel<<<1, 4>>>(host.data(), 1), "argument 1", on_host);
    OK(cudaHostRegister(host.data(), 16, cudaHostRegisterDefault));
    OK_LAUNCH(plus_kernel<<<1, 4>>>(host.data(), 1)); // a kernel may use it
    OK(cudaDeviceSynchronize());
    CHECK(host == Floats{2, 3, 4, 5});
    Hold hold(stream, x.get(), 7); // and a copy of it does not hold the host up
    OK(cudaMemcpyAsync(host.data(), x.get(), 4, down, stream));
    hold.release_and_wait_for(stream);
    CHECK(host[0] == 7);
    REFUSED(cudaErrorHostMemoryAlreadyRegistered, cudaHostRegister(&host[1], 4, 0),
            "cudaHostRegister: some or all of the 4 bytes at", "are already pinned");
    REFUSED(value, cudaFreeHost(host.data()), "was not returned by cudaMallocHost");
    OK(cudaHostUnregister(host.data()));
    REFUSED(cudaErrorHostMemoryNotRegistered, cudaHostUnregister(host.data()),
            "cudaHostUnregister:", "was not given to cudaHostRegister");
    REFUSED(value, cudaHostRegister(x.get(), 4, 0), "is memory of device 0, not of the host");
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

TEST_CASE("cudaOccupancyMaxActiveBlocksPerMultiprocessor, cudaDeviceGetAttribute, priorities") {
    int blocks = 0, threads = 0, cores = 0, least = 0, greatest = 0;
    OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, dot_kernel<float>, 256, 0));
    CHECK(blocks == 1);
    OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, empty_kernel, 2048, 0));
    CHECK(blocks == 0);
    OK(cudaDeviceGetAttribute(&cores, cudaDevAttrMultiProcessorCount, 0));
    OK(cudaOccupancyMaxPotentialBlockSize(&blocks, &threads, empty_kernel));
    CHECK(blocks == cores);
    CHECK(threads == 1024);
    REFUSED(cudaErrorInvalidDevice, cudaDeviceGetAttribute(&cores, cudaDevAttrWarpSize, 2),
            "cudaDeviceGetAttribute: there is no device 2: the device count is 2");
    REFUSED(value, cudaDeviceGetAttribute(&cores, cudaDeviceAttr(9999), 0), "lacks attribute 9999");
    OK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CHECK(greatest < least);
    cudaStream_t stream;
    OK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
    OK_LAUNCH(empty_kernel<<<1, 1, 0, stream>>>());
    OK(cudaStreamDestroy(stream));
}

// ---------------------------------------------------------------------------------------------
// Program
// It runs the tests, or with --wrong NAME one program of sections 6 and 7.

// What `runtime_tests --wrong NAME` does: 0 means that nothing was found wrong.
static int run_wrong(const std::string &name) {
    alarm(60); // one that hangs has failed
    std::function<void()> run;
    for (const Program &program : wrong_programs)
        if (name == program.name) run = program.run;
    for (const Program &program : right_programs)
        if (name == program.name) run = program.run;
    for (const RaceProgram &program : race_programs)
        for (bool right : {false, true})
            if (name == std::string(right ? "right: " : "race: ") + program.name)
                run = [=] { program.run(right); };
    try {
        if (!run) throw std::runtime_error("runtime_tests: no program is called " + name);
        run();
        for (int device : {1, 0}) { // what a kernel did wrong shows here at the latest
            OK(cudaGetLastError());
            OK(cudaSetDevice(device));
            OK(cudaGetLastError());
            OK(cudaDeviceSynchronize());
        }
    } catch (const std::exception &e) {
        fprintf(stderr, "%s\n", e.what());
        _exit(1);
    }
    return 0;
}

// doctest's run; status 4 where no test matches the filters, for then nothing was tested.
static int run_tests(int argc, char **argv) {
    for (int i = 1; i < argc; i++)
        if (argv[i][0] != '-') {
            fprintf(stderr, "%s is no option of the tests: try -tc='%s*', or --help\n", argv[i],
                    argv[i]);
            return 1;
        }
    doctest::Context tests(argc, argv);
    const int status = tests.run();
    if (tests.shouldExit()) return status; // --help, --list-test-cases and the like
    std::vector<const char *> words(argv, argv + argc);
    words.insert(words.end(), {"--count", "--reporters=console"});
    std::ostringstream counted;
    doctest::Context query(words.size(), words.data());
    query.setCout(&counted);
    query.run();
    if (counted.str().find(" filters: 0\n") == std::string::npos) return status;
    fprintf(stderr, "no test case matches:");
    for (int i = 0; i < argc; i++) fprintf(stderr, " %s", argv[i]);
    fprintf(stderr, "\n");
    return 4;
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], "--wrong") == 0) return run_wrong(argv[2]);
    setenv("CUDA_CPU_DEVICES", "2", 1);
    setenv("CUDA_CPU_CORES", "3", 0); // a team of cores on any machine
    return run_tests(argc, argv);
}
