// passed ... 48     3097632          774408        387204
// Right: a ring in which one half goes round to the right and the other one to the left.
#include "yours.h"

YOURS(bidirectional) {
    const std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    for (bool reduce : {true, false})
        for (int step = 0; step < k - 1; step++) {
            std::vector<Message> messages;
            std::vector<Tensor> sums;
            for (int c = 0; c < k; c++)
                for (int way : {1, -1}) {
                    const int next = (c + way + k) % k, at = c + way * (reduce ? -step : 1 - step);
                    auto part = [&](int device) {
                        return chunk(chunk(flat[device], way < 0, 2), (at + k) % k, k);
                    };
                    sums.push_back(part(next));
                    messages.push_back(
                        {part(c), reduce ? empty(sums.back().shape, gpu(next)) : sums.back()});
                }
            send(messages);
            for (size_t m = 0; m < messages.size() && reduce; m++) add_(sums[m], messages[m].dst);
        }
}
