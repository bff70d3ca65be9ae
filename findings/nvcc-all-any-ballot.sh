#!/bin/bash
# nvcc refuses a variable at file scope that is called all, any or ballot: "declaration is
# incompatible with bool all(bool)". Headers that nvcc includes by itself, device_atomic_functions.h
# and sm_20_intrinsics.h, declare functions of these names for host and device. The programming guide
# knows only __all_sync, __any_sync and __ballot_sync. A static variable meets this, too, and so does
# one in a file without a kernel, only because its name ends with .cu. In a namespace, or within a
# function, the names are free.
#
# Seen on Linux, x86-64, with nvcc from PyPI and the g++ 12.2.0 of Debian, which it needs:
#
#     g++: all any ballot are names like others
#     nvcc 13.0.88: all refused, any refused, ballot refused, every compiles
#     nvcc 13.0.88: all compiles in a namespace
#     nvcc 13.5.37: all refused, any refused, ballot refused, every compiles
#     nvcc 13.5.37: all compiles in a namespace
set -euo pipefail
script=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cd "$folder"
program() { echo "static int $1; int main() { return $1; }" >"$1.cu"; }
for name in all any ballot; do
    program $name
    g++ -x c++ -fsyntax-only $name.cu
done
echo 'g++: all any ballot are names like others' >seen
for version in 13.0.88 13.5.37; do
    python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-deps \
        --target "$version" "nvidia-cuda-nvcc==$version" "nvidia-nvvm==$version" \
        "nvidia-cuda-crt==$version" "nvidia-cuda-runtime==$version"
    line="nvcc $version:"
    for name in all any ballot every; do
        program $name
        if "$version/nvidia/cu13/bin/nvcc" -c $name.cu -o x.o >log 2>&1; then
            line="$line $name compiles,"
        else
            grep -q 'declaration is incompatible with' log || { cat log; exit 1; }
            line="$line $name refused,"
        fi
    done
    echo "${line%,}" >>seen
    echo 'namespace own { static int all; } int main() { return own::all; }' >in_namespace.cu
    "$version/nvidia/cu13/bin/nvcc" -c in_namespace.cu -o x.o
    echo "nvcc $version: all compiles in a namespace" >>seen
done
cat seen

# The comment above is what to expect.
sed -n 's/^#     //p' "$script" | diff - seen || { echo 'not as stated'; exit 1; }
echo 'as stated'
