// Tests of the other two networks and of their operators, as tests.cu has them for mgpu.cu.
//
//     make test T='-tc=batch_norm*'
//
// defines: main

#define MGPU_NO_MAIN
#include "networks.cu"

#define TESTS_SHARED
#include "../../tests.cu"

const doctest::skip slow(small_only); // under sanitizers

// ---------------------------------------------------------------------------------------------
// What the tests of operators share

static Doubles doubles(const Tensor &t) {
    const Floats numbers = to_host(t);
    return {numbers.begin(), numbers.end()};
}

typedef std::vector<Doubles> Arrays;
typedef std::function<Doubles(const Arrays &in)> Reference; // in double, from plain loops

// Check that `got` is the gradient of sum(dy * f()) with respect to x, which f reads: compare the
// slope in a random direction. h is the step, whose square must be small.
static void check_slope(const Floats &got, Doubles &x, const Doubles &dy,
                        const std::function<Doubles()> &f, double rel, double h) {
    const Doubles at = x;
    const Floats direction = random_floats(x.size(), 9);
    double sums[2], slope = 0, largest = 0;
    for (int side : {0, 1}) {
        for (size_t i = 0; i < x.size(); i++) x[i] = at[i] + (side ? h : -h) * direction[i];
        const Doubles y = f();
        sums[side] = std::inner_product(y.begin(), y.end(), dy.begin(), 0.0);
    }
    x = at;
    REQUIRE(got.size() == x.size());
    for (size_t i = 0; i < x.size(); i++) {
        slope += (double)got[i] * direction[i];
        largest = std::max(largest, std::fabs((double)got[i]));
    }
    const double want = (sums[1] - sums[0]) / (2 * h);
    CAPTURE(slope);
    CAPTURE(want);
    CHECK(largest < INFINITY);
    CHECK(std::fabs(slope - want) <= rel * largest * std::sqrt(x.size()));
}

// Check an operator on inputs of these shapes: its result against a reference, its gradients
// against the reference's slopes. It is used twice, so each gradient is a sum. `rel` belongs to the
// result and then to each gradient.
static void check_operator(const std::vector<Ints> &shapes,
                           const std::function<Tensor(const Tensors &in)> &op,
                           const Reference &reference, const Doubles &rel, double h = 1e-3) {
    Tensors in;
    Arrays exact;
    for (const Ints &shape : shapes) {
        Floats x = random_floats(size({cpu(), shape}), in.size() + 1);
        for (float &number : x) {
            number += std::copysign(0.01f, number); // relu bends at 0
        }
        in.push_back(with_grad(x, shape));
        exact.push_back({x.begin(), x.end()});
    }
    const Doubles y = reference(exact);
    const Tensors ys = {op(in), op(in)};
    check_close(to_host(ys[0]), y, rel[0]);
    check_close(to_host(ys[1]), y, rel[0]);
    const std::vector<Floats> dys = {random_floats(y.size(), 10), random_floats(y.size(), 11)};
    backward_from(ys, dys);
    Doubles dy;
    for (size_t i = 0; i < y.size(); i++) dy.push_back((double)dys[0][i] + dys[1][i]);
    for (size_t i = 0; i < in.size(); i++) {
        INFO("gradient of input ", i);
        CHECK(in[i].grad->shape == in[i].shape);
        check_slope(
            grad(in[i]), exact[i], dy, [&] { return reference(exact); }, rel[i + 1], h);
    }
}

// ---------------------------------------------------------------------------------------------
// 1. Operators

TEST_CASE("add: result and gradients") {
    auto reference = [](const Arrays &in) {
        Doubles y = in[0];
        for (size_t i = 0; i < y.size(); i++) y[i] += in[1][i];
        return y;
    };
    for (const Ints &shape : {Ints{1}, {255}, {2, 3, 4, 5}, {1001}, {0, 3}})
        check_operator({shape, shape}, [](auto &in) { return add(in[0], in[1]); }, reference,
                       {1e-7, 1e-7, 1e-7});
    const Tensor X = with_grad({1, 2, 3}, {3});
    backward(add(add(X, X), X));
    CHECK(grad(X) == Floats{3, 3, 3});
}

