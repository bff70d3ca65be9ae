// A convolution of few channels, such as LeNet's first, without packing: on a CPU.
// It has so few products that to pack dy, and to store a tile whose columns lie a plane apart,
// takes longer than to multiply. Here threads compute neighbours of a row, a register full at a
// time, and pack nothing. The last register of a row begins earlier, to end with the row: it has
// some pixels again.
// Gain: a CPU's step, user time, without it: LeNet 1.18 times, lab_cnn 1.15.
// defines: is_shallow, shallow_forward, shallow_backward_weights

namespace fast {
static bool is_shallow(const ConvShape &s) {
    return s.rung == tiled && warp_size == 1 && s.K == 3 && s.C <= 3 && s.stride == 1 &&
           s.OW >= lanes;
}
static ConvShape with_zeros(ConvShape s) { // as pad(X) is
    s.H += 2 * s.padding, s.W += 2 * s.padding;
    return s;
}
// y[n,o,i,j] = b[o] + sum over c,u,v of X[n,c,i+u,j+v] * W[o,c,u,v]
//   X (N,C,H,W), zeros included   W (O,C,3,3)   b (O)   ->   y (N,O,OH,OW)
// One thread per plane (n,o).
__global__ void shallow_kernel(Store y, const float *X, const float *W, const float *b,
                               ConvShape s) {
    const int plane = blockIdx.x * blockDim.x + threadIdx.x, n = plane / s.O, o = plane % s.O;
    if (n >= s.N) return;
    for (int i = 0; i < s.OH; i++)
        for (int begin = 0; begin < s.OW; begin += lanes) {
            const int j = min(begin, s.OW - lanes);
            float sum[lanes] = {};
            for (int c = 0; c < s.C; c++) {
                const float *x = X + ((n * s.C + c) * s.H + i) * s.W + j;
                UNROLL
                for (int k = 0; k < 9; k++) {
                    const float w = W[(c * 9 + k) * s.W_stride_k + o * s.W_stride_o];
                    UNROLL
                    for (int q = 0; q < lanes; q += wide)
                        (Wide &)sum[q] += w * (const Wide &)x[k / 3 * s.W + k % 3 + q];
                }
            }
            UNROLL_LANES
            for (int q = 0; q < lanes; q++)
                y.store((plane * s.OH + i) * s.OW + j + q, sum[q] + b[o]);
        }
}

static void shallow_forward(const Store &y, const Images &X, const Tensor &W, const Tensor &b,
                            const ConvShape &s) {
    LAUNCH(shallow_kernel<<<blocks(s.N * s.O, 16), 16, 0, stream_of(W.device)>>>(
        y, X.memory.ptr(), W.ptr(), b.ptr(), with_zeros(s)));
}
// partial[slice][o][k] = the sums over the slice's images for dW (k < 9*C) and db (k = 9*C), from
// dy (N,O,OH,OW) itself. One thread per slice and (o,c); its sum[k][q] are of every `wide`th pixel.
__global__ void shallow_weight_grad_kernel(float *partial, const float *X, const float *dy,
                                           ConvShape s) {
    const int thread = blockIdx.x * blockDim.x + threadIdx.x, o = thread / s.C, c = thread % s.C;
    const int slice = blockIdx.z, slices = gridDim.z, terms = s.C * 9;
    if (o >= s.O) return;
    const int begin = (long long)s.N * slice / slices, end = (long long)s.N * (slice + 1) / slices;
    float sum[10][wide] = {}; // for 9 weights, then for the bias
    float fresh[wide];        // 0 where a row's last register has pixels again, else 1
    for (int q = 0; q < wide; q++) fresh[q] = q + (s.OW - 1) % wide >= wide - 1;
    for (int n = begin; n < end; n++)
        for (int i = 0; i < s.OH; i++) {
            const float *g = dy + ((n * s.O + o) * s.OH + i) * s.OW;
            const float *x = X + ((n * s.C + c) * s.H + i) * s.W;
            for (int first = 0; first < s.OW; first += wide) {
                const int j = min(first, s.OW - wide);
                Wide gj = (const Wide &)g[j];
                if (j < first) gj *= (const Wide &)fresh[0];
                UNROLL
                for (int k = 0; k < 9; k++)
                    (Wide &)sum[k][0] += gj * (const Wide &)x[k / 3 * s.W + k % 3 + j];
                (Wide &)sum[9][0] += gj;
            }
        }
    float *out = partial + (slice * s.O + o) * (terms + 1);
    UNROLL
    for (int k = 0; k < 10; k++) {
        float total = 0;
        for (int q = 0; q < wide; q++) total += sum[k][q];
        if (k < 9 || c == 0) out[k < 9 ? c * 9 + k : terms] = total;
    }
}
static void shallow_backward_weights(const ProductOut &out, const Images &X, const Tensor &dy,
                                     const Product &p, const ConvShape &s) {
    const int slices = min(s.N, min(32, blocks(1 << 9, s.O * s.C)));
    const Tensor partial = empty({slices, p.N, p.rows()}, dy.device);
    const dim3 grid(blocks(s.O * s.C, 8), 1, slices);
    const float *const g = dy.ptr();
    if (slices > 0)
        LAUNCH(shallow_weight_grad_kernel<<<grid, 8, 0, stream_of(dy.device)>>>(
            partial.ptr(), X.memory.ptr(), g, with_zeros(s)));
    product_sum(out, partial.ptr(), slices, p, dy.device);
}
} // namespace fast
