// Shared memory that is declared outside of all functions, static and dynamic
// prints: 125 1
#include "check.h"

__shared__ float tile[4][8];
__shared__ int reversed[32];
extern __shared__ double twice[];

__device__ float of_tile(int t) { return tile[t / 8][t % 8]; }
__device__ void fill(int *list) { list[31 - threadIdx.x] = threadIdx.x; }
__global__ void sum_kernel(float *y) {
    const int t = threadIdx.x;
    tile[t / 8][t % 8] = t;
    fill(reversed);
    twice[t] = 2 * t;
    __syncthreads();
    y[t] = of_tile(31 - t) + reversed[t] + twice[31 - t] + *(reversed + 30);
}
int main() {
    float *y, h[32];
    CHECK(cudaMalloc(&y, sizeof h));
    sum_kernel<<<1, 32, 32 * sizeof(double)>>>(y);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(h, y, sizeof h, cudaMemcpyDeviceToHost));
    printf("%g %g\n", h[0], h[31]);
}
