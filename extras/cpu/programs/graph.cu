// A graph: the steps of a solver are captured once and launched again and again. A fork and a join
// in it are events, as between streams.
// prints: after the capture: 0 0 0 0
// prints: nodes: 4
// prints: after 1 launch: 1 2 3 4, sum 10
// prints: after 5 launches: 5 10 15 20, sum 50
#include "check.h"

__global__ void step(int *x) { x[threadIdx.x] += threadIdx.x + 1; }
__global__ void clear(int *sum) { *sum = 0; }
__global__ void add_up(int *sum, const int *x) { atomicAdd(sum, x[threadIdx.x]); }

int main() {
    int *x, *sum, *got;
    CHECK(cudaMalloc(&x, 4 * sizeof *x));
    CHECK(cudaMalloc(&sum, sizeof *sum));
    CHECK(cudaMallocHost(&got, sizeof *got));
    CHECK(cudaMemset(x, 0, 4 * sizeof *x));
    cudaStream_t stream, other;
    cudaEvent_t fork, join;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamCreate(&other));
    CHECK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    CHECK(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));

    cudaGraph_t graph;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK(cudaEventRecord(fork, stream));
    CHECK(cudaStreamWaitEvent(other, fork, 0));
    step<<<1, 4, 0, stream>>>(x);
    clear<<<1, 1, 0, other>>>(sum);
    CHECK(cudaEventRecord(join, other));
    CHECK(cudaStreamWaitEvent(stream, join, 0));
    add_up<<<1, 4, 0, stream>>>(sum, x);
    CHECK(cudaMemcpyAsync(got, sum, sizeof *got, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamEndCapture(stream, &graph));

    int host[4];
    CHECK(cudaMemcpy(host, x, sizeof host, cudaMemcpyDeviceToHost));
    printf("after the capture: %d %d %d %d\n", host[0], host[1], host[2], host[3]);
    size_t nodes = 0;
    CHECK(cudaGraphGetNodes(graph, nullptr, &nodes));
    printf("nodes: %zu\n", nodes);

    cudaGraphExec_t exec;
    CHECK(cudaGraphInstantiate(&exec, graph, NULL, NULL, 0));
    CHECK(cudaGraphDestroy(graph));
    for (int launches = 1; launches <= 5; launches++) {
        CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaStreamSynchronize(stream));
        if (launches % 4 != 1) continue;
        CHECK(cudaMemcpy(host, x, sizeof host, cudaMemcpyDeviceToHost));
        printf("after %d launch%s: %d %d %d %d, sum %d\n", launches, launches > 1 ? "es" : "",
               host[0], host[1], host[2], host[3], *got);
    }
    CHECK(cudaFreeHost(got));
    CHECK(cudaFree(x));
    CHECK(cudaFree(sum));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaEventDestroy(fork));
    CHECK(cudaEventDestroy(join));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaStreamDestroy(other));
}
