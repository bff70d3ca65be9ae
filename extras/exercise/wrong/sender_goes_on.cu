// sender_goes_on.cu:10, message gpu(0) to gpu(1): what comes after the allreduce does not wait
// A message runs on a stream of its own, for which the sender does not wait.
#include "yours.h"

// A message from one device to another, but for the sender's wait.
static void copy_beside(const Tensor &src, const Tensor &dst) {
    if (size(src) == 0) return;
    Stream &link = link_stream(src.device, dst.device);
    for (Device d : {src.device, dst.device}) make_wait(link, current_stream(d));
    enqueue_message(src, dst, link);
    make_wait(current_stream(dst.device), link);
}

YOURS(sender_goes_on) {
    const std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    for (int c = 1; c < k; c++) {
        const Tensor part = empty(flat[c].shape, gpu(0));
        copy_beside(flat[c], part);
        add_(flat[0], part);
    }
    for (int c = 1; c < k; c++) copy_beside(flat[0], flat[c]);
}
