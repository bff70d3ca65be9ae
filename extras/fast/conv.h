// The operators conv2d and linear. products.cu has what they compute.
// defines: conv2d, linear

namespace fast {
template <Rung wanted>
static Tensor conv(const char *op, const Tensor &X, const Tensor &W, const Tensor &b,
                   const std::vector<int> &y_shape, ConvShape s) {
    s.rung = s.K > most_taps ? tiled : wanted; // too many for a mask
    Tensor y = output({X, W, b}, y_shape);
    const auto V = std::make_shared<Tensor>(); // Winograd's windows, for the gradient of W
    const bool keep = recording && W.grad;
    const auto first = std::make_shared<bool>(y.grad != nullptr);
    launch(y, [=](Store y) {
        product_forward(y, X, W, b, s, keep ? V.get() : nullptr);
        if (std::exchange(*first, false)) leave_out(X);
    });
    return record(op, y, {X, W, b}, [=](const Tensor &) {
        const Tensor dy = dy_of(y);
        const Store dW = target_of(W), db = target_of(b), dX = target_of(X);
        product_backward(dX, dW, db, X, dy, W, s, *V);
    });
}
template <Rung rung>
static Tensor conv2d(const Tensor &X, const Tensor &W, const Tensor &b, const Sizes &s) {
    return conv<rung>("conv2d", X, W, b, {s.N, s.O, s.OH, s.OW}, {s, rung, 1, s.C * s.K * s.K});
}
template <Rung rung> static Tensor linear(const Tensor &X, const Tensor &W, const Tensor &b) {
    const int N = X.shape[0], C = X.shape[1], O = W.shape[1];
    return conv<rung>("linear", X, W, b, {N, O}, {{N, C, 1, 1, O, 1, 1, 0, 1, 1}, rung, O, 1});
}
} // namespace fast
