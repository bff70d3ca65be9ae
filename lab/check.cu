// make check: k devices against one, parameter by parameter, for several minibatches, and gradients
// against slopes of the loss. What is wrong is named by what it looks like.
// defines: check_copies, check_step, check_slopes, check, main
#ifndef MGPU_NO_MAIN // the tests have included mgpu.cu, and have a main
#define MGPU_NO_MAIN
#define CHECK_MAIN
#ifndef PROGRAM
#define PROGRAM "../mgpu.cu"
#endif
#include PROGRAM
#endif
#include "common.h"

// --- does copyto move what it is to move, and wait for it?

// A pattern is copied over and compared, its source overwritten at once, while i is late and while
// j is.
static void check_copy_while_late(Device i, Device j) {
    auto pause = [](Device d) {
        auto sleep = [](void *) { usleep(1000); };
        CHECK(cudaLaunchHostFunc(on(d), sleep, nullptr));
    };
    const Tensor zeros = full({1 << 14}, 0, cpu());
    const Tensor pattern = random(zeros.shape, std::uniform_real_distribution<float>(1, 2 + j.id));
    for (Device late : {i, j}) {
        const Tensor src = copyto(zeros, i), dst = empty(pattern.shape, j);
        waitall();
        pause(late);
        copyto(pattern, src);
        copyto(src, dst);
        copyto(zeros, src);
        pause(j); // the host is to wait too
        const Tensor back = copyto(dst, cpu());
        const Flat got(back.ptr(), back.ptr() + size(back)), want = to_host(pattern);
        const int wrong = std::mismatch(want.begin(), want.end(), got.begin()).first - want.begin();
        if (wrong == size(pattern)) continue;
        waitall();
        error("what copyto moves from %s to %s arrives changed from index %d of %d on: %s",
              str(i).c_str(), str(j).c_str(), wrong, size(pattern),
              to_host(back) == want ? "does the host wait for what it reads?"
              : wrong > 0           ? "are the bytes sizeof(float) * numbers?"
              : got[0] == 0         ? "src was read too early or too late: are both wait_for there?"
                                    : "is it src that is copied to dst, after it was written?");
    }
}
static void check_copies() { // between all devices that are there
    for (int i = 0; i < (int)gpus.size(); i++)
        for (int j = 0; j < (int)gpus.size(); j++)
            if (j != i) check_copy_while_late(gpu(i), gpu(j));
}

// --- what a wrong gradient, or update, looks like

static std::vector<Flat> gradients_of_shards(const Tensor &X, const Tensor &y, int k) {
    std::vector<Flat> shards;
    int begin = 0;
    for (int n : shard_sizes(X.shape[0], k)) {
        shards.push_back(gradient_on_one(rows(X, begin, begin + n), rows(y, begin, begin + n)));
        begin += n;
    }
    return shards;
}
static double dot(const Flat &a, const Flat &b, const std::vector<int> &indices) {
    double sum = 0;
    for (int j : indices) sum += (double)a[j] * b[j];
    return sum;
}
static bool near(double a, double b) { // up to 2%, or 0.01
    return std::fabs(a - b) <= std::max(0.01, 0.02 * std::fabs(b));
}

// What a gradient on device c looks like where it is wrong: the factors a for which sum a[d] *
// shards[d] comes nearest to it (least squares) say which shards are in it and how often.
static std::string explain_gradient(const Flat &got, const std::vector<int> &wrong,
                                    const std::vector<Flat> &shards, int c) {
    const int k = shards.size();
    std::vector<std::vector<double>> row(k, std::vector<double>(k + 1)); // the normal equations
    for (int d = 0; d < k; d++)
        for (int e = 0; e <= k; e++) row[d][e] = dot(shards[d], e < k ? shards[e] : got, wrong);
    for (int p = 0; p < k; p++) // Gauss-Jordan elimination; an empty shard's row is 0
        for (int d = 0; d < k && row[p][p] > 0; d++)
            for (int e = k; e >= p && d != p; e--) row[d][e] -= row[d][p] / row[p][p] * row[p][e];
    const double squares = dot(got, got, wrong);
    double left = squares; // of them what the factors do not explain
    std::vector<double> a(k, 1);
    for (int p = 0; p < k; p++) {
        if (row[p][p] > 0) a[p] = row[p][k] / row[p][p];
        left -= a[p] * dot(shards[p], got, wrong);
    }
    auto all = [&](double x) {
        return std::all_of(a.begin(), a.end(), [=](double factor) { return near(factor, x); });
    };
    if (std::isnan(left)) return "nobody has written it: is a wait or a barrier missing?";
    if (left > 0.02 * squares)
        return "it is no sum of the shards' gradients: are wrong numbers added, is a wait missing?";
    if (all(0)) return "it is 0: does backward run for this device?";
    if (all(-1)) return "it has the wrong sign";
    if (k > 1 && all(1.0 / k))
        return "it is the mean: allreduce is to sum, sgd divides by the batch size";
    if (k > 1 && all(k)) return format("it is %d times the sum: added again?", k);
    std::string text;
    bool own = k > 1; // alone
    for (int d = 0; d < k; d++) {
        own = own && near(a[d], d == c);
        if (near(a[d], 1)) continue;
        text += (text.empty() ? "it is " : ", ") +
                format(near(a[d], 0) ? "without %s's shard" : "%s's shard %.2g times",
                       str(gpu(d)).c_str(), a[d]);
    }
    if (own)
        return "it is that of the device's own shard: does backward run on every device, does "
               "allreduce get each gradient and send the sum?";
    if (text.empty())
        return "it is nearly right: are numbers rounded to fewer bits on their way, or a few lost?";
    return text + ": is it the shards (split_and_load), backward on each device, or allreduce?";
}
// What an update looks like that is `ratio` times the right one.
static std::string explain_update(double ratio, double batch, double shard, double lr) {
    const std::pair<double, const char *> mistakes[] = {
        {-1, "it goes the wrong way, param -= lr * grad / batch_size"},
        {batch, "it is not divided by the batch size"},
        {1 / batch, "it is divided by the batch size twice"},
        {batch / shard, "it is divided by the size of the shard, not of the minibatch"},
        {lr, "it is multiplied by the learning rate twice"},
        {1 / lr, "it is not multiplied by the learning rate"}};
    for (const auto &[x, text] : mistakes)
        if (std::fabs(ratio - x) < 0.02 * std::fabs(x)) return text;
    return std::fabs(ratio) < 1e-3 ? "the parameter is what it was"
                                   : format("it is %f times the right one", ratio);
}

