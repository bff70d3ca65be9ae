#!/bin/sh
# predict.sh WHAT PROGRAM NAME=value ...: what an exchange takes on another machine, FABRIC.
#
#   predict.sh trace MEASURE ...       what three steps do, and when: build/trace.json, .svg
#   predict.sh bench MEASURE ...       4 KB to 1 GB, of messages in proportion to those of MODEL's
#              gradients, on 2 to 1024 devices: build/allreduce.csv, .svg, and map.svg, which is
#              fastest; with machines (8xnvlink+ethernet100) flat and as nodes/
#   predict.sh scale MEASURE ...       a training step on 1 to 1024 devices, from one that is measured on
#              a single device here: build/scale.csv, .svg. STEP_MS: as if it took so long there
#
# `MEASURE dry-run` prints what is enqueued, `MEASURE trace` when it ran; build/simulate, made of
# simulate.cc and fabric.h, says how long it takes there.
what=$1 measure=$2
shift 2
fabrics='' algorithms='' batch_word='' STEP_MS='' profile='' trace_ms=''
for word; do # the words for this script; the others are left for MEASURE
    shift
    value=${word#*=}
    case $what/$word in
    */FABRIC=*) fabrics=$value ;;
    */ALLREDUCE=* | */KVSTORE=*) algorithms=$value ;;
    trace/PROFILE=*) profile=$value ;;
    trace/TRACE_MS=*) trace_ms=$value ;;
    scale/STEP_MS=*) STEP_MS=$value ;;
    scale/BATCH=*) batch_word=$word ;;
    scale/GPUS=* | scale/STEPS=* | scale/OVERLAP=*) ;; # it has its own
    *) set -- "$@" "$word" ;;
    esac
done
own=build/predict.$$ # files of this run: another one may be on its way
rows=$own/dry-run.csv
mkdir -p $own || exit 1
trap 'rm -rf $own' EXIT
trap 'exit 130' INT HUP TERM
devices='2 4 8 16 32 64 128 256 512 1024'
others=$(for name in host by_tensor sharded ring tree; do # a handout lacks them
    [ ! -f extras/algorithms/$name.h ] || echo $name
done)
node=${fabrics%%x*} # devices of a machine, in 8xnvlink+ethernet100: as nodes/ sums
case $node in '' | *[!0-9]*) node= ;; esac

case $what in
trace)
    case $measure in build/cpu/*) here=emulated ;; *) here=here ;; esac
    $measure trace ${algorithms:+"ALLREDUCE=$algorithms"} "$@" >build/trace.csv &&
        build/simulate trace "${fabrics:-$here}" $own/rows.csv ${profile:+"$profile"} \
            <build/trace.csv &&
        python3 extras/measure/pictures.py trace $own/rows.csv "$trace_ms" &&
        echo 'https://ui.perfetto.dev and chrome://tracing show build/trace.json'
    exit
    ;;
bench)
    echo 'fabric,by,gpus,bytes,us' | tee build/allreduce.csv
    for k in $devices; do
        none='' no_host='' more=''
        # Where all messages share a link, those of sharded are too many to simulate
        case $fabrics in sockets* | *x*+*) [ "$k" -le 256 ] || none=sharded ;; esac
        if [ "$node" ] && [ "$k" -gt "$node" ]; then # machines have no host in common
            no_host=host
            for name in ${algorithms:-$others}; do
                case ${algorithms:+given}$name in
                given* | ring | tree) more="$more nodes/$name" ;;
                esac
            done
        fi
        all=''
        for name in ${algorithms:-naive bucket $others}; do
            case $name in "$none" | "$no_host") ;; *) all="$all $name" ;; esac
        done
        all="$all$more"
        for algorithm in optimum $all; do
            if [ "$algorithm" = optimum ]; then
                build/simulate optimum "$fabrics" "$k" >$rows.times || exit 1
            else
                case $algorithm in nodes/*) in_nodes="DRY_NODE=$node" ;; *) in_nodes= ;; esac
                # shellcheck disable=SC2086
                $measure dry-run DRY_GPUS="$k" "$@" ALLREDUCE="${algorithm#nodes/}" $in_nodes \
                    >$rows || exit 1
                build/simulate sweep "$fabrics" <$rows >$rows.times || exit 1
            fi
            sed "s:^:$fabrics,$algorithm,$k,:" $rows.times | tee -a build/allreduce.csv
        done
    done
    python3 extras/measure/pictures.py allreduce || true # the numbers count
    ;;
scale)
    fabrics=${fabrics:-pcie}
    printf '%s\n' "${STEP_MS:-1}" | grep -xE '[0-9]*[.]?[0-9]*' | grep -q '[1-9]' || {
        echo "STEP_MS=$STEP_MS: expected milliseconds, such as 16.5" >&2
        exit 1
    }
    # shellcheck disable=SC2086
    $measure trace "$@" $batch_word STEPS=1 GPUS=1 >$own/step.csv || exit 1
    title=$(sed -n '1s/^# \(.*, batch [0-9]*\),.*/\1/p' $own/step.csv)
    batch=${title##* }
    eighth=$((batch < 8 ? 1 : batch / 8))
    $measure trace "$@" STEPS=1 GPUS=1 BATCH=$eighth >$own/eighth.csv || exit 1
    algorithm=${algorithms:-naive} one=
    echo "$title, on $fabrics: a step on k devices, predicted from one measured here on a single" \
        "device${STEP_MS:+, as if it took $STEP_MS ms}."
    echo 'strong: one minibatch for all; weak: one for each. Efficiency is relative to k times the speed.'
    echo 'k,overlap,strong_ms,strong,weak_ms,weak' >build/scale.csv
    for overlap in '' OVERLAP=1; do
        printf '%5s %12s %11s %12s %11s   %s\n' k 'strong, ms' efficiency 'weak, ms' efficiency \
            "$algorithm${overlap:+ with OVERLAP=1}"
        for k in 1 $devices; do
            # shellcheck disable=SC2086
            $measure dry-run DRY_GPUS="$k" "$@" $batch_word ALLREDUCE="$algorithm" $overlap \
                ${node:+DRY_NODE="$node"} >$rows || exit 1
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
    python3 extras/measure/pictures.py scale "$title, $algorithm on $fabrics" || true
    ;;
esac
