#!/bin/sh
# Which operators of mgpu.cu and networks.cu have been edited since extras/fast/ was fitted to them?
# extras/fast/operators lists the definitions of each. Their comments and spaces do not count.
#     sh extras/fast/checksum.sh           their names in Operators, such as "relu sgd"
#     sh extras/fast/checksum.sh --check   fails and says them, if there are any
#     sh extras/fast/checksum.sh --write   they are as they should be: extras/fast/checksums has their sums
cd "$(dirname "$0")/../.." || exit 1
export LC_ALL=C
table=extras/fast/operators
all=$(sed '/^#/d; s/:.*//' $table | tr ' ' '\n' | sort -u)
files=$(ls mgpu.cu extras/networks/networks.cu 2>/dev/null)
sums() { # of the text of each operator in each file
    for file in $files; do
        places=$(awk -f extras/definitions.awk "$file")
        for op in $all; do
            names=$(sed -n "s/^\(.* \)*$op\( .*\)*: / /p" $table | tr '\n' ' ')
            echo "$places" | awk -v names="$names" '
                !in_file {
                    if (!index(names, " " $1 " ")) next
                    for (line = $3; line <= $4; line++) counts[line]
                    next
                }
                !(FNR in counts) { next }
                { sub(/\/\/.*/, ""); gsub(/[ \t]/, ""); printf "%s", $0 }
                ' - in_file=1 "$file" | cksum | sed "s|^|$op $file |"
        done
    done
}
unknown() { # names in the table that no file defines
    # shellcheck disable=SC2086 # two files
    defined=$(awk -f extras/definitions.awk $files | sed 's/ .*//')
    sed '/^#/d; s/.*: //' $table | tr ' ' '\n' | grep -vxF "$defined"
}
case $1 in
--write) sums >extras/fast/checksums ;;
--check)
    edited=$(sh extras/fast/checksum.sh)
    [ -z "$edited" ] || {
        echo "extras/fast/checksums is stale for: $edited. If the tuned operators still compute" \
            "the same, run sh extras/fast/checksum.sh --write" >&2
        exit 1
    }
    [ ! -e extras/networks/networks.cu ] || [ -z "$(unknown)" ] || {
        echo "$table names what is not defined:" "$(unknown)" >&2
        exit 1
    } ;;
*) sums | diff - extras/fast/checksums | sed -n 's/^< \([a-z0-9_]*\) .*/\1/p' | sort -u |
    tr '\n' ' ' | sed 's/ $//' ;;
esac