// --- a minibatch

static double sum_of(const Tensor &t) {
    const Flat numbers = to_host(t);
    return std::accumulate(numbers.begin(), numbers.end(), 0.0);
}
// The losses: one for each sample, all of them numbers.
static void check_losses(const std::string &where, const std::vector<Tensor> &ls, int n) {
    int losses = 0;
    for (const Tensor &l : ls) {
        losses += size(l);
        const double sum = sum_of(l);
        if (!std::isfinite(sum))
            error("%sthe loss on %s is %s: is memory read "
                  "that nobody has written, or a barrier (__syncthreads) or a wait missing?",
                  where.c_str(), str(l.device).c_str(), std::isnan(sum) ? "nan" : "infinite");
    }
    if (losses != n)
        error("%sit has %d samples, the devices' shards together have %d: what "
              "does split_and_load lose or repeat?",
              where.c_str(), n, losses);
}
// Are they gradients at all? A small step of one parameter along its gradient must raise the mean
// loss of some samples by step * |gradient|^2, one against it lower it by as much. (Up to a factor
// of 2: ReLUs may switch on the way, and rounding hides changes below a millionth of the loss or of
// the logits.)
static void check_slopes(const std::string &where, const Tensor &X, const Tensor &y) {
    if (operators.rounding > 1e-3f) return; // tf32 rounds the steps off
    const int n = std::min(16, X.shape[0]);
    const Tensor x = copyto(rows(X, 0, n), gpu(0)), labels = copyto(rows(y, 0, n), gpu(0));
    const std::vector<Tensor> p = get_params(params, gpu(0));
    backward(loss(net(x, p), labels));
    NoGrad guard;
    auto mean_loss = [&] { return sum_of(loss(net(x, p), labels)) / n; };
    const double whole = std::fabs(mean_loss());
    double largest = whole; // of the numbers that are rounded on the way to it
    for (double z : to_host(net(x, p))) largest = std::max(largest, std::fabs(z));
    for (size_t i = 0; i < p.size(); i++) {
        const Flat g = to_host(gradient(p[i])), old = to_host(params[i]);
        double slope = 0, squares = 0; // |gradient of the mean loss|^2, |parameter|^2
        for (double a : g) slope += a / n * a / n;
        for (double a : old) squares += a * a;
        const double step =
            std::min(1e-5 * whole / slope, 1e-3 * (0.1 + std::sqrt(squares)) / std::sqrt(slope));
        double change = 0;
        for (int way : {1, -1}) {
            const Tensor moved = empty(p[i].shape, cpu());
            for (size_t j = 0; j < g.size(); j++) moved.ptr()[j] = old[j] + way * step / n * g[j];
            copyto(moved, p[i]);
            change += way * mean_loss();
        }
        copyto(params[i], p[i]);
        const double want = 2 * step * slope;
        if (want > 1e-6 * largest && !(change > want / 2 && change < want * 2))
            error("%sa step of %s along its gradient changes the loss by %.2g, "
                  "not by %.2g: is a backward kernel wrong, or a sign?",
                  where.c_str(), param_names[i].c_str(), change, want);
    }
}

