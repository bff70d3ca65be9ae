// What an allreduce does, one operation at a time. Device c begins with the number 8^c in every
// place, and after each operation all memory is read. So the octal digits of what is found there
// say how often each device's number is in it: 021 is gpu(0)'s number and twice gpu(1)'s. That is
// exact for 8 devices: 24 bits fit a float. Nothing is known here of any algorithm.
// Each operation ends before the next one is enqueued: a wait that is missing does no harm here.
// defines: worker::seen
#pragma once

namespace worker {

struct Bar { // a device's numbers; or a part of them that has come to the host
    int device, begin;
    const float *at;
    std::vector<float> numbers; // what was last found there
};
static struct Sight { // of the run that is watched
    const watch::Recorder *recorder;
    wire::Answer *answer;
    std::vector<Bar> bars;
    std::map<int, std::array<int, 3>> places; // of a message: from, to, numbers
} sight;

static int code_of(float x) { // -1: no sum of the devices' numbers
    return x >= 0 && x < 1 << 24 && x == std::floor(x) ? (int)x : -1;
}
static std::vector<float> read_numbers(int device, const void *at, int n) {
    std::vector<float> x(n);
    if (device < 0) memcpy(x.data(), at, n * sizeof(float));
    else CUDA_CHECK(cudaMemcpy(x.data(), at, n * sizeof(float), cudaMemcpyDeviceToHost));
    return x;
}
// x[begin] ... x[end - 1], of which x[0] lies at place `first`
static void add_spans(int row, bool carried, int device, const std::vector<float> &x, int begin,
                      int end, int first) {
    std::vector<wire::Span> &spans = sight.answer->spans;
    for (int i = begin; i < end; i++) {
        const int code = code_of(x[i]);
        if (i == begin || spans.back().code != code)
            spans.push_back({row, carried, device, first + i, 0, code});
        spans.back().length++;
    }
}
static void note_changes(int row, bool of_host = false) {
    for (Bar &bar : sight.bars) {
        if (of_host && bar.device >= 0) continue;
        const int n = bar.numbers.size();
        const std::vector<float> x = read_numbers(bar.device, bar.at, n);
        auto same = [&](int i) { return memcmp(&x[i], &bar.numbers[i], sizeof(float)) == 0; };
        for (int i = 0, j; i < n; i = j) {
            for (j = i + 1; j < n && same(j) == same(i); j++) {}
            if (!same(i)) add_spans(row, false, bar.device, x, i, j, bar.begin);
        }
        bar.numbers = x;
    }
}
static int place_of(const void *p) {
    for (const Bar &bar : sight.bars)
        if (const long i = (const float *)p - bar.at; i >= 0 && i < (long)bar.numbers.size())
            return bar.begin + i;
    return -1;
}
// What the host's memory has changed in since the last operation is the host's work
static void before_operation() { note_changes((int)sight.recorder->ops.size() - 2, true); }
static void after_operation() {
    const int row = sight.recorder->ops.size() - 1;
    const watch::Op &op = sight.recorder->ops[row];
    if (!op.works()) return;
    watch::wait_for_all(true);
    if (op.src != -2) {
        const int n = op.bytes / sizeof(float), from = place_of(op.from);
        add_spans(row, true, op.src, read_numbers(op.src, op.from, n), 0, n, std::max(0, from));
        // A part that the host has not had is the host's from now on
        auto has = [&](const Bar &bar) { return bar.device < 0 && bar.begin == from; };
        if (op.dst < 0 && from >= 0 && std::none_of(sight.bars.begin(), sight.bars.end(), has))
            sight.bars.push_back({-1, from, (const float *)op.to, std::vector<float>(n, NAN)});
        sight.places[row] = {from, place_of(op.to), n};
    }
    note_changes(row);
}
static void forget_host_memory(const void *p) {
    auto is_there = [&](const Bar &bar) { return bar.device < 0 && bar.at == p; };
    sight.bars.erase(std::remove_if(sight.bars.begin(), sight.bars.end(), is_there),
                     sight.bars.end());
}

static void seen(const wire::Request &r, wire::Answer &answer) {
    const int n = std::accumulate(r.sizes.begin(), r.sizes.end(), 0);
    const PerDevice grads = make_grads(r.k, r.sizes);
    watch::wait_for_all();
    const watch::Recorder recorder(false);
    sight = {&recorder, &answer, {}, {}};
    for (int c = 0; c < r.k; c++) {
        const std::vector<float> x(n, std::pow(8, c));
        CUDA_CHECK(
            cudaMemcpy(grads[c][0].ptr(), x.data(), n * sizeof(float), cudaMemcpyHostToDevice));
        sight.bars.push_back({c, 0, grads[c][0].ptr(), x});
    }
    watch::on_record = before_operation, watch::on_enqueued = after_operation;
    watch::on_free = forget_host_memory;
    sum_gradients(r.algorithm, grads);
    watch::on_record = watch::on_enqueued = nullptr, watch::on_free = nullptr;
    watch::wait_for_all();
    note_changes((int)recorder.ops.size() - 1);
    for (int c = 0; c < r.k; c++) answer.sums.push_back(sight.bars[c].numbers);
    answer.rows = rows_of(recorder);
    for (const auto &[row, place] : sight.places) {
        wire::Row &message = answer.rows[row];
        message.from = place[0], message.to = place[1], message.numbers = place[2];
    }
}

} // namespace worker
