// Warps: shuffles and votes give each lane what CUDA's manual says, in any order of the lanes.
#include "tests.h"

const int warpSize = 32; // a program may define it

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
TEST_CASE("__shfl_sync: the value of a lane that takes no part is NaN, or no usual one") {
    auto y = floats_on(0, 8);
    auto n = pinned<int>(4);
    OK_LAUNCH(no_part_kernel<<<1, 8>>>(y.get(), n.get()));
    const Floats got = fetch(y, 8);
    CHECK(Floats(got.begin(), got.begin() + 7) == Floats(7, 1));
    CHECK(std::isnan(got[7]));
    CHECK(std::vector<int>(n.get(), n.get() + 4) == std::vector<int>{5, 0x7FF77F7F, 5, 5});
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
        y[t] += __shfl_sync(mask, t, 15);
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
            if (t >= only) want += t / 32 * 32 + 15 + 100 * odd + (t >= 64) * 30000;
            if (first == before_barrier) want += 300000 + 6000000;
            expect(y.get()[t] == want, "first_kernel, a thread's result", y.get()[t]);
        }
    }
}
TEST_CASE("warp functions: whichever thread of a block is the first to call one") { test_first(); }

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
    const auto fours = cg::tiled_partition<4>(tile); // their ranks begin again in each tile
    if (block.thread_rank() == 45) y[4] = 100 * fours.meta_group_rank() + fours.meta_group_size();
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
    auto x = device_copy(host), y = floats_on(0, 5);
    for (bool warps : {true, false}) {
        if (warps) OK_LAUNCH(groups_kernel<32><<<1, 128>>>(y.get(), x.get(), n));
        else OK_LAUNCH(groups_kernel<8><<<1, dim3(16, 4)>>>(y.get(), x.get(), n));
        const unsigned odd = warps ? 0xaaaaaaaa : 0xaa;
        CHECK(fetch(y, 5) == Floats{n * (n - 1) / 2, n - 1, float(odd), 37, warps ? 308.f : 102});
    }
}

// One function for groups of any kind: add up the values of a group, in memory for one each.
__device__ int group_sum(const cg::thread_group &group, int *scratch, int value) {
    const unsigned rank = group.thread_rank();
    for (unsigned left = group.size(); left > 1; left = (left + 1) / 2) {
        scratch[rank] = value;
        group.sync();
        if (rank + (left + 1) / 2 < left) value += scratch[rank + (left + 1) / 2];
        group.sync();
    }
    return value; // of rank 0: the sum
}
__global__ void any_group_kernel(int *y, int *count, int *taken) {
    __shared__ int scratch[80];
    const int t = threadIdx.x;
    const cg::thread_block block = cg::this_thread_block();
    const int all = group_sum(block, scratch, t);
    if (t == 0) y[0] = all;
    cg::sync(block);
    const cg::thread_group tile = cg::tiled_partition(block, 16);
    const int of_tile = group_sum(tile, scratch + t / 16 * 16, t);
    if (tile.thread_rank() == 0) y[1 + t / 16] = of_tile;
    cg::sync(block);
    if (t % 3 != 1) return;
    // Lanes in a branch choose a leader that makes room for all of them
    const cg::coalesced_group active = cg::coalesced_threads();
    int at = 0;
    if (active.thread_rank() == 0) at = atomicAdd(count, active.size());
    at = active.shfl(at, 0) + active.thread_rank();
    const int up = active.shfl_up(t, 1), down = active.shfl_down(t, 2);
    const int votes = active.ballot(active.thread_rank() < 3) + 10 * active.any(t == 1);
    const int pairs = cg::tiled_partition(active, 2).size();
    taken[at] = t + 1000 * (t - up) + 10000 * (down - t) + 100000 * votes + 10000000 * pairs;
    const int sum = cg::reduce(active, t, cg::plus<int>());
    if (active.thread_rank() == 0) y[6 + t / 32] = sum + active.all(t >= 32);
}
static void test_any_group() {
    auto y = pinned<int>(9), count = pinned<int>(1), taken = pinned<int>(80);
    *count = 0;
    OK_LAUNCH(any_group_kernel<<<1, 80>>>(y.get(), count.get(), taken.get()));
    OK(cudaDeviceSynchronize());
    const int sums[] = {3160, 120, 376, 632, 888, 1144, 176, 476, 430};
    for (int i = 0; i < 9; i++) expect(y.get()[i] == sums[i], "a group's sum", y.get()[i]);
    expect(*count == 27, "lanes in the branch", *count);
    std::vector<int> got(taken.get(), taken.get() + 27), want;
    for (int t = 1; t < 80; t += 3) {
        const int first = t < 32 ? 1 : t < 64 ? 34 : 64, last = t < 32 ? 31 : t < 64 ? 61 : 79;
        const int votes = 7 + 10 * (first == 1);
        const int pairs = (last - first) / 3 % 2 == 0 && t == last ? 1 : 2;
        want.push_back(t + 3000 * (t > first) + 60000 * (t + 6 <= last) + 100000 * votes +
                       10000000 * pairs);
    }
    std::sort(got.begin(), got.end());
    std::sort(want.begin(), want.end());
    expect(got == want, "what lanes of the branch have found", got[0]);
}
TEST_CASE("__activemask, cooperative groups: the lanes of a branch, and a group of any kind") {
    test_any_group();
}

