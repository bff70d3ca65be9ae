// Winograd's minimal filtering: a 3x3 convolution of stride 1 with 4 times fewer products.
// A tile y of m x m outputs depends on a window d of (m+2) x (m+2) inputs: 9*m*m products with the
// filter g. With the matrices of F(m x m,3x3) (Lavin and Gray 2016) it takes (m+2) x (m+2), where *
// multiplies elements:
//     y = A^T [(G g G^T) * (B^T d B)] A
// Filters U = G g G^T are transformed once, windows V = B^T d B once for all outputs, and the sum
// over channels comes before A^T [] A. So each of the elements e is a product of matrices:
//     M[e] (tiles,O) = V[e] (tiles,C) @ U[e] (C,O)
// dX is the same convolution of dy, with the filter turned by 180 degrees. And because all is
// linear, dg takes the transposes: G^T [sum over tiles of (A dy A^T) * (B^T d B)] G.
// On a GPU m is 4: transform all windows, multiply by the loop of shared.h, transform back. The
// weight gradient finds the windows of the forward pass again. (A CPU does all this for a few tiles
// at a time, and m is 2: winograd_cpu.h.)
// Gain: on an H100 the products of a step of ResNet-18 at batch 256 take 11.8 in place of 19.7 ms
// (measured with a prototype).
// Cost: a larger m adds rounding errors, see README.md; and V has 2.25 to 5 times the size of X.
// defines: is_winograd, winograd_forward, winograd_backward_input, winograd_backward_weights

