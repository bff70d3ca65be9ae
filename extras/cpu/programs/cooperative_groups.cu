// Cooperative groups: the block and its tiles as objects. The same function adds up over tiles of
// 8 and of 32 lanes.
// prints: tiles of 8: 28 92 156 220 284 348 412 476
// prints: tiles of 32: 496 1520
#include "check.h"
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

namespace cg = cooperative_groups;

template <int lanes> __global__ void sum_tiles(int *sums) {
    const cg::thread_block block = cg::this_thread_block();
    const auto tile = cg::tiled_partition<lanes>(block);
    const int sum = cg::reduce(tile, (int)block.thread_rank(), cg::plus<int>());
    if (tile.thread_rank() == 0) sums[tile.meta_group_rank()] = sum;
    block.sync();
}

int main() {
    int *d_sums, sums[8];
    CHECK(cudaMalloc(&d_sums, sizeof sums));
    for (int lanes : {8, 32}) {
        if (lanes == 8) sum_tiles<8><<<1, 64>>>(d_sums);
        else sum_tiles<32><<<1, 64>>>(d_sums);
        CHECK(cudaGetLastError());
        CHECK(cudaMemcpy(sums, d_sums, sizeof sums, cudaMemcpyDeviceToHost));
        printf("tiles of %d:", lanes);
        for (int i = 0; i < 64 / lanes; i++) printf(" %d", sums[i]);
        printf("\n");
    }
    CHECK(cudaFree(d_sums));
}
