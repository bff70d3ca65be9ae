// the sum comes to gpu(1) (rebind_flat.cu:9, message gpu(0) to gpu(1)), but nothing writes it
// The sums are put into the list, not into the gradients.
#include "yours.h"

YOURS(rebind_flat) {
    std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    for (int c = 1; c < k; c++) add_(flat[0], copyto(flat[c], gpu(0)));
    for (int c = 1; c < k; c++) flat[c] = copyto(flat[0], gpu(c));
}
