// passed 100:
// Each tensor is summed on other streams as soon as backward has written it on every device.
#include "yours.h"

static auto &events = *new std::map<const float *, cudaEvent_t>; // of each gradient
static auto &second = *new std::vector<Stream>;                  // a stream for each device
static void note_written(const Tensor &grad) {
    const cudaStream_t stream = stream_of(grad.device);
    if (size(grad) == 0) return;
    cudaEvent_t &event = events[grad.ptr()];
    if (!event) CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventRecord(event, stream));
}
static const bool is_noted = (after_gradient = note_written);

static void exchange_streams(int k) {
    for (int c = 0; c < k; c++) {
        if ((int)second.size() == c) second.push_back(new_stream(gpu(c)));
        std::swap(current_stream(gpu(c)), second[c]);
    }
}
YOURS(own_overlap) {
    const int k = grads.size();
    exchange_streams(k);
    for (size_t i = grads[0].size(); i-- > 0;) {
        if (size(grads[0][i]) == 0) continue;
        for (int c = 0; c < k; c++)
            CUDA_CHECK(cudaStreamWaitEvent(stream_of(gpu(c)), events.at(grads[c][i].ptr()), 0));
        allreduce(across_devices(grads, i));
    }
    exchange_streams(k);
    for (int c = 0; c < k; c++) make_wait(current_stream(gpu(c)), second[c]);
}
