#!/bin/bash
# safetensors.numpy.save_file does not look at an array's strides. It writes the array's memory as it
# lies, with the array's shape, so a transposed array, one in Fortran's order or a slice with a step
# comes back with other numbers, without an error. The documentation says that tensors need to be
# contiguous, but only safetensors.torch refuses others. This is easily met, because PyTorch and most
# other programs store a dense layer's weights transposed to each other. Save a copy:
# numpy.ascontiguousarray(x).
#
# Seen on Linux, x86-64, with Python 3.11:
#
#     numpy 2.4.6, safetensors 0.8.0, x = [[0, 1, 2], [3, 4, 5]]
#     saved x.T: [[0, 3], [1, 4], [2, 5]], loaded: [[0, 1], [2, 3], [4, 5]]
#     saved numpy.asfortranarray(x): [[0, 1, 2], [3, 4, 5]], loaded: [[0, 3, 1], [4, 2, 5]]
#     saved x[:, ::2]: [[0, 2], [3, 5]], loaded: [[0, 1], [2, 3]]
#     saved numpy.ascontiguousarray(x.T): [[0, 3], [1, 4], [2, 5]], loaded: the same
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-deps \
    --target "$folder/packages" numpy==2.4.6 safetensors==0.8.0

cat >"$folder/save.py" <<'END'
import sys

import numpy
import safetensors
from safetensors.numpy import load_file, save_file

x = numpy.arange(6).reshape(2, 3)
print(f"numpy {numpy.__version__}, safetensors {safetensors.__version__}, x = {x.tolist()}")
for name in "x.T", "numpy.asfortranarray(x)", "x[:, ::2]", "numpy.ascontiguousarray(x.T)":
    saved = eval(name)
    save_file({"x": saved}, sys.argv[1])
    loaded = load_file(sys.argv[1])["x"].tolist()
    same = loaded == saved.tolist()
    print(f"saved {name}: {saved.tolist()}, loaded: {'the same' if same else loaded}")
END
PYTHONPATH="$folder/packages" python3 "$folder/save.py" "$folder/x.safetensors" >"$folder/seen"
cat "$folder/seen"

# The comment above is what to expect.
sed -n 's/^#     //p' "$0" | diff - "$folder/seen" || { echo 'not as stated'; exit 1; }
echo 'as stated'
