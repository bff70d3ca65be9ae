#!/bin/bash
# stale.sh: a stale build never lies. In a copy of the Makefile whose mgpu.cu prints a number, the
# sources change in the ways that times alone do not tell.
set -eu
folder=build/stale
rm -rf "$folder"
mkdir -p "$folder/extras/algorithms"
cp -a Makefile data "$folder"
cp -a extras/cpu "$folder/extras"
cd "$folder"
program() { # program NUMBER FILE: a program that prints it, and takes a moment to compile
    printf '%s\n' '#include <cstdio>' '#include <map>' '#include <string>' "int main() { puts(\"$1\"); }" >"$2"
}
# expect NUMBER WHAT: what make builds now prints this number
expect() {
    make -s BACKEND=cpu build/cpu/mgpu CPUFLAGS="-std=c++17 -O0 -g0" >/dev/null 2>err || { cat err; exit 1; }
    found=$(build/cpu/mgpu)
    [ "$found" = "$1" ] || { echo "stale: $2: it prints $found, not $1"; exit 1; }
    echo "stale: $2"
}
program 1 mgpu.cu
expect 1 'a first build'
program 2 mgpu.cu
touch -d '1 hour ago' mgpu.cu
expect 2 'an older file takes the place of a newer one'
program 3 mgpu.cu
touch -r build/cpu/mgpu mgpu.cu
expect 3 'an edit while it was compiled'
program 4 mgpu.cu
touch build/cpu/mgpu # as cp -r may leave it
cp -r . ../stale_copy
mv ../stale_copy copy
(cd copy && find build -type f -exec touch {} + && expect 4 'a copy of a stale build')
rm -r copy
expect 4 'the folder that was copied'
program 5 mgpu.cu
for _ in 1 2 3; do make -s BACKEND=cpu build/cpu/mgpu CPUFLAGS="-std=c++17 -O0 -g0" >/dev/null 2>&1 & done
wait
expect 5 'three makes at once'
program 6 mgpu.cu
make -s BACKEND=cpu build/cpu/mgpu CPUFLAGS="-std=c++17 -O0 -g0" >/dev/null 2>&1 &
sleep 0.1 # somewhere in the middle
kill -9 $! 2>/dev/null || true
wait
expect 6 'a make that was killed'
program 7 mgpu.cu
printf 'int unused;\n' >extras/cpu/cuda/more.h
expect 7 'a header more'
rm extras/cpu/cuda/more.h
cp build/cpu/runtime.o runtime.o
touch -d '1 hour ago' extras/cpu/cuda/*
expect 7 'a header less'
[ build/cpu/runtime.o -nt runtime.o ] || { echo 'stale: what a deleted header was part of is not built again'; exit 1; }
program 8 mgpu.cu
find build -type f -exec touch -d 'now + 1 hour' {} +
expect 8 'an edit behind a build from the future'
grep -q 'dated in the future: what is so is built again' err || { echo 'stale: nothing is said of it'; exit 1; }
