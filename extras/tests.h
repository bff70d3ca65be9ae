// What the programs of tests share: comparisons, data, trainings, runs of the program itself.
// Include mgpu.cu, or a program that includes it, before this file.
// defines: check_close, rounding, check_operator, Hold, check_says, REFUSED, TestFolder, printed,
// write_data, output_of, fails, parse, Kept, lively_params, minibatch, Training, check_exact_sums,
// tests_main
#pragma once

#include <array>
#include <atomic>
#include <filesystem>
#include <iterator>
#include <set>
#include <sstream>

#include <fcntl.h>
#include <sys/wait.h>
#include <termios.h>

#include "format.h"
#include "reference.h"
#include "run_tests.h"

// Under a sanitizer, up to 300 times slower, cases are smaller. Under ThreadSanitizer, or lane by
// lane under AddressSanitizer, a training would take longest; `make race` runs one anyway.
#if defined(CUDA_CPU_TSAN) || (defined(CUDA_CPU_ASAN) && defined(MGPU_LANES))
constexpr bool small_only = true, no_training = true;
#elif defined(CUDA_CPU_ASAN)
constexpr bool small_only = true, no_training = false;
#else
constexpr bool small_only = false, no_training = false;
#if defined(CUDA_CPU) && !defined(MGPU_LANES) && !defined(__clang__)
#pragma GCC optimize("O0") // the time goes to mgpu.cu: they run as fast, and compile in less time
#endif
#endif
// Under sanitizers, skip cases that train, and those that are slow.
const doctest::skip trains(no_training), slow(small_only);

constexpr int most_devices = 8; // the tests use gpu(0) ... gpu(7)

// ---------------------------------------------------------------------------------------------
// Numbers

typedef std::vector<float> Floats;
typedef std::vector<int> Ints;
typedef std::vector<Tensor> Tensors;

// Let doctest print the first numbers of a vector.
template <class T> struct doctest::StringMaker<std::vector<T>> {
    static String convert(const std::vector<T> &list) {
        String text = "{";
        for (size_t i = 0; i < list.size() && i < 20; i++) {
            text += (i ? ", " : "") + toString(list[i]);
        }
        return text + (list.size() > 20 ? ", ...}" : "}");
    }
};

// Check that max|got - want| <= rel * max|want|, which NaN fails. Print the worst element.
template <class T> void check_close(const Floats &got, const T &want, double rel) {
    REQUIRE(got.size() == want.size());
    double largest = 0, worst = -1;
    size_t at = 0;
    for (size_t i = 0; i < want.size(); i++) {
        const double difference = std::fabs(got[i] - (double)want[i]);
        largest = std::max(largest, std::fabs((double)want[i]));
        if (!(difference <= worst) && !std::isnan(worst)) {
            worst = difference;
            at = i;
        }
    }
    if (want.empty()) return;
    CAPTURE(at);
    CAPTURE(got[at]);
    CAPTURE(want[at]);
    CHECK(worst <= rel * largest);
}

// Return how much the rounding changes a sum of n floats, relative to its size: by about
// sqrt(n) * 2^-24, in whatever order they are added. Allow 16 times that, for the largest error of
// many sums, and for a sum that happens to be small.
inline double rounding(int n) { return 1e-6 * std::sqrt(std::max(n, 1)); }

// Return numbers from N(0, scale^2), the same ones for the same seed.
inline Floats random_floats(size_t n, unsigned seed, float scale = 1) {
    std::mt19937 random(seed);
    std::normal_distribution<float> distribution(0, scale);
    Floats numbers(n);
    for (float &x : numbers) x = distribution(random);
    return numbers;
}

inline Tensor on_host(const Floats &numbers, const Ints &shape) {
    const Tensor t = empty(shape, cpu());
    REQUIRE(size(t) == (int)numbers.size());
    std::copy(numbers.begin(), numbers.end(), t.ptr());
    return t;
}

inline Tensor on_device(const Floats &numbers, const Ints &shape, Device device = gpu(0)) {
    return copyto(on_host(numbers, shape), device);
}

