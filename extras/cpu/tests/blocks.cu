// Blocks: their barriers and their shared memory, which belong to the block alone.
#include "tests.h"

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

// A qualifier behind the type, and types of every kind; file_scope is *file_scope in C++
struct Store {
    int n;
    float v[4];
};
extern __shared__ Store store;
__shared__ int file_scope;
template <class T> struct Named {
    typedef T type;
};
int __device__ twice(int x) { return 2 * x; }
constexpr int types_line = __LINE__ + 16;
template <class T> __global__ void types_kernel(T *y) {
    __shared__ struct { int a; float b; } nameless, of[2]; // two;
    __shared__ union Number { struct { struct { int n; } n; } n; int i; float f; } number;
    __shared__ typename Named<T>::type dependent, /* and; */ list[3]
                                                                 [2];
    __shared__ decltype(T() + 1)
        below[8];
    T __shared__ first, second[2];
    if (threadIdx.x == 0) {
        nameless.a = of[1].a = 1, number.i = 2, dependent = list[2][1] = 3;
        below[7] = 4, first = second[1] = 5, store.n = file_scope = 6, store.v[3] = 7;
    }
    __syncthreads();
    if (threadIdx.x == 0) return; // the other thread tells what it finds
    y[0] = nameless.a + of[1].a + number.i + dependent + list[2][1] + below[7] + first + second[1];
    y[1] = twice(store.n) + file_scope + store.v[3] + __LINE__;
}
template <class T> __global__ void dynamic_kernel_of(T *y) {
    extern T __shared__ rows[][3];
    __shared__ extern unsigned char bytes[];
    rows[1][2] = 8;
    *y = rows[1][2] + ((T *)bytes)[5];
}
TEST_CASE("__shared__: of every type, qualified in every place") {
    auto y = floats_on(0, 2);
    OK_LAUNCH(types_kernel<<<1, 2, sizeof(Store)>>>(y.get()));
    CHECK(fetch(y, 2) == Floats{24, 25.f + types_line});
    OK_LAUNCH(dynamic_kernel_of<<<1, 1, 24>>>(y.get()));
    CHECK(values(y) == "16");
}
// A static variable is one for each device
__device__ int count_calls(int by) {
    static const int first = 3;
    static int calls = first, other[2] = {};
    if (by > 0) { static unsigned more = 1; other[1] = atomicAdd(&more, 1); }
    return calls += by, calls + other[1];
}
__global__ void calls_kernel(int *y) { *y = count_calls(10); }
TEST_CASE("static: a variable of each device") {
    auto y = pinned<int>(1);
    for (int device : {0, 1})
        for (int call : {1, 2}) {
            OnDevice current(device);
            OK_LAUNCH(calls_kernel<<<1, 1>>>(y.get()));
            OK(cudaDeviceSynchronize());
            CHECK(*y == 3 + 11 * call);
        }
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

// Threads that return early: barriers wait for the others alone. Thread t returns before barrier
// number end[t]; y[t] counts those who wait with it at its last one, and adds what its neighbour
// among them has written before it.
__global__ void early_kernel(int *y, const int *end) {
    __shared__ int written[100];
    const int t = threadIdx.x, turns = end[t];
    int count = 0, sum = 0;
    for (int i = 0; i < turns; i++) {
        written[t] = 100 * t + i;
        count = __syncthreads_count(1);
        const int next = (t + 1) % (int)blockDim.x;
        sum = end[next] > i ? written[next] : 0;
        __syncthreads();
    }
    y[t] = count + sum;
}
static void test_early(int threads, int (*end_of)(int)) {
    std::vector<int> end(threads), want(threads);
    for (int t = 0; t < threads; t++) end[t] = end_of(t);
    for (int t = 0; t < threads; t++) {
        for (int other = 0; other < threads; other++) want[t] += end[t] && end[other] >= end[t];
        const int next = (t + 1) % threads, i = end[t] - 1;
        if (end[t] && end[next] > i) want[t] += 100 * next + i;
    }
    auto y = device_copy(want), ends = device_copy(end);
    OK(cudaMemset(y.get(), 0, threads * sizeof(int)));
    OK_LAUNCH(early_kernel<<<1, threads>>>(y.get(), ends.get()));
    CHECK(fetch(y, threads) == want);
}
TEST_CASE("__syncthreads: a thread that has returned is not waited for") {
    for (int threads : {2, 33, 100}) {
        test_early(threads, [](int t) { return int(t == 0); });
        test_early(threads, [](int t) { return int(t != 0); });
        test_early(threads, [](int t) { return t == 1 ? 1 : 3; });
        test_early(threads, [](int t) { return t < 40 ? 2 : 0; });
        test_early(threads, [](int t) { return t < 40 ? 0 : 2; });
        test_early(threads, [](int t) { return t % 5; });
        test_early(threads, [](int t) { return 4 - t % 5; });
        test_early(threads, [](int t) { return t * t % 7; });
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
            if (!std::isnan(found)) CHECK((found < -1 || found >= 127));
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

// --- programs

// Threads that wait at different barriers
__global__ void different_kernel() {
    if (threadIdx.x < 3) __syncthreads();
    else WRONG_HERE(__syncthreads());
}
// clang-format off
__global__ void one_line_kernel(unsigned first, unsigned end) {
    if (threadIdx.x < first || threadIdx.x >= end) return;
    if (threadIdx.x < first + 3) WRONG_HERE(__syncthreads()); else __syncthreads();
}
// clang-format on
__global__ void turns_differ_kernel() {
    for (unsigned i = 0; i <= threadIdx.x; i++) WRONG_HERE(__syncthreads());
    __syncthreads();
}

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

static const bool right_blocks = add(right_programs, {
    {"stacks of many cores", stacks_of_many_cores},
    {"stacks of many streams", stacks_of_many_streams},
});
static const bool wrong_blocks = add(wrong_programs, {
    WRONG("barrier, two at once", (OnDevice{1}, different_kernel<<<1, 5>>>()),
          "different_kernel on device 1: divergent barrier in block (0,0,0): thread (3,0,0) waits",
          "but thread (0,0,0) waits at the barrier in " __FILE__ ":", "cudaErrorLaunchFailure"),
    WRONG("barrier, two at once in one line", (one_line_kernel<<<3, dim3(5, 2)>>>(0, 9)),
          "one_line_kernel on device 0: divergent barrier in block (",
          ",0,0): thread (3,0,0) waits",
          "but thread (0,0,0) waits at another barrier in " __FILE__ ":"),
    WRONG("barrier, two at once, thread 0 has ended", (one_line_kernel<<<1, 40>>>(1, 40)),
          "thread (4,0,0) waits at a barrier, but thread (1,0,0) waits at another barrier in "),
    WRONG("barrier, two at once, the last threads have ended", (one_line_kernel<<<1, 40>>>(0, 35)),
          "thread (3,0,0) waits at a barrier, but thread (0,0,0) waits at another barrier in "),
    WRONG("barrier, more turns for some", turns_differ_kernel<<<1, 2>>>(),
          "turns_differ_kernel on device 0: divergent barrier", "thread (1,0,0) waits",
          "but thread (0,0,0) waits at the barrier in " __FILE__ ":"),

#ifndef CUDA_CPU_ASAN
    WRONG("access, a write one past a shared array",
          WRONG_HERE(beyond_write_kernel<float><<<3, 2>>>(5, 1.5f)),
          "beyond_write_kernel<float> on device 0: block (", ",0,0) has written to byte 24 of the ",
          "24 bytes of first, which " __FILE__ ":", "declares __shared__", "IllegalAddress"),
    WRONG("access, a write one before a shared array",
          WRONG_HERE(beyond_write_kernel<double><<<1, 1>>>(-1, 1)),
          "has written to byte -8 of the 48 bytes of first"),
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
});
