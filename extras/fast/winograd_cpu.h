// Winograd's filtering on a CPU: F(2x2,3x3), 16 products in place of 36.
//             1  0 -1  0           1   0   0
//     B^T  =  0  1  1  0     G  =  h   h   h     A^T  =  1  1  1  0     h = 1/2
//             0 -1  1  0           h  -h   h             0  1 -1 -1
//             0  1  0 -1           0   0   1
// A block, which is a thread, transforms a few tiles, multiplies them and transforms back while
// they are in the core's cache.
// Gain: ResNet-18's step takes 0.76 of the time.
// Cost: rounding errors of at most 1.9 times a direct sum's on ResNet-18's layers (RMS).
// defines: is_winograd, winograd_forward, winograd_backward

#if !defined(__CUDACC__) && !defined(MGPU_LANES)
namespace fast {
// M (rows,tile_n) = or += A @ B, K terms, of product_m rows of A from `first` on, which are rows of
// its panels or, with turned, columns. Of its own: inlined, the sums would leave the registers.
constexpr int product_m = tile_m == 12 ? 13 : tile_m; // 64, 128, 256, 512 fill tiles of 13
template <bool turned>
__device__ __noinline__ void product_tile(float *M, const float *A, const Panels &p, int first,
                                          int rows, const float *B, int K, bool add) {
    float sum[product_m][tile_n] = {};
    int offset[product_m];
    UNROLL
    for (int r = 0; r < product_m; r++)
        offset[r] = turned ? p.at(0, min(first + r, rows - 1)) : r * tile_n;
    if (!turned) A += first * tile_n;
    for (int begin = 0; begin < K; begin += tile_n, A += turned ? tile_n * tile_n : p.by_panel) {
        const float *a = A;
        for (int k = begin; k < min(K, begin + tile_n);
             k++, a += turned ? tile_n : 1, B += tile_n) {
            UNROLL
            for (int r = 0; r < product_m; r++) {
                const float ar = a[offset[r]];
                UNROLL
                for (int q = 0; q < tile_n; q += wide) (Wide &)sum[r][q] += ar * (const Wide &)B[q];
            }
        }
    }
    rows -= first;
    UNROLL
    for (int r = 0; r < product_m; r++) {
        if (r >= rows) break;
        UNROLL
        for (int q = 0; q < tile_n; q += wide) {
            Wide &to = (Wide &)M[r * tile_n + q];
            to = add ? to + (Wide &)sum[r][q] : (Wide &)sum[r][q];
        }
    }
}
// Each block, a thread, takes a part of the tiles, `group` at a time: their V and M, in memory of
// its own, stay in the core's cache.
constexpr int group = (64 + product_m - 1) / product_m * product_m;
__global__ void winograd_kernel(Store y, const float *X, TiledImages x, const float *U, Panels u,
                                const float *b, TiledImages out, float *memory, Panels v,
                                Panels m) {
    const Range part = slice_of({0, x.count}, group);
    float *const V = memory + blockIdx.z * 16l * (v.by_e + m.by_e), *const M = V + 16 * v.by_e;
    for (int t = part.begin; t < part.end; t += group) {
        const int end = min(t + group, part.end), rows = end - t;
        for (int c = 0; c < x.C; c += tile_n) transform_tiles<false>(V, v, X, x, t, end, c);
        for (int e = 0; e < 16; e++)
            for (int o = 0; o < out.C; o += tile_n)
                for (int r = 0; r < rows; r += product_m)
                    product_tile<false>(M + e * m.by_e + m.at(r, o), V + e * v.by_e, v, r, rows,
                                        U + e * u.by_e + u.at(0, o), x.C, false);
        for (int o = 0; o < out.C; o += tile_n) transform_products(y, M, m, b, out, t, end, o);
    }
}
// transform_tiles, for row_of_tiles tiles and tile_n channels a thread
template <bool of_dy>
__global__ void winograd_tiles_kernel(float *V, Panels p, const float *X, TiledImages s, int first,
                                      int last) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, panels = s.C / tile_n;
    const int begin = first + i / panels * row_of_tiles, end = min(begin + row_of_tiles, last);
    if (begin < end)
        transform_tiles<of_dy>(V + p.at(begin - first, 0), p, X, s, begin, end,
                               i % panels * tile_n);
}
// S[e][o][c] = or += sum over t < tiles of Y[e][t][o] * V[e][t][c]   One thread per product_tile.
__global__ void winograd_sum_kernel(float *S, Panels s, const float *Y, Panels y, const float *V,
                                    Panels v, int O, int C, int tiles, bool add) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, e = blockIdx.y;
    const int of_panel = (O + product_m - 1) / product_m, o = i % of_panel * product_m;
    const int c = i / of_panel * tile_n;
    if (c >= C) return;
    product_tile<true>(S + e * s.by_e + s.at(o, c), Y + e * y.by_e, y, o, O,
                       V + e * v.by_e + v.at(0, c), tiles, add);
}
// dW = G^T S G   One thread per o and c.
__global__ void winograd_weights_kernel(Store dW, const float *S, Panels p, int by_o, int by_k,
                                        int O, int C) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, o = i / C, c = i % C;
    if (o >= O) return;
    float m[4][4], r[3][4];
    S += p.at(o, c);
    UNROLL
    for (int e = 0; e < 16; e++) m[e / 4][e % 4] = S[e * p.by_e];
    UNROLL
    for (int v = 0; v < 4; v++) {
        const float half = (m[1][v] + m[2][v]) / 2;
        r[0][v] = m[0][v] + half, r[1][v] = (m[1][v] - m[2][v]) / 2, r[2][v] = half + m[3][v];
    }
    UNROLL
    for (int u = 0; u < 3; u++) {
        const float half = (r[u][1] + r[u][2]) / 2;
        const int at = o * by_o + (c * 9 + u * 3) * by_k;
        dW.store(at, r[u][0] + half);
        dW.store(at + by_k, (r[u][1] - r[u][2]) / 2);
        dW.store(at + 2 * by_k, half + r[u][3]);
    }
}

