// Winograd's minimal filtering: a 3x3 convolution of stride 1 with 2.25 times fewer products.
// A tile y of 2x2 outputs depends on a window d of 4x4 inputs: 36 products with the filter g. With
// the matrices of F(2x2,3x3) (Lavin and Gray 2016) it takes 16, where * multiplies elements:
//     y = A^T [(G g G^T) * (B^T d B)] A
//             1  0 -1  0           1   0   0
//     B^T  =  0  1  1  0     G  =  h   h   h     A^T  =  1  1  1  0     h = 1/2
//             0 -1  1  0           h  -h   h             0  1 -1 -1
//             0  1  0 -1           0   0   1
// Filters U = G g G^T are transformed once, windows V = B^T d B once for all outputs, and the sum
// over channels comes before A^T [] A. So each of the 16 elements e is a product of matrices:
//     M[e] (tiles,O) = V[e] (tiles,C) @ U[e] (C,O)
// dX is the same convolution of dy, with the filter turned by 180 degrees. And because all is
// linear, dg takes the transposes: G^T [sum over tiles of (A dy A^T) * (B^T d B)] G.
// Gain: on a CPU ResNet-18's step takes 0.76 of the time. On a GPU it was tried, through shared
// memory, and gained nothing by the model: a thread loads 16 numbers for 64 products. So it is left
// out there, for 110 lines less.
// Cost: rounding errors of at most 1.9 times a direct sum's on ResNet-18's layers (RMS).
// defines: is_winograd, winograd_forward, winograd_backward_input, winograd_backward_weights

