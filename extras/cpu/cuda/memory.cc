// Memory: whose an address is, whether a call may use it, and the calls that allocate and free.
#include "memory.h"
#include "machine.h"
#include "queues.h"

#include <sys/mman.h>
#include <unistd.h>

namespace cuda_cpu {

Device *owner_of(const void *pointer) {
    const char *p = (const char *)pointer;
    for (Device *device : machine().devices)
        if (p >= device->base && p < device->end + device->away) return device;
    Device &managed = machine().managed;
    const bool allocated = p >= managed.base && p < managed.end;
    return allocated || is_managed_variable(p) ? &managed : nullptr;
}
const char *held(const void *pointer) {
    const Device *owner = owner_of(pointer);
    return (const char *)pointer - (owner && pointer >= owner->end ? owner->away : 0);
}
char *real(const void *pointer) {
    const Device *owner = owner_of(pointer);
    return (char *)pointer + (owner && pointer < owner->end ? owner->away : 0);
}
Place locate(const void *pointer) {
    const char *p = held(pointer);
    Device *owner = owner_of(p);
    if (!owner) return {nullptr, nullptr, nullptr};
    auto found = owner->allocations.upper_bound(p);
    if (found == owner->allocations.begin()) return {owner, nullptr, nullptr};
    --found;
    return {owner, found->first, &found->second};
}
Pinned *find_pinned(const void *pointer) {
    auto found = machine().pinned.upper_bound((const char *)pointer);
    if (found == machine().pinned.begin()) return nullptr;
    --found;
    return (const char *)pointer < found->first + found->second.bytes ? &found->second : nullptr;
}
bool is_pinned_now(const void *pointer) {
    std::lock_guard<std::mutex> guard(machine().lock);
    return is_pinned(pointer);
}
std::shared_ptr<int> use_of(const void *pointer, Where where) {
    std::lock_guard<std::mutex> guard(machine().lock);
    Pinned *pinned = find_pinned(pointer);
    if (!pinned) return nullptr;
    pinned->used = where;
    return pinned->use;
}
Symbol *find_symbol(const void *pointer) {
    const char *p = (const char *)pointer;
    for (Symbol *symbol : machine().symbols)
        if (p >= symbol->host_side && p < symbol->host_side + symbol->bytes) return symbol;
    return nullptr;
}

std::string null_may_be() {
    const FailedAllocation &failed = machine().failed;
    if (!failed.by) return ": is a tensor or vector empty, or an index out of range?";
    char text[300];
    snprintf(text, sizeof text,
             ": %s in %s:%d failed, which asked for %zu bytes when device %d had %zu free",
             failed.by, failed.where.file, failed.where.line, failed.bytes, failed.device,
             failed.free);
    return text;
}

cudaError_t check_memory(const Device &device, const void *pointer, size_t bytes, Where where,
                         const char *what) {
    if (!pointer)
        return fail(cudaErrorInvalidValue, where, "%s: the pointer is null%s", what,
                    null_may_be().c_str());
    std::lock_guard<std::mutex> guard(machine().lock);
    Place at = locate(pointer);
    if (const Symbol *symbol = find_symbol(pointer))
        return fail(cudaErrorInvalidValue, where,
                    "%s: %s is a device variable, which has no address on the host: copy it with "
                    "cudaMemcpyToSymbol, and use its name in kernels",
                    what, symbol->name);
    if (!at.device)
        return fail(cudaErrorInvalidValue, where,
                    "%s: %p is %s memory, not memory of device %d: allocate it with cudaMalloc",
                    what, pointer, is_pinned(pointer) ? "pinned host" : "host", device.id);
    if (!reaches(device, at.device))
        return fail(cudaErrorInvalidValue, where, "%s: %p is memory of device %d, not of device %d",
                    what, pointer, at.device->id, device.id);
    const char *p = held(pointer);
    if (!at.allocation || p > at.first + at.allocation->bytes)
        return fail(cudaErrorInvalidValue, where, "%s: nothing is allocated at %p on %s", what,
                    pointer, at.device->memory_of);
    if (!at.allocation->live)
        return fail(cudaErrorInvalidValue, where, "%s: %p is memory of %s that %s:%d has freed",
                    what, pointer, at.device->memory_of, at.allocation->freed.file,
                    at.allocation->freed.line);
    size_t offset = p - at.first;
    if (offset + bytes > at.allocation->bytes)
        return fail(cudaErrorInvalidValue, where,
                    "%s: %zu bytes at offset %zu overrun the %zu bytes that %s:%d allocated on %s",
                    what, bytes, offset, at.allocation->bytes, at.allocation->made.file,
                    at.allocation->made.line, at.device->memory_of);
    return cudaSuccess;
}

void fill_unwritten(void *p, size_t bytes) {
    char *at = (char *)p, *const end = at + bytes;
    const char *const byte = (const char *)&unwritten;
    for (; at < end && (uintptr_t)at % 4; at++) *at = byte[(uintptr_t)at % 4];
    wmemset((wchar_t *)at, unwritten, (end - at) / 4);
    for (at += (end - at) / 4 * 4; at < end; at++) *at = byte[(uintptr_t)at % 4];
}
size_t page_size() {
    static const size_t bytes = sysconf(_SC_PAGESIZE);
    return bytes;
}

static size_t mapped_bytes(const char *first, const Allocation &a) {
    return first + (a.bytes + 255) / 256 * 256 - a.pages;
}
cudaError_t allocate(Device &device, void **pointer, size_t bytes, Where where, const char *by,
                     bool counts) {
    if (!pointer) return no_result(by, where);
    *pointer = nullptr;
    if (bytes == 0) return cudaSuccess;
    const size_t page = page_size(), rounded = (bytes + 255) / 256 * 256;
    const size_t mapped = (rounded + page - 1) / page * page;
    std::lock_guard<std::mutex> guard(machine().lock);
    auto no_memory = [&] {
        const size_t free = device.total - device.used;
        machine().failed = {by, pointer, bytes, free, device.id, where};
        return fail(cudaErrorMemoryAllocation);
    };
    if (counts && (bytes > device.total || device.used + mapped > device.total)) return no_memory();
    char *pages = device.next;
    if (mapped + page >
        size_t(device.end - device.next)) { // out of addresses: use freed ones again
        pages = nullptr;
        for (auto &entry : device.allocations) {
            Allocation &a = entry.second;
            if (a.mapped || mapped_bytes(entry.first, a) != mapped) continue;
            pages = a.pages;
            device.allocations.erase(entry.first);
            break;
        }
        if (!pages) return no_memory();
    } else {
        device.next += mapped + page;
    }
    char *first = pages + mapped - rounded;
    if (mprotect(pages + device.away, mapped, PROT_READ | PROT_WRITE)) return no_memory();
    {
        Hidden hidden;
#ifdef CUDA_CPU_ASAN
        ASAN_UNPOISON_MEMORY_REGION(pages + device.away, mapped);
#endif
        fill_unwritten(pages + device.away, mapped); // also before and behind it
    }
#ifdef CUDA_CPU_ASAN
    ASAN_POISON_MEMORY_REGION(pages + device.away, first - pages);
    ASAN_POISON_MEMORY_REGION(first + device.away + bytes, rounded - bytes);
#endif
    device.allocations[first] = {bytes, pages, where, {nullptr, 0, nullptr}, true, by, true};
    if (counts) device.used += mapped;
    if (pointer == machine().failed.pointer) machine().failed = {};
    *pointer = first;
    return cudaSuccess;
}
void unmap(Device &device, const char *first) {
    std::lock_guard<std::mutex> guard(machine().lock);
    Allocation &a = device.allocations[first];
    const size_t mapped = mapped_bytes(first, a);
#ifdef CUDA_CPU_ASAN
    ASAN_POISON_MEMORY_REGION(a.pages + device.away, mapped);
#endif
    mmap(a.pages + device.away, mapped, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    a.mapped = false;
    device.used -= mapped;
}
// An allocation that `call` frees is found, and from now on no more live.
static cudaError_t end_of(Place &at, void *pointer, Where where, const char *call, const char *by) {
    std::lock_guard<std::mutex> guard(machine().lock);
    at = locate(pointer);
    if (!at.device || !at.allocation || at.first != held(pointer) ||
        strncmp(at.allocation->by, by, strlen(by)))
        return fail(cudaErrorInvalidValue, where, "%s: %p was not returned by %s", call, pointer,
                    by);
    Allocation &a = at.device->allocations[at.first];
    if (!a.live)
        return fail(cudaErrorInvalidValue, where, "%s: %p on %s was already freed by %s:%d", call,
                    pointer, at.device->memory_of, a.freed.file, a.freed.line);
    a.live = false;
    a.freed = where;
    return cudaSuccess;
}
} // namespace cuda_cpu

using namespace cuda_cpu;

cudaError_t cudaMalloc(void **pointer, size_t bytes, Where where) {
    if (cudaError_t error = check_capture(where, "cudaMalloc")) return error;
    return allocate(current(), pointer, bytes, where, "cudaMalloc");
}

cudaError_t cudaMallocPitch(void **pointer, size_t *pitch, size_t width, size_t height,
                            Where where) {
    if (!pitch) return no_result("cudaMallocPitch", where);
    *pitch = (width + 511) / 512 * 512;
    return cudaMalloc(pointer, *pitch * height, where);
}

cudaError_t cudaFree(void *pointer, Where where) {
    if (!pointer) return cudaSuccess;
    if (cudaError_t error = check_capture(where, "cudaFree")) return error;
    Place at;
    if (cudaError_t error = end_of(at, pointer, where, "cudaFree", "cudaMalloc")) return error;
    for (Device *device : machine().devices)
        if (device == at.device || is_managed(at.device)) synchronize(*device);
    unmap(*at.device, at.first);
    return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream, Where where) {
    const char *by = "cudaMallocAsync";
    if (cudaError_t error = check_handle(stream, where, by)) return error;
    if (cudaError_t error = check_capture_of(stream, where, by)) return error;
    Device &device = stream ? *stream->device : current();
    const cudaError_t before = last_error, error = allocate(device, pointer, bytes, where, by);
    if (error != cudaErrorMemoryAllocation) return error;
    last_error = before;
    synchronize(stream ? stream : device.default_stream); // it may be about to free some
    return allocate(device, pointer, bytes, where, by);
}
cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream, Where where) {
    if (!pointer) return cudaSuccess;
    const char *call = "cudaFreeAsync";
    if (cudaError_t error = check_handle(stream, where, call)) return error;
    if (cudaError_t error = check_capture_of(stream, where, call)) return error;
    Device &device = stream ? *stream->device : current();
    Place at;
    if (cudaError_t error = check_memory(device, pointer, 0, where, call)) return error;
    if (cudaError_t error = end_of(at, pointer, where, call, "cudaMallocAsync")) return error;
    submit(stream, device, {call, where, device.id}, [at] {
        Hidden hidden;
        unmap(*at.device, at.first);
    });
    return cudaSuccess;
}

