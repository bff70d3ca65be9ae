// Streams and events: work of different streams runs at the same time, except where CUDA makes it
// wait.
#include "tests.h"

TEST_CASE("stream: keeps its order") {
    const int n = small_only ? 1100 : 3000; // more than a queue holds: the host waits for room
    auto x = floats_on(0, 1), y = floats_on(0, 1);
    TestStream stream;
    assign_kernel<<<1, 1, 0, stream>>>(x.get(), 0);
    for (int i = 0; i < n; i++) {
        plus_kernel<<<1, 1, 0, stream>>>(x.get(), 1);
        OK(cudaMemcpyAsync(y.get(), x.get(), one_float, within, stream));
        std::swap(x, y);
    }
    OK(cudaStreamSynchronize(stream));
    CHECK(values(x, y) == std::to_string(n) + " " + std::to_string(n));
}

TEST_CASE("cudaLaunchHostFunc: runs in the stream's order, while the host goes on") {
    auto x = floats_on(0, 1);
    auto host = pinned<float>(2);
    TestStream stream;
    Hold hold(stream, x.get());
    OK(cudaMemcpyAsync(&host.get()[0], x.get(), one_float, down, stream));
    auto add_2 = [](void *p) { ((float *)p)[1] = ((float *)p)[0] + 2; };
    OK(cudaLaunchHostFunc(stream, add_2, host.get()));
    OK(cudaMemcpyAsync(x.get(), &host.get()[1], one_float, up, stream));
    hold.release_and_wait_for(stream);
    CHECK(values(x) == "7");
}

__global__ void meet_kernel(int *mine, const int *other, float *x) {
    __atomic_store_n(mine, 1, __ATOMIC_RELAXED);
    hold_kernel(other, x, 1);
}
TEST_CASE("stream: the host, streams and devices run at the same time") {
    auto x = floats_on(0, 1), y = floats_on(0, 1), z = floats_on(1, 1), w = floats_on(1, 1);
    TestStream a, b, c(1);
    TestEvent held;
    Hold hold(a, x.get());
    OK(cudaEventRecord(held, a));
    // A copy beside a kernel on one device, and work on another device
    OK(cudaMemsetAsync(y.get(), 0, one_float, b));
    OK(cudaStreamSynchronize(b));
    OnDevice{1}, assign_kernel<<<1, 1, 0, c>>>(z.get(), 7);
    OK(cudaStreamSynchronize(c));
    CHECK(cudaEventQuery(held) == cudaErrorNotReady);
    hold.release_and_wait_for(a);
    OK(cudaEventQuery(held));
    CHECK(values(x, y, z) == "5 0 7");
    // Kernels of two devices that each wait for the other to have begun
    auto flags = pinned<int>(2);
    meet_kernel<<<1, 1, 0, a>>>(&flags.get()[0], &flags.get()[1], y.get());
    OnDevice{1}, meet_kernel<<<1, 1, 0, c>>>(&flags.get()[1], &flags.get()[0], w.get());
    OK(cudaStreamSynchronize(c));
    OK(cudaStreamSynchronize(a));
    CHECK(values(y, w) == "1 1");
}

TEST_CASE("cudaStreamWaitEvent: events order streams and devices") {
    auto x = floats_on(0, 1), y = floats_on(0, 1), z = floats_on(1, 1);
    TestStream a, b, c(1);
    TestEvent ready_a, ready_b, ready_c(1);
    Hold hold(a, x.get());
    OK(cudaEventRecord(ready_a, a));
    OK(cudaStreamWaitEvent(b, ready_a));
    OK(cudaMemcpyAsync(y.get(), x.get(), one_float, within, b));
    OK(cudaEventRecord(ready_b, b));
    OK(cudaStreamWaitEvent(c, ready_a, 0));
    OK(cudaMemcpyPeerAsync(z.get(), 1, x.get(), 0, one_float, c));
    OK(cudaEventRecord(ready_c, c));
    OK(cudaStreamWaitEvent(a, ready_b));
    OK(cudaStreamWaitEvent(a, ready_c));
    assign_kernel<<<1, 1, 0, a>>>(x.get(), 6); // after both copies
    hold.release_later();
    OK(cudaEventSynchronize(ready_c));
    OK(cudaStreamSynchronize(a));
    OK(cudaStreamSynchronize(b));
    CHECK(values(x, y, z) == "6 5 5");
}

