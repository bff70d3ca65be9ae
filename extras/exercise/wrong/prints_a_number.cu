// prints_a_number.cu:11: the host accesses memory of device 0 ... k = 1 ... it has stopped
// The host reads a number in a device's memory.
#include "yours.h"

YOURS(prints_a_number) {
    const size_t k = grads.size(), P = grads[0].size();
    for (size_t i = 0; i < P; i++) {
        const size_t owner = i % k;
        for (size_t c = 0; c < k; c++)
            if (c != owner) add_(grads[owner][i], copyto(grads[c][i], grads[owner][i].device));
        printf("sum of tensor %zu: %f\n", i, grads[owner][i].ptr()[0]);
        for (size_t c = 0; c < k; c++)
            if (c != owner) copyto(grads[owner][i], grads[c][i]);
    }
}
