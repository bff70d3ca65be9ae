// The operators once more, in double, as plain loops: what the tests and make check compare with.
// defines: Doubles, Arrays, ConvSizes, PoolSizes, reference::relu, add, linear, conv2d, avg_pool2d,
// max_pool2d, softmax_cross_entropy, moments, normalize, batch_norm, lenet
//
// Each function gets the inputs of an operator and dy, the gradient with respect to its result y.
// It returns y, and then the gradient with respect to each input. (Without dy these are 0.)
#ifndef MGPU_REFERENCE // its translated copy may be included, too
#define MGPU_REFERENCE

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

typedef std::vector<double> Doubles;
typedef std::vector<Doubles> Arrays;

struct ConvSizes {
    int N, C, H, W, O, K, stride = 1, padding = 0;
    int OH() const { return (H + 2 * padding - K) / stride + 1; }
    int OW() const { return (W + 2 * padding - K) / stride + 1; }
};

struct PoolSizes {
    int N, C, H, W, K;
};

namespace reference {

// y[i] = max(X[i], 0)
inline Arrays relu(const Arrays &in, const Doubles &dy = {}) {
    const Doubles &X = in[0];
    Doubles y = X, dX(X.size());
    for (size_t i = 0; i < X.size(); i++) {
        if (X[i] < 0) y[i] = 0;
        if (X[i] > 0 && !dy.empty()) dX[i] = dy[i];
    }
    return {y, dX};
}

// y[i] = A[i] + B[i]
inline Arrays add(const Arrays &in, const Doubles &dy = {}) {
    Doubles y = in[0];
    for (size_t i = 0; i < y.size(); i++) y[i] += in[1][i];
    const Doubles both = dy.empty() ? Doubles(y.size()) : dy;
    return {y, both, both};
}

// y[n,o] = b[o] + sum over c of X[n,c] * W[c,o], of the inputs X, W and b
inline Arrays linear(const Arrays &in, const Doubles &dy = {}) {
    const Doubles &X = in[0], &W = in[1], &b = in[2];
    const int O = b.size(), C = W.size() / O, N = X.size() / C;
    Doubles y(N * O), dX(N * C), dW(C * O), db(O);
    for (int at = 0; at < N * O; at++) {
        const int o = at % O, n = at / O;
        y[at] = b[o];
        for (int c = 0; c < C; c++) y[at] += X[n * C + c] * W[c * O + o];
        if (dy.empty()) continue;
        db[o] += dy[at];
        for (int c = 0; c < C; c++) {
            dX[n * C + c] += dy[at] * W[c * O + o];
            dW[c * O + o] += dy[at] * X[n * C + c];
        }
    }
    return {y, dX, dW, db};
}

// y[n,o,i,j] = b[o] + sum over c,u,v of X[n,c,i*stride+u-padding,j*stride+v-padding] * W[o,c,u,v],
// of the inputs X, W and b. Beyond the border of an image X counts as 0.
inline Arrays conv2d(const ConvSizes &s, const Arrays &in, const Doubles &dy = {}) {
    const Doubles &X = in[0], &W = in[1], &b = in[2];
    const int OH = s.OH(), OW = s.OW();
    Doubles y(s.N * s.O * OH * OW), dX(X.size()), dW(W.size()), db(s.O);
    for (size_t at = 0; at < y.size(); at++) {
        const int j = at % OW, i = at / OW % OH, o = at / OW / OH % s.O, n = at / OW / OH / s.O;
        double sum = b[o];
        const double dy_at = dy.empty() ? 0 : dy[at];
        db[o] += dy_at;
        for (int c = 0; c < s.C; c++)
            for (int u = 0; u < s.K; u++) {
                const int row = i * s.stride + u - s.padding;
                if (row < 0 || row >= s.H) continue;
                for (int v = 0; v < s.K; v++) {
                    const int column = j * s.stride + v - s.padding;
                    if (column < 0 || column >= s.W) continue;
                    const int x = ((n * s.C + c) * s.H + row) * s.W + column;
                    const int w = ((o * s.C + c) * s.K + u) * s.K + v;
                    sum += X[x] * W[w];
                    dX[x] += dy_at * W[w];
                    dW[w] += dy_at * X[x];
                }
            }
        y[at] = sum;
    }
    return {y, dX, dW, db};
}

// y[n,c,i,j] = mean over u,v of X[n,c,i*K+u,j*K+v], or the largest of these numbers: the first one,
// if several are equal, gets the gradient
inline Arrays pool(bool max, const PoolSizes &s, const Arrays &in, const Doubles &dy) {
    const Doubles &X = in[0];
    const int OH = s.H / s.K, OW = s.W / s.K, window = s.K * s.K;
    Doubles y(s.N * s.C * OH * OW), dX(X.size());
    for (size_t at = 0; at < y.size(); at++) {
        const int j = at % OW, i = at / OW % OH, plane = at / OW / OH;
        const int corner = (plane * s.H + i * s.K) * s.W + j * s.K;
        int best = corner;
        for (int t = 0; t < window; t++) {
            const int x = corner + t / s.K * s.W + t % s.K;
            if (X[x] > X[best]) best = x;
            if (max) continue;
            y[at] += X[x] / window;
            if (!dy.empty()) dX[x] += dy[at] / window;
        }
        if (!max) continue;
        y[at] = X[best];
        if (!dy.empty()) dX[best] += dy[at];
    }
    return {y, dX};
}

inline Arrays avg_pool2d(const PoolSizes &s, const Arrays &in, const Doubles &dy = {}) {
    return pool(false, s, in, dy);
}

inline Arrays max_pool2d(const PoolSizes &s, const Arrays &in, const Doubles &dy = {}) {
    return pool(true, s, in, dy);
}

// l[n] = log(sum over j of exp(y_hat[n,j])) - y_hat[n,y[n]], of the inputs y_hat (N,classes) and y,
// class numbers. It has no gradient with respect to y.
inline Arrays softmax_cross_entropy(int classes, const Arrays &in, const Doubles &dl = {}) {
    const Doubles &y_hat = in[0], &y = in[1];
    Doubles l, dy_hat(y_hat.size());
    for (size_t n = 0; n < y.size(); n++) {
        const double *z = &y_hat[n * classes], largest = *std::max_element(z, z + classes);
        double sum = 0;
        for (int j = 0; j < classes; j++) sum += std::exp(z[j] - largest);
        l.push_back(std::log(sum) - (z[(int)y[n]] - largest));
        for (int j = 0; j < classes && !dl.empty(); j++) {
            dy_hat[n * classes + j] = dl[n] * (std::exp(z[j] - largest) / sum - (j == y[n]));
        }
    }
    return {l, dy_hat};
}

// The mean and the variance of each channel of X (N,C,pixels)
inline std::pair<Doubles, Doubles> moments(const Doubles &X, int C, int pixels) {
    Doubles mean(C), var(C);
    const double n = X.size() / C;
    auto channel = [=](size_t i) { return i / pixels % C; };
    for (size_t i = 0; i < X.size(); i++) mean[channel(i)] += X[i] / n;
    for (size_t i = 0; i < X.size(); i++)
        var[channel(i)] += std::pow(X[i] - mean[channel(i)], 2) / n;
    return {mean, var};
}

// (X - mean) / sqrt(var + 1e-5) * gamma + beta, of X (N,C,pixels)
inline Doubles normalize(Doubles X, const Doubles &gamma, const Doubles &beta, const Doubles &mean,
                         const Doubles &var, int pixels) {
    for (size_t i = 0; i < X.size(); i++) {
        const int c = i / pixels % gamma.size();
        X[i] = (X[i] - mean[c]) / std::sqrt(var[c] + 1e-5) * gamma[c] + beta[c];
    }
    return X;
}

// Batch norm in training, of the inputs X (N,C,pixels), gamma and beta
inline Arrays batch_norm(int pixels, const Arrays &in, const Doubles &dy = {}) {
    const Doubles &X = in[0], &gamma = in[1], &beta = in[2];
    const int C = gamma.size();
    const double n = X.size() / C;
    const auto [mean, var] = moments(X, C, pixels);
    const Doubles z = normalize(X, Doubles(C, 1), Doubles(C), mean, var, pixels);
    const Doubles y = normalize(X, gamma, beta, mean, var, pixels);
    Doubles dX(X.size()), dgamma(C), dbeta(C);
    for (size_t i = 0; i < dy.size(); i++) {
        const int c = i / pixels % C;
        dgamma[c] += dy[i] * z[i];
        dbeta[c] += dy[i];
    }
    for (size_t i = 0; i < dy.size(); i++) {
        const int c = i / pixels % C;
        dX[i] = gamma[c] / std::sqrt(var[c] + 1e-5) * (dy[i] - dbeta[c] / n - z[i] * dgamma[c] / n);
    }
    return {y, dX, dgamma, dbeta};
}

// LeNet with average pooling or with max pooling, of N images X and its eight parameters. It
// returns y_hat and the gradients with respect to the parameters.
inline Arrays lenet(bool max, int N, const Doubles &X, const Arrays &p,
                    const Doubles &dy_hat = {}) {
    const ConvSizes conv1 = {N, 1, 28, 28, 20, 3}, conv2 = {N, 20, 13, 13, 50, 5};
    const PoolSizes pool1 = {N, 20, 26, 26, 2}, pool2 = {N, 50, 9, 9, 2};
    const Arrays in1 = {X, p[0], p[1]};
    const Doubles h1_conv = conv2d(conv1, in1)[0], h1_activation = relu({h1_conv})[0];
    const Arrays in2 = {pool(max, pool1, {h1_activation}, {})[0], p[2], p[3]};
    const Doubles h2_conv = conv2d(conv2, in2)[0], h2_activation = relu({h2_conv})[0];
    const Arrays in3 = {pool(max, pool2, {h2_activation}, {})[0], p[4], p[5]};
    const Doubles h3_linear = linear(in3)[0];
    const Arrays in4 = {relu({h3_linear})[0], p[6], p[7]};

    const Arrays d4 = linear(in4, dy_hat);
    if (dy_hat.empty()) return {d4[0]};
    const Arrays d3 = linear(in3, relu({h3_linear}, d4[1])[1]);
    const Doubles dh2 = pool(max, pool2, {h2_activation}, d3[1])[1];
    const Arrays d2 = conv2d(conv2, in2, relu({h2_conv}, dh2)[1]);
    const Doubles dh1 = pool(max, pool1, {h1_activation}, d2[1])[1];
    const Arrays d1 = conv2d(conv1, in1, relu({h1_conv}, dh1)[1]);
    return {d4[0], d1[2], d1[3], d2[2], d2[3], d3[2], d3[3], d4[2], d4[3]};
}

} // namespace reference
#endif
