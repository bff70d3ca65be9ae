// The queues behind streams and events, which all that is enqueued goes through.
//
// A stream is a thread that works off a queue of tasks in order. A mark is a point in a stream that
// others wait for: what an event stands for, once it is recorded.
#pragma once

#include "machine.h"

#include <condition_variable>
#include <deque>
#include <functional>
#include <initializer_list>
#include <thread>

namespace cuda_cpu {

struct Mark {
    std::mutex lock;
    std::condition_variable changed;
    std::atomic<bool> reached{false};
    double seconds = 0; // when it was reached
};

// An operation that was enqueued on a stream and captured in a graph.
struct Operation {
    Running running;
    std::function<void()> run;
};
struct Capture {
    Where where;                   // where it began
    Stream *origin;                // that it began with
    std::vector<Stream *> streams; // that have joined it
    std::vector<Operation> operations;
    int steps = 0; // operations and waits
    bool spoilt = false, ended = false;
};

struct Task {
    std::function<void()> run;
    Running running;
    bool is_mark; // a mark counts as finished before its waiters are told
};

// A function of the program's, or the stand-in itself, has thrown where nobody could catch it.
__attribute__((cold)) void uncaught();

inline __thread int device_of_thread = -1;     // -1: a thread of the program's
inline __thread bool in_host_function = false; // of cudaLaunchHostFunc
// The functions that a device's thread calls first, of which one may be added.
std::vector<void (*)()> on_start(void (*added)() = nullptr);

// All threads of the stand-in begin here.
template <class F> std::thread start_thread(int device, F run) {
    try {
        return std::thread([device, run] {
            try {
                device_of_thread = current_device = device;
                for (auto call : on_start()) call();
                run();
            } catch (...) {
                uncaught();
            }
        });
    } catch (const std::exception &e) {
        give_up("cannot start a thread for device %d: %s: raise ulimit -u and ulimit -v, or set "
                "CUDA_CPU_CORES=1",
                device, e.what());
    }
}

struct Stream {
    // As on a GPU, no more tasks are pending. The host then waits until half of them are done: if
    // each one woke it, it would take a device from its core each time.
    static constexpr size_t most = 1024;
    Device *device;
    bool blocking; // ordered with the default stream
    std::mutex lock;
    std::condition_variable pushed, popped;
    std::deque<Task *> queue;
    bool stopping = false;
    bool used = false;              // since the default stream last waited for this one
    std::atomic<int> unfinished{0}; // tasks
    std::shared_ptr<Mark>
        default_mark;                 // of the default stream, that this stream has yet to wait for
    std::shared_ptr<Capture> capture; // while the stream is captured
    int last_captured = 0, joined = 0; // its last step, and the one that another stream waits for
    std::thread thread;
    Stream(Device *device, bool blocking) : device(device), blocking(blocking) {
        thread = start_thread(device->id, [this] { work(); });
    }
    void push(Running running, std::function<void()> run, bool is_mark = false);
    void work();
};

double seconds_now();

// Mark the end of what the stream has been given so far.
std::shared_ptr<Mark> mark(Stream *stream);
// Whether the mark is reached, which orders what the host does next.
bool is_reached(Mark &mark);
// The calling thread waits for the mark. If devices do not share cores, a stream first looks for it
// for 50 us: to be woken takes as long, and in an allreduce devices wait for each other in turn.
void wait(Mark &mark);
// The stream waits for the mark before it goes on to what it is given later.
void wait(Stream *stream, std::shared_ptr<Mark> mark);

// Held by a host thread while it looks through the streams of devices or enqueues in their order:
// several may use one device.
struct Enqueuing {
    static std::recursive_mutex &lock() {
        static auto *lock = new std::recursive_mutex; // as the machine: never destroyed
        return *lock;
    }
    Enqueuing() {
        Hidden hidden;
        lock().lock();
    }
    ~Enqueuing() {
        Hidden hidden;
        lock().unlock();
    }
};

// The default stream (stream 0, or none given) waits for what the other streams of its device were
// given so far, and they for it: CUDA's "legacy default stream". cudaStreamNonBlocking opts out.
Stream *ordered(Stream *stream, Device &device);
// To be called after a push to the stream that ordered() returned.
void pushed(Stream *stream);
// Enqueue a task on a stream of the device, 0 for its default stream.
void submit(Stream *stream, Device &device, Running running, std::function<void()> run);

// Check a stream that a call is given, or a handle of another kind. There is always a default
// stream, but it cannot be used while it would wait for a stream that is captured.
cudaError_t check_handle(const void *handle, Where where, const char *call,
                         const char *kind = nullptr);
// Whether nothing is left to do of what a stream was given or, if it is the default stream, of what
// it would wait for. To be called with Enqueuing held
bool is_done(const Stream *stream);
// The host waits for a stream, or for a device; returns the device's fault.
cudaError_t synchronize(Stream *stream);
cudaError_t synchronize(Device &device);
// Wait for the stream, and delete it.
void destroy(Stream *stream);

// Check that a call is allowed while streams may be captured: a call such as cudaMalloc, one that
// names a stream to wait for, one that uses the default stream.
cudaError_t check_capture(Where where, const char *call);
cudaError_t check_capture_of(const Stream *stream, Where where, const char *call);
cudaError_t check_default_stream(const Device &device, Where where, const char *call);
// Capture an operation, the recording of an event, or a wait for one, instead of doing it.
void capture(Stream *stream, Running running, std::function<void()> run);
void capture_record(Stream *stream, cudaEvent &event);
cudaError_t capture_wait(Stream *stream, cudaEvent &event, Where where);

} // namespace cuda_cpu

struct cudaEvent {
    cuda_cpu::Device *device;
    bool timing;
    std::shared_ptr<cuda_cpu::Mark> mark;          // null until it is recorded
    std::shared_ptr<cuda_cpu::Capture> capture{};  // in which it was recorded, and after which
    std::pair<cuda_cpu::Stream *, int> captured{}; // step of which stream
};
