// negative_chunk.cu:11: there is no chunk -1 of 3 ... : 1, 2; wrong on: 3, 4
// (c - step) % k is negative in C++.
#include "yours.h"

YOURS(negative_chunk) {
    std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    for (int step = 0; step < k - 1; step++) {
        std::vector<Message> messages;
        for (int c = 0; c < k; c++) {
            const Tensor part = chunk(flat[c], (c - step) % k, k);
            messages.push_back({part, empty(part.shape, flat[(c + 1) % k].device)});
        }
        send(messages);
        for (int c = 0; c < k; c++)
            add_(chunk(flat[(c + 1) % k], (c - step) % k, k), messages[c].dst);
    }
    for (int step = 0; step < k - 1; step++) {
        std::vector<Message> messages;
        for (int c = 0; c < k; c++) {
            const int j = (c + 1 - step) % k;
            messages.push_back({chunk(flat[c], j, k), chunk(flat[(c + 1) % k], j, k)});
        }
        send(messages);
    }
}
