// Atomic functions and fences: a course's programs compute the numbers that a GPU gives.
#include "tests.h"

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
    atomicCAS((unsigned short *)&l[5] + 1, (unsigned short)(t / 64), (unsigned short)(t / 64 + 1));
    if (t < n) atomicExch(&l[3], atomicCAS(&l[4], 5ull, 6ull) | 1); // 5 or 7
}
TEST_CASE("atomicSub, Min, Max, And, Or, Xor, Inc, Dec, Exch, CAS") {
    auto i = device_copy(std::vector<int>{0, 0, 0, -1});
    auto u = device_copy(std::vector<unsigned>{0, 0, 3, 3, 0});
    auto l = device_copy(std::vector<unsigned long long>{0, ~0ull, 0, 0, 5, 0});
    auto f = device_copy(Floats(4));
    OK_LAUNCH(all_atomics_kernel<<<8, 12>>>(i.get(), u.get(), l.get(), f.get())); // 96 threads
    CHECK(fetch(i, 4) == std::vector<int>{-95 * 48, -95, 95, ~255});
    // 1 ^ 2 ^ ... ^ 96; 3 + 96 modulo 5; 3 - 96 modulo 5; -96
    CHECK(fetch(u, 5) == std::vector<unsigned>{~0u, 96, 4, 2, 0u - 96});
    const auto L = fetch(l, 6);
    CHECK(L[0] == (1ull << 40) + 95);
    CHECK(L[1] == (1ull << 40) - 95);
    CHECK(L[2] == ~0ull);
    const bool either = L[3] == 5 || L[3] == 7; // by the order of the threads
    CAPTURE(L[3]);
    CHECK(either);
    CHECK(L[4] == 6);
    CHECK((L[5] == 1 << 16 || L[5] == 2 << 16));
    CHECK(fetch(f, 4) == Floats{93, 1, 1, 1});
}
