// A three-dimensional grid: each voxel of a volume gets its own number, and the six neighbours of
// each inner one are added up.
// prints: voxel (3, 2, 1) of 7 x 6 x 5 is 59
// prints: inner voxels that differ from the mean of their neighbours: 0
#include "check.h"
#include <vector>

__global__ void number(int *v, dim3 size) {
    const dim3 at(blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y,
                  blockIdx.z * blockDim.z + threadIdx.z);
    if (at.x < size.x && at.y < size.y && at.z < size.z)
        v[at.x + size.x * (at.y + size.y * at.z)] = at.x + size.x * (at.y + size.y * at.z);
}
__global__ void compare(int *different, const int *v, dim3 size) {
    const unsigned x = blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned y = blockIdx.y * blockDim.y + threadIdx.y;
    const unsigned z = blockIdx.z * blockDim.z + threadIdx.z;
    if (!x || !y || !z || x + 1 >= size.x || y + 1 >= size.y || z + 1 >= size.z) return;
    const int row = size.x, slice = size.x * size.y;
    const int *p = &v[x + row * y + slice * z];
    const int sum = p[1] + p[-1] + p[row] + p[-row] + p[slice] + p[-slice];
    if (sum != 6 * *p) atomicAdd(different, 1);
}

int main() {
    const dim3 size(7, 6, 5), block(4, 4, 2), grid{2, 2, 3};
    std::vector<int> v(size.x * size.y * size.z);
    int *d_v, *d_different, different = 0;
    CHECK(cudaMalloc(&d_v, v.size() * sizeof(int)));
    CHECK(cudaMalloc(&d_different, sizeof(int)));
    CHECK(cudaMemset(d_different, 0, sizeof(int)));
    number<<<grid, block>>>(d_v, size);
    compare<<<grid, block>>>(d_different, d_v, size);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(v.data(), d_v, v.size() * sizeof(int), cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(&different, d_different, sizeof(int), cudaMemcpyDeviceToHost));
    printf("voxel (3, 2, 1) of %u x %u x %u is %d\n", size.x, size.y, size.z,
           v[3 + size.x * (2 + size.y * 1)]);
    printf("inner voxels that differ from the mean of their neighbours: %d\n", different);
    CHECK(cudaFree(d_v));
    CHECK(cudaFree(d_different));
}