struct PoolSizes {
    int N, C, H, W, K;
};
static Doubles max_pool2d_reference(const Doubles &X, const PoolSizes &s) {
    Doubles y;
    for (int plane = 0; plane < s.N * s.C; plane++)
        for (int i = 0; i < s.H / s.K; i++)
            for (int j = 0; j < s.W / s.K; j++) {
                double largest = -INFINITY;
                for (int u = 0; u < s.K; u++)
                    for (int v = 0; v < s.K; v++)
                        largest =
                            std::max(largest, X[(plane * s.H + i * s.K + u) * s.W + j * s.K + v]);
                y.push_back(largest);
            }
    return y;
}
TEST_CASE("max_pool2d: result and gradient") {
    const PoolSizes sizes[] = {{1, 1, 1, 1, 1},
                               {2, 3, 4, 6, 2},
                               {0, 2, 4, 4, 2},
                               {2, 20, 26, 26, 2},
                               {2, 1, 9, 9, 2}, // the ninth row and column are in no window
                               {3, 2, 7, 5, 3},
                               {1, 300, 3, 5, 3}};
    for (const PoolSizes &s : sizes) {
        INFO(str(Ints{s.N, s.C, s.H, s.W, s.K}));
        check_operator(
            {{s.N, s.C, s.H, s.W}}, [&](auto &in) { return max_pool2d(in[0], s.K, s.K); },
            [&](auto &in) { return max_pool2d_reference(in[0], s); },
            // the largest number itself, if no step changes which one that is
            {0, 1e-6}, 1e-7);
    }
}

TEST_CASE("max_pool2d: of equal numbers the first gets the gradient; NaN is not lost") {
    auto dX = [](int H, int W, const Floats &numbers) {
        const Tensor X = with_grad(numbers, {1, 1, H, W});
        backward(max_pool2d(X, 2, 2));
        return grad(X);
    };
    CHECK(dX(4, 4, Floats(16, 7)) == Floats{1, 0, 1, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0});
    CHECK(dX(2, 4, {-1, -1, -3, -INFINITY, -1, -1, -2, -2}) == Floats{1, 0, 0, 0, 0, 0, 1, 0});
    const Floats nans = {1, NAN, INFINITY, 1, NAN, 2, 1, NAN};
    CHECK(dX(2, 4, nans) == Floats{0, 1, 0, 0, 0, 0, 0, 1});
    for (float largest : to_host(max_pool2d(on_device(nans, {1, 1, 2, 4}), 2, 2)))
        CHECK(std::isnan(largest));
}

TEST_CASE("global_avg_pool2d: the mean of each plane") {
    for (const Ints &shape : std::vector<Ints>{{3, 5, 7, 7}, {1, 300, 2, 2}, {0, 3, 2, 2}}) {
        CAPTURE(shape);
        const int plane = shape[2] * shape[3];
        auto mean = [=](const Arrays &in) {
            Doubles y(shape[0] * shape[1]);
            for (size_t i = 0; i < in[0].size(); i++) y[i / plane] += in[0][i] / plane;
            return y;
        };
        check_operator(
            {shape}, [](auto &in) { return global_avg_pool2d(in[0]); }, mean,
            {rounding(plane), rounding(plane)}, 1e-7);
    }
    CHECK(global_avg_pool2d(full({2, 3, 9, 9}, 0, gpu(0))).shape == Ints{2, 3});
}

