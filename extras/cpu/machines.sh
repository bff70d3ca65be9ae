#!/bin/bash
# machines.sh [NAME ...]: tries the last commit on other machines, as a new user would, and prints a
# table. For a release, as root on Debian, with debootstrap, git, python3-pip, qemu-user-static and
# 5 GB of room. What each machine has printed is in build/machines/NAME.TARGET.
#
# The table counts warnings, and lines that are new: those that this machine, which is tried first,
# does not print. Compilers' commands do not count, and numbers may differ.
targets=('run GPUS=2 EPOCHS=1 LIMIT=2000' test exercise 'check MODEL=lenet'
    'race ALLREDUCE=ring GPUS=2' 'cu FILE=extras/cpu/programs/heat.cu')
machines=(here sid bullseye g++-13 g++-14 g++-15 clang++ arm64 nvcc-13.0 nvcc-13.5)
[ "$MACHINES" ] || MACHINES=yes exec unshare --mount bash "$0" "$@" # mounts vanish at the end
cd "$(dirname "$0")/../.." || exit 1
repository=$PWD out=$PWD/build/machines root=
mkdir -p "$out"
make -s BACKEND=cpu build/doctest/doctest.h || exit

# debian SUITE PACKAGE...: what follows runs in this Debian, with these packages
debian() {
    root=$out/$1
    [ -e "$root/ready" ] || debootstrap --variant=minbase "$1" "$root" || exit
    touch "$root/ready"
    mountpoint -q "$root/proc" || mount -t proc proc "$root/proc" || exit
    chroot "$root" apt-get install -qq -y --no-install-recommends make gzip git \
        dataset-fashion-mnist "${@:2}" || exit
} >"$out/debian" 2>&1

# lines FILE: what counts of it, with numbers replaced
lines() {
    sed -E '/^[^ ]*(g|clang)\+\+[^ ]* -/d; /^[^ ]*nvcc -/d; s/-?[0-9]+([.][0-9]+)?(e[-+][0-9]+)?/N/g
        s/[ \t]+/ /g' "$1" | sort -u
}

# try NAME VARIABLE=value ... : each of the targets in a fresh clone
try() {
    local name=$1 tree=$out/tree row='' warnings=0 new=0 target word file
    rm -rf "$root$tree" && git clone -q "$repository" "$root$tree" && mkdir "$root$tree/build" &&
        cp -a build/doctest "$root$tree/build/" || exit
    for target in "${targets[@]}"; do
        [ "$target" ] || { row="$row - |"; continue; }
        word=${target%% *}
        file=$out/$name.${word##*/}
        # shellcheck disable=SC2086 # a target and its words
        if chroot "${root:-/}" env -C "$tree" HOME=/root BACKEND=cpu "${@:2}" make $target \
            >"$file" 2>&1 </dev/null; then row="$row yes |"; else row="$row **no** |"; fi
        warnings=$((warnings + $(grep -c 'warning[: ]' "$file")))
        if [ -e "$out/here.${word##*/}" ]; then
            comm -13 <(lines "$out/here.${word##*/}") <(lines "$file") >"$file.new"
            new=$((new + $(wc -l <"$file.new")))
        fi
    done
    echo "| $name |$row $warnings | $new |"
}

# nvcc VERSION: compile for a GPU of compute capability 7.5
nvcc() {
    python3 -m pip install -q --root-user-action=ignore --target "$out/cuda-$1" \
        "nvidia-cuda-nvcc==$1.*" "nvidia-nvvm==$1.*" "nvidia-cuda-crt==$1.*" \
        "nvidia-cuda-runtime==$1.*" nvidia-cuda-cccl || exit
    targets=('build/gpu/mgpu build/gpu/tests' '' '' '' '' '')
    try "nvcc-$1" BACKEND=cuda SM=75 NVCC="$(echo "$out/cuda-$1"/nvidia/cu*/bin/nvcc)"
}

echo '| machine | run | test | exercise | check | race | cu | warnings | new lines |'
echo '|---|---|---|---|---|---|---|---|---|'
[ $# -gt 0 ] || set -- "${machines[@]}"
for machine; do
    (case $machine in
    here) try here ;;
    sid | bullseye) debian "$machine" g++ && try "$machine" ;;
    arm64) # sid's cross compiler; the kernel starts what it has compiled under qemu, but slowly
        targets[1]='test T=-tc=allreduce*,split_batch*' targets[2]='exercise SECONDS=100' targets[4]=
        debian sid g++ g++-aarch64-linux-gnu && try arm64 CXX=aarch64-linux-gnu-g++ \
            QEMU_LD_PREFIX=/usr/aarch64-linux-gnu ;;
    nvcc-*) nvcc "${machine#nvcc-}" ;;
    clang++ | g++-*)
        targets=("${targets[0]}" "" "" "" "" "")
        debian sid "${machine/clang++/clang}" g++ && try "$machine" CXX="$machine" ;;
    esac)
done
