// Launches: the blocks of a grid over the cores of a device, and what a launch must not be.
#include "launches.h"
#include "queues.h"
#include "workers.h"

#include <sched.h>
#include <unistd.h>

namespace cuda_cpu {

// A kernel with its arguments, as bytes. Only run_threads() knows their types: all else is compiled
// once, not for each launch in the source.
struct Kernel {
    Launch launch;
    std::string bytes;
    void (*run)(const void *bytes, bool rest);
    std::vector<std::shared_ptr<int>> uses; // of pinned memory
    size_t allowed;                         // bytes of dynamic shared memory
};

static __attribute__((no_sanitize("thread"))) void run_threads_of(const Kernel &kernel,
                                                                  unsigned block) {
    const Launch &launch = kernel.launch;
    Worker &w = *worker;
    blockDim = launch.block;
    gridDim = launch.grid;
    blockIdx = {block % gridDim.x, block / gridDim.x % gridDim.y, block / gridDim.x / gridDim.y};
    w.threads = blockDim.x * blockDim.y * blockDim.z;
#ifdef CUDA_CPU_TSAN
    if ((int)w.lists->fibers.size() < w.threads) grow_fibers(w, w.threads);
#else
    if (w.lists->fibers.empty()) grow_fibers(w, 1); // the others at the first barrier
#endif
    w.run = kernel.run;
    w.kernel = kernel.bytes.data();
    w.current = 0;
    w.met_barrier = w.thread0_ended = w.failed = false;
    w.error = cudaErrorLaunchFailure;
    w.lists->filled.clear();
    w.phase = 0;
    w.blocks++;
    w.mode = in_turns;
    w.dynamic_bytes = launch.shared;
    w.dynamic_allowed = kernel.allowed;
    w.dynamic_shared = w.dynamic_end - round_up(launch.shared, 16);
#ifdef CUDA_CPU_ASAN
    ASAN_POISON_MEMORY_REGION(w.dynamic_end - dynamic_room, dynamic_room);
    ASAN_UNPOISON_MEMORY_REGION(w.dynamic_shared, launch.shared);
    fill_unwritten(w.dynamic_shared, launch.shared);
#else
    if (launch.shared)
        fill_unwritten(w.dynamic_shared - shared_gap,
                       w.dynamic_end - w.dynamic_shared + shared_gap);
#endif
    published(&w.begin);
    if (lane_order.always) {
        start_lanes(w, block);
        run_lanes(w);
        thread = &no_thread;
        observed(&w.end);
        return;
    }
    prepare(w, 0);
    switch_fiber(w.scheduler, w.fibers[0]);
#ifdef CUDA_CPU_TSAN // every thread on a fiber of its own, so that races between them are seen
    for (int t = 1; t < w.threads && w.mode == in_turns && !w.met_barrier && !w.failed; t++) {
        w.current = t;
        prepare(w, t);
        switch_fiber(w.scheduler, w.fibers[t]);
    }
    if (w.mode == by_lanes) run_lanes(w);
#else
    if (w.mode == by_lanes) {
        run_lanes(w);
    } else if (!w.met_barrier && w.threads > 1) {
        w.mode = in_loop;
        w.current = 1; // only thread 0 fills shared memory
        thread = &no_thread;
        try {
            kernel.run(w.kernel, true);
            if (w.mode == by_lanes) run_lanes_after_loop(w);
        } catch (BlockFailed) {
        } catch (...) { // here, while the grid that other cores work on still exists
            uncaught();
        }
    }
#endif
    thread = &no_thread;
    observed(&w.end);
}
static void run_block(const Kernel &kernel, unsigned block) {
    run_threads_of(kernel, block);
    Worker &w = *worker;
    if (!w.failed && (w.dynamic_bytes || !w.lists->filled.empty())) check_gaps(w);
}

// The cores of a device: core 0 is the thread of the stream whose kernel runs, the others are
// helpers that sleep until they are called. A call that comes to nothing is taken back, so that the
// launch need not wait until the helper has woken up.
struct Grid;
struct Team {
    struct Helper {
        alignas(64) std::atomic<bool> called{false};
        std::mutex lock;
        std::condition_variable changed;
    };
    const int size;
    std::deque<Helper> helpers; // helpers[0] is not used
    std::atomic<int> busy{0};   // helpers that were called and have not finished
    Grid *grid = nullptr;
    char begin = 0, end = 0; // see published()