struct ConvSizes {
    int N, C, H, W, O, K, S = 1, P = 0; // stride, padding
    int OH() const { return (H + 2 * P - K) / S + 1; }
    int OW() const { return (W + 2 * P - K) / S + 1; }
};
static Doubles conv2d_reference(const Doubles &X, const Doubles &W, const Doubles &b,
                                const ConvSizes &s) {
    Doubles y;
    for (int n = 0; n < s.N; n++)
        for (int o = 0; o < s.O; o++)
            for (int i = -s.P; i < s.OH() * s.S - s.P; i += s.S)
                for (int j = -s.P; j < s.OW() * s.S - s.P; j += s.S) {
                    double sum = b[o];
                    for (int c = 0; c < s.C; c++)
                        for (int h = std::max(i, 0); h < std::min(i + s.K, s.H); h++) {
                            const double *x = &X[((n * s.C + c) * s.H + h) * s.W];
                            const double *w = &W[((o * s.C + c) * s.K + h - i) * s.K];
                            const int first = std::max(-j, 0), end = std::min(s.K, s.W - j);
                            for (int v = first; v < end; v++) sum += x[j + v] * w[v];
                        }
                    y.push_back(sum);
                }
    return y;
}
TEST_CASE("conv2d: result and gradients with strides and padding") {
    // clang-format off
    std::vector<ConvSizes> sizes = {
        // N C H W O K
        // S P: one pixel among zeros, as large as before, half as large, what is left over, pixels
        // in no window, more zeros than the kernel reaches over, gaps, windows of zeros alone, none
        {1, 1, 1, 1, 1, 3, 1, 1}, {2, 3, 5, 7, 4, 3, 1, 1}, {2, 3, 6, 9, 4, 3, 2, 1},
        {2, 3, 9, 6, 4, 3, 2, 0}, {2, 5, 8, 7, 17, 1, 2, 0}, {2, 3, 7, 5, 3, 1, 1, 2},
        {1, 2, 5, 6, 3, 2, 5, 1}, {3, 2, 11, 9, 3, 5, 3, 2}, {2, 2, 4, 5, 3, 4, 2, 3},
        {1, 2, 3, 9, 2, 3, 4, 0}, {2, 3, 4, 9, 3, 3, 1, 4}, {0, 3, 6, 6, 4, 3, 2, 1}};
    const ConvSizes large[] = {{2, 40, 13, 14, 40, 3, 1, 1}, {2, 40, 14, 14, 72, 1, 2, 0},
                               {2, 256, 7, 7, 48, 3, 2, 1}, {5, 128, 2, 2, 72, 3, 1, 1}};
    // clang-format on
    if (!small_only) sizes.insert(sizes.end(), std::begin(large), std::end(large));
    for (const ConvSizes &s : sizes) {
        CAPTURE((Ints{s.N, s.C, s.H, s.W, s.O, s.K, s.S, s.P}));
        const int taps = s.K * s.K, pixels = s.N * s.OH() * s.OW();
        if (no_training && s.O * (pixels + taps) > 300) continue;
        check_operator(
            {{s.N, s.C, s.H, s.W}, {s.O, s.C, s.K, s.K}, {s.O}},
            [&](auto &in) { return conv2d(in[0], in[1], in[2], s.S, s.P); },
            [&](auto &in) { return conv2d_reference(in[0], in[1], in[2], s); },
            {rounding(s.C * taps), rounding(s.O * taps), rounding(pixels), rounding(pixels)});
    }
}

// The mean and the variance of each channel of X (N,C,plane)
static std::pair<Doubles, Doubles> moments(const Doubles &X, int C, int plane) {
    Doubles mean(C), var(C);
    const double n = X.size() / C;
    auto c = [=](size_t i) { return i / plane % C; };
    for (size_t i = 0; i < X.size(); i++) mean[c(i)] += X[i] / n;
    for (size_t i = 0; i < X.size(); i++) var[c(i)] += std::pow(X[i] - mean[c(i)], 2) / n;
    return {mean, var};
}
static Doubles normalized(Doubles X, const Doubles &gamma, const Doubles &beta, const Doubles &mean,
                          const Doubles &var, int plane) {
    for (size_t i = 0; i < X.size(); i++) {
        const int c = i / plane % gamma.size();
        X[i] = (X[i] - mean[c]) / std::sqrt(var[c] + 1e-5) * gamma[c] + beta[c];
    }
    return X;
}
static Doubles batch_norm_reference(const Doubles &X, const Doubles &gamma, const Doubles &beta,
                                    int plane) {
    const auto [mean, var] = moments(X, gamma.size(), plane);
    return normalized(X, gamma, beta, mean, var, plane);
}

TEST_CASE("batch_norm: result and gradients") {
    const Ints shapes[] = {{2, 1, 2, 2},   {3, 2, 1, 1},  {1, 3, 3, 5},  {0, 3, 2, 2},
                           {2, 300, 2, 3}, {40, 3, 7, 7}, {2, 5, 29, 31}};
    for (const Ints &s : shapes) {
        CAPTURE(s);
        const int N = s[0], C = s[1], plane = s[2] * s[3];
        if (no_training && N * C * plane > 100) continue;
        const Tensor mean = full({C}, 0, gpu(0)), var = full({C}, 1, gpu(0));
        check_operator(
            {s, {C}, {C}}, [&](auto &in) { return batch_norm(in[0], in[1], in[2], mean, var); },
            [=](auto &in) { return batch_norm_reference(in[0], in[1], in[2], plane); },
            // a small variance of few numbers makes the rounding of X - mean larger
            {4e-6, 2e-5, rounding(N * plane), rounding(N * plane)}, 1e-5);
    }
}

