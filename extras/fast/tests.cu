// Tests of the tuned operators: against the simple ones, and against plain loops in double.
//
//     make test T='-tc=tuned*'                      the operators, on the shapes below
//     build/cpu/fast_tests --no-skip -tc=ladder     what each rung takes for each of these shapes

#define MGPU_NO_MAIN
#include PROGRAM

#include "../tests.h"

// Lane by lane under AddressSanitizer the operators' tests are to take half a minute together.
#if defined(CUDA_CPU_ASAN) && defined(MGPU_LANES)
constexpr bool tiny = true;
#else
constexpr bool tiny = false;
#endif

static const std::string rungs[] = {"plain", "tiled", "fast", "tf32"};
struct Usual { // restores the table at the end of a test
    ~Usual() {
        use_usual_kernels();
        fast::allow_wgmma = true;
    }
};

// The one list of shapes, for tests and for timing: of convolutions and, where H = W = K = 1, dense
// layers.
struct Shape : ConvSizes {
    double work() const { return 1.0 * N * O * OH() * OW() * C * K * K; } // products
};
static const Shape shapes[] = {
    // N C   H   W   O  K
    {1, 1, 1, 1, 1, 1},    // the smallest
    {2, 1, 3, 3, 2, 3},    // one output pixel: K = H = W
    {2, 3, 4, 9, 3, 4},    // K = H only, K even
    {1, 3, 5, 7, 4, 3},    // odd, H != W
    {33, 1, 4, 6, 3, 2},   // slices that begin in the midst of an image
    {33, 1, 4, 18, 2, 3},  // more images than slices of a shallow convolution
    {2, 16, 6, 5, 17, 2},  // a tile of channels, and one more
    {3, 17, 5, 9, 16, 3},  // or the other way round
    {2, 50, 4, 3, 3, 1},   // K = 1
    {1, 2, 7, 7, 50, 7},   // K = 7
    {2, 2, 16, 17, 3, 15}, // the widest whose taps fit a mask
    {2, 2, 17, 16, 3, 16}, // one more
    {0, 3, 5, 5, 4, 3},    // no images
    {28, 1, 30, 30, 2, 3}, // sums of so many terms that slices are many
    // N C H  W  O  K  S  P
    {1, 1, 1, 1, 1, 3, 1, 1},  // one pixel, all around it zeros
    {2, 3, 5, 7, 4, 3, 1, 1},  // as large as before
    {2, 3, 6, 9, 4, 3, 2, 1},  // half as large, H even, W odd
    {2, 3, 9, 6, 4, 3, 2, 0},  // H is used up, a column of W is left over
    {2, 5, 8, 7, 17, 1, 2, 0}, // three of four pixels in no window
    {2, 3, 7, 8, 3, 2, 2, 0},  // windows side by side
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
    {3, 33, 8, 9, 3, 5, 3, 2}, // so many channels that no (c,v) is a column of its own,
    {3, 33, 8, 9, 3, 5, 1, 2}, // with a stride of 1, too
    // Winograd's: 3x3, stride 1, multiples of 32 channels
    {2, 32, 5, 8, 64, 3, 1, 1},   // a row of outputs that is half a tile
    {1, 64, 6, 3, 32, 3, 1, 0},   // a single column of outputs
    {2, 32, 5, 3, 32, 3, 1, 1},   // a row that is half a tile, and a column
    {2, 32, 1, 1, 32, 3, 1, 2},   // more zeros than pixels,
    {1, 32, 2, 3, 32, 3, 1, 4},   // or windows in the zeros alone
    {1, 32, 2, 70, 32, 3, 1, 1},  // more tiles in a row than are computed at a time
    {260, 32, 3, 3, 32, 3, 1, 1}, // more tiles than in a cache
    {0, 32, 3, 3, 32, 3, 1, 1},   // no images
    // With a stride of 2: odd and even sizes, the longest rows that it takes, no images
    {2, 32, 7, 8, 64, 3, 2, 1},
    {2, 64, 8, 7, 32, 1, 2, 0},
    {1, 32, 3, 32, 32, 3, 2, 1},
    {1, 32, 5, 31, 32, 1, 2, 0},
    {1, 32, 3, 33, 32, 3, 2, 1}, // and longer ones
    {0, 32, 4, 4, 32, 3, 2, 1},
    {1, 32, 4, 5, 32, 2, 1, 0}, // and what is not Winograd's: taps of 2x2 or 1x1 with stride 1,
    {1, 32, 4, 5, 32, 1, 1, 0},
    {1, 32, 6, 5, 32, 3, 2, 0}, // no zeros around the image
    // Multiples of 64 channels, which a GPU takes, too
    {2, 64, 7, 7, 64, 3, 1, 1},   // a row of outputs that is three quarters of a tile,
    {2, 64, 5, 8, 128, 3, 1, 1},  // or a tile and three fifths
    {1, 128, 6, 3, 64, 3, 1, 0},  // a single column of outputs
    {3, 64, 1, 1, 64, 3, 1, 2},   // more zeros than pixels,
    {1, 64, 2, 3, 64, 3, 1, 4},   // or windows in the zeros alone
    {0, 64, 3, 3, 64, 3, 1, 1},   // no images
    {2, 17, 7, 8, 18, 5, 1, 1},   // 5x5 taps: tiles of 3x3 outputs, of which three overlap
    {15, 17, 13, 13, 17, 5},      // more images than a block puts together
    {1, 17, 40, 40, 17, 5, 1, 0}, // an image of more tiles than a block has threads
    // wgmma's: multiples of 64 channels, other strides and taps, images without a tile's end
    {2, 64, 6, 5, 128, 3, 2, 1},
    {1, 128, 5, 7, 64, 5, 1, 2},
    {5, 64, 3, 9, 64, 2, 3, 1},
    // Dense layers
    {2, 3, 1, 1, 1, 1},
    {3, 5, 1, 1, 7, 1},
    {0, 5, 1, 1, 3, 1},
    {33, 17, 1, 1, 50, 1},
    {65, 1, 1, 1, 16, 1},
    {2, 800, 1, 1, 128, 1},
    {300, 128, 1, 1, 10, 1},
    {2, 1, 1, 1, 70000, 1},
    // The networks': LeNet's, ResNet-18's with planes of fewer pixels than a tile
    {2, 1, 28, 28, 20, 3},
    {2, 20, 13, 13, 50, 5},
    {2, 1, 28, 28, 40, 3, 1, 1},
    {2, 40, 13, 14, 40, 3, 1, 1},
    {2, 40, 14, 14, 72, 3, 2, 1},
    {2, 40, 14, 14, 72, 1, 2, 0},
    {2, 256, 7, 7, 48, 3, 2, 1},
    {5, 128, 2, 2, 72, 3, 1, 1},
    {40, 3, 3, 33, 33, 3, 1, 1},
    // A GPU's large tiles, which a CPU has not: see takes_long
    {1, 256, 32, 32, 20, 3, 1, 1},
    {1, 256, 32, 32, 28, 3, 1, 1},
    {1, 256, 32, 32, 50, 3, 1, 1},
    {1, 256, 32, 32, 64, 3, 1, 1},
    {1, 20, 32, 32, 256, 5, 1, 2},
    {1, 256, 23, 23, 120, 3, 1, 1},
};
static bool takes_long(const Shape &s) {
    return s.work() > (tiny ? 3e4 : small_only ? 3e5 : warp_size > 1 ? 1e12 : 4e7);
}
// Return whether the simple operators are done soon: they have a block for each channel.
static bool quick(const Shape &s, double work) {
    return s.work() < (small_only ? 1e4 : work) && s.O < 10000;
}

