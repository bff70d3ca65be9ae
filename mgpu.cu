// Training on multiple GPUs, from scratch: chapters of "Dive into Deep Learning" in one CUDA file.
//
//     make run GPUS=2      train LeNet on Fashion-MNIST on two devices
//     make test            check every kernel, and that k devices learn what one device learns
//
// A first reading starts at section 2 and ends with section 6, the tutorial beside it: same titles,
// same names, same order. Section 7 is its exercise, with slots for an allreduce and for kernels of
// your own. Sections 8 to 14 build what the tutorial takes for granted, the simplest kernels first.
//
//   1. The vocabulary
//   2. A toy network
//   3. Data synchronization
//   4. Distributing data
//   5. Training
//   6. Experiment
//   7. The allreduce lab
//   8. Kernels and operators
//   9. Autograd
//  10. The other two networks
//  11. Devices and memory
//  12. Data, timing, output
//  13. The first minibatch
//  14. Program
//
// Notation: N images, C channels, H rows, W columns (NCHW, row-major), O output channels, K side of
// a convolution kernel, k devices. All numbers are 32-bit floats. A gradient is called dX, dW, db.
// Without a GPU the same file is compiled by g++ with cpu/cuda_runtime.h in place of CUDA's own.

#include <cuda_runtime.h>
#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cmath>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <getopt.h>
#include <unistd.h>

// ---------------------------------------------------------------------------------------------
// 1. The vocabulary
// The tensors and operators that the tutorial takes from np and npx: declarations to look up later.

struct Device {
    int id; // 0, 1, ...: gpu(id); -1: the host
};
inline Device gpu(int i) { return {i}; }
inline Device cpu() { return {-1}; }

// A handle: copies of a Tensor share its numbers.
struct Tensor {
    Device device = {-1};
    std::vector<int> shape;
    std::shared_ptr<float> data;  // size(t) floats in the memory of `device`
    std::shared_ptr<Tensor> grad; // of the same shape; null where no gradient is wanted
    bool requires_grad = true;    // of a parameter; false: a buffer (a running statistic)
    float *ptr() const;           // data; called before what uses it is enqueued

    // Of a gradient, for autograd (section 9):
    unsigned written = 0; // the number of the backward pass that wrote it last
    std::shared_ptr<struct Event> complete = nullptr; // recorded after that write
    std::shared_ptr<struct Note> note = nullptr;      // of other operators than section 8's
};
int size(const Tensor &t); // the product of the shape

// Making tensors. On a device these enqueue the work and return.
Tensor empty(std::vector<int> shape, Device device); // unwritten memory
Tensor full(std::vector<int> shape, float value, Device device);
Tensor normal(float scale, std::vector<int> shape);      // N(0, scale^2) on the host
Tensor reshape(const Tensor &X, std::vector<int> shape); // the same memory; one size may be -1

// Operators. Each enqueues its forward kernels on the device of its arguments, and puts its
// backward on that device's tape.
// (N,C,H,W) (O,C,K,K) (O) -> (N,O,OH,OW), OH = (H + 2*padding - K)/stride + 1
Tensor conv2d(const Tensor &X, const Tensor &W, const Tensor &b, int stride = 1, int padding = 0);
// any shape -> the same
Tensor relu(const Tensor &X);
// (N,C,H,W) -> (N,C,OH,OW), OH = (H - kernel_size)/stride + 1
Tensor avg_pool2d(const Tensor &X, int kernel_size, int stride);
// (N,C) (C,O) (O) -> (N,O): X @ W + b
Tensor linear(const Tensor &X, const Tensor &W, const Tensor &b);
// (N,classes) (N) -> (N)
Tensor softmax_cross_entropy(const Tensor &y_hat, const Tensor &y);

// ---------------------------------------------------------------------------------------------
// 2. A toy network                                                     tutorial: "A Toy Network"
// LeNet as the tutorial writes it: its parameters, the model, its loss.

std::vector<Tensor> params; // on the host
std::vector<std::string> param_names = {"W1", "b1", "W2", "b2", "W3", "b3", "W4", "b4"};

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
}

// Define the model
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

// Cross-entropy loss function, one number for each sample
Tensor loss(const Tensor &y_hat, const Tensor &y) { return softmax_cross_entropy(y_hat, y); }

// The model that is trained: lenet, or another chapter's network (MODEL=, section 10)
typedef std::function<Tensor(const Tensor &X, const std::vector<Tensor> &params)> Net;
Net net = lenet;

// ---------------------------------------------------------------------------------------------
// 3. Data synchronization                                      tutorial: "Data Synchronization"
// How parameters get to every device, how one device waits for another, and how the devices'
// gradients become one sum: `allreduce`.

// A device's stream: what is enqueued on it runs in order, beside the streams of other devices.
struct Stream {
    cudaStream_t handle = nullptr;
    cudaEvent_t ready = nullptr; // wait_for records it
};
Stream &stream(Device device);
cudaStream_t on(Device device); // its stream's handle; makes the device CUDA's current one
int physical(Device device);    // CUDA's number of the GPU that is gpu(i)
void attach_grad(std::vector<Tensor> &params); // gradients of zeros, contiguous in memory
void add_(const Tensor &a, const Tensor &b);   // a[:] += b, on the same device

// A user's mistake: main prints it in one line and ends with status 1.
struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};
[[noreturn]] __attribute__((format(printf, 1, 2))) void error(const char *format, ...);
// Checks a CUDA call: one that fails ends the program with its line and CUDA's own words.
#define CHECK(call) check_cuda((call), #call, __FILE__, __LINE__)
void check_cuda(cudaError_t code, const char *call, const char *file, int line);

// Work enqueued on `device` after this call starts only when all work already enqueued on `other`
// has finished. The host does not wait. (One event per stream is enough: a wait is for the last
// record before it, and recording the event again does not change that.)
//
//   other's stream    ... work ... [record ready] ... more work ...
//                                        |
//                                        v
//   device's stream   ... work ...  [wait for it]  ... later work ...
void wait_for(Stream &stream, const Stream &other) {
    CHECK(cudaEventRecord(other.ready, other.handle));
    CHECK(cudaStreamWaitEvent(stream.handle, other.ready, 0));
}
void wait_for(Device device, Device other) { wait_for(stream(device), stream(other)); }

// A message, dst[:] = src from one device to another, enqueued on a stream of dst's device.
void peer_copy(const Tensor &src, const Tensor &dst, Stream &stream) {
    CHECK(cudaMemcpyPeerAsync(dst.ptr(), physical(dst.device), src.ptr(), physical(src.device),
                              sizeof(float) * size(src), stream.handle));
}

// Enqueue a copy on device d's stream: from the host, to the host or within d.
void copy_on(Device d, float *to, const float *from, size_t bytes, cudaMemcpyKind kind) {
    CHECK(cudaMemcpyAsync(to, from, bytes, kind, on(d)));
}

// dst[:] = src, of equal size, from any device to any. Asynchronous: between devices the copy runs
// on dst's stream; it waits for src's earlier work, and src's later work waits for it. Only a copy
// to the host blocks.
void copyto(const Tensor &src, const Tensor &dst) {
    const size_t bytes = sizeof(float) * size(src);
    if (size(src) != size(dst))
        error("copyto: %d numbers do not fit a tensor of %d", size(src), size(dst));
    if (bytes == 0) return;
    const float *from = src.ptr();
    float *to = dst.ptr();
    if (src.device.id < 0 && dst.device.id < 0) {
        memcpy(to, from, bytes);
    } else if (src.device.id < 0) {
        copy_on(dst.device, to, from, bytes, cudaMemcpyHostToDevice);
    } else if (dst.device.id < 0) {
        copy_on(src.device, to, from, bytes, cudaMemcpyDeviceToHost);
        CHECK(cudaStreamSynchronize(on(src.device))); // the host will read it
    } else if (src.device.id == dst.device.id) {
        copy_on(dst.device, to, from, bytes, cudaMemcpyDeviceToDevice);
    } else {
        wait_for(dst.device, src.device); // read src only after it is written
        peer_copy(src, dst, stream(dst.device));
        wait_for(src.device, dst.device); // overwrite src only after it is read
    }
}
Tensor copyto(const Tensor &src, Device device) {
    Tensor dst = empty(src.shape, device);
    dst.requires_grad = src.requires_grad;
    copyto(src, dst);
    return dst;
}

// A copy of the parameters on the device, with gradients attached.
std::vector<Tensor> get_params(const std::vector<Tensor> &params, Device device) {
    std::vector<Tensor> new_params;
    for (const Tensor &p : params) new_params.push_back(copyto(p, device));
    attach_grad(new_params);
    return new_params;
}

// data[c] lies on device c; afterwards each of them holds the elementwise sum of all. A received
// copy is freed at once, but its memory is reused in stream order only (section 11).
// With k devices and tensors of n bytes: 2(k-1) messages, all to or from device 0, which receives
// (k-1)n bytes and sends as many; every other device receives n bytes and sends n.
void allreduce(std::vector<Tensor> data) {
    for (size_t i = 1; i < data.size(); i++)
        add_(data[0], copyto(data[i], data[0].device)); // data[0][:] += data[i]
    for (size_t i = 1; i < data.size(); i++)
        copyto(data[0], data[i]); // data[i][:] = data[0]: into the tensor, not into the list
}

// ---------------------------------------------------------------------------------------------
// 4. Distributing data                                            tutorial: "Distributing Data"
// How a minibatch is cut into one shard for each device.

Tensor rows(const Tensor &X, int begin, int end); // X[begin:end], the same memory
std::vector<int> shard_sizes(int n, int k);       // of n samples on k devices: equal, or by SPLIT

// k contiguous shards in order. Their sizes differ by at most one, the larger ones first (or are in
// SPLIT's proportions, such as 3,1). If there are fewer samples than devices, the last shards are
// empty. Same as gluon.utils.split_and_load(even_split=False).
std::vector<Tensor> split_and_load(const Tensor &X, const std::vector<Device> &devices) {
    std::vector<Tensor> shards;
    std::vector<int> sizes = shard_sizes(X.shape[0], devices.size());
    for (size_t i = 0, begin = 0; i < devices.size(); begin += sizes[i++])
        shards.push_back(copyto(rows(X, begin, begin + sizes[i]), devices[i]));
    return shards;
}

// Split `X` and `y` into multiple devices.
std::pair<std::vector<Tensor>, std::vector<Tensor>>
split_batch(const Tensor &X, const Tensor &y, const std::vector<Device> &devices) {
    if (X.shape[0] != y.shape[0])
        error("split_batch: %d samples but %d labels", X.shape[0], y.shape[0]);
    return {split_and_load(X, devices), split_and_load(y, devices)};
}

// ---------------------------------------------------------------------------------------------
// 5. Training                                                              tutorial: "Training"
// train_batch trains one minibatch on all devices, train whole epochs. They stand below the
// declarations of what they take from autograd and d2l.

void backward(const Tensor &l); // the gradient of sum(l), for all that l depends on
void waitall();                 // npx.waitall: the host waits for all devices
// param -= lr * param.grad / batch_size
void sgd(const std::vector<Tensor> &params, float lr, int batch_size);
Device try_gpu(int i); // gpu(i), or an error if there are fewer devices

// The command line (section 14). What it does not give has the value of the model's chapter (10).
struct Options {
    int gpus = 1, batch = 256, epochs = 10; // batch: samples over all devices
    int steps = 0, limit = 0; // stop after so many minibatches, use so many samples; 0: all
    float lr = 0.2f;
    unsigned seed = 0;
    bool shuffle = true, overlap = false, first_check = true, replica_check = true;
    bool resume = false, verbose = false;
    bool evaluate_all = false; // test accuracy on all devices, not on the first alone
    std::string model = "lenet", allreduce = "naive", kvstore;
    std::vector<int> split; // proportions of the devices' shards; empty: equal ones
    std::string data = "data", init, save, log = "build/log.csv"; // folders, a file
    std::set<std::string> given; // the options that the command line names
};
extern Options options;

// Minibatches of a data set, in pinned host memory: X (N,1,28,28) in [0,1], y (N) the class.
struct DataIter {
    const struct DataSet *set;
    int batch_size;
    bool shuffle;
    Tensor X, y;            // the epoch in its order, filled ahead; minibatches are views of it
    std::vector<int> order; // of the samples in this epoch
    int begin = 0, filled = 0, asked = 0;
    std::future<void> ahead = {};    // another thread fills [filled, asked)
    void reset();                    // a new epoch
    bool next(Tensor &X, Tensor &y); // the next minibatch; the last one may be smaller
};
std::pair<DataIter, DataIter> load_data_fashion_mnist(int batch_size); // for training, for testing
float evaluate_accuracy_gpu(const std::function<Tensor(const Tensor &)> &net, DataIter &test_iter,
                            Device device);
float evaluate_accuracy_gpus(const Net &net, const std::vector<std::vector<Tensor>> &device_params,
                             DataIter &test_iter, const std::vector<Device> &devices);
struct Timer { // seconds, mean over start-stop pairs
    std::vector<double> times;
    double t0 = 0;
    void start();
    void stop();
    void exclude(const std::function<void()> &f); // run f meanwhile, in no time
    double avg() const;
};
// The tutorial's plot: a progress bar on a terminal, a row an epoch, and a file for `make plot`.
struct Animator {
    std::shared_ptr<struct Progress> progress;
    Animator(const std::vector<Device> &devices, int steps); // steps of an epoch
    void step(const std::vector<Tensor> &ls);                // a minibatch has been enqueued
    double finish(int epoch); // waits for the epoch's steps and returns their mean loss
    void add(int epoch, double loss, float acc, double seconds); // a row
};
// Is the first step of k devices that of one device (section 13)? Are the k replicas equal (11)?
void check_first_step(const Tensor &X, const Tensor &y, const std::vector<Tensor> &ls,
                      const std::vector<std::vector<Tensor>> &device_params, float lr);
void check_replicas(const std::vector<std::vector<Tensor>> &device_params);
struct Position { // how far a training is: its epoch, samples of that epoch, steps of all epochs
    int epoch, samples, steps;
};
extern Position resumed; // where RESUME=1 goes on; else all 0
void save_checkpoint(const std::vector<Tensor> &params, const Position &position);
std::string str(Device device);                      // gpu(0)
std::string str(const std::vector<Device> &devices); // [gpu(0), gpu(1)]
std::string str(const std::vector<int> &shape);      // (256,20,26,26)

const Tensor &gradient(const Tensor &param); // *param.grad, or an error where it has none
// The gradients of all parameters on all devices: grads[c][i] lies on device c.
typedef std::vector<std::vector<Tensor>> Grads;
Grads gradients(const std::vector<std::vector<Tensor>> &device_params) {
    Grads grads(device_params.size());
    for (size_t c = 0; c < device_params.size(); c++)
        for (const Tensor &p : device_params[c])
            if (p.requires_grad) grads[c].push_back(gradient(p));
    return grads;
}
// The i-th gradient of every device: the tutorial's [device_params[c][i].grad for c in ...]
std::vector<Tensor> column(const Grads &grads, size_t i) {
    std::vector<Tensor> data;
    for (const auto &list : grads) data.push_back(list[i]);
    return data;
}
// Sums them over the devices: the tutorial's loop. Where ALLREDUCE or OVERLAP ask for another way,
// main puts that in its place (section 7).
typedef std::function<void(const Grads &)> Exchange;
Exchange exchange = [](const Grads &grads) {
    for (size_t i = 0; i < grads[0].size(); i++) allreduce(column(grads, i));
};

// One step of data parallelism, on k devices:
//   1. Split the minibatch into k shards, one on each device.
//   2. Each device computes the loss and the gradients of its shard, with its copy of the
//      parameters.
//   3. Sum the k gradients of each parameter, and
//   4. broadcast the sum to all devices: allreduce does both.
//   5. Each device updates its copy with the same sum, so that the copies stay equal.
// Returns the losses: ls[c] has shape (size of shard c).
std::vector<Tensor> train_batch(const Tensor &X, const Tensor &y,
                                std::vector<std::vector<Tensor>> &device_params,
                                const std::vector<Device> &devices, float lr) {
    auto [X_shards, y_shards] = split_batch(X, y, devices); // 1.
    std::vector<Tensor> ls; // 2. Loss is calculated separately on each GPU
    for (size_t c = 0; c < devices.size(); c++)
        ls.push_back(loss(net(X_shards[c], device_params[c]), y_shards[c]));
    for (const Tensor &l : ls) backward(l); // Back Propagation is performed separately on each GPU
    // 3. and 4. Sum all gradients from each GPU and broadcast them to all GPUs
    exchange(gradients(device_params));
    // 5. The model parameters are updated separately on each GPU
    for (const auto &param : device_params)
        sgd(param, lr, X.shape[0]); // Here, we use a full-size batch
    return ls;
}

// As in the tutorial, except that the host does not wait after each minibatch: it enqueues a whole
// epoch and then waits for the devices once.
void train(int num_gpus, int batch_size, float lr) {
    auto [train_iter, test_iter] = load_data_fashion_mnist(batch_size);
    std::vector<Device> devices;
    for (int i = 0; i < num_gpus; i++) devices.push_back(try_gpu(i));
    // Copy model parameters to num_gpus GPUs
    std::vector<std::vector<Tensor>> device_params;
    for (Device d : devices) device_params.push_back(get_params(params, d));
    const int num_epochs = options.epochs;
    Animator animator(devices, (train_iter.X.shape[0] + batch_size - 1) / batch_size);
    Timer timer;
    Tensor X, y;
    float acc = 0;
    int epoch = 0, steps = resumed.steps;
    bool more = true;
    for (; epoch < resumed.epoch; epoch++) train_iter.reset(); // so that samples keep their order
    for (; epoch < num_epochs && more; epoch++) {
        timer.start();
        train_iter.reset();
        if (epoch == resumed.epoch) train_iter.begin = resumed.samples;
        while (more && train_iter.next(X, y)) {
            // Perform multi-GPU training for a single minibatch
            std::vector<Tensor> ls = train_batch(X, y, device_params, devices, lr);
            if (steps == resumed.steps)
                timer.exclude([&] { check_first_step(X, y, ls, device_params, lr); });
            animator.step(ls);
            more = ++steps != options.steps;
        }
        double mean_loss = animator.finish(epoch);
        timer.stop();
        check_replicas(device_params);
        if (options.evaluate_all) // the chapter's exercise 4
            acc = evaluate_accuracy_gpus(net, device_params, test_iter, devices);
        else // Verify the model on GPU 0
            acc = evaluate_accuracy_gpu([&](const Tensor &x) { return net(x, device_params[0]); },
                                        test_iter, devices[0]);
        animator.add(epoch + 1, mean_loss, acc, timer.times.back());
        save_checkpoint(device_params[0], {epoch, train_iter.begin, steps}); // where SAVE says
    }
    printf("test acc: %.2f, %.1f sec/epoch on %s\n", acc, timer.avg(), str(devices).c_str());
}

