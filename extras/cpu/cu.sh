#!/bin/sh
# cu.sh WORD ...: compiles the program $CU_FILE, one or several .cu files, and starts it with these
# words, in the folder of its first file. $CU_INCLUDE are folders with headers. make cu says how:
# CU_ON is gpu or cpu, or nvcc, which only compiles; CU_COMPILE is the compiler with its flags,
# CU_C that for C, CU_OBJECTS what is compiled already; CHECK: asan, race, lanes or none.

# one_a_line PATHS: a path, which may have spaces, or several, then with quotes around such a one
one_a_line() {
    lines=$1
    if [ ! -e "$1" ]; then lines=$(printf '%s' "$1" | xargs printf '%s\n' 2>/dev/null); fi
    printf '%s\n' "${lines:-$1}"
}
files=$(one_a_line "$CU_FILE")
folders=$(one_a_line "$CU_INCLUDE")
if [ ! "$files" ]; then
    echo 'make cu needs a program, such as make cu FILE=own.cu' >&2
    exit 1
fi
case $CHECK in '' | asan | race | lanes) ;; *)
    echo "CHECK=$CHECK is unknown: use asan, race or lanes" >&2
    exit 1 ;;
esac
if [ "$CU_GPUS" ] && [ ! "$CUDA_CPU_DEVICES" ]; then export CUDA_CPU_DEVICES="$CU_GPUS"; fi
if [ "$folders" ]; then
    printf '%s\n' "$folders" | while read -r folder; do
        if [ ! -d "$folder" ]; then
            echo "no such folder: $folder" >&2
            exit 1
        fi
    done || exit 1
fi
words() { # one in each line of $files, as "$@" of who calls: eval "$(words)"
    printf 'set --'
    printf '%s\n' "$files" | sed "s/'/'\\\\''/g; s/^/ '/; s/\$/'/" | tr -d '\n'
}
arguments=$(for word; do printf '%s' "$word" | sed "s/'/'\\\\''/g; s/^/ '/; \$s/\$/'/"; done)
eval "$(words)"
for file; do
    if [ ! -f "$file" ]; then
        echo "no such file: $file" >&2
        exit 1
    fi
done
name=$(basename "$1")
name=${name%.*}
mkdir -p build/cu
tree=$(mktemp -d "$PWD/build/cu/$name.XXXXXX") || exit 1 # another of this name may run
trap 'rm -rf "$tree"' EXIT
trap 'exit 1' HUP INT TERM
program=$tree/$name
program_folder=$(cd "$(dirname "$1")" && pwd) || exit 1

# translate FILE: to C++, under its absolute path in $tree, with the headers that it includes from
# beside it or from $folders. What lies there and is no header, g++ finds by -iquote and CPATH.
translate() {
    folder=$(cd "$(dirname "$1")" && pwd -P)
    to=$tree/tree$folder/$(basename "$1")
    if [ -e "$to" ]; then return 0; fi
    mkdir -p "$tree/tree$folder"
    begin='' end=
    case $1 in *.c) begin='extern "C" {' end='}' ;; esac
    { printf '%s\n#line 1 "%s"\n' "$begin" "$1"; sh extras/cpu/to_cpp.sh "$1" && echo "$end"; } \
        >"$to" || return 1
    sed -nE 's/^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">].*/\1/p' "$1" | while read -r header; do
        printf '%s\n' "$(dirname "$1")" "$folders" | while read -r from; do
            if [ ! "$from" ] || [ ! -f "$from/$header" ]; then continue; fi
            from=$from/$header
            translate "${from#./}"
            exit
        done || exit 1
    done
}