template <class Call> static void for_shapes(Call call) {
    for (const Shape &s : shapes) {
        if (takes_long(s)) continue;
        INFO("N C H W O K, stride, padding: ", s.N, " ", s.C, " ", s.H, " ", s.W, " ", s.O, " ",
             s.K, " ", s.stride, " ", s.padding);
        call(s);
    }
}

// ---------------------------------------------------------------------------------------------
// What the tests share

// The nearest number of 10 bits of mantissa, ties away from 0
static float to_tf32(float x) {
    int exponent;
    const double mantissa = std::frexp((double)x, &exponent);
    return std::isfinite(x) ? std::ldexp(std::round(std::ldexp(mantissa, 11)), exponent - 11) : x;
}
// Numbers from N(0, 1), the same for the same seed; few bits of each, so that they are TF32, too
static Floats numbers(size_t n, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> distribution;
    Floats list(n);
    for (float &x : list) x = to_tf32(distribution(random));
    return list;
}
static int count(const Ints &shape) { return size({cpu(), shape}); }

// What an operator makes of inputs of these shapes: its result, then the gradients. `uses`: how
// often it is used, so that gradients are sums. masked: X is a ReLU's result, whose gradient is
// masked.
typedef std::function<Tensor(const Tensors &)> Operator;
static std::vector<Floats> results(const Operator &op, const std::vector<Ints> &inputs, int uses,
                                   bool masked, int wanted = ~0) {
    Tensors in;
    for (size_t i = 0; i < inputs.size(); i++) {
        in.push_back(with_grad(numbers(count(inputs[i]), i + 1), inputs[i]));
        if (!(wanted >> i & 1)) in[i].grad = nullptr;
    }
    Tensors used = in, ys;
    if (masked) used[0] = relu(in[0]);
    std::vector<Floats> dys;
    for (int i = 0; i < uses; i++) {
        ys.push_back(op(used));
        dys.push_back(numbers(size(ys[i]), 10 + i));
    }
    if (wanted) backward_from(ys, dys);
    std::vector<Floats> all = {to_host(ys[0])};
    for (const Tensor &t : in) all.push_back(t.grad ? grad(t) : Floats());
    return all;
}
// Check each tuned operator against the simple one. Check that each gradient has the same bits
// whether or not the other inputs want one. `rel` has the tolerances of result and gradients.
static void check_rungs(const Operator &op, const std::vector<Ints> &inputs, const Doubles &rel) {
    Usual usual;
    for (int uses : {1, 2})
        for (bool masked : {false, true}) {
            if (small_only && masked == (uses == 1)) continue;
            use_kernels("plain");
            const std::vector<Floats> want = results(op, inputs, uses, masked);
            for (const std::string &rung : rungs) {
                INFO(rung, ", uses ", uses, ", masked ", masked);
                use_kernels(rung);
                const std::vector<Floats> got = results(op, inputs, uses, masked);
                for (size_t i = 0; i < want.size(); i++) {
                    CAPTURE(i);
                    // A sum of two dy is no TF32; and one that is almost 0 is off by more of itself
                    if (rung == "tf32" && uses > 1 && i > 0) continue;
                    check_close(got[i], want[i], uses * rel[i]);
                }
                const int choices = uses == 1 && !masked ? 1 << inputs.size() : 0;
                for (int wanted = 0; wanted < choices; wanted++) {
                    if (small_only && wanted != 1 && wanted != 6) continue;
                    CAPTURE(wanted); // bit i: input i wants its gradient
                    const auto some = results(op, inputs, uses, masked, wanted);
                    for (size_t i = 0; i < some.size(); i++) {
                        if (i == 0 || (wanted >> (i - 1) & 1)) check_close(some[i], got[i], 0);
                    }
                }
            }
        }
}

// ---------------------------------------------------------------------------------------------
// The operators

static bool dense(const Shape &s) { return s.H * s.W * s.K == 1; }
static std::vector<Ints> inputs_of(const Shape &s) {
    if (dense(s)) return {{s.N, s.C}, {s.C, s.O}, {s.O}};
    return {{s.N, s.C, s.H, s.W}, {s.O, s.C, s.K, s.K}, {s.O}};
}
static Operator operator_of(const Shape &s) {
    return [=](const Tensors &in) {
        return dense(s) ? linear(in[0], in[1], in[2])
                        : conv2d(in[0], in[1], in[2], s.stride, s.padding);
    };
}
// Return the result and the gradients that results(..., 1, false) has, in double.
static Arrays in_double(const Shape &s) {
    Arrays in;
    for (const Ints &shape : inputs_of(s)) {
        in.push_back(doubles(numbers(count(shape), in.size() + 1)));
    }
    const Doubles dy = doubles(numbers(s.N * s.O * s.OH() * s.OW(), 10));
    return dense(s) ? reference::linear(in, dy) : reference::conv2d(s, in, dy);
}

TEST_CASE("tuned conv2d, linear: as the simple ones") {
    for_shapes([](const Shape &s) {
        const int taps = s.K * s.K, pixels = s.N * s.OH() * s.OW();
        if (quick(s, 1e5)) // larger ones: as loops in double
            check_rungs(
                operator_of(s), inputs_of(s),
                {rounding(s.C * taps), rounding(s.O * taps), rounding(pixels), rounding(pixels)});
    });
}