// ---------------------------------------------------------------------------------------------
// 6. Experiment                                                          tutorial: "Experiment"
// The tutorial's demonstrations, which print what the devices' memory really holds, and its run.

Tensor arange(int n);                   // 0, 1, ..., n-1   (n) on the host
std::string to_string(const Tensor &t); // as NumPy prints it; waits for the device
std::vector<float> to_host(const Tensor &t);
std::vector<Device> first_devices(int k) {
    std::vector<Device> devices;
    for (int i = 0; i < k; i++) devices.push_back(try_gpu(i));
    return devices;
}
void run_allreduce(const std::string &name, const Grads &grads); // by name: section 7

void demos(int num_gpus) {
    const std::vector<Device> devices = first_devices(num_gpus);
    std::vector<Tensor> new_params = get_params(params, try_gpu(0));
    printf("b1 weight: %s\n", to_string(new_params[1]).c_str());
    printf("b1 grad: %s\n", to_string(gradient(new_params[1])).c_str());

    std::vector<Tensor> data;
    for (int i = 0; i < num_gpus; i++) data.push_back(full({1, 2}, i + 1, try_gpu(i)));
    printf("before allreduce:\n");
    for (const Tensor &t : data) printf(" %s\n", to_string(t).c_str());
    Grads grads; // the list [data]: one tensor on each device
    for (const Tensor &t : data) grads.push_back({t});
    run_allreduce(options.allreduce, grads); // naive: allreduce(data)
    printf("after allreduce:\n");
    bool right = true;
    const float sum = num_gpus * (num_gpus + 1) / 2;
    for (const Tensor &t : data) {
        printf(" %s\n", to_string(t).c_str());
        right = right && to_host(t) == std::vector<float>{sum, sum};
    }
    if (!right)
        printf(" WRONG: each device should hold the sum, [[%g. %g.]]; `make exercise ALLREDUCE=%s` "
               "tells more\n",
               sum, sum, options.allreduce.c_str());

    Tensor matrix = reshape(arange(20), {4, 5});
    std::vector<Tensor> split = split_and_load(matrix, devices);
    printf("input :\n %s\n", to_string(matrix).c_str());
    printf("load into %s\n", str(devices).c_str());
    printf("output:\n");
    for (const Tensor &t : split) printf(" %s\n", to_string(t).c_str());
}

void demos_resnet18(int num_gpus); // the other chapters', in section 10
void demos_lab_cnn(int num_gpus);
void experiment() {
    if (options.model == "resnet18") demos_resnet18(options.gpus);
    else if (options.model == "lab_cnn") demos_lab_cnn(options.gpus);
    else demos(options.gpus);
    train(options.gpus, options.batch, options.lr);
}

// ---------------------------------------------------------------------------------------------
// 7. The allreduce lab                                           tutorial: "Exercises", the third
// A ladder of algorithms, from the tutorial's up; ALLREDUCE=name trains with one of them. At the
// end stand the student's slot, `allreduce_yours`, and what makes an `exchange` of each: it can
// overlap the allreduce with the backward pass, in buckets.
//
// Contract. grads[c][i] lies on device c and has the same size on every device. Afterwards each of
// them holds the sum over all c, with the same bits on every device. Asynchronous: enqueue and
// return, no synchronisation on the host. Work enqueued later on a device sees the sums and may
// overwrite them. Any k from 1 up, any sizes, 0 among them.
//
// Cost, for k devices and P tensors of n bytes together: messages; bytes into the busiest device
// (as many leave it); steps, the length of the longest chain of messages that follow one another,
// by a wait or on one stream.
// The alpha-beta model: time = steps * alpha + bytes * beta, alpha the latency of a message, 1/beta
// the bandwidth.

void sum_(const Tensor &a, const std::vector<Tensor> &parts); // a[:] = the parts' sum, in order
Stream &link_stream(Device src, Device dst);           // the stream of messages from src to dst
std::vector<float *> pinned(int count, int n);         // arrays of n numbers in pinned host memory
void call_on(Stream &stream, std::function<void()> f); // enqueue a call of f on the host
void wait_for_gradient(const Tensor &grad); // later work on its device waits until it is written
// Each device has a second stream, for communication. A guard: while it lives (and if `use`),
// stream(d) and on(d) return that one.
struct CommStreams {
    explicit CommStreams(bool use);
    ~CommStreams();
};
void join_comm_streams(int k); // later work on the first k devices waits for those streams

// Launches a kernel and checks the launch. A program that includes this file may have defined it.
#ifndef LAUNCH
#define LAUNCH(...)                                                                                \
    do {                                                                                           \
        __VA_ARGS__;                                                                               \
        check_cuda(cudaGetLastError(), "the kernel launch", __FILE__, __LINE__);                   \
    } while (0)
inline void touch(long) {} // the next kernel reads or writes so many numbers: for who counts bytes
#endif
// A part of a step, as long as this lives: nsys shows it.
struct Part {
    explicit Part(const char *name) { nvtxRangePushA(name); }
    ~Part() { nvtxRangePop(); }
};

// --- tools of the algorithms
// Does each tensor begin where the one before it ends, in memory that was allocated as one?
static bool contiguous(const std::vector<Tensor> &list) {
    std::shared_ptr<float> last;
    const float *end = nullptr;
    for (const Tensor &t : list) {
        if (size(t) == 0) continue;
        const bool other = last.owner_before(t.data) || t.data.owner_before(last);
        if (last && (other || t.data.get() != end)) return false;
        last = t.data;
        end = last.get() + size(t);
    }
    return true;
}
// Copy the list's tensors, one after the other, into `flat`, or back.
static void copy_flat(const Tensor &flat, const std::vector<Tensor> &list, bool back) {
    int begin = 0;
    for (const Tensor &t : list) {
        const Tensor part = rows(flat, begin, begin + size(t));
        back ? copyto(part, t) : copyto(t, part);
        begin += size(t);
    }
}
// Each device's tensors as one tensor (n): the same memory if they are contiguous, as the gradients
// of get_params are; otherwise a copy, which unflatten copies back.
static std::vector<Tensor> flatten(const Grads &grads) {
    std::vector<Tensor> flat;
    for (const auto &list : grads) {
        Tensor all;
        all.device = list[0].device;
        all.shape = {0};
        for (const Tensor &t : list) {
            if (t.note) t.ptr(); // a launch that was put off goes now
            if (size(all) == 0) all.data = t.data;
            all.shape[0] += size(t);
        }
        if (!contiguous(list)) {
            all = empty(all.shape, all.device);
            copy_flat(all, list, false);
        }
        flat.push_back(all);
    }
    return flat;
}
static void unflatten(const std::vector<Tensor> &flat, const Grads &grads) {
    for (size_t c = 0; c < grads.size(); c++)
        if (!contiguous(grads[c])) copy_flat(flat[c], grads[c], true);
}

// Chunk j of k of a tensor's numbers, or `count` of them from j on, the same memory. The chunks'
// sizes differ by at most one.
static Tensor chunk(const Tensor &t, int j, int k, int count = 1) {
    const long long n = size(t);
    return rows(reshape(t, {(int)n}), n * j / k, n * (j + count) / k);
}

// One round of messages, each dst[:] = src. A message runs on its pair's own stream, after all
// earlier work of both devices, and the later work of both waits for it. Messages between different
// pairs travel at the same time; so no two may write to the same place.
struct Message {
    Tensor src, dst;
};
static void send(const std::vector<Message> &messages) {
    std::map<const float *, const float *> written; // end -> begin
    for (const auto &[src, dst] : messages) {
        const float *begin = dst.ptr(), *end = begin + size(dst);
        src.ptr(); // a launch that was put off goes now
        if (size(src) != size(dst))
            error("send: %d numbers do not fit a tensor of %d", size(src), size(dst));
        if (size(src) == 0) continue;
        auto other = written.upper_bound(begin);
        if (other != written.end() && other->second < end)
            error("send: two messages of one round go to the same place on %s: give each its own "
                  "empty(shape, device), and add them",
                  str(dst.device).c_str());
        written[end] = begin;
    }
    for (const auto &[src, dst] : messages) {
        if (size(src) == 0) continue;
        Stream &link = link_stream(src.device, dst.device);
        for (Device d : {src.device, dst.device}) wait_for(link, stream(d));
        peer_copy(src, dst, link);
    }
    for (const auto &[src, dst] : messages)
        for (Device d : {src.device, dst.device})
            if (size(src) > 0) wait_for(stream(d), link_stream(src.device, dst.device));
}

// --- naive: the tutorial's, tensor by tensor, device 0 the root of all
//   messages 2(k-1)P   busiest (k-1)n   steps 2(k-1)P
static void allreduce_naive(const Grads &grads) {
    for (size_t i = 0; i < grads[0].size(); i++) allreduce(column(grads, i));
}

// --- bucket: the same with all tensors as one, so that latency is paid once and not P times
//   messages 2(k-1)   busiest (k-1)n   steps 2(k-1)
static void allreduce_bucket(const Grads &grads) {
    std::vector<Tensor> flat = flatten(grads);
    allreduce(flat);
    unflatten(flat, grads);
}

// --- host: a parameter server on the host, the lab's kvstore='local'
//   messages 2k, for one device none   busiest: the host, kn; a device n   steps 2
// sum += x, n numbers. Also __device__, because without a GPU only such code is fully optimized.
static __host__ __device__ void add_on_host(float *sum, const float *x, int n) {
    for (int i = 0; i < n; i++) sum[i] += x[i];
}
static void allreduce_host(const Grads &grads) {
    std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size(), n = size(flat[0]);
    const size_t bytes = n * sizeof(float);
    if (k == 1 || n == 0) return;
    const std::vector<float *> host = pinned(k + 1, n); // each device's gradients, then the sum
    for (int c = 0; c < k; c++) {
        copy_on(flat[c].device, host[c], flat[c].ptr(), bytes, cudaMemcpyDeviceToHost);
        if (c > 0) wait_for(flat[0].device, flat[c].device);
    }
    touch((k + 1L) * n);
    call_on(stream(flat[0].device), [=] {
        std::copy_n(host[0], n, host[k]);
        for (int c = 1; c < k; c++) add_on_host(host[k], host[c], n);
    });
    for (int c = 1; c < k; c++) wait_for(flat[c].device, flat[0].device);
    for (int c = 0; c < k; c++)
        copy_on(flat[c].device, flat[c].ptr(), host[k], bytes, cudaMemcpyHostToDevice);
    unflatten(flat, grads);
}

// Device owner[i] receives tensor i of every other device, adds them all in the devices' order, and
// sends the sum back.
static void sum_on_owners(const Grads &grads, const std::vector<int> &owner) {
    std::vector<std::vector<Tensor>> parts; // of each tensor, on its owner, in the devices' order
    std::vector<Message> gather, broadcast;
    for (size_t i = 0; i < owner.size(); i++) {
        const Tensor &sum = grads[owner[i]][i];
        parts.push_back(column(grads, i));
        for (int c = 0; c < (int)grads.size(); c++) {
            if (c == owner[i]) continue;
            parts[i][c] = empty(sum.shape, sum.device);
            gather.push_back({grads[c][i], parts[i][c]});
            broadcast.push_back({sum, grads[c][i]});
        }
    }
    send(gather);
    for (size_t i = 0; i < owner.size(); i++) sum_(grads[owner[i]][i], parts[i]);
    send(broadcast);
}

// --- by_tensor: the tutorial's third exercise, different parameters on different devices: a
// parameter server sharded by tensor. Greedy balance: the largest tensor first, each to the device
// with the least load.
//   messages 2(k-1)P   busiest (k-1)L + n-L, L bytes the largest load   steps 2m, m the most
//   tensors that one device owns
static void allreduce_by_tensor(const Grads &grads) {
    const int k = grads.size(), P = grads[0].size();
    std::vector<int> largest_first(P), owner(P);
    std::vector<long> load(k);
    std::iota(largest_first.begin(), largest_first.end(), 0);
    std::stable_sort(largest_first.begin(), largest_first.end(),
                     [&](int a, int b) { return size(grads[0][a]) > size(grads[0][b]); });
    for (int i : largest_first) {
        owner[i] = std::min_element(load.begin(), load.end()) - load.begin();
        load[owner[i]] += size(grads[0][i]);
    }
    sum_on_owners(grads, owner);
}

// --- sharded: the same with k chunks of equal size, of which each device owns one: a direct
// reduce-scatter, then a direct all-gather of the sums
//   messages 2k(k-1)   busiest 2(k-1)n/k   steps 2
static void allreduce_sharded(const Grads &grads) {
    std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    Grads chunks(k);
    for (int c = 0; c < k; c++)
        for (int j = 0; j < k; j++) chunks[c].push_back(chunk(flat[c], j, k));
    std::vector<int> owner(k);
    std::iota(owner.begin(), owner.end(), 0); // device j owns chunk j
    sum_on_owners(chunks, owner);
    unflatten(flat, grads);
}

// --- ring: a device sends to its right neighbour only, and every link is busy in every step
//   messages 2k(k-1)   busiest 2(k-1)n/k   steps 2(k-1)
static void allreduce_ring(const Grads &grads) {
    std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    // The reduce-scatter phase: partial sums go round; device (j + step) mod k sends chunk j's.
    for (int step = 0; step < k - 1; step++) {
        std::vector<Message> messages;
        for (int c = 0; c < k; c++) {
            const Tensor part = chunk(flat[c], (c - step + k) % k, k);
            messages.push_back({part, empty(part.shape, flat[(c + 1) % k].device)});
        }
        send(messages);
        for (int c = 0; c < k; c++)
            add_(chunk(flat[(c + 1) % k], (c - step + k) % k, k), messages[c].dst);
    }
    // The all-gather phase: the sums go round; device j - 1 + step sends that of chunk j.
    for (int step = 0; step < k - 1; step++) {
        std::vector<Message> messages;
        for (int c = 0; c < k; c++) {
            const int j = (c + 1 - step + k) % k;
            messages.push_back({chunk(flat[c], j, k), chunk(flat[(c + 1) % k], j, k)});
        }
        send(messages);
    }
    unflatten(flat, grads);
}

// --- tree: a reduction, in whose round r device c + 2^r sends to device c, for all multiples c of
// 2^(r+1); then a broadcast the same way back
//   messages 2(k-1)   busiest ceil(log2 k) n   steps 2 ceil(log2 k)
static void allreduce_tree(const Grads &grads) {
    std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    int distance = 1;
    for (; distance < k; distance *= 2) {
        std::vector<Message> messages;
        for (int c = 0; c + distance < k; c += 2 * distance)
            messages.push_back({flat[c + distance], empty(flat[c].shape, flat[c].device)});
        send(messages);
        for (size_t m = 0; m < messages.size(); m++) add_(flat[m * 2 * distance], messages[m].dst);
    }
    while ((distance /= 2) > 0) {
        std::vector<Message> messages;
        for (int c = 0; c + distance < k; c += 2 * distance)
            messages.push_back({flat[c], flat[c + distance]});
        send(messages);
    }
    unflatten(flat, grads);
}

// --- rebind: the mistake of the tutorial's older PyTorch text, kept to be looked at. `data[c] =`
// puts a new tensor with the sum into the list; the gradient itself stays what it was.
static void allreduce_rebind(const Grads &grads) {
    for (size_t i = 0; i < grads[0].size(); i++) {
        std::vector<Tensor> data = column(grads, i);
        for (size_t c = 1; c < data.size(); c++) add_(data[0], copyto(data[c], data[0].device));
        for (size_t c = 1; c < data.size(); c++) data[c] = copyto(data[0], data[c].device);
    }
}

// --- launching a kernel: its threads and blocks
#ifdef CUDA_CPU
constexpr bool on_cpu = true; // the stand-in, see cpu/
#else
constexpr bool on_cpu = false;
#endif
constexpr int threads = 256;                         // of a block, where nothing else decides
inline int blocks(long n, int per_block = threads) { // at least one: an empty grid is an error
    if (n > INT_MAX) error("a launch of %ld threads is too large: use a smaller BATCH", n);
    return n > 0 ? (n + per_block - 1) / per_block : 1;
}

// --- yours: the student's slot. It starts as the tutorial's algorithm; the contract is at the top
// of this section. The tools:
//   send       copyto(src, dst), one message, or send({{src, dst}, ...}), a round of them
//   add        add_(a, b): a += b; sum_(a, {a, b, ...}): a = their sum
//   allocate   empty(shape, device); its last handle frees it, which is safe in stream order
//   cut        chunk(t, j, k) or chunk(t, j, k, count), flatten(grads), unflatten(flat, grads)
// If it works for some numbers of devices only, say so in `algorithms` below: {"yours",
// allreduce_yours, powers_of_two}.
// The commands:
//   make exercise                           is it right, and what does it cost beside naive?
//   make race ALLREDUCE=yours GPUS=3        is every wait there?
//   make run ALLREDUCE=yours GPUS=2         does it train?
// ---- kernels of your own, from here (section 8 has some to start from, relu_kernel the simplest)
// ---- to here; allreduce_yours launches one so:
//   LAUNCH(my_kernel<<<blocks(n), threads, 0, on(t.device)>>>(t.ptr(), n));
static void allreduce_yours(const Grads &grads) {
    // ---- yours, from here ----
    const size_t k = grads.size(), P = grads[0].size();
    for (size_t i = 0; i < P; i++) {
        for (size_t c = 1; c < k; c++) {
            Tensor received = empty(grads[c][i].shape, grads[0][i].device);
            copyto(grads[c][i], received);
            add_(grads[0][i], received);
        }
        for (size_t c = 1; c < k; c++) copyto(grads[0][i], grads[c][i]);
    }
    // ---- to here ----
}

