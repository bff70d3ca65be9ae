// make check: each operator that a network has called, whoever wrote it, against itself.
// Its backward must give the slopes of its own forward, with the inputs that it has in the network.
// No operator is called by itself. If the images or some parameters move a little, the inputs and
// the result of each one move, too, and sum(dX * move of X) must be sum(dy * move of y) for any dy.
// defines: begin_again, host_waits, HostWaits, NetworksOperators
#pragma once
#include "reference.h"

// Running statistics begin again, equal on all devices.
static void begin_again() {
#ifdef NETWORKS
    reset_buffers();
#endif
}
static bool same_bits(const Flat &a, const Flat &b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}
static void host_waits() { // for all streams, the default ones, too
    const int before = watch::current;
    for (size_t c = 0; c < device_states.size(); c++) {
        CUDA_CHECK(cudaSetDevice(cuda_device(gpu(c))));
        CUDA_CHECK(cudaDeviceSynchronize());
    }
    CUDA_CHECK(cudaSetDevice(before));
}
// While it lives, a function is called before each launch; then the one before it again.
struct BeforeLaunch {
    void (*const before)();
    explicit BeforeLaunch(void (*call)()) : before(std::exchange(before_launch, call)) {}
    BeforeLaunch(const BeforeLaunch &) = delete;
    ~BeforeLaunch() { before_launch = before; }
};
// While it lives, and a Recorder, the host waits after each operation, so no wait is missing.
struct HostWaits {
    static inline bool now = false;
    HostWaits() { before_launch = watch::on_enqueued = host_waits, now = true; }
    HostWaits(const HostWaits &) = delete;
    ~HostWaits() { before_launch = watch::on_enqueued = nullptr, now = false; }
};
struct MgpusOperators { // while it lives, mgpu.cu's own run: tuned ones may be computed together
#ifdef FAST
    const Operators before = operators;
    MgpusOperators() { use_kernels("plain"); }
    ~MgpusOperators() { operators = before; }
#else
    MgpusOperators() {}
#endif
};

// A pass of the network and its loss: the operators on the tape, with the numbers of each
struct Pass {
    std::vector<Call> calls = {};
    std::vector<std::vector<Flat>> in = {}; // of each call, of each input
    std::vector<Flat> y = {};
    std::vector<TapeEntry> tape = {};
    std::vector<Tensor> params = {};
};
static Pass pass_of(const Tensor &X, const Tensor &labels, const std::vector<Tensor> &p) {
    Pass pass;
    begin_again();
    pass.params = p;
    pass.calls = calls_of(loss(net(X, p), labels));
    for (const Call &call : pass.calls) {
        pass.y.push_back(to_host(call.y));
        pass.in.emplace_back();
        for (const Tensor &t : call.inputs) pass.in.back().push_back(to_host(t));
    }
    std::swap(pass.tape, tapes[X.device.id]);
    return pass;
}

