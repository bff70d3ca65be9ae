// Training on multiple GPUs, from scratch: a chapter of "Dive into Deep Learning" in one CUDA file.
//
//     make run GPUS=2      train LeNet on Fashion-MNIST on two devices
//     make test            check the kernels, and the training of k devices against that of one
//
// Read sections 2 to 6 beside the chapter: titles, names and order are those of its current edition
// (the first edition has gpu_params and ctx_list). Section 7 is the chapter's third exercise, with
// a place for an allreduce of your own. Sections 8 to 13 build the parts that the chapter takes
// from its framework: operators, autograd, devices, data.
//
//    1. The vocabulary                    8. Kernels and operators
//    2. A toy network                     9. Autograd
//    3. Data synchronization             10. Devices and memory
//    4. Distributing data                11. Data and files
//    5. Training                         12. Checks
//    6. Experiment                       13. Program
//    7. Allreduce algorithms
//
// Notation: N images, C channels, H rows, W columns (NCHW, row-major), O output channels, K the
// side of a convolution kernel, k devices. Tensors hold 32-bit floats. dX is the gradient of the
// loss with respect to X. F is torch.nn.functional. A word in capitals, such as GPUS, is an option
// (section 13).
// Without a GPU, g++ compiles this file with extras/cpu/cuda_runtime.h, which emulates k devices.

#include <cuda_runtime.h>
#include <nvtx3/nvToolsExt.h> // defines: nvtxRangePushA, nvtxRangePop, nvtxMarkA

#include <algorithm>
#include <chrono>
#include <climits>
#include <cmath>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>
#include <unistd.h> // defines: _exit, isatty, access, getpid

// ---------------------------------------------------------------------------------------------
// 1. The vocabulary
// This section has the types and functions that sections 2 to 7 use. Skim it now and come back when
// a name is new.

// Where a tensor is: on a device, gpu(i), or on the host, cpu(), which runs this program.
struct Device {
    int id; // i for gpu(i), -1 for cpu()
};

inline Device gpu(int i) { return {i}; }
inline Device cpu() { return {-1}; }

// An array of floats in one memory, a device's or the host's. A Tensor is a handle, as in Python:
// assigning it copies no data, and even a const Tensor's data may be written. The memory is freed
// with the last handle.
struct Tensor {
    Device device = {-1};
    std::vector<int> shape;
    std::shared_ptr<float> data = nullptr;  // size(t) floats
    std::shared_ptr<Tensor> grad = nullptr; // its gradient, or null if none is computed
    bool requires_grad = true;              // whether attach_grad() gives it a gradient

    // Only gradients use the next two (section 9); only gradients of parameters use `written`.
    bool stale = false; // whether it must be zeroed before the next write
    std::shared_ptr<struct Event> written = nullptr; // recorded after each write

    float *ptr() const; // the address of its numbers
};

// One list of tensors per device: x[c][i] is tensor i on device c.
typedef std::vector<std::vector<Tensor>> PerDevice;

// --- Functions. Each heading names the section that defines them.

// 3. Copies
Tensor copyto(const Tensor &src, Device device);   // a copy of src there
void copyto(const Tensor &src, const Tensor &dst); // dst[:] = src

// 7. The function that sums the gradients over all devices; null selects the chapter's loop
typedef std::function<void(const PerDevice &grads)> Exchange;
extern Exchange exchange;

// 8. Operators. Each one enqueues its kernels on the inputs' device and returns at once.
Tensor conv2d(const Tensor &X, const Tensor &W, const Tensor &b);      // (N,C,H,W) (O,C,K,K) (O)
Tensor relu(const Tensor &X);                                          // any shape
Tensor avg_pool2d(const Tensor &X, int kernel_size, int stride);       // (N,C,H,W)
Tensor linear(const Tensor &X, const Tensor &W, const Tensor &b);      // (N,C) (C,O) (O): X @ W + b
Tensor softmax_cross_entropy(const Tensor &y_hat, const Tensor &y);    // (N,classes) (N) -> (N)
void sgd(const std::vector<Tensor> &params, float lr, int batch_size); // param -= lr * grad / batch
void add_(const Tensor &a, const Tensor &b);                           // a[:] += b
void fill(const Tensor &a, float value);                               // a[:] = value

// 9. Autograd
void attach_grad(std::vector<Tensor> &params);       // give each trained parameter a gradient of 0
void backward(const Tensor &l);                      // compute the gradients of sum(l)
const Tensor &gradient(const Tensor &param);         // param.grad, or an error if there is none
PerDevice gradients(const PerDevice &device_params); // of all parameters that are trained
std::vector<Tensor> column(const PerDevice &x, size_t i); // [x[c][i] for c in range(k)]
void wait_for_gradient(const Tensor &grad); // make its device wait until backward has written it

// 10. Devices and memory
struct Stream { // a queue of work, which a device does in order
    cudaStream_t handle = nullptr;
    cudaEvent_t ready = nullptr; // see wait_for
};
Device try_gpu(int i);                    // gpu(i), or an error if there is none
std::vector<Device> first_devices(int k); // [try_gpu(i) for i in range(k)]
Stream &current_stream(Device device);    // the stream on which new work is enqueued
cudaStream_t stream_of(Device device);    // its handle; makes the device CUDA's current one
int physical(Device device); // CUDA's number for its GPU, which several devices may share
Stream &link_stream(Device src, Device dst); // the stream for copies from src to dst
void use_comm_streams(bool use); // true: current_stream(d) is d's second stream, for communication
void join_comm_streams(int k);   // make later work of k devices wait for those streams
void waitall();                  // make the host wait for all devices
int size(const Tensor &t);       // the product of its shape
Tensor empty(std::vector<int> shape, Device device); // uninitialized memory
Tensor full(std::vector<int> shape, float value, Device device);
Tensor normal(float scale, std::vector<int> shape);      // N(0, scale^2), on the host
Tensor arange(int n);                                    // 0, 1, ..., n-1, on the host
Tensor reshape(const Tensor &X, std::vector<int> shape); // shares X's memory and gradient
Tensor rows(const Tensor &X, int begin, int end);        // X[begin:end], shares X's memory
std::vector<float> to_host(const Tensor &t);             // its numbers; the host waits for them
std::string str(Device device);                          // gpu(0)
std::string str(const std::vector<Device> &devices);     // [gpu(0), gpu(1)]

// Throw an error. mgpu_main() prints it on one line and ends the program.
[[noreturn]] __attribute__((format(printf, 1, 2))) void error(const char *format, ...);
__attribute__((format(printf, 1, 2))) std::string format(const char *format, ...);
// Check a CUDA call. If it failed, print its file, its line and CUDA's message, and exit.
#define CUDA_CHECK(call) check_cuda((call), #call, __FILE__, __LINE__)
void check_cuda(cudaError_t code, const char *call, const char *file, int line);

// 11. Data and files
std::string to_string(const Tensor &t); // its numbers as NumPy prints them

// The training set or the test set of Fashion-MNIST, in minibatches: images X (N,1,28,28), whose
// pixels are numbers from 0 to 1, and classes y (N).
struct DataIter {
    const struct DataSet *set;
    int batch_size;
    bool shuffle;
    std::vector<int> order; // the order of the samples in this epoch
    Tensor X, y;            // room for all samples, on the host; a minibatch is a view
    int steps_left;         // minibatches left before the limit STEPS

    int steps() const;                              // minibatches per epoch
    std::pair<Tensor, Tensor> minibatch(int begin); // the minibatch that starts at sample `begin`
    std::vector<std::pair<Tensor, Tensor>> epoch(); // all minibatches; reshuffled if `shuffle`
};
std::pair<DataIter, DataIter> load_data_fashion_mnist(int batch_size); // to train on, to test on
int number_of_epochs(const DataIter &train_iter);                      // EPOCHS, or fewer for STEPS
float evaluate_accuracy_gpu(const std::function<Tensor(const Tensor &)> &net, DataIter &test_iter,
                            Device device);

// A stopwatch, in seconds.
struct Timer {
    std::vector<double> times; // from each start() to its stop()
    double started = 0;

    void start();
    void stop();
    double avg() const;
};

// The replacement for the chapter's plot: a progress bar, a table with a row for each epoch, and
// the file LOG.
struct Animator {
    int steps;                                    // in an epoch
    std::vector<float> Y = {};                    // test accuracy after each epoch
    std::ofstream log = {};                       // the file
    std::vector<std::vector<Tensor>> losses = {}; // of minibatches that are not counted yet
    int done = 0, samples = 0;                    // minibatches and samples of this epoch
    double loss = 0;                              // sum over these samples
    double began = 0, drawn = 0;                  // when the epoch began, when the bar was drawn

    explicit Animator(int steps);
    void add_losses(const std::vector<Tensor> &ls); // of a minibatch
    void add(int epoch, float acc, double seconds); // the row of an epoch
    void end_epoch(int epoch, float acc, double seconds); // write its row to LOG, start anew
    void count();     // sum up the losses
    void clear_bar(); // before something else is printed
};
void save_params(const std::vector<Tensor> &params); // write them to the file SAVE

// 12. Checks
void check_first_minibatch(DataIter &train_iter, const std::vector<Device> &devices, float lr);
void check_replicas(const PerDevice &device_params); // fail unless they are equal on all devices

// 13. The options of the command line. 0 or empty means that one is not given, or has no limit.
struct Options {
    int gpus = 1, batch = 0, epochs = 0;
    int steps = 0, limit = 0; // most minibatches in all, most samples of a set
    int seed = 0;             // of the parameters and of the order of the samples
    float lr = 0;
    bool shuffle = true, overlap = false, first_check = true, replica_check = true, peers = true;
    std::string model = "lenet", allreduce;
    std::vector<int> split; // proportions of the devices' shards; empty: equal ones
    std::string data = "data", init, save, log = "build/log.csv"; // a folder, files
};
extern Options options;

// ---------------------------------------------------------------------------------------------
// 2. A toy network                                                     chapter: "A Toy Network"
// LeNet: its parameters, the model, its loss.

std::vector<Tensor> params; // on the host
std::vector<std::string> param_names;

// Initialize model parameters
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
    param_names = {"W1", "b1", "W2", "b2", "W3", "b3", "W4", "b4"};
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

// The network to train: lenet, or another one that MODEL selects (section 13)
typedef std::function<Tensor(const Tensor &X, const std::vector<Tensor> &params)> Net;
Net net = lenet;

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
    attach_grad(new_params); // all in one call, which makes the gradients contiguous in memory
    return new_params;
}

// Return [get_params(params, d) for d in devices].
PerDevice replicate(const std::vector<Device> &devices) {
    PerDevice device_params;
    for (Device d : devices) {
        device_params.push_back(get_params(params, d));
    }
    return device_params;
}

// Sum data[0], data[1], ... elementwise and write the sum to each of them. data[c] is on device c.
// Device 0 is the root: it receives the other tensors, adds them, and sends the sum back.
// The temporary copy in the first loop is freed immediately. That is safe: its memory is reused
// only by work that is enqueued later on the same stream.
void allreduce(std::vector<Tensor> data) {
    for (size_t i = 1; i < data.size(); i++) {
        add_(data[0], copyto(data[i], data[0].device)); // data[0][:] += data[i]
    }
    for (size_t i = 1; i < data.size(); i++) {
        copyto(data[0], data[i]); // data[i] = copyto(...) would only change the list
    }
}

// --- The message itself
// The host only enqueues messages. A stream is a queue: its work is done in order, while other
// streams do theirs. So a stream must wait before it reads data that another stream writes.

// Make later work on `waiting` wait for all earlier work on `other`. The host does not wait.
//
//   other       ... work ... [record ready] ... more work ...
//                                  |
//                                  v
//   waiting     ... work ...  [wait for it] ... later work ...
//
// A later cudaEventRecord does not change an earlier wait, so one event per stream is enough.
void wait_for(Stream &waiting, const Stream &other) {
    CUDA_CHECK(cudaEventRecord(other.ready, other.handle));
    CUDA_CHECK(cudaStreamWaitEvent(waiting.handle, other.ready, 0));
}
void wait_for(Device device, Device other) {
    wait_for(current_stream(device), current_stream(other));
}

// Enqueue a copy dst[:] = src between two devices, on a stream of dst's device.
void peer_copy(const Tensor &src, const Tensor &dst, Stream &stream) {
    CUDA_CHECK(cudaMemcpyPeerAsync(dst.ptr(), physical(dst.device), src.ptr(), physical(src.device),
                                   sizeof(float) * size(src), stream.handle));
}

