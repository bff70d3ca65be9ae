// Judges an allreduce: is it right, does it give the same bits everywhere, does the host go on, and
// what does it cost? The submission runs in other processes, the workers: whatever happens there, a
// crash, an endless loop, an exit, is a verdict with its case. No line of a submission is in here.
// defines: main
//
//     judge WORKER=program [GPUS=k] [ALLREDUCE=name] [MODEL=name] [SEED=n|stdin]
//         [FABRIC=name] [SECONDS=of a case] [POINTS=1] [RESULT=number of an open file]
//     judge WORKER=program SHOW=file ...     does not judge: see show.h
#include "../format.h"
#include "judged_cases.h"
#include "judge_protocol.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>

#include <fcntl.h>
#include <linux/capability.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

using wire::Answer;
using wire::Flat;
using wire::Request;

struct Options {
    std::string worker, allreduce = "yours", model = "lenet", show;
    std::vector<network::Network> networks; // FABRIC, if it is given
    int gpus = 0;                           // not given: limits::usual_devices
    unsigned seed = std::random_device()();
    bool points = false;
    int given = 0;   // gpus, as they were given
    int result = -1; // an open file for what extras/exercise/grade.py reads
    double seconds = limits::seconds_of_case;
};
static Options options;

static std::string listed(const std::vector<std::string> &words) {
    std::string text;
    for (const std::string &word : words) text += (text.empty() ? "" : ", ") + word;
    return text;
}
static std::string gpu(int i) { return i < 0 ? "cpu" : format("gpu(%d)", i); }

// What is wrong with the submission, or with how the judge was called.
enum Kind { wrong, crash, timeout };
struct Verdict : std::runtime_error {
    Kind kind;
    std::string history; // of a wrong number: rows
    explicit Verdict(const std::string &text, Kind kind = wrong)
        : std::runtime_error(text), kind(kind) {}
};

static bool numbers_were_wrong = false; // then the seed is worth knowing
static bool a_wait_is_missing = false;  // with one operation after another they are right
static Verdict wrong_numbers(const std::string &text) {
    numbers_were_wrong = true;
    return Verdict(text);
}

// ---------------------------------------------------------------------------------------------
// The worker: a process for all cases, until one of them fails. The next case then has a new one.

static double slow = 1;    // a sanitizer's factor
static bool races = false; // ThreadSanitizer: what it says of the waits is what is wanted
static int cases = -1;     // sums that were asked for before in this group of cases
static int group = 0;      // groups with different numbers: see code
static bool quiet = false; // what workers print is not shown: a first one has said it
static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// Say on a terminal which case is judged, if nothing was said for two seconds.
static double last_line = now();
static void say_that_it_goes_on(const std::string &where) {
    if (now() - last_line < 2 || !isatty(STDOUT_FILENO)) return;
    printf("judging %s ...\n", where.c_str());
    last_line = now();
}

