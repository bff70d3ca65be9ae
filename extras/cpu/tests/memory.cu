// Memory: what is allocated is NaN and is counted, copies copy, and wrong memory is refused.
#include "tests.h"

__global__ void fresh_kernel(float *nan) { // counts the NaN that it finds, and leaves none
    __shared__ float fixed[50];
    extern __shared__ float dynamic[];
    if (threadIdx.x == 0) {
        int count = 0;
        for (int i = 0; i < 50; i++) count += std::isnan(fixed[i]) + std::isnan(dynamic[i]);
        nan[blockIdx.x] = count;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 50; i += blockDim.x) fixed[i] = dynamic[i] = 1;
}
#ifndef CUDA_CPU_ASAN // which reports such accesses
__global__ void around_kernel(float *y, const float *x, int n) {
    y[0] = x[-1];
    y[1] = x[-16];
    y[2] = x[n];
    y[3] = x[(n / 64 + 1) * 64 - 1]; // of the 256 bytes that it begins
}
TEST_CASE("cudaMalloc: what lies before and behind an array is NaN") {
    for (int n : {3, 65, 900}) { // the page has room before each
        CAPTURE(n);
        auto x = device_copy(Floats(n, 1)), y = device_copy(Floats(4, 1));
        OK_LAUNCH(around_kernel<<<1, 1>>>(y.get(), x.get(), n));
        for (float number : fetch(y, 4)) CHECK(std::isnan(number));
    }
}
#endif
TEST_CASE("cudaMalloc, __shared__: fresh memory is NaN") {
    for (int n : {1, 63, 1024, 5000}) { // 1: the rest of a page, 1024: a whole page
        auto x = floats_on(0, n);
        for (float value : fetch(x, n)) REQUIRE(std::isnan(value));
        OK(cudaMemset(x.get(), 0, n * sizeof(float)));
    }
    float *fixed = nullptr;
    OK(cudaMallocHost(&fixed, 100 * one_float));
    for (int i = 0; i < 100; i++) CHECK(std::isnan(fixed[i]));
    for (int i = 0; i < 100; i++) CHECK(((int *)fixed)[i] > 2000000000); // and no usual integer
    for (int i = 0; i < 50; i++) CHECK(std::isnan(((double *)fixed)[i]));
    OK(cudaFreeHost(fixed));
    auto nan = floats_on(0, 20);
    for (int launch = 0; launch < 2; launch++) {
        OK_LAUNCH(fresh_kernel<<<20, 3, 50 * sizeof(float)>>>(nan.get()));
        CHECK(fetch(nan, 20) == Floats(20, 100));
    }
}

TEST_CASE("cudaMemset: bytes") {
    auto x = floats_on(0, 6);
    float bits;
    memset(&bits, 0x40, sizeof bits); // 3.0039...
    OK(cudaMemset(x.get(), 0, 6 * sizeof(float)));
    OK(cudaMemset(x.get() + 1, 0x40, 2 * sizeof(float)));
    CHECK(fetch(x, 6) == Floats{0, bits, bits, 0, 0, 0});
}

TEST_CASE("cudaMemGetInfo: the current device's; freeing nothing is no mistake") {
    auto free_on = [](int device) {
        size_t free = 0, total = 0;
        OnDevice{device}, OK(cudaMemGetInfo(&free, &total));
        CHECK(free <= total);
        return free;
    };
    const size_t before = free_on(0), other = free_on(1), bytes = 4 << 20;
    {
        auto y = floats_on(0, bytes / sizeof(float));
        CHECK(before - free_on(0) >= bytes);
        CHECK(before - free_on(0) <= bytes + 65536); // at most a page more
        CHECK(free_on(1) == other);
    }
    CHECK(free_on(0) == before);
    OK(cudaFree(nullptr));
    OK(cudaFreeHost(nullptr));
}

// The host cannot access the address that it holds; a kernel gets where the memory is.
__global__ void follow_kernel(float **list, int n, float value) {
    for (int i = 0; i < n; i++) *list[i] = value + i;
}
__device__ float *target;
__global__ void target_kernel(float value) { *target = value; }
TEST_CASE("launch: an int in a struct, and what lies behind it, is no address") {
    for (size_t range : {0x7f0000000000, 0x7f0000001000, 0x7f0040000000, 0x7f00fffff000}) {
        const size_t first = (size_t)cuda_cpu::first_address((void *)range, size_t(1) << 34);
        CHECK(first >= range);
        CHECK(first < range + (size_t(1) << 32));
        CHECK(uint32_t(first) == 1u << 30);
    }
    float *first = nullptr;
    CHECK(cudaMalloc(&first, sizeof(float)) == cudaSuccess);
    CHECK(uint32_t((uintptr_t)first) >= 1u << 30);
    cudaFree(first);
}

