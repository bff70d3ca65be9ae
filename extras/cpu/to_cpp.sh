#!/bin/sh
# to_cpp.sh FILE: prints the file in C++, as to_cpp.awk and to_cpp.sed make it. Status 1 if that
# leaves a launch or a shared variable as it was: then the lines of the file that are not understood
# go to stderr. The sed gets parts of the text, which to_cpp.awk describes, with NUL between them.
export LC_ALL=C
here=$(dirname "$0")
token='[[:alnum:]_\x80-\xff]+|[ \t]+|::|[=!<>]=|<<[ \t]*<|>>[ \t]*>|[-+&|!~%^?.@$`]+|.'
sed -E "s/$token/&\n/g" <"$1" | file=$1 awk -f "$here/to_cpp.awk" |
    tr '\036' '\000' | sed -zEf "$here/to_cpp.sed" |
    tr '\000\n' '\n\037' | file=$1 awk '
    BEGIN { ORS = "" }
    sub(/^\005/, "") {
        literal[++literals] = $0
        next
    }
    {
        parts = split($0, part, "\006")
        for (i = 1; i <= parts; i++) put(i % 2 ? uses(part[i]) : literal[part[i]], i % 2)
    }
    END {
        if (!unknown) exit
        for (n = 1; getline own <ENVIRON["file"] > 0; n++)
            if (n in unknown_line) print ENVIRON["file"] ":" n ": " own "\n" >"/dev/stderr"
        print ENVIRON["file"] ": the stand-in does not understand the lines above: see " \
            "extras/cpu/to_cpp.sed\n" >"/dev/stderr"
        exit 1
    }
    function put(text, is_code,   lines, of, i) {
        lines = is_code && text ~ /<<<|__shared__/ ? split(text, of, "\037") : 0
        for (i = 1; i <= lines; i++)
            if (of[i] ~ /<<<|__shared__/) unknown_line[line + i] = unknown = 1
        line += gsub(/\037/, "\n", text)
        print text
    }
    # Of a shared variable of the file, \016 name \016, each further use is (*name)
    function uses(text,   parts, of, i, done) {
        parts = split(text, of, "\016")
        for (i = 1; i <= parts; i++) {
            done = done (i % 2 ? used(of[i]) : of[i])
            if (i % 2 == 0) names[of[i]]
        }
        return done
    }
    function used(text,   name, done, begin) {
        for (name in names) {
            done = ""
            while (match(text, "(^|[^0-9A-Z_a-z.>])" name "([^0-9A-Z_a-z]|$)")) {
                begin = index(substr(text, RSTART, RLENGTH), name) + RSTART - 1
                done = done substr(text, 1, begin - 1) "(*" name ")"
                text = substr(text, begin + length(name))
            }
            text = done text
        }
        return text
    }'
