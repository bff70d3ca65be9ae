// A message from the first device to the last one and back, by the three calls that can do it. With
// one device it stays there.
// prints: cudaMemcpyPeer: 0 1 4 9 ... 9801
// prints: cudaMemcpyPeerAsync: 0 1 4 9 ... 9801
// prints: cudaMemcpy, which finds the devices by the addresses: 0 1 4 9 ... 9801
#include "check.h"
#include <vector>

int main() {
    const int n = 100;
    const size_t bytes = n * sizeof(int);
    int devices = 0, *a, *b;
    CHECK(cudaGetDeviceCount(&devices));
    const int last = devices - 1;
    CHECK(cudaSetDevice(0));
    CHECK(cudaMalloc(&a, bytes));
    CHECK(cudaSetDevice(last));
    CHECK(cudaMalloc(&b, bytes));
    std::vector<int> squares(n), got(n);
    for (int i = 0; i < n; i++) squares[i] = i * i;
    const char *names[] = {"cudaMemcpyPeer", "cudaMemcpyPeerAsync",
                           "cudaMemcpy, which finds the devices by the addresses"};
    for (int call = 0; call < 3; call++) {
        CHECK(cudaMemcpy(a, squares.data(), bytes, cudaMemcpyHostToDevice));
        CHECK(cudaMemset(b, 0xFF, bytes));
        CHECK(cudaDeviceSynchronize());
        if (call == 0) {
            CHECK(cudaMemcpyPeer(b, last, a, 0, bytes));
        } else if (call == 1) {
            CHECK(cudaMemcpyPeerAsync(b, last, a, 0, bytes, nullptr));
        } else {
            CHECK(cudaMemcpy(b, a, bytes, cudaMemcpyDefault));
        }
        CHECK(cudaMemcpy(got.data(), b, bytes, cudaMemcpyDeviceToHost));
        printf("%s: %d %d %d %d ... %d\n", names[call], got[0], got[1], got[2], got[3], got[n - 1]);
    }
    CHECK(cudaFree(b));
    CHECK(cudaFree(a));
}
