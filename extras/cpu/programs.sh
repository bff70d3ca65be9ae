#!/bin/sh
# programs.sh PROGRAM ...: compiles and runs each, two at a time, as make cu does. A program is a .cu
# file, or a folder with a main.cu and others. What it prints must be what stands behind "// prints: "
# in its first lines. Status 1 if one differs.
if [ "$1" = --one ]; then
    CU_FILE=$2
    if [ -d "$2" ]; then CU_FILE=$(printf '%s ' "$2"/*.cu); fi
    export CU_FILE
    name=$(basename "$2" .cu)
    if [ -d "$2" ]; then main=$2/main.cu; else main=$2; fi
    sed -n 's|^// prints: ||p' "$main" >"build/cu/$name.expected"
    sh extras/cpu/cu.sh >"build/cu/$name.out" 2>"build/cu/$name.err"
    status=$?
    if [ "$status" = 0 ] && { [ "$CHECK" ] || [ ! -s "build/cu/$name.err" ]; } &&
        cmp -s "build/cu/$name.expected" "build/cu/$name.out"; then
        echo passed
        exit 0
    fi
    { # in one piece: another program may have failed at the same time
        echo "$2: failed, status $status: expected <, printed >"
        diff "build/cu/$name.expected" "build/cu/$name.out"
        cat "build/cu/$name.err"
    } >"build/cu/$name.failed"
    cat "build/cu/$name.failed" >&2
    echo failed
    exit 0
fi
mkdir -p build/cu
at_once=2
if [ "$CHECK" = race ]; then at_once=1; fi # its report is one file
export CUDA_CPU_DEVICES="${CUDA_CPU_DEVICES:-2}"
printf '%s\n' "$@" | xargs -P "$at_once" -I FILE sh extras/cpu/programs.sh --one FILE | awk '
    { n[$1]++ }
    END { print n["passed"] + 0, "passed,", n["failed"] + 0, "failed"; exit n["failed"] > 0 }'
