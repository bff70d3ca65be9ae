// Copies and fills, in the order of a stream or of two devices, and the variables of a device.
#include "machine.h"
#include "queues.h"

#include <functional>
#include <set>

#include <sys/mman.h>

namespace cuda_cpu {

// Translate a word that is copied to a device or from it. If it is an address in memory that is or
// was allocated, return the address under which the receiver knows this place; else the word.
static const void *translated(const void *word, bool to_device) {
    if (!owner_of(word)) return word;
    Hidden hidden;
    std::lock_guard<std::mutex> guard(machine().lock);
    const Place at = locate(word);
    if (!at.allocation || held(word) > at.first + at.allocation->bytes) return word;
    return to_device ? real(word) : held(word);
}
void Copy::operator()() const {
    for (size_t i = 0; i < height; i++)
        memcpy(real(to) + i * to_pitch, real(from) + i * from_pitch, width);
    const bool to_device = kind == cudaMemcpyHostToDevice;
    if (!pointers || height > 1 || (!to_device && kind != cudaMemcpyDeviceToHost)) return;
    char *const end = real(to) + width;
    auto p = (const void **)round_up((size_t)real(to), sizeof(void *));
    for (; (char *)(p + 1) <= end; p++)
        if (const void *word = translated(*p, to_device); word != *p) *p = word;
}

// Both ends; `device` becomes the one whose memory takes part, `other` the one that the source is
// on, if that is another.
static cudaError_t check_copy(Device *&device, Device *&other, Copy &copy, Where where) {
    const char *call = copy.call;
    for (size_t pitch : {copy.to_pitch, copy.from_pitch})
        if (pitch < copy.width)
            return fail(cudaErrorInvalidPitchValue, where,
                        "%s: rows of %zu bytes do not fit into a pitch of %zu", call, copy.width,
                        pitch);
    Device *to_device, *from_device;
    {
        std::lock_guard<std::mutex> guard(machine().lock);
        to_device = locate(copy.to).device;
        from_device = locate(copy.from).device;
    }
    auto of_one = [](Device *owner) { return owner && !is_managed(owner); };
    if (copy.kind == cudaMemcpyDefault)
        copy.kind = of_one(to_device)
                        ? of_one(from_device) ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice
                    : of_one(from_device) ? cudaMemcpyDeviceToHost
                                          : cudaMemcpyHostToHost;
    if (Device *owner = copy.kind == cudaMemcpyDeviceToHost ? from_device : to_device)
        if (of_one(owner)) device = owner;
    other = copy.kind == cudaMemcpyDeviceToDevice && of_one(from_device) ? from_device : device;
    auto check = [&](const void *p, Device *owner, size_t pitch, bool host, const char *end) {
        char what[100];
        snprintf(what, sizeof what, "%s, %s", call, end);
        if (!host && !owner && is_pinned_now(p)) return cudaSuccess; // a device's address, too
        if (!host || (owner && is_managed(owner)))
            return check_memory(of_one(owner) ? *owner : *device, p, copy.extent(pitch), where,
                                what);
        if (!p)
            return fail(cudaErrorInvalidValue, where, "%s: the pointer is null%s", what,
                        null_may_be().c_str());
        if (!owner) return cudaSuccess;
        return fail(cudaErrorInvalidValue, where,
                    "%s: the %s %p is memory of device %d, not of the host", call, end, p,
                    owner->id);
    };
    const unsigned kind = copy.kind;
    if (kind > cudaMemcpyDeviceToDevice) return fail(cudaErrorInvalidMemcpyDirection);
    const bool to_host = kind == cudaMemcpyHostToHost || kind == cudaMemcpyDeviceToHost,
               from_host = kind == cudaMemcpyHostToHost || kind == cudaMemcpyHostToDevice;
    auto check_to = [&] {
        return check(copy.to, to_device, copy.to_pitch, to_host, "destination");
    };
    auto check_from = [&] {
        return check(copy.from, from_device, copy.from_pitch, from_host, "source");
    };
    const bool from_first = kind == cudaMemcpyDeviceToHost; // the device's end
    cudaError_t error = from_first ? check_from() : check_to();
    return error ? error : from_first ? check_to() : check_from();
}

// A copy between devices in the default stream. The host goes on. What either device or the current
// one was given before, or is given later, is ordered with it: in all streams, or in those that
// block.
static cudaError_t between_devices(Device &to, Device &from, bool all, Running running,
                                   std::function<void()> copy) {
    const Enqueuing one_at_a_time;
    Stream *const stream = to.default_stream;
    std::set<Stream *> others;
    for (Device *device : {&current(), &to, &from}) {
        if (cudaError_t error = check_default_stream(*device, running.where, running.name))
            return error;
        Hidden hidden;
        for (Stream *other : device->streams)
            if (other != stream && (all || other->blocking)) others.insert(other);
    }
    for (Stream *other : others) wait(stream, mark(other));
    stream->push(running, std::move(copy));
    auto done = mark(stream);
    for (Stream *other : others) wait(other, done);
    return machine().peers ? cudaSuccess : synchronize(stream);
}
cudaError_t copy_async(Copy copy, cudaStream_t stream, Where where) {
    if (copy.width == 0 || copy.height == 0) return cudaSuccess;
    if (cudaError_t error = check_handle(stream, where, copy.call)) return error;
    Device *device = stream ? stream->device : &current();
    Device *queue = device, *other = device;
    if (cudaError_t error = check_copy(device, other, copy, where)) return error;
    auto pageable = [](const void *p) { return !is_pinned(p) && !locate(p).device; };
    bool pageable_source = false, pageable_target = false;
    {
        std::lock_guard<std::mutex> guard(machine().lock);
        if (copy.kind == cudaMemcpyHostToDevice || copy.kind == cudaMemcpyHostToHost)
            pageable_source = pageable(copy.from);
        if (copy.kind == cudaMemcpyDeviceToHost || copy.kind == cudaMemcpyHostToHost)
            pageable_target = pageable(copy.to);
    }
    Running what = {copy.call, where, queue->id};
    if (!stream && other != device) return between_devices(*device, *other, false, what, copy);
    if (stream && stream->capture) { // nothing is read or written now
        submit(stream, *queue, what, copy);
    } else if (pageable_source && !pageable_target) {
        std::shared_ptr<char> staged((char *)malloc(copy.width * copy.height), free);
        if (!staged) return fail(cudaErrorMemoryAllocation);
        Copy stage = copy;
        stage.to = staged.get();
        copy.from = staged.get();
        stage.to_pitch = copy.from_pitch = copy.width;
        stage();
        submit(stream, *queue, what, [copy, staged = std::move(staged)] { copy(); });
    } else {
        submit(stream, *queue, what,
               [copy, to = use_of(copy.to, where), from = use_of(copy.from, where)] { copy(); });
        if (pageable_target || (other != device && !machine().peers))
            return synchronize(stream ? stream : queue->default_stream);
    }
    return cudaSuccess;
}
// A copy that the host waits for, while no operation is left that comes before it: the host does it
// itself. To wake the stream's thread, and to be woken, would take longer. Return whether it has.
static bool copied_by_host(Device &device, const Running &what, const Copy &copy) {
#ifdef CUDA_CPU_TSAN // to which it must be the device's work
    return false;
#endif
    const size_t bytes = 1 << 18; // others that enqueue something wait so long
    if (device_of_thread >= 0 || copy.width * copy.height > bytes) return false;
    const Enqueuing one_at_a_time;
    if (!is_done(device.default_stream)) return false;
    running = what;
    copy();
    running.name = nullptr;
    return true;
}
cudaError_t copy_and_wait(Copy copy, Where where) {
    Device *const queue = &current(), *device = queue, *other = device;
    if (copy.width == 0 || copy.height == 0) return cudaSuccess;
    if (cudaError_t error = check_capture(where, copy.call)) return error;
    if (cudaError_t error = check_default_stream(*device, where, copy.call)) return error;
    if (cudaError_t error = check_copy(device, other, copy, where)) return error;
    if (other != device)
        return between_devices(*device, *other, true, {copy.call, where, device->id}, copy);
    const Running what = {copy.call, where, queue->id};
    if (copied_by_host(*queue, what, copy)) return queue->fault;
    submit(nullptr, *queue, what, copy);
    return synchronize(queue->default_stream);
}
} // namespace cuda_cpu

