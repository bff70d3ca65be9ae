#!/bin/bash
# limits.sh [TIMES]: trainings that are killed, two at once with one SAVE, CUDA calls that fail, and
# too little memory, too few files, too little room on a disk. What is left on the disk must be the
# old file or the new one, and what is said one line. TIMES: how often, by default 3.
times=${1:-3}
program=$(pwd)/build/cpu/program
failing=$(pwd)/build/limits/failing
data=$(pwd)/build/data
folder=$(pwd)/build/limits/run
passed=0 failed=0
rm -rf "$folder" && mkdir -p "$folder" && cd "$folder" || exit 1

check() { # check WHAT COMMAND...
    if "${@:2}"; then passed=$((passed + 1)); else
        failed=$((failed + 1))
        echo "FAILED: $1" | tee -a ../failed
        head -c 500 err 2>/dev/null
    fi
}
train() { # train NAME=value ...: 4 epochs of two minibatches, unless the words say otherwise
    case " $* " in *" EPOCHS="*) ;; *) set -- EPOCHS=4 "$@" ;; esac
    case " $* " in *" LOG="*) ;; *) set -- LOG=log "$@" ;; esac
    "$program" DATA="$data" LIMIT=60 BATCH=30 "$@" >out 2>err
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
not_the_data() { ! grep -q 'remove it' err; }

# Killed at any moment: the old file or the new one. After KILL its part may stay
train SAVE=s EPOCHS=1
for i in $(seq "$times"); do
    for signal in KILL TERM HUP; do # (INT is ignored in the background)
        {
            train SAVE=s SEED="$i" &
            sleep "0.$((RANDOM % 10))$((RANDOM % 10))"
            pkill -"$signal" -P $! program
            wait
        } 2>/dev/null
        check "killed by $signal: SAVE loads" loads s
        [ $signal = KILL ] || check "killed by $signal: no parts" no_parts
        rm -f ./*.part ./*.test
    done
done

# Two at once with one SAVE: the file is whole, from the one that wrote it last
for i in $(seq "$times"); do
    "$program" DATA="$data" LIMIT=60 BATCH=30 EPOCHS=9 LOG=l1 SAVE=both >out1 2>err1 &
    one=$!
    train EPOCHS=9 SAVE=both SEED=1
    wait $one || true
    check "two at once: SAVE loads" loads both
    check "two at once: no parts" no_parts
done

# A CUDA call that fails, each in turn: no part, the SAVE as it was
train SAVE=s EPOCHS=1 && cp s before
calls=$(COUNT=1 "$failing" DATA="$data" LIMIT=60 BATCH=30 GPUS=2 EPOCHS=1 LOG=log \
    SAVE=t 2>&1 >out | sed -n 's/^calls: //p')
for i in $(seq $((4 * times))); do
    at=$((1 + RANDOM * calls / 32768))
    FAIL_AT=$at "$failing" DATA="$data" LIMIT=60 BATCH=30 GPUS=2 EPOCHS=1 LOG=log \
        SAVE=s >out 2>err
    check "call $at of $calls fails: one line" one_line $?
    check "call $at of $calls fails: no parts" no_parts
    check "call $at of $calls fails: SAVE" eval 'cmp -s s before || loads s'
done

# A folder without the data set, or not in the place where it is looked for: what is there
no_data() { # no_data TEXT WORD...: make data says this
    (cd ../../.. && sh data/unpack.sh DATA=build/limits/run/set) >out 2>err
    check "$1: status" [ $? = 1 ]
    check "$1: one line" [ "$(wc -l <err)" = 1 ]
    check "$1" grep -qF "DATA=build/limits/run/set: $1" err
}
mkdir set && no_data 'there is no train-images-idx3-ubyte, nor a .gz of it, but nothing:'
touch set/train-images.idx3-ubyte set/mnist.npz
no_data 'there is no train-images-idx3-ubyte, nor a .gz of it, but mnist.npz train-images.idx3-ubyte:'
for kind in Fashion '' "It's"; do # as torchvision's root=
    raw="set/${kind}MNIST/raw" && mkdir -p "$raw" && touch "$raw/train-images-idx3-ubyte.gz"
done
in=DATA=build/limits/run/set
no_data "the data set lies deeper: try $in/FashionMNIST/raw $in/It'sMNIST/raw $in/MNIST/raw"
cp -R ../../data set/all && cp set/all/t* set/ && rm set/t10k-labels-idx1-ubyte set/all/*
no_data 'there is no t10k-labels-idx1-ubyte, nor a .gz of it, but FashionMNIST It'
if unshare -U true 2>/dev/null; then # any other user
    chmod 0 set
    (cd ../../.. && unshare -U sh data/unpack.sh DATA=build/limits/run/set) >out 2>err
    check 'a folder of another user: status' [ $? = 1 ]
    check 'a folder of another user' grep -qx "DATA=.*/set: Permission denied" err
    chmod 755 set
