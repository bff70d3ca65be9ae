// Tests of mgpu.cu, against plain loops in double and against what the tutorial promises.
//
//     make test                       all of them
//     make test T='-tc=allreduce*'    one function's: a test's name starts with what it tests
//     make asan, make race            the same under AddressSanitizer and ThreadSanitizer
//
// The sections follow mgpu.cu's. The CPU stand-in has tests of its own, cpu/tests.cu.

// Other folders' tests define TESTS_SHARED to take what the cases share, and no case, from here.
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

#include <fstream>
#include <iterator>
#include <set>
#include <sstream>

#include <fcntl.h>
#include <malloc.h>
#include <sys/resource.h>
#include <sys/wait.h>

// Under a sanitizer, which is up to 300 times slower, the larger cases are made smaller. Under
// ThreadSanitizer, or lane by lane under AddressSanitizer, a training takes longer than all other
// tests; `make race` runs one anyway.
#if defined(CUDA_CPU_TSAN) || (defined(CUDA_CPU_ASAN) && defined(MGPU_LANES))
constexpr bool small_only = true, no_training = true;
#elif defined(CUDA_CPU_ASAN)
constexpr bool small_only = true, no_training = false;
#else
constexpr bool small_only = false, no_training = false;
// The tests' time goes to mgpu.cu: without optimization they run as fast, and compile in less time.
#if defined(CUDA_CPU) && !defined(MGPU_LANES) && !defined(__clang__)
#pragma GCC optimize("O0")
#endif
#endif

// doctest prints a vector's numbers, the first ones of a long one.
template <class T> struct doctest::StringMaker<std::vector<T>> {
    static String convert(const std::vector<T> &list) {
        std::ostringstream text;
        for (size_t i = 0; i < list.size() && i < 20; i++) text << (i ? ", " : "{") << list[i];
        text << (list.empty() ? "{}" : list.size() > 20 ? ", ...}" : "}");
        return text.str().c_str();
    }
};

// ---------------------------------------------------------------------------------------------
// What the tests share

typedef std::vector<float> Floats;
typedef std::vector<double> Doubles;
typedef std::vector<Doubles> Arrays;
typedef std::vector<int> Ints;
typedef std::vector<Tensor> Tensors;

// Passes only if max|got - want| <= rel * max|want|; NaN fails. Prints the worst element.
template <class T> static void check_close(const Floats &got, const T &want, double rel) {
    REQUIRE(got.size() == want.size());
    double largest = 0, worst = -1;
    size_t at = 0;
    for (size_t i = 0; i < want.size(); i++) {
        largest = std::max(largest, std::fabs((double)want[i]));
        double difference = std::fabs(got[i] - (double)want[i]);
        if (!(difference <= worst)) {
            worst = difference;
            at = i;
            if (std::isnan(difference)) break;
        }
    }
    if (want.empty()) return;
    CAPTURE(at);
    CAPTURE(got[at]);
    CAPTURE(want[at]);
    CHECK(worst <= rel * largest);
}

static bool contains(std::string_view text, std::string_view part) {
    return text.find(part) != std::string::npos;
}

// The text of the Error that `call` throws, or "" if it throws none.
static std::string error_of(const std::function<void()> &call) {
    try {
        call();
    } catch (const Error &e) { return e.what(); }
    return "";
}

// Numbers from N(0, scale^2), the same for the same seed.
static Floats random_floats(size_t n, unsigned seed, float scale = 1) {
    std::mt19937 random(seed);
    std::normal_distribution<float> distribution(0, scale);
    Floats numbers(n);
    for (float &x : numbers) x = distribution(random);
    return numbers;
}

static Tensor on_host(const Floats &numbers, Ints shape) {
    Tensor t = empty(std::move(shape), cpu());
    REQUIRE((size_t)size(t) == numbers.size());
    std::copy(numbers.begin(), numbers.end(), t.ptr());
    return t;
}
static Tensor on_device(const Floats &numbers, Ints shape, Device device = gpu(0)) {
    return copyto(on_host(numbers, std::move(shape)), device);
}
static Floats grad(const Tensor &t) { return to_host(*t.grad); }

constexpr int most_devices = 8; // the logical devices that the tests use: gpu(0) ... gpu(7)

// A message for the user: one line, and in it, in this order, the parts that " ... " divides.
static void check_says(const std::string &text, const std::string &says) {
    INFO("said: ", text);
    for (size_t at = 0, begin = 0, end; begin <= says.size(); begin = end + 5) {
        end = std::min(says.find(" ... ", begin), says.size());
        const std::string part = says.substr(begin, end - begin);
        CAPTURE(part);
        at = text.find(part, at);
        CHECK(at != std::string::npos);
    }
    CHECK(!contains(text, "\n"));
}
// The same of what is printed to stderr, with the line's end.
static void check_line(std::string text, const std::string &part) {
    REQUIRE((!text.empty() && text.back() == '\n'));
    text.pop_back();
    check_says(text, part);
}
// The call must throw an Error with such a message.
#define REFUSED(call, says) check_says(error_of([&] { call; }), says)

static bool same_bits(const Floats &a, const Floats &b) {
    return a.size() == b.size() && (a.empty() || !memcmp(&a[0], &b[0], a.size() * sizeof(float)));
}

// A sum of n floats is off by about sqrt(n) * 2^-24 of its size, in whatever order it is added: 16
// times that, for the largest error of many sums, and for a last sum that happens to be small.
static double rounding(int n) { return 1e-6 * std::sqrt(std::max(n, 1)); }

// A fresh folder, removed at the end with all that is in it. Its name wants quoting in a shell.
struct TestFolder {
    std::string path;
    TestFolder() {
        path = std::filesystem::temp_directory_path().string() + "/mgpu's \"tests\" $1 XXXXXX";
        REQUIRE(mkdtemp(&path[0]) != nullptr);
    }
    ~TestFolder() { std::filesystem::remove_all(path); }
    TestFolder(const TestFolder &) = delete;
    std::string file(const std::string &name) const { return path + "/" + name; }
    std::set<std::string> listing() const { // of everything in it
        std::set<std::string> names;
        for (const auto &entry : std::filesystem::recursive_directory_iterator(path))
            names.insert(entry.path().string().substr(path.size() + 1));
        return names;
    }
};

static std::string read_text(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}
static void write_text(const std::string &path, const std::string &bytes) {
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    std::ofstream(path, std::ios::binary) << bytes;
    REQUIRE(read_text(path) == bytes);
}

// Options that a test changes are put back, and the exchange that it sets.
struct OptionsKept {
    Options kept = options;
    Exchange kept_exchange = exchange;
    ~OptionsKept() { options = kept, exchange = kept_exchange; }
};

// The same with the model.
struct ModelKept {
    OptionsKept options;
    Tensors params = ::params;
    std::vector<std::string> names = param_names;
    Net net = ::net;
    ~ModelKept() {
        ::params = params;
        param_names = names;
        ::net = net;
    }
};

// What `call` prints to stdout.
static std::string printed(const std::function<void()> &call) {
    TestFolder folder;
    fflush(stdout);
    int terminal = dup(STDOUT_FILENO);
    int file = open(folder.file("out").c_str(), O_WRONLY | O_CREAT, 0600);
    REQUIRE(dup2(file, STDOUT_FILENO) == STDOUT_FILENO);
    call();
    fflush(stdout);
    dup2(terminal, STDOUT_FILENO);
    close(terminal);
    close(file);
    return read_text(folder.file("out"));
}

static Doubles doubles(const Tensor &t) {
    const Floats numbers = to_host(t);
    return Doubles(numbers.begin(), numbers.end());
}

// Training on devices gpu(0) ... gpu(k-1), step by step.
struct Training {
    std::vector<Device> devices;
    std::vector<Tensors> device_params;
    Training(int k, const Tensors &start) : devices(first_devices(k)) {
        for (Device d : devices) device_params.push_back(get_params(start, d));
    }
    // Returns the losses of all samples, in their order.
    Floats step(const std::pair<Tensor, Tensor> &batch, float lr = 0.02f) {
        return all_to_host(train_batch(batch.first, batch.second, device_params, devices, lr));
    }
    // All parameters, or all gradients, of device c, one after another.
    Floats numbers(int c, bool grads = false) const {
        return all_to_host(grads ? gradients(device_params)[c] : device_params[c]);
    }
    bool replicas_equal() const {
        for (size_t c = 1; c < devices.size(); c++)
            if (!same_bits(numbers(0), numbers(c))) return false;
        return true;
    }
};

// N images that can be learnt: each is the pattern of its class, and noise.
static std::pair<Tensor, Tensor> minibatch(int N, unsigned seed) {
    static const Floats patterns = random_floats(10 * 784, 1);
    Floats X = random_floats(N * 784, seed, 0.2f), y(N);
    for (int n = 0; n < N; n++) {
        y[n] = (7 * n + seed) % 10;
        for (int p = 0; p < 784; p++) X[n * 784 + p] += patterns[(int)y[n] * 784 + p];
    }
    return {on_host(X, {N, 1, 28, 28}), on_host(y, {N})};
}

static void set_model(const std::string &name, int seed) { // ModelKept puts the last one back
    options.model = name;
    rng.seed(seed);
    net = lenet;
    param_names = {"W1", "b1", "W2", "b2", "W3", "b3", "W4", "b4"};
    init_model();
}

static std::string shell_quoted(const std::string &text) {
    std::string quoted = "'";
    for (char c : text) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return quoted + "'";
}
static void write_gz(const std::string &path, const std::string &bytes) {
    const std::string unpacked = path + ".unpacked";
    write_text(unpacked, bytes);
    std::string command = "gzip -nc < " + shell_quoted(unpacked) + " > " + shell_quoted(path);
    REQUIRE(system(command.c_str()) == 0);
    std::filesystem::remove(unpacked);
}

// An IDX file: the numbers, big-endian, and the bytes.
static std::string idx(const std::vector<uint32_t> &numbers, const std::string &bytes) {
    std::string text;
    for (uint32_t n : numbers) text += {char(n >> 24), char(n >> 16), char(n >> 8), char(n)};
    return text + bytes;
}
static std::string random_bytes(size_t n, unsigned seed, int below) {
    std::mt19937 random(seed);
    std::string bytes;
    for (size_t i = 0; i < n; i++) bytes += char(random() % below);
    return bytes;
}
static std::string idx_images(uint32_t n) {
    return idx({2051, n, 28, 28}, random_bytes(n * 784, n, 256));
}
static std::string idx_labels(uint32_t n) { return idx({2049, n}, random_bytes(n, n, 10)); }

const std::string train_images = "/train-images-idx3-ubyte.gz";
const std::string train_labels = "/train-labels-idx1-ubyte.gz";
// A data set small enough to train on in a moment.
static void write_data(const std::string &folder, int train, int test) {
    write_gz(folder + train_images, idx_images(train));
    write_gz(folder + train_labels, idx_labels(train));
    write_gz(folder + "/t10k-images-idx3-ubyte.gz", idx_images(test));
    write_gz(folder + "/t10k-labels-idx1-ubyte.gz", idx_labels(test));
}

struct DataFolder : TestFolder { // with such a data set in data/
    DataFolder(int train, int test) { write_data(file("data"), train, test); }
};

// LeNet's parameters with numbers from N(0, 0.1^2), biases too. With those of init_params all
// logits are nearly 0 and no bias matters: much could be wrong unseen.
static Tensors lively_params() {
    init_params();
    Tensors lively;
    for (const Tensor &p : params)
        lively.push_back(on_host(random_floats(size(p), 10 + lively.size(), 0.1f), p.shape));
    return lively;
}

// The same with biases of +-1, which keep the inputs of ReLUs away from 0: half of the channels are
// always on, the others off. Where an input lies within rounding of 0, two trainings can take
// different sides; its gradient then differs by all of it, and they part ways though neither is
// wrong.
static Tensors steady_params() {
    const float scales[8] = {0.1f, 1, 0.03f, 1, 0.03f, 1, 0.1f, 1};
    Tensors steady = lively_params();
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < size(steady[i]); j++) {
            float &p = steady[i].ptr()[j];
            p = i % 2 ? std::copysign(scales[i], p) : p / 0.1f * scales[i];
        }
    return steady;
}

struct Run {
    int status;
    std::string out, err;
};

// Run the program in the folder as `before PROGRAM after` in a shell. It sees the devices that it
// would see without the tests. Without `mode` it is the tests that run.
static Run run_in_shell(const TestFolder &folder, const std::string &before,
                        const std::string &after, const std::string &mode = " --program ") {
    static const std::string tests = std::filesystem::read_symlink("/proc/self/exe");
    const std::string command = "cd " + shell_quoted(folder.path) +
                                " && exec 2> stderr > stdout; "
                                "unset CUDA_CPU_DEVICES CUDA_CPU_CORES CUDA_CPU_MEMORY; " +
                                before + " " + shell_quoted(tests) + mode + after;
    int status = system(command.c_str());
    Run run = {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_text(folder.file("stdout")),
               read_text(folder.file("stderr"))};
    for (const char *name : {"stdout", "stderr"}) std::filesystem::remove(folder.file(name));
    return run;
}

// What a run prints that must succeed.
static std::string output_of(const TestFolder &folder, const std::string &arguments,
                             const std::string &environment = "") {
    const Run run = run_in_shell(folder, environment, arguments);
    CAPTURE(arguments);
    CHECK(run.err == "");
    REQUIRE(run.status == 0);
    return run.out;
}
// Those that must be right: all but `rebind`.
static const std::vector<std::string> right_algorithms = {"naive",   "bucket", "host", "by_tensor",
                                                          "sharded", "ring",   "tree", "yours"};
// Tensors of these sizes on k devices, side by side in memory or not.
static Grads new_grads(int k, const Ints &sizes, bool contiguous) {
    Grads grads(k);
    for (int c = 0; c < k; c++) {
        for (int n : sizes)
            grads[c].push_back({gpu(c), {1, n}, nullptr, nullptr}); // without memory
        if (contiguous) attach_grad(grads[c]);
        for (Tensor &t : grads[c]) t = contiguous ? *t.grad : empty(t.shape, t.device);
    }
    return grads;
}
// What each device holds after the algorithm, if these were its numbers.
static std::vector<Floats> sums_of(const std::string &name, const Grads &grads,
                                   const std::vector<Floats> &numbers) {
    std::vector<Floats> sums;
    for (size_t c = 0; c < grads.size(); c++) {
        auto from = numbers[c].begin();
        for (const Tensor &t : grads[c]) {
            copyto(on_host(Floats(from, from + size(t)), t.shape), t);
            from += size(t);
        }
    }
    run_allreduce(name, grads);
    for (const auto &list : grads) sums.push_back(all_to_host(list));
    return sums;
}
// Of tensors of these sizes on each of k devices, side by side in memory or not. Their numbers are
// whole, and others on each device and at each index; all sums are below 2^24, so exact in any
// order of addition.
static void check_exact_sums(const std::string &name, int k, const Ints &sizes, bool flat) {
    const int n = std::accumulate(sizes.begin(), sizes.end(), 0);
    std::vector<Floats> numbers(k, Floats(n));
    Floats want(n);
    for (int c = 0; c < k; c++)
        for (int i = 0; i < n; i++) want[i] += numbers[c][i] = i + 1000 * c * c;
    const auto sums = sums_of(name, new_grads(k, sizes, flat), numbers);
    for (int c = 0; c < k; c++) {
        INFO(name, ", k ", k, ", gpu ", c);
        CHECK(sums[c] == want);
    }
}

static void needs_tsan() { MESSAGE("skipped: needs ThreadSanitizer (make race)"); }
// doctest's run; status 4 where no test matches the filters, for then nothing was tested.
static int run_tests(int argc, char **argv) {
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
    fprintf(stderr, "no test case matches:");
    for (int i = 0; i < argc; i++) fprintf(stderr, " %s", argv[i]);
    fprintf(stderr, "\n");
    return 4;
}

static int tests_main(int argc, char **argv) {
#ifdef CUDA_CPU
    setenv("CUDA_CPU_DEVICES", std::to_string(most_devices).c_str(), 0);
#endif
    try {
        use_devices(most_devices, true);
    } catch (const Error &e) {
        fprintf(stderr, "tests: %s\n", e.what());
        return 1;
    }
    return run_tests(argc, argv);
}

#ifndef TESTS_SHARED
// ---------------------------------------------------------------------------------------------
// 2. A toy network

TEST_CASE("init_params: shapes, zero biases, weights of standard deviation 0.01") {
    init_params();
    const std::vector<Ints> shapes = {{20, 1, 3, 3}, {20},  {50, 20, 5, 5}, {50},
                                      {800, 128},    {128}, {128, 10},      {10}};
    REQUIRE(params.size() == shapes.size());
    int numbers = 0;
    for (size_t i = 0; i < shapes.size(); i++) {
        CAPTURE(param_names[i]);
        CHECK(params[i].shape == shapes[i]);
        double squares = 0;
        for (float p : to_host(params[i])) squares += p * p;
        const double deviation = std::sqrt(squares / size(params[i]));
        if (i % 2 == 1) CHECK(deviation == 0);
        else // the deviation of n numbers is known to 1/sqrt(2n): 5% for W1's 180
            CHECK(std::fabs(deviation - 0.01) < 0.0025);
        numbers += size(params[i]);
    }
    CHECK(numbers == 129068);
    CHECK(to_host(normal(0, {3})) == Floats(3)); // what if all weights begin with 0?
    REFUSED(normal(-0.01f, {3}), "normal: the scale must be at least 0, not -0.01");
}

// ---------------------------------------------------------------------------------------------
// 3. Data synchronization

TEST_CASE("copyto: between the host and devices, any two of them") {
    const Floats numbers = random_floats(1001, 1);
    const Tensor start = on_host(numbers, {7, 143});
    const std::vector<Device> places = {cpu(), gpu(0), gpu(1), gpu(most_devices - 1)};
    for (Device from : places)
        for (Device to : places) {
            INFO(str(from), " to ", str(to));
            Tensor src = copyto(start, from), dst = copyto(src, to);
            CHECK((dst.device.id == to.id && dst.shape == start.shape && dst.data != src.data));
            CHECK(to_host(dst) == numbers);
            Tensor other = full({1001}, 0, to); // only the count must fit
            copyto(src, other);
            CHECK((to_host(other) == numbers && to_host(copyto(empty({0, 3}, from), to)).empty()));
            REFUSED(copyto(src, empty({1000}, to)), "copyto ... 1001 ... 1000");
        }
}

TEST_CASE("copyto: the devices wait for each other, not the host") {
    // Work queued on the source after the copy must not reach the copy, and work queued on the
    // target after it must see it. The numbers are many, so that the other device would win a race.
    const int n = small_only ? 10000 : 1000000;
    Tensor a = full({n}, 1, gpu(0)), b = full({n}, 0, gpu(1)), ones = full({n}, 1, gpu(1));
    for (int i = 0; i < 10; i++) {
        copyto(a, b);  // b = 2^i
        add_(a, a);    // a = 2^(i+1)
        add_(b, ones); // b = 2^i + 1
    }
    CHECK((to_host(b) == Floats(n, 513) && to_host(a) == Floats(n, 1024)));
}

TEST_CASE("get_params: independent copies with gradients of zero") {
    const Tensors originals = {on_host({1, 2, 3, 4, 5, 6}, {2, 3}), on_host({7}, {1})};
    Tensors a = get_params(originals, gpu(0)), b = get_params(originals, gpu(1));
    CHECK(get_params({}, gpu(0)).empty());
    waitall(); // before the host writes what is copied
    originals[0].ptr()[0] = 100;
    add_(a[1], full({1}, 1, gpu(0)));
    CHECK((all_to_host(a) == Floats{1, 2, 3, 4, 5, 6, 8} &&
           all_to_host(b) == Floats{1, 2, 3, 4, 5, 6, 7}));
    CHECK((originals[1].ptr()[0] == 7 && !originals[0].grad));
    for (const Tensor &p : b) {
        REQUIRE(p.grad);
        CHECK((p.device.id == 1 && p.grad->device.id == 1 && p.grad->shape == p.shape));
        CHECK(grad(p) == Floats(size(p), 0));
    }
}

// ---------------------------------------------------------------------------------------------
// 4. Distributing data

TEST_CASE("split_batch: contiguous shards in order, as equal as can be") {
    const std::vector<Ints> splits = {{2, 2, 2},
                                      {3, 2, 2},
                                      {3, 3, 2},
                                      {5},
                                      {0, 0},
                                      {1, 0},
                                      {1, 1, 0, 0, 0},
                                      {32, 32, 32},
                                      {2, 1, 1, 1, 1, 1, 1, 1}};
    for (const Ints &sizes : splits) {
        const int n = std::accumulate(sizes.begin(), sizes.end(), 0);
        CAPTURE(n);
        const std::vector<Device> devices = first_devices(sizes.size());
        const Tensor X = reshape(arange(n * 6), {n, 1, 2, 3}), y = arange(n);
        auto [X_shards, y_shards] = split_batch(X, y, devices);
        REQUIRE((X_shards.size() == sizes.size() && y_shards.size() == sizes.size()));
        for (int c = 0; c < (int)sizes.size(); c++) {
            CAPTURE(c);
            CHECK((X_shards[c].device.id == c && y_shards[c].device.id == c));
            CHECK(X_shards[c].shape == Ints{sizes[c], 1, 2, 3});
            CHECK(y_shards[c].shape == Ints{sizes[c]});
        }
        CHECK(all_to_host(X_shards) == to_host(X));
        CHECK(all_to_host(y_shards) == to_host(y));
    }
    REFUSED(split_batch(full({3, 2}, 0, cpu()), arange(4), {gpu(0)}),
            "split_batch ... 3 samples ... 4 labels");
}

