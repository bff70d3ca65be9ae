// k = 3 ... send: message 0 (gpu(0) to gpu(1)) writes what message 4 (gpu(1) to gpu(2)) of the same
// The messages of all rounds of the all-gather are in one call.
#include "yours.h"

YOURS(gather_in_one_send) {
    const std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    for (int step = 0; step < k - 1; step++) {
        std::vector<Message> messages;
        for (int c = 0; c < k; c++) {
            const Tensor part = chunk(flat[c], (c - step + k) % k, k);
            messages.push_back({part, empty(part.shape, gpu((c + 1) % k))});
        }
        send(messages);
        for (int c = 0; c < k; c++)
            add_(chunk(flat[(c + 1) % k], (c - step + k) % k, k), messages[c].dst);
    }
    std::vector<Message> messages;
    for (int step = 0; step < k - 1; step++)
        for (int c = 0; c < k; c++) {
            const int j = (c + 1 - step + k) % k;
            messages.push_back({chunk(flat[c], j, k), chunk(flat[(c + 1) % k], j, k)});
        }
    send(messages);
}
