// Tests of mgpu.cu, against plain loops in double and against what the tutorial promises.
//
//     make test                       all of them
//     make test T='-tc=allreduce*'    those of one function: a test's name starts with what it tests
//     make asan, make race            the same under AddressSanitizer and ThreadSanitizer
//
// The sections follow mgpu.cu's; the last two test the program as a whole and the CPU stand-in.

#define MGPU_NO_MAIN
#include "mgpu.cu"

#define DOCTEST_CONFIG_IMPLEMENT
#include "doctest.h"

// Under a sanitizer, which is up to 300 times slower, the larger cases are made smaller.
#if defined(CUDA_CPU_TSAN) || defined(CUDA_CPU_ASAN)
constexpr bool small_only = true;
#else
constexpr bool small_only = false;
#endif

// ---------------------------------------------------------------------------------------------
// What the tests share

typedef std::vector<float> Floats;
typedef std::vector<double> Doubles;

// Passes only if max|got - want| <= rel * max|want|; NaN fails. Prints the worst element.
template <class T> static void check_close(const Floats &got, const std::vector<T> &want, double rel) {
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

// The text of the Error that `call` throws, or "" if it throws none.
static std::string error_of(const std::function<void()> &call) {
    try {
        call();
    } catch (const Error &e) {
        return e.what();
    }
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

static Tensor on_host(const Floats &numbers, std::vector<int> shape) {
    Tensor t = empty(std::move(shape), cpu());
    REQUIRE((size_t)size(t) == numbers.size());
    std::copy(numbers.begin(), numbers.end(), t.data.get());
    return t;
}
static Tensor on_device(const Floats &numbers, std::vector<int> shape, Device device = gpu(0)) {
    return copyto(on_host(numbers, std::move(shape)), device);
}

constexpr int most_devices = 8; // the logical devices that the tests use: gpu(0) ... gpu(7)

// The error of `call` must have all of these words in it.
static void check_error(const std::function<void()> &call, const std::vector<std::string> &words) {
    const std::string text = error_of(call);
    CAPTURE(text);
    for (const std::string &word : words) {
        CAPTURE(word);
        CHECK(text.find(word) != std::string::npos);
    }
}

static bool same_bits(const Floats &a, const Floats &b) {
    return a.size() == b.size() && (a.empty() || !memcmp(&a[0], &b[0], a.size() * sizeof(float)));
}

// A sum of n floats is off by about sqrt(n) * 2^-24 of its size, in whatever order it is added: 16 times
// that, for the largest error of many sums, and for a last sum that happens to be small.
static double rounding(int n) { return 1e-6 * std::sqrt(std::max(n, 1)); }

// The references that make up a network; they stand above the tests of section 7.
typedef std::vector<Doubles> Arrays;
struct ConvSizes {
    int N, C, H, W, O, K;
};
struct PoolSizes {
    int N, C, H, W, K, S;
};
struct LinearSizes {
    int N, C, O;
};
static Doubles conv2d_reference(const Doubles &X, const Doubles &W, const Doubles &b, const ConvSizes &s);
static Arrays conv2d_gradients(const Doubles &X, const Doubles &W, const Doubles &dy, const ConvSizes &s);
static Doubles linear_reference(const Doubles &X, const Doubles &W, const Doubles &b, const LinearSizes &s);
static Arrays linear_gradients(const Doubles &X, const Doubles &W, const Doubles &dy, const LinearSizes &s);
static Doubles avg_pool2d_reference(const Doubles &X, const PoolSizes &s);
static Doubles avg_pool2d_gradient(const Doubles &dy, const PoolSizes &s);
static Doubles relu_reference(Doubles X);
static Doubles relu_gradient(const Doubles &X, Doubles dy);
static Doubles cross_entropy_reference(const Doubles &y_hat, const Doubles &y);
static Doubles cross_entropy_gradient(const Doubles &y_hat, const Doubles &y, const Doubles &dl);

// ---------------------------------------------------------------------------------------------
// 2. A toy network

TEST_CASE("init_params: shapes, zero biases, weights of standard deviation 0.01") {
    init_params();
    const std::vector<std::vector<int>> shapes = {{20, 1, 3, 3}, {20},  {50, 20, 5, 5}, {50},
                                                  {800, 128},    {128}, {128, 10},      {10}};
    REQUIRE(params.size() == shapes.size());
    int numbers = 0;
    for (size_t i = 0; i < shapes.size(); i++) {
        CAPTURE(param_names[i]);
        CHECK(params[i].shape == shapes[i]);
        double squares = 0;
        for (float p : to_host(params[i])) squares += p * p;
        const double deviation = std::sqrt(squares / size(params[i]));
        if (i % 2 == 1)
            CHECK(deviation == 0);
        else // the deviation of n numbers is known to 1/sqrt(2n): 5% for W1's 180
            CHECK(std::fabs(deviation - 0.01) < 0.0025);
        numbers += size(params[i]);
    }
    CHECK(numbers == 129068);
}

// LeNet in double: the references of section 7, in the order of lenet().
struct LenetReference {
    Doubles y_hat, l;
    Arrays gradients; // of sum(l), for W1 b1 ... W4 b4
};
static LenetReference lenet_reference(const Doubles &X, const Doubles &y, const Arrays &p) {
    const int N = y.size();
    const ConvSizes conv1 = {N, 1, 28, 28, 20, 3}, conv2 = {N, 20, 13, 13, 50, 5};
    const PoolSizes pool1 = {N, 20, 26, 26, 2, 2}, pool2 = {N, 50, 9, 9, 2, 2};
    const LinearSizes linear3 = {N, 800, 128}, linear4 = {N, 128, 10};
    LenetReference r;
    const Doubles h1_conv = conv2d_reference(X, p[0], p[1], conv1);
    const Doubles h1 = avg_pool2d_reference(relu_reference(h1_conv), pool1);
    const Doubles h2_conv = conv2d_reference(h1, p[2], p[3], conv2);
    const Doubles h2 = avg_pool2d_reference(relu_reference(h2_conv), pool2);
    const Doubles h3_linear = linear_reference(h2, p[4], p[5], linear3);
    const Doubles h3 = relu_reference(h3_linear);
    r.y_hat = linear_reference(h3, p[6], p[7], linear4);
    r.l = cross_entropy_reference(r.y_hat, y);

    const Doubles dy_hat = cross_entropy_gradient(r.y_hat, y, Doubles(N, 1));
    const Arrays d4 = linear_gradients(h3, p[6], dy_hat, linear4);
    const Arrays d3 = linear_gradients(h2, p[4], relu_gradient(h3_linear, d4[0]), linear3);
    const Doubles dh2 = relu_gradient(h2_conv, avg_pool2d_gradient(d3[0], pool2));
    const Arrays d2 = conv2d_gradients(h1, p[2], dh2, conv2);
    const Doubles dh1 = relu_gradient(h1_conv, avg_pool2d_gradient(d2[0], pool1));
    const Arrays d1 = conv2d_gradients(X, p[0], dh1, conv1);
    r.gradients = {d1[1], d1[2], d2[1], d2[2], d3[1], d3[2], d4[1], d4[2]};
    return r;
}

// LeNet's parameters with numbers from N(0, 0.1^2), biases too. With those of init_params all logits are
// nearly 0 and no bias matters: much could be wrong unseen.
static std::vector<Tensor> lively_params() {
    init_params();
    std::vector<Tensor> lively;
    for (const Tensor &p : params)
        lively.push_back(on_host(random_floats(size(p), 10 + lively.size(), 0.1f), p.shape));
    return lively;
}

// The same with biases of +-1, which keep the inputs of ReLUs away from 0: half of the channels are always
// on, the others off. Where an input lies within rounding of 0, two trainings can take different sides; its
// gradient then differs by all of it, and they part ways though neither is wrong.
static std::vector<Tensor> steady_params() {
    const float scales[8] = {0.1f, 1, 0.03f, 1, 0.03f, 1, 0.1f, 1};
    std::vector<Tensor> steady = lively_params();
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < size(steady[i]); j++) {
            float &p = steady[i].data.get()[j];
            p = i % 2 ? std::copysign(scales[i], p) : p / 0.1f * scales[i];
        }
    return steady;
}

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

static Doubles doubles(const Tensor &t) {
    const Floats numbers = to_host(t);
    return Doubles(numbers.begin(), numbers.end());
}

TEST_CASE("lenet: outputs, losses and the gradients of all parameters") {
    const auto [X, y] = minibatch(small_only ? 1 : 5, 2);
    const std::vector<Tensor> host_params = lively_params(), p = get_params(host_params, gpu(0));
    Arrays exact;
    for (const Tensor &t : host_params) exact.push_back(doubles(t));
    const LenetReference want = lenet_reference(doubles(X), doubles(y), exact);

    Tensor y_hat = lenet(copyto(X, gpu(0)), p), l = loss(y_hat, copyto(y, gpu(0)));
    backward(l);
    CHECK(y_hat.shape == std::vector<int>{X.shape[0], 10});
    // The longest sums have 800 terms, and their errors pass through three layers more.
    check_close(to_host(y_hat), want.y_hat, 3e-6);
    check_close(to_host(l), want.l, 3e-6);
    // Errors of the forward pass and of the layers behind; most terms, 26*26 a sample, have W1 and b1.
    const double rel[8] = {1e-5, 1e-5, 1e-5, 1e-5, 5e-6, 5e-6, 5e-6, 5e-6};
    for (int i = 0; i < 8; i++) {
        CAPTURE(param_names[i]);
        check_close(to_host(*p[i].grad), want.gradients[i], rel[i]);
    }
}

// ---------------------------------------------------------------------------------------------
// 3. Data synchronization

TEST_CASE("copyto: between the host and devices, any two of them") {
    const Floats numbers = random_floats(1001, 1);
    const Tensor start = on_host(numbers, {7, 143});
    const std::vector<Device> places = {cpu(), gpu(0), gpu(1), gpu(most_devices - 1)};
    for (Device from : places)
        for (Device to : places) {
            CAPTURE(str(from));
            CAPTURE(str(to));
            Tensor src = copyto(start, from), dst = copyto(src, to);
            CHECK(dst.device.id == to.id);
            CHECK(dst.shape == start.shape);
            CHECK(dst.data != src.data);
            CHECK(to_host(dst) == numbers);
            Tensor other = full({1001}, 0, to); // only the count must fit
            copyto(src, other);
            CHECK(to_host(other) == numbers);
            CHECK(to_host(copyto(empty({0, 3}, from), to)).empty());
            check_error([&] { copyto(src, empty({1000}, to)); }, {"copyto", "1001", "1000"});
        }
}

TEST_CASE("copyto: the devices wait for each other, not the host") {
    // Work queued on the source after the copy must not reach the copy, and work queued on the target
    // after it must see it. The numbers are many, so that the other device would win a race.
    const int n = small_only ? 10000 : 1000000;
    Tensor a = full({n}, 1, gpu(0)), b = full({n}, 0, gpu(1)), ones = full({n}, 1, gpu(1));
    for (int i = 0; i < 10; i++) {
        copyto(a, b);   // b = 2^i
        add_(a, a);     // a = 2^(i+1)
        add_(b, ones);  // b = 2^i + 1
    }
    CHECK(to_host(b) == Floats(n, 513));
    CHECK(to_host(a) == Floats(n, 1024));
}

TEST_CASE("get_params: independent copies with gradients of zero") {
    const std::vector<Tensor> originals = {on_host({1, 2, 3, 4, 5, 6}, {2, 3}), on_host({7}, {1})};
    std::vector<Tensor> a = get_params(originals, gpu(0)), b = get_params(originals, gpu(1));
    waitall(); // before the host writes what is copied
    originals[0].data.get()[0] = 100;
    add_(a[1], full({1}, 1, gpu(0)));
    REQUIRE(a.size() == 2);
    CHECK(to_host(a[0]) == Floats{1, 2, 3, 4, 5, 6});
    CHECK(to_host(b[0]) == Floats{1, 2, 3, 4, 5, 6});
    CHECK(to_host(a[1]) == Floats{8});
    CHECK(to_host(b[1]) == Floats{7});
    CHECK(originals[1].data.get()[0] == 7);
    CHECK_FALSE(originals[0].grad);
    for (const Tensor &p : b) {
        CHECK(p.device.id == 1);
        REQUIRE(p.grad);
        CHECK(p.grad->device.id == 1);
        CHECK(p.grad->shape == p.shape);
        CHECK(to_host(*p.grad) == Floats(size(p), 0));
    }
}

TEST_CASE("allreduce: every device holds the sum of all") {
    for (int k = 1; k <= most_devices; k++)
        for (int n : {0, 1, k - 1, k, k + 1, 1000, small_only ? 1001 : 1000003}) {
            // Whole numbers, other ones on each device and in each place, and sums below 2^24: exact
            // in any order. `data` stays as it is: the sums must lie in the tensors it holds.
            std::vector<Tensor> data;
            for (int c = 0; c < k; c++) {
                Floats numbers(n);
                for (int i = 0; i < n; i++) numbers[i] = i + 1000 * c * c;
                data.push_back(on_device(numbers, {n}, gpu(c)));
            }
            std::vector<Tensor> handles = data;
            allreduce(handles);
            const int squares = (k - 1) * k * (2 * k - 1) / 6;
            for (int c = 0; c < k; c++) {
                const Floats got = to_host(data[c]);
                int right = 0;
                while (right < n && got[right] == (float)k * right + 1000 * squares) right++;
                CAPTURE(k);
                CAPTURE(c);
                CHECK(right == n); // else the index of the first wrong one
            }
        }
}

// ---------------------------------------------------------------------------------------------
// 4. Distributing data

TEST_CASE("split_batch: contiguous shards in order, as equal as can be") {
    const std::vector<std::pair<int, std::vector<int>>> splits = {
        {6, {2, 2, 2}}, {7, {3, 2, 2}}, {8, {3, 3, 2}}, {5, {5}},   {0, {0, 0}},
        {1, {1, 0}},    {2, {1, 1, 0, 0, 0}},           {96, {32, 32, 32}}, {9, {2, 1, 1, 1, 1, 1, 1, 1}}};
    for (const auto &[n, sizes] : splits) {
        CAPTURE(n);
        std::vector<Device> devices;
        for (size_t c = 0; c < sizes.size(); c++) devices.push_back(gpu(c));
        const Tensor X = reshape(arange(n * 6), {n, 1, 2, 3}), y = arange(n);
        auto [X_shards, y_shards] = split_batch(X, y, devices);
        REQUIRE(X_shards.size() == sizes.size());
        REQUIRE(y_shards.size() == sizes.size());
        Floats X_joined, y_joined;
        for (size_t c = 0; c < sizes.size(); c++) {
            CAPTURE(c);
            CHECK(X_shards[c].device.id == (int)c);
            CHECK(y_shards[c].device.id == (int)c);
            CHECK(X_shards[c].shape == std::vector<int>{sizes[c], 1, 2, 3});
            CHECK(y_shards[c].shape == std::vector<int>{sizes[c]});
            for (float x : to_host(X_shards[c])) X_joined.push_back(x);
            for (float label : to_host(y_shards[c])) y_joined.push_back(label);
        }
        CHECK(X_joined == to_host(X));
        CHECK(y_joined == to_host(y));
    }
    check_error([] { split_batch(full({3, 2}, 0, cpu()), arange(4), {gpu(0)}); },
                {"split_batch", "3 samples", "4 labels"});
}

// ---------------------------------------------------------------------------------------------
// 5. Training

// Training on devices gpu(0) ... gpu(k-1), step by step.
struct Training {
    std::vector<Device> devices;
    std::vector<std::vector<Tensor>> device_params;

    Training(int k, const std::vector<Tensor> &start) {
        for (int c = 0; c < k; c++) devices.push_back(gpu(c));
        for (Device d : devices) device_params.push_back(get_params(start, d));
    }
    // Returns the losses of all samples, in their order.
    Floats step(const std::pair<Tensor, Tensor> &batch, float lr = 0.02f) {
        Floats losses;
        for (const Tensor &l : train_batch(batch.first, batch.second, device_params, devices, lr))
            for (float x : to_host(l)) losses.push_back(x);
        return losses;
    }
    // All parameters, or all gradients, of device c, one after another.
    Floats numbers(int c, bool gradients = false) const {
        Floats all;
        for (const Tensor &p : device_params[c])
            for (float x : to_host(gradients ? *p.grad : p)) all.push_back(x);
        return all;
    }
    bool replicas_equal() const {
        for (size_t i = 0; i < device_params[0].size(); i++) {
            const Floats first = to_host(device_params[0][i]);
            for (size_t c = 1; c < devices.size(); c++)
                if (!same_bits(first, to_host(device_params[c][i]))) return false;
        }
        return true;
    }
};

TEST_CASE("train: a batch of fewer samples than devices is refused") {
    check_error([] { train(5, 4, 0.1f); }, {"batch 4", "5 devices", "BATCH >= 5"});
}

TEST_CASE("train_batch: the gradients of k devices are those of one, and so is the step") {
    const std::vector<Tensor> start = lively_params();
    const auto batch = minibatch(small_only ? 6 : 13, 3); // 2, 3 and 5 do not divide 13
    Training one(1, start);
    const Floats losses = one.step(batch);
    for (int k : {2, 3, 5}) {
        CAPTURE(k);
        Training many(k, start);
        check_close(many.step(batch), losses, 1e-6); // of the same parameters
        CHECK(many.replicas_equal());
        for (int i = 0; i < 8; i++) { // the same terms, added in another order
            CAPTURE(param_names[i]);
            const Tensor &got = many.device_params[k - 1][i], &want = one.device_params[0][i];
            check_close(to_host(*got.grad), to_host(*want.grad), 5e-6);
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
    // Minibatches of 12 and, in the middle, of one sample: the idle devices must add nothing, least of all
    // the gradients that they still have from the step before.
    const int steps = small_only ? 3 : 100;
    const std::vector<Tensor> start = steady_params();
    Training one(1, start), two(2, start), three(3, start), five(5, start);
    double first = 0, last = 0; // mean losses
    for (int s = 0; s < steps; s++) {
        const auto batch = minibatch(s == steps / 2 ? 1 : small_only ? 6 : 12, 100 + s);
        const Floats losses = one.step(batch);
        for (Training *many : {&two, &three, &five}) {
            CAPTURE(many->devices.size());
            CAPTURE(s);
            // In each step the gradients differ by rounding, below 1e-6 of them, and so the parameters drift
            // apart by no more than that in each: nothing amplifies it while ReLUs stay on their sides.
            check_close(many->step(batch), losses, 1e-6 * (1 + s));
            REQUIRE(many->replicas_equal());
        }
        last = std::accumulate(losses.begin(), losses.end(), 0.0) / losses.size();
        if (s == 0) first = last;
    }
    if (!small_only) CHECK(last < 0.8 * first); // else the comparison says little
}

TEST_CASE("train_batch: the same seed gives the same bits") {
    Floats losses[3], numbers[3];
    for (int run = 0; run < 3; run++) {
        rng.seed(run < 2 ? 7 : 8);
        init_params();
        Training training(3, params);
        for (int s = 0; s < 3; s++)
            for (float l : training.step(minibatch(7, s), 0.5f)) losses[run].push_back(l);
        numbers[run] = training.numbers(2);
    }
    CHECK(same_bits(losses[0], losses[1]));
    CHECK(same_bits(numbers[0], numbers[1]));
    CHECK_FALSE(same_bits(losses[0], losses[2]));
    CHECK_FALSE(same_bits(numbers[0], numbers[2]));
}

// ---------------------------------------------------------------------------------------------
// 7. Kernels and operators

// An input of an operator, that wants a gradient.
struct Input {
    std::vector<int> shape;
    Floats numbers;
};
static Input random_input(std::vector<int> shape, unsigned seed) {
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
static void backward_from(const std::vector<Tensor> &ys, const std::vector<Floats> &dys) {
    Tensor l = output("backward_from", ys, {1});
    record(l, [=] {
        bool accumulate;
        for (size_t i = 0; i < ys.size(); i++) {
            grad_of(ys[i], &accumulate);
            copyto(on_host(dys[i], ys[i].shape), *ys[i].grad);
        }
    });
    backward(l);
}

// An operator's result and gradients against a reference. The operator is used once, and then twice on
// the same inputs: then the gradients are the sum of both uses', and hold nothing of the first time.
// `rel` is for the result, then for the gradient of each input.
static void check_operator(const std::vector<Input> &inputs,
                           const std::function<Tensor(const std::vector<Tensor> &)> &op,
                           const std::function<Doubles(const Arrays &)> &reference,
                           const std::function<Arrays(const Arrays &, const Doubles &dy)> &gradients,
                           const std::vector<double> &rel) {
    std::vector<Tensor> in;
    Arrays exact;
    size_t numbers = 0;
    for (const Input &input : inputs) {
        in.push_back(with_grad(input));
        exact.push_back(Doubles(input.numbers.begin(), input.numbers.end()));
        numbers += input.numbers.size();
    }
    const Doubles y = reference(exact);
    for (int uses = 1; uses <= 2; uses++) {
        CAPTURE(uses);
        std::vector<Tensor> ys;
        std::vector<Floats> dys;
        Doubles dy(y.size());
        for (int use = 0; use < uses; use++) {
            ys.push_back(op(in));
            check_close(to_host(ys[use]), y, rel[0]);
            dys.push_back(random_floats(y.size(), 10 * uses + use));
            for (size_t i = 0; i < y.size(); i++) dy[i] += dys[use][i];
        }
        backward_from(ys, dys);
        const Arrays want = gradients(exact, dy);
        for (size_t i = 0; i < in.size(); i++) {
            CAPTURE(i);
            CHECK(in[i].grad->shape == in[i].shape);
            const Floats got = to_host(*in[i].grad);
            check_close(got, want[i], rel[i + 1]);
            if (numbers > 300) continue;
            // Finite differences of the reference: (f(x+h) - f(x-h)) / 2h is off by h^2 of the third
            // derivative, about 1e-8.
            Arrays moved = exact;
            Doubles quotients;
            for (double &x : moved[i]) {
                const double at = x, h = 1e-4;
                double f[2];
                for (int side = 0; side < 2; side++) {
                    x = side ? at + h : at - h;
                    const Doubles z = reference(moved);
                    f[side] = std::inner_product(z.begin(), z.end(), dy.begin(), 0.0);
                }
                x = at;
                quotients.push_back((f[1] - f[0]) / (2 * h));
            }
            check_close(got, quotients, rel[i + 1] + 1e-6);
        }
    }
}

// --- conv2d and linear ----------------------------------------------------------------------------

// A term of a convolution: y[n,o,i,j] has X[n,c,i+u,j+v] * W[o,c,u,v].   visit(index in y, in X, in W)
template <class Visit> static void conv2d_terms(const ConvSizes &s, Visit visit) {
    const int OH = s.H - s.K + 1, OW = s.W - s.K + 1;
    for (int n = 0; n < s.N; n++)
        for (int o = 0; o < s.O; o++)
            for (int i = 0; i < OH; i++)
                for (int j = 0; j < OW; j++)
                    for (int c = 0; c < s.C; c++)
                        for (int u = 0; u < s.K; u++)
                            for (int v = 0; v < s.K; v++)
                                visit(((n * s.O + o) * OH + i) * OW + j,
                                      ((n * s.C + c) * s.H + i + u) * s.W + j + v,
                                      ((o * s.C + c) * s.K + u) * s.K + v);
}
static Doubles conv2d_reference(const Doubles &X, const Doubles &W, const Doubles &b, const ConvSizes &s) {
    const int plane = (s.H - s.K + 1) * (s.W - s.K + 1);
    Doubles y(s.N * s.O * plane);
    for (size_t i = 0; i < y.size(); i++) y[i] = b[i / plane % s.O];
    conv2d_terms(s, [&](int at_y, int at_X, int at_W) { y[at_y] += X[at_X] * W[at_W]; });
    return y;
}
static Arrays conv2d_gradients(const Doubles &X, const Doubles &W, const Doubles &dy, const ConvSizes &s) {
    const int plane = (s.H - s.K + 1) * (s.W - s.K + 1);
    Doubles dX(X.size()), dW(W.size()), db(s.O);
    conv2d_terms(s, [&](int at_y, int at_X, int at_W) {
        dX[at_X] += dy[at_y] * W[at_W];
        dW[at_W] += dy[at_y] * X[at_X];
    });
    for (size_t i = 0; i < dy.size(); i++) db[i / plane % s.O] += dy[i];
    return {dX, dW, db};
}

TEST_CASE("conv2d: result and gradients") {
    std::vector<ConvSizes> sizes = {
        // N  C   H   W   O  K
        {1, 1, 1, 1, 1, 1},    // the smallest
        {2, 1, 3, 3, 2, 3},    // one output pixel: K = H = W
        {2, 3, 4, 9, 3, 4},    // K = H only, K even
        {1, 3, 5, 7, 4, 3},    // odd, H != W
        {33, 1, 4, 6, 3, 2},   // more images than slices of the weights' gradient
        {2, 16, 6, 5, 17, 2},  // a tile of channels, and one more
        {3, 17, 5, 9, 16, 3},
        {2, 50, 4, 3, 3, 1},   // K = 1
        {1, 2, 7, 7, 50, 7},   // K = 7, weights of more than one block
        {0, 3, 5, 5, 4, 3},    // no images
        {small_only ? 1 : 3, 1, 28, 28, 20, 3}, // LeNet's
        {small_only ? 1 : 3, 20, 13, 13, 50, 5}};
    for (const ConvSizes &s : sizes) {
        INFO("N C H W O K: ", s.N, " ", s.C, " ", s.H, " ", s.W, " ", s.O, " ", s.K);
        const int taps = s.K * s.K, pixels = s.N * (s.H - s.K + 1) * (s.W - s.K + 1);
        check_operator(
            {random_input({s.N, s.C, s.H, s.W}, 1), random_input({s.O, s.C, s.K, s.K}, 2), random_input({s.O}, 3)},
            [](const std::vector<Tensor> &in) { return conv2d(in[0], in[1], in[2]); },
            [=](const Arrays &in) { return conv2d_reference(in[0], in[1], in[2], s); },
            [=](const Arrays &in, const Doubles &dy) { return conv2d_gradients(in[0], in[1], dy, s); },
            {rounding(s.C * taps), rounding(s.O * taps), rounding(pixels), rounding(pixels)});
    }
    CHECK(conv2d(full({2, 3, 5, 7}, 0, gpu(0)), full({4, 3, 2, 2}, 0, gpu(0)), full({4}, 0, gpu(0))).shape ==
          std::vector<int>{2, 4, 4, 6});
}

// y[n,o] = b[o] + sum over c of X[n,c] * W[c,o]
static Doubles linear_reference(const Doubles &X, const Doubles &W, const Doubles &b, const LinearSizes &s) {
    Doubles y;
    for (int n = 0; n < s.N; n++)
        for (int o = 0; o < s.O; o++) {
            y.push_back(b[o]);
            for (int c = 0; c < s.C; c++) y.back() += X[n * s.C + c] * W[c * s.O + o];
        }
    return y;
}
static Arrays linear_gradients(const Doubles &X, const Doubles &W, const Doubles &dy, const LinearSizes &s) {
    Doubles dX(X.size()), dW(W.size()), db(s.O);
    for (int n = 0; n < s.N; n++)
        for (int o = 0; o < s.O; o++) {
            const double g = dy[n * s.O + o];
            db[o] += g;
            for (int c = 0; c < s.C; c++) {
                dX[n * s.C + c] += g * W[c * s.O + o];
                dW[c * s.O + o] += g * X[n * s.C + c];
            }
        }
    return {dX, dW, db};
}

TEST_CASE("linear: result and gradients") {
    std::vector<LinearSizes> sizes = {{1, 1, 1},   {2, 3, 1},   {3, 5, 7},     {0, 5, 3},    {33, 17, 50},
                                      {65, 1, 16}, {2, 50, 17}, {2, 800, 128}, {300, 128, 10}};
    for (const LinearSizes &s : sizes) {
        INFO("N C O: ", s.N, " ", s.C, " ", s.O);
        check_operator(
            {random_input({s.N, s.C}, 1), random_input({s.C, s.O}, 2), random_input({s.O}, 3)},
            [](const std::vector<Tensor> &in) { return linear(in[0], in[1], in[2]); },
            [=](const Arrays &in) { return linear_reference(in[0], in[1], in[2], s); },
            [=](const Arrays &in, const Doubles &dy) { return linear_gradients(in[0], in[1], dy, s); },
            {rounding(s.C), rounding(s.O), rounding(s.N), rounding(s.N)});
    }
}

TEST_CASE("conv2d, linear: each input's gradient, whether or not the others want one") {
    const std::vector<Input> conv_inputs = {random_input({2, 3, 4, 5}, 1), random_input({2, 3, 2, 2}, 2),
                                            random_input({2}, 3)};
    const std::vector<Input> linear_inputs = {random_input({2, 3}, 1), random_input({3, 4}, 2),
                                              random_input({4}, 3)};
    for (auto op : {conv2d, linear}) {
        const std::vector<Input> &inputs = op == conv2d ? conv_inputs : linear_inputs;
        Floats want[3];
        for (int wanted = 7; wanted > 0; wanted--) { // bit i: input i wants its gradient; first all three
            CAPTURE(wanted);
            std::vector<Tensor> in;
            for (const Input &input : inputs) in.push_back(with_grad(input));
            for (int i = 0; i < 3; i++)
                if (!(wanted >> i & 1)) in[i].grad = nullptr;
            backward(op(in[0], in[1], in[2]));
            for (int i = 0; i < 3; i++) {
                if (wanted == 7) want[i] = to_host(*in[i].grad);
                CAPTURE(i);
                if (in[i].grad) CHECK(same_bits(to_host(*in[i].grad), want[i]));
            }
        }
    }
}

// --- relu -----------------------------------------------------------------------------------------

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
    for (const std::vector<int> &shape : std::vector<std::vector<int>>{{1}, {255}, {2, 3, 4, 5}, {1001}, {0, 3}}) {
        Input X = random_input(shape, 1);
        for (float &x : X.numbers) x += x < 0 ? -0.01f : 0.01f; // finite differences must not step over 0
        check_operator(
            {X}, [](const std::vector<Tensor> &in) { return relu(in[0]); },
            [](const Arrays &in) { return relu_reference(in[0]); },
            [](const Arrays &in, const Doubles &dy) { return Arrays{relu_gradient(in[0], dy)}; },
            {0, 1e-7}); // nothing is rounded but the sum of two gradients
    }
    Tensor X = with_grad({{6}, {NAN, 0.0f, -0.0f, INFINITY, -INFINITY, 1e-45f}}), y = relu(X);
    backward(y);
    const Floats got = to_host(y);
    CHECK(std::isnan(got[0])); // or a broken network would look sound
    CHECK(Floats(got.begin() + 1, got.end()) == Floats{0, 0, INFINITY, 0, 1e-45f});
    const Floats dX = to_host(*X.grad);
    CHECK(Floats(dX.begin() + 1, dX.end()) == Floats{0, 0, 1, 0, 1});
}

// --- avg_pool2d -----------------------------------------------------------------------------------

// A term of a mean: y[n,c,i,j] has X[n,c,i*S+u,j*S+v] / K^2.   visit(index in y, in X)
template <class Visit> static void avg_pool2d_terms(const PoolSizes &s, Visit visit) {
    const int OH = (s.H - s.K) / s.S + 1, OW = (s.W - s.K) / s.S + 1;
    for (int p = 0; p < s.N * s.C; p++)
        for (int i = 0; i < OH; i++)
            for (int j = 0; j < OW; j++)
                for (int u = 0; u < s.K; u++)
                    for (int v = 0; v < s.K; v++)
                        visit((p * OH + i) * OW + j, (p * s.H + i * s.S + u) * s.W + j * s.S + v);
}
static Doubles avg_pool2d_reference(const Doubles &X, const PoolSizes &s) {
    Doubles y(s.N * s.C * ((s.H - s.K) / s.S + 1) * ((s.W - s.K) / s.S + 1));
    avg_pool2d_terms(s, [&](int at_y, int at_X) { y[at_y] += X[at_X] / (s.K * s.K); });
    return y;
}
static Doubles avg_pool2d_gradient(const Doubles &dy, const PoolSizes &s) {
    Doubles dX(s.N * s.C * s.H * s.W);
    avg_pool2d_terms(s, [&](int at_y, int at_X) { dX[at_X] += dy[at_y] / (s.K * s.K); });
    return dX;
}

TEST_CASE("avg_pool2d: result and gradient") {
    std::vector<PoolSizes> sizes = {
        // N C   H   W  K  S
        {1, 1, 1, 1, 1, 1},
        {2, 3, 4, 6, 2, 2},
        {2, 1, 9, 9, 2, 2},   // the ninth row and column are in no window
        {3, 2, 7, 5, 3, 2},   // windows overlap
        {3, 2, 8, 11, 2, 3},  // gaps between windows
        {2, 2, 6, 4, 4, 1},   // one window wide, many overlap
        {1, 2, 3, 3, 3, 5},   // one window
        {1, 2, 39, 71, 2, 2}, // more than a block's threads
        {1, 2, 39, 71, 3, 2},
        {0, 2, 4, 4, 2, 2},
        {2, 20, 26, 26, 2, 2}, // LeNet's
        {2, 50, 9, 9, 2, 2}};
    for (const PoolSizes &s : sizes) {
        INFO("N C H W K S: ", s.N, " ", s.C, " ", s.H, " ", s.W, " ", s.K, " ", s.S);
        check_operator(
            {random_input({s.N, s.C, s.H, s.W}, 1)},
            [=](const std::vector<Tensor> &in) { return avg_pool2d(in[0], s.K, s.S); },
            [=](const Arrays &in) { return avg_pool2d_reference(in[0], s); },
            [=](const Arrays &, const Doubles &dy) { return Arrays{avg_pool2d_gradient(dy, s)}; },
            {rounding(s.K * s.K), rounding(s.K * s.K)});
    }
    CHECK(avg_pool2d(full({2, 3, 9, 8}, 0, gpu(0)), 2, 2).shape == std::vector<int>{2, 3, 4, 4});
}

TEST_CASE("avg_pool2d: what is in no window gets a gradient of exactly 0") {
    Tensor X = with_grad(random_input({2, 3, 9, 9}, 1));
    backward(avg_pool2d(X, 2, 2));
    const Floats dX = to_host(*X.grad);
    int wrong = 0;
    for (int i = 0; i < size(X); i++) wrong += dX[i] != (i / 9 % 9 == 8 || i % 9 == 8 ? 0 : 0.25f);
    CHECK(wrong == 0);
}

// --- softmax_cross_entropy ------------------------------------------------------------------------

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
    for (auto [N, classes] : {std::pair(1, 2), {5, 10}, {65, 10}, {3, 7}, {4, 1}, {0, 10}, {2, 1000}}) {
        INFO("N classes: ", N, " ", classes);
        Floats y(N);
        for (int n = 0; n < N; n++) y[n] = n % 3 == 0 ? 0 : n % 3 == 1 ? classes - 1 : n % classes;
        const Tensor labels = on_device(y, {N});
        const Doubles exact(y.begin(), y.end());
        check_operator(
            {random_input({N, classes}, 1)},
            [=](const std::vector<Tensor> &in) { return softmax_cross_entropy(in[0], labels); },
            [=](const Arrays &in) { return cross_entropy_reference(in[0], exact); },
            [=](const Arrays &in, const Doubles &dl) {
                return Arrays{cross_entropy_gradient(in[0], exact, dl)};
            },
            {rounding(classes), rounding(classes)}); // expf and logf are right to two units in the last place
    }
}

TEST_CASE("softmax_cross_entropy: large logits, and rows of the gradient") {
    const Floats logits = {1e4f,  -1e4f, 0,    // the right class far ahead
                           1e4f,  -1e4f, 0,    // far behind
                           -1e4f, -1e4f, -1e4f, 1e4f, 1e4f, 1e4f};
    Tensor y_hat = with_grad({{4, 3}, logits}), l = softmax_cross_entropy(y_hat, on_device({0, 1, 2, 0}, {4}));
    backward(l);
    const double third = 1.0 / 3, log3 = std::log(3.0);
    const Floats got = to_host(l), d = to_host(*y_hat.grad);
    CHECK(got[0] == 0);
    CHECK(got[1] == 20000);
    check_close({got[2], got[3]}, Doubles{log3, log3}, 1e-6);
    check_close(d, Doubles{0, 0, 0, 1, -1, 0, third, third, third - 1, third - 1, third, third}, 1e-6);

    const int N = 50, classes = 10;
    Tensor Z = with_grad({{N, classes}, random_floats(N * classes, 4, 5)});
    backward(softmax_cross_entropy(Z, full({N}, 3, gpu(0))));
    const Floats dZ = to_host(*Z.grad);
    for (int n = 0; n < N; n++) // probabilities sum to 1, of which 1 is taken: ten roundings of 6e-8 are left
        CHECK(std::fabs(std::accumulate(&dZ[n * classes], &dZ[n * classes] + classes, 0.0)) < 1e-6);
}

// --- on tensors without gradients -----------------------------------------------------------------

TEST_CASE("full, add_: numbers of any count, on the host and on devices") {
    for (int n : {0, 1, 255, 256, 257, 10001}) {
        CAPTURE(n);
        CHECK(to_host(full({n}, 2.5f, cpu())) == Floats(n, 2.5f));
        Tensor a = full({n}, 2.5f, gpu(1));
        CHECK(a.device.id == 1);
        CHECK(to_host(a) == Floats(n, 2.5f));
        Floats numbers(n), sums(n);
        for (int i = 0; i < n; i++) sums[i] = 2.5f + (numbers[i] = i);
        const Tensor b = on_device(numbers, {n}, gpu(1));
        add_(a, b);
        CHECK(to_host(a) == sums);
        CHECK(to_host(b) == numbers);
    }
}

TEST_CASE("sgd: param -= lr * grad / batch_size") {
    std::vector<Tensor> p;
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
}

TEST_CASE("sum_kernel: counts around the size of a block") {
    for (int n : {0, 1, 2, 255, 256, 257, 1000}) {
        CAPTURE(n);
        Floats numbers(n);
        for (int i = 0; i < n; i++) numbers[i] = i + 1;
        const Tensor out = full({2}, -1, gpu(0)), l = on_device(numbers, {n});
        sum_kernel<<<1, threads, 0, on(gpu(0))>>>(out.data.get() + 1, l.data.get(), n);
        CHECK_LAUNCH();
        CHECK(to_host(out) == Floats{-1, n * (n + 1) / 2.0f});
    }
}

TEST_CASE("count_correct_kernel: the first of the largest counts; adds to what is there") {
    const Tensor correct = full({1}, 5, gpu(0));
    auto count = [&](const Floats &y_hat, const Floats &y) {
        const int N = y.size(), classes = N ? y_hat.size() / N : 1;
        const Tensor z = on_device(y_hat, {N, classes}), labels = on_device(y, {N});
        count_correct_kernel<<<1, threads, 0, on(gpu(0))>>>(correct.data.get(), z.data.get(),
                                                            labels.data.get(), N, classes);
        CHECK_LAUNCH();
        return to_host(correct)[0];
    };
    CHECK(count({1, 2, 3, 3, 2, 1, -3, -2, -1}, {2, 0, 2}) == 8); // all three right
    CHECK(count({1, 2, 3, 3, 2, 1, -3, -2, -1}, {0, 1, 1}) == 8);  // none
    CHECK(count({1, 3, 3}, {1}) == 9);                             // a tie: the first of them
    CHECK(count({1, 3, 3}, {2}) == 9);
    CHECK(count({0, 0, 0}, {0}) == 10);
    CHECK(count({}, {}) == 10);
    const int N = 1000; // row n is largest at n % 3, the label is n % 2: equal where n % 6 is 0 or 1
    Floats y_hat(3 * N), y(N);
    for (int n = 0; n < N; n++) {
        y_hat[3 * n + n % 3] = 1;
        y[n] = n % 2;
    }
    CHECK(count(y_hat, y) == 10 + 334);
}

// --- what is refused ------------------------------------------------------------------------------

TEST_CASE("conv2d, linear, avg_pool2d, softmax_cross_entropy, add_: wrong shapes") {
    auto t = [](std::vector<int> shape) { return full(std::move(shape), 0, gpu(0)); };
    check_error([&] { conv2d(t({1, 2, 5, 5}), t({4, 3, 3, 3}), t({4})); }, {"conv2d", "(1,2,5,5), (4,3,3,3), (4)"});
    check_error([&] { conv2d(t({1, 3, 5, 5}), t({4, 3, 3, 2}), t({4})); }, {"conv2d", "(4,3,3,2)"});
    check_error([&] { conv2d(t({1, 3, 5, 5}), t({4, 3, 3, 3}), t({3})); }, {"conv2d", "(3)"});
    check_error([&] { conv2d(t({1, 3, 2, 5}), t({4, 3, 3, 3}), t({4})); }, {"conv2d", "(1,3,2,5)"});
    check_error([&] { conv2d(t({1, 3, 5, 2}), t({4, 3, 3, 3}), t({4})); }, {"conv2d", "(1,3,5,2)"});
    check_error([&] { conv2d(t({3, 5, 5}), t({4, 3, 3, 3}), t({4})); }, {"conv2d", "(3,5,5)"});
    check_error([&] { linear(t({2, 3}), t({4, 5}), t({5})); }, {"linear", "(2,3), (4,5), (5)"});
    check_error([&] { linear(t({2, 3}), t({3, 5}), t({4})); }, {"linear", "(4)"});
    check_error([&] { linear(t({2, 3, 1, 1}), t({3, 5}), t({5})); }, {"linear", "(2,3,1,1)"});
    check_error([&] { avg_pool2d(t({1, 1, 2, 3}), 3, 1); }, {"avg_pool2d", "(1,1,2,3)"});
    check_error([&] { avg_pool2d(t({1, 1, 3, 3}), 2, 0); }, {"avg_pool2d"});
    check_error([&] { softmax_cross_entropy(t({2, 3}), t({3})); }, {"softmax_cross_entropy", "(2,3), (3)"});
    check_error([&] { softmax_cross_entropy(t({2, 0}), t({2})); }, {"softmax_cross_entropy", "(2,0)"});
    check_error([&] { add_(t({2, 3}), t({3, 2})); }, {"add_", "(2,3), (3,2)"});
}

TEST_CASE("conv2d, linear, relu, avg_pool2d, softmax_cross_entropy, add_: wrong devices") {
    auto at = [](Device device, std::vector<int> shape) { return full(std::move(shape), 0, device); };
    const Device a = gpu(0), b = gpu(1);
    const std::vector<std::string> words = {"gpu(0)", "gpu(1)", "one device"};
    check_error([&] { conv2d(at(a, {1, 1, 3, 3}), at(b, {1, 1, 2, 2}), at(a, {1})); }, words);
    check_error([&] { linear(at(a, {2, 3}), at(a, {3, 4}), at(b, {4})); }, words);
    check_error([&] { softmax_cross_entropy(at(a, {2, 3}), at(b, {2})); }, words);
    check_error([&] { add_(at(a, {2}), at(b, {2})); }, words);
    // The host is no device to compute on.
    check_error([&] { relu(at(cpu(), {2})); }, {"relu", "cpu"});
    check_error([&] { avg_pool2d(at(cpu(), {1, 1, 2, 2}), 2, 2); }, {"avg_pool2d", "cpu"});
    check_error([&] { linear(at(a, {2, 3}), at(cpu(), {3, 4}), at(a, {4})); }, {"linear", "gpu(0)", "cpu"});
}

// ---------------------------------------------------------------------------------------------
// 8. Autograd

TEST_CASE("backward: the gradient of the sum, only for what the result depends on") {
    Tensor X = with_grad({{2}, {1, -1}}), other = on_device({1, 1}, {2});
    attach_grad(other);
    Tensor unused = relu(other), y = relu(X);
    backward(y);
    CHECK(to_host(*X.grad) == Floats{1, 0});
    CHECK(to_host(*other.grad) == Floats{0, 0});
    backward(relu(other)); // nothing is left over from the pass before
    CHECK(to_host(*X.grad) == Floats{1, 0});
    CHECK(to_host(*other.grad) == Floats{1, 1});
}

TEST_CASE("backward: one tensor in two places of an operator, and through a chain") {
    // l = sum of X @ X: dX = ones @ X^T + X^T @ ones, for X = [[1, 2], [3, 4]]
    Tensor X = with_grad({{2, 2}, {1, 2, 3, 4}});
    backward(linear(X, X, full({2}, 0, gpu(0))));
    CHECK(to_host(*X.grad) == Floats{7, 11, 9, 13});
    // l = relu(X) @ X, with relu's gradient added to that of X
    Tensor b = full({2}, 0, gpu(0));
    backward(linear(relu(X), X, b));
    CHECK(to_host(*X.grad) == Floats{7, 11, 9, 13});
}

TEST_CASE("backward: each device has a tape of its own") {
    Tensor X[2];
    for (int c = 0; c < 2; c++) {
        X[c] = full({3}, 1 + c, gpu(c));
        attach_grad(X[c]);
    }
    Tensor y0 = relu(X[0]), y1 = relu(X[1]);
    backward(y0);
    CHECK(to_host(*X[0].grad) == Floats(3, 1));
    CHECK(to_host(*X[1].grad) == Floats(3, 0));
    backward(y1);
    CHECK(to_host(*X[1].grad) == Floats(3, 1));
}

TEST_CASE("backward: refuses what was not recorded") {
    Tensor X = full({2}, 1, gpu(1));
    check_error([&] { backward(relu(X)); }, {"backward", "gpu(1)"}); // nothing wants a gradient
    attach_grad(X);
    Tensor y = relu(X);
    backward(y);
    check_error([&] { backward(y); }, {"backward", "gpu(1)"}); // the tape was used up
}

TEST_CASE("NoGrad: while one exists, nothing is recorded") {
    Tensor X = full({2}, 1, gpu(0));
    attach_grad(X);
    {
        NoGrad guard;
        {
            NoGrad inner;
        }
        Tensor y = relu(X);
        CHECK_FALSE(y.grad);
        check_error([&] { backward(y); }, {"backward"});
    }
    backward(relu(X));
    CHECK(to_host(*X.grad) == Floats{1, 1});
}

// ---------------------------------------------------------------------------------------------
// 9. Devices and memory

TEST_CASE("reshape: the same numbers and the same gradient") {
    Tensor X = with_grad({{2, 6}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}});
    CHECK(reshape(X, {3, 4}).shape == std::vector<int>{3, 4});
    CHECK(reshape(X, {-1}).shape == std::vector<int>{12});
    CHECK(reshape(X, {2, -1, 3}).shape == std::vector<int>{2, 2, 3});
    CHECK(reshape(X, {4, -1}).data == X.data);
    CHECK(reshape(empty({0, 50, 4, 4}, gpu(0)), {0, -1}).shape == std::vector<int>{0, 800});
    check_error([&] { reshape(X, {5, 2}); }, {"reshape", "(2,6)", "(5,2)"});
    check_error([&] { reshape(X, {5, -1}); }, {"reshape", "(2,6)"});
    // Through a reshape of an operator's result and of a parameter: y = relu(X) as (3,4) times ones
    backward(linear(reshape(relu(X), {3, 4}), on_device({1, 2, 3, 4}, {4, 1}), full({1}, 0, gpu(0))));
    CHECK(to_host(*X.grad) == Floats{0, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4});
    backward(relu(reshape(X, {12})));
    CHECK(to_host(*X.grad) == Floats{0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1});
    CHECK(X.grad->shape == X.shape);
}

TEST_CASE("rows: a part of the same numbers") {
    const Tensor X = copyto(reshape(arange(24), {4, 3, 2}), gpu(1));
    const Tensor part = rows(X, 1, 3);
    CHECK(part.shape == std::vector<int>{2, 3, 2});
    CHECK(to_host(part) == Floats{6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17});
    add_(part, full({2, 3, 2}, 100, gpu(1)));
    CHECK(to_host(X)[5] == 5);
    CHECK(to_host(X)[6] == 106);
    CHECK(to_host(X)[18] == 18);
    CHECK(to_host(rows(X, 4, 4)).empty());
    CHECK(to_host(rows(arange(3), 2, 3)) == Floats{2});
}

TEST_CASE("check_replicas: one changed number is named") {
    init_params();
    std::vector<std::vector<Tensor>> device_params;
    for (int c = 0; c < 3; c++) device_params.push_back(get_params(params, gpu(c)));
    check_replicas(device_params);
    const Tensor flat = reshape(device_params[2][3], {50, 1}); // b2, all 0
    copyto(on_host({-0.0f}, {1}), rows(flat, 17, 18)); // equal to 0, but not the same bits
    check_error([&] { check_replicas(device_params); }, {"b2[17]", "gpu(2)"});
    copyto(on_host({0.0f}, {1}), rows(flat, 17, 18));
    check_replicas(device_params);
    copyto(on_host({1}, {1}), rows(reshape(device_params[1][4], {-1, 1}), 102399, 102400));
    check_error([&] { check_replicas(device_params); }, {"W3[102399]", "gpu(1)"});
}

TEST_CASE("to_string: as NumPy prints") {
    CHECK(to_string(full({3}, 0, cpu())) == "[0. 0. 0.]");
    CHECK(to_string(full({1, 2}, 3, gpu(1))) == "[[3. 3.]] @gpu(1)");
    CHECK(to_string(on_host({1, -10, 100}, {3})) == "[  1. -10. 100.]");
    CHECK(to_string(on_host({0.5f, -1.5f}, {2})) == "[ 0.5 -1.5]");
    CHECK(to_string(on_host({0.01234567f}, {1})) == "[0.01234567]");
    CHECK(to_string(on_host({NAN, 0.5f, -INFINITY}, {3})) == "[ nan      0.5 -inf  ]");
    CHECK(to_string(on_host({0.1f, 0.7f}, {2})) == "[0.1 0.7]");
    CHECK(to_string(on_host({0.5f, 1.25f}, {2})) == "[0.5  1.25]");
    CHECK(to_string(reshape(arange(20), {4, 5})) == "[[ 0.  1.  2.  3.  4.]\n"
                                                    " [ 5.  6.  7.  8.  9.]\n"
                                                    " [10. 11. 12. 13. 14.]\n"
                                                    " [15. 16. 17. 18. 19.]]");
    CHECK(to_string(reshape(arange(8), {2, 2, 2})) == "[[[0. 1.]\n"
                                                      "  [2. 3.]]\n\n"
                                                      " [[4. 5.]\n"
                                                      "  [6. 7.]]]");
    CHECK(to_string(empty({0}, gpu(0))) == "[] @gpu(0)");
}

// ---------------------------------------------------------------------------------------------
// The CPU stand-in, cpu/cuda_runtime.h: does it do what CUDA promises, and catch what it promises?

#ifdef CUDA_CPU

#define OK(call) expect_success((call), #call, __LINE__)
static void expect_success(cudaError_t code, const char *call, int line) {
    CAPTURE(line);
    CAPTURE(call);
    REQUIRE(code == cudaSuccess);
}

// n floats in a device's memory. Device 0 is current afterwards, here and in all that follows.
static std::shared_ptr<float> floats_on(int device, size_t n) {
    float *p = nullptr;
    OK(cudaSetDevice(device));
    OK(cudaMalloc(&p, n * sizeof(float)));
    OK(cudaSetDevice(0));
    return std::shared_ptr<float>(p, [](float *p) { cudaFree(p); });
}
template <class T> static std::shared_ptr<T> pinned(size_t n) {
    T *p = nullptr;
    OK(cudaMallocHost(&p, n * sizeof(T)));
    std::fill_n(p, n, T());
    return std::shared_ptr<T>(p, [](T *p) { cudaFreeHost(p); });
}
static Floats fetch(const std::shared_ptr<float> &p, size_t n) {
    Floats host(n);
    OK(cudaDeviceSynchronize());
    OK(cudaMemcpy(host.data(), p.get(), n * sizeof(float), cudaMemcpyDeviceToHost));
    return host;
}
static float fetch(const std::shared_ptr<float> &p) { return fetch(p, 1)[0]; }

struct TestStream { // of a device, and not ordered with its default stream
    cudaStream_t stream;
    explicit TestStream(int device = 0, unsigned flags = cudaStreamNonBlocking) {
        OK(cudaSetDevice(device));
        OK(cudaStreamCreateWithFlags(&stream, flags));
        OK(cudaSetDevice(0));
    }
    ~TestStream() { cudaStreamDestroy(stream); }
    operator cudaStream_t() const { return stream; }
};
struct TestEvent {
    cudaEvent_t event;
    explicit TestEvent(int device = 0, unsigned flags = cudaEventDefault) {
        OK(cudaSetDevice(device));
        OK(cudaEventCreateWithFlags(&event, flags));
        OK(cudaSetDevice(0));
    }
    ~TestEvent() { cudaEventDestroy(event); }
    operator cudaEvent_t() const { return event; }
};

__global__ void assign_kernel(float *x, float value) {
    x[blockIdx.x * blockDim.x + threadIdx.x] = value;
}

// Keeps its stream busy until the host lets go, and only then sets x. Gives up after ten seconds, with
// x as it was: where a call waits that must not, the test fails, and does not hang.
__global__ void hold_kernel(const int *go, float *x, float value) {
    for (int i = 0; i < 100000 && !__atomic_load_n(go, __ATOMIC_RELAXED); i++) usleep(100);
    if (__atomic_load_n(go, __ATOMIC_RELAXED)) *x = value;
}
struct Hold {
    std::shared_ptr<int> go = pinned<int>(1);
    // Time enough for what does not wait, but should, to give itself away.
    void release_later() {
        usleep(20000);
        __atomic_store_n(go.get(), 1, __ATOMIC_RELAXED);
    }
    ~Hold() { __atomic_store_n(go.get(), 1, __ATOMIC_RELAXED); } // also where a test fails
};

// --- kernels and launches

// counts[i] += 1 for the one i that this thread is, in x fastest, blocks slowest.
template <bool barriers> __global__ void count_kernel(float *counts) {
    if (barriers) __syncthreads();
    const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    if (barriers) __syncthreads();
    const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    counts[block * (blockDim.x * blockDim.y * blockDim.z) + thread] += 1;
}

TEST_CASE("stand-in: every index of a grid comes once") {
    struct {
        dim3 grid, block;
    } cases[] = {{dim3(1), dim3(1)},          {dim3(3, 2, 4), dim3(5, 3, 2)}, {dim3(7), dim3(1, 1, 64)},
                 {dim3(2, 1, 3), dim3(1, 9)}, {dim3(1, 500), dim3(3)},        {dim3(2), dim3(1024)},
                 {dim3(1), dim3(32, 32)},     {dim3(1, 1, 65535), dim3(1)},   {dim3(70000), dim3(2)}};
    for (auto [grid, block] : cases) {
        const size_t n = (size_t)grid.x * grid.y * grid.z * block.x * block.y * block.z;
        if (small_only && n > 1000) continue;
        auto counts = floats_on(0, n);
        OK(cudaMemset(counts.get(), 0, n * sizeof(float)));
        count_kernel<false><<<grid, block>>>(counts.get());
        OK(cudaGetLastError());
        count_kernel<true><<<grid, block>>>(counts.get());
        OK(cudaGetLastError());
        CHECK(fetch(counts, n) == Floats(n, 2));
    }
}

// y of each block: x of that block, reversed, plus what a table says. Two arrays in static shared
// memory and one in dynamic shared memory must not meet.
template <class T, int N> __global__ void reverse_kernel(T *y, const T *x) {
    __shared__ T tile[N];
    __shared__ int table[2][N / 2];
    extern __shared__ T dynamic[];
    const int t = threadIdx.x;
    tile[t] = x[blockIdx.x * N + t];
    table[t % 2][t / 2] = t;
    dynamic[N - 1 - t] = T(0.5);
    __syncthreads();
    dynamic[t] += tile[N - 1 - t];
    __syncthreads();
    y[blockIdx.x * N + t] = dynamic[t] + table[t % 2][t / 2];
}
template <class T, int N> static void test_reverse(int blocks) {
    const size_t bytes = blocks * N * sizeof(T);
    std::shared_ptr<T> y = pinned<T>(blocks * N);
    std::vector<T> x(blocks * N), want(blocks * N);
    for (size_t i = 0; i < x.size(); i++) x[i] = i * i % 101;
    for (int i = 0; i < blocks * N; i++) want[i] = x[i / N * N + N - 1 - i % N] + T(0.5) + i % N;
    auto memory = floats_on(0, bytes / sizeof(float));
    T *X = (T *)memory.get();
    OK(cudaMemcpy(X, x.data(), bytes, cudaMemcpyHostToDevice));
    reverse_kernel<T, N><<<blocks, N, N * sizeof(T)>>>(y.get(), X);
    OK(cudaGetLastError());
    OK(cudaDeviceSynchronize());
    CHECK(std::vector<T>(y.get(), y.get() + blocks * N) == want);
}
TEST_CASE("stand-in: static and dynamic shared memory") {
    test_reverse<float, 2>(3);
    test_reverse<float, 64>(5);
    test_reverse<double, 64>(5);
    if (!small_only) test_reverse<float, 1024>(200);
}

// sums[b] = the sum of block b's part of x, by a tree whose loop meets log2(threads) barriers
__global__ void tree_kernel(float *sums, const float *x) {
    extern __shared__ float part[];
    const int t = threadIdx.x;
    part[t] = x[blockIdx.x * blockDim.x + t];
    for (int width = blockDim.x / 2; width > 0; width /= 2) {
        __syncthreads();
        if (t < width) part[t] += part[t + width];
    }
    if (t == 0) sums[blockIdx.x] = part[0];
}
// As many barriers as the block's number says, in a function that the kernel calls: x[b] = b * threads.
__device__ void add_up(float *x, int turn) {
    if ((int)threadIdx.x == turn % (int)blockDim.x) *x += blockDim.x;
    __syncthreads();
}
__global__ void turns_kernel(float *x) {
    if (threadIdx.x == 0) x[blockIdx.x] = 0;
    __syncthreads();
    for (unsigned turn = 0; turn < blockIdx.x; turn++) add_up(&x[blockIdx.x], turn);
}
TEST_CASE("stand-in: barriers in loops") {
    for (int threads : {1, 2, 64, 1024}) {
        const int blocks = small_only ? 3 : 37, n = blocks * threads;
        if (small_only && threads > 64) continue;
        Floats numbers(n), want(blocks), turns(blocks);
        for (int i = 0; i < n; i++) want[i / threads] += numbers[i] = i * 7 % 1000; // below 2^24: exact
        for (int b = 0; b < blocks; b++) turns[b] = b * threads;
        auto x = floats_on(0, n), sums = floats_on(0, blocks);
        OK(cudaMemcpy(x.get(), numbers.data(), n * sizeof(float), cudaMemcpyHostToDevice));
        tree_kernel<<<blocks, threads, threads * sizeof(float)>>>(sums.get(), x.get());
        OK(cudaGetLastError());
        CHECK(fetch(sums, blocks) == want);
        turns_kernel<<<blocks, threads>>>(sums.get());
        OK(cudaGetLastError());
        CHECK(fetch(sums, blocks) == turns);
    }
}

// What the Makefile's sed script has to understand, apart from what mgpu.cu writes.
namespace odd {
template <class Pair, int add> __global__ void pair_kernel(float *x, Pair pair) {
    x[threadIdx.x] = pair.first + pair.second + add + 10 * blockIdx.x;
}
} // namespace odd
__global__ void plus_kernel(float *x, float value) { x[blockIdx.x * blockDim.x + threadIdx.x] += value; }

TEST_CASE("stand-in: launches in every spelling") {
    auto memory = floats_on(0, 64);
    float *x = memory.get();
    const int n = 64;
    const bool large = n > 32;
    TestStream stream;

    odd::pair_kernel<std::pair<int, float>, 5><<<1, n>>>(x, std::make_pair(1, 2.5f));
    OK(cudaGetLastError());
    CHECK(fetch(memory, n) == Floats(n, 8.5f));

    assign_kernel<<<n >> 5, 1 << 5>>>(x, 1); // as 2 blocks of 32
    CHECK(fetch(memory, n) == Floats(n, 1));
    assign_kernel<<<large ? n / 8 : 1, n < 32 ? n : 8>>>(x, 2);
    CHECK(fetch(memory, n) == Floats(n, 2));

    plus_kernel<<< // a comment may mention <<< and __shared__
        dim3(n / 16), dim3(4, 1, 1), /* shared */ 0,
        stream
    >>> (
        x,
        std::max(0.5f,
                 0.25f)
    );
    OK(cudaStreamSynchronize(stream));
    CHECK(fetch(memory, n) == [&] { // blocks of 4: the first 16 numbers
        Floats want(n, 2);
        std::fill_n(want.begin(), 16, 2.5f);
        return want;
    }());

    assign_kernel<<<1, n>>>(x, 1); plus_kernel<<<1, n>>>(x, 2); plus_kernel<<<1, n>>>(x, 4);
    CHECK(fetch(memory, n) == Floats(n, 7));

    void (*kernel)(float *, float) = large ? plus_kernel : assign_kernel;
    kernel<<<1, n>>>(x, 3);
    CHECK(fetch(memory, n) == Floats(n, 10));

    if (large) assign_kernel<<<1, n>>>(x, 20);
    else assign_kernel<<<1, n>>>(x, 30);
    for (int i = 0; i < 3; i++) plus_kernel<<<1, n>>>(x, i);
    CHECK(fetch(memory, n) == Floats(n, 23));

    CHECK(std::string("a<<<1, 1>>>(b)").size() == 14);
    CHECK(std::string("__shared__ float t[1];").size() == 22);
}

// Arguments are copied at the launch, structs with pointers in them too.
struct Line {
    float *y;
    const float *x;
    float slope;
    char unused;
    int n;
};
__global__ void line_kernel(Line l, const double *offset, bool negative, short n) {
    const int i = threadIdx.x;
    if (i < l.n && i < n) l.y[i] = (negative ? -1 : 1) * (l.slope * l.x[i] + (float)*offset);
}
TEST_CASE("stand-in: arguments are copied at the launch") {
    auto x = floats_on(0, 8), y = floats_on(0, 8);
    auto offset = pinned<double>(1);
    TestStream stream;
    Hold hold;
    *offset = 0.5;
    assign_kernel<<<1, 8>>>(x.get(), 3);
    OK(cudaDeviceSynchronize());
    hold_kernel<<<1, 1, 0, stream>>>(hold.go.get(), y.get(), 0);
    Line line = {y.get(), x.get(), 2, 0, 8};
    line_kernel<<<1, 8, 0, stream>>>(line, offset.get(), true, 8);
    OK(cudaGetLastError());
    line = {nullptr, nullptr, 0, 0, 0};
    hold.release_later();
    OK(cudaStreamSynchronize(stream));
    CHECK(fetch(y, 8) == Floats(8, -6.5f));
}

// --- streams, events, copies: what runs at the same time, and what waits

TEST_CASE("stand-in: a stream keeps its order") {
    const int n = small_only ? 1100 : 3000; // more than a queue holds: the host has to wait for room
    auto x = floats_on(0, 1), y = floats_on(0, 1);
    TestStream stream;
    assign_kernel<<<1, 1, 0, stream>>>(x.get(), 0);
    for (int i = 0; i < n; i++) {
        plus_kernel<<<1, 1, 0, stream>>>(x.get(), 1);
        OK(cudaMemcpyAsync(y.get(), x.get(), sizeof(float), cudaMemcpyDeviceToDevice, stream));
        std::swap(x, y);
    }
    OK(cudaStreamSynchronize(stream));
    CHECK(fetch(x) == n);
    CHECK(fetch(y) == n);
}

__global__ void meet_kernel(int *mine, const int *other, float *x) {
    __atomic_store_n(mine, 1, __ATOMIC_RELAXED);
    hold_kernel(other, x, 1);
}
TEST_CASE("stand-in: the host, streams and devices run at the same time") {
    auto x = floats_on(0, 1), y = floats_on(0, 1), z = floats_on(1, 1), w = floats_on(1, 1);
    TestStream a, b, c(1);
    TestEvent held;
    Hold hold;
    hold_kernel<<<1, 1, 0, a>>>(hold.go.get(), x.get(), 5);
    OK(cudaEventRecord(held, a));
    // A copy beside a kernel on one device, and work on another device
    OK(cudaMemsetAsync(y.get(), 0, sizeof(float), b));
    OK(cudaStreamSynchronize(b));
    OK(cudaSetDevice(1));
    assign_kernel<<<1, 1, 0, c>>>(z.get(), 7);
    OK(cudaStreamSynchronize(c));
    OK(cudaSetDevice(0));
    CHECK(cudaEventQuery(held) == cudaErrorNotReady);
    hold.release_later();
    OK(cudaStreamSynchronize(a));
    OK(cudaEventQuery(held));
    CHECK(fetch(x) == 5);
    CHECK(fetch(y) == 0);
    CHECK(fetch(z) == 7);
    // Kernels of two devices that each wait for the other to have begun
    auto flags = pinned<int>(2);
    meet_kernel<<<1, 1, 0, a>>>(&flags.get()[0], &flags.get()[1], y.get());
    OK(cudaSetDevice(1));
    meet_kernel<<<1, 1, 0, c>>>(&flags.get()[1], &flags.get()[0], w.get());
    OK(cudaStreamSynchronize(c));
    OK(cudaSetDevice(0));
    OK(cudaStreamSynchronize(a));
    CHECK(fetch(y) == 1);
    CHECK(fetch(w) == 1);
}

TEST_CASE("stand-in: events order streams and devices") {
    const size_t bytes = sizeof(float);
    auto x = floats_on(0, 1), y = floats_on(0, 1), z = floats_on(1, 1);
    TestStream a, b, c(1);
    TestEvent ready_a, ready_b, ready_c(1);
    Hold hold;
    hold_kernel<<<1, 1, 0, a>>>(hold.go.get(), x.get(), 5);
    OK(cudaEventRecord(ready_a, a));
    OK(cudaStreamWaitEvent(b, ready_a));
    OK(cudaMemcpyAsync(y.get(), x.get(), bytes, cudaMemcpyDeviceToDevice, b));
    OK(cudaEventRecord(ready_b, b));
    OK(cudaStreamWaitEvent(c, ready_a, 0));
    OK(cudaMemcpyPeerAsync(z.get(), 1, x.get(), 0, bytes, c));
    OK(cudaEventRecord(ready_c, c));
    OK(cudaStreamWaitEvent(a, ready_b));
    OK(cudaStreamWaitEvent(a, ready_c));
    assign_kernel<<<1, 1, 0, a>>>(x.get(), 6); // after both copies
    hold.release_later();
    OK(cudaEventSynchronize(ready_c));
    OK(cudaStreamSynchronize(a));
    OK(cudaStreamSynchronize(b));
    CHECK(fetch(x) == 6);
    CHECK(fetch(y) == 5);
    CHECK(fetch(z) == 5);
}

TEST_CASE("stand-in: an event stands for its last record before the wait") {
    auto x = floats_on(0, 1), y = floats_on(0, 1);
    TestStream a, b;
    TestEvent event;
    OK(cudaEventQuery(event)); // one that was never recorded holds nobody up
    OK(cudaEventSynchronize(event));
    OK(cudaStreamWaitEvent(b, event));
    OK(cudaStreamSynchronize(b));
    Hold hold;
    OK(cudaEventRecord(event, a));
    OK(cudaStreamWaitEvent(b, event));
    hold_kernel<<<1, 1, 0, a>>>(hold.go.get(), x.get(), 1);
    OK(cudaEventRecord(event, a)); // the wait above is for the earlier record
    OK(cudaMemsetAsync(y.get(), 0, sizeof(float), b));
    OK(cudaStreamSynchronize(b));
    CHECK(cudaEventQuery(event) == cudaErrorNotReady);
    hold.release_later();
    OK(cudaEventSynchronize(event));
    OK(cudaEventQuery(event));
    CHECK(fetch(x) == 1);
}

TEST_CASE("stand-in: cudaEventElapsedTime") {
    auto x = floats_on(0, 1);
    TestStream a;
    TestEvent begin, end, untimed(0, cudaEventDisableTiming);
    float milliseconds = -1;
    CHECK(cudaEventElapsedTime(&milliseconds, begin, end) == cudaErrorInvalidResourceHandle);
    CHECK(cudaGetLastError() == cudaErrorInvalidResourceHandle);
    Hold hold;
    OK(cudaEventRecord(begin, a));
    hold_kernel<<<1, 1, 0, a>>>(hold.go.get(), x.get(), 1);
    OK(cudaEventRecord(end, a));
    OK(cudaEventRecord(untimed, a));
    OK(cudaEventSynchronize(begin));
    CHECK(cudaEventElapsedTime(&milliseconds, begin, end) == cudaErrorNotReady);
    auto t0 = std::chrono::steady_clock::now();
    hold.release_later(); // at least 20 ms after `begin` was reached
    OK(cudaEventSynchronize(end));
    double most = 1e3 * std::chrono::duration<double>(std::chrono::steady_clock::now() - t0).count();
    OK(cudaEventElapsedTime(&milliseconds, begin, end));
    CHECK(milliseconds >= 20);
    CHECK(milliseconds <= most + 10000); // most: since a moment somewhat later than `begin`
    CHECK(cudaEventElapsedTime(&milliseconds, begin, untimed) == cudaErrorInvalidResourceHandle);
    CHECK(cudaGetLastError() == cudaErrorInvalidResourceHandle);
}

TEST_CASE("stand-in: the default stream and the others wait for each other") {
    const size_t bytes = sizeof(float);
    auto x = floats_on(0, 1), y = floats_on(0, 1), z = floats_on(0, 1);
    TestStream blocking(0, cudaStreamDefault), free(0, cudaStreamNonBlocking);
    SUBCASE("the default stream for an earlier stream") {
        Hold hold;
        hold_kernel<<<1, 1, 0, blocking>>>(hold.go.get(), x.get(), 5);
        OK(cudaMemcpyAsync(y.get(), x.get(), bytes, cudaMemcpyDeviceToDevice));
        OK(cudaMemsetAsync(z.get(), 0, bytes, free)); // for which neither of them matters
        OK(cudaStreamSynchronize(free));
        hold.release_later();
        OK(cudaStreamSynchronize(nullptr));
    }
    SUBCASE("a stream for the earlier default stream") {
        Hold hold;
        hold_kernel<<<1, 1>>>(hold.go.get(), x.get(), 5);
        OK(cudaMemcpyAsync(y.get(), x.get(), bytes, cudaMemcpyDeviceToDevice, blocking));
        OK(cudaMemsetAsync(z.get(), 0, bytes, free));
        OK(cudaStreamSynchronize(free));
        hold.release_later();
        OK(cudaStreamSynchronize(blocking));
    }
    CHECK(fetch(x) == 5);
    CHECK(fetch(y) == 5);
    CHECK(fetch(z) == 0);
}

TEST_CASE("stand-in: cudaMemcpyPeer is ordered with all of both devices, and the host goes on") {
    const size_t bytes = sizeof(float);
    auto x = floats_on(0, 1), y = floats_on(1, 1), z = floats_on(1, 1), w = floats_on(0, 1);
    TestStream a(0), b(1);
    SUBCASE("after the source's work, before what follows on either") {
        Hold hold;
        hold_kernel<<<1, 1, 0, a>>>(hold.go.get(), x.get(), 5);
        OK(cudaMemcpyPeer(y.get(), 1, x.get(), 0, bytes));
        OK(cudaMemcpyAsync(z.get(), y.get(), bytes, cudaMemcpyDeviceToDevice, b));
        assign_kernel<<<1, 1, 0, a>>>(x.get(), 6);
        hold.release_later();
        OK(cudaStreamSynchronize(a));
        OK(cudaStreamSynchronize(b));
        CHECK(fetch(x) == 6);
        CHECK(fetch(y) == 5);
        CHECK(fetch(z) == 5);
    }
    SUBCASE("after the target's work") {
        Hold hold;
        assign_kernel<<<1, 1, 0, a>>>(x.get(), 5);
        OK(cudaSetDevice(1));
        hold_kernel<<<1, 1, 0, b>>>(hold.go.get(), y.get(), 6);
        OK(cudaSetDevice(0));
        OK(cudaMemcpyPeer(y.get(), 1, x.get(), 0, bytes));
        OK(cudaMemcpyAsync(w.get(), x.get(), bytes, cudaMemcpyDeviceToDevice, a));
        assign_kernel<<<1, 1, 0, a>>>(x.get(), 7); // has to wait for the copy, and it for device 1
        hold.release_later();
        OK(cudaStreamSynchronize(a));
        OK(cudaStreamSynchronize(b));
        CHECK(fetch(y) == 5);
        CHECK(fetch(w) == 5);
        CHECK(fetch(x) == 7);
    }
}

TEST_CASE("stand-in: pageable memory is free after a copy, pinned memory is copied later") {
    auto x = floats_on(0, 2), y = floats_on(0, 1);
    auto fixed = pinned<float>(2);
    Floats host = {1, 2};
    TestStream a;
    TestEvent event;
    Hold hold;
    hold_kernel<<<1, 1, 0, a>>>(hold.go.get(), y.get(), 5);
    OK(cudaMemcpyAsync(x.get(), host.data(), 2 * sizeof(float), cudaMemcpyHostToDevice, a));
    host = {3, 4};
    OK(cudaMemcpyAsync(fixed.get(), x.get(), 2 * sizeof(float), cudaMemcpyDeviceToHost, a));
    OK(cudaEventRecord(event, a));
    CHECK(cudaEventQuery(event) == cudaErrorNotReady);
    hold.release_later();
    OK(cudaEventSynchronize(event));
    CHECK(fixed.get()[0] == 1);
    CHECK(fixed.get()[1] == 2);
    // To pageable memory the call waits; from pinned memory it need not, and the host must
    fixed.get()[0] = 8;
    OK(cudaMemcpyAsync(x.get(), fixed.get(), sizeof(float), cudaMemcpyHostToDevice, a));
    OK(cudaMemcpyAsync(host.data(), x.get(), 2 * sizeof(float), cudaMemcpyDeviceToHost, a));
    CHECK(host == Floats{8, 2});
    OK(cudaMemcpy(host.data(), fixed.get(), sizeof(float), cudaMemcpyHostToHost));
    CHECK(host == Floats{8, 2});
    OK(cudaMemcpy(nullptr, nullptr, 0, cudaMemcpyHostToDevice)); // nothing to copy is no mistake
}

TEST_CASE("stand-in: cudaFree and cudaStreamDestroy wait for the device") {
    auto x = floats_on(0, 1);
    TestEvent event;
    for (bool destroy : {false, true}) {
        auto y = floats_on(0, 1);
        auto a = std::make_unique<TestStream>();
        Hold hold;
        hold_kernel<<<1, 1, 0, *a>>>(hold.go.get(), x.get(), 5);
        OK(cudaEventRecord(event, *a));
        std::thread release([&] { hold.release_later(); });
        if (destroy)
            a.reset();
        else
            y.reset();
        CHECK(cudaEventQuery(event) == cudaSuccess);
        release.join();
        CHECK(fetch(x) == 5);
    }
}

// --- memory

__global__ void fresh_kernel(float *nan) { // counts the NaN that it finds, and leaves none
    __shared__ float fixed[50];
    extern __shared__ float dynamic[];
    if (threadIdx.x == 0) {
        int count = 0;
        for (int i = 0; i < 50; i++) count += std::isnan(fixed[i]) + std::isnan(dynamic[i]);
        nan[blockIdx.x] = count;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 50; i += blockDim.x) fixed[i] = dynamic[i] = 1;
}
TEST_CASE("stand-in: fresh memory is NaN") {
    for (int n : {1, 63, 1024, 5000}) { // 1: the rest of a page, 1024: a whole page
        auto x = floats_on(0, n);
        for (float value : fetch(x, n)) REQUIRE(std::isnan(value));
        OK(cudaMemset(x.get(), 0, n * sizeof(float)));
    }
    auto nan = floats_on(0, 20);
    for (int launch = 0; launch < 2; launch++) {
        fresh_kernel<<<20, 3, 50 * sizeof(float)>>>(nan.get());
        OK(cudaGetLastError());
        CHECK(fetch(nan, 20) == Floats(20, 100));
    }
}

TEST_CASE("stand-in: cudaMemset, cudaMemGetInfo, and freeing nothing") {
    auto x = floats_on(0, 6);
    OK(cudaMemset(x.get(), 0, 6 * sizeof(float)));
    OK(cudaMemset(x.get() + 1, 0x40, 2 * sizeof(float))); // bytes: 0x40404040 is 3.0039...
    Floats got = fetch(x, 6);
    float bits;
    memset(&bits, 0x40, sizeof bits);
    CHECK(got == Floats{0, bits, bits, 0, 0, 0});

    size_t before = 0, during = 0, after = 0, other = 0, other_before = 0, total = 0;
    const size_t n = 1 << 20;
    OK(cudaSetDevice(1));
    OK(cudaMemGetInfo(&other_before, &total));
    OK(cudaSetDevice(0));
    OK(cudaMemGetInfo(&before, &total));
    CHECK(before <= total);
    {
        auto y = floats_on(0, n);
        OK(cudaMemGetInfo(&during, &total));
        OK(cudaSetDevice(1));
        OK(cudaMemGetInfo(&other, &total));
        OK(cudaSetDevice(0));
    }
    OK(cudaMemGetInfo(&after, &total));
    CHECK(before - during >= n * sizeof(float));
    CHECK(before - during <= n * sizeof(float) + 65536); // at most a page more
    CHECK(after == before);
    CHECK(other == other_before);
    OK(cudaFree(nullptr));
    OK(cudaFreeHost(nullptr));
}

// --- devices and errors

TEST_CASE("stand-in: devices") {
    int count = 0, device = -1;
    OK(cudaGetDeviceCount(&count));
    CHECK(count >= 1);
    cudaDeviceProp prop;
    OK(cudaGetDeviceProperties(&prop, count - 1));
    CHECK(strlen(prop.name) > 0);
    CHECK(prop.maxThreadsPerBlock == 1024);
    CHECK(prop.multiProcessorCount >= 1);
    CHECK(prop.sharedMemPerBlock == 48 * 1024);
    OK(cudaSetDevice(count - 1));
    std::thread([&] { cudaGetDevice(&device); }).join(); // each host thread has its own, at first 0
    CHECK(device == 0);
    OK(cudaGetDevice(&device));
    CHECK(device == count - 1);
    OK(cudaSetDevice(0));
}

TEST_CASE("stand-in: peer access") {
    int can = -1;
    OK(cudaDeviceCanAccessPeer(&can, 0, 0));
    CHECK(can == 0);
    OK(cudaDeviceCanAccessPeer(&can, 0, 1));
    CHECK(can == 1);
    OK(cudaSetDevice(0)); // main has enabled it
    CHECK(cudaDeviceEnablePeerAccess(1, 0) == cudaErrorPeerAccessAlreadyEnabled);
    OK(cudaDeviceDisablePeerAccess(1));
    CHECK(cudaDeviceDisablePeerAccess(1) == cudaErrorPeerAccessNotEnabled);
    CHECK(cudaGetLastError() == cudaErrorPeerAccessNotEnabled);
    OK(cudaDeviceEnablePeerAccess(1, 0));
    CHECK(cudaDeviceEnablePeerAccess(1, 0) == cudaErrorPeerAccessAlreadyEnabled);
    CHECK(cudaGetLastError() == cudaErrorPeerAccessAlreadyEnabled);
    OK(cudaGetLastError());
}

TEST_CASE("stand-in: cudaGetLastError forgets, cudaPeekAtLastError does not") {
    float *p = (float *)1, *x = nullptr;
    OK(cudaGetLastError());
    CHECK(cudaMalloc(&p, size_t(1) << 60) == cudaErrorMemoryAllocation);
    CHECK(p == nullptr);
    OK(cudaMalloc(&x, 4)); // a success in between does not reset it
    CHECK(cudaPeekAtLastError() == cudaErrorMemoryAllocation);
    CHECK(cudaPeekAtLastError() == cudaErrorMemoryAllocation);
    CHECK(cudaGetLastError() == cudaErrorMemoryAllocation);
    OK(cudaGetLastError());
    OK(cudaPeekAtLastError());
    CHECK(cudaMemcpy(x, &p, 4, (cudaMemcpyKind)9) == cudaErrorInvalidMemcpyDirection);
    CHECK(cudaGetLastError() == cudaErrorInvalidMemcpyDirection);
    OK(cudaFree(x));
}

TEST_CASE("stand-in: names, numbers and texts of the errors are CUDA's") {
    struct {
        cudaError_t error;
        int number;
        const char *name, *text;
    } errors[] = {
        {cudaSuccess, 0, "cudaSuccess", "no error"},
        {cudaErrorInvalidValue, 1, "cudaErrorInvalidValue", "invalid argument"},
        {cudaErrorMemoryAllocation, 2, "cudaErrorMemoryAllocation", "out of memory"},
        {cudaErrorInvalidConfiguration, 9, "cudaErrorInvalidConfiguration",
         "invalid configuration argument"},
        {cudaErrorInvalidMemcpyDirection, 21, "cudaErrorInvalidMemcpyDirection",
         "invalid copy direction for memcpy"},
        {cudaErrorNoDevice, 100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
        {cudaErrorInvalidDevice, 101, "cudaErrorInvalidDevice", "invalid device ordinal"},
        {cudaErrorPeerAccessUnsupported, 217, "cudaErrorPeerAccessUnsupported",
         "peer access is not supported between these two devices"},
        {cudaErrorInvalidResourceHandle, 400, "cudaErrorInvalidResourceHandle",
         "invalid resource handle"},
        {cudaErrorNotReady, 600, "cudaErrorNotReady", "device not ready"},
        {cudaErrorIllegalAddress, 700, "cudaErrorIllegalAddress",
         "an illegal memory access was encountered"},
        {cudaErrorPeerAccessAlreadyEnabled, 704, "cudaErrorPeerAccessAlreadyEnabled",
         "peer access is already enabled"},
        {cudaErrorPeerAccessNotEnabled, 705, "cudaErrorPeerAccessNotEnabled",
         "peer access has not been enabled"},
        {cudaErrorLaunchFailure, 719, "cudaErrorLaunchFailure", "unspecified launch failure"},
        {(cudaError_t)12345, 12345, "unrecognized error code", "unrecognized error code"},
    };
    for (auto &e : errors) {
        CHECK((int)e.error == e.number);
        CHECK(cudaGetErrorName(e.error) == std::string(e.name));
        CHECK(cudaGetErrorString(e.error) == std::string(e.text));
    }
}

// --- wrong programs
// Each runs as a child process with two devices, `tests --wrong NAME`, and has to end with a message
// that begins with the line it is wrong in, and with an exit status other than 0.

#define NEXT_LINE_IS_WRONG fprintf(stderr, "expected: %s:%d:\n", __FILE__, __LINE__ + 1)
#define MUST(call) check_cuda((call), #call, __FILE__, __LINE__)

struct WrongProgram {
    const char *name;
    void (*run)();
    std::vector<const char *> says; // what the message must contain
    const char *environment = "";
};

// n floats on a device of the child
static float *memory(int device, size_t n) {
    float *p;
    MUST(cudaSetDevice(device));
    MUST(cudaMalloc(&p, n * sizeof(float)));
    MUST(cudaSetDevice(0));
    return p;
}
static void finish() { // what a kernel did wrong shows here at the latest
    MUST(cudaGetLastError());
    MUST(cudaDeviceSynchronize());
}
static cudaStream_t new_stream(int device) {
    cudaStream_t stream;
    MUST(cudaSetDevice(device));
    MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    MUST(cudaSetDevice(0));
    return stream;
}

struct Pointers {
    int n;
    float *p[2];
};
__global__ void struct_kernel(Pointers s) { *s.p[1] = s.n; }
__global__ void hidden_kernel(uintptr_t address, int i) { ((float *)address)[i] += 1; }
__global__ void empty_kernel() {}
__global__ void static_overrun_kernel(float *x, int i) {
    __shared__ float first[10];
    __shared__ float second[10];
    first[threadIdx.x] = second[threadIdx.x] = 0;
    __syncthreads();
    *x = first[i] + second[i];
}
__global__ void dynamic_overrun_kernel(float *x, int i) {
    extern __shared__ float t[];
    t[i] = 0;
    *x = t[i];
}

// 5 and more threads; which of them is wrong about what is in the name
__global__ void thread_0_misses_kernel() {
    if (threadIdx.x > 0) {
        NEXT_LINE_IS_WRONG;
        __syncthreads();
    }
}
__global__ void thread_n_misses_kernel() {
    if (threadIdx.x != 3) {
        NEXT_LINE_IS_WRONG;
        __syncthreads();
    }
}
__global__ void different_barriers_kernel() {
    if (threadIdx.x < 3) {
        __syncthreads();
    } else {
        NEXT_LINE_IS_WRONG;
        __syncthreads();
    }
}
__global__ void thread_n_leaves_kernel() {
    for (int i = 0; i < 4; i++) {
        if (i == 2 && threadIdx.x + threadIdx.y == 5) return;
        NEXT_LINE_IS_WRONG;
        __syncthreads();
    }
}
__global__ void thread_0_leaves_kernel() {
    for (int i = 0; i < 4; i++) {
        if (i == 2 && threadIdx.x == 0) return;
        NEXT_LINE_IS_WRONG;
        __syncthreads();
    }
}
__global__ void more_turns_kernel() {
    for (unsigned i = 0; i <= threadIdx.x; i++) {
        NEXT_LINE_IS_WRONG;
        __syncthreads();
    }
}

static const std::vector<WrongProgram> wrong_programs = {
    // Arguments of kernels
    {"kernel, host pointer",
     [] {
         float x = 0;
         NEXT_LINE_IS_WRONG;
         assign_kernel<<<1, 1>>>(&x, 1);
         finish();
     },
     {"assign_kernel: argument 1", "is host memory, not memory of device 0", "cudaErrorInvalidValue"}},
    {"kernel, pointer of another device",
     [] {
         Line line = {memory(0, 8), memory(0, 8), 2, 0, 8};
         double *offset = (double *)memory(1, 2);
         NEXT_LINE_IS_WRONG;
         line_kernel<<<1, 8>>>(line, offset, false, 8);
         finish();
     },
     {"line_kernel: argument 2", "is memory of device 1, not of device 0", "cudaErrorInvalidValue"}},
    {"kernel, pointer of another device in a struct",
     [] {
         Pointers s = {1, {memory(1, 1), memory(0, 1)}};
         MUST(cudaSetDevice(1));
         NEXT_LINE_IS_WRONG;
         struct_kernel<<<1,
                         1>>>(s);
         finish();
     },
     {"struct_kernel: argument 1", "is memory of device 0, not of device 1"}},
    {"kernel, freed pointer",
     [] {
         float *p = memory(0, 10);
         MUST(cudaFree(p));
         NEXT_LINE_IS_WRONG;
         assign_kernel<<<1, 1>>>(p, 1);
         finish();
     },
     {"assign_kernel: argument 1", "is memory of device 0 that tests.cu:", "has freed"}},
    {"kernel, pointer to nothing",
     [] {
         float *p = memory(0, 10) + 100000;
         NEXT_LINE_IS_WRONG;
         assign_kernel<<<1, 1>>>(p, 1);
         finish();
     },
     {"assign_kernel: argument 1: nothing is allocated at", "on device 0"}},

    // Configurations
    {"launch, no threads",
     [] {
         NEXT_LINE_IS_WRONG;
         empty_kernel<<<1, 0>>>();
         finish();
     },
     {"empty_kernel on device 0: a block of 0 x 1 x 1 threads", "cudaErrorInvalidConfiguration"}},
    {"launch, 2000 threads",
     [] {
         MUST(cudaSetDevice(1));
         NEXT_LINE_IS_WRONG;
         empty_kernel<<<1, dim3(2, 1000)>>>();
         finish();
     },
     {"empty_kernel on device 1: a block of 2 x 1000 x 1 threads", "cudaErrorInvalidConfiguration"}},
    {"launch, z of a block",
     [] {
         NEXT_LINE_IS_WRONG;
         empty_kernel<<<1, dim3(1, 1, 65)>>>();
         finish();
     },
     {"empty_kernel on device 0: a block of 1 x 1 x 65 threads", "cudaErrorInvalidConfiguration"}},
    {"launch, no blocks",
     [] {
         NEXT_LINE_IS_WRONG;
         count_kernel<true><<<0, 32>>>(memory(0, 1));
         finish();
     },
     {"count_kernel<true> on device 0: a grid of 0 x 1 x 1 blocks", "cudaErrorInvalidConfiguration"}},
    {"launch, y of a grid",
     [] {
         NEXT_LINE_IS_WRONG;
         empty_kernel<<<dim3(1, 65536), 1>>>();
         finish();
     },
     {"empty_kernel on device 0: a grid of 1 x 65536 x 1 blocks", "cudaErrorInvalidConfiguration"}},
    {"launch, shared memory",
     [] {
         NEXT_LINE_IS_WRONG;
         empty_kernel<<<1, 1, 48 * 1024 + 1>>>();
         finish();
     },
     {"empty_kernel on device 0: 49153 bytes of shared memory", "cudaErrorInvalidConfiguration"}},
    {"launch, stream of another device",
     [] {
         cudaStream_t stream = new_stream(1);
         NEXT_LINE_IS_WRONG;
         empty_kernel<<<1, 1, 0, stream>>>();
         finish();
     },
     {"empty_kernel: the stream belongs to device 1, but the current device is 0",
      "cudaErrorInvalidResourceHandle"}},
    {"event on a stream of another device",
     [] {
         cudaEvent_t event;
         cudaStream_t stream = new_stream(1);
         MUST(cudaEventCreate(&event));
         NEXT_LINE_IS_WRONG;
         MUST(cudaEventRecord(event, stream));
     },
     {"cudaEventRecord: the event belongs to device 0, the stream to device 1",
      "cudaErrorInvalidResourceHandle"}},

    // Barriers
    {"barrier, thread 0 misses it",
     [] {
         thread_0_misses_kernel<<<3, 5>>>();
         finish();
     },
     {"thread_0_misses_kernel on device 0: divergent barrier in block (", ",0,0): thread (1,0,0) waits",
      "but thread (0,0,0) ended without meeting it", "cudaErrorLaunchFailure"}},
    {"barrier, thread 3 misses it",
     [] {
         MUST(cudaSetDevice(1));
         thread_n_misses_kernel<<<1, 5>>>();
         finish();
     },
     {"thread_n_misses_kernel on device 1: divergent barrier in block (0,0,0): thread (3,0,0) has ended",
      "but thread (0,0,0) waits at the barrier in tests.cu:", "cudaErrorLaunchFailure"}},
    {"barrier, two at once",
     [] {
         different_barriers_kernel<<<1, 5>>>();
         finish();
     },
     {"different_barriers_kernel on device 0: divergent barrier in block (0,0,0): thread (3,0,0) waits",
      "but thread (0,0,0) waits at the barrier in tests.cu:"}},
    {"barrier, a thread leaves early",
     [] {
         thread_n_leaves_kernel<<<1, dim3(5, 2)>>>();
         finish();
     },
     {"thread_n_leaves_kernel on device 0: divergent barrier in block (0,0,0): thread (4,1,0) has ended"}},
    {"barrier, thread 0 leaves early",
     [] {
         thread_0_leaves_kernel<<<1, 5>>>();
         finish();
     },
     {"thread_0_leaves_kernel on device 0: divergent barrier", "thread (1,0,0) waits",
      "but thread (0,0,0) has ended"}},
    {"barrier, more turns for some",
     [] {
         more_turns_kernel<<<1, 2>>>();
         finish();
     },
     {"more_turns_kernel on device 0: divergent barrier", "thread (1,0,0) waits",
      "but thread (0,0,0) has ended"}},

    // Copies between devices
    {"cudaMemcpyPeer, no such device",
     [] {
         float *x = memory(0, 1), *y = memory(1, 1);
         NEXT_LINE_IS_WRONG;
         MUST(cudaMemcpyPeer(y, 2, x, 0, 4));
     },
     {"cudaMemcpyPeer: from device 0 to device 2, of 2", "cudaErrorInvalidDevice"}},
    {"cudaMemcpyPeer, devices exchanged",
     [] {
         float *x = memory(0, 1), *y = memory(1, 1);
         NEXT_LINE_IS_WRONG;
         MUST(cudaMemcpyPeer(y, 0, x, 1, 4));
     },
     {"cudaMemcpyPeer, destination", "is memory of device 1, not of device 0"}},
    {"cudaMemcpyPeer, wrong source device",
     [] {
         float *x = memory(0, 1), *y = memory(1, 1);
         NEXT_LINE_IS_WRONG;
         MUST(cudaMemcpyPeer(y, 1, x, 1, 4));
     },
     {"cudaMemcpyPeer, source", "is memory of device 0, not of device 1", "cudaErrorInvalidValue"}},
    {"cudaMemcpyPeer, overrun",
     [] {
         float *x = memory(0, 3), *y = memory(1, 4);
         NEXT_LINE_IS_WRONG;
         MUST(cudaMemcpyPeer(y, 1, x + 1, 0, 12));
     },
     {"cudaMemcpyPeer, source: 12 bytes from byte 4 on overrun the 12 bytes that tests.cu:",
      "allocated on device 0"}},
    {"cudaMemcpyPeerAsync, no such device",
     [] {
         float *x = memory(0, 1), *y = memory(1, 1);
         NEXT_LINE_IS_WRONG;
         MUST(cudaMemcpyPeerAsync(y, 1, x, -1, 4));
     },
     {"cudaMemcpyPeerAsync: from device -1 to device 1, of 2", "cudaErrorInvalidDevice"}},
    {"cudaMemcpyPeerAsync, devices exchanged",
     [] {
         float *x = memory(0, 1), *y = memory(1, 1);
         cudaStream_t stream = new_stream(1);
         NEXT_LINE_IS_WRONG;
         MUST(cudaMemcpyPeerAsync(y, 0, x, 1, 4, stream));
     },
     {"cudaMemcpyPeerAsync, destination", "is memory of device 1, not of device 0"}},
    {"cudaMemcpyPeerAsync, overrun",
     [] {
         float *x = memory(0, 4), *y = memory(1, 3);
         NEXT_LINE_IS_WRONG;
         MUST(cudaMemcpyPeerAsync(y, 1, x, 0, 16));
     },
     {"cudaMemcpyPeerAsync, destination: 16 bytes from byte 0 on overrun the 12 bytes that tests.cu:",
      "allocated on device 1"}},
    {"cudaMemcpyPeer, host memory",
     [] {
         float *y = memory(1, 4), *x;
         MUST(cudaMallocHost(&x, 16));
         NEXT_LINE_IS_WRONG;
         MUST(cudaMemcpyPeer(y, 1, x, 0, 16));
     },
     {"cudaMemcpyPeer, source", "is pinned host memory, not memory of device 0"}},

    // Copies between host and device
    {"cudaMemcpy, overrun to the device",
     [] {
         Floats host(10);
         float *p = memory(0, 9);
         NEXT_LINE_IS_WRONG;
         MUST(cudaMemcpy(p, host.data(), 40, cudaMemcpyHostToDevice));
     },
     {"cudaMemcpy, destination: 40 bytes from byte 0 on overrun the 36 bytes that tests.cu:",
      "allocated on device 0"}},
    {"cudaMemcpy, overrun from the device",
     [] {
         Floats host(10);
         float *p = memory(1, 9);
         MUST(cudaSetDevice(1));
         NEXT_LINE_IS_WRONG;
         MUST(cudaMemcpy(host.data(), p + 8, 8, cudaMemcpyDeviceToHost));
     },
     {"cudaMemcpy, source: 8 bytes from byte 32 on overrun the 36 bytes", "allocated on device 1"}},
    {"cudaMemcpy, overrun on the device",
     [] {
         float *x = memory(0, 10), *y = memory(0, 9);
         NEXT_LINE_IS_WRONG;
         MUST(cudaMemcpy(y, x, 40, cudaMemcpyDeviceToDevice));
     },
     {"cudaMemcpy, destination: 40 bytes from byte 0 on overrun the 36 bytes"}},
    {"cudaMemcpyAsync, overrun on the device",
     [] {
         float *x = memory(0, 9), *y = memory(0, 10);
         NEXT_LINE_IS_WRONG;
         MUST(cudaMemcpyAsync(y, x, 40, cudaMemcpyDeviceToDevice));
     },
     {"cudaMemcpyAsync, source: 40 bytes from byte 0 on overrun the 36 bytes"}},
    {"cudaMemcpyAsync, overrun to the device",
     [] {
         Floats host(10);
         float *p = memory(0, 9);
         NEXT_LINE_IS_WRONG;
         MUST(cudaMemcpyAsync(p, host.data(), 40, cudaMemcpyHostToDevice, new_stream(0)));
     },
     {"cudaMemcpyAsync, destination: 40 bytes from byte 0 on overrun the 36 bytes"}},
    {"cudaMemset, overrun",
     [] {
         float *p = memory(0, 9);
         NEXT_LINE_IS_WRONG;
         MUST(cudaMemset(p, 0, 40));
     },
     {"cudaMemset", "40 bytes from byte 0 on overrun the 36 bytes"}},
    {"cudaMemset, host memory",
     [] {
         float x;
         NEXT_LINE_IS_WRONG;
         MUST(cudaMemset(&x, 0, 4));
     },
     {"cudaMemset", "is host memory, not memory of device 0"}},
    {"cudaMemcpy, host memory as destination on the device",
     [] {
         float x = 0, y = 0;
         NEXT_LINE_IS_WRONG;
         MUST(cudaMemcpy(&y, &x, 4, cudaMemcpyHostToDevice));
     },
     {"cudaMemcpy, destination", "is host memory, not memory of device 0: allocate it with cudaMalloc"}},
    {"cudaMemcpy, host memory as source on the device",
     [] {
         float x = 0, y = 0;
         NEXT_LINE_IS_WRONG;
         MUST(cudaMemcpy(&y, &x, 4, cudaMemcpyDeviceToHost));
     },
     {"cudaMemcpy, source", "is host memory, not memory of device 0: allocate it with cudaMalloc"}},
    {"cudaMemcpy, device memory as source on the host",
     [] {
         float *x = memory(1, 1), *y = memory(0, 1);
         NEXT_LINE_IS_WRONG;
         MUST(cudaMemcpy(y, x, 4, cudaMemcpyHostToDevice));
     },
     {"cudaMemcpy: the source", "is memory of device 1, not of the host"}},
    {"cudaMemcpy, device memory as destination on the host",
     [] {
         float *x = memory(0, 1), *y = memory(0, 1);
         NEXT_LINE_IS_WRONG;
         MUST(cudaMemcpy(y, x, 4, cudaMemcpyDeviceToHost));
     },
     {"cudaMemcpy: the destination", "is memory of device 0, not of the host"}},
    {"cudaMemcpyAsync, freed memory",
     [] {
         float *x = memory(0, 1), y;
         MUST(cudaFree(x));
         NEXT_LINE_IS_WRONG;
         MUST(cudaMemcpyAsync(&y, x, 4, cudaMemcpyDeviceToHost));
     },
     {"cudaMemcpyAsync, source", "is memory of device 0 that tests.cu:", "has freed"}},

    // Memory
    {"cudaFree, host memory",
     [] {
         float x;
         NEXT_LINE_IS_WRONG;
         MUST(cudaFree(&x));
     },
     {"cudaFree:", "is not what cudaMalloc returned", "cudaErrorInvalidValue"}},
    {"cudaFree, the middle",
     [] {
         float *p = memory(0, 10);
         NEXT_LINE_IS_WRONG;
         MUST(cudaFree(p + 1));
     },
     {"cudaFree:", "is not what cudaMalloc returned"}},
    {"cudaFree, twice",
     [] {
         float *p = memory(1, 10);
         MUST(cudaFree(p));
         NEXT_LINE_IS_WRONG;
         MUST(cudaFree(p));
     },
     {"cudaFree:", "on device 1, which tests.cu:", "has freed already"}},
    {"cudaFreeHost, twice",
     [] {
         float *p;
         MUST(cudaMallocHost(&p, 16));
         MUST(cudaFreeHost(p));
         NEXT_LINE_IS_WRONG;
         MUST(cudaFreeHost(p));
     },
     {"cudaFreeHost:", "is not what cudaMallocHost returned"}},
    {"out of memory",
     [] {
         float *p = memory(0, 3 << 20), *q = memory(1, 4 << 20), *r; // 12 MiB of 16, 16 MiB of 16
         MUST(cudaFree(p));
         p = memory(0, 3 << 20);
         MUST(cudaFree(q));
         fprintf(stderr, "expected: mgpu: %s:%d:\n", __FILE__, __LINE__ + 1);
         MUST(cudaMalloc(&r, 5 << 20));
     },
     {"out of memory", "cudaErrorMemoryAllocation"},
     "CUDA_CPU_MEMORY=16"},
    {"no such device",
     [] {
         NEXT_LINE_IS_WRONG;
         MUST(cudaSetDevice(2));
     },
     {"cudaSetDevice: device 2 of 2", "cudaErrorInvalidDevice"}},
    {"no such peer",
     [] {
         int can;
         NEXT_LINE_IS_WRONG;
         MUST(cudaDeviceCanAccessPeer(&can, 0, 2));
     },
     {"cudaDeviceCanAccessPeer: devices 0 and 2 of 2", "cudaErrorInvalidDevice"}},
    {"peer of itself",
     [] {
         NEXT_LINE_IS_WRONG;
         MUST(cudaDeviceEnablePeerAccess(0, 0));
     },
     {"cudaDeviceEnablePeerAccess: device 0 to device 0", "cudaErrorInvalidDevice"}},
    {"wrong setting",
     [] {
         fprintf(stderr, "expected: CUDA_CPU_CORES=two\n");
         memory(0, 1);
     },
     {"a whole number from 1"},
     "CUDA_CPU_CORES=two"},

    // Accesses inside kernels, to memory that is not mapped
#if defined(CUDA_CPU_ASAN) || defined(CUDA_CPU_TSAN)
#define FAULT_IS_EXPECTED fprintf(stderr, "expected: ==\n") // the sanitizer has a report of its own
#define FAULT(...) {"Sanitizer: "}
#else
#define FAULT_IS_EXPECTED NEXT_LINE_IS_WRONG
#define FAULT(...) {__VA_ARGS__}
#endif
    {"access, after cudaFree",
     [] {
         float *p = memory(1, 10);
         MUST(cudaFree(p));
         MUST(cudaSetDevice(1));
         FAULT_IS_EXPECTED;
         hidden_kernel<<<1, 1>>>((uintptr_t)p, 3);
         finish();
     },
     FAULT("hidden_kernel on device 1: access to memory of device 1, byte 12 of the 40 bytes that tests.cu:",
           "has freed", "cudaErrorIllegalAddress")},
    {"access, a page past the end",
     [] {
         float *p = memory(0, 10);
         FAULT_IS_EXPECTED;
         hidden_kernel<<<1, 1>>>((uintptr_t)p, 1024);
         finish();
     },
     FAULT("hidden_kernel on device 0: access to memory of device 0, byte 4096 of the 40 bytes that tests.cu:",
           "allocated", "cudaErrorIllegalAddress")},
    {"access, by the host after cudaFree",
     [] {
         volatile float *p = memory(1, 10);
         MUST(cudaFree((float *)p));
#if !defined(CUDA_CPU_ASAN) && !defined(CUDA_CPU_TSAN)
         fprintf(stderr, "expected: the host accesses memory of device 1\n");
#else
         FAULT_IS_EXPECTED;
#endif
         p[2] = 1;
     },
     FAULT("byte 8 of the 40 bytes that tests.cu:", "has freed", "cudaErrorIllegalAddress")},

#ifdef CUDA_CPU_ASAN // Accesses to memory that is mapped, but not theirs
    {"access, one past the end",
     [] {
         float *p = memory(0, 10);
         fprintf(stderr, "expected: ==\n");
         hidden_kernel<<<1, 1>>>((uintptr_t)p, 10);
         finish();
     },
     {"AddressSanitizer: use-after-poison"}},
    {"access, one before the beginning",
     [] {
         float *p = memory(0, 10);
         fprintf(stderr, "expected: ==\n");
         hidden_kernel<<<1, 1>>>((uintptr_t)p, -1);
         finish();
     },
     {"AddressSanitizer: use-after-poison"}},
    {"access, one past a shared array",
     [] {
         fprintf(stderr, "expected: ==\n");
         static_overrun_kernel<<<1, 10>>>(memory(0, 1), 10);
         finish();
     },
     {"AddressSanitizer: use-after-poison"}},
    {"access, one past dynamic shared memory",
     [] {
         fprintf(stderr, "expected: ==\n");
         dynamic_overrun_kernel<<<1, 1, 40>>>(memory(0, 1), 10);
         finish();
     },
     {"AddressSanitizer: use-after-poison"}},
    {"access, a copy past the end of host memory",
     [] {
         float *p = memory(0, 10);
         Floats host(9);
         fprintf(stderr, "expected: ==\n");
         MUST(cudaMemcpy(host.data(), p, 40, cudaMemcpyDeviceToHost));
     },
     {"AddressSanitizer: heap-buffer-overflow"}},
    {"access, a copy past the end of pinned memory",
     [] {
         float *p = memory(0, 10), *host;
         MUST(cudaMallocHost(&host, 36));
         fprintf(stderr, "expected: ==\n");
         MUST(cudaMemcpy(p, host, 40, cudaMemcpyHostToDevice));
     },
     {"AddressSanitizer: use-after-poison"}},
#endif
};

// Programs that lack one thing, and the same with it: ThreadSanitizer has to tell them apart.
struct RaceProgram {
    const char *name;
    void (*run)(bool right);
};

__global__ void neighbour_kernel(float *x, bool right) { // one more barrier: written, then read
    __shared__ float t[4];
    t[threadIdx.x] = threadIdx.x;
    if (right) __syncthreads();
    x[threadIdx.x] = t[3 - threadIdx.x];
}
__global__ void loop_kernel(float *x, bool right) { // one more barrier: read, then written
    extern __shared__ float t[];
    for (int i = 0; i < 3; i++) {
        t[threadIdx.x] = i;
        __syncthreads();
        x[threadIdx.x] = t[3 - threadIdx.x];
        if (right) __syncthreads();
    }
}
__global__ void blocks_kernel(float *x, bool right) { x[right ? blockIdx.x : 0] = blockIdx.x; }
__global__ void threads_kernel(float *x, bool right) { x[right ? threadIdx.x : 0] = threadIdx.x; }

static cudaEvent_t new_event(int device) {
    cudaEvent_t event;
    MUST(cudaSetDevice(device));
    MUST(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    MUST(cudaSetDevice(0));
    return event;
}
static void wait_for(cudaStream_t waiting, int device, cudaStream_t stream) {
    cudaEvent_t event = new_event(device);
    MUST(cudaEventRecord(event, stream));
    MUST(cudaStreamWaitEvent(waiting, event));
}
static void finish_both() {
    for (int device : {1, 0}) {
        MUST(cudaSetDevice(device));
        finish();
    }
}

static const std::vector<RaceProgram> race_programs = {
    {"barrier before reading",
     [](bool right) {
         neighbour_kernel<<<1, 4>>>(memory(0, 4), right);
         finish();
     }},
    {"barrier before writing again",
     [](bool right) {
         loop_kernel<<<1, 4, 16>>>(memory(0, 4), right);
         finish();
     }},
    {"an element for each thread",
     [](bool right) {
         threads_kernel<<<1, 2>>>(memory(0, 2), right);
         finish();
     }},
    {"an element for each block",
     [](bool right) {
         blocks_kernel<<<2, 1>>>(memory(0, 2), right);
         finish();
     }},
    {"event between streams",
     [](bool right) {
         float *x = memory(0, 1);
         cudaStream_t a = new_stream(0), b = new_stream(0);
         assign_kernel<<<1, 1, 0, a>>>(x, 1);
         if (right) wait_for(b, 0, a);
         plus_kernel<<<1, 1, 0, b>>>(x, 2);
         finish();
     }},
    {"event recorded after the work",
     [](bool right) {
         float *x = memory(0, 1);
         cudaStream_t a = new_stream(0), b = new_stream(0);
         if (!right) wait_for(b, 0, a);
         assign_kernel<<<1, 1, 0, a>>>(x, 1);
         if (right) wait_for(b, 0, a);
         plus_kernel<<<1, 1, 0, b>>>(x, 2);
         finish();
     }},
    {"event before a copy between devices",
     [](bool right) {
         float *x = memory(0, 1), *y = memory(1, 1);
         cudaStream_t a = new_stream(0), b = new_stream(1);
         assign_kernel<<<1, 1, 0, a>>>(x, 1);
         if (right) wait_for(b, 0, a);
         MUST(cudaMemcpyPeerAsync(y, 1, x, 0, 4, b));
         finish_both();
     }},
    {"event after a copy between devices",
     [](bool right) {
         float *x = memory(0, 1), *y = memory(1, 1);
         cudaStream_t a = new_stream(0), b = new_stream(1);
         MUST(cudaMemcpyPeerAsync(y, 1, x, 0, 4, b));
         if (right) wait_for(a, 1, b);
         assign_kernel<<<1, 1, 0, a>>>(x, 1);
         finish_both();
     }},
    {"cudaMemcpyPeer orders, cudaMemcpyPeerAsync does not",
     [](bool right) {
         float *x = memory(0, 1), *y = memory(1, 1);
         cudaStream_t a = new_stream(0), b = new_stream(1);
         assign_kernel<<<1, 1, 0, a>>>(x, 1);
         if (right)
             MUST(cudaMemcpyPeer(y, 1, x, 0, 4));
         else
             MUST(cudaMemcpyPeerAsync(y, 1, x, 0, 4));
         MUST(cudaSetDevice(1));
         plus_kernel<<<1, 1, 0, b>>>(y, 1);
         finish_both();
     }},
    {"the default stream orders a stream that blocks",
     [](bool right) {
         float *x = memory(0, 1);
         cudaStream_t a;
         MUST(cudaStreamCreateWithFlags(&a, right ? cudaStreamDefault : cudaStreamNonBlocking));
         assign_kernel<<<1, 1, 0, a>>>(x, 1);
         plus_kernel<<<1, 1>>>(x, 2);
         plus_kernel<<<1, 1, 0, a>>>(x, 3);
         finish();
     }},
    {"wait before writing pinned memory again",
     [](bool right) {
         float *x = memory(0, 1), *host;
         MUST(cudaMallocHost(&host, 4));
         *host = 1;
         cudaStream_t a = new_stream(0);
         cudaEvent_t copied = new_event(0);
         MUST(cudaMemcpyAsync(x, host, 4, cudaMemcpyHostToDevice, a));
         MUST(cudaEventRecord(copied, a));
         if (right) MUST(cudaEventSynchronize(copied));
         *host = 2;
         finish();
     }},
    {"wait before reading pinned memory",
     [](bool right) {
         float *x = memory(0, 1), *host;
         MUST(cudaMallocHost(&host, 4));
         cudaStream_t a = new_stream(0);
         assign_kernel<<<1, 1, 0, a>>>(x, 1);
         MUST(cudaMemcpyAsync(host, x, 4, cudaMemcpyDeviceToHost, a));
         if (right) MUST(cudaStreamSynchronize(a));
         volatile float read = *host;
         (void)read;
         finish();
     }},
    {"query before reading what a kernel writes",
     [](bool right) {
         float *host;
         MUST(cudaMallocHost(&host, 4));
         cudaStream_t a = new_stream(0);
         cudaEvent_t set = new_event(0);
         assign_kernel<<<1, 1, 0, a>>>(host, 1);
         MUST(cudaEventRecord(set, a));
         while (right && cudaEventQuery(set) == cudaErrorNotReady) usleep(100);
         volatile float read = *host;
         (void)read;
         finish();
     }},
};

// What `tests --wrong NAME` does: 0 means that nothing was found wrong.
static int run_wrong_program(const std::string &name) {
    alarm(60); // one that hangs has failed
    for (const WrongProgram &program : wrong_programs)
        if (name == program.name) {
            program.run();
            return 0;
        }
    for (const RaceProgram &program : race_programs)
        for (bool right : {false, true})
            if (name == std::string(right ? "right: " : "race: ") + program.name) {
                program.run(right);
                return 0;
            }
    fprintf(stderr, "tests: no wrong program is called %s\n", name.c_str());
    return 2;
}

// Everything that the program prints, and its exit status, which is not 0 after a signal either.
// ThreadSanitizer would give unfinished threads a second at the end: none that matters is unfinished.
static std::pair<std::string, int> output_of(const std::string &name, const std::string &environment) {
    std::string command = environment + " TSAN_OPTIONS=\"$TSAN_OPTIONS atexit_sleep_ms=0 exitcode=66\" " +
                          "CUDA_CPU_DEVICES=2 /proc/" + std::to_string(getpid()) + "/exe --wrong '" +
                          name + "' 2>&1 </dev/null";
    FILE *pipe = popen(command.c_str(), "r");
    REQUIRE(pipe);
    std::string output;
    for (char text[4096]; size_t n = fread(text, 1, sizeof text, pipe);) output.append(text, n);
    return {output, pclose(pipe)};
}

TEST_CASE("stand-in: wrong programs are told what is wrong, and in which line") {
    for (const WrongProgram &program : wrong_programs) {
        auto [output, status] = output_of(program.name, program.environment);
        CAPTURE(program.name);
        CAPTURE(output);
        CHECK(status != 0);
        const std::string expected = "expected: ";
        const size_t at = output.find(expected), end = output.find('\n', at);
        CHECK(at != std::string::npos);
        if (at == std::string::npos) continue;
        const std::string place = output.substr(at + expected.size(), end - at - expected.size());
        // The first line that begins with the place
        const size_t begin = output.find("\n" + place, end);
        CHECK(begin != std::string::npos);
        if (begin == std::string::npos) continue;
        const std::string message = output.substr(begin + 1, output.find('\n', begin + 1) - begin - 1);
        CAPTURE(message);
        for (const char *part : program.says) {
            CAPTURE(part);
            CHECK(message.find(part) != std::string::npos);
        }
    }
}

TEST_CASE("stand-in: right programs are told nothing") {
    auto [output, status] = output_of("no such name", "");
    CHECK(status != 0);
    CHECK(output.find("no wrong program is called") != std::string::npos);
    for (const RaceProgram &program : race_programs) { // in any build
        auto [output, status] = output_of(std::string("right: ") + program.name, "");
        CAPTURE(program.name);
        CHECK(output == "");
        CHECK(status == 0);
    }
}

#ifdef CUDA_CPU_TSAN
TEST_CASE("stand-in: ThreadSanitizer sees each missing barrier, event and wait") {
    for (const RaceProgram &program : race_programs) {
        auto [output, status] = output_of(std::string("race: ") + program.name, "");
        CAPTURE(program.name);
        CAPTURE(output);
        CHECK(status != 0);
        CHECK(output.find("ThreadSanitizer: data race") != std::string::npos);
        CHECK(output.find("tests.cu:") != std::string::npos); // the line of one of the two
    }
}
#else
TEST_CASE("stand-in: races") { MESSAGE("skipped: needs ThreadSanitizer (make race)"); }
#endif

#else // CUDA_CPU

TEST_CASE("stand-in") { MESSAGE("skipped: needs the CPU stand-in (make test BACKEND=cpu)"); }

#endif

// ---------------------------------------------------------------------------------------------
// Program

int main(int argc, char **argv) {
#ifdef CUDA_CPU
    if (argc == 3 && strcmp(argv[1], "--wrong") == 0) return run_wrong_program(argv[2]);
#endif
    if (argc > 1 && strcmp(argv[1], "--program") == 0) return mgpu_main(argc - 1, argv + 1);
#ifdef CUDA_CPU
    setenv("CUDA_CPU_DEVICES", std::to_string(most_devices).c_str(), 0);
#endif
    try {
        use_devices(most_devices, true);
    } catch (const Error &e) {
        fprintf(stderr, "tests: %s\n", e.what());
        return 1;
    }
    doctest::Context context(argc, argv);
    return context.run();
}
