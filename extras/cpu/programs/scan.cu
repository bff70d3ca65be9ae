// Inclusive prefix sums of any length after Hillis and Steele: in each block, then over the blocks'
// sums, then these are added.
// prints: y[0] = 1, y[1023] = 1024, y[1024] = 1025, y[9999] = 10000
#include "check.h"
#include <vector>

constexpr int threads = 256;

__global__ void scan_blocks(int *y, int *sums, const int *x, int n) {
    __shared__ int s[2][threads];
    const int t = threadIdx.x, i = blockIdx.x * threads + t;
    int now = 0;
    s[now][t] = i < n ? x[i] : 0;
    for (int distance = 1; distance < threads; distance *= 2) {
        __syncthreads();
        s[!now][t] = s[now][t] + (t >= distance ? s[now][t - distance] : 0);
        now = !now;
    }
    if (i < n) y[i] = s[now][t];
    if (t == threads - 1) sums[blockIdx.x] = s[now][t];
}
__global__ void add_sums(int *y, const int *sums, int n) { // of all blocks before
    const int i = blockIdx.x * threads + threadIdx.x;
    if (blockIdx.x > 0 && i < n) y[i] += sums[blockIdx.x - 1];
}

// y = prefix sums of x, both of length n
void scan(int *y, const int *x, int n) {
    const int blocks = (n + threads - 1) / threads;
    int *sums;
    CHECK(cudaMalloc(&sums, blocks * sizeof(int)));
    scan_blocks<<<blocks, threads>>>(y, sums, x, n);
    CHECK(cudaGetLastError());
    if (blocks > 1) {
        int *before;
        CHECK(cudaMalloc(&before, blocks * sizeof(int)));
        scan(before, sums, blocks);
        add_sums<<<blocks, threads>>>(y, before, n);
        CHECK(cudaGetLastError());
        CHECK(cudaFree(before));
    }
    CHECK(cudaFree(sums));
}

int main() {
    const int n = 10000;
    std::vector<int> x(n, 1), y(n);
    int *d_x, *d_y;
    CHECK(cudaMalloc(&d_x, n * sizeof(int)));
    CHECK(cudaMalloc(&d_y, n * sizeof(int)));
    CHECK(cudaMemcpy(d_x, x.data(), n * sizeof(int), cudaMemcpyHostToDevice));
    scan(d_y, d_x, n);
    CHECK(cudaMemcpy(y.data(), d_y, n * sizeof(int), cudaMemcpyDeviceToHost));
    printf("y[0] = %d, y[1023] = %d, y[1024] = %d, y[9999] = %d\n", y[0], y[1023], y[1024],
           y[9999]);
    CHECK(cudaFree(d_x));
    CHECK(cudaFree(d_y));
}
