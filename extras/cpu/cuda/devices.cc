// Devices: the machine that the environment variables describe, and the calls that ask about it.
#include "devices.h"
#include "checks.h"
#include "machine.h"
#include "queues.h"
#include "workers.h"

#include <climits>
#include <csignal>

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

namespace cuda_cpu {

static long setting(const char *name, long otherwise, long least, long most) {
    const char *text = getenv(name);
    if (!text || !*text) return otherwise;
    char *end;
    long value = strtol(text, &end, 10);
    if (*end || value < least || value > most) {
        fprintf(stderr, "%s=%s: expected a whole number from %ld to %ld\n", name, text, least,
                most);
        end_program();
    }
    return value;
}

char *first_address(void *range, size_t bytes) {
    const size_t gib = size_t(1) << 30, skipped = (gib - (uintptr_t)range) % (4 * gib);
    return (char *)range + (skipped < bytes / 2 ? skipped : 0);
}

// Reserve addresses for a device's memory, and as many that are never used; fewer under ulimit -v.
static char *reserve(size_t &range, size_t memory, int device) {
    const size_t least = min(range, memory + min(memory, size_t(1) << 30));
    for (size_t bytes : {range, least}) {
        range = bytes;
        void *p =
            mmap(nullptr, 2 * range, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p != MAP_FAILED) return (char *)p;
    }
    give_up("cannot reserve addresses for the memory of device %d (%.1f GB): raise ulimit -v, or "
            "set CUDA_CPU_MEMORY below %zu (MiB)",
            device, 2 * range / 1e9, memory >> 20);
}
// The first number of a list such as 1,3, which then begins with the next; 1 if it is empty.
static double next_slowdown(const char *&list) {
    if (!list || !*list) return 1;
    char *end;
    const double slowdown = strtod(list, &end);
    if (end == list || (*end && *end != ',') || !(slowdown >= 1)) {
        fprintf(stderr, "CUDA_CPU_SLOWDOWN=%s: expected numbers of at least 1, such as 1,3\n",
                getenv("CUDA_CPU_SLOWDOWN"));
        end_program();
    }
    list = *end ? end + 1 : nullptr;
    return slowdown;
}
static bool forked = false;
Machine::Machine() {
    set_lane_order(getenv("CUDA_CPU_LANES"));
    if (const char *visible = getenv("CUDA_VISIBLE_DEVICES"))
        fprintf(stderr,
                "CUDA_VISIBLE_DEVICES=%s has no effect without a GPU: CUDA_CPU_DEVICES says how "
                "many devices are emulated\n",
                visible);
    const size_t gib = size_t(1) << 30;
    int devices_shown = setting("CUDA_CPU_DEVICES", 1, 1, 64);
    peers = setting("CUDA_CPU_PEERS", 1, 0, 1);
    watchdog = setting("CUDA_CPU_WATCHDOG", 10, 0, 1 << 20);
    cpu_set_t set;
    CPU_ZERO(&set);
    int cores = sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
    const char *slowdown = getenv("CUDA_CPU_SLOWDOWN");
    int cores_each = setting("CUDA_CPU_CORES", max(1, cores / devices_shown), 1, 1024);
    spinning = cores_each * devices_shown <= cores ? max(1, 64 / devices_shown) : 0;
    size_t physical = (size_t)sysconf(_SC_PHYS_PAGES) * page_size();
    size_t total = (size_t)setting("CUDA_CPU_MEMORY", physical / devices_shown >> 20, 1, 1 << 24)
                   << 20;
#if defined(CUDA_CPU_ASAN) || defined(CUDA_CPU_TSAN)
    size_t range = min(total, 4 * gib) + 5 * gib;
#else
    size_t range = 8 * total + 16 * gib; // addresses cost nothing, but ulimit -v may limit them
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGABRT})
        sigaction(signal, &action, &before_fault[signal]);
    static char memory[64 << 10]; // the host's stack may be what overflows
    stack_t stack = {}, before = {};
    stack.ss_sp = memory;
    stack.ss_size = sizeof memory;
    if (!sigaltstack(nullptr, &before) && before.ss_flags & SS_DISABLE)
        sigaltstack(&stack, nullptr);
#endif
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
#ifdef CUDA_CPU_TSAN
    cores_each = max(2, cores_each); // two blocks of a grid never share all of their order
