// is wrong: k = 2 ... butterfly.cu:10, add_kernel on gpu(1): from here on it has 2 times gpu(1)
// Pairs add each other's sums one after the other.
#include "yours.h"

YOURS(butterfly) {
    std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    for (int d = 1; d < k; d *= 2)
        for (int c = 0; c < k; c++)
            if ((c ^ d) < k) add_(flat[c], copyto(flat[c ^ d], flat[c].device));
}
