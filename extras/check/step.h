// make check: a step of train_batch. Each quantity is compared in the order in which the lesson
// computes them, with what was seen of the one before: the shards, the losses, the gradients of
// each device, what is given to the exchange, the sums, the updates.
// defines: NetCall, Seen, Samples, not_once, Alone, alone, draws, check_step
#pragma once
#include "differences.h"

typedef std::vector<int> Indices;

constexpr double pause_in_epoch = 0.2; // seconds

struct NetCall {                // a call of net
    Tensor X, y_hat;            // copies
    std::vector<Tensor> params; // what it got
    bool recorded;
    size_t step; // so many sums of gradients came before
    watch::Stack stack;
    size_t ops = 0;                   // so many operations came before its end
    std::vector<Tensor> numbers = {}; // copies of the parameters, in train's steps
    Flat labels = {}; // so many numbers as images that were copied to its device last
};
// Sees what the lesson does while it lives: by net, after_gradient, exchange and the first message.
// Nothing is made to wait. Numbers are copied on the stream of their device, which has written
// them.
struct Seen {
    const PerDevice *trained; // null: train has its own
    std::vector<NetCall> calls = {};
    std::map<const float *, std::vector<Tensor>> written = {}; // gradients, after each backward
    std::map<const float *, Tensor> given = {}; // gradients, when the exchange begins
    std::vector<PerDevice> exchanged = {};      // what sum_gradients got
    std::vector<std::vector<Tensor>> sums = {}; // copies of gpu(0)'s, in train
    bool copying = false, exchanging = false;
    std::map<int, Flat> copied_in = {}; // to each device, the last few numbers
    int samples_until_late = 0;         // when net has got so many, their device is late once
    std::unique_ptr<watch::Recorder> recorder{new watch::Recorder(false)};
    std::deque<watch::Op> ops = {};
    std::deque<watch::Stack> stacks = {};                // of each operation
    std::map<int, watch::Stack> backward_of = {};        // of each device
    std::unique_ptr<watch::Stack> exchange_of = nullptr; // the first call
    decltype(net) net_before = net;
    decltype(exchange) sum_before = exchange;
    decltype(after_gradient) after_before = after_gradient;
    static inline Seen *now = nullptr;

