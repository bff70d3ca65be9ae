// Watches what mgpu.cu asks of CUDA. Included before it, this header puts functions of its own in
// place of the runtime's that enqueue something, on a GPU and on the stand-in alike. They do what
// was asked and, while a Recorder lives, write it down: copies, messages, kernels, calls of host
// functions, and the waits between streams, by which one follows another.
// defines: LAUNCH, watch::Recorder, watch::Sum, watch::tape_length, watch::touch,
// watch::show_devices, watch::late_messages, watch::taken_bytes
//
// A GPU can stand for several devices (show_devices), and a message can be late (late_messages).
// mgpu.cu knows of nothing here.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <unistd.h>

#ifdef CUDA_CPU // whose errors name the line of a call
#define WATCH_WHERE , CUDA_CPU_WHERE
#define WATCH_THERE , where
#else
#define WATCH_WHERE
#define WATCH_THERE
#endif

namespace watch {

// --- devices and streams

inline bool late_messages = false;      // each waits a millisecond
inline bool no_waits = false;           // of streams for events: what a missing one looks like
inline void (*on_record)() = nullptr;   // called with each operation that is written down,
inline void (*on_enqueued)() = nullptr; // and when it is enqueued
inline void (*on_memory)(const void *, size_t bytes) = nullptr; // of a device; 0 bytes: it is freed
inline int shown = 0;   // devices that mgpu.cu is to see; 0: as many as there are
inline int current = 0; // of them

inline int real_count() {
    static int count = 0;
    if (count == 0) cudaGetDeviceCount(&count);
    return count;
}
inline int real(int device) {
    return shown > 0 && real_count() > 0 ? device % real_count() : device;
}
// mgpu.cu sees k devices, of which several may be one GPU: a device's number then tells it from all
// others, as on the stand-in.
inline void show_devices(int k) { shown = k; }

struct Lane { // what is known of a stream
    ::cudaStream_t handle;
    int device;
    int number = -1, last = -1; // in a recording; its last operation
    int waited = -1;            // that operation, when the host last waited for it
    size_t known = 0;           // so many of the host's waits it comes after
};
inline std::deque<Lane> lanes; // of all streams that ever were
// What mgpu.cu has for a cudaStream_t. It becomes one again where it configures a launch, which
// tells the launch its stream.
struct StreamHandle {
    Lane *lane = nullptr;
    StreamHandle(std::nullptr_t = nullptr) {}
    explicit StreamHandle(Lane *lane) : lane(lane) {}
    operator ::cudaStream_t() const;
    ::cudaStream_t handle() const { return lane ? lane->handle : nullptr; }
    friend bool operator<(StreamHandle a, StreamHandle b) { return a.handle() < b.handle(); }
};

// --- the recorder

struct Read {
    int src;
    double bytes;
    const void *from;
};
struct Op {
    const char *kind, *name; // kind: input, forward, backward, sum, message, update; or wait
    int device, lane;        // lane: the stream's number
    int src, dst;            // of a message, -1: the host; of others -2
    int after;               // of a wait: the operation that it is for; -1: none that is recorded
    int steps;               // the longest chain of messages, or reads, that ends here
    double bytes;            // of a copy; of the tensors that a kernel names, each once
    double begin, end;       // seconds
    const void *from, *to;   // of a copy
    std::vector<Read> reads = {}; // of a kernel, of other devices' memory
    bool works() const { return strcmp(kind, "wait") != 0; }
};
inline Op operation(const char *kind, const char *name, double bytes) {
    return {kind, name, 0, 0, -2, -2, -1, 0, bytes, 0, 0, nullptr, nullptr, {}};
}
inline Op message(int src, int dst, double bytes, const void *from, const void *to) {
    return {"message", "message", 0, 0, src, dst, -1, 0, bytes, 0, 0, from, to, {}};
}

// What is enqueued on a device is a part of a step: of the sum of gradients while a Sum lives, else
// of backward when autograd's tape has become shorter. A kernel of sgd is one of the update.
inline bool summing = false;
inline size_t (*tape_length)(int device) = nullptr; // null: nothing is known of a tape
inline std::map<int, size_t> longest_tape;          // of each device, in this step
struct Sum {
    const bool outer = std::exchange(summing, true);
    Sum() { longest_tape.clear(); } // the next step's forward pass comes next
    Sum(const Sum &) = delete;
    ~Sum() { summing = outer; }
};
inline const char *part(int device, const char *kernel = "") {
    if (summing) return "sum";
    if (strstr(kernel, "sgd")) return "update";
    const size_t length = tape_length ? tape_length(device) : 0;
    size_t &longest = longest_tape[device];
    longest = std::max(longest, length);
    return length < longest ? "backward" : "forward";
}

inline void check(cudaError_t code, const char *what) {
    if (code == cudaSuccess) return;
    fprintf(stderr, "watch: %s: %s\n", what, cudaGetErrorString(code));
    _exit(1);
}
// The bits of a number, by which NaN is like itself, and 0 unlike -0
inline uint32_t bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}
inline void wait_for_all(bool recorded = false) { // or for the streams that a recording has seen
    for (const Lane &lane : lanes)
        if (!recorded || lane.number >= 0) check(cudaStreamSynchronize(lane.handle), "waiting");
}
inline cudaEvent_t new_mark(const Lane &lane) {
    cudaEvent_t mark = nullptr;
    int before = 0;
    check(cudaGetDevice(&before), "cudaGetDevice");
    check(cudaSetDevice(real(lane.device)), "cudaSetDevice");
    check(cudaEventCreate(&mark), "cudaEventCreate");
    check(cudaEventRecord(mark, lane.handle), "cudaEventRecord");
    check(cudaSetDevice(before), "cudaSetDevice");
    return mark;
}

