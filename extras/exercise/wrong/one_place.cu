// k = 3 ... send: the message from gpu(1) to gpu(0) writes what the one from gpu(2) to gpu(0)
// Two messages of a round go to one place.
#include "yours.h"

YOURS(one_place) {
    const std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    const Tensor part = empty(flat[0].shape, gpu(0));
    std::vector<Message> messages;
    for (int c = 1; c < k; c++) messages.push_back({flat[c], part});
    if (k < 3) allreduce(flat);
    else send(messages);
}