class Worker {
public:
    explicit Worker(int devices) {
        int in[2], out[2], printed[2];
        if (pipe2(in, O_CLOEXEC) || pipe2(out, O_CLOEXEC) || pipe2(printed, O_CLOEXEC))
            throw Verdict("cannot create a pipe to a worker");
        const pid_t judge = getpid();
        fflush(stdout);
        pid = fork();
        if (pid < 0) throw Verdict("cannot start a process for a worker");
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            setpgid(0, 0);
            if (getppid() != judge) _exit(1);
            prctl(PR_CAPBSET_DROP, CAP_SYS_PTRACE); // even root's worker: see main
            // Above 4 first: one of them may be 3 or 4 now
            const int ends[] = {fcntl(in[0], F_DUPFD, 10), fcntl(out[1], F_DUPFD, 10)};
            const int null = open("/dev/null", O_RDONLY);
            dup2(null, 0), dup2(printed[1], 1), dup2(printed[1], 2);
            dup2(ends[0], 3), dup2(ends[1], 4);
            close(ends[0]), close(ends[1]);
            const std::string devices_text = std::to_string(devices);
            execl(options.worker.c_str(), options.worker.c_str(), devices_text.c_str(), nullptr);
            _exit(127);
        }
        for (int end : {in[0], out[1], printed[1]}) close(end);
        questions = in[1], answers = out[0], prints = printed[0];
        fcntl(questions, F_SETFL, O_NONBLOCK);
        for (int end : {questions, answers}) fcntl(end, F_SETPIPE_SZ, 1 << 20); // fewer switches
    }
    Worker(const Worker &) = delete;
    void may_print_again() { printed = 0; }
    ~Worker() {
        for (int end : {questions, answers, prints}) close(end);
        kill_all();
    }
    // `where` names the case, for a verdict on a process that does not answer
    Answer ask(const Request &request, const std::string &where) {
        const std::string question = wire::packed(request);
        const double limit = slow * (options.seconds + question.size() / limits::bytes_of_second);
        const double until = now() + limit;
        std::string got;
        size_t sent = 0, wanted = sizeof(size_t);
        while (got.size() < wanted) {
            pollfd ends[] = {{answers, POLLIN, 0},
                             {prints, POLLIN, 0},
                             {sent < question.size() ? questions : -1, POLLOUT, 0}};
            say_that_it_goes_on(where);
            poll(ends, 3, 1e3 * std::clamp(until - now(), 0.0, 0.5));
            if (now() > until && !ends[0].revents) {
                say_where_it_is();
                throw Verdict(
                    format("%s: no answer within %.0f s: is there an endless loop, or does a "
                           "stream wait for itself?",
                           where.c_str(), limit),
                    timeout);
            }
            if (ends[2].revents) {
                const ssize_t n = write(questions, &question[sent], question.size() - sent);
                if (n < 0 && errno != EAGAIN) sent = question.size(); // it has ended: see below
                else sent += std::max<ssize_t>(0, n);
            }
            if (ends[1].revents && !print_on()) prints = -1;
            if (printed > limits::bytes_printed && !races)
                throw Verdict(format(
                    "%s: it prints more than %zu bytes: is there an endless loop, or is a large "
                    "tensor printed? (make run ALLREDUCE=yours GPUS=2 sums small ones first)",
                    where.c_str(), limits::bytes_printed));
            siginfo_t ended_as = {}; // a child of the worker may hold its end of the pipe
            if (!ends[0].revents && !waitid(P_PID, pid, &ended_as, WEXITED | WNOHANG | WNOWAIT) &&
                ended_as.si_pid == pid && poll(ends, 1, 0) <= 0)
                throw Verdict(where + ": " + how_it_ended(), crash);
            if (!ends[0].revents) continue;
            static char bytes[1 << 20];
            const ssize_t n = read(answers, bytes, sizeof bytes);
            if (n <= 0) throw Verdict(where + ": " + how_it_ended(), crash);
            got.append(bytes, n);
            if (got.size() >= sizeof(size_t) && wanted == sizeof(size_t)) {
                memcpy(&wanted, got.data(), sizeof(size_t));
                wanted = std::min(wanted, limits::bytes_of_memory(options.gpus)) + sizeof(size_t);
            }
        }
        while (print_on(true)) {}
        try {
            const Answer answer = wire::unpacked<Answer>(got.substr(sizeof(size_t)));
            if (answer.error.empty()) return answer;
            throw Verdict(where + ": " + answer.error);
        } catch (const Verdict &) { throw; } catch (const std::exception &e) {
            throw Verdict(where + ": its reply is malformed (" + e.what() +
                          "): does the submission write into the judge's pipe?");
        }
    }

private:
    // End the worker and what it has started. What it has left behind is a child of this process.
    void kill_all() {
        if (!ended) kill(pid, SIGKILL), waitpid(pid, nullptr, 0);
        ended = true;
        kill(-pid, SIGKILL);
        const std::string list = "/proc/self/task/" + std::to_string(getpid()) + "/children";
        for (int child = 1; child > 0;) {
            FILE *file = fopen(list.c_str(), "r");
            if (!file || fscanf(file, "%d", &child) != 1) child = 0;
            if (file) fclose(file);
            if (child > 0) kill(child, SIGKILL), waitpid(child, nullptr, 0);
        }
    }
    void say_where_it_is() { // the stand-in does, on this signal, soon, and ends
        for (int i = 0; i < 600 && !ended; i++) {
            kill(pid, SIGVTALRM);
            ended = waitpid(pid, nullptr, WNOHANG) || usleep(20000);
        }
        while (print_on(true)) {}
    }
    // What the submission prints is shown as its own: lines of characters. (ThreadSanitizer's
    // reports stay as they are.)
    bool print_on(bool only_if_there = false) {
        char bytes[4096];
        pollfd end = {prints, POLLIN, 0};
        if (prints < 0 || (only_if_there && poll(&end, 1, 0) <= 0)) return false;
        const ssize_t n = read(prints, bytes, sizeof bytes);
        unprinted.append(bytes, std::max<ssize_t>(0, n));
        size_t whole = unprinted.size();
        for (size_t i = whole; i-- > 0 && i + 3 >= unprinted.size();)
            if ((unsigned char)unprinted[i] >= 0xc0) whole = i; // it may be there in part
        std::string shown;
        for (size_t i = 0, length; i < whole; i += std::max<size_t>(1, length), printed++) {
            length = wire::character(unprinted, i);
            const char c = unprinted[i];
            if (!races && (quiet || printed >= limits::bytes_shown)) continue;
            if (!races && line_begins) shown += "| ";
            line_begins = races || c == '\n';
            shown += length ? unprinted.substr(i, length)
                            : std::string(1, c == '\n' || c == '\t' ? c : '?');
            if (!races && printed + 1 == limits::bytes_shown)
                shown += "\n| ... the rest of its output is not shown\n", line_begins = true;
        }
        unprinted.erase(0, whole);
        last_line = now();
        fflush(stdout);
        fwrite(shown.data(), 1, shown.size(), races ? stderr : stdout);
        fflush(stdout);
        return n > 0;
    }
    std::string how_it_ended() {
        int status = 0;
        waitpid(pid, &status, 0);
        ended = true;
        kill_all();
        while (print_on(true)) {}
        if (!line_begins) putchar('\n');
        line_begins = true;
        if (WIFEXITED(status) && WEXITSTATUS(status) == 127)
            return options.worker + " cannot be started";
        if (WIFEXITED(status) && WEXITSTATUS(status) == 1) return "it has stopped, see above";
        if (WIFEXITED(status))
            return format(
                "the program has exited with status %d before it was done: is exit called?",
                WEXITSTATUS(status));
        switch (WTERMSIG(status)) {
        case SIGSEGV:
        case SIGBUS:
            return "segmentation fault: is an index out of range, a pointer null, or is there "
                   "endless recursion?";
        case SIGABRT: return "aborted, see above: is an index out of range?";
        case SIGFPE: return "is an integer divided by zero?";
        case SIGKILL: return "the system has killed it: did it run out of memory?";
        }
        return format("ended by signal %d, %s", WTERMSIG(status), strsignal(WTERMSIG(status)));
    }
    pid_t pid = 0;
    int questions = -1, answers = -1, prints = -1;
    size_t printed = 0;
    std::string unprinted;
    bool line_begins = true, ended = false;
};