TEST_CASE("launch: pointers in an array of pointers, or in a variable, are followed too") {
    auto x = floats_on(0, 1), y = floats_on(0, 1);
    const std::vector<float *> pointers = {x.get(), y.get()};
    auto list = device_copy(pointers);
    OK_LAUNCH(follow_kernel<<<1, 1>>>(list.get(), 2, 3));
    CHECK(values(x, y) == "3 4");
    CHECK(fetch(list, 2) == pointers);
    OK(cudaMemcpyAsync(list.get(), &pointers[1], sizeof pointers[1], up));
    OK_LAUNCH(follow_kernel<<<1, 1>>>(list.get(), 2, 5));
    CHECK(values(x, y) == "3 6");
    OK(cudaMemcpyToSymbol(target, &pointers[0], sizeof target));
    OK_LAUNCH(target_kernel<<<1, 1>>>(7));
    CHECK(values(x, y) == "7 6");
    float *back = nullptr;
    OK(cudaMemcpyFromSymbol(&back, target, sizeof target));
    CHECK(back == pointers[0]);
}

// An array of structs with arrays of pointers; numbers that look like addresses
struct Sum {
    short n;
    float *out;
    union {
        const float *in[2];
        size_t bits;
    };
};
__device__ Sum sum_of_symbol;
__global__ void sums_kernel(const Sum *sums, int n) {
    for (int i = 0; i <= n; i++) {
        const Sum &sum = i < n ? sums[i] : sum_of_symbol;
        *sum.out = sum.n;
        for (int j = 0; j < sum.n; j++) *sum.out += *sum.in[j];
    }
}
__global__ void numbers_kernel(ulonglong2 *y, const ulonglong2 *x) { y->x = x->x + 1; }
TEST_CASE("launch: pointers in structs in a device's memory are followed, numbers stay") {
    auto x = device_copy(Floats{10}), y = device_copy(Floats{20}), out = device_copy(Floats(3));
    const Sum sums[] = {{1, out.get(), {{x.get()}}},
                        {2, out.get() + 1, {{x.get(), y.get()}}},
                        {2, out.get() + 2, {{y.get(), y.get()}}}};
    Sum *list = nullptr, back[2] = {};
    OK(cudaMalloc(&list, 2 * sizeof *list));
    OK(cudaMemcpyAsync(list, sums, 2 * sizeof *list, up));
    OK(cudaMemcpyToSymbol(sum_of_symbol, &sums[2], sizeof sums[2]));
    OK_LAUNCH(sums_kernel<<<1, 1>>>(list, 2));
    CHECK(fetch(out, 3) == Floats{11, 32, 42});
    OK(cudaMemcpy(back, list, sizeof back, down));
    CHECK(back[1].out == out.get() + 1);
    CHECK(back[1].in[1] == y.get());
    OK(cudaMemcpy((void *)&list[0].in[0], &sums[1].in[1], sizeof(float *), up)); // a piece
    OK(cudaMemcpyFromSymbol(&back[0], sum_of_symbol, sizeof back[0]));
    CHECK(back[0].in[0] == y.get());
    OK_LAUNCH(sums_kernel<<<1, 1>>>(list, 2));
    CHECK(fetch(out, 3) == Floats{21, 32, 42});
    OK(cudaFree(list));
    const auto address = (unsigned long long)x.get();
    auto numbers = device_copy(std::vector<ulonglong2>{{address, 0}});
    OK_LAUNCH(numbers_kernel<<<1, 1>>>(numbers.get(), numbers.get()));
    CHECK(fetch(numbers, 1)[0].x == address + 1);
}

TEST_CASE("pinned memory: a device's address, too") {
    auto x = device_copy(Floats{1, 2}), fixed = pinned<float>(2), other = pinned<float>(2);
    Floats host = {7, 8};
    OK(cudaMemset(fixed.get(), 0xFF, one_float));
    OK(cudaDeviceSynchronize());
    CHECK(std::isnan(fixed.get()[0]));
    CHECK(fixed.get()[1] == 0);
    OK(cudaMemcpy(fixed.get(), host.data(), 2 * one_float, up));
    CHECK(fixed.get()[1] == 8);
    OK(cudaMemcpy(x.get(), fixed.get(), one_float, within));
    OK(cudaMemcpyAsync(other.get(), x.get(), 2 * one_float, within));
    OK(cudaMemcpy(host.data(), other.get(), 2 * one_float, down));
    CHECK(host == Floats{7, 2});
}

