#!/bin/bash
# numba-cuda's simulator runs a kernel as Python on NumPy's scalars. So it computes in other types
# than the compiled kernel, although nothing is wrong with the kernel. To NumPy, a byte plus a byte
# is a byte and a float32 plus the literal 1 is a float32, but numba computes these in 64 bits and
# in double. popc is wrong for a negative number, and max keeps a NaN, which the max of a GPU drops.
# NumPy warns if an integer overflows, and nothing warns of the rest. The documentation says that
# the simulator is as complete a simulation as possible and that it does not find wrong types. These
# are right ones. So a kernel that is right on a GPU may fail its tests in the simulator, and the
# other way round. Convert operands, as in numpy.int64(x) * numpy.int64(x) and x + numpy.float32(1).
#
# The compiled kernels need no GPU here: of their PTX, this prints the instructions that compute. On
# a GPU they return 200, 4294967296, -1, 16777217, 32 and 0. Seen on Linux, x86-64, with Python
# 3.11, numpy 2.4.6, numba 0.68.1, numba-cuda 0.30.4 and nvidia-nvvm 13.0.88:
#
#     (x + x) // 2, x = 200 (uint8): 72 in the simulator, add.s64 shr.u64 in PTX
#     x * x, x = 65536 (int32): 0 in the simulator, mul.wide.s32 in PTX
#     x - 1, x = 0 (uint32): 4294967295 in the simulator, add.s64 in PTX
#     x + 1, x = 16777216 (float32): 16777216 in the simulator, add.f64 in PTX
#     popc(x), x = -1 (int32): 1 in the simulator, popc.b32 in PTX
#     max(x, 0.0), x = nan (float32): nan in the simulator, max.f64 in PTX
set -euo pipefail
script=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# (pip's --target would not do: from there, Python takes numba's own, older numba.cuda)
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check --no-deps numpy==2.4.6 \
    numba==0.68.1 llvmlite==0.50.0 numba-cuda==0.30.4 cuda-bindings==13.5.0 cuda-core==1.2.2 \
    cuda-pathfinder==1.9.1 packaging==26.4 nvidia-nvvm==13.0.88

cat >"$folder/rows.py" <<'END'
import math
import os
import re

import numpy
from numba import cuda, types


def average(x, y):
    y[0] = (x[0] + x[1]) // 2


def product(x, y):
    y[0] = x[0] * x[0]


def previous(x, y):
    y[0] = x[0] - 1


def following(x, y):
    y[0] = x[0] + 1


def bits(x, y):
    y[0] = cuda.popc(x[0])


def relu(x, y):
    y[0] = max(x[0], 0.0)


for name, kernel, number, type, result in [
    ("(x + x) // 2", average, 200, "uint8", "int64"),
    ("x * x", product, 65536, "int32", "int64"),
    ("x - 1", previous, 0, "uint32", "int64"),
    ("x + 1", following, 16777216, "float32", "float64"),
    ("popc(x)", bits, -1, "int32", "int32"),
    ("max(x, 0.0)", relu, math.nan, "float32", "float32"),
]:
    if "NUMBA_ENABLE_CUDASIM" in os.environ:
        x = numpy.full(2, number, type)
        y = numpy.zeros(1, result)
        cuda.jit(kernel)[1, 1](x, y)
        print(f"{name}, x = {number} ({type}): {y[0].item():.10g} in the simulator, ")
    else:
        arrays = [types.Array(getattr(types, t), 1, "C") for t in (type, result)]
        ptx, _ = cuda.compile_ptx(kernel, types.void(*arrays), cc=(8, 0))
        computes = re.findall(r"^\t((?:add|mul|shr|popc|max)\.\S+)", ptx, re.MULTILINE)
        print(f"{' '.join(computes)} in PTX")
END
cd "$folder"
NUMBA_ENABLE_CUDASIM=1 venv/bin/python -W ignore::RuntimeWarning rows.py >simulator
venv/bin/python rows.py >ptx
paste -d '\0' simulator ptx >seen
cat seen

# The comment above is what to expect.
sed -n 's/^#     //p' "$script" | diff - seen || { echo 'not as stated'; exit 1; }
echo 'as stated'
