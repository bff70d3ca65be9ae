// make check: how a difference is told. What a wrong number equals is looked for among the numbers
// that were computed.
// defines: notice, differs, line_of, place, Candidate, times_in, range_of, equals, wrong_at
#pragma once
#include <csignal>

#include "../watch/calls.h"
#include "../watch/training_steps.h"

static int notices = 0;
__attribute__((format(printf, 1, 2))) static void notice(const char *format, ...) {
    va_list args;
    va_start(args, format);
    printf("notice: ");
    vprintf(format, args);
    printf("\n");
    va_end(args);
    notices++;
}
// Fail because of a difference that may be intended. With CHECKS=0 print a notice instead, one for
// each cause, and go on.
static std::set<std::string> told; // causes
static void differs(const std::string &cause, const std::string &text) {
    if (option("CHECKS")) error("%s; if this is intended, use CHECKS=0", text.c_str());
    if (told.insert(cause).second) notice("%s", text.c_str());
}

// --- what the host was doing, should it crash

static char last_words[300];
static struct sigaction crash_before[NSIG];
static void say_last_words(int signal, siginfo_t *info, void *context) {
    fprintf(stderr, "%s", last_words);
    const struct sigaction &other = crash_before[signal];
    if (other.sa_flags & SA_SIGINFO) return other.sa_sigaction(signal, info, context);
    sigaction(signal, &other, nullptr);
    raise(signal);
}
inline void prepare_last_words() {
    struct sigaction action = {};
    action.sa_sigaction = say_last_words;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int signal : {SIGABRT, SIGSEGV}) sigaction(signal, &action, &crash_before[signal]);
}

// --- what differs, and what it equals

// Return where the lesson's outermost function is in this stack, below make check's, or null.
static const watch::Frame *lesson_frame(const watch::Stack &stack) {
    const watch::Frame *lesson = nullptr;
    auto has = [](const std::string &text, const char *part) {
        return text.find(part) < text.size();
    };
    for (const watch::Frame &f : watch::frames_of(stack)) {
        if (has(f.file, "extras/check/")) {
            if (lesson) break;
            continue; // it is called by the lesson
        }
        const bool is_lesson = has(f.file + "\n", ".cu\n") && !has(f.file, "extras/fast/") &&
                               !has(f.file, "extras/hooks.cu");
        bool is_function = true;
        for (const char *other : {"std::", "error(", "run_allreduce(", "mgpu_main("})
            is_function = is_function && f.function.find(other) != 0;
        if (is_lesson && is_function) lesson = &f;
    }
    return lesson;
}
static std::string in_file(const std::string &path, int line) { // " (mgpu.cu:431)"
    return format(" (%s:%d)", path.substr(path.rfind('/') + 1).c_str(), line);
}
static std::string line_of(const watch::Stack &stack) {
    const watch::Frame *frame = lesson_frame(stack);
    return frame ? in_file(frame->file, frame->line) : "";
}
// What has enqueued nothing has no stack. Return where a function has this code, if it has it once.
static std::string place(const std::string &function, const std::string &code,
                         std::string path = "") {
    if (path.empty()) { // a copy's mgpu.cu lies beside it
        path = PROGRAM;
        while (path.compare(0, 3, "../") == 0) path = path.substr(3);
        path = path.substr(0, path.rfind('/') + 1) + "mgpu.cu";
        if (access(path.c_str(), R_OK) != 0) path = "mgpu.cu";
    }
    std::ifstream file(path);
    bool inside = false;
    int number = 1, found = 0;
    for (std::string line; std::getline(file, line); number++) {
        const std::string text = line.substr(0, line.find("//"));
        const bool begins = !text.empty() && isalpha(text[0]);
        if (begins && text.back() != ';') {
            const std::string head = " " + text.substr(0, text.find('('));
            const size_t at = head.rfind(function);
            inside = at < head.size() && at + function.size() == head.size() &&
                     strchr(" &*", head[at - 1]);
        }
        if (!inside || begins || text.find(code) > text.size()) continue;
        if (found) return "";
        found = number;
    }
    return found ? in_file(path, found) : "";
}