TEST_CASE("cudaMemcpyAsync: pageable memory is free after it, pinned memory is copied later") {
    auto x = floats_on(0, 2), y = floats_on(0, 1);
    auto fixed = pinned<float>(2);
    Floats host = {1, 2};
    TestStream a;
    TestEvent event;
    Hold hold(a, y.get());
    OK(cudaMemcpyAsync(x.get(), host.data(), 2 * one_float, up, a));
    host = {3, 4};
    OK(cudaMemcpyAsync(fixed.get(), x.get(), 2 * one_float, down, a));
    OK(cudaEventRecord(event, a));
    CHECK(cudaEventQuery(event) == cudaErrorNotReady);
    hold.release_later();
    OK(cudaEventSynchronize(event));
    CHECK(Floats(fixed.get(), fixed.get() + 2) == Floats{1, 2});
    // To pageable memory the call waits; from pinned memory it need not, and the host must
    fixed.get()[0] = 8;
    OK(cudaMemcpyAsync(x.get(), fixed.get(), one_float, up, a));
    OK(cudaMemcpyAsync(host.data(), x.get(), 2 * one_float, down, a));
    CHECK(host == Floats{8, 2});
    OK(cudaMemcpy(host.data(), fixed.get(), one_float, cudaMemcpyHostToHost));
    CHECK(host == Floats{8, 2});
    OK(cudaMemcpy(nullptr, nullptr, 0, up)); // nothing to copy is no mistake
}

__global__ void transpose_kernel(float *y, size_t pitch, const float *x, int rows, int columns) {
    const int r = threadIdx.y, c = threadIdx.x;
    float *row = (float *)((char *)y + c * pitch);
    if (r < rows && c < columns) row[r] = x[r * columns + c];
}
TEST_CASE("cudaMemcpy2D, cudaMemset2D: rows with a pitch") {
    const int rows = 3, columns = 5;
    float *y = nullptr;
    size_t pitch = 0;
    OK(cudaMallocPitch(&y, &pitch, rows * one_float, columns));
    CHECK(pitch == 512);
    OK(cudaMemset2D(y, pitch, 0, rows * one_float, columns));
    Floats x(rows * columns), want, got(columns * 4, -1);
    for (int i = 0; i < rows * columns; i++) x[i] = i;
    for (int c = 0; c < columns; c++) want.insert(want.end(), {x[c], x[c + 5], x[c + 10], -1});
    auto X = device_copy(x);
    OK_LAUNCH(transpose_kernel<<<1, dim3(8, 4)>>>(y, pitch, X.get(), rows, columns));
    const size_t to = 4 * one_float, width = rows * one_float;
    OK(cudaMemcpy2D(got.data(), to, y, pitch, width, columns, cudaMemcpyDefault));
    CHECK(got == want);
    TestStream stream; // from pageable memory, which is free at once, and back
    OK(cudaMemset2DAsync(y, pitch, 0xFF, width, columns, stream));
    OK(cudaMemcpy2DAsync(y, pitch, got.data(), to, 4, 2, up, stream));
    std::fill(got.begin(), got.end(), -1);
    OK(cudaMemcpy2DAsync(got.data(), to, y, pitch, width, 2, down, stream));
    CHECK(got[0] == 0);
    CHECK(got[4] == 1);
    CHECK(std::isnan(got[1]));
    CHECK(got[3] == -1);
    REFUSED(cudaErrorInvalidPitchValue, cudaMemcpy2D(got.data(), 8, y, pitch, width, 2, down),
            "cudaMemcpy2D: rows of 12 bytes do not fit into a pitch of 8");
    REFUSED(value, cudaMemcpy2D(y, pitch, got.data(), to, width, columns + 1, up),
            "cudaMemcpy2D, destination: 2572 bytes at offset 0 overrun the 2560 bytes that");
    REFUSED(value, cudaMemset2D(y + 1, pitch, 0, pitch, columns), "cudaMemset2D: 2560 bytes at");
    OK(cudaFree(y));
}

