// crash.cu:6: the host accesses ... k = 3 ... wrong on: 3. Does it work only for powers of two?
// A null pointer, on three devices.
#include "yours.h"

YOURS(crash) {
    if (grads.size() == 3) *(volatile int *)nullptr = 1;
    for (size_t i = 0; i < grads[0].size(); i++) allreduce(across_devices(grads, i));
}
