// makes the host wait for a device (in cudaFree, cuda_malloc_free.cu:16)
// The memory for what is received is allocated and freed in each call.
#include "yours.h"

YOURS(cuda_malloc_free) {
    const std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size(), n = size(flat[0]);
    if (n == 0) return;
    for (int c = 1; c < k; c++) {
        float *p = nullptr;
        stream_of(gpu(0));
        CUDA_CHECK(cudaMalloc((void **)&p, n * sizeof(float)));
        Tensor received = {gpu(0), {n}, std::shared_ptr<float>(p, [](float *) {})};
        copyto(flat[c], received);
        add_(flat[0], received);
        CUDA_CHECK(cudaFree(p));
    }
    for (int c = 1; c < k; c++) copyto(flat[0], flat[c]);
}