TEST_CASE("cudaEventRecord: an event stands for its last record before the wait") {
    auto x = floats_on(0, 1), y = floats_on(0, 1);
    TestStream a, b;
    TestEvent event;
    OK(cudaEventQuery(event)); // one that was never recorded holds nobody up
    OK(cudaEventSynchronize(event));
    OK(cudaStreamWaitEvent(b, event));
    OK(cudaStreamSynchronize(b));
    OK(cudaEventRecord(event, a));
    OK(cudaStreamWaitEvent(b, event));
    Hold hold(a, x.get(), 1);
    OK(cudaEventRecord(event, a)); // the wait above is for the earlier record
    OK(cudaMemsetAsync(y.get(), 0, one_float, b));
    OK(cudaStreamSynchronize(b));
    CHECK(cudaEventQuery(event) == cudaErrorNotReady);
    hold.release_later();
    OK(cudaEventSynchronize(event));
    OK(cudaEventQuery(event));
    CHECK(values(x) == "1");
}

TEST_CASE("cudaEventElapsedTime: milliseconds, or why there are none") {
    auto x = floats_on(0, 1);
    TestStream a;
    TestEvent begin, end, untimed(0, cudaEventDisableTiming);
    float milliseconds = -1;
    CHECK(cudaEventElapsedTime(&milliseconds, begin, end) == cudaErrorInvalidResourceHandle);
    CHECK(cudaGetLastError() == cudaErrorInvalidResourceHandle);
    OK(cudaEventRecord(begin, a));
    Hold hold(a, x.get(), 1);
    OK(cudaEventRecord(end, a));
    OK(cudaEventRecord(untimed, a));
    OK(cudaEventSynchronize(begin));
    CHECK(cudaEventElapsedTime(&milliseconds, begin, end) == cudaErrorNotReady);
    hold.release_later(); // at least 20 ms after `begin` was reached
    OK(cudaEventSynchronize(end));
    OK(cudaEventElapsedTime(&milliseconds, begin, end));
    CHECK(milliseconds >= 20);
    CHECK(milliseconds < 10000);
    CHECK(cudaEventElapsedTime(&milliseconds, begin, untimed) == cudaErrorInvalidResourceHandle);
    CHECK(cudaGetLastError() == cudaErrorInvalidResourceHandle);
}

TEST_CASE("stream: the default stream and the others wait for each other") {
    TestStream blocking(0, cudaStreamDefault), free(0, cudaStreamNonBlocking);
    for (bool default_first : {false, true}) {
        CAPTURE(default_first);
        auto x = floats_on(0, 1), y = floats_on(0, 1), z = floats_on(0, 1);
        const cudaStream_t first = default_first ? nullptr : blocking.stream,
                           second = default_first ? blocking.stream : nullptr;
        Hold hold(first, x.get());
        OK(cudaMemcpyAsync(y.get(), x.get(), one_float, within, second));
        OK(cudaMemsetAsync(z.get(), 0, one_float, free)); // for which neither of them matters
        OK(cudaStreamSynchronize(free));
        hold.release_and_wait_for(second);
        CHECK(values(x, y, z) == "5 5 0");
    }
}

TEST_CASE("cudaStreamCreate: a stream waits for what the default stream was given before it") {
    auto x = floats_on(0, 1), y = floats_on(0, 1), z = floats_on(0, 1);
    Hold hold(nullptr, x.get());
    TestStream late(0, cudaStreamDefault), free(0, cudaStreamNonBlocking);
    OK(cudaMemcpyAsync(y.get(), x.get(), one_float, within, late));
    OK(cudaMemsetAsync(z.get(), 0, one_float, free)); // it waits for neither of them
    OK(cudaStreamSynchronize(free));
    hold.release_and_wait_for(late);
    CHECK(values(x, y, z) == "5 5 0");
}

