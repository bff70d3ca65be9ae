// Pi from random points: every thread has its own generator, of whole numbers, so that the count is
// the same everywhere.
// prints: points 409600, pi is about 3.14
#include "check.h"

__device__ unsigned next_random(unsigned &state) { // xorshift, Marsaglia 2003
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state;
}
// Neighbours' seeds have little in common.
__device__ unsigned seed_of(unsigned thread) {
    unsigned x = thread * 2654435761u + 12345u;
    x = (x ^ (x >> 16)) * 0x45d9f3bu;
    return (x ^ (x >> 16)) | 1;
}
__global__ void throw_points(unsigned long long *inside, int points) {
    unsigned state = seed_of(blockIdx.x * blockDim.x + threadIdx.x);
    unsigned long long mine = 0;
    for (int i = 0; i < points; i++) {
        const unsigned long long x = next_random(state) >> 8, y = next_random(state) >> 8;
        mine += x * x + y * y < 1ull << 48; // a quarter of a circle with radius 2^24
    }
    atomicAdd(inside, mine);
}

int main() {
    const int blocks = 16, threads = 64, points = 400;
    unsigned long long *d_inside, inside = 0;
    CHECK(cudaMalloc(&d_inside, sizeof inside));
    CHECK(cudaMemset(d_inside, 0, sizeof inside));
    throw_points<<<blocks, threads>>>(d_inside, points);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(&inside, d_inside, sizeof inside, cudaMemcpyDeviceToHost));
    printf("points %d, pi is about %.2f\n", blocks * threads * points,
           4.0 * inside / (blocks * threads * points));
    CHECK(cudaFree(d_inside));
}
