// passed 100:
// The third exercise, for powers of two: halves, quarters, ... are exchanged with a partner and
// added; then the sums go back the same way.
#include "yours.h"

YOURS(halving, is_power_of_two) {
    const std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    // Device c is to add up chunks first[c] to first[c] + count - 1
    std::vector<int> first(k);
    int count = k;
    while (count > 1) {
        count /= 2;
        std::vector<Message> messages;
        for (int c = 0; c < k; c++) {
            const int partner = c ^ count;
            const int theirs = first[c] + (partner > c ? count : 0);
            const Tensor part = chunks(flat[c], theirs, k, count);
            messages.push_back({part, empty(part.shape, flat[partner].device)});
        }
        send(messages);
        for (int c = 0; c < k; c++) first[c] += c & count;
        for (int c = 0; c < k; c++)
            add_(chunks(flat[c], first[c], k, count), messages[c ^ count].dst);
    }
    for (; count < k; count *= 2) {
        std::vector<Message> messages;
        for (int c = 0; c < k; c++)
            messages.push_back(
                {chunks(flat[c], first[c], k, count), chunks(flat[c ^ count], first[c], k, count)});
        send(messages);
        for (int &f : first) f &= ~count;
    }
}
