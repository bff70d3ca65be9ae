// k = 3, 1 tensor, 0 numbers: segmentation fault ... devices: 1, 2, 4; wrong on: 3
// A null pointer, on three devices.
#include "yours.h"

YOURS(crash) {
    if (grads.size() == 3) *(volatile int *)nullptr = 1;
    for (size_t i = 0; i < grads[0].size(); i++) allreduce(column(grads, i));
}
