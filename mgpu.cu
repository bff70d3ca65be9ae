// Training on multiple GPUs, from scratch: a chapter of "Dive into Deep Learning" in one CUDA file.
//
//     make run GPUS=2      train LeNet on Fashion-MNIST on two devices
//     make test            check every kernel, and that k devices learn what one device learns
//
// It takes about an hour to read sections 2 to 6 beside the chapter. They have the titles, names,
// comments and order of its MXNet tab in edition 0.16. (Later editions reword some comments and
// have no "Experiment".) In section 7, the chapter's third exercise, you can write your own
// allreduce. In section 8, read relu and sgd, and the rest if you like kernels. In section 9, read
// what backward() does. Look things up in section 1. You can skip sections 10 to 13 until you need
// them: they are about memory, files, checks and options, not about learning.
//
//    1. The vocabulary                    8. Kernels and operators
//    2. A toy network                     9. Autograd
//    3. Data synchronization             10. Devices and memory
//    4. Distributing data                11. Data
//    5. Training                         12. Checks
//    6. Experiment                       13. Program
//    7. The exercise
//
// A device is what the chapter calls a GPU: it has its own memory and its own queues of work. If
// you ask for more devices than there are GPUs, several devices share a GPU. Without a GPU,
// extras/cpu/ turns this file into plain C++ and emulates the devices.
//
// Notation: k devices; N images with C channels, H rows and W columns; O output channels; windows
// of K x K pixels. (The number W counts columns; the tensor W is a weight.) Tensors are row-major,
// NCHW, and hold 32-bit floats. dX is the gradient of the loss with respect to X. F is
// torch.nn.functional. NAME=value, such as GPUS=2, is an option (section 13 or extras/).

#include <cuda_runtime.h>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>
#include <unistd.h>

// ---------------------------------------------------------------------------------------------
// 1. The vocabulary
// This section declares two types and most of the functions that sections 2 to 6 call. The
// functions are grouped by the section that defines them.

// The place where a tensor lives: a device, such as gpu(0), or the host, cpu(), which runs this
// program. (In comments, "device" never means the host, although the type is called Device.)
struct Device {
    int id; // the device's number, or -1 for the host
};
Device gpu(int i) { return {i}; }
Device cpu() { return {-1}; }
bool is_host(Device device) { return device.id < 0; }

// An array of floats. A Tensor is a handle, as in Python: assigning it copies no data, and even a
// const Tensor's data may be written. The memory is freed with the last handle, which is safe even
// if a device has yet to use it (section 10).
struct Tensor {
    Device device = cpu();
    std::vector<int> shape;
    std::shared_ptr<float> data = nullptr;  // its elements; null if it is empty or not needed yet
    std::shared_ptr<Tensor> grad = nullptr; // its gradient, or null if none is wanted
    float *ptr() const;                     // data.get(), the address of its elements
};
typedef std::vector<Tensor> Tensors;
typedef std::vector<Tensors> PerDevice; // x[c][i] is tensor i on device c

// 3. Data synchronization
Tensor copyto(const Tensor &src, Device device);   // return a copy of src in that place
void copyto(const Tensor &src, const Tensor &dst); // dst[:] = src: src comes first, as in MXNet

// 8. Operators. They enqueue work and return at once. On the right: the sizes of their inputs.
Tensor conv2d(const Tensor &X, const Tensor &W, const Tensor &b);   // (N,C,H,W) (O,C,K,K) (O)
Tensor relu(const Tensor &X);                                       // any shape
Tensor avg_pool2d(const Tensor &X, int kernel_size, int stride);    // (N,C,H,W)
Tensor linear(const Tensor &X, const Tensor &W, const Tensor &b);   // (N,C) (C,O) (O): X @ W + b
Tensor softmax_cross_entropy(const Tensor &y_hat, const Tensor &y); // (N,classes) (N) -> (N)
void sgd(const Tensors &params, float lr, int batch_size); // param -= lr * grad / batch_size
void add_(const Tensor &a, const Tensor &b);               // a[:] += b, as PyTorch's add_

// 9. Autograd
void attach_grad(Tensors &params);                   // give each parameter a gradient of 0
void zero_grad(const PerDevice &device_params);      // set all gradients to 0
void backward(const Tensor &l);                      // add the gradients of sum(l) to the .grads
const Tensor &gradient(const Tensor &param);         // param.grad, or an error if there is none
PerDevice gradients(const PerDevice &device_params); // the gradients of all parameters

// 10. Devices and memory
[[noreturn]] void error(const char *format, ...); // throw a message, formatted as by printf
Device try_gpu(int i);     // gpu(i), or an error if there is none (d2l's returns cpu() instead)
void waitall();            // make the host wait for all devices
int size(const Tensor &t); // the number of its elements
std::vector<float> to_host(const Tensor &t);         // its numbers, for which the host waits
Tensor empty(std::vector<int> shape, Device device); // uninitialized memory
Tensor full(std::vector<int> shape, float value, Device device);
Tensor normal(float scale, std::vector<int> shape);      // N(0, scale^2), on the host
Tensor arange(int n);                                    // 0, 1, ..., n-1, on the host
Tensor reshape(const Tensor &X, std::vector<int> shape); // shares X's memory and gradient
Tensor rows(const Tensor &X, int begin, int end);        // X[begin:end], shares X's memory

// ---------------------------------------------------------------------------------------------
// 2. A toy network                                                     chapter: "A Toy Network"

