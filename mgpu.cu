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
//   9. Autograd and fusion
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
    float *ptr() const;           // data; a launch that fusion (section 9) has put off goes first

    // For autograd (section 9). Of a gradient:
    unsigned written = 0; // the number of the backward pass that wrote it last
    std::shared_ptr<struct Event> complete = nullptr; // recorded after that write
    bool shared = false;                              // another gradient may have the same memory
    // Of an operator's result:
    bool masked = false;                         // it is relu(X), and `grad` is the gradient of X
    std::shared_ptr<struct Launch> by = nullptr; // the launch that writes it, perhaps not yet
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

extern const char *const usual_kernels; // on this machine (section 8)
// The command line (section 14). What it does not give has the value of the model's chapter (10).
struct Options {
    int gpus = 1, batch = 256, epochs = 10; // batch: samples over all devices
    int steps = 0, limit = 0; // stop after so many minibatches, use so many samples; 0: all
    float lr = 0.2f;
    unsigned seed = 0;
    bool shuffle = true, overlap = false, first_check = true, replica_check = true;
    bool resume = false, verbose = false;
    bool evaluate_all = false; // test accuracy on all devices, not on the first alone
    std::string model = "lenet", allreduce = "naive", kvstore, kernels = usual_kernels;
    std::string precision = "fp32"; // of the factors in the fast kernels: fp32 or tf32
    std::vector<int> split;         // proportions of the devices' shards; empty: equal ones
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
            if (t.by) t.ptr(); // a result that fusion left out (section 9) is computed now
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
        src.ptr(); // a result that fusion left out is computed now
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

// --- launching a kernel: its threads and blocks, and the check of the launch
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
static char inside[200]; // for error messages, while it runs: "yours, k = 3, 1 tensor, 5 numbers: "
void run_allreduce(const std::string &name, const Grads &grads) {
    int n = 0;
    const int k = grads.size(), P = grads[0].size();
    for (const Tensor &t : grads[0]) n += size(t);
    if (!meant_for(name, k)) error("%s is not meant for %d devices", name.c_str(), k);
    snprintf(inside, sizeof inside, "%s, k = %d, %d tensor%s, %d number%s: ", name.c_str(), k, P,
             P == 1 ? "" : "s", n, n == 1 ? "" : "s");
    const Part sum("sum");
    try {
        for (const Algorithm &a : algorithms)
            if (a.name == name) a.run(grads);
    } catch (const std::exception &e) { error("%s%s", inside, e.what()); }
    *inside = 0; // not after an error, which ends the program
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
// batch normalization; the convolution is a ladder of three rungs. A kernel's arguments are its
// outputs, then its inputs, then sizes. An operator of your own starts as a copy of relu.

// Where a kernel stores its result, and its epilogue: += for a gradient that has several parts, and
// the operators that are fused with the kernel's own (section 9).
struct Target {
    float *data;
    const float *plus = nullptr; // is added to the value: `data` itself for +=
    const float *mask = nullptr; // where it is not positive, the value counts as 0
    long relu = 0;               // 1: max(0, sum) is stored
    float *pooled = nullptr;     // where the means of data's 2x2 windows go, too, if not null
    __device__ __forceinline__ void store(int i, float value) const {
        const float least = relu ? 0 : -INFINITY;
        if (mask || plus) {
            if (mask) value = mask[i] > 0 ? value : 0;
            if (plus) value += plus[i];
        }
        data[i] = value < least ? least : value; // NaN stays NaN
    }
    __host__ __device__ __forceinline__ Target from(int i) const { // the same from element i on
        return {data + i, plus ? plus + i : plus, mask ? mask + i : mask, relu};
    }
};
// What an operator takes from autograd (section 9): output() allocates y, record() puts the
// backward onto the tape, grad_of() says where dX goes.
Tensor output(const char *op, const std::vector<Tensor> &inputs, std::vector<int> shape);
void record(const Tensor &y, std::function<void()> backward);
Target grad_of(const Tensor &X); // null data where X wants no gradient
extern bool recording;           // false under NoGrad
// What it takes from fusion: launch() enqueues the kernel that writes y, perhaps later, when it is
// known what follows. join() makes the launch of X, if it still waits, write y = max(0, X), or
// y = X + *plus, instead.
bool fused(); // false with KERNELS=plain
void launch(Tensor &y, std::function<void(Target y)> kernel, bool pools = false);
bool join(const Tensor &X, Tensor &y, const Tensor *plus = nullptr);
Tensor fused_relu(const Tensor &X, Tensor y);
bool share_grad(const Tensor &X, const Tensor &y); // dX = dy: share its memory, if possible
void parameters_change();                          // sgd says so
void check_shape(const char *op, bool right, const char *wanted, const std::vector<Tensor> &inputs);
void same_device(const char *op, const std::vector<Tensor> &inputs);

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

Tensor relu(const Tensor &X) {
    Tensor y = output("relu", {X}, X.shape);
    const int n = size(X);
    if (fused()) return fused_relu(X, y); // an operator of your own leaves this out
    LAUNCH(relu_kernel<<<blocks(n), threads, 0, on(X.device)>>>(y.ptr(), X.ptr(), n));
    record(y, [=] {
        LAUNCH(relu_backward_kernel<<<blocks(n), threads, 0, on(X.device)>>>(
            grad_of(X), y.grad->ptr(), X.ptr(), n));
    });
    return y;
}

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

// A + B, of one shape. They may be the same tensor: its gradient is then 2 dy.
Tensor add(const Tensor &A, const Tensor &B) {
    check_shape("add", A.shape == B.shape, "two of the same shape", {A, B});
    Tensor y = output("add", {A, B}, A.shape);
    const int n = size(A);
    if (!join(A, y, &B) && !join(B, y, &A))
        LAUNCH(add_forward_kernel<<<blocks(n), threads, 0, on(A.device)>>>(y.ptr(), A.ptr(),
                                                                           B.ptr(), n));
    record(y, [=] {
        for (const Tensor &X : {A, B}) {
            if (!X.grad || share_grad(X, y)) continue;
            LAUNCH(add_backward_kernel<<<blocks(n), threads, 0, on(X.device)>>>(grad_of(X),
                                                                                y.grad->ptr(), n));
        }
    });
    return y;
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

// --- what differs on a CPU; sums over a warp and over a block
// On a GPU the 32 threads of a warp take neighbouring elements. On a CPU a warp is one thread, and
// the compiler vectorises its loop over neighbouring elements: `lanes` of them, or tile_n. With
// MGPU_LANES a CPU has the GPU's warps, see `make lanes`.
#ifdef CUDA_CPU
constexpr bool on_cpu = true;
#else
constexpr bool on_cpu = false;
#endif
#if defined(__CUDACC__) || defined(__clang__)
#define UNROLL _Pragma("unroll")
#define UNROLL_GPU UNROLL
#else
#define UNROLL _Pragma("GCC unroll 16")
#define UNROLL_GPU // what keeps arrays in a GPU's registers would only cost g++ time
#endif
#if defined(__CUDACC__) || defined(MGPU_LANES)
#define UNROLL_LANES UNROLL
constexpr int warp_size = 32, lanes = 1;
constexpr int tile_m = 8, tile_n = 8, wide = 1; // a thread's tile of sums; floats in a register
typedef float Wide;
__device__ inline float warp_reduce_sum(float sum) { // every lane of the warp returns it
    for (int half = warp_size / 2; half > 0; half /= 2) sum += __shfl_xor_sync(~0u, sum, half);
    return sum;
}
#else
#define UNROLL_LANES _Pragma("omp simd")
constexpr int warp_size = 1, lanes = 16; // a block's threads run one after another
// A tile of sums, a row of B and, by clang++, one number of each row of A fit the registers.
#if defined(__AVX512F__) && defined(__clang__) // 32 registers of 16 floats
constexpr int tile_m = 8, tile_n = 32, wide = 16;
#elif defined(__AVX512F__)
constexpr int tile_m = 12, tile_n = 32, wide = 16;
#elif defined(__AVX__) // 16 of 8
constexpr int tile_m = 6, tile_n = 16, wide = 8;
#else                  // NEON: 32 of 4
constexpr int tile_m = 6, tile_n = 16, wide = 4;
#endif
// `wide` neighbours in an array as one number: (Wide &)a[0] += b * (const Wide &)c[0]. From a plain
// loop g++ makes the same code, but clang++ would leave a tile of sums in memory.
typedef float Wide __attribute__((vector_size(wide * 4), aligned(4), may_alias));
inline float warp_reduce_sum(float sum) { return sum; }
#endif

const char *const usual_kernels = warp_size > 1 ? "fast" : "tiled";

// The sum of value(i) over i < n by one warp, in a fixed order; every lane returns it. Each lane
// keeps tile_n partial sums, so that rounding errors stay small.
template <class Value> __device__ inline float warp_sum(int n, Value value) {
    float part[tile_n] = {}, sum = 0;
    int i = threadIdx.x % warp_size;
    for (; i + (tile_n - 1) * warp_size < n; i += tile_n * warp_size) {
        UNROLL_LANES
        for (int q = 0; q < tile_n; q++) part[q] += value(i + q * warp_size);
    }
    for (; i < n; i += warp_size) sum += value(i);
    UNROLL
    for (int q = 0; q < tile_n; q++) sum += part[q];
    return warp_reduce_sum(sum);
}

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
// One thread per `lanes` neighbours: 16 on a CPU, 1 on a GPU.
constexpr int max_gpus = 64;
struct Parts {
    const float *p[max_gpus];
};
__global__ void sum_parts_kernel(float *out, Parts parts, int k, int n) {
    const int first = (blockIdx.x * blockDim.x + threadIdx.x) * lanes;
    float sum[lanes] = {};
    const int count = min(lanes, n - first);
    for (int c = 0; c < k; c++) {
        UNROLL_LANES
        for (int q = 0; q < count; q++) sum[q] += parts.p[c][first + q];
    }
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
    LAUNCH(sum_parts_kernel<<<blocks(n, threads * lanes), threads, 0, on(a.device)>>>(
        sum, pointers, parts.size(), n));
}

// --- sgd
struct SgdList { // many parameters in one launch: that takes longer than the update of a small one
    static constexpr int most = warp_size > 1 ? 128 : 1; // emulated threads copy their arguments
    float *param[most];
    const float *grad[most];
    int n[most];
};
__global__ void sgd_kernel(SgdList list, float lr, float batch_size) {
    float *param = list.param[blockIdx.y];
    const float *grad = list.grad[blockIdx.y];
    const int n = list.n[blockIdx.y], all = gridDim.x * blockDim.x;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += all)
        param[i] -= lr * grad[i] / batch_size;
}

// param -= lr * param.grad / batch_size, for each param that has a gradient
void sgd(const std::vector<Tensor> &params, float lr, int batch_size) {
    parameters_change();
    const Part update("update");
    for (size_t next = 0; next < params.size();) {
        SgdList list = {};
        int count = 0, largest = 0;
        for (; next < params.size() && count < SgdList::most; next++) {
            const Tensor &p = params[next];
            if (!p.grad) continue; // a buffer
            same_device("sgd", {params[0], p});
            list.param[count] = p.ptr();
            list.grad[count] = p.grad->ptr();
            list.n[count++] = size(p);
            largest = std::max(largest, size(p));
        }
        const dim3 grid(blocks(largest, 4 * threads), count);
        if (largest > 0)
            LAUNCH(sgd_kernel<<<grid, threads, 0, on(params[0].device)>>>(list, lr, batch_size));
    }
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

// What the two differ in, for one window of X (KH rows, KW columns of a plane W wide): value() is
// its y, choose() the index of its maximum, given() the part of its dy = g that flows back to
// element `at` of its n = KH*KW elements.
struct Mean {
    __device__ static int choose(const float *, int, int, int) { return 0; }
    __device__ static float value(const float *X, int W, int KH, int KW) {
        float sum = 0;
        for (int u = 0; u < KH; u++)
            for (int v = 0; v < KW; v++) sum += X[u * W + v];
        return sum / (KH * KW);
    }
    __device__ static float given(float g, int, int, int n) { return g / n; }
};
struct Max { // the first of several largest; NaN counts as larger than any number
    // Without branches, which a CPU would often predict wrongly
    __device__ static int find(const float *X, int W, int KH, int KW, float *largest) {
        int best = 0;
        bool nan = false; // was there one?
        *largest = X[0];
        for (int u = 0; u < KH; u++)
            for (int v = 0; v < KW; v++) {
                const float x = X[u * W + v];
                const bool larger = ((x > *largest) | (x != x)) & !nan;
                nan |= x != x;
                best += (u * KW + v - best) * larger;
                *largest = x > *largest ? x : *largest;
            }
        *largest = nan ? NAN : *largest;
        return best;
    }
    __device__ static int choose(const float *X, int W, int KH, int KW) {
        float largest;
        return find(X, W, KH, KW, &largest);
    }
    __device__ static float value(const float *X, int W, int KH, int KW) {
        float largest;
        find(X, W, KH, KW, &largest);
        return largest;
    }
    __device__ static float given(float g, int chosen, int at, int) {
        return __int_as_float(__float_as_int(g) & -(chosen == at)); // g or 0
    }
};
// What the tutorial's pooling takes from fusion (section 9). join_pooling() has the launch of X, if
// it still waits and `pools`, store y as well. put_off() enqueues the kernel that writes dX only
// when somebody reads dX. The convolution before asks pooled() for what dX is, and reads that:
// dX[h,w] = dy[h/2,w/2] / 4 where mask[h,w] > 0, else 0.
struct Pooled {
    Tensor dy;
    const float *mask = nullptr; // null if dX is something else
};
bool join_pooling(const Tensor &X, Tensor &y);
void put_off(const Tensor &X, std::function<void(Target dX)> kernel, const Tensor &dy);
Pooled pooled(const Tensor &dX);

struct PoolShape {
    int P, H, W, OH, OW, KH, KW, S; // P = N*C planes; OH = (H - KH)/S + 1, rounded down
};

// X (P,H,W)   ->   y (P,OH,OW)
// One thread per output element; threadIdx.z counts planes. `fixed` is KH = KW = S if that is known
// at compile time, so that the compiler unrolls the loops, else 0.
template <class Window, int fixed>
__global__ void pool2d_kernel(float *y, const float *X, PoolShape s) {
    if (fixed) s.KH = s.KW = s.S = fixed;
    const int p = blockIdx.x * blockDim.z + threadIdx.z;
    if (p >= s.P) return;
    X += p * s.H * s.W;
    y += p * s.OH * s.OW;
    for (int i = threadIdx.y; i < s.OH; i += blockDim.y) UNROLL_LANES
    for (int j = threadIdx.x; j < s.OW; j += blockDim.x)
        y[i * s.OW + j] = Window::value(X + i * s.S * s.W + j * s.S, s.W, s.KH, s.KW);
}
// dX[h,w] = or += the sum of what the windows that hold (h,w) give it; past the last window, 0
//   dy (P,OH,OW)   X (P,H,W)   ->   dX (P,H,W)
// One thread per S x S patch of dX, from (i*S,j*S) on, or per column of it (see `own`). Every
// element is written, zeros too.
template <class Window, int fixed>
__global__ void pool2d_backward_kernel(Target dX, const float *dy, const float *X, PoolShape s) {
    if (fixed) s.KH = s.KW = s.S = fixed;
    const int p = blockIdx.x * blockDim.z + threadIdx.z, S = s.S, KW = s.KW, n = s.KH * KW;
    if (p >= s.P) return;
    dX = dX.from(p * s.H * s.W);
    X += p * s.H * s.W;
    dy += p * s.OH * s.OW;
    auto window = [=](int i, int j) { return X + i * S * s.W + j * S; };
    // With `fixed` a patch is a window. A thread takes the columns of `lanes` windows on a CPU, but
    // one column on a GPU, so that neighbouring threads write neighbours in memory. What flows
    // back is collected and then stored: compilers vectorise two such loops, but not one.
    constexpr int side = fixed ? fixed : 1, own = warp_size > 1 ? 1 : side;
    for (int i = threadIdx.y; i * S < s.H; i += blockDim.y) {
        const int done = fixed && i < s.OH ? s.OW : 0, end = done * S / own;
        for (int first = threadIdx.x * lanes; fixed && first < end; first += blockDim.x * lanes) {
            const int count = lanes > 1 ? min(lanes, end - first) : 1;
            float part[side][lanes * own];
            UNROLL_LANES
            for (int q = 0; q < count; q++) {
                const int at = first + q, j = at * own / S;
                const int chosen = Window::choose(window(i, j), s.W, s.KH, KW);
                const float g = dy[i * s.OW + j];
                UNROLL
                for (int u = 0; u < side; u++) UNROLL
                for (int v = 0; v < own; v++)
                    part[u][q * own + v] =
                        Window::given(g, chosen, u * KW + (own > 1 ? v : at % S), n);
            }
            UNROLL
            for (int u = 0; u < side; u++) UNROLL_LANES
            for (int q = 0; q < count * own; q++)
                dX.store((i * S + u) * s.W + first * own + q, part[u][q]);
        }
        for (int j = done + threadIdx.x; j * S < s.W; j += blockDim.x)
            for (int h = i * S; h < min(i * S + S, s.H); h++)
                for (int w = j * S; w < min(j * S + S, s.W); w++) {
                    float sum = 0;
                    for (int a = min(i, s.OH - 1); !fixed && a >= 0 && a * S + s.KH > h; a--)
                        for (int b = min(j, s.OW - 1); b >= 0 && b * S + KW > w; b--)
                            sum += Window::given(dy[a * s.OW + b],
                                                 Window::choose(window(a, b), s.W, s.KH, KW),
                                                 (h - a * S) * KW + w - b * S, n);
                    dX.store(h * s.W + w, sum);
                }
    }
}

template <class Window, int fixed>
static Tensor pool2d(const char *op, const Tensor &X, int KH, int KW, int S) {
    bool right =
        X.shape.size() == 4 && S > 0 && KH > 0 && KW > 0 && X.shape[2] >= KH && X.shape[3] >= KW;
    check_shape(op, right, "(N,C,H,W) with kernel_size <= H and W", {X});
    const int N = X.shape[0], C = X.shape[1], H = X.shape[2], W = X.shape[3];
    const PoolShape s = {N * C, H, W, (H - KH) / S + 1, (W - KW) / S + 1, KH, KW, S};
    Tensor y = output(op, {X}, {N, C, s.OH, s.OW});
    auto block_of = [=](int width) { // columns, rows, planes
        const int columns = min(width, warp_size), all_rows = blocks(H, S);
        const int rounds = blocks(all_rows, threads / columns);
        const int rows = on_cpu ? 1 : blocks(all_rows, rounds);
        return dim3(columns, rows, min(64, threads / (columns * rows)));
    };
    const dim3 block = block_of(blocks(W, S)), block_back = block_of(fixed ? W : blocks(W, S));
    const bool tutorial = std::is_same<Window, Mean>() && fixed == 2; // and nothing is left over:
    const bool fuses = tutorial && H == 2 * s.OH && W == 2 * s.OW;
    if (!fuses || !join_pooling(X, y))
        LAUNCH(pool2d_kernel<Window, fixed>
               <<<blocks(s.P, block.z), block, 0, on(X.device)>>>(y.ptr(), X.ptr(), s));
    record(y, [=] {
        Tensor x = X;
        x.grad = nullptr; // it may keep the kernel
        auto kernel = [=, dy = *y.grad](Target dX) {
            const int grid = blocks(s.P, block_back.z);
            LAUNCH(pool2d_backward_kernel<Window, fixed>
                   <<<grid, block_back, 0, on(x.device)>>>(dX, dy.ptr(), x.ptr(), s));
        };
        if (fuses) put_off(X, kernel, *y.grad);
        else kernel(grad_of(X));
    });
    return y;
}

// X (N,C,H,W)   ->   y (N,C,OH,OW). Same as F.avg_pool2d(X, kernel_size, stride).
Tensor avg_pool2d(const Tensor &X, int kernel_size, int stride) {
    const bool tutorial = kernel_size == 2 && stride == 2;
    return (tutorial ? pool2d<Mean, 2> : pool2d<Mean, 0>)("avg_pool2d", X, kernel_size, kernel_size,
                                                          stride);
}
// X (N,C,H,W)   ->   y (N,C,OH,OW). Same as F.max_pool2d(X, kernel_size, stride).
Tensor max_pool2d(const Tensor &X, int kernel_size, int stride) {
    const bool lab = kernel_size == 2 && stride == 2;
    return (lab ? pool2d<Max, 2> : pool2d<Max, 0>)("max_pool2d", X, kernel_size, kernel_size,
                                                   stride);
}
// X (N,C,H,W)   ->   y (N,C), the mean of each plane
// Same as nn.AdaptiveAvgPool2d((1,1)) and nn.Flatten().
Tensor global_avg_pool2d(const Tensor &X) {
    check_shape("global_avg_pool2d",
                X.shape.size() == 4 && X.shape[1] > 0 && X.shape[2] > 0 && X.shape[3] > 0,
                "(N,C,H,W)", {X});
    const int H = X.shape[2], W = X.shape[3];
    return reshape(pool2d<Mean, 0>("global_avg_pool2d", X, H, W, std::max(H, W)),
                   {X.shape[0], X.shape[1]});
}

// --- convolution and dense layers, plainly (KERNELS=plain)
// As in PyTorch, a convolution is a cross-correlation. A dense layer is the convolution of a 1x1
// image with a 1x1 kernel. Three sums are needed, for y, dX, and dW with db. Here they stand in
// three ways, a ladder. From the counts of nvcc's code, LeNet's step at batch 256 is estimated to
// take 12.3 ms on an H200 with the plain kernels, 0.41 ms tiled in registers and 0.20 ms tiled
// through shared memory. On a CPU core, which has no shared memory, the second rung is the fastest.
// See make bench BENCH=kernels.

// Element (k,o) of W, k = (c*K + u)*K + v, lies at W[k*W_stride_k + o*W_stride_o]: a convolution's
// W is (O,C,K,K), a dense layer's (C,O).
struct ConvShape {
    int N, C, H, W, O, K, stride, padding, OH, OW;
    int W_stride_k, W_stride_o;
    int tiled = 0; // 1: in registers, not through shared memory
};
__device__ inline float pixel(const float *X, const ConvShape &s, int n, int c, int h, int w) {
    const bool inside = h >= 0 && h < s.H && w >= 0 && w < s.W; // else it is padding
    return inside ? X[((n * s.C + c) * s.H + h) * s.W + w] : 0;
}

// y[n,o,i,j] = b[o] + sum over c,u,v of X[n,c,i*stride+u-padding,j*stride+v-padding] * W[o,c,u,v]
//   X (N,C,H,W)   W (O,C,K,K)   b (O)   ->   y (N,O,OH,OW)
// One thread per output element; neighbours in j read neighbours in X.
__global__ void conv2d_plain_kernel(float *y, const float *X, const float *W, const float *b,
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
__global__ void conv2d_plain_backward_input_kernel(Target dX, const float *dy, const float *W,
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
__global__ void conv2d_plain_backward_weights_kernel(Target dW, Target db, const float *dy,
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

static void plain_forward(const Target &y, const Tensor &X, const Tensor &W, const Tensor &b,
                          const ConvShape &s) {
    const int n = s.N * s.O * s.OH * s.OW;
    LAUNCH(conv2d_plain_kernel<<<blocks(n), threads, 0, on(X.device)>>>(y.data, X.ptr(), W.ptr(),
                                                                        b.ptr(), s));
}
static void plain_backward_input(const Tensor &X, const Tensor &W, const Tensor &y,
                                 const ConvShape &s) {
    LAUNCH(conv2d_plain_backward_input_kernel<<<blocks(size(X)), threads, 0, on(X.device)>>>(
        grad_of(X), y.grad->ptr(), W.ptr(), s));
}
static void plain_backward_weights(const Tensor &X, const Tensor &W, const Tensor &b,
                                   const Tensor &y, const ConvShape &s) {
    const int n = size(W) + size(b);
    LAUNCH(conv2d_plain_backward_weights_kernel<<<blocks(n), threads, 0, on(X.device)>>>(
        grad_of(W), grad_of(b), y.grad->ptr(), X.ptr(), s));
}

// --- convolution and dense layers, as matrix products
// The two faster rungs compute each of the three sums as a matrix product C (M,N) = A (M,K) @
// B (K,N) whose matrices A and B are never stored: an implicit GEMM.
//                      C    a row of it   a column   a term of the sum   A    B
//   forward            y    n,i,j         o          c,u,v               X    W
//   input gradient     dX   n,h,w         c          o,u,v               dy   W
//   weight gradient    dW   c,u,v         o          n,i,j               X    dy
// If C is small, several blocks share the terms of its sums, in slices: split-K.

// i / d for 0 <= i < 2^31, as a product and shifts: 3 instructions in place of some 20
struct Divisor {
    unsigned d, shift = 0, factor;
    Divisor(int d) : d(d) {
        while (1u << shift < this->d) shift++;
        factor = d ? (1ull << (31 + shift)) / d + 1 : 0;
    }
    __device__ __forceinline__ int operator()(unsigned i) const {
        return __umulhi(2 * i, factor) >> shift;
    }
};

// A Map tells where an index of rows, columns or terms, such as (n,i,j), leads to: the offset in
// memory and the position (h,w) in an image. With row_first its order is (i,n,j): then all windows
// of a tile leave the image at the same taps, and the terms that a tile can skip are its first ones
// or its last ones.
struct Point {
    int offset, h, w;
};
struct Axis {     // of an index:
    int count;    // how many values it has,
    int by;       // how far neighbours lie apart in memory,
    int step = 0; // and in rows or columns of the image
};
constexpr Axis none = {1, 0};
struct Map {
    Divisor P, Q; // i = (x*P + y)*Q + z
    int by_x, by_y, by_z, offset, h_by_x, h_by_y, h, w_by_z, w;
    Map(bool row_first, Axis image, Axis row, Axis column, int offset = 0, int h = 0, int w = 0)
        : P(row_first ? image.count : row.count), Q(column.count),
          by_x(row_first ? row.by : image.by), by_y(row_first ? image.by : row.by), by_z(column.by),
          offset(offset), h_by_x(row_first ? row.step : 0), h_by_y(row_first ? 0 : row.step), h(h),
          w_by_z(column.step), w(w) {}
    __device__ Point operator()(int i) const {
        const int xy = Q(i), z = i - xy * Q.d, x = P(xy), y = xy - x * P.d;
        return {x * by_x + y * by_y + z * by_z + offset, x * h_by_x + y * h_by_y + h,
                z * w_by_z + w};
    }
    // Of (n,i/2,j/2,i%2,j%2), where the map itself takes (n,i/2,j/2) to a window's first pixel
    __device__ Point in_window(int i) const {
        const Point p = (*this)(i / 4);
        const int down = i / 2 % 2, right = i % 2;
        return {p.offset + down * (by_y / 2) + right * (by_z / 2), p.h + down * (h_by_y / 2),
                p.w + right * (w_by_z / 2)};
    }
};
static Map spaced(int n, int stride) { return {false, none, none, {n, stride}}; } // i to i*stride
enum Pooling { // what of the tutorial's pooling is fused with a product
    no_pooling,
    pool_C,  // C's rows are (n,i/2,j/2,i%2,j%2): four neighbours form a window, see Target::pooled
    unpool_B // B is a Pooled dX, its pointer and maps are dy's
};
struct Factors {
    const float *A, *B, *B_mask; // B_mask: with unpool_B, else null
};
// C[C_row(m) + n*C_column] = sum over k < K of A[A_row(m) + A_term(k)] * B[B_term(k) + B_column(n)]
// Of A's two Points one is the corner of a window, the other a tap (u,v) of it. Outside of the
// image A is 0. (Aligned, so that a GPU loads two numbers at once.)
constexpr int most_taps = 15; // the largest K: more taps do not fit a mask
struct alignas(8) Product {
    int M, N, K; // of C's rows, its columns, and the terms of a sum
    Map A_row, A_term;
    int H, W; // of A's images
    Map B_term, B_column;
    Map C_row;
    int C_column;
    int taps; // the number of terms that share a tap's u, if a tile may skip them; else 0
    // 1: a weight gradient. Its rows are taps, its terms windows; and C gets one more row, the sums
    // of B's columns, as if A had a row of ones
    int weights;
    Map C_pooled_row = spaced(1, 0); // with pool_C
    __host__ __device__ int rows() const { return M + weights; }
    // A tap's mask has bit u and bit 16+v, a window's mask those of all u and v that lie outside of
    // the image. A common bit says that A is 0 there; ~0 has one with every mask.
    __device__ unsigned mask(const Point &p, bool window) const {
        if (!window) return 1u << p.h | 0x10000u << p.w;
        return (outside(p.h, H) & 0x7fff) | outside(p.w, W) << 16 | 1u << 31;
    }
    __device__ static unsigned outside(int h, int H) { return ~ones(H - h) | ones(-h); }
    __device__ static unsigned ones(int n) { return (1u << min(max(n, 0), most_taps)) - 1; }
};
// Where C goes. `sums` (its additional row) and `bias` have one number per column.
struct ProductOut {
    Target C, sums;
    const float *bias;
    long sums_by = 1, slices_by = 0; // distances: of neighbours in sums, of slices (see in_slices)
    // Where row m of this block's slice begins in C, or in sums
    __device__ int row(const Product &s, int m, Pooling pooling = no_pooling) const {
        const Point p = pooling == pool_C ? s.C_row.in_window(m) : s.C_row(m);
        return blockIdx.z * slices_by + (m < s.M ? p.offset : 0);
    }
    // Store the sums of row m, which begins at `first`, in the columns n that exist. The same as
    // Target::store, but all loads are issued before the first of them is used.
    template <int G>
    __device__ void store(const Product &s, int m, int first, const int (&n)[G],
                          float (&sum)[G]) const {
        const Target to = m < s.M ? C : sums;
        if (!to.data) return;
        const float least = to.relu ? 0 : -INFINITY;
        const int by = m < s.M ? s.C_column : sums_by;
        int at[G];
        UNROLL_GPU
        for (int g = 0; g < G; g++) at[g] = first + min(n[g], s.N - 1) * by;
        if (to.mask) {
            UNROLL_GPU
            for (int g = 0; g < G; g++) sum[g] = to.mask[at[g]] > 0 ? sum[g] : 0;
        }
        if (to.plus) { // past the last column that one is read, for nothing: on a CPU it is a race
            UNROLL_GPU
            for (int g = 0; g < G; g++)
                if (!on_cpu || n[g] < s.N) sum[g] += to.plus[at[g]];
        }
        UNROLL_GPU
        for (int g = 0; g < G; g++)
            if (n[g] < s.N) to.data[at[g]] = sum[g] < least ? least : sum[g];
    }
};

struct Range {
    int begin, end;
};
// The terms of rows whose windows begin between `top` and `bottom`: all, or only those of the taps
// u at which some window meets the image.
__device__ inline Range terms_inside(const Product &s, int top, int bottom) {
    if (!s.taps) return {0, s.K};
    const int begin = max(0, -bottom) * s.taps;
    return {begin, max(begin, min(s.K, (s.H - top) * s.taps))};
}
// This block's slice of a range, a multiple of `step` terms.
__device__ inline Range slice_of(Range all, int step) {
    const int steps = (all.end - all.begin + step - 1) / step, slice = blockIdx.z;
    const int slices = gridDim.z;
    return {all.begin + int((long long)steps * slice / slices) * step,
            min(all.end, all.begin + int((long long)steps * (slice + 1) / slices) * step)};
}
// C is the sum of its slices, partial[slice][n][m], in a fixed order. blockDim.y threads add one
// element of C, each every blockDim.y-th slice.
__global__ void product_sum_kernel(ProductOut out, const float *partial, int slices, Divisor rows,
                                   Product s) {
    __shared__ float sums[threads];
    const int i = blockIdx.x * blockDim.x + threadIdx.x, count = rows.d * s.N;
    const int n = rows(i), m = i - n * rows.d, part = threadIdx.y, parts = blockDim.y;
    const float *from = partial + part * count + i;
    const int step = parts * count;
    float sum[1] = {part == 0 && out.bias && i < count ? out.bias[n] : 0};
    int slice = i < count ? part : slices;
    for (; slice + 15 * parts < slices; slice += 16 * parts, from += 16 * step) {
        UNROLL
        for (int q = 0; q < 16; q++) sum[0] += from[q * step]; // 16 loads are in flight
    }
    for (; slice < slices; slice += parts, from += step) sum[0] += *from;
    if (parts > 1) {
        sums[part * blockDim.x + threadIdx.x] = sum[0];
        __syncthreads();
        for (int p = 1; p < parts && part == 0; p++) sum[0] += sums[p * blockDim.x + threadIdx.x];
    }
    if (part == 0 && i < count) out.store<1>(s, m, out.row(s, m), {n}, sum);
}
static void product_sum(const ProductOut &out, const float *partial, int slices, const Product &s,
                        Device device) {
    const int n = s.rows() * s.N, parts = slices < 64 ? 1 : 16;
    const dim3 block(threads / parts, parts);
    LAUNCH(product_sum_kernel<<<blocks(n, block.x), block, 0, on(device)>>>(out, partial, slices,
                                                                            Divisor(s.rows()), s));
}
// compute(out, s) launches the kernel that computes C or, if there are several slices, these.
template <class Compute>
static void in_slices(int slices, const ProductOut &out, const Product &s, Device device,
                      Compute compute) {
    if (slices == 1) return compute(out, s);
    const Tensor partial = empty({slices, s.N, s.rows()}, device);
    float *const C = partial.ptr();
    Product slice = s;
    slice.C_row = spaced(s.M, 1);
    slice.C_column = s.rows();
    compute({{C}, {C + s.M}, nullptr, s.rows(), s.rows() * s.N}, slice);
    product_sum(out, C, slices, s, device);
}

// --- convolution and dense layers, tiled in registers (KERNELS=tiled)
// A plain thread loads two numbers for each product. Here a thread keeps tile_m x tile_n sums in
// registers, and loads tile_m + tile_n numbers for tile_m * tile_n products. It reads A in place,
// at offsets from a table, and B from a packed copy in which a term's tile_n numbers are
// neighbours. A's images have zeros around them, so that no load asks whether it is inside.

// out (P,H+2*above,W+2*beside) = in (P,H,W) with zeros around it. One warp per row of out.
__global__ void pad_kernel(float *out, const float *in, int P, int H, int W, int above,
                           int beside) {
    const int height = H + 2 * above, width = W + 2 * beside;
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) / warp_size, h = row % height - above;
    if (row >= P * height) return;
    const bool inside = h >= 0 && h < H;
    in += inside ? (row / height * H + h) * W : 0;
    out += row * width;
    for (int w = threadIdx.x % warp_size; w < beside; w += warp_size)
        out[w] = out[beside + W + w] = 0;
    UNROLL_LANES
    for (int w = threadIdx.x % warp_size; w < W; w += warp_size)
        out[beside + w] = inside ? in[w] : 0;
}
struct Images { // (N,C,H,W), perhaps with zeros around each plane
    Tensor memory;
    int first, pitch, plane; // where (0,0,0,0) lies; distances from row to row, plane to plane
    const float *ptr() const {
        const float *all = memory.ptr();
        return all ? all + first : nullptr;
    }
};
static Images pad(const Tensor &X, int H, int W, int above, int beside) {
    const int height = H + 2 * above, width = W + 2 * beside, planes = size(X) / (H * W);
    Tensor out = X;
    if (above > 0 || beside > 0) {
        out = empty({planes, height, width}, X.device);
        const long lanes_of_rows = (long)planes * height * warp_size;
        LAUNCH(pad_kernel<<<blocks(lanes_of_rows), threads, 0, on(X.device)>>>(
            out.ptr(), X.ptr(), planes, H, W, above, beside));
    }
    return {out, above * width + beside, width, height * width};
}

// packed[tile][k][q] = B's term k of column tile*tile_n + q (past the last one, that one again);
// A_offsets[k] = the offset of term k in A
// One thread per `lanes` columns of pack_rows terms.
constexpr int pack_rows = warp_size > 1 ? 1 : 16;
__global__ void pack_kernel(float *packed, int *A_offsets, const float *B, Product s) {
    const int begin = (blockIdx.x * blockDim.y + threadIdx.y) * pack_rows;
    const int q0 = threadIdx.x * lanes, n0 = blockIdx.y * tile_n + q0;
    int column[lanes];
    for (int q = 0; q < lanes; q++) column[q] = s.B_column(min(n0 + q, s.N - 1)).offset;
    for (int k = begin; k < min(begin + pack_rows, s.K); k++) {
        const float *from = B + s.B_term(k).offset;
        float *to = packed + (blockIdx.y * s.K + k) * tile_n + q0;
        for (int q = 0; q < lanes; q++) to[q] = from[column[q]];
        if (n0 == 0) A_offsets[k] = s.A_term(k).offset;
    }
}

// Store a thread's sums, plus the bias: `first` is its first row, n0 its first column.
__device__ __forceinline__ void tiled_store(const float (&sum)[tile_m][tile_n], int first, int n0,
                                            const ProductOut &out, const Product &s) {
    const int columns = min(tile_n, s.N - n0);
    float result[tile_m][tile_n]; // a copy: an array that variables index may lie in memory
    UNROLL
    for (int m = 0; m < tile_m; m++) {
        UNROLL
        for (int q = 0; q < tile_n; q += wide) (Wide &)result[m][q] = (const Wide &)sum[m][q];
    }
    UNROLL
    for (int q = 0; q < tile_n; q++) {
        const float bias = out.bias && q < columns ? out.bias[n0 + q] : 0;
        UNROLL
        for (int m = 0; m < tile_m; m++) result[m][q] += bias;
    }
    int at[tile_m]; // where column n0 of each row goes; it grows with the row
    UNROLL
    for (int m = 0; m < tile_m; m++)
        at[m] = n0 * s.C_column + out.row(s, min(first + m * warp_size, s.M - 1));
    const bool full = first + (tile_m - 1) * warp_size < s.M;
    if (on_cpu && full && at[tile_m - 1] - at[0] == tile_m - 1) { // neighbours in memory
        for (int q = 0; q < columns; q++) UNROLL_LANES
        for (int m = 0; m < tile_m; m++) out.C.store(at[0] + q * s.C_column + m, result[m][q]);
        return;
    }
    UNROLL_GPU
    for (int q = 0; q < tile_n; q++) {
        if (q >= columns) break;
        UNROLL
        for (int m = 0; m < tile_m; m++)
            if (first + m * warp_size < s.M) out.C.store(at[m] + q * s.C_column, result[m][q]);
    }
}
// One warp: the sums of B's columns from n0 on.
__device__ __forceinline__ void sum_columns(const float *b, int n0, const ProductOut &out,
                                            const Product &s) {
    const Range range = slice_of({0, s.K}, 1);
    const int lane = threadIdx.x % warp_size;
    float sum[tile_n] = {};
    for (int k = range.begin + lane; k < range.end; k += warp_size) {
        UNROLL
        for (int q = 0; q < tile_n; q += wide) (Wide &)sum[q] += (const Wide &)b[k * tile_n + q];
    }
    UNROLL_GPU
    for (int q = 0; q < tile_n; q++) {
        const float total = warp_reduce_sum(sum[q]);
        if (lane == 0 && n0 + q < s.N && out.sums.data)
            out.sums.store(out.row(s, s.M) + (n0 + q) * out.sums_by, total);
    }
}
// Each thread computes tile_m rows of C, one warp's width apart, of tile_n columns. With s.weights
// the first warp adds up B's columns, too. Blocks of the same rows, `tiles` of them, follow each
// other: all but the first find A in a cache. ResNet-18 on a CPU: 0.8 to 0.9 of the time.
__global__ void __launch_bounds__(64)
    tiled_kernel(ProductOut out, const float *A, const int *A_offsets, const float *packed,
                 Product s) {
    const int tiles = (s.N + tile_n - 1) / tile_n, tile = blockIdx.x % tiles, n0 = tile * tile_n;
    const int thread = blockIdx.x / tiles * blockDim.x + threadIdx.x;
    const int first = thread / warp_size * warp_size * tile_m + thread % warp_size;
    const float *b = packed + tile * s.K * tile_n;
    if (s.weights && thread < warp_size) sum_columns(b, n0, out, s);
    if (first >= s.M || !out.C.data) return;
    int offset[tile_m], top = INT_MAX, bottom = -INT_MAX; // where the rows begin in A
    UNROLL
    for (int m = 0; m < tile_m; m++) {
        const Point p = s.A_row(min(first + m * warp_size, s.M - 1));
        offset[m] = p.offset;
        top = min(top, p.h);
        bottom = max(bottom, p.h);
    }
    const Range range = slice_of(terms_inside(s, top, bottom), 1);
    float sum[tile_m][tile_n] = {};
    b += range.begin * tile_n;
    for (int k = range.begin; k < range.end; k++, b += tile_n) {
        const float *a = A + A_offsets[k];
        UNROLL
        for (int m = 0; m < tile_m; m++) {
            const float am = a[offset[m]];
            UNROLL
            for (int q = 0; q < tile_n; q += wide) (Wide &)sum[m][q] += am * (const Wide &)b[q];
        }
    }
    tiled_store(sum, first, n0, out, s);
}
static void tiled_product(const ProductOut &out, const Images &A, const Tensor &B,
                          const Product &s) {
    const Device device = B.device;
    const int tiles = blocks(s.N, tile_n), width = blocks(s.M, warp_size * tile_m) * warp_size;
    const Tensor packed = empty({tiles, s.K, tile_n}, device), table = empty({s.K}, device);
    int *const A_offsets = (int *)table.ptr();
    const dim3 pack(tile_n / lanes, 16), pack_grid(blocks(s.K, pack.y * pack_rows), tiles);
    if (s.K > 0)
        LAUNCH(
            pack_kernel<<<pack_grid, pack, 0, on(device)>>>(packed.ptr(), A_offsets, B.ptr(), s));
    // Only as many slices as fill the device with threads, because each is written, read and added;
    // and enough for a slice of a packed tile to fit the second-level cache of a CPU's core.
    const int block = warp_size > 1 ? 64 : 8;
    const int enough = warp_size > 1 ? 1 << 15 : s.weights ? 1 << 8 : 1, most_terms = 1 << 13;
    const int fill = min(s.K / 64, blocks(enough, width * tiles));
    const int slices = max(fill, blocks(s.K, most_terms));
    const float *const a = A.ptr(), *const b = packed.ptr();
    in_slices(slices, out, s, device, [&](const ProductOut &out, const Product &s) {
        const dim3 grid(blocks(width, block) * tiles, 1, slices);
        LAUNCH(tiled_kernel<<<grid, block, 0, on(device)>>>(out, a, A_offsets, b, s));
    });
}

// A shallow convolution, of few channels C such as LeNet's conv1, has so few products that to pack
// dy, and to store a tile whose columns lie a plane apart, takes longer than to multiply. On a CPU
// its threads then compute neighbours of a row, a register full at a time, and pack nothing. The
// last register of a row begins earlier, to end with the row: it has some pixels again. LeNet's
// step: 0.89 of the time.
static bool is_shallow(const ConvShape &s) {
    return s.tiled && warp_size == 1 && s.K == 3 && s.C <= 3 && s.stride == 1 && s.OW >= lanes;
}
static ConvShape with_zeros(ConvShape s) { // as pad(X) is
    s.H += 2 * s.padding, s.W += 2 * s.padding;
    return s;
}
// y[n,o,i,j] = b[o] + sum over c,u,v of X[n,c,i+u,j+v] * W[o,c,u,v]
//   X (N,C,H,W), zeros included   W (O,C,3,3)   b (O)   ->   y (N,O,OH,OW)
// One thread per plane (n,o).
__global__ void shallow_kernel(Target y, const float *X, const float *W, const float *b,
                               ConvShape s) {
    const int plane = blockIdx.x * blockDim.x + threadIdx.x, n = plane / s.O, o = plane % s.O;
    if (n >= s.N) return;
    for (int i = 0; i < s.OH; i++)
        for (int begin = 0; begin < s.OW; begin += lanes) {
            const int j = min(begin, s.OW - lanes);
            float sum[lanes] = {};
            for (int c = 0; c < s.C; c++) {
                const float *x = X + ((n * s.C + c) * s.H + i) * s.W + j;
                UNROLL
                for (int k = 0; k < 9; k++) {
                    const float w = W[(c * 9 + k) * s.W_stride_k + o * s.W_stride_o];
                    UNROLL
                    for (int q = 0; q < lanes; q += wide)
                        (Wide &)sum[q] += w * (const Wide &)x[k / 3 * s.W + k % 3 + q];
                }
            }
            UNROLL_LANES
            for (int q = 0; q < lanes; q++)
                y.store((plane * s.OH + i) * s.OW + j + q, sum[q] + b[o]);
        }
}

static void shallow_forward(const Target &y, const Images &X, const Tensor &W, const Tensor &b,
                            const ConvShape &s) {
    LAUNCH(shallow_kernel<<<blocks(s.N * s.O, 16), 16, 0, on(W.device)>>>(
        y, X.memory.ptr(), W.ptr(), b.ptr(), with_zeros(s)));
}
// partial[slice][o][k] = the sums over the slice's images for dW (k < 9*C) and db (k = 9*C), from
// dy (N,O,OH,OW) itself. One thread per slice and (o,c); its sum[k][q] are of every `wide`th pixel.
__global__ void shallow_weight_grad_kernel(float *partial, const float *X, const float *dy,
                                           ConvShape s) {
    const int thread = blockIdx.x * blockDim.x + threadIdx.x, o = thread / s.C, c = thread % s.C;
    const int slice = blockIdx.z, slices = gridDim.z, terms = s.C * 9;
    if (o >= s.O) return;
    const int begin = (long long)s.N * slice / slices, end = (long long)s.N * (slice + 1) / slices;
    float sum[10][wide] = {}; // for 9 weights, then for the bias
    float fresh[wide];        // 0 where a row's last register has pixels again, else 1
    for (int q = 0; q < wide; q++) fresh[q] = q + (s.OW - 1) % wide >= wide - 1;
    for (int n = begin; n < end; n++)
        for (int i = 0; i < s.OH; i++) {
            const float *g = dy + ((n * s.O + o) * s.OH + i) * s.OW;
            const float *x = X + ((n * s.C + c) * s.H + i) * s.W;
            for (int first = 0; first < s.OW; first += wide) {
                const int j = min(first, s.OW - wide);
                Wide gj = (const Wide &)g[j];
                if (j < first) gj *= (const Wide &)fresh[0];
                UNROLL
                for (int k = 0; k < 9; k++)
                    (Wide &)sum[k][0] += gj * (const Wide &)x[k / 3 * s.W + k % 3 + j];
                (Wide &)sum[9][0] += gj;
            }
        }
    float *out = partial + (slice * s.O + o) * (terms + 1);
    UNROLL
    for (int k = 0; k < 10; k++) {
        float total = 0;
        for (int q = 0; q < wide; q++) total += sum[k][q];
        if (k < 9 || c == 0) out[k < 9 ? c * 9 + k : terms] = total;
    }
}
static void shallow_backward_weights(const ProductOut &out, const Images &X, const Tensor &dy,
                                     const Product &p, const ConvShape &s) {
    const int slices = min(s.N, min(32, blocks(1 << 9, s.O * s.C)));
    const Tensor partial = empty({slices, p.N, p.rows()}, dy.device);
    const dim3 grid(blocks(s.O * s.C, 8), 1, slices);
    const float *const g = dy.ptr();
    if (slices > 0)
        LAUNCH(shallow_weight_grad_kernel<<<grid, 8, 0, on(dy.device)>>>(
            partial.ptr(), X.memory.ptr(), g, with_zeros(s)));
    product_sum(out, partial.ptr(), slices, p, dy.device);
}

// --- convolution and dense layers, tiled through shared memory (KERNELS=fast)
// A block loads 8 or 16 terms of its rows and columns into shared memory. While its threads
// multiply them, it loads the next ones into registers: double buffering.

// A block's tile of TM x TN sums: which of them a thread has, and how TK terms at a time lie in
// shared memory. Threads of the same slot have the same columns. Here a thread has tm x tn sums;
// its rows are pairs of neighbours, so that one load brings two, and its columns begin at a
// multiple of four, so that one load brings four.
template <int tm, int tn, int tx, int ty, int TK_> struct Fp32Tile {
    static constexpr int TM = tx * tm, TN = ty * tn, TK = TK_, threads = tx * ty;
    static constexpr int rows = tm, columns = tn, own = 32 * TK / threads, slots = ty;
    static constexpr int pitch = (tn + 3) / 4 * 4; // from slot to slot
    struct alignas(16) Terms { // padded by 4: neighbouring terms begin in different banks
        float a[TK][TM + 4], b[TK][ty * pitch + 4];
        __device__ float &A(int k, int m) { return a[k][m]; }
        __device__ float &B(int k, int n) { return b[k][n + n / tn * (pitch - tn)]; }
        template <int n> __device__ void set_A(int k, int m, const float (&x)[n]) {
            UNROLL
            for (int i = 0; i < n; i++) a[k + i][m] = x[i];
        }
    };
    float sum[rows][columns] = {};
    __device__ int row(int i) const { return 2 * (threadIdx.x % tx) + i % 2 + i / 2 * 2 * tx; }
    __device__ int slot() const { return threadIdx.x / tx; }
    __device__ static int column(int q, int slot) { return slot * tn + q; }
    __device__ static float round(float x) { return x; }
    __device__ void add(Terms &terms) {
        UNROLL
        for (int k = 0; k < TK; k++) {
            float x[rows], y[columns];
            UNROLL
            for (int i = 0; i < rows; i++) x[i] = terms.A(k, row(i));
            UNROLL
            for (int q = 0; q < columns; q++) y[q] = terms.b[k][slot() * pitch + q];
            UNROLL
            for (int i = 0; i < rows; i++) {
                UNROLL
                for (int q = 0; q < columns; q++) sum[i][q] += x[i] * y[q];
            }
        }
    }
};
// PRECISION=tf32: factors are rounded to TF32, with 10 bits of mantissa; sums stay FP32. From SM 80
// on, tensor cores multiply. A warp has WM x WN sums, in tiles of 16 x 8, four for each thread.
template <int TM_, int TN_, int WM, int WN, int TK_> struct Tf32Tile {
    static constexpr int TM = TM_, TN = TN_, TK = TK_, warps = TM / WM * (TN / WN);
    static constexpr int threads = 32 * warps, rows = WM / 8, columns = WN / 4;
    static constexpr int own = TK / warps > 4 ? TK / warps : 4, slots = TN / WN * 4;
    struct alignas(16) Terms { // padded by 4: a load's 8 rows x 4 terms lie in different banks
        float a[TM][TK + 4], b[TN][TK + 4];
        __device__ float &A(int k, int m) { return a[m][k]; }
        __device__ float &B(int k, int n) { return b[n][k]; }
        template <int n> __device__ void set_A(int k, int m, const float (&x)[n]) {
            if (n == 1) a[m][k] = round(x[0]);
            UNROLL
            for (int i = 0; i < n / 4; i++) // four in one store
                ((float4 *)a[m])[k / 4 + i] = make_float4(round(x[4 * i]), round(x[4 * i + 1]),
                                                          round(x[4 * i + 2]), round(x[4 * i + 3]));
        }
    };
    float sum[rows][columns] = {};
    __device__ int row(int i) const {
        return threadIdx.x / 32 % (TM / WM) * WM + i * 8 + threadIdx.x % 32 / 4;
    }
    __device__ int slot() const { return threadIdx.x / 32 / (TM / WM) * 4 + threadIdx.x % 4; }
    __device__ static int column(int q, int slot) {
        return slot / 4 * WN + q / 2 * 8 + slot % 4 * 2 + q % 2;
    }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    __device__ static float round(float x) {
        unsigned bits;
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
        return __uint_as_float(bits);
    }
    __device__ void add(Terms &terms) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4; // see PTX on fragments
        UNROLL
        for (int k = t; k < TK; k += 8) {
            unsigned a[rows][2], b[WN / 8][2];
            UNROLL
            for (int i = 0; i < rows; i++) {
                UNROLL
                for (int j = 0; j < 2; j++) a[i][j] = __float_as_uint(terms.A(k + 4 * j, row(i)));
            }
            UNROLL
            for (int q = 0; q < WN / 8; q++) {
                UNROLL
                for (int j = 0; j < 2; j++)
                    b[q][j] = __float_as_uint(terms.B(k + 4 * j, column(2 * q, slot() - t) + g));
            }
            UNROLL
            for (int i = 0; i < rows; i += 2) {
                UNROLL
                for (int q = 0; q < WN / 8; q++)
                    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                        : "+f"(sum[i][2 * q]), "+f"(sum[i][2 * q + 1]), "+f"(sum[i + 1][2 * q]),
                          "+f"(sum[i + 1][2 * q + 1])
                        : "r"(a[i][0]), "r"(a[i + 1][0]), "r"(a[i][1]), "r"(a[i + 1][1]),
                          "r"(b[q][0]), "r"(b[q][1]));
            }
        }
    }
#else
    __device__ static float round(float x) { // to the nearest, ties away from 0
        return std::isfinite(x) ? __uint_as_float((__float_as_uint(x) + 0x1000) & ~0x1fffu) : x;
    }
    __device__ void add(Terms &terms) {
        for (int k = 0; k < TK; k++) {
            UNROLL
            for (int i = 0; i < rows; i++) {
                const float x = terms.A(k, row(i));
                UNROLL
                for (int q = 0; q < columns; q++) sum[i][q] += x * terms.B(k, column(q, slot()));
            }
        }
    }
#endif
};

// With pool_C: store the means of the windows whose sums store_tile has staged.
template <class Tile>
__device__ __forceinline__ void store_windows(int q, const float *staged, const ProductOut &out,
                                              const Product &s) {
    constexpr int windows = Tile::TM / 4;
    UNROLL_GPU
    for (int i = threadIdx.x; i < windows * Tile::slots; i += Tile::threads) {
        const int slot = i / windows, n = blockIdx.y * Tile::TN + Tile::column(q, slot);
        const int window = blockIdx.x * windows + i % windows;
        const float *x = staged + slot * (Tile::TM + 8) + i % windows * 4;
        float sum = 0;
        UNROLL
        for (int j = 0; j < 4; j++) sum += out.C.relu && x[j] < 0 ? 0 : x[j];
        if (n < s.N && 4 * window < s.M)
            out.C.pooled[s.C_pooled_row(window).offset + n * (s.C_column / 4)] = sum / 4;
    }
}
// Store the sums. They pass through shared memory, `staged`, a few columns at a time, so that a
// warp stores neighbours.
template <Pooling pooling, class Tile>
__device__ __forceinline__ void store_tile(const Tile &tile, float *staged, const ProductOut &out,
                                           const Product &s) {
    constexpr int TM = Tile::TM;
    constexpr int sweeps = TM > Tile::threads ? TM / Tile::threads : 1;  // over the rows
    constexpr int at_once = Tile::threads > TM ? Tile::threads / TM : 1; // columns
    constexpr int own_columns = Tile::slots / at_once;                   // of this thread
    const int m0 = blockIdx.x * TM, n0 = blockIdx.y * Tile::TN;
    float bias[Tile::columns] = {};
    if (out.bias) {
        UNROLL_GPU
        for (int q = 0; q < Tile::columns; q++)
            bias[q] = out.bias[min(n0 + Tile::column(q, tile.slot()), s.N - 1)];
    }
    int offset[sweeps];
    UNROLL_GPU
    for (int i = 0; i < sweeps; i++) {
        const int m = m0 + threadIdx.x % TM + i * Tile::threads;
        offset[i] = out.row(s, m, pooling);
    }
    UNROLL_GPU
    for (int q = 0; q < Tile::columns; q++) {
        UNROLL_GPU
        for (int i = 0; i < Tile::rows; i++)
            staged[tile.slot() * (TM + 8) + tile.row(i)] = tile.sum[i][q] + bias[q];
        __syncthreads();
        UNROLL_GPU
        for (int i = 0; i < sweeps; i++) {
            const int r = threadIdx.x % TM + i * Tile::threads, m = m0 + r;
            if (m >= s.rows()) break;
            int n[own_columns];
            float sum[own_columns];
            UNROLL_GPU
            for (int g = 0; g < own_columns; g++) {
                const int slot = threadIdx.x / TM + g * at_once;
                n[g] = n0 + Tile::column(q, slot);
                sum[g] = staged[slot * (TM + 8) + r];
            }
            out.store(s, m, offset[i], n, sum);
        }
        if (pooling == pool_C) store_windows<Tile>(q, staged, out, s);
        __syncthreads();
    }
}
// The offsets in A and masks of a block's rows and terms, and the terms' offsets in B. Terms lie
// in a ring buffer of 2*found: after every `found` terms, each thread finds one.
struct alignas(8) Place {
    int offset;
    unsigned mask;
};
template <class Tile, Pooling pooling> struct Places {
    static constexpr int found = Tile::threads;
    Place row[Tile::TM], term[2 * found];
    int B[2 * found]; // -1: there is no such term
    int mask[pooling == unpool_B ? 2 * found : 1];
};
// What a thread loads. Of A with by_terms: one term, of every A_step-th row from A_first on, so
// that a warp loads neighbouring terms; else: `own` terms from A_term on, of every 32nd row, so
// that a warp loads neighbouring rows. Of B: every threads-th element, neighbours being columns
// with by_columns, else terms.
template <class Tile, bool by_terms, bool by_columns, Pooling pooling> struct Loader {
    static constexpr int TK = Tile::TK, TN = Tile::TN, found = Places<Tile, pooling>::found;
    static constexpr int B_own = (TN * TK + Tile::threads - 1) / Tile::threads;
    static constexpr int own = by_terms ? 1 : Tile::own, A_step = by_terms ? found / TK : 32;
    static constexpr int parts = TK / own, rows = Tile::TM * TK / own / Tile::threads;
    const int warp = threadIdx.x / 32, m0 = blockIdx.x * Tile::TM, n0 = blockIdx.y * TN;
    const int A_term = by_terms ? threadIdx.x % TK : warp % parts * own;
    const int A_first = by_terms ? threadIdx.x / TK : warp / parts * 32 * rows + threadIdx.x % 32;
    const Factors from;
    const Product &s;
    const Range range;
    Places<Tile, pooling> &places;
    Place row[rows];
    float outside[rows]; // what A is where the masks meet: 1 in the additional row, else 0
    int column[B_own];
    float a[rows][own], b[B_own];

    __device__ __forceinline__ Loader(const Factors &from, const Product &s, Range range,
                                      Places<Tile, pooling> &places)
        : from(from), s(s), range(range), places(places) {
        for (int r = threadIdx.x; r < Tile::TM; r += Tile::threads) {
            const int m = min(m0 + r, s.M - 1);
            const Point p = pooling == pool_C ? s.A_row.in_window(m) : s.A_row(m);
            places.row[r] = {p.offset, m0 + r < s.M ? s.mask(p, !s.weights) : ~0u};
        }
        find_terms(range.begin);
        find_terms(range.begin + found);
        __syncthreads();
        UNROLL_GPU
        for (int r = 0; r < rows; r++) {
            row[r] = places.row[A_first + A_step * r];
            outside[r] = m0 + A_first + A_step * r == s.M;
        }
        UNROLL_GPU
        for (int q = 0; q < B_own; q++) // past the last column: that one again, never stored
            column[q] = s.B_column(min(n0 + B_column(q), s.N - 1)).offset;
    }
    __device__ static int B_term(int q) {
        const int term = (threadIdx.x + q * Tile::threads) / TN; // may lie beyond TK: not stored
        return by_columns ? min(term, TK - 1) : threadIdx.x % TK;
    }
    __device__ static int B_column(int q) {
        return by_columns ? (threadIdx.x + q * Tile::threads) % TN
                          : threadIdx.x / TK + q * (Tile::threads / TK);
    }
    __device__ __forceinline__ void find_terms(int first) {
        const int k = first + threadIdx.x, at = (k - range.begin) % (2 * found);
        const Point p = s.A_term(k);
        const bool there = k < range.end;
        places.term[at] = {p.offset, there ? s.mask(p, s.weights) : ~0u};
        const Point from = s.B_term(there ? k : range.begin);
        const int width = s.B_term.Q.d, quarter = from.h / 2 * (width / 2) + from.w / 2;
        places.B[at] = there ? from.offset + (pooling == unpool_B ? quarter : 0) : -1;
        if (pooling == unpool_B) places.mask[at] = 4 * from.offset + from.h * width + from.w;
    }
    __device__ __forceinline__ void load(int first) {
        const int at = (first - range.begin) % (2 * found);
        UNROLL_GPU
        for (int i = 0; i < own; i++) {
            const Place term = places.term[at + A_term + i];
            UNROLL_GPU
            for (int r = 0; r < rows; r++) {
                const bool inside = !(row[r].mask & term.mask);
                const unsigned place = inside ? row[r].offset + term.offset : 0; // no branch
                const float x = from.A[place];
                a[r][i] = inside ? x : outside[r];
            }
        }
        UNROLL_GPU
        for (int q = 0; q < B_own; q++) {
            const int offset = places.B[at + B_term(q)];
            const unsigned place = max(0, offset) + column[q];
            const float x = from.B[place];
            b[q] = offset < 0 ? 0 : x;
            if (pooling == unpool_B) // a column of the mask is four times as long
                b[q] = from.B_mask[places.mask[at + B_term(q)] + 4 * column[q]] > 0 ? b[q] / 4 : 0;
        }
    }
    __device__ __forceinline__ void store(typename Tile::Terms &terms) const {
        UNROLL_GPU
        for (int r = 0; r < rows; r++) terms.set_A(A_term, A_first + A_step * r, a[r]);
        UNROLL_GPU
        for (int q = 0; q < B_own; q++)
            if (TN * TK % Tile::threads == 0 || threadIdx.x + q * Tile::threads < TN * TK)
                terms.B(B_term(q), B_column(q)) = Tile::round(b[q]);
    }
};
// A block computes one tile of C, or a slice of its terms (split-K).
template <class Tile, bool by_terms, bool by_columns, Pooling pooling>
__global__ void __launch_bounds__(Tile::threads)
    product_kernel(ProductOut out, Factors from, Product s) {
    constexpr int TK = Tile::TK, found = Places<Tile, pooling>::found;
    __shared__ typename Tile::Terms terms[2];
    __shared__ Places<Tile, pooling> places;
    const int m0 = blockIdx.x * Tile::TM, last = min(m0 + Tile::TM, s.M) - 1;
    const Range range =
        slice_of(terms_inside(s, s.A_row(m0).h, s.A_row(last).h), TK); // row_first: h never falls
    const int begin = range.begin, end = range.end;
    Loader<Tile, by_terms, by_columns, pooling> loader(from, s, range, places);
    Tile tile;
    if (begin < end) {
        loader.load(begin);
        loader.store(terms[0]);
    }
    __syncthreads();
    for (int first = begin, half = 0; first < end; first += TK, half ^= 1) {
        if (first + TK < end) loader.load(first + TK);
        tile.add(terms[half]);
        if (first + TK < end) loader.store(terms[half ^ 1]);
        if (first > begin && (first - begin) % found == 0) loader.find_terms(first + found);
        __syncthreads();
    }
    store_tile<pooling>(tile, (float *)terms, out, s);
}
int multiprocessors(Device device); // of its GPU (section 11)

// The number of slices, of 128 terms or more, with which the GPU is estimated to end first. A
// multiprocessor takes as long for 256 threads as for fewer, and the one with the most blocks ends
// last. Writing a slice takes as much time as some 40 terms, the launch that adds them as 130.
static int product_slices(int tiles, int terms, int threads, int multiprocessors) {
    const int at_once = 256 / threads; // blocks on each multiprocessor
    const int most = min(terms / 128, blocks(3 * at_once * multiprocessors, tiles));
    int slices = 1;
    double best = INFINITY; // in units of a term
    for (int i = 1; i <= most; i++) {
        const double rounds = max(1., 1. * blocks(tiles * i, multiprocessors) / at_once);
        const double time = rounds * (terms / i + 40) + (i > 1 ? 130 : 0);
        if (time < best) best = time, slices = i;
    }
    return slices;
}
template <class Tile, bool by_terms, bool by_columns, Pooling pooling>
static void product_tiles(const ProductOut &out, const Factors &from, const Product &s,
                          Device device) {
    dim3 grid(blocks(s.rows(), Tile::TM), blocks(s.N, Tile::TN));
    grid.z = product_slices(grid.x * grid.y, s.K, Tile::threads, multiprocessors(device));
    in_slices(grid.z, out, s, device, [&](const ProductOut &out, const Product &s) {
        LAUNCH(product_kernel<Tile, by_terms, by_columns, pooling>
               <<<grid, Tile::threads, 0, on(device)>>>(out, from, s));
    });
}
// Tiles by the number of C's columns, small ones if large ones would not fill a GPU. They were
// chosen by counts of instructions and of lines of L1 and shared memory. A CPU compiles only one
// kernel for each precision, for tests.
#if defined(__CUDACC__) || defined(MGPU_LANES)
template <class Tile, bool by_terms, bool by_columns = false, Pooling pooling = no_pooling>
constexpr auto tiles = product_tiles<Tile, by_terms, by_columns, pooling>;
struct Fp32 {
    typedef Fp32Tile<2, 5, 8, 4, 16> Small20; // for LeNet's 20 channels
    typedef Fp32Tile<2, 8, 16, 4, 16> Small;
    typedef Fp32Tile<8, 5, 16, 4, 16> Columns20;
    typedef Fp32Tile<8, 8, 16, 4, 16> Columns32;
    typedef Fp32Tile<8, 13, 32, 4, 8> Columns52;    // for LeNet's 50 channels, and 20 * 5 columns
    typedef Fp32Tile<8, 13, 16, 4, 8> Columns52Low; // of half the rows: 162 tiles for conv2
    typedef Fp32Tile<16, 8, 16, 8, 8> Columns64;
    typedef Fp32Tile<8, 16, 16, 8, 8> Columns128;
};
struct Tf32 {
    typedef Tf32Tile<32, 32, 16, 32, 16> Small20, Small;
    typedef Tf32Tile<128, 32, 64, 32, 16> Columns20, Columns32;
    typedef Tf32Tile<256, 64, 64, 64, 8> Columns52, Columns52Low, Columns64;
    typedef Tf32Tile<256, 128, 64, 64, 8> Columns128;
};
#else
template <class Tile, bool = false, bool = false, Pooling = no_pooling>
constexpr auto tiles = product_tiles<Tile, false, false, no_pooling>;
template <class Tile> struct One {
    typedef Tile Small20, Small, Columns20, Columns32, Columns52, Columns52Low, Columns64,
        Columns128;
};
typedef One<Fp32Tile<8, 8, 16, 4, 16>> Fp32;
typedef One<Tf32Tile<32, 32, 16, 32, 16>> Tf32;
#endif
// by_terms if neighbouring terms are neighbours in A, as the windows of a weight gradient are. (A
// dense layer's are not: there each window is a sample, and neighbouring rows are neighbours.)
// by_columns if neighbouring columns are neighbours in B, as a dense layer's are.
template <class In>
static void product_in(const ProductOut &out, const Factors &from, const Product &s,
                       Device device) {
    const int large = blocks(s.rows(), 128) * blocks(s.N, 64) * max(1, blocks(s.K, 128));
    auto run = [&](auto launch) { launch(out, from, s, device); };
    const bool dense = s.H * s.W == 1, small = s.rows() <= 32 || large < multiprocessors(device);
    const bool fits52 = blocks(s.N, 52) * 52 < blocks(s.N, 64) * 64; // fewer columns stay empty
    const bool by_columns = s.B_column.by_z == 1;
    if (from.B_mask) run(tiles<typename In::Small20, true, false, unpool_B>);
    else if (out.C.pooled) run(tiles<typename In::Columns20, false, false, pool_C>);
    else if (small && s.N <= 20) run(tiles<typename In::Small20, true>);
    else if (small && s.weights && dense) run(tiles<typename In::Small, false, true>);
    else if (small && by_columns) run(tiles<typename In::Small, true, true>);
    else if (small) run(tiles<typename In::Small, true>);
    else if (s.N <= 20) run(tiles<typename In::Columns20, false>);
    else if (s.N <= 32) run(tiles<typename In::Columns32, false>);
    else if (fits52 && s.weights) run(tiles<typename In::Columns52, true>);
    else if (fits52 && by_columns) run(tiles<typename In::Columns52, false, true>);
    else if (fits52) run(tiles<typename In::Columns52Low, false>);
    else if (s.N <= 64 && s.weights) run(tiles<typename In::Columns64, true>);
    else if (s.N <= 64) run(tiles<typename In::Columns64, false>);
    else if (s.weights) run(tiles<typename In::Columns128, true>);
    else run(tiles<typename In::Columns128, false>);
}
static void product(bool tiled, const ProductOut &out, const Images &A, const Tensor &B,
                    const Product &s, const float *B_mask = nullptr) {
    if (s.rows() == 0) return;
    if (tiled) return tiled_product(out, A, B, s);
    const Factors factors = {A.ptr(), B.ptr(), B_mask};
    const auto product_in = options.precision == "tf32" ? ::product_in<Tf32> : ::product_in<Fp32>;
    product_in(out, factors, s, B.device);
}

// --- convolution and dense layers: the three products
// Maps. windows: from (n,i,j) to the corner of a window in X; taps: from (c,u,v) to a tap's
// distance from that corner; pixels: from (n,i,j) to y; weights: from (c,u,v) to W
static Map windows(const ConvShape &s, const Images &X, bool row_first) {
    const int S = s.stride, P = s.padding, corner = -P * (X.pitch + 1);
    return {row_first, {s.N, s.C * X.plane}, {s.OH, S * X.pitch, S}, {s.OW, S, S}, corner, -P, -P};
}
static Map taps(const ConvShape &s, const Images &X, bool row_first) {
    return {row_first, {s.C, X.plane}, {s.K, X.pitch, 1}, {s.K, 1, 1}};
}
static Map pixels(const ConvShape &s, bool row_first) {
    return {row_first, {s.N, s.O * s.OH * s.OW}, {s.OH, s.OW}, {s.OW, 1}};
}
static Map weights(const ConvShape &s, bool row_first) {
    const int K = s.K, sk = s.W_stride_k;
    return {row_first, {s.C, K * K * sk}, {K, K * sk}, {K, sk}};
}
// Skipping terms pays if windows leave the image, but not on tensor cores, which are fast enough.
static bool skips(bool leave) { return leave && options.precision == "fp32"; }

static void product_forward(const Target &y, const Tensor &X, const Tensor &W, const Tensor &b,
                            const ConvShape &s) {
    const int out = s.OH * s.OW, zeros = s.tiled ? s.padding : 0;
    const Images x = pad(X, s.H, s.W, zeros, zeros);
    if (is_shallow(s)) return shallow_forward(y, x, W, b, s);
    const bool skip = skips(s.padding > 0), row_first = skip && !s.tiled;
    ConvShape half = s; // a pixel for each window of a pooling
    half.OH /= 2, half.OW /= 2, half.stride *= 2;
    const Map by_window = {false, {s.N, s.O * out}, {half.OH, 2 * s.OW}, {half.OW, 2}};
    const Map A_row = y.pooled ? windows(half, x, false) : windows(s, x, row_first);
    const Map C_row = y.pooled ? by_window : pixels(s, row_first);
    const Map A_term = taps(s, x, skip), B_term = weights(s, skip);
    const Map B_column = spaced(s.O, s.W_stride_o), C_pooled_row = pixels(half, false);
    product(s.tiled, {y, {}, b.ptr()}, x, W,
            {s.N * out, s.O, s.C * s.K * s.K, A_row, A_term, s.H, s.W, B_term, B_column, C_row, out,
             skip ? s.C * s.K : 0, 0, C_pooled_row});
}

// dX is the correlation of dy, with zeros around it, and W, turned by 180 degrees, its C and O
// exchanged. With a stride, row h of dX has terms only for the taps u with u mod stride =
// (h+padding) mod stride, each with row (h+padding-u)/stride of dy. The rows (and columns) of dX
// that are equal modulo stride form a phase, and each of the stride*stride phases is a correlation
// with stride 1 and taps of its own.
struct Phase {          // of rows, or of columns
    int count;          // the number of dX's rows in it
    int taps, last_tap; // its taps are last_tap, last_tap - stride, ...: `taps` of them
    int dy_begin;       // the row of dy that its first row and last_tap meet; may be negative
};
static Phase phase(int first, int size, const ConvShape &s) {
    const int S = s.stride, tap = (first + s.padding) % S;
    const int taps = tap < s.K ? blocks(s.K - tap, S) : 0;
    return {blocks(size - first, S), taps, tap + (taps - 1) * S,
            (first + s.padding) / S - (taps - 1)};
}

static void product_backward_wide_input(const Tensor &X, const Tensor &W, const Tensor &y,
                                        const ConvShape &s) {
    const int S = s.stride, K = s.K, sk = s.W_stride_k, so = s.W_stride_o, plane = s.H * s.W;
    const int zeros = s.tiled ? max(0, (K - 1 - s.padding + S - 1) / S) : 0;
    const Target dX = grad_of(X);
    const Images dy = pad(*y.grad, s.OH, s.OW, zeros, zeros);
    const bool skip = skips(K > 1), row_first = skip && !s.tiled;
    for (int i = 0; i < min(S, s.H); i++)
        for (int j = 0; j < min(S, s.W); j++) {
            const Phase h = phase(i, s.H, s), w = phase(j, s.W, s);
            const int top = h.dy_begin, left = w.dy_begin, last = h.last_tap * K + w.last_tap;
            const int corner = top * dy.pitch + left;
            const Axis rows = {h.count, dy.pitch, 1}, columns = {w.count, 1, 1};
            const Map A_row = {row_first, {s.N, s.O * dy.plane}, rows, columns, corner, top, left};
            const Map A_term = {skip, {s.O, dy.plane}, {h.taps, dy.pitch, 1}, {w.taps, 1, 1}};
            const Axis rows_of_W = {h.taps, -S * K * sk}, columns_of_W = {w.taps, -S * sk};
            const Map B_term = {skip, {s.O, so}, rows_of_W, columns_of_W, last * sk};
            const Map B_column = spaced(s.C, K * K * sk);
            const Axis rows_of_dX = {h.count, S * s.W}, columns_of_dX = {w.count, S};
            const Map C_row = {
                row_first, {s.N, s.C * plane}, rows_of_dX, columns_of_dX, i * s.W + j};
            product(s.tiled, {dX, {}, nullptr}, dy, W,
                    {s.N * h.count * w.count, s.C, s.O * h.taps * w.taps, A_row, A_term, s.OH, s.OW,
                     B_term, B_column, C_row, plane, skip ? s.O * w.taps : 0, 0});
        }
}

// A dX of few channels c would leave most of a tile's columns empty. Instead, if the stride is 1,
// each pair (c,v) is a channel of its own:
//   part[n,c,v,h,j] = sum over o, u of dy[n,o,h+padding-u,j] * W[o,c,u,v]
// Afterwards the K channels of each c are added, each shifted by v pixels. So an element of dy is
// loaded once for K taps, and no tap v lies outside of dy. LeNet's conv2 on a CPU: 0.8 of the time.

// dX[n,c,h,w] = or += sum over v of part[n,c,v,h,w+padding-v]
// In part, neighbours n, v and h are by_n, by_v and by_h apart, neighbours c K*by_v.
// One thread per `lanes` neighbours of a row of dX.
__global__ void fold_kernel(Target dX, const float *part, int by_n, int by_v, int by_h,
                            ConvShape s) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x, of_row = (s.W + lanes - 1) / lanes;
    const int row = at / of_row, begin = at % of_row * lanes;
    const int h = row % s.H, c = row / s.H % s.C, n = row / s.H / s.C;
    if (n >= s.N) return;
    float sum[lanes] = {};
    part += n * by_n + c * s.K * by_v + h * by_h;
    for (int v = 0; v < s.K; v++, part += by_v) {
        const int j = begin + s.padding - v;
        for (int q = 0; q < lanes; q++)
            if (j + q >= 0 && j + q < s.OW) sum[q] += part[j + q];
    }
    for (int q = 0; q < min(lanes, s.W - begin); q++) dX.store(row * s.W + begin + q, sum[q]);
}
static void fold(const Target &dX, const Tensor &part, int by_n, int by_v, int by_h,
                 const ConvShape &s) {
    const int n = s.N * s.C * s.H * blocks(s.W, lanes);
    LAUNCH(fold_kernel<<<blocks(n), threads, 0, on(part.device)>>>(dX, part.ptr(), by_n, by_v, by_h,
                                                                   s));
}
// As a product, whose rows are in the order n,h,j for tiled kernels, h,n,j for fast ones:
//                      C      a row of it   a column   a term of the sum   A    B
//   input gradient     part   n,h,j         c,v        u,o                 dy   W
static void product_backward_narrow_input(const Tensor &X, const Tensor &W, const Tensor &y,
                                          const ConvShape &s) {
    const int K = s.K, sk = s.W_stride_k, so = s.W_stride_o, M = s.N * s.H * s.OW;
    const int top = s.padding - (K - 1); // the row of dy that u = K-1 of dX's row 0 meets
    const Target dX = grad_of(X);
    const Images dy = pad(*y.grad, s.OH, s.OW, s.tiled ? max(0, -top) : 0, 0);
    const bool row_first = !s.tiled;
    const Axis rows = {s.H, dy.pitch, 1};
    const Map A_row = {row_first, {s.N, s.O * dy.plane}, rows, {s.OW, 1}, top * dy.pitch, top};
    const Map A_term = {true, {s.O, dy.plane}, {K, dy.pitch, 1}, none};
    const Map B_term = {true, {s.O, so}, {K, -K * sk}, none, (K - 1) * K * sk};
    const Map B_column = {false, none, {s.C, K * K * sk}, {K, sk}}, C_row = spaced(M, 1);
    const Tensor part = empty({s.C * K, M}, X.device);
    product(s.tiled, {{part.ptr()}, {}, nullptr}, dy, W,
            {M, s.C * K, s.O * K, A_row, A_term, s.OH, 1, B_term, B_column, C_row, M, s.O, 0});
    fold(dX, part, row_first ? s.OW : s.H * s.OW, M, row_first ? s.N * s.OW : s.OW, s);
}
static void product_backward_input(const Tensor &X, const Tensor &W, const Tensor &y,
                                   const ConvShape &s) {
    const int wide = blocks(s.C, tile_n) * s.K * s.W, narrow = blocks(s.C * s.K, tile_n) * s.OW;
    const bool pays = s.tiled ? 4 * narrow < 3 * wide : s.C <= 32;
    const bool fits = (double)s.N * s.C * s.K * s.H * s.OW <= INT_MAX; // into a Tensor
    if (pays && fits && s.K > 1 && s.stride == 1) product_backward_narrow_input(X, W, y, s);
    else product_backward_wide_input(X, W, y, s);
}
static void product_backward_weights(const Tensor &X, const Tensor &W, const Tensor &b,
                                     const Tensor &y, const ConvShape &s) {
    const int out = s.OH * s.OW, terms = s.C * s.K * s.K, zeros = s.tiled ? s.padding : 0;
    const Pooled from = pooled(*y.grad);
    // Only if nothing else reads dy, and for the one tile whose kernel can
    const bool unpool =
        warp_size > 1 && from.mask && !X.grad && !s.tiled && terms < 32 && s.O <= 20;
    const Images x = pad(X, s.H, s.W, zeros, zeros);
    const Tensor &dy = unpool ? from.dy : *y.grad;
    const Map quarters = {false, {s.N, s.O * out / 4}, {s.OH, 0, 1}, {s.OW, 0, 1}};
    const Map A_row = taps(s, x, false), A_term = windows(s, x, false), C_row = weights(s, false);
    const Map B_term = unpool ? quarters : pixels(s, false);
    const Map B_column = spaced(s.O, unpool ? out / 4 : out);
    const Product p = {terms,  s.O,      s.N * out, A_row,        A_term, s.H, s.W,
                       B_term, B_column, C_row,     s.W_stride_o, 0,      1};
    const ProductOut to = {grad_of(W), grad_of(b), nullptr};
    if (is_shallow(s)) shallow_backward_weights(to, x, dy, p, s);
    else product(s.tiled, to, x, dy, p, unpool ? from.mask : nullptr);
}

// --- convolution and dense layers: the operators
static Tensor conv(const char *op, const Tensor &X, const Tensor &W, const Tensor &b, ConvShape s,
                   std::vector<int> shape) {
    if (W.grad && W.grad == b.grad) error("%s: W and b share a gradient, each wants its own", op);
    const bool plain = options.kernels == "plain", too_large = s.K > most_taps; // for a mask
    s.tiled = !plain && (options.kernels == "tiled" || too_large);
    const auto forward = plain ? plain_forward : product_forward;
    const auto backward_input = plain ? plain_backward_input : product_backward_input;
    const auto backward_weights = plain ? plain_backward_weights : product_backward_weights;
    Tensor y = output(op, {X, W, b}, shape);
    const bool few = s.O <= 20 && s.C * s.K * s.K < 128; // columns, and terms: one slice of them
    const bool even = s.OH % 2 == 0 && s.OW % 2 == 0 && s.padding == 0;
    const bool pools = warp_size > 1 && !plain && !s.tiled && few && even;
    const auto kernel = [=](Target y) { forward(y, X, W, b, s); };
    launch(y, kernel, pools);
    record(y, [=] {
        if (W.grad || b.grad) backward_weights(X, W, b, y, s);
        if (X.grad) backward_input(X, W, y, s);
    });
    return y;
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
constexpr int bn_warps = warp_size == 1 ? 8 : 32;   // of a block, which sums over a channel
constexpr int bn_threads = bn_warps * warp_size;
struct BatchNormShape {
    int N, C, size; // size = H*W of a plane
};
struct BatchNorm { // X (N,C,size), all else (C)
    const float *X, *gamma, *beta;
    float *mean, *var, *running_mean, *running_var;
};

// The count, the mean and the sum of (x-mean)^2 of some numbers x. merge() joins those of two sets
// without cancellation (Chan et al. 1979).
struct Moments {
    float count, mean, squares;
};
__device__ inline Moments merge(Moments a, Moments b) {
    const float count = a.count + b.count, d = b.mean - a.mean;
    if (b.count == 0) return a;
    return {count, a.mean + d * (b.count / count),
            a.squares + b.squares + d * d * (a.count / count * b.count)};
}
// mean and var of each channel; running = (1-momentum) * running + momentum * new
// One block per channel; each of its warps takes every bn_warps-th plane.
__global__ void __launch_bounds__(bn_threads)
    batch_norm_moments_kernel(BatchNorm a, BatchNormShape s) {
    __shared__ Moments parts[bn_warps];
    const int c = blockIdx.x, warp = threadIdx.x / warp_size;
    Moments all = {0, 0, 0};
    for (int n = warp; n < s.N; n += bn_warps) {
        const float *x = a.X + (n * s.C + c) * s.size;
        const float m = warp_sum(s.size, [=](int i) { return x[i]; }) / s.size;
        const float squares = warp_sum(s.size, [=](int i) { return (x[i] - m) * (x[i] - m); });
        all = merge(all, {(float)s.size, m, squares});
    }
    if (threadIdx.x % warp_size == 0) parts[warp] = all;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < bn_warps; i++) all = merge(all, parts[i]);
    a.mean[c] = all.mean;
    a.var[c] = all.squares / all.count;
    const float unbiased = all.squares / (all.count > 1 ? all.count - 1 : 1);
    a.running_mean[c] = (1 - bn_momentum) * a.running_mean[c] + bn_momentum * all.mean;
    a.running_var[c] = (1 - bn_momentum) * a.running_var[c] + bn_momentum * unbiased;
}
// y = (X - mean) * gamma / sqrt(var + eps) + beta   One warp per plane.
__global__ void batch_norm_kernel(Target y, BatchNorm a, BatchNormShape s) {
    const int p = (blockIdx.x * blockDim.x + threadIdx.x) / warp_size, c = p % s.C;
    if (p >= s.N * s.C) return;
    const float m = a.mean[c], scale = a.gamma[c] / sqrtf(a.var[c] + bn_eps), shift = a.beta[c];
    const float *X = a.X + p * s.size;
    y = y.from(p * s.size);
    UNROLL_LANES
    for (int i = threadIdx.x % warp_size; i < s.size; i += warp_size)
        y.store(i, (X[i] - m) * scale + shift);
}
// sum (C) and product (C) are, for each channel, the sums of dy and of dy * (X - mean);
// dbeta = or += sum, dgamma = or += product / sqrt(var + eps), where not null
// One block per channel, as above.
__global__ void __launch_bounds__(bn_threads)
    batch_norm_sums_kernel(float *sum, float *product, Target dgamma, Target dbeta, const float *dy,
                           BatchNorm a, BatchNormShape s) {
    __shared__ float sums[bn_warps];
    __shared__ float products[bn_warps];
    const int c = blockIdx.x, warp = threadIdx.x / warp_size;
    const float m = a.mean[c];
    float dy_sum = 0, dot = 0;
    for (int n = warp; n < s.N; n += bn_warps) {
        const float *x = a.X + (n * s.C + c) * s.size, *g = dy + (n * s.C + c) * s.size;
        dy_sum += warp_sum(s.size, [=](int i) { return g[i]; });
        dot += warp_sum(s.size, [=](int i) { return g[i] * (x[i] - m); });
    }
    if (threadIdx.x % warp_size == 0) sums[warp] = dy_sum, products[warp] = dot;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < bn_warps; i++) dy_sum += sums[i], dot += products[i];
    sum[c] = dy_sum;
    product[c] = dot;
    if (dgamma.data) dgamma.store(c, dot / sqrtf(a.var[c] + bn_eps));
    if (dbeta.data) dbeta.store(c, dy_sum);
}
// dX = or += gamma / sqrt(var + eps) * (dy - sum/M - (X - mean) / (var + eps) * product/M), where
// M = N*size: mean and var depend on X, too.   One warp per plane.
__global__ void batch_norm_backward_kernel(Target dX, const float *dy, const float *sum,
                                           const float *product, BatchNorm a, BatchNormShape s) {
    const int p = (blockIdx.x * blockDim.x + threadIdx.x) / warp_size, c = p % s.C;
    if (p >= s.N * s.C) return;
    const float M = (float)s.N * s.size, m = a.mean[c], var = a.var[c] + bn_eps;
    const float scale = a.gamma[c] / sqrtf(var), dy_mean = sum[c] / M, slope = product[c] / M / var;
    const float *X = a.X + p * s.size;
    dy += p * s.size;
    dX = dX.from(p * s.size);
    UNROLL_LANES
    for (int i = threadIdx.x % warp_size; i < s.size; i += warp_size)
        dX.store(i, scale * (dy[i] - dy_mean - (X[i] - m) * slope));
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
    Tensor y = output("batch_norm", {X, gamma, beta}, X.shape);
    const int N = X.shape[0], C = X.shape[1];
    const Tensor mean = recording ? full({C}, 0, X.device) : running_mean;
    const Tensor var = recording ? full({C}, 0, X.device) : running_var;
    const BatchNormShape s = {N, C, X.shape[2] * X.shape[3]};
    const BatchNorm a = {X.ptr(),   gamma.ptr(),        beta.ptr(),       mean.ptr(),
                         var.ptr(), running_mean.ptr(), running_var.ptr()};
    if (recording && N > 0) {
        LAUNCH(batch_norm_moments_kernel<<<C, bn_threads, 0, on(X.device)>>>(a, s));
    }
    const int by_plane = blocks((long)N * C * warp_size);
    launch(y, [=](Target y) {
        (void)inputs, (void)mean, (void)var; // captured, because `a` points to their memory
        LAUNCH(batch_norm_kernel<<<by_plane, threads, 0, on(X.device)>>>(y, a, s));
    });
    record(y, [=] {
        (void)inputs, (void)mean, (void)var;
        const float *dy = y.grad->ptr();
        const Tensor sum = empty({C}, X.device), product = empty({C}, X.device);
        // In this order, so that dbeta is added where gamma and beta are the same tensor
        const Target dgamma = grad_of(gamma), dbeta = grad_of(beta);
        LAUNCH(batch_norm_sums_kernel<<<C, bn_threads, 0, on(X.device)>>>(sum.ptr(), product.ptr(),
                                                                          dgamma, dbeta, dy, a, s));
        if (!X.grad) return;
        LAUNCH(batch_norm_backward_kernel<<<by_plane, threads, 0, on(X.device)>>>(
            grad_of(X), dy, sum.ptr(), product.ptr(), a, s));
    });
    return y;
}

// ---------------------------------------------------------------------------------------------
// 9. Autograd and fusion
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

void attach_grad(Tensor &t) {
    t.grad = std::make_shared<Tensor>(full(t.shape, 0, t.device));
    t.masked = false; // the gradient is its own now
}
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
        p.masked = false;
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
    if (!sum) g.by = nullptr;
    // New memory if there is none yet, or if another gradient still shares it
    if (!g.data || (g.shared && g.data.use_count() > 1)) g.data = empty(g.shape, g.device).data;
    g.shared = false;
    g.written = pass;
    if (g.complete) completes.push_back(g.complete);
    return {g.ptr(), sum, X.masked ? X.ptr() : nullptr};
}