TEST_CASE("cudaMallocManaged: one address for the host and every device") {
    float *x = nullptr, *y = memory(1, 1), *z = memory(0, 4);
    OK(cudaMallocManaged(&x, 4 * one_float));
    CHECK(std::isnan(x[3]));
    std::fill_n(x, 4, 1);
    OK(cudaMemPrefetchAsync(x, 4 * one_float, 1));
    const cudaMemLocation there = {cudaMemLocationTypeDevice, 1}; // as CUDA 13 has it
    OK(cudaMemPrefetchAsync(x, 4 * one_float, there, 0));
    OK(cudaMemAdvise(x, 4 * one_float, cudaMemAdviseSetPreferredLocation, there));
    for (int device : {0, 1}) {
        OnDevice current(device);
        OK_LAUNCH(plus_kernel<<<1, 4>>>(x, device + 1));
        OK(cudaDeviceSynchronize());
    }
    CHECK(Floats(x, x + 4) == Floats(4, 4));
    OK(cudaMemset(x, 0, 4));
    OK(cudaMemcpy(y, x + 1, 4, cudaMemcpyDefault));
    OK(cudaMemcpy(x + 2, y, 4, down));
    OK(cudaMemcpyPeer(z, 0, x, 1, 16));
    OK(cudaDeviceSynchronize());
    CHECK(Floats(x, x + 4) == Floats{0, 4, 4, 4});
    REFUSED(value, cudaMemcpy(z, x, 20, up), "cudaMemcpy, destination: 20 bytes");
    REFUSED(value, cudaMemset(x + 1, 0, 16), "overrun the 16 bytes that", "on every device");
    REFUSED(value, cudaFreeHost(x), "was not returned by cudaMallocHost");
    REFUSED(value, cudaMemPrefetchAsync(z, 16, 0), "was not returned by cudaMallocManaged");
    OK(cudaFree(x));
    REFUSED_LAUNCH(value, plus_kernel<<<1, 4>>>(x, 1), "is memory of every device that", "freed");
    REFUSED(value, cudaFree(x), "on every device was already freed by " __FILE__ ":");
}

TEST_CASE("cudaMallocAsync, cudaFreeAsync: in the stream's order") {
    auto y = floats_on(0, 1);
    TestStream stream, on_1(1);
    float *x = nullptr;
    OK(cudaMallocAsync(&x, one_float, stream));
    Hold hold(stream, x);
    OK(cudaMemcpyAsync(y.get(), x, one_float, within, stream));
    OK(cudaFreeAsync(x, stream)); // the copy before it has not even begun
    REFUSED_LAUNCH(value, (plus_kernel<<<1, 1, 0, stream>>>(x, 1)), "argument 1", "has freed");
    REFUSED(value, cudaFreeAsync(x, stream), "cudaFreeAsync", "has freed");
    hold.release_and_wait_for(stream);
    CHECK(values(y) == "5");
    float *z = memory(0, 1);
    REFUSED(value, cudaFreeAsync(z, stream), "was not returned by cudaMallocAsync");
    OK(cudaMallocAsync(&x, one_float, nullptr));
    REFUSED(value, cudaFreeAsync(x, on_1), "is memory of device 0, not of device 1");
    OK(cudaFree(x)); // allowed too
}

TEST_CASE("cudaHostRegister: memory of the host becomes pinned") {
    Floats host = {1, 2, 3, 4};
    auto x = floats_on(0, 1);
    TestStream stream;
    REFUSED_LAUNCH(value, plus_kernel<<<1, 4>>>(host.data(), 1), "argument 1", on_host);
    OK(cudaHostRegister(host.data(), 16, cudaHostRegisterDefault));
    OK_LAUNCH(plus_kernel<<<1, 4>>>(host.data(), 1)); // a kernel may use it
    OK(cudaDeviceSynchronize());
    CHECK(host == Floats{2, 3, 4, 5});
    float *mapped = nullptr;
    OK(cudaHostGetDevicePointer(&mapped, &host[1], 0));
    CHECK(mapped == &host[1]);
    Hold hold(stream, x.get(), 7); // and a copy of it does not hold the host up
    OK(cudaMemcpyAsync(host.data(), x.get(), 4, down, stream));
    hold.release_and_wait_for(stream);
    CHECK(host[0] == 7);
    REFUSED(cudaErrorHostMemoryAlreadyRegistered, cudaHostRegister(&host[1], 4, 0),
            "cudaHostRegister: some or all of the 4 bytes at", "are already pinned");
    REFUSED(value, cudaFreeHost(host.data()), "was not returned by cudaMallocHost");
    OK(cudaHostUnregister(host.data()));
    REFUSED(cudaErrorHostMemoryNotRegistered, cudaHostUnregister(host.data()),
            "cudaHostUnregister:", "was not given to cudaHostRegister");
    REFUSED(value, cudaHostRegister(x.get(), 4, 0), "is memory of device 0, not of the host");
    REFUSED(value, cudaHostGetDevicePointer(&mapped, x.get(), 0), "is not pinned memory: allocate");
}

