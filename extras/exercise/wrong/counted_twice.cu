// counted_twice.cu:12, add_kernel on gpu(0): from here on it has 2 times ... the sum ... <- here
// The last device is added twice.
#include "yours.h"

YOURS(counted_twice) {
    const std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    for (int c = 1; c < k; c++) {
        const Tensor part = empty(flat[c].shape, gpu(0));
        copyto(flat[c], part);
        add_(flat[0], part);
        if (c == k - 1) add_(flat[0], part);
    }
    for (int c = 1; c < k; c++) copyto(flat[0], flat[c]);
}
