// k = 2, 78 tensors, 140955 numbers: ... nothing brings gpu(1)'s number 0 to gpu(0)
// It stops at the size of LeNet's gradients.
#include "yours.h"

YOURS(small_only) {
    const std::vector<Tensor> flat = flatten(grads);
    if (size(flat[0]) <= 129068) allreduce(flat);
}
