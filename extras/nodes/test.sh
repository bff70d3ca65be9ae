#!/bin/sh
# What several nodes must do, tried on this machine: learn what one process with as many devices
# learns, judge their ring, notice what differs between them, end together.
#   test.sh ONE MPI MPIRUN...   the program without MPI, the one with it, mpirun and its options
# shellcheck disable=SC2086 # $training and $mpirun are several words
set -eu
one=$1 mpi=$2
shift 2
mpirun=$*
out=build/nodes
mkdir -p $out
passed=0
pass() {
    echo "passed: $*"
    passed=$((passed + 1))
}
fail() {
    cat $out/text
    echo "FAILED: $*"
    echo "$passed passed, 1 failed"
    exit 1
}

# same NODES GPUS ALGORITHM "NAME=value ...": the parameters, bit by bit, and the accuracies of one
# process with four devices. It sums in the same order by ALGORITHM, and all shards have the same
# shapes, those of the test set, too: other roundings would be other bits. The log's losses are
# rounded to 6 digits.
same() {
    name="$1 nodes, GPUS=$2: $training $4"
    rm -f $out/one.safetensors $out/nodes.safetensors
    $one GPUS=4 ALLREDUCE="$3" LOG=$out/one.csv SAVE=$out/one.safetensors $training >$out/text 2>&1 ||
        fail "one process"
    $mpirun -n "$1" "$mpi" GPUS="$2" LOG=$out/nodes.csv SAVE=$out/nodes.safetensors $training $4 \
        >$out/text 2>&1 || fail "$name"
    cmp $out/one.safetensors $out/nodes.safetensors >>$out/text 2>&1 ||
        fail "$name: not the parameters of one process"
    paste -d, $out/one.csv $out/nodes.csv | tee $out/text | awk -F, '
        NR > 1 { off = $2 - $(NF / 2 + 2); bad += off * off > 4e-12 || $3 != $(NF / 2 + 3) }
        END { exit bad || NR < 3 }' || fail "$name: not the log of one process"
    pass "$name"
}
# The last minibatch is uneven: 10 samples; or 3, which leaves a node, or a device, without any
training="MODEL=lenet LIMIT=550 BATCH=90 EPOCHS=5 EVALUATE_ALL=1"
same 2 2 tree "ALLREDUCE=ring OVERLAP=1"
same 4 1 ring "ALLREDUCE=ring"
training="MODEL=lab_cnn LIMIT=550 BATCH=90 EPOCHS=5"
same 2 2 tree ""
training="MODEL=resnet18 LIMIT=13 BATCH=5 EPOCHS=2 LR=0.01"
same 2 2 tree "ALLREDUCE=ring OVERLAP=1"

# Sums by MPI of three nodes, in several sizes: after an epoch, all have the same bits
$mpirun -n 3 "$mpi" GPUS=1 $training OVERLAP=1 LOG=$out/log >$out/text 2>&1 || fail "three nodes"
pass "three nodes, sums by MPI"

$mpirun -n 3 "$mpi" exercise >$out/text 2>&1 || fail "exercise"
grep -q '^ring_between_nodes: passed on 3 nodes: 12 messages' $out/text || fail "exercise"
pass "exercise"

# differs TEXT NAME=value ...: node 1 has these options, and says what is wrong with them
mkdir -p $out/data
for file in build/data/t10k-*; do
    cp "$file" $out/data/
    cp "$file" "$out/data/train-${file#build/data/t10k-}"
done
differs() {
    text=$1
    shift
    few="LIMIT=100 EPOCHS=1 LOG=$out/log"
    if $mpirun -n 1 "$mpi" $few : -n 1 "$mpi" $few "$@" >$out/text 2>&1; then
        fail "accepted: $*"
    fi
    grep -q "^mgpu: node 1: $text" $out/text || fail "not said: $text"
    pass "node 1 is refused: $*"
}
differs 'its BATCH=128 is not BATCH=256' BATCH=128
differs 'its GPUS=2 is not GPUS=1' GPUS=2
differs 'its OVERLAP=1 is not OVERLAP=0' OVERLAP=1
differs 'its CHECKS=0 is not CHECKS=1' CHECKS=0
differs 'its data=.* is not data=.*, as on node 0' DATA=$out/data
differs 'cannot read .*no-such-folder' DATA=no-such-folder