// Set dst[:] = src, which must have the same size. The host waits only if dst is on the host.
void copyto(const Tensor &src, const Tensor &dst) {
    if (size(src) != size(dst)) {
        error("copyto: %d numbers do not fit a tensor of %d", size(src), size(dst));
    }
    const Device from = src.device, to = dst.device;
    const size_t bytes = sizeof(float) * size(src);
    const float *x = src.ptr();
    float *y = dst.ptr();
    if (bytes == 0) return;
    if (from.id < 0 && to.id < 0) {
        memcpy(y, x, bytes);
    } else if (from.id >= 0 && to.id >= 0 && from.id != to.id) {
        wait_for(to, from); // read src only after it is written
        peer_copy(src, dst, current_stream(to));
        wait_for(from, to); // overwrite src only after it is read
    } else {                // within a device, or between a device and the host
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
    dst.requires_grad = src.requires_grad;
    copyto(src, dst);
    return dst;
}

// ---------------------------------------------------------------------------------------------
// 4. Distributing data                                            chapter: "Distributing Data"
// Divide a minibatch among the devices.

// Divide n samples into k shards, equal or in proportion to SPLIT, and return their sizes. The
// first shards get one sample more if n does not divide evenly.
std::vector<int> shard_sizes(int n, int k) {
    std::vector<int> weights = options.split;
    if (weights.empty() || k == 1) weights.assign(k, 1);
    if ((int)weights.size() != k) {
        error("SPLIT has %zu parts, but there are %d devices", weights.size(), k);
    }
    const long sum = std::accumulate(weights.begin(), weights.end(), 0L);
    std::vector<int> sizes;
    int left = n;
    for (long weight : weights) {
        sizes.push_back(n * weight / sum);
        left -= sizes.back();
    }
    for (int c = 0; c < left; c++) {
        sizes[c]++;
    }
    return sizes;
}

// Split X along its first axis into one contiguous shard per device, and copy each shard there. If
// there are fewer samples than devices, the last shards are empty.
// Without SPLIT, this is gluon.utils.split_and_load(X, devices, even_split=False).
std::vector<Tensor> split_and_load(const Tensor &X, const std::vector<Device> &devices) {
    const std::vector<int> sizes = shard_sizes(X.shape[0], devices.size());
    std::vector<Tensor> shards;
    int begin = 0;
    for (size_t c = 0; c < devices.size(); c++) {
        const int end = begin + sizes[c];
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
// train_batch() takes one step of SGD, on one minibatch and all devices; train() takes the steps of
// all epochs. Lines that add something to the chapter are marked "ours".

// Take one step of SGD on all devices. Return the losses, one number per sample: ls[c] is on device
// c. (The chapter returns nothing.) Operators record themselves for backward(), so
// autograd.record() is not needed.
std::vector<Tensor> train_batch(const Tensor &X, const Tensor &y, const PerDevice &device_params,
                                const std::vector<Device> &devices, float lr) {
    auto [X_shards, y_shards] = split_batch(X, y, devices);
    // Loss is calculated separately on each GPU
    std::vector<Tensor> ls;
    for (size_t c = 0; c < devices.size(); c++) {
        ls.push_back(loss(net(X_shards[c], device_params[c]), y_shards[c]));
    }
    for (const Tensor &l : ls) { // Back Propagation is performed separately on each GPU
        backward(l);
    }
    // Sum all gradients from each GPU and broadcast them to all GPUs
    const PerDevice grads = gradients(device_params);
    if (exchange) { // ours: ALLREDUCE and OVERLAP, section 7
        exchange(grads);
    } else {
        for (size_t i = 0; i < grads[0].size(); i++) {
            allreduce(column(grads, i)); // [device_params[c][i].grad for c in range(len(devices))]
        }
    }
    // The model parameters are updated separately on each GPU
    for (const std::vector<Tensor> &param : device_params) {
        sgd(param, lr, X.shape[0]); // Here, we use a full-size batch
    }
    return ls; // ours
}

// Train on num_gpus devices. batch_size counts the samples over all devices.
void train(int num_gpus, int batch_size, float lr) {
    auto [train_iter, test_iter] = load_data_fashion_mnist(batch_size);
    const std::vector<Device> devices = first_devices(num_gpus);
    // Copy model parameters to num_gpus GPUs
    PerDevice device_params = replicate(devices);
    const int num_epochs = number_of_epochs(train_iter); // 10 in the chapter
    Animator animator(train_iter.steps());
    Timer timer;
    check_first_minibatch(train_iter, devices, lr); // ours
    for (int epoch = 0; epoch < num_epochs; epoch++) {
        timer.start();
        for (auto [X, y] : train_iter.epoch()) {
            // Perform multi-GPU training for a single minibatch
            std::vector<Tensor> ls = train_batch(X, y, device_params, devices, lr);
            waitall();
            animator.add_losses(ls); // ours
        }
        timer.stop();
        check_replicas(device_params); // ours
        // Verify the model on GPU 0
        auto model = [&](const Tensor &x) { return net(x, device_params[0]); };
        const float acc = evaluate_accuracy_gpu(model, test_iter, devices[0]);
        animator.add(epoch + 1, acc, timer.times.back());
        save_params(device_params[0]); // ours
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

// Run the examples. They print numbers that are copied back from the devices, so that a mistake in
// copyto() or allreduce() shows here first.
void demos(int num_gpus) {
    std::vector<Tensor> new_params = get_params(params, try_gpu(0));
    printf("b1 weight: %s\n", to_string(new_params[1]).c_str());
    printf("b1 grad: %s\n", to_string(gradient(new_params[1])).c_str());

    std::vector<Tensor> data;
    std::vector<Device> devices;
    for (int i = 0; i < num_gpus; i++) {
        data.push_back(full({1, 2}, i + 1, try_gpu(i))); // np.ones((1, 2), ...) * (i + 1)
        devices.push_back(try_gpu(i));
    }
    print("before allreduce", data);
    allreduce(data);
    print("after allreduce", data);

    Tensor matrix = reshape(arange(20), {4, 5}); // also called data in the chapter
    std::vector<Tensor> split = split_and_load(matrix, devices);
    print("input ", {matrix});
    printf("load into %s\n", str(devices).c_str());
    print("output", split);
}

// ---------------------------------------------------------------------------------------------
// 7. Allreduce algorithms                                     chapter: "Exercises", the third one
// Seven algorithms that compute the same sums at different cost, and a place for your own.
// ALLREDUCE=name trains with one of them; OVERLAP=1 runs it while backward is still computing.
//
// Contract. grads[c][i] is on device c and has the same size on every device. The tensors of a
// device are contiguous in memory, as attach_grad() allocates them. An algorithm overwrites every
// grads[c][i] with the sum over all devices, bitwise identical on all devices. It enqueues its work
// and returns (only `host` makes the host wait). Work that is enqueued later on a device sees the
// sums. The algorithm accepts any number of devices (or says otherwise, see `yours`) and tensors of
// any size, including 0.
//
// Cost, for k devices, each with b bytes in P tensors:
//   messages   how many copies are made from one memory to another
//   busiest    how many bytes the busiest device receives; it sends as many
//   rounds     how many messages are in the longest chain, where each waits for the one before
// If a message of m bytes takes alpha + m * beta seconds (alpha is the latency, 1 / beta the
// bandwidth), an allreduce takes about rounds * alpha + busiest * beta. (In naive, bucket, host and
// tree the busiest device receives everything before it sends. That takes busiest * beta twice.)

// A named range in NVIDIA's profiler nsys, open for the lifetime of the object.
struct ProfilerRange {
    explicit ProfilerRange(const char *name) { nvtxRangePushA(name); }
    ~ProfilerRange() { nvtxRangePop(); }
};

// --- tools, besides copyto(), add_() and empty()

// View all tensors of a device as one long tensor. result[c] is the memory of grads[c].
static std::vector<Tensor> flatten(const PerDevice &grads) {
    std::vector<Tensor> flat;
    for (const std::vector<Tensor> &tensors : grads) {
        Tensor all = tensors[0];
        all.shape = {0};
        for (const Tensor &t : tensors) {
            if (size(t) > 0 && t.ptr() != all.ptr() + size(all)) {
                error("flatten: the tensors on %s are not contiguous in memory",
                      str(t.device).c_str());
            }
            all.shape[0] += size(t);
        }
        flat.push_back(all);
    }
    return flat;
}

// Divide a tensor into k chunks, whose sizes differ by at most one. View `count` consecutive ones,
// beginning with chunk j.
static Tensor chunk(const Tensor &t, int j, int k, int count = 1) {
    if (j < 0 || j + count > k) {
        error("there is no chunk %d of %d: they are numbered 0 to %d%s", j < 0 ? j : j + count - 1,
              k, k - 1, j < 0 ? " (% of a negative number?)" : "");
    }
    const long n = size(t);
    return rows(reshape(t, {(int)n}), n * j / k, n * (j + count) / k);
}

// A copy dst[:] = src from one device to another.
struct Message {
    Tensor src, dst;
};

// Enqueue each message on the link_stream from its source to its destination, so that messages on
// different links travel at the same time. A message waits for all work that its two devices got
// before this call, and the work that they get after it waits for the message. No message may write
// to memory that another message of the call reads or writes.
static void send(const std::vector<Message> &messages) {
    for (const auto &[src, dst] : messages) {
        if (size(src) != size(dst)) {
            error("send: %d numbers do not fit a tensor of %d", size(src), size(dst));
        }
        if (size(src) > 0 && src.ptr() == dst.ptr()) {
            error("send: a message on %s has the same source and destination",
                  str(src.device).c_str());
        }
    }
    for (const auto &[src, dst] : messages) {
        if (size(src) == 0) continue;
        Stream &link = link_stream(src.device, dst.device);
        wait_for(link, current_stream(src.device));
        wait_for(link, current_stream(dst.device));
        peer_copy(src, dst, link);
    }
    for (const auto &[src, dst] : messages) {
        if (size(src) == 0) continue;
        wait_for(current_stream(src.device), link_stream(src.device, dst.device));
        wait_for(current_stream(dst.device), link_stream(src.device, dst.device));
    }
}

// --- naive
// Sum tensor by tensor on device 0: the loop of train_batch().
//   messages 2(k-1)P   busiest (k-1)b   rounds 2(k-1)P
static void allreduce_naive(const PerDevice &grads) {
    for (size_t i = 0; i < grads[0].size(); i++) {
        allreduce(column(grads, i));
    }
}

// --- bucket
// Sum all tensors on device 0 as if they were one. The latency is paid 1/P as often.
//   messages 2(k-1)   busiest (k-1)b   rounds 2(k-1)
static void allreduce_bucket(const PerDevice &grads) { allreduce(flatten(grads)); }

// --- host
// Sum on the host, as a parameter server does (kvstore='local' in MXNet). The host waits for the
// devices.
//   messages 2k (0 if k = 1)   busiest kb, the host   rounds k+1
static void allreduce_host(const PerDevice &grads) {
    const std::vector<Tensor> flat = flatten(grads);
    if (flat.size() == 1) return;
    const Tensor sum = copyto(flat[0], cpu());
    const int n = size(sum);
    for (size_t c = 1; c < flat.size(); c++) {
        const Tensor received = copyto(flat[c], cpu());
        for (int j = 0; j < n; j++) {
            sum.ptr()[j] += received.ptr()[j];
        }
    }
    for (const Tensor &t : flat) {
        copyto(sum, t);
    }
}

// --- by_tensor
// Sum different parameters on different devices, as the chapter's third exercise asks
// (kvstore='device' in MXNet). The device that sums a tensor is its owner. Tensors are assigned in
// order of decreasing size, each to the device that owns the fewest numbers so far. No device
// owns more than L bytes or M tensors.
//   messages 2(k-1)P   busiest (k-1)L + b-L   rounds 2M
static void allreduce_by_tensor(const PerDevice &grads) {
    const int k = grads.size(), P = grads[0].size();
    std::vector<int> largest_first(P);
    std::iota(largest_first.begin(), largest_first.end(), 0);
    std::stable_sort(largest_first.begin(), largest_first.end(),
                     [&](int i, int j) { return size(grads[0][i]) > size(grads[0][j]); });

    std::vector<int> owner(P);  // owner[i] sums tensor i
    std::vector<long> owned(k); // how many numbers each device owns
    for (int i : largest_first) {
        owner[i] = std::min_element(owned.begin(), owned.end()) - owned.begin();
        owned[owner[i]] += size(grads[0][i]);
    }

    // gather[m] takes a device's tensor to the owner, and broadcast[m] takes the sum back. Owner
    // c begins with device c + 1, so that not all owners read from device 0 first.
    std::vector<Message> gather, broadcast;
    for (int distance = 1; distance < k; distance++) {
        for (int i = 0; i < P; i++) {
            const int sender = (owner[i] + distance) % k;
            const Tensor part = grads[sender][i], sum = grads[owner[i]][i];
            gather.push_back({part, empty(sum.shape, sum.device)});
            broadcast.push_back({sum, part});
        }
    }
    send(gather);
    for (size_t m = 0; m < gather.size(); m++) {
        add_(broadcast[m].src, gather[m].dst);
    }
    send(broadcast);
}

// --- sharded
// Sum chunk c on device c. The two rounds of messages are known as reduce-scatter and all-gather.
//   messages 2k(k-1)   busiest 2(k-1)b/k   rounds 2
static void allreduce_sharded(const PerDevice &grads) {
    const std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    std::vector<Message> gather, broadcast;
    for (int distance = 1; distance < k; distance++) {
        for (int owner = 0; owner < k; owner++) {
            const int sender = (owner + distance) % k;
            const Tensor part = chunk(flat[sender], owner, k), sum = chunk(flat[owner], owner, k);
            gather.push_back({part, empty(sum.shape, sum.device)});
            broadcast.push_back({sum, part});
        }
    }
    send(gather);
    for (size_t m = 0; m < gather.size(); m++) {
        add_(broadcast[m].src, gather[m].dst);
    }
    send(broadcast);
}

// --- ring
// Let device c send only to its right neighbour, device (c + 1) % k, so that every device sends and
// receives in every round.
//   messages 2k(k-1)   busiest 2(k-1)b/k   rounds 2(k-1)
//
//   k = 3          reduce-scatter             all-gather
//   gpu(0) sends   chunk 0, then chunk 2      chunk 1, then chunk 0
//   gpu(1) sends   chunk 1, then chunk 0      chunk 2, then chunk 1
//   gpu(2) sends   chunk 2, then chunk 1      chunk 0, then chunk 2
static void allreduce_ring(const PerDevice &grads) {
    const std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();

    // Reduce-scatter: each device sends a partial sum, which its neighbour adds to its own chunk.
    // After k-1 rounds, device c holds the complete sum of chunk (c + 1) % k.
    for (int round = 0; round < k - 1; round++) {
        std::vector<Message> messages;
        std::vector<Tensor> sums; // sums[sender]: the chunk to which the receiver adds
        for (int sender = 0; sender < k; sender++) {
            const int receiver = (sender + 1) % k;
            const int j = (sender - round + k) % k;
            const Tensor part = chunk(flat[sender], j, k);
            sums.push_back(chunk(flat[receiver], j, k));
            messages.push_back({part, empty(part.shape, flat[receiver].device)});
        }
        send(messages);
        for (int sender = 0; sender < k; sender++) {
            add_(sums[sender], messages[sender].dst);
        }
    }

    // All-gather: each device passes on the complete sum that it computed or received last.
    for (int round = 0; round < k - 1; round++) {
        std::vector<Message> messages;
        for (int sender = 0; sender < k; sender++) {
            const int receiver = (sender + 1) % k;
            const int j = (sender + 1 - round + k) % k;
            messages.push_back({chunk(flat[sender], j, k), chunk(flat[receiver], j, k)});
        }
        send(messages);
    }
}

// --- tree
// Sum in pairs, then in pairs of pairs, and send the sum back the same way.
//   messages 2(k-1)   busiest ceil(log2 k) b   rounds 2 ceil(log2 k)
//
//   k = 4          1 -> 0 and 3 -> 2, then 2 -> 0      back: 0 -> 2, then 0 -> 1 and 2 -> 3
static void allreduce_tree(const PerDevice &grads) {
    const std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    int distance = 1; // between sender and receiver
    while (distance < k) {
        std::vector<Message> messages;
        std::vector<Tensor> sums; // sums[m]: the tensor to which the receiver of message m adds
        for (int receiver = 0; receiver + distance < k; receiver += 2 * distance) {
            const Tensor part = flat[receiver + distance], sum = flat[receiver];
            messages.push_back({part, empty(part.shape, sum.device)});
            sums.push_back(sum);
        }
        send(messages);
        for (size_t m = 0; m < messages.size(); m++) {
            add_(sums[m], messages[m].dst);
        }
        distance *= 2;
    }
    while (distance > 1) {
        distance /= 2;
        std::vector<Message> messages;
        for (int sender = 0; sender + distance < k; sender += 2 * distance) {
            messages.push_back({flat[sender], flat[sender + distance]});
        }
        send(messages);
    }
}

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
// Check it:
//   make exercise                        Is it right on 1 to 8 devices, and what does it cost?
//   make show GPUS=4                     Whose numbers are where, after each operation?
//   make race ALLREDUCE=yours GPUS=3     Does a device read numbers before they are written?
//   make run ALLREDUCE=yours GPUS=2      Does LeNet learn with it?
// Put kernels of your own above the function. relu_kernel in section 8 is the simplest to start
// from.
static void allreduce_yours(const PerDevice &grads) {
    const size_t k = grads.size(), P = grads[0].size();
    for (size_t i = 0; i < P; i++) {
        for (size_t c = 1; c < k; c++) {
            Tensor received = empty(grads[c][i].shape, grads[0][i].device);
            copyto(grads[c][i], received);
            add_(grads[0][i], received);
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
    {"naive", allreduce_naive},         {"bucket", allreduce_bucket},   {"host", allreduce_host},
    {"by_tensor", allreduce_by_tensor}, {"sharded", allreduce_sharded}, {"ring", allreduce_ring},
    {"tree", allreduce_tree},           {"yours", allreduce_yours},
};

// Return the entry of a table that an option names, or fail and list all names.
template <class Entry>
static const Entry &find_entry(const std::vector<Entry> &table, const char *option,
                               const std::string &name) {
    std::string names;
    for (const Entry &entry : table) {
        if (entry.name == name) return entry;
        names += (names.empty() ? "" : ", ") + std::string(entry.name);
    }
    error("%s=%s is unknown: choose one of %s", option, name.c_str(), names.c_str());
}

static const Algorithm &find_algorithm(const std::string &name) {
    return find_entry(algorithms, "ALLREDUCE", name);
}

// Sum the gradients with the algorithm of this name. Errors and the profiler show the name.
void run_allreduce(const std::string &name, const PerDevice &grads) {
    const Algorithm &algorithm = find_algorithm(name);
    const int k = grads.size();
    size_t n = 0;
    for (const Tensor &t : grads[0]) {
        n += size(t);
    }
    const ProfilerRange range("sum");
    nvtxMarkA(
        format("%s, k = %d, tensors: %zu, numbers: %zu", algorithm.name, k, grads[0].size(), n)
            .c_str());
    try {
        if (algorithm.supports && !algorithm.supports(k)) {
            error("it does not support this number of devices");
        }
        algorithm.run(grads);
    } catch (const std::exception &e) {
        error("%s, k = %d: %s", algorithm.name, k, e.what());
    }
}

// --- OVERLAP
// The chapter wants to exchange the first gradients while the rest are still being computed. The
// host is far ahead of the devices: when it calls exchange(), it has enqueued all of backward, but
// the devices have barely started it. So an allreduce on the communication streams that waits only
// for the gradients that it sums runs at the same time as the rest of backward:
//
//   compute streams         backward of W4 b4 W3 b3 | W2 b2 W1 b1 |                      | sgd
//   communication streams                           | sum of W3 ... b4 | sum of W1 ... b2 |
//
// backward() records an event after the write of each gradient; wait_for_gradient() waits for it.
static size_t bucket_bytes = 256 * 1024; // the least size of a bucket; the last may be smaller

// Divide the gradients into buckets and sum one after another, on the communication streams. The
// last layers come first, because backward computes them first.
void sum_in_buckets(const Exchange &sum, const PerDevice &grads) {
    use_comm_streams(true);
    size_t end = grads[0].size();
    while (end > 0) {
        size_t begin = end, bytes = 0;
        while (begin > 0 && bytes < bucket_bytes) {
            begin--;
            bytes += sizeof(float) * size(grads[0][begin]);
        }
        PerDevice bucket; // the gradients begin ... end-1 of each device
        for (const std::vector<Tensor> &tensors : grads) {
            bucket.push_back({tensors.begin() + begin, tensors.begin() + end});
        }
        for (const std::vector<Tensor> &tensors : bucket) {
            for (const Tensor &grad : tensors) {
                wait_for_gradient(grad);
            }
        }
        sum(bucket);
        end = begin;
    }
    use_comm_streams(false);
    join_comm_streams(grads.size()); // before sgd() reads the sums
}

// Return the function that train_batch() calls for ALLREDUCE and OVERLAP. It is null for naive
// without OVERLAP, because train_batch() contains that loop.
Exchange exchange_by(const std::string &name, bool overlap) {
    const Exchange sum = [=](const PerDevice &grads) { run_allreduce(name, grads); };
    if (overlap) return [=](const PerDevice &grads) { sum_in_buckets(sum, grads); };
    return name == "naive" ? nullptr : sum;
}
Exchange exchange;

// ---------------------------------------------------------------------------------------------
// 8. Kernels and operators
// These are the simplest kernels that are fast enough to train with, from ReLU to convolution. Each
// operator has its kernels first, then the function that launches them, forward and backward. To
// write one of your own, start with a copy of relu.
//
// A kernel, marked __global__, is a function that many threads of a device run at the same time.
// This launches one:
//
//     relu_kernel<<<blocks, threads, 0, stream>>>(y, X, n);
//
// The host enqueues it on the stream and goes on. When the kernel's turn comes, the device starts
// `blocks` blocks of `threads` threads each. (The 0 means no dynamic shared memory.) Each thread
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
constexpr bool on_cpu = true; // compiled by g++ with extras/cpu/cuda_runtime.h, the stand-in
#else
constexpr bool on_cpu = false;
#endif

constexpr int threads = 256; // in a block

// Return how many blocks it takes to have a thread for each of n elements. CUDA wants at least
// one block.
inline int blocks(long n, int threads_per_block = threads) {
    if (n > INT_MAX) error("a launch of %ld threads is too large: use a smaller BATCH", n);
    return n > 0 ? (n + threads_per_block - 1) / threads_per_block : 1;
}

// LAUNCH(relu_kernel<<<...>>>(...)) launches a kernel and checks whether that has failed.
#ifndef LAUNCH // a program that includes this file may define its own
#define LAUNCH(...)                                                                                \
    (__VA_ARGS__, check_cuda(cudaGetLastError(), "the kernel launch", __FILE__, __LINE__))
#endif

// --- functions of sections 9 and 10 that operators use

// Fail unless `right` is true and all inputs are on the same device. The error shows `expected`.
void check_inputs(const char *op, bool right, const char *expected,
                  const std::vector<Tensor> &inputs);

// Return y, the result of an operator, and record the operator's backward if an input wants a
// gradient. backward(dy) gets dy, the gradient of the loss with respect to y, and adds to the
// gradients of the inputs. It must add, because an input may be used by several operators. It
// captures its tensors by value, which keeps their memory allocated.
typedef std::function<void(const Tensor &dy)> Backward;
Tensor record(const char *op, Tensor y, const std::vector<Tensor> &inputs,
              const Backward &backward);

// Return the address of X's gradient, or null if X wants none. The first call in a backward pass
// zeroes the gradient, and allocates it if need be.
float *grad_of(const Tensor &X);

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
    return record("relu", y, {X}, [=](const Tensor &dy) {
        float *dX = grad_of(X);
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
    float *sum = a.ptr();
    const float *addend = b.ptr();
    LAUNCH(add_kernel<<<blocks(n), threads, 0, stream_of(a.device)>>>(sum, addend, n));
}

// --- sgd
// param[i] -= lr * grad[i] / batch_size. One thread per element.
__global__ void sgd_kernel(float *param, const float *grad, int n, float lr, float batch_size) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) param[i] -= lr * grad[i] / batch_size;
}

void sgd(const std::vector<Tensor> &params, float lr, int batch_size) {
    const ProfilerRange range("update");
    for (const Tensor &p : params) {
        if (!p.grad) continue; // a buffer, such as a running statistic, is not trained
        check_inputs("sgd", true, "parameters", {params[0], p});
        const int n = size(p);
        LAUNCH(sgd_kernel<<<blocks(n), threads, 0, stream_of(p.device)>>>(p.ptr(), p.grad->ptr(), n,
                                                                          lr, batch_size));
    }
}

// --- softmax cross-entropy
// Return the sum of exp(z[j] - largest) over j, and the largest z[j]. Subtracting it prevents
// overflow: the sum is between 1 and `classes`.
__device__ inline float exp_sum(const float *z, int classes, float *largest) {
    float sum = 0;
    *largest = z[0];
    for (int j = 1; j < classes; j++) {
        *largest = z[j] > *largest ? z[j] : *largest;
    }
    for (int j = 0; j < classes; j++) {
        sum += expf(z[j] - *largest);
    }
    return sum;
}

// l[n] = log(sum over j of exp(y_hat[n,j])) - y_hat[n,y[n]]
//   y_hat (N,classes)   y (N), class numbers   ->   l (N)
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
    const bool right = y_hat.shape.size() == 2 && y.shape == std::vector<int>{y_hat.shape[0]} &&
                       y_hat.shape[1] > 0;
    check_inputs("softmax_cross_entropy", right, "(N,classes), (N)", {y_hat, y});
    const int N = y_hat.shape[0], classes = y_hat.shape[1], block = 64;
    const Tensor l = empty({N}, y_hat.device);
    LAUNCH(cross_entropy_kernel<<<blocks(N, block), block, 0, stream_of(y_hat.device)>>>(
        l.ptr(), y_hat.ptr(), y.ptr(), N, classes));
    return record("softmax_cross_entropy", l, {y_hat}, [=](const Tensor &dl) {
        float *dy_hat = grad_of(y_hat);
        LAUNCH(
            cross_entropy_backward_kernel<<<blocks(N, block), block, 0, stream_of(y_hat.device)>>>(
                dy_hat, dl.ptr(), y_hat.ptr(), y.ptr(), N, classes));
    });
}

// --- average pooling
// A plane is one channel of one image. The P = N*C planes are pooled independently.
struct PoolShape {
    int P, H, W, OH, OW, K; // OH = H / K and OW = W / K, rounded down
};

// y[p,i,j] = mean over u,v of X[p,i*K+u,j*K+v]
//   X (P,H,W)   ->   y (P,OH,OW)
// One thread per element of y.
__global__ void avg_pool2d_kernel(float *y, const float *X, PoolShape s) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    const int j = index % s.OW, i = index / s.OW % s.OH, p = index / s.OW / s.OH;
    if (p >= s.P) return;
    float sum = 0;
    for (int u = 0; u < s.K; u++) {
        for (int v = 0; v < s.K; v++) {
            sum += X[(p * s.H + i * s.K + u) * s.W + j * s.K + v];
        }
    }
    y[index] = sum / (s.K * s.K);
}

// dX[p,h,w] += dy[p,h/K,w/K] / K^2
//   dy (P,OH,OW)   ->   dX (P,H,W)
// One thread per element of dX. Rows and columns that do not fill a window get no gradient.
__global__ void avg_pool2d_backward_kernel(float *dX, const float *dy, PoolShape s) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    const int w = index % s.W, h = index / s.W % s.H, p = index / s.W / s.H;
    const int j = w / s.K, i = h / s.K;
    if (p < s.P && i < s.OH && j < s.OW) {
        dX[index] += dy[(p * s.OH + i) * s.OW + j] / (s.K * s.K);
    }
}

// Return the sizes of a pooling of X, or fail. The windows must not overlap.
static PoolShape pool_shape(const char *op, const Tensor &X, int kernel_size, int stride) {
    const bool right = X.shape.size() == 4 && kernel_size > 0 && kernel_size == stride &&
                       X.shape[2] >= kernel_size && X.shape[3] >= kernel_size;
    check_inputs(op, right, "(N,C,H,W) with kernel_size = stride <= H and W", {X});
    const int H = X.shape[2], W = X.shape[3];
    return {X.shape[0] * X.shape[1], H, W, H / stride, W / stride, kernel_size};
}

// Same as F.avg_pool2d(X, kernel_size, stride), if the two are equal.
Tensor avg_pool2d(const Tensor &X, int kernel_size, int stride) {
    const PoolShape s = pool_shape("avg_pool2d", X, kernel_size, stride);
    const Tensor y = empty({X.shape[0], X.shape[1], s.OH, s.OW}, X.device);
    LAUNCH(avg_pool2d_kernel<<<blocks(size(y)), threads, 0, stream_of(X.device)>>>(y.ptr(), X.ptr(),
                                                                                   s));
    return record("avg_pool2d", y, {X}, [=](const Tensor &dy) {
        float *dX = grad_of(X);
        LAUNCH(avg_pool2d_backward_kernel<<<blocks(size(X)), threads, 0, stream_of(X.device)>>>(
            dX, dy.ptr(), s));
    });
}

// --- matrix product
// `count` matrices of `rows` x `columns` numbers, one after another in memory. Each is row-major,
// or column-major if `transposed`. (In this part, A, B, C, M, K and N are those of C = A @ B.)
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
// each number that is loaded from the device's memory is used in `tile` products instead of one. On
// emulated devices a thread computes two whole rows of the tile, because the compiler turns a loop
// over neighbouring columns into vector instructions.
constexpr int tile = 32;
constexpr int threads_x = on_cpu ? 1 : tile, threads_y = on_cpu ? tile / 2 : tile;
typedef float Tile[tile][tile + 1]; // + 1: no bank conflicts in shared memory

// Copy the tile of matrix n that begins at (row, column), clipped to the matrix. (The rest of the
// tile keeps old numbers. They get only into sums that no thread stores.) Threads that are
// neighbours in x read neighbours in memory.
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
//   A (count,M,K) or (1,M,K)   B (count,K,N) or (1,K,N)   ->   C (count,M,N)
// If there is only one A or only one B, all products use it. If C has fewer matrices than there are
// products, C[n] gets the sum of the products n, n + C.count, n + 2 * C.count, ...
__global__ void matmul_kernel(Matrix C, Matrix A, Matrix B) {
    __shared__ Tile A_tile, B_tile;
    const int x = threadIdx.x, y = threadIdx.y;
    const int row = blockIdx.y * tile, column = blockIdx.x * tile; // where the tile of C begins
    float sum[tile / threads_y][tile / threads_x] = {};            // one number on a GPU
    for (int n = blockIdx.z; n < max(A.count, B.count); n += C.count) {
        for (int k0 = 0; k0 < A.columns; k0 += tile) {
            load_tile(A_tile, A, n, row, k0);
            load_tile(B_tile, B, n, k0, column);
            __syncthreads(); // until all threads have copied their part
            const int terms = min(tile, A.columns - k0);
            for (int k = 0; k < terms; k++) {
                for (int i = 0; i < tile / threads_y; i++) {
                    for (int j = 0; j < tile / threads_x; j++) {
                        sum[i][j] += A_tile[y + i * threads_y][k] * B_tile[k][x + j * threads_x];
                    }
                }
            }
            __syncthreads(); // until all threads have used both tiles
        }
    }
    for (int i = 0; i < tile / threads_y; i++) {
        const int r = row + y + i * threads_y;
        float *to = C.data + (blockIdx.z * C.rows + r) * C.columns;
        for (int j = 0; j < tile / threads_x; j++) {
            const int c = column + x + j * threads_x;
            if (r < C.rows && c < C.columns) to[c] += sum[i][j];
        }
    }
}

static void matmul(Matrix C, Matrix A, Matrix B, Device device) {
    if (C.count == 0 || C.rows == 0) return; // an empty shard
    const dim3 grid(blocks(C.columns, tile), blocks(C.rows, tile), C.count);
    LAUNCH(matmul_kernel<<<grid, dim3(threads_x, threads_y), 0, stream_of(device)>>>(C, A, B));
}

// sum[i] += parts[0][i] + ... + parts[count-1][i], always in this order
//   parts (count,n)   ->   sum (n)
// One thread per element.
__global__ void sum_kernel(float *sum, const float *parts, int count, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float total = 0;
    for (int m = 0; m < count; m++) {
        total += parts[m * n + i];
    }
    sum[i] += total;
}

// Add the sum over n of A[n] @ B[n] to the matrix C. C has too few tiles to keep a GPU busy, so
// each block sums only some of the products, and a second kernel adds up these partial sums.
static void matmul_sum(Matrix C, Matrix A, Matrix B, Device device) {
    const int n = C.rows * C.columns, tiles = blocks(C.rows, tile) * blocks(C.columns, tile);
    const int count = std::min(A.count, blocks(2048, tiles));
    const Tensor parts = full({count, n}, 0, device);
    matmul({parts.ptr(), count, C.rows, C.columns}, A, B, device);
    LAUNCH(sum_kernel<<<blocks(n), threads, 0, stream_of(device)>>>(C.data, parts.ptr(), count, n));
}

// --- bias
// A tensor (N,C,...) as planes: `plane` is the product of the sizes after C.
struct Planes {
    int N, C, plane;
};
static Planes planes(const Tensor &y) {
    return {y.shape[0], y.shape[1], size(y) / std::max(1, y.shape[0] * y.shape[1])};
}

// Return to every thread of a block the sum of value(i) over the indices i of channel c. First each
// thread sums a part of them. Then the parts, in shared memory, are added pairwise, the upper half
// to the lower half, until one is left. This order is fixed, so every run gives the same bits.
// `scratch` has a float for each thread.
template <class Value>
__device__ inline float channel_sum(float *scratch, Planes s, int c, Value value) {
    float sum = 0;
    for (int m = threadIdx.x; m < s.N * s.plane; m += threads) {
        sum += value((m / s.plane * s.C + c) * s.plane + m % s.plane);
    }
    __syncthreads(); // until all threads have read the result of an earlier call
    scratch[threadIdx.x] = sum;
    __syncthreads();
    for (unsigned half = threads / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) scratch[threadIdx.x] += scratch[threadIdx.x + half];
        __syncthreads();
    }
    return scratch[0];
}

// y[n,o,p] = b[o]
//   b (O)   ->   y (N,O,plane)
// One thread per element.
__global__ void bias_kernel(float *y, const float *b, Planes s) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < s.N * s.C * s.plane) y[i] = b[i / s.plane % s.C];
}

