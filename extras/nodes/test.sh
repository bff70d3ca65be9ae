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

# same NODES GPUS ALGORITHM OPTIONS: for 5 epochs, the losses of one process that adds in the same
# order by ALGORITHM. (Another order is another rounding, which training makes large.)
same() {
    name="$1 nodes, GPUS=$2: $training $4"
    $one --gpus 4 --allreduce "$3" --log $out/one.csv $training >$out/text 2>&1 ||
        fail "one process"
    $mpirun -n "$1" "$mpi" --gpus "$2" --log $out/nodes.csv $training $4 >$out/text 2>&1 ||
        fail "$name"
    paste -d, $out/one.csv $out/nodes.csv | tee $out/text | awk -F, '
        NR > 1 { off = $2 - $(NF / 2 + 2); bad += off * off > 1e-10 || $3 != $(NF / 2 + 3) }
        END { exit bad || NR != 6 }' || fail "$name: not the losses of one process"
    pass "$name"
}
# The last minibatch is uneven: 10 samples; or 3, which leaves a node, or a device, without any
training="--model lenet --limit 550 --batch 90 --epochs 5"
same 2 2 tree "--allreduce ring --overlap"
same 4 1 tree ""
training="--model lab_cnn --limit 550 --batch 90 --epochs 5"
same 2 2 tree ""
same 4 1 ring "--allreduce ring"
training="--model resnet18 --limit 13 --batch 5 --epochs 5 --lr 0.01 --no-first-check"
same 2 2 tree "--allreduce ring --overlap"

$mpirun -n 3 "$mpi" --exercise >$out/text 2>&1 || fail "exercise"
grep -q '^ring_between_nodes: passed on 3 nodes: 12 messages' $out/text || fail "exercise"
pass "exercise"

# differs TEXT OPTION...: node 1 has these options, and says what is wrong with them
mkdir -p $out/data
for file in data/t10k-*.gz; do
    cp "$file" $out/data/
    cp "$file" "$out/data/train-${file#data/t10k-}"
done
differs() {
    text=$1
    shift
    few="--limit 100 --epochs 1 --log $out/log"
    if $mpirun -n 1 "$mpi" $few : -n 1 "$mpi" $few "$@" >$out/text 2>&1; then
        fail "accepted: $*"
    fi
    grep -q "^mgpu: node 1: $text" $out/text || fail "not said: $text"
    pass "node 1 is refused: $*"
}
differs 'its BATCH=128 is not BATCH=256' --batch 128
differs 'its GPUS=2 is not GPUS=1' --gpus 2
differs 'its OVERLAP=1, is not OVERLAP=0,' --overlap
differs 'its REPLICA_CHECK=0 is not' --no-replica-check
differs 'its DATA=.* is not DATA=data' --data $out/data
differs 'no-such-folder' --data no-such-folder

# The last line names every node's devices
$mpirun -n 2 "$mpi" --gpus 2 --limit 100 --epochs 1 --log $out/log >$out/text 2>&1 || fail "two nodes"
grep -q '^test acc: .* sec/epoch on \[gpu(0), gpu(1)\] of node 0, \[gpu(0), gpu(1)\] of node 1$' \
    $out/text || fail "the last line"
pass "the last line names the devices"

# unreadable TEXT LINE: a file with this line, in which mpirun would find no machine
unreadable() {
    printf "%b" "$2" >$out/hosts
    if ${MAKE:-make} -n run HOSTS=$out/hosts >$out/text 2>&1; then fail "accepted: $2"; fi
    grep -qF "HOSTS=$out/hosts: $1" $out/text || fail "not said: $1"
    pass "HOSTS is refused: $1"
}
unreadable 'a file with a machine in each line' '\n# pc01\n'
unreadable 'its lines end as those of Windows do' 'localhost slots=2\r\n'
unreadable 'line 2, localhost slots=two: pc01, say' '# two\nlocalhost slots=two\n'
unreadable 'line 1, localhost; slots=2:' 'localhost; slots=2\n'
printf ' localhost slots=2 max_slots=4 # this one\n\n# pc01\n' >$out/hosts
${MAKE:-make} -n run HOSTS=$out/hosts >$out/text 2>&1 || fail "HOSTS with comments"
pass "HOSTS with comments"

# The order in which MPI adds the numbers of four nodes changes with OVERLAP
few="--limit 40 --batch 20 --log $out/log"
saved=$out/save.safetensors
$mpirun -n 4 "$mpi" $few --epochs 2 --save $out/both.safetensors >$out/text 2>&1 || fail "four nodes"
$mpirun -n 4 "$mpi" $few --epochs 1 --save $saved >$out/text 2>&1 || fail "four nodes"
few="$few --epochs 2 --resume $saved --save $saved"
if $mpirun -n 4 "$mpi" $few --overlap >$out/text 2>&1; then fail "resumed in another order"; fi
grep -q 'which was lenet .* OVERLAP=0, .*, not lenet .* OVERLAP=1,' $out/text || fail "OVERLAP"
if $mpirun -n 1 "$mpi" $few >$out/text 2>&1; then fail "resumed on one node"; fi
grep -q 'which was .*, 4 nodes with .*, not ' $out/text || fail "four nodes"
$mpirun -n 4 "$mpi" $few >$out/text 2>&1 || fail "resumed"
cmp $saved $out/both.safetensors || fail "resumed: other parameters"
pass "four nodes go on in the same order of additions, to the same parameters"

# A node dies in the middle of a training
$mpirun -n 2 "$mpi" --log $out/log >$out/text 2>&1 &
job=$!
tries=0
until grep -q 'first minibatch' $out/text; do
    tries=$((tries + 1))
    [ $tries -lt 600 ] || fail "two nodes do not start"
    sleep 0.1
done
nodes=$(ps -o pid= --ppid $job)
kill -9 "$(echo "$nodes" | tail -n 1 | tr -d ' ')"
start=$(date +%s)
if wait $job; then fail "a node was killed, and mpirun ends with status 0"; fi
[ $(($(date +%s) - start)) -le 10 ] || fail "a node was killed, and the others went on"
for pid in $nodes; do # Z: it has ended
    case $(ps -o stat= -p "$pid") in
        '' | Z*) ;;
        *) fail "a node was killed, another one is left" ;;
    esac
done
grep -q 'mpirun ends this node: another one has stopped' $out/text || fail "a node was killed"
pass "a node that is killed ends all"
echo "$passed passed, 0 failed"