// ---------------------------------------------------------------------------------------------
// 5. Training

// Numbers of devices that are compared with one.
static const Ints counts = small_only ? Ints{2} : Ints{2, 3, 5};
TEST_CASE("train_batch: the gradients of k devices are those of one, and so is the step") {
    OptionsKept kept;
    const Tensors start = lively_params();
    const auto batch = minibatch(small_only ? 3 : 13, 3); // none of the counts divides it
    Training one(1, start);
    const Floats losses = one.step(batch);
    std::vector<Ints> splits = {{3, 1}, {1, 100}};  // SPLIT
    for (int k : counts) splits.push_back(Ints(k)); // zeros: none
    for (const Ints &split : splits) {
        CAPTURE(split);
        options.split = split[0] ? split : Ints();
        const int k = split.size();
        Training many(k, start);
        check_close(many.step(batch), losses, 1e-6); // of the same parameters
        CHECK(many.replicas_equal());
        for (int i = 0; i < 8; i++) { // the same terms, added in another order
            CAPTURE(param_names[i]);
            const Tensor &got = many.device_params[k - 1][i], &want = one.device_params[0][i];
            check_close(grad(got), grad(want), 5e-6);
            check_close(to_host(got), to_host(want), 1e-6);
        }
    }
    // The step itself: what moved is lr / batch_size times the gradient.
    Floats moved = one.numbers(0), want = Training(1, start).numbers(0);
    const Floats gradient = one.numbers(0, true);
    for (size_t i = 0; i < want.size(); i++) want[i] -= 0.02 * gradient[i] / batch.second.shape[0];
    check_close(moved, want, 1e-6);
}

TEST_CASE("train_batch: k devices learn what one device learns") {
    // Minibatches of 8 and, in the middle, of one sample: the idle devices must add nothing, least
    // of all the gradients that they still have from the step before.
    const int steps = small_only ? 2 : 20;
    const float lr = 0.05f;
    const Tensors start = steady_params();
    Training one(1, start);
    std::vector<Training> others;
    for (int k : counts) others.push_back(Training(k, start));
    double first = 0, last = 0; // mean losses
    for (int s = 0; s < steps; s++) {
        const auto batch = minibatch(s == steps / 2 ? 1 : small_only ? 3 : 8, 100 + s);
        const Floats losses = one.step(batch, lr);
        for (Training &many : others) {
            INFO("k ", many.devices.size(), ", step ", s);
            // In each step the gradients differ by rounding, below 1e-6 of them, and so the
            // parameters drift apart by no more than that in each: nothing amplifies it while ReLUs
            // stay on their sides.
            check_close(many.step(batch, lr), losses, 1e-6 * (1 + s));
            REQUIRE(many.replicas_equal());
        }
        last = std::accumulate(losses.begin(), losses.end(), 0.0) / losses.size();
        if (s == 0) first = last;
    }
    if (!small_only) CHECK(last < 0.8 * first); // else the comparison says little
}

// ---------------------------------------------------------------------------------------------
// 7. The allreduce lab

TEST_CASE("allreduce_*: every device holds the exact sum of all, for any k and any length") {
    for (const std::string &name : right_algorithms)
        for (int k = 1; k <= (small_only ? 4 : most_devices); k++) {
            for (int n : {0, 1, k - 1, k, k + 1, small_only ? 1003 : 40009})
                check_exact_sums(name, k, {n}, false);
            for (bool flat : {true, false}) {
                check_exact_sums(name, k, {7, 0, 1, k, 100, 0, 33}, flat);
                check_exact_sums(name, k, {0, 0}, flat);
            }
        }
}

TEST_CASE("allreduce_*: sixteen devices" * doctest::skip(small_only)) {
    use_devices(16, true);
    for (const std::string &name : right_algorithms)
        for (int k : {9, 13, 16}) check_exact_sums(name, k, {17, 3, 1000}, true);
}

// What the comment above each algorithm says that it costs, for P equal tensors of n bytes
// together.
TEST_CASE("allreduce_*: the sums are the same bits each time, and naive's to rounding") {
    const int k = small_only ? 3 : 5, n = 1000;
    std::vector<Floats> numbers;
    for (int c = 0; c < k; c++) numbers.push_back(random_floats(n + 77, c));
    std::map<std::string, Floats> sums;
    for (const std::string &name : right_algorithms)
        for (int run = 0; run < 3; run++) {
            const auto got = sums_of(name, new_grads(k, {n, 77}, true), numbers);
            CAPTURE(name);
            for (int c = 1; c < k; c++) CHECK(same_bits(got[c], got[0]));
            if (run > 0) CHECK(same_bits(got[0], sums[name]));
            sums[name] = got[0];
            check_close(got[0], sums["naive"], rounding(k));
        }
}

TEST_CASE("empty_cache gives memory back, and the next tensor takes it anew") {
    auto unused = [] {
        size_t bytes = 0, total = 0;
        on(gpu(1));
        REQUIRE(cudaMemGetInfo(&bytes, &total) == cudaSuccess);
        return bytes;
    };
    empty_cache();
    const size_t before = unused();
    full({1 << 24}, 1, gpu(1)); // and at once free again, in the cache
    CHECK(unused() < before);
    empty_cache();
    CHECK((unused() >= before && to_host(full({3}, 2, gpu(1))) == Floats{2, 2, 2}));
}

TEST_CASE("sum_ adds in order, into one of its parts too") {
    const int k = 5, n = 1003;
    Tensors parts;
    Floats want(n, 0);
    for (int c = 0; c < k; c++) {
        const Floats numbers = random_floats(n, c);
        for (int i = 0; i < n; i++) want[i] += numbers[i];
        parts.push_back(on_device(numbers, {n}));
    }
    sum_(parts[3], parts);
    CHECK(same_bits(to_host(parts[3]), want));
    REFUSED(sum_(parts[0], {parts[0], full({n + 1}, 0, gpu(0))}), "sum_ ... (1004)");
    REFUSED(sum_(parts[0], {full({n}, 0, gpu(1))}), "sum_ ... gpu(0) ... gpu(1)");
}

TEST_CASE("send refuses what does not fit, and two messages into one place") {
    const Tensor a = full({4}, 1, gpu(0)), b = full({4}, 2, gpu(1)), c = full({4}, 3, gpu(2));
    REFUSED(send({{full({2}, 0, gpu(0)), full({3}, 0, gpu(1))}}), "send ... 2 ... 3");
    REFUSED(send({{a, b}, {c, b}}), "two messages ... same place on gpu(1)");
    REFUSED(send({{rows(c, 0, 1), rows(b, 3, 4)}, {a, b}}), "two messages");
    REFUSED(send({{a, b}, {rows(c, 0, 1), rows(b, 0, 1)}}), "two messages");
    send({{rows(a, 0, 2), rows(b, 0, 2)}, {rows(c, 2, 4), rows(b, 2, 4)}});
    CHECK(to_host(b) == Floats{1, 1, 3, 3});
}

TEST_CASE("chunk: one of k, or several") {
    const Tensor flat = arange(10);
    CHECK(to_host(chunk(reshape(flat, {5, 2}), 1, 4)) == Floats{2, 3, 4});
    CHECK(to_host(chunk(flat, 1, 4)) == Floats{2, 3, 4});
    CHECK(to_host(chunk(flat, 1, 4, 2)) == Floats{2, 3, 4, 5, 6});
    CHECK(size(chunk(flat, 0, 4, 4)) == 10);
    REFUSED(chunk(flat, 3, 4, 2), "rows: from 7 to 12, of a tensor of 10");
}

// --- exchange

// Trains a network of three layers on k devices for some steps, each gradient a bucket of its own.
// Returns the parameters of every device, one after the other. `planted`: exchange gets events that
// backward does not record, so that with OVERLAP it waits for nothing.
static Floats train_small(int k, const std::string &algorithm, bool overlap, bool planted = false) {
    OptionsKept kept;
    exchange = exchange_by(algorithm, overlap);
    bucket_bytes = 1;
    const std::vector<Ints> shapes = {{6, 7}, {7}, {7, 5}, {5}, {5, 3}, {3}};
    Tensors start;
    for (const auto &shape : shapes) {
        const int n = std::accumulate(shape.begin(), shape.end(), 1, std::multiplies<int>());
        start.push_back(on_host(random_floats(n, start.size()), shape));
    }
    const auto p = Training(k, start).device_params;
    for (int step = 0; step < (no_training ? 2 : 4); step++) {
        Tensors ls;
        for (int c = 0; c < k; c++) {
            Tensor h = on_device(random_floats(4 * 6, 100 * step + c), {4, 6}, gpu(c));
            for (int layer = 0; layer < 3; layer++) {
                h = linear(h, p[c][2 * layer], p[c][2 * layer + 1]);
                if (layer < 2) h = relu(h);
            }
            ls.push_back(softmax_cross_entropy(h, on_device({0, 1, 2, float(c % 3)}, {4}, gpu(c))));
        }
        for (const Tensor &l : ls) backward(l);
        Grads grads = gradients(p);
        for (auto &list : grads)
            for (Tensor &grad : list)
                if (planted) grad.complete = std::make_shared<Event>(grad.device);
        exchange(grads);
        for (const auto &list : p) sgd(list, 0.1f, 4 * k);
    }
    bucket_bytes = 256 * 1024;
    Tensors all;
    for (const auto &list : p) all.insert(all.end(), list.begin(), list.end());
    return all_to_host(all);
}

TEST_CASE("exchange: OVERLAP=1 gives the same bits as without, and the replicas are equal") {
    for (int k : {1, 2, 3, 4}) {
        const Floats naive = train_small(k, "naive", false);
        const size_t n = naive.size() / k;
        for (const std::string &name : right_algorithms) {
            INFO("k ", k, ", ", name);
            const Floats without = train_small(k, name, false), with = train_small(k, name, true);
            CHECK(same_bits(with, without));
            if (!no_training) CHECK(same_bits(without, train_small(k, name, false)));
            check_close(without, naive, 1e-5);
            for (int c = 1; c < k; c++)
                CHECK(memcmp(&with[0], &with[c * n], n * sizeof(float)) == 0);
        }
    }
}

// The device stands still until `open_again`, five seconds at most.
static std::atomic<bool> open_again{false};
static void stop(Device device) {
    auto wait = [](void *) {
        for (int ms = 0; ms < 5000 && !open_again; ms++) usleep(1000);
    };
    REQUIRE(cudaLaunchHostFunc(on(device), wait, nullptr) == cudaSuccess);
}

// naive, with an event behind each bucket that it sums.
static std::vector<std::shared_ptr<Event>> bucket_events;
static void probed(const Grads &grads) {
    run_allreduce("naive", grads);
    bucket_events.push_back(std::make_shared<Event>(gpu(0)));
    REQUIRE(cudaEventRecord(bucket_events.back()->handle, on(gpu(0))) == cudaSuccess);
}

TEST_CASE(
    "exchange: with OVERLAP a bucket waits for its own gradients alone, the last ones first") {
    OptionsKept kept;
    exchange = exchange_by("probed", true);
    algorithms.push_back({"probed", probed});
    bucket_bytes = 1;
    const int k = 2;
    const auto p = Training(k, {arange(3), arange(2)}).device_params;
    open_again = false;
    for (bool stops : {false, true}) { // the first time it allocates what it needs
        bucket_events.clear();
        for (int c = 0; c < k; c++)
            for (int i : {1, 0}) { // as backward writes them; each device may stop in between
                const Tensor &grad = *p[c][i].grad;
                copyto(full(grad.shape, c + 1, gpu(c)), grad);
                REQUIRE(cudaEventRecord(grad.complete->handle, on(gpu(c))) == cudaSuccess);
                if (stops && i == 1) stop(gpu(c));
            }
        exchange(gradients(p));
        if (!stops) waitall();
    }
    REQUIRE(bucket_events.size() == 2);
    auto reached = [](int bucket) {
        return cudaEventQuery(bucket_events[bucket]->handle) == cudaSuccess;
    };
    for (int ms = 0; ms < 2000 && !reached(0); ms++) usleep(1000);
    CHECK(reached(0));
    CHECK_FALSE(reached(1));
    open_again = true;
    for (int c = 0; c < k; c++)
        for (int i : {0, 1}) CHECK(grad(p[c][i]) == Floats(size(p[c][i]), k * (k + 1) / 2));
    bucket_bytes = 256 * 1024;
    algorithms.pop_back();
    bucket_events.clear();
}

TEST_CASE("allreduce: is the tutorial's, whatever ALLREDUCE says") {
    OptionsKept kept;
    options.overlap = true;
    for (const std::string name : {"naive", "ring", "rebind"}) {
        options.allreduce = name;
        Tensors data;
        for (int c = 0; c < 3; c++) data.push_back(full({1, 2}, c + 1, gpu(c)));
        allreduce(data);
        for (const Tensor &t : data) CHECK(to_host(t) == Floats{6, 6});
    }
}

TEST_CASE("exchange: of two devices, then of three") {
    OptionsKept kept;
    const auto p = Training(3, {arange(3), arange(2)}).device_params;
    for (const std::string &name : right_algorithms)
        for (int k : {2, 3, 2}) {
            INFO(name, ", k ", k);
            exchange = exchange_by(name, true);
            for (int c = 0; c < k; c++)
                for (const Tensor &t : p[c]) {
                    copyto(full(t.shape, c + 1, gpu(c)), *t.grad);
                    REQUIRE(cudaEventRecord(t.grad->complete->handle, on(gpu(c))) == cudaSuccess);
                }
            exchange(gradients({p.begin(), p.begin() + k}));
            for (int c = 0; c < k; c++)
                CHECK(all_to_host({*p[c][0].grad, *p[c][1].grad}) == Floats(5, k * (k + 1) / 2));
        }
}

TEST_CASE("allreduce_*: of so many devices, then of others, while one is late") {
    const int n = 3, most = 3;
    for (const std::string &name : right_algorithms)
        for (int late = 0; late < most; late++)
            for (const Ints &counts : std::vector<Ints>{{2, 3}, {3, 2}}) {
                INFO(name, ", late ", late, ", ", counts[0], " devices first");
                Tensors data;
                for (int c = 0; c < most; c++) data.push_back(full({n}, 1 << c, gpu(c)));
                Floats want = {1, 2, 4}; // the sum of two is no third
                call_on(stream(gpu(late)), [] { usleep(20000); });
                for (int k : counts) {
                    Grads grads;
                    for (int c = 0; c < k; c++) grads.push_back({data[c]});
                    run_allreduce(name, grads);
                    std::fill_n(want.begin(), k,
                                std::accumulate(want.begin(), want.begin() + k, 0.0f));
                }
                for (int c = 0; c < most; c++) CHECK(to_host(data[c]) == Floats(n, want[c]));
            }
}

TEST_CASE("flatten: one tensor of neighbours in one block of memory, else a copy") {
    const Tensor all = full({4}, 1, gpu(0)), none = full({0}, 1, gpu(0));
    Tensors list = {rows(all, 0, 1), none, rows(all, 1, 4)};
    CHECK(flatten({list})[0].ptr() == all.ptr());
    list = {rows(all, 0, 1), rows(all, 2, 4)}; // a gap
    CHECK(flatten({list})[0].ptr() != all.ptr());
    list[1].data = {std::make_shared<float>(), all.ptr() + 1}; // a neighbour by chance
    CHECK(flatten({list})[0].ptr() != all.ptr());
}

TEST_CASE("attach_grad of a list: zeros, side by side") {
    Tensors list = {full({2, 3}, 1, gpu(1)), full({0}, 1, gpu(1)), full({5}, 1, gpu(1))};
    attach_grad(list);
    for (const Tensor &t : list) {
        CHECK((t.grad->shape == t.shape && grad(t) == Floats(size(t), 0)));
    }
    CHECK(list[2].grad->data.get() == list[0].grad->data.get() + 6);
}

TEST_CASE("train_batch: every algorithm gives the steps of the tutorial's allreduce" *
          doctest::skip(small_only)) {
    const Tensors start = lively_params();
    for (int k : {2, 3}) {
        // After one step the gradients, after three the parameters, of the first device
        auto train = [&](const std::string &name, bool overlap = false) {
            OptionsKept kept;
            exchange = exchange_by(name, overlap);
            INFO(name, ", k ", k, overlap ? ", OVERLAP" : "");
            Training training(k, start);
            std::vector<Floats> numbers;
            for (int s = 0; s < 3; s++) {
                training.step(minibatch(s ? 3 : 7, 3 + s));
                CHECK(training.replicas_equal() == (name != "rebind"));
                if (s != 1) numbers.push_back(training.numbers(0, s == 0));
            }
            return numbers;
        };
        const Floats naive = train("naive")[0];
        for (const std::string &name : right_algorithms) {
            const auto without = train(name), with = train(name, true);
            INFO(name, ", k ", k);
            check_close(without[0], naive, 1e-6);
            for (int i : {0, 1}) CHECK(same_bits(with[i], without[i]));
        }
        train("rebind");
    }
}

// ---------------------------------------------------------------------------------------------
// 8. Kernels and operators

// An input of an operator, that wants a gradient.
struct Input {
    Ints shape;
    Floats numbers;
};
static Input random_input(Ints shape, unsigned seed) {
    size_t n = 1;
    for (int s : shape) n *= s;
    return {std::move(shape), random_floats(n, seed)};
}

// Its gradient holds NaN for now: a backward must write every number of it.
static Tensor with_grad(const Input &input) {
    Tensor t = on_device(input.numbers, input.shape);
    t.grad = std::make_shared<Tensor>(full(input.shape, NAN, t.device));
    return t;
}

// backward(), but with dys in place of ones as the gradients of ys.
static void backward_from(const Tensors &ys, const std::vector<Floats> &dys) {
    Tensor l = output("backward_from", ys, {1});
    record(l, [=] {
        for (size_t i = 0; i < ys.size(); i++) {
            const Tensor dy = on_device(dys[i], ys[i].shape);
            const int n = size(dy);
            LAUNCH(add_backward_kernel<<<blocks(n), threads, 0, on(gpu(0))>>>(grad_of(ys[i]),
                                                                              dy.ptr(), n));
        }
    });
    backward(l);
}

// The difference quotients of sum(dy * f()) in the numbers of x, which f reads.
static Doubles quotients(Doubles &x, double h, const Doubles &dy,
                         const std::function<Doubles()> &f) {
    const auto l = [&] {
        const Doubles y = f();
        return std::inner_product(y.begin(), y.end(), dy.begin(), 0.0);
    };
    Doubles slopes;
    for (double &number : x) {
        const double at = number;
        number = at + h;
        const double right = l();
        number = at - h;
        slopes.push_back((right - l()) / (2 * h));
        number = at;
    }
    return slopes;
}

// An operator's result and gradients against a reference in double; for few numbers the gradients
// of that against its finite differences. The operator is used once, and then twice on the same
// inputs: then the gradients are the sum of both uses', and hold nothing of the first time. Each
// gradient is the same bits whether or not the other inputs want one. `rel` is for the result, then
// for the gradient of each input.
static void
check_operator(std::vector<Input> inputs, const std::function<Tensor(const Tensors &)> &op,
               const std::function<Doubles(const Arrays &)> &reference,
               const std::function<Arrays(const Arrays &, const Doubles &dy)> &gradients,
               const std::vector<double> &rel) {
    Tensors in;
    Arrays exact;
    size_t numbers = 0;
    for (Input &input : inputs) {
        input.numbers = (input.numbers);
        in.push_back(with_grad(input));
        exact.push_back(Doubles(input.numbers.begin(), input.numbers.end()));
        numbers += input.numbers.size();
    }
    const Doubles y = reference(exact);
    std::vector<Floats> once; // the result, the gradients
    for (int uses = 1; uses <= 2; uses++) {
        CAPTURE(uses);
        Tensors ys;
        std::vector<Floats> dys;
        Doubles dy(y.size());
        for (int use = 0; use < uses; use++) {
            ys.push_back(op(in));
            check_close(to_host(ys[use]), y, rel[0]);
            dys.push_back((random_floats(y.size(), 10 * uses + use)));
            for (size_t i = 0; i < y.size(); i++) dy[i] += dys[use][i];
        }
        backward_from(ys, dys);
        if (uses == 1) once.push_back(to_host(ys[0]));
        const Arrays want = gradients(exact, dy);
        for (size_t i = 0; i < in.size(); i++) {
            CAPTURE(i);
            CHECK(in[i].grad->shape == in[i].shape);
            const Floats got = grad(in[i]);
            if (uses == 1) once.push_back(got);
            check_close(got, want[i], rel[i + 1]);
            if (numbers > 300) continue;
            const Doubles slopes = quotients(exact[i], 1e-4, dy, [&] { return reference(exact); });
            check_close(got, slopes, rel[i + 1] + 1e-6); // h^2 times the third derivative
        }
    }
    for (int wanted = 0; wanted < 1 << in.size() && numbers < 5000; wanted++) {
        CAPTURE(wanted); // bit i: input i wants its gradient
        Tensors some;
        for (size_t i = 0; i < in.size(); i++) {
            some.push_back(with_grad(inputs[i]));
            if (!(wanted >> i & 1)) some[i].grad = nullptr;
        }
        const Tensor result = op(some);
        CHECK(same_bits(to_host(result), once[0]));
        if (wanted) backward_from({result}, {(random_floats(y.size(), 10))});
        for (size_t i = 0; i < in.size(); i++)
            if (some[i].grad) CHECK(same_bits(grad(some[i]), once[i + 1]));
    }
}

// --- conv2d and linear