namespace fast {
#if defined(__CUDACC__) || defined(MGPU_LANES)
static bool is_winograd(const ConvShape &) { return false; }
template <class... T> static void winograd_forward(const T &...) {}
template <class... T> static void winograd_backward_input(const T &...) {}
template <class... T> static void winograd_backward_weights(const T &...) {}
#else
static bool is_winograd(const ConvShape &s) {
    return s.rung == tiled && s.K == 3 && s.stride == 1 && s.C % 32 == 0 && s.O % 32 == 0;
}

// --- The transforms, of a column or a row, then of a tile, and of `wide` channels at once
__device__ __forceinline__ void times_BT(Wide &a, Wide &b, Wide &c, Wide &d) {
    const Wide old = b;
    a -= c, b += c, c -= old, d = old - d;
}
__device__ __forceinline__ void transform_window(Wide (&d)[4][4]) { // B^T d B
    UNROLL
    for (int k = 0; k < 4; k++) times_BT(d[0][k], d[1][k], d[2][k], d[3][k]);
    UNROLL
    for (int k = 0; k < 4; k++) times_BT(d[k][0], d[k][1], d[k][2], d[k][3]);
}
__device__ __forceinline__ void times_AT(Wide &a, Wide &b, Wide c, Wide d) {
    a += b + c, b -= c + d;
}
__device__ __forceinline__ void transform_back(Wide (&m)[4][4]) { // A^T m A, into m[0..1][0..1]
    UNROLL
    for (int k = 0; k < 4; k++) times_AT(m[0][k], m[1][k], m[2][k], m[3][k]);
    UNROLL
    for (int k = 0; k < 2; k++) times_AT(m[k][0], m[k][1], m[k][2], m[k][3]);
}
__device__ __forceinline__ void times_A(Wide &a, Wide &b, Wide &c, Wide &d) {
    c = a - b, d = -b, b += a;
}
__device__ __forceinline__ void transform_dy(Wide (&d)[4][4]) { // A dy A^T of dy in d[0..1][0..1]
    UNROLL
    for (int k = 0; k < 2; k++) times_A(d[0][k], d[1][k], d[2][k], d[3][k]);
    UNROLL
    for (int k = 0; k < 4; k++) times_A(d[k][0], d[k][1], d[k][2], d[k][3]);
}

// Where an array [e][row][column] has its elements: its columns form panels of tile_n
struct Panels {
    int by_panel, by_e; // (a multiple of 4 KiB would be the same set of a cache)
    Panels(int rows, int columns) : by_panel(rows * tile_n), by_e(rows * columns + 16) {}
    int at(int row, int column) const {
        return column / tile_n * by_panel + row * tile_n + column % tile_n;
    }
};
// U[e][c][o] = (G g G^T)[e] of the filter g of output o and input c, which begins at W[o*by_o +
// c*by_c] and goes on by by_k.   One thread per c and `wide` neighbours o.
__global__ void winograd_filter_kernel(float *U, Panels p, const float *W, int by_o, int by_c,
                                       int by_k, int O, int C) {
    const int i = (blockIdx.x * blockDim.x + threadIdx.x) * wide, c = i / O, o = i % O;
    if (c >= C) return;
    Wide g[3][3], r[4][3];
    UNROLL
    for (int k = 0; k < 9; k++)
        for (int q = 0; q < wide; q++)
            ((float *)&g[k / 3][k % 3])[q] = W[(o + q) * by_o + c * by_c + k * by_k];
    UNROLL
    for (int v = 0; v < 3; v++) {
        const Wide half = (g[0][v] + g[2][v]) * .5f, middle = g[1][v] * .5f;
        r[0][v] = g[0][v], r[1][v] = half + middle, r[2][v] = half - middle, r[3][v] = g[2][v];
    }
    U += p.at(c, o);
    UNROLL
    for (int u = 0; u < 4; u++, U += 4 * p.by_e) {
        const Wide half = (r[u][0] + r[u][2]) * .5f, middle = r[u][1] * .5f;
        (Wide &)U[0] = r[u][0], (Wide &)U[p.by_e] = half + middle;
        (Wide &)U[2 * p.by_e] = half - middle, (Wide &)U[3 * p.by_e] = r[u][2];
    }
}
// Images, and rows.d x columns.d tiles of 2x2 outputs for each of them
struct TiledImages {
    int N, C, H, W, padding;
    Divisor rows, columns;
    __host__ __device__ int tiles() const { return N * rows.d * columns.d; }
};

// --- Channels are neighbours, so that a register holds those of a pixel
// Call visit(n, h, w, t, count) for the tiles from begin to end, a row of at most row_of_tiles of
// them at a time: tile t is the first of `count`, and has output (h,w) of image n.
constexpr int row_of_tiles = 16;
template <class Visit>
__device__ __forceinline__ void for_rows(const TiledImages &s, int begin, int end, Visit visit) {
    for (int t = begin, count; t < end; t += count) {
        const int row = s.columns(t), n = s.rows(row), j = t - row * s.columns.d;
        count = min(min(row_of_tiles, int(s.columns.d) - j), end - t);
        visit(n, (row - n * s.rows.d) * 2, 2 * j, t, count);
    }
}
// V[e][t - begin][c] = (B^T d B)[e] of the window d of tile t, or with of_dy (A d A^T)[e] of its
// outputs d, for the tiles from begin to end and tile_n channels from c0 on.
template <bool of_dy>
__device__ __forceinline__ void transform_tiles(float *V, const Panels &p, const float *X,
                                                const TiledImages &s, int begin, int end, int c0) {
    constexpr int size = of_dy ? 2 : 4;
    float pixels[size][2 * row_of_tiles + 5][tile_n];
    for_rows(s, begin, end, [&](int n, int h0, int w0, int t, int count) {
        const int plane = s.H * s.W;
        // Four pixels of a row at a time: so channels become neighbours in half the time. First all
        // are loaded: what has just been stored in parts cannot be loaded as a whole at once.
        float fours[row_of_tiles / 2 + 2][tile_n][4];
        for (int u = 0; u < size; u++)
            for (bool load : {true, false})
                for (int k = 0, next; k < 2 * count + size - 2; k = next) {
                    const int h = h0 + u - s.padding, w = w0 + k - s.padding;
                    const bool inside = h >= 0 && h < s.H && w >= 0 && w < s.W;
                    const float *from = X + (n * s.C + c0) * plane + (inside ? h * s.W + w : 0);
                    float(*to)[tile_n] = &pixels[u][k], (*four)[4] = fours[k / 4];
                    next = inside && w + 4 <= s.W ? k + 4 : k + 1;
                    if (next == k + 4 && load) {
                        for (int q = 0; q < tile_n; q++) {
                            UNROLL
                            for (int i = 0; i < 4; i++) four[q][i] = from[q * plane + i];
                        }
                    } else if (next == k + 4) {
                        UNROLL
                        for (int i = 0; i < 4; i++) UNROLL_LANES
                        for (int q = 0; q < tile_n; q++) to[i][q] = four[q][i];
                    } else if (load && inside) {
                        for (int q = 0; q < tile_n; q++) to[0][q] = from[q * plane];
                    } else if (load) {
                        for (int q = 0; q < tile_n; q++) to[0][q] = 0;
                    }
                }
        for (int j = 0; j < count; j++)
            for (int q = 0; q < tile_n; q += wide) {
                Wide d[4][4];
                UNROLL
                for (int k = 0; k < size * size; k++)
                    d[k / size][k % size] = (Wide &)pixels[k / size][2 * j + k % size][q];
                of_dy ? transform_dy(d) : transform_window(d);
                float *v = V + p.at(t + j - begin, c0 + q);
                UNROLL
                for (int e = 0; e < 16; e++) (Wide &)v[e * p.by_e] = d[e / 4][e % 4];
            }
    });
}
// y = A^T M A + b, for the tiles from begin to end and tile_n channels from o0 on
__device__ __forceinline__ void transform_products(const Store &y, const float *M, const Panels &p,
                                                   const float *b, const TiledImages &s, int begin,
                                                   int end, int o0) {
    float pixels[2][2 * row_of_tiles][tile_n], row[tile_n][2 * row_of_tiles];
    for_rows(s, begin, end, [&](int n, int h, int w0, int t, int count) {
        for (int j = 0; j < count; j++)
            for (int q = 0; q < tile_n; q += wide) {
                const float *m = M + p.at(t + j - begin, o0 + q);
                Wide d[4][4];
                UNROLL
                for (int e = 0; e < 16; e++) d[e / 4][e % 4] = (const Wide &)m[e * p.by_e];
                transform_back(d);
                UNROLL
                for (int k = 0; k < 4; k++)
                    (Wide &)pixels[k / 2][2 * j + k % 2][q] = d[k / 2][k % 2];
            }
        const int width = min(2 * count, s.W - w0);
        for (int u = 0; u < min(2, s.H - h); u++) {
            for (int w = 0; w < width; w += 4) {
                float fours[tile_n][4];
                UNROLL_LANES
                for (int q = 0; q < tile_n; q++) {
                    UNROLL
                    for (int i = 0; i < 4; i++) fours[q][i] = pixels[u][w + i][q];
                }
                for (int q = 0; q < tile_n; q++) {
                    UNROLL
                    for (int i = 0; i < 4; i++) row[q][w + i] = fours[q][i];
                }
            }
            for (int q = 0; q < tile_n; q++) {
                const float bias = b ? b[o0 + q] : 0;
                const int at = ((n * s.C + o0 + q) * s.H + h + u) * s.W + w0;
                UNROLL_LANES
                for (int w = 0; w < width; w++) y.store(at + w, row[q][w] + bias);
            }
        }
    });
}
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
    const Range part = slice_of({0, x.tiles()}, group);
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

static TiledImages tiled_images(const ConvShape &s, bool outputs) {
    const int rows = blocks(s.OH, 2), columns = blocks(s.OW, 2);
    if (outputs) return {s.N, s.O, s.OH, s.OW, 0, rows, columns};
    return {s.N, s.C, s.H, s.W, s.padding, rows, columns};
}
// y (N,O,OH,OW) = the correlation of X (N,C,H,W) with filters as of winograd_filter_kernel, plus b
static void winograd(const Store &y, const float *X, const float *W, int by_o, int by_c, int by_k,
                     const float *b, const ConvShape &s, Device device) {
    if (s.N == 0) return;
    const Panels u(s.C, s.O);
    const Tensor U = empty({16, u.by_e}, device);
    LAUNCH(winograd_filter_kernel<<<blocks(s.O * s.C / wide, 64), 64, 0, stream_of(device)>>>(
        U.ptr(), u, W, by_o, by_c, by_k, s.O, s.C));
    const TiledImages x = tiled_images(s, false), out = tiled_images(s, true);
    const Panels v(group, s.C), m(group, s.O);
    const dim3 parts(1, 1, min(32, blocks(x.tiles(), group)));
    const Tensor memory = empty({(int)parts.z, 16, v.by_e + m.by_e}, device);
    LAUNCH(winograd_kernel<<<parts, 1, 0, stream_of(device)>>>(y, X, x, U.ptr(), u, b, out,
                                                               memory.ptr(), v, m));
}
static void winograd_forward(const Store &y, const Tensor &X, const Tensor &W, const Tensor &b,
                             const ConvShape &s) {
    winograd(y, X.ptr(), W.ptr(), s.W_stride_o, 9 * s.W_stride_k, s.W_stride_k, b.ptr(), s,
             X.device);
}
static void winograd_backward_input(const Tensor &X, const Tensor &W, const Tensor &y,
                                    const ConvShape &s) {
    const int k = s.W_stride_k;
    const Sizes turned = {s.N, s.O, s.OH, s.OW, s.C, 3, 1, 2 - s.padding, s.H, s.W};
    const Tensor dy = dy_of(y);
    winograd(target_of(X), dy.ptr(), W.ptr() + 8 * k, 9 * k, s.W_stride_o, -k, nullptr,
             {turned, s.rung, 0, 0}, X.device);
}
static void winograd_backward_weights(const Tensor &X, const Tensor &W, const Tensor &b,
                                      const Tensor &y, const ConvShape &s) {
    const Device device = X.device;
    const Tensor dy = dy_of(y);
    const Store dW = target_of(W), db = target_of(b);
    if (db.data) channel_sums(db, dy);
    if (!dW.data) return;
    const TiledImages x = tiled_images(s, false), out = tiled_images(s, true);
    const int C = s.C, O = s.O, at_once = min(x.tiles(), 1 << 10) + 1; // what a cache holds
    const Panels sums(O, C), v(at_once, C), g(at_once, O);
    const Tensor V = empty({16, v.by_e}, device), Y = empty({16, g.by_e}, device);
    const Tensor S = empty({16, sums.by_e}, device);
    const dim3 grid(blocks(blocks(O, product_m) * C / tile_n, 4), 16);
    for (int t = 0; t == 0 || t < x.tiles(); t += at_once) {
        const int end = min(t + at_once, x.tiles()), rows = blocks(end - t, row_of_tiles);
        LAUNCH(winograd_tiles_kernel<false>
               <<<blocks(rows * C / tile_n, 4), 4, 0, stream_of(device)>>>(V.ptr(), v, X.ptr(), x,
                                                                           t, end));
        LAUNCH(winograd_tiles_kernel<true>
               <<<blocks(rows * O / tile_n, 4), 4, 0, stream_of(device)>>>(Y.ptr(), g, dy.ptr(),
                                                                           out, t, end));
        LAUNCH(winograd_sum_kernel<<<grid, 4, 0, stream_of(device)>>>(S.ptr(), sums, Y.ptr(), g, V.ptr(),
                                                               v, O, C, end - t, t > 0));
    }
    LAUNCH(winograd_weights_kernel<<<blocks(O * C), threads, 0, stream_of(device)>>>(
        dW, S.ptr(), sums, s.W_stride_o, s.W_stride_k, O, C));
}
#endif
} // namespace fast
