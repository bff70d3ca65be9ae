// make check: check the parts of a training from the bottom up, each against an independent one:
// copies, operators (reference.h), data, replicas, allreduce, the network, steps, accuracy, epochs.
// Describe the first mistake by what its numbers look like (wrong_numbers.h).
// defines: check_copies, check_data, check_replicated, check_exchange, check_slopes, check_step,
// check_accuracy, check_train, check, main
#ifndef MGPU_NO_MAIN // the tests have included mgpu.cu, and have a main
#define MGPU_NO_MAIN
#define CHECK_MAIN
#ifndef PROGRAM
#define PROGRAM "../../mgpu.cu"
#endif
#include "../watch/watch.h" // messages can be late
#include PROGRAM
#endif
#include <atomic>
#include <fcntl.h>
#include <set>

#include "wrong_numbers.h"
#include "reference.h"

// --- does copyto move what it is to move, and wait for it?

// A pattern is copied over and compared, its source overwritten at once, while i is late and while
// j is.
static void check_copy_while_late(Device i, Device j) {
    const Tensor zeros = full({1 << 14}, 0, cpu());
    const Tensor pattern = random(zeros.shape, std::uniform_real_distribution<float>(1, 2 + j.id));
    for (Device late : {i, j}) {
        const Tensor src = copyto(zeros, i), dst = empty(pattern.shape, j);
        waitall();
        pause_stream(late);
        copyto(pattern, src);
        copyto(src, dst);
        copyto(zeros, src);
        if (!watch::late_messages) pause_stream(j); // the host is to wait too
        const Tensor back = copyto(dst, cpu());
        const Flat got(back.ptr(), back.ptr() + size(back)), want = to_host(pattern);
        const int wrong = std::mismatch(want.begin(), want.end(), got.begin()).first - want.begin();
        if (wrong == size(pattern)) continue;
        waitall();
        error(
            "the data of copyto from %s to %s arrives changed from index %d of %d on: %s",
            str(i).c_str(), str(j).c_str(), wrong, size(pattern),
            to_host(back) == want ? "does the host wait for the copy that it reads?"
            : wrong > 0           ? "is the number of bytes sizeof(float) * numbers?"
            : got[0] == 0
                ? "src was read too early or too late: are both calls of make_wait there? (If so, "
                  "the machine's IOMMU or ACS may be the cause: use PEERS=0)"
                : "is src copied to dst, and only after src was written?");
    }
}
static void check_copies() { // between all devices that are there
    const HostIn watched("copyto");
    for (bool late : {false, true})
        for (int i = 0; i < (int)device_states.size(); i++)
            for (int j = 0; j < (int)device_states.size(); j++) {
                watch::late_messages = late;
                if (j != i) check_copy_while_late(gpu(i), gpu(j));
            }
    watch::late_messages = false;
}

// --- the data: minibatches against the bytes of the files

