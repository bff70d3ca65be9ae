// make check: what a wrong gradient, sum or update looks like.
// defines: notice, differs, explain_sum, explain_gradient, explain_update
#pragma once
#include "../watch/training_steps.h"

static int notices = 0;
__attribute__((format(printf, 1, 2))) static void notice(const char *format, ...) {
    va_list args;
    va_start(args, format);
    printf("notice: ");
    vprintf(format, args);
    printf("\n");
    va_end(args);
    notices++;
}
// Fail because of a difference that may be intended. With CHECKS=0 print a notice instead, one for
// each cause, and go on.
static void differs(const std::string &cause, const std::string &text) {
    static std::set<std::string> told;
    if (options.checks) error("%s; if this is intended, use CHECKS=0", text.c_str());
    if (told.insert(cause).second) notice("%s", text.c_str());
}

static bool near(double a, double b) { // up to 2%, or 0.01
    return std::fabs(a - b) <= std::max(0.01, 0.02 * std::fabs(b));
}
// What a sum on device c looks like that holds device d's part a[d] times. If `exact`, not even
// rounding has changed the factors.
static std::string explain_sum(const std::vector<double> &a, int c, bool exact) {
    const int k = a.size();
    auto all = [&](double x) {
        return std::all_of(a.begin(), a.end(), [=](double factor) { return near(factor, x); });
    };
    if (all(0)) return "it is 0: does backward run for this device?";
    if (all(-1)) return "it has the wrong sign";
    if (k > 1 && all(1.0 / k))
        return "it is the mean, but must be the sum: sgd divides by the batch size";
    if (k > 1 && all(k)) return format("it is %d times the sum: is something added again?", k);
    std::string text;
    int only = -1; // the one device whose part it is, once
    for (int d = 0; d < k; d++) {
        bool alone = k > 1 && near(a[d], 1);
        for (int e = 0; e < k; e++) alone = alone && (e == d || near(a[e], 0));
        if (alone) only = d;
        if (std::fabs(a[d] - 1) < 1e-3) continue;
        text +=
            (text.empty() ? "it " : ", ") +
            format(near(a[d], 0) ? "lacks %s's" : "has %s's %.4g times", str(gpu(d)).c_str(), a[d]);
    }
    if (only == c)
        return c == 0
                   ? "it is still only the device's own: are the others' not added (add_), or on "
                     "another device than the one that sends the sum, or too late (is a wait "
                     "missing?), or does allreduce not get each gradient?"
                   : "it is still only the device's own, though gpu(0) has the sum: is the sum not "
                     "broadcast into the tensor, with copyto(data[0], data[i])? (data[i] = ... "
                     "only changes the list.)";
    for (double x : a)
        if (x > k && exact)
            return "the same tensor is summed again and again: does the loop take the i-th tensor "
                   "of each device (across_devices)?";
    if (only >= 0)
        return format("it is only %s's: is the sum broadcast in the wrong direction or before "
                      "everything is added, is something added to another chunk than the one that "
                      "was sent, or is a wait missing?",
                      str(gpu(only)).c_str());
    if (text.empty())
        return exact ? "" : "it is nearly right: are numbers rounded to fewer bits on the way?";
    return text + (exact ? ": is something not added, or added twice, or is a wait missing?"
                         : ": is the cause the shards (split_and_load), backward on each device, "
                           "or allreduce?");
}

static Flat gradient_on_one(const Tensor &X, const Tensor &y) {
    const std::vector<Tensor> p = get_params(params, gpu(0));
    backward(loss(net(copyto(X, gpu(0)), p), copyto(y, gpu(0))));
    return all_to_host(gradients({p})[0]);
}
// The gradients of the shards, computed one by one on gpu(0). They have the same shapes as on their
// devices, and so the same roundings.
static std::vector<Flat> gradients_of_shards(const Tensor &X, const Tensor &y, int k) {
    std::vector<Flat> shards;
    const auto [X_shards, y_shards] = split_batch(X, y, first_devices(k));
    for (int c = 0; c < k; c++) shards.push_back(gradient_on_one(X_shards[c], y_shards[c]));
    return shards;
}
static double dot(const Flat &a, const Flat &b, const std::vector<int> &indices) {
    double sum = 0;
    for (int j : indices) sum += (double)a[j] * b[j];
    return sum;
}