inline bool powers_of_two(int k) { return (k & (k - 1)) == 0; }
struct Algorithm {
    const char *name;
    void (*run)(const Grads &grads);
    bool (*meant_for)(int k) = nullptr; // null: for any number of devices
};
static std::vector<Algorithm> algorithms = {
    {"naive", allreduce_naive},         {"bucket", allreduce_bucket},   {"host", allreduce_host},
    {"by_tensor", allreduce_by_tensor}, {"sharded", allreduce_sharded}, {"ring", allreduce_ring},
    {"tree", allreduce_tree},           {"rebind", allreduce_rebind},   {"yours", allreduce_yours},
};
static bool meant_for(const std::string &name, int k) {
    for (const Algorithm &a : algorithms)
        if (a.name == name && a.meant_for) return a.meant_for(k);
    return true;
}
void run_allreduce(const std::string &name, const Grads &grads) {
    const int k = grads.size();
    if (!meant_for(name, k)) error("%s is not meant for %d devices", name.c_str(), k);
    const Part sum("sum");
    try {
        for (const Algorithm &a : algorithms)
            if (a.name == name) a.run(grads);
    } catch (const std::exception &e) { error("%s, k = %d: %s", name.c_str(), k, e.what()); }
}

// --- exchange: all gradients of a step by one of these algorithms, and OVERLAP: "start exchanging
// while others are still being computed". When train_batch calls it, the host has enqueued the
// whole backward pass, with an event after the write of each gradient, but the devices have hardly
// begun it. So an allreduce that is enqueued now on the communication streams, and waits only for
// the events of its own gradients, runs beside the rest of the backward pass. There is one for each
// bucket of gradients, the last layers first, because backward writes their gradients first.
static size_t bucket_bytes = 256 * 1024; // at least; the last bucket may be smaller

// The exchange that calls `sum` for one bucket after another
static Exchange in_buckets(const Exchange &sum, bool overlap) {
    return [=](const Grads &grads) {
        for (size_t end = grads[0].size(), begin = end, bytes = 0; begin > 0;) {
            bytes += size(grads[0][--begin]) * sizeof(float);
            if (bytes < bucket_bytes && begin > 0) continue;
            Grads bucket;
            for (const auto &list : grads)
                bucket.push_back({list.begin() + begin, list.begin() + end});
            CommStreams guard(overlap);
            for (const auto &list : bucket)
                for (const Tensor &grad : list) wait_for_gradient(grad);
            sum(bucket);
            end = begin;
            bytes = 0;
        }
        if (overlap) join_comm_streams(grads.size()); // before sgd reads the sums
    };
}
// The order in which a ring adds depends on where its chunks begin. So that OVERLAP changes no bit,
// the ring gets the same buckets without it.
Exchange exchange_by(const std::string &name, bool overlap) {
    const Exchange sum = [=](const Grads &grads) { run_allreduce(name, grads); };
    return overlap || name == "ring" ? in_buckets(sum, overlap) : sum;
}

// ---------------------------------------------------------------------------------------------
// 8. Kernels and operators
// Each operation stands with its kernels, its forward and its backward, from an elementwise ReLU to
// batch normalization: the simplest kernels that are right, mostly a thread for each number of the
// result. A kernel's arguments are its outputs, then its inputs, then sizes. An operator of your
// own starts as a copy of simple_relu.

// Where a backward kernel stores a gradient: = for its first part, += for others.
struct Target {
    float *data;
    const float *plus = nullptr; // the parts so far, mostly in `data` itself; null for =
    __device__ __forceinline__ void store(int i, float value) const {
        data[i] = plus ? plus[i] + value : value;
    }
};
// What an operator takes from autograd (section 9): output() allocates y, record() puts the
// backward onto the tape, grad_of() says where dX goes.
Tensor output(const char *op, const std::vector<Tensor> &inputs, std::vector<int> shape);
void record(const Tensor &y, std::function<void()> backward);
Target grad_of(const Tensor &X); // null data where X wants no gradient
extern bool recording;           // false under NoGrad
void check_shape(const char *op, bool right, const char *wanted, const std::vector<Tensor> &inputs);
void same_device(const char *op, const std::vector<Tensor> &inputs);

// The table of operators. relu(X) calls operators.relu, and that is simple_relu, as all that the
// table holds stands in this section; a program that includes this file may put others there. Their
// arguments have been checked; `op` is what the user called.
struct Operators {
    std::string name; // what the first line of a run calls them
    float rounding;   // a gradient's rounding errors are at most this part of its largest number
    Tensor (*conv)(const char *op, const Tensor &X, const Tensor &W, const Tensor &b,
                   const struct ConvShape &s, const std::vector<int> &y_shape);
    Tensor (*relu)(const Tensor &X);
    Tensor (*add)(const Tensor &A, const Tensor &B);
    Tensor (*pool2d)(const char *op, const Tensor &X, const struct PoolShape &s);
    Tensor (*batch_norm)(const Tensor &X, const Tensor &gamma, const Tensor &beta,
                         const Tensor &running_mean, const Tensor &running_var);
    void (*sgd)(const std::vector<Tensor> &params, float lr, int batch_size);
    // Null, or enqueues the launches that operators have put off: the device's last one, and the
    // one that writes the tensor with this note.
    void (*flush)(Device device, const std::shared_ptr<Note> &note);
};
extern Operators operators; // the end of this section fills it

// --- relu
// y = max(X, 0), NaN stays NaN. One thread per element.
__global__ void relu_kernel(float *y, const float *X, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = X[i] < 0 ? 0 : X[i];
}
// dX = or += dy where X > 0, else 0
__global__ void relu_backward_kernel(Target dX, const float *dy, const float *X, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float g = dy[i]; // loaded in any case: no branch on the sign
    dX.store(i, X[i] > 0 ? g : 0);
}

Tensor simple_relu(const Tensor &X) {
    Tensor y = output("relu", {X}, X.shape);
    const int n = size(X);
    LAUNCH(relu_kernel<<<blocks(n), threads, 0, on(X.device)>>>(y.ptr(), X.ptr(), n));
    record(y, [=] {
        LAUNCH(relu_backward_kernel<<<blocks(n), threads, 0, on(X.device)>>>(
            grad_of(X), y.grad->ptr(), X.ptr(), n));
    });
    return y;
}
Tensor relu(const Tensor &X) { return operators.relu(X); }

// --- addition
// y = A + B. One thread per element.
__global__ void add_forward_kernel(float *y, const float *A, const float *B, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = A[i] + B[i];
}
// dA = or += dy
__global__ void add_backward_kernel(Target dA, const float *dy, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) dA.store(i, dy[i]);
}

Tensor simple_add(const Tensor &A, const Tensor &B) {
    Tensor y = output("add", {A, B}, A.shape);
    const int n = size(A);
    LAUNCH(
        add_forward_kernel<<<blocks(n), threads, 0, on(A.device)>>>(y.ptr(), A.ptr(), B.ptr(), n));
    record(y, [=] {
        for (const Tensor &X : {A, B}) {
            if (!X.grad) continue;
            LAUNCH(add_backward_kernel<<<blocks(n), threads, 0, on(X.device)>>>(grad_of(X),
                                                                                y.grad->ptr(), n));
        }
    });
    return y;
}
// A + B, of one shape. They may be the same tensor: its gradient is then 2 dy.
Tensor add(const Tensor &A, const Tensor &B) {
    check_shape("add", A.shape == B.shape, "two of the same shape", {A, B});
    return operators.add(A, B);
}

// --- in place, without gradients
__global__ void fill_kernel(Target a, float value, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) a.store(i, value);
}
__global__ void add_kernel(float *a, const float *b, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) a[i] += b[i];
}
void add_(const Tensor &a, const Tensor &b) {
    same_device("add_", {a, b});
    check_shape("add_", a.shape == b.shape, "two of the same shape", {a, b});
    const int n = size(a);
    float *const sum = a.ptr();
    const float *const x = b.ptr();
    LAUNCH(add_kernel<<<blocks(n), threads, 0, on(a.device)>>>(sum, x, n));
}

// --- sums over a block
// The sum of value(i) over i < n by one block, in a fixed order: the same bits on every run.
// `scratch` is shared memory, one float per thread; blockDim.x is a power of two.
template <class Value> __device__ inline float block_sum(float *scratch, int n, Value value) {
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += value(i);
    scratch[threadIdx.x] = sum;
    __syncthreads();
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) scratch[threadIdx.x] += scratch[threadIdx.x + half];
        __syncthreads();
    }
    return scratch[0];
}

// out[0] = sum of l.   l (n)   One block.
__global__ void sum_kernel(float *out, const float *l, int n) {
    __shared__ float scratch[threads];
    float sum = block_sum(scratch, n, [=](int i) { return l[i]; });
    if (threadIdx.x == 0) out[0] = sum;
}

// correct[0] += how many rows of y_hat have their (first) largest number at the label.   One block.
//   y_hat (N,classes)   y (N)
__global__ void count_correct_kernel(float *correct, const float *y_hat, const float *y, int N,
                                     int classes) {
    __shared__ float scratch[threads];
    float sum = block_sum(scratch, N, [=](int n) {
        int best = 0;
        for (int j = 1; j < classes; j++)
            if (y_hat[n * classes + j] > y_hat[n * classes + best]) best = j;
        return best == (int)y[n] ? 1.0f : 0.0f;
    });
    if (threadIdx.x == 0) correct[0] += sum;
}
void count_correct(const Tensor &correct, const Tensor &y_hat, const Tensor &y) {
    same_device("count_correct", {correct, y_hat, y});
    LAUNCH(count_correct_kernel<<<1, threads, 0, on(y.device)>>>(
        correct.ptr(), y_hat.ptr(), y.ptr(), y_hat.shape[0], y_hat.shape[1]));
}

// out[i] = parts[0][i] + parts[1][i] + ... + parts[k-1][i], added in this order; out may be a part.
// One thread per element; of emulated devices one for 16 neighbours, which a core adds at once.
constexpr int max_gpus = 64, neighbours_added = on_cpu ? 16 : 1;
struct Parts {
    const float *p[max_gpus];
};
__global__ void sum_parts_kernel(float *out, Parts parts, int k, int n) {
    const int first = (blockIdx.x * blockDim.x + threadIdx.x) * neighbours_added;
    const int count = min(neighbours_added, n - first);
    float sum[neighbours_added] = {};
    for (int c = 0; c < k; c++)
        for (int q = 0; q < count; q++) sum[q] += parts.p[c][first + q];
    for (int q = 0; q < count; q++) out[first + q] = sum[q];
}
void sum_(const Tensor &a, const std::vector<Tensor> &parts) {
    if (parts.size() > max_gpus) { // more than a launch takes: some of them first
        const auto next = parts.begin() + max_gpus;
        std::vector<Tensor> rest = {empty(a.shape, a.device)};
        sum_(rest[0], {parts.begin(), next});
        rest.insert(rest.end(), next, parts.end());
        return sum_(a, rest);
    }
    Parts pointers = {};
    for (size_t c = 0; c < parts.size(); c++) {
        same_device("sum_", {a, parts[c]});
        check_shape("sum_", size(a) == size(parts[c]), "tensors of one size", {a, parts[c]});
        pointers.p[c] = parts[c].ptr();
    }
    const int n = size(a);
    float *const sum = a.ptr();
    LAUNCH(sum_parts_kernel<<<blocks(n, threads * neighbours_added), threads, 0, on(a.device)>>>(
        sum, pointers, parts.size(), n));
}

// --- sgd
__global__ void sgd_kernel(float *param, const float *grad, int n, float lr, float batch_size) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) param[i] -= lr * grad[i] / batch_size;
}

// param -= lr * param.grad / batch_size, for each param that has a gradient
void simple_sgd(const std::vector<Tensor> &params, float lr, int batch_size) {
    for (const Tensor &p : params) {
        if (!p.grad) continue; // a buffer
        same_device("sgd", {params[0], p});
        const int n = size(p);
        LAUNCH(sgd_kernel<<<blocks(n), threads, 0, on(p.device)>>>(p.ptr(), p.grad->ptr(), n, lr,
                                                                   batch_size));
    }
}
void sgd(const std::vector<Tensor> &params, float lr, int batch_size) {
    const Part update("update");
    operators.sgd(params, lr, batch_size);
}

// --- softmax cross-entropy
// The sum of exp(z[j] - largest). It cannot overflow: it lies between 1 and `classes`.
__device__ inline float exp_sum(const float *z, int classes, float *largest) {
    float sum = 0;
    *largest = z[0];
    for (int j = 1; j < classes; j++) *largest = z[j] > *largest ? z[j] : *largest;
    for (int j = 0; j < classes; j++) sum += expf(z[j] - *largest);
    return sum;
}
// l[n] = log(sum over j of exp(y_hat[n,j])) - y_hat[n,y[n]], the largest logit subtracted from both
//   y_hat (N,classes)   y (N) class numbers   ->   l (N)
// One thread per sample.
__global__ void softmax_cross_entropy_kernel(float *l, const float *y_hat, const float *y, int N,
                                             int classes) {
    int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) return;
    const float *z = y_hat + n * classes;
    float largest;
    const float sum = exp_sum(z, classes, &largest);
    l[n] = logf(sum) - (z[(int)y[n]] - largest);
}
// dy_hat[n,j] = or += dl[n] * (softmax(y_hat[n])[j] - [j == y[n]])
__global__ void softmax_cross_entropy_backward_kernel(Target dy_hat, const float *dl,
                                                      const float *y_hat, const float *y, int N,
                                                      int classes) {
    int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) return;
    const float *z = y_hat + n * classes;
    float largest;
    const float sum = exp_sum(z, classes, &largest);
    for (int j = 0; j < classes; j++) {
        const float p = expf(z[j] - largest) / sum;
        dy_hat.store(n * classes + j, dl[n] * (p - (j == (int)y[n] ? 1.0f : 0.0f)));
    }
}

// y_hat (N,classes)   y (N)   ->   (N). Labels must be whole numbers from 0 to classes-1.
// Same as nn.CrossEntropyLoss(reduction='none')(y_hat, y); y gets no gradient.
Tensor softmax_cross_entropy(const Tensor &y_hat, const Tensor &y) {
    bool right = y_hat.shape.size() == 2 && y.shape == std::vector<int>{y_hat.shape[0]} &&
                 y_hat.shape[1] > 0;
    check_shape("softmax_cross_entropy", right, "(N,classes), (N)", {y_hat, y});
    const int N = y_hat.shape[0], classes = y_hat.shape[1], block = 64;
    Tensor l = output("softmax_cross_entropy", {y_hat, y}, {N});
    LAUNCH(softmax_cross_entropy_kernel<<<blocks(N, block), block, 0, on(y_hat.device)>>>(
        l.ptr(), y_hat.ptr(), y.ptr(), N, classes));
    record(l, [=] {
        LAUNCH(
            softmax_cross_entropy_backward_kernel<<<blocks(N, block), block, 0, on(y_hat.device)>>>(
                grad_of(y_hat), l.grad->ptr(), y_hat.ptr(), y.ptr(), N, classes));
    });
    return l;
}

// --- average and max pooling
// y[n,c,i,j] = the mean, or the largest, of X[n,c,i*S+u,j*S+v] over u < KH, v < KW

struct PoolShape {
    int P, H, W, OH, OW, KH, KW, S; // P = N*C planes; OH = (H - KH)/S + 1, rounded down
    int max;                        // 1: the largest, 0: the mean
};
// Where the largest number of the window at x lies: the first of several; NaN is larger than any
__device__ inline int largest(const float *x, const PoolShape &s) {
    int best = 0;
    for (int u = 0; u < s.KH; u++)
        for (int v = 0; v < s.KW; v++) {
            const int at = u * s.W + v;
            if (x[best] == x[best] && !(x[at] <= x[best])) best = at;
        }
    return best;
}
// X (P,H,W)   ->   y (P,OH,OW)
// One thread per element of y.
__global__ void pool2d_kernel(float *y, const float *X, PoolShape s) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    const int j = at % s.OW, i = at / s.OW % s.OH, p = at / s.OW / s.OH;
    if (p >= s.P) return;
    const float *x = X + (p * s.H + i * s.S) * s.W + j * s.S;
    float sum = 0;
    for (int u = 0; u < s.KH && !s.max; u++)
        for (int v = 0; v < s.KW; v++) sum += x[u * s.W + v];
    y[at] = s.max ? x[largest(x, s)] : sum / (s.KH * s.KW);
}
// dX[h,w] = or += the sum of what the windows (i,j) that hold (h,w) give it: of each one's dy an
// equal part, or all to its largest number
//   dy (P,OH,OW)   X (P,H,W)   ->   dX (P,H,W)
// One thread per element of dX.
__global__ void pool2d_backward_kernel(Target dX, const float *dy, const float *X, PoolShape s) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    const int w = at % s.W, h = at / s.W % s.H, p = at / s.W / s.H;
    if (p >= s.P) return;
    float sum = 0;
    for (int i = min(h / s.S, s.OH - 1); i >= 0 && i * s.S + s.KH > h; i--)
        for (int j = min(w / s.S, s.OW - 1); j >= 0 && j * s.S + s.KW > w; j--) {
            const float g = dy[(p * s.OH + i) * s.OW + j];
            const int corner = (p * s.H + i * s.S) * s.W + j * s.S; // of the window, in X
            if (!s.max) sum += g / (s.KH * s.KW);
            else if (largest(X + corner, s) == at - corner) sum += g;
        }
    dX.store(at, sum);
}

Tensor simple_pool2d(const char *op, const Tensor &X, const PoolShape &s) {
    Tensor y = output(op, {X}, {X.shape[0], X.shape[1], s.OH, s.OW});
    LAUNCH(pool2d_kernel<<<blocks(size(y)), threads, 0, on(X.device)>>>(y.ptr(), X.ptr(), s));
    record(y, [=] {
        LAUNCH(pool2d_backward_kernel<<<blocks(size(X)), threads, 0, on(X.device)>>>(
            grad_of(X), y.grad->ptr(), X.ptr(), s));
    });
    return y;
}
static Tensor pool2d(const char *op, const Tensor &X, int KH, int KW, int S, bool max) {
    bool right =
        X.shape.size() == 4 && S > 0 && KH > 0 && KW > 0 && X.shape[2] >= KH && X.shape[3] >= KW;
    check_shape(op, right, "(N,C,H,W) with kernel_size <= H and W", {X});
    const int P = X.shape[0] * X.shape[1], H = X.shape[2], W = X.shape[3];
    return operators.pool2d(op, X, {P, H, W, (H - KH) / S + 1, (W - KW) / S + 1, KH, KW, S, max});
}

