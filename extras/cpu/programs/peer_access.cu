// A kernel of one device adds up what lies in the memory of another one, once it may. Where it may
// not, the numbers are copied first.
// prints: sum = 4950
#include "check.h"
#include <vector>

__global__ void sum(int *result, const int *x, int n) {
    int s = 0;
    for (int i = threadIdx.x; i < n; i += 32) s += x[i];
    for (int half = 16; half > 0; half /= 2) s += __shfl_down_sync(~0u, s, half);
    if (threadIdx.x == 0) *result = s;
}

int main() {
    const int n = 100;
    int devices = 0, can = 0, *theirs, *mine, *result, got = 0;
    std::vector<int> x(n);
    for (int i = 0; i < n; i++) x[i] = i;
    CHECK(cudaGetDeviceCount(&devices));
    const int other = devices > 1 ? 1 : 0;
    CHECK(cudaSetDevice(other));
    CHECK(cudaMalloc(&theirs, n * sizeof(int)));
    CHECK(cudaMemcpy(theirs, x.data(), n * sizeof(int), cudaMemcpyHostToDevice));

    CHECK(cudaSetDevice(0));
    CHECK(cudaMalloc(&result, sizeof(int)));
    CHECK(cudaMalloc(&mine, n * sizeof(int)));
    if (other != 0) CHECK(cudaDeviceCanAccessPeer(&can, 0, other));
    if (can) {
        CHECK(cudaDeviceEnablePeerAccess(other, 0));
        sum<<<1, 32>>>(result, theirs, n);
    } else {
        CHECK(cudaMemcpyPeer(mine, 0, theirs, other, n * sizeof(int)));
        sum<<<1, 32>>>(result, mine, n);
    }
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(&got, result, sizeof got, cudaMemcpyDeviceToHost));
    printf("sum = %d\n", got);
    if (can) CHECK(cudaDeviceDisablePeerAccess(other));
    for (int *p : {theirs, mine, result}) CHECK(cudaFree(p));
}
