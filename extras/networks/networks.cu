// The other two networks of the tutorial: ResNet-18, from "Concise Implementation for Multiple
// GPUs", and the lab's LeNet with max pooling. This part of the program adds MODEL=resnet18 and
// MODEL=lab_cnn to mgpu.cu.
// defines: NETWORKS, add, conv2d, max_pool2d, global_avg_pool2d, batch_norm, buffers, Residual,
// resnet_block, resnet18, lab_cnn, evaluate_accuracy_gpus, train_concise, models, MODEL,
// EVALUATE_ALL, KVSTORE
#define NETWORKS

// ---------------------------------------------------------------------------------------------
// 1. Operators

Tensor add(const Tensor &A, const Tensor &B); // of the same shape
Tensor conv2d(const Tensor &X, const Tensor &W, const Tensor &b, int stride, int padding);
Tensor max_pool2d(const Tensor &X, int kernel_size, int stride);
Tensor batch_norm(const Tensor &X, const Tensor &gamma, const Tensor &beta,
                  const Tensor &running_mean, const Tensor &running_var);

// --- addition
// y[i] = A[i] + B[i]
//   A (n)   B (n)   ->   y (n)
// One thread per element.
__global__ void addition_kernel(float *y, const float *A, const float *B, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = A[i] + B[i];
}

// Return A + B. They may be the same tensor: its gradient is then 2 dy.
Tensor add(const Tensor &A, const Tensor &B) {
    check_inputs("add", A.shape == B.shape, "two of the same shape", {A, B});
    const int n = size(A);
    const Tensor y = empty(A.shape, A.device);
    LAUNCH(addition_kernel<<<blocks(n), threads, 0, stream_of(A.device)>>>(y.ptr(), A.ptr(),
                                                                           B.ptr(), n));
    return add_to_tape("add", y, {A, B}, [=](const Tensor &dy) {
        for (const Tensor &X : {A, B}) {
            if (float *dX = grad_ptr(X)) { // dX += dy
                LAUNCH(add_kernel<<<blocks(n), threads, 0, stream_of(X.device)>>>(dX, dy.ptr(), n));
            }
        }
    });
}

// --- pooling
// Return where the largest number of window (i,j) of plane p lies in X (P,H,W). Of several largest
// numbers the first one counts; NaN counts as larger than any number.
__device__ inline int window_argmax(const float *X, const PoolShape &s, int p, int i, int j) {
    const int corner = (p * s.H + i * s.K) * s.W + j * s.K;
    int best = corner;
    for (int u = 0; u < s.K; u++) {
        for (int v = 0; v < s.K; v++) {
            const int place = corner + u * s.W + v;
            if (X[best] == X[best] && !(X[place] <= X[best])) best = place;
        }
    }
    return best;
}

// y[p,i,j] = max over u,v of X[p,i*K+u,j*K+v]
//   X (P,H,W)   ->   y (P,OH,OW)
// One thread per element of y.
__global__ void max_pool2d_kernel(float *y, const float *X, PoolShape s) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    const int j = index % s.OW, i = index / s.OW % s.OH, p = index / s.OW / s.OH;
    if (p < s.planes) y[index] = X[window_argmax(X, s, p, i, j)];
}

// dX[p,h,w] += dy[p,i,j] where (h,w) is the largest number of window (i,j)
//   dy (P,OH,OW)   X (P,H,W)   ->   dX (P,H,W)
// One thread per element of dy. Windows do not overlap, so no two threads add to the same element.
__global__ void max_pool2d_backward_kernel(float *dX, const float *dy, const float *X,
                                           PoolShape s) {
    const int index = blockIdx.x * blockDim.x + threadIdx.x;
    const int j = index % s.OW, i = index / s.OW % s.OH, p = index / s.OW / s.OH;
    if (p < s.planes) dX[window_argmax(X, s, p, i, j)] += dy[index];
}

