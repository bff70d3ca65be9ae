// Pinned host memory, which a kernel reads and writes itself: registered, or from cudaMallocHost.
// prints: 100 101 102 ... 355
// prints: calls of the kernel's threads: 256
#include "check.h"
#include <vector>

__global__ void add(int *x, int value, unsigned *calls) {
    x[blockIdx.x * blockDim.x + threadIdx.x] += value;
    atomicAdd(calls, 1u);
}

int main() {
    const int n = 256;
    unsigned *calls;
    std::vector<int> list(n);
    for (int i = 0; i < n; i++) list[i] = i;
    CHECK(cudaMallocHost(&calls, sizeof *calls));
    *calls = 0;
    CHECK(cudaHostRegister(list.data(), n * sizeof(int), cudaHostRegisterDefault));
    add<<<4, 64>>>(list.data(), 100, calls);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    printf("%d %d %d ... %d\n", list[0], list[1], list[2], list[n - 1]);
    printf("calls of the kernel's threads: %u\n", *calls);
    CHECK(cudaHostUnregister(list.data()));
    CHECK(cudaFreeHost(calls));
}
