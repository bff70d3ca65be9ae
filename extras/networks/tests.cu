// Tests of the other two networks and of their operators, as tests.cu has them for mgpu.cu.
//
//     make test T='-tc=batch_norm*'
//
// defines: main

#define MGPU_NO_MAIN
#include PROGRAM

#include "../tests.h"

// Puts the settings back, and those of this folder.
struct NetworksKept : Kept {
    const std::vector<std::string> before_names = buffer_names;
    const Tensors before_buffers = buffers;
    ~NetworksKept() {
        buffer_names = before_names;
        buffers = before_buffers;
        reset_buffers();
    }
};

// Select a network and make its parameters.
static void set_model(const std::string &name, int seed) {
    choose_model(name);
    rng.seed(seed);
    experiment.init_params();
}

// ---------------------------------------------------------------------------------------------
// 1. Operators

TEST_CASE("add: result and gradients") {
    for (const Ints &shape : {Ints{1}, {255}, {2, 3, 4, 5}, {1001}, {0, 3}}) {
        CAPTURE(shape);
        check_operator({shape, shape}, [](auto &in) { return add(in[0], in[1]); }, reference::add,
                       {1e-7, 1e-7, 1e-7});
    }
    const Tensor X = with_grad({1, 2, 3}, {3});
    backward(add(add(X, X), X));
    CHECK(grad(X) == Floats{3, 3, 3});
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
        const PoolSizes s = {shape[0], shape[1], shape[2], shape[3], shape[2]};
        check_operator(
            {shape}, [](auto &in) { return global_avg_pool2d(in[0]); },
            [&](auto &in, auto &dy) { return reference::avg_pool2d(s, in, dy); },
            {rounding(s.K * s.K), 1e-6});
    }
    CHECK(global_avg_pool2d(full({2, 3, 9, 9}, 0, gpu(0))).shape == Ints{2, 3});
}

TEST_CASE("batch_norm: the running statistics, in training and in evaluation") {
    const int N = 5, C = 3, plane = 12, n = N * plane;
    const Tensor X = copyto(random_tensor({N, C, 4, 3}, 1, 3), gpu(0)),
                 gamma = on_device({2, -3, 4}, {C}), beta = on_device({1, 2, 3}, {C}),
                 mean = on_device({1, -2, 3}, {C}), var = on_device({1, 2, 0.5f}, {C});
    const Doubles exact = doubles(X);
    const auto [X_mean, X_var] = reference::moments(exact, C, plane);
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
    check_close(
        to_host(batch_norm(X, gamma, beta, mean, var)),
        reference::normalize(exact, doubles(gamma), doubles(beta), want_mean, want_var, plane),
        2e-6);
    check_close(to_host(mean), want_mean, 1e-6);
    check_close(to_host(var), want_var, 1e-6);
    CHECK(to_host(batch_norm(rows(X, 0, 0), gamma, beta, mean, var)).empty());
}

TEST_CASE("batch_norm: a single value, a mean far from 0, one tensor as gamma and beta") {
    const Tensor gamma = full({1}, 2, gpu(0)), beta = full({1}, 3, gpu(0));
    const Tensor mean = full({1}, 1, gpu(0)), var = full({1}, 5, gpu(0));
    const Tensor X = with_grad({11}, {1, 1, 1, 1}), y = batch_norm(X, gamma, beta, mean, var);
    backward(y);
    CHECK(to_host(y) == Floats{3});
    CHECK(grad(X) == Floats{0});
    check_close(to_host(mean), Floats{0.9f + 1.1f}, 1e-6);
    check_close(to_host(var), Floats{4.5f}, 1e-6);
    // E[X^2] - E[X]^2 would have no digit right: X^2 is 1e8 and more, its last digit 8 or more.
    Floats far = random_floats(4096, 7);
    for (float &x : far) x += 10000;
    const Tensor far_X = on_device(far, {4, 1, 32, 32});
    // The mean is off by its rounding, 1e-3 of a standard deviation at most
    check_close(to_host(batch_norm(far_X, gamma, beta, mean, var)),
                reference::batch_norm(1024, {doubles(far_X), {2}, {3}})[0], 1e-3);
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
                "conv2d: expected ... , got " + in_parentheses(w[0]) + ", " + in_parentheses(w[1]) +
                    ", " + in_parentheses(w[2]));
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

