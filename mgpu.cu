// Training on multiple GPUs, from scratch: a chapter of "Dive into Deep Learning" in one CUDA file.
//
//     make run GPUS=2      train LeNet on Fashion-MNIST on two devices
//     make test            check every kernel, and that k devices learn what one device learns
//
// Read sections 2 to 6 beside the chapter (its MXNet tab), which has the same titles, names and
// order. Lines marked `ours` are additions or changes. Section 7 is the chapter's third exercise,
// with a place for your own allreduce. Sections 8 to 11 build what the chapter takes from its
// framework.
//
//    1. The vocabulary                    8. Kernels and operators
//    2. A toy network                     9. Autograd
//    3. Data synchronization             10. Devices and memory
//    4. Distributing data                11. Data
//    5. Training                         12. Checks
//    6. Experiment                       13. Program
//    7. The exercise
//
// Notation: N images, C channels, H rows, W columns (or weights), O output channels, K the side of
// a convolution's window, k devices. Tensors are row-major, NCHW, and hold 32-bit floats. dX is the
// gradient of the loss with respect to X. F is torch.nn.functional. Words such as GPUS=2 are
// options. Without a GPU, g++ compiles this file with extras/cpu/cuda_runtime.h, which emulates k
// devices.

#include <cuda_runtime.h>
#include <algorithm>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstdarg>
#include <cstring>
#include <fstream>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>
#include <unistd.h>

// ---------------------------------------------------------------------------------------------
// 1. The vocabulary
// Read Device and Tensor. Look the other names up when you meet them.

// Where a tensor is: on device i, gpu(i), or on the host, cpu(), which runs this program.
struct Device {
    int id; // i, or -1 for the host
    template <class T> operator T *() const = delete; // it is no stream: use stream_of(device)
};
inline Device gpu(int i) { return {i}; } // on a GPU, which several devices may share
inline Device cpu() { return {-1}; }

// An array of floats in one memory, a device's or the host's. A Tensor is a handle, as in Python:
// assigning it copies no data, and even a const Tensor's data may be written. The memory is freed
// with the last handle.
struct Tensor {
    Device device = {-1};
    std::vector<int> shape;
    std::shared_ptr<float> data = nullptr;  // its elements; null if there are none
    std::shared_ptr<Tensor> grad = nullptr; // its gradient; null if none is computed
    bool stale = false; // of a gradient: it has old numbers, to be zeroed before the first +=
    float *ptr() const; // the address of its elements
};

// One list of tensors per device: x[c][i] is tensor i on device c.
typedef std::vector<std::vector<Tensor>> PerDevice;

// --- The other names, by the section that defines them: 3. Data synchronization, 7. The exercise
Tensor copyto(const Tensor &src, Device device);   // a copy of src there
void copyto(const Tensor &src, const Tensor &dst); // dst[:] = src
extern std::function<void(const PerDevice &grads)> exchange; // the allreduce in use; null: naive

// 8. Operators, which enqueue their kernels and return at once
Tensor conv2d(const Tensor &X, const Tensor &W, const Tensor &b);      // (N,C,H,W) (O,C,K,K) (O)
Tensor relu(const Tensor &X);                                          // any shape
Tensor avg_pool2d(const Tensor &X, int kernel_size, int stride);       // (N,C,H,W)
Tensor linear(const Tensor &X, const Tensor &W, const Tensor &b);      // (N,C) (C,O) (O): X @ W + b
Tensor softmax_cross_entropy(const Tensor &y_hat, const Tensor &y);    // (N,classes) (N) -> (N)
void sgd(const std::vector<Tensor> &params, float lr, int batch_size); // param -= lr * grad / batch
void add_(const Tensor &a, const Tensor &b);                           // a[:] += b
constexpr int threads = 256; // in a block
int blocks(long n);          // how many blocks give each of n elements a thread
#ifndef LAUNCH               // launch a kernel, then check for errors
#define LAUNCH(...) do { __VA_ARGS__; check_launch(__FILE__, __LINE__); } while (0)
#endif

// 9. Autograd
void attach_grad(std::vector<Tensor> &params); // give each parameter a gradient of 0
void backward(const Tensor &l); // set the gradients of sum(l): they do not add up over passes
const Tensor &gradient(const Tensor &param);         // param.grad, or an error if there is none
PerDevice gradients(const PerDevice &device_params); // the gradients of all parameters
std::vector<Tensor> across_devices(const PerDevice &x, size_t i); // [x[c][i] for c in range(k)]
struct NoGrad { // while one exists, operators are not recorded, as under torch.no_grad()
    bool before;
    NoGrad();
    ~NoGrad();
};

// 10. Devices and memory
Device try_gpu(int i); // gpu(i), or an error if there is none (d2l's returns cpu() then)
std::vector<Device> first_devices(int k); // [try_gpu(i) for i in range(k)]
cudaStream_t stream_of(Device device);    // its stream; makes the device CUDA's current one
void waitall();                           // make the host wait for all devices
int size(const Tensor &t);                // the product of its shape
void size(const std::vector<Tensor> &list) = delete; // of a list of tensors: use list.size()
Tensor empty(std::vector<int> shape, Device device); // uninitialized memory
Tensor full(std::vector<int> shape, float value, Device device);
Tensor normal(float scale, std::vector<int> shape);      // N(0, scale^2), on the host
Tensor arange(int n);                                    // 0, 1, ..., n-1, on the host
Tensor reshape(const Tensor &X, std::vector<int> shape); // shares X's memory and gradient
Tensor rows(const Tensor &X, int begin, int end);        // X[begin:end], shares X's memory

// 11. Data
struct DataIter { // minibatches: images X (N,1,28,28), with pixels from 0 to 1, and labels y (N)
    const struct DataSet *set;
    int batch_size;
    bool shuffle;
    std::vector<int> order; // sample indices, in the order of this epoch
    Tensor X, y;            // room for all samples, on the host; a minibatch is a view
    std::pair<Tensor, Tensor> minibatch(int begin); // the one that begins at this sample
    std::vector<std::pair<Tensor, Tensor>> epoch(); // all of them, reshuffled if `shuffle`
};
struct Timer {                 // a stopwatch
    std::vector<double> times; // seconds from each start() to its stop()
    double started = 0;
    void start() { started = now(); }
    void stop() { times.push_back(now() - started); }
    double avg() const { return std::accumulate(times.begin(), times.end(), 0.0) / times.size(); }
    static double now();
};
struct Animator { // in place of the chapter's plot: a progress bar, and a row for each epoch
    int samples;  // in an epoch
    std::vector<float> Y = {};                   // test accuracy after each epoch
    std::vector<double> loss = {}, seconds = {}; // mean loss and time of each epoch
    std::vector<Tensor> pending = {};            // losses of this epoch's minibatches
    int done = 0;                                // samples in `pending`
    void add_losses(const std::vector<Tensor> &losses);
    void end_epoch(float acc, double seconds); // clear the bar and compute the mean loss
    void add(int epoch, float acc, double seconds);
};
std::pair<DataIter, DataIter> load_data_fashion_mnist(int batch_size); // to train on, to test on
int count_correct(const Tensor &y_hat, const Tensor &y); // rows of y_hat whose argmax is the label
float evaluate_accuracy_gpu(const std::function<Tensor(const Tensor &)> &net, DataIter &test_iter,
                            Device device);
std::string to_string(const Tensor &t); // its numbers, as the chapter prints them

// 12. Checks, which end the program unless k devices agree with one, and replicas are equal
void check_first_minibatch(DataIter &train_iter, const std::vector<Device> &devices, float lr);
void check_replicas(const PerDevice &device_params);

// 13. The command line, and what prints
struct Options {
    int gpus = 1, batch = 256, epochs = 10, seed = 0, limit = 0; // limit: samples of a set; 0: all
    float lr = 0.2f;
    int shuffle = 1, checks = 1, peers = 1;
    std::string allreduce = "naive", data = "data";
};
extern Options options;
extern std::function<void(const Animator &, const std::vector<Tensor> &params)> after_epoch;
std::string str(const std::vector<Device> &devices); // [gpu(0), gpu(1)]
[[noreturn]] __attribute__((format(printf, 1, 2))) void error(const char *format, ...);

// ---------------------------------------------------------------------------------------------
// 2. A toy network                                                     chapter: "A Toy Network"
// LeNet: its parameters, the model, its loss.

std::vector<Tensor> params;           // on the host
std::vector<std::string> param_names; // ours: for messages

// Initialize model parameters (ours: in a function)
void init_params() {
    const float scale = 0.01f;
    Tensor W1 = normal(scale, {20, 1, 3, 3});
    Tensor b1 = full({20}, 0, cpu());
    Tensor W2 = normal(scale, {50, 20, 5, 5});
    Tensor b2 = full({50}, 0, cpu());
    Tensor W3 = normal(scale, {800, 128});
    Tensor b3 = full({128}, 0, cpu());
    Tensor W4 = normal(scale, {128, 10});
    Tensor b4 = full({10}, 0, cpu());
    params = {W1, b1, W2, b2, W3, b3, W4, b4};
    param_names = {"W1", "b1", "W2", "b2", "W3", "b3", "W4", "b4"}; // ours
}

// Define the model
//   X (N,1,28,28) -> h1_conv (N,20,26,26) -> h1 (N,20,13,13) -> h2_conv (N,50,9,9)
//   -> h2 (N,50,4,4) = (N,800) -> h3 (N,128) -> y_hat (N,10)
Tensor lenet(const Tensor &X, const std::vector<Tensor> &params) {
    Tensor h1_conv = conv2d(X, params[0], params[1]);
    Tensor h1_activation = relu(h1_conv);
    Tensor h1 = avg_pool2d(h1_activation, 2, 2);
    Tensor h2_conv = conv2d(h1, params[2], params[3]);
    Tensor h2_activation = relu(h2_conv);
    Tensor h2 = avg_pool2d(h2_activation, 2, 2);
    h2 = reshape(h2, {h2.shape[0], -1});
    Tensor h3_linear = linear(h2, params[4], params[5]);
    Tensor h3 = relu(h3_linear);
    Tensor y_hat = linear(h3, params[6], params[7]);
    return y_hat;
}

// Cross-entropy loss function, one number per sample
Tensor loss(const Tensor &y_hat, const Tensor &y) { return softmax_cross_entropy(y_hat, y); }

// The network that train() trains. (ours: extras/networks/ puts others here)
std::function<Tensor(const Tensor &X, const std::vector<Tensor> &params)> net = lenet;

// ---------------------------------------------------------------------------------------------
// 3. Data synchronization                                      chapter: "Data Synchronization"
// Two operations: copy the parameters to every device, and sum the gradients over all devices. Both
// need copies. A copy from one memory to another is called a message.

// Copy the parameters to a device and attach gradients to the copies.
std::vector<Tensor> get_params(const std::vector<Tensor> &params, Device device) {
    std::vector<Tensor> new_params;
    for (const Tensor &p : params) {
        new_params.push_back(copyto(p, device));
    }
    attach_grad(new_params); // ours: in one call, so that the gradients are contiguous in memory
    return new_params;
}

