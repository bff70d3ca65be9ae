// y = A x, a warp for each row: its lanes read neighbouring numbers.
// prints: y[0] = 328350, y[1] = 333300, y[36] = 506550
#include "check.h"
#include <vector>

__global__ void multiply(float *y, const float *A, const float *x, int rows, int columns) {
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return; // all lanes of the warp
    float sum = 0;
    for (int c = lane; c < columns; c += 32) sum += A[row * columns + c] * x[c];
    for (int half = 16; half > 0; half /= 2) sum += __shfl_down_sync(~0u, sum, half);
    if (lane == 0) y[row] = sum;
}

int main() {
    const int rows = 37, columns = 100;
    std::vector<float> A(rows * columns), x(columns), y(rows);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) A[r * columns + c] = r + c;
    for (int c = 0; c < columns; c++) x[c] = c;
    float *d_A, *d_x, *d_y;
    CHECK(cudaMalloc(&d_A, A.size() * sizeof(float)));
    CHECK(cudaMalloc(&d_x, columns * sizeof(float)));
    CHECK(cudaMalloc(&d_y, rows * sizeof(float)));
    CHECK(cudaMemcpy(d_A, A.data(), A.size() * sizeof(float), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(d_x, x.data(), columns * sizeof(float), cudaMemcpyHostToDevice));
    multiply<<<(rows + 3) / 4, 128>>>(d_y, d_A, d_x, rows, columns);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(y.data(), d_y, rows * sizeof(float), cudaMemcpyDeviceToHost));
    printf("y[0] = %.0f, y[1] = %.0f, y[36] = %.0f\n", y[0], y[1], y[36]);
    for (float *p : {d_A, d_x, d_y}) CHECK(cudaFree(p));
}