using namespace cuda_cpu;

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream, Where where) {
    return copy_async({"cudaMemcpyAsync", to, bytes, from, bytes, bytes, 1, kind}, stream, where);
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, Where where) {
    return copy_and_wait({"cudaMemcpy", to, bytes, from, bytes, bytes, 1, kind}, where);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind, cudaStream_t stream,
                              Where where) {
    return copy_async({"cudaMemcpy2DAsync", to, to_pitch, from, from_pitch, width, height, kind},
                      stream, where);
}
cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                         size_t width, size_t height, cudaMemcpyKind kind, Where where) {
    return copy_and_wait({"cudaMemcpy2D", to, to_pitch, from, from_pitch, width, height, kind},
                         where);
}

static cudaError_t set_async(const char *call, void *to, size_t pitch, int value, size_t width,
                             size_t height, cudaStream_t stream, Where where) {
    if (width == 0 || height == 0) return cudaSuccess;
    if (cudaError_t error = check_handle(stream, where, call)) return error;
    Device &device = stream ? *stream->device : current();
    if (pitch < width)
        return fail(cudaErrorInvalidPitchValue, where,
                    "%s: rows of %zu bytes do not fit into a pitch of %zu", call, width, pitch);
    auto pinned = use_of(to, where);
    cudaError_t error =
        pinned ? cudaSuccess : check_memory(device, to, (height - 1) * pitch + width, where, call);
    if (error) return error;
    if (stream && stream->capture) pinned = nullptr; // a graph may outlive the memory
    submit(stream, device, {call, where, device.id}, [=] {
        (void)pinned;
        for (size_t i = 0; i < height; i++) memset(real(to) + i * pitch, value, width);
    });
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream, Where where) {
    return set_async("cudaMemsetAsync", to, bytes, value, bytes, 1, stream, where);
}
cudaError_t cudaMemset(void *to, int value, size_t bytes, Where where) {
    return set_async("cudaMemset", to, bytes, value, bytes, 1, nullptr, where);
}
cudaError_t cudaMemset2DAsync(void *to, size_t pitch, int value, size_t width, size_t height,
                              cudaStream_t stream, Where where) {
    return set_async("cudaMemset2DAsync", to, pitch, value, width, height, stream, where);
}
cudaError_t cudaMemset2D(void *to, size_t pitch, int value, size_t width, size_t height,
                         Where where) {
    return set_async("cudaMemset2D", to, pitch, value, width, height, nullptr, where);
}

