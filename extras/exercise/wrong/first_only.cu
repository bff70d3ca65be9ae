// k = 2, 4 tensors, 1000 numbers: gpu(0) has 180 at index 0 of tensor 2, not 900 (wrong: 333 to 999
// Only the first tensor is summed.
#include "yours.h"

YOURS(first_only) { allreduce(across_devices(grads, 0)); }
