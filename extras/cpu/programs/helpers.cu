// A header of one's own whose name is like that of NVIDIA's samples, and one of theirs
// prints: 14
#include "check.h"
#include "helper_own.h"
#if __has_include(<helper_cuda.h>)
#include <helper_cuda.h>
#else
#define checkCudaErrors CHECK
#define getLastCudaError(what) CHECK(cudaGetLastError())
#endif

__global__ void twice_kernel(int *p) { *p = twice(7); }
int main() {
    int *p, result = 0;
    checkCudaErrors(cudaMalloc(&p, sizeof *p));
    twice_kernel<<<1, 1>>>(p);
    getLastCudaError("twice_kernel");
    checkCudaErrors(cudaMemcpy(&result, p, sizeof *p, cudaMemcpyDeviceToHost));
    printf("%d\n", result);
}
