// What the operations that `lab trace` or `lab dry-run` prints would take on another machine:
//
//   simulate trace FABRIC|here JSON DATA   a trace there, or as it was, for browsers and gnuplot
//   simulate total FABRIC ...              microseconds of an exchange, on each of them
//   simulate sweep FABRIC                  bytes,microseconds of an exchange of 4 KB to 1 GB
//   simulate optimum FABRIC k              the same of one that cannot be faster, on k devices
//   simulate scale FABRIC k STEP EIGHTH [MS]   milliseconds of a step on k devices: with the same
//                                          minibatch on all of them, and with as much on each
//
// Rows come from standard input. STEP and EIGHTH are traces of one step on one device, with the
// whole minibatch and with an eighth of it: what each gradient and the update take; if the whole
// step took MS milliseconds, all in proportion. fabric.h has the machines and the simulation.
// defines: main
#include "fabric.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>

using fabric::Fabric, fabric::Op;

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Row { // of a trace, beside what the simulation needs of it
    int device;
    std::string stream, kind, name;
};
template <class Print> static void write_file(const char *path, Print print) {
    FILE *file = fopen(path, "w");
    if (file) print(file);
    const bool failed = !file || ferror(file); // an earlier write
    if ((file && fclose(file) != 0) || failed) throw Error(std::string("cannot write ") + path);
}
struct Recording {
    std::string title;
    double bytes = 0; // of a device's gradients, as the title says
    std::vector<Op> ops;
    std::vector<Row> rows;                   // if they are kept
    std::vector<std::vector<int>> gradients; // of each device: the rows that say one is ready
    std::vector<int> updates;
};
enum { device, lane, stream, kind, name, begin, end, src, dst, bytes, after, columns };

static Recording read(FILE *file, bool keep) {
    Recording r;
    static char *line = nullptr; // kept for the next call
    static size_t room = 0;
    while (getline(&line, &room, file) > 0) {
        line[strcspn(line, "\n")] = 0;
        if (*line == '#') {
            r.title = line + 2;
            const size_t comma = r.title.rfind(", ");
            if (comma == std::string::npos) continue;
            r.bytes = atof(r.title.c_str() + comma + 2);
            r.title.resize(comma);
        }
        if (*line == '#' || strncmp(line, "device", 6) == 0) continue;
        const char *column[columns];
        int count = 0;
        for (char *at = line; at && count < columns; count++) {
            column[count] = at;
            if ((at = strchr(at, ','))) *at++ = 0;
        }
        if (count < columns) throw Error("a row of standard input has too few columns");
        Op op;
        const bool moves = *column[src] != '-' || column[src][1] != '2'; // -2: it is no message
        op.kind = *column[kind] == 'w' ? Op::wait : moves ? Op::message : Op::kernel;
        op.lane = atoi(column[lane]);
        op.after = atoi(column[after]);
        if (op.after >= (int)r.ops.size()) throw Error("a row waits for a later one");
        op.src = moves ? atoi(column[src]) : 0;
        op.dst = moves ? atoi(column[dst]) : 0;
        if (op.kind != Op::wait) op.bytes = atol(column[bytes]);
        if (*column[end] != '0') {
            op.begin = atol(column[begin]) / 1e9;
            op.end = atol(column[end]) / 1e9;
            op.seconds = op.end - op.begin;
        }
        op.device = atoi(column[device]);
        op.blocks = op.kind == Op::wait && strcmp(column[name], "host") == 0;
        if (op.kind == Op::wait) op.calls = strcmp(column[name], "gradient") == 0 ? 0 : 0.5;
        const size_t d = op.device;
        if (r.gradients.size() <= d) r.gradients.resize(d + 1);
        if (strcmp(column[name], "gradient") == 0) r.gradients[d].push_back(r.ops.size());
        if (strcmp(column[kind], "update") == 0) r.updates.push_back(r.ops.size());
        r.ops.push_back(op);
        if (keep) r.rows.push_back({(int)d, column[stream], column[kind], column[name]});
    }
    if (r.ops.empty()) throw Error("standard input has no operations");
    return r;
}
static Recording read(const char *path) {
    FILE *file = fopen(path, "r");
    if (!file) throw Error(std::string("cannot read ") + path);
    const Recording r = read(file, false);
    fclose(file);
    return r;
}
static Fabric find(const char *name) {
    const Fabric f = fabric::find_fabric(name);
    std::string names;
    for (const Fabric &other : fabric::fabrics) names += other.name + ", ";
    if (f.name.empty())
        throw Error(std::string("FABRIC=") + name + " is unknown: there are " + names +
                    "or LATENCY,BANDWIDTH of a message, in us and GB/s");
    return f;
}