// ---------------------------------------------------------------------------------------------
// The numbers, and what a wrong one says

// Device c's number i is code(i) * base^c: the digits of sum / code(i) then tell how often each
// device's number is in the sum. All sums are whole and below 2^24: exact in any order. The seed is
// secret, and each case on k devices has other numbers, so that no submission knows a sum that it
// has not computed.
static int base_bits(int k) { return k <= 8 ? 2 : 1; } // base 4, or 2 where that would be too much
static int code(long i) { return 1 + (i + options.seed % 251 + 97L * cases + 40 * group) % 251; }
static limits::Secret secret(int k) { return limits::Secret(options.seed + 16807 * k); }
static float input(int i, int c, int k) { return (float)code(i) * (1 << base_bits(k) * c); }

// ---------------------------------------------------------------------------------------------
// The parts of the exercise

// What extras/exercise/grade.py reads
static int points_sums = 0, points_bits = 0, points_host = 0;
static std::unique_ptr<Verdict> first_verdict; // null: all is right
static std::unique_ptr<network::Traffic> counted;
// For a submission that has not done what its sums show
static Verdict no_points(const std::string &text) {
    points_sums = points_bits = 0;
    return Verdict(text);
}
static int asked = 0, asked_first_wrong = 0; // a case's k; that of the first verdict
static void say_wrong(const Verdict &v, const char *what) {
    fflush(stdout);
    fprintf(stderr, "judge: %s\n%s", what, v.history.c_str());
    last_line = now();
    if (first_verdict) return;
    first_verdict.reset(new Verdict(v));
    asked_first_wrong = asked;
}

static int total(const std::vector<int> &sizes) {
    return std::accumulate(sizes.begin(), sizes.end(), 0);
}
static std::string case_of(int k, const std::vector<int> &sizes) {
    const int n = total(sizes);
    return format("k = %d, %zu tensor%s, %d number%s", k, sizes.size(), sizes.size() > 1 ? "s" : "",
                  n, n == 1 ? "" : "s");
}
// The process that is asked next. After a verdict it is reset: what the submission has left behind
// in it must not fail another case.
static std::unique_ptr<Worker> worker;
static Worker &running_worker() {
    if (!worker) worker.reset(new Worker(options.gpus));
    return *worker;
}
static Answer ask(const Request &request) {
    asked = request.k;
    return running_worker().ask(request,
                                request.algorithm + ", " + case_of(request.k, request.sizes));
}
// Begin a group of cases, which have other numbers than those of an earlier group. What they print
// is limited together. (On each number of devices the sums of the submission are group 0, so that a
// seed gives the same numbers with and without naive.)
static void begin_group(bool own_sums = false) {
    static int others = 0;
    group = own_sums ? 0 : ++others;
    cases = -1;
    running_worker().may_print_again();
}

// The round of the last message before the end of each row. A message's round comes after those of
// what its stream has done, or waited for, and so do a kernel's reads of other devices' memory. The
// worker may say anything, so what becomes an index is checked.
static std::vector<int> rounds_of(const Answer &answer) {
    std::vector<int> rounds;
    std::map<int, int> lasts; // of each stream, its last row
    for (const wire::Row &row : answer.rows) {
        const int r = rounds.size();
        const network::Message &m = row.message;
        auto is_place = [](int device) { return device >= -1 && device < limits::most_devices; };
        const bool bytes = m.bytes >= 0 && m.bytes < 1e12;
        const bool is_right = is_place(m.src) && is_place(m.dst) && bytes;
        if (row.after >= r || (row.is_message && !is_right))
            throw Verdict("its reply is malformed");
        const bool moves = row.is_message || (!answer.reads.empty() && !answer.reads[r].empty());
        int round = moves;
        for (int before : {lasts.count(row.lane) ? lasts[row.lane] : -1, row.after})
            if (before >= 0) round = std::max(round, rounds[before] + moves);
        rounds.push_back(round), lasts[row.lane] = r;
    }
    return rounds;
}
static std::vector<network::Message> messages_of(const Answer &answer) {
    std::vector<network::Message> messages;
    const std::vector<int> rounds = rounds_of(answer);
    for (size_t r = 0; r < answer.rows.size(); r++) {
        network::Message m = answer.rows[r].message;
        m.round = rounds[r];
        if (answer.rows[r].is_message) messages.push_back(m);
        for (size_t i = 0; !answer.reads.empty() && i < answer.reads[r].size(); i++) {
            const wire::Read &read = answer.reads[r][i];
            const double bytes = sizeof(float) * read.whose.size();
            messages.push_back({read.src, read.dst, rounds[r], bytes});
        }
    }
    for (network::Message &m : messages) m.bytes = std::ceil(m.bytes * answer.scale);
    return messages;
}
static network::Traffic traffic_of(const Answer &answer) {
    return network::Traffic(messages_of(answer));
}

