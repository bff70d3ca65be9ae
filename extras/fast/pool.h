// Pooling of 2x2 windows, stride 2, as the networks have it: the compiler knows the size.
// So it unrolls the loops over a window and vectorises the one over windows; and backward, where
// windows do not overlap, a thread writes whole windows in place of asking for each number of dX
// which windows hold it. Other windows are mgpu.cu's.
// Gain: with mgpu.cu's in its place a step of LeNet takes 1.12 times as long on an H100, and on a
// CPU training takes 1.57 times as much user time (100 steps of 64, median of 4 pairs).
// defines: avg_pool2d, max_pool2d

namespace fast {
// What mean and maximum differ in. Of a window of X, a plane W wide, find() returns the result and
// says which element is the largest; given() is what of its dy = g flows back to element `at`.
struct Mean {
    __device__ static float find(const float *X, int W, int *) {
        return (X[0] + X[1] + X[W] + X[W + 1]) / 4;
    }
    __device__ static float given(float g, int, int) { return g / 4; }
};
struct Max { // the first of several largest; NaN counts as larger than any number
    // Without branches, which a CPU would often predict wrongly
    __device__ static float find(const float *X, int W, int *best) {
        float largest = X[0];
        bool nan = false; // was there one?
        *best = 0;
        for (int at = 0; at < 4; at++) {
            const float x = X[at / 2 * W + at % 2];
            const bool larger = ((x > largest) | (x != x)) & !nan;
            nan |= x != x;
            *best += (at - *best) * larger;
            largest = x > largest ? x : largest;
        }
        return nan ? NAN : largest;
    }
    __device__ static float given(float g, int best, int at) {
        return __int_as_float(__float_as_int(g) & -(best == at)); // g or 0
    }
};
// X (P,H,W)   ->   y (P,OH,OW)
// One thread per output element; threadIdx.z counts planes.
template <class Window> __global__ void pool2d_kernel(float *y, const float *X, PoolShape s) {
    const int p = blockIdx.x * blockDim.z + threadIdx.z;
    if (p >= s.planes) return;
    X += p * s.H * s.W;
    y += p * s.OH * s.OW;
    for (int i = threadIdx.y; i < s.OH; i += blockDim.y) UNROLL_LANES
    for (int j = threadIdx.x; j < s.OW; j += blockDim.x) {
        int best;
        y[i * s.OW + j] = Window::find(X + i * 2 * s.W + j * 2, s.W, &best);
    }
}
// dX[h,w] = or += what its window gives it; past the last window, 0
//   dy (P,OH,OW)   X (P,H,W)   ->   dX (P,H,W)
// One thread per column of a window on a GPU, so that neighbouring threads write neighbours; per
// `lanes` windows on a CPU. What flows back is collected and then stored: compilers vectorise two
// such loops, but not one.
template <class Window>
__global__ void pool2d_backward_kernel(Store dX, const float *dy, const float *X, PoolShape s) {
    const int p = blockIdx.x * blockDim.z + threadIdx.z;
    if (p >= s.planes) return;
    dX = dX.from(p * s.H * s.W);
    X += p * s.H * s.W;
    dy += p * s.OH * s.OW;
    constexpr int own = warp_size > 1 ? 1 : 2; // columns
    for (int i = threadIdx.y; i * 2 < s.H; i += blockDim.y) {
        const int columns = i < s.OH ? 2 * s.OW : 0, end = columns / own;
        for (int first = threadIdx.x * lanes; first < end; first += blockDim.x * lanes) {
            const int count = lanes > 1 ? min(lanes, end - first) : 1;
            float part[2][lanes * own];
            UNROLL_LANES
            for (int q = 0; q < count; q++) {
                const int at = first + q, j = at * own / 2;
                const float g = dy[i * s.OW + j];
                int best = 0;
                Window::find(X + i * 2 * s.W + j * 2, s.W, &best);
                UNROLL
                for (int u = 0; u < 2; u++) UNROLL
                for (int v = 0; v < own; v++)
                    part[u][q * own + v] = Window::given(g, best, u * 2 + (own > 1 ? v : at % 2));
            }
            if constexpr (warp_size > 1) { // both loads come before the stores
                Vector<1> sum[2], mask[2] = {}, plus[2] = {};
                UNROLL
                for (int u = 0; u < 2; u++) {
                    const int at = (i * 2 + u) * s.W + first;
                    sum[u].x[0] = part[u][0];
                    if (dX.mask) mask[u].x[0] = dX.mask[at];
                    if (dX.plus) plus[u].x[0] = dX.plus[at];
                }
                UNROLL
                for (int u = 0; u < 2; u++)
                    fast::store(dX, (i * 2 + u) * s.W + first, sum[u], mask[u], plus[u]);
            } else {
                UNROLL
                for (int u = 0; u < 2; u++) UNROLL_LANES
                for (int q = 0; q < count * own; q++)
                    dX.store((i * 2 + u) * s.W + first * own + q, part[u][q]);
            }
        }
        for (int w = columns + threadIdx.x; w < s.W; w += blockDim.x)
            for (int h = i * 2; h < min(i * 2 + 2, s.H); h++) dX.store(h * s.W + w, 0);
    }
}

template <class Window> static Tensor pool2d(const char *op, const Tensor &X, const PoolShape &s) {
    Tensor y = output({X}, {X.shape[0], X.shape[1], s.OH, s.OW});
    y.data = empty(y.shape, y.device).data;
    auto block_of = [=](int width) { // columns, rows, planes
        const int columns = min(width, warp_size), all_rows = blocks(s.H, 2);
        const int rounds = blocks(all_rows, threads / columns);
        const int rows = on_cpu ? 1 : blocks(all_rows, rounds);
        return dim3(columns, rows, min(64, threads / (columns * rows)));
    };
    const dim3 block = block_of(blocks(s.W, 2)), block_back = block_of(s.W);
    LAUNCH(fast::pool2d_kernel<Window>
           <<<blocks(s.planes, block.z), block, 0, stream_of(X.device)>>>(y.ptr(), X.ptr(), s));
    return add_to_tape(op, y, {X}, [=](const Tensor &) {
        const float *dy = dy_of(y).ptr();
        LAUNCH(fast::pool2d_backward_kernel<Window>
               <<<blocks(s.planes, block_back.z), block_back, 0, stream_of(X.device)>>>(
                   target_of(X), dy, X.ptr(), s));
    });
}
static Tensor avg_pool2d(const Tensor &X, const PoolShape &s) {
    return s.K == 2 ? pool2d<Mean>("avg_pool2d", X, s) : plain_avg_pool2d(X, s.K, s.K);
}
#ifdef NETWORKS
static Tensor max_pool2d(const Tensor &X, const PoolShape &s) {
    return s.K == 2 ? pool2d<Max>("max_pool2d", X, s) : plain_max_pool2d(X, s.K, s.K);
}
#endif
} // namespace fast
