// is wrong: k = 2 ... mean.cu:11, sgd_kernel on gpu(0): from here on it has 0.5 times gpu(0)
// The devices get the mean.
#include "yours.h"

YOURS(mean) {
    const std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    allreduce(flat);
    for (Tensor t : flat) { // t *= 1 / k
        t.grad = std::make_shared<Tensor>(t);
        sgd({t}, 1 - 1.0f / k, 1);
    }
}
