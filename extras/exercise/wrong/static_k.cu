// k = 2, 1 tensor, 1000 numbers: gpu(0) has ... it is right as the first call of a process ... show
// The number of devices is that of the first call, for ever.
#include "yours.h"

YOURS(static_k) {
    static const int k = grads.size();
    for (size_t i = 0; i < grads[0].size(); i++) {
        for (int c = 1; c < k; c++) add_(grads[0][i], copyto(grads[c][i], gpu(0)));
        for (int c = 1; c < k; c++) copyto(grads[0][i], grads[c][i]);
    }
}