// Same as F.max_pool2d(X, kernel_size, stride), for windows that do not overlap.
//   X (N,C,H,W)   ->   y (N,C,OH,OW)
Tensor max_pool2d(const Tensor &X, int kernel_size, int stride) {
    const PoolShape s = pool_shape("max_pool2d", X, kernel_size, stride);
    const Tensor y = empty({X.shape[0], X.shape[1], s.OH, s.OW}, X.device);
    const int n = size(y);
    LAUNCH(max_pool2d_kernel<<<blocks(n), threads, 0, stream_of(X.device)>>>(y.ptr(), X.ptr(), s));
    return add_to_tape("max_pool2d", y, {X}, [=](const Tensor &dy) {
        float *dX = grad_ptr(X);
        LAUNCH(max_pool2d_backward_kernel<<<blocks(n), threads, 0, stream_of(X.device)>>>(
            dX, dy.ptr(), X.ptr(), s));
    });
}

// Return the mean of each plane, which is square: nn.AdaptiveAvgPool2d((1,1)) and nn.Flatten().
//   X (N,C,H,H)   ->   y (N,C)
Tensor global_avg_pool2d(const Tensor &X) {
    const bool valid =
        X.shape.size() == 4 && X.shape[1] > 0 && X.shape[2] > 0 && X.shape[3] == X.shape[2];
    check_inputs("global_avg_pool2d", valid, "(N,C,H,H)", {X});
    return reshape(avg_pool2d(X, X.shape[2], X.shape[2]), {X.shape[0], -1});
}

// --- convolution with a stride and padding
// y[n,o,i,j] = b[o] + sum over c,u,v of X[n,c,i*stride+u-padding,j*stride+v-padding] * W[o,c,u,v]
//   X (N,C,H,W)   W (O,C,K,K)   b (O)   ->   y (N,O,OH,OW), OH = (H + 2*padding - K)/stride + 1
// Beyond the border of an image X counts as 0. As in mgpu.cu, im2col makes a matrix product of it.
struct StridedShape {
    ConvShape conv;
    int stride, padding;
};

// columns[n,t,p] = X[n,c,i*stride+u-padding,j*stride+v-padding], or 0 beyond the border
//   X (N,C,H,W)   ->   columns (N,T,P)
// One thread per (n,c,i,j).
__global__ void strided_im2col_kernel(float *columns, const float *X, StridedShape shape) {
    const ConvShape s = shape.conv;
    const int index = blockIdx.x * blockDim.x + threadIdx.x, P = s.OH * s.OW;
    const int j = index % s.OW, i = index / s.OW % s.OH, plane = index / P; // n * C + c
    if (plane >= s.N * s.C) return;
    X += plane * s.H * s.W;
    columns += plane * s.K * s.K * P + index % P;
    for (int u = 0; u < s.K; u++) {
        for (int v = 0; v < s.K; v++) {
            const int h = i * shape.stride + u - shape.padding;
            const int w = j * shape.stride + v - shape.padding;
            const bool inside = h >= 0 && h < s.H && w >= 0 && w < s.W;
            columns[(u * s.K + v) * P] = inside ? X[h * s.W + w] : 0;
        }
    }
}

// dX[n,c,h,w] += sum of dcolumns[n,t,p] over all i,j,u,v with
// i*stride+u-padding = h and j*stride+v-padding = w
//   dcolumns (N,T,P)   ->   dX (N,C,H,W)
// One thread per element of dX.
__global__ void strided_col2im_kernel(float *dX, const float *dcolumns, StridedShape shape) {
    const ConvShape s = shape.conv;
    const int stride = shape.stride, index = blockIdx.x * blockDim.x + threadIdx.x;
    const int w = index % s.W + shape.padding, h = index / s.W % s.H + shape.padding;
    const int plane = index / s.W / s.H; // n * C + c
    if (plane >= s.N * s.C) return;
    float sum = 0;
    for (int i = min(h / stride, s.OH - 1); i >= 0 && i * stride + s.K > h; i--) {
        for (int j = min(w / stride, s.OW - 1); j >= 0 && j * stride + s.K > w; j--) {
            const int u = h - i * stride, v = w - j * stride;
            sum += dcolumns[(((plane * s.K + u) * s.K + v) * s.OH + i) * s.OW + j];
        }
    }
    dX[index] += sum;
}

// Return the columns (N,T,P) of X.
static Tensor im2col(const Tensor &X, const StridedShape &shape) {
    const ConvShape &s = shape.conv;
    const Tensor columns = empty({s.N, s.C * s.K * s.K, s.OH * s.OW}, X.device);
    const long windows = (long)s.N * s.C * s.OH * s.OW;
    LAUNCH(strided_im2col_kernel<<<blocks(windows), threads, 0, stream_of(X.device)>>>(
        columns.ptr(), X.ptr(), shape));
    return columns;
}

