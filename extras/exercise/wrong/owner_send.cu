// passed
// Right: the same in two rounds of messages.
#include "yours.h"

YOURS(owner_send) {
    const size_t k = grads.size(), P = grads[0].size();
    std::vector<Message> gather, scatter;
    std::vector<std::vector<Tensor>> received(P);
    for (size_t i = 0; i < P; i++) {
        const size_t owner = i % k;
        for (size_t c = 0; c < k; c++) {
            if (c == owner) continue;
            Tensor r = empty(grads[c][i].shape, grads[owner][i].device);
            received[i].push_back(r);
            gather.push_back({grads[c][i], r});
            scatter.push_back({grads[owner][i], grads[c][i]});
        }
    }
    send(gather);
    for (size_t i = 0; i < P; i++)
        for (const Tensor &r : received[i]) add_(grads[i % k][i], r);
    send(scatter);
}
