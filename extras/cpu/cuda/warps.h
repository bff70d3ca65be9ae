// Warps: shuffles, votes and __syncwarp(), and cooperative groups.
//
// A warp is 32 threads of a block with neighbouring numbers, its lanes. A lane that calls a warp
// function waits until every lane that its mask names has come to the same call. From the first
// such call in a block on, all its threads have a stack, and a lane runs until it waits or ends;
// next_lane() then chooses the next one. If a lane waits for one that waits elsewhere, that is an
// error. Lanes that have ended, or that a block is too small to have, are not waited for.
#pragma once

#include "blocks.h"

namespace cuda_cpu {

// Of __syncthreads_count(): how many threads of the block say yes.
CUDA_CPU_UNSEEN int count_block(bool yes, Where where);
// A warp function: wait for the lanes of `mask`, 0 for those that come too. Returns the value of
// lane `source`, or for -1 which lanes bring a value that is not 0.
CUDA_CPU_UNSEEN unsigned long long meet(const char *call, Where where, unsigned mask, int source,
                                        unsigned long long value);
// A wrong argument: report it, and give the block up.
__attribute__((noinline, cold, no_sanitize("thread"), format(printf, 3, 4))) void
wrong_lane(const char *call, Where where, const char *format, ...);
CUDA_CPU_UNSEEN int lane_of_thread();

CUDA_CPU_OPTIMIZED inline void check_mask(const char *call, Where where, unsigned mask) {
    if (!(mask >> lane_of_thread() & 1))
        wrong_lane(call, where, "is not in its own mask 0x%08x", mask);
}
CUDA_CPU_OPTIMIZED inline unsigned vote(const char *call, Where where, unsigned mask, bool value) {
    check_mask(call, where, mask);
    return meet(call, where, mask, -1, value);
}
// `source` maps a lane and the first and last lane of its `width` neighbours to a lane.
template <class T, class Source>
T shuffle(const char *call, Where where, unsigned mask, T value, int width, Source source) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle takes numbers of 4 or 8 bytes");
    check_mask(call, where, mask);
    if (width < 1 || width > 32 || (width & (width - 1)))
        wrong_lane(call, where, "has width %d, which must be a power of two up to 32", width);
    const int lane = lane_of_thread(), first = lane & -width;
    unsigned long long word = 0;
    memcpy(&word, &value, sizeof value);
    word = meet(call, where, mask, source(lane, first, first + width - 1), word);
    memcpy(&value, &word, sizeof value);
    return value;
}
// __syncwarp() orders memory, shuffles and votes do not.
CUDA_CPU_UNSEEN void sync_warp(unsigned mask, Where where);

} // namespace cuda_cpu

extern const int warpSize; // a program may have its own

template <class T, class Promoted = decltype(+T())>
Promoted __shfl_sync(unsigned mask, T value, int from, int width = 32, CUDA_CPU_WHERE) {
    return cuda_cpu::shuffle(
        "__shfl_sync", where, mask, Promoted(value), width,
        [=](int, int first, int last) { return first + (from & (last - first)); });
}
template <class T, class Promoted = decltype(+T())>
Promoted __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDA_CPU_WHERE) {
    return cuda_cpu::shuffle("__shfl_up_sync", where, mask, Promoted(value), width,
                             [=](int lane, int first, int) {
                                 const int from = lane - (int)(delta % 32);
                                 return from < first ? lane : from;
                             });
}
template <class T, class Promoted = decltype(+T())>
Promoted __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDA_CPU_WHERE) {
    return cuda_cpu::shuffle("__shfl_down_sync", where, mask, Promoted(value), width,
                             [=](int lane, int, int last) {
                                 const int from = lane + (int)(delta % 32);
                                 return from > last ? lane : from;
                             });
}
template <class T, class Promoted = decltype(+T())>
Promoted __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, CUDA_CPU_WHERE) {
    return cuda_cpu::shuffle("__shfl_xor_sync", where, mask, Promoted(value), width,
                             [=](int lane, int, int last) {
                                 const int from = lane ^ (bits & 31);
                                 return from > last ? lane : from;
                             });
}
inline unsigned __ballot_sync(unsigned mask, int predicate, CUDA_CPU_WHERE) {
    return cuda_cpu::vote("__ballot_sync", where, mask, predicate);
}
inline int __any_sync(unsigned mask, int predicate, CUDA_CPU_WHERE) {
    return cuda_cpu::vote("__any_sync", where, mask, predicate) != 0;
}
inline int __all_sync(unsigned mask, int predicate, CUDA_CPU_WHERE) {
    return cuda_cpu::vote("__all_sync", where, mask, !predicate) == 0;
}
inline unsigned __activemask(CUDA_CPU_WHERE) {
    return cuda_cpu::meet("__activemask", where, 0, -1, 1);
}
inline void __syncwarp(unsigned mask = ~0u, CUDA_CPU_WHERE) { cuda_cpu::sync_warp(mask, where); }