#include "history.h"
#include "moves.h"

static void check_sums(const Answer &answer, const std::string &name, int k, int n) {
    bool there = (int)answer.sums.size() == k;
    for (const Flat &sum : answer.sums) there = there && (int)sum.size() == n;
    if (!there) throw Verdict(name + ": its reply is malformed");
}
// A question with the judge's whole numbers. Wrong sums are a verdict that names the first.
static Answer judge_sums(const std::string &name, int k, const std::vector<int> &sizes,
                         int straggler, wire::What what = wire::sums) {
    static std::vector<int> before; // the sizes of the last case
    const int n = total(sizes);
    if (cases++ < 0) before.clear();
    Request r;
    r.what = what, r.k = k, r.straggler = straggler;
    r.algorithm = name, r.sizes = sizes;
    r.numbers.assign(k, Flat(n));
    Flat sum(n);
    for (int c = 0; c < k; c++)
        for (int i = 0; i < n; i++) sum[i] += r.numbers[c][i] = input(i, c, k);
    const Answer answer = ask(r);
    check_sums(answer, name, k, n);
    for (int c = 0; c < k; c++) {
        const Flat &got = answer.sums[c];
        if (got == sum) continue;
        auto is_wrong = [&](int i) { return i < n && got[i] != sum[i]; };
        int first = 0, last = 0, more = 0, i = 0;
        while (!is_wrong(first)) first++;
        for (last = first; is_wrong(last + 1);) last++;
        for (int j = last + 1; j < n; j++) more += is_wrong(j);
        int index = first; // in tensor i
        for (; index >= sizes[i]; i++) index -= sizes[i];
        const std::string late = straggler < 0    ? ""
                                 : straggler == k ? ", with late messages"
                                                  : ", with " + gpu(straggler) + " late";
        std::string text =
            format("%s is wrong: %s%s: %s has %.9g at index %d of tensor %d, not %.9g",
                   name.c_str(), case_of(k, sizes).c_str(), late.c_str(), gpu(c).c_str(),
                   std::isnan(got[first]) ? NAN : got[first], index, i, sum[first]);
        if (last + 1 - first == n) text += n > 1 ? " (all are wrong)" : "";
        else if (last == first && !more) text += " (no other is wrong)";
        else
            text += format(" (wrong: %d to %d of all%s)", first, last,
                           more ? format(", and %d more", more).c_str() : "");
        if (first_verdict || races) throw wrong_numbers(text);
        const auto [cause, rows] = history(r, sum, before, c, first);
        asked = k;
        Verdict v = wrong_numbers(text + ": " + cause);
        v.history = rows;
        throw v;
    }
    before = sizes;
    return answer;
}
static void judge_all_sums(const std::string &name, int k) {
    limits::Secret sizes = secret(k);
    for (int n : limits::lengths(k, sizes)) {
        if (races && n > limits::most_when_slow) continue; // it sees the same waits in short lists
        const std::vector<int> list = limits::four_tensors(n);
        const int last = limits::with_stragglers(n, k) ? k : -1;
        for (int straggler = -1; straggler <= last; straggler++) {
            judge_sums(name, k, {n}, straggler);
            judge_sums(name, k, list, straggler);
        }
    }
    if (races) return;
    judge_sums(name, k, limits::many_tensors(sizes), -1);
    judge_sums(name, k, limits::gradients(options.model), -1);
}