struct Recorder;
inline Recorder *recorder = nullptr;
struct Recorder { // works as long as it lives
    bool timed;   // with an event before and one behind each operation
    std::deque<Op> ops = {};
    std::vector<cudaEvent_t> marks = {};                       // these events
    std::map<int, std::pair<cudaEvent_t, double>> starts = {}; // an event of each device; its time
    std::unordered_map<cudaEvent_t, int> records =
        {};                       // the operation before an event's last record
    int count = 0;                // of the streams that have operations
    std::vector<int> waited = {}; // the operations that the host has waited for, one after another
    size_t needed = 0;            // those before this one are known from the later ones
    int enqueued = 0;             // operations that were there at the host's last wait
    double numbers = 0;           // that the next kernel touches

    explicit Recorder(bool timed) : timed(timed) {
        for (Lane &lane : lanes) lane = {lane.handle, lane.device};
        longest_tape.clear();
        if (timed) start_clocks();
        recorder = this;
    }
    Recorder(const Recorder &) = delete;
    ~Recorder() {
        recorder = nullptr;
        for (cudaEvent_t mark : marks) cudaEventDestroy(mark);
        for (auto &start : starts) cudaEventDestroy(start.second.first);
    }
    void start_clocks() {
        wait_for_all();
        for (const Lane &lane : lanes) {
            if (starts.count(lane.device)) continue;
            const double before = now();
            const cudaEvent_t mark = new_mark(lane);
            check(cudaEventSynchronize(mark), "waiting");
            double seconds = (before + now()) / 2; // by the host: two GPUs have no other clock
#ifdef CUDA_CPU
            seconds = cuda_cpu::seconds_of(mark); // by the host's clock
#endif
            float ms = 0;
            for (const auto &[device, start] : starts) // of devices that share a GPU
                if (real(device) == real(lane.device) &&
                    cudaEventElapsedTime(&ms, start.first, mark) == cudaSuccess)
                    seconds = start.second + ms / 1e3;
            starts[lane.device] = {mark, seconds};
        }
    }
    int add(Op op, Lane &lane, cudaEvent_t begin = nullptr) {
        wait_as_the_host(lane);
        const int i = ops.size();
        if (lane.number < 0) lane.number = count++;
        op.device = lane.device;
        op.lane = lane.number;
        for (int before : {lane.last, op.after})
            if (before >= 0) op.steps = std::max(op.steps, ops[before].steps);
        op.steps += op.src != -2 || !op.reads.empty();
        lane.last = i;
        numbers = 0;
        ops.push_back(op);
        if (on_record) on_record();
        if (timed) {
            marks.push_back(begin ? begin : new_mark(lane));
            marks.push_back(new_mark(lane)); // end() records it again
        }
        return i;
    }
    void end(int i, const Lane &lane) {
        if (timed) check(cudaEventRecord(marks[2 * i + 1], lane.handle), "cudaEventRecord");
        if (on_enqueued) on_enqueued();
    }
    void host_waits(Lane *lane) {
        if (!lane || lane->last <= std::exchange(lane->waited, lane->last)) return;
        if (lane->last >= enqueued) needed = waited.size(); // it came after the waits before this
        waited.push_back(lane->last);
        enqueued = ops.size();
    }
    // What the host enqueues comes after what it has waited for, as if the stream waited for that.
    void wait_as_the_host(Lane &lane) {
        for (size_t i = std::max(lane.known, needed); i < waited.size(); i++) {
            lane.known = waited.size();
            if (waited[i] == lane.last) continue;
            Op wait = operation("wait", "host", 0);
            wait.after = waited[i];
            end(add(wait, lane), lane);
        }
    }
    void read_times() {
        std::vector<double> until(count); // rounding aside, a lane's operations follow each other
        wait_for_all();
        for (size_t i = 0; i < marks.size(); i++) {
            Op &op = ops[i / 2];
            float ms = 0;
            const auto &[start, seconds] = starts[op.device];
            check(cudaEventElapsedTime(&ms, start, marks[i]), "cudaEventElapsedTime");
            const double at = seconds - starts.begin()->second.second + ms / 1e3;
            until[op.lane] = std::max(until[op.lane], at);
            (i % 2 ? op.end : op.begin) = until[op.lane];
        }
    }
};
// Write it down, and do it
template <class Call> cudaError_t enqueue(const Op &op, StreamHandle stream, Call call) {
    if (!recorder || !stream.lane) return call();
    const int i = recorder->add(op, *stream.lane);
    const cudaError_t code = call();
    recorder->end(i, *stream.lane);
    return code;
}
// What is enqueued later on the stream is late
inline void pause(StreamHandle stream, intptr_t ms) {
    auto sleep = [](void *ms) { usleep(1000 * (intptr_t)ms); };
    check(cudaLaunchHostFunc(stream.handle(), sleep, (void *)ms), "cudaLaunchHostFunc");
}