// A step on one device: when each gradient is ready, when backward ends, what the update takes; and
// what the host enqueues for it.
struct Step {
    std::vector<double> ready;
    std::vector<float> calls; // before each gradient, beginning with the input
    double computed = 0, update = 0;
    int batch = 0;
    explicit Step(const Recording &r) {
        const double start = r.ops[0].begin;
        float sum = 0;
        int next = 0;
        sscanf(r.title.c_str(), "%*[^,], batch %d", &batch);
        for (int i : r.gradients[0]) {
            ready.push_back(r.ops[i].end - start);
            for (; next < i; next++) sum += r.ops[next].calls;
            calls.push_back(std::exchange(sum, 0));
        }
        for (int i : r.updates) update += r.ops[i].seconds;
        computed = r.ops[r.updates.at(0)].begin - start;
    }
};
// The exchange, with what each device computes before its gradients, `factor` times as long. The
// update is the same for all and comes last: it is no row.
static double step_seconds(Recording &r, const Fabric &f, const Step &step, double factor) {
    for (const auto &gradients : r.gradients) {
        double before = 0;
        for (size_t i = 0; i < gradients.size(); i++) {
            Op &op = r.ops[gradients[i]];
            const double ready = i + 1 < gradients.size() ? step.ready.at(i) : step.computed;
            op.kind = Op::kernel;
            op.seconds = factor * (ready - before);
            op.calls = step.calls.at(i);
            before = ready;
        }
    }
    return fabric::simulate(r.ops, f) + step.update;
}

// The operations that the last one to end has waited for, one before the other: what makes one of
// them shorter makes the whole shorter.
static std::vector<bool> critical_path(const std::vector<Op> &ops) {
    std::vector<bool> critical(ops.size());
    std::vector<int> before(ops.size());
    std::map<int, int> last; // of each lane
    int at = 0;
    for (size_t i = 0; i < ops.size(); i++) {
        before[i] = last.count(ops[i].lane) ? last[ops[i].lane] : -1;
        last[ops[i].lane] = i;
        if (ops[i].end > ops[at].end) at = i;
    }
    while (at >= 0) {
        const int a = before[at], b = ops[at].after;
        critical[at] = ops[at].kind != Op::wait;
        at = a < 0 || (b >= 0 && ops[b].end > ops[a].end) ? b : a;
    }
    return critical;
}
typedef std::vector<std::pair<double, double>> Times;
static double covered(Times times) { // by at least one of them
    double sum = 0, until = -INFINITY;
    std::sort(times.begin(), times.end());
    for (const auto &[begin, end] : times) {
        sum += std::max(0.0, end - std::max(begin, until));
        until = std::max(until, end);
    }
    return sum;
}
static std::string percent(double part, double whole) {
    char text[20];
    const double p = whole > 0 ? std::max(0.0, 100 * part / whole) : 0; // rounding: no -0%
    snprintf(text, sizeof text, p < 1 && p > 0 ? "%.1f%%" : "%.0f%%", p);
    return text;
}
static std::string gpu(int device) {
    return device < 0 ? "host" : "gpu(" + std::to_string(device) + ")";
}

// Chrome's trace format: a process for each device, a thread for each stream, an event a line. A
// message is a slice of its sender and one of its receiver, with an arrow from one to the other.
// https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
static void write_json(FILE *file, const Recording &r, const std::vector<bool> &critical, int k) {
    const int host = k, outgoing = 1000; // the host's process; threads of what leaves
    const char *comma = "";
    auto event = [&](const char *format, auto... values) {
        fprintf(file, "%s\n{", comma);
        fprintf(file, format, values...);
        fprintf(file, "}");
        comma = ",";
    };
    std::map<std::pair<int, int>, std::string> threads;
    auto named = [&](const char *what, int pid, int tid, const std::string &name) {
        event("\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"name\":\"%s\",\"args\":{\"name\":\"%s\"}", pid,
              tid, what, name.c_str());
    };
    fprintf(file, "{\"otherData\":{\"title\":\"%s\"},\"traceEvents\":[", r.title.c_str());
    for (size_t i = 0; i < r.ops.size(); i++) {
        const Op &op = r.ops[i];
        const Row &row = r.rows[i];
        const double ts = op.begin * 1e6, dur = (op.end - op.begin) * 1e6;
        auto slice = [&](int pid, int tid, const std::string &name) {
            event("\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f,\"cat\":\"%s\","
                  "\"name\":\"%s\",\"args\":{\"bytes\":%.0f,\"critical\":%d}",
                  pid, tid, ts, dur, row.kind.c_str(), name.c_str(), op.bytes, (int)critical[i]);
        };
        threads[{row.device, op.lane}] = row.stream;
        if (row.name == "gradient") continue;
        slice(row.device, op.lane, op.kind == Op::message ? "from " + gpu(op.src) : row.name);
        if (op.kind != Op::message) continue;
        const int from = op.src < 0 ? host : op.src, out = outgoing + op.lane;
        threads[{from, out}] = "to " + gpu(op.dst);
        slice(from, out, "to " + gpu(op.dst));
        event("\"ph\":\"s\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f,\"id\":%zu,\"cat\":\"message\","
              "\"name\":\"message\"",
              from, out, ts, i);
        event("\"ph\":\"f\",\"bp\":\"e\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f,\"id\":%zu,"
              "\"cat\":\"message\",\"name\":\"message\"",
              row.device, op.lane, ts + dur, i);
    }
    for (int c = 0; c <= k; c++) named("process_name", c, 0, c < k ? gpu(c) : "host");
    for (const auto &[at, name] : threads) named("thread_name", at.first, at.second, name);
    fprintf(file, "\n]}\n");
}

