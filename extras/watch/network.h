// What the messages of an exchange cost: their number, bytes and rounds, and the time that these
// take on another machine's network.
//
// A message of n bytes takes alpha + n * beta: a latency, and n bytes at the bandwidth of a device.
// Messages of one round travel at once, and a round begins when the one before it has ended. So an
// exchange takes
//     rounds * alpha + beta * (in each round, the bytes into or out of the busiest device).
// Left out: additions, the host, which takes some 2 us to enqueue a message, links that several
// devices share, and what a network does besides.
// defines: namespace network: Network, networks, find_network, Message, Traffic
#pragma once
#include <algorithm>
#include <cstdio>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace network {

struct Network {
    std::string name;
    double latency;   // us: alpha
    double bandwidth; // GB/s into each device, and out of it: 1/beta
};

// Bandwidths are of data sheets, less what protocols take; latencies are rough.
//   nvlink       H100s and a switch: NVLink 4, 450 GB/s each way; CUDA's p2pBandwidthLatencyTest
//                prints 2 to 3 us
//   pcie         PCIe 4 x16, 25 of 31.5 GB/s, without a detour through the host
//   ethernet100  a device a machine, 100 Gb/s by RDMA
//   ethernet10   10 Gb/s by TCP
inline const std::vector<Network> networks = {
    {"nvlink", 3, 450}, {"pcie", 10, 25}, {"ethernet100", 15, 12}, {"ethernet10", 50, 1.2}};

// Return one of these, or "LATENCY,BANDWIDTH", or throw.
inline Network find_network(const std::string &name) {
    for (const Network &n : networks)
        if (n.name == name) return n;
    Network own = {name, 0, 0};
    int end = 0; // what is read of the name
    sscanf(name.c_str(), "%lf,%lf%n", &own.latency, &own.bandwidth, &end);
    if (end > 0 && end == (int)name.size() && own.latency >= 0 && own.bandwidth > 0) return own;
    std::string names;
    for (const Network &n : networks) names += n.name + ", ";
    throw std::runtime_error("FABRIC=" + name + " is unknown: choose one of " + names +
                             "or a message's us,GB/s, such as 10,25");
}

struct Message {
    int src = 0, dst = 0; // devices; -1: the host
    int round = 1;        // from 1 on: the longest chain of messages that ends here
    double bytes = 0;
};

// What an exchange sends.
struct Traffic {
    long messages = 0, bytes = 0, rounds = 0;
    std::map<std::pair<int, int>, long> links; // bytes from one device to another
    std::vector<long> longest;                 // of each round: bytes of its busiest device

    explicit Traffic(const std::vector<Message> &list) {
        std::map<std::pair<int, int>, long> in, out; // of each round and device
        for (const Message &m : list) {
            messages++;
            bytes += m.bytes;
            links[{m.src, m.dst}] += m.bytes;
            rounds = std::max<long>(rounds, m.round);
            longest.resize(rounds);
            long &most = longest.at(m.round - 1);
            most =
                std::max({most, in[{m.round, m.dst}] += m.bytes, out[{m.round, m.src}] += m.bytes});
        }
    }
    // Bytes into or out of the device, or the host, that moves most: `who`
    long busiest(int *who = nullptr) const {
        std::map<int, long> in, out;
        long most = 0;
        auto count = [&](int device, long sum) {
            if (sum > most && who) *who = device;
            most = std::max(most, sum);
        };
        for (const auto &[link, bytes] : links) {
            count(link.second, in[link.second] += bytes);
            count(link.first, out[link.first] += bytes);
        }
        return most;
    }
    long busiest_link() const {
        long most = 0;
        for (const auto &[ends, bytes] : links) most = std::max(most, bytes);
        return most;
    }
    // When each round ends on this network, in seconds; all bytes are `scale` times as many.
    std::vector<double> ends(const Network &network, double scale = 1) const {
        std::vector<double> list;
        double t = 0;
        for (long most : longest) {
            t += network.latency / 1e6 + scale * most / (network.bandwidth * 1e9);
            list.push_back(t);
        }
        return list;
    }
    double seconds(const Network &network, double scale = 1) const {
        return rounds ? ends(network, scale).back() : 0;
    }
};

} // namespace network
