#!/bin/bash
# The gradient of MLX's transposed convolution with respect to its input is too short if
# output_padding is larger than padding, as with kernel_size=2, stride=2, output_padding=1, which
# turns n positions into 2n + 1. The part of the last position is missing, so the gradient does not
# have the input's shape. If a bias was added before, its gradient is the sum without that part, and
# nothing tells you so. With two positions, the gradient of a factor is wrong as well, because the
# one element that is left is broadcast. With more positions, most layers raise an error about
# shapes that cannot be broadcast. The documentation says only that output_padding is an additional
# size on one side. If padding is 0, leave output_padding out and append zeros with mx.pad.
#
# The slope is loss(x + 1) - loss(x), of one element after the other or of the bias or the factor.
# The loss is linear, so the gradient has to be equal to it. Seen on Linux, x86-64, with Python
# 3.11, on the CPU device of mlx 0.32.4:
#
#     2 positions: slopes 21 43, gradient 21
#     2 positions, of a bias: slope 64, gradient 21
#     2 positions, of a factor: slope 107, gradient 63
#     3 positions: slopes 21 43 65, gradient 21 43
#     3 positions, of a bias: slope 129, gradient 64
#     3 positions, of a factor: slope 302, ValueError
#     3 positions, mx.pad: slopes 21 43 65, gradient 21 43 65
#     3 positions, mx.pad, of a bias: slope 129, gradient 129
#     3 positions, mx.pad, of a factor: slope 302, gradient 302
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-deps \
    --target "$folder/packages" mlx==0.32.4 mlx-cpu==0.32.4
export PYTHONPATH=$folder/packages

cat >"$folder/gradient.py" <<'END'
import mlx.core as mx
from mlx import nn

mx.set_default_device(mx.cpu)


def make_loss(use_mx_pad):
    layer = nn.ConvTranspose1d(
        1, 1, kernel_size=2, stride=2, output_padding=0 if use_mx_pad else 1, bias=False
    )
    layer.weight = mx.array([1.0, 10.0]).reshape(1, 2, 1)

    def loss(x):
        y = layer(x)
        if use_mx_pad:
            y = mx.pad(y, ((0, 0), (0, 1), (0, 0)))
        return (y.reshape(-1) * mx.arange(1.0, y.size + 1)).sum()

    return loss


def numbers(x):
    return " ".join(f"{number:g}" for number in mx.array(x).reshape(-1).tolist())


for n, use_mx_pad in (2, False), (3, False), (3, True):
    name = f"{n} positions" + (", mx.pad" if use_mx_pad else "")
    loss = make_loss(use_mx_pad)
    x = mx.arange(1.0, n + 1).reshape(1, n, 1)
    ones = mx.eye(n).reshape(n, 1, n, 1)
    slopes = [(loss(x + one) - loss(x)).item() for one in ones]
    print(f"{name}: slopes {numbers(slopes)}, gradient {numbers(mx.grad(loss)(x))}")
    for parameter, function, value in [
        ("bias", lambda b: loss(x + b), mx.array(0.0)),
        ("factor", lambda a: loss(a * x), mx.array(1.0)),
    ]:
        line = f"{name}, of a {parameter}: slope {numbers(function(value + 1) - function(value))}"
        try:
            print(f"{line}, gradient {numbers(mx.grad(function)(value))}")
        except ValueError:
            print(f"{line}, ValueError")
END
python3 "$folder/gradient.py" >"$folder/seen"
cat "$folder/seen"

# The comment above is what to expect.
sed -n 's/^#     //p' "$0" | diff - "$folder/seen" || { echo 'not as stated'; exit 1; }
echo 'as stated'
