// The three products of a convolution: y, dX and dW. A dense layer is one, too.
// Each is a description of where its rows, columns and terms lie. With a stride, dX falls into
// phases, each a correlation with stride 1 and taps of its own.
// These kernels take the longest to compile. Of mgpu.cu they need only declarations. So this file
// is compiled by itself, once for all programs; or else fast.cu includes it. On a CPU Winograd's
// filtering takes most of the time: winograd.cu has it.
// Gain: a stride-2 gradient by phases multiplies a quarter of what a dy with zeros in it would
// take. With a launch for each phase a step of ResNet-18 takes 1.03 times as long on an H100. After
// an edit of mgpu.cu a program compiles in half of the time.
// defines: product_forward, product_backward
#ifndef FAST // by itself
#include VOCABULARY
#include "warps.h"
#include "product.h"
namespace fast {
void channel_sums(const Store &db, const Tensor &dy); // channel_sums.h
}
#endif
#include "split_k.h"
#include "tiled.h"
#include "shallow.h"
#include "shared.h"
#include "loaders.h"
#include "tf32.h"
#include "wgmma.h"
#include "tiles.h"
#include "layouts.h"
#include "first_layer.h"
#include "matmul.h"
#ifndef WINOGRAD_APART
#include "winograd_tiles.h"
#include "winograd_cpu.h"
#include "winograd.h"
#endif

