// What the operations that `lab trace` or `lab dry-run` prints would take on another machine:
//
//   simulate trace FABRIC|here|emulated ROWS [PROFILE]   the times of a trace there, in the file
//                                          ROWS; kernels as here or in PROFILE, or as it was
//   simulate sweep FABRIC                  bytes,microseconds of an exchange of 4 KB to 1 GB
//   simulate optimum FABRIC k              the same of one that cannot be faster, on k devices
//   simulate scale FABRIC k STEP EIGHTH [MS]   milliseconds of a step on k devices: with the same
//                                          minibatch on all of them, and with as much on each
//
// Rows come from standard input. STEP and EIGHTH are traces of one step on one device, with the
// whole minibatch and with an eighth of it: what each gradient and the update take; if the whole
// step took MS milliseconds, all in proportion. fabric.h has the machines and the simulation.
// defines: main
#include "../watch/fabric.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <stdexcept>

using fabric::Fabric, fabric::Op, fabric::find_fabric;

using Error = std::runtime_error;

struct Row { // of a trace
    int device, lane;
    char stream[40], kind[20], name[200];
    long begin, end; // nanoseconds
    int src, dst;
    double bytes;
    int after;
    bool works() const { return strcmp(kind, "wait") != 0; }
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
static void read_title(Recording &r, const std::string &line) {
    const size_t comma = line.rfind(", ");
    r.title = line.substr(2, comma - 2);
    if (comma < line.size()) r.bytes = atof(&line[comma + 2]);
}
static Recording read(FILE *file, bool keep) {
    Recording r;
    int waited = -1;             // the last operation that the host has waited for
    static char *line = nullptr; // kept for the next call
    static size_t room = 0;
    while (getline(&line, &room, file) > 0) {
        line[strcspn(line, "\n")] = 0;
        if (*line == '#') read_title(r, line);
        if (*line == '#' || strncmp(line, "device", 6) == 0) continue;
        Row row;
        if (sscanf(line, "%d,%d,%39[^,],%19[^,],%199[^,],%ld,%ld,%d,%d,%lf,%d", &row.device,
                   &row.lane, row.stream, row.kind, row.name, &row.begin, &row.end, &row.src,
                   &row.dst, &row.bytes, &row.after) < 11)
            throw Error("a row of standard input has too few columns");
        if (row.after >= (int)r.ops.size()) throw Error("a row waits for a later one");
        Op op = fabric::simulated(row, waited);
        if (row.end != 0) {
            op.begin = row.begin / 1e9;
            op.end = row.end / 1e9;
            op.seconds = op.end - op.begin;
        }
        if ((int)r.gradients.size() <= row.device) r.gradients.resize(row.device + 1);
        if (strcmp(row.name, "gradient") == 0) r.gradients[row.device].push_back(r.ops.size());
        if (strcmp(row.kind, "update") == 0) r.updates.push_back(r.ops.size());
        r.ops.push_back(op);
        if (keep) r.rows.push_back(row);
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
// update comes last and is no row. Kernels begin while the host enqueues those behind the first.
static double step_seconds(Recording &r, const Fabric &f, const Step &step, double factor) {
    float others = 0;
    for (const auto &gradients : r.gradients) {
        double before = 0;
        for (size_t i = 0; i < gradients.size(); i++) {
            Op &op = r.ops[gradients[i]];
            const double ready = i + 1 < gradients.size() ? step.ready.at(i) : step.computed;
            op.kind = Op::kernel;
            op.seconds = factor * (ready - before);
            op.calls = 1 + std::exchange(others, step.calls.at(i) - 1);
            before = ready;
        }
    }
    return fabric::simulate(r.ops, f) + step.update;
}

// Of each operation the one before it on its stream, or -1
static std::vector<int> predecessors(const std::vector<Op> &ops) {
    std::vector<int> before(ops.size());
    std::map<int, int> last; // of each lane
    for (size_t i = 0; i < ops.size(); i++)
        before[i] = std::exchange(last.insert({ops[i].lane, -1}).first->second, (int)i);
    return before;
}
// The later one of that and the one that a wait is for
static int waited_for(const std::vector<Op> &ops, const std::vector<int> &before, int i) {
    const int a = before[i], b = ops[i].after;
    return a < 0 || (b >= 0 && ops[b].end > ops[a].end) ? b : a;
}
// The operations that the last one to end has waited for, one before the other: what makes one of
// them shorter makes the whole shorter.
static std::vector<bool> critical_path(const std::vector<Op> &ops) {
    std::vector<bool> critical(ops.size());
    const std::vector<int> before = predecessors(ops);
    auto sooner = [](const Op &a, const Op &b) { return a.end < b.end; };
    int at = std::max_element(ops.begin(), ops.end(), sooner) - ops.begin();
    for (; at >= 0; at = waited_for(ops, before, at)) critical[at] = ops[at].kind != Op::wait;
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

// The rows again, with their times there: whether each is on the critical path, and the row that it
// has waited for, or -1. pictures.py makes build/trace.json and the picture of them.
static void print_rows(FILE *file, const Recording &r, const char *note) {
    const std::vector<bool> critical = critical_path(r.ops);
    const std::vector<int> before = predecessors(r.ops);
    fprintf(file, "# %s\n# %s\n", r.title.c_str(), note);
    fprintf(file, "device,lane,stream,kind,name,begin,end,src,dst,bytes,critical,cause\n");
    for (size_t i = 0; i < r.ops.size(); i++) {
        const Op &op = r.ops[i];
        const Row &row = r.rows[i];
        int cause = i;
        do cause = waited_for(r.ops, before, cause);
        while (cause >= 0 && r.ops[cause].kind == Op::wait);
        fprintf(file, "%d,%d,%s,%s,%s,%ld,%ld,%d,%d,%.0f,%d,%d\n", row.device, row.lane, row.stream,
                row.kind, row.name, std::lround(op.begin * 1e9), std::lround(op.end * 1e9), row.src,
                row.dst, row.bytes, (int)critical[i], cause);
    }
}

// What kernels take, by name and bytes, from a file of rows name,bytes,us
static void read_profile(const char *path, Recording &r) {
    std::map<std::pair<std::string, long>, double> seconds;
    std::ifstream file(path);
    if (!file) throw Error(std::string("cannot read PROFILE=") + path);
    char name[100];
    double bytes, us;
    for (std::string line; std::getline(file, line);)
        if (sscanf(line.c_str(), "%99[^,],%lf,%lf", name, &bytes, &us) == 3)
            seconds[{name, (long)bytes}] = us / 1e6;
    for (size_t i = 0; i < r.ops.size(); i++) {
        const auto found = seconds.find({r.rows[i].name, (long)r.ops[i].bytes});
        r.ops[i].seconds = found == seconds.end() ? -1 : found->second; // -1: as its bytes take
    }
    r.title += ", kernels of " + std::string(path);
}

static void trace(const char *name, const char *rows, const char *profile) {
    Recording r = read(stdin, true);
    int k = 0;
    double begin = INFINITY, end = 0, computing = 0; // of all devices
    const bool emulated = strcmp(name, "emulated") == 0;
    if (!emulated && strcmp(name, "here") != 0) {
        const Fabric f = find_fabric(name);
        for (Op &op : r.ops)
            if (op.kind == Op::kernel) op.seconds = op.end - op.begin;
        if (*profile) read_profile(profile, r);
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
             ": %.3g ms; the devices compute for %s of it (mean); messages travel for %s",
             1e3 * whole, percent(computing, k * whole).c_str(), percent(moving, whole).c_str());
    r.title += text;
    if (moving > 0) r.title += ", " + percent(both, moving) + " of that while a device computes";
    printf("%s\n", r.title.c_str());
    write_file(rows, [&](FILE *file) {
        print_rows(file, r,
                   emulated && moving > 0 ? "Between emulated devices a message takes next to "
                                            "nothing: FABRIC=nvlink or pcie, ... shows a network"
                                          : "");
    });
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
    const double a =
        processes > 1 ? f.network_latency + f.network_overhead : f.latency + f.overhead;
    const double G = std::max((k - 1) / f.port / k, // us of 1000 bytes, each way
                              processes > 1 ? (processes - 1) / f.network / processes : 0);
    for (double bytes = least; bytes <= most; bytes *= 4)
        printf("%.0f,%.3f\n", bytes, a + 2 * G * bytes / 1e3);
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
        if (mode == "trace" && (argc == 4 || argc == 5))
            trace(argv[2], argv[3], argc == 5 ? argv[4] : "");
        else if (mode == "sweep" && argc == 3) sweep(find_fabric(argv[2]));
        else if (mode == "optimum" && argc == 4) optimum(find_fabric(argv[2]), atoi(argv[3]));
        else if (mode == "scale" && (argc == 6 || argc == 7))
            scale(find_fabric(argv[2]), atoi(argv[3]), Step(read(argv[4])), Step(read(argv[5])),
                  argc == 7 ? atof(argv[6]) : 0);
        else throw Error("usage: simulate trace|sweep|optimum|scale FABRIC ...");
        if (fflush(stdout) || ferror(stdout)) throw Error("cannot write to stdout");
        return 0;
    } catch (const std::exception &e) {
        fprintf(stderr, "simulate: %s\n", e.what());
        return 1;
    }
}
