#!/bin/bash
# With PyTorch as its backend, Keras computes other averages than with JAX where padding="same"
# cannot pad both sides equally. Its average pooling is meant to leave the padding out of the
# average. But PyTorch's pads both sides equally or not at all, so Keras pads the input itself and
# repeats the outermost numbers, which then count twice or more. So the size of an image decides how
# its edges are averaged, and in two dimensions one of unequal padding changes the edges of both. A
# model that was trained with one backend gets other features from the other one, and nothing tells
# you so. The documentation says only that "same" pads evenly. Max pooling is not affected. Pad with
# zeros, pool with padding="valid", and divide by the same of an image of ones.
#
# The numbers are 12, 24, 36, ..., and the image is 3 x 4. Pooling 3 numbers with stride 2 pads
# unequally if their number is even, and pooling 4 with stride 1 always does. Seen on Linux, x86-64,
# with Python 3.11, numpy 2.4.6, keras 3.15.1, jax 0.10.2 and torch 2.15.0. The last one needs
# CUDA's libraries to start, 4 GB in all, but no GPU:
#
#     4 numbers, pooling 3 with stride 2: jax 24 42, torch 24 44
#     5 numbers, pooling 3 with stride 2: jax 18 36 54, torch 18 36 54
#     6 numbers, pooling 3 with stride 2: jax 24 48 66, torch 24 48 68
#     4 numbers, pooling 4 with stride 1: jax 24 30 36 42, torch 21 30 39 45
#     4 numbers, divided by pooled ones: jax 24 30 36 42, torch 24 30 36 42
#     first row of the image, pooling 3 x 1: jax 36 48 60 72, torch 36 48 60 72
#     first row of the image, pooling 3 x 2: jax 42 54 66 72, torch 34 46 58 64
set -euo pipefail
script=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-deps \
    --target "$folder/packages" keras==3.15.1 absl-py==2.5.1 h5py==3.16.0 markdown-it-py==4.3.0 \
    mdurl==0.1.2 ml_dtypes==0.6.0 namex==0.1.0 numpy==2.4.6 optree==0.20.0 packaging==26.4 \
    Pygments==2.21.0 rich==15.0.0 jax==0.10.2 jaxlib==0.10.2 opt_einsum==3.4.0 scipy==1.17.1 \
    torch==2.15.0 filelock==4.3.1 mpmath==1.3.0 networkx==3.6.1 sympy==1.14.0 \
    typing_extensions==4.16.0 nvidia-cublas==13.4.1.3 nvidia-cuda-cupti==13.2.86 \
    nvidia-cuda-nvrtc==13.2.86 nvidia-cuda-runtime==13.2.86 nvidia-cudnn-cu13==9.26.0.51 \
    nvidia-cufft==12.2.0.57 nvidia-cufile==1.17.1.22 nvidia-cusparse==12.7.10.12 \
    nvidia-cusparselt-cu13==0.8.1 nvidia-nccl-cu13==2.30.7 nvidia-nvjitlink==13.5.37 \
    nvidia-nvshmem-cu13==3.7.2
export PYTHONPATH=$folder/packages JAX_PLATFORMS=cpu KERAS_HOME=$folder

cd "$folder"
cat >average.py <<'END'
import keras
from keras import layers, ops


def row(name, y):
    numbers = ops.convert_to_numpy(y).flatten()
    print(f"{name}: {keras.backend.backend()}", *[f"{number:g}" for number in numbers])


def average_of_padded(x):
    return layers.AveragePooling1D(4, 1, "valid")(ops.pad(x, ((0, 0), (1, 2), (0, 0))))


for size, pool_size, stride in (4, 3, 2), (5, 3, 2), (6, 3, 2), (4, 4, 1):
    x = ops.reshape(ops.arange(1.0, size + 1) * 12, (1, size, 1))
    y = layers.AveragePooling1D(pool_size, stride, "same")(x)
    row(f"{size} numbers, pooling {pool_size} with stride {stride}", y)
y = average_of_padded(x) / average_of_padded(ops.ones_like(x))
row("4 numbers, divided by pooled ones", y)
image = ops.reshape(ops.arange(1.0, 13) * 12, (1, 3, 4, 1))
for width in 1, 2:
    y = layers.AveragePooling2D((3, width), 1, "same")(image)
    row(f"first row of the image, pooling 3 x {width}", y[0, 0])
END
for backend in jax torch; do
    KERAS_BACKEND=$backend python3 average.py >$backend 2>log || { cat log; exit 1; }
done
sed 's/.*: //' torch | paste -d, jax - | sed 's/,torch/, torch/' >seen
cat seen

# The comment above is what to expect.
sed -n 's/^#     //p' "$script" | diff - seen || { echo 'not as stated'; exit 1; }
echo 'as stated'
