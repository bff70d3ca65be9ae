// make check, its first part: autograd with an operator of its own; then every operator alone,
// forward and backward, against the same in double (../reference.h).
// defines: compare, Case, in_double, check_operators
#pragma once
#include "../reference.h"
#include "../watch/called_operators.h"
#include "differences.h"

typedef std::vector<std::vector<int>> Shapes;
static std::mt19937 dice; // of inputs: main's rng is the training's

// --- what wrong numbers look like

// The smallest part that holds all these elements, as NumPy would cut it out: [1:3,:,0]
static std::string part_of(const std::vector<int> &shape, const std::vector<int> &elements) {
    std::string text;
    int stride = std::accumulate(shape.begin(), shape.end(), 1, std::multiplies<int>());
    for (int length : shape) {
        int first = length, last = 0;
        stride /= length;
        for (int e : elements) {
            first = std::min(first, e / stride % length);
            last = std::max(last, e / stride % length);
        }
        text += text.empty() ? "[" : ",";
        if (first == last) text += std::to_string(first);
        else if (first == 0 && last == length - 1) text += ":";
        else text += format("%d:%d", first, last + 1);
    }
    return text + "]";
}
// Return whether `got`, a tensor of that name and shape, is `want`, or say where it differs. The
// largest number that is wanted is the unit.
static bool compare(const std::string &where, const std::string &name,
                    const std::vector<int> &shape, const Flat &got, const Doubles &want,
                    double tolerance, const std::function<std::string()> &look_of) {
    std::vector<int> wrong;
    double largest = 0;
    for (double w : want) largest = std::max(largest, std::fabs(w));
    for (size_t i = 0; i < want.size(); i++)
        if (!(std::fabs(got[i] - want[i]) <= tolerance * largest)) wrong.push_back(i);
    if (wrong.empty()) return true;
    const int i = wrong[0];
    const std::string look = look_of();
    const Candidate right = {"the right ones", Flat(want.begin(), want.end())};
    const std::string same = wrong.size() > 1 ? equals(got, wrong, {right}) : "";
    differs(look, format("%s%s%s is %.6g, not %.6g (%zu of %zu numbers are wrong, in %s%s%s): %s",
                         where.c_str(), name.c_str(), part_of(shape, {i}).c_str(), got[i], want[i],
                         wrong.size(), want.size(), name.c_str(), part_of(shape, wrong).c_str(),
                         same.empty() ? "" : (", all of them " + same).c_str(), look.c_str()));
    return false;
}

static bool compare(const std::string &where, const std::string &name,
                    const std::vector<int> &shape, const Flat &got, const Doubles &want,
                    double tolerance, const std::string &look) {
    return compare(where, name, shape, got, want, tolerance, [=] { return look; });
}

// --- the operators in double

struct Case {
    std::string op;
    std::vector<int> how;       // as in Call
    Shapes shapes;              // of the arguments
    double scale = 1, mean = 0; // of the first one's numbers
    bool whole = false;         // they are whole: some are equal
};
// Return the result of the operator, and then the gradients of its inputs.
static Arrays in_double(const Case &c, const Arrays &in, const Doubles &dy = {}) {
    const std::vector<int> &X = c.shapes[0];
    if (c.op == "relu") return reference::relu(in, dy);
    if (c.op == "add") return reference::add(in, dy);
    if (c.op == "linear") return reference::linear(in, dy);
    if (c.op == "softmax_cross_entropy") return reference::softmax_cross_entropy(X[1], in, dy);
    const int N = X[0], C = X[1], H = X[2], W = X[3];
    if (c.op == "avg_pool2d") return reference::avg_pool2d({N, C, H, W, c.how[0]}, in, dy);
    if (c.op == "max_pool2d") return reference::max_pool2d({N, C, H, W, c.how[0]}, in, dy);
    if (c.op == "conv2d") {
        const int O = c.shapes[1][0], K = c.shapes[1][2];
        return reference::conv2d({N, C, H, W, O, K, c.how[0], c.how[1]}, in, dy);
    }
    if (recording) return reference::batch_norm(H * W, in, dy);
    return {reference::normalize(in[0], in[1], in[2], in[3], in[4], H * W)};
}

// --- what they are called, and where their code is

