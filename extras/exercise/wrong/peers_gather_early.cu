// peers_gather_early.cu:22, gather_others_kernel on gpu( ... does not wait
// The second kernels do not wait for the sums that they read.
#include "yours.h"

__global__ void gather_others_kernel(float *y, Others o, int own, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const int owner = i < n ? ((i + 1L) * o.k - 1) / n : own;
    if (owner != own) y[i] = o.x[owner][i];
}
YOURS(peers_gather_early) {
    const std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size(), n = size(flat[0]);
    wait_for_others(k);
    for (int c = 0; c < k; c++) {
        std::vector<Tensor> parts;
        for (const Tensor &x : flat) parts.push_back(chunk(x, c, k));
        const int m = size(parts[c]);
        LAUNCH(sum_others_kernel<<<blocks(m), threads, 0, stream_of(gpu(c))>>>(parts[c].ptr(),
                                                                               others(parts), m));
    }
    for (int c = 0; c < k; c++)
        LAUNCH(gather_others_kernel<<<blocks(n), threads, 0, stream_of(gpu(c))>>>(
            flat[c].ptr(), others(flat), c, n));
    wait_for_others(k);
}
