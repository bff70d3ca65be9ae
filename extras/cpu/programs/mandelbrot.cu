// The Mandelbrot set in letters: how many turns it takes until z^2 + c leaves a circle, up to 20:
// after more of them what a processor rounds off would decide.
// prints: .......................
// prints: ..............::+#.....
// prints: ............:::###::...
// prints: ........::::+#######::.
// prints: .....:::###+#########:.
// prints: .###################::.
// prints: .....:::###+#########:.
// prints: ........::::+#######::.
// prints: ............:::###::...
// prints: ..............::+#.....
// prints: .......................
#include "check.h"

constexpr int height = 11, width = 23, most = 20;

__global__ void mandelbrot(char *picture) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (column >= width) return;
    const double x = column / 8.0 - 2.125, y = (row - height / 2) / 4.0;
    double re = 0, im = 0;
    int turns = 0;
    while (turns < most && re * re + im * im <= 4) {
        const double next = re * re - im * im + x;
        im = 2 * re * im + y;
        re = next;
        turns++;
    }
    picture[row * width + column] = turns == most ? '#' : turns > 9 ? '+' : turns > 4 ? ':' : '.';
}

int main() {
    char *d_picture, picture[height][width];
    CHECK(cudaMalloc(&d_picture, sizeof picture));
    mandelbrot<<<dim3(2, height), 16>>>(d_picture);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(picture, d_picture, sizeof picture, cudaMemcpyDeviceToHost));
    for (const auto &row : picture) printf("%.*s\n", width, row);
    CHECK(cudaFree(d_picture));
}
