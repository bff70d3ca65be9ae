// A network's first layer, whose images have one channel: on a GPU.
// Its arithmetic is nothing. What counts is to write y once and, for the gradient, to read dy once.
// A tile of shared.h would have no use for most of its rows. (A CPU: see shallow.h.)
// Gain: without it a step of LeNet takes 1.12 times as long on an H100, of lab_cnn 1.03 times.
// defines: is_first_layer, first_layer_forward, first_layer_backward_weights

namespace fast {
constexpr int most_outputs = 64;
static bool is_first_layer(const ConvShape &s) {
    return warp_size > 1 && s.rung != tiled && s.C == 1 && s.K == 3 && s.stride == 1 &&
           s.O <= most_outputs;
}

// The pixels that blocks share: t = (n,i,j) of y. Their windows x are 3x3 pixels of X.
struct Pixels : ConvShape {
    Divisor plane, row;
    Pixels(const ConvShape &s) : ConvShape(s), plane(s.OH * s.OW), row(s.OW) {}
    __device__ __forceinline__ int count() const { return N * plane.d; }
    __device__ __forceinline__ void window(float (&x)[9], const float *X, int n, int at) const {
        const int i = row(at) - padding, j = at - (i + padding) * int(row.d) - padding;
        UNROLL
        for (int k = 0; k < 9; k++) {
            const int h = i + k / 3, w = j + k % 3;
            x[k] = h >= 0 && h < H && w >= 0 && w < W ? X[(n * H + h) * W + w] : 0;
        }
    }
};
// y[n,o,i,j] = b[o] + sum over u,v of X[n,i+u,j+v] * W[o,u,v]   One thread per pixel, for all o.
__global__ void __launch_bounds__(threads)
    first_layer_kernel(Store y, const float *X, const float *W, const float *b, Pixels s) {
    __shared__ float w[most_outputs][10]; // 9 taps, then the bias
    for (int i = threadIdx.x; i < s.O * 10; i += threads) {
        const int o = i / 10, k = i % 10;
        w[o][k] = k == 9 ? b[o] : W[o * s.W_stride_o + k * s.W_stride_k];
    }
    __syncthreads();
    const int t = blockIdx.x * threads + threadIdx.x, n = s.plane(t), at = t - n * s.plane.d;
    if (t >= s.count()) return;
    float x[9];
    s.window(x, X, n, at);
    for (int o = 0; o < s.O; o++) {
        float sum = w[o][9];
        UNROLL
        for (int k = 0; k < 9; k++) sum += x[k] * w[o][k];
        y.store((n * s.O + o) * s.plane.d + at, sum);
    }
}
// Blocks of a multiprocessor, so that their sums fit the registers
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ > 900
constexpr int first_layer_blocks = 3;
#else
constexpr int first_layer_blocks = 4;
#endif
// partial[slice][o][k] = the sums over the slice's pixels for dW (k < 9) and db (k = 9).
// blockIdx = (4 channels, slice).
__global__ void __launch_bounds__(threads, first_layer_blocks)
    first_layer_gradient_kernel(float *partial, const float *X, const float *dy, Pixels s) {
    constexpr int sums = 10, channels = 4, warps = threads / warp_size;
    const int first = blockIdx.x * channels;
    const int begin = (long long)s.count() * blockIdx.y / gridDim.y;
    const int end = (long long)s.count() * (blockIdx.y + 1) / gridDim.y;
    float sum[channels * sums] = {}; // [channel][k]
    for (int t = begin + threadIdx.x; t < end; t += threads) {
        const int n = s.plane(t), at = t - n * s.plane.d;
        float x[9], g[channels];
        UNROLL
        for (int c = 0; c < channels; c++)
            g[c] = first + c < s.O ? dy[(n * s.O + first + c) * s.plane.d + at] : 0;
        s.window(x, X, n, at);
        UNROLL
        for (int c = 0; c < channels; c++) {
            UNROLL
            for (int k = 0; k < 9; k++) sum[c * sums + k] += g[c] * x[k];
            sum[c * sums + 9] += g[c];
        }
    }
    __shared__ float of_warps[channels * sums][warps];
    int own, past; // this lane's sums of its warp
    warp_sums<channels * sums>(sum, own, past);
    constexpr int most = (channels * sums + warp_size - 1) / warp_size;
    UNROLL
    for (int q = 0; q < most; q++)
        if (own + q < past) of_warps[own + q][threadIdx.x / warp_size] = sum[q];
    __syncthreads();
    const int i = threadIdx.x;
    if (i >= channels * sums || first + i / sums >= s.O) return;
    float total = 0;
    UNROLL
    for (int warp = 0; warp < warps; warp++) total += of_warps[i][warp];
    partial[(blockIdx.y * s.O + first) * sums + i] = total;
}
static void first_layer_forward(const Store &y, const Tensor &X, const Tensor &W, const Tensor &b,
                                const ConvShape &s) {
    const int pixels = s.N * s.OH * s.OW;
    if (pixels > 0)
        LAUNCH(first_layer_kernel<<<blocks(pixels), threads, 0, stream_of(X.device)>>>(
            y, X.ptr(), W.ptr(), b.ptr(), s));
}
static void first_layer_backward_weights(const ProductOut &out, const Tensor &X, const Tensor &dy,
                                         const Product &p, const ConvShape &s) {
    const int groups = blocks(s.O, 4), pixels = s.N * s.OH * s.OW;
    const int slices = min(max(1, 4 * multiprocessors(X.device) / groups), blocks(pixels));
    const Tensor partial = empty({slices, p.N, p.rows()}, X.device);
    LAUNCH(first_layer_gradient_kernel<<<dim3(groups, slices), threads, 0, stream_of(X.device)>>>(
        partial.ptr(), X.ptr(), dy.ptr(), s));
    product_sum(out, partial.ptr(), slices, p, X.device);
}
} // namespace fast
