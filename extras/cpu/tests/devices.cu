// Devices and errors are numbered, named and worded as in CUDA.
#include "tests.h"

TEST_CASE("cudaGetDevice: each host thread has its own; cudaGetDeviceProperties") {
    int count = 0, device = -1;
    OK(cudaGetDeviceCount(&count));
    CHECK(count >= 1);
    cudaDeviceProp prop;
    OK(cudaGetDeviceProperties(&prop, count - 1));
    CHECK(strlen(prop.name) > 0);
    CHECK(prop.maxThreadsPerBlock == 1024);
    CHECK(prop.multiProcessorCount >= 1);
    CHECK(prop.sharedMemPerBlock == 48 * 1024);
    CHECK(prop.maxGridSize[1] == 65535);
    CHECK(prop.warpSize == 32);
    OnDevice current(count - 1);
    std::thread([&] { cudaGetDevice(&device); }).join(); // a new thread's is 0
    CHECK(device == 0);
    OK(cudaGetDevice(&device));
    CHECK(device == count - 1);
}

TEST_CASE("cudaGetLastError: forgets; cudaPeekAtLastError does not") {
    float *p = (float *)1, *x = nullptr;
    OK(cudaGetLastError());
    CHECK(cudaMalloc(&p, size_t(1) << 60) == cudaErrorMemoryAllocation);
    CHECK(p == nullptr);
    OK(cudaMalloc(&x, 4)); // a success in between does not reset it
    CHECK(cudaPeekAtLastError() == cudaErrorMemoryAllocation);
    CHECK(cudaPeekAtLastError() == cudaErrorMemoryAllocation);
    CHECK(cudaGetLastError() == cudaErrorMemoryAllocation);
    OK(cudaGetLastError());
    OK(cudaPeekAtLastError());
    OK(cudaFree(x));
}

TEST_CASE("cudaGetErrorName, cudaGetErrorString: CUDA's numbers, names and texts") {
    auto check = [](cudaError_t error, int number, const std::string &name, const char *text) {
        CHECK((int)error == number);
        CHECK(cudaGetErrorName(error) == name);
        CHECK(cudaGetErrorString(error) == std::string(text));
    };
    check(cudaSuccess, 0, "cudaSuccess", "no error");
    check(cudaErrorInvalidValue, 1, "cudaErrorInvalidValue", "invalid argument");
    check(cudaErrorLaunchFailure, 719, "cudaErrorLaunchFailure", "unspecified launch failure");
    check((cudaError_t)1001, 1001, "unrecognized error code", "unrecognized error code");
}

__managed__ int counter = 4;
__device__ __managed__ int one_of_pair[2];
static __managed__ float sums[3] = {1, 2, 3};
__global__ void managed_kernel(int *argument) {
    counter++;
    one_of_pair[1] = *argument + 6;
    *argument = 7;
}
TEST_CASE("__managed__: one variable for the host and every device") {
    CHECK(counter == 4);
    for (int device : {0, 1}) {
        one_of_pair[0] = device;
        OK_LAUNCH((OnDevice{device}, managed_kernel<<<1, 1>>>(one_of_pair)));
        OK((OnDevice{device}, cudaDeviceSynchronize()));
        CHECK(counter == 5 + device);
        CHECK(one_of_pair[0] == 7);
        CHECK(one_of_pair[1] == 6 + device);
    }
    const Floats other = {4, 5, 6};
    Floats got(3);
    OK(cudaMemcpyToSymbol(sums, other.data(), sizeof sums));
    CHECK(sums[2] == 6);
    OK(cudaMemcpy(got.data(), sums, sizeof sums, cudaMemcpyDeviceToHost));
    CHECK(got == other);
    OK(cudaMemset(sums, 0, sizeof sums));
    OK(cudaDeviceSynchronize());
    CHECK(sums[0] == 0);
    OK(cudaMemPrefetchAsync(sums, sizeof sums, 0));
    int *address = nullptr;
    OK(cudaGetSymbolAddress((void **)&address, counter));
    CHECK(address == &counter);
    REFUSED(value, cudaFree(&counter), "was not returned by cudaMalloc");
}

