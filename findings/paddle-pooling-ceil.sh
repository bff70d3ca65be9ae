#!/bin/bash
# With ceil_mode=True, Paddle rounds the number of windows up without looking at where the last one
# begins. If it begins behind the image, no element of the image is in it, and what it yields is
# -3.4e38 for max pooling and NaN or -0 for average pooling. So the mean of the pooled numbers is
# lost, and nothing tells you so. It takes no odd layer: an image of 7 x 7, which is what two
# poolings leave of an MNIST digit, with kernel_size=2, stride=2 and padding=1 is enough. PyTorch
# and ONNX Runtime leave such a window out, so a converted model gets more features. The
# documentation says only that ceil computes the output's shape. Leave ceil_mode out, and pad the
# image.
#
# The image is the numbers from 1 to its width. Seen on Linux, x86-64, with Python 3.11, numpy 2.4.6
# and paddlepaddle 3.3.1:
#
#     width 7, kernel_size 2, stride 2, padding 1
#         max, ceil_mode False: 1 3 5 7
#         average, ceil_mode False: 1 2.5 4.5 6.5
#         max, ceil_mode True: 1 3 5 7 -3.4e+38
#         average, ceil_mode True: 1 2.5 4.5 6.5 nan
#     width 8, kernel_size 1, stride 2, padding 0
#         max, ceil_mode False: 1 3 5 7
#         average, ceil_mode False: 1 3 5 7
#         max, ceil_mode True: 1 3 5 7 -3.4e+38
#         average, ceil_mode True: 1 3 5 7 nan
#     width 7, kernel_size 2, stride 4, padding 0
#         max, ceil_mode False: 2 6
#         average, ceil_mode False: 1.5 5.5
#         max, ceil_mode True: 2 6 -3.4e+38
#         average, ceil_mode True: 1.5 5.5 -0
#     7 x 7, kernel_size 2, stride 2, padding 1, ceil_mode True
#         mean of the maxima: -inf
#         mean of the averages: nan
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-deps \
    --target "$folder/packages" numpy==2.4.6 paddlepaddle==3.3.1 networkx==3.6.1 \
    opt-einsum==3.3.0 protobuf==7.36.2 safetensors==0.8.0 typing_extensions==4.16.0 \
    pillow==13.0.0 httpx==0.28.1 httpcore==1.0.9 h11==0.16.0 anyio==4.16.0 idna==3.20 \
    certifi==2026.10.19.post1
export PYTHONPATH=$folder/packages

cat >"$folder/pooling.py" <<'END'
import paddle
from paddle.nn import functional


def show(name, x):
    print(f"    {name}: " + " ".join(f"{number:.3g}" for number in x.flatten().tolist()))


for width, kernel_size, stride, padding in (7, 2, 2, 1), (8, 1, 2, 0), (7, 2, 4, 0):
    print(f"width {width}, kernel_size {kernel_size}, stride {stride}, padding {padding}")
    x = paddle.arange(1, width + 1, dtype="float32").reshape([1, 1, width])
    for ceil_mode in False, True:
        pooling = dict(
            kernel_size=kernel_size, stride=stride, padding=padding, ceil_mode=ceil_mode
        )
        show(f"max, ceil_mode {ceil_mode}", functional.max_pool1d(x, **pooling))
        show(f"average, ceil_mode {ceil_mode}", functional.avg_pool1d(x, **pooling))
square = paddle.arange(49, dtype="float32").reshape([1, 1, 7, 7])
pooling = dict(kernel_size=2, stride=2, padding=1, ceil_mode=True)
print("7 x 7, kernel_size 2, stride 2, padding 1, ceil_mode True")
show("mean of the maxima", functional.max_pool2d(square, **pooling).mean())
show("mean of the averages", functional.avg_pool2d(square, **pooling).mean())
END
python3 "$folder/pooling.py" >"$folder/seen"
cat "$folder/seen"

# The comment above is what to expect.
sed -n 's/^#     //p' "$0" | diff - "$folder/seen" || { echo 'not as stated'; exit 1; }
echo 'as stated'
