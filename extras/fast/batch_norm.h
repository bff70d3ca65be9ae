// Batch normalization, one warp a plane.
// y = (X - mean) / sqrt(var + eps) * gamma + beta, for each channel. A warp sums over a plane,
// which is contiguous; what the planes of a channel give is merged by one block, so X is read once
// from memory, the second time from a cache. That block jumps from image to image, which takes a
// CPU twice as long: there a kernel before it takes the planes in the order of memory.
// Gain: on a CPU ResNet-18 takes 1.66 times as much user time with mgpu.cu's in its place
// (4 steps of 16, the whole program, median of 3 pairs).
// defines: batch_norm

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
        LAUNCH(
            planes_kernel<<<blocks(P), threads, 0, on(device)>>>((Part *)parts.ptr(), of_plane, P));
    return parts;
}
// What the planes of this block's channel give, merged: parts[p], or of_plane(p) if that is null.
// Each of its warps takes every bn_warps-th; thread 0 returns the result.
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

// The count, the mean and the sum of (x-mean)^2 of some numbers x. merge() joins those of two sets
// without cancellation (Chan et al. 1979).
struct Moments {
    float count, mean, squares;
};
__device__ inline Moments merge(Moments a, Moments b) {
    const float count = a.count + b.count, d = b.mean - a.mean;
    if (b.count == 0) return a;
    return {count, a.mean + d * (b.count / count),
            a.squares + b.squares + d * d * (a.count / count * b.count)};
}
struct MomentsOf { // a plane, by one warp
    const float *X;
    Planes s;
    __device__ Moments operator()(int p) const {
        const float *x = X + p * s.plane;
        const float m = warp_sum(s.plane, [=](int i) { return x[i]; }) / s.plane;
        const float squares = warp_sum(s.plane, [=](int i) { return (x[i] - m) * (x[i] - m); });
        return {(float)s.plane, m, squares};
    }
};
// mean and var of each channel; running = (1-momentum) * running + momentum * new
// One block per channel.
__global__ void __launch_bounds__(bn_threads)
    batch_norm_moments_kernel(BatchNorm a, const Moments *parts, Planes s) {
    const int c = blockIdx.x;
    const Moments all = of_channel(parts, MomentsOf{a.X, s}, s);
    if (threadIdx.x > 0) return;
    a.mean[c] = all.mean;
    a.var[c] = all.squares / all.count;
    const float unbiased = all.squares / (all.count > 1 ? all.count - 1 : 1);
    a.running_mean[c] = (1 - bn_momentum) * a.running_mean[c] + bn_momentum * all.mean;
    a.running_var[c] = (1 - bn_momentum) * a.running_var[c] + bn_momentum * unbiased;
}
// y = (X - mean) * gamma / sqrt(var + eps) + beta   One warp per plane.
__global__ void batch_norm_kernel(Store y, BatchNorm a, Planes s) {
    const int p = (blockIdx.x * blockDim.x + threadIdx.x) / warp_size, c = p % s.C;
    if (p >= s.N * s.C) return;
    const float m = a.mean[c], scale = a.gamma[c] / sqrtf(a.var[c] + bn_eps), shift = a.beta[c];
    const float *X = a.X + p * s.plane;
    y = y.from(p * s.plane);
    UNROLL_LANES
    for (int i = threadIdx.x % warp_size; i < s.plane; i += warp_size)
        y.store(i, (X[i] - m) * scale + shift);
}
// The sums of dy and of dy * (X - mean) over a plane or a channel; without X that of dy alone
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
                        BatchNorm a, Planes s) {
    const int c = blockIdx.x;
    const Sums all = of_channel(parts, SumsOf{dy, a.X, a.mean, s}, s);
    if (threadIdx.x > 0) return;
    sums[c] = all;
    if (dgamma.data) dgamma.store(c, all.product / sqrtf(a.var[c] + bn_eps));
    if (dbeta.data) dbeta.store(c, all.dy);
}
// dX = or += gamma / sqrt(var + eps) * (dy - sum/M - (X - mean) / (var + eps) * product/M), where
// M = N*plane: mean and var depend on X, too.   One warp per plane.
__global__ void batch_norm_backward_kernel(Store dX, const float *dy, const Sums *sums, BatchNorm a,
                                           Planes s) {
    const int p = (blockIdx.x * blockDim.x + threadIdx.x) / warp_size, c = p % s.C;
    if (p >= s.N * s.C) return;
    const float M = (float)s.N * s.plane, m = a.mean[c], var = a.var[c] + bn_eps;
    const float scale = a.gamma[c] / sqrtf(var), dy_mean = sums[c].dy / M;
    const float slope = sums[c].product / M / var;
    const float *X = a.X + p * s.plane;
    dy += p * s.plane;
    dX = dX.from(p * s.plane);
    UNROLL_LANES
    for (int i = threadIdx.x % warp_size; i < s.plane; i += warp_size)
        dX.store(i, scale * (dy[i] - dy_mean - (X[i] - m) * slope));
}