TEST_CASE("cudaEventRecord: on the default stream it is waited for by what comes later") {
    auto x = floats_on(0, 1), y = floats_on(0, 1);
    TestStream first(0, cudaStreamDefault), second(0, cudaStreamDefault);
    TestEvent event;
    Hold hold(first, x.get());
    OK(cudaEventRecord(event, nullptr)); // behind what `first` was given
    OK(cudaMemcpyAsync(y.get(), x.get(), one_float, within, second));
    hold.release_and_wait_for(second);
    CHECK(values(y) == "5");
}

TEST_CASE("cudaStreamWaitEvent: what the default stream waits for, the others wait for, too") {
    auto x = floats_on(0, 1), y = floats_on(0, 1);
    TestStream blocking(0, cudaStreamDefault), free;
    TestEvent event;
    Hold hold(free, x.get());
    OK(cudaEventRecord(event, free));
    OK(cudaStreamWaitEvent(nullptr, event));
    OK(cudaMemcpyAsync(y.get(), x.get(), one_float, within, blocking));
    hold.release_and_wait_for(blocking);
    CHECK(values(y) == "5");
}

TEST_CASE("cudaMemcpyPeer: is ordered with all of both devices, and the host goes on") {
    auto x = floats_on(0, 1), y = floats_on(1, 1), z = floats_on(1, 1), w = floats_on(0, 1);
    TestStream a(0), b(1);
    SUBCASE("after the source's work, before what follows on either") {
        Hold hold(a, x.get());
        OK(cudaMemcpyPeer(y.get(), 1, x.get(), 0, one_float));
        OK(cudaMemcpyAsync(z.get(), y.get(), one_float, within, b));
        assign_kernel<<<1, 1, 0, a>>>(x.get(), 6);
        hold.release_and_wait_for(a, b);
        CHECK(values(x, y, z) == "6 5 5");
    }
    SUBCASE("after the target's work") {
        assign_kernel<<<1, 1, 0, a>>>(x.get(), 5);
        Hold hold(b, y.get(), 6, 1);
        OK(cudaMemcpyPeer(y.get(), 1, x.get(), 0, one_float));
        OK(cudaMemcpyAsync(w.get(), x.get(), one_float, within, a));
        assign_kernel<<<1, 1, 0, a>>>(x.get(), 7); // has to wait for the copy, and it for device 1
        hold.release_and_wait_for(a, b);
        CHECK(values(y, w, x) == "5 5 7");
    }
}

TEST_CASE("cudaMemcpy between devices: the addresses say which, in the order of cudaMemcpyPeer") {
    TestStream a(0), b(1);
    for (cudaMemcpyKind kind : {within, cudaMemcpyDefault})
        for (int current : {0, 1}) {
            auto x = floats_on(0, 1), y = floats_on(1, 1), z = floats_on(1, 1);
            Hold hold(a, x.get());
            OnDevice set(current);
            OK(cudaMemcpy(y.get(), x.get(), one_float, kind));
            OK(cudaMemcpyAsync(z.get(), y.get(), one_float, kind, b));
            OK(cudaSetDevice(0));
            assign_kernel<<<1, 1, 0, a>>>(x.get(), 6);
            hold.release_and_wait_for(a, b);
            OK(cudaMemcpyAsync(x.get(), z.get(), one_float, kind, a)); // any device's stream
            OK(cudaStreamSynchronize(a));
            CHECK(values(x, y, z) == "5 5 5");
        }
    Floats got(4);
    auto X = device_copy(Floats{1, 2, 3, 4}, 0), Y = device_copy(Floats{5, 6, 7, 8}, 1);
    OK(cudaMemcpy2D(Y.get(), 8, X.get(), 8, 4, 2, cudaMemcpyDefault));
    CHECK(fetch(Y, 4) == Floats{1, 6, 3, 8});
}

