// Batch normalization in two launches in each direction: sums, then all that needs them.
// y = (X - mean) / sqrt(var + eps) * gamma + beta, for each channel. Each block merges the parts of
// its channel's sums (channel_sums.h) and begins with the images that were read last, because a
// cache may have them. An addition and a ReLU that follow join the second launch (fusion.h).
// Gain: with mgpu.cu's in its place a step of ResNet-18 takes 1.49 times as long on an H100, and on
// a CPU 1.66 times as much user time (4 steps of 16, the whole program, median of 3 pairs).
// defines: batch_norm

namespace fast {
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
struct MomentsOf {
    const float *from[2]; // X, and X again, which is not used
    Planes s;
    struct Sum { // of distances from the first of its numbers: so their squares lose no digits
        float count, pivot, distances, squares;
        __device__ void add(float x, float) {
            if (count == 0) pivot = x;
            const float d = x - pivot;
            count++;
            distances += d;
            squares += d * d;
        }
        __device__ Moments part() const {
            const float mean = distances / max(count, 1.f);
            return {count, pivot + mean, squares - distances * mean};
        }
    };
    __device__ Sum start(int) const { return {}; }
    __device__ Moments operator()(int p) const { // of a plane
        const float *x = from[0] + p * s.pixels;
        const float m = warp_sum(s.pixels, [=](int i) { return x[i]; }) / s.pixels;
        const float squares = warp_sum(s.pixels, [=](int i) { return (x[i] - m) * (x[i] - m); });
        return {(float)s.pixels, m, squares};
    }
};
// y = (X - mean) * gamma / sqrt(var + eps) + beta
// parts: of mean and var, which are stored, and if `update` running = (1-momentum) * running +
// momentum * new. Without parts, mean and var are there.
template <int V>
__global__ void batch_norm_kernel(Store y, BatchNorm a, const Moments *parts, bool update,
                                  Slices s) {
    const int c = s.channel();
    const Moments m = parts ? merged(parts, s, c) : Moments{1, a.mean[c], a.var[c]};
    const float var = m.squares / m.count, unbiased = m.squares / max(m.count - 1, 1.f);
    const float scale = a.gamma[c] / sqrtf(var + bn_eps), shift = a.beta[c];
    if (parts && s.first()) {
        a.mean[c] = m.mean;
        a.var[c] = var;
        if (update) {
            a.running_mean[c] = (1 - bn_momentum) * a.running_mean[c] + bn_momentum * m.mean;
            a.running_var[c] = (1 - bn_momentum) * a.running_var[c] + bn_momentum * unbiased;
        }
    }
    for_channel<V>(s, {a.X, y.plus ? y.plus : a.X}, [&](int at, const Vector<V>(&x)[2]) {
        Vector<V> value;
        UNROLL
        for (int k = 0; k < V; k++) value.x[k] = (x[0].x[k] - m.mean) * scale + shift;
        store(y, at, value, x[1], x[1]);
    });
}
// dX = or += gamma / sqrt(var + eps) * (dy - sum/M - (X - mean) / (var + eps) * product/M), where
// M = N*plane: mean and var depend on X, too. And dgamma, dbeta. parts: of sum and product
template <int V>
__global__ void batch_norm_backward_kernel(Store dX, Store dgamma, Store dbeta, const float *dy,
                                           const Sums *parts, BatchNorm a, Slices s) {
    const int c = s.channel();
    const Sums sums = merged(parts, s, c);
    const float M = (float)s.N * s.pixels, m = a.mean[c], var = a.var[c] + bn_eps;
    const float scale = a.gamma[c] / sqrtf(var), dy_mean = sums.dy / M;
    const float slope = sums.product / M / var;
    if (s.first() && dgamma.data) dgamma.store(c, sums.product / sqrtf(var));
    if (s.first() && dbeta.data) dbeta.store(c, sums.dy);
    if (!dX.data) return;
    const float *const mask = dX.mask ? dX.mask : dy, *const plus = dX.plus ? dX.plus : dy;
    for_channel<V>(s, {dy, a.X, mask, plus}, [&](int at, const Vector<V>(&x)[4]) {
        Vector<V> value;
        UNROLL
        for (int k = 0; k < V; k++)
            value.x[k] = scale * (x[0].x[k] - dy_mean - (x[1].x[k] - m) * slope);
        store(dX, at, value, x[2], x[3]);
    });
}

static Tensor batch_norm(const Tensor &X, const Tensor &gamma, const Tensor &beta,
                         const Tensor &running_mean, const Tensor &running_var) {
    const std::vector<Tensor> inputs = {X, gamma, beta, running_mean, running_var};
    Tensor y = output({X, gamma, beta}, X.shape);
    const Device device = X.device;
    const bool sums = recording && X.shape[0] > 0; // an empty shard has no mean
    const Tensor mean = sums ? empty({X.shape[1]}, device) : running_mean;
    const Tensor var = sums ? empty({X.shape[1]}, device) : running_var;
    const BatchNorm a = {X.ptr(),   gamma.ptr(),        beta.ptr(),       mean.ptr(),
                         var.ptr(), running_mean.ptr(), running_var.ptr()};
    const Planes s = planes(X);
    const Tensor parts = sums ? parts_of<Moments>(MomentsOf{{a.X, a.X}, s}, s, device) : Tensor();
    const auto update = std::make_shared<bool>(true); // once, even if y is computed again
    auto kernel = [=](Store y) {
        (void)inputs, (void)mean, (void)var; // captured, because `a` points to their memory
        const Slices slices(s, {a.X, y.data, y.plus}, true);
        const bool once = std::exchange(*update, false);
        with_vectors(slices, [&](auto width) {
            constexpr int V = width();
            LAUNCH(batch_norm_kernel<V><<<slices.grid(), threads, 0, stream_of(device)>>>(
                y, a, (const Moments *)parts.data.get(), once, slices));
        });
    };
    launch(y, kernel, y.grad != nullptr);
    return record("batch_norm", y, inputs, [=](const Tensor &) {
        (void)inputs, (void)mean, (void)var;
        const Tensor dy = dy_of(y);
        // In this order, so that dbeta is added where gamma and beta are the same tensor
        const Store dgamma = target_of(gamma), dbeta = target_of(beta);
        const Tensor parts = parts_of<Sums>(SumsOf{{dy.ptr(), a.X}, a.mean, s}, s, device);
        const Store dX = target_of(X);
        const Slices slices(s, {dX.data, dX.mask, dX.plus, dy.ptr(), a.X}, true);
        with_vectors(slices, [&](auto width) {
            constexpr int V = width();
            LAUNCH(batch_norm_backward_kernel<V><<<slices.grid(), threads, 0, stream_of(device)>>>(
                dX, dgamma, dbeta, dy.ptr(), (const Sums *)parts.ptr(), a, slices));
        });
    });
}
} // namespace fast
