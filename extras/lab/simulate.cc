// What the operations that `lab trace` or `lab dry-run` prints would take on another machine:
//
//   simulate trace FABRIC|here|emulated JSON SVG [PROFILE [MS]]   a trace there, with kernels as
//                                          here or in PROFILE, or as it was; a picture, MS wide
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
#include <fstream>
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
    int waited = -1;             // the last operation that the host has waited for
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
        set_host_part(op, column[name], waited);
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
        throw Error(
            std::string("FABRIC=") + name + " is unknown: choose one of " + names +
            "8xnvlink+ethernet100, or us,GB/s of a message; words may follow: nvlink,host=0");
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
        // Whole nanoseconds, rounded once: else a slice may end 1 ns after the next one's begin,
        // which browsers then drop
        const long t0 = std::lround(op.begin * 1e9), t1 = std::lround(op.end * 1e9), dt = t1 - t0;
        auto slice = [&](int pid, int tid, const std::string &name) {
            event("\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"ts\":%ld.%03ld,\"dur\":%ld.%03ld,\"cat\":"
                  "\"%s\","
                  "\"name\":\"%s\",\"args\":{\"bytes\":%.0f,\"critical\":%d}",
                  pid, tid, t0 / 1000, t0 % 1000, dt / 1000, dt % 1000, row.kind.c_str(),
                  name.c_str(), op.bytes, (int)critical[i]);
        };
        threads[{row.device, op.lane}] = row.stream;
        if (row.name == "gradient") continue;
        const std::string tensor = row.name == "message" ? "" : row.name + " ";
        slice(row.device, op.lane,
              op.kind == Op::message ? tensor + "from " + gpu(op.src) : row.name);
        if (op.kind != Op::message) continue;
        const int from = op.src < 0 ? host : op.src, out = outgoing + op.lane;
        threads[{from, out}] = "to " + gpu(op.dst);
        slice(from, out, tensor + "to " + gpu(op.dst));
        const char *arrow = "\"ph\":%s,\"pid\":%d,\"tid\":%d,\"ts\":%ld.%03ld,\"id\":%zu,"
                            "\"cat\":\"message\",\"name\":\"message\"";
        event(arrow, "\"s\"", from, out, t0 / 1000, t0 % 1000, i);
        event(arrow, "\"f\",\"bp\":\"e\"", row.device, op.lane, t1 / 1000, t1 % 1000, i);
    }
    for (int c = 0; c <= k; c++) named("process_name", c, 0, c < k ? gpu(c) : "host");
    for (const auto &[at, name] : threads) named("thread_name", at.first, at.second, name);
    fprintf(file, "\n]}\n");
}

// A picture: what each device computes, sums of its communication stream below it, then what it
// receives, a lane for each sender. Under the mouse an operation says what it is and what it has
// waited for. What would be narrower than a third of a pixel is one with what follows it.
struct Picture {
    const Recording &r;
    const std::vector<bool> &critical;
    const std::vector<int> before = predecessors(r.ops);
    FILE *file;
    double last = 1e-9; // seconds, the right end
    static constexpr double left = 166, width = 860, right = 14;
    double x(double seconds) const { return left + (width - left - right) * seconds / last; }