# Under another MPI's mpirun or by srun, processes that do not know of each other
for launcher in OMPI_COMM_WORLD_SIZE PMI_SIZE SLURM_STEP_NUM_TASKS; do
    if env $launcher=2 "$mpi" LIMIT=100 EPOCHS=1 LOG=$out/log >$out/text 2>&1; then
        fail "accepted: $launcher=2"
    fi
    grep -q "^mgpu: $launcher=2, but MPI knows of 1: this program was built with" $out/text ||
        fail "not said: $launcher=2"
    pass "a process that does not know of the others is refused: $launcher=2"
done

# The last line names every node's devices
$mpirun -n 2 "$mpi" GPUS=2 LIMIT=100 EPOCHS=1 LOG=$out/log >$out/text 2>&1 || fail "two nodes"
grep -q '^test acc: .* sec/epoch on \[gpu(0), gpu(1)\] of node 0, \[gpu(0), gpu(1)\] of node 1$' \
    $out/text || fail "the last line"
pass "the last line names the devices"

# mpirun says what is wrong with HOSTS
file="$out/bob's hosts"
if ${MAKE:-make} run HOSTS="$file" >$out/text 2>&1; then fail "accepted: $file"; fi
grep -v '^backend' $out/text | grep -qF "$file" || fail "mpirun does not name $file"
pass "mpirun names a HOSTS that is not there"

# Node 0 reads INIT for all: two trainings of an epoch are one of two epochs
few="LIMIT=40 BATCH=20 SHUFFLE=0 LOG=$out/log"
first=$out/first.safetensors second=$out/second.safetensors both=$out/both.safetensors
$mpirun -n 4 "$mpi" $few EPOCHS=2 SAVE=$both >$out/text 2>&1 || fail "four nodes"
$mpirun -n 4 "$mpi" $few EPOCHS=1 SAVE=$first >$out/text 2>&1 || fail "four nodes"
$mpirun -n 4 "$mpi" $few EPOCHS=1 SAVE=$second INIT=$first >$out/text 2>&1 || fail "INIT"
cmp $second $both || fail "INIT: other parameters"
pass "four nodes start from INIT, and reach the same parameters"

# A node is killed in the middle of a training, or before it has met the others
killed() { # A text of the program, or none, after which node 1 is killed
    : >$out/text # without the words of an earlier one
    $mpirun -n 2 "$mpi" LOG=$out/log >$out/text 2>&1 &
    job=$!
    tries=0
    until watchers=$(ps -o pid= --ppid $job) && nodes=$(for watcher in $watchers; do
        ps -o pid= --ppid "$watcher"
    done) && [ "$(echo "$nodes" | wc -w)" = 2 ] && { [ ! "$1" ] || grep -q "$1" $out/text; }; do
        tries=$((tries + 1))
        [ $tries -lt 600 ] || fail "two nodes do not start"
        sleep 0.1
    done
    kill -9 "$(echo "$nodes" | tail -n 1 | tr -d ' ')"
    start=$(date +%s)
    if wait $job; then fail "a node was killed, and mpirun ends with status 0"; fi
    [ $(($(date +%s) - start)) -le 10 ] || fail "a node was killed, and the others went on"
    for pid in $nodes $watchers; do # Z: it has ended
        case $(ps -o stat= -p "$pid") in
            '' | Z*) ;;
            *) fail "a node was killed, another one is left" ;;
        esac
    done
    grep -q '^mgpu: node 1 was killed by signal 9 (Killed): ' $out/text ||
        fail "node 1 is not named"
}
killed 'first minibatch'
grep -q 'mpirun ends this node: another one has stopped' $out/text || fail "a node was killed"
killed '' # before it has met the others
pass "a node that is killed is named, and ends all"
# Another MPI behind the same name, or another version, builds all again
for version in 4 5; do
    # shellcheck disable=SC2016 # the words of another script
    printf '#!/bin/sh\n[ "$1" = -show ] || echo "\043define OMPI_MAJOR_VERSION %s"\n' $version \
        >$out/mpicxx
    chmod +x $out/mpicxx
    ${MAKE:-make} -s build/mpi_version MPICXX=$out/mpicxx >$out/text 2>&1 || fail "version of MPI"
    cp build/mpi_version $out/version$version
done
if cmp -s $out/version4 $out/version5; then fail "another MPI is not noticed"; fi
rm -f build/mpi_version
pass "another MPI is noticed"
echo "$passed passed, 0 failed"
