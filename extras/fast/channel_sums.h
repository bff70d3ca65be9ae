// Sums over the planes of a channel, one warp a plane.
// A warp sums over one plane, which is contiguous. One block then adds up the planes of a channel.
// That block jumps from image to image, which takes a CPU twice as long: there, an earlier kernel
// sums over the planes in the order of memory.
// defines: of_channel, in_order, Sums, Deviations, channel_sums

namespace fast {
constexpr int bn_warps = warp_size == 1 ? 8 : 32; // of a block, which sums over a channel
constexpr int bn_threads = bn_warps * warp_size;

// parts[p] = of_plane(p), for all planes in the order of memory. One warp per plane.
template <class Part, class OfPlane>
__global__ void planes_kernel(Part *parts, OfPlane of_plane, int P) {
    const int p = (blockIdx.x * blockDim.x + threadIdx.x) / warp_size;
    if (p >= P) return;
    const Part part = of_plane(p);
    if (threadIdx.x % warp_size == 0) parts[p] = part;
}
// These parts for a CPU; for a GPU a null pointer: of_channel() then works them out itself.
template <class Part, class OfPlane>
static Tensor in_order(OfPlane of_plane, const Planes &s, Device device) {
    const int P = warp_size == 1 ? s.N * s.C : 0;
    const Tensor parts = empty({P, sizeof(Part) / sizeof(float)}, device);
    if constexpr (warp_size == 1)
        LAUNCH(planes_kernel<<<blocks(P), threads, 0, stream_of(device)>>>((Part *)parts.ptr(),
                                                                           of_plane, P));
    return parts;
}
// Merges the planes of this block's channel: parts[p], or of_plane(p) if parts is null. Each warp
// takes every bn_warps-th plane; thread 0 returns the result.
template <class Part, class OfPlane>
__device__ inline Part of_channel(const Part *parts, OfPlane of_plane, const Planes &s) {
    __shared__ Part of_warps[bn_warps];
    const int warp = threadIdx.x / warp_size;
    Part all = {};
    for (int p = warp * s.C + blockIdx.x; p < s.N * s.C; p += bn_warps * s.C)
        all = merge(all, parts ? parts[p] : of_plane(p));
    if (threadIdx.x % warp_size == 0) of_warps[warp] = all;
    __syncthreads();
    for (int i = 1; i < bn_warps && threadIdx.x == 0; i++) all = merge(all, of_warps[i]);
    return all;
}

// Batch norm's X (N,C,plane) and its moments (C)
struct Deviations {
    const float *X = nullptr, *mean = nullptr, *var = nullptr;
    float eps = 0;
};
// Holds the sums of dy and of dy * (X - mean) over a plane or a channel. Without X, it holds only
// the sum of dy.
struct Sums {
    float dy, product;
};
__device__ inline Sums merge(Sums a, Sums b) { return {a.dy + b.dy, a.product + b.product}; }
struct SumsOf { // a plane, by one warp
    const float *dy, *X, *mean;
    Planes s;
    __device__ Sums operator()(int p) const {
        const float *g = dy + p * s.plane, *x = X + p * s.plane;
        const float m = X ? mean[p % s.C] : 0, sum = warp_sum(s.plane, [=](int i) { return g[i]; });
        return {sum, X ? warp_sum(s.plane, [=](int i) { return g[i] * (x[i] - m); }) : 0};
    }
};
// sums (C); dbeta = or += sums.dy, dgamma = or += sums.product / sqrt(var + eps), where not null.
// One block per channel.
__global__ void __launch_bounds__(bn_threads)
    channel_sums_kernel(Sums *sums, Store dgamma, Store dbeta, const Sums *parts, const float *dy,
                        Deviations a, Planes s) {
    const int c = blockIdx.x;
    const Sums all = of_channel(parts, SumsOf{dy, a.X, a.mean, s}, s);
    if (threadIdx.x > 0) return;
    sums[c] = all;
    if (dgamma.data) dgamma.store(c, all.product / sqrtf(a.var[c] + a.eps));
    if (dbeta.data) dbeta.store(c, all.dy);
}
// Computes the Sums of each channel. Without X, it sums dy only, which gives the gradient of a
// convolution's bias.
static Tensor channel_sums(Store dgamma, Store dbeta, const Tensor &dy, const Deviations &a) {
    const Planes s = planes(dy);
    const Tensor parts = in_order<Sums>(SumsOf{dy.ptr(), a.X, a.mean, s}, s, dy.device);
    const Tensor sums = empty({s.C, sizeof(Sums) / sizeof(float)}, dy.device);
    LAUNCH(channel_sums_kernel<<<s.C, bn_threads, 0, stream_of(dy.device)>>>(
        (Sums *)sums.ptr(), dgamma, dbeta, (const Sums *)parts.ptr(), dy.ptr(), a, s));
    return sums;
}
} // namespace fast
