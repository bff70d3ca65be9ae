// k = 1, 4 tensors ... bucket_accumulates.cu:16, add_kernel ... what an earlier call has left
// A bucket that is kept from call to call is never cleared.
#include "yours.h"

static std::map<int, std::vector<Tensor>> &buckets = *new std::map<int, std::vector<Tensor>>;
YOURS(bucket_accumulates) {
    const int k = grads.size();
    int n = 0;
    for (const Tensor &t : grads[0]) n += size(t);
    std::vector<Tensor> &bucket = buckets[1000 * k + n];
    if (bucket.empty())
        for (int c = 0; c < k; c++) bucket.push_back(full({n}, 0, gpu(c)));
    for (int c = 0; c < k; c++) {
        int at = 0;
        for (const Tensor &t : grads[c]) {
            add_(rows(bucket[c], at, at + size(t)), reshape(t, {size(t)}));
            at += size(t);
        }
    }
    allreduce(bucket);
    for (int c = 0; c < k; c++) {
        int at = 0;
        for (const Tensor &t : grads[c]) {
            copyto(rows(bucket[c], at, at + size(t)), t);
            at += size(t);
        }
    }
}