// Return the sizes of a convolution, or fail.
static StridedShape strided_shape(const Tensor &X, const Tensor &W, const Tensor &b, int stride,
                                  int padding) {
    const bool valid = X.shape.size() == 4 && W.shape.size() == 4 && W.shape[1] == X.shape[1] &&
                       W.shape[2] == W.shape[3] && b.shape == std::vector<int>{W.shape[0]} &&
                       stride > 0 && padding >= 0 && size(W) > 0 && X.shape[2] > 0 &&
                       X.shape[3] > 0 && X.shape[2] + 2 * padding >= W.shape[2] &&
                       X.shape[3] + 2 * padding >= W.shape[2];
    const std::string expected =
        "(N,C,H,W), (O,C,K,K), (O) with K <= H and W + 2*padding, stride > 0 (it is " +
        std::to_string(stride) + ") and padding >= 0 (it is " + std::to_string(padding) + ")";
    check_inputs("conv2d", valid, expected.c_str(), {X, W, b});
    const int H = X.shape[2], width = X.shape[3], O = W.shape[0], K = W.shape[2];
    const int OH = (H + 2 * padding - K) / stride + 1, OW = (width + 2 * padding - K) / stride + 1;
    return {{X.shape[0], X.shape[1], H, width, O, K, OH, OW}, stride, padding};
}

// Same as F.conv2d(X, W, b, stride, padding).
Tensor conv2d(const Tensor &X, const Tensor &W, const Tensor &b, int stride, int padding) {
    const StridedShape shape = strided_shape(X, W, b, stride, padding);
    const ConvShape &s = shape.conv;
    const int N = s.N, O = s.O, P = s.OH * s.OW, T = s.C * s.K * s.K;
    const Device device = X.device;
    const Tensor y = empty({N, O, s.OH, s.OW}, device);
    bias(y, b);                              // y[n] = b + W @ columns[n]
    const Tensor columns = im2col(X, shape); // kept for dW
    matmul({y.ptr(), N, O, P}, {W.ptr(), 1, O, T}, {columns.ptr(), N, T, P}, device);
    return add_to_tape("conv2d", y, {X, W, b}, [=](const Tensor &dy) {
        bias_backward(b, dy);
        if (float *dW = grad_ptr(W)) { // dW += sum over n of dy[n] @ columns[n]^T
            matmul_sum({dW, 1, O, T}, {dy.ptr(), N, O, P}, transpose({columns.ptr(), N, T, P}),
                       device);
        }
        if (float *dX = grad_ptr(X)) { // dcolumns[n] = W^T @ dy[n]
            const Tensor dcolumns = full({N, T, P}, 0, device);
            matmul({dcolumns.ptr(), N, T, P}, transpose({W.ptr(), 1, O, T}), {dy.ptr(), N, O, P},
                   device);
            LAUNCH(strided_col2im_kernel<<<blocks(size(X)), threads, 0, stream_of(device)>>>(
                dX, dcolumns.ptr(), shape));
        }
    });
}

// --- batch normalization
constexpr float bn_eps = 1e-5f;
constexpr float bn_momentum = 0.1f; // the weight of new statistics in the running ones
struct BatchNorm {                  // X (N,C,plane), all others (C)
    const float *X, *gamma, *beta;
    float *mean, *var, *running_mean, *running_var;
};

// Return to every thread of a block the sum of all threads' values. The values, in shared memory,
// are added pairwise, the upper half to the lower half, until one is left. This order is fixed, so
// every run gives the same bits. `scratch` has a float for each thread.
__device__ inline float block_sum(float *scratch, float value) {
    scratch[threadIdx.x] = value;
    __syncthreads();
    for (unsigned half = threads / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) scratch[threadIdx.x] += scratch[threadIdx.x + half];
        __syncthreads();
    }
    return scratch[0];
}

// Return to every thread of a block the sum of value(i) over the indices i of channel c.
template <class Value>
__device__ inline float channel_sum(float *scratch, Planes s, int c, Value value) {
    float sum = 0;
    for (int m = threadIdx.x; m < s.N * s.pixels; m += threads) {
        sum += value((m / s.pixels * s.O + c) * s.pixels + m % s.pixels);
    }
    __syncthreads(); // until all threads have read the result of an earlier call
    return block_sum(scratch, sum);
}