TEST_CASE("tuned conv2d, linear: as loops in double") {
    Usual usual;
    for_shapes([](const Shape &s) {
        const std::vector<Ints> inputs = inputs_of(s);
        const Arrays want = in_double(s);
        const int pixels = s.N * s.OH() * s.OW();
        for (const std::string &rung : rungs) {
            const bool simple = rung == "plain" || (tiny && rung == "tiled");
            if (simple && !quick(s, 1e6)) continue;
            CAPTURE(rung);
            use_kernels(rung);
            const bool both = rung == "tf32" && s.K > 1 && s.C % 64 == 0 && s.O % 64 == 0;
            for (const bool wgmma : {true, false}) { // tf32 has two kinds of kernels for these
                if (!wgmma && !both) break;
                CAPTURE(wgmma);
                fast::allow_wgmma = wgmma;
                const auto got = results(operator_of(s), inputs, 1, false);
                check_close(got[0], want[0], rounding(s.C * s.K * s.K));
                check_close(got[1], want[1], rounding(s.O * s.K * s.K));
                check_close(got[2], want[2], rounding(pixels));
                check_close(got[3], want[3], rounding(pixels));
            }
        }
    });
}

// Winograd's filtering adds before it multiplies. Root mean squares of its errors, relative to the
// result's, in ResNet-18's layers and in LeNet's, with fewer images.
TEST_CASE("tuned conv2d, Winograd's: relative errors below 1e-5" * doctest::skip(small_only)) {
    Usual usual;
    use_kernels(usual_kernels);
    for (const Shape &s : std::vector<Shape>{{1, 64, 28, 28, 64, 3, 1, 1},
                                             {1, 128, 14, 14, 128, 3, 1, 1},
                                             {2, 256, 7, 7, 256, 3, 1, 1},
                                             {2, 512, 4, 4, 512, 3, 1, 1},
                                             {1, 64, 28, 28, 128, 3, 2, 1},
                                             {8, 20, 13, 13, 50, 5},
                                             {4096, 64, 2, 2, 64, 3, 1, 1}}) { // a tile an image
        if (on_cpu && s.work() > 1e8) continue;
        CAPTURE(s.C);
        const Arrays want = in_double(s);
        const auto got = results(operator_of(s), inputs_of(s), 1, false);
        for (int i : {0, 1, 2}) { // y, dX, dW
            double errors = 0, squares = 0;
            for (size_t at = 0; at < want[i].size(); at++) {
                errors += std::pow(got[i][at] - want[i][at], 2);
                squares += std::pow(want[i][at], 2);
            }
            CAPTURE(i);
            CHECK(std::sqrt(errors / squares) < (i == 2 && s.N == 4096 ? 1.3e-5 : 1e-5));
        }
    }
}

TEST_CASE("tuned relu, add: the simple ones' bits") {
    Usual usual;
    for (const Ints &shape : std::vector<Ints>{{1}, {255}, {2, 3, 4, 5}, {1001}, {0, 3}}) {
        CAPTURE(shape);
        check_rungs([](auto &in) { return relu(in[0]); }, {shape}, {0, 0});
        check_rungs([](auto &in) { return add(in[0], in[1]); }, {shape, shape}, {0, 0, 0});
        check_rungs([](auto &in) { return relu(relu(add(in[0], in[0]))); }, {shape}, {0, 0});
    }
    use_kernels(usual_kernels);
    const Floats y = to_host(relu(on_device({NAN, -INFINITY, INFINITY, -0.0f}, {4})));
    CHECK(std::isnan(y[0]));
    CHECK(Floats(y.begin() + 1, y.end()) == Floats{0, INFINITY, 0});
}

TEST_CASE("tuned pools: the simple ones' bits, and loops in double") {
    Usual usual;
    const PoolSizes sizes[] = {{1, 1, 2, 2, 2},
                               {2, 3, 4, 6, 2},
                               {2, 1, 9, 9, 2},   // a row and a column too many
                               {1, 2, 39, 71, 2}, // more than a block's threads
                               {0, 2, 4, 4, 2},
                               {2, 20, 26, 26, 2}, // 8 windows at once, and the last 8
                               {1, 3, 6, 14, 2},   // 4 at once
                               {3, 2, 7, 5, 3}};
    for (const PoolSizes &s : sizes) {
        const Ints shape = {s.N, s.C, s.H, s.W};
        INFO(in_parentheses(shape), ", K ", s.K);
        if (tiny && count(shape) > 6000) continue;
        for (bool max : {false, true}) {
            CAPTURE(max);
            const Operator op = [=](const Tensors &in) {
                return (max ? max_pool2d : avg_pool2d)(in[0], s.K, s.K);
            };
            check_rungs(op, {shape}, {0, 0});
            const Floats X = numbers(count(shape), 1);
            const Floats dy = numbers(s.N * s.C * (s.H / s.K) * (s.W / s.K), 10);
            const Arrays want = reference::pool(max, s, {doubles(X)}, doubles(dy));
            use_kernels(usual_kernels);
            const auto got = results(op, {shape}, 1, false);
            check_close(got[0], want[0], 1e-6);
            check_close(got[1], want[1], 1e-6);
        }
    }
    use_kernels(usual_kernels);
    // Of equal numbers the first gets the gradient; NaN is larger than any
    Tensor X = with_grad({-1, -1, -3, -INFINITY, -1, -1, -2, -2}, {1, 1, 2, 4});
    backward(max_pool2d(X, 2, 2));
    CHECK(grad(X) == Floats{1, 0, 0, 0, 0, 0, 1, 0});
    X = with_grad({1, NAN, INFINITY, 1, NAN, 2, 1, NAN}, {1, 1, 2, 4});
    const Tensor y = max_pool2d(X, 2, 2);
    for (float largest : to_host(y)) CHECK(std::isnan(largest));
    backward(y);
    CHECK(grad(X) == Floats{0, 1, 0, 0, 0, 0, 0, 1});
}

