// Tests of mgpu.cu, against plain loops in double and against the promises of the chapter.
//
//     make test                       run all of them
//     make test T='-tc=allreduce*'    one function's: a test's name starts with what it tests
//     make asan, make race            run them under AddressSanitizer and ThreadSanitizer
//
// The sections are those of mgpu.cu. To test an operator of your own, start with a copy of the test
// of relu (section 8). The CPU stand-in has tests of its own, extras/cpu/tests.cu.

// The tests of other folders define TESTS_SHARED: they take the helpers from here, and no test.
#ifndef TESTS_SHARED
#define MGPU_NO_MAIN
#include "mgpu.cu"
#else
#pragma GCC diagnostic ignored "-Wunused-function"
#ifdef __NVCC__
#pragma nv_diag_suppress 177
#endif
#endif

#ifndef DOCTEST_LINKED
#define DOCTEST_CONFIG_IMPLEMENT
#endif
#include "doctest.h"

#include <array>
#include <atomic>
#include <iterator>
#include <set>

#include <fcntl.h>
#include <malloc.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <termios.h>

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

// ---------------------------------------------------------------------------------------------
// What the tests share

typedef std::vector<float> Floats;
typedef std::vector<double> Doubles;
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
template <class T> static void check_close(const Floats &got, const T &want, double rel) {
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
    const double got_there = got[at], want_there = want[at];
    CAPTURE(at);
    CAPTURE(got_there);
    CAPTURE(want_there);
    CHECK(worst <= rel * largest);
}

// Return how much the rounding changes a sum of n floats, relative to its size: by about
// sqrt(n) * 2^-24, in whatever order they are added. Allow 16 times that, for the largest error of
// many sums, and for a sum that happens to be small.
static double rounding(int n) { return 1e-6 * std::sqrt(std::max(n, 1)); }

// Return numbers from N(0, scale^2), the same ones for the same seed.
static Floats random_floats(size_t n, unsigned seed, float scale = 1) {
    std::mt19937 random(seed);
    std::normal_distribution<float> distribution(0, scale);
    Floats numbers(n);
    for (float &x : numbers) x = distribution(random);
    return numbers;
}

static Tensor on_host(const Floats &numbers, const Ints &shape) {
    const Tensor t = empty(shape, cpu());
    REQUIRE(size(t) == (int)numbers.size());
    std::copy(numbers.begin(), numbers.end(), t.ptr());
    return t;
}

static Tensor on_device(const Floats &numbers, const Ints &shape, Device device = gpu(0)) {
    return copyto(on_host(numbers, shape), device);
}

static Tensor random_tensor(const Ints &shape, unsigned seed, float scale = 1) {
    return on_host(random_floats(size({cpu(), shape}), seed, scale), shape);
}

// Return a tensor whose gradient holds NaN for now: a backward must clear it, and write all of it.
static Tensor with_grad(const Floats &numbers, const Ints &shape) {
    Tensor t = on_device(numbers, shape);
    t.grad = std::make_shared<Tensor>(full(shape, NAN, t.device));
    return t;
}

// Call backward(), but with dys in place of ones as the gradients of ys.
static void backward_from(const Tensors &ys, const std::vector<Floats> &dys) {
    const Tensor l = empty({1}, ys[0].device);
    backward(record("backward_from", l, ys, [=](const Tensor &) {
        for (size_t i = 0; i < ys.size(); i++) {
            if (grad_of(ys[i])) add_(*ys[i].grad, on_device(dys[i], ys[i].grad->shape));
        }
    }));
}

static Floats grad(const Tensor &t) { return to_host(*t.grad); }

// --- messages and files

static bool contains(const std::string &text, const std::string &part) {
    return text.find(part) != std::string::npos;
}

// Return the message of the error that `call` throws, or "" if it throws none.
static std::string error_of(const std::function<void()> &call) {
    try {
        call();
    } catch (const std::exception &e) {
        return e.what();
    }
    return "";
}

// Check that a text has these parts, which " ... " divides, in this order.
static void check_parts(const std::string &text, const std::string &parts) {
    INFO(text);
    size_t at = 0, begin = 0;
    while (begin <= parts.size()) {
        const size_t end = std::min(parts.find(" ... ", begin), parts.size());
        const std::string part = parts.substr(begin, end - begin);
        CAPTURE(part);
        at = text.find(part, at);
        CHECK(at != std::string::npos);
        begin = end + 5;
    }
}

// Check that a message is one line with these parts.
static void check_says(const std::string &text, const std::string &parts) {
    check_parts(text, parts);
    CHECK(std::count(text.begin(), text.end(), '\n') <= (!text.empty() && text.back() == '\n'));
}

// Check that the call throws an error with such a message.
#define REFUSED(call, says) check_says(error_of([&] { call; }), says)

