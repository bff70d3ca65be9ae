// Softmax of each row: a block finds the greatest number, the sum of exponentials, the quotients.
// prints: row 0: 0.0321 0.0871 0.2369 0.6439
// prints: row 1: 0.2500 0.2500 0.2500 0.2500
// prints: row 2: 0.0000 0.0000 0.0000 1.0000
// prints: each row's sum is 1
#include "check.h"
#include <cmath>

constexpr int threads = 64;

// f of all threads' values, for all threads
template <class F> __device__ float over_block(float value, F f) {
    __shared__ float s[threads];
    __syncthreads(); // the call before may still be reading
    s[threadIdx.x] = value;
    for (int half = threads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) s[threadIdx.x] = f(s[threadIdx.x], s[threadIdx.x + half]);
    }
    __syncthreads();
    return s[0];
}
struct Greater {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
    __device__ float operator()(float a, float b) const { return a + b; }
};
__global__ void softmax(float *y, const float *x, int columns) {
    x += blockIdx.x * columns;
    y += blockIdx.x * columns;
    float greatest = -INFINITY, sum = 0;
    for (int c = threadIdx.x; c < columns; c += threads) greatest = fmaxf(greatest, x[c]);
    greatest = over_block(greatest, Greater());
    for (int c = threadIdx.x; c < columns; c += threads) sum += expf(x[c] - greatest);
    sum = over_block(sum, Sum());
    for (int c = threadIdx.x; c < columns; c += threads) y[c] = expf(x[c] - greatest) / sum;
}

int main() {
    const int rows = 3, columns = 4; // 1000 would overflow without the greatest number
    const float x[rows][columns] = {{1, 2, 3, 4}, {5, 5, 5, 5}, {0, 10, 100, 1000}};
    float y[rows][columns], *d_x, *d_y;
    CHECK(cudaMalloc(&d_x, sizeof x));
    CHECK(cudaMalloc(&d_y, sizeof y));
    CHECK(cudaMemcpy(d_x, x, sizeof x, cudaMemcpyHostToDevice));
    softmax<<<rows, threads>>>(d_y, d_x, columns);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(y, d_y, sizeof y, cudaMemcpyDeviceToHost));
    bool one = true;
    for (int r = 0; r < rows; r++) {
        printf("row %d: %.4f %.4f %.4f %.4f\n", r, y[r][0], y[r][1], y[r][2], y[r][3]);
        one = one && std::fabs(y[r][0] + y[r][1] + y[r][2] + y[r][3] - 1) < 1e-6;
    }
    printf("each row's sum is %s\n", one ? "1" : "not 1");
    CHECK(cudaFree(d_x));
    CHECK(cudaFree(d_y));
}