struct Box {
    double begin, end, low, high;
};
struct Boxes {
    double apart; // seconds; those nearer to each other, of a kind in a lane, are one
    std::map<std::string, std::vector<Box>> of_kind = {};
    std::map<std::pair<std::string, double>, size_t> latest = {}; // of a kind in a lane: its box
    void add(const std::string &kind, const Op &op, double low, double high) {
        const auto [found, fresh] = latest.insert({{kind, low}, 0});
        std::vector<Box> &list = of_kind[kind];
        if (!fresh && op.begin - list[found->second].end < apart) {
            list[found->second].end = std::max(list[found->second].end, op.end);
            return;
        }
        found->second = list.size();
        list.push_back({op.begin, op.end, low, high});
    }
};
// For lab/trace.gp, in milliseconds: the title; `lane y name`; `kind begin end low high`, critical
// among the kinds. A device's lane is 1 high. Sums of its communication stream have one below it,
// and so have the messages that it receives, a row for each sender.
static void write_data(FILE *file, const Recording &r, const std::vector<bool> &critical, int k) {
    double top = 0, last = 0;
    for (const Op &op : r.ops) last = std::max(last, op.end);
    Boxes boxes = {last / 3000};
    fprintf(file, "title %s\n", r.title.c_str());
    for (int c = 0; c < k; c++) {
        std::map<int, int> senders; // and the row of each
        bool communicates = false;
        for (size_t i = 0; i < r.ops.size(); i++) {
            const Op &op = r.ops[i];
            if (r.rows[i].device != c || op.kind == Op::wait) continue;
            if (op.kind == Op::message) senders.insert({op.src == c ? op.dst : op.src, 0});
            else if (r.rows[i].stream == "communication") communicates = true;
        }
        fprintf(file, "lane %g %s\n", top - 0.5, gpu(c).c_str());
        const double own = top - 1, sums = own - (communicates ? 0.4 : 0), height = 0.6;
        int rows = 0;
        for (auto &sender : senders) sender.second = rows++;
        for (size_t i = 0; i < r.ops.size(); i++) {
            const Op &op = r.ops[i];
            const Row &row = r.rows[i];
            if (row.device != c || op.kind == Op::wait) continue;
            double low = own, high = own + 0.85;
            if (op.kind == Op::message) {
                high = sums - height * senders[op.src == c ? op.dst : op.src] / rows;
                low = high - height / rows;
            } else if (row.stream == "communication") {
                low = sums, high = sums + 0.35;
            }
            boxes.add(row.kind, op, low, high);
            if (critical[i])
                boxes.add("critical", op, low, low + 0.12 * (op.kind == Op::message ? 0.7 : 1));
        }
        top = sums - (senders.empty() ? 0 : height) - 0.25;
    }
    for (const auto &[kind, list] : boxes.of_kind)
        for (const Box &b : list)
            fprintf(file, "%s %.6g %.6g %.4g %.4g\n", kind.c_str(), 1e3 * b.begin, 1e3 * b.end,
                    b.low, b.high);
}