// Return [get_params(params, d) for d in devices]. (ours: the chapter writes the list in train)
PerDevice replicate(const std::vector<Device> &devices) {
    PerDevice device_params;
    for (Device d : devices) {
        device_params.push_back(get_params(params, d));
    }
    return device_params;
}

// Sum data[0], data[1], ... elementwise and write the sum to each of them. data[i] is on device i.
// Device 0 receives the other tensors, adds them, and sends the sum back.
void allreduce(std::vector<Tensor> data) {
    for (size_t i = 1; i < data.size(); i++) {
        add_(data[0], copyto(data[i], data[0].device)); // data[0][:] += data[i]
    }
    for (size_t i = 1; i < data.size(); i++) {
        copyto(data[0], data[i]); // data[i] = copyto(...) would only change this copy of the list
    }
}

// --- The message itself (ours: the chapter's framework has it)
// The host only enqueues messages. A stream is a queue of a device. Work in one stream runs in
// order; work in different streams may run at the same time. So work that reads what another stream
// writes, or overwrites what another stream reads, must wait for that stream.

struct Stream {
    cudaStream_t handle = nullptr;
    cudaEvent_t ready = nullptr; // a marker in this stream: see make_wait
};
Stream &current_stream(Device device); // the device's stream, on which new work is enqueued
int physical(Device device);           // CUDA's number for its GPU, which several devices may share

// Check a CUDA call. If it failed, print its file, its line and CUDA's message, and exit.
#define CUDA_CHECK(call) check_cuda((call), #call, __FILE__, __LINE__)
void check_cuda(cudaError_t code, const char *call, const char *file, int line);
void check_launch(const char *file, int line); // the same for the last launch: see LAUNCH

// Make later work on `waiting` wait for all earlier work on `other`. The host does not wait.
//
//   other       ... work ... [record ready] ... more work ...
//                                  |
//                                  v
//   waiting     ... work ...  [wait for it] ... later work ...
//
// Recording the event again does not change earlier waits, so one event per stream is enough.
void make_wait(Stream &waiting, const Stream &other) {
    CUDA_CHECK(cudaEventRecord(other.ready, other.handle));
    CUDA_CHECK(cudaStreamWaitEvent(waiting.handle, other.ready, 0));
}

void make_wait(Device waiting, Device other) {
    make_wait(current_stream(waiting), current_stream(other));
}

// Enqueue a copy dst[:] = src between two devices on a stream of dst's device.
void peer_copy(const Tensor &src, const Tensor &dst, Stream &stream) {
    if (size(src) != size(dst)) error("%d numbers do not fit a tensor of %d", size(src), size(dst));
    CUDA_CHECK(cudaMemcpyPeerAsync(dst.ptr(), physical(dst.device), src.ptr(), physical(src.device),
                                   sizeof(float) * size(src), stream.handle));
}

// Set dst[:] = src, which must have the same size. The host waits only if dst is on the host.
void copyto(const Tensor &src, const Tensor &dst) {
    if (size(src) != size(dst)) error("%d numbers do not fit a tensor of %d", size(src), size(dst));
    const Device from = src.device, to = dst.device;
    const size_t bytes = sizeof(float) * size(src);
    const float *x = src.ptr();
    float *y = dst.ptr();
    if (bytes == 0) return;
    if (from.id < 0 && to.id < 0) {
        memcpy(y, x, bytes);
    } else if (from.id >= 0 && to.id >= 0 && from.id != to.id) {
        make_wait(to, from); // read src only after it is written
        peer_copy(src, dst, current_stream(to));
        make_wait(from, to); // overwrite src only after it is read
    } else {                 // within a device, or between a device and the host
        const Device device = to.id < 0 ? from : to;
        const cudaMemcpyKind kind = from.id < 0 ? cudaMemcpyHostToDevice
                                    : to.id < 0 ? cudaMemcpyDeviceToHost
                                                : cudaMemcpyDeviceToDevice;
        const cudaStream_t stream = stream_of(device);
        CUDA_CHECK(cudaMemcpyAsync(y, x, bytes, kind, stream));
        if (to.id < 0) CUDA_CHECK(cudaStreamSynchronize(stream)); // the host reads dst next
    }
}

// Return a copy of src on a device or on the host.
Tensor copyto(const Tensor &src, Device device) {
    Tensor dst = empty(src.shape, device);
    copyto(src, dst);
    return dst;
}

// ---------------------------------------------------------------------------------------------
// 4. Distributing data                                            chapter: "Distributing Data"

// Split X along its first axis into one contiguous shard per device, and copy each shard there.
// (ours: the chapter calls Gluon's function, which refuses to divide 256 samples among 3 devices.
// This one gives them 86, 85 and 85, torch.chunk 86, 86 and 84. If there are fewer samples than
// devices, the last shards are empty.)
std::vector<Tensor> split_and_load(const Tensor &X, const std::vector<Device> &devices) {
    const int n = X.shape[0], k = devices.size();
    std::vector<Tensor> shards;
    int begin = 0;
    for (int c = 0; c < k; c++) {
        const int end = begin + n / k + (c < n % k ? 1 : 0);
        shards.push_back(copyto(rows(X, begin, end), devices[c]));
        begin = end;
    }
    return shards;
}

// Split `X` and `y` into multiple devices.
std::pair<std::vector<Tensor>, std::vector<Tensor>>
split_batch(const Tensor &X, const Tensor &y, const std::vector<Device> &devices) {
    if (X.shape[0] != y.shape[0]) {
        error("split_batch: %d samples but %d labels", X.shape[0], y.shape[0]);
    }
    return {split_and_load(X, devices), split_and_load(y, devices)};
}

// ---------------------------------------------------------------------------------------------
// 5. Training                                                              chapter: "Training"

// Take one step of SGD on all devices. (ours: it returns the losses, one number per sample.)
// Operators record themselves for backward(), so there is no autograd.record(). device_params is
// const: its tensors are handles, and only their numbers change.
std::vector<Tensor> train_batch(const Tensor &X, const Tensor &y, const PerDevice &device_params,
                                const std::vector<Device> &devices, float lr) {
    auto [X_shards, y_shards] = split_batch(X, y, devices);
    // Loss is calculated separately on each GPU
    std::vector<Tensor> losses;
    for (size_t c = 0; c < devices.size(); c++) {
        Tensor y_hat = net(X_shards[c], device_params[c]); // ours: net is lenet
        losses.push_back(loss(y_hat, y_shards[c]));
    }
    for (const Tensor &l : losses) { // Back Propagation is performed separately on each GPU
        backward(l);
    }
    // Sum all gradients from each GPU and broadcast them to all GPUs
    const PerDevice grads = gradients(device_params); // ours: a list of all .grad
    if (exchange) {                                   // ours: ALLREDUCE, see section 7
        exchange(grads);
    } else {
        for (size_t i = 0; i < grads[0].size(); i++) {
            // [device_params[c][i].grad for c in range(len(devices))]
            allreduce(across_devices(grads, i));
        }
    }
    // The model parameters are updated separately on each GPU
    for (const std::vector<Tensor> &param : device_params) {
        sgd(param, lr, X.shape[0]); // Here, we use a full-size batch
    }
    return losses; // ours
}

// Train on num_gpus devices. batch_size counts the samples over all devices.
void train(int num_gpus, int batch_size, float lr) {
    auto [train_iter, test_iter] = load_data_fashion_mnist(batch_size);
    const std::vector<Device> devices = first_devices(num_gpus); // ours: a function for the list
    // Copy model parameters to num_gpus GPUs
    PerDevice device_params = replicate(devices); // ours: a function for the list
    const int num_epochs = options.epochs;        // ours: 10 in the chapter
    Animator animator = {train_iter.X.shape[0]};  // ours: a table, for so many samples
    Timer timer;
    check_first_minibatch(train_iter, devices, lr); // ours
    for (int epoch = 0; epoch < num_epochs; epoch++) {
        timer.start();
        for (auto [X, y] : train_iter.epoch()) { // ours: .epoch()
            // Perform multi-GPU training for a single minibatch
            auto losses = train_batch(X, y, device_params, devices, lr); // ours: keeps the losses
            waitall();
            animator.add_losses(losses); // ours
        }
        timer.stop();
        check_replicas(device_params); // ours
        // Verify the model on GPU 0
        auto model = [&](const Tensor &x) { return net(x, device_params[0]); }; // ours: net
        const float acc = evaluate_accuracy_gpu(model, test_iter, devices[0]);
        animator.add(epoch + 1, acc, timer.times.back());         // ours: the seconds
        if (after_epoch) after_epoch(animator, device_params[0]); // ours: see section 13
    }
    printf("test acc: %.2f, %.1f sec/epoch on %s\n", animator.Y.back(), timer.avg(),
           str(devices).c_str());
}

// ---------------------------------------------------------------------------------------------
// 6. Experiment                                                          chapter: "Experiment"
// The experiments are train(1, 256, 0.2) and train(2, 256, 0.2): make run GPUS=1, make run GPUS=2.
// Before the training, the program shows the chapter's examples for sections 3 and 4.

// Print each tensor on lines of its own, below a title.
static void print(const char *title, const std::vector<Tensor> &tensors) {
    printf("%s:\n", title);
    for (const Tensor &t : tensors) {
        printf(" %s\n", to_string(t).c_str());
    }
}

// Run the examples (ours: in a function, on num_gpus devices, at least two). They print numbers
// that are copied back from the devices, so that a mistake in copyto() or allreduce() shows here
// first.
void demos(int num_gpus) {
    std::vector<Tensor> new_params = get_params(params, try_gpu(0));
    printf("b1 weight: %s\n", to_string(new_params[1]).c_str());
    printf("b1 grad: %s\n", to_string(gradient(new_params[1])).c_str());

    const std::vector<Device> devices = first_devices(std::max(2, num_gpus));
    std::vector<Tensor> data;
    for (Device d : devices) {
        data.push_back(full({1, 2}, d.id + 1, d)); // np.ones((1, 2), ctx=d2l.try_gpu(i)) * (i + 1)
    }
    print("before allreduce", data);
    allreduce(data);
    print("after allreduce", data);

    Tensor matrix = reshape(arange(20), {4, 5}); // also called data in the chapter
    std::vector<Tensor> split = split_and_load(matrix, devices);
    print("input ", {matrix}); // with the chapter's space
    printf("load into %s\n", str(devices).c_str());
    print("output", split);
}

