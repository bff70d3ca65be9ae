// What goes wrong, and how a program learns of it: a call returns its error, a launch leaves it for
// cudaGetLastError(), which forgets it. A program that goes on is right again.
// prints: all of the memory, and more: out of memory (cudaErrorMemoryAllocation)
// prints: once more, by cudaGetLastError: out of memory
// prints: and then: no error
// prints: time before any record: invalid resource handle (cudaErrorInvalidResourceHandle)
// prints: the launch after all that: no error, x = 7
#include "check.h"

__global__ void set(int *x) { *x = 7; }

static void say(const char *what, cudaError_t code) {
    printf("%s: %s (%s)\n", what, cudaGetErrorString(code), cudaGetErrorName(code));
}

int main() {
    int *x = nullptr, got = 0;
    say("all of the memory, and more", cudaMalloc(&x, size_t(1) << 50));
    printf("once more, by cudaGetLastError: %s\n", cudaGetErrorString(cudaGetLastError()));
    printf("and then: %s\n", cudaGetErrorString(cudaGetLastError()));

    cudaEvent_t begin, end;
    float milliseconds = 0;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    say("time before any record", cudaEventElapsedTime(&milliseconds, begin, end));
    cudaGetLastError();

    CHECK(cudaMalloc(&x, sizeof(int)));
    set<<<1, 1>>>(x);
    const cudaError_t launch = cudaGetLastError();
    CHECK(cudaMemcpy(&got, x, sizeof got, cudaMemcpyDeviceToHost));
    printf("the launch after all that: %s, x = %d\n", cudaGetErrorString(launch), got);
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
    CHECK(cudaFree(x));
    CHECK(cudaDeviceReset());
}