struct ConvSizes {
    int N, C, H, W, O, K, S = 1, P = 0; // stride, padding
    int OH() const { return (H + 2 * P - K) / S + 1; }
    int OW() const { return (W + 2 * P - K) / S + 1; }
};

// The terms of a convolution: y[n,o,i,j] has X[n,c,i*S+u-P,j*S+v-P] * W[o,c,u,v], where that is in
// X. visit(index in y, first in X, first in W, count): those that differ in v alone
template <class Visit> static void conv2d_terms(const ConvSizes &s, Visit visit) {
    const int OH = s.OH(), OW = s.OW();
    for (int n = 0, at = 0; n < s.N; n++)
        for (int o = 0; o < s.O; o++)
            for (int i = 0; i < OH; i++)
                for (int j = 0; j < OW; j++, at++)
                    for (int c = 0; c < s.C; c++)
                        for (int u = 0; u < s.K; u++) {
                            const int h = i * s.S + u - s.P, w = j * s.S - s.P;
                            const int first = std::max(0, -w), end = std::min(s.K, s.W - w);
                            if (h >= 0 && h < s.H && first < end)
                                visit(at, ((n * s.C + c) * s.H + h) * s.W + w + first,
                                      ((o * s.C + c) * s.K + u) * s.K + first, end - first);
                        }
}
static Doubles conv2d_reference(const Doubles &X, const Doubles &W, const Doubles &b,
                                const ConvSizes &s) {
    const int plane = s.OH() * s.OW();
    Doubles y(s.N * s.O * plane);
    for (size_t i = 0; i < y.size(); i++) y[i] = b[i / plane % s.O];
    conv2d_terms(s, [&](int at, int at_X, int at_W, int count) {
        const double *x = &X[at_X], *w = &W[at_W];
        double sum = 0;
        for (int v = 0; v < count; v++) sum += x[v] * w[v];
        y[at] += sum;
    });
    return y;
}
static Arrays conv2d_gradients(const Doubles &X, const Doubles &W, const Doubles &dy,
                               const ConvSizes &s) {
    const int plane = s.OH() * s.OW();
    Doubles dX(X.size()), dW(W.size()), db(s.O);
    conv2d_terms(s, [&](int at, int at_X, int at_W, int count) {
        const double *x = &X[at_X], *w = &W[at_W], g = dy[at];
        double *dx = &dX[at_X], *dw = &dW[at_W];
        for (int v = 0; v < count; v++) dx[v] += g * w[v], dw[v] += g * x[v];
    });
    for (size_t i = 0; i < dy.size(); i++) db[i / plane % s.O] += dy[i];
    return {dX, dW, db};
}

static void check_conv2d(const ConvSizes &s) {
    INFO("NCHWOKSP: ", s.N, " ", s.C, " ", s.H, " ", s.W, " ", s.O, " ", s.K, " ", s.S, " ", s.P);
    const int taps = s.K * s.K, pixels = s.N * s.OH() * s.OW();
    check_operator(
        {random_input({s.N, s.C, s.H, s.W}, 1), random_input({s.O, s.C, s.K, s.K}, 2),
         random_input({s.O}, 3)},
        [=](auto &in) { return conv2d(in[0], in[1], in[2], s.S, s.P); },
        [=](auto &in) { return conv2d_reference(in[0], in[1], in[2], s); },
        [=](auto &in, auto &dy) { return conv2d_gradients(in[0], in[1], dy, s); },
        {rounding(s.C * taps), rounding(s.O * taps), rounding(pixels), rounding(pixels)});
}

TEST_CASE("conv2d: result and gradients") {
    for (const ConvSizes &s : std::vector<ConvSizes>{
             // N  C   H   W   O  K
             {1, 1, 1, 1, 1, 1},   // the smallest
             {2, 1, 3, 3, 2, 3},   // one output pixel: K = H = W
             {2, 3, 4, 9, 3, 4},   // K = H only, K even
             {1, 3, 5, 7, 4, 3},   // odd, H != W
             {33, 1, 4, 6, 3, 2},  // slices that begin in the midst of an image
             {33, 1, 4, 18, 2, 3}, // more images than slices of a shallow convolution
             {2, 16, 6, 5, 17, 2}, // a tile of channels, and one more
             {3, 17, 5, 9, 16, 3},
             {2, 50, 4, 3, 3, 1},                    // K = 1
             {1, 2, 7, 7, 50, 7},                    // K = 7, weights of more than one block
             {2, 2, 17, 16, 3, 16},                  // a large K
             {0, 3, 5, 5, 4, 3},                     // no images
             {small_only ? 1 : 28, 1, 30, 30, 2, 3}, // sums of so many terms that slices are many
             {small_only ? 1 : 2, 1, 28, 28, 20, 3}, // LeNet's
             {small_only ? 1 : 2, 20, 13, 13, 50, 5}})
        check_conv2d(s);
    CHECK(conv2d(full({2, 3, 5, 7}, 0, gpu(0)), full({4, 3, 2, 2}, 0, gpu(0)), full({4}, 0, gpu(0)))
              .shape == Ints{2, 4, 4, 6});
}

TEST_CASE("conv2d: strides and padding") {
    std::vector<ConvSizes> sizes = {
        // N C  H  W  O  K  S  P
        {1, 1, 1, 1, 1, 3, 1, 1},  // one pixel, all around it zeros
        {2, 3, 5, 7, 4, 3, 1, 1},  // as large as before
        {2, 3, 6, 9, 4, 3, 2, 1},  // half as large, H even, W odd
        {2, 3, 9, 6, 4, 3, 2, 0},  // H is used up, a column of W is left over
        {2, 5, 8, 7, 17, 1, 2, 0}, // three of four pixels in no window
        {2, 3, 7, 8, 3, 2, 2, 0},
        {2, 3, 7, 5, 3, 1, 1, 2},  // more zeros than the kernel reaches over
        {1, 2, 5, 6, 3, 2, 5, 1},  // gaps between windows
        {3, 2, 11, 9, 3, 5, 3, 2}, // taps that do not divide evenly: 2, 2 and 1 of them
        {2, 2, 4, 5, 3, 4, 2, 3},  // K even, windows that meet one row of X
        {1, 2, 3, 9, 2, 3, 4, 0},  // one row of windows
        {2, 3, 4, 9, 3, 3, 1, 4},  // windows in the zeros alone
        {0, 3, 6, 6, 4, 3, 2, 1},  // no images
        {2, 1, 5, 18, 3, 3, 1, 0}, // few channels, rows of 16 pixels: full registers,
        {3, 2, 4, 19, 9, 3, 1, 1}, // or of 19: a last one that begins earlier
        {1, 2, 4, 37, 3, 3, 2, 1}, // such rows with a stride,
        {1, 1, 6, 22, 3, 5, 1, 0}, // and with a larger kernel
        {3, 33, 8, 9, 3, 5, 3, 2}, // of so many channels that a stride of 1, too, has no column
        {3, 33, 8, 9, 3, 5, 1, 2}, // for each (c,v) in the sums for dX
    };
    const ConvSizes large[] = {// like ResNet-18's: a plane of fewer pixels than a tile, too
                               {2, 1, 28, 28, 40, 3, 1, 1},  {2, 40, 13, 14, 40, 3, 1, 1},
                               {2, 40, 14, 14, 72, 3, 2, 1}, {2, 40, 14, 14, 72, 1, 2, 0},
                               {2, 256, 7, 7, 48, 3, 2, 1},  {5, 128, 2, 2, 72, 3, 1, 1},
                               {40, 3, 3, 33, 33, 3, 1, 1}};
    if (!small_only) sizes.insert(sizes.end(), std::begin(large), std::end(large));
    for (const ConvSizes &s : sizes) check_conv2d(s);
    CHECK(conv2d(full({2, 3, 5, 8}, 0, gpu(0)), full({4, 3, 3, 3}, 0, gpu(0)), full({4}, 0, gpu(0)),
                 2, 1)
              .shape == Ints{2, 4, 3, 4});
}

struct LinearSizes {
    int N, C, O;
};

// As a convolution of 1x1 images, whose W is (O,C) where the dense layer's is (C,O)
static Doubles transposed(const Doubles &W, int rows, int columns) {
    Doubles T;
    for (int i = 0; i < rows * columns; i++) T.push_back(W[i % rows * columns + i / rows]);
    return T;
}
static Doubles linear_reference(const Doubles &X, const Doubles &W, const Doubles &b,
                                const LinearSizes &s) {
    return conv2d_reference(X, transposed(W, s.C, s.O), b, {s.N, s.C, 1, 1, s.O, 1});
}
static Arrays linear_gradients(const Doubles &X, const Doubles &W, const Doubles &dy,
                               const LinearSizes &s) {
    Arrays d = conv2d_gradients(X, transposed(W, s.C, s.O), dy, {s.N, s.C, 1, 1, s.O, 1});
    d[1] = transposed(d[1], s.O, s.C);
    return d;
}

TEST_CASE("linear: result and gradients") {
    std::vector<LinearSizes> sizes = {{1, 1, 1},    {2, 3, 1},   {3, 5, 7},  {0, 5, 3},
                                      {33, 17, 50}, {65, 1, 16}, {2, 50, 17}};
    if (!small_only) sizes.insert(sizes.end(), {{2, 800, 128}, {300, 128, 10}, {2, 1, 70000}});
    for (const LinearSizes &s : sizes) {
        INFO("N C O: ", s.N, " ", s.C, " ", s.O);
        check_operator(
            {random_input({s.N, s.C}, 1), random_input({s.C, s.O}, 2), random_input({s.O}, 3)},
            [](auto &in) { return linear(in[0], in[1], in[2]); },
            [=](auto &in) { return linear_reference(in[0], in[1], in[2], s); },
            [=](auto &in, auto &dy) { return linear_gradients(in[0], in[1], dy, s); },
            {rounding(s.C), rounding(s.O), rounding(s.N), rounding(s.N)});
    }
}

// --- relu

static const std::vector<Ints> any_shapes = {{1}, {255}, {2, 3, 4, 5}, {1001}, {0, 3}};

static Doubles relu_reference(Doubles X) {
    for (double &x : X) x = std::max(x, 0.0);
    return X;
}
static Doubles relu_gradient(const Doubles &X, Doubles dy) {
    for (size_t i = 0; i < X.size(); i++)
        if (X[i] <= 0) dy[i] = 0;
    return dy;
}

TEST_CASE("relu: result and gradient") {
    for (const Ints &shape : any_shapes) {
        Input X = random_input(shape, 1);
        for (float &x : X.numbers)
            x += x < 0 ? -0.01f : 0.01f; // finite differences must not step over 0
        check_operator(
            {X}, [](auto &in) { return relu(in[0]); },
            [](auto &in) { return relu_reference(in[0]); },
            [](auto &in, auto &dy) { return Arrays{relu_gradient(in[0], dy)}; },
            {0, 1e-7}); // nothing is rounded but the sum of two gradients
    }
    Tensor X = with_grad({{6}, {NAN, 0.0f, -0.0f, INFINITY, -INFINITY, 1e-45f}}), y = relu(X);
    backward(y);
    const Floats got = to_host(y), dX = grad(X);
    CHECK(std::isnan(got[0])); // or a broken network would look sound
    CHECK(Floats(got.begin() + 1, got.end()) == Floats{0, 0, INFINITY, 0, 1e-45f});
    CHECK(Floats(dX.begin() + 1, dX.end()) == Floats{0, 0, 1, 0, 1});
}

// --- avg_pool2d, max_pool2d, global_avg_pool2d

struct PoolSizes {
    int N, C, H, W, K = 0, S = 1; // K = 0: one window, the whole plane
    int KH() const { return K ? K : H; }
    int KW() const { return K ? K : W; }
    int OH() const { return (H - KH()) / S + 1; }
    int OW() const { return (W - KW()) / S + 1; }
};

// The terms of y[n,c,i,j], which is the mean or the (first) largest number of the window from
// X[n,c,i*S,j*S] on. visit(index in y, index in X, factor)
template <class Visit>
static void pool2d_terms(const Doubles &X, const PoolSizes &s, bool max, Visit visit) {
    const int OH = s.OH(), OW = s.OW(), n = s.KH() * s.KW();
    for (int y = 0; y < s.N * s.C * OH * OW; y++) {
        const int first = (y / (OH * OW) * s.H + y / OW % OH * s.S) * s.W + y % OW * s.S;
        int largest = first;
        for (int i = 0; i < n; i++) {
            const int at = first + i / s.KW() * s.W + i % s.KW();
            if (X[at] > X[largest]) largest = at;
            if (!max) visit(y, at, 1.0 / n);
        }
        if (max) visit(y, largest, 1.0);
    }
}
static Doubles pool2d_reference(const Doubles &X, const PoolSizes &s, bool max) {
    Doubles y(s.N * s.C * s.OH() * s.OW());
    pool2d_terms(X, s, max, [&](int at_y, int at_X, double f) { y[at_y] += f * X[at_X]; });
    return y;
}
static Doubles pool2d_gradient(const Doubles &X, const Doubles &dy, const PoolSizes &s, bool max) {
    Doubles dX(X.size());
    pool2d_terms(X, s, max, [&](int at_y, int at_X, double f) { dX[at_X] += f * dy[at_y]; });
    return dX;
}

TEST_CASE("avg_pool2d, max_pool2d, global_avg_pool2d: result and gradient") {
    const PoolSizes sizes[] = {// N C   H   W  K  S
                               {1, 1, 1, 1, 1, 1},    {2, 3, 4, 6, 2, 2},
                               {2, 1, 9, 9, 2, 2},   // the ninth row and column are in no window
                               {3, 2, 7, 5, 3, 2},   // windows overlap
                               {3, 2, 8, 11, 2, 3},  // gaps between windows
                               {2, 2, 6, 4, 4, 1},   // one window wide, many overlap
                               {1, 2, 3, 3, 3, 5},   // one window
                               {1, 2, 39, 71, 2, 2}, // more than a block's threads
                               {1, 2, 39, 71, 3, 2},  {0, 2, 4, 4, 2, 2},
                               {2, 20, 26, 26, 2, 2},               // LeNet's and lab_cnn's
                               {2, 50, 9, 9, 2, 2},   {1, 1, 1, 1}, // global from here on
                               {2, 3, 4, 4},          {3, 5, 5, 7},
                               {1, 300, 3, 2},        {2, 2, 29, 33},
                               {0, 3, 2, 2}};
    for (const PoolSizes &s : sizes)
        for (bool max : {false, true}) {
            if (max && !s.K) continue;
            INFO("N C H W K S: ", s.N, " ", s.C, " ", s.H, " ", s.W, " ", s.K, " ", s.S);
            CAPTURE(max);
            const auto pool = max ? max_pool2d : avg_pool2d;
            check_operator(
                {random_input({s.N, s.C, s.H, s.W}, 1)},
                [=](auto &in) { return s.K ? pool(in[0], s.K, s.S) : global_avg_pool2d(in[0]); },
                [=](auto &in) { return pool2d_reference(in[0], s, max); },
                [=](auto &in, auto &dy) { return Arrays{pool2d_gradient(in[0], dy, s, max)}; },
                // of max: the largest number itself
                {max ? 0 : rounding(s.KH() * s.KW()), rounding(s.K * s.K)});
        }
    const Tensor X = full({2, 3, 9, 8}, 0, gpu(0));
    CHECK(avg_pool2d(X, 2, 2).shape == Ints{2, 3, 4, 4});
    CHECK(max_pool2d(X, 2, 2).shape == Ints{2, 3, 4, 4});
    CHECK(global_avg_pool2d(X).shape == Ints{2, 3});
}

TEST_CASE("max_pool2d: of equal numbers the first gets the gradient; NaN is not lost") {
    for (int stride : {1, 2, 3}) {
        CAPTURE(stride);
        Tensor X = with_grad({{1, 1, 4, 4}, Floats(16, 7)}), y = max_pool2d(X, 2, stride);
        backward(y);
        Floats want(16);
        for (int i = 0; i + 2 <= 4; i += stride)
            for (int j = 0; j + 2 <= 4; j += stride) want[i * 4 + j] = 1;
        CHECK(grad(X) == want);
    }
    Tensor X = with_grad({{1, 1, 2, 4}, {-1, -1, -3, -INFINITY, -1, -1, -2, -2}});
    backward(max_pool2d(X, 2, 2));
    CHECK(grad(X) == Floats{1, 0, 0, 0, 0, 0, 1, 0});
    X = with_grad({{1, 1, 2, 4}, {1, NAN, INFINITY, 1, NAN, 2, 1, NAN}});
    for (float largest : to_host(max_pool2d(X, 2, 2))) CHECK(std::isnan(largest));
    backward(max_pool2d(X, 2, 2));
    CHECK(grad(X) == Floats{0, 1, 0, 0, 0, 0, 0, 1});
}

// --- batch_norm

// Of channel c: visit(the indices of its numbers)
template <class Visit> static void for_channels(int N, int C, int plane, Visit visit) {
    for (int c = 0; c < C; c++) {
        std::vector<size_t> at;
        for (int n = 0; n < N; n++)
            for (int i = 0; i < plane; i++) at.push_back((size_t)(n * C + c) * plane + i);
        visit(c, at);
    }
}
struct Spread {
    double mean = 0, var = 0;
};
static Spread spread(const Doubles &X, const std::vector<size_t> &at) {
    Spread m;
    for (size_t i : at) m.mean += X[i] / at.size();
    for (size_t i : at) m.var += (X[i] - m.mean) * (X[i] - m.mean) / at.size();
    return m;
}
static Doubles batch_norm_reference(const Doubles &X, const Doubles &gamma, const Doubles &beta,
                                    int N, int plane) {
    Doubles y(X.size());
    for_channels(N, gamma.size(), plane, [&](int c, const std::vector<size_t> &at) {
        const Spread m = spread(X, at);
        for (size_t i : at) y[i] = (X[i] - m.mean) / std::sqrt(m.var + 1e-5) * gamma[c] + beta[c];
    });
    return y;
}
// With z = (X - mean) * r, r = 1 / sqrt(var + eps):
//   dX = r * gamma * (dy - mean of dy - z * mean of dy*z), dgamma = sum of dy*z, dbeta = sum of dy
static Arrays batch_norm_gradients(const Doubles &X, const Doubles &gamma, const Doubles &dy, int N,
                                   int plane) {
    Doubles dX(X.size()), dgamma(gamma.size()), dbeta(gamma.size());
    for_channels(N, gamma.size(), plane, [&](int c, const std::vector<size_t> &at) {
        const Spread m = spread(X, at);
        const double r = 1 / std::sqrt(m.var + 1e-5);
        for (size_t i : at) {
            dgamma[c] += dy[i] * (X[i] - m.mean) * r;
            dbeta[c] += dy[i];
        }
        for (size_t i : at)
            dX[i] = r * gamma[c] *
                    (dy[i] - dbeta[c] / at.size() - (X[i] - m.mean) * r * dgamma[c] / at.size());
    });
    return {dX, dgamma, dbeta};
}

TEST_CASE("batch_norm: result and gradients") {
    const PoolSizes sizes[] = {{2, 1, 2, 2},  {3, 2, 1, 1},  {1, 3, 3, 5},
                               {5, 4, 3, 3},  {0, 3, 2, 2},  {2, 300, 2, 3},
                               {40, 3, 7, 7}, {7, 5, 9, 11}, {2, 5, 29, 31}};
    for (const PoolSizes &s : sizes) {
        INFO("N C H W: ", s.N, " ", s.C, " ", s.H, " ", s.W);
        const int plane = s.H * s.W;
        const Tensor mean = full({s.C}, 0, gpu(0)), var = full({s.C}, 1, gpu(0));
        check_operator(
            {random_input({s.N, s.C, s.H, s.W}, 1), random_input({s.C}, 2), random_input({s.C}, 3)},
            [=](auto &in) { return batch_norm(in[0], in[1], in[2], mean, var); },
            [=](auto &in) { return batch_norm_reference(in[0], in[1], in[2], s.N, plane); },
            [=](auto &in, auto &dy) { return batch_norm_gradients(in[0], in[1], dy, s.N, plane); },
            // a small variance of few numbers makes the rounding of X - mean larger, dX's twice
            {4e-6, 2e-5, rounding(s.N * plane), rounding(s.N * plane)});
    }
}

TEST_CASE("batch_norm: the running statistics, in training and in evaluation") {
    const int N = 5, C = 3, H = 4, W = 3, plane = H * W;
    const Floats numbers = random_floats(N * C * plane, 1, 3), scales = random_floats(C, 2);
    const Tensor X = on_device(numbers, {N, C, H, W}), gamma = on_device(scales, {C}),
                 beta = on_device({1, 2, 3}, {C});
    const Tensor mean = on_device({1, -2, 3}, {C}), var = on_device({1, 2, 0.5f}, {C});
    Doubles exact(numbers.begin(), numbers.end()), want_mean = {1, -2, 3}, want_var = {1, 2, 0.5};
    for (int step = 0; step < 3; step++) {
        batch_norm(X, gamma, beta, mean, var); // nothing wants a gradient, but it trains
        for_channels(N, C, plane, [&](int c, const std::vector<size_t> &at) {
            const Spread m = spread(exact, at);
            want_mean[c] = 0.9 * want_mean[c] + 0.1 * m.mean;
            want_var[c] = 0.9 * want_var[c] + 0.1 * m.var * at.size() / (at.size() - 1);
        });
        check_close(to_host(mean), want_mean, 1e-6); // a few roundings a step
        check_close(to_host(var), want_var, 1e-6);
    }
    const Floats kept_mean = to_host(mean), kept_var = to_host(var);
    Doubles y(exact.size());
    for_channels(N, C, plane, [&](int c, const std::vector<size_t> &at) {
        for (size_t i : at)
            y[i] = (exact[i] - want_mean[c]) / std::sqrt(want_var[c] + 1e-5) * scales[c] + c + 1;
    });
    NoGrad guard;
    check_close(to_host(batch_norm(X, gamma, beta, mean, var)), y, 2e-6);
    CHECK((same_bits(to_host(mean), kept_mean) && same_bits(to_host(var), kept_var)));
    CHECK(to_host(batch_norm(rows(X, 0, 0), gamma, beta, mean, var)).empty());
}

