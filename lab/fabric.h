// A model of the links between devices, and a simulation of what is enqueued there.
//
// A message waits for the latency, then its bytes go through all links on its way at once. Messages
// share a link fairly, each direction by itself: none could go faster without slowing down one that
// is no faster (max-min fairness). Kernels take the time that was recorded, or, where none was,
// that of their bytes in the device's memory; the host takes none to enqueue.
// defines: namespace fabric: Fabric, fabrics, find_fabric, Op, simulate
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <queue>
#include <string>
#include <utility>
#include <vector>

namespace fabric {

struct Fabric {
    std::string name;
    double latency;         // us, of a message
    double port;            // GB/s into each device, and out of it
    double crossing;        // GB/s from one half of the devices to the other, and back; 0: no limit
    double host_port, host; // GB/s between a device and the host; between all devices and the host
    double memory;          // GB/s of a device's memory
};

// Bandwidths are of data sheets, latencies rough.
//   nvlink       8 H100 and a switch: NVLink 4, 900 GB/s in both directions; PCIe 5 to the host, of
//                whose 63 GB/s some 50 are left (p2pBandwidthLatencyTest prints 51 to 57)
//   pcie         PCIe 4 x16, 31.5 GB/s, of which 25 are left; one switch, one x16 to the host
//   sockets      the same, half of the devices at each of two processors, which copies between them
//                share one link of
//   ethernet100  a device a machine, 100 Gb/s, 96% of it data; the host is one more machine.
//   ethernet10   MPI's latency is 2 to 20 us over RDMA, 20 to 100 us over TCP
inline const std::vector<Fabric> fabrics = {{"nvlink", 3, 450, 0, 50, 200, 3350},
                                            {"pcie", 10, 25, 0, 25, 25, 900},
                                            {"sockets", 15, 25, 20, 25, 50, 900},
                                            {"ethernet100", 15, 12, 0, 12, 12, 900},
                                            {"ethernet10", 50, 1.2, 0, 1.2, 1.2, 900}};

// One of these, or of one's own: "LATENCY,PORT" or "LATENCY,PORT,CROSSING,HOST_PORT,HOST,MEMORY".
// -> an empty name: neither
inline Fabric find_fabric(const std::string &name) {
    for (const Fabric &f : fabrics)
        if (f.name == name) return f;
    Fabric own = {name, 0, 0, 0, 0, 0, 900};
    int end = 0, end_of_two = 0; // what is read of the name
    const int count =
        sscanf(name.c_str(), "%lf,%lf%n,%lf,%lf,%lf,%lf%n", &own.latency, &own.port, &end_of_two,
               &own.crossing, &own.host_port, &own.host, &own.memory, &end);
    if (count == 2) {
        own.host_port = own.host = own.port;
        end = end_of_two;
    }
    const bool positive = own.port > 0 && own.host_port > 0 && own.host > 0 && own.memory > 0 &&
                          own.latency >= 0 && own.crossing >= 0;
    if (end != (int)name.size() || !positive) own.name = "";
    return own;
}

struct Op {
    enum Kind { wait, kernel, message } kind;
    int lane;                  // its stream
    int src = 0, dst = 0;      // of a message: devices, -1 the host
    int after = -1;            // of a wait: the operation that it is for
    double bytes = 0;          // of a message; that a kernel reads and writes
    double seconds = -1;       // of a kernel; negative: as its bytes take
    double begin = 0, end = 0; // the simulation's
};

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
        int links[3];             // -1: none
        int version;              // of its end in `events`
        bool seen, ended;
    };
    std::vector<Link> links;
    std::vector<Flow> flows;
    std::vector<int> changed; // links whose flows have changed

    struct Event { // a kernel's end or a message's first byte (flow < 0), or a flow's end
        double time;
        int op, flow, version;
        bool operator>(const Event &e) const { return time > e.time; }
    };
    std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events;

    void end(int i) {
        ops[i].end = t;
        auto let = [&](int j) {
            if (--missing[j] == 0) ready.push_back(j);
        };
        if (next[i] >= 0) let(next[i]);
        for (int j = first_wait[i]; j >= 0; j = next_wait[j]) let(j);
    }
    void begin_flow(int i, int k) {
        const Op &m = ops[i];
        const bool from = 2 * m.src >= k, to = 2 * m.dst >= k; // the halves
        Flow flow = {i, scale * m.bytes, 0, t, {2 * m.src, 2 * m.dst + 1, -1}, 0, false, false};
        if (m.dst < 0) flow.links[0] = 2 * k + 2 * m.src, flow.links[1] = 4 * k;
        else if (m.src < 0) flow.links[0] = 2 * k + 2 * m.dst + 1, flow.links[1] = 4 * k + 1;
        else if (f.crossing > 0 && from != to) flow.links[2] = 4 * k + 2 + to;
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
        int k = 1, lanes = 0;
        for (const Op &op : ops) {
            lanes = std::max(lanes, op.lane + 1);
            if (op.kind == Op::message) k = std::max({k, op.src + 1, op.dst + 1});
        }
        std::vector<int> last(lanes, -1);
        for (int i = 0; i < n; i++) {
            const int before = std::exchange(last[ops[i].lane], i), after = ops[i].after;
            if (before >= 0) next[before] = i;
            if (after >= 0) next_wait[i] = std::exchange(first_wait[after], i);
            missing[i] = (before >= 0) + (after >= 0);
            if (missing[i] == 0) ready.push_back(i);
        }
        // Out of each device and into it, in turn; from it to the host, and back; the host's; the
        // crossing's
        const double GB = 1e9;
        links.resize(4 * k + 4);
        for (int l = 0; l < 4 * k + 4; l++)
            links[l].capacity = GB * (l < 2 * k       ? f.port
                                      : l < 4 * k     ? f.host_port
                                      : l < 4 * k + 2 ? f.host
                                                      : f.crossing);
        for (;;) {
            while (!ready.empty()) {
                const int i = ready.back();
                Op &op = ops[i];
                ready.pop_back();
                op.begin = t;
                if (op.kind == Op::wait) end(i);
                else if (op.kind == Op::message) events.push({t + f.latency / 1e6, i, -1, 0});
                else
                    events.push(
                        {t + (op.seconds >= 0 ? op.seconds : scale * op.bytes / (f.memory * GB)), i,
                         -1, 0});
            }
            if (!changed.empty()) share(affected());
            if (events.empty()) return t;
            // What rounding has pulled apart happens at once
            for (const double now = events.top().time, until = now + 1e-9 * now;
                 !events.empty() && events.top().time <= until; events.pop()) {
                const Event e = events.top();
                if (e.flow < 0) {
                    t = std::max(t, e.time);
                    if (ops[e.op].kind == Op::message) begin_flow(e.op, k);
                    else end(e.op);
                } else if (e.version == flows[e.flow].version && !flows[e.flow].ended) {
                    t = std::max(t, e.time);
                    flows[e.flow].ended = true;
                    for (int l : flows[e.flow].links)
                        if (l >= 0) changed.push_back(l);
                    end(e.op);
                }
            }
        }
    }
};

// When operations begin and end if each follows the one before it on its stream and what it waits
// for. All bytes are `scale` times as many.   ->   seconds until the last one has ended
inline double simulate(std::vector<Op> &ops, const Fabric &f, double scale = 1) {
    return Simulation(ops, f, scale).run();
}

} // namespace fabric