Tensors params;                       // on the host
std::vector<std::string> param_names; // for error messages

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
Tensor lenet(const Tensor &X, const Tensors &params) {
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

// ---------------------------------------------------------------------------------------------
// 3. Data synchronization                                      chapter: "Data Synchronization"
// We need two operations: one copies the parameters to a device, and the other sums the gradients
// over all devices. Both send messages, which are copies from one memory to another.

// Copy the parameters to a device and attach gradients to the copies.
Tensors get_params(const Tensors &params, Device device) {
    Tensors new_params;
    for (const Tensor &p : params) {
        new_params.push_back(copyto(p, device));
    }
    attach_grad(new_params); // in one call, so that the gradients lie side by side (section 7)
    return new_params;
}

// Sum data[0], data[1], ... elementwise and write the sum to each of them. data[i] is on device i.
// Device 0 receives the other tensors, adds them, and sends the sum back. Section 6 has an example.
void allreduce(Tensors data) {
    for (size_t i = 1; i < data.size(); i++) {
        add_(data[0], copyto(data[i], data[0].device)); // data[0][:] += data[i]
    }
    for (size_t i = 1; i < data.size(); i++) {
        copyto(data[0], data[i]); // data[i] = copyto(...) would not change the caller's tensor
    }
}

// --- The message itself, which the chapter leaves to its framework
// A stream is a queue of work for one device. The host enqueues work there and goes on. Work in one
// stream runs in order, but work in different streams may run at the same time. So work that uses
// what another stream writes, or overwrites what another stream uses, must wait for that stream.

struct Stream {
    cudaStream_t handle = nullptr;
    cudaEvent_t ready = nullptr; // an event, which is a marker in this stream: see make_wait
};
Stream &current_stream(Device device); // the stream for a device's work
cudaStream_t stream_of(Device device); // its handle; calls cudaSetDevice(), which a launch needs
int cuda_device(Device device);        // CUDA's number for its GPU, which devices may share

// Check a CUDA call. If it failed, the program ends and says where and why. (#call is its text.)
#define CUDA_CHECK(call) check_cuda((call), #call, __FILE__, __LINE__)
void check_cuda(cudaError_t code, const char *call, const char *file, int line);

// Make later work on `waiting` wait for all earlier work on `other`. The host does not wait.
//
//   other       ... work ... [record ready] ... more work ...
//                                  |
//                                  v
//   waiting     ... work ...  [wait for it] ... later work ...
//
// Recording the event again does not change earlier waits, so one event per stream is enough.
void make_wait(const Stream &waiting, const Stream &other) {
    CUDA_CHECK(cudaEventRecord(other.ready, other.handle));
    CUDA_CHECK(cudaStreamWaitEvent(waiting.handle, other.ready, 0));
}

void make_wait(Device waiting, Device other) {
    make_wait(current_stream(waiting), current_stream(other));
}

// Enqueue dst[:] = src, from one device to another, on a stream of dst's device.
void enqueue_message(const Tensor &src, const Tensor &dst, const Stream &stream) {
    CUDA_CHECK(cudaMemcpyPeerAsync(dst.ptr(), cuda_device(dst.device), src.ptr(),
                                   cuda_device(src.device), sizeof(float) * size(src),
                                   stream.handle));
}

// Set dst[:] = src. They have the same size. If dst is on the host, the host waits for the copy. If
// src is on the host, it must not change before the device has copied it: waitall() waits for that.
void copyto(const Tensor &src, const Tensor &dst) {
    if (size(src) != size(dst)) error("%d numbers do not fit a tensor of %d", size(src), size(dst));
    const float *x = src.ptr();
    float *y = dst.ptr();
    const size_t bytes = sizeof(float) * size(src);
    if (bytes == 0) return;

    if (!is_host(src.device) && !is_host(dst.device) && src.device.id != dst.device.id) {
        // The copy runs on dst's stream. Before it reads src, src's stream must have written it.
        make_wait(dst.device, src.device);
        enqueue_message(src, dst, current_stream(dst.device));
        // Before src's stream overwrites src, the copy must have read it.
        make_wait(src.device, dst.device);
    } else if (is_host(src.device) && is_host(dst.device)) {
        memcpy(y, x, bytes);
    } else { // within a device, or between it and the host: CUDA can tell which from the addresses
        const cudaStream_t stream = stream_of(is_host(dst.device) ? src.device : dst.device);
        CUDA_CHECK(cudaMemcpyAsync(y, x, bytes, cudaMemcpyDefault, stream));
        if (is_host(dst.device)) CUDA_CHECK(cudaStreamSynchronize(stream));
    }
}

Tensor copyto(const Tensor &src, Device device) {
    Tensor dst = empty(src.shape, device);
    copyto(src, dst);
    return dst;
}

// ---------------------------------------------------------------------------------------------
// 4. Distributing data                                            chapter: "Distributing Data"

// Split X along its first axis into one contiguous shard per device, and copy each shard there. The
// chapter calls Gluon's function, which refuses to divide 256 samples among 3 devices. This one
// gives them 86, 85 and 85. If there are fewer samples than devices, the last shards are empty.
Tensors split_and_load(const Tensor &X, const std::vector<Device> &devices) {
    const int n = X.shape[0], k = devices.size();
    Tensors shards;
    int begin = 0;
    for (int c = 0; c < k; c++) {
        const int end = begin + n / k + (c < n % k ? 1 : 0); // the first n % k get one more
        shards.push_back(copyto(rows(X, begin, end), devices[c]));
        begin = end;
    }
    return shards;
}

// Split `X` and `y` into multiple devices.
std::pair<Tensors, Tensors> split_batch(const Tensor &X, const Tensor &y,
                                        const std::vector<Device> &devices) {
    if (X.shape[0] != y.shape[0]) {
        error("split_batch: %d samples but %d labels", X.shape[0], y.shape[0]);
    }
    return {split_and_load(X, devices), split_and_load(y, devices)};
}

// ---------------------------------------------------------------------------------------------
// 5. Training                                                              chapter: "Training"
// Why do k devices take the step that one device would take? backward() differentiates sum(l), the
// sum of the samples' losses, so the gradient of a minibatch is the sum of its shards' gradients:
//
//     dW of the minibatch  =  dW of shard 0  +  dW of shard 1  +  ...  +  dW of shard k-1
//
// Each device computes one of these terms, allreduce() gives their sum to all of them, and each
// takes the step W -= lr * sum / batch_size with its own copy of W. The copies were equal before
// the step, so they are equal after it. batch_size counts the whole minibatch, not a shard.

// Return [x[c][i] for c in range(k)]: tensor i of each device.
Tensors across_devices(const PerDevice &x, size_t i) {
    Tensors tensors;
    for (const Tensors &list : x) tensors.push_back(list[i]);
    return tensors;
}

// Sum all gradients, one parameter after another. (In the chapter this loop is in train_batch.)
void allreduce_naive(const PerDevice &grads) {
    for (size_t i = 0; i < grads[0].size(); i++) {
        allreduce(across_devices(grads, i));
    }
}

// Sum all gradients with the algorithm that ALLREDUCE=name selects, by default allreduce_naive().
void sum_gradients(const PerDevice &grads);

// Take one step on a minibatch. Unlike the chapter's, this function returns the losses, one number
// per sample. It needs no autograd.record(), because operators record themselves. It needs
// zero_grad(), because backward() adds to the gradients, as in PyTorch. (MXNet replaces them.)
Tensors train_batch(const Tensor &X, const Tensor &y, const PerDevice &device_params,
                    const std::vector<Device> &devices, float lr) {
    auto [X_shards, y_shards] = split_batch(X, y, devices);
    zero_grad(device_params);
    // Loss is calculated separately on each GPU (the host only enqueues, so they run in parallel)
    Tensors losses;
    for (size_t c = 0; c < devices.size(); c++) {
        Tensor y_hat = lenet(X_shards[c], device_params[c]);
        losses.push_back(loss(y_hat, y_shards[c]));
    }
    // Back Propagation is performed separately on each GPU
    for (const Tensor &l : losses) {
        backward(l);
    }
    // Sum all gradients from each GPU and broadcast them to all GPUs
    sum_gradients(gradients(device_params));
    // The model parameters are updated separately on each GPU
    for (const Tensors &param : device_params) {
        sgd(param, lr, X.shape[0]); // Here, we use a full-size batch
    }
    return losses;
}

// Return [get_params(params, d) for d in devices], where params are those of section 2.
PerDevice replicate(const std::vector<Device> &devices) {
    PerDevice device_params;
    for (Device d : devices) {
        device_params.push_back(get_params(params, d));
    }
    return device_params;
}

// What train() needs from sections 10 to 13. (You can go on with train(), and look here later.)
std::vector<Device> first_devices(int k); // [try_gpu(i) for i in range(k)]
struct DataSet;
// Samples in minibatches: images X (N,1,28,28), with pixels from 0 to 1, and labels y (N)
struct DataIter {
    const DataSet *set;
    int batch_size;
    bool shuffle;
    std::vector<int> order; // the samples' numbers, in the order of this epoch
    Tensor X, y;            // the samples of this epoch, of which a minibatch is a view
    std::pair<Tensor, Tensor> minibatch(int begin); // the one that begins with order[begin]
    std::vector<std::pair<Tensor, Tensor>> epoch(); // all minibatches, reshuffled if `shuffle`
};
struct Timer { // a stopwatch
    std::vector<double> times; // seconds from each start() to its stop()
    double started = 0;
    void start() { started = now(); }
    void stop() { times.push_back(now() - started); }
    double avg() const { return std::accumulate(times.begin(), times.end(), 0.0) / times.size(); }
    static double now(); // in seconds
};
struct Animator { // in place of the chapter's plot: a progress bar, and a row for each epoch
    int samples;  // in an epoch
    std::vector<float> Y = {};                   // test accuracy after each epoch
    std::vector<double> loss = {}, seconds = {}; // mean loss and time of each epoch
    Tensors pending = {};                        // losses of this epoch's minibatches
    int done = 0;                                // samples in `pending`
    void add_losses(const Tensors &losses);
    void add(int epoch, float acc, double seconds); // replace the bar with a row
};
std::pair<DataIter, DataIter> load_data_fashion_mnist(int batch_size); // to train on, to test on
float evaluate_accuracy_gpu(const std::function<Tensor(const Tensor &)> &net, DataIter &test_iter,
                            Device device);
void check_first_minibatch(DataIter &train_iter, const std::vector<Device> &devices, float lr);
void check_replicas(const PerDevice &device_params);
double option(const std::string &name);              // the value of an option, such as EPOCHS
std::string str(const std::vector<Device> &devices); // [gpu(0), gpu(1)]
std::function<void(const Animator &, const Tensors &params)> after_epoch; // SAVE=file sets it

// Train on num_gpus devices. Unlike the chapter's, this function checks the first minibatch, checks
// that the devices' copies of the parameters (the replicas) stay equal, and prints a table of
// losses and times. To give each of two devices as much work as one had, use BATCH=512. Which LR is
// best then? (The chapter's first two exercises ask for this.)
void train(int num_gpus, int batch_size, float lr) {
    auto [train_iter, test_iter] = load_data_fashion_mnist(batch_size);
    const std::vector<Device> devices = first_devices(num_gpus);
    // Copy model parameters to num_gpus GPUs
    PerDevice device_params = replicate(devices);
    const int num_epochs = option("EPOCHS");     // 10, as in the chapter, unless you say otherwise
    Animator animator = {train_iter.X.shape[0]}; // the samples in an epoch
    Timer timer;
    check_first_minibatch(train_iter, devices, lr); // on copies of the parameters
    for (int epoch = 0; epoch < num_epochs; epoch++) {
        timer.start();
        for (auto [X, y] : train_iter.epoch()) {
            // Perform multi-GPU training for a single minibatch
            auto losses = train_batch(X, y, device_params, devices, lr);
            waitall(); // so that the host does not run ahead by a whole epoch
            animator.add_losses(losses);
        }
        timer.stop();
        check_replicas(device_params);
        // Verify the model on GPU 0
        auto model = [&](const Tensor &x) { return lenet(x, device_params[0]); };
        const float acc = evaluate_accuracy_gpu(model, test_iter, devices[0]);
        animator.add(epoch + 1, acc, timer.times.back());
        if (after_epoch) after_epoch(animator, device_params[0]);
    }
    printf("test acc: %.2f, %.1f sec/epoch on %s\n", animator.Y.back(), timer.avg(),
           str(devices).c_str());
}

// ---------------------------------------------------------------------------------------------
// 6. Experiment                                                          chapter: "Experiment"
// The experiments are train(1, 256, 0.2) and train(2, 256, 0.2): make run GPUS=1, make run GPUS=2.
// Do not expect two devices to be faster: two that share a GPU or a CPU have half of it each, and
// even with two GPUs the chapter sees no speedup, because LeNet is too small. Expect about the same
// losses, since only the order of additions differs. (The chapter's two accuracies differ more,
// because it shuffles differently in each run.)
//
// All weights start close to 0, so y_hat is close to 0, each class has a probability of about 1/10,
// and the loss is -ln(1/10) = 2.3026. The gradient of a weight has the other layers' weights as
// factors. These are close to 0, too, so the first epoch hardly changes anything.
//
// Before it trains, the program prints the chapter's examples for sections 3 and 4.

std::string to_string(const Tensor &t); // its numbers, as the chapter prints them

// Print each tensor on lines of its own, below a title.
void print(const char *title, const Tensors &tensors) {
    printf("%s:\n", title);
    for (const Tensor &t : tensors) {
        printf(" %s\n", to_string(t).c_str());
    }
}

// Run the examples on num_gpus devices, or on two if it is 1. They print numbers that are copied
// back from the devices, so a mistake in copyto() or allreduce() shows here first.
void demos(int num_gpus) {
    Tensors new_params = get_params(params, try_gpu(0));
    printf("b1 weight: %s\n", to_string(new_params[1]).c_str());
    printf("b1 grad: %s\n", to_string(gradient(new_params[1])).c_str());

    const std::vector<Device> devices = first_devices(std::max(2, num_gpus));
    Tensors data;
    for (Device d : devices) {
        data.push_back(full({1, 2}, d.id + 1, d)); // np.ones((1, 2), ctx=d2l.try_gpu(i)) * (i + 1)
    }
    print("before allreduce", data);
    allreduce(data);
    print("after allreduce", data);

    Tensor matrix = reshape(arange(20), {4, 5}); // called data in the chapter
    Tensors split = split_and_load(matrix, devices);
    print("input ", {matrix});
    printf("load into %s\n", str(devices).c_str());
    print("output", split);
}

// ---------------------------------------------------------------------------------------------
// 7. The exercise                                             chapter: "Exercises", the third one
// The exercise asks for a more efficient allreduce: let different devices sum different parameters.
// This section says what an allreduce costs, gives you an example and the tools to write one, and
// has a place for yours. ALLREDUCE=name selects one. (Solutions are in extras/algorithms/.)
//
// Contract. grads[c][i] is on device c and has the same size on every device. The tensors of a
// device lie side by side in memory, as attach_grad() allocates them. An algorithm overwrites every
// grads[c][i] with the sum over all devices, bitwise identical on all of them, or their parameters
// would drift apart. It enqueues its work and returns; it should not make the host wait. Work that
// is enqueued later on a device sees the sums. The algorithm accepts any number of devices (unless
// its entry in the table `algorithms` below says otherwise), and tensors of any size, including 0.
//
// Cost. A message of m bytes takes about alpha + m * beta seconds: alpha is the latency, which even
// the shortest message pays, and 1 / beta is the bandwidth. Messages between different pairs of
// devices can travel at the same time. A device can send while it receives, at 1 / beta each way,
// however many messages share that. (We do not count additions, which are fast.) So for k devices,
// each with b bytes in P tensors, we count
//   messages   how many copies (or reads by kernels) go from one memory to another
//   busiest    how many bytes the busiest device receives
//   rounds     the length of the longest chain of messages in which each waits for the one before
// An allreduce takes about rounds * alpha + busiest * beta seconds. If the busiest device sends
// only after it has received, as gpu(0) does below, count busiest * beta twice.
//
// The chapter's allreduce is one long chain. For one parameter on three devices:
//
//   gpu(0)   [copy from 1] [add] [copy from 2] [add]
//   gpu(1)                                           [copy from 0]
//   gpu(2)                                                         [copy from 0]
//
// The first two copies run on gpu(0)'s stream, one after the other. The last two run on different
// streams. But the second make_wait() of copyto() makes gpu(0)'s stream wait until gpu(1) has its
// copy, and the message to gpu(2) waits for gpu(0)'s stream. Then the next parameter begins.
//
// LeNet has P = 8 tensors with b = 516,272 bytes. Four are biases of at most 512 bytes, which cost
// as much latency as the others. With alpha = 10 us and 25 GB/s, b * beta is 21 us, so we expect
//   naive      k = 2:   16 rounds, 160 us + 2 * 21 us = 0.20 ms     k = 8:   112 rounds, 1.41 ms
//   bucket     k = 2:    2 rounds,  20 us + 2 * 21 us = 0.06 ms     k = 8:    14 rounds, 0.43 ms
// `bucket`, whose code below is one line, sends all gradients as one long tensor, as PyTorch's
// DistributedDataParallel does with buckets of 25 MB. How few rounds and bytes do you need?

// --- Tools, besides copyto(), add_() and empty()

// Return one tensor per device: tensor c is a view of all tensors of grads[c], one after another.
Tensors flatten(const PerDevice &grads) {
    Tensors flat;
    for (const Tensors &tensors : grads) {
        Tensor all = tensors[0]; // begins where the first tensor begins, and grows below
        all.shape = {0};
        for (const Tensor &t : tensors) {
            const bool contiguous = size(t) == 0 || t.ptr() == all.ptr() + size(all);
            if (!contiguous) error("flatten: the tensors do not lie side by side in memory");
            all.shape[0] += size(t);
        }
        flat.push_back(all);
    }
    return flat;
}

// Divide a tensor into k chunks, whose sizes differ by at most one, and return a view of chunk j.
// For 10 numbers and k = 3 the chunks are [0:3], [3:6] and [6:10].
Tensor chunk(const Tensor &t, int j, int k) {
    if (j < 0 || j >= k) error("there is no chunk %d of %d", j, k);
    const long n = size(t); // (n * j may not fit an int)
    return rows(reshape(t, {(int)n}), n * j / k, n * (j + 1) / k);
}

// A copy dst[:] = src from one device to another
struct Message {
    Tensor src, dst;
};

// What send() needs from sections 10 and 12
Stream &link_stream(Device src, Device dst);               // for messages from src to dst
void check_messages(const std::vector<Message> &messages); // fail if they cannot go together

// You can also write kernels above your function, as section 8 explains (begin with add_kernel).
// LAUNCH(kernel<<<...>>>(...)) launches one and checks for errors. A kernel may read another
// device's memory if the program, when it starts, prints "peer" or "same GPU" for the two. Call
// make_wait(reader, other) before it and make_wait(other, reader) after it. Such a read counts as a
// message.
constexpr int threads = 256; // in a block
int blocks(long n);          // how many blocks give each of n elements a thread
#ifndef LAUNCH // extras/watch/ defines one that also writes down what it launches
#define LAUNCH(...) do { __VA_ARGS__; check_launch(__FILE__, __LINE__); } while (0)
#endif
void check_launch(const char *file, int line);

// Enqueue messages that may travel at the same time, each on the link_stream from src to dst. A
// message waits for everything that was enqueued on its devices before this call, and everything
// that is enqueued on them later waits for it. No message may write to memory that another one
// writes, or that any message of the same call reads.
void send(const std::vector<Message> &messages) {
    check_messages(messages);
    for (const auto &[src, dst] : messages) {
        if (size(src) == 0) continue;
        const Stream &link = link_stream(src.device, dst.device);
        make_wait(link, current_stream(src.device));
        make_wait(link, current_stream(dst.device));
        enqueue_message(src, dst, link);
    }
    // Not in the first loop: there, a device's second message would wait for its first.
    for (const auto &[src, dst] : messages) {
        if (size(src) == 0) continue;
        const Stream &link = link_stream(src.device, dst.device);
        make_wait(current_stream(src.device), link);
        make_wait(current_stream(dst.device), link);
    }
}

// --- bucket
// Sum all tensors on device 0 as if they were one.
//   messages 2(k-1)   busiest (k-1)b   rounds 2(k-1)   (naive: P times the messages and rounds)
void allreduce_bucket(const PerDevice &grads) { allreduce(flatten(grads)); }

// --- yours
// Write your own allreduce here. The contract is at the top of this section. As it stands, it does
// the same as `naive`. Tools:
//   copyto(src, dst)       one message; send({{src, dst}, ...}) sends several at the same time
//   add_(a, b)             a += b, both on one device
//   empty(shape, device)   memory for what arrives
//   flatten(grads)         one tensor per device; chunk(t, j, k) is chunk j of k of such a tensor
//   print("b1", {t, u})    print the numbers of t and u; the host waits for them
//
// Climb this ladder, and run `make exercise` after each rung. It says whether your allreduce is
// right on 1 to 8 devices, and what it costs.
//   1 line      Sum one long tensor instead of P short ones, as `bucket` does.
//   10 lines    Let different devices sum different tensors, as the chapter asks. Use send(), since
//               copyto() makes both devices wait for each message. (W3 has 79% of the bytes, so
//               one device still sums most of them.)
//   15 lines    Let device c sum chunk c of the one long tensor. Two calls of send() are enough.
//   20 lines    A ring: let device c send chunks only to device c + 1 (the last to 0). This takes
//               more rounds, but it is best where only neighbours have a fast connection.
void allreduce_yours(const PerDevice &grads) {
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

// The algorithms that ALLREDUCE=name can select. If yours needs k to be a power of two, or its
// kernels read other devices' memory, add is_power_of_two or peers_can_read to its line below.
struct Algorithm {
    const char *name;
    void (*run)(const PerDevice &grads);
    bool (*supports)(int k) = nullptr; // whether it works on k devices; null: on any number
};
bool is_power_of_two(int k) { return (k & (k - 1)) == 0; } // it has exactly one bit set
bool peers_can_read(int k); // whether the kernels of k devices can read each other's memory
std::vector<Algorithm> algorithms = {
    {"naive", allreduce_naive},
    {"bucket", allreduce_bucket},
    {"yours", allreduce_yours},
};

// --- Overlap
// The chapter remarks that the exchange of some gradients should begin while others are still being
// computed. Backward starts with the last layer, so W4's gradient can be sent before W1's is
// computed. This file does not do so, but OVERLAP=1 does (extras/algorithms/overlap.h), with
// any algorithm and a second stream for each device. So does PyTorch's DistributedDataParallel.

// ---------------------------------------------------------------------------------------------
// 8. Kernels and operators
// This section implements the operators, from ReLU to convolution. They are meant to be read, not
// to be fast. `make run` uses the faster ones of extras/fast/ for those that you have not edited,
// unless KERNELS=plain.
//
// A kernel, marked __global__, is a function that many threads of a device run at the same time.
// This launches one:
//
//     relu_kernel<<<blocks(n), threads, 0, stream>>>(y, X, n);
//
// The host enqueues it on the stream and goes on. When the kernel's turn comes, the device starts
// blocks(n) blocks of `threads` threads each. (The 0 is for dynamic shared memory, which we do not
// use.) Each thread finds out from its position which element it computes. With 3 blocks of 4
// threads:
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
//
// Each operator has its kernels first, and then the function that launches them. Unless its comment
// says otherwise, a kernel has one thread per element of its result.

// Return n / m, rounded up.
int ceil_div(long n, int m) { return (n + m - 1) / m; }

// Return how many blocks give each of n elements a thread. The result is at least one, because a
// launch of no blocks is an error, and an empty shard has no elements.
int blocks(long n) {
    if (n > INT_MAX) error("a launch of %ld threads is too large: use a smaller BATCH", n);
    return std::max(1, ceil_div(n, threads));
}

// Fail unless `valid` is true and all inputs are on one device. `expected` describes valid inputs.
void check_inputs(const char *op, bool valid, const char *expected, const Tensors &inputs);

// An operator's backward gets dy, the gradient of the loss with respect to its result y, and adds
// to the gradients of its inputs. (It must add, because several operators may use the same input.)
// It is a lambda with [=], which copies the handles of the tensors that it needs and so keeps their
// memory.
typedef std::function<void(const Tensor &dy)> GradFn;

// Return y, the result of an operator. If an input wants a gradient, put the operator on the tape,
// from which backward() takes it (section 9). op is its name.
Tensor add_to_tape(const char *op, Tensor y, const Tensors &inputs, const GradFn &grad_fn);

// Return the address of X's gradient, or null if X needs none. (Images need none.) The gradient of
// a result gets its memory, filled with 0, when this function is first called for it.
float *grad_ptr(const Tensor &X);

// --- relu
// y[i] = max(X[i], 0), and NaN stays NaN
//   X (n)   ->   y (n)
__global__ void relu_kernel(float *y, const float *X, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = X[i] < 0 ? 0 : X[i];
}

// dX[i] += dy[i] where X[i] > 0
//   dy (n)   X (n)   ->   dX (n)
__global__ void relu_backward_kernel(float *dX, const float *dy, const float *X, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) dX[i] += X[i] > 0 ? dy[i] : 0;
}

// Same as F.relu(X).
Tensor relu(const Tensor &X) {
    check_inputs("relu", true, "a tensor", {X}); // of any shape, but on a device
    const int n = size(X);
    const Tensor y = empty(X.shape, X.device);
    LAUNCH(relu_kernel<<<blocks(n), threads, 0, stream_of(X.device)>>>(y.ptr(), X.ptr(), n));
    return add_to_tape("relu", y, {X}, [=](const Tensor &dy) {
        float *dX = grad_ptr(X); // not null: X is the only input, so it wants a gradient
        LAUNCH(relu_backward_kernel<<<blocks(n), threads, 0, stream_of(X.device)>>>(dX, dy.ptr(),
                                                                                    X.ptr(), n));
    });
}

// --- in place, without gradients
__global__ void fill_kernel(float *a, float value, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) a[i] = value;
}

