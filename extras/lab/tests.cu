// Tests of the laboratory: the judge finds what is wrong in extras/lab/wrong/, what is counted is
// what the formulas say, what is recorded and simulated is what happens.
//
//     make test T='-tc=judge*'
//
// defines: main

#include <atomic>
#include <filesystem>
#include <thread>

#define LAB_NO_MAIN
#include "lab.cu"

#include "check.cu"
#include "fabric.h"
#include "judged_cases.h"
#include "judge_protocol.h"

#include "../tests.h"

typedef std::function<void(const PerDevice &grads)> Exchange;
static const std::vector<std::string> right_algorithms = {"naive",   "bucket", "host", "by_tensor",
                                                          "sharded", "ring",   "tree", "yours"};

// Select a network and initialize its parameters. Kept puts the last one back.
static void set_model(const std::string &name, int seed) {
    use_model(name);
    rng.seed(seed);
    experiment.init_params();
}

// ---------------------------------------------------------------------------------------------
// What an allreduce costs

static wire::Traffic traffic_of(const std::string &name, const PerDevice &grads) {
    waitall();
    watch::Recorder r(false);
    sum_gradients(name, grads);
    waitall();
    std::vector<wire::Row> rows;
    int waited = -1;
    for (const watch::Op &op : r.ops) rows.push_back({fabric::simulated(op, waited), op.steps});
    return wire::Traffic(rows);
}
TEST_CASE("allreduce_*: messages, bytes and rounds are those of the formulas") {
    for (int k = 1; k <= most_devices; k++) {
        const int P = 4;
        const long m = k * 5, n = m * P * sizeof(float); // bytes that k divides
        const PerDevice grads = make_grads(k, {(int)m, (int)m, (int)m, (int)m});
        const int rounds = std::ceil(std::log2(k));
        const int owned = (P + k - 1) / k; // by_tensor: the most tensors of one device
        const long L = owned * n / P;
        struct Cost {
            const char *name;
            long messages, bytes, busiest;
            int steps;
        };
        std::vector<Cost> costs = {
            {"naive", 2 * (k - 1) * P, 2 * (k - 1) * n, (k - 1) * n, 2 * (k - 1) * P},
            {"bucket", 2 * (k - 1), 2 * (k - 1) * n, (k - 1) * n, 2 * (k - 1)},
            {"host", 2 * k, 2 * k * n, k * n, k + 1},
            {"by_tensor", 2 * (k - 1) * P, 2 * (k - 1) * n, (k - 1) * L + n - L, 2 * owned},
            {"sharded", 2 * k * (k - 1), 2 * (k - 1) * n, 2 * (k - 1) * n / k, 2},
            {"ring", 2 * k * (k - 1), 2 * (k - 1) * n, 2 * (k - 1) * n / k, 2 * (k - 1)},
            {"tree", 2 * (k - 1), 2 * (k - 1) * n, rounds * n, 2 * rounds}};
        for (Cost want : costs) {
            if (k == 1) want = {want.name, 0, 0, 0, 0};
            const wire::Traffic got = traffic_of(want.name, grads);
            INFO(std::string(want.name), ", k ", k);
            CHECK((got.messages == want.messages && got.bytes == want.bytes));
            CHECK((got.busiest() == want.busiest && got.steps == want.steps));
        }
    }
}
TEST_CASE("allreduce_*: a part of no numbers is no message") {
    const PerDevice grads = make_grads(5, {3}); // three of five parts have a number
    for (std::string name : {"sharded", "ring"}) {
        CAPTURE(name);
        CHECK(traffic_of(name, grads).messages == 2 * 4 * 3);
    }
}

// ---------------------------------------------------------------------------------------------
// The judge, a program, with the allreduces of extras/lab/wrong/ in its worker