// Which pixels are not background tells images apart, in whatever way pixels are scaled
template <class Pixel> static size_t outline(const Pixel *image, Pixel background) {
    size_t hash = 0;
    for (int p = 0; p < 28 * 28; p++) hash = (hash ^ (image[p] != background)) * 0x100000001b3 + p;
    return hash;
}
static void check_epochs(const std::string &who, DataIter iter, const DataSet &set) {
    std::map<size_t, std::multiset<int>> file; // the labels of images with this outline
    for (int i = 0; i < set.count; i++)
        file[outline<uint8_t>(&set.images[i * 28 * 28], 0)].insert(set.labels[i]);
    std::vector<size_t> orders[2];
    float background = 0;
    for (auto &order : orders) {
        auto left = file;
        for (auto [X, y] : iter.epoch()) {
            if (order.empty() && &order == orders) { // look at the first minibatch's pixels
                const std::set<float> pixels(X.ptr(), X.ptr() + size(X));
                background = *pixels.begin();
                const float brightest = *pixels.rbegin();
                if (background < 0 && brightest < -background)
                    error("%s: pixels go from %g to %g: are bytes taken "
                          "as signed (int8_t)? Look at DataIter::minibatch",
                          who.c_str(), background, brightest);
                if (pixels.size() <= 2)
                    error("%s: pixels are only %g and %g: is byte / 255 computed in integers? "
                          "Look at DataIter::minibatch",
                          who.c_str(), background, brightest);
                if (brightest > 20 || brightest - background < 0.1f)
                    notice(
                        "%s: pixels go from %g to %g: are they divided by 255, and only once? Look "
                        "at DataIter::minibatch",
                        who.c_str(), background, brightest);
            }
            for (int i = 0; i < X.shape[0]; i++) {
                const int sample = order.size();
                order.push_back(outline(X.ptr() + i * 28 * 28, background));
                auto found = left.find(order.back());
                if (!file.count(order.back()))
                    return differs(who, format("%s: image %d of an epoch is not in the file: look "
                                               "at DataIter::minibatch",
                                               who.c_str(), sample));
                if (found == left.end())
                    error("%s: image %d of an epoch has occurred before: look at `order`, "
                          "DataIter::minibatch and epoch",
                          who.c_str(), sample);
                auto label = found->second.find(y.ptr()[i]);
                if (label == found->second.end())
                    error("%s: image %d of an epoch has label %g, but %d in the file: "
                          "are images and labels taken in the same order? Look at "
                          "DataIter::minibatch",
                          who.c_str(), sample, y.ptr()[i], *found->second.begin());
                found->second.erase(label);
                if (found->second.empty()) left.erase(found);
            }
        }
        if (!left.empty())
            error("%s: an epoch has %zu samples, but the data set has %d: does DataIter::epoch "
                  "leave out "
                  "the last, smaller minibatch?",
                  who.c_str(), order.size(), set.count);
    }
    if ((orders[0] == orders[1]) == iter.shuffle && set.count > 10)
        error("%s: two epochs have the samples in %s order: look at DataIter::epoch", who.c_str(),
              iter.shuffle ? "the same" : "another");
}
static void check_data() {
    const HostIn watched("DataIter::epoch or split_batch");
    if (memcmp(&train_set.images[0], &test_set.images[0], 28 * 28) == 0)
        error("the first test image is the first training image: look at load_data's files");
    const int train_count = train_set.count;
    train_set.count = std::min(train_count, 5000);
    auto [train_iter, test_iter] = load_data_fashion_mnist(97); // the last one is smaller
    check_epochs("training data", std::move(train_iter), train_set);
    check_epochs("test data", std::move(test_iter), test_set);
    train_set.count = train_count;
    for (int n : {97, 10, 1}) { // samples on k devices
        const Tensor X = reshape(arange(6 * n), {n, 2, 3});
        const std::vector<Device> devices = first_devices(options.gpus);
        const auto shards = split_batch(X, arange(n), devices);
        if (shards.first.size() != devices.size() || shards.second.size() != devices.size())
            error("split_batch: it returns %zu shards of X and %zu of its labels y for %zu devices",
                  shards.first.size(), shards.second.size(), devices.size());
        std::set<float> seen; // sample i has the numbers from 6 * i on, and label i
        for (size_t s = 0; s < devices.size(); s++) {
            const Tensor &x = shards.first.at(s), &label = shards.second.at(s);
            if (x.device.id != (int)s || label.device.id != (int)s)
                error("split_and_load: shard %zu is on %s", s, str(x.device).c_str());
            const Flat numbers = to_host(x), labels = to_host(label);
            if (numbers.size() != 6 * labels.size())
                error("split_batch: shard %zu has %zu samples but %zu labels", s,
                      numbers.size() / 6, labels.size());
            for (size_t i = 0; i < labels.size(); i++) {
                if (numbers[6 * i] != 6 * labels[i] || numbers[6 * i + 5] != 6 * labels[i] + 5)
                    error("split_batch: sample %zu of shard %zu does not belong to its label: are "
                          "X and y split alike? Look at split_and_load",
                          i, s);
                if (!seen.insert(labels[i]).second)
                    error("split_batch: two shards hold the same sample, number %g of %d: look at "
                          "split_and_load (begin, end)",
                          labels[i], n);
            }
        }
        if ((int)seen.size() != n)
            error("split_batch: the shards on %zu devices hold %zu of %d samples: look at "
                  "split_and_load",
                  devices.size(), seen.size(), n);
    }
}

// --- replicas, before a step

static void check_replicated(const PerDevice &device_params) {
    for (size_t c = 0; c < device_params.size(); c++)
        check_replica(params, param_names, device_params[c], gpu(c));
    const PerDevice grads = gradients(device_params);
    for (size_t c = 0; c < device_params.size(); c++)
        for (size_t i = 0; i < params.size(); i++) {
            if (i >= grads[c].size() || grads[c][i].ptr() != gradient(device_params[c][i]).ptr())
                error("gradients: number %zu of gpu(%zu) is not the gradient of its %s", i + 1, c,
                      param_names[i].c_str());
            if (across_devices(grads, i)[c].ptr() != grads[c][i].ptr())
                error("across_devices(grads, %zu): its element %zu is not grads[%zu][%zu]", i, c, c,
                      i);
        }
}

// --- allreduce, with numbers that tell whose they are: 8^c from device c