// Where there are buffers, batch norm sees each device's shard by itself
static bool has_batch_norm() {
    return std::any_of(params.begin(), params.end(), [](auto &p) { return !p.requires_grad; });
}
// What train_batch has made of a minibatch and of `params`: ls and device_params. An error names
// the first number that is wrong.
static void check_step(const std::string &where, const Tensor &X, const Tensor &y,
                       const std::vector<Tensor> &ls,
                       const std::vector<std::vector<Tensor>> &device_params, float lr) {
    const int n = X.shape[0], k = device_params.size();
    check_losses(where, ls, n);
    const auto [want, unit] = gradient_in_shards(X, y, has_batch_norm() ? k : 1);
    for (size_t j = 0; j < unit.size(); j++)
        if (unit[j] == 0 && name_of(j).find("[0]") != std::string::npos) {
            const std::string name = name_of(j);
            printf("notice: %sthe gradient of %s is 0 everywhere\n", where.c_str(),
                   name.substr(0, name.size() - 3).c_str());
        }
    const Flat old = all_to_host(params);
    const Grads grads = gradients(device_params);
    for (int c = 0; c < k; c++) {
        const Flat got = all_to_host(grads[c]), now = all_to_host(device_params[c]);
        std::vector<int> wrong, wrong_update;
        Flat update(got.size()), right(got.size());
        for (size_t j = 0; j < got.size(); j++) {
            update[j] = old[j] - now[j];
            right[j] = lr * got[j] / n;
            if (!(std::fabs(got[j] - want[j]) <= operators.rounding * unit[j])) wrong.push_back(j);
            if (update[j] != right[j] && // both infinite: the loss will tell
                !(std::fabs(update[j] - right[j]) <=
                  1e-5f * std::fabs(right[j]) + 1e-6f * std::fabs(old[j])))
                wrong_update.push_back(j);
        }
        auto at = [&](int j) { return name_of(j) + " on " + str(gpu(c)); };
        if (!wrong.empty())
            error(
                "%sthe gradient of %s is %.6g, on one device %.6g (%zu of %zu numbers are wrong): "
                "%s",
                where.c_str(), at(wrong[0]).c_str(), got[wrong[0]], want[wrong[0]], wrong.size(),
                got.size(), explain_gradient(got, wrong, gradients_of_shards(X, y, k), c).c_str());
        if (!wrong_update.empty())
            error("%sthe update of %s is %.6g, not %.6g: %s", where.c_str(),
                  at(wrong_update[0]).c_str(), update[wrong_update[0]], right[wrong_update[0]],
                  explain_update(dot(update, right, wrong_update) / dot(right, right, wrong_update),
                                 n, size(ls[c]), lr)
                      .c_str());
    }
}

// Some minibatches of a model on the run's devices, from the parameters that a run starts with.
// Each step is compared with one device's from the same parameters.
static void check_model(int minibatches) {
    const std::vector<Device> devices = first_devices(options.gpus);
    rng.seed(options.seed);
    init_model();
    if (!options.init.empty()) load_safetensors(options.init, params);
    exchange = exchange_by(options.allreduce, options.overlap);
    auto device_params = replicate(devices);
    DataIter train_iter = load_data_fashion_mnist(options.batch).first;
    Tensor X, y;
    train_iter.reset();
    int step = 0;
    const std::string who = format("%s, %d device%s, batch %d", options.model.c_str(), options.gpus,
                                   options.gpus > 1 ? "s" : "", options.batch);
    for (; step < minibatches && train_iter.next(X, y); step++) {
        const std::string where = format("%s, minibatch %d: ", who.c_str(), step + 1);
        for (size_t i = 0; i < params.size(); i++) copyto(device_params[0][i], params[i]);
        const auto ls = train_batch(X, y, device_params, devices, options.lr);
        check_step(where, X, y, ls, device_params, options.lr);
        if (step == 0 && !has_batch_norm()) check_slopes(where, X, y);
        check_replicas(device_params);
    }
    printf("%s: %d minibatch%s right\n", who.c_str(), step, step > 1 ? "es are" : " is");
}
static int minibatches = 3;
// MODEL alone, or lenet and lab_cnn (resnet18 takes minutes on a CPU: ask for it).
void check() {
    for (const std::string model : {"lenet", "lab_cnn", "resnet18"}) {
        if (given("model") ? model != options.model : model == "resnet18") continue;
        const Options as_given = options;
        options.model = model;
        if (!given("batch")) options.batch = 0; // what this model's chapter has
        if (!given("lr")) options.lr = 0;
        if (!given("allreduce")) options.allreduce.clear();
        complete_options();
        if (model == "resnet18" && !given("batch")) options.batch = 4 * options.gpus;
        check_model(model == "resnet18" ? 1 : minibatches);
        options = as_given;
    }
    printf("check: nothing wrong was found\n");
    params.clear();
}

#ifdef CHECK_MAIN
static void run_check() {
    try {
        set_up(options.gpus, true);
    } catch (const std::exception &) { // of a copy it says nothing more
        check_copies();
        throw;
    }
    check_copies();
    check();
}
int main(int argc, char **argv) {
    options.gpus = 2;
    note_given();
    return mgpu_main(argc, argv, run_check);
}
#endif
