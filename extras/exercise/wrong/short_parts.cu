// is wrong: k = 2 ... nothing brings gpu(1)'s number 0 to gpu(0)
// Parts of n/k, rounded down: the last n%k numbers belong to nobody.
#include "yours.h"

YOURS(short_parts) {
    const std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    const int length = size(flat[0]) / k;
    auto part = [&](int c, int j) { return rows(flat[c], j * length, (j + 1) * length); };
    for (int j = 0; j < k; j++)
        for (int c = 0; c < k; c++)
            if (c != j) add_(part(j, j), copyto(part(c, j), gpu(j)));
    for (int j = 0; j < k; j++)
        for (int c = 0; c < k; c++)
            if (c != j) copyto(part(j, j), part(c, j));
}
