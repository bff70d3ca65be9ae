// What the judge asks of a worker and what the worker answers, as bytes in a pipe.
// defines: Request, Answer, Row, packed, unpacked, character
#pragma once
#include "../watch/network.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include <malloc.h>

namespace wire {

// Keep memory that is freed for what comes next. (glibc would give large pieces back at once, and
// the system would fill each new one with zeros.)
inline void keep_memory() {
    for (int threshold : {M_MMAP_THRESHOLD, M_TRIM_THRESHOLD}) mallopt(threshold, 1 << 30);
}

typedef std::vector<float> Flat;  // the numbers of several tensors, one after another
constexpr int poison_byte = 0xf1; // each byte of what takes the place of a sum that was copied

enum What { hello, sums, counts, waits, seconds, trace };
struct Request {
    int what = hello, k = 0;
    int straggler = -1; // a device that is late; k: each message is; -1: nobody
    int keeps = false;  // trace: other memory keeps what is in it; otherwise it is set to 0 first
    std::string algorithm;
    std::vector<int> sizes;    // numbers of each tensor
    std::vector<Flat> numbers; // of each device
};
struct Row { // an operation of the exchange, or one of the streams' waits
    bool is_message;
    network::Message message; // its round, too, if it is none: that of the last message before it
    int device, lane, after;  // lane: its stream; after: of a wait, what it waits for, or -1
    int name, line = -1;      // which of Answer::words, or -1
    bool is_kernel = false;
    // trace: what a copy reads and writes, as places in blocks; -1: elsewhere
    int from_block = -1, from = -1, to_block = -1, to = -1, numbers = 0;
};
struct Change {       // trace: numbers, one behind another, that an operation has changed
    int row;          // -1: what was there before the first
    int block, begin; // a piece of memory, and a place in it
    int length;       // so many of Answer::changed come next
};
struct Read { // of another device's memory by a kernel, or a write there: a message, too
    int src, dst;
    int begin; // the first of the numbers that have come, as its place among all
    bool into_tensor;
    std::vector<unsigned> whose; // of each, the devices that are in it: a bit for each
};
struct Answer {
    std::string error;       // the first one; empty: none
    std::vector<Flat> sums;  // counts, sums, trace: what each device holds afterwards
    std::vector<Row> rows;   // counts, trace: what was enqueued, in order
    std::vector<int> called; // counts: which of `names` it has called
    // trace: the device of each block. Block c is device c's gradients
    std::vector<int> blocks;
    std::vector<Change> changes;
    Flat changed;
    std::vector<std::string> words; // of operations, and lines
    int waited = 0;                 // waits: it did not return while the devices stood still
    double seconds = 0;             // seconds: of a call
    // hello
    std::vector<std::string> names; // of the algorithms
    std::vector<int> meant;         // for each: bit k is set if it is meant for k devices
    int on_cpu = 0;                 // emulated devices
    int slow = 1;                   // so many times as slow as usual: a sanitizer
    bool races = false;             // it looks for these: less of the rest is judged
    // By each row: found by the judge (moves.h), no worker sends them
    std::vector<std::vector<Read>> reads;
    double scale = 1; // of the bytes: the rows are those of fewer numbers
};

// Both ends go through the members in one order: transfer(to or from, member).
template <class Wire, class R>
std::enable_if_t<std::is_same_v<std::remove_const_t<R>, Request>> each_member(Wire &&w, R &r) {
    w(r.what), w(r.k), w(r.straggler), w(r.keeps), w(r.algorithm), w(r.sizes), w(r.numbers);
}
template <class Wire, class A>
std::enable_if_t<std::is_same_v<std::remove_const_t<A>, Answer>> each_member(Wire &&w, A &a) {
    w(a.error), w(a.sums), w(a.rows), w(a.called), w(a.blocks), w(a.changes), w(a.changed),
        w(a.words), w(a.waited), w(a.seconds);
    w(a.names), w(a.meant), w(a.on_cpu), w(a.slow), w(a.races);
}

// Return the bytes of the character that is at this place of a text: UTF-8, and neither a control
// character nor an end of a line nor one that turns the text around. 0: there is none.
inline size_t character(const std::string &text, size_t at) {
    const unsigned char first = text[at];
    if (first < 0x80) return first >= ' ' && first != 0x7f;
    const size_t n = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    constexpr unsigned least[] = {0, 0, 0xa0, 0x800, 0x10000};
    unsigned code = first & (0xff >> (n + 1));
    for (size_t i = 1; i < n; i++) {
        if (at + i >= text.size() || (text[at + i] & 0xc0) != 0x80) return 0;
        code = code << 6 | (text[at + i] & 0x3f);
    }
    auto in = [&](unsigned begin, unsigned last) { return code >= begin && code <= last; };
    const bool is_none = first < 0xc2 || first > 0xf4 || !in(least[n], 0x10ffff);
    return is_none || in(0xd800, 0xdfff) || in(0x2028, 0x202e) || in(0x2066, 0x2069) ? 0 : n;
}
// A text of a submission, which may say anything, as it can stand in any line or row
inline std::string cleaned(const std::string &text) {
    constexpr size_t most = 1000; // bytes
    std::string clean;
    for (size_t at = 0, n; at < text.size() && clean.size() < most; at += n ? n : 1) {
        n = character(text, at);
        clean += n ? text.substr(at, n) : text[at] == '\n' || text[at] == '\t' ? " " : "?";
    }
    return clean.size() < most ? clean : clean + " ...";
}

struct Writer { // to a string
    std::string bytes;
    template <class T> void operator()(const T &x) { bytes.append((const char *)&x, sizeof x); }
    void operator()(const std::string &text) {
        (*this)(text.size());
        bytes += text;
    }
    template <class T> void operator()(const std::vector<T> &list) {
        (*this)(list.size());
        if constexpr (std::is_trivially_copyable_v<T>)
            bytes.append((const char *)list.data(), list.size() * sizeof(T));
        else
            for (const T &x : list) (*this)(x);
    }
};
struct Reader { // from a string that somebody else has written: it may say anything
    const std::string &bytes;
    size_t at = 0;
    void copy(void *to, size_t n) {
        if (n > bytes.size() - at) throw std::runtime_error("too few bytes");
        if (n > 0) memcpy(to, bytes.data() + at, n); // an empty vector has no address
        at += n;
    }
    template <class T> void operator()(T &x) { copy(&x, sizeof x); }
    size_t length(size_t of_each) {
        size_t n = 0;
        (*this)(n);
        if (n > (bytes.size() - at) / of_each) throw std::runtime_error("a wrong length");
        return n;
    }
    void operator()(std::string &text) {
        text.resize(length(1));
        copy(text.data(), text.size());
        text = cleaned(text);
    }
    template <class T> void operator()(std::vector<T> &list) {
        constexpr bool flat = std::is_trivially_copyable_v<T>;
        list.resize(length(flat ? sizeof(T) : sizeof(size_t)));
        if constexpr (flat) copy(list.data(), list.size() * sizeof(T));
        else
            for (T &x : list) (*this)(x);
    }
};
template <class T> std::string packed(const T &x) { // its length, then its members
    Writer members, all;
    each_member(members, x);
    all(members.bytes);
    return std::move(all.bytes);
}
template <class T> T unpacked(const std::string &members) {
    T x;
    Reader reader{members};
    each_member(reader, x);
    if (reader.at != members.size()) throw std::runtime_error("too many bytes");
    return x;
}

} // namespace wire
