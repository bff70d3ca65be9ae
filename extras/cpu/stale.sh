#!/bin/bash
# stale.sh: an edit is never missed. In a copy of the Makefile whose mgpu.cu prints a number, files
# change as they do when a program is written, and each time make builds what they say.
set -eu
folder=build/stale
rm -rf "$folder"
mkdir -p "$folder/extras/algorithms"
cp -a Makefile data "$folder"
cp -a extras/cpu extras/parts.mk "$folder/extras"
cd "$folder"
program() { # program NUMBER: mgpu.cu prints it, and takes a moment to compile
    printf '%s\n' '#include <cstdio>' '#include <map>' '#include <string>' "int main() { puts(\"$1\"); }" >mgpu.cu
}
build() { make -s BACKEND=cpu build/cpu/mgpu CPUFLAGS="-std=c++17 -O0 -g0" >/dev/null 2>err; }
# expect NUMBER WHAT: what make builds now prints this number
expect() {
    build || { cat err; exit 1; }
    found=$(build/cpu/mgpu)
    [ "$found" = "$1" ] || { echo "stale: $2: it prints $found, not $1"; exit 1; }
    echo "stale: $2"
}
program 1
expect 1 'a first build'
date=$(stat -c %y build/cpu/mgpu.o)
touch extras/cpu/cuda/checks.cc
expect 1 'an edit of the runtime'
[ "$date" = "$(stat -c %y build/cpu/mgpu.o)" ] || { echo 'stale: mgpu.cu was compiled again'; exit 1; }
program 2
build &
until [ -e build/cpu/mgpu.o.begun ] && [ build/cpu/mgpu.o.begun -nt mgpu.cu ]; do sleep 0.01; done
program 3
wait
expect 3 'an edit while the last one was compiled'
program 4
for _ in 1 2 3; do build & done
wait
expect 4 'three makes at once'
program 5
build &
sleep 0.1 # somewhere in the middle
kill -9 $! 2>/dev/null || true
wait
expect 5 'a make that was killed'
program 6
find build -type f -exec touch -d 'now + 1 hour' {} +
expect 6 'an edit behind a build from the future'
grep -q 'dated in the future: what is so is built again' err || { echo 'stale: nothing is said of it'; exit 1; }