cudaError_t cudaMallocManaged(void **pointer, size_t bytes, unsigned flags, Where where) {
    if (bytes == 0 || flags < cudaMemAttachGlobal || flags > cudaMemAttachHost)
        return fail(cudaErrorInvalidValue, where,
                    "cudaMallocManaged: cannot allocate %zu bytes with flags %u", bytes, flags);
    Device &managed = machine().managed;
    {
        std::lock_guard<std::mutex> guard(machine().lock);
        if (!managed.base) {
            const size_t range = size_t(current().end - current().base);
            void *p =
                mmap(nullptr, range, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (p == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
            managed.next = (char *)p;
            managed.end = managed.next + range;
            managed.base = managed.next;
        }
    }
    return allocate(managed, pointer, bytes, where, "cudaMallocManaged");
}
cudaError_t cudaMemPrefetchAsync(const void *pointer, size_t bytes, int device, cudaStream_t,
                                 Where where) {
    if (device != cudaCpuDeviceId && !valid_device(device))
        return fail(cudaErrorInvalidDevice, where,
                    "cudaMemPrefetchAsync: there is no device %d: the device count is %zu", device,
                    machine().devices.size());
    bool managed;
    {
        std::lock_guard<std::mutex> guard(machine().lock);
        managed = is_managed(locate(pointer).device);
    }
    if (!managed)
        return fail(cudaErrorInvalidValue, where,
                    "cudaMemPrefetchAsync: %p was not returned by cudaMallocManaged", pointer);
    return check_memory(machine().managed, pointer, bytes, where, "cudaMemPrefetchAsync");
}
cudaError_t cudaMemPrefetchAsync(const void *pointer, size_t bytes, cudaMemLocation to, unsigned,
                                 cudaStream_t stream, Where where) {
    return cudaMemPrefetchAsync(pointer, bytes, to.device(), stream, where);
}
cudaError_t cudaMemAdvise(const void *pointer, size_t bytes, cudaMemoryAdvise, int device,
                          Where where) {
    return cudaMemPrefetchAsync(pointer, bytes, device, nullptr, where);
}
cudaError_t cudaMemAdvise(const void *pointer, size_t bytes, cudaMemoryAdvise, cudaMemLocation of,
                          Where where) {
    return cudaMemPrefetchAsync(pointer, bytes, of.device(), nullptr, where);
}

cudaError_t cudaMallocHost(void **pointer, size_t bytes, unsigned flags, Where where) {
    if (!pointer) return no_result("cudaMallocHost", where);
    if (flags > 7)
        return fail(cudaErrorInvalidValue, where, "cudaHostAlloc: invalid flags %u", flags);
    *pointer = bytes ? aligned_alloc(256, (bytes + 255) / 256 * 256) : nullptr;
    if (!*pointer) return bytes ? fail(cudaErrorMemoryAllocation) : cudaSuccess;
#ifdef CUDA_CPU_ASAN
    ASAN_POISON_MEMORY_REGION((char *)*pointer + bytes, (bytes + 255) / 256 * 256 - bytes);
#endif
    fill_unwritten(*pointer, bytes);
    std::lock_guard<std::mutex> guard(machine().lock);
    machine().pinned[(const char *)*pointer] = {
        bytes, "cudaMallocHost", std::make_shared<int>(), {}};
    return cudaSuccess;
}
cudaError_t cudaMallocHost(void **pointer, size_t bytes, Where where) {
    return cudaMallocHost(pointer, bytes, 0, where);
}
cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags, Where where) {
    return cudaMallocHost(pointer, bytes, flags, where);
}
// Pinned memory is forgotten. A GPU's driver may wait for what is queued and uses it, or not.
static cudaError_t unpin(void *pointer, Where where, const char *call, const char *by,
                         cudaError_t error) {
    std::lock_guard<std::mutex> guard(machine().lock);
    auto found = machine().pinned.find((const char *)pointer);
    if (found == machine().pinned.end() || found->second.by != std::string(by))
        return fail(error, where, "%s: %p was not %s %s", call, pointer,
                    error == cudaErrorInvalidValue ? "returned by" : "given to", by);
    const Pinned &pinned = found->second;
    if (pinned.use.use_count() > 1)
        return fail(cudaErrorInvalidValue, where,
                    "%s: %p is still in use by the operation that %s:%d enqueued: wait for its "
                    "stream first",
                    call, pointer, pinned.used.file, pinned.used.line);
    machine().pinned.erase(found);
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void *pointer, Where where) {
    if (!pointer) return cudaSuccess;
    cudaError_t error =
        unpin(pointer, where, "cudaFreeHost", "cudaMallocHost", cudaErrorInvalidValue);
    if (!error) free(pointer);
    return error;
}
cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags, Where where) {
    if (flags > 15)
        return fail(cudaErrorInvalidValue, where, "cudaHostRegister: invalid flags %u", flags);
    if (!pointer || bytes == 0)
        return fail(cudaErrorInvalidValue, where, "cudaHostRegister: cannot pin %zu bytes at %p",
                    bytes, pointer);
    const char *p = (const char *)pointer;
    std::lock_guard<std::mutex> guard(machine().lock);
    if (const Device *owner = locate(p).device)
        return fail(cudaErrorInvalidValue, where,
                    "cudaHostRegister: %p is memory of %s, not of "
                    "the host",
                    pointer, owner->memory_of);
    auto next = machine().pinned.lower_bound(p);
    if (is_pinned(p) || (next != machine().pinned.end() && next->first < p + bytes))
        return fail(cudaErrorHostMemoryAlreadyRegistered, where,
                    "cudaHostRegister: some or all of the %zu bytes at %p are already pinned",
                    bytes, pointer);
    machine().pinned[p] = {bytes, "cudaHostRegister", std::make_shared<int>(), {}};
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *pointer, Where where) {
    return unpin(pointer, where, "cudaHostUnregister", "cudaHostRegister",
                 cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaMemGetInfo(size_t *free, size_t *total, Where where) {
    if (!free || !total) return no_result("cudaMemGetInfo", where);
    std::lock_guard<std::mutex> guard(machine().lock);
    *total = current().total;
    *free = *total - current().used;
    return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *pointer,
                                     Where where) {
    if (!attributes) return no_result("cudaPointerGetAttributes", where);
    const Device *const owner = owner_of(pointer);
    void *const address = const_cast<void *>(pointer);
    const int here = current_device;
    if (is_managed(owner) || is_managed_variable(pointer))
        *attributes = {cudaMemoryTypeManaged, here, address, address};
    else if (owner) *attributes = {cudaMemoryTypeDevice, owner->id, address, nullptr};
    else if (is_pinned_now(pointer)) *attributes = {cudaMemoryTypeHost, here, address, address};
    else *attributes = {cudaMemoryTypeUnregistered, cudaInvalidDeviceId, nullptr, address};
    return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void **pointer, void *host, unsigned, Where where) {
    const char *call = "cudaHostGetDevicePointer";
    if (!pointer) return no_result(call, where);
    if (!is_pinned_now(host))
        return fail(cudaErrorInvalidValue, where,
                    "%s: %p is not pinned memory: allocate it with cudaHostAlloc", call, host);
    *pointer = host;
    return cudaSuccess;
}