// y = filter applied to x, over the middle of x
__constant__ float filter[3] = {1, 2, 1};
__device__ float scale = 1, offsets[2];
__global__ void filter_kernel(float *y, const float *x, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i + 3 > n) return;
    float sum = offsets[0] + offsets[1];
    for (int k = 0; k < 3; k++) sum += filter[k] * x[i + k];
    y[i] = sum * scale;
}
TEST_CASE("__constant__: a filter, one on each device") {
    const float other[3] = {0, 1, -1}, offset[2] = {10, 20}, half = 0.5f;
    Floats x(10), want(8);
    OK(cudaMemcpyToSymbol(offsets, offset, sizeof offset));
    OnDevice current(1);
    OK(cudaMemcpyToSymbol(filter, other, sizeof other));
    OK(cudaMemcpyToSymbol(offsets, offset, 4, 4)); // only one of two
    OK(cudaMemcpyToSymbol(offsets, offset, 4));
    OK(cudaMemcpyToSymbol(scale, &half, 4));
    for (int i = 0; i < 10; i++) x[i] = i * i;
    for (int device : {0, 1}) {
        auto X = device_copy(x, device), y = floats_on(device, 8);
        OK(cudaSetDevice(device));
        OK_LAUNCH(filter_kernel<<<2, 5>>>(y.get(), X.get(), 10));
        for (int i = 0; i < 8; i++)
            want[i] = device ? (20 + x[i + 1] - x[i + 2]) / 2 : 30 + x[i] + 2 * x[i + 1] + x[i + 2];
        CHECK(fetch(y, 8) == want);
    }
    Floats got(3, -1);
    OK(cudaMemcpyFromSymbol(got.data(), filter, 8, 4));
    CHECK(got == Floats{1, -1, -1});
}

// Variables in every spelling: of the file alone, constant, declared before they are defined
static __constant__ int of_file = 1;
__constant__ static int of_file_too = 2;
const __constant__ int fixed = 3;
__device__ const int fixed_too[] = {4, 5};
inline __device__ int of_header = 6, of_header_too[2] = {7, 8};
extern __device__ int defined_later;
__device__ static int later() { return defined_later; }
__device__ int defined_later = 9;
extern __constant__ int declared[2], declared_too;
__constant__ int declared[2] = {10, 11};
__constant__ int declared_too = 12;
__global__ void spellings_kernel(int *y) {
    of_file_too++;
    y[0] = of_file + of_file_too + fixed + fixed_too[0] + fixed_too[1] + of_header;
    y[1] = of_header_too[0] + of_header_too[1] + later() + declared[0] + declared[1] + declared_too;
}
TEST_CASE("__device__, __constant__: static, const, inline and extern variables") {
    auto y = device_copy(std::vector<int>(2));
    OK_LAUNCH(spellings_kernel<<<1, 1>>>(y.get()));
    CHECK(fetch(y, 2) == std::vector<int>{22, 57});
    int two = 0;
    OK(cudaMemcpyFromSymbol(&two, of_file_too, sizeof two));
    CHECK(two == 3);
}

__device__ volatile unsigned calls;
__device__ float grid[2][3], *row = nullptr;
__global__ void count_calls_kernel() {
    atomicAdd((unsigned *)&calls, 1);
    if (blockIdx.x + threadIdx.x == 0) row = grid[1];
}
__global__ void row_kernel() { row[threadIdx.x] = threadIdx.x + calls; }
TEST_CASE("__device__: a counter of each device, pointers to variables") {
    for (int device : {0, 1}) {
        TestStream stream(device);
        OnDevice current(device);
        OK_LAUNCH(count_calls_kernel<<<device + 5, 4, 0, stream>>>());
        OK_LAUNCH(row_kernel<<<1, 3, 0, stream>>>());
        unsigned n = 0;
        OK(cudaMemcpyFromSymbolAsync(&n, calls, sizeof n, 0, down, stream));
        CHECK(n == 4 * (device + 5u));
        float *p = nullptr, got[2] = {};
        size_t bytes = 0;
        OK(cudaGetSymbolAddress((void **)&p, grid));
        OK(cudaGetSymbolSize(&bytes, grid));
        CHECK(bytes == 24);
        OK(cudaMemset(p, 0, 12));
        OK_LAUNCH(plus_kernel<<<1, 6>>>(p, 1)); // as any memory of the device
        OK(cudaMemcpy(got, p + 2, 8, down));
        CHECK(got[0] == 1);
        CHECK(got[1] == 1 + n);
        OK(cudaMemcpyToSymbolAsync(calls, &bytes, 4, 0, up, stream));
        OK(cudaStreamSynchronize(stream));
        OK(cudaMemcpyFromSymbol(&n, calls, sizeof n));
        CHECK(n == 24);
    }
    float x = 0, *p = nullptr, list[9] = {};
    const cudaError_t no_symbol = cudaErrorInvalidSymbol;
    REFUSED(no_symbol, cudaMemcpyToSymbol(&scale, &x, 4), "cudaMemcpyToSymbol: pass the name of");
    REFUSED(no_symbol, cudaMemcpyFromSymbol(&x, "scale", 4), "cudaMemcpyFromSymbol: pass the name");
    REFUSED(value, cudaMemcpyToSymbol(filter, list, 16),
            "cudaMemcpyToSymbol, destination: 16 bytes at offset 0 overrun the 12 bytes that");
    REFUSED(value, cudaMemcpy(filter, list, 12, up),
            "cudaMemcpy, destination: filter is a device variable, which has no address");
    REFUSED_LAUNCH(value, assign_kernel<<<1, 1>>>(&scale, 1), "argument 1: scale is a device vari");
    OK(cudaGetSymbolAddress((void **)&p, scale));
    REFUSED(value, cudaFree(p), "was not returned by cudaMalloc");
}

