// index.cu:7: the host aborts: is an index ... k = 1 ... aborted, see above
// An index beyond a list.
#include "yours.h"

YOURS(index) {
    std::vector<Tensor> flat = flatten(grads);
    add_(flat[0], flat[flat.size()]);
}