TEST_CASE("cudaMemcpyPeerAsync, cudaMemcpyAsync: on the default stream both devices wait") {
    TestStream a(0, cudaStreamDefault), b(1, cudaStreamDefault), free(0);
    for (int current : {0, 1})
        for (bool peer : {false, true}) {
            auto x = floats_on(0, 1), y = floats_on(1, 1), z = floats_on(1, 1), w = floats_on(0, 1);
            auto held = [&](cudaStream_t first, int device, float *p) { // it is copied behind this
                auto hold = std::make_unique<Hold>(first, p, 5, device);
                OK(cudaMemsetAsync(w.get(), 0, one_float, free));
                const OnDevice set(current);
                if (peer) OK(cudaMemcpyPeerAsync(y.get(), 1, x.get(), 0, one_float));
                else OK(cudaMemcpyAsync(y.get(), x.get(), one_float, within));
                OK(cudaStreamSynchronize(free)); // does not wait for it
                return hold;
            };
            auto hold = held(a, 0, x.get());
            OnDevice{1}, plus_kernel<<<1, 1>>>(y.get(), 1);
            OnDevice{1}, plus_kernel<<<1, 1, 0, b>>>(y.get(), 2);
            OnDevice{0}, assign_kernel<<<1, 1>>>(x.get(), 6);
            hold->release_and_wait_for(a, b);
            OnDevice{0}, OK(cudaDeviceSynchronize());
            CHECK(values(x, y) == "6 8");
            hold.reset(); // waits for the devices
            hold = held(b, 1, z.get());
            OnDevice{0}, assign_kernel<<<1, 1, 0, a>>>(x.get(), 7);
            hold->release_and_wait_for(b, a);
            CHECK(values(x, y, z) == "7 6 5");
        }
}

TEST_CASE("cudaMemset, cudaMemcpy: in the current device's order, whose memory it may be") {
    auto x = floats_on(0, 1), y = floats_on(1, 1);
    const float six = 6;
    OK(cudaDeviceEnablePeerAccess(1, 0));
    Hold hold(nullptr, x.get());
    OK(cudaMemset(y.get(), 0, one_float));
    std::thread copier([&] { OK(cudaMemcpy(y.get(), &six, one_float, up)); });
    hold.release_later();
    copier.join();
    CHECK(values(x, y) == "5 6");
    OK(cudaDeviceDisablePeerAccess(1));
}

TEST_CASE("cudaMemcpy: comes after the streams that block, however small it is, and no others") {
    TestStream blocking(0, cudaStreamDefault), free(0, cudaStreamNonBlocking);
    for (size_t n : {1, 1 << 20})
        for (bool waits : {true, false}) {
            CAPTURE(n);
            CAPTURE(waits);
            std::vector<float> found(n, -1);
            auto x = device_copy(std::vector<float>(n));
            Hold hold(waits ? blocking : free, x.get());
            std::thread copier([&] { OK(cudaMemcpy(found.data(), x.get(), n * one_float, down)); });
            if (waits) hold.release_later();
            copier.join();
            CHECK(found[0] == (waits ? 5 : 0));
            hold.release_and_wait_for(free);
        }
}

TEST_CASE("cudaStreamQuery: whether all is done") {
    auto x = floats_on(0, 1);
    TestStream a;
    OK(cudaStreamQuery(a));
    Hold hold(a, x.get());
    CHECK(cudaStreamQuery(a) == cudaErrorNotReady);
    hold.release_and_wait_for(a);
    OK(cudaStreamQuery(a));
    CHECK(values(x) == "5");
    TestStream blocking(0, cudaStreamDefault);
    for (bool default_first : {false, true}) { // the default stream waits for the other one
        Hold hold(default_first ? nullptr : blocking.stream, x.get(), 6 + default_first);
        CHECK(cudaStreamQuery(nullptr) == cudaErrorNotReady);
        if (default_first) OK(cudaStreamSynchronize(blocking)); // it has nothing to do
        CHECK(cudaStreamQuery(blocking) == (default_first ? cudaSuccess : cudaErrorNotReady));
        hold.release_and_wait_for(nullptr);
        CHECK(values(x) == std::to_string(6 + default_first));
        OK(cudaStreamQuery(nullptr));
    }
}