static std::string read_text(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

static void write_text(const std::string &path, const std::string &bytes) {
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    std::ofstream(path, std::ios::binary) << bytes;
    REQUIRE(read_text(path) == bytes);
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

static bool on_terminal = false;

// Return whether a file is a terminal, in place of libc's function.
extern "C" int isatty(int file) noexcept {
    termios settings;
    return on_terminal || tcgetattr(file, &settings) == 0;
}

// Return what `call` prints, as to a terminal or else as to a file.
static std::string printed(const std::function<void()> &call, bool terminal = false) {
    const TestFolder folder;
    fflush(stdout);
    const int before = dup(STDOUT_FILENO);
    const int file = open(folder.file("out").c_str(), O_WRONLY | O_CREAT, 0600);
    REQUIRE(dup2(file, STDOUT_FILENO) == STDOUT_FILENO);
    on_terminal = terminal;
    call();
    on_terminal = false;
    fflush(stdout);
    dup2(before, STDOUT_FILENO);
    close(before);
    close(file);
    return read_text(folder.file("out"));
}

// Return an IDX file of these bytes. The numbers of its head are big-endian.
static std::string idx(const std::vector<uint32_t> &head, const std::string &bytes) {
    std::string text;
    for (uint32_t n : head) text += {char(n >> 24), char(n >> 16), char(n >> 8), char(n)};
    return text + bytes;
}

static std::string random_bytes(size_t n, int below) {
    std::mt19937 random(n);
    std::string bytes;
    for (size_t i = 0; i < n; i++) bytes += char(random() % below);
    return bytes;
}

static std::string idx_images(uint32_t n) {
    return idx({2051, n, 28, 28}, random_bytes(784 * n, 256));
}
static std::string idx_labels(uint32_t n) { return idx({2049, n}, random_bytes(n, 10)); }

const std::string train_images = "/train-images-idx3-ubyte";
const std::string train_labels = "/train-labels-idx1-ubyte";

// Write a data set that is small enough to train on in a moment.
static void write_data(const std::string &folder, int train, int test) {
    write_text(folder + train_images, idx_images(train));
    write_text(folder + train_labels, idx_labels(train));
    write_text(folder + "/t10k-images-idx3-ubyte", idx_images(test));
    write_text(folder + "/t10k-labels-idx1-ubyte", idx_labels(test));
}

// A folder with such a data set in data/.
struct DataFolder : TestFolder {
    DataFolder(int train, int test) { write_data(file("data"), train, test); }
};

// --- the program

struct Run {
    int status;
    std::string out, err;
};

// Run the program in the folder as `before PROGRAM after` in a shell, without the tests' devices.
static Run run_in_shell(const TestFolder &folder, const std::string &before,
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
static std::string output_of(const TestFolder &folder, const std::string &arguments,
                             const std::string &environment = "") {
    const Run run = run_in_shell(folder, environment, arguments);
    CAPTURE(arguments);
    CHECK(run.err == "");
    REQUIRE(run.status == 0);
    return run.out;
}

// Return what a run prints that must fail, and say why in one line on stderr.
static std::string fails(const TestFolder &folder, const std::string &arguments,
                         const std::string &says, const std::string &environment = "") {
    const Run run = run_in_shell(folder, environment, arguments);
    CAPTURE(arguments);
    CHECK(run.status == 1);
    check_says(run.err, "mgpu: " + says);
    return run.out;
}

// --- the model and its training

constexpr int most_devices = 8; // the tests use gpu(0) ... gpu(7)

// Return all that a test may change: the options, the model, the algorithms.
static auto settings() {
    return std::tie(options, params, param_names, net, exchange, algorithms, bucket_bytes);
}

// An object that puts the settings back at the end of its block.
struct Kept {
    std::tuple<Options, Tensors, std::vector<std::string>, Net, Exchange, std::vector<Algorithm>,
               size_t>
        before = settings();
    ~Kept() { settings() = before; }
};

// Select a model and initialize its parameters. Kept puts the last one back.
static void set_model(const std::string &name, int seed) {
    options.model = name;
    rng.seed(seed);
    init_model();
}

// Return parameters for LeNet, on the host. With those of init_params() all logits are nearly 0, so
// much could be wrong unseen. Biases of +-1 keep the inputs of ReLUs away from 0: where one lies
// within rounding of it, two trainings can part ways though neither is wrong.
static Tensors lively_params() {
    const float scales[4] = {0.1f, 0.03f, 0.03f, 0.1f}; // of W1 W2 W3 W4
    init_params();
    Tensors lively;
    for (int i = 0; i < 8; i++) {
        Floats numbers = random_floats(size(params[i]), 10 + i, scales[i / 2]);
        for (float &x : numbers) {
            if (i % 2 == 1) x = std::copysign(1, x);
        }
        lively.push_back(on_host(numbers, params[i].shape));
    }
    return lively;
}

// Return n images and their labels. Each image is the pattern of its class, and noise.
static std::pair<Tensor, Tensor> minibatch(int n, unsigned seed) {
    static const Floats patterns = random_floats(10 * 784, 1);
    Floats X = random_floats(n * 784, seed, 0.2f), y(n);
    for (int i = 0; i < n * 784; i++) {
        y[i / 784] = (7 * (i / 784) + seed) % 10;
        X[i] += patterns[y[i / 784] * 784 + i % 784];
    }
    return {on_host(X, {n, 1, 28, 28}), on_host(y, {n})};
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
    // Return all trained parameters of device c, one after another, or all gradients.
    Floats params(int c) const { return all_to_host(device_params[c]); }
    Floats grads(int c) const { return all_to_host(gradients(device_params)[c]); }

    // Check that all devices have the parameters of the first, to the bit.
    void check_replicas_equal() const {
        for (size_t c = 1; c < devices.size(); c++) check_close(params(c), params(0), 0);
    }
};

static const std::vector<std::string> right_algorithms = {"naive",   "bucket", "host", "by_tensor",
                                                          "sharded", "ring",   "tree", "yours"};

// Return gradients of these sizes on k devices, contiguous in memory or not.
static PerDevice new_grads(int k, const Ints &sizes, bool contiguous = true) {
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
static void check_exact_sums(const std::string &name, int k, const Ints &sizes,
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

// --- the run of all tests

// Return doctest's status, or 4 if no test matches the filters, for then nothing was tested.
static int run_tests(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] == '-') continue;
        fprintf(stderr, "%s is no option of the tests: try -tc='%s*', or --help\n", argv[i],
                argv[i]);
        return 1;
    }
    doctest::Context tests;
    tests.setOption("abort-after", 20); // one mistake can fail hundreds of checks
    tests.applyCommandLine(argc, argv);
    const int status = tests.run();
    if (tests.shouldExit()) return status; // --help, --list-test-cases and the like
    std::vector<const char *> words(argv, argv + argc);
    words.insert(words.end(), {"--count", "--reporters=console"});
    std::ostringstream counted;
    doctest::Context query(words.size(), words.data());
    query.setCout(&counted);
    query.run();
    if (!contains(counted.str(), " filters: 0\n")) return status;
    fprintf(stderr, "no test case matches %s\n", argv[argc - 1]);
    return 4;
}

static int tests_main(int argc, char **argv) {
#ifdef CUDA_CPU
    setenv("CUDA_CPU_DEVICES", std::to_string(most_devices).c_str(), 0);
#endif
    try {
        complete_options();
        use_devices(most_devices, true);
    } catch (const std::exception &e) {
        fprintf(stderr, "tests: %s\n", e.what());
        return 1;
    }
    return run_tests(argc, argv);
}

#ifndef TESTS_SHARED
// Under sanitizers (see small_only), skip cases that train, and those that are slow.
const doctest::skip trains(no_training), slow(small_only);

// ---------------------------------------------------------------------------------------------
// 2. A toy network

TEST_CASE("lenet: the layers of the chapter, and the gradients of all parameters" * trains) {
    const auto [X, y] = minibatch(3, 2);
    const Tensor x = copyto(X, gpu(0)), labels = copyto(y, gpu(0));
    const Tensors p = get_params(lively_params(), gpu(0)), q = get_params(lively_params(), gpu(0));
    const Tensor y_hat = lenet(x, p), l = loss(y_hat, labels);
    backward(l);
    const Tensor h1 = avg_pool2d(relu(conv2d(x, q[0], q[1])), 2, 2);
    const Tensor h2 = avg_pool2d(relu(conv2d(h1, q[2], q[3])), 2, 2);
    const Tensor h3 = relu(linear(reshape(h2, {3, 800}), q[4], q[5]));
    const Tensor want = linear(h3, q[6], q[7]), want_l = softmax_cross_entropy(want, labels);
    backward(want_l);
    CHECK(y_hat.shape == Ints{3, 10});
    CHECK(to_host(y_hat) == to_host(want));
    CHECK(to_host(l) == to_host(want_l));
    for (int i = 0; i < 8; i++) {
        CAPTURE(param_names[i]);
        check_close(grad(p[i]), grad(q[i]), 0);
    }
}

TEST_CASE("init_model: names, shapes, scales; the weights are what the seed gives, in their order") {
    Kept kept;
    set_model("lenet", 0);
    CHECK(listed(param_names, " ") == "W1 b1 W2 b2 W3 b3 W4 b4");
    CHECK(listed(params, " ") == "(20,1,3,3) (20) (50,20,5,5) (50) (800,128) (128) (128,10) (10)");
    CHECK(all_to_host(params).size() == 129068);
    rng.seed(0); // the numbers differ between C++ libraries
    for (int i = 0; i < 8; i++) {
        CAPTURE(param_names[i]);
        double variance = 0; // of 180 numbers, the fewest, it is known to 10%
        for (float x : to_host(params[i])) variance += x * x / size(params[i]);
        CHECK(variance >= (i % 2 == 0 ? 0.7e-4 : 0));
        CHECK(variance <= (i % 2 == 0 ? 1.4e-4 : 0));
        if (i % 2 == 0) CHECK(to_host(params[i]) == to_host(normal(0.01f, params[i].shape)));
    }
    for (float scale : {0.0f, -0.01f, NAN}) { // what if all weights begin with 0?
        REFUSED(normal(scale, {3}),
                format("normal: the scale must be greater than 0, not %g", scale));
    }
}

// ---------------------------------------------------------------------------------------------
// 3. Data synchronization

TEST_CASE("copyto: between the host and devices, any two of them") {
    const Floats numbers = random_floats(1001, 1);
    for (Device from : {cpu(), gpu(0), gpu(1)}) {
        for (Device to : {cpu(), gpu(0), gpu(1), gpu(most_devices - 1)}) {
            INFO(str(from), " to ", str(to));
            const Tensor src = copyto(on_host(numbers, {7, 143}), from), dst = copyto(src, to);
            CHECK(dst.device.id == to.id);
            CHECK(dst.shape == src.shape);
            CHECK(dst.data != src.data);
            CHECK(to_host(dst) == numbers);
            const Tensor other = full({1001}, 0, to); // only the count must fit
            copyto(src, other);
            CHECK(to_host(other) == numbers);
            CHECK(to_host(copyto(empty({0, 3}, from), to)) == Floats());
            REFUSED(copyto(src, empty({9}, to)), "copyto: 1001 numbers do not fit a tensor of 9");
        }
    }
}

static std::atomic<bool> open_again{false};

// Let the device stand still until `open_again`, but for so many milliseconds at most.
static void stop(Device device, long most_ms = 5000) {
    auto wait = [](void *most_ms) {
        for (long ms = 0; ms < (long)most_ms && !open_again; ms++) usleep(1000);
    };
    open_again = false;
    REQUIRE(cudaLaunchHostFunc(stream_of(device), wait, (void *)most_ms) == cudaSuccess);
}

TEST_CASE("copyto: src is read after it is written, and before it is overwritten") {
    const Tensor src = full({3}, 1, gpu(0)), dst = full({3}, 0, gpu(1));
    for (Device late : {gpu(0), gpu(1)}) {
        INFO(str(late), " stands still");
        fill(src, 2);
        waitall();
        stop(late, 50);
        fill(src, 3);
        copyto(src, dst);
        fill(src, 4);
        CHECK(to_host(dst) == Floats{3, 3, 3});
    }
}

TEST_CASE("get_params, attach_grad: independent copies, gradients of zeros, contiguous") {
    Tensors start = {on_host({1, 2}, {2, 1}), on_host({8, 9}, {2}), full({0}, 0, cpu()), arange(3)};
    start[1].requires_grad = false; // a buffer
    const Tensors a = get_params(start, gpu(0)), b = get_params(start, gpu(1));
    fill(a[0], 6);
    CHECK(all_to_host(a) == Floats{6, 6, 0, 1, 2}); // what is trained
    CHECK(to_host(a[1]) == Floats{8, 9});
    CHECK(all_to_host(b) == Floats{1, 2, 0, 1, 2});
    CHECK(all_to_host(start) == Floats{1, 2, 0, 1, 2});
    for (int i : {0, 2, 3}) {
        CAPTURE(i);
        CHECK(b[i].device.id == 1);
        CHECK(b[i].grad->device.id == 1);
        CHECK(b[i].grad->shape == b[i].shape);
        CHECK(grad(b[i]) == Floats(size(b[i]), 0));
        CHECK(start[i].grad == nullptr);
    }
    CHECK(b[3].grad->ptr() == b[0].grad->ptr() + 2);
    CHECK(get_params({}, gpu(0)).size() == 0);
    REFUSED(gradient(b[1]), "a parameter has no gradient: does get_params call attach_grad?");
}

// ---------------------------------------------------------------------------------------------
// 4. Distributing data

TEST_CASE("split_batch, shard_sizes: contiguous shards in order, as equal as can be, or by SPLIT") {
    Kept kept;
    // clang-format off
    const std::vector<Ints> cases[] = { // SPLIT, the sizes of shards
        {{}, {3, 2, 2}}, {{}, {3, 3, 2}}, {{}, {5}}, {{}, {0, 0}}, {{}, {1, 1, 0, 0, 0}},
        {{}, {2, 1, 1, 1, 1, 1, 1, 1}}, {{3, 1}, {192, 64}}, {{3, 1}, {4, 1}}, {{3, 1}, {1, 0}},
        {{1, 1, 1}, {3, 3, 2}}, {{1, 2, 4}, {2, 3, 5}}, {{1000, 1}, {2998, 2}}, {{5, 1}, {0, 0}},
        {{3, 1}, {7}}};
    // clang-format on
    for (const auto &c : cases) {
        const Ints sizes = c[1];
        const int n = std::accumulate(sizes.begin(), sizes.end(), 0), k = sizes.size();
        CAPTURE(n);
        options.split = c[0];
        CHECK(shard_sizes(n, k) == sizes);
        const Tensor X = reshape(arange(n * 6), {n, 1, 2, 3}), y = arange(n);
        const auto [X_shards, y_shards] = split_batch(X, y, first_devices(k));
        for (int c = 0; c < k; c++) {
            CHECK(X_shards[c].device.id == c);
            CHECK(y_shards[c].device.id == c);
            CHECK(X_shards[c].shape == Ints{sizes[c], 1, 2, 3});
            CHECK(y_shards[c].shape == Ints{sizes[c]});
        }
        CHECK(all_to_host(X_shards) == to_host(X));
        CHECK(all_to_host(y_shards) == to_host(y));
    }
    REFUSED(shard_sizes(8, 3), "SPLIT has 2 parts ... 3 devices");
    REFUSED(split_batch(full({3, 2}, 0, cpu()), arange(4), {gpu(0)}), "3 samples but 4 labels");
}

// ---------------------------------------------------------------------------------------------
// 5. Training

// Return what SGD makes of the parameters.
static Floats after_update(Floats params, const Floats &grads, float lr, int n) {
    for (size_t i = 0; i < params.size(); i++) params[i] -= lr * grads[i] / n;
    return params;
}

TEST_CASE("train_batch: k devices learn what one device learns" * trains) {
    Kept kept;
    const int steps = small_only ? 2 : 10;
    const float lr = 0.05f;
    const Tensors start = lively_params();
    Training one(1, start);
    std::vector<std::pair<Ints, Training>> others; // with SPLIT
    for (const Ints &split : {Ints{1, 1}, {1, 1, 1}, {1, 1, 1, 1, 1}, {3, 1}, {1, 100}}) {
        if (!small_only || split[0] == 3) others.push_back({split, Training(split.size(), start)});
    }
    Doubles mean; // loss, of each step
    for (int step = 0; step < steps; step++) {
        // One minibatch is a single sample: the idle devices must add nothing, least of all the
        // gradients that they still have from the step before.
        const int n = step == steps / 2 ? 1 : small_only ? 3 : 8;
        const auto batch = minibatch(n, 100 + step);
        const Floats before = one.params(0), losses = one.step(batch, lr);
        check_close(one.params(0), after_update(before, one.grads(0), lr, n), 1e-6);
        mean.push_back(std::accumulate(losses.begin(), losses.end(), 0.0) / n);
        // Each step's gradients differ by rounding, below 1e-6 of them, and so the parameters drift
        // apart by no more: nothing amplifies it while ReLUs stay on their sides.
        for (auto &[split, many] : others) {
            options.split = split;
            INFO("SPLIT ", str(options.split), ", step ", step);
            check_close(many.step(batch, lr), losses, 1e-6 * (1 + step));
            many.check_replicas_equal();
            for (int i = 0; i < 8; i++) {
                check_close(grad(many.device_params.back()[i]), grad(one.device_params[0][i]),
                            5e-6 * (1 + step));
            }
        }
    }
    if (!small_only) CHECK(mean.back() < 0.8 * mean[0]); // else the comparison says little
}

// ---------------------------------------------------------------------------------------------
// 7. Allreduce algorithms

TEST_CASE("allreduce_*: every device holds the exact sum of all, for any k and any length") {
    const int many = small_only ? 1003 : 40009;
    for (const std::string &name : right_algorithms) {
        const bool any_place = name == "naive" || name == "by_tensor" || name == "yours";
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
                        name + ", k = ... are not contiguous in memory");
            }
        }
        if (small_only) continue;
        use_devices(16, true); // share the GPUs
        for (int k : {9, 13, 16}) check_exact_sums(name, k, {17, 3, 1000});
    }
}

