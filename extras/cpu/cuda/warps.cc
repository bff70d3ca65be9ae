// Warps: which lane runs next, and what lanes give each other where they meet.
#include "warps.h"
#include "checks.h"
#include "workers.h"

#include <cstdarg>

#include <unistd.h>

__attribute__((weak)) extern const int warpSize = 32;

namespace cuda_cpu {

void set_lane_order(const char *text) {
    if (!text || !*text) return;
    char *end;
    lane_order.always = true;
    if (!strcmp(text, "forwards")) return;
    lane_order.order = LaneOrder::backwards;
    if (!strcmp(text, "backwards")) return;
    lane_order.order = LaneOrder::shuffled;
    lane_order.seed = strtoull(text, &end, 10);
    if (*text >= '0' && *text <= '9' && !*end) return;
    fprintf(stderr, "CUDA_CPU_LANES=%s: expected forwards, backwards or a whole number\n", text);
    end_program();
}

// The next of several warps, or of several lanes.
static CUDA_CPU_UNSEEN int choose(Worker &w, unsigned bits) {
    if (lane_order.order == LaneOrder::forwards) return __builtin_ctz(bits);
    if (lane_order.order == LaneOrder::backwards) return 31 - __builtin_clz(bits);
    w.random = w.random * 6364136223846793005 + 1442695040888963407;
    for (int skip = (w.random >> 33) % __builtin_popcount(bits); skip > 0; skip--) bits &= bits - 1;
    return __builtin_ctz(bits);
}

CUDA_CPU_UNSEEN void start_lanes(Worker &w, unsigned block) {
    const bool fresh = lane_order.always;
    if (!fresh) w.current = current_thread(w);
    const int t = fresh ? 0 : w.current;
    {
        Hidden hidden;
        if ((int)w.lists->fibers.size() < w.threads) grow_fibers(w, w.threads);
        if (!w.warps) w.warps = new Warp[32]();
    }
    const bool at_barrier = t > 0 && w.met_barrier && !w.thread0_ended;
    for (int first = 0; first < w.threads; first += 32) {
        Warp &warp = w.warps[first / 32];
        const int lanes = min(32, w.threads - first), before = max(0, min(lanes, t - first));
        warp.exists = ~0u >> (32 - lanes);
        const unsigned earlier = before ? ~0u >> (32 - before) : 0;
        warp.ready = warp.exists & ~earlier;
        warp.ended = at_barrier ? 0 : earlier;
        warp.waits = 0;
        for (int l = 0; l < lanes; l++) {
            warp.lanes[l].calls = 0;
            warp.lanes[l].file = w.file; // of the barrier
            warp.lanes[l].line = w.line;
            warp.lanes[l].number = w.number;
            if (fresh || (!w.met_barrier && first + l > t)) prepare(w, first + l);
        }
    }
    if (at_barrier) w.phase--; // which is not left yet
    else w.count[(w.phase + 1) % 2] = 0;
    w.looped = w.mode == in_loop ? t : -1;
    if (w.mode == in_loop) thread->stop = true;
    w.mode = by_lanes;
    w.warp = t / 32;
    w.todo = fresh ? 0 : w.warps[w.warp].ready & ~(1u << t % 32);
    w.random = lane_order.seed + block * 0x9E3779B97F4A7C15;
}

// Lane `t` waits for lane `other` of its warp in vain: report it, and give the block up.
static __attribute__((noinline, cold, no_sanitize("thread"))) void lane_missing(Worker &w, int t,
                                                                                int other) {
    const Warp &warp = w.warps[t / 32];
    const Lane &lane = warp.lanes[t % 32], &missing = warp.lanes[other % 32];
    const unsigned bit = 1u << other % 32;
    char did[300];
    if (!(warp.waits & bit))
        snprintf(did, sizeof did, "waits at the barrier in %s:%d", missing.file, missing.line);
    else if (missing.line == lane.line && !strcmp(missing.call, lane.call))
        snprintf(did, sizeof did, "waits there with mask 0x%08x", missing.mask);
    else
        snprintf(did, sizeof did, "waits at %s in %s:%d", missing.call, missing.file, missing.line);
    const uint3 a = thread_index(t), b = thread_index(other);
    fail(
        cudaErrorLaunchFailure, {lane.file, lane.line, nullptr},
        "%s on device %d: divergent %s in block (%u,%u,%u): thread (%u,%u,%u), lane %d, waits with "
        "mask 0x%08x, but thread (%u,%u,%u), lane %d, %s",
        running.name, running.device, lane.call, blockIdx.x, blockIdx.y, blockIdx.z, a.x, a.y, a.z,
        t % 32, lane.mask, b.x, b.y, b.z, other % 32, did);
    w.failed = true;
}

// CUDA leaves the value undefined that a lane reads from one that takes no part. Say so, once for
// each kernel: some programs never use such a value.
static __attribute__((noinline, cold, no_sanitize("thread"))) void
reads_from_nobody(const Warp &warp, int l) {
    Hidden hidden;
    if (!is_new("reads from nobody", running.name)) return;
    const Lane &lane = warp.lanes[l];
    const char *why = "the block is too small to have, although it is in the mask";
    if (!(lane.mask >> lane.source & 1)) why = "is not in its mask";
    else if (warp.ended >> lane.source & 1) why = "has ended, although it is in the mask";
    fprintf(stderr,
            "%s:%d: notice: %s on device %d: %s: lane %d reads from lane %d, which %s 0x%08x: "
            "such a number is undefined, and here it is NaN or %u\n",
            lane.file, lane.line, running.name, running.device, lane.call, l, lane.source, why,
            lane.mask, unwritten);
}
// The lanes `members` have all come to a call: each gets its value and can go on.
static CUDA_CPU_UNSEEN void release(Warp &warp, unsigned members) {
    unsigned long long values[32];
    unsigned votes = 0;
    for (int l = 0; l < 32; l++)
        if (members >> l & 1) {
            values[l] = warp.lanes[l].value;
            if (values[l]) votes |= 1u << l;
        }
    for (int l = 0; l < 32; l++) {
        Lane &lane = warp.lanes[l];
        if (!(members >> l & 1)) continue;
        const bool reads = lane.source >= 0, from_nobody = reads && !(members >> lane.source & 1);
        if (from_nobody) reads_from_nobody(warp, l);
        constexpr unsigned long long nothing = unwritten * 0x100000001ull;
        lane.value = from_nobody ? nothing : reads ? values[lane.source] : votes;
    }
    warp.waits &= ~members;
    warp.ready |= members;
}

static CUDA_CPU_UNSEEN bool at_one_call(const Lane &a, const Lane &b) {
    return a.line == b.line && a.mask == b.mask && (a.call == b.call || !strcmp(a.call, b.call));
}
// Return the lanes at the call of lane l, if all that it waits for have come or ended; else none.
static CUDA_CPU_UNSEEN unsigned all_there(const Warp &warp, int l) {
    const Lane &lane = warp.lanes[l];
    const unsigned members = lane.mask & warp.exists & ~warp.ended;
    if (!lane.mask || (warp.waits & members) != members) return 0;
    for (int m = 0; m < 32; m++)
        if (members >> m & 1 && !at_one_call(warp.lanes[m], lane)) return 0;
    return members;
}

// No lane of the warp can run. Those at one __activemask() can go on, as a GPU's lanes do that come
// to it together, and those that only waited for lanes that have ended since. Otherwise, if one
// waits in a warp function, then in vain.
static CUDA_CPU_UNSEEN void settle(Worker &w, int number) {
    Warp &warp = w.warps[number];
    unsigned together = 0;
    int line = 0;
    for (int l = 0; l < 32; l++)
        if (warp.waits >> l & 1 && !warp.lanes[l].mask &&
            (!together || warp.lanes[l].line == line)) {
            together |= 1u << l;
            line = warp.lanes[l].line;
            warp.lanes[l].value = 1;
        }
    if (together) return release(warp, together);
    if (!warp.waits) return;
    for (int l = 0; l < 32; l++)
        if (warp.waits >> l & 1)
            if (const unsigned members = all_there(warp, l)) return release(warp, members);
    const int first = __builtin_ctz(warp.waits);
    const Lane &lane = warp.lanes[first];
    for (int l = 0; l < 32; l++)
        if (lane.mask & warp.exists & ~warp.ended & 1u << l)
            if (!(warp.waits >> l & 1) || !at_one_call(warp.lanes[l], lane))
                return lane_missing(w, number * 32 + first, number * 32 + l);
}

// No lane of the block can run: all that have not ended are at one barrier and leave it, or
// something is wrong. False where nobody goes on.
static CUDA_CPU_UNSEEN bool leave_barrier(Worker &w) {
    const Lane *first = nullptr; // of those that wait
    int first_thread = 0;
    for (int t = 0; t < w.threads; t++) {
        const Warp &warp = w.warps[t / 32];
        const Lane &lane = warp.lanes[t % 32];
        if (warp.ended >> t % 32 & 1) continue;
        if (!first) first = &lane, first_thread = t;
        if (lane.line == first->line && lane.number == first->number) continue;
        diverged(t, {lane.file, lane.line}, first_thread, {first->file, first->line});
        return false;
    }
    if (!first) return false;
    w.phase++;
    w.count[(w.phase + 1) % 2] = 0;
    for (int i = 0; i < (w.threads + 31) / 32; i++)
        w.warps[i].ready = w.warps[i].exists & ~w.warps[i].ended;
    return true;
}

// The thread that runs next; -1 after the last one, or where the block has failed. In a round every
// lane of a warp that can run does so once. A warp has rounds until none of its lanes can run, but
// shuffled warps alternate.
static CUDA_CPU_UNSEEN int next_lane(Worker &w) {
    while (!w.todo) {
        if (!w.warps[w.warp].ready) settle(w, w.warp);
        unsigned ready = 0;
        for (int i = 0; i < (w.threads + 31) / 32; i++)
            if (w.warps[i].ready) ready |= 1u << i;
        if (w.failed || (!ready && !leave_barrier(w))) return -1;
        if (!ready) continue;
        const unsigned behind = ready & ~1u << w.warp;
        w.warp = !w.yields ? choose(w, ready) : __builtin_ctz(behind ? behind : ready);
        w.yields = false;
        w.todo = w.warps[w.warp].ready;
    }
    const int l = choose(w, w.todo);
    w.todo &= ~(1u << l);
    return w.warp * 32 + l;
}

CUDA_CPU_UNSEEN void run_lanes(Worker &w) {
    while (!w.failed && (w.current = next_lane(w)) >= 0 && w.current != w.looped) {
        switch_fiber(w.scheduler, w.fibers[w.current]);
        if (from_lane_to_lane) return; // the last lane that could run has come back
    }
}
Fiber &after_lane(Worker &w) {
    if (!from_lane_to_lane || w.failed) return w.scheduler;
    w.current = next_lane(w);
    return w.current >= 0 && w.current != w.looped ? w.fibers[w.current] : w.scheduler;
}
void lane_ended(Worker &w, int t) {
    w.warps[t / 32].ready &= ~(1u << t % 32);
    w.warps[t / 32].ended |= 1u << t % 32;
}
CUDA_CPU_UNSEEN void run_lanes_after_loop(Worker &w) {
    lane_ended(w, w.looped);
    w.looped = -1;
    run_lanes(w);
}

// Lane `t` cannot go on, or never will: others do until it can.
static CUDA_CPU_UNSEEN void run_others(Worker &w, int t) {
    Thread *const me = thread;
    if (t != w.looped) {
        Fiber &next = after_lane(w);
        if (&next != &w.fibers[t]) switch_fiber(w.fibers[t], next, w.failed);
    } else {
        run_lanes(w);
        if (w.failed) throw BlockFailed();
    }
    thread = me;
}

void wait_for_block(const char *file, int line, int number) {
    Worker &w = *worker;
    if (w.mode != by_lanes) start_lanes(w, 0);
    const int t = w.current;
    Warp &warp = w.warps[t / 32];
    Lane &lane = warp.lanes[t % 32];
    lane.file = file;
    lane.line = line;
    lane.number = number;
    warp.ready &= ~(1u << t % 32);
    const unsigned parity = (w.phase + 1) % 2;
    published(&w.barrier[parity]);
    run_others(w, t);
    observed(&w.barrier[parity]);
}
CUDA_CPU_UNSEEN int count_block(bool yes, Where where) {
    Worker &w = *worker;
    if (others_have_ended(w)) start_lanes(w, 0);
    const bool first = w.mode == in_turns && w.current == 0;
    const unsigned parity = (w.phase + (first || w.mode == by_lanes)) % 2;
    if (first) w.count[parity] = 0;
    w.count[parity] += yes;
    barrier(where.file, where.line);
    return w.count[parity];
}

CUDA_CPU_UNSEEN unsigned long long meet(const char *call, Where where, unsigned mask, int source,
                                        unsigned long long value) {
    Worker &w = *worker;
    if (w.mode != by_lanes) start_lanes(w, 0);
    const int t = w.current, l = t % 32;
    Warp &warp = w.warps[t / 32];
    Lane &lane = warp.lanes[l];
    lane.call = call;
    lane.calls++;
    lane.file = where.file;
    lane.line = where.line;
    lane.mask = mask;
    lane.source = source;
    lane.value = value;
    warp.ready &= ~(1u << l);
    warp.waits |= 1u << l;
    if (const unsigned members = all_there(warp, l)) release(warp, members);
    run_others(w, t);
    return lane.value;
}
void asked_again() {
    Worker &w = *worker;
    const unsigned long long asker = w.blocks << 10 | current_thread(w);
    if (w.asker != asker) w.times = 0;
    w.asker = asker;
    if (++w.times < 1000 || w.threads == 1) return;
    w.times = 0;
    if (w.mode != by_lanes) start_lanes(w, 0);
    w.yields = true;
    run_others(w, w.current);
}
void give_up_block(cudaError_t error, Where where, const char *text) {
    Worker &w = *worker;
    if (w.mode != by_lanes) start_lanes(w, 0);
    w.error = fail(error, where, "%s on device %d: %s", running.name, running.device, text);
    w.failed = true;
    run_others(w, w.current);
}
void too_many_threads(int most) {
    char text[200];
    snprintf(text, sizeof text,
             "a block has %d threads, but the kernel's __launch_bounds__ allow %d", worker->threads,
             most);
    give_up_block(cudaErrorLaunchOutOfResources, running.where, text);
}
void wrong_lane(const char *call, Where where, const char *format, ...) {
    char text[200], whole[400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    const int t = current_thread(*worker);
    const uint3 at = thread_index(t);
    snprintf(whole, sizeof whole, "%s in block (%u,%u,%u): thread (%u,%u,%u), lane %d, %s", call,
             blockIdx.x, blockIdx.y, blockIdx.z, at.x, at.y, at.z, t % 32, text);
    give_up_block(cudaErrorLaunchFailure, where, whole);
}
CUDA_CPU_UNSEEN int lane_of_thread() { return current_thread(*worker) % 32; }

CUDA_CPU_UNSEEN void sync_warp(unsigned mask, Where where) {
    check_mask("__syncwarp", where, mask);
    if (worker->mode != by_lanes) start_lanes(*worker, 0);
    Lane *lanes = worker->warps[worker->current / 32].lanes;
    const unsigned exists = worker->warps[worker->current / 32].exists;
    Lane &lane = lanes[lane_of_thread()];
    const unsigned parity = lane.syncs++ % 2;
    published(&lane.order[parity]);
    const unsigned parities = vote("__syncwarp", where, mask, parity);
    for (int l = 0; l < 32; l++)
        if (mask & exists & 1u << l) observed(&lanes[l].order[parities >> l & 1]);
}
void delete_warps(Warp *warps) { delete[] warps; }

} // namespace cuda_cpu
