// Winograd's filtering: images in tiles and, on a CPU, the transforms of tiles.
// On a CPU a register holds `wide` channels of a pixel, which are neighbours once a few rows of
// pixels have been copied. So transforms multiply and add whole registers.
// defines: TiledImages, Panels, transform_tiles, transform_products

namespace fast {
// Return the size m of tiles. On a GPU it is the one that takes the fewest products.
static int winograd_outputs(const ConvShape &s) {
    if (warp_size == 1) return 2;
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
static TiledImages tiled_outputs(const ConvShape &s) { return {s.O, s.OH, s.OW, 0, s}; }

#if !defined(__CUDACC__) && !defined(MGPU_LANES)
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
#endif
} // namespace fast