TEST_CASE("allreduce_*: of so many devices, then of others, while one is late") {
    for (const std::string &name : right_algorithms) {
        for (int late : {0, 1, 2, 3, 4, 5}) {
            INFO(name, ", late ", late);
            const Tensors data = {empty({3}, gpu(0)), empty({3}, gpu(1)), empty({3}, gpu(2))};
            stop(gpu(late % 3), 20);
            for (int c = 0; c < 3; c++) fill(data[c], 1 << c); // the sum of two is no third
            const PerDevice two = {{data[0]}, {data[1]}}, three = {{data[0]}, {data[1]}, {data[2]}};
            run_allreduce(name, late < 3 ? two : three);
            run_allreduce(name, late < 3 ? three : two);
            const Floats want = late < 3 ? Floats{10, 10, 10} : Floats{14, 14, 7};
            for (int c = 0; c < 3; c++) CHECK(to_host(data[c]) == Floats(3, want[c]));
        }
    }
}

TEST_CASE("run_allreduce: an error names the algorithm") {
    Kept kept;
    algorithms.push_back({"halving", allreduce_naive, powers_of_two});
    for (int k : {1, 2, 4, 8}) check_exact_sums("halving", k, {5});
    for (int k : {3, 5, 6, 7}) {
        REFUSED(run_allreduce("halving", new_grads(k, {2})),
                format("halving, k = %d: it does not support this number of devices", k));
    }
}

TEST_CASE("flatten: one tensor of neighbours in memory") {
    const Tensor all = copyto(arange(4), gpu(1)), none = full({0}, 1, gpu(1));
    CHECK(to_host(flatten({{rows(all, 0, 1), none, rows(all, 1, 4)}})[0]) == Floats{0, 1, 2, 3});
    CHECK(flatten({{rows(all, 1, 2), rows(all, 2, 3)}})[0].ptr() == all.ptr() + 1);
    const std::string apart = "flatten: the tensors on gpu(1) are not contiguous in memory";
    REFUSED(flatten({{rows(all, 0, 1), rows(all, 2, 4)}}), apart);
    REFUSED(flatten({{rows(all, 2, 4), rows(all, 0, 2)}}), apart);
}

TEST_CASE("chunk: one of k, or several") {
    const Tensor flat = arange(10);
    CHECK(to_host(chunk(reshape(flat, {5, 2}), 1, 4)) == Floats{2, 3, 4});
    CHECK(to_host(chunk(flat, 1, 4, 2)) == Floats{2, 3, 4, 5, 6});
    CHECK(size(chunk(flat, 0, 4, 4)) == 10);
    CHECK(size(chunk(arange(2), 0, 3)) == 0);
    REFUSED(chunk(flat, 3, 4, 2), "there is no chunk 4 of 4: they are numbered 0 to 3");
    REFUSED(chunk(flat, -1, 3),
            "there is no chunk -1 of 3: they are numbered 0 to 2 (% of a negative number?)");
}

TEST_CASE("send: several messages at the same time") {
    const Tensor a = full({4}, 1, gpu(0)), b = full({4}, 2, gpu(1)), c = full({4}, 3, gpu(2));
    send({{rows(a, 0, 2), rows(b, 0, 2)},
          {rows(c, 2, 4), rows(b, 2, 4)},
          {rows(a, 0, 0), rows(b, 2, 2)}});
    CHECK(to_host(b) == Floats{1, 1, 3, 3});
    REFUSED(send({{rows(a, 0, 2), rows(b, 0, 3)}}), "send: 2 numbers do not fit a tensor of 3");
    REFUSED(send({{a, b}, {c, c}}), "a message on gpu(2) has the same source and destination");
}

// Return a network of three layers after some steps on k devices, each gradient a bucket.
static Training train_small(int k, const std::string &algorithm, bool overlap) {
    Kept kept;
    bucket_bytes = 1;
    exchange = exchange_by(algorithm, overlap);
    net = [](const Tensor &X, const Tensors &p) {
        return linear(relu(linear(relu(linear(X, p[0], p[1])), p[2], p[3])), p[4], p[5]);
    };
    Tensors start;
    for (const Ints &shape : {Ints{6, 7}, {7}, {7, 5}, {5}, {5, 3}, {3}}) {
        start.push_back(random_tensor(shape, start.size()));
    }
    Training training(k, start);
    const int n = 4 * k - (k > 1); // shards differ in size
    Floats y(n);
    for (int i = 0; i < n; i++) y[i] = i % 3;
    for (int step = 0; step < (small_only ? 2 : 4); step++) {
        training.step({random_tensor({n, 6}, step), on_host(y, {n})}, 0.1f);
    }
    return training;
}

TEST_CASE("exchange: OVERLAP=1 gives the same as without, and the replicas are equal") {
    for (int k = 1; k <= (small_only ? 3 : 4); k += no_training ? 2 : 1) {
        const Floats naive = train_small(k, "naive", false).params(0);
        for (const std::string &name : right_algorithms) {
            INFO("k ", k, ", ", name);
            const Training with = train_small(k, name, true);
            with.check_replicas_equal();
            check_close(with.params(0), naive, 1e-5); // some algorithms add in another order
            if (!small_only) CHECK(train_small(k, name, true).params(0) == with.params(0));
            if (no_training) continue;
            const Training without = train_small(k, name, false);
            without.check_replicas_equal();
            check_close(without.params(0), naive, 1e-5);
            const bool cuts = name == "by_tensor" || name == "sharded" || name == "ring";
            if (k <= 2 || !cuts) CHECK(with.params(0) == without.params(0)); // the same order
        }
    }
}

TEST_CASE("exchange: buckets of so many bytes, the last layers first; one without OVERLAP") {
    Kept kept;
    static std::string buckets; // the shapes in each of them
    algorithms.push_back({"probed", [](const PerDevice &grads) {
                              for (const Tensor &t : grads[0]) buckets += str(t);
                              buckets += " ";
                          }});
    auto buckets_of = [](size_t bytes, bool overlap) {
        bucket_bytes = bytes;
        buckets = "";
        exchange_by("probed", overlap)(new_grads(2, {3, 2, 4, 1, 5}));
        return buckets;
    };
    CHECK(buckets_of(1, false) == "(1,3)(1,2)(1,4)(1,1)(1,5) ");
    CHECK(buckets_of(24, true) == "(1,1)(1,5) (1,2)(1,4) (1,3) ");
    CHECK(buckets_of(25, true) == "(1,4)(1,1)(1,5) (1,3)(1,2) ");
    CHECK(buckets_of(1000, true) == "(1,3)(1,2)(1,4)(1,1)(1,5) ");
}

TEST_CASE("exchange: each bucket waits for its own gradients alone") {
    Kept kept;
    bucket_bytes = 1;
    const PerDevice p = Training(2, {arange(3), arange(2)}).device_params;
    std::vector<std::shared_ptr<Event>> summed; // behind each bucket
    for (bool stops : {false, true}) {          // the first time it allocates what it needs
        waitall();
        summed.clear();
        for (int c : {0, 1}) {
            for (int i : {1, 0}) { // as backward writes them; each device may stop in between
                const Tensor &grad = *p[c][i].grad;
                fill(grad, c + 1);
                REQUIRE(cudaEventRecord(grad.written->handle, stream_of(gpu(c))) == cudaSuccess);
                if (stops && i == 1) stop(gpu(c));
            }
        }
        auto sum = [&](const PerDevice &grads) {
            run_allreduce("naive", grads);
            summed.push_back(std::make_shared<Event>(gpu(0)));
            REQUIRE(cudaEventRecord(summed.back()->handle, stream_of(gpu(0))) == cudaSuccess);
        };
        sum_in_buckets(sum, gradients(p));
    }
    REQUIRE(summed.size() == 2);
    auto state = [&](int i) { return cudaEventQuery(summed[i]->handle); };
    for (int ms = 0; ms < 2000 && state(0) != cudaSuccess; ms++) usleep(1000);
    CHECK(state(0) == cudaSuccess);
    CHECK(state(1) == cudaErrorNotReady);
    open_again = true;
    for (const Tensors &list : p) { // later work waits for all of them
        CHECK(all_to_host({*list[0].grad, *list[1].grad}) == Floats(5, 3));
    }
}

// ---------------------------------------------------------------------------------------------
// 8. Kernels and operators

// In each test of an operator, a plain loop in double computes the result and the gradients. The
// operator is used twice, so the gradients must be sums: 2 * dy.

TEST_CASE("relu: result and gradient") {
    for (const Ints &shape : {Ints{1}, {255}, {2, 3, 4, 5}, {1001}, {0, 3}}) {
        CAPTURE(shape);
        const int n = size({cpu(), shape});
        const Floats x = random_floats(n, 1), dy = random_floats(n, 2);
        Doubles y(n), dX(n);
        for (int i = 0; i < n; i++) {
            y[i] = std::max(x[i], 0.0f);
            dX[i] = x[i] > 0 ? 2.0 * dy[i] : 0;
        }
        const Tensor X = with_grad(x, shape), result = relu(X);
        backward_from({result, relu(X)}, {dy, dy});
        check_close(to_host(result), y, 0);
        check_close(grad(X), dX, 0);
        CHECK(result.shape == shape);
    }
}

TEST_CASE("relu: of 0, infinity and NaN") {
    const Tensor X = with_grad({NAN, 0.0f, -0.0f, INFINITY, -INFINITY, 1e-45f}, {6}), y = relu(X);
    backward(y);
    const Floats got = to_host(y), dX = grad(X);
    CHECK(to_string(rows(y, 0, 1)) == "[nan] @gpu(0)"); // or a broken network would look sound
    CHECK(Floats(got.begin() + 1, got.end()) == Floats{0, 0, INFINITY, 0, 1e-45f});
    CHECK(Floats(dX.begin() + 1, dX.end()) == Floats{0, 0, 1, 0, 1});
}

TEST_CASE("softmax_cross_entropy: result and gradient") {
    // l[n] = log(sum over j of exp(y_hat[n,j])) - y_hat[n,y[n]]
    for (const Ints &s : {Ints{1, 2}, {5, 10}, {65, 10}, {3, 7}, {4, 1}, {0, 10}, {2, 1000}}) {
        CAPTURE(s);
        const int N = s[0], classes = s[1];
        const Floats x = random_floats(N * classes, 1), dl = random_floats(N, 2);
        Floats labels;
        Doubles l, dX;
        for (int n = 0; n < N; n++) {
            const int label = n % 3 == 0 ? 0 : n % 3 == 1 ? classes - 1 : n % classes;
            Doubles e; // relative to the label's
            for (int j = 0; j < classes; j++) {
                e.push_back(std::exp((double)x[n * classes + j] - x[n * classes + label]));
            }
            const double sum = std::accumulate(e.begin(), e.end(), 0.0);
            for (int j = 0; j < classes; j++) {
                dX.push_back(2.0 * dl[n] * (e[j] / sum - (j == label)));
            }
            l.push_back(std::log(sum));
            labels.push_back(label);
        }
        const Tensor y_hat = with_grad(x, s), y = on_device(labels, {N});
        const Tensor result = softmax_cross_entropy(y_hat, y);
        backward_from({result, softmax_cross_entropy(y_hat, y)}, {dl, dl});
        check_close(to_host(result), l, rounding(classes));
        check_close(grad(y_hat), dX, rounding(classes));
    }
}