// mean and var of each channel; running = (1 - momentum) * running + momentum * new
// One block per channel. The running variance is the unbiased one, as in PyTorch.
__global__ void batch_norm_moments_kernel(BatchNorm a, Planes s) {
    __shared__ float scratch[threads];
    const int c = blockIdx.x, n = s.N * s.pixels;
    const float *X = a.X;
    const float mean = channel_sum(scratch, s, c, [=](int i) { return X[i]; }) / n;
    const float squares =
        channel_sum(scratch, s, c, [=](int i) { return (X[i] - mean) * (X[i] - mean); });
    if (threadIdx.x > 0) return;
    a.mean[c] = mean;
    a.var[c] = squares / n;
    const float unbiased = squares / (n > 1 ? n - 1 : 1);
    a.running_mean[c] = (1 - bn_momentum) * a.running_mean[c] + bn_momentum * mean;
    a.running_var[c] = (1 - bn_momentum) * a.running_var[c] + bn_momentum * unbiased;
}

// y = (X - mean) * gamma / sqrt(var + eps) + beta
// One thread per element.
__global__ void batch_norm_kernel(float *y, BatchNorm a, Planes s) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= s.N * s.O * s.pixels) return;
    const int c = i / s.pixels % s.O;
    y[i] = (a.X[i] - a.mean[c]) * (a.gamma[c] / sqrtf(a.var[c] + bn_eps)) + a.beta[c];
}

// With M = N*plane and, for each channel, sum = the sum of dy and product = the sum of
// dy * (X - mean):
//   dbeta += sum   dgamma += product / sqrt(var + eps)
//   dX += gamma / sqrt(var + eps) * (dy - sum/M - (X - mean) / (var + eps) * product/M)
// The last two terms are there because mean and var depend on X. One block per channel. A gradient
// that is not wanted is null.
__global__ void batch_norm_backward_kernel(float *dX, float *dgamma, float *dbeta, const float *dy,
                                           BatchNorm a, Planes s) {
    __shared__ float scratch[threads];
    const int c = blockIdx.x, M = s.N * s.pixels;
    const float *X = a.X, mean = a.mean[c], var = a.var[c] + bn_eps;
    const float sum = channel_sum(scratch, s, c, [=](int i) { return dy[i]; });
    const float product = channel_sum(scratch, s, c, [=](int i) { return dy[i] * (X[i] - mean); });
    if (threadIdx.x == 0 && dgamma) dgamma[c] += product / sqrtf(var);
    if (threadIdx.x == 0 && dbeta) dbeta[c] += sum;
    const float scale = a.gamma[c] / sqrtf(var), slope = product / M / var;
    for (int m = threadIdx.x; dX && m < M; m += threads) {
        const int i = (m / s.pixels * s.O + c) * s.pixels + m % s.pixels; // as in channel_sum
        dX[i] += scale * (dy[i] - sum / M - (X[i] - mean) * slope);
    }
}

static void check_batch_norm(const std::vector<Tensor> &inputs) { // X gamma beta mean var
    const Tensor &X = inputs[0];
    bool valid = X.shape.size() == 4 && X.shape[1] > 0 && X.shape[2] > 0 && X.shape[3] > 0;
    for (size_t i = 1; i < inputs.size(); i++) {
        valid = valid && inputs[i].shape == std::vector<int>{X.shape[1]};
    }
    check_inputs("batch_norm", valid, "(N,C,H,W), (C), (C), (C), (C)", inputs);
}

