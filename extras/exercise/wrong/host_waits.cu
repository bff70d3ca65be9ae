// makes the host wait for a device (in waitall, host_waits.cu:13)
// The host waits for the sum.
#include "yours.h"

YOURS(host_waits) {
    const std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    for (int c = 1; c < k; c++) {
        const Tensor part = empty(flat[c].shape, gpu(0));
        copyto(flat[c], part);
        add_(flat[0], part);
    }
    waitall();
    for (int c = 1; c < k; c++) copyto(flat[0], flat[c]);
}
