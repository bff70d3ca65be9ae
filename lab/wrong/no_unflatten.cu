// is wrong: k = 2, 4 tensors, 3 numbers ... is unflatten missing
// Gradients that are not contiguous are copies, and nobody copies them back.
#include "yours.h"

YOURS(no_unflatten) {
    std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    for (int c = 1; c < k; c++) add_(flat[0], copyto(flat[c], flat[0].device));
    for (int c = 1; c < k; c++) copyto(flat[0], flat[c]);
}
