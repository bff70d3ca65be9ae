// The greatest of floats, by atomicCAS: CUDA has no atomicMax for them.
// prints: greatest 999.5 at index 617
#include "check.h"
#include <vector>

struct Best { // 8 bytes, changed at once
    float value;
    int index;
};
union Word {
    Best best;
    unsigned long long bits;
};

__global__ void find(unsigned long long *best, const float *x, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    Word mine, found;
    mine.best = {x[i], i};
    found.bits = atomicAdd(best, 0ull); // a read in one piece, beside what others write
    while (mine.best.value > found.best.value) {
        const unsigned long long before = atomicCAS(best, found.bits, mine.bits);
        if (before == found.bits) return;
        found.bits = before; // another thread was faster
    }
}

int main() {
    const int n = 1000;
    std::vector<float> x(n);
    for (int i = 0; i < n; i++) x[i] = (i * 383 + 688) % n + 0.5f; // each once
    float *d_x;
    unsigned long long *d_best;
    Word best;
    best.best = {-1, -1};
    CHECK(cudaMalloc(&d_x, n * sizeof(float)));
    CHECK(cudaMalloc(&d_best, sizeof best));
    CHECK(cudaMemcpy(d_x, x.data(), n * sizeof(float), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(d_best, &best, sizeof best, cudaMemcpyHostToDevice));
    find<<<8, 128>>>(d_best, d_x, n);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(&best, d_best, sizeof best, cudaMemcpyDeviceToHost));
    printf("greatest %g at index %d\n", best.best.value, best.best.index);
    CHECK(cudaFree(d_x));
    CHECK(cudaFree(d_best));
}
