// Stream compaction: keeps the multiples of 7, in their order within a warp. One atomic per warp
// makes room; a ballot says where each lane writes.
// prints: kept 143 of 1000, their sum 71071
#include "check.h"

__global__ void keep(int *kept, int *count, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32;
    const bool wanted = i < n && i % 7 == 0;
    const unsigned lanes = __ballot_sync(~0u, wanted);
    int first = 0;
    if (lane == 0 && lanes) first = atomicAdd(count, __popc(lanes));
    first = __shfl_sync(~0u, first, 0);
    if (wanted) kept[first + __popc(lanes & ((1u << lane) - 1))] = i;
}

int main() {
    const int n = 1000;
    int *d_kept, *d_count, kept[n], count = 0, sum = 0;
    CHECK(cudaMalloc(&d_kept, sizeof kept));
    CHECK(cudaMalloc(&d_count, sizeof count));
    CHECK(cudaMemset(d_count, 0, sizeof count));
    keep<<<(n + 127) / 128, 128>>>(d_kept, d_count, n);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(&count, d_count, sizeof count, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(kept, d_kept, count * sizeof(int), cudaMemcpyDeviceToHost));
    for (int i = 0; i < count; i++) sum += kept[i];
    printf("kept %d of %d, their sum %d\n", count, n, sum);
    CHECK(cudaFree(d_kept));
    CHECK(cudaFree(d_count));
}
