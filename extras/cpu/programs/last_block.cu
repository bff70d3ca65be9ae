// A sum in one launch: the block that is the last to finish adds up what all others have written.
// prints: sum = 1048576, and again 1048576
#include "check.h"

constexpr int threads = 128, blocks = 32;
__device__ unsigned finished = 0;

__global__ void sum(int *total, int *partial, int each) {
    __shared__ int s[threads];
    __shared__ bool last;
    s[threadIdx.x] = each;
    for (int half = threads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) s[threadIdx.x] += s[threadIdx.x + half];
    }
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = s[0];
        __threadfence(); // before the counter says that it is there
        last = atomicInc(&finished, blocks - 1) == blocks - 1; // which begins again at 0
    }
    __syncthreads();
    if (!last || threadIdx.x > 0) return;
    __threadfence();
    int all = 0;
    for (int b = 0; b < blocks; b++) all += partial[b];
    *total = all;
}

int main() {
    int *d_total, *d_partial, total[2] = {};
    CHECK(cudaMalloc(&d_total, sizeof(int)));
    CHECK(cudaMalloc(&d_partial, blocks * sizeof(int)));
    for (int &t : total) {
        sum<<<blocks, threads>>>(d_total, d_partial, 256);
        CHECK(cudaGetLastError());
        CHECK(cudaMemcpy(&t, d_total, sizeof t, cudaMemcpyDeviceToHost));
    }
    printf("sum = %d, and again %d\n", total[0], total[1]);
    CHECK(cudaFree(d_total));
    CHECK(cudaFree(d_partial));
}
