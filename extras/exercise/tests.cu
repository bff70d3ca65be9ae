// Tests of the judge: it finds what is wrong in extras/exercise/wrong/, and what it counts is what
// the formulas say.
//
//     make test T='-tc=judge*'
//
// defines: main

#include <thread>

#define MGPU_NO_MAIN
#include "../watch/watch.h"
#include PROGRAM

#include "../watch/training_steps.h"
#include "judged_cases.h"
#include "judge_protocol.h"

#include "../tests.h"

// ---------------------------------------------------------------------------------------------
// What an allreduce costs

static network::Traffic traffic_of(const std::string &name, const PerDevice &grads) {
    waitall();
    watch::Recorder r(false);
    sum_with(name, grads);
    waitall();
    std::vector<network::Message> messages;
    for (const watch::Op &op : r.ops)
        if (op.src != -2) messages.push_back({op.src, op.dst, op.steps, op.bytes});
    return network::Traffic(messages);
}
TEST_CASE("allreduce_*: messages, bytes and rounds are those of the formulas") {
    for (int k = 1; k <= most_devices; k++) {
        const int P = 4;
        const long m = k * 5, n = m * P * sizeof(float); // bytes that k divides
        const PerDevice grads = make_grads(k, {(int)m, (int)m, (int)m, (int)m});
        const int log_k = std::ceil(std::log2(k));
        const int owned = (P + k - 1) / k; // by_tensor: the most tensors of one device
        const long L = owned * n / P;
        struct Cost {
            const char *name;
            long messages, bytes, busiest;
            int rounds;
        };
        std::vector<Cost> costs = {
            {"naive", 2 * (k - 1) * P, 2 * (k - 1) * n, (k - 1) * n, 2 * (k - 1) * P},
            {"bucket", 2 * (k - 1), 2 * (k - 1) * n, (k - 1) * n, 2 * (k - 1)},
            {"host", 2 * k, 2 * k * n, k * n, k + 1},
            {"by_tensor", 2 * (k - 1) * P, 2 * (k - 1) * n, (k - 1) * L + n - L, 2 * owned},
            {"sharded", 2 * k * (k - 1), 2 * (k - 1) * n, 2 * (k - 1) * n / k, 2},
            {"ring", 2 * k * (k - 1), 2 * (k - 1) * n, 2 * (k - 1) * n / k, 2 * (k - 1)},
            {"tree", 2 * (k - 1), 2 * (k - 1) * n, log_k * n, 2 * log_k}};
        for (Cost want : costs) {
            if (k == 1) want = {want.name, 0, 0, 0, 0};
            const network::Traffic got = traffic_of(want.name, grads);
            INFO(std::string(want.name), ", k ", k);
            CHECK(got.messages == want.messages);
            CHECK(got.bytes == want.bytes);
            CHECK(got.busiest() == want.busiest);
            CHECK(got.rounds == want.rounds);
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
// The judge, a program, with the allreduces of extras/exercise/wrong/ in its worker

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
TEST_CASE("judge: each file of extras/exercise/wrong/ gets the verdict in its first line" *
          doctest::skip(small_only)) { // a race would be reported
    struct File {
        std::string name, verdict;
        bool right;
        bool hangs() const { return contains(verdict, "no answer within"); }
    };
    std::vector<File> files; // those that hang come first, since they take longest
    for (const auto &entry : std::filesystem::directory_iterator("extras/exercise/wrong")) {
        if (entry.path().extension() != ".cu") continue;
        const std::string text = read_text(entry.path());
        const File file = {entry.path().stem(), text.substr(3, text.find('\n') - 3),
                           contains(text, "\n// Right: ")};
        files.insert(file.hangs() ? files.begin() : files.end(), file);
    }
    CHECK(files.size() > 40);
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
    CHECK(count("rebind") == 4); // on 2, which has a history, 3 and 4
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
            const network::Traffic t = traffic_of(name, make_grads(k, limits::shown));
            const network::Traffic lenet =
                traffic_of(name, make_grads(k, limits::gradients("lenet")));
            CHECK(t.messages == lenet.messages);
            CHECK(t.rounds == lenet.rounds);
            check_parts(page, format("\nrun %s %d %ld %ld %ld right\n", name.c_str(), k, t.messages,
                                     t.rounds, t.busiest() / 4));
        }
    }
    // Reads by kernels are messages, too
    const int n = std::accumulate(limits::shown.begin(), limits::shown.end(), 0);
    const auto [said_of_reads, reads] = shown("one_shot");
    for (int k = 2; k <= limits::shown_devices; k++)
        check_parts(reads,
                    format("\nrun one_shot %d %d 1 %d right\n", k, k * (k - 1), (k - 1) * n));
    check_parts(reads, format("\nop 1\nmessage 1 0 0 -1 %d\ncarried 1 0 %d 8\nop 1", n, n));
    check_parts(
        shown("two_shot").second,
        "\nrun two_shot 2 4 2 ... right ... \nop 2\nmessage 1 0 419 419 420\ncarried 1 419 420 9");
    // What the judge predicts on the last network, where bytes count
    const std::string predicted = judged("GPUS=4 ALLREDUCE=ring FABRIC=ethernet10").out;
    const size_t at = predicted.find("\nring ", predicted.find("\nus on  ")) + 6;
    const size_t op = page.find("\nop ", page.find("\nrun ring 4 ")), last = page.rfind(' ', op);
    CHECK(std::stod(page.substr(last + 1)) ==
          doctest::Approx(std::stod(predicted.substr(at))).epsilon(0.0015));
    const network::Traffic four = traffic_of("ring", make_grads(4, limits::gradients("lenet")));
    const double us = 1e6 * four.seconds(network::find_network("ethernet10"));
    CHECK(std::stod(predicted.substr(at)) == doctest::Approx(us).epsilon(0.001));

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
        check_parts(run.out, "0.5 times gpu(0) ... to look at it: make show GPUS=2 ALLREDUCE=mean");
        CHECK(contains(run.out, format("SEED=%d ALLREDUCE=mean gives these numbers again", seed)));
        CHECK(!contains(run.out, "not 5 (")); // seed 0's sum
    }
    const Run shifted = judged("GPUS=2 SEED=240 ALLREDUCE=shifted_parts");
    check_parts(shifted.out, "from here on it has the sum of number 1");
}
TEST_CASE("judge: right algorithms pass, with their costs beside naive's and the optimum's" *
          doctest::skip(no_training)) {
    const struct {
        const char *name;
        int gpus;
        std::vector<const char *> rows;
    } cases[] = {
        {"ring",
         4,
         {"ring              24     3097632          774408        774408       6",
          "naive             48     3097632         1548816        516272      48",
          "optimum            6     3097632          774408        258136       1"}},
        {"one_shot", 4, {"one_shot          12     6195264         1548816        516272       1"}},
        {"two_shot", 4, {"two_shot          24     3097632          774408        258136       2"}},
        {"host", 2, {}},
        {"by_tensor", 2, {}}};
    const std::string no_peers = "export CUDA_CPU_PEERS=0;";
    std::vector<Question> questions;
    for (const auto &c : cases)
        questions.push_back({format("POINTS=1 GPUS=%d ALLREDUCE=%s", c.gpus, c.name)});
    questions.push_back({"GPUS=2 ALLREDUCE=naive", no_peers});
    questions.push_back({"GPUS=2 ALLREDUCE=owner", no_peers});
    questions.push_back({"GPUS=2 ALLREDUCE=one_shot", no_peers});
    const std::vector<Run> runs = judged_together(questions);
    for (size_t i = 0; i < std::size(cases); i++) {
        const auto &c = cases[i];
        const Run &run = runs[i];
        CAPTURE(run.out);
        CHECK(run.status == 0);
        check_parts(run.out, std::string(c.name) + ": passed");
        CHECK(contains(run.out, "Score: 100/100"));
        for (const char *row : c.rows) CHECK(contains(run.out, row));
    }
    const Run *const without = &runs[std::size(cases)];
    check_parts(without[0].out,
                "naive: the host waits in the tutorial's naive, too, so this is not judged on");
    check_parts(without[1].out,
                "owner: the host waits in the tutorial's naive, too ... owner: passed");
    check_parts(without[2].out,
                "ALLREDUCE=one_shot does not work on 2 devices (not all of which can read each "
                "other's memory)");
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
        CHECK(run.status == 1);
        check_parts(run.out, "judge: ... " + says);
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
              "a message (copy_too_early) enqueued at extras/exercise/wrong/no_wait_before.cu:17"},
             {"no_wait_after",
              "a message (copy_and_go_on) enqueued at extras/exercise/wrong/no_wait_after.cu:20"},
             {"peers_no_wait_before",
              "sum_others_kernel enqueued at extras/exercise/wrong/peers_no_wait_before.cu:11"},
             {"peers_no_wait_after",
              "sum_others_kernel enqueued at extras/exercise/wrong/peers_no_wait_after.cu:12"}}) {
        const std::string name = mistake.first, says = mistake.second;
        CAPTURE(name);
        bool is_found = false;
        for (int i = 0; i < 3 && !is_found; i++) is_found = found(name, says);
        CHECK(is_found);
    }
    CHECK_FALSE(found("naive", ""));
}
#endif

int main(int argc, char **argv) { return tests_main(argc, argv); }
