// peers_twice.cu:16, add_others_kernel on gpu(0): from here on it has 2 times gpu(0)
// Each device adds its own number twice.
#include "yours.h"

__global__ void add_others_kernel(float *sum, Others o, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    for (int c = 0; i < n && c < o.k; c++) sum[i] += o.x[c][i];
}
YOURS(peers_twice) {
    const std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size(), n = size(flat[0]);
    std::vector<Tensor> sums;
    for (const Tensor &x : flat) sums.push_back(copyto(x, x.device));
    wait_for_others(k);
    for (int c = 0; c < k; c++)
        LAUNCH(add_others_kernel<<<blocks(n), threads, 0, stream_of(gpu(c))>>>(sums[c].ptr(),
                                                                               others(flat), n));
    wait_for_others(k);
    for (int c = 0; c < k; c++) copyto(sums[c], flat[c]);
}
