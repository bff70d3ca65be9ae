// Graphs: the capture of streams, and the launch of what was captured.
#include "graphs.h"
#include "queues.h"

namespace cuda_cpu {

struct Graph {
    Device *device;
    std::vector<Operation> operations;
};
struct GraphExec : Graph {};

static std::atomic<int> captures{0};                  // that have begun and not ended
static __thread Capture *capture_of_thread = nullptr; // that forbids calls such as cudaMalloc

// Note that a call has spoilt the capture, and fail.
static cudaError_t spoil(Capture &capture, cudaError_t error, Where where, const char *call,
                         const char *why) {
    capture.spoilt = true;
    return fail(error, where, "%s: %s, whose capture %s:%d began", call, why, capture.where.file,
                capture.where.line);
}

cudaError_t check_capture(Where where, const char *call) {
    if (!capture_of_thread) return cudaSuccess;
    return spoil(*capture_of_thread, cudaErrorStreamCaptureUnsupported, where, call,
                 "is not allowed while a stream is captured");
}
cudaError_t check_capture_of(const Stream *stream, Where where, const char *call) {
    if (!stream || !stream->capture) return cudaSuccess;
    return spoil(*stream->capture, cudaErrorStreamCaptureUnsupported, where, call,
                 "is not possible on a stream");
}
cudaError_t check_default_stream(const Device &device, Where where, const char *call) {
    if (captures == 0) return cudaSuccess;
    const Enqueuing one_at_a_time;
    for (const Stream *stream : device.streams)
        if (stream->capture && stream->blocking)
            return spoil(*stream->capture, cudaErrorStreamCaptureImplicit, where, call,
                         "the default stream would wait for a stream");
    return cudaSuccess;
}

void capture(Stream *stream, Running running, std::function<void()> run) {
    Capture &capture = *stream->capture;
    stream->last_captured = ++capture.steps;
    capture.operations.push_back({running, std::move(run)});
}
void capture_record(Stream *stream, cudaEvent &event) {
    event.capture = stream->capture;
    event.captured = {stream, stream->last_captured};
    event.mark = nullptr;
}
cudaError_t capture_wait(Stream *stream, cudaEvent &event, Where where) {
    const char *call = "cudaStreamWaitEvent";
    Capture *const of_event =
        event.capture && !event.capture->ended ? event.capture.get() : nullptr;
    if (!of_event)
        return spoil(*stream->capture, cudaErrorStreamCaptureIsolation, where, call,
                     "the event was not captured with the stream");
    if (stream == stream->device->default_stream)
        return spoil(*of_event, cudaErrorStreamCaptureUnsupported, where, call,
                     "the default stream cannot join a stream");
    if (stream->capture && stream->capture != event.capture)
        return spoil(*of_event, cudaErrorStreamCaptureMerge, where, call,
                     "the stream is captured already, and the event belongs to another");
    if (stream->device != of_event->origin->device)
        return spoil(*of_event, cudaErrorStreamCaptureUnsupported, where, call,
                     "the stand-in lacks graphs of several devices: the stream is not on that");
    if (!stream->capture) of_event->streams.push_back(stream);
    stream->capture = event.capture;
    stream->last_captured = ++of_event->steps;
    const auto &[recorded, last] = event.captured;
    if (recorded != stream && recorded->last_captured == last) recorded->joined = last;
    return cudaSuccess;
}

} // namespace cuda_cpu

