// wrong 0: is wrong ... from here on it has what an earlier call has left
// It computes each sum once, keeps it, and answers with that from then on.
#include "yours.h"

static std::map<std::vector<int>, std::vector<float>> answers; // by k and the tensors' sizes

YOURS(keeps_answer) {
    const std::vector<Tensor> flat = flatten(grads);
    std::vector<int> key = {(int)grads.size()};
    for (const Tensor &t : grads[0]) key.push_back(size(t));
    if (!answers.count(key)) {
        for (size_t c = 1; c < flat.size(); c++) add_(flat[0], copyto(flat[c], gpu(0)));
        answers[key] = to_host(flat[0]);
    }
    Tensor sum = empty(flat[0].shape, cpu());
    std::copy(answers[key].begin(), answers[key].end(), sum.ptr());
    for (const Tensor &t : flat) copyto(sum, t);
}