static void trace(const char *name, const char *json, const char *data) {
    Recording r = read(stdin, true);
    int k = 0;
    double begin = INFINITY, end = 0, computing = 0; // of all devices
    if (strcmp(name, "here") != 0) {
        const Fabric f = find(name);
        for (Op &op : r.ops)
            if (op.kind == Op::kernel) op.seconds = op.end - op.begin;
        simulate(r.ops, f);
        r.title += " on " + f.name + " (simulated)";
    }
    Times all, kernels, messages;
    std::map<int, Times> kernels_of; // each device
    for (size_t i = 0; i < r.ops.size(); i++) {
        const Op &op = r.ops[i];
        k = std::max(k, r.rows[i].device + 1);
        if (op.kind == Op::wait) continue;
        begin = std::min(begin, op.begin), end = std::max(end, op.end);
        all.push_back({op.begin, op.end});
        (op.kind == Op::message ? messages : kernels).push_back({op.begin, op.end});
        if (op.kind == Op::kernel) kernels_of[r.rows[i].device].push_back({op.begin, op.end});
    }
    for (Op &op : r.ops) // waits may have begun before all work
        for (double *time : {&op.begin, &op.end}) *time = std::max(0.0, *time - begin);
    for (const auto &[device, times] : kernels_of) computing += covered(times);
    const double whole = end - begin, moving = covered(messages);
    const double both = moving + covered(kernels) - covered(all);
    char text[200];
    snprintf(text, sizeof text,
             ": %.*f ms; the devices compute for %s of it (mean); messages are on "
             "their way for %s",
             whole < 0.1 ? 1 : 0, 1e3 * whole, percent(computing, k * whole).c_str(),
             percent(moving, whole).c_str());
    r.title += text;
    if (moving > 0) r.title += ", " + percent(both, moving) + " of that while a device computes";
    printf("%s\n", r.title.c_str());
    const std::vector<bool> critical = critical_path(r.ops);
    write_file(json, [&](FILE *file) { write_json(file, r, critical, k); });
    write_file(data, [&](FILE *file) { write_data(file, r, critical, k); });
}
static const double least = 4096, most = 1 << 30; // bytes of a sweep
static void sweep(const Fabric &f) {
    Recording r = read(stdin, false);
    for (double bytes = least; bytes <= most; bytes *= 4)
        printf("%.0f,%.3f\n", bytes, 1e6 * simulate(r.ops, f, bytes / r.bytes));
}
// No allreduce takes less: every device sends and receives 2(k-1)/k of its bytes, every process
// likewise of its own, after one message's time; a host may have nothing to do
static void optimum(const Fabric &f, int k) {
    const double processes = f.node ? std::ceil((double)k / f.node) : 1;
    const double a = std::max(f.latency + f.overhead,
                              processes > 1 ? f.network_latency + f.network_overhead : 0);
    auto least_us = [&](double n, double bytes, double rate) {
        return n > 1 ? 2 * (n - 1) / n * bytes / rate / 1e3 : 0;
    };
    for (double bytes = least; bytes <= most; bytes *= 4)
        printf("%.0f,%.3f\n", bytes,
               a + std::max(least_us(k, bytes, f.node == 1 ? f.network : f.port),
                            least_us(processes, bytes, f.network)));
}
// What a step of 1/k of the samples computes: a line through the two that were measured. An eighth
// of less than 16 samples is one sample.
static double computes(const Step &step, const Step &eighth, int k) {
    if (step.batch == eighth.batch) return step.computed;
    const double slope =
        (step.computed - eighth.computed) / (1 - (double)eighth.batch / step.batch);
    return std::max(0.0, step.computed - slope * (1 - 1.0 / k));
}
static void scale(const Fabric &f, int k, Step step, Step eighth, double ms) {
    Recording r = read(stdin, false);
    if (ms > 0) {
        const double factor = ms / 1e3 / (step.computed + step.update);
        for (Step *s : {&step, &eighth}) {
            for (double &ready : s->ready) ready *= factor;
            s->computed *= factor, s->update *= factor;
        }
    }
    const double weak = step_seconds(r, f, step, 1);
    const double factor = computes(step, eighth, k) / step.computed;
    printf("%.6g %.6g\n", 1e3 * step_seconds(r, f, step, factor), 1e3 * weak);
}

int main(int argc, char **argv) {
    try {
        const std::string mode = argc > 2 ? argv[1] : "";
        if (mode == "trace" && argc == 5) trace(argv[2], argv[3], argv[4]);
        else if (mode == "sweep" && argc == 3) sweep(find(argv[2]));
        else if (mode == "optimum" && argc == 4) optimum(find(argv[2]), atoi(argv[3]));
        else if (mode == "scale" && (argc == 6 || argc == 7))
            scale(find(argv[2]), atoi(argv[3]), Step(read(argv[4])), Step(read(argv[5])),
                  argc == 7 ? atof(argv[6]) : 0);
        else if (mode == "total") {
            std::vector<Fabric> machines;
            for (int i = 2; i < argc; i++) machines.push_back(find(argv[i]));
            Recording r = read(stdin, false);
            for (const Fabric &f : machines) printf(" %11.1f", 1e6 * simulate(r.ops, f));
        } else {
            throw Error("usage: simulate trace|total|sweep|optimum|scale FABRIC ...");
        }
        if (fflush(stdout) || ferror(stdout)) throw Error("cannot write to stdout");
        return 0;
    } catch (const std::exception &e) {
        fprintf(stderr, "simulate: %s\n", e.what());
        return 1;
    }
}