inline Tensor random_tensor(const Ints &shape, unsigned seed, float scale = 1) {
    return on_host(random_floats(size({cpu(), shape}), seed, scale), shape);
}

inline Doubles doubles(const Floats &numbers) { return {numbers.begin(), numbers.end()}; }
inline Doubles doubles(const Tensor &t) { return doubles(to_host(t)); }

inline Floats grad(const Tensor &t) { return to_host(*t.grad); }

// Return a tensor with a gradient of 0.
inline Tensor with_grad(const Floats &numbers, const Ints &shape) {
    Tensor t = on_device(numbers, shape);
    t.grad = std::make_shared<Tensor>(full(shape, 0, t.device));
    return t;
}

// Call backward(), but with dys in place of ones as the gradients of ys.
inline void backward_from(const Tensors &ys, const std::vector<Floats> &dys) {
    const Tensor l = empty({1}, ys[0].device);
    backward(add_to_tape("backward_from", l, ys, [=](const Tensor &) {
        for (size_t i = 0; i < ys.size(); i++) {
            if (grad_ptr(ys[i])) add_(*ys[i].grad, on_device(dys[i], ys[i].grad->shape));
        }
    }));
}

// Check an operator on random inputs of these shapes: its result and its gradients. It is used
// twice, so that each gradient must be a sum. `rel` has the tolerance of the result, then that of
// each gradient.
inline void check_operator(const std::vector<Ints> &shapes,
                           const std::function<Tensor(const Tensors &in)> &op,
                           const std::function<Arrays(const Arrays &in, const Doubles &dy)> &want,
                           const Doubles &rel) {
    Tensors in;
    Arrays exact;
    for (const Ints &shape : shapes) {
        const Floats numbers = random_floats(size({cpu(), shape}), in.size() + 1);
        in.push_back(with_grad(numbers, shape));
        exact.push_back(doubles(numbers));
    }
    const Tensors ys = {op(in), op(in)};
    const std::vector<Floats> dys = {random_floats(size(ys[0]), 10),
                                     random_floats(size(ys[0]), 11)};
    backward_from(ys, dys);
    Doubles dy = doubles(dys[0]);
    for (size_t i = 0; i < dy.size(); i++) dy[i] += dys[1][i];
    const Arrays right = want(exact, dy);
    check_close(to_host(ys[0]), right[0], rel[0]);
    check_close(to_host(ys[1]), right[0], rel[0]);
    for (size_t i = 0; i < in.size(); i++) {
        INFO("the gradient of input ", i);
        CHECK(in[i].grad->shape == in[i].shape);
        check_close(grad(in[i]), right[i + 1], rel[i + 1]);
    }
}

// While one exists, its device stands still, until the host calls release(). It goes on by itself
// after some seconds, for a copy may go through the host, which then waits for the device.
struct Hold {
    Device device;
    std::atomic<bool> released{false};

    explicit Hold(Device d) : device(d) {
        auto wait = [](void *released) {
            for (int ms = 0; ms < 5000 && !*(std::atomic<bool> *)released; ms++) usleep(1000);
        };
        REQUIRE(cudaLaunchHostFunc(stream_of(device), wait, &released) == cudaSuccess);
    }
    Hold(const Hold &) = delete;
    void release() { released = true; }
    ~Hold() {
        release();
        cudaStreamSynchronize(stream_of(device));
    }
};

// ---------------------------------------------------------------------------------------------
// Texts and files

// Return a shape as messages have it, such as (2,3).
inline std::string in_parentheses(const Ints &shape) {
    std::string text;
    for (int s : shape) text += (text.empty() ? "" : ",") + std::to_string(s);
    return "(" + text + ")";
}

// Return the words of a line, which are divided by single spaces.
inline std::vector<std::string> words_of(const std::string &line) {
    std::vector<std::string> words;
    std::istringstream stream(line);
    for (std::string word; std::getline(stream, word, ' ');) words.push_back(word);
    return words;
}

inline std::vector<std::string> lines_of(const std::string &text) {
    std::vector<std::string> lines;
    std::istringstream stream(text);
    for (std::string line; std::getline(stream, line);) lines.push_back(line);
    return lines;
}

