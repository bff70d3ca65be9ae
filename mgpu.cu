// Training on multiple GPUs, from scratch: chapters of "Dive into Deep Learning" in one CUDA file.
//
//     make run GPUS=2      train LeNet on Fashion-MNIST on two devices
//     make test            check every kernel, and that k devices learn what one device learns
//
// Read it beside the tutorial: sections 2 to 6 are the tutorial, with its titles and its names,
// section 7 is its exercise; the sections after them are what the tutorial takes for granted.
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
//  13. Judge and benchmark
//  14. Program
//
// Notation: N images, C channels, H rows, W columns (NCHW, row-major), O output channels, K side of
// a convolution kernel, k devices. All numbers are 32-bit floats. A gradient is called dX, dW, db.
// Without a GPU the same file is compiled by g++ with cpu/cuda_runtime.h in place of CUDA's own.

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <getopt.h>
#include <unistd.h>

// ---------------------------------------------------------------------------------------------
// 1. The vocabulary
// What np, npx, autograd and d2l are to the tutorial; all of it is built in sections 8 to 12.

struct Device {
    int id; // 0, 1, ...: gpu(id); -1: the host
};
inline Device gpu(int i) { return {i}; }
inline Device cpu() { return {-1}; }
constexpr int most_gpus = 64;

// A handle: copies of a Tensor share its numbers.
struct Tensor {
    Device device = {-1};
    std::vector<int> shape;
    std::shared_ptr<float> data;  // size(t) floats in the memory of `device`
    std::shared_ptr<Tensor> grad; // of the same shape; null where no gradient is wanted
    bool trained = true;          // of a parameter; else a running statistic: never a gradient
    // Of a gradient:
    unsigned written = 0; // the backward pass that wrote it last
    int uses = 0;         // operators on the tape that have yet to set it or add to it
    size_t index = 0;     // its place in the list of get_params, all of which is exchanged together
    std::shared_ptr<struct Exchange> exchange = nullptr;
};
int size(const Tensor &t); // the product of the shape

// Tensors. On a device these return at once; the device does the work in the order of the calls.
Tensor empty(std::vector<int> shape, Device device);
Tensor full(std::vector<int> shape, float value, Device device);
Tensor arange(int n);                                    // 0, 1, ..., n-1   (n) on the host
Tensor normal(float scale, std::vector<int> shape);      // N(0, scale^2) on the host
Tensor uniform(float scale, std::vector<int> shape);     // U(-scale, scale) on the host
Tensor reshape(const Tensor &X, std::vector<int> shape); // the same numbers; one size may be -1
Tensor rows(const Tensor &X, int begin, int end);        // the same numbers: X[begin:end]
std::vector<float> to_host(const Tensor &t);             // waits for the device, then copies
std::string to_string(const Tensor &t);                  // as NumPy prints it
void attach_grad(Tensor &t);                             // a gradient of zeros
void attach_grad(std::vector<Tensor> &list); // the same for all `trained`, side by side in memory
void add_(const Tensor &a, const Tensor &b);             // a[:] += b, on the same device
void sum_(const Tensor &a, const std::vector<Tensor> &parts); // a[:] = the parts' sum, in order

// Operators. Each runs forward at once and puts its backward on the tape of its device.
// (N,C,H,W) (O,C,K,K) (O) -> (N,O,OH,OW), OH = (H + 2*padding - K)/stride + 1
Tensor conv2d(const Tensor &X, const Tensor &W, const Tensor &b, int stride = 1, int padding = 0);
// any shape -> the same
Tensor relu(const Tensor &X);
// (N,C,H,W) -> (N,C,OH,OW)
Tensor avg_pool2d(const Tensor &X, int kernel_size, int stride);
Tensor max_pool2d(const Tensor &X, int kernel_size, int stride);
// (N,C,H,W) -> (N,C)
Tensor global_avg_pool2d(const Tensor &X);
// (N,C) (C,O) (O) -> (N,O): X @ W + b
Tensor linear(const Tensor &X, const Tensor &W, const Tensor &b);
// (N,C,H,W) (C) (C) (C) (C) -> (N,C,H,W); while it records, running_mean and running_var change
Tensor batch_norm(const Tensor &X, const Tensor &gamma, const Tensor &beta,
                  const Tensor &running_mean, const Tensor &running_var);
// two of the same shape -> the same: A + B
Tensor add(const Tensor &A, const Tensor &B);
// (N,classes) (N) -> (N)
Tensor softmax_cross_entropy(const Tensor &y_hat, const Tensor &y);
// The gradient of sum(l), for all that l depends on
void backward(const Tensor &l);
// param -= lr * grad / batch_size, for those that have a gradient
void sgd(const std::vector<Tensor> &params, float lr, int batch_size);
struct NoGrad; // while one exists, nothing goes on the tape
void count_correct(const Tensor &correct, const Tensor &y_hat, const Tensor &y); // correct[0] +=

typedef std::function<Tensor(const Tensor &X, const std::vector<Tensor> &params)> Net;

// What the command line sets.
struct Options {
    int gpus = 1, batch = 256, epochs = 10; // these and lr: as the model's tutorial has them
    int steps = 0, limit = 0; // stop after so many minibatches, use so many samples; 0: all
    float lr = 0.2f;
    unsigned seed = 0;
    bool shuffle = true, overlap = false, replica_check = true, exercise = false;
    std::string model = "lenet", allreduce = "naive";
    std::string bench; // all, step or allreduce
    bool gpus_given = false, model_given = false, batch_given = false, allreduce_given = false;
    bool verbose = false;
    bool evaluate_all = false; // test accuracy on all devices, not on the first alone
    std::vector<int> split;    // the devices' parts of a minibatch; none: equal ones
    std::string data = "data", init, save, log = "build/log.csv"; // folders, a file
};
extern Options options;

// Minibatches of a data set, in pinned host memory: X (N,1,28,28) in [0,1], y (N) the class.
struct DataIter {
    const struct DataSet *set;
    int batch_size;
    bool shuffle;
    Tensor X, y;            // the whole epoch, written as it is used, so that no copy is waited for
    std::vector<int> order; // of the samples in this epoch
    int begin = 0, filled = 0;
    void reset();                    // a new epoch
    bool next(Tensor &X, Tensor &y); // the next minibatch; the last one may be smaller
};
std::pair<DataIter, DataIter> load_data_fashion_mnist(int batch_size); // for training, for testing
void first_samples(int n, Tensor &X, Tensor &y); // of the training set
std::vector<int> shard_sizes(int n, int k); // of n samples over k devices: even, or as SPLIT says
float evaluate_accuracy_gpu(const std::function<Tensor(const Tensor &)> &net, DataIter &test_iter,
                            Device device);
float evaluate_accuracy_gpus(const Net &net, const std::vector<std::vector<Tensor>> &device_params,
                             DataIter &test_iter, const std::vector<Device> &devices);

struct Timer { // seconds, mean over start-stop pairs
    std::vector<double> times;
    double t0 = 0;
    void start();
    void stop();
    double avg() const;
};

// The tutorial's plot: a progress bar on a terminal, a row an epoch, and a file for `make plot`.
struct Animator {
    std::vector<Device> devices;
    int steps;                  // of an epoch
    std::vector<Tensor> losses; // on each device: the sum of its losses for each step of the epoch
    std::vector<int> samples;   // of each step
    std::deque<cudaEvent_t> pending; // steps that the devices may not have finished, oldest first
    std::vector<std::string> log;
    bool bar;
    Animator(const std::vector<Device> &devices, int steps);
    void step(const std::vector<Tensor> &ls); // a minibatch has been queued
    double finish(int epoch);                 // wait for the epoch; its mean loss
    void add(int epoch, double loss, float acc, double seconds); // a row
    void draw(int done);
};

Device try_gpu(int i);
std::vector<Device> first_devices(int k); // gpu(0), ..., gpu(k-1)
std::string str(Device device);                      // gpu(0)
std::string str(const std::vector<Device> &devices); // [gpu(0), gpu(1)]

// A device does the work that it is given in order, in its queue: on(device) is what kernels and
// copies are launched on; it also makes the device CUDA's current one.
struct Queue {
    cudaStream_t stream = nullptr;
    cudaEvent_t ready = nullptr;                        // for others to wait for
    std::map<size_t, std::vector<float *>> free_blocks; // by bytes: memory that no tensor uses now
    int chain = 0; // the longest chain of messages that leads here (section 7)
};
Queue &queue(Device device);
cudaStream_t on(Device device);
cudaEvent_t ready(Device device);
int physical(Device device); // CUDA's number of the GPU that is gpu(i)
void count_message(Device src, Device dst, size_t bytes, Queue &carrier); // for the lab's judge
void waitall();        // the host waits for all devices
void stop_requested(); // ends the program cleanly if Ctrl-C was pressed
void check_replicas(const std::vector<std::vector<Tensor>> &device_params);
void save_params(const std::vector<Tensor> &params, const std::string &folder);

// A user's mistake: main prints it in one line and ends with status 1.
struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};
[[noreturn]] __attribute__((format(printf, 1, 2))) void error(const char *format, ...);

// Every CUDA call and every launch is checked.
#define CHECK(call) check_cuda((call), #call, __FILE__, __LINE__)
#define CHECK_LAUNCH() check_cuda(cudaGetLastError(), "the kernel launch above", __FILE__, __LINE__)
void check_cuda(cudaError_t code, const char *call, const char *file, int line);

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
    Tensor h1_conv       = conv2d(X, params[0], params[1]);
    Tensor h1_activation = relu(h1_conv);
    Tensor h1            = avg_pool2d(h1_activation, 2, 2);
    Tensor h2_conv       = conv2d(h1, params[2], params[3]);
    Tensor h2_activation = relu(h2_conv);
    Tensor h2            = avg_pool2d(h2_activation, 2, 2);
    h2                   = reshape(h2, {h2.shape[0], -1});
    Tensor h3_linear     = linear(h2, params[4], params[5]);
    Tensor h3            = relu(h3_linear);
    Tensor y_hat         = linear(h3, params[6], params[7]);
    return y_hat;
}

// Cross-entropy loss function, one number for each sample
Tensor loss(const Tensor &y_hat, const Tensor &y) { return softmax_cross_entropy(y_hat, y); }

// What is trained: lenet, or another chapter's network (MODEL=, section 10)
Net net = lenet;

// ---------------------------------------------------------------------------------------------
// 3. Data synchronization                                      tutorial: "Data Synchronization"
// How parameters get to every device, and how the devices' gradients become one sum: the exercise.

// What `device` is given from now on waits for all that `other` has been given so far.
void wait_for(Device device, Device other) {
    CHECK(cudaEventRecord(ready(other), on(other)));
    CHECK(cudaStreamWaitEvent(on(device), ready(other), 0));
    queue(device).chain = std::max(queue(device).chain, queue(other).chain); // for the lab's judge
}

