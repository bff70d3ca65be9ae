#!/bin/sh
# Which operators of ../mgpu.cu, section 8, have been edited since fast/ was fitted to them?
# Comments and spaces do not count.
#     sh fast/checksum.sh           their names in Operators, such as "relu pool2d"
#     sh fast/checksum.sh --check   fails and says them, if there are any
#     sh fast/checksum.sh --write   they are as they should be: fast/checksums has their sums
cd "$(dirname "$0")/.." || exit 1
sums() {
    for op in all relu add batch_norm pool2d conv sgd; do
        awk -v op=$op '
            /^\/\/ 8\. /  { inside = 1; here = "all" }
            /^\/\/ 9\. /  { inside = 0 }
            /^\/\/ --- /  { here = "" } # the part that an operator has for itself:
            /^\/\/ --- relu/ { here = "relu" }
            /^\/\/ --- addition/ { here = "add" }
            /^\/\/ --- batch norm/ { here = "batch_norm" }
            /^\/\/ --- average and max/ { here = "pool2d" }
            /^\/\/ --- convolution/ { here = "conv" }
            /^\/\/ --- sgd/ { here = "sgd" }
            inside && here == op { sub(/\/\/.*/, ""); gsub(/[ \t]/, ""); printf "%s", $0 }
            ' mgpu.cu | cksum | sed "s/^/$op /"
    done
}
case $1 in
--write) sums >fast/checksums ;;
--check)
    edited=$(sh fast/checksum.sh)
    [ -z "$edited" ] || {
        echo "fast/checksums is stale for: $edited. Do the tuned operators still compute the" \
            "same? Then sh fast/checksum.sh --write" >&2
        exit 1
    } ;;
*) sums | diff - fast/checksums | sed -n 's/^< \([a-z0-9_]*\) .*/\1/p' |
    sed 's/^all$/conv relu add pool2d batch_norm sgd/' | tr '\n' ' ' | sed 's/ $//' ;;
esac
