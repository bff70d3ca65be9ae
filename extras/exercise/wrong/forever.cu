// forever.cu: ... the host ... in forever, k = 2 ... no answer within ... an endless
// d is never doubled: the loop does not end.
#include "yours.h"

YOURS(forever) {
    std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    int d = 1;
    while (d < k) {
        for (int c = 0; c < k; c++) {
            if (c % (2 * d) == 0 && c + d < k) add_(flat[c], copyto(flat[c + d], flat[c].device));
        }
    }
    for (int c = 1; c < k; c++) copyto(flat[0], flat[c]);
}
