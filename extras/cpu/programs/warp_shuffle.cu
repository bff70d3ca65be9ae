// What a warp can do without shared memory: broadcast, rotate, add up, find the greatest, scan.
// prints: broadcast: 300
// prints: rotated: 1 2 3 ... 0
// prints: sum 496, greatest 31
// prints: prefix sums: 0 1 3 6 ... 496
#include "check.h"

__global__ void shuffle(int *y) {
    const int lane = threadIdx.x;
    y[lane] = __shfl_sync(~0u, lane * 100, 3);
    y[32 + lane] = __shfl_sync(~0u, lane, (lane + 1) % 32);
    int sum = lane, greatest = lane, prefix = lane;
    for (int bit = 1; bit < 32; bit *= 2) {
        sum += __shfl_xor_sync(~0u, sum, bit);
        greatest = max(greatest, __shfl_xor_sync(~0u, greatest, bit));
        const int before = __shfl_up_sync(~0u, prefix, bit);
        if (lane >= bit) prefix += before;
    }
    y[64 + lane] = sum;
    y[96 + lane] = greatest;
    y[128 + lane] = prefix;
}

int main() {
    int *d_y, y[160];
    CHECK(cudaMalloc(&d_y, sizeof y));
    shuffle<<<1, 32>>>(d_y);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(y, d_y, sizeof y, cudaMemcpyDeviceToHost));
    printf("broadcast: %d\nrotated: %d %d %d ... %d\n", y[17], y[32], y[33], y[34], y[63]);
    printf("sum %d, greatest %d\n", y[64 + 5], y[96 + 5]);
    printf("prefix sums: %d %d %d %d ... %d\n", y[128], y[129], y[130], y[131], y[159]);
    CHECK(cudaFree(d_y));
}
