#!/bin/sh
# plot.sh NAME=value ...: train loss and test accuracy over epochs of the logs RUNS, by default LOG, in
# build/plot.svg and .png; where gnuplot is missing, the accuracy as text
#
# plot.sh --about FILE.csv: the columns model, gpus, allreduce, lr, if the log has them
set -f
if [ "$1" = --about ]; then
    exec awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i }
        END {
            if (at["lr"]) printf ": %s, GPUS=%s, %s, lr %s",
                $at["model"], $at["gpus"], $at["allreduce"], $at["lr"]
        }' "$2"
fi
log=build/log.csv runs=''
for word; do
    case $word in
    RUNS=*) runs=${word#RUNS=} ;;
    LOG=*) log=${word#LOG=} ;;
    *)
        echo "make plot takes only RUNS and LOG, not ${word%%=*}" >&2
        exit 1
        ;;
    esac
done
runs=${runs:-$log}
if command -v gnuplot >/dev/null; then
    sh extras/lab/draw.sh accuracy "$runs" build/plot.svg &&
        exec sh extras/lab/draw.sh accuracy "$runs" build/plot.png
    exit 1
fi
for log in $runs; do
    [ -r "$log" ] || { echo "no picture of $log: it cannot be read (make run)" >&2; exit 1; }
    awk -F, -v run="$log" -v width=60 -v height=20 '
        NR > 1 && NF >= 3 { acc[++n] = $3 }
        END {
            if (!n) {
                print "no picture of " run ": it has no rows (make run)" >"/dev/stderr"
                exit 1
            }
            print "test accuracy, " run
            for (row = height; row >= 0; row--) {
                line = row % 4 ? "     |" : sprintf("%4.1f |", row / height)
                for (column = 0; column < width; column++) {
                    epoch = n > 1 ? 1 + column * (n - 1) / (width - 1) : 1
                    left = int(epoch)
                    right = left < n ? left + 1 : left
                    value = acc[left] + (epoch - left) * (acc[right] - acc[left])
                    line = line (int(value * height + 0.5) == row ? "*" : " ")
                }
                sub(/ +$/, "", line)
                print line
            }
            line = "     +"
            for (column = 0; column < width; column++) line = line "-"
            print line
            printf "      1%*d epochs\n", width - 1, n
        }' <"$log" || exit 1
done
