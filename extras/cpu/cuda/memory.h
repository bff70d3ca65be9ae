// Memory: allocations, copies, fills, and the variables of a device.
#pragma once

#include "blocks.h"
#include "streams.h"

enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault // what the pointers say
};

// --- memory of a device

// Allocate memory of the current device, filled with NaN.
CUDA_CPU_ALLOCATION(cudaMalloc, (bytes), size_t bytes);
// Waits for the device first, as CUDA does.
CUDA_CPU_CALL(cudaFree, (pointer), void *pointer);

// In the stream's order. What another stream enqueues later with memory that is freed is refused;
// what it enqueued before and has not done by then faults.
CUDA_CPU_ALLOCATION(cudaMallocAsync, (bytes, stream), size_t bytes, cudaStream_t stream);
CUDA_CPU_CALL(cudaFreeAsync, (pointer, stream), void *pointer, cudaStream_t stream);
// Allocate `height` rows, which begin at multiples of 512 bytes.
CUDA_CPU_ALLOCATION(cudaMallocPitch, (pitch, width, height), size_t *pitch, size_t width,
                    size_t height);
CUDA_CPU_CALL(cudaMemGetInfo, (free, total), size_t *free, size_t *total);

// --- managed memory

// Memory that the host and all devices read and write under one address. It is the machine's own,
// so nothing moves. That the host waits for the devices before it looks is up to the program.
constexpr unsigned cudaMemAttachGlobal = 1, cudaMemAttachHost = 2;
CUDA_CPU_ALLOCATION(cudaMallocManaged, (bytes, flags), size_t bytes,
                    unsigned flags = cudaMemAttachGlobal);
constexpr int cudaCpuDeviceId = -1, cudaInvalidDeviceId = -2;
// As up to CUDA 12, and as CUDA 13 has them. The memory does not move, so advice changes nothing.
CUDA_CPU_CALL(cudaMemPrefetchAsync, (pointer, bytes, device, stream), const void *pointer,
              size_t bytes, int device, cudaStream_t stream = nullptr);
enum cudaMemLocationType {
    cudaMemLocationTypeInvalid,
    cudaMemLocationTypeDevice,
    cudaMemLocationTypeHost
};
struct cudaMemLocation {
    cudaMemLocationType type;
    int id;
    int device() const { return type == cudaMemLocationTypeHost ? cudaCpuDeviceId : id; }
};
CUDA_CPU_CALL(cudaMemPrefetchAsync, (pointer, bytes, to, flags, stream), const void *pointer,
              size_t bytes, cudaMemLocation to, unsigned flags, cudaStream_t stream = nullptr);
enum cudaMemoryAdvise {
    cudaMemAdviseSetReadMostly = 1,
    cudaMemAdviseUnsetReadMostly,
    cudaMemAdviseSetPreferredLocation,
    cudaMemAdviseUnsetPreferredLocation,
    cudaMemAdviseSetAccessedBy,
    cudaMemAdviseUnsetAccessedBy
};
CUDA_CPU_CALL(cudaMemAdvise, (pointer, bytes, advice, device), const void *pointer, size_t bytes,
              cudaMemoryAdvise advice, int device);
CUDA_CPU_CALL(cudaMemAdvise, (pointer, bytes, advice, of), const void *pointer, size_t bytes,
              cudaMemoryAdvise advice, cudaMemLocation of);

// --- pinned memory

// Filled with NaN when fresh.
constexpr unsigned cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2,
                   cudaHostAllocWriteCombined = 4;
CUDA_CPU_ALLOCATION(cudaMallocHost, (bytes), size_t bytes);
CUDA_CPU_ALLOCATION(cudaMallocHost, (bytes, flags), size_t bytes, unsigned flags);
CUDA_CPU_ALLOCATION(cudaHostAlloc, (bytes, flags), size_t bytes, unsigned flags);
CUDA_CPU_CALL(cudaFreeHost, (pointer), void *pointer);
// Memory of the host becomes pinned memory.
constexpr unsigned cudaHostRegisterDefault = 0, cudaHostRegisterPortable = 1,
                   cudaHostRegisterMapped = 2, cudaHostRegisterReadOnly = 8;
CUDA_CPU_CALL(cudaHostRegister, (pointer, bytes, flags), void *pointer, size_t bytes,
              unsigned flags);