void fill(const Tensor &a, float value) {
    const int n = size(a);
    LAUNCH(fill_kernel<<<blocks(n), threads, 0, stream_of(a.device)>>>(a.ptr(), value, n));
}

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
__global__ void sgd_kernel(float *param, const float *grad, int n, float lr, float batch_size) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) param[i] -= lr * grad[i] / batch_size;
}

void sgd(const Tensors &params, float lr, int batch_size) {
    for (const Tensor &p : params) {
        check_inputs("sgd", true, "parameters", {params[0], p}); // all on one device
        const int n = size(p);
        LAUNCH(sgd_kernel<<<blocks(n), threads, 0, stream_of(p.device)>>>(
            p.ptr(), gradient(p).ptr(), n, lr, batch_size));
    }
}

// --- softmax cross-entropy
// p[n,j] = exp(y_hat[n,j]) / sum over m of exp(y_hat[n,m]), which is the softmax of row n
// l[n] = -log(p[n,y[n]])
//   y_hat (N,classes)   y (N), the labels   ->   l (N)   p (N,classes)
// One thread per sample. It first subtracts the largest number of the row. That changes nothing in
// p, and exp() cannot overflow.
__global__ void cross_entropy_kernel(float *l, float *p, const float *y_hat, const float *y, int N,
                                     int classes) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) return;
    const float *z = y_hat + n * classes; // the row of sample n
    float largest = z[0], sum = 0;
    for (int j = 1; j < classes; j++) largest = z[j] > largest ? z[j] : largest;
    for (int j = 0; j < classes; j++) sum += expf(z[j] - largest);
    for (int j = 0; j < classes; j++) p[n * classes + j] = expf(z[j] - largest) / sum;
    l[n] = logf(sum) - (z[(int)y[n]] - largest);
}

