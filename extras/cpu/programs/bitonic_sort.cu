// Bitonic sort: steps that reach across blocks are launches of their own, the others run in shared
// memory.
// prints: 1 5 9 13 ... 65533
// prints: in order: yes
#include "check.h"
#include <vector>

constexpr int threads = 256;

__device__ void exchange(int &a, int &b, bool ascending) {
    if ((a > b) != ascending) return;
    const int before = a;
    a = b;
    b = before;
}
// One step in global memory: elements at a distance, in runs of `size` that go up or down
__global__ void step(int *x, int size, int distance) {
    const int t = blockIdx.x * threads + threadIdx.x;
    const int i = t / distance * 2 * distance + t % distance;
    exchange(x[i], x[i + distance], !(i & size));
}
// All steps from this distance on, in a block's 2 * threads elements
__global__ void steps(int *x, int size, int distance) {
    __shared__ int s[2 * threads];
    const int first = blockIdx.x * 2 * threads, t = threadIdx.x;
    s[t] = x[first + t];
    s[t + threads] = x[first + t + threads];
    for (; distance > 0; distance /= 2) {
        __syncthreads();
        const int i = t / distance * 2 * distance + t % distance;
        exchange(s[i], s[i + distance], !((first + i) & size));
    }
    __syncthreads();
    x[first + t] = s[t];
    x[first + t + threads] = s[t + threads];
}

int main() {
    const int n = 1 << 14, blocks = n / 2 / threads;
    std::vector<int> x(n);
    for (int i = 0; i < n; i++) x[i] = i * 5 % n * 4 + 1; // each of 1, 5, 9, ... once
    int *d_x;
    CHECK(cudaMalloc(&d_x, n * sizeof(int)));
    CHECK(cudaMemcpy(d_x, x.data(), n * sizeof(int), cudaMemcpyHostToDevice));
    for (int size = 2; size <= n; size *= 2)
        for (int distance = size / 2; distance > 0; distance /= 2) {
            if (distance <= threads) {
                steps<<<blocks, threads>>>(d_x, size, distance);
                break;
            }
            step<<<blocks, threads>>>(d_x, size, distance);
        }
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(x.data(), d_x, n * sizeof(int), cudaMemcpyDeviceToHost));
    bool ordered = true;
    for (int i = 0; i < n; i++) ordered = ordered && x[i] == 4 * i + 1;
    printf("%d %d %d %d ... %d\nin order: %s\n", x[0], x[1], x[2], x[3], x[n - 1],
           ordered ? "yes" : "no");
    CHECK(cudaFree(d_x));
}
