// Tests of make check: it says nothing of what is right, and names what is wrong.
//
//     make test T='-tc=check_*'
//
// defines: main

#define MGPU_NO_MAIN
#include "../watch/watch.h"
#include PROGRAM
#include "check.cu"

#include "../tests.h"

typedef std::function<void(const PerDevice &grads)> Exchange;

// Select a network and initialize its parameters. Kept puts the last one back.
static void set_model(const std::string &name, int seed) {
    use_model(name);
    rng.seed(seed);
    experiment.init_params();
}

TEST_CASE("check_copies: says that a wait is missing" * doctest::skip(no_training)) {
    CHECK(error_of(check_copies) == "");
    watch::no_waits = true;
    check_says(
        error_of(check_copies),
        "the data of copyto from gpu(0) to gpu(1) arrives changed from index 0 of 16384 on: src "
        "was read too early or too late: are both calls of make_wait there?");
    watch::no_waits = false;
}

// What make check says of a step that `spoil` has changed, and what it prints.
typedef std::function<void(Training &training, Tensors &losses, const Tensor &X, const Tensor &y)>
    Spoil;
static std::string checked_step(int k, int n, const Spoil &spoil = nullptr,
                                std::string *line = nullptr) {
    const auto batch = minibatch(n, 3);
    const Tensor &X = batch.first, &y = batch.second;
    Training training(k, params);
    Tensors losses = train_batch(X, y, training.device_params, training.devices, options.lr);
    if (spoil) spoil(training, losses, X, y);
    std::string said;
    const std::string out = printed([&] {
        said = error_of([&] {
            check_step("", X, y, losses, training.device_params, options.lr);
            check_slopes("", X, y);
        });
    });
    if (line) *line = out;
    else check_lacks(out, "notice");
    return said;
}

TEST_CASE("check_step, check_slopes: right steps pass" * doctest::skip(no_training)) {
    Kept kept;
    for (std::string model : {"lenet", "lab_cnn"})
        for (const auto &sizes : {std::pair(1, 7), std::pair(2, 1), std::pair(5, 7)}) {
            const int k = sizes.first, n = sizes.second;
            if (small_only && (model != "lab_cnn" || k != 2)) continue;
            set_model(model, k); // k is the seed too
            INFO(model, ", k ", k, ", n ", n);
            CHECK(checked_step(k, n) == "");
        }
    set_model("lenet", 0);
    for (float c : {0.1f, 1.0f, 10.0f, 0.0f}) { // equal logits, large ones, gradients that are 0
        CAPTURE(c);
        for (int i : {0, 2, 4, 6}) params[i] = full(params[i].shape, c, cpu());
        std::string line;
        CHECK(checked_step(2, 16, nullptr, &line) == "");
        for (const char *name : {"W1", "b1", "W2", "b2", "W3", "b3", "W4"})
            if (c == 0) // with equal weights, too, the gradient is 0 but for rounding
                check_parts(line, format("notice: the gradient of %s is 0 everywhere\n", name));
        check_lacks(line, "gradient of b4");
    }
}

