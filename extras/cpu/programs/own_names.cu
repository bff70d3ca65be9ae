// Names that are namespace std's in other headers, and the program's own in this one: nvcc includes
// no <vector> or <numeric> by itself, but <cmath> and <cstring>.
// prints: 10 3 4 9 2
#include <cstdio>
using namespace std;

__device__ int data[4];
int size = 4;
struct hash {
    int string, map, function;
};
template <class T> struct vector {
    T x, y;
};
__global__ void fill(int *p, int n) {
    if (threadIdx.x < n) p[threadIdx.x] = threadIdx.x + 1;
}
__global__ void reduce(const int *in, int *out) {
    for (int i = 0; i < 4; i++) *out += in[i];
}
__global__ void copy(int *from, int *to, int n) {
    if (threadIdx.x < n) to[threadIdx.x] = from[threadIdx.x];
}
__global__ void transform(const int *p, int n) {
    if (threadIdx.x < n) data[threadIdx.x] = p[threadIdx.x] * p[threadIdx.x];
}

int main() {
    int *a, *b, sum, h[4], squares[4];
    cudaMalloc(&a, sizeof h);
    cudaMalloc(&b, sizeof h);
    cudaMemset(b, 0, sizeof h);
    fill<<<1, 32>>>(a, size);
    reduce<<<1, 1>>>(a, b);
    cudaMemcpy(&sum, b, sizeof sum, cudaMemcpyDeviceToHost);
    copy<<<1, 32>>>(a, b, size);
    transform<<<1, 32>>>(b, size);
    cudaMemcpy(h, b, sizeof h, cudaMemcpyDeviceToHost);
    cudaMemcpyFromSymbol(squares, data, sizeof squares);
    const vector<int> v = {hash{1, 2, 3}.map, (int)strlen("abc")};
    printf("%d %d %d %d %d\n", sum, h[2], h[3], squares[2], min(v.x, v.y));
}
