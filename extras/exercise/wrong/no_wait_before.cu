// no_wait_before.cu:8, message gpu(1) to gpu(0): it does not wait for ... ALLREDUCE=no_wait_before
// The receiver does not wait until the sender has written its numbers.
#include "yours.h"

// A message from one device to another, but for the wait before it.
static void copy_too_early(const Tensor &src, const Tensor &dst) {
    if (size(src) == 0) return;
    enqueue_message(src, dst, current_stream(dst.device));
    make_wait(src.device, dst.device);
}

YOURS(no_wait_before) {
    const std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    for (int c = 1; c < k; c++) {
        const Tensor part = empty(flat[c].shape, gpu(0));
        copy_too_early(flat[c], part);
        add_(flat[0], part);
    }
    for (int c = 1; c < k; c++) copy_too_early(flat[0], flat[c]);
}