TEST_CASE("batch_norm: an empty shard, a single value, a mean far from 0") {
    const Tensor gamma = full({1}, 2, gpu(0)), beta = full({1}, 3, gpu(0));
    auto statistics = [] { return std::pair(full({1}, 1, gpu(0)), full({1}, 5, gpu(0))); };
    auto [mean0, var0] = statistics();
    batch_norm(full({0, 1, 2, 2}, 0, gpu(0)), gamma, beta, mean0, var0);
    CHECK((to_host(mean0) == Floats{1} && to_host(var0) == Floats{5}));
    auto [mean1, var1] = statistics();
    Tensor X = with_grad({{1, 1, 1, 1}, {11}}), y = batch_norm(X, gamma, beta, mean1, var1);
    CHECK(to_host(y) == Floats{3});
    backward(y);
    CHECK(grad(X) == Floats{0});
    check_close(to_host(mean1), Floats{0.9f + 1.1f}, 1e-6);
    check_close(to_host(var1), Floats{4.5f}, 1e-6);
    // E[X^2] - E[X]^2 would have no digit right: X^2 is 1e8 and more, its last digit 8 or more.
    const int n = 1024;
    Floats far = random_floats(4 * n, 7);
    for (float &x : far) x += 10000;
    const Doubles exact(far.begin(), far.end());
    auto [mean2, var2] = statistics();
    y = batch_norm(on_device(far, {4, 1, 32, 32}), gamma, beta, mean2, var2);
    // The mean is off by its rounding, 1e-3 of a standard deviation at most
    check_close(to_host(y), batch_norm_reference(exact, {2}, {3}, 4, n), 1e-3);
    std::vector<size_t> all(4 * n);
    std::iota(all.begin(), all.end(), 0);
    const Spread m = spread(exact, all);
    check_close(to_host(var2), Doubles{4.5 + 0.1 * m.var * 4 * n / (4 * n - 1)}, 1e-5);
    check_close(to_host(mean2), Doubles{0.9 + 0.1 * m.mean}, 1e-6);
}

// --- add

TEST_CASE("add: result and gradients") {
    for (const Ints &shape : any_shapes)
        check_operator(
            {random_input(shape, 1), random_input(shape, 2)},
            [](auto &in) { return add(in[0], in[1]); },
            [](auto &in) {
                Doubles y = in[0];
                for (size_t i = 0; i < y.size(); i++) y[i] += in[1][i];
                return y;
            },
            [](auto &, auto &dy) { return Arrays(2, dy); }, {1e-7, 1e-7, 1e-7}); // one rounding
    Tensor X = with_grad({{3}, {1, 2, 3}}), y = add(X, X);
    CHECK(to_host(y) == Floats{2, 4, 6});
    backward(y);
    CHECK(grad(X) == Floats{2, 2, 2});
    backward(add(add(X, X), X));
    CHECK(grad(X) == Floats{3, 3, 3});
}

// --- softmax_cross_entropy

// For sample n of y_hat (N,classes): visit(n, j, softmax(y_hat[n])[j], log of it)
template <class Visit> static void softmax_terms(const Doubles &y_hat, size_t N, Visit visit) {
    const size_t classes = N ? y_hat.size() / N : 0;
    for (size_t n = 0; n < N; n++) {
        const double *z = &y_hat[n * classes], largest = *std::max_element(z, z + classes);
        double sum = 0;
        for (size_t j = 0; j < classes; j++) sum += std::exp(z[j] - largest);
        for (size_t j = 0; j < classes; j++)
            visit(n, j, std::exp(z[j] - largest) / sum, z[j] - largest - std::log(sum));
    }
}
static Doubles cross_entropy_reference(const Doubles &y_hat, const Doubles &y) {
    Doubles l(y.size());
    softmax_terms(y_hat, y.size(), [&](size_t n, size_t j, double, double log_p) {
        if (j == y[n]) l[n] = -log_p;
    });
    return l;
}
static Doubles cross_entropy_gradient(const Doubles &y_hat, const Doubles &y, const Doubles &dl) {
    Doubles dy_hat;
    softmax_terms(y_hat, y.size(), [&](size_t n, size_t j, double p, double) {
        dy_hat.push_back(dl[n] * (p - (j == y[n])));
    });
    return dy_hat;
}

TEST_CASE("softmax_cross_entropy: result and gradient") {
    for (Ints sizes :
         std::vector<Ints>{{1, 2}, {5, 10}, {65, 10}, {3, 7}, {4, 1}, {0, 10}, {2, 1000}}) {
        const int N = sizes[0], classes = sizes[1];
        INFO("N ", N, ", classes ", classes);
        Floats y(N);
        for (int n = 0; n < N; n++) y[n] = n % 3 == 0 ? 0 : n % 3 == 1 ? classes - 1 : n % classes;
        const Tensor labels = on_device(y, {N});
        const Doubles exact(y.begin(), y.end());
        check_operator(
            {random_input({N, classes}, 1)},
            [=](auto &in) { return softmax_cross_entropy(in[0], labels); },
            [=](auto &in) { return cross_entropy_reference(in[0], exact); },
            [=](auto &in, auto &dl) { return Arrays{cross_entropy_gradient(in[0], exact, dl)}; },
            // expf and logf are right to two units in the last place
            {rounding(classes), rounding(classes)});
    }
}

TEST_CASE("softmax_cross_entropy: large logits, and rows of the gradient") {
    const Floats logits = {
        1e4f,  -1e4f, 0,                         // the right class far ahead
        1e4f,  -1e4f, 0,                         // far behind
        -1e4f, -1e4f, -1e4f, 1e4f, 1e4f, 1e4f,   //
        -1e4f, 0,     1e4f,  0,    1e4f, -1e4f}; // the largest last, and in the middle
    Tensor y_hat = with_grad({{6, 3}, logits}),
           l = softmax_cross_entropy(y_hat, on_device({0, 1, 2, 0, 1, 1}, {6}));
    backward(l);
    const double third = 1.0 / 3, log3 = std::log(3.0);
    const Floats got = to_host(l), d = grad(y_hat);
    CHECK((got[0] == 0 && got[1] == 20000 && got[4] == 10000 && got[5] == 0));
    check_close({got[2], got[3]}, Doubles{log3, log3}, 1e-6);
    check_close(d,
                Doubles{0, 0, 0, 1, -1, 0, third, third, third - 1, third - 1, third, third, //
                        0, -1, 1, 0, 0, 0},
                1e-6);
    const int N = 50, classes = 10;
    Tensor Z = with_grad({{N, classes}, random_floats(N * classes, 4, 5)});
    backward(softmax_cross_entropy(Z, full({N}, 3, gpu(0))));
    const Floats dZ = grad(Z);
    // Probabilities sum to 1, of which 1 is taken: ten roundings of 6e-8 are left
    for (int n = 0; n < N; n++)
        CHECK(std::fabs(std::accumulate(&dZ[n * classes], &dZ[n * classes] + classes, 0.0)) < 1e-6);
}

// --- on tensors without gradients

TEST_CASE("full, add_: numbers of any count, on the host and on devices") {
    for (int n : {0, 1, 255, 256, 257, 10001}) {
        CAPTURE(n);
        const Tensor a = full({n}, 2.5f, gpu(1)), b = copyto(arange(n), gpu(1));
        CHECK((a.device.id == 1 && to_host(a) == Floats(n, 2.5f)));
        CHECK(to_host(full({n}, 2.5f, cpu())) == Floats(n, 2.5f));
        add_(a, b);
        Floats sums = to_host(b);
        CHECK(sums == to_host(arange(n)));
        for (float &x : sums) x += 2.5f;
        CHECK(to_host(a) == sums);
    }
}

TEST_CASE("sgd: param -= lr * grad / batch_size") {
    Tensors p;
    for (int n : {1, 257, 1000}) {
        p.push_back(on_device(random_floats(n, n), {n}));
        p.back().grad = std::make_shared<Tensor>(on_device(random_floats(n, n + 1), {n}));
    }
    sgd(p, 0.3f, 7);
    for (const Tensor &t : p) {
        const int n = size(t);
        const Floats before = random_floats(n, n), grad = random_floats(n, n + 1);
        Doubles want(before.begin(), before.end());
        for (int i = 0; i < n; i++) want[i] -= 0.3 * grad[i] / 7;
        check_close(to_host(t), want, 3e-7); // four roundings of at most 2^-24
        CHECK(to_host(*t.grad) == grad);
    }
    const Tensor running = full({3}, 2, gpu(0)); // no gradient: nothing to learn
    sgd({running}, 0.3f, 7);
    CHECK(to_host(running) == Floats{2, 2, 2});
}

TEST_CASE("sum_kernel: counts around the size of a block") {
    for (int n : {0, 1, 2, 255, 256, 257, 1000}) {
        CAPTURE(n);
        const Tensor out = full({2}, -1, gpu(0)), l = copyto(arange(n), gpu(0));
        add_(l, full({n}, 1, gpu(0))); // 1, 2, ... n
        sum_kernel<<<1, threads, 0, on(gpu(0))>>>(out.ptr() + 1, l.ptr(), n);
        LAUNCH();
        CHECK(to_host(out) == Floats{-1, n * (n + 1) / 2.0f});
    }
}

TEST_CASE("count_correct_kernel: the first of the largest counts; adds to what is there") {
    const Tensor correct = full({1}, 5, gpu(0));
    auto count = [&](const Floats &y_hat, const Floats &y) {
        const int N = y.size(), classes = N ? y_hat.size() / N : 1;
        const Tensor z = on_device(y_hat, {N, classes}), labels = on_device(y, {N});
        count_correct_kernel<<<1, threads, 0, on(gpu(0))>>>(correct.ptr(), z.ptr(), labels.ptr(), N,
                                                            classes);
        LAUNCH();
        return to_host(correct)[0];
    };
    CHECK(count({1, 2, 3, 3, 2, 1, -3, -2, -1}, {2, 0, 2}) == 8); // all three right
    CHECK(count({1, 2, 3, 3, 2, 1, -3, -2, -1}, {0, 1, 1}) == 8); // none
    CHECK(count({1, 3, 3}, {1}) == 9);                            // a tie: the first of them
    CHECK((count({1, 3, 3}, {2}) == 9 && count({0, 0, 0}, {0}) == 10 && count({}, {}) == 10));
    const int N = 1000;
    Floats y_hat(3 * N), y(N);
    for (int n = 0; n < N; n++) // both are the same where n % 6 is 0 or 1
        y_hat[3 * n + n % 3] = 1, y[n] = n % 2;
    CHECK(count(y_hat, y) == 10 + 334);
}

// --- what is refused

TEST_CASE("conv2d, linear, pools, batch_norm, softmax_cross_entropy, add, empty: wrong shapes") {
    auto t = [](Ints shape) { return full(shape, 0, gpu(0)); };
    const Tensor W = t({4, 3, 3, 3}), b = t({4}), three = t({3});
    REFUSED(conv2d(t({1, 2, 5, 5}), W, b), "conv2d ... (1,2,5,5), (4,3,3,3), (4)");
    REFUSED(conv2d(t({1, 3, 5, 5}), t({4, 3, 3, 2}), b), "conv2d ... (4,3,3,2)");
    REFUSED(conv2d(t({1, 3, 5, 5}), W, three), "conv2d ... (3)");
    REFUSED(conv2d(t({1, 3, 2, 5}), W, b), "conv2d ... (1,3,2,5)");
    REFUSED(conv2d(t({1, 3, 5, 2}), W, b), "conv2d ... (1,3,5,2)");
    REFUSED(conv2d(t({3, 5, 5}), W, b), "conv2d ... (3,5,5)");
    REFUSED(conv2d(t({1, 3, 1, 5}), t({4, 3, 4, 4}), b, 1, 1), "conv2d: wants");
    CHECK(conv2d(t({1, 3, 2, 5}), t({4, 3, 4, 4}), b, 1, 1).shape == Ints{1, 4, 1, 4});
    REFUSED(conv2d(t({1, 3, 5, 5}), W, b, 0, 0), "conv2d ... stride > 0");
    REFUSED(conv2d(t({1, 3, 5, 5}), W, b, -1, 0), "conv2d ... stride > 0");
    REFUSED(conv2d(t({1, 3, 5, 5}), W, b, 1, -1), "conv2d ... padding >= 0");
    REFUSED(conv2d(t({1, 3, 5, 5}), t({4, 3, 0, 0}), b), "conv2d: wants");
    REFUSED(conv2d(t({1, 3, 5, 5}), t({0, 3, 3, 3}), t({0})), "conv2d: wants");
    REFUSED(conv2d(t({1, 0, 5, 5}), t({4, 0, 3, 3}), b), "conv2d: wants");
    REFUSED(conv2d(t({1, 1, 0, 3}), t({1, 1, 3, 3}), t({1}), 1, 2), "conv2d: wants");
    REFUSED(conv2d(t({1, 1, 3, 0}), t({1, 1, 3, 3}), t({1}), 1, 2), "conv2d: wants");
    REFUSED(linear(t({2, 3}), t({4, 5}), t({5})), "linear ... (2,3), (4,5), (5)");
    REFUSED(linear(t({2, 3}), t({3, 5}), t({4})), "linear ... (4)");
    REFUSED(linear(t({2, 3, 1, 1}), t({3, 5}), t({5})), "linear ... (2,3,1,1)");
    REFUSED(linear(t({3, 0}), t({0, 2}), t({2})), "linear: wants");
    REFUSED(linear(t({3, 2}), t({2, 0}), t({0})), "linear: wants");
    Tensor both = t({3});
    attach_grad(both);
    REFUSED(linear(t({2, 1}), reshape(both, {1, 3}), both), "linear ... share a gradient");
    REFUSED(avg_pool2d(t({1, 1, 2, 3}), 3, 1), "avg_pool2d ... (1,1,2,3)");
    REFUSED(avg_pool2d(t({1, 1, 3, 3}), 2, 0), "avg_pool2d");
    REFUSED(max_pool2d(t({1, 1, 2, 3}), 3, 1), "max_pool2d ... (1,1,2,3)");
    REFUSED(max_pool2d(t({1, 3, 3}), 2, 2), "max_pool2d ... (1,3,3)");
    REFUSED(max_pool2d(t({1, 1, 3, 3}), 2, 0), "max_pool2d");
    REFUSED(global_avg_pool2d(t({2, 3})), "global_avg_pool2d ... (2,3)");
    REFUSED(global_avg_pool2d(t({2, 3, 0, 1})), "global_avg_pool2d ... (2,3,0,1)");
    REFUSED(batch_norm(t({2, 3}), three, three, three, three), "batch_norm ... (2,3)");
    for (int wrong = 0; wrong < 4; wrong++) {
        Tensor p[4] = {three, three, three, three};
        p[wrong] = b;
        REFUSED(batch_norm(t({2, 3, 1, 1}), p[0], p[1], p[2], p[3]),
                "batch_norm ... (2,3,1,1) ... (4)");
    }
    REFUSED(add(t({2, 3}), t({3, 2})), "add ... (2,3), (3,2)");
    REFUSED(softmax_cross_entropy(t({2, 3}), three), "softmax_cross_entropy ... (2,3), (3)");
    REFUSED(softmax_cross_entropy(t({2, 0}), t({2})), "softmax_cross_entropy ... (2,0)");
    REFUSED(add_(t({2, 3}), t({3, 2})), "add_ ... (2,3), (3,2)");
    REFUSED(empty({-1, 3}, gpu(0)), "(-1,3) ... negative");
}

TEST_CASE("conv2d, linear, relu, pools, batch_norm, softmax_cross_entropy, add: wrong devices") {
    auto a = [](Ints shape) { return full(shape, 0, gpu(0)); };
    auto b = [](Ints shape) { return full(shape, 0, gpu(1)); };
    auto host = [](Ints shape) { return full(shape, 0, cpu()); };
#define TWO_DEVICES(call) REFUSED(call, "gpu(0) ... gpu(1) ... one device")
    TWO_DEVICES(conv2d(a({1, 1, 3, 3}), b({1, 1, 2, 2}), a({1})));
    TWO_DEVICES(linear(a({2, 3}), a({3, 4}), b({4})));
    TWO_DEVICES(softmax_cross_entropy(a({2, 3}), b({2})));
    TWO_DEVICES(add_(a({2}), b({2})));
    TWO_DEVICES(add(a({2}), b({2})));
    for (int wrong = 0; wrong < 4; wrong++) {
        Tensor p[4] = {a({3}), a({3}), a({3}), a({3})};
        p[wrong] = b({3});
        TWO_DEVICES(batch_norm(a({2, 3, 1, 1}), p[0], p[1], p[2], p[3]));
    }
    // The host is no device to compute on.
    REFUSED(relu(host({2})), "relu ... cpu");
    REFUSED(avg_pool2d(host({1, 1, 2, 2}), 2, 2), "avg_pool2d ... cpu");
    REFUSED(max_pool2d(host({1, 1, 2, 2}), 2, 2), "max_pool2d ... cpu");
    REFUSED(global_avg_pool2d(host({1, 1, 2, 2})), "global_avg_pool2d ... cpu");
    REFUSED(linear(a({2, 3}), host({3, 4}), a({4})), "linear ... gpu(0) ... cpu");
}

// ---------------------------------------------------------------------------------------------
// 9. Autograd

TEST_CASE("backward: the gradient of the sum, only for what the result depends on") {
    Tensor X = with_grad({{2}, {1, -1}}), other = on_device({1, 1}, {2});
    attach_grad(other);
    Tensor unused = relu(other), y = relu(X);
    backward(y);
    CHECK(all_to_host({*X.grad, *other.grad}) == Floats{1, 0, 0, 0});
    backward(relu(other)); // nothing is left over from the pass before
    CHECK(all_to_host({*X.grad, *other.grad}) == Floats{1, 0, 1, 1});
}

TEST_CASE("backward: one tensor in two places of an operator, and through a chain") {
    // l = sum of X @ X: dX = ones @ X^T + X^T @ ones, for X = [[1, 2], [3, 4]]
    Tensor X = with_grad({{2, 2}, {1, 2, 3, 4}});
    backward(linear(X, X, full({2}, 0, gpu(0))));
    CHECK(grad(X) == Floats{7, 11, 9, 13});
    // l = relu(X) @ X, with relu's gradient added to that of X
    Tensor b = full({2}, 0, gpu(0));
    backward(linear(relu(X), X, b));
    CHECK(grad(X) == Floats{7, 11, 9, 13});
}

TEST_CASE("backward: two operators that share a weight alone, and a bias alone") {
    const Tensor x = full({1, 1}, 5, gpu(0));
    Tensor V = with_grad({{1, 1}, {2}}), W = with_grad({{1, 1}, {3}});
    Tensor b = with_grad({{1}, {0}}), c = with_grad({{1}, {0}});
    backward(add(linear(x, V, b), linear(x, W, b)));
    CHECK(all_to_host({*V.grad, *W.grad, *b.grad}) == Floats{5, 5, 2});
    backward(add(linear(x, W, b), linear(x, W, c)));
    CHECK(all_to_host({*W.grad, *b.grad, *c.grad}) == Floats{10, 1, 1});
}

TEST_CASE("backward: a gradient's event stands behind its last write") {
    const std::vector<Tensor> p = get_params({arange(3)}, gpu(0));
    open_again = false;
    Tensor y = add(p[0], p[0]); // its backward is the last to write, after the stop
    record(y, [] { stop(gpu(0)); });
    backward(add(y, p[0]));
    usleep(50000);
    CHECK(cudaEventQuery(p[0].grad->complete->handle) == cudaErrorNotReady);
    open_again = true;
    CHECK(to_host(*p[0].grad) == Floats{3, 3, 3});
    CHECK(cudaEventQuery(p[0].grad->complete->handle) == cudaSuccess);
}

static Tensor times(const Tensor &X, float a) { // X (1,1)
    return linear(X, full({1, 1}, a, gpu(0)), full({1}, 0, gpu(0)));
}
TEST_CASE("attach_grad: of a relu's result, the gradient is its own") {
    const Tensor X = with_grad({{2}, {-1, 2}});
    Tensor h = relu(X), part = rows(h, 0, 1);
    attach_grad(h);
    backward(add(h, full({2}, 1, gpu(0))));
    CHECK(grad(h) == Floats{1, 1});
    std::vector<Tensor> list = {part};
    attach_grad(list);
    backward(add(list[0], list[0]));
    CHECK(grad(list[0]) == Floats{2});
}

TEST_CASE("backward: a gradient of another pass stays when what it was shared with is written") {
    const Tensor x = with_grad({{1, 1}, {5}});
    const Tensor A = times(x, 2), B = times(x, 3), y = add(A, B);
    backward(y);
    backward(times(y, 7));
    CHECK(all_to_host({*A.grad, *B.grad, *y.grad}) == Floats{1, 1, 7});
}