TEST_CASE("softmax_cross_entropy: of logits far apart, equal ones, and NaN") {
    const float far = 1e4f, third = 1 / 3.0f;
    // The right class is far ahead, far behind, equal; the largest is the last, the second
    const Tensor y_hat = with_grad(
        {far, -far, 0, far, -far, 0, -far, -far, -far, -far, 0, far, 0, far, -far}, {5, 3});
    const Tensor l = softmax_cross_entropy(y_hat, on_device({0, 1, 2, 1, 1}, {5}));
    backward(l);
    CHECK(to_host(l) == Floats{0, 20000, std::log(3.0f), 10000, 0});
    check_close(grad(y_hat), Floats{0, 0, 0, 1, -1, 0, third, third, third - 1, 0, -1, 1, 0, 0, 0},
                1e-6);
    const Tensor nan = on_device({1, NAN, 2}, {1, 3});
    CHECK(to_string(softmax_cross_entropy(nan, full({1}, 0, gpu(0)))) == "[nan] @gpu(0)");
}

TEST_CASE("avg_pool2d: result and gradient") {
    // y[n,c,i,j] = mean over u,v of X[n,c,i*K+u,j*K+v]
    // clang-format off
    const Ints sizes[] = { // N C H W K; of 9x9, the ninth row and column are in no window
        {1, 1, 1, 1, 1}, {2, 3, 4, 6, 2}, {0, 2, 4, 4, 2}, {2, 20, 26, 26, 2}, {2, 1, 9, 9, 2},
        {3, 2, 7, 5, 3}, {1, 300, 3, 5, 3}, {2, 2, 29, 33, 29}};
    // clang-format on
    for (const Ints &s : sizes) {
        CAPTURE(s);
        const int N = s[0], C = s[1], H = s[2], W = s[3], K = s[4], OH = H / K, OW = W / K;
        const Floats x = random_floats(N * C * H * W, 1), dy = random_floats(N * C * OH * OW, 2);
        Doubles y(dy.size()), dX(x.size());
        for (int at = 0; at < N * C * OH * OW; at++) {
            const int j = at % OW, i = at / OW % OH, plane = at / (OH * OW);
            for (int window = 0; window < K * K; window++) {
                const int u = window / K, v = window % K;
                const int from = (plane * H + i * K + u) * W + j * K + v;
                y[at] += x[from] / (double)(K * K);
                dX[from] += 2.0 * dy[at] / (K * K);
            }
        }
        const Tensor X = with_grad(x, {N, C, H, W}), result = avg_pool2d(X, K, K);
        backward_from({result, avg_pool2d(X, K, K)}, {dy, dy});
        CHECK(result.shape == Ints{N, C, OH, OW});
        check_close(to_host(result), y, rounding(K * K));
        check_close(grad(X), dX, 1e-6);
    }
}

TEST_CASE("matmul_sum: the sum of all products is added to one matrix") {
    // 2100 are more than the partial sums. conv2d and linear have matrices of many tiles.
    for (const Ints &s : {Ints{1, 1, 1, 1}, {7, 5, 33, 9}, {70, 33, 40, 3}, {2100, 3, 2, 1}}) {
        CAPTURE(s);
        const int count = s[0], M = s[1], N = s[2], K = s[3];
        const Tensor A = copyto(random_tensor({count, M, K}, 1), gpu(0));
        const Tensor B = copyto(random_tensor({count, K, N}, 2), gpu(0));
        const Tensor C = full({M, N}, 1, gpu(0));
        const Floats a = to_host(A), b = to_host(B);
        Doubles want(M * N, 1);
        for (int at = 0; at < count * M * N * K; at++) {
            const int k = at % K, j = at / K % N, i = at / (K * N) % M, n = at / (K * N * M);
            want[i * N + j] += (double)a[(n * M + i) * K + k] * b[(n * K + k) * N + j];
        }
        matmul_sum({C.ptr(), 1, M, N}, {A.ptr(), count, M, K}, {B.ptr(), count, K, N}, gpu(0));
        check_close(to_host(C), want, rounding(count * K));
    }
}

TEST_CASE("linear: result and gradients") {
    // y[n,o] = b[o] + sum over c of X[n,c] * W[c,o]
    const Ints sizes[] = {{1, 1, 1},   {2, 3, 1},   {3, 5, 7},     {0, 5, 3},      {33, 17, 50},
                          {65, 1, 16}, {2, 50, 17}, {2, 800, 128}, {300, 128, 10}, {2, 1, 3000}};
    for (const Ints &s : sizes) {
        CAPTURE(s);
        const int N = s[0], C = s[1], O = s[2];
        if (N + C + O > (no_training ? 20 : small_only ? 150 : INT_MAX)) continue;
        const Floats x = random_floats(N * C, 1), w = random_floats(C * O, 2);
        const Floats bias = random_floats(O, 3), dy = random_floats(N * O, 4);
        Doubles y(N * O), dX(N * C), dW(C * O), db(O);
        for (int at = 0; at < N * O; at++) {
            const int o = at % O, n = at / O;
            y[at] = bias[o];
            db[o] += 2.0 * dy[at];
            for (int c = 0; c < C; c++) {
                y[at] += (double)x[n * C + c] * w[c * O + o];
                dX[n * C + c] += 2.0 * dy[at] * w[c * O + o];
                dW[c * O + o] += 2.0 * dy[at] * x[n * C + c];
            }
        }
        const Tensor X = with_grad(x, {N, C}), W = with_grad(w, {C, O}), b = with_grad(bias, {O});
        const Tensor result = linear(X, W, b);
        backward_from({result, linear(X, W, b)}, {dy, dy});
        check_close(to_host(result), y, rounding(C));
        check_close(grad(X), dX, rounding(O));
        check_close(grad(W), dW, rounding(N));
        check_close(grad(b), db, rounding(N));
    }
}

TEST_CASE("conv2d: result and gradients") {
    // y[n,o,i,j] = b[o] + sum over c,u,v of X[n,c,i+u,j+v] * W[o,c,u,v]
    // clang-format off
    const Ints sizes[] = { // N C H W O K; the last two are LeNet's
        {1, 1, 1, 1, 1, 1}, {2, 1, 3, 3, 2, 3}, {2, 3, 4, 9, 3, 4}, {1, 3, 5, 7, 4, 3},
        {33, 1, 4, 6, 3, 2}, {3, 17, 5, 9, 33, 3}, {2, 50, 4, 3, 3, 1}, {1, 2, 7, 7, 50, 7},
        {0, 3, 5, 5, 4, 3}, {2, 1, 28, 28, 20, 3}, {2, 20, 13, 13, 50, 5}};
    // clang-format on
    for (const Ints &s : sizes) {
        CAPTURE(s);
        const int N = s[0], C = s[1], H = s[2], width = s[3], O = s[4], K = s[5];
        const int OH = H - K + 1, OW = width - K + 1, P = OH * OW, T = C * K * K;
        if (O * (N * P + T) > (no_training ? 300 : small_only ? 9000 : INT_MAX)) continue;
        const Floats x = random_floats(N * C * H * width, 1), w = random_floats(O * T, 2);
        const Floats bias = random_floats(O, 3), dy = random_floats(N * O * P, 4);
        Doubles y(N * O * P), dX(x.size()), dW(O * T), db(O);
        for (int at = 0; at < N * O * P; at++) {
            const int j = at % OW, i = at / OW % OH, o = at / P % O, n = at / P / O;
            y[at] = bias[o];
            db[o] += 2.0 * dy[at];
            for (int t = 0; t < T; t++) {
                const int v = t % K, u = t / K % K, c = t / K / K;
                const int from = ((n * C + c) * H + i + u) * width + j + v, weight = o * T + t;
                y[at] += (double)x[from] * w[weight];
                dX[from] += 2.0 * dy[at] * w[weight];
                dW[weight] += 2.0 * dy[at] * x[from];
            }
        }
        const Tensor X = with_grad(x, {N, C, H, width}), W = with_grad(w, {O, C, K, K});
        const Tensor b = with_grad(bias, {O}), result = conv2d(X, W, b);
        backward_from({result, conv2d(X, W, b)}, {dy, dy});
        CHECK(result.shape == Ints{N, O, OH, OW});
        check_close(to_host(result), y, rounding(T));
        check_close(grad(X), dX, rounding(O * K * K));
        check_close(grad(W), dW, rounding(N * P));
        check_close(grad(b), db, rounding(N * P));
    }
}

TEST_CASE("conv2d: sums of the whole minibatch are exact to 1e-6" * slow) {
    // LeNet's first convolution has 173,056 terms, here of one sign. Where X is 1, dW is db.
    const int N = 256, O = 2, plane = 26 * 26;
    const Tensor X = full({N, 1, 28, 28}, 1, gpu(0));
    const Tensor W = with_grad(random_floats(9 * O, 3), {O, 1, 3, 3});
    const Tensor b = with_grad(random_floats(O, 4), {O});
    Floats dy = random_floats(N * O * plane, 2);
    Doubles db(O), dW;
    for (int i = 0; i < N * O * plane; i++) {
        dy[i] = std::fabs(dy[i]);
        db[i / plane % O] += dy[i];
    }
    for (int i = 0; i < 9 * O; i++) dW.push_back(db[i / 9]);
    backward_from({conv2d(X, W, b)}, {dy});
    check_close(grad(W), dW, 1e-6);
    check_close(grad(b), db, 1e-6);
}

TEST_CASE("conv2d, linear, avg_pool2d, softmax_cross_entropy, add_, empty: what is refused") {
    auto t = [](const Ints &shape, Device device = gpu(0)) { return full(shape, 0, device); };
    // clang-format off
    const std::vector<Ints> shapes[] = { // X, W, b, of a convolution or of a dense layer
        {{1, 2, 5, 5}, {4, 3, 3, 3}, {4}}, {{1, 3, 5, 5}, {4, 3, 3, 2}, {4}},
        {{1, 3, 5, 5}, {4, 3, 3, 3}, {3}}, {{1, 3, 2, 5}, {4, 3, 3, 3}, {4}},
        {{1, 3, 5, 2}, {4, 3, 3, 3}, {4}}, {{3, 5, 5}, {4, 3, 3, 3}, {4}},
        {{1, 0, 5, 5}, {4, 0, 3, 3}, {4}}, {{2, 3}, {4, 5}, {5}}, {{2, 3}, {3, 5}, {4}},
        {{2, 3, 1, 1}, {3, 5}, {5}}, {{3, 2}, {2, 0}, {0}}};
    // clang-format on
    for (const auto &s : shapes) {
        const std::string got =
            " expected ... , got " + listed(Tensors{t(s[0]), t(s[1]), t(s[2])}, ", ");
        if (s[1].size() == 4) REFUSED(conv2d(t(s[0]), t(s[1]), t(s[2])), "conv2d:" + got);
        if (s[1].size() == 2) REFUSED(linear(t(s[0]), t(s[1]), t(s[2])), "linear:" + got);
    }
    REFUSED(avg_pool2d(t({1, 1, 2, 3}), 3, 3), "avg_pool2d: expected ... (1,1,2,3)");
    for (int K : {3, 0}) REFUSED(avg_pool2d(t({1, 1, 3, 3}), K, 2), "avg_pool2d: expected");
    REFUSED(add_(t({2, 3}), t({3, 2})), "add_: expected ... (2,3), (3,2)");
    REFUSED(softmax_cross_entropy(t({2, 3}), t({3})),
            "softmax_cross_entropy: expected ... (2,3), (3)");
    REFUSED(softmax_cross_entropy(t({2, 0}), t({2})), "softmax_cross_entropy: expected ... (2,0)");
    REFUSED(empty({-1, 3}, gpu(0)), "(-1,3) ... negative");
    REFUSED(empty({1 << 16, 1 << 15}, gpu(0)), "(65536,32768) ... use a smaller BATCH");
    const std::string apart = "gpu(0) and gpu(1), but must be on one device";
    REFUSED(conv2d(t({1, 1, 3, 3}), t({1, 1, 2, 2}, gpu(1)), t({1})), apart);
    REFUSED(linear(t({2, 3}), t({3, 4}), t({4}, gpu(1))), apart);
    REFUSED(softmax_cross_entropy(t({2, 3}), t({2}, gpu(1))), apart);
    REFUSED(add_(t({3}), t({3}, gpu(1))), apart);
    REFUSED(sgd({t({3}), get_params({t({3}, cpu())}, gpu(1))[0]}, 1, 1), apart);
    REFUSED(relu(t({2}, cpu())), "relu ... cpu"); // the host is no device to compute on
    REFUSED(avg_pool2d(t({1, 1, 2, 2}, cpu()), 2, 2), "avg_pool2d ... cpu");
}