TEST_CASE("batch_norm: the running statistics, in training and in evaluation") {
    const int N = 5, C = 3, plane = 12, n = N * plane;
    const Tensor X = copyto(random_tensor({N, C, 4, 3}, 1, 3), gpu(0)),
                 gamma = on_device({2, -3, 4}, {C}), beta = on_device({1, 2, 3}, {C}),
                 mean = on_device({1, -2, 3}, {C}), var = on_device({1, 2, 0.5f}, {C});
    const Doubles exact = doubles(X);
    const auto [X_mean, X_var] = moments(exact, C, plane);
    Doubles want_mean = doubles(mean), want_var = doubles(var);
    for (int step = 0; step < 3; step++) {
        batch_norm(X, gamma, beta, mean, var); // nothing wants a gradient, but it trains
        for (int c = 0; c < C; c++) {
            want_mean[c] = 0.9 * want_mean[c] + 0.1 * X_mean[c];
            want_var[c] = 0.9 * want_var[c] + 0.1 * X_var[c] * n / (n - 1);
        }
        check_close(to_host(mean), want_mean, 1e-6); // a few roundings a step
        check_close(to_host(var), want_var, 1e-6);
    }
    batch_norm(rows(X, 0, 0), gamma, beta, mean, var); // an empty shard changes nothing
    NoGrad guard;
    check_close(to_host(batch_norm(X, gamma, beta, mean, var)),
                normalized(exact, doubles(gamma), doubles(beta), want_mean, want_var, plane), 2e-6);
    check_close(to_host(mean), want_mean, 1e-6);
    check_close(to_host(var), want_var, 1e-6);
    CHECK(to_host(batch_norm(rows(X, 0, 0), gamma, beta, mean, var)).empty());
}

TEST_CASE("batch_norm: a single value, a mean far from 0, one tensor as gamma and beta") {
    const Tensor gamma = full({1}, 2, gpu(0)), beta = full({1}, 3, gpu(0));
    const Tensor mean = full({1}, 1, gpu(0)), var = full({1}, 5, gpu(0));
    const Tensor X = with_grad({11}, {1, 1, 1, 1}), y = batch_norm(X, gamma, beta, mean, var);
    backward(y);
    CHECK((to_host(y) == Floats{3} && grad(X) == Floats{0}));
    check_close(to_host(mean), Floats{0.9f + 1.1f}, 1e-6);
    check_close(to_host(var), Floats{4.5f}, 1e-6);
    // E[X^2] - E[X]^2 would have no digit right: X^2 is 1e8 and more, its last digit 8 or more.
    Floats far = random_floats(4096, 7);
    for (float &x : far) x += 10000;
    const Tensor far_X = on_device(far, {4, 1, 32, 32});
    // The mean is off by its rounding, 1e-3 of a standard deviation at most
    check_close(to_host(batch_norm(far_X, gamma, beta, mean, var)),
                batch_norm_reference(doubles(far_X), {2}, {3}, 1024), 1e-3);
    const Tensor Z = on_device({1, 3, 5, 11}, {4, 1, 1, 1}), both = with_grad({2}, {1});
    const Tensor apart[2] = {with_grad({2}, {1}), with_grad({2}, {1})};
    backward_from({batch_norm(Z, apart[0], apart[1], mean, var)}, {{3, -1, 2, 1}});
    backward_from({batch_norm(Z, both, both, mean, var)}, {{3, -1, 2, 1}});
    check_close(grad(both), Floats{grad(apart[0])[0] + grad(apart[1])[0]}, 1e-6);
}

