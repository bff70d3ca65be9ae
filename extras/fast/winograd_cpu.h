// Winograd's filtering on a CPU, with the tiles of a GPU: F(4x4,3x3), F(5x5,3x3) and F(3x3,5x5).
// A block, which is a thread, transforms a few tiles, multiplies them and transforms back while
// they are in the core's cache. winograd.h has the formulas. With a stride of 2 tiles have 2x2
// outputs, which take 25 products in place of 36.
// Gain: ResNet-18's step takes 0.53 of the time, LeNet's 0.60, lab_cnn's 0.69.
// Cost: rounding errors, see README.md.
// defines: is_winograd, winograd_forward, winograd_backward

#if !defined(__CUDACC__) && !defined(MGPU_LANES)
namespace fast {
// M (rows,columns) = or += A @ B, K terms, of product_m rows of A from `first` on: rows of its
// panels or, with turned, columns. Of its own: inlined, the sums would leave the registers.
// LeNet's 20 channels, and the last of its 50, take only `narrow` columns.
constexpr int product_m = tile_m == 12 ? 13 : tile_m; // 64, 128, 256, 512 fill tiles of 13
constexpr int narrow = tile_n - 8;
typedef float Half __attribute__((vector_size(32), aligned(4), may_alias));
template <bool turned, int columns>
__device__ __noinline__ void product_tile(float *M, const float *A, const Panels &p, int first,
                                          int rows, const float *B, int K, bool add) {
    constexpr int whole = columns / wide * wide;
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
            __builtin_prefetch(B + 8 * tile_n); // from the second-level cache
            __builtin_prefetch(B + 8 * tile_n + tile_n / 2);
            UNROLL
            for (int r = 0; r < product_m; r++) {
                const Wide ar = a[offset[r]] - Wide{};
                UNROLL
                for (int q = 0; q < whole; q += wide) (Wide &)sum[r][q] += ar * (const Wide &)B[q];
                if (whole < columns)
                    (Half &)sum[r][whole] += (const Half &)ar * (const Half &)B[whole];
            }
        }
    }
    rows -= first;
    UNROLL
    for (int r = 0; r < product_m; r++) {
        if (r >= rows) break;
        UNROLL
        for (int q = 0; q < whole; q += wide) {
            Wide &to = (Wide &)M[r * tile_n + q];
            to = add ? to + (Wide &)sum[r][q] : (Wide &)sum[r][q];
        }
        Half &to = (Half &)M[r * tile_n + whole];
        if (whole < columns) to = add ? to + (Half &)sum[r][whole] : (Half &)sum[r][whole];
    }
}
// Compute y from X, of_X being B^T and of_M A^T; or dX from dy, with A and B. Each block, a thread,
// takes a part of the tiles, `group` at a time: their V and M, in memory of its own, stay in the
// core's cache.
template <class F, typename F::Name of_X, typename F::Name of_M>
__global__ void winograd_kernel(Store y, const float *X, TiledImages x, const float *U, Panels u,
                                const float *b, TiledImages out, float *memory, Panels v, Panels m,
                                int group) {
    const Range part = slice_of({0, x.count}, group);
    float *const V = memory + blockIdx.z * F::elements * (long(v.by_e) + m.by_e);
    float *const M = V + F::elements * v.by_e;
    for (int t = part.begin; t < part.end; t += group) {
        const int end = min(t + group, part.end), rows = end - t;
        for (int c = 0; c < x.C; c += tile_n) transform_tiles<F, of_X>(V, v, X, x, t, end, c);
        for (int e = 0; e < F::elements; e++)
            for (int o = 0; o < out.C; o += tile_n) {
                const auto tile =
                    out.C - o > narrow ? product_tile<false, tile_n> : product_tile<false, narrow>;
                for (int r = 0; r < rows; r += product_m)
                    tile(M + e * m.by_e + m.at(r, o), V + e * v.by_e, v, r, rows,
                         U + e * u.by_e + u.at(0, o), x.C, false);
            }
        for (int o = 0; o < out.C; o += tile_n)
            transform_products<F, of_M>(y, M, m, b, out, t, end, o);
    }
}
// transform_tiles, for a row of tiles and tile_n channels a thread
template <class F, typename F::Name T>
__global__ void winograd_tiles_kernel(float *V, Panels p, const float *X, TiledImages s, int first,
                                      int last) {
    constexpr int most = TileRow<F::distance(T)>::most;
    const int i = blockIdx.x * blockDim.x + threadIdx.x, panels = p.columns(s.C) / tile_n;
    const int begin = first + i / panels * most, end = min(begin + most, last);
    if (begin < end)
        transform_tiles<F, T>(V + p.at(begin - first, 0), p, X, s, begin, end, i % panels * tile_n);
}
// S[e][o][c] = or += sum over t < tiles of Y[e][t][o] * V[e][t][c]   One thread per product_tile.
__global__ void winograd_sum_kernel(float *S, Panels s, const float *Y, Panels y, const float *V,
                                    Panels v, int O, int C, int tiles, bool add) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, e = blockIdx.y;
    const int of_panel = (O + product_m - 1) / product_m, o = i % of_panel * product_m;
    const int c = i / of_panel * tile_n;
    if (c >= C) return;
    const auto tile = C - c > narrow ? product_tile<true, tile_n> : product_tile<true, narrow>;
    tile(S + e * s.by_e + s.at(o, c), Y + e * y.by_e, y, o, O, V + e * v.by_e + v.at(0, c), tiles,
         add);
}
// dW = G^T S G   One thread per o and `wide` neighbours c.
template <class F>
__global__ void __launch_bounds__(64)
    winograd_weights_kernel(Store dW, const float *S, Panels p, int by_o, int by_k, int O, int C) {
    constexpr int n = F::n, r = F::r;
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const int o = i % O, c = i / O * wide; // neighbours o are neighbours in S
    if (c >= C) return;
    alignas(sizeof(Wide)) Wide w[r][r];
    const int by_e = p.by_e / wide;
    transform<F, F::GT>(w[0], r, 1, (const Wide *)(S + p.at(o, c)), n * by_e, by_e);
    for (int q = 0; q < min(wide, C - c); q++)
        for (int k = 0; k < r * r; k++)
            dW.store(o * by_o + ((c + q) * r * r + k) * by_k, ((const float *)&w[k / r][k % r])[q]);
}

