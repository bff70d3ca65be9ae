// k = 1, 1 tensor, 1000 numbers: one_device_more.cu:7: there is no gpu(1): the program runs
// It sums on a device that the training does not have.
#include "yours.h"

YOURS(one_device_more) {
    const Device extra = gpu(grads.size());
    for (const Tensor &t : flatten(grads)) copyto(t, extra);
    allreduce(flatten(grads));
}
