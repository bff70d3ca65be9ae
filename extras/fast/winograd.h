// Winograd's minimal filtering: convolutions of stride 1 with 4 to 6 times fewer products.
// A tile y of m x m outputs depends on a window d of n x n inputs, n = m+r-1, and on a filter g of
// r x r taps: r*r*m*m products. F(m x m,r x r) (Lavin and Gray 2016) takes n*n, where * multiplies
// elements:
//     y = A^T [(G g G^T) * (B^T d B)] A
// Filters U = G g G^T are transformed once, windows V = B^T d B once for all outputs, and the sum
// over channels comes before A^T [] A. So each of the n*n elements e is a product of matrices:
//     M[e] (tiles,O) = V[e] (tiles,C) @ U[e] (C,O)
// All is linear. So the gradients take the transposes, with Q = A dy A^T:
//     dd = B [sum over o of U * Q] B^T     dg = G^T [sum over tiles of Q * V] G
// dX is the sum of dd where windows overlap. V serves y and dW, Q dW and dX. (A CPU does all this
// for a few tiles at a time: winograd_cpu.h.)
// Gain: without it a step takes longer on an H100. ResNet-18: 1.71 times, LeNet: 1.18, lab_cnn:
// 1.03. If V is computed twice, ResNet-18 takes 1.04 times as long; with m = 4 at 14x14, 1.02.
// Cost: a larger m adds rounding errors, see README.md; and V has 1.8 to 5 times the size of X.
// defines: is_winograd, winograd_forward, winograd_backward

#if defined(__CUDACC__) || defined(MGPU_LANES)
namespace fast {
template <class Call> static void with_filtering(const ConvShape &s, Call call) {
    const int m = winograd_outputs(s);
    if (m == 3) call(Filtering<3, 5>());
    if (m == 4) call(Filtering<4, 3>());
    if (m == 5) call(Filtering<5, 3>());
}

// V[e][c][t] = (T x T^T)[e] of the pixels x (size,size) of tile t of X.   One thread per t;
// blockIdx.y = c.
template <class F, typename F::Name T>
__global__ void __launch_bounds__(winograd_threads)
    winograd_tiles_kernel(float *V, const float *X, TiledImages s) {
    const int t = blockIdx.x * blockDim.x + threadIdx.x, c = blockIdx.y;
    if (t >= s.pitch) return; // past the last tile: zeros
    const int row = s.columns(t), n = s.rows(row);
    const int h = F::m * (row - n * int(s.rows.d)) - s.padding;
    const int w = F::m * (t - row * int(s.columns.d)) - s.padding;
    X += (n * s.C + c) * s.H * s.W;
    constexpr int size = F::columns(T);
    float x[size][size], v[F::n][F::n];
    UNROLL
    for (int k = 0; k < size * size; k++) {
        const int y = h + k / size, z = w + k % size;
        const bool inside = y >= 0 && y < s.H && z >= 0 && z < s.W && t < s.count;
        x[k / size][k % size] = inside ? X[y * s.W + z] : 0;
    }
    transform<F, T>(v[0], F::n, 1, x[0], size, 1);
    V += c * s.pitch + t;
    UNROLL
    for (int e = 0; e < F::elements; e++) V[e * s.C * s.pitch] = v[e / F::n][e % F::n];
}
// The transpose: X = b + the sum of T m T^T where they overlap, of tile t and channel c, from
// M[e][c][t]. First a thread has a tile, then four pixels at a time.
template <class F, typename F::Name T>
__global__ void __launch_bounds__(winograd_threads)
    winograd_images_kernel(Store X, const float *M, const float *b, TiledImages s) {
    constexpr int size = F::rows(T), pitch = size * size | 1, at_once = 4;
    constexpr int overlap = (size + F::m - 1) / F::m; // of tiles in a row
    __shared__ float tiles[winograd_threads * pitch];
    const int thread = threadIdx.x, c = blockIdx.y, down = s.rows.d, across = s.columns.d;
    const int first = blockIdx.x * s.images, images = min(s.images, s.N - first);
    if (thread < images * down * across) {
        float m[F::n][F::n], x[size][size];
        M += c * s.pitch + first * down * across + thread;
        UNROLL
        for (int e = 0; e < F::elements; e++) m[e / F::n][e % F::n] = M[e * s.C * s.pitch];
        transform<F, T>(x[0], size, 1, m[0], F::n, 1);
        UNROLL
        for (int k = 0; k < size * size; k++) tiles[thread * pitch + k] = x[k / size][k % size];
    }
    __syncthreads();
    const float bias = b ? b[c] : 0;
    const int pixels = images * s.H * s.W;
    for (int i0 = thread; i0 < pixels; i0 += at_once * winograd_threads) {
        Vector<1> sum[at_once], mask[at_once] = {}, plus[at_once] = {};
        int at[at_once];
        UNROLL
        for (int q = 0; q < at_once; q++) { // all loads come before the stores
            const int i = min(i0 + q * winograd_threads, pixels - 1), n = s.plane(i);
            const int pixel = i - n * int(s.plane.d), row = s.row(pixel);
            const int h = row + s.padding, w = pixel - row * s.W + s.padding;
            at[q] = ((first + n) * s.C + c) * int(s.plane.d) + pixel;
            if (X.mask) mask[q].x[0] = X.mask[at[q]];
            if (X.plus) plus[q].x[0] = X.plus[at[q]];
            sum[q].x[0] = bias;
            UNROLL
            for (int k = 0; k < overlap * overlap; k++) { // tile (y,z) has the pixel at (u,v)
                const int y = h / F::m - k / overlap, u = h - y * F::m;
                const int z = w / F::m - k % overlap, v = w - z * F::m;
                const int t = (n * down + y) * across + z;
                if (y >= 0 && y < down && u < size && z >= 0 && z < across && v < size)
                    sum[q].x[0] += tiles[t * pitch + u * size + v];
            }
        }
        UNROLL
        for (int q = 0; q < at_once; q++)
            if (i0 + q * winograd_threads < pixels) store(X, at[q], sum[q], mask[q], plus[q]);
    }
}
// Y = or += T x T^T of filters x, i = (row,column) < count. The maps have the indices (row,column,
// element).   One thread per filter.
template <class F, typename F::Name T>
__global__ void winograd_filters_kernel(Store Y, const float *X, int count, Map to, Map from) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, row = to.P(i), column = i - row * to.P.d;
    constexpr int n = F::columns(T), m = F::rows(T);
    float x[n][n], y[m][m];
    if (i >= count) return;
    UNROLL
    for (int k = 0; k < n * n; k++) x[k / n][k % n] = X[from.at({row, column, k}).offset];
    transform<F, T>(y[0], m, 1, x[0], n, 1);
    UNROLL
    for (int k = 0; k < m * m; k++) Y.store(to.at({row, column, k}).offset, y[k / m][k % m]);
}