// Copies that are staged through the host may wait there
static bool all_are_peers(int k) {
    for (int i = 0; i < k; i++)
        for (int j = 0; j < k; j++) {
            int can = physical(gpu(i)) == physical(gpu(j));
            if (!can) CUDA_CHECK(cudaDeviceCanAccessPeer(&can, physical(gpu(i)), physical(gpu(j))));
            if (!can) return false;
        }
    return true;
}
// The late device waits until the host has come back from the exchange, or a while
static std::atomic<bool> came_back, was_waited_for;
static void be_late(void *) {
    for (int ms = 0; ms < 3 || !came_back; ms++) {
        usleep(1000);
        if (ms < 2000) continue;
        was_waited_for = true;
        return;
    }
}
static void check_exchange_while(const PerDevice &grads, const std::string &who, int late) {
    const int k = grads.size();
    auto number = [](int c, int j) { return (float)((1 + j % 3) * (1 << 3 * c)); };
    std::vector<std::vector<Tensor>> host(k);
    for (int c = 0; c < k; c++)
        for (const Tensor &g : grads[c]) {
            copyto(full(g.shape, 0, cpu()), g);
            Tensor t = empty(g.shape, cpu());
            for (int j = 0; j < size(t); j++) t.ptr()[j] = number(c, j);
            host[c].push_back(t);
        }
    waitall();
    came_back = was_waited_for = false;
    if (late >= 0 && late < k)
        CUDA_CHECK(cudaLaunchHostFunc(stream_of(gpu(late)), be_late, nullptr));
    for (int c = 0; c < k; c++)
        for (size_t i = 0; i < grads[c].size(); i++) {
            copyto(host[c][i], grads[c][i]);
            if (after_gradient) after_gradient(grads[c][i]);
        }
    {
        const HostIn watched("the sum of gradients");
        const watch::Sum summing;
        watch::late_messages = late == k;
        exchange ? exchange(grads) : run_allreduce("naive", grads);
        watch::late_messages = false;
    }
    came_back = true;
    if (was_waited_for && all_are_peers(k) && options.allreduce != "host" &&
        options.allreduce != "local")
        differs("a wait", format("%s: the host waits for gpu(%d), where only a stream should wait: "
                                 "look at make_wait (cudaStreamWaitEvent) and copyto, which blocks "
                                 "only for a copy to the host",
                                 who.c_str(), late));
    for (int c = 0; c < k; c++) {
        long wrong = 0, numbers = 0, means = 0, sums_of_others = 0;
        size_t at = 0, last = 0; // the tensors of the first wrong number and of the last one
        int first = 0;
        float value = 0;
        for (size_t i = 0; i < grads[c].size(); i++) {
            const Flat got = to_host(grads[c][i]);
            for (int j = 0; j < (int)got.size(); j++, numbers++) {
                float want = 0;
                for (int d = 0; d < k; d++) want += number(d, j);
                if (got[j] == want) continue;
                if (wrong++ == 0) at = i, first = j, value = got[j];
                last = i;
                means += near(got[j], want / k);
                for (int others = 1; others <= 3; others++)
                    sums_of_others += got[j] == want / (1 + j % 3) * others;
            }
        }
        if (wrong == 0) continue;
        std::vector<double> times(k); // so often device d's number is in it
        double want = 0, sum = 0;
        int left = std::isfinite(value) ? value : -1;
        for (int d = k - 1; d >= 0; d--) {
            times[d] = left / (1 << 3 * d) / (1. + first % 3);
            left %= 1 << 3 * d;
            want += number(d, first);
            sum += times[d] * number(d, first);
        }
        const bool mean = means == wrong;
        if (mean) times.assign(k, 1. / k);
        const std::string what =
            sums_of_others == wrong
                ? "it is the sum that belongs to another index: is an offset wrong (size(t), not "
                  "shape[0]), or where a chunk begins?"
            : mean || (sum == value && value >= 0)
                ? explain_sum(times, c, true)
                : "it is not a sum of the devices' numbers: is a wait missing, or something added "
                  "that was not yet written?";
        const std::string part =
            wrong == numbers
                ? "all numbers are wrong"
                : format("%ld of %ld numbers are wrong, in %s to %s, and all others "
                         "right: does a loop, a chunk or a grid leave them out?",
                         wrong, numbers, param_names[at].c_str(), param_names[last].c_str());
        const std::string text =
            format("%s%s: the sum of %s, number %d, on gpu(%d) is %g, not %g (%s): %s", who.c_str(),
                   late < 0    ? ""
                   : late == k ? ", messages late"
                               : format(", gpu(%d) late", late).c_str(),
                   param_names[at].c_str(), first, c, value, want, part.c_str(), what.c_str());
        if (mean) return differs("a mean", text);
        error("%s%s", text.c_str(),
              late < 0 ? ""
                       : " It is right when nothing is late: is a make_wait missing, or the wrong "
                         "way round?");
    }
}
static void check_exchange() {
    const int k = options.gpus;
    if (k > 7) return; // 24 bits have place for seven
    const std::string who = format("allreduce %s, k = %d%s", options.allreduce.c_str(), k,
                                   overlaps() ? ", OVERLAP" : "");
    const PerDevice grads = make_grads(k, trained_sizes());
    // Nothing is late; then each device; then, with k, all messages
    for (int late = -1; late <= k; late++) check_exchange_while(grads, who, late);
}

// --- the network: is its gradient the slope of its loss?

