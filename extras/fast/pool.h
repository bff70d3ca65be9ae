// Pooling of 2x2 windows, stride 2, as the networks have it: the compiler knows the size.
// So it unrolls the loops over a window; and backward, where windows do not overlap, a thread
// writes whole windows in place of asking for each number of dX which windows hold it. On a CPU a
// thread computes eight neighbouring windows at once, in vectors. Other windows are mgpu.cu's.
// Gain: with mgpu.cu's in its place a step of LeNet takes 1.12 times as long on an H100, and on a
// CPU training takes 1.57 times as much user time (100 steps of 64, median of 4 pairs; without the
// vectors, which make a step of lab_cnn 1.16 times as fast).
// defines: avg_pool2d, max_pool2d

namespace fast {
// What mean and maximum differ in. find() returns the result of a window's four numbers, and stores
// which of them is the largest. given() returns what of the window's dy = g flows back to number
// `at`. Floats is float or, on a CPU, a vector with one number per window; Ints likewise.
struct Mean {
    template <class Floats, class Ints> __device__ static Floats find(const Floats *x, Ints *) {
        return (x[0] + x[1] + x[2] + x[3]) / 4;
    }
    template <class Floats, class Ints> __device__ static Floats given(Floats g, Ints, int) {
        return g / 4;
    }
};
struct Max { // the first of several largest; NaN counts as larger than any number
    // Without branches, which a CPU would often predict wrongly
    template <class Floats, class Ints> __device__ static Floats find(const Floats *x, Ints *best) {
        Floats largest = x[0];
        Ints nan = x[0] != x[0]; // was there one?
        *best = Ints{};
        UNROLL
        for (int at = 1; at < 4; at++) {
            const Ints larger = ((x[at] > largest) | (x[at] != x[at])) & (nan == 0);
            nan |= x[at] != x[at];
            *best = larger ? Ints{} + at : *best;
            largest = x[at] > largest ? x[at] : largest;
        }
        return nan ? Floats{} + NAN : largest;
    }
    template <class Floats, class Ints>
    __device__ static Floats given(Floats g, Ints best, int at) {
        return best == at ? g : Floats{};
    }
};
#if defined(__CUDACC__) || defined(MGPU_LANES)
// Row i of the windows of a plane. One thread per window or, backward, per column of a window, so
// that neighbouring threads write neighbours.
template <class Window>
__device__ inline void pool_row(float *y, const float *X, int i, const PoolShape &s) {
    X += i * 2 * s.W;
    for (int j = threadIdx.x; j < s.OW; j += blockDim.x) {
        const float x[4] = {X[j * 2], X[j * 2 + 1], X[s.W + j * 2], X[s.W + j * 2 + 1]};
        int best;
        y[i * s.OW + j] = Window::find(x, &best);
    }
}
template <class Window>
__device__ inline void pool_row_backward(const Store &dX, const float *dy, const float *X, int i,
                                         const PoolShape &s) {
    X += i * 2 * s.W;
    for (int w = threadIdx.x; w < 2 * s.OW; w += blockDim.x) {
        const int j = w / 2;
        const float x[4] = {X[j * 2], X[j * 2 + 1], X[s.W + j * 2], X[s.W + j * 2 + 1]};
        const float g = dy[i * s.OW + j];
        int best = 0;
        Window::find(x, &best);
        Vector<1> sum[2], mask[2] = {}, plus[2] = {};
        UNROLL
        for (int u = 0; u < 2; u++) { // both loads come before the stores
            const int at = (i * 2 + u) * s.W + w;
            sum[u].x[0] = Window::given(g, best, u * 2 + w % 2);
            if (dX.mask) mask[u].x[0] = dX.mask[at];
            if (dX.plus) plus[u].x[0] = dX.plus[at];
        }
        UNROLL
        for (int u = 0; u < 2; u++)
            fast::store(dX, (i * 2 + u) * s.W + w, sum[u], mask[u], plus[u]);
    }
}
#else
template <int n> struct Vectors { // of n numbers
    typedef float Floats __attribute__((vector_size(4 * n)));
    typedef int Ints __attribute__((vector_size(4 * n)));
};
template <int n> using Floats = typename Vectors<n>::Floats;
template <int n> using Ints = typename Vectors<n>::Ints;
template <int n> __forceinline__ Floats<n> load(const float *p) {
    Floats<n> value;
    memcpy(&value, p, sizeof value);
    return value;
}
template <int n> __forceinline__ void store(float *p, Floats<n> value) {
    memcpy(p, &value, sizeof value);
}
// Return the numbers at[q] of a followed by b.
template <int n> __forceinline__ Floats<n> pick(Floats<n> a, Floats<n> b, Ints<n> at) {
#ifdef __clang__
    Floats<n> picked;
    UNROLL
    for (int q = 0; q < n; q++) picked[q] = at[q] < n ? a[at[q] % n] : b[at[q] % n];
    return picked;
#else
    return __builtin_shuffle(a, b, at);
#endif
}
// Load the numbers of n windows: x[0] and x[1] are the left and right ones of the upper row, x[2]
// and x[3] those of the lower one.
template <int n> __forceinline__ void windows(Floats<n> *x, const float *X, int W) {
    Ints<n> at;
    UNROLL
    for (int q = 0; q < n; q++) at[q] = 2 * q;
    UNROLL
    for (int u = 0; u < 2; u++) UNROLL
    for (int v = 0; v < 2; v++)
        x[u * 2 + v] = pick<n>(load<n>(X + u * W), load<n>(X + u * W + n), at + v);
}
template <int n> __forceinline__ void store(const Store &to, int i, Floats<n> value) {
    if (to.plus) value += load<n>(to.plus + i);
    if (to.mask) value = load<n>(to.mask + i) > 0 ? value : Floats<n>{};
    if (to.relu) value = value < 0 ? Floats<n>{} : value;
    store<n>(to.data + i, value);
}
// Pool `count` windows, n at a time. If some are left over, the last vector begins earlier, and
// computes some again.
template <class Window, int n = 8>
inline void pool_windows(float *y, const float *X, int W, int count) {
    if constexpr (n > 1)
        if (count < n) return pool_windows<Window, n / 2>(y, X, W, count);
    Floats<n> x[4];
    Ints<n> best;
    for (int first = 0; first < count; first += n) {
        const int at = min(first, count - n);
        windows<n>(x, X + at * 2, W);
        store<n>(y + at, Window::find(x, &best));
    }
}
template <class Window, int n = 8>
inline void pool_windows_backward(const Store &dX, const float *dy, const float *X, int W,
                                  int count) {
    // A += must not be repeated: then what is left over is for smaller vectors.
    const int end = count < n || dX.plus ? count / n * n : count;
    Floats<n> x[4];
    Ints<n> best = {}, pairs[2]; // a left column, the right one of the same window, and so on
    UNROLL
    for (int k = 0; k < 2 * n; k++) pairs[k / n][k % n] = k / 2 + k % 2 * n;
    for (int first = 0; first < end; first += n) {
        const int at = min(first, count - n);
        windows<n>(x, X + at * 2, W);
        Window::find(x, &best);
        const Floats<n> g = load<n>(dy + at);
        UNROLL
        for (int u = 0; u < 2; u++) {
            const Floats<n> left = Window::given(g, best, u * 2);
            const Floats<n> right = Window::given(g, best, u * 2 + 1);
            store<n>(dX, u * W + at * 2, pick<n>(left, right, pairs[0]));
            store<n>(dX, u * W + at * 2 + n, pick<n>(left, right, pairs[1]));
        }
    }
    if constexpr (n > 1)
        if (end < count)
            pool_windows_backward<Window, n / 2>(dX.from(end * 2), dy + end, X + end * 2, W,
                                                 count - end);
}
template <class Window>
inline void pool_row(float *y, const float *X, int i, const PoolShape &s) {
    pool_windows<Window>(y + i * s.OW, X + i * 2 * s.W, s.W, s.OW);
}
template <class Window>
inline void pool_row_backward(const Store &dX, const float *dy, const float *X, int i,
                              const PoolShape &s) {
    const int row = i * 2 * s.W;
    pool_windows_backward<Window>(dX.from(row), dy + i * s.OW, X + row, s.W, s.OW);
}
#endif
// X (P,H,W)   ->   y (P,OH,OW)
// threadIdx.z counts planes, threadIdx.y rows of windows; on a CPU a thread has the whole row.
template <class Window> __global__ void pool2d_kernel(float *y, const float *X, PoolShape s) {
    const int p = blockIdx.x * blockDim.z + threadIdx.z;
    if (p >= s.planes) return;
    for (int i = threadIdx.y; i < s.OH; i += blockDim.y)
        pool_row<Window>(y + p * s.OH * s.OW, X + p * s.H * s.W, i, s);
}
// dX[h,w] = or += what its window gives it; past the last window, 0
//   dy (P,OH,OW)   X (P,H,W)   ->   dX (P,H,W)
// Threads as above.
template <class Window>
__global__ void pool2d_backward_kernel(Store dX, const float *dy, const float *X, PoolShape s) {
    const int p = blockIdx.x * blockDim.z + threadIdx.z;
    if (p >= s.planes) return;
    dX = dX.from(p * s.H * s.W);
    X += p * s.H * s.W;
    dy += p * s.OH * s.OW;
    for (int i = threadIdx.y; i * 2 < s.H; i += blockDim.y) {
        if (i < s.OH) pool_row_backward<Window>(dX, dy, X, i, s);
        for (int w = (i < s.OH ? 2 * s.OW : 0) + threadIdx.x; w < s.W; w += blockDim.x)
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
    return record(op, y, {X}, [=](const Tensor &) {
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