// db[o] += sum over n,p of dy[n,o,p]
//   dy (N,O,plane)   ->   db (O)
// One block per channel o.
__global__ void bias_backward_kernel(float *db, const float *dy, Planes s) {
    __shared__ float scratch[threads];
    const float sum = channel_sum(scratch, s, blockIdx.x, [=](int i) { return dy[i]; });
    if (threadIdx.x == 0) db[blockIdx.x] += sum;
}

// Set y (N,O,...) to the bias b (O).
static void bias(const Tensor &y, const Tensor &b) {
    LAUNCH(bias_kernel<<<blocks(size(y)), threads, 0, stream_of(y.device)>>>(y.ptr(), b.ptr(),
                                                                             planes(y)));
}

// Add the sum of dy to the gradient of b, if b wants one.
static void bias_backward(const Tensor &b, const Tensor &dy) {
    if (float *db = grad_of(b)) {
        LAUNCH(bias_backward_kernel<<<size(b), threads, 0, stream_of(b.device)>>>(db, dy.ptr(),
                                                                                  planes(dy)));
    }
}

// --- dense layer
static void check_linear(const Tensor &X, const Tensor &W, const Tensor &b) {
    const bool right = X.shape.size() == 2 && W.shape.size() == 2 && W.shape[0] == X.shape[1] &&
                       b.shape == std::vector<int>{W.shape[1]} && size(W) > 0;
    check_inputs("linear", right, "(N,C), (C,O), (O) with C and O > 0", {X, W, b});
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
    return record("linear", y, {X, W, b}, [=](const Tensor &dy) {
        bias_backward(b, dy);
        if (float *dW = grad_of(W)) { // dW += X^T @ dy
            matmul({dW, 1, C, O}, transpose({X.ptr(), 1, N, C}), {dy.ptr(), 1, N, O}, device);
        }
        if (float *dX = grad_of(X)) { // dX += dy @ W^T
            matmul({dX, 1, N, C}, {dy.ptr(), 1, N, O}, transpose({W.ptr(), 1, C, O}), device);
        }
    });
}

