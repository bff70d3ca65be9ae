// Structs with pointers in the memory of a device: a matrix whose numbers are elsewhere, and a
// list, which a kernel turns round.
// prints: the matrix: 0 1 2 3 4 5
// prints: the list: 3 -> 2 -> 1
#include "check.h"

struct Matrix {
    int rows, cols;
    float *data;
};
struct Node {
    int value;
    Node *next;
};

__global__ void fill(const Matrix *m) {
    const int row = threadIdx.y, col = threadIdx.x;
    if (row < m->rows && col < m->cols) m->data[row * m->cols + col] = row * m->cols + col;
}
__global__ void turn_round(Node **first) {
    Node *turned = nullptr;
    for (Node *node = *first, *next; node; node = next) {
        next = node->next;
        node->next = turned;
        turned = node;
    }
    *first = turned;
}

int main() {
    Matrix matrix = {2, 3, nullptr}, *on_device;
    float numbers[6];
    CHECK(cudaMalloc(&matrix.data, sizeof numbers));
    CHECK(cudaMalloc(&on_device, sizeof matrix));
    CHECK(cudaMemcpy(on_device, &matrix, sizeof matrix, cudaMemcpyHostToDevice));
    fill<<<1, dim3(8, 8)>>>(on_device);
    CHECK(cudaMemcpy(&matrix, on_device, sizeof matrix, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(numbers, matrix.data, sizeof numbers, cudaMemcpyDeviceToHost));
    printf("the matrix:");
    for (float number : numbers) printf(" %g", number);
    printf("\n");
    CHECK(cudaFree(matrix.data));
    CHECK(cudaFree(on_device));

    Node *first = nullptr, **on_device_too;
    for (int value = 3; value > 0; value--) { // 1, 2, 3
        const Node node = {value, first};
        CHECK(cudaMalloc(&first, sizeof node));
        CHECK(cudaMemcpy(first, &node, sizeof node, cudaMemcpyHostToDevice));
    }
    CHECK(cudaMalloc(&on_device_too, sizeof first));
    CHECK(cudaMemcpy(on_device_too, &first, sizeof first, cudaMemcpyHostToDevice));
    turn_round<<<1, 1>>>(on_device_too);
    CHECK(cudaMemcpy(&first, on_device_too, sizeof first, cudaMemcpyDeviceToHost));
    printf("the list:");
    while (first) {
        Node node;
        CHECK(cudaMemcpy(&node, first, sizeof node, cudaMemcpyDeviceToHost));
        printf(" %d%s", node.value, node.next ? " ->" : "\n");
        CHECK(cudaFree(first));
        first = node.next;
    }
    CHECK(cudaFree(on_device_too));
}
