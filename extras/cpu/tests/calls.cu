// Calls: a function of the API is CUDA's, also where it is no call, and every message names a line.
#include "tests.h"

TEST_CASE("cudaMalloc, cudaFree, ...: are functions of CUDA's own types, as values, too") {
    static_assert(std::is_same_v<decltype(cudaFree), cudaError_t(void *)>);
    static_assert(std::is_same_v<decltype(&cudaDeviceSynchronize), cudaError_t (*)()>);
    cudaError_t (*allocate)(void **, size_t) = cudaMalloc;
    cudaError_t (*pin)(void **, size_t) = cudaMallocHost;
    cudaError_t (*create)(cudaEvent_t *) = cudaEventCreate;
    cudaError_t (*copy)(void *, const void *, size_t, cudaMemcpyKind) = cudaMemcpy;
    void *x, *fixed;
    int *y, got, three = 3;
    cudaEvent_t event;
    OK(allocate(&x, 4));
    OK(cudaMalloc<int>(&y, 4));
    OK(pin(&fixed, 4));
    OK(create(&event));
    OK(copy(x, &three, 4, up));
    const std::unique_ptr<void, decltype(&cudaFree)> frees_x(x, cudaFree);
    const std::shared_ptr<int> frees_y(y, cudaFree), frees_fixed((int *)fixed, cudaFreeHost);
    const std::shared_ptr<cudaEvent> destroys(event, cudaEventDestroy);
    OK(::cudaMemcpy(y, x, 4, within));
    OK(copy(&got, y, 4, down));
    CHECK(got == 3);
    REFUSED(value, (cudaFree)(&got), "cudaFree", "was not returned by cudaMalloc");
    REFUSED(value, copy(x, &three, 8, up), "8 bytes at offset 0 overrun the 4 bytes that");
    REFUSED(value, copy(y, &three, 8, up), "extras/cpu/tests/calls.cu:");
}
