// one_missing.cu:13 ... overwrites gpu(1), ... number 0, which nothing has brought to gpu(0)
// The sum leaves device 1 out.
#include "yours.h"

YOURS(one_missing) {
    const std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    for (int c = 2; c < k; c++) {
        const Tensor part = empty(flat[c].shape, gpu(0));
        copyto(flat[c], part);
        add_(flat[0], part);
    }
    for (int c = 1; c < k; c++) copyto(flat[0], flat[c]);
}