// dy_hat[n,j] += dl[n] * (p[n,j] - (1 if j == y[n] else 0))
//   dl (N)   p (N,classes)   y (N)   ->   dy_hat (N,classes)
__global__ void cross_entropy_backward_kernel(float *dy_hat, const float *dl, const float *p,
                                              const float *y, int N, int classes) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    const int j = index % classes, n = index / classes;
    if (n < N) dy_hat[index] += dl[n] * (p[index] - (j == (int)y[n] ? 1.0f : 0.0f));
}

// Same as F.cross_entropy(y_hat, y, reduction='none'). y gets no gradient.
Tensor softmax_cross_entropy(const Tensor &y_hat, const Tensor &y) {
    const bool valid = y_hat.shape.size() == 2 && y.shape == std::vector<int>{y_hat.shape[0]} &&
                       y_hat.shape[1] > 0;
    check_inputs("softmax_cross_entropy", valid, "(N,classes), (N)", {y_hat, y});
    const int N = y_hat.shape[0], classes = y_hat.shape[1];
    const Device device = y_hat.device;
    const Tensor l = empty({N}, device), p = empty({N, classes}, device); // p is for backward
    LAUNCH(cross_entropy_kernel<<<blocks(N), threads, 0, stream_of(device)>>>(
        l.ptr(), p.ptr(), y_hat.ptr(), y.ptr(), N, classes));
    return add_to_tape("softmax_cross_entropy", l, {y_hat}, [=](const Tensor &dl) {
        float *dy_hat = grad_ptr(y_hat);
        LAUNCH(cross_entropy_backward_kernel<<<blocks(size(p)), threads, 0, stream_of(device)>>>(
            dy_hat, dl.ptr(), p.ptr(), y.ptr(), N, classes));
    });
}

// --- average pooling
// A plane is one channel of one image. The N*C planes are pooled independently.
struct PoolShape {
    int planes, H, W, OH, OW, K; // OH = H / K and OW = W / K, rounded down
};

// y[p,i,j] = mean over u,v of X[p,i*K+u,j*K+v]
//   X (planes,H,W)   ->   y (planes,OH,OW)
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
// Rows and columns that do not fill a window get no gradient.
__global__ void avg_pool2d_backward_kernel(float *dX, const float *dy, PoolShape s) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    const int w = index % s.W, h = index / s.W % s.H, p = index / s.W / s.H;
    const int j = w / s.K, i = h / s.K;
    if (p < s.planes && i < s.OH && j < s.OW) {
        dX[index] += dy[(p * s.OH + i) * s.OW + j] / (s.K * s.K);
    }
}

// Return the sizes of a pooling of X, or fail.
PoolShape pool_shape(const char *op, const Tensor &X, int kernel_size, int stride) {
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
        float *dX = grad_ptr(X);
        LAUNCH(avg_pool2d_backward_kernel<<<blocks(size(X)), threads, 0, stream_of(device)>>>(
            dX, dy.ptr(), s));
    });
}

// --- matrix product
// A batch of `count` matrices of `rows` x `columns` numbers, one after another in memory. Each is
// row-major, or column-major if `transposed`.
struct Matrix {
    float *data;
    int count, rows, columns;
    bool transposed = false;
};

