// make trace: when the operations of a few steps ran, here or on another machine's network.
// pictures.py draws the rows of build/trace.csv.
// defines: traffic_of, busy, moved, stream_names, previous, waited_for, critical_path,
// read_profile, replay, add_reads, title_of, write_rows, trace
#pragma once
#include "../watch/network.h"
#include "../watch/training_steps.h"

#include <filesystem>

// Operations with their times, in the order in which they were enqueued. A wait's `after` and an
// operation's place are indices.
typedef std::vector<watch::Op> Ops;

static bool is_message(const watch::Op &op) { return op.src != -2; }

// What is sent, or read by kernels
static network::Traffic traffic_of(const std::deque<watch::Op> &ops) {
    std::vector<network::Message> messages;
    for (const watch::Op &op : ops) {
        if (is_message(op)) messages.push_back({op.src, op.dst, op.steps, op.bytes});
        for (const watch::Read &r : op.reads)
            messages.push_back({r.src, op.device, op.steps, r.bytes});
    }
    return network::Traffic(messages);
}

// Seconds in which at least one of the operations that `counts` runs
template <class Counts> static double busy(const Ops &ops, Counts counts) {
    std::vector<std::pair<double, double>> times;
    double sum = 0, until = -INFINITY;
    for (const watch::Op &op : ops)
        if (op.works() && counts(op)) times.push_back({op.begin, op.end});
    std::sort(times.begin(), times.end());
    for (const auto &[begin, end] : times) {
        sum += std::max(0.0, end - std::max(begin, until));
        until = std::max(until, end);
    }
    return sum;
}

// W3, or W3-b4 of several: the gradients that a message moves, if it reads or writes some of these
static std::string moved(const watch::Op &op, const PerDevice &grads) {
    const std::vector<std::string> &names = param_names;
    for (const void *at : {op.from, op.to})
        for (const auto &list : grads) {
            const float *begin = (const float *)at, *end = begin + long(op.bytes / sizeof(float));
            int first = -1, last = -1;
            for (size_t i = 0; i < list.size(); i++)
                if (list[i].ptr() < end && begin < list[i].ptr() + size(list[i]))
                    last = i, first = first < 0 ? i : first;
            if (at && first >= 0) return names[first] + (last > first ? "-" + names[last] : "");
        }
    return watch::kernel_name(op.name);
}
static std::vector<std::string> stream_names(int count) {
    std::vector<std::string> names(count, "another");
    auto named = [&](const Stream &s, const std::string &name) {
        if (s.handle.lane && s.handle.lane->number >= 0) names[s.handle.lane->number] = name;
    };
    for (const DeviceState &d : device_states) {
        named(d.stream, "computation");
        for (auto &[src, link] : d.links) named(link, "from " + str(gpu(src)));
    }
#ifdef ALGORITHMS
    for (const Stream &other : other_streams) named(other, "communication");
#endif
    return names;
}

// --- what an operation has waited for

// Of each operation the one before it on its stream, or -1
static std::vector<int> previous(const Ops &ops) {
    std::vector<int> before(ops.size());
    std::map<int, int> last; // of each stream
    for (size_t i = 0; i < ops.size(); i++)
        before[i] = std::exchange(last.insert({ops[i].lane, -1}).first->second, (int)i);
    return before;
}
// The later one of that and the one that a wait is for
static int waited_for(const Ops &ops, const std::vector<int> &before, int i) {
    const int a = before[i], b = ops[i].after;
    return a < 0 || (b >= 0 && ops[b].end > ops[a].end) ? b : a;
}
// The operations that the last one to end has waited for, one before the other: what makes one of
// them shorter makes the whole shorter.
static std::vector<bool> critical_path(const Ops &ops) {
    std::vector<bool> critical(ops.size());
    const std::vector<int> before = previous(ops);
    auto sooner = [](const watch::Op &a, const watch::Op &b) { return a.end < b.end; };
    int at = std::max_element(ops.begin(), ops.end(), sooner) - ops.begin();
    for (; at >= 0; at = waited_for(ops, before, at)) critical[at] = ops[at].works();
    return critical;
}