using namespace cuda_cpu;

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode, Where where) {
    const char *call = "cudaStreamBeginCapture";
    if (!stream)
        return fail(cudaErrorStreamCaptureUnsupported, where,
                    "%s: the default stream cannot be captured: create one", call);
    if (cudaError_t error = check_handle(stream, where, call)) return error;
    if (stream->capture)
        return fail(cudaErrorIllegalState, where, "%s: %s:%d has begun already", call,
                    stream->capture->where.file, stream->capture->where.line);
    const Enqueuing one_at_a_time;
    Hidden hidden;
    stream->capture = std::make_shared<Capture>(Capture{where, stream, {stream}, {}});
    stream->last_captured = stream->joined = 0;
    if (mode != cudaStreamCaptureModeRelaxed) capture_of_thread = stream->capture.get();
    captures++;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph, Where where) {
    const char *call = "cudaStreamEndCapture";
    if (!graph) return no_result(call, where);
    *graph = nullptr;
    if (cudaError_t error = check_handle(stream, where, call)) return error;
    if (!stream || !stream->capture)
        return fail(cudaErrorIllegalState, where, "%s: the stream is not being captured", call);
    const Enqueuing one_at_a_time;
    Hidden hidden;
    const std::shared_ptr<Capture> capture = stream->capture;
    if (stream != capture->origin)
        return spoil(*capture, cudaErrorStreamCaptureUnmatched, where, call,
                     "the stream has joined another one");
    bool unjoined = false;
    for (Stream *other : capture->streams) {
        unjoined = unjoined || (other != stream && other->joined != other->last_captured);
        other->capture = nullptr;
    }
    capture->ended = true;
    captures--;
    if (capture_of_thread == capture.get()) capture_of_thread = nullptr;
    if (capture->spoilt) return fail(cudaErrorStreamCaptureInvalidated);
    if (unjoined)
        return spoil(*capture, cudaErrorStreamCaptureUnjoined, where, call,
                     "no event joins the work of another stream to the stream");
    *graph = new Graph{stream->device, std::move(capture->operations)};
    std::lock_guard<std::mutex> guard(machine().lock);
    machine().handles[*graph] = stream->device;
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status,
                                  Where where) {
    const char *call = "cudaStreamIsCapturing";
    if (!status) return no_result(call, where);
    if (cudaError_t error = check_handle(stream, where, call)) return error;
    *status = !stream || !stream->capture ? cudaStreamCaptureStatusNone
              : stream->capture->spoilt   ? cudaStreamCaptureStatusInvalidated
                                          : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long,
                                 Where where) {
    const char *call = "cudaGraphInstantiate";
    if (!exec) return no_result(call, where);
    *exec = nullptr;
    if (cudaError_t error = check_handle(graph, where, call, "a graph")) return error;
    Hidden hidden;
    *exec = new GraphExec{*graph};
    std::lock_guard<std::mutex> guard(machine().lock);
    machine().handles[*exec] = graph->device;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, cudaGraphNode_t *,
                                 char *, size_t, Where where) {
    return cudaGraphInstantiate(exec, graph, 0, where);
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph,
                                          unsigned long long flags, Where where) {
    return cudaGraphInstantiate(exec, graph, flags, where);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream, Where where) {
    const char *call = "cudaGraphLaunch";
    if (cudaError_t error = check_handle(exec, where, call, "an instantiated graph")) return error;
    if (cudaError_t error = check_handle(stream, where, call)) return error;
    Device &device = stream ? *stream->device : current();
    if (exec->device != &device)
        return fail(cudaErrorInvalidValue, where,
                    "%s: the graph was captured on device %d, the stream is of device %d: the "
                    "stand-in lacks that",
                    call, exec->device->id, device.id);
    const Enqueuing one_at_a_time;
    for (const Operation &operation : exec->operations)
        submit(stream, device, operation.running, operation.run);
    return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count,
                              Where where) {
    const char *call = "cudaGraphGetNodes";
    if (!count) return no_result(call, where);
    if (cudaError_t error = check_handle(graph, where, call, "a graph")) return error;
    if (nodes)
        return fail(cudaErrorInvalidValue, where,
                    "%s: the stand-in knows only how many nodes there are", call);
    *count = graph->operations.size();
    return cudaSuccess;
}
template <class T>
static cudaError_t destroy_graph(T *graph, Where where, const char *call, const char *kind) {
    if (cudaError_t error = check_handle(graph, where, call, kind)) return error;
    Hidden hidden;
    std::lock_guard<std::mutex> guard(machine().lock);
    machine().handles.erase(graph);
    delete graph;
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph, Where where) {
    return destroy_graph(graph, where, "cudaGraphDestroy", "a graph");
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec, Where where) {
    return destroy_graph(exec, where, "cudaGraphExecDestroy", "an instantiated graph");
}