#ifdef CUDA_CPU
static std::string shell_quoted(const std::string &text) {
    std::string quoted = "'";
    for (char c : text) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return quoted + "'";
}
static std::string beside(const std::string &program) { // in the folder of these tests
    return std::filesystem::path(std::filesystem::read_symlink("/proc/self/exe"))
        .replace_filename(program);
}
static Run judged(const std::string &options, const std::string &environment = "",
                  const std::string &worker = "wrong") {
    static const std::string judge = std::filesystem::absolute("build/cpu/judge");
    TestFolder folder;
    const std::string command =
        "cd " + shell_quoted(folder.path) +
        " && exec >out 2>&1; unset CUDA_CPU_DEVICES; export "
        "TSAN_OPTIONS=\"$TSAN_OPTIONS log_path=stderr\"; " +
        environment + " " + judge + " " + options +
        (contains(options, "WORKER=") ? "" : " WORKER=" + shell_quoted(beside(worker)));
    const int status = system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_text(folder.file("out")), ""};
}
// Judge several at a time, one on each core, since a judge waits most of its time. Return what each
// says, in order.
struct Question {
    std::string options, environment = "";
};
static std::vector<Run> judged_together(const std::vector<Question> &questions) {
    std::vector<Run> runs(questions.size());
    std::atomic<size_t> next{0};
    std::vector<std::thread> threads(std::max(1u, std::thread::hardware_concurrency()));
    for (std::thread &thread : threads)
        thread = std::thread([&] {
            for (size_t i; (i = next++) < runs.size();)
                runs[i] = judged(questions[i].options, questions[i].environment);
        });
    for (std::thread &thread : threads) thread.join();
    return runs;
}
TEST_CASE("judge: each file of extras/lab/wrong/ gets the verdict in its first line" *
          doctest::skip(small_only)) { // a race would be reported
    struct File {
        std::string name, verdict;
        bool right;
        bool hangs() const { return contains(verdict, "no answer within"); }
    };
    std::vector<File> files; // those that hang come first, since they take longest
    for (const auto &entry : std::filesystem::directory_iterator("extras/lab/wrong")) {
        if (entry.path().extension() != ".cu") continue;
        const std::string text = read_text(entry.path());
        const File file = {entry.path().stem(), text.substr(3, text.find('\n') - 3),
                           contains(text, "\n// Right: ")};
        files.insert(file.hangs() ? files.begin() : files.end(), file);
    }
    CHECK(files.size() > 48);
    std::vector<Question> questions;
    for (const File &file : files)
        questions.push_back({format("GPUS=4 SEED=0 SECONDS=%d ALLREDUCE=%s", file.hangs() ? 1 : 3,
                                    file.name.c_str())});
    const std::vector<Run> runs = judged_together(questions);
    for (size_t i = 0; i < files.size(); i++) {
        const File &file = files[i];
        CAPTURE(file.name);
        check_parts(runs[i].out, file.verdict);
        CHECK(runs[i].status == !file.right);
        CHECK(contains(runs[i].out, "\n" + file.name + ": passed") == file.right);
    }
}
TEST_CASE("judge: one process answers all questions, another one those after a failure") {
    TestFolder folder;
    const std::string script = folder.file("worker"), starts = folder.file("starts");
    std::ofstream(script) << "#!/bin/sh\necho start >>" << shell_quoted(starts) << "\nexec "
                          << shell_quoted(beside("wrong")) << " \"$@\"\n";
    std::filesystem::permissions(script, std::filesystem::perms::owner_all);
    auto count = [&](const std::string &name) {
        std::filesystem::remove(starts);
        judged("GPUS=4 ALLREDUCE=" + name + " WORKER=" + shell_quoted(script));
        const std::string text = read_text(starts);
        return std::count(text.begin(), text.end(), '\n');
    };
    CHECK(count("ring") == 1);
    CHECK(count("crash") == 2);  // on 3 devices
    CHECK(count("rebind") == 3); // on 2, 3 and 4
}
TEST_CASE("show: what the page plays has the judge's counts, its times, and shows what is wrong" *
          doctest::skip(small_only)) {
    const TestFolder folder;
    auto shown = [&](const std::string &name) {
        const Run run =
            judged("GPUS=4 ALLREDUCE=" + name + " SHOW=" + shell_quoted(folder.file("rows")));
        CHECK(run.status == 0);
        return std::pair(run.out, read_text(folder.file("rows")));
    };
    const auto [out, page] = shown("ring");
    check_parts(out, "ring, one operation after another: right sums on 2 to 8 devices; a missing ");
    for (const std::string name :
         {"naive", "bucket", "host", "by_tensor", "sharded", "ring", "tree"}) {
        for (int k = 2; k <= limits::shown_devices; k++) {
            const wire::Traffic t = traffic_of(name, make_grads(k, limits::shown));
            const wire::Traffic lenet = traffic_of(name, make_grads(k, limits::gradients("lenet")));
            CHECK((t.messages == lenet.messages && t.steps == lenet.steps));
            check_parts(page, format("\nrun %s %d %ld %ld %ld right ", name.c_str(), k, t.messages,
                                     t.steps, t.busiest() / 4));
        }
    }
    // What the judge predicts on the last network, where bytes count
    const std::string predicted = judged("GPUS=4 ALLREDUCE=ring FABRIC=ethernet10").out;
    const size_t at = predicted.find("\nring ", predicted.find("\nus on  ")) + 6;
    const size_t last = page.rfind(' ', page.find('\n', page.find("\nrun ring 4 ") + 1));
    CHECK(std::stod(page.substr(last + 1)) ==
          doctest::Approx(std::stod(predicted.substr(at))).epsilon(0.0015));

    // gpu(1)'s number 8 is in it twice: 1 + 2 * 8
    const auto [said, twice] = shown("added_back");
    check_parts(said, "added_back, one operation after another: WRONG on 2 to 8 devices");
    check_parts(twice, "\nrun added_back 2 ... wrong ... \nchanged 1 0 50 17\n ... \nrun yours");
    check_parts(shown("crash").second, "\nfailed crash 3 crash,%20k%20= ... segmentation%20fault");
    const std::string tags = shown("tags").second;
    check_parts(tags, "\nfailed tags 2 ... %3c/script>%3cb>100%25%3c/b>%20%3c!--%20is%20no%20HTML");
    CHECK(tags.find('<') == std::string::npos);
    const Run run = judged("SHOW=no-such-folder/rows");
    check_parts(run.out, "cannot write no-such-folder/rows");
    CHECK(run.status == 1);
    check_parts(judged("SHOW=rows FABRIC=nothing").out, "FABRIC=nothing is unknown: ... pcie");
    check_parts(judged("SHOW=rows ALLREDUCE=no").out,
                "ALLREDUCE=no is unknown: choose one of naive, bucket");
    check_parts(judged("SHOW=rows GPUS=9").out, "make show takes 2 to 8 devices, not 9");
}
TEST_CASE("judge: each seed has other numbers, and finds the same") {
    for (int seed : {1, 77, 123456789}) {
        const Run run = judged(format("GPUS=2 SEED=%d ALLREDUCE=mean", seed));
        check_parts(run.out, "it is the mean ... to look at it: make show GPUS=2 ALLREDUCE=mean");
        CHECK(contains(run.out, format("SEED=%d gives these numbers again", seed)));
        CHECK(!contains(run.out, "not 5 (")); // seed 0's sum
    }
    const Run shifted = judged("GPUS=2 SEED=240 ALLREDUCE=shifted_parts");
    check_parts(shifted.out, "it is the sum that belongs 1 further on");
}
TEST_CASE("judge: right algorithms pass, with their costs beside naive's and the optimum's" *
          doctest::skip(no_training)) {
    const struct {
        const char *name;
        int gpus;
        std::vector<const char *> rows;
    } cases[] = {{"ring",
                  4,
                  {"ring              24     3097632          774408        774408       6",
                   "naive             48     3097632         1548816        516272      48",
                   "optimum            6     3097632          774408        258136       1"}},
                 {"host", 2, {}},
                 {"by_tensor", 2, {}}};
    const std::string no_peers = "export CUDA_CPU_PEERS=0;";
    std::vector<Question> questions;
    for (const auto &c : cases)
        questions.push_back({format("POINTS=1 GPUS=%d ALLREDUCE=%s", c.gpus, c.name)});
    questions.push_back({"GPUS=2 ALLREDUCE=naive", no_peers});
    questions.push_back({"GPUS=2 ALLREDUCE=owner", no_peers});
    const std::vector<Run> runs = judged_together(questions);
    for (size_t i = 0; i < std::size(cases); i++) {
        const auto &c = cases[i];
        const Run &run = runs[i];
        CAPTURE(run.out);
        CHECK((run.status == 0 && contains(run.out, std::string(c.name) + ": passed")));
        CHECK(contains(run.out, "Score: 100/100"));
        for (const char *row : c.rows) CHECK(contains(run.out, row));
    }
    check_parts(runs[3].out,
                "naive: the host waits in the tutorial's naive, too, so this is not judged on");
    check_parts(runs[4].out,
                "owner: the host waits in the tutorial's naive, too ... owner: passed");
}
TEST_CASE("judge: where naive fails nobody else is blamed; an untouched slot is named" *
          doctest::skip(no_training)) {
    const std::vector<Run> runs =
        judged_together({{"GPUS=2 MODEL=resnet18 ALLREDUCE=owner", "export CUDA_CPU_MEMORY=1;"},
                         {"GPUS=4 ALLREDUCE=yours"},
                         {"GPUS=4 ALLREDUCE=owner"}});
    const Run &broken = runs[0], &untouched = runs[1];
    check_parts(broken.out, "judge: naive ... tutorial's own: an edit outside of owner, or this "
                            "machine, is to blame. owner is not judged");
    CHECK(broken.status == 1);
    check_parts(untouched.out, "yours: passed, and is still the tutorial's algorithm. Its");
    CHECK(!contains(runs[2].out, "still the tutorial's"));
}
TEST_CASE("judge: wrong arguments, a worker that is none") {
    for (const auto &mistake : std::vector<std::pair<std::string, std::string>>{
             {"ALLREDUCE=magic", "ALLREDUCE=magic is unknown: choose one of naive, bucket"},
             {"GPUS=17", "GPUS=17: expected a whole number from 1 to 16"},
             {"GPUS=two", "GPUS=two: expected a whole number"},
             {"MODEL=alexnet", "MODEL=alexnet is unknown: choose one of lenet"},
             {"LR=0.1",
              "LR is not an option of the judge: use NAME=value, where NAME is ALLREDUCE,"},
             {"--gpus 2", "--gpus is not an option of the judge: use NAME=value"},
             {"GPUS=", "GPUS has no value: write GPUS=value"},
             {"GPUS=2 GPUS=2", "GPUS is given twice"},
             {"KVSTORE=local ALLREDUCE=ring", "KVSTORE and ALLREDUCE cannot both be given"},
             {"ring", "ring is not an option of the judge"},
             {"WORKER=no-such-program", "no-such-program cannot be started"},
             {"WORKER=/bin/true", "has exited with status 0"}}) {
        const std::string options = mistake.first, says = mistake.second;
        const Run run = judged(options);
        CAPTURE(options);
        CHECK((run.status == 1 && contains(run.out, "judge: ")));
        check_parts(run.out, says);
    }
}
TEST_CASE("judge: ThreadSanitizer sees an allreduce's missing event within three runs") {
    const char *worker = getenv("RACE_WORKER"); // beside these tests: of make race
    if (!worker) {
        MESSAGE("skipped: needs ThreadSanitizer (make race)");
        return;
    }
    auto found = [&](const std::string &algorithm, const std::string &line) {
        const std::string out = judged("GPUS=2 ALLREDUCE=" + algorithm, "", worker).out;
        return contains(out, "ThreadSanitizer: data race") && contains(out, "race on gpu(") &&
               contains(out, line);
    };
    for (const auto &mistake : std::map<std::string, std::string>{
             {"no_wait_before",
              "(copy_too_early) enqueued at extras/lab/wrong/no_wait_before.cu:17"},
             {"no_wait_after",
              "(copy_and_go_on) enqueued at extras/lab/wrong/no_wait_after.cu:20"}}) {
        const std::string name = mistake.first, says = "a message " + mistake.second;
        CAPTURE(name);
        CHECK((found(name, says) || found(name, says) || found(name, says)));
    }
    CHECK_FALSE(found("naive", ""));
}
#endif

