// k = 2 ... gpu(0) has the sum, but nothing brings it to gpu(1)
// The sums stay on their owners.
#include "yours.h"

YOURS(no_broadcast) {
    const size_t k = grads.size(), P = grads[0].size();
    for (size_t i = 0; i < P; i++) {
        const size_t owner = i % k;
        for (size_t c = 0; c < k; c++) {
            if (c == owner) continue;
            Tensor received = empty(grads[c][i].shape, grads[owner][i].device);
            copyto(grads[c][i], received);
            add_(grads[owner][i], received);
        }
    }
}