// X (N,C,H,W)   ->   y (N,C,OH,OW). Same as F.avg_pool2d(X, kernel_size, stride).
Tensor avg_pool2d(const Tensor &X, int kernel_size, int stride) {
    return pool2d("avg_pool2d", X, kernel_size, kernel_size, stride, false);
}
// X (N,C,H,W)   ->   y (N,C,OH,OW). Same as F.max_pool2d(X, kernel_size, stride).
Tensor max_pool2d(const Tensor &X, int kernel_size, int stride) {
    return pool2d("max_pool2d", X, kernel_size, kernel_size, stride, true);
}
// X (N,C,H,W)   ->   y (N,C), the mean of each plane
// Same as nn.AdaptiveAvgPool2d((1,1)) and nn.Flatten().
Tensor global_avg_pool2d(const Tensor &X) {
    check_shape("global_avg_pool2d",
                X.shape.size() == 4 && X.shape[1] > 0 && X.shape[2] > 0 && X.shape[3] > 0,
                "(N,C,H,W)", {X});
    const int H = X.shape[2], W = X.shape[3];
    return reshape(pool2d("global_avg_pool2d", X, H, W, std::max(H, W), false),
                   {X.shape[0], X.shape[1]});
}

// --- convolution and dense layers
// As in PyTorch, a convolution is a cross-correlation. A dense layer is the convolution of a 1x1
// image with a 1x1 kernel. Three sums are needed, for y, dX, and dW with db.
struct ConvShape {
    int N, C, H, W, O, K, stride, padding, OH, OW;
    // Element (k,o) of W, k = (c*K + u)*K + v, lies at W[k*W_stride_k + o*W_stride_o]: a
    // convolution's W is (O,C,K,K), a dense layer's (C,O)
    int W_stride_k, W_stride_o;
};
__device__ inline float pixel(const float *X, const ConvShape &s, int n, int c, int h, int w) {
    const bool inside = h >= 0 && h < s.H && w >= 0 && w < s.W; // else it is padding
    return inside ? X[((n * s.C + c) * s.H + h) * s.W + w] : 0;
}

// y[n,o,i,j] = b[o] + sum over c,u,v of X[n,c,i*stride+u-padding,j*stride+v-padding] * W[o,c,u,v]
//   X (N,C,H,W)   W (O,C,K,K)   b (O)   ->   y (N,O,OH,OW)
// One thread per output element; neighbours in j read neighbours in X.
__global__ void conv2d_kernel(float *y, const float *X, const float *W, const float *b,
                              ConvShape s) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    const int j = at % s.OW, i = at / s.OW % s.OH, o = at / s.OW / s.OH % s.O;
    const int n = at / s.OW / s.OH / s.O;
    if (n >= s.N) return;
    float sum = b[o];
    for (int c = 0, k = 0; c < s.C; c++)
        for (int u = 0; u < s.K; u++)
            for (int v = 0; v < s.K; v++, k++)
                sum +=
                    pixel(X, s, n, c, i * s.stride + u - s.padding, j * s.stride + v - s.padding) *
                    W[k * s.W_stride_k + o * s.W_stride_o];
    y[at] = sum;
}
// dX[n,c,h,w] = or += sum of dy[n,o,i,j] * W[o,c,u,v] over o and all i,j,u,v with
//   i*stride+u-padding = h, j*stride+v-padding = w
// One thread per element of dX.
__global__ void conv2d_backward_input_kernel(Target dX, const float *dy, const float *W,
                                             ConvShape s) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    const int w = at % s.W + s.padding, h = at / s.W % s.H + s.padding, c = at / s.W / s.H % s.C;
    const int n = at / s.W / s.H / s.C;
    if (n >= s.N) return;
    float sum = 0;
    for (int o = 0; o < s.O; o++)
        for (int i = h / s.stride; i >= 0 && i * s.stride + s.K > h; i--)
            for (int j = w / s.stride; j >= 0 && j * s.stride + s.K > w; j--) {
                if (i >= s.OH || j >= s.OW) continue; // no window begins there
                const int k = (c * s.K + h - i * s.stride) * s.K + w - j * s.stride;
                sum += dy[((n * s.O + o) * s.OH + i) * s.OW + j] *
                       W[k * s.W_stride_k + o * s.W_stride_o];
            }
    dX.store(at, sum);
}
// dW[o,c,u,v] = or += sum over n,i,j of X[n,c,i*stride+u-padding,j*stride+v-padding] * dy[n,o,i,j]
// db[o] = or += sum over n,i,j of dy[n,o,i,j]: it is dW's row k = C*K*K, for which X counts as 1
// One thread per element of dW or db.
__global__ void conv2d_backward_weights_kernel(Target dW, Target db, const float *dy,
                                               const float *X, ConvShape s) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x, terms = s.C * s.K * s.K;
    const int o = at / (terms + 1), k = at % (terms + 1);
    const int c = k / s.K / s.K, u = k / s.K % s.K - s.padding, v = k % s.K - s.padding;
    if (o >= s.O) return;
    float sum = 0;
    for (int n = 0; n < s.N; n++)
        for (int i = 0; i < s.OH; i++)
            for (int j = 0; j < s.OW; j++)
                sum += dy[((n * s.O + o) * s.OH + i) * s.OW + j] *
                       (k < terms ? pixel(X, s, n, c, i * s.stride + u, j * s.stride + v) : 1);
    if (k < terms && dW.data) dW.store(k * s.W_stride_k + o * s.W_stride_o, sum);
    if (k == terms && db.data) db.store(o, sum);
}

Tensor simple_conv(const char *op, const Tensor &X, const Tensor &W, const Tensor &b,
                   const ConvShape &s, const std::vector<int> &y_shape) {
    Tensor y = output(op, {X, W, b}, y_shape);
    LAUNCH(conv2d_kernel<<<blocks(size(y)), threads, 0, on(X.device)>>>(y.ptr(), X.ptr(), W.ptr(),
                                                                        b.ptr(), s));
    record(y, [=] {
        const int weights = size(W) + size(b), pixels = size(X);
        if (W.grad || b.grad)
            LAUNCH(conv2d_backward_weights_kernel<<<blocks(weights), threads, 0, on(X.device)>>>(
                grad_of(W), grad_of(b), y.grad->ptr(), X.ptr(), s));
        if (X.grad)
            LAUNCH(conv2d_backward_input_kernel<<<blocks(pixels), threads, 0, on(X.device)>>>(
                grad_of(X), y.grad->ptr(), W.ptr(), s));
    });
    return y;
}
static Tensor conv(const char *op, const Tensor &X, const Tensor &W, const Tensor &b,
                   const ConvShape &s, const std::vector<int> &y_shape) {
    if (W.grad && W.grad == b.grad) error("%s: W and b share a gradient, each wants its own", op);
    return operators.conv(op, X, W, b, s, y_shape);
}

// X (N,C,H,W)   W (O,C,K,K)   b (O)   ->   y (N,O,OH,OW)
//   OH = (H + 2*padding - K)/stride + 1, rounded down; OW likewise
// Same as F.conv2d(X, W, b, stride, padding); PyTorch's gradients.
Tensor conv2d(const Tensor &X, const Tensor &W, const Tensor &b, int stride, int padding) {
    bool right = X.shape.size() == 4 && W.shape.size() == 4 && W.shape[1] == X.shape[1] &&
                 W.shape[2] == W.shape[3] && b.shape == std::vector<int>{W.shape[0]} &&
                 stride > 0 && padding >= 0 && size(W) > 0 && X.shape[2] > 0 && X.shape[3] > 0 &&
                 X.shape[2] + 2 * padding >= W.shape[2] && X.shape[3] + 2 * padding >= W.shape[2];
    check_shape("conv2d", right,
                "(N,C,H,W), (O,C,K,K), (O) with K <= H and W + 2*padding, stride > 0, padding >= 0",
                {X, W, b});
    const int N = X.shape[0], C = X.shape[1], H = X.shape[2], width = X.shape[3];
    const int O = W.shape[0], K = W.shape[2];
    const int OH = (H + 2 * padding - K) / stride + 1, OW = (width + 2 * padding - K) / stride + 1;
    return conv("conv2d", X, W, b, {N, C, H, width, O, K, stride, padding, OH, OW, 1, C * K * K},
                {N, O, OH, OW});
}

// X (N,C)   W (C,O)   b (O)   ->   X @ W + b (N,O)
Tensor linear(const Tensor &X, const Tensor &W, const Tensor &b) {
    bool right = X.shape.size() == 2 && W.shape.size() == 2 && W.shape[0] == X.shape[1] &&
                 b.shape == std::vector<int>{W.shape[1]} && size(W) > 0;
    check_shape("linear", right, "(N,C), (C,O), (O) with C and O > 0", {X, W, b});
    const int N = X.shape[0], C = X.shape[1], O = W.shape[1];
    return conv("linear", X, W, b, {N, C, 1, 1, O, 1, 1, 0, 1, 1, O, 1}, {N, O});
}

// --- batch normalization
// y = (X - mean) / sqrt(var + eps) * gamma + beta, for each channel.

constexpr float bn_eps = 1e-5f, bn_momentum = 0.1f; // momentum: the weight of new statistics
struct BatchNormShape {
    int N, C, size; // size = H*W of a plane
    // Where the i-th number of channel c lies, and the channel of the number at `at`
    __device__ int in(int c, int i) const { return (i / size * C + c) * size + i % size; }
    __device__ int channel(int at) const { return at / size % C; }
};
struct BatchNorm { // X (N,C,size), all else (C)
    const float *X, *gamma, *beta;
    float *mean, *var, *running_mean, *running_var;
};

// mean and var of each channel; running = (1-momentum) * running + momentum * new
// One block per channel.
__global__ void batch_norm_moments_kernel(BatchNorm a, BatchNormShape s) {
    __shared__ float scratch[threads];
    const int c = blockIdx.x, n = s.N * s.size;
    const float mean = block_sum(scratch, n, [=](int i) { return a.X[s.in(c, i)]; }) / n;
    __syncthreads(); // until all have read the sum
    const float squares = block_sum(scratch, n, [=](int i) {
        const float d = a.X[s.in(c, i)] - mean;
        return d * d;
    });
    if (threadIdx.x > 0) return;
    a.mean[c] = mean;
    a.var[c] = squares / n;
    const float unbiased = squares / (n > 1 ? n - 1 : 1);
    a.running_mean[c] = (1 - bn_momentum) * a.running_mean[c] + bn_momentum * mean;
    a.running_var[c] = (1 - bn_momentum) * a.running_var[c] + bn_momentum * unbiased;
}
// y = (X - mean) * gamma / sqrt(var + eps) + beta   One thread per element.
__global__ void batch_norm_kernel(float *y, BatchNorm a, BatchNormShape s) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x, c = s.channel(at);
    if (at >= s.N * s.C * s.size) return;
    y[at] = (a.X[at] - a.mean[c]) * (a.gamma[c] / sqrtf(a.var[c] + bn_eps)) + a.beta[c];
}
// sum (C) and product (C) are, for each channel, the sums of dy and of dy * (X - mean);
// dbeta = or += sum, dgamma = or += product / sqrt(var + eps), where not null
// One block per channel.
__global__ void batch_norm_sums_kernel(float *sum, float *product, Target dgamma, Target dbeta,
                                       const float *dy, BatchNorm a, BatchNormShape s) {
    __shared__ float scratch[threads];
    const int c = blockIdx.x, n = s.N * s.size;
    const float m = a.mean[c];
    const float dy_sum = block_sum(scratch, n, [=](int i) { return dy[s.in(c, i)]; });
    __syncthreads(); // until all have read it
    const float dot =
        block_sum(scratch, n, [=](int i) { return dy[s.in(c, i)] * (a.X[s.in(c, i)] - m); });
    if (threadIdx.x > 0) return;
    sum[c] = dy_sum;
    product[c] = dot;
    if (dgamma.data) dgamma.store(c, dot / sqrtf(a.var[c] + bn_eps));
    if (dbeta.data) dbeta.store(c, dy_sum);
}
// dX = or += gamma / sqrt(var + eps) * (dy - sum/M - (X - mean) / (var + eps) * product/M), where
// M = N*size: mean and var depend on X, too.   One thread per element.
__global__ void batch_norm_backward_kernel(Target dX, const float *dy, const float *sum,
                                           const float *product, BatchNorm a, BatchNormShape s) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x, c = s.channel(at);
    if (at >= s.N * s.C * s.size) return;
    const float M = (float)s.N * s.size, var = a.var[c] + bn_eps;
    const float slope = product[c] / M / var;
    dX.store(at, a.gamma[c] / sqrtf(var) * (dy[at] - sum[c] / M - (a.X[at] - a.mean[c]) * slope));
}

Tensor simple_batch_norm(const Tensor &X, const Tensor &gamma, const Tensor &beta,
                         const Tensor &running_mean, const Tensor &running_var) {
    const std::vector<Tensor> inputs = {X, gamma, beta, running_mean, running_var};
    Tensor y = output("batch_norm", {X, gamma, beta}, X.shape);
    const int N = X.shape[0], C = X.shape[1];
    const Tensor mean = recording ? full({C}, 0, X.device) : running_mean;
    const Tensor var = recording ? full({C}, 0, X.device) : running_var;
    const BatchNormShape s = {N, C, X.shape[2] * X.shape[3]};
    const BatchNorm a = {X.ptr(),   gamma.ptr(),        beta.ptr(),       mean.ptr(),
                         var.ptr(), running_mean.ptr(), running_var.ptr()};
    const int n = size(X);
    if (recording && N > 0)
        LAUNCH(batch_norm_moments_kernel<<<C, threads, 0, on(X.device)>>>(a, s));
    LAUNCH(batch_norm_kernel<<<blocks(n), threads, 0, on(X.device)>>>(y.ptr(), a, s));
    record(y, [=] {
        (void)inputs, (void)mean, (void)var; // captured, because `a` points to their memory
        const float *dy = y.grad->ptr();
        const Tensor sum = empty({C}, X.device), product = empty({C}, X.device);
        // In this order, so that dbeta is added where gamma and beta are the same tensor
        const Target dgamma = grad_of(gamma), dbeta = grad_of(beta);
        LAUNCH(batch_norm_sums_kernel<<<C, threads, 0, on(X.device)>>>(sum.ptr(), product.ptr(),
                                                                       dgamma, dbeta, dy, a, s));
        if (!X.grad) return;
        LAUNCH(batch_norm_backward_kernel<<<blocks(n), threads, 0, on(X.device)>>>(
            grad_of(X), dy, sum.ptr(), product.ptr(), a, s));
    });
    return y;
}
// X (N,C,H,W)   gamma, beta, running_mean, running_var (C)   ->   y (N,C,H,W)
// While autograd records, mean and var are those of X, this device's shard, and the running ones
// move a tenth of the way to them (running_var's divisor is N*H*W-1, or 1 for a single value).
// Under NoGrad they are the running ones. An empty shard changes nothing.
// Same as F.batch_norm(X, running_mean, running_var, gamma, beta, training).
Tensor batch_norm(const Tensor &X, const Tensor &gamma, const Tensor &beta,
                  const Tensor &running_mean, const Tensor &running_var) {
    const std::vector<int> channels = {X.shape.size() == 4 ? X.shape[1] : 0};
    bool right = X.shape.size() == 4 && X.shape[1] > 0 && X.shape[2] > 0 && X.shape[3] > 0;
    for (const Tensor &t : {gamma, beta, running_mean, running_var})
        right = right && t.shape == channels;
    const std::vector<Tensor> inputs = {X, gamma, beta, running_mean, running_var};
    check_shape("batch_norm", right, "(N,C,H,W), (C), (C), (C), (C)", inputs);
    same_device("batch_norm", inputs);
    return operators.batch_norm(X, gamma, beta, running_mean, running_var);
}

// --- the table, filled
Operators operators = {"simple",
                       1e-3f,
                       simple_conv,
                       simple_relu,
                       simple_add,
                       simple_pool2d,
                       simple_batch_norm,
                       simple_sgd,
                       /* flush: */ nullptr};

// ---------------------------------------------------------------------------------------------
// 9. Autograd
// The tutorial's `autograd.record()` and `l.backward()`. Each device has a tape: the backward of
// every operator that ran on it, in order. backward(l) runs it in reverse.

struct TapeEntry {
    std::shared_ptr<Tensor> grad; // of the operator's result
    std::function<void()> backward;
};
std::vector<TapeEntry> &tape_of(Device device);

bool recording = true;
struct NoGrad { // while one exists, nothing goes on the tape
    bool before = recording;
    NoGrad() { recording = false; }
    ~NoGrad() { recording = before; }
};

struct Event { // a CUDA event of a device
    cudaEvent_t handle = nullptr;
    explicit Event(Device device) {
        on(device);
        CHECK(cudaEventCreateWithFlags(&handle, cudaEventDisableTiming));
    }
    Event(const Event &) = delete;
    ~Event() {
        if (handle) cudaEventDestroy(handle);
    }
};

void attach_grad(Tensor &t) { t.grad = std::make_shared<Tensor>(full(t.shape, 0, t.device)); }
// The gradients of all params with requires_grad are contiguous: an allreduce can take them as one.
void attach_grad(std::vector<Tensor> &params) {
    if (params.empty()) return;
    int n = 0;
    for (const Tensor &p : params) n += p.requires_grad ? size(p) : 0;
    Tensor all = full({n}, 0, params[0].device);
    n = 0;
    for (Tensor &p : params) {
        if (!p.requires_grad) continue;
        p.grad = std::make_shared<Tensor>(rows(all, n, n + size(p)));
        p.grad->shape = p.shape;
        p.grad->complete = std::make_shared<Event>(p.device);
        n += size(p);
    }
}

struct Call { // of an operator, for make summary
    std::string op;
    std::vector<Tensor> inputs;
    Tensor y;
};
static std::vector<Call> *calls = nullptr; // null: nobody wants them