// The same bits on every device, and whichever device is late?
static size_t first_difference(const Flat &a, const Flat &b) {
    for (size_t i = 0; i < a.size(); i++)
        if (memcmp(&a[i], &b[i], sizeof(float)) != 0) return i;
    return a.size();
}
static void judge_bits(const std::string &name, int k, const std::vector<int> &sizes) {
    const int n = total(sizes);
    Request r;
    r.what = wire::sums, r.k = k, r.algorithm = name, r.sizes = sizes;
    r.numbers.assign(k, Flat(n));
    for (int c = 0; c < k; c++)
        for (int i = 0; i < n; i++)
            r.numbers[c][i] =
                std::sin(1.0f + options.seed % 1000 + i * 7 + c * 1000) * (1 + i % 10);
    auto sums_of = [&](int straggler) {
        r.straggler = straggler;
        Answer answer = ask(r);
        check_sums(answer, name, k, n);
        return std::move(answer.sums);
    };
    const auto first = sums_of(-1);
    for (int c = 0; c < k; c++)
        for (int i = 0; i < n; i++) {
            double sum = 0, largest = 0; // of the numbers, and of their sizes
            for (const auto &own : r.numbers) sum += own[i], largest += std::fabs(own[i]);
            if (!(std::fabs(first[c][i] - sum) <= 1e-6 * largest))
                throw wrong_numbers(format(
                    "%s is wrong for numbers that are not whole: k = %d, index %d: %s has %.9g, "
                    "not %.9g: is something in it not a float?",
                    name.c_str(), k, i, gpu(c).c_str(), first[c][i], sum));
        }
    for (int straggler = 0; straggler < k; straggler++) {
        const auto sums = sums_of(straggler);
        for (int c = 0; c < k; c++) {
            if (size_t i = first_difference(sums[c], first[c]); i < sums[c].size())
                throw wrong_numbers(
                    format("%s is not deterministic: k = %d, index %zu of %s: %.9g, but "
                           "%.9g when %s is late: the order of additions must not depend "
                           "on time",
                           name.c_str(), k, i, gpu(c).c_str(), first[c][i], sums[c][i],
                           gpu(straggler).c_str()));
            if (size_t i = first_difference(sums[c], sums[0]); i < sums[c].size())
                throw wrong_numbers(
                    format("%s gives the devices different sums: k = %d, index %zu: "
                           "%.9g on gpu(0), %.9g on %s: add once and copy the sum, or add in the "
                           "same order everywhere",
                           name.c_str(), k, i, sums[0][i], sums[c][i], gpu(c).c_str()));
        }
    }
}

// Where the host waits for a device, in brackets; "": it never does
static std::string waits_on_host(const std::string &name, int k) {
    begin_group();
    Request r;
    r.what = wire::waits, r.k = k, r.algorithm = name, r.sizes = limits::few(secret(k));
    const Answer a = ask(r);
    if (!a.waited) return "";
    const bool known = a.words.size() == 2 && !a.words[0].empty();
    return known ? " (in " + a.words[1] + (a.words[1].empty() ? "" : ", ") + a.words[0] + ")" : " ";
}

// Print what the exchange would take on the networks of network.h, or on FABRIC.
static void print_predictions(const std::vector<std::pair<std::string, Answer>> &counted, int k) {
    const auto &networks = options.networks.empty() ? network::networks : options.networks;
    printf("%-10s", "us on");
    for (const network::Network &n : networks) printf(" %11s", n.name.c_str());
    for (const auto &[name, answer] : counted) {
        printf("\n%-10s", name.c_str());
        for (const network::Network &n : networks)
            printf(" %11.1f", 1e6 * traffic_of(answer).seconds(n));
    }
    printf("   rounds * alpha + bytes * beta, on %d devices\n", k);
}

// What keeps it from being faster, in a sentence or two.
static std::string what_binds(const network::Traffic &t, int k) {
    int who = 0;
    const double part = (double)t.busiest(&who) / t.bytes;
    std::string text;
    if (part * k > 1.25)
        text = format("%s moves %.0f%% of the bytes, but its share is %.0f%%: let every device sum "
                      "equally much.",
                      gpu(who).c_str(), 100 * part, 100.0 / k);
    if (2 * t.rounds > t.messages && t.messages > 2)
        text += format(
            "%s%ld of %ld messages travel one after another: send lets them travel together.",
            text.empty() ? "" : " ", t.rounds, t.messages);
    if (text.empty())
        text = t.rounds == 1 ? "No device moves more than its share, and all travel at once."
                             : format("No device moves more than its share. %ld messages travel "
                                      "one after another: small gradients wait for their latency, "
                                      "not for bytes.",
                                      t.rounds);
    return text + "\n";
}
// Does it send the same in the same order?
static bool like(const Answer &a, const Answer &b) {
    auto sent = [](const Answer &answer) {
        std::string text;
        for (const network::Message &m : messages_of(answer))
            text += format("%d %d %.0f %d,", m.src, m.dst, m.bytes, m.round);
        return text;
    };
    return !sent(a).empty() && sent(a) == sent(b);
}