// dst[:] = src, of equal size, from any device to any. The host does not wait (but for a copy to
// itself): dst's device copies once src's device has got so far, and src's goes on after that.
void copyto(const Tensor &src, const Tensor &dst) {
    size_t bytes = sizeof(float) * size(src);
    if (size(src) != size(dst))
        error("copyto: %d numbers do not fit a tensor of %d", size(src), size(dst));
    if (bytes == 0) return;
    if (src.device.id < 0 && dst.device.id < 0) {
        memcpy(dst.data.get(), src.data.get(), bytes);
    } else if (src.device.id < 0) {
        CHECK(cudaMemcpyAsync(dst.data.get(), src.data.get(), bytes, cudaMemcpyHostToDevice,
                              on(dst.device)));
    } else if (dst.device.id < 0) {
        CHECK(cudaMemcpyAsync(dst.data.get(), src.data.get(), bytes, cudaMemcpyDeviceToHost,
                              on(src.device)));
        CHECK(cudaStreamSynchronize(on(src.device))); // the host will read it
    } else if (src.device.id == dst.device.id) {
        CHECK(cudaMemcpyAsync(dst.data.get(), src.data.get(), bytes, cudaMemcpyDeviceToDevice,
                              on(dst.device)));
    } else {
        wait_for(dst.device, src.device); // src is ready, and
        CHECK(cudaMemcpyPeerAsync(dst.data.get(), physical(dst.device), src.data.get(),
                                  physical(src.device), bytes, on(dst.device)));
        count_message(src.device, dst.device, bytes, queue(dst.device));
        wait_for(src.device, dst.device); // stays as it is until it has been read
    }
}
Tensor copyto(const Tensor &src, Device device) {
    Tensor dst = empty(src.shape, device);
    dst.trained = src.trained;
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

bool taken_over(const std::vector<Tensor> &data); // by what ALLREDUCE and OVERLAP choose: section 7

// data[c] lies on device c; afterwards each of them is the elementwise sum of them all.
// With k devices and n bytes each: 2(k-1) messages, all of them through device 0, which receives
// (k-1)n bytes and sends as many; the others n each.
void allreduce(std::vector<Tensor> &data) {
    if (taken_over(data)) return;
    for (size_t i = 1; i < data.size(); i++)
        add_(data[0], copyto(data[i], data[0].device)); // data[0][:] += data[i]
    for (size_t i = 1; i < data.size(); i++)
        copyto(data[0], data[i]); // data[i][:] = data[0]: the tensor itself, not the list's entry
}

// ---------------------------------------------------------------------------------------------
// 4. Distributing data                                            tutorial: "Distributing Data"
// How a minibatch is cut into one shard for each device.

// k contiguous shards in order, as equal as can be, the larger ones first (or as SPLIT=3,1 says). A
// minibatch of fewer samples than devices leaves the last devices empty shards. Same as
// gluon.utils.split_and_load(even_split=False).
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
// One minibatch on all devices, then epochs of them.

// Returns the losses, (samples of the shard) on each device.
std::vector<Tensor> train_batch(const Tensor &X, const Tensor &y,
                                std::vector<std::vector<Tensor>> &device_params,
                                const std::vector<Device> &devices, float lr) {
    auto [X_shards, y_shards] = split_batch(X, y, devices);
    std::vector<Tensor> ls; // Loss is calculated separately on each GPU
    for (size_t c = 0; c < devices.size(); c++)
        ls.push_back(loss(net(X_shards[c], device_params[c]), y_shards[c]));
    for (const Tensor &l : ls) backward(l); // Back Propagation is performed separately on each GPU
    // Sum all gradients from each GPU and broadcast them to all GPUs
    for (size_t i = 0; i < device_params[0].size(); i++) {
        if (!device_params[0][i].trained) continue;
        std::vector<Tensor> grads;
        for (size_t c = 0; c < devices.size(); c++) grads.push_back(*device_params[c][i].grad);
        allreduce(grads);
    }
    // The model parameters are updated separately on each GPU
    for (const auto &param : device_params)
        sgd(param, lr, X.shape[0]); // Here, we use a full-size batch
    return ls;
}

// As in the tutorial, but that nobody waits for a single minibatch: the host queues a whole epoch,
// and then waits for the devices once.
void train(int num_gpus, int batch_size, float lr) {
    if (batch_size < num_gpus)
        error("batch %d cannot be split over %d devices: use BATCH >= %d", batch_size, num_gpus,
              num_gpus);
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
    int steps = 0;
    bool more = true;
    for (int epoch = 0; epoch < num_epochs && more; epoch++) {
        timer.start();
        train_iter.reset();
        while (more && train_iter.next(X, y)) {
            // Perform multi-GPU training for a single minibatch
            animator.step(train_batch(X, y, device_params, devices, lr));
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
    }
    if (!options.save.empty()) save_params(device_params[0], options.save);
    printf("test acc: %.2f, %.1f sec/epoch on %s\n", acc, timer.avg(), str(devices).c_str());
}

// ---------------------------------------------------------------------------------------------
// 6. Experiment                                                          tutorial: "Experiment"
// The tutorial's demonstrations, each printed from what lies on the devices, and its run.

void demos(int num_gpus) {
    std::vector<Device> devices;
    for (int i = 0; i < num_gpus; i++) devices.push_back(try_gpu(i));

    std::vector<Tensor> new_params = get_params(params, try_gpu(0));
    printf("b1 weight: %s\n", to_string(new_params[1]).c_str());
    printf("b1 grad: %s\n", to_string(*new_params[1].grad).c_str());

    std::vector<Tensor> data;
    for (int i = 0; i < num_gpus; i++) data.push_back(full({1, 2}, i + 1, try_gpu(i)));
    printf("before allreduce:\n");
    for (const Tensor &t : data) printf(" %s\n", to_string(t).c_str());
    std::vector<Tensor> list = data; // even if the list is changed, `data` is what the devices hold
    allreduce(list);
    printf("after allreduce:\n");
    for (const Tensor &t : data) printf(" %s\n", to_string(t).c_str());

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
    if (options.model == "resnet18")
        demos_resnet18(options.gpus);
    else if (options.model == "lab_cnn")
        demos_lab_cnn(options.gpus);
    else
        demos(options.gpus);
    train(options.gpus, options.batch, options.lr);
}

// ---------------------------------------------------------------------------------------------
// 7. The allreduce lab                                           tutorial: "Exercises", the third
// A ladder of algorithms, from the tutorial's up; ALLREDUCE=name trains with one of them.
//
// Their contract: grads[c][i] lies on device c and is as long on every device. Afterwards each of
// them holds the sum over all c, with the same bits on every device. The host queues the work and
// never waits for it. Whatever is queued later on a device finds the sums there and may change
// them. Any k from 1 up, any lengths, 0 among them.
//
// Their costs, for k devices and P tensors of n bytes together: messages; the bytes into the
// busiest device (as many come out of it); the chain, how many messages at most go one after the
// other. The time of a call is about  chain * latency + busiest / bandwidth.

typedef std::vector<std::vector<Tensor>> Grads;

// What section 11 does for this one.
Queue &link_queue(Device src, Device dst);     // of messages between two devices
std::vector<float *> pinned(int count, int n); // arrays of n numbers in pinned host memory
void run_on_host(void *function);              // for cudaLaunchHostFunc: a new std::function
struct SecondQueue { // while one exists, work goes to the devices' second queues
    SecondQueue();
    ~SecondQueue();
};
void join_second_queues(int k); // on the first k devices, the first queue waits for the second

// What messages add up to, counted as they are queued: for the judge in section 13.
struct Traffic {
    long messages = 0, bytes = 0;
    std::map<int, long> in, out; // bytes of each device; -1: the host
    int chain = 0;
};
static Traffic traffic;
void count_message(Device src, Device dst, size_t bytes, Queue &carrier) {
    traffic.messages++;
    traffic.bytes += bytes;
    traffic.out[src.id] += bytes;
    traffic.in[dst.id] += bytes;
    traffic.chain = std::max(traffic.chain, ++carrier.chain);
}

// Tensor i of every device.
static std::vector<Tensor> column(const Grads &grads, size_t i) {
    std::vector<Tensor> data;
    for (const auto &list : grads) data.push_back(list[i]);
    return data;
}

// All tensors of a device as one, (n): the same memory if they lie side by side, as gradients from
// get_params do; otherwise a copy, which unflatten copies back.
static bool side_by_side(const std::vector<Tensor> &list) {
    const float *end = nullptr;
    for (const Tensor &t : list) {
        if (size(t) == 0) continue;
        if (end && t.data.get() != end) return false;
        end = t.data.get() + size(t);
    }
    return true;
}
static std::vector<Tensor> flatten(const Grads &grads) {
    std::vector<Tensor> flat;
    for (const auto &list : grads) {
        Tensor all;
        all.device = list[0].device;
        all.shape = {0};
        for (const Tensor &t : list) {
            if (size(all) == 0) all.data = t.data;
            all.shape[0] += size(t);
        }
        if (!side_by_side(list)) {
            all = empty(all.shape, all.device);
            int begin = 0;
            for (const Tensor &t : list) {
                copyto(t, rows(all, begin, begin + size(t)));
                begin += size(t);
            }
        }
        flat.push_back(all);
    }
    return flat;
}
static void unflatten(const std::vector<Tensor> &flat, const Grads &grads) {
    for (size_t c = 0; c < grads.size(); c++) {
        int begin = 0;
        if (side_by_side(grads[c])) continue;
        for (const Tensor &t : grads[c]) {
            copyto(rows(flat[c], begin, begin + size(t)), t);
            begin += size(t);
        }
    }
}

// Part j of k of a flat tensor, the same memory. The parts' lengths differ by at most one.
static Tensor chunk(const Tensor &flat, int j, int k) {
    const long long n = size(flat);
    return rows(flat, n * j / k, n * (j + 1) / k);
}

// Messages that travel at the same time, dst[:] = src each. One starts when both of its devices
// have done what they were given so far, and both go on when it has arrived. Each pair of devices
// has a stream of its own for them, so that no message waits for another pair's.
struct Message {
    Tensor src, dst;
};
static void send(const std::vector<Message> &messages) {
    std::vector<Queue *> marked;
    for (const Message &m : messages)
        for (Device d : {m.src.device, m.dst.device}) {
            if (std::find(marked.begin(), marked.end(), &queue(d)) != marked.end()) continue;
            CHECK(cudaEventRecord(ready(d), on(d)));
            marked.push_back(&queue(d));
        }
    for (const Message &m : messages) {
        const Device src = m.src.device, dst = m.dst.device;
        const size_t bytes = size(m.src) * sizeof(float);
        if (size(m.src) != size(m.dst))
            error("send: %d numbers do not fit a tensor of %d", size(m.src), size(m.dst));
        if (bytes == 0) continue;
        Queue &link = link_queue(src, dst);
        CHECK(cudaStreamWaitEvent(link.stream, ready(src), 0));
        CHECK(cudaStreamWaitEvent(link.stream, ready(dst), 0));
        CHECK(cudaMemcpyPeerAsync(m.dst.data.get(), physical(dst), m.src.data.get(), physical(src),
                                  bytes, link.stream));
        CHECK(cudaEventRecord(link.ready, link.stream));
        link.chain = std::max({link.chain, queue(src).chain, queue(dst).chain});
        count_message(src, dst, bytes, link);
    }
    for (const Message &m : messages)
        for (Device d : {m.src.device, m.dst.device}) {
            if (size(m.src) == 0) continue;
            Queue &link = link_queue(m.src.device, m.dst.device);
            CHECK(cudaStreamWaitEvent(on(d), link.ready, 0));
            queue(d).chain = std::max(queue(d).chain, link.chain);
        }
}

// --- naive: the tutorial's, tensor by tensor, all through device 0
//   messages 2(k-1)P   busiest (k-1)n   chain 2(k-1)P
static void allreduce_naive(const Grads &grads) {
    for (size_t i = 0; i < grads[0].size(); i++) {
        std::vector<Tensor> data = column(grads, i);
        allreduce(data);
    }
}

// --- bucket: the same with all tensors as one, so that latency is paid once and not P times
//   messages 2(k-1)   busiest (k-1)n   chain 2(k-1)
static void allreduce_bucket(const Grads &grads) {
    std::vector<Tensor> flat = flatten(grads);
    allreduce(flat);
    unflatten(flat, grads);
}

// --- host: the lab's kvstore='local', the sum is made by the host, in its memory
//   messages 2k   busiest: the host, kn; a device n   chain 2
static void allreduce_host(const Grads &grads) {
    std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size(), n = size(flat[0]);
    const size_t bytes = n * sizeof(float);
    if (k == 1 || n == 0) return;
    const std::vector<float *> host = pinned(k + 1, n); // a part of each device, then the sum
    for (int c = 0; c < k; c++) {
        const Device d = flat[c].device;
        CHECK(cudaMemcpyAsync(host[c], flat[c].data.get(), bytes, cudaMemcpyDeviceToHost, on(d)));
        count_message(d, cpu(), bytes, queue(d));
        if (c > 0) wait_for(flat[0].device, d);
    }
    CHECK(cudaLaunchHostFunc(on(flat[0].device), run_on_host, new std::function<void()>([=] {
                                 float *sum = host[k];
                                 std::copy_n(host[0], n, sum);
                                 for (int c = 1; c < k; c++)
                                     for (int i = 0; i < n; i++) sum[i] += host[c][i];
                             })));
    for (int c = 1; c < k; c++) wait_for(flat[c].device, flat[0].device);
    for (int c = 0; c < k; c++) {
        const Device d = flat[c].device;
        CHECK(cudaMemcpyAsync(flat[c].data.get(), host[k], bytes, cudaMemcpyHostToDevice, on(d)));
        count_message(cpu(), d, bytes, queue(d));
    }
    unflatten(flat, grads);
}

// --- by_tensor: the tutorial's third exercise, different parameters on different devices. Each
// tensor is summed by its owner; the largest goes first, always to the device that has least to do.
//   messages 2(k-1)P   busiest (k-1)L + n-L, L bytes being its own   chain 2 a tensor that it owns
static void allreduce_by_tensor(const Grads &grads) {
    const int k = grads.size(), P = grads[0].size();
    std::vector<int> largest_first(P), owner(P);
    std::vector<long> load(k);
    for (int i = 0; i < P; i++) largest_first[i] = i;
    std::stable_sort(largest_first.begin(), largest_first.end(),
                     [&](int a, int b) { return size(grads[0][a]) > size(grads[0][b]); });
    for (int i : largest_first) {
        owner[i] = std::min_element(load.begin(), load.end()) - load.begin();
        load[owner[i]] += size(grads[0][i]);
    }
    std::vector<std::vector<Tensor>> parts; // of each tensor, on its owner, in the devices' order
    std::vector<Message> gather, broadcast;
    for (int i = 0; i < P; i++) {
        const Tensor &sum = grads[owner[i]][i];
        parts.push_back(column(grads, i));
        for (int c = 0; c < k; c++) {
            if (c == owner[i]) continue;
            parts[i][c] = empty(sum.shape, sum.device);
            gather.push_back({grads[c][i], parts[i][c]});
            broadcast.push_back({sum, grads[c][i]});
        }
    }
    send(gather);
    for (int i = 0; i < P; i++) sum_(grads[owner[i]][i], parts[i]);
    send(broadcast);
}

// --- sharded: every device sums its own 1/k of the numbers, straight from all others
//   messages 2k(k-1)   busiest 2(k-1)n/k   chain 2
static void allreduce_sharded(const Grads &grads) {
    std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    std::vector<std::vector<Tensor>> parts(k); // of each shard, on its owner, in the devices' order
    std::vector<Message> scatter, gather;
    for (int j = 0; j < k; j++)
        for (int c = 0; c < k; c++) {
            const Tensor own = chunk(flat[j], j, k), part = chunk(flat[c], j, k);
            parts[j].push_back(c == j ? own : empty(own.shape, own.device));
            if (c == j) continue;
            scatter.push_back({part, parts[j][c]});
            gather.push_back({own, part});
        }
    send(scatter);
    for (int j = 0; j < k; j++) sum_(chunk(flat[j], j, k), parts[j]);
    send(gather);
    unflatten(flat, grads);
}

// --- ring: a device only ever sends to its right neighbour. Sums of chunks go round and grow for
// k-1 steps, then go round once more to be copied: all links are busy all the time.
//   messages 2k(k-1)   busiest 2(k-1)n/k   chain 2(k-1)
static void allreduce_ring(const Grads &grads) {
    std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    for (int step = 0; step < k - 1; step++) { // chunk j is at device j + step
        std::vector<Message> messages;
        for (int c = 0; c < k; c++) {
            const Tensor part = chunk(flat[c], (c - step + k) % k, k);
            messages.push_back({part, empty(part.shape, flat[(c + 1) % k].device)});
        }
        send(messages);
        for (int c = 0; c < k; c++)
            add_(chunk(flat[(c + 1) % k], (c - step + k) % k, k), messages[c].dst);
    }
    for (int step = 0; step < k - 1; step++) { // the sum of chunk j is at device j - 1 + step
        std::vector<Message> messages;
        for (int c = 0; c < k; c++) {
            const int j = (c + 1 - step + k) % k;
            messages.push_back({chunk(flat[c], j, k), chunk(flat[(c + 1) % k], j, k)});
        }
        send(messages);
    }
    unflatten(flat, grads);
}

// --- tree: in round r device c + 2^r sends to device c, for c a multiple of 2^(r+1); then back
//   messages 2(k-1)   busiest ceil(log2 k) n   chain 2 ceil(log2 k)
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
// puts the sum into the list under a new tensor; the gradient itself stays what it was.
static void allreduce_rebind(const Grads &grads) {
    for (size_t i = 0; i < grads[0].size(); i++) {
        std::vector<Tensor> data = column(grads, i);
        for (size_t c = 1; c < data.size(); c++) add_(data[0], copyto(data[c], data[0].device));
        for (size_t c = 1; c < data.size(); c++) data[c] = copyto(data[0], data[c].device);
    }
}

// --- yours: the student's slot. It starts as the tutorial's algorithm; the contract is at the top
// of this section. What moves numbers: copyto(src, dst), one message that both devices wait for,
// and send({{src, dst}, ...}), many at the same time. What adds: add_(a, b), sum_(a, {b, c, ...}).
// What gets memory until the function returns: empty(shape, device). What cuts: chunk(t, j, k),
// flatten(grads), unflatten(flat, grads).
//   make exercise                           is it right, and what does it cost beside naive?
//   make race ALLREDUCE=yours GPUS=3        is every wait there?
//   make run ALLREDUCE=yours GPUS=2         does it train?
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

struct Algorithm {
    const char *name;
    void (*run)(const Grads &grads);
};
static std::vector<Algorithm> algorithms = {
    {"naive", allreduce_naive},         {"bucket", allreduce_bucket},   {"host", allreduce_host},
    {"by_tensor", allreduce_by_tensor}, {"sharded", allreduce_sharded}, {"ring", allreduce_ring},
    {"tree", allreduce_tree},           {"rebind", allreduce_rebind},   {"yours", allreduce_yours},
};
static bool in_algorithm = false; // allreduce(data) then is the tutorial's, whatever ALLREDUCE says
static void run_allreduce(const std::string &name, const Grads &grads) {
    struct Guard {
        Guard() { in_algorithm = true; }
        ~Guard() { in_algorithm = false; }
    } guard;
    for (const Algorithm &a : algorithms)
        if (a.name == name) a.run(grads);
}

// --- when gradients are exchanged
// train_batch hands them to allreduce one by one. Of the gradients of get_params' list, which know
// their place in it, the Exchange waits for the last and then runs the algorithm on all of them.
// With OVERLAP=1 it does not wait that long: the gradients of the last layers, which are complete
// first, form a bucket, which is sent while the devices still compute those of the layers before.
// The algorithm then runs on the devices' second queues.
static size_t bucket_bytes = 256 * 1024; // of a bucket at least; the first layers' may be smaller
struct Exchange {
    struct Bucket {
        size_t begin, end;                 // of the list
        std::vector<cudaEvent_t> complete; // on each device
        std::vector<size_t> missing;       // gradients, on each device
        size_t devices = 0;                // that have them all; then it is sent
    };
    size_t count = 0, handed = 0;   // gradients of the list; those handed to allreduce in this step
    Grads grads;                    // [c][i], as they were handed in
    std::vector<Bucket> buckets;    // the last layers' first
    std::weak_ptr<Exchange> leader; // device 0's does the work for all,
    size_t position = 0;            // in which this device has this place

    void clear();
    void make_buckets();
    Grads part(const Bucket &bucket) const;
    void complete(Bucket &bucket, size_t c);
    ~Exchange() { clear(); }
};

void Exchange::clear() {
    for (Bucket &b : buckets)
        for (cudaEvent_t event : b.complete) cudaEventDestroy(event);
    buckets.clear();
}
void Exchange::make_buckets() {
    for (size_t end = count, begin = count, bytes = 0; begin > 0;) {
        bytes += size(grads[0][--begin]) * sizeof(float);
        if (bytes < bucket_bytes && begin > 0) continue;
        Bucket b = {begin, end, {}, std::vector<size_t>(grads.size(), end - begin)};
        for (const auto &list : grads) {
            cudaEvent_t event;
            on(list[0].device);
            CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
            b.complete.push_back(event);
        }
        buckets.push_back(b);
        end = begin;
        bytes = 0;
    }
}

Grads Exchange::part(const Bucket &b) const {
    Grads part;
    for (const auto &list : grads) part.push_back({list.begin() + b.begin, list.begin() + b.end});
    return part;
}

// Device c has got all gradients of the bucket. When the last device has, they are exchanged.
void Exchange::complete(Bucket &b, size_t c) {
    CHECK(cudaEventRecord(b.complete[c], on(grads[c][0].device)));
    if (++b.devices < grads.size()) return;
    SecondQueue guard;
    for (size_t i = 0; i < grads.size(); i++)
        CHECK(cudaStreamWaitEvent(on(grads[i][0].device), b.complete[i], 0));
    run_allreduce(options.allreduce, part(b));
}

// From backward: no operator on the tape will add to this gradient any more.
void gradient_complete(const Tensor &grad) {
    auto leader = grad.exchange->leader.lock();
    if (!options.overlap || !leader) return;
    const size_t c = grad.exchange->position;
    for (Exchange::Bucket &b : leader->buckets)
        if (b.begin <= grad.index && grad.index < b.end && --b.missing[c] == 0)
            leader->complete(b, c);
}

// Whether ALLREDUCE or OVERLAP ask for more than the tutorial's allreduce; then it is done, or will
// be when the last gradient of the list is handed in.
bool taken_over(const std::vector<Tensor> &data) {
    if (in_algorithm || (options.allreduce == "naive" && !options.overlap)) return false;
    const std::shared_ptr<Exchange> e = data[0].exchange;
    bool together = e != nullptr;
    for (const Tensor &t : data)
        together =
            together && t.exchange && t.index == data[0].index && t.exchange->count == e->count;
    if (!together) { // not gradients of get_params, such as the tutorial's demo
        Grads single;
        for (const Tensor &t : data) single.push_back({t});
        run_allreduce(options.allreduce, single);
        return true;
    }
    if (e->grads.size() != data.size()) {
        e->grads.assign(data.size(), std::vector<Tensor>(e->count));
        e->clear();
    }
    for (size_t c = 0; c < data.size(); c++) {
        e->grads[c][data[0].index] = data[c];
        e->grads[c][data[0].index].exchange = nullptr; // it would own itself
        data[c].exchange->leader = e;
        data[c].exchange->position = c;
    }
    if (++e->handed < e->count) return true;
    e->handed = 0;
    if (e->buckets.empty()) e->make_buckets();
    // The order in which a ring adds depends on where its chunks begin: so that OVERLAP changes no
    // bit, it gets the same buckets without it.
    if (!options.overlap && options.allreduce != "ring") {
        run_allreduce(options.allreduce, e->grads);
        return true;
    }
    for (Exchange::Bucket &b : e->buckets) {
        if (!options.overlap) run_allreduce(options.allreduce, e->part(b));
        for (size_t c = 0; c < data.size(); c++)
            if (options.overlap && b.missing[c] > 0) e->complete(b, c);
        b.missing.assign(data.size(), b.end - b.begin);
        b.devices = 0;
    }
    if (options.overlap) join_second_queues(data.size());
    return true;
}

// ---------------------------------------------------------------------------------------------
// 8. Kernels and operators
// Each operator: its kernels, its forward, its backward. A backward sets the gradient of an input
// (=), or adds to it (+=) where another operator of the same pass has set it: see put().

// Loops over a thread's registers; the innermost of them a CPU does as vectors.
#if defined(__CUDACC__)
#define UNROLL _Pragma("unroll")
#define UNROLL_LANES _Pragma("unroll")
constexpr int warp = 32;                       // threads that take neighbouring numbers
constexpr int tile_m = 8, tile_n = 8;          // outputs of one thread
__device__ inline float over_warp(float sum) { // in every one of its threads
    for (int lanes = warp / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    return sum;
}
#else
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define UNROLL_LANES _Pragma("omp simd")
constexpr int warp = 1; // threads of a block run one after another
constexpr int tile_m = 6, tile_n = 16;
inline float over_warp(float sum) { return sum; }
#endif
constexpr int threads = 256; // of a block, where nothing else decides
inline int blocks(int n, int per_block = threads) { return (n + per_block - 1) / per_block; }
inline dim3 plane_block(int H, int W) { // for one plane: a thread an element, as far as that goes
    const int x = std::min(W, 32), y = std::min(H, threads / x);
    return dim3(x, y);
}

__device__ inline void put(float *g, bool accumulate, float value) {
    *g = accumulate ? *g + value : value;
}

// The sum of value(i) over i < n by the warp that calls it, in each of its threads; in a fixed
// order, but not one by one: the rounding grows with n / (warp * tile_n).
template <class Value> __device__ inline float warp_sum(int n, Value value) {
    float part[tile_n] = {}, sum = 0;
    int i = threadIdx.x % warp;
    for (; i + (tile_n - 1) * warp < n; i += tile_n * warp) {
        UNROLL_LANES
        for (int q = 0; q < tile_n; q++) part[q] += value(i + q * warp);
    }
    for (; i < n; i += warp) sum += value(i);
    UNROLL
    for (int q = 0; q < tile_n; q++) sum += part[q];
    return over_warp(sum);
}

// What section 9 does for the operators below.
Tensor output(const char *op, const std::vector<Tensor> &inputs,
              std::vector<int> shape);                        // where y goes
void record(const Tensor &y, std::function<void()> backward); // on the tape
float *grad_of(const Tensor &X, bool *accumulate);            // where dX goes
bool is_recording();                                          // no NoGrad: it trains
void check_shape(const char *op, bool right, const char *wanted, const std::vector<Tensor> &inputs);
void same_device(const char *op, const std::vector<Tensor> &inputs);

// --- convolution and dense layers
// Both are one sum. A convolution, as in PyTorch (a cross-correlation), is
//   y[n,o,i,j] = b[o] + sum over c,u,v of X[n,c,i*stride+u,j*stride+v] * W[o,c,u,v]
// where X has `padding` zeros around it already, and a dense layer is the convolution of a 1x1
// image with a 1x1 kernel. Three passes, one scheme:
// each thread keeps tile_m x tile_n sums in registers and loads, for each term, tile_m + tile_n
// numbers for tile_m * tile_n products; the tile_n are neighbours in a packed copy of W or of dy.

// Sizes of one such sum. Element (k, o) of W, k = (c*K + u)*K + v, lies at W[k*step_k + o*step_o].
struct Conv {
    int N, C, H, W, O, K, OH, OW; // H and W with the zeros around
    int step_k, step_o;
    int stride, padding; // so many rows and columns at each border of X are zeros
};
// What a launch of correlate_kernel does of it: U x V of the taps, every step-th from where
// `packed` points to, for every step-th row and column of y (N,O,OH,OW) from where y points to. X's
// rows before `begin` and from `end` on are zeros.
struct Part {
    int step, U, V, OH, OW, begin, end;
};

// out[tile][outer*inner][tile_n] = in: columns in tiles of tile_n, the last filled up with zeros
//   row (a, t) of column o is in[a*step_a + t*step_t + o*step_o]    a < outer, t < inner, o < cols
__global__ void pack_kernel(float *out, const float *in, int outer, int inner, int cols, int step_a,
                            int step_t, int step_o) {
    int t = blockIdx.x * blockDim.y + threadIdx.y, a = blockIdx.z;
    int o = blockIdx.y * blockDim.x + threadIdx.x;
    if (t >= inner) return;
    out[((blockIdx.y * outer + a) * inner + t) * tile_n + threadIdx.x] =
        o < cols ? in[a * step_a + t * step_t + o * step_o] : 0;
}

static Tensor pack(const float *in, Device device, int outer, int inner, int cols, int step_a,
                   int step_t, int step_o) {
    int tiles = blocks(cols, tile_n);
    Tensor out = empty({tiles, outer * inner, tile_n}, device);
    dim3 block(tile_n, threads / tile_n), grid(blocks(inner, block.y), tiles, outer);
    if (outer * inner == 0) return out;
    pack_kernel<<<grid, block, 0, on(device)>>>(out.data.get(), in, outer, inner, cols, step_a,
                                                step_t, step_o);
    CHECK_LAUNCH();
    return out;
}

// y[n,o,i*step,j*step] = or += b[o] + sum over c,u,v of
//   X[n,c,i*stride+u,j*stride+v] * packed[o/tile_n][c,u*step,v*step][o%tile_n]
//   X (N,C,H,W)   b (O) or null   ->   y, where i,j are the Conv's OH x OW pixels
// Each thread: tile_m pixels (n,i,j), one warp's width apart, of tile_n channels.
template <int fixed>
__global__ void __launch_bounds__(64)
    correlate_kernel(float *y, const float *X, const float *packed, const float *b, Conv s,
                     Part part, bool accumulate) {
    if (fixed) part.V = fixed;
    const int thread = blockIdx.x * blockDim.x + threadIdx.x, o0 = blockIdx.y * tile_n;
    const int plane = s.OH * s.OW, pixels = s.N * plane;
    const int first = thread / warp * warp * tile_m + thread % warp;
    if (first >= pixels) return;
    int at[tile_m]; // X[n,0,i*stride,j*stride] for each pixel
    int top = s.H, bottom = 0;
    UNROLL
    for (int m = 0; m < tile_m; m++) {
        int p = first + m * warp < pixels ? first + m * warp : pixels - 1;
        int n = p / plane, i = p % plane / s.OW * s.stride, j = p % s.OW * s.stride;
        at[m] = (n * s.C * s.H + i) * s.W + j;
        top = min(top, i);
        bottom = max(bottom, i);
    }
    const int u_begin = max(0, part.begin - bottom),
              u_end = min(part.U, part.end - top); // the rest meets zeros
    float sum[tile_m][tile_n] = {};
    const int step = part.step * tile_n, row = step * s.K, rest = s.K * s.K * tile_n; // of packed
    const float *x = X + u_begin * s.W, *w = packed + blockIdx.y * s.C * rest + u_begin * row;
    for (int c = 0; c < s.C; c++) {
        for (int u = u_begin; u < u_end; u++, x += s.W - part.V, w += row - part.V * step)
            for (const float *end = x + part.V; x < end; x++, w += step) {
                UNROLL
                for (int m = 0; m < tile_m; m++) {
                    const float xm = x[at[m]];
                    UNROLL_LANES
                    for (int q = 0; q < tile_n; q++) sum[m][q] += xm * w[q];
                }
            }
        x += (s.H - (u_end - u_begin)) * s.W;
        w += rest - (u_end - u_begin) * row;
    }
    UNROLL
    for (int m = 0; m < tile_m; m++) {
        int p = first + m * warp;
        if (p >= pixels) break;
        const int n = p / plane, pixel = p % plane, size = part.OH * part.OW;
        float *out = y + (n * s.O + o0) * size; // [i*step,j*step], without a division if step is 1
        out += part.step == 1 ? pixel : (pixel / s.OW * part.OW + pixel % s.OW) * part.step;
        UNROLL
        for (int q = 0; q < tile_n; q++)
            if (o0 + q < s.O) put(out + q * size, accumulate, sum[m][q] + (b ? b[o0 + q] : 0));
    }
}

// partial[slice][o/tile_n][k][o%tile_n] =
//   sum over the slice's n and all i,j of X[n,c,i*stride+u,j*stride+v] * dy[n,o,i,j],
//   k = (c*K + u)*K + v
//   X (N,C,H,W)   packed dy [o/tile_n][n,i,j][o%tile_n]   and in row k = C*K*K the sum of dy
// Each thread: tile_m rows k, one warp's width apart, of tile_n channels. Slices of the images make
// threads enough; none adds to another's sums, so every run gives the same bits.
__global__ void weight_grad_kernel(float *partial, const float *X, const float *packed, Conv s) {
    const int thread = blockIdx.x * blockDim.x + threadIdx.x, slice = blockIdx.z,
              slices = gridDim.z;
    const int terms = s.C * s.K * s.K, plane = s.OH * s.OW;
    const int first = thread / warp * warp * tile_m + thread % warp;
    if (first >= terms) return;
    int at[tile_m]; // X[0,c,u,v] for each row
    UNROLL
    for (int m = 0; m < tile_m; m++) {
        int k = first + m * warp < terms ? first + m * warp : terms - 1;
        at[m] = (k / (s.K * s.K) * s.H + k / s.K % s.K) * s.W + k % s.K;
    }
    const int begin = (long long)s.N * slice / slices, end = (long long)s.N * (slice + 1) / slices;
    const float *dy = packed + (blockIdx.y * s.N + begin) * plane * tile_n;
    float sum[tile_m][tile_n] = {}, sum_dy[tile_n] = {};
    for (int n = begin; n < end; n++)
        for (int i = 0; i < s.OH; i++) {
            const float *x = X + (n * s.C * s.H + i * s.stride) * s.W;
            for (int j = 0; j < s.OW; j++, x += s.stride, dy += tile_n) {
                UNROLL
                for (int m = 0; m < tile_m; m++) {
                    const float xm = x[at[m]];
                    UNROLL_LANES
                    for (int q = 0; q < tile_n; q++) sum[m][q] += xm * dy[q];
                }
                UNROLL_LANES
                for (int q = 0; q < tile_n; q++) sum_dy[q] += dy[q];
            }
        }
    float *out = partial + (slice * gridDim.y + blockIdx.y) * (terms + 1) * tile_n;
    UNROLL
    for (int m = 0; m < tile_m; m++) {
        int k = first + m * warp;
        if (k >= terms) break;
        UNROLL_LANES
        for (int q = 0; q < tile_n; q++) out[k * tile_n + q] = sum[m][q];
    }
    if (thread == 0) {
        UNROLL_LANES
        for (int q = 0; q < tile_n; q++) out[terms * tile_n + q] = sum_dy[q];
    }
}

// dW and db (= or +=, none where null) from the slices' partial sums, added in their order.
// One thread a weight.
__global__ void sum_slices_kernel(float *dW, float *db, const float *partial, int slices, Conv s,
                                  bool accumulate_W, bool accumulate_b) {
    const int terms = s.C * s.K * s.K, k = blockIdx.x * blockDim.y + threadIdx.y;
    const int o = blockIdx.y * tile_n + threadIdx.x;
    if (k > terms || o >= s.O) return;
    float sum = 0;
    for (int slice = 0; slice < slices; slice++)
        sum += partial[((slice * gridDim.y + blockIdx.y) * (terms + 1) + k) * tile_n + threadIdx.x];
    if (k < terms && dW) put(dW + k * s.step_k + o * s.step_o, accumulate_W, sum);
    if (k == terms && db) put(db + o, accumulate_b, sum);
}

// out (P,H+2*padding,W+2*padding) = in (P,H,W) with zeros around. One warp a row of out.
__global__ void pad_kernel(float *out, const float *in, int P, int H, int W, int padding) {
    const int height = H + 2 * padding, width = W + 2 * padding;
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) / warp, h = row % height - padding;
    if (row >= P * height) return;
    const bool inside = h >= 0 && h < H;
    in += inside ? (row / height * H + h) * W : 0;
    out += row * width;
    for (int w = threadIdx.x % warp; w < padding; w += warp) out[w] = out[padding + W + w] = 0;
    UNROLL_LANES
    for (int w = threadIdx.x % warp; w < W; w += warp) out[padding + w] = inside ? in[w] : 0;
}

// X (N,C,H,W), or a copy of it with zeros around
static Tensor pad(const Tensor &X, int padding) {
    if (padding == 0) return X;
    const int planes = X.shape[0] * X.shape[1], H = X.shape[2], W = X.shape[3];
    Tensor out = empty({X.shape[0], X.shape[1], H + 2 * padding, W + 2 * padding}, X.device);
    const int rows = planes * out.shape[2];
    if (rows > 0)
        pad_kernel<<<blocks(rows * warp), threads, 0, on(X.device)>>>(out.data.get(), X.data.get(),
                                                                      planes, H, W, padding);
    CHECK_LAUNCH();
    return out;
}

static void correlate(float *y, const float *X, const float *packed, const float *b, Device device,
                      const Conv &s, const Part &part, bool accumulate) {
    const int pixels = s.N * s.OH * s.OW, block = 64;
    if (pixels == 0) return;
    dim3 grid(blocks(blocks(pixels, warp * tile_m) * warp, block), blocks(s.O, tile_n));
    if (part.V == 3)
        correlate_kernel<3><<<grid, block, 0, on(device)>>>(y, X, packed, b, s, part, accumulate);
    else
        correlate_kernel<0><<<grid, block, 0, on(device)>>>(y, X, packed, b, s, part, accumulate);
    CHECK_LAUNCH();
}

// dX: correlate dy, zeros around it, with W, turned by 180 degrees, its O and C exchanged. Row h
// meets the taps u = a*stride + r, r = (h+padding) % stride, in the rows (h+padding)/stride - a of
// dy. So the rows from each first < stride on, every stride-th, are a correlation with taps of
// their own, and so are the columns.
static void conv_backward_input(const Tensor &X, const Tensor &W, const Tensor &y, const Conv &s) {
    const int K = s.K, S = s.stride, P = s.padding, H = s.H - 2 * P, width = s.W - 2 * P;
    const int zeros = max(0, (K - 1 - P + S - 1) / S); // around dy, for the windows at the border
    bool accumulate;
    float *dX = grad_of(X, &accumulate);
    if (s.N == 0) return;
    Tensor dy = pad(reshape(*y.grad, {s.N, s.O, s.OH, s.OW}), zeros);
    Tensor packed = pack(W.data.get() + (K * K - 1) * s.step_k, X.device, s.O, K * K, s.C, s.step_o,
                         -s.step_k, K * K * s.step_k);
    struct Line {                 // of rows or columns
        int count, taps, tap, at; // the first tap, and which row of dy it meets
    };
    auto line = [=](int first, int size) {
        const int r = (first + P) % S, taps = r < K ? (K - 1 - r) / S + 1 : 0;
        return Line{(size - first + S - 1) / S, taps, taps ? (K - 1 - r) % S : 0,
                    taps ? (first + P) / S - (taps - 1) + zeros : 0};
    };
    for (int i = 0; i < S; i++)
        for (int j = 0; j < S; j++) {
            const Line h = line(i, H), w = line(j, width);
            Conv t = {s.N, s.O, dy.shape[2], dy.shape[3], s.C, K, h.count, w.count, 0, 0, 1, 0};
            Part part = {S, h.taps, w.taps, H, width, zeros - h.at, zeros + s.OH - h.at};
            correlate(dX + i * width + j, dy.data.get() + h.at * t.W + w.at,
                      packed.data.get() + (h.tap * K + w.tap) * tile_n, nullptr, X.device, t, part,
                      accumulate);
        }
}

static void conv_backward_weights(const Tensor &X, const Tensor &W, const Tensor &b,
                                  const Tensor &y, const Conv &s) {
    const int plane = s.OH * s.OW, terms = s.C * s.K * s.K, block = 32;
    Tensor dy = s.K == 1 && plane == 1
                    ? pack(y.grad->data.get(), X.device, 1, s.N, s.O, 0, s.O, 1)
                    : pack(y.grad->data.get(), X.device, s.N, plane, s.O, s.O * plane, 1, plane);
    // Slices until there are threads enough: their sums are to be added, and take memory.
    const int tiles = dy.shape[0], busy = tiles * blocks(terms, tile_m);
    const int slices = min(s.N, min(32, blocks(1 << 15, busy)));
    const Tensor padded = pad(X, s.padding);
    Tensor partial = empty({slices, tiles, terms + 1, tile_n}, X.device);
    if (slices > 0) {
        dim3 grid(blocks(blocks(terms, warp * tile_m) * warp, block), tiles, slices);
        weight_grad_kernel<<<grid, block, 0, on(X.device)>>>(partial.data.get(), padded.data.get(),
                                                             dy.data.get(), s);
        CHECK_LAUNCH();
    }
    bool accumulate_W = false, accumulate_b = false;
    float *dW = W.grad ? grad_of(W, &accumulate_W) : nullptr;
    float *db = b.grad ? grad_of(b, &accumulate_b) : nullptr;
    dim3 rows(tile_n, threads / tile_n), grid(blocks(terms + 1, rows.y), tiles);
    sum_slices_kernel<<<grid, rows, 0, on(X.device)>>>(dW, db, partial.data.get(), slices, s,
                                                       accumulate_W, accumulate_b);
    CHECK_LAUNCH();
}

static Tensor conv(const char *op, const Tensor &X, const Tensor &W, const Tensor &b, const Conv &s,
                   std::vector<int> shape) {
    Tensor y = output(op, {X, W, b}, shape);
    Tensor packed = pack(W.data.get(), X.device, 1, s.C * s.K * s.K, s.O, 0, s.step_k, s.step_o);
    correlate(y.data.get(), pad(X, s.padding).data.get(), packed.data.get(), b.data.get(), X.device,
              s, {1, s.K, s.K, s.OH, s.OW, s.padding, s.H - s.padding}, false);
    record(y, [=] {
        if (W.grad || b.grad) conv_backward_weights(X, W, b, y, s);
        if (X.grad) conv_backward_input(X, W, y, s);
    });
    return y;
}

// X (N,C,H,W)   W (O,C,K,K)   b (O)   ->   y (N,O,OH,OW)
//   OH = (H + 2*padding - K)/stride + 1, rounded down; OW likewise
// Same as F.conv2d(X, W, b, stride, padding); PyTorch's gradients.
Tensor conv2d(const Tensor &X, const Tensor &W, const Tensor &b, int stride, int padding) {
    bool right = X.shape.size() == 4 && W.shape.size() == 4 && W.shape[1] == X.shape[1] &&
                 W.shape[2] == W.shape[3] && b.shape == std::vector<int>{W.shape[0]} &&
                 stride > 0 && padding >= 0 && size(W) > 0 &&
                 X.shape[2] + 2 * padding >= W.shape[2] && X.shape[3] + 2 * padding >= W.shape[2];
    check_shape("conv2d", right,
                "(N,C,H,W), (O,C,K,K), (O) with K <= H and W + 2*padding, stride > 0, padding >= 0",
                {X, W, b});
    Conv s = {};
    s.N = X.shape[0], s.C = X.shape[1], s.O = W.shape[0], s.K = W.shape[2];
    s.H = X.shape[2] + 2 * padding, s.W = X.shape[3] + 2 * padding;
    s.OH = (s.H - s.K) / stride + 1, s.OW = (s.W - s.K) / stride + 1;
    s.step_k = 1, s.step_o = s.C * s.K * s.K;
    s.stride = stride, s.padding = padding;
    return conv("conv2d", X, W, b, s, {s.N, s.O, s.OH, s.OW});
}

// X (N,C)   W (C,O)   b (O)   ->   X @ W + b (N,O)
Tensor linear(const Tensor &X, const Tensor &W, const Tensor &b) {
    bool right = X.shape.size() == 2 && W.shape.size() == 2 && W.shape[0] == X.shape[1] &&
                 b.shape == std::vector<int>{W.shape[1]};
    check_shape("linear", right, "(N,C), (C,O), (O)", {X, W, b});
    Conv s = {X.shape[0], X.shape[1], 1, 1, W.shape[1], 1, 1, 1, W.shape[1], 1, 1, 0};
    return conv("linear", X, W, b, s, {s.N, s.O});
}

// --- relu

// y = max(X, 0), NaN stays NaN. One thread an element.
__global__ void relu_kernel(float *y, const float *X, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = X[i] < 0 ? 0 : X[i];
}
// dX = or += dy where X > 0, else 0
__global__ void relu_backward_kernel(float *dX, const float *dy, const float *X, int n,
                                     bool accumulate) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float g = dy[i]; // loaded in any case: no branch on the sign
    put(dX + i, accumulate, X[i] > 0 ? g : 0);
}

Tensor relu(const Tensor &X) {
    Tensor y = output("relu", {X}, X.shape);
    const int n = size(X);
    if (n > 0) relu_kernel<<<blocks(n), threads, 0, on(X.device)>>>(y.data.get(), X.data.get(), n);
    CHECK_LAUNCH();
    record(y, [=] {
        bool accumulate;
        float *dX = grad_of(X, &accumulate);
        if (n == 0) return;
        relu_backward_kernel<<<blocks(n), threads, 0, on(X.device)>>>(dX, y.grad->data.get(),
                                                                      X.data.get(), n, accumulate);
        CHECK_LAUNCH();
    });
    return y;
}

// --- average pooling

static void check_pool(const char *op, const Tensor &X, int kernel_size, int stride) {
    bool right = X.shape.size() == 4 && stride > 0 && kernel_size > 0 &&
                 X.shape[2] >= kernel_size && X.shape[3] >= kernel_size;
    check_shape(op, right, "(N,C,H,W) with kernel_size <= H and W", {X});
}

// y[n,c,i,j] = mean over u,v < K of X[n,c,i*S+u,j*S+v]
//   X (P,H,W), P = N*C planes   ->   y (P,OH,OW)
// One thread an output element, a block a plane. `fixed` is K and S where both are known, else 0:
// loops of known length cost nothing.
template <int fixed>
__global__ void avg_pool2d_kernel(float *y, const float *X, int H, int W, int OH, int OW, int K,
                                  int S) {
    if (fixed) K = S = fixed;
    X += blockIdx.x * H * W;
    y += blockIdx.x * OH * OW;
    for (int i = threadIdx.y; i < OH; i += blockDim.y)
        for (int j = threadIdx.x; j < OW; j += blockDim.x) {
            float sum = 0;
            for (int u = 0; u < K; u++)
                for (int v = 0; v < K; v++) sum += X[(i * S + u) * W + j * S + v];
            y[i * OW + j] = sum / (K * K);
        }
}
// dX[h,w] = or += 1/K^2 * sum of dy[i,j] over the windows that hold (h,w); past the last one, 0
//   dy (P,OH,OW)   ->   dX (P,H,W)
// One thread an S x S patch of dX, from (i*S, j*S) on: every element gets its value, zeros too.
template <int fixed>
__global__ void avg_pool2d_backward_kernel(float *dX, const float *dy, int H, int W, int OH, int OW,
                                           int K, int S, bool accumulate) {
    if (fixed) K = S = fixed;
    dX += blockIdx.x * H * W;
    dy += blockIdx.x * OH * OW;
    for (int i = threadIdx.y; i * S < H; i += blockDim.y)
        for (int j = threadIdx.x; j * S < W; j += blockDim.x) {
            const float window =
                fixed && i < OH && j < OW ? dy[i * OW + j] : 0; // where no two overlap
            UNROLL
            for (int u = 0; u < S; u++) UNROLL
            for (int v = 0; v < S; v++) {
                const int h = i * S + u, w = j * S + v;
                float sum = window;
                for (int a = min(i, OH - 1); !fixed && a >= 0 && a * S + K > h; a--)
                    for (int b = min(j, OW - 1); b >= 0 && b * S + K > w; b--)
                        sum += dy[a * OW + b];
                if (h < H && w < W) put(dX + h * W + w, accumulate, sum / (K * K));
            }
        }
}

template <int fixed> Tensor avg_pool2d_fixed(const Tensor &X, int K, int S) {
    const int planes = X.shape[0] * X.shape[1], H = X.shape[2], W = X.shape[3];
    const int OH = (H - K) / S + 1, OW = (W - K) / S + 1;
    Tensor y = output("avg_pool2d", {X}, {X.shape[0], X.shape[1], OH, OW});
    const dim3 block = plane_block(blocks(H, S), blocks(W, S));
    if (planes > 0)
        avg_pool2d_kernel<fixed>
            <<<planes, block, 0, on(X.device)>>>(y.data.get(), X.data.get(), H, W, OH, OW, K, S);
    CHECK_LAUNCH();
    record(y, [=] {
        bool accumulate;
        float *dX = grad_of(X, &accumulate);
        if (planes == 0) return;
        avg_pool2d_backward_kernel<fixed><<<planes, block, 0, on(X.device)>>>(
            dX, y.grad->data.get(), H, W, OH, OW, K, S, accumulate);
        CHECK_LAUNCH();
    });
    return y;
}

// X (N,C,H,W)   ->   y (N,C,OH,OW), OH = (H-kernel_size)/stride + 1 rounded down
// Same as F.avg_pool2d(X, kernel_size, stride).
Tensor avg_pool2d(const Tensor &X, int kernel_size, int stride) {
    check_pool("avg_pool2d", X, kernel_size, stride);
    const bool tutorial = kernel_size == 2 && stride == 2;
    return tutorial ? avg_pool2d_fixed<2>(X, 2, 2) : avg_pool2d_fixed<0>(X, kernel_size, stride);
}

// --- max pooling

// Which of the K x K numbers from X on is the largest: (u, v) as u*K + v, the first if there are
// several. NaN counts as larger than any number.
template <int fixed> __device__ inline int first_largest(const float *X, int W, int K) {
    if (fixed) K = fixed;
    int best = 0;
    float largest = X[0];
    for (int u = 0; u < K; u++)
        for (int v = 0; v < K; v++) {
            const float x = X[u * W + v];
            const bool larger = x > largest || (x != x && largest == largest);
            best = larger ? u * K + v : best;
            largest = larger ? x : largest;
        }
    return best;
}
// y[n,c,i,j] = max over u,v < K of X[n,c,i*S+u,j*S+v]
//   X (P,H,W), P = N*C planes   ->   y (P,OH,OW)
// As avg_pool2d_kernel: one thread an output element, a block a plane.
template <int fixed>
__global__ void max_pool2d_kernel(float *y, const float *X, int H, int W, int OH, int OW, int K,
                                  int S) {
    if (fixed) K = S = fixed;
    X += blockIdx.x * H * W;
    y += blockIdx.x * OH * OW;
    for (int i = threadIdx.y; i < OH; i += blockDim.y)
        for (int j = threadIdx.x; j < OW; j += blockDim.x) {
            const float *window = X + i * S * W + j * S;
            const int best = first_largest<fixed>(window, W, K);
            y[i * OW + j] = window[best / K * W + best % K];
        }
}
// dX[h,w] = or += the sum of dy[i,j] over the windows whose (first) largest number is at (h,w)
//   dy (P,OH,OW)   X (P,H,W)   ->   dX (P,H,W)
// One thread an S x S patch of dX, from (i*S, j*S) on; it looks for the largest numbers again.
template <int fixed>
__global__ void max_pool2d_backward_kernel(float *dX, const float *dy, const float *X, int H, int W,
                                           int OH, int OW, int K, int S, bool accumulate) {
    if (fixed) K = S = fixed;
    dX += blockIdx.x * H * W;
    X += blockIdx.x * H * W;
    dy += blockIdx.x * OH * OW;
    for (int i = threadIdx.y; i * S < H; i += blockDim.y)
        for (int j = threadIdx.x; j * S < W; j += blockDim.x) {
            const bool window = fixed && i < OH && j < OW; // where no two overlap
            const int best = window ? first_largest<fixed>(X + i * S * W + j * S, W, K) : -1;
            const float g = window ? dy[i * OW + j] : 0;
            UNROLL
            for (int u = 0; u < S; u++) UNROLL
            for (int v = 0; v < S; v++) {
                const int h = i * S + u, w = j * S + v;
                float sum = best == u * K + v ? g : 0;
                for (int a = min(i, OH - 1); !fixed && a >= 0 && a * S + K > h; a--)
                    for (int b = min(j, OW - 1); b >= 0 && b * S + K > w; b--)
                        if (first_largest<0>(X + a * S * W + b * S, W, K) ==
                            (h - a * S) * K + w - b * S)
                            sum += dy[a * OW + b];
                if (h < H && w < W) put(dX + h * W + w, accumulate, sum);
            }
        }
}

template <int fixed> Tensor max_pool2d_fixed(const Tensor &X, int K, int S) {
    const int planes = X.shape[0] * X.shape[1], H = X.shape[2], W = X.shape[3];
    const int OH = (H - K) / S + 1, OW = (W - K) / S + 1;
    Tensor y = output("max_pool2d", {X}, {X.shape[0], X.shape[1], OH, OW});
    const dim3 block = plane_block(blocks(H, S), blocks(W, S));
    if (planes > 0)
        max_pool2d_kernel<fixed>
            <<<planes, block, 0, on(X.device)>>>(y.data.get(), X.data.get(), H, W, OH, OW, K, S);
    CHECK_LAUNCH();
    record(y, [=] {
        bool accumulate;
        float *dX = grad_of(X, &accumulate);
        if (planes == 0) return;
        max_pool2d_backward_kernel<fixed><<<planes, block, 0, on(X.device)>>>(
            dX, y.grad->data.get(), X.data.get(), H, W, OH, OW, K, S, accumulate);
        CHECK_LAUNCH();
    });
    return y;
}

// X (N,C,H,W)   ->   y (N,C,OH,OW), OH = (H-kernel_size)/stride + 1 rounded down
// Same as F.max_pool2d(X, kernel_size, stride).
Tensor max_pool2d(const Tensor &X, int kernel_size, int stride) {
    check_pool("max_pool2d", X, kernel_size, stride);
    const bool lab = kernel_size == 2 && stride == 2;
    return lab ? max_pool2d_fixed<2>(X, 2, 2) : max_pool2d_fixed<0>(X, kernel_size, stride);
}

// --- global average pooling

// y[p] = mean of X[p]   X (P,size)   ->   y (P)   One warp a plane.
__global__ void global_avg_pool2d_kernel(float *y, const float *X, int P, int size) {
    const int p = (blockIdx.x * blockDim.x + threadIdx.x) / warp;
    if (p >= P) return;
    X += p * size;
    const float sum = warp_sum(size, [=](int i) { return X[i]; });
    if (threadIdx.x % warp == 0) y[p] = sum / size;
}
// dX[p,i] = or += dy[p] / size
__global__ void global_avg_pool2d_backward_kernel(float *dX, const float *dy, int P, int size,
                                                  bool accumulate) {
    const int p = (blockIdx.x * blockDim.x + threadIdx.x) / warp;
    if (p >= P) return;
    const float g = dy[p] / size;
    dX += p * size;
    UNROLL_LANES
    for (int i = threadIdx.x % warp; i < size; i += warp) put(dX + i, accumulate, g);
}

// X (N,C,H,W)   ->   y (N,C), the mean of each plane
// Same as nn.AdaptiveAvgPool2d((1,1)) and nn.Flatten().
Tensor global_avg_pool2d(const Tensor &X) {
    check_shape("global_avg_pool2d",
                X.shape.size() == 4 && X.shape[1] > 0 && X.shape[2] > 0 && X.shape[3] > 0,
                "(N,C,H,W)", {X});
    const int P = X.shape[0] * X.shape[1], size = X.shape[2] * X.shape[3];
    Tensor y = output("global_avg_pool2d", {X}, {X.shape[0], X.shape[1]});
    if (P > 0)
        global_avg_pool2d_kernel<<<blocks(P * warp), threads, 0, on(X.device)>>>(
            y.data.get(), X.data.get(), P, size);
    CHECK_LAUNCH();
    record(y, [=] {
        bool accumulate;
        float *dX = grad_of(X, &accumulate);
        if (P == 0) return;
        global_avg_pool2d_backward_kernel<<<blocks(P * warp), threads, 0, on(X.device)>>>(
            dX, y.grad->data.get(), P, size, accumulate);
        CHECK_LAUNCH();
    });
    return y;
}

// --- batch normalization
// y = (X - mean) / sqrt(var + eps) * gamma + beta, for each channel. The sums go in two steps,
// planes and then channels, each one's terms near its own mean: nothing large cancels.

constexpr float bn_eps = 1e-5f, bn_momentum = 0.1f; // momentum: the share of the new statistics

// Of plane (n,c): means[c,n] = its mean, squares[c,n] = sum of (X - its mean)^2
//   X (N,C,size)   ->   means, squares (C,N)   One warp a plane.
__global__ void plane_moments_kernel(float *means, float *squares, const float *X, int N, int C,
                                     int size) {
    const int p = (blockIdx.x * blockDim.x + threadIdx.x) / warp, at = p % C * N + p / C;
    if (p >= N * C) return;
    X += p * size;
    const float mean = warp_sum(size, [=](int i) { return X[i]; }) / size;
    const float sum = warp_sum(size, [=](int i) { return (X[i] - mean) * (X[i] - mean); });
    if (threadIdx.x % warp > 0) return;
    means[at] = mean;
    squares[at] = sum;
}
// mean (C), var (C) of each channel; running = (1-momentum) * running + momentum * new
// One warp a channel. A plane's squares around another mean are size * (difference of means)^2
// more.
__global__ void channel_moments_kernel(float *mean, float *var, float *running_mean,
                                       float *running_var, const float *means, const float *squares,
                                       int N, int C, int size) {
    const int c = (blockIdx.x * blockDim.x + threadIdx.x) / warp;
    if (c >= C) return;
    means += c * N;
    squares += c * N;
    const float m = warp_sum(N, [=](int n) { return means[n]; }) / N;
    const float sum =
        warp_sum(N, [=](int n) { return squares[n] + size * ((means[n] - m) * (means[n] - m)); });
    if (threadIdx.x % warp > 0) return;
    const float count = (float)N * size;
    mean[c] = m;
    var[c] = sum / count;
    running_mean[c] = (1 - bn_momentum) * running_mean[c] + bn_momentum * m;
    running_var[c] = (1 - bn_momentum) * running_var[c] +
                     bn_momentum * sum / (count > 1 ? count - 1 : 1); // unbiased
}
// y = (X - mean) * gamma / sqrt(var + eps) + beta   X (N,C,size)   ->   y   One warp a plane.
__global__ void batch_norm_kernel(float *y, const float *X, const float *gamma, const float *beta,
                                  const float *mean, const float *var, int N, int C, int size) {
    const int p = (blockIdx.x * blockDim.x + threadIdx.x) / warp, c = p % C;
    if (p >= N * C) return;
    const float m = mean[c], scale = gamma[c] / sqrtf(var[c] + bn_eps), shift = beta[c];
    X += p * size;
    y += p * size;
    UNROLL_LANES
    for (int i = threadIdx.x % warp; i < size; i += warp) y[i] = (X[i] - m) * scale + shift;
}

// Of plane (n,c): sums[c,n] = sum of dy, products[c,n] = sum of dy * (X - mean)   One warp a plane.
__global__ void batch_norm_plane_sums_kernel(float *sums, float *products, const float *dy,
                                             const float *X, const float *mean, int N, int C,
                                             int size) {
    const int p = (blockIdx.x * blockDim.x + threadIdx.x) / warp, at = p % C * N + p / C;
    if (p >= N * C) return;
    const float m = mean[p % C];
    X += p * size;
    dy += p * size;
    const float sum = warp_sum(size, [=](int i) { return dy[i]; });
    const float product = warp_sum(size, [=](int i) { return dy[i] * (X[i] - m); });
    if (threadIdx.x % warp > 0) return;
    sums[at] = sum;
    products[at] = product;
}
// sum (C), product (C) of the planes'; dbeta = or += sum, dgamma = or += product / sqrt(var + eps),
// where not null. One warp a channel.
__global__ void batch_norm_channel_sums_kernel(float *sum, float *product, float *dgamma,
                                               float *dbeta, const float *sums,
                                               const float *products, const float *var, int N,
                                               int C, bool accumulate_gamma, bool accumulate_beta) {
    const int c = (blockIdx.x * blockDim.x + threadIdx.x) / warp;
    if (c >= C) return;
    const float a = warp_sum(N, [=](int n) { return sums[c * N + n]; });
    const float b = warp_sum(N, [=](int n) { return products[c * N + n]; });
    if (threadIdx.x % warp > 0) return;
    sum[c] = a;
    product[c] = b;
    if (dgamma) put(dgamma + c, accumulate_gamma, b / sqrtf(var[c] + bn_eps));
    if (dbeta) put(dbeta + c, accumulate_beta, a);
}
// dX = or += gamma / sqrt(var + eps) * (dy - sum/M - (X - mean) / (var + eps) * product/M), where
// M = N*size: X moves mean and var too.   One warp a plane.
__global__ void batch_norm_backward_kernel(float *dX, const float *dy, const float *X,
                                           const float *gamma, const float *mean, const float *var,
                                           const float *sum, const float *product, int N, int C,
                                           int size, bool accumulate) {
    const int p = (blockIdx.x * blockDim.x + threadIdx.x) / warp, c = p % C;
    if (p >= N * C) return;
    const float M = (float)N * size, m = mean[c], scale = gamma[c] / sqrtf(var[c] + bn_eps);
    const float dy_mean = sum[c] / M, slope = product[c] / M / (var[c] + bn_eps);
    X += p * size;
    dy += p * size;
    dX += p * size;
    UNROLL_LANES
    for (int i = threadIdx.x % warp; i < size; i += warp)
        put(dX + i, accumulate, scale * (dy[i] - dy_mean - (X[i] - m) * slope));
}

static void batch_norm_backward(const Tensor &X, const Tensor &gamma, const Tensor &beta,
                                const Tensor &mean, const Tensor &var, const Tensor &y) {
    const int N = X.shape[0], C = X.shape[1], size = X.shape[2] * X.shape[3], planes = N * C;
    const float *dy = y.grad->data.get(), *x = X.data.get();
    Tensor sums = empty({C, N}, X.device), products = empty({C, N}, X.device);
    Tensor sum = empty({C}, X.device), product = empty({C}, X.device);
    if (planes > 0)
        batch_norm_plane_sums_kernel<<<blocks(planes * warp), threads, 0, on(X.device)>>>(
            sums.data.get(), products.data.get(), dy, x, mean.data.get(), N, C, size);
    CHECK_LAUNCH();
    bool accumulate, accumulate_gamma = false, accumulate_beta = false;
    float *dgamma = gamma.grad ? grad_of(gamma, &accumulate_gamma) : nullptr;
    float *dbeta = beta.grad ? grad_of(beta, &accumulate_beta) : nullptr;
    batch_norm_channel_sums_kernel<<<blocks(C * warp), threads, 0, on(X.device)>>>(
        sum.data.get(), product.data.get(), dgamma, dbeta, sums.data.get(), products.data.get(),
        var.data.get(), N, C, accumulate_gamma, accumulate_beta);
    CHECK_LAUNCH();
    if (!X.grad) return;
    float *dX = grad_of(X, &accumulate);
    if (planes > 0)
        batch_norm_backward_kernel<<<blocks(planes * warp), threads, 0, on(X.device)>>>(
            dX, dy, x, gamma.data.get(), mean.data.get(), var.data.get(), sum.data.get(),
            product.data.get(), N, C, size, accumulate);
    CHECK_LAUNCH();
}

// X (N,C,H,W)   gamma, beta, running_mean, running_var (C)   ->   y (N,C,H,W)
// While it records, mean and var are those of X, that is of this device's shard, and the running
// ones move a tenth of the way to them (the variance as sum/(N*H*W-1); the 1 is not taken from a
// single value, whose variance is 0 and y beta). Under NoGrad they are the running ones. An empty
// shard moves nothing. Same as F.batch_norm(X, running_mean, running_var, gamma, beta, training).
Tensor batch_norm(const Tensor &X, const Tensor &gamma, const Tensor &beta,
                  const Tensor &running_mean, const Tensor &running_var) {
    const std::vector<int> wanted = {X.shape.size() == 4 ? X.shape[1] : 0};
    bool right = X.shape.size() == 4 && X.shape[1] > 0 && X.shape[2] > 0 && X.shape[3] > 0;
    for (const Tensor &t : {gamma, beta, running_mean, running_var})
        right = right && t.shape == wanted;
    const std::vector<Tensor> inputs = {X, gamma, beta, running_mean, running_var};
    check_shape("batch_norm", right, "(N,C,H,W), (C), (C), (C), (C)", inputs);
    same_device("batch_norm", inputs);
    const int N = X.shape[0], C = X.shape[1], size = X.shape[2] * X.shape[3], planes = N * C;
    Tensor y = output("batch_norm", {X, gamma, beta}, X.shape);
    Tensor mean = running_mean, var = running_var;
    if (is_recording()) {
        mean = full({C}, 0, X.device);
        var = full({C}, 0, X.device);
    }
    if (is_recording() && planes > 0) {
        Tensor means = empty({C, N}, X.device), squares = empty({C, N}, X.device);
        plane_moments_kernel<<<blocks(planes * warp), threads, 0, on(X.device)>>>(
            means.data.get(), squares.data.get(), X.data.get(), N, C, size);
        CHECK_LAUNCH();
        channel_moments_kernel<<<blocks(C * warp), threads, 0, on(X.device)>>>(
            mean.data.get(), var.data.get(), running_mean.data.get(), running_var.data.get(),
            means.data.get(), squares.data.get(), N, C, size);
        CHECK_LAUNCH();
    }
    if (planes > 0)
        batch_norm_kernel<<<blocks(planes * warp), threads, 0, on(X.device)>>>(
            y.data.get(), X.data.get(), gamma.data.get(), beta.data.get(), mean.data.get(),
            var.data.get(), N, C, size);
    CHECK_LAUNCH();
    record(y, [=] { batch_norm_backward(X, gamma, beta, mean, var, y); });
    return y;
}

// --- addition

// y = A + B. One thread an element.
__global__ void add_forward_kernel(float *y, const float *A, const float *B, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = A[i] + B[i];
}
// dA = or += dy
__global__ void add_backward_kernel(float *dA, const float *dy, int n, bool accumulate) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) put(dA + i, accumulate, dy[i]);
}