TEST_CASE("lab_cnn: names, shapes and ranges of the parameters") {
    NetworksKept kept;
    set_model("lab_cnn", 0);
    const std::vector<std::string> names =
        words_of("conv0.weight conv0.bias conv1.weight conv1.bias dense0.weight dense0.bias "
                 "dense1.weight dense1.bias");
    const Tensors lenet = lively_params(); // of the same shapes
    CHECK(param_names == names);
    REQUIRE(params.size() == 8);
    CHECK(buffers.empty());
    for (int i = 0; i < 8; i++) {
        CAPTURE(names[i]);
        CHECK(params[i].device.id == -1);
        CHECK(params[i].shape == lenet[i].shape);
        double largest = 0, square = 0; // of 180 numbers, the fewest
        for (float x : to_host(params[i])) {
            largest = std::max(largest, std::fabs((double)x));
            square += x * x / size(params[i]);
        }
        CHECK(largest <= (i % 2 ? 0 : 0.07f));
        const double deviation = i % 2 ? 0 : 0.07 / std::sqrt(3);
        CHECK(std::sqrt(square) == doctest::Approx(deviation).epsilon(0.2));
    }
    const Floats first = all_to_host(params);
    set_model("lab_cnn", 0);
    CHECK(all_to_host(params) == first);
    set_model("lab_cnn", 1);
    CHECK(all_to_host(params) != first);
}

TEST_CASE("resnet18: names, shapes, counts and deviations of the parameters" *
          doctest::skip(no_training)) {
    NetworksKept kept;
    set_model("resnet18", 0);
    CHECK(all_to_host(params).size() == 11175818); // as PyTorch counts them
    CHECK(params.size() == 20 * 2 + 17 * 2 + 2);
    CHECK(buffers.size() == 17 * 2);
    std::map<std::string, Tensor> by_name;
    for (size_t i = 0; i < params.size(); i++) by_name[param_names[i]] = params[i];
    for (size_t i = 0; i < buffers.size(); i++) by_name[buffer_names[i]] = buffers[i];
    CHECK(by_name.size() == params.size() + buffers.size());
    // 17 convolutions of 3x3, 3 of 1x1, after the two that they go around
    const std::pair<std::string, Ints> shapes[] = {
        {"conv0.weight", {64, 1, 3, 3}},      {"bn0.running_mean", {64}},
        {"conv5.weight", {128, 64, 3, 3}},    {"conv7.weight", {128, 64, 1, 1}},
        {"conv17.weight", {512, 256, 1, 1}},  {"conv19.bias", {512}},
        {"bn16.running_var", {512}},          {"dense0.weight", {512, 10}},
        {"dense0.bias", {10}}};
    for (const auto &expected : shapes) {
        const std::string &name = expected.first;
        CAPTURE(name);
        REQUIRE(by_name.count(name) == 1);
        CHECK(by_name[name].shape == expected.second);
    }
    for (const auto &entry : by_name) {
        const std::string &name = entry.first;
        const Tensor &p = entry.second;
        CAPTURE(name);
        CHECK(p.device.id == -1);
        const bool one = contains(name, "bn") && !contains(name, "bias") && !contains(name, "mean");
        double square = 0; // of 576 numbers, the fewest weights
        for (float x : to_host(p)) square += x * x / size(p);
        const double deviation = p.shape.size() > 1 ? 0.01 : one;
        CHECK(std::sqrt(square) == doctest::Approx(deviation).epsilon(0.15));
    }
}

