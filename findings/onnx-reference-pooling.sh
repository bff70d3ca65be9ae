#!/bin/bash
# onnx brings a ReferenceEvaluator, which is to show what a model should compute, but some of its
# pooling is wrong. MaxPool with strides 1 and padding returns too few numbers, starts at another
# one than it should or raises an IndexError, as it does with kernel_shape 3 and pads 1. AveragePool
# with ceil_mode 1 and no padding starts before the first number, so that the average of 1, 2 and 3
# becomes that of 1 and 2. onnx.checker accepts these models. Images are pooled wrongly as well, if
# the padding is not equal on both sides or with ceil_mode. A test that takes these numbers for the
# right ones finds fault with a right program. Compare with onnxruntime instead.
#
# The numbers are 1 to 7. The last column is computed from the specification. Seen on Linux, x86-64,
# with Python 3.11, numpy 2.4.6, onnx 1.23.2 and onnxruntime 1.32.0:
#
#     MaxPool 2, strides 1, pads 0 0, ceil_mode 0
#         onnx: 2 3 4 5 6 7
#         onnxruntime: 2 3 4 5 6 7
#         specification: 2 3 4 5 6 7
#     MaxPool 2, strides 1, pads 0 1, ceil_mode 0
#         onnx: 2 3 4 5 6 7
#         onnxruntime: 2 3 4 5 6 7 7
#         specification: 2 3 4 5 6 7 7
#     MaxPool 2, strides 1, pads 1 0, ceil_mode 1
#         onnx: 2 3 4 5 6 7 7
#         onnxruntime: 1 2 3 4 5 6 7
#         specification: 1 2 3 4 5 6 7
#     MaxPool 3, strides 1, pads 1 1, ceil_mode 0
#         onnx: IndexError
#         onnxruntime: 2 3 4 5 6 7 7
#         specification: 2 3 4 5 6 7 7
#     AveragePool 3, strides 3, pads 0 0, ceil_mode 0
#         onnx: 2 5
#         onnxruntime: 2 5
#         specification: 2 5
#     AveragePool 3, strides 3, pads 0 0, ceil_mode 1
#         onnx: 1.5 4 6
#         onnxruntime: 2 5 7
#         specification: 2 5 7
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-deps \
    --target "$folder/packages" numpy==2.4.6 onnx==1.23.2 onnxruntime==1.32.0 ml_dtypes==0.6.0 \
    protobuf==7.36.2 typing_extensions==4.16.0 flatbuffers==25.12.19 packaging==26.4
export PYTHONPATH=$folder/packages

cat >"$folder/pool.py" <<'END'
import math

import numpy
import onnx
import onnxruntime
from onnx import helper
from onnx.reference import ReferenceEvaluator

x = numpy.arange(1, 8, dtype=numpy.float32)


def by_specification(operator, size, stride, pads, ceil_mode):
    steps = (x.size + sum(pads) - size) / stride
    last = math.ceil(steps) if ceil_mode else math.floor(steps)
    starts = [i * stride - pads[0] for i in range(last + 1)]
    windows = [x[max(start, 0) : start + size] for start in starts if start < x.size]
    return [window.max() if operator == "MaxPool" else window.mean() for window in windows]


def row(name, numbers):
    print(f"    {name}:", *[f"{number:g}" for number in numpy.asarray(numbers).flatten()])


for case in [
    ("MaxPool", 2, 1, [0, 0], 0),
    ("MaxPool", 2, 1, [0, 1], 0),
    ("MaxPool", 2, 1, [1, 0], 1),
    ("MaxPool", 3, 1, [1, 1], 0),
    ("AveragePool", 3, 3, [0, 0], 0),
    ("AveragePool", 3, 3, [0, 0], 1),
]:
    operator, size, stride, pads, ceil_mode = case
    print(f"{operator} {size}, strides {stride}, pads {pads[0]} {pads[1]}, ceil_mode {ceil_mode}")
    node = helper.make_node(
        operator,
        ["x"],
        ["y"],
        kernel_shape=[size],
        strides=[stride],
        pads=pads,
        ceil_mode=ceil_mode,
    )
    inputs = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 1, x.size])]
    outputs = [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 1, None])]
    graph = helper.make_graph([node], "pool", inputs, outputs)
    opset = helper.make_opsetid("", 22)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    feed = {"x": x.reshape(1, 1, -1)}
    try:
        row("onnx", ReferenceEvaluator(model).run(None, feed)[0])
    except IndexError:
        print("    onnx: IndexError")
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    row("onnxruntime", session.run(None, feed)[0])
    row("specification", by_specification(*case))
END
python3 "$folder/pool.py" >"$folder/seen"
cat "$folder/seen"

# The comment above is what to expect.
sed -n 's/^#     //p' "$0" | diff - "$folder/seen" || { echo 'not as stated'; exit 1; }
echo 'as stated'
