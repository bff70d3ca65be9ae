// The tuned operators. This part of the program comes last: where it is there, the program includes
// copies of mgpu.cu and networks.cu in which the operators have other names (see fast.mk), and what
// calls relu calls the one below. Each included file is one idea (README.md has them in a table,
// with what each gains). With PRODUCTS_APART products.cu is compiled by itself and linked. KERNELS
// and PRECISION choose a rung of a ladder: plain (mgpu.cu's operators), tiled, fast, tf32.
// replaces: conv2d linear relu avg_pool2d sgd max_pool2d add batch_norm
// replaces: matmul matmul_sum bias bias_backward im2col col2im Tensor::ptr current_stream allocate
// defines: FAST, use_kernels, usual_kernels
#define FAST

#include <utility>

// Called with each tensor before its memory is used, unless null. (A hook for other programs.)
void (*on_use)(const Tensor &tensor) = nullptr;

// Lists the tuned operators. Where an entry is null, mgpu.cu's own operator runs.
namespace fast {
struct Sizes;
}
struct Operators {
    std::string name = "simple"; // what the first line of a run calls them
    Tensor (*conv2d)(const Tensor &X, const Tensor &W, const Tensor &b,
                     const fast::Sizes &s) = nullptr;
    Tensor (*linear)(const Tensor &X, const Tensor &W, const Tensor &b) = nullptr;
    void (*matmul)(bool sum, Matrix C, Matrix A, Matrix B, Device device) = nullptr; // and bias
    void (*im2col)(const Tensor &columns, const Tensor &X, ConvShape s) = nullptr;   // and col2im
    void (*col2im)(float *dX, const Tensor &dcolumns, ConvShape s) = nullptr;
    Tensor (*relu)(const Tensor &X) = nullptr;
    Tensor (*avg_pool2d)(const Tensor &X, const PoolShape &s) = nullptr;
    void (*sgd)(const std::vector<Tensor> &params, float lr, int batch_size) = nullptr;
    Tensor (*max_pool2d)(const Tensor &X, const PoolShape &s) = nullptr;
    Tensor (*add)(const Tensor &A, const Tensor &B) = nullptr;
    Tensor (*batch_norm)(const Tensor &X, const Tensor &gamma, const Tensor &beta,
                         const Tensor &running_mean, const Tensor &running_var) = nullptr;
};
Operators operators;

#include "warps.h"
#include "memory.h"
#include "fusion.h"
#include "sgd.h"
#include "pool.h"
#include "channel_sums.h"
#ifdef NETWORKS
#include "batch_norm.h"
#endif
#include "product.h"
#ifndef PRODUCTS_APART
#include "products.cu"
#endif
#include "conv.h"

const char *const usual_kernels = warp_size > 1 ? "fast" : "tiled";

// These replace mgpu.cu's: what waits to be fused is sent off first (fusion.h).
float *Tensor::ptr() const {
    if (device.id >= 0) {
        fast::before_use(device, this);
        if (on_use) on_use(*this);
    }
    return fast::address(*this);
}
Stream &current_stream(Device device) {
    fast::before_use(device, nullptr);
    return plain_current_stream(device);
}

// mgpu.cu and networks.cu call these.
Tensor relu(const Tensor &X) { return operators.relu ? operators.relu(X) : plain_relu(X); }
void matmul(Matrix C, Matrix A, Matrix B, Device device) {
    const bool tuned = operators.matmul && A.count == 1 && C.count == B.count;
    tuned ? operators.matmul(false, C, A, B, device) : plain_matmul(C, A, B, device);
}
void matmul_sum(Matrix C, Matrix A, Matrix B, Device device) {
    const bool tuned = operators.matmul && A.count == B.count;
    tuned ? operators.matmul(true, C, A, B, device) : plain_matmul_sum(C, A, B, device);
}
void bias(const Tensor &y, const Tensor &b) {
    operators.matmul ? fast::plane_bias(y, b) : plain_bias(y, b);
}
void bias_backward(const Tensor &b, const Tensor &dy) {
    if (!operators.matmul) return plain_bias_backward(b, dy);
    if (float *db = grad_ptr(b)) fast::channel_sums({db, db}, dy);
}
void im2col(const Tensor &columns, const Tensor &X, ConvShape s) {
    operators.im2col ? operators.im2col(columns, X, s) : plain_im2col(columns, X, s);
}
void col2im(float *dX, const Tensor &dcolumns, ConvShape s) {
    operators.im2col ? operators.col2im(dX, dcolumns, s) : plain_col2im(dX, dcolumns, s);
}
Tensor linear(const Tensor &X, const Tensor &W, const Tensor &b) {
    if (!operators.linear) return plain_linear(X, W, b);
    check_linear(X, W, b);
    return operators.linear(X, W, b);
}
Tensor conv2d(const Tensor &X, const Tensor &W, const Tensor &b) {
    if (!operators.conv2d) return plain_conv2d(X, W, b);
    const ConvShape s = conv_shape(X, W, b);
    return operators.conv2d(X, W, b, {s.N, s.C, s.H, s.W, s.O, s.K, 1, 0, s.OH, s.OW});
}
Tensor avg_pool2d(const Tensor &X, int kernel_size, int stride) {
    if (!operators.avg_pool2d) return plain_avg_pool2d(X, kernel_size, stride);
    return operators.avg_pool2d(X, pool_shape("avg_pool2d", X, kernel_size, stride));
}
void sgd(const std::vector<Tensor> &params, float lr, int batch_size) {
    if (!operators.sgd) return plain_sgd(params, lr, batch_size);
    operators.sgd(params, lr, batch_size);
}
#ifdef NETWORKS
Tensor add(const Tensor &A, const Tensor &B) {
    return operators.add ? operators.add(A, B) : plain_add(A, B);
}
Tensor conv2d(const Tensor &X, const Tensor &W, const Tensor &b, int stride, int padding) {
    if (!operators.conv2d) return plain_conv2d(X, W, b, stride, padding);
    const ConvShape s = strided_shape(X, W, b, stride, padding).conv;
    return operators.conv2d(X, W, b, {s.N, s.C, s.H, s.W, s.O, s.K, stride, padding, s.OH, s.OW});
}
Tensor max_pool2d(const Tensor &X, int kernel_size, int stride) {
    if (!operators.max_pool2d) return plain_max_pool2d(X, kernel_size, stride);
    return operators.max_pool2d(X, pool_shape("max_pool2d", X, kernel_size, stride));
}
Tensor batch_norm(const Tensor &X, const Tensor &gamma, const Tensor &beta,
                  const Tensor &running_mean, const Tensor &running_var) {
    if (!operators.batch_norm) return plain_batch_norm(X, gamma, beta, running_mean, running_var);
    check_batch_norm({X, gamma, beta, running_mean, running_var});
    return operators.batch_norm(X, gamma, beta, running_mean, running_var);
}
#endif

