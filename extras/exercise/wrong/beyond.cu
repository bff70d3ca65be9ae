// beyond.cu:8: the host aborts ... k = 1, 1 tensor, 1000 numbers: aborted, see above
// It reaches beyond the list of devices.
#include "yours.h"

YOURS(beyond) {
    const std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    for (int c = 0; c < k; c++) add_(flat[c], copyto(flat.at(c ^ 1), gpu(c)));
}
