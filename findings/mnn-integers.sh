#!/bin/bash
# On a CPU, MNN multiplies integers of 32 bits as floats and takes their maximum as one, too. Beyond
# 2 ** 24 the last bits are lost, so that the maximum of two numbers may be neither of them, and
# that of the largest integer and 0 is the smallest one. Sums and differences are right. argmin does
# not find the smallest of numbers that are in part negative, and neither it nor argmax finds the
# right one among negative numbers only. For integers, mod and floormod have exchanged their
# meanings: the documentation says that mod rounds the quotient toward 0 and floormod toward
# negative infinity, as they do for floats. No error is raised, and all results are integers. The
# documentation names no such limits. Compute indices, counts and hashes with NumPy.
#
# Seen on Linux, x86-64, with Python 3.11, numpy 2.4.6 and MNN 3.6.1:
#
#     x = [16777217, 99999, 2147483647], y = [1, 10001, 0]
#     add(x, y): [16777218, 110000, 2147483647], right
#     subtract(x, y): [16777216, 89998, 2147483647], right
#     multiply(x, y): [16777216, 1000089984, 0], not [16777217, 1000089999, 0]
#     maximum(x, y): [16777216, 99999, -2147483648], not [16777217, 99999, 2147483647]
#     argmax([-3, 1, 2]): 2, right
#     argmin([-3, 1, 2]): 1, not 0
#     argmax([-3, -1, -2]): 0, not 1
#     argmin([-3, -1, -2]): 0, right
#     argmax([-1, -2, -3]): 0, right
#     argmin([-1, -2, -3]): 0, not 2
#     x = [7, -7, 7, -7], y = [2, 2, -3, -3]
#     mod(x, y) of ints: [1, 1, -2, -1], not [1, -1, 1, -1]
#     mod(x, y) of floats: [1.0, -1.0, 1.0, -1.0], right
#     floormod(x, y) of ints: [1, -1, 1, -1], not [1, 1, -2, -1]
#     floormod(x, y) of floats: [1.0, 1.0, -2.0, -1.0], right
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-deps \
    --target "$folder/packages" numpy==2.4.6 MNN==3.6.1
export PYTHONPATH=$folder/packages

cat >"$folder/integers.py" <<'END'
import numpy
from MNN import expr


def compute(function, *operands, type=expr.int):
    variables = [expr.const(numbers, [len(numbers)], expr.NCHW, type) for numbers in operands]
    return function(*variables).read().tolist()


def show(name, seen, right):
    print(f"{name}: {seen}, {'right' if seen == right else f'not {right}'}")


x, y = [16777217, 99999, 2147483647], [1, 10001, 0]
print(f"x = {x}, y = {y}")
for name in "add", "subtract", "multiply", "maximum":
    right = getattr(numpy, name)(x, y).tolist()
    show(f"{name}(x, y)", compute(getattr(expr, name), x, y), right)

for x in [-3, 1, 2], [-3, -1, -2], [-1, -2, -3]:
    for name in "argmax", "argmin":
        seen = compute(lambda variable: getattr(expr, name)(variable, 0), x)
        show(f"{name}({x})", seen, int(getattr(numpy, name)(x)))

x, y = [7, -7, 7, -7], [2, 2, -3, -3]
print(f"x = {x}, y = {y}")
for name, reference in ("mod", numpy.fmod), ("floormod", numpy.mod):
    for type in "int", "float":
        seen = compute(getattr(expr, name), x, y, type=getattr(expr, type))
        show(f"{name}(x, y) of {type}s", seen, reference(x, y).tolist())
END
python3 "$folder/integers.py" | grep -v '^The device supports' >"$folder/seen"
cat "$folder/seen"

# The comment above is what to expect.
sed -n 's/^#     //p' "$0" | diff - "$folder/seen" || { echo 'not as stated'; exit 1; }
echo 'as stated'