TEST_CASE("tuned batch_norm: as the simple one, and as loops in double") {
    Usual usual;
    for (const Ints &X : std::vector<Ints>{{2, 1, 2, 2},
                                           {3, 2, 1, 1},
                                           {1, 3, 3, 5},
                                           {5, 4, 3, 3},
                                           {0, 3, 2, 2},
                                           {2, 300, 2, 3},
                                           {40, 3, 7, 7},
                                           {7, 5, 9, 11},
                                           {256, 1, 1, 1}, // more images than blocks have threads
                                           {1, 64, 4, 4},
                                           {7, 65, 4, 4},
                                           {2, 3, 28, 28},
                                           {2, 5, 29, 31}}) {
        if (X[1] > (tiny ? 5 : small_only ? 64 : 1000)) continue;
        CAPTURE(X);
        const int C = X[1], plane = X[2] * X[3], M = X[0] * plane;
        Tensor mean, var;
        const Operator op = [&](const Tensors &in) {
            mean = full({C}, 1, gpu(0)), var = full({C}, 2, gpu(0));
            return batch_norm(in[0], in[1], in[2], mean, var);
        };
        // a small variance of few numbers makes the rounding of X - mean larger, dX's twice; and of
        // three numbers, one of them 0, almost nothing is left of dX
        check_rungs(op, {X, {C}, {C}},
                       {8e-6, M < 4 ? 2e-3 : 4e-5, 2 * rounding(M), 2 * rounding(M)});
        use_kernels(usual_kernels);
        const auto got = results(op, {X, {C}, {C}}, 1, false);
        const Doubles x = doubles(numbers(count(X), 1));
        const Arrays in = {x, doubles(numbers(C, 2)), doubles(numbers(C, 3))};
        const Arrays want = reference::batch_norm(plane, in, doubles(numbers(count(X), 10)));
        check_close(got[0], want[0], 4e-6);
        check_close(got[1], want[1], 2e-5);
        check_close(got[2], want[2], rounding(M));
        check_close(got[3], want[3], rounding(M));
        auto [means, vars] = reference::moments(x, C, plane);
        for (int c = 0; c < C && M; c++) {
            means[c] = 0.9 + 0.1 * means[c];
            vars[c] = 0.9 * 2 + 0.1 * vars[c] * M / std::max(1, M - 1);
        }
        if (M) check_close(to_host(mean), means, 1e-6);
        if (M) check_close(to_host(var), vars, 1e-6);
    }
    // A mean far from 0: E[X^2] - E[X]^2 would have no digit right
    use_kernels(usual_kernels);
    Floats far = numbers(4096, 7);
    for (float &x : far) x += 10000;
    const Tensor one = full({1}, 1, gpu(0)), var = full({1}, 0, gpu(0));
    batch_norm(on_device(far, {4, 1, 32, 32}), one, one, full({1}, 0, gpu(0)), var);
    double m = 0, v = 0;
    for (float x : far) m += x / 4096.0;
    for (float x : far) v += (x - m) * (x - m) / 4095;
    check_close(to_host(var), Doubles{0.1 * v}, 1e-4);
}

TEST_CASE("tuned batch_norm: anywhere in memory, with an addition and a relu, same bits twice") {
    Usual usual;
    for (const Ints &shape :
         std::vector<Ints>{{2, 1, 4, 4}, {7, 3, 7, 7}, {256, 3, 2, 2}, {3, 65, 1, 1}}) {
        CAPTURE(shape);
        const int n = count(shape), C = shape[1];
        auto at = [&](int offset, int seed) { // so many floats behind an address of 16 bytes
            Floats list = numbers(n, seed);
            list.insert(list.begin(), offset, 0);
            return reshape(rows(on_device(list, {n + offset}), offset, n + offset), shape);
        };
        auto results = [&](const char *rung, int offset) {
            use_kernels(rung);
            Tensor X = at(offset, 1), Z = at(offset, 2);
            for (Tensor *t : {&X, &Z}) t->grad = std::make_shared<Tensor>(full(shape, 0, gpu(0)));
            const Tensor gamma = with_grad(numbers(C, 3), {C});
            const Tensor beta = with_grad(numbers(C, 4), {C});
            const Tensor mean = full({C}, 1, gpu(0)), var = full({C}, 2, gpu(0));
            const Tensor h = batch_norm(X, gamma, beta, mean, var), y = relu(add(h, Z));
            backward_from({y}, {numbers(n, 5)});
            // h was left out: to compute it must not update mean and var again
            const Tensors all = {y, *X.grad, *Z.grad, *gamma.grad, *beta.grad, h, mean, var};
            std::vector<Floats> list;
            for (const Tensor &t : all) list.push_back(to_host(t));
            return list;
        };
        const auto want = results("plain", 0);
        for (int offset = 0; offset < 3; offset++) {
            CAPTURE(offset);
            const auto got = results(usual_kernels, offset), again = results(usual_kernels, offset);
            for (size_t i = 0; i < want.size(); i++) {
                CAPTURE(i);
                check_close(got[i], want[i], 4e-5);
                check_close(got[i], again[i], 0); // the same bits
            }
        }
    }
}

TEST_CASE("tuned sgd: the simple one's bits, of any number of parameters") {
    Usual usual;
    std::vector<Floats> all;
    for (const char *rung : {"plain", usual_kernels}) {
        use_kernels(rung);
        Tensors p;
        for (int i = 0; i < 300; i++) {
            const int n = i % 7 ? i : 5000 * (i % 2);
            p.push_back(with_grad(numbers(n, i), {n}));
            copyto(on_device(numbers(n, i + 1), {n}), *p[i].grad);
        }
        sgd(p, 0.3f, 7);
        all.push_back(all_to_host(p));
    }
    check_close(all[1], all[0], 0);
}

TEST_CASE("tuned tf32: factors are rounded to 10 bits, sums are not") {
    Usual usual;
    use_kernels("tf32");
    Floats x;
    for (float one : {1.0f, -1.0f, 1.37f, 1024.0f, 3e-30f}) // ties, what lies next to them, carries
        for (int ulps : {0, 1, 4095, 4096, 4097, 8191, 8192, 12288})
            x.push_back(one * (1 + ulps * 0x1p-23f));
    x.insert(x.end(), {0, 2 - 0x1p-23f, INFINITY, -INFINITY, NAN});
    const int n = x.size();
    const Tensor one = on_device({1}, {1, 1}), b = on_device({0x1p-20f}, {1});
    const Floats X = to_host(linear(on_device(x, {n, 1}), one, b));
    const Floats W = to_host(linear(one, on_device(x, {1, n}), full({n}, 0, gpu(0))));
    for (int i = 0; i < n; i++) {
        CAPTURE(x[i]);
        const float want = to_tf32(x[i]);
        if (std::isnan(x[i])) {
            CHECK(std::isnan(X[i]));
            CHECK(std::isnan(W[i]));
        } else {
            CHECK(X[i] == want + 0x1p-20f);
            CHECK(W[i] == want);
        }
    }
}

// ---------------------------------------------------------------------------------------------
// Fusion

