// Exclusive prefix sums after Blelloch: a tree of sums, upwards, then downwards, 2n additions.
// prints: 3 1 7 0 4 1 6 3
// prints: 0 3 4 11 11 15 16 22
// prints: of 512 threes: 0 3 6 ... 1533
#include "check.h"
#include <vector>

// y[i] = x[0] + ... + x[i - 1], n = 2 * threads in one block
__global__ void exclusive_scan(int *y, const int *x, int n) {
    extern __shared__ int s[];
    const int t = threadIdx.x;
    s[2 * t] = x[2 * t];
    s[2 * t + 1] = x[2 * t + 1];
    int step = 1;
    for (int nodes = n / 2; nodes > 0; nodes /= 2, step *= 2) {
        __syncthreads();
        if (t < nodes) s[step * (2 * t + 2) - 1] += s[step * (2 * t + 1) - 1];
    }
    if (t == 0) s[n - 1] = 0;
    for (int nodes = 1; nodes < n; nodes *= 2) {
        step /= 2;
        __syncthreads();
        if (t < nodes) {
            const int left = step * (2 * t + 1) - 1, right = step * (2 * t + 2) - 1;
            const int sum = s[left];
            s[left] = s[right];
            s[right] += sum;
        }
    }
    __syncthreads();
    y[2 * t] = s[2 * t];
    y[2 * t + 1] = s[2 * t + 1];
}

std::vector<int> scanned(const std::vector<int> &x) {
    const int n = (int)x.size();
    const size_t bytes = n * sizeof(int);
    std::vector<int> y(n);
    int *d_x, *d_y;
    CHECK(cudaMalloc(&d_x, bytes));
    CHECK(cudaMalloc(&d_y, bytes));
    CHECK(cudaMemcpy(d_x, x.data(), bytes, cudaMemcpyHostToDevice));
    exclusive_scan<<<1, n / 2, bytes>>>(d_y, d_x, n);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(y.data(), d_y, bytes, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(d_x));
    CHECK(cudaFree(d_y));
    return y;
}
void print(const std::vector<int> &x) {
    for (size_t i = 0; i < x.size(); i++) printf("%d%s", x[i], i + 1 < x.size() ? " " : "\n");
}

int main() {
    const std::vector<int> x = {3, 1, 7, 0, 4, 1, 6, 3};
    print(x);
    print(scanned(x));
    const std::vector<int> y = scanned(std::vector<int>(512, 3));
    printf("of 512 threes: %d %d %d ... %d\n", y[0], y[1], y[2], y[511]);
}