// ---------------------------------------------------------------------------------------------
// make check

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
    else CHECK(!contains(out, "notice"));
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
                CHECK(contains(line, format("notice: the gradient of %s is 0 everywhere\n", name)));
        CHECK(!contains(line, "gradient of b4"));
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
    CHECK(contains(out, "notice: linear(X (5,3), W (3,2), b (2)): y[0,1] is 7, not "));
    CHECK(contains(out, ", in dX[0,:]): it is not the slope of this y: "));
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

// ---------------------------------------------------------------------------------------------
// What happens when

// Some training steps of the model on k devices, recorded with their times.
struct Recorded {
    watch::Recorder r;
    PerDevice grads;
    Floats after; // device 0's parameters
    Recorded(int k, int batch, int steps, bool timed = true, bool records = true) : r(timed) {
        watch::recorder = nullptr;
        rng.seed(1);
        experiment.init_params();
        auto device_params = replicate(first_devices(k));
        const auto step = training_step(device_params, batch);
        step();
        waitall();
        if (records) watch::recorder = &r;
        for (int i = 0; i < steps; i++) step();
        if (timed) r.read_times();
        watch::recorder = nullptr;
        grads = gradients(device_params);
        after = all_to_host(device_params[0]);
    }
};

// Sum with this algorithm, watched. Kept puts back what was there.
static void sum_by(const std::string &allreduce, [[maybe_unused]] bool overlapping) {
    options.allreduce = allreduce;
#ifdef ALGORITHMS
    overlap = overlapping;
    choose_exchange(true);
    overlap = false;
#endif
}
TEST_CASE("Recorder: streams in order, waits end after what they are for, every message counts") {
    Kept kept;
    const int k = 3, steps = 2;
    for (const char *allreduce : {"naive", "ring", "host"})
        for (bool overlapping : {false, true}) {
            sum_by(allreduce, overlapping);
            INFO(std::string(allreduce), ", overlap ", overlapping);
            const Recorded recorded(k, 6, steps);
            std::vector<double> until(recorded.r.count), sum(recorded.r.count);
            std::map<std::string, int> kinds, names;
            double begin = INFINITY, end = 0;
            for (const watch::Op &op : recorded.r.ops) {
                REQUIRE((op.lane >= 0 && op.lane < recorded.r.count));
                REQUIRE((op.begin >= until[op.lane] && op.end >= op.begin));
                until[op.lane] = op.end;
                sum[op.lane] += op.end - op.begin;
                begin = std::min(begin, op.begin), end = std::max(end, op.end);
                kinds[op.kind]++;
                names[op.name]++;
                if (op.after >= 0) { // a gradient's event stands between the times of its row
                    const watch::Op &other = recorded.r.ops[op.after];
                    const bool gradient = std::string(other.name) == "gradient";
                    const double apart = on_cpu ? 1e-6 : 1e-3; // clocks of several GPUs
                    CHECK(op.end >= (gradient ? other.begin : other.end) - apart);
                }
                CHECK((op.src >= -1) == (std::string(op.kind) == "message"));
            }
            for (double s : sum) CHECK(s <= end - begin);
            for (const char *kind : {"input", "forward", "backward", "sum", "message", "update"}) {
                CAPTURE(std::string(kind));
                const bool on_host = std::string(kind) == "sum" && std::string(allreduce) == "host";
                CHECK(kinds[kind] >= steps * (on_host ? 0 : std::string(kind) == "sum" ? 1 : k));
            }
            CHECK(kinds.size() == 7);
            CHECK((names["host"] > 0) == (std::string(allreduce) == "host")); // it waits
            CHECK(names["gradient"] == steps * k * (int)recorded.grads[0].size());
        }
}
TEST_CASE("Recorder: what it records stays as it was") {
    Kept kept;
    sum_by("naive", true);
    const Floats want = Recorded(2, 4, 2, false, false).after;
    for (bool timed : {false, true}) CHECK(Recorded(2, 4, 2, timed).after == want);
}
#ifdef FAST // which tells them
TEST_CASE("Recorder: bytes of the tensors that a kernel names") {
    Kept kept;
    const Tensor X = on_device(random_floats(1000, 1), {10, 100}), Y = copyto(X, gpu(0));
    auto bytes_of = [&](const std::string &kernel, const std::function<void()> &call) {
        watch::Recorder r(false);
        call();
        double bytes = -1;
        for (const watch::Op &op : r.ops)
            if (watch::kernel_name(op.name) == kernel) bytes = op.bytes;
        return bytes;
    };
    CHECK(bytes_of("add_kernel", [&] { add_(X, Y); }) == 8000);
    CHECK(bytes_of("copy", [&] { copyto(X, Y); }) == 4000);
    CHECK(bytes_of("copy in", [&] { copyto(on_host(Floats(10), {10}), gpu(0)); }) == 40);
    CHECK(bytes_of("relu_kernel", [&] { relu(X); }) == 8000);
    CHECK(bytes_of("fill_kernel", [&] { full({7}, 1, gpu(0)); }) == 28);
    waitall();
}
#endif

