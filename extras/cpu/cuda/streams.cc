// Streams and events: a thread for each stream, and the calls that order them.
#include "streams.h"
#include "checks.h"
#include "queues.h"
#include "workers.h"

#include <unistd.h>

namespace cuda_cpu {

void uncaught() {
    auto end = [](const char *what) {
        if (!running.name)
            give_up("a thread of a device failed: %s: raise ulimit -v, or set CUDA_CPU_CORES=1",
                    what);
        say_alone();
        fail(cudaErrorLaunchFailure, running.where, "%s on device %d: uncaught exception: %s",
             running.name, running.device, what);
        end_program();
    };
    try {
        throw;
    } catch (const std::exception &e) {
        end(e.what());
    } catch (...) {
        end("not a std::exception");
    }
}

std::vector<void (*)()> on_start(void (*added)()) {
    static auto *calls = new std::vector<void (*)()>; // as the machine: never destroyed
    static std::mutex lock; // a kernel may come to a static variable of its own at any time
    Hidden hidden;
    std::lock_guard<std::mutex> guard(lock);
    if (added) calls->push_back(added);
    return *calls;
}

// Put a task at the end of the stream's queue.
void Stream::push(Running running, std::function<void()> run, bool is_mark) {
    if (in_host_function) {
        const Running &host = cuda_cpu::running;
        fail(cudaErrorNotPermitted, host.where,
             "cudaLaunchHostFunc: its function must not call CUDA, which would wait for that "
             "function");
        end_program();
    }
    if (device_of_thread >= 0) {
        const Running &kernel = cuda_cpu::running;
        say_alone();
        fail(cudaErrorNotPermitted, running.where.file ? running.where : kernel.where,
             "%s on device %d launches a kernel, or calls CUDA: the stand-in lacks dynamic "
             "parallelism",
             kernel.name, kernel.device);
        end_program();
    }
    if (running.where.pc) note_callers(running);
    Task *task = new Task{std::move(run), running, is_mark};
    published(task);
    Hidden hidden;
    std::unique_lock<std::mutex> guard(lock);
    if (queue.size() == most) popped.wait(guard, [&] { return queue.size() <= most / 2; });
    queue.push_back(task);
    unfinished++;
    used = true;
    guard.unlock();
    pushed.notify_one();
}

void Stream::work() {
    start_worker();
    for (;;) {
        Task *task;
        {
            Hidden hidden;
            std::unique_lock<std::mutex> guard(lock);
            pushed.wait(guard, [&] { return stopping || !queue.empty(); });
            if (queue.empty()) {
                guard.unlock();
                return stop_worker();
            }
            task = queue.front();
            queue.pop_front();
            if (queue.size() == most / 2) popped.notify_all();
        }
        observed(task);
        running = task->running;
        enter_callers();
        task->run();
        leave_callers();
        running.name = nullptr;
        Hidden hidden;
        const bool is_mark = task->is_mark;
        delete task; // before the stream becomes idle: then its memory may be freed
        if (!is_mark) unfinished--;
    }
}

double seconds_now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

std::shared_ptr<Mark> mark(Stream *stream) {
    Hidden hidden;
    auto mark = std::make_shared<Mark>();
    auto reach = [mark, stream] {
        published(mark.get());
        Hidden hidden;
        stream->unfinished--;
        {
            std::lock_guard<std::mutex> guard(mark->lock);
            mark->reached = true;
            mark->seconds = seconds_now();
        }
        mark->changed.notify_all();
    };
    stream->push({nullptr, {nullptr, 0, nullptr}, stream->device->id}, reach, true);
    return mark;
}
bool is_reached(Mark &mark) {
    bool reached;
    {
        Hidden hidden;
        std::lock_guard<std::mutex> guard(mark.lock);
        reached = mark.reached;
    }
    if (reached) observed(&mark);
    return reached;
}
void wait(Mark &mark) {
    {
        Hidden hidden;
        if (device_of_thread >= 0 && machine().spinning)
            for (double end = seconds_now() + 5e-5; !mark.reached && seconds_now() < end;)
                ;
        std::unique_lock<std::mutex> guard(mark.lock);
        mark.changed.wait(guard, [&] { return mark.reached.load(); });
    }
    observed(&mark);
}
void wait(Stream *stream, std::shared_ptr<Mark> mark) {
    Hidden hidden;
    stream->push({nullptr, {nullptr, 0, nullptr}, stream->device->id}, [mark] { wait(*mark); });
}

Stream *ordered(Stream *stream, Device &device) {
    Hidden hidden;
    if (!stream) stream = device.default_stream;
    if (stream == device.default_stream) {
        for (Stream *other : device.streams)
            if (other != stream && other->blocking && other->used) {
                other->used = false;
                wait(stream, mark(other));
            }
    } else if (stream->default_mark) {
        wait(stream, stream->default_mark);
        stream->default_mark = nullptr;
    }
    return stream;
}
void pushed(Stream *stream) {
    Hidden hidden;
    Device &device = *stream->device;
    if (stream != device.default_stream || device.streams.size() == 1) return;
    auto last = mark(stream);
    for (Stream *other : device.streams)
        if (other != stream && other->blocking) other->default_mark = last;
}
void submit(Stream *stream, Device &device, Running running, std::function<void()> run) {
    const Enqueuing one_at_a_time;
    if (stream && stream->capture) return capture(stream, running, std::move(run));
    stream = ordered(stream, device);
    stream->push(running, std::move(run));
    pushed(stream);
}

cudaError_t check_handle(const void *handle, Where where, const char *call, const char *kind) {
    if (!kind && !handle) return check_default_stream(current(), where, call);
    Hidden hidden;
    std::lock_guard<std::mutex> guard(machine().lock);
    if (machine().handles.count(handle)) return cudaSuccess;
    return fail(cudaErrorInvalidResourceHandle, where,
                "%s: %p is not %s: was it never created, or is it already destroyed?", call, handle,
                kind ? kind : "a stream");
}

bool is_done(const Stream *stream) {
    const bool is_default = stream == stream->device->default_stream;
    for (const Stream *other : stream->device->streams)
        if ((other == stream || (is_default && other->blocking)) && other->unfinished > 0)
            return false;
    return true;
}
cudaError_t synchronize(Stream *stream) {
    const Device &device = *stream->device;
    std::shared_ptr<Mark> last;
    {
        const Enqueuing one_at_a_time;
        Hidden hidden;
        const bool is_default = stream == device.default_stream; // it waits for the others, too
#ifndef CUDA_CPU_TSAN // which must be told even that a stream was done long ago
        if (stream->unfinished == 0 && !is_default) return device.fault;
#endif
        last = mark(is_default ? ordered(stream, *stream->device) : stream);
    }
    wait(*last);
    Hidden hidden;
    last.reset();
    return device.fault;
}
cudaError_t synchronize(Device &device) {
    std::vector<std::shared_ptr<Mark>> last;
    {
        const Enqueuing one_at_a_time;
        Hidden hidden;
        for (Stream *stream : device.streams) {
#ifndef CUDA_CPU_TSAN
            if (stream->unfinished == 0) continue;
#endif
            last.push_back(mark(stream));
        }
    }
    for (auto &mark : last) wait(*mark);
    Hidden hidden;
    last.clear();
    return device.fault;
}
void destroy(Stream *stream) {
    {
        Hidden hidden;
        std::lock_guard<std::mutex> guard(machine().lock);
        machine().handles.erase(stream);
    }
    synchronize(stream);
    auto &streams = stream->device->streams;
    {
        const Enqueuing one_at_a_time;
        Hidden hidden;
        for (size_t i = 0; i < streams.size(); i++)
            if (streams[i] == stream) streams.erase(streams.begin() + i);
    }
    {
        Hidden hidden;
        std::unique_lock<std::mutex> guard(stream->lock);
        stream->stopping = true;
        stream->pushed.notify_all();
        guard.unlock();
        stream->thread.join();
        delete stream;
    }
}

double seconds_of(cudaEvent_t event) { return event->mark->seconds; }

} // namespace cuda_cpu