    Team(int device, int size) : size(size), helpers(size) {
        for (int i = 1; i < size; i++) start_thread(device, [this, i] { help(i); }).detach();
    }
    void call(int i) {
        Hidden hidden;
        busy++;
        {
            std::lock_guard<std::mutex> guard(helpers[i].lock);
            helpers[i].called = true;
        }
        helpers[i].changed.notify_one();
    }
    void run(Grid &grid);
    void help(int i);
};

struct Grid {
    const Kernel &kernel;
    Running running;
    Device &device;
    unsigned blocks, chunk;
    std::atomic<unsigned> next{0};

    // One core's share: chunks of blocks, taken as the core gets to them. Under ThreadSanitizer
    // blocks are dealt round-robin, so that neighbouring blocks always run on different cores.
    // While blocks are left, each core first calls eight others: for one core to call a hundred
    // would take longer than many a kernel.
    void work(int core) {
        cuda_cpu::running = running;
        Team &team = *device.team;
        const int cores = std::min<unsigned>(team.size, blocks);
        for (int i = 8 * core + 1; i <= 8 * core + 8 && i < cores && next < blocks; i++)
            team.call(i);
#ifdef CUDA_CPU_TSAN
        for (unsigned b = core; b < blocks && !device.fault; b += team.size) one(b);
#else
        for (unsigned first; (first = next.fetch_add(chunk)) < blocks && !device.fault;)
            for (unsigned b = first; b < min(first + chunk, blocks) && !device.fault; b++) one(b);
#endif
    }
    void one(unsigned b) {
        run_block(kernel, b);
        worker->threads = 0;
        if (worker->failed) device.fault = worker->error;
    }
};

void Team::run(Grid &grid) {
    published(&begin);
    {
        Hidden hidden;
        this->grid = &grid;
    }
    grid.work(0);
    {
        Hidden hidden;
#ifndef CUDA_CPU_TSAN // where every helper has blocks of its own
        for (int i = 1; busy && i < size; i++)
            if (helpers[i].called && helpers[i].called.exchange(false)) busy--;
#endif
        for (int spin = 0; busy; spin++)
            if (!machine().spinning || spin > 10000) sched_yield();
    }
    observed(&end);
}
void Team::help(int i) {
    start_worker();
    Helper &me = helpers[i];
    for (;;) {
        {
            Hidden hidden;
            for (int spin = 0; i <= machine().spinning && spin < 20000 && !me.called; spin++)
                ;
            if (!me.called) {
                std::unique_lock<std::mutex> guard(me.lock);
                me.changed.wait(guard, [&] { return me.called.load(); });
            }
            if (!me.called.exchange(false)) continue;
        }
        observed(&begin);
        grid->work(i);
        published(&end);
        Hidden hidden;
        busy--;
    }
}
Team *new_team(int device, int cores) { return new Team(device, cores); }

// Run a whole grid on the device's cores; called on the stream's thread.
static void run_grid(const Kernel &kernel, Device &device) {
    const Launch &launch = kernel.launch;
    std::unique_ptr<std::lock_guard<std::mutex>> guard;
    {
        Hidden hidden;
        guard.reset(new std::lock_guard<std::mutex>(device.kernel_lock));
    }
    const unsigned blocks = launch.grid.x * launch.grid.y * launch.grid.z;
    const unsigned chunk = max(1u, min(16u, blocks / (8 * device.team->size)));
    Grid grid{kernel, running, device, blocks, chunk};
    if (!device.fault) {
        if (device.team->size == 1 || blocks == 1)
            while (grid.next < blocks && !device.fault) grid.one(grid.next++);
        else device.team->run(grid);
    }
    Hidden hidden;
    guard.reset();
}

// Check the pointers in an argument, and turn them to where the memory is.
static cudaError_t check_argument(Kernel &kernel, const Device &device, int i, Argument arg) {
    const void *word;
    if (!arg.is_pointer && !arg.is_struct) return cudaSuccess;
    for (size_t at = 0; at + sizeof word <= arg.bytes; at += sizeof word) {
        memcpy(&word, (const char *)arg.p + at, sizeof word);
        if (!word) continue;
        if (arg.is_pointer)
            if (auto use = use_of(word, kernel.launch.where)) {
                kernel.uses.push_back(use);
                continue;
            }
        if (arg.is_struct) {
            std::lock_guard<std::mutex> guard(machine().lock);
            const Place place = locate(word);
            if (!place.allocation || held(word) > place.first + place.allocation->bytes) continue;
        }
        char what[300];
        snprintf(what, sizeof what, "%s on device %d: argument %d", kernel.launch.name, device.id,
                 i);
        if (cudaError_t error = check_memory(device, word, 0, kernel.launch.where, what))
            return error;
        word = real(word);
        memcpy((char *)arg.p + at, &word, sizeof word);
    }
    return cudaSuccess;
}

// The bytes that cudaFuncSetAttribute allowed a kernel, or a pointer that may be to any kernel.
static std::string kernel_name(const char *text) { // without arguments and namespaces
    const std::string name(text, strcspn(text, "<, "));
    return name.substr(name.rfind(':') + 1);
}
static size_t more_shared(const Device &device, const char *kernel) {
    std::lock_guard<std::mutex> guard(machine().lock);
    int bytes = 0;
    for (const std::string &name : {kernel_name(kernel), std::string()})
        if (device.more_shared.count(name)) bytes = max(bytes, device.more_shared.at(name));
    return bytes;
}
cudaError_t allow_shared(const char *kernel, int bytes, Where where) {
    if (bytes < 0 || bytes > (int)dynamic_shared_bytes)
        return fail(
            cudaErrorInvalidValue, where,
            "cudaFuncSetAttribute: cannot allow %d bytes of shared memory: a block has at most %zu",
            bytes, dynamic_shared_bytes);
    std::lock_guard<std::mutex> guard(machine().lock);
    current().more_shared[kernel_name(kernel)] = bytes;
    return cudaSuccess;
}

cudaError_t active_blocks(int *blocks, int threads, size_t shared, Where where) {
    if (!blocks) return no_result("cudaOccupancyMaxActiveBlocksPerMultiprocessor", where);
    if (threads <= 0)
        return fail(cudaErrorInvalidValue, where,
                    "cudaOccupancyMaxActiveBlocksPerMultiprocessor: a block cannot have %d threads",
                    threads);
    *blocks = threads <= 1024 && shared <= dynamic_shared_bytes;
    return cudaSuccess;
}
cudaError_t potential_block_size(int *blocks, int *threads, int most, Where where) {
    if (!blocks || !threads) return no_result("cudaOccupancyMaxPotentialBlockSize", where);
    *blocks = current().cores;
    *threads = most ? min(most, 1024) : 1024;
    return cudaSuccess;
}

// What is known of a kernel before it runs: of one in the same file, since others may have its name
struct Bounds {
    const char *text, *file;
    int most;
};
static std::vector<Bounds> &all_bounds() {
    static auto *bounds = new std::vector<Bounds>;
    return *bounds;
}
static int least_bounds = INT_MAX;
bool note_bounds(const char *text, const char *file, int most) {
    all_bounds().push_back({text, file, most});
    least_bounds = min(least_bounds, most);
    return true;
}
// Return the function that the text names if it may be the launch's kernel, or "".
static std::string kernel_of(const char *text, const char *file, const Launch &l) {
    const char *found = strstr(text, "Tag = ");
    if (!found || strcmp(file, l.where.file)) return "";
    const std::string function(found + strlen("Tag = ")), name(function, 0, function.find('('));
    const size_t rest = name.size() - strlen(l.name);
    const bool same = name == l.name || (name.size() > strlen(l.name) + 2 &&
                                         name.substr(rest - 2) == std::string("::") + l.name);
    return same ? function.substr(0, function.rfind("::")) : "";
}
static int most_threads(const Launch &l) {
    int most = 0;
    for (const Bounds &bounds : all_bounds())
        if (!kernel_of(bounds.text, bounds.file, l).empty()) most = max(most, bounds.most);
    return most ? most : INT_MAX;
}
static size_t static_shared(const Launch &l) {
    std::map<std::string, size_t> bytes; // of each kernel that it may be
    for (const SharedArray &a : shared_arrays()) {
        const std::string kernel = kernel_of(a.text, a.file, l);
        if (!kernel.empty()) bytes[kernel] += a.bytes;
    }
    size_t least = bytes.empty() ? 0 : SIZE_MAX;
    for (const auto &of_kernel : bytes) least = min(least, of_kernel.second);
    return least;
}

static cudaError_t check_launch(const Launch &l, const Device &device, size_t fixed,
                                size_t allowed) {
    const unsigned long long threads = (unsigned long long)l.block.x * l.block.y * l.block.z;
    const unsigned long long blocks = (unsigned long long)l.grid.x * l.grid.y * l.grid.z;
    if (threads == 0 || threads > 1024 || l.block.x > 1024 || l.block.y > 1024 || l.block.z > 64)
        return fail(cudaErrorInvalidConfiguration, l.where,
                    "%s on device %d: a block cannot have %u x %u x %u threads: it must have 1 to "
                    "1024 in all, and z at most 64",
                    l.name, device.id, l.block.x, l.block.y, l.block.z);
    if (blocks == 0 || l.grid.x > 0x7fffffff || l.grid.y > 65535 || l.grid.z > 65535 ||
        blocks > 0xffffff00)
        return fail(cudaErrorInvalidConfiguration, l.where,
                    "%s on device %d: a grid cannot have %u x %u x %u blocks: it must have at "
                    "least 1, and y and z at most 65535",
                    l.name, device.id, l.grid.x, l.grid.y, l.grid.z);
    if (l.grid.x * (size_t)l.block.x > most_threads_x)
        return fail(cudaErrorInvalidConfiguration, l.where,
                    "%s on device %d: the stand-in lacks grids of %u x %u threads in x: it takes "
                    "at most %u",
                    l.name, device.id, l.grid.x, l.block.x, most_threads_x);
    if (least_bounds < (int)threads && most_threads(l) < (int)threads)
        return fail(cudaErrorLaunchOutOfResources, l.where,
                    "%s on device %d: a block has %llu threads, but the kernel's __launch_bounds__ "
                    "allow %d",
                    l.name, device.id, threads, most_threads(l));
    if (too_much_shared(fixed, l.shared, allowed)) {
        char beside[60] = "";
        if (fixed) snprintf(beside, sizeof beside, " beside the kernel's %zu", fixed);
        if (fixed + l.shared > dynamic_shared_bytes)
            return fail(cudaErrorInvalidConfiguration, l.where,
                        "%s on device %d: the launch asks for %zu bytes of shared memory%s, but a "
                        "block has at most %zu",
                        l.name, device.id, l.shared, beside, dynamic_shared_bytes);
        return fail(cudaErrorInvalidConfiguration, l.where,
                    "%s on device %d: the launch asks for %zu bytes of shared memory%s, but a "
                    "block has 49152 unless you call cudaFuncSetAttribute(%s, "
                    "cudaFuncAttributeMaxDynamicSharedMemorySize, %zu) first",
                    l.name, device.id, l.shared, beside, l.name, l.shared);
    }
    if (cudaError_t error = check_handle(l.stream, l.where, l.name)) return error;
    if (l.stream && l.stream->device != &device)
        return fail(cudaErrorInvalidResourceHandle, l.where,
                    "%s: the stream belongs to device %d, but the current device is %d: call "
                    "cudaSetDevice(%d)",
                    l.name, l.stream->device->id, device.id, l.stream->device->id);
    return cudaSuccess;
}

// A slow device's stream sleeps; for short times they are saved up, since sleep is not exact.
static void fall_behind(double seconds) {
    static thread_local double behind = 0;
    behind += seconds;
    if (behind < 1e-3) return;
    const double begin = seconds_now();
    usleep(behind * 1e6);
    behind -= seconds_now() - begin;
}

Kernel *accept(const Launch &launch, std::initializer_list<Argument> arguments) {
    const Device &device = current();
    size_t fixed = 0, allowed = usual_shared_bytes;
    if (launch.shared && launch.shared + shared_arena_bytes() > usual_shared_bytes) {
        fixed = static_shared(launch);
        allowed = more_shared(device, launch.name);
    }
    if (check_launch(launch, device, fixed, allowed)) return nullptr;
    static const bool listed = getenv("CUDA_CPU_LAUNCHES") != nullptr;
    if (listed) {
        const dim3 g = launch.grid, b = launch.block;
        fprintf(stderr, "launch %s grid %ux%ux%u block %ux%ux%u shared %zu warps %llu\n",
                launch.name, g.x, g.y, g.z, b.x, b.y, b.z, launch.shared,
                (unsigned long long)g.x * g.y * g.z * ((b.x * b.y * b.z + 31) / 32));
    }
    auto kernel = std::make_unique<Kernel>(Kernel{launch, {}, nullptr, {}, allowed});
    int i = 0;
    for (const Argument &argument : arguments)
        if (check_argument(*kernel, device, ++i, argument)) return nullptr;
    return kernel.release();
}
void enqueue(Kernel *accepted, const void *call, size_t bytes,
             void (*run)(const void *bytes, bool rest)) {
    const std::unique_ptr<Kernel> owned(accepted);
    Device *device = &current();
    const Launch launch = accepted->launch;
    accepted->bytes.assign((const char *)call, bytes);
    accepted->run = run;
    if (launch.stream && launch.stream->capture) accepted->uses.clear(); // as in set_async()
    submit(launch.stream, *device, {launch.name, launch.where, device->id},
           [kernel = std::move(*accepted), device] {
               const double begin = seconds_now();
               run_grid(kernel, *device);
               if (device->slowdown > 1)
                   fall_behind((seconds_now() - begin) * (device->slowdown - 1));
           });
}

} // namespace cuda_cpu