// Swap rows and columns, without moving data.
Matrix transpose(Matrix m) {
    std::swap(m.rows, m.columns);
    m.transposed = !m.transposed;
    return m;
}

// To compute a tile of C += A @ B, the threads of a block copy a tile of A and a tile of B into
// shared memory, multiply those, and go on to the next two tiles. So each number that is loaded
// from the device's memory is used in 32 products instead of one.
constexpr int tile = 32; // rows and columns of a tile
// (Each row has one number more than needed. Shared memory has 32 banks, and threads that use the
// same bank take turns. So the 32 numbers of a column should not lie in one bank.)
typedef float Tile[tile][tile + 1];

// Copy the tile of matrix n that begins at (row, column). Beyond the matrix there are zeros. Each
// thread copies a column (a row if the matrix is transposed), so that at any time neighbouring
// threads read neighbours in memory, which the device loads together.
__device__ void load_tile(Tile &to, const Matrix &m, int n, int row, int column) {
    const float *from = m.data + (m.count > 1 ? n * m.rows * m.columns : 0);
    const int i = threadIdx.x;
    for (int j = 0; j < tile; j++) {
        if (m.transposed) {
            const bool inside = row + i < m.rows && column + j < m.columns;
            to[i][j] = inside ? from[(column + j) * m.rows + row + i] : 0;
        } else {
            const bool inside = row + j < m.rows && column + i < m.columns;
            to[j][i] = inside ? from[(row + j) * m.columns + column + i] : 0;
        }
    }
}

// C[n] += A[n] @ B[n], where C is row-major. One block per tile of C, one thread per row of a tile.
//   A (count,rows,terms) or (1,rows,terms)   B (count,terms,columns) or (1,terms,columns)
//   ->   C (count,rows,columns)
// If there is only one A or only one B, all products use it. If C has fewer matrices than there are
// products, as in matmul_sum(), C[n] gets the sum of products n, n + C.count, n + 2 * C.count ...
__global__ void matmul_kernel(Matrix C, Matrix A, Matrix B) {
    __shared__ Tile A_tile, B_tile;
    const int row = blockIdx.y * tile, column = blockIdx.x * tile, i = threadIdx.x;
    float sum[tile] = {}; // of this thread's row of the tile
    for (int n = blockIdx.z; n < max(A.count, B.count); n += C.count) {
        for (int first = 0; first < A.columns; first += tile) {
            load_tile(A_tile, A, n, row, first);
            load_tile(B_tile, B, n, first, column);
            __syncthreads(); // or a thread could read what another one has not copied yet
            for (int t = 0; t < tile; t++) {
                for (int j = 0; j < tile; j++) sum[j] += A_tile[i][t] * B_tile[t][j];
            }
            __syncthreads(); // or a thread could overwrite what another one has not used yet
        }
    }
    float *to = C.data + (blockIdx.z * C.rows + row + i) * C.columns + column;
    for (int j = 0; j < tile; j++) {
        if (row + i < C.rows && column + j < C.columns) to[j] += sum[j];
    }
}

// Enqueue C += A @ B.
void matmul(Matrix C, Matrix A, Matrix B, Device device) {
    if (C.count == 0 || C.rows == 0) return; // an empty shard
    const dim3 grid(ceil_div(C.columns, tile), ceil_div(C.rows, tile), C.count);
    LAUNCH(matmul_kernel<<<grid, tile, 0, stream_of(device)>>>(C, A, B));
}

// sum[i] += parts[0][i] + ... + parts[count-1][i], in this order, so every run gives the same bits
//   parts (count,n)   ->   sum (n)
__global__ void sum_kernel(float *sum, const float *parts, int count, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float total = 0;
    for (int m = 0; m < count; m++) total += parts[m * n + i];
    sum[i] += total;
}

// Add the sum over m of A[m] @ B[m] to the matrix C. One block per tile of C would be too few to
// keep a GPU busy. So `count` blocks share the products of a tile (about 2048 blocks in all are
// enough), and a second kernel adds up their sums.
void matmul_sum(Matrix C, Matrix A, Matrix B, Device device) {
    const int n = C.rows * C.columns, tiles = ceil_div(C.rows, tile) * ceil_div(C.columns, tile);
    const int count = std::min(A.count, ceil_div(2048, tiles));
    const Tensor parts = full({count, n}, 0, device);
    matmul({parts.ptr(), count, C.rows, C.columns}, A, B, device);
    LAUNCH(sum_kernel<<<blocks(n), threads, 0, stream_of(device)>>>(C.data, parts.ptr(), count, n));
}

// --- bias
// The sizes of a layer's result (N,O,...): `pixels` is the product of the sizes after O.
struct Planes {
    int N, O, pixels;
};

Planes planes(const Tensor &y) {
    return {y.shape[0], y.shape[1], size(y) / std::max(1, y.shape[0] * y.shape[1])};
}

// y[n,o,p] = b[o]
//   b (O)   ->   y (N,O,pixels)
__global__ void bias_kernel(float *y, const float *b, Planes s) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < s.N * s.O * s.pixels) y[i] = b[i / s.pixels % s.O];
}

void bias(const Tensor &y, const Tensor &b) {
    LAUNCH(bias_kernel<<<blocks(size(y)), threads, 0, stream_of(y.device)>>>(y.ptr(), b.ptr(),
                                                                             planes(y)));
}

// sums[n,o] = sum over p of dy[n,o,p]
//   dy (N,O,pixels)   ->   sums (N,O)
__global__ void bias_sum_kernel(float *sums, const float *dy, Planes s) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= s.N * s.O) return;
    float sum = 0;
    for (int p = 0; p < s.pixels; p++) sum += dy[i * s.pixels + p];
    sums[i] = sum;
}

// db[o] += sum over n,p of dy[n,o,p], the sum over p first. (With one thread per channel for both
// sums, most of a GPU would idle.)
//   dy (N,O,pixels)   ->   db (O)
void bias_backward(const Tensor &b, const Tensor &dy) {
    float *db = grad_ptr(b);
    if (!db) return;
    const Planes s = planes(dy);
    const Tensor sums = empty({s.N, s.O}, b.device);
    const cudaStream_t stream = stream_of(b.device);
    LAUNCH(bias_sum_kernel<<<blocks(s.N * s.O), threads, 0, stream>>>(sums.ptr(), dy.ptr(), s));
    LAUNCH(sum_kernel<<<blocks(s.O), threads, 0, stream>>>(db, sums.ptr(), s.N, s.O));
}

// --- dense layer
void check_linear(const Tensor &X, const Tensor &W, const Tensor &b) {
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
        if (float *dW = grad_ptr(W)) { // dW += X^T @ dy
            matmul({dW, 1, C, O}, transpose({X.ptr(), 1, N, C}), {dy.ptr(), 1, N, O}, device);
        }
        if (float *dX = grad_ptr(X)) { // dX += dy @ W^T
            matmul({dX, 1, N, C}, {dy.ptr(), 1, N, O}, transpose({W.ptr(), 1, C, O}), device);
        }
    });
}

// --- convolution
// y[n,o,i,j] = b[o] + sum over c,u,v of X[n,c,i+u,j+v] * W[o,c,u,v]
//   X (N,C,H,W)   W (O,C,K,K)   b (O)   ->   y (N,O,OH,OW) with OH = H-K+1, OW = W-K+1
// im2col (image to columns) makes this a matrix product, y[n] = b + W @ columns[n]. The matrix
// columns[n] has a column p for each pixel (i,j) of y, which holds the window of X that gives
// y[n,:,i,j], and a row t for each term (c,u,v). So it is C*K*K (terms) x OH*OW (pixels).
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

void im2col(const Tensor &columns, const Tensor &X, ConvShape s) {
    const int n = s.N * s.C * s.OH * s.OW; // fits an int, because size(columns) does
    LAUNCH(im2col_kernel<<<blocks(n), threads, 0, stream_of(columns.device)>>>(columns.ptr(),
                                                                              X.ptr(), s));
}

// dX[n,c,h,w] += sum of dcolumns[n,t,p] over i,j,u,v with i+u = h and j+v = w
//   dcolumns (N,terms,pixels)   ->   dX (N,C,H,W)
__global__ void col2im_kernel(float *dX, const float *dcolumns, ConvShape s) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    const int w = index % s.W, h = index / s.W % s.H, plane = index / s.W / s.H; // n * C + c
    if (plane >= s.N * s.C) return;
    float sum = 0;
    // The windows (i,j) that contain (h,w): 0 <= i < OH and i <= h < i + K, and likewise for j
    for (int i = min(h, s.OH - 1); i >= 0 && h - i < s.K; i--) {
        for (int j = min(w, s.OW - 1); j >= 0 && w - j < s.K; j--) {
            const int u = h - i, v = w - j;
            sum += dcolumns[(((plane * s.K + u) * s.K + v) * s.OH + i) * s.OW + j];
        }
    }
    dX[index] += sum;
}

void col2im(float *dX, const Tensor &dcolumns, ConvShape s) {
    LAUNCH(col2im_kernel<<<blocks(s.N * s.C * s.H * s.W), threads, 0, stream_of(dcolumns.device)>>>(
        dX, dcolumns.ptr(), s));
}

