// The gradient of an input of few channels: each pair of a channel and a tap is a column.
// A dX of few channels c would leave most of a tile's columns empty. Instead, if the stride is 1,
// each pair (c,v) is a channel of its own:
//   part[n,c,v,h,j] = sum over o, u of dy[n,o,h+padding-u,j] * W[o,c,u,v]
// Afterwards the K channels of each c are added, each shifted by v pixels. So an element of dy is
// loaded once for K taps, and no tap v lies outside of dy.
// Gain: on LeNet's conv2 Winograd is faster. Without Winograd the gradient of its input would take
// 0.8 of the time on a CPU, and on an H100 LeNet's step 1.10 times as long.
// defines: product_backward_narrow_input

namespace fast {
// dX[n,c,h,w] = or += sum over v of part[n,c,v,h,w+padding-v]
// In part, neighbours n, v and h are by_n, by_v and by_h apart, neighbours c K*by_v.
// One thread per `lanes` neighbours of a row of dX.
__global__ void fold_kernel(Store dX, const float *part, int by_n, int by_v, int by_h,
                            ConvShape s) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x, of_row = (s.W + lanes - 1) / lanes;
    const int row = at / of_row, begin = at % of_row * lanes;
    const int h = row % s.H, c = row / s.H % s.C, n = row / s.H / s.C;
    if (n >= s.N) return;
    float sum[lanes] = {};
    part += n * by_n + c * s.K * by_v + h * by_h;
    for (int v = 0; v < s.K; v++, part += by_v) {
        const int j = begin + s.padding - v;
        for (int q = 0; q < lanes; q++)
            if (j + q >= 0 && j + q < s.OW) sum[q] += part[j + q];
    }
    for (int q = 0; q < min(lanes, s.W - begin); q++) dX.store(row * s.W + begin + q, sum[q]);
}
static void fold(const Store &dX, const Tensor &part, int by_n, int by_v, int by_h,
                 const ConvShape &s) {
    const int n = s.N * s.C * s.H * blocks(s.W, lanes);
    LAUNCH(fold_kernel<<<blocks(n), threads, 0, stream_of(part.device)>>>(dX, part.ptr(), by_n,
                                                                          by_v, by_h, s));
}
// As a product, whose rows are in the order n,h,j for tiled kernels, h,n,j for fast ones:
//                      C      a row of it   a column   a term of the sum   A    B
//   input gradient     part   n,h,j         c,v        u,o                 dy   W
static void product_backward_narrow_input(const Store &dX, const Tensor &all_dy, const Tensor &W,
                                          const ConvShape &s) {
    const int K = s.K, sk = s.W_stride_k, so = s.W_stride_o, M = s.N * s.H * s.OW;
    const int top = s.padding - (K - 1); // the row of dy that u = K-1 of dX's row 0 meets
    const Images dy = pad(all_dy, s.OH, s.OW, s.rung == tiled ? max(0, -top) : 0, 0);
    const bool row_first = s.rung != tiled;
    const Axis rows = {s.H, dy.pitch, 1};
    const Map A_row = {row_first, {s.N, dy.image}, rows, {s.OW, 1}, top * dy.pitch, top};
    const Map A_term = {true, {s.O, dy.plane}, {K, dy.pitch, 1}, none};
    const Map B_term = {true, {s.O, so}, {K, -K * sk}, none, (K - 1) * K * sk};
    const Map B_column = {false, none, {s.C, K * K * sk}, {K, sk}}, C_row = spaced(M, 1);
    const Tensor part = empty({s.C * K, M}, W.device);
    product(s.rung, {{part.ptr()}, {}, nullptr}, dy, W,
            {M, s.C * K, s.O * K, A_row, A_term, s.OH, 1, B_term, B_column, C_row, M, s.O, 0});
    fold(dX, part, row_first ? s.OW : s.H * s.OW, M, row_first ? s.N * s.OW : s.OW, s);
}
} // namespace fast