// Return what it costs for the model's gradients, with the seconds of a call on a GPU. What is
// counted is judged: the sums of that very call must be right.
static Answer cost_of(const std::string &name, int k, bool on_cpu) {
    begin_group();
    const std::vector<int> sizes = limits::gradients(options.model);
    Answer cost = judge_sums(name, k, sizes, -1, wire::counts);
    Request r;
    r.what = wire::seconds, r.k = k, r.algorithm = name, r.sizes = sizes;
    if (!on_cpu) cost.seconds = ask(r).seconds;
    return cost;
}
// Check that numbers go from device to device by what is counted: messages, and reads of kernels.
// Return the rows and the reads.
static Answer judge_moves(const std::string &name, int k, const std::vector<int> &sizes) {
    Moves moves(name, k, sizes, base_bits(k));
    if (!moves.problem.empty()) throw no_points(moves.problem);
    Answer &seen = moves.traces[0].answer;
    int all = 0;
    for (int c = 0; c < k; c++) all |= 1 << base_bits(k) * c;
    for (const Flat &sum : seen.sums)
        if (sum != Flat(total(sizes), all))
            throw no_points(name + ": its sums are wrong when its messages are looked at");
    seen.reads = std::move(moves.reads);
    return std::move(seen);
}
// Check that it is an allreduce of its own, and that its messages were counted.
static void judge_counts(const Answer &of, const std::string &name, Answer &answer, int k) {
    for (int i : answer.called)
        if (const std::string other = of.names.at(i); other != name)
            throw no_points(format("%s: this is %s: it calls allreduce_%s of the same file, but "
                                   "must be an algorithm of its own",
                                   name.c_str(), other.c_str(), other.c_str()));
    const std::vector<int> sizes = limits::gradients(options.model);
    const bool is_small = total(sizes) <= limits::most_traced;
    const std::vector<int> moved = is_small ? sizes : limits::few(secret(k));
    Answer seen = judge_moves(name, k, moved);
    auto is_there = [](const std::vector<wire::Read> &reads) { return !reads.empty(); };
    const bool reads = std::any_of(seen.reads.begin(), seen.reads.end(), is_there);
    if (is_small || reads) { // what has really moved these numbers
        answer.rows = std::move(seen.rows), answer.reads = std::move(seen.reads);
        answer.scale = (double)total(sizes) / total(moved);
    }
    const network::Traffic t = traffic_of(answer);
    counted.reset(new network::Traffic(t));
    auto enough = [&](long counted, const char *what, long least) {
        if (counted < least)
            throw no_points(format("%s: only %ld %s were counted, but an allreduce on %d devices "
                                   "needs at least %ld: use copyto or send, which count them",
                                   name.c_str(), counted, what, k, least));
    };
    const long messages = 2 * (k - 1);
    enough(t.messages, "messages", messages);
    enough(t.bytes, "bytes", messages * sizeof(float) * total(sizes));
}
// Print what it costs, beside naive and the least that is possible.
static void judge_costs(const Answer &of, const std::string &name, int k) {
    const size_t tensors = limits::gradients(options.model).size();
    const long n = sizeof(float) * total(limits::gradients(options.model));
    const long messages = 2 * (k - 1); // what no allreduce does without
    Answer own = cost_of(name, k, of.on_cpu);
    judge_counts(of, name, own, k);
    std::vector<std::pair<std::string, Answer>> rows = {{name, own}};
    if (name != "naive") rows.emplace_back("naive", cost_of("naive", k, of.on_cpu));
    const bool tutorial = name != "naive" && like(own, rows[1].second);
    printf("%s: passed%s. Its cost for the %zu gradients of %s, %ld bytes, on %d devices:\n",
           name.c_str(), tutorial ? ", and is still the tutorial's algorithm" : "", tensors,
           options.model.c_str(), n, k);
    printf("%-10s %9s %11s %15s %13s %7s%s\n", "", "messages", "bytes", "busiest device",
           "busiest link", "rounds", of.on_cpu ? "" : "        us    bus GB/s");
    for (const auto &[row, cost] : rows) {
        const network::Traffic t = traffic_of(cost);
        printf("%-10s %9ld %11ld %15ld %13ld %7ld", row.c_str(), t.messages, t.bytes, t.busiest(),
               t.busiest_link(), t.rounds);
        if (!of.on_cpu)
            printf(" %9.1f %11.2f", 1e6 * cost.seconds, n / cost.seconds * 2 * (k - 1) / k / 1e9);
        printf("\n");
    }
    printf("%-10s %9ld %11ld %15ld %13ld %7d   the least of each\n", "optimum", messages,
           messages * n, messages * n / k, k > 1 ? 2 * n / k : 0, k > 1 ? 1 : 0);
    if (k == 1) return;
    printf("%s", what_binds(traffic_of(own), k).c_str());
    print_predictions(rows, k);
}

// ---------------------------------------------------------------------------------------------
// The whole

static std::string listed(const std::vector<int> &ks) { // 1 to 8; or 1, 2, 4, 8
    std::string text;
    for (int k : ks) text += (text.empty() ? "" : ", ") + std::to_string(k);
    if (ks.size() > 2 && ks.back() - ks[0] + 1 == (int)ks.size())
        text = format("%d to %d", ks[0], ks.back());
    return text.empty() ? "none" : text;
}
static std::string devices(const std::vector<int> &ks) {
    return listed(ks) + (ks == std::vector<int>{1} ? " device" : " devices");
}
static bool is_power_of_two(int k) { return (k & (k - 1)) == 0; }