TEST_CASE("conv2d, max_pool2d, global_avg_pool2d, batch_norm, add: what is refused") {
    auto t = [](const Ints &shape, Device d = gpu(0)) { return full(shape, 0, d); };
    const std::vector<Ints> convolutions[] = { // X, W, b, stride and padding
        {{1, 2, 5, 5}, {4, 3, 3, 3}, {4}, {1, 1}},  {{1, 3, 5, 5}, {4, 3, 3, 2}, {4}, {1, 1}},
        {{1, 3, 5, 5}, {4, 3, 3, 3}, {3}, {1, 1}},  {{3, 5, 5}, {4, 3, 3, 3}, {4}, {1, 1}},
        {{1, 3, 1, 5}, {4, 3, 4, 4}, {4}, {1, 1}},  {{1, 3, 5, 5}, {4, 3, 3, 3}, {4}, {0, 0}},
        {{1, 3, 5, 5}, {4, 3, 3, 3}, {4}, {-1, 0}}, {{1, 3, 5, 5}, {4, 3, 3, 3}, {4}, {1, -1}},
        {{1, 3, 5, 5}, {4, 3, 0, 0}, {4}, {1, 1}},  {{1, 1, 0, 3}, {1, 1, 3, 3}, {1}, {1, 2}},
        {{1, 1, 3, 0}, {1, 1, 3, 3}, {1}, {1, 2}}};
    for (const auto &w : convolutions)
        REFUSED(conv2d(t(w[0]), t(w[1]), t(w[2]), w[3][0], w[3][1]),
                "conv2d: expected ... , got " + str(w[0]) + ", " + str(w[1]) + ", " + str(w[2]));
    CHECK(conv2d(t({1, 3, 2, 5}), t({4, 3, 4, 4}), t({4}), 1, 1).shape == Ints{1, 4, 1, 4});
    CHECK(conv2d(t({2, 3, 5, 8}), t({4, 3, 3, 3}), t({4}), 2, 1).shape == Ints{2, 4, 3, 4});
    const Tensor three = t({3});
    REFUSED(max_pool2d(t({1, 1, 3, 2}), 3, 3), "max_pool2d: expected ... (1,1,3,2)");
    REFUSED(global_avg_pool2d(t({2, 3})), "global_avg_pool2d: expected ... (2,3)");
    REFUSED(global_avg_pool2d(t({2, 3, 0, 0})), "global_avg_pool2d: expected ... (2,3,0,0)");
    REFUSED(global_avg_pool2d(t({2, 3, 1, 2})), "global_avg_pool2d: expected ... (2,3,1,2)");
    REFUSED(batch_norm(t({2, 3}), three, three, three, three), "batch_norm: expected ... (2,3)");
    const std::string apart = "gpu(0) and gpu(1), but must be on one device";
    for (int at = 0; at < 4; at++)
        for (bool away : {false, true}) {
            Tensor p[4] = {three, three, three, three};
            p[at] = away ? t({3}, gpu(1)) : t({4});
            REFUSED(batch_norm(t({2, 3, 1, 1}), p[0], p[1], p[2], p[3]),
                    away ? apart : "batch_norm: expected ... (2,3,1,1) ... (4)");
        }
    REFUSED(add(t({2, 3}), t({3, 2})), "add: expected ... (2,3), (3,2)");
    REFUSED(add(three, t({3}, gpu(1))), apart);
}

// ---------------------------------------------------------------------------------------------
// 2. Networks