static void winograd(const Store &y, const float *X, const float *W, int by_o, int by_c, int by_k,
                     const float *b, const ConvShape &s, Device device) {
    if (s.N == 0) return;
    const Panels u(s.C, s.O);
    const Tensor U = empty({16, u.by_e}, device);
    LAUNCH(winograd_filter_kernel<<<blocks(s.O * s.C / wide, 64), 64, 0, stream_of(device)>>>(
        U.ptr(), u, W, by_o, by_c, by_k, s.O, s.C));
    const TiledImages x = tiled_inputs(s), out = tiled_outputs(s);
    const Panels v(group, s.C), m(group, s.O);
    const dim3 parts(1, 1, min(32, blocks(x.count, group)));
    const Tensor memory = empty({(int)parts.z, 16, v.by_e + m.by_e}, device);
    LAUNCH(winograd_kernel<<<parts, 1, 0, stream_of(device)>>>(y, X, x, U.ptr(), u, b, out,
                                                               memory.ptr(), v, m));
}
static void winograd_backward_weights(const Store &dW, const Tensor &X, const Tensor &dy,
                                      const ConvShape &s) {
    const Device device = X.device;
    const TiledImages x = tiled_inputs(s), out = tiled_outputs(s);
    const int C = s.C, O = s.O, at_once = min(x.count, 1 << 10) + 1; // what a cache holds
    const Panels sums(O, C), v(at_once, C), g(at_once, O);
    const Tensor V = empty({16, v.by_e}, device), Y = empty({16, g.by_e}, device);
    const Tensor S = empty({16, sums.by_e}, device);
    const dim3 grid(blocks(blocks(O, product_m) * C / tile_n, 4), 16);
    for (int t = 0; t == 0 || t < x.count; t += at_once) {
        const int end = min(t + at_once, x.count), rows = blocks(end - t, row_of_tiles);
        LAUNCH(winograd_tiles_kernel<false>
               <<<blocks(rows * C / tile_n, 4), 4, 0, stream_of(device)>>>(V.ptr(), v, X.ptr(), x,
                                                                           t, end));
        LAUNCH(winograd_tiles_kernel<true>
               <<<blocks(rows * O / tile_n, 4), 4, 0, stream_of(device)>>>(Y.ptr(), g, dy.ptr(),
                                                                           out, t, end));
        LAUNCH(winograd_sum_kernel<<<grid, 4, 0, stream_of(device)>>>(
            S.ptr(), sums, Y.ptr(), g, V.ptr(), v, O, C, end - t, t > 0));
    }
    LAUNCH(winograd_weights_kernel<<<blocks(O * C), threads, 0, stream_of(device)>>>(
        dW, S.ptr(), sums, s.W_stride_o, s.W_stride_k, O, C));
}
static bool is_winograd(const ConvShape &s) {
    return s.rung == tiled && s.K == 3 && s.stride == 1 && s.C % 32 == 0 && s.O % 32 == 0;
}
static void winograd_forward(const Store &y, const Tensor &X, const Tensor &W, const Tensor &b,
                             const ConvShape &s, Tensor *) {
    winograd(y, X.ptr(), W.ptr(), s.W_stride_o, 9 * s.W_stride_k, s.W_stride_k, b.ptr(), s,
             X.device);
}
// dX is the same convolution of dy, with the filter turned by 180 degrees.
static void winograd_backward(const Store &dX, const Store &dW, const Store &db, const Tensor &X,
                              const Tensor &dy, const Tensor &W, const ConvShape &s,
                              const Tensor &) {
    if (db.data) channel_sums(db, dy);
    if (dW.data) winograd_backward_weights(dW, X, dy, s);
    if (!dX.data) return;
    const int k = s.W_stride_k;
    const Sizes turned = {s.N, s.O, s.OH, s.OW, s.C, 3, 1, 2 - s.padding, s.H, s.W};
    winograd(dX, dy.ptr(), W.ptr() + 8 * k, 9 * k, s.W_stride_o, -k, nullptr,
             {turned, s.rung, 0, 0}, X.device);
}
} // namespace fast
#endif