static double sum_of(const Tensor &t) {
    const Flat numbers = to_host(t);
    return std::accumulate(numbers.begin(), numbers.end(), 0.0);
}
static bool has_batch_norm() { // which sees each device's shard by itself
#ifdef NETWORKS
    return !buffers.empty();
#else
    return false;
#endif
}
static bool rounds_to_tf32() {
#ifdef FAST
    return fast::precision == "tf32";
#else
    return false;
#endif
}
// Parameters at which a loss can be measured: weights of N(0, 2 / fan_in), so that every layer
// counts; biases away from 0, where the background of an image would lie on ReLU's kink.
static std::vector<Tensor> well_scaled() {
    std::vector<Tensor> scaled;
    dice.seed(2);
    for (const Tensor &p : params) {
        Tensor t = copyto(p, cpu());
        const int dims = p.shape.size(), fan_in = dims > 2 ? size(p) / p.shape[0] : p.shape[0];
        std::normal_distribution<float> normal(0, std::sqrt(2.0f / fan_in));
        for (int j = 0; j < size(p); j++)
            if (dims > 1) t.ptr()[j] = normal(dice);
            else t.ptr()[j] += 0.1f * std::sin(j + 1.0f);
        scaled.push_back(t);
    }
    return scaled;
}
// A small step of one parameter along its gradient must raise the mean loss by step * |gradient|^2,
// one against it lower it by as much, to 5% (10% with batch norm): ReLUs switch on the way. If too
// many do, a shorter step must be right.
static void check_slopes(const std::string &where, const Tensor &X, const Tensor &y) {
    if (rounds_to_tf32()) return; // the steps, too
    const bool bn = has_batch_norm();
    const int n = std::min(bn ? 4 : 8, X.shape[0]);
    const Tensor x = copyto(rows(X, 0, n), gpu(0)), labels = copyto(rows(y, 0, n), gpu(0));
    const std::vector<Tensor> start = well_scaled(), p = get_params(start, gpu(0));
    check_network(where, rows(x, 0, bn ? 1 : std::min(n, 2)), get_params(start, gpu(0)));
    auto mean_loss = [&] { // recording, so that batch norm is in training, too
        const double sum = sum_of(loss(net(x, p), labels));
        tapes[0].clear();
        return sum / n;
    };
    backward(loss(net(x, p), labels));
    const Flat logits = to_host(net(x, p));
    tapes[0].clear();
    if (*std::min_element(logits.begin(), logits.end()) >= 0)
        notice("%sno output of the network is below 0: is there a relu after the last layer?",
               where.c_str());
    const double whole = std::fabs(mean_loss());
    double largest = whole; // of the numbers that are rounded on the way to it
    for (double z : logits) largest = std::max(largest, std::fabs(z));
    const size_t every = 1 + p.size() / 32; // parameter
    for (size_t i = 0; i < p.size(); i += every) {
        const Flat g = to_host(gradient(p[i])), old = to_host(start[i]);
        double slope = 0, squares = 0; // |gradient of the mean loss|^2, |parameter|^2
        for (double a : g) slope += a / n * a / n;
        for (double a : old) squares += a * a;
        if (slope == 0)
            error("%sthe gradient of %s is 0 everywhere: does the network use it, and does every "
                  "operator between it and the loss record its backward, with all inputs?",
                  where.c_str(), param_names[i].c_str());
        double step =
            std::min(1e-3 * whole / slope, 1e-2 * (0.1 + std::sqrt(squares)) / std::sqrt(slope));
        double change = 0, want = 0;
        bool right = false;
        for (int tries = 0; tries < 3 && !right;
             tries++, step /= 4) { // the shorter, the fewer ReLUs
            want = 2 * step * slope;
            if (want <= 1e-5 * largest) { // too small to be measured
                right = tries == 0;
                break;
            }
            change = 0;
            for (int way : {1, -1}) {
                const Tensor moved = empty(p[i].shape, cpu());
                for (size_t j = 0; j < g.size(); j++)
                    moved.ptr()[j] = old[j] + way * step / n * g[j];
                copyto(moved, p[i]);
                change += way * mean_loss();
            }
            right = std::fabs(change - want) <= (bn ? 0.1 : 0.05) * want;
        }
        copyto(start[i], p[i]);
        if (!right)
            error("%sa step of %s along its gradient changes the loss by %.3g, not by %.3g, though "
                  "every operator is right by itself: look at the network, backward, "
                  "add_to_tape and reshape",
                  where.c_str(), param_names[i].c_str(), change, want);
    }
}

// --- a step

// The losses: one for each sample, those that one device gives.
static void check_losses(const std::string &where, const std::vector<Tensor> &losses,
                         const Tensor &X, const Tensor &y) {
    const int n = X.shape[0];
    Flat all;
    for (const Tensor &l : losses) {
        const Flat part = to_host(l);
        all.insert(all.end(), part.begin(), part.end());
        const double sum = sum_of(l);
        if (!std::isfinite(sum))
            error("%sthe loss on %s is %s: is unwritten memory read, or is a barrier "
                  "(__syncthreads) or a wait missing?",
                  where.c_str(), str(l.device).c_str(), std::isnan(sum) ? "nan" : "infinite");
    }
    if ((int)all.size() != n)
        error("%sit has %d samples, but the devices have %zu losses in total: is there one per "
              "sample (loss, softmax_cross_entropy)? Does split_and_load lose or repeat samples?",
              where.c_str(), n, all.size());
    if (has_batch_norm()) return;
    NoGrad guard;
    const std::vector<Tensor> p = get_params(params, gpu(0));
    const Flat one = to_host(loss(net(copyto(X, gpu(0)), p), copyto(y, gpu(0))));
    auto other = [](float a, float b) {
        return !(std::fabs(a - b) <= 1e-3f * std::max(1.0f, std::fabs(b)));
    };
    Flat in_order = all, one_in_order = one; // samples may go to other devices than here
    std::sort(in_order.begin(), in_order.end());
    std::sort(one_in_order.begin(), one_in_order.end());
    int wrong = 0;
    for (int i = 0; i < n; i++) wrong += other(in_order[i], one_in_order[i]);
    for (int i = 0, c = 0, first = 0; i < n && wrong; i++) {
        while (i - first == size(losses[c])) first += size(losses[c++]);
        if (other(all[i], one[i]))
            error("%sthe loss of sample %d on %s is %.6g, but on one device %.6g: does each shard "
                  "of X meet its own shard of labels y and the parameters of its device? Look at "
                  "train_batch and split_batch",
                  where.c_str(), i, str(gpu(c)).c_str(), all[i], one[i]);
    }
}