    std::string what(int i) const {
        const Op &op = r.ops[i];
        const Row &row = r.rows[i];
        if (op.kind != Op::message) return row.name + " on " + gpu(row.device);
        return row.name + " from " + gpu(op.src) + " to " + gpu(op.dst);
    }
    std::string about(int i, int more) const {
        const Op &op = r.ops[i];
        char text[200];
        snprintf(text, sizeof text, ", %s: begins at %.4f ms, takes %.1f us, %.0f bytes",
                 r.rows[i].kind.c_str(), 1e3 * op.begin, 1e6 * (op.end - op.begin), op.bytes);
        std::string s = what(i) + text;
        int cause = i;
        do cause = waited_for(r.ops, before, cause);
        while (cause >= 0 && r.ops[cause].kind == Op::wait);
        if (cause >= 0) s += "; has waited for " + what(cause);
        if (cause >= 0 && op.begin > r.ops[cause].end + 1e-7) s += ", then for its turn";
        return s + (more ? "; and " + std::to_string(more) + " more like it" : "");
    }
    void text(double x, double y, const char *style, const std::string &s) const {
        fprintf(file, "<text x=\"%.1f\" y=\"%.1f\" %s>%s</text>\n", x, y, style, s.c_str());
    }
    void box(double x, double y, double w, double h, const std::string &style) const {
        fprintf(file, "<rect class=\"%s\" x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%.1f\"",
                style.c_str(), x, y, w, h);
    }
    // The operations of a lane, in their order
    void lane(const std::vector<int> &list, double y, double height) const {
        const double narrow = last / (width - left - right) / 3;
        for (size_t j = 0; j < list.size();) {
            const int i = list[j];
            const Op &op = r.ops[i];
            double end = op.end;
            bool matters = critical[i];
            const size_t first = j;
            for (j++; j < list.size(); j++) { // as one
                const Op &next = r.ops[list[j]];
                if (r.rows[list[j]].kind != r.rows[i].kind || next.begin > end + narrow ||
                    next.end > op.begin + 4 * narrow)
                    break;
                end = std::max(end, next.end);
                matters = matters || critical[list[j]];
            }
            const double w = std::max(x(end) - x(op.begin), 0.6), h = matters ? height - 2 : height;
            box(x(op.begin), y, w, h, r.rows[i].kind);
            fprintf(file, "><title>%s</title></rect>\n", about(i, j - first - 1).c_str());
            if (matters) box(x(op.begin), y + h, w, 2, "fg"), fprintf(file, "/>\n");
            const std::string &name = r.rows[i].name;
            if (op.kind == Op::message && name != "message" && w > 7 * name.size() && h > 9)
                text(x(op.begin) + 2, y + h - 3, "class=\"in\"", name);
        }
    }
    void draw(int k, const std::string &caption) const {
        struct Lane {
            std::string label;
            double y, height;
            std::vector<int> ops;
        };
        std::vector<Lane> lanes;
        const size_t colon = std::min(r.title.size(), r.title.find(": "));
        const double head = 72; // the title, what was measured, the legend
        double y = head;
        for (int c = 0; c < k; c++) {
            std::map<int, std::vector<int>> from; // sender, or -2: sums, -3: what it computes
            from[-3];
            for (size_t i = 0; i < r.ops.size(); i++) {
                const Op &op = r.ops[i];
                if (r.rows[i].device != c || op.kind == Op::wait) continue;
                int lane = r.rows[i].stream == "communication" ? -2 : -3;
                if (op.kind == Op::message) lane = op.src == c ? 1000 : op.src;
                from[lane].push_back(i);
            }
            const int senders = from.size() - 1 - from.count(-2),
                      first = senders ? from.upper_bound(-2)->first : 0;
            for (const auto &[src, ops] : from) {
                const double height = src == -3 ? 22 : senders > 4 && src != -2 ? 5 : 12;
                std::string label = src == -3   ? " computes"
                                    : src == -2 ? " adds"
                                                : " sends to host";
                if (src > -2 && src < 1000) label = " receives from " + gpu(src);
                if (senders > 4 && src > -2) label = src == first ? " receives, by sender" : "";
                if (!label.empty()) label = gpu(c) + label;
                lanes.push_back({label, y, height, ops});
                y += height + 2;
            }
            y += 8;
        }
        const double height = y + (caption.empty() ? 34 : 50);
        fprintf(
            file,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%g\" height=\"%g\" viewBox=\"0 0 %g "
            "%g\" font-family=\"Arial, Helvetica, sans-serif\" font-size=\"11\">\n<style>\n"
            ".bg{fill:#fff}.fg,text{fill:#222}.grid{stroke:#ddd}.in{fill:#fff;font-size:9px}\n"
            ".input{fill:#8c8c8c}.forward{fill:#7fb3e6}.backward{fill:#2a5caa}.sum{fill:#e59a1e}\n"
            ".message{fill:#d0303a}.update{fill:#3a9d5d}\n"
            "@media (prefers-color-scheme: dark){\n"
            ".bg{fill:#0d1117}.fg,text{fill:#e6e6e6}.grid{stroke:#333b45}.in{fill:#fff}\n"
            ".forward{fill:#9cc9f2}.backward{fill:#4a80d6}\n"
            "}\n</style>\n<rect class=\"bg\" width=\"100%%\" height=\"100%%\"/>\n",
            width, height, width, height);
        text(14, 18, "", r.title.substr(0, colon));
        if (colon < r.title.size()) text(14, 33, "", r.title.substr(colon + 2));
        double at = 14;
        for (const char *kind :
             {"input", "forward", "backward", "sum", "message", "update", "fg"}) {
            const bool path = strcmp(kind, "fg") == 0;
            auto is = [=](const Row &row) { return row.kind == kind; };
            if (!path && std::none_of(r.rows.begin(), r.rows.end(), is)) continue;
            box(at, head - 22 + (path ? 7 : 0), 10, path ? 2 : 9, kind), fprintf(file, "/>\n");
            text(at + 14, head - 14, "",
                 path ? "critical path: shorten it, and the whole is shorter" : kind);
            at += 30 + 6.5 * strlen(kind);
        }
        const double unit = last < 1e-3 ? 1e-6 : 1e-3,
                     ten = std::pow(10, std::floor(std::log10(last)));
        const double step = ten * (last / ten < 2 ? 0.2 : last / ten < 5 ? 0.5 : 1);
        for (double t = 0; t <= last * (1 + 1e-9); t += step) {
            char number[40];
            snprintf(number, sizeof number, "%.6g", std::round(t / unit * 1e6) / 1e6);
            fprintf(file, "<path class=\"grid\" d=\"M%.1f %.1fV%.1f\"/>\n", x(t), head, y);
            text(x(t), y + 14, "text-anchor=\"middle\"", number);
        }
        text((left + width) / 2, y + 28, "text-anchor=\"middle\"",
             unit < 1e-3 ? "microseconds" : "ms");
        for (const Lane &l : lanes) {
            text(left - 6, l.y + std::min(l.height, 15.0) - 2, "text-anchor=\"end\"", l.label);
            lane(l.ops, l.y, l.height);
        }
        text(14, y + 42, "", caption);
        fprintf(file, "</svg>\n");
    }
};

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

static void trace(const char *name, const char *json, const char *svg, const char *profile,
                  double ms) {
    Recording r = read(stdin, true);
    int k = 0;
    double begin = INFINITY, end = 0, computing = 0; // of all devices
    const bool emulated = strcmp(name, "emulated") == 0;
    if (!emulated && strcmp(name, "here") != 0) {
        const Fabric f = find(name);
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
    const std::vector<bool> critical = critical_path(r.ops);
    write_file(json, [&](FILE *file) { write_json(file, r, critical, k); });
    write_file(svg, [&](FILE *file) {
        Picture p = {r, critical, predecessors(r.ops), file};
        p.last = std::max({whole, ms / 1e3, p.last});
        p.draw(k, emulated && moving > 0 ? "Between emulated devices a message takes next to "
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
        if (mode == "trace" && argc >= 5 && argc <= 7)
            trace(argv[2], argv[3], argv[4], argc > 5 ? argv[5] : "", argc > 6 ? atof(argv[6]) : 0);
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