// A new tensor on the inputs' device. It wants a gradient if one of them does; the gradient gets
// its memory when the backward pass first writes it.
Tensor output(const char *op, const std::vector<Tensor> &inputs, std::vector<int> shape) {
    same_device(op, inputs);
    Tensor y = empty(shape, inputs[0].device);
    for (const Tensor &X : inputs)
        if (recording && X.grad)
            y.grad = std::make_shared<Tensor>(Tensor{y.device, y.shape, nullptr, nullptr});
    if (calls) calls->push_back({op, inputs, y});
    return y;
}
void record(const Tensor &y, std::function<void()> backward) {
    if (y.grad) tape_of(y.device).push_back({y.grad, std::move(backward)});
}

static unsigned pass = 0;                             // backward passes so far
static std::vector<std::shared_ptr<Event>> completes; // of the gradients that entry.backward writes

// Where an operator's backward puts dX. The first to write it in a pass overwrites it (=), later
// ones add to it (+=).
Target grad_of(const Tensor &X) {
    if (!X.grad) return {nullptr};
    Tensor &g = *X.grad;
    const float *sum = g.written == pass ? g.ptr() : nullptr; // of the parts so far
    // New memory if there is none yet, or if an operator with notes lets another gradient share it
    if (!g.data || (g.note && g.data.use_count() > 1)) g.data = empty(g.shape, g.device).data;
    g.note = nullptr;
    g.written = pass;
    if (g.complete) completes.push_back(g.complete);
    return {g.ptr(), sum};
}

static void gradient_is_ready(const Event &complete, Device device) {
    CHECK(cudaEventRecord(complete.handle, on(device)));
}

// Run the tape of l's device in reverse and empty it, which frees memory on the way. Gradients are
// those of sum(l); they are overwritten, not accumulated (PyTorch adds). An event is recorded after
// each write of a parameter's gradient; if there are several, waits are for the last one.
void backward(const Tensor &l) {
    auto &tape = tape_of(l.device);
    auto made_l = [&](const TapeEntry &entry) { return entry.grad == l.grad; };
    if (!l.grad || std::none_of(tape.begin(), tape.end(), made_l))
        error(
            "backward: no operator on %s was recorded that made it, or a backward pass since then "
            "used it up",
            str(l.device).c_str());
    pass++;
    const Part part("backward");
    const int n = size(l);
    LAUNCH(fill_kernel<<<blocks(n), threads, 0, on(l.device)>>>(grad_of(l), 1, n));
    while (!tape.empty()) {
        TapeEntry entry = std::move(tape.back());
        tape.pop_back();
        if (entry.grad->written == pass) entry.backward(); // else l does not depend on it
        for (const auto &event : completes) gradient_is_ready(*event, l.device);
        completes.clear();
    }
}
const Tensor &gradient(const Tensor &param) {
    if (!param.grad) error("a parameter has no gradient: does get_params call attach_grad?");
    return *param.grad;
}
void wait_for_gradient(const Tensor &grad) {
    CHECK(cudaStreamWaitEvent(on(grad.device), grad.complete->handle, 0));
}

float *Tensor::ptr() const {
    if (note) operators.flush(device, note);
    if (device.id >= 0) touch(size(*this));
    return data.get();
}

// ---------------------------------------------------------------------------------------------
// 10. The other two networks        tutorials: "Concise Implementation for Multiple GPUs", the lab
// Networks made of blocks, as in gluon.nn and torch.nn. A block describes its parameters; forward
// takes them as params.size() tensors, starting at `params`. So net.forward(X, params.data()) is
// here what lenet(X, params) is in section 2.

void stop_requested(); // ends the program if Ctrl-C was pressed

static std::mt19937 rng; // seeded by run_program
template <class Distribution>
static Tensor random(std::vector<int> shape, Distribution distribution) { // on the host
    Tensor t = empty(std::move(shape), cpu());
    for (int i = 0; i < size(t); i++) t.ptr()[i] = distribution(rng);
    return t;
}
Tensor normal(float scale, std::vector<int> shape) {
    if (!(scale >= 0)) error("normal: the scale must be at least 0, not %g", scale);
    if (scale == 0) return full(shape, 0, cpu()); // a normal_distribution would refuse it
    return random(shape, std::normal_distribution<float>(0, scale));
}
static Tensor uniform(float scale, std::vector<int> shape) { // U(-scale, scale)
    return random(shape, std::uniform_real_distribution<float>(-scale, scale));
}

typedef std::function<Tensor(std::vector<int> shape)> Init; // makes a parameter on the host
struct Param {
    std::string name; // such as conv0.weight, which is saved as conv0.weight.npy
    std::vector<int> shape;
    Init init;                 // null: the one that network() is given
    bool requires_grad = true; // false: a buffer
};
struct Block {
    std::vector<Param> params;
    std::function<Tensor(const Tensor &X, const Tensor *params)> forward;
};

static Init constant(float value) {
    return [=](std::vector<int> shape) { return full(shape, value, cpu()); };
}
static Block Conv2d(int in_channels, int channels, int kernel_size, int stride = 1,
                    int padding = 0) {
    return {{{"conv.weight", {channels, in_channels, kernel_size, kernel_size}, nullptr},
             {"conv.bias", {channels}, constant(0)}},
            [=](const Tensor &X, const Tensor *params) {
                return conv2d(X, params[0], params[1], stride, padding);
            }};
}
static Block Linear(int in_features, int out_features) {
    return {{{"dense.weight", {in_features, out_features}, nullptr},
             {"dense.bias", {out_features}, constant(0)}},
            [](const Tensor &X, const Tensor *params) { return linear(X, params[0], params[1]); }};
}
static Block BatchNorm2d(int channels) {
    return {{{"bn.weight", {channels}, constant(1)},
             {"bn.bias", {channels}, constant(0)},
             {"bn.running_mean", {channels}, constant(0), false},
             {"bn.running_var", {channels}, constant(1), false}},
            [](const Tensor &X, const Tensor *params) {
                return batch_norm(X, params[0], params[1], params[2], params[3]);
            }};
}
static Block layer(std::function<Tensor(const Tensor &X)> forward) { // without parameters
    return {{}, [=](const Tensor &X, const Tensor *) { return forward(X); }};
}
static Block ReLU() { return layer(relu); }
static Block MaxPool2d(int kernel_size, int stride) {
    return layer([=](const Tensor &X) { return max_pool2d(X, kernel_size, stride); });
}
static Block GlobalAvgPool2d() { return layer(global_avg_pool2d); }
static Block Flatten() {
    return layer([](const Tensor &X) { return reshape(X, {X.shape[0], -1}); });
}

// One block after another
static Block sequential(const std::vector<Block> &blocks) {
    Block all;
    for (const Block &b : blocks)
        all.params.insert(all.params.end(), b.params.begin(), b.params.end());
    all.forward = [=](Tensor X, const Tensor *params) {
        for (const Block &b : blocks) {
            X = b.forward(X, params);
            params += b.params.size();
        }
        return X;
    };
    return all;
}

// A whole network: number the layers in their parameters' names, and give the weights their init.
static Block network(Block net, Init init) {
    std::map<std::string, int> layers; // of each kind, so far
    for (Param &p : net.params) {
        const size_t point = p.name.find('.');
        const std::string kind = p.name.substr(0, point), what = p.name.substr(point);
        if (what == ".weight") layers[kind]++; // a layer's first parameter
        p.name = kind + std::to_string(layers[kind] - 1) + what;
        if (!p.init) p.init = init;
    }
    return net;
}

// relu(Y + X), where Y is two convolutions of X; with use_1x1conv, X passes through a third one
Block Residual(int in_channels, int num_channels, bool use_1x1conv = false, int strides = 1) {
    Block convs = sequential(
        {Conv2d(in_channels, num_channels, 3, strides, 1), BatchNorm2d(num_channels), ReLU(),
         Conv2d(num_channels, num_channels, 3, 1, 1), BatchNorm2d(num_channels)});
    Block skip = use_1x1conv ? Conv2d(in_channels, num_channels, 1, strides) : sequential({});
    Block residual = sequential({convs, skip}); // for the parameters of both
    residual.forward = [=](const Tensor &X, const Tensor *params) {
        Tensor Y = convs.forward(X, params);
        return relu(add(Y, skip.forward(X, params + convs.params.size())));
    };
    return residual;
}

// A slightly modified ResNet-18 model: for small images. On k devices it does not learn what it
// learns on one: batch norm takes mean and variance over a device's n/k samples, not over all n.
Block resnet18(int num_classes, int in_channels = 1) {
    auto resnet_block = [](int in_channels, int num_channels, int num_residuals,
                           bool first_block = false) {
        std::vector<Block> blk;
        for (int i = 0; i < num_residuals; i++)
            if (i == 0 && !first_block) blk.push_back(Residual(in_channels, num_channels, true, 2));
            else blk.push_back(Residual(num_channels, num_channels));
        return sequential(blk);
    };
    // This model uses a smaller convolution kernel, stride, and padding and removes the max-pooling
    // layer
    Block net = sequential({Conv2d(in_channels, 64, 3, 1, 1), BatchNorm2d(64), ReLU(),
                            resnet_block(64, 64, 2, true), resnet_block(64, 128, 2),
                            resnet_block(128, 256, 2), resnet_block(256, 512, 2), GlobalAvgPool2d(),
                            Linear(512, num_classes)});
    return network(net, [](std::vector<int> shape) { return normal(0.01f, shape); });
}

// The lab's network: LeNet with max pooling
Block lab_cnn() {
    Block net = sequential({Conv2d(1, 20, 3), ReLU(), MaxPool2d(2, 2), Conv2d(20, 50, 5), ReLU(),
                            MaxPool2d(2, 2), Flatten(), Linear(800, 128), ReLU(), Linear(128, 10)});
    return network(net, [](std::vector<int> shape) { return uniform(0.07f, shape); });
}

// What the chapters train with; on k devices, batch + k * batch_of_each samples, and lr likewise.
struct Model {
    const char *name;
    int batch, batch_of_each;
    float lr, lr_of_each;
    int epochs;
};
static const Model models[] = {{"lenet", 256, 0, 0.2f, 0, 10},
                               {"resnet18", 0, 256, 0, 0.1f, 10},
                               {"lab_cnn", 0, 64, 0.3f, 0, 5}};

// MODEL's network, its parameters on the host (a seed always gives the same ones) and their names.
void init_model() {
    if (options.model == "lenet") return init_params(); // net and param_names are lenet's at first
    const Block block = options.model == "resnet18" ? resnet18(10) : lab_cnn();
    params.clear();
    param_names.clear();
    for (const Param &p : block.params) {
        params.push_back(p.init(p.shape));
        params.back().requires_grad = p.requires_grad;
        param_names.push_back(p.name);
    }
    net = [=](const Tensor &X, const std::vector<Tensor> &params) {
        return block.forward(X, params.data());
    };
}

// The test accuracy, computed on all devices: each sample counts once. All use the running
// statistics of batch norm of device 0, so that the result is that of this device alone.
float evaluate_accuracy_gpus(const Net &net, const std::vector<std::vector<Tensor>> &device_params,
                             DataIter &test_iter, const std::vector<Device> &devices) {
    NoGrad guard;
    auto params = device_params;
    for (size_t i = 0; i < params[0].size(); i++) {
        if (params[0][i].requires_grad) continue;
        const Tensor host = copyto(params[0][i], cpu());
        for (size_t c = 0; c < devices.size(); c++) params[c][i] = copyto(host, devices[c]);
    }
    std::vector<Tensor> corrects;
    for (Device d : devices) corrects.push_back(full({1}, 0, d));
    Tensor X, y;
    test_iter.reset();
    while (test_iter.next(X, y)) {
        stop_requested();
        auto [X_shards, y_shards] = split_batch(X, y, devices);
        for (size_t c = 0; c < devices.size(); c++)
            count_correct(corrects[c], net(X_shards[c], params[c]), y_shards[c]);
    }
    double correct = 0;
    for (const Tensor &t : corrects) correct += to_host(t)[0];
    return correct / test_iter.X.shape[0];
}

// The same on one device: net(X) is the network with that device's parameters.
float evaluate_accuracy_gpu(const std::function<Tensor(const Tensor &)> &net, DataIter &test_iter,
                            Device device) {
    auto one = [&](const Tensor &X, const std::vector<Tensor> &) { return net(X); };
    return evaluate_accuracy_gpus(one, {{}}, test_iter, {device});
}

// A replica of the parameters on each device.
static std::vector<std::vector<Tensor>> replicate(const std::vector<Device> &devices) {
    std::vector<std::vector<Tensor>> device_params;
    for (Device d : devices) device_params.push_back(get_params(params, d));
    return device_params;
}

// Print the network's output for each device's shard.
static void print_outputs(const std::vector<Tensor> &shards,
                          const std::vector<std::vector<Tensor>> &device_params) {
    NoGrad guard;
    for (size_t c = 0; c < shards.size(); c++)
        printf("%s\n", to_string(net(shards[c], device_params[c])).c_str());
}
// Channel 0 of the first convolution's weight, or of its gradient.
static std::string channel0(const Tensor &weight) {
    return to_string(reshape(rows(weight, 0, 1), {1, weight.shape[2], weight.shape[3]}));
}

// The concise chapter's: parameters on all devices, a forward pass, some of the first weights.
void demos_resnet18(int num_gpus) {
    const std::vector<Device> devices = first_devices(num_gpus);
    const auto device_params = replicate(devices); // net.initialize(ctx=devices)
    Tensor x = empty({std::max(4, num_gpus), 1, 28, 28}, cpu());
    std::mt19937 random(options.seed);
    for (int i = 0; i < size(x); i++)
        x.ptr()[i] = std::uniform_real_distribution<float>(0, 1)(random);
    print_outputs(split_and_load(x, devices), device_params);
    auto on_host = [](const auto &params) { return params[0].device.id < 0; };
    if (std::none_of(device_params.begin(), device_params.end(), on_host)) // weight.data()
        printf("not initialized on cpu\n");
    for (const auto &params : device_params) printf("%s\n", channel0(params[0]).c_str());
}

// The lab's: the network's output for two images per device; some of its first weights, which are
// equal on all devices; and their gradients, which are not.
void demos_lab_cnn(int num_gpus) {
    const std::vector<Device> devices = first_devices(num_gpus);
    const auto device_params = replicate(devices);
    Tensor X, y;
    load_data_fashion_mnist(2 * num_gpus).first.next(X, y); // in the file's order
    auto [data, label] = split_batch(X, y, devices);
    print_outputs(data, device_params);
    for (size_t c = 0; c < devices.size(); c++)
        printf("=== channel 0 of the first conv on %s ===\n%s\n", str(devices[c]).c_str(),
               channel0(device_params[c][0]).c_str());
    for (size_t c = 0; c < devices.size(); c++) {
        backward(loss(net(data[c], device_params[c]), label[c]));
        printf("=== grad of channel 0 of the first conv2d on %s ===\n%s\n", str(devices[c]).c_str(),
               channel0(gradient(device_params[c][0])).c_str());
    }
    printf("Running on %s\nBatch size is %d\n", str(devices).c_str(), options.batch);
}

// ---------------------------------------------------------------------------------------------
// 11. Devices and memory
// k logical devices on the GPUs there are, their streams, the memory of tensors, and what is said
// when CUDA fails.
//
// A program may include this file, as its tests do. These seams are meant for that, and no others:
//   MGPU_NO_MAIN   defined before, leaves main out
//   LAUNCH, touch  may be defined before (section 7); a Part is an NVTX range: forward is what
//                  stands before "backward", "sum" and "update"
//   operators      the table of kernels (section 8); Tensor::note is for who fills it
//   exchange       what train_batch does with the gradients (section 5)
//   flags          the table of options (section 14)

struct Gpu { // a logical device
    int physical;
    Stream streams[2];           // of computation, and of communication (CommStreams)
    std::map<int, Stream> links; // for messages from each device
    std::map<size_t, std::vector<float *>> free_blocks[2]; // a free list per (stream, bytes)
    std::vector<TapeEntry> tape;
    size_t bytes = 0, peak_bytes = 0; // of device memory taken from CUDA, now and ever
};
static std::vector<Gpu> &gpus = *new std::vector<Gpu>; // never destroyed: tensors may outlive main

static Gpu &state(Device device) {
    if (device.id < 0 || device.id >= (int)gpus.size())
        error("there is no %s: the program runs on %zu devices", str(device).c_str(), gpus.size());
    return gpus[device.id];
}
Device try_gpu(int i) { return state(gpu(i)), gpu(i); }
int physical(Device device) { return state(device).physical; }
std::vector<TapeEntry> &tape_of(Device device) { return state(device).tape; }
std::string str(Device device) {
    return device.id < 0 ? "cpu" : "gpu(" + std::to_string(device.id) + ")";
}
static std::string str(int n) { return std::to_string(n); }
static std::string str(const std::string &s) { return s; }
static std::string str(const Tensor &X) { return str(X.shape); }
template <class T>
static std::string listed(const std::vector<T> &list, const char *separator) { // 2, 3
    std::string s;
    for (const T &x : list) s += (s.empty() ? "" : separator) + str(x);
    return s;
}
std::string str(const std::vector<Device> &devices) { return "[" + listed(devices, ", ") + "]"; }
std::string str(const std::vector<int> &shape) { return "(" + listed(shape, ",") + ")"; }

void error(const char *format, ...) {
    char text[1000];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    for (char *c = text; *c; c++)
        if ((unsigned char)*c < ' ') *c = '?'; // a file name, say, may hold a line break
    throw Error(text);
}
void same_device(const char *op, const std::vector<Tensor> &inputs) {
    for (const Tensor &X : inputs)
        if (X.device.id != inputs[0].device.id || X.device.id < 0)
            error("%s: its arguments lie on %s and %s, they must be on one device", op,
                  str(inputs[0].device).c_str(), str(X.device).c_str());
}
void check_shape(const char *op, bool right, const char *wanted,
                 const std::vector<Tensor> &inputs) {
    if (!right) error("%s: wants %s, got %s", op, wanted, listed(inputs, ", ").c_str());
}
// What printf would print
__attribute__((format(printf, 1, 2))) static std::string format(const char *format, ...) {
    char text[1000];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return text;
}
// For a signal's handler. It may have interrupted malloc, for which dprintf would wait for ever.
__attribute__((format(printf, 1, 2))) static void say(const char *format, ...) {
    char text[1000];
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (write(STDERR_FILENO, text, n) < n) return; // the program ends in any case
}
void check_cuda(cudaError_t code, const char *call, const char *file, int line) {
    if (code == cudaSuccess) return;
    fflush(stdout);
    const bool late = code == cudaErrorIllegalAddress || code == cudaErrorLaunchFailure;
    fprintf(stderr, "mgpu: %s:%d: %s: %s (%s)%s\n", file, line, call, cudaGetErrorString(code),
            cudaGetErrorName(code), late ? ": CUDA_LAUNCH_BLOCKING=1 shows the line" : "");
    _exit(1); // what CUDA still has in its streams is worth nothing now
}

