// Shared memory whose size the launch says, used for two arrays of different types.
// prints: 8 elements: 7 6 5 ... 0, odd: 4
// prints: 500 elements: 499 498 497 ... 0, odd: 250
#include "check.h"
#include <vector>

__global__ void reverse(float *x, int *odd, int n) {
    extern __shared__ float values[]; // n floats, then n bytes
    unsigned char *flags = (unsigned char *)(values + n);
    const int t = threadIdx.x;
    values[t] = x[t];
    flags[t] = (int)x[t] % 2;
    __syncthreads();
    x[t] = values[n - 1 - t];
    if (t > 0) return;
    int count = 0;
    for (int i = 0; i < n; i++) count += flags[i];
    *odd = count;
}

int main() {
    for (int n : {8, 500}) {
        std::vector<float> x(n);
        for (int i = 0; i < n; i++) x[i] = i;
        float *d_x;
        int *d_odd, odd = 0;
        CHECK(cudaMalloc(&d_x, n * sizeof(float)));
        CHECK(cudaMalloc(&d_odd, sizeof(int)));
        CHECK(cudaMemcpy(d_x, x.data(), n * sizeof(float), cudaMemcpyHostToDevice));
        reverse<<<1, n, n * (sizeof(float) + 1)>>>(d_x, d_odd, n);
        CHECK(cudaGetLastError());
        CHECK(cudaMemcpy(x.data(), d_x, n * sizeof(float), cudaMemcpyDeviceToHost));
        CHECK(cudaMemcpy(&odd, d_odd, sizeof odd, cudaMemcpyDeviceToHost));
        printf("%d elements: %g %g %g ... %g, odd: %d\n", n, x[0], x[1], x[2], x[n - 1], odd);
        CHECK(cudaFree(d_x));
        CHECK(cudaFree(d_odd));
    }
}