// Sees what each operation changes in memory that is allocated on gpu(0) while it lives.
struct Writes {
    struct Change {
        const float *begin, *end;
        size_t op;
        bool is_in(const Tensor &t) const { return begin < t.ptr() + size(t) && t.ptr() < end; }
    };
    std::vector<std::pair<const float *, Flat>> blocks = {}; // what was last found there
    std::vector<Change> changes = {};
    std::vector<size_t> on_tape = {}; // so many operators were there at each operation
    std::vector<watch::Stack> stacks = {};
    watch::Recorder recorder{false};
    static inline Writes *now = nullptr;
    static Flat numbers_at(const float *p, size_t n) {
        Flat numbers(n);
        CUDA_CHECK(cudaMemcpy(numbers.data(), p, n * sizeof(float), cudaMemcpyDeviceToHost));
        return numbers;
    }
    Writes() {
        empty_cache(); // so that results come into memory of their own
        now = this;
        watch::on_memory = [](const void *p, size_t bytes) {
            const auto *at = (const float *)p;
            if (bytes && watch::current == 0)
                now->blocks.emplace_back(at, numbers_at(at, bytes / sizeof(float)));
            for (size_t b = 0; b < now->blocks.size() && !bytes; b++)
                if (now->blocks[b].first == at) now->blocks.erase(now->blocks.begin() + b--);
        };
        before_launch = [] { now->operation_begins(now->recorder.ops.size()); };
        watch::on_record = [] {
            if (now->recorder.ops.back().from) now->operation_begins(now->recorder.ops.size() - 1);
            now->stacks.push_back(watch::call_stack());
            now->on_tape.push_back(tapes[0].size());
        };
        watch::on_enqueued = [] {
            if (now->recorder.ops.back().works()) now->find_changes(now->recorder.ops.size() - 1);
        };
    }
    Writes(const Writes &) = delete;
    ~Writes() {
        watch::on_memory = nullptr;
        before_launch = watch::on_record = watch::on_enqueued = nullptr;
    }
    // What a launch without LAUNCH has written belongs to the operator that has returned.
    void operation_begins(size_t op) {
        if (op > 0 && on_tape[op - 1] != tapes[0].size()) find_changes(op - 1);
    }
    void find_changes(size_t op) {
        host_waits();
        for (auto &[at, found] : blocks) {
            Flat is = numbers_at(at, found.size());
            if (memcmp(is.data(), found.data(), is.size() * sizeof(float)) == 0) continue;
            auto differs = [&](size_t i) { return watch::bits(is[i]) != watch::bits(found[i]); };
            for (size_t j = 0; j < is.size(); j++) {
                if (!differs(j)) continue;
                size_t last = j;
                for (size_t i = j; i < is.size() && i < last + 64; i++)
                    if (differs(i)) last = i;
                changes.push_back({at + j, at + last + 1, op});
                j = last;
            }
            found = std::move(is);
        }
    }
};

class NetworksOperators {
public:
    bool random = false;    // two passes differ
    bool differing = false; // even if `rng` begins alike, so that no slope can be seen

