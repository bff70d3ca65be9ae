// Unified memory: the host and the device use one pointer, in turns. A linked list works, too.
// prints: 2 4 6 8
// prints: the list: 0 10 20
#include "check.h"

struct Node {
    int value;
    Node *next;
};

__global__ void twice(int *x) { x[threadIdx.x] *= 2; }
__global__ void times_ten(Node *list) {
    for (Node *node = list; node; node = node->next) node->value *= 10;
}

int main() {
    int *x;
    CHECK(cudaMallocManaged(&x, 4 * sizeof(int)));
    for (int i = 0; i < 4; i++) x[i] = i + 1;
    twice<<<1, 4>>>(x);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize()); // before the host looks
    printf("%d %d %d %d\n", x[0], x[1], x[2], x[3]);

    Node *list = nullptr;
    for (int i = 2; i >= 0; i--) {
        Node *node;
        CHECK(cudaMallocManaged(&node, sizeof(Node)));
        node->value = i;
        node->next = list;
        list = node;
    }
    times_ten<<<1, 1>>>(list);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    printf("the list:");
    while (list) {
        Node *next = list->next;
        printf(" %d", list->value);
        CHECK(cudaFree(list));
        list = next;
    }
    printf("\n");
    CHECK(cudaFree(x));
}
