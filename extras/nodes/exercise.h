// make exercise NODES=4: is ring_between_nodes right? Are its bits the same on all nodes?
// defines: exercise_nodes
#pragma once

// Return input i's factor. Node c's number i is code(i) * 2^(b c), b = 2 or, of more than 8 nodes,
// 1: the digits of sum / code(i) tell how often each node's number is in it. Sums are whole and
// below 2^24, so they are exact.
inline int code(int i) { return 1 + i % 251; }

static float input(int i, int c) { return (float)code(i) * (1 << (nodes <= 8 ? 2 : 1) * c); }

// Return how often each node's number is in a wrong sum at index i, if that is not once.
static std::string explain(float got, int i) {
    const int base = nodes <= 8 ? 4 : 2, digits = got >= 1 && got < 1 << 24 ? got / code(i) : 0;
    if (digits == 0 || digits * code(i) != got) {
        return "it is not a sum of the nodes' numbers at this index";
    }
    std::string text;
    int rest = digits;
    for (int c = 0; c < nodes; c++) {
        const int times = rest % base;
        rest /= base;
        if (times == 1) continue;
        text += text.empty() ? "it has " : ", ";
        text += format("node(%d)'s number %d times", c, times);
    }
    return text;
}

// Sum n numbers by ring_between_nodes, and fail unless the sums are right and all nodes' bits
// equal.
static void judge_ring(int n) {
    std::vector<float> a(n), b(n);
    for (int i = 0; i < n; i++) {
        a[i] = input(i, node);
        b[i] = 1.0f / (1 + i + node);
    }
    sent_messages = 0;
    sent_bytes = 0;
    ring_between_nodes(a.data(), n);
    ring_between_nodes(b.data(), n);
    for (int i = 0; i < n; i++) {
        float expected = 0;
        double sum = 0;
        for (int c = 0; c < nodes; c++) {
            expected += input(i, c);
            sum += 1.0f / (1 + i + c);
        }
        if (a[i] != expected) {
            error("%d nodes, %d numbers: index %d is %g, not %g: %s", nodes, n, i, a[i], expected,
                  explain(a[i], i).c_str());
        }
        if (!(std::fabs(b[i] - sum) <= 1e-6 * sum)) {
            error("%d nodes, %d numbers that are not whole: index %d is %.9g, not %.9g: is "
                  "something in it not a float?",
                  nodes, n, i, b[i], sum);
        }
    }
    const std::vector<float> own = b;
    from_node_0(b.data(), n * sizeof(float));
    if (n > 0 && memcmp(b.data(), own.data(), n * sizeof(float)) != 0) {
        error("%d nodes, %d numbers: the sum differs from node 0's in its bits: add in the "
              "same order everywhere",
              nodes, n);
    }
}

static void exercise_nodes() {
    const int most = 107768; // numbers
    if (nodes < 2 || nodes > 16) error("exercise judges on 2 to 16 nodes, not on %d", nodes);
    alarm(patience);
    for (int n : {0, 1, nodes - 1, nodes, nodes + 1, 1000, most}) judge_ring(n);
    double sent[] = {double(sent_messages), double(sent_bytes)}; // by both sums of the last call
    sum_over_nodes(sent, 2);
    alarm(0);
    const double messages = sent[0] / 2, bytes = sent[1] / 2;
    const int fewest = 2 * (nodes - 1), least = fewest * most * sizeof(float);
    if (messages < fewest || bytes < least) {
        error("only %.0f messages with %.0f bytes were counted, which cannot be all: add each send "
              "to sent_messages and sent_bytes",
              messages, bytes);
    }
    printf("ring_between_nodes: passed on %d nodes: %.0f messages, %.0f bytes for %d numbers; the "
           "optimum has %d and %d\n",
           nodes, messages, bytes, most, fewest, least);
}
