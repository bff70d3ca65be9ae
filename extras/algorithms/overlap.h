// OVERLAP=1: exchange gradients while backward is still computing.
// defines: group_bytes, sum_in_groups, OVERLAP
//
// The chapter wants to exchange the first gradients while the rest are still being computed. The
// host is far ahead of the devices: when train_batch() calls sum_gradients(), it has enqueued all
// of backward, but the devices have barely started it. So an allreduce on a second stream of each
// device, which waits only for the gradients that it sums, runs at the same time as the rest of
// backward:
//
//   usual streams           backward of W4 b4 W3 b3 | W2 b2 W1 b1 |                      | sgd
//   communication streams                           | sum of W3 ... b4 | sum of W1 ... b2 |

#include <set>

static size_t group_bytes =
    256 * 1024; // of a group of gradients, at least; the last may be smaller

// An event for each gradient that backward has written, by the gradient's address. (Never
// destroyed: CUDA may have shut down by then.)
static auto &written = *new std::map<const float *, cudaEvent_t>;
static std::set<const float *> written_now; // those of this step

// mgpu.cu's hook after_gradient: record the gradient's event after its last write.
static void record_written(const Tensor &grad) {
    const cudaStream_t stream = stream_of(grad.device);
    if (size(grad) == 0) return;
    cudaEvent_t &event = written[grad.ptr()];
    if (!event) CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventRecord(event, stream));
    written_now.insert(grad.ptr());
}

// Exchange the stream on which new work is enqueued with the communication stream, on each device.
// The allocator has free memory for each stream, so neither stream gets memory that the other uses.
auto &other_streams = *new std::vector<Stream>;
static void swap_streams(int k) {
    for (int c = 0; c < k; c++) {
        Stream &usual = current_stream(gpu(c));
        if ((int)other_streams.size() == c) other_streams.push_back(new_stream(gpu(c)));
        std::swap(usual, other_streams[c]);
    }
}

// Make the communication stream wait until a gradient is complete.
static void wait_for_gradient(const Tensor &grad) {
    const Device device = grad.device;
    if (written_now.count(grad.ptr())) {
        CUDA_CHECK(cudaStreamWaitEvent(stream_of(device), written[grad.ptr()], 0));
    } else { // the loss does not depend on this parameter: zero_grad() has written the gradient
        make_wait(current_stream(device), other_streams[device.id]);
    }
}

// Divide the gradients into groups and sum one after another, on the communication streams, with
// the algorithm that ALLREDUCE names. The last layers come first, because backward computes them
// first.
void sum_in_groups(const PerDevice &grads) {
    const int k = grads.size();
    swap_streams(k);
    size_t end = grads[0].size();
    while (end > 0) {
        size_t begin = end, bytes = 0;
        while (begin > 0 && bytes < group_bytes) {
            begin--;
            bytes += sizeof(float) * size(grads[0][begin]);
        }
        PerDevice group; // the gradients begin ... end-1 of each device
        for (const std::vector<Tensor> &tensors : grads) {
            group.push_back({tensors.begin() + begin, tensors.begin() + end});
        }
        for (const std::vector<Tensor> &tensors : group) {
            for (const Tensor &grad : tensors) {
                wait_for_gradient(grad);
            }
        }
        run_allreduce(option_text("ALLREDUCE"), group);
        end = begin;
    }
    written_now.clear();
    swap_streams(k);
    for (int c = 0; c < k; c++) { // before sgd() reads the sums
        make_wait(current_stream(gpu(c)), other_streams[c]);
    }
}

// Let train_batch() overlap its exchange, if OVERLAP=1.
void set_overlap() {
    after_gradient = option("OVERLAP") ? record_written : nullptr;
    if (after_gradient) exchange = sum_in_groups;
}

static const std::vector<Option> overlap_options = {
    {"OVERLAP", "whole number", "0", "1: exchange gradients while backward still computes", 0, 1},
};
static const bool overlap_added = [] {
    option_table.push_back(overlap_options[0]);
    after_options.push_back(set_overlap);
    return true;
}();
