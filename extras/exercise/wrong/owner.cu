// passed ... gpu(0) moves 43% of the bytes, but its share is 25% ... 45 of 48 messages travel one
// Right: tensor i is summed on device i mod k.
#include "yours.h"

YOURS(owner) {
    const size_t k = grads.size(), P = grads[0].size();
    for (size_t i = 0; i < P; i++) {
        const size_t owner = i % k;
        for (size_t c = 0; c < k; c++) {
            if (c == owner) continue;
            Tensor received = empty(grads[c][i].shape, grads[owner][i].device);
            copyto(grads[c][i], received);
            add_(grads[owner][i], received);
        }
        for (size_t c = 0; c < k; c++)
            if (c != owner) copyto(grads[owner][i], grads[c][i]);
    }
}
