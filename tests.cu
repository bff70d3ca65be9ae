// Tests of mgpu.cu, against plain loops in double and against the promises of the chapter.
//
//     make test                       run all of them
//     make test T='-tc=allreduce*'    one function's: a test's name starts with what it tests
//     make asan, make race            run them under AddressSanitizer and ThreadSanitizer
//
// The sections are those of mgpu.cu. To test an operator of your own, start with a copy of the test
// of relu (section 8). extras/tests.h has what the tests share, extras/reference.h the plain loops.
// Where two results in float32 are compared, they either have the same roundings and must be equal
// to the bit, or they differ only in the order of a sum: no ReLU may see the difference, or it
// could flip.

#define MGPU_NO_MAIN
#include "replaced/mgpu.cu" // a copy that calls
#include "extras/hooks.cu"  // which lets a test train another network

#include "extras/tests.h"

#include <thread>

#include <malloc.h>

// ---------------------------------------------------------------------------------------------
// 2. A toy network

TEST_CASE("init_params: names, shapes, scales; the same numbers for the same seed") {
    Kept kept;
    rng.seed(5);
    init_params();
    const std::vector<std::string> names = {"W1", "b1", "W2", "b2", "W3", "b3", "W4", "b4"};
    const std::vector<Ints> shapes = {{20, 1, 3, 3}, {20},  {50, 20, 5, 5}, {50},
                                      {800, 128},    {128}, {128, 10},      {10}};
    CHECK(param_names == names);
    REQUIRE(params.size() == 8);
    const Floats first = all_to_host(params);
    CHECK(first.size() == 129068);
    for (int i = 0; i < 8; i++) {
        CAPTURE(names[i]);
        CHECK(params[i].shape == shapes[i]);
        if (i % 2 == 1) {
            CHECK(to_host(params[i]) == Floats(size(params[i]), 0));
            continue;
        }
        double mean = 0, square = 0; // of 180 numbers, the fewest
        for (float x : to_host(params[i])) {
            mean += x / size(params[i]);
            square += x * x / size(params[i]);
        }
        CHECK(std::fabs(mean) < 3e-3);
        CHECK(std::sqrt(square) == doctest::Approx(0.01).epsilon(0.2));
    }
    rng.seed(5);
    init_params();
    CHECK(all_to_host(params) == first);
    rng.seed(6);
    init_params();
    CHECK(all_to_host(params) != first);
}

TEST_CASE("lenet, loss: the layers of the chapter, and the gradients of all parameters" * trains) {
    check_lenet(lenet, false, small_only ? 1 : 3);
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
            REFUSED(copyto(src, empty({9}, to)), "1001 numbers do not fit a tensor of 9");
        }
    }
}

TEST_CASE("copyto: src is read after it is written, and before it is overwritten") {
    const Tensor src = full({3}, 1, gpu(0)), dst = full({3}, 0, gpu(1));
    for (Device late : {gpu(0), gpu(1)}) {
        INFO(str(late), " stands still");
        fill(src, 2);
        waitall();
        Hold hold(late);
        fill(src, 3);
        copyto(src, dst);
        fill(src, 4);
        hold.release();
        CHECK(to_host(dst) == Floats{3, 3, 3});
    }
}

TEST_CASE("make_wait: for all earlier work, on the stream of another device or of the same one") {
    const Tensor x = full({3}, 1, gpu(0));
    Stream other = new_stream(gpu(0));
    waitall();
    Hold hold(gpu(0));
    fill(x, 2);
    make_wait(other, current_stream(gpu(0)));
    std::swap(other, current_stream(gpu(0)));
    add_(x, x); // on the other stream
    std::swap(other, current_stream(gpu(0)));
    make_wait(current_stream(gpu(0)), other);
    hold.release();
    CHECK(to_host(x) == Floats{4, 4, 4});
}

TEST_CASE("get_params, attach_grad: independent copies, gradients of zeros, contiguous") {
    const Tensors start = {on_host({1, 2}, {2, 1}), full({0}, 0, cpu()), arange(3)};
    const Tensors a = get_params(start, gpu(0)), b = get_params(start, gpu(1));
    fill(a[0], 6);
    CHECK(all_to_host(a) == Floats{6, 6, 0, 1, 2});
    CHECK(all_to_host(b) == Floats{1, 2, 0, 1, 2});
    CHECK(all_to_host(start) == Floats{1, 2, 0, 1, 2});
    for (int i : {0, 1, 2}) {
        CAPTURE(i);
        CHECK(b[i].device.id == 1);
        CHECK(b[i].grad->device.id == 1);
        CHECK(b[i].grad->shape == b[i].shape);
        CHECK(grad(b[i]) == Floats(size(b[i]), 0));
        CHECK(start[i].grad == nullptr);
    }
    CHECK(b[2].grad->ptr() == b[0].grad->ptr() + 2);
    CHECK(get_params({}, gpu(0)).size() == 0);
    REFUSED(gradient(start[0]), "a parameter has no gradient: does get_params call attach_grad?");
}

TEST_CASE("replicate: the parameters on each device") {
    Kept kept;
    params = {arange(3), on_host({5}, {1})};
    const PerDevice copies = replicate(first_devices(3));
    REQUIRE(copies.size() == 3);
    for (int c : {0, 1, 2}) {
        CHECK(copies[c][1].device.id == c);
        CHECK(all_to_host(copies[c]) == Floats{0, 1, 2, 5});
        CHECK(all_to_host(gradients(copies)[c]) == Floats(4, 0));
    }
}

TEST_CASE("allreduce: every tensor of the list becomes the sum, in place") {
    for (int k = 1; k <= 5; k++) {
        CAPTURE(k);
        Tensors data;
        for (int c = 0; c < k; c++)
            data.push_back(on_device({float(1 << c), float(c)}, {2}, gpu(c)));
        allreduce(data);
        const Floats want = {float((1 << k) - 1), float(k * (k - 1) / 2)};
        for (const Tensor &t : data) CHECK(to_host(t) == want);
    }
}

// ---------------------------------------------------------------------------------------------
// 4. Distributing data

