// numbers come to gpu( ... ) without a message that was counted: use copyto or send
// The messages go past what counts them.
#include "yours.h"

YOURS(not_counted) {
    watch::Recorder *const recorder = std::exchange(watch::recorder, nullptr);
    const std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    for (int c = 1; c < k; c++) {
        const Tensor part = empty(flat[c].shape, gpu(0));
        copyto(flat[c], part);
        add_(flat[0], part);
    }
    for (int c = 1; c < k; c++) copyto(flat[0], flat[c]);
    watch::recorder = recorder;
}
