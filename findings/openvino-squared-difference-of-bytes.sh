#!/bin/bash
# OpenVINO's SquaredDifference of bytes is 0 on a CPU with AVX2 or AVX-512. So two images of bytes
# seem to be the same one, whatever they show. Signed bytes are wrong as well. The documentation
# says (x - y) ** 2, and here the square fits a byte. If both operands are constants, OpenVINO
# computes the result when it compiles the model, and this one is right. So are the results of
# 16-bit and 32-bit integers and of floats, and those without AVX, which ONEDNN_MAX_CPU_ISA=SSE41
# turns off. Convert the bytes to float32 first.
#
# Seen on Linux, x86-64, with Python 3.11, numpy 2.4.6 and openvino 2026.4.1:
#
#     x = [3, 110, 0, 17, 98], y = [1, 100, 0, 9, 103], (x - y) ** 2 = [4, 100, 0, 64, 25]
#     uint8: [0, 0, 0, 0, 0], of constants [4, 100, 0, 64, 25]
#     int8: [0, 0, 0, 0, 0], of constants [4, 100, 0, 64, 25]
#     int16: [4, 100, 0, 64, 25], of constants [4, 100, 0, 64, 25]
#     int32: [4, 100, 0, 64, 25], of constants [4, 100, 0, 64, 25]
#     float32: [4.0, 100.0, 0.0, 64.0, 25.0], of constants [4.0, 100.0, 0.0, 64.0, 25.0]
#     uint8, converted to float32: [4.0, 100.0, 0.0, 64.0, 25.0]
#     without AVX, uint8: [4, 100, 0, 64, 25], of constants [4, 100, 0, 64, 25]
#     without AVX, int8: [4, 100, 0, 64, 25], of constants [4, 100, 0, 64, 25]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-deps \
    --target "$folder/packages" numpy==2.4.6 openvino==2026.4.1
export PYTHONPATH=$folder/packages

cat >"$folder/square.py" <<'END'
import numpy
import openvino
from openvino import opset15

x = numpy.array([3, 110, 0, 17, 98])
y = numpy.array([1, 100, 0, 9, 103])
print(f"x = {x.tolist()}, y = {y.tolist()}, (x - y) ** 2 = {((x - y) ** 2).tolist()}")


def run(inputs, result, arrays):
    model = openvino.compile_model(openvino.Model([result], inputs), "CPU")
    return model(arrays)[0].tolist()


def parameters(type):
    return [opset15.parameter([len(x)], type) for _ in range(2)]


for type in "uint8", "int8", "int16", "int32", "float32":
    arrays = [x.astype(type), y.astype(type)]
    inputs = parameters(arrays[0].dtype.type)
    seen = run(inputs, opset15.squared_difference(*inputs), arrays)
    constants = [opset15.constant(array) for array in arrays]
    folded = run([], opset15.squared_difference(*constants), [])
    print(f"{type}: {seen}, of constants {folded}")
inputs = parameters(numpy.uint8)
floats = [opset15.convert(p, "f32") for p in inputs]
seen = run(inputs, opset15.squared_difference(*floats), [x.astype("uint8"), y.astype("uint8")])
print(f"uint8, converted to float32: {seen}")
END
{
    python3 "$folder/square.py"
    ONEDNN_MAX_CPU_ISA=SSE41 python3 "$folder/square.py" | sed -n 's/^u\?int8:/without AVX, &/p'
} >"$folder/seen"
cat "$folder/seen"

# The comment above is what to expect.
sed -n 's/^#     //p' "$0" | diff - "$folder/seen" || { echo 'not as stated'; exit 1; }
echo 'as stated'