// --- convolution
// y[n,o,i,j] = b[o] + sum over c,u,v of X[n,c,i+u,j+v] * W[o,c,u,v]
//   X (N,C,H,W)   W (O,C,K,K)   b (O)   ->   y (N,O,OH,OW) with OH = H-K+1, OW = W-K+1
// im2col turns this into a matrix product, y[n] = b + W @ columns[n]. Column p = (i,j) of
// columns[n] is the window of X that gives y[n,:,i,j]; row t = (c,u,v) is multiplied by W[:,c,u,v].
// There are P = OH*OW columns and T = C*K*K rows.
struct ConvShape {
    int N, C, H, W, O, K, OH, OW;
};

// columns[n,t,p] = X[n,c,i+u,j+v]
//   X (N,C,H,W)   ->   columns (N,T,P)
// One thread per (n,c,i,j). Threads with neighbouring j read and write neighbouring numbers.
__global__ void im2col_kernel(float *columns, const float *X, ConvShape s) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x, P = s.OH * s.OW;
    const int j = index % s.OW, i = index / s.OW % s.OH, c = index / P % s.C, n = index / P / s.C;
    if (n >= s.N) return;
    for (int u = 0; u < s.K; u++) {
        for (int v = 0; v < s.K; v++) {
            columns[(((n * s.C + c) * s.K + u) * s.K + v) * P + i * s.OW + j] =
                X[((n * s.C + c) * s.H + i + u) * s.W + j + v];
        }
    }
}

