#!/bin/bash
# tinygrad sums halves in float32, and its documentation says that sum(dtype=...) sets the data type
# of the accumulation. But if the batch is split over two devices, the sum of each device is rounded
# to a half before the allreduce, even if you ask for float32 or convert x to float first, because
# tinygrad cannot tell the sum of x.float() from its own way to sum halves. So a loss that is right
# on one device is wrong in the fourth digit on two, or infinite if the sum exceeds 65504, although
# its dtype is float. Write x.float().contiguous(), or set the environment variable ALLREDUCE_CAST
# to 0.
#
# Seen on Linux, x86-64, with Python 3.11, numpy 2.4.6 and tinygrad 0.14.0, on one and on two of its
# PYTHON devices, which need no compiler. Its CPU devices do the same.
#
#     x = [2048, 1, 2048, 1]
#     x.float().sum() = 4098 and 4096
#     x.sum(dtype='float32') = 4098 and 4096
#     x.float().mean() = 1024.5 and 1024
#     x.float().contiguous().sum() = 4098 and 4098
#     x = [20000, 20000, 20000, 20000]
#     x.float().sum() = 80000 and inf
#     x.sum(dtype='float32') = 80000 and inf
#     x.float().mean() = 20000 and inf
#     x.float().contiguous().sum() = 80000 and 80000
#     with ALLREDUCE_CAST=0
#     x = [2048, 1, 2048, 1]
#     x.float().sum() = 4098 and 4098
#     x = [20000, 20000, 20000, 20000]
#     x.float().sum() = 80000 and 80000
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-deps \
    --target "$folder/packages" numpy==2.4.6 tinygrad==0.14.0
export PYTHONPATH=$folder/packages DEV=PYTHON CACHEDB=$folder/cache.db

cat >"$folder/sums.py" <<'END'
import sys

import numpy
from tinygrad import Tensor

for numbers in [2048, 1, 2048, 1], [20000] * 4:
    print("x =", numbers)
    one = Tensor(numpy.array(numbers, numpy.float16))
    two = one.shard(("PYTHON:0", "PYTHON:1"), axis=0)
    for expression in sys.argv[1:]:
        a, b = (eval(expression, {"x": x}).numpy() for x in (one, two))
        print(f"{expression} = {a:g} and {b:g}")
END
{
    env -u ALLREDUCE_CAST python3 "$folder/sums.py" 'x.float().sum()' "x.sum(dtype='float32')" \
        'x.float().mean()' 'x.float().contiguous().sum()'
    echo 'with ALLREDUCE_CAST=0'
    ALLREDUCE_CAST=0 python3 "$folder/sums.py" 'x.float().sum()'
} >"$folder/seen"
cat "$folder/seen"

# The comment above is what to expect.
sed -n 's/^#     //p' "$0" | diff - "$folder/seen" || { echo 'not as stated'; exit 1; }
echo 'as stated'