    // The images and labels are on gpu(0), the parameters on the host.
    NetworksOperators(const std::string &where, const Tensor &X, const Tensor &labels,
                      const std::vector<Tensor> &params)
        : where(where), X(X), labels(labels), params(params) {
        const HostIn watched(experiment.name);
        const std::vector<Tensor> p = get_params(params, gpu(0));
        Writes writes;
        stray.clear();
        seen = pass_of(X, labels, p);
        rng = begin;
        check_stray(where);
        for (const watch::Op &op : writes.recorder.ops)
            names.push_back(watch::kernel_name(op.name));
        stacks = writes.stacks, on_tape = writes.on_tape;
        in_place.resize(seen.calls.size());
        for (size_t i = 0; i < seen.calls.size(); i++) {
            auto is_finite = [](const Flat &x) {
                return std::all_of(x.begin(), x.end(), [](float a) { return std::isfinite(a); });
            };
            if (!is_finite(seen.y[i]) &&
                std::all_of(seen.in[i].begin(), seen.in[i].end(), is_finite))
                error(
                    "%sy is not finite, though its inputs are: does a kernel read what nothing has "
                    "written, leave a number out, or divide by 0?",
                    words(i).c_str());
            check_written_later(i, writes.changes);
            made_by.emplace_back();
            for (const Tensor &t : seen.calls[i].inputs) {
                made_by[i].push_back(-1);
                for (const auto &change : writes.changes)
                    if (change.is_in(t)) made_by[i].back() = change.op;
            }
        }
    }
    // Tell of an operator that is right only if the host waits after each operation; and of a
    // backward that is right at once, but not after all others, when free memory is overwritten.
    void check_waits_and_memory() {
        fill_free_memory(); // which has old results
        host_waits();
        watch::pause(stream_of(gpu(0)), 10);
        if (const Pass early = pass(); like(early))
            if (const size_t i = first_other(early); i < seen.y.size()) {
                watch::Recorder recorder(false);
                const HostWaits guard;
                if (const Pass waits = pass(); like(waits) && first_other(waits) == seen.y.size())
                    error("%sy is right only if the host waits after each operation: the stream "
                          "that computes it, or the next ones, waits for nobody (make_wait)",
                          words(i).c_str());
            }
        const std::string wrong = changed_backward(false);
        watch::Recorder recorder(false);
        const HostWaits guard;
        const std::string still = wrong.empty() ? "" : changed_backward(true);
        if (!wrong.empty()) error("%s", (still.empty() ? wrong : still).c_str());
    }
    // Tell of the first operator whose result is another in a second pass.
    void check_random() {
        Pass other = pass();
        differing = !like(other) || first_other(other) < seen.y.size();
        if (!differing) other = pass(true);
        random = differing || !like(other) || first_other(other) < seen.y.size();
        if (!random) return;
        const size_t i = like(other) ? first_other(other) : 0;
        const Flat &a = seen.y[i], &b = other.y[i];
        size_t j = 0;
        while (j + 1 < std::min(a.size(), b.size()) && a[j] == b[j]) j++;
        differs("random numbers",
                format("%sin two passes over the same minibatch y%s is %.6g and %.6g: it draws "
                       "random numbers%s",
                       words(i).c_str(), part_of(seen.calls[i].y.shape, {(int)j}).c_str(), a[j],
                       b[j], differing ? ", or keeps something from pass to pass" : ""));
    }
    // Compare each backward with the slopes of the result. Return whether all are right.
    bool check_slopes() {
        typedef std::map<std::pair<size_t, size_t>, std::string> Wrong; // by direction and call
        Wrong wrong;
        if (differing) return true;              // nobody knows
        for (double step : {1e-3, 3e-4, 1e-4}) { // a kink may lie on the way
            const bool first = step == 1e-3;
            if (!first && wrong.empty()) break;
            const Wrong before = std::exchange(wrong, {});
            base = pass();
            for (size_t direction : directions()) {
                const Pass plus = moved(direction, step), minus = moved(direction, -step);
                if (!like(base) || !like(plus) || !like(minus)) return true;
                for (size_t i = 0; i < base.calls.size(); i++)
                    if (first || before.count({direction, i}))
                        if (const std::string how = unlike(plus, minus, i, direction, first);
                            !how.empty())
                            wrong[{direction, i}] = how;
            }
        }
        for (const auto &[which, how] : wrong) {
            const size_t i = which.second;
            auto work = [&] { gradients(i, Flat(base.y[i].size(), 1)); };
            case_kernels.clear();
            const std::string kernels = how[0] == 'd' ? kernels_of(where, work) : ""; // of dX
            const bool known = std::includes(right_kernels.begin(), right_kernels.end(),
                                             case_kernels.begin(), case_kernels.end());
            differs(words(i), words(i) + how + (known ? "" : ": " + kernels));
        }
        return wrong.empty();
    }

private:
    std::string where;
    Tensor X, labels;
    std::vector<Tensor> params;
    MgpusOperators own;
    const std::mt19937 begin = rng;
    Pass seen, base;
    std::vector<std::string> names;        // of the operations of `seen`
    std::vector<watch::Stack> stacks;      // and where they were enqueued,
    std::vector<size_t> on_tape;           // while so many operators were on the tape
    std::vector<std::vector<int>> made_by; // of each input of each call: the last that wrote it; -1
    std::vector<bool> in_place;            // calls whose numbers are no longer there