// --- mistakes

TEST_CASE("cudaMemcpyPeer, cudaMemcpyPeerAsync: wrong devices and sizes are refused") {
    const Memories m;
    REFUSED(cudaErrorInvalidDevice, cudaMemcpyPeer(m.x1, 2, m.x0, 0, 4),
            "cudaMemcpyPeer: cannot copy from device 0 to device 2: the device count is 2");
    REFUSED(cudaErrorInvalidDevice, cudaMemcpyPeerAsync(m.x1, 1, m.x0, -1, 4),
            "cudaMemcpyPeerAsync: cannot copy from device -1 to device 1: the device count is 2");
    REFUSED(value, cudaMemcpyPeer(m.x1, 0, m.x0, 1, 4), "cudaMemcpyPeer, destination", on_1_not_0);
    REFUSED(value, cudaMemcpyPeer(m.x1, 1, m.x0, 1, 4), "cudaMemcpyPeer, source", on_0_not_1);
    REFUSED(value, cudaMemcpyPeer(m.x1, 1, m.y0 + 1, 0, 36),
            "cudaMemcpyPeer, source" + overrun(36, 4), "allocated on device 0");
    REFUSED(value, cudaMemcpyPeerAsync(m.y1, 1, m.x0, 0, 40),
            "cudaMemcpyPeerAsync, destination" + overrun(), "allocated on device 1");
    REFUSED(value, cudaMemcpyPeer(m.x1, 1, m.pinned_host, 0, 16), "cudaMemcpyPeer, source",
            "is pinned host memory, not memory of device 0");
}

TEST_CASE("cudaMemcpy, cudaMemcpyAsync, cudaMemset: wrong memory and sizes are refused") {
    Memories m;
    const std::string allocate = on_host + ": allocate it with cudaMalloc";
    float x = 0;
    REFUSED(value, cudaMemcpy(m.y0, m.host, 40, up), "cudaMemcpy, destination" + overrun(),
            "allocated on device 0");
    REFUSED(value, cudaMemcpyAsync(m.x0, m.y0, 40, within), "cudaMemcpyAsync, source" + overrun());
    REFUSED(value, cudaMemset(m.y0, 0, 40), "cudaMemset", overrun());
    REFUSED(value, cudaMemset(&x, 0, 4), "cudaMemset", on_host);
    REFUSED(value, cudaMemcpy(m.host, &x, 4, up), "cudaMemcpy, destination", allocate);
    REFUSED(value, cudaMemcpy(m.host, &x, 4, down), "cudaMemcpy, source", allocate);
    REFUSED(value, cudaMemcpy(m.x0, m.x1, 4, up), "cudaMemcpy: the source",
            "is memory of device 1, not of the host");
    REFUSED(value, cudaMemcpy(m.x0, m.y0, 4, down), "cudaMemcpy: the destination",
            "is memory of device 0, not of the host");
    REFUSED(value, cudaMemcpy(m.x0, m.y1, 40, within), "cudaMemcpy, source" + overrun(),
            "allocated on device 1");
    REFUSED(value, cudaMemset(m.x1, 0, 4), "cudaMemset", on_1_not_0);
    REFUSED(value, cudaMemcpyAsync(m.host, m.freed0, 4, down), "cudaMemcpyAsync, source",
            "is memory of device 0 that extras/cpu/tests/tests.h:", "has freed");
    OnDevice current(1);
    REFUSED(value, cudaMemcpy(m.host, m.y1 + 8, 8, down), "cudaMemcpy, source" + overrun(8, 32),
            "allocated on device 1");
}