// A + B, of one shape. They may be the same tensor: its gradient is then 2 dy.
Tensor add(const Tensor &A, const Tensor &B) {
    check_shape("add", A.shape == B.shape, "two of the same shape", {A, B});
    Tensor y = output("add", {A, B}, A.shape);
    const int n = size(A);
    if (n > 0)
        add_forward_kernel<<<blocks(n), threads, 0, on(A.device)>>>(y.data.get(), A.data.get(),
                                                                    B.data.get(), n);
    CHECK_LAUNCH();
    record(y, [=] {
        for (const Tensor &X : {A, B}) {
            if (!X.grad) continue;
            bool accumulate;
            float *dX = grad_of(X, &accumulate);
            if (n > 0)
                add_backward_kernel<<<blocks(n), threads, 0, on(X.device)>>>(dX, y.grad->data.get(),
                                                                             n, accumulate);
            CHECK_LAUNCH();
        }
    });
    return y;
}

// --- softmax cross-entropy

// l[n] = log(sum over j of exp(y_hat[n,j])) - y_hat[n,y[n]], the largest logit taken out first
//   y_hat (N,classes)   y (N) class numbers   ->   l (N)
// One thread a sample.
__global__ void softmax_cross_entropy_kernel(float *l, const float *y_hat, const float *y, int N,
                                             int classes) {
    int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) return;
    const float *z = y_hat + n * classes;
    float largest = z[0], sum = 0;
    for (int j = 1; j < classes; j++) largest = z[j] > largest ? z[j] : largest;
    for (int j = 0; j < classes; j++) sum += expf(z[j] - largest);
    l[n] = logf(sum) - (z[(int)y[n]] - largest);
}
// dy_hat[n,j] = or += dl[n] * (softmax(y_hat[n])[j] - [j == y[n]])
__global__ void softmax_cross_entropy_backward_kernel(float *dy_hat, const float *dl,
                                                      const float *y_hat, const float *y, int N,
                                                      int classes, bool accumulate) {
    int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) return;
    const float *z = y_hat + n * classes;
    float largest = z[0], sum = 0;
    for (int j = 1; j < classes; j++) largest = z[j] > largest ? z[j] : largest;
    for (int j = 0; j < classes; j++) sum += expf(z[j] - largest);
    for (int j = 0; j < classes; j++) {
        float p = expf(z[j] - largest) / sum;
        put(dy_hat + n * classes + j, accumulate, dl[n] * (p - (j == (int)y[n] ? 1.0f : 0.0f)));
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
    if (N > 0)
        softmax_cross_entropy_kernel<<<blocks(N, block), block, 0, on(y_hat.device)>>>(
            l.data.get(), y_hat.data.get(), y.data.get(), N, classes);
    CHECK_LAUNCH();
    record(l, [=] {
        bool accumulate;
        float *dy_hat = grad_of(y_hat, &accumulate);
        if (N == 0) return;
        softmax_cross_entropy_backward_kernel<<<blocks(N, block), block, 0, on(y_hat.device)>>>(
            dy_hat, l.grad->data.get(), y_hat.data.get(), y.data.get(), N, classes, accumulate);
        CHECK_LAUNCH();
    });
    return l;
}