template <class F, typename F::Name of_X, typename F::Name of_M>
static void winograd(const Store &y, const float *X, const TiledImages &x, const float *W, int by_o,
                     int by_c, int by_k, const float *b, const TiledImages &out, Device device) {
    if (x.count == 0) return;
    // Few tiles fit the cache. But if U does not, it is read once for each group. Each core has
    // some parts, in case one is delayed, but all together at most 8 MB if they can.
    int cores;
    CUDA_CHECK(cudaDeviceGetAttribute(&cores, cudaDevAttrMultiProcessorCount, cuda_device(device)));
    const int tiles = min(min(max(39, x.C / 4), 65), blocks(x.count, cores));
    const int step = of_M == F::B ? x.of_image : product_m; // whole images, rather too few
    const int group = (of_M == F::B ? max(1, tiles / step) : blocks(tiles, step)) * step;
    const Panels u(x.C, out.C), v(group, x.C), m(group, out.C);
    const int floats = F::elements * (v.by_e + m.by_e);
    const int rounds = max(1, min(4, (2 << 20) / (cores * floats)));
    const dim3 parts(1, 1, min(cores * rounds, blocks(x.count, group)));
    // (All in one piece of memory, which a large tensor may take next)
    const Tensor memory = empty({int(parts.z) * floats + F::elements * u.by_e}, device);
    float *const U = memory.ptr() + parts.z * floats;
    const int registers = u.columns(out.C) / wide * x.C;
    LAUNCH(winograd_filter_kernel<F><<<blocks(registers, 64), 64, 0, stream_of(device)>>>(
        U, u, W, by_o, by_c, by_k, out.C, x.C));
    LAUNCH(winograd_kernel<F, of_X, of_M>
           <<<parts, 1, 0, stream_of(device)>>>(y, X, x, U, u, b, out, memory.ptr(), v, m, group));
}
template <class F>
static void winograd_backward_weights(const Store &dW, const Tensor &X, const Tensor &dy,
                                      const ConvShape &s) {
    const Device device = X.device;
    const TiledImages x = tiled_inputs(s), out = tiled_outputs(s);
    const int C = s.C, O = s.O, elements = F::elements;
    const int most = min(max(128, 2 * min(C, O)), (5 << 20) / (elements * (C + O)));
    const int at_once = min(x.count, most) + 1; // few fit a cache, but each time S is read again
    const Panels sums(O, C), v(at_once, C), g(at_once, O);
    const int of_V = elements * v.by_e, of_all = of_V + elements * g.by_e;
    const Tensor memory = empty({of_all + elements * sums.by_e}, device);
    float *const V = memory.ptr(), *const Y = V + of_V, *const S = V + of_all;
    const int C_panels = blocks(C, tile_n), O_panels = blocks(O, tile_n);
    const dim3 grid(blocks(blocks(O, product_m) * C_panels, 4), elements);
    for (int t = 0; t == 0 || t < x.count; t += at_once) {
        const int end = min(t + at_once, x.count);
        const int rows = blocks(end - t, TileRow<F::distance(F::BT)>::most);
        const int Y_rows = blocks(end - t, TileRow<F::distance(F::A)>::most);
        LAUNCH(winograd_tiles_kernel<F, F::BT>
               <<<blocks(rows * C_panels, 4), 4, 0, stream_of(device)>>>(V, v, X.ptr(), x, t, end));
        LAUNCH(winograd_tiles_kernel<F, F::A>
               <<<blocks(Y_rows * O_panels, 4), 4, 0, stream_of(device)>>>(Y, g, dy.ptr(), out, t,
                                                                           end));
        LAUNCH(winograd_sum_kernel<<<grid, 4, 0, stream_of(device)>>>(S, sums, Y, g, V, v, O, C,
                                                                      end - t, t > 0));
    }
    LAUNCH(winograd_weights_kernel<F>
           <<<blocks(O * blocks(C, wide), 64), 64, 0, stream_of(device)>>>(
               dW, S, sums, s.W_stride_o, s.W_stride_k, O, C));
}
bool is_winograd(const ConvShape &s) {
    const bool halves = s.stride == 2 && ((s.K == 3 && s.padding == 1) || (s.K == 1 && !s.padding));
    const bool whole = s.stride == 1 && (s.K == 3 || s.K == 5);
    const bool many = s.K < 5 ? s.C % 32 == 0 && s.O % 32 == 0 : min(s.C, s.O) > 16;
    const bool fits = s.stride > 1 ? s.OW <= 16 : s.K < 5 || s.OW <= 30; // a TileRow, for dX
    return s.rung == tiled && (halves || whole) && many && fits;
}
template <class Call> static void with_filtering(const ConvShape &s, Call call) {
    if (s.stride == 2 && s.K == 3) call(Filtering<2, 3, 2>());
    else if (s.stride == 2) call(Filtering<1, 1, 2>());
    else if (s.K == 5) call(Filtering<3, 5>());
    else if (winograd_outputs(s) == 4) call(Filtering<4, 3>());
    else call(Filtering<5, 3>());
}
void winograd_forward(const Store &y, const Tensor &X, const Tensor &W, const Tensor &b,
                      const ConvShape &s, Tensor *) {
    const int k = s.W_stride_k, of_c = s.K * s.K * k;
    with_filtering(s, [&](auto filtering) {
        typedef decltype(filtering) F;
        winograd<F, F::BT, F::AT>(y, X.ptr(), tiled_inputs(s), W.ptr(), s.W_stride_o, of_c, k,
                                  b.ptr(), tiled_outputs(s), X.device);
    });
}
// With 3x3 taps dX is the same convolution of dy, with the filter turned by 180 degrees. With 5x5
// taps it comes from the tiles of dy, as on a GPU: LeNet's dy has 9 of them, its dX would have 25.
// So it does with a stride of 2.
void winograd_backward(const Store &dX, const Store &dW, const Store &db, const Tensor &X,
                       const Tensor &dy, const Tensor &W, const ConvShape &s, const Tensor &) {
    const int k = s.W_stride_k, of_c = s.K * s.K * k, of_o = s.W_stride_o;
    if (db.data) channel_sums(db, dy);
    with_filtering(s, [&](auto filtering) {
        typedef decltype(filtering) F;
        if (dW.data) winograd_backward_weights<F>(dW, X, dy, s);
        if (!dX.data) return;
        if constexpr (F::r == 5 || F::stride > 1) {
            return winograd<F, F::A, F::B>(dX, dy.ptr(), tiled_outputs(s), W.ptr(), of_c, of_o, k,
                                           nullptr, tiled_inputs(s), X.device);
        } else {
            const ConvShape turned = {
                {s.N, s.O, s.OH, s.OW, s.C, 3, 1, 2 - s.padding, s.H, s.W}, s.rung, 0, 0};
            with_filtering(turned, [&](auto filtering) {
                typedef decltype(filtering) F;
                if constexpr (F::r == 3 && F::stride == 1)
                    winograd<F, F::BT, F::AT>(dX, dy.ptr(), tiled_inputs(turned), W.ptr() + 8 * k,
                                              of_c, of_o, -k, nullptr, tiled_outputs(turned),
                                              X.device);
            });
        }
    });
}
} // namespace fast
#endif
