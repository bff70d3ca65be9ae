// What the sources of the stand-in share: the machine, its devices, tables of what is allocated.
//
// Each device has one range of addresses, so a pointer tells whose it is. An allocation ends at a
// page's end and an unmapped page follows it; freed memory is unmapped and, while addresses last,
// not handed out again, so that an access to either is caught. So is one by the host: the addresses
// that a program holds are never mapped. The memory itself lies in a second range, and where a
// kernel, copy or fill is given one of the first, it gets that of the second.
#pragma once

#include "calls.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#ifdef CUDA_CPU_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace cuda_cpu {

struct Team;

struct Allocation {
    size_t bytes;
    char *pages; // what is mapped: from here to the end of the allocation
    Where made, freed;
    bool live;
    const char *by = "cudaMalloc"; // or another call
    bool mapped = true;            // cudaFreeAsync: no more live, but still in use
};

struct Device {
    int id = 0, cores = 1;
    char memory_of[32] = "every device"; // or one of them, for messages
    double slowdown = 1;                 // factor by which kernels take longer
    char *base = nullptr, *next = nullptr,
         *end = nullptr;        // range of addresses that the program holds, and its unused rest
    ptrdiff_t away = 0;         // from there to the memory itself; 0 if it is managed
    size_t total = 0, used = 0; // bytes
    std::map<const char *, Allocation> allocations; // by first byte
    Stream *default_stream = nullptr;
    std::vector<Stream *> streams;               // the default stream and the others
    std::vector<bool> peers;                     // to which access was enabled
    std::atomic<cudaError_t> fault{cudaSuccess}; // of a kernel; stays, as on a GPU
    std::map<std::string, int> more_shared;      // kernels: see cudaFuncSetAttribute
    std::mutex kernel_lock;                      // one kernel at a time; copies run beside it
    Team *team = nullptr;
};

// A __device__ or __constant__ variable. Each device has a copy in its memory, which begins with
// the value of the declaration. The host has addresses in its place that nobody can access.
struct Symbol {
    const char *name;
    Where where;
    const void *initial;
    size_t bytes;
    char *host_side;
    std::map<int, void *> copies; // by device
};
// The linker's names for the memory of __managed__ variables; null where a program has none.
extern "C" __attribute__((weak, visibility("hidden"))) char __start_cuda_cpu_managed[],
    __stop_cuda_cpu_managed[];
constexpr char *managed_variables = __start_cuda_cpu_managed,
               *managed_variables_end = __stop_cuda_cpu_managed;
inline bool is_managed_variable(const void *pointer) {
    return pointer >= managed_variables && pointer < managed_variables_end;
}
struct Pinned {
    size_t bytes;
    const char *by;           // cudaMallocHost or cudaHostRegister
    std::shared_ptr<int> use; // copied by each enqueued operation that uses the memory
    Where used;               // where the last of these was enqueued
};
// The last one that the program seems not to know of: cudaGetLastError() has not told it, nor has
// it tried again with the same pointer.
struct FailedAllocation {
    const char *by = nullptr; // no call: there is none
    void **pointer = nullptr;
    size_t bytes = 0, free = 0;
    int device = 0;
    Where where = {};
};
struct Machine {
    std::vector<Device *> devices;
    FailedAllocation failed;
    Device managed; // cudaMallocManaged: memory of every device and of the host
    std::map<const char *, Pinned> pinned; // host memory, by first byte
    std::vector<Symbol *> symbols;
    std::map<const void *, const Device *> handles; // of the streams and events that exist
    std::mutex lock; // guards the tables of allocations, symbols and handles
    bool peers;      // whether devices can access each other's memory
    int watchdog;    // seconds
    int spinning;    // helpers of each device that spin before they sleep; 0 if workers share cores
    Machine();
};
Machine &machine();
inline __thread cudaError_t last_error = cudaSuccess; // of this host thread, for cudaGetLastError
inline __thread int current_device = 0;

inline Device &current() { return *machine().devices[current_device]; }
inline bool valid_device(int id) { return id >= 0 && id < (int)machine().devices.size(); }

// --- whose memory an address is

Device *owner_of(const void *pointer);
// An address of device memory as the program holds it, and where that memory is; either is made of
// either. Other addresses stay as they are.
const char *held(const void *pointer);
char *real(const void *pointer);
// Which device's range p lies in, and the allocation there or just before it; null where none is.
struct Place {
    Device *device;
    const char *first;
    const Allocation *allocation;
};
Place locate(const void *pointer);
// What CUDA's unified addressing lets a call or kernel on `device` use: its own memory, managed
// memory, and that of peers to which access is enabled.
inline bool is_managed(const Device *owner) { return owner == &machine().managed; }
inline bool reaches(const Device &device, const Device *owner) {
    return owner == &device || is_managed(owner) || device.peers[owner->id];
}
Pinned *find_pinned(const void *pointer);
inline bool is_pinned(const void *pointer) { return find_pinned(pointer); }
bool is_pinned_now(const void *pointer);
// To be kept by what is queued and uses the memory at `pointer`, if that is pinned.
std::shared_ptr<int> use_of(const void *pointer, Where where);
Symbol *find_symbol(const void *pointer);

// --- checks and allocations

// Return what a null pointer may come from, in words.
std::string null_may_be();
// Check that [pointer, pointer + bytes) is live memory that `device` reaches, not of the host;
// `what` names call and argument.
cudaError_t check_memory(const Device &device, const void *pointer, size_t bytes, Where where,
                         const char *what);

// Allocate `bytes` on the device, filled with NaN. Memory of variables does not count as used.
cudaError_t allocate(Device &device, void **pointer, size_t bytes, Where where, const char *by,
                     bool counts = true);
// A new mapping in its place: no access, and the memory goes back to the system.
void unmap(Device &device, const char *first);

// Bytes of shared memory of a block.
constexpr size_t usual_shared_bytes = 48 * 1024,
                 dynamic_shared_bytes = 99 * 1024; // with cudaFuncSetAttribute

// What memory holds before the program writes to it: as a float or double NaN, as an integer of any
// size one that no program counts up to.
constexpr unsigned unwritten = 0x7FF77F7F;
__attribute__((no_sanitize("address"), no_sanitize("thread"))) void fill_unwritten(void *p,
                                                                                   size_t bytes);

size_t page_size();
// Return where memory begins in a range of addresses, such that the lower half of an address is
// never a small number. Otherwise an int of a struct and the padding after it, which often holds
// the upper half of an earlier pointer, would look like an address.
char *first_address(void *range, size_t bytes);
inline size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

} // namespace cuda_cpu
