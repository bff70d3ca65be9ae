// the sum comes to gpu(1) (rebind_column.cu:13, message gpu(0) ... but nothing writes it into
// data[c] = ... puts the sum into the list, not into the gradient.
#include "yours.h"

YOURS(rebind_column) {
    const size_t k = grads.size(), P = grads[0].size();
    for (size_t i = 0; i < P; i++) {
        std::vector<Tensor> data = across_devices(grads, i);
        const size_t owner = i % k;
        for (size_t c = 0; c < k; c++)
            if (c != owner) add_(data[owner], copyto(data[c], data[owner].device));
        for (size_t c = 0; c < k; c++)
            if (c != owner) data[c] = copyto(data[owner], data[c].device);
    }
}
