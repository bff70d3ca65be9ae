// Four streams: each copies its part in, works on it and copies it out, while the others do the
// same. Only pinned memory lets copies run beside kernels.
// prints: sum of squares below 4096: 22898104320
// prints: wrong 0
#include "check.h"

__global__ void square(double *x, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= x[i];
}

int main() {
    const int parts = 4, part = 1024, n = parts * part;
    const size_t bytes = part * sizeof(double);
    double *host, *device;
    cudaStream_t streams[parts];
    CHECK(cudaMallocHost(&host, n * sizeof(double)));
    CHECK(cudaMalloc(&device, n * sizeof(double)));
    for (int i = 0; i < n; i++) host[i] = i;
    for (cudaStream_t &stream : streams) CHECK(cudaStreamCreate(&stream));
    for (int p = 0; p < parts; p++) {
        double *h = host + p * part, *d = device + p * part;
        CHECK(cudaMemcpyAsync(d, h, bytes, cudaMemcpyHostToDevice, streams[p]));
        square<<<part / 256, 256, 0, streams[p]>>>(d, part);
        CHECK(cudaGetLastError());
        CHECK(cudaMemcpyAsync(h, d, bytes, cudaMemcpyDeviceToHost, streams[p]));
    }
    CHECK(cudaDeviceSynchronize());
    double sum = 0;
    int wrong = 0;
    for (int i = 0; i < n; i++) {
        sum += host[i];
        wrong += host[i] != (double)i * i;
    }
    printf("sum of squares below %d: %.0f\nwrong %d\n", n, sum, wrong);
    for (cudaStream_t stream : streams) CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFreeHost(host));
    CHECK(cudaFree(device));
}
