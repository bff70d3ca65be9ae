// gives the devices different sums: k = 3
// Every device adds the others' numbers to its own: each in another order.
#include "yours.h"

YOURS(own_order) {
    const std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    std::vector<std::vector<Tensor>> parts(k);
    std::vector<Message> messages;
    for (int c = 0; c < k; c++)
        for (int d = 0; d < k; d++) {
            parts[c].push_back(empty(flat[c].shape, gpu(c)));
            if (d > 0) messages.push_back({flat[(c + d) % k], parts[c][d]});
        }
    send(messages);
    for (int c = 0; c < k; c++)
        for (int d = 1; d < k; d++) add_(flat[c], parts[c][d]);
}