// The shards' gradients add up to the minibatch's: but for a ReLU here or there that lets through
// what it does not in a batch of another size, which is rounded otherwise.
static void check_sum_of_shards(const std::string &where, const Tensor &X, const Tensor &y,
                                const Flat &sum) {
    const Flat one = gradient_on_one(X, y);
    const double whole = std::inner_product(one.begin(), one.end(), one.begin(), 0.0);
    const double ratio = std::inner_product(sum.begin(), sum.end(), one.begin(), 0.0) / whole;
    if (whole > 0 && !(std::fabs(ratio - 1) <= 0.02))
        error("%sthe shards' gradients add up to %.3g times the minibatch's: does the loss or a "
              "backward divide by the number of samples (only sgd should), or leave some of them "
              "out?",
              where.c_str(), ratio);
}

// What train_batch has made of a minibatch and of `params`: losses, device_params. An error names
// the first number that is wrong.
static void check_step(const std::string &where, const Tensor &X, const Tensor &y,
                       const std::vector<Tensor> &losses, const PerDevice &device_params,
                       float lr) {
    const int n = X.shape[0], k = device_params.size();
    for (int c = 0; c < k; c++)
        if (!tapes[c].empty())
            error("%safter train_batch %zu operators are still on the tape of %s: does backward "
                  "run for every device's loss?",
                  where.c_str(), tapes[c].size(), str(gpu(c)).c_str());
    if (losses.size() != device_params.size())
        error("%strain_batch returns losses of %zu devices, but there are %zu: does a loop over "
              "the devices leave one out?",
              where.c_str(), losses.size(), device_params.size());
    check_losses(where, losses, X, y);
    const std::vector<Flat> shards = gradients_of_shards(X, y, k);
    Flat want(shards[0].size()), magnitude(want.size()); // sums of x, of |x|
    for (const Flat &shard : shards)
        for (size_t j = 0; j < want.size(); j++) {
            want[j] += shard[j];
            magnitude[j] += std::fabs(shard[j]);
        }
    const float *next = magnitude.data();
    for (size_t i = 0; i < params.size(); next += size(params[i++]))
        if (std::all_of(next, next + size(params[i]), [](float x) { return x == 0; }))
            notice("%sthe gradient of %s is 0 everywhere", where.c_str(), param_names[i].c_str());
    if (!has_batch_norm()) check_sum_of_shards(where, X, y, want);
    static std::pair<Tensor, Flat> last; // images and gradient of the step before
    const auto [X_before, before] = std::exchange(last, {copyto(X, cpu()), want});
    const Flat old = all_to_host(params);
    const PerDevice grads = gradients(device_params);
    for (int c = 0; c < k; c++) {
        const Flat got = all_to_host(grads[c]), now = all_to_host(device_params[c]);
        std::vector<int> wrong, wrong_update;
        Flat update(got.size()), right(got.size());
        for (size_t j = 0; j < got.size(); j++) {
            update[j] = old[j] - now[j];
            right[j] = lr * got[j] / n;
            const float off = std::fabs(got[j] - want[j]), moved = std::fabs(update[j] - right[j]);
            const float rounding = 1e-5f * std::fabs(right[j]) + 1e-6f * std::fabs(old[j]);
            if (!(off <= 1.2e-7f * k * magnitude[j])) wrong.push_back(j);
            if (update[j] == right[j]) continue; // even if both are infinite: the loss will tell
            if (!(moved <= rounding)) wrong_update.push_back(j);
        }
        auto at = [&](int j) { return name_of(j) + " on " + str(gpu(c)); };
        if (!wrong.empty() && X_before.shape == X.shape) {
            const Flat other = gradient_on_one(X_before, y); // roughly: not cut into shards
            size_t alike = 0;
            for (int j : wrong)
                alike += std::fabs(got[j] - other[j]) <= 0.01 * std::fabs(got[j] - want[j]);
            if (alike > 0.9 * wrong.size())
                error("%sthe gradient is that of the images of the minibatch before, with these "
                      "labels: does train_batch use this X?",
                      where.c_str());
        }
        if (!wrong.empty())
            differs("a gradient",
                    format("%sthe gradient of %s is %.6g, but on one device %.6g (%zu of %zu "
                           "numbers are wrong): %s",
                           where.c_str(), at(wrong[0]).c_str(), got[wrong[0]], want[wrong[0]],
                           wrong.size(), got.size(),
                           explain_gradient(got, want, wrong, shards, c, before).c_str()));
        if (wrong_update.empty()) continue;
        double off = 0, squares = 0; // from what the device's own gradient would have made
        for (int j : wrong_update) {
            off += std::pow(update[j] - lr * shards[c][j] / n, 2);
            squares += std::pow(update[j], 2);
        }
        const double ratio = dot(update, right, wrong_update) / dot(right, right, wrong_update);
        const std::string what =
            k > 1 && off < 1e-4 * squares
                ? "it is made from the device's own gradient: does sgd run before allreduce?"
                : explain_update(ratio, n, size(losses[c]), lr, options.batch, k, c);
        differs("an update", format("%sthe update of %s is %.6g, not %.6g: %s", where.c_str(),
                                    at(wrong_update[0]).c_str(), update[wrong_update[0]],
                                    right[wrong_update[0]], what.c_str()));
    }
}

// --- test accuracy, and whole epochs

