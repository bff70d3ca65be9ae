#!/bin/sh
# sh extras/cpu/voice.sh: is mgpu.cu written as the house writes, as far as a script can tell? Status
# 1 if a line breaks a rule:
#   a function's comment begins with a verb, not with The, A, What, Who or How
#   no comment has "who" or "whoever", or "what" outside of a question
#   one statement stands on a line, of at most 100 columns; a line has 62 characters on average at most
#   no local name hides another one
file=mgpu.cu
broken=$({
    awk '
        function say(rule) { print FILENAME ":" NR ": " rule ": " $0 }
        { text = $0; gsub(/"([^"\\]|\\.)*"/, "\"\"", text); comment = "" }
        match(text, /\/\/.*/) { comment = substr(text, RSTART); text = substr(text, 1, RSTART - 1) }
        tolower(comment) ~ /[^a-z](who|whoever)[^a-z]/ { say("who") }
        tolower(comment) ~ /[^a-z]what[^a-z]/ && comment !~ /\?/ { say("what") }
        length($0) > 100 { say("over 100 columns") }
        { gsub(/\{[^{}]*\}/, "", text) } # a lambda on one line
        text !~ /for \(/ && gsub(/;/, ";", text) > 1 { say("two statements") }
        # the first line of the comment above a function
        /^\/\/ / && !above { above = $0 }
        /^[A-Za-z_].*\(/ && !/[;=]/ && above ~ /^\/\/ (The|A|An|What|Who|How|Whether) / {
            print FILENAME ":" NR - 1 ": begins with no verb: " above
        }
        !/^\/\// { above = "" }
        { bytes += length($0) }
        END { if (bytes > 62 * NR) print FILENAME ": " bytes / NR " characters a line" }
    ' $file
    ${CXX:-g++} -Wshadow=local -x c++ -fsyntax-only /dev/null 2>/dev/null && mkdir -p build &&
        LC_ALL=C sed -zEf extras/cpu/to_cpp.sed $file >build/voice.cc &&
        ${CXX:-g++} -std=c++17 -fsyntax-only -Wshadow=local -Iextras/cpu build/voice.cc 2>&1 |
        grep '^build/voice.cc.*Wshadow' | sed "s|^build/voice.cc|$file|"
})
[ -z "$broken" ] || { echo "$broken"; exit 1; }
echo "$file: written as the house writes"