#endif
    for (int id = 0; id < devices_shown; id++) {
        Device *device = new Device;
        char *memory = reserve(range, total, id);
        device->id = id;
        snprintf(device->memory_of, sizeof device->memory_of, "device %d", id);
        device->cores = cores_each;
        device->slowdown = next_slowdown(slowdown);
        device->base = memory;
        device->next = first_address(memory, range);
        device->end = device->base + range;
        device->away = range;
        device->total = total;
        device->peers.resize(devices_shown);
        device->default_stream = new Stream(device, true);
        device->streams.push_back(device->default_stream);
        device->team = new_team(id, cores_each);
        devices.push_back(device);
    }
    managed.total = physical;
    if (const size_t bytes = managed_variables_end - managed_variables)
        managed.allocations[managed_variables] = {bytes, managed_variables, {}, {},
                                                  true,  "__managed__"};
}
Machine &machine() {
    static Machine *machine = new Machine; // never destroyed: its threads outlive main
    if (__builtin_expect(forked, false)) {
        forked = false; // what ends the program may ask, too
        give_up("this process was forked after the first CUDA call, and a GPU refuses it from then "
                "on (initialization error, 3): call fork() first");
    }
    return *machine;
}

} // namespace cuda_cpu

using namespace cuda_cpu;

// Fail if there is no such device.
static cudaError_t check_device(int device, Where where, const char *call) {
    if (valid_device(device)) return cudaSuccess;
    return fail(cudaErrorInvalidDevice, where, "%s: there is no device %d: the device count is %zu",
                call, device, machine().devices.size());
}

cudaError_t cudaRuntimeGetVersion(int *version, Where where) {
    if (!version) return no_result("cudaRuntimeGetVersion", where);
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version, Where where) {
    if (!version) return no_result("cudaDriverGetVersion", where);
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int *count, Where where) {
    if (!count) return no_result("cudaGetDeviceCount", where);
    *count = machine().devices.size();
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device, Where where) {
    if (cudaError_t error = check_device(device, where, "cudaSetDevice")) return error;
    current_device = device;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device, Where where) {
    if (!device) return no_result("cudaGetDevice", where);
    *device = current_device;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *prop, int device, Where where) {
    if (!prop) return no_result("cudaGetDeviceProperties", where);
    if (cudaError_t error = check_device(device, where, "cudaGetDeviceProperties")) return error;
    const Device &d = *machine().devices[device];
    *prop = {};
    snprintf(prop->name, sizeof prop->name, "CPU stand-in, %d core%s", d.cores,
             d.cores == 1 ? "" : "s");
    prop->totalGlobalMem = d.total;
    prop->sharedMemPerBlock = usual_shared_bytes;
    prop->sharedMemPerBlockOptin = prop->sharedMemPerMultiprocessor = dynamic_shared_bytes;
    prop->totalConstMem = 65536;
    prop->multiProcessorCount = d.cores;
    prop->maxThreadsPerBlock = prop->maxThreadsPerMultiProcessor = 1024;
    prop->maxThreadsDim[0] = prop->maxThreadsDim[1] = 1024;
    prop->maxThreadsDim[2] = 64;
    prop->maxGridSize[0] = 0x7fffffff;
    prop->maxGridSize[1] = prop->maxGridSize[2] = 65535;
    prop->warpSize = 32;
    prop->memPitch = INT_MAX;
    prop->maxBlocksPerMultiProcessor = 1;
    prop->unifiedAddressing = prop->managedMemory = prop->canMapHostMemory = 1;
    prop->concurrentManagedAccess = prop->streamPrioritiesSupported = 1;
    prop->hostRegisterSupported = prop->memoryPoolsSupported = 1;
    prop->textureAlignment = prop->texturePitchAlignment = prop->surfaceAlignment = 256;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device, Where where) {
    if (!value) return no_result("cudaDeviceGetAttribute", where);
    if (cudaError_t error = check_device(device, where, "cudaDeviceGetAttribute")) return error;
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = 0x7fffffff; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = usual_shared_bytes; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = dynamic_shared_bytes; break;
    case cudaDevAttrTotalConstantMemory: *value = 65536; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMultiProcessorCount: *value = machine().devices[device]->cores; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrConcurrentManagedAccess:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrMemoryPoolsSupported: *value = 1; break;
    case cudaDevAttrCanMapHostMemory: *value = 1; break;
    case cudaDevAttrMaxPitch: *value = INT_MAX; break;
    case cudaDevAttrTextureAlignment:
    case cudaDevAttrTexturePitchAlignment:
    case cudaDevAttrSurfaceAlignment: *value = 256; break;
    default:
        if (attribute < cudaDevAttrMaxThreadsPerBlock ||
            attribute > cudaDevAttrOnlyPartialHostNativeAtomicSupported)
            return fail(cudaErrorInvalidValue, where,
                        "cudaDeviceGetAttribute: CUDA has no attribute %d", attribute);
        *value = 0;
    }
    return cudaSuccess;
}