// EDITED names the operators of mgpu.cu that have changed since extras/fast/ was fitted to them.
// mgpu.cu's own operators then run, not the tuned ones. Its words are conv2d, linear, matmul,
// im2col, relu, avg_pool2d, sgd, max_pool2d, add and batch_norm. fast.mk finds them, and writes an
// object with them, so that this file need not be compiled again.
#ifndef EDITED
extern const char edited[];
#define EDITED ::edited
#endif

namespace fast {
static std::string edited = EDITED;
template <Rung rung> static Operators tuned(const std::string &name) {
    Operators tuned = {"tuned, " + name};
    tuned.conv2d = conv2d<rung>;
    tuned.linear = linear<rung>;
    if constexpr (warp_size == 1) {
        tuned.matmul = matrix_product;
        tuned.im2col = columns_of;
        tuned.col2im = add_columns;
    }
    tuned.relu = relu;
    tuned.avg_pool2d = avg_pool2d;
    tuned.sgd = sgd;
#ifdef NETWORKS
    tuned.max_pool2d = max_pool2d;
    tuned.add = add;
    tuned.batch_norm = batch_norm;
#endif
    return tuned;
}
static Operators operators_of(const std::string &rung) {
    if (rung == "tiled") return tuned<tiled>("tiled");
    if (rung == "fast") return tuned<shared>("fast");
    if (rung == "tf32") return tuned<tf32>("fast in tf32");
    return {}; // mgpu.cu's
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
    leave("matmul", &Operators::matmul);
    leave("im2col", &Operators::im2col);
    leave("relu", &Operators::relu);
    leave("avg_pool2d", &Operators::avg_pool2d);
    leave("sgd", &Operators::sgd);
    leave("max_pool2d", &Operators::max_pool2d);
    leave("add", &Operators::add);
    leave("batch_norm", &Operators::batch_norm);
    if (count == 0) return;
    operators.name = "your mgpu.cu's" +
                     (count < 10 ? left + "; " + operators.name + " otherwise" : "") +
                     " (KERNELS=" + usual_kernels + " for the tuned ones)";
}

namespace fast {
static void choose() {
    const std::string kernels = option_text("KERNELS"), precision = option_text("PRECISION");
    const bool tf32 = precision == "tf32";
    if (given("KERNELS") && kernels != "fast" && kernels != "tiled" && kernels != "plain") {
        error("KERNELS=%s is unknown: choose one of fast, tiled, plain", kernels.c_str());
    }
    if (precision != "fp32" && !tf32) {
        error("PRECISION=%s is unknown: choose one of fp32, tf32", precision.c_str());
    }
    if (tf32 && given("KERNELS") && kernels != "fast") {
        error("PRECISION=tf32 works only with the fast kernels: leave KERNELS out");
    }
    if (tf32) use_kernels("tf32");
    else if (given("KERNELS")) use_kernels(kernels);
}

// The first line of a run says which operators it uses.
static void (*const run_mgpu)() = run;
static void run_fast() {
    printf("operators: %s\n", operators.name.c_str());
    run_mgpu();
}
static const std::vector<Option> fast_options = {
    {"KERNELS", "text", "your edits; else fast", "operators: fast, tiled, or mgpu.cu's plain"},
    {"PRECISION", "text", "fp32", "of the fast kernels: fp32, or tf32 on tensor cores"},
};
static const bool ready = [] {
    option_table.insert(option_table.end(), fast_options.begin(), fast_options.end());
    after_options.push_back(choose);
    run = run_fast;
    use_usual_kernels();
    return true;
}();
} // namespace fast
