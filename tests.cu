// Tests of mgpu.cu, against plain loops in double and against what the tutorial promises.
//
//     make test                       all of them
//     make test T='-tc=allreduce*'    one function's: a test's name starts with what it tests
//     make asan, make race            the same under AddressSanitizer and ThreadSanitizer
//
// The sections follow mgpu.cu's. The CPU stand-in has tests of its own, extras/cpu/tests.cu.

// Other folders' tests define TESTS_SHARED to take what the cases share, and no case, from here;
// and TESTS_OF_OPERATORS to take what tests of operators share, too.
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

#include <atomic>
#include <iterator>
#include <set>
#include <string_view>

#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
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

// doctest prints a vector's numbers, the first ones of a long one.
template <class T> struct doctest::StringMaker<std::vector<T>> {
    static String convert(const std::vector<T> &list) {
        String text = "{";
        for (size_t i = 0; i < list.size() && i < 20; i++)
            text += (i ? ", " : "") + toString(list[i]);
        return text + (list.size() > 20 ? ", ...}" : "}");
    }
};

// ---------------------------------------------------------------------------------------------
// What the tests share

typedef std::vector<float> Floats;
typedef std::vector<double> Doubles;
typedef std::vector<Doubles> Arrays;
typedef std::vector<int> Ints;
typedef std::vector<Tensor> Tensors;
static int sum_of(const Ints &list) { return std::accumulate(list.begin(), list.end(), 0); }