// Return the sizes of a convolution, or fail.
ConvShape conv_shape(const Tensor &X, const Tensor &W, const Tensor &b) {
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
    const Tensor columns = empty({N, terms, pixels}, device); // kept for dW
    im2col(columns, X, s);
    bias(y, b); // y[n] = b, then y[n] += W @ columns[n]
    matmul({y.ptr(), N, O, pixels}, {W.ptr(), 1, O, terms}, {columns.ptr(), N, terms, pixels},
           device);
    return add_to_tape("conv2d", y, {X, W, b}, [=](const Tensor &dy) {
        bias_backward(b, dy);
        if (float *dW = grad_ptr(W)) { // dW += sum over n of dy[n] @ columns[n]^T
            matmul_sum({dW, 1, O, terms}, {dy.ptr(), N, O, pixels},
                       transpose({columns.ptr(), N, terms, pixels}), device);
        }
        if (float *dX = grad_ptr(X)) {
            // dcolumns[n] = W^T @ dy[n]
            const Tensor dcolumns = full({N, terms, pixels}, 0, device);
            matmul({dcolumns.ptr(), N, terms, pixels}, transpose({W.ptr(), 1, O, terms}),
                   {dy.ptr(), N, O, pixels}, device);
            col2im(dX, dcolumns, s);
        }
    });
}

// ---------------------------------------------------------------------------------------------
// 9. Autograd
// This section implements backward(l), the chapter's l.backward(). Every operator stores a function
// for its backward on a tape, one tape per device. backward() calls these functions in reverse
// order, so that each dy is complete before it is read.

// An operator that has run
struct TapeEntry {
    const char *op; // its name
    Tensors inputs;
    std::shared_ptr<Tensor> dy; // the gradient of its result, which gets its memory later
    GradFn grad_fn;
};
// The tape of each device, by Device::id. The map is never deleted: a plain global would be
// destroyed after CUDA has shut down, and could not free its tensors then.
auto &tapes = *new std::map<int, std::vector<TapeEntry>>;
bool recording = true;

struct NoGrad { // while one exists, operators are not recorded, as under torch.no_grad()
    bool was_recording = recording;
    NoGrad() { recording = false; }
    ~NoGrad() { recording = was_recording; }
};

Tensor add_to_tape(const char *op, Tensor y, const Tensors &inputs, const GradFn &grad_fn) {
    auto wants_grad = [](const Tensor &X) { return X.grad != nullptr; };
    if (recording && std::any_of(inputs.begin(), inputs.end(), wants_grad)) {
        y.grad = std::make_shared<Tensor>(Tensor{y.device, y.shape}); // no memory yet
        tapes[y.device.id].push_back({op, inputs, y.grad, grad_fn});
    }
    return y;
}

float *grad_ptr(const Tensor &X) {
    if (!X.grad) return nullptr;
    Tensor &grad = *X.grad;
    if (!grad.data) grad.data = full(grad.shape, 0, grad.device).data;
    return grad.ptr();
}

// Run the tape of l's device in reverse and empty it. Each entry is destroyed after it has run,
// which releases the tensors whose handles it has copied.
void backward(const Tensor &l) {
    std::vector<TapeEntry> &tape = tapes[l.device.id];
    auto computed_l = [&](const TapeEntry &entry) { return entry.dy == l.grad; };
    if (!l.grad || std::none_of(tape.begin(), tape.end(), computed_l)) {
        error("backward: there is no record of how this tensor was computed (each backward pass "
              "erases the record of its device)");
    }
    l.grad->data = full(l.shape, 1, l.device).data; // the gradient of sum(l) with respect to l
    while (!tape.empty()) {
        const TapeEntry entry = std::move(tape.back());
        tape.pop_back();
        // If dy has no memory, l does not use this result (or the shard is empty).
        if (entry.dy->data) entry.grad_fn(*entry.dy);
    }
}

// The gradients are views of one allocation, one after another.
void attach_grad(Tensors &params) {
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
    for (const Tensors &params : device_params) {
        grads.emplace_back();
        for (const Tensor &p : params) grads.back().push_back(gradient(p));
    }
    return grads;
}

void zero_grad(const PerDevice &device_params) {
    for (const Tensor &all : flatten(gradients(device_params))) fill(all, 0);
}

// ---------------------------------------------------------------------------------------------
// 10. Devices and memory
// This section defines the k devices, their streams, an allocator, and what errors print.

// --- names and errors

std::string str(Device device) {
    return is_host(device) ? "cpu" : "gpu(" + std::to_string(device.id) + ")";
}

std::string str(const std::vector<Device> &devices) {
    std::string list;
    for (Device d : devices) list += (list.empty() ? "" : ", ") + str(d);
    return "[" + list + "]";
}

// Throw an error, which mgpu_main() prints before it ends the program. (A CUDA error ends it at
// once: see check_cuda().)
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
    const char *advice = "";
    if (code == cudaErrorMemoryAllocation) advice = ": use a smaller BATCH";
    if (code == cudaErrorIllegalAddress) {
        advice = ": a kernel went beyond its arrays, or uses the memory of a device that is not "
                 "its peer (\"staged\" in the first lines)";
    }
    fflush(stdout);
    fprintf(stderr, "mgpu: %s:%d: %s: %s%s\n", file, line, call, cudaGetErrorString(code), advice);
    _exit(1); // no destructors: their CUDA calls would fail, too
}

void check_launch(const char *file, int line) {
    check_cuda(cudaGetLastError(), "the kernel launch", file, line);
}

void check_inputs(const char *op, bool valid, const char *expected, const Tensors &inputs) {
    std::string shapes;
    for (const Tensor &X : inputs) {
        shapes += shapes.empty() ? "(" : ", (";
        for (int s : X.shape) shapes += std::to_string(s) + ",";
        shapes.back() = ')';
    }
    if (!valid) error("%s: expected %s, got %s", op, expected, shapes.c_str());
    for (const Tensor &X : inputs) {
        if (is_host(X.device)) error("%s: an input is on cpu, not on a device: use copyto", op);
        if (X.device.id != inputs[0].device.id) {
            error("%s: its inputs are on %s and %s, but must be on one device", op,
                  str(inputs[0].device).c_str(), str(X.device).c_str());
        }
    }
}

// --- devices

// The state of a device. Devices that share a GPU have their own memory and streams.
struct DeviceState {
    int cuda_device;             // CUDA's number for its GPU
    Stream stream;               // for its work (OVERLAP=1 has a second one)
    std::map<int, Stream> links; // for messages from other devices, by Device::id
    std::map<int, std::string> connections; // to other devices: what enable_peer() has returned
    std::map<std::pair<cudaStream_t, long>, std::vector<float *>> free_memory; // see allocate()
};
auto &device_states = *new std::vector<DeviceState>; // never destroyed, like `tapes`

// Return the state of a device, or fail if there is no such device.
DeviceState &state(Device device) {
    if (is_host(device)) error("a tensor is on the host, but must be on a device: use copyto");
    if (device.id >= (int)device_states.size()) {
        error("there is no %s: the program runs on %zu devices", str(device).c_str(),
              device_states.size());
    }
    return device_states[device.id];
}

int cuda_device(Device device) { return state(device).cuda_device; }

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

// (CUDA launches a kernel only on a stream of the GPU that cudaSetDevice has chosen.)
cudaStream_t stream_of(Device device) {
    CUDA_CHECK(cudaSetDevice(cuda_device(device)));
    return current_stream(device).handle;
}

Stream new_stream(Device device) {
    Stream s;
    CUDA_CHECK(cudaSetDevice(cuda_device(device)));
    // It does not wait for CUDA's default stream.
    CUDA_CHECK(cudaStreamCreateWithFlags(&s.handle, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreateWithFlags(&s.ready, cudaEventDisableTiming));
    return s;
}

// Every ordered pair of devices has a link stream of its own, created when it is first needed.
Stream &link_stream(Device src, Device dst) {
    Stream &s = state(dst).links[src.id];
    if (!s.handle) s = new_stream(dst);
    return s;
}

// (Link streams need no wait of their own: send() makes the devices' streams wait for them.)
void waitall() {
    for (size_t c = 0; c < device_states.size(); c++) {
        CUDA_CHECK(cudaStreamSynchronize(current_stream(gpu(c)).handle));
    }
}

// --- peers

// Let device i access the memory of device j directly, if the hardware allows it. Return how their
// data travels: within the "same GPU", directly ("peer"), or through the host ("staged").
const char *enable_peer(Device i, Device j) {
    int can_access = 0;
    if (cuda_device(i) == cuda_device(j)) return "same GPU";
    CUDA_CHECK(cudaDeviceCanAccessPeer(&can_access, cuda_device(i), cuda_device(j)));
    if (!can_access || !option("PEERS")) return "staged";
    CUDA_CHECK(cudaSetDevice(cuda_device(i)));
    const cudaError_t code = cudaDeviceEnablePeerAccess(cuda_device(j), 0);
    cudaGetLastError(); // clear the error: a GPU may have too many peers
    return code == cudaSuccess || code == cudaErrorPeerAccessAlreadyEnabled ? "peer" : "staged";
}

bool peers_can_read(int k) {
    for (int i = 0; i < k && i < (int)device_states.size(); i++) {
        for (const auto &[j, connection] : device_states[i].connections) {
            if (j < k && connection == "staged") return false;
        }
    }
    return true;
}

// Create gpu(0) ... gpu(k-1), round-robin over this machine's GPUs, and connect them. If
// `shown`, print what they are.
void use_devices(int k, bool shown) {
    int count = 0;
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); // hardware queues for the streams; default: 8
    const cudaError_t code = cudaGetDeviceCount(&count);
    if (code != cudaSuccess || count == 0) {
        error("no GPU (%s): `make run BACKEND=cpu` emulates devices", cudaGetErrorString(code));
    }
    for (int i = device_states.size(); i < k; i++) {
        device_states.emplace_back().cuda_device = i % count;
        device_states[i].stream = new_stream(gpu(i));
    }
    if (shown && k > count) {
        printf("notice: %d devices share %d GPU%s, each with its own memory and streams\n", k,
               count, count > 1 ? "s" : "");
    }
    for (int i = 0; i < k; i++) {
        cudaDeviceProp properties;
        CUDA_CHECK(cudaGetDeviceProperties(&properties, cuda_device(gpu(i))));
        std::string line = str(gpu(i)) + ": " + properties.name;
        for (int j = 0; j < k; j++) {
            if (j == i) continue;
            device_states[i].connections[j] = enable_peer(gpu(i), gpu(j));
            line += "; " + str(gpu(j)) + ": " + device_states[i].connections[j];
        }
        if (shown) printf("%s\n", line.c_str());
    }
}