static Tensor call(const Case &c, const std::vector<Tensor> &in) {
    const HostIn watched(c.op);
    if (c.op == "linear") return linear(in[0], in[1], in[2]);
    if (c.op == "softmax_cross_entropy") return softmax_cross_entropy(in[0], in[1]);
    if (c.op == "relu") return relu(in[0]);
#ifdef NETWORKS
    if (c.op == "conv2d" && c.how != std::vector<int>{1, 0})
        return conv2d(in[0], in[1], in[2], c.how[0], c.how[1]);
    if (c.op == "batch_norm") return batch_norm(in[0], in[1], in[2], in[3], in[4]);
    if (c.op == "add") return add(in[0], in[1]);
    if (c.op == "max_pool2d") return max_pool2d(in[0], c.how[0], c.how[0]);
#endif
    if (c.op == "conv2d") return conv2d(in[0], in[1], in[2]);
    return avg_pool2d(in[0], c.how[0], c.how[0]);
}
static std::vector<std::string> arguments(const Case &c) {
    if (c.op == "batch_norm") return {"X", "gamma", "beta", "running_mean", "running_var"};
    if (c.op == "softmax_cross_entropy") return {"y_hat", "y"};
    if (c.op == "add") return {"A", "B"};
    if (c.op == "conv2d" || c.op == "linear") return {"X", "W", "b"};
    std::vector<std::string> names = {"X"}; // of an operator that is not mgpu.cu's
    for (size_t i = 2; i <= c.shapes.size(); i++) names.push_back(format("(input %zu)", i));
    return names;
}
// conv2d(X (3,2,6,5), W (4,2,3,3), b (4), 1, 0):
static std::string in_words(const Case &c, const std::string &line = "") {
    std::string text;
    for (size_t i = 0; i < c.shapes.size(); i++)
        text += (i ? ", " : "") + arguments(c)[i] + " " + str(c.shapes[i]);
    if (!c.how.empty() && c.op == "conv2d")
        text += format(", stride %d, padding %d", c.how[0], c.how[1]);
    else if (c.op == "avg_pool2d" || c.op == "max_pool2d")
        text += format(", %d, %d", c.how[0], c.how[0]);
    return c.op + "(" + text + (c.whole ? "), of whole numbers" : ")") + line + ": ";
}

static void check_stray(const std::string &who) { // since `stray` was cleared
    if (!stray.empty())
        error("%s%s is launched on the default stream, or on another that waits for nobody: its "
              "fourth argument must be stream_of(...)",
              who.c_str(), stray[0].c_str());
}
// The kernels that `work` launches, which must be on the stream of their device.
static std::set<std::string> right_kernels; // of operators that are right
static std::set<std::string> case_kernels;  // of the operator that is being checked
static std::string kernels_of(const std::string &who, const std::function<void()> &work) {
    stray.clear();
    watch::Recorder recorder(false);
    work();
    check_stray(who);
    std::string unknown, all;
    for (const std::string &name : launched(recorder.ops)) {
        case_kernels.insert(name);
        all += (all.empty() ? "" : ", ") + name;
        if (!right_kernels.count(name)) unknown += (unknown.empty() ? "" : ", ") + name;
    }
    return all.empty() ? "no kernel computes it"
                       : "it is computed by " + (unknown.empty() ? all : unknown);
}
// --- one at a time

// Where they run: what is launched on gpu(0) whatever the device is found
static Device last() { return gpu(option("GPUS") - 1); }
// Its stream stands still for a while: a kernel on another one, or before a wait, is early
static void pause_stream(Device d) { watch::pause(stream_of(d), 1); }

static bool wants_grad(const Case &c, size_t a) { // labels and running statistics do not
    const std::string name = arguments(c)[a];
    return name != "y" && name.compare(0, 7, "running") != 0;
}
static std::vector<Tensor> inputs_of(const Case &c) { // on the host
    std::vector<Tensor> in;
    for (size_t a = 0; a < c.shapes.size(); a++) {
        Tensor t = empty(c.shapes[a], cpu());
        const std::string name = arguments(c)[a];
        for (int i = 0; i < size(t); i++)
            t.ptr()[i] = name == "y" ? dice() % c.shapes[0][1]
                         : name == "running_var" || name == "gamma"
                             ? std::uniform_real_distribution<float>(0.5f, 2)(dice)
                         : a ? std::normal_distribution<float>()(dice)
                             : std::normal_distribution<float>(c.mean, c.scale)(dice);
        for (int i = 0; c.whole && i < size(t); i++) t.ptr()[i] = std::round(t.ptr()[i]);
        in.push_back(t);
    }
    return in;
}
static Arrays all_in_double(const std::vector<Tensor> &in) {
    Arrays numbers;
    for (const Tensor &t : in) {
        const Flat f = to_host(t);
        numbers.emplace_back(f.begin(), f.end());
    }
    return numbers;
}
constexpr double float_error = 1e-4;
#define backward_fails "its backward fails: does a lambda have [&] in place of [=]?\n"