# refused_by_nvcc FILE: clang++'s CUDA front end tells what nvcc would refuse: what is the host's in
# a kernel, and a kernel that is none. It has the stand-in's headers, not CUDA's, so it is believed
# only about the program's own lines and names, and about std::max.
refused_by_nvcc() {
    case $1 in *.c) return ;; esac
    CPATH=$(printf '%s\n' "$folders" | paste -s -d : -) LC_ALL=C clang++ -std=c++17 -x cuda -w \
        -nocudainc -nocudalib -nobuiltininc -idirafter "$(clang++ -print-resource-dir)/include" \
        --cuda-device-only --cuda-gpu-arch=sm_75 -fgpu-rdc -fsyntax-only -ferror-limit=0 \
        -Xclang -fcuda-allow-variadic-functions -Xclang -fno-cuda-host-device-constexpr $openmp \
        -D__NVCC__ -D__CUDACC__ -I. -Iextras/cpu -include extras/cpu/as_cuda.h "$1" 2>&1 | awk '
        function refused(what) {
            sub(/:[0-9]+: error: /, ": notice: nvcc would refuse this: ", what)
            sub(/no matching function for call to/, "a call of the __host__ function", what)
            if (!said[what]++) print what
        }
        /: error: / { held = "" }
        /^(\/usr\/|extras\/cpu\/([^\/]*\.h|cuda\/|nvtx3\/))/ && !/algo.*\.h:.*: note: / { next }
        /: error: .*(call to non-global|must have void|cannot use .throw|cannot use variable-len)/ {
            refused($0)
        }
        /: error: (no matching function for call|reference to __host__)/ { held = $0 }
        /: note: .*(call to __host__ function from __|declared here)/ && held { refused(held) }'
}