// --- streams
static int comm = 0; // 1 while a CommStreams(true) exists: the index of Gpu::streams
CommStreams::CommStreams(bool use) {
    for (size_t c = 0; c < gpus.size(); c++) stream(gpu(c)); // what waits belongs to the other
    comm = use;
}
CommStreams::~CommStreams() { comm = 0; }
Stream &stream(Device device) {
    Gpu &g = state(device);
    if (operators.flush) operators.flush(device, nullptr);
    return g.streams[comm];
}
cudaStream_t on(Device device) {
    CHECK(cudaSetDevice(physical(device)));
    return stream(device).handle;
}
static Stream new_stream(Device device) {
    Stream s;
    CHECK(cudaSetDevice(physical(device)));
    CHECK(cudaStreamCreateWithFlags(&s.handle, cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&s.ready, cudaEventDisableTiming));
    return s;
}
Stream &link_stream(Device src, Device dst) {
    Stream &s = state(dst).links[src.id];
    if (!s.handle) s = new_stream(dst);
    return s;
}
void join_comm_streams(int k) {
    for (int c = 0; c < k; c++) wait_for(state(gpu(c)).streams[0], state(gpu(c)).streams[1]);
}
void waitall() {
    for (size_t c = 0; c < gpus.size(); c++) {
        on(gpu(c));
        for (const Stream &s : gpus[c].streams) CHECK(cudaStreamSynchronize(s.handle));
    }
}

// --- devices
static bool staged = false; // some pair of devices: the host may then wait in a copy

// How i reaches j's memory: "same GPU as", "peer" (access is enabled here) or "staged" (through the
// host).
static const char *connect(Device i, Device j) {
    int can = 0;
    if (physical(i) == physical(j)) return "same GPU as";
    CHECK(cudaDeviceCanAccessPeer(&can, physical(i), physical(j)));
    if (can) {
        on(i);
        cudaError_t code = cudaDeviceEnablePeerAccess(physical(j), 0);
        if (code == cudaErrorTooManyPeers) can = 0; // more than the hardware takes
        else if (code != cudaErrorPeerAccessAlreadyEnabled) CHECK(code);
        cudaGetLastError(); // neither is sticky: forget it
    }
    staged = staged || !can;
    return can ? "peer" : "staged";
}
// A pattern is copied over and compared, its source overwritten at once, while i is late and while
// j is: better here than in a gradient.
static void check_copy(Device i, Device j) {
    const Tensor pattern = random({1 << 14}, std::uniform_real_distribution<float>(1, 2 + j.id));
    const Tensor zeros = full(pattern.shape, 0, cpu());
    const bool slow = i.id + j.id == 1; // one pair, both ways, is enough
    auto pause = [](Device d) { call_on(stream(d), [] { usleep(1000); }); };
    for (int trial = 0; trial <= slow; trial++) {
        if (slow) pause(trial ? j : i);
        const Tensor src = copyto(pattern, i), dst = empty(pattern.shape, j);
        copyto(src, dst);
        copyto(zeros, src);
        if (slow) pause(j); // the host is to wait too
        const Tensor back = copyto(dst, cpu());
        const std::vector<float> got(back.ptr(), back.ptr() + size(back)), want = to_host(pattern);
        const int wrong = std::mismatch(want.begin(), want.end(), got.begin()).first - want.begin();
        if (wrong == size(pattern)) continue;
        waitall();
        error("what copyto moves from %s to %s arrives changed from index %d of %d on: %s",
              str(i).c_str(), str(j).c_str(), wrong, size(pattern),
              to_host(back) == want ? "does the host wait for what it reads?"
              : wrong > 0           ? "are the bytes sizeof(float) * numbers?"
              : got[0] == 0         ? "src was read too early or too late: are both wait_for there?"
                                    : "is it src that is copied to dst, after it was written?");
    }
}

// Make logical devices gpu(0) ... gpu(k-1), round-robin on the GPUs there are, and print how each
// pair exchanges data. `first`: CUDA's number of gpu(0), where several programs share the GPUs.
void use_devices(int k, bool quiet = false, int first = 0) {
    int count = 0;
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); // hardware queues: else 8 for all streams
    cudaError_t code = cudaGetDeviceCount(&count);
    if (code != cudaSuccess || count == 0)
        error("no GPU (%s): `make run BACKEND=cpu` emulates devices", cudaGetErrorString(code));
    for (int i = gpus.size(); i < k; i++) {
        gpus.emplace_back();
        gpus[i].physical = (first + i) % count;
        for (Stream &s : gpus[i].streams) s = new_stream(gpu(i));
    }
    if (k > count && !quiet)
        printf("notice: %d logical devices share %d GPU%s, each with its own memory and stream; "
               "they may be faster than one, which a small network leaves half empty\n",
               k, count, count > 1 ? "s" : "");
    for (int i = 0; i < k; i++) {
        cudaDeviceProp prop;
        CHECK(cudaGetDeviceProperties(&prop, physical(gpu(i))));
        std::map<std::string, std::string> links; // "peer" -> " gpu(1) gpu(2)"
        for (int j = 0; j < k; j++)
            if (j != i) links[connect(gpu(i), gpu(j))] += " " + str(gpu(j));
        if (quiet) continue;
        printf("%s: %s", str(gpu(i)).c_str(), prop.name);
        for (const char *kind : {"same GPU as", "peer", "staged"})
            if (links.count(kind)) printf("; %s:%s", kind, links[kind].c_str());
        printf("\n");
    }
    for (int i = 0; i < k; i++)
        for (int j = 0; j < k; j++)
            if (j != i) check_copy(gpu(i), gpu(j));
}

// --- memory
// Give the blocks that no tensor uses back to CUDA.
void empty_cache() {
    waitall();
    for (Gpu &g : gpus)
        for (auto &free_blocks : g.free_blocks) {
            for (auto &[bytes, blocks] : free_blocks)
                for (float *p : blocks) {
                    CHECK(cudaFree(p));
                    g.bytes -= bytes;
                }
            free_blocks.clear();
        }
}

static float *cuda_malloc(Device device, size_t bytes) {
    float *p = nullptr;
    for (int attempt = 0; attempt < 2; attempt++) {
        CHECK(cudaSetDevice(physical(device))); // on() would flush
        if (cudaMalloc((void **)&p, bytes) == cudaSuccess) return p;
        cudaGetLastError();
        if (attempt == 0) empty_cache(); // perhaps there are blocks of other sizes
    }
    size_t free = 0, total = 0;
    CHECK(cudaMemGetInfo(&free, &total));
    error("%s is out of memory: %.1f MB more are needed, %.1f of its %.1f MB are free: use a "
          "smaller BATCH",
          str(device).c_str(), bytes / 1e6, free / 1e6, total / 1e6);
}
// Memory for n floats. On a device from a caching allocator: a free list per (stream, bytes).
// Stream order makes reuse safe; after the first epoch cudaMalloc is not called again. On the host
// it is pinned: devices copy while the host goes on.
static std::shared_ptr<float> allocate(int n, Device device) {
    const size_t bytes = n * sizeof(float);
    float *p = nullptr;
    if (n == 0) return nullptr;
    if (device.id < 0) {
        const cudaError_t code = cudaMallocHost((void **)&p, bytes);
        if (code == cudaErrorMemoryAllocation)
            error("the host has no %.1f MB of pinned memory left", bytes / 1e6);
        CHECK(code);
        return std::shared_ptr<float>(p, [](float *p) {
            for (const Gpu &g : gpus) // which may still be copying
                for (const Stream &s : g.streams) cudaStreamSynchronize(s.handle);
            cudaFreeHost(p);
        });
    }
    Gpu &g = state(device);
    if (auto &blocks = g.free_blocks[comm][bytes]; !blocks.empty()) {
        p = blocks.back();
        blocks.pop_back();
    } else {
        p = cuda_malloc(device, bytes);
        g.peak_bytes = std::max(g.peak_bytes, g.bytes += bytes);
    }
    return std::shared_ptr<float>(p, [device, which = comm, bytes](float *p) {
        gpus[device.id].free_blocks[which][bytes].push_back(p);
    });
}

int size(const Tensor &t) {
    long n = 1;
    for (int s : t.shape)
        if (s < 0) error("%s: a size is negative", str(t.shape).c_str());
        else if ((n *= s) > INT_MAX)
            error("%s: too many numbers, use a smaller BATCH", str(t.shape).c_str());
    return n;
}
Tensor empty(std::vector<int> shape, Device device) {
    Tensor t;
    t.device = device;
    t.shape = std::move(shape);
    t.data = allocate(size(t), device);
    return t;
}
Tensor full(std::vector<int> shape, float value, Device device) {
    Tensor t = empty(std::move(shape), device);
    const int n = size(t);
    if (device.id < 0) std::fill_n(t.ptr(), n, value);
    else LAUNCH(fill_kernel<<<blocks(n), threads, 0, on(device)>>>(Target{t.ptr()}, value, n));
    return t;
}
Tensor arange(int n) {
    Tensor t = empty({n}, cpu());
    std::iota(t.ptr(), t.ptr() + n, 0.0f);
    return t;
}
// The gradient is shared like the numbers.
Tensor reshape(const Tensor &X, std::vector<int> shape) {
    int known = 1;
    for (int s : shape) known *= s < 0 ? 1 : s;
    for (int &s : shape)
        if (s < 0)
            s = known ? size(X) / known
                      : std::accumulate(X.shape.begin() + 1, X.shape.end(), 1,
                                        std::multiplies<int>());
    Tensor y = X;
    y.shape = shape;
    check_shape("reshape", size(y) == size(X), "as many numbers as there are", {X, y});
    return y;
}
Tensor rows(const Tensor &X, int begin, int end) {
    if (begin < 0 || begin > end || end > X.shape[0])
        error("rows: from %d to %d, of a tensor of %d", begin, end, X.shape[0]);
    Tensor y = X;
    y.grad = nullptr;
    y.shape[0] = end - begin;
    const size_t row = size(X) / std::max(1, X.shape[0]); // numbers in one
    if (X.data) y.data = std::shared_ptr<float>(X.data, X.data.get() + begin * row);
    return y;
}
template <class T> static double total(const std::vector<T> &list) { // the sum
    return std::accumulate(list.begin(), list.end(), 0.0);
}
static std::vector<int> sizes_of(const std::vector<Tensor> &list) {
    std::vector<int> sizes;
    for (const Tensor &t : list) sizes.push_back(size(t));
    return sizes;
}
std::vector<float> to_host(const Tensor &t) {
    const Tensor host = copyto(t, cpu());
    return std::vector<float>(host.ptr(), host.ptr() + size(t));
}
static std::vector<Tensor> trained(const std::vector<Tensor> &params) { // those with a gradient
    std::vector<Tensor> list;
    for (const Tensor &p : params)
        if (p.requires_grad) list.push_back(p);
    return list;
}
static std::vector<float> all_to_host(const std::vector<Tensor> &list) { // one after another
    std::vector<float> all;
    for (const Tensor &t : list) {
        const std::vector<float> numbers = to_host(t);
        all.insert(all.end(), numbers.begin(), numbers.end());
    }
    return all;
}
// W1[7]: what number j of all trained parameters, one after another, is called
static std::string name_of(int j) {
    size_t i = 0;
    for (; !params[i].requires_grad || j >= size(params[i]); i++)
        if (params[i].requires_grad) j -= size(params[i]);
    return param_names[i] + "[" + std::to_string(j) + "]";
}

// `count` arrays of n numbers in pinned host memory, cached per (stream, n, count): an array has
// one use in all calls, so that stream order makes reuse safe.
static auto &pinned_memory = *new std::map<std::vector<int>, std::vector<Tensor>>;
std::vector<float *> pinned(int count, int n) {
    std::vector<Tensor> &list = pinned_memory[{comm, n, count}];
    while ((int)list.size() < count) list.push_back(empty({n}, cpu()));
    std::vector<float *> pointers;
    for (int i = 0; i < count; i++) pointers.push_back(list[i].ptr());
    return pointers;
}
void call_on(Stream &stream, std::function<void()> f) {
    auto call_and_delete = [](void *function) {
        std::unique_ptr<std::function<void()>> f((std::function<void()> *)function);
        (*f)();
    };
    CHECK(cudaLaunchHostFunc(stream.handle, call_and_delete,
                             new std::function<void()>(std::move(f))));
}

// The first index at which two lists of one size differ in a bit; their size if there is none
static size_t first_difference(const std::vector<float> &a, const std::vector<float> &b) {
    size_t j = 0;
    while (j < a.size() && memcmp(&a[j], &b[j], sizeof(float)) == 0) j++;
    return j;
}
// Every device must hold the same bits, in every epoch.
void check_replicas(const std::vector<std::vector<Tensor>> &device_params) {
    if (!options.replica_check) return;
    const std::vector<float> first = all_to_host(trained(device_params[0]));
    for (size_t c = 1; c < device_params.size(); c++) {
        const std::vector<float> other = all_to_host(trained(device_params[c]));
        if (size_t j = first_difference(first, other); j < first.size())
            error("the replicas differ: %s is %.9g on gpu(0) but %.9g on gpu(%zu): does allreduce "
                  "leave the same sum on every device, and does each update its copy with it?",
                  name_of(j).c_str(), first[j], other[j], c);
    }
}

// ---------------------------------------------------------------------------------------------
// 12. Data, timing, output
// What d2l lends the tutorial: the data set and its minibatches, the stopwatch, the plot; and the
// files that a run reads and writes.

// As NumPy prints an array: each number with as few digits as tell it from its neighbours, at most
// 8 after the point, and the points of all of them below each other.
std::string to_string(const Tensor &t) {
    std::vector<std::string> texts;
    size_t before = 0, after = 0; // the longest part before and after the point
    for (float v : to_host(t)) {
        char text[64];
        for (int digits = 0; digits <= 8; digits++) {
            snprintf(text, sizeof text, digits || !std::isfinite(v) ? "%.*f" : "%.*f.", digits, v);
            if (strtof(text, nullptr) == v || std::isnan(v)) break;
        }
        texts.push_back(text);
        before = std::max(before, strcspn(text, "."));
        after = std::max(after, strlen(text) - strcspn(text, ".")); // none in "nan"
    }
    std::string s = texts.empty() ? "[]" : "";
    const int n = texts.size(), dims = t.shape.size();
    for (int i = 0; i < n; i++) {
        int opens = 0, closes = 0; // rows, planes, ... that begin or end with this number
        for (int axis = 0, inner = n; axis < dims; inner /= t.shape[axis++]) {
            opens += i % inner == 0;
            closes += (i + 1) % inner == 0;
        }
        if (i > 0) s += opens ? std::string(opens, '\n') + std::string(dims - opens, ' ') : " ";
        const size_t point = strcspn(texts[i].c_str(), ".");
        s += std::string(opens, '[') + std::string(before - point, ' ') + texts[i] +
             std::string(after - (texts[i].size() - point), ' ') + std::string(closes, ']');
    }
    return s + (t.device.id < 0 ? "" : " @" + str(t.device));
}

// --- data
// One half of a data set as it lies in its files: bytes, 28 x 28 an image.
struct DataSet {
    int count = 0;
    std::vector<uint8_t> images, labels;
};
static DataSet train_set, test_set; // main reads them before anything starts
Position resumed;                   // set by resume()

// Unpack a .gz file in the IDX format of http://yann.lecun.com/exdb/mnist: two zeros, 8 for bytes,
// the number of dimensions; their sizes (big-endian, 4 bytes each); the bytes, and no more.
//   dims: 1 for labels, 3 for images of 28 x 28   ->   the bytes of at least one sample
std::vector<uint8_t> load_idx(const std::string &path, int dims) {
    if (access(path.c_str(), R_OK) != 0)
        error("%s: %s%s", path.c_str(), strerror(errno),
              errno == ENOENT ? ": `make data` brings it to data/" : "");
    std::string quoted, wrong;
    for (char c : path) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
    signal(SIGCHLD, SIG_DFL); // this program's parent may ignore it: gzip's status would be lost
    FILE *pipe = popen(("gzip -dc < '" + quoted + "' 2> /dev/null").c_str(), "r");
    if (!pipe) error("%s: cannot start gzip: %s", path.c_str(), strerror(errno));
    std::vector<uint8_t> bytes;
    uint8_t buffer[1 << 16];
    while (size_t n = fread(buffer, 1, sizeof buffer, pipe))
        bytes.insert(bytes.end(), buffer, buffer + n);
    const int status = pclose(pipe);
    stop_requested(); // Ctrl-C ends gzip too
    if (WIFEXITED(status) && WEXITSTATUS(status) == 127)
        error("%s: gzip could not be started: is it installed?", path.c_str());
    if (status != 0 && !(WIFEXITED(status) && WEXITSTATUS(status) <= 2)) // 1, 2: what it has read
        error("%s: gzip was stopped (status %d): too little memory, too few processes or files?",
              path.c_str(), status);
    const size_t header = 4 + 4 * dims;
    auto number = [&](size_t i) -> size_t { // the header's
        size_t n = 0;
        for (size_t b = 4 * i; b < 4 * i + 4; b++) n = n << 8 | bytes[b];
        return n;
    };
    const size_t sample = dims == 3 ? 28 * 28 : 1;
    if (status != 0) wrong = "gzip cannot unpack it: if `gzip -t` says so too";
    else if (bytes.size() < header) wrong = "it ends in its header";
    else if (number(0) != size_t(0x800 + dims))
        wrong = format("its magic number is %zu, not %d", number(0), 0x800 + dims);
    else if (dims == 3 && (number(2) != 28 || number(3) != 28)) wrong = "its images are not 28x28";
    else if (number(1) == 0 || number(1) > 1000000 || bytes.size() != header + number(1) * sample)
        wrong = format("it names %zu samples, but has the bytes of %zu", number(1),
                       (bytes.size() - header) / sample);
    if (!wrong.empty())
        error("%s: %s: remove it, `make data` brings the right one", path.c_str(), wrong.c_str());
    bytes.erase(bytes.begin(), bytes.begin() + header);
    return bytes;
}

