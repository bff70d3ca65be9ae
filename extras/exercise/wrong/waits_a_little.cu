// makes the host wait for a device (in ... waits_a_little.cu:8)
// It asks for a tenth of a second whether the device is done.
#include "yours.h"

YOURS(waits_a_little) {
    allreduce_naive(grads);
    for (int i = 0; i < 100 && cudaStreamQuery(stream_of(gpu(0))) != cudaSuccess; i++)
        usleep(1000);
}
