#!/bin/bash
# nvcc --list-gpu-arch does not print its architectures in numeric order. nvcc --help promises no
# order, but there are scripts that take the last line for the highest architecture. With nvcc
# 13.0.88 they are right, although compute_110 comes before compute_103. With 13.5.37 they get
# compute_107 instead of compute_121. nvcc --list-gpu-code has the same order. Sort before you take
# the last line: nvcc --list-gpu-arch | sort -V | tail -1.
#
# Seen on Linux, x86-64, with nvidia-cuda-nvcc from PyPI:
#
#     nvcc 13.0.88, --list-gpu-arch: 75 80 86 87 88 89 90 100 110 103 120 121
#     nvcc 13.0.88, the last line: 121, the highest: 121
#     nvcc 13.5.37, --list-gpu-arch: 75 80 86 87 88 89 90 100 110 103 120 121 107
#     nvcc 13.5.37, the last line: 107, the highest: 121
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# list VERSION arch|code: print the numbers that nvcc lists, on one line
list() {
    "$folder/$1/nvidia/cu13/bin/nvcc" "--list-gpu-$2" | sed 's/^[a-z]*_//' | paste -sd ' '
}

for version in 13.0.88 13.5.37; do
    python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-deps \
        --target "$folder/$version" "nvidia-cuda-nvcc==$version"
    numbers=$(list "$version" arch)
    [ "$(list "$version" code)" = "$numbers" ] || { echo 'the two lists differ' >&2; exit 1; }
    highest=$(tr ' ' '\n' <<<"$numbers" | sort -n | tail -1)
    echo "nvcc $version, --list-gpu-arch: $numbers"
    echo "nvcc $version, the last line: ${numbers##* }, the highest: $highest"
done >"$folder/seen"
cat "$folder/seen"

# The comment above is what to expect.
sed -n 's/^#     //p' "$0" | diff - "$folder/seen" || { echo 'not as stated'; exit 1; }
echo 'as stated'