static Tensor with_gradient_times(float factor, const Tensor &y) {
    return add_to_tape("times", y, {y}, [=](const Tensor &gradient) { // dy *= factor
        Tensor dy = gradient;
        dy.grad = std::make_shared<Tensor>(dy);
        sgd({dy}, 1 - factor, 1);
    });
}
TEST_CASE("check_step: what is wrong is named by what it looks like" * doctest::skip(small_only)) {
    Kept kept;
    // The gradients become sums of the shards', factors[c][d] times device d's on device c
    auto gradients_are = [](const Arrays &factors) {
        return [=](Training &t, Tensors &, const Tensor &X, const Tensor &y) {
            const int k = t.devices.size();
            const auto shards = gradients_of_shards(X, y, k);
            for (int c = 0; c < k; c++)
                for (size_t i = 0, at = 0; i < params.size(); i++) {
                    Floats sum, moved = to_host(params[i]);
                    for (float &x : moved) {
                        sum.push_back(0);
                        for (int d = 0; d < k; d++) sum.back() += factors[c][d] * shards[d][at];
                        x -= options.lr * sum.back() / X.shape[0];
                        at++;
                    }
                    copyto(on_host(sum, params[i].shape), gradient(t.device_params[c][i]));
                    copyto(on_host(moved, params[i].shape), t.device_params[c][i]);
                }
        };
    };
    // Each update becomes `ratio` times itself
    auto updates_are = [](double ratio) {
        return [=](Training &t, Tensors &, const Tensor &, const Tensor &) {
            for (size_t i = 0; i < params.size(); i++) {
                const Tensor &p = t.device_params.back()[i];
                Floats after = to_host(p), before = to_host(params[i]);
                for (size_t j = 0; j < after.size(); j++)
                    after[j] = before[j] + ratio * (after[j] - before[j]);
                copyto(on_host(after, p.shape), p);
            }
        };
    };
    auto one_gradient = [](float value, bool all) { // b4's on device 1
        return [=](Training &t, Tensors &, const Tensor &, const Tensor &) {
            Floats numbers = to_host(gradient(t.device_params[1][7]));
            for (size_t j = 0; j < (all ? numbers.size() : 1); j++) numbers[j] = value * (j % 3);
            if (!all) numbers[0] = value;
            copyto(on_host(numbers, {10}), gradient(t.device_params[1][7]));
        };
    };
    const std::string own = "it is still only the device's own", without = "it lacks gpu(1)'s";
    const float n = 6, lr = 0.2f;
    const struct {
        Spoil spoil;
        std::string says;
    } mistakes[] = {
        {gradients_are({{.5, .5}, {.5, .5}}),
         "the gradient of W1[0] on gpu(0) is ... it is the mean, but must be the sum"},
        {gradients_are({{2, 2}, {2, 2}}), "it is 2 times the sum"},
        {gradients_are({{-1, -1}, {-1, -1}}), "it has the wrong sign"},
        {gradients_are({{1, 0}, {0, 1}}), own},
        {gradients_are({{1, 1}, {0, 1}}), "on gpu(1) is ... " + own},
        {gradients_are({{1, 1}, {1, 0}}), "on gpu(1) is ... it is only gpu(0)'s"},
        {gradients_are({{2, 1}, {2, 1}}), "it has gpu(0)'s 2 times:"},
        {gradients_are({{1.005, 1}, {1.005, 1}}), ": it has gpu(0)'s 1.005 times"},
        {gradients_are({{0, 0}, {0, 0}}), "it is 0: does backward run"},
        {one_gradient(NAN, false), "it was not yet written"},
        {one_gradient(7, true), "it is not a sum of the shards' gradients"},
        {updates_are(0), "the update of W1[0] on gpu(1) is 0, not ... the parameter is unchanged"},
        {updates_are(-1), "it goes the wrong way"},
        {updates_are(n), "it is not divided by the batch size"},
        {updates_are(1 / n), "it is divided by the batch size twice"},
        {updates_are(2), "it is divided by the size of the shard"},
        {updates_are(lr), "it is multiplied by the learning rate twice"},
        {updates_are(1 / lr), "it is not multiplied by the learning rate"},
        {updates_are(3), "it is 3 times"},
        {[](Training &, Tensors &l, const Tensor &, const Tensor &) { l.pop_back(); },
         "train_batch returns losses of 1 devices, but there are 2"},
        {[](Training &, Tensors &losses, const Tensor &, const Tensor &) {
             losses[1] = rows(losses[1], 0, 2);
         },
         "it has 6 samples, but the devices have 5 losses in total"},
        {[](Training &, Tensors &losses, const Tensor &, const Tensor &) {
             copyto(full({1}, NAN, gpu(1)), rows(losses[1], 2, 3));
         },
         "the loss on gpu(1) is nan"}};
    set_model("lenet", 0);
    for (const auto &mistake : mistakes) {
        CAPTURE(mistake.says);
        check_says(checked_step(2, n, mistake.spoil), mistake.says);
    }
    // Three devices: parts that are not there, and such that are there too often
    check_says(checked_step(3, n, gradients_are({{1, 0, 2}, {1, 0, 2}, {1, 0, 2}})),
               without + ", has gpu(2)'s 2 times");
    check_says(checked_step(3, n, gradients_are({{1, 1, 1}, {1, 1, 1}, {3, 3, 3}})),
               "gpu(2) is ... it is 3 times the sum");
    // What the step before has left: its sums, and its images (a right step comes before)
    const auto batch_before = minibatch(n, 4);
    const Tensor images = batch_before.first, labels = batch_before.second;
    const Flat before = gradient_on_one(images, labels);
    auto step_before = [&] {
        Training training(2, params);
        const Tensors losses =
            train_batch(images, labels, training.device_params, training.devices, options.lr);
        check_step("", images, labels, losses, training.device_params, options.lr);
    };
    auto with_gradients = [](std::function<Flat(const Flat &, const Tensor &)> changed) {
        return [=](Training &t, Tensors &, const Tensor &X, const Tensor &y) {
            const Flat all = changed(gradient_on_one(X, y), y);
            for (const auto &p : t.device_params)
                for (size_t i = 0, at = 0; i < params.size(); at += size(params[i++])) {
                    copyto(on_host(Floats(&all[at], &all[at] + size(params[i])), params[i].shape),
                           gradient(p[i]));
                }
        };
    };
    step_before();
    check_says(checked_step(2, n, with_gradients([=](Flat g, const Tensor &) {
                                for (size_t j = 0; j < g.size(); j++) g[j] += before[j];
                                return g;
                            })),
               "the gradients of the minibatch before are in it");
    step_before();
    check_says(checked_step(2, n, with_gradients([=](const Flat &, const Tensor &y) {
                                return gradient_on_one(images, y);
                            })),
               "the gradient is that of the images of the minibatch before");
    // A backward that is wrong on every device alike
    for (float factor : {-1.0f, 0.3f, 3.0f}) {
        net = [=](const Tensor &X, const std::vector<Tensor> &params) {
            return with_gradient_times(factor, lenet(X, params));
        };
        check_says(checked_step(2, n), "along its gradient changes the loss by ");
    }
    net = [](const Tensor &X, const std::vector<Tensor> &params) { // the gradient of a mean
        return with_gradient_times(1.0f / X.shape[0], lenet(X, params));
    };
    check_says(checked_step(2, n), "the shards' gradients add up to 2 times the minibatch's");
}