TEST_CASE("cudaFree, cudaStreamDestroy: wait for the device") {
    auto x = floats_on(0, 1);
    TestEvent event;
    for (bool destroy : {false, true}) {
        auto y = floats_on(0, 1);
        auto a = std::make_unique<TestStream>();
        Hold hold(*a, x.get());
        OK(cudaEventRecord(event, *a));
        std::thread release([&] { hold.release_later(); });
        if (destroy) a.reset();
        else y.reset();
        CHECK(cudaEventQuery(event) == cudaSuccess);
        release.join();
        CHECK(values(x) == "5");
    }
}

TEST_CASE("stream: 1024 tasks fit its queue, then the host waits") {
    auto x = floats_on(0, 1);
    TestStream a;
    Hold hold(a, x.get());
    auto fill = [&](int n) {
        for (int i = 0; i < n; i++) OK(cudaMemsetAsync(x.get(), 0, one_float, a));
    };
    fill(1000);
    CHECK(*hold.go == 0); // up to here nobody waits
    std::thread release([&] { hold.release_later(); });
    fill(100);
    CHECK(__atomic_load_n(hold.go.get(), __ATOMIC_RELAXED) == 1);
    release.join();
    OK(cudaStreamSynchronize(a));
}

TEST_CASE("stream: a host that waits for its queue is not woken by each task") {
    const int n = 1 << 16;
    auto x = floats_on(0, n);
    auto switches = [] {
        rusage usage;
        getrusage(RUSAGE_THREAD, &usage);
        return usage.ru_nvcsw;
    };
    const long before = switches();
    for (int i = 0; i < 5000; i++) OK(cudaMemsetAsync(x.get(), 0, n * one_float));
    CHECK(switches() - before < 300);
    OK(cudaDeviceSynchronize());
}

// --- mistakes

TEST_CASE("cudaFreeHost, cudaStreamQuery: a stream is idle when its last task uses nothing") {
    struct Use { // such as that of pinned memory, by a task
        std::atomic<bool> &ended;
        ~Use() { usleep(20000), ended = true; }
    };
    TestStream stream;
    for (int i = 0; i < 3; i++) {
        std::atomic<bool> ended{false};
        std::shared_ptr<Use> use(new Use{ended});
        stream.stream->push({}, [use = std::move(use)] {});
        while (cudaStreamQuery(stream) == cudaErrorNotReady) {}
        CHECK(ended);
    }
}