// Same as F.batch_norm(X, running_mean, running_var, gamma, beta, training).
//   X (N,C,H,W)   gamma, beta, running_mean, running_var (C)   ->   y (N,C,H,W)
// While autograd records, mean and var are those of X, this device's shard, and the running ones
// are updated. Under NoGrad they are the running ones. An empty shard changes nothing.
Tensor batch_norm(const Tensor &X, const Tensor &gamma, const Tensor &beta,
                  const Tensor &running_mean, const Tensor &running_var) {
    const std::vector<Tensor> inputs = {X, gamma, beta, running_mean, running_var};
    check_batch_norm(inputs);
    const int N = X.shape[0], C = X.shape[1], n = size(X);
    const Tensor y = empty(X.shape, X.device);
    const Tensor mean = recording ? full({C}, 0, X.device) : running_mean;
    const Tensor var = recording ? full({C}, 0, X.device) : running_var;
    const BatchNorm a = {X.ptr(),   gamma.ptr(),        beta.ptr(),       mean.ptr(),
                         var.ptr(), running_mean.ptr(), running_var.ptr()};
    const Planes s = planes(X);
    if (recording && N > 0) {
        LAUNCH(batch_norm_moments_kernel<<<C, threads, 0, stream_of(X.device)>>>(a, s));
    }
    LAUNCH(batch_norm_kernel<<<blocks(n), threads, 0, stream_of(X.device)>>>(y.ptr(), a, s));
    return add_to_tape("batch_norm", y, inputs, [=](const Tensor &dy) {
        (void)mean, (void)var; // kept, as `inputs` are: `a` points to their memory
        float *const dgamma = grad_ptr(gamma), *const dbeta = grad_ptr(beta);
        LAUNCH(batch_norm_backward_kernel<<<C, threads, 0, stream_of(X.device)>>>(
            grad_ptr(X), dgamma, dbeta, dy.ptr(), a, s));
    });
}

// ---------------------------------------------------------------------------------------------
// 2. Networks
// A network is written as layers, which bring their own parameters, as in gluon.nn and torch.nn.

// Return U(low, high), on the host, drawn from rng or from other dice.
static Tensor uniform(float low, float high, std::vector<int> shape, std::mt19937 &dice = rng) {
    std::uniform_real_distribution<float> distribution(low, high);
    const Tensor t = empty(shape, cpu());
    for (int i = 0; i < size(t); i++) t.ptr()[i] = distribution(dice);
    return t;
}

// A function that makes a parameter of this shape, on the host.
typedef std::function<Tensor(std::vector<int> shape)> Init;

static Init constant(float value) {
    return [=](std::vector<int> shape) { return full(shape, value, cpu()); };
}

// The running statistics of batch norm are no parameters: they are not trained. These are the ones
// that a training begins with, on the host, and a copy of them on each device that has needed one,
// where the forward pass updates it. (Never destroyed, as mgpu.cu's tapes.)
std::vector<std::string> buffer_names;
std::vector<Tensor> &buffers = *new std::vector<Tensor>;
static PerDevice &device_buffers = *new PerDevice; // by Device::id

// Return a device's buffers.
std::vector<Tensor> &buffers_on(Device device) {
    if (device.id >= (int)device_buffers.size()) device_buffers.resize(device.id + 1);
    std::vector<Tensor> &list = device_buffers[device.id];
    while (list.size() < buffers.size()) {
        list.push_back(copyto(buffers[list.size()], device));
    }
    return list;
}

// Let each device begin again with the buffers on the host.
void reset_buffers() { device_buffers.clear(); }

// The parameters of a network's layers, which take one after the other from a list. In the very
// first forward pass there is no list: each layer makes its parameters then, because it knows the
// shape of its input. Gluon calls this deferred initialization.
struct Layers {
    const std::vector<Tensor> *list;        // null: make the parameters and append them to `params`
    Init init = nullptr;                    // makes the weights
    size_t used = 0, used_buffers = 0;      // how many of the list and of the buffers
    std::map<std::string, int> layers = {}; // how many layers of each kind there are so far

    // Return the name of the layer that was begun last, such as conv0.weight for "conv", ".weight".
    std::string name(const char *layer, const char *what) {
        return layer + std::to_string(layers[layer] - 1) + what;
    }

    // Return the next parameter.
    Tensor next(const char *layer, const std::string &what, std::vector<int> shape,
                const Init &init) {
        if (list) return (*list)[used++];
        if (what == ".weight") layers[layer]++; // a layer's first parameter
        params.push_back(init(shape));
        param_names.push_back(name(layer, what.c_str()));
        return copyto(params.back(), gpu(0));
    }

    // Return the next buffer, on X's device. The first forward pass makes it.
    Tensor next_buffer(const char *layer, const char *what, const Tensor &X, float value) {
        if (!list) {
            buffers.push_back(full({X.shape[1]}, value, cpu()));
            buffer_names.push_back(name(layer, what));
        }
        return buffers_on(X.device)[used_buffers++];
    }
};