// --- launches

// relu_kernel, from the text of a launch: relu_kernel<<<..., or what to_cpp.sed makes of it
inline std::string kernel_name(std::string text) {
    const size_t quote = text.find('"');
    if (quote < text.find('<')) text = text.substr(quote + 1);
    text = text.substr(0, text.find_first_of("<\""));
    text = text.substr(text.rfind(':') + 1); // without its namespace
    return text.substr(0, text.find_last_not_of(' ') + 1);
}

struct Launch;
inline Launch *innermost = nullptr;
struct Launch { // lives while LAUNCH evaluates one; what that sends off first is inside of it
    const char *text;
    Launch *outer = nullptr;
    Lane *lane = nullptr;
    std::vector<Read> reads = {};
    cudaEvent_t begin = nullptr;
    explicit Launch(const char *text) : text(text) {
        if (recorder) outer = std::exchange(innermost, this);
    }
    Launch(const Launch &) = delete;
    void on(Lane *stream) {
        lane = stream;
        if (recorder && recorder->timed && !begin) begin = new_mark(*lane);
    }
    ~Launch() {
        if (!recorder) return;
        innermost = outer;
        if (!lane) return;
        const double bytes = sizeof(float) * recorder->numbers;
        Op op = operation(part(lane->device, text), text, bytes);
        for (const Read &r : reads)
            if (r.src != lane->device && r.bytes > 0) op.reads.push_back(r);
        recorder->end(recorder->add(op, *lane, begin), *lane);
        for (Launch *l = outer; l; l = l->outer) // it begins only now
            if (l->begin) check(cudaEventRecord(l->begin, l->lane->handle), "cudaEventRecord");
    }
};
inline StreamHandle::operator ::cudaStream_t() const {
    if (innermost && lane) innermost->on(lane);
    return handle();
}

// --- in place of the runtime's functions