inline bool contains(const std::string &text, const std::string &part) {
    return text.find(part) != std::string::npos;
}

// Return the message of the error that `call` throws, or "" if it throws none.
inline std::string error_of(const std::function<void()> &call) {
    try {
        call();
    } catch (const std::exception &e) {
        return e.what();
    }
    return "";
}

// Check that a text has these parts, which " ... " divides, in this order.
inline void check_parts(const std::string &text, const std::string &parts) {
    INFO(text);
    size_t at = 0, begin = 0;
    while (begin <= parts.size()) {
        const size_t end = std::min(parts.find(" ... ", begin), parts.size());
        const std::string part = parts.substr(begin, end - begin);
        CAPTURE(part);
        const size_t found = std::min(text.find(part, std::min(at, text.size())), text.size());
        CHECK(text.substr(found, part.size()) == part);
        at = found + part.size();
        begin = end + 5;
    }
}

// Check a text line by line.
inline void check_lines(const std::string &text, const std::string &want) {
    const std::vector<std::string> lines = lines_of(text), want_lines = lines_of(want);
    INFO(text);
    for (size_t i = 0; i < std::min(lines.size(), want_lines.size()); i++) {
        CHECK(lines[i] == want_lines[i]);
    }
    CHECK(lines.size() == want_lines.size());
}

// Check that a text does not have this part.
inline void check_lacks(const std::string &text, const std::string &part) {
    INFO(text);
    CAPTURE(part);
    CHECK_FALSE(contains(text, part));
}

// Check that a message is one line with these parts.
inline void check_says(const std::string &text, const std::string &parts) {
    check_parts(text, parts);
    CHECK(lines_of(text).size() <= 1);
}

// Check that the call throws an error with such a message.
#define REFUSED(call, says) check_says(error_of([&] { call; }), says)