// ---------------------------------------------------------------------------------------------
// 7. The exercise                                             chapter: "Exercises", the third one
// What an allreduce costs, the tools to write one, an example, and the place for yours.
// ALLREDUCE=name selects an algorithm. (Solutions are in extras/algorithms/.)
//
// Contract. grads[c][i] is on device c and has the same size on every device. The tensors of a
// device are contiguous in memory, as attach_grad() allocates them. An algorithm overwrites every
// grads[c][i] with the sum over all devices, bitwise identical on all devices. It enqueues its work
// and returns; it should not make the host wait. Work that is enqueued later on a device sees the
// sums. The algorithm accepts any number of devices (`algorithms`, below, may say otherwise) and
// tensors of any size, including 0.
//
// Cost, for k devices, each with b bytes in P tensors:
//   messages   how many copies are made from one memory to another
//   busiest    how many bytes the busiest device receives
//   rounds     messages in the longest chain in which each must wait for the one before
// If a message of m bytes takes alpha + m * beta seconds (alpha is the latency, 1 / beta the
// bandwidth), an allreduce takes about rounds * alpha + busiest * beta. (Where the busiest device
// never receives while it sends, as in naive and bucket, busiest * beta counts twice.)

// --- tools, besides copyto(), add_() and empty()

// View all tensors of a device as one long tensor. result[c] is the memory of grads[c].
std::vector<Tensor> flatten(const PerDevice &grads) {
    std::vector<Tensor> flat;
    for (const std::vector<Tensor> &tensors : grads) {
        Tensor all = tensors[0];
        all.shape = {0};
        for (const Tensor &t : tensors) {
            const bool contiguous = size(t) == 0 || t.ptr() == all.ptr() + size(all);
            if (!contiguous) error("flatten: the tensors are not contiguous in memory");
            all.shape[0] += size(t);
        }
        flat.push_back(all);
    }
    return flat;
}

// Divide a tensor into k chunks, whose sizes differ by at most one. View `count` consecutive ones,
// beginning with chunk j.
Tensor chunk(const Tensor &t, int j, int k, int count = 1) {
    if (j < 0 || j + count > k) error("there is no chunk %d of %d", j < 0 ? j : j + count - 1, k);
    const long n = size(t);
    return rows(reshape(t, {(int)n}), n * j / k, n * (j + count) / k);
}

// A copy dst[:] = src from one device to another.
struct Message {
    Tensor src, dst;
};

// Return the stream for messages from src to dst (section 10).
Stream &link_stream(Device src, Device dst);

// Enqueue each message on the link_stream of its two devices. Each ordered pair of devices has one,
// so that messages of different pairs travel at the same time. A message waits for everything that
// was enqueued on its two devices before this call, and everything that is enqueued on them later
// waits for it. No message may write to memory that any message of the call reads, or that another
// one writes.
void send(const std::vector<Message> &messages) {
    auto overlap = [](const Tensor &x, const Tensor &y) {
        const bool neither_is_empty = size(x) > 0 && size(y) > 0;
        return neither_is_empty && x.ptr() < y.ptr() + size(y) && y.ptr() < x.ptr() + size(x);
    };
    for (const Message &a : messages) {
        for (const Message &b : messages) {
            const bool reads = overlap(a.dst, b.src);
            if (!reads && (&a == &b || !overlap(a.dst, b.dst))) continue;
            error("send: message %td (gpu(%d) to gpu(%d)) writes what message %td (gpu(%d) to "
                  "gpu(%d)) of the same call %s: send them in two calls",
                  &a - &messages[0], a.src.device.id, a.dst.device.id, &b - &messages[0],
                  b.src.device.id, b.dst.device.id, reads ? "reads" : "writes");
        }
    }
    for (const auto &[src, dst] : messages) {
        if (size(src) == 0) continue;
        Stream &link = link_stream(src.device, dst.device);
        make_wait(link, current_stream(src.device));
        make_wait(link, current_stream(dst.device));
        peer_copy(src, dst, link);
    }
    for (const auto &[src, dst] : messages) { // only now, or each would wait for those before it
        if (size(src) == 0) continue;
        make_wait(current_stream(src.device), link_stream(src.device, dst.device));
        make_wait(current_stream(dst.device), link_stream(src.device, dst.device));
    }
}

// --- naive
// Sum tensor by tensor on device 0: the loop of train_batch(). Its messages form one chain.
//   messages 2(k-1)P   busiest (k-1)b   rounds 2(k-1)P
static void allreduce_naive(const PerDevice &grads) {
    for (size_t i = 0; i < grads[0].size(); i++) {
        allreduce(across_devices(grads, i));
    }
}

// --- bucket
// Sum all tensors on device 0 as if they were one.
//   messages 2(k-1)   busiest (k-1)b   rounds 2(k-1)
static void allreduce_bucket(const PerDevice &grads) { allreduce(flatten(grads)); }

// --- yours
// Write your own allreduce here. It must satisfy the contract at the top of this section. As it
// stands, it does the same as `naive`. Tools:
//   copyto(src, dst)       one message; send({{src, dst}, ...}) sends several at the same time
//   add_(a, b)             a += b, both on one device
//   empty(shape, device)   memory. It is freed with its last handle, which is safe even while
//                          enqueued work still uses it (section 10).
//   flatten(grads)         one tensor per device; chunk(t, j, k) is chunk j of k of such a tensor
//   to_string(t)           the numbers, for printf; the host waits for them
// If it needs k to be a power of two, say so below: {"yours", allreduce_yours, powers_of_two}.
// `make exercise` says whether it is right on 1 to 8 devices, and what it costs. README.md has
// more. Put kernels of your own above the function. Section 8 explains kernels; start with
// add_kernel.
static void allreduce_yours(const PerDevice &grads) {
    const size_t k = grads.size(), P = grads[0].size();
    for (size_t i = 0; i < P; i++) {
        for (size_t c = 1; c < k; c++) {
            add_(grads[0][i], copyto(grads[c][i], grads[0][i].device));
        }
        for (size_t c = 1; c < k; c++) {
            copyto(grads[0][i], grads[c][i]);
        }
    }
}

inline bool powers_of_two(int k) { return (k & (k - 1)) == 0; }

struct Algorithm {
    const char *name;
    void (*run)(const PerDevice &grads);
    bool (*supports)(int k) = nullptr; // whether it works on k devices; null: on any number
};
static std::vector<Algorithm> algorithms = {
    {"naive", allreduce_naive},
    {"bucket", allreduce_bucket},
    {"yours", allreduce_yours},
};

static const Algorithm &find_algorithm(const std::string &name) {
    std::string names;
    for (const Algorithm &algorithm : algorithms) {
        if (algorithm.name == name) return algorithm;
        names += (names.empty() ? "" : ", ") + std::string(algorithm.name);
    }
    error("ALLREDUCE=%s is unknown: choose one of %s", name.c_str(), names.c_str());
}

// Sum the gradients with the algorithm of this name.
void run_allreduce(const std::string &name, const PerDevice &grads) {
    const Algorithm &algorithm = find_algorithm(name);
    const int k = grads.size();
    if (algorithm.supports && !algorithm.supports(k)) {
        error("ALLREDUCE=%s does not work on %d devices", algorithm.name, k);
    }
    algorithm.run(grads);
}

// What train_batch() calls: the algorithm that ALLREDUCE names. For naive it is null.
std::function<void(const PerDevice &grads)> exchange;

// ---------------------------------------------------------------------------------------------
// 8. Kernels and operators
// These are the simplest kernels that are fast enough to train with, from ReLU to convolution. Each
// operator has its kernels first, then the function that launches them, forward and backward.
//
// A kernel, marked __global__, is a function that many threads of a device run at the same time.
// This launches one:
//
//     relu_kernel<<<blocks(n), threads, 0, stream>>>(y, X, n);
//
// The host enqueues it on the stream and goes on. When the kernel's turn comes, the device starts
// blocks(n) blocks of `threads` threads each. (The 0 means no dynamic shared memory.) Each thread
// finds out from its position which element it computes. With 3 blocks of 4 threads:
//
//     blockIdx.x       0 0 0 0   1 1 1 1   2 2 2 2
//     threadIdx.x      0 1 2 3   0 1 2 3   0 1 2 3
//     i                0 1 2 3   4 5 6 7   8 9 ...      i = blockIdx.x * blockDim.x + threadIdx.x
//
// If there are n = 10 elements, two threads of the last block have nothing to do: `if (i < n)`.
// Blocks and threads can also be counted in two or three dimensions (.y and .z, dim3). Kernels may
// call functions marked __device__.
//
// The threads of a block can exchange data through memory that they share, marked __shared__, and
// __syncthreads() makes each of them wait until all have arrived there.

#ifdef CUDA_CPU
constexpr bool on_cpu = true; // compiled by g++, with emulated devices
#else
constexpr bool on_cpu = false;
#endif

// Return n / m, rounded up.
inline int ceil_div(long n, int m) { return (n + m - 1) / m; }

// CUDA wants at least one block.
int blocks(long n) {
    if (n > INT_MAX) error("a launch of %ld threads is too large: use a smaller BATCH", n);
    return std::max(1, ceil_div(n, threads));
}

// Fail unless the inputs are `valid`, and on the same device. The error shows what was `expected`.
void check_inputs(const char *op, bool valid, const char *expected,
                  const std::vector<Tensor> &inputs);

// An operator's backward gets dy, the gradient of the loss with respect to its result y, and adds
// to the gradients of the inputs. It must add, because an input may be used by several operators.
// It is a lambda, and captures its tensors by value, which keeps their memory allocated.
typedef std::function<void(const Tensor &dy)> Backward;

// Return y, the result of an operator, and put the operator on the tape (section 9) if an input
// wants a gradient.
Tensor add_to_tape(const char *op, Tensor y, const std::vector<Tensor> &inputs,
                   const Backward &backward);

// Return the address of X's gradient, or null if X wants none. The first call in a backward pass
// zeroes the gradient, and allocates it if need be.
float *grad_to_add_to(const Tensor &X);

// --- relu
// y[i] = max(X[i], 0)
//   X (n)   ->   y (n)
// One thread per element. NaN stays NaN.
__global__ void relu_kernel(float *y, const float *X, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = X[i] < 0 ? 0 : X[i];
}

// dX[i] += dy[i] where X[i] > 0
//   dy (n)   X (n)   ->   dX (n)
// One thread per element.
__global__ void relu_backward_kernel(float *dX, const float *dy, const float *X, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) dX[i] += X[i] > 0 ? dy[i] : 0;
}

// Same as F.relu(X).
Tensor relu(const Tensor &X) {
    check_inputs("relu", true, "a tensor", {X});
    const int n = size(X);
    const Tensor y = empty(X.shape, X.device);
    LAUNCH(relu_kernel<<<blocks(n), threads, 0, stream_of(X.device)>>>(y.ptr(), X.ptr(), n));
    return add_to_tape("relu", y, {X}, [=](const Tensor &dy) {
        float *dX = grad_to_add_to(X);
        LAUNCH(relu_backward_kernel<<<blocks(n), threads, 0, stream_of(X.device)>>>(dX, dy.ptr(),
                                                                                    X.ptr(), n));
    });
}

// --- in place, without gradients
// a[i] = value. One thread per element.
__global__ void fill_kernel(float *a, float value, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) a[i] = value;
}

// Set a[:] = value.
void fill(const Tensor &a, float value) {
    const int n = size(a);
    LAUNCH(fill_kernel<<<blocks(n), threads, 0, stream_of(a.device)>>>(a.ptr(), value, n));
}