namespace fast {
#ifdef WINOGRAD_APART
bool is_winograd(const ConvShape &s);
void winograd_forward(const Store &y, const Tensor &X, const Tensor &W, const Tensor &b,
                      const ConvShape &s, Tensor *);
void winograd_backward(const Store &dX, const Store &dW, const Store &db, const Tensor &X,
                       const Tensor &dy, const Tensor &W, const ConvShape &s, const Tensor &);
#endif
// Maps. windows: from (n,i,j) to the corner of a window in X; taps: from (c,u,v) to a tap's
// distance from that corner; pixels: from (n,i,j) to y; weights: from (c,u,v) to W
static Map windows(const ConvShape &s, const Images &X, bool row_first) {
    const int S = s.stride, P = s.padding, corner = -P * (X.pitch + X.pixel);
    const Axis rows = {s.OH, S * X.pitch, S}, columns = {s.OW, S * X.pixel, S};
    return {row_first, {s.N, X.image}, rows, columns, corner, -P, -P};
}
static Map taps(const ConvShape &s, const Images &X, bool row_first) {
    return {row_first, {s.C, X.plane}, {s.K, X.pitch, 1}, {s.K, X.pixel, 1}};
}
static Map pixels(const ConvShape &s, bool row_first) {
    return {row_first, {s.N, s.O * s.OH * s.OW}, {s.OH, s.OW}, {s.OW, 1}};
}
static Map weights(const ConvShape &s, bool row_first) {
    const int K = s.K, sk = s.W_stride_k;
    return {row_first, {s.C, K * K * sk}, {K, K * sk}, {K, sk}};
}
void product_forward(const Store &y, const Tensor &X, const Tensor &W, const Tensor &b, ConvShape s,
                     Tensor *V) {
    if (is_wgmma(s, X.device)) s.rung = wgmma;
    if (is_winograd(s)) return winograd_forward(y, X, W, b, s, V);
    if (is_first_layer(s)) return first_layer_forward(y, X, W, b, s);
    const int out = s.OH * s.OW, zeros = s.rung == tiled ? s.padding : 0;
    const Images x = s.rung == wgmma ? channels_last(X) : pad(X, s.H, s.W, zeros, zeros);
    if (is_shallow(s)) return shallow_forward(y, x, W, b, s);
    const bool skip = s.padding > 0 && s.rung != wgmma, row_first = skip && s.rung != tiled;
    const bool taps_first = skip || s.rung != tiled; // a row of taps, then the channels
    const Map A_row = windows(s, x, row_first), A_term = taps(s, x, taps_first);
    const Map B_term = weights(s, taps_first), B_column = spaced(s.O, s.W_stride_o);
    product(s.rung, {y, {}, b.ptr()}, x, W,
            {s.N * out, s.O, s.C * s.K * s.K, A_row, A_term, s.H, s.W, B_term, B_column,
             pixels(s, row_first), out, skip ? s.C * s.K : 0, 0});
}

// dX is the correlation of dy, with zeros around it, and W, turned by 180 degrees, its C and O
// exchanged. With a stride, row h of dX has terms only for the taps u with u mod stride =
// (h+padding) mod stride, each with row (h+padding-u)/stride of dy. The rows (and columns) of dX
// that are equal modulo stride form a phase, and each of the stride*stride phases is a correlation
// with stride 1 and taps of its own.
struct Phase {          // of rows, or of columns
    int count;          // the number of dX's rows in it
    int taps, last_tap; // its taps are last_tap, last_tap - stride, ...: `taps` of them
    int dy_begin;       // the row of dy that its first row and last_tap meet; may be negative
};
static Phase phase(int first, int size, const ConvShape &s) {
    const int S = s.stride, tap = (first + s.padding) % S;
    const int taps = tap < s.K ? blocks(s.K - tap, S) : 0;
    return {blocks(size - first, S), taps, tap + (taps - 1) * S,
            (first + s.padding) / S - (taps - 1)};
}

static void product_backward_input(const Store &dX, const Tensor &all_dy, const Tensor &W,
                                   const ConvShape &s) {
    const int S = s.stride, K = s.K, sk = s.W_stride_k, so = s.W_stride_o, plane = s.H * s.W;
    const int zeros = s.rung == tiled ? max(0, (K - 1 - s.padding + S - 1) / S) : 0;
    const bool last = s.rung == wgmma;
    const Images dy = last ? channels_last(all_dy) : pad(all_dy, s.OH, s.OW, zeros, zeros);
    const bool skip = K > 1 && !last, row_first = skip && s.rung != tiled;
    const bool taps_first = skip || s.rung != tiled;
    std::vector<Product> list;
    for (int i = 0; i < min(S, s.H); i++)
        for (int j = 0; j < min(S, s.W); j++) {
            const Phase h = phase(i, s.H, s), w = phase(j, s.W, s);
            const int top = h.dy_begin, left = w.dy_begin, last = h.last_tap * K + w.last_tap;
            const int corner = top * dy.pitch + left * dy.pixel;
            const Axis rows = {h.count, dy.pitch, 1}, columns = {w.count, dy.pixel, 1};
            const Map A_row = {row_first, {s.N, dy.image}, rows, columns, corner, top, left};
            const Axis taps_u = {h.taps, dy.pitch, 1}, taps_v = {w.taps, dy.pixel, 1};
            const Map A_term = {taps_first, {s.O, dy.plane}, taps_u, taps_v};
            const Axis rows_of_W = {h.taps, -S * K * sk}, columns_of_W = {w.taps, -S * sk};
            const Map B_term = {taps_first, {s.O, so}, rows_of_W, columns_of_W, last * sk};
            const Map B_column = spaced(s.C, K * K * sk);
            const Axis rows_of_dX = {h.count, S * s.W}, columns_of_dX = {w.count, S};
            const Map C_row = {
                row_first, {s.N, s.C * plane}, rows_of_dX, columns_of_dX, i * s.W + j};
            if (s.rung != tiled && h.taps * w.taps == 0 && dX.plus == dX.data) continue; // += 0
            list.push_back({s.N * h.count * w.count, s.C, s.O * h.taps * w.taps, A_row, A_term,
                            s.OH, s.OW, B_term, B_column, C_row, plane, skip ? s.O * w.taps : 0,
                            0});
        }
    phases(s.rung, {dX, {}, nullptr}, dy, W, list);
}
static void product_backward_weights(const Store &dW, const Store &db, const Tensor &X,
                                     const Tensor &dy, const ConvShape &s) {
    if (s.rung == wgmma) return wgmma_backward_weights({dW, db, nullptr}, X, dy, s);
    const int out = s.OH * s.OW, terms = s.C * s.K * s.K, zeros = s.rung == tiled ? s.padding : 0;
    const Images x = pad(X, s.H, s.W, zeros, zeros);
    const Map A_row = taps(s, x, false), A_term = windows(s, x, false), C_row = weights(s, false);
    const Map B_term = pixels(s, false), B_column = spaced(s.O, out);
    const Product p = {terms,  s.O,      s.N * out, A_row,        A_term, s.H, s.W,
                       B_term, B_column, C_row,     s.W_stride_o, 0,      1};
    const ProductOut to = {dW, db, nullptr};
    if (is_first_layer(s)) first_layer_backward_weights(to, X, dy, p, s);
    else if (is_shallow(s)) shallow_backward_weights(to, x, dy, p, s);
    else product(s.rung, to, x, dy, p);
}
void product_backward(const Store &dX, const Store &dW, const Store &db, const Tensor &X,
                      const Tensor &dy, const Tensor &W, ConvShape s, const Tensor &V) {
    if (is_wgmma(s, X.device)) s.rung = wgmma;
    if (is_winograd(s)) return winograd_backward(dX, dW, db, X, dy, W, s, V);
    if (dW.data || db.data) product_backward_weights(dW, db, X, dy, s);
    if (dX.data) product_backward_input(dX, dy, W, s);
}
} // namespace fast