TEST_CASE("backward: refuses a result whose operators another pass has used up") {
    const Tensor W = with_grad({{2}, {1, 1}}), V = with_grad({{2}, {1, 1}});
    const Tensor first = add(W, W), second = add(V, W);
    backward(first);
    const Tensor third = add(V, V);
    REFUSED(backward(second), "backward ... gpu(0)");
    backward(third); // is still there
    CHECK(all_to_host({*W.grad, *V.grad}) == Floats{2, 2, 2, 2});
}

TEST_CASE("batch_norm: one tensor as gamma and beta") {
    const Tensor X = on_device({1, 3, 5, 11}, {4, 1, 1, 1}), w = on_device({3, -1, 2, 1}, {1, 4});
    const Tensor mean = full({1}, 0, gpu(0)), var = full({1}, 1, gpu(0)), b = full({1}, 0, gpu(0));
    const Tensor gamma = with_grad({{1}, {2}}), beta = with_grad({{1}, {2}});
    const Tensor both = with_grad({{1}, {2}});
    auto weighted = [&](const Tensor &y) { return linear(w, reshape(y, {4, 1}), b); };
    backward(weighted(batch_norm(X, gamma, beta, mean, var)));
    backward(weighted(batch_norm(X, both, both, mean, var)));
    CHECK(grad(both)[0] == doctest::Approx(grad(gamma)[0] + grad(beta)[0]));
}

TEST_CASE("blocks: numbers near 2^31") {
    CHECK((blocks(INT_MAX) == 1 << 23 && blocks(0) == 1 && blocks(257) == 2));
    REFUSED(blocks(1l << 31), "BATCH");
}

TEST_CASE("backward: each device has a tape of its own") {
    Tensor X[2] = {full({3}, 1, gpu(0)), full({3}, 2, gpu(1))};
    for (Tensor &x : X) attach_grad(x);
    Tensor y0 = relu(X[0]), y1 = relu(X[1]);
    backward(y0);
    CHECK(all_to_host({*X[0].grad, *X[1].grad}) == Floats{1, 1, 1, 0, 0, 0});
    backward(y1);
    CHECK(grad(X[1]) == Floats(3, 1));
}

TEST_CASE("backward: refuses what was not recorded") {
    Tensor X = full({2}, 1, gpu(1));
    REFUSED(backward(relu(X)), "backward ... gpu(1)"); // nothing wants a gradient
    attach_grad(X);
    Tensor y = relu(X);
    backward(y);
    REFUSED(backward(y), "backward ... gpu(1)"); // the tape was used up
}

TEST_CASE("NoGrad: while one exists, nothing is recorded") {
    Tensor X = full({2}, 1, gpu(0));
    attach_grad(X);
    {
        NoGrad guard;
        { NoGrad inner; }
        Tensor y = relu(X);
        CHECK_FALSE(y.grad);
        REFUSED(backward(y), "backward");
    }
    backward(relu(X));
    CHECK(grad(X) == Floats{1, 1});
}

// ---------------------------------------------------------------------------------------------
// 10. The other two networks

// A network's parameters on gpu(0): gradients for those that are trained. Weights such as
// init_params would not draw: N(0, 1/inputs of a sum), so that what goes through the network keeps
// its size; numbers around 1 for gamma and running_var, around 0 for biases, beta, running_mean.
static Tensors lively_params(const Block &net) {
    Tensors list;
    for (const Param &p : net.params) {
        const bool around_1 =
            p.name.find("bn") == 0 && !contains(p.name, ".bias") && !contains(p.name, "mean");
        const int inputs = p.shape.size() == 4   ? p.shape[1] * p.shape[2] * p.shape[3]
                           : p.shape.size() == 2 ? p.shape[0]
                                                 : 100;
        Input input = random_input(p.shape, 20 + list.size());
        for (float &x : input.numbers) x = x / std::sqrt((float)inputs) + around_1;
        list.push_back(p.requires_grad ? with_grad(input) : on_device(input.numbers, input.shape));
    }
    return list;
}

static int trained_numbers(const Block &net) {
    int numbers = 0;
    for (const Param &p : net.params)
        if (p.requires_grad)
            numbers += std::accumulate(p.shape.begin(), p.shape.end(), 1, std::multiplies<int>());
    return numbers;
}

TEST_CASE("resnet18: names, shapes, count and first values of its parameters") {
    ModelKept kept;
    options.model = "resnet18";
    init_model();
    const Block net = resnet18(10);
    CHECK(trained_numbers(net) == 11175818); // as PyTorch counts the chapter's
    CHECK(trained_numbers(resnet18(7, 3)) == 11175818 + 2 * 9 * 64 - 3 * 513);
    REQUIRE(params.size() == net.params.size());
    std::map<std::string, Ints> shapes;
    for (size_t i = 0; i < params.size(); i++) {
        const Param &p = net.params[i];
        CAPTURE(p.name);
        CHECK((param_names[i] == p.name && params[i].shape == p.shape && params[i].device.id < 0));
        CHECK((params[i].requires_grad == p.requires_grad && shapes.count(p.name) == 0));
        shapes[p.name] = p.shape;
        CHECK(p.requires_grad == (!contains(p.name, "running")));
        const Floats numbers = to_host(params[i]);
        if (p.name.find("bn") == 0) {
            const bool one = contains(p.name, ".weight") || contains(p.name, ".running_var");
            CHECK(numbers == Floats(numbers.size(), one));
        } else if (contains(p.name, ".bias")) {
            CHECK(numbers == Floats(numbers.size()));
        } else { // the deviation of the fewest, 576 numbers, is known to 3%
            double squares = 0;
            for (float x : numbers) squares += x * x;
            CHECK(std::fabs(std::sqrt(squares / numbers.size()) - 0.01) < 0.0015);
        }
    }
    // 17 convolutions of 3x3, 3 of 1x1; a 1x1 comes after the two that it goes around
    CHECK(shapes.size() == 20 * 2 + 17 * 4 + 2);
    const std::map<std::string, Ints> some = {{"conv0.weight", {64, 1, 3, 3}},
                                              {"conv5.weight", {128, 64, 3, 3}},
                                              {"conv7.weight", {128, 64, 1, 1}},
                                              {"conv17.weight", {512, 256, 1, 1}},
                                              {"conv19.bias", {512}},
                                              {"bn16.running_var", {512}},
                                              {"dense0.weight", {512, 10}}};
    for (const auto &[name, shape] : some) CHECK(shapes[name] == shape);
}

// Of a block, all its gradients against the difference quotients of a reference in double.
//   reference(p): its result, of its parameters and, behind them, X
static void check_block(const Block &block, const Input &X,
                        const std::function<Doubles(const Arrays &)> &reference) {
    Tensors params = lively_params(block);
    params.push_back(with_grad(X));
    Arrays exact;
    for (const Tensor &p : params) exact.push_back(doubles(p));
    const Tensor y = block.forward(params.back(), params.data());
    check_close(to_host(y), reference(exact), 3e-6); // two convolutions and normalizations
    const Floats dy = random_floats(size(y), 5);
    backward_from({y}, {dy});
    Floats got;
    Doubles want;
    for (size_t i = 0; i < params.size(); i++) {
        if (!params[i].grad) continue;
        for (float g : grad(params[i])) got.push_back(g);
        for (double slope :
             quotients(exact[i], 1e-6, {dy.begin(), dy.end()}, [&] { return reference(exact); }))
            want.push_back(slope);
    }
    // Together: the gradient of a bias before a normalization is 0, and rounding of the others'
    check_close(got, want, 1e-5);
}

TEST_CASE("Residual: result and gradients") {
    const int N = 3, H = 5, W = 4;
    for (bool stride_2 : {false, true}) {
        CAPTURE(stride_2);
        const int C = 2, O = stride_2 ? 3 : 2, S = stride_2 ? 2 : 1;
        const ConvSizes conv1 = {N, C, H, W, O, 3, S, 1}, conv3 = {N, C, H, W, O, 1, 2, 0};
        const ConvSizes conv2 = {N, O, conv1.OH(), conv1.OW(), O, 3, 1, 1};
        const int plane = conv2.H * conv2.W;
        const Block block = Residual(C, O, stride_2, S);
        CHECK(block.params.size() == (stride_2 ? 14 : 12));
        check_block(block, random_input({N, C, H, W}, 3), [=](const Arrays &p) {
            const Doubles &X = p.back();
            Doubles Y = conv2d_reference(X, p[0], p[1], conv1);
            Y = relu_reference(batch_norm_reference(Y, p[2], p[3], N, plane));
            Y = conv2d_reference(Y, p[6], p[7], conv2);
            Y = batch_norm_reference(Y, p[8], p[9], N, plane);
            const Doubles skip = stride_2 ? conv2d_reference(X, p[12], p[13], conv3) : X;
            for (size_t i = 0; i < Y.size(); i++) Y[i] += skip[i];
            return relu_reference(Y);
        });
    }
}

// The chapter's network once more, written out: which block follows which, with which parameters.
static Tensor resnet18_written_out(Tensor X, const Tensors &params) {
    const Tensor *p = params.data();
    auto conv = [&](const Tensor &X, int stride, int padding) {
        p += 2;
        return conv2d(X, p[-2], p[-1], stride, padding);
    };
    auto norm = [&](const Tensor &X) {
        p += 4;
        return batch_norm(X, p[-4], p[-3], p[-2], p[-1]);
    };
    X = relu(norm(conv(X, 1, 1)));
    for (int block = 0; block < 8; block++) {
        const bool half = block == 2 || block == 4 || block == 6;
        Tensor Y = relu(norm(conv(X, half ? 2 : 1, 1)));
        Y = norm(conv(Y, 1, 1));
        X = relu(add(Y, half ? conv(X, 2, 0) : X));
    }
    X = linear(global_avg_pool2d(X), p[0], p[1]);
    CHECK(p + 2 == params.data() + params.size());
    return X;
}

TEST_CASE("resnet18: the chapter's, in training and in evaluation; an empty shard" *
          doctest::skip(no_training)) {
    const Block net = resnet18(10);
    const int side = 8, N = 3;
    const Tensor X = on_device(random_floats(N * side * side, 1), {N, 1, side, side});
    const Tensor y = on_device({3, 1, 4}, {N});
    Tensors a = lively_params(net), b;
    for (const Tensor &p : a) {
        b.push_back(copyto(p, gpu(0)));
        if (p.grad) attach_grad(b.back());
    }
    const Tensor y_hat = net.forward(X, a.data());
    CHECK(y_hat.shape == Ints{N, 10});
    backward(loss(y_hat, y));
    const Tensor want = resnet18_written_out(X, b);
    backward(loss(want, y));
    CHECK(same_bits(to_host(y_hat), to_host(want)));
    for (size_t i = 0; i < a.size(); i++) {
        CAPTURE(net.params[i].name);
        CHECK(same_bits(to_host(a[i]), to_host(b[i]))); // running statistics
        REQUIRE((a[i].grad != nullptr) == net.params[i].requires_grad);
        if (!a[i].grad) continue;
        const Floats grad = to_host(*a[i].grad);
        CHECK(same_bits(grad, to_host(*b[i].grad)));
        CHECK(std::all_of(grad.begin(), grad.end(), [](float g) { return std::isfinite(g); }));
    }
    sgd(a, 0.1f, N); // goes around what has no gradient

    {
        NoGrad guard;
        std::vector<Floats> before;
        for (const Tensor &p : b) before.push_back(to_host(p));
        const Floats evaluated = to_host(net.forward(X, b.data()));
        CHECK(evaluated != to_host(want));
        CHECK(same_bits(evaluated, to_host(resnet18_written_out(X, b))));
        // Each image by itself: no statistics of the others
        const Floats last = to_host(net.forward(rows(X, N - 1, N), b.data()));
        check_close(last, Floats(evaluated.end() - 10, evaluated.end()), 1e-5);
        for (size_t i = 0; i < b.size(); i++) CHECK(same_bits(to_host(b[i]), before[i]));
    }

    backward(loss(net.forward(rows(X, 0, 0), a.data()), rows(y, 0, 0)));
    for (const Tensor &p : a) // an empty shard adds nothing to the sum of the gradients
        if (p.grad) CHECK(grad(p) == Floats(size(p)));
}

TEST_CASE("lab_cnn: names, count and first values of its parameters") {
    ModelKept kept;
    options.model = "lab_cnn";
    init_model();
    CHECK(trained_numbers(lab_cnn()) == 129068);
    CHECK(param_names == std::vector<std::string>{"conv0.weight", "conv0.bias", "conv1.weight",
                                                  "conv1.bias", "dense0.weight", "dense0.bias",
                                                  "dense1.weight", "dense1.bias"});
    for (size_t i = 0; i < params.size(); i++) {
        const Floats numbers = to_host(params[i]);
        const auto [low, high] = std::minmax_element(numbers.begin(), numbers.end());
        // of 180 weights and more, one comes near either end
        CHECK((i % 2 ? *low == 0 : *low >= -0.07f && *low < -0.06f));
        CHECK((i % 2 ? *high == 0 : *high <= 0.07f && *high > 0.06f));
    }
}

// LeNet in double: the references of section 8, in the order of lenet(). With max pooling it is
// lab_cnn, whose parameters have the same shapes.
struct LenetReference {
    Doubles y_hat, l;
    Arrays gradients; // of sum(l), for W1 b1 ... W4 b4
};
static LenetReference lenet_reference(const Doubles &X, const Doubles &y, const Arrays &p,
                                      bool max_pooling = false) {
    const int N = y.size();
    const ConvSizes conv1 = {N, 1, 28, 28, 20, 3}, conv2 = {N, 20, 13, 13, 50, 5};
    const PoolSizes pool1 = {N, 20, 26, 26, 2, 2}, pool2 = {N, 50, 9, 9, 2, 2};
    const LinearSizes linear3 = {N, 800, 128}, linear4 = {N, 128, 10};
    LenetReference r;
    const Doubles h1_conv = conv2d_reference(X, p[0], p[1], conv1);
    const Doubles h1_activation = relu_reference(h1_conv);
    const Doubles h1 = pool2d_reference(h1_activation, pool1, max_pooling);
    const Doubles h2_conv = conv2d_reference(h1, p[2], p[3], conv2);
    const Doubles h2_activation = relu_reference(h2_conv);
    const Doubles h2 = pool2d_reference(h2_activation, pool2, max_pooling);
    const Doubles h3_linear = linear_reference(h2, p[4], p[5], linear3);
    const Doubles h3 = relu_reference(h3_linear);
    r.y_hat = linear_reference(h3, p[6], p[7], linear4);
    r.l = cross_entropy_reference(r.y_hat, y);
    const Doubles dy_hat = cross_entropy_gradient(r.y_hat, y, Doubles(N, 1));
    const Arrays d4 = linear_gradients(h3, p[6], dy_hat, linear4);
    const Arrays d3 = linear_gradients(h2, p[4], relu_gradient(h3_linear, d4[0]), linear3);
    const Doubles dh2 =
        relu_gradient(h2_conv, pool2d_gradient(h2_activation, d3[0], pool2, max_pooling));
    const Arrays d2 = conv2d_gradients(h1, p[2], dh2, conv2);
    const Doubles dh1 =
        relu_gradient(h1_conv, pool2d_gradient(h1_activation, d2[0], pool1, max_pooling));
    const Arrays d1 = conv2d_gradients(X, p[0], dh1, conv1);
    r.gradients = {d1[1], d1[2], d2[1], d2[2], d3[1], d3[2], d4[1], d4[2]};
    return r;
}

TEST_CASE("lenet, lab_cnn: outputs, losses and the gradients of all parameters") {
    const auto [X, y] = minibatch(small_only ? 1 : 4, 2);
    const Tensors host_params = lively_params();
    Arrays exact;
    for (const Tensor &t : host_params) exact.push_back(doubles(t));
    for (bool lab : {false, true}) {
        CAPTURE(lab);
        const LenetReference want = lenet_reference(doubles(X), doubles(y), exact, lab);
        const Tensors p = get_params(host_params, gpu(0));
        const Tensor X_there = copyto(X, gpu(0));
        Tensor y_hat = lab ? lab_cnn().forward(X_there, p.data()) : lenet(X_there, p),
               l = loss(y_hat, copyto(y, gpu(0)));
        backward(l);
        CHECK(y_hat.shape == Ints{X.shape[0], 10});
        // The longest sums have 800 terms, and their errors pass through three layers more.
        check_close(to_host(y_hat), want.y_hat, 3e-6);
        check_close(to_host(l), want.l, 3e-6);
        // Errors of the forward pass and of the layers behind; most terms, 26*26 a sample, have W1
        // and b1.
        for (int i = 0; i < 8; i++) {
            CAPTURE(param_names[i]);
            check_close(grad(p[i]), want.gradients[i], i < 4 ? 1e-5 : 5e-6);
        }
    }
}

// ---------------------------------------------------------------------------------------------
// 11. Devices and memory

TEST_CASE("reshape: the same numbers and the same gradient") {
    Tensor X = with_grad({{2, 6}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}});
    CHECK((reshape(X, {3, 4}).shape == Ints{3, 4} && reshape(X, {-1}).shape == Ints{12}));
    CHECK((reshape(X, {2, -1, 3}).shape == Ints{2, 2, 3} && reshape(X, {4, -1}).data == X.data));
    CHECK(reshape(empty({0, 50, 4, 4}, gpu(0)), {0, -1}).shape == Ints{0, 800});
    REFUSED(reshape(X, {5, 2}), "reshape ... (2,6) ... (5,2)");
    REFUSED(reshape(X, {5, -1}), "reshape ... (2,6)");
    // Through a reshape of an operator's result and of a parameter: y = relu(X) as (3,4) times ones
    backward(
        linear(reshape(relu(X), {3, 4}), on_device({1, 2, 3, 4}, {4, 1}), full({1}, 0, gpu(0))));
    CHECK(grad(X) == Floats{0, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4});
    backward(relu(reshape(X, {12})));
    CHECK((grad(X) == Floats{0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1} && X.grad->shape == X.shape));
}

TEST_CASE("rows: a part of the same numbers") {
    const Tensor X = copyto(reshape(arange(24), {4, 3, 2}), gpu(1));
    const Tensor part = rows(X, 1, 3);
    CHECK(part.shape == Ints{2, 3, 2});
    CHECK(to_host(part) == Floats{6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17});
    add_(part, full({2, 3, 2}, 100, gpu(1)));
    const Floats all = to_host(X);
    CHECK((all[5] == 5 && all[6] == 106 && all[17] == 117 && all[18] == 18));
    CHECK((to_host(rows(X, 4, 4)).empty() && to_host(rows(arange(3), 2, 3)) == Floats{2}));
    CHECK_FALSE(rows(with_grad({{2}, {1, 2}}), 0, 1).grad); // which is that of all rows
}

TEST_CASE("check_replicas: one changed number is named") {
    init_params();
    const auto device_params = Training(3, params).device_params;
    check_replicas(device_params);
    const Tensor flat = reshape(device_params[2][3], {50, 1}); // b2, all 0
    copyto(on_host({-0.0f}, {1}), rows(flat, 17, 18));         // equal to 0, but not the same bits
    REFUSED(check_replicas(device_params), "b2[17] ... gpu(2)");
    copyto(on_host({0.0f}, {1}), rows(flat, 17, 18));
    check_replicas(device_params);
    copyto(on_host({1}, {1}), rows(reshape(device_params[1][4], {-1, 1}), 102399, 102400));
    REFUSED(check_replicas(device_params), "W3[102399] ... gpu(1)");
}

TEST_CASE("to_string: as NumPy prints") {
    const std::pair<Tensor, const char *> cases[] = {
        {full({3}, 0, cpu()), "[0. 0. 0.]"},
        {full({1, 2}, 3, gpu(1)), "[[3. 3.]] @gpu(1)"},
        {on_host({1, -10, 100}, {3}), "[  1. -10. 100.]"},
        {on_host({0.5f, -1.5f}, {2}), "[ 0.5 -1.5]"},
        {on_host({0.01234567f}, {1}), "[0.01234567]"},
        {on_host({NAN, 0.5f, -INFINITY}, {3}), "[ nan      0.5 -inf  ]"},
        {on_host({0.1f, 0.7f}, {2}), "[0.1 0.7]"},
        {on_host({0.5f, 1.25f}, {2}), "[0.5  1.25]"},
        {reshape(arange(12), {3, 4}),
         "[[ 0.  1.  2.  3.]\n [ 4.  5.  6.  7.]\n [ 8.  9. 10. 11.]]"},
        {reshape(arange(8), {2, 2, 2}), "[[[0. 1.]\n  [2. 3.]]\n\n [[4. 5.]\n  [6. 7.]]]"},
        {empty({0}, gpu(0)), "[] @gpu(0)"}};
    for (const auto &[t, text] : cases) CHECK(to_string(t) == text);
}

// ---------------------------------------------------------------------------------------------
// 12. Data, timing, output

// --- The data set

TEST_CASE("load_data gives the files' bytes") {
    TestFolder folder;
    for (int n : {1, 7, 8, 9, 15, 16, 17, 100}) { // the headers have 8 and 16 bytes
        CAPTURE(n);
        write_data(folder.file("a set's"), n, 3);
        DataSet set;
        REQUIRE(error_of([&] { set = load_data(folder.file("a set's"), "train"); }) == "");
        CHECK(set.count == n);
        CHECK(std::string(set.images.begin(), set.images.end()) == idx_images(n).substr(16));
        CHECK(std::string(set.labels.begin(), set.labels.end()) == idx_labels(n).substr(8));
        CHECK(load_data(folder.file("a set's"), "t10k").count == 3);
    }
}

