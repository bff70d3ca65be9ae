#include "variables.h"

__global__ void weigh_kernel(float *y, const float *x) {
    y[threadIdx.x] = weights[threadIdx.x] * x[threadIdx.x];
    if (threadIdx.x == 0) atomicAdd(&blocks, 1);
}
void weigh(float *y, const float *x) { weigh_kernel<<<1, 4>>>(y, x); }