// --- fusion
// An addition or a ReLU spends its time on reading and writing memory, and on its launch. So each
// becomes the epilogue of the kernel before it. To make this possible, the last launch on a device
// waits: an addition or a ReLU that comes next may join it, and anything else that is enqueued on
// the device sends it off first. So the devices' work keeps the program's order. A tensor that a
// joined launch leaves out, such as lenet's h1_conv, is computed only if ptr() asks for it, from
// what its inputs hold then; it is an error to ask after the parameters have changed.
// lenet's first pooling joins its convolution, too, on a GPU: the kernel stores both results. And
// the convolution's gradient, four times as large as the pooling's, is then never stored.

struct Launch {
    std::function<void(Target)> kernel; // null once it is enqueued
    Target to; // if its tensor is freed, others write to the memory only after this launch
    int n;     // how many numbers it writes,
    std::vector<int> shape; // of which tensor
    int left_out = -1;  // if another launch joined it and took its place: `updates` at that time
    Tensor pooled;      // if it is put off: dy
    bool pools = false; // it stores to.pooled, too, if that is not null
};
std::shared_ptr<Launch> &waiting(Device device); // the device's last launch, if that waits
static int updates = 0;                          // of the parameters
static void send_off_all();                      // the launches that wait, on all devices
void parameters_change() {
    send_off_all(); // they may read what was left out
    updates++;
}
bool fused() { return options.kernels != "plain"; }