// Lanes end before others call a warp function: they are not waited for, and have no vote. Thread t
// takes end[t] turns.
__global__ void lane_turns_kernel(unsigned *y, const int *end) {
    __shared__ int turns[96];
    const int t = threadIdx.x;
    unsigned votes = 0;
    turns[t] = 0;
    for (int i = 0; i < end[t]; i++) {
        votes = __ballot_sync(~0u, i + 1);
        turns[t]++;
        __syncwarp();
    }
    y[t] = votes + __shfl_xor_sync(1u << t % 32, turns[t], 0);
}
TEST_CASE("__ballot_sync, __syncwarp: a lane that has returned is not waited for") {
    for (int (*turns)(int) : {+[](int t) { return t % 5; }, +[](int t) { return t < 20 ? 3 : 1; },
                              +[](int t) { return int(t == 9); }, +[](int t) { return t / 7; }}) {
        std::vector<int> end(96);
        std::vector<unsigned> want(96);
        for (int t = 0; t < 96; t++) end[t] = turns(t);
        for (int t = 0; t < 96; t++) {
            want[t] = end[t];
            for (int lane = 0; lane < 32 && end[t]; lane++)
                if (end[t / 32 * 32 + lane] >= end[t]) want[t] += 1u << lane;
        }
        auto y = device_copy(want);
        auto ends = device_copy(end);
        OK_LAUNCH(lane_turns_kernel<<<1, 96>>>(y.get(), ends.get()));
        CHECK(fetch(y, 96) == want);
    }
}

// --- programs

