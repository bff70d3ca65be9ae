// mgpu.cu with tuned operators: the whole program in one translation unit.
// It includes ../mgpu.cu and the files below, each of which is one idea (README.md has them in a
// table, with what each gains), and fills mgpu.cu's table `operators`. --kernels and --precision
// choose a rung of the ladder:
//     plain    mgpu.cu's simple operators
//     tiled    sums tiled in registers: the default on a CPU
//     fast     through shared memory: the default on a GPU
//     tf32     the same on tensor cores: --precision tf32
// defines: use_kernels, usual_kernels
#include "../mgpu.cu"

#include "warps.h"
#include "fusion.h"
#include "sgd.h"
#include "pool.h"
#include "batch_norm.h"
#include "product.h"
#include "split_k.h"
#include "tiled.h"
#include "shallow.h"
#include "shared.h"
#include "tf32.h"
#include "tiles.h"
#include "narrow.h"
#include "conv.h"

// The operators of mgpu.cu that have been edited since fast/ was fitted to them, as fast.mk finds
// out: theirs run, not the tuned ones. Words of conv, relu, add, pool2d, batch_norm, sgd, or all.
#ifndef EDITED
#define EDITED ""
#endif

const char *const usual_kernels = warp_size > 1 ? "fast" : "tiled";

namespace fast {
static std::string edited = EDITED;
static const Operators simple = operators;
static Operators operators_of(const std::string &rung) {
    Operators o = {"plain", 1e-3f, conv<shared>, relu, add, pool2d, batch_norm, sgd, flush};
    if (rung == "plain") return o = simple, o.flush = flush, o; // tensors with notes may be left
    o.name = "tuned, " + (rung == "tf32" ? "fast in tf32" : rung);
    if (rung == "tiled") o.conv = conv<tiled>;
    if (rung == "tf32") o.conv = conv<tf32>, o.rounding = 1e-2f;
    return o;
}
} // namespace fast

// Put a rung's operators into the table: plain, tiled, fast or tf32.
void use_kernels(const std::string &rung) {
    fast::flush_all();
    operators = fast::operators_of(rung);
}
// Those of this machine, but mgpu.cu's own where they have been edited.
void use_usual_kernels() {
    use_kernels(usual_kernels);
    std::vector<std::string> left;
    auto leave = [&](const std::string &op, auto Operators::*entry) {
        if ((" " + fast::edited + " ").find(" " + op + " ") == std::string::npos) return;
        left.push_back(op);
        operators.*entry = fast::simple.*entry;
    };
    leave("conv", &Operators::conv);
    leave("relu", &Operators::relu);
    leave("add", &Operators::add);
    leave("pool2d", &Operators::pool2d);
    leave("batch_norm", &Operators::batch_norm);
    leave("sgd", &Operators::sgd);
    if (left.empty()) return;
    const std::string some = " " + listed(left, ", ") + "; " + operators.name + " otherwise";
    operators.name = "your mgpu.cu's" + (left.size() < 6 ? some : "") +
                     " (KERNELS=" + usual_kernels + " for the tuned ones)";
}

namespace fast {
static std::string kernels, precision; // as the command line has them
static void choose() {
    const bool tf32 = precision == "tf32";
    if (tf32 && !kernels.empty() && kernels != "fast")
        error("--precision tf32 is for the fast kernels: leave --kernels %s out", kernels.c_str());
    if (tf32 || !kernels.empty()) use_kernels(tf32 ? "tf32" : kernels);
}
static Setter chosen(std::string *field, const std::vector<std::string> &names) {
    return
        [=](const char *name, const char *value) { one_of(field, names)(name, value), choose(); };
}
static const bool ready = [] {
    const Flag more[] = {
        {"kernels", "NAME",
         "of operators: fast, tiled, or plain, mgpu.cu's (tiled on a CPU, else fast)",
         chosen(&kernels, {"fast", "tiled", "plain"})},
        {"precision", "NAME",
         "of what the fast kernels multiply: fp32, or tf32 on tensor cores (fp32)",
         chosen(&precision, {"fp32", "tf32"})}};
    flags.insert(flags.end() - 1, std::begin(more), std::end(more)); // help stays the last
    use_usual_kernels();
    return true;
}();
} // namespace fast