TEST_CASE("split_batch: contiguous shards in order, as equal as can be") {
    const std::vector<Ints> cases[] = {{{3, 2, 2}}, {{3, 3, 2}},       {{5}},
                                       {{0, 0}},    {{1, 1, 0, 0, 0}}, {{2, 1, 1, 1, 1, 1, 1, 1}}};
    for (const auto &c : cases) {
        const Ints sizes = c[0];
        CAPTURE(sizes);
        const int n = std::accumulate(sizes.begin(), sizes.end(), 0), k = sizes.size();
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
    const int steps = small_only ? 2 : 10;
    const float lr = 0.05f;
    for (int k : small_only ? Ints{2} : Ints{1, 2, 3, 5}) {
        Training many(k, lively_params());
        Doubles mean; // loss, of each step
        for (int step = 0; step < steps; step++) {
            INFO("k ", k, ", step ", step);
            // One minibatch is a single sample: the idle devices must add nothing, least of all the
            // gradients that they still have from the step before.
            const int n = step == steps / 2 ? 1 : small_only ? 3 : 8;
            const auto batch = minibatch(n, 100 + step);
            Tensors before;
            for (const Tensor &p : many.device_params[0]) before.push_back(copyto(p, cpu()));
            const Floats losses = many.step(batch, lr);
            const Computed alone = computed_alone(k, before, batch);
            check_close(losses, alone.losses, 0);
            for (int c = 0; c < k; c++) check_close(many.grads(c), alone.grads, 0);
            check_close(many.params(0), after_update(all_to_host(before), alone.grads, lr, n),
                        1e-6);
            many.check_replicas_equal();
            mean.push_back(std::accumulate(losses.begin(), losses.end(), 0.0) / n);
            // mgpu.cu's operators compute each sample with the same roundings, whatever the others
            // are. So the whole minibatch on one device gives gradients that differ only in how
            // they are summed.
            const Computed whole = computed_alone(1, before, batch);
            check_close(losses, whole.losses, 0);
            size_t begin = 0;
            for (const Tensor &p : before) {
                const size_t end = begin + size(p);
                check_close({alone.grads.begin() + begin, alone.grads.begin() + end},
                            Floats{whole.grads.begin() + begin, whole.grads.begin() + end}, 1e-5);
                begin = end;
            }
        }
        if (!small_only) CHECK(mean.back() < 0.8 * mean[0]); // else the comparison says little
    }
}

TEST_CASE("train_batch: the gradients are summed by sum_gradients") {
    Kept kept;
    params = {arange(2), arange(2)};
    net = [](const Tensor &X, const Tensors &p) {
        return linear(reshape(X, {X.shape[0], 1}), reshape(p[0], {1, 2}), p[1]);
    };
    const std::pair<Tensor, Tensor> batch = {reshape(arange(4), {4, 1}), full({4}, 1, cpu())};
    Training usual(2, params), other(2, params);
    usual.step(batch);
    exchange = [](const PerDevice &grads) {
        for (const Tensors &list : grads) {
            for (const Tensor &t : list) fill(t, 4);
        }
    };
    other.step(batch, 0.5f); // 0.5 * 4 / 4
    usual.check_replicas_equal();
    CHECK(other.params(0) == Floats{-0.5f, 0.5f, -0.5f, 0.5f});
    CHECK(other.params(1) == other.params(0));
}

// Select a network of one dense layer. Its parameters on the devices are in *seen, if it is given.
static void use_dense_layer(PerDevice *seen = nullptr) {
    params = {random_tensor({784, 10}, 1, 0.1f), random_tensor({10}, 2)};
    param_names = {"W1", "b1"};
    net = [=](const Tensor &X, const Tensors &p) {
        if (seen) seen->push_back(p);
        return linear(reshape(X, {X.shape[0], -1}), p[0], p[1]);
    };
}

// The data that train() trains on and tests with, for the duration of a test
struct Sets {
    DataSet train = train_set, test = test_set;
    ~Sets() {
        train_set = train;
        test_set = test;
    }
};

// Return the samples begin ... end-1 of a set.
static std::pair<Tensor, Tensor> samples(const DataSet &set, int begin, int end) {
    Floats X, y;
    for (int i = begin; i < end; i++) {
        y.push_back(set.labels[i]);
        for (int p = 0; p < 784; p++) X.push_back(set.images[i * 784 + p] / 255.0f);
    }
    return {on_host(X, {end - begin, 1, 28, 28}), on_host(y, {end - begin})};
}

// Return the fraction of the samples for which the dense layer's largest output is the label's.
static double accuracy_of(const Tensors &params, const DataSet &set) {
    const Arrays in = {doubles(samples(set, 0, set.count).first), doubles(params[0]),
                       doubles(params[1])};
    const Doubles y_hat = reference::linear(in)[0];
    int correct = 0;
    for (int n = 0; n < set.count; n++) {
        int largest = 0;
        for (int j = 1; j < 10; j++) {
            if (y_hat[n * 10 + j] > y_hat[n * 10 + largest]) largest = j;
        }
        correct += largest == set.labels[n];
    }
    return correct / (double)set.count;
}

// A row of the table, or the last line of a run
struct Row {
    int epoch = 0;
    double loss = NAN, accuracy = NAN, seconds = NAN;
};

static Row row_of(const std::string &line) {
    Row row;
    int end = -1;
    CAPTURE(line);
    CHECK(sscanf(line.c_str(), "%5d %9lf %9lf %9lf%n", &row.epoch, &row.loss, &row.accuracy,
                 &row.seconds, &end) == 4);
    CHECK(end == (int)line.size());
    return row;
}

// Check a last line: the accuracy with two digits, the seconds with one, the devices.
static void check_last_line(const std::string &line, double accuracy, double seconds,
                            const std::string &devices) {
    Row last;
    char list[100] = "";
    CAPTURE(line);
    CHECK(sscanf(line.c_str(), "test acc: %lf, %lf sec/epoch on %99[^\n]", &last.accuracy,
                 &last.seconds, list) == 3);
    CHECK(std::fabs(last.accuracy - accuracy) < 0.00501);
    CHECK(std::fabs(last.seconds - seconds) < 0.0501 + 0.00501); // of rows with two digits
    CHECK(list == devices);
}

TEST_CASE("train: each epoch has a row with what the test computes itself, the last line, too") {
    Kept kept;
    Sets sets;
    const int k = 3, n = 8, epochs = 3, count = 36; // the last of 5 minibatches has 4 samples
    const float lr = 0.3f;
    train_set = learnable_set(count, 1);
    test_set = learnable_set(200, 2);
    use_dense_layer();
    const auto dense = net;
    set_option(format("EPOCHS=%d", epochs));
    set_option("SHUFFLE=0");
    set_option("CHECKS=0");

    // While train() runs, note when the network computes. Each step takes 30 ms at least, and each
    // test 50 ms, so that the seconds that are printed have some digits.
    struct Times {
        double first_step = 0, last_step = 0, first_test = 0, last_test = 0;
    };
    std::vector<Times> times;
    std::vector<Tensors> learned; // after each epoch
    net = [&](const Tensor &X, const Tensors &p) {
        Times &t = times.back();
        usleep(recording ? 10000 : 2000);
        (recording ? t.last_step : t.last_test) = Timer::now();
        double &first = recording ? t.first_step : t.first_test;
        if (first == 0) first = Timer::now();
        return dense(X, p);
    };
    after_epoch = [&](const Animator &, const Tensors &p) {
        learned.emplace_back();
        for (const Tensor &t : p) learned.back().push_back(copyto(t, cpu()));
        times.emplace_back();
    };
    times.emplace_back();
    const double begin = Timer::now();
    const std::string out = printed([&] { train(k, n, lr); });
    const double end = Timer::now();
    net = dense;
    INFO(out);
    const std::vector<std::string> lines = lines_of(out);
    REQUIRE(lines.size() == epochs + 2);
    REQUIRE(learned.size() == epochs);
    CHECK(lines[0] == "epoch      loss  test acc   seconds");

    Training training(k, params);
    std::set<double> accuracies;
    double seconds = 0, accuracy = NAN;
    for (int epoch = 1; epoch <= epochs; epoch++) {
        CAPTURE(epoch);
        const Row row = row_of(lines[epoch]);
        double loss = 0; // all steps once more, in the order of the file
        for (int first = 0; first < count; first += n) {
            for (float l :
                 training.step(samples(train_set, first, std::min(first + n, count)), lr)) {
                loss += l / count;
            }
        }
        check_close(all_to_host(learned[epoch - 1]), training.params(0), 0);
        accuracy = accuracy_of(learned[epoch - 1], test_set);
        CHECK(row.epoch == epoch);
        CHECK(std::fabs(row.loss - loss) < 0.000051);
        CHECK(std::fabs(row.accuracy - accuracy) < 0.000051);
        // The seconds count from before the first step to after the last, without the test.
        const Times &t = times[epoch - 1];
        const double before = epoch == 1 ? begin : times[epoch - 2].last_test;
        CHECK(row.seconds >= t.last_step - t.first_step - 0.00501);
        CHECK(row.seconds <= t.first_test - before + 0.00501);
        seconds += row.seconds;
        accuracies.insert(accuracy);
    }
    CHECK(seconds <= end - begin + 0.01501);
    CHECK(accuracies.size() == epochs); // or a mistake could not be seen
    CHECK(accuracy != accuracy_of(training.device_params[0], train_set));
    check_last_line(lines.back(), accuracy, seconds / epochs, "[gpu(0), gpu(1), gpu(2)]");
}

// Return the error that a training of a few steps ends with, or "".
static std::string error_of_training() {
    std::string error;
    printed([&] { error = error_of([] { train(2, 3, 0.1f); }); });
    return error;
}

TEST_CASE("train: it checks the first minibatch before any step, the replicas after each epoch" *
          trains) {
    Kept kept;
    Sets sets;
    train_set = learnable_set(6, 1);
    test_set = learnable_set(4, 2);
    use_lively_params();
    set_option("EPOCHS=2");
    int steps = 0, wrong_step = 0;
    exchange = [&](const PerDevice &grads) {
        allreduce_naive(grads);
        if (++steps == wrong_step) fill(grads[1][7], 0);
    };
    CHECK(error_of_training() == "");
    CHECK(steps == 1 + 2 * 2);
    for (int wrong : {1, 2, 5}) {
        CAPTURE(wrong);
        steps = 0;
        wrong_step = wrong;
        check_says(error_of_training(),
                   wrong == 1 ? "the first minibatch: the gradient of b4[0] on gpu(1) is 0, not "
                              : "the replicas differ: b4[0] is ");
        CHECK(steps == (wrong == 5 ? 5 : wrong == 1 ? 1 : 3));
    }
    set_option("CHECKS=0");
    steps = 0;
    wrong_step = 1;
    CHECK(error_of_training() == "");
    CHECK(steps == 4);
}

// ---------------------------------------------------------------------------------------------
// 6. Experiment

TEST_CASE("demos: what the chapter prints, on two devices at least") {
    Kept kept;
    params = {full({2}, 1, cpu()), on_host({0.5f, -3}, {2})};
    const std::string start = "b1 weight: [0.5 -3.] @gpu(0)\nb1 grad: [0. 0.] @gpu(0)\n"
                              "before allreduce:\n [[1. 1.]] @gpu(0)\n [[2. 2.]] @gpu(1)\n";
    const std::string matrix = "input :\n [[ 0.  1.  2.  3.  4.]\n [ 5.  6.  7.  8.  9.]\n"
                               " [10. 11. 12. 13. 14.]\n [15. 16. 17. 18. 19.]]\n";
    for (int k : {1, 2}) {
        check_lines(printed([&] { demos(k); }),
                    start + "after allreduce:\n [[3. 3.]] @gpu(0)\n [[3. 3.]] @gpu(1)\n" + matrix +
                        "load into [gpu(0), gpu(1)]\noutput:\n"
                        " [[0. 1. 2. 3. 4.]\n [5. 6. 7. 8. 9.]] @gpu(0)\n"
                        " [[10. 11. 12. 13. 14.]\n [15. 16. 17. 18. 19.]] @gpu(1)\n");
    }
    check_lines(printed([&] { demos(3); }),
                start + " [[3. 3.]] @gpu(2)\nafter allreduce:\n [[6. 6.]] @gpu(0)\n"
                        " [[6. 6.]] @gpu(1)\n [[6. 6.]] @gpu(2)\n" + matrix +
                    "load into [gpu(0), gpu(1), gpu(2)]\noutput:\n"
                    " [[0. 1. 2. 3. 4.]\n [5. 6. 7. 8. 9.]] @gpu(0)\n"
                    " [[10. 11. 12. 13. 14.]] @gpu(1)\n [[15. 16. 17. 18. 19.]] @gpu(2)\n");
}

// ---------------------------------------------------------------------------------------------
// 7. The exercise

TEST_CASE("allreduce_*: every device holds the exact sum of all, for any k and any length") {
    check_algorithm("naive", true);
    check_algorithm("bucket", false);
    check_algorithm("yours", true);
}

TEST_CASE("allreduce_*: of so many devices, then of others, while one is late") {
    for (const Algorithm &a : algorithms) check_late_devices(a.name);
}

TEST_CASE("run_allreduce: an error names the algorithm") {
    Kept kept;
    algorithms.push_back({"halving", allreduce_naive, is_power_of_two});
    for (int k : {1, 2, 4, 8}) check_exact_sums("halving", k, {5});
    for (int k : {3, 5, 6, 7}) {
        REFUSED(run_allreduce("halving", new_grads(k, {2})),
                format("ALLREDUCE=halving does not work on %d devices", k));
    }
    algorithms.push_back({"reading", allreduce_naive, peers_can_read});
    for (int peers : {1, 0}) {
        set_option(format("PEERS=%d", peers));
        use_devices(2, false);
        if (peers_can_read(2)) { // they are connected, or share a GPU
            check_exact_sums("reading", 2, {5});
        } else {
            REFUSED(run_allreduce("reading", new_grads(2, {2})),
                    "ALLREDUCE=reading does not work on 2 devices (not all of which can read each "
                    "other's memory)");
        }
    }
    set_option("PEERS=1");
    use_devices(2, false);
    REFUSED(run_allreduce("magic", new_grads(1, {2})),
            "ALLREDUCE=magic is unknown: choose one of naive, bucket, yours, halving, reading");
}

TEST_CASE("flatten: one tensor of neighbours in memory") {
    const Tensor all = copyto(arange(4), gpu(1)), none = full({0}, 1, gpu(1));
    CHECK(to_host(flatten({{rows(all, 0, 1), none, rows(all, 1, 4)}})[0]) == Floats{0, 1, 2, 3});
    CHECK(flatten({{rows(all, 1, 2), rows(all, 2, 3)}})[0].ptr() == all.ptr() + 1);
    const std::string apart = "flatten: the tensors do not lie side by side in memory";
    REFUSED(flatten({{rows(all, 0, 1), rows(all, 2, 4)}}), apart);
    REFUSED(flatten({{rows(all, 2, 4), rows(all, 0, 2)}}), apart);
}

TEST_CASE("chunk: one of k") {
    const Tensor flat = arange(10);
    CHECK(to_host(chunk(reshape(flat, {5, 2}), 1, 4)) == Floats{2, 3, 4});
    CHECK(size(chunk(flat, 0, 1)) == 10);
    CHECK(size(chunk(arange(2), 0, 3)) == 0);
    REFUSED(chunk(flat, 4, 4), "there is no chunk 4 of 4");
    REFUSED(chunk(flat, -1, 3), "there is no chunk -1 of 3");
}

TEST_CASE("send: several messages at the same time") {
    const Tensor a = full({4}, 1, gpu(0)), b = full({4}, 2, gpu(1)), c = full({4}, 3, gpu(2));
    send({{rows(a, 0, 2), rows(b, 0, 2)},
          {rows(c, 2, 4), rows(b, 2, 4)},
          {rows(a, 0, 0), rows(b, 2, 2)}});
    CHECK(to_host(b) == Floats{1, 1, 3, 3});
    REFUSED(send({{rows(a, 0, 2), rows(b, 0, 3)}}), "2 numbers do not fit a tensor of 3");
}

TEST_CASE("send: a message waits for both devices, and later work for the message") {
    const Tensor src = full({3}, 1, gpu(0)), dst = full({3}, 0, gpu(1));
    for (Device late : {gpu(0), gpu(1)}) {
        INFO(str(late), " stands still");
        fill(src, 2);
        send({{src, dst}}); // creates the link
        waitall();
        Hold hold(late);
        fill(src, 3);
        add_(dst, dst); // the message overwrites it
        send({{src, dst}});
        fill(src, 4);
        add_(dst, dst);
        hold.release();
        CHECK(to_host(dst) == Floats{6, 6, 6});
        CHECK(to_host(src) == Floats{4, 4, 4});
    }
}

// ---------------------------------------------------------------------------------------------
// 8. Kernels and operators

TEST_CASE("relu: result and gradient") {
    for (const Ints &shape : {Ints{1}, {255}, {2, 3, 4, 5}, {1001}, {0, 3}}) {
        CAPTURE(shape);
        check_operator({shape}, [](auto &in) { return relu(in[0]); }, reference::relu, {0, 1e-7});
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

TEST_CASE("add_, full, sgd: every element, and no other") {
    for (int n : {1, 255, 256, 257, 1001}) {
        CAPTURE(n);
        const Tensor both = copyto(arange(2 * n), gpu(0)), a = rows(both, 0, n);
        const Tensor b = rows(both, n, 2 * n);
        add_(a, b);
        Floats want(2 * n);
        for (int i = 0; i < n; i++) {
            want[i] = i + (n + i);
            want[n + i] = n + i;
        }
        CHECK(to_host(both) == want);
        CHECK(to_host(full({n}, 3, gpu(1))) == Floats(n, 3));
        CHECK(to_host(full({n}, 3, cpu())) == Floats(n, 3));
        Tensors p = get_params({rows(arange(n), 0, n), full({n}, 1, cpu())}, gpu(0));
        copyto(b, *p[0].grad);
        copyto(a, *p[1].grad);
        sgd(p, 0.5f, 4);
        for (int i = 0; i < n; i++) {
            want[i] = i - 0.125f * (n + i);
            want[n + i] = 1 - 0.125f * (i + (n + i));
        }
        check_close(all_to_host(p), want, 1e-7);
    }
}

TEST_CASE("softmax_cross_entropy: result and gradient") {
    for (const Ints &s : {Ints{1, 2}, {5, 10}, {65, 10}, {3, 7}, {4, 1}, {0, 10}, {2, 1000}}) {
        CAPTURE(s);
        const int N = s[0], classes = s[1];
        Floats labels;
        for (int n = 0; n < N; n++) {
            labels.push_back(n % 3 == 0 ? 0 : n % 3 == 1 ? classes - 1 : n % classes);
        }
        const Tensor y = on_device(labels, {N});
        check_operator(
            {s}, [&](auto &in) { return softmax_cross_entropy(in[0], y); },
            [&](auto &in, auto &dl) {
                return reference::softmax_cross_entropy(classes, {in[0], doubles(labels)}, dl);
            },
            {rounding(classes), rounding(classes)});
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
    const PoolSizes sizes[] = {{1, 1, 1, 1, 1},    {2, 3, 4, 6, 2},
                               {0, 2, 4, 4, 2},    {2, 20, 26, 26, 2},
                               {2, 1, 9, 9, 2}, // the ninth row and column are in no window
                               {3, 2, 7, 5, 3},    {1, 300, 3, 5, 3},
                               {2, 2, 29, 33, 29}};
    for (const PoolSizes &s : sizes) {
        const Ints shape = {s.N, s.C, s.H, s.W};
        INFO(in_parentheses(shape), ", K ", s.K);
        check_operator(
            {shape}, [&](auto &in) { return avg_pool2d(in[0], s.K, s.K); },
            [&](auto &in, auto &dy) { return reference::avg_pool2d(s, in, dy); },
            {rounding(s.K * s.K), 1e-6});
        CHECK(avg_pool2d(full(shape, 0, gpu(0)), s.K, s.K).shape ==
              Ints{s.N, s.C, s.H / s.K, s.W / s.K});
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
    const Ints sizes[] = {{1, 1, 1},   {2, 3, 1},   {3, 5, 7},     {0, 5, 3},      {33, 17, 50},
                          {65, 1, 16}, {2, 50, 17}, {2, 800, 128}, {300, 128, 10}, {2, 1, 3000}};
    for (const Ints &s : sizes) {
        CAPTURE(s);
        const int N = s[0], C = s[1], O = s[2];
        if (N + C + O > (no_training ? 20 : small_only ? 150 : INT_MAX)) continue;
        check_operator({{N, C}, {C, O}, {O}},
                       [](auto &in) { return linear(in[0], in[1], in[2]); }, reference::linear,
                       {rounding(C), rounding(O), rounding(N), rounding(N)});
    }
}

TEST_CASE("conv2d: result and gradients") {
    // clang-format off
    const ConvSizes sizes[] = { // N C H W O K; the last two are LeNet's
        {1, 1, 1, 1, 1, 1}, {2, 1, 3, 3, 2, 3}, {2, 3, 4, 9, 3, 4}, {1, 3, 5, 7, 4, 3},
        {33, 1, 4, 6, 3, 2}, {3, 17, 5, 9, 33, 3}, {2, 50, 4, 3, 3, 1}, {1, 2, 7, 7, 50, 7},
        {0, 3, 5, 5, 4, 3}, {2, 1, 28, 28, 20, 3}, {2, 20, 13, 13, 50, 5}};
    // clang-format on
    for (const ConvSizes &s : sizes) {
        const Ints X = {s.N, s.C, s.H, s.W}, W = {s.O, s.C, s.K, s.K};
        INFO(in_parentheses(X), ", ", in_parentheses(W));
        const int terms = s.C * s.K * s.K, pixels = s.N * s.OH() * s.OW();
        if (s.O * (pixels + terms) > (no_training ? 300 : small_only ? 9000 : INT_MAX)) continue;
        check_operator(
            {X, W, {s.O}}, [](auto &in) { return conv2d(in[0], in[1], in[2]); },
            [&](auto &in, auto &dy) { return reference::conv2d(s, in, dy); },
            {rounding(terms), rounding(s.O * s.K * s.K), rounding(pixels), rounding(pixels)});
        CHECK(conv2d(full(X, 0, gpu(0)), full(W, 0, gpu(0)), full({s.O}, 0, gpu(0))).shape ==
              Ints{s.N, s.O, s.OH(), s.OW()});
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
        const std::string got = " expected ... , got " + in_parentheses(s[0]) + ", " +
                                in_parentheses(s[1]) + ", " + in_parentheses(s[2]);
        if (s[1].size() == 4) REFUSED(conv2d(t(s[0]), t(s[1]), t(s[2])), "conv2d:" + got);
        if (s[1].size() == 2) REFUSED(linear(t(s[0]), t(s[1]), t(s[2])), "linear:" + got);
    }
    REFUSED(avg_pool2d(t({1, 1, 2, 3}), 3, 3), "avg_pool2d: expected ... (1,1,2,3)");
    for (int K : {3, 0}) REFUSED(avg_pool2d(t({1, 1, 3, 3}), K, 2), "avg_pool2d: expected");
    REFUSED(add_(t({2, 3}), t({3, 2})), "add_: expected ... (2,3), (3,2)");
    REFUSED(softmax_cross_entropy(t({2, 3}), t({3})),
            "softmax_cross_entropy: expected ... (2,3), (3)");
    REFUSED(softmax_cross_entropy(t({2, 0}), t({2})), "softmax_cross_entropy: expected ... (2,0)");
    REFUSED(empty({-1, 3}, gpu(0)), "a tensor of ");
    REFUSED(empty({1 << 16, 1 << 15}, gpu(0)),
            "a tensor of 2147483648 numbers: use a smaller BATCH");
    const std::string apart = "gpu(0) and gpu(1), but must be on one device";
    REFUSED(conv2d(t({1, 1, 3, 3}), t({1, 1, 2, 2}, gpu(1)), t({1})), apart);
    REFUSED(linear(t({2, 3}), t({3, 4}), t({4}, gpu(1))), apart);
    REFUSED(softmax_cross_entropy(t({2, 3}), t({2}, gpu(1))), apart);
    REFUSED(add_(t({3}), t({3}, gpu(1))), apart);
    auto p = [&](Device device) { return get_params({t({3}, cpu())}, device)[0]; };
    REFUSED(sgd({p(gpu(0)), p(gpu(1))}, 1, 1), apart);
    REFUSED(relu(t({2}, cpu())), "relu ... cpu"); // the host is no device to compute on
    REFUSED(avg_pool2d(t({1, 1, 2, 2}, cpu()), 2, 2), "avg_pool2d ... cpu");
}

TEST_CASE("blocks, ceil_div: a thread for each element, and at least one block") {
    CHECK(blocks(0) == 1);
    CHECK(blocks(256) == 1);
    CHECK(blocks(257) == 2);
    CHECK(blocks(INT_MAX) == 1 << 23);
    REFUSED(blocks(1l << 31), "BATCH");
    CHECK(ceil_div(0, 32) == 0);
    CHECK(ceil_div(64, 32) == 2);
    CHECK(ceil_div(65, 32) == 3);
}

// ---------------------------------------------------------------------------------------------
// 9. Autograd

// Return A + B, as an operator that a student might write.
static Tensor plus(const Tensor &A, const Tensor &B) {
    const Tensor y = copyto(A, A.device);
    add_(y, B);
    return add_to_tape("plus", y, {A, B}, [=](const Tensor &dy) {
        for (const Tensor &X : {A, B}) {
            if (grad_ptr(X)) add_(*X.grad, dy);
        }
    });
}

TEST_CASE("backward: one tensor in several places of an operator, of a chain, of two passes") {
    // l = sum of X @ X: dX = ones @ X^T + X^T @ ones, for X = [[1, 2], [3, 4]]
    const Tensor X = with_grad({1, 2, 3, 4}, {2, 2}), zero = full({2}, 0, gpu(0));
    backward(linear(X, X, zero));
    CHECK(grad(X) == Floats{7, 11, 9, 13});
    zero_grad({{X}});
    backward(linear(relu(X), X, zero)); // relu's gradient is added to that of X
    CHECK(grad(X) == Floats{7, 11, 9, 13});
    // Two operators that share a weight alone, and a bias alone
    const Tensor V = with_grad({2}, {1, 1}), W = with_grad({3}, {1, 1});
    const Tensor x = full({1, 1}, 5, gpu(0)), b = with_grad({0}, {1}), c = with_grad({0}, {1});
    backward(plus(linear(x, V, b), linear(x, W, b)));
    CHECK(all_to_host({*V.grad, *W.grad, *b.grad}) == Floats{5, 5, 2});
    for (const Tensor &t : {W, b, c}) zero_grad({{t}});
    backward(plus(linear(x, W, b), linear(x, W, c)));
    CHECK(all_to_host({*W.grad, *b.grad, *c.grad}) == Floats{10, 1, 1});
}

TEST_CASE("zero_grad: backward adds to the gradients, until they are set to 0") {
    const Tensors p = get_params({arange(2), full({3}, 1, cpu())}, gpu(0));
    const Tensors far = get_params({arange(2), full({3}, 1, cpu())}, gpu(1));
    for (const Tensor &x : {p[0], p[1], far[0]}) {
        backward(plus(x, x));
        backward(plus(x, x));
    }
    CHECK(all_to_host({*p[0].grad, *p[1].grad, *far[0].grad}) == Floats(7, 4));
    zero_grad({p, far});
    CHECK(all_to_host({*p[0].grad, *p[1].grad, *far[0].grad}) == Floats(7, 0));
    backward(plus(p[1], p[1])); // does not use p[0]
    CHECK(all_to_host({*p[0].grad, *p[1].grad}) == Floats{0, 0, 2, 2, 2});
}

TEST_CASE("backward: only of what the result depends on; each device has its tape") {
    const Tensor X = with_grad({1, -1}, {2}), other = get_params({full({2}, 1, cpu())}, gpu(0))[0];
    const Tensor far = get_params({full({2}, 2, cpu())}, gpu(1))[0];
    const Tensor unused = relu(other), y0 = relu(X), y1 = relu(far);
    backward(y0);
    // y0 does not depend on `other`; gpu(1) has not run backward yet
    CHECK(all_to_host({*X.grad, *other.grad, *far.grad}) == Floats{1, 0, 0, 0, 0, 0});
    backward(y1);
    CHECK(grad(far) == Floats{1, 1});
    REFUSED(backward(y1), "backward: there is no record of how this tensor was computed");
    REFUSED(backward(relu(full({2}, 1, gpu(1)))), "no record"); // nothing wants a gradient
    backward(relu(other)); // nothing is left over from the passes before
    CHECK(all_to_host({*X.grad, *other.grad}) == Floats{1, 0, 1, 1});
    zero_grad({{X}});
    const Tensor first = plus(X, X), second = relu(X);
    backward(first);
    const Tensor third = plus(X, X);
    REFUSED(backward(second), "each backward pass erases");
    backward(third); // is still there
    CHECK(grad(X) == Floats{4, 4});
}

// The gradients with which after_gradient() was called, and their numbers at that time
static std::vector<std::pair<const float *, Floats>> seen_gradients;

TEST_CASE("backward: after_gradient gets each parameter's gradient, at last when it is complete") {
    Kept kept;
    after_gradient = [](const Tensor &g) { seen_gradients.push_back({g.ptr(), to_host(g)}); };
    const Tensors p = get_params({arange(2), arange(2), arange(2)}, gpu(0));
    for (int pass : {0, 1}) {
        CAPTURE(pass);
        seen_gradients.clear();
        zero_grad({p});
        const Tensor h = plus(p[0], relu(p[0])); // p[0] has three users
        relu(p[2]);                              // does not count
        backward(plus(plus(h, p[1]), p[0]));
        CHECK(grad(p[0]) == Floats{2, 3});
        CHECK(grad(p[2]) == Floats{0, 0});
        REQUIRE(seen_gradients.size() == 4);
        const Ints order = {0, 1, 0, 0}; // of their users, in reverse
        for (int i : {0, 1, 2, 3}) CHECK(seen_gradients[i].first == p[order[i]].grad->ptr());
        CHECK(seen_gradients[1].second == Floats{1, 1});
        CHECK(seen_gradients[3].second == grad(p[0]));
    }
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
    REFUSED(reshape(X, {5, 2}), "reshape: 6 numbers do not fit 10");
    REFUSED(reshape(X, {4, -1}), "reshape: 6 numbers do not fit 4");
    // Through a reshape of an operator's result and of a parameter
    backward_from({reshape(relu(X), {3, 2})}, {{1, 2, 3, 4, 5, 6}});
    CHECK(grad(X) == Floats{0, 2, 3, 4, 5, 6});
    zero_grad({{X}});
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

TEST_CASE("empty: freed memory goes to the next tensor of its size on the same stream") {
    const int n = 12345; // which no other test uses
    auto address = [&](int count, Device device) { return empty({count}, device).ptr(); };
    const float *const first = address(n, gpu(0)); // and at once free again
    CHECK(address(n, gpu(0)) == first);
    CHECK(address(n, gpu(1)) != first);
    CHECK(address(n + 64, gpu(0)) != first);
    const Tensor taken = empty({n}, gpu(0));
    CHECK(taken.ptr() == first);
    CHECK(address(n, gpu(0)) != first);

    static Stream other = new_stream(gpu(0)); // as OVERLAP in extras/algorithms/ has one
    Tensor a = empty({n + 1}, gpu(0));
    const float *const usual = a.ptr();
    std::swap(other, current_stream(gpu(0)));
    a = Tensor(); // freed while another stream is the current one
    const float *const elsewhere = address(n + 1, gpu(0));
    CHECK(elsewhere != usual);
    CHECK(address(n + 1, gpu(0)) == elsewhere);
    std::swap(other, current_stream(gpu(0)));
    CHECK(address(n + 1, gpu(0)) == usual);
}

TEST_CASE("empty: memory on the host is freed only after devices have read it") {
    const Tensor dst = full({1000}, 0, gpu(0));
    Hold hold(gpu(0));
    std::thread later([&] {
        usleep(20000);
        hold.release();
    });
    copyto(full({1000}, 7, cpu()), dst); // then the copied tensor is freed
    const bool released = hold.released;
    later.join();
    CHECK(released);
    CHECK(to_host(dst) == Floats(1000, 7));
}

TEST_CASE("try_gpu, first_devices, str") {
    REFUSED(try_gpu(99), "there is no gpu(99): the program runs on ... devices");
    REFUSED(stream_of(cpu()), "a tensor is on the host, but must be on a device: use copyto");
    CHECK(try_gpu(1).id == 1);
    CHECK(str(first_devices(3)) == "[gpu(0), gpu(1), gpu(2)]");
    CHECK(str(first_devices(0)) == "[]");
    CHECK(str(cpu()) == "cpu");
}

// ---------------------------------------------------------------------------------------------
// 11. Data

TEST_CASE("evaluate_accuracy_gpu: each sample counts once") {
    const DataSet set = numbered_set(10);
    // Return the accuracy of a network that finds these labels. -1: all classes have one score
    auto accuracy = [&](int batch, const Ints &found) {
        std::set<std::pair<int, bool>> calls; // on which device, and whether it was recorded
        auto net = [&](const Tensor &X) {
            Floats y_hat(X.shape[0] * 10, -1.5f), pixels = to_host(X);
            for (int n = 0; n < X.shape[0]; n++) {
                const int label = found[std::lround(pixels[n * 784] * 255)];
                if (label >= 0) y_hat[n * 10 + label] = 2.5f;
            }
            calls.insert({X.device.id, recording});
            return on_device(y_hat, {X.shape[0], 10}, X.device);
        };
        DataIter iter = make_iter(set, batch, false);
        const float result = evaluate_accuracy_gpu(net, iter, gpu(1));
        REQUIRE(calls.size() == 1);
        CHECK(calls.begin()->first == 1);
        CHECK(calls.begin()->second == false); // or the tapes would grow
        return result;
    };
    for (int batch : {1, 3, 4, 10, 256}) {
        CAPTURE(batch);
        CHECK(accuracy(batch, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}) == 1.0f);
        CHECK(accuracy(batch, {0, 1, 2, 3, 4, 5, 6, 0, 0, 0}) == 0.7f);
        CHECK(accuracy(batch, {-1, -1, -1, 0, 0, 0, 0, 0, 0, 0}) == 0.1f); // the first class counts
    }
    CHECK(recording);
}

TEST_CASE("to_string: as the chapter prints, and never 0 for another number") {
    const std::pair<Tensor, std::string> cases[] = {
        {full({3}, 0, cpu()), "[0. 0. 0.]"},
        {full({1, 2}, 3, gpu(1)), "[[3. 3.]] @gpu(1)"},
        {on_host({1, -10, 100}, {3}), "[  1. -10. 100.]"},
        {on_host({NAN, 0.5f, -INFINITY}, {3}), "[ nan  0.5 -inf]"},
        {on_host({0.1f, 1 / 3.0f, 1e-20f}, {3}), "[          0.1    0.33333334 9.9999997e-21]"},
        {on_host({0.5f, -1.25f}, {2}), "[  0.5 -1.25]"},
        {on_host({1.4678693e-7f, 3e-9f, -1e-45f}, {3}),
         "[ 1.4678693e-07          3e-09 -1.4012985e-45]"},
        {reshape(arange(4), {1, 2, 2}), "[[[0. 1.]\n  [2. 3.]]]"},
        {empty({0}, gpu(0)), "[] @gpu(0)"}};
    for (const auto &[t, text] : cases) CHECK(to_string(t) == text);
}

// --- data

TEST_CASE("load_idx: a wrong file is named, and what it should be") {
    const TestFolder folder;
    const std::string path = folder.file("file"), images = idx_images(3), labels = idx_labels(3);
    const std::string pixels = images.substr(16);
    const std::pair<bool, std::string> cases[] = { // images?; its bytes
        {true, ""},
        {true, "\x1f\x8b" + images},                   // compressed
        {true, idx({0x03080000, 3, 28, 28}, pixels)},  // the magic's bytes reversed
        {true, idx({0x0703, 3, 28, 28}, pixels)},      // no type has the code 7
        {true, labels},
        {false, images},
        {true, idx({2051, 3, 27, 28}, pixels)},
        {true, idx({2051, 3, 28, 29}, pixels)},
        {true, idx({2051, 3, 784, 1}, pixels)},
        {true, idx({0x0802, 3, 784}, pixels)},
        {true, idx({0x08ff, 3, 28, 28}, pixels)},
        {true, idx({0x0903, 3, 28, 28}, pixels)},          // int8
        {true, idx({0x0b03, 3, 28, 28}, pixels + pixels)}, // int16
        {false, idx({0x0c01, 3}, std::string(12, 0))},     // int32
        {false, idx({0x0c02, 3, 8}, std::string(96, 0))},  // QMNIST's labels
        {true, idx({2051, 0, 28, 28}, "")},
        {false, idx({2049, 0}, "")},
        {false, labels + "x"},
        {true, images.substr(0, 2367)},
        {true, images.substr(0, 9)},
        {false, idx({2049, 4294967295}, labels)}};
    for (const auto &[wants_images, bytes] : cases) {
        const std::string start = bytes.substr(0, 16); // (nor a binding: CAPTURE has a lambda, too)
        CAPTURE(start);
        write_text(path, bytes);
        const bool is_image = wants_images; // (a lambda of C++17 may not capture wants_images)
        const std::string what = format(" should be uint8 N%s in the IDX format, but its %zu bytes",
                                        is_image ? " x 28 x 28" : "", bytes.size());
        REFUSED(load_idx(path, is_image), path + what);
    }
    REFUSED(load_idx(path + "x", true),
            "cannot read " + path + "x: No such file or directory: `make data` with the same DATA");
    write_text(path, images);
    const auto got = load_idx(path, true);
    CHECK(std::string(got.begin(), got.end()) == pixels);
    write_text(path, labels);
    const auto got_labels = load_idx(path, false);
    CHECK(std::string(got_labels.begin(), got_labels.end()) == labels.substr(8));
}

TEST_CASE("load_data: the files' bytes, of the first samples with LIMIT; or what is wrong") {
    const TestFolder folder;
    Kept kept;
    const std::string path = folder.path;
    write_data(path, 17, 3);
    for (int limit : {0, 1, 200}) {
        CAPTURE(limit);
        set_option(format("LIMIT=%d", limit));
        const DataSet set = load_data(path, "train");
        CHECK(set.count == (limit == 1 ? 1 : 17));
        CHECK(std::string(set.images.begin(), set.images.end()) == idx_images(17).substr(16));
        CHECK(std::string(set.labels.begin(), set.labels.end()) == idx_labels(17).substr(8));
        CHECK(load_data(path, "t10k").count == (limit == 1 ? 1 : 3));
    }
    const std::string wrong = path + "/train: expected a label from 0 to 9 for each image, found ";
    write_text(path + train_labels, idx({2049, 17}, std::string(16, 9) + char(10)));
    REFUSED(load_data(path, "train"), wrong + "17 labels up to 10 and 17 images");
    write_text(path + train_labels, idx_labels(4));
    REFUSED(load_data(path, "train"), wrong + "4 labels up to ... and 17 images");
    REFUSED(load_data(path + "/none", "train"),
            "cannot read " + path + "/none" + train_images + ": No such file or directory");
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
        DataIter in_order = make_iter(set, c[0][1], false);
        std::vector<Floats> epochs;
        for (int seed : {5, 5, 6}) {
            rng.seed(seed);
            DataIter iter = make_iter(set, c[0][1], true);
            for (int epoch : {0, 1}) {
                CAPTURE(epoch);
                CHECK(epoch_of(in_order, c[1]) == file);
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
    Kept kept;
    Sets sets;
    train_set = numbered_set(100);
    test_set = numbered_set(7);
    for (int shuffle : {1, 0}) {
        CAPTURE(shuffle);
        set_option(format("SHUFFLE=%d", shuffle));
        auto [train_iter, test_iter] = load_data_fashion_mnist(64);
        const Floats file = to_host(arange(100));
        CHECK((epoch_of(train_iter, {64, 36}) != file) == shuffle);
        CHECK(epoch_of(test_iter, {7}) == to_host(arange(7)));
    }
}

// --- timing and progress

TEST_CASE("Timer: the seconds of each pair of start and stop, and their mean") {
    Timer timer;
    const double begin = Timer::now();
    for (int pair : {0, 1}) {
        timer.start();
        usleep(20000); // at least
        timer.stop();
        CHECK(timer.times[pair] >= 0.02);
        usleep(20000); // which do not count
    }
    CHECK(timer.times[0] + timer.times[1] <= Timer::now() - begin - 0.04);
    timer.times = {1, 2, 6};
    CHECK(timer.avg() == 3);
}

// Return the losses of a minibatch as they lie on the devices.
static Tensors losses_on(const std::vector<Floats> &shards) {
    Tensors losses;
    for (const Floats &l : shards) {
        losses.push_back(on_device(l, {(int)l.size()}, gpu(losses.size())));
    }
    return losses;
}

TEST_CASE("Animator: a row an epoch, with the mean loss of all its samples") {
    auto epochs = [] {
        Animator animator = {9};
        const Tensors late = losses_on({{10, 20}, {30}, {0}});
        animator.add_losses(losses_on({{1, 2}, {3}, {4}}));
        animator.add_losses(late);
        fill(late[2], 50);                             // losses are read when they are needed
        animator.add_losses(losses_on({{7}, {}, {}})); // the epoch's last minibatch: idle devices
        animator.add(1, 0.1f, 1.25);
        animator.add_losses(losses_on({{8}, {16}, {}}));
        animator.add(2, 0.8215f, 123.456);
        CHECK(animator.Y == Floats{0.1f, 0.8215f});
        CHECK(animator.loss == Doubles{127.0 / 9, 12});
        CHECK(animator.seconds == Doubles{1.25, 123.456});
    };
    check_lines(printed(epochs), "epoch      loss  test acc   seconds\n"
                                 "    1   14.1111    0.1000      1.25\n"
                                 "    2   12.0000    0.8215    123.46\n");
}

TEST_CASE("Animator: on a terminal, a bar that is drawn when it gets longer, and wiped away") {
    auto epoch = [] {
        Animator animator = {120};
        for (int i = 0; i < 80; i++) animator.add_losses(losses_on({{1}, {i % 2 ? 3.f : 2}}));
        animator.add(1, 0, 1);
    };
    auto short_epoch = [] {
        Animator animator = {8};
        for (int i = 0; i < 4; i++) animator.add_losses(losses_on({{1}, {3}}));
        animator.add(1, 0, 1);
    };
    const std::string half(20, '='), whole(40, '='), blank(40, ' ');
    CHECK(printed(short_epoch, true) ==
          "\r[" + half.substr(0, 10) + blank.substr(0, 30) + "] 2/8\r[" + half +
              blank.substr(0, 20) + "] 4/8\r[" + half + half.substr(0, 10) + blank.substr(0, 10) +
              "] 6/8\r[" + whole + "] 8/8\r\033[Kepoch      loss  test acc   seconds\n" +
              "    1    2.0000    0.0000      1.00\n");
    const std::string bars = printed(epoch, true);
    CHECK(std::count(bars.begin(), bars.end(), '[') <= 54); // 53 times longer, and one \033[K
    check_lacks(printed(short_epoch), "=");
}

TEST_CASE("Animator: a loss that is no number ends the run") {
    Kept kept;
    set_option("LR=0.5");
    for (float bad : {NAN, INFINITY, -INFINITY}) {
        Animator animator = {12};
        animator.Y = {0, 0, 0}; // three epochs are done
        for (float x : {4.0f, bad, 4.0f}) animator.add_losses(losses_on({{1, 2}, {3, x}}));
        REFUSED(animator.add(4, 0, 0), "the loss is ... in epoch 4: use a smaller LR than 0.5");
    }
}

// ---------------------------------------------------------------------------------------------
// 12. Checks

TEST_CASE("check_first_minibatch: a right step passes, for each seed and device count" * trains) {
    Kept kept;
    for (int k : {1, 2, 5}) {
        if (small_only && k != 2) continue;
        for (bool lively : {false, true}) {
            rng.seed(k);
            init_params();
            if (lively) use_lively_params();
            const std::string says =
                format("first minibatch: %d device%s with one\n", k, k > 1 ? "s agree" : " agrees");
            for (int n : small_only ? Ints{3} : Ints{1, 7}) {
                INFO("k ", k, ", n ", n, ", lively ", lively);
                CHECK(first_minibatch(k, n) == says);
            }
        }
    }
    if (small_only) return;
    const std::string says = "first minibatch: 2 devices agree with one\n";
    for (float lr : {1e-6f, 50.0f}) CHECK(first_minibatch(2, 7, lr) == says);
    // Equal weights: equal logits, large ones, and gradients that are 0, perhaps but for rounding
    for (float weight : {0.1f, 10.0f, 0.0f}) {
        CAPTURE(weight);
        for (int i : {0, 2, 4, 6}) params[i] = full(params[i].shape, weight, cpu());
        CHECK(first_minibatch(2, 16) == says);
    }
    const Floats before = all_to_host(params); // the trial step has parameters of its own
    CHECK(first_minibatch(2, 16) == says);
    CHECK(all_to_host(params) == before);
    set_option("CHECKS=0");
    CHECK(first_minibatch(2, 16) == "");
}

TEST_CASE("check_first_minibatch: operators may round a shard otherwise than the whole minibatch") {
    // As tuned kernels do, which choose their tiles by the number of samples. Near 0 a ReLU then
    // takes the other side, and the gradient of the whole minibatch is another one, by far more
    // than rounding. So the check must not compute it.
    Kept kept;
    use_dense_layer();
    const auto dense = net;
    net = [=](const Tensor &X, const Tensors &p) {
        const Tensor y_hat = dense(X, p);
        return X.shape[0] < 6 ? y_hat : relu(y_hat); // as if outputs had been rounded up
    };
    CHECK(first_minibatch(2, 8) == "first minibatch: 2 devices agree with one\n");
    CHECK(first_minibatch(3, 8) == "first minibatch: 3 devices agree with one\n");
}

TEST_CASE("check_first_minibatch: a wrong gradient is named, with both numbers") {
    Kept kept;
    use_dense_layer();
    float factor = 1;
    int first = 0;
    exchange = [&](const PerDevice &grads) { // of devices first ... 1, spoil b1's gradient
        allreduce_naive(grads);
        for (size_t c = first; c < grads.size(); c++) {
            Floats b1 = to_host(grads[c][1]);
            for (float &x : b1) x *= factor;
            copyto(on_host(b1, {10}), grads[c][1]);
        }
    };
    CHECK(first_minibatch(2, 6) == "first minibatch: 2 devices agree with one\n");
    for (int c : {0, 1}) {
        first = c;
        for (float wrong : {0.5f, 2.0f, -1.0f, 0.0f, 1.00001f, NAN}) {
            CAPTURE(wrong);
            factor = wrong;
            const std::string says = first_minibatch(2, 6);
            check_says(says, format("the first minibatch: the gradient of b1[0] on gpu(%d) is ... "
                                       ", not ... : `make check ... ` looks for the cause", c));
            float is = 0, want = 0;
            CAPTURE(says);
            CHECK(sscanf(says.substr(std::min(says.find(" is "), says.size())).c_str(),
                         " is %f, not %f", &is, &want) == 2);
            if (!std::isnan(wrong)) CHECK(is == doctest::Approx(wrong * want).epsilon(1e-4));
        }
    }
}

TEST_CASE("check_first_minibatch: a wrong update is named, with both numbers") {
    Kept kept;
    PerDevice seen; // the parameters in each call of the network
    use_dense_layer(&seen);
    double factor = 1;
    exchange = [&](const PerDevice &grads) { // move b1 on gpu(1), so that sgd() adds to that
        allreduce_naive(grads);
        const Tensor b1 = seen.back()[1];
        Floats moved = to_host(b1);
        const Floats gradient = to_host(grads[1][1]);
        for (int j = 0; j < 10; j++) moved[j] -= (factor - 1) * 0.2 * gradient[j] / 6;
        copyto(on_host(moved, {10}), b1);
    };
    CHECK(first_minibatch(2, 6) == "first minibatch: 2 devices agree with one\n");
    for (double wrong : {6.0, 2.0, 1 / 6.0, 0.2, 0.0, -1.0, 0.999}) {
        CAPTURE(wrong);
        factor = wrong;
        check_says(first_minibatch(2, 6),
                   "the first minibatch: the update of b1[0] on gpu(1) is ... "
                   ", not ... : `make check ... ` looks for the cause");
    }
}

TEST_CASE("check_replicas: one changed number is named") {
    Kept kept;
    use_lively_params();
    params[3] = full({50}, 0, cpu());
    const PerDevice device_params = replicate(first_devices(3));
    check_replicas(device_params);
    fill(rows(device_params[2][3], 17, 18), -0.0f); // equal to 0, but not the same bits
    REFUSED(check_replicas(device_params),
            "the replicas differ: b2[17] is 0 on gpu(0) but -0 on gpu(2): does allreduce leave");
    fill(rows(reshape(device_params[1][4], {-1}), 102399, 102400), 1);
    REFUSED(check_replicas(device_params), "W3[102399] is ... on gpu(0) but 1 on gpu(1)");
    set_option("CHECKS=0");
    check_replicas(device_params);
}

// ---------------------------------------------------------------------------------------------
// 13. Program

TEST_CASE("parse_options: each option sets what it names; else the chapter's values hold") {
    Kept kept;
    CHECK(parse("") == "");
    CHECK(option("GPUS") == 1);
    CHECK(option("BATCH") == 256);
    CHECK((float)option("LR") == 0.2f);
    CHECK(option("EPOCHS") == 10);
    CHECK(option_text("ALLREDUCE") == "naive");
    CHECK(option("SEED") == 0);
    CHECK(option("SHUFFLE") == 1);
    CHECK(option("LIMIT") == 0);
    CHECK(option_text("DATA") == "data");
    CHECK(option("CHECKS") == 1);
    CHECK(option("PEERS") == 1);
    CHECK_FALSE(given("SEED"));
    CHECK(parse("GPUS=3 BATCH=64 EPOCHS=7 LR=1e-3 ALLREDUCE=yours LIMIT=9 SEED=12 SHUFFLE=0 "
                "CHECKS=0 PEERS=0 DATA=a=b") == "");
    CHECK(option("GPUS") == 3);
    CHECK(option("BATCH") == 64);
    CHECK((float)option("LR") == 1e-3f);
    CHECK(option("EPOCHS") == 7);
    CHECK(option_text("ALLREDUCE") == "yours");
    CHECK(option("SEED") == 12);
    CHECK(option("SHUFFLE") == 0);
    CHECK(option("LIMIT") == 9);
    CHECK(option_text("DATA") == "a=b");
    CHECK(option("CHECKS") == 0);
    CHECK(option("PEERS") == 0);
    CHECK(given("SEED"));
    CHECK(parse("GPUS=64") == "");
    CHECK(parse("GPUS=2 GPUS=5") == "");
    CHECK(option("GPUS") == 5); // the last one counts
}

TEST_CASE("parse_options: ALLREDUCE names the algorithm that train_batch calls") {
    Kept kept;
    for (const char *name : {"naive", "bucket", "yours"}) {
        CHECK(parse(std::string("ALLREDUCE=") + name) == "");
    }
    static int calls = 0;
    algorithms.push_back({"counted", [](const PerDevice &) { calls++; }});
    CHECK(parse("ALLREDUCE=counted") == "");
    sum_gradients(new_grads(1, {2}));
    CHECK(calls == 1);
}

TEST_CASE("parse_options: help names all options, and their defaults") {
    const TestFolder folder;
    Kept kept;
    const std::string help = output_of(folder, "help");
    for (const char *line : {"GPUS=2 help", "--help"}) {
        CHECK(printed([&] { CHECK(parse(line) == ""); }) == help);
    }
    for (const Option &o : option_table) check_parts(help, "\n  " + o.name + " ");
    check_parts(help, "(1) ... (256) ... (0.2) ... (10) ... (naive) ... (data)");
    for (const std::string &line : lines_of(help)) CHECK(line.size() <= 100);
    fails(folder, "help > /dev/full", "cannot write to stdout");
    CHECK(folder.listing() == std::set<std::string>());
}

TEST_CASE("parse_options: a wrong value is refused, and the message says what was expected") {
    Kept kept;
    const std::array<std::string, 3> cases[] = { // options, their values
        {"GPUS BATCH EPOCHS LIMIT SEED", "-1 99999999999 1e30 abc 1.5 2x nan -0.5",
         ": expected a whole number from "},
        {"GPUS BATCH EPOCHS", "0", ": expected a whole number from 1 to "},
        {"GPUS", "65", ": expected a whole number from 1 to 64"},
        {"BATCH", "60001", ": expected a whole number from 1 to 60000"},
        {"SHUFFLE CHECKS PEERS", "2 yes -1", ": expected a whole number from 0 to 1"},
        {"LR", "nan inf -inf 0 -1 -0.0 1e999 1e-999 0.1x 0,2",
         ": expected a number from 1e-30 to 1e+30"},
        {"ALLREDUCE", "magic", " is unknown: choose one of naive, bucket, yours"}};
    for (const auto &[names, values, says] : cases) {
        for (const std::string &name : words_of(names)) {
            for (const std::string &value : words_of(values)) {
                const std::string word = name + "=" + value;
                check_says(parse(word), word + " ... " + says);
            }
        }
    }
    const std::string known =
        " is not an option: write NAME=value with one of GPUS BATCH LR EPOCHS "
        "ALLREDUCE SEED SHUFFLE LIMIT DATA CHECKS PEERS";
    for (const char *word : {"GPU=2", "gpus=2", "NUM_GPUS=2", "--gpus=2", "COLOUR=red", "=2",
                             "more", "-h"}) {
        CHECK(parse(word) == word + known);
    }
    CHECK(parse("GPUS") == "GPUS has no value: write GPUS=value");
    CHECK(parse("DATA=") == "DATA has no value: write DATA=value");
    REFUSED(option("BACTH"), "BACTH" + known);
    CHECK(parse("GPUS=2 BATCH=1") ==
          "batch 1 cannot be split over 2 devices: use BATCH >= 2");
    CHECK(parse("") == ""); // nothing is left of what went wrong
}

TEST_CASE("check_cuda: a failed call is named with its line, and ends the program") {
    const TestFolder folder;
    const Run run = run_in_shell(folder, "FAILING_CALL=1", "");
    CHECK(run.status == 1);
    check_parts(run.err, "mgpu: ... tests.cu: ... cudaSetDevice(99): invalid device ordinal\n");
    CHECK(run.out == "");
    check_parts(run_in_shell(folder, "FAILING_CALL=700", "").err,
                "mgpu: ... illegal memory access ... : a kernel went beyond its arrays, or uses "
                "the memory of a device that is not its peer (\"staged\" in the first lines)\n");
}

TEST_CASE("program: devices, demos, a table of the epochs, the tutorial's last line" * trains) {
    DataFolder folder(few, few / 4);
    const double begin = Timer::now();
    const std::string out = output_of(folder, "GPUS=3 BATCH=8 EPOCHS=2");
    const double end = Timer::now();
    INFO(out);
    check_parts(out, "gpu(0): ... gpu(1): ... gpu(2): ... b1 weight: [0. 0. ... before allreduce: "
                     "... after allreduce:\n [[6. 6.]] @gpu(0) ... load into [gpu(0), gpu(1), "
                     "gpu(2)]\n ... first minibatch: 3 devices agree with one\nepoch ");
    const std::vector<std::string> lines = lines_of(out);
    REQUIRE(lines.size() > 4);
    CHECK(lines[lines.size() - 4] == "epoch      loss  test acc   seconds");
    double accuracy = 0, seconds = 0;
    for (int epoch : {1, 2}) {
        const Row row = row_of(lines[lines.size() - 4 + epoch]);
        CHECK(row.epoch == epoch);
        CHECK(row.loss == doctest::Approx(std::log(10.0)).epsilon(0.02)); // of tiny weights
        CHECK(row.seconds >= 0);
        accuracy = row.accuracy;
        seconds += row.seconds;
    }
    CHECK(seconds <= end - begin);
    check_last_line(lines.back(), accuracy, seconds / 2, "[gpu(0), gpu(1), gpu(2)]");
    check_lacks(out, "\r");
    check_lacks(out, "\033");
}

TEST_CASE("program: trainings that give the same bits, and others" * trains) {
    DataFolder folder(few, few / 4);
    const std::string some = format("BATCH=%d EPOCHS=2 ", few / 2 - 1);
    const Floats want = trained(folder, some);
    check_close(trained(folder, some + "SEED=0"), want, 0);
    CHECK(trained(folder, some + "SEED=1") != want);
    CHECK(trained(folder, some + "SHUFFLE=0") != want);
    CHECK(trained(folder, some + "LR=0.1") != want);
    CHECK(trained(folder, some + format("LIMIT=%d", few / 2)) != want);
    check_close(trained(folder, some + "CHECKS=0"), want, 0);
    check_close(trained(folder, some + "ALLREDUCE=bucket"), want, 0);
#ifdef CUDA_CPU
    check_close(trained(folder, some, "export CUDA_CPU_PEERS=0;", "; gpu(1): staged\n"), want, 0);
    check_close(trained(folder, some + "PEERS=0", "", "; gpu(1): staged\n"), want, 0);
    const std::string shared = "notice: 2 devices share 1 GPU, each with its own memory";
    check_close(trained(folder, some, "CUDA_CPU_DEVICES=1", shared + " ... ; gpu(1): same GPU\n"),
                want, 0);
#endif
}

// Make the mistake of the chapter's older PyTorch text: data[c] = ... puts the sum into the list
// alone.
static void allreduce_rebind(const PerDevice &grads) {
    for (size_t i = 0; i < grads[0].size(); i++) {
        Tensors data = across_devices(grads, i);
        for (size_t c = 1; c < data.size(); c++) add_(data[0], copyto(data[c], data[0].device));
        for (size_t c = 1; c < data.size(); c++) data[c] = copyto(data[0], data[c].device);
    }
}

TEST_CASE("program: a wrong allreduce is caught by the first minibatch, unless CHECKS=0" * trains) {
    DataFolder folder(few, few / 4);
    const std::string rebind = "GPUS=2 BATCH=8 EPOCHS=1 ALLREDUCE=rebind ";
    check_lacks(fails(folder, rebind, "the first minibatch: the gradient of W1[0] on gpu(1) is ... "
                                      "`make check ... ALLREDUCE=rebind BATCH=8 EPOCHS=1 GPUS=2"
                                      " ... ` looks for the cause"),
                "test acc:");
    check_parts(output_of(folder, rebind + "CHECKS=0"), "test acc:");
}

// There is one mistake for each function that finds some. Those functions have tests of their own.
TEST_CASE("program: a mistake gives one line, status 1 and leaves nothing behind") {
    DataFolder folder(8, 4);
    std::filesystem::copy(folder.file("data"), folder.file("short"));
    write_text(folder.file("short") + train_images, idx_images(8).substr(0, 1000));
    std::vector<std::pair<std::string, std::string>> cases = {
        {"GPUS=0", "GPUS=0: expected a whole number from 1 to 64"},
        {"BATCH=1 GPUS=2", "batch 1 cannot be split over 2 devices: use BATCH >= 2"},
        {"DATA=missing", "cannot read missing" + train_images + ": No such file"},
        {"DATA=short", "short" + train_images + " should be uint8 N x 28 x 28"}};
    // The first step makes the parameters huge, the second their loss
    const std::string huge = "BATCH=4 LR=1e30 CHECKS=0";
    if (!no_training) cases.push_back({huge, "in epoch 1: use a smaller LR than 1e+30"});
    for (const auto &[arguments, says] : cases) {
        const auto before = folder.listing();
        fails(folder, arguments, "... " + says);
        CHECK(folder.listing() == before);
    }
#ifdef CUDA_CPU
    if (small_only) return;
    write_data(folder.file("data"), 2000, 4);
    fails(folder, "BATCH=2000 GPUS=2", "... cudaMalloc ... : out of memory: use a smaller BATCH",
          "CUDA_CPU_MEMORY=8");
#endif
}

int main(int argc, char **argv) {
    // Memory that is freed is used again: a fresh page costs the kernel as much as a test of it
    mallopt(M_MMAP_MAX, 0);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    if (const char *code = getenv("FAILING_CALL")) {
        if (atoi(code) == cudaErrorIllegalAddress) CUDA_CHECK(cudaErrorIllegalAddress);
        CUDA_CHECK(cudaSetDevice(99));
    }
    if (argc > 1 && strcmp(argv[1], "--program") == 0) {
        algorithms.push_back({"rebind", allreduce_rebind});
    }
    return tests_main(argc, argv);
}