// What a gradient on device c looks like where it is wrong: the factors a for which sum a[d] *
// shards[d] comes nearest to it (least squares) say which shards are in it and how often. The right
// gradient of the step before is `before`.
static std::string explain_gradient(const Flat &got, const Flat &want,
                                    const std::vector<int> &wrong, const std::vector<Flat> &shards,
                                    int c, const Flat &before = {}) {
    const int k = shards.size();
    for (int j : wrong)
        if (std::isnan(got[j])) return "it was not yet written: is a wait or a barrier missing?";
    // A fit of k factors wants more than k numbers
    if (wrong.size() < 4 * (size_t)k && got.size() > 100)
        return format("only %zu numbers are wrong, from %s to %s: does a chunk, a grid or a loop "
                      "end too early?",
                      wrong.size(), name_of(wrong[0]).c_str(), name_of(wrong.back()).c_str());
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
    double off = 0, apart = 0; // squares of what is wrong, and of it without the step before
    for (int j : wrong) {
        off += std::pow(got[j] - want[j], 2);
        apart += before.empty() ? INFINITY : std::pow(got[j] - want[j] - before[j], 2);
    }
    if (left > 0.02 * squares && apart < 1e-4 * off)
        return "the gradients of the minibatch before are in it: is exchange called once a step, "
               "after backward on all devices, and is every gradient cleared (grad_to_add_to)?";
    // No factors explain all wrong numbers: those of the first parameter may have some
    const std::string name = name_of(wrong[0]), parameter = name.substr(0, name.find('['));
    std::vector<int> first;
    for (int j : wrong)
        if (name_of(j).substr(0, name_of(j).find('[')) == parameter) first.push_back(j);
    if (left > 0.02 * squares && first.size() >= 4 * (size_t)k && first.size() < wrong.size())
        return "in " + parameter + " " + explain_gradient(got, want, first, shards, c);
    if (left > 0.02 * squares)
        return "it is not a sum of the shards' gradients: are wrong numbers added, is a wait "
               "missing, or does a device compute with other parameters or another's labels?";
    return explain_sum(a, c, false);
}

// Explain an update on device c that is `ratio` times the right one, where those of earlier devices
// are right. batch: that of the options
static std::string explain_update(double ratio, double n, double shard, double lr, double batch,
                                  double k, int c = 0) {
    const std::pair<double, const char *> mistakes[] = {
        {-1, "it goes the wrong way (param -= lr * grad / batch_size)"},
        {n, "it is not divided by the batch size"},
        {1 / n, "it is divided by the batch size twice"},
        {n * n, "it is multiplied by the batch size, not divided by it"},
        {n / shard, "it is divided by the size of the shard, not of the minibatch"},
        {n / (int)(n / k), "it is divided by the size of the shard, not of the minibatch"},
        {k, "is lr multiplied by the number of devices, or does sgd run for each of them?"},
        {1 / k, "is lr divided by the number of devices? The batch size is that of all devices"},
        {2, "it is made twice: does sgd run more than once on each device?"},
        {n / batch, "it is divided by BATCH, not by the samples of this minibatch: X.shape[0]"},
        {shard / batch, "it is divided by BATCH, not by the samples of this minibatch"},
        {lr, "it is multiplied by the learning rate twice"},
        {1 / lr, "it is not multiplied by the learning rate"}};
    for (const auto &[x, text] : mistakes)
        if (x != 1 && std::fabs(ratio - x) < 0.01 * std::fabs(x)) return text;
    return ratio == 0 ? "the parameter is unchanged: does sgd run on every device, after backward?"
                      : format("it is %.3g times the right update%s", ratio,
                               c > 0 ? ", though gpu(0)'s is right: does sgd keep something, such "
                                       "as a velocity, that the devices share?"
                                     : "");
}