static void send_off(std::shared_ptr<Launch> launch) {
    if (!launch || !launch->kernel) return;
    if (launch->left_out >= 0 && launch->left_out != updates)
        error("a tensor that was fused with what follows it is read when the parameters have "
              "changed: read it earlier, or use KERNELS=plain");
    touch(launch->to.pooled ? launch->n / 4 * 5 : launch->n);
    std::exchange(launch->kernel, nullptr)(launch->to);
}
float *Tensor::ptr() const {
    if (by && by->kernel) {
        stream(device); // sends off the launch that waits: it may read this tensor
        send_off(by);
    }
    if (device.id >= 0) touch(size(*this));
    return data.get();
}
void launch(Tensor &y, std::function<void(Target y)> kernel, bool pools) {
    if (!fused()) return kernel({y.ptr()});
    on(y.device); // sends off the launch that waits
    y.by = waiting(y.device) =
        std::make_shared<Launch>(Launch{kernel, {y.data.get()}, size(y), y.shape, -1, {}, pools});
}
bool join(const Tensor &X, Tensor &y, const Tensor *plus) {
    auto &last = waiting(X.device);
    // Not if X's launch does not wait, already ends with a ReLU, or writes more than X
    if (!X.by || X.by != last || last->to.relu || last->to.pooled || last->n != size(X))
        return false;
    const float *addend = plus ? plus->ptr() : nullptr; // may send off the last launch
    if (!last || (plus && last->to.plus)) return false;
    auto next = std::make_shared<Launch>(*last);
    next->to.data = y.data.get();
    if (plus) { // captured, because `addend` points to its memory
        next->kernel = [run = last->kernel, kept = *plus](Target y) { (void)kept, run(y); };
        next->to.plus = addend;
    } else next->to.relu = 1;
    last->left_out = updates;
    y.by = last = next;
    return true;
}
bool join_pooling(const Tensor &X, Tensor &y) {
    const auto &last = waiting(X.device);
    if (!X.by || X.by != last || !last->pools || last->to.plus || last->to.pooled) return false;
    if (last->shape != X.shape) return false; // reshaped: other windows
    last->to.pooled = y.data.get();
    y.by = last;
    return true;
}
// y and X share X's gradient: the backward of what uses y writes into it, masked by y > 0.
Tensor fused_relu(const Tensor &X, Tensor y) {
    const int n = size(X);
    if (!join(X, y))
        LAUNCH(relu_kernel<<<blocks(n), threads, 0, on(X.device)>>>(y.ptr(), X.ptr(), n));
    if (!y.grad) return y;
    y.grad = X.grad;
    y.masked = true;
    record(y, [] {}); // nothing is left to do, but backward(y) wants an operator on the tape
    return y;
}
bool share_grad(const Tensor &X, const Tensor &y) {
    Tensor &g = *X.grad;
    if (!fused() || X.masked || g.data) return false; // data: a parameter's, or of another part
    y.grad->ptr();                                    // if that was put off, now
    g.data = y.grad->data;
    g.shared = y.grad->shared = true; // another pass may write either
    g.written = pass;
    return true;
}

