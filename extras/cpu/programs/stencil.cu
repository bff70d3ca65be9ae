// A one-dimensional stencil: each element becomes the sum of its 7 neighbours. A block loads its
// elements and a halo of 3 on each side once.
// prints: y[3] = 21, y[500] = 3500, y[996] = 6972
// prints: wrong 0
#include "check.h"
#include <vector>

constexpr int radius = 3, threads = 128;

__global__ void stencil(int *y, const int *x, int n) {
    __shared__ int s[threads + 2 * radius];
    const int i = blockIdx.x * threads + threadIdx.x, at = threadIdx.x + radius;
    s[at] = i < n ? x[i] : 0;
    if (threadIdx.x < radius) {
        s[at - radius] = i >= radius ? x[i - radius] : 0;
        s[at + threads] = i + threads < n ? x[i + threads] : 0;
    }
    __syncthreads();
    int sum = 0;
    for (int d = -radius; d <= radius; d++) sum += s[at + d];
    if (i < n) y[i] = sum;
}

int main() {
    const int n = 1000;
    std::vector<int> x(n), y(n);
    for (int i = 0; i < n; i++) x[i] = i;
    int *d_x, *d_y, wrong = 0;
    CHECK(cudaMalloc(&d_x, n * sizeof(int)));
    CHECK(cudaMalloc(&d_y, n * sizeof(int)));
    CHECK(cudaMemcpy(d_x, x.data(), n * sizeof(int), cudaMemcpyHostToDevice));
    stencil<<<(n + threads - 1) / threads, threads>>>(d_y, d_x, n);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(y.data(), d_y, n * sizeof(int), cudaMemcpyDeviceToHost));
    for (int i = 0; i < n; i++) {
        int want = 0;
        for (int k = i - radius; k <= i + radius; k++) want += k >= 0 && k < n ? x[k] : 0;
        wrong += y[i] != want;
    }
    printf("y[3] = %d, y[500] = %d, y[996] = %d\nwrong %d\n", y[3], y[500], y[996], wrong);
    CHECK(cudaFree(d_x));
    CHECK(cudaFree(d_y));
}
