// make check: two epochs of train, as net and the exchange see them.
// defines: check_train
#pragma once
#include <fcntl.h>

#include "step.h"

static void no_tape(const std::string &who) {
    for (const auto &[d, tape] : tapes)
        if (!tape.empty())
            error("%s leaves %zu operators on the tape of gpu(%d), %s first: is there a NoGrad?",
                  who.c_str(), tape.size(), d, tape[0].op);
}
// How many rows of y_hat have their largest number at the label
static int right_in(const Flat &y_hat, const Flat &labels) {
    const int n = labels.size(), classes = y_hat.size() / std::max(1, n);
    int right = 0;
    for (int i = 0; i < n; i++) {
        const float *row = &y_hat[i * classes];
        right += std::max_element(row, row + classes) - row == labels[i];
    }
    return right;
}
struct Epoch { // what train passes to after_epoch
    double loss, acc, seconds;
    size_t steps, calls; // so many came before its end
    std::mt19937 rng;
    std::vector<Tensor> params;
    Flat numbers, gradients; // theirs, after the update
};
// Tell of the first quantity of train's steps that is not finite, or return "".
static std::string not_finite(const Seen &seen) {
    auto is_bad = [](float x) { return !std::isfinite(x); };
    auto count = [&](const Flat &x) { return std::count_if(x.begin(), x.end(), is_bad); };
    Flat before, sum; // the last ones that were finite
    for (const NetCall &call : seen.calls) {
        const std::string step = format("step %zu of train: ", call.step + 1);
        const Flat now = all_to_host(call.numbers);
        if (const long bad = count(now)) {
            const int j = std::find_if(now.begin(), now.end(), is_bad) - now.begin();
            if (before.empty())
                return format("%s%s is %g when train begins", step.c_str(), name_of(j).c_str(),
                              now[j]);
            return format(
                "step %zu of train makes %s: %s was %g, with a sum of gradients of %g%s", call.step,
                bad == (long)now.size()
                    ? "all parameters nan"
                    : format("%ld of %zu parameters nan or infinite", bad, now.size()).c_str(),
                name_of(j).c_str(), before[j], sum.empty() ? NAN : sum[j],
                bad == (long)now.size() ? ": did train_batch get lr = nan?" : "");
        }
        if (!now.empty()) before = now;
        if (count(to_host(call.y_hat)))
            return step + "y_hat is not finite, though the parameters are";
        if (call.step < seen.sums.size()) sum = all_to_host(seen.sums[call.step]);
        if (count(sum)) return step + "the sum of gradients is not finite, though y_hat is";
    }
    return "";
}
// Run two epochs of train, with the output thrown away.
static std::vector<Epoch> trained(Seen &seen, size_t steps_in_epoch, int num_epochs = 2) {
    const auto as_given = std::tuple(typed, after_epoch);
    set_option(format("EPOCHS=%d", num_epochs));
    set_option("CHECKS=0");
    fflush(stdout);
    const int out = dup(STDOUT_FILENO), null = open("/dev/null", O_WRONLY);
    dup2(null, STDOUT_FILENO);
    std::vector<Epoch> epochs;
    const auto sum = seen.sum_before;
    seen.sum_before = [&](const PerDevice &grads) {
        if (seen.exchanged.size() > 3 * steps_in_epoch) // more than another epoch's
            error("it trains on more than %zu minibatches in 2 epochs of %zu: does a loop never "
                  "end, or is a minibatch trained twice?",
                  3 * steps_in_epoch, steps_in_epoch);
        sum(grads);
    };
    seen.samples_until_late = train_set.count; // at the end of an epoch
    after_epoch = [&](const Animator &animator, const std::vector<Tensor> &p) {
        if (animator.Y.size() != epochs.size() + 1)
            error("after epoch %zu animator has %zu rows: does animator.add come before "
                  "after_epoch?",
                  epochs.size() + 1, animator.Y.size());
        no_tape(format("epoch %zu", epochs.size() + 1));
        epochs.push_back({animator.loss.back(), animator.Y.back(), animator.seconds.back(),
                          seen.exchanged.size(), seen.calls.size(), rng, p, all_to_host(p),
                          seen.exchanged.empty() ? Flat() : all_to_host(seen.exchanged.back()[0])});
    };
    std::string said;
    try {
        const HostIn watched("train");
        experiment.train(option("GPUS"), option("BATCH"), option("LR"));
    } catch (const std::exception &e) {
        said = e.what() + line_of(watch::thrown_by);
    }
    fflush(stdout);
    dup2(out, STDOUT_FILENO);
    close(out), close(null);
    seen.sum_before = sum;
    seen.stop();
    std::tie(typed, after_epoch) = as_given;
    std::set<int> used; // devices
    for (const NetCall &call : seen.calls) used.insert(call.X.device.id);
    const bool other = option("GPUS") > 1 && seen.calls.size() > 1 && used.size() == 1;
    const std::string bad = not_finite(seen);
    if (!bad.empty())
        error("train, EPOCHS=%d: %s%s", num_epochs, bad.c_str(),
              said.empty() ? "" : ("; it says: " + said).c_str());
    if (!said.empty())
        error("train, on %d samples: %s%s", train_set.count, said.c_str(),
              other ? (": net is called on " + str(gpu(*used.begin())) +
                       " alone: which list of devices does train make?")
                          .c_str()
                    : "");
    return epochs;
}