inline cudaError_t get_device_count(int *count) {
    const cudaError_t code = cudaGetDeviceCount(count);
    if (code == cudaSuccess && shown > 0) *count = shown;
    return code;
}
inline cudaError_t set_device(int device WATCH_WHERE) {
    current = device;
    return cudaSetDevice(real(device) WATCH_THERE);
}
inline cudaError_t get_properties(cudaDeviceProp *properties, int device) {
    return cudaGetDeviceProperties(properties, real(device));
}
inline cudaError_t get_attribute(int *value, cudaDeviceAttr attribute, int device) {
    return cudaDeviceGetAttribute(value, attribute, real(device));
}
inline cudaError_t can_access_peer(int *can, int device, int peer) {
    if (real(device) != real(peer)) return cudaDeviceCanAccessPeer(can, real(device), real(peer));
    *can = 1;
    return cudaSuccess;
}
inline cudaError_t enable_peer_access(int peer, unsigned flags) {
    if (real(peer) == real(current)) return cudaSuccess;
    return cudaDeviceEnablePeerAccess(real(peer), flags);
}
inline cudaError_t create_stream(StreamHandle *stream, unsigned flags) {
    ::cudaStream_t handle = nullptr;
    if (cudaError_t code = cudaStreamCreateWithFlags(&handle, flags)) return code;
    lanes.push_back({handle, current});
    *stream = StreamHandle(&lanes.back());
    return cudaSuccess;
}
// The records of events are known by the waits for them.
inline cudaError_t record_event(cudaEvent_t event, StreamHandle stream WATCH_WHERE) {
    if (recorder && stream.lane) recorder->records[event] = stream.lane->last;
    return cudaEventRecord(event, stream.handle() WATCH_THERE);
}
inline cudaError_t wait_event(StreamHandle stream, cudaEvent_t event, unsigned flags WATCH_WHERE) {
    Op wait = operation("wait", "wait", 0);
    if (no_waits) return cudaSuccess;
    if (recorder)
        if (auto found = recorder->records.find(event); found != recorder->records.end())
            wait.after = found->second;
    return enqueue(wait, stream,
                   [&] { return cudaStreamWaitEvent(stream.handle(), event, flags WATCH_THERE); });
}
inline cudaError_t synchronize_stream(StreamHandle stream WATCH_WHERE) {
    if (recorder) recorder->host_waits(stream.lane);
    return cudaStreamSynchronize(stream.handle() WATCH_THERE);
}
inline cudaError_t copy_to_peer(void *to, int dst, const void *from, int src, size_t bytes,
                                StreamHandle stream WATCH_WHERE) {
    if (late_messages) pause(stream, 1);
    return enqueue(message(src, dst, bytes, from, to), stream, [&] {
        return cudaMemcpyPeerAsync(to, real(dst), from, real(src), bytes,
                                   stream.handle() WATCH_THERE);
    });
}
// It comes after all that both devices have been given, and before all that they get later.
inline cudaError_t copy_to_peer_now(void *to, int dst, const void *from, int src,
                                    size_t bytes WATCH_WHERE) {
    Lane *carrier = nullptr;
    for (Lane &lane : lanes) {
        if (lane.device != dst && lane.device != src) continue;
        if (recorder) recorder->host_waits(&lane);
        if (lane.device == dst && !carrier) carrier = &lane;
    }
    auto call = [&] { return cudaMemcpyPeer(to, real(dst), from, real(src), bytes WATCH_THERE); };
    const cudaError_t code =
        enqueue(message(src, dst, bytes, from, to), StreamHandle(carrier), call);
    if (recorder) recorder->host_waits(carrier);
    return code;
}
struct Memory {
    int device;
    size_t bytes;
};
inline std::map<const void *, Memory> allocations; // of the devices
inline bool is_on_device(const void *p) {
    auto after = allocations.upper_bound(p);
    return after != allocations.begin() &&
           (const char *)p < (const char *)std::prev(after)->first + std::prev(after)->second.bytes;
}
// While gradients are summed a copy to or from the host is a message.
inline cudaError_t copy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                        StreamHandle stream WATCH_WHERE) {
    const bool known = kind != cudaMemcpyDefault;
    const bool in = known ? kind == cudaMemcpyHostToDevice : !is_on_device(from);
    const bool out = known ? kind == cudaMemcpyDeviceToHost : !is_on_device(to);
    const bool exchanged = summing && (in || out);
    if (exchanged && late_messages) pause(stream, 1);
    const int device = stream.lane ? stream.lane->device : current;
    Op op = exchanged ? message(in ? -1 : device, in ? device : -1, bytes, from, to)
                      : operation(in ? "input" : part(device), in ? "copy in" : "copy", bytes);
    op.from = from, op.to = to;
    return enqueue(op, stream, [&] {
        return cudaMemcpyAsync(to, from, bytes, kind, stream.handle() WATCH_THERE);
    });
}
inline cudaError_t launch_host(StreamHandle stream, void (*f)(void *), void *data WATCH_WHERE) {
    const double bytes = recorder ? sizeof(float) * recorder->numbers : 0;
    const int device = stream.lane ? stream.lane->device : current;
    return enqueue(operation(part(device), "host function", bytes), stream,
                   [&] { return cudaLaunchHostFunc(stream.handle(), f, data WATCH_THERE); });
}
inline size_t taken_bytes = 0; // of the devices' memory, by all calls so far
template <class T> cudaError_t allocate(T **pointer, size_t n WATCH_WHERE) {
    taken_bytes += n;
    const cudaError_t code = cudaMalloc((void **)pointer, n WATCH_THERE);
    if (code == cudaSuccess) allocations[*pointer] = {current, n};
    if (code == cudaSuccess && on_memory) on_memory(*pointer, n);
    return code;
}
inline cudaError_t free(void *pointer WATCH_WHERE) {
    allocations.erase(pointer);
    if (on_memory) on_memory(pointer, 0);
    return cudaFree(pointer WATCH_THERE);
}
inline cudaError_t free_on_host(void *pointer WATCH_WHERE) {
    if (on_memory) on_memory(pointer, 0);
    return cudaFreeHost(pointer WATCH_THERE);
}
// A gradient is complete when what its stream was given before has run: a row says so.
inline void gradient_is_complete(StreamHandle stream) {
    if (!recorder || !stream.lane) return;
    recorder->end(recorder->add(operation("wait", "gradient", 0), *stream.lane), *stream.lane);
}

