// is not deterministic: k = 3
// It adds in one order and in the other by turns, as one that takes what comes first might.
#include "yours.h"

YOURS(any_order) {
    std::vector<Tensor> flat = flatten(grads);
    static int calls = 0;
    if (calls++ % 2) std::reverse(flat.begin(), flat.end());
    allreduce(flat);
}
