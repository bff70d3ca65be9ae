// make check: check the parts of a training from the bottom up, each against an independent one:
// copies, operators (reference.h), data, replicas, allreduce, the network, steps (step.h), accuracy
// and epochs (train.h). Tell of the first difference, and of what it equals (differences.h).
// defines: check_copies, check_with_waits, check_data, check_replicated, check_exchange,
// check_slopes, check, main
#ifndef MGPU_NO_MAIN // the tests have included mgpu.cu, and have a main
#define MGPU_NO_MAIN
#define CHECK_MAIN
#ifndef PROGRAM
#define PROGRAM "../../mgpu.cu"
#endif
#include "../watch/watch.h" // messages can be late
#include "launches.h"
#include PROGRAM
#endif
#include <atomic>

#include "differences.h"
#include "reference.h"
#include "slopes.h"
#include "step.h"

// --- does copyto move what it is to move, and wait for it?

// A pattern is copied over and compared, its source overwritten at once, while i is late and while
// j is.
static void check_copy_while_late(Device i, Device j) {
    const Tensor zeros = full({1 << 14}, 0, cpu());
    const Tensor pattern = empty(zeros.shape, cpu());
    std::uniform_real_distribution<float> uniform(1, 2 + j.id);
    for (int n = 0; n < size(pattern); n++) pattern.ptr()[n] = uniform(rng);
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

// Run a check. If it fails, say whether it does not while the host waits after each operation, or
// differs from call to call.
static void check_with_waits(const std::function<void()> &check) {
    const auto before = rng;
    try {
        check();
    } catch (const std::exception &e) {
        const watch::Stack thrown_by = watch::thrown_by;
        const std::string text = e.what();
        std::string again[2];
        for (std::string &said : again) {
            const HostWaits guard;
            rng = before;
            try {
                check();
            } catch (const std::exception &other) {
                said = other.what();
            }
        }
        watch::thrown_by = thrown_by;
        const bool right = again[0].empty() && again[1].empty();
        if (!right && (again[0] == again[1] || draws)) throw;
        const size_t end = std::min(text.find("; if this is intended"), text.size());
        error("%s; %s%s", text.substr(0, end).c_str(),
              right ? "it is right if the host waits after each operation: a wait is missing"
                    : "called again with the same numbers it is another: something is kept from "
                      "call to call (a static?)",
              right ? "" : text.substr(end).c_str());
    }
}

// --- the data: minibatches against the bytes of the files

static void check_epochs(const std::string &who, DataIter iter, const DataSet &set) {
    const Tensor images = empty({set.count, 28 * 28}, cpu());
    for (int i = 0; i < size(images); i++) images.ptr()[i] = set.images[i] / 255.0f;
    const Samples samples(images);
    const std::string line = place("DataIter::minibatch", "x[p]");
    Indices order;
    for (auto [X, y] : iter.epoch()) {
        const Indices found = samples.in(X);
        const auto [least, most] = std::minmax_element(X.ptr(), X.ptr() + size(X));
        for (size_t i = 0; i < found.size(); i++) {
            if (found[i] < 0)
                return differs(who, format("%s: an image of an epoch is none of the file's, "
                                           "divided by 255: pixels go from %g to %g%s",
                                           who.c_str(), *least, *most, line.c_str()));
            if (y.ptr()[i] != set.labels[found[i]])
                error("%s: an image of an epoch has label %g, but %d in the file%s", who.c_str(),
                      y.ptr()[i], set.labels[found[i]],
                      place("DataIter::minibatch", "y.ptr()").c_str());
        }
        order.insert(order.end(), found.begin(), found.end());
    }
    if (const std::string wrong = samples.not_once(order); !wrong.empty())
        error("%s: in an epoch %s%s", who.c_str(), wrong.c_str(),
              place("DataIter::epoch", "begin < ").c_str());
}
static void check_data() {
    const HostIn watched("DataIter::epoch");
    if (memcmp(&train_set.images[0], &test_set.images[0], 28 * 28) == 0)
        error("the first test image is the first training image: look at load_data's files");
    const int train_count = train_set.count;
    train_set.count = std::min(train_count, 5000);
    auto [train_iter, test_iter] = load_data_fashion_mnist(97); // the last one is smaller
    check_epochs("training data", std::move(train_iter), train_set);
    check_epochs("test data", std::move(test_iter), test_set);
    train_set.count = train_count;
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
static float number_of(int c, int j) { return (1 + j % 3) * (1 << 3 * c); }
static float sum_at(int k, int j) { return (1 + j % 3) * ((1 << 3 * k) - 1) / 7; }
// Sum such numbers while a device is late, and return what was enqueued.
static std::deque<watch::Op> exchange_while(const PerDevice &grads, int late) {
    const int k = grads.size();
    std::vector<std::vector<Tensor>> host(k);
    for (int c = 0; c < k; c++)
        for (const Tensor &g : grads[c]) {
            copyto(full(g.shape, 0, cpu()), g);
            Tensor t = empty(g.shape, cpu());
            for (int j = 0; j < size(t); j++) t.ptr()[j] = number_of(c, j);
            host[c].push_back(t);
        }
    waitall();
    came_back = was_waited_for = false;
    if (late >= 0 && late < k && !HostWaits::now)
        CUDA_CHECK(cudaLaunchHostFunc(stream_of(gpu(late)), be_late, nullptr));
    for (int c = 0; c < k; c++)
        for (size_t i = 0; i < grads[c].size(); i++) {
            copyto(host[c][i], grads[c][i]);
            if (after_gradient) after_gradient(grads[c][i]);
        }
    if (HostWaits::now) waitall();
    const HostIn watched("the sum of gradients");
    const watch::Sum summing;
    watch::Recorder recorder(false);
    watch::late_messages = late == k && !HostWaits::now;
    sum_gradients(grads);
    watch::late_messages = false;
    came_back = true;
    waitall();
    return recorder.ops;
}
static void check_exchange_while(const PerDevice &grads, const std::string &who, int late) {
    const int k = grads.size();
    const std::deque<watch::Op> ops = exchange_while(grads, late);
    for (int c = 0; c < k; c++) {
        long wrong = 0, numbers = 0, multiples = 0, sums_of_others = 0;
        size_t at = 0, last = 0; // the tensors of the first wrong number and of the last one
        int first = 0;
        float value = 0;
        for (size_t i = 0; i < grads[c].size(); i++) {
            const Flat got = to_host(grads[c][i]);
            for (int j = 0; j < (int)got.size(); j++, numbers++) {
                const float want = sum_at(k, j);
                if (got[j] == want) continue;
                if (wrong++ == 0) at = i, first = j, value = got[j];
                last = i;
                multiples += near(got[j] / want, value / sum_at(k, first));
                for (int others = 1; others <= 3; others++)
                    sums_of_others += got[j] == want / (1 + j % 3) * others;
            }
        }
        if (wrong == 0) continue;
        std::vector<double> times(k); // so often device d's number is in it
        const double want = sum_at(k, first);
        double sum = 0;
        int left = std::isfinite(value) ? value : -1;
        for (int d = k - 1; d >= 0; d--) {
            times[d] = left / (1 << 3 * d) / (1. + first % 3);
            left %= 1 << 3 * d;
            sum += times[d] * number_of(d, first);
        }
        const bool whole = sum == value && value >= 0, multiple = !whole && multiples == wrong;
        std::string what; // 2 gpu(0)'s + gpu(1)'s
        for (int d = 0; d < k; d++)
            if (times[d] != 0)
                what += (what.empty() ? ": it equals " : " + ") +
                        (times[d] == 1 ? "" : format("%.4g times ", times[d])) + str(gpu(d)) + "'s";
        if (sums_of_others == wrong) what = ": it equals the sum at another index";
        else if (multiple)
            what = ": it equals " + times_in(value / want, {{"k", k}, {"BATCH", option("BATCH")}}) +
                   " the sum";
        else if (!whole) what = ": it is no sum of the devices' numbers";
        int messages = 0, into = 0;
        for (const watch::Op &op : ops) {
            messages += strcmp(op.kind, "message") == 0;
            for (const Tensor &g : grads[c]) into += op.to >= g.ptr() && op.to < g.ptr() + size(g);
        }
        what += format("; of %d messages %d go into gpu(%d)'s gradients", messages, into, c);
        const std::string part =
            wrong == numbers
                ? "all numbers are wrong"
                : format("%ld of %ld numbers are wrong, in %s to %s, and all others right", wrong,
                         numbers, param_names[at].c_str(), param_names[last].c_str());
        const std::string text =
            format("%s%s: the sum of %s, number %d, on gpu(%d) is %g, not %g (%s)%s", who.c_str(),
                   late == -1  ? ", the second call"
                   : late < 0  ? ""
                   : late == k ? ", messages late"
                               : format(", gpu(%d) late", late).c_str(),
                   param_names[at].c_str(), first, c, value, want, part.c_str(), what.c_str());
        if (multiple) return differs("a multiple", text);
        error("%s%s", text.c_str(),
              late == -1 ? "; the first call is right: something is kept from it, such as a static"
                         : "");
    }
}
static void check_exchange() {
    const int k = option("GPUS");
    if (k > 7) return; // 24 bits have place for seven
    const std::string allreduce = option_text("ALLREDUCE");
    const std::string who =
        format("allreduce %s, k = %d%s", allreduce.c_str(), k, overlaps() ? ", OVERLAP" : "");
    const PerDevice grads = make_grads(k, trained_sizes());
    // Nothing is late, twice; then each device is; then, with k, all messages
    for (int late = -2; late <= k; late++) {
        const size_t taken = watch::taken_bytes;
        check_with_waits([&] { check_exchange_while(grads, who, late); });
        // (Copies that are staged through the host may wait there.)
        if (was_waited_for && peers_can_read(k) && allreduce != "host" && allreduce != "local")
            differs("a wait",
                    format("%s: the host waits for gpu(%d), where only a stream should wait%s",
                           who.c_str(), late,
                           watch::taken_bytes > taken
                               ? ": the sum takes memory from cudaMalloc, and cudaFree waits"
                               : ", as copyto to the host and cudaStreamSynchronize do"));
    }
}

// --- the network: is its gradient the slope of its loss?

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
// Check the operators that the network calls, and whether the evaluation computes what is trained.
static void check_slopes(const std::string &where, const Tensor &X, const Tensor &y) {
#ifdef NETWORKS
    const bool bn = !buffers.empty(); // batch norm sees each device's shard by itself
#else
    const bool bn = false;
#endif
    const int few = bn ? 1 : std::min(2, X.shape[0]);
    const std::vector<Tensor> start = well_scaled(), p = get_params(start, gpu(0));
    const Tensor x = copyto(X, gpu(0)), labels = copyto(rows(y, 0, few), gpu(0));
    const auto before = rng;
    auto y_hat_if = [&](bool recorded) {
        NoGrad guard;
        recording = recorded;
        const Tensor y_hat = net(x, p);
        tapes[0].clear();
        return y_hat;
    };
    NetworksOperators called(where, rows(x, 0, few), labels, start);
    called.check_waits_and_memory();
    begin_again();
    const Flat once = to_host(y_hat_if(false));
    if (!same_bits(once, to_host(y_hat_if(false))))
        differs("random numbers in the evaluation",
                where + "under NoGrad, as in the evaluation, two passes over a minibatch give "
                        "other results: the network draws random numbers there, too: does it "
                        "ask whether `recording`?");
    called.check_random();
    draws = called.random;
    const bool right = called.check_slopes();
    const Tensor y_hat = y_hat_if(true);
    if (!draws && !bn && right)
        compare(where + "under NoGrad, as in the evaluation, ", "y_hat", y_hat.shape, once,
                all_in_double({y_hat})[0], 100 * float_error,
                "in training it is another: what asks whether `recording`?");
    const Flat logits = to_host(y_hat);
    if (*std::min_element(logits.begin(), logits.end()) >= 0)
        notice("%sno output of the network is below 0: is there a relu after the last layer?",
               where.c_str());
    rng = before;
}

#include "train.h"

// --- a model

// Take a step. If it fails, add what is known of the failure.
static std::vector<Tensor> step_of(const std::string &where, const Tensor &X, const Tensor &y,
                                   const PerDevice &device_params,
                                   const std::vector<Device> &devices) {
    const HostIn watched("train_batch");
    const Flat before = all_to_host(params);
    std::vector<Tensor> losses;
    try {
        losses = train_batch(X, y, device_params, devices, option("LR"));
    } catch (const std::exception &e) {
        const bool on_host = tapes.count(-1); // backward has looked for its tape
        error("%s%s%s%s", where.c_str(), e.what(),
              on_host ? ": it got an empty tensor on the host, no result of net" : "",
              line_of(watch::thrown_by).c_str());
    }
    if (!same_bits(all_to_host(params), before))
        error("it changes the parameters on the host, `params`");
    return losses;
}

// Some minibatches of a model on the run's devices, from the parameters that a run starts with.
// Each step is compared with one device's from the same parameters.
static void check_model(int minibatches) {
    const int k = option("GPUS"), batch = option("BATCH");
    const std::vector<Device> devices = first_devices(k);
    for (int c = 0; c < k; c++)
        if (devices.size() != (size_t)k || devices[c].id != c)
            error("first_devices(%d) returns %s%s", k, str(devices).c_str(),
                  place("first_devices", "try_gpu(").c_str());
    rng.seed(option("SEED"));
    experiment.init_params();
#ifdef FILES
    load_init();
#endif
    choose_exchange();
    const std::string who =
        format("%s, %d device%s, batch %d", experiment.name.c_str(), k, k > 1 ? "s" : "", batch);
    auto device_params = replicate(devices);
    check_replicated(device_params);
    for (size_t i = 0; i < params.size(); i++) {
        const Flat w = to_host(params[i]);
        if (params[i].shape.size() > 1 && std::count(w.begin(), w.end(), w[0]) == (long)w.size())
            notice("%s: all numbers of %s are the same when the training begins, %g: look at "
                   "init_params and normal",
                   who.c_str(), param_names[i].c_str(), w[0] + 0.0f);
    }
    check_exchange();
    DataIter train_iter = load_data_fashion_mnist(batch).first;
    const auto epoch = train_iter.epoch();
    auto [X, y] = epoch.at(0);
    check_slopes(who + ": ", X, y);
    int step = 0;
    do {
        const std::string where = format("%s, minibatch %d: ", who.c_str(), step + 1);
        if (step == 2) { // a smaller one, as the last of an epoch
            const int n = std::max(k, X.shape[0] * 2 / 3);
            X = rows(X, 0, n), y = rows(y, 0, n);
        }
        for (size_t i = 0; i < params.size(); i++) copyto(device_params[0][i], params[i]);
        std::vector<Tensor> losses;
        check_with_waits([&, X = X, y = y] {
            device_params = replicate(devices); // other tensors, so that nobody keeps the old ones
            Seen seen(&device_params);
            losses = step_of(where, X, y, device_params, devices);
            check_step(where, X, y, losses, device_params, option("LR"), seen);
        });
        double mean = 0;
        for (float l : all_to_host(losses)) mean += l / X.shape[0];
        if (step == 0 && mean > 10)
            notice("%sthe mean loss is %.3g, but log(10) = 2.3 is usual: how large are the initial "
                   "parameters (init_params, normal) and the pixels?",
                   where.c_str(), mean);
        check_replicas(device_params);
        if (++step < (int)epoch.size()) std::tie(X, y) = epoch[step];
    } while (step < minibatches && step < (int)epoch.size());
    check_train(who + ": ");
    printf("%s: %d minibatch%s right\n", who.c_str(), step, step > 1 ? "es are" : " is");
}
// MODEL alone, or lenet and lab_cnn (resnet18 takes minutes on a CPU: ask for it).
void check() {
    const int k = option("GPUS");
    const bool one = has_option("MODEL") && given("MODEL");
    check_operators();
    check_data();
    const std::string chosen = experiment.name;
    for (const std::string &model : model_names()) {
        if (one ? model != chosen : model == "resnet18") continue;
        use_model(model);
        find_option("BATCH").preset = std::to_string(model == "resnet18" ? 4 * k : std::max(31, k));
        test_set.count = std::min(test_set.count, model == "resnet18" ? 7 : 47);
        check_model(model == "resnet18" ? 1 : 3);
    }
    if (notices) printf("check: %d notice%s above\n", notices, notices > 1 ? "s" : "");
    else printf("check: nothing wrong was found on %d device%s\n", k, k > 1 ? "s" : "");
    params.clear();
}

#ifdef CHECK_MAIN
static void run_check() {
    const int k = option("GPUS");
    train_set = load_data(option_text("DATA"), "train");
    test_set = load_data(option_text("DATA"), "t10k");
    if (on_cpu) setenv("CUDA_CPU_DEVICES", std::to_string(k).c_str(), 0);
    use_devices(k, true);
    prepare_last_words();
    try {
        check_copies();
        check();
    } catch (const std::exception &e) { // an error of the lesson's has a line of it
        const std::string text = e.what(), line = line_of(watch::thrown_by);
        error("%s%s", text.c_str(), line.c_str());
    }
}
int main(int argc, char **argv) {
    find_option("GPUS").preset = "2";
    run = run_check;
    return mgpu_main(argc, argv);
}
#endif