TEST_CASE("kernel_name: of a launch, in CUDA and in C++") {
    CHECK(watch::kernel_name("relu_kernel<<"
                             "<blocks(n), threads>>"
                             ">(y)") == "relu_kernel");
    CHECK(watch::kernel_name("pool2d_kernel<Window, fixed> <<"
                             "<1, block>>"
                             ">(y)") == "pool2d_kernel");
    CHECK(watch::kernel_name(
              "(::cuda_cpu::configured(::cuda_cpu::Launch(\"product_kernel<tm, tn>\", \"f\"") ==
          "product_kernel");
    CHECK(watch::kernel_name("copy in") == "copy in");
}

// What the simulation needs of what is recorded.
static std::vector<fabric::Op> replayable(const std::deque<watch::Op> &ops) {
    std::vector<fabric::Op> result;
    int waited = -1;
    for (const watch::Op &op : ops) result.push_back(fabric::simulated(op, waited));
    return result;
}
static std::vector<fabric::Op> real_allreduce(const std::string &name, int k, const Ints &sizes) {
    const PerDevice grads = make_grads(k, sizes);
    watch::Recorder r(false);
    sum_gradients(name, grads);
    return replayable(r.ops);
}
static std::vector<fabric::Op> dry_allreduce(const std::string &name, int k, const Ints &sizes) {
    const DryRun devices(k);
    return real_allreduce(name, k, sizes);
}

TEST_CASE("DryRun: enqueues what a run on devices enqueues, and leaves nothing behind") {
    for (const std::string &name : right_algorithms)
        for (int k = 1; k <= 5; k++) {
            INFO(name, ", k ", k);
            const Ints sizes = {1000, 3, 0, 77};
            const size_t before = watch::taken_bytes;
            const auto dry = dry_allreduce(name, k, sizes);
            CHECK(watch::taken_bytes == before);
            const auto real = real_allreduce(name, k, sizes);
            REQUIRE(dry.size() == real.size());
            for (size_t i = 0; i < dry.size(); i++) {
                CAPTURE(i);
                const fabric::Op &a = dry[i], &b = real[i];
                CHECK((a.kind == b.kind && a.lane == b.lane && a.after == b.after));
                CHECK((a.src == b.src && a.dst == b.dst && a.bytes == b.bytes));
            }
            waitall();
        }
    check_exact_sums("ring", 3, {10, 20}); // on devices that are there, after all that
}

