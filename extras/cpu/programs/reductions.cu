// A sum in six forms, each faster than the one before on a GPU, all of them exact here.
// prints: interleaved: 524278
// prints: sequential: 524278
// prints: first add while loading: 524278
// prints: last warp by shuffles: 524278
// prints: grid-stride, shuffles only: 524278
// prints: one atomic per block: 524278
#include "check.h"
#include <vector>

constexpr int threads = 256;

__global__ void interleaved(int *out, const int *in, int) {
    __shared__ int s[threads];
    const int t = threadIdx.x;
    s[t] = in[blockIdx.x * threads + t];
    for (int step = 1; step < threads; step *= 2) {
        __syncthreads();
        if (t % (2 * step) == 0) s[t] += s[t + step];
    }
    if (t == 0) atomicAdd(out, s[0]);
}
__global__ void sequential(int *out, const int *in, int) {
    __shared__ int s[threads];
    const int t = threadIdx.x;
    s[t] = in[blockIdx.x * threads + t];
    for (int half = threads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (t < half) s[t] += s[t + half];
    }
    if (t == 0) atomicAdd(out, s[0]);
}
template <bool shuffles> __global__ void first_add(int *out, const int *in, int) {
    __shared__ int s[threads];
    const int t = threadIdx.x, i = blockIdx.x * 2 * threads + t;
    s[t] = in[i] + in[i + threads];
    for (int half = threads / 2; half > (shuffles ? 16 : 0); half /= 2) {
        __syncthreads();
        if (t < half) s[t] += s[t + half];
    }
    if (shuffles && t < 32) { // lanes of one warp from here on
        int sum = s[t];
        for (int half = 16; half > 0; half /= 2) sum += __shfl_down_sync(~0u, sum, half);
        if (t == 0) s[0] = sum;
    }
    if (t == 0) atomicAdd(out, s[0]);
}
__global__ void grid_stride(int *out, const int *in, int n) {
    int sum = 0;
    for (int i = blockIdx.x * threads + threadIdx.x; i < n; i += gridDim.x * threads) sum += in[i];
    for (int half = 16; half > 0; half /= 2) sum += __shfl_down_sync(~0u, sum, half);
    if (threadIdx.x % 32 == 0) atomicAdd(out, sum);
}
__global__ void one_atomic(int *out, const int *in, int n) {
    __shared__ int warps[threads / 32];
    int sum = 0;
    for (int i = blockIdx.x * threads + threadIdx.x; i < n; i += gridDim.x * threads) sum += in[i];
    for (int bit = 16; bit > 0; bit /= 2) sum += __shfl_xor_sync(~0u, sum, bit);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    sum = threadIdx.x < threads / 32 ? warps[threadIdx.x] : 0;
    for (int bit = 16; bit > 0; bit /= 2) sum += __shfl_xor_sync(~0u, sum, bit);
    if (threadIdx.x == 0) atomicAdd(out, sum);
}

int main() {
    const int n = 1 << 17, blocks = n / threads;
    std::vector<int> in(n);
    for (int i = 0; i < n; i++) in[i] = i % 9;
    int *d_in, *d_out;
    CHECK(cudaMalloc(&d_in, n * sizeof(int)));
    CHECK(cudaMalloc(&d_out, sizeof(int)));
    CHECK(cudaMemcpy(d_in, in.data(), n * sizeof(int), cudaMemcpyHostToDevice));
    struct {
        const char *name;
        void (*kernel)(int *, const int *, int);
        int blocks;
    } forms[] = {{"interleaved", interleaved, blocks},
                 {"sequential", sequential, blocks},
                 {"first add while loading", first_add<false>, blocks / 2},
                 {"last warp by shuffles", first_add<true>, blocks / 2},
                 {"grid-stride, shuffles only", grid_stride, 20},
                 {"one atomic per block", one_atomic, 20}};
    for (auto &form : forms) {
        int sum = 0;
        CHECK(cudaMemset(d_out, 0, sizeof(int)));
        form.kernel<<<form.blocks, threads>>>(d_out, d_in, n);
        CHECK(cudaGetLastError());
        CHECK(cudaMemcpy(&sum, d_out, sizeof sum, cudaMemcpyDeviceToHost));
        printf("%s: %d\n", form.name, sum);
    }
    CHECK(cudaFree(d_in));
    CHECK(cudaFree(d_out));
}
