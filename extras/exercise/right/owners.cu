// passed 100:
// The first exercise: tensor i is summed on device i mod k.
#include "yours.h"

YOURS(owners) {
    const int k = grads.size(), P = grads[0].size();
    std::vector<Message> gather, broadcast;
    for (int i = 0; i < P; i++)
        for (int c = 0; c < k; c++) {
            if (c == i % k) continue;
            const Tensor &sum = grads[i % k][i];
            gather.push_back({grads[c][i], empty(sum.shape, sum.device)});
            broadcast.push_back({sum, grads[c][i]});
        }
    send(gather);
    for (size_t m = 0; m < gather.size(); m++) add_(broadcast[m].src, gather[m].dst);
    send(broadcast);
}