// a[i] += b[i]. One thread per element.
__global__ void add_kernel(float *a, const float *b, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) a[i] += b[i];
}

void add_(const Tensor &a, const Tensor &b) {
    check_inputs("add_", a.shape == b.shape, "two tensors of the same shape", {a, b});
    const int n = size(a);
    LAUNCH(add_kernel<<<blocks(n), threads, 0, stream_of(a.device)>>>(a.ptr(), b.ptr(), n));
}

// --- sgd
// param[i] -= lr * grad[i] / batch_size. One thread per element.
__global__ void sgd_kernel(float *param, const float *grad, int n, float lr, float batch_size) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) param[i] -= lr * grad[i] / batch_size;
}

void sgd(const std::vector<Tensor> &params, float lr, int batch_size) {
    for (const Tensor &p : params) {
        check_inputs("sgd", true, "parameters", {params[0], p});
        const int n = size(p);
        LAUNCH(sgd_kernel<<<blocks(n), threads, 0, stream_of(p.device)>>>(
            p.ptr(), gradient(p).ptr(), n, lr, batch_size));
    }
}

// --- softmax cross-entropy
// Return the sum of exp(z[j] - largest) over j, and the largest z[j]. Subtracting it prevents
// overflow: the sum is between 1 and `classes`.
__device__ inline float exp_sum(const float *z, int classes, float *largest) {
    float sum = 0;
    *largest = z[0];
    for (int j = 1; j < classes; j++) *largest = z[j] > *largest ? z[j] : *largest;
    for (int j = 0; j < classes; j++) sum += expf(z[j] - *largest);
    return sum;
}

// l[n] = log(sum over j of exp(y_hat[n,j])) - y_hat[n,y[n]]
//   y_hat (N,classes)   y (N), the labels   ->   l (N)
// One thread per sample.
__global__ void cross_entropy_kernel(float *l, const float *y_hat, const float *y, int N,
                                     int classes) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) return;
    const float *z = y_hat + n * classes;
    float largest;
    const float sum = exp_sum(z, classes, &largest);
    l[n] = logf(sum) - (z[(int)y[n]] - largest);
}

// dy_hat[n,j] += dl[n] * (softmax(y_hat[n])[j] - (1 if j == y[n] else 0))
//   dl (N)   y_hat (N,classes)   y (N)   ->   dy_hat (N,classes)
// One thread per sample.
__global__ void cross_entropy_backward_kernel(float *dy_hat, const float *dl, const float *y_hat,
                                              const float *y, int N, int classes) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) return;
    const float *z = y_hat + n * classes;
    float largest;
    const float sum = exp_sum(z, classes, &largest);
    for (int j = 0; j < classes; j++) {
        const float p = expf(z[j] - largest) / sum;
        dy_hat[n * classes + j] += dl[n] * (p - (j == (int)y[n] ? 1.0f : 0.0f));
    }
}

// Same as F.cross_entropy(y_hat, y, reduction='none'). y gets no gradient.
Tensor softmax_cross_entropy(const Tensor &y_hat, const Tensor &y) {
    const bool valid = y_hat.shape.size() == 2 && y.shape == std::vector<int>{y_hat.shape[0]} &&
                       y_hat.shape[1] > 0;
    check_inputs("softmax_cross_entropy", valid, "(N,classes), (N)", {y_hat, y});
    const int N = y_hat.shape[0], classes = y_hat.shape[1];
    const Device device = y_hat.device;
    const Tensor l = empty({N}, device);
    LAUNCH(cross_entropy_kernel<<<blocks(N), threads, 0, stream_of(device)>>>(l.ptr(), y_hat.ptr(),
                                                                              y.ptr(), N, classes));
    return add_to_tape("softmax_cross_entropy", l, {y_hat}, [=](const Tensor &dl) {
        float *dy_hat = grad_to_add_to(y_hat);
        LAUNCH(cross_entropy_backward_kernel<<<blocks(N), threads, 0, stream_of(device)>>>(
            dy_hat, dl.ptr(), y_hat.ptr(), y.ptr(), N, classes));
    });
}

// --- average pooling
// A plane is one channel of one image. The N*C planes are pooled independently.
struct PoolShape {
    int planes, H, W, OH, OW, K; // OH = H / K and OW = W / K, rounded down
};

// y[p,i,j] = mean over u,v of X[p,i*K+u,j*K+v]
//   X (planes,H,W)   ->   y (planes,OH,OW)
// One thread per element of y.
__global__ void avg_pool2d_kernel(float *y, const float *X, PoolShape s) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    const int j = index % s.OW, i = index / s.OW % s.OH, p = index / s.OW / s.OH;
    if (p >= s.planes) return;
    float sum = 0;
    for (int u = 0; u < s.K; u++) {
        for (int v = 0; v < s.K; v++) {
            sum += X[(p * s.H + i * s.K + u) * s.W + j * s.K + v];
        }
    }
    y[index] = sum / (s.K * s.K);
}

// dX[p,h,w] += dy[p,h/K,w/K] / K^2
//   dy (planes,OH,OW)   ->   dX (planes,H,W)
// One thread per element of dX. Rows and columns that do not fill a window get no gradient.
__global__ void avg_pool2d_backward_kernel(float *dX, const float *dy, PoolShape s) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    const int w = index % s.W, h = index / s.W % s.H, p = index / s.W / s.H;
    const int j = w / s.K, i = h / s.K;
    if (p < s.planes && i < s.OH && j < s.OW) {
        dX[index] += dy[(p * s.OH + i) * s.OW + j] / (s.K * s.K);
    }
}

// Return the sizes of a pooling of X, or fail.
static PoolShape pool_shape(const char *op, const Tensor &X, int kernel_size, int stride) {
    const bool valid = X.shape.size() == 4 && kernel_size > 0 && kernel_size == stride &&
                       X.shape[2] >= kernel_size && X.shape[3] >= kernel_size;
    check_inputs(op, valid, "(N,C,H,W) with kernel_size = stride <= H and W", {X});
    const int H = X.shape[2], W = X.shape[3];
    return {X.shape[0] * X.shape[1], H, W, H / stride, W / stride, kernel_size};
}

// Same as F.avg_pool2d(X, kernel_size, stride). The stride must be kernel_size.
Tensor avg_pool2d(const Tensor &X, int kernel_size, int stride) {
    const PoolShape s = pool_shape("avg_pool2d", X, kernel_size, stride);
    const Device device = X.device;
    const Tensor y = empty({X.shape[0], X.shape[1], s.OH, s.OW}, device);
    LAUNCH(
        avg_pool2d_kernel<<<blocks(size(y)), threads, 0, stream_of(device)>>>(y.ptr(), X.ptr(), s));
    return add_to_tape("avg_pool2d", y, {X}, [=](const Tensor &dy) {
        float *dX = grad_to_add_to(X);
        LAUNCH(avg_pool2d_backward_kernel<<<blocks(size(X)), threads, 0, stream_of(device)>>>(
            dX, dy.ptr(), s));
    });
}

// --- matrix product
// `count` matrices of `rows` x `columns` numbers, one after another in memory. Each is row-major,
// or column-major if `transposed`.
struct Matrix {
    float *data;
    int count, rows, columns;
    bool transposed = false;
};

// Swap rows and columns, without moving data.
static Matrix transpose(Matrix m) {
    std::swap(m.rows, m.columns);
    m.transposed = !m.transposed;
    return m;
}

// To compute C += A @ B, each block computes a tile of C, one number per thread. Its threads copy a
// tile of A and a tile of B into shared memory, multiply those, and go on to the next two tiles. So
// each number that is loaded from the device's memory is used in `tile` products instead of one.
// (On emulated devices a thread computes four whole rows of the tile, since the compiler turns a
// loop over neighbouring columns into vector instructions.)
constexpr int tile = 32;
constexpr int rows_per_thread = on_cpu ? 4 : 1, columns_per_thread = on_cpu ? tile : 1;
constexpr int threads_x = tile / columns_per_thread, threads_y = tile / rows_per_thread;
typedef float Tile[tile][tile + 1]; // + 1: a column's numbers lie in different memory banks

// Copy the tile of matrix n that begins at (row, column), clipped to the matrix. (The rest of the
// tile keeps old numbers. They only enter sums that are never stored.) Threads that are neighbours
// in x read neighbours in memory, which the device loads together.
__device__ inline void load_tile(Tile &to, const Matrix &m, int n, int row, int column) {
    const float *from = m.data + (m.count > 1 ? n * m.rows * m.columns : 0);
    const int tile_rows = min(tile, m.rows - row), tile_columns = min(tile, m.columns - column);
    if (m.transposed) {
        from += column * m.rows + row;
        for (int j = threadIdx.y; j < tile_columns; j += threads_y) {
            for (int i = threadIdx.x; i < tile_rows; i += threads_x) {
                to[i][j] = from[j * m.rows + i];
            }
        }
    } else {
        from += row * m.columns + column;
        for (int i = threadIdx.y; i < tile_rows; i += threads_y) {
            for (int j = threadIdx.x; j < tile_columns; j += threads_x) {
                to[i][j] = from[i * m.columns + j];
            }
        }
    }
}

// C[n] += A[n] @ B[n]
//   A (count,rows,terms) or (1,rows,terms)   B (count,terms,columns) or (1,terms,columns)
//   ->   C (count,rows,columns)
// If there is only one A or only one B, all products use it. If C has fewer matrices than there are
// products, C[n] gets the sum of the products n, n + C.count, n + 2 * C.count, ...
__global__ void matmul_kernel(Matrix C, Matrix A, Matrix B) {
    __shared__ Tile A_tile, B_tile;
    // The tile begins at C[row][column], and the numbers of this thread at row y, column x in it.
    const int row = blockIdx.y * tile, column = blockIdx.x * tile;
    const int x = threadIdx.x * columns_per_thread, y = threadIdx.y * rows_per_thread;
    float sum[rows_per_thread][columns_per_thread] = {};
    for (int n = blockIdx.z; n < max(A.count, B.count); n += C.count) {
        for (int first = 0; first < A.columns; first += tile) {
            load_tile(A_tile, A, n, row, first);
            load_tile(B_tile, B, n, first, column);
            __syncthreads(); // until all threads have copied their part
            const int terms = min(tile, A.columns - first);
            for (int t = 0; t < terms; t++) {
                for (int i = 0; i < rows_per_thread; i++) {
                    for (int j = 0; j < columns_per_thread; j++) {
                        sum[i][j] += A_tile[y + i][t] * B_tile[t][x + j];
                    }
                }
            }
            __syncthreads(); // until all threads have used both tiles
        }
    }
    for (int i = 0; i < rows_per_thread; i++) {
        const int r = row + y + i;
        float *to = C.data + (blockIdx.z * C.rows + r) * C.columns;
        for (int j = 0; j < columns_per_thread; j++) {
            const int c = column + x + j;
            if (r < C.rows && c < C.columns) to[c] += sum[i][j];
        }
    }
}

