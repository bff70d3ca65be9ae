// Graphs: what a stream is given while it is captured runs when the graph is launched, not before.
#include "tests.h"

static constexpr auto global = cudaStreamCaptureModeGlobal;
static cudaGraphExec_t instantiated(cudaGraph_t graph) {
    cudaGraphExec_t exec = nullptr;
    OK(cudaGraphInstantiate(&exec, graph));
    OK(cudaGraphDestroy(graph));
    return exec;
}
static cudaGraph_t end_of_capture(cudaStream_t stream) {
    cudaGraph_t graph = nullptr;
    OK(cudaStreamEndCapture(stream, &graph));
    return graph;
}

TEST_CASE("cudaGraphLaunch: does what was captured, as often as it is called") {
    auto x = floats_on(0, 4), out = floats_on(0, 4);
    auto fixed = pinned<float>(4);
    Floats source = {1, 2, 3, 4}, target(4, -1);
    int calls = 0;
    TestStream stream, launching(0, cudaStreamDefault);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;
    OK(cudaStreamIsCapturing(stream, &status));
    CHECK(status == cudaStreamCaptureStatusNone);
    OK(cudaStreamBeginCapture(stream, global));
    OK(cudaMemcpyAsync(x.get(), source.data(), 16, up, stream)); // pageable: read at each launch
    plus_kernel<<<1, 4, 0, stream>>>(x.get(), 10);
    OK(cudaMemsetAsync(x.get(), 0, 4, stream));
    OK(cudaMemcpyAsync(out.get(), x.get(), 16, within, stream));
    OK(cudaMemcpyAsync(fixed.get(), out.get(), 16, down, stream));
    OK(cudaMemcpyAsync(target.data(), out.get(), 16, down, stream));
    OK(cudaLaunchHostFunc(
        stream, [](void *calls) { ++*(int *)calls; }, &calls));
    OK(cudaStreamIsCapturing(stream, &status));
    CHECK(status == cudaStreamCaptureStatusActive);
    const cudaGraph_t graph = end_of_capture(stream);
    size_t nodes = 0;
    OK(cudaGraphGetNodes(graph, nullptr, &nodes));
    CHECK(nodes == 7);
    const cudaGraphExec_t exec = instantiated(graph);
    OK(cudaStreamSynchronize(stream));
    CHECK(target == Floats(4, -1));
    CHECK(calls == 0);
    for (cudaStream_t on : {stream.stream, launching.stream, cudaStream_t()}) {
        OK(cudaGraphLaunch(exec, on));
        OK(cudaStreamSynchronize(on));
        const Floats want = {0, source[1] + 10, source[2] + 10, source[3] + 10};
        CHECK(target == want);
        CHECK(Floats(fixed.get(), fixed.get() + 4) == want);
        for (float &number : source) number++;
    }
    CHECK(calls == 3);
    fixed.reset(); // the graph does not keep it
    OK(cudaGetLastError());
    OK(cudaGraphExecDestroy(exec));
    OK_LAUNCH(plus_kernel<<<1, 4, 0, stream>>>(x.get(), 1)); // no longer captured
    CHECK(fetch(x, 4)[0] == 1);
}

TEST_CASE("cudaStreamBeginCapture: streams that events order join it, graphs may hold graphs") {
    auto x = device_copy(Floats{1});
    TestStream a, b, c;
    TestEvent fork, middle, join;
    OK(cudaStreamBeginCapture(a, global));
    plus_kernel<<<1, 1, 0, a>>>(x.get(), 1);
    OK(cudaEventRecord(fork, a));
    OK(cudaStreamWaitEvent(b, fork));
    plus_kernel<<<1, 1, 0, b>>>(x.get(), 2);
    OK(cudaEventRecord(middle, b));
    OK(cudaStreamWaitEvent(c, middle));
    assign_kernel<<<1, 1, 0, c>>>(x.get(), 5);
    OK(cudaEventRecord(join, c));
    OK(cudaStreamWaitEvent(a, join));
    plus_kernel<<<1, 1, 0, a>>>(x.get(), 3);
    const cudaGraphExec_t inner = instantiated(end_of_capture(a));
    OK(cudaStreamBeginCapture(b, global));
    OK(cudaGraphLaunch(inner, b));
    plus_kernel<<<1, 1, 0, b>>>(x.get(), 7);
    const cudaGraphExec_t outer = instantiated(end_of_capture(b));
    CHECK(values(x) == "1");
    OK(cudaGraphLaunch(outer, c));
    OK(cudaStreamSynchronize(c));
    CHECK(values(x) == "15");
    OK(cudaEventRecord(fork, a)); // an event as before
    OK(cudaEventSynchronize(fork));
    OK(cudaGraphExecDestroy(inner));
    OK(cudaGraphExecDestroy(outer));
}

