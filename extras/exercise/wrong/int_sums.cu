// for numbers that are not whole: k = 2 ... is something in it not a float
// The sums are whole numbers.
#include "yours.h"

__global__ void add_int_kernel(float *a, const float *b, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) a[i] = (int)a[i] + (int)b[i];
}

YOURS(int_sums) {
    const std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    const int n = size(flat[0]);
    for (int c = 1; c < k; c++) {
        const Tensor part = copyto(flat[c], gpu(0));
        LAUNCH(add_int_kernel<<<blocks(n), threads, 0, stream_of(gpu(0))>>>(flat[0].ptr(),
                                                                            part.ptr(), n));
    }
    for (int c = 1; c < k; c++) copyto(flat[0], flat[c]);
}
