// Part of the judge: what an allreduce does on 2 to 8 devices, beside the other algorithms, as JSON
// for show.html. What moved where and when comes from the worker (extras/lab/whose_numbers.h);
// what it would take, for as many bytes as MODEL's gradients have, from those same operations
// (extras/lab/fabric.h).
// defines: show
#pragma once
#include "fabric.h"

// "text" in JSON, and in HTML
static std::string quoted(const std::string &text) {
    std::string quoted = "\"";
    for (unsigned char c : text)
        quoted +=
            c < ' ' || c == '<' || c == '"' || c == '\\' ? format("\\u%04x", c) : std::string(1, c);
    return quoted + "\"";
}
// [one,another,...]
template <class List, class Text> static std::string array(const List &list, Text text) {
    std::string all;
    for (const auto &x : list) all += (all.empty() ? "" : ",") + text(x);
    return "[" + all + "]";
}

static std::vector<fabric::Op> operations(const std::vector<wire::Row> &rows) {
    std::vector<fabric::Op> ops;
    int waited = -1;
    for (const wire::Row &row : rows) {
        fabric::Op op = {};
        op.kind = row.kind == 2   ? fabric::Op::wait
                  : row.kind == 1 ? fabric::Op::message
                                  : fabric::Op::kernel;
        op.lane = row.stream, op.after = row.after, op.device = row.device, op.calls = 1;
        op.seconds = -1;
        if (row.kind == 1) op.src = row.src, op.dst = row.dst;
        if (row.kind != 2) op.bytes = row.bytes;
        set_host_part(op, row.name, waited);
        ops.push_back(op);
    }
    return ops;
}

// {messages, rounds, busiest, right, us: [of each fabric], ops: [[round, [src, dst, from, to,
// numbers] or 0, carried, changes, [begin, end of the first fabric, ...]], ...]}, with carried and
// changes [[device, begin, length, code], ...]
static std::string shown(const Answer &answer, int k, const std::vector<fabric::Fabric> &fabrics,
                         double scale, bool &right) {
    const wire::Traffic t(answer.rows);
    const int n = total(limits::shown), sum = ((1L << 3 * k) - 1) / 7; // once each device's
    std::vector<std::vector<int>> last(k, std::vector<int>(n));        // codes
    for (int c = 0; c < k; c++) last[c].assign(n, 1 << 3 * c);
    std::map<int, std::vector<wire::Span>> spans[2]; // of each operation: changed, carried
    for (const wire::Span &s : answer.spans) {
        if (s.begin < 0 || s.length < 0 || s.length > n - s.begin || s.device >= k)
            throw Verdict("its reply is malformed");
        spans[s.carried != 0][s.row].push_back(s);
        if (!s.carried && s.device >= 0)
            std::fill_n(last[s.device].begin() + s.begin, s.length, s.code);
    }
    right = last == std::vector<std::vector<int>>(k, std::vector<int>(n, sum));
    std::vector<std::vector<fabric::Op>> timed;
    for (const fabric::Fabric &f : fabrics)
        simulate(timed.emplace_back(operations(answer.rows)), f, scale);
    auto us = [](double seconds) { return format("%.4g", 1e6 * seconds); };
    std::vector<double> ends(fabrics.size());
    std::string ops;
    for (int i = -1; i < (int)answer.rows.size(); i++) {
        for (size_t f = 0; f < fabrics.size() && i >= 0; f++)
            ends[f] = std::max(ends[f], timed[f][i].end);
        const bool message = i >= 0 && answer.rows[i].kind == 1;
        if (!message && spans[0][i].empty()) continue;
        auto span = [](const wire::Span &s) {
            return format("[%d,%d,%d,%d]", s.device, s.begin, s.length, s.code);
        };
        const wire::Row row = i < 0 ? wire::Row{} : answer.rows[i];
        const std::string what =
            format("[%d,%d,%d,%d,%d]", row.src, row.dst, row.from, row.to, row.numbers);
        auto times = [&](const std::vector<fabric::Op> &of) {
            return us(i < 0 ? 0 : of[i].begin) + "," + us(i < 0 ? 0 : of[i].end);
        };
        ops += format("%s[%d,%s,", ops.empty() ? "" : ",", row.steps, message ? &what[0] : "0") +
               array(spans[1][i], span) + "," + array(spans[0][i], span) + "," +
               array(timed, times) + "]";
    }
    return format(
               "{\"messages\":%ld,\"rounds\":%ld,\"busiest\":%ld,\"right\":%s,\"us\":", t.messages,
               t.steps, t.busiest() / (long)sizeof(float), right ? "true" : "false") +
           array(ends, us) + ",\"ops\":[" + ops + "]}";
}