// --- on tensors without gradients

__global__ void fill_kernel(float *a, float value, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) a[i] = value;
}
__global__ void add_kernel(float *a, const float *b, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) a[i] += b[i];
}
__global__ void sgd_kernel(float *param, const float *grad, float lr, float batch_size, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) param[i] -= lr * grad[i] / batch_size;
}

void add_(const Tensor &a, const Tensor &b) {
    same_device("add_", {a, b});
    check_shape("add_", a.shape == b.shape, "two of the same shape", {a, b});
    if (int n = size(a))
        add_kernel<<<blocks(n), threads, 0, on(a.device)>>>(a.data.get(), b.data.get(), n);
    CHECK_LAUNCH();
}

// param -= lr * param.grad / batch_size, for each of them that has a gradient
void sgd(const std::vector<Tensor> &params, float lr, int batch_size) {
    for (const Tensor &p : params) {
        if (!p.grad) continue; // running statistics
        int n = size(p);
        sgd_kernel<<<blocks(n), threads, 0, on(p.device)>>>(p.data.get(), p.grad->data.get(), lr,
                                                            batch_size, n);
        CHECK_LAUNCH();
    }
}

// The sum of value(i) over i < n by the one block that calls it, in a fixed order: the same bits on
// every run. `scratch` is shared, one float a thread; blockDim.x is a power of two.
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

