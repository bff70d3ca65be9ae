# shellcheck shell=bash
# What .ci/run and .ci/release share: how a step is run, what it needs, and how to copy this tree.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null
export CI=true WERROR=1
mkdir -p build/ci
passed=0

# step NAME COMMAND...: runs the command; the first one to fail ends this script
step() {
    echo "=== $1"
    local start=$SECONDS
    if ! "${@:2}"; then
        echo "=== $1: FAILED"
        echo "$passed passed, 1 failed"
        exit 1
    fi
    echo "=== $1: passed in $((SECONDS - start)) s"
    passed=$((passed + 1))
}
skip() { echo "=== $1: skipped, $2"; }

# begin FUNCTION: it runs beside what follows. `step NAME ended FUNCTION` waits for it and shows
# what it has printed, or runs it now if it was not begun.
declare -A jobs
begin() {
    "$1" >"build/ci/$1" 2>&1 & jobs[$1]=$!
}
ended() {
    if [ ! "${jobs[$1]:-}" ]; then "$1"; return; fi
    local status=0
    wait "${jobs[$1]}" || status=$?
    cat "build/ci/$1"
    return $status
}

# commands LIST: each line has what a command must print, and a command, which must succeed
commands() {
    local want command start
    while IFS='|' read -r want command <&3; do
        if [ ! "$command" ]; then continue; fi
        start=$SECONDS
        if ! bash -c "$command" >build/ci/said 2>&1 || ! grep -qE -- "$want" build/ci/said; then
            cat build/ci/said
            echo "$command: failed, or does not print $want"
            return 1
        fi
        echo "$((SECONDS - start)) s  $command"
    done 3<<<"$1"
}
# fails TEXT COMMAND...: the command fails and prints the text
fails() {
    local out
    if out=$("${@:2}" 2>&1); then echo "did not fail: ${*:2}"; return 1; fi
    grep -qF -- "$1" <<<"$out" || { echo "$out"; return 1; }
}

# copy NAME: build/copies/NAME is a copy of this tree, with what is built
copy() {
    local to=build/copies/$1 built
    mkdir -p "$to/build" && cp -a Makefile mgpu.cu tests.cu data README.md extras "$to/" &&
        for built in cpu cpp data doctest; do
            if [ -d build/$built ]; then cp -a build/$built "$to/build/" || return; fi
        done
}

# ----- What is needed ---------------------------------------------------------------------------

install() {
    [ "$(id -u)" = 0 ] || { echo "please install $*"; return 1; }
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq && apt-get install -qq -y --no-install-recommends "$@"
}
get() { install "$@" >/dev/null 2>&1 || true; } # what a step can do without: a mirror may be away
missing=()
for package in g++ make gzip; do
    command -v "$package" >/dev/null || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then step "install ${missing[*]}" install "${missing[@]}"; fi
# NODES wants an MPI, pictures want matplotlib, make grade bubblewrap.
# (Another python3 than the system's does not see Debian's packages.)
has_mpi() { command -v mpicxx >/dev/null && command -v mpirun >/dev/null; }
has_matplotlib() {
    python3 -c 'import matplotlib' 2>/dev/null || [ -x build/pictures_venv/bin/python ]
}
has_tools() { command -v bwrap >/dev/null && command -v python3 >/dev/null; }
has_mpi || get openmpi-bin libopenmpi-dev
{ has_tools && has_matplotlib; } ||
    get python3 python3-venv python3-matplotlib bubblewrap
python3 -c 'import ensurepip' 2>/dev/null || get python3 python3-venv
has_matplotlib || make pictures_venv >/dev/null 2>&1 || rm -rf build/pictures_venv
export mpi=
if has_mpi; then mpi=yes; else skip NODES 'no MPI'; fi

# nvcc, and those of three architectures that it knows. It compiles what is never run: host code at
# -O0, which takes half of the time.
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null || true)
sms=
for sm in 75 90 120; do
    if [ "$nvcc" ] && "$nvcc" --list-gpu-code | grep -x "sm_$sm" >/dev/null; then
        sms="$sms $sm"
    else
        skip "nvcc, SM $sm" 'no nvcc that knows it'
    fi
done
# shellcheck disable=SC2016 # the words of another script
printf '#!/bin/bash\nexec %q --resource-usage "${@/#-O3/-O0}"\n' "$nvcc" >build/ci/nvcc_host_O0
chmod +x build/ci/nvcc_host_O0
make_cuda() { make -O BACKEND=cuda WERROR=1 NVCC=build/ci/nvcc_host_O0 "$@"; }

# A program of one's own, for make cu
printf '%s\n' '#include <cstdio>' '__global__ void k(int *p) { *p = 31; }' \
    'int main() { int *p, h; cudaMalloc(&p, 4); k<<<1, 1>>>(p);' \
    'cudaMemcpy(&h, p, 4, cudaMemcpyDeviceToHost); printf("%d\n", h); }' >build/ci/own.cu