// `which`: train or t10k
DataSet load_data(const std::string &folder, const std::string &which) {
    DataSet set;
    const std::string images_path = folder + "/" + which + "-images-idx3-ubyte.gz";
    const std::string labels_path = folder + "/" + which + "-labels-idx1-ubyte.gz";
    set.images = load_idx(images_path, 3);
    set.labels = load_idx(labels_path, 1);
    set.count = set.images.size() / (28 * 28);
    if (set.labels.size() != (size_t)set.count)
        error("%s has %d images, but %s has %zu labels", images_path.c_str(), set.count,
              labels_path.c_str(), set.labels.size());
    for (size_t i = 0; i < set.labels.size(); i++)
        if (set.labels[i] > 9)
            error("%s: label %zu is %d, not 0 to 9", labels_path.c_str(), i, set.labels[i]);
    if (options.limit) set.count = std::min(set.count, options.limit);
    return set;
}

static DataIter make_iter(const DataSet &set, int batch_size, bool shuffle) {
    std::vector<int> order(set.count);
    std::iota(order.begin(), order.end(), 0);
    return {
        &set, batch_size, shuffle, empty({set.count, 1, 28, 28}, cpu()), empty({set.count}, cpu()),
        order};
}
std::pair<DataIter, DataIter> load_data_fashion_mnist(int batch_size) {
    return {make_iter(train_set, batch_size, options.shuffle),
            make_iter(test_set, batch_size, false)};
}

// SPLIT=3,1 gives the first device three quarters. Rounded by the largest remainders, the first
// device of equal ones.
std::vector<int> shard_sizes(int n, int k) {
    const std::vector<int> equal(k, 1);
    const std::vector<int> &weights = options.split.empty() || k == 1 ? equal : options.split;
    const long sum = total(weights);
    std::vector<int> sizes(k), order(k);
    if ((int)weights.size() != k)
        error("SPLIT has %zu parts, but there are %d devices", weights.size(), k);
    for (int i = 0; i < k; i++) {
        sizes[i] = (long)n * weights[i] / sum;
        order[i] = i;
    }
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
        return (long)n * weights[a] % sum > (long)n * weights[b] % sum;
    });
    const int left = n - total(sizes);
    for (int i = 0; i < left; i++) sizes[order[i]]++;
    return sizes;
}

// Call only when the devices have finished the epoch: this overwrites what they copy from.
void DataIter::reset() {
    begin = 0;
    if (!shuffle) return; // what was filled stays right
    if (ahead.valid()) ahead.get();
    filled = asked = 0;
    std::shuffle(order.begin(), order.end(), rng);
}
bool DataIter::next(Tensor &X, Tensor &y) {
    const int end = std::min(begin + batch_size, set->count);
    if (begin == end) return false;
    float *const all_X = this->X.ptr(), *const all_y = this->y.ptr();
    auto fill = [set = set, order = order.data(), all_X, all_y](int first, int last) {
        auto image = [=](int i) { return &set->images[(size_t)order[i] * 28 * 28]; };
        for (int i = first; i < last; i++) {
            const uint8_t *from = image(i), *soon = image(std::min(i + 2, last - 1));
            // Shuffled images are in no cache. 64: a line of it
            for (int p = 0; p < 28 * 28; p += 64) __builtin_prefetch(soon + p);
            float *x = all_X + (size_t)i * 28 * 28;
            for (int p = 0; p < 28 * 28; p++) x[p] = from[p] / 255.0f;
            all_y[i] = set->labels[order[i]];
        }
    };
    if (filled < end) {
        if (ahead.valid()) ahead.get();
        if (asked < end) fill(asked, end);
        filled = std::max(asked, end);
        asked = std::min(filled + 8 * batch_size, set->count); // while the host enqueues
        if (filled < asked) ahead = std::async(std::launch::async, fill, filled, asked);
    }
    X = rows(this->X, begin, end);
    y = rows(this->y, begin, end);
    begin = end;
    return true;
}

// --- timing and progress
static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}
void Timer::start() { t0 = now(); }
void Timer::stop() { times.push_back(now() - t0); }
void Timer::exclude(const std::function<void()> &f) {
    waitall(); // what is enqueued counts
    const double begin = now();
    f();
    t0 += now() - begin;
}
double Timer::avg() const { return times.empty() ? 0 : total(times) / times.size(); }

//   123/235 [===============               ]  loss 0.7345  4321 images/s  26 s left
std::string progress_line(int done, int steps, double loss, double images, double seconds) {
    const int width = 30, full = (long)done * width / steps;
    return format("%5d/%d [%.*s%*s]  loss %.4f  %.0f images/s  %.0f s left", done, steps, full,
                  "==============================", width - full, "", loss, images / seconds,
                  std::ceil(seconds / done * (steps - done)));
}
struct Progress {
    int steps;                  // of an epoch
    std::vector<Tensor> losses; // on each device: the sum of its losses in each step
    std::vector<int> samples;   // of each step that has been enqueued
    std::deque<Event> running;  // behind each step that may not be done, where its largest shard is
    std::string log = "epoch,loss,test_acc,seconds\n";
    bool bar = isatty(STDOUT_FILENO);
    Tensor shown = empty({steps}, cpu()); // that shard's losses, copied behind it
    std::vector<int> shown_samples = {};
    double start = 0, drawn = 0;
    void draw(int done) { // at most ten times a second
        if (!bar || (done < steps && now() - drawn < 0.1)) return;
        drawn = now();
        auto sum = [=](const auto *x) { return std::accumulate(x, x + done, 0.0); };
        const double loss = sum(shown.ptr()) / sum(shown_samples.data());
        printf("\r%s\033[K",
               progress_line(done, steps, loss, sum(samples.data()), drawn - start).c_str());
        fflush(stdout);
    }
    void update(bool wait) { // forget the steps that are finished, or wait for all
        while (!running.empty() && (wait || cudaEventQuery(running[0].handle) == cudaSuccess)) {
            stop_requested();
            CHECK(cudaEventSynchronize(running[0].handle));
            running.pop_front();
            draw(samples.size() - running.size());
        }
        cudaGetLastError(); // cudaErrorNotReady is none
    }
};
static std::string last_row; // of the log, but for its time; RESUME finds it in the checkpoint
Animator::Animator(const std::vector<Device> &devices, int steps)
    : progress(new Progress{steps, {}, {}, {}}) {
    for (Device d : devices) progress->losses.push_back(full({steps}, 0, d));
    if (resumed.steps == 0) return;
    std::ifstream file(options.log);
    std::string row, log = progress->log;
    bool own = false; // is it the log of the training that goes on?
    for (int epoch = 0; std::getline(file, row); epoch++) {
        if (epoch > 0 && epoch <= resumed.epoch) log += row + "\n";
        own = own || row.rfind(last_row, 0) == 0;
    }
    if (own) progress->log = log;
    else
        fprintf(stderr, "notice: %s is not the log of %s: it begins anew\n", options.log.c_str(),
                options.save.c_str());
}
void Animator::step(const std::vector<Tensor> &ls) {
    Progress &p = *progress;
    const int s = p.samples.size();
    size_t most = 0; // the device with the most samples: SPLIT may leave the first without any
    stop_requested();
    if (s == 0) p.start = now(), p.shown_samples.clear();
    p.samples.push_back(0);
    for (size_t c = 0; c < ls.size(); c++) {
        const int n = size(ls[c]);
        p.samples[s] += n;
        if (n > size(ls[most])) most = c;
        LAUNCH(
            sum_kernel<<<1, threads, 0, on(ls[c].device)>>>(p.losses[c].ptr() + s, ls[c].ptr(), n));
    }
    const Device device = ls[most].device;
    p.shown_samples.push_back(size(ls[most]));
    if (p.bar)
        CHECK(cudaMemcpyAsync(p.shown.ptr() + s, p.losses[most].ptr() + s, sizeof(float),
                              cudaMemcpyDeviceToHost, on(device)));
    p.running.emplace_back(device);
    CHECK(cudaEventRecord(p.running.back().handle, on(device)));
    p.update(false);
}
// Here the host waits for the devices, once an epoch. A loss that is not a number stops the run.
double Animator::finish(int epoch) {
    Progress &p = *progress;
    p.update(true);
    waitall();
    if (p.bar) printf("\r\033[K");
    std::vector<double> sums(p.samples.size());
    for (const Tensor &l : p.losses) {
        const std::vector<float> host = to_host(l);
        for (size_t s = 0; s < sums.size(); s++) sums[s] += host[s];
    }
    const double count = total(p.samples);
    for (size_t s = 0; s < sums.size(); s++)
        if (!std::isfinite(sums[s]))
            error(s + epoch == 0
                      ? "the loss is %s in step %zu of epoch %d, before any update: is "
                        "memory read that nobody has written, or a barrier missing?"
                      : "the loss is %s in step %zu of epoch %d: use a smaller LR than %g",
                  std::isnan(sums[s]) ? "nan" : "infinite", s + 1, epoch + 1, options.lr);
    p.samples.clear();
    return total(sums) / count;
}

// --- files
namespace fs = std::filesystem;

// Write a file in one go: it is there whole or not at all, whoever else writes it. Folders on the
// way are made. What is no file, such as /dev/null, is written to. -> 0 or an errno
static int try_write(const std::string &path, const std::string &bytes) {
    std::error_code code;
    const fs::path folder = fs::path(path).parent_path();
    if (!folder.empty()) fs::create_directories(folder, code);
    if (code) return code.value();
    const bool special = fs::is_other(path, code);
    const std::string part = special ? path : path + format(".%d.part", getpid());
    FILE *file = fopen(part.c_str(), "wb");
    bool written = file && fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size();
    if (file) written = fclose(file) == 0 && written;
    if (written && (special || rename(part.c_str(), path.c_str()) == 0)) return 0;
    const int reason = errno;
    if (!special) remove(part.c_str());
    return reason;
}
static void write_file(const std::string &path, const std::string &bytes) {
    if (int reason = try_write(path, bytes))
        error("cannot write %s: %s", path.c_str(), strerror(reason));
}
// Fail now if a file cannot be written there later; leaves nothing behind.
static void check_writable(const std::string &path) {
    std::error_code code;
    fs::path folder = fs::path(path).parent_path(), made;
    for (; !folder.empty() && !fs::exists(folder, code); folder = folder.parent_path())
        made = folder;
    int reason = 0;
    if (fs::is_directory(path, code)) error("cannot write %s: it is a folder", path.c_str());
    if (fs::is_other(path, code)) {
        reason = access(path.c_str(), W_OK) == 0 ? 0 : errno;
    } else {
        reason = try_write(path + ".mgpu-test", "");
        remove((path + ".mgpu-test").c_str());
    }
    if (!made.empty()) fs::remove_all(made, code); // only the folders made here
    if (reason) error("cannot write %s: %s", path.c_str(), strerror(reason));
}

// A row, and the same in the file for `make plot`.
void Animator::add(int epoch, double loss, float acc, double seconds) {
    if (options.model == "lab_cnn") // as the lab prints it
        printf("Epoch %d, training time = %.1f sec\n         validation accuracy = %.4f\n",
               epoch - 1, seconds, acc);
    else {
        if (epoch - 1 == resumed.epoch) // the first row
            printf("%5s  %8s  %8s  %8s\n", "epoch", "loss", "test acc", "seconds");
        printf("%5d  %8.4f  %8.4f  %8.2f\n", epoch, loss, acc, seconds);
    }
    last_row = format("%d,%.6f,%.4f,", epoch, loss, acc);
    progress->log += last_row + format("%.4f\n", seconds);
    write_file(options.log, progress->log);
}

// The start of NumPy's .npy, version 1.0, for little-endian 32-bit floats in C order: a magic
// string, the length of a header, the header, a Python dict filled up to a multiple of 64 bytes.
// https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
static std::string npy_header(const std::vector<int> &shape) {
    std::string tuple = listed(shape, ", "); // (20,) or (2, 3)
    if (shape.size() == 1) tuple += ",";
    std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (" + tuple + "), }";
    header.resize((10 + header.size()) / 64 * 64 + 64 - 10 - 1, ' ');
    header += '\n';
    return std::string("\x93NUMPY\x01\x00", 8) + char(header.size() & 255) +
           char(header.size() >> 8) + header;
}
void save_npy(const std::string &path, const Tensor &t) {
    const std::vector<float> numbers = to_host(t);
    std::string bytes = npy_header(t.shape);
    bytes.append((const char *)numbers.data(), numbers.size() * sizeof(float));
    write_file(path, bytes);
}
// Read `path` into t, on the host: what save_npy writes for t's shape, and np.save too.
void load_npy(const std::string &path, const Tensor &t) {
    std::ifstream file(path, std::ios::binary);
    if (!file) error("%s: %s", path.c_str(), strerror(errno));
    const std::string want = npy_header(t.shape);
    const size_t numbers = size(t) * sizeof(float);
    std::string bytes(10 + 65535 + numbers + 1, 0); // the longest header
    bytes.resize(file.read(&bytes[0], bytes.size()).gcount());
    if (bytes.size() < 10 || bytes.compare(0, 8, want, 0, 8) != 0)
        error("%s: not a .npy file of version 1.0", path.c_str());
    const size_t start = 10 + ((uint8_t)bytes[8] | (uint8_t)bytes[9] << 8);
    auto dict = [](const std::string &header) { return header.substr(0, header.find('}') + 1); };
    const std::string wanted = dict(want.substr(10)), got = dict(bytes.substr(10, start - 10));
    if (got != wanted) error("%s: wants %s, got %s", path.c_str(), wanted.c_str(), got.c_str());
    if (bytes.size() != start + numbers)
        error("%s: it has %s numbers than its shape says", path.c_str(),
              bytes.size() < start + numbers ? "fewer" : "more");
    memcpy(t.ptr(), &bytes[start], numbers);
}

// --- SAVE, INIT and RESUME
// SAVE's folder holds a .npy file for each parameter, and training.txt: where the training stands,
// the options that its numbers depend on, a checksum of the parameters. The order of the samples
// follows from the seed and the epoch.

// FNV-1a of all numbers' bytes
static std::string checksum(const std::vector<Tensor> &params) {
    uint64_t hash = 0xcbf29ce484222325;
    for (float x : all_to_host(params))
        for (size_t b = 0; b < sizeof x; b++) hash = (hash ^ ((uint8_t *)&x)[b]) * 0x100000001b3;
    return format("%016llx", (unsigned long long)hash);
}
template <class T> static size_t hash(const T &bytes) {
    return std::hash<std::string_view>()({(const char *)bytes.data(), bytes.size()});
}
// What decides the bits of a training
typedef std::map<std::string, std::string> Lines;
static Lines training_options() {
    return {{"model", options.model},
            {"data", format("%zu %zu %zu %zu", hash(train_set.images), hash(train_set.labels),
                            hash(test_set.images), hash(test_set.labels))},
            {"gpus", str(options.gpus)},
            {"batch", str(options.batch)},
            {"lr", format("%.6g", options.lr)},
            {"seed", std::to_string(options.seed)},
            {"shuffle", options.shuffle ? "yes" : "no"},
            {"limit", str(options.limit)},
            {"split", options.split.empty() ? "even" : listed(options.split, ",")},
            {"allreduce", options.allreduce},
            {"operators", operators.name}};
}

static fs::path save_folder() { // without links and a / at the end
    const auto path = fs::weakly_canonical(options.save);
    return path.has_filename() ? path : path.parent_path();
}
// SAVE: put a folder with these parameters in the place of options.save, in one step. Whoever looks
// there, whenever this may have been stopped, finds all of the old files or all of the new ones.
// Files of another kind are kept. `lines`: what RESUME must find unchanged.
static void save_checkpoint(const std::vector<Tensor> &params, const Position &position,
                            Lines lines) {
    if (options.save.empty()) return;
    lines["checksum"] = checksum(params);
    lines["row"] = last_row;
    lines["epoch"] = std::to_string(position.epoch);
    lines["samples"] = std::to_string(position.samples);
    lines["steps"] = std::to_string(position.steps);
    std::string text;
    for (const auto &[name, value] : lines) text += name + " " + value + "\n";
    const fs::path path = save_folder();
    const std::string part = path.string() + ".part";
    std::error_code code;
    try {
        fs::remove_all(part); // of a run that was stopped
        for (size_t i = 0; i < params.size(); i++)
            save_npy(part + "/" + param_names[i] + ".npy", params[i]);
        write_file(part + "/training.txt", text);
        for (const auto &entry : fs::directory_iterator(path, code))
            if (!fs::exists(part / entry.path().filename()))
                fs::create_hard_link(entry.path(), part / entry.path().filename());
        if (!fs::exists(path)) {
            fs::rename(part, path);
        } else if (renameat2(AT_FDCWD, part.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE)) {
            fs::rename(path, path.string() + ".old"); // a file system that cannot exchange: for a
            fs::rename(part, path);                   // moment there is only the old one, as .old
            fs::rename(path.string() + ".old", part);
        }
    } catch (const std::exception &e) {
        fs::remove_all(part, code);
        error("cannot save to %s: %s", options.save.c_str(), e.what());
    }
    fs::remove_all(part, code); // what was there before
}
void save_checkpoint(const std::vector<Tensor> &params, const Position &position) {
    save_checkpoint(params, position, training_options());
}
// Fail now if that cannot be done later.
static void check_save() {
    const fs::path path = save_folder();
    std::error_code code;
    if (fs::equivalent(path, fs::current_path(), code))
        error("cannot save to %s: it is replaced as a whole, and this program runs in it",
              options.save.c_str());
    if (fs::exists(path, code) && !fs::is_directory(path, code))
        error("cannot save to %s: it is no folder", options.save.c_str());
    for (const auto &entry : fs::directory_iterator(path, code))
        if (!entry.is_regular_file())
            error("cannot save to %s: %s is no file: SAVE wants a folder of its own",
                  options.save.c_str(), entry.path().c_str());
    // What an earlier run left there is removed; a folder of the user's is not
    for (const auto &entry : fs::directory_iterator(path.string() + ".part", code)) {
        const fs::path name = entry.path().filename(), end = name.extension();
        if (end != ".npy" && end != ".part" && name != "training.txt" && !fs::exists(path / name))
            error("cannot save to %s: %s is in the way", options.save.c_str(),
                  entry.path().c_str());
    }
    check_writable(path.string() + ".part/training.txt");
}