// How often the order of n samples was shuffled between two states of rng; -1: something else drew
static int shuffles_between(std::mt19937 from, const std::mt19937 &to, int n) {
    Indices order(n);
    for (int count = 0; count < 100; count++) {
        if (from == to) return count;
        std::shuffle(order.begin(), order.end(), from);
    }
    return -1;
}

static void check_epochs_of_train(const std::string &where, const Seen &seen,
                                  const std::vector<Epoch> &epochs,
                                  const std::mt19937 &rng_before) {
    const int k = option("GPUS");
    const float lr = option("LR");
    const watch::Frame *const train =
        seen.calls.empty() ? nullptr : lesson_frame(seen.calls[0].stack);
    auto in_train = [&](const char *code) {
        const std::string name = train ? train->function : "train";
        return place(name.substr(0, name.find('(')), code, train ? train->file : "");
    };
    auto [train_iter, test_iter] = load_data_fashion_mnist(train_set.count);
    train_iter.shuffle = false;
    train_iter.epoch(), test_iter.epoch();
    const Samples samples(train_iter.X), test_samples(test_iter.X);
    const Flat start = all_to_host(params);

    if (!seen.exchanged.empty() && (int)seen.exchanged[0].size() != k)
        error("train uses %zu devices, but GPUS is %d%s", seen.exchanged[0].size(), k,
              in_train("first_devices(").c_str());
    if (epochs.size() != 2)
        error("%strain calls after_epoch %zu times in 2 epochs, after %zu minibatches%s",
              where.c_str(), epochs.size(), seen.exchanged.size(), in_train("epoch++").c_str());

    // The samples of each epoch
    Indices order[2];
    const double steps_of[] = {(double)epochs[0].steps, (double)epochs[1].steps - epochs[0].steps};
    std::vector<double> n_of(seen.exchanged.size() + 1); // samples of each step
    std::set<const float *> trained;                     // parameters
    for (size_t i = 0; i < seen.calls.size(); i++) {
        const NetCall &call = seen.calls[i];
        if (!call.recorded) continue;
        const Indices found = samples.in(call.X);
        Indices &list = order[i >= epochs[0].calls];
        list.insert(list.end(), found.begin(), found.end());
        n_of[call.step] += found.size();
        for (const Tensor &p : call.params) trained.insert(p.ptr());
    }
    for (int e = 0; e < 2; e++) {
        const std::string epoch = format("epoch %d", e + 1);
        const size_t steps = steps_of[e];
        const int shuffles =
            shuffles_between(e ? epochs[0].rng : rng_before, epochs[e].rng, train_set.count);
        const std::string wrong = told.count("training data") ? "" : samples.not_once(order[e]);
        const std::string shuffled =
            shuffles == option("SHUFFLE") || shuffles < 0
                ? ""
                : format("; train_iter.epoch() has shuffled them %d times in this epoch", shuffles);
        if (!wrong.empty())
            differs("an epoch", format("%s%s of train has %zu steps, and %s%s%s", where.c_str(),
                                       epoch.c_str(), steps, wrong.c_str(), shuffled.c_str(),
                                       in_train("train_iter.epoch(").c_str()));
        else if (!shuffled.empty() && order[0] == order[1])
            error("%sepoch 2 of train has the samples in the order of epoch 1%s%s", where.c_str(),
                  shuffled.c_str(), in_train("train_iter.epoch(").c_str());
    }

    // The parameters with which each step begins, and lr
    std::vector<Flat> begins, sums;
    std::vector<const float *> places;
    for (const NetCall &call : seen.calls)
        if (call.recorded && call.X.device.id == 0 && call.step == begins.size()) {
            begins.push_back(all_to_host(call.numbers));
            places.push_back(call.params.at(0).ptr());
        }
    for (const auto &sum : seen.sums) sums.push_back(all_to_host(sum));
    Flat parameters;
    for (const NetCall &call : seen.calls) {
        if (call.numbers.empty()) continue;
        const Flat now = all_to_host(call.numbers);
        parameters.resize(now.size());
        const double ratio =
            std::inner_product(now.begin(), now.end(), parameters.begin(), 0.) /
            std::inner_product(parameters.begin(), parameters.end(), parameters.begin(), 0.);
        if (k > 1 && std::fabs(ratio - k) < 0.1)
            error("%sstep %zu of train begins with parameters on gpu(0) that are %.2f times those "
                  "before: are k = %d devices' summed, but not divided by k?",
                  where.c_str(), call.step + 1, ratio, k);
        parameters = now;
    }
    for (const Epoch &epoch : epochs) { // the update leaves the sums, or 0
        if (epoch.steps == 0) continue;
        const Flat &now = epoch.gradients, &sum = sums[epoch.steps - 1];
        const Indices wrong = wrong_at(now, sum, sum, 100);
        if (!wrong.empty() && now != Flat(now.size()))
            differs_from(where, "the gradient after an update of train on gpu(0)", now, sum, wrong,
                         {{"the sum of gradients", sum}}, {},
                         ": does the update write to it (v = gradient(p) copies a handle)?");
    }
    std::string rates;
    bool other = false; // than lr
    for (size_t s = 0; s + 1 < begins.size(); s++) {
        if (begins[s + 1] == start && places[s + 1] != places[s])
            error("%sstep %zu of train begins with the parameters with which train began%s",
                  where.c_str(), s + 2, in_train("device_params = ").c_str());
        Flat update;
        Indices all;
        for (size_t j = 0; j < start.size(); j++) {
            update.push_back(begins[s][j] - begins[s + 1][j]);
            all.push_back(j);
        }
        const Candidate sum = {"", sums[s]};
        const std::vector<double> factor = factors_of(update, all, {&sum});
        if (factor.empty()) continue; // momentum, say
        const double rate = factor[0] * n_of[s];
        rates += (rates.empty() ? "" : ", ") + format("%.3g", rate);
        other = other || std::fabs(rate - lr) > 0.01 * lr;
    }
    if (other)
        differs("lr",
                format("%slr is %g, but the steps of train have lr = %s, by what the parameters "
                       "move: so many times the sum of gradients / n%s",
                       where.c_str(), lr, rates.c_str(), line_of(seen.calls[0].stack).c_str()));

    // Is the sum of each step that of its own samples?
    bool known = !draws, intended = false;
    for (const std::string &cause : told)
        intended = intended || cause.find("gradient") < cause.size();
#ifdef NETWORKS
    known = known && buffers.empty();
#endif
    const std::vector<Tensor> initial = params;
    for (size_t s = 1; s < sums.size() && known && !intended; s++) {
        Flat own, magnitude(start.size());
        for (const NetCall &call : seen.calls) {
            if (!call.recorded || call.step != s) continue;
            if (!call.numbers.empty()) params = call.numbers;
            known = known && !call.labels.empty();
            Tensor labels = empty({(int)call.labels.size()}, cpu());
            std::copy(call.labels.begin(), call.labels.end(), labels.ptr());
            if (known) add_to(own, alone(call.X, labels).gradient);
            for (size_t j = 0; j < own.size(); j++) magnitude[j] += std::fabs(own[j]);
        }
        params = initial;
        if (known && !own.empty())
            if (const Indices wrong = wrong_at(sums[s], own, magnitude, 10 * k); !wrong.empty())
                differs_from(
                    where, format("the sum of gradients in step %zu of train", s + 1), sums[s], own,
                    wrong, {{"that of its samples", own}, {"that of the step before", sums[s - 1]}},
                    {}, "; does zero_grad come before backward?");
    }

    // What each epoch says
    for (int e = 0; e < 2; e++) {
        const std::string epoch = format("epoch %d", e + 1);
        double sum = 0, of_step = 0; // of losses
        int n = 0, right = 0, right_in_pass = 0, calls = 0;
        double mean_of_means = 0, last_right = 0, last_size = 0; // of the last test minibatch
        size_t step = 0;
        Indices tested;
        bool known = true;                  // the labels of all losses
        const watch::Stack *test = nullptr; // a call of net
        NoGrad guard;
        for (size_t i = e ? epochs[0].calls : 0; i < epochs[e].calls; i++) {
            const NetCall &call = seen.calls[i];
            const DataIter &iter = call.recorded ? train_iter : test_iter;
            const Indices found = (call.recorded ? samples : test_samples).in(call.X);
            Tensor labels = empty({(int)found.size()}, cpu());
            for (size_t j = 0; j < found.size(); j++) { // the test set's come in the file's order
                const int in_order = (tested.size() + j) % std::max(1, test_set.count);
                labels.ptr()[j] = iter.y.ptr()[found[j] >= 0   ? found[j]
                                               : call.recorded ? 0
                                                               : in_order];
            }
            if (call.recorded && !call.labels.empty())
                std::copy(call.labels.begin(), call.labels.end(), labels.ptr());
            else if (call.recorded)
                known = known && std::count(found.begin(), found.end(), -1) == 0;
            if (call.recorded) {
                if (std::exchange(step, call.step) != call.step) of_step = 0;
                const Flat losses =
                    to_host(loss(copyto(call.y_hat, gpu(0)), copyto(labels, gpu(0))));
                for (double l : losses) sum += l, of_step += l;
                n += losses.size();
                continue;
            }
            test = &call.stack;
            const int right_here = right_in(to_host(call.y_hat), to_host(labels));
            if (tested.size() % test_set.count == 0) right_in_pass = 0; // one of several begins
            right += right_here, right_in_pass += right_here, calls++;
            last_right = right_here, last_size = found.size();
            mean_of_means += (double)right_here / std::max<size_t>(1, found.size());
            tested.insert(tested.end(), found.begin(), found.end());
            if (!trained.count(call.params[0].ptr()))
                error("%sthe accuracy of %s of train is that of other parameters than those that "
                      "are trained%s%s",
                      where.c_str(), epoch.c_str(),
                      all_to_host(call.params) == start ? ": those that train began with" : "",
                      line_of(call.stack).c_str());
        }
        auto like = [](double a, double b) { return std::fabs(a - b) <= 1e-4 * std::fabs(b); };
        if (known && !like(epochs[e].loss, sum / n))
            differs(
                "train's loss",
                format("%sthe loss of %s of train is %.6g, but the mean of its losses is %.6g%s%s",
                       where.c_str(), epoch.c_str(), epochs[e].loss, sum / n,
                       as_quotient(epochs[e].loss,
                                   {{"the sum of its losses", sum},
                                    {"the sum of the last minibatch's losses", of_step}},
                                   {{"n", n},
                                    {"k / n", (double)n / k},
                                    {"BATCH", option("BATCH")},
                                    {"the number of minibatches", steps_of[e]}})
                           .c_str(),
                       in_train("add_losses(").c_str()));
        const int passes =
            std::max<int>(1, tested.size() / test_set.count); // one may be of your own
        if (const std::string wrong = test_samples.not_once(tested, passes);
            !wrong.empty() && !told.count("test data"))
            error("%sthe accuracy of %s of train: %s%s%s", where.c_str(), epoch.c_str(),
                  wrong.c_str(), tested.empty() ? ": net gets no test samples" : "",
                  test ? line_of(*test).c_str() : "");
        const double acc = (double)right / passes / test_set.count;
        const double of_last = (double)right_in_pass / test_set.count;
        if (std::min(std::fabs(epochs[e].acc - acc), std::fabs(epochs[e].acc - of_last)) > 1e-5)
            error("%sthe accuracy of %s of train is %.4f, but net's results after it have %.4f%s%s",
                  where.c_str(), epoch.c_str(), epochs[e].acc, acc,
                  std::fabs(epochs[e].acc - mean_of_means / calls) < 1e-5
                      ? ": it is the mean of the accuracies of the calls of net, the last of which "
                        "gets fewer samples"
                  : epochs[e].acc == (e ? epochs[0].acc : 0)
                      ? ": it is what was known before: does animator.add get it too early?"
                      : as_quotient(epochs[e].acc,
                                    {{"the right ones", right},
                                     {"the right ones of the last test minibatch", last_right},
                                     {"the wrong ones", test_set.count - right}},
                                    {{"all test samples", test_set.count},
                                     {"the last test minibatch's samples", last_size},
                                     {"BATCH", option("BATCH")},
                                     {"all training samples", train_set.count},
                                     {"the number of test minibatches", calls}})
                            .c_str(),
                  in_train("animator.add(").c_str());
    }
    if (seen.samples_until_late <= 0 && epochs[0].seconds < pause_in_epoch)
        error("%sepoch 1 of train takes %.3f s, but its last minibatch alone takes %.1f: the host "
              "does not wait (waitall) before timer.stop()%s",
              where.c_str(), epochs[0].seconds, pause_in_epoch, in_train("timer.stop(").c_str());
    if (!trained.count(epochs[1].params.at(0).ptr()))
        differs("SAVE", where + "after_epoch gets other parameters than those that are trained" +
                            (epochs[1].numbers == start ? ": those that train began with" : "") +
                            in_train("after_epoch("));
    PerDevice last(k);
    for (const NetCall &call : seen.calls)
        if (call.recorded && call.X.device.id < k) last[call.X.device.id] = call.params;
    check_replicas(last);
}
static void check_train(const std::string &where) {
    const auto as_given = typed;
    const int train_count = train_set.count;
    const int batch = std::max(option("GPUS"), std::min(option("BATCH"), 16.0));
    set_option(format("BATCH=%d", batch));
    if (option("LR") > 1) set_option("LR=1"); // with more a right program's loss may become nan
    const auto before = rng;
    begin_again();
    {
        train_set.count = std::min(train_count, 2 * batch);
        const int test_count = std::exchange(test_set.count, std::min(test_set.count, 5));
        Seen seen(nullptr);
        trained(seen, 2, 1); // one epoch alone
        rng = before, test_set.count = test_count;
    }
    train_set.count = std::min(train_count, 5 * batch / 2);
    begin_again();
    Seen seen(nullptr);
    const std::vector<Epoch> epochs = trained(seen, (train_set.count + batch - 1) / batch);
    check_epochs_of_train(where, seen, epochs, before);
    train_set.count = train_count;
    typed = as_given;
}
