#!/bin/sh
# Which operators of mgpu.cu, section 8, and of networks.cu, section 1, have been edited since
# extras/fast/ was fitted to them?
# Comments and spaces do not count.
#     sh extras/fast/checksum.sh           their names in Operators, such as "relu sgd"
#     sh extras/fast/checksum.sh --check   fails and says them, if there are any
#     sh extras/fast/checksum.sh --write   they are as they should be: extras/fast/checksums has their sums
cd "$(dirname "$0")/../.." || exit 1
all='conv2d linear relu avg_pool2d sgd max_pool2d add batch_norm'
files=$(ls mgpu.cu extras/networks/networks.cu 2>/dev/null)
sums() { # of the text of each operator in each file
    for file in $files; do for op in $all; do
        awk -v op="$op" -v all="$all" '
            /^\/\/ (8\. Kernels|1\. Operators)/ { uses = all } # whose text this is
            /^\/\/ (9\. Autograd|2\. Networks)/ { uses = "" }
            /^\/\/ --- /  { uses = uses ? "none" : "" }
            !uses         { next }
            /^\/\/ --- relu/ { uses = "relu" }
            /^\/\/ --- sgd/ { uses = "sgd" }
            /^\/\/ --- average pooling/ { uses = "avg_pool2d max_pool2d" }
            /^\/\/ --- matrix product/ { uses = "conv2d linear" }
            /^\/\/ --- bias/ { uses = "conv2d linear batch_norm" }
            /^\/\/ --- dense layer/ { uses = "linear" }
            /^\/\/ --- convolution/ { uses = "conv2d" }
            /^\/\/ --- addition/ { uses = "add" }
            /^\/\/ --- pooling/ { uses = "max_pool2d" }
            /^\/\/ --- batch norm/ { uses = "batch_norm" }
            index(" " uses " ", " " op " ") { sub(/\/\/.*/, ""); gsub(/[ \t]/, ""); printf "%s", $0 }
            ' "$file" | cksum | sed "s|^|$op $file |"
    done; done
}
case $1 in
--write) sums >extras/fast/checksums ;;
--check)
    edited=$(sh extras/fast/checksum.sh)
    [ -z "$edited" ] || {
        echo "extras/fast/checksums is stale for: $edited. If the tuned operators still compute" \
            "the same, run sh extras/fast/checksum.sh --write" >&2
        exit 1
    } ;;
*) sums | diff - extras/fast/checksums | sed -n 's/^< \([a-z0-9_]*\) .*/\1/p' | sort -u |
    tr '\n' ' ' | sed 's/ $//' ;;
esac