// Those of all devices, at first a GPU's usual ones
static size_t limits[] = {1024, 1 << 20, 8 << 20};
static cudaError_t no_limit(const char *call, cudaLimit limit, Where where) {
    if ((unsigned)limit < std::size(limits)) return cudaSuccess;
    return fail(cudaErrorUnsupportedLimit, where, "%s: the stand-in lacks limit %d", call, limit);
}
cudaError_t cudaDeviceSetLimit(cudaLimit limit, size_t value, Where where) {
    if (cudaError_t error = no_limit("cudaDeviceSetLimit", limit, where)) return error;
    if (limit == cudaLimitStackSize && value > stack_bytes)
        return fail(cudaErrorInvalidValue, where,
                    "cudaDeviceSetLimit: a stack has %zu bytes here, not %zu", stack_bytes, value);
    limits[limit] = value;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetLimit(size_t *value, cudaLimit limit, Where where) {
    if (!value) return no_result("cudaDeviceGetLimit", where);
    if (cudaError_t error = no_limit("cudaDeviceGetLimit", limit, where)) return error;
    *value = limits[limit];
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(Where where) {
    if (cudaError_t error = check_capture(where, "cudaDeviceSynchronize")) return error;
    return synchronize(current());
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer, Where where) {
    if (!can) return no_result("cudaDeviceCanAccessPeer", where);
    if (!valid_device(device) || !valid_device(peer))
        return fail(cudaErrorInvalidDevice, where,
                    "cudaDeviceCanAccessPeer: there is no device %d or no device %d: the "
                    "device count is %zu",
                    device, peer, machine().devices.size());
    *can = device != peer && machine().peers;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetP2PAttribute(int *value, cudaDeviceP2PAttr attribute, int device, int peer,
                                      Where where) {
    const char *call = "cudaDeviceGetP2PAttribute";
    if (!value) return no_result(call, where);
    if (!valid_device(device) || !valid_device(peer) || device == peer)
        return fail(cudaErrorInvalidDevice, where,
                    "%s: devices %d and %d are not two devices: the device count is %zu", call,
                    device, peer, machine().devices.size());
    if (attribute < cudaDevP2PAttrPerformanceRank ||
        attribute > cudaDevP2PAttrOnlyPartialNativeAtomicSupported)
        return fail(cudaErrorInvalidValue, where, "%s: there is no attribute %d", call, attribute);
    const bool is_yes = attribute == cudaDevP2PAttrAccessSupported ||
                        attribute == cudaDevP2PAttrNativeAtomicSupported;
    *value = is_yes && machine().peers;
    return cudaSuccess;
}
constexpr int most_peers = 8; // of a device, as CUDA has it on machines without an NVSwitch
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags, Where where) {
    if (flags)
        return fail(cudaErrorInvalidValue, where,
                    "cudaDeviceEnablePeerAccess: flags are %u, but must be 0", flags);
    if (!machine().peers)
        return fail(cudaErrorPeerAccessUnsupported, where,
                    "cudaDeviceEnablePeerAccess: CUDA_CPU_PEERS=0 allows no peer access");
    if (!valid_device(peer) || peer == current_device)
        return fail(cudaErrorInvalidDevice, where,
                    "cudaDeviceEnablePeerAccess: device %d cannot have device %d as a peer",
                    current_device, peer);
    std::vector<bool> &peers = current().peers;
    if (peers[peer]) return fail(cudaErrorPeerAccessAlreadyEnabled);
    int enabled = 0;
    for (bool is_peer : peers) enabled += is_peer;
    if (enabled == most_peers) return fail(cudaErrorTooManyPeers);
    peers[peer] = true;
    return cudaSuccess;
}
cudaError_t cudaDeviceDisablePeerAccess(int peer, Where where) {
    if (cudaError_t error = check_device(peer, where, "cudaDeviceDisablePeerAccess")) return error;
    if (!current().peers[peer]) return fail(cudaErrorPeerAccessNotEnabled);
    current().peers[peer] = false;
    return cudaSuccess;
}

cudaError_t cudaDeviceReset(Where where) {
    Device &device = current();
    synchronize(device);
    while (device.streams.size() > 1) destroy(device.streams.back());
    Hidden hidden;
    std::vector<const char *> freed;
    {
        std::lock_guard<std::mutex> guard(machine().lock);
        for (auto i = machine().handles.begin(); i != machine().handles.end();)
            i = i->second == &device ? machine().handles.erase(i) : std::next(i);
        for (auto &[first, a] : device.allocations)
            if (a.live && !strncmp(a.by, "cudaMalloc", 10)) {
                a.live = false;
                a.freed = where;
                freed.push_back(first);
            }
        for (Symbol *symbol : machine().symbols)
            if (symbol->copies.count(device.id))
                memcpy(real(symbol->copies[device.id]), symbol->initial, symbol->bytes);
        device.more_shared.clear();
        device.peers.assign(device.peers.size(), false);
    }
    for (const char *first : freed) unmap(device, first);
    device.fault = last_error = cudaSuccess;
    return cudaSuccess;
}