void put_off(const Tensor &X, std::function<void(Target dX)> kernel, const Tensor &dy) {
    const Target dX = grad_of(X);
    const bool reshaped = X.grad->shape != X.shape;
    if (!fused() || !dX.mask || dX.plus || X.grad->complete || reshaped) return kernel(dX);
    X.grad->by = std::make_shared<Launch>(Launch{std::move(kernel), dX, size(X), X.shape, -1, dy});
}
Pooled pooled(const Tensor &dX) {
    const bool late = dX.by && dX.by->kernel;
    return late ? Pooled{dX.by->pooled, dX.by->to.mask} : Pooled{};
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

struct Gpu { // a logical device
    int physical, multiprocessors;
    Stream streams[2];           // of computation, and of communication (CommStreams)
    std::map<int, Stream> links; // for messages from each device
    std::map<size_t, std::vector<float *>> free_blocks[2]; // a free list per (stream, bytes)
    std::vector<TapeEntry> tape;
    std::shared_ptr<Launch> waiting;
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
// A CPU computes as an H200 does, for tests.
int multiprocessors(Device device) { return on_cpu ? 132 : state(device).multiprocessors; }
std::vector<TapeEntry> &tape_of(Device device) { return state(device).tape; }
std::shared_ptr<Launch> &waiting(Device device) { return state(device).waiting; }
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
    fprintf(stderr, "mgpu: %s%s:%d: %s: %s (%s)%s\n", inside, file, line, call,
            cudaGetErrorString(code), cudaGetErrorName(code),
            late ? ": CUDA_LAUNCH_BLOCKING=1 shows the line" : "");
    _exit(1); // what CUDA still has in its streams is worth nothing now
}

// --- streams
static int comm = 0; // 1 while a CommStreams(true) exists: the index of Gpu::streams
static void send_off_all() {
    for (size_t c = 0; c < gpus.size(); c++) stream(gpu(c));
}
CommStreams::CommStreams(bool use) {
    send_off_all(); // what waits belongs to the other
    comm = use;
}
CommStreams::~CommStreams() { comm = 0; }
Stream &stream(Device device) {
    Gpu &g = state(device);
    if (g.waiting) send_off(std::exchange(g.waiting, nullptr));
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
        CHECK(cudaDeviceGetAttribute(&gpus[i].multiprocessors, cudaDevAttrMultiProcessorCount,
                                     gpus[i].physical));
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
        CHECK(cudaSetDevice(physical(device))); // on() would send off what waits to be fused
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
            {"kernels", options.kernels + (options.precision == "fp32" ? "" : " in tf32")}};
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
// device's shard by itself: of the k shards one by one), to 1e-3 of a parameter's largest; the
// update must be lr * gradient / n.
static void check_gradients(const Tensor &X, const Tensor &y, int k,
                            const std::vector<std::vector<Tensor>> &device_params, float lr) {
    const int n = X.shape[0];
    const bool alike = trained(params).size() == params.size(); // else there are batch norms
    const auto [want, unit] = gradient_in_shards(X, y, alike ? 1 : k);
    const Flat old = all_to_host(trained(params));
    const float rounding = options.precision == "tf32" ? 1e-2f : 1e-3f;
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
            if (!(off <= rounding * unit[j])) differs("gradient", j, got[j], want[j]);
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
    say("mgpu: %s%s\n", inside,
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
    {"kernels", "NAME", "of sums of products: fast, tiled, plain (tiled on a CPU, else fast)",
     one_of(&options.kernels, {"fast", "tiled", "plain"})},
    {"precision", "NAME", "of what the fast kernels multiply: fp32, or tf32 on tensor cores (fp32)",
     one_of(&options.precision, {"fp32", "tf32"})},
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
    if (options.precision == "tf32" && given("kernels") && options.kernels != "fast")
        error("--precision tf32 is for the fast kernels: leave --kernels %s out",
              options.kernels.c_str());
    if (options.precision == "tf32") options.kernels = "fast";
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