CUDA_CPU_CALL(cudaHostUnregister, (pointer), void *pointer);
// A device finds pinned memory under the host's address.
CUDA_CPU_ALLOCATION(cudaHostGetDevicePointer, (host, flags), void *host, unsigned flags);
// Whose memory an address is; of pinned and managed memory that is the current device.
enum cudaMemoryType {
    cudaMemoryTypeUnregistered,
    cudaMemoryTypeHost,
    cudaMemoryTypeDevice,
    cudaMemoryTypeManaged
};
struct cudaPointerAttributes {
    cudaMemoryType type;
    int device;
    void *devicePointer, *hostPointer; // null where it cannot be used
};
CUDA_CPU_CALL(cudaPointerGetAttributes, (attributes, pointer), cudaPointerAttributes *attributes,
              const void *pointer);

// --- copies and fills

namespace cuda_cpu {
// A copy that is not between devices: `height` rows of `width` bytes, whose beginnings lie `pitch`
// bytes apart; mostly it is one row.
struct Copy {
    const char *call;
    void *to;
    size_t to_pitch;
    const void *from;
    size_t from_pitch, width, height;
    cudaMemcpyKind kind;
    bool pointers = false; // whether addresses of device memory are among what is copied: on a
                           // device each becomes one that a kernel can follow

    void operator()() const;
    size_t extent(size_t pitch) const { return (height - 1) * pitch + width; }
};
// Pageable host memory is read before the call returns, or written before it returns, as on a GPU;
// only pinned memory is copied while the host goes on.
cudaError_t copy_async(Copy copy, cudaStream_t stream, Where where);
// Waits until the copy is done, unless it is one between devices.
cudaError_t copy_and_wait(Copy copy, Where where);

// Tell whether a T may hold pointers: a pointer, a struct aligned as one, or an array of these.
template <class T, class = void> constexpr bool holds_pointers = false; // of void, or not defined
template <class T>
constexpr bool holds_pointers<T, std::void_t<decltype(sizeof(T))>> =
    std::is_pointer<std::remove_all_extents_t<T>>::value ||
    ((std::is_class<std::remove_all_extents_t<T>>::value || std::is_union<T>::value) &&
     alignof(T) >= alignof(void *) && !is_vector<std::remove_cv_t<std::remove_all_extents_t<T>>>);
} // namespace cuda_cpu

CUDA_CPU_CALL(cudaMemcpyAsync, (to, from, bytes, kind, stream), void *to, const void *from,
              size_t bytes, cudaMemcpyKind kind, cudaStream_t stream = nullptr);
CUDA_CPU_CALL(cudaMemcpy, (to, from, bytes, kind), void *to, const void *from, size_t bytes,
              cudaMemcpyKind kind);
// Copy pointers, or structs that may have some.
namespace cuda_cpu::at {
template <class To, class From,
          class = std::enable_if_t<cuda_cpu::holds_pointers<To> || cuda_cpu::holds_pointers<From>>>
cudaError_t cudaMemcpyAsync(To *to, const From *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr, CUDA_CPU_WHERE) {
    return cuda_cpu::copy_async({"cudaMemcpyAsync", to, bytes, from, bytes, bytes, 1, kind, true},
                                stream, where);
}
template <class To, class From,
          class = std::enable_if_t<cuda_cpu::holds_pointers<To> || cuda_cpu::holds_pointers<From>>>
cudaError_t cudaMemcpy(To *to, const From *from, size_t bytes, cudaMemcpyKind kind,
                       CUDA_CPU_WHERE) {
    return cuda_cpu::copy_and_wait({"cudaMemcpy", to, bytes, from, bytes, bytes, 1, kind, true},
                                   where);
}
} // namespace cuda_cpu::at
CUDA_CPU_CALL(cudaMemcpy2DAsync, (to, to_pitch, from, from_pitch, width, height, kind, stream),
              void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
              size_t height, cudaMemcpyKind kind, cudaStream_t stream = nullptr);
CUDA_CPU_CALL(cudaMemcpy2D, (to, to_pitch, from, from_pitch, width, height, kind), void *to,
              size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
              cudaMemcpyKind kind);

CUDA_CPU_CALL(cudaMemsetAsync, (to, value, bytes, stream), void *to, int value, size_t bytes,
              cudaStream_t stream = nullptr);
CUDA_CPU_CALL(cudaMemset, (to, value, bytes), void *to, int value, size_t bytes);
CUDA_CPU_CALL(cudaMemset2DAsync, (to, pitch, value, width, height, stream), void *to, size_t pitch,
              int value, size_t width, size_t height, cudaStream_t stream = nullptr);
CUDA_CPU_CALL(cudaMemset2D, (to, pitch, value, width, height), void *to, size_t pitch, int value,
              size_t width, size_t height);

// In the order of its stream alone: that the source is ready, and stays so, takes events. But in
// the default stream a copy between devices waits for both devices, and both wait for it: for all
// of their streams if it is cudaMemcpyPeer or cudaMemcpy, else for those that block.
CUDA_CPU_CALL(cudaMemcpyPeerAsync, (to, to_device, from, from_device, bytes, stream), void *to,
              int to_device, const void *from, int from_device, size_t bytes,
              cudaStream_t stream = nullptr);
