// no_wait_after.cu:9, message gpu(0) to gpu(1): what comes after the allreduce does not wait
// The sender does not wait until its numbers have been read.
#include "yours.h"

// A message from one device to another, but for the wait after it.
static void copy_and_go_on(const Tensor &src, const Tensor &dst) {
    if (size(src) == 0) return;
    make_wait(dst.device, src.device);
    enqueue_message(src, dst, current_stream(dst.device));
}

YOURS(no_wait_after) {
    const std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    for (int c = 1; c < k; c++) {
        const Tensor part = empty(flat[c].shape, gpu(0));
        copy_and_go_on(flat[c], part);
        add_(flat[0], part);
    }
    for (int c = 1; c < k; c++) copy_and_go_on(flat[0], flat[c]);
}
