#!/bin/sh
# make size: lines of each part, and lines of code among them (those that are neither empty nor all
# comment), against its limit, which lies some 5% above what is there, so that a repair never has to
# delete something. Of mgpu.cu also: its lines are short, each has one statement, and no local name
# hides another one. Status 1 if something is not so.
wrong=0
# part NAME LIMIT FILE...: the limit is for lines, or for LINES/CODE
part() {
    name=$1 limit=$2
    shift 2
    [ -e "$1" ] || return 0
    lines=$(cat "$@" | wc -l)
    code=$(cat "$@" | grep -vcE '^[[:space:]]*((//|#).*)?$')
    verdict=
    if [ "$lines" -gt "${limit%/*}" ]; then verdict='too long'; fi
    case $limit in */*) if [ "$code" -gt "${limit#*/}" ]; then verdict='too long'; fi ;; esac
    if [ "$verdict" ]; then wrong=1; fi
    printf '%-22s %7d %7d   %-10s %s\n' "$name" "$lines" "$code" "$limit" "$verdict"
}
printf '%-22s %7s %7s   %s\n' part lines code limit
part mgpu.cu 1945/1310 mgpu.cu
part tests.cu 1569 tests.cu
part 'tests.h, reference.h' 978 extras/*tests.h extras/reference.h
part Makefile 82 Makefile
part 'all .mk files' 840/620 extras/*.mk extras/*/*.mk
part test.sh 75 extras/test.sh
part README.md 112 README.md
for folder in algorithms:405 files:450 networks:700 fast:3880 watch:960 exercise:2750 check:2640 \
    measure:700 nodes:665; do
    set --
    for f in extras/"${folder%:*}"/*.cu extras/"${folder%:*}"/*.cc extras/"${folder%:*}"/*.h \
        extras/"${folder%:*}"/*.html; do
        case $f in */tests.cu) ;; *) if [ -e "$f" ]; then set -- "$@" "$f"; fi ;; esac
    done
    if [ $# -gt 0 ]; then part "${folder%:*}/, without tests" "${folder#*:}" "$@"; fi
done
part 'notebook/, without tests' 375 extras/notebook/mgpu_notebook.py extras/notebook/notebook.mk
longest=$(wc -l extras/cpu/*.* extras/cpu/*/*.* 2>/dev/null | grep -v ' total$' | sort -n | tail -n 1)
part 'cpu/, its longest file' 637 "${longest##* }"
# shellcheck disable=SC2046
part 'all of extras/' 38100 $(find extras -type f ! -name '*.png' ! -name '*.svg')
part 'page/, with tests' 525 extras/page/*[!d] .github/workflows/page.yml # all but README.md
awk '
    length($0) > 100 || /[ \t\r]$/ { print "mgpu.cu:" NR ": too long, or blanks"; wrong = 1 }
    {
        gsub(/\\./, "")
        gsub(/"[^"]*"/, "\"\"")
        sub(/\/\/.*/, "")
        gsub(/\{[^{}]*\}/, "") # a lambda on one line
    }
    !/for \(/ && gsub(/;/, ";") > 1 { print "mgpu.cu:" NR ": two statements"; wrong = 1 }
    END { exit wrong }' mgpu.cu || wrong=1
if sh extras/cpu/to_cpp.sh mgpu.cu | ${CXX:-g++} -std=c++17 -fsyntax-only -Wshadow=local \
    -Iextras/cpu -x c++ - 2>&1 | grep '^<stdin>.*\[-Wshadow'; then wrong=1; fi
exit "$wrong"
