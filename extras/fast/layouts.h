// Copies X and dy into the order that wgmma wants: the terms of a sum are neighbours.
// The copies are rounded to TF32.
//     y, dX    (N,H,W,C). A term is (u,v,c), and the channels of a pixel are neighbours.
//     dW       (C,N,H,W). A term is a pixel. For each tap v there is a copy that is shifted by v,
//              so that the terms of every tap begin at a multiple of 16 bytes.
// Cost: a fifth of a step of ResNet-18 in tf32 on an H100.
// defines: is_wgmma, channels_last, wgmma_backward_weights

namespace fast {
#ifdef WGMMA
// to (N,plane,C) = X (N,C,plane), rounded. A block has 32 channels and 32 pixels of an image.
__global__ void __launch_bounds__(threads)
    channels_last_kernel(float *to, const float *X, int C, int plane) {
    constexpr int side = 32, rows = threads / side;
    __shared__ float tile[side][side + 1];
    const int p0 = blockIdx.y * side, c0 = blockIdx.z * side;
    const int x = threadIdx.x % side, y = threadIdx.x / side;
    X += (long)blockIdx.x * C * plane, to += (long)blockIdx.x * C * plane;
    UNROLL_GPU
    for (int i = y; i < side; i += rows)
        if (p0 + x < plane) tile[i][x] = X[(c0 + i) * plane + p0 + x];
    __syncthreads();
    UNROLL_GPU
    for (int i = y; i < side; i += rows)
        if (p0 + i < plane) to[(p0 + i) * C + c0 + x] = to_tf32(tile[x][i]);
}
static Images channels_last(const Tensor &X) {
    const int N = X.shape[0], C = X.shape[1], H = X.shape[2], W = X.shape[3];
    const Tensor to = empty({N, H, W, C}, X.device);
    const dim3 grid(N, blocks(H * W, 32), C / 32);
    if (size(X) > 0)
        LAUNCH(channels_last_kernel<<<grid, threads, 0, stream_of(X.device)>>>(to.ptr(), X.ptr(), C,
                                                                               H * W));
    return {to, 0, H * W * C, 1, W * C, C};
}

// to (copies,C,N,H,pitch): row[j] = X's [j*stride + copy + first], rounded, if j < count; else 0.
// One thread per four j of all copies.
struct Shifted {
    int N, C, H, W, copies, first, stride, count, pitch;
};
__global__ void __launch_bounds__(threads)
    shifted_kernel(float *to, const float *X, Shifted s, Divisor fours, Divisor H, Divisor N) {
    const int i = blockIdx.x * threads + threadIdx.x, row = fours(i), j0 = (i - row * fours.d) * 4;
    const int plane = H(row), h = row - plane * s.H, c = N(plane), n = plane - c * s.N;
    if (c >= s.C) return;
    X += ((n * s.C + c) * s.H + h) * s.W;
    for (int copy = 0; copy < s.copies; copy++) {
        Vector<4> four;
        UNROLL
        for (int q = 0; q < 4; q++) {
            const int j = j0 + q, w = j * s.stride + copy + s.first;
            const bool inside = j < s.count && w >= 0 && w < s.W;
            four.x[q] = inside ? to_tf32(X[w]) : 0;
        }
        ((Vector<4> *)to)[copy * (s.C * s.N * s.H * fours.d) + i] = four;
    }
}
static Tensor shifted(const Tensor &X, int copies, int first, int stride, int count, int pitch) {
    const int N = X.shape[0], C = X.shape[1], H = X.shape[2], W = X.shape[3];
    const Shifted s = {N, C, H, W, copies, first, stride, count, pitch};
    const Tensor to = empty({copies, C, N, H, pitch}, X.device);
    if (size(to) > 0)
        LAUNCH(shifted_kernel<<<blocks(size(to) / copies / 4), threads, 0, stream_of(X.device)>>>(
            to.ptr(), X.ptr(), s, pitch / 4, H, N));
    return to;
}

// Return whether the device has wgmma. Emulated devices do.
static bool has_wgmma(Device device) {
    int major = 0, minor = 0;
    if (on_cpu) return true;
    const int id = cuda_device(device);
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id));
    CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, id));
    return major == 9 && minor == 0;
}
static bool is_wgmma(const ConvShape &s, Device device) {
    const int pitch = blocks(s.OW, 4) * 4;
    // One tap does not pay for the copies
    const bool pays = s.K > 1 && s.C % 64 == 0 && s.O % 64 == 0;
    const bool fits = 1. * s.K * s.C * s.N * s.H * pitch <= INT_MAX; // into a Tensor
    return s.rung == tf32 && allow_wgmma && pays && fits && s.N > 0 && has_wgmma(device);
}
// Compute dW and db. The product's rows are (u,v,c), its terms (n,i,j) with j < pitch, and pitch is
// a multiple of 4.
static void wgmma_backward_weights(const ProductOut &to, const Tensor &X, const Tensor &dy,
                                   const ConvShape &s) {
    const int K = s.K, S = s.stride, P = s.padding, sk = s.W_stride_k;
    const int pitch = blocks(s.OW, 4) * 4, terms = s.N * s.OH * pitch, plane = s.N * s.H * pitch;
    const Tensor x = shifted(X, K, -P, S, s.OW, pitch), g = shifted(dy, 1, 0, 1, s.OW, pitch);
    const Map A_row = {true, {K, s.C * plane}, {K, pitch, 1}, {s.C, plane}};
    const Axis images = {s.N, s.H * pitch}, rows = {s.OH, S * pitch, S};
    const Map A_term = {false, images, rows, {pitch, 1}, -P * pitch, -P};
    const Map C_row = {true, {K, sk}, {K, K * sk}, {s.C, K * K * sk}};
    const Product p = {
        s.C * K * K,        s.O,   terms,        A_row, A_term, s.H, 1, spaced(terms, 1),
        spaced(s.O, terms), C_row, s.W_stride_o, 0,     1};
    with_wgmma(p, [&](auto tile) {
        product_tiles<decltype(tile), Lines, Lines>(to, x.ptr(), g.ptr(), p, X.device);
    });
}
#else
static bool is_wgmma(const ConvShape &, Device) { return false; }
static Images channels_last(const Tensor &) { return {}; }
static void wgmma_backward_weights(const ProductOut &, const Tensor &, const Tensor &,
                                   const ConvShape &) {}
#endif
} // namespace fast
