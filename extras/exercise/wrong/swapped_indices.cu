// swapped_indices.cu:11: the host aborts ... k = 2 ... aborted, see above
// Device and tensor change places in grads[i][c].
#include "yours.h"

YOURS(swapped_indices) {
    const size_t k = grads.size(), P = grads[0].size();
    for (size_t i = 0; i < P; i++) {
        const size_t owner = i % k;
        for (size_t c = 0; c < k; c++) {
            if (c == owner) continue;
            Tensor received = empty(grads[i][c].shape, grads[owner][i].device);
            copyto(grads[i][c], received);
            add_(grads[owner][i], received);
        }
        for (size_t c = 0; c < k; c++)
            if (c != owner) copyto(grads[owner][i], grads[c][i]);
    }
}