// --- memory

// Return pinned memory of the host, from which a device can copy while the host goes on. So it may
// be freed only when no device is still copying.
std::shared_ptr<float> allocate_on_host(long n) {
    float *memory = nullptr;
    CUDA_CHECK(cudaMallocHost((void **)&memory, sizeof(float) * n));
    return std::shared_ptr<float>(memory, [](float *p) {
        for (const DeviceState &s : device_states) cudaStreamSynchronize(s.stream.handle);
        cudaFreeHost(p);
    });
}

// Return memory for n floats. cudaMalloc() and cudaFree() can make the host wait, so a device's
// memory that is freed goes into a list for its stream and size, from which the next tensor of this
// size takes it. Work of its previous owner may still be in the queue then. This is safe: the new
// owner's work is enqueued later on the same stream, and copyto() and send() make this stream wait
// for every other stream that uses the memory. (When its last handle goes, a shared_ptr calls the
// lambda below.)
std::shared_ptr<float> allocate(long n, Device device) {
    if (n == 0) return nullptr;
    if (is_host(device)) return allocate_on_host(n);
    std::vector<float *> &kept = state(device).free_memory[{current_stream(device).handle, n}];
    float *memory = nullptr;
    if (kept.empty()) {
        CUDA_CHECK(cudaSetDevice(cuda_device(device)));
        CUDA_CHECK(cudaMalloc((void **)&memory, sizeof(float) * n));
    } else {
        memory = kept.back();
        kept.pop_back();
    }
    return std::shared_ptr<float>(memory, [&kept](float *p) { kept.push_back(p); });
}

// --- tensors

float *Tensor::ptr() const { return data.get(); }

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
    if (is_host(device)) {
        std::fill_n(t.ptr(), size(t), value);
    } else {
        fill(t, value);
    }
    return t;
}

std::mt19937 rng; // seeded with SEED