static Tensor Conv2d(Layers &l, const Tensor &X, int channels, int kernel_size, int stride = 1,
                     int padding = 0) {
    Tensor W = l.next("conv", ".weight", {channels, X.shape[1], kernel_size, kernel_size}, l.init);
    Tensor b = l.next("conv", ".bias", {channels}, constant(0));
    return conv2d(X, W, b, stride, padding);
}

static Tensor Linear(Layers &l, const Tensor &X, int out_features) {
    Tensor W = l.next("dense", ".weight", {X.shape[1], out_features}, l.init);
    Tensor b = l.next("dense", ".bias", {out_features}, constant(0));
    return linear(X, W, b);
}

static Tensor BatchNorm2d(Layers &l, const Tensor &X) {
    const int channels = X.shape[1];
    Tensor gamma = l.next("bn", ".weight", {channels}, constant(1));
    Tensor beta = l.next("bn", ".bias", {channels}, constant(0));
    Tensor mean = l.next_buffer("bn", ".running_mean", X, 0);
    Tensor var = l.next_buffer("bn", ".running_var", X, 1);
    return batch_norm(X, gamma, beta, mean, var);
}

// Return relu(Y + X), where Y is two convolutions of X. With use_1x1conv, X passes through a third
// one.
Tensor Residual(Layers &l, Tensor X, int num_channels, bool use_1x1conv = false, int strides = 1) {
    Tensor Y = relu(BatchNorm2d(l, Conv2d(l, X, num_channels, 3, strides, 1)));
    Y = BatchNorm2d(l, Conv2d(l, Y, num_channels, 3, 1, 1));
    if (use_1x1conv) X = Conv2d(l, X, num_channels, 1, strides);
    return relu(add(Y, X));
}

static Tensor resnet_block(Layers &l, Tensor X, int num_channels, int num_residuals,
                           bool first_block = false) {
    for (int i = 0; i < num_residuals; i++) {
        if (i == 0 && !first_block) {
            X = Residual(l, X, num_channels, true, 2);
        } else {
            X = Residual(l, X, num_channels);
        }
    }
    return X;
}

// Compute a slightly modified ResNet-18 model, for small images. k devices learn something else
// than one device, because batch norm takes mean and variance over the n/k samples of a device.
Tensor resnet18(Layers &l, Tensor X, int num_classes) {
    // This model uses a smaller convolution kernel, stride, and padding and removes the max-pooling
    // layer
    X = relu(BatchNorm2d(l, Conv2d(l, X, 64, 3, 1, 1)));
    X = resnet_block(l, X, 64, 2, true);
    X = resnet_block(l, X, 128, 2);
    X = resnet_block(l, X, 256, 2);
    X = resnet_block(l, X, 512, 2);
    return Linear(l, global_avg_pool2d(X), num_classes);
}

// Compute the lab's network: LeNet with max pooling.
Tensor lab_cnn(Layers &l, Tensor X, int num_classes = 10) {
    X = max_pool2d(relu(Conv2d(l, X, 20, 3)), 2, 2);
    X = max_pool2d(relu(Conv2d(l, X, 50, 5)), 2, 2);
    X = relu(Linear(l, reshape(X, {X.shape[0], -1}), 128));
    return Linear(l, X, num_classes);
}

typedef Tensor (*Forward)(Layers &l, Tensor X, int num_classes);

// Make the parameters of a network in a forward pass over one image of zeros.
static void init_layers(Forward forward, const Init &init) {
    params.clear();
    param_names.clear();
    buffers.clear();
    buffer_names.clear();
    reset_buffers();
    Layers made = {nullptr, init};
    NoGrad guard;
    forward(made, full({1, 1, 28, 28}, 0, gpu(0)), 10);
    waitall(); // INIT overwrites what is being copied
}
static void init_resnet18() {
    init_layers(resnet18, [](std::vector<int> shape) { return normal(0.01f, shape); });
}
static void init_lab_cnn() {
    init_layers(lab_cnn, [](std::vector<int> shape) { return uniform(-0.07f, 0.07f, shape); });
}
static Tensor resnet18_net(const Tensor &X, const std::vector<Tensor> &params) {
    Layers given = {&params};
    return resnet18(given, X, 10);
}
static Tensor lab_cnn_net(const Tensor &X, const std::vector<Tensor> &params) {
    Layers given = {&params};
    return lab_cnn(given, X);
}