namespace fast {
static bool is_winograd(const ConvShape &s) {
    if (s.K != 3 || s.stride != 1) return false;
    if (warp_size == 1) return s.rung == tiled && s.C % 32 == 0 && s.O % 32 == 0;
    // On a GPU few channels do not pay for the transforms; in tf32 large planes do not, either
    const bool pays = s.rung == shared || (s.rung == tf32 && s.OH * s.OW <= 49);
    const double tiles = (double)s.N * blocks(s.OH, 4) * blocks(s.OW, 4) + 4;
    const bool fits = 36 * tiles * max(s.C, s.O) <= INT_MAX; // into a Tensor
    return pays && fits && s.C % 64 == 0 && s.O % 64 == 0;
}

#if defined(__CUDACC__) || defined(MGPU_LANES)
__device__ constexpr float BT(int i, int j) {
    constexpr float all[6][6] = {{4, 0, -5, 0, 1, 0},  {0, -4, -4, 1, 1, 0}, {0, 4, -4, -1, 1, 0},
                                 {0, -2, -1, 2, 1, 0}, {0, 2, -1, -2, 1, 0}, {0, 4, 0, -5, 0, 1}};
    return all[i][j];
}
__device__ constexpr float G(int i, int j) {
    constexpr float all[6][3] = {{6, 0, 0}, {-4, -4, -4}, {-4, 4, -4},
                                 {1, 2, 4}, {1, -2, 4},   {0, 0, 24}};
    return all[i][j] / 24;
}
__device__ constexpr float AT(int i, int j) {
    constexpr float all[4][6] = {
        {1, 1, 1, 1, 1, 0}, {0, 1, -1, 2, -2, 0}, {0, 1, 1, 4, 4, 0}, {0, 1, -1, 8, -8, 1}};
    return all[i][j];
}
__device__ constexpr float GT(int i, int j) { return G(j, i); }
__device__ constexpr float A(int i, int j) { return AT(j, i); }
// x = T x T^T, T (rows,columns). All loops are unrolled: T's elements become constants, and zeros
// cost nothing.
template <float (*T)(int, int), int rows, int columns>
__device__ __forceinline__ void transform(float (&x)[6][6]) {
    float half[6][6] = {};
    UNROLL
    for (int k = 0; k < rows * columns * columns; k++) {
        const int i = k / columns / columns, from = k / columns % columns, j = k % columns;
        if (T(i, from) != 0) half[i][j] += T(i, from) * x[from][j];
    }
    UNROLL
    for (int k = 0; k < rows * rows; k++) {
        float sum = 0;
        UNROLL
        for (int j = 0; j < columns; j++)
            if (T(k % rows, j) != 0) sum += T(k % rows, j) * half[k / rows][j];
        x[k / rows][k % rows] = sum;
    }
}

// Images in tiles of 4x4 outputs, t = (n,i,j) < count. An array [e][channel][t] has `pitch` numbers
// for each channel, a multiple of 4 for Rows.
struct TiledImages {
    int C, H, W, padding, count, pitch;
    Divisor rows, columns; // of tiles
    TiledImages(int C, int H, int W, int padding, const ConvShape &s)
        : C(C), H(H), W(W), padding(padding), count(s.N * blocks(s.OH, 4) * blocks(s.OW, 4)),
          pitch(blocks(count, 4) * 4), rows(blocks(s.OH, 4)), columns(blocks(s.OW, 4)) {}
    struct Corner {
        int plane, h, w;
    };
    __device__ __forceinline__ Corner corner(int t, int c) const {
        const int row = columns(t), n = rows(row);
        return {(n * C + c) * H * W, 4 * (row - n * int(rows.d)) - padding,
                4 * (t - row * int(columns.d)) - padding};
    }
    // The offset of pixel (a,b) of a tile, or -1 if that lies outside of the image
    __device__ __forceinline__ int at(const Corner &from, int a, int b) const {
        const int h = from.h + a, w = from.w + b;
        return h >= 0 && h < H && w >= 0 && w < W ? from.plane + h * W + w : -1;
    }
};
// V[e][c][t] = (T x T^T)[e] of the pixels x (size,size) of tile t of X.   One thread per t;
// blockIdx.y = c.
template <float (*T)(int, int), int size>
__global__ void winograd_tiles_kernel(float *V, const float *X, TiledImages s) {
    const int t = blockIdx.x * blockDim.x + threadIdx.x, c = blockIdx.y;
    if (t >= s.count) return;
    const auto from = s.corner(t, c);
    float x[6][6];
    UNROLL
    for (int k = 0; k < size * size; k++) {
        const int at = s.at(from, k / size, k % size);
        x[k / size][k % size] = at >= 0 ? X[at] : 0;
    }
    transform<T, 6, size>(x);
    V += c * s.pitch + t;
    UNROLL
    for (int e = 0; e < 36; e++) V[e * s.C * s.pitch] = x[e / 6][e % 6];
}
// U[e][c][o] = (G g G^T)[e] of the filter g of output o and input c.   One thread per c and o.
__global__ void winograd_filter_kernel(float *U, const float *W, int by_o, int by_c, int by_k,
                                       int O, int C) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, c = i / O, o = i % O;
    if (c >= C) return;
    float g[6][6];
    UNROLL
    for (int k = 0; k < 9; k++) g[k / 3][k % 3] = W[o * by_o + c * by_c + k * by_k];
    transform<G, 6, 3>(g);
    UNROLL
    for (int e = 0; e < 36; e++) U[e * C * O + i] = g[e / 6][e % 6];
}
// y = A^T M A + b, of tile t and output o = blockIdx.y, from M[e][o][t].   One thread per t. It
// stores V neighbours at a time, after it has loaded all masks and addends.
template <int V>
__global__ void __launch_bounds__(128)
    winograd_outputs_kernel(Store y, const float *M, const float *b, TiledImages s) {
    const int t = blockIdx.x * blockDim.x + threadIdx.x, o = blockIdx.y;
    if (t >= s.count) return;
    const float bias = b ? b[o] : 0;
    const auto to = s.corner(t, o);
    float m[6][6];
    M += o * s.pitch + t;
    UNROLL
    for (int e = 0; e < 36; e++) m[e / 6][e % 6] = M[e * s.C * s.pitch];
    transform<AT, 4, 6>(m);
    Vector<V> mask[16 / V] = {}, plus[16 / V] = {};
    UNROLL
    for (int k = 0; k < 16; k += V) {
        const int at = s.at(to, k / 4, k % 4);
        if (y.mask && at >= 0) mask[k / V] = (const Vector<V> &)y.mask[at];
        if (y.plus && at >= 0) plus[k / V] = (const Vector<V> &)y.plus[at];
    }
    UNROLL
    for (int k = 0; k < 16; k += V) {
        const int at = s.at(to, k / 4, k % 4);
        Vector<V> value;
        UNROLL
        for (int q = 0; q < V; q++) value.x[q] = m[k / 4][k % 4 + q] + bias;
        if (at >= 0) store(y, at / V, value, mask[k / V], plus[k / V]);
    }
}
// dW = or += G^T S G, from S[e][o][c].   One thread per i = (o,c).
__global__ void winograd_weights_kernel(Store dW, const float *S, int by_o, int by_k, int O,
                                        int C) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, o = i / C, c = i % C;
    if (o >= O) return;
    float m[6][6];
    UNROLL
    for (int e = 0; e < 36; e++) m[e / 6][e % 6] = S[e * O * C + i];
    transform<GT, 3, 6>(m);
    UNROLL
    for (int k = 0; k < 9; k++) dW.store(o * by_o + (c * 9 + k) * by_k, m[k / 3][k % 3]);
}