CUDA_CPU_CALL(cudaMemcpyPeer, (to, to_device, from, from_device, bytes), void *to, int to_device,
              const void *from, int from_device, size_t bytes);

// --- variables of a device

namespace cuda_cpu {
// Where the calling thread finds the variable whose first value is `initial`.
__attribute__((noinline, cold)) void *find_variable(const void *initial, size_t bytes,
                                                    const char *name, Where where);
template <class T>
Watched<T> &device_variable(T &initial, const char *name, const char *file, int line) {
    static_assert(std::is_trivially_copyable<T>::value,
                  "a device variable must be copyable as bytes");
    return *(Watched<T> *)find_variable((const void *)&initial, sizeof initial, name,
                                        {file, line, nullptr});
}
template <class T>
Watched<T> &constant_variable(T &initial, const char *name, const char *file, int line) {
    static_assert(sizeof initial <= 65536, "a device has 64 KiB of constant memory");
    return device_variable(initial, name, file, line);
}
// A device's threads find their variables before they run a kernel.
bool add_on_start(void (*call)());

// The current device's copy of a variable, for a call that is given its name.
cudaError_t find_copy(char *&copy, const volatile void *variable, Where where, const char *call);
} // namespace cuda_cpu

template <class T>
cudaError_t cudaGetSymbolAddress(void **pointer, const T &variable, CUDA_CPU_WHERE) {
    char *copy = nullptr;
    if (!pointer) return cuda_cpu::no_result("cudaGetSymbolAddress", where);
    cudaError_t error = cuda_cpu::find_copy(copy, &variable, where, "cudaGetSymbolAddress");
    *pointer = copy;
    return error;
}
template <class T> cudaError_t cudaGetSymbolSize(size_t *bytes, const T &variable, CUDA_CPU_WHERE) {
    char *copy = nullptr;
    if (!bytes) return cuda_cpu::no_result("cudaGetSymbolSize", where);
    *bytes = sizeof variable;
    return cuda_cpu::find_copy(copy, &variable, where, "cudaGetSymbolSize");
}
template <class T>
cudaError_t cudaMemcpyToSymbol(const T &variable, const void *from, size_t bytes, size_t offset = 0,
                               cudaMemcpyKind kind = cudaMemcpyHostToDevice, CUDA_CPU_WHERE) {
    const char *call = "cudaMemcpyToSymbol";
    char *to = nullptr;
    if (cudaError_t error = cuda_cpu::find_copy(to, &variable, where, call)) return error;
    return cuda_cpu::copy_and_wait(
        {call, to + offset, bytes, from, bytes, bytes, 1, kind, cuda_cpu::holds_pointers<T>},
        where);
}
template <class T>
cudaError_t cudaMemcpyFromSymbol(void *to, const T &variable, size_t bytes, size_t offset = 0,
                                 cudaMemcpyKind kind = cudaMemcpyDeviceToHost, CUDA_CPU_WHERE) {
    const char *call = "cudaMemcpyFromSymbol";
    char *from = nullptr;
    if (cudaError_t error = cuda_cpu::find_copy(from, &variable, where, call)) return error;
    return cuda_cpu::copy_and_wait(
        {call, to, bytes, from + offset, bytes, bytes, 1, kind, cuda_cpu::holds_pointers<T>},
        where);
}
template <class T>
cudaError_t cudaMemcpyToSymbolAsync(const T &variable, const void *from, size_t bytes,
                                    size_t offset, cudaMemcpyKind kind,
                                    cudaStream_t stream = nullptr, CUDA_CPU_WHERE) {
    const char *call = "cudaMemcpyToSymbolAsync";
    char *to = nullptr;
    if (cudaError_t error = cuda_cpu::find_copy(to, &variable, where, call)) return error;
    return cuda_cpu::copy_async(
        {call, to + offset, bytes, from, bytes, bytes, 1, kind, cuda_cpu::holds_pointers<T>},
        stream, where);
}
template <class T>
cudaError_t cudaMemcpyFromSymbolAsync(void *to, const T &variable, size_t bytes, size_t offset,
                                      cudaMemcpyKind kind, cudaStream_t stream = nullptr,
                                      CUDA_CPU_WHERE) {
    const char *call = "cudaMemcpyFromSymbolAsync";
    char *from = nullptr;
    if (cudaError_t error = cuda_cpu::find_copy(from, &variable, where, call)) return error;
    return cuda_cpu::copy_async(
        {call, to, bytes, from + offset, bytes, bytes, 1, kind, cuda_cpu::holds_pointers<T>},
        stream, where);
}
