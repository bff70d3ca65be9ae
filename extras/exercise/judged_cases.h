// What the judge asks for: sizes, limits and points, all of them on this page. grade.py
// reads them here, too.
// defines: namespace limits
#pragma once

#include <random>
#include <string>
#include <vector>

namespace limits {

// --- which cases there are
constexpr int most_devices = 16; // floats hold no more devices' digits exactly
constexpr int usual_devices = 8;
constexpr int naive_devices = 3; // the tutorial's own allreduce comes first, on so many
// What no submission knows: the numbers that come of the secret seed
typedef std::mt19937 Secret;
// Sums of so many numbers on k devices, a usual case first. At some each device is late once.
inline std::vector<int> lengths(int k, Secret &secret) {
    const int small = 2 + secret() % 998, large = 90001 + secret() % 20000;
    return {1000, 0, 1, k - 1, k, k + 1, small, large};
}
inline bool with_stragglers(int n, int k) { return n == k + 1 || n == 1000; }
// One list of tensors of n numbers in all; one is empty
inline std::vector<int> four_tensors(int n) { return {n / 3, 0, n - n / 3 - n / 4, n / 4}; }
// More tensors than LeNet has, and more numbers
inline std::vector<int> many_tensors(Secret &secret) {
    std::vector<int> sizes(60 + secret() % 30);
    for (int &n : sizes) n = secret() % 300;
    sizes[secret() % sizes.size()] = 130000;
    return sizes;
}
inline std::vector<int> few(Secret secret) { // for the same bits, for whether the host waits
    std::vector<int> sizes = {1000, 3, 77};
    for (int &n : sizes) n += secret() % n;
    return sizes;
}

// The gradients of MODEL: numbers of each parameter, in order
inline std::vector<int> gradients(const std::string &model) {
    if (model != "resnet18") // lenet and lab_cnn: W1 b1 W2 b2 W3 b3 W4 b4
        return {20 * 9, 20, 50 * 20 * 25, 50, 800 * 128, 128, 128 * 10, 10};
    std::vector<int> sizes;
    auto conv_and_norm = [&](int in, int out, int K, bool norm) {
        for (int n : {out * in * K * K, out}) sizes.push_back(n); // W, b
        if (norm) sizes.insert(sizes.end(), 2, out);              // gamma, beta
    };
    conv_and_norm(1, 64, 3, true);
    for (int in = 64, out = 64; out <= 512; in = out, out *= 2)
        for (bool first : {true, false}) {
            const int C = first ? in : out;
            conv_and_norm(C, out, 3, true);
            conv_and_norm(out, out, 3, true);
            if (C != out) conv_and_norm(C, out, 1, false); // the skip
        }
    sizes.insert(sizes.end(), {512 * 10, 10});
    return sizes;
}

constexpr int most_traced = 200000; // numbers on a device, while each operation is looked at

// For make show: few numbers, with LeNet's messages in every algorithm; none of 2 to 8 divides them
const std::vector<int> shown = {50, 8, 205, 15, 427, 27, 102, 5};
constexpr int shown_operations = 12; // in the history of a wrong number
constexpr int shown_devices = 8;     // at most: see whose_numbers.h
const std::vector<std::string> shown_beside = {"naive",   "bucket", "host", "by_tensor",
                                               "sharded", "ring",   "tree", "yours"};
constexpr double seconds_of_show = 4; // of a case

inline bool may_wait(const std::string &name) { return name == "host"; } // it adds there

// --- how much a submission may take
constexpr double seconds_of_case = 10; // from a question to its answer, and for large ones more:
constexpr double bytes_of_second = 2e6;
constexpr size_t bytes_shown = 2 << 10;   // of what one process prints
constexpr size_t bytes_printed = 1 << 20; // by one process: then it is stopped
constexpr int most_when_slow = 2000;      // numbers in a case, under a sanitizer
// On the host, where emulated devices have theirs too
inline size_t bytes_of_memory(int devices) { return (1L << 30) + devices * (400L << 20); }
constexpr double late_ms = 3;      // a straggler, in ms
constexpr int standstill_ms = 500; // of the devices, while the host should return
constexpr int late_host_ms = 50;   // so much later, and it has waited

// --- how much a submission may take in make grade, besides
constexpr int bytes_of_source = 1 << 20; // of a submission
constexpr int seconds_of_compile = 60;
constexpr int seconds_of_submission = 180; // in the judge
constexpr int megabytes_of_compile = 1000; // of memory: mgpu.cu takes 400
constexpr int megabytes_of_file = 64;      // that it writes, or the compiler for it
constexpr int bytes_of_report = 64 << 10;  // of what it prints and the judge says

// --- what it is worth
constexpr int points_sums = 60; // right sums on every number of devices
constexpr int points_bits = 20; // the same bits, whichever device is late
constexpr int points_host = 20; // the host never waits; it sends at least what nobody does without

} // namespace limits
