// C = A B, one thread per element of C: every thread reads a row of A and a column of B.
// prints: C[0][0] = 12024, C[49][39] = 87417
// prints: wrong 0
#include "check.h"
#include <vector>

// A (m,k)  B (k,n)  C (m,n), row-major
__global__ void matmul(float *C, const float *A, const float *B, int m, int n, int k) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = blockIdx.y * blockDim.y + threadIdx.y;
    if (row >= m || column >= n) return;
    float sum = 0;
    for (int i = 0; i < k; i++) sum += A[row * k + i] * B[i * n + column];
    C[row * n + column] = sum;
}

int main() {
    const int m = 50, n = 40, k = 30;
    std::vector<float> A(m * k), B(k * n), C(m * n);
    for (int i = 0; i < m * k; i++) A[i] = i % 100;
    for (int i = 0; i < k * n; i++) B[i] = i % 64;
    float *d_A, *d_B, *d_C;
    CHECK(cudaMalloc(&d_A, A.size() * sizeof(float)));
    CHECK(cudaMalloc(&d_B, B.size() * sizeof(float)));
    CHECK(cudaMalloc(&d_C, C.size() * sizeof(float)));
    CHECK(cudaMemcpy(d_A, A.data(), A.size() * sizeof(float), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(d_B, B.data(), B.size() * sizeof(float), cudaMemcpyHostToDevice));
    const dim3 block(16, 16), grid((n + 15) / 16, (m + 15) / 16);
    matmul<<<grid, block>>>(d_C, d_A, d_B, m, n, k);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(C.data(), d_C, C.size() * sizeof(float), cudaMemcpyDeviceToHost));
    int wrong = 0;
    for (int row = 0; row < m; row++)
        for (int column = 0; column < n; column++) {
            int want = 0; // whole numbers: exact in float, too
            for (int i = 0; i < k; i++) want += (int)A[row * k + i] * (int)B[i * n + column];
            wrong += C[row * n + column] != want;
        }
    printf("C[0][0] = %g, C[49][39] = %g\nwrong %d\n", C[0], C[m * n - 1], wrong);
    CHECK(cudaFree(d_A));
    CHECK(cudaFree(d_B));
    CHECK(cudaFree(d_C));
}