TEST_CASE("blocks: a thread for each element, and at least one block") {
    const Ints got = {blocks(0), blocks(256), blocks(257), blocks(INT_MAX)};
    CHECK(got == Ints{1, 1, 2, 1 << 23});
    REFUSED(blocks(1l << 31), "BATCH");
}

// ---------------------------------------------------------------------------------------------
// 9. Autograd

// Return A + B, as an operator that a student might write.
static Tensor plus(const Tensor &A, const Tensor &B) {
    const Tensor y = copyto(A, A.device);
    add_(y, B);
    return record("plus", y, {A, B}, [=](const Tensor &dy) {
        for (const Tensor &X : {A, B}) {
            if (grad_of(X)) add_(*X.grad, dy);
        }
    });
}

TEST_CASE("backward: one tensor in several places of an operator, of a chain, of two passes") {
    // l = sum of X @ X: dX = ones @ X^T + X^T @ ones, for X = [[1, 2], [3, 4]]
    const Tensor X = with_grad({1, 2, 3, 4}, {2, 2}), zero = full({2}, 0, gpu(0));
    backward(linear(X, X, zero));
    CHECK(grad(X) == Floats{7, 11, 9, 13});
    backward(linear(relu(X), X, zero)); // relu's gradient is added to that of X
    CHECK(grad(X) == Floats{7, 11, 9, 13});
    // Two operators that share a weight alone, and a bias alone
    const Tensor V = with_grad({2}, {1, 1}), W = with_grad({3}, {1, 1});
    const Tensor x = full({1, 1}, 5, gpu(0)), b = with_grad({0}, {1}), c = with_grad({0}, {1});
    backward(plus(linear(x, V, b), linear(x, W, b)));
    CHECK(all_to_host({*V.grad, *W.grad, *b.grad}) == Floats{5, 5, 2});
    backward(plus(linear(x, W, b), linear(x, W, c)));
    CHECK(all_to_host({*W.grad, *b.grad, *c.grad}) == Floats{10, 1, 1});
    // A gradient of another pass stays when the result is used again
    const Tensor A = relu(with_grad({5}, {1})), y = plus(A, A);
    backward(y);
    backward(plus(y, y));
    CHECK(all_to_host({*A.grad, *y.grad}) == Floats{2, 2});
}

TEST_CASE("backward: a gradient's event stands behind its last write") {
    const Tensors p = get_params({arange(3)}, gpu(0));
    const Tensor y = plus(p[0], p[0]); // its backward is the last to write, after the stop
    record("stop", y, {p[0]}, [](const Tensor &) { stop(gpu(0)); });
    backward(plus(y, p[0]));
    usleep(50000);
    CHECK(cudaEventQuery(p[0].grad->written->handle) == cudaErrorNotReady);
    open_again = true;
    CHECK(grad(p[0]) == Floats{3, 3, 3});
    CHECK(cudaEventQuery(p[0].grad->written->handle) == cudaSuccess);
}

TEST_CASE("backward: only of what the result depends on; each device has its tape") {
    const Tensor X = with_grad({1, -1}, {2}), other = get_params({full({2}, 1, cpu())}, gpu(0))[0];
    const Tensor far = get_params({full({2}, 2, cpu())}, gpu(1))[0];
    const Tensor unused = relu(other), y0 = relu(X), y1 = relu(far);
    backward(y0);
    CHECK(all_to_host({*X.grad, *other.grad, *far.grad}) == Floats{1, 0, 0, 0, 0, 0});
    backward(y1);
    CHECK(grad(far) == Floats{1, 1});
    REFUSED(backward(y1), "backward: gpu(1) has no record of how this tensor was computed");
    REFUSED(backward(relu(full({2}, 1, gpu(1)))), "gpu(1)"); // nothing wants a gradient
    backward(relu(other)); // nothing is left over from the passes before
    CHECK(all_to_host({*X.grad, *other.grad}) == Floats{1, 0, 1, 1});
    const Tensor first = plus(X, X), second = relu(X);
    backward(first);
    const Tensor third = plus(X, X);
    REFUSED(backward(second), "each backward pass erases");
    backward(third); // is still there
    CHECK(grad(X) == Floats{2, 2});
}

TEST_CASE("NoGrad: nothing is recorded while one exists") {
    const Tensor X = with_grad({1, -1}, {2});
    {
        NoGrad guard;
        { NoGrad inner; }
        CHECK(relu(X).grad == nullptr);
    }
    backward(relu(X));
    CHECK(grad(X) == Floats{1, 0});
}

// ---------------------------------------------------------------------------------------------
// 10. Devices and memory

TEST_CASE("reshape: the same numbers and the same gradient") {
    const Tensor X = with_grad({0, 1, 2, 3, 4, 5}, {2, 3});
    CHECK(reshape(X, {3, 2}).shape == Ints{3, 2});
    CHECK(reshape(X, {-1}).shape == Ints{6});
    CHECK(reshape(X, {1, -1, 3}).shape == Ints{1, 2, 3});
    CHECK(reshape(X, {6, 1}).data == X.data);
    CHECK(reshape(empty({0, 50, 4, 4}, gpu(0)), {0, -1}).shape == Ints{0, 800});
    for (const Ints &wrong : {Ints{5, 2}, {4, -1}}) REFUSED(reshape(X, wrong), "reshape ... (2,3)");
    // Through a reshape of an operator's result and of a parameter
    backward_from({reshape(relu(X), {3, 2})}, {{1, 2, 3, 4, 5, 6}});
    CHECK(grad(X) == Floats{0, 2, 3, 4, 5, 6});
    backward(relu(reshape(X, {6})));
    CHECK(grad(X) == Floats{0, 1, 1, 1, 1, 1});
    CHECK(X.grad->shape == X.shape);
}

TEST_CASE("rows: a part of the numbers") {
    const Tensor X = copyto(reshape(arange(8), {4, 2}), gpu(1)), part = rows(X, 1, 3);
    CHECK(part.shape == Ints{2, 2});
    CHECK(to_host(part) == Floats{2, 3, 4, 5});
    fill(part, -1);
    CHECK(to_host(X) == Floats{0, 1, -1, -1, -1, -1, 6, 7});
    CHECK(to_host(rows(X, 4, 4)) == Floats());
    CHECK(to_host(rows(arange(3), 2, 3)) == Floats{2});
    CHECK(rows(with_grad({1, 2}, {2}), 0, 1).grad == nullptr); // which is that of all rows
    for (const Ints &wrong : {Ints{-1, 2}, {3, 2}, {1, 5}}) {
        REFUSED(rows(X, wrong[0], wrong[1]), "rows: cannot take rows ... of a tensor with 4 rows");
    }
}

TEST_CASE("empty, empty_cache: freed memory stays in the cache, of the stream that was current") {
    empty_cache();
    stream_of(gpu(1));
    size_t before, cached, after, total;
    REQUIRE(cudaMemGetInfo(&before, &total) == cudaSuccess);
    const float *first = empty({1 << 24}, gpu(1)).ptr(); // and at once free again
    REQUIRE(cudaMemGetInfo(&cached, &total) == cudaSuccess);
    CHECK(cached < before);
    CHECK(empty({1 << 24}, gpu(1)).ptr() == first);
    empty_cache();
    stream_of(gpu(1));
    REQUIRE(cudaMemGetInfo(&after, &total) == cudaSuccess);
    CHECK(after >= before);
    auto address = [](bool comm) {
        use_comm_streams(comm);
        const Tensor t = empty({12345}, gpu(0));
        use_comm_streams(!comm); // it is freed while the other stream is the current one
        return t.ptr();
    };
    const float *compute = address(false), *communication = address(true);
    CHECK(compute != communication);
    CHECK(address(false) == compute);
    CHECK(address(true) == communication);
    use_comm_streams(false);
}

TEST_CASE("try_gpu, error: a message is one line") {
    REFUSED(try_gpu(99), "there is no gpu(99): the program runs on ... devices");
    REFUSED(error("a\nb"), "a?b");
}

// ---------------------------------------------------------------------------------------------
// 11. Data and files

// Return a set whose sample i has the label i, and pixels that tell i as well.
static DataSet numbered_set(int count) {
    DataSet set;
    set.count = count;
    for (int i = 0; i < count; i++) set.labels.push_back(i);
    for (int p = 0; p < 784 * count; p++) set.images.push_back((p / 784 + p % 784) % 256);
    return set;
}

TEST_CASE("evaluate_accuracy_gpu: each sample counts once") {
    const DataSet set = numbered_set(10);
    // Return the accuracy of a network that finds these labels. -1: all classes have one score
    auto accuracy = [&](int batch, const Ints &found) {
        auto net = [&](const Tensor &X) {
            Floats y_hat(X.shape[0] * 10, -1.5f), pixels = to_host(X);
            for (int n = 0; n < X.shape[0]; n++) {
                const int label = found[std::lround(pixels[n * 784] * 255)];
                if (label >= 0) y_hat[n * 10 + label] = 2.5f;
            }
            CHECK(X.device.id == 1);
            CHECK(recording == false); // or the tapes would grow
            return on_device(y_hat, {X.shape[0], 10}, X.device);
        };
        DataIter iter = make_iter(set, batch, false);
        return evaluate_accuracy_gpu(net, iter, gpu(1));
    };
    for (int batch : {1, 3, 4, 10, 256}) {
        CHECK(accuracy(batch, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}) == 1.0f);
        CHECK(accuracy(batch, {0, 1, 2, 3, 4, 5, 6, 0, 0, 0}) == 0.7f);
        CHECK(accuracy(batch, {-1, -1, -1, 0, 0, 0, 0, 0, 0, 0}) == 0.1f); // the first class counts
    }
}

TEST_CASE("to_string: as NumPy prints") {
    const std::pair<Tensor, const char *> cases[] = {
        {full({3}, 0, cpu()), "[0. 0. 0.]"},
        {full({1, 2}, 3, gpu(1)), "[[3. 3.]] @gpu(1)"},
        {on_host({1, -10, 100}, {3}), "[  1. -10. 100.]"},
        {on_host({NAN, 0.5f, -INFINITY}, {3}), "[ nan      0.5 -inf  ]"},
        {on_host({0.5f, -1.25f}, {2}), "[ 0.5  -1.25]"},
        {reshape(arange(8), {2, 2, 2}), "[[[0. 1.]\n  [2. 3.]]\n\n [[4. 5.]\n  [6. 7.]]]"},
        {empty({0}, gpu(0)), "[] @gpu(0)"}};
    for (const auto &[t, text] : cases) CHECK(to_string(t) == text);
}

// --- data