// ---------------------------------------------------------------------------------------------
// 3. Training
// As in mgpu.cu, but the test accuracy is computed on all devices, as both texts do it.

bool evaluates_all() { return option("EVALUATE_ALL") || experiment.name != "lenet"; }

// Return the test accuracy, computed on all devices. Each sample counts once.
float evaluate_accuracy_gpus(const PerDevice &device_params, DataIter &test_iter,
                             const std::vector<Device> &devices) {
    NoGrad guard;
    double correct = 0;
    for (auto [X, y] : test_iter.epoch()) {
        auto [X_shards, y_shards] = split_batch(X, y, devices);
        std::vector<Tensor> y_hats;
        for (size_t c = 0; c < devices.size(); c++) {
            y_hats.push_back(net(X_shards[c], device_params[c]));
        }
        for (size_t c = 0; c < devices.size(); c++) { // the host waits here
            correct += count_correct(y_hats[c], y_shards[c]);
        }
    }
    return correct / test_iter.X.shape[0];
}

// Print a row for an epoch as the lab prints it.
static void print_lab_row(int epoch, double, float acc, double seconds) {
    printf("Epoch %d, training time = %.1f sec\n         validation accuracy = %.4f\n", epoch - 1,
           seconds, acc);
}

// Train on num_gpus devices. batch_size counts the samples over all devices.
void train_concise(int num_gpus, int batch_size, float lr) {
    auto [train_iter, test_iter] = load_data_fashion_mnist(batch_size);
    const std::vector<Device> devices = first_devices(num_gpus);
    PerDevice device_params = replicate(devices);
    Animator animator = {train_iter.X.shape[0]};
    Timer timer;
    check_first_minibatch(train_iter, devices, lr);
    reset_buffers(); // which the check has updated
    for (int epoch = 0; epoch < option("EPOCHS"); epoch++) {
        timer.start();
        for (auto [X, y] : train_iter.epoch()) {
            std::vector<Tensor> losses = train_batch(X, y, device_params, devices, lr);
            waitall();
            animator.add_losses(losses);
        }
        timer.stop();
        check_replicas(device_params);
        const float acc = evaluate_accuracy_gpus(device_params, test_iter, devices);
        animator.add(epoch + 1, acc, timer.times.back());
        if (after_epoch) after_epoch(animator, device_params[0]);
    }
    printf("test acc: %.2f, %.1f sec/epoch on %s\n", animator.Y.back(), timer.avg(),
           str(devices).c_str());
}

// ---------------------------------------------------------------------------------------------
// 4. Examples

static void print_outputs(const std::vector<Tensor> &shards, const PerDevice &device_params) {
    NoGrad guard;
    for (size_t c = 0; c < shards.size(); c++) {
        printf("%s\n", to_string(net(shards[c], device_params[c])).c_str());
    }
}

// Write channel 0 of the first convolution's weight, or of its gradient.
static std::string channel0(const Tensor &weight) {
    return to_string(reshape(rows(weight, 0, 1), {1, weight.shape[2], weight.shape[3]}));
}

// Run the concise chapter's examples: copy the parameters to all devices, print the outputs for
// some images, and some of the first weights.
void demos_resnet18(int num_gpus) {
    const std::vector<Device> devices = first_devices(num_gpus);
    const auto device_params = replicate(devices); // net.initialize(ctx=devices)
    std::mt19937 dice(option("SEED"));
    const int n = std::max(4, num_gpus);
    const Tensor x = uniform(0, 1, {n, 1, 28, 28}, dice);
    print_outputs(split_and_load(x, devices), device_params);
    if (device_params[0][0].device.id >= 0) printf("not initialized on cpu\n"); // weight.data()
    for (const auto &params : device_params) {
        printf("%s\n", channel0(params[0]).c_str());
    }
}