#ifdef FAST // for its table of operators
// What check_operators says where the result of linear is spoilt
static std::string checked_operators(const std::function<Tensor(Tensor)> &spoil) {
    static std::function<Tensor(Tensor)> after; // the entry cannot capture
    const Operators kept = operators;
    static Operators before;
    before = kept, after = spoil;
    operators.linear = [](const Tensor &X, const Tensor &W, const Tensor &b) {
        const Operators watched = std::exchange(operators, before);
        const Tensor y = after(linear(X, W, b));
        operators = watched;
        return y;
    };
    const std::string said = error_of(check_operators);
    operators = kept;
    tapes.clear();
    return said;
}
TEST_CASE("check_operators: which operator is wrong, and how" * doctest::skip(small_only)) {
    CHECK(checked_operators([](Tensor y) { return y; }) == "");
    check_says(checked_operators([](Tensor y) {
                   copyto(full({1}, 7, y.device), rows(reshape(y, {-1}), 1, 2));
                   return y;
               }),
               "linear(X (5,3), W (3,2), b (2)): y[0,1] is 7, not ... (1 of 10 numbers are wrong, "
               "in y[0,1]): ");
    check_says(checked_operators([](Tensor y) {
                   add_to_tape("zero", y, {y}, [=](const Tensor &dy) {
                       copyto(full({5, 2}, 0, y.device), dy);
                   });
                   return y;
               }),
               "linear(X (5,3), W (3,2), b (2)): dX[0,0] is 0, not ... (15 of 15 numbers are "
               "wrong, in dX[:,:], all of them 0): ");
    check_says(checked_operators([](Tensor y) {
                   return reshape(y, {-1, 1});
               }),
               "the result has shape (10,1), but must have 10 numbers for 5 samples");
    check_says(checked_operators([](Tensor y) { return rows(y, 0, 1); }),
               "the result has shape (1,2), but must have 10 numbers for 5 samples");
}
TEST_CASE("check_operators: CHECKS=0 lets another result through, and checks its slopes" *
          doctest::skip(small_only)) {
    Kept kept;
    options.checks = 0;
    std::string said;
    const std::string out = printed([&] {
        said = checked_operators([](Tensor y) {
            copyto(full({1}, 7, y.device), rows(reshape(y, {-1}), 1, 2));
            return y;
        });
    });
    CHECK(said == "");
    check_parts(out, "notice: linear(X (5,3), W (3,2), b (2)): y[0,1] is 7, not ... , in dX[0,:]): "
                     "it is not the slope of this y: ");
}
#endif
TEST_CASE("check_train: what differs is told by the losses, the log and SAVE" *
          doctest::skip(small_only)) {
    Kept kept;
    set_model("lenet", 0);
    options.gpus = 2;
    options.batch = 8;
    options.allreduce = "naive";
    exchange = nullptr;
    std::vector<Row> rows; // of a right training
    auto explained = [&](std::vector<Row> wrong) {
        return explain_losses(wrong, rows, false, std::mt19937());
    };
    for (DataSet *set : {&train_set, &test_set}) {
        *set = {20, std::vector<uint8_t>(20 * 28 * 28), std::vector<uint8_t>(20)};
        for (uint8_t &pixel : set->images) pixel = dice() % 256;
        for (uint8_t &label : set->labels) label = dice() % 10;
    }
    PerDevice device_params;
    auto rows_by = [&](Mistake mistake) {
        rng = std::mt19937();
        return rows_with(mistake, device_params);
    };
    rows = rows_by(none);
    check_says(explained(rows_by(one_order)), "is train_iter.epoch() called only once?");
    check_says(explained(rows_by(anew_each_epoch)), "does each epoch begin with the parameters");
    check_says(explained(rows_by(anew_each_step)), "does each step begin with the parameters");
    check_says(explained(rows_by(last_loss)), "does Animator::end_epoch add up the losses?");
    check_says(explained({{9, 0, 0, 0}, rows[1]}), "does train give each minibatch");
    check_says(explained({rows[0], {9, 0, 0, 0}}), "what is different in the second epoch");
    check_says(explain_accuracy(rows[0].acc, 1, rows), "what was known before this epoch");
    train_set = test_set = {};
}
TEST_CASE("check_exchange: whose numbers are missing, and a wait" * doctest::skip(no_training)) {
    Kept kept;
    set_model("lenet", 0);
    options.gpus = 2;
    auto says = [](const Exchange &wrong) {
        exchange = wrong;
        return error_of(check_exchange);
    };
    CHECK(says(allreduce_naive) == "");
    check_says(
        says([](const PerDevice &) {}),
        "number 0, on gpu(0) is 1, not 9 (all numbers are wrong): it is still only the device's");
    check_says(says([](const PerDevice &g) { allreduce({g[0][0], g[1][0]}); }), "the sum of b1, ");
    check_says(says([](const PerDevice &g) {
                   allreduce_naive(g);
                   add_(g[1][2], g[1][2]);
               }),
               "W2, number 0, on gpu(1) is 18, not 9 (25000 of ... it is 2 times the sum");
    check_says(says([](const PerDevice &g) { // W1's sum is put one further on
                   allreduce_naive(g);
                   const Tensor W1 = reshape(g[0][0], {-1}), shifted = copyto(W1, gpu(0));
                   copyto(rows(shifted, 0, 179), rows(W1, 1, 180));
               }),
               "W1, number 1, on gpu(0) is 9, not 18 ... the sum that belongs to another index");
    watch::no_waits = true;
    check_says(says(allreduce_naive), "a wait missing");
    watch::no_waits = false;
}

int main(int argc, char **argv) { return tests_main(argc, argv); }