// relu(add(batch_norm(conv2d(h0)), h0)), pools, a dense layer, additions and a loss, whose backward
// adds to a gradient that others share; and an update. -> the result, the gradients and the new
// parameters. `look(t)` is called for tensors that may be left out.
static std::vector<Floats> block_of(const std::function<void(const Tensor &)> &look) {
    auto some = [](const Ints &shape, int seed) {
        return with_grad(numbers(count(shape), seed), shape);
    };
    const Tensor X = some({3, 2, 6, 6}, 1), W = some({2, 2, 3, 3}, 2), b = some({2}, 3);
    const Tensor gamma = some({2}, 4), beta = some({2}, 5), V = some({2, 2, 1, 1}, 6);
    const Tensor U = some({8, 8}, 7), u = some({8}, 8);
    const Tensor mean = full({2}, 0, gpu(0)), var = full({2}, 1, gpu(0));
    Tensor h0 = relu(conv2d(X, W, b, 1, 1)), h1 = conv2d(h0, W, b, 1, 1);
    look(h1);
    Tensor h2 = batch_norm(h1, gamma, beta, mean, var);
    look(h2);
    Tensor h3 = add(h2, h0);
    look(h3);
    Tensor h4 = relu(h3);
    look(h4);
    Tensor h5 = relu(conv2d(h4, W, b)), h6 = conv2d(h5, V, b); // a dX that fold does not write
    Tensor h7 = reshape(add(max_pool2d(h6, 2, 2), avg_pool2d(h4, 3, 3)), {3, 8});
    Tensor h8 = linear(h7, U, u), l = softmax_cross_entropy(h7, full({3}, 1, gpu(0)));
    Tensor y = add(h8, h7); // backward, h7 and h8 get the same gradient, then l adds to h7's
    y = add(y, linear(reshape(l, {3, 1}), full({1, 8}, 1, gpu(0)), full({8}, 0, gpu(0))));
    backward(y);
    const Tensors params = {X, W, b, gamma, beta, V, U, u};
    std::vector<Floats> all = {to_host(y)};
    for (const Tensor &p : params) all.push_back(grad(p));
    sgd(params, 0.1f, 3);
    for (const Tensor &p : params) all.push_back(to_host(p));
    return all;
}

TEST_CASE("fusion: the same bits as each kernel alone, and what the simple operators compute") {
    Usual usual;
    for (const std::string rung : {"tiled", "fast"}) {
        CAPTURE(rung);
        use_kernels("plain");
        const std::vector<Floats> plain = block_of([](const Tensor &) {});
        use_kernels(rung);
        const std::vector<Floats> fused = block_of([](const Tensor &) {});
        const std::vector<Floats> alone = block_of([](const Tensor &t) { t.ptr(); });
        for (size_t i = 0; i < fused.size(); i++) {
            CAPTURE(i);
            check_close(fused[i], alone[i], 0);
            check_close(fused[i], plain[i], 1e-5);
        }
    }
}

TEST_CASE("fusion: any of the operators may be mgpu.cu's own, which add to gradients in place") {
    Usual usual;
    use_kernels("plain");
    const std::vector<Floats> want = block_of([](const Tensor &) {});
    for (int simple = 0; simple < 1 << 8; simple++) { // a bit each
        if (small_only && (simple & (simple - 1))) continue;
        CAPTURE(simple);
        use_kernels(usual_kernels);
        int bits = simple;
        auto leave = [&](auto &entry) {
            if (bits & 1) entry = nullptr;
            bits /= 2;
        };
        leave(operators.conv2d), leave(operators.linear), leave(operators.relu);
        leave(operators.add), leave(operators.avg_pool2d), leave(operators.batch_norm);
        leave(operators.sgd), leave(operators.max_pool2d);
        const std::vector<Floats> got = block_of([](const Tensor &) {});
        for (size_t i = 0; i < got.size(); i++) {
            CAPTURE(i);
            check_close(got[i], want[i], 1e-5);
        }
    }
}

static bool put_off(const Tensor &t) { return fast::note_of(t) && fast::note_of(t)->kernel; }
static bool waits(const Tensor &t) { return put_off(t) && fast::note_of(t)->left_out < 0; }
static bool left_out(const Tensor &t) { return put_off(t) && fast::note_of(t)->left_out >= 0; }

TEST_CASE("fusion: a launch waits for an addition and a relu, and for nothing else") {
    Usual usual;
    const Tensor x = on_device({-1, 2}, {1, 2}), W = on_device({1, 0, 0, 1}, {2, 2});
    const Tensor b = full({2}, 0, gpu(0)), four = full({1, 2}, 4, gpu(0));
    static Stream other_stream = new_stream(gpu(0));
    for (const std::string &rung : rungs) {
        CAPTURE(rung);
        use_kernels(rung);
        const bool joins = rung != "plain";
        Tensor y = linear(x, W, b);
        CHECK(waits(y) == joins);
        Tensor sum = add(four, y), z = relu(sum); // either operand may be the one that waits
        CHECK(left_out(y) == joins);
        CHECK(left_out(sum) == joins);
        CHECK(waits(z) == joins);
        CHECK(to_host(z) == Floats{3, 6});
        CHECK_FALSE(waits(z));
        Tensor twice = add(z, z); // z has been sent off
        CHECK_FALSE(left_out(z));
        CHECK(to_host(twice) == Floats{6, 12});
        y = linear(x, W, b);
        Tensor r = relu(y), s = add(r, four), t = relu(relu(linear(x, W, b)));
        CHECK(to_host(s) == Floats{4, 6}); // nothing is added to a relu's result
        CHECK(to_host(t) == Floats{0, 2});
        CHECK(to_host(add(add(linear(x, W, b), four), four)) ==
              Floats{7, 10}); // one addition joins
        CHECK(std::isnan(to_host(relu(linear(x, W, full({2}, NAN, gpu(0)))))[0]));
        for (int i = 0; i < 2; i++) { // rows of what waits: to join would compute all of it
            const Tensor h = linear(on_device({-1, 2, 3, -4}, {2, 2}), W, b);
            CHECK(to_host(relu(rows(h, 1, 2))) == Floats{3, 0});
            CHECK(to_host(add(rows(h, 1, 2), four)) == Floats{7, 0});
        }
        { // what is left out keeps what was to be added to it
            NoGrad guard;
            Tensor addend = full({1, 2}, 4, gpu(0)), u = add(linear(x, W, b), addend);
            addend = Tensor();
            const Tensor v = relu(u), other = full({1, 2}, 5, gpu(0));
            CHECK(to_host(u) == Floats{3, 6});
        }
        // What goes elsewhere sends off what waits: another stream, the other device, the host
        y = linear(x, W, b);
        std::swap(other_stream, current_stream(gpu(0)));
        CHECK_FALSE(waits(y));
        std::swap(other_stream, current_stream(gpu(0)));
        y = linear(x, W, b);
        current_stream(gpu(1));
        CHECK(waits(y) == joins);
        make_wait(gpu(1), gpu(0));
        CHECK_FALSE(waits(y));
        y = linear(x, W, b);
        waitall();
        CHECK_FALSE(waits(y));
        y = linear(x, W, b);
        use_kernels("plain"); // another rung: what has been put off is not forgotten
        CHECK_FALSE(waits(y));
        CHECK(to_host(relu(y)) == Floats{0, 2});
        use_kernels(rung);
        y = linear(x, W, b);
        linear(x, W, b); // dropped: its memory may be another's when its kernel runs
        CHECK(to_host(add(y, four)) == Floats{3, 6});
    }
}