// out[i] = parts[0][i] + parts[1][i] + ... + parts[k-1][i], added in this order; out may be a part.
// Each thread: `lanes` neighbours on a CPU, one number on a GPU.
constexpr int lanes = warp == 1 ? 16 : 1;
struct Parts {
    const float *p[most_gpus];
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
    Parts pointers = {};
    for (size_t c = 0; c < parts.size(); c++) {
        same_device("sum_", {a, parts[c]});
        check_shape("sum_", size(a) == size(parts[c]), "tensors of one size", {a, parts[c]});
        pointers.p[c] = parts[c].data.get();
    }
    if (int n = size(a))
        sum_parts_kernel<<<blocks(n, threads * lanes), threads, 0, on(a.device)>>>(
            a.data.get(), pointers, parts.size(), n);
    CHECK_LAUNCH();
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
    count_correct_kernel<<<1, threads, 0, on(y.device)>>>(correct.data.get(), y_hat.data.get(),
                                                          y.data.get(), y_hat.shape[0],
                                                          y_hat.shape[1]);
    CHECK_LAUNCH();
}

// ---------------------------------------------------------------------------------------------
// 9. Autograd
// Each device has a tape: the backward of every operator that ran on it, in order.

struct Step {
    std::shared_ptr<Tensor> grad; // of the operator's result
    std::function<void()> backward;
};
// A logical device; section 11 makes them.
struct Gpu {
    int physical;
    Queue queues[2];            // the second is for OVERLAP
    std::map<int, Queue> links; // for messages from each device
    std::vector<Step> tape;
    size_t bytes = 0, most_bytes = 0; // of device memory taken from CUDA, now and ever
};
static Gpu &state(Device device);

static bool recording = true;
struct NoGrad {
    bool before = recording;
    NoGrad() { recording = false; }
    ~NoGrad() { recording = before; }
};

void attach_grad(Tensor &t) { t.grad = std::make_shared<Tensor>(full(t.shape, 0, t.device)); }
void attach_grad(std::vector<Tensor> &list) {
    auto exchange = std::make_shared<Exchange>();
    int n = 0;
    for (const Tensor &t : list) n += t.trained ? size(t) : 0;
    Tensor all = full({n}, 0, list[0].device);
    n = 0;
    for (Tensor &t : list) {
        if (!t.trained) continue;
        t.grad = std::make_shared<Tensor>(rows(all, n, n + size(t)));
        t.grad->shape = t.shape;
        t.grad->index = exchange->count++;
        t.grad->exchange = exchange;
        n += size(t);
    }
}

// A fresh tensor on the inputs' device. It wants a gradient if one of them does; that gets its
// memory when the backward pass first writes it.
Tensor output(const char *op, const std::vector<Tensor> &inputs, std::vector<int> shape) {
    same_device(op, inputs);
    Tensor y = empty(shape, inputs[0].device);
    for (const Tensor &X : inputs) {
        if (!recording || !X.grad) continue;
        y.grad = std::make_shared<Tensor>(Tensor{y.device, y.shape, nullptr, nullptr});
        X.grad->uses++;
    }
    return y;
}
bool is_recording() { return recording; }
void record(const Tensor &y, std::function<void()> backward) {
    if (y.grad) state(y.device).tape.push_back({y.grad, std::move(backward)});
}

static unsigned pass = 0;            // backward passes so far
static std::vector<Tensor> complete; // gradients that no operator on the tape will add to any more

// Where a backward puts dX, and whether it adds to what the same pass has put there.
float *grad_of(const Tensor &X, bool *accumulate) {
    Tensor &g = *X.grad;
    if (!g.data) g.data = empty(g.shape, g.device).data;
    *accumulate = g.written == pass;
    g.written = pass;
    if (--g.uses == 0 && g.exchange) complete.push_back(g);
    return g.data.get();
}

// Run the tape of l's device in reverse and empty it, giving back memory on the way. Afterwards
// the gradient of every tensor that l depends on is that of sum(l), whatever it was before.
void backward(const Tensor &l) {
    auto &tape = state(l.device).tape;
    if (!l.grad || tape.empty())
        error("backward: no operator on %s was recorded", str(l.device).c_str());
    pass++;
    bool accumulate;
    float *dl = grad_of(l, &accumulate);
    if (int n = size(l)) fill_kernel<<<blocks(n), threads, 0, on(l.device)>>>(dl, 1, n);
    CHECK_LAUNCH();
    while (!tape.empty()) {
        Step step = std::move(tape.back());
        tape.pop_back();
        if (step.grad->written == pass) step.backward(); // else l does not depend on it
        for (const Tensor &grad : complete) gradient_complete(grad);
        complete.clear();
    }
}

void same_device(const char *op, const std::vector<Tensor> &inputs) {
    for (const Tensor &X : inputs)
        if (X.device.id != inputs[0].device.id || X.device.id < 0)
            error("%s: its arguments lie on %s and %s, they must be on one device", op,
                  str(inputs[0].device).c_str(), str(X.device).c_str());
}
void check_shape(const char *op, bool right, const char *wanted,
                 const std::vector<Tensor> &inputs) {
    if (right) return;
    std::string got;
    for (const Tensor &X : inputs) {
        got += got.empty() ? "(" : ", (";
        for (size_t i = 0; i < X.shape.size(); i++)
            got += (i ? "," : "") + std::to_string(X.shape[i]);
        got += ")";
    }
    error("%s: wants %s, got %s", op, wanted, got.c_str());
}

// ---------------------------------------------------------------------------------------------
// 10. The other two networks        tutorials: "Concise Implementation for Multiple GPUs", the lab
// Networks made of blocks, as gluon.nn and torch.nn make them. A block knows its parameters, and
// takes so many tensors from where its forward is told that they begin.

// net.forward(X, params.data()) is what lenet(X, params) is.
struct Param {
    std::string name; // such as conv0.weight, which is saved as conv0.weight.npy
    std::vector<int> shape;
    std::function<Tensor(std::vector<int> shape)> init; // its first value, on the host
    bool trained = true;                                // else it is not to get a gradient
};
struct Block {
    std::vector<Param> params;
    std::function<Tensor(const Tensor &X, const Tensor *params)> forward;
};