TEST_CASE("cudaDeviceGetP2PAttribute: of two devices") {
    int value = -1;
    const int want[] = {0, 1, 1, 0, 0};
    for (int i = 0; i < 5; i++) {
        OK(cudaDeviceGetP2PAttribute(&value, cudaDeviceP2PAttr(i + 1), 0, 1));
        CHECK(value == want[i]);
    }
    REFUSED(cudaErrorInvalidDevice,
            cudaDeviceGetP2PAttribute(&value, cudaDevP2PAttrAccessSupported, 1, 1),
            "cudaDeviceGetP2PAttribute: devices 1 and 1 are not two devices");
    REFUSED(cudaErrorInvalidValue, cudaDeviceGetP2PAttribute(&value, cudaDeviceP2PAttr(6), 0, 1),
            "cudaDeviceGetP2PAttribute: there is no attribute 6");
}

TEST_CASE("cudaDeviceEnablePeerAccess: once, to another device") {
    int can = -1;
    OK(cudaDeviceCanAccessPeer(&can, 0, 0));
    CHECK(can == 0);
    OK(cudaDeviceCanAccessPeer(&can, 0, 1));
    CHECK(can == 1);
    CHECK(cudaDeviceDisablePeerAccess(1) == cudaErrorPeerAccessNotEnabled);
    CHECK(cudaGetLastError() == cudaErrorPeerAccessNotEnabled);
    REFUSED(value, cudaDeviceEnablePeerAccess(1, 1),
            "cudaDeviceEnablePeerAccess: flags are 1, but must be 0");
    OK(cudaDeviceEnablePeerAccess(1, 0));
    CHECK(cudaDeviceEnablePeerAccess(1, 0) == cudaErrorPeerAccessAlreadyEnabled);
    CHECK(cudaGetLastError() == cudaErrorPeerAccessAlreadyEnabled);
    // Kernels and cudaMemset may use the peer's memory now, but not the other way round
    auto x = device_copy(Floats{1, 2}), y = device_copy(Floats{3, 4}, 1);
    OK_LAUNCH(plus_kernel<<<1, 2>>>(y.get(), 10));
    OK(cudaDeviceSynchronize());
    CHECK(fetch(y, 2) == Floats{13, 14});
    OK(cudaMemset(y.get(), 0, one_float));
    OK(cudaDeviceSynchronize());
    CHECK(fetch(y, 2) == Floats{0, 14});
    REFUSED_LAUNCH(value, (OnDevice{1}, plus_kernel<<<1, 2>>>(x.get(), 1)), "argument 1",
                   on_0_not_1);
    OK(cudaDeviceDisablePeerAccess(1));
    REFUSED_LAUNCH(value, plus_kernel<<<1, 2>>>(y.get(), 1), "argument 1", on_1_not_0);
    CHECK(cudaDeviceDisablePeerAccess(1) == cudaErrorPeerAccessNotEnabled);
    cudaGetLastError();
    OK(cudaGetLastError());
}

