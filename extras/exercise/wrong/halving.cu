// sums on 1, 2, 4 devices ... (not supported: 3) ... 16     3097632          774408        516272
// Right: halving and doubling.
#include "yours.h"

YOURS(halving, is_power_of_two) {
    std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    std::vector<int> first(k, 0); // device c still sums the chunks from first[c] on
    for (int d = k / 2; d > 0; d /= 2) {
        std::vector<Message> messages;
        for (int c = 0; c < k; c++) {
            const int theirs = first[c] + ((c & d) ? 0 : d);
            Tensor part = chunks(flat[c], theirs, k, d);
            messages.push_back({part, empty(part.shape, flat[c ^ d].device)});
        }
        send(messages);
        for (int c = 0; c < k; c++) {
            if (c & d) first[c] += d;
            add_(chunks(flat[c], first[c], k, d), messages[c ^ d].dst);
        }
    }
    for (int d = 1; d < k; d *= 2) {
        std::vector<Message> messages;
        for (int c = 0; c < k; c++)
            messages.push_back(
                {chunks(flat[c], first[c], k, d), chunks(flat[c ^ d], first[c], k, d)});
        send(messages);
        for (int c = 0; c < k; c++)
            if (c & d) first[c] -= d;
    }
}
