#!/bin/bash
# On a CPU, Paddle's softmax takes a score that is more than 64 below the largest one for one that
# is 64 below it. So the loss of a network that is sure of the wrong class is 64, however sure it
# is, and when training diverges, the loss looks as if it levelled off. Its gradient is that of the
# right loss, so it does not agree with the numbers. A score of minus infinity, which is meant to
# exclude a class, gets a probability above 0, and log_softmax returns -64. float64 is cut off, too.
# No error is raised. The documentation of softmax and log_softmax shows the plain formulas.
# Paddle's issue 20994 saw losses of 64 in 2019. Compute the loss with logsumexp, which is right.
#
# There are two classes, and the first one's score is 0. The label is the second one, so its score s
# makes a loss of log(1 + exp(-s)). The gradient is with respect to s. Seen on Linux, x86-64, with
# Python 3.11, numpy 2.4.6 and paddlepaddle 3.3.1:
#
#     float32, s = -60: cross_entropy 60, gradient -1, of logsumexp 60
#     float32, s = -70: cross_entropy 64, gradient -1, of logsumexp 70
#     float32, s = -1000: cross_entropy 64, gradient -1, of logsumexp 1000
#     float64, s = -60: cross_entropy 60, gradient -1, of logsumexp 60
#     float64, s = -70: cross_entropy 64, gradient -1, of logsumexp 70
#     float64, s = -1000: cross_entropy 64, gradient -1, of logsumexp 1000
#     s = -inf: softmax 1.60381e-28, log_softmax -64
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-deps \
    --target "$folder/packages" numpy==2.4.6 paddlepaddle==3.3.1 networkx==3.6.1 \
    opt-einsum==3.3.0 protobuf==7.36.2 safetensors==0.8.0 typing_extensions==4.16.0 \
    pillow==13.0.0 httpx==0.28.1 httpcore==1.0.9 h11==0.16.0 anyio==4.16.0 idna==3.20 \
    certifi==2026.10.19.post1
export PYTHONPATH=$folder/packages

cat >"$folder/loss.py" <<'END'
import paddle
from paddle.nn import functional

label = paddle.to_tensor([1])
for dtype in "float32", "float64":
    for score in -60.0, -70.0, -1000.0:
        x = paddle.to_tensor([[0.0, score]], dtype=dtype)
        x.stop_gradient = False
        loss = functional.cross_entropy(x, label)
        loss.backward()
        right = paddle.logsumexp(x) - x[0, 1]
        print(
            f"{dtype}, s = {score:g}: cross_entropy {loss.item():g}, "
            f"gradient {x.grad[0, 1].item():g}, of logsumexp {right.item():g}"
        )

x = paddle.to_tensor([[0.0, float("-inf")]])
print(f"s = -inf: softmax {functional.softmax(x)[0, 1].item():g}, ", end="")
print(f"log_softmax {functional.log_softmax(x)[0, 1].item():g}")
END
python3 "$folder/loss.py" >"$folder/seen"
cat "$folder/seen"

# The comment above is what to expect.
sed -n 's/^#     //p' "$0" | diff - "$folder/seen" || { echo 'not as stated'; exit 1; }
echo 'as stated'