fi
rm -r set && touch set && no_data 'Not a directory'
rm set && no_data 'No such file or directory'

# make clean
mkdir -p project/data project/extras && cd project || exit 1
cp ../../../../Makefile . && cp ../../../../extras/parts.mk extras/
mkdir -p build/a build/b && touch build/a/1 build/b/2
if unshare -Urm true 2>/dev/null; then
    unshare -Urm sh -c 'mount --bind build build && mount -o remount,bind,ro build && make -s clean' \
        2>../err
    check 'clean of what cannot be removed: status' [ $? != 0 ]
    check 'clean of what cannot be removed: a line' [ "$(grep -vc '^make' ../err)" = 1 ]
fi
make -s clean
check 'clean' [ ! -e build ]
cd .. || exit 1

# Too little of something
limited() { # limited NAME COMMAND: in a shell with that limit
    rm -f ./*.part ./*.test
    (eval "$2"; train SAVE=s GPUS=2) 2>/dev/null
    status=$?
    check "$1: one line, status $status" one_line $status
    check "$1: not the data" not_the_data
    check "$1: no parts" no_parts
    check "$1: SAVE loads" loads s
}
for n in 4 5 6 8 10 16; do limited "ulimit -n $n" "ulimit -n $n"; done
for n in 1 100 400; do limited "ulimit -f $n" "ulimit -f $n"; done
for mb in 20 60 200 800; do limited "ulimit -v $mb MB" "ulimit -v $((1024 * mb))"; done

# A full disk, a SAVE that cannot be: said before training
cannot() { # cannot WHAT SAVE
    train SAVE="$2"
    check "$1" one_line $?
    check "$1: before training" eval "! grep -q '^ *1  ' out"
    check "$1: no parts" no_parts
}
rm -f ./*.part ./*.test
mkdir -p folder && cannot 'SAVE is a folder' folder
cannot 'SAVE in a file' s/t
train SAVE=/proc/none
check 'SAVE where nothing can be' one_line $?
if unshare -Urm true 2>/dev/null; then
    full() { # /mnt has little room
        mount -t tmpfs -o size=64k tmpfs /mnt && train SAVE=/mnt/s LOG=/mnt/log
        status=$?
        ls /mnt >left
        return $status
    }
    export -f full train
    export program data
    unshare -Urm bash -c full
    check 'a full disk: one line' one_line $?
    check 'a full disk: no parts' eval '! grep -q part left'
    # A SAVE that is mounted, as docker -v a:b does it, cannot be replaced
    mounted() {
        mount --bind s s && train SAVE=s
    }
    export -f mounted
    unshare -Urm bash -c mounted
    check 'SAVE is mounted: one line' one_line $?
    check 'SAVE is mounted: before training' eval "! grep -q '^ *1  ' out"
    check 'SAVE is mounted: what to do' grep -q 'mount its folder' err
    check 'SAVE is mounted: no parts' no_parts
    # A picture that was good stays
    picture() {
        pictures=$(realpath ../../../extras/measure/pictures.py)
        mount -t tmpfs -o size=400k tmpfs /mnt && cp log /mnt && cd /mnt &&
            python3 "$pictures" accuracy RUNS=log && {
            head -c 1000000 /dev/zero >fill
            python3 "$pictures" accuracy RUNS=log && return 1
            grep -q '</svg>' build/plot.svg
        }
    }
    export -f picture
    train
    if [ -e ../../../extras/measure/pictures.py ] && python3 -c 'import matplotlib' 2>/dev/null; then
        check 'a picture on a full disk' unshare -Urm bash -c picture >out 2>err
    fi
else
    echo 'full disks: skipped, unshare cannot mount here'
fi
echo "limits: $passed passed, $failed failed"
[ $failed = 0 ]