inline int __syncthreads_count(int predicate, CUDA_CPU_WHERE) {
    return cuda_cpu::count_block(predicate, where);
}
inline int __syncthreads_and(int predicate, CUDA_CPU_WHERE) {
    return cuda_cpu::count_block(!predicate, where) == 0;
}
inline int __syncthreads_or(int predicate, CUDA_CPU_WHERE) {
    return cuda_cpu::count_block(predicate, where) != 0;
}

// Of the values of the lanes of `mask`: their sum, ..., or which lanes have the same one.
namespace cuda_cpu {
template <class T, class F> T fold(unsigned mask, T value, F f, Where where) {
    T result = value;
    for (unsigned left = mask, first = 1; left; left &= left - 1, first = 0) {
        const int lane = __builtin_ctz(left);
        const T other = __shfl_sync(mask, value, lane, 32, where);
        result = first ? other : f(result, other);
    }
    return result;
}
} // namespace cuda_cpu
#define CUDA_CPU_REDUCE(name, f)                                                                   \
    template <class T> T __reduce_##name##_sync(unsigned mask, T value, CUDA_CPU_WHERE) {          \
        return cuda_cpu::fold(                                                                     \
            mask, value, [](T a, T b) -> T { return f; }, where);                                  \
    }
CUDA_CPU_REDUCE(add, a + b)
CUDA_CPU_REDUCE(min, b < a ? b : a)
CUDA_CPU_REDUCE(max, a < b ? b : a)
CUDA_CPU_REDUCE(and, a &b)
CUDA_CPU_REDUCE(or, a | b)
CUDA_CPU_REDUCE(xor, a ^ b)
#undef CUDA_CPU_REDUCE
template <class T> unsigned __match_any_sync(unsigned mask, T value, CUDA_CPU_WHERE) {
    unsigned same = 0;
    for (unsigned left = mask; left; left &= left - 1) {
        const T other = __shfl_sync(mask, value, __builtin_ctz(left), 32, where);
        if (!memcmp(&other, &value, sizeof value)) same |= left & -left;
    }
    return same;
}
template <class T> unsigned __match_all_sync(unsigned mask, T value, int *all, CUDA_CPU_WHERE) {
    *all = __all_sync(mask, __match_any_sync(mask, value, where) == mask, where);
    return *all ? mask : 0;
}

