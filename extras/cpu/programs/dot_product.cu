// The dot product of two vectors: a partial sum in each thread, a tree in each block, the blocks'
// sums on the host.
// prints: dot = 332833500
#include "check.h"
#include <vector>

constexpr int threads = 128, blocks = 16;

__global__ void dot(double *partial, const float *x, const float *y, int n) {
    __shared__ double sums[threads];
    double sum = 0;
    for (int i = blockIdx.x * threads + threadIdx.x; i < n; i += blocks * threads)
        sum += (double)x[i] * y[i];
    sums[threadIdx.x] = sum;
    for (int half = threads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0) partial[blockIdx.x] = sums[0];
}

int main() {
    const int n = 1000;
    std::vector<float> x(n);
    for (int i = 0; i < n; i++) x[i] = i; // the sum of i * i is (n - 1) n (2n - 1) / 6
    float *d_x;
    double *d_partial, partial[blocks], sum = 0;
    CHECK(cudaMalloc(&d_x, n * sizeof(float)));
    CHECK(cudaMalloc(&d_partial, sizeof partial));
    CHECK(cudaMemcpy(d_x, x.data(), n * sizeof(float), cudaMemcpyHostToDevice));
    dot<<<blocks, threads>>>(d_partial, d_x, d_x, n);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(partial, d_partial, sizeof partial, cudaMemcpyDeviceToHost));
    for (double p : partial) sum += p;
    printf("dot = %.0f\n", sum);
    CHECK(cudaFree(d_x));
    CHECK(cudaFree(d_partial));
}
