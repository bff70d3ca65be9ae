// k = 2, 1 tensor, 1 number ... nothing brings gpu(1)'s number 0 to gpu(0)
// Parts of n/k, rounded down.
#include "yours.h"

YOURS(bounds) {
    std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size(), n = size(flat[0]);
    std::vector<Message> gather, back;
    for (int j = 0; j < k; j++) {
        const int begin = j * (n / k), end = (j + 1) * (n / k);
        for (int c = 0; c < k; c++) {
            if (c == j) continue;
            gather.push_back({rows(flat[c], begin, end), empty({end - begin}, flat[j].device)});
            back.push_back({rows(flat[j], begin, end), rows(flat[c], begin, end)});
        }
    }
    send(gather);
    size_t m = 0;
    for (int j = 0; j < k; j++)
        for (int c = 0; c < k; c++)
            if (c != j) add_(rows(flat[j], j * (n / k), (j + 1) * (n / k)), gather[m++].dst);
    send(back);
}