    // Say how a gradient, to which a backward has added late, is not what it was at once, or "".
    static std::string changed(const Flat &at_once, const Flat &late, int before, bool waits) {
        double largest = 0;
        for (float x : at_once) largest = std::max(largest, (double)std::fabs(x));
        size_t wrong = 0, same = 0, first = 0;
        for (size_t j = at_once.size(); j-- > 0;) {
            auto is = [&](double x) { return std::fabs(late[j] - x) <= 1e-4 * largest + 1e-6; };
            same += is(at_once[j]);
            if (!is(at_once[j] + before)) wrong++, first = j;
        }
        if (wrong == 0) return "";
        if (same == at_once.size())
            return " is set by its backward, which must add to it, as other operators may use the "
                   "input, too";
        return format(
            " is %.6g at number %zu if its backward runs at once, but %.6g if it runs after "
            "those of the next operators: %s",
            at_once[first], first, late[first] - before,
            !waits ? "it is right if the host waits after each operation, so a wait is "
                     "missing"
            : std::isnan(late[first])
                ? "it reads memory that has been freed: does it keep an address (ptr()) "
                  "where it must keep a Tensor?"
                : "later calls change something that it uses, such as a static, or what a "
                  "lambda captures by reference");
    }
    // Run each backward when the next operator begins, and again as backward() does, after another
    // call of the network. Tell of the first one that gives something else then, or does not add.
    std::string changed_backward(bool waits) {
        static std::function<void()> run_new;
        std::map<size_t, std::vector<Flat>> at_once; // by the number on the tape
        bool running = false;
        auto any_dy = [](const TapeEntry &entry) {
            const Tensor dy = empty(entry.dy->shape, cpu());
            dice.seed(size(dy));
            for (int j = 0; j < size(dy); j++)
                dy.ptr()[j] = std::normal_distribution<float>()(dice);
            return copyto(dy, gpu(0));
        };
        run_new = [&] {
            host_waits();
            if (std::exchange(running, true)) return;
            for (size_t i = 0; i < seen.calls.size(); i++) {
                const size_t n = seen.calls[i].number;
                if (n >= tapes[0].size() || at_once.count(n)) continue;
                const TapeEntry entry = tapes[0][n];
                std::vector<std::shared_ptr<Tensor>> results = {entry.dy}; // whose gradients have
                for (const Tensor &t : entry.inputs)                       // no memory yet
                    if (t.grad && !t.grad->data) results.push_back(t.grad);
                prepare(entry, any_dy(entry));
                at_once[n] = run(i, entry);
                for (const auto &grad : results) grad->data = nullptr;
            }
            running = false;
        };
        std::vector<TapeEntry> tape;
        {
            const BeforeLaunch guard([] { run_new(); });
            tape = pass().tape;
        }
        pass();
        std::vector<Tensor> dys, fillers; // of free memory, so that no gradient gets it
        for (const TapeEntry &entry : tape)
            for (const Tensor &t : entry.inputs)
                for (int times = 0; times < 2; times++)
                    fillers.push_back(full(t.shape, NAN, gpu(0)));
        for (const TapeEntry &entry : tape) {
            dys.push_back(any_dy(entry));
            prepare(entry, full(entry.dy->shape, NAN, gpu(0)));
        }
        for (size_t i = seen.calls.size(); i-- > 0;) {
            const size_t n = seen.calls[i].number;
            tape.resize(std::min(tape.size(), n + 1));
            if (tape.size() <= n || !at_once.count(n)) continue;
            const TapeEntry entry = std::move(tape.back());
            tape.pop_back();
            if (!waits) watch::pause(stream_of(gpu(0)), 5);
            prepare(entry, dys[n], 1);
            fill_free_memory();
            const std::vector<Flat> now = run(i, entry), &right = at_once[n];
            for (size_t a = 0; a < now.size(); a++) { // an input may be the result, in place
                const bool adds = entry.inputs[a].grad != entry.dy;
                if (const std::string how = changed(right[a], now[a], adds, waits); !how.empty())
                    return words(i) + "d" + name_of(i, a) + how;
            }
        }
        return "";
    }