// Passes only if max|got - want| <= rel * max|want|; NaN fails. Prints the worst element.
template <class T> static void check_close(const Floats &got, const T &want, double rel) {
    REQUIRE(got.size() == want.size());
    double largest = 0, worst = -1;
    size_t at = 0;
    for (size_t i = 0; i < want.size() && worst == worst; i++) {
        largest = std::max(largest, std::fabs((double)want[i]));
        const double difference = std::fabs(got[i] - (double)want[i]);
        if (!(difference <= worst)) worst = difference, at = i;
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
// What `call` throws says, or "" if it throws nothing.
static std::string error_of(const std::function<void()> &call) {
    try {
        call();
    } catch (const std::exception &e) {
        return e.what();
    }
    return "";
}
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
    CHECK((says == "" ? text == "" : !contains(text, "\n")));
}
// The same of what is printed to stderr, with the line's end.
static void check_line(std::string text, const std::string &part) {
    REQUIRE((!text.empty() && text.back() == '\n'));
    text.pop_back();
    check_says(text, part);
}
// The call must throw such a message.
#define REFUSED(call, says) check_says(error_of([&] { call; }), says)

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
static Tensor random_tensor(const Ints &shape, unsigned seed, float scale = 1) {
    return on_host(random_floats(size({cpu(), shape}), seed, scale), shape);
}
static Tensor on_device(const Floats &numbers, Ints shape, Device device = gpu(0)) {
    return copyto(on_host(numbers, std::move(shape)), device);
}
static Floats grad(const Tensor &t) { return to_host(*t.grad); }
static Doubles doubles(const Tensor &t) {
    const Floats numbers = to_host(t);
    return Doubles(numbers.begin(), numbers.end());
}
static bool same_bits(const Floats &a, const Floats &b) {
    return a.size() == b.size() && (a.empty() || !memcmp(&a[0], &b[0], a.size() * sizeof(float)));
}
// A sum of n floats is off by about sqrt(n) * 2^-24 of its size, in whatever order it is added: 16
// times that, for the largest error of many sums, and for a last sum that happens to be small.
static double rounding(int n) { return 1e-6 * std::sqrt(std::max(n, 1)); }

constexpr int most_devices = 8; // the logical devices that the tests use: gpu(0) ... gpu(7)

// A fresh folder, removed at the end with all that is in it. Its name wants quoting in a shell.
struct TestFolder {
    std::string path = std::filesystem::temp_directory_path() / "mgpu's \"tests\" $1 XXXXXX";
    TestFolder() { REQUIRE(mkdtemp(&path[0]) != nullptr); }
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

// What a test changes is put back: options, the exchange, its buckets; by ModelKept the model, too.
struct OptionsKept {
    Options kept = options;
    Exchange kept_exchange = exchange;
    size_t kept_bytes = bucket_bytes;
    ~OptionsKept() { options = kept, exchange = kept_exchange, bucket_bytes = kept_bytes; }
};
struct ModelKept {
    OptionsKept options;
    Tensors params = ::params;
    std::vector<std::string> names = param_names;
    Net net = ::net;
    ~ModelKept() { ::params = params, param_names = names, ::net = net; }
};
static void set_model(const std::string &name, int seed) { // ModelKept puts the last one back
    options.model = name;
    rng.seed(seed);
    init_model();
}

// What `call` prints to stdout, a file, or else a terminal that holds 4 KB.
static std::string printed(const std::function<void()> &call, bool terminal = false) {
    TestFolder folder;
    fflush(stdout);
    const int before = dup(STDOUT_FILENO), master = posix_openpt(O_RDWR | O_NOCTTY);
    REQUIRE((grantpt(master) == 0 && unlockpt(master) == 0));
    const std::string path = terminal ? ptsname(master) : folder.file("out");
    const int out = open(path.c_str(), O_RDWR | O_CREAT | O_NOCTTY, 0600);
    termios raw = {};
    cfmakeraw(&raw);
    tcsetattr(out, TCSANOW, &raw);
    REQUIRE(dup2(out, STDOUT_FILENO) == STDOUT_FILENO);
    call();
    fflush(stdout);
    dup2(before, STDOUT_FILENO);
    std::string text = terminal ? "" : read_text(path), part(4096, 0);
    for (pollfd shown = {master, POLLIN, 0}; terminal && poll(&shown, 1, 100) > 0;)
        text += part.substr(0, read(master, &part[0], part.size()));
    for (int file : {before, master, out}) close(file);
    return text;
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
    // All trained parameters, or all gradients, of device c, one after another.
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
// LeNet's parameters with numbers from N(0, 0.1^2), biases too. With those of init_params all
// logits are nearly 0 and no bias matters: much could be wrong unseen.
static Tensors lively_params() {
    init_params();
    Tensors list;
    for (const Tensor &p : params) list.push_back(random_tensor(p.shape, 10 + list.size(), 0.1f));
    return list;
}
// The same with biases of +-1, which keep the inputs of ReLUs away from 0: where one lies within
// rounding of it, two trainings can part ways though neither is wrong.
static Tensors steady_params() {
    const float scales[8] = {0.1f, 1, 0.03f, 1, 0.03f, 1, 0.1f, 1};
    Tensors steady = lively_params();
    for (int i = 0; i < 8; i++)
        for (float *p = steady[i].ptr(), *end = p + size(steady[i]); p < end; p++)
            *p = i % 2 ? std::copysign(scales[i], *p) : *p / 0.1f * scales[i];
    return steady;
}

static std::string shell_quoted(const std::string &text) {
    std::string quoted = "'";
    for (char c : text) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return quoted + "'";
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
const std::string train_images = "/train-images-idx3-ubyte";
const std::string train_labels = "/train-labels-idx1-ubyte";
// A data set small enough to train on in a moment.
static void write_data(const std::string &folder, int train, int test) {
    write_text(folder + train_images, idx_images(train));
    write_text(folder + train_labels, idx_labels(train));
    write_text(folder + "/t10k-images-idx3-ubyte", idx_images(test));
    write_text(folder + "/t10k-labels-idx1-ubyte", idx_labels(test));
}
struct DataFolder : TestFolder { // with such a data set in data/
    DataFolder(int train, int test) { write_data(file("data"), train, test); }
};

// The words of a command line; of several with one name the last.
static std::string last_of_each(const std::string &line) {
    std::vector<std::string> words;
    std::istringstream stream(line);
    for (std::string word; stream >> word;) {
        auto same_name = [&](const std::string &other) {
            const size_t n = word.find('=');
            return n != std::string::npos && other.compare(0, n + 1, word, 0, n + 1) == 0;
        };
        words.erase(std::remove_if(words.begin(), words.end(), same_name), words.end());
        words.push_back(word);
    }
    std::string kept;
    for (const std::string &word : words) kept += word + " ";
    return kept;
}
struct Run {
    int status;
    std::string out, err;
};
// Run the program in the folder as `before PROGRAM after` in a shell, without the tests' devices.
static Run run_in_shell(const TestFolder &folder, const std::string &before,
                        const std::string &after) {
    static const std::string tests = std::filesystem::read_symlink("/proc/self/exe");
    const std::string command = "cd " + shell_quoted(folder.path) +
                                " && exec 2> stderr > stdout; "
                                "unset CUDA_CPU_DEVICES CUDA_CPU_CORES CUDA_CPU_MEMORY; " +
                                before + " " + shell_quoted(tests) + " --program " +
                                last_of_each(after);
    const int status = system(command.c_str());
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
// What a run prints that must fail, and say why in one line on stderr.
static std::string fails(const TestFolder &folder, const std::string &arguments,
                         const std::string &says, const std::string &environment = "") {
    const Run run = run_in_shell(folder, environment, arguments);
    CAPTURE(arguments);
    CHECK(run.status == 1);
    check_line(run.err, "mgpu: " + says);
    return run.out;
}

static const std::vector<std::string> right_algorithms = {"naive",   "bucket", "host", "by_tensor",
                                                          "sharded", "ring",   "tree", "yours"};
// Gradients of these sizes on k devices, one behind the other in memory or not.
static PerDevice new_grads(int k, const Ints &sizes, bool contiguous = true) {
    PerDevice grads(k);
    for (int c = 0; c < k; c++) {
        for (int n : sizes) grads[c].push_back({gpu(c), {1, n}, nullptr, nullptr});
        attach_grad(grads[c]);
        for (Tensor &t : grads[c]) t = contiguous ? *t.grad : empty(t.shape, t.device);
    }
    return grads;
}
// Of tensors of these sizes on each of k devices. Their numbers are whole, and others on each
// device and at each index; all sums are below 2^24, so exact in any order of addition.
static void check_exact_sums(const std::string &name, int k, const Ints &sizes,
                             bool contiguous = true) {
    const PerDevice grads = new_grads(k, sizes, contiguous);
    Floats want(sum_of(sizes));
    for (int c = 0, i = 0; c < k; c++, i = 0)
        for (const Tensor &t : grads[c]) {
            Floats numbers(size(t));
            for (float &x : numbers) want[i] += x = i + 1000 * c * c, i++;
            copyto(on_host(numbers, t.shape), t);
        }
    run_allreduce(name, grads);
    for (const auto &list : grads) {
        INFO(name, ", k ", k, ", ", str(list[0].device));
        CHECK(all_to_host(list) == want);
    }
}

inline void needs_tsan() { MESSAGE("skipped: needs ThreadSanitizer (make race)"); }
// doctest's run; status 4 where no test matches the filters, for then nothing was tested.
static int run_tests(int argc, char **argv) {
    for (int i = 1; i < argc; i++)
        if (argv[i][0] != '-') {
            const char *word = argv[i];
            fprintf(stderr, "%s is no option of the tests: try -tc='%s*', or --help\n", word, word);
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
    return fprintf(stderr, "no test case matches %s\n", argv[argc - 1]), 4;
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

// ---------------------------------------------------------------------------------------------
// What tests of operators share
#if !defined(TESTS_SHARED) || defined(TESTS_OF_OPERATORS)

// The gradient holds NaN for now: a backward must clear it first, and write every number of it.
static Tensor with_grad(const Floats &numbers, const Ints &shape) {
    Tensor t = on_device(numbers, shape);
    t.grad = std::make_shared<Tensor>(full(shape, NAN, t.device));
    return t;
}
// backward(), but with dys in place of ones as the gradients of ys.
static void backward_from(const Tensors &ys, const std::vector<Floats> &dys) {
    const Tensor l = empty({1}, ys[0].device);
    backward(record("backward_from", l, ys, [=](const Tensor &) {
        for (size_t i = 0; i < ys.size(); i++) {
            if (grad_of(ys[i])) add_(*ys[i].grad, on_device(dys[i], ys[i].grad->shape));
        }
    }));
}

// Is `got` the gradient of sum(dy * f()) in the numbers of x, which f reads? `each`: the slope of
// each number is compared, else the one in a random direction.
static void check_slopes(const Floats &got, Doubles &x, const Doubles &dy,
                         const std::function<Doubles()> &f, double rel, double h, bool each) {
    const Doubles at = x, direction = doubles(on_host(random_floats(x.size(), 9), {(int)x.size()}));
    auto slope = [&](size_t first, size_t last) { // along some numbers of the direction
        double l[2];
        for (int side : {0, 1}) {
            for (size_t i = first; i < last; i++) x[i] += (side ? h : -h) * direction[i];
            const Doubles y = f();
            l[side] = std::inner_product(y.begin(), y.end(), dy.begin(), 0.0);
            x = at;
        }
        return (l[1] - l[0]) / (2 * h);
    };
    REQUIRE(got.size() == x.size());
    Doubles want;
    for (size_t i = 0; each && i < x.size(); i++) want.push_back(slope(i, i + 1) / direction[i]);
    if (each) return check_close(got, want, rel);
    const double sum = std::inner_product(got.begin(), got.end(), direction.begin(), 0.0);
    double largest = 0;
    for (double g : got) largest = std::max(largest, std::fabs(g));
    CHECK(std::fabs(sum - slope(0, x.size())) <= rel * largest * std::sqrt(x.size()));
}

// An operator's result against a reference in double, and its gradients against that one's slopes.
// It is used once, and then twice on the same inputs: the gradients are then the sum of both uses',
// with nothing of the first time. Each is the same bits whether or not the other inputs want one.
// `rel`: of the result, then of each gradient; h: the slopes' step, whose square is to be small.
static void check_operator(const std::vector<Ints> &shapes,
                           const std::function<Tensor(const Tensors &)> &op,
                           const std::function<Doubles(const Arrays &)> &reference,
                           const Doubles &rel, double h = 1e-3) {
    std::vector<Floats> numbers; // of the inputs
    Tensors in;
    Arrays exact;
    for (const Ints &shape : shapes) {
        Floats x = random_floats(size({cpu(), shape}), in.size() + 1);
        for (float &number : x) number += number < 0 ? -0.01f : 0.01f; // relu bends at 0
        numbers.push_back(x);
        in.push_back(with_grad(x, shape));
        exact.push_back(Doubles(x.begin(), x.end()));
    }
    const Doubles y = reference(exact);
    std::vector<Floats> once; // the result, the gradients
    for (int uses : {1, 2}) {
        Tensors ys;
        std::vector<Floats> dys;
        Doubles dy(y.size());
        for (int use = 0; use < uses; use++) {
            ys.push_back(op(in));
            check_close(to_host(ys[use]), y, rel[0]);
            dys.push_back(random_floats(y.size(), 10 * uses + use));
            for (size_t i = 0; i < y.size(); i++) dy[i] += dys[use][i];
        }
        backward_from(ys, dys);
        if (uses == 1) once.push_back(to_host(ys[0]));
        for (size_t i = 0; i < in.size(); i++) {
            INFO("gradient of input ", i, ", uses ", uses);
            CHECK(in[i].grad->shape == in[i].shape);
            if (uses == 1) once.push_back(grad(in[i]));
            check_slopes(
                grad(in[i]), exact[i], dy, [&] { return reference(exact); }, rel[i + 1], h,
                y.size() * exact[i].size() < 5000);
        }
    }
    for (int wanted = 0; wanted < 1 << in.size() && y.size() < 2000; wanted++) {
        CAPTURE(wanted); // bit i: input i wants its gradient
        Tensors some;
        for (size_t i = 0; i < in.size(); i++) {
            some.push_back(with_grad(numbers[i], shapes[i]));
            if (!(wanted >> i & 1)) some[i].grad = nullptr;
        }
        const Tensor result = op(some);
        CHECK((same_bits(to_host(result), once[0]) && (bool)result.grad == (bool)wanted));
        if (wanted) backward_from({result}, {random_floats(y.size(), 10)});
        for (size_t i = 0; i < in.size(); i++)
            if (some[i].grad) CHECK(same_bits(grad(some[i]), once[i + 1]));
    }
}

static const std::vector<Ints> any_shapes = {{1}, {255}, {2, 3, 4, 5}, {1001}, {0, 3}};
#endif

#ifndef TESTS_SHARED
// Skipped under sanitizers, see small_only: cases that train, and those that are slow.
const doctest::skip trains(no_training), slow(small_only);

// ---------------------------------------------------------------------------------------------
// 3. Data synchronization

TEST_CASE("copyto: between the host and devices, any two of them") {
    const Floats numbers = random_floats(1001, 1);
    for (Device from : {cpu(), gpu(0), gpu(1)})
        for (Device to : {cpu(), gpu(0), gpu(1), gpu(most_devices - 1)}) {
            INFO(str(from), " to ", str(to));
            const Tensor src = copyto(on_host(numbers, {7, 143}), from), dst = copyto(src, to);
            CHECK((dst.device.id == to.id && dst.shape == src.shape && dst.data != src.data));
            const Tensor other = full({1001}, 0, to); // only the count must fit
            copyto(src, other);
            CHECK((to_host(dst) == numbers && to_host(other) == numbers));
            CHECK(to_host(copyto(empty({0, 3}, from), to)).empty());
            REFUSED(copyto(src, empty({9}, to)), "copyto: 1001 numbers do not fit a tensor of 9");
        }
}

TEST_CASE("get_params, attach_grad: independent copies, gradients of zeros behind one another") {
    Tensors start = {on_host({1, 2}, {2, 1}), on_host({8, 9}, {2}), full({0}, 0, cpu()), arange(3)};
    start[1].requires_grad = false; // a buffer
    const Tensors a = get_params(start, gpu(0)), b = get_params(start, gpu(1));
    CHECK(get_params({}, gpu(0)).empty());
    fill(a[0], 6);
    CHECK((all_to_host(a) == Floats{6, 6, 0, 1, 2} && to_host(a[1]) == Floats{8, 9}));
    CHECK((all_to_host(b) == Floats{1, 2, 0, 1, 2} && all_to_host(start) == all_to_host(b)));
    for (int i : {0, 2, 3}) {
        CHECK((b[i].device.id == 1 && b[i].grad->device.id == 1 && b[i].grad->shape == b[i].shape));
        CHECK((grad(b[i]) == Floats(size(b[i]), 0) && !start[i].grad));
    }
    CHECK(b[3].grad->ptr() == b[0].grad->ptr() + 2);
    REFUSED(gradient(b[1]), "a parameter has no gradient: does get_params call attach_grad?");
}

// ---------------------------------------------------------------------------------------------
// 4. Distributing data

TEST_CASE("split_batch, shard_sizes: contiguous shards in order, as equal as can be, or by SPLIT") {
    OptionsKept kept;
    // clang-format off
    const std::vector<Ints> cases[] = { // SPLIT, the sizes of shards
        {{}, {3, 2, 2}}, {{}, {3, 3, 2}}, {{}, {5}}, {{}, {0, 0}}, {{}, {1, 1, 0, 0, 0}},
        {{}, {2, 1, 1, 1, 1, 1, 1, 1}}, {{3, 1}, {192, 64}}, {{3, 1}, {4, 1}}, {{3, 1}, {1, 0}},
        {{1, 1, 1}, {3, 3, 2}}, {{1, 2, 4}, {2, 3, 5}}, {{1000, 1}, {2998, 2}}, {{5, 1}, {0, 0}},
        {{3, 1}, {7}}};
    // clang-format on
    for (const auto &c : cases) {
        const Ints &sizes = c[1];
        const int n = sum_of(sizes);
        CAPTURE(n);
        options.split = c[0];
        CHECK(shard_sizes(n, sizes.size()) == sizes);
        const Tensor X = reshape(arange(n * 6), {n, 1, 2, 3}), y = arange(n);
        auto [X_shards, y_shards] = split_batch(X, y, first_devices(sizes.size()));
        for (int c = 0; c < (int)sizes.size(); c++) {
            CHECK((X_shards[c].device.id == c && y_shards[c].device.id == c));
            CHECK((X_shards[c].shape == Ints{sizes[c], 1, 2, 3} && size(y_shards[c]) == sizes[c]));
        }
        CHECK((all_to_host(X_shards) == to_host(X) && all_to_host(y_shards) == to_host(y)));
    }
    REFUSED(shard_sizes(8, 3), "SPLIT has 2 parts ... 3 devices");
    REFUSED(split_batch(full({3, 2}, 0, cpu()), arange(4), {gpu(0)}), "3 samples but 4 labels");
}

// ---------------------------------------------------------------------------------------------
// 5. Training

TEST_CASE("train_batch: k devices learn what one device learns" * trains) {
    OptionsKept kept;
    // Minibatches of 8 and, in the middle, of one sample: the idle devices must add nothing, least
    // of all the gradients that they still have from the step before.
    const int steps = small_only ? 2 : 20;
    const float lr = 0.05f;
    const Tensors start = steady_params();
    Training one(1, start);
    std::vector<std::pair<Ints, Training>> others; // with SPLIT
    for (const Ints &split : {Ints{1, 1}, {1, 1, 1}, {1, 1, 1, 1, 1}, {3, 1}, {1, 100}})
        if (!small_only || split[0] == 3) others.push_back({split, Training(split.size(), start)});
    double mean[2]; // loss, of the first step and the last
    for (int s = 0; s < steps; s++) {
        const auto batch = minibatch(s == steps / 2 ? 1 : small_only ? 3 : 8, 100 + s);
        Floats want = one.numbers(0);
        const Floats losses = one.step(batch, lr), gradient = one.numbers(0, true);
        for (size_t i = 0; i < want.size(); i++) want[i] -= lr * gradient[i] / losses.size();
        check_close(one.numbers(0), want, 1e-6); // the step itself
        for (auto &other : others) {
            Training &many = other.second;
            INFO(str(other.first), ", step ", s);
            options.split = other.first;
            // Each step's gradients differ by rounding, below 1e-6 of them, and so the parameters
            // drift apart by no more: nothing amplifies it while ReLUs stay on their sides.
            check_close(many.step(batch, lr), losses, 1e-6 * (1 + s));
            REQUIRE(many.replicas_equal());
            for (int i = 0; i < 8; i++)
                check_close(grad(many.device_params.back()[i]), grad(one.device_params[0][i]),
                            5e-6 * (1 + s));
        }
        mean[s > 0] = std::accumulate(losses.begin(), losses.end(), 0.0) / losses.size();
    }
    if (!small_only) CHECK(mean[1] < 0.8 * mean[0]); // else the comparison says little
}

// ---------------------------------------------------------------------------------------------
// 7. The allreduce lab

TEST_CASE("allreduce_*: every device holds the exact sum of all, for any k and any length") {
    const int many = small_only ? 1003 : 40009;
    for (const std::string &name : right_algorithms) {
        for (int k = 1; k <= (small_only ? 4 : most_devices); k++) {
            const Ints cases[] = {{0},    {1},   {k - 1}, {k + 1}, {many}, {7, 0, 1, k, 100, 0, 33},
                                  {0, 0}, {0, 5}};
            for (const Ints &sizes : cases) {
                check_exact_sums(name, k, sizes);
                if (name == "naive" || name == "by_tensor" || name == "yours")
                    check_exact_sums(name, k, sizes, false);
                else if (sizes[0] > 0 && sizes.size() > 1)
                    REFUSED(run_allreduce(name, new_grads(k, sizes, false)),
                            name + ", k = ... are not contiguous in memory");
            }
        }
        if (small_only) continue;
        use_devices(16, true); // share the GPUs
        for (int k : {9, 13, 16}) check_exact_sums(name, k, {17, 3, 1000});
    }
}

// The device stands still until `open_again`, but for so many milliseconds at most.
static std::atomic<bool> open_again{false};
static void stop(Device device, long ms = 5000) {
    auto wait = [](void *ms) {
        for (long i = 0; i < (long)ms && !open_again; i++) usleep(1000);
    };
    open_again = false;
    REQUIRE(cudaLaunchHostFunc(stream_of(device), wait, (void *)ms) == cudaSuccess);
}

TEST_CASE("allreduce_*: of so many devices, then of others, while one is late") {
    for (const std::string &name : right_algorithms)
        for (int late = 0; late < 3; late++)
            for (const Ints &counts : {Ints{2, 3}, {3, 2}}) {
                INFO(name, ", late ", late, ", ", counts[0], " devices first");
                Tensors data;
                Floats want = {1, 2, 4}; // the sum of two is no third
                for (int c = 0; c < 3; c++) data.push_back(empty({3}, gpu(c)));
                stop(gpu(late), 20);
                for (int c = 0; c < 3; c++) fill(data[c], want[c]);
                for (int k : counts) {
                    PerDevice grads;
                    for (int c = 0; c < k; c++) grads.push_back({data[c]});
                    run_allreduce(name, grads);
                    const float sum = std::accumulate(want.begin(), want.begin() + k, 0.0f);
                    std::fill_n(want.begin(), k, sum);
                }
                for (int c = 0; c < 3; c++) CHECK(to_host(data[c]) == Floats(3, want[c]));
            }
}

TEST_CASE("run_allreduce: an error names the algorithm") {
    algorithms.push_back({"halving", allreduce_naive, powers_of_two});
    REFUSED(run_allreduce("halving", new_grads(3, {2})), "halving, k = 3: it does not support");
    for (int k = 1; k <= 8; k++) CHECK(powers_of_two(k) == (k == 1 || k == 2 || k == 4 || k == 8));
    check_exact_sums("halving", 4, {5});
    algorithms.pop_back();
}

TEST_CASE("flatten: one tensor of neighbours in memory; chunk: one of k, or several; send") {
    const Tensor all = copyto(arange(4), gpu(1)), none = full({0}, 1, gpu(1)), flat = arange(10);
    CHECK(to_host(flatten({{rows(all, 0, 1), none, rows(all, 1, 4)}})[0]) == Floats{0, 1, 2, 3});
    CHECK(flatten({{rows(all, 1, 2), rows(all, 2, 3)}})[0].ptr() == all.ptr() + 1);
    const std::string apart = "flatten: the tensors on gpu(1) are not contiguous in memory";
    REFUSED(flatten({{rows(all, 0, 1), rows(all, 2, 4)}}), apart);
    REFUSED(flatten({{rows(all, 2, 4), rows(all, 0, 2)}}), apart);
    CHECK(to_host(chunk(reshape(flat, {5, 2}), 1, 4)) == Floats{2, 3, 4});
    CHECK(to_host(chunk(flat, 1, 4, 2)) == Floats{2, 3, 4, 5, 6});
    CHECK((size(chunk(flat, 0, 4, 4)) == 10 && size(chunk(arange(2), 0, 3)) == 0));
    REFUSED(chunk(flat, 3, 4, 2), "there is no chunk 4 of 4: they are numbered 0 to 3");
    REFUSED(chunk(flat, -1, 3),
            "there is no chunk -1 of 3: they are numbered 0 to 2 (% of a negative number?)");
    const Tensor a = full({4}, 1, gpu(0)), b = full({4}, 2, gpu(1)), c = full({4}, 3, gpu(2));
    REFUSED(send({{full({2}, 0, gpu(0)), full({3}, 0, gpu(1))}}), "send ... 2 ... 3");
    REFUSED(send({{a, b}, {c, c}}), "a message on gpu(2) has the same source and destination");
    send({{rows(a, 0, 2), rows(b, 0, 2)}, {rows(c, 2, 4), rows(b, 2, 4)}, {none, rows(b, 2, 2)}});
    CHECK(to_host(b) == Floats{1, 1, 3, 3});
}

// A network of three layers after some steps on k devices, each gradient a bucket of its own.
static Training train_small(int k, const std::string &algorithm, bool overlap) {
    ModelKept kept;
    bucket_bytes = 1;
    exchange = exchange_by(algorithm, overlap);
    net = [](const Tensor &X, const Tensors &p) {
        return linear(relu(linear(relu(linear(X, p[0], p[1])), p[2], p[3])), p[4], p[5]);
    };
    Tensors start;
    for (const Ints &shape : {Ints{6, 7}, {7}, {7, 5}, {5}, {5, 3}, {3}})
        start.push_back(random_tensor(shape, start.size()));
    Training training(k, start);
    Floats y(4 * k - (k > 1)); // shards differ in size
    const int n = y.size();
    for (int i = 0; i < n; i++) y[i] = i % 3;
    for (int step = 0; step < (small_only ? 2 : 4); step++)
        training.step({random_tensor({n, 6}, step), on_host(y, {n})}, 0.1f);
    return training;
}

TEST_CASE("exchange: OVERLAP=1 gives the same as without, and the replicas are equal") {
    for (int k = 1; k <= (small_only ? 3 : 4); k += no_training ? 2 : 1) {
        const Floats naive = train_small(k, "naive", false).numbers(0);
        for (const std::string &name : right_algorithms) {
            INFO("k ", k, ", ", name);
            const Training with = train_small(k, name, true);
            const Training without = no_training ? with : train_small(k, name, false);
            const Floats got = with.numbers(0);
            // Those that add in the same order, however buckets cut the gradients
            if (k <= 2 || (name != "by_tensor" && name != "sharded" && name != "ring"))
                CHECK(same_bits(got, without.numbers(0)));
            if (!small_only) CHECK(same_bits(got, train_small(k, name, true).numbers(0)));
            for (const Training &training : {with, without}) {
                check_close(training.numbers(0), naive, 1e-5);
                CHECK(training.replicas_equal());
            }
        }
    }
}

// naive, which notes how many numbers each bucket has, with an event behind it.
static std::vector<std::pair<Ints, std::shared_ptr<Event>>> buckets;
static void probed(const PerDevice &grads) {
    run_allreduce("naive", grads);
    buckets.push_back({{}, std::make_shared<Event>(gpu(0))});
    for (const Tensor &t : grads[0]) buckets.back().first.push_back(size(t));
    REQUIRE(cudaEventRecord(buckets.back().second->handle, stream_of(gpu(0))) == cudaSuccess);
}
TEST_CASE("exchange: buckets of so many bytes, the last layers first; one without OVERLAP") {
    OptionsKept kept;
    algorithms.push_back({"probed", probed});
    auto buckets_of = [](const Ints &sizes, size_t bytes, bool overlap) {
        bucket_bytes = bytes;
        buckets.clear();
        const PerDevice grads = new_grads(2, sizes);
        waitall(); // for their zeros: no backward pass has recorded their events
        exchange_by("probed", overlap)(grads);
        std::vector<Ints> list;
        for (const auto &bucket : buckets) list.push_back(bucket.first);
        return list;
    };
    const Ints sizes = {3, 2, 4, 1, 5};
    CHECK(buckets_of(sizes, 1, false) == std::vector<Ints>{sizes});
    CHECK(buckets_of(sizes, 24, true) == std::vector<Ints>{{1, 5}, {2, 4}, {3}});
    CHECK(buckets_of(sizes, 25, true) == std::vector<Ints>{{4, 1, 5}, {3, 2}});
    CHECK(buckets_of(sizes, 1000, true) == std::vector<Ints>{sizes});

    // Each bucket waits for its own gradients alone
    bucket_bytes = 1;
    const auto p = Training(2, {arange(3), arange(2)}).device_params;
    for (bool stops : {false, true}) { // the first time it allocates what it needs
        buckets.clear();
        for (int c : {0, 1})
            for (int i : {1, 0}) { // as backward writes them; each device may stop in between
                fill(*p[c][i].grad, c + 1);
                const cudaEvent_t complete = p[c][i].grad->written->handle;
                REQUIRE(cudaEventRecord(complete, stream_of(gpu(c))) == cudaSuccess);
                if (stops && i == 1) stop(gpu(c));
            }
        exchange_by("probed", true)(gradients(p));
        if (!stops) waitall();
    }
    auto reached = [](int i) { return cudaEventQuery(buckets[i].second->handle) == cudaSuccess; };
    for (int ms = 0; ms < 2000 && !reached(0); ms++) usleep(1000);
    CHECK((buckets.size() == 2 && reached(0) && !reached(1)));
    open_again = true;
    for (const Tensors &list : p) // what comes after waits for all of them
        CHECK(all_to_host({*list[0].grad, *list[1].grad}) == Floats(5, 3));
    algorithms.pop_back();
    buckets.clear();
}

// ---------------------------------------------------------------------------------------------
// 8. Kernels and operators

static Doubles relu_reference(Doubles X) {
    for (double &x : X) x = std::max(x, 0.0);
    return X;
}
TEST_CASE("relu: result and gradient") {
    auto reference = [](auto &in) { return relu_reference(in[0]); };
    for (const Ints &shape : any_shapes)
        check_operator({shape}, [](auto &in) { return relu(in[0]); }, reference, {0, 1e-7});
    Tensor X = with_grad({NAN, 0.0f, -0.0f, INFINITY, -INFINITY, 1e-45f}, {6}), y = relu(X);
    backward(y);
    const Floats got = to_host(y), dX = grad(X);
    CHECK(std::isnan(got[0])); // or a broken network would look sound
    CHECK(Floats(got.begin() + 1, got.end()) == Floats{0, 0, INFINITY, 0, 1e-45f});
    CHECK(Floats(dX.begin() + 1, dX.end()) == Floats{0, 0, 1, 0, 1});
}

static Doubles cross_entropy_reference(const Doubles &y_hat, const Floats &y) {
    Doubles l;
    for (size_t n = 0, classes = y_hat.size() / std::max<size_t>(1, y.size()); n < y.size(); n++) {
        const double *z = &y_hat[n * classes], largest = *std::max_element(z, z + classes);
        double sum = 0;
        for (size_t j = 0; j < classes; j++) sum += std::exp(z[j] - largest);
        l.push_back(std::log(sum) - z[(int)y[n]] + largest);
    }
    return l;
}
TEST_CASE("softmax_cross_entropy: result and gradient") {
    for (Ints sizes : {Ints{1, 2}, {5, 10}, {65, 10}, {3, 7}, {4, 1}, {0, 10}, {2, 1000}}) {
        CAPTURE(sizes);
        const int N = sizes[0], classes = sizes[1];
        Floats y(N);
        for (int n = 0; n < N; n++) y[n] = n % 3 == 0 ? 0 : n % 3 == 1 ? classes - 1 : n % classes;
        const Tensor labels = on_device(y, {N});
        auto op = [&](auto &in) { return softmax_cross_entropy(in[0], labels); };
        // expf and logf are right to two units in the last place; the slopes' h^2
        check_operator(
            {sizes}, op, [&](auto &in) { return cross_entropy_reference(in[0], y); },
            {rounding(classes), rounding(classes) + 1e-7}, 1e-4);
    }
    // The right class far ahead, far behind, equal ones, the largest last, and in the middle
    const float far = 1e4f, third = 1 / 3.0f;
    const Floats logits = {far,  -far, 0, far, -far, 0,   -far, -far,
                           -far, -far, 0, far, 0,    far, -far};
    const Tensor y_hat = with_grad(logits, {5, 3}),
                 l = softmax_cross_entropy(y_hat, on_device({0, 1, 2, 1, 1}, {5}));
    backward(l);
    CHECK(to_host(l) == Floats{0, 20000, std::log(3.0f), 10000, 0});
    check_close(grad(y_hat), Floats{0, 0, 0, 1, -1, 0, third, third, third - 1, 0, -1, 1, 0, 0, 0},
                1e-6);
    const Tensor nan = on_device({1, NAN, 2}, {1, 3});
    CHECK(std::isnan(to_host(softmax_cross_entropy(nan, full({1}, 0, gpu(0))))[0]));
}

struct PoolSizes {
    int N, C, H, W, K;
};
static Doubles avg_pool2d_reference(const Doubles &X, const PoolSizes &s) {
    Doubles y;
    for (int plane = 0; plane < s.N * s.C; plane++)
        for (int i = 0; i < s.H / s.K; i++)
            for (int j = 0; j < s.W / s.K; j++) {
                double sum = 0;
                for (int u = 0; u < s.K; u++)
                    for (int v = 0; v < s.K; v++)
                        sum += X[(plane * s.H + i * s.K + u) * s.W + j * s.K + v];
                y.push_back(sum / (s.K * s.K));
            }
    return y;
}
TEST_CASE("avg_pool2d: result and gradient") {
    const PoolSizes sizes[] = {
        {1, 1, 1, 1, 1},    {2, 3, 4, 6, 2},   {0, 2, 4, 4, 2},
        {2, 20, 26, 26, 2}, {2, 1, 9, 9, 2}, // the ninth row and column are in no window
        {3, 2, 7, 5, 3},    {1, 300, 3, 5, 3}, {2, 2, 29, 33, 29}};
    for (const PoolSizes &s : sizes) {
        INFO(str(Ints{s.N, s.C, s.H, s.W, s.K}));
        check_operator(
            {{s.N, s.C, s.H, s.W}}, [&](auto &in) { return avg_pool2d(in[0], s.K, s.K); },
            [&](auto &in) { return avg_pool2d_reference(in[0], s); },
            {rounding(s.K * s.K), rounding(s.K * s.K)});
    }
    CHECK(avg_pool2d(full({2, 3, 9, 8}, 0, gpu(0)), 2, 2).shape == Ints{2, 3, 4, 4});
}

// Matrices on the device, and in double. `numbers` lie as the device has them.
struct Matrices {
    Matrix there;
    Tensor memory;
    Doubles numbers;
    Matrices(int count, int rows, int columns, bool transposed, unsigned seed) {
        memory = copyto(random_tensor({count * rows * columns}, seed), gpu(0));
        there = transposed ? transpose({memory.ptr(), count, columns, rows})
                           : Matrix{memory.ptr(), count, rows, columns};
        numbers = doubles(memory);
    }
    double &operator()(int n, int i, int j) {
        const int R = there.rows, C = there.columns;
        const int first = there.count > 1 ? n * R * C : 0;
        return numbers[first + (there.transposed ? j * R + i : i * C + j)];
    }
};
TEST_CASE("matmul: many products, one matrix for all, their sum; transposed matrices") {
    const Ints sizes[] = {{1, 1, 1, 1},  {3, 2, 33, 5},   {2, 33, 32, 3},
                          {2, 5, 31, 0}, {1, 31, 32, 33}, {4, 9, 2 * tile + 3, 40},
                          {0, 3, 4, 5},  {2, 0, 4, 5}};
    for (const Ints &s : sizes)
        for (int way = 0; way < 16; way++) { // bits: A, B transposed; one A for all; one C for two
            INFO("count M N K ", str(s), ", way ", way);
            const int count = s[0], M = s[1], N = s[2], K = s[3];
            const int results = way & 8 && count > 1 ? count / 2 : count;
            Matrices A(way & 4 ? 1 : count, M, K, way & 1, 1), B(count, K, N, way & 2, 2),
                C(results, M, N, false, 3);
            if (count == 0 && way & 4) continue; // one A, and no product
            matmul(C.there, A.there, B.there, gpu(0));
            for (int n = 0; n < count; n++)
                for (int i = 0; i < M; i++)
                    for (int j = 0; j < N; j++)
                        for (int k = 0; k < K; k++) C(n % results, i, j) += A(n, i, k) * B(n, k, j);
            check_close(to_host(C.memory), C.numbers, rounding((count + 1) * K));
        }
}

TEST_CASE("matmul_sum: the sum of all products is added to one matrix") {
    for (const Ints &s : std::vector<Ints>{{1, 1, 1, 1}, {7, 5, 33, 9}, {70, 33, 40, 3}}) {
        CAPTURE(s);
        const int count = s[0], M = s[1], N = s[2], K = s[3];
        Matrices A(count, M, K, false, 1), B(count, K, N, true, 2), C(1, M, N, false, 3);
        matmul_sum(C.there, A.there, B.there, gpu(0));
        for (int n = 0; n < count; n++)
            for (int i = 0; i < M; i++)
                for (int j = 0; j < N; j++)
                    for (int k = 0; k < K; k++) C(0, i, j) += A(n, i, k) * B(n, k, j);
        check_close(to_host(C.memory), C.numbers, rounding(count * K));
    }
}

static Doubles linear_reference(const Doubles &X, const Doubles &W, const Doubles &b, int N) {
    const int O = b.size(), C = W.size() / O;
    Doubles y;
    for (int n = 0; n < N; n++)
        for (int o = 0; o < O; o++) {
            y.push_back(b[o]);
            for (int c = 0; c < C; c++) y.back() += X[n * C + c] * W[c * O + o];
        }
    return y;
}
TEST_CASE("linear: result and gradients") {
    const Ints sizes[] = {{1, 1, 1},   {2, 3, 1},   {3, 5, 7},     {0, 5, 3},      {33, 17, 50},
                          {65, 1, 16}, {2, 50, 17}, {2, 800, 128}, {300, 128, 10}, {2, 1, 3000}};
    for (const Ints &s : sizes) {
        if (sum_of(s) > (no_training ? 20 : small_only ? 150 : INT_MAX)) continue;
        const int N = s[0], C = s[1], O = s[2];
        CAPTURE(s);
        check_operator(
            {{N, C}, {C, O}, {O}}, [](auto &in) { return linear(in[0], in[1], in[2]); },
            [=](auto &in) { return linear_reference(in[0], in[1], in[2], N); },
            {rounding(C), rounding(O), rounding(N), rounding(N)});
    }
}

struct ConvSizes {
    int N, C, H, W, O, K;
    int OH() const { return H - K + 1; }
    int OW() const { return W - K + 1; }
};
static Doubles conv2d_reference(const Doubles &X, const Doubles &W, const Doubles &b,
                                const ConvSizes &s) {
    Doubles y;
    for (int n = 0; n < s.N; n++)
        for (int o = 0; o < s.O; o++)
            for (int i = 0; i < s.OH(); i++)
                for (int j = 0; j < s.OW(); j++) {
                    double sum = b[o];
                    for (int c = 0; c < s.C; c++)
                        for (int u = 0; u < s.K; u++) {
                            const double *x = &X[((n * s.C + c) * s.H + i + u) * s.W + j];
                            const double *w = &W[((o * s.C + c) * s.K + u) * s.K];
                            for (int v = 0; v < s.K; v++) sum += x[v] * w[v];
                        }
                    y.push_back(sum);
                }
    return y;
}
TEST_CASE("conv2d: result and gradients") {
    // N C H W O K: one number, one output pixel, K even, H != W, many images, K = 1, 7, no images
    std::vector<ConvSizes> sizes = {{1, 1, 1, 1, 1, 1},  {2, 1, 3, 3, 2, 3},  {2, 3, 4, 9, 3, 4},
                                    {1, 3, 5, 7, 4, 3},  {33, 1, 4, 6, 3, 2}, {3, 17, 5, 9, 33, 3},
                                    {2, 50, 4, 3, 3, 1}, {1, 2, 7, 7, 50, 7}, {0, 3, 5, 5, 4, 3}};
    const ConvSizes large[] = {{2, 1, 28, 28, 20, 3}, {2, 20, 13, 13, 50, 5}}; // LeNet's
    if (!small_only) sizes.insert(sizes.end(), std::begin(large), std::end(large));
    for (const ConvSizes &s : sizes) {
        CAPTURE((Ints{s.N, s.C, s.H, s.W, s.O, s.K}));
        const int taps = s.K * s.K, pixels = s.N * s.OH() * s.OW();
        if (no_training && s.O * (pixels + taps) > 300) continue;
        check_operator(
            {{s.N, s.C, s.H, s.W}, {s.O, s.C, s.K, s.K}, {s.O}},
            [](auto &in) { return conv2d(in[0], in[1], in[2]); },
            [&](auto &in) { return conv2d_reference(in[0], in[1], in[2], s); },
            {rounding(s.C * taps), rounding(s.O * taps), rounding(pixels), rounding(pixels)});
    }
}

TEST_CASE("conv2d: sums of the whole minibatch are exact to 1e-6" * slow) {
    // LeNet's first convolution: 173,056 terms, here of one sign
    const int N = 256, O = 2, side = 26;
    Floats X = random_floats(N * 784, 1), dy = random_floats(N * O * side * side, 2);
    for (Floats *list : {&X, &dy})
        for (float &x : *list) x = std::fabs(x);
    const Tensor W = with_grad(random_floats(9 * O, 3), {O, 1, 3, 3});
    const Tensor b = with_grad(random_floats(O, 4), {O});
    backward_from({conv2d(on_device(X, {N, 1, 28, 28}), W, b)}, {dy});
    Doubles dW(9 * O), db(O);
    for (size_t at = 0; at < dy.size(); at++) {
        const int j = at % side, i = at / side % side, o = at / side / side % O;
        const int n = at / side / side / O;
        db[o] += dy[at];
        for (int t = 0; t < 9; t++)
            dW[o * 9 + t] += (double)dy[at] * X[(n * 28 + i + t / 3) * 28 + j + t % 3];
    }
    check_close(grad(W), dW, 1e-6);
    check_close(grad(b), db, 1e-6);
}

TEST_CASE("conv2d, linear, avg_pool2d, softmax_cross_entropy, add_, empty: what is refused") {
    auto t = [](const Ints &shape, Device d = gpu(0)) { return full(shape, 0, d); };
    // clang-format off
    const std::vector<Ints> convolutions[] = { // X, W, b
        {{1, 2, 5, 5}, {4, 3, 3, 3}, {4}}, {{1, 3, 5, 5}, {4, 3, 3, 2}, {4}},
        {{1, 3, 5, 5}, {4, 3, 3, 3}, {3}}, {{1, 3, 2, 5}, {4, 3, 3, 3}, {4}},
        {{1, 3, 5, 2}, {4, 3, 3, 3}, {4}}, {{3, 5, 5}, {4, 3, 3, 3}, {4}},
        {{1, 3, 5, 5}, {4, 3, 0, 0}, {4}}, {{1, 3, 5, 5}, {0, 3, 3, 3}, {0}},
        {{1, 0, 5, 5}, {4, 0, 3, 3}, {4}}};
    const std::vector<Ints> layers[] = {
        {{2, 3}, {4, 5}, {5}}, {{2, 3}, {3, 5}, {4}}, {{2, 3, 1, 1}, {3, 5}, {5}},
        {{3, 0}, {0, 2}, {2}}, {{3, 2}, {2, 0}, {0}}};
    // clang-format on
    for (const auto &w : convolutions)
        REFUSED(conv2d(t(w[0]), t(w[1]), t(w[2])),
                "conv2d: expected ... , got " + str(w[0]) + ", " + str(w[1]) + ", " + str(w[2]));
    for (const auto &w : layers)
        REFUSED(linear(t(w[0]), t(w[1]), t(w[2])),
                "linear: expected ... , got " + str(w[0]) + ", " + str(w[1]) + ", " + str(w[2]));
    const Tensor three = t({3});
    REFUSED(avg_pool2d(t({1, 1, 2, 3}), 3, 3), "avg_pool2d: expected ... (1,1,2,3)");
    for (int K : {3, 0}) REFUSED(avg_pool2d(t({1, 1, 3, 3}), K, 2), "avg_pool2d: expected");
    const std::string apart = "gpu(0) and gpu(1), but must be on one device";
    REFUSED(add_(t({2, 3}), t({3, 2})), "add_: expected ... (2,3), (3,2)");
    REFUSED(softmax_cross_entropy(t({2, 3}), three),
            "softmax_cross_entropy: expected ... (2,3), (3)");
    REFUSED(softmax_cross_entropy(t({2, 0}), t({2})), "softmax_cross_entropy: expected ... (2,0)");
    REFUSED(empty({-1, 3}, gpu(0)), "(-1,3) ... negative");
    REFUSED(empty({1 << 16, 1 << 15}, gpu(0)), "(65536,32768) ... use a smaller BATCH");
    CHECK((blocks(INT_MAX) == 1 << 23 && blocks(0) == 1 && blocks(257) == 2));
    REFUSED(blocks(1l << 31), "BATCH");
    REFUSED(conv2d(t({1, 1, 3, 3}), t({1, 1, 2, 2}, gpu(1)), t({1})), apart);
    REFUSED(linear(t({2, 3}), t({3, 4}), t({4}, gpu(1))), apart);
    REFUSED(softmax_cross_entropy(t({2, 3}), t({2}, gpu(1))), apart);
    REFUSED(add_(three, t({3}, gpu(1))), apart);
    REFUSED(sgd({three, get_params({t({3}, cpu())}, gpu(1))[0]}, 1, 1), apart);
    REFUSED(relu(t({2}, cpu())), "relu ... cpu"); // the host is no device to compute on
    REFUSED(avg_pool2d(t({1, 1, 2, 2}, cpu()), 2, 2), "avg_pool2d ... cpu");
}

// ---------------------------------------------------------------------------------------------
// 9. Autograd

// A + B, as an operator that a student might write
static Tensor plus(const Tensor &A, const Tensor &B) {
    const Tensor y = copyto(A, A.device);
    add_(y, B);
    return record("plus", y, {A, B}, [=](const Tensor &dy) {
        for (const Tensor &X : {A, B})
            if (grad_of(X)) add_(*X.grad, dy);
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
    // A gradient of another pass stays when what was made of it is used again
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

TEST_CASE("backward: what the result depends on, a tape a device; what is not recorded; NoGrad") {
    const Tensor X = with_grad({1, -1}, {2}), far = get_params({full({2}, 2, cpu())}, gpu(1))[0];
    const Tensor other = get_params({full({2}, 1, cpu())}, gpu(0))[0];
    const Tensor unused = relu(other), y0 = relu(X), y1 = relu(far);
    backward(y0);
    CHECK(all_to_host({*X.grad, *other.grad, *far.grad}) == Floats{1, 0, 0, 0, 0, 0});
    backward(y1);
    CHECK(grad(far) == Floats(2, 1));
    REFUSED(backward(y1), "backward: no operator that computed this tensor is recorded on gpu(1)");
    REFUSED(backward(relu(full({2}, 1, gpu(1)))), "gpu(1)"); // nothing wants a gradient
    backward(relu(other)); // nothing is left over from the passes before
    CHECK(all_to_host({*X.grad, *other.grad}) == Floats{1, 0, 1, 1});
    const Tensor first = plus(X, X), second = relu(X);
    backward(first);
    const Tensor third = plus(X, X);
    REFUSED(backward(second), "each backward pass erases the record");
    backward(third); // is still there
    CHECK(grad(X) == Floats(2, 2));
    {
        NoGrad guard;
        { NoGrad inner; }
        CHECK(!relu(X).grad);
    }
    backward(relu(X));
    CHECK(grad(X) == Floats{1, 0});
}

// ---------------------------------------------------------------------------------------------
// 2. A toy network

// The references of section 8, in the order of lenet()
static Doubles lenet_reference(const Doubles &X, const Arrays &p, int N) {
    Doubles h1 = relu_reference(conv2d_reference(X, p[0], p[1], {N, 1, 28, 28, 20, 3}));
    h1 = avg_pool2d_reference(h1, {N, 20, 26, 26, 2});
    Doubles h2 = relu_reference(conv2d_reference(h1, p[2], p[3], {N, 20, 13, 13, 50, 5}));
    h2 = avg_pool2d_reference(h2, {N, 50, 9, 9, 2});
    const Doubles h3 = relu_reference(linear_reference(h2, p[4], p[5], N));
    return linear_reference(h3, p[6], p[7], N);
}
TEST_CASE("lenet: outputs, losses and the gradients of all parameters" * trains) {
    const int N = small_only ? 1 : 3;
    const auto batch = minibatch(N, 2);
    const Tensor &X = batch.first, &y = batch.second;
    const Doubles X_exact = doubles(X);
    const Tensors host_params = lively_params();
    Arrays exact;
    for (const Tensor &t : host_params) exact.push_back(doubles(t));
    auto outputs = [&] { return lenet_reference(X_exact, exact, N); };
    auto losses = [&] { return cross_entropy_reference(outputs(), to_host(y)); };
    const Tensors p = get_params(host_params, gpu(0));
    const Tensor y_hat = lenet(copyto(X, gpu(0)), p), l = loss(y_hat, copyto(y, gpu(0)));
    backward(l);
    CHECK(y_hat.shape == Ints{N, 10});
    // The longest sums have 800 terms, and their errors pass through three layers more.
    check_close(to_host(y_hat), outputs(), 3e-6);
    check_close(to_host(l), losses(), 3e-6);
    for (int i = 0; i < 8; i++) {
        CAPTURE(param_names[i]);
        check_slopes(grad(p[i]), exact[i], Doubles(N, 1), losses, 1e-5, 1e-7, false);
    }
}

TEST_CASE("init_model: names, shapes, counts; a seed gives the same first and last weights") {
    ModelKept kept;
    set_model("lenet", 0);
    CHECK(listed(param_names, " ") == "W1 b1 W2 b2 W3 b3 W4 b4");
    std::vector<std::string> shapes;
    for (const Tensor &p : params) shapes.push_back(str(p.shape));
    CHECK(listed(shapes, " ") == "(20,1,3,3) (20) (50,20,5,5) (50) (800,128) (128) (128,10) (10)");
    CHECK(all_to_host(params).size() == 129068);
    CHECK(params[0].ptr()[0] == 0.0221220627f);
    CHECK(params[6].ptr()[1279] == 0.0134778069f);
    for (size_t i = 0; i < params.size(); i++) {
        CAPTURE(param_names[i]);
        double squares = 0; // of 180 numbers, the fewest, the deviation is known to 5%
        for (float x : to_host(params[i])) squares += x * x / size(params[i]);
        const double want = i % 2 ? 0 : 0.01;
        CHECK(std::fabs(std::sqrt(squares) - want) <= 0.2 * want);
    }
    for (float s : {0.0f, -0.01f, NAN}) // what if all weights begin with 0?
        REFUSED(normal(s, {3}), format("normal: the scale must be greater than 0, not %g", s));
}

// ---------------------------------------------------------------------------------------------
// 10. Devices and memory

TEST_CASE("reshape: the same numbers and the same gradient; rows: a part of the numbers") {
    const Tensor X = with_grad({0, 1, 2, 3, 4, 5}, {2, 3});
    CHECK((reshape(X, {3, 2}).shape == Ints{3, 2} && reshape(X, {-1}).shape == Ints{6}));
    CHECK((reshape(X, {1, -1, 3}).shape == Ints{1, 2, 3} && reshape(X, {6, 1}).data == X.data));
    CHECK(reshape(empty({0, 50, 4, 4}, gpu(0)), {0, -1}).shape == Ints{0, 800});
    for (const Ints &wrong : {Ints{5, 2}, {4, -1}}) REFUSED(reshape(X, wrong), "reshape ... (2,3)");
    // Through a reshape of an operator's result and of a parameter
    backward_from({reshape(relu(X), {3, 2})}, {{1, 2, 3, 4, 5, 6}});
    CHECK(grad(X) == Floats{0, 2, 3, 4, 5, 6});
    backward(relu(reshape(X, {6})));
    CHECK((grad(X) == Floats{0, 1, 1, 1, 1, 1} && X.grad->shape == X.shape));
    CHECK_FALSE(rows(X, 0, 1).grad); // which is that of all rows
    const Tensor Y = copyto(reshape(arange(8), {4, 2}), gpu(1)), part = rows(Y, 1, 3);
    CHECK((part.shape == Ints{2, 2} && to_host(part) == Floats{2, 3, 4, 5}));
    fill(part, -1);
    CHECK(to_host(Y) == Floats{0, 1, -1, -1, -1, -1, 6, 7});
    CHECK((to_host(rows(Y, 4, 4)).empty() && to_host(rows(arange(3), 2, 3)) == Floats{2}));
    for (const Ints &wrong : {Ints{-1, 2}, {3, 2}, {1, 5}})
        REFUSED(rows(Y, wrong[0], wrong[1]), "rows: cannot take rows ... of a tensor with 4 rows");
}

TEST_CASE("empty_cache, try_gpu: memory goes back to CUDA; errors name devices") {
    auto unused = [] {
        size_t bytes = 0, total = 0;
        stream_of(gpu(1));
        REQUIRE(cudaMemGetInfo(&bytes, &total) == cudaSuccess);
        return bytes;
    };
    empty_cache();
    const size_t before = unused();
    const float *first = empty({1 << 24}, gpu(1)).ptr(); // and at once free again, in the cache
    CHECK((unused() < before && empty({1 << 24}, gpu(1)).ptr() == first));
    empty_cache();
    CHECK((unused() >= before && to_host(full({3}, 2, gpu(1))) == Floats{2, 2, 2}));
    // A freed block serves its own stream again, whichever is the current one when it is freed
    auto address = [](bool comm) {
        use_comm_streams(comm);
        const Tensor t = empty({12345}, gpu(0));
        use_comm_streams(!comm);
        return t.ptr();
    };
    const float *two[2] = {address(false), address(true)};
    CHECK((two[0] != two[1] && address(false) == two[0] && address(true) == two[1]));
    use_comm_streams(false);
    REFUSED(try_gpu(99), "there is no gpu(99): the program runs on ... devices");
    REFUSED(error("a\nb"), "a?b");
}

// ---------------------------------------------------------------------------------------------
// 11. Data, timing, files

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

TEST_CASE("evaluate_accuracy_gpu: each sample counts once") {
    const DataSet set = numbered_set(10);
    // `largest(i)`: the classes for which sample i has the largest score
    auto accuracy = [&](int batch, const std::function<Ints(int)> &largest) {
        DataIter iter = make_iter(set, batch, false);
        auto net = [&](const Tensor &X) {
            CHECK(X.device.id == 1);
            Floats y_hat(X.shape[0] * 10, -1.5f), pixels = to_host(X);
            for (int n = 0; n < X.shape[0]; n++)
                for (int c : largest(std::lround(pixels[n * 784] * 255))) y_hat[n * 10 + c] = 2.5f;
            return on_device(y_hat, {X.shape[0], 10}, X.device);
        };
        return evaluate_accuracy_gpu(net, iter, gpu(1));
    };
    for (int batch : {1, 3, 4, 10, 256}) {
        CHECK(accuracy(batch, [](int i) { return Ints{i}; }) == 1.0f);
        CHECK(accuracy(batch, [](int i) { return Ints{i < 7 ? i : 0}; }) == 0.7f);
        // Of equal scores the first counts
        CHECK(accuracy(batch, [](int i) { return i % 4 ? Ints{0} : Ints{4, 9}; }) == 0.1f);
    }
}

TEST_CASE("to_string: as NumPy prints") {
    const std::pair<Tensor, const char *> cases[] = {
        {full({3}, 0, cpu()), "[0. 0. 0.]"},
        {full({1, 2}, 3, gpu(1)), "[[3. 3.]] @gpu(1)"},
        {on_host({1, -10, 100}, {3}), "[  1. -10. 100.]"},
        {on_host({NAN, 0.5f, -INFINITY}, {3}), "[ nan      0.5 -inf  ]"},
        {on_host({0.5f, -1.25f}, {2}), "[ 0.5  -1.25]"},
        {reshape(arange(12), {3, 4}),
         "[[ 0.  1.  2.  3.]\n [ 4.  5.  6.  7.]\n [ 8.  9. 10. 11.]]"},
        {reshape(arange(8), {2, 2, 2}), "[[[0. 1.]\n  [2. 3.]]\n\n [[4. 5.]\n  [6. 7.]]]"},
        {empty({0}, gpu(0)), "[] @gpu(0)"}};
    for (const auto &[t, text] : cases) CHECK(to_string(t) == text);
}

// --- data

TEST_CASE("load_data: the files' bytes, of the first samples with LIMIT") {
    TestFolder folder;
    OptionsKept kept;
    const std::string path = folder.file("a set's");
    for (int n : {1, 7, 8, 9, 17}) { // the headers have 8 and 16 bytes
        write_data(path, n, 3);
        for (int limit : {0, 1, 9, 200}) {
            INFO("n ", n, ", limit ", limit);
            options.limit = limit;
            const DataSet set = load_data(path, "train");
            CHECK(set.count == (limit ? std::min(limit, n) : n));
            CHECK(std::string(set.images.begin(), set.images.end()) == idx_images(n).substr(16));
            CHECK(std::string(set.labels.begin(), set.labels.end()) == idx_labels(n).substr(8));
            CHECK(load_data(path, "t10k").count == (limit == 1 ? 1 : 3));
        }
    }
}

TEST_CASE("load_idx: a wrong file is named, and what is wrong with it") {
    TestFolder folder;
    const std::string path = folder.file("file"), images = idx_images(3), labels = idx_labels(3);
    const std::string pixels = images.substr(16), classes = labels.substr(8);
    auto check_wrong = [&](int dims, const std::string &bytes, const std::string &says) {
        write_text(path, bytes);
        CHECK(error_of([&] { load_idx(path, dims); }) == path + says);
    };
    const std::string no_images = " is not an IDX file of images (is it still compressed?)";
    const std::string no_labels = " is not an IDX file of labels (is it still compressed?)";
    for (size_t n : {0, 1, 3, 4, 15}) check_wrong(3, images.substr(0, n), no_images);
    for (size_t n : {0, 3, 7}) check_wrong(1, labels.substr(0, n), no_labels);
    check_wrong(3, labels, no_images);
    check_wrong(1, images, no_labels);
    check_wrong(1, idx({2051, 3}, classes), no_labels);
    check_wrong(3, idx({2049, 3, 28, 28}, pixels), no_images);
    check_wrong(3, idx({0x03080000, 3, 28, 28}, pixels), no_images); // the bytes reversed
    check_wrong(1, "\x1f\x8b" + labels, no_labels);
    const std::string size = " pixels, not 28x28";
    check_wrong(3, idx({2051, 3, 27, 28}, pixels), " has images of 27x28" + size);
    check_wrong(3, idx({2051, 3, 28, 29}, pixels), " has images of 28x29" + size);
    const std::string damaged = " is damaged: ";
    check_wrong(3, idx({2051, 0, 28, 28}, ""), damaged + "0 images take 16 bytes, but it has 16");
    check_wrong(1, idx({2049, 0}, ""), damaged + "0 labels take 8 bytes, but it has 8");
    check_wrong(1, labels + "x", damaged + "3 labels take 11 bytes, but it has 12");
    check_wrong(1, labels.substr(0, 10), damaged + "3 labels take 11 bytes, but it has 10");
    check_wrong(3, images.substr(0, 16), damaged + "3 images take 2368 bytes, but it has 16");
    check_wrong(3, images.substr(0, 2367), damaged + "3 images take 2368 bytes, but it has 2367");
    check_wrong(1, idx({2049, 4294967295}, classes),
                damaged + "4294967295 labels take 4294967303 bytes, but it has 11");
    check_wrong(3, idx({2051, 4294967295, 28, 28}, pixels),
                damaged + "4294967295 images take 3367254359296 bytes, but it has 2368");
    write_text(path, labels);
    CHECK(load_idx(path, 1).size() == 3);
    REFUSED(load_idx(folder.path, 1), "cannot read " + folder.path + ": Is a directory");
    REFUSED(load_idx(path + "x", 1), "cannot read " + path + "x: No such file or directory");
}

TEST_CASE("load_data: a file that is missing, archives, labels that do not fit are named") {
    TestFolder folder;
    const std::string path = folder.path;
    REFUSED(load_data(path, "train"), path + train_images + ": No such file or directory: `make " +
                                          "data DATA=" + path + "` unpacks an archive of it");
    write_data(path, 3, 3);
    std::filesystem::remove(path + train_images);
    std::filesystem::create_directory(path + train_images);
    REFUSED(load_data(path, "train"), "cannot read " + path + train_images + ": Is a directory");
    write_data(folder.file("good"), 3, 3);
    const std::string good = folder.file("good"), name = good + train_labels;
    for (int label : {10, 255}) {
        write_text(name, idx({2049, 3}, {0, 9, char(label)}));
        REFUSED(load_data(good, "train"), name + format(" has a label %d, not 0 to 9", label));
    }
    write_text(name, idx_labels(4));
    REFUSED(load_data(good, "train"),
            name + " has 4 labels, but " + good + train_images + " has 3 images");
}

// The samples of one epoch in their order, after checks of every minibatch. The minibatches are
// looked at when the epoch is over: that is when a device may read the last of them.
static Floats epoch_of(DataIter &iter, const Ints &sizes) {
    Tensors Xs, ys;
    for (auto [X, y] : iter.epoch()) {
        Xs.push_back(X);
        ys.push_back(y);
    }
    REQUIRE(Xs.size() == sizes.size());
    for (size_t b = 0; b < sizes.size(); b++) {
        CHECK((Xs[b].shape == Ints{sizes[b], 1, 28, 28} && ys[b].shape == Ints{sizes[b]}));
        Floats y = to_host(ys[b]), X;
        for (int i = 0; i < 784 * sizes[b]; i++)
            X.push_back(((int)y[i / 784] + i % 784) % 256 / 255.0f);
        CHECK(to_host(Xs[b]) == X);
    }
    return all_to_host(ys);
}
TEST_CASE("DataIter: every sample once an epoch, shuffled anew, the same for the same seed") {
    const std::vector<Ints> cases[] = {{{10, 4}, {4, 4, 2}}, {{12, 4}, {4, 4, 4}},
                                       {{10, 10}, {10}},     {{3, 256}, {3}},
                                       {{3, 1}, {1, 1, 1}},  {{100, 64}, {64, 36}}};
    for (const auto &c : cases) {
        const int count = c[0][0], batch = c[0][1];
        INFO("count ", count, ", batch ", batch);
        const DataSet set = numbered_set(count);
        const Floats file = to_host(arange(count)); // in its order
        std::vector<Floats> epochs;
        for (int seed : {5, 5, 6}) {
            rng.seed(seed);
            DataIter plain = make_iter(set, batch, false), iter = make_iter(set, batch, true);
            for (int epoch = 0; epoch < 3; epoch++) {
                CHECK(epoch_of(plain, c[1]) == file);
                epochs.push_back(epoch_of(iter, c[1]));
                Floats sorted = epochs.back();
                std::sort(sorted.begin(), sorted.end());
                CHECK(sorted == file);
            }
        }
        for (int e : {0, 1, 2}) CHECK(epochs[e] == epochs[3 + e]);
        if (count == 100)
            for (const Floats &other : {file, epochs[1], epochs[6]}) CHECK(epochs[0] != other);
    }
}

TEST_CASE("DataIter, number_of_epochs: STEPS ends the last epoch early") {
    OptionsKept kept;
    const DataSet set = numbered_set(10);
    options.epochs = 3;
    DataIter iter = make_iter(set, 4, false, 5); // minibatches of 4, 4 and 2 samples
    CHECK(iter.steps() == 3);
    CHECK(number_of_epochs(iter) == 2);
    CHECK(iter.epoch().size() == 3);
    CHECK(iter.epoch().size() == 2);
    CHECK(iter.epoch().size() == 0);
    CHECK(number_of_epochs(make_iter(set, 4, false, 6)) == 2);
    CHECK(number_of_epochs(make_iter(set, 4, false, 7)) == 3);
    CHECK(number_of_epochs(make_iter(set, 4, false, 700)) == 3);
    CHECK(number_of_epochs(make_iter(set, 4, false)) == 3);
}

// --- timing and progress

TEST_CASE("Timer: the mean over the pairs of start and stop") {
    Timer timer;
    for (int i = 0; i < 2; i++, usleep(20000)) { // what is between them counts for nothing
        const double t0 = now();
        timer.start();
        usleep(20000);
        timer.stop();
        CHECK(timer.times[i] >= 0.02);
        CHECK(timer.times[i] <= now() - t0);
    }
    timer.times = {1, 2, 6};
    CHECK(timer.avg() == 3);
    CHECK(Timer().avg() == 0);
}

struct LogFolder : TestFolder { // the Animator's log goes to it
    OptionsKept kept;
    LogFolder() { options.log = file("new folder/log.csv"); }
};
// The losses of a minibatch as they lie on the devices.
static Tensors losses_on(const std::vector<Floats> &shards) {
    Tensors ls;
    for (const Floats &l : shards) ls.push_back(on_device(l, {(int)l.size()}, gpu(ls.size())));
    return ls;
}
TEST_CASE("Animator: a row an epoch, the same in the log; the mean loss of all its samples") {
    LogFolder folder;
    auto epochs = [] {
        Animator animator(3);
        animator.add_losses(losses_on({{1, 2}, {3}, {4}}));
        animator.add_losses(losses_on({{10, 20}, {30}, {50}}));
        animator.add_losses(losses_on({{7}, {}, {}})); // the epoch's last minibatch: idle devices
        animator.add(1, 0.1f, 1.25);
        animator.add_losses(losses_on({{8}, {16}, {}})); // the next epoch, stopped after a step
        animator.add(12, 0.8215f, 123.456);
    };
    const std::string head = "epoch,loss,test_acc,seconds,model,gpus,allreduce,lr\n";
    auto log = [](std::string model) {
        return format("1,14.111111,0.1000,1.2500,%s,3,ring,0.5\n"
                      "12,12.000000,0.8215,123.4560,%s,3,ring,0.5\n",
                      model.c_str(), model.c_str());
    };
    options.gpus = 3, options.allreduce = "ring", options.lr = 0.5;
    CHECK(printed(epochs) == "epoch      loss  test acc   seconds\n"
                             "    1   14.1111    0.1000      1.25\n"
                             "   12   12.0000    0.8215    123.46\n");
    CHECK(read_text(options.log) == head + log("lenet"));
    options.model = "other";
    printed(epochs);
    CHECK(read_text(options.log) == head + log("other"));
    // On a terminal, a line ten times a second at most, wiped away before the row
    auto bar = [] {
        Animator animator(40);
        animator.began -= 1000; // some images/s that are known
        for (int s = 0; s < 40; s++) animator.add_losses(losses_on({{1, 2}, {s ? 3.f : 6.f}}));
        animator.add(1, 0, 1);
    };
    const std::string drawn = printed(bar, true);
    CAPTURE(drawn);
    CHECK(contains(drawn, "\r   40/40 [" + std::string(30, '=') +
                              "]  loss 2.0250  0 images/s  0 s left\033[K\r\033[K"));
    CHECK(std::count(drawn.begin(), drawn.end(), '\r') < 20);
    options.log = folder.path;
    REFUSED(Animator(1), "cannot write " + folder.path + ": Is a directory");
}

TEST_CASE("Animator: a loss that is no number ends the run") {
    LogFolder folder;
    options.lr = 0.5f;
    for (float bad : {NAN, INFINITY, -INFINITY}) {
        Animator animator(4);
        animator.Y = {0, 0, 0}; // three epochs are done
        for (int s = 0; s < 4; s++) animator.add_losses(losses_on({{1, 2}, {3, s == 2 ? bad : 4}}));
        REFUSED(animator.add(4, 0, 0),
                "the loss is ... in step 3 of epoch 4: use a smaller LR than 0.5");
    }
}

TEST_CASE("Animator: losses are read when they are needed") {
    LogFolder folder;
    const Tensors first = losses_on({{0}}), second = losses_on({{5}});
    Animator animator(2);
    animator.add_losses(first);
    fill(first[0], 3);
    animator.add_losses(second);
    printed([&] { animator.add(1, 0, 1); });
    CHECK(contains(read_text(options.log), "\n1,4.000000,"));
}

// --- files

TEST_CASE("write_file: all or nothing") {
    TestFolder folder;
    const std::string path = folder.file("a/b/file"), bytes("0\0\xff\n", 4);
    for (const std::string &text : {bytes, std::string("shorter")}) {
        write_file(path, text);
        CHECK(read_text(path) == text);
    }
    const std::set<std::string> before = {"a", "a/b", "a/b/file"};
    REFUSED(write_file(path + "/below", ""), "cannot write " + path + "/below: Not a directory");
    REFUSED(write_file(folder.file("a/b"), ""), "a/b: Is a directory");
    REFUSED(write_file("/proc/none/file", ""), "cannot write /proc/none/file: ");
    REFUSED(write_file("", ""), "cannot write");
    // A disk that is full in the midst of it: here, a limit on the size of files
    rlimit limit;
    REQUIRE(getrlimit(RLIMIT_FSIZE, &limit) == 0);
    const rlimit small = {10000, limit.rlim_max};
    signal(SIGXFSZ, SIG_IGN);
    REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
    std::string said = error_of([&] { write_file(path, std::string(100000, 'x')); });
    setrlimit(RLIMIT_FSIZE, &limit);
    signal(SIGXFSZ, SIG_DFL);
    check_says(said, "cannot write " + path + ": File too large");
    // A folder that this user may not write in. Root may, and so is another user for a moment.
    std::filesystem::permissions(folder.path, std::filesystem::perms(0555));
    const uid_t user = geteuid();
    REQUIRE(seteuid(user ? user : 65534) == 0);
    said = error_of([&] { write_file(folder.file("new"), ""); });
    REQUIRE(seteuid(user) == 0);
    std::filesystem::permissions(folder.path, std::filesystem::perms(0755));
    check_says(said, "cannot write " + folder.file("new") + ": Permission denied");
    CHECK((read_text(path) == "shorter" && folder.listing() == before));
}

static std::string bytes_of(const Floats &numbers) {
    return {(const char *)numbers.data(), numbers.size() * sizeof(float)};
}
static std::string safetensors(const std::string &header, const std::string &numbers) {
    return char(header.size()) + std::string(7, 0) + header + numbers;
}
TEST_CASE("save_safetensors: the format's bytes") {
    TestFolder folder;
    ModelKept kept;
    const std::string path = folder.file("a.safetensors");
    param_names = {"b", "a1"};
    Floats a = {-0.0f, INFINITY, 1e-45f, 4, 5, 6}, b = {7, 0};
    memcpy(&b[1], "\x45\x23\xc1\xff", 4); // a NaN with bits of its own
    save_safetensors(path, {on_device(b, {2}, gpu(1)), on_device(a, {2, 3}, gpu(1))});
    const std::string header = R"({"a1":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
                               R"("b":{"dtype":"F32","shape":[2],"data_offsets":[24,32]}}       )";
    CHECK(header.size() % 8 == 0);
    CHECK(read_text(path) == safetensors(header, bytes_of(a) + bytes_of(b))); // sorted by name
}

TEST_CASE("load_safetensors: what any writer writes; what is wrong is named, with its tensor") {
    TestFolder folder;
    ModelKept kept;
    const std::string path = folder.file("a.safetensors");
    param_names = {"b", "a1"};
    Floats a = {-0.0f, INFINITY, 1e-45f, 4, 5, 6}, b = {7, 8};
    const Tensors got = {full({2}, 0, cpu()), full({2, 3}, 0, cpu())};
    auto load = [&](const std::string &header, const std::string &numbers) {
        for (const Tensor &t : got) std::fill_n(t.ptr(), size(t), 5);
        write_text(path, safetensors(header, numbers));
        return error_of([&] { load_safetensors(path, got); });
    };
    const std::string numbers = bytes_of(a) + bytes_of(b), other_way = bytes_of(b) + bytes_of(a);
    const std::string plain = R"({"a1":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
                              R"("b":{"dtype":"F32","shape":[2],"data_offsets":[24,32]}})";
    const std::string inner = plain.substr(1);
    auto check_right = [&](const std::string &header, const std::string &numbers) {
        CAPTURE(header);
        CHECK(load(header, numbers) == "");
        CHECK(bytes_of(all_to_host(got)) == bytes_of(b) + bytes_of(a));
    };
    check_right(plain, numbers);
    check_right(plain + "   ", numbers); // padding
    check_right(R"({"__metadata__":{},)" + inner, numbers);
    check_right(R"({"__metadata__":{"format":"pt","x":"{\"b\":{\"dtype\":\"F64\"}}"},)" + inner,
                numbers);
    check_right(plain.substr(0, plain.size() - 1) + R"(,"__metadata__":{"b":"}{"}})", numbers);
    check_right(R"({ "b" : { "data_offsets" : [ 24, 32 ], "shape" : [ 2 ], "dtype" : "F32" },)"
                "\n\t"
                R"("a1": {"shape": [2, 3], "dtype": "F32", "data_offsets": [0, 24]}})",
                numbers);
    check_right(R"({"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                R"("a1":{"dtype":"F32","shape":[2,3],"data_offsets":[8,32]}})",
                other_way);
    check_right(R"({"momentum":{"dtype":"F16","shape":[1],"data_offsets":[32,34]},)" + inner,
                numbers + "ab"); // a tensor more

    auto replaced = [&](const std::string &from, const std::string &to) {
        std::string header = plain;
        return header.replace(header.find(from), from.size(), to);
    };
    auto check_wrong = [&](const std::string &header, const std::string &says) {
        CAPTURE(header);
        CHECK(load(header, numbers) == path + ": " + says);
    };
    check_wrong(replaced("\"b\"", "\"fc.bias\""), "b is missing. The file has a1, fc.bias");
    check_wrong(replaced("\"a1\"", "\"A1\""), "a1 is missing. The file has A1, b");
    check_wrong("{}", "b is missing. The file has ");
    check_wrong(replaced("F32\",\"shape\":[2,3]", "BF16\",\"shape\":[2,3]"),
                "a1 is BF16 [2,3], but lenet needs F32 [2,3]");
    check_wrong(replaced("[2,3]", "[3,2]"), "a1 is F32 [3,2], but lenet needs F32 [2,3]");
    check_wrong(replaced("[2]", "[]"), "b is F32 [], but lenet needs F32 [2]");
    check_wrong(replaced("[24,32]", "[24,28]"), "b: its 8 bytes are not at data_offsets [24,28]");
    check_wrong(replaced("[24,32]", "[28,36]"), "b: its 8 bytes are not at data_offsets [28,36]");
    const std::string none = path + " is not a .safetensors file";
    for (const std::string &bytes : {std::string(), safetensors(plain, "").substr(0, 20),
                                     std::string(100, 'x'), safetensors("", numbers)}) {
        write_text(path, bytes);
        CHECK(error_of([&] { load_safetensors(path, got); }) == none);
    }
    REFUSED(load_safetensors(folder.file("none"), got), "none: No such file or directory");
    std::mt19937 random(
        1); // bytes that are cut, changed, or all garbage: nothing worse than an error
    const std::string good = safetensors(plain, numbers);
    for (int i = 0; i < (small_only ? 200 : 1000); i++) {
        std::string bytes = i % 3 == 2 ? random_bytes(random() % 300, i, 256) : good;
        if (i % 3 == 0) bytes.resize(random() % bytes.size());
        if (i % 3 == 1) bytes[random() % (bytes.size() - numbers.size())] = random();
        if (i % 9 == 8 && bytes.size() > 8) bytes.replace(0, 8, "\x40\0\0\0\0\0\0\0", 8);
        write_text(path, bytes);
        const std::string said = error_of([&] { load_safetensors(path, got); });
        if (i % 3 != 1) CHECK(said != "");
    }
}

// ---------------------------------------------------------------------------------------------
// 12. Checks

// What check_first_step says of a step that `spoil` has changed, and what it prints.
typedef std::function<void(Training &training, Tensors &ls)> Spoil;
static std::pair<std::string, std::string> first_step(int k, int n, const Spoil &spoil = nullptr) {
    const auto batch = minibatch(n, 3);
    const Tensor &X = batch.first, &y = batch.second;
    Training training(k, params);
    Tensors ls = train_batch(X, y, training.device_params, training.devices, options.lr);
    if (spoil) spoil(training, ls);
    std::string said;
    const std::string out = printed([&] {
        said = error_of([&] { check_first_step(X, y, ls, training.device_params, options.lr); });
    });
    CHECK((said != "") == (out == ""));
    return {said, out};
}

TEST_CASE("check_first_step: a right step passes, for each seed and device count" * trains) {
    ModelKept kept;
    for (int k : {1, 2, 5})
        for (int n : {1, 7}) {
            if (small_only && k != 2) continue;
            INFO("k ", k, ", n ", n);
            set_model("lenet", k); // k is the seed too
            CHECK(first_step(k, n).first == "");
        }
    for (const std::string &name : right_algorithms) {
        if (small_only && name != "ring") continue;
        exchange = exchange_by(name, true);
        CHECK(first_step(3, 4).first == "");
    }
    options.split = {3, 1};
    for (float lr : {1e-6f, 50.0f}) {
        options.lr = lr;
        CHECK(first_step(2, 7).first == "");
    }
    // Equal weights: equal logits, large ones, and gradients that are 0, perhaps but for rounding
    for (float c : {0.1f, 1.0f, 10.0f, 0.0f}) {
        CAPTURE(c);
        for (int i : {0, 2, 4, 6}) params[i] = full(params[i].shape, c, cpu());
        CHECK(first_step(2, 16).first == "");
    }
}

TEST_CASE("check_first_step: each kind of mistake is named, with both numbers" * slow) {
    ModelKept kept;
    set_model("lenet", 0);
    const int k = 2, n = 6;
    const auto [X, y] = minibatch(n, 3);
    const Floats shards[] = {gradient_on_one(rows(X, 0, 3), rows(y, 0, 3)),
                             gradient_on_one(rows(X, 3, 6), rows(y, 3, 6))};
    // Device 1's gradient becomes `own` times its shard's and `other` times the other's, its update
    // `update` times the right one; and device 0's, if `both`
    const struct {
        double own, other, update = 1;
    } steps[] = {{.5, .5},    {2, 2},     {2, 1},     {-1, -1},      {1, 0},    {0, 1},
                 {0, 0},      {1.005, 1}, {NAN, 1},   {1, 1, n},     {1, 1, k}, {1, 1, 1.0 / n},
                 {1, 1, 0.2}, {1, 1, 0},  {1, 1, -1}, {1, 1, 0.999}, {1, 1}};
    for (bool both : {true, false})
        for (const auto &s : steps) {
            INFO(s.own, " ", s.other, " ", s.update, " ", both);
            const auto [said, _] = first_step(k, n, [&](Training &t, Tensors &) {
                for (int c = both ? 0 : 1; c < k; c++)
                    for (size_t i = 0, at = 0; i < params.size(); i++) {
                        Floats gradient, moved = to_host(params[i]);
                        for (float &x : moved) {
                            gradient.push_back(s.own * shards[c][at] + s.other * shards[1 - c][at]);
                            x -= s.update * options.lr * gradient.back() / n, at++;
                        }
                        copyto(on_host(gradient, params[i].shape), *t.device_params[c][i].grad);
                        copyto(on_host(moved, params[i].shape), t.device_params[c][i]);
                    }
            });
            std::string says = format("the first minibatch: the %s of W ... on gpu(%d) is ... , "
                                      "not ... : `make check` looks",
                                      s.update == 1 ? "gradient" : "update", !both);
            if (s.own == 1 && s.other == 1 && s.update == 1) says = ""; // nothing is wrong
            check_says(said, says);
        }
    auto one = [](Training &t, Tensors &) { fill(rows(*t.device_params[1][7].grad, 2, 3), 7); };
    check_says(first_step(k, n, one).first, "the gradient of b4[2] on gpu(1) is 7, not ");
    auto fewer = [](Training &, Tensors &ls) { ls.pop_back(); };
    check_says(first_step(k, n, fewer).first,
               "has 6 samples, but the devices' shards have 3 in total: `make");
    CHECK(contains(first_step(3, n).second,
                   "first minibatch: 3 devices give the gradient of one (largest diff"));
    CHECK(first_step(1, n).second == "first minibatch: the update is right\n");
    options.first_check = false;
    CHECK(printed([&] { check_first_step({}, {}, {}, {}, 0); }) == "");
}

TEST_CASE("check_replicas: one changed number is named") {
    ModelKept kept;
    set_model("lenet", 0);
    params[0].requires_grad = false; // a running statistic may differ
    const auto device_params = Training(3, params).device_params;
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

TEST_CASE("parse_options: the tutorial's values where none are given") {
    const std::pair<const char *, const char *> cases[] = {
        {"", "1 256 10 0.2 lenet naive"},
        {"MODEL=lenet GPUS=2", "2 256 10 0.2 lenet naive"},
        {"BATCH=7 LR=1 EPOCHS=2", "1 7 2 1 lenet naive"},
        {"GPUS=64", "64 256 10 0.2 lenet naive"}};
    for (const auto &[line, want] : cases) {
        const Parsed p = parsed(line);
        const Options &o = p.options;
        CHECK(p.error == "");
        CHECK(p.run);
        CHECK(format("%d %d %d %g %s %s", o.gpus, o.batch, o.epochs, o.lr, o.model.c_str(),
                     o.allreduce.c_str()) == want);
    }
    const Options o = parsed("").options;
    CHECK((o.steps == 0 && o.limit == 0 && o.seed == 0 && o.split.empty() && o.shuffle));
    CHECK((o.first_check && o.replica_check && !o.overlap && o.peers && o.init + o.save == ""));
    CHECK((o.data == "data" && o.log == "build/log.csv"));
}

TEST_CASE("parse_options: every option sets what it names; help names all, and defaults") {
    Parsed p =
        parsed("GPUS=3 BATCH=64 LR=1e-3 EPOCHS=7 STEPS=5 LIMIT=9 SEED=12 SPLIT=3,1,12 DATA=d "
               "INIT=i SAVE=s LOG=l=1.csv SHUFFLE=0 OVERLAP=1 PEERS=0");
    const Options &o = p.options;
    CHECK((o.gpus == 3 && o.batch == 64 && o.lr == 1e-3f && o.epochs == 7 && o.steps == 5));
    CHECK((o.limit == 9 && o.seed == 12 && o.split == Ints{3, 1, 12} && !o.shuffle && o.overlap));
    CHECK((o.data == "d" && o.init == "i" && o.save == "s" && o.log == "l=1.csv" && !o.peers));
    CHECK((o.first_check && given("SEED") && !given("MODEL")));
    const Options unchecked = parsed("REPLICA_CHECK=0").options;
    CHECK((!unchecked.replica_check && !unchecked.first_check && !given("SEED")));
    CHECK(!parsed("FIRST_CHECK=0").options.first_check);
    CHECK(parsed("SHUFFLE=1 FIRST_CHECK=1").options.shuffle);
    for (const char *zero : {"STEPS=0", "LIMIT=0", "SEED=0"}) CHECK(parsed(zero).error == "");
    for (const Algorithm &a : algorithms)
        CHECK(parsed(std::string("ALLREDUCE=") + a.name).options.allreduce == a.name);
    for (const char *line : {"help", "GPUS=2 help", "--help", "-h"}) {
        const std::string help = printed([&] { p = parsed(line); });
        CHECK(p.error == "");
        CHECK(!p.run);
        for (const Option &option : option_table)
            CHECK(contains(help, "\n  " + std::string(option.name) + " "));
        for (const char *text : {"(1)", "(256)", "(0.2)", "(10)", "(0)", "(lenet)", "(naive)",
                                 "(data)", "(build/log.csv)"})
            CHECK(contains(help, text));
        std::istringstream lines(help);
        for (std::string line; std::getline(lines, line);) CHECK(line.size() <= 100);
    }
}

TEST_CASE("parse_options: a wrong value is refused, and what is wanted is said") {
    for (std::string option : {"GPUS", "BATCH", "EPOCHS", "STEPS", "LIMIT", "SEED"})
        for (std::string value : {"-1", "99999999999", "1e30", "abc", "1.5", "2x", "nan", "-0.5"})
            check_says(parsed(option + "=" + value).error,
                       option + "=" + value + ": expected a whole number from ");
    for (std::string option : {"GPUS", "BATCH", "EPOCHS"})
        check_says(parsed(option + "=0").error, option + "=0: expected a whole number from 1 to ");
    for (std::string option : {"OVERLAP", "SHUFFLE", "FIRST_CHECK", "REPLICA_CHECK", "PEERS"})
        for (std::string value : {"2", "yes", "01", "-1"})
            CHECK(parsed(option + "=" + value).error == option + "=" + value + ": expected 0 or 1");
    for (std::string v :
         {"nan", "inf", "-inf", "0", "-1", "-0.0", "1e999", "1e-999", "0.1x", "0,2"})
        check_says(parsed("LR=" + v).error, "LR=" + v + ": expected a number from 1e-30 to 1e+30");
    for (std::string s : {",1", "a", "3;1", "0,1", "3,-1", "1001,1", "1,,2", "9999999999,1"})
        check_says(parsed("GPUS=2 SPLIT=" + s).error,
                   "SPLIT=" + s + ": expected whole numbers from 1 to 1000");
    const std::pair<const char *, const char *> cases[] = {
        {"GPUS=65", "GPUS=65: expected a whole number from 1 to 64"},
        {"BATCH=60001", "BATCH=60001: expected a whole number from 1 to 60000"},
        {"GPUS=2 BATCH=1", "batch 1 cannot be split over 2 devices: use BATCH >= 2"},
        {"MODEL=vgg", "MODEL=vgg is unknown: choose one of lenet"},
        {"SPLIT=3,1", "SPLIT has 2 parts, but there are 1 devices: use GPUS=2"},
        {"ALLREDUCE=magic", "ALLREDUCE=magic is unknown: choose one of naive, bucket, ... yours"},
        {"MODEL=two\nlines", "MODEL=two"}};
    for (const auto &[line, says] : cases) check_says(parsed(line).error, says);
    CHECK(parsed("").error == ""); // nothing is left of what went wrong
}

TEST_CASE("parse_options: a word that is no option is refused, with the one that was meant") {
    const std::pair<const char *, const char *> cases[] = {
        {"GPUS", "GPUS has no value: write GPUS=value"},
        {"GPUS=", "GPUS has no value: write GPUS=value"},
        {"GPUS 2", "GPUS has no value: write GPUS=value"},
        {"LOG= SEED=1", "LOG has no value: write LOG=value"},
        {"GPUS=2 GPUS=3", "GPUS is given twice"},
        {"GPUS=2 GPUS=2", "GPUS is given twice"},
        {"GPU=2", "GPU=2 is not an option: did you mean GPUS=2?"},
        {"gpus=2", "gpus=2 is not an option: did you mean GPUS=2?"},
        {"GUPS=2", "GUPS=2 is not an option: did you mean GPUS=2?"},
        {"Batch=8", "Batch=8 is not an option: did you mean BATCH=8?"},
        {"EPOCH=3", "EPOCH=3 is not an option: did you mean EPOCHS=3?"},
        {"ALREDUCE=naive", "ALREDUCE=naive is not an option: did you mean ALLREDUCE=naive?"},
        {"lr=0.1", "lr=0.1 is not an option: did you mean LR=0.1?"},
        {"BATCH_SIZE=64", "BATCH_SIZE=64 is not an option: did you mean BATCH=64?"},
        {"NUM_GPUS=2", "NUM_GPUS=2 is not an option: did you mean GPUS=2?"},
        // As earlier versions and other programs have them
        {"--gpus 2", "--gpus is not an option: did you mean GPUS=value?"},
        {"--gpus=2", "--gpus=2 is not an option: did you mean GPUS=2?"},
        {"--batch-size 64", "--batch-size is not an option: did you mean BATCH=value?"},
        {"--no-shuffle", "--no-shuffle is not an option: did you mean SHUFFLE=value?"},
        {"--first-check=0 LR=1", "--first-check=0 is not an option: did you mean FIRST_CHECK=0?"},
        {"--overlap", "--overlap is not an option: did you mean OVERLAP=value?"},
        {"-g 2", "-g is not an option: options have the form NAME=value, see `make help`"},
        {"GPUS=2 more",
         "more is not an option: options have the form NAME=value, see `make help`"},
        {"NCCL_DEBUG=INFO",
         "NCCL_DEBUG=INFO is not an option: options have the form NAME=value"},
        {"=2", "=2 is not an option: options have the form NAME=value, see `make help`"},
        {"-", "- is not an option: options have the form NAME=value, see `make help`"},
        {"COLOUR=red",
         "COLOUR=red is not an option: options have the form NAME=value, see `make help`"}};
    for (const auto &[line, says] : cases) check_says(parsed(line).error, says);
}

// What a training prints: unless told otherwise, a step on two devices.
static std::string train_in(const TestFolder &folder, const std::string &arguments,
                            const std::string &environment = "") {
    return output_of(folder, "GPUS=2 BATCH=8 EPOCHS=1 STEPS=1 LOG=log.csv " + arguments,
                     environment);
}
// The numbers in a file that SAVE has written.
static std::string saved(const TestFolder &folder, const std::string &name) {
    const std::string bytes = read_text(folder.file(name));
    REQUIRE(bytes.size() > 4 * 129068);
    return bytes.substr(bytes.size() - 4 * 129068);
}
const int few = small_only ? 8 : 16; // training images

TEST_CASE("program: the demos, a table of the epochs, the tutorial's last line, the log" * trains) {
    DataFolder folder(few, few / 4);
    const std::string zeros =
        "[0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0. 0.] @gpu(0)\n";
    const std::string demos =
        "b1 weight: " + zeros + "b1 grad: " + zeros +
        "before allreduce:\n [[1. 1.]] @gpu(0)\n [[2. 2.]] @gpu(1)\n [[3. 3.]] @gpu(2)\n"
        "after allreduce:\n [[6. 6.]] @gpu(0)\n [[6. 6.]] @gpu(1)\n [[6. 6.]] @gpu(2)\n"
        "input :\n [[ 0.  1.  2.  3.  4.]\n [ 5.  6.  7.  8.  9.]\n [10. 11. 12. 13. 14.]\n"
        " [15. 16. 17. 18. 19.]]\nload into [gpu(0), gpu(1), gpu(2)]\noutput:\n"
        " [[0. 1. 2. 3. 4.]\n [5. 6. 7. 8. 9.]] @gpu(0)\n [[10. 11. 12. 13. 14.]] @gpu(1)\n"
        " [[15. 16. 17. 18. 19.]] @gpu(2)\nfirst minibatch: 3 devices give the gradient of one ";
    const std::string out = train_in(folder, "STEPS=100 EPOCHS=2 GPUS=3");
    CHECK((out.find_first_of("\r\033") == std::string::npos && contains(out, "\n" + demos)));
    // The table and the log hold the same numbers, in these formats to the letter
    double row[6], logged[6], acc, rate; // loss, accuracy and seconds of both epochs
    const std::string end = out.substr(out.find("epoch ")), log = read_text(folder.file("log.csv"));
    REQUIRE(sscanf(end.c_str(), "%*[^\n] 1%lf%lf%lf 2%lf%lf%lf test acc:%lf,%lf", row, row + 1,
                   row + 2, row + 3, row + 4, row + 5, &acc, &rate) == 8);
    CHECK(end == format("epoch      loss  test acc   seconds\n    1  %8.4f  %8.4f  %8.2f\n"
                        "    2  %8.4f  %8.4f  %8.2f\ntest acc: %.2f, %.1f sec/epoch on "
                        "[gpu(0), gpu(1), gpu(2)]\n",
                        row[0], row[1], row[2], row[3], row[4], row[5], acc, rate));
    CHECK(std::fabs(acc - row[4]) < 0.0051); // both of the last epoch
    REQUIRE(sscanf(log.c_str(), "%*s 1,%lf,%lf,%lf,%*s 2,%lf,%lf,%lf,", logged, logged + 1,
                   logged + 2, logged + 3, logged + 4, logged + 5) == 6);
    for (int i = 0; i < 6; i++) CHECK(std::fabs(logged[i] - row[i]) <= (i % 3 < 2 ? 1e-4 : 0.01));
}

TEST_CASE("program: help; what cannot be printed is an error") {
    TestFolder folder;
    CHECK(output_of(folder, "help") == printed([] { parsed("help"); }));
    CHECK(folder.listing().empty());
    fails(folder, "help > /dev/full", "cannot write to stdout");
}

TEST_CASE("program: the same seed gives the same bits, and another one others" * trains) {
    DataFolder folder(few, few / 4);
    for (const char *more : {"a", "b SEED=0", "c SEED=1", "d SHUFFLE=0"})
        train_in(folder, format("BATCH=%d STEPS=%d EPOCHS=2 SAVE=%s", few / 2 - 1,
                                small_only ? 4 : 6, more));
    const std::string a = saved(folder, "a");
    CHECK((a == saved(folder, "b") && a != saved(folder, "c") && a != saved(folder, "d")));
}

TEST_CASE("program: each ALLREDUCE trains, OVERLAP, staged and devices that share one" * trains) {
    DataFolder folder(few, few / 4);
    const std::string training = "GPUS=2 BATCH=4 LIMIT=8 STEPS=2 SAVE=";
    train_in(folder, training + "naive");
    const std::string want = saved(folder, "naive");
    auto check_same = [&](const std::string &more, const std::string &prints,
                          const std::string &environment = "") {
        CAPTURE(more);
        const std::string out = train_in(folder, training + "other" + more, environment);
        CHECK((contains(out, prints) && saved(folder, "other") == want));
    };
    check_same(" ALLREDUCE=ring OVERLAP=1", " [[3. 3.]] @gpu(1)\n");
#ifdef CUDA_CPU
    check_same("", "; staged: gpu(1)\n", "export CUDA_CPU_PEERS=0;");
    check_same("", "; same GPU as: gpu(1)\n", "CUDA_CPU_DEVICES=1");
    check_same("", "notice: 2 logical devices share 1 GPU, each with its own memory and streams\n",
               "CUDA_CPU_DEVICES=1");
#endif
    if (small_only) return;
    for (const char *more : {"ring", "host", "by_tensor", "naive OVERLAP=1"})
        check_same(std::string(" ALLREDUCE=") + more, " [[3. 3.]] @gpu(1)\n");
}

TEST_CASE("program: SAVE, then INIT, reach the bits of one longer training" * trains) {
    DataFolder folder(few, few / 4);
    const std::string half = "SHUFFLE=0 BATCH=" + std::to_string(few / 2); // of an epoch
    train_in(folder, half + " STEPS=2 SAVE=first");
    train_in(folder, half + " STEPS=2 INIT=first SAVE=second SEED=9");
    train_in(folder, half + " STEPS=4 EPOCHS=9 SAVE=both");
    CHECK((saved(folder, "second") == saved(folder, "both")));
    CHECK((saved(folder, "second") != saved(folder, "first")));
}

// The mistake of the chapter's older PyTorch text: data[c] = ... puts the sum into the list alone.
static void allreduce_rebind(const PerDevice &grads) {
    for (size_t i = 0; i < grads[0].size(); i++) {
        std::vector<Tensor> data = column(grads, i);
        for (size_t c = 1; c < data.size(); c++) add_(data[0], copyto(data[c], data[0].device));
        for (size_t c = 1; c < data.size(); c++) data[c] = copyto(data[0], data[c].device);
    }
}
TEST_CASE("program: a wrong allreduce is caught by the first step, by the replicas" * trains) {
    DataFolder folder(few, few / 4);
    const std::string rebind = "GPUS=2 BATCH=8 EPOCHS=1 LOG=log.csv ALLREDUCE=rebind ";
    const std::string caught = fails(folder, rebind,
                                     "the first minibatch: the gradient of W1[0] on gpu(1) is ... "
                                     "`make check` looks for the cause");
    const std::string later = fails(folder, rebind + "FIRST_CHECK=0", "the replicas differ: W1[");
    CHECK(!contains(caught, "test acc:"));
    CHECK(!contains(later, "test acc:"));
    CHECK(contains(train_in(folder, "ALLREDUCE=rebind REPLICA_CHECK=0"), "test acc:"));
}

// One mistake for each function that finds them; which ones it finds is tested with the function.
TEST_CASE("program: a mistake gives one line, status 1 and leaves nothing behind") {
    DataFolder folder(8, 4);
    write_text(folder.file("garbage"), "this is no file of parameters");
    std::filesystem::copy(folder.file("data"), folder.file("short"));
    write_text(folder.file("short") + train_images, idx_images(8).substr(0, 1000));
    auto check_mistake = [&](const std::string &arguments, const std::string &says,
                             const std::string &environment = "") {
        const std::set<std::string> before = folder.listing();
        fails(folder, "LOG=log.csv SAVE=s " + arguments, "... " + says, environment);
        std::filesystem::remove(folder.file("log.csv"));
        CHECK(folder.listing() == before);
    };
    check_mistake("GPUS=0", "GPUS=0: expected a whole number from 1 to 64");
    check_mistake("BATCH=1 GPUS=2", "batch 1 cannot be split over 2 devices: use BATCH >= 2");
    check_mistake("COLOUR=red", "COLOUR=red is not an option: options have the form NAME=value");
    check_mistake("DATA=missing", "missing" + train_images + ": No such file");
    check_mistake("DATA=short", "short" + train_images + " is damaged: 8 images take");
    check_mistake("SAVE=/proc/none/s", "cannot write /proc/none/s.");
    check_mistake("SAVE=data", "SAVE=data is a folder, not a file");
    check_mistake("LOG=data", "cannot write data: Is a directory");
    check_mistake("INIT=gone", "gone: No such file");
    check_mistake("INIT=garbage", "garbage is not a .safetensors file");
    if (!no_training) // the first step makes the parameters huge, the second their loss
        check_mistake("BATCH=4 LR=1e30 FIRST_CHECK=0", "in step 2 of epoch 1: use a smaller LR");
#ifdef CUDA_CPU
    check_mistake("GPUS=2", "is out of memory: ", "CUDA_CPU_MEMORY=1");
    if (small_only) return;
    write_data(folder.file("data"), 2000, 4);
    check_mistake("BATCH=2000 GPUS=2", "of its 8.4 MB are free: use a smaller BATCH",
                  "CUDA_CPU_MEMORY=8");
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