// dX[n,c,h,w] += sum of dcolumns[n,t,p] over i,j,u,v with i+u = h and j+v = w
//   dcolumns (N,T,P)   ->   dX (N,C,H,W)
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

// Return the columns (N,T,P) of X.
static Tensor im2col(const Tensor &X, const ConvShape &s) {
    const Tensor columns = empty({s.N, s.C * s.K * s.K, s.OH * s.OW}, X.device);
    const long windows = (long)s.N * s.C * s.OH * s.OW;
    LAUNCH(im2col_kernel<<<blocks(windows), threads, 0, stream_of(X.device)>>>(columns.ptr(),
                                                                               X.ptr(), s));
    return columns;
}

// Return the sizes of a convolution, or fail.
static ConvShape conv_shape(const Tensor &X, const Tensor &W, const Tensor &b) {
    const bool right = X.shape.size() == 4 && W.shape.size() == 4 && W.shape[1] == X.shape[1] &&
                       W.shape[2] == W.shape[3] && b.shape == std::vector<int>{W.shape[0]} &&
                       size(W) > 0 && X.shape[2] >= W.shape[2] && X.shape[3] >= W.shape[2];
    check_inputs("conv2d", right, "(N,C,H,W), (O,C,K,K), (O) with K <= H and W", {X, W, b});
    const int H = X.shape[2], width = X.shape[3], O = W.shape[0], K = W.shape[2];
    return {X.shape[0], X.shape[1], H, width, O, K, H - K + 1, width - K + 1};
}

// Same as F.conv2d(X, W, b), which is also a cross-correlation.
Tensor conv2d(const Tensor &X, const Tensor &W, const Tensor &b) {
    const ConvShape s = conv_shape(X, W, b);
    const int N = s.N, O = s.O, P = s.OH * s.OW, T = s.C * s.K * s.K;
    const Device device = X.device;
    const Tensor y = empty({N, O, s.OH, s.OW}, device);
    bias(y, b);                          // y[n] = b, then y[n] += W @ columns[n]
    const Tensor columns = im2col(X, s); // kept for dW
    matmul({y.ptr(), N, O, P}, {W.ptr(), 1, O, T}, {columns.ptr(), N, T, P}, device);
    return record("conv2d", y, {X, W, b}, [=](const Tensor &dy) {
        bias_backward(b, dy);
        if (float *dW = grad_of(W)) { // dW += sum over n of dy[n] @ columns[n]^T
            matmul_sum({dW, 1, O, T}, {dy.ptr(), N, O, P}, transpose({columns.ptr(), N, T, P}),
                       device);
        }
        if (float *dX = grad_of(X)) { // dcolumns[n] = W^T @ dy[n]
            const Tensor dcolumns = full({N, T, P}, 0, device);
            matmul({dcolumns.ptr(), N, T, P}, transpose({W.ptr(), 1, O, T}), {dy.ptr(), N, O, P},
                   device);
            LAUNCH(col2im_kernel<<<blocks(size(X)), threads, 0, stream_of(device)>>>(
                dX, dcolumns.ptr(), s));
        }
    });
}

// ---------------------------------------------------------------------------------------------
// 9. Autograd
// This section implements l.backward(). As in Karpathy's micrograd, every operator stores a
// function for its backward. Here these functions lie on a tape, one tape per device, and
// backward() calls them in reverse order, so that each dy is complete before it is read.

// An operator that has run, and the gradient of its result.
struct TapeEntry {
    const char *op;
    std::vector<Tensor> inputs;
    std::shared_ptr<Tensor> dy;
    Backward backward;
};
static auto &tapes = *new std::map<int, std::vector<TapeEntry>>; // by Device::id; never destroyed
static bool recording = true;

// While such an object exists, operators are not recorded, as under torch.no_grad().
struct NoGrad {
    bool before = recording;
    NoGrad() { recording = false; }
    ~NoGrad() { recording = before; }
};

// A CUDA event of one device: record it in a stream, and make another stream wait for it.
struct Event {
    cudaEvent_t handle = nullptr;
    explicit Event(Device device) {
        CUDA_CHECK(cudaSetDevice(physical(device)));
        CUDA_CHECK(cudaEventCreateWithFlags(&handle, cudaEventDisableTiming));
    }
    Event(const Event &) = delete;
    ~Event() { cudaEventDestroy(handle); }
};

void attach_grad(std::vector<Tensor> &params) {
    if (params.empty()) return;
    int n = 0;
    for (const Tensor &p : params) {
        n += p.requires_grad ? size(p) : 0;
    }
    const Tensor all = full({n}, 0, params[0].device);
    int begin = 0;
    for (Tensor &p : params) {
        if (!p.requires_grad) continue;
        const int end = begin + size(p);
        p.grad = std::make_shared<Tensor>(reshape(rows(all, begin, end), p.shape));
        p.grad->written = std::make_shared<Event>(p.device);
        begin = end;
    }
}

const Tensor &gradient(const Tensor &param) {
    if (!param.grad) error("a parameter has no gradient: does get_params call attach_grad?");
    return *param.grad;
}

PerDevice gradients(const PerDevice &device_params) {
    PerDevice grads(device_params.size());
    for (size_t c = 0; c < device_params.size(); c++) {
        for (const Tensor &p : device_params[c]) {
            if (p.requires_grad) grads[c].push_back(gradient(p));
        }
    }
    return grads;
}

std::vector<Tensor> column(const PerDevice &x, size_t i) {
    std::vector<Tensor> tensors;
    for (const std::vector<Tensor> &list : x) {
        tensors.push_back(list[i]);
    }
    return tensors;
}

void wait_for_gradient(const Tensor &grad) {
    CUDA_CHECK(cudaStreamWaitEvent(stream_of(grad.device), grad.written->handle, 0));
}

Tensor record(const char *op, Tensor y, const std::vector<Tensor> &inputs,
              const Backward &backward) {
    auto wants_grad = [](const Tensor &X) { return X.grad != nullptr; };
    if (recording && std::any_of(inputs.begin(), inputs.end(), wants_grad)) {
        if (!y.grad) y.grad = std::make_shared<Tensor>(Tensor{y.device, y.shape});
        y.grad->stale = true;
        tapes[y.device.id].push_back({op, inputs, y.grad, backward});
    }
    return y;
}

float *grad_of(const Tensor &X) {
    if (!X.grad) return nullptr;
    Tensor &g = *X.grad;
    if (!g.data) g.data = empty(g.shape, g.device).data;
    if (g.stale) fill(g, 0);
    g.stale = false;
    return g.ptr();
}