static void check_case(const Case &c) {
    case_kernels.clear();
    const std::string where = in_words(c);
    const std::vector<Tensor> host = inputs_of(c);
    const Arrays in = all_in_double(host);
    pause_stream(last());
    std::vector<Tensor> p = get_params(host, last());
    for (size_t a = 0; a < p.size(); a++)
        if (!wants_grad(c, a)) p[a].grad = nullptr;
    const Doubles want = in_double(c, in)[0];
    auto &tape = tapes[last().id];
    tape.clear();
    Tensor y;
    const std::string kernels = kernels_of(where, [&] {
        y = call(c, p);
        y.ptr(); // what waits to be fused is launched
    });
    for (size_t a = 0; a < p.size(); a++) {
        if (y.ptr() >= p[a].ptr() && y.ptr() < p[a].ptr() + size(p[a]))
            error("%sthe result shares the memory of %s", where.c_str(), arguments(c)[a].c_str());
        if (y.grad && y.grad == p[a].grad)
            error("%sthe result shares the gradient of %s", where.c_str(), arguments(c)[a].c_str());
    }
    if (y.device.id != last().id)
        error("%sthe result is on %s, but its inputs are on %s", where.c_str(),
              str(y.device).c_str(), str(last()).c_str());
    if (size(y) != (int)want.size() || y.shape[0] != c.shapes[0][0])
        error("%sthe result has shape %s, but must have %zu numbers for %d samples", where.c_str(),
              str(y.shape).c_str(), want.size(), c.shapes[0][0]);
    // Backward with weights for dy
    Doubles weight;
    Tensor w = empty(y.shape, cpu());
    for (int i = 0; i < size(w); i++) {
        w.ptr()[i] = std::normal_distribution<float>()(dice);
        weight.push_back(w.ptr()[i]);
    }
    w = copyto(w, last());
    Arrays right = recording ? in_double(c, in, weight) : Arrays();
    auto weighted = [w](const std::vector<Tensor> &ys) { // whose gradients become w
        return add_to_tape("make check", empty({1}, last()), ys, [=](const Tensor &) {
            for (const Tensor &t : ys) {
                grad_ptr(t);
                copyto(w, *t.grad);
            }
        });
    };
    auto with_backward = [&] { // of an unusual y
        bool usual = recording && y.grad && !tape.empty();
        if (usual) backward(weighted({y}));
        for (size_t a = 0; a < p.size() && usual; a++) {
            const Flat got = wants_grad(c, a) ? to_host(gradient(p[a])) : Flat();
            for (size_t j = 0; j < got.size(); j++)
                usual = usual && std::fabs(got[j] - right[a + 1][j]) <= float_error;
        }
        return kernels + (usual ? "; its backward fits the usual y, not this one" : "");
    };
    const bool usual = compare(where, "y", y.shape, to_host(y), want, float_error, with_backward);
    if (c.op == "batch_norm" && recording) {
        const auto [mean, var] =
            reference::moments(in[0], c.shapes[0][1], c.shapes[0][2] * c.shapes[0][3]);
        const double n = in[0].size() / mean.size();
        Doubles right[2];
        for (size_t i = 0; i < mean.size(); i++) {
            right[0].push_back(0.9 * in[3][i] + 0.1 * mean[i]);
            right[1].push_back(0.9 * in[4][i] + 0.1 * var[i] * n / (n - 1));
        }
        for (int i : {0, 1})
            compare(where, arguments(c)[3 + i], p[3].shape, to_host(p[3 + i]), right[i],
                    float_error, "it must be 0.9 of the old value and 0.1 of the new one");
    }
    if (!recording) {
        if (!tape.empty())
            error("%sit is on the tape in spite of NoGrad: look at add_to_tape", where.c_str());
        return;
    }
    if (!usual) { // its slopes are others, too: see slopes.h
        tape.clear();
        return;
    }
    if (!y.grad || tape.empty())
        error("%sits backward is not on the tape: look at add_to_tape", where.c_str());
    for (size_t a = 0; a < p.size(); a++) {
        bool told = !p[a].grad;
        for (const TapeEntry &entry : tape)
            for (const Tensor &X : entry.inputs) told = told || X.grad == p[a].grad;
        if (!told)
            error("%s%s is not among the inputs that it gives to add_to_tape, so OVERLAP does not "
                  "wait for its gradient",
                  where.c_str(), arguments(c)[a].c_str());
    }
    auto kernels_for = [&](size_t a) { // launched if only this argument wants a gradient
        std::vector<Tensor> q = get_params(host, last());
        for (size_t b = 0; b < q.size(); b++)
            if (b != a) q[b].grad = nullptr;
        const Tensor l = weighted({call(c, q)});
        return kernels_of(where, [&] { backward(l); });
    };
    for (int uses : {1, 2}) { // of y
        if (uses > 1) y = call(c, p);
        for (const Tensor &t : p)
            if (t.grad) fill(*t.grad, 0);
        const Tensor l = weighted({y, uses == 2 ? call(c, p) : y});
        pause_stream(last());
        snprintf(last_words, sizeof last_words, "mgpu: %s" backward_fails, where.c_str());
        kernels_of(where, [&] { backward(l); });
        waitall();
        *last_words = 0;
        for (size_t a = 0; a < p.size(); a++) {
            if (!wants_grad(c, a)) continue;
            for (double &x : right[a + 1]) x *= uses;
            auto look = [&] {
                return kernels_for(a) + (uses == 1 ? ""
                                                   : "; used once it is right: does it add (+=) to "
                                                     "the gradient, and keep nothing (a static)?");
            };
            if (!compare(where + (uses == 1 ? "" : "with y used twice: "), "d" + arguments(c)[a],
                         c.shapes[a], to_host(gradient(p[a])), right[a + 1], float_error, look))
                return;
        }
    }
    right_kernels.insert(case_kernels.begin(), case_kernels.end());
}

