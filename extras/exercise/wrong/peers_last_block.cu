// (wrong: 768 to 999 of all): peers_last_block.cu:15, copy on gpu(0): this overwrites the sum
// The last block is missing, and so are its numbers.
#include "yours.h"

YOURS(peers_last_block) {
    const std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size(), n = size(flat[0]);
    std::vector<Tensor> sums;
    for (const Tensor &x : flat) sums.push_back(empty(x.shape, x.device));
    wait_for_others(k);
    for (int c = 0; c < k; c++)
        LAUNCH(sum_others_kernel<<<std::max(1, n / threads), threads, 0, stream_of(gpu(c))>>>(
            sums[c].ptr(), others(flat), n));
    wait_for_others(k);
    for (int c = 0; c < k; c++) copyto(sums[c], flat[c]);
}
