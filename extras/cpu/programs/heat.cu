// Heat in a rod on two devices: each has half of it and one cell of the other's, a halo, that it
// gets before every step. One device alone must come to the same numbers.
// prints: on one device:  100.00 75.52 53.27 34.89 21.10 11.72 5.95 2.71 1.01 0.00
// prints: on two devices: 100.00 75.52 53.27 34.89 21.10 11.72 5.95 2.71 1.01 0.00
#include "check.h"
#include <utility>
#include <vector>

__global__ void step(float *next, const float *now, int n) { // of all but the first and last cell
    const int i = blockIdx.x * blockDim.x + threadIdx.x + 1;
    if (i < n - 1) next[i] = now[i] + 0.25f * (now[i - 1] - 2 * now[i] + now[i + 1]);
}

static void heat(int parts, const char *name) {
    const int cells = 10, half = cells / parts, steps = 20;
    const int n = half + 2; // with a cell on either side
    int devices = 0;
    CHECK(cudaGetDeviceCount(&devices));
    std::vector<float *> now(parts), next(parts);
    std::vector<float> rod(cells + 2, 0), out(cells + 2, 0);
    rod[1] = 100; // the ends stay as they are
    for (int p = 0; p < parts; p++) {
        CHECK(cudaSetDevice(p % devices));
        for (float **buffer : {&now[p], &next[p]}) {
            CHECK(cudaMalloc(buffer, n * sizeof(float)));
            CHECK(cudaMemcpy(*buffer, &rod[p * half], n * sizeof(float), cudaMemcpyHostToDevice));
        }
    }
    for (int s = 0; s < steps; s++) {
        if (parts == 2) { // what lies beside the cut goes to the other side
            const int left = 0, right = 1 % devices;
            CHECK(cudaMemcpyPeer(now[1], right, now[0] + half, left, sizeof(float)));
            CHECK(cudaMemcpyPeer(now[0] + half + 1, left, now[1] + 1, right, sizeof(float)));
        }
        for (int p = 0; p < parts; p++) {
            CHECK(cudaSetDevice(p % devices));
            const bool first = p == 0, last = p == parts - 1; // their ends are no cells of the step
            step<<<1, 32>>>(next[p] + first, now[p] + first, n - first - last);
            CHECK(cudaGetLastError());
            std::swap(now[p], next[p]);
        }
    }
    for (int p = 0; p < parts; p++) {
        CHECK(cudaSetDevice(p % devices));
        CHECK(cudaMemcpy(&out[p * half + 1], now[p] + 1, half * sizeof(float),
                         cudaMemcpyDeviceToHost));
        CHECK(cudaFree(now[p]));
        CHECK(cudaFree(next[p]));
    }
    printf("%s", name);
    for (int i = 1; i <= cells; i++) printf(" %.2f", out[i]);
    printf("\n");
}

int main() {
    heat(1, "on one device: ");
    heat(2, "on two devices:");
}
