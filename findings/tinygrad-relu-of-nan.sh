#!/bin/bash
# tinygrad's relu returns 0 for a NaN, as do its relu6, elu and hardsigmoid, although PyTorch's relu
# and numpy.maximum return NaN. So an image of NaN, or a layer whose weights have become NaN, does
# not make the loss NaN. It makes it that of a network that has learnt nothing, and who watches the
# loss for NaN sees none. If all scores are NaN, argmax returns the number of classes, which is no
# class. Look for NaN in the images and the weights instead: x.isnan().any().
#
# The network below has two layers of weights and takes three images. Seen on Linux, x86-64, with
# Python 3.11, numpy 2.4.6 and tinygrad 0.14.0, on its PYTHON device, which needs no compiler. Its
# CPU device does the same.
#
#     relu of [nan, -1, 1]: [0, 0, 1], numpy.maximum: [nan, 0, 1]
#     relu6, elu and hardsigmoid of nan: 0 0 0, leaky_relu, gelu and sigmoid: nan nan nan
#     the network: loss 2.422211
#     its images are NaN: loss 2.302585
#     its first weights are NaN: loss 2.302585
#     its last weights are NaN: loss nan, argmax [10, 10, 10]
#     its weights are 0: loss 2.302585
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-deps \
    --target "$folder/packages" numpy==2.4.6 tinygrad==0.14.0
export PYTHONPATH=$folder/packages DEV=PYTHON CACHEDB=$folder/cache.db

cat >"$folder/nan.py" <<'END'
import numpy
from tinygrad import Tensor


def numbers(x):
    return "[" + ", ".join(f"{number:g}" for number in x) + "]"


def names(*functions):
    return " ".join(f"{getattr(Tensor([numpy.nan]), f)().numpy()[0]:g}" for f in functions)


x = numpy.array([numpy.nan, -1, 1], numpy.float32)
relu, maximum = numbers(Tensor(x).relu().numpy()), numbers(numpy.maximum(x, 0))
print(f"relu of {numbers(x)}: {relu}, numpy.maximum: {maximum}")
zeros, nans = names("relu6", "elu", "hardsigmoid"), names("leaky_relu", "gelu", "sigmoid")
print(f"relu6, elu and hardsigmoid of nan: {zeros}, leaky_relu, gelu and sigmoid: {nans}")

images = numpy.arange(12, dtype=numpy.float32).reshape(3, 4) / 12
W1 = numpy.full((4, 8), 0.1, numpy.float32)
W2 = numpy.linspace(-1, 1, 80, dtype=numpy.float32).reshape(8, 10)
for name, arrays in {
    "the network": (images, W1, W2),
    "its images are NaN": (images * numpy.nan, W1, W2),
    "its first weights are NaN": (images, W1 * numpy.nan, W2),
    "its last weights are NaN": (images, W1, W2 * numpy.nan),
    "its weights are 0": (images, W1 * 0, W2 * 0),
}.items():
    X, first, last = (Tensor(array) for array in arrays)
    scores = (X @ first).relu() @ last
    loss = scores.cross_entropy(Tensor([0, 1, 2])).numpy()
    classes = f", argmax {scores.argmax(1).numpy().tolist()}" if numpy.isnan(loss) else ""
    print(f"{name}: loss {loss:.7g}{classes}")
END
python3 "$folder/nan.py" >"$folder/seen"
cat "$folder/seen"

# The comment above is what to expect.
sed -n 's/^#     //p' "$0" | diff - "$folder/seen" || { echo 'not as stated'; exit 1; }
echo 'as stated'
