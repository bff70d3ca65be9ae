// k = 2, 1 tensor, 1000 numbers: no_copy.cu:10: add_: its inputs are on gpu(0) and gpu(1)
// It adds another device's memory without a copy.
#include "yours.h"

YOURS(no_copy) {
    const size_t k = grads.size(), P = grads[0].size();
    for (size_t i = 0; i < P; i++) {
        const size_t owner = i % k;
        for (size_t c = 0; c < k; c++)
            if (c != owner) add_(grads[owner][i], grads[c][i]);
        for (size_t c = 0; c < k; c++)
            if (c != owner) copyto(grads[owner][i], grads[c][i]);
    }
}