// To the file options.show: {model, bytes, sizes, names, fabrics, first: [name, k], runs: {name:
// {k: what stands above, or {error}}}}
static void show() {
    options.gpus = limits::shown_devices;
    const Answer of = greet();
    std::vector<fabric::Fabric> fabrics = fabric::fabrics;
    if (!options.fabric.empty())
        fabrics.insert(fabrics.begin(), fabric::find_fabric(options.fabric));
    if (fabrics[0].name.empty()) {
        std::vector<std::string> known;
        for (const fabric::Fabric &f : fabric::fabrics) known.push_back(f.name);
        throw Verdict("FABRIC=" + options.fabric + " is unknown: choose one of " + listed(known));
    }
    const long bytes = sizeof(float) * total(limits::gradients(options.model));
    const double scale = (double)bytes / (sizeof(float) * total(limits::shown));
    std::string runs;
    std::vector<int> right, wrong; // numbers of devices of the algorithm that is looked at
    // This one, then the others up to yours: what stands behind it are other words, or one's own
    auto index = [&](const std::string &name) {
        return std::find(of.names.begin(), of.names.end(), name) - of.names.begin();
    };
    const size_t mine = index(options.allreduce), yours = index("yours");
    if (mine == of.names.size())
        throw Verdict("ALLREDUCE=" + options.allreduce + " is unknown: choose one of " +
                      listed(of.names));
    if (options.given == 1 || options.given > limits::shown_devices)
        throw Verdict(format("make show takes 2 to %d devices, not %d", limits::shown_devices,
                             options.given));
    std::vector<size_t> order = {mine};
    for (size_t i = 0; i <= yours && i < of.names.size(); i++)
        if (i != mine) order.push_back(i);
    for (size_t i : order) {
        const std::string &name = of.names[i];
        std::string all;
        int late = 0;
        for (int k = 2; k <= limits::shown_devices; k++) {
            if (!(of.meant.at(i) >> k & 1) || late == 2) continue;
            Request r;
            r.what = wire::show, r.k = k, r.algorithm = name, r.sizes = limits::shown;
            bool is_right = false;
            std::string run;
            try {
                run = shown(ask(r), k, fabrics, scale, is_right);
            } catch (const Verdict &v) {
                worker.reset();
                late += v.kind == timeout;
                quiet = true;
                run = "{\"error\":" + quoted(v.what()) + "}";
            }
            if (i == mine) (is_right ? right : wrong).push_back(k);
            all += format("%s\"%d\":", all.empty() ? "" : ",", k) + run;
        }
        if (!all.empty()) runs += (runs.empty() ? "\n" : ",\n") + quoted(name) + ":{" + all + "}";
    }
    const std::vector<std::string> tensors = {"W1", "b1", "W2", "b2", "W3", "b3", "W4", "b4"};
    FILE *file = fopen(options.show.c_str(), "w");
    if (!file) throw Verdict("cannot write " + options.show);
    fprintf(file,
            "{\"model\":%s,\"bytes\":%ld,\"sizes\":%s,\"names\":%s,\"fabrics\":%s,"
            "\"first\":[%s,%d],\"runs\":{%s}}\n",
            quoted(options.model).c_str(), bytes,
            array(limits::shown, [](int n) { return std::to_string(n); }).c_str(),
            array(tensors, quoted).c_str(),
            array(fabrics, [](const fabric::Fabric &f) { return quoted(f.name); }).c_str(),
            quoted(options.allreduce).c_str(),
            options.given   ? options.given
            : wrong.empty() ? 4
                            : wrong[0],
            runs.c_str());
    if (ferror(file) | fclose(file)) throw Verdict("cannot write " + options.show);
    printf("%s, one operation after another: ", options.allreduce.c_str());
    if (!right.empty()) printf("right sums on %s", devices(right).c_str());
    if (!wrong.empty()) printf("%sWRONG on %s", right.empty() ? "" : ", ", devices(wrong).c_str());
    puts(wrong.empty() ? "; a missing wait does not show here, but in make race" : "");
}
