// A model of devices, the links between them and their hosts, and a simulation of what is enqueued.
//
// LogGP's terms (Alexandrov, Ionescu, Schauser, Scheiman, "LogGP", SPAA 1995), of a message of n
// bytes:
//   o   overhead: an engine of the device that fetches it sets it up, so much at both ends together
//   G   time of a byte: then the bytes go through all links on its way at once
//   L   latency: then the last one is on its way, and the engine is free again
// so that it takes o + n G + L by itself. LogGP's gap g is o over the number of engines: a device
// has only so many messages at once, first come, first served (one to or from the host is the
// device's own). Messages share a link fairly, each direction by itself: none could go faster
// without slowing down one that is no faster (max-min fairness).
// A process has one host thread for all its devices. It enqueues the operations in their order;
// none begins before that, and the messages of k devices queue up there. Kernels take the time
// that was recorded, or, where none was, a launch and their bytes in the device's memory.
// Where the host waits for a copy to it, what it enqueues next is later, too, by an addition of
// what came at 5 GB/s (three accesses a number, 15 GB/s by one core). Left out: congestion in a
// switch, additions between processes' hosts, programs that disturb each other.
// defines: namespace fabric: Fabric, fabrics, find_fabric, Op, simulated, simulate
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <queue>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace fabric {

struct Fabric {
    std::string name;
    double latency, overhead;   // us: L, and o at both ends together
    double engines;             // messages that a device receives at once; 0: no limit
    double port;                // GB/s into each device, and out of it: 1/G
    double crossing;            // GB/s between the halves of the devices, each way; 0: no limit
    double host_port, host_all; // GB/s between a device and the host; between all devices and it
    double memory;              // GB/s of a device's memory
    double host, launch;        // us: for a host to enqueue a kernel or a message; of a kernel
    int node = 0;               // devices of a process, which has a host of its own; 0: all
    // Between processes: L, o, and GB/s into each process' machine and out of it
    double network_latency = 0, network_overhead = 0, network = 0;
    double shared = 0; // GB/s of all messages between devices together; 0: no limit
};

// Bandwidths are of data sheets; all else is rough.
//   nvlink       8 H100 and a switch: NVLink 4, 900 GB/s in both directions; PCIe 5 to the host, of
//                whose 63 GB/s some 50 are left (p2pBandwidthLatencyTest prints 51 to 57)
//   pcie         PCIe 4 x16, 31.5 GB/s, of which 25 are left; one switch, one x16 to the host
//   sockets      the same, half of the devices at each of two processors, which copies between them
//                share one link of
//   ethernet100  a device a machine, 100 Gb/s, 96% of it data; the host is one more machine.
//   ethernet10   MPI's L + o is 2 to 20 us over RDMA, 20 to 100 us over TCP, where o is the
//                system's share; a process handles one message after another
// L + o between GPUs: p2pBandwidthLatencyTest; how it divides is a guess. engines: deviceQuery's
// "copy engine(s)", 3 on an H100, 2 on consumer boards (a driver may use fewer for one direction).
// host: a launch costs its thread 2 to 3 us, an event's record and a wait for it together half of
// that; launch: a kernel of a few bytes has taken so long when the next one begins.
inline const std::vector<Fabric> fabrics = {
    // name         L   o  e  port  crossing  host_port  host_all  memory  host  launch  node
    {"nvlink", 1, 2, 3, 450, 0, 50, 200, 3350, 2.5, 2},
    {"pcie", 6, 4, 2, 25, 0, 25, 25, 900, 2.5, 2},
    {"sockets", 11, 4, 2, 25, 20, 25, 50, 900, 2.5, 2},
    {"ethernet100", 12, 3, 1, 12, 0, 12, 12, 900, 2.5, 2, 1, 12, 3, 12},
    {"ethernet10", 40, 10, 1, 1.2, 0, 1.2, 1.2, 900, 2.5, 2, 1, 40, 10, 1.2}};

// Return one of these, or throw. Others are one's own, "LATENCY,PORT", where a message has no
// overhead and the host takes no time; of several machines, "8xONE+OTHER": eight devices of the one
// in each, between which messages take the other; and any of them with words: "nvlink,host=0".
inline Fabric find_fabric(const std::string &name) {
    for (const Fabric &f : fabrics)
        if (f.name == name) return f;

    const size_t equal = name.rfind('='), comma = name.rfind(',', equal);
    if (equal < name.size() && comma < name.size()) { // the last word
        const std::pair<const char *, double Fabric::*> words[] = {
            {"overhead", &Fabric::overhead}, {"engines", &Fabric::engines},
            {"host", &Fabric::host},         {"launch", &Fabric::launch},
            {"network", &Fabric::network},   {"memory", &Fabric::memory}};
        Fabric f = find_fabric(name.substr(0, comma));
        f.name = name;
        char *end = nullptr;
        const double value = strtod(&name[equal + 1], &end);
        const bool number = equal + 1 < name.size() && !*end && value >= 0;
        for (const auto &[word, field] : words) {
            if (!number || name.substr(comma + 1, equal - comma - 1) != word) continue;
            f.*field = value;
            if (f.memory > 0 && (!f.node || f.network > 0)) return f;
        }
    }

    int node = 0, at = 0;
    const size_t plus = name.find('+');
    if (sscanf(name.c_str(), "%dx%n", &node, &at) == 1 && at > 0 && plus < name.size()) {
        Fabric f = find_fabric(name.substr(at, plus - at));
        const Fabric between = find_fabric(name.substr(plus + 1));
        f.network_latency = between.latency, f.network_overhead = between.overhead;
        f.network = between.port;
        f.name = name;
        if (std::exchange(f.node, node) == 0 && node > 0) return f;
    }

    Fabric own = {name, 0, 0, 0, 0, 0, 0, 0, 900, 0, 0};
    int end = 0; // what is read of the name
    sscanf(name.c_str(), "%lf,%lf%n", &own.latency, &own.port, &end);
    own.host_port = own.host_all = own.port;
    if (end == (int)name.size() && own.latency >= 0 && own.port > 0) return own;

    std::string names;
    for (const Fabric &f : fabrics) names += f.name + ", ";
    throw std::runtime_error(
        "FABRIC=" + name + " is unknown: choose one of " + names +
        "8xnvlink+ethernet100, or us,GB/s of a message; words may follow: nvlink,host=0");
}

struct Op {
    enum Kind { kernel, message, wait } kind = kernel;
    int lane = 0;              // its stream
    int src = 0, dst = 0;      // of a message: devices, -1: the host
    int after = -1;            // of a wait: the operation that it is for
    int device = 0;            // whose process enqueues it
    float calls = 1;           // so often Fabric::host: a wait, with the record before it, is half
    bool blocks = false;       // the host waits for it, too
    double bytes = 0;          // of a message; that a kernel reads and writes
    double seconds = -1;       // of a kernel; negative: as its bytes take
    double begin = 0, end = 0; // the simulation's
};

// Return what a simulation needs of an operation that watch.h has recorded. `waited` is the last
// one that the host has waited for, -1 before the first.
template <class Recorded> Op simulated(const Recorded &recorded, int &waited) {
    Op op;
    if (!recorded.works()) op.kind = Op::wait;
    else if (recorded.src != -2) op.kind = Op::message;
    op.lane = recorded.lane, op.after = recorded.after, op.device = recorded.device;
    op.src = recorded.src, op.dst = recorded.dst, op.bytes = recorded.bytes;
    if (op.kind != Op::wait) return op;
    op.blocks = op.after > waited && strcmp(recorded.name, "host") == 0;
    op.calls = strcmp(recorded.name, "wait") == 0 ? 0.5 : op.blocks;
    if (op.blocks) waited = op.after;
    return op;
}

class Simulation {
    std::vector<Op> &ops;
    const Fabric &f;
    const double scale;
    const int n;
    double t = 0;
    // What may begin when i ends: next[i] on its stream, the list of waits from first_wait[i] on
    std::vector<int> missing, next, first_wait, next_wait, ready;

    struct Link {
        double capacity, room; // bytes a second; what is left of them for flows without a share
        int users;             // such flows
        bool seen;
        std::vector<int> flows; // ended ones among them
    };
    struct Flow { // of a message whose bytes are on their way
        int op;
        double left, rate, since; // bytes at time `since`
        int links[4];             // -1: none
        int version;              // of its end in `events`
        bool seen, ended;
    };
    std::vector<Link> links;
    std::vector<Flow> flows;
    std::vector<int> changed; // links whose flows have changed

    enum What { enqueued = -3, first_byte, ended }; // of an operation; from 0 on: a flow's end
    struct Event {
        double time;
        int op, what, version;
        bool operator>(const Event &e) const { return time > e.time; }
    };
    std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events;

    int k = 1, node = 1, received = 0;    // devices; those of a process; messages by hosts
    std::vector<int> enqueues_next;       // what its host enqueues after i
    std::vector<int> busy;                // engines of each device
    std::vector<std::deque<int>> in_line; // messages that wait for one
    int engines_of(const Op &m) const { return m.dst < 0 ? m.src : m.dst; }
    // The links of a device's process: its host's and the crossing's, and those to other machines,
    // each in both directions. (Where each device is a machine, the host is one for all of them.)
    int process(int device) const { return 4 * k + 6 * (f.node ? device / f.node : 0); }
    bool between(const Op &m) const { // processes
        return f.node && m.src >= 0 && m.dst >= 0 && m.src / node != m.dst / node;
    }
    void enqueue(int i, double later = 0) { // by its host, which is ready to
        if (i >= 0) events.push({t + later + f.host * ops[i].calls / 1e6, i, enqueued, 0});
    }
    void begin_message(int i) {
        ops[i].begin = t;
        busy[engines_of(ops[i])]++;
        const double o = between(ops[i]) ? f.network_overhead : f.overhead;
        events.push({t + o / 1e6, i, first_byte, 0});
    }

    void let(int j) {
        if (--missing[j] == 0) ready.push_back(j);
    }
    void end(int i) {
        ops[i].end = t;
        if (f.host > 0 && ops[i].blocks) { // what has come is added, but the first
            const Op &m = ops[ops[i].after];
            const bool adds = m.kind == Op::message && m.dst < 0 && received++;
            enqueue(enqueues_next[i], adds ? scale * m.bytes / 5e9 : 0);
        }
        if (next[i] >= 0) let(next[i]);
        for (int j = first_wait[i]; j >= 0; j = next_wait[j]) let(j);
    }
    void begin(int i) {
        Op &op = ops[i];
        op.begin = t;
        if (op.kind == Op::wait) {
            end(i);
        } else if (op.kind == Op::message) {
            const int d = engines_of(op);
            if (f.engines > 0 && busy[d] >= f.engines) in_line[d].push_back(i);
            else begin_message(i);
        } else {
            const double own = f.launch / 1e6 + scale * op.bytes / (f.memory * 1e9);
            events.push({t + (op.seconds >= 0 ? op.seconds : own), i, ended, 0});
        }
    }
    void begin_flow(int i) {
        const Op &m = ops[i];
        const int d = engines_of(m), own = process(f.node == 1 && (m.src < 0 || m.dst < 0) ? 0 : d);
        const bool from = 2 * (m.src % node) >= node, to = 2 * (m.dst % node) >= node; // the halves
        Flow flow = {i, scale * m.bytes, 0, t, {2 * m.src, 2 * m.dst + 1, -1, -1}, 0, false, false};
        if (between(m)) flow.links[0] = process(m.src) + 4, flow.links[1] = own + 5;
        else if (m.dst < 0) flow.links[0] = 2 * k + 2 * d, flow.links[1] = own;
        else if (m.src < 0) flow.links[0] = 2 * k + 2 * d + 1, flow.links[1] = own + 1;
        else if (f.crossing > 0 && from != to) flow.links[2] = own + 2 + to;
        if (f.shared > 0 && m.src >= 0 && m.dst >= 0) flow.links[3] = links.size() - 1;
        for (int link : flow.links) {
            if (link < 0) continue;
            links[link].flows.push_back(flows.size());
            changed.push_back(link);
        }
        flows.push_back(flow);
    }
    // All flows that share links with those of `changed`, directly or by others between them
    std::vector<int> affected() {
        std::vector<int> found, visited;
        while (!changed.empty()) {
            const int at = changed.back();
            Link &link = links[at];
            changed.pop_back();
            if (link.seen) continue;
            link.seen = true;
            visited.push_back(at);
            size_t kept = 0;
            for (int i : link.flows) {
                if (flows[i].ended) continue;
                link.flows[kept++] = i;
                if (flows[i].seen) continue;
                flows[i].seen = true;
                found.push_back(i);
                for (int other : flows[i].links)
                    if (other >= 0 && !links[other].seen) changed.push_back(other);
            }
            link.flows.resize(kept);
            link.users = kept;
            link.room = link.capacity;
        }
        for (int at : visited) links[at].seen = false;
        for (int i : found) flows[i].seen = false;
        return found;
    }
    // Their rates: the narrowest link's flows get equal shares of it, then the next one's of the
    // rest
    void share(std::vector<int> all) {
        auto narrowest = [&](const Flow &flow) {
            double rate = INFINITY;
            for (int l : flow.links)
                if (l >= 0) rate = std::min(rate, links[l].room / links[l].users);
            return rate;
        };
        while (!all.empty()) {
            double least = INFINITY;
            size_t kept = 0;
            for (int i : all) least = std::min(least, narrowest(flows[i]));
            for (int i : all) {
                Flow &flow = flows[i];
                if (narrowest(flow) > least * (1 + 1e-9)) {
                    all[kept++] = i;
                    continue;
                }
                for (int l : flow.links)
                    if (l >= 0) links[l].users--, links[l].room -= least;
                if (std::fabs(flow.rate - least) < 1e-9 * least) continue; // its end is known
                flow.left -= flow.rate * (t - flow.since);
                flow.since = t;
                flow.rate = least;
                events.push({t + std::max(0.0, flow.left) / least, flow.op, i, ++flow.version});
            }
            all.resize(kept);
        }
    }

public:
    Simulation(std::vector<Op> &ops, const Fabric &f, double scale)
        : ops(ops), f(f), scale(scale), n(ops.size()), missing(n), next(n, -1), first_wait(n, -1),
          next_wait(n, -1) {}

    double run() {
        int lanes = 0;
        for (const Op &op : ops) {
            lanes = std::max(lanes, op.lane + 1);
            k = std::max({k, op.device + 1, op.src + 1, op.dst + 1});
        }
        node = f.node ? f.node : k;
        const int processes = (k + node - 1) / node;
        std::vector<int> last(lanes, -1), last_of_host(processes, -1);
        if (f.host > 0) enqueues_next.resize(n, -1);
        busy.resize(k), in_line.resize(k);
        for (int i = 0; i < n; i++) {
            const int before = std::exchange(last[ops[i].lane], i), after = ops[i].after;
            if (before >= 0) next[before] = i;
            if (after >= 0) next_wait[i] = std::exchange(first_wait[after], i);
            missing[i] = (before >= 0) + (after >= 0) + (f.host > 0);
            if (missing[i] == 0) ready.push_back(i);
            if (f.host <= 0) continue;
            int &earlier = last_of_host[ops[i].device / node];
            if (earlier < 0) enqueue(i);
            else enqueues_next[earlier] = i;
            earlier = i;
        }
        // Out of each device and into it, in turn; from it to the host, and back; of each process
        // to its host, and back, between its halves, and to other machines; what all share
        auto add = [&](int count, double GB) {
            while (count-- > 0) links.push_back({1e9 * GB, 0, 0, false, {}});
        };
        add(2 * k, f.port), add(2 * k, f.host_port);
        for (int p = 0; p < processes; p++)
            add(2, f.host_all), add(2, f.crossing), add(2, f.network);
        add(1, f.shared);
        for (;;) {
            while (!ready.empty()) { // at once, in the order in which they were enqueued
                std::vector<int> now;
                now.swap(ready);
                std::sort(now.begin(), now.end());
                for (int i : now) begin(i);
            }
            if (!changed.empty()) share(affected());
            if (events.empty()) return t;
            // What rounding or a byte more has pulled apart happens at once
            for (const double now = events.top().time, until = now + std::max(1e-9 * now, 5e-9);
                 !events.empty() && events.top().time <= until;) {
                const Event e = events.top();
                const Op &op = ops[e.op];
                events.pop();
                if (e.what >= 0 && (e.version != flows[e.what].version || flows[e.what].ended))
                    continue;
                t = std::max(t, e.time);
                if (e.what == first_byte) {
                    begin_flow(e.op);
                } else if (e.what == ended) {
                    end(e.op);
                } else if (e.what == enqueued) {
                    if (!op.blocks) enqueue(enqueues_next[e.op]);
                    let(e.op);
                } else { // its last byte is on its way
                    flows[e.what].ended = true;
                    for (int l : flows[e.what].links)
                        if (l >= 0) changed.push_back(l);
                    const int d = engines_of(op);
                    busy[d]--;
                    if (!in_line[d].empty()) {
                        begin_message(in_line[d].front());
                        in_line[d].pop_front();
                    }
                    const double L = between(op) ? f.network_latency : f.latency;
                    events.push({t + L / 1e6, e.op, ended, 0});
                }
            }
        }
    }
};

// When operations begin and end if each follows the one before it on its stream, what it waits for,
// and the host. All bytes are `scale` times as many.   ->   seconds until the last one has ended
inline double simulate(std::vector<Op> &ops, const Fabric &f, double scale = 1) {
    return Simulation(ops, f, scale).run();
}

} // namespace fabric
