#!/bin/bash
# limits.sh [TIMES]: trainings that are killed, two at once with one SAVE, too little memory, room on
# a disk or number of files, and folders without the data set. What is left on the disk must be the
# old file or the new one, and what is said one line. TIMES: how often, by default 3.
times=${1:-3}
program=$(pwd)/build/cpu/program
data=$(pwd)/build/data
folder=$(pwd)/build/limits
passed=0 failed=0
rm -rf "$folder" && mkdir -p "$folder" && cd "$folder" || exit 1

check() { # check WHAT COMMAND...
    if "${@:2}"; then passed=$((passed + 1)); else
        failed=$((failed + 1))
        echo "FAILED: $1"
        head -c 500 err 2>/dev/null
    fi
}
train() { # train NAME=value ...: of two minibatches an epoch
    "$program" DATA="$data" LIMIT=60 BATCH=30 EPOCHS=4 LOG=log "$@" >out 2>err
}
loads() { # the file is whole
    "$program" DATA="$data" LIMIT=60 EPOCHS=1 LOG=log2 INIT="$1" >out2 2>&1
}
no_parts() { [ -z "$(find . -name '*.part' -o -name '*.test')" ]; }
# It ends with a status of 1 and a line of its own, or with 0 and none. $1: its status
one_line() {
    case $1 in
    0) [ ! -s err ] ;;
    1) [ "$(wc -l <err)" = 1 ] && grep -qE '^(mgpu|cuda_runtime.h): ' err ;;
    *) false ;;
    esac
}

# Killed at any moment: the old file or the new one. (extras/files/tests.cu has other signals.)
train SAVE=s
for i in $(seq "$times"); do
    {
        train SAVE=s SEED="$i" &
        sleep "0.$((RANDOM % 10))$((RANDOM % 10))"
        pkill -KILL -P $! program
        wait
    } 2>/dev/null
    check "killed: SAVE loads" loads s
    rm -f ./*.part ./*.test
done

# Two at once with one SAVE: the file is whole, from the one that wrote it last
for i in $(seq "$times"); do
    "$program" DATA="$data" LIMIT=60 BATCH=30 EPOCHS=9 LOG=l1 SAVE=both >out1 2>err1 &
    train SAVE=both SEED=1
    wait $!
    check "two at once: SAVE loads" loads both
    check "two at once: no parts" no_parts
done

# Too little of something
for limit in '-n 4' '-n 6' '-n 10' '-f 1' '-f 400' '-v 20480' '-v 61440' '-v 204800'; do
    # shellcheck disable=SC2086
    (ulimit $limit; train SAVE=s GPUS=2) 2>/dev/null
    status=$?
    check "ulimit $limit: one line, status $status" one_line $status
    check "ulimit $limit: not the data" eval "! grep -q 'remove it' err"
    check "ulimit $limit: no parts" no_parts
    check "ulimit $limit: SAVE loads" loads s
done
if unshare -Urm true 2>/dev/null; then
    export program data
    full() { # /mnt has little room
        mount -t tmpfs -o size=64k tmpfs /mnt && train SAVE=/mnt/s LOG=/mnt/log
        status=$?
        ls /mnt >left
        return $status
    }
    mounted() { mount --bind s s && train SAVE=s; } # as docker -v a:b does it: cannot be replaced
    export -f full mounted train
    unshare -Urm bash -c full
    check 'a full disk: one line' one_line $?
    check 'a full disk: no parts' eval '! grep -q part left'
    unshare -Urm bash -c mounted
    check 'SAVE is mounted: one line' one_line $?
    check 'SAVE is mounted: before training' eval "! grep -q '^ *1  ' out"
    check 'SAVE is mounted: what to do' grep -q 'mount its folder' err
    check 'SAVE is mounted: no parts' no_parts
else
    echo 'full disks: skipped, unshare cannot mount here'
fi

# A folder without the data set, or not in the place where it is looked for: what is there
no_data() { # no_data TEXT: make data says this
    (cd ../.. && ${AS:-} sh data/unpack.sh DATA=build/limits/set) >out 2>err
    check "$1: status" [ $? = 1 ]
    check "$1: one line" [ "$(wc -l <err)" = 1 ]
    check "$1" grep -q "^DATA=build/limits/set: .*$1" err
}
mkdir set && no_data 'there is no train-images-idx3-ubyte, nor a .gz of it, but nothing:'
touch set/train-images.idx3-ubyte set/mnist.npz
no_data 'no train-images-idx3-ubyte, nor a .gz of it, but mnist.npz train-images.idx3-ubyte:'
for kind in Fashion '' "It's"; do # as torchvision's root=
    raw="set/${kind}MNIST/raw" && mkdir -p "$raw" && touch "$raw/train-images-idx3-ubyte.gz"
done
in=DATA=build/limits/set
no_data "the data set lies deeper: try $in/FashionMNIST/raw $in/It'sMNIST/raw $in/MNIST/raw"
cp -R ../data set/all && cp set/all/t* set/ && rm set/t10k-labels-idx1-ubyte set/all/*
no_data 'there is no t10k-labels-idx1-ubyte, nor a .gz of it, but FashionMNIST It'
if unshare -U true 2>/dev/null; then # any other user
    chmod 0 set
    AS='unshare -U' no_data 'Permission denied'
    chmod 755 set
fi
rm -r set && touch set && no_data 'Not a directory'
rm set && no_data 'No such file or directory'

echo "limits: $passed passed, $failed failed"
[ $failed = 0 ]