// The Sums of each channel. Without a.X of dy alone: a convolution's bias
static Tensor channel_sums(Store dgamma, Store dbeta, const Tensor &dy, const BatchNorm &a) {
    const Planes s = planes(dy);
    const Tensor parts = in_order<Sums>(SumsOf{dy.ptr(), a.X, a.mean, s}, s, dy.device);
    const Tensor sums = empty({s.C, sizeof(Sums) / sizeof(float)}, dy.device);
    LAUNCH(channel_sums_kernel<<<s.C, bn_threads, 0, on(dy.device)>>>(
        (Sums *)sums.ptr(), dgamma, dbeta, (const Sums *)parts.ptr(), dy.ptr(), a, s));
    return sums;
}
static Tensor batch_norm(const Tensor &X, const Tensor &gamma, const Tensor &beta,
                         const Tensor &running_mean, const Tensor &running_var) {
    const std::vector<Tensor> inputs = {X, gamma, beta, running_mean, running_var};
    Tensor y = output("batch_norm", {X, gamma, beta}, X.shape);
    const int N = X.shape[0], C = X.shape[1];
    const Tensor mean = recording ? full({C}, 0, X.device) : running_mean;
    const Tensor var = recording ? full({C}, 0, X.device) : running_var;
    const BatchNorm a = {X.ptr(),   gamma.ptr(),        beta.ptr(),       mean.ptr(),
                         var.ptr(), running_mean.ptr(), running_var.ptr()};
    const Planes s = planes(X);
    if (recording && N > 0) {
        const Tensor parts = in_order<Moments>(MomentsOf{a.X, s}, s, X.device);
        LAUNCH(fast::batch_norm_moments_kernel<<<C, bn_threads, 0, on(X.device)>>>(
            a, (const Moments *)parts.ptr(), s));
    }
    const int by_plane = blocks((long)N * C * warp_size);
    launch(y, [=](Store y) {
        (void)inputs, (void)mean, (void)var; // captured, because `a` points to their memory
        LAUNCH(fast::batch_norm_kernel<<<by_plane, threads, 0, on(X.device)>>>(y, a, s));
    });
    record(y, [=] {
        (void)inputs, (void)mean, (void)var;
        const Tensor dy = dy_of(y);
        // In this order, so that dbeta is added where gamma and beta are the same tensor
        const Store dgamma = target_of(gamma), dbeta = target_of(beta);
        const Tensor sums = channel_sums(dgamma, dbeta, dy, a);
        if (!X.grad) return;
        LAUNCH(fast::batch_norm_backward_kernel<<<by_plane, threads, 0, on(X.device)>>>(
            target_of(X), dy.ptr(), (const Sums *)sums.ptr(), a, s));
    });
    return y;
}
} // namespace fast