// --- on another machine

// Let kernels take what a file of rows name,bytes,us says; one that it does not list takes as long
// as the shortest one there.
static void read_profile(const std::string &path, Ops &ops) {
    std::map<std::pair<std::string, long>, double> seconds;
    std::ifstream file(path);
    if (!file) error("cannot read PROFILE=%s", path.c_str());
    char name[100];
    double bytes, us, shortest = INFINITY;
    for (std::string line; std::getline(file, line);)
        if (sscanf(line.c_str(), "%99[^,],%lf,%lf", name, &bytes, &us) == 3) {
            seconds[{name, (long)bytes}] = us / 1e6;
            shortest = std::min(shortest, us / 1e6);
        }
    if (seconds.empty()) error("PROFILE=%s has no row name,bytes,us", path.c_str());
    for (watch::Op &op : ops) {
        if (!op.works() || is_message(op)) continue;
        const auto found = seconds.find({watch::kernel_name(op.name), (long)op.bytes});
        op.end = op.begin + (found == seconds.end() ? shortest : found->second);
    }
}
// The times that the operations would have on this network. Each begins as soon as the one before
// it on its stream has ended, and what its stream waits for. Kernels take the time they have. A
// message of n bytes takes alpha + n * beta; for n * beta no other one leaves its sender or enters
// its receiver. (They are placed in the order in which they were enqueued.) A kernel that reads
// other devices' memory takes as long as messages would, but all may read the same one at once.
static void replay(Ops &ops, const network::Network &network) {
    std::map<int, double> lane, out, in; // until when a stream, a sender, a receiver is busy
    for (watch::Op &op : ops) {
        double begin = lane[op.lane], seconds = op.works() ? op.end - op.begin : 0;
        if (op.after >= 0) begin = std::max(begin, ops[op.after].end);
        if (is_message(op)) {
            const double travels = op.bytes / (network.bandwidth * 1e9);
            begin = std::max({begin, out[op.src], in[op.dst]});
            out[op.src] = in[op.dst] = begin + travels;
            seconds = network.latency / 1e6 + travels;
        }
        if (!op.reads.empty()) {
            double travels = 0;
            for (const watch::Read &r : op.reads) travels += r.bytes / (network.bandwidth * 1e9);
            begin = std::max(begin, in[op.device]);
            in[op.device] = begin + travels;
            seconds = std::max(seconds, network.latency / 1e6 + travels);
        }
        op.begin = begin;
        op.end = lane[op.lane] = begin + seconds;
    }
}

// --- what is printed and drawn

