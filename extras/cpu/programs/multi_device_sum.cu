// One sum over all devices: each adds up its shard, the host adds up what they return.
// prints: sum = 500000500000
#include "check.h"
#include <vector>

constexpr int threads = 256, blocks = 8;

__global__ void sum_shard(unsigned long long *sum, const int *x, int n) {
    unsigned long long s = 0;
    for (int i = blockIdx.x * threads + threadIdx.x; i < n; i += blocks * threads) s += x[i];
    atomicAdd(sum, s);
}

int main() {
    const int n = 1000000;
    int devices = 0;
    CHECK(cudaGetDeviceCount(&devices));
    std::vector<int> x(n);
    for (int i = 0; i < n; i++) x[i] = i + 1;
    std::vector<int *> shards(devices);
    std::vector<unsigned long long *> sums(devices);
    for (int d = 0; d < devices; d++) { // all devices are given their work before one is waited for
        const int first = (long long)n * d / devices, end = (long long)n * (d + 1) / devices;
        CHECK(cudaSetDevice(d));
        CHECK(cudaMalloc(&shards[d], (end - first) * sizeof(int)));
        CHECK(cudaMalloc(&sums[d], sizeof(unsigned long long)));
        CHECK(cudaMemset(sums[d], 0, sizeof(unsigned long long)));
        CHECK(cudaMemcpyAsync(shards[d], &x[first], (end - first) * sizeof(int),
                              cudaMemcpyHostToDevice, 0));
        sum_shard<<<blocks, threads>>>(sums[d], shards[d], end - first);
        CHECK(cudaGetLastError());
    }
    unsigned long long sum = 0;
    for (int d = 0; d < devices; d++) {
        unsigned long long part = 0;
        CHECK(cudaSetDevice(d));
        CHECK(cudaMemcpy(&part, sums[d], sizeof part, cudaMemcpyDeviceToHost));
        CHECK(cudaFree(shards[d]));
        CHECK(cudaFree(sums[d]));
        sum += part;
    }
    printf("sum = %llu\n", sum);
}