// --- variables of a device

namespace cuda_cpu {
static void *copy_on(Symbol &symbol, Device &device) {
    Hidden hidden;
    static std::mutex lock;
    std::lock_guard<std::mutex> guard(lock);
    void *&copy = symbol.copies[device.id];
    if (copy) return copy;
    if (allocate(device, &copy, symbol.bytes, symbol.where, "its declaration", false))
        give_up("no memory for %s on device %d", symbol.name, device.id);
    return memcpy(real(copy), symbol.initial, symbol.bytes), copy;
}
void *find_variable(const void *initial, size_t bytes, const char *name, Where where) {
    if (is_managed_variable(initial)) return (void *)initial;
    machine(); // its threads are started in the open
    Hidden hidden;
    Symbol *found = nullptr;
    {
        std::lock_guard<std::mutex> guard(machine().lock);
        for (Symbol *symbol : machine().symbols)
            if (symbol->initial == initial) found = symbol;
        if (!found) {
            void *p =
                mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (p == MAP_FAILED) give_up("cannot reserve addresses for %s", name);
            found = new Symbol{name, where, initial, bytes, (char *)p, {}};
            machine().symbols.push_back(found);
        }
    }
    if (device_of_thread < 0) return found->host_side;
    return real(copy_on(*found, *machine().devices[device_of_thread]));
}
bool add_on_start(void (*call)()) { return on_start(call), true; }
cudaError_t find_copy(char *&copy, const volatile void *variable, Where where, const char *call) {
    Symbol *symbol;
    if (is_managed_variable((const void *)variable)) {
        copy = (char *)variable;
        return cudaSuccess;
    }
    {
        std::lock_guard<std::mutex> guard(machine().lock);
        symbol = find_symbol((const void *)variable);
    }
    if (!symbol)
        return fail(cudaErrorInvalidSymbol, where,
                    "%s: pass the name of a __device__ or __constant__ variable, not its address",
                    call);
    copy = (char *)copy_on(*symbol, current());
    return cudaSuccess;
}
} // namespace cuda_cpu

// --- copies between devices

static cudaError_t check_peers(const void *to, int to_device, const void *from, int from_device,
                               size_t bytes, Where where, const char *call) {
    if (!valid_device(to_device) || !valid_device(from_device))
        return fail(cudaErrorInvalidDevice, where,
                    "%s: cannot copy from device %d to device %d: the device count is %zu", call,
                    from_device, to_device, machine().devices.size());
    char dst[100], src[100];
    snprintf(dst, sizeof dst, "%s, destination", call);
    snprintf(src, sizeof src, "%s, source", call);
    cudaError_t error = check_memory(*machine().devices[to_device], to, bytes, where, dst);
    return error ? error : check_memory(*machine().devices[from_device], from, bytes, where, src);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                                size_t bytes, cudaStream_t stream, Where where) {
    if (bytes == 0) return cudaSuccess;
    const char *call = "cudaMemcpyPeerAsync";
    if (cudaError_t error = check_peers(to, to_device, from, from_device, bytes, where, call))
        return error;
    if (cudaError_t error = check_handle(stream, where, call)) return error;
    Device &device = stream ? *stream->device : current();
    const Running what = {call, where, device.id};
    auto copy = [=] { memcpy(real(to), real(from), bytes); };
    if (!stream && to_device != from_device)
        return between_devices(*machine().devices[to_device], *machine().devices[from_device],
                               false, what, copy);
    submit(stream, device, what, copy);
    if (!machine().peers && to_device != from_device && !(stream && stream->capture))
        return synchronize(stream ? stream : device.default_stream);
    return cudaSuccess;
}
cudaError_t cudaMemcpyPeer(void *to, int to_device, const void *from, int from_device, size_t bytes,
                           Where where) {
    if (bytes == 0) return cudaSuccess;
    const char *call = "cudaMemcpyPeer";
    if (cudaError_t error = check_capture(where, call)) return error;
    if (cudaError_t error = check_peers(to, to_device, from, from_device, bytes, where, call))
        return error;
    return between_devices(*machine().devices[to_device], *machine().devices[from_device], true,
                           {call, where, to_device}, [=] { memcpy(real(to), real(from), bytes); });
}
