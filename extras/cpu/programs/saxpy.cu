// y = a * x + y in a grid-stride loop: the same kernel for any n and any grid.
// prints: 1 x 32 threads: y[12345] = 24691
// prints: 7 x 96 threads: y[12345] = 49381
// prints: 64 x 256 threads: y[12345] = 74071
#include "check.h"
#include <vector>

__global__ void saxpy(int n, float a, const float *x, float *y) {
    const int stride = gridDim.x * blockDim.x;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) y[i] += a * x[i];
}

int main() {
    const int n = 20000;
    std::vector<float> x(n), y(n, 1);
    for (int i = 0; i < n; i++) x[i] = i;
    float *d_x, *d_y;
    CHECK(cudaMalloc(&d_x, n * sizeof(float)));
    CHECK(cudaMalloc(&d_y, n * sizeof(float)));
    CHECK(cudaMemcpy(d_x, x.data(), n * sizeof(float), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(d_y, y.data(), n * sizeof(float), cudaMemcpyHostToDevice));
    const int grids[3][2] = {{1, 32}, {7, 96}, {64, 256}};
    for (const int *grid : grids) {
        saxpy<<<grid[0], grid[1]>>>(n, 2.0f, d_x, d_y);
        CHECK(cudaGetLastError());
        CHECK(cudaMemcpy(y.data(), d_y, n * sizeof(float), cudaMemcpyDeviceToHost));
        printf("%d x %d threads: y[12345] = %.0f\n", grid[0], grid[1], y[12345]);
    }
    CHECK(cudaFree(d_x));
    CHECK(cudaFree(d_y));
}