// Warp functions that not all lanes come to, or that read from one that has ended
__global__ void leaves_kernel(int *y, unsigned first, unsigned end) {
    if (threadIdx.x < first || threadIdx.x >= end) return;
    WRONG_HERE(y[threadIdx.x] = __shfl_down_sync(~0u, 1, 1));
}
static void leaves(unsigned first, unsigned end) {
    auto y = floats_on(0, 64);
    OK_LAUNCH(leaves_kernel<<<1, 64>>>((int *)y.get(), first, end));
    OK(cudaDeviceSynchronize());
    throw std::runtime_error("told, then went on");
}
__global__ void barrier_in_branch_kernel() {
    if (threadIdx.x % 32 < 16) __syncthreads();
    else WRONG_HERE(__shfl_sync(0xffff0001, 1, 20));
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

// Lanes read from others that take no part: the block has none, or the mask does not name them. The
// launch succeeds, and the program says that the numbers are not what they should be.
__global__ void absent_kernel(float *y, unsigned mask, int from) {
    if (mask >> threadIdx.x & 1) WRONG_HERE(y[threadIdx.x] = __shfl_sync(mask, 1.f, from));
}
static void absent(int threads, unsigned mask, int from) {
    auto y = floats_on(0, 32);
    OK_LAUNCH(absent_kernel<<<1, threads>>>(y.get(), mask, from));
    throw std::runtime_error("lane 0 has read " + std::to_string(fetch(y, 1)[0]));
}

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
// The same in memory of the device
template <bool synced> __global__ void last_warp_of_device_kernel(int *x) {
    if (threadIdx.x >= 32) return;
    volatile int *const v = x;
    for (int half = 32; half > 0; half /= 2) {
        const int other = v[threadIdx.x + half];
        if (synced) __syncwarp();
        v[threadIdx.x] += other;
        if (synced) __syncwarp();
    }
}
template <bool synced> static void last_warp_of_device() {
    auto x = device_copy(std::vector<int>(64, 1));
    if (!synced) fprintf(stderr, "expected: %s:%d:\n", __FILE__, __LINE__ + 1);
    OK_LAUNCH(last_warp_of_device_kernel<synced><<<1, 64>>>(x.get()));
    if (!synced) throw std::runtime_error("the sum is " + values(x) + ", as told");
    expect(values(x) == "64", "the sum", fetch(x, 1)[0]);
}
// Each thread waits for a value that the next one sets, in another warp, too; by volatile memory,
// a cast and an atomic function
__global__ void relay_kernel(volatile int *flags, int *y) {
    const unsigned t = threadIdx.x, last = blockDim.x - 1;
    if (t < last)
        while (t % 3 == 0   ? !flags[t + 1]
               : t % 3 == 1 ? !*(volatile int *)&y[t + 1]
                            : !atomicAdd(&y[t + 1], 0))
            continue;
    __threadfence();
    y[t] = t < last ? y[t + 1] + 1 : 1;
    __threadfence();
    flags[t] = 1;
}
// The same by variables
__device__ volatile unsigned one_is_ready;
__global__ void flags_kernel(int *y) {
    __shared__ volatile int ready;
    const int t = threadIdx.x;
    if (t == 0) ready = 0;
    __syncthreads();
    if (t == 40) ready = 4;
    if (t == 7) ++one_is_ready;
    if (t > 0) return;
    while ((ready == 0) + (one_is_ready == 0) > 0) continue;
    *y = ready + one_is_ready;
}
[[maybe_unused]] static void relay() {
    const int n = 70;
    unsetenv("CUDA_CPU_LANES"); // the last lanes first, none would wait, as if they had no flags
    auto flags = device_copy(std::vector<int>(n)), y = device_copy(std::vector<int>(n));
    OK_LAUNCH(relay_kernel<<<1, n>>>(flags.get(), y.get()));
    expect(values(y) == "70", "what the last thread gets", fetch(y, 1)[0]);
    OK_LAUNCH(flags_kernel<<<1, 64>>>(y.get()));
    expect(values(y) == "5", "two flags", fetch(y, 1)[0]);
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
    test_any_group();
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

static const bool right_warps = add(right_programs, {
    {"volatile, an argument", last_warp<argument, true>},
    {"volatile, a variable", last_warp<variable, true>},
    {"volatile, an array", last_warp<array, true>},
    {"volatile, dynamic shared memory", last_warp<dynamic, true>},
    {"volatile, memory of the device", last_warp_of_device<true>},
#ifndef CUDA_CPU_TSAN // to which any two writes are a race
    {"volatile, a flag for each thread", relay},
    {"volatile, a flag and barriers", volatile_flag},
#endif
    {"lanes forwards", [] { lanes_in_order("forwards"); }},
    {"lanes backwards", [] { lanes_in_order("backwards"); }},
    {"lanes shuffled", [] { lanes_in_order("1"); }},
    {"lanes shuffled by a seed", lanes_are_shuffled},
});
static const bool wrong_warps = add(wrong_programs, {
    WRONG("shuffle, a lane has left", leaves(0, 40),
          "notice: leaves_kernel on device 0: __shfl_down_sync: lane 7 reads from lane 8, which ",
          "has ended, although it is in the mask 0xffffffff: such a number is undefined"),
    WRONG("shuffle, thread 0 has left", leaves(1, 10), "lane 9 reads from lane 10, which has end"),
    WRONG("shuffle, a lane is at a barrier", shuffle_beside_barrier_kernel<<<1, 32>>>(16),
          "divergent __shfl_xor_sync in block (0,0,0): thread (16,0,0), lane 16, waits",
          "but thread (0,0,0), lane 0, waits at the barrier in " __FILE__ ":"),
    WRONG("barrier, in half of a warp", barrier_in_branch_kernel<<<1, 32>>>(),
          "barrier_in_branch_kernel on device 0: divergent __shfl_sync in block (0,0,0): thread (",
          "but thread (0,0,0), lane 0, waits at the barrier in " __FILE__ ":"),
    WRONG("warp functions, two at once", two_calls_kernel<<<1, 32>>>(),
          "two_calls_kernel on device 0: divergent __any_sync in block (0,0,0): thread (0,0,0)",
          "but thread (16,0,0), lane 16, waits at __all_sync in " __FILE__ ":"),
    WRONG("mask, two at once", (mask_kernel<<<1, 32>>>(3, ~0u)),
          "mask_kernel on device 0: divergent __ballot_sync in block (0,0,0): thread (0,0,0), ",
          "lane 0, waits with mask 0x00000003, but thread (1,0,0), lane 1, waits there with mask "
           "0xffffffff"),
    WRONG("mask, without the lane itself", (mask_kernel<<<1, 32>>>(~0u, 1)),
          "mask_kernel on device 0: __ballot_sync in block (0,0,0): thread (",
          "is not in its own mask 0x00000001", "cudaErrorLaunchFailure"),
    WRONG("shuffle, width", width_kernel<<<1, 32>>>(12), "__shfl_sync in block (0,0,0): thread (",
          "has width 12, which must be a power of two up to 32"),
    WRONG("shuffle, a block of 20", absent(20, ~0u, 20),
          "notice: absent_kernel on device 0: __shfl_sync: lane ",
          "reads from lane 20, which the block is too small to have, although it is in the mask "
          "0xffffffff: such a number is undefined"),
    WRONG("shuffle, not in the mask", absent(32, 0xffff, 16),
          "reads from lane 16, which is not in its mask 0x0000ffff"),
    WRONG("lockstep, forwards", lockstep("forwards", false), "nan"),
    WRONG("lockstep, backwards", lockstep("backwards", true), "nan"),
    WRONG("lockstep, shuffled", lockstep("1", false), "nan"),
    WRONG("lockstep, shuffled, mirrored", lockstep("1", true), "nan"),

#if !defined(CUDA_CPU_ASAN) && !defined(CUDA_CPU_TSAN) // which print a report of their own
    WRONG("volatile without __syncwarp, an argument", (last_warp<argument, false>()),
          "notice: last_warp_kernel<spelling, false> on device 0, in " __FILE__ ":",
          "writes to volatile memory that lane ", "with no __syncwarp() in between"),
    WRONG("volatile without __syncwarp, an argument, the last lane first",
          (setenv("CUDA_CPU_LANES", "backwards", 1), last_warp<argument, false>()), "notice: "),
    WRONG("volatile without __syncwarp, a variable", (last_warp<variable, false>()), "notice: "),
    WRONG("volatile without __syncwarp, an array", (last_warp<array, false>()), "notice: "),
    WRONG("volatile without __syncwarp, dynamic", (last_warp<dynamic, false>()), "notice: "),
    WRONG("volatile without __syncwarp, memory of the device", last_warp_of_device<false>(),
          "notice: last_warp_of_device_kernel<synced> on device 0", "volatile memory that lane"),
#endif
});
