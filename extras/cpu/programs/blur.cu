// A 3 x 3 box blur of an image on a two-dimensional grid. Beyond the edge the nearest pixel counts.
// prints: 0 0 0 0 0 0 0 0 0 0
// prints: 0 0 0 0 0 0 0 0 0 0
// prints: 0 0 1 1 1 0 0 0 0 0
// prints: 0 0 1 1 1 0 0 0 0 0
// prints: 0 0 1 1 1 0 0 0 0 1
// prints: 0 0 0 0 0 0 0 0 1 2
#include "check.h"

constexpr int height = 6, width = 10;

__global__ void blur(unsigned char *y, const unsigned char *x) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x, r = blockIdx.y * blockDim.y + threadIdx.y;
    if (r >= height || c >= width) return;
    int sum = 0;
    for (int dr = -1; dr <= 1; dr++)
        for (int dc = -1; dc <= 1; dc++) {
            const int row = min(max(r + dr, 0), height - 1);
            const int column = min(max(c + dc, 0), width - 1);
            sum += x[row * width + column];
        }
    y[r * width + c] = sum / 9;
}

int main() {
    unsigned char image[height][width] = {}, *x, *y;
    image[3][3] = 9;                  // one bright pixel, and one in a corner, which counts
    image[height - 1][width - 1] = 5; // four times there and twice beside it
    CHECK(cudaMalloc(&x, sizeof image));
    CHECK(cudaMalloc(&y, sizeof image));
    CHECK(cudaMemcpy(x, image, sizeof image, cudaMemcpyHostToDevice));
    const dim3 block(4, 4);
    blur<<<dim3((width + 3) / 4, (height + 3) / 4), block>>>(y, x);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(image, y, sizeof image, cudaMemcpyDeviceToHost));
    for (const auto &row : image)
        for (int c = 0; c < width; c++) printf("%d%c", row[c], c + 1 < width ? ' ' : '\n');
    CHECK(cudaFree(x));
    CHECK(cudaFree(y));
}
