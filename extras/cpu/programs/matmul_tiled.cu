// C = A B by tiles in shared memory: each number is read from global memory once per tile, not once
// per thread. Sizes that no tile divides.
// prints: identity: wrong 0
// prints: sum of C: 50500000
#include "check.h"
#include <vector>

constexpr int tile = 16;

// A (m,k)  B (k,n)  C (m,n), row-major
__global__ void matmul(float *C, const float *A, const float *B, int m, int n, int k) {
    __shared__ float a[tile][tile], b[tile][tile];
    const int x = threadIdx.x, y = threadIdx.y;
    const int row = blockIdx.y * tile + y, column = blockIdx.x * tile + x;
    float sum = 0;
    for (int first = 0; first < k; first += tile) {
        a[y][x] = row < m && first + x < k ? A[row * k + first + x] : 0;
        b[y][x] = first + y < k && column < n ? B[(first + y) * n + column] : 0;
        __syncthreads(); // the tiles are complete
        for (int i = 0; i < tile; i++) sum += a[y][i] * b[i][x];
        __syncthreads(); // nobody needs them any more
    }
    if (row < m && column < n) C[row * n + column] = sum;
}

std::vector<float> product(const std::vector<float> &A, const std::vector<float> &B, int n) {
    const size_t bytes = n * n * sizeof(float);
    std::vector<float> C(n * n);
    float *d[3];
    for (float *&p : d) CHECK(cudaMalloc(&p, bytes));
    CHECK(cudaMemcpy(d[0], A.data(), bytes, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(d[1], B.data(), bytes, cudaMemcpyHostToDevice));
    const int blocks = (n + tile - 1) / tile;
    matmul<<<dim3(blocks, blocks), dim3(tile, tile)>>>(d[2], d[0], d[1], n, n, n);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(C.data(), d[2], bytes, cudaMemcpyDeviceToHost));
    for (float *p : d) CHECK(cudaFree(p));
    return C;
}

int main() {
    const int n = 100;
    std::vector<float> A(n * n), one(n * n), ones(n * n, 1);
    for (int i = 0; i < n * n; i++) A[i] = i % n + i / n * 2 % 17;
    for (int i = 0; i < n; i++) one[i * n + i] = 1;
    int wrong = 0;
    const std::vector<float> same = product(A, one, n);
    for (int i = 0; i < n * n; i++) wrong += same[i] != A[i];
    printf("identity: wrong %d\n", wrong);
    double sum = 0; // of C is n times that of A, which is n rows of 1 + 2 + ... + n
    for (int i = 0; i < n * n; i++) A[i] = i % n + 1;
    for (float c : product(A, ones, n)) sum += c;
    printf("sum of C: %.0f\n", sum);
}
