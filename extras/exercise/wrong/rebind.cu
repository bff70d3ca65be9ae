// the sum comes to gpu(1) (rebind.cu:9, message gpu(0) to gpu(1)), but nothing writes it
// The chapter's older PyTorch text says data[i] = data[0].to(...): a new tensor in the list.
#include "yours.h"

YOURS(rebind) {
    for (size_t i = 0; i < grads[0].size(); i++) {
        std::vector<Tensor> data = across_devices(grads, i);
        for (size_t c = 1; c < data.size(); c++) add_(data[0], copyto(data[c], data[0].device));
        for (size_t c = 1; c < data.size(); c++) data[c] = copyto(data[0], data[c].device);
    }
}
