// A polynomial whose coefficients are in constant memory, and a counter that is a variable of the
// device.
// prints: p(0) = 1, p(1) = 10, p(2) = 49
// prints: evaluated 64 times
#include "check.h"

__constant__ float coefficients[4] = {0, 0, 0, 0};
__device__ int evaluated = 0;

__device__ float p(float x) { // Horner
    float y = 0;
    for (int i = 3; i >= 0; i--) y = y * x + coefficients[i];
    atomicAdd(&evaluated, 1);
    return y;
}
__global__ void evaluate(float *y) { y[threadIdx.x] = p(threadIdx.x); }

int main() {
    const float numbers[4] = {1, 2, 3, 4}; // 1 + 2 x + 3 x^2 + 4 x^3
    float *d_y, y[64];
    int times = 0;
    CHECK(cudaMemcpyToSymbol(coefficients, numbers, sizeof numbers));
    CHECK(cudaMalloc(&d_y, sizeof y));
    evaluate<<<1, 64>>>(d_y);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(y, d_y, sizeof y, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpyFromSymbol(&times, evaluated, sizeof times));
    printf("p(0) = %g, p(1) = %g, p(2) = %g\nevaluated %d times\n", y[0], y[1], y[2], times);
    CHECK(cudaFree(d_y));
}
