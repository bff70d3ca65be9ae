// How often each digit comes: counted in shared memory first, so that few atomics meet in global
// memory.
// prints: 0: 1234
// prints: 1: 1234
// prints: 2: 1234
// prints: 3: 1234
// prints: 4: 1234
// prints: 5: 1234
// prints: 6: 1234
// prints: 7: 1234
// prints: 8: 1234
// prints: 9: 1234
#include "check.h"
#include <string>

__global__ void count(unsigned *counts, const char *text, int n) {
    __shared__ unsigned mine[10];
    if (threadIdx.x < 10) mine[threadIdx.x] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&mine[text[i] - '0'], 1u);
    __syncthreads();
    if (threadIdx.x < 10) atomicAdd(&counts[threadIdx.x], mine[threadIdx.x]);
}

int main() {
    std::string text;
    for (int i = 0; i < 12340; i++) text += '0' + i * 7 % 10;
    char *d_text;
    unsigned *d_counts, counts[10];
    CHECK(cudaMalloc(&d_text, text.size()));
    CHECK(cudaMalloc(&d_counts, sizeof counts));
    CHECK(cudaMemcpy(d_text, text.data(), text.size(), cudaMemcpyHostToDevice));
    CHECK(cudaMemset(d_counts, 0, sizeof counts));
    count<<<8, 64>>>(d_counts, d_text, (int)text.size());
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(counts, d_counts, sizeof counts, cudaMemcpyDeviceToHost));
    for (int digit = 0; digit < 10; digit++) printf("%d: %u\n", digit, counts[digit]);
    CHECK(cudaFree(d_text));
    CHECK(cudaFree(d_counts));
}
