// send: the message from gpu(0) to gpu(1) writes what the one ... reads: send them in two calls
// Pairs exchange their sums in place.
#include "yours.h"

YOURS(in_place_pairs) {
    // pairs exchange their sums in place
    std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    for (int d = 1; d < k; d *= 2) {
        std::vector<Message> messages;
        for (int c = 0; c < k; c++)
            if ((c ^ d) < k) messages.push_back({flat[c], flat[c ^ d]});
        send(messages);
    }
}
