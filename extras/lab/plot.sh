#!/bin/sh
# sh extras/lab/plot.sh 'FILE.csv ...': train loss and test accuracy over epochs, in build/plot.svg and
# .png; where gnuplot is missing, the accuracy as text
#
# sh extras/lab/plot.sh --about FILE.csv: the columns model, gpus, allreduce, lr, if the log has them
set -f
if [ "$1" = --about ]; then
    exec awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i }
        END {
            if (at["lr"]) printf ": %s, GPUS=%s, %s, lr %s",
                $at["model"], $at["gpus"], $at["allreduce"], $at["lr"]
        }' "$2"
fi
if command -v gnuplot >/dev/null; then
    sh extras/lab/draw.sh accuracy "$1" build/plot.svg && exec sh extras/lab/draw.sh accuracy "$1" build/plot.png
    exit 1
fi
for log in $1; do
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