Tensor normal(float scale, std::vector<int> shape) {
    Tensor t = empty(std::move(shape), cpu());
    std::normal_distribution<float> distribution(0, scale);
    for (int i = 0; i < size(t); i++) t.ptr()[i] = distribution(rng);
    return t;
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

// Return the numbers of all tensors, one after another.
std::vector<float> all_to_host(const Tensors &tensors) {
    std::vector<float> all;
    for (const Tensor &t : tensors) {
        const std::vector<float> numbers = to_host(t);
        all.insert(all.end(), numbers.begin(), numbers.end());
    }
    return all;
}

// One size may be -1: it is computed from the others. (A size of 0 counts as 1 here, so that an
// empty shard (0,50,4,4) becomes (0,800).)
Tensor reshape(const Tensor &X, std::vector<int> shape) {
    int all = 1, known = 1;
    for (int s : X.shape) all *= std::max(1, s);
    for (int s : shape) known *= std::max(1, s);
    std::replace(shape.begin(), shape.end(), -1, all / known);
    Tensor y = X; // with X's gradient, so that the tape needs no entry
    y.shape = shape;
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
    // This pointer keeps X's memory from being freed, as X does, but points into the middle of it.
    if (X.data) y.data = std::shared_ptr<float>(X.data, X.data.get() + begin * row);
    return y;
}

// ---------------------------------------------------------------------------------------------
// 11. Data
// What the chapter takes from d2l and NumPy: printing, the data set, accuracy, stopwatch and plot.

// Return a number as text, with at most 8 digits. A whole one (no point, no exponent, not nan) ends
// with a point, as in NumPy.
std::string to_string(float x) {
    char text[32];
    snprintf(text, sizeof text, "%.8g", x);
    return text + std::string(strpbrk(text, ".en") ? "" : ".");
}

// Return the numbers as text: each row, that is the numbers along the last axis, on its own line.
std::string to_string(const Tensor &t) {
    const std::vector<float> numbers = to_host(t);
    const size_t axes = t.shape.size();
    size_t width = 0; // of the longest number
    for (float x : numbers) width = std::max(width, to_string(x).size());
    std::string text(axes, '[');
    for (size_t i = 0; i < numbers.size(); i++) {
        const std::string number = to_string(numbers[i]);
        const bool begins_row = i > 0 && i % t.shape.back() == 0;
        if (begins_row) text += "]\n" + std::string(axes - 1, ' ') + "[";
        else if (i > 0) text += " ";
        text += std::string(width - number.size(), ' ') + number;
    }
    text += std::string(axes, ']');
    return text + (is_host(t.device) ? "" : " @" + str(t.device));
}

// --- the data set

// The training set or the test set as stored in its files: one byte per pixel, one per label.
struct DataSet {
    int count = 0;
    std::vector<unsigned char> images, labels;
};
DataSet train_set, test_set; // read by run_program()

// Read a file in the IDX format of http://yann.lecun.com/exdb/mnist, and return the bytes of all
// samples. Before them is a header of numbers of four bytes each: 0x801 and n for labels, or 0x803,
// n, 28 and 28 for images. (8 means uint8, and 1 or 3 is the number of dimensions.)
std::vector<unsigned char> load_idx(const std::string &path, bool images) {
    std::ifstream file(path, std::ios::binary | std::ios::ate);
    std::vector<unsigned char> bytes(std::clamp<long>(file.tellg(), 0, 1 << 28)); // -1: no file
    file.seekg(0);
    if (!file.read((char *)bytes.data(), bytes.size())) {
        error("cannot read %s: %s: `make data` with the same DATA downloads it, or says why not",
              path.c_str(), strerror(errno));
    }
    const size_t header = images ? 16 : 8, sample_bytes = images ? 28 * 28 : 1;
    auto number = [&](int at) { // of the header
        return bytes[at] << 24 | bytes[at + 1] << 16 | bytes[at + 2] << 8 | bytes[at + 3];
    };
    const bool valid = bytes.size() > header && number(0) == (images ? 0x803 : 0x801) &&
                       number(4) * sample_bytes == bytes.size() - header &&
                       (!images || (number(8) == 28 && number(12) == 28));
    if (!valid) {
        error("%s should be uint8 N%s in the IDX format, but its %zu bytes are something else",
              path.c_str(), images ? " x 28 x 28" : "", bytes.size());
    }
    return {bytes.begin() + header, bytes.end()};
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
    if (option("LIMIT") > 0) set.count = std::min<int>(set.count, option("LIMIT"));
    return set;
}

DataIter make_iter(const DataSet &set, int batch_size, bool shuffle) {
    const int n = set.count;
    std::vector<int> order(n);
    std::iota(order.begin(), order.end(), 0);
    return {&set, batch_size, shuffle, order, empty({n, 1, 28, 28}, cpu()), empty({n}, cpu())};
}

std::pair<DataIter, DataIter> load_data_fashion_mnist(int batch_size) {
    return {make_iter(train_set, batch_size, option("SHUFFLE")),
            make_iter(test_set, batch_size, false)};
}

// Convert a minibatch to floats. The last one of an epoch may be smaller.
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
        const int predicted = std::max_element(row, row + classes) - row;
        if (predicted == (int)labels[n]) correct++;
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

// Keep a minibatch's losses for add(). On a terminal, draw the bar when it gets longer:
//   [====================                    ] 30000/60000
void Animator::add_losses(const Tensors &losses) {
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

void print_row(int epoch, double loss, float acc, double seconds) {
    if (epoch == 1) printf("epoch      loss  test acc   seconds\n");
    printf("%5d  %8.4f  %8.4f  %8.2f\n", epoch, loss, acc, seconds);
}

void Animator::add(int epoch, float acc, double epoch_seconds) {
    double sum = 0;
    for (float x : all_to_host(pending)) sum += x;
    if (isatty(STDOUT_FILENO)) printf("\r\033[K"); // erase the bar
    if (!std::isfinite(sum)) {
        error("the loss is %f in epoch %d: use a smaller LR than %g", sum, epoch, option("LR"));
    }
    loss.push_back(sum / done);
    Y.push_back(acc);
    seconds.push_back(epoch_seconds);
    print_row(epoch, loss.back(), acc, epoch_seconds);
    pending.clear();
    done = 0;
}

// ---------------------------------------------------------------------------------------------
// 12. Checks
// check_first_minibatch() and check_replicas() check the promise of section 5: k devices compute
// the same gradient as one, and the copies of the parameters stay equal. If they fail, `make check`
// looks for the cause. check_messages() checks the messages of send().

// Return where number j of all_to_host(params) is, such as W1[7].
std::string name_of(int j) {
    size_t i = 0;
    while (j >= size(params[i])) {
        j -= size(params[i]);
        i++;
    }
    return param_names[i] + "[" + std::to_string(j) + "]";
}

std::map<std::string, std::string> typed; // the options on the command line

// Fail if number j of the first minibatch's gradient or update on gpu(c) is wrong, or is NaN.
void compare(const char *what, int j, int c, float got, float expected, float tolerance) {
    if (std::fabs(got - expected) <= tolerance) return;
    std::string words; // " GPUS=2 LR=0.1"
    for (const auto &[name, value] : typed) words += " " + name + "=" + value;
    error("the first minibatch: the %s of %s on gpu(%d) is %.9g, not %.9g: `make check%s` looks "
          "for the cause; if this is intended, use CHECKS=0",
          what, name_of(j).c_str(), c, got, expected, words.c_str());
}

// Take a trial step on the first samples of the file, with copies of the parameters. Compare the
// gradients with those that gpu(0) computes alone, one shard after another. (The whole minibatch at
// once would be rounded differently.) The shards' gradients x may be added in another order: each
// of the at most k - 1 additions is off by at most 2^-24 of the sum of |x|, so two such sums differ
// by less than 2 * k * 2^-24 = k * 1.2e-7 of it. Each device must have subtracted lr * grad / n.
void check_first_minibatch(DataIter &train_iter, const std::vector<Device> &devices, float lr) {
    if (!option("CHECKS")) return;
    const auto [X, y] = train_iter.minibatch(0);
    const int n = X.shape[0], k = devices.size();
    const std::vector<float> before = all_to_host(params);
    std::vector<float> expected(before.size()), magnitude(before.size()); // sums of x and of |x|
    int begin = 0;
    for (int c = 0; c < k; c++) {
        const int end = begin + n / k + (c < n % k ? 1 : 0); // as in split_and_load()
        const Tensors copy = get_params(params, gpu(0));
        const Tensor X_shard = copyto(rows(X, begin, end), gpu(0));
        backward(loss(lenet(X_shard, copy), copyto(rows(y, begin, end), gpu(0))));
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
            // A few roundings of the update and the parameter, or an underflow to 0, are allowed.
            const float rounding = 1e-5f * std::fabs(update) + 1e-6f * std::fabs(before[j]);
            compare("update", j, c, before[j] - after[j], update, rounding + 1e-37f);
        }
    }
    printf("first minibatch: %d device%s with one\n", k, k > 1 ? "s agree" : " agrees");
}

// Fail unless the parameters are bitwise identical on all devices.
void check_replicas(const PerDevice &device_params) {
    if (!option("CHECKS")) return;
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

// Fail if the two tensors of a message differ in size, or if a message writes to memory that any
// message reads or another one writes.
void check_messages(const std::vector<Message> &messages) {
    auto overlap = [](const Tensor &x, const Tensor &y) {
        const bool neither_is_empty = size(x) > 0 && size(y) > 0;
        return neither_is_empty && x.ptr() < y.ptr() + size(y) && y.ptr() < x.ptr() + size(x);
    };
    for (const Message &a : messages) {
        if (size(a.src) != size(a.dst)) {
            error("send: %d numbers do not fit a tensor of %d", size(a.src), size(a.dst));
        }
        for (const Message &b : messages) {
            const bool reads = overlap(a.dst, b.src), writes = &a != &b && overlap(a.dst, b.dst);
            if (!reads && !writes) continue;
            error("send: the message from gpu(%d) to gpu(%d) writes what the one from gpu(%d) to "
                  "gpu(%d) %s: send them in two calls",
                  a.src.device.id, a.dst.device.id, b.src.device.id, b.dst.device.id,
                  reads ? "reads" : "writes");
        }
    }
}

// ---------------------------------------------------------------------------------------------
// 13. Program
// Options have the form NAME=value, for make and for this program alike: mgpu GPUS=2 LR=0.1

struct Option {
    std::string name, kind, preset, help; // `preset` is its value if none is typed
    double least = 0, most = 1e9;         // of a number
};

// One line for each option, because `make help` prints them from here
std::vector<Option> option_table = {
    {"GPUS", "whole number", "1", "number of devices, which may share GPUs", 1, 64},
    {"BATCH", "whole number", "256", "samples per minibatch, over all devices", 1, 60000},
    {"LR", "number", "0.2", "learning rate", 1e-30, 1e30},
    {"EPOCHS", "whole number", "10", "passes over the training set", 1},
    {"ALLREDUCE", "text", "naive", "algorithm that sums the gradients, see section 7"},
    {"SEED", "whole number", "0", "seed of the parameters and of the shuffling"},
    {"SHUFFLE", "whole number", "1", "0: keep the samples in the order of the file", 0, 1},
    {"LIMIT", "whole number", "0", "use only the first LIMIT training and test samples, 0: all"},
    {"DATA", "text", "data", "folder with the four files of (Fashion-)MNIST"},
    {"CHECKS", "whole number", "1", "0: check neither the first minibatch nor the replicas", 0, 1},
    {"PEERS", "whole number", "1", "0: copies between GPUs go through the host", 0, 1},
};

// Return the option that a word names, such as GPUS or GPUS=2, or fail.
Option &find_option(const std::string &word) {
    std::string names;
    for (Option &o : option_table) {
        if (o.name == word.substr(0, word.find('='))) return o;
        names += " " + o.name;
    }
    error("%s is not an option: write NAME=value with one of%s", word.c_str(), names.c_str());
}

std::string option_text(const std::string &name) {
    const Option &o = find_option(name);
    return typed.count(name) ? typed[name] : o.preset;
}

double option(const std::string &name) { return std::stod(option_text(name)); }

// Set an option to a word of the command line, such as GPUS=2, or fail.
void set_option(const std::string &word) {
    const Option &o = find_option(word);
    const std::string value = word.substr(std::min(o.name.size() + 1, word.size()));
    if (value.empty()) error("%s has no value: write %s=value", o.name.c_str(), o.name.c_str());
    char *end;
    const double x = strtod(value.c_str(), &end);
    const bool fits = *end == 0 && x >= o.least && x <= o.most;
    const bool whole = x == std::floor(x);
    if (o.kind != "text" && !(fits && (whole || o.kind == "number"))) {
        error("%s: expected a %s from %g to %g", word.c_str(), o.kind.c_str(), o.least, o.most);
    }
    typed[o.name] = value;
}

// --- algorithms

const Algorithm &find_algorithm(const std::string &name) {
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
        error("ALLREDUCE=%s does not work on %d devices%s", algorithm.name, k,
              peers_can_read(k) ? "" : " (not all of which can read each other's memory)");
    }
    algorithm.run(grads);
}

void sum_gradients(const PerDevice &grads) { run_allreduce(option_text("ALLREDUCE"), grads); }

// --- main

// Read the command line. Return false if it asks for help, which is then printed.
bool parse_options(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const std::string word = argv[i];
        if (word == "help" || word == "--help") {
            printf("Options have the form NAME=value, such as GPUS=2 (defaults in parentheses):\n");
            for (const Option &o : option_table) {
                printf("  %-14s %s (%s)\n", o.name.c_str(), o.help.c_str(), o.preset.c_str());
            }
            return false;
        }
        set_option(word);
    }
    const int k = option("GPUS"), batch_size = option("BATCH");
    if (batch_size < k) {
        error("batch %d cannot be split over %d devices: use BATCH >= %d", batch_size, k, k);
    }
    find_algorithm(option_text("ALLREDUCE")); // fails if there is no such algorithm
    return true;
}

void run_program() {
    const int k = option("GPUS"), count = std::max(2, k); // the demos want two
    train_set = load_data(option_text("DATA"), "train");
    test_set = load_data(option_text("DATA"), "t10k");
    setenv("CUDA_CPU_DEVICES", std::to_string(count).c_str(), 0); // extras/cpu/ emulates this many
    use_devices(count, true);
    rng.seed(option("SEED"));
    init_params();
    demos(k);
    train(k, option("BATCH"), option("LR"));
    params.clear(); // before CUDA shuts down
}

// Read the options and run. Return 0, or print an error and exit with status 1.
int mgpu_main(int argc, char **argv) {
    setvbuf(stdout, nullptr, _IOLBF, BUFSIZ); // print line by line, even into a pipe
    try {
        if (parse_options(argc, argv)) run_program();
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

// A program that includes this file, as the tests do, defines MGPU_NO_MAIN first.
#ifndef MGPU_NO_MAIN
int main(int argc, char **argv) { return mgpu_main(argc, argv); }
#endif