    std::string operation(size_t op) const { return names[op] + line_of(stacks[op]); }
    // operator 4 of the network, relu(X (2,20)) (mgpu.cu:178):
    std::string words(size_t i, bool with_line = true) const {
        const auto first = std::find(on_tape.begin(), on_tape.end(), seen.calls[i].number);
        const size_t op = first - on_tape.begin();
        Case c = {seen.calls[i].op, seen.calls[i].how, {}};
        for (const Tensor &t : seen.calls[i].inputs) c.shapes.push_back(t.shape);
        return format("%soperator %zu of the network, ", where.c_str(), i + 1) +
               in_words(c, with_line && op < stacks.size() ? line_of(stacks[op]) : "");
    }
    void check_written_later(size_t i, const std::vector<Writes::Change> &changes) {
        const Call &call = seen.calls[i];
        for (const auto &change : changes) {
            if (on_tape[change.op] <= call.number || !change.is_in(call.y)) continue;
            bool known = false; // an operator that works in place
            for (size_t j = i + 1; j < seen.calls.size(); j++)
                if (seen.calls[j].number == on_tape[change.op] && change.is_in(seen.calls[j].y))
                    known = in_place[i] = in_place[j] = true;
            if (!known)
                error("%sy has been changed since it returned, by %s, which is not on the tape: no "
                      "gradient goes through it",
                      words(i).c_str(), operation(change.op).c_str());
        }
    }
    // With `rng` as it was, unless it goes on
    Pass pass(bool goes_on = false, const Tensor &x = {}, const std::vector<Tensor> &moved = {}) {
        if (goes_on) rng.discard(1);
        const std::vector<Tensor> p = get_params(moved.empty() ? params : moved, gpu(0));
        Pass pass = pass_of(x.data ? x : X, labels, p);
        rng = begin;
        return pass;
    }
    bool like(const Pass &other) const { // has it the same operators?
        bool same = other.calls.size() == seen.calls.size();
        for (size_t i = 0; same && i < seen.calls.size(); i++)
            same = other.calls[i].op == seen.calls[i].op && other.y[i].size() == seen.y[i].size() &&
                   other.in[i].size() == seen.in[i].size();
        return same;
    }
    size_t first_other(const Pass &other) const { // the first call with another result
        size_t i = 0;
        while (i < seen.y.size() && same_bits(other.y[i], seen.y[i])) i++;
        return i;
    }