TEST_CASE("cudaDeviceGetAttribute, cudaGetDeviceProperties: say the same, and 0 for what is not") {
    cudaDeviceProp prop;
    OK(cudaGetDeviceProperties(&prop, 1));
    auto attribute = [](cudaDeviceAttr which) {
        int value = -1;
        OK(cudaDeviceGetAttribute(&value, which, 1));
        return value;
    };
    CHECK(attribute(cudaDevAttrMultiProcessorCount) == prop.multiProcessorCount);
    CHECK(attribute(cudaDevAttrMaxPitch) == (int)prop.memPitch);
    CHECK(attribute(cudaDevAttrMaxBlocksPerMultiprocessor) == prop.maxBlocksPerMultiProcessor);
    CHECK(attribute(cudaDevAttrTextureAlignment) == (int)prop.textureAlignment);
    CHECK(attribute(cudaDevAttrCanMapHostMemory) == prop.canMapHostMemory);
    CHECK(attribute(cudaDevAttrMemoryPoolsSupported) == prop.memoryPoolsSupported);
    CHECK(attribute(cudaDevAttrL2CacheSize) == 0);
    CHECK(prop.l2CacheSize == 0);
    CHECK(prop.regsPerBlock == 0);
    CHECK(prop.pciBusID == 0);
}
TEST_CASE("cudaOccupancyMaxActiveBlocksPerMultiprocessor, cudaDeviceGetAttribute, priorities") {
    int blocks = 0, threads = 0, cores = 0, least = 0, greatest = 0;
    OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, dot_kernel<float>, 256, 0));
    CHECK(blocks == 1);
    OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, empty_kernel, 2048, 0));
    CHECK(blocks == 0);
    OK(cudaDeviceGetAttribute(&cores, cudaDevAttrMultiProcessorCount, 0));
    OK(cudaOccupancyMaxPotentialBlockSize(&blocks, &threads, empty_kernel));
    CHECK(blocks == cores);
    CHECK(threads == 1024);
    REFUSED(cudaErrorInvalidDevice, cudaDeviceGetAttribute(&cores, cudaDevAttrWarpSize, 2),
            "cudaDeviceGetAttribute: there is no device 2: the device count is 2");
    REFUSED(value, cudaDeviceGetAttribute(&cores, cudaDeviceAttr(9999), 0),
            "CUDA has no attribute 9999");
    OK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CHECK(greatest < least);
    cudaStream_t stream;
    OK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
    OK_LAUNCH(empty_kernel<<<1, 1, 0, stream>>>());
    OK(cudaStreamDestroy(stream));
}

// --- programs

static void wrong_setting(const char *name, const char *value) {
    setenv(name, value, 1);
    fprintf(stderr, "expected: %s=%s\n", name, value);
    memory(0, 1);
}
static void visible_devices() {
    setenv("CUDA_VISIBLE_DEVICES", "0", 1);
    fprintf(stderr, "expected: CUDA_VISIBLE_DEVICES=0 \n");
    memory(1, 1);
    throw std::runtime_error("told, then went on");
}

#if !defined(CUDA_CPU_ASAN) && !defined(CUDA_CPU_TSAN) // which need addresses by the terabyte
// What a machine lacks: addresses, because of ulimit -v, and so a thread's stack
static void limit_addresses(long mib) {
    rlimit limit;
    limit.rlim_cur = limit.rlim_max = mib << 20;
    if (setrlimit(RLIMIT_AS, &limit)) throw std::runtime_error("setrlimit failed");
}
static void few_addresses(const char *memory_mib) {
    setenv("CUDA_CPU_MEMORY", memory_mib, 1);
    setenv("CUDA_CPU_CORES", "1", 1);
    limit_addresses(4096);
    memory(1, 1);
}
static void no_thread() {
    setenv("CUDA_CPU_CORES", "1", 1);
    auto x = floats_on(0, 1), y = floats_on(1, 1);
    OK(cudaMemset(x.get(), 0, one_float));
    OK(cudaMemcpyPeer(y.get(), 1, x.get(), 0, one_float));
    fetch(y, 1);
    limit_addresses(mapped_mib() + 2); // a thread's stack alone is 8, or 2
    new_stream(1);
}
#endif

