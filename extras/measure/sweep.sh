#!/bin/sh
# sweep.sh PROGRAM NAME=value ...
#
# Trains with each learning rate of SWEEP_LR on each number of devices of SWEEP_GPUS, with BATCH
# samples for each device. Prints the test accuracies as a table, writes them to build/sweep.csv and
# draws build/sweep.svg. A run that diverges is a result, nan; any other failure ends the sweep.
program=$1
shift
devices='1 2' rates='0.05 0.1 0.2 0.4' batch_of_each=256
for word; do # the words for this script; the others are left for the program
    shift
    value=${word#*=}
    case $word in
    SWEEP_GPUS=*) devices=$value ;;
    SWEEP_LR=*) rates=$value ;;
    BATCH=*) batch_of_each=$value ;;
    GPUS=* | LR=* | LOG=*) ;; # it has its own
    *) set -- "$@" "$word" ;;
    esac
done
if [ -d extras/files ]; then files=yes; else files=; fi
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
        # (LOG is an option of extras/files/)
        if "$program" "$@" GPUS="$gpus" BATCH="$batch" LR="$lr" \
            ${files:+LOG="build/sweep/gpus$gpus-lr$lr.csv"} >build/sweep/out 2>build/sweep/err; then
            # The last epoch's, in the table or, of lab_cnn, as the lab prints it
            acc=$(awk 'NF == 4 && /^ *[0-9]/ { acc = $3 } /validation accuracy/ { acc = $NF }
                END { print acc }' build/sweep/out)
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
python3 extras/measure/pictures.py sweep || true # the table counts