TEST_CASE("load_idx: a wrong file is named, and what is wrong with it") {
    const TestFolder folder;
    const std::string path = folder.file("file"), images = idx_images(3), labels = idx_labels(3);
    const std::string pixels = images.substr(16),
                      no_images = " is not an IDX file of images (is it still ";
    const struct {
        int dims;
        std::string bytes, says;
    } cases[] = {
        {3, "", no_images},
        {3, labels, no_images},
        {1, images, " is not an IDX file of labels (is it still compressed?)"},
        {3, idx({0x03080000, 3, 28, 28}, pixels), no_images}, // the bytes reversed
        {3, "\x1f\x8b" + images, no_images},
        {3, idx({2051, 3, 27, 28}, pixels), " has images of 27x28 pixels, not 28x28"},
        {3, idx({2051, 3, 28, 29}, pixels), " has images of 28x29 pixels, not 28x28"},
        {3, idx({2051, 0, 28, 28}, ""), " is damaged: 0 images take 16 bytes, but it has 16"},
        {1, labels + "x", " is damaged: 3 labels take 11 bytes, but it has 12"},
        {3, images.substr(0, 2367), " is damaged: 3 images take 2368 bytes, but it has 2367"},
        {1, idx({2049, 4294967295}, labels),
         " is damaged: 4294967295 labels take 4294967303 bytes, but it has 19"}};
    for (const auto &c : cases) {
        write_text(path, c.bytes);
        REFUSED(load_idx(path, c.dims), path + c.says);
    }
    REFUSED(load_idx(folder.path, 1), "cannot read " + folder.path + ": Is a directory");
    REFUSED(load_idx(path + "x", 1), "cannot read " + path + "x: No such file or directory");
}

TEST_CASE("load_data: the files' bytes, of the first samples with LIMIT; or what is wrong") {
    const TestFolder folder;
    Kept kept;
    const std::string path = folder.path, images = path + train_images;
    const std::string labels = path + train_labels;
    REFUSED(load_data(path, "train"), images + ": No such file or directory: `make data DATA=" +
                                          path + "` unpacks an archive of it");
    write_data(path, 17, 3);
    for (int limit : {0, 1, 200}) {
        options.limit = limit;
        const DataSet set = load_data(path, "train");
        CHECK(set.count == (limit == 1 ? 1 : 17));
        CHECK(std::string(set.images.begin(), set.images.end()) == idx_images(17).substr(16));
        CHECK(std::string(set.labels.begin(), set.labels.end()) == idx_labels(17).substr(8));
        CHECK(load_data(path, "t10k").count == (limit == 1 ? 1 : 3));
    }
    write_text(labels, idx({2049, 17}, std::string(16, 9) + char(10)));
    REFUSED(load_data(path, "train"), labels + ": label 10 is not from 0 to 9");
    write_text(labels, idx_labels(4));
    REFUSED(load_data(path, "train"), labels + " has 4 labels, but " + images + " has 17 images");
}

// Return the labels of one epoch in their order, after checks of its minibatches. They are read
// when the epoch is over, because a device may read the last of them as late as that.
static Floats epoch_of(DataIter &iter, const Ints &sizes) {
    Ints got;
    Tensors images, labels;
    for (const auto &[X, y] : iter.epoch()) {
        got.push_back(X.shape[0]);
        images.push_back(X);
        labels.push_back(y);
    }
    CHECK(got == sizes);
    const Floats y = all_to_host(labels);
    Floats pixels(784 * y.size());
    for (size_t p = 0; p < pixels.size(); p++) {
        pixels[p] = ((int)y[p / 784] + p % 784) % 256 / 255.0f;
    }
    CHECK(all_to_host(images) == pixels);
    return y;
}

TEST_CASE("DataIter: every sample once an epoch, shuffled anew, the same for the same seed") {
    // clang-format off
    const std::vector<Ints> cases[] = { // samples, batch size; the sizes of the minibatches
        {{10, 4}, {4, 4, 2}}, {{12, 4}, {4, 4, 4}}, {{10, 10}, {10}}, {{3, 256}, {3}},
        {{3, 1}, {1, 1, 1}}, {{100, 64}, {64, 36}}};
    // clang-format on
    for (const auto &c : cases) {
        CAPTURE(c[0]);
        const DataSet set = numbered_set(c[0][0]);
        const Floats file = to_host(arange(set.count)); // in its order
        DataIter plain = make_iter(set, c[0][1], false);
        std::vector<Floats> epochs;
        for (int seed : {5, 5, 6}) {
            rng.seed(seed);
            DataIter iter = make_iter(set, c[0][1], true);
            for (int epoch : {0, 1}) {
                CAPTURE(epoch);
                CHECK(epoch_of(plain, c[1]) == file);
                epochs.push_back(epoch_of(iter, c[1]));
                Floats sorted = epochs.back();
                std::sort(sorted.begin(), sorted.end());
                CHECK(sorted == file);
            }
        }
        CHECK(epochs[2] == epochs[0]);
        CHECK(epochs[3] == epochs[1]);
        if (set.count < 100) continue;
        for (const Floats &other : {file, epochs[1], epochs[4]}) CHECK(epochs[0] != other);
    }
}

TEST_CASE("load_data_fashion_mnist: the training set, which is shuffled, and the test set") {
    const auto [train_iter, test_iter] = load_data_fashion_mnist(4);
    CHECK(train_iter.set == &train_set);
    CHECK(train_iter.shuffle == true);
    CHECK(test_iter.set == &test_set);
    CHECK(test_iter.shuffle == false);
}

TEST_CASE("DataIter, number_of_epochs: STEPS ends the last epoch early") {
    Kept kept;
    const DataSet set = numbered_set(10);
    options.epochs = 3;
    DataIter iter = make_iter(set, 4, false, 5); // minibatches of 4, 4 and 2 samples
    CHECK(iter.steps() == 3);
    CHECK(number_of_epochs(iter) == 2);
    CHECK(iter.epoch().size() == 3);
    CHECK(iter.epoch().size() == 2);
    CHECK(iter.epoch().size() == 0);
    for (auto [steps, epochs] : {std::pair(6, 2), {7, 3}, {700, 3}, {INT_MAX, 3}}) {
        CHECK(number_of_epochs(make_iter(set, 4, false, steps)) == epochs);
    }
}

// --- timing and progress

TEST_CASE("Timer: the mean over the pairs of start and stop") {
    Timer timer;
    const double begin = now();
    timer.start();
    usleep(20000);
    timer.stop();
    CHECK(timer.times[0] >= 0.02);
    CHECK(timer.times[0] <= now() - begin);
    timer.times = {1, 2, 6};
    CHECK(timer.avg() == 3);
    CHECK(Timer().avg() == 0);
}

// Return the losses of a minibatch as they lie on the devices.
static Tensors losses_on(const std::vector<Floats> &shards) {
    Tensors ls;
    for (const Floats &l : shards) {
        ls.push_back(on_device(l, {(int)l.size()}, gpu(ls.size())));
    }
    return ls;
}

// A folder for the Animator's log, for the duration of a test.
struct LogFolder : TestFolder, Kept {
    LogFolder() { ::options.log = file("new folder/log.csv"); }
};

TEST_CASE("Animator: a row an epoch, the same in the log; the mean loss of all its samples") {
    LogFolder folder;
    options.gpus = 3;
    options.allreduce = "yours";
    options.lr = 0.5;
    auto epochs = [] {
        Animator animator(3);
        const Tensors late = losses_on({{10, 20}, {30}, {0}});
        animator.add_losses(losses_on({{1, 2}, {3}, {4}}));
        animator.add_losses(late);
        fill(late[2], 50);                             // losses are read when they are needed
        animator.add_losses(losses_on({{7}, {}, {}})); // the epoch's last minibatch: idle devices
        animator.add(1, 0.1f, 1.25);
        animator.add_losses(losses_on({{8}, {16}, {}})); // the next epoch, stopped after a step
        animator.add(12, 0.8215f, 123.456);
    };
    CHECK(printed(epochs) == "epoch      loss  test acc   seconds\n"
                             "    1   14.1111    0.1000      1.25\n"
                             "   12   12.0000    0.8215    123.46\n");
    CHECK(read_text(options.log) == "epoch,loss,test_acc,seconds,model,gpus,allreduce,lr\n"
                                    "1,14.111111,0.1000,1.2500,lenet,3,yours,0.5\n"
                                    "12,12.000000,0.8215,123.4560,lenet,3,yours,0.5\n");
    options.log = folder.path;
    REFUSED(Animator(1), "cannot write " + folder.path + ": Is a directory");
}

TEST_CASE("Animator: on a terminal, a line ten times a second at most, wiped away before the row") {
    LogFolder folder;
    auto epoch = [] {
        Animator animator(40);
        animator.began -= 1000; // some images/s that are known
        for (int i = 0; i < 40; i++) animator.add_losses(losses_on({{1, 2}, {i == 0 ? 6.f : 3}}));
        animator.add(1, 0, 1);
    };
    const std::string drawn = printed(epoch, true);
    CHECK(drawn.substr(drawn.rfind("\r   40/40")) ==
          "\r   40/40 [==============================]  loss 2.0250  0 images/s  0 s left\033[K"
          "\r\033[Kepoch      loss  test acc   seconds\n    1    2.0250    0.0000      1.00\n");
    CHECK(std::count(drawn.begin(), drawn.end(), '\r') < 20);
}

TEST_CASE("Animator: a loss that is no number ends the run") {
    LogFolder folder;
    options.lr = 0.5f;
    for (float bad : {NAN, INFINITY, -INFINITY}) {
        Animator animator(4);
        animator.Y = {0, 0, 0}; // three epochs are done
        for (float x : {4.0f, bad, 4.0f}) animator.add_losses(losses_on({{1, 2}, {3, x}}));
        REFUSED(animator.add(4, 0, 0), "in step 2 of epoch 4: use a smaller LR than 0.5");
    }
}

// --- files

TEST_CASE("write_file: all or nothing") {
    const TestFolder folder;
    const std::string path = folder.file("a/b/file");
    for (const std::string &text : {std::string("0\0\xff\n", 4), std::string("shorter")}) {
        write_file(path, text);
        CHECK(read_text(path) == text);
    }
    const auto before = folder.listing();
    REFUSED(write_file(folder.file("a/b"), ""), "a/b: Is a directory");
    REFUSED(write_file("/proc/none/file", ""), "cannot write /proc/none/file: ");
    // A disk that is full in the midst of it: here, a limit on the size of files
    rlimit limit;
    REQUIRE(getrlimit(RLIMIT_FSIZE, &limit) == 0);
    const rlimit small = {10000, limit.rlim_max};
    signal(SIGXFSZ, SIG_IGN);
    REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
    const std::string said = error_of([&] { write_file(path, std::string(100000, 'x')); });
    setrlimit(RLIMIT_FSIZE, &limit);
    signal(SIGXFSZ, SIG_DFL);
    CHECK(said == "cannot write " + path + ": File too large");
    CHECK(read_text(path) == "shorter");
    CHECK(folder.listing() == before);
}

static std::string bytes_of(const Floats &numbers) {
    return {(const char *)numbers.data(), numbers.size() * sizeof(float)};
}

static std::string safetensors(const std::string &header, const std::string &numbers) {
    return char(header.size()) + std::string(7, 0) + header + numbers;
}

static const Floats a = {-0.0f, INFINITY, 1e-45f, 4, 5, 6};

// The header of a file with the tensors a1 and b
static const std::string plain = R"({"a1":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
                                 R"("b":{"dtype":"F32","shape":[2],"data_offsets":[24,32]}})";