// The chapter's network once more, written out: which block follows which, with which parameters
// and which running statistics.
static Tensor resnet18_written_out(Tensor X, const Tensors &params, const Tensors &statistics) {
    const Tensor *p = params.data(), *s = statistics.data();
    auto conv = [&](const Tensor &X, int stride, int padding) {
        p += 2;
        return conv2d(X, p[-2], p[-1], stride, padding);
    };
    auto norm = [&](const Tensor &X) {
        p += 2;
        s += 2;
        return batch_norm(X, p[-2], p[-1], s[-2], s[-1]);
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
    NetworksKept kept; // where this is skipped, other cases run it, and its operators' own
    const Tensor X = copyto(random_tensor({3, 1, 8, 8}, 1), gpu(0)), y = on_device({3, 1, 4}, {3});
    set_model("resnet18", 0);
    for (Tensors *list : {&params, &buffers}) {
        for (Tensor &p : *list) { // so large that nothing is lost on the way, and no bias is 0
            const float scale = p.shape.size() == 1 ? 0.1f : std::sqrt(p.shape[0] / (float)size(p));
            const Floats noise = random_floats(size(p), size(p), scale);
            for (int i = 0; i < size(p); i++) p.ptr()[i] += noise[i];
        }
    }
    reset_buffers(); // the devices' copies are older
    const Tensors a = get_params(params, gpu(0)), b = get_params(params, gpu(0));
    Tensors statistics;
    for (const Tensor &t : buffers) statistics.push_back(copyto(t, gpu(0)));
    const Tensor y_hat = net(X, a), want = resnet18_written_out(X, b, statistics);
    CHECK(y_hat.shape == Ints{3, 10});
    check_close(to_host(y_hat), to_host(want), 0);
    backward(add(loss(y_hat, y), loss(want, y)));
    for (size_t i = 0; i < a.size(); i++) {
        CAPTURE(param_names[i]);
        check_close(grad(a[i]), grad(b[i]), 0);
    }
    CHECK(all_to_host(statistics) != all_to_host(buffers));
    check_close(all_to_host(buffers_on(gpu(0))), all_to_host(statistics), 0);
    {
        NoGrad guard;
        check_close(to_host(net(X, a)), to_host(resnet18_written_out(X, b, statistics)), 0);
        CHECK(to_host(net(X, a)) != to_host(want));
        check_close(all_to_host(buffers_on(gpu(0))), all_to_host(statistics), 0);
    }
    zero_grad({a});
    backward(loss(net(rows(X, 0, 0), a), rows(y, 0, 0)));
    for (const Tensor &p : a) { // an empty shard adds nothing to the sum of the gradients
        CHECK(grad(p) == Floats(size(p)));
    }
    check_close(all_to_host(buffers_on(gpu(0))), all_to_host(statistics), 0);
    check_close(all_to_host(buffers_on(gpu(1))), all_to_host(buffers),
                0); // each device has its own
}

TEST_CASE("lab_cnn: outputs, losses, and the gradients of all parameters" * slow) {
    check_lenet(lab_cnn_net, true, 3);
}

// ---------------------------------------------------------------------------------------------
// 3. Training

TEST_CASE("evaluate_accuracy_gpus: each sample counts once, on any device") {
    NetworksKept kept;
    const DataSet set = numbered_set(10);
    int strangers = 0; // calls with another device's parameters
    // `largest(i)`: the classes for which sample i has the largest score
    auto accuracy = [&](int batch, int k, const std::function<Ints(int)> &largest) {
        DataIter iter = make_iter(set, batch, false);
        net = [&](const Tensor &X, const Tensors &p) {
            if (p[0].device.id != X.device.id) strangers++;
            Floats y_hat(X.shape[0] * 10, -1.5f), pixels = to_host(X);
            for (int n = 0; n < X.shape[0]; n++)
                for (int c : largest(std::lround(pixels[n * 784] * 255))) y_hat[n * 10 + c] = 2.5f;
            return on_device(y_hat, {X.shape[0], 10}, X.device);
        };
        PerDevice device_params;
        for (int c = 0; c < k; c++) device_params.push_back({full({1}, 0, gpu(c))});
        return evaluate_accuracy_gpus(device_params, iter, first_devices(k));
    };
    for (int batch : {1, 3, 4, 10, 256}) {
        for (int k : {1, 2, 3}) {
            INFO("batch ", batch, ", k ", k);
            CHECK(accuracy(batch, k, [](int i) { return Ints{i}; }) == 1.0f);
            CHECK(accuracy(batch, k, [](int i) { return Ints{i < 7 ? i : 0}; }) == 0.7f);
            // Of equal scores the first counts
            CHECK(accuracy(batch, k, [](int i) { return i % 4 ? Ints{0} : Ints{4, 9}; }) == 0.1f);
        }
    }
    CHECK(strangers == 0);
}

TEST_CASE("choose_model: lab_cnn's rows are the lab's") {
    NetworksKept kept;
    auto epoch = [] {
        Animator animator = {2};
        animator.Y.resize(11);
        animator.add_losses({on_device({1, 2}, {2}, gpu(0))});
        animator.add(12, 0.8215f, 123.456);
        CHECK(animator.Y.back() == 0.8215f);
        CHECK(animator.loss.back() == 1.5);
        CHECK(animator.seconds.back() == 123.456);
    };
    choose_model("lab_cnn");
    check_lines(printed(epoch), "Epoch 11, training time = 123.5 sec\n"
                                "         validation accuracy = 0.8215\n");
    choose_model("resnet18");
    check_lines(printed(epoch), "   12    1.5000    0.8215    123.46\n");
}

// ---------------------------------------------------------------------------------------------
// 5. Options

TEST_CASE("parse_options: the values of each network's chapter; KVSTORE, EVALUATE_ALL") {
    NetworksKept kept;
#ifdef ALGORITHMS
    const std::string local = "local";
#else
    const std::string local = "naive";
#endif
    struct Case {
        std::string line, name, allreduce;
        int gpus, batch, epochs;
        float lr;
        bool all; // devices evaluate
    };
    std::vector<Case> cases = {
        {"", "lenet", "naive", 1, 256, 10, 0.2f, false},
        {"GPUS=4", "lenet", "naive", 4, 256, 10, 0.2f, false},
        {"MODEL=resnet18", "resnet18", "naive", 1, 256, 10, 0.1f, true},
        {"GPUS=2 MODEL=resnet18", "resnet18", "naive", 2, 512, 10, 0.2f, true},
        {"GPUS=9 MODEL=resnet18", "resnet18", "naive", 9, 2304, 10, 0.1f * 9, true},
        {"MODEL=lab_cnn", "lab_cnn", local, 1, 64, 5, 0.3f, true},
        {"MODEL=lab_cnn BATCH=9 LR=1 EPOCHS=2 ALLREDUCE=bucket", "lab_cnn", "bucket", 1, 9, 2, 1,
         true},
        {"BATCH=7 EVALUATE_ALL=1", "lenet", "naive", 1, 7, 10, 0.2f, true}};
#ifdef ALGORITHMS
    cases.push_back(
        {"GPUS=2 MODEL=lab_cnn KVSTORE=device", "lab_cnn", "device", 2, 128, 5, 0.3f, true});
#endif
    for (const Case &c : cases) {
        CAPTURE(c.line);
        CHECK(parse(c.line) == "");
        CHECK(option("GPUS") == c.gpus);
        CHECK(option("BATCH") == c.batch);
        CHECK(option("EPOCHS") == c.epochs);
        CHECK((float)option("LR") == c.lr);
        CHECK(option_text("ALLREDUCE") == c.allreduce);
        CHECK(experiment.name == c.name);
        CHECK(evaluates_all() == c.all);
    }
}

#ifdef ALGORITHMS
TEST_CASE("run_allreduce: the lab's words, local and device") {
    for (const char *name : {"local", "device"}) check_exact_sums(name, 3, {5, 6});
}
#endif

TEST_CASE("parse_options: what does not go together is refused") {
    NetworksKept kept;
    for (const std::string allreduce : {"ALLREDUCE=bucket", "ALLREDUCE=naive"}) {
        const std::string both = "KVSTORE and ALLREDUCE cannot both be given: one is enough";
        CHECK(parse(allreduce + " KVSTORE=local") == both);
        CHECK(parse("KVSTORE=local " + allreduce) == both);
    }
    CHECK(parse("MODEL=vgg") == "MODEL=vgg is unknown: choose one of lenet, resnet18, lab_cnn");
    check_says(parse("KVSTORE=magic"), "ALLREDUCE=magic is unknown: choose one of naive");
    check_says(parse("EVALUATE_ALL=yes"), "EVALUATE_ALL=yes: expected a whole number from 0 to 1");
    check_says(parse("--evaluate-all"), "--evaluate-all is not an option ... EVALUATE_ALL");
}

// ---------------------------------------------------------------------------------------------
// Whole trainings

TEST_CASE("program: the lab's prints" * slow) {
    DataFolder folder(24, 4);
    const std::string lab = output_of(folder, "GPUS=2 MODEL=lab_cnn BATCH=8 EPOCHS=2");
    INFO(lab);
    auto after = [&](const std::string &head) { // the lines after a head
        REQUIRE(contains(lab, head));
        const size_t begin = lab.find(head) + head.size();
        return lab.substr(begin, lab.find("]]] @", begin) - begin);
    };
    const std::string weight = "=== channel 0 of the first conv on gpu(",
                      grad = "=== grad of channel 0 of the first conv2d on gpu(";
    CHECK(after(weight + "0) ===\n") == after(weight + "1) ===\n"));
    CHECK(after(grad + "0) ===\n") != after(grad + "1) ===\n"));
    check_parts(lab, "Running on [gpu(0), gpu(1)]\nBatch size is 8\n"
                     "first minibatch: 2 devices agree with one\nEpoch 0, training time = ... "
                     "\n         validation accuracy = ... \nEpoch 1, training time = ... "
                     "\ntest acc: ...  sec/epoch on [gpu(0), gpu(1)]\n");
}

#ifdef FILES
TEST_CASE("SAVE, INIT: a network's parameters, and gpu(0)'s running statistics" *
          doctest::skip(no_training)) {
    NetworksKept kept;
    const TestFolder folder;
    set_model("resnet18", 0);
    const Tensors device_params = get_params(params, gpu(0));
    for (const Tensor &t : buffers_on(gpu(0))) add_(t, full(t.shape, 0.25f, gpu(0)));
    buffers_on(gpu(1)); // has others
    const Floats want = all_to_host(params), statistics = all_to_host(buffers_on(gpu(0)));
    set_option("SAVE=" + folder.file("resnet18"));
    set_option("INIT=" + folder.file("resnet18"));
    Animator animator = {1, {0.5f}, {1}, {1}};
    set_option("LOG=" + folder.file("log"));
    begin_log();
    write_epoch(animator, device_params);
    set_model("resnet18", 3);
    CHECK(all_to_host(params) != want);
    load_init();
    check_close(all_to_host(params), want, 0);
    check_close(all_to_host(buffers), statistics, 0);
    for (int c : {0, 1}) check_close(all_to_host(buffers_on(gpu(c))), statistics, 0);
}
#endif

TEST_CASE("program: resnet18's prints" * slow) {
    DataFolder folder(2, 2);
    const std::string out =
        output_of(folder, "MODEL=resnet18 GPUS=2 BATCH=2 EPOCHS=1 LIMIT=2 ALLREDUCE=yours");
    check_parts(out,
                "not initialized on cpu\n[[[ ... ]]] @gpu(0)\n[[[ ... ]]] @gpu(1)\n"
                "first minibatch: 2 devices agree with one\nepoch ... \n    1 ... \ntest acc: ");
}

int main(int argc, char **argv) { return tests_main(argc, argv); }