// What a kernel reads of other devices' memory looks like messages that begin and end with it.
static void add_reads(Ops &ops, std::vector<std::string> &streams) {
    const std::vector<int> before = previous(ops);
    std::map<std::pair<int, int>, int> lanes; // of what a device reads of another one
    for (int i = 0, n = ops.size(); i < n; i++) {
        for (const watch::Read &r : std::exchange(ops[i].reads, {})) {
            const int device = ops[i].device;
            const auto [lane, is_new] = lanes.insert({{device, r.src}, (int)streams.size()});
            if (is_new) streams.push_back("from " + str(gpu(r.src)));
            watch::Op read = watch::message(r.src, device, r.bytes, r.from, nullptr);
            read.device = device, read.lane = lane->second;
            read.begin = ops[i].begin, read.end = ops[i].end;
            read.after = waited_for(ops, before, i);
            ops.push_back(read);
        }
    }
}
static std::string percent(double part, double whole) {
    const double p = whole > 0 ? std::max(0.0, 100 * part / whole) : 0; // rounding: no -0%
    return format(p < 1 && p > 0 ? "%.1f%%" : "%.0f%%", p);
}
// How long it takes, and which part of that devices compute and messages travel.
static std::string title_of(const Ops &ops, double whole, int k) {
    auto computes = [](const watch::Op &op) { return !is_message(op); };
    auto all = [](const watch::Op &) { return true; };
    const double moving = busy(ops, is_message);
    const double both = moving + busy(ops, computes) - busy(ops, all);
    double computing = 0; // of all devices
    for (int c = 0; c < k; c++)
        computing += busy(ops, [&](auto &op) { return op.device == c && computes(op); });
    std::string text = format(
        ": %.3g ms; the devices compute for %s of it (mean); messages travel for %s", 1e3 * whole,
        percent(computing, k * whole).c_str(), percent(moving, whole).c_str());
    if (moving > 0) text += ", " + percent(both, moving) + " of that while a device computes";
    return text;
}
// A row for each operation, with the number of the row that it has waited for, or -1. Names belong
// to the rows, streams to their numbers.
static void write_rows(const std::string &path, const std::string &title, const std::string &note,
                       const Ops &ops, const std::vector<std::string> &names,
                       const std::vector<std::string> &streams) {
    const std::vector<bool> critical = critical_path(ops);
    const std::vector<int> before = previous(ops);
    std::ofstream file(path);
    file << "# " << title << "\n# " << note << "\n"
         << "device,lane,stream,kind,name,begin,end,src,dst,bytes,critical,cause\n";
    for (size_t i = 0; i < ops.size(); i++) {
        const watch::Op &op = ops[i];
        int cause = i;
        do cause = waited_for(ops, before, cause);
        while (cause >= 0 && !ops[cause].works());
        file << format("%d,%d,%s,%s,%s,%ld,%ld,%d,%d,%.0f,%d,%d\n", op.device, op.lane,
                       streams[op.lane].c_str(), op.kind, names[i].c_str(),
                       std::lround(op.begin * 1e9), std::lround(op.end * 1e9), op.src, op.dst,
                       op.bytes, (int)critical[i], cause);
    }
    if (!file.flush()) error("cannot write %s", path.c_str());
}

// Some steps on the devices: their rows to build/trace.csv, and a line
void trace() {
    const bool simulated = given("FABRIC");
    const network::Network network =
        simulated ? network::find_network(option_text("FABRIC")) : network::Network();
    if (!simulated && given("PROFILE")) error("PROFILE is for FABRIC: give both");
    const int k = option("GPUS");
    const auto replicas = replicate(first_devices(k));
    const auto step = training_step(replicas, option("BATCH"));
    for (int i = 0; i < 2; i++) step(); // they take what memory is needed
    watch::Recorder r(true);
    for (int i = 0; i < (given("STEPS") ? option("STEPS") : 3); i++) step();
    r.read_times();
    Ops ops(r.ops.begin(), r.ops.end());

    std::string title = what_is_trained(), note;
    if (simulated) {
        if (given("PROFILE")) read_profile(option_text("PROFILE"), ops);
        replay(ops, network);
        if (given("PROFILE")) title += ", kernels of " + option_text("PROFILE");
        title += " on " + network.name + " (simulated)";
    } else if (on_cpu && k > 1) {
        note = "Between emulated devices a message takes next to nothing: FABRIC=nvlink or pcie, "
               "... shows a network";
    }
    std::vector<std::string> names, streams = stream_names(r.count);
    add_reads(ops, streams);
    for (const watch::Op &op : ops) names.push_back(moved(op, gradients(replicas)));
    double begin = INFINITY, end = 0;
    for (const watch::Op &op : ops)
        if (op.works()) begin = std::min(begin, op.begin), end = std::max(end, op.end);
    for (watch::Op &op : ops) // waits may have begun before all work
        for (double *time : {&op.begin, &op.end}) *time = std::max(0.0, *time - begin);
    title += title_of(ops, end - begin, k);
    printf("%s\n", title.c_str());
    std::filesystem::create_directories("build");
    write_rows("build/trace.csv", title, note, ops, names, streams);
}
