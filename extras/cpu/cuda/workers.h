// The workers behind a launch: operating system threads that run blocks, lane by lane if need be.
#pragma once

#include "blocks.h"
#include "machine.h"

#include <string>
#include <vector>

namespace cuda_cpu {

// --- stacks and shared memory of a worker

struct Stacks { // one mapping
    char *pages;
    size_t bytes;
    int guarded; // stacks with an unmapped page below each
};
struct Touched {
    const volatile void *at = nullptr;
    Touch by[2], written; // the last two threads, and the last that wrote
    bool polled = false;  // a flag, which a thread waits for
};

struct Lists { // of a worker
    std::vector<Fiber> fibers; // worker.fibers is their first
    std::vector<Stacks> stacks;
    std::vector<unsigned long long> filled_by; // the last block that filled each array with NaN
    std::vector<unsigned> filled;              // the arrays that the block has used
    std::vector<Touched> touched;              // by a hash of the address
};

// Give the worker stacks for that many threads in all.
__attribute__((noinline, cold)) void grow_fibers(Worker &w, int threads);
// Make fiber t start at fiber_main when it is first switched to.
CUDA_CPU_OPTIMIZED __attribute__((no_sanitize("thread"), no_sanitize("address"))) void
prepare(Worker &w, int t);

// The arrays that kernels declare __shared__ get fixed places, one behind the other, in an arena
// that every worker has a copy of. Before and behind each lies a gap: a kernel that reads there
// computes with what unwritten memory holds, and one that writes there is found as the block ends.
constexpr size_t shared_gap = 64;
struct SharedArray {
    const char *text, *name, *file; // text: see text_of()
    int line;
    size_t offset, bytes, end; // end: of the gap behind it
};
std::vector<SharedArray> &shared_arrays();
// The shared memory of the running block that the address lies in, in words, or "".
std::string shared_name(const void *pointer);
inline size_t shared_arena_bytes() {
    return shared_arrays().empty() ? shared_gap : shared_arrays().back().end;
}
// Whether a block cannot have these bytes of static and of dynamic shared memory, if so many of the
// latter are allowed.
inline bool too_much_shared(size_t fixed, size_t dynamic, size_t allowed) {
    return fixed > usual_shared_bytes || fixed + dynamic > dynamic_shared_bytes ||
           (fixed + dynamic > usual_shared_bytes && dynamic > allowed);
}
// Called when a block has ended. AddressSanitizer finds more, and what reads a gap, too.
__attribute__((no_sanitize("thread"))) void check_gaps(Worker &w);
constexpr size_t dynamic_room = 100 * 1024, dynamic_guard = 1 << 20; // bytes, in whole pages
// Whether the address lies behind the block's dynamic shared memory: at which byte, of how many.
bool in_dynamic_shared(const void *pointer, ptrdiff_t &offset, size_t &bytes);
// Whether the address lies in a page that guards a stack.
bool below_stack(const void *pointer);

// Give the calling thread what it needs to run blocks and to be told its mistakes. Take it back.
void start_worker();
void stop_worker();

// --- the lanes of a warp

struct Lane { // Where it waits, what it brings there, and then what it takes from there
    const char *call, *file;
    int line, number; // number: of a barrier
    unsigned mask;
    int source; // the lane whose value it takes; -1: the set of lanes with a value that is not 0
    unsigned long long value;
    unsigned syncs; // calls of __syncwarp()
    unsigned calls; // of any warp function, in this block
    char order[2];  // by the parity of syncs, see published()
};
struct Warp { // Bit l says it of lane l. A lane that exists and is none of the rest is at a barrier
    unsigned exists, ready, waits, ended;
    Lane lanes[32];
};

// Report a mistake of the kernel, and give the block up.
CUDA_CPU_UNSEEN void give_up_block(cudaError_t error, Where where, const char *text);

struct LaneOrder {
    bool always = false; // every block, not only where a warp function is called
    enum { forwards, backwards, shuffled } order = forwards;
    unsigned long long seed = 0;
};
inline LaneOrder lane_order;
// Set the order that CUDA_CPU_LANES names.
void set_lane_order(const char *text);

// From now on lanes are chosen. If the block has begun, then a thread of it calls this; those
// before it have ended or are at the next barrier, those behind it have yet to leave the last
// barrier, or to begin.
CUDA_CPU_UNSEEN void start_lanes(Worker &w, unsigned block);
// Run all lanes to their end, or until it is the turn of the thread that has no fiber.
CUDA_CPU_UNSEEN void run_lanes(Worker &w);
struct BlockFailed {}; // thrown out of the plain loop, whose thread has no fiber
// Return who is switched to by a lane that cannot go on.
__attribute__((no_sanitize("thread"))) Fiber &after_lane(Worker &w);
__attribute__((cold, no_sanitize("thread"))) void lane_ended(Worker &w, int t);
// The plain loop has come to the end of its last thread.
CUDA_CPU_UNSEEN void run_lanes_after_loop(Worker &w);
void delete_warps(Warp *warps);

// --- the cores of a device

// Start a team of threads, one for each core; see launches.cc.
Team *new_team(int device, int cores);

} // namespace cuda_cpu