    explicit Seen(const PerDevice *trained) : trained(trained) {
        now = this;
        fill_free_memory();
        net = [this](const Tensor &X, const std::vector<Tensor> &p) { return called(X, p); };
        after_gradient = [](const Tensor &grad) {
            now->written[grad.ptr()].push_back(copyto(grad, grad.device));
            now->backward_of[grad.device.id] = watch::call_stack();
            if (now->after_before) now->after_before(grad);
        };
        watch::on_record = [] {
            now->stacks.push_back(watch::call_stack());
            now->note_copied_in();
            now->delay_next();
            if (!now->exchanging && !overlaps()) fill_free_memory(false);
            if (strcmp(watch::recorder->ops.back().kind, "message") == 0) now->exchange_begins();
        };
        exchange = [this](const PerDevice &grads) { exchanges(grads); };
    }
    ~Seen() { stop(); }
    void stop() {
        if (!recorder) return;
        ops = std::move(recorder->ops);
        recorder.reset();
        watch::on_record = nullptr;
        *last_words = 0;
        net = net_before, exchange = sum_before, after_gradient = after_before;
    }
    Tensor called(const Tensor &X, const std::vector<Tensor> &p) {
        NetCall call = {copyto(X, X.device), {}, p, recording, exchanged.size(),
                        watch::call_stack()};
        if (!trained && recording && X.device.id == 0)
            for (const Tensor &t : p) call.numbers.push_back(copyto(t, t.device));
        const Tensor y_hat = net_before(X, p);
        call.y_hat = copyto(y_hat, y_hat.device);
        const Flat &last = copied_in[X.device.id];
        if ((int)last.size() == X.shape[0]) call.labels = last;
        if (!trained) // should the host crash next
            snprintf(last_words, sizeof last_words,
                     "mgpu: net has given y_hat for %d samples on %s: have the labels that it is "
                     "compared with as many?\n",
                     X.shape[0], str(X.device).c_str());
        call.ops = recorder->ops.size();
        calls.push_back(call);
        const int before = samples_until_late;
        if (recording) samples_until_late -= X.shape[0];
        const bool late = before > 0 && samples_until_late <= 0;
        if (late || (trained && !HostWaits::now)) // so is backward, for which a message must wait
            watch::pause(stream_of(X.device), late ? 1e3 * pause_in_epoch : 3);
        return y_hat;
    }
    // What comes after a kernel on a stream of one's own is late: so who does not wait sees that.
    void delay_next() const {
        const watch::Op &op = recorder->ops.back();
        for (watch::Lane &lane : watch::lanes)
            if (lane.number == op.lane && op.works() && !op.from && !HostWaits::now &&
                lane.handle != current_stream(gpu(op.device)).handle.handle())
                watch::pause(watch::StreamHandle(&lane), 1);
    }
    void note_copied_in() {
        const watch::Op &op = recorder->ops.back();
        const int n = op.bytes / sizeof(float);
        if (strcmp(op.kind, "input") == 0 && n < 28 * 28)
            copied_in[op.device].assign((const float *)op.from, (const float *)op.from + n);
    }
    void exchange_begins() {
        if (copying || !trained || !given.empty() || overlaps()) return;
        copying = true;
        const int device = watch::current;
        for (const auto &list : *trained)
            for (const Tensor &p : list) given[gradient(p).ptr()] = copyto(gradient(p), p.device);
        CUDA_CHECK(cudaSetDevice(device));
        copying = false;
    }
    void exchanges(const PerDevice &grads) {
        exchange_begins();
        if (!exchange_of) exchange_of.reset(new watch::Stack(watch::call_stack()));
        exchanged.push_back(grads);
        exchanging = true; // memory that is freed may be in use on streams of its own
        sum_before(grads);
        exchanging = false;
        if (!overlaps()) fill_free_memory();
        if (trained) return;
        sums.emplace_back();
        for (const Tensor &g : grads[0]) sums.back().push_back(copyto(g, g.device));
    }
    // The lines of a step. The first operation of this kind, on this device if there is one
    std::string line_of_op(const char *kind, int device = 0) const {
        const watch::Stack *stack = nullptr;
        for (size_t i = ops.size(); i-- > 0;)
            if (strcmp(ops[i].kind, kind) == 0 && (ops[i].device == device || !stack))
                stack = &stacks[i];
        return stack ? line_of(*stack) : "";
    }
    std::string line_after_net(int device) const { // of what comes after its last call
        const watch::Stack *stack = nullptr;
        for (const NetCall &call : calls)
            for (size_t i = ops.size(); call.X.device.id == device && i-- > call.ops;)
                if (ops[i].device == device && ops[i].works()) stack = &stacks[i];
        return stack ? line_of(*stack) : "";
    }
    std::string line_of_backward(int device) const {
        auto found = backward_of.find(device);
        if (found == backward_of.end()) found = backward_of.begin();
        return found == backward_of.end() ? "" : line_of(found->second);
    }
    std::string line_of_exchange() const {
        return exchange_of ? line_of(*exchange_of) : line_of_op("message");
    }
};

// Tells which sample an image is.
struct Samples {
    std::map<Flat, int> first; // of those with the same pixels
    Indices same;              // of each sample
    explicit Samples(const Tensor &X) {
        for (int i = 0; i < X.shape[0]; i++) {
            const float *image = X.ptr() + i * 28 * 28;
            same.push_back(first.insert({Flat(image, image + 28 * 28), i}).first->second);
        }
    }
    Indices in(const Tensor &X) const { // -1: none of them
        const Flat images = to_host(X);
        Indices found;
        for (int i = 0; i < X.shape[0]; i++) {
            auto it = first.find(Flat(&images[i * 28 * 28], &images[i * 28 * 28] + 28 * 28));
            found.push_back(it == first.end() ? -1 : it->second);
        }
        return found;
    }
    // Say which samples do not occur once, or not so many times, or nothing.
    std::string not_once(const Indices &found, int passes = 1) const {
        std::map<int, int> count;
        for (int i : same) count[i] -= passes;
        for (int i : found) count[i]++;
        int more = -1, never = -1, wrong = 0;
        for (const auto &[i, times] : count) {
            if (times > 0 && more < 0) more = i;
            if (times < 0 && never < 0) never = i;
            wrong += times != 0;
        }
        if (wrong == 0) return "";
        std::string text = format("of %zu samples ", same.size());
        if (count.count(-1)) return text + "some are images that are not among them";
        if (more >= 0) text += format("number %d occurs more often than once", more);
        if (never >= 0)
            text += format("%snumber %d does not occur", more >= 0 ? " and " : "", never);
        return text + format(" (%d are not there once)", wrong);
    }
};