// INIT: read the parameters in `folder`.   ->   what its training.txt says; empty if there is none
static Lines load_params(const std::vector<Tensor> &params, const std::string &folder) {
    for (size_t i = 0; i < params.size(); i++) {
        const std::string path = folder + "/" + param_names[i] + ".npy";
        load_npy(path, params[i]);
        for (float x : to_host(params[i]))
            if (!std::isfinite(x))
                error("%s: it holds %s", path.c_str(), std::isnan(x) ? "nan" : "inf");
    }
    Lines lines;
    std::ifstream file(folder + "/training.txt");
    for (std::string name, value; file >> name && std::getline(file >> std::ws, value);)
        lines[name] = value;
    if (!lines.empty() && lines["checksum"] != checksum(params))
        error("%s: its files are not those of one SAVE: remove training.txt if you mean them so",
              folder.c_str());
    return lines;
}
// RESUME: go on where the training in `folder` stands; at its beginning if nothing is saved yet.
static void resume(const std::string &folder, const Lines &wanted) {
    std::error_code code;
    if (!fs::exists(folder + "/training.txt", code))
        return (void)printf("%s: nothing is saved there yet: it begins\n", folder.c_str());
    auto saved = load_params(params, folder);
    for (const auto &[name, value] : wanted)
        if (saved[name] != value)
            error("%s was trained with %s %s, not with %s: RESUME goes on with the same",
                  folder.c_str(), name.c_str(), saved[name].c_str(), value.c_str());
    resumed = {atoi(saved["epoch"].c_str()), atoi(saved["samples"].c_str()),
               atoi(saved["steps"].c_str())};
    last_row = saved["row"];
    if (resumed.samples == train_set.count) resumed = {resumed.epoch + 1, 0, resumed.steps};
    if (resumed.epoch >= options.epochs || (options.steps && resumed.steps >= options.steps))
        error("%s: %d epochs, %d steps are trained: RESUME wants more EPOCHS or STEPS",
              folder.c_str(), resumed.epoch, resumed.steps);
    printf("%s: going on after %d epochs, %d steps\n", folder.c_str(), resumed.epoch,
           resumed.steps);
}

// ---------------------------------------------------------------------------------------------
// 13. The first minibatch
// The chapter's promise, checked once a run, outside the timer: k devices do what one does. What
// is wrong is named with both numbers; `make check` says what it looks like, and why.

static const char *const see = ": make check looks for the cause";
typedef std::vector<float> Flat; // the numbers of all trained parameters, one after another
static Flat gradient_on_one(const Tensor &X, const Tensor &y) {
    const std::vector<std::vector<Tensor>> one = {get_params(params, gpu(0))};
    backward(loss(net(copyto(X, gpu(0)), one[0]), copyto(y, gpu(0))));
    return all_to_host(gradients(one)[0]);
}
// The sum of the gradients of k shards, each on gpu(0), and for each number the unit in which
// differences are measured: the largest |number| of its parameter, summed over the shards.
static std::pair<Flat, Flat> gradient_in_shards(const Tensor &X, const Tensor &y, int k) {
    Flat sum(total(sizes_of(trained(params)))), unit(sum.size());
    int begin = 0;
    for (int n : shard_sizes(X.shape[0], k)) {
        const Flat part = gradient_on_one(rows(X, begin, begin + n), rows(y, begin, begin + n));
        for (size_t j = 0; j < part.size(); j++) sum[j] += part[j], unit[j] += std::fabs(part[j]);
        begin += n;
    }
    auto first = unit.begin();
    for (int n : sizes_of(trained(params))) {
        std::fill_n(first, n, *std::max_element(first, first + n));
        first += n;
    }
    return {sum, unit};
}
// X, y: the first minibatch; device_params: what a step on k devices has made of `params`. The
// devices' gradients must be those of the whole minibatch on gpu(0) (where batch norm sees each
// device's shard by itself: of the k shards one by one), to 1e-3 of a parameter's largest (or as
// the operators say); the update must be lr * gradient / n.
static void check_gradients(const Tensor &X, const Tensor &y, int k,
                            const std::vector<std::vector<Tensor>> &device_params, float lr) {
    const int n = X.shape[0];
    const bool alike = trained(params).size() == params.size(); // else there are batch norms
    const auto [want, unit] = gradient_in_shards(X, y, alike ? 1 : k);
    const Flat old = all_to_host(trained(params));
    float largest = 0; // difference of the gradients, in units
    for (size_t c = 0; c < device_params.size(); c++) {
        const Flat got = all_to_host(gradients(device_params)[c]),
                   now = all_to_host(trained(device_params[c]));
        auto differs = [&](const char *what, int j, float is, float should_be) {
            error("the first minibatch: the %s of %s on %s is %.6g, not %.6g%s", what,
                  name_of(j).c_str(), str(gpu(c)).c_str(), is, should_be, see);
        };
        for (size_t j = 0; j < got.size(); j++) {
            const float off = std::fabs(got[j] - want[j]);
            if (!(off <= operators.rounding * unit[j])) differs("gradient", j, got[j], want[j]);
            if (off > 0) largest = std::max(largest, off / unit[j]);
        }
        for (size_t j = 0; j < got.size(); j++) {
            const float update = old[j] - now[j], right = lr * got[j] / n;
            const float off = std::fabs(update - right);
            if (update != right && !(off <= 1e-5f * std::fabs(right) + 1e-6f * std::fabs(old[j])))
                differs("update", j, update, right);
        }
    }
    if (k > 1)
        printf("first minibatch: %d devices give the gradient of one%s (largest difference %.0e)\n",
               k, alike ? "" : " that takes their shards one by one", largest);
    else printf("first minibatch: the update is right\n");
    if (k > 1) empty_cache(); // one device has needed what it will not need again
}
void check_first_step(const Tensor &X, const Tensor &y, const std::vector<Tensor> &ls,
                      const std::vector<std::vector<Tensor>> &device_params, float lr) {
    if (!options.first_check) return;
    if (const int losses = total(sizes_of(ls)); losses != X.shape[0])
        error("the first minibatch has %d samples, the devices' shards together have %d%s",
              X.shape[0], losses, see);
    for (const Tensor &l : ls)
        if (!std::isfinite(total(to_host(l))))
            error("the first minibatch's loss on %s is not finite, before any update%s",
                  str(l.device).c_str(), see);
    check_gradients(X, y, device_params.size(), device_params, lr);
}

// ---------------------------------------------------------------------------------------------
// 14. Program
// The command line and main.

Options options;

static volatile sig_atomic_t interrupted = 0;
void stop_requested() {
    if (!interrupted) return;
    if (isatty(STDOUT_FILENO)) printf("\r\033[K");
    fflush(stdout);
    fprintf(stderr, "mgpu: interrupted\n");
    _exit(128 + SIGINT); // what is enqueued on the devices is dropped
}
// The first Ctrl-C asks; SIGTERM and a second one do not wait for the program to look.
static void on_stop(int signal) {
    if (!interrupted && signal == SIGINT) {
        interrupted = 1;
        return;
    }
    say("mgpu: %s\n", signal == SIGINT ? "interrupted" : "terminated");
    _exit(128 + signal);
}
static void on_crash(int signal) {
    say("mgpu: %s\n",
        signal == SIGSEGV
            ? "segmentation fault: an index beyond its list, a null pointer, endless recursion?"
        : signal == SIGABRT ? "stopped by what stands above (an index beyond a std::vector?)"
                            : "a division by zero?");
    _exit(1);
}
static void catch_signals() {
    struct sigaction action = {}, before;
    action.sa_handler = on_stop;
    for (int signal : {SIGINT, SIGTERM}) sigaction(signal, &action, nullptr);
    static char stack[1 << 16]; // for a handler, when the host's own stack is used up
    stack_t other = {};
    other.ss_sp = stack, other.ss_size = sizeof stack;
    sigaltstack(&other, nullptr);
    action.sa_handler = on_crash;
    action.sa_flags = SA_ONSTACK;
    for (int signal : {SIGSEGV, SIGABRT, SIGFPE}) {
        sigaction(signal, nullptr, &before);
        if (before.sa_handler == SIG_DFL) sigaction(signal, &action, nullptr); // else a sanitizer's
    }
}

// The one table of options: the usage text, getopt's array, the parsing and its errors are made of
// it. A Setter parses an option's value, or says what is wrong with it.
typedef std::function<void(const char *name, const char *value)> Setter;
struct Flag {
    const char *name, *value; // --name VALUE; null: takes none; [=VALUE]: may be left out
    const char *help;
    Setter set;
};
static Setter yes(bool *field, bool value = true) {
    return [=](const char *, const char *) { *field = value; };
}
static Setter text(std::string *field) {
    return [=](const char *, const char *value) { *field = value; };
}
template <class T> static Setter number(T *field, long min, long max) {
    return [=](const char *name, const char *value) {
        char *end;
        errno = 0;
        const long n = strtol(value, &end, 10);
        if (end == value || *end || errno || n < min || n > max)
            error("--%s %s: a whole number from %ld to %ld is wanted", name, value, min, max);
        *field = n;
    };
}
static Setter one_of(std::string *field, const std::vector<std::string> &names) {
    return [=](const char *name, const char *value) {
        if (!value) value = names[0].c_str(); // [=NAME], left out
        if (std::find(names.begin(), names.end(), value) == names.end())
            error("--%s %s: unknown, there are %s", name, value, listed(names, ", ").c_str());
        *field = value;
    };
}
static void set_lr(const char *name, const char *value) {
    char *end;
    options.lr = strtof(value, &end);
    if (end == value || *end || !std::isfinite(options.lr) || options.lr <= 0)
        error("--%s %s: a number greater than 0 is wanted", name, value);
}
static void set_split(const char *name, const char *value) {
    options.split.clear();
    for (const char *at = value;; at++) { // behind a comma
        char *end;
        const long part = strtol(at, &end, 10);
        if (end == at || (*end && *end != ',') || part < 1 || part > 1000)
            error("--%s %s: whole numbers from 1 to 1000 are wanted, such as 3,1", name, value);
        options.split.push_back(part);
        at = end;
        if (!*end) return;
    }
}
static void set_allreduce(const char *name, const char *value) {
    std::vector<std::string> names;
    for (const Algorithm &a : algorithms) names.push_back(a.name);
    one_of(&options.allreduce, names)(name, value);
}

// clang-format off
static std::vector<Flag> flags = { // the lab adds its own
    {"gpus", "K", "number of devices, 1 to 64; more than there are GPUs share them (1)",
     number(&options.gpus, 1, max_gpus)},
    {"model", "NAME", "lenet, resnet18 or lab_cnn (lenet)",
     one_of(&options.model, {"lenet", "resnet18", "lab_cnn"})},
    {"batch", "N", "samples of a minibatch, all devices (256; a device: resnet18 256, lab_cnn 64)",
     number(&options.batch, 1, 60000)},
    {"lr", "X", "learning rate (0.2; resnet18: 0.1 a device; lab_cnn: 0.3)", set_lr},
    {"epochs", "N", "passes over the training set (10; lab_cnn: 5)",
     number(&options.epochs, 1, 1000000)},
    {"split", "A,B,...", "parts of a minibatch in this proportion, for unequal devices (equal)",
     set_split},
    {"allreduce", "NAME", "how gradients are summed: naive, bucket, host, by_tensor, sharded,\n"
     "                    ring, tree, rebind or yours (naive)", set_allreduce},
    {"kvstore", "NAME", "the lab's words: local is host, device is by_tensor (lab_cnn: local)",
     one_of(&options.kvstore, {"local", "device"})},
    {"overlap", nullptr, "exchange the last layers' gradients while the first layers' are computed",
     yes(&options.overlap)},
    {"no-first-check", nullptr, "do not compare the first step with that of one device",
     yes(&options.first_check, false)},
    {"no-replica-check", nullptr, "nor the devices' parameters after each epoch",
     yes(&options.replica_check, false)},
    {"evaluate-all", nullptr, "test accuracy on all devices, not gpu(0) alone (lenet: gpu(0))",
     yes(&options.evaluate_all)},
    {"steps", "N", "stop after N minibatches", number(&options.steps, 1, 1000000000)},
    {"limit", "N", "only the first N training and the first N test samples",
     number(&options.limit, 1, 1000000)},
    {"seed", "N", "of the parameters and of the shuffling (0)",
     number(&options.seed, 0, 4294967295)},
    {"no-shuffle", nullptr, "minibatches in the order of the file", yes(&options.shuffle, false)},
    {"data", "DIR", "where the four .gz files of Fashion-MNIST or MNIST are (data)",
     text(&options.data)},
    {"init", "DIR", "start from the parameters in DIR/W1.npy, b1.npy, ...", text(&options.init)},
    {"save", "DIR", "write the parameters there after each epoch", text(&options.save)},
    {"resume", nullptr, "go on where the training in --save DIR stands", yes(&options.resume)},
    {"log", "FILE", "a row for each epoch (build/log.csv)", text(&options.log)},
    {"verbose", nullptr, "print the device memory that was used", yes(&options.verbose)},
    {"help", nullptr, "this text", nullptr},
};
// clang-format on

static void print_usage() {
    printf("Train a network on Fashion-MNIST on k devices, as Dive into Deep Learning does.\n");
    for (const Flag &f : flags) {
        std::string text = "  --" + std::string(f.name);
        if (f.value) text += (*f.value == '[' ? "" : " ") + std::string(f.value);
        printf("%-18s  %s\n", text.c_str(), f.help);
    }
}

// Does the command line name this option?
static bool given(const char *option) { return options.given.count(option) > 0; }

// Derive the options that were not given; refuse what does not go together.
static void complete_options() {
    const Model *model = models;
    while (model->name != options.model) model++;
    const int k = options.gpus;
    if (!given("batch")) options.batch = model->batch + k * model->batch_of_each;
    if (!given("lr")) options.lr = model->lr + k * model->lr_of_each;
    if (!given("epochs")) options.epochs = model->epochs;
    if (options.model != "lenet") options.evaluate_all = true;
    if (given("kvstore") && given("allreduce"))
        error("--kvstore %s and --allreduce %s: one of them is enough", options.kvstore.c_str(),
              options.allreduce.c_str());
    if (options.model == "lab_cnn" && !given("kvstore") && !given("allreduce"))
        options.kvstore = "local"; // as in the lab
    if (!options.kvstore.empty())
        options.allreduce = options.kvstore == "local" ? "host" : "by_tensor";
    if (!options.split.empty() && (int)options.split.size() != k)
        error("--split has %zu parts, but there are %d devices: use GPUS=%zu", options.split.size(),
              k, options.split.size());
    if (options.resume && options.save.empty())
        error("--resume goes on with the training that --save DIR names: give both");
    options.first_check = options.first_check && options.replica_check;
    if (options.log.empty()) error("--log: the name of a file is wanted");
    if (options.batch < k)
        error("batch %d cannot be split over %d devices: use BATCH >= %d", options.batch, k, k);
}

// Read the command line into `options`; false if --help was asked for.
bool parse_options(int argc, char **argv) {
    std::vector<option> names;
    for (const Flag &f : flags) {
        const int takes = !f.value ? 0 : *f.value == '[' ? optional_argument : required_argument;
        names.push_back({f.name, takes, nullptr, 0});
    }
    names.push_back({});
    opterr = 0;
    optind = 0; // from the start, also after an earlier call
    for (int c, index; (c = getopt_long(argc, argv, ":", names.data(), &index)) != -1;) {
        if (c == ':') error("%s wants a value: try --help", argv[optind - 1]);
        if (c == '?' && optopt > 0) error("unknown option -%c: try --help", optopt); // a letter
        if (c == '?') error("unknown option %s: try --help", argv[optind - 1]);
        const Flag &f = flags[index];
        if (!f.set) return print_usage(), false;
        f.set(f.name, optarg);
        options.given.insert(f.name);
    }
    if (optind < argc) error("unknown argument %s: try --help", argv[optind]);
    complete_options();
    return true;
}

// The data; and what is to be written later, if it cannot be, fails now.
static void read_data() {
    train_set = load_data(options.data, "train");
    test_set = load_data(options.data, "t10k");
    std::error_code code; // a link stays one: the file that it names is replaced
    if (fs::is_symlink(options.log, code) && !fs::is_other(options.log, code))
        options.log = fs::path(options.log).parent_path() / fs::read_symlink(options.log);
    check_writable(options.log);
    if (!options.save.empty()) check_save();
}
// The devices, the parameters. `first`: CUDA's number of gpu(0)
static void set_up(int devices, bool quiet, int first = 0) {
    // The stand-in shows as many devices as are wanted
    if (on_cpu) setenv("CUDA_CPU_DEVICES", std::to_string(devices).c_str(), 0);
    use_devices(devices, quiet, first);
    rng.seed(options.seed);
    init_model();
    if (!options.init.empty()) load_params(params, options.init);
    if (options.resume) resume(options.save, training_options());
}
static void print_memory() {
    for (int c = 0; c < options.gpus && options.verbose; c++)
        printf("%s: %.1f MB of device memory at most\n", str(gpu(c)).c_str(),
               state(gpu(c)).peak_bytes / 1e6);
}
void run_program() {
    read_data();
    printf("operators: %s\n", operators.name.c_str());
    set_up(options.gpus, false);
    experiment();
    params.clear();
    print_memory();
}

int mgpu_main(int argc, char **argv, void (*run)() = run_program) {
    setvbuf(stdout, nullptr, _IOLBF, BUFSIZ); // a line at a time, into a pipe too
    try {
        if (parse_options(argc, argv)) {
            if (options.allreduce != "naive" || options.overlap)
                exchange = exchange_by(options.allreduce, options.overlap);
            catch_signals();
            run();
        }
        if (fflush(stdout) || ferror(stdout)) error("what is printed cannot be written to stdout");
        return 0;
    } catch (const std::bad_alloc &) {
        fprintf(stderr, "mgpu: the host is out of memory\n");
    } catch (const std::exception &e) {
        fflush(stdout);
        fprintf(stderr, "mgpu: %s\n", e.what());
    }
    _exit(1); // what is enqueued on the devices is dropped
}

#ifndef MGPU_NO_MAIN // tests.cu and lab/ have a main of their own
int main(int argc, char **argv) { return mgpu_main(argc, argv); }
#endif