// Running statistics begin again, equal on all devices.
static void begin_again() {
#ifdef NETWORKS
    reset_buffers();
#endif
}
static void no_tape(const char *who) {
    for (const auto &[d, tape] : tapes)
        if (!tape.empty())
            error("%s leaves %zu operators on the tape of gpu(%d): is there a NoGrad?", who,
                  tape.size(), d);
}
// An accuracy that was counted on the host: of all samples, and as the mean of the minibatches'
struct Accuracy {
    double all = 0, mean_of_means = 0;
};
static Accuracy accuracy_of(DataIter iter, const std::vector<Tensor> &p) {
    NoGrad guard;
    Accuracy accuracy;
    for (auto [X, y] : iter.epoch()) {
        const Flat z = to_host(net(copyto(X, gpu(0)), p));
        const int n = X.shape[0], classes = z.size() / n;
        for (int i = 0; i < n; i++) {
            int best = 0;
            for (int j = 1; j < classes; j++)
                if (z[i * classes + j] > z[i * classes + best]) best = j;
            if (best != y.ptr()[i]) continue;
            accuracy.all += 1.0 / iter.set->count;
            accuracy.mean_of_means += 1.0 / n / ceil_div(iter.set->count, iter.batch_size);
        }
    }
    return accuracy;
}
static double test_accuracy(const std::vector<Tensor> &p) {
    return accuracy_of(load_data_fashion_mnist(97).second, p).all;
}
static void check_accuracy(const std::string &where) {
    const HostIn watched("evaluate_accuracy");
    begin_again();
    const std::vector<Device> devices = first_devices(options.gpus);
    std::vector<std::vector<Tensor>> p;
    for (Device d : devices) p.push_back(get_params(well_scaled(), d));
    const int batch = std::max(1, test_set.count * 2 / 5); // the last minibatch is smaller
    DataIter test_iter = load_data_fashion_mnist(batch).second;
    const auto [counted, mean_of_means] = accuracy_of(load_data_fashion_mnist(batch).second, p[0]);
    auto on_one = [&](const Tensor &x) { return net(x, p[0]); };
    const double one = evaluate_accuracy_gpu(on_one, test_iter, devices[0]);
    no_tape("evaluate_accuracy_gpu");
#ifdef NETWORKS
    const double all = evaluate_accuracy_gpus(p, test_iter, devices);
    no_tape("evaluate_accuracy_gpus");
#else
    const double all = counted;
#endif
    // A network that says each sample's label: all are right
    int seen = 0;
    auto says_labels = [&seen](const Tensor &x) {
        Tensor z = full({x.shape[0], 10}, 0, cpu());
        for (int i = 0; i < x.shape[0]; i++)
            z.ptr()[i * 10 + test_set.labels[seen++ % test_set.count]] = 1;
        return copyto(z, x.device);
    };
    const double all_right = evaluate_accuracy_gpu(says_labels, test_iter, devices[0]);
    for (const auto &[name, got, want] : {std::tuple("evaluate_accuracy_gpu", one, counted),
                                          {"evaluate_accuracy_gpus", all, counted},
                                          {"evaluate_accuracy_gpu", all_right, 1.0}})
        if (std::fabs(got - want) > 1e-5)
            error("%s%s finds %.5f of %d test samples right, but a count here finds %.5f: %s",
                  where.c_str(), name, got, test_set.count, want,
                  std::fabs(got - mean_of_means) < 1e-5
                      ? "it is the mean of the minibatches' accuracies, of which the last has "
                        "fewer samples"
                      : "look there and at count_correct (the largest of 10 logits must be at the "
                        "label, and each sample counts once)");
}

struct Row { // of an epoch
    double loss, acc, seconds, train_acc; // train_acc: of the training samples
};
constexpr double pause_in_epoch = 0.2; // seconds
// The result of two epochs of `train`: what it passes to after_epoch, at last gpu(0)'s parameters
struct Trained {
    std::vector<Row> rows;
    Flat saved;
    size_t steps = 0, devices = 0;
};
static Trained trained(size_t most) { // steps
    const auto as_given = std::tuple(options, exchange, after_epoch);
    options.epochs = 2;
    options.checks = 0;
    fflush(stdout);
    const int out = dup(STDOUT_FILENO), null = open("/dev/null", O_WRONLY);
    dup2(null, STDOUT_FILENO); // it prints nothing
    Trained result;
    exchange = [&, sum = exchange](const PerDevice &grads) {
        result.devices = grads.size();
        if (++result.steps > most * 3 / 2) // more than another epoch's
            error("it trains on more than %zu minibatches in 2 epochs of %zu: does a loop never "
                  "end, or is a minibatch trained twice?",
                  most * 3 / 2, most / 2);
        sum ? sum(grads) : run_allreduce("naive", grads);
        if (result.steps == most / 2) // a device is late at the end of the first epoch
            watch::pause(stream_of(grads.back()[0].device), 1e3 * pause_in_epoch);
    };
    after_epoch = [&](const Animator &animator, const std::vector<Tensor> &p) {
        if (animator.Y.size() != result.rows.size() + 1)
            error("after epoch %zu animator has %zu rows: does animator.add come before "
                  "after_epoch?",
                  result.rows.size() + 1, animator.Y.size());
        result.rows.push_back(
            {animator.loss.back(), animator.Y.back(), animator.seconds.back(), 0});
        result.saved = all_to_host(p);
    };
    std::string said;
    try {
        const HostIn watched("train");
        experiment.train(options.gpus, options.batch, options.lr);
    } catch (const std::exception &e) { said = e.what(); }
    fflush(stdout);
    dup2(out, STDOUT_FILENO);
    close(out), close(null);
    std::tie(options, exchange, after_epoch) = as_given;
    if (said.find("labels") < said.size())
        said += ": are X and y of the same minibatch, or is X that of the minibatch before?";
    if (!said.empty()) error("train, on %d samples: %s", train_set.count, said.c_str());
    return result;
}

