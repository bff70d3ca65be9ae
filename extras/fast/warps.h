// What differs between a GPU and a CPU, and where a kernel stores its result.
// On a GPU the 32 threads of a warp take neighbouring elements. On a CPU a warp is one thread, and
// the compiler vectorises its loop over neighbouring elements: `lanes` of them, or tile_n. With
// MGPU_LANES a CPU has the GPU's warps, see `make lanes`.
// Gain: the same kernels serve both. What vector registers are worth to a CPU: see tiled.h.
// defines: warp_size, lanes, tile_m, tile_n, wide, Wide, UNROLL, UNROLL_GPU, UNROLL_LANES,
// warp_reduce_sum, warp_sums, warp_sum, Divisor, Store, Vector, store, are_aligned
#include "../format.h"

// Return how many blocks of m threads it takes to have a thread for each of n elements, at least
// one.
inline int blocks(long n, int m) { return n > 0 ? (n + m - 1) / m : 1; }

#if defined(__CUDACC__) || defined(__clang__)
#define UNROLL _Pragma("unroll")
#define UNROLL_GPU UNROLL
#else
#define UNROLL _Pragma("GCC unroll 16")
#define UNROLL_GPU // what keeps arrays in a GPU's registers would only cost g++ time
#endif
#if defined(__CUDACC__) || defined(MGPU_LANES)
#define UNROLL_LANES UNROLL
constexpr int warp_size = 32, lanes = 1;
constexpr int tile_m = 8, tile_n = 8, wide = 1; // a thread's tile of sums; floats in a register
typedef float Wide;
__device__ inline float warp_reduce_sum(float sum) { // every lane of the warp returns it
    for (int half = warp_size / 2; half > 0; half /= 2) sum += __shfl_xor_sync(~0u, sum, half);
    return sum;
}
// Sum each of `count` values over the lanes. Each lane gets some of the sums: values[0] and so on
// then hold those from `first` to `end`. In each of five rounds two lanes, `half` apart, share the
// work: one goes on with the first half of the sums, the other with the second. So n values take
// about n shuffles, not 5 * n.
template <int count, int half = warp_size / 2>
__device__ __forceinline__ void warp_sums(float *values, int &first, int &end) {
    if (half == warp_size / 2) first = 0, end = count;
    constexpr int kept = (count + 1) / 2;
    const bool second = threadIdx.x & half;
    UNROLL
    for (int i = 0; i < kept; i++) {
        const float other = i + kept < count ? values[i + kept] : 0;
        const float given = second ? values[i] : other;
        values[i] = (second ? other : values[i]) + __shfl_xor_sync(~0u, given, half);
    }
    if (second) first += kept;
    else end = min(end, first + kept);
    if constexpr (half > 1) warp_sums<kept, half / 2>(values, first, end);
}
#else
#define UNROLL_LANES _Pragma("omp simd")
constexpr int warp_size = 1, lanes = 16; // a block's threads run one after another
// A tile of sums, a row of B and, by clang++, one number of each row of A fit the registers.
#if defined(__AVX512F__) && defined(__clang__) // 32 registers of 16 floats
constexpr int tile_m = 8, tile_n = 32, wide = 16;
#elif defined(__AVX512F__)
constexpr int tile_m = 12, tile_n = 32, wide = 16;
#elif defined(__AVX__) // 16 of 8
constexpr int tile_m = 6, tile_n = 16, wide = 8;
#else                  // NEON: 32 of 4
constexpr int tile_m = 6, tile_n = 16, wide = 4;
#endif
// `wide` neighbours in an array as one number: (Wide &)a[0] += b * (const Wide &)c[0]. From a plain
// loop g++ makes the same code, but clang++ would leave a tile of sums in memory.
typedef float Wide __attribute__((vector_size(wide * 4), aligned(4), may_alias));
inline float warp_reduce_sum(float sum) { return sum; }
template <int count> void warp_sums(float *, int &first, int &end) { first = 0, end = count; }
#endif

namespace fast {
// The sum of value(i) over i < n by one warp, in a fixed order; every lane returns it. Each lane
// keeps tile_n partial sums, so that rounding errors stay small.
template <class Value> __device__ inline float warp_sum(int n, Value value) {
    float part[tile_n] = {}, sum = 0;
    int i = threadIdx.x % warp_size;
    for (; i + (tile_n - 1) * warp_size < n; i += tile_n * warp_size) {
        UNROLL_LANES
        for (int q = 0; q < tile_n; q++) part[q] += value(i + q * warp_size);
    }
    for (; i < n; i += warp_size) sum += value(i);
    UNROLL
    for (int q = 0; q < tile_n; q++) sum += part[q];
    return warp_reduce_sum(sum);
}

// i / d for 0 <= i < 2^31, as a product and shifts: 3 instructions in place of some 20
struct Divisor {
    unsigned d, shift = 0, factor;
    Divisor(int d) : d(d) {
        while (1u << shift < this->d) shift++;
        factor = d ? (1ull << (31 + shift)) / d + 1 : 0;
    }
    __device__ __forceinline__ int operator()(unsigned i) const {
        return __umulhi(2 * i, factor) >> shift;
    }
};

// Where a kernel stores its result, and its epilogue: the operators that are fused with the
// kernel's own.
struct Store {
    float *data;
    const float *plus = nullptr; // is added to the value: `data` itself for +=
    const float *mask = nullptr; // where it is not positive, the sum counts as 0
    long relu = 0;               // 1: max(0, sum) is stored
    __device__ __forceinline__ void store(int i, float value) const {
        const float least = relu ? 0 : -INFINITY;
        if (mask || plus) {
            if (plus) value += plus[i];
            if (mask) value = mask[i] > 0 ? value : 0;
        }
        data[i] = value < least ? least : value; // NaN stays NaN
    }
    __host__ __device__ __forceinline__ Store from(int i) const { // the same from element i on
        return {data + i, plus ? plus + i : plus, mask ? mask + i : mask, relu};
    }
};

template <int V> struct alignas(4 * V) Vector { // neighbours in memory
    float x[V];
};
// Store::store of V neighbours, whose mask and addend have been loaded
template <int V>
__device__ __forceinline__ void store(const Store &to, int at, Vector<V> value,
                                      const Vector<V> &mask, const Vector<V> &plus) {
    const float least = to.relu ? 0 : -INFINITY;
    UNROLL
    for (int k = 0; k < V; k++) {
        float &x = value.x[k];
        if (to.plus) x += plus.x[k];
        if (to.mask) x = mask.x[k] > 0 ? x : 0;
        x = x < least ? least : x;
    }
    ((Vector<V> *)to.data)[at] = value;
}
// Return whether a Vector<4> may lie at all of these addresses.
typedef std::initializer_list<const float *> Addresses;
[[maybe_unused]] static bool are_aligned(const Addresses &all) {
    return std::all_of(all.begin(), all.end(), [](const float *p) { return (size_t)p % 16 == 0; });
}
} // namespace fast