static __device__ int first_value = 3;
__global__ void change_kernel(int *x) { *x = first_value++; }
static void device_reset() {
    OnDevice current(1);
    float *p = nullptr, *other = memory(0, 1);
    auto x = pinned<int>(1);
    size_t before = 0, after = 0, total = 0;
    cudaStream_t stream = new_stream(1, cudaStreamDefault);
    OK(cudaSetDevice(1));
    OK(cudaMemGetInfo(&before, &total));
    OK(cudaMalloc(&p, 1 << 20));
    cudaEvent_t event = nullptr;
    OK(cudaEventCreate(&event));
    OK(cudaDeviceEnablePeerAccess(0, 0));
    for (int want : {3, 3}) {
        change_kernel<<<1, 1, 0, want == 3 ? nullptr : stream>>>(x.get());
        change_kernel<<<1, 1>>>(x.get());
        OK(cudaDeviceSynchronize());
        expect(*x == want + 1, "a variable's value", *x);
        OK(cudaDeviceReset());
    }
    OK(cudaMemGetInfo(&after, &total));
    expect(after == before, "bytes that were not freed", before - after);
    OK(cudaDeviceEnablePeerAccess(0, 0)); // which was forgotten
    fclose(stderr);                       // three mistakes that are named there
    expect(cudaStreamSynchronize(stream) == cudaErrorInvalidResourceHandle, "a stream", 0);
    expect(cudaEventSynchronize(event) == cudaErrorInvalidResourceHandle, "an event", 0);
    expect(cudaFree(p) == cudaErrorInvalidValue, "memory", 0);
    cudaGetLastError();
    OK(cudaSetDevice(0));
    OK(cudaFree(other));
}
TEST_CASE("cudaPointerGetAttributes: whose memory it is") {
    auto of_type = [](const void *pointer) {
        cudaPointerAttributes found;
        OK(cudaPointerGetAttributes(&found, pointer));
        const char *const usable = found.devicePointer && found.hostPointer ? " of both"
                                   : found.devicePointer                   ? " of a device"
                                                                           : " of the host";
        return std::to_string(found.type) + " " + std::to_string(found.device) + usable;
    };
    auto one = floats_on(1, 2);
    auto page = pinned<float>(2);
    int *managed, on_host;
    OK(cudaMallocManaged(&managed, 8));
    CHECK(of_type(one.get() + 1) == "2 1 of a device");
    CHECK(of_type(page.get() + 1) == "1 0 of both");
    CHECK(of_type(managed + 1) == "3 0 of both");
    CHECK(of_type(&counter) == "3 0 of both");
    CHECK(of_type(&on_host) == "0 -2 of the host");
    OK(cudaFree(managed));
}
TEST_CASE("cudaDeviceSetLimit: of a stack that is too large, an error") {
    size_t before = 0, now = 0;
    OK(cudaDeviceGetLimit(&before, cudaLimitStackSize));
    OK(cudaDeviceSetLimit(cudaLimitStackSize, 16384));
    OK(cudaDeviceGetLimit(&now, cudaLimitStackSize));
    CHECK(now == 16384);
    OK(cudaDeviceSetLimit(cudaLimitStackSize, before));
    OK(cudaDeviceSetLimit(cudaLimitMallocHeapSize, 1 << 30));
    REFUSED(cudaErrorInvalidValue, cudaDeviceSetLimit(cudaLimitStackSize, 1 << 20), "a stack has");
    REFUSED(cudaErrorUnsupportedLimit, cudaDeviceSetLimit(cudaLimitDevRuntimeSyncDepth, 2),
            "cudaDeviceSetLimit: the stand-in lacks limit 3");
}
static void eight_peers() {
    setenv("CUDA_CPU_DEVICES", "11", 1);
    setenv("CUDA_CPU_CORES", "1", 1);
    for (int peer = 10; peer > 0; peer--) {
        const cudaError_t code = cudaDeviceEnablePeerAccess(peer, 0);
        expect(code == (peer > 2 ? cudaSuccess : cudaErrorTooManyPeers), "peer", peer);
    }
    OK(cudaDeviceDisablePeerAccess(5));
    OK(cudaDeviceEnablePeerAccess(1, 0));
    expect(cudaGetLastError() == cudaErrorTooManyPeers, "the last error", 0);
}

static const bool right_devices = add(right_programs, {
    {"cudaDeviceReset", device_reset},
    {"eight peers", eight_peers},
#if !defined(CUDA_CPU_ASAN) && !defined(CUDA_CPU_TSAN)
    {"few addresses", [] { few_addresses("64"); }},
#endif
});
static const bool wrong_devices = add(wrong_programs, {
    WRONG("CUDA_VISIBLE_DEVICES", visible_devices(),
          "has no effect without a GPU: CUDA_CPU_DEVICES says how many devices are emulated"),
    WRONG("wrong setting", wrong_setting("CUDA_CPU_CORES", "two"), "a whole number from 1"),
    WRONG("wrong word for peers", wrong_setting("CUDA_CPU_PEERS", "2"),
          ": expected a whole number from 0 to 1"),
    WRONG("wrong order of lanes", wrong_setting("CUDA_CPU_LANES", "sideways"),
          "expected forwards, backwards or a whole number"),

});