// Mistakes that change the losses of `train`, each with the question that leads to it
enum Mistake { none, one_order, anew_each_epoch, anew_each_step, last_loss };
static const std::pair<Mistake, const char *> mistakes_of_train[] = {
    {one_order, "is train_iter.epoch() called only once? It gives a new order each epoch"},
    {anew_each_epoch, "does each epoch begin with the parameters on the host (get_params)?"},
    {anew_each_step, "does each step begin with the parameters on the host (get_params), or is lr "
                     "0?"},
    {last_loss, "it is the last minibatch's part: does Animator::end_epoch add up the losses?"}};
// Train for two epochs by train_batch alone, with one of the mistakes, and return the rows.
static std::vector<Row> rows_with(Mistake mistake, PerDevice &device_params) {
    const std::vector<Device> devices = first_devices(options.gpus);
    device_params = replicate(devices);
    DataIter train_iter = load_data_fashion_mnist(options.batch).first;
    std::vector<std::pair<Tensor, Tensor>> minibatches;
    std::vector<Row> rows;
    begin_again();
    for (int epoch = 0; epoch < 2; epoch++) {
        if (epoch == 0 || mistake != one_order) minibatches = train_iter.epoch();
        if (mistake == anew_each_epoch) device_params = replicate(devices);
        double loss = 0;
        for (auto [X, y] : minibatches) {
            if (mistake == anew_each_step) device_params = replicate(devices);
            if (mistake == last_loss) loss = 0;
            for (const Tensor &l : train_batch(X, y, device_params, devices, options.lr))
                loss += sum_of(l);
        }
        DataIter samples = load_data_fashion_mnist(97).first;
        samples.shuffle = false;
        rows.push_back({loss / train_set.count, test_accuracy(device_params[0]), 0,
                        accuracy_of(samples, device_params[0]).all});
    }
    return rows;
}
static bool like(const Row &a, const Row &b) { // in their losses
    return std::fabs(a.loss - b.loss) <= 1e-4 * std::fabs(b.loss);
}

// Explain losses that differ from those of the same minibatches one after another.
static std::string explain_losses(const std::vector<Row> &rows, const std::vector<Row> &right,
                                  bool same_parameters, const std::mt19937 &rng_before) {
    for (const auto &[mistake, text] : mistakes_of_train) {
        PerDevice device_params;
        rng = rng_before;
        const std::vector<Row> wrong = rows_with(mistake, device_params);
        if (like(rows[0], wrong[0]) && like(rows[1], wrong[1])) return text;
    }
    if (same_parameters)
        return "the parameters become the right ones, so the losses are counted wrongly: look at "
               "Animator (add_losses, end_epoch)";
    return like(rows[0], right[0]) ? "what is different in the second epoch, such as lr?"
                                   : "does train give each minibatch to train_batch, with this lr?";
}
static std::string explain_accuracy(double acc, int epoch, const std::vector<Row> &right) {
    auto is = [&](double x) { return std::fabs(acc - x) < 1e-3; };
    if (is(epoch ? right[0].acc : 0))
        return "it is what was known before this epoch: does animator.add come before "
               "evaluate_accuracy?";
    return std::string(is(test_accuracy(get_params(params, gpu(0))))
                           ? "it is that of the untrained parameters: "
                       : is(right[epoch].train_acc) ? "it is that of the training samples: "
                                                    : "") +
           "look at what train passes to evaluate_accuracy";
}
// Compare `train` with the same epochs by train_batch alone, in the same order of samples.
static void check_train(const std::string &where) {
    const int train_count = train_set.count, batch = options.batch;
    const float lr = options.lr;
    options.batch = std::max(options.gpus, std::min(batch, 16));
    options.lr = std::min(lr, 1.0f); // with more a right program's loss may become nan
    train_set.count = std::min(train_count, 5 * options.batch / 2);
    const size_t steps = (train_set.count + options.batch - 1) / options.batch; // in an epoch
    const auto before = rng;
    const auto [rows, saved, taken, devices] = trained(2 * steps);
    rng = before;
    PerDevice device_params;
    const std::vector<Row> right = rows_with(none, device_params);
    if ((int)devices != options.gpus)
        error("train: it uses %zu devices, but GPUS is %d: look at first_devices(num_gpus) and "
              "device_params",
              devices, options.gpus);
    if (rows.size() < 2)
        error("%strain %s after %zu of 2 epochs", where.c_str(),
              taken < 2 * steps ? "stops" : "does not call after_epoch", rows.size());
    if (rows.size() > 2)
        error("%strain runs %zu epochs, but num_epochs is 2: look at the condition of its loop",
              where.c_str(), rows.size());
    const bool same_parameters = saved == all_to_host(device_params[0]);
    if (taken != 2 * steps)
        differs("steps", format("%strain sums gradients for %g of the %zu minibatches of an epoch: "
                                "does its loop take each of train_iter.epoch()?",
                                where.c_str(), taken / 2.0, steps));
    bool same = taken == 2 * steps; // training
    for (size_t epoch = 0; epoch < 2 && same; epoch++) {
        same = like(rows[epoch], right[epoch]);
        if (!same)
            differs("train's loss",
                    format("%strain's loss in epoch %zu is %.6g, but its minibatches one after "
                           "another give %.6g: %s",
                           where.c_str(), epoch + 1, rows[epoch].loss, right[epoch].loss,
                           explain_losses(rows, right, same_parameters, before).c_str()));
        else if (!has_batch_norm() && std::fabs(rows[epoch].acc - right[epoch].acc) > 1e-3)
            error("%strain's accuracy after epoch %zu is %.4f, but a count here gives %.4f: %s",
                  where.c_str(), epoch + 1, rows[epoch].acc, right[epoch].acc,
                  explain_accuracy(rows[epoch].acc, epoch, right).c_str());
    }
    if (rows[0].seconds < pause_in_epoch)
        error("%san epoch takes %.3f s, but its last minibatch alone takes %.1f: does the host "
              "wait for the devices (waitall) before timer.stop()?",
              where.c_str(), rows[0].seconds, pause_in_epoch);
    if (saved == all_to_host(params))
        error("%sSAVE would have the parameters that train began with: does train pass "
              "device_params[0] to after_epoch?",
              where.c_str());
    if (same && !same_parameters)
        differs("SAVE", where + "SAVE would have other parameters than gpu(0) ends with: is "
                                "after_epoch called after each epoch, with device_params[0]?");
    check_replicas(device_params);
    train_set.count = train_count;
    options.batch = batch, options.lr = lr;
}

