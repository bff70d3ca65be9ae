// Conway's game of life on a torus: a glider is, after 4 generations, where it was, one cell lower
// and further right. Two grids take turns.
// prints: ........
// prints: ..#.....
// prints: ...#....
// prints: .###....
// prints: ........
// prints: and 4 generations later
// prints: ........
// prints: ........
// prints: ...#....
// prints: ....#...
// prints: ..###...
#include "check.h"
#include <utility>

constexpr int rows = 5, columns = 8;

__global__ void generation(char *next, const char *now) {
    const int r = threadIdx.y, c = threadIdx.x;
    int neighbours = 0;
    for (int dr = rows - 1; dr <= rows + 1; dr++)
        for (int dc = columns - 1; dc <= columns + 1; dc++)
            neighbours += now[(r + dr) % rows * columns + (c + dc) % columns];
    const bool alive = now[r * columns + c];
    neighbours -= alive;
    next[r * columns + c] = neighbours == 3 || (alive && neighbours == 2);
}
static void print(const char cells[rows][columns]) {
    for (int r = 0; r < rows; r++, printf("\n"))
        for (int c = 0; c < columns; c++) printf("%c", cells[r][c] ? '#' : '.');
}

int main() {
    char cells[rows][columns] = {}, *now, *next;
    cells[1][2] = cells[2][3] = cells[3][1] = cells[3][2] = cells[3][3] = 1;
    CHECK(cudaMalloc(&now, sizeof cells));
    CHECK(cudaMalloc(&next, sizeof cells));
    CHECK(cudaMemcpy(now, cells, sizeof cells, cudaMemcpyHostToDevice));
    print(cells);
    for (int i = 0; i < 4; i++) {
        generation<<<1, dim3(columns, rows)>>>(next, now);
        CHECK(cudaGetLastError());
        std::swap(now, next);
    }
    CHECK(cudaMemcpy(cells, now, sizeof cells, cudaMemcpyDeviceToHost));
    printf("and 4 generations later\n");
    print(cells);
    CHECK(cudaFree(now));
    CHECK(cudaFree(next));
}
