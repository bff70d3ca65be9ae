#!/bin/bash
# numba-cuda multiplies integers exactly for x ** 2, but then converts the product to double and
# back. So a square beyond 2 ** 53 loses its last bits on a GPU, although x * x keeps them, and even
# x ** 1 may differ from x. No test on a CPU shows this: numba's own compiler, which had the same
# mistake with Python 3.11, was repaired, and numba-cuda's simulator uses NumPy's arithmetic. Every
# such power also costs two conversions, which most consumer GPUs do slowly. Write x * x for an
# index or a hash.
#
# The compiled kernels need no GPU here: of their PTX, this prints the instructions that multiply or
# convert. There, x is an int64 unless another type is named. Seen on Linux, x86-64, with Python
# 3.11, numpy 2.4.6, numba 0.68.1, numba-cuda 0.30.4 and nvidia-nvvm 13.0.88:
#
#     numba, x = 94906267: x * x = 9007199515875289, x ** 2 = 9007199515875289
#     converted to double and back: 9007199515875288
#     numba-cuda, x * x: mul.lo.s64
#     numba-cuda, x ** 2: mul.lo.s64 cvt.rn.f64.s64 cvt.rzi.s64.f64
#     numba-cuda, pow(x, 2): mul.lo.s64 cvt.rn.f64.s64 cvt.rzi.s64.f64
#     numba-cuda, x ** 1: cvt.rn.f64.s64 cvt.rzi.s64.f64
#     numba-cuda, x ** 2 of an int32: mul.wide.s32 cvt.rn.f64.s64 cvt.rzi.s64.f64
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# (pip's --target would not do: from there, Python takes numba's own, older numba.cuda)
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-deps numpy==2.4.6 \
    numba==0.68.1 llvmlite==0.50.0 numba-cuda==0.30.4 cuda-bindings==13.5.0 cuda-core==1.2.2 \
    cuda-pathfinder==1.9.1 packaging==26.4 nvidia-nvvm==13.0.88

cat >"$folder/power.py" <<'END'
import re

import numba
from numba import cuda, types


def product(x, y):
    y[0] = x[0] * x[0]


def square(x, y):
    y[0] = x[0] ** 2


def square_by_pow(x, y):
    y[0] = pow(x[0], 2)


def itself(x, y):
    y[0] = x[0] ** 1


x = 94906267
exact, power = numba.njit(lambda x: x * x)(x), numba.njit(lambda x: x ** 2)(x)
print(f"numba, x = {x}: x * x = {exact}, x ** 2 = {power}")
print(f"converted to double and back: {int(float(exact))}")
for name, kernel, type in [
    ("x * x", product, types.int64),
    ("x ** 2", square, types.int64),
    ("pow(x, 2)", square_by_pow, types.int64),
    ("x ** 1", itself, types.int64),
    ("x ** 2 of an int32", square, types.int32),
]:
    ptx, _ = cuda.compile_ptx(kernel, types.void(type[::1], types.int64[::1]), cc=(8, 0))
    instructions = re.findall(r"^\t((?:mul|cvt)\.\S+)", ptx, re.MULTILINE)
    print(f"numba-cuda, {name}: {' '.join(instructions)}")
END
"$folder/venv/bin/python" "$folder/power.py" >"$folder/seen"
cat "$folder/seen"

# The comment above is what to expect.
sed -n 's/^#     //p' "$0" | diff - "$folder/seen" || { echo 'not as stated'; exit 1; }
echo 'as stated'
