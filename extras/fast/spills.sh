#!/bin/sh
# sh extras/fast/spills.sh [NVCC...]: no kernel of the program spills registers or needs a stack, on any
# GPU from SM 75 on. For a release, with the oldest and the newest nvcc of machines.sh; some 15 minutes each.
cd "$(dirname "$0")/../.." || exit 1
[ $# -gt 0 ] || set -- nvcc
found=0
for nvcc; do
    make -s sources build/gpu/products.h BACKEND=cuda NVCC="$nvcc" SM=90 || exit 1
    for sm in ${SM:-75 80 86 89 90 100 120}; do
        arch=sm_$sm wgmma=
        case $sm in 90) arch=sm_90a wgmma=-DSM_90A ;; esac # as fast.mk does
        for file in extras/fast/products.cu build/gpu/program.cu; do
            used=$("$nvcc" -std=c++17 -O3 -D_GLIBCXX_ASSERTIONS -arch="$arch" -cubin -o /dev/null \
                ${wgmma:+"$wgmma"} -DPRODUCTS_APART -DEDITED='""' \
                -I. -Ibuild/gpu -DVOCABULARY='"products.h"' --resource-usage "$file" 2>&1) ||
                { echo "$used" >&2; exit 1; }
            echo "$used" | c++filt | awk -v where="$nvcc, SM $sm" '
                /Compiling entry function/ { name = $0; kernels++ }
                /stack frame/ && !/ 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads/ {
                    print where ": " $0 "\n" name
                    bad = 1
                }
                END { if (!kernels) print where ": no kernels"; exit bad || !kernels }' || found=1
        done
    done
done
exit $found
