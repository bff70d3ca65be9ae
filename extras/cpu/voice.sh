#!/bin/sh
# sh extras/cpu/voice.sh: what a script can tell of how mgpu.cu is written, without telling anybody how
# to write English. Status 1 if a line breaks a rule:
#   a line has at most 100 columns, and no blanks at its end
#   one statement stands on a line
#   no local name hides another one
file=mgpu.cu
broken=$({
    awk '
        function say(rule) { print FILENAME ":" NR ": " rule ": " $0 }
        length($0) > 100 { say("over 100 columns") }
        /[ \t\r]$/ { say("blanks at the end") }
        {
            gsub(/\\./, "")
            gsub(/"[^"]*"/, "\"\"")
            sub(/\/\/.*/, "")
            gsub(/\{[^{}]*\}/, "") # a lambda on one line
        }
        !/for \(/ && gsub(/;/, ";") > 1 { say("two statements") }
    ' $file
    ${CXX:-g++} -Wshadow=local -x c++ -fsyntax-only /dev/null 2>/dev/null && mkdir -p build &&
        sh extras/cpu/to_cpp.sh $file >build/voice.cc &&
        ${CXX:-g++} -std=c++17 -fsyntax-only -Wshadow=local -Iextras/cpu build/voice.cc 2>&1 |
        grep '^build/voice.cc.*Wshadow' | sed "s|^build/voice.cc|$file|"
})
[ -z "$broken" ] || { echo "$broken"; exit 1; }
echo "$file: short lines, one statement on each, and no name hides another one"