static void matmul(Matrix C, Matrix A, Matrix B, Device device) {
    if (C.count == 0 || C.rows == 0) return; // an empty shard
    const dim3 grid(ceil_div(C.columns, tile), ceil_div(C.rows, tile), C.count);
    LAUNCH(matmul_kernel<<<grid, dim3(threads_x, threads_y), 0, stream_of(device)>>>(C, A, B));
}

// sum[i] += parts[0][i] + ... + parts[count-1][i], always in this order
//   parts (count,n)   ->   sum (n)
// One thread per element.
__global__ void sum_kernel(float *sum, const float *parts, int count, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float total = 0;
    for (int m = 0; m < count; m++) total += parts[m * n + i];
    sum[i] += total;
}

// Add the sum over n of A[n] @ B[n] to the matrix C. One block per tile of C would be too few to
// keep a GPU busy. So `count` blocks share the products of a tile (about 2048 blocks in all are
// enough), and a second kernel adds up their sums.
static void matmul_sum(Matrix C, Matrix A, Matrix B, Device device) {
    const int n = C.rows * C.columns, tiles = ceil_div(C.rows, tile) * ceil_div(C.columns, tile);
    const int count = std::min(A.count, ceil_div(2048, tiles));
    const Tensor parts = full({count, n}, 0, device);
    matmul({parts.ptr(), count, C.rows, C.columns}, A, B, device);
    LAUNCH(sum_kernel<<<blocks(n), threads, 0, stream_of(device)>>>(C.data, parts.ptr(), count, n));
}

// --- bias
// The sizes of a tensor (N,C,...): `pixels` is the product of the sizes after C.
struct Planes {
    int N, C, pixels;
};

static Planes planes(const Tensor &y) {
    return {y.shape[0], y.shape[1], size(y) / std::max(1, y.shape[0] * y.shape[1])};
}

// Return to every thread of a block the sum of all threads' values. The values, in shared memory,
// are added pairwise, the upper half to the lower half, until one is left. This order is fixed, so
// every run gives the same bits. `scratch` has a float for each thread.
__device__ inline float block_sum(float *scratch, float value) {
    scratch[threadIdx.x] = value;
    __syncthreads();
    for (unsigned half = threads / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) scratch[threadIdx.x] += scratch[threadIdx.x + half];
        __syncthreads();
    }
    return scratch[0];
}

// y[n,o,p] = b[o]
//   b (O)   ->   y (N,O,pixels)
// One thread per element.
__global__ void bias_kernel(float *y, const float *b, Planes s) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < s.N * s.C * s.pixels) y[i] = b[i / s.pixels % s.C];
}

// db[o] += sum over n,p of dy[n,o,p]
//   dy (N,O,pixels)   ->   db (O)
// One block per channel o. First each thread sums a part of the channel.
__global__ void bias_backward_kernel(float *db, const float *dy, Planes s) {
    __shared__ float scratch[threads];
    const int o = blockIdx.x;
    float sum = 0;
    for (int i = threadIdx.x; i < s.N * s.pixels; i += threads) {
        sum += dy[(i / s.pixels * s.C + o) * s.pixels + i % s.pixels];
    }
    sum = block_sum(scratch, sum);
    if (threadIdx.x == 0) db[o] += sum;
}

static void bias(const Tensor &y, const Tensor &b) {
    LAUNCH(bias_kernel<<<blocks(size(y)), threads, 0, stream_of(y.device)>>>(y.ptr(), b.ptr(),
                                                                             planes(y)));
}

static void bias_backward(const Tensor &b, const Tensor &dy) {
    if (float *db = grad_to_add_to(b)) {
        LAUNCH(bias_backward_kernel<<<size(b), threads, 0, stream_of(b.device)>>>(db, dy.ptr(),
                                                                                  planes(dy)));
    }
}

// --- dense layer
static void check_linear(const Tensor &X, const Tensor &W, const Tensor &b) {
    const bool valid = X.shape.size() == 2 && W.shape.size() == 2 && W.shape[0] == X.shape[1] &&
                       b.shape == std::vector<int>{W.shape[1]} && size(W) > 0;
    check_inputs("linear", valid, "(N,C), (C,O), (O) with C and O > 0", {X, W, b});
}

// Return X @ W + b. (F.linear takes W transposed.)
//   X (N,C)   W (C,O)   b (O)   ->   y (N,O)
Tensor linear(const Tensor &X, const Tensor &W, const Tensor &b) {
    check_linear(X, W, b);
    const int N = X.shape[0], C = X.shape[1], O = W.shape[1];
    const Device device = X.device;
    const Tensor y = empty({N, O}, device);
    bias(y, b); // y = b, then y += X @ W
    matmul({y.ptr(), 1, N, O}, {X.ptr(), 1, N, C}, {W.ptr(), 1, C, O}, device);
    return add_to_tape("linear", y, {X, W, b}, [=](const Tensor &dy) {
        bias_backward(b, dy);
        if (float *dW = grad_to_add_to(W)) { // dW += X^T @ dy
            matmul({dW, 1, C, O}, transpose({X.ptr(), 1, N, C}), {dy.ptr(), 1, N, O}, device);
        }
        if (float *dX = grad_to_add_to(X)) { // dX += dy @ W^T
            matmul({dX, 1, N, C}, {dy.ptr(), 1, N, O}, transpose({W.ptr(), 1, C, O}), device);
        }
    });
}

// --- convolution
// y[n,o,i,j] = b[o] + sum over c,u,v of X[n,c,i+u,j+v] * W[o,c,u,v]
//   X (N,C,H,W)   W (O,C,K,K)   b (O)   ->   y (N,O,OH,OW) with OH = H-K+1, OW = W-K+1
// im2col turns this into a matrix product, y[n] = b + W @ columns[n]. Column p = (i,j) of
// columns[n] is the window of X that gives y[n,:,i,j]; row t = (c,u,v) is multiplied by W[:,c,u,v].
// So columns[n] has C*K*K rows, the terms of a sum, and OH*OW columns, one for each pixel of y.
struct ConvShape {
    int N, C, H, W, O, K, OH, OW;
};

// columns[n,t,p] = X[n,c,i+u,j+v]
//   X (N,C,H,W)   ->   columns (N,terms,pixels)
// One thread per (n,c,i,j). Threads with neighbouring j read and write neighbouring numbers.
__global__ void im2col_kernel(float *columns, const float *X, ConvShape s) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x, pixels = s.OH * s.OW;
    const int j = index % s.OW, i = index / s.OW % s.OH;
    const int c = index / pixels % s.C, n = index / pixels / s.C;
    if (n >= s.N) return;
    for (int u = 0; u < s.K; u++) {
        for (int v = 0; v < s.K; v++) {
            columns[(((n * s.C + c) * s.K + u) * s.K + v) * pixels + i * s.OW + j] =
                X[((n * s.C + c) * s.H + i + u) * s.W + j + v];
        }
    }
}

// dX[n,c,h,w] += sum of dcolumns[n,t,p] over i,j,u,v with i+u = h and j+v = w
//   dcolumns (N,terms,pixels)   ->   dX (N,C,H,W)
// One thread per element of dX.
__global__ void col2im_kernel(float *dX, const float *dcolumns, ConvShape s) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    const int w = index % s.W, h = index / s.W % s.H, plane = index / s.W / s.H; // n * C + c
    if (plane >= s.N * s.C) return;
    float sum = 0;
    for (int i = min(h, s.OH - 1); i >= 0 && h - i < s.K; i--) { // windows that contain (h,w)
        for (int j = min(w, s.OW - 1); j >= 0 && w - j < s.K; j--) {
            const int u = h - i, v = w - j;
            sum += dcolumns[(((plane * s.K + u) * s.K + v) * s.OH + i) * s.OW + j];
        }
    }
    dX[index] += sum;
}

// Return the sizes of a convolution, or fail.
static ConvShape conv_shape(const Tensor &X, const Tensor &W, const Tensor &b) {
    const bool valid = X.shape.size() == 4 && W.shape.size() == 4 && W.shape[1] == X.shape[1] &&
                       W.shape[2] == W.shape[3] && b.shape == std::vector<int>{W.shape[0]} &&
                       size(W) > 0 && X.shape[2] >= W.shape[2] && X.shape[3] >= W.shape[2];
    check_inputs("conv2d", valid, "(N,C,H,W), (O,C,K,K), (O) with K <= H and W", {X, W, b});
    const int rows = X.shape[2], columns = X.shape[3], O = W.shape[0], K = W.shape[2];
    return {X.shape[0], X.shape[1], rows, columns, O, K, rows - K + 1, columns - K + 1};
}

// Same as F.conv2d(X, W, b), which is also a cross-correlation.
Tensor conv2d(const Tensor &X, const Tensor &W, const Tensor &b) {
    const ConvShape s = conv_shape(X, W, b);
    const int N = s.N, O = s.O, pixels = s.OH * s.OW, terms = s.C * s.K * s.K;
    const Device device = X.device;
    const Tensor y = empty({N, O, s.OH, s.OW}, device);
    bias(y, b);                                               // y[n] = b
    const Tensor columns = empty({N, terms, pixels}, device); // kept for dW
    const long windows = (long)N * s.C * pixels;
    LAUNCH(im2col_kernel<<<blocks(windows), threads, 0, stream_of(device)>>>(columns.ptr(), X.ptr(),
                                                                             s));
    matmul({y.ptr(), N, O, pixels}, {W.ptr(), 1, O, terms}, {columns.ptr(), N, terms, pixels},
           device); // y[n] += W @ columns[n]
    return add_to_tape("conv2d", y, {X, W, b}, [=](const Tensor &dy) {
        bias_backward(b, dy);
        if (float *dW = grad_to_add_to(W)) { // dW += sum over n of dy[n] @ columns[n]^T
            matmul_sum({dW, 1, O, terms}, {dy.ptr(), N, O, pixels},
                       transpose({columns.ptr(), N, terms, pixels}), device);
        }
        if (float *dX = grad_to_add_to(X)) { // dcolumns[n] = W^T @ dy[n]
            const Tensor dcolumns = full({N, terms, pixels}, 0, device);
            matmul({dcolumns.ptr(), N, terms, pixels}, transpose({W.ptr(), 1, O, terms}),
                   {dy.ptr(), N, O, pixels}, device);
            LAUNCH(col2im_kernel<<<blocks(size(X)), threads, 0, stream_of(device)>>>(
                dX, dcolumns.ptr(), s));
        }
    });
}

// ---------------------------------------------------------------------------------------------
// 9. Autograd
// This section implements l.backward(). As in Karpathy's micrograd, every operator stores a
// function for its backward. Here these functions are kept on a tape, one tape per device, and
// backward() calls them in reverse order, so that each dy is complete before it is read.

// An operator that has run, and the gradient of its result.
struct TapeEntry {
    const char *op; // its name and its inputs, for programs in extras/
    std::vector<Tensor> inputs;
    std::shared_ptr<Tensor> dy;
    Backward backward;
    std::vector<Tensor> first_uses = {}; // parameters of which it is the first user in this pass
};
// By Device::id. Never destroyed: when the program ends, CUDA shuts down first.
static auto &tapes = *new std::map<int, std::vector<TapeEntry>>;
static bool recording = true;

