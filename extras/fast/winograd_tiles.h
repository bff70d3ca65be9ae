// Winograd's filtering: its matrices, images in tiles and, on a CPU, the transforms of tiles.
// On a CPU a register holds `wide` channels of a pixel, which are neighbours once a few rows of
// pixels have been copied. So transforms multiply and add whole registers.
// defines: Filtering, transform, TiledImages, Panels, transform_tiles, transform_products

namespace fast {
// F(m x m,r x r). With a stride of 2 even taps filter the even pixels of a row, odd taps the odd
// ones, and y is the sum of both.
template <int m_, int r_, int stride_ = 1> struct Filtering {
    static constexpr int m = m_, r = r_, stride = stride_, n = stride * (m - 1) + r;
    static constexpr int elements = n * n;
    enum Name { AT, G, BT, A, GT, B }; // A^T (m,n), G (n,r), B^T (n,n); then these transposed
    __host__ __device__ static constexpr int rows(Name T) { return T == AT ? m : T == GT ? r : n; }
    __host__ __device__ static constexpr int columns(Name T) { return T == A ? m : T == G ? r : n; }
    // How far apart neighbouring tiles are, in X or in y
    static constexpr int distance(Name T) { return T == BT || T == B ? stride * m : m; }
    struct Matrices {
        float of[3][n][n] = {};
    };
    // Filtering multiplies polynomials by their values at points: row i of a matrix, or column i of
    // A^T, belongs to one of these, the last to infinity. (2 before 1/2: larger errors.)
    __host__ __device__ static constexpr Matrices matrices() {
        const double points[] = {0, 1, -1, .5, -2, 2};
        Matrices all;
        for (int phase = 0, i = 0; phase < stride && phase < r; phase++) {
            const int taps = (r - phase + stride - 1) / stride, last = m + taps - 2;
            for (int point = 0; point <= last; point++, i++) {
                double others[n] = {1}, divisor = 1; // the product of x - p for the other points p
                for (int k = 0; k < last; k++) {
                    if (k == point) continue;
                    for (int j = last; j > 0; j--)
                        others[j] = others[j - 1] - points[k] * others[j];
                    others[0] *= -points[k];
                    if (point < last) divisor *= points[point] - points[k];
                }
                for (int j = 0; j <= last; j++) all.of[BT][i][j * stride + phase] = others[j];
                double power = 1; // of the point
                for (int j = 0; j <= last && point < last; j++, power *= points[point]) {
                    if (j < m) all.of[AT][j][i] = power;
                    if (j < taps) all.of[G][i][j * stride + phase] = power / divisor;
                }
            }
            all.of[AT][m - 1][i - 1] = all.of[G][i - 1][(taps - 1) * stride + phase] = 1;
        }
        return all;
    }
    __device__ __forceinline__ static constexpr float at(Name T, int i, int j) {
        constexpr Matrices all = matrices();
        return T < A ? all.of[T][i][j] : all.of[T - A][j][i];
    }
};
// Return the sum over k of T[i][k] * x[k * by]. Where the loop is unrolled, T's elements are
// constants: zeros cost nothing, and factors 1 and -1 become additions.
template <class F, typename F::Name T>
__device__ __forceinline__ Wide times_row(int i, const Wide *x, int by) {
    constexpr int columns = F::columns(T);
    Wide sum = {};
    bool first = true;
    UNROLL
    for (int k = 0; k < columns; k++) {
        const float factor = F::at(T, i, k);
        if (factor != 0) {
            sum = first ? factor * x[k * by] : sum + factor * x[k * by];
            first = false;
        }
    }
    return sum;
}
// y = or, with `add`, += T x T^T, on a CPU of `wide` channels: x has [i][j] at i * by_row + j *
// by_column, y likewise. (A template forgets that Wide is aligned(4): alignas.)
template <class F, typename F::Name T, bool add = false>
__device__ __forceinline__ void transform(Wide *y, int to_row, int to_column, const Wide *x,
                                          int by_row, int by_column) {
    constexpr int rows = F::rows(T), columns = F::columns(T);
    alignas(sizeof(Wide)) Wide half[rows][columns];
    UNROLL_GPU
    for (int j = 0; j < columns; j++) {
        UNROLL
        for (int i = 0; i < rows; i++) half[i][j] = times_row<F, T>(i, x + j * by_column, by_row);
    }
    UNROLL_GPU
    for (int i = 0; i < rows; i++) {
        UNROLL
        for (int j = 0; j < rows; j++) {
            Wide &to = y[i * to_row + j * to_column];
            const Wide sum = times_row<F, T>(j, half[i], 1);
            to = add ? to + sum : sum;
        }
    }
}

// Return the size m of tiles, the one that takes the fewest products.
static int winograd_outputs(const ConvShape &s) {
    if (s.stride > 1) return s.K == 1 ? 1 : 2;
    if (s.K == 5) return 3;
    auto tiles = [&](int m) { return blocks(s.OH, m) * blocks(s.OW, m); };
    return tiles(5) * 7 * 7 < tiles(4) * 6 * 6 ? 5 : 4;
}
// Images in tiles of m x m outputs, t = (n,i,j) < count. On a GPU an array [e][channel][t] has
// `pitch` numbers for each channel, a multiple of 4 for Rows, and a block that puts tiles together
// has all those of `images` images, a thread for each.
constexpr int winograd_threads = 128;
struct TiledImages {
    int N, C, H, W, padding, m, of_image, count, pitch, images;
    Divisor rows, columns, plane, row; // of tiles, of pixels
    TiledImages(int C, int H, int W, int padding, const ConvShape &s)
        : N(s.N), C(C), H(H), W(W), padding(padding), m(winograd_outputs(s)),
          of_image(blocks(s.OH, m) * blocks(s.OW, m)), count(N * of_image),
          pitch(blocks(count, 4) * 4), images(winograd_threads / of_image), rows(blocks(s.OH, m)),
          columns(blocks(s.OW, m)), plane(H * W), row(W) {}
};
static TiledImages tiled_inputs(const ConvShape &s) { return {s.C, s.H, s.W, s.padding, s}; }
static TiledImages tiled_outputs(ConvShape s) {
    if (winograd_outputs(s) == 1) s.OW *= s.OH, s.OH = 1; // each image as a row
    return {s.O, s.OH, s.OW, 0, s};
}

#if !defined(__CUDACC__) && !defined(MGPU_LANES)
// Where an array [e][row][column] has its elements: its columns form panels of tile_n. The last
// panel may have more columns than there are.
struct Panels {
    int by_panel, by_e; // (a multiple of 4 KiB would be the same set of a cache)
    Panels(int rows, int used) : by_panel(rows * tile_n), by_e(rows * columns(used) + 16) {}
    static int columns(int used) { return (used + tile_n - 1) / tile_n * tile_n; }
    int at(int row, int column) const {
        return column / tile_n * by_panel + row * tile_n + column % tile_n;
    }
};
// U[e][c][o] = (G g G^T)[e] of the filter g of output o and input c, which begins at W[o*by_o +
// c*by_c] and goes on by by_k.   One thread per c and `wide` neighbours o, as many as panels have.
// Past the last output it is that one again.
template <class F>
__global__ void __launch_bounds__(64)
    winograd_filter_kernel(float *U, Panels p, const float *W, int by_o, int by_c, int by_k, int O,
                           int C) {
    constexpr int n = F::n, r = F::r;
    const int i = blockIdx.x * blockDim.x + threadIdx.x, registers = p.columns(O) / wide;
    const int c = i % C, o = i / C * wide; // neighbours c are neighbours in U
    if (i >= registers * C) return;
    alignas(sizeof(Wide)) Wide g[r][r];
    UNROLL
    for (int k = 0; k < r; k++) {
        UNROLL
        for (int i = 0; i < r; i++)
            for (int q = 0; q < wide; q++)
                ((float *)&g[k][i])[q] =
                    W[min(o + q, O - 1) * by_o + c * by_c + (k * r + i) * by_k];
    }
    const int by_e = p.by_e / wide;
    transform<F, F::G>((Wide *)(U + p.at(c, o)), n * by_e, by_e, g[0], r, 1);
}
// --- Channels are neighbours, so that a register holds those of a pixel
// The tiles from t on that are neighbours in a row, at most `most` of them, and before `end`. Tile
// t begins at pixel (h,w) of its image, the next one at a distance from it.
typedef float Four __attribute__((vector_size(16), aligned(4), may_alias)); // neighbours of a row
template <int distance> struct TileRow {
    static constexpr int most = 32 / distance;
    int image, h, w, count;
    __device__ __forceinline__ TileRow(const TiledImages &s, int t, int end) {
        const int row = s.columns(t), j = t - row * s.columns.d;
        image = s.rows(row), h = (row - image * s.rows.d) * distance, w = j * distance;
        count = min(min(most, int(s.columns.d) - j), end - t);
    }
};
// Let n numbers begin their way to the second-level cache: a few at a time, while tiles are
// transformed, since a core waits if it asks for many lines at once.
__device__ __forceinline__ void prefetch(const float *p, int n) {
    for (int i = 0; i < n + 15; i += 16) __builtin_prefetch(p + i, 0, 2);
}
// V[e][t - begin][c] = (T x T^T)[e] of the pixels x (size,size) of tile t, for the tiles from begin
// to end and tile_n channels from c0 on. Past the last channel it is zero.
template <class F, typename F::Name T>
__device__ __noinline__ void transform_tiles(float *V, const Panels &p, const float *X,
                                             const TiledImages &s, int begin, int end, int c0) {
    constexpr int size = F::columns(T), n = F::n, m = F::distance(T), overlap = size - m;
    constexpr int row_of_tiles = TileRow<m>::most, most = (m * row_of_tiles + overlap + 3) / 4;
    alignas(64) float pixels[size][4 * most][tile_n], fours[most][tile_n][4];
    const int plane = s.H * s.W, channels = min(tile_n, s.C - c0);
    const int by_e = p.by_e / wide;
    if (channels < tile_n) {
        memset(pixels, 0, sizeof pixels);
        memset(fours, 0, sizeof fours);
    }
    for (int t = begin, count; t < end; t += count) {
        const TileRow<m> tiles(s, t, end);
        const int image = tiles.image, h0 = tiles.h, w0 = tiles.w;
        count = tiles.count;
        // If this call had the tiles above, their last rows of pixels are the first ones of these.
        const int columns = s.columns.d;
        const bool above = h0 > 0 && columns <= row_of_tiles && t - columns >= begin;
        const int kept = above ? max(0, overlap) : 0, width = m * count + overlap;
        for (int u = 0; u < kept; u++) memcpy(pixels[u], pixels[m + u], width * sizeof *pixels[u]);
        // What the next tiles will need, but these do not have
        const TileRow<m> next(s, min(t + count, s.count - 1), end);
        const int next_h = next.h > 0 ? next.h + overlap - s.padding : 0;
        const int ahead = (next.h + size - s.padding - next_h) * s.W;
        const float *const next_row = X + (next.image * s.C + c0) * plane + next_h * s.W;
        // Four pixels of a row at a time: so channels become neighbours in half the time. First all
        // are loaded: what has just been stored in parts cannot be loaded as a whole at once.
        for (int u = kept; u < size; u++)
            for (bool load : {true, false})
                for (int k = 0, next; k < width; k = next) {
                    const int h = h0 + u - s.padding, w = w0 + k - s.padding;
                    const bool inside = h >= 0 && h < s.H && w >= 0 && w < s.W;
                    const float *from = X + (image * s.C + c0) * plane + (inside ? h * s.W + w : 0);
                    float(*to)[tile_n] = &pixels[u][k];
                    float(*four)[4] = fours[k / 4];
                    next = inside && w + 4 <= s.W ? k + 4 : k + 1;
                    if (next == k + 4 && load) {
                        for (int q = 0; q < channels; q++)
                            (Four &)four[q][0] = (const Four &)from[q * plane];
                    } else if (next == k + 4) {
                        UNROLL_LANES
                        for (int q = 0; q < tile_n; q++) {
                            to[0][q] = four[q][0], to[1][q] = four[q][1];
                            to[2][q] = four[q][2], to[3][q] = four[q][3];
                        }
                    } else if (load && inside) {
                        for (int q = 0; q < channels; q++) to[0][q] = from[q * plane];
                    } else if (load) {
                        for (int q = 0; q < tile_n; q++) to[0][q] = 0;
                    }
                }
        for (int j = 0; j < count; j++) {
            for (int q = j; q < channels; q += count) prefetch(next_row + q * plane, ahead);
            for (int q = 0; q < tile_n; q += wide)
                transform<F, T>((Wide *)(V + p.at(t + j - begin, c0 + q)), n * by_e, by_e,
                                (Wide *)&pixels[0][m * j][q], 4 * most * tile_n / wide,
                                tile_n / wide);
        }
    }
}
// y = b + T m T^T of the products m = M[.][t - begin][o], for the tiles from begin to end and
// tile_n channels from o0 on. With T == B these tiles overlap, and y is their sum. Then they are
// those of whole images, and a row has at most TileRow's `most`.
template <class F, typename F::Name T>
__device__ __noinline__ void transform_products(const Store &y, const float *M, const Panels &p,
                                                const float *b, const TiledImages &s, int begin,
                                                int end, int o0) {
    constexpr int size = F::rows(T), n = F::n, m = F::distance(T), overlap = max(0, size - m);
    constexpr int most = (m * TileRow<m>::most + overlap + 3) / 4 * 4 + (overlap ? 4 : 0);
    constexpr bool sum = T == F::B;
    const int channels = min(tile_n, s.C - o0);
    const int by_e = p.by_e / wide;
    constexpr int longest = m * most; // m rows of an image
    alignas(64) float pixels[m + overlap][most][tile_n], row[tile_n][longest];
    for (int t = begin, count; t < end; t += count) {
        const TileRow<m> tiles(s, t, end);
        const int image = tiles.image, h0 = tiles.h, w0 = tiles.w;
        count = tiles.count;
        // Tiles that overlap add to the last rows of the tiles above, or else to zeros.
        const int all = m * count + overlap;
        for (int u = 0; u < m + overlap && sum; u++) {
            if (h0 > 0 && u < overlap) memcpy(pixels[u], pixels[m + u], all * sizeof *pixels[u]);
            else memset(pixels[u], 0, all * sizeof *pixels[u]);
        }
        for (int j = 0; j < count; j++) {
            for (int q = j; q < channels; q += count)
                for (const float *to : {(const float *)y.data, y.mask, y.plus}) {
                    const int at = ((image * s.C + o0 + q) * s.H + max(0, h0 - s.padding)) * s.W;
                    if (to) prefetch(to + at, m * s.W);
                }
            for (int q = 0; q < channels; q += wide)
                transform<F, T, sum>((Wide *)&pixels[0][m * j][q], most * tile_n / wide,
                                     tile_n / wide, (const Wide *)(M + p.at(t + j - begin, o0 + q)),
                                     n * by_e, by_e);
        }
        const bool last = h0 + m >= int(s.rows.d) * m; // row of an image
        const int top = h0 - s.padding, left = w0 - s.padding;
        const int begin_u = sum ? max(0, -top) : 0, begin_w = sum ? max(0, -left) : 0;
        const int end_u = min(last ? m + overlap : m, s.H - top), end_w = min(all, s.W - left);
        // Whole rows of an image are one row, since they are neighbours in memory.
        const int width = end_w - begin_w, rows = end_u - begin_u;
        const bool whole = width == s.W && rows <= m;
        for (int u = begin_u; u < end_u; u++) {
            float *const to = row[0] + (whole ? (u - begin_u) * width : 0);
            for (int w = begin_w; w < end_w; w += 4) {
                float fours[tile_n][4];
                UNROLL_LANES
                for (int q = 0; q < tile_n; q++) {
                    UNROLL
                    for (int i = 0; i < 4; i++) fours[q][i] = pixels[u][w + i][q];
                }
                for (int q = 0; q < channels; q++)
                    (Four &)to[q * longest + w - begin_w] = (Four &)fours[q][0];
            }
            if (whole && u + 1 < end_u) continue;
            const int count = whole ? rows * width : width;
            for (int q = 0; q < channels; q++) {
                const float bias = b ? b[o0 + q] : 0;
                const int h = top + (whole ? begin_u : u);
                const int at = ((image * s.C + o0 + q) * s.H + h) * s.W + left + begin_w;
                const Store to = y.from(at);
                UNROLL_LANES
                for (int i = 0; i < count; i++) to.store(i, row[q][i] + bias);
            }
        }
    }
}
#endif
} // namespace fast
