// A convolution is a matrix product whose matrices are never stored: an implicit GEMM.
// Each of its three sums is C (M,N) = A (M,K) @ B (K,N):
//                      C    a row of it   a column   a term of the sum   A    B
//   forward            y    n,i,j         o          c,u,v               X    W
//   input gradient     dX   n,h,w         c          o,u,v               dy   W
//   weight gradient    dW   c,u,v         o          n,i,j               X    dy
// A dense layer is the convolution of a 1x1 image. So one product kernel a rung serves all: what
// differs is where an index of rows, columns or terms leads to in memory.
// Gain: X is not copied K*K times, as im2col does: at batch 256 LeNet's conv2 alone would write 41
// MB. Terms that meet only zeros around an image are skipped.
// defines: Rung, Sizes, ConvShape, Map, Product, ProductOut, terms_inside

namespace fast {

// Whether there are kernels with wgmma, for tf32 on SM 90. The build defines SM_90A if it compiles
// for that, and `make lanes` emulates them.
#if defined(SM_90A) || defined(MGPU_LANES)
#define WGMMA
#endif
inline bool allow_wgmma = true; // tests turn it off
// Names the rung of the ladder that computes a product.
enum Rung { tiled, shared, tf32, wgmma };
struct Sizes { // of a convolution
    int N, C, H, W, O, K, stride, padding, OH, OW;
};
struct ConvShape : Sizes {
    Rung rung;
    int W_stride_k,
        W_stride_o; // W's element k = (c,u,v) of output o is W[k*W_stride_k + o*W_stride_o]
};

// A Map tells where an index of rows, columns or terms, such as (n,i,j), leads to: the offset in
// memory and the position (h,w) in an image. With row_first its order is (i,n,j): then all windows
// of a tile leave the image at the same taps, and the terms that a tile can skip are its first ones
// or its last ones.
struct Point {
    int offset, h, w;
};
struct Index {
    int x, y, z;
};
struct Axis {     // of an index:
    int count;    // how many values it has,
    int by;       // how far neighbours lie apart in memory,
    int step = 0; // and in rows or columns of the image
};
constexpr Axis none = {1, 0};
struct Map {
    Divisor P, Q; // i = (x*P + y)*Q + z
    int by_x, by_y, by_z, offset, h_by_x, h_by_y, h, w_by_z, w;
    Map(bool row_first, Axis image, Axis row, Axis column, int offset = 0, int h = 0, int w = 0)
        : P(row_first ? image.count : row.count), Q(column.count),
          by_x(row_first ? row.by : image.by), by_y(row_first ? image.by : row.by), by_z(column.by),
          offset(offset), h_by_x(row_first ? row.step : 0), h_by_y(row_first ? 0 : row.step), h(h),
          w_by_z(column.step), w(w) {}
    __device__ Index split(int i) const {
        const int xy = Q(i), z = i - xy * Q.d, x = P(xy), y = xy - x * P.d;
        return {x, y, z};
    }
    __device__ Point at(const Index &i) const {
        return {i.x * by_x + i.y * by_y + i.z * by_z + offset, i.x * h_by_x + i.y * h_by_y + h,
                i.z * w_by_z + w};
    }
    __device__ Point operator()(int i) const { return at(split(i)); }
    __host__ __device__ bool of_x() const { return P.d * Q.d == 1; } // alone
    __host__ __device__ int distance() const {                       // of neighbours
        return Q.d > 1 ? by_z : P.d > 1 ? by_y : by_x;
    }
};
inline Map spaced(int n, int stride) { return {false, none, none, {n, stride}}; } // i to i*stride
// C[C_row(m) + n*C_column] = sum over k < K of A[A_row(m) + A_term(k)] * B[B_term(k) + B_column(n)]
// Of A's two Points one is the corner of a window, the other a tap (u,v) of it. Outside of the
// image A is 0. (Aligned, so that a GPU loads two numbers at once.)
constexpr int most_taps = 15; // the largest K: more taps do not fit a mask
struct alignas(8) Product {
    int M, N, K; // of C's rows, its columns, and the terms of a sum
    Map A_row, A_term;
    int H, W; // of A's images
    Map B_term, B_column;
    Map C_row;
    int C_column;
    int taps; // the number of terms that share a tap's u, if a tile may skip them; else 0
    // 1: a weight gradient. Its rows are taps, its terms windows; and C gets one more row, the sums
    // of B's columns, as if A had a row of ones
    int weights;
    int batch = 1, A_by = 0, B_by = 0; // products in one launch; how far apart their A and B lie
    __host__ __device__ int rows() const { return M + weights; }
    // A tap's mask has bit u and bit 16+v, a window's mask those of all u and v that lie outside of
    // the image. A common bit says that A is 0 there; ~0 has one with every mask.
    __device__ unsigned mask(const Point &p, bool window) const {
        if (!window) return 1u << p.h | 0x10000u << p.w;
        return (outside(p.h, H) & 0x7fff) | outside(p.w, W) << 16 | 1u << 31;
    }
    __device__ static unsigned outside(int h, int H) { return ~ones(H - h) | ones(-h); }
    __device__ static unsigned ones(int n) { return (1u << min(max(n, 0), most_taps)) - 1; }
};
// Where C goes. `sums` (its additional row) and `bias` have one number per column.
struct ProductOut {
    Store C, sums;
    const float *bias;
    // Distances: of neighbours in sums, of slices (see in_slices) and products of a batch
    long sums_by = 1, slices_by = 0;
    // Where row m of this block's slice begins in C, or in sums
    __device__ int row(const Product &s, int m) const {
        return blockIdx.z * slices_by + (m < s.M ? s.C_row(m).offset : 0);
    }
};

// The products of a convolution (products.cu). If V is not null, the forward pass may keep there
// Winograd's windows of X for the gradient of W. A gradient that is not wanted has no data.
void product_forward(const Store &y, const Tensor &X, const Tensor &W, const Tensor &b, ConvShape s,
                     Tensor *V);
void product_backward(const Store &dX, const Store &dW, const Store &db, const Tensor &X,
                      const Tensor &dy, const Tensor &W, ConvShape s, const Tensor &V);

void matrix_product(bool sum, Matrix C, Matrix A, Matrix B, Device device); // matmul.h
void plane_bias(const Tensor &y, const Tensor &b);
void columns_of(const Tensor &columns, const Tensor &X, ::ConvShape s);
void add_columns(float *dX, const Tensor &dcolumns, ::ConvShape s);

struct Range {
    int begin, end;
};
// The terms of rows whose windows begin between `top` and `bottom`: all, or only those of the taps
// u at which some window meets the image.
__device__ inline Range terms_inside(const Product &s, int top, int bottom) {
    if (!s.taps) return {0, s.K};
    const int begin = max(0, -bottom) * s.taps;
    return {begin, max(begin, min(s.K, (s.H - top) * s.taps))};
}
} // namespace fast
