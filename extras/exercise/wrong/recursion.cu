// recursion.cu:7 ... k = 1, 1 tensor, 1000 numbers: segmentation fault ... endless recursion
// It calls itself without end.
#include "yours.h"

YOURS(recursion) {
    volatile char deep[1 << 16];
    deep[0] = 0;
    run_allreduce("recursion", grads);
    deep[1] = deep[0];
}
