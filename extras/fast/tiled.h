// KERNELS=tiled: sums tiled in registers.
// A simple thread loads two numbers for each product. Here a thread keeps tile_m x tile_n sums in
// registers, and loads tile_m + tile_n numbers for tile_m * tile_n products. It reads A in place,
// at offsets from a table, and B from a packed copy in which a term's tile_n numbers are
// neighbours. A's images have zeros around them, so that no load asks whether it is inside.
// Gain: on an H100 a step of LeNet takes 0.55 of the simple kernels' time, of lab_cnn 0.68. On a
// CPU, where registers are vectors, nothing is faster: see README.md.
// defines: pad, tiled_product

namespace fast {
// out (P,H+2*above,W+2*beside) = in (P,H,W) with zeros around it. One warp per row of out.
__global__ void pad_kernel(float *out, const float *in, int P, int H, int W, int above,
                           int beside) {
    const int height = H + 2 * above, width = W + 2 * beside;
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) / warp_size, h = row % height - above;
    if (row >= P * height) return;
    const bool inside = h >= 0 && h < H;
    in += inside ? (row / height * H + h) * W : 0;
    out += row * width;
    for (int w = threadIdx.x % warp_size; w < beside; w += warp_size)
        out[w] = out[beside + W + w] = 0;
    UNROLL_LANES
    for (int w = threadIdx.x % warp_size; w < W; w += warp_size)
        out[beside + w] = inside ? in[w] : 0;
}
struct Images { // (N,C,H,W), perhaps with zeros around each plane; or (N,H,W,C), see wgmma.h
    Tensor memory;
    int first; // where (0,0,0,0) lies
    int image, plane, pitch, pixel; // distances of neighbours n, c, h and w
    const float *ptr() const {
        const float *all = memory.ptr();
        return all ? all + first : nullptr;
    }
};
static Images pad(const Tensor &X, int H, int W, int above, int beside) {
    const int height = H + 2 * above, width = W + 2 * beside, planes = size(X) / (H * W);
    Tensor out = X;
    if (above > 0 || beside > 0) {
        out = empty({planes, height, width}, X.device);
        const long lanes_of_rows = (long)planes * height * warp_size;
        LAUNCH(pad_kernel<<<blocks(lanes_of_rows), threads, 0, stream_of(X.device)>>>(
            out.ptr(), X.ptr(), planes, H, W, above, beside));
    }
    const int plane = height * width;
    return {out, above * width + beside, X.shape[1] * plane, plane, width, 1};
}

// packed[tile][k][q] = B's term k of column tile*tile_n + q (past the last one, that one again);
// A_offsets[k] = the offset of term k in A
// One thread per `lanes` columns of pack_rows terms.
constexpr int pack_rows = warp_size > 1 ? 1 : 16;
__global__ void pack_kernel(float *packed, int *A_offsets, const float *B, Product s) {
    const int begin = (blockIdx.x * blockDim.y + threadIdx.y) * pack_rows;
    const int q0 = threadIdx.x * lanes, n0 = blockIdx.y * tile_n + q0;
    int column[lanes];
    for (int q = 0; q < lanes; q++) column[q] = s.B_column(min(n0 + q, s.N - 1)).offset;
    for (int k = begin; k < min(begin + pack_rows, s.K); k++) {
        const float *from = B + s.B_term(k).offset;
        float *to = packed + (blockIdx.y * s.K + k) * tile_n + q0;
        for (int q = 0; q < lanes; q++) to[q] = from[column[q]];
        if (n0 == 0) A_offsets[k] = s.A_term(k).offset;
    }
}