// Groups of threads, as objects: a block, tiles of N neighbouring lanes of it, lanes that are
// active together, and any of these.
namespace cooperative_groups {
struct thread_block {
    static unsigned size() { return blockDim.x * blockDim.y * blockDim.z; }
    static unsigned num_threads() { return size(); }
    static unsigned thread_rank() {
        return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    }
    static dim3 group_index() { return {blockIdx.x, blockIdx.y, blockIdx.z}; }
    static dim3 thread_index() { return {threadIdx.x, threadIdx.y, threadIdx.z}; }
    static dim3 dim_threads() { return blockDim; }
    static dim3 group_dim() { return blockDim; }
    static void sync(CUDA_CPU_WHERE) { cuda_cpu::barrier(where.file, where.line); }
};
inline thread_block this_thread_block() { return {}; }

template <unsigned N, class Parent = thread_block> struct thread_block_tile {
    static_assert(N >= 1 && N <= 32 && (N & (N - 1)) == 0, "a tile has 1, 2, 4, 8, 16 or 32 lanes");
    static unsigned size() { return N; }
    static unsigned num_threads() { return N; }
    static unsigned thread_rank() { return thread_block::thread_rank() % N; }
    static unsigned meta_group_rank() { return Parent::thread_rank() / N; }
    static unsigned meta_group_size() { return (Parent::size() + N - 1) / N; }
    static unsigned first() { return thread_block::thread_rank() % 32 / N * N; } // its lane
    static unsigned mask() { return ~0u >> (32 - N) << first(); }
    static void sync(CUDA_CPU_WHERE) { __syncwarp(mask(), where); }
    template <class T> static T shfl(T value, int from, CUDA_CPU_WHERE) {
        return __shfl_sync(mask(), value, from, N, where);
    }
    template <class T> static T shfl_up(T value, unsigned delta, CUDA_CPU_WHERE) {
        return __shfl_up_sync(mask(), value, delta, N, where);
    }
    template <class T> static T shfl_down(T value, unsigned delta, CUDA_CPU_WHERE) {
        return __shfl_down_sync(mask(), value, delta, N, where);
    }
    template <class T> static T shfl_xor(T value, int bits, CUDA_CPU_WHERE) {
        return __shfl_xor_sync(mask(), value, bits, N, where);
    }
    static int any(int yes, CUDA_CPU_WHERE) { return __any_sync(mask(), yes, where); }
    static int all(int yes, CUDA_CPU_WHERE) { return __all_sync(mask(), yes, where); }
    static unsigned ballot(int yes, CUDA_CPU_WHERE) {
        return __ballot_sync(mask(), yes, where) >> first();
    }
};
template <unsigned N, class Parent> thread_block_tile<N, Parent> tiled_partition(const Parent &) {
    return {};
}

struct coalesced_group { // its lanes have the ranks 0, 1, 2 ... in the order of their numbers
    unsigned lanes;      // as a mask
    unsigned size() const { return __builtin_popcount(lanes); }
    unsigned num_threads() const { return size(); }
    unsigned thread_rank() const {
        return __builtin_popcount(lanes & ~(~0u << cuda_cpu::lane_of_thread()));
    }
    unsigned meta_group_rank() const { return 0; }
    unsigned meta_group_size() const { return 1; }
    void sync(CUDA_CPU_WHERE) const { __syncwarp(lanes, where); }
    template <class T> T shfl(T value, unsigned rank, CUDA_CPU_WHERE) const {
        unsigned left = lanes;
        while (rank-- > 0 && left) left &= left - 1;
        return __shfl_sync(lanes, value, left ? __builtin_ctz(left) : 31, 32, where);
    }
    template <class T> T shfl_up(T value, unsigned delta, CUDA_CPU_WHERE) const {
        const unsigned rank = thread_rank();
        return shfl(value, rank < delta ? rank : rank - delta, where);
    }
    template <class T> T shfl_down(T value, unsigned delta, CUDA_CPU_WHERE) const {
        const unsigned rank = thread_rank();
        return shfl(value, rank + delta < size() ? rank + delta : rank, where);
    }
    int any(int yes, CUDA_CPU_WHERE) const { return __any_sync(lanes, yes, where); }
    int all(int yes, CUDA_CPU_WHERE) const { return __all_sync(lanes, yes, where); }
    unsigned ballot(int yes, CUDA_CPU_WHERE) const { // by rank
        unsigned votes = 0, rank = 0;
        const unsigned of_lanes = __ballot_sync(lanes, yes, where);
        for (unsigned left = lanes; left; left &= left - 1, rank++)
            votes |= (of_lanes >> __builtin_ctz(left) & 1) << rank;
        return votes;
    }
};
inline coalesced_group coalesced_threads(CUDA_CPU_WHERE) { return {__activemask(where)}; }

struct thread_group {
    unsigned lanes; // as a mask, or 0 for a block
    thread_group(thread_block) : lanes(0) {}
    thread_group(coalesced_group group) : lanes(group.lanes) {}
    template <unsigned N, class P> thread_group(thread_block_tile<N, P> t) : lanes(t.mask()) {}
    unsigned size() const {
        return lanes ? __builtin_popcount(lanes) : thread_block::num_threads();
    }
    unsigned num_threads() const { return size(); }
    unsigned thread_rank() const {
        return lanes ? coalesced_group{lanes}.thread_rank() : thread_block::thread_rank();
    }
    void sync(CUDA_CPU_WHERE) const {
        if (lanes) __syncwarp(lanes, where);
        else thread_block::sync(where);
    }
};
// The tile of `size` lanes, with neighbouring ranks, to which the thread belongs
inline thread_group tiled_partition(const thread_group &group, unsigned size) {
    unsigned tile = 0, rank = 0;
    for (unsigned left = group.lanes ? group.lanes : ~0u; left; left &= left - 1, rank++)
        if (rank / size == group.thread_rank() % 32 / size) tile |= left & -left;
    return coalesced_group{tile};
}
template <class Group> void sync(const Group &group, CUDA_CPU_WHERE) { group.sync(where); }

template <class T = void> struct plus {
    template <class V> V operator()(V a, V b) const { return a + b; }
};
template <class T = void> struct less { // the lesser
    template <class V> V operator()(V a, V b) const { return b < a ? b : a; }
};
template <class T = void> struct greater {
    template <class V> V operator()(V a, V b) const { return a < b ? b : a; }
};
template <unsigned N, class Parent, class T, class F>
T reduce(const thread_block_tile<N, Parent> &tile, T value, F f, CUDA_CPU_WHERE) {
    for (unsigned bit = N / 2; bit > 0; bit /= 2)
        value = f(value, tile.shfl_xor(value, bit, where));
    return value;
}
template <class T, class F> T reduce(const coalesced_group &group, T value, F f, CUDA_CPU_WHERE) {
    return cuda_cpu::fold(group.lanes, value, f, where);
}
} // namespace cooperative_groups