// Run the tape of l's device in reverse and empty it. Each entry is destroyed after it has run,
// which frees the tensors that it captured.
void backward(const Tensor &l) {
    std::vector<TapeEntry> &tape = tapes[l.device.id];
    auto made_l = [&](const TapeEntry &entry) { return entry.dy == l.grad; };
    if (!l.grad || std::none_of(tape.begin(), tape.end(), made_l)) {
        error("backward: %s has no record of how this tensor was computed (each backward pass "
              "erases the record)",
              str(l.device).c_str());
    }
    const ProfilerRange range("backward");
    for (const TapeEntry &entry : tape) {
        for (const Tensor &X : entry.inputs) {
            if (X.grad) X.grad->stale = true; // it has the numbers of the last minibatch
        }
    }
    grad_of(l);
    fill(*l.grad, 1); // the gradient of sum(l) with respect to l
    while (!tape.empty()) {
        const TapeEntry entry = std::move(tape.back());
        tape.pop_back();
        if (entry.dy->stale) continue; // l does not depend on it
        entry.backward(*entry.dy);
        for (const Tensor &X : entry.inputs) {
            if (X.grad && X.grad->written) {
                CUDA_CHECK(cudaEventRecord(X.grad->written->handle, stream_of(X.device)));
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------
// 10. Devices and memory
// k logical devices on the GPUs of this machine, their streams, and a caching allocator.

// --- errors

static std::string vformat(const char *format, va_list args) {
    char text[1000];
    vsnprintf(text, sizeof text, format, args);
    return text;
}

std::string format(const char *format, ...) {
    va_list args;
    va_start(args, format);
    std::string text = vformat(format, args);
    va_end(args);
    return text;
}

void error(const char *format, ...) {
    va_list args;
    va_start(args, format);
    std::string text = vformat(format, args);
    va_end(args);
    for (char &c : text) {
        if ((unsigned char)c < ' ') c = '?'; // the name of a file may hold a line break
    }
    throw std::runtime_error(text);
}

void check_cuda(cudaError_t code, const char *call, const char *file, int line) {
    if (code == cudaSuccess) return;
    const bool late = code == cudaErrorIllegalAddress || code == cudaErrorLaunchFailure;
    fflush(stdout);
    fprintf(stderr, "mgpu: %s:%d: %s: %s (%s)%s\n", file, line, call, cudaGetErrorString(code),
            cudaGetErrorName(code),
            late ? ": run with CUDA_LAUNCH_BLOCKING=1 to find the launch" : "");
    _exit(1); // no destructors: their CUDA calls would fail, too
}

std::string str(Device device) {
    return device.id < 0 ? "cpu" : "gpu(" + std::to_string(device.id) + ")";
}
static std::string str(int n) { return std::to_string(n); }
inline std::string str(const std::string &s) { return s; }

template <class T> static std::string listed(const std::vector<T> &list, const char *separator) {
    std::string text;
    for (const T &x : list) {
        text += (text.empty() ? "" : separator) + str(x);
    }
    return text;
}
std::string str(const std::vector<Device> &devices) { return "[" + listed(devices, ", ") + "]"; }
std::string str(const std::vector<int> &shape) { return "(" + listed(shape, ",") + ")"; }
static std::string str(const Tensor &X) { return str(X.shape); }

// --- devices

// A logical device. Several of them may share a GPU, each with its own memory and streams.
struct Gpu {
    int physical;                // CUDA's number for the GPU
    Stream streams[2];           // for computation; for communication, with OVERLAP
    std::map<int, Stream> links; // for messages from other devices, by Device::id
    std::map<std::pair<int, size_t>, std::vector<float *>> free_blocks; // see allocate()
};
static std::vector<Gpu> &gpus = *new std::vector<Gpu>; // never destroyed: tensors may outlive main
static int comm = 0;                                   // 1: work goes to the communication streams

// A hook for programs that include this file. It is called with a tensor before its memory is used,
// and with null before a stream of the device is used.
void (*on_use)(Device device, const Tensor *tensor) = nullptr;

float *Tensor::ptr() const {
    if (on_use && device.id >= 0) on_use(device, this);
    return data.get();
}

// Return the state of a device, or fail if there is no such device.
static Gpu &state(Device device) {
    if (device.id < 0) error("a tensor is on the host, but must be on a device: use copyto");
    if (device.id >= (int)gpus.size()) {
        error("there is no %s: the program runs on %zu devices", str(device).c_str(), gpus.size());
    }
    return gpus[device.id];
}

void check_inputs(const char *op, bool right, const char *expected,
                  const std::vector<Tensor> &inputs) {
    if (!right) error("%s: expected %s, got %s", op, expected, listed(inputs, ", ").c_str());
    for (const Tensor &X : inputs) {
        if (X.device.id < 0) error("%s: an input is on cpu, not on a device: use copyto", op);
        if (X.device.id != inputs[0].device.id) {
            error("%s: its inputs are on %s and %s, but must be on one device", op,
                  str(inputs[0].device).c_str(), str(X.device).c_str());
        }
    }
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
    for (int i = 0; i < k; i++) {
        devices.push_back(try_gpu(i));
    }
    return devices;
}

// --- streams

Stream &current_stream(Device device) {
    if (on_use) on_use(device, nullptr);
    return state(device).streams[comm];
}

cudaStream_t stream_of(Device device) {
    make_current(device);
    return current_stream(device).handle;
}

// Create a stream that does not synchronize with the default stream.
static Stream new_stream(Device device) {
    Stream s;
    make_current(device);
    CUDA_CHECK(cudaStreamCreateWithFlags(&s.handle, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreateWithFlags(&s.ready, cudaEventDisableTiming));
    return s;
}

// Return the stream for messages from src to dst, and create it on first use.
Stream &link_stream(Device src, Device dst) {
    Stream &s = state(dst).links[src.id];
    if (!s.handle) s = new_stream(dst);
    return s;
}

void use_comm_streams(bool use) {
    for (size_t c = 0; c < gpus.size(); c++) {
        current_stream(gpu(c)); // calls on_use before the stream changes
    }
    comm = use;
}

void join_comm_streams(int k) {
    for (int c = 0; c < k; c++) {
        wait_for(state(gpu(c)).streams[0], state(gpu(c)).streams[1]);
    }
}

void waitall() {
    for (size_t c = 0; c < gpus.size(); c++) {
        current_stream(gpu(c)); // calls on_use, which may enqueue more work
        for (const Stream &s : gpus[c].streams) {
            CUDA_CHECK(cudaStreamSynchronize(s.handle));
        }
    }
}

// --- peers

// Let device i access the memory of device j directly, if the hardware allows it. Return how they
// exchange data: "same GPU as", "peer", or "staged", that is, CUDA copies through the host.
static const char *connect(Device i, Device j) {
    int can_access = 0;
    if (physical(i) == physical(j)) return "same GPU as";
    CUDA_CHECK(cudaDeviceCanAccessPeer(&can_access, physical(i), physical(j)));
    if (!can_access || !options.peers) return "staged";
    make_current(i);
    const cudaError_t code = cudaDeviceEnablePeerAccess(physical(j), 0);
    cudaGetLastError();                                 // clear the error
    if (code == cudaErrorTooManyPeers) return "staged"; // the hardware has a limit
    if (code != cudaErrorPeerAccessAlreadyEnabled) CUDA_CHECK(code);
    return "peer";
}

// Create gpu(0) ... gpu(k-1), round-robin on this machine's GPUs from `first` on, and connect them.
// Unless `quiet`, print which GPU each is and how it exchanges data with the others.
void use_devices(int k, bool quiet = false, int first = 0) {
    int count = 0;
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); // hardware queues for the streams; default: 8
    const cudaError_t code = cudaGetDeviceCount(&count);
    if (code != cudaSuccess || count == 0) {
        error("no GPU (%s): `make run BACKEND=cpu` emulates devices", cudaGetErrorString(code));
    }
    for (int i = gpus.size(); i < k; i++) {
        gpus.emplace_back().physical = (first + i) % count;
        for (Stream &s : gpus[i].streams) {
            s = new_stream(gpu(i));
        }
    }
    if (k > count && !quiet) {
        printf("notice: %d logical devices share %d GPU%s, each with its own memory and streams\n",
               k, count, count > 1 ? "s" : "");
    }
    for (int i = 0; i < k; i++) {
        std::map<std::string, std::string> links; // "peer" -> " gpu(1) gpu(2)"
        for (int j = 0; j < k; j++) {
            if (j == i) continue;
            const char *how = connect(gpu(i), gpu(j));
            links[how] += " " + str(gpu(j));
        }
        if (quiet) continue;
        cudaDeviceProp properties;
        CUDA_CHECK(cudaGetDeviceProperties(&properties, physical(gpu(i))));
        printf("%s: %s", str(gpu(i)).c_str(), properties.name);
        for (const char *kind : {"same GPU as", "peer", "staged"}) {
            if (links.count(kind)) printf("; %s:%s", kind, links[kind].c_str());
        }
        printf("\n");
    }
}

// --- memory

// Give all unused blocks of the caching allocator back to CUDA.
void empty_cache() {
    waitall();
    for (Gpu &g : gpus) {
        for (auto &[key, free_blocks] : g.free_blocks) {
            for (float *block : free_blocks) {
                CUDA_CHECK(cudaFree(block));
            }
            free_blocks.clear();
        }
    }
}

static float *cuda_malloc(Device device, size_t bytes) {
    float *block = nullptr;
    for (bool again : {true, false}) {
        make_current(device);
        if (cudaMalloc((void **)&block, bytes) == cudaSuccess) return block;
        cudaGetLastError();       // clear the error
        if (again) empty_cache(); // there may be free blocks of other sizes
    }
    size_t free = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&free, &total));
    error("%s is out of memory: it needs %.1f MB more, and %.1f of its %.1f MB are free: use a "
          "smaller BATCH",
          str(device).c_str(), bytes / 1e6, free / 1e6, total / 1e6);
}

// Return memory for n floats. On a device, it comes from a caching allocator: cudaMalloc() and
// cudaFree() would make the host wait, so freed blocks are kept for the next tensor of their size,
// in one list per stream and size.
//
// A block may be reused while enqueued work still uses it. That is safe: the work of its new owner
// is enqueued later on the same stream, and copyto() and send() make that stream wait for every
// other stream that uses the block.
static std::shared_ptr<float> allocate(int n, Device device) {
    const size_t bytes = sizeof(float) * n;
    float *block = nullptr;
    if (n == 0) return nullptr;
    if (device.id < 0) { // pinned memory: a device copies from it while the host goes on
        const cudaError_t code = cudaMallocHost((void **)&block, bytes);
        if (code == cudaErrorMemoryAllocation) {
            error("the host cannot allocate %.1f MB of pinned memory", bytes / 1e6);
        }
        CUDA_CHECK(code);
        return std::shared_ptr<float>(block, [](float *p) {
            for (const Gpu &g : gpus) { // they may be copying right now
                for (const Stream &s : g.streams) {
                    cudaStreamSynchronize(s.handle);
                }
            }
            cudaFreeHost(p);
        });
    }
    const auto key = std::make_pair(comm, bytes);
    std::vector<float *> &free_blocks = state(device).free_blocks[key];
    if (free_blocks.empty()) free_blocks.push_back(cuda_malloc(device, bytes));
    block = free_blocks.back();
    free_blocks.pop_back();
    auto give_back = [=](float *p) { gpus[device.id].free_blocks[key].push_back(p); };
    return std::shared_ptr<float>(block, give_back);
}

// --- tensors

int size(const Tensor &t) {
    long n = 1;
    for (int s : t.shape) {
        n *= s;
        if (s < 0) error("%s has a negative size", str(t).c_str());
        if (n > INT_MAX) error("%s has too many elements: use a smaller BATCH", str(t).c_str());
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
    for (int i = 0; i < size(t); i++) {
        t.ptr()[i] = distribution(rng);
    }
    return t;
}

Tensor normal(float scale, std::vector<int> shape) {
    if (!(scale > 0)) error("normal: the scale must be greater than 0, not %g", scale);
    return random(shape, std::normal_distribution<float>(0, scale));
}

Tensor arange(int n) {
    Tensor t = empty({n}, cpu());
    std::iota(t.ptr(), t.ptr() + n, 0.0f);
    return t;
}

std::vector<float> to_host(const Tensor &t) {
    const Tensor host = copyto(t, cpu());
    return std::vector<float>(host.ptr(), host.ptr() + size(t));
}

// One size may be -1: it is computed from the others. For an empty shard, whose first size is 0, it
// is the product of X's sizes after the first.
Tensor reshape(const Tensor &X, std::vector<int> shape) {
    int known = 1; // the product of the other sizes
    for (int s : shape) {
        if (s >= 0) known *= s;
    }
    int row = 1;
    for (size_t axis = 1; axis < X.shape.size(); axis++) {
        row *= X.shape[axis];
    }
    Tensor y = X;
    y.shape = std::move(shape);
    for (int &s : y.shape) {
        if (s < 0) s = known ? size(X) / known : row;
    }
    if (size(y) != size(X)) {
        error("reshape: %s and %s have different numbers of elements", str(y).c_str(),
              str(X).c_str());
    }
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
// 11. Data and files
// The parts that the chapter takes from d2l: the data set, the accuracy, the stopwatch, the plot.
// Then the files SAVE and INIT.

// --- printing

// Return a number with the fewest digits that identify the float, at most 8 after the point.
static std::string shortest(float x) {
    char text[64];
    for (int digits = 0; digits <= 8; digits++) {
        snprintf(text, sizeof text, digits || !std::isfinite(x) ? "%.*f" : "%.*f.", digits, x);
        if (strtof(text, nullptr) == x || std::isnan(x)) break;
    }
    return text;
}

// Return the next texts, as many as shape[axis:] has numbers, with brackets around each row.
static std::string bracketed(const std::vector<int> &shape, size_t axis, const std::string *&next) {
    if (axis == shape.size()) return *next++;
    const size_t inner = shape.size() - axis - 1; // axes within a row
    const std::string between = inner ? std::string(inner, '\n') + std::string(axis + 1, ' ') : " ";
    std::string all;
    for (int i = 0; i < shape[axis]; i++) {
        all += (i > 0 ? between : "") + bracketed(shape, axis + 1, next);
    }
    return "[" + all + "]";
}

// Write the numbers as NumPy prints those near 1, with aligned decimal points.
std::string to_string(const Tensor &t) {
    auto point = [](const std::string &text) { return std::min(text.find('.'), text.size()); };
    std::vector<std::string> texts;
    size_t before = 0, after = 0; // the longest part before and after the point
    for (float x : to_host(t)) {
        const std::string text = shortest(x);
        before = std::max(before, point(text));
        after = std::max(after, text.size() - point(text));
        texts.push_back(text);
    }
    for (std::string &text : texts) {
        text.insert(0, before - point(text), ' ');
        text.resize(before + after, ' ');
    }
    const std::string *next = texts.data();
    const std::string all = texts.empty() ? "[]" : bracketed(t.shape, 0, next);
    return all + (t.device.id < 0 ? "" : " @" + str(t.device));
}

// --- data

// The training set or the test set as stored in its files: one byte per pixel, one per label.
struct DataSet {
    int count = 0;
    std::vector<uint8_t> images, labels;
};
static DataSet train_set, test_set; // read before anything starts

// Read a file in the IDX format of http://yann.lecun.com/exdb/mnist. It begins with the bytes 0, 0,
// 8 (the code for bytes) and the number of dimensions. Then come the dimensions' sizes, big-endian
// in 4 bytes each, and one byte for each number. `dims` is 1 for labels, 3 for images. Return the
// bytes of all samples.
std::vector<uint8_t> load_idx(const std::string &path, int dims) {
    const char *const name = path.c_str(), *const kind = dims == 3 ? "images" : "labels";
    std::error_code code;
    const size_t length = std::filesystem::file_size(path, code);
    if (code) error("cannot read %s: %s", name, code.message().c_str());
    std::vector<uint8_t> bytes(length);
    std::ifstream file(path, std::ios::binary);
    if (!file.read((char *)bytes.data(), length)) {
        error("cannot read %s: %s", name, strerror(errno));
    }
    auto number = [&](size_t at) { // in the four bytes from `at` on
        return (uint32_t)bytes[at] << 24 | bytes[at + 1] << 16 | bytes[at + 2] << 8 | bytes[at + 3];
    };
    const size_t header = 4 + 4 * dims, sample = dims == 3 ? 28 * 28 : 1;
    if (length < header || number(0) != 0x800u + dims) {
        error("%s is not an IDX file of %s (is it still compressed?)", name, kind);
    }
    if (dims == 3 && (number(8) != 28 || number(12) != 28)) {
        error("%s has images of %ux%u pixels, not 28x28", name, number(8), number(12));
    }
    const size_t count = number(4), expected = header + count * sample;
    if (count == 0 || length != expected) {
        error("%s is damaged: %zu %s take %zu bytes, but it has %zu", name, count, kind, expected,
              length);
    }
    return {bytes.begin() + header, bytes.end()};
}

// Return the path of a data file: in the folder, or below build/, where make unpacks archives.
static std::string data_path(const std::string &folder, const std::string &name) {
    const std::string path = folder + "/" + name, unpacked = "build/" + path;
    if (access(path.c_str(), F_OK) == 0) return path;
    if (access(unpacked.c_str(), F_OK) == 0) return unpacked;
    error("%s: %s: `make data DATA=%s` %s", path.c_str(), strerror(errno), folder.c_str(),
          folder == "data" ? "fetches it" : "unpacks an archive of it");
}

// Load the training set (`which` is train) or the test set (t10k).
DataSet load_data(const std::string &folder, const std::string &which) {
    DataSet set;
    const std::string images_path = data_path(folder, which + "-images-idx3-ubyte");
    const std::string labels_path = data_path(folder, which + "-labels-idx1-ubyte");
    set.images = load_idx(images_path, 3);
    set.labels = load_idx(labels_path, 1);
    set.count = set.labels.size();
    const int images = set.images.size() / (28 * 28);
    if (images != set.count) {
        error("%s has %d labels, but %s has %d images", labels_path.c_str(), set.count,
              images_path.c_str(), images);
    }
    for (int label : set.labels) {
        if (label > 9) error("%s: label %d is not from 0 to 9", labels_path.c_str(), label);
    }
    if (options.limit) set.count = std::min(set.count, options.limit);
    return set;
}

// Return an iterator over a set. It gives at most `steps_left` minibatches.
static DataIter make_iter(const DataSet &set, int batch_size, bool shuffle,
                          int steps_left = INT_MAX) {
    const int n = set.count;
    std::vector<int> order(n);
    std::iota(order.begin(), order.end(), 0);
    const Tensor X = empty({n, 1, 28, 28}, cpu()), y = empty({n}, cpu());
    return {&set, batch_size, shuffle, order, X, y, steps_left};
}

std::pair<DataIter, DataIter> load_data_fashion_mnist(int batch_size) {
    const int steps = options.steps ? options.steps : INT_MAX;
    return {make_iter(train_set, batch_size, options.shuffle, steps),
            make_iter(test_set, batch_size, false)};
}

int DataIter::steps() const { return (set->count + batch_size - 1) / batch_size; }

// Convert the samples to floats. The last minibatch of an epoch may be smaller.
std::pair<Tensor, Tensor> DataIter::minibatch(int begin) {
    const int end = std::min(begin + batch_size, set->count);
    for (int i = begin; i < end; i++) {
        const uint8_t *image = &set->images[(size_t)order[i] * 28 * 28];
        float *x = X.ptr() + (size_t)i * 28 * 28;
        for (int p = 0; p < 28 * 28; p++) {
            x[p] = image[p] / 255.0f;
        }
        y.ptr()[i] = set->labels[order[i]];
    }
    return {rows(X, begin, end), rows(y, begin, end)};
}

std::vector<std::pair<Tensor, Tensor>> DataIter::epoch() {
    if (shuffle) std::shuffle(order.begin(), order.end(), rng);
    std::vector<std::pair<Tensor, Tensor>> minibatches;
    for (int begin = 0; begin < set->count && steps_left > 0; begin += batch_size) {
        minibatches.push_back(minibatch(begin));
        steps_left--;
    }
    return minibatches;
}

int number_of_epochs(const DataIter &train_iter) {
    const int most = (train_iter.steps_left - 1) / train_iter.steps() + 1;
    return std::min(options.epochs, most);
}

// --- accuracy

// Count the rows of y_hat (N,classes) whose argmax is the label, y (N).
static int count_correct(const Tensor &y_hat, const Tensor &y) {
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

// Return the time in seconds.
static double now() {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::duration<double>(1);
}

void Timer::start() { started = now(); }

void Timer::stop() { times.push_back(now() - started); }

double Timer::avg() const {
    return std::accumulate(times.begin(), times.end(), 0.0) / std::max<size_t>(1, times.size());
}

// Make the folder of a file. If that fails, so will opening the file.
static void make_folder(const std::string &path) {
    std::error_code ignored;
    std::filesystem::create_directories(std::filesystem::path(path).parent_path(), ignored);
}

Animator::Animator(int steps) : steps(steps), began(now()) {
    make_folder(options.log);
    log.open(options.log);
    log << "epoch,loss,test_acc,seconds,model,gpus,allreduce,lr\n";
    if (!log.flush()) error("cannot write %s: %s", options.log.c_str(), strerror(errno));
}

// On a terminal, draw a bar, at most ten times a second:
//   123/235 [===============               ]  loss 0.7345  4321 images/s  26 s left
void Animator::add_losses(const std::vector<Tensor> &ls) {
    losses.push_back(ls);
    const int step = done + losses.size();
    if (!isatty(STDOUT_FILENO) || (step < steps && now() - drawn < 0.1)) return;
    count();
    drawn = now();
    const double seconds = drawn - began;
    printf("\r%5d/%d [%-30s]  loss %.4f  %.0f images/s  %.0f s left\033[K", done, steps,
           std::string(30L * done / steps, '=').c_str(), loss / samples, samples / seconds,
           std::ceil(seconds / done * (steps - done)));
    fflush(stdout);
}

void Animator::count() {
    for (const std::vector<Tensor> &ls : losses) {
        done++;
        for (const Tensor &l : ls) {
            for (float x : to_host(l)) {
                loss += x;
            }
            samples += size(l);
        }
        if (!std::isfinite(loss)) {
            error("the loss is %f in step %d of epoch %zu: use a smaller LR than %g", loss, done,
                  Y.size() + 1, options.lr);
        }
    }
    losses.clear();
}

void Animator::clear_bar() {
    count();
    if (isatty(STDOUT_FILENO)) printf("\r\033[K");
}

void Animator::add(int epoch, float acc, double seconds) {
    clear_bar();
    if (epoch == 1) printf("epoch      loss  test acc   seconds\n");
    printf("%5d  %8.4f  %8.4f  %8.2f\n", epoch, loss / samples, acc, seconds);
    end_epoch(epoch, acc, seconds);
}

void Animator::end_epoch(int epoch, float acc, double seconds) {
    log << format("%d,%.6f,%.4f,%.4f,%s,%d,%s,%g\n", epoch, loss / samples, acc, seconds,
                  options.model.c_str(), options.gpus, options.allreduce.c_str(), options.lr);
    if (!log.flush()) error("cannot write %s: %s", options.log.c_str(), strerror(errno));
    Y.push_back(acc);
    done = samples = 0;
    loss = 0;
    began = now();
}

// --- SAVE and INIT
// A file has all parameters, in the format of https://github.com/huggingface/safetensors: the
// length of the header (8 bytes, little-endian), the header in JSON, and the numbers of all
// tensors. data_offsets [begin, end) says which bytes of these numbers belong to a tensor:
//   {"W1":{"dtype":"F32","shape":[20,1,3,3],"data_offsets":[0,720]},"W2":{...},...}

// Write a new file completely, then rename it over the old one, so that a good file is never lost.
void write_file(const std::string &path, const std::string &bytes) {
    const std::string part = path + format(".%d.part", getpid());
    make_folder(path);
    FILE *file = fopen(part.c_str(), "wb");
    bool written = file && fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size() &&
                   fflush(file) == 0 && fsync(fileno(file)) == 0;
    if (file) written = fclose(file) == 0 && written;
    if (written && rename(part.c_str(), path.c_str()) == 0) return;
    const int reason = errno;
    remove(part.c_str());
    error("cannot write %s: %s", path.c_str(), strerror(reason));
}

// Write the parameters to a file. The header names them in alphabetical order.
void save_safetensors(const std::string &path, const std::vector<Tensor> &params) {
    std::map<std::string, Tensor> by_name;
    for (size_t i = 0; i < params.size(); i++) {
        by_name[param_names[i]] = params[i];
    }
    std::string header, numbers;
    for (const auto &[name, t] : by_name) {
        const size_t begin = numbers.size();
        numbers.append((const char *)to_host(t).data(), sizeof(float) * size(t));
        header += format("%s\"%s\":{\"dtype\":\"F32\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
                         begin ? "," : "{", name.c_str(), listed(t.shape, ",").c_str(), begin,
                         numbers.size());
    }
    header += "}";
    header.resize((header.size() + 7) / 8 * 8, ' '); // so that the numbers are aligned
    const uint64_t length = header.size();
    write_file(path, std::string((const char *)&length, 8) + header + numbers);
}

// Return the text between `begin` and the next `end`, or nothing if `begin` is not there.
static std::string between(const std::string &text, const std::string &begin, char end) {
    const size_t at = text.find(begin), from = at + begin.size();
    return at == std::string::npos ? "" : text.substr(from, text.find(end, from) - from);
}

// Load each parameter by its name into `params`, on the host. Spaces and key order may vary. JSON
// writes a quote inside a string as \", so a search finds "W1":{ only where an entry begins.
void load_safetensors(const std::string &path, const std::vector<Tensor> &params) {
    std::ifstream file(path, std::ios::binary);
    if (!file) error("cannot read %s: %s", path.c_str(), strerror(errno));
    uint64_t length = 0;
    file.read((char *)&length, 8);
    std::string header(file && length < 100'000'000 ? length : 0, ' ');
    if (header.empty() || !file.read(&header[0], length) || header[0] != '{') {
        error("%s is not a .safetensors file", path.c_str());
    }
    header.erase(std::remove_if(header.begin(), header.end(), isspace), header.end());

    std::string names; // of the tensors in the file
    for (size_t at = 1; (at = header.find("\":{\"", at)) != std::string::npos; at++) {
        const std::string name = header.substr(0, at).substr(header.rfind('"', at - 1) + 1);
        if (name != "__metadata__") names += (names.empty() ? "" : ", ") + name;
    }
    for (size_t i = 0; i < params.size(); i++) {
        const std::string where = path + ": " + param_names[i];
        const std::string entry = between(header, "\"" + param_names[i] + "\":{", '}');
        if (entry.empty()) {
            error("%s is missing: %s needs %.300s. The file has %.500s", where.c_str(),
                  options.model.c_str(), listed(param_names, ", ").c_str(), names.c_str());
        }
        const std::string type =
            between(entry, "\"dtype\":\"", '"') + " [" + between(entry, "\"shape\":[", ']') + "]";
        const std::string expected = "F32 [" + listed(params[i].shape, ",") + "]";
        if (type != expected) {
            error("%s is %s, but %s needs %s", where.c_str(), type.c_str(), options.model.c_str(),
                  expected.c_str());
        }
        const std::string offsets = between(entry, "\"data_offsets\":[", ']');
        const size_t bytes = sizeof(float) * size(params[i]);
        size_t begin = 0, end = 0;
        sscanf(offsets.c_str(), "%zu,%zu", &begin, &end);
        file.seekg(8 + length + begin);
        if (end - begin != bytes || !file.read((char *)params[i].ptr(), bytes)) {
            error("%s: its %zu bytes are not at data_offsets [%s]", where.c_str(), bytes,
                  offsets.c_str());
        }
    }
}

// Write the parameters to the file SAVE, if there is one.
void save_params(const std::vector<Tensor> &params) {
    if (!options.save.empty()) save_safetensors(options.save, params);
}

// ---------------------------------------------------------------------------------------------
// 12. Checks
// These functions check the chapter's promise: k devices compute the same gradient as one, and the
// copies of the parameters stay equal. If a check fails, `make check` looks for the cause.

float first_check_tolerance = 1e-3f; // largest error, in gradient_in_shards()'s units
static const char *const check_hint = ": `make check` looks for the cause";
static const char *const skip_hint = "; if this is intended, use FIRST_CHECK=0";

// The numbers of all parameters that are trained, one after another
typedef std::vector<float> Flat;

static Flat all_to_host(const std::vector<Tensor> &tensors) {
    Flat all;
    for (const Tensor &t : tensors) {
        if (!t.requires_grad) continue;
        const std::vector<float> numbers = to_host(t);
        all.insert(all.end(), numbers.begin(), numbers.end());
    }
    return all;
}

// Return the name of number j of a Flat, such as W1[7].
static std::string name_of(int j) {
    size_t i = 0;
    while (!params[i].requires_grad || j >= size(params[i])) {
        if (params[i].requires_grad) j -= size(params[i]);
        i++;
    }
    return param_names[i] + "[" + std::to_string(j) + "]";
}

// Return the gradient for a minibatch, computed on gpu(0).
static Flat gradient_on_one(const Tensor &X, const Tensor &y) {
    const PerDevice one = {get_params(params, gpu(0))};
    backward(loss(net(copyto(X, gpu(0)), one[0]), copyto(y, gpu(0))));
    return all_to_host(gradients(one)[0]);
}

// Divide a minibatch into k shards and return the sum of their gradients, all computed on gpu(0).
// Also return a unit for each number's error: the largest sum of |gradient| over the shards in its
// parameter.
static std::pair<Flat, Flat> gradient_in_shards(const Tensor &X, const Tensor &y, int k) {
    Flat sum(all_to_host(params).size()), unit(sum.size());
    int begin = 0;
    for (int n : shard_sizes(X.shape[0], k)) {
        const Flat part = gradient_on_one(rows(X, begin, begin + n), rows(y, begin, begin + n));
        for (size_t j = 0; j < part.size(); j++) {
            sum[j] += part[j];
            unit[j] += std::fabs(part[j]);
        }
        begin += n;
    }
    auto first = unit.begin();
    for (const Tensor &p : params) {
        if (!p.requires_grad) continue;
        const float largest = *std::max_element(first, first + size(p));
        first = std::fill_n(first, size(p), largest);
    }
    return {sum, unit};
}

// Check a step that k devices have taken from `params` on the minibatch X, y: `ls` are its losses,
// `device_params` its result. Each device must have the gradient that gpu(0) computes for the whole
// minibatch, and must have subtracted lr * gradient / n. (With batch norm the result for a sample
// depends on its shard, so gpu(0) takes the shards one by one.)
void check_first_step(const Tensor &X, const Tensor &y, const std::vector<Tensor> &ls,
                      const PerDevice &device_params, float lr) {
    const int n = X.shape[0], k = device_params.size();
    int losses = 0;
    for (const Tensor &l : ls) {
        losses += size(l);
        for (float x : to_host(l)) {
            if (!std::isfinite(x)) {
                error("the first minibatch: a loss on %s is not finite, before any update%s",
                      str(l.device).c_str(), check_hint);
            }
        }
    }
    if (losses != n) {
        error("the first minibatch has %d samples, but the devices' shards have %d in total%s", n,
              losses, check_hint);
    }
    auto is_buffer = [](const Tensor &p) { return !p.requires_grad; }; // batch norm has some
    const bool buffers = std::any_of(params.begin(), params.end(), is_buffer);
    const auto [expected, unit] = gradient_in_shards(X, y, buffers ? k : 1);
    const Flat old = all_to_host(params);
    float largest = 0; // difference of the gradients, in units
    for (int c = 0; c < k; c++) {
        const Flat grad = all_to_host(gradients(device_params)[c]);
        const Flat param = all_to_host(device_params[c]);
        for (size_t j = 0; j < grad.size(); j++) {
            const float off = std::fabs(grad[j] - expected[j]);
            if (!(off <= first_check_tolerance * unit[j])) {
                error("the first minibatch: the gradient of %s on %s is %.6g, not %.6g%s%s",
                      name_of(j).c_str(), str(gpu(c)).c_str(), grad[j], expected[j], check_hint,
                      skip_hint);
            }
            if (off > 0) largest = std::max(largest, off / unit[j]);
            const float update = old[j] - param[j], right = lr * grad[j] / n;
            const float rounding = 1e-5f * std::fabs(right) + 1e-6f * std::fabs(old[j]) + 1e-37f;
            if (!(std::fabs(update - right) <= rounding)) {
                error("the first minibatch: the update of %s on %s is %.6g, not %.6g%s%s",
                      name_of(j).c_str(), str(gpu(c)).c_str(), update, right, check_hint,
                      skip_hint);
            }
        }
    }
    if (k == 1) {
        printf("first minibatch: the update is right\n");
        return;
    }
    printf("first minibatch: %d devices agree with one%s (largest difference %.0e)\n", k,
           buffers ? ", shard by shard" : "", largest);
    empty_cache(); // give back the memory in which gpu(0) computed the whole minibatch
}

// Take a trial step on the first samples of the file, with its own copies of the parameters, and
// check it.
void check_first_minibatch(DataIter &train_iter, const std::vector<Device> &devices, float lr) {
    if (!options.first_check) return;
    const PerDevice device_params = replicate(devices);
    const auto [X, y] = train_iter.minibatch(0);
    const std::vector<Tensor> ls = train_batch(X, y, device_params, devices, lr);
    check_first_step(X, y, ls, device_params, lr);
}

// Fail unless the trained parameters are bitwise identical on all devices.
void check_replicas(const PerDevice &device_params) {
    if (!options.replica_check) return;
    const Flat first = all_to_host(device_params[0]);
    for (size_t c = 1; c < device_params.size(); c++) {
        const Flat other = all_to_host(device_params[c]);
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
// Other programs may include this file, as its tests do. They may define MGPU_NO_MAIN and LAUNCH
// before the #include, set on_use and exchange, and add to models, algorithms and option_table.

Options options;

// A network that MODEL can choose.
struct Model {
    const char *name;
    void (*init_params)(); // sets `params` and `param_names`
    Net net;
    void (*demos)(int num_gpus); // the examples of its chapter
    void (*train)(int num_gpus, int batch_size, float lr);
    void (*set_defaults)() = nullptr; // sets options that are not given; null: as lenet's are
};
static std::vector<Model> models = {{"lenet", init_params, lenet, demos, train}};

static const Model &find_model() { return find_entry(models, "MODEL", options.model); }

// Select the network that MODEL names and initialize its parameters, on the host. The same SEED
// gives the same parameters.
void init_model() {
    net = find_model().net;
    find_model().init_params();
}

// --- options

typedef std::function<void(const std::string &value)> Setter; // fails if the value is wrong

struct Option {
    const char *name;
    std::variant<bool *, int *, float *, std::string *, Setter> field; // where the value goes
    const char *help;                                                  // ends with (its default)
    double least = 0, most = 1e9;                                      // of a number
    bool given = false;                                                // on the command line
};

// Set options.split to whole numbers, such as 3,1.
static void set_split(const std::string &value) {
    options.split.clear();
    std::istringstream list(value);
    for (std::string part; std::getline(list, part, ',');) {
        char *end;
        const long weight = strtol(part.c_str(), &end, 10);
        if (*end || weight < 1 || weight > 1000) {
            error("SPLIT=%s: expected whole numbers from 1 to 1000, such as 3,1", value.c_str());
        }
        options.split.push_back(weight);
    }
}

// `make help` reads these lines, one for each option.
static std::vector<Option> option_table = {
    {"GPUS", &options.gpus, "number of devices, which may share GPUs (1)", 1, 64},
    {"MODEL", &options.model, "network to train (lenet)"},
    {"BATCH", &options.batch, "samples per minibatch, over all devices (256)", 1, 60000},
    {"LR", &options.lr, "learning rate (0.2)", 1e-30, 1e30},
    {"EPOCHS", &options.epochs, "passes over the training set (10)", 1},
    {"SPLIT", set_split, "relative sizes of the shards, such as 3,1 (equal)"},
    {"ALLREDUCE", &options.allreduce, "algorithm that sums the gradients, see section 7 (naive)"},
    {"OVERLAP", &options.overlap, "1: exchange gradients while backward is still computing (0)"},
    {"FIRST_CHECK", &options.first_check, "0: do not compare a step with that of one device (1)"},
    {"REPLICA_CHECK", &options.replica_check, "0: do not compare replicas; sets FIRST_CHECK=0 (1)"},
    {"PEERS", &options.peers, "0: copies between devices go through the host (1)"},
    {"STEPS", &options.steps, "train on at most this many minibatches (0: no limit)"},
    {"LIMIT", &options.limit, "use only the first LIMIT training and test samples (0: all)"},
    {"SEED", &options.seed, "seed of the parameters and of the shuffling (0)"},
    {"SHUFFLE", &options.shuffle, "0: keep the samples in the order of the file (1)"},
    {"DATA", &options.data, "folder with the four files of (Fashion-)MNIST (data)"},
    {"INIT", &options.init, "start from the parameters in this .safetensors file"},
    {"SAVE", &options.save, "write the parameters to this file after each epoch"},
    {"LOG", &options.log, "file with a row for each epoch (build/log.csv)"},
};

static Option *find_option(const std::string &name) {
    for (Option &option : option_table) {
        if (option.name == name) return &option;
    }
    return nullptr;
}

// Return whether the option is on the command line.
bool given(const std::string &name) { return find_option(name) && find_option(name)->given; }

// Put a value where the option belongs, or fail.
static void set_option(Option &option, const std::string &value) {
    const std::string word = std::string(option.name) + "=" + value;
    if (auto *setter = std::get_if<Setter>(&option.field)) {
        (*setter)(value);
    } else if (auto *text = std::get_if<std::string *>(&option.field)) {
        **text = value;
    } else if (auto *flag = std::get_if<bool *>(&option.field)) {
        if (value != "0" && value != "1") error("%s: expected 0 or 1", word.c_str());
        **flag = value == "1";
    } else {
        auto *whole = std::get_if<int *>(&option.field);
        char *end;
        const double x = strtod(value.c_str(), &end);
        if (*end || !(x >= option.least && x <= option.most) || (whole && x != (int)x)) {
            error("%s: expected a %s from %g to %g", word.c_str(),
                  whole ? "whole number" : "number", option.least, option.most);
        }
        if (whole) {
            **whole = x;
        } else {
            *std::get<float *>(option.field) = x;
        }
    }
}

// Count the letters that two words do not have in common.
static size_t differing_letters(std::string a, std::string b) {
    std::string differing;
    std::sort(a.begin(), a.end());
    std::sort(b.begin(), b.end());
    std::set_symmetric_difference(a.begin(), a.end(), b.begin(), b.end(),
                                  std::back_inserter(differing));
    return differing.size();
}

// Refuse a word that is not an option, such as GPU=2 or --batch-size=64. Suggest the option whose
// name has nearly the same letters.
[[noreturn]] static void refuse_word(const std::string &word) {
    const size_t equals = word.find('=');
    std::string name; // GPUS for --gpus=2
    for (char c : word.substr(0, equals)) {
        if (isalpha(c)) name += toupper(c);
    }
    const char *similar = nullptr;
    size_t least = 2 + name.size() / 3; // a name with this many other letters is not similar
    for (const Option &option : option_table) {
        const size_t differing = differing_letters(name, option.name);
        if (differing < least) {
            least = differing;
            similar = option.name;
        }
    }
    if (!similar) {
        error("%s is not an option: options have the form NAME=value, see `make help`",
              word.c_str());
    }
    error("%s is not an option: did you mean %s%s?", word.c_str(), similar,
          equals == std::string::npos ? "=value" : word.substr(equals).c_str());
}

// Set options that are not on the command line to the chapter's values. Refuse options that do not
// go together.
static void complete_options() {
    const int k = options.gpus, parts = options.split.size();
    if (find_model().set_defaults) find_model().set_defaults();
    if (!options.batch) options.batch = 256;
    if (!options.lr) options.lr = 0.2f;
    if (!options.epochs) options.epochs = 10;
    if (options.allreduce.empty()) options.allreduce = "naive";
    find_algorithm(options.allreduce);
    options.first_check = options.first_check && options.replica_check;
    if (parts > 0 && parts != k) {
        error("SPLIT has %d parts, but there are %d devices: use GPUS=%d", parts, k, parts);
    }
    if (options.batch < k) {
        error("batch %d cannot be split over %d devices: use BATCH >= %d", options.batch, k, k);
    }
}

// Read the command line into `options`. Return false if it asks for help, which is then printed.
bool parse_options(int argc, char **argv) {
    for (Option &option : option_table) {
        option.given = false;
    }
    for (int i = 1; i < argc; i++) {
        const std::string word = argv[i], name = word.substr(0, word.find('='));
        if (word == "help" || word == "--help" || word == "-h") {
            printf("Options have the form NAME=value, such as GPUS=2 (defaults in parentheses):\n");
            for (const Option &option : option_table) {
                printf("  %-14s %s\n", option.name, option.help);
            }
            return false;
        }
        Option *const option = find_option(name);
        if (!option) refuse_word(word);
        if (name.size() + 1 >= word.size()) {
            error("%s has no value: write %s=value", name.c_str(), name.c_str());
        }
        if (option->given) error("%s is given twice", name.c_str());
        option->given = true;
        set_option(*option, word.substr(name.size() + 1));
    }
    complete_options();
    return true;
}

// --- main

// Fail now, and not after an epoch, if SAVE cannot be written.
static void check_can_save() {
    if (options.save.empty()) return;
    if (access((options.save + "/.").c_str(), F_OK) == 0) {
        error("SAVE=%s is a folder, not a file", options.save.c_str());
    }
    const std::string probe = options.save + format(".%d.test", getpid());
    write_file(probe, "");
    remove(probe.c_str());
}

// Load the data, create the devices and make the parameters. gpu(0) is on GPU number `first`.
static void set_up(int devices, bool quiet, int first = 0) {
    check_can_save();
    train_set = load_data(options.data, "train");
    test_set = load_data(options.data, "t10k");
    if (on_cpu) setenv("CUDA_CPU_DEVICES", str(devices).c_str(), 0); // as many as are needed
    use_devices(devices, quiet, first);
    rng.seed(options.seed);
    init_model();
    if (!options.init.empty()) load_safetensors(options.init, params);
}

void run_program() {
    set_up(options.gpus, false);
    find_model().demos(options.gpus);
    find_model().train(options.gpus, options.batch, options.lr);
    params.clear();
}

// Read the options and call run(). Return 0, or print an error and exit with status 1. Programs
// that include this file pass their own run().
int mgpu_main(int argc, char **argv, void (*run)() = run_program) {
    setvbuf(stdout, nullptr, _IOLBF, BUFSIZ); // print line by line, even into a pipe
    signal(SIGXFSZ, SIG_IGN);                 // writing too large a file is an error, not a signal
    try {
        if (parse_options(argc, argv)) {
            exchange = exchange_by(options.allreduce, options.overlap);
            run();
        }
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

#ifndef MGPU_NO_MAIN // tests.cu and extras/lab/ have a main of their own
int main(int argc, char **argv) { return mgpu_main(argc, argv); }
#endif
