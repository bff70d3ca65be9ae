#!/bin/bash
# On a CPU, Paddle's sqrt of float32 numbers takes eight at a time, and the square root of infinity
# among these is NaN. That of the rest, at most seven, is infinity, as it should be. So a result
# depends on the position of the number. In the same way, the root of a number too small to be
# normal is 0. rsqrt and pow are right, and so is float64. The optimizers Adagrad and RMSProp divide
# by such a root. If a gradient's square overflows, a weight among the eight becomes NaN, and one of
# the rest stays as it is. Adam leaves all of them as they are. The documentation says only that the
# result is the square root. Write x ** 0.5 if x may be infinite, and clip gradients.
#
# Each weight is 1, and its gradient is 1e20. Seen on Linux, x86-64, with Python 3.11, numpy 2.4.6
# and paddlepaddle 3.3.1:
#
#     sqrt of infinity: inf inf inf inf inf inf inf
#     sqrt of infinity, float64: inf inf inf inf inf inf inf
#     infinity ** 0.5: inf inf inf inf inf inf inf
#     sqrt of 1e-40: 1e-20 1e-20 1e-20 1e-20 1e-20 1e-20 1e-20
#     weights after Adagrad: 1 1 1 1 1 1 1
#     weights after RMSProp: 1 1 1 1 1 1 1
#     weights after Adam: 1 1 1 1 1 1 1
#     sqrt of infinity: nan nan nan nan nan nan nan nan inf
#     sqrt of infinity, float64: inf inf inf inf inf inf inf inf inf
#     infinity ** 0.5: inf inf inf inf inf inf inf inf inf
#     sqrt of 1e-40: 0 0 0 0 0 0 0 0 1e-20
#     weights after Adagrad: nan nan nan nan nan nan nan nan 1
#     weights after RMSProp: nan nan nan nan nan nan nan nan 1
#     weights after Adam: 1 1 1 1 1 1 1 1 1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-deps \
    --target "$folder/packages" numpy==2.4.6 paddlepaddle==3.3.1 networkx==3.6.1 \
    opt-einsum==3.3.0 protobuf==7.36.2 safetensors==0.8.0 typing_extensions==4.16.0 \
    pillow==13.0.0 httpx==0.28.1 httpcore==1.0.9 h11==0.16.0 anyio==4.16.0 idna==3.20 \
    certifi==2026.10.19.post1
export PYTHONPATH=$folder/packages

cat >"$folder/roots.py" <<'END'
import paddle


def show(name, x):
    print(f"{name}: " + " ".join(f"{number:.3g}" for number in x.tolist()))


def train(optimizer, n):
    one = paddle.nn.initializer.Constant(1.0)
    weights = paddle.create_parameter([n], "float32", default_initializer=one)
    (weights * 1e20).sum().backward()
    optimizer(learning_rate=0.1, parameters=[weights]).step()
    return weights


for n in 7, 9:
    x = paddle.full([n], float("inf"))
    show("sqrt of infinity", x.sqrt())
    show("sqrt of infinity, float64", x.astype("float64").sqrt())
    show("infinity ** 0.5", x**0.5)
    show("sqrt of 1e-40", paddle.full([n], 1e-40).sqrt())
    for optimizer in paddle.optimizer.Adagrad, paddle.optimizer.RMSProp, paddle.optimizer.Adam:
        show(f"weights after {optimizer.__name__}", train(optimizer, n))
END
python3 "$folder/roots.py" >"$folder/seen"
cat "$folder/seen"

# The comment above is what to expect.
sed -n 's/^#     //p' "$0" | diff - "$folder/seen" || { echo 'not as stated'; exit 1; }
echo 'as stated'