TEST_CASE("fusion: what was left out is computed when somebody asks, with the old parameters") {
    Tensors params = {on_device({1, 0, 0, 1}, {2, 2}), full({2}, 0, gpu(0))};
    attach_grad(params);
    const Tensor x = on_device({-1, 2}, {1, 2});
    const Tensor h = linear(x, params[0], params[1]), y = relu(h);
    CHECK(to_host(y) == Floats{0, 2});
    CHECK(all_to_host({h, copyto(h, gpu(1))}) == Floats{-1, 2, -1, 2});
    const Tensor later = linear(x, params[0], params[1]), z = relu(later);
    backward(z);
    CHECK(all_to_host({gradient(params[0]), gradient(params[1])}) == Floats{0, -1, 0, 2, 0, 1});
    sgd(params, 1, 1);
    CHECK(all_to_host({z, h}) == Floats{0, 2, -1, 2});
    REFUSED(to_host(later), "KERNELS=plain");
}

TEST_CASE("allocate: large tensors share a free piece, and free neighbours become one") {
    const int n = 1 << 18;
    static Stream other = new_stream(gpu(0)); // with pieces of its own
    std::swap(other, current_stream(gpu(0)));
    float *const all = empty({3 * n}, gpu(0)).ptr();
    CHECK(empty({n - 1}, gpu(0)).ptr() != all); // a small one has its own
    Tensor a = empty({n}, gpu(0)), b = empty({n}, gpu(0)), c = empty({n}, gpu(0));
    CHECK(a.ptr() == all);
    CHECK(b.ptr() == all + n);
    CHECK(c.ptr() == all + 2 * n);
    a = b = Tensor();
    CHECK(empty({2 * n}, gpu(0)).ptr() == all);
    c = Tensor();
    a = empty({n + 1}, gpu(0));
    CHECK(a.ptr() == all);
    CHECK(empty({n}, gpu(0)).ptr() == all + n + 64); // a multiple of 256 bytes
    a = Tensor();
    CHECK(empty({3 * n}, gpu(0)).ptr() == all);
    std::swap(other, current_stream(gpu(0)));
}
// Bytes of a device's memory that tensors have
static size_t used_bytes() {
    size_t n = 0;
    for (const auto &[owner, pieces] : fast::pieces_of)
        for (const fast::Piece &piece : pieces) n += owner.first == 0 && piece.used ? piece.n : 0;
    return sizeof(float) * n;
}
TEST_CASE("fusion: what is left out has no memory, until somebody asks") {
    const int n = 1000;
    const Tensor x = full({n, 1}, 3, gpu(0)), W = full({1, n}, 2, gpu(0)), b = full({n}, 1, gpu(0));
    const Tensor four = full({n, n}, 4, gpu(0));
    const size_t before = used_bytes();
    auto more = [&] { return (used_bytes() - before) / (sizeof(float) * n * n); };
    Tensor h = linear(x, W, b), row = rows(h, 1, 2), sum = add(h, four), y = relu(sum);
    CHECK(more() == 1); // y's
    CHECK(to_host(rows(y, 5, 6)) == Floats(n, 11));
    CHECK(more() == 1);
    CHECK(to_host(row) == Floats(n, 7)); // h's
    CHECK(more() == 2);
    CHECK(left_out(sum));
    CHECK(to_host(rows(sum, 9, 10)) == Floats(n, 11));
    h = row = sum = y = Tensor();
    CHECK(more() == 0);
}
TEST_CASE("fusion: a batch norm's result is computed again for the backward pass, if it can be") {
    Usual usual;
    for (bool asked : {false, true}) {
        CAPTURE(asked);
        std::vector<Floats> all;
        for (const char *rung : {"plain", usual_kernels}) {
            use_kernels(rung);
            const Tensor X = with_grad(numbers(2 * 4 * 25, 1), {2, 4, 5, 5});
            const Tensor W = with_grad(numbers(4 * 4 * 9, 2), {4, 4, 3, 3});
            const Tensor b = full({4}, 0, gpu(0));
            const Tensor mean = full({4}, 0, gpu(0)), var = full({4}, 1, gpu(0));
            Tensor y = relu(batch_norm(conv2d(X, W, b, 1, 1), full({4}, 2, gpu(0)), b, mean, var));
            const float *const address = asked ? y.ptr() : nullptr;
            Tensor z = conv2d(y, W, b, 1, 1);
            stream_of(gpu(0));
            CHECK(left_out(y) == (rung == std::string(usual_kernels) && !asked));
            if (asked) CHECK(y.ptr() == address);
            backward(relu(add(z, y)));
            all.push_back(all_to_host({z, y, mean, var, *X.grad, *W.grad}));
        }
        check_close(all[1], all[0], 1e-5);
    }
}

static Tensor times(const Tensor &X, float a) { // X (1,1)
    return linear(X, full({1, 1}, a, gpu(0)), full({1}, 0, gpu(0)));
}
TEST_CASE("fusion: gradients that share memory part when one is added to") {
    // y = A + B, of which A = 2x is used again and B = 3x, too
    const Tensor x = with_grad({5}, {1, 1});
    const Tensor A = times(x, 2), B = times(x, 3), C = times(A, 7), D = times(B, 11);
    const Tensor y = add(A, B);
    backward(add(add(y, C), add(D, y)));
    CHECK(grad(x) == Floats{2 * (2 + 7) + 3 * (2 + 11)});
    CHECK(all_to_host({*A.grad, *B.grad, *C.grad}) == Floats{9, 13, 1});
}
TEST_CASE("fusion: a gradient of another pass stays when what it was shared with is written") {
    const Tensor x = with_grad({5}, {1, 1});
    const Tensor A = times(x, 2), B = times(x, 3), y = add(A, B);
    backward(y);
    backward(times(y, 7)); // is added to y's 1
    CHECK(all_to_host({*A.grad, *B.grad, *y.grad}) == Floats{1, 1, 8});
}
TEST_CASE("fusion: a relu's gradient after operators that mask and one that does not") {
    // The loss writes an unmasked gradient; the tuned ones, before it or after it, masked ones
    Usual usual;
    for (int order = 0; order < 3; order++) {
        CAPTURE(order);
        std::vector<Floats> all;
        for (const char *rung : {"plain", usual_kernels}) {
            use_kernels(rung);
            const Tensor X = with_grad({-1, 2, -3, 4, -5, 6}, {2, 3});
            const Tensor W = on_device(numbers(9, 1), {3, 3}), b = full({3}, 0, gpu(0));
            Tensor h = relu(linear(X, W, b));
            auto loss = [&] {
                const Tensor l = softmax_cross_entropy(h, full({2}, 1, gpu(0)));
                return linear(reshape(l, {2, 1}), full({1, 3}, 1, gpu(0)), b);
            };
            Tensor y = order == 0 ? loss() : linear(h, W, b);
            if (order > 0) y = order == 1 ? add(y, loss()) : add(loss(), linear(h, W, b));
            backward(y);
            all.push_back(grad(X));
        }
        check_close(all[1], all[0], 1e-5);
    }
}
TEST_CASE("fusion: attach_grad of a relu's result: the gradient is its own") {
    const Tensor X = with_grad({-1, 2}, {2});
    Tensor h = relu(X);
    Tensors list = {h}, part = {rows(h, 0, 1)};
    attach_grad(list);
    backward(add(list[0], full({2}, 1, gpu(0))));
    CHECK(grad(list[0]) == Floats{1, 1});
    list = part;
    attach_grad(list);
    backward(add(list[0], list[0]));
    CHECK(grad(list[0]) == Floats{2});
}