// A message of n bytes takes a + n/b by itself, a = L + o. Of m messages to a device, each of
// another one, the engines take as many at once as there are.
TEST_CASE("simulate: each algorithm takes what its formula says") {
    const double L = 4e-6, o = 6e-6, a = L + o, b = 1e9, host = 2e9, GB = 1e9, add = 2e-6;
    for (const int engines : {0, 1, 3})
        for (int k : {2, 3, 4, 8, 16, 32})
            for (long m : {240L, 960000L}) { // numbers of each of P tensors, which k * P divides
                const fabric::Fabric own = {"own",  L * 1e6, o * 1e6,  (double)engines,
                                            b / GB, 0,       b / GB,   host / GB,
                                            1e12,   0,       add * 1e6};
                const int P = 2 * k, all = k - 1;
                const double n = sizeof(float) * (double)(m * k) * P, part = n / P;
                const int rounds = std::ceil(std::log2(k));
                const auto waves = [=](int m) { return engines ? (m + engines - 1) / engines : 1; };
                // Of two tensors for a device the second follows the first on its pair's stream,
                // or, with one engine, is behind all first ones in its line
                const double two = engines == 1 && k > 2 ? 2 * all * o + L : 2 * a;
                std::map<std::string, double> formulas = {
                    {"naive", 2 * all * (P * a + n / b) + all * P * add},
                    {"bucket", 2 * all * (a + n / b) + all * add},
                    {"host", k * (a + n / b) + a + std::max(n / b, k * n / host)},
                    {"by_tensor", 2 * (two + 2 * all * part / b) + 2 * all * add},
                    {"sharded", 2 * (L + waves(all) * o + all * n / k / b) + all * add},
                    {"ring", 2 * all * (a + n / k / b) + all * add},
                    {"tree", 2 * rounds * (a + n / b) + rounds * add}};
                if (engines == 3 && k > 4) formulas.erase("by_tensor"); // waves of both tensors
                for (const auto &formula : formulas) {
                    const std::string name = formula.first;
                    const double want = formula.second;
                    INFO(name, ", k ", k, ", m ", m, ", engines ", engines);
                    auto ops = dry_allreduce(name, k, Ints(P, m * k));
                    const double got = fabric::simulate(ops, own);
                    CHECK(got == doctest::Approx(want).epsilon(0.01));
                    for (const fabric::Op &op : ops) // and all of them have run
                        CHECK((op.end >= op.begin && op.end <= got * (1 + 1e-9)));
                }
            }
}
// Two machines of four devices: inside, device 0's sum to the host, between, and to all devices.
TEST_CASE("sum_in_nodes: takes what its formula says") {
    const int k = 8, node = 4, numbers = 1 << 20;
    fabric::Fabric own = fabric::find_fabric("4x10,4+30,0.5,memory=1e12");
    own.host_port = 1, own.host_all = 2;
    const double n = sizeof(float) * numbers, a = 10e-6, A = 30e-6, b = 4e9, host = 1e9, B = 0.5e9;
    const double aside = a + n / host + a + node * n / (2 * host); // to the host and back
    const std::map<std::string, double> formulas = {
        {"ring", 2 * 3 * (a + n / node / b) + 2 * (A + n / 2 / B)},
        {"tree", 2 * 2 * (a + n / b) + 2 * (A + n / B)}};
    for (const auto &formula : formulas) {
        const std::string algorithm = formula.first;
        CAPTURE(algorithm);
        const DryRun devices(k);
        const PerDevice grads = make_grads(k, {numbers});
        watch::Recorder r(false);
        dry_algorithm = algorithm, dry_node = node;
        sum_in_nodes(grads);
        auto ops = replayable(r.ops);
        CHECK(fabric::simulate(ops, own) == doctest::Approx(formula.second + aside).epsilon(0.01));
        auto between = [=](const fabric::Op &op) {
            return op.kind == fabric::Op::message && op.src >= 0 && op.dst >= 0 &&
                   op.src / node != op.dst / node;
        };
        CHECK(std::count_if(ops.begin(), ops.end(), between) == (algorithm == "ring" ? 4 : 2));
    }
    dry_algorithm = "naive", dry_node = 1024;
}
// A slow host: what it enqueues, one after another, and the last one's time. A message between
// devices has four waits, with the records before them, of half a call; naive's and bucket's two.
TEST_CASE("simulate: one host thread enqueues for all devices, or each process has one") {
    const double h = 1e-3;
    for (int k : {2, 3, 4, 8, 16}) {
        const int P = 3, all = k - 1;
        const std::map<std::string, double> calls = {{"naive", P * all * (2 * 2 + 1)},
                                                     {"bucket", all * (2 * 2 + 1)},
                                                     {"host", 3 * k},
                                                     {"by_tensor", P * all * (2 * 3 + 1)},
                                                     {"sharded", k * all * (2 * 3 + 1)},
                                                     {"ring", k * all * (2 * 3 + 1)},
                                                     {"tree", all * (2 * 3 + 1)}};
        for (const auto &formula : calls) {
            INFO(formula.first, ", k ", k);
            auto ops = dry_allreduce(formula.first, k, Ints(P, 160 * k));
            fabric::Fabric own = fabric::find_fabric("1,25,host=1000");
            CHECK(fabric::simulate(ops, own) == doctest::Approx(formula.second * h).epsilon(0.01));
            // A process for each device: all hosts work at once, where all devices have as much
            own.node = 1, own.network = 25;
            const double each = fabric::simulate(ops, own), equal = formula.second * h / k;
            if (formula.first == "sharded" || formula.first == "ring")
                CHECK(each == doctest::Approx(equal).epsilon(0.01));
            CHECK(each > 0.99 * equal);
        }
    }
}
TEST_CASE("simulate: messages share links fairly, none is faster than its links") {
    const double GB = 1e9, n = 1e6;
    const fabric::Fabric own = {"own", 5, 0, 0, 1, 1.5, 1, 1, 1, 0, 0};
    auto message = [](int lane, int src, int dst, double bytes) {
        fabric::Op op;
        op.kind = fabric::Op::message;
        op.lane = lane, op.src = src, op.dst = dst, op.bytes = bytes;
        return op;
    };
    fabric::Fabric whole = own; // no halves
    whole.crossing = 0;
    const struct {
        const fabric::Fabric &network;
        std::vector<fabric::Op> ops;
        Doubles ms;
    } cases[] = {
        // from one device: the shorter one ends, then the other has all
        {whole, {message(0, 0, 1, n), message(1, 0, 2, 2 * n)}, {2, 3}},
        // both directions at once; what another link holds up leaves more to the others
        {whole,
         {message(0, 1, 0, n), message(1, 2, 0, n), message(2, 3, 0, n),
          message(3, 1, 4, 2 * n / 3), message(4, 0, 1, n)},
         {3, 3, 3, 1, 1}},
        // three between the halves of six devices share 1.5 GB/s, back is another way
        {own,
         {message(0, 0, 3, n), message(1, 1, 4, n), message(2, 2, 5, n), message(3, 3, 0, n)},
         {2, 2, 2, 1}}};
    for (auto c : cases) {
        CAPTURE(c.ms);
        fabric::simulate(c.ops, c.network);
        Floats ms;
        for (const fabric::Op &op : c.ops) ms.push_back((op.end - op.begin - 5e-6) * GB / n);
        check_close(ms, c.ms, 5e-6);
    }
    // Many at random: no link has moved more than it can
    std::mt19937 random(1);
    const int k = 6;
    std::vector<fabric::Op> ops;
    for (int i = 0; i < 300; i++) {
        const int src = random() % k, dst = (src + 1 + random() % (k - 1)) % k;
        ops.push_back(message(random() % 20, src, dst, 1 + random() % (1 << 20)));
        if (i % 3 == 0) { // and waits
            ops.push_back({fabric::Op::wait, (int)(random() % 20)});
            ops.back().after = random() % (ops.size() - 1);
        }
    }
    const double all = fabric::simulate(ops, own);
    for (int link = 0; link < 2 * k + 2; link++) {
        double bytes = 0, busy = 0, until = 0;
        std::vector<std::pair<double, double>> times;
        for (const fabric::Op &op : ops) {
            if (op.kind != fabric::Op::message) continue;
            CHECK(op.bytes <= GB * (op.end - op.begin - 5e-6) * (1 + 1e-6));
            CHECK(op.end <= all);
            const bool uses = link < k       ? op.src == link
                              : link < 2 * k ? op.dst == link - k
                                             : (op.src >= k / 2) != (op.dst >= k / 2) &&
                                                   (op.dst >= k / 2) == (link == 2 * k);
            if (!uses) continue;
            bytes += op.bytes;
            times.push_back({op.begin, op.end - 5e-6});
        }
        std::sort(times.begin(), times.end());
        for (const auto &[begin, end] : times) {
            busy += std::max(0.0, end - std::max(begin, until));
            until = std::max(until, end);
        }
        CAPTURE(link);
        CHECK(bytes <= busy * GB * (link < 2 * k ? 1 : 1.5) * (1 + 1e-6));
    }
}
TEST_CASE("simulate: a wait for what comes later, and kernels") {
    const fabric::Fabric own = {"own", 0, 0, 0, 1, 0, 1, 1, 2, 0, 0};
    std::vector<fabric::Op> ops(4);
    ops[0].kind = fabric::Op::kernel, ops[0].lane = 0, ops[0].bytes = 4e6; // 2 ms of memory
    ops[1].kind = fabric::Op::kernel, ops[1].lane = 1, ops[1].seconds = 0.005;
    ops[2].kind = fabric::Op::wait, ops[2].lane = 0, ops[2].after = 1;
    ops[3].kind = fabric::Op::kernel, ops[3].lane = 0, ops[3].seconds = 0.001;
    CHECK(fabric::simulate(ops, own) == doctest::Approx(0.006));
    CHECK((ops[0].end == doctest::Approx(0.002) && ops[2].begin == doctest::Approx(0.005)));
    CHECK((ops[2].end == doctest::Approx(0.005) && ops[3].begin == doctest::Approx(0.005)));
    CHECK(fabric::simulate(ops, own, 10) == doctest::Approx(0.021)); // the bytes, not the seconds
}
TEST_CASE("simulate: bytes that take no time") {
    auto ops = dry_allreduce("ring", 4, {1000});
    const fabric::Fabric own = {"own", 10, 0, 0, INFINITY, 0, 1, 1, INFINITY, 0, 0};
    CHECK(fabric::simulate(ops, own) == doctest::Approx(60e-6)); // 6 steps
}
TEST_CASE("simulate: 1024 devices" * doctest::skip(small_only)) {
    for (const char *name : {"naive", "bucket", "host", "by_tensor", "tree"}) {
        CAPTURE(std::string(name));
        auto ops = dry_allreduce(name, 1024, {5000, 1000, 77});
        const double t0 = Timer::now();
        for (const fabric::Fabric &f : fabric::fabrics) CHECK(fabric::simulate(ops, f) > 0);
        CHECK(Timer::now() - t0 < 10);
    }
    auto ops = dry_allreduce("ring", 256, {129068}); // chunks of 504 and 505 numbers
    const double t0 = Timer::now(), us = 1e6 * fabric::simulate(ops, fabric::find_fabric("pcie"));
    CHECK(Timer::now() - t0 < 10);
    // its one host enqueues seven calls of each two messages and their sum
    CHECK(us == doctest::Approx(256 * 255 * 7 * 2.5).epsilon(0.01));
}
TEST_CASE("find_fabric: a name, or latency and bandwidth") {
    CHECK(fabric::find_fabric("nvlink").port == 450);
    const fabric::Fabric own = fabric::find_fabric("7.5,25");
    CHECK((own.latency == 7.5 && own.port == 25 && own.host_port == 25 && own.host_all == 25));
    CHECK((own.host == 0 && own.overhead == 0 && own.engines == 0 && own.launch == 0));
    const fabric::Fabric more = fabric::find_fabric("7,25,host=2,overhead=1,engines=3,launch=4");
    CHECK((more.port == 25 && more.host == 2 && more.overhead == 1 && more.engines == 3));
    CHECK((more.launch == 4 && more.name == "7,25,host=2,overhead=1,engines=3,launch=4"));
    const fabric::Fabric one = fabric::find_fabric("nvlink,host=0");
    CHECK((one.port == 450 && one.host == 0 && one.engines == 3));
    const fabric::Fabric machines = fabric::find_fabric("8xnvlink+ethernet100,network=50");
    CHECK((machines.port == 450 && machines.node == 8 && machines.network == 50));
    CHECK((machines.network_latency == 12 && machines.network_overhead == 3));
    CHECK(fabric::find_fabric("2x7,25+30,1").network == 1);
    for (const char *wrong : {"",
                              "nvlin",
                              "7",
                              "7,",
                              "7,0",
                              "7,25,3",
                              "1,2,3,4,5,6",
                              "-1,25",
                              "7;25",
                              "7,25 GB",
                              "nvlink,hos=1",
                              "nvlink,host=",
                              "nvlink,host=-1",
                              "nvlink,host=1,",
                              "nvlink,port=0",
                              "host=1",
                              "8xnvlink",
                              "8xnvlink+",
                              "0xnvlink+pcie",
                              "8xethernet10+ethernet10",
                              "8x+ethernet10"}) {
        CAPTURE(std::string(wrong));
        CHECK_THROWS_AS(fabric::find_fabric(wrong), std::runtime_error);
    }
}
// The program that draws, in here.
namespace drawing {
#define main simulate_main
#include "simulate.cc"
#undef main
} // namespace drawing
static drawing::Recording drawn(std::string rows) {
    const std::unique_ptr<FILE, int (*)(FILE *)> file(fmemopen(&rows[0], rows.size(), "r"), fclose);
    return drawing::read(file.get(), true);
}

