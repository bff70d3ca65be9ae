#!/bin/bash
# idx2numpy reads an IDX file of 16-bit or 32-bit numbers into an array of the file's byte order, which
# is big-endian, but writes arrays of the machine's own order only. So on a little-endian machine it
# refuses to write the very array that it has just read, or a part of it: "numpy ndarray type not
# supported by IDX format". Files of bytes, such as MNIST's, are not affected. QMNIST's labels, which
# are 32-bit numbers, are. Write x.astype(x.dtype.newbyteorder("=")).
#
# Seen on Linux, x86-64, with Python 3.11:
#
#     numpy 2.4.6, idx2numpy 1.2.3
#     uint8: read as uint8, written
#     int16: read as >i2, FormatError: numpy ndarray type not supported by IDX format.
#     int32: read as >i4, FormatError: numpy ndarray type not supported by IDX format.
#     float32: read as >f4, FormatError: numpy ndarray type not supported by IDX format.
#     float32 in the machine's order: the same bytes as the file
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-deps \
    --target "$folder/packages" numpy==2.4.6 idx2numpy==1.2.3 six==1.17.0

cat >"$folder/read.py" <<'END'
import importlib.metadata

import idx2numpy
import numpy

print(f"numpy {numpy.__version__}, idx2numpy {importlib.metadata.version('idx2numpy')}")
for name in "uint8", "int16", "int32", "float32":
    file = idx2numpy.convert_to_string(numpy.arange(6).reshape(2, 3).astype(name))
    x = idx2numpy.convert_from_string(file)
    try:
        idx2numpy.convert_to_string(x)
        print(f"{name}: read as {x.dtype}, written")
    except idx2numpy.FormatError as e:
        print(f"{name}: read as {x.dtype}, FormatError: {e}")
again = idx2numpy.convert_to_string(x.astype(x.dtype.newbyteorder("=")))
print(f"{name} in the machine's order: {'the same bytes as the file' if again == file else again}")
END
PYTHONPATH="$folder/packages" python3 "$folder/read.py" >"$folder/seen"
cat "$folder/seen"

# The comment above is what to expect.
sed -n 's/^#     //p' "$0" | diff - "$folder/seen" || { echo 'not as stated'; exit 1; }
echo 'as stated'
