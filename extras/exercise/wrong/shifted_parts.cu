// shifted_parts.cu:11, copy on gpu(1): from here on it has the sum of number 1
// The sums come back one place off, as from a part with wrong bounds.
#include "yours.h"

YOURS(shifted_parts) {
    const std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    const int n = size(flat[0]);
    allreduce(flat);
    for (int c = 1; c < k && n > 1; c++)
        copyto(copyto(rows(flat[0], 1, n), gpu(c)), rows(flat[c], 0, n - 1));
}
