// Variables of a device that two files share: one defines them, a header declares them extern.
// prints: 10 40 90 160, blocks: 8
#include "../check.h"
#include "variables.h"

__constant__ float weights[4] = {1, 1, 1, 1};
__device__ int blocks = 6;

int main() {
    const float x[4] = {1, 2, 3, 4}, tens[4] = {10, 20, 30, 40};
    float *X, *Y, y[4];
    int launched = 0;
    CHECK(cudaMalloc(&X, sizeof x));
    CHECK(cudaMalloc(&Y, sizeof y));
    CHECK(cudaMemcpy(X, x, sizeof x, cudaMemcpyHostToDevice));
    weigh(Y, X);
    CHECK(cudaMemcpyToSymbol(weights, tens, sizeof tens));
    weigh(Y, X);
    CHECK(cudaMemcpy(y, Y, sizeof y, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpyFromSymbol(&launched, blocks, sizeof launched));
    printf("%g %g %g %g, blocks: %d\n", y[0], y[1], y[2], y[3], launched);
    CHECK(cudaFree(X));
    CHECK(cudaFree(Y));
}