TEST_CASE("save_safetensors: the format's bytes") {
    const TestFolder folder;
    Kept kept;
    const std::string path = folder.file("a.safetensors");
    param_names = {"b", "a1"};
    Floats b = {7, 0};
    memcpy(&b[1], "\x45\x23\xc1\xff", 4); // a NaN with bits of its own
    save_safetensors(path, {on_device(b, {2}, gpu(1)), on_device(a, {2, 3}, gpu(1))});
    const std::string header = plain + "       "; // its size is a multiple of 8
    CHECK(read_text(path) == safetensors(header, bytes_of(a) + bytes_of(b)));
}

// Load tensors b and a1 from a file of these bytes. Return their bytes, or the error.
static std::string loaded(const std::string &bytes) {
    const TestFolder folder;
    Kept kept;
    param_names = {"b", "a1"};
    const Tensors got = {full({2}, 0, cpu()), full({2, 3}, 0, cpu())};
    write_text(folder.file("f"), bytes);
    const std::string error = error_of([&] { load_safetensors(folder.file("f"), got); });
    return error.empty() ? bytes_of(all_to_host(got)) : error.substr(folder.file("f").size());
}

TEST_CASE("load_safetensors: files of any writer") {
    const std::string b = bytes_of({7, 8}), numbers = bytes_of(a) + b, rest = plain.substr(1);
    // The header and the numbers
    const std::pair<std::string, std::string> files[] = {
        {plain + "   ", numbers}, // padding
        {R"({"__metadata__":{"format":"pt","x":"{\"b\":{\"dtype\":\"F64\"}}"},)" + rest, numbers},
        {plain.substr(0, plain.size() - 1) + R"(,"__metadata__":{"b":"}{"}})", numbers},
        {R"({ "b" : { "data_offsets" : [ 0, 8 ], "shape" : [ 2 ], "dtype" : "F32" },)"
         "\n\t"
         R"("a1": {"shape": [2, 3], "dtype": "F32", "data_offsets": [8, 32]}})",
         b + bytes_of(a)},
        {R"({"momentum":{"dtype":"F16","shape":[1],"data_offsets":[32,34]},)" + rest,
         numbers + "ab"}}; // a tensor more
    for (const auto &file : files) {
        CAPTURE(file.first);
        CHECK(loaded(safetensors(file.first, file.second)) == b + bytes_of(a));
    }
}

TEST_CASE("load_safetensors: the error names the tensor") {
    const std::string numbers = bytes_of(a) + bytes_of({7, 8});
    // A text of the header that becomes another one
    const std::array<std::string, 3> cases[] = {
        {"\"b\":", R"("__metadata__":{"x":"{\"b\":{\"y\":1}}"},"fc.bias":)",
         ": b is missing: lenet needs b, a1. The file has a1, fc.bias"},
        {plain, "{}", ": b is missing: lenet needs b, a1. The file has "},
        {"F32", "BF16", ": a1 is BF16 [2,3], but lenet needs F32 [2,3]"},
        {"[2,3]", "[3,2]", ": a1 is F32 [3,2], but lenet needs F32 [2,3]"},
        {"[2]", "[]", ": b is F32 [], but lenet needs F32 [2]"},
        {"[24,32]", "[24,28]", ": b: its 8 bytes are not at data_offsets [24,28]"},
        {"[24,32]", "[28,36]", ": b: its 8 bytes are not at data_offsets [28,36]"},
        {plain, "", " is not a .safetensors file"}};
    for (const auto &[from, to, says] : cases) {
        std::string header = plain;
        CHECK(loaded(safetensors(header.replace(header.find(from), from.size(), to), numbers)) ==
              says);
    }
    std::mt19937 random(1);
    for (int i = 0; i < 200; i++) { // whatever a changed byte causes, it is no crash
        std::string bytes = safetensors(plain, numbers);
        CHECK(loaded(bytes.substr(0, 8 + random() % plain.size())) ==
              " is not a .safetensors file");
        bytes[random() % (8 + plain.size())] = random();
        loaded(bytes);
    }
}

// ---------------------------------------------------------------------------------------------
// 12. Checks

// Return what check_first_step prints, or the error that it throws, of a step that `spoil` has
// changed.
static std::string first_step(int k, int n, const std::function<void(Training &)> &spoil = {}) {
    const auto [X, y] = minibatch(n, 3);
    Training training(k, params);
    const PerDevice &p = training.device_params;
    const Tensors ls = train_batch(X, y, p, training.devices, options.lr);
    if (spoil) spoil(training);
    return printed([&, X = X, y = y] {
        printf("%s", error_of([&] { check_first_step(X, y, ls, p, options.lr); }).c_str());
    });
}

TEST_CASE("check_first_step: a right step passes, for each seed and device count" * trains) {
    Kept kept;
    const std::string right = " devices agree with one (largest difference ";
    for (int k : {1, 2, 5}) {
        INFO("k ", k);
        if (small_only && k != 2) continue;
        set_model("lenet", k); // k is the seed too
        const std::string says = k == 1 ? "first minibatch: the update is right" : str(k) + right;
        for (int n : {1, 7}) check_says(first_step(k, n), says);
    }
    for (const std::string &name : right_algorithms) {
        if (small_only && name != "ring") continue;
        exchange = exchange_by(name, true);
        check_says(first_step(3, 4), right);
    }
    options.split = {3, 1};
    for (float lr : {1e-6f, 50.0f}) {
        options.lr = lr;
        check_says(first_step(2, 7), right);
    }
    // Equal weights: equal logits, large ones, and gradients that are 0, perhaps but for rounding
    for (float weight : {0.1f, 10.0f, 0.0f}) {
        CAPTURE(weight);
        for (int i : {0, 2, 4, 6}) params[i] = full(params[i].shape, weight, cpu());
        check_says(first_step(2, 16), right);
    }
}

TEST_CASE("check_first_step: a wrong gradient or update is named, with both numbers" * slow) {
    Kept kept;
    set_model("lenet", 0);
    const int n = 6;
    // Of devices first ... 1, multiply the gradient of b4 and its update
    auto spoiled = [&](int first, float gradient, float update) {
        return first_step(2, n, [=](Training &t) {
            for (int c = first; c < 2; c++) {
                const Tensor &b4 = t.device_params[c][7];
                Floats grads = grad(b4), moved = to_host(params[7]);
                for (int j = 0; j < 10; j++) {
                    grads[j] *= gradient;
                    moved[j] -= update * options.lr * grads[j] / n;
                }
                copyto(on_host(grads, {10}), *b4.grad);
                copyto(on_host(moved, {10}), b4);
            }
        });
    };
    for (int first : {0, 1}) { // both devices, or the second alone
        const std::string says =
            format(" of b4[0] on gpu(%d) is ... , not ... : `make check`", first);
        for (float gradient : {0.5f, 2.0f, -1.0f, 0.0f, 1.005f, NAN}) {
            CAPTURE(gradient);
            check_says(spoiled(first, gradient, 1), "the first minibatch: the gradient" + says);
        }
        for (float update : {6.0f, 2.0f, 1 / 6.0f, 0.2f, 0.0f, -1.0f, 0.999f}) {
            CAPTURE(update);
            check_says(spoiled(first, 1, update), "the first minibatch: the update" + says);
        }
    }
    check_says(spoiled(0, 1, 1), "first minibatch: 2 devices agree");
    auto one = [](Training &t) { fill(rows(*t.device_params[1][7].grad, 2, 3), 7); };
    check_says(first_step(2, n, one), "the gradient of b4[2] on gpu(1) is 7, not ");
    REFUSED(check_first_step(full({6, 1}, 0, cpu()), {}, {full({3}, 1, gpu(0))}, {{}, {}}, 1),
            "has 6 samples, but the devices' shards have 3 in total: `make");
}

TEST_CASE("check_replicas: one changed number is named") {
    Kept kept;
    set_model("lenet", 0);
    params[0].requires_grad = false; // a running statistic may differ
    const PerDevice device_params = Training(3, params).device_params;
    fill(device_params[1][0], 7);
    check_replicas(device_params);
    fill(rows(device_params[2][3], 17, 18), -0.0f); // equal to 0, but not the same bits
    REFUSED(check_replicas(device_params), "b2[17] is 0 on gpu(0) but -0 on gpu(2)");
    fill(rows(reshape(device_params[1][4], {-1}), 102399, 102400), 1);
    REFUSED(check_replicas(device_params), "W3[102399] ... gpu(1)");
    options.replica_check = false;
    check_replicas(device_params);
}

// ---------------------------------------------------------------------------------------------
// 13. Program

// Return the words of a line, which are divided by single spaces.
static std::vector<std::string> words_of(const std::string &line) {
    std::vector<std::string> words;
    std::istringstream stream(line);
    for (std::string word; std::getline(stream, word, ' ');) words.push_back(word);
    return words;
}

// Set the options of a command line, from the defaults on. Return the error, or "".
static std::string parse(const std::string &line) {
    std::vector<std::string> words = words_of("mgpu " + line);
    std::vector<char *> argv;
    for (std::string &word : words) argv.push_back(&word[0]);
    argv.push_back(nullptr);
    options = Options();
    return error_of([&] { parse_options(words.size(), argv.data()); });
}

TEST_CASE("parse_options: each option sets what it names; else the chapter's values hold") {
    Kept kept;
    const std::pair<std::string, std::string> cases[] = {
        {"", "1 256 10 0.2 lenet naive, 0 0 0 (), 1 0 1 1 1, data . . build/log.csv"},
        {"GPUS=3 BATCH=64 EPOCHS=7 LR=1e-3 MODEL=lenet ALLREDUCE=yours STEPS=5 LIMIT=9 SEED=12 "
         "SPLIT=3,1,12 SHUFFLE=0 OVERLAP=1 FIRST_CHECK=0 PEERS=0 DATA=d INIT=i SAVE=s LOG=l=1.csv",
         "3 64 7 0.001 lenet yours, 5 9 12 (3,1,12), 0 1 0 1 0, d i. s. l=1.csv"},
        {"REPLICA_CHECK=0 STEPS=0 LIMIT=0 SHUFFLE=1 GPUS=64",
         "64 256 10 0.2 lenet naive, 0 0 0 (), 1 0 0 0 1, data . . build/log.csv"}};
    for (const auto &[line, want] : cases) {
        CHECK(parse(line) == "");
        const Options &o = options;
        CHECK(format("%d %d %d %g %s %s, %d %d %d %s, %d %d %d %d %d, %s %s. %s. %s", o.gpus,
                     o.batch, o.epochs, o.lr, o.model.c_str(), o.allreduce.c_str(), o.steps,
                     o.limit, o.seed, str(o.split).c_str(), o.shuffle, o.overlap, o.first_check,
                     o.replica_check, o.peers, o.data.c_str(), o.init.c_str(), o.save.c_str(),
                     o.log.c_str()) == want);
        CHECK(given("SEED") == contains(line, "SEED"));
    }
    for (const Algorithm &a : algorithms) CHECK(parse(std::string("ALLREDUCE=") + a.name) == "");
}

TEST_CASE("parse_options: help names all options, and their defaults") {
    const TestFolder folder;
    Kept kept;
    const std::string help = output_of(folder, "help");
    for (const char *line : {"GPUS=2 help", "--help", "-h"}) {
        CHECK(printed([&] { CHECK(parse(line) == ""); }) == help);
    }
    for (const Option &o : option_table) check_parts(help, "\n  " + std::string(o.name) + " ");
    check_parts(help, "(1) ... (lenet) ... (256) ... (0.2) ... (10) ... (naive) ... (data)");
    std::istringstream lines(help);
    for (std::string line; std::getline(lines, line);) CHECK(line.size() <= 100);
    fails(folder, "help > /dev/full", "cannot write to stdout");
    CHECK(folder.listing() == std::set<std::string>());
}

