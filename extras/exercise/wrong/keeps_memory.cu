// passed
// Right: it keeps memory on all devices from call to call, also when the next call has fewer.
#include "yours.h"

YOURS(keeps_memory) {
    static PerDevice kept;
    for (const Tensor &t : flatten(grads)) {
        if (kept.size() <= (size_t)t.device.id) kept.emplace_back();
        kept[t.device.id] = {copyto(t, t.device)};
    }
    allreduce(flatten(grads));
}