# lacking COMMAND...: what has failed, a compiler's command, again: a line if it does not find MPI,
# a name of CUDA, or a header or name of NVIDIA's samples
lacking() {
    (export LC_ALL=C; "$@") 2>&1 | awk '
        /the stand-in lacks it/ { exit }
        /fatal error: .?mpi\.h|undefined (reference to |symbol: ).?MPI_/ {
            print "make cu: a program with MPI needs the compiler of MPI: CXX=mpicxx"
            exit
        }
        /: fatal error: / && match($0, /(helper_|nvrtc_helper|rendercheck_)[a-zA-Z_0-9.]*/) ||
        /: error: .*(not (been )?declared|not name a type|not a member|unknown type|undeclared)/ &&
        match($0, /[^A-Za-z_0-9](cu|CU|sdk|tex|surf|__)[A-Za-z_0-9]*[`\047]/) {
            name = substr($0, RSTART, RLENGTH)
            gsub(/[^A-Za-z_0-9.]/, "", name)
            sub(/(:[0-9]+)?: (fatal )?error: .*/, "")
            print $0 ": " name ": the stand-in lacks it, or CUDA has no such name"
            exit
        }' >&2
}

# is_c FILE: one that nvcc compiles as C, and that can be here, where CUDA's headers are C++
is_c() {
    case $1 in *.c) ;; *) return 1 ;; esac
    $CU_C -iquote "$folder" -x c -M "$1" >"$tree/includes" 2>/dev/null &&
        ! grep -qE '/cuda(_runtime(_api)?)?\.h' "$tree/includes"
}

# warnings FILE: what g++ has said, but not that a kernel is only declared, and of -Wparentheses
# only what it says of if (a = b)
warnings() {
    awk '/^[^ ].*:$|^ +from / {
            held = held $0 "\n"
            next
        }
        /^[^ ]/ && !/: note: / {
            dropped = /: warning: (inline function|suggest)/ && !/truth value/
            if (dropped) held = ""
        }
        !dropped {
            printf "%s", held
            print
            held = ""
        }' "$1"
}

if [ "$folders" ]; then
    CPATH=$(printf '%s\n' "$folders" | while read -r from; do
        if [ "$CU_ON" = cpu ]; then printf '%s\n' "$tree/tree$(cd "$from" && pwd -P)"; fi
        printf '%s\n' "$from"
    done | paste -s -d : -)${CPATH:+:$CPATH}
    export CPATH
fi

openmp=
if grep -qE '^[ \t]*#[ \t]*(pragma[ \t]+omp[ \t]|include[ \t]*[<"]omp\.h)' "$@"; then
    openmp=-fopenmp
fi
# CU_COMPILE and CU_OBJECTS are lists of words
# shellcheck disable=SC2086
if [ "$CU_ON" = nvcc ]; then
    status=0
    for file; do
        if $CU_COMPILE ${openmp:+-Xcompiler $openmp} "$file" -o /dev/null; then
            echo "$file: nvcc compiles it for a GPU"
        else
            status=1
        fi
    done
    exit $status
elif [ "$CU_ON" = gpu ]; then
    if [ $# -gt 1 ]; then CU_COMPILE="$CU_COMPILE -rdc=true"; fi # extern __device__ variables
    driver=
    if grep -q '^[ \t]*#[ \t]*include[ \t]*[<"]cuda\.h' "$@"; then driver=-lcuda; fi
    $CU_COMPILE ${openmp:+-Xcompiler $openmp} "$@" $driver -o "$program" || exit 1
else
    # A kernel may stand in one file and be launched in another
    global=
    if [ $# -gt 1 ]; then
        echo '#undef __global__' >"$tree/global.h"
        echo '#define __global__ inline CUDA_CPU_OPTIMIZED __attribute__((used))' >>"$tree/global.h"
        CU_COMPILE="$CU_COMPILE -include"
        global=$tree/global.h
    fi
    compile_file() { # $file, to $objects.o; a header that is lacking is the only error
        if is_c "$file"; then
            $CU_C $openmp -iquote "$folder" -x c -c "$file" -o "$tree/$objects.o"
            return
        fi
        only=
        if grep -rqE '^[ \t]*#error .*: the stand-in lacks it$' "$tree/tree"; then
            only=-Wfatal-errors
        fi
        $CU_COMPILE ${global:+"$global"} $openmp $only -iquote "$folder" -x c++ -c \
            "$translated" -o "$tree/$objects.o"
    }
    link() { ${CU_COMPILE%% -include*} $openmp "$tree"/*.o $CU_OBJECTS -o "$program"; }
    if command -v clang++ >&2; then for file; do refused_by_nvcc "$file"; done; fi \
        >"$tree/refused" 2>/dev/null &
    objects=0
    for file; do
        translate "$file" || exit 1
        folder=$(cd "$(dirname "$file")" && pwd -P)
        translated=$tree/tree$folder/$(basename "$file")
        objects=$((objects + 1))
        compile_file 2>"$tree/said"
        status=$?
        warnings "$tree/said" >&2
        if [ "$status" != 0 ]; then
            wait
            lacking compile_file
            cat "$tree/refused" >&2
            echo 'extras/cpu/README.md says what the stand-in lacks' >&2
            exit 1
        fi
    done
    wait
    cat "$tree/refused" >&2
    link || {
        lacking link
        exit 1
    }
fi

run() { (cd "$program_folder" && exec "$program" "$@"); }
eval "set -- $arguments"
# shellcheck disable=SC2086
case $CHECK in
asan) export ASAN_OPTIONS="detect_leaks=0:$ASAN_OPTIONS"; run "$@" ;;
race) sh extras/cpu/race.sh env --chdir="$program_folder" "$program" "$@" && echo 'race: none found' >&2 ;;
lanes) # in each order of warps and lanes the same
    first=
    for order in forwards backwards 1; do
        echo "CUDA_CPU_LANES=$order" >&2
        CUDA_CPU_LANES=$order run "$@" >"$tree/$order" || { cat "$tree/$order"; exit 1; }
        if [ ! "$first" ]; then
            first=$order
            cat "$tree/$order"
        elif ! diff "$tree/$first" "$tree/$order"; then
            echo "make cu: the program's output depends on the order of a warp's lanes" >&2
            exit 1
        fi
    done ;;
*) run "$@" ;;
esac