    // A direction is 0, the images; or 1 + a, the parameters that are input a of an operator; or
    // that of the parameters that are no operator's input.
    static constexpr size_t no_input = 100;
    size_t direction_of(size_t parameter) const {
        for (const Call &call : seen.calls)
            for (size_t a = 0; a < call.inputs.size(); a++)
                if (call.inputs[a].ptr() == seen.params[parameter].ptr()) return 1 + a;
        return no_input;
    }
    std::set<size_t> directions() const {
        std::set<size_t> all = {0};
        for (size_t i = 0; i < params.size(); i++) all.insert(direction_of(i));
        return all;
    }
    Pass moved(size_t direction, double step) {
        dice.seed(direction);
        auto move = [&](const Tensor &t) { // by so much of its size
            const Tensor to = copyto(t, cpu());
            double squares = 0;
            for (int j = 0; j < size(to); j++) squares += to.ptr()[j] * to.ptr()[j] / size(to);
            std::normal_distribution<double> normal;
            const double far = step * (squares ? std::sqrt(squares) : 1);
            for (int j = 0; j < size(to); j++) to.ptr()[j] += far * normal(dice);
            return to;
        };
        if (direction == 0) return pass(false, copyto(move(X), gpu(0)));
        std::vector<Tensor> p = params;
        for (size_t i = 0; i < p.size(); i++)
            if (direction_of(i) == direction) p[i] = move(p[i]);
        return pass(false, {}, p);
    }
    // Set dy, and all numbers of the gradients to which a backward adds.
    static void prepare(const TapeEntry &entry, const Tensor &dy, float before = 0) {
        for (const Tensor &t : entry.inputs)
            if (grad_ptr(t)) fill(*t.grad, before);
        if (!entry.dy->data) entry.dy->data = empty(entry.dy->shape, entry.dy->device).data;
        copyto(dy, *entry.dy);
    }
    // Run the backward of call i, which is this on the tape. Return the gradient of each input that
    // wants one, once of an input that is there twice.
    std::vector<Flat> run(size_t i, const TapeEntry &entry) {
        snprintf(last_words, sizeof last_words, "mgpu: %s" backward_fails, words(i, false).c_str());
        entry.grad_fn(*entry.dy);
        host_waits();
        *last_words = 0;
        std::set<const Tensor *> known;
        std::vector<Flat> all;
        for (const Tensor &t : entry.inputs) {
            const bool counts = t.grad && known.insert(t.grad.get()).second;
            all.push_back(counts ? to_host(*t.grad) : Flat());
        }
        return all;
    }
    std::vector<Flat> gradients(size_t i, const Flat &dy) {
        const TapeEntry &entry = base.tape[base.calls[i].number];
        const Tensor host = empty(entry.dy->shape, cpu());
        std::copy(dy.begin(), dy.end(), host.ptr());
        prepare(entry, copyto(host, gpu(0)));
        return run(i, entry);
    }
    std::string name_of(size_t i, size_t a) const {
        Case c = {seen.calls[i].op, {}, Shapes(seen.calls[i].inputs.size())};
        return arguments(c)[a];
    }
    // Say how the backward of a call is unlike the slopes of its result in this direction, or "".
    // What rounding may hide is taken for right `at_first`.
    std::string unlike(const Pass &plus, const Pass &minus, size_t i, size_t direction,
                       bool at_first) {
        const Call &call = base.calls[i];
        const Flat &y = base.y[i], &up = plus.y[i], &down = minus.y[i];
        size_t input = no_input; // that moves
        for (size_t a = 0; a < call.inputs.size(); a++) {
            if (plus.in[i][a] == minus.in[i][a]) continue;
            if (call.inputs[a].grad) {
                if (input == no_input || direction == 1 + a) input = a;
            } else if (direction == 0) {
                return "";
            } else if (made_by[i][a] >= 0) {
                return name_of(i, a) +
                       " depends on the parameters, but has no gradient, as it was "
                       "written by " +
                       operation(made_by[i][a]) + ", which is not on the tape";
            }
        }
        if (input == no_input)
            return up == down ? ""
                              : "y depends on parameters that are not among the inputs which it "
                                "gives to add_to_tape";
        double largest = 0;
        for (float number : y) largest = std::max(largest, (double)std::fabs(number));
        if (in_place[i] || !std::isfinite(largest)) return "";
        std::string how;
        for (bool masked : {false, true}) { // the second time without numbers that passed a kink
            double errors = 0, slopes = 0, roundings = 0, product = 0, squares = 0, products = 0;
            size_t left = 0, untouched = no_input;
            for (int trial = 0; trial < 3; trial++) {
                Flat dy;
                double want = 0, got = 0;
                for (size_t j = 0; j < y.size(); j++) {
                    const double move = (double)up[j] - down[j],
                                 bend = (double)up[j] + down[j] - 2. * y[j];
                    const bool kink = std::fabs(bend) > 0.05 * std::fabs(move) + 1e-6 * largest;
                    dy.push_back(masked && kink ? 0 : std::normal_distribution<float>()(dice));
                    left += dy[j] != 0;
                    want += dy[j] * move;
                    slopes += dy[j] * move * dy[j] * move;
                    roundings += std::pow(dy[j] * 5e-7 * largest, 2);
                }
                const std::vector<Flat> g = gradients(i, dy);
                for (size_t a = 0; a < g.size(); a++) {
                    for (size_t j = 0; j < g[a].size(); j++)
                        got += g[a][j] * ((double)plus.in[i][a][j] - minus.in[i][a][j]);
                    const bool zero = std::count(g[a].begin(), g[a].end(), 0) == (long)g[a].size();
                    if (zero && !g[a].empty() && plus.in[i][a] != minus.in[i][a]) untouched = a;
                }
                errors += (got - want) * (got - want);
                product += got * want, squares += want * want, products += got * got;
            }
            const double error = std::sqrt(errors), rounding = at_first ? std::sqrt(roundings) : 0;
            const bool same = error <= 3e-3 * std::sqrt(slopes) + rounding;
            if (same && left >= 3 * y.size() / 10) return "";
            if (masked) break;
            const double ratio = product / squares;
            how = "d" + name_of(i, input) + " is not the slope of its y";
            if (untouched != no_input)
                how = "d" + name_of(i, untouched) + " is 0, but not the slope of its y";
            else if (products - ratio * product <= 0.01 * errors)
                how = "d" + name_of(i, input) + format(" is %.3g times the slope of its y", ratio);
        }
        return how;
    }
};
