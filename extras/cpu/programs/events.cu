// Events: one stream waits for another, and the time between two events of a stream is measured.
// prints: 1 + 2 = 3
// prints: the time is positive
// prints: an event that was recorded and reached: no error
#include "check.h"

__global__ void add(int *x, int value, int turns) {
    for (int i = 0; i < turns; i++) *x += value;
}

int main() {
    int *x, got = 0;
    cudaStream_t first, second;
    cudaEvent_t begin, end, ready;
    CHECK(cudaMalloc(&x, sizeof(int)));
    CHECK(cudaMemset(x, 0, sizeof(int)));
    CHECK(cudaDeviceSynchronize()); // streams that do not wait for the default stream follow
    CHECK(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    CHECK(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming));

    CHECK(cudaEventRecord(begin, first));
    add<<<1, 1, 0, first>>>(x, 1, 1);
    CHECK(cudaEventRecord(end, first));
    CHECK(cudaEventRecord(ready, first));
    CHECK(cudaStreamWaitEvent(second, ready, 0)); // without it, a race
    add<<<1, 1, 0, second>>>(x, 1, 2);
    CHECK(cudaMemcpyAsync(&got, x, sizeof got, cudaMemcpyDeviceToHost, second));
    CHECK(cudaStreamSynchronize(second));
    printf("1 + 2 = %d\n", got);

    float milliseconds = -1;
    CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
    printf("the time is %s\n", milliseconds >= 0 ? "positive" : "negative");
    printf("an event that was recorded and reached: %s\n",
           cudaGetErrorString(cudaEventQuery(ready)));
    for (cudaEvent_t event : {begin, end, ready}) CHECK(cudaEventDestroy(event));
    for (cudaStream_t stream : {first, second}) CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(x));
}