// db[c] = or += the sum of sums[c][t] over t < n.   One block per c.
__global__ void __launch_bounds__(threads) tile_sums_kernel(Store db, const float *sums, int n) {
    constexpr int warps = threads / warp_size;
    __shared__ float of_warps[warps];
    const int warp = threadIdx.x / warp_size, begin = (long long)n * warp / warps;
    const int end = (long long)n * (warp + 1) / warps;
    sums += blockIdx.x * n + begin;
    const float sum = warp_sum(end - begin, [=](int t) { return sums[t]; });
    if (threadIdx.x % warp_size == 0) of_warps[warp] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    float total = 0;
    UNROLL
    for (int w = 0; w < warps; w++) total += of_warps[w];
    db.store(blockIdx.x, total);
}

template <class F, typename F::Name T>
static Tensor winograd_tiles(const Tensor &X, const TiledImages &s) {
    const Tensor V = empty({F::elements, s.C, s.pitch}, X.device);
    const dim3 grid(blocks(s.pitch, winograd_threads), s.C);
    if (s.count > 0)
        LAUNCH(winograd_tiles_kernel<F, T>
               <<<grid, winograd_threads, 0, stream_of(X.device)>>>(V.ptr(), X.ptr(), s));
    return V;
}
template <class F, typename F::Name T>
static void winograd_images(const Store &X, const Tensor &M, const float *b, const TiledImages &s) {
    const dim3 grid(blocks(s.N, s.images), s.C);
    if (s.count > 0)
        LAUNCH(winograd_images_kernel<F, T>
               <<<grid, winograd_threads, 0, stream_of(M.device)>>>(X, M.ptr(), b, s));
}
// Return the map of an array [element][row][column].
static Map dense(const Axis &row, const Axis &column) {
    return {false, {row.count, column.count}, {column.count, 1}, {1, row.count * column.count}};
}
template <class F, typename F::Name T>
static void winograd_filters(const Store &Y, const Tensor &X, int count, Map to, Map from) {
    LAUNCH(winograd_filters_kernel<F, T>
           <<<blocks(count, 32), 32, 0, stream_of(X.device)>>>(Y, X.ptr(), count, to, from));
}
// Return C[e][n][m] = sum over k < K of A[e][k][m] * B[e][k][n], by Rows, or of A[e][m][k] *
// B[e][n][k], by Spaced: 64 columns at a time, or few.
template <template <class, bool> class Of>
static Tensor winograd_products(const Tensor &A, const Tensor &B, int K) {
    constexpr bool last = std::is_same<Of<Fp32::Small, true>, Spaced<Fp32::Small, true>>(); // k is
    const int elements = A.shape[0], x = last ? 1 : 2, M = A.shape[x], N = B.shape[x];
    auto rows = [&](const Tensor &t) { return spaced(t.shape[x], last ? t.shape[2] : 1); };
    auto terms = [&](const Tensor &t) { return spaced(K, last ? 1 : t.shape[2]); };
    const Tensor C = empty({elements, N, M}, A.device);
    if (M == 0) return C;
    const auto run = N <= 20   ? product_tiles<Fp32::Columns20, Of, Of>
                     : M <= 64 ? product_tiles<Fp32::Square64, Of, Of>
                               : product_tiles<Fp32::Columns64, Of, Of>;
    run({{C.ptr()}, {}, nullptr, 1, M * N}, A.ptr(), B.ptr(),
        {M, N, K, rows(A), terms(A), 1, 1, terms(B), rows(B), spaced(M, 1), M, 0, 0, elements,
         size(A) / elements, size(B) / elements},
        A.device);
    return C;
}