// Elementwise work in place: the last block has threads beyond the end
static void check_in_place() {
    const HostIn watched("add_ or full");
    const int n = 704; // a multiple of 256 bytes: emulated devices see each access beyond that
    const Tensor a = arange(n);
    Doubles want;
    for (int i = 0; i < n; i++) want.push_back(2 * i);
    pause_stream(last());
    const Tensor sum = copyto(a, last());
    add_(sum, copyto(a, last()));
    compare("add_: ", "a", {n}, to_host(sum), want, 0, "it is computed by add_kernel");
    compare("full: ", "t", {n}, to_host(full({n}, 3, last())), Doubles(n, 3), 0,
            "it is computed by fill_kernel");
}
// What get_params makes of parameters on the host: copies on d, whose gradients are 0 at first and
// lie one behind the other
static void check_replica(const std::vector<Tensor> &host, const std::vector<std::string> &names,
                          const std::vector<Tensor> &p, Device d) {
    if (p.size() != host.size())
        error("get_params: it returns %zu parameters, not %zu", p.size(), host.size());
    const float *next = nullptr; // behind the last gradient
    for (size_t i = 0; i < p.size(); i++) {
        const std::string who = names[i] + " of " + str(d);
        if (p[i].device.id != d.id || p[i].shape != host[i].shape)
            error("get_params: %s has shape %s and is on %s, but on the host it has %s",
                  who.c_str(), str(p[i].shape).c_str(), str(p[i].device).c_str(),
                  str(host[i].shape).c_str());
        compare("get_params: ", who, p[i].shape, to_host(p[i]), all_in_double({host[i]})[0], 0,
                "it must be a copy of the host's: look at get_params and copyto");
        if (!p[i].grad)
            error("attach_grad: %s has no gradient: does get_params call attach_grad?",
                  who.c_str());
        const Tensor &g = *p[i].grad;
        if (g.device.id != d.id || size(g) != size(p[i]))
            error("attach_grad: the gradient of %s has shape %s on %s, unlike its parameter",
                  who.c_str(), str(g.shape).c_str(), str(g.device).c_str());
        compare("attach_grad: ", "the gradient of " + who, g.shape, to_host(g), Doubles(size(g), 0),
                0, "it must start as 0");
        if (next && g.ptr() != next)
            error("attach_grad: the gradients are not contiguous: at which index of `all` does "
                  "that of %s begin (begin = end)?",
                  who.c_str());
        next = g.ptr() + size(g);
    }
}
// An operator of our own, y = factor * X, whose backward adds dy so many times
static Tensor times(int factor, const Tensor &X) {
    return add_to_tape("times", empty(X.shape, X.device), {X}, [=](const Tensor &dy) {
        if (!dy.data)
            error("backward: it runs an entry of the tape whose result l does not depend on: its "
                  "gradient has no memory");
        grad_ptr(X);
        for (int i = 0; i < factor; i++) add_(*X.grad, dy);
    });
}
static void check_autograd() {
    const HostIn watched("get_params, add_to_tape or backward");
    const int n = 300;
    const std::vector<Tensor> host = {arange(n), arange(n), arange(7)};
    const std::vector<Tensor> p = get_params(host, last());
    check_replica(host, {"W", "X", "b"}, p, last());
    const Tensor &W = p[0], &X = p[1];
    auto &tape = tapes[last().id];
    auto gradient_is = [&](float want, const Tensor &l, const char *how, const char *look) {
        backward(l);
        compare(format("autograd, %s: ", how), "dX", {n}, to_host(gradient(X)), Doubles(n, want), 0,
                look + place("backward", "l.grad->data"));
        if (!tape.empty())
            error("backward leaves %zu entries on the tape, but must take each off", tape.size());
    };
    gradient_is(2, times(2, X), "y = 2X, backward(y)", "it must begin with 1 for each number of l");
    zero_grad({p});
    gradient_is(2, times(2, X), "y = 2X after zero_grad", "zero_grad must set all gradients to 0");
    zero_grad({p});
    gradient_is(6, times(3, times(2, X)), "y = 3(2X)", "the last entry of the tape must run first");
    zero_grad({p});
    times(4, W); // does not count, nor does the next one
    times(4, X);
    gradient_is(2, times(2, X), "y = 2X, after a 4X that y does not depend on",
                "an entry whose gradient has no memory must not run");
    compare("autograd, of a W that l does not depend on: ", "dW", {n}, to_host(gradient(W)),
            Doubles(n, 0), 0, "it must stay 0" + place("backward", "entry.grad_fn"));
    {
        NoGrad guard;
        if (times(2, X).grad || !tape.empty())
            error("NoGrad: an operator's result has a gradient, or is on the tape: look at "
                  "NoGrad and add_to_tape (recording)");
    }
    if (!recording) error("NoGrad: recording is still off after it: look at ~NoGrad");
}
static const std::vector<Case> cases = {
    {"relu", {}, {{704}}},
    {"softmax_cross_entropy", {}, {{5, 10}, {5}}},
    {"softmax_cross_entropy", {}, {{96, 8}, {96}}}, // more than one block
    {"softmax_cross_entropy", {}, {{5, 10}, {5}}, 1e4},
    {"softmax_cross_entropy", {}, {{5, 10}, {5}}, 1, -200},
    {"avg_pool2d", {2}, {{2, 3, 9, 12}}}, // a row is left over
    {"avg_pool2d", {3}, {{3, 5, 8, 9}}},
    {"linear", {}, {{5, 3}, {3, 2}, {2}}},
    {"linear", {}, {{35, 11}, {11, 41}, {41}}},
    {"conv2d", {1, 0}, {{3, 2, 6, 5}, {4, 2, 3, 3}, {4}}},
    {"conv2d", {1, 0}, {{2, 3, 9, 8}, {35, 3, 2, 2}, {35}}},
#ifdef NETWORKS
    {"add", {}, {{3, 7, 25}, {3, 7, 25}}},
    {"max_pool2d", {2}, {{2, 3, 9, 12}}},
    {"max_pool2d", {3}, {{3, 5, 8, 9}}},
    {"max_pool2d", {2}, {{2, 3, 9, 12}}, 1, 0, true}, // of several largest ones the first counts
    {"conv2d", {1, 1}, {{2, 2, 6, 7}, {3, 2, 3, 3}, {3}}},
    {"conv2d", {2, 1}, {{2, 2, 7, 6}, {3, 2, 3, 3}, {3}}},
    {"conv2d", {2, 0}, {{2, 3, 7, 5}, {2, 3, 1, 1}, {2}}},
    {"batch_norm", {}, {{3, 2, 4, 5}, {2}, {2}, {2}, {2}}},
    {"batch_norm", {}, {{3, 3, 11, 9}, {3}, {3}, {3}, {3}}, 0.01}, // eps counts
    {"batch_norm", {}, {{3, 2, 4, 5}, {2}, {2}, {2}, {2}}, 1, 100},
#endif
};
void check_operators() {
    dice.seed(1);
    kernels_of("", check_in_place);
    right_kernels = case_kernels;
    check_autograd();
    for (const Case &c : cases) check_case(c);
    NoGrad guard;
    for (const Case &c : cases) check_case(c);
}