using namespace cuda_cpu;

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags, Where where) {
    if (!stream) return no_result("cudaStreamCreate", where);
    if (flags > cudaStreamNonBlocking)
        return fail(cudaErrorInvalidValue, where, "cudaStreamCreateWithFlags: invalid flags %u",
                    flags);
    const Enqueuing one_at_a_time;
    Device &device = current();
    *stream = new Stream(&device, flags != cudaStreamNonBlocking);
    // It waits for what the default stream was given before, as the streams that were there do
    if ((*stream)->blocking) (*stream)->default_mark = mark(device.default_stream);
    std::lock_guard<std::mutex> guard(machine().lock);
    device.streams.push_back(*stream);
    machine().handles[*stream] = &current();
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream, Where where) {
    return cudaStreamCreateWithFlags(stream, 0, where);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int, Where where) {
    return cudaStreamCreateWithFlags(stream, flags, where);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream, Where where) {
    if (cudaError_t error = check_handle(stream, where, "cudaStreamSynchronize")) return error;
    if (cudaError_t error = check_capture_of(stream, where, "cudaStreamSynchronize")) return error;
    return synchronize(stream ? stream : current().default_stream);
}
cudaStream_t cuda_cpu::stream_of_thread() {
    static thread_local std::map<int, cudaStream_t> streams;
    cudaStream_t &stream = streams[current_device];
    const Hidden hidden;
    std::unique_lock<std::mutex> guard(machine().lock);
    if (stream && machine().handles.count(stream)) return stream; // unless the device was reset
    guard.unlock();
    cudaStreamCreate(&stream);
    return stream;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream, Where where) {
    if (!stream) return fail(cudaErrorInvalidResourceHandle);
    if (cudaError_t error = check_handle(stream, where, "cudaStreamDestroy")) return error;
    if (cudaError_t error = check_capture_of(stream, where, "cudaStreamDestroy")) return error;
    destroy(stream);
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream, Where where) {
    if (cudaError_t error = check_handle(stream, where, "cudaStreamQuery")) return error;
    if (cudaError_t error = check_capture_of(stream, where, "cudaStreamQuery")) return error;
    if (!stream) stream = current().default_stream;
    const Enqueuing one_at_a_time;
    if (!is_done(stream)) return cudaErrorNotReady;
    return synchronize(stream); // which orders what the host does next
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags, Where where) {
    if (!event) return no_result("cudaEventCreate", where);
    if (flags > (cudaEventBlockingSync | cudaEventDisableTiming))
        return fail(cudaErrorInvalidValue, where, "cudaEventCreateWithFlags: invalid flags %u",
                    flags);
    *event = new cudaEvent{&current(), !(flags & cudaEventDisableTiming), nullptr};
    Hidden hidden;
    std::lock_guard<std::mutex> guard(machine().lock);
    machine().handles[*event] = &current();
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event, unsigned flags, Where where) {
    return cudaEventCreateWithFlags(event, flags, where);
}
cudaError_t cudaEventCreate(cudaEvent_t *event, Where where) {
    return cudaEventCreateWithFlags(event, 0, where);
}
cudaError_t cudaEventDestroy(cudaEvent_t event, Where where) {
    if (cudaError_t error = check_handle(event, where, "cudaEventDestroy", "an event"))
        return error;
    Hidden hidden;
    std::lock_guard<std::mutex> guard(machine().lock);
    machine().handles.erase(event);
    delete event;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream, Where where) {
    const char *call = "cudaEventRecord";
    if (cudaError_t error = check_handle(event, where, call, "an event")) return error;
    if (cudaError_t error = check_handle(stream, where, call)) return error;
    Hidden hidden;
    if (!stream) stream = current().default_stream;
    if (event->device != stream->device)
        return fail(cudaErrorInvalidResourceHandle, where,
                    "cudaEventRecord: the event belongs to device %d, the stream to device %d",
                    event->device->id, stream->device->id);
    const Enqueuing one_at_a_time;
    if (stream->capture) return capture_record(stream, *event), cudaSuccess;
    event->capture = nullptr;
    stream = ordered(stream, *stream->device);
    event->mark = mark(stream);
    pushed(stream);
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags,
                                Where where) {
    const char *call = "cudaStreamWaitEvent";
    if (flags)
        return fail(cudaErrorInvalidValue, where, "%s: flags are %u, but must be 0", call, flags);
    if (cudaError_t error = check_handle(event, where, call, "an event")) return error;
    if (cudaError_t error = check_handle(stream, where, call)) return error;
    const Enqueuing one_at_a_time;
    Hidden hidden;
    if ((stream && stream->capture) || (event->capture && !event->capture->ended))
        return capture_wait(stream ? stream : current().default_stream, *event, where);
    if (!event->mark) return cudaSuccess;
    stream = ordered(stream, stream ? *stream->device : current());
    wait(stream, event->mark);
    pushed(stream);
    return cudaSuccess;
}
// Check an event that the host looks at.
static cudaError_t check_event(cudaEvent_t event, Where where, const char *call) {
    if (cudaError_t error = check_handle(event, where, call, "an event")) return error;
    if (!event->capture) return cudaSuccess;
    return fail(cudaErrorCapturedEvent, where,
                "%s: the event was last recorded in a stream that %s:%d began to capture", call,
                event->capture->where.file, event->capture->where.line);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event, Where where) {
    if (cudaError_t error = check_event(event, where, "cudaEventSynchronize")) return error;
    if (event->mark) wait(*event->mark);
    return event->device->fault;
}
cudaError_t cudaEventQuery(cudaEvent_t event, Where where) {
    if (cudaError_t error = check_event(event, where, "cudaEventQuery")) return error;
    return !event->mark || is_reached(*event->mark) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end,
                                 Where where) {
    if (!milliseconds) return no_result("cudaEventElapsedTime", where);
    for (cudaEvent_t event : {start, end})
        if (cudaError_t error = check_event(event, where, "cudaEventElapsedTime")) return error;
    if (start->device != end->device)
        return fail(cudaErrorInvalidResourceHandle, where,
                    "cudaEventElapsedTime: the start belongs to device %d and the end to device "
                    "%d, but both must be on one device",
                    start->device->id, end->device->id);
    if (!start->timing || !end->timing || !start->mark || !end->mark)
        return fail(cudaErrorInvalidResourceHandle);
    if (!is_reached(*start->mark) || !is_reached(*end->mark)) return cudaErrorNotReady;
    Hidden hidden;
    *milliseconds = (end->mark->seconds - start->mark->seconds) * 1e3;
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t f, void *data, Where where) {
    if (!f) return fail(cudaErrorInvalidValue, where, "cudaLaunchHostFunc: the function is null");
    if (cudaError_t error = check_handle(stream, where, "cudaLaunchHostFunc")) return error;
    Device &device = stream ? *stream->device : current();
    submit(stream, device, {"cudaLaunchHostFunc", where, device.id}, [=] {
        in_host_function = true;
        f(data);
        in_host_function = false;
    });
    return cudaSuccess;
}
