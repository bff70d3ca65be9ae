#!/bin/sh
# sh plot/predict.sh WHAT FABRICS ALGORITHMS GPUS PROGRAM OPTION ...   an exchange elsewhere
#
#   exercise   what the exchange of the gradients takes there, in microseconds
#   bench      an exchange of 4 KB to 1 GB, of messages in proportion to those of MODEL's gradients,
#              on 2 to 1024 devices: build/allreduce.csv, build/allreduce.svg
#   scale      a training step on 1 to 1024 devices, from one that is measured on a single device
#              here: build/scale.csv, build/scale.svg. STEP_MS: as if it took so long there
#
# PROGRAM, the lab, prints what is enqueued (--dry-run) and when it ran (--trace); build/simulate, made of
# plot/simulate.cc and plot/fabric.h, says how long it takes there. Empty words: the usual ones.
what=$1 fabrics=$2 algorithms=$3 gpus=$4
shift 4
own=build/predict.$$ # files of this run: another one may be on its way
rows=$own/dry-run.csv
mkdir -p $own || exit 1
trap 'rm -rf $own' EXIT
trap 'exit 130' INT HUP TERM
devices='2 4 8 16 32 64 128 256 512 1024'

case $what in
exercise)
    fabrics=${fabrics:-nvlink pcie sockets ethernet100 ethernet10}
    printf '%-10s' 'us on'
    for fabric in $fabrics; do printf ' %11s' "$fabric"; done
    k=${gpus:-8}  # or the most devices below that it is meant for
    for algorithm in ${algorithms:-yours} naive; do
        until "$@" --dry-run "$k" --allreduce "$algorithm" >$rows 2>$rows.errors; do
            if [ "$k" = 1 ] || ! grep -q 'is not meant for' $rows.errors; then
                echo
                cat $rows.errors >&2
                exit 1
            fi
            k=$((k - 1))
        done
        printf '\n%-10s' "$algorithm"
        # shellcheck disable=SC2086
        build/simulate total $fabrics <$rows || exit 1
        [ "$algorithm" != naive ] || break
    done
    echo "   simulated, on $k devices"
    ;;
bench)
    echo 'fabric,by,gpus,bytes,us' | tee build/allreduce.csv
    for k in $devices; do
        for algorithm in optimum ${algorithms:-naive bucket host by_tensor sharded ring tree}; do
            if [ "$algorithm" = optimum ]; then
                build/simulate optimum "$fabrics" "$k" >$rows.times || exit 1
            else
                "$@" --dry-run "$k" --allreduce "$algorithm" >$rows || exit 1
                build/simulate sweep "$fabrics" <$rows >$rows.times || exit 1
            fi
            sed "s/^/$fabrics,$algorithm,$k,/" $rows.times | tee -a build/allreduce.csv
        done
    done
    sh plot/draw.sh allreduce build/allreduce.csv build/allreduce.svg "$fabrics" || true
    ;;
scale)
    printf '%s\n' "${STEP_MS:-1}" | grep -xE '[0-9]*[.]?[0-9]*' | grep -q '[1-9]' || {
        echo "STEP_MS=$STEP_MS: milliseconds are wanted, such as 16.5" >&2
        exit 1
    }
    "$@" --trace --steps 1 --gpus 1 >$own/step.csv || exit 1
    title=$(sed -n '1s/^# \(.*, batch [0-9]*\),.*/\1/p' $own/step.csv)
    batch=${title##* }
    eighth=$((batch < 8 ? 1 : batch / 8))
    "$@" --trace --steps 1 --gpus 1 --batch $eighth >$own/eighth.csv || exit 1
    algorithm=${algorithms:-naive} one=
    echo "$title, on $fabrics: a step on k devices, from one that is measured here on a single" \
        "device${STEP_MS:+, as if that took $STEP_MS ms}."
    echo 'strong: with this minibatch on all; weak: on each. Efficiency: of k times the speed.'
    echo 'k,overlap,strong_ms,strong,weak_ms,weak' >build/scale.csv
    for overlap in '' --overlap; do
        printf '%5s %12s %11s %12s %11s   %s\n' k 'strong, ms' efficiency 'weak, ms' efficiency \
            "$algorithm${overlap:+ with OVERLAP=1}"
        for k in 1 $devices; do
            # shellcheck disable=SC2086
            "$@" --dry-run "$k" --allreduce "$algorithm" $overlap >$rows || exit 1
            # shellcheck disable=SC2086
            times=$(build/simulate scale "$fabrics" "$k" $own/step.csv $own/eighth.csv \
                $STEP_MS <$rows) || exit 1
            one=${one:-${times% *}}
            echo "$k $([ "$overlap" ] && echo 1 || echo 0) $times $one $batch" | awk '{
                few = $1 > $6  # samples
                strong = few ? "nan,nan" : sprintf("%.3f,%.4f", $3, $5 / $3 / $1)
                printf "%5d %12s %11s", $1, few ? "-" : sprintf("%.3f", $3),
                    few ? "-" : sprintf("%.0f%%", 100 * $5 / $3 / $1)
                printf " %12.3f %10.0f%%\n", $4, 100 * $5 / $4
                printf "%d,%d,%s,%.3f,%.4f\n", $1, $2, strong, $4, $5 / $4 >>"build/scale.csv"
            }'
            if [ "$(wc -l <$rows)" -gt 6000000 ]; then
                echo '      more devices: too many messages to simulate'
                break
            fi
        done
    done
    sh plot/draw.sh scale build/scale.csv build/scale.svg "$title, $algorithm on $fabrics" || true
    ;;
esac