NoGrad::NoGrad() : before(recording) { recording = false; }

NoGrad::~NoGrad() { recording = before; }

void attach_grad(std::vector<Tensor> &params) {
    if (params.empty()) return;
    int n = 0;
    for (const Tensor &p : params) n += size(p);
    const Tensor all = full({n}, 0, params[0].device);
    int begin = 0;
    for (Tensor &p : params) {
        const int end = begin + size(p);
        p.grad = std::make_shared<Tensor>(reshape(rows(all, begin, end), p.shape));
        begin = end;
    }
}

const Tensor &gradient(const Tensor &param) {
    if (!param.grad) error("a parameter has no gradient: does get_params call attach_grad?");
    return *param.grad;
}

PerDevice gradients(const PerDevice &device_params) {
    PerDevice grads;
    for (const std::vector<Tensor> &params : device_params) {
        grads.emplace_back();
        for (const Tensor &p : params) grads.back().push_back(gradient(p));
    }
    return grads;
}

std::vector<Tensor> across_devices(const PerDevice &x, size_t i) {
    std::vector<Tensor> tensors;
    for (const std::vector<Tensor> &list : x) tensors.push_back(list[i]);
    return tensors;
}

Tensor add_to_tape(const char *op, Tensor y, const std::vector<Tensor> &inputs,
                   const Backward &backward) {
    auto wants_grad = [](const Tensor &X) { return X.grad != nullptr; };
    if (recording && std::any_of(inputs.begin(), inputs.end(), wants_grad)) {
        if (!y.grad) y.grad = std::make_shared<Tensor>(Tensor{y.device, y.shape});
        y.grad->stale = true;
        TapeEntry entry = {op, inputs, y.grad, backward};
        for (const Tensor &X : inputs) {
            if (!X.grad || X.grad->stale) continue;
            X.grad->stale = true; // it has the numbers of the last minibatch
            entry.first_uses.push_back(X);
        }
        tapes[y.device.id].push_back(entry);
    }
    return y;
}

float *grad_to_add_to(const Tensor &X) {
    if (!X.grad) return nullptr;
    Tensor &g = *X.grad;
    if (!g.data) g.data = empty(g.shape, g.device).data;
    if (g.stale) fill(g, 0);
    g.stale = false;
    return g.ptr();
}

// A hook, null unless another program sets it (section 13). It is called with the gradient of a
// parameter once backward() has enqueued the last write to it.
void (*after_gradient)(const Tensor &grad) = nullptr;

// Run the tape of l's device in reverse and empty it. Each entry is destroyed after it has run,
// which releases the tensors that it captured.
void backward(const Tensor &l) {
    std::vector<TapeEntry> &tape = tapes[l.device.id];
    auto computed_l = [&](const TapeEntry &entry) { return entry.dy == l.grad; };
    if (!l.grad || std::none_of(tape.begin(), tape.end(), computed_l)) {
        error("backward: there is no record of how this tensor was computed (each backward pass "
              "erases the record of its device)");
    }
    grad_to_add_to(l); // allocate it
    fill(*l.grad, 1);  // the gradient of sum(l) with respect to l
    while (!tape.empty()) {
        const TapeEntry entry = std::move(tape.back());
        tape.pop_back();
        if (!entry.dy->stale) entry.backward(*entry.dy); // stale: l does not use this result
        for (const Tensor &X : entry.first_uses) { // in reverse, the first use comes last
            grad_to_add_to(X);                     // zero it if nothing has written it
            if (after_gradient) after_gradient(*X.grad);
        }
    }
}

// ---------------------------------------------------------------------------------------------
// 10. Devices and memory
// k devices on the GPUs of this machine, their streams, and a caching allocator.

// --- texts and errors

std::string str(Device device) {
    return device.id < 0 ? "cpu" : "gpu(" + std::to_string(device.id) + ")";
}

std::string str(const std::vector<Device> &devices) {
    std::string list;
    for (Device d : devices) list += (list.empty() ? "" : ", ") + str(d);
    return "[" + list + "]";
}

// Throw an error. mgpu_main() prints it on one line and ends the program.
void error(const char *format, ...) {
    char text[1000];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    throw std::runtime_error(text);
}

void check_cuda(cudaError_t code, const char *call, const char *file, int line) {
    if (code == cudaSuccess) return;
    fflush(stdout);
    fprintf(stderr, "mgpu: %s:%d: %s: %s%s\n", file, line, call, cudaGetErrorString(code),
            code == cudaErrorMemoryAllocation ? ": use a smaller BATCH" : "");
    _exit(1); // no destructors: their CUDA calls would fail, too
}

void check_launch(const char *file, int line) {
    check_cuda(cudaGetLastError(), "the kernel launch", file, line);
}

void check_inputs(const char *op, bool valid, const char *expected,
                  const std::vector<Tensor> &inputs) {
    std::string shapes;
    for (const Tensor &X : inputs) {
        shapes += shapes.empty() ? "(" : ", (";
        for (int s : X.shape) shapes += std::to_string(s) + ",";
        shapes.back() = ')';
    }
    if (!valid) error("%s: expected %s, got %s", op, expected, shapes.c_str());
    for (const Tensor &X : inputs) {
        if (X.device.id < 0) error("%s: an input is on cpu, not on a device: use copyto", op);
        if (X.device.id != inputs[0].device.id) {
            error("%s: its inputs are on %s and %s, but must be on one device", op,
                  str(inputs[0].device).c_str(), str(X.device).c_str());
        }
    }
}

// --- devices

struct Piece { // of the memory that one cudaMalloc() returned
    float *begin;
    long n;           // floats
    bool used, first; // whether a tensor has it, and whether the memory begins with it
};

// The state of a device. Devices that share a GPU have their own memory and streams.
struct DeviceState {
    int physical;                // CUDA's number for the GPU
    Stream stream;               // for its work
    std::map<int, Stream> links; // for messages from other devices, by Device::id
    std::map<cudaStream_t, std::list<Piece>> pieces; // in the order of memory: see allocate()
};
static auto &device_states = *new std::vector<DeviceState>; // never destroyed, like `tapes`

float *Tensor::ptr() const { return data.get(); }

// Return the state of a device, or fail if there is no such device.
static DeviceState &state(Device device) {
    if (device.id < 0) error("a tensor is on the host, but must be on a device: use copyto");
    if (device.id >= (int)device_states.size()) {
        error("there is no %s: the program runs on %zu devices", str(device).c_str(),
              device_states.size());
    }
    return device_states[device.id];
}

int physical(Device device) { return state(device).physical; }

// Make a device's GPU the one that CUDA's calls refer to.
static void make_current(Device device) { CUDA_CHECK(cudaSetDevice(physical(device))); }

Device try_gpu(int i) {
    state(gpu(i)); // fails if there is no such device
    return gpu(i);
}

std::vector<Device> first_devices(int k) {
    std::vector<Device> devices;
    for (int i = 0; i < k; i++) devices.push_back(try_gpu(i));
    return devices;
}

// --- streams

Stream &current_stream(Device device) { return state(device).stream; }

cudaStream_t stream_of(Device device) {
    make_current(device);
    return current_stream(device).handle;
}

static Stream new_stream(Device device) {
    Stream s;
    make_current(device);
    CUDA_CHECK(cudaStreamCreateWithFlags(&s.handle, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreateWithFlags(&s.ready, cudaEventDisableTiming));
    return s;
}

Stream &link_stream(Device src, Device dst) {
    Stream &s = state(dst).links[src.id];
    if (!s.handle) s = new_stream(dst);
    return s;
}

void waitall() {
    for (size_t c = 0; c < device_states.size(); c++) {
        CUDA_CHECK(cudaStreamSynchronize(current_stream(gpu(c)).handle));
    }
}

// --- peers

// Let device i access the memory of device j directly, if the hardware allows it. Return how their
// data travels: "staged" means that CUDA copies through the host.
static const char *connect(Device i, Device j) {
    int can_access = 0;
    if (physical(i) == physical(j)) return "same GPU";
    CUDA_CHECK(cudaDeviceCanAccessPeer(&can_access, physical(i), physical(j)));
    if (!can_access || !options.peers) return "staged";
    make_current(i);
    const cudaError_t code = cudaDeviceEnablePeerAccess(physical(j), 0);
    cudaGetLastError(); // clear the error: a GPU may have too many peers
    return code == cudaSuccess || code == cudaErrorPeerAccessAlreadyEnabled ? "peer" : "staged";
}

// Create gpu(0) ... gpu(k-1), round-robin on this machine's GPUs, and connect them. If `shown`,
// print what they are.
void use_devices(int k, bool shown) {
    int count = 0;
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); // hardware queues for the streams; default: 8
    const cudaError_t code = cudaGetDeviceCount(&count);
    if (code != cudaSuccess || count == 0) {
        error("no GPU (%s): `make run BACKEND=cpu` emulates devices", cudaGetErrorString(code));
    }
    for (int i = device_states.size(); i < k; i++) {
        device_states.emplace_back().physical = i % count;
        device_states[i].stream = new_stream(gpu(i));
    }
    if (shown && k > count) {
        printf("notice: %d logical devices share %d GPU%s, each with its own memory and streams\n",
               k, count, count > 1 ? "s" : "");
    }
    for (int i = 0; i < k; i++) {
        cudaDeviceProp properties;
        CUDA_CHECK(cudaGetDeviceProperties(&properties, physical(gpu(i))));
        std::string line = str(gpu(i)) + ": " + properties.name;
        for (int j = 0; j < k; j++) {
            if (j != i) line += "; " + str(gpu(j)) + ": " + connect(gpu(i), gpu(j));
        }
        if (shown) printf("%s\n", line.c_str());
    }
}

// --- memory

// Return memory for n floats. On a device, it comes from a caching allocator: cudaMalloc() and
// cudaFree() would make the host wait, so freed memory is kept, in one list for each stream. (A
// program in extras/ may change a device's stream.) A tensor gets the smallest free piece that is
// large enough, and the rest of it becomes a piece of its own. Free pieces that are neighbours are
// joined. (Below 1 MiB only the same size will do: so tools see a kernel write past the end.)
//
// Memory may be reused while enqueued work still uses it. That is safe: the work of its new owner
// is enqueued later on the same stream, and copyto() and send() make that stream wait for every
// other stream that uses the memory.
static std::shared_ptr<float> allocate(long n, Device device) {
    float *memory = nullptr;
    if (n == 0) return nullptr;
    if (device.id < 0) { // pinned memory: a device copies from it while the host goes on
        CUDA_CHECK(cudaMallocHost((void **)&memory, sizeof(float) * n));
        return std::shared_ptr<float>(memory, [](float *p) {
            for (const DeviceState &user : device_states) { // it may be copying right now
                cudaStreamSynchronize(user.stream.handle);
            }
            cudaFreeHost(p);
        });
    }
    const bool large = n >= 1 << 18;
    if (large) n = ceil_div(n, 64) * 64L; // CUDA's memory begins at multiples of 256 bytes
    std::list<Piece> &pieces = state(device).pieces[state(device).stream.handle];
    auto best = pieces.end();
    for (auto p = pieces.begin(), next = p; p != pieces.end(); p = next) {
        next = std::next(p);
        if (p->used) continue;
        while (next != pieces.end() && !next->used && !next->first) {
            p->n += next->n;
            next = pieces.erase(next);
        }
        const bool fits = p->n == n || (p->n > n && large);
        if (fits && (best == pieces.end() || p->n < best->n)) best = p;
    }
    if (best == pieces.end()) {
        make_current(device);
        CUDA_CHECK(cudaMalloc((void **)&memory, sizeof(float) * n));
        best = pieces.insert(best, {memory, n, false, true});
    }
    if (best->n > n) pieces.insert(std::next(best), {best->begin + n, best->n - n, false, false});
    best->n = n;
    best->used = true;
    return std::shared_ptr<float>(best->begin, [best](float *) { best->used = false; });
}

