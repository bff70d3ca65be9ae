// own_kernel: passed. Its cost for the 8 gradients of lenet, 516272 bytes, on 4 devices:
// Right: bucket, with a kernel of its own that is launched without LAUNCH.
#include "yours.h"

__global__ void add_to_kernel(float *x, const float *y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += y[i];
}
YOURS(own_kernel) {
    const std::vector<Tensor> flat = flatten(grads);
    const Tensor sum = flat[0];
    const int n = size(sum);
    for (size_t c = 1; c < flat.size(); c++) {
        const Tensor received = copyto(flat[c], sum.device);
        add_to_kernel<<<blocks(n), threads, 0, stream_of(sum.device)>>>(sum.ptr(), received.ptr(),
                                                                        n);
    }
    for (size_t c = 1; c < flat.size(); c++) copyto(sum, flat[c]);
}
