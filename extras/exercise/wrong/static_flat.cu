// static_flat.cu:9, message gpu(1) to gpu(0): it reads memory of gpu(1) ... not written
// The tensors of the first call are kept.
#include "yours.h"

YOURS(static_flat) {
    static std::vector<Tensor> flat;
    const int k = grads.size();
    if ((int)flat.size() != k || size(flat[0]) == 0) flat = flatten(grads);
    for (int c = 1; c < k; c++) add_(flat[0], copyto(flat[c], gpu(0)));
    for (int c = 1; c < k; c++) copyto(flat[0], flat[c]);
}