struct Alone { // what one device computes of a shard
    Flat y_hat, losses, gradient;
};
// The same shapes are rounded alike.
static Alone alone(const Tensor &X, const Tensor &y) {
    const std::vector<Tensor> p = get_params(params, gpu(0));
    const Tensor y_hat = net(copyto(X, gpu(0)), p), l = loss(y_hat, copyto(y, gpu(0)));
    Alone result = {to_host(y_hat), to_host(l), {}};
    backward(l);
    result.gradient = all_to_host(gradients({p})[0]);
    return result;
}

static bool draws = false; // random numbers: the network gives another result each time
static void add_to(Flat &sum, const Flat &part) {
    sum.resize(part.size());
    for (size_t j = 0; j < part.size(); j++) sum[j] += part[j];
}

// Check what train_batch has made of a minibatch and of `params`: losses and device_params.
static void check_step(const std::string &where, const Tensor &X, const Tensor &y,
                       const std::vector<Tensor> &losses, const PerDevice &device_params, float lr,
                       Seen &seen) {
    seen.stop();
    std::vector<Flat> updates; // read at once, should an update be late
    for (const auto &list : device_params) updates.push_back(all_to_host(list));
    check_stray(where);
    const int n = X.shape[0], k = device_params.size();
    const Samples samples(X);
    static struct { // the step before
        std::shared_ptr<Samples> samples;
        Flat sum;
        std::vector<Flat> own;
    } before;
    auto on = [](const std::string &what, int c) { return what + " on " + str(gpu(c)); };
    auto last = std::exchange(before, {std::make_shared<Samples>(X), {}, {}});

    // The shards, and what one device makes of each
    std::vector<std::vector<Alone>> right(k); // of each call of net
    std::vector<Indices> shards(k);
    Indices all;
    for (const NetCall &call : seen.calls) {
        const int c = call.X.device.id;
        if (!call.recorded) continue;
        for (size_t i = 0; i < call.params.size() && i < params.size(); i++)
            if (call.params[i].ptr() != device_params[c][i].ptr())
                error("%snet gets another %s on %s than that of device_params[%d]%s", where.c_str(),
                      param_names[i].c_str(), str(gpu(c)).c_str(), c, line_of(call.stack).c_str());
        const Indices found = samples.in(call.X);
        const Tensor labels = empty({(int)found.size()}, cpu());
        for (size_t i = 0; i < found.size(); i++) {
            if (found[i] < 0) {
                const bool old = last.samples && last.samples->in(call.X)[i] >= 0;
                return differs(
                    "an image",
                    format("%simage %zu that net gets on %s is none of the minibatch's%s%s",
                           where.c_str(), i, str(gpu(c)).c_str(),
                           old ? ": it is one of the images of the minibatch before" : "",
                           seen.line_of_op("input").c_str()));
            }
            labels.ptr()[i] = y.ptr()[found[i]];
        }
        right[c].push_back(alone(call.X, labels));
        shards[c].insert(shards[c].end(), found.begin(), found.end());
        all.insert(all.end(), found.begin(), found.end());
    }
    for (int c = 0; c < k; c++)
        if (right[c].empty())
            error("%snet is not called on %s%s", where.c_str(), str(gpu(c)).c_str(),
                  seen.calls.empty() ? "" : line_of(seen.calls[0].stack).c_str());
    if (const std::string wrong = samples.not_once(all); !wrong.empty()) {
        Indices copied, got(k); // samples; how many of them to each device
        for (const watch::Op &op : seen.ops) {
            const bool of_X = op.from >= X.ptr() && op.from < X.ptr() + size(X);
            if (strcmp(op.kind, "input") != 0 || !of_X || op.device >= k) continue;
            const int first = ((const float *)op.from - X.ptr()) / (28 * 28);
            const int rows = op.bytes / sizeof(float) / (28 * 28);
            for (int i = first; i < first + rows && i < n; i++) copied.push_back(samples.same[i]);
            got[op.device] += rows;
        }
        int c = 0;
        while (c + 1 < k && got[c] == (int)shards[c].size()) c++;
        if (!samples.not_once(copied).empty())
            error("%sthe shards that net gets: %s%s", where.c_str(), wrong.c_str(),
                  seen.line_of_op("input").c_str());
        error("%sthe shards are right, but net gets %zu samples of the %d on %s: %s%s",
              where.c_str(), shards[c].size(), got[c], str(gpu(c)).c_str(), wrong.c_str(),
              line_of(seen.calls.back().stack).c_str());
    }

    // The losses
    if (losses.size() < (size_t)k)
        error("%strain_batch returns the losses of %zu devices, but there are %d", where.c_str(),
              losses.size(), k);
    for (int c = 0; c < k; c++) {
        Flat want, y_hat, seen_y_hat;
        for (const Alone &part : right[c]) {
            want.insert(want.end(), part.losses.begin(), part.losses.end());
            y_hat.insert(y_hat.end(), part.y_hat.begin(), part.y_hat.end());
        }
        for (const NetCall &call : seen.calls) {
            if (!call.recorded || call.X.device.id != c) continue;
            const Flat part = to_host(call.y_hat);
            seen_y_hat.insert(seen_y_hat.end(), part.begin(), part.end());
        }
        auto other = [](float a, float b) {
            return !(std::fabs(a - b) <= 1e-4f * std::max(1.0f, std::fabs(b)));
        };
        for (size_t j = 0; j < y_hat.size() && !draws; j++)
            if (other(seen_y_hat[j], y_hat[j]))
                error("%s%s is %.6g at number %zu, but on one device %.6g%s", where.c_str(),
                      on("y_hat", c).c_str(), seen_y_hat[j], j, y_hat[j],
                      line_of(seen.calls[0].stack).c_str());
        std::vector<Tensor> of_device; // perhaps in several parts
        for (size_t i = 0; i < losses.size(); i++)
            if (losses.size() == (size_t)k ? i == (size_t)c : losses[i].device.id == c)
                of_device.push_back(losses[i]);
        const Flat got = all_to_host(of_device);
        if (got.size() != want.size())
            error("%strain_batch returns %zu losses of %zu samples on %s%s", where.c_str(),
                  got.size(), want.size(), str(gpu(c)).c_str(), seen.line_after_net(c).c_str());
        const int classes = y_hat.size() / std::max<size_t>(1, got.size());
        for (size_t i = 0; i < got.size(); i++) {
            if (!std::isfinite(got[i]))
                error("%s%s is %s at sample %zu: y_hat is finite, so loss makes it%s",
                      where.c_str(), on("the loss", c).c_str(),
                      std::isnan(got[i]) ? "nan" : "infinite", i, seen.line_after_net(c).c_str());
            if (draws || std::fabs(got[i] - want[i]) <= 1e-5f * std::max(1.0f, want[i])) continue;
            std::string same;
            const Doubles z(&seen_y_hat[i * classes], &seen_y_hat[i * classes] + classes);
            for (int j = 0; j < classes; j++)
                if (const double l =
                        reference::softmax_cross_entropy(classes, {z, {(double)j}})[0][0];
                    std::fabs(l - got[i]) <= 1e-5 * std::max(1.0, l))
                    same = format(": it is the loss with label %d, but the sample's label is %g", j,
                                  y.ptr()[shards[c][i]]);
            error("%s%s is %.6g at sample %zu, but on one device %.6g%s%s", where.c_str(),
                  on("the loss", c).c_str(), got[i], i, want[i], same.c_str(),
                  seen.line_after_net(c).c_str());
        }
    }

    // The gradients that backward has written
    auto all_of = [&](int c, auto numbers_of) { // the gradients of device c
        Flat flat;
        for (const Tensor &p : device_params[c]) {
            const Tensor *t = numbers_of(gradient(p).ptr());
            if (!t) return Flat();
            const Flat part = to_host(*t);
            flat.insert(flat.end(), part.begin(), part.end());
        }
        return flat;
    };
    std::vector<Candidate> candidates; // each device's gradient comes first
    std::vector<Flat> own(k);          // the gradient of each device
    for (int c = 0; c < k; c++) {
        add_to(own[c], Flat(all_to_host(params).size()));
        for (const Alone &part : right[c]) add_to(own[c], part.gradient);
        candidates.push_back({str(gpu(c)) + "'s gradient", own[c]});
    }
    for (int c = 0; c < k; c++)
        for (size_t i = 0; i < right[c].size() && right[c].size() > 1; i++)
            candidates.push_back(
                {format("the gradient of call %zu of net on %s", i + 1, str(gpu(c)).c_str()),
                 right[c][i].gradient});
    for (size_t c = 0; c < last.own.size(); c++)
        candidates.push_back({str(gpu(c)) + "'s gradient of the step before", last.own[c]});
    if (!last.sum.empty()) candidates.push_back({"the sum of the step before", last.sum});
    const Flat old = all_to_host(params);
    candidates.push_back({"the parameter", old});
    for (int c = 0; c < k && !seen.written.empty(); c++)
        for (size_t i = 0; i < params.size(); i++) {
            auto found = seen.written.find(gradient(device_params[c][i]).ptr());
            if (found == seen.written.end() && !shards[c].empty())
                error("%sbackward has not written the gradient of %s on %s%s%s", where.c_str(),
                      param_names[i].c_str(), str(gpu(c)).c_str(),
                      tapes[c].empty() ? "" : ": its operators are still on the tape",
                      seen.line_of_backward(c).c_str());
        }
    Quantities sizes = {{"k", (double)k}, {"n", (double)n}};
    for (int c = 0; c < k; c++)
        sizes.push_back({str(gpu(c)) + "'s samples", (double)shards[c].size()});
    auto given = [&](int c) { // when the exchange begins
        return all_of(c, [&](const float *grad) -> const Tensor * {
            auto found = seen.given.find(grad);
            return found == seen.given.end() ? nullptr : &found->second;
        });
    };
    for (int c = 0; c < k; c++) {
        Flat sum, want; // backward adds the passes up
        const Flat early = given(c);
        const bool in_time = early.empty() || early != Flat(early.size());
        for (size_t pass = 0; pass < right[c].size(); pass++) {
            const Flat got = all_of(c, [&](const float *grad) -> const Tensor * {
                auto found = seen.written.find(grad);
                const bool there =
                    found != seen.written.end() && found->second.size() == right[c].size();
                return there ? &found->second[pass] : nullptr;
            });
            if (got.empty()) break;
            sum = got;
            add_to(want, right[c][pass].gradient);
            const Indices wrong = wrong_at(got, want, want, 1e3);
            if (!wrong.empty() && !draws && in_time)
                differs_from(where,
                             on("the gradient before the exchange" + seen.line_of_backward(c), c),
                             got, want, wrong, candidates, sizes);
        }
        if (!sum.empty()) own[c] = candidates[c].numbers = sum;
    }
    before.own = own;

    // What is given to the exchange
    for (const PerDevice &grads : seen.exchanged)
        for (int c = 0; c < k; c++)
            for (size_t i = 0; i < params.size(); i++)
                if (grads.at(c).at(i).ptr() != gradient(device_params[c][i]).ptr())
                    error("%ssum_gradients gets another tensor than the gradient of %s on %s, "
                          "which is trained%s",
                          where.c_str(), param_names[i].c_str(), str(gpu(c)).c_str(),
                          seen.line_of_exchange().c_str());
    for (int c = 0; c < k; c++) {
        const Flat got = given(c);
        if (got.empty()) continue;
        const Indices wrong = wrong_at(got, own[c], own[c], 1e3);
        if (!wrong.empty())
            differs_from(where, on("the gradient when the first message is sent", c), got, own[c],
                         wrong, candidates, sizes);
    }

    // The sums
    Flat want(own[0].size()), magnitude(want.size());
    for (const Flat &part : own)
        for (size_t j = 0; j < want.size(); j++) {
            want[j] += part[j];
            magnitude[j] += std::fabs(part[j]);
        }
    const float *next = magnitude.data();
    std::string zeros;
    for (size_t i = 0; i < params.size(); next += size(params[i++]))
        if (std::all_of(next, next + size(params[i]), [](float x) { return x == 0; }))
            zeros += (zeros.empty() ? "" : ", ") + param_names[i];
    if (!zeros.empty())
        notice("%sthe gradient of %s is 0 everywhere", where.c_str(), zeros.c_str());
    auto is_message = [](const watch::Op &op) { return strcmp(op.kind, "message") == 0; };
    const bool sent = std::any_of(seen.ops.begin(), seen.ops.end(), is_message);
    std::vector<Flat> sums;
    for (int c = 0; c < k; c++) {
        sums.push_back(all_to_host(gradients({device_params[c]})[0]));
        const Indices wrong = wrong_at(sums[c], want, magnitude, k);
        if (!wrong.empty())
            differs_from(where, on("the sum of gradients" + seen.line_of_exchange(), c), sums[c],
                         want, wrong, candidates, sizes, sent ? "" : "; no message was sent");
    }
    before.sum = sums[0];

    // The updates
    for (Flat &numbers : updates)
        for (size_t j = 0; j < old.size(); j++) numbers[j] = old[j] - numbers[j];
    for (int c = 0; c < k; c++) {
        const Flat &update = updates[c], &other = updates[c ? 0 : k - 1];
        Flat right_update(old.size());
        Indices wrong;
        for (size_t j = 0; j < old.size(); j++) {
            right_update[j] = lr * sums[c][j] / n;
            const float rounding = 1e-5f * std::fabs(right_update[j]) + 1e-6f * std::fabs(old[j]);
            if (update[j] == right_update[j]) continue; // even if both are infinite
            if (!(std::fabs(update[j] - right_update[j]) <= rounding)) wrong.push_back(j);
        }
        const Candidate right = {"", right_update};
        const std::vector<double> ratio = factors_of(update, wrong, {&right});
        if (wrong.empty()) continue;
        std::vector<Candidate> parts = candidates;
        parts.insert(parts.begin(), {"the sum of gradients", sums[c]});
        parts.push_back({"the sign of the sum", Flat(old.size())}); // Adam's first step
        for (size_t j = 0; j < old.size(); j++)
            parts.back().numbers[j] = (sums[c][j] > 0) - (sums[c][j] < 0);
        Quantities quantities = sizes;
        quantities.insert(quantities.begin(), {"lr", lr});
        quantities.push_back({"BATCH", option("BATCH")});
        std::string note;
        if (!ratio.empty())
            note = "; it is " + times_in(ratio[0], quantities) + " the right one" +
                   (n > 1 && near(ratio[0], 1. / n) ? ": divided by n twice" : "");
        const float a = update[wrong[0]], b = other[wrong[0]];
        if (update == Flat(update.size()))
            note = "; " + str(gpu(c)) + "'s parameters are unchanged";
        else if (a != b && !(std::isnan(a) && std::isnan(b)) &&
                 same_bits(sums[c], sums[c ? 0 : k - 1]) &&
                 factors_of(update, wrong, {&candidates[c]}).empty()) // not of its own gradient
            note = format(
                "; on gpu(%d) it is %.6g, of the same parameter and the same sum: the update "
                "keeps something that the devices share",
                c ? 0 : k - 1, b);
        differs_from(where, on("the update" + seen.line_of_op("update", c), c), update,
                     right_update, wrong, parts, quantities, note);
    }
}