TEST_CASE("load_data: where a parent has ignored the ends of its children") {
    TestFolder folder;
    write_data(folder.path, 8, 2);
    signal(SIGCHLD, SIG_IGN); // which is inherited
    CHECK(load_data(folder.path, "train").count == 8);
}
TEST_CASE("load_data keeps the first samples with --limit") {
    TestFolder folder;
    OptionsKept kept;
    write_data(folder.path, 20, 5);
    for (int limit : {1, 7, 20, 21}) {
        options.limit = limit;
        DataSet set = load_data(folder.path, "train");
        CHECK(set.count == std::min(limit, 20));
        CHECK(std::string(set.labels.begin(), set.labels.begin() + set.count) ==
              idx_labels(20).substr(8, set.count));
        CHECK(load_data(folder.path, "t10k").count == std::min(limit, 5));
    }
}

TEST_CASE("load_idx names the file and what is wrong with it") {
    TestFolder folder;
    const std::string path = folder.file("file.gz"), images = idx_images(3), labels = idx_labels(3);
    auto wrong = [&](int dims) {
        std::string text = error_of([&] { load_idx(path, dims); });
        CHECK(text.compare(0, path.size() + 2, path + ": ") == 0);
        return text;
    };
    check_says(wrong(3), "No such file or directory: `make data`");
    const std::string pixels = images.substr(16), classes = labels.substr(8);
    const struct {
        int dims;
        std::string unpacked, says;
    } cases[] = {
        {3, "", "it ends in its header"},
        {3, images.substr(0, 15), "it ends in its header"},
        {1, labels.substr(0, 7), "it ends in its header"},
        {3, images.substr(0, 16), "it names 3 samples, but has the bytes of 0"},
        {3, images.substr(0, images.size() - 1), "it names 3 samples, but has the bytes of 2"},
        {1, labels.substr(0, labels.size() - 1), "it names 3 samples, but has the bytes of 2"},
        {3, images + "x", "it names 3 samples, but has the bytes of 3"},
        {1, labels + "x", "it names 3 samples, but has the bytes of 4"},
        {3, idx({2049, 3, 28, 28}, pixels), "its magic number is 2049, not 2051"},
        {1, idx({2051, 3}, classes), "its magic number is 2051, not 2049"},
        {3, idx({0x03080000, 3, 28, 28}, pixels), "its magic number is 50855936, not 2051"},
        {3, idx({2051, 3, 27, 28}, pixels), "its images are not 28x28"},
        {3, idx({2051, 3, 28, 29}, pixels), "its images are not 28x28"},
        {3, idx({2051, 0, 28, 28}, ""), "it names 0 samples"},
        {1, idx({2049, 0}, ""), "it names 0 samples"},
        {3, idx({2051, 4294967295, 28, 28}, pixels), "it names 4294967295 samples"},
        {1, idx({2049, 1000001}, std::string(1000001, 0)), "it names 1000001 samples"}};
    for (const auto &c : cases) {
        write_gz(path, c.unpacked);
        check_says(wrong(c.dims), c.says);
    }

    // Bytes that are not, or not all, a gzip file
    write_gz(path, labels);
    const std::string packed = read_text(path), cut = packed.substr(0, packed.size() - 1);
    for (size_t n = 0; n < packed.size(); n += small_only ? 7 : 1) {
        write_text(path, packed.substr(0, n));
        CHECK(wrong(1) != ""); // the last ones unpack to all the labels: only gzip's status tells
    }
    for (const std::string &bytes : {labels, cut, packed + "garbage"}) {
        write_text(path, bytes);
        check_says(wrong(1), "gzip cannot unpack it");
    }
    std::filesystem::remove(path);
    std::filesystem::create_directory(path);
    check_says(wrong(1), "gzip cannot unpack it");
}

TEST_CASE("load_data refuses labels that are no classes or of other images") {
    TestFolder folder;
    const std::string images_path = folder.path + train_images;
    const std::string labels_path = folder.path + train_labels;
    auto wrong = [&] { return error_of([&] { load_data(folder.path, "train"); }); };
    write_data(folder.path, 3, 3);
    write_gz(labels_path, idx({2049, 3}, {0, 10, 9}));
    check_says(wrong(), labels_path + ": label 1 is 10, not 0 to 9");
    write_gz(labels_path, idx({2049, 3}, {0, 9, char(255)}));
    check_says(wrong(), labels_path + ": label 2 is 255, not 0 to 9");
    write_gz(labels_path, idx_labels(4));
    check_says(wrong(), images_path + " has 3 images, but " + labels_path + " has 4 labels");
    std::filesystem::remove(labels_path);
    check_says(wrong(), labels_path + ": No such file");
}

// Sample i's label is i, and its pixels tell i as well.
static DataSet numbered_set(int count) {
    DataSet set;
    set.count = count;
    for (int i = 0; i < count; i++) {
        set.labels.push_back(i);
        for (int p = 0; p < 28 * 28; p++) set.images.push_back((i + p) % 256);
    }
    return set;
}

// The samples of one epoch in their order, after checks of every minibatch. The minibatches are
// looked at when the epoch is over: that is when a device may read the last of them.
static Floats epoch_of(DataIter &iter, const Ints &sizes) {
    Tensors Xs, ys;
    iter.reset();
    for (Tensor X, y; iter.next(X, y);) {
        Xs.push_back(X);
        ys.push_back(y);
    }
    Floats samples;
    Ints got_sizes;
    bool exact = true;
    for (size_t b = 0; b < Xs.size(); b++) {
        got_sizes.push_back(ys[b].shape[0]);
        REQUIRE(Xs[b].shape == Ints{got_sizes[b], 1, 28, 28});
        const Floats X = to_host(Xs[b]), y = to_host(ys[b]);
        samples.insert(samples.end(), y.begin(), y.end());
        for (size_t i = 0; i < X.size(); i++)
            exact = exact && X[i] == ((int)y[i / 784] + i % 784) % 256 / 255.0f;
    }
    CHECK((exact && got_sizes == sizes));
    return samples;
}
static Floats sorted(Floats numbers) {
    std::sort(numbers.begin(), numbers.end());
    return numbers;
}

TEST_CASE("DataIter covers every sample once an epoch") {
    const struct {
        int count, batch;
        Ints sizes;
    } cases[] = {{10, 4, {4, 4, 2}}, {12, 4, {4, 4, 4}}, {10, 10, {10}},
                 {3, 256, {3}},      {3, 1, {1, 1, 1}},  {50, 2, Ints(25, 2)}};
    for (const auto &c : cases) {
        INFO("count ", c.count, ", batch ", c.batch);
        const Floats file = to_host(arange(c.count)); // in its order
        DataSet set = numbered_set(c.count);
        DataIter plain = make_iter(set, c.batch, false), shuffled = make_iter(set, c.batch, true);
        for (int epoch = 0; epoch < 3; epoch++) {
            CHECK(epoch_of(plain, c.sizes) == file);
            CHECK(sorted(epoch_of(shuffled, c.sizes)) == file);
        }
    }
    // From the middle of an epoch on, beyond what would be filled ahead
    const DataSet set = numbered_set(50);
    DataIter iter = make_iter(set, 2, false);
    Tensor X, y;
    for (int begin : {0, 42}) {
        iter.begin = begin;
        REQUIRE(iter.next(X, y));
        CHECK(
            (to_host(y) == Floats{begin + 0.f, begin + 1.f} && X.ptr()[1] == (begin + 1) / 255.0f));
    }
}

TEST_CASE("DataIter shuffles anew each epoch, the same for the same seed") {
    DataSet set = numbered_set(100);
    const Ints sizes = {64, 36};
    auto two_epochs = [&](unsigned seed) {
        rng.seed(seed);
        DataIter iter = make_iter(set, 64, true);
        Floats first = epoch_of(iter, sizes), second = epoch_of(iter, sizes);
        CHECK((first != to_host(arange(100)) && first != second));
        first.insert(first.end(), second.begin(), second.end());
        return first;
    };
    CHECK((two_epochs(5) == two_epochs(5) && two_epochs(5) != two_epochs(6)));
    // An epoch that was left early: the next one is whole
    DataIter iter = make_iter(set, 64, true);
    Tensor X, y;
    iter.reset();
    iter.next(X, y);
    CHECK(sorted(epoch_of(iter, sizes)) == to_host(arange(100)));
}

TEST_CASE("evaluate_accuracy_gpu counts each sample once") {
    DataSet set = numbered_set(10);
    // `scores(i)`: the ten scores that the network gives sample i
    auto accuracy = [&](int batch, const std::function<Floats(int)> &scores) {
        DataIter iter = make_iter(set, batch, false);
        auto net = [&](const Tensor &X) {
            Floats y_hat, pixels = to_host(X);
            for (int n = 0; n < X.shape[0]; n++) {
                Floats s = scores(std::lround(pixels[n * 784] * 255));
                y_hat.insert(y_hat.end(), s.begin(), s.end());
            }
            return on_device(y_hat, {X.shape[0], 10}, X.device);
        };
        return evaluate_accuracy_gpu(net, iter, gpu(1));
    };
    auto one_at = [](Ints classes) {
        Floats s(10, -1.5f);
        for (int c : classes) s[c] = 2.5f;
        return s;
    };
    for (int batch : {1, 3, 4, 10, 256}) {
        CAPTURE(batch);
        CHECK(accuracy(batch, [&](int i) { return one_at({i}); }) == 1.0f);
        CHECK(accuracy(batch, [&](int i) { return one_at({(i + 1) % 10}); }) == 0.0f);
        CHECK(accuracy(batch, [&](int i) { return one_at({i < 7 ? i : 0}); }) == 0.7f);
        CHECK(accuracy(batch, [&](int i) { return one_at({i == 9 ? 9 : 3}); }) == 0.2f);
        // Of equal scores the first counts: 4 is taken for 4, and 8 as well. The others are wrong.
        for (int tied : {4, 8})
            CHECK(accuracy(batch, [&](int i) {
                      return one_at(i == tied ? Ints{4, 8} : Ints{(i + 1) % 10});
                  }) == (tied == 4 ? 0.1f : 0.0f));
    }
}

TEST_CASE("shard_sizes: even, or in the proportion of SPLIT, and every sample once") {
    OptionsKept kept;
    const struct {
        Ints split, sizes;
    } cases[] = {{{}, {3, 2, 2}},        {{3, 1}, {192, 64}},      {{3, 1}, {4, 1}},
                 {{3, 1}, {1, 0}},       {{1, 3}, {0, 1}},         {{1, 1, 1}, {3, 3, 2}},
                 {{1, 2, 4}, {1, 3, 6}}, {{1000, 1}, {59940, 60}}, {{5, 1}, {0, 0}}};
    for (const auto &c : cases) {
        const int n = std::accumulate(c.sizes.begin(), c.sizes.end(), 0);
        options.split = c.split;
        CAPTURE(n);
        CHECK(shard_sizes(n, c.sizes.size()) == c.sizes);
    }
    options.split = {3, 1};
    REFUSED(shard_sizes(8, 3), "SPLIT has 2 parts ... 3 devices");
}

TEST_CASE("evaluate_accuracy_gpus gives what one device gives, for every model") {
    ModelKept kept;
    for (std::string model : {"lenet", "lab_cnn", "resnet18"}) {
        if (small_only && model != "lab_cnn") continue;
        const bool slow = model == "resnet18";
        options.model = model;
        CAPTURE(model);
        DataSet set = numbered_set(slow ? 4 : 10);
        const int few = slow ? 2 : 4;
        for (size_t i = 0; i < set.images.size(); i++) set.images[i] = i * 37 % 251;
        init_model();
        params.back().ptr()[0] = -1e9f; // class 0, as which NaN counts, is never a label
        // Of the running statistics only the first device's may count
        auto statistic = [](int c) { return c == 0 ? 0.01f : NAN; };
        auto p = Training(3, params).device_params;
        for (int c = 0; c < 3; c++)
            for (Tensor &t : p[c])
                if (!t.requires_grad) copyto(full(t.shape, statistic(c), gpu(c)), t);
        DataIter iter = make_iter(set, few, false); // the last minibatch leaves a device idle
        auto on_one = [&](const Tensor &x) { return net(x, p[0]); };
        // Labels that make the accuracy neither 0 nor 1: what the network says of every other image
        Tensor X, y;
        iter.reset();
        for (int begin = 0; iter.next(X, y); begin += few) {
            NoGrad guard;
            const Floats y_hat = to_host(on_one(copyto(X, gpu(0))));
            for (int n = 0; n < X.shape[0]; n++) {
                const float *row = &y_hat[10 * n];
                const int best = std::max_element(row, row + 10) - row;
                set.labels[begin + n] = n % 2 ? best % 9 + 1 : best;
            }
        }
        for (int batch : slow ? Ints{2} : Ints{1, 4, 10}) {
            DataIter one = make_iter(set, batch, false);
            const float want = evaluate_accuracy_gpu(on_one, one, gpu(0));
            CHECK((want > 0.3f && want < 0.7f));
            for (int k : slow ? Ints{3} : Ints{1, 2, 3}) {
                DataIter many = make_iter(set, batch, false);
                const std::vector<Tensors> some(p.begin(), p.begin() + k);
                CHECK(evaluate_accuracy_gpus(net, some, many, first_devices(k)) == want);
            }
        }
        for (int c = 0; c < 3; c++) // nothing has changed
            for (const Tensor &t : p[c])
                if (!t.requires_grad) CHECK(same_bits(to_host(t), Floats(size(t), statistic(c))));
    }
}

TEST_CASE(
    "train_batch: k devices train lab_cnn as one does, resnet18 with statistics of their own" *
    doctest::skip(small_only)) {
    ModelKept kept;
    for (std::string model : {"lab_cnn", "resnet18"}) {
        options.model = model;
        CAPTURE(model);
        init_model();
        const bool lab = model == "lab_cnn";
        const auto batch = minibatch(lab ? 6 : 3, 3);
        Training one(1, params), two(2, params);
        const Floats losses = two.step(batch);
        if (lab) check_close(losses, one.step(batch), 1e-6);
        for (size_t i = 0; i < params.size(); i++) {
            CAPTURE(param_names[i]);
            const Tensor &a = two.device_params[0][i], &b = two.device_params[1][i];
            CHECK((bool)a.grad == params[i].requires_grad);
            CHECK(same_bits(to_host(a), to_host(b)) == params[i].requires_grad);
            if (lab) // the same terms, added in another order
                check_close(grad(a), grad(one.device_params[0][i]), 1e-5);
        }
    }
}

// --- Time and output

TEST_CASE("Timer means over the pairs of start and stop") {
    Timer timer;
    CHECK(timer.avg() == 0);
    const double t0 = now();
    for (int i = 0; i < 2; i++) {
        timer.start();
        usleep(10000);
        timer.stop();
        usleep(20000); // counts for nothing
    }
    const double rest = now() - t0 - 2 * 0.02;
    REQUIRE(timer.times.size() == 2);
    for (double t : timer.times) CHECK(t >= 0.01);
    CHECK(timer.times[0] + timer.times[1] <= rest);
    timer.times = {1, 2, 6};
    CHECK(timer.avg() == 3);
}

TEST_CASE("str names devices as the tutorial does") {
    CHECK((str(gpu(0)) == "gpu(0)" && str(gpu(12)) == "gpu(12)" && str(cpu()) == "cpu"));
    CHECK(str(std::vector<Device>{gpu(0)}) == "[gpu(0)]");
    CHECK(str(std::vector<Device>{gpu(0), gpu(1), gpu(2)}) == "[gpu(0), gpu(1), gpu(2)]");
}

// The losses of a minibatch as they lie on the devices.
static Tensors losses_on(const std::vector<Floats> &shards) {
    Tensors ls;
    for (const Floats &shard : shards)
        ls.push_back(on_device(shard, {(int)shard.size()}, gpu(ls.size())));
    return ls;
}

TEST_CASE("Animator's loss is the mean over all samples of the epoch") {
    double means[2];
    printed([&] {
        Animator animator({gpu(0), gpu(1), gpu(2)}, 3);
        animator.step(losses_on({{1, 2}, {3}, {4}}));
        animator.step(losses_on({{10, 20}, {30}, {50}}));
        animator.step(losses_on({{7}, {}, {}})); // the epoch's last minibatch: idle devices
        means[0] = animator.finish(0);
        animator.step(losses_on({{8}, {16}, {}})); // the next epoch, stopped after a step
        means[1] = animator.finish(1);
    });
    CHECK((means[0] == (1 + 2 + 3 + 4 + 10 + 20 + 30 + 50 + 7) / 9.0 && means[1] == 12));
}

TEST_CASE("Animator stops at a loss that is no number, and names the step") {
    OptionsKept kept;
    options.lr = 0.5f;
    for (float bad : {NAN, INFINITY, -INFINITY}) {
        std::string text;
        printed([&] {
            Animator animator({gpu(0), gpu(1)}, 4);
            for (int s = 0; s < 4; s++) animator.step(losses_on({{1, 2}, {3, s == 2 ? bad : 4}}));
            text = error_of([&] { animator.finish(6); });
        });
        check_says(text, "in step 3 of epoch 7: use a smaller LR than 0.5");
    }
}

TEST_CASE("Animator writes a row an epoch and the same to the log") {
    TestFolder folder;
    OptionsKept kept;
    options.log = folder.file("new folder/log.csv");
    std::string first;
    std::string out = printed([&] {
        Animator animator({gpu(0)}, 3);
        CHECK(!animator.progress->bar); // stdout is a file
        animator.step(losses_on({{1}}));
        animator.finish(0);
        animator.add(1, 2.30258509, 0.1f, 1.25);
        first = read_text(options.log);
        animator.add(12, 0.4999999, 0.8215f, 123.456);
    });
    CHECK(out == "epoch      loss  test acc   seconds\n"
                 "    1    2.3026    0.1000      1.25\n"
                 "   12    0.5000    0.8215    123.46\n");
    CHECK(first == "epoch,loss,test_acc,seconds\n1,2.302585,0.1000,1.2500\n");
    CHECK(read_text(options.log) == first + "12,0.500000,0.8215,123.4560\n");
    CHECK(folder.listing() == std::set<std::string>{"new folder", "new folder/log.csv"});
}

TEST_CASE("Animator draws a line on a terminal, ten times a second at most, and wipes it away") {
    std::string out = printed([&] {
        Animator animator({gpu(0), gpu(1)}, 2);
        animator.progress->bar = true;
        for (int epoch = 0; epoch < 2; epoch++) {
            animator.step(losses_on({{1, 2}, {100}}));
            waitall();
            animator.progress->start -= 1000; // some images/s that are known
            animator.step(losses_on({{6}, {}}));
            animator.finish(epoch);
        }
    });
    const std::string last =
        "\r    2/2 [" + std::string(30, '=') + "]  loss 3.0000  0 images/s  0 s left\033[K\r\033[K";
    REQUIRE(out.size() > last.size());
    CHECK(out.substr(out.size() - last.size()) == last); // the larger shard's loss
    out = printed([&] {
        Animator animator({gpu(0), gpu(1)}, 1);
        animator.progress->bar = true;
        animator.step(losses_on({{}, {4, 6}})); // SPLIT=1,1000
        animator.finish(0);
    });
    CHECK(contains(out, "  loss 5.0000  "));
    double seconds = 0;
    out = printed([&] {
        Animator animator({gpu(0)}, 3000);
        animator.progress->bar = true;
        for (int s = 0; s < 3000; s++) animator.step(losses_on({{1}}));
        animator.finish(0);
        seconds = now() - animator.progress->start;
    });
    CHECK(std::count(out.begin(), out.end(), '\r') <= 10 * seconds + 3);
}
TEST_CASE("progress_line: the part that is done, the rate, the time that is left") {
    const std::string none(15, ' '), half(15, '=');
    CHECK(progress_line(30000, 60000, 0.5, 1e6, 10) ==
          "30000/60000 [" + half + none + "]  loss 0.5000  100000 images/s  10 s left");
    CHECK(progress_line(1, 60000, 2, 256, 0.125) ==
          "    1/60000 [" + none + none + "]  loss 2.0000  2048 images/s  7500 s left");
}

// --- Files that are written

TEST_CASE("write_file writes all or nothing") {
    TestFolder folder;
    const std::string path = folder.file("a/b/file"), bytes("0\0\xff\n", 4);
    write_file(path, bytes);
    CHECK(read_text(path) == bytes);
    write_text(path + ".part", "new"); // by another run, which writes the file, too
    write_file(path, "shorter");
    CHECK((read_text(path) == "shorter" && read_text(path + ".part") == "new"));
    std::filesystem::remove(path + ".part");
    const std::set<std::string> before = folder.listing();
    CHECK(before == std::set<std::string>{"a", "a/b", "a/b/file"});
    auto wrong = [&](const std::string &p) { return error_of([&] { write_file(p, "new"); }); };
    check_says(wrong(path + "/below"), "cannot write " + path + "/below: Not a directory");
    check_says(wrong(folder.file("a/b")), "a/b: Is a directory");
    check_says(wrong("/proc/none/file"), "cannot write /proc/none/file: ");
    check_says(wrong(""), "cannot write");
    // A disk that is full in the midst of it: here, a limit on the size of files
    rlimit limit;
    REQUIRE(getrlimit(RLIMIT_FSIZE, &limit) == 0);
    rlimit small = {10000, limit.rlim_max};
    auto handler = signal(SIGXFSZ, SIG_IGN);
    REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
    std::string text = error_of([&] { write_file(path, std::string(100000, 'x')); });
    setrlimit(RLIMIT_FSIZE, &limit);
    signal(SIGXFSZ, handler);
    check_says(text, "cannot write " + path + ": File too large");
    CHECK((read_text(path) == "shorter" && folder.listing() == before));
}