TEST_CASE("computes: a step of fewer samples, from two that were measured") {
    auto step = [](int batch, int us) { // 1 us a sample, and what a step takes at least
        const std::string end = std::to_string(1000 * us);
        return drawing::Step(drawn("# lenet, batch " + std::to_string(batch) +
                                   ", 1 device, naive, 4 bytes of gradients\n0,0,c,forward,x,0," +
                                   end + ",-2,-2,1,-1\n0,0,c,update,y," + end + "," + end +
                                   ",-2,-2,1,-1\n"));
    };
    const auto step256 = step(256, 276), step4 = step(4, 24), one = step(1, 21);
    for (int k : {1, 2, 4, 32})
        CHECK(drawing::computes(step256, step(32, 52), k) ==
              doctest::Approx((20 + 256.0 / k) * 1e-6));
    for (int k : {1, 2, 4}) // whose eighth is a quarter
        CHECK(drawing::computes(step4, one, k) == doctest::Approx((20 + 4.0 / k) * 1e-6));
    CHECK(drawing::computes(one, one, 1) == doctest::Approx(21e-6));
}
TEST_CASE("write_file: a disk that is full is an error") {
    for (size_t bytes : {1, 1000000}) { // which fails at the end; before
        auto print = [=](FILE *file) { fwrite(std::string(bytes, 'x').data(), 1, bytes, file); };
        CHECK_THROWS_AS(drawing::write_file("/dev/full", print), drawing::Error);
    }
}
TEST_CASE("critical_path: what the last operation has waited for") {
    const std::string header = "# a, 1 bytes\ndevice,lane,stream,kind,name,begin,end,src,dst,bytes,"
                               "after\n";
    // Lane 0: 0-5, then a message to lane 1, which was done with its own at 3; lane 2 ends early
    const std::string rows = header + "0,0,c,forward,x,0,5,-2,-2,1,-1\n"
                                      "1,1,c,forward,x,0,3,-2,-2,1,-1\n"
                                      "1,1,c,wait,wait,3,5,-2,-2,0,0\n"
                                      "1,1,c,message,message,5,7,0,1,1,-1\n"
                                      "2,2,c,forward,x,0,6,-2,-2,1,-1\n"
                                      "1,1,c,sum,x,7,9,-2,-2,1,-1\n";
    const drawing::Recording r = drawn(rows);
    CHECK((r.title == "a" && r.bytes == 1 && r.ops.size() == 6));
    CHECK(drawing::critical_path(r.ops) ==
          std::vector<bool>{true, false, false, true, false, true});
    CHECK(drawing::covered({{0, 2}, {5, 6}, {1, 3}, {5, 5.5}}) == 4);
    CHECK_THROWS_WITH(drawn(header + "0,0,c,wait,wait,0,0,-2,-2,0,1\n"),
                      "a row waits for a later one");
}
TEST_CASE("print_rows: times, the critical path, and what an operation has waited for") {
    TestFolder folder;
    const std::string header = "# lenet, batch 2, 2 devices, naive, 4 bytes of gradients\n";
    const drawing::Recording rows =
        drawn(header + "0,0,computation,backward,relu_kernel,0,5000,-2,-2,8,-1\n"
                       "1,1,computation,backward,relu_kernel,0,3000,-2,-2,8,-1\n"
                       "1,1,computation,wait,wait,3000,5000,-2,-2,0,0\n"
                       "1,1,computation,message,W3,5000,9000,0,1,4,-1\n");
    CHECK(printed([&] { drawing::print_rows(stdout, rows, "a note"); }) ==
          "# lenet, batch 2, 2 devices, naive\n# a note\n"
          "device,lane,stream,kind,name,begin,end,src,dst,bytes,critical,cause\n"
          "0,0,computation,backward,relu_kernel,0,5000,-2,-2,8,1,-1\n"
          "1,1,computation,backward,relu_kernel,0,3000,-2,-2,8,0,-1\n"
          "1,1,computation,wait,wait,3000,5000,-2,-2,0,0,0\n"
          "1,1,computation,message,W3,5000,9000,0,1,4,1,0\n");
    // What a profile does not name takes what its bytes take
    drawing::Recording r = rows;
    std::ofstream(folder.file("profile"))
        << "# of a test\nname,bytes,us\nrelu_kernel,8,7.5\nrelu_kernel,9,1\n";
    drawing::read_profile(folder.file("profile").c_str(), r);
    CHECK(r.ops[0].seconds == 7.5e-6);
    CHECK(r.ops[1].seconds == 7.5e-6);
    CHECK(r.ops[3].seconds == -1);
    CHECK_THROWS_AS(drawing::read_profile(folder.file("none").c_str(), r), drawing::Error);
}