TEST_CASE("copies, launches: a null pointer is named, but where it is not used it is no mistake") {
    Memories m;
    const std::string null = ": the pointer is null: is a tensor or vector empty";
    REFUSED(value, cudaMemcpy(nullptr, m.host, 4, up), "cudaMemcpy, destination" + null);
    REFUSED(value, cudaMemcpy(m.x0, nullptr, 4, up), "cudaMemcpy, source" + null);
    REFUSED(value, cudaMemcpyPeerAsync(m.x1, 1, nullptr, 0, 4),
            "cudaMemcpyPeerAsync, source" + null);
    REFUSED(value, cudaMemcpyPeer(nullptr, 1, m.x0, 0, 4), "cudaMemcpyPeer, destination" + null);
    REFUSED(value, cudaMemset(nullptr, 0, 4), "cudaMemset" + null);
    OK(cudaMemcpyAsync(nullptr, nullptr, 0, down));
    OK(cudaMemcpyPeerAsync(nullptr, 1, nullptr, 0, 0));
    OK(cudaMemcpyPeer(nullptr, 1, nullptr, 0, 0));
    OK(cudaMemset(nullptr, 0, 0));
    OK_LAUNCH(line_kernel<<<1, 8>>>(Line{nullptr, nullptr, 1, 0, 0}, nullptr, false, 8));
    OK(cudaDeviceSynchronize());
}

TEST_CASE("cudaFree, cudaFreeHost, devices, events, functions: what is wrong is refused") {
    Memories m;
    const cudaError_t device = cudaErrorInvalidDevice;
    REFUSED(value, cudaFree(m.host), "cudaFree:", "was not returned by cudaMalloc");
    REFUSED(value, cudaFree(m.x0 + 1), "cudaFree:", "was not returned by cudaMalloc");
    REFUSED(value, cudaFree(m.freed1),
            "cudaFree:", "on device 1 was already freed by extras/cpu/tests/tests.h:");
    float *twice = m.pinned_host;
    m.fixed.reset();
    REFUSED(value, cudaFreeHost(twice), "cudaFreeHost:", "not returned by cudaMallocHost");
    {
        auto x = floats_on(0, 1);
        TestStream stream;
        float *in_use = nullptr;
        OK(cudaMallocHost(&in_use, one_float));
        Hold hold(stream, x.get());
        OK(cudaMemcpyAsync(in_use, x.get(), one_float, down, stream));
        REFUSED(value, cudaFreeHost(in_use), "cudaFreeHost:",
                "is still in use by the operation that " __FILE__ ":",
                " enqueued: wait for its stream first");
        REFUSED(value, cudaFreeHost(hold.go.get()),
                "is still in use by the operation that extras/cpu/tests/tests.h:");
        hold.release_and_wait_for(stream);
        CHECK(*in_use == 5);
        OK(cudaFreeHost(in_use));
    }
    REFUSED(device, cudaSetDevice(2), "cudaSetDevice: there is no device 2: the device count is 2");
    int can;
    REFUSED(device, cudaDeviceCanAccessPeer(&can, 0, 2),
            "cudaDeviceCanAccessPeer: there is no device 0 or no device 2: the device count is 2");
    REFUSED(device, cudaDeviceEnablePeerAccess(0, 0),
            "cudaDeviceEnablePeerAccess: device 0 cannot have device 0 as a peer");
    TestEvent event;
    TestStream stream(1);
    REFUSED(cudaErrorInvalidResourceHandle, cudaEventRecord(event, stream),
            "cudaEventRecord: the event belongs to device 0, the stream to device 1");
    REFUSED(value, cudaLaunchHostFunc(stream, nullptr, nullptr), "cudaLaunchHostFunc: the func");
}

