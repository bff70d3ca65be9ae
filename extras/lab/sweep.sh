#!/bin/sh
# sh extras/lab/sweep.sh 'GPUS ...' 'LR ...' BATCH PROGRAM OPTION ...     an empty word: as by default
#
# Trains with every learning rate on every number of devices, BATCH samples for each device. Prints
# the test accuracies as a table, writes them to build/sweep.csv and draws build/sweep.svg. A run
# that diverges is a result, nan; any other failure ends the sweep.
devices=${1:-1 2} rates=${2:-0.05 0.1 0.2 0.4} batch_of_each=${3:-256}
shift 3
set -f
mkdir -p build/sweep || exit 1
echo 'gpus,batch,lr,test_acc' >build/sweep.csv
printf '%12s' lr
for gpus in $devices; do printf '%12s' "GPUS=$gpus"; done
echo
for lr in $rates; do
    printf '%12s' "$lr"
    for gpus in $devices; do
        case $batch_of_each$gpus in
        *[!0-9]*) batch=$batch_of_each ;;  # the program says what is wrong
        *) batch=$((batch_of_each * gpus)) ;;
        esac
        log=build/sweep/gpus$gpus-lr$lr.csv
        rm -f "$log"
        if "$@" --gpus "$gpus" --batch "$batch" --lr "$lr" --log "$log" \
            >build/sweep/out 2>build/sweep/err; then
            acc=$(tail -n 1 "$log" | cut -d, -f3)
        elif grep -q 'the loss is' build/sweep/err; then
            acc=nan
        else
            echo
            cat build/sweep/err >&2
            exit 1
        fi
        echo "$gpus,$batch,$lr,$acc" >>build/sweep.csv
        printf '%12s' "$acc"
    done
    echo
done
sh extras/lab/draw.sh sweep build/sweep.csv build/sweep.svg "$devices" || true  # the table counts