// Run the lab's examples: print the outputs for two images per device, some of the first weights,
// which are equal on all devices, and their gradients, which are not.
void demos_lab_cnn(int num_gpus) {
    const std::vector<Device> devices = first_devices(num_gpus);
    const auto device_params = replicate(devices);
    auto [X, y] = load_data_fashion_mnist(2 * num_gpus).first.minibatch(0);
    auto [data, label] = split_batch(X, y, devices);
    print_outputs(data, device_params);
    for (size_t c = 0; c < devices.size(); c++) {
        printf("=== channel 0 of the first conv on %s ===\n%s\n", str(devices[c]).c_str(),
               channel0(device_params[c][0]).c_str());
    }
    for (size_t c = 0; c < devices.size(); c++) {
        backward(loss(net(data[c], device_params[c]), label[c]));
        printf("=== grad of channel 0 of the first conv2d on %s ===\n%s\n", str(devices[c]).c_str(),
               channel0(gradient(device_params[c][0])).c_str());
    }
    printf("Running on %s\nBatch size is %d\n", str(devices).c_str(), (int)option("BATCH"));
}

// ---------------------------------------------------------------------------------------------
// 5. Options

// What MODEL can choose: a network, its experiment, and the options of its text.
struct Model {
    std::function<Tensor(const Tensor &X, const std::vector<Tensor> &params)> net;
    Experiment experiment;
    int batch; // for each device
    float lr;  // on one device
    bool same_lr;
    int epochs;
    const char *kvstore; // its KVSTORE; empty: mgpu.cu's ALLREDUCE
};
std::vector<Model> models = {
    {net, chapter, 0, 0.2f, true, 10, ""},
    {resnet18_net,
     {"resnet18", init_resnet18, demos_resnet18, train_concise},
     256,
     0.1f,
     false,
     10,
     ""},
    {lab_cnn_net,
     {"lab_cnn", init_lab_cnn, demos_lab_cnn, train_concise},
     64,
     0.3f,
     true,
     5,
     "local"},
};

// Select a network. Options that are not on the command line get the values of its text.
void choose_model(const std::string &name) {
    const int k = option("GPUS");
    std::string names;
    for (const Model &m : models) {
        names += (names.empty() ? "" : ", ") + m.experiment.name;
        if (m.experiment.name != name) continue;
        net = m.net;
        experiment = m.experiment;
        print_epoch = m.experiment.name == "lab_cnn" ? print_lab_row : plain_print_row;
        if (option("EVALUATE_ALL")) experiment.train = train_concise;
        char lr[20];
        snprintf(lr, sizeof lr, "%.9g", m.same_lr ? m.lr : m.lr * k); // which tell a float's bits
        find_option("LR").preset = lr;
        find_option("BATCH").preset = std::to_string(m.batch ? m.batch * k : 256);
        find_option("EPOCHS").preset = std::to_string(m.epochs);
        return;
    }
    error("MODEL=%s is unknown: choose one of %s", name.c_str(), names.c_str());
}

static bool has_local() {
    auto is_local = [](const Algorithm &a) { return a.name == std::string("local"); };
    return std::any_of(algorithms.begin(), algorithms.end(), is_local);
}

// KVSTORE is the lab's name for ALLREDUCE: local or device. lab_cnn's default is local.
void choose_allreduce() {
    if (given("KVSTORE") && given("ALLREDUCE")) {
        error("KVSTORE and ALLREDUCE cannot both be given: one is enough");
    }
    const char *usual = experiment.name == "lab_cnn" && has_local() ? "local" : "naive";
    find_option("ALLREDUCE").preset = given("KVSTORE") ? option_text("KVSTORE") : usual;
}

// Add the lab's names for two algorithms of extras/algorithms/, if these are there.
static void add_alias(const char *alias, const std::string &name) {
    for (const Algorithm &a : std::vector<Algorithm>(algorithms)) {
        if (a.name == name) algorithms.push_back({alias, a.run});
    }
}

static const std::vector<Option> network_options = {
    {"MODEL", "text", "lenet", "network: lenet, resnet18, lab_cnn"},
    {"KVSTORE", "text", "local", "the lab's name for ALLREDUCE: local or device"},
    {"EVALUATE_ALL", "whole number", "0", "1: test on all devices, not on gpu(0) alone", 0, 1},
};
static const bool networks_added = [] {
    add_alias("local", "host");
    add_alias("device", "by_tensor");
    option_table.insert(option_table.end(), network_options.begin(), network_options.end());
    after_options.push_back([] {
        choose_model(option_text("MODEL"));
        choose_allreduce();
    });
    return true;
}();