// Judge the sums on each number of devices. If they are wrong on one, the others are still judged,
// but not the parts that follow. `before_verdict` is called before the first verdict is printed.
static void judge_devices(const std::string &name, const std::vector<int> &ks, bool own_sums,
                          const std::function<void()> &before_verdict) {
    std::vector<int> right, wrong;
    int late = 0;
    for (int k : ks) {
        if (late == 2) break; // it takes as long again on each
        try {
            begin_group(own_sums);
            judge_all_sums(name, k);
            right.push_back(k);
        } catch (const Verdict &v) {
            worker.reset();
            const int asked_wrong = asked;
            if (wrong.empty()) before_verdict();
            asked = asked_wrong;
            if (wrong.empty()) say_wrong(v, v.what());
            wrong.push_back(k);
            late += v.kind == timeout;
            quiet = true;
        }
    }
    if (wrong.empty()) return;
    const bool powers = std::count(right.begin(), right.end(), 2) &&
                        std::all_of(right.begin(), right.end(), is_power_of_two) &&
                        std::none_of(wrong.begin(), wrong.end(), is_power_of_two);
    throw Verdict(format(
        "%s is right on these numbers of devices: %s; wrong on: %s%s%s", name.c_str(),
        listed(right).c_str(), listed(wrong).c_str(),
        late == 2 ? "; the others were not tried" : "",
        powers ? ". Does it work only for powers of two? Then say so in algorithms: {\"yours\", "
                 "allreduce_yours, is_power_of_two}"
               : ""));
}
static Answer greet() { return running_worker().ask({}, "the start of " + options.worker); }
// Return which of the worker's algorithms has this name.
static size_t index_of(const std::string &name, const Answer &of) {
    const size_t i = std::find(of.names.begin(), of.names.end(), name) - of.names.begin();
    if (i == of.names.size())
        throw Verdict("ALLREDUCE=" + name + " is unknown: choose one of " + listed(of.names));
    return i;
}

#include "show.h"

static void exercise() {
    const std::string &name = options.allreduce;
    const Answer of = greet();
    slow = of.slow;
    races = of.races;
    // Numbers of devices up to options.gpus
    auto meant_for = [&](const std::string &name, std::vector<int> *not_meant = nullptr) {
        const size_t i = index_of(name, of);
        std::vector<int> ks, others;
        for (int k = 1; k <= options.gpus; k++)
            (of.meant.at(i) >> k & 1 ? ks : others).push_back(k);
        if (not_meant) *not_meant = others;
        return ks;
    };
    std::vector<int> others;
    const std::vector<int> ks = meant_for(name, &others);
    auto is_needed = [](int k) { return k > 1 && is_power_of_two(k); };
    if (ks.empty() || std::any_of(others.begin(), others.end(), is_needed))
        throw Verdict(format("%s does not support these numbers of devices: %s; it must work on 2 "
                             "to %d, or at least on the powers of two",
                             name.c_str(), listed(others).c_str(), options.gpus));
    const int most = ks.back();
    // What the tutorial's own cannot do here, no other is to blame for
    auto naive_is_right = [&] {
        std::vector<int> few = meant_for("naive");
        few.resize(std::min<size_t>(few.size(), limits::naive_devices));
        try {
            if (name != "naive") judge_devices("naive", few, false, [] {});
        } catch (const Verdict &v) {
            throw Verdict(std::string(v.what()) +
                          ". It is the tutorial's own: an edit outside of " + name +
                          ", or this machine, is to blame. " + name + " is not judged");
        }
    };
    judge_devices(name, ks, true, naive_is_right);
    points_sums = limits::points_sums;
    printf("%s: right sums on %s, with each of them late once%s\n", name.c_str(),
           devices(ks).c_str(),
           others.empty() ? "" : (" (not supported: " + listed(others) + ")").c_str());
    begin_group();
    for (int k : ks) judge_bits(name, k, limits::few(secret(k)));
    points_bits = limits::points_bits;
    printf("%s: the same bits on all devices, whichever is late\n", name.c_str());
    if (races) {
        printf("%s: passed. make exercise judges the rest\n", name.c_str());
        return;
    }
    // The host may wait in every staged copy, or in every call: then the tutorial's own waits, too
    const bool may = limits::may_wait(name), judged = !may && waits_on_host("naive", most).empty();
    const std::string where = judged && name != "naive" ? waits_on_host(name, most) : "";
    if (!where.empty())
        throw Verdict(name + " makes the host wait for a device" + (where == " " ? "" : where) +
                      ": enqueue the work and return; make_wait and copyto make only devices wait");
    printf("%s: the host %s\n", name.c_str(),
           may      ? "may wait, since it adds"
           : judged ? "never waits"
                    : "waits in the tutorial's naive, too, so this is not judged on this machine");
    judge_costs(of, name, most);
    points_host = limits::points_host;
}