// Free memory: an allocation of a device does not become one of CUDA's.
static void fill_cache() {
    Tensors kept;
    for (int n : {1, 2, 4, 32, 64, 96, 128})
        for (int i = 0; i < 20; i++) kept.push_back(full({n}, 55, gpu(0)));
}
TEST_CASE("fusion: what is left out is computed before what waits and reads it") {
    fill_cache();
    const Tensor x = on_device({-1, 2}, {1, 2}), W = on_device({1, 0, 0, 1}, {2, 2});
    const Tensor b = full({2}, 0, gpu(0));
    Tensor h = linear(x, W, b), y = relu(h), z = linear(h, W, b);
    CHECK(all_to_host({h, z, y}) == Floats{-1, 2, -1, 2, 0, 2});
    // An update comes after what waits, too
    Tensors params = {on_device({1, 0, 0, 1}, {2, 2}), full({2}, 0, gpu(0))};
    attach_grad(params);
    h = linear(x, params[0], params[1]);
    y = relu(h);
    backward(y);
    z = linear(h, W, b);
    sgd(params, 1, 1);
    CHECK(to_host(z) == Floats{-1, 2});
}
TEST_CASE("fusion: an allreduce of what was left out") {
    const int n = 1000; // rows: a message that goes too early shows
    for (const Algorithm &a : algorithms) {
        CAPTURE(std::string(a.name));
        if (!works_here(a.name)) continue;
        fill_cache();
        PerDevice grads;
        Tensors kept;
        Floats sums;
        for (int c = 0; c < 2; c++) {
            const Tensor x = on_device(numbers(n * 2, 1), {n, 2}, gpu(c));
            const Tensor I = on_device({1, 0, 0, 1}, {2, 2}, gpu(c)), b = full({2}, 0, gpu(c));
            Tensor h = linear(x, I, b);
            kept.push_back(relu(h));
            grads.push_back({h});
            for (float number : to_host(x)) sums.push_back(2 * number);
        }
        run_allreduce(a.name, grads);
        CHECK(all_to_host({grads[0][0], grads[1][0]}) == sums);
    }
}
TEST_CASE("fusion: whether launches are joined does not depend on what CUDA has to allocate") {
    const Tensor x = full({1, 777}, 1, gpu(0)), W = full({777, 777}, 0, gpu(0));
    Tensor h = linear(x, W, full({777}, 2, gpu(0))), y = relu(h);
    CHECK(left_out(h));
}

// ---------------------------------------------------------------------------------------------
// The program

TEST_CASE("use_kernels: the name says which operators run") {
    Usual usual;
    use_kernels("plain");
    CHECK(bool(operators.relu == nullptr));
    use_kernels("tf32");
    CHECK(bool(operators.relu == fast::relu));
    fast::edited = "relu sgd";
    use_usual_kernels();
    CHECK(bool(operators.relu == nullptr));
    CHECK(bool(operators.sgd == nullptr));
    CHECK(bool(operators.add == fast::add));
    CHECK(bool(operators.conv2d != nullptr));
    CHECK(operators.name == std::string("your mgpu.cu's relu, sgd; tuned, ") + usual_kernels +
                                " otherwise (KERNELS=" + usual_kernels + " for the tuned ones)");
    fast::edited = "conv2d linear matmul im2col relu avg_pool2d sgd max_pool2d add batch_norm";
    use_usual_kernels();
    CHECK(operators.name ==
          std::string("your mgpu.cu's (KERNELS=") + usual_kernels + " for the tuned ones)");
    fast::edited = "";
}

// mgpu.cu's conv2d and linear, with a tuned matmul and im2col and without
TEST_CASE("tuned matmul, im2col: serve an edited conv2d and an edited linear") {
    Usual usual;
    for (int N : {0, 1, 7}) {
        for (int width : {8, 38, 0}) { // 0: linear
            const bool is_conv = width > 0;
            CAPTURE(N);
            CAPTURE(width);
            std::vector<Floats> all;
            for (const char *rung : {"plain", usual_kernels}) {
                use_kernels(rung);
                operators.conv2d = nullptr;
                operators.linear = nullptr;
                const std::vector<int> X_shape =
                    is_conv ? std::vector<int>{N, 3, 9, width} : std::vector<int>{N, 37};
                const std::vector<int> W_shape =
                    is_conv ? std::vector<int>{35, 3, 3, 3} : std::vector<int>{37, 35};
                const Tensor X = with_grad(numbers(N * (is_conv ? 27 * width : 37), 1), X_shape);
                const Tensor W = with_grad(numbers(35 * (is_conv ? 27 : 37), 2), W_shape);
                const Tensor b = with_grad(numbers(35, 3), {35});
                const Tensor y = is_conv ? conv2d(X, W, b) : linear(X, W, b);
                backward(y);
                all.push_back(all_to_host({y, *W.grad, *b.grad, *X.grad}));
            }
            check_close(all[1], all[0], 1e-5);
        }
    }
}