static bool is_winograd(const ConvShape &s) {
    const TiledImages x = tiled_inputs(s);
    const int elements = (x.m + s.K - 1) * (x.m + s.K - 1);
    // Few channels do not pay for the transforms; in tf32 large planes of 3x3 taps do not, either
    const bool many = s.K == 3 ? s.C % 64 == 0 && s.O % 64 == 0 : s.K == 5 && min(s.C, s.O) > 16;
    const bool in_tf32 = s.rung == tf32 && (s.K == 5 || s.OH * s.OW <= 49);
    const bool pays = many && (s.rung == shared || in_tf32);
    const bool fits = 1. * elements * x.pitch * max(s.C, s.O) <= INT_MAX; // into a Tensor
    return s.stride == 1 && pays && fits && x.images > 0;
}
// Put V into *kept, if that is not null.
static void winograd_forward(const Store &y, const Tensor &X, const Tensor &W, const Tensor &b,
                             const ConvShape &s, Tensor *kept) {
    const Axis c = {s.C, s.K * s.K * s.W_stride_k}, o = {s.O, s.W_stride_o},
               tap = {1, s.W_stride_k};
    with_filtering(s, [&](auto filtering) {
        typedef decltype(filtering) F;
        const Tensor V = winograd_tiles<F, F::BT>(X, tiled_inputs(s));
        if (kept) *kept = V;
        const Tensor U = empty({F::elements, s.C, s.O}, W.device);
        winograd_filters<F, F::G>({U.ptr()}, W, s.C * s.O, dense(c, o), {false, c, o, tap});
        winograd_images<F, F::AT>(y, winograd_products<Rows>(V, U, s.C), b.ptr(), tiled_outputs(s));
    });
}
static void winograd_backward(const Store &dX, const Store &dW, const Store &db, const Tensor &X,
                              const Tensor &dy, const Tensor &W, const ConvShape &s,
                              const Tensor &kept) {
    const Axis c = {s.C, s.K * s.K * s.W_stride_k}, o = {s.O, s.W_stride_o},
               tap = {1, s.W_stride_k};
    const TiledImages x = tiled_inputs(s);
    with_filtering(s, [&](auto filtering) {
        typedef decltype(filtering) F;
        const TiledImages out = tiled_outputs(s);
        const Tensor Q = winograd_tiles<F, F::A>(dy, out);
        if (db.data) {
            // Point 1 has the powers 1, 1, ...: its row and column of Q has the sums of the tiles.
            const float *const sums = Q.ptr() + (F::n + 1) * s.O * out.pitch;
            const int n = out.count > 0 ? out.pitch : 0;
            LAUNCH(tile_sums_kernel<<<s.O, threads, 0, stream_of(dy.device)>>>(db, sums, n));
        }
        if (dW.data) {
            const Tensor V = kept.data ? kept : winograd_tiles<F, F::BT>(X, x);
            const Tensor S = winograd_products<Spaced>(Q, V, x.count); // (elements,C,O)
            winograd_filters<F, F::GT>(dW, S, s.C * s.O, {false, c, o, tap}, dense(c, o));
        }
        if (!dX.data) return;
        const Tensor U = empty({F::elements, s.O, s.C}, W.device);
        winograd_filters<F, F::G>({U.ptr()}, W, s.C * s.O, dense(o, c), {false, o, c, tap});
        winograd_images<F, F::B>(dX, winograd_products<Rows>(Q, U, s.O), nullptr, x);
    });
}
} // namespace fast
#endif