static bool near(double a, double b) { return std::fabs(a - b) <= 1e-3 * std::fabs(b); }

// Return a factor as a whole number, or as a product or quotient of these quantities: "lr / n".
typedef std::vector<std::pair<std::string, double>> Quantities;
static std::string in_terms_of(double factor, Quantities quantities) {
    if (std::round(factor) != 0 && near(std::round(factor), factor))
        return format("%g", std::round(factor));
    quantities.insert(quantities.begin(), {"1", 1});
    for (size_t most = 1; most <= 4; most++) // names
        for (const auto &[a, x] : quantities)
            for (const auto &[b, y] : quantities)
                for (const auto &[c, z] : quantities)
                    for (const auto &[d, w] : quantities) {
                        if ((a != "1") + (b != "1") + (c != "1") + (d != "1") != (int)most)
                            continue;
                        if (!near(std::fabs(factor), x * y / z / w)) continue;
                        std::string text = a != "1" && b != "1" ? a + " * " + b : a == "1" ? b : a;
                        for (const std::string &below : {c, d})
                            if (below != "1") text += " / " + below;
                        return (factor < 0 ? "-" : "") + text;
                    }
    for (const auto &[a, x] : quantities) // 0.9 * lr / n
        for (const auto &[b, y] : quantities) {
            const double left = factor / x * y, unit = std::pow(10, std::floor(std::log10(left)));
            const double digit = std::round(left / unit) * unit;
            if ((b == "1" ? a == "lr" || a == "n" : a == "lr" && b == "n") && near(digit, left))
                return format("%g * %s", digit, a.c_str()) + (b == "1" ? "" : " / " + b);
        }
    return format("%.4g", factor);
}

// "0.25 = 1 / n times"
static std::string times_in(double factor, const Quantities &quantities) {
    const std::string number = format("%.4g", factor), text = in_terms_of(factor, quantities);
    return number + (text == number ? "" : " = " + text) + " times";
}

// Say which of these quotients a number is: ": it equals a / b"
static std::string as_quotient(double number, const Quantities &tops, const Quantities &bottoms) {
    for (const auto &[a, x] : tops)
        for (const auto &[b, y] : bottoms)
            if (std::fabs(number - x / y) <= 1e-5 * std::fabs(number))
                return ": it equals " + a + " / " + b;
    return "";
}

// The names of the numbers at these indices: "W1[0]", or "in W1 to W3"
static std::string range_of(const std::vector<int> &indices) {
    const std::string first = name_of(indices[0]), last = name_of(indices.back());
    auto parameter = [](const std::string &name) { return name.substr(0, name.find('[')); };
    return parameter(first) == parameter(last)
               ? format("%s to %s", first.c_str(), last.substr(last.find('[')).c_str())
               : parameter(first) + " to " + parameter(last);
}

