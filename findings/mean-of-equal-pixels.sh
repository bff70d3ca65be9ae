#!/bin/bash
# The mean of equal numbers is that number, but on a CPU mlx and warp add float32 numbers one by one
# to a float32. Once the sum is large, each addition is rounded, and here in the same direction. For
# 60000 images of 28 x 28 pixels that are all 73, about the mean of Fashion-MNIST, the mean is 45.65
# and mlx's standard deviation is 19 instead of 0, so images that are normalised by these are wrong.
# Nothing tells you so. mlx adds bytes exactly, and its mean of the same pixels in float16 is NaN.
# NumPy adds partial sums. Take the mean of the images' means, and in a kernel let each block add up
# a part.
#
# Seen on Linux, x86-64, with Python 3.11:
#
#     numpy 2.4.6: mean 73, standard deviation 0
#     mlx 0.32.4: mean 45.6523, standard deviation 19.1107
#     mlx 0.32.4: mean of the images' means 73
#     mlx 0.32.4: mean in uint8 73
#     mlx 0.32.4: mean in float16 nan
#     warp 1.19.0: sum / n 45.6523
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-deps \
    --target "$folder/packages" numpy==2.4.6 mlx==0.32.4 mlx-cpu==0.32.4 warp-lang==1.19.0
export PYTHONPATH=$folder/packages

cat >"$folder/means.py" <<'END'
import importlib.metadata
import sys

import mlx.core as mx
import numpy
import warp

images = numpy.full((60000, 28 * 28), 73, numpy.float32)
print(f"numpy {numpy.__version__}: mean {images.mean():g}, standard deviation {images.std():g}")

name = f"mlx {importlib.metadata.version('mlx')}"
x = mx.array(images)
print(f"{name}: mean {mx.mean(x).item():g}, standard deviation {mx.std(x).item():g}")
print(f"{name}: mean of the images' means {mx.mean(mx.mean(x, axis=1)).item():g}")
print(f"{name}: mean in uint8 {mx.mean(x.astype(mx.uint8)).item():g}")
print(f"{name}: mean in float16 {mx.mean(x.astype(mx.float16)).item():g}")

warp.config.kernel_cache_dir = sys.argv[1]
x = warp.array(images.reshape(-1), device="cpu")
print(f"warp {warp.config.version}: sum / n {warp.utils.array_sum(x) / images.size:g}")
END
# (without what warp prints when it starts)
python3 "$folder/means.py" "$folder/cache" | grep -E '^(numpy|mlx|warp) ' >"$folder/seen"
cat "$folder/seen"

# The comment above is what to expect.
sed -n 's/^#     //p' "$0" | diff - "$folder/seen" || { echo 'not as stated'; exit 1; }
echo 'as stated'