// The kernel that is being launched reads this, which is memory of device src.
inline void read_by_kernel(int src, double bytes, const void *from) {
    if (innermost) innermost->reads.push_back({src, bytes, from});
}
// The next kernel uses so many numbers.
inline void touch(long numbers) {
    if (recorder) recorder->numbers += numbers;
}

} // namespace watch

#define LAUNCH(...)                                                                                \
    do {                                                                                           \
        const watch::Launch watched(#__VA_ARGS__);                                                 \
        __VA_ARGS__;                                                                               \
        check_launch(__FILE__, __LINE__);                                                          \
    } while (0)

#ifdef CUDA_CPU // where they are macros
#undef cudaGetDeviceCount
#undef cudaSetDevice
#undef cudaGetDeviceProperties
#undef cudaDeviceGetAttribute
#undef cudaDeviceCanAccessPeer
#undef cudaDeviceEnablePeerAccess
#undef cudaStreamCreateWithFlags
#undef cudaEventRecord
#undef cudaStreamWaitEvent
#undef cudaStreamSynchronize
#undef cudaMemcpyPeerAsync
#undef cudaMemcpyPeer
#undef cudaMemcpyAsync
#undef cudaLaunchHostFunc
#undef cudaMalloc
#undef cudaFree
#undef cudaFreeHost
#endif
#define cudaStream_t watch::StreamHandle
#define cudaGetDeviceCount watch::get_device_count
#define cudaSetDevice watch::set_device
#define cudaGetDeviceProperties watch::get_properties
#define cudaDeviceGetAttribute watch::get_attribute
#define cudaDeviceCanAccessPeer watch::can_access_peer
#define cudaDeviceEnablePeerAccess watch::enable_peer_access
#define cudaStreamCreateWithFlags watch::create_stream
#define cudaEventRecord watch::record_event
#define cudaStreamWaitEvent watch::wait_event
#define cudaStreamSynchronize watch::synchronize_stream
#define cudaMemcpyPeerAsync watch::copy_to_peer
#define cudaMemcpyPeer watch::copy_to_peer_now
#define cudaMemcpyAsync watch::copy
#define cudaLaunchHostFunc watch::launch_host
#define cudaMalloc watch::allocate
#define cudaFree watch::free
#define cudaFreeHost watch::free_on_host