static long whole(const char *option, const std::string &text, long min, long max) {
    char *end;
    errno = 0;
    const long n = strtol(text.c_str(), &end, 10);
    if (text.empty() || *end || errno || n < min || n > max)
        throw Verdict(format("%s=%s: expected a whole number from %ld to %ld", option, text.c_str(),
                             min, max));
    return n;
}
static std::string algorithm(const std::string &word) { // local and device are the lab's words
    return word == "local" ? "host" : word == "device" ? "by_tensor" : word;
}
// A worker can read the judge's command line: SEED=stdin keeps it from there
static std::string seed_of(const std::string &word) {
    char text[20] = "";
    if (word == "stdin" && scanf("%19s", text) != 1) throw Verdict("SEED=stdin: no seed there");
    return word == "stdin" ? text : word;
}
static const std::map<std::string, std::function<void(const std::string &)>> option_table = {
    {"WORKER", [](auto &value) { options.worker = value; }},
    {"GPUS", [](auto &value) { options.gpus = whole("GPUS", value, 1, limits::most_devices); }},
    {"ALLREDUCE", [](auto &value) { options.allreduce = algorithm(value); }},
    {"KVSTORE", [](auto &value) { options.allreduce = algorithm(value); }},
    {"MODEL", [](auto &value) { options.model = value; }},
    {"SEED", [](auto &value) { options.seed = whole("SEED", seed_of(value), 0, 4294967295); }},
    {"FABRIC", [](auto &value) { options.networks = {network::find_network(value)}; }},
    {"SHOW", [](auto &value) { options.show = value, options.seconds = limits::seconds_of_show; }},
    {"SECONDS", [](auto &value) { options.seconds = whole("SECONDS", value, 1, 3600); }},
    {"POINTS", [](auto &value) { options.points = whole("POINTS", value, 0, 1); }},
    {"RESULT", [](auto &value) { options.result = whole("RESULT", value, 3, 1 << 20); }},
};
static void parse_options(int argc, char **argv) {
    std::set<std::string> given;
    for (int i = 1; i < argc; i++) {
        const std::string word = argv[i], name = word.substr(0, word.find('='));
        if (!option_table.count(name)) {
            std::vector<std::string> names;
            for (const auto &[known, _] : option_table) names.push_back(known);
            throw Verdict(name + " is not an option of the judge: use NAME=value, where NAME is " +
                          listed(names));
        }
        if (name.size() + 1 >= word.size())
            throw Verdict(name + " has no value: write " + name + "=value");
        if (!given.insert(name).second) throw Verdict(name + " is given twice");
        option_table.at(name)(word.substr(name.size() + 1));
    }
    if (given.count("ALLREDUCE") && given.count("KVSTORE"))
        throw Verdict("KVSTORE and ALLREDUCE cannot both be given: one is enough");
    options.given = options.gpus;
    if (!options.given) options.gpus = limits::usual_devices;
    if (options.worker.empty()) throw Verdict("WORKER=program is missing: compile worker.cu");
    if (options.model != "lenet" && options.model != "lab_cnn" && options.model != "resnet18")
        throw Verdict("MODEL=" + options.model +
                      " is unknown: choose one of lenet, resnet18, lab_cnn");
}

// Lines of a name and a value
static void write_result() {
    static const char *const statuses[] = {"wrong", "crash", "timeout"};
    FILE *file = fdopen(options.result, "w"); // main has found it open
    fprintf(file, "status %s\n", first_verdict ? statuses[first_verdict->kind] : "passed");
    fprintf(file, "sums %d\nbits %d\nhost %d\n", points_sums, points_bits, points_host);
    if (counted)
        fprintf(file, "messages %ld\nbytes %ld\nbusiest %ld\nrounds %ld\n", counted->messages,
                counted->bytes, counted->busiest(), counted->rounds);
    if (first_verdict) fprintf(file, "error %s\n", first_verdict->what());
    fclose(file);
}

int main(int argc, char **argv) {
    setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
    signal(SIGPIPE, SIG_IGN);
    wire::keep_memory();
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    prctl(PR_SET_DUMPABLE, 0); // no worker can read the sums that are expected in this memory
    try {
        parse_options(argc, argv);
        if (options.result >= 0 &&
            fcntl(options.result, F_SETFD, FD_CLOEXEC) < 0) { // not a worker's
            options.result = -1;
            throw Verdict("RESULT is not the number of an open file");
        }
        if (options.show.empty()) exercise();
        else show();
    } catch (const Verdict &v) { say_wrong(v, v.what()); } catch (const std::exception &e) {
        say_wrong(Verdict(e.what()), e.what());
    }
    std::string which = options.allreduce == "yours" ? "" : " ALLREDUCE=" + options.allreduce;
    const char *submission = getenv("SUBMISSION"); // of make
    if (submission) which += std::string(" SUBMISSION=") + submission;
    if (numbers_were_wrong)
        fprintf(stderr, "judge: make exercise SEED=%u%s gives these numbers again\n", options.seed,
                which.c_str());
    const bool shows = asked_first_wrong > 1 && asked_first_wrong <= limits::shown_devices;
    if (numbers_were_wrong && shows && !races && options.result < 0) {
        if (!a_wait_is_missing)
            fprintf(stderr, "judge: to look at it: make show GPUS=%d%s\n", asked_first_wrong,
                    which.c_str());
        else if (!submission) // make show has one operation after another
            fprintf(stderr, "judge: to see what does not wait: make race GPUS=%d ALLREDUCE=%s\n",
                    asked_first_wrong, options.allreduce.c_str());
    }
    if (options.points)
        printf("Score: %d/%d\n", points_sums + points_bits + points_host,
               limits::points_sums + limits::points_bits + limits::points_host);
    if (options.result >= 0) write_result();
    if (!fflush(stdout) && !ferror(stdout)) return first_verdict ? 1 : 0;
    fprintf(stderr, "judge: cannot write to stdout\n");
    return 1;
}
