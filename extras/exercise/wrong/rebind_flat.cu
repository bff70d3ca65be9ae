// is wrong: k = 2 ... gpu(1) has 4 at index 0 of tensor 0, not 5 ... gpu(1)'s own number
// The sums are put into the list, not into the gradients.
#include "yours.h"

YOURS(rebind_flat) {
    std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    for (int c = 1; c < k; c++) add_(flat[0], copyto(flat[c], gpu(0)));
    for (int c = 1; c < k; c++) flat[c] = copyto(flat[0], gpu(c));
}
