// does not compile 0: add_up_kernel is launched, but its definition lacks __global__
// g++ would not mind. nvcc does.
#include "yours.h"

void add_up_kernel(float *a, const float *b, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) a[i] += b[i];
}
YOURS(not_global) {
    const int n = size(grads[0][0]);
    LAUNCH(add_up_kernel<<<blocks(n), threads, 0, stream_of(gpu(0))>>>(grads[0][0].ptr(),
                                                                       grads[0][0].ptr(), n));
}