static std::string said(const std::string &line) {
    Usual usual;
    Kept kept;
    const std::string error = parse(line);
    return error.empty() ? operators.name : error;
}
TEST_CASE("KERNELS, PRECISION") {
    CHECK(said("") == std::string("tuned, ") + usual_kernels);
    CHECK(said("KERNELS=plain") == "simple");
    CHECK(said("KERNELS=tiled") == "tuned, tiled");
    CHECK(said("PRECISION=tf32") == "tuned, fast in tf32");
    CHECK(said("PRECISION=tf32 KERNELS=fast") == "tuned, fast in tf32");
    CHECK(said("PRECISION=fp32") == std::string("tuned, ") + usual_kernels);
    const std::string leave = "PRECISION=tf32 works only with the fast kernels: leave KERNELS out";
    CHECK(said("PRECISION=tf32 KERNELS=tiled") == leave);
    CHECK(said("KERNELS=tiled PRECISION=tf32") == leave);
    CHECK(said("KERNELS=slow") == "KERNELS=slow is unknown: choose one of fast, tiled, plain");
    CHECK(said("PRECISION=fp16") == "PRECISION=fp16 is unknown: choose one of fp32, tf32");
    check_says(said("KERNEL=plain"), "KERNEL=plain is not an option ... KERNELS PRECISION");
}

// ---------------------------------------------------------------------------------------------
// What each rung takes for these shapes, forward and backward: GFLOP/s
TEST_CASE("ladder" * doctest::skip()) {
    Usual usual;
    printf("%-34s", "N C H W O K S P");
    for (const std::string &rung : rungs) printf(" %8s", rung.c_str());
    printf("   GFLOP/s\n");
    for_shapes([](const Shape &s) {
        if (s.work() < 1e5) return;
        const std::string name =
            format("%d %d %d %d %d %d %d %d", s.N, s.C, s.H, s.W, s.O, s.K, s.stride, s.padding);
        printf("%-34s", name.c_str());
        Tensors in;
        for (const Ints &shape : inputs_of(s))
            in.push_back(with_grad(numbers(count(shape), 1), shape));
        for (const std::string &rung : rungs) {
            use_kernels(rung);
            double best = INFINITY;
            for (int trial = 0; trial < 5; trial++) {
                const double begin = Timer::now();
                backward(operator_of(s)(in));
                waitall();
                best = std::min(best, Timer::now() - begin);
            }
            printf(" %8.2f", 6 * s.work() / best / 1e9);
        }
        printf("\n");
    });
}

// ---------------------------------------------------------------------------------------------
// Training

// Return parameters with which no ReLU's input comes near 0: several standard deviations of its
// inputs away, even in TF32. So none flips, and what is left is rounding.
static Tensors steady_params() {
    Tensors steady = lively_params();
    for (int i : {1, 3, 5, 7}) {
        for (int j = 0; j < size(steady[i]); j++) steady[i].ptr()[j] *= 2;
    }
    for (int i : {2, 4}) {
        for (int j = 0; j < size(steady[i]); j++) steady[i].ptr()[j] /= 4;
    }
    return steady;
}

TEST_CASE("train_batch: with each rung k devices learn what one device learns, to the bit" *
          doctest::skip(small_only)) {
    Usual usual;
    for (const std::string &rung : rungs) {
        for (int k : {2, 3}) {
            INFO(rung, ", k ", k);
            use_kernels(rung);
            Training many(k, lively_params());
            for (int step = 0; step < 2; step++) {
                const auto batch = minibatch(step == 0 ? 5 : 2, step);
                Tensors before;
                for (const Tensor &p : many.device_params[0]) before.push_back(copyto(p, cpu()));
                const Floats losses = many.step(batch);
                const Computed alone = computed_alone(k, before, batch);
                check_close(losses, alone.losses, 0);
                for (int c = 0; c < k; c++) check_close(many.grads(c), alone.grads, 0);
                many.check_replicas_equal();
            }
        }
    }
}

TEST_CASE("train_batch: each rung trains as the simple operators do, TF32 to two digits") {
    Usual usual;
    const int k = small_only ? 1 : 2;
    for (const std::string rung : {"tiled", "fast", "tf32"}) {
        const bool tf32 = rung == "tf32";
        Training simple(k, steady_params()), tuned(k, steady_params());
        for (int s = 0; s < (small_only || tf32 ? 1 : 5); s++) {
            INFO(rung, ", step ", s);
            const auto batch = minibatch(small_only ? 2 : 7, s);
            use_kernels("plain");
            const Floats losses = simple.step(batch);
            use_kernels(rung);
            const double drift = 1e-6 * (1 + s); // by rounding
            check_close(tuned.step(batch), losses, tf32 ? 1e-2 : drift);
            const Floats got = tuned.grads(0), want = simple.grads(0);
            check_close(got, want, tf32 ? 1e-2 : 5 * drift);
            CHECK(got != want); // or the operators are the same
        }
    }
}

#ifdef MGPU_LANES
// A GPU of 132 multiprocessors holds 2112 warps of these kernels. A launch of a training step that
// leaves more than nine tenths of it empty needs a reason.
TEST_CASE("launches: 31 a step; those that leave a GPU nearly empty, each with its reason") {
    const std::map<std::string, std::string> reasons = {
        {"add_kernel", "of two numbers, in the chapter's example"},
        {"fill_kernel", "of a loss for each sample"},
        {"cross_entropy_kernel", "a thread a sample: 256"},
        {"cross_entropy_backward_kernel", "a thread a probability: 2560"},
        {"product_kernel", "dense layers: few products, and they wait for memory"},
        {"product_sum_kernel", "a thread a weight"},
        {"winograd_filters_kernel", "a thread a filter: 1,000 of LeNet's second convolution"}};
    DataFolder folder(512, 256);
    auto launched = [&](const std::string &samples) {
        const std::string words = "EPOCHS=1 CHECKS=0 LIMIT=" + samples;
        return run_in_shell(folder, "CUDA_CPU_LAUNCHES=1", words).err;
    };
    const std::string one = launched("256"), two = launched("512");
    const int launches = std::count(one.begin(), one.end(), '\n');
    CHECK(launches > 30);
    CHECK(std::count(two.begin(), two.end(), '\n') - launches == 31);
    std::istringstream lines(one);
    std::set<std::string> empty;
    for (std::string line; std::getline(lines, line);) {
        const size_t name = line.find(' ') + 1, end = line.find_first_of("< ", name),
                     warps = line.find(" warps ");
        CAPTURE(line);
        REQUIRE(end < line.size());
        REQUIRE(warps < line.size());
        if (atoi(line.c_str() + warps + 7) < 2112 / 10) empty.insert(line.substr(name, end - name));
    }
    for (const std::string &kernel : empty) {
        CAPTURE(kernel);
        CHECK(reasons.count(kernel) == 1);
    }
    for (const auto &reason : reasons) { // one that is no longer needed goes
        CAPTURE(reason.first);
        CHECK(empty.count(reason.first) == 1);
    }
}
#endif

int main(int argc, char **argv) { return tests_main(argc, argv); }
