// A matrix transposed by tiles in shared memory: reads and writes both go along rows. The 33rd
// column keeps the lanes of a warp out of each other's banks.
// prints: naive: wrong 0
// prints: tiles: wrong 0
#include "check.h"
#include <vector>

constexpr int tile = 32, rows_at_once = 8;

__global__ void naive(float *y, const float *x, int rows, int columns) {
    const int c = blockIdx.x * tile + threadIdx.x;
    for (int k = threadIdx.y; k < tile; k += rows_at_once) {
        const int r = blockIdx.y * tile + k;
        if (r < rows && c < columns) y[c * rows + r] = x[r * columns + c];
    }
}
__global__ void tiled(float *y, const float *x, int rows, int columns) {
    __shared__ float t[tile][tile + 1];
    int c = blockIdx.x * tile + threadIdx.x, r = blockIdx.y * tile + threadIdx.y;
    for (int k = 0; k < tile; k += rows_at_once)
        if (r + k < rows && c < columns) t[threadIdx.y + k][threadIdx.x] = x[(r + k) * columns + c];
    __syncthreads();
    c = blockIdx.y * tile + threadIdx.x, r = blockIdx.x * tile + threadIdx.y;
    for (int k = 0; k < tile; k += rows_at_once)
        if (r + k < columns && c < rows) y[(r + k) * rows + c] = t[threadIdx.x][threadIdx.y + k];
}

int main() {
    const int rows = 100, columns = 70, n = rows * columns;
    std::vector<float> x(n), y(n);
    for (int i = 0; i < n; i++) x[i] = i;
    float *d_x, *d_y;
    CHECK(cudaMalloc(&d_x, n * sizeof(float)));
    CHECK(cudaMalloc(&d_y, n * sizeof(float)));
    CHECK(cudaMemcpy(d_x, x.data(), n * sizeof(float), cudaMemcpyHostToDevice));
    const dim3 grid((columns + tile - 1) / tile, (rows + tile - 1) / tile);
    for (bool tiles : {false, true}) {
        CHECK(cudaMemset(d_y, 0, n * sizeof(float)));
        if (tiles) tiled<<<grid, dim3{tile, rows_at_once}>>>(d_y, d_x, rows, columns);
        else naive<<<grid, dim3{tile, rows_at_once}>>>(d_y, d_x, rows, columns);
        CHECK(cudaGetLastError());
        CHECK(cudaMemcpy(y.data(), d_y, n * sizeof(float), cudaMemcpyDeviceToHost));
        int wrong = 0;
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns; c++) wrong += y[c * rows + r] != x[r * columns + c];
        printf("%s: wrong %d\n", tiles ? "tiles" : "naive", wrong);
    }
    CHECK(cudaFree(d_x));
    CHECK(cudaFree(d_y));
}