// --- a model

// Some minibatches of a model on the run's devices, from the parameters that a run starts with.
// Each step is compared with one device's from the same parameters.
static void check_model(int minibatches) {
    const std::vector<Device> devices = first_devices(options.gpus);
    rng.seed(options.seed);
    experiment.init_params();
#ifdef FILES
    load_init();
#endif
    choose_exchange();
    const std::string who = format("%s, %d device%s, batch %d", experiment.name.c_str(),
                                   options.gpus, options.gpus > 1 ? "s" : "", options.batch);
    for (size_t i = 0; i < params.size(); i++) {
        const Flat numbers = to_host(params[i]);
        if (params[i].shape.size() > 1 &&
            std::count(numbers.begin(), numbers.end(), 0) > size(params[i]) / 2)
            notice("%s: the weight %s starts as 0: no gradient passes through it (init_params)",
                   who.c_str(), param_names[i].c_str());
    }
    auto device_params = replicate(devices);
    check_replicated(device_params);
    check_exchange();
    DataIter train_iter = load_data_fashion_mnist(options.batch).first;
    const auto epoch = train_iter.epoch();
    auto [X, y] = epoch.at(0);
    check_slopes(who + ": ", X, y);
    int step = 0;
    do {
        const std::string where = format("%s, minibatch %d: ", who.c_str(), step + 1);
        if (step == 2) { // a smaller one, as the last of an epoch
            const int n = std::max(options.gpus, X.shape[0] * 2 / 3);
            X = rows(X, 0, n), y = rows(y, 0, n);
        }
        for (size_t i = 0; i < params.size(); i++) copyto(device_params[0][i], params[i]);
        std::vector<Tensor> losses;
        {
            const HostIn watched("train_batch");
            losses = train_batch(X, y, device_params, devices, options.lr);
        }
        check_step(where, X, y, losses, device_params, options.lr);
        double mean = 0;
        for (const Tensor &l : losses) mean += sum_of(l) / X.shape[0];
        if (step == 0 && mean > 10)
            notice("%sthe mean loss is %.3g, but log(10) = 2.3 is usual: how large are the initial "
                   "parameters (init_params, normal) and the pixels?",
                   where.c_str(), mean);
        check_replicas(device_params);
        if (++step < (int)epoch.size()) std::tie(X, y) = epoch[step];
    } while (step < minibatches && step < (int)epoch.size());
    check_accuracy(who + ": ");
    check_train(who + ": ");
    printf("%s: %d minibatch%s right\n", who.c_str(), step, step > 1 ? "es are" : " is");
}
static int minibatches = 3;
// MODEL alone, or lenet and lab_cnn (resnet18 takes minutes on a CPU: ask for it).
void check() {
    const int k = options.gpus;
    check_operators();
    check_data();
    const std::string chosen = experiment.name;
    for (const std::string &model : model_names()) {
        if (given("MODEL") ? model != chosen : model == "resnet18") continue;
        const Options as_given = options;
        use_model(model);
        if (!given("BATCH")) options.batch = model == "resnet18" ? 4 * k : std::max(31, k);
        test_set.count = std::min(test_set.count, model == "resnet18" ? 7 : 47);
        check_model(model == "resnet18" ? 1 : minibatches);
        options = as_given;
    }
    if (notices) printf("check: %d notice%s above\n", notices, notices > 1 ? "s" : "");
    else printf("check: nothing wrong was found\n");
    params.clear();
}

#ifdef CHECK_MAIN
static void run_check() {
    train_set = load_data(options.data, "train");
    test_set = load_data(options.data, "t10k");
    if (on_cpu) setenv("CUDA_CPU_DEVICES", std::to_string(options.gpus).c_str(), 0);
    use_devices(options.gpus, true);
    check_copies();
    check();
}
int main(int argc, char **argv) {
    options.gpus = 2;
    run = run_check;
    return mgpu_main(argc, argv);
}
#endif
