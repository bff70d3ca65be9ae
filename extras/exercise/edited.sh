#!/bin/sh
# sh extras/exercise/edited.sh [make variables]: `make exercise` judges what is edited in mgpu.cu,
# and names its lines. It builds in build/edited_exercise, from copies.
cd "$(dirname "$0")/../.." || exit 1
folder=build/edited_exercise
rm -rf $folder && mkdir -p $folder/build/cpu && cp -a Makefile mgpu.cu data extras $folder || exit 1
for built in cpp cpu/worker.o cpu/runtime.o cpu/judge cpu/flags cpu/headers.h cpu/headers.h.gch; do
    cp -a build/$built $folder/build/$built 2>/dev/null
done
cd $folder && cp mgpu.cu kept.cu || exit 1
yours='^void allreduce_yours(const PerDevice &grads) {'
variables=$*
# expect REGEX SED: after this edit the judge or the compiler prints such a line
expect() {
    sed "$2" kept.cu >mgpu.cu
    ! cmp -s mgpu.cu kept.cu || { echo "edited.sh: no edit: $2"; exit 1; }
    # shellcheck disable=SC2086
    make -s exercise GPUS=2 SEED=7 $variables >out 2>&1
    grep -q "$1" out || { echo "edited.sh: $2: nothing says $1"; cat out; exit 1; }
}
line=$(grep -n "$yours" kept.cu | cut -d: -f1)
copy=$(awk -v first="$line" 'NR > first && /copyto/ { print NR; exit }' kept.cu)
own='void mine(Tensors t) { allreduce(t); }\nauto own = [](int) {};'
expect '^yours: passed\. ' "s/$yours/$own\n&\n    return mine(flatten(grads));/"
expect "^judge: yours.*mgpu.cu:$((copy + 2)): " "s/$yours/\n\n&/; ${copy}s/i\]/0]/"
expect "mgpu.cu:$((line + 1)): the host accesses" "s/$yours/&\n    *(int *)nullptr = grads.size();/"
expect "^mgpu.cu:$((line + 1)):.*error: " "s/$yours/&\n    missing(grads);/"
expect '^mgpu.cu:.*#error relu_kernel is' 's/^__global__ void relu_kernel/void relu_kernel/'
expect "It is the tutorial's own: an edit outside" '/^__global__ void add_kernel/,/^}/s/+=/-=/'
expect '^yours: passed' 's/^    std::vector<int> shape;$/&\n    int own[100] = {};/'
echo 'extras/exercise/edited.sh: what is edited is judged'