template <float (*T)(int, int), int size>
static Tensor winograd_tiles(const float *X, const TiledImages &s, Device device) {
    const Tensor V = empty({36, s.C, s.pitch}, device);
    const dim3 grid(blocks(s.count, 128), s.C);
    if (s.count > 0)
        LAUNCH(winograd_tiles_kernel<T, size><<<grid, 128, 0, stream_of(device)>>>(V.ptr(), X, s));
    return V;
}
// Launch the 36 products C[e] (N,M) = or, in slices, parts of it.
template <class Tile, template <class, bool> class Of>
static void winograd_products(float *C, const float *A, const float *B, const Product &p,
                              int slices, Device device) {
    const dim3 grid(blocks(p.M, Tile::TM), blocks(p.N, Tile::TN), 36 * slices);
    const Products<1> all = {{{C}, {}, nullptr, 1, p.M * p.N}, A, {B}, {p}};
    LAUNCH(product_kernel<Tile, Of, Of, 1><<<grid, Tile::threads, 0, stream_of(device)>>>(all));
}
// Put V into *kept, if that is not null.
static void winograd(const Store &y, const float *X, const float *W, int by_o, int by_c, int by_k,
                     const float *b, const ConvShape &s, Device device, Tensor *kept = nullptr) {
    if (s.N == 0) return;
    const int C = s.C, O = s.O;
    const TiledImages x(C, s.H, s.W, s.padding, s), out(O, s.OH, s.OW, 0, s);
    const Tensor U = empty({36, C, O}, device), M = empty({36, O, x.pitch}, device);
    LAUNCH(winograd_filter_kernel<<<blocks(C * O, 128), 128, 0, stream_of(device)>>>(
        U.ptr(), W, by_o, by_c, by_k, O, C));
    const Tensor V = winograd_tiles<BT, 6>(X, x, device);
    if (kept) *kept = V;
    const Map tiles = spaced(x.pitch, 1);
    winograd_products<Fp32::Columns64, Rows>(M.ptr(), V.ptr(), U.ptr(),
                                             {x.pitch, O, C, tiles, spaced(C, x.pitch), 1, 1,
                                              spaced(C, O), spaced(O, 1), tiles, x.pitch, 0, 0, 36,
                                              C * x.pitch, C * O},
                                             1, device);
    const bool four = s.OW % 4 == 0 && are_aligned({y.data, y.plus, y.mask});
    const auto outputs = four ? winograd_outputs_kernel<4> : winograd_outputs_kernel<1>;
    LAUNCH(outputs<<<dim3(blocks(x.count, 128), O), 128, 0, stream_of(device)>>>(y, M.ptr(), b,
                                                                                 out));
}
// S[e][o][c] = sum over t of Q[e][o][t] * V[e][c][t], in slices, which are added before GT
template <class Tile>
static void winograd_sums(float *S, const float *V, const float *Q, const TiledImages &x, int O,
                          Device device) {
    const int C = x.C, T = x.count;
    const Map terms = spaced(T, 1);
    const Product p = {
        C, O, T,  spaced(C, x.pitch), terms,      1, 1, terms, spaced(O, x.pitch), spaced(C, 1), C,
        0, 0, 36, C * x.pitch,        O * x.pitch};
    Product flat = p; // all sums in a row
    flat.M = 36 * O * C, flat.N = 1, flat.C_row = spaced(flat.M, 1);
    const int slices = product_slices<Tile>(36 * blocks(C, Tile::TM) * blocks(O, Tile::TN), T,
                                            flat.M, multiprocessors(device));
    in_slices(slices, {{S}, {}, nullptr}, flat, device, [&](const ProductOut &to, const Product &) {
        winograd_products<Tile, Gather>(to.C.data, V, Q, p, slices, device);
    });
}
static void winograd_backward_weights(const Store &dW, const Store &db, const Tensor &X,
                                      const Tensor &dy, const ConvShape &s, const Tensor &kept) {
    const Device device = X.device;
    const Tensor S = empty({36, s.O, s.C}, device);
    if (db.data) channel_sums(db, dy);
    if (!dW.data) return;
    const TiledImages x(s.C, s.H, s.W, s.padding, s), out(s.O, s.OH, s.OW, 0, s);
    const Tensor V = kept.data ? kept : winograd_tiles<BT, 6>(X.ptr(), x, device);
    const Tensor Q = winograd_tiles<A, 4>(dy.ptr(), out, device);
    const auto sums = s.C <= 64 ? winograd_sums<Fp32::Square64> : winograd_sums<Fp32::Columns64>;
    sums(S.ptr(), V.ptr(), Q.ptr(), x, s.O, device);
    LAUNCH(winograd_weights_kernel<<<blocks(s.O * s.C), threads, 0, stream_of(device)>>>(
        dW, S.ptr(), s.W_stride_o, s.W_stride_k, s.O, s.C));
}
#endif

static void winograd_forward(const Store &y, const Tensor &X, const Tensor &W, const Tensor &b,
                             const ConvShape &s, Tensor *kept) {
    winograd(y, X.ptr(), W.ptr(), s.W_stride_o, 9 * s.W_stride_k, s.W_stride_k, b.ptr(), s,
             X.device, kept);
}
static void winograd_backward_input(const Store &dX, const Tensor &dy, const Tensor &W,
                                    const ConvShape &s) {
    const int k = s.W_stride_k;
    const Sizes turned = {s.N, s.O, s.OH, s.OW, s.C, 3, 1, 2 - s.padding, s.H, s.W};
    winograd(dX, dy.ptr(), W.ptr() + 8 * k, 9 * k, s.W_stride_o, -k, nullptr,
             {turned, s.rung, 0, 0}, W.device);
}
} // namespace fast
