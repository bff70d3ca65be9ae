// mgpu.cu with tuned operators: the whole program in one translation unit.
// It includes ../../mgpu.cu and the files below, each of which is one idea (README.md has them in a
// table, with what each gains), and fills mgpu.cu's table `operators`. --kernels and --precision
// choose a rung of the ladder:
//     plain    mgpu.cu's simple operators
//     tiled    sums tiled in registers: the default on a CPU
//     fast     through shared memory: the default on a GPU
//     tf32     the same on tensor cores: --precision tf32
// defines: use_kernels, usual_kernels
#include "../../mgpu.cu"

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
#include "winograd.h"
#include "conv.h"

// The operators of mgpu.cu that have been edited since extras/fast/ was fitted to them, as fast.mk finds
// out: theirs run, not the tuned ones. Words of conv2d, linear, relu, add, pool2d, batch_norm, sgd.
#ifndef EDITED
#define EDITED ""
#endif

const char *const usual_kernels = warp_size > 1 ? "fast" : "tiled";

namespace fast {
static std::string edited = EDITED;
template <Rung rung> static Operators tuned(const std::string &name, float rounding = 1e-3f) {
    return {"tuned, " + name, rounding,   conv2d<rung>, linear<rung>, relu, add,
            pool2d,           batch_norm, sgd,          flush};
}
static Operators operators_of(const std::string &rung) {
    if (rung == "tiled") return tuned<tiled>("tiled");
    if (rung == "fast") return tuned<shared>("fast");
    if (rung == "tf32") return tuned<tf32>("fast in tf32", 1e-2f);
    Operators plain = {}; // mgpu.cu's
    plain.flush = flush;  // there may be tensors with notes
    return plain;
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
    std::string left;
    size_t count = 0;
    auto leave = [&](const std::string &op, auto Operators::*entry) {
        if ((" " + fast::edited + " ").find(" " + op + " ") == std::string::npos) return;
        left += (count++ ? ", " : " ") + op;
        operators.*entry = nullptr;
    };
    leave("conv2d", &Operators::conv2d);
    leave("linear", &Operators::linear);
    leave("relu", &Operators::relu);
    leave("add", &Operators::add);
    leave("pool2d", &Operators::pool2d);
    leave("batch_norm", &Operators::batch_norm);
    leave("sgd", &Operators::sgd);
    if (count == 0) return;
    operators.name = "your mgpu.cu's" +
                     (count < 7 ? left + "; " + operators.name + " otherwise" : "") +
                     " (KERNELS=" + usual_kernels + " for the tuned ones)";
}

namespace fast {
static std::string kernels, precision; // as the command line has them
static void choose() {
    const bool tf32 = precision == "tf32";
    if (tf32 && !kernels.empty() && kernels != "fast")
        error("PRECISION=tf32 is for the fast kernels alone: leave KERNELS out");
    if (tf32 || !kernels.empty()) use_kernels(tf32 ? "tf32" : kernels);
}
static void set_kernels(const std::string &value) {
    if (value != "fast" && value != "tiled" && value != "plain")
        error("KERNELS=%s is unknown: there are fast, tiled, plain", value.c_str());
    kernels = value;
    choose();
}
static void set_precision(const std::string &value) {
    if (value != "fp32" && value != "tf32")
        error("PRECISION=%s is unknown: there are fp32, tf32", value.c_str());
    precision = value;
    choose();
}
static const std::vector<Option> fast_options = {
    {"KERNELS", set_kernels, "operators: fast, tiled or mgpu.cu's plain (your edits; else fast)"},
    {"PRECISION", set_precision, "of the fast kernels: fp32, or tf32 on tensor cores (fp32)"},
};
static const bool ready = [] {
    option_table.insert(option_table.end(), fast_options.begin(), fast_options.end());
    use_usual_kernels();
    return true;
}();
} // namespace fast