TEST_CASE("parse_options: a wrong value is refused, and the message says what was expected") {
    Kept kept;
    // Options, their values
    const std::array<std::string, 3> cases[] = {
        {"GPUS BATCH EPOCHS STEPS LIMIT SEED", "-1 99999999999 1e30 abc 1.5 2x nan -0.5",
         ": expected a whole number from "},
        {"GPUS BATCH EPOCHS", "0", ": expected a whole number from 1 to "},
        {"GPUS", "65", ": expected a whole number from 1 to 64"},
        {"BATCH", "60001", ": expected a whole number from 1 to 60000"},
        {"OVERLAP SHUFFLE FIRST_CHECK REPLICA_CHECK PEERS", "2 yes 01 -1", ": expected 0 or 1"},
        {"LR", "nan inf -inf 0 -1 -0.0 1e999 1e-999 0.1x 0,2",
         ": expected a number from 1e-30 to 1e+30"},
        {"SPLIT", ",1 a 3;1 0,1 3,-1 1001,1 1,,2 9999999999,1",
         ": expected whole numbers from 1 to 1000"},
        {"MODEL", "vgg two\nlines", " is unknown: choose one of lenet"},
        {"ALLREDUCE", "magic", " is unknown: choose one of naive, bucket, ... yours"},
        {"GPU GUPS gpus NUM_GPUS --gpus", "2", " is not an option: did you mean GPUS=2?"},
        {"BATCH_SIZE Batch --batch-size", "64", " is not an option: did you mean BATCH=64?"},
        {"EPOCH", "3", " is not an option: did you mean EPOCHS=3?"},
        {"lr", "0.1", " is not an option: did you mean LR=0.1?"},
        {"COLOUR NCCL_DEBUG", "red", " is not an option: options have the form NAME=value"}};
    for (const auto &[names, values, says] : cases) {
        for (const std::string &name : words_of(names)) {
            for (const std::string &value : words_of(values)) {
                const std::string word = name + "=" + value;
                check_says(parse(word), word.substr(0, word.find('\n')) + " ... " + says);
            }
        }
    }
    CHECK(parse("") == ""); // nothing is left of what went wrong
}

TEST_CASE("parse_options: words that do not go together, and words that are no option") {
    Kept kept;
    const std::pair<std::string, std::string> cases[] = {
        {"GPUS=2 BATCH=1", "batch 1 cannot be split over 2 devices: use BATCH >= 2"},
        {"SPLIT=3,1", "SPLIT has 2 parts, but there are 1 devices: use GPUS=2"},
        {"GPUS=2 GPUS=2", "GPUS is given twice"},
        {"GPUS", "GPUS has no value: write GPUS=value"},
        {"LOG= SEED=1", "LOG has no value: write LOG=value"},
        {"--gpus 2", "--gpus is not an option: did you mean GPUS=value?"},
        {"--first-check=0 LR=1", "--first-check=0 is not an option: did you mean FIRST_CHECK=0?"},
        {"-g 2", "-g is not an option: options have the form NAME=value, see `make help`"},
        {"GPUS=2 more", "more is not an option: options have the form NAME=value, see `make help`"},
        {"=2", "=2 is not an option: options have the form NAME=value, see `make help`"}};
    for (const auto &[line, says] : cases) check_says(parse(line), says);
}

const int few = small_only ? 8 : 16; // training images

// Train as the arguments say. Return a hash of the parameters that the program has saved.
static size_t trained(const TestFolder &folder, const std::string &arguments,
                      const std::string &environment = "", const std::string &prints = "") {
    check_parts(output_of(folder, "GPUS=2 LOG=log.csv SAVE=params " + arguments, environment),
                prints);
    const std::string bytes = read_text(folder.file("params"));
    REQUIRE(bytes.size() > 4 * 129068);
    return std::hash<std::string>()(bytes);
}

TEST_CASE("program: the demos, a table of the epochs, the tutorial's last line, the log" * trains) {
    DataFolder folder(few, few / 4);
    const std::string out = output_of(folder, "GPUS=3 BATCH=8 EPOCHS=2 LOG=log.csv");
    const std::string zeros =
        "[0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0.] @gpu(0)\n";
    const std::string demos =
        "b1 weight: " + zeros + "b1 grad: " + zeros +
        "before allreduce:\n [[1. 1.]] @gpu(0)\n [[2. 2.]] @gpu(1)\n [[3. 3.]] @gpu(2)\n"
        "after allreduce:\n [[6. 6.]] @gpu(0)\n [[6. 6.]] @gpu(1)\n [[6. 6.]] @gpu(2)\n"
        "input :\n [[ 0.  1.  2.  3.  4.]\n [ 5.  6.  7.  8.  9.]\n [10. 11. 12. 13. 14.]\n"
        " [15. 16. 17. 18. 19.]]\nload into [gpu(0), gpu(1), gpu(2)]\noutput:\n"
        " [[0. 1. 2. 3. 4.]\n [5. 6. 7. 8. 9.]] @gpu(0)\n [[10. 11. 12. 13. 14.]] @gpu(1)\n"
        " [[15. 16. 17. 18. 19.]] @gpu(2)\nfirst minibatch: 3 devices agree with one ";
    REQUIRE(out.find("b1 weight: ") < out.size());
    CHECK(out.substr(out.find("b1 weight: "), demos.size()) == demos);
    auto digits = [](std::string text) { // become 0
        for (char &c : text) c = isdigit(c) ? '0' : c;
        return text;
    };
    CHECK(digits(out.substr(out.find("epoch "))) ==
          "epoch      loss  test acc   seconds\n    0    0.0000    0.0000      0.00\n"
          "    0    0.0000    0.0000      0.00\ntest acc: 0.00, 0.0 sec/epoch on "
          "[gpu(0), gpu(0), gpu(0)]\n");
    CHECK(
        digits(read_text(folder.file("log.csv"))) ==
        "epoch,loss,test_acc,seconds,model,gpus,allreduce,lr\n"
        "0,0.000000,0.0000,0.0000,lenet,0,naive,0.0\n0,0.000000,0.0000,0.0000,lenet,0,naive,0.0\n");
    CHECK(out.find_first_of("\r\033") == std::string::npos);
}

TEST_CASE("program: trainings that give the same bits, and others" * trains) {
    DataFolder folder(few, few / 4);
    const std::string half = format("SHUFFLE=0 BATCH=%d ", few / 2); // of an epoch
    const size_t first = trained(folder, half + "EPOCHS=1");
    const size_t second = trained(folder, half + "EPOCHS=1 SEED=9 INIT=params");
    CHECK(second == trained(folder, half + "STEPS=4 EPOCHS=9"));
    CHECK(second != first);

    const std::string steps = format("BATCH=%d STEPS=%d EPOCHS=2 ", few / 2 - 1, few / 4 + 2);
    const size_t want = trained(folder, steps);
    CHECK(trained(folder, steps + "SEED=0") == want);
    CHECK(trained(folder, steps + "SEED=1") != want);
    CHECK(trained(folder, steps + "SHUFFLE=0") != want);
    CHECK(trained(folder, steps + "ALLREDUCE=ring OVERLAP=1") == want);
#ifdef CUDA_CPU
    CHECK(trained(folder, steps, "export CUDA_CPU_PEERS=0;", "; staged: gpu(1)\n") == want);
    const std::string shared = "notice: 2 logical devices share 1 GPU, each with its own memory";
    CHECK(trained(folder, steps, "CUDA_CPU_DEVICES=1", shared + " ... ; same GPU as: gpu(1)\n") ==
          want);
#endif
    if (small_only) return;
    CHECK(trained(folder, steps + "ALLREDUCE=host") == want);
    CHECK(trained(folder, steps + "ALLREDUCE=by_tensor") == want);
}

// Make the mistake of the chapter's older PyTorch text: data[c] = ... puts the sum into the list
// alone.
static void allreduce_rebind(const PerDevice &grads) {
    for (size_t i = 0; i < grads[0].size(); i++) {
        Tensors data = column(grads, i);
        for (size_t c = 1; c < data.size(); c++) add_(data[0], copyto(data[c], data[0].device));
        for (size_t c = 1; c < data.size(); c++) data[c] = copyto(data[0], data[c].device);
    }
}

TEST_CASE("program: a wrong allreduce is caught by the first step, by the replicas" * trains) {
    DataFolder folder(few, few / 4);
    const std::string rebind = "GPUS=2 BATCH=8 EPOCHS=1 LOG=log.csv ALLREDUCE=rebind ";
    const std::string first = fails(folder, rebind,
                                    "the first minibatch: the gradient of W1[0] on gpu(1) is ... "
                                    "`make check` looks for the cause");
    const std::string later = fails(folder, rebind + "FIRST_CHECK=0", "the replicas differ: W1[");
    CHECK(first.find("test acc:") == std::string::npos);
    CHECK(later.find("test acc:") == std::string::npos);
    check_parts(output_of(folder, rebind + "REPLICA_CHECK=0"), "test acc:");
}

// There is one mistake for each function that finds some. Those functions have tests of their own.
TEST_CASE("program: a mistake gives one line, status 1 and leaves nothing behind") {
    DataFolder folder(8, 4);
    write_text(folder.file("garbage"), "this is no file of parameters");
    std::filesystem::copy(folder.file("data"), folder.file("short"));
    write_text(folder.file("short") + train_images, idx_images(8).substr(0, 1000));
    std::vector<std::pair<std::string, std::string>> cases = {
        {"GPUS=0", "GPUS=0: expected a whole number from 1 to 64"},
        {"BATCH=1 GPUS=2", "batch 1 cannot be split over 2 devices: use BATCH >= 2"},
        {"DATA=missing", "missing" + train_images + ": No such file"},
        {"DATA=short", "short" + train_images + " is damaged: 8 images take"},
        {"SAVE=/proc/none/s", "cannot write /proc/none/s."},
        {"SAVE=data", "SAVE=data is a folder, not a file"},
        {"LOG=data SAVE=s", "cannot write data: Is a directory"},
        {"INIT=garbage", "garbage is not a .safetensors file"}};
    // The first step makes the parameters huge, the second their loss
    const std::string huge = "BATCH=4 LR=1e30 FIRST_CHECK=0 SAVE=s";
    if (!no_training) cases.push_back({huge, "in step 2 of epoch 1: use a smaller LR"});
    for (const auto &[arguments, says] : cases) {
        const auto before = folder.listing();
        const std::string log = contains(arguments, "LOG=") ? "" : "LOG=log.csv ";
        fails(folder, log + arguments, "... " + says);
        std::filesystem::remove(folder.file("log.csv"));
        CHECK(folder.listing() == before);
    }
#ifdef CUDA_CPU
    if (small_only) return;
    write_data(folder.file("data"), 2000, 4);
    fails(folder, "BATCH=2000 GPUS=2 LOG=l",
          " ... is out of memory: ... MB are free: use a smaller BATCH", "CUDA_CPU_MEMORY=8");
#endif
}

int main(int argc, char **argv) {
    // Memory that is freed is used again: a fresh page costs the kernel as much as a test of it
    mallopt(M_MMAP_MAX, 0);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    if (argc > 1 && strcmp(argv[1], "--program") == 0) {
        algorithms.push_back({"rebind", allreduce_rebind});
        return mgpu_main(argc - 1, argv + 1);
    }
    return tests_main(argc, argv);
}
#endif