TEST_CASE("init_model: resnet18 and lab_cnn: names, shapes, counts, weights") {
    Kept kept;
    const std::string shapes = "(20,1,3,3) (20) (50,20,5,5) (50) (800,128) (128) (128,10) (10)";
    // clang-format off
    const struct {
        std::string name, names, shapes; // of resnet18 some
        int numbers;
        float deviation; // of the weights
    } cases[] = {
        {"lab_cnn", "conv0.weight conv0.bias conv1.weight conv1.bias dense0.weight dense0.bias "
         "dense1.weight dense1.bias", shapes, 129068, 0.0404145188f}, // U(-a, a): a / sqrt(3)
        // 17 convolutions of 3x3, 3 of 1x1, after the two that they go around. PyTorch counts as many
        // numbers
        {"resnet18", "conv0.weight bn0.running_mean conv5.weight conv7.weight conv17.weight "
         "conv19.bias bn16.running_var dense0.weight dense0.bias", "(64,1,3,3) (64) (128,64,3,3) "
         "(128,64,1,1) (512,256,1,1) (512) (512) (512,10) (10)", 11175818, 0.01f}};
    // clang-format on
    for (const auto &m : cases) {
        CAPTURE(m.name);
        const bool resnet = m.name == "resnet18";
        if (no_training && resnet) continue;
        set_model(m.name, 0);
        CHECK((int)all_to_host(params).size() == m.numbers);
        std::map<std::string, Tensor> by_name;
        for (size_t i = 0; i < params.size(); i++) by_name[param_names[i]] = params[i];
        REQUIRE(params.size() == (resnet ? 20 * 2 + 17 * 4 + 2 : 8));
        REQUIRE(by_name.size() == params.size());
        std::vector<std::string> got;
        std::istringstream names(m.names);
        for (std::string name; names >> name;) got.push_back(str(by_name[name].shape));
        CHECK(listed(got, " ") == m.shapes);
        if (!resnet) CHECK(listed(param_names, " ") == m.names);
        rng.seed(0); // the weights are what the seed gives, in their order
        for (size_t i = 0; i < params.size(); i++) {
            const Tensor &p = params[i];
            const std::string &name = param_names[i];
            CAPTURE(name);
            CHECK((p.device.id < 0 && p.requires_grad == !contains(name, "running")));
            double squares = 0; // of 180 numbers, the fewest, the deviation is known to 5%
            for (float x : to_host(p)) squares += x * x / size(p);
            const bool zero = contains(name, "bias") || contains(name, "mean");
            const bool weight = p.shape.size() > 1, one = contains(name, "bn") && !zero;
            const double want = weight ? m.deviation : one;
            CHECK(std::fabs(std::sqrt(squares) - want) <= weight * 0.2 * want);
            if (!weight || i > 12) continue; // 11 million numbers would take two seconds
            const Tensor drawn = resnet ? normal(0.01f, p.shape) : uniform(0.07f, p.shape);
            CHECK(to_host(p) == to_host(drawn));
        }
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
    return linear(global_avg_pool2d(X), p[0], p[1]);
}

TEST_CASE("resnet18: the chapter's, in training and in evaluation; an empty shard" * slow) {
    Kept kept; // where this is skipped, init_model runs it, and its operators' own cases
    const Tensor X = copyto(random_tensor({3, 1, 8, 8}, 1), gpu(0)), y = on_device({3, 1, 4}, {3});
    set_model("resnet18", 0);
    for (Tensor &p : params) { // so large that nothing is lost on the way, and no bias is 0
        const float scale = p.shape.size() == 1 ? 0.1f : std::sqrt(p.shape[0] / (float)size(p));
        const Floats noise = random_floats(size(p), size(p), scale);
        for (int i = 0; i < size(p); i++) p.ptr()[i] += noise[i];
    }
    const Tensors a = get_params(params, gpu(0)), b = get_params(params, gpu(0));
    const Tensor y_hat = net(X, a), want = resnet18_written_out(X, b);
    CHECK(y_hat.shape == Ints{3, 10});
    check_close(to_host(y_hat), to_host(want), 0);
    backward(add(loss(y_hat, y), loss(want, y)));
    for (size_t i = 0; i < a.size(); i++) {
        CAPTURE(param_names[i]);
        check_close(to_host(a[i]), to_host(b[i]), 0); // running statistics
        if (a[i].grad) check_close(grad(a[i]), grad(b[i]), 0);
    }
    {
        NoGrad guard;
        check_close(to_host(net(X, a)), to_host(resnet18_written_out(X, b)), 0);
        CHECK(to_host(net(X, a)) != to_host(want));
    }
    backward(loss(net(rows(X, 0, 0), a), rows(y, 0, 0)));
    for (const Tensor &p : a) // an empty shard adds nothing to the sum of the gradients
        if (p.grad) CHECK(grad(p) == Floats(size(p)));
}

// lab_cnn's outputs in double, from loops of this file
static Doubles lab_cnn_reference(const Doubles &X, const Arrays &p, int N) {
    auto relu = [](Doubles y) {
        for (double &x : y) x = std::max(x, 0.0);
        return y;
    };
    auto dense = [=](const Doubles &x, const Doubles &W, const Doubles &b) {
        const int O = b.size(), C = W.size() / O;
        Doubles y(N * O);
        for (int i = 0; i < N * O; i++) {
            y[i] = b[i % O];
            for (int c = 0; c < C; c++) y[i] += x[i / O * C + c] * W[c * O + i % O];
        }
        return y;
    };
    Doubles h = relu(conv2d_reference(X, p[0], p[1], {N, 1, 28, 28, 20, 3}));
    h = max_pool2d_reference(h, {N, 20, 26, 26, 2});
    h = relu(conv2d_reference(h, p[2], p[3], {N, 20, 13, 13, 50, 5}));
    h = max_pool2d_reference(h, {N, 50, 9, 9, 2});
    return dense(relu(dense(h, p[4], p[5])), p[6], p[7]);
}
TEST_CASE("lab_cnn: outputs, and the gradients of all parameters" * slow) {
    const int N = 3;
    const Tensor X = minibatch(N, 2).first;
    const Doubles X_exact = doubles(X);
    const Tensors host_params = lively_params();
    Arrays exact;
    for (const Tensor &t : host_params) exact.push_back(doubles(t));
    auto outputs = [&] { return lab_cnn_reference(X_exact, exact, N); };
    const Tensors p = get_params(host_params, gpu(0));
    const Tensor y_hat = lab_cnn_net(copyto(X, gpu(0)), p);
    backward(y_hat);
    CHECK(y_hat.shape == Ints{N, 10});
    // The longest sums have 800 terms, and their errors pass through three layers more.
    check_close(to_host(y_hat), outputs(), 3e-6);
    for (int i = 0; i < 8; i++) {
        CAPTURE(i);
        check_slope(grad(p[i]), exact[i], Doubles(N * 10, 1), outputs, 1e-5, 1e-7);
    }
}

// ---------------------------------------------------------------------------------------------
// 3. Training

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

TEST_CASE("evaluate_accuracy_gpus: each sample counts once, on any device") {
    const DataSet set = numbered_set(10);
    // `largest(i)`: the classes for which sample i has the largest score
    auto accuracy = [&](int batch, int k, const std::function<Ints(int)> &largest) {
        DataIter iter = make_iter(set, batch, false);
        auto net = [&](const Tensor &X, const Tensors &p) {
            CHECK(p[0].device.id == X.device.id); // each device's own parameters
            Floats y_hat(X.shape[0] * 10, -1.5f), pixels = to_host(X);
            for (int n = 0; n < X.shape[0]; n++)
                for (int c : largest(std::lround(pixels[n * 784] * 255))) y_hat[n * 10 + c] = 2.5f;
            return on_device(y_hat, {X.shape[0], 10}, X.device);
        };
        std::vector<Tensors> params;
        for (int c = 0; c < k; c++) params.push_back({full({1}, 0, gpu(c))});
        return evaluate_accuracy_gpus(net, params, iter, first_devices(k));
    };
    for (int batch : {1, 3, 4, 10, 256})
        for (int k : {1, 2, 3}) {
            CHECK(accuracy(batch, k, [](int i) { return Ints{i}; }) == 1.0f);
            CHECK(accuracy(batch, k, [](int i) { return Ints{i < 7 ? i : 0}; }) == 0.7f);
            // Of equal scores the first counts
            CHECK(accuracy(batch, k, [](int i) { return i % 4 ? Ints{0} : Ints{4, 9}; }) == 0.1f);
        }
}

TEST_CASE("add_row: lab_cnn's rows are the lab's") {
    TestFolder folder;
    Kept kept;
    options.log = folder.file("log.csv");
    auto epoch = [] {
        Animator animator(1);
        animator.add_losses({on_device({1, 2}, {2}, gpu(0))});
        add_row(animator, 12, 0.8215f, 123.456);
    };
    options.model = "lab_cnn";
    CHECK(printed(epoch) == "Epoch 11, training time = 123.5 sec\n"
                            "         validation accuracy = 0.8215\n");
    CHECK(contains(read_text(options.log), "\n12,1.500000,0.8215,123.4560,lab_cnn,"));
    options.model = "resnet18";
    CHECK(printed(epoch) == "   12    1.5000    0.8215    123.46\n");
}

TEST_CASE("check_first_step: a right step of lab_cnn passes" * slow) {
    Kept kept;
    for (int k : {1, 2, 5}) {
        CAPTURE(k);
        set_model("lab_cnn", k); // k is the seed too
        Training training(k, params);
        const auto batch = minibatch(7, 3);
        const Tensors ls = train_batch(batch.first, batch.second, training.device_params,
                                       training.devices, options.lr);
        printed([&] {
            check_first_step(batch.first, batch.second, ls, training.device_params, options.lr);
        });
    }
}

// ---------------------------------------------------------------------------------------------
// 5. Options

static std::string error_of_options(std::vector<std::string> words) {
    words.insert(words.begin(), "mgpu");
    std::vector<char *> argv;
    for (std::string &word : words) argv.push_back(&word[0]);
    argv.push_back(nullptr);
    options = Options();
    evaluate_all = false;
    return error_of([&] { parse_options(words.size(), argv.data()); });
}
TEST_CASE("parse_options: the values of each network's chapter; KVSTORE, EVALUATE_ALL") {
    Kept kept;
    const std::pair<std::vector<std::string>, const char *> cases[] = {
        {{}, "1 256 10 0.2 lenet naive 0"},
        {{"GPUS=2", "MODEL=resnet18"}, "2 512 10 0.2 resnet18 naive 1"},
        {{"MODEL=lab_cnn"}, "1 64 5 0.3 lab_cnn local 1"},
        {{"GPUS=2", "MODEL=lab_cnn", "KVSTORE=device"}, "2 128 5 0.3 lab_cnn device 1"},
        {{"MODEL=lab_cnn", "BATCH=9", "LR=1", "EPOCHS=2", "ALLREDUCE=ring"},
         "1 9 2 1 lab_cnn ring 1"},
        {{"BATCH=7", "EVALUATE_ALL=1"}, "1 7 10 0.2 lenet naive 1"}};
    for (const auto &[words, want] : cases) {
        CHECK(error_of_options(words) == "");
        const Options &o = options;
        CHECK(format("%d %d %d %g %s %s %d", o.gpus, o.batch, o.epochs, o.lr, o.model.c_str(),
                     o.allreduce.c_str(), evaluates_all()) == want);
    }
    evaluate_all = false;
}
TEST_CASE("run_allreduce: the lab's words, local and device") {
    for (const char *name : {"local", "device"}) check_exact_sums(name, 3, {5, 6});
}

TEST_CASE("parse_options: what goes not together is refused") {
    Kept kept;
    for (const char *more : {"ALLREDUCE=ring", "ALLREDUCE=local"}) {
        const std::string both = "KVSTORE and ALLREDUCE cannot both be given: one is enough";
        CHECK(error_of_options({more, "KVSTORE=local"}) == both);
        CHECK(error_of_options({"KVSTORE=local", more}) == both);
    }
    CHECK(error_of_options({"MODEL=vgg"}) ==
          "MODEL=vgg is unknown: choose one of lenet, resnet18, lab_cnn");
    check_says(error_of_options({"KVSTORE=magic"}),
               "ALLREDUCE=magic is unknown: choose one of naive");
    check_says(error_of_options({"EVALUATE_ALL=yes"}), "EVALUATE_ALL=yes: expected 0 or 1");
    CHECK(error_of_options({"--evaluate-all"}) ==
          "--evaluate-all is not an option: did you mean EVALUATE_ALL=value?");
}

// ---------------------------------------------------------------------------------------------
// Whole trainings

TEST_CASE("program: the lab's prints and resnet18's" * slow) {
    DataFolder folder(16, 4);
    const std::string some = "GPUS=2 LOG=log.csv MODEL=";
    const std::string lab = output_of(folder, some + "lab_cnn BATCH=8 EPOCHS=2 STEPS=3");
    auto after = [&](const std::string &head) { // the lines after a head
        REQUIRE(contains(lab, head));
        const size_t begin = lab.find(head) + head.size();
        return lab.substr(begin, lab.find("]]] @", begin) - begin);
    };
    const std::string weight = "=== channel 0 of the first conv on gpu(",
                      grad = "=== grad of channel 0 of the first conv2d on gpu(";
    CHECK(after(weight + "0) ===\n") == after(weight + "1) ===\n"));
    CHECK(after(grad + "0) ===\n") != after(grad + "1) ===\n"));
    for (const char *text :
         {"Running on [gpu(0), gpu(1)]\nBatch size is 8\nfirst minibatch: 2 devices agree",
          ")\nEpoch 0, training time", "\nEpoch 1, training time = ", "\ntest acc: "})
        CHECK(contains(lab, text));
    const std::string resnet = output_of(
        folder, some + "resnet18 BATCH=2 EPOCHS=1 LIMIT=2 SAVE=r OVERLAP=1 ALLREDUCE=ring");
    CHECK(contains(resnet, "not initialized on cpu\n[[["));
    CHECK(contains(resnet, "]]] @gpu(1)\nfirst minibatch: 2 devices agree with "
                           "one, shard by shard (largest difference "));
    output_of(folder, "MODEL=resnet18 GPUS=1 BATCH=1 LIMIT=1 EPOCHS=1 LOG=log.csv "
                      "FIRST_CHECK=0 INIT=r"); // reads its file
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--program") == 0) return mgpu_main(argc - 1, argv + 1);
    return tests_main(argc, argv);
}
