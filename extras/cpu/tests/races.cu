// ThreadSanitizer tells a program that lacks one thing, `runtime_tests --wrong 'race: NAME'`, from
// the same program with it, `runtime_tests --wrong 'right: NAME'`.
#include "tests.h"

struct Race {
    bool right;
    float *x = memory(0, 4), *y = memory(1, 4), *host = nullptr; // host: pinned
    cudaStream_t a = new_stream(0), b = new_stream(0), c = new_stream(1);
    explicit Race(bool right) : right(right) { OK(cudaMallocHost(&host, 4 * sizeof(float))); }
};
struct RaceProgram {
    const char *name;
    void (*run)(bool right);
};
static std::vector<RaceProgram> race_programs;

#define RACE(name) RACE_2(__COUNTER__, name)
#define RACE_2(n, name) RACE_3(n, name)
#define RACE_3(n, name)                                                                            \
    struct Race##n : Race {                                                                        \
        void run();                                                                                \
    };                                                                                             \
    static const bool race_added_##n =                                                             \
        (race_programs.push_back({name, [](bool right) { Race##n{Race(right)}.run(); }}), true);   \
    void Race##n::run()

__global__ void neighbour_kernel(float *x, bool right) { // one more barrier: written, then read
    __shared__ float t[4];
    t[threadIdx.x] = threadIdx.x;
    if (right) __syncthreads();
    x[threadIdx.x] = t[3 - threadIdx.x];
}
__global__ void tree_without_barriers_kernel(float *x, bool right) {
    __shared__ float part[8];
    part[threadIdx.x] = 1;
    __syncthreads();
    for (int half = 4; half > 0; half /= 2) {
        if ((int)threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
        if (right) __syncthreads();
    }
    if (threadIdx.x == 0) *x = part[0];
}
RACE("barrier in a tree") { tree_without_barriers_kernel<<<1, 8>>>(x, right); }
RACE("barrier before reading") { neighbour_kernel<<<1, 4>>>(x, right); }
__global__ void loop_kernel(float *x, bool right) { // one more barrier: read, then written
    extern __shared__ float t[];
    for (int i = 0; i < 3; i++) {
        t[threadIdx.x] = i;
        __syncthreads();
        x[threadIdx.x] = t[3 - threadIdx.x];
        if (right) __syncthreads();
    }
}
RACE("barrier before writing again") { loop_kernel<<<1, 4, 16>>>(x, right); }
__global__ void threads_kernel(float *x, bool right) { x[right ? threadIdx.x : 0] = threadIdx.x; }
__global__ void warp_neighbour_kernel(float *x, bool right) { // a shuffle does not order memory
    __shared__ float t[4];
    t[threadIdx.x] = threadIdx.x;
    if (right) __syncwarp();
    else __shfl_sync(0xf, 1, 0);
    x[threadIdx.x] = t[3 - threadIdx.x];
    if (right) __syncwarp();
    t[threadIdx.x] = 0;
}
RACE("__syncwarp before reading") { warp_neighbour_kernel<<<1, 4>>>(x, right); }
RACE("an element for each thread") { threads_kernel<<<1, 2>>>(x, right); }
__global__ void blocks_kernel(float *x, bool right) { x[right ? blockIdx.x : 0] = blockIdx.x; }
RACE("an element for each block") { blocks_kernel<<<2, 1>>>(x, right); }

// Work enqueued on `waiting` from now on starts only when all work now on `stream` has finished.
static void wait_for(cudaStream_t waiting, int device, cudaStream_t stream) {
    cudaEvent_t event = new_event(device, cudaEventDisableTiming);
    OK(cudaEventRecord(event, stream));
    OK(cudaStreamWaitEvent(waiting, event));
}
RACE("event between streams") {
    assign_kernel<<<1, 1, 0, a>>>(x, 1);
    if (right) wait_for(b, 0, a);
    plus_kernel<<<1, 1, 0, b>>>(x, 2);
}
RACE("event recorded after the work") {
    if (!right) wait_for(b, 0, a);
    assign_kernel<<<1, 1, 0, a>>>(x, 1);
    if (right) wait_for(b, 0, a);
    plus_kernel<<<1, 1, 0, b>>>(x, 2);
}
RACE("event before a copy between devices") {
    assign_kernel<<<1, 1, 0, a>>>(x, 1);
    if (right) wait_for(c, 0, a);
    OK(cudaMemcpyPeerAsync(y, 1, x, 0, 4, c));
}
RACE("event after a copy between devices") {
    OK(cudaMemcpyPeerAsync(y, 1, x, 0, 4, c));
    if (right) wait_for(a, 1, c);
    assign_kernel<<<1, 1, 0, a>>>(x, 1);
}
RACE("cudaMemcpyPeer orders, cudaMemcpyPeerAsync does not") {
    assign_kernel<<<1, 1, 0, a>>>(x, 1);
    OK((right ? cudaMemcpyPeer(y, 1, x, 0, 4) : cudaMemcpyPeerAsync(y, 1, x, 0, 4)));
    OnDevice{1}, plus_kernel<<<1, 1, 0, c>>>(y, 1);
}
RACE("cudaMemcpyPeerAsync on the default stream orders streams that block") {
    const unsigned flags = right ? cudaStreamDefault : cudaStreamNonBlocking;
    a = new_stream(0, flags), c = new_stream(1, flags);
    assign_kernel<<<1, 1, 0, a>>>(x, 1);
    OK(cudaMemcpyPeerAsync(y, 1, x, 0, 4));
    OnDevice{1}, plus_kernel<<<1, 1, 0, c>>>(y, 1);
    assign_kernel<<<1, 1>>>(x, 2);
}
RACE("a stream that has nothing to do is no wait for the default stream") {
    b = new_stream(0, cudaStreamDefault);
    assign_kernel<<<1, 1>>>(host, 1);
    OK(cudaStreamSynchronize(right ? nullptr : b));
    *host = 2;
}
RACE("the default stream orders a stream that blocks") {
    a = new_stream(0, right ? cudaStreamDefault : cudaStreamNonBlocking);
    assign_kernel<<<1, 1, 0, a>>>(x, 1);
    plus_kernel<<<1, 1>>>(x, 2);
    plus_kernel<<<1, 1, 0, a>>>(x, 3);
}

__global__ void ready_kernel(float *x, unsigned *ready, bool right) { // a fence before the flag
    if (blockIdx.x == 0) {
        x[0] = 1;
        if (right) __threadfence();
        atomicExch(ready, 1u);
    } else {
        while (!atomicAdd(ready, 0u)) usleep(100);
        x[1] = x[0];
    }
}
RACE("fence before an atomic function tells that all is written") {
    OK(cudaMemset(y = memory(0, 1), 0, 4));
    ready_kernel<<<2, 1>>>(x, (unsigned *)y, right);
}
__global__ void flag_kernel(float *x, volatile int *flag, bool right) {
    if (blockIdx.x == 0) {
        x[0] = 1;
        if (right) __threadfence_system();
        *flag = 1;
    } else {
        while (!*flag) usleep(100);
        x[1] = x[0];
    }
}
RACE("fence before a volatile flag") {
    OK(cudaMemset(y = memory(0, 1), 0, 4));
    flag_kernel<<<2, 1>>>(x, (int *)y, right);
}
__global__ void last_block_kernel(float *x, unsigned *tickets, float *sum, bool right) {
    __shared__ bool last;
    x[4 * blockIdx.x + threadIdx.x] = 1;
    if (right) __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicInc(tickets, gridDim.x) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    if (threadIdx.x == 0) *tickets = 0; // for the next launch
    for (int i = 0; i < 16; i++)
        if (threadIdx.x == 1) *sum += x[i];
}
RACE("fence before the ticket by which the last block is known") {
    x = memory(0, 16), y = memory(0, 2);
    OK(cudaMemset(y, 0, 8));
    for (int i = 0; i < 2; i++) last_block_kernel<<<4, 4>>>(x, (unsigned *)y, y + 1, right);
    float sum = 0;
    OK(cudaMemcpy(&sum, y + 1, 4, down));
    expect(sum == 32, "the sum", sum);
}
__global__ void locked_kernel(float *x, unsigned *locked, bool right) {
    while (atomicCAS(locked, 0u, 1u)) usleep(100);
    *x += 1;
    if (right) __threadfence();
    atomicExch(locked, 0u);
}
RACE("fence before a lock is given back") {
    OK(cudaMemset(x, 0, 4));
    OK(cudaMemset(y = memory(0, 1), 0, 4));
    locked_kernel<<<4, 1>>>(x, (unsigned *)y, right);
}
__global__ void sum_kernel(float *x, bool right) {
    if (right) atomicAdd(x, 1.f);
    else *x += 1;
}
__device__ int turns;
__global__ void turn_kernel(bool right) {
    static int calls;
    if (right) atomicAdd(&turns, 1), atomicAdd(&calls, 1);
    else turns++;
}
RACE("a variable of the device, by two blocks") { turn_kernel<<<2, 1>>>(right); }
RACE("a variable of each device needs no event between devices") {
    turn_kernel<<<1, 1, 0, a>>>(false);
    if (right) OnDevice{1}, turn_kernel<<<1, 1, 0, c>>>(false);
    else turn_kernel<<<1, 1, 0, b>>>(false);
}
template <bool right> __global__ void guess_kernel(unsigned *x) { // of what atomicCAS finds
    std::conditional_t<right, volatile unsigned, unsigned> *at = x;
    unsigned old = *at, guess;
    do guess = old;
    while ((old = atomicCAS(x, guess, guess + 1)) != guess);
}
RACE("volatile for a guess that atomicCAS checks") {
    OK(cudaMemset(x, 0, 4));
    if (right) guess_kernel<true><<<8, 1>>>((unsigned *)x);
    else guess_kernel<false><<<8, 1>>>((unsigned *)x);
}
RACE("atomicAdd by two blocks") {
    OK(cudaMemset(x, 0, 4));
    sum_kernel<<<2, 1>>>(x, right);
}

static void read_by_host(const volatile float *p) { (void)*p; }
RACE("fence before a volatile flag that the host polls") {
    volatile int *flag = (int *)&host[1];
    *flag = 0;
    flag_kernel<<<1, 1, 0, a>>>(host, (int *)flag, right);
    while (!*flag) usleep(100);
    read_by_host(host);
}
RACE("wait before writing pinned memory again") {
    *host = 1;
    cudaEvent_t copied = new_event(0);
    OK(cudaMemcpyAsync(x, host, 4, up, a));
    OK(cudaEventRecord(copied, a));
    if (right) OK(cudaEventSynchronize(copied));
    *host = 2;
}
RACE("wait before reading pinned memory") {
    assign_kernel<<<1, 1, 0, a>>>(x, 1);
    OK(cudaMemcpyAsync(host, x, 4, down, a));
    if (right) OK(cudaStreamSynchronize(a));
    read_by_host(host);
}
RACE("host function after the copy that it reads") {
    assign_kernel<<<1, 1, 0, a>>>(x, 1);
    OK(cudaMemcpyAsync(host, x, 4, down, a));
    auto read = [](void *p) { ((float *)p)[1] = ((float *)p)[0]; };
    OK(cudaLaunchHostFunc(right ? a : b, read, host));
}
RACE("query before reading what a kernel writes") {
    cudaEvent_t set = new_event(0);
    assign_kernel<<<1, 1, 0, a>>>(host, 1);
    OK(cudaEventRecord(set, a));
    while (right && cudaEventQuery(set) == cudaErrorNotReady) usleep(100);
    read_by_host(host);
}

TEST_CASE("races: right programs are told nothing") {
    int status = 0;
    CHECK(output_of("no such name", status).find("no program is called") != std::string::npos);
    CHECK(status != 0);
    for (const RaceProgram &program : race_programs) // in any build
        check_silent(std::string("right: ") + program.name);
}

TEST_CASE("races: ThreadSanitizer sees each missing barrier, event and wait") {
#ifdef CUDA_CPU_TSAN
    for (const RaceProgram &program : race_programs) {
        int status = 0;
        std::string output; // it may miss two accesses at the very same moment: once, not thrice
        for (int i = 0; i < 3 && status == 0; i++)
            output = output_of(std::string("race: ") + program.name, status);
        CAPTURE(std::string(program.name));
        CAPTURE(output);
        CHECK(status != 0);
        CHECK(output.find("ThreadSanitizer: data race") != std::string::npos);
        if (!strncmp(program.name, "barrier", 7)) {
            CHECK(output.find("shared memory") != std::string::npos);
            CHECK(output.find(": is __syncthreads() missing") != std::string::npos);
        }
        if (!strncmp(program.name, "volatile", 8))
            CHECK(output.find(": is an atomic function missing, or volatile for a first guess") !=
                  std::string::npos);
        // the line of one of the two
        CHECK(output.find(__FILE__ ":") != std::string::npos);
    }
#else
    MESSAGE("skipped: needs ThreadSanitizer (make race)");
#endif
}