// A mistake in the capture of a stream, and what the end of the capture says
template <class F> static void check_spoilt(F mistake, unsigned flags = cudaStreamNonBlocking) {
    TestStream stream(0, flags);
    cudaGraph_t graph = nullptr;
    OK(cudaStreamBeginCapture(stream, global));
    mistake(stream.stream);
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureInvalidated);
    CHECK(graph == nullptr);
    cudaGetLastError();
}
TEST_CASE("cudaStreamBeginCapture: what CUDA does not allow meanwhile is refused") {
    const auto unsupported = cudaErrorStreamCaptureUnsupported, state = cudaErrorIllegalState;
    auto x = floats_on(0, 1);
    float *p = nullptr, host = 0;
    TestStream other;
    TestEvent event, outside;
    OK(cudaEventRecord(outside, other));
    const std::string captured = " a stream is captured, whose capture " __FILE__ ":";
    check_spoilt([&](cudaStream_t) {
        REFUSED(unsupported, cudaMalloc(&p, 4), "cudaMalloc: is not allowed while" + captured);
        REFUSED(unsupported, cudaMemcpy(&host, x.get(), 4, down), "cudaMemcpy: is not allowed w");
        REFUSED(unsupported, cudaDeviceSynchronize(), "cudaDeviceSynchronize: is not allowed w");
    });
    check_spoilt([&](cudaStream_t stream) {
        REFUSED(unsupported, cudaStreamSynchronize(stream),
                "cudaStreamSynchronize: is not possible on a stream, whose capture " __FILE__ ":");
    });
    check_spoilt([&](cudaStream_t stream) {
        REFUSED(cudaErrorStreamCaptureIsolation, cudaStreamWaitEvent(stream, outside),
                "the event was not captured with the stream, whose");
    });
    auto by_default = [&](cudaStream_t) {
        const auto code = cudaErrorStreamCaptureImplicit;
        REFUSED_LAUNCH(code, assign_kernel<<<1, 1>>>(x.get(), 1),
                       "assign_kernel: the default stream would wait for a stream, whose capture");
    };
    check_spoilt(by_default, cudaStreamDefault);
    cudaGraph_t graph = nullptr;
    {
        TestStream stream;
        OK(cudaStreamBeginCapture(stream, global));
        OK(cudaEventRecord(event, stream));
        OK(cudaStreamWaitEvent(other, event));
        assign_kernel<<<1, 1, 0, other>>>(x.get(), 1);
        REFUSED(cudaErrorCapturedEvent, cudaEventSynchronize(event), "last recorded in a stream");
        REFUSED(cudaErrorStreamCaptureUnmatched, cudaStreamEndCapture(other, &graph), "has joined");
        CHECK(cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureInvalidated);
        OK(cudaStreamBeginCapture(stream, global));
        OK(cudaEventRecord(event, stream));
        OK(cudaStreamWaitEvent(other, event));
        REFUSED(cudaErrorStreamCaptureUnjoined, cudaStreamEndCapture(stream, &graph),
                "no event joins the work of another stream to the stream, whose capture");
        CHECK(graph == nullptr);
        OK(cudaStreamSynchronize(other)); // captured no more
    }
    REFUSED(state, cudaStreamEndCapture(other, &graph), "the stream is not being captured");
    REFUSED(unsupported, cudaStreamBeginCapture(nullptr, global), "default stream cannot be capt");
    OK(cudaStreamBeginCapture(other, cudaStreamCaptureModeRelaxed));
    REFUSED(state, cudaStreamBeginCapture(other, global), "has begun already");
    CHECK(cudaMalloc(&p, 4) == cudaSuccess);
    graph = end_of_capture(other);
    OK(cudaFree(p));
    const cudaGraphExec_t exec = instantiated(graph);
    REFUSED(cudaErrorInvalidResourceHandle, cudaGraphDestroy(graph), "is not a graph: was it");
    OnDevice current(1);
    REFUSED(value, cudaGraphLaunch(exec, nullptr), "captured on device 0, the stream is of dev");
    OK(cudaGraphExecDestroy(exec));
}