TEST_CASE("write_file does not put a file in the place of a device") {
    TestFolder folder; // a link, so that no mistake can harm the device itself
    std::filesystem::create_symlink("/dev/null", folder.file("null"));
    std::filesystem::create_symlink("/dev/full", folder.file("full"));
    const std::set<std::string> before = folder.listing();
    check_writable(folder.file("null"));
    write_file(folder.file("null"), "text");
    check_says(error_of([&] { write_file(folder.file("full"), "text"); }), "No space left");
    for (const char *name : {"null", "full"}) CHECK(std::filesystem::is_symlink(folder.file(name)));
    CHECK(folder.listing() == before);
}

TEST_CASE("check_writable fails where write_file will, and leaves nothing behind") {
    TestFolder folder;
    write_text(folder.file("file"), "kept");
    const std::set<std::string> before = folder.listing();
    auto wrong = [](const std::string &path) { return error_of([&] { check_writable(path); }); };
    for (const char *name : {"file", "new", "new folder/new", "a/b/c/new"}) {
        CAPTURE(name);
        CHECK((wrong(folder.file(name)) == "" && folder.listing() == before));
    }
    CHECK(read_text(folder.file("file")) == "kept");
    for (const std::string &path : {folder.file("file/below"), folder.file("file/a/b")})
        check_says(wrong(path), "cannot write " + path + ": Not a directory");
    check_says(wrong(folder.path), "cannot write " + folder.path + ": it is a folder");
    check_says(wrong("/proc/none/file"), "cannot write /proc/none/file: ");
    // A folder that this user may not write in. Root may, and so is another user for a moment.
    std::filesystem::permissions(folder.path, std::filesystem::perms(0555));
    const bool root = geteuid() == 0;
    if (root) REQUIRE(seteuid(65534) == 0);
    const std::string text = wrong(folder.file("new"));
    if (root) REQUIRE(seteuid(0) == 0);
    std::filesystem::permissions(folder.path, std::filesystem::perms(0755));
    check_says(text, "cannot write " + folder.file("new") + ": Permission denied");
    CHECK(folder.listing() == before);
}

// --- .npy

// What NumPy writes: the header `dict` makes a multiple of 64 bytes with all that stands before it.
static std::string npy(std::string dict, const std::string &numbers, char version = 1) {
    dict.append(63 - (10 + dict.size()) % 64, ' ');
    dict += '\n';
    return std::string("\x93NUMPY") + version + '\0' + char(dict.size() & 255) +
           char(dict.size() >> 8) + dict + numbers;
}
static std::string npy_dict(const std::string &shape, const std::string &descr = "<f4",
                            const std::string &order = "False") {
    return "{'descr': '" + descr + "', 'fortran_order': " + order + ", 'shape': " + shape + ", }";
}
static std::string bytes_of(const Floats &numbers) {
    return {(const char *)numbers.data(), numbers.size() * sizeof(float)};
}

TEST_CASE("save_npy writes NumPy's format, and load_npy reads it bit for bit") {
    CHECK(npy(npy_dict("(20,)"), "").size() == 128); // as from NumPy itself
    TestFolder folder;
    const std::pair<Ints, std::string> cases[] = {
        {{20}, "(20,)"}, {{1}, "(1,)"}, {{800, 3}, "(800, 3)"}, {{2, 3, 5, 7}, "(2, 3, 5, 7)"}};
    for (const auto &one : cases) {
        const auto &[shape, text] = one;
        CAPTURE(one.second);
        const std::string path = folder.file("W.npy");
        Floats numbers = random_floats(size(empty(shape, cpu())), 1);
        numbers[0] = -0.0f;
        if (numbers.size() > 3) { // what a text would not keep
            const uint32_t nan_bits = 0xffc12345;
            numbers[1] = INFINITY;
            numbers[2] = 1e-45f;
            memcpy(&numbers[3], &nan_bits, 4);
        }
        for (Device device : {cpu(), gpu(0), gpu(2)}) {
            Tensor t = on_host(numbers, shape);
            save_npy(path, device.id < 0 ? t : copyto(t, device));
            CHECK((read_text(path) == npy(npy_dict(text), bytes_of(numbers))));
        }
        Tensor got = full(shape, 5, cpu());
        load_npy(path, got);
        CHECK((bytes_of(to_host(got)) == bytes_of(numbers)));
    }
}

TEST_CASE("load_npy takes exactly such a file, and says what another one is") {
    TestFolder folder;
    const std::string path = folder.file("W1.npy"), numbers = bytes_of(random_floats(6, 1)),
                      dict = npy_dict("(2, 3)"), good = npy(dict, numbers);
    Tensor t = full({2, 3}, 5, cpu());
    auto wrong = [&] {
        std::string text = error_of([&] { load_npy(path, t); });
        CHECK(text.compare(0, path.size() + 2, path + ": ") == 0);
        CHECK(to_host(t) == Floats(6, 5)); // untouched
        return text;
    };
    check_says(wrong(), "No such file or directory");
    const std::pair<std::string, const char *> files[] = {
        {"", "not a .npy file"},
        {"\x1f\x8b a gzip file, say", "not a .npy file"},
        {npy(dict, numbers, 2), "not a .npy file of version 1.0"},
        {npy(dict, numbers.substr(1)), "fewer numbers"},
        {npy(dict, ""), "fewer numbers"},
        {npy(dict, numbers + "x"), "more numbers"},
        {npy(dict, std::string(100000, 'x')), "more numbers"}};
    for (const auto &[bytes, says] : files) {
        write_text(path, bytes);
        check_says(wrong(), says);
    }
    for (const std::string &got :
         {npy_dict("(2, 3)", "<f8"), npy_dict("(2, 3)", ">f4"), npy_dict("(2, 3)", "<i4"),
          npy_dict("(2, 3)", "<f4", "True"), npy_dict("(3, 2)"), npy_dict("(6,)"),
          npy_dict("(2, 3, 1)"), npy_dict("()"), npy_dict("(2, 4294967299)"), // 3 as an int
          std::string("{'descr': '<f4', 'shape': (2, 3), }")}) {
        write_text(path, npy(got, numbers));
        check_says(wrong(), "wants " + dict + ", got " + got);
    }
    // Every cut, and every byte of the header changed: only the spaces behind the dict may change
    for (size_t n = 0; n < good.size(); n++) {
        write_text(path, good.substr(0, n));
        CHECK(wrong() != "");
    }
    for (size_t i = 0; i < good.size() - numbers.size(); i++)
        for (char byte : {char(good[i] ^ 255), char(good[i] ^ 1), '\0', '\n', '}'}) {
            std::string changed = good;
            changed[i] = byte;
            write_text(path, changed);
            if (byte == good[i] || i >= 10 + dict.size()) continue;
            CAPTURE(i);
            check_says(wrong(), "");
        }
    write_text(path, good);
    load_npy(path, t);
    CHECK((bytes_of(to_host(t)) == numbers));
}

// ---------------------------------------------------------------------------------------------
// ---------------------------------------------------------------------------------------------
// 13. The first minibatch

// What check_first_step says of a step that `spoil` has changed. What it prints goes to `line`.
typedef std::function<void(Training &training, Tensors &ls)> Spoil;
static std::string first_step(int k, int n, const Spoil &spoil = nullptr,
                              std::string *line = nullptr) {
    const auto [X, y] = minibatch(n, 3);
    Training training(k, params);
    Tensors ls = train_batch(X, y, training.device_params, training.devices, options.lr);
    if (spoil) spoil(training, ls);
    std::string said;
    const std::string out = printed([&, &X = X, &y = y] {
        said = error_of([&] { check_first_step(X, y, ls, training.device_params, options.lr); });
    });
    CHECK((said != "") == (out == ""));
    if (line) *line = out;
    return said;
}

TEST_CASE("check_first_step: a right step passes, for each model, seed and number of devices" *
          doctest::skip(no_training)) {
    ModelKept kept;
    for (std::string model : {"lenet", "lab_cnn"}) // resnet18's: "program: the lab's prints ..."
        for (int k : {1, 2, 5}) {
            if (small_only && (model != "lab_cnn" || k != 2)) continue;
            set_model(model, k); // k is the seed too
            for (int n : {1, 7}) {
                INFO(model, ", k ", k, ", n ", n);
                CHECK(first_step(k, n) == "");
            }
        }
    set_model("lenet", 0);
    for (const std::string &name : right_algorithms) {
        if (small_only && name != "ring") continue;
        OptionsKept kept;
        exchange =
            exchange_by(name, true); // OVERLAP changes no bit: "train_batch: every algorithm ..."
        CAPTURE(name);
        CHECK(first_step(3, 4) == "");
    }
    options.split = {3, 1};
    CHECK(first_step(2, 7) == "");
    // Equal weights: equal logits, large ones, and gradients that are 0, perhaps but for rounding
    for (float c : {0.1f, 1.0f, 10.0f, 0.0f}) {
        CAPTURE(c);
        for (int i : {0, 2, 4, 6}) params[i] = full(params[i].shape, c, cpu());
        CHECK(first_step(2, 16) == "");
    }
}

TEST_CASE("check_first_step: what is wrong is named, with both numbers" *
          doctest::skip(small_only)) {
    ModelKept kept;
    set_model("lenet", 0);
    auto changed = [](const Tensor &t, const std::function<float(float)> &f) {
        Floats numbers = to_host(t);
        for (float &x : numbers) x = f(x);
        copyto(on_host(numbers, t.shape), t);
    };
    const std::string see = "make check looks for the cause";
    for (float value : {NAN, 7.0f})
        check_says(first_step(2, 6,
                              [&](Training &t, Tensors &) {
                                  const Tensor &b4 = gradient(t.device_params[1][7]);
                                  copyto(full({1}, value, gpu(1)), rows(b4, 2, 3));
                              }),
                   format("the gradient of b4[2] on gpu(1) is %g, not ... ", value) + see);
    check_says(first_step(3, 6,
                          [&](Training &t, Tensors &) {
                              changed(gradient(t.device_params[2][0]),
                                      [](float x) { return 2 * x; });
                          }),
               "the gradient of W1[0] on gpu(2) is ... " + see);
    for (float factor : {0.0f, 0.999f, -1.0f})
        check_says(first_step(2, 6,
                              [&](Training &t, Tensors &) {
                                  const Floats g = to_host(gradient(t.device_params[1][5]));
                                  size_t i = 0;
                                  changed(t.device_params[1][5], [&](float x) {
                                      return x + (1 - factor) * options.lr * g[i++] / 6;
                                  });
                              }),
                   "the update of b3[0] on gpu(1) is ... " + see);
    check_says(first_step(2, 6, [](Training &, Tensors &ls) { ls.pop_back(); }),
               "has 6 samples, the devices' shards together have 3: " + see);
    check_says(first_step(2, 6,
                          [](Training &, Tensors &ls) {
                              copyto(full({1}, NAN, gpu(1)), rows(ls[1], 2, 3));
                          }),
               "loss on gpu(1) is not finite, before any update: " + see);
    options.first_check = false;
    CHECK(printed([&] { check_first_step({}, {}, {}, {}, 0); }) == "");
}

// ---------------------------------------------------------------------------------------------
// 15. Program
// The command line, and the program as a user starts it: its output, its files, its exit status.

// The options that a command line sets, from the defaults on, or what is wrong with it.
struct Parsed {
    Options options;
    std::string error;
    bool run = false;
};
static Parsed parsed(const std::string &line) { // its words are divided by single spaces
    OptionsKept kept;
    options = Options();
    Parsed result;
    std::vector<std::string> words = {"mgpu"};
    std::istringstream stream(line);
    for (std::string word; std::getline(stream, word, ' ');) words.push_back(word);
    if (!line.empty() && line.back() == ' ') words.push_back("");
    std::vector<char *> argv;
    for (std::string &word : words) argv.push_back(&word[0]);
    argv.push_back(nullptr);
    result.error = error_of([&] { result.run = parse_options(words.size(), argv.data()); });
    result.options = options;
    return result;
}

TEST_CASE("parse_options: the tutorial's values where none are given, each model's own") {
    const struct {
        const char *line;
        int gpus, batch, epochs;
        float lr;
        const char *model, *allreduce;
        bool evaluate_all;
    } cases[] = {
        {"", 1, 256, 10, 0.2f, "lenet", "naive", false},
        {"--model lenet --gpus 2", 2, 256, 10, 0.2f, "lenet", "naive", false},
        {"--model resnet18", 1, 256, 10, 0.1f, "resnet18", "naive", true},
        {"--gpus 2 --model resnet18", 2, 512, 10, 0.2f, "resnet18", "naive", true},
        {"--model lab_cnn", 1, 64, 5, 0.3f, "lab_cnn", "host", true},
        {"--gpus 2 --model lab_cnn --kvstore device", 2, 128, 5, 0.3f, "lab_cnn", "by_tensor",
         true},
        {"--model lab_cnn --allreduce ring", 1, 64, 5, 0.3f, "lab_cnn", "ring", true},
        {"--kvstore local --batch 7 --lr 1 --epochs 2", 1, 7, 2, 1, "lenet", "host", false},
        {"--batch 2 --gpus 2", 2, 2, 10, 0.2f, "lenet", "naive", false},
        {"--gpus 64", 64, 256, 10, 0.2f, "lenet", "naive", false}};
    for (const auto &c : cases) {
        CAPTURE(std::string(c.line));
        const Parsed p = parsed(c.line);
        const Options &o = p.options;
        CHECK((p.error == "" && p.run));
        CHECK((o.gpus == c.gpus && o.batch == c.batch && o.epochs == c.epochs && o.lr == c.lr));
        CHECK((o.model == c.model && o.allreduce == c.allreduce));
        CHECK(o.evaluate_all == c.evaluate_all);
    }
    const Options o = parsed("").options;
    CHECK((o.steps == 0 && o.limit == 0 && o.seed == 0 && o.split.empty()));
    CHECK((o.shuffle && o.replica_check && !o.overlap && !o.verbose));
    CHECK((o.init == "" && o.save == "" && parsed("--seed 0").error == ""));
    CHECK((o.data == "data" && o.log == "build/log.csv"));
}

TEST_CASE("parse_options: every option sets what it names") {
    const Parsed p = parsed("--gpus 3 --batch=64 --lr 1e-3 --epochs 7 --steps 5 --limit 9 "
                            "--seed 4294967295 --allreduce ring --data d --init i --save s "
                            "--log l.csv --split 3,1,12");
    const Options &o = p.options;
    CHECK((p.error == "" && o.gpus == 3 && o.batch == 64 && o.lr == 1e-3f && o.epochs == 7));
    CHECK((o.steps == 5 && o.limit == 9 && o.seed == 4294967295u && o.allreduce == "ring"));
    CHECK((o.data == "d" && o.init == "i" && o.save == "s" && o.log == "l.csv"));
    CHECK((o.split == Ints{3, 1, 12} && o.shuffle && !parsed("--no-shuffle").options.shuffle));
    CHECK(!parsed("--no-replica-check").options.replica_check);
    CHECK((parsed("--overlap").options.overlap && parsed("--evaluate-all").options.evaluate_all));
    CHECK(parsed("--verbose").options.verbose);
}

TEST_CASE("parse_options: a wrong value is refused, and what is wanted is said") {
    const std::string whole_numbers[][2] = {{"--gpus", "1 to 64"}, {"--batch", "1 to 60000"},
                                            {"--epochs", "1 to"},  {"--steps", "1 to"},
                                            {"--limit", "1 to"},   {"--seed", "0 to 4294967295"}};
    for (const auto &[name, range] : whole_numbers)
        for (std::string value : {"-1", "99999999999", "9999999999999999999999", "abc", "", "1.5",
                                  "2x", "0x10", "1e3", "0"})
            if (name != "--seed" || value != "0")
                check_says(parsed(name + " " + value).error,
                           name + " " + value + ": a whole number from " + range);
    for (std::string v :
         {"nan", "inf", "-inf", "0", "-1", "-0.0", "1e999", "1e-999", "0.1x", "abc", "", "0,2"})
        check_says(parsed("--lr " + v).error, "--lr " + v + ": a number greater than 0 is wanted");
    for (std::string split : {"", "3,", ",1", "a", "3;1", "0,1", "3,-1", "1001,1", "1,,2"})
        check_says(parsed("--gpus 2 --split " + split).error,
                   "--split " + split + ": whole numbers from 1 to 1000 are wanted");
    const struct {
        const char *line, *says;
    } cases[] = {{"--gpus 65", "--gpus 65: a whole number from 1 to 64 is wanted"},
                 {"--gpus 2 --batch 1", "batch 1 cannot be split over 2 devices: use BATCH >= 2"},
                 {"--batch 7 --gpus 8", "use BATCH >= 8"},
                 {"--model vgg", "--model vgg: unknown, there are lenet, resnet18, lab_cnn"},
                 {"--kvstore cpu", "--kvstore cpu: unknown, there are local, device"},
                 {"--kvstore local --allreduce ring", "one of them is enough"},
                 {"--split 3,1", "--split has 2 parts, but there are 1 devices"},
                 {"--allreduce magic", "--allreduce magic: unknown, there are naive, bucket, host, "
                                       "by_tensor, sharded, ring, tree, rebind, yours"},
                 {"--gpuss 2", "unknown option --gpuss: try --help"},
                 {"--no-shuffle=1", "unknown option --no-shuffle=1: try --help"},
                 {"-g", "unknown option -g: try --help"},
                 {"--batch 4 -vq", "unknown option -v: try --help"},
                 {"--gpus 2 --lr", "--lr wants a value: try --help"},
                 {"--gpus 2 more", "unknown argument more: try --help"},
                 {"2 --batch 4", "unknown argument 2: try --help"},
                 {"--model two\nlines", "--model two"}};
    for (const auto &c : cases) check_says(parsed(c.line).error, c.says);
    CHECK(parsed("").error == ""); // nothing is left of what went wrong
}

TEST_CASE("parse_options: the help names every option and its default") {
    Parsed p;
    const std::string help = printed([&] { p = parsed("--help"); });
    CHECK((p.error == "" && !p.run));
    for (const Flag &flag : flags) CHECK(contains(help, "\n  --" + std::string(flag.name)));
    for (std::string text : {"(1)", "(256;", "(0.2;", "(10;", "(0)", "(lenet)", "(naive)", "(data)",
                             "(build/log.csv)", "yours"})
        CHECK(contains(help, text));
    std::istringstream lines(help);
    for (std::string line; std::getline(lines, line);) CHECK(line.size() <= 100);
}

// The same of a training: unless told otherwise, a step on two devices.
static std::string train_in(const TestFolder &folder, const std::string &arguments,
                            const std::string &environment = "") {
    return output_of(folder, "--gpus 2 --batch 8 --epochs 1 --steps 1 --log log.csv " + arguments,
                     environment);
}

// The files that --save has written, one after another.
static std::string saved(const TestFolder &folder, const std::string &name) {
    std::string bytes;
    for (const auto &p : param_names) bytes += read_text(folder.file(name + "/" + p + ".npy"));
    CHECK(bytes.size() > 4 * 129068);
    return bytes;
}

const int few = small_only ? 8 : 16; // training images

// What the tutorial's demos print on two and on three devices.
static std::string demos_of(int k) {
    std::string zeros = "[0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0.] @gpu(0)\n",
                sums = k == 2 ? " [[3. 3.]] @gpu(" : " [[6. 6.]] @gpu(";
    std::string before, after;
    for (int c = 0; c < k; c++) {
        const std::string id = std::to_string(c), one = std::to_string(c + 1);
        before += " [[" + one + ". " + one + ".]] @gpu(" + id + ")\n";
        after += sums + id + ")\n";
    }
    return "b1 weight: " + zeros + "b1 grad: " + zeros + "before allreduce:\n" + before +
           "after allreduce:\n" + after +
           "input :\n [[ 0.  1.  2.  3.  4.]\n [ 5.  6.  7.  8.  9.]\n [10. 11. 12. 13. 14.]\n"
           " [15. 16. 17. 18. 19.]]\n" +
           (k == 2 ? "load into [gpu(0), gpu(1)]\noutput:\n"
                     " [[0. 1. 2. 3. 4.]\n [5. 6. 7. 8. 9.]] @gpu(0)\n"
                     " [[10. 11. 12. 13. 14.]\n [15. 16. 17. 18. 19.]] @gpu(1)\n"
                   : "load into [gpu(0), gpu(1), gpu(2)]\noutput:\n"
                     " [[0. 1. 2. 3. 4.]\n [5. 6. 7. 8. 9.]] @gpu(0)\n"
                     " [[10. 11. 12. 13. 14.]] @gpu(1)\n [[15. 16. 17. 18. 19.]] @gpu(2)\n");
}