// --- tensors

int size(const Tensor &t) {
    long n = 1;
    for (int s : t.shape) {
        n *= s;
        if (n < 0 || n > INT_MAX) error("a tensor of %ld numbers: use a smaller BATCH", n);
    }
    return n;
}

Tensor empty(std::vector<int> shape, Device device) {
    Tensor t = {device, std::move(shape)};
    t.data = allocate(size(t), device);
    return t;
}

Tensor full(std::vector<int> shape, float value, Device device) {
    Tensor t = empty(std::move(shape), device);
    if (device.id < 0) {
        std::fill_n(t.ptr(), size(t), value);
    } else {
        fill(t, value);
    }
    return t;
}

static std::mt19937 rng; // seeded with SEED

// Return numbers drawn from a distribution, on the host.
template <class Distribution>
static Tensor random(std::vector<int> shape, Distribution distribution) {
    Tensor t = empty(std::move(shape), cpu());
    for (int i = 0; i < size(t); i++) t.ptr()[i] = distribution(rng);
    return t;
}

Tensor normal(float scale, std::vector<int> shape) {
    return random(shape, std::normal_distribution<float>(0, scale));
}

Tensor arange(int n) {
    Tensor t = empty({n}, cpu());
    std::iota(t.ptr(), t.ptr() + n, 0.0f);
    return t;
}

// Return the numbers of a tensor. The host waits for them.
std::vector<float> to_host(const Tensor &t) {
    const Tensor host = copyto(t, cpu());
    return std::vector<float>(host.ptr(), host.ptr() + size(t));
}

// Return the numbers of all tensors, one after another.
static std::vector<float> all_to_host(const std::vector<Tensor> &tensors) {
    std::vector<float> all;
    for (const Tensor &t : tensors) {
        const std::vector<float> numbers = to_host(t);
        all.insert(all.end(), numbers.begin(), numbers.end());
    }
    return all;
}

// One size may be -1: it is computed from the others. (The 0 in an empty shard's shape counts as
// 1.)
Tensor reshape(const Tensor &X, std::vector<int> shape) {
    auto product = [](const std::vector<int> &sizes) {
        int n = 1;
        for (int s : sizes) n *= std::max(1, s);
        return n;
    };
    Tensor y = X;
    y.shape = shape;
    for (int &s : y.shape) {
        if (s < 0) s = product(X.shape) / product(shape);
    }
    if (size(y) != size(X)) error("reshape: %d numbers do not fit %d", size(X), size(y));
    return y;
}

Tensor rows(const Tensor &X, int begin, int end) {
    if (begin < 0 || begin > end || end > X.shape[0]) {
        error("rows: cannot take rows %d to %d of a tensor with %d rows", begin, end, X.shape[0]);
    }
    Tensor y = X;
    y.grad = nullptr;
    y.shape[0] = end - begin;
    const size_t row = size(X) / std::max(1, X.shape[0]); // numbers in a row
    if (X.data) y.data = std::shared_ptr<float>(X.data, X.data.get() + begin * row);
    return y;
}

// ---------------------------------------------------------------------------------------------
// 11. Data
// The parts that the chapter takes from d2l: the data set, the accuracy, the stopwatch, the plot.

// Write a number in 8 digits at most. A whole one ends with a point, as the chapter's do.
static std::string to_string(float x) {
    char text[32];
    snprintf(text, sizeof text, "%.8g", x);
    return text + std::string(strpbrk(text, ".en") ? "" : ".");
}

std::string to_string(const Tensor &t) {
    const std::vector<float> numbers = to_host(t);
    size_t width = 0; // of the longest number
    for (float x : numbers) width = std::max(width, to_string(x).size());
    std::string all;
    for (size_t i = 0; i < numbers.size(); i++) {
        size_t begins = 0, ends = 0, row = 1; // brackets before and after number i
        for (size_t axis = t.shape.size(); axis-- > 0;) {
            row *= t.shape[axis];
            begins += i % row == 0;
            ends += (i + 1) % row == 0;
        }
        const std::string text = to_string(numbers[i]);
        const std::string indent(t.shape.size() - begins, ' ');
        if (i > 0) all += begins ? std::string(begins, '\n') + indent : " ";
        all += std::string(begins, '[') + std::string(width - text.size(), ' ') + text;
        all += std::string(ends, ']');
    }
    return all + (t.device.id < 0 ? "" : " @" + str(t.device));
}

// --- the data set

// The training set or the test set as stored in its files: one byte per pixel, one per label.
struct DataSet {
    int count = 0;
    std::vector<unsigned char> images, labels;
};
static DataSet train_set, test_set; // read by run_program()

// Read a file in the IDX format of http://yann.lecun.com/exdb/mnist. It begins with the bytes 0, 0,
// the code of its type (8: uint8) and the number of dimensions: 1 for labels, 3 for images. Then
// come the dimensions' sizes, big-endian in 4 bytes each, and one byte for each number. Return the
// bytes of all samples.
std::vector<unsigned char> load_idx(const std::string &path, bool images) {
    std::ifstream file(path, std::ios::binary | std::ios::ate);
    const size_t length = std::clamp<long>(file.tellg(), 0, 1 << 28);
    std::vector<unsigned char> bytes(length + 20); // zeros follow, for a head that is cut off
    file.seekg(0);
    if (!file.read((char *)bytes.data(), length)) {
        error("cannot read %s: %s: `make data` with the same DATA brings it, or says what is there",
              path.c_str(), strerror(errno));
    }
    auto number = [&](size_t at) { // in the four bytes from `at` on
        return (unsigned)bytes[at] << 24 | bytes[at + 1] << 16 | bytes[at + 2] << 8 | bytes[at + 3];
    };
    const char *const types[] = {"uint8", "int8", "?", "int16", "int32", "float32", "float64"};
    const bool is_idx = bytes[0] == 0 && bytes[1] == 0 && bytes[2] >= 8 && bytes[2] <= 14;
    std::string found = is_idx ? types[bytes[2] - 8] : "something else, or compressed";
    for (int i = 0; is_idx && i < std::min<int>(bytes[3], 4); i++) {
        found += (i ? " x " : " ") + std::to_string(number(4 + 4 * i));
    }
    const std::string n = std::to_string(number(4)), of_sample = images ? " x 28 x 28" : "";
    const size_t header = images ? 16 : 8, samples = number(4) * (images ? 28 * 28 : 1ul);
    if (found != "uint8 " + n + of_sample || samples == 0 || length != header + samples) {
        error("%s should be uint8 N%s in the IDX format, but is %s in %zu bytes", path.c_str(),
              of_sample.c_str(), found.c_str(), length);
    }
    return {bytes.begin() + header, bytes.begin() + length};
}

// Load the training set (`which` is train) or the test set (t10k) from a folder, or from below
// build/, where make unpacks archives.
DataSet load_data(const std::string &folder, const std::string &which) {
    std::string path = folder + "/" + which;
    const std::string images = "-images-idx3-ubyte", unpacked = "build/" + path;
    const bool is_there = access((path + images).c_str(), F_OK) == 0;
    if (!is_there && access((unpacked + images).c_str(), F_OK) == 0) path = unpacked;
    DataSet set;
    set.images = load_idx(path + images, true);
    set.labels = load_idx(path + "-labels-idx1-ubyte", false);
    set.count = set.labels.size();
    const int largest = *std::max_element(set.labels.begin(), set.labels.end());
    if (set.images.size() != set.labels.size() * 28 * 28 || largest > 9) {
        error("%s: expected a label from 0 to 9 for each image, found %zu labels up to %d and %zu "
              "images",
              path.c_str(), set.labels.size(), largest, set.images.size() / (28 * 28));
    }
    if (options.limit) set.count = std::min(set.count, options.limit);
    return set;
}

static DataIter make_iter(const DataSet &set, int batch_size, bool shuffle) {
    const int n = set.count;
    std::vector<int> order(n);
    std::iota(order.begin(), order.end(), 0);
    return {&set, batch_size, shuffle, order, empty({n, 1, 28, 28}, cpu()), empty({n}, cpu())};
}

std::pair<DataIter, DataIter> load_data_fashion_mnist(int batch_size) {
    return {make_iter(train_set, batch_size, options.shuffle),
            make_iter(test_set, batch_size, false)};
}

// Convert the samples to floats. The last minibatch of an epoch may be smaller.
std::pair<Tensor, Tensor> DataIter::minibatch(int begin) {
    const int end = std::min(begin + batch_size, set->count);
    for (int i = begin; i < end; i++) {
        const unsigned char *image = &set->images[(size_t)order[i] * 28 * 28];
        float *x = X.ptr() + (size_t)i * 28 * 28;
        for (int p = 0; p < 28 * 28; p++) x[p] = image[p] / 255.0f;
        y.ptr()[i] = set->labels[order[i]];
    }
    return {rows(X, begin, end), rows(y, begin, end)};
}

std::vector<std::pair<Tensor, Tensor>> DataIter::epoch() {
    if (shuffle) std::shuffle(order.begin(), order.end(), rng);
    std::vector<std::pair<Tensor, Tensor>> minibatches;
    for (int begin = 0; begin < set->count; begin += batch_size) {
        minibatches.push_back(minibatch(begin));
    }
    return minibatches;
}

// --- accuracy

int count_correct(const Tensor &y_hat, const Tensor &y) {
    const std::vector<float> z = to_host(y_hat), labels = to_host(y);
    const int classes = y_hat.shape[1];
    int correct = 0;
    for (size_t n = 0; n < labels.size(); n++) {
        const float *row = &z[n * classes];
        correct += std::max_element(row, row + classes) - row == labels[n];
    }
    return correct;
}

// Return the fraction of the test samples that net(X) classifies correctly, computed on one device.
float evaluate_accuracy_gpu(const std::function<Tensor(const Tensor &)> &net, DataIter &test_iter,
                            Device device) {
    NoGrad guard;
    double correct = 0;
    for (auto [X, y] : test_iter.epoch()) {
        correct += count_correct(net(copyto(X, device)), y);
    }
    return correct / test_iter.X.shape[0];
}

