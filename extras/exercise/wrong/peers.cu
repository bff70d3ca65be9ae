// peers             12     6195264         1548816        516272       1
// Right: a kernel on each device reads the other devices' memory.
#include "yours.h"

YOURS(peers) {
    const std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size(), n = size(flat[0]);
    std::vector<Tensor> sums;
    for (const Tensor &x : flat) sums.push_back(empty(x.shape, x.device));
    wait_for_others(k);
    for (int c = 0; c < k; c++)
        LAUNCH(sum_others_kernel<<<blocks(n), threads, 0, stream_of(gpu(c))>>>(sums[c].ptr(),
                                                                               others(flat), n));
    wait_for_others(k);
    for (int c = 0; c < k; c++) copyto(sums[c], flat[c]);
}