static std::function<Tensor(std::vector<int>)> constant(float value) {
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
static Block ReLU() {
    return {{}, [](const Tensor &X, const Tensor *) { return relu(X); }};
}
static Block MaxPool2d(int kernel_size, int stride) {
    return {{},
            [=](const Tensor &X, const Tensor *) { return max_pool2d(X, kernel_size, stride); }};
}
static Block GlobalAvgPool2d() {
    return {{}, [](const Tensor &X, const Tensor *) { return global_avg_pool2d(X); }};
}
static Block Flatten() {
    return {{}, [](const Tensor &X, const Tensor *) { return reshape(X, {X.shape[0], -1}); }};
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

// A whole network: its parameters numbered, the weights' first values given
static Block network(Block net, std::function<Tensor(std::vector<int>)> init) {
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

std::vector<Tensor> init_params(const Block &net) {
    std::vector<Tensor> params;
    for (const Param &p : net.params) {
        params.push_back(p.init(p.shape));
        params.back().trained = p.trained;
    }
    return params;
}

// Two convolutions, their result added to X; to the convolution of X where the shape changes
Block Residual(int in_channels, int num_channels, bool use_1x1conv = false, int strides = 1) {
    Block convs = sequential({Conv2d(in_channels, num_channels, 3, strides, 1),
                              BatchNorm2d(num_channels), ReLU(),
                              Conv2d(num_channels, num_channels, 3, 1, 1),
                              BatchNorm2d(num_channels)});
    Block skip = use_1x1conv ? Conv2d(in_channels, num_channels, 1, strides) : sequential({});
    Block residual = sequential({convs, skip}); // for the parameters of both
    residual.forward = [=](const Tensor &X, const Tensor *params) {
        Tensor Y = convs.forward(X, params);
        return relu(add(Y, skip.forward(X, params + convs.params.size())));
    };
    return residual;
}

// A slightly modified ResNet-18 model: for small images. On k devices it does not learn what it
// learns on one: batch norm takes mean and variance over each device's shard, n/k samples instead
// of n.
Block resnet18(int num_classes, int in_channels = 1) {
    auto resnet_block = [](int in_channels, int num_channels, int num_residuals,
                           bool first_block = false) {
        std::vector<Block> blk;
        for (int i = 0; i < num_residuals; i++)
            if (i == 0 && !first_block)
                blk.push_back(Residual(in_channels, num_channels, true, 2));
            else
                blk.push_back(Residual(num_channels, num_channels));
        return sequential(blk);
    };
    // This model uses a smaller convolution kernel, stride, and padding and removes the max-pooling
    // layer
    Block net = sequential({Conv2d(in_channels, 64, 3, 1, 1), BatchNorm2d(64), ReLU(),
                            resnet_block(64, 64, 2, true),
                            resnet_block(64, 128, 2),
                            resnet_block(128, 256, 2),
                            resnet_block(256, 512, 2),
                            GlobalAvgPool2d(), Linear(512, num_classes)});
    return network(net, [](std::vector<int> shape) { return normal(0.01f, shape); });
}

// The lab's network: LeNet with max pooling
Block lab_cnn() {
    Block net = sequential({Conv2d(1, 20, 3), ReLU(),
                            MaxPool2d(2, 2),
                            Conv2d(20, 50, 5), ReLU(),
                            MaxPool2d(2, 2),
                            Flatten(),
                            Linear(800, 128), ReLU(),
                            Linear(128, 10)});
    return network(net, [](std::vector<int> shape) { return uniform(0.07f, shape); });
}

// What the chapters train with.
struct Model { // for k devices
    const char *name;
    int batch, batch_of_each; // batch + k * batch_of_each
    float lr, lr_of_each;
    int epochs;
};
static const Model models[] = {{"lenet", 256, 0, 0.2f, 0, 10},
                               {"resnet18", 0, 256, 0, 0.1f, 10},
                               {"lab_cnn", 0, 64, 0.3f, 0, 5}};

// MODEL: the network, its parameters on the host and their names. The same seed gives the same
// ones.
void init_model() {
    if (options.model == "lenet") return init_params(); // net and param_names are lenet's at first
    const Block block = options.model == "resnet18" ? resnet18(10) : lab_cnn();
    params = init_params(block);
    param_names.clear();
    for (const Param &p : block.params) param_names.push_back(p.name);
    net = [=](const Tensor &X, const std::vector<Tensor> &params) {
        return block.forward(X, params.data());
    };
}

// The test accuracy, by all devices: each sample counts once. Batch norm's running statistics are
// device 0's on every device, so that the result is that of device 0 alone.
float evaluate_accuracy_gpus(const Net &net, const std::vector<std::vector<Tensor>> &device_params,
                             DataIter &test_iter, const std::vector<Device> &devices) {
    NoGrad guard;
    auto params = device_params;
    std::vector<Tensor> corrects;
    for (size_t c = 0; c < devices.size(); c++) {
        for (size_t i = 0; i < params[c].size(); i++)
            if (!params[c][i].trained && c > 0) params[c][i] = copyto(params[0][i], devices[c]);
        corrects.push_back(full({1}, 0, devices[c]));
    }
    Tensor X, y;
    test_iter.reset();
    while (test_iter.next(X, y)) {
        stop_requested();
        auto [X_shards, y_shards] = split_batch(X, y, devices);
        for (size_t c = 0; c < devices.size(); c++)
            count_correct(corrects[c], net(X_shards[c], params[c]), y_shards[c]);
    }
    float correct = 0;
    for (const Tensor &t : corrects) correct += to_host(t)[0];
    return correct / test_iter.X.shape[0];
}

static std::vector<std::vector<Tensor>> on_all(const std::vector<Device> &devices) {
    std::vector<std::vector<Tensor>> device_params;
    for (Device d : devices) device_params.push_back(get_params(params, d));
    return device_params;
}

// Channel 0 of the first convolution's weight, or of its gradient.
static std::string channel0(const Tensor &weight) {
    return to_string(reshape(rows(weight, 0, 1), {1, weight.shape[2], weight.shape[3]}));
}

// The concise chapter: initialized on all devices, a forward pass, the first weights.
void demos_resnet18(int num_gpus) {
    const std::vector<Device> devices = first_devices(num_gpus);
    const auto device_params = on_all(devices); // net.initialize(ctx=devices)
    auto data = [&](size_t i, Device device) { // parameter i on the device
        for (const auto &params : device_params)
            if (params[i].device.id == device.id) return params[i];
        error("%s: not initialized on %s", param_names[i].c_str(), str(device).c_str());
    };
    Tensor x = empty({std::max(4, num_gpus), 1, 28, 28}, cpu());
    std::mt19937 random(options.seed);
    for (int i = 0; i < size(x); i++)
        x.data.get()[i] = std::uniform_real_distribution<float>(0, 1)(random);
    const std::vector<Tensor> x_shards = split_and_load(x, devices);
    for (size_t c = 0; c < devices.size(); c++) {
        NoGrad guard;
        printf("%s\n", to_string(net(x_shards[c], device_params[c])).c_str());
    }
    try {
        data(0, cpu());
    } catch (const Error &) {
        printf("not initialized on %s\n", str(cpu()).c_str());
    }
    for (Device d : devices) printf("%s\n", channel0(data(0, d)).c_str());
}

// The lab: the network's results on two images a device, its first weights, equal on all devices,
// and their gradients, which are not.
void demos_lab_cnn(int num_gpus) {
    const std::vector<Device> devices = first_devices(num_gpus);
    const auto device_params = on_all(devices);
    Tensor X, y;
    first_samples(2 * num_gpus, X, y);
    auto [data, label] = split_batch(X, y, devices);
    for (size_t c = 0; c < devices.size(); c++) {
        NoGrad guard;
        printf("%s\n", to_string(net(data[c], device_params[c])).c_str());
    }
    for (size_t c = 0; c < devices.size(); c++)
        printf("=== channel 0 of the first conv on %s ===\n%s\n", str(devices[c]).c_str(),
               channel0(device_params[c][0]).c_str());
    for (size_t c = 0; c < devices.size(); c++)
        backward(loss(net(data[c], device_params[c]), label[c]));
    for (size_t c = 0; c < devices.size(); c++)
        printf("=== grad of channel 0 of the first conv2d on %s ===\n%s\n", str(devices[c]).c_str(),
               channel0(*device_params[c][0].grad).c_str());
    printf("Running on %s\nBatch size is %d\n", str(devices).c_str(), options.batch);
}

// ---------------------------------------------------------------------------------------------
// 11. Devices and memory
// k logical devices on the GPUs there are, the memory of tensors, and what to say when CUDA fails.

static std::vector<Gpu> &gpus =
    *new std::vector<Gpu>; // the logical devices; tensors may outlive main

static Gpu &state(Device device) {
    if (device.id < 0 || device.id >= (int)gpus.size())
        error("there is no %s: the program runs on %zu devices", str(device).c_str(), gpus.size());
    return gpus[device.id];
}
int physical(Device device) { return state(device).physical; }

static int second = 0; // 1 while a SecondQueue exists
SecondQueue::SecondQueue() { second = 1; }
SecondQueue::~SecondQueue() { second = 0; }
Queue &queue(Device device) { return state(device).queues[second]; }
cudaEvent_t ready(Device device) { return queue(device).ready; }
cudaStream_t on(Device device) {
    CHECK(cudaSetDevice(physical(device)));
    return queue(device).stream;
}
static Queue new_queue(int physical) {
    Queue q;
    CHECK(cudaSetDevice(physical));
    CHECK(cudaStreamCreateWithFlags(&q.stream, cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&q.ready, cudaEventDisableTiming));
    return q;
}
Queue &link_queue(Device src, Device dst) {
    Queue &q = state(dst).links[src.id];
    if (!q.stream) q = new_queue(physical(dst));
    return q;
}
// The first queues of the first k devices wait for their second ones.
void join_second_queues(int k) {
    for (int i = 0; i < k; i++) {
        Gpu &g = state(gpu(i));
        CHECK(cudaSetDevice(g.physical));
        CHECK(cudaEventRecord(g.queues[1].ready, g.queues[1].stream));
        CHECK(cudaStreamWaitEvent(g.queues[0].stream, g.queues[1].ready, 0));
    }
}
void waitall() {
    for (const Gpu &g : gpus) {
        CHECK(cudaSetDevice(g.physical));
        for (const Queue &q : g.queues) CHECK(cudaStreamSynchronize(q.stream));
    }
}

void check_cuda(cudaError_t code, const char *call, const char *file, int line) {
    if (code == cudaSuccess) return;
    fflush(stdout);
    fprintf(stderr, "mgpu: %s:%d: %s: %s (%s)\n", file, line, call, cudaGetErrorString(code),
            cudaGetErrorName(code));
    _exit(1); // what CUDA still has in its queues is worth nothing now
}

// Copy a pattern from gpu(i) to gpu(j) and compare: better here than in a gradient.
static void check_link(Device i, Device j) {
    std::vector<float> want(1 << 14);
    Tensor host = empty({(int)want.size()}, cpu());
    for (size_t n = 0; n < want.size(); n++)
        want[n] = host.data.get()[n] = 1000.0f * i.id + 10.0f * j.id + n % 7;
    if (to_host(copyto(copyto(host, i), j)) != want)
        error("what is copied from %s to %s arrives changed", str(i).c_str(), str(j).c_str());
}

// Make logical devices gpu(0) ... gpu(k-1), round-robin on the GPUs there are, and print how each
// pair exchanges data: peer (directly) or staged (through the host), or that they share a GPU.
void use_devices(int k, bool quiet = false) {
    int count = 0;
    cudaError_t code = cudaGetDeviceCount(&count);
    if (code != cudaSuccess || count == 0)
        error("no GPU (%s): `make run BACKEND=cpu` emulates devices", cudaGetErrorString(code));
    for (int i = gpus.size(); i < k; i++) {
        const int p = i % count;
        gpus.push_back({p, {new_queue(p), new_queue(p)}, {}, {}, 0, 0});
    }
    if (k > count && !quiet)
        printf("notice: %d logical devices share %d GPU%s, each with its own memory and stream\n",
               k, count, count > 1 ? "s" : "");
    for (int i = 0; i < k; i++) {
        cudaDeviceProp prop;
        CHECK(cudaGetDeviceProperties(&prop, physical(gpu(i))));
        std::string links[3];
        for (int j = 0; j < k; j++) {
            if (j == i) continue;
            int can = 0;
            bool same = physical(gpu(i)) == physical(gpu(j));
            if (!same) CHECK(cudaDeviceCanAccessPeer(&can, physical(gpu(i)), physical(gpu(j))));
            if (can) {
                CHECK(cudaSetDevice(physical(gpu(i))));
                code = cudaDeviceEnablePeerAccess(physical(gpu(j)), 0);
                if (code == cudaErrorPeerAccessAlreadyEnabled)
                    cudaGetLastError(); // not sticky: forget it
                else
                    CHECK(code);
            }
            check_link(gpu(i), gpu(j));
            links[same ? 0 : can ? 1 : 2] += " " + str(gpu(j));
        }
        if (quiet) continue;
        printf("%s: %s", str(gpu(i)).c_str(), prop.name);
        const char *names[3] = {"same GPU as", "peer", "staged"};
        for (int l = 0; l < 3; l++)
            if (!links[l].empty()) printf("; %s:%s", names[l], links[l].c_str());
        printf("\n");
    }
}

int size(const Tensor &t) {
    int n = 1;
    for (int s : t.shape) n *= s;
    return n;
}

// Give the blocks that no tensor uses back to CUDA.
void empty_cache() {
    waitall();
    for (Gpu &g : gpus)
        for (Queue &q : g.queues) {
            for (auto &blocks : q.free_blocks)
                for (float *p : blocks.second) {
                    CHECK(cudaFree(p));
                    g.bytes -= blocks.first;
                }
            q.free_blocks.clear();
        }
}

// Memory for n floats. On a device it comes from blocks of the same size that earlier tensors have
// left to the same queue, if there are any: a training step allocates nothing after the first. The
// queue's order makes that safe. On the host it is pinned: devices copy while the host goes on.
static std::shared_ptr<float> allocate(int n, Device device) {
    const size_t bytes = n * sizeof(float);
    float *p = nullptr;
    if (n == 0) return nullptr;
    if (device.id < 0) {
        if (cudaMallocHost((void **)&p, bytes) != cudaSuccess)
            error("the host has no %.1f MB of pinned memory left", bytes / 1e6);
        return std::shared_ptr<float>(p, [](float *p) { cudaFreeHost(p); });
    }
    auto &blocks = queue(device).free_blocks[bytes];
    if (!blocks.empty()) {
        p = blocks.back();
        blocks.pop_back();
    } else {
        on(device);
        cudaError_t code = cudaMalloc((void **)&p, bytes);
        if (code != cudaSuccess) { // perhaps in blocks of other sizes
            cudaGetLastError();
            empty_cache();
            on(device);
            code = cudaMalloc((void **)&p, bytes);
        }
        if (code != cudaSuccess) {
            size_t free = 0, total = 0;
            cudaGetLastError();
            CHECK(cudaMemGetInfo(&free, &total));
            error("%s is out of memory: %.1f MB more are needed, %.1f of its %.1f MB are free: use "
                  "a smaller BATCH",
                  str(device).c_str(), bytes / 1e6, free / 1e6, total / 1e6);
        }
        Gpu &g = state(device);
        g.bytes += bytes;
        g.most_bytes = std::max(g.most_bytes, g.bytes);
    }
    return std::shared_ptr<float>(p, [device, which = second, bytes](float *p) {
        gpus[device.id].queues[which].free_blocks[bytes].push_back(p);
    });
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
    int n = size(t);
    if (device.id < 0)
        std::fill_n(t.data.get(), n, value);
    else if (n > 0)
        fill_kernel<<<blocks(n), threads, 0, on(device)>>>(t.data.get(), value, n);
    CHECK_LAUNCH();
    return t;
}
Tensor arange(int n) {
    Tensor t = empty({n}, cpu());
    for (int i = 0; i < n; i++) t.data.get()[i] = i;
    return t;
}

static std::mt19937 rng; // seeded by main

Tensor normal(float scale, std::vector<int> shape) {
    Tensor t = empty(std::move(shape), cpu());
    std::normal_distribution<float> distribution(0, scale);
    for (int i = 0; i < size(t); i++) t.data.get()[i] = distribution(rng);
    return t;
}

Tensor uniform(float scale, std::vector<int> shape) {
    Tensor t = empty(std::move(shape), cpu());
    std::uniform_real_distribution<float> distribution(-scale, scale);
    for (int i = 0; i < size(t); i++) t.data.get()[i] = distribution(rng);
    return t;
}

// One size may be -1: what is left. The gradient is shared like the numbers.
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
    Tensor y = X;
    y.grad = nullptr;
    y.shape[0] = end - begin;
    size_t row = 1;
    for (size_t i = 1; i < X.shape.size(); i++) row *= X.shape[i];
    if (X.data) y.data = std::shared_ptr<float>(X.data, X.data.get() + begin * row);
    return y;
}

// `count` arrays of n numbers in pinned host memory that is never given back: always the same ones
// for the same queues, in which one call of allreduce_host follows the other.
std::vector<float *> pinned(int count, int n) {
    static auto &all = *new std::map<std::pair<int, int>, std::vector<Tensor>>;
    std::vector<Tensor> &list = all[{second, n}];
    while ((int)list.size() < count) list.push_back(empty({n}, cpu()));
    std::vector<float *> pointers;
    for (int i = 0; i < count; i++) pointers.push_back(list[i].data.get());
    return pointers;
}

// For cudaLaunchHostFunc: calls a new std::function, and deletes it.
void run_on_host(void *function) {
    std::unique_ptr<std::function<void()>> f((std::function<void()> *)function);
    (*f)();
}

std::vector<float> to_host(const Tensor &t) {
    std::vector<float> numbers(size(t));
    if (numbers.empty()) return numbers;
    Tensor host = copyto(t, cpu());
    std::copy_n(host.data.get(), numbers.size(), numbers.begin());
    return numbers;
}

// Every device must hold the same bits: what allreduce promises, and nothing else checks.
void check_replicas(const std::vector<std::vector<Tensor>> &device_params) {
    if (!options.replica_check) return;
    for (size_t i = 0; i < device_params[0].size(); i++) {
        if (!device_params[0][i].trained) continue;
        std::vector<float> first = to_host(device_params[0][i]);
        for (size_t c = 1; c < device_params.size(); c++) {
            std::vector<float> other = to_host(device_params[c][i]);
            for (size_t n = 0; n < first.size(); n++)
                if (memcmp(&first[n], &other[n], sizeof(float)) != 0)
                    error("the replicas differ: %s[%zu] is %.9g on gpu(0) but %.9g on gpu(%zu): "
                          "does allreduce leave "
                          "the same sum on every device?",
                          param_names[i].c_str(), n, first[n], other[n], c);
        }
    }
}

// ---------------------------------------------------------------------------------------------
// 12. Data, timing, output

std::string str(Device device) {
    return device.id < 0 ? "cpu" : "gpu(" + std::to_string(device.id) + ")";
}
std::string str(const std::vector<Device> &devices) {
    std::string s;
    for (Device d : devices) s += (s.empty() ? "" : ", ") + str(d);
    return "[" + s + "]";
}
Device try_gpu(int i) { return state(gpu(i)), gpu(i); }
std::vector<Device> first_devices(int k) {
    std::vector<Device> devices;
    for (int c = 0; c < k; c++) devices.push_back(try_gpu(c));
    return devices;
}

// As NumPy prints an array: each number with as few digits as tell it from its neighbours, at most
// 8 after the point, and the points of all of them below each other.
std::string to_string(const Tensor &t) {
    std::vector<float> numbers = to_host(t);
    std::vector<std::string> texts;
    size_t before = 0, after = 0; // the longest part before and after the point
    for (float v : numbers) {
        char text[64];
        for (int digits = 0; digits <= 8; digits++) {
            snprintf(text, sizeof text, digits || !std::isfinite(v) ? "%.*f" : "%.*f.", digits, v);
            if (strtof(text, nullptr) == v || std::isnan(v)) break;
        }
        texts.push_back(text);
        before = std::max(before, strcspn(text, "."));
        after = std::max(after, strlen(text) - strcspn(text, ".")); // none in "nan"
    }
    auto text = texts.begin();
    std::function<std::string(size_t)> nested = [&](size_t axis) {
        if (axis == t.shape.size()) {
            const size_t point = strcspn(text->c_str(), ".");
            const std::string left(before - point, ' '), right(after - (text->size() - point), ' ');
            return left + *text++ + right;
        }
        const size_t inner =
            t.shape.size() - axis - 1; // dimensions: as many line breaks between two
        std::string s = "[";
        for (int i = 0; i < t.shape[axis]; i++) {
            if (i > 0)
                s += inner == 0 ? " " : std::string(inner, '\n') + std::string(axis + 1, ' ');
            s += nested(axis + 1);
        }
        return s + "]";
    };
    return nested(0) + (t.device.id < 0 ? "" : " @" + str(t.device));
}

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

// One half of a data set as it lies in its files: bytes, 28 x 28 an image.
struct DataSet {
    int count = 0;
    std::vector<uint8_t> images, labels;
};

// Unpack a .gz file in the IDX format of http://yann.lecun.com/exdb/mnist: a magic number, the
// sizes (both big-endian, 4 bytes each), then the bytes. Anything else in the file is an error.
//   dims: 1 for labels (magic 2049), 3 for images (magic 2051)   ->   the bytes; *count samples
std::vector<uint8_t> load_idx(const std::string &path, int dims, int *count) {
    FILE *file = fopen(path.c_str(), "rb");
    if (!file) error("%s: %s: `make data` brings it", path.c_str(), strerror(errno));
    fclose(file);
    std::string quoted;
    for (char c : path) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
    FILE *pipe = popen(("gzip -dc < '" + quoted + "' 2> /dev/null").c_str(), "r");
    if (!pipe) error("%s: cannot start gzip: %s", path.c_str(), strerror(errno));
    uint8_t header[16] = {};
    const size_t header_bytes = 4 + 4 * dims;
    bool ends_early = fread(header, 1, header_bytes, pipe) < header_bytes;
    auto number = [&](int i) {
        return (uint32_t)header[4 * i] << 24 | header[4 * i + 1] << 16 | header[4 * i + 2] << 8 |
               header[4 * i + 3];
    };
    std::string wrong;
    std::vector<uint8_t> bytes;
    const uint32_t magic = 0x800 + dims;
    if (!ends_early) {
        if (number(0) != magic)
            wrong = "its magic number is " + std::to_string(number(0)) + ", not " +
                    std::to_string(magic);
        else if (dims == 3 && (number(2) != 28 || number(3) != 28))
            wrong = "its images are " + std::to_string(number(2)) + "x" +
                    std::to_string(number(3)) + ", not 28x28";
        else if (number(1) == 0 || number(1) > 1000000)
            wrong = "it says that it has " + std::to_string(number(1)) + " samples";
    }
    if (wrong.empty() && !ends_early) {
        *count = number(1);
        bytes.resize(*count * (dims == 3 ? size_t(28 * 28) : 1) + 1);
        size_t got = fread(bytes.data(), 1, bytes.size(), pipe);
        if (got == bytes.size())
            wrong = "there is more in it than the " + std::to_string(*count) + " samples it names";
        bytes.pop_back();
        ends_early = got < bytes.size();
    }
    int status = pclose(pipe);
    stop_requested(); // Ctrl-C ends gzip too
    if (wrong.empty() && status != 0) wrong = "gzip cannot unpack it";
    if (wrong.empty() && ends_early) wrong = "it ends early";
    if (!wrong.empty())
        error("%s: %s: remove it, `make data` brings the right one", path.c_str(), wrong.c_str());
    return bytes;
}

// `which`: train or t10k
DataSet load_data(const std::string &folder, const std::string &which) {
    DataSet set;
    int labels = 0;
    std::string images_path = folder + "/" + which + "-images-idx3-ubyte.gz";
    std::string labels_path = folder + "/" + which + "-labels-idx1-ubyte.gz";
    set.images = load_idx(images_path, 3, &set.count);
    set.labels = load_idx(labels_path, 1, &labels);
    if (labels != set.count)
        error("%s has %d images, but %s has %d labels", images_path.c_str(), set.count,
              labels_path.c_str(), labels);
    for (size_t i = 0; i < set.labels.size(); i++)
        if (set.labels[i] > 9)
            error("%s: label %zu is %d, not 0 to 9", labels_path.c_str(), i, set.labels[i]);
    if (options.limit) set.count = std::min(set.count, options.limit);
    return set;
}

static DataSet train_set, test_set; // main reads them before anything starts

static DataIter make_iter(const DataSet &set, int batch_size, bool shuffle) {
    DataIter iter = {
        &set, batch_size, shuffle, empty({set.count, 1, 28, 28}, cpu()), empty({set.count}, cpu()),
        {}};
    for (int i = 0; i < set.count; i++) iter.order.push_back(i);
    return iter;
}
std::pair<DataIter, DataIter> load_data_fashion_mnist(int batch_size) {
    return {make_iter(train_set, batch_size, options.shuffle),
            make_iter(test_set, batch_size, false)};
}

// The first n samples of the training set, in the file's order.
void first_samples(int n, Tensor &X, Tensor &y) { make_iter(train_set, n, false).next(X, y); }

// SPLIT=3,1 gives the first device three quarters. What the division leaves over goes to the
// devices that it leaves most for, to the first of them where it leaves the same.
std::vector<int> shard_sizes(int n, int k) {
    const std::vector<int> weights = options.split.empty() ? std::vector<int>(k, 1) : options.split;
    const long sum = std::accumulate(weights.begin(), weights.end(), 0L);
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
    const int left = n - std::accumulate(sizes.begin(), sizes.end(), 0);
    for (int i = 0; i < left; i++) sizes[order[i]]++;
    return sizes;
}

// Not before the devices have done with the epoch before.
void DataIter::reset() {
    begin = 0;
    if (!shuffle) return; // what was filled stays right
    filled = 0;
    std::shuffle(order.begin(), order.end(), rng);
}
bool DataIter::next(Tensor &X, Tensor &y) {
    const int end = std::min(begin + batch_size, set->count);
    if (begin == end) return false;
    for (; filled < end; filled++) {
        const uint8_t *image = &set->images[(size_t)order[filled] * 28 * 28];
        float *x = this->X.data.get() + (size_t)filled * 28 * 28;
        for (int p = 0; p < 28 * 28; p++) x[p] = image[p] / 255.0f;
        this->y.data.get()[filled] = set->labels[order[filled]];
    }
    X = rows(this->X, begin, end);
    y = rows(this->y, begin, end);
    begin = end;
    return true;
}

// The fraction of the test set that the network puts into the right class; each sample counts once.
float evaluate_accuracy_gpu(const std::function<Tensor(const Tensor &)> &net, DataIter &test_iter,
                            Device device) {
    NoGrad guard;
    Tensor correct = full({1}, 0, device), X, y;
    test_iter.reset();
    while (test_iter.next(X, y)) {
        stop_requested();
        count_correct(correct, net(copyto(X, device)), copyto(y, device));
    }
    return to_host(correct)[0] / test_iter.set->count;
}

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}
void Timer::start() { t0 = now(); }
void Timer::stop() { times.push_back(now() - t0); }
double Timer::avg() const {
    double sum = 0;
    for (double t : times) sum += t;
    return times.empty() ? 0 : sum / times.size();
}

Animator::Animator(const std::vector<Device> &devices, int steps)
    : devices(devices), steps(steps), bar(isatty(STDOUT_FILENO)) {
    for (Device d : devices) losses.push_back(full({steps}, 0, d));
    if (options.model != "lab_cnn")
        printf("%5s  %8s  %8s  %8s\n", "epoch", "loss", "test acc", "seconds");
}
void Animator::step(const std::vector<Tensor> &ls) {
    stop_requested();
    const int s = samples.size();
    samples.push_back(0);
    for (size_t c = 0; c < ls.size(); c++) {
        samples[s] += size(ls[c]);
        sum_kernel<<<1, threads, 0, on(devices[c])>>>(losses[c].data.get() + s, ls[c].data.get(),
                                                      size(ls[c]));
        CHECK_LAUNCH();
    }
    cudaEvent_t done;
    on(devices[0]);
    CHECK(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
    CHECK(cudaEventRecord(done, on(devices[0])));
    pending.push_back(done);
    while (!pending.empty() && cudaEventQuery(pending.front()) == cudaSuccess) {
        CHECK(cudaEventDestroy(pending.front()));
        pending.pop_front();
        draw(s + 1 - pending.size());
    }
}
void Animator::draw(int done) {
    if (!bar) return;
    const int width = 30, filled = done * width / steps;
    printf("\r%5d/%d [%.*s%*s]", done, steps, filled,
           "==============================", width - filled, "");
    fflush(stdout);
}
// The only wait of an epoch. A loss that is not a number stops the run.
double Animator::finish(int epoch) {
    for (; !pending.empty(); pending.pop_front()) {
        stop_requested();
        CHECK(cudaEventSynchronize(pending.front()));
        CHECK(cudaEventDestroy(pending.front()));
        draw(samples.size() - pending.size() + 1);
    }
    waitall();
    if (bar) printf("\r\033[K");
    std::vector<double> sum(samples.size());
    for (const Tensor &l : losses) {
        std::vector<float> host = to_host(l);
        for (size_t s = 0; s < sum.size(); s++) sum[s] += host[s];
    }
    double total = 0;
    long count = 0;
    for (size_t s = 0; s < sum.size(); s++) {
        if (!std::isfinite(sum[s]))
            error("the loss is %s in step %zu of epoch %d: use a smaller LR than %g",
                  std::isnan(sum[s]) ? "nan" : "infinite", s + 1, epoch + 1, options.lr);
        total += sum[s];
        count += samples[s];
    }
    samples.clear();
    return total / count;
}

// Write a file in one go: it is there whole or not at all. Folders on the way are made. What is no
// file, such as /dev/null, is written to: a rename would put a file in its place. -> 0 or an errno
static int try_write(const std::string &path, const std::string &bytes) {
    std::error_code code;
    std::filesystem::path folder = std::filesystem::path(path).parent_path();
    if (!folder.empty()) std::filesystem::create_directories(folder, code);
    const bool special = std::filesystem::is_other(path, code);
    std::string part = special ? path : path + ".part";
    FILE *file = fopen(part.c_str(), "wb");
    bool written = file && fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size();
    if (file) written = fclose(file) == 0 && written;
    if (written && (special || rename(part.c_str(), path.c_str()) == 0)) return 0;
    int reason = errno;
    if (!special) remove(part.c_str());
    return reason;
}
static void write_file(const std::string &path, const std::string &bytes) {
    if (int reason = try_write(path, bytes))
        error("cannot write %s: %s", path.c_str(), strerror(reason));
}
// Fail now if a file cannot be written there later; leaves nothing behind.
static void check_writable(const std::string &path) {
    std::filesystem::path folder = std::filesystem::path(path).parent_path(), made;
    std::error_code code;
    for (auto f = folder; !f.empty() && !std::filesystem::exists(f, code); f = f.parent_path())
        made = f;
    if (std::filesystem::is_directory(path, code))
        error("cannot write %s: it is a folder", path.c_str());
    int reason = 0;
    if (!std::filesystem::is_other(path, code)) {
        reason = try_write(path + ".mgpu-test", "");
        remove((path + ".mgpu-test").c_str());
    } else if (access(path.c_str(), W_OK) != 0)
        reason = errno;
    if (!made.empty()) std::filesystem::remove_all(made, code); // only the folders made here
    if (reason) error("cannot write %s: %s", path.c_str(), strerror(reason));
}

// A row, and the same in the file for `make plot`.
void Animator::add(int epoch, double loss, float acc, double seconds) {
    char row[100];
    if (options.model == "lab_cnn") // as the lab prints it
        printf("Epoch %d, training time = %.1f sec\n         validation accuracy = %.4f\n",
               epoch - 1, seconds, acc);
    else
        printf("%5d  %8.4f  %8.4f  %8.2f\n", epoch, loss, acc, seconds);
    snprintf(row, sizeof row, "%d,%.6f,%.4f,%.4f\n", epoch, loss, acc, seconds);
    log.push_back(row);
    std::string csv = "epoch,loss,test_acc,seconds\n";
    for (const std::string &line : log) csv += line;
    write_file(options.log, csv);
}

// NumPy's .npy, version 1.0: a magic string, the length of a header, the header (a Python dict),
// numbers. https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
static std::string python_tuple(const std::vector<int> &shape) { // (20,) or (2, 3)
    std::string text;
    for (int s : shape) text += (text.empty() ? "" : ", ") + std::to_string(s);
    return "(" + text + (shape.size() == 1 ? ",)" : ")");
}
void save_npy(const std::string &path, const Tensor &t) {
    std::string header =
        "{'descr': '<f4', 'fortran_order': False, 'shape': " + python_tuple(t.shape) + ", }";
    while ((10 + header.size() + 1) % 64) header += ' ';
    header += '\n';
    std::vector<float> numbers = to_host(t);
    std::string bytes = std::string("\x93NUMPY\x01\x00", 8);
    bytes += {char(header.size() & 255), char(header.size() >> 8)};
    bytes += header;
    bytes.append((const char *)numbers.data(), numbers.size() * sizeof(float));
    write_file(path, bytes);
}

// Read `path` into t, on the host: little-endian 32-bit floats in C order, of t's shape.
void load_npy(const std::string &path, const Tensor &t) {
    FILE *file = fopen(path.c_str(), "rb");
    if (!file) error("%s: %s", path.c_str(), strerror(errno));
    std::string bytes(size(t) * sizeof(float) + 70000, 0); // a header has at most 65535 bytes
    bytes.resize(fread(&bytes[0], 1, bytes.size(), file));
    fclose(file);
    auto byte = [&](int i) { return (size_t)(uint8_t)bytes[i]; };
    if (bytes.size() < 10 || bytes.compare(0, 6, "\x93NUMPY") != 0)
        error("%s: not a .npy file", path.c_str());
    const bool v1 = byte(6) == 1;
    const size_t start = v1 ? 10 : 12;
    if (byte(6) < 1 || byte(6) > 3 || bytes.size() < start)
        error("%s: not a .npy file that this can read", path.c_str());
    const size_t length = byte(8) | byte(9) << 8 | (v1 ? 0 : byte(10) << 16 | byte(11) << 24);
    if (bytes.size() < start + length) error("%s: its header is cut off", path.c_str());
    const std::string header = bytes.substr(start, length);
    // The text after 'key': up to `end`.
    auto value = [&](const std::string &key, const char *end) {
        size_t at = header.find("'" + key + "':");
        if (at == std::string::npos) error("%s: no '%s' in its header", path.c_str(), key.c_str());
        at = header.find_first_not_of(' ', at + key.size() + 3);
        size_t stop = header.find_first_of(end, at + 1);
        return at == std::string::npos || stop == std::string::npos ? ""
                                                                    : header.substr(at, stop - at);
    };
    std::string type = value("descr", "',"), order = value("fortran_order", ",}"),
                shape = value("shape", ")");
    if (type != "'<f4")
        error("%s: its numbers are %s, not little-endian 32-bit floats ('<f4')", path.c_str(),
              (type + "'").c_str());
    if (order != "False") error("%s: it is in Fortran order, save it in C order", path.c_str());
    std::vector<long> got;
    for (size_t i = 1; i < shape.size();) {
        char *end;
        got.push_back(strtol(&shape[i], &end, 10));
        if (end == &shape[i])
            error("%s: its shape %s) cannot be read", path.c_str(), shape.c_str());
        i = std::min(shape.size(), shape.find_first_not_of(", ", end - shape.data()));
    }
    if (got != std::vector<long>(t.shape.begin(), t.shape.end()))
        error("%s: its shape is %s), not %s", path.c_str(), shape.c_str(),
              python_tuple(t.shape).c_str());
    if (bytes.size() != start + length + size(t) * sizeof(float))
        error("%s: it has %s numbers than its shape says", path.c_str(),
              bytes.size() < start + length + size(t) * sizeof(float) ? "fewer" : "more");
    memcpy(t.data.get(), &bytes[start + length], size(t) * sizeof(float));
}

void save_params(const std::vector<Tensor> &params, const std::string &folder) {
    for (size_t i = 0; i < params.size(); i++)
        save_npy(folder + "/" + param_names[i] + ".npy", params[i]);
}
void load_params(const std::vector<Tensor> &params, const std::string &folder) {
    for (size_t i = 0; i < params.size(); i++)
        load_npy(folder + "/" + param_names[i] + ".npy", params[i]);
}

// ---------------------------------------------------------------------------------------------
// 13. Judge and benchmark
// `make exercise`: is an allreduce right, and what does it cost? `make bench`: how long does it
// take?

// Tensors of these sizes on k devices, side by side on each or each by itself.
static Grads make_grads(int k, const std::vector<int> &sizes, bool side_by_side) {
    Grads grads(k);
    for (int c = 0; c < k; c++) {
        std::vector<Tensor> list;
        for (int n : sizes) {
            list.push_back(empty({side_by_side ? 0 : n}, gpu(c)));
            list.back().shape = {n};
        }
        if (side_by_side) attach_grad(list);
        for (const Tensor &t : list) grads[c].push_back(side_by_side ? *t.grad : t);
    }
    return grads;
}

// Device c's number i is weight(i) * base^c: the digits of sum / weight(i) then tell how often each
// device's number is in the sum. All sums are whole and below 2^24: exact in any order.
static int base_bits(int k) { return k <= 8 ? 2 : 1; } // base 4, or 2 where that would be too much
static int weight(int i) { return 1 + i % 251; }
static float input(int i, int c, int k) { return (float)weight(i) * (1 << base_bits(k) * c); }

static float wanted(int i, int k) { // the sum
    float sum = 0;
    for (int c = 0; c < k; c++) sum += input(i, c, k);
    return sum;
}

constexpr float afterwards = -1e30f; // what the judge puts in place of a sum that it has copied

// What may have gone wrong, from a wrong number of device c at index i.
static std::string explain(float got, int i, int c, int k) {
    if (std::isnan(got))
        return "nobody had written it yet: is a wait missing before a message or a sum is read?";
    if (got == afterwards)
        return "the judge put that there after the allreduce: is a wait missing after a message?";
    if (got == input(i, c, k))
        return "it is still " + str(gpu(c)) +
               "'s own number: was no sum sent there, or did it not wait for the sum?";
    const float times = got / weight(i), other = got / wanted(0, k); // weight(0) is 1
    if (other == std::floor(other) && other >= 1 && other <= 251)
        return "it is the sum of an index " + std::to_string(((int)other - weight(i) + 251) % 251) +
               " further on: are the bounds of a part wrong?";
    if (times != std::floor(times) || times < 1 || times >= 1 << base_bits(k) * k)
        return "it is no sum of the devices' numbers at this index";
    std::string missing, repeated;
    for (int d = 0, rest = times; d < k; d++, rest >>= base_bits(k)) {
        const int count = rest & ((1 << base_bits(k)) - 1);
        if (count == 0) missing += " " + str(gpu(d));
        if (count > 1) repeated += " " + str(gpu(d));
    }
    std::string text;
    if (!missing.empty())
        text = "without the number of" + missing +
               ": is it not added, or is a wait missing before the sum is read?";
    if (!repeated.empty())
        text += std::string(text.empty() ? "" : " ") + "more than once the number of" + repeated +
                ": is it added again?";
    return text;
}

// Call an algorithm with number(c, i) on device c, i counting through all tensors, while one device
// comes late, or none (-1). What the contract promises may be done after it, is done at once: the
// sums are copied and their memory overwritten.   ->   each device's sums
static std::vector<std::vector<float>> call(const std::string &name, const Grads &grads, int late,
                                            const std::function<float(int, int)> &number) {
    const int k = grads.size();
    Grads results(k);
    std::vector<Tensor> inputs; // in use until the end
    for (int c = 0; c < k; c++)
        for (const Tensor &t : grads[c])
            if (size(t) > 0)
                CHECK(cudaMemsetAsync(t.data.get(), 0xFF, size(t) * sizeof(float), on(gpu(c))));
    waitall();
    for (int c = 0; c < k; c++) {
        int i = 0;
        if (c == late)
            CHECK(cudaLaunchHostFunc(on(gpu(c)), run_on_host,
                                     new std::function<void()>([] { usleep(3000); })));
        for (const Tensor &t : grads[c]) {
            inputs.push_back(empty(t.shape, cpu()));
            for (int n = 0; n < size(t); n++) inputs.back().data.get()[n] = number(c, i++);
            copyto(inputs.back(), t);
        }
    }
    run_allreduce(name, grads);
    for (int c = 0; c < k; c++)
        for (const Tensor &t : grads[c]) {
            results[c].push_back(copyto(t, t.device));
            copyto(full(t.shape, afterwards, t.device), t);
        }
    waitall();
    std::vector<std::vector<float>> sums(k);
    for (int c = 0; c < k; c++)
        for (const Tensor &t : results[c])
            for (float x : to_host(t)) sums[c].push_back(x);
    return sums;
}

// Right for these tensors? An Error names the first wrong number.
static void judge_sums(const std::string &name, int k, const std::vector<int> &sizes, bool flat,
                       int late) {
    auto sums =
        call(name, make_grads(k, sizes, flat), late, [=](int c, int i) { return input(i, c, k); });
    for (int c = 0; c < k; c++) {
        int wrong = 0, first = 0, last = 0;
        const int n = sums[c].size();
        for (int i = 0; i < n; i++) {
            if (sums[c][i] == wanted(i, k)) continue;
            if (wrong++ == 0) first = i;
            last = i;
        }
        if (wrong == 0) continue;
        const float got = sums[c][first];
        error(
            "%s is wrong: k = %d, %zu tensor%s, %d numbers%s%s: %s has %.9g at index %d, not %.9g "
            "(%d wrong, up to index %d): %s",
            name.c_str(), k, sizes.size(), sizes.size() > 1 ? "s" : "", n,
            late < 0 ? "" : ", late: ", late < 0 ? "" : str(gpu(late)).c_str(), str(gpu(c)).c_str(),
            std::isnan(got) ? NAN : got, first, wanted(first, k), wrong, last,
            explain(got, first, c, k).c_str());
    }
}

// The same bits on every device, and whichever device comes late?
static void judge_bits(const std::string &name, int k, const std::vector<int> &sizes) {
    const Grads grads = make_grads(k, sizes, true);
    auto number = [](int c, int i) { return std::sin(1.0f + i * 7 + c * 1000) * (1 + i % 10); };
    const auto first = call(name, grads, -1, number);
    for (int late = 0; late < k; late++) {
        const auto sums = call(name, grads, late, number);
        for (int c = 0; c < k; c++)
            for (size_t i = 0; i < sums[c].size(); i++) {
                if (memcmp(&sums[c][i], &first[c][i], sizeof(float)) != 0)
                    error("%s is not deterministic: k = %d, index %zu of %s: %.9g, but %.9g when "
                          "%s is late: the order of additions must not depend on time",
                          name.c_str(), k, i, str(gpu(c)).c_str(), first[c][i], sums[c][i],
                          str(gpu(late)).c_str());
                if (memcmp(&sums[c][i], &sums[0][i], sizeof(float)) != 0)
                    error("%s gives the devices different sums: k = %d, index %zu: %.9g on gpu(0), "
                          "%.9g on %s: add once, then copy, or add in one order everywhere",
                          name.c_str(), k, i, sums[0][i], sums[c][i], str(gpu(c)).c_str());
            }
    }
}

// Does it return while the devices cannot go on? They stand still until it has, or half a second.
static void judge_host(const std::string &name, int k, const std::vector<int> &sizes) {
    const Grads grads = make_grads(k, sizes, true);
    run_allreduce(name, grads); // what memory it needs is there from now on
    waitall();
    struct Gate {
        std::atomic<bool> open{false}, given_up{false};
    } gate;
    for (int c = 0; c < k; c++)
        CHECK(cudaLaunchHostFunc(on(gpu(c)), run_on_host, new std::function<void()>([&gate] {
                                     for (int ms = 0; !gate.open && !gate.given_up; ms++) {
                                         usleep(1000);
                                         if (ms > 500) gate.given_up = true;
                                     }
                                 })));
    run_allreduce(name, grads);
    gate.open = true;
    const bool waited = gate.given_up;
    waitall();
    if (waited)
        error("%s waits on the host for a device: queue work and return, wait_for and copyto make "
              "the devices wait",
              name.c_str());
}

// What one call sends.
static Traffic count_traffic(const std::string &name, const Grads &grads) {
    waitall();
    traffic = {};
    for (Gpu &g : gpus) {
        for (Queue &q : g.queues) q.chain = 0;
        for (auto &link : g.links) link.second.chain = 0;
    }
    run_allreduce(name, grads);
    waitall();
    return traffic;
}
// Into or out of the device, or the host, that moves most.
static long busiest(const Traffic &t) {
    long most = 0;
    for (auto &direction : {t.in, t.out})
        for (auto &bytes : direction) most = std::max(most, bytes.second);
    return most;
}

// Seconds for a call: the median of 3 blocks of calls.
static double time_allreduce(const std::string &name, const Grads &grads) {
    auto calls = [&](int n) {
        stop_requested();
        const double t0 = now();
        for (int i = 0; i < n; i++) run_allreduce(name, grads);
        waitall();
        return (now() - t0) / n;
    };
    calls(1);
    const int n = std::min(200.0, std::max(1.0, 0.02 / calls(1)));
    double t[3] = {calls(n), calls(n), calls(n)};
    std::sort(t, t + 3);
    return t[1];
}

static std::vector<int> gradient_sizes() {
    std::vector<int> sizes;
    for (const Tensor &p : params)
        if (p.trained) sizes.push_back(size(p));
    return sizes;
}

// Judge options.allreduce on 1 to options.gpus devices; an Error says what is wrong with it.
void exercise() {
    const std::string name = options.allreduce;
    const int most = options.gpus;
    const std::vector<int> sizes = gradient_sizes();
    printf("%s: sums on 1 to %d devices, each of them late once\n", name.c_str(), most);
    for (int k = 1; k <= most; k++)
        for (int n : {0, 1, k - 1, k, k + 1, 1000, 1000003}) {
            stop_requested();
            const std::vector<int> list = {n / 3, 0, n - n / 3 - n / 4, n / 4};
            for (int late = -1; late < (n == k + 1 || n == 1000 ? k : 0); late++) {
                judge_sums(name, k, {n}, false, late);
                judge_sums(name, k, list, true, late);
                if (n <= 1000) judge_sums(name, k, list, false, late);
            }
        }
    printf("%s: bits\n", name.c_str());
    for (int k = 1; k <= most; k++) judge_bits(name, k, {1000, 3, 77});
    printf("%s: the host never waits\n", name.c_str());
    judge_host(name, most, sizes);

    const Grads grads = make_grads(most, sizes, true);
    const long n = std::accumulate(sizes.begin(), sizes.end(), 0L) * sizeof(float);
    printf("%s: passed. What it costs for the %zu gradients of %s, %ld bytes, on %d devices:\n",
           name.c_str(), sizes.size(), options.model.c_str(), n, most);
    printf("%-10s %9s %11s %15s %14s", "", "messages", "bytes", "busiest device", "longest chain");
#ifndef CUDA_CPU
    printf(" %9s %11s", "us", "bus GB/s");
#endif
    printf("\n");
    std::vector<std::string> rows = {name};
    if (name != "naive") rows.push_back("naive");
    for (const std::string &row : rows) {
        const Traffic t = count_traffic(row, grads);
        printf("%-10s %9ld %11ld %15ld %14d", row.c_str(), t.messages, t.bytes, busiest(t),
               t.chain);
#ifndef CUDA_CPU
        const double seconds = time_allreduce(row, grads);
        printf(" %9.1f %11.2f", seconds * 1e6, n / seconds * 2 * (most - 1) / most / 1e9);
#endif
        printf("\n");
        if (row == name && t.messages < 2 * (most - 1))
            error(
                "%s: only %ld messages were counted, and no allreduce on %d devices does with less "
                "than %d: send them with copyto or send, which count",
                name.c_str(), t.messages, most, 2 * (most - 1));
    }
    printf("%-10s %9d %11ld %15ld %14d   each by itself\n", "optimum", 2 * (most - 1),
           2 * (most - 1) * n, 2 * (most - 1) * n / most, most > 1 ? 1 : 0);
}

// A row of build/bench.csv, printed as it comes.
static std::string bench_rows;
static void bench_row(const char *format, ...) {
    char row[200];
    va_list args;
    va_start(args, format);
    vsnprintf(row, sizeof row, format, args);
    va_end(args);
    printf("%s\n", row);
    bench_rows += std::string(row) + "\n";
}

// A training step, one minibatch again and again: the median of 5 blocks of steps.
static void bench_step(const Model &model) {
    const std::vector<Device> devices = first_devices(options.gpus);
    const int batch =
        options.batch_given ? options.batch : model.batch + options.gpus * model.batch_of_each;
    options.model = model.name;
    init_model();
    auto device_params = on_all(devices);
    Tensor X = empty({batch, 1, 28, 28}, cpu()), y = empty({batch}, cpu());
    for (int i = 0; i < size(X); i++) X.data.get()[i] = rng() % 256 / 255.0f;
    for (int i = 0; i < size(y); i++) y.data.get()[i] = rng() % 10;
    auto steps = [&](int n) { // seconds for each of n steps
        double t0 = now();
        for (int i = 0; i < n; i++) {
            stop_requested();
            train_batch(X, y, device_params, devices, options.lr);
        }
        waitall();
        return (now() - t0) / n;
    };
    steps(3);
    int n = std::min(200, std::max(3, int(0.5 / steps(3))));
    std::vector<double> times;
    for (int block = 0; block < 5; block++) times.push_back(steps(n));
    std::nth_element(times.begin(), times.begin() + 2, times.end());
    bench_row("step,%s,%s%s,%d,%d,,%.1f,%.0f,images/s", options.model.c_str(),
              options.allreduce.c_str(), options.overlap ? "+overlap" : "", options.gpus,
              batch, times[2] * 1e6, batch / times[2]);
}

// allreduce of 8 equal tensors, 4 KB to 256 MB in all, by each algorithm, or by the one that
// ALLREDUCE names. From the times of each k a cost model is fitted,
//   us = a * chain + bytes / b     a: latency of a message in us,   b: bandwidth in bytes/us
// bytes: of the busiest device, or all, where logical devices share one memory. The squares of the
// relative errors are least.
static void bench_allreduce(int k) {
    int count = 0;
    CHECK(cudaGetDeviceCount(&count));
    const bool shared = k > count; // one memory carries all messages
    struct Case {
        std::string name;
        long bytes;
        double us, chain, moved;
    };
    std::vector<Case> cases;
    std::vector<std::string> names;
    for (const Algorithm &a : algorithms)
        if (options.allreduce_given ? a.name == options.allreduce
                                    : a.run != allreduce_rebind && a.run != allreduce_yours)
            names.push_back(a.name);
    for (long bytes = 4096; bytes <= 256 << 20; bytes *= 4) {
        size_t free = 0, total = 0;
        on(gpu(0));
        CHECK(cudaMemGetInfo(&free, &total));
        if (free / (shared ? k : 1) < 5 * (size_t)bytes) {
            printf("%ld bytes and more: skipped, the devices have too little memory\n", bytes);
            break;
        }
        const Grads grads = make_grads(k, std::vector<int>(8, bytes / 8 / sizeof(float)), true);
        for (const std::string &name : names) {
            const Traffic t = count_traffic(name, grads);
            const double us = time_allreduce(name, grads) * 1e6;
            bench_row("allreduce,,%s,%d,,%ld,%.1f,%.3f,GB/s", name.c_str(), k, bytes, us,
                      bytes / us * 2 * (k - 1) / k / 1e3);
            cases.push_back(
                {name, bytes, us, (double)t.chain, double(shared ? t.bytes : busiest(t))});
        }
        empty_cache();
    }
    double xx = 0, xy = 0, yy = 0, x1 = 0, y1 = 0; // normal equations of the two unknowns a, 1/b
    for (const Case &c : cases) {
        const double x = c.chain / c.us, y = c.moved / c.us;
        xx += x * x;
        xy += x * y;
        yy += y * y;
        x1 += x;
        y1 += y;
    }
    const double det = xx * yy - xy * xy;
    if (cases.empty() || det <= 0) return;
    const double a = (x1 * yy - y1 * xy) / det, inverse_b = (y1 * xx - x1 * xy) / det;
    printf("\nallreduce on %d devices: us, and below what %.1f us a message of the chain and %.2f "
           "GB/s "
           "%s would take\n%10s",
           k, a, 1e-3 / inverse_b, shared ? "for all bytes (one memory)" : "for the busiest device",
           "bytes");
    for (const std::string &name : names) printf(" %10s", name.c_str());
    for (size_t first = 0; first < cases.size(); first += names.size()) {
        printf("\n%10ld", cases[first].bytes);
        for (size_t i = first; i < first + names.size(); i++) printf(" %10.1f", cases[i].us);
        printf("\n%10s", "model");
        for (size_t i = first; i < first + names.size(); i++)
            printf(" %10.1f", a * cases[i].chain + inverse_b * cases[i].moved);
    }
    printf("\n\n");
}

void bench() {
    bench_row("what,model,allreduce,gpus,batch,bytes,us,rate,unit");
    for (const Model &m : models) {
        if (options.bench == "allreduce") break;
        bool wanted = m.name == options.model;
        if (!options.model_given) { // all, but what would take minutes
#ifdef CUDA_CPU
            wanted = strcmp(m.name, "resnet18") != 0;
#else
            wanted = true;
#endif
        }
        if (wanted) bench_step(m);
    }
    for (int k = 2; k <= (int)gpus.size() && options.bench != "step"; k++) bench_allreduce(k);
    write_file("build/bench.csv", bench_rows);
}

// ---------------------------------------------------------------------------------------------
// 14. Program

Options options;

static volatile sig_atomic_t interrupted = 0;
void stop_requested() {
    if (!interrupted) return;
    if (isatty(STDOUT_FILENO)) printf("\r\033[K");
    fflush(stdout);
    fprintf(stderr, "mgpu: interrupted\n");
    _exit(128 + SIGINT); // what is queued on the devices is dropped
}

static const char *usage =
    R"(Train a network on Fashion-MNIST on k devices, as Dive into Deep Learning does.
  --gpus K          number of devices, 1 to 64; more than there are GPUs share them (1)
  --model NAME      lenet, resnet18 or lab_cnn (lenet)
  --batch N         samples of a minibatch on all devices (256; a device: resnet18 256, lab_cnn 64)
  --lr X            learning rate (0.2; resnet18: 0.1 a device; lab_cnn: 0.3)
  --epochs N        passes over the training set (10; lab_cnn: 5)
  --split A,B,...   parts of a minibatch in this proportion, for devices of unequal speed (equal)
  --allreduce NAME  how gradients are summed: naive, bucket, host, by_tensor, sharded, ring, tree,
                    rebind or yours (naive)
  --kvstore NAME    the lab's words: local is host, device is by_tensor (lab_cnn: local)
  --overlap         exchange the last layers' gradients while the first layers' are computed
  --no-replica-check  do not compare the devices' parameters after each epoch
  --evaluate-all    test accuracy on all devices, not on gpu(0) alone (always but for lenet)
  --steps N         stop after N minibatches
  --limit N         only the first N training and the first N test samples
  --seed N          of the parameters and of the shuffling (0)
  --no-shuffle      minibatches in the order of the file
  --data DIR        where the four .gz files of Fashion-MNIST or MNIST are (data)
  --init DIR        start from the parameters in DIR/W1.npy, b1.npy, ...
  --save DIR        write the trained parameters there
  --log FILE        a row for each epoch (build/log.csv)
  --verbose         print the device memory that was used
  --exercise        judge the allreduce that --allreduce names, instead (yours, on 1 to 8 devices)
  --bench[=WHAT]    time a training step, allreduce or all, instead; into build/bench.csv (all)
  --help
)";

static long whole(const char *name, const char *text, long least, long most) {
    char *end;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (end == text || *end || errno || value < least || value > most)
        error("--%s %s: a whole number from %ld to %ld is wanted", name, text, least, most);
    return value;
}

// Such as 3,1.
static std::vector<int> proportion(const char *text) {
    std::vector<int> parts;
    for (const char *at = text;; at++) { // behind a comma
        char *end;
        const long value = strtol(at, &end, 10);
        if (end == at || (*end && *end != ',') || value < 1 || value > 1000)
            error("--split %s: whole numbers from 1 to 1000 are wanted, such as 3,1", text);
        parts.push_back(value);
        at = end;
        if (!*end) return parts;
    }
}

// Read the command line into `options`; false if --help was asked for.
bool parse_options(int argc, char **argv) {
    // Beyond all letters, so that getopt's optopt tells an unknown letter from these.
    enum { GPUS = 256, MODEL, ALLREDUCE, BATCH, LR, EPOCHS, STEPS, LIMIT, SEED };
    enum { NO_SHUFFLE = SEED + 1, OVERLAP, NO_REPLICA_CHECK, DATA, INIT, SAVE, LOG };
    enum { EXERCISE = LOG + 1, BENCH, HELP, KVSTORE, SPLIT, EVALUATE_ALL, VERBOSE };
    static const option names[] = {
        {"gpus", required_argument, nullptr, GPUS},
        {"model", required_argument, nullptr, MODEL},
        {"allreduce", required_argument, nullptr, ALLREDUCE},
        {"batch", required_argument, nullptr, BATCH},
        {"lr", required_argument, nullptr, LR},
        {"epochs", required_argument, nullptr, EPOCHS},
        {"steps", required_argument, nullptr, STEPS},
        {"limit", required_argument, nullptr, LIMIT},
        {"seed", required_argument, nullptr, SEED},
        {"no-shuffle", no_argument, nullptr, NO_SHUFFLE},
        {"overlap", no_argument, nullptr, OVERLAP},
        {"no-replica-check", no_argument, nullptr, NO_REPLICA_CHECK},
        {"kvstore", required_argument, nullptr, KVSTORE},
        {"split", required_argument, nullptr, SPLIT},
        {"evaluate-all", no_argument, nullptr, EVALUATE_ALL},
        {"verbose", no_argument, nullptr, VERBOSE},
        {"data", required_argument, nullptr, DATA},
        {"init", required_argument, nullptr, INIT},
        {"save", required_argument, nullptr, SAVE},
        {"log", required_argument, nullptr, LOG},
        {"exercise", no_argument, nullptr, EXERCISE},
        {"bench", optional_argument, nullptr, BENCH},
        {"help", no_argument, nullptr, HELP},
        {nullptr, 0, nullptr, 0},
    };
    const Model *model = models;
    int batch = 0, epochs = 0;
    float lr = 0;
    std::string kvstore;
    opterr = 0;
    optind = 0; // from the start, also after an earlier call
    for (int c; (c = getopt_long(argc, argv, ":", names, nullptr)) != -1;) {
        switch (c) {
        case GPUS:
            options.gpus = whole("gpus", optarg, 1, most_gpus);
            options.gpus_given = true;
            break;
        case BATCH: batch = whole("batch", optarg, 1, 60000); break;
        case EPOCHS: epochs = whole("epochs", optarg, 1, 1000000); break;
        case STEPS: options.steps = whole("steps", optarg, 1, 1000000000); break;
        case LIMIT: options.limit = whole("limit", optarg, 1, 1000000); break;
        case SEED: options.seed = whole("seed", optarg, 0, 4294967295); break;
        case LR: {
            char *end;
            lr = strtof(optarg, &end);
            if (end == optarg || *end || !std::isfinite(lr) || lr <= 0)
                error("--lr %s: a number greater than 0 is wanted", optarg);
            break;
        }
        case MODEL:
            options.model_given = true;
            for (const Model &m : models)
                if (strcmp(optarg, m.name) == 0) model = &m;
            if (strcmp(optarg, model->name) != 0)
                error("--model %s: unknown, there are lenet, resnet18, lab_cnn", optarg);
            break;
        case KVSTORE:
            kvstore = optarg;
            if (kvstore != "local" && kvstore != "device")
                error("--kvstore %s: unknown, there are local and device", optarg);
            break;
        case SPLIT:
            options.split = proportion(optarg);
            break;
        case EVALUATE_ALL: options.evaluate_all = true; break;
        case VERBOSE: options.verbose = true; break;
        case ALLREDUCE: {
            std::string names;
            options.allreduce.clear();
            options.allreduce_given = true;
            for (const Algorithm &a : algorithms) {
                if (strcmp(optarg, a.name) == 0) options.allreduce = a.name;
                names += (names.empty() ? "" : ", ") + std::string(a.name);
            }
            if (options.allreduce.empty())
                error("--allreduce %s: unknown, there are %s", optarg, names.c_str());
            break;
        }
        case NO_SHUFFLE: options.shuffle = false; break;
        case DATA: options.data = optarg; break;
        case INIT: options.init = optarg; break;
        case SAVE: options.save = optarg; break;
        case LOG: options.log = optarg; break;
        case OVERLAP: options.overlap = true; break;
        case NO_REPLICA_CHECK: options.replica_check = false; break;
        case EXERCISE: options.exercise = true; break;
        case BENCH:
            options.bench = optarg ? optarg : "all";
            if (options.bench != "all" && options.bench != "step" && options.bench != "allreduce")
                error("--bench=%s: unknown, there are all, step and allreduce", optarg);
            break;
        case HELP: printf("%s", usage); return false;
        case ':': error("%s wants a value: try --help", argv[optind - 1]);
        default: // a letter in optopt: -x
            if (optopt > 0 && optopt < GPUS) error("unknown option -%c: try --help", optopt);
            error("unknown option %s: try --help", argv[optind - 1]);
        }
    }
    if (optind < argc) error("unknown argument %s: try --help", argv[optind]);
    if (options.exercise && !options.allreduce_given) options.allreduce = "yours";
    if (options.exercise && !options.gpus_given) options.gpus = 8;
    options.model = model->name;
    options.batch_given = batch > 0;
    options.batch = batch ? batch : model->batch + options.gpus * model->batch_of_each;
    options.lr = lr > 0 ? lr : model->lr + options.gpus * model->lr_of_each;
    options.epochs = epochs ? epochs : model->epochs;
    if (options.model != "lenet") options.evaluate_all = true;
    if (options.model == "lab_cnn" && kvstore.empty() && !options.allreduce_given &&
        !options.exercise)
        kvstore = "local"; // as in the lab
    if (!kvstore.empty() && options.allreduce_given)
        error("--kvstore %s and --allreduce %s: one of them is enough", kvstore.c_str(),
              options.allreduce.c_str());
    if (!kvstore.empty()) options.allreduce = kvstore == "local" ? "host" : "by_tensor";
    if (!options.split.empty() && (int)options.split.size() != options.gpus)
        error("--split has %zu parts, but there are %d devices: use GPUS=%zu", options.split.size(),
              options.gpus, options.split.size());
    if (options.exercise && options.gpus > 16) // its numbers tell no more devices apart
        error("--exercise judges on 1 to 16 devices, not on %d", options.gpus);
    if (options.exercise) options.batch = std::max(options.batch, options.gpus);
    if (options.batch < options.gpus)
        error("batch %d cannot be split over %d devices: use BATCH >= %d", options.batch,
              options.gpus, options.gpus);
    return true;
}

int mgpu_main(int argc, char **argv) {
    setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
    try {
        if (!parse_options(argc, argv)) return 0;
        struct sigaction action = {};
        action.sa_handler = [](int) { interrupted = 1; };
        sigaction(SIGINT, &action, nullptr);
        sigaction(SIGTERM, &action, nullptr);
        const bool trains = options.bench.empty() && !options.exercise;
        if (trains) {
            train_set = load_data(options.data, "train");
            test_set = load_data(options.data, "t10k");
            check_writable(options.log);
            if (!options.save.empty()) check_writable(options.save + "/.npy");
        }
        int devices = options.gpus;
        if (!options.bench.empty() && options.bench != "step" && !options.gpus_given) devices = 4;
#ifdef CUDA_CPU // the stand-in shows as many devices as are wanted
        setenv("CUDA_CPU_DEVICES", std::to_string(devices).c_str(), 0);
#endif
        use_devices(devices, options.exercise);
        rng.seed(options.seed);
        init_model();
        if (!options.init.empty()) load_params(params, options.init);
        if (options.exercise)
            exercise();
        else if (!options.bench.empty())
            bench();
        else
            experiment();
        params.clear();
        for (int c = 0; c < devices && options.verbose; c++)
            printf("%s: %.1f MB of device memory at most\n", str(gpu(c)).c_str(),
                   state(gpu(c)).most_bytes / 1e6);
    } catch (const Error &e) {
        fflush(stdout);
        fprintf(stderr, "mgpu: %s\n", e.what());
        _exit(1); // what is queued on the devices is dropped
    }
    return 0;
}

#ifndef MGPU_NO_MAIN // tests.cu has a main of its own
int main(int argc, char **argv) { return mgpu_main(argc, argv); }
#endif