inline std::string read_text(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline void write_text(const std::string &path, const std::string &bytes) {
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    std::ofstream(path, std::ios::binary) << bytes;
    REQUIRE(read_text(path) == bytes);
}

inline std::string bytes_of(const Floats &numbers) {
    return {(const char *)numbers.data(), numbers.size() * sizeof(float)};
}

// A fresh folder, removed at the end with all that is in it.
struct TestFolder {
    std::string path = std::filesystem::temp_directory_path() / "mgpu_tests_XXXXXX";

    TestFolder() { REQUIRE(mkdtemp(&path[0]) != nullptr); }
    TestFolder(const TestFolder &) = delete;
    ~TestFolder() { std::filesystem::remove_all(path); }
    std::string file(const std::string &name) const { return path + "/" + name; }

    // Return the names of all files and folders in it.
    std::set<std::string> listing() const {
        std::set<std::string> names;
        for (const auto &entry : std::filesystem::recursive_directory_iterator(path)) {
            names.insert(entry.path().string().substr(path.size() + 1));
        }
        return names;
    }
};

inline bool on_terminal = false;

// Return whether a file is a terminal, in place of libc's function.
extern "C" int isatty(int file) noexcept {
    termios settings;
    return on_terminal || tcgetattr(file, &settings) == 0;
}

// Return what `call` prints, as to a terminal or else as to a file.
inline std::string printed(const std::function<void()> &call, bool terminal = false) {
    const TestFolder folder;
    fflush(stdout);
    const int before = dup(STDOUT_FILENO);
    const int file = open(folder.file("out").c_str(), O_WRONLY | O_CREAT, 0600);
    REQUIRE(dup2(file, STDOUT_FILENO) == STDOUT_FILENO);
    on_terminal = terminal;
    const std::string error = error_of(call);
    on_terminal = false;
    fflush(stdout);
    dup2(before, STDOUT_FILENO);
    close(before);
    close(file);
    CHECK(error == "");
    return read_text(folder.file("out"));
}

// ---------------------------------------------------------------------------------------------
// Data sets

// Return an IDX file of these bytes. The numbers of its head are big-endian.
inline std::string idx(const std::vector<uint32_t> &head, const std::string &bytes) {
    std::string text;
    for (uint32_t n : head) text += {char(n >> 24), char(n >> 16), char(n >> 8), char(n)};
    return text + bytes;
}

inline std::string random_bytes(size_t n, int below) {
    std::mt19937 random(n);
    std::string bytes;
    for (size_t i = 0; i < n; i++) bytes += char(random() % below);
    return bytes;
}

inline std::string idx_images(uint32_t n) {
    return idx({2051, n, 28, 28}, random_bytes(784 * n, 256));
}
inline std::string idx_labels(uint32_t n) { return idx({2049, n}, random_bytes(n, 10)); }

const std::string train_images = "/train-images-idx3-ubyte";
const std::string train_labels = "/train-labels-idx1-ubyte";

// Write a data set that is small enough to train on in a moment.
inline void write_data(const std::string &folder, int train, int test) {
    write_text(folder + train_images, idx_images(train));
    write_text(folder + train_labels, idx_labels(train));
    write_text(folder + "/t10k-images-idx3-ubyte", idx_images(test));
    write_text(folder + "/t10k-labels-idx1-ubyte", idx_labels(test));
}

// A folder with such a data set in data/.
struct DataFolder : TestFolder {
    DataFolder(int train, int test) { write_data(file("data"), train, test); }
};

// Return a set whose sample i has the label i, and pixels that tell i as well.
inline DataSet numbered_set(int count) {
    DataSet set;
    set.count = count;
    for (int i = 0; i < count; i++) set.labels.push_back(i);
    for (int p = 0; p < 784 * count; p++) set.images.push_back((p / 784 + p % 784) % 256);
    return set;
}

// ---------------------------------------------------------------------------------------------
// The program

struct Run {
    int status;
    std::string out, err;
};

// Run the program in the folder as `before PROGRAM after` in a shell, without the tests' devices.
inline Run run_in_shell(const TestFolder &folder, const std::string &before,
                        const std::string &after) {
    const std::string tests = std::filesystem::read_symlink("/proc/self/exe");
    const std::string command = "cd " + folder.path + " && exec 2> err > out; " +
                                "unset CUDA_CPU_DEVICES CUDA_CPU_CORES CUDA_CPU_MEMORY; " + before +
                                " \"" + tests + "\" --program " + after;
    const int status = system(command.c_str());
    const Run run = {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_text(folder.file("out")),
                     read_text(folder.file("err"))};
    std::filesystem::remove(folder.file("out"));
    std::filesystem::remove(folder.file("err"));
    return run;
}

// Return what a run prints that must succeed.
inline std::string output_of(const TestFolder &folder, const std::string &arguments,
                             const std::string &environment = "") {
    const Run run = run_in_shell(folder, environment, arguments);
    CAPTURE(arguments);
    CHECK(run.err == "");
    REQUIRE(run.status == 0);
    return run.out;
}

// Return what a run prints that must fail, and say why in one line on stderr.
inline std::string fails(const TestFolder &folder, const std::string &arguments,
                         const std::string &says, const std::string &environment = "") {
    const Run run = run_in_shell(folder, environment, arguments);
    CAPTURE(arguments);
    CHECK(run.status == 1);
    check_says(run.err, "mgpu: " + says);
    return run.out;
}

// Write the parameters after each epoch, for trained().
inline void write_params(const Animator &, const Tensors &params) {
    std::ofstream("params", std::ios::binary) << bytes_of(all_to_host(params));
}

// Let the program that --program starts call write_params(), besides what it calls anyway.
inline void add_write_params() {
    after_options.push_back([] {
        after_epoch = [usual = after_epoch](const Animator &animator, const Tensors &params) {
            if (usual) usual(animator, params);
            write_params(animator, params);
        };
    });
}

constexpr int few = small_only ? 8 : 16; // training images

// Train as the arguments say. Return the parameters after the last epoch.
inline Floats trained(const TestFolder &folder, const std::string &arguments,
                      const std::string &environment = "", const std::string &prints = "") {
    check_parts(output_of(folder, "GPUS=2 " + arguments, environment), prints);
    const std::string bytes = read_text(folder.file("params"));
    REQUIRE(bytes.size() > 0);
    std::filesystem::remove(folder.file("params"));
    const float *const numbers = (const float *)bytes.data();
    return {numbers, numbers + bytes.size() / sizeof(float)};
}

// Set the options of a command line, from the defaults on. Return the error, or "".
inline std::string parse(const std::string &line) {
    std::vector<std::string> words = words_of("mgpu " + line);
    std::vector<char *> argv;
    for (std::string &word : words) argv.push_back(&word[0]);
    argv.push_back(nullptr);
    typed.clear();
    exchange = plain_sum_gradients;
    return error_of([&] { parse_options(words.size(), argv.data()); });
}

// Return all that a test may change: the options, the network, the algorithms, the hooks.
inline auto settings() {
    return std::tie(typed, option_table, params, param_names, net, experiment, exchange, algorithms,
                    after_gradient, after_epoch, print_epoch);
}

template <class... T> std::tuple<T...> copy_of(const std::tuple<T &...> &values) { return values; }

// An object that puts the settings back at the end of its block.
struct Kept {
    decltype(copy_of(settings())) before = copy_of(settings());
    Kept() = default;
    Kept(const Kept &) = delete;
    ~Kept() { settings() = before; }
};

// Return whether there is such an algorithm: extras/algorithms/ may have been deleted.
inline bool has_algorithm(const std::string &name) {
    return std::any_of(algorithms.begin(), algorithms.end(),
                       [&](const Algorithm &a) { return a.name == name; });
}

// Return whether it works here, too: the GPUs of some machines have no peer access.
inline bool works_here(const std::string &name) {
    if (!has_algorithm(name)) return false;
    const Algorithm &algorithm = find_algorithm(name);
    return !algorithm.supports || algorithm.supports(2);
}

// ---------------------------------------------------------------------------------------------
// Trainings

// Return parameters for LeNet, on the host. With those of init_params() all logits are nearly 0, so
// much could be wrong unseen. Biases of +-1 keep the inputs of ReLUs away from 0.
inline Tensors lively_params() {
    const float scales[4] = {0.1f, 0.03f, 0.03f, 0.1f}; // of W1 W2 W3 W4
    const std::vector<Ints> shapes = {{20, 1, 3, 3}, {20},  {50, 20, 5, 5}, {50},
                                      {800, 128},    {128}, {128, 10},      {10}};
    Tensors lively;
    for (int i = 0; i < 8; i++) {
        Floats numbers = random_floats(size({cpu(), shapes[i]}), 10 + i, scales[i / 2]);
        for (float &x : numbers) {
            if (i % 2 == 1) x = std::copysign(1, x);
        }
        lively.push_back(on_host(numbers, shapes[i]));
    }
    return lively;
}

// Return n images and their labels. Each image is the pattern of its class, and noise.
inline std::pair<Tensor, Tensor> minibatch(int n, unsigned seed) {
    static const Floats patterns = random_floats(10 * 784, 1);
    Floats X = random_floats(n * 784, seed, 0.2f), y(n);
    for (int i = 0; i < n * 784; i++) {
        y[i / 784] = (7 * (i / 784) + seed) % 10;
        X[i] += patterns[y[i / 784] * 784 + i % 784];
    }
    return {on_host(X, {n, 1, 28, 28}), on_host(y, {n})};
}

// Select lively_params() for LeNet. Kept puts back what was there.
inline void use_lively_params() {
    init_params(); // for the names
    params = lively_params();
}

// A training on devices gpu(0) ... gpu(k-1), step by step.
struct Training {
    std::vector<Device> devices;
    PerDevice device_params;

    Training(int k, const Tensors &start) : devices(first_devices(k)) {
        for (Device d : devices) device_params.push_back(get_params(start, d));
    }
    // Take a step, and return the losses of all samples in their order.
    Floats step(const std::pair<Tensor, Tensor> &batch, float lr = 0.02f) {
        return all_to_host(train_batch(batch.first, batch.second, device_params, devices, lr));
    }
    // Return all parameters of device c, one after another, or all gradients.
    Floats params(int c) const { return all_to_host(device_params[c]); }
    Floats grads(int c) const { return all_to_host(gradients(device_params)[c]); }

    // Check that all devices have the parameters of the first, to the bit.
    void check_replicas_equal() const {
        for (size_t c = 1; c < devices.size(); c++) check_close(params(c), params(0), 0);
    }
};

// What a network computes on one device: losses and gradients
struct Computed {
    Floats losses, grads;
};

// Compute on gpu(0) what k devices compute with these parameters, one shard after another: all
// numbers are rounded alike, whatever the operators. The gradients are summed in the order in which
// naive and bucket sum them, so they have the same bits.
inline Computed computed_alone(int k, const Tensors &start,
                               const std::pair<Tensor, Tensor> &batch) {
    const int n = batch.first.shape[0];
    Computed all;
    int begin = 0;
    for (int c = 0; c < k; c++) {
        const int end = begin + n / k + (c < n % k ? 1 : 0);
        const Tensors copy = get_params(start, gpu(0));
        const Tensor X = copyto(rows(batch.first, begin, end), gpu(0));
        const Tensor l = loss(net(X, copy), copyto(rows(batch.second, begin, end), gpu(0)));
        const Floats losses = to_host(l);
        all.losses.insert(all.losses.end(), losses.begin(), losses.end());
        backward(l);
        const Floats part = all_to_host(gradients({copy})[0]);
        all.grads.resize(part.size());
        for (size_t j = 0; j < part.size(); j++) all.grads[j] += part[j];
        begin = end;
    }
    return all;
}

// Check the network `lenet`, with average or with max pooling, against the reference: outputs,
// losses and the gradients of all parameters.
inline void check_lenet(const std::function<Tensor(const Tensor &X, const Tensors &p)> &lenet,
                        bool max, int N) {
    const auto [X, y] = minibatch(N, 2);
    const Tensors start = lively_params(), p = get_params(start, gpu(0));
    const Tensor y_hat = lenet(copyto(X, gpu(0)), p), l = loss(y_hat, copyto(y, gpu(0)));
    backward(l);
    Arrays exact;
    for (const Tensor &t : start) exact.push_back(doubles(t));
    const Doubles want = reference::lenet(max, N, doubles(X), exact)[0];
    const Arrays want_l = reference::softmax_cross_entropy(10, {want, doubles(y)}, Doubles(N, 1));
    const Arrays all = reference::lenet(max, N, doubles(X), exact, want_l[1]);
    CHECK(y_hat.shape == Ints{N, 10});
    check_close(to_host(y_hat), want, 3e-6); // the longest sums have 800 terms: see rounding()
    check_close(to_host(l), want_l[0], 1e-5);
    for (int i = 0; i < 8; i++) {
        INFO("parameter ", i);
        check_close(grad(p[i]), all[i + 1], 1e-5);
    }
}

// Return n images whose classes a network can tell, though not at once: those of minibatch(), as
// bytes, with more noise.
inline DataSet learnable_set(int n, unsigned seed) {
    const auto [X, y] = minibatch(n, seed);
    const Floats noise = random_floats(n * 784, seed + 1000, 0.5f);
    DataSet set;
    set.count = n;
    for (int i = 0; i < n * 784; i++) {
        set.images.push_back(std::clamp(60 * (X.ptr()[i] + noise[i] - 1), 0.0f, 255.0f));
    }
    for (float label : to_host(y)) set.labels.push_back(label);
    return set;
}

// Return what check_first_minibatch says of k devices and n samples, or the error that it throws.
inline std::string first_minibatch(int k, int n, float lr = 0.2f) {
    const DataSet set = learnable_set(n, 3);
    DataIter iter = make_iter(set, n, true);
    std::string error;
    const std::string said = printed([&] {
        error = error_of([&] { check_first_minibatch(iter, first_devices(k), lr); });
    });
    return said + error;
}

// Return gradients of these sizes on k devices, side by side in memory or not.
inline PerDevice new_grads(int k, const Ints &sizes, bool contiguous = true) {
    PerDevice grads(k);
    for (int c = 0; c < k; c++) {
        Tensors params;
        for (int n : sizes) params.push_back(empty({1, n}, gpu(c)));
        if (contiguous) attach_grad(params);
        for (const Tensor &p : params) grads[c].push_back(contiguous ? *p.grad : p);
    }
    return grads;
}

// Check the sums of gradients of these sizes on k devices. Their numbers differ per device and per
// index. They are whole, and all sums are below 2^24, so they are exact in any order of addition.
inline void check_exact_sums(const std::string &name, int k, const Ints &sizes,
                             bool contiguous = true) {
    const PerDevice grads = new_grads(k, sizes, contiguous);
    Floats want(std::accumulate(sizes.begin(), sizes.end(), 0));
    for (int c = 0; c < k; c++) {
        const int first = 1000 * c * c;
        int n = 0;
        for (const Tensor &t : grads[c]) {
            copyto(rows(arange(first + n + size(t)), first + n, first + n + size(t)), t);
            n += size(t);
        }
        for (int i = 0; i < n; i++) want[i] += first + i;
    }
    run_allreduce(name, grads);
    for (int c = 0; c < k; c++) {
        INFO(name, ", k ", k, ", ", str(gpu(c)));
        CHECK(all_to_host(grads[c]) == want);
    }
}

// Check an algorithm for all sorts of k and of lengths. It takes tensors from `any_place`, or only
// contiguous ones.
inline void check_algorithm(const std::string &name, bool any_place) {
    const int many = small_only ? 1003 : 40009;
    for (int k = 1; k <= (small_only ? 4 : most_devices); k++) {
        for (const Ints &sizes : {Ints{0}, {1}, {k - 1}, {k + 1}, {many}, {0, 0}, {0, 5}}) {
            check_exact_sums(name, k, sizes);
        }
        const Ints sizes = {7, 0, 1, k, 100, 0, 33};
        check_exact_sums(name, k, sizes);
        if (any_place) {
            check_exact_sums(name, k, sizes, false);
        } else {
            REFUSED(run_allreduce(name, new_grads(k, sizes, false)),
                    "do not lie side by side in memory");
        }
    }
    if (small_only) return;
    use_devices(16, false); // they share the GPUs
    const Algorithm &algorithm = find_algorithm(name);
    for (int k : {9, 13, 16}) {
        if (!algorithm.supports || algorithm.supports(k)) check_exact_sums(name, k, {17, 3, 1000});
    }
}

// Check two sums of an algorithm, of two devices and then of three or the other way round, while a
// device is late. It stands still until the host has enqueued everything, unless the host `waits`.
inline void check_late_devices(const std::string &name, bool waits = false) {
    for (int late : {0, 1, 2}) {
        for (bool two_first : {true, false}) {
            INFO(name, ", late ", late, ", two first ", two_first);
            const Tensors data = {empty({3}, gpu(0)), empty({3}, gpu(1)), empty({3}, gpu(2))};
            Hold hold(gpu(late));
            if (waits) hold.release();
            for (int c = 0; c < 3; c++) fill(data[c], 1 << c); // every subset has its own sum
            const PerDevice two = {{data[0]}, {data[1]}}, three = {{data[0]}, {data[1]}, {data[2]}};
            run_allreduce(name, two_first ? two : three);
            run_allreduce(name, two_first ? three : two);
            hold.release();
            // 1+2 on devices 0 and 1, then 3+3+4; or 1+2+4 on all, then 7+7
            const Floats want = two_first ? Floats{10, 10, 10} : Floats{14, 14, 7};
            for (int c = 0; c < 3; c++) CHECK(to_host(data[c]) == Floats(3, want[c]));
        }
    }
}

// ---------------------------------------------------------------------------------------------
// The run of all tests

inline int tests_main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--program") == 0) {
        add_write_params();
        return mgpu_main(argc - 1, argv + 1);
    }
#ifdef CUDA_CPU
    setenv("CUDA_CPU_DEVICES", std::to_string(most_devices).c_str(), 0);
#endif
    try {
        use_devices(most_devices, !std::getenv("TESTS_QUIET")); // see test.sh
    } catch (const std::exception &e) {
        fprintf(stderr, "tests: %s\n", e.what());
        return 1;
    }
    return run_tests(argc, argv);
}
