// k = 1, 1 tensor, 1000 numbers: it has stopped, see above
// The same where there are numbers.
#include "yours.h"

YOURS(prints_some) {
    const size_t k = grads.size(), P = grads[0].size();
    for (size_t i = 0; i < P; i++) {
        const size_t owner = i % k;
        for (size_t c = 0; c < k; c++)
            if (c != owner) add_(grads[owner][i], copyto(grads[c][i], grads[owner][i].device));
        if (size(grads[owner][i]) > 0)
            printf("sum of tensor %zu: %f\n", i, grads[owner][i].ptr()[0]);
        for (size_t c = 0; c < k; c++)
            if (c != owner) copyto(grads[owner][i], grads[c][i]);
    }
}