struct Candidate {
    std::string name;
    Flat numbers;
};
// Return the factors for which the sum of factor * numbers comes nearest to `got` at these indices,
// by least squares, or nothing if it does not come near.
static std::vector<double> factors_of(const Flat &got, const std::vector<int> &at,
                                      const std::vector<const Candidate *> &parts) {
    const int n = parts.size();
    auto number = [&](int p, int j) { return p < n ? parts[p]->numbers[j] : got[j]; };
    auto dot = [&](int p, int q) {
        double sum = 0;
        for (int j : at) sum += (double)number(p, j) * number(q, j);
        return sum;
    };
    std::vector<std::vector<double>> row(n, std::vector<double>(n + 1)); // the normal equations
    for (int p = 0; p < n; p++)
        for (int q = 0; q <= n; q++) row[p][q] = dot(p, q);
    for (int p = 0; p < n; p++) { // Gauss-Jordan elimination
        if (!(row[p][p] > 1e-9 * dot(p, p))) return {};
        for (int q = 0; q < n; q++)
            for (int e = n; e >= p && q != p; e--) row[q][e] -= row[q][p] / row[p][p] * row[p][e];
    }
    std::vector<double> factors;
    for (int p = 0; p < n; p++) factors.push_back(row[p][n] / row[p][p]);
    double left = 0, all = dot(n, n);
    for (int j : at) {
        double sum = got[j];
        for (int p = 0; p < n; p++) sum -= factors[p] * number(p, j);
        left += sum * sum;
    }
    return left <= 1e-4 * all ? factors : std::vector<double>{};
}
// Say what the numbers at these indices equal: 0, one of those that were computed or a multiple of
// it, or the sum of some. Whole numbers come first.
static std::string equals(const Flat &got, const std::vector<int> &at,
                          const std::vector<Candidate> &candidates,
                          const Quantities &quantities = {}) {
    auto all = [&](auto property) { return std::all_of(at.begin(), at.end(), property); };
    if (all([&](int j) { return std::isnan(got[j]); }))
        return "nan, as memory that was not written, or 0 / 0";
    if (all([&](int j) { return got[j] == 0; })) return "0";
    std::vector<std::vector<const Candidate *>> sums;
    for (const Candidate &a : candidates) sums.push_back({&a});
    for (const Candidate &a : candidates)
        for (const Candidate &b : candidates)
            if (&a < &b) sums.push_back({&a, &b});
    std::vector<const Candidate *> every;
    for (const Candidate &a : candidates) every.push_back(&a);
    if (every.size() > 2) sums.push_back(every);
    if (at.size() < 4 * candidates.size()) sums.resize(candidates.size()); // chance would fit more
    for (const auto &parts : sums) {
        const std::vector<double> factors = factors_of(got, at, parts);
        std::string text;
        for (size_t p = 0; p < factors.size(); p++) {
            if (std::fabs(factors[p]) < 1e-3) continue;
            text += text.empty() ? "" : " + ";
            if (!near(factors[p], 1)) text += in_terms_of(factors[p], quantities) + " times ";
            text += parts[p]->name;
        }
        if (!text.empty()) return text;
    }
    return "";
}

// Where `got` is not `want`: an error of so many times 1.2e-7 of each `magnitude` is rounding.
static std::vector<int> wrong_at(const Flat &got, const Flat &want, const Flat &magnitude,
                                 double roundings) {
    std::vector<int> wrong;
    for (size_t j = 0; j < got.size(); j++)
        if (!(std::fabs(got[j] - want[j]) <= 1.2e-7 * roundings * std::fabs(magnitude[j])))
            wrong.push_back(j);
    return wrong;
}
// Tell of a wrong quantity: its first wrong number, and what all of them equal.
static void differs_from(const std::string &where, const std::string &what, const Flat &got,
                         const Flat &want, const std::vector<int> &wrong,
                         const std::vector<Candidate> &candidates, const Quantities &quantities,
                         const std::string &note = "") {
    std::string same = equals(got, wrong, candidates, quantities);
    std::map<std::string, std::vector<int>> of; // each parameter, if not of all
    for (int j : wrong) of[name_of(j).substr(0, name_of(j).find('['))].push_back(j);
    std::set<std::string> kinds;
    for (size_t i = 0; i < param_names.size() && (same.empty() || !kinds.empty()); i++) {
        const std::vector<int> &at = of[param_names[i]];
        const std::string text = at.empty() ? "" : equals(got, at, candidates, quantities);
        if (!text.empty() && kinds.insert(text).second && kinds.size() < 4)
            same += (same.empty() ? "" : ", ") + text + " in " + param_names[i];
    }
    if (kinds.size() > 1) same += ": not the same in all parameters";
    const std::string part = wrong.size() == got.size()
                                 ? ""
                                 : format(" (%zu of %zu numbers are wrong, %s)", wrong.size(),
                                          got.size(), range_of(wrong).c_str());
    differs(what.substr(0, what.find(" on gpu(")),
            format("%s%s is %.6g at %s, not %.6g%s%s%s%s", where.c_str(), what.c_str(),
                   got[wrong[0]], name_of(wrong[0]).c_str(), want[wrong[0]], part.c_str(),
                   same.empty() ? "" : ": it equals ", same.c_str(), note.c_str()));
}