// --- timing and progress

double Timer::now() {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::duration<double>(1);
}

// Keep a minibatch's losses for end_epoch(). On a terminal, draw the bar when it gets longer:
//   [====================                    ] 30000/60000
void Animator::add_losses(const std::vector<Tensor> &losses) {
    const int length = 40, drawn = (long)length * done / samples;
    for (const Tensor &l : losses) {
        pending.push_back(l);
        done += size(l);
    }
    const int equals = (long)length * done / samples;
    if (equals == drawn || !isatty(STDOUT_FILENO)) return;
    printf("\r[%-40s] %d/%d", std::string(equals, '=').c_str(), done, samples);
    fflush(stdout);
}

void Animator::end_epoch(float acc, double epoch_seconds) {
    double sum = 0;
    if (isatty(STDOUT_FILENO)) printf("\r\033[K");
    for (float x : all_to_host(pending)) sum += x;
    loss.push_back(sum / done);
    Y.push_back(acc);
    seconds.push_back(epoch_seconds);
    pending.clear();
    done = 0;
    if (!std::isfinite(sum)) {
        error("the loss is %f in epoch %zu: use a smaller LR than %g", sum, Y.size(), options.lr);
    }
}

void Animator::add(int epoch, float acc, double epoch_seconds) {
    end_epoch(acc, epoch_seconds);
    if (epoch == 1) printf("epoch      loss  test acc   seconds\n");
    printf("%5d  %8.4f  %8.4f  %8.2f\n", epoch, loss.back(), acc, epoch_seconds);
}

// ---------------------------------------------------------------------------------------------
// 12. Checks
// These functions check the chapter's promise: k devices compute the same gradient as one, and the
// copies of the parameters stay equal. If a check fails, `make check` looks for the cause.

// Return the name of number j of all_to_host(params), such as W1[7].
static std::string name_of(int j) {
    size_t i = 0;
    while (j >= size(params[i])) {
        j -= size(params[i]);
        i++;
    }
    return param_names[i] + "[" + std::to_string(j) + "]";
}

// Fail if number j of the first minibatch's gradient or update on gpu(c) is wrong, or is NaN.
static void compare(const char *what, int j, int c, float got, float expected, float tolerance) {
    if (std::fabs(got - expected) <= tolerance) return;
    error("the first minibatch: the %s of %s on gpu(%d) is %.9g, not %.9g: `make check` looks for "
          "the cause; if this is intended, use CHECKS=0",
          what, name_of(j).c_str(), c, got, expected);
}

// Take a trial step on the first samples of the file, with copies of the parameters. Compare it
// with the same step on gpu(0) alone, which computes one shard after another. So all numbers are
// rounded alike, and only the last digits of their sums may differ. Each device must have the sum
// of the shards' gradients, and must have subtracted lr * gradient / n.
void check_first_minibatch(DataIter &train_iter, const std::vector<Device> &devices, float lr) {
    if (!options.checks) return;
    const auto [X, y] = train_iter.minibatch(0);
    const int n = X.shape[0], k = devices.size();
    const std::vector<float> before = all_to_host(params);
    std::vector<float> expected(before.size()), magnitude(before.size()); // sums of part, |part|
    int begin = 0;
    for (int c = 0; c < k; c++) {
        const int end = begin + n / k + (c < n % k ? 1 : 0);
        const std::vector<Tensor> copy = get_params(params, gpu(0));
        const Tensor X_shard = copyto(rows(X, begin, end), gpu(0));
        backward(loss(net(X_shard, copy), copyto(rows(y, begin, end), gpu(0))));
        const std::vector<float> part = all_to_host(gradients({copy})[0]);
        for (size_t j = 0; j < part.size(); j++) {
            expected[j] += part[j];
            magnitude[j] += std::fabs(part[j]);
        }
        begin = end;
    }
    const PerDevice device_params = replicate(devices);
    train_batch(X, y, device_params, devices, lr);
    for (int c = 0; c < k; c++) {
        const std::vector<float> grad = all_to_host(gradients(device_params)[c]);
        const std::vector<float> after = all_to_host(device_params[c]);
        for (size_t j = 0; j < grad.size(); j++) {
            compare("gradient", j, c, grad[j], expected[j], 1.2e-7f * k * magnitude[j]);
            const float update = lr * grad[j] / n;
            const float rounding = 1e-5f * std::fabs(update) + 1e-6f * std::fabs(before[j]);
            compare("update", j, c, before[j] - after[j], update, rounding + 1e-37f);
        }
    }
    printf("first minibatch: %d device%s with one\n", k, k > 1 ? "s agree" : " agrees");
}

// Fail unless the parameters are bitwise identical on all devices.
void check_replicas(const PerDevice &device_params) {
    if (!options.checks) return;
    const std::vector<float> first = all_to_host(device_params[0]);
    for (size_t c = 1; c < device_params.size(); c++) {
        const std::vector<float> other = all_to_host(device_params[c]);
        for (size_t j = 0; j < first.size(); j++) {
            if (memcmp(&first[j], &other[j], sizeof(float)) != 0) {
                error("the replicas differ: %s is %.9g on gpu(0) but %.9g on gpu(%zu): does "
                      "allreduce leave the same sum on every device, and does sgd use it on each?",
                      name_of(j).c_str(), first[j], other[j], c);
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------
// 13. Program
// Options have the form NAME=value, for make and for this program alike: mgpu GPUS=2 LR=0.1
//
// Programs that include this file, as the tests do and the parts in extras/, define MGPU_NO_MAIN
// before the #include. They may define LAUNCH there too, set `net`, `exchange`, `after_gradient`
// and the variables below, and add to `algorithms`, `option_table` and `after_options`.

Options options;
std::function<void(const Animator &, const std::vector<Tensor> &params)> after_epoch;
static std::vector<void (*)()> after_options; // called when the options have been read

// What run_program() does
struct Experiment {
    std::string name;
    std::function<void()> init_params; // sets `params` and `param_names`
    std::function<void(int num_gpus)> demos;
    std::function<void(int num_gpus, int batch_size, float lr)> train;
};
static Experiment experiment = {"lenet", init_params, demos, train};

// --- options

struct Option {
    const char *name;
    std::variant<int *, float *, std::string *> field; // where the value goes
    const char *help;                                  // ends with (its default)
    double least = 0, most = 1e9;                      // of a number
    bool given = false;                                // on the command line
};

// `make help` reads these lines, one for each option.
static std::vector<Option> option_table = {
    {"GPUS", &options.gpus, "number of devices, which may share GPUs (1)", 1, 64},
    {"BATCH", &options.batch, "samples per minibatch, over all devices (256)", 1, 60000},
    {"LR", &options.lr, "learning rate (0.2)", 1e-30, 1e30},
    {"EPOCHS", &options.epochs, "passes over the training set (10)", 1},
    {"ALLREDUCE", &options.allreduce, "algorithm that sums the gradients, see section 7 (naive)"},
    {"SEED", &options.seed, "seed of the parameters and of the shuffling (0)"},
    {"SHUFFLE", &options.shuffle, "0: keep the samples in the order of the file (1)", 0, 1},
    {"LIMIT", &options.limit, "use only the first LIMIT training and test samples (0: all)"},
    {"DATA", &options.data, "folder with the four files of (Fashion-)MNIST (data)"},
    {"CHECKS", &options.checks, "0: check neither the first minibatch nor the replicas (1)", 0, 1},
    {"PEERS", &options.peers, "0: copies between devices go through the host (1)", 0, 1},
};

static Option *find_option(const std::string &name) {
    for (Option &option : option_table) {
        if (option.name == name) return &option;
    }
    return nullptr;
}

// Return whether the option is on the command line.
bool given(const std::string &name) { return find_option(name) && find_option(name)->given; }

// Set an option to a word of the command line, such as GPUS=2, or fail.
static void set_option(const std::string &word) {
    const size_t equals = std::min(word.find('='), word.size());
    Option *const option = find_option(word.substr(0, equals));
    if (!option || equals + 1 >= word.size()) {
        std::string names;
        for (const Option &known : option_table) names += std::string(" ") + known.name;
        error("%s is not an option: write NAME=value with one of%s", word.c_str(), names.c_str());
    }
    option->given = true;

    const std::string value = word.substr(equals + 1);
    if (auto *text = std::get_if<std::string *>(&option->field)) {
        **text = value;
        return;
    }
    auto *whole = std::get_if<int *>(&option->field);
    char *end;
    const double x = strtod(value.c_str(), &end);
    if (*end || !(x >= option->least && x <= option->most) || (whole && x != (int)x)) {
        error("%s: expected a %s from %g to %g", word.c_str(), whole ? "whole number" : "number",
              option->least, option->most);
    }
    if (whole) **whole = x;
    else *std::get<float *>(option->field) = x;
}

// Read the command line into `options`. Return false if it asks for help, which is then printed.
bool parse_options(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const std::string word = argv[i];
        if (word == "help" || word == "--help") {
            printf("Options have the form NAME=value, such as GPUS=2 (defaults in parentheses):\n");
            for (const Option &option : option_table) {
                printf("  %-14s %s\n", option.name, option.help);
            }
            return false;
        }
        set_option(word);
    }
    for (auto part : after_options) part();
    const int k = options.gpus;
    if (options.batch < k) {
        error("batch %d cannot be split over %d devices: use BATCH >= %d", options.batch, k, k);
    }
    find_algorithm(options.allreduce); // fails if there is no such algorithm
    if (options.allreduce != "naive" && !exchange) {
        exchange = [](const PerDevice &grads) { run_allreduce(options.allreduce, grads); };
    }
    return true;
}

// --- main

void run_program() {
    const int k = std::max(2, options.gpus); // the demos want two
    train_set = load_data(options.data, "train");
    test_set = load_data(options.data, "t10k");
    if (on_cpu) setenv("CUDA_CPU_DEVICES", std::to_string(k).c_str(), 0); // as many as are needed
    use_devices(k, true);
    rng.seed(options.seed);
    experiment.init_params();
    experiment.demos(options.gpus);
    experiment.train(options.gpus, options.batch, options.lr);
    params.clear(); // before CUDA shuts down
}
void (*run)() = run_program; // what mgpu_main() calls

// Read the options and run. Return 0, or print an error and exit with status 1.
int mgpu_main(int argc, char **argv) {
    setvbuf(stdout, nullptr, _IOLBF, BUFSIZ); // print line by line, even into a pipe
    try {
        if (parse_options(argc, argv)) run();
        if (fflush(stdout) || ferror(stdout)) error("cannot write to stdout");
        return 0;
    } catch (const std::bad_alloc &) {
        fprintf(stderr, "mgpu: the host is out of memory\n");
    } catch (const std::exception &e) {
        fflush(stdout);
        fprintf(stderr, "mgpu: %s\n", e.what());
    }
    _exit(1); // drop the work that is still enqueued
}

#ifndef MGPU_NO_MAIN
int main(int argc, char **argv) { return mgpu_main(argc, argv); }
#endif
