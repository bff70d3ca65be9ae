// passed 100:
// The second exercise: chunks go round. In each step a device sends one to its right neighbour.
#include "yours.h"

YOURS(round_and_round) {
    const std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    for (int step = 0; step < 2 * (k - 1); step++) {
        const bool adds = step < k - 1; // then the sums go round
        std::vector<Message> messages;
        for (int c = 0; c < k; c++) {
            const Tensor part = chunk(flat[c], (c - step + 2 * k) % k, k);
            const Tensor there = chunk(flat[(c + 1) % k], (c - step + 2 * k) % k, k);
            messages.push_back({part, adds ? empty(part.shape, there.device) : there});
        }
        send(messages);
        for (int c = 0; adds && c < k; c++)
            add_(chunk(flat[(c + 1) % k], (c - step + 2 * k) % k, k), messages[c].dst);
    }
}
