// extras/exercise/wrong/unsigned_loop.cu:10: the host aborts ... k = 1 ... aborted, see above
// An unsigned number is never below 0: the loop does not end.
#include "yours.h"

YOURS(unsigned_loop) {
    const size_t k = grads.size(), P = grads[0].size();
    size_t first = 0;
    for (size_t i = 0; i < P; i++) {
        for (size_t c = k - 1; c >= first; c--)
            if (c != 0) add_(grads[0][i], copyto(grads[c][i], grads[0][i].device));
        for (size_t c = 1; c < k; c++) copyto(grads[0][i], grads[c][i]);
    }
}
