#!/bin/sh
# sh extras/fast/edited.sh [make variables]: an edit of mgpu.cu's relu acts, and the first line says whose
# operators run. It builds in build/edited, from copies.
cd "$(dirname "$0")/../.." || exit 1
data=$(pwd)/build/data
rm -rf build/edited && mkdir -p build/edited/extras &&
    cp -a Makefile mgpu.cu build/edited && cp -a extras/*.* extras/cpu extras/fast build/edited/extras &&
    mkdir -p build/edited/build && cp -a data build/edited/ && cd build/edited || exit 1
cp -a ../cpu ../cpp build/ 2>/dev/null # what is built already
run() { make -s run "$@" DATA="$data" GPUS=1 BATCH=32 EPOCHS=1 LIMIT=64 CHECKS=0 2>make.err; }
fail() { echo "extras/fast/edited.sh: $1" >&2; cat make.err out >&2; exit 1; }
says() { grep -m 1 '^operators' out | grep -q "^operators: $1" || fail "no line: operators: $1"; }
loss() { awk '$1 == 1 { print $2 }' out; }
near() { loss | awk -v want="$tuned" '{ exit !($1 - want < 2e-4 && want - $1 < 2e-4) }'; }

run "$@" >out || fail "make run fails"
says 'tuned, '
tuned=$(loss)
# Comments and spaces do not count
sed -i 's|^// .*|// mine|; s|if (i < n) y\[i\] = X\[i\] < 0|if (i < n)  y[i] = X[i] < 0|' mgpu.cu
sh extras/fast/checksum.sh --check || fail 'a comment has made the checksums stale'
sed -i 's|y\[i\] = X\[i\] < 0 ? 0 : X\[i\];|y[i] = X[i] + 100;|' mgpu.cu
sh extras/fast/checksum.sh --check 2>/dev/null && fail 'the checksums are stale, and --check says nothing'
run "$@" >out || fail "make run fails"
says "your mgpu.cu's relu; tuned, .* otherwise (KERNELS="
[ "$(loss)" != "$tuned" ] || fail 'the edit of relu does nothing'
run KERNELS=tiled "$@" >out || fail "make run fails"
says 'tuned, tiled'
[ "$(loss)" = "$tuned" ] || fail "KERNELS=tiled does not bring back the tuned relu"
# Another relu that computes the same runs beside the tuned operators
sed -i 's|y\[i\] = X\[i\] + 100;|y[i] = X[i] > 0 ? X[i] : 0;|' mgpu.cu
run "$@" >out || fail "make run fails"
says "your mgpu.cu's relu; tuned"
near || fail "with a relu that computes the same, the loss is $(loss), not $tuned"
run KERNELS=plain "$@" >out || fail "make run fails"
says 'simple'
near || fail "the simple operators' loss is $(loss), not $tuned"
# The matrix product is both operators'
sed -i 's|sum\[tile\] = {};|sum[tile] = {0};|' mgpu.cu
[ "$(sh extras/fast/checksum.sh)" = 'conv2d linear matmul relu' ] || fail "edited: $(sh extras/fast/checksum.sh)"
echo 'extras/fast/edited.sh: an edit of relu acts'