// Store a thread's sums, plus the bias: `first` is its first row, n0 its first column.
__device__ __forceinline__ void tiled_store(const float (&sum)[tile_m][tile_n], int first, int n0,
                                            const ProductOut &out, const Product &s) {
    const int columns = min(tile_n, s.N - n0);
    float result[tile_m][tile_n]; // a copy: an array that variables index may lie in memory
    UNROLL
    for (int m = 0; m < tile_m; m++) {
        UNROLL
        for (int q = 0; q < tile_n; q += wide) (Wide &)result[m][q] = (const Wide &)sum[m][q];
    }
    UNROLL
    for (int q = 0; q < tile_n; q++) {
        const float bias = out.bias && q < columns ? out.bias[n0 + q] : 0;
        UNROLL
        for (int m = 0; m < tile_m; m++) result[m][q] += bias;
    }
    int at[tile_m]; // where column n0 of each row goes; it grows with the row
    UNROLL
    for (int m = 0; m < tile_m; m++)
        at[m] = n0 * s.C_column + out.row(s, min(first + m * warp_size, s.M - 1));
    const bool full = first + (tile_m - 1) * warp_size < s.M;
    if (on_cpu && full && at[tile_m - 1] - at[0] == tile_m - 1) { // neighbours in memory
        for (int q = 0; q < columns; q++) UNROLL_LANES
        for (int m = 0; m < tile_m; m++) out.C.store(at[0] + q * s.C_column + m, result[m][q]);
        return;
    }
    UNROLL_GPU
    for (int q = 0; q < tile_n; q++) {
        if (q >= columns) break;
        UNROLL
        for (int m = 0; m < tile_m; m++)
            if (first + m * warp_size < s.M) out.C.store(at[m] + q * s.C_column, result[m][q]);
    }
}
// One warp: the sums of B's columns from n0 on.
__device__ __forceinline__ void sum_columns(const float *b, int n0, const ProductOut &out,
                                            const Product &s) {
    const Range range = slice_of({0, s.K}, 1);
    const int lane = threadIdx.x % warp_size;
    float sum[tile_n] = {};
    for (int k = range.begin + lane; k < range.end; k += warp_size) {
        UNROLL
        for (int q = 0; q < tile_n; q += wide) (Wide &)sum[q] += (const Wide &)b[k * tile_n + q];
    }
    UNROLL_GPU
    for (int q = 0; q < tile_n; q++) {
        const float total = warp_reduce_sum(sum[q]);
        if (lane == 0 && n0 + q < s.N && out.sums.data)
            out.sums.store(out.row(s, s.M) + (n0 + q) * out.sums_by, total);
    }
}
// Each thread computes tile_m rows of C, one warp's width apart, of tile_n columns. With s.weights
// the first warp adds up B's columns, too. Blocks of the same rows, `tiles` of them, follow each
// other: all but the first find A in a cache. ResNet-18 on a CPU: 0.8 to 0.9 of the time.
__global__ void __launch_bounds__(64)
    tiled_kernel(ProductOut out, const float *A, const int *A_offsets, const float *packed,
                 Product s) {
    const int tiles = (s.N + tile_n - 1) / tile_n, tile = blockIdx.x % tiles, n0 = tile * tile_n;
    const int thread = blockIdx.x / tiles * blockDim.x + threadIdx.x;
    const int first = thread / warp_size * warp_size * tile_m + thread % warp_size;
    const float *b = packed + tile * s.K * tile_n;
    if (s.weights && thread < warp_size) sum_columns(b, n0, out, s);
    if (first >= s.M || !out.C.data) return;
    int offset[tile_m], top = INT_MAX, bottom = -INT_MAX; // where the rows begin in A
    UNROLL
    for (int m = 0; m < tile_m; m++) {
        const Point p = s.A_row(min(first + m * warp_size, s.M - 1));
        offset[m] = p.offset;
        top = min(top, p.h);
        bottom = max(bottom, p.h);
    }
    const Range range = slice_of(terms_inside(s, top, bottom), 1);
    float sum[tile_m][tile_n] = {};
    b += range.begin * tile_n;
    for (int k = range.begin; k < range.end; k++, b += tile_n) {
        const float *a = A + A_offsets[k];
        UNROLL
        for (int m = 0; m < tile_m; m++) {
            const float am = a[offset[m]];
            UNROLL
            for (int q = 0; q < tile_n; q += wide) (Wide &)sum[m][q] += am * (const Wide &)b[q];
        }
    }
    tiled_store(sum, first, n0, out, s);
}
static void tiled_product(const ProductOut &out, const Images &A, const Tensor &B,
                          const Product &s) {
    const Device device = B.device;
    const int tiles = blocks(s.N, tile_n), width = blocks(s.M, warp_size * tile_m) * warp_size;
    const Tensor packed = empty({tiles, s.K, tile_n}, device), table = empty({s.K}, device);
    int *const A_offsets = (int *)table.ptr();
    const dim3 pack(tile_n / lanes, 16), pack_grid(blocks(s.K, pack.y * pack_rows), tiles);
    if (s.K > 0)
        LAUNCH(pack_kernel<<<pack_grid, pack, 0, stream_of(device)>>>(packed.ptr(), A_offsets,
                                                                      B.ptr(), s));
    // Only as many slices as fill the device with threads, because each is written, read and added;
    // and enough for a slice of a packed tile to fit the second-level cache of a CPU's core.
    const int block = warp_size > 1 ? 64 : 8;
    const int enough = warp_size > 1 ? 1 << 15 : s.weights ? 1 << 8 : 1, most_terms = 1 << 13;
    const int fill = min(s.K / 64, blocks(enough, width * tiles));
    const int slices = max(fill, blocks(s.K, most_terms));
    const float *const a = A.ptr(), *const b = packed.ptr();
    in_slices(slices, out, s, device, [&](const ProductOut &out, const Product &s) {
        const dim3 grid(blocks(width, block) * tiles, 1, slices);
        LAUNCH(tiled_kernel<<<grid, block, 0, stream_of(device)>>>(out, a, A_offsets, b, s));
    });
}

} // namespace fast