// ---------------------------------------------------------------------------------------------
// The commands of the lab

#ifdef CUDA_CPU
TEST_CASE("lab summary counts parameters and FLOPs") {
    TestFolder folder;
    struct Network {
        const char *model;
        long parameters;
        double forward, backward; // MFLOP of an image
        const char *row;
    };
    // conv1 2*26*26*20*9, conv2 2*9*9*50*500, dense 2*800*128 + 2*128*10; the backward twice as
    // many but for conv1's dX. ResNet-18's parameters are the tutorial's, its FLOPs by its shapes.
    const double conv1 = 2 * 26 * 26 * 20 * 9 / 1e6, rest = (4050000 + 204800 + 2560) / 1e6;
    double first = 2 * 784 * 64 * 9 / 1e6, blocks = 4 * 2 * 784.0 * 64 * 576 / 1e6 + 5120 * 2 / 1e6;
    for (int C = 128, plane = 196; C <= 512; C *= 2, plane = plane == 196 ? 49 : 16)
        blocks += 2.0 * plane * C * (C / 2 * 9 + 3 * C * 9 + C / 2) / 1e6;
    for (const Network &n :
         {Network{"lenet", 129068, conv1 + rest, conv1 + 2 * rest, "relu (2,20,26,26) 0"},
          Network{"lab_cnn", 129068, conv1 + rest, conv1 + 2 * rest, "max_pool2d (2,50,4,4) 0"},
          Network{"resnet18", 11175818, first + blocks, first + 2 * blocks,
                  "batch_norm (2,512,4,4) 1024"}}) {
        if (small_only && n.parameters > 1000000) continue;
        CAPTURE(n.model);
        std::string text; // with single spaces
        for (char c : output_of(folder, "summary BATCH=2 MODEL=" + std::string(n.model)))
            if (c != ' ' || (!text.empty() && text.back() != ' ')) text += c;
        CHECK(contains(text, "\n" + std::string(n.row) + " "));
        const std::string total = "\n" + std::string(n.model) + " ";
        REQUIRE(contains(text, total));
        long parameters = 0;
        double forward = 0, backward = 0;
        sscanf(text.c_str() + text.find(total) + total.size(), "%ld %lf %lf", &parameters, &forward,
               &backward);
        CHECK(parameters == n.parameters);
        CHECK(std::fabs(forward - 2 * n.forward) < 0.001); // it has three digits
        CHECK(std::fabs(backward - 2 * n.backward) < 0.001);
    }
}
TEST_CASE("lab trace prints a row for each operation") {
    TestFolder folder;
    const std::string out = output_of(folder, "trace GPUS=2 BATCH=8 STEPS=2 ALLREDUCE=ring");
    const std::string head = "# lenet, batch 8, 2 devices, ring, 516272 bytes of gradients\n"
                             "device,lane,stream,kind,name,begin,end,src,dst,bytes,after\n";
    CHECK(out.compare(0, head.size(), head) == 0);
    std::istringstream lines(out.substr(head.size()));
    std::map<std::string, int> names, messages; // of them: what they move
    for (std::string line; std::getline(lines, line);) {
        CHECK(std::count(line.begin(), line.end(), ',') == 10);
        std::istringstream columns(line);
        std::string kind, name;
        for (int c = 0; c < 4; c++) std::getline(columns, kind, ',');
        std::getline(columns, name, ',');
        (kind == "message" ? messages : names)[name]++;
    }
    CHECK((names["cross_entropy_kernel"] == 4 && names["gradient"] == 2 * 2 * 8));
    CHECK(names["copy in"] == 2 * 2 * 2); // X and y
    CHECK((messages["W1-W3"] == 2 * 2 && messages["W3-b4"] == 2 * 2 && messages.size() == 2));
}
TEST_CASE("lab profile, whose shares add up to 100%") {
    TestFolder folder;
    const std::string out = output_of(folder, "profile GPUS=2 BATCH=2 STEPS=3");
    CHECK(out.rfind("lenet, batch 2, 2 devices, naive: ", 0) == 0);
    for (int c : {0, 1}) {
        const size_t at = out.find("gpu(" + std::to_string(c) + "): idle for ");
        REQUIRE(at != std::string::npos);
        std::istringstream lines(out.substr(at));
        std::string line, word;
        double kinds = 0, rows = 0, last = INFINITY;
        int count = 0;
        std::getline(lines, line);
        line = line.substr(line.find("of the rest"));
        for (size_t i = 0; (i = line.find('%', i)) != std::string::npos; i++)
            kinds += atof(line.c_str() + line.rfind(' ', i));
        std::getline(lines, line); // the head
        for (; std::getline(lines, line) && !line.empty(); count++) {
            double calls = 0, ms = 0, percent = 0;
            REQUIRE(line.size() > 60);
            CHECK(sscanf(line.c_str() + 48, "%lf %lf %lf", &calls, &ms, &percent) == 3);
            CHECK((ms <= last && calls >= 1 && calls == int(calls))); // of each step
            last = ms;
            rows += percent;
        }
        CHECK((std::fabs(kinds - 100) < 0.4 && std::fabs(rows - 100) < 0.06 * count));
        CHECK(count > 12);
    }
    size_t row = std::string::npos; // of the convolutions' gradients: in registers, through shared
    for (const char *products : {"tiled_kernel", "product_kernel", "matmul_kernel"})
        row = std::min(row, out.find("backward  " + std::string(products)));
    REQUIRE(row != std::string::npos);
    double calls, ms, percent, gbs;
    REQUIRE(sscanf(out.c_str() + row + 48, "%lf %lf %lf %lf", &calls, &ms, &percent, &gbs) == 4);
    CHECK((calls >= 4 && contains(out, " GFLOP/s) backward ")));
#ifdef FAST
    CHECK(gbs > 0);
#endif
}
TEST_CASE("lab dry-run prints the messages of devices that are not there") {
    TestFolder folder;
    const std::string out = output_of(folder, "dry-run DRY_GPUS=1024 ALLREDUCE=tree");
    // 129068 numbers, and 980 more: equal chunks
    CHECK(contains(out, "# lenet, batch 256, 1024 devices, tree, 520192 bytes of gradients\n"));
    size_t messages = 0;
    for (size_t at = 0; (at = out.find(",message,message,0,0,", at)) != std::string::npos; at++)
        messages++;
    CHECK(messages == 2 * 1023);
    check_says(run_in_shell(folder, "", "dry-run DRY_GPUS=1025").err,
               "DRY_GPUS=1025: expected a whole number from 1 to 1024");
}
TEST_CASE("lab bench BENCH=allreduce times every algorithm" * doctest::skip(small_only)) {
    TestFolder folder; // with 2 MiB a device the larger sizes are skipped
    std::filesystem::create_directory(folder.file("build"));
    const std::string out = output_of(folder, "bench BENCH=allreduce GPUS=2", "CUDA_CPU_MEMORY=2");
    const std::string csv = read_text(folder.file("build/bench.csv"));
    CHECK(csv.compare(0, 44, "what,model,by,gpus,batch,bytes,us,rate,unit\n") == 0);
    for (std::string name : {"naive", "bucket", "host", "by_tensor", "sharded", "ring", "tree"})
        for (int bytes : {4096, 16384, 65536, 262144}) {
            const std::string row = "\nallreduce,," + name + ",2,," + std::to_string(bytes) + ",";
            CAPTURE(row);
            const size_t at = csv.find(row);
            REQUIRE(at != std::string::npos);
            double us = 0, rate = 0;
            REQUIRE(sscanf(csv.c_str() + at + row.size(), "%lf,%lf,GB/s\n", &us, &rate) == 2);
            CHECK(std::fabs(rate - bytes / us / 1e3) < 0.01 * rate + 0.001); // 2(k-1)/k is 1
        }
    CHECK((!contains(csv, "rebind") && !contains(csv, "local") &&
           contains(out, "1048576 bytes and more: skipped")));
}
TEST_CASE("lab bench BENCH=kernels times the kernels of each rung" * doctest::skip(small_only)) {
    TestFolder folder;
    std::filesystem::create_directory(folder.file("build"));
    const bool tuned = find_option("KERNELS"); // extras/fast/ is there
    auto rows = [&](const std::string &more) {
        output_of(folder, "bench BENCH=kernels GPUS=1 BATCH=1 " + more);
        return read_text(folder.file("build/bench.csv"));
    };
    const std::string one = tuned ? "tiled" : "plain", csv = rows(tuned ? "KERNELS=tiled" : "");
    for (std::string layer : {"lenet conv2", "resnet18 3x3", "lenet dense1"})
        CHECK(contains(csv, "\nkernels," + layer + "," + one + ",1,1,,"));
    if (!tuned) return;
    CHECK((!contains(csv, "plain") && !contains(csv, "fast") && !contains(csv, "tf32")));
    const std::string tf32 = rows("PRECISION=tf32"), all = rows("");
    CHECK((contains(tf32, ",tf32,1,1,,") && !contains(tf32, "fast")));
    for (std::string rung : {"plain", "tiled", "fast", "tf32"})
        CHECK(contains(all, "\nkernels,lenet conv2," + rung + ",1,1,,"));
}
TEST_CASE("lab: what is wrong is said in a line") {
    TestFolder folder;
    for (const auto &[line, says] : std::vector<std::pair<std::string, std::string>>{
             {"bench BENCH=x", "BENCH=x is unknown: choose one of all, step, allreduce, kernels"},
             {"trace BENCH=step", "BENCH does not apply to trace"},
             {"profile DRY_GPUS=2", "DRY_GPUS=2 is not an option: "}}) {
        const Run run = run_in_shell(folder, "", line);
        CHECK(run.status == 1);
        check_says(run.err, "mgpu: " + says);
    }
    CHECK(contains(run_in_shell(folder, "", "fly").err, "lab: the first word must be one of "));
    CHECK(folder.listing().empty());
}
#endif

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--program") == 0) return lab_main(argc - 1, argv + 1);
    return tests_main(argc, argv);
}