TEST_CASE("program: the demos, a table of the epochs, the tutorial's last line, the log" *
          doctest::skip(no_training)) {
    DataFolder folder(few, few / 4);
    for (int k : {2, 3}) {
        CAPTURE(k);
        const std::string out =
            train_in(folder, "--steps 100 --epochs 2 --gpus " + std::to_string(k));
        CHECK(out.find_first_of("\r\033") == std::string::npos); // no bar: it is no terminal
        const size_t first = out.find("b1 weight: "), table = out.find("epoch ");
        REQUIRE((first < table && table < out.size()));
        CHECK(out.substr(first, table - first)
                  .find(demos_of(k) + "first minibatch: " + std::to_string(k) +
                        " devices give the gradient of one (largest difference ") == 0);
        // The table and the log hold the same numbers, in these formats to the letter
        double loss[2], acc[2], sec[2], last_acc, rate;
        const std::string rest = out.substr(table), log = read_text(folder.file("log.csv"));
        CAPTURE(rest);
        REQUIRE(sscanf(rest.c_str(), "%*[^\n] 1%lf%lf%lf 2%lf%lf%lf test acc:%lf,%lf", loss, acc,
                       sec, loss + 1, acc + 1, sec + 1, &last_acc, &rate) == 8);
        CHECK(rest == format("epoch      loss  test acc   seconds\n    1  %8.4f  %8.4f  %8.2f\n"
                             "    2  %8.4f  %8.4f  %8.2f\ntest acc: %.2f, %.1f sec/epoch on "
                             "[gpu(0), gpu(1)%s]\n",
                             loss[0], acc[0], sec[0], loss[1], acc[1], sec[1], last_acc, rate,
                             k == 2 ? "" : ", gpu(2)"));
        CHECK(std::fabs(last_acc - acc[1]) < 0.0051); // both of the last epoch
        double l[2], a[2], s[2];
        REQUIRE(sscanf(log.c_str(), "%*[^\n] 1,%lf,%lf,%lf 2,%lf,%lf,%lf", l, a, s, l + 1, a + 1,
                       s + 1) == 6);
        CHECK(log == format("epoch,loss,test_acc,seconds\n1,%.6f,%.4f,%.4f\n2,%.6f,%.4f,%.4f\n",
                            l[0], a[0], s[0], l[1], a[1], s[1]));
        for (int e : {0, 1}) {
            CHECK((std::fabs(l[e] - loss[e]) <= 1e-4 && std::fabs(a[e] - acc[e]) <= 1e-4));
            CHECK(std::fabs(s[e] - sec[e]) <= 0.01);
        }
    }
}

TEST_CASE("program: a --log that is a link stays one") {
    DataFolder folder(8, 2);
    write_text(folder.file("logs/mine.csv"), "old");
    std::filesystem::create_symlink("logs/mine.csv", folder.file("log.csv"));
    train_in(folder, "");
    CHECK(std::filesystem::is_symlink(folder.file("log.csv")));
    CHECK(contains(read_text(folder.file("logs/mine.csv")), "epoch,loss,test_acc,seconds\n1,"));
}
TEST_CASE("program: --help") {
    TestFolder folder;
    CHECK(output_of(folder, "--help") == printed(print_usage));
    CHECK(folder.listing().empty());
}

TEST_CASE("program: --save and --init go on where a run ended" * doctest::skip(no_training)) {
    DataFolder folder(few, few / 4);
    const std::string half = "--no-shuffle --batch " + std::to_string(few / 2); // of an epoch
    train_in(folder, half + " --steps 2 --save first");
    train_in(folder, half + " --steps 2 --init first --save second --seed 9");
    train_in(folder, half + " --steps 4 --epochs 9 --save both");
    CHECK((saved(folder, "second") == saved(folder, "both")));
    CHECK((saved(folder, "second") != saved(folder, "first")));
    for (const std::string &name : folder.listing()) CHECK(!contains(name, ".part"));
}

TEST_CASE("program: a --save that fails or is killed leaves a whole set of files" *
          doctest::skip(no_training)) {
    DataFolder folder(8, 2);
    const std::string args = "--gpus 1 --batch 4 --log log.csv --save s --epochs ";
    init_params();
    auto whole = [&] { // as --init judges it
        write_text(folder.file("s/notes.md"), "kept");
        CHECK(error_of([&] { load_params(params, folder.file("s")); }) == "");
    };
    train_in(folder, args + "2");
    const std::string before = saved(folder, "s");
    whole();
    Run failed = run_in_shell(folder, "trap '' XFSZ; ulimit -f 200;", args + "1 --seed 1");
    check_line(failed.err, "mgpu: cannot save to s: cannot write ");
    CHECK((failed.status == 1 && saved(folder, "s") == before));
    CHECK(folder.listing().count("s.part") == 0);
    for (int i = 0; i < (small_only ? 1 : 8); i++) { // killed at any time while it saves and saves
        Run killed = run_in_shell(folder, "",
                                  args +
                                      "100000 --seed 2 & while ! grep -q '^ *3 ' stdout; "
                                      "do sleep 0.01; done; sleep 0.0" +
                                      std::to_string(i) + "; kill -KILL $!; wait $!");
        CHECK(killed.status == 137);
        whole();
    }
    CHECK((saved(folder, "s") != before && read_text(folder.file("s/notes.md")) == "kept"));
}

TEST_CASE("program: --resume reaches the bits of an uninterrupted run" *
          doctest::skip(small_only)) {
    DataFolder folder(16, 4); // enough that not all epochs are over before it is killed
    const std::string training = "--gpus 2 --allreduce ring --seed 3 --log log.csv --batch 6 ";
    auto train = [&](const std::string &more, int status = 0) {
        Run run = run_in_shell(folder, "", training + more);
        CAPTURE(run.err);
        CHECK(run.status == status);
        return run;
    };
    auto log = [&] { // without the seconds
        std::istringstream file(read_text(folder.file("log.csv")));
        std::string rows;
        for (std::string row; std::getline(file, row);)
            rows += row.substr(0, row.rfind(',')) + "\n";
        return rows;
    };
    train("--epochs 9 --save whole");
    const std::string rows = log();
    CHECK(contains(train("--steps 1 --save new --resume").out, "new: nothing is saved there yet"));
    // Killed after some epochs, and again, then to the end
    for (int row : {1, 4})
        train("--epochs 1000 --save s --resume & while kill -0 $! && ! grep -q '^ *[" +
                  std::to_string(row) + "-9] ' stdout; do sleep 0.01; done; kill -KILL $!; wait $!",
              137);
    const std::string at = read_text(folder.file("s/training.txt"));
    REQUIRE(contains(at, "\nepoch "));
    if (atoi(at.c_str() + at.find("\nepoch ") + 7) < 8) {
        CHECK(contains(train("--epochs 9 --save s --resume").out, "s: going on after "));
        CHECK((saved(folder, "s") == saved(folder, "whole") && log() == rows));
    }
    // Stopped within an epoch of three steps
    for (const char *steps : {"1", "5", "27"})
        train("--epochs 9 --save t --resume --steps " + std::string(steps));
    CHECK((saved(folder, "t") == saved(folder, "whole")));
    check_line(train("--epochs 9 --save t --resume", 1).err, "t: 9 epochs, 27 steps are trained");
    check_line(train("--epochs 99 --save t --resume --lr 0.3", 1).err,
               "t was trained with lr 0.2, not with 0.3");
    write_data(folder.file("data"), 17, 4);
    check_line(train("--epochs 99 --save t --resume", 1).err, "t was trained with data ");
    write_data(folder.file("data"), 16, 4);
    // A log of another training does not become part of this one's
    train("--epochs 1 --lr 0.1");
    CHECK(contains(train("--epochs 10 --save t --resume").err, "notice: log.csv is not the log"));
    CHECK(log().rfind("epoch,loss,test_acc\n10,", 0) == 0);
}

TEST_CASE("program: the same seed gives the same bits, and k devices what one gives" *
          doctest::skip(no_training)) {
    DataFolder folder(few, few / 4);
    const std::string training = "--batch " + std::to_string(few / 2 - 1) +
                                 (small_only ? " --steps 4 " : " --steps 6 ") +
                                 "--epochs 2 --gpus 3 ";
    train_in(folder, training + "--save a");
    train_in(folder, training + "--save b --seed 0");
    train_in(folder, training + "--save c --seed 1");
    train_in(folder, training + "--save d --no-shuffle");
    train_in(folder, training + "--save one --gpus 1");
    CHECK((saved(folder, "a") == saved(folder, "b") && saved(folder, "a") != saved(folder, "c")));
    CHECK((saved(folder, "a") != saved(folder, "d")));
    init_params();
    for (size_t i = 0; i < params.size(); i++) {
        CAPTURE(param_names[i]);
        Tensor a = empty(params[i].shape, cpu()), one = empty(params[i].shape, cpu());
        load_npy(folder.file("a/" + param_names[i] + ".npy"), a);
        load_npy(folder.file("one/" + param_names[i] + ".npy"), one);
        check_close(to_host(a), to_host(one), 1e-5); // the gradients are added in another order
    }
    params.clear();
}

TEST_CASE("program: a ring trains, with OVERLAP and staged to the same bits" *
          doctest::skip(no_training)) {
    DataFolder folder(few, few / 4);
    const std::string training = "--gpus 3 --batch 4 --limit 8 --steps 3 --allreduce ring";
    train_in(folder, training + " --save without");
    std::string out = train_in(folder, training + " --save with --overlap");
    CHECK(contains(out, " [[6. 6.]] @gpu(2)\n")); // the demo
    CHECK((saved(folder, "with") == saved(folder, "without")));
#ifdef CUDA_CPU
    out = train_in(folder, training + " --save staged", "export CUDA_CPU_PEERS=0;");
    CHECK(contains(out, "; staged: gpu(1) gpu(2)\n"));
    CHECK((saved(folder, "staged") == saved(folder, "without")));
#endif
}

TEST_CASE("program: the lab's prints and resnet18's" * doctest::skip(small_only)) {
    DataFolder folder(few, few / 4);
    const std::string lab =
        train_in(folder, "--model lab_cnn --epochs 2 --steps 3 --save lab --verbose");
    auto after = [&](const std::string &head) { // the lines after a head
        REQUIRE(contains(lab, head));
        const size_t begin = lab.find(head) + head.size();
        return lab.substr(begin, lab.find("]]] @", begin) - begin);
    };
    const std::string weight = "=== channel 0 of the first conv on gpu(",
                      grad = "=== grad of channel 0 of the first conv2d on gpu(";
    CHECK(after(weight + "0) ===\n") == after(weight + "1) ===\n"));
    CHECK(after(grad + "0) ===\n") != after(grad + "1) ===\n"));
    for (std::string text :
         {"Running on [gpu(0), gpu(1)]\nBatch size is 8\nfirst minibatch: 2 devices give",
          ")\nEpoch 0, training time", "sec\n         validation accuracy = 0.",
          "Epoch 1, training time = ", "\ntest acc: ", "\ngpu(1): "}) {
        CAPTURE(text);
        CHECK(contains(lab, text));
    }
    for (std::string name : {"conv0.weight", "conv1.bias", "dense0.weight", "dense1.bias"})
        CHECK(folder.listing().count("lab/" + name + ".npy") == 1);
    const std::string resnet =
        train_in(folder, "--model resnet18 --batch 2 --limit 2 --save resnet --overlap "
                         "--allreduce ring");
    CHECK(contains(resnet, "not initialized on cpu\n[[["));
    CHECK(contains(resnet, "]]] @gpu(1)\nfirst minibatch: 2 devices give the gradient of one"));
    CHECK(folder.listing().count("resnet/bn16.running_var.npy") == 1);
    output_of(folder, "--model resnet18 --gpus 1 --batch 1 --limit 1 --epochs 1 --log log.csv "
                      "--no-first-check --init resnet"); // reads its files
}

TEST_CASE("program: rebind is caught by the first step, then by the replica check, or trains on" *
          doctest::skip(no_training)) {
    DataFolder folder(few, few / 4);
    const std::string training = "--gpus 2 --batch 8 --epochs 1 --log log.csv --allreduce rebind ";
    Run caught = run_in_shell(folder, "", training);
    check_line(caught.err, "mgpu: the first minibatch: the gradient of W1[0] on gpu(1) is ... "
                           "make check looks for the cause");
    // The demo prints what the devices hold
    CHECK(contains(caught.out, "after allreduce:\n [[3. 3.]] @gpu(0)\n [[2. 2.]] @gpu(1)\n "
                               "WRONG: each device should hold the sum, [[3. 3.]]; `make exercise "
                               "ALLREDUCE=rebind` tells more\n"));
    Run later = run_in_shell(folder, "", training + "--no-first-check");
    check_line(later.err, "mgpu: the replicas differ: W1[");
    for (const Run &run : {caught, later})
        CHECK((run.status == 1 && !contains(run.out, "test acc:")));
    CHECK(contains(train_in(folder, "--allreduce rebind --no-replica-check"), "test acc:"));
}

#ifdef CUDA_CPU
#endif

// What the user did wrong: one line on stderr, status 1, and no file that was not there before. One
// mistake for each function that finds them; which ones it finds is tested with the function.
TEST_CASE("program: a mistake gives one line, status 1 and leaves nothing behind") {
    DataFolder folder(8, 4);
    const std::string data = folder.file("data"), params_of = folder.file("params");
    auto copied = [&](const std::string &from, const std::string &name) {
        std::filesystem::copy(from, folder.file(name));
        return folder.file(name);
    };
    write_gz(copied(data, "truncated") + train_images, idx_images(8).substr(0, 1000));
    write_gz(copied(data, "label 10") + train_labels, idx({2049, 8}, std::string(8, 10)));
    write_text(copied(data, "cut") + train_images, read_text(data + train_images).substr(0, 3000));
    init_params();
    for (size_t i = 0; i < params.size(); i++)
        save_npy(params_of + "/" + param_names[i] + ".npy", params[i]);
    params.clear();
    write_text(copied(params_of, "shape") + "/W1.npy",
               npy(npy_dict("(20, 1, 9)"), std::string(720, 0)));
    std::filesystem::remove(copied(params_of, "gone") + "/b4.npy");
    write_text(copied(params_of, "nan") + "/b1.npy", npy(npy_dict("(20,)"), std::string(80, -1)));
    write_text(copied(params_of, "mixed") + "/training.txt", "checksum 0123456789abcdef\n");
    const std::string images = train_images + ": ", labels = train_labels + ": ";
    struct Mistake {
        std::string arguments, says;
    };
    const std::vector<Mistake> mistakes = {
        {"--gpus 0", "--gpus 0: a whole number from 1 to 64 is wanted"},
        {"--batch 1 --gpus 2", "batch 1 cannot be split over 2 devices: use BATCH >= 2"},
        {"--colour red", "unknown option --colour: try --help"},
        {"--data missing", "missing" + images + "No such file"},
        {"--data truncated", "truncated" + images + "it names 8 samples, but has the bytes of 1"},
        {"--data cut", "cut" + images + "gzip cannot unpack it"},
        {"--data 'label 10'", "label 10" + labels + "label 0 is 10, not 0 to 9"},
        {"--save /proc/none", "cannot write /proc/none.part/training.txt: "},
        {"--save .", "cannot save to .: it is replaced as a whole"},
        {"--save mixed/training.txt", "cannot save to mixed/training.txt: it is no folder"},
        {"--save ..", " is no file: SAVE wants a folder of its own"},
        {"--resume --save ''", "--resume goes on with the training that --save DIR names"},
        {"--log ''", "--log: the name of a file is wanted"},
        {"--log data", "cannot write data: it is a folder"},
        {"--init gone", "gone/b4.npy: No such file"},
        {"--init nan", "nan/b1.npy: it holds nan"},
        {"--init mixed", "mixed: its files are not those of one SAVE"},
        {"--init shape", "shape/W1.npy: wants " + npy_dict("(20, 1, 3, 3)") + ", got {"}};
    const std::set<std::string> before = folder.listing();
    auto check_mistake = [&](const Mistake &m, const std::string &environment = "") {
        Run run = run_in_shell(folder, environment, "--log new/log.csv --save s " + m.arguments);
        CAPTURE(m.arguments);
        CHECK(run.status == 1);
        check_line(run.err, "mgpu: ... " + m.says);
        CHECK(folder.listing() == before);
    };
    for (const Mistake &m : mistakes) check_mistake(m);
    // The first step makes the parameters huge, the second their loss
    if (!no_training)
        check_mistake({"--batch 4 --lr 1e30", "in step 2 of epoch 1: use a smaller LR than 1e+30"});
#ifdef CUDA_CPU
    check_mistake({"--gpus 2", "is out of memory: "}, "CUDA_CPU_MEMORY=1");
    if (!small_only) {
        write_data(folder.file("data"), 2000, 4);
        check_mistake({"--batch 2000", "gpu(0) is out of memory: "}, "CUDA_CPU_MEMORY=8");
        check_mistake({"--batch 2000 --gpus 2", "of its 8.4 MB are free: use a smaller BATCH"},
                      "CUDA_CPU_MEMORY=8");
    }
#endif
}

TEST_CASE("program: Ctrl-C ends it with a line, status 130 and whole files" *
          doctest::skip(no_training)) {
    DataFolder folder(8, 2);
    const std::string endless = "--gpus 2 --batch 4 --epochs 1000000 --log log.csv --save s";
    for (std::string name : {"INT", "TERM"}) {
        CAPTURE(name);
        Run run = run_in_shell(folder, "", // in the background, until it has printed three rows
                               endless +
                                   " & while kill -0 $! && ! grep -q '^ *3 ' stdout; do "
                                   "sleep 0.02; done; kill -" +
                                   name + " $!; wait $!");
        CHECK(run.status == (name == "INT" ? 130 : 143));
        CHECK(run.err == (name == "INT" ? "mgpu: interrupted\n" : "mgpu: terminated\n"));
        const std::string log = read_text(folder.file("log.csv"));
        CHECK((contains(log, "\n3,") && !log.empty() && log.back() == '\n'));
        CHECK((folder.listing().count("s.part") == 0 || name == "TERM"));
    }
}

// Algorithms that do not come to their end
static void crash(const Grads &grads) {
    volatile uintptr_t nowhere = 16; // volatile: the compiler does not see it
    if (grads.size() > 2) *(volatile int *)nowhere = 1;
    allreduce_naive(grads);
}
static void endless(const Grads &) {
    printf("endless\n");
    static void *volatile memory; // a signal mostly arrives in the midst of malloc
    for (;; free(memory)) memory = malloc(100000);
}

TEST_CASE("program: a crash or an endless loop in an algorithm" * doctest::skip(small_only)) {
    DataFolder folder(few, few / 4);
    const std::string training = "--gpus 3 --batch 6 --epochs 1 --log l --allreduce ";
    Run run = run_in_shell(folder, "", training + "crash");
    CHECK((run.status == 1 && !contains(run.out, "test acc")));
    check_line(run.err, "mgpu: segmentation fault: an index beyond its list");
    for (std::string signals : {"INT INT", "TERM", "INT TERM", "TERM", "TERM", "TERM"}) {
        CAPTURE(signals);
        const std::string stop = // it has a second to end
            "endless & while ! grep -q endless$ stdout; do sleep 0.01; done; for s in " + signals +
            "; do kill -$s $!; sleep 0.1; done; for i in $(seq 50); do kill -0 $! || break; "
            "sleep 0.02; done 2>/dev/null; kill -KILL $! 2>/dev/null; wait $!";
        run = run_in_shell(folder, "", training + stop);
        CHECK(run.status == (signals == "INT INT" ? 130 : 143));
        check_line(run.err, signals == "INT INT" ? "mgpu: interrupted" : "mgpu: terminated");
    }
}

TEST_CASE("program: what cannot be printed is an error") {
    TestFolder folder;
    Run run = run_in_shell(folder, "", "--help > /dev/full");
    CHECK(run.status == 1);
    check_line(run.err, "mgpu: what is printed cannot be written to stdout");
}

TEST_CASE("program: Ctrl-C while it reads the data is no mistake of the data") {
    DataFolder folder(8, 2);
    // In the place of gzip, which Ctrl-C reaches as well
    write_text(folder.file("bin/gzip"), "#!/bin/sh\nkill -INT $(cat program) $$\nsleep 5\n");
    std::filesystem::permissions(folder.file("bin/gzip"), std::filesystem::perms::owner_all);
    Run run = run_in_shell(folder,
                           "PATH=\"$PWD/bin:$PATH\" sh -c 'echo $$ > program; exec \"$@\"' sh", "");
    CHECK((run.status == 130 && run.err == "mgpu: interrupted\n"));
}

#ifdef CUDA_CPU
TEST_CASE("program: devices that share one give the same bits" * doctest::skip(no_training)) {
    DataFolder folder(few, few / 4);
    const std::string notice =
        "notice: 2 logical devices share 1 GPU, each with its own memory and stream; ";
    const std::string shared = train_in(folder, "--steps 2 --save shared", "CUDA_CPU_DEVICES=1");
    const std::string own = train_in(folder, "--steps 2 --save own", "CUDA_CPU_DEVICES=2");
    CHECK((contains(shared, "\n" + notice) && !contains(own, "notice")));
    CHECK((saved(folder, "shared") == saved(folder, "own")));
}
#endif

TEST_CASE("exchange: ThreadSanitizer is silent, and sees a planted missing event") {
    if (!no_training) return needs_tsan();
    if (const char *planted = getenv("PLANTED")) { // this very test, as a process of its own
        for (const char *algorithm : {"naive", "ring", "sharded"})
            for (int k : {2, 3})
                if (!*planted || algorithm + std::to_string(k) == planted)
                    train_small(k, algorithm, true, *planted);
        return;
    }
    TestFolder folder;
    auto found = [&](const std::string &planted) {
        Run run = run_in_shell(folder, "PLANTED=" + planted, "'-tc=exchange: Thread*'", " ");
        CHECK(contains(run.out, "1 passed"));
        return contains(run.err, "ThreadSanitizer: data race");
    };
    CHECK_FALSE(found(""));
    for (std::string planted : {"naive2", "ring3", "sharded2"}) {
        CAPTURE(planted);
        CHECK((found(planted) || found(planted) || found(planted)));
    }
}

int main(int argc, char **argv) {
    // Memory that is freed is used again: a fresh page costs the kernel as much as a test of it
    mallopt(M_MMAP_MAX, 0);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    algorithms.push_back({"crash", crash});
    algorithms.push_back({"endless", endless});
    if (argc > 1 && strcmp(argv[1], "--program") == 0) return mgpu_main(argc - 1, argv + 1);
    return tests_main(argc, argv);
}
#endif
