// is wrong: k = 2 ... divided.cu:17, divide_kernel on gpu(0): from here on it has 0.5 times gpu(0)
// The owner divides the sum by k.
#include "yours.h"

__global__ void divide_kernel(float *x, int k, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] /= k;
}

YOURS(divided) {
    const size_t k = grads.size(), P = grads[0].size();
    for (size_t i = 0; i < P; i++) {
        const size_t owner = i % k;
        for (size_t c = 0; c < k; c++)
            if (c != owner) add_(grads[owner][i], copyto(grads[c][i], grads[owner][i].device));
        const Tensor t = grads[owner][i];
        LAUNCH(divide_kernel<<<blocks(size(t)), threads, 0, stream_of(t.device)>>>(t.ptr(), k,
                                                                                   size(t)));
        for (size_t c = 0; c < k; c++)
            if (c != owner) copyto(grads[owner][i], grads[c][i]);
    }
}
