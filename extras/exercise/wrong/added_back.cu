// is wrong: k = 2 ... added_back.cu:12, add_kernel on gpu(1): from here on it has 2 times gpu(1)
// The sums are added where they should be copied.
#include "yours.h"

YOURS(added_back) {
    const size_t k = grads.size(), P = grads[0].size();
    for (size_t i = 0; i < P; i++) {
        const size_t owner = i % k;
        for (size_t c = 0; c < k; c++)
            if (c != owner) add_(grads[owner][i], copyto(grads[c][i], grads[owner][i].device));
        for (size_t c = 0; c < k; c++)
            if (c != owner) add_(grads[c][i], copyto(grads[owner][i], grads[c][i].device));
    }
}