TEST_CASE("null pointers for results, flags that do not exist: are refused") {
    const std::string null = ": the pointer to its result is null";
    int n = 0, *const none = nullptr;
    size_t bytes = 0;
    float *x = nullptr;
    cudaStream_t stream = nullptr;
    cudaEvent_t event = nullptr;
    TestEvent begin, end, on_1(1);
    REFUSED(value, cudaGetDevice(nullptr), "cudaGetDevice" + null);
    REFUSED(value, cudaGetDeviceCount(nullptr), "cudaGetDeviceCount" + null);
    REFUSED(value, cudaGetDeviceProperties(nullptr, 0), "cudaGetDeviceProperties" + null);
    REFUSED(value, cudaDeviceGetAttribute(nullptr, cudaDevAttrWarpSize, 0), null);
    REFUSED(value, cudaDeviceCanAccessPeer(nullptr, 0, 1), "cudaDeviceCanAccessPeer" + null);
    REFUSED(value, cudaMalloc((void **)nullptr, 4), "cudaMalloc" + null);
    REFUSED(value, cudaMalloc((float **)nullptr, 4), "cudaMalloc" + null);
    REFUSED(value, cudaMallocAsync((float **)nullptr, 4, nullptr), "cudaMallocAsync" + null);
    REFUSED(value, cudaMallocManaged((float **)nullptr, 4), "cudaMallocManaged" + null);
    REFUSED(value, cudaMallocHost((float **)nullptr, 4), "cudaMallocHost" + null);
    REFUSED(value, cudaHostAlloc((float **)nullptr, 4, 0), "cudaMallocHost" + null);
    REFUSED(value, cudaMallocPitch(&x, nullptr, 4, 4), "cudaMallocPitch" + null);
    REFUSED(value, cudaMemGetInfo(nullptr, &bytes), "cudaMemGetInfo" + null);
    REFUSED(value, cudaGetSymbolSize(nullptr, target), "cudaGetSymbolSize" + null);
    REFUSED(value, cudaGetSymbolAddress(nullptr, target), "cudaGetSymbolAddress" + null);
    REFUSED(value, cudaStreamCreate(nullptr), "cudaStreamCreate" + null);
    REFUSED(value, cudaEventCreate(nullptr), "cudaEventCreate" + null);
    REFUSED(value, cudaEventElapsedTime(nullptr, begin, end), "cudaEventElapsedTime" + null);
    REFUSED(value, cudaOccupancyMaxActiveBlocksPerMultiprocessor(none, empty_kernel, 32, 0), null);
    REFUSED(value, cudaOccupancyMaxPotentialBlockSize(none, &n, empty_kernel), null);
    REFUSED(value, cudaStreamCreateWithFlags(&stream, 2),
            "cudaStreamCreateWithFlags: invalid flags 2");
    REFUSED(value, cudaEventCreateWithFlags(&event, 8),
            "cudaEventCreateWithFlags: invalid flags 8");
    REFUSED(value, cudaHostAlloc(&x, 4, 8), "cudaHostAlloc: invalid flags 8");
    REFUSED(value, cudaHostRegister(&n, 4, 16), "cudaHostRegister: invalid flags 16");
    REFUSED(value, cudaMallocManaged(&x, 4, 0),
            "cudaMallocManaged: cannot allocate 4 bytes with flags 0");
    REFUSED(value, cudaMallocManaged(&x, 0),
            "cudaMallocManaged: cannot allocate 0 bytes with flags 1");
    REFUSED(value, cudaStreamWaitEvent(nullptr, begin, 2),
            "cudaStreamWaitEvent: flags are 2, but must be 0");
    float ms = 0;
    OK(cudaEventRecord(begin));
    OnDevice{1}, OK(cudaEventRecord(on_1));
    REFUSED(cudaErrorInvalidResourceHandle, cudaEventElapsedTime(&ms, begin, on_1),
            "cudaEventElapsedTime: the start belongs to device 0 and the end to device 1");
}

// --- programs

static void out_of_memory() {
    setenv("CUDA_CPU_MEMORY", "16", 1);                         // MiB per device
    float *p = memory(0, 3 << 20), *q = memory(1, 4 << 20), *r; // 12 MiB, 16 MiB
    OK(cudaFree(p));
    p = memory(0, 3 << 20);
    OK(cudaFree(q));
    WRONG_HERE(OK(cudaMalloc(&r, 5 << 20)), _exit(0));
}
static void unchecked_allocation() {
    setenv("CUDA_CPU_MEMORY", "8", 1);
    memory(1, 1 << 20);
    OnDevice current(1);
    float *p = nullptr, x = 0;
    cudaMalloc(&p, 20 << 20);
    WRONG_HERE(OK(cudaMemcpy(&x, p, 4, down)));
}
// CUDA_CPU_PEERS=0: the host waits in a copy between devices, as for a driver that stages it.
static void staged_copies() {
    setenv("CUDA_CPU_PEERS", "0", 1);
    auto x = floats_on(0, 1), y = floats_on(1, 1);
    int can = -1;
    OK(cudaDeviceCanAccessPeer(&can, 0, 1));
    expect(can == 0, "access to a peer", can);
    TestStream stream;
    static bool called = false;
    auto call = [](void *) {
        usleep(20000);
        called = true;
    };
    assign_kernel<<<1, 1, 0, stream>>>(x.get(), 3);
    OK(cudaLaunchHostFunc(stream, call, nullptr));
    OK(cudaMemcpyPeerAsync(y.get(), 1, x.get(), 0, one_float, stream));
    expect(called, "what was queued before has been done", called);
    OnDevice current(1);
    expect(fetch(y, 1)[0] == 3, "copied", fetch(y, 1)[0]);
}

static const bool right_memory = add(right_programs, {
    {"copies that the host stages", staged_copies},
});
static const bool wrong_memory = add(wrong_programs, {
    WRONG("out of memory", out_of_memory(), "out of memory", "cudaErrorMemoryAllocation"),
    WRONG("out of memory, unchecked", unchecked_allocation(),
          "cudaMemcpy, source: the pointer is null: cudaMalloc in " __FILE__ ":",
          " failed, which asked for 20971520 bytes when device 1 had 4194304 free"),
});