TEST_CASE("streams, events: one that was destroyed or never created is refused") {
    const cudaError_t handle = cudaErrorInvalidResourceHandle;
    const std::string no_stream = " is not a stream: was it never created, or is it already "
                                  "destroyed?",
                      no_event = " is not an event: was it never created, or is it already "
                                 "destroyed?";
    Memories m;
    TestEvent event;
    cudaEvent_t none = nullptr, gone = new_event(0);
    cudaStream_t stream = new_stream(0), never = (cudaStream_t)0x4141414141414141;
    OK(cudaStreamDestroy(stream));
    OK(cudaEventDestroy(gone));
    REFUSED(handle, cudaStreamDestroy(stream), "cudaStreamDestroy: ", no_stream);
    REFUSED(handle, cudaStreamSynchronize(stream), "cudaStreamSynchronize: ", no_stream);
    REFUSED(handle, cudaEventRecord(event, stream), "cudaEventRecord: ", no_stream);
    REFUSED(handle, cudaStreamWaitEvent(stream, event), "cudaStreamWaitEvent: ", no_stream);
    REFUSED(handle, cudaMemcpyAsync(m.x0, m.y0, 4, within, never), "cudaMemcpyAsync: ", no_stream);
    REFUSED(handle, cudaMemcpyPeerAsync(m.x1, 1, m.x0, 0, 4, never), no_stream);
    REFUSED(handle, cudaMemsetAsync(m.x0, 0, 4, never), "cudaMemsetAsync: ", no_stream);
    REFUSED(handle, cudaMallocAsync(&m.x0, 4, never), "cudaMallocAsync: ", no_stream);
    REFUSED(handle, cudaFreeAsync(m.y0, never), "cudaFreeAsync: ", no_stream);
    REFUSED(handle, cudaLaunchHostFunc(never, [](void *) {}, nullptr), no_stream);
    REFUSED_LAUNCH(handle, empty_kernel<<<1, 1, 0, never>>>(), "empty_kernel: ", no_stream);
    float ms = 0;
    for (cudaEvent_t wrong : {none, gone}) {
        REFUSED(handle, cudaEventRecord(wrong), "cudaEventRecord: ", no_event);
        REFUSED(handle, cudaStreamWaitEvent(nullptr, wrong), "cudaStreamWaitEvent: ", no_event);
        REFUSED(handle, cudaEventSynchronize(wrong), "cudaEventSynchronize: ", no_event);
        REFUSED(handle, cudaEventQuery(wrong), "cudaEventQuery: ", no_event);
        REFUSED(handle, cudaEventElapsedTime(&ms, event, wrong), no_event);
        REFUSED(handle, cudaEventDestroy(wrong), "cudaEventDestroy: ", no_event);
    }
}

// --- programs

static void host_function_calls_cuda() {
    auto call_cuda = [](void *) { (void)cudaDeviceSynchronize(); };
    WRONG_HERE(OK(cudaLaunchHostFunc(new_stream(0), call_cuda, nullptr)));
}
static void throws(void *) { throw std::out_of_range("beyond the end"); }
static void host_function_that_throws() {
    WRONG_HERE(OK(cudaLaunchHostFunc(new_stream(1), throws, nullptr)));
}
static void catches(void *data) {
    try {
        throws(data);
    } catch (const std::out_of_range &) {
        *(int *)data = 1;
    }
}
static void host_function_that_catches() {
    auto caught = pinned<int>(1);
    TestStream stream;
    OK(cudaLaunchHostFunc(stream, catches, caught.get()));
    OK(cudaStreamSynchronize(stream));
    expect(*caught == 1, "exceptions caught", *caught);
}

// Host threads that share a device: streams come and go, and the default stream waits for all.
static void host_threads() {
    constexpr int turns = small_only ? 20 : 300;
    std::vector<std::thread> threads;
    std::atomic<int> right{0};
    for (int t = 0; t < 6; t++)
        threads.emplace_back([&right] {
            for (int i = 0; i < turns; i++) {
                auto x = floats_on(0, 1);
                TestStream stream(0, cudaStreamDefault);
                float got = 0;
                assign_kernel<<<1, 1, 0, stream>>>(x.get(), 1);
                plus_kernel<<<1, 1>>>(x.get(), 2);
                OK(cudaMemcpyAsync(&got, x.get(), one_float, down, stream));
                right += got == 3;
            }
        });
    for (std::thread &thread : threads) thread.join();
    expect(right == 6 * turns, "right sums", right);
}

static const bool right_streams = add(right_programs, {
    {"host function that catches", host_function_that_catches},
    {"host threads", host_threads},
});
static const bool wrong_streams = add(wrong_programs, {
    WRONG("host function that calls CUDA", host_function_calls_cuda(),
          "cudaLaunchHostFunc: its function must not call CUDA", "cudaErrorNotPermitted"),
    WRONG("host function that throws", host_function_that_throws(),
          "cudaLaunchHostFunc on device 1: uncaught exception: beyond the end"),
});
