#!/bin/sh
# sh extras/reworded.sh [--text]: no tool needs the words of a comment of mgpu.cu or networks.cu. In
# build/reworded, a copy, they all have other words, and headings other forms and lines. All tools,
# or with --text those whose output is code, must make the same of the copy as of the files here.
cd "$(dirname "$0")/.." || exit 1
copy=build/reworded
fail() { echo "extras/reworded.sh: $1" >&2; exit 1; }

# Every word becomes another one. Every second line of a heading goes, the others change.
reword() {
    awk '
        /^\/\/ -----/ && ++rules % 2 { next }
        /^\/\/ ---/ { gsub(/-/, "=") }
        match($0, /\/\/.*/) {
            comment = substr($0, RSTART)
            gsub(/[A-Za-z]+/, "word", comment)
            gsub(/[0-9]+/, "7", comment)
            $0 = substr($0, 1, RSTART - 1) comment
        }
        { print }' "$1" >"$copy/$1"
}
rm -rf $copy && mkdir -p $copy/build && cp -a Makefile mgpu.cu data extras $copy || exit 1
for folder in data page_venv; do ln -s ../../$folder $copy/build/; done
for file in mgpu.cu extras/networks/networks.cu; do reword $file; done
cmp -s mgpu.cu $copy/mgpu.cu && fail 'the comments are still the same'

# same WHAT COMMAND...: here and there it succeeds, and prints the same but for comments and lines
code() { sed '/^#define OWN_CODE/d; s|//.*||; s/ *$//; /^$/d; /^#line/d'; }
same() {
    what=$1
    shift
    "$@" >build/reworded.here || fail "$what fails"
    (cd $copy && "$@") >build/reworded.there || fail "$what fails on other comments"
    [ -s build/reworded.here ] || fail "$what prints nothing"
    for where in here there; do code <build/reworded.$where >build/reworded.$where.code; done
    cmp -s build/reworded.here.code build/reworded.there.code ||
        { diff build/reworded.here.code build/reworded.there.code | head; fail "$what differs"; }
    echo "$what: the same"
}
names() { awk -f extras/definitions.awk "$1" | sed 's/ .*//'; }
for file in mgpu.cu extras/networks/networks.cu; do
    same "the names in $file" names $file
    same "replaced.sh $file" sh extras/replaced.sh $file extras/hooks.cu extras/fast/fast.cu
done
same declarations.sh sh extras/declarations.sh mgpu.cu
same judged.sh sh extras/exercise/judged.sh mgpu.cu
clean() { sh extras/fast/checksum.sh --check && echo clean; }
same checksum.sh clean
if [ "$1" = --text ]; then exit; fi

# A page has each definition, and the notebook finds the exercise
page() { # (constructors and destructors have no place of their own)
    make -s page BACKEND=cpu >&2 && for name in $(names mgpu.cu | grep -v '^\(.*\)::~*\1$'); do
        grep -q "id=\"$name\"" build/page/index.html || { echo "no $name on the page" >&2; return 1; }
        echo "$name"
    done
}
notebook() {
    PYTHONPATH=extras/notebook IPYTHONDIR=build/ipython \
        "$notebook_python" -B -m IPython --colors=NoColor -c '
import mgpu_notebook
mgpu_notebook.exercise = "allreduce(flatten(grads));"
print(mgpu_notebook.with_exercise(open("mgpu.cu").read()))'
}
notebook_python=$PWD/build/notebook_venv/bin/python
if [ -e build/page_venv/requirements.txt ]; then same 'make page' page; fi
if [ -e build/notebook_venv/tests.txt ]; then same 'the notebook' notebook; fi
