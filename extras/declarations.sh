#!/bin/sh
# sh extras/declarations.sh FILE [USER...]: prints a header for a file written as mgpu.cu is,
# so that others can be compiled without it and linked. Functions and variables are only declared;
# types, macros, constants, kernels and what is __device__ or inline stand there as they are. With
# users, which are files, only what they name is there, and what that names in turn. So after an
# edit of anything else the header stays the same, and its users need not be compiled again. For
# the same reason it has no comments.
export LC_ALL=C
file=$1
shift
awk -f extras/definitions.awk "$file" |
    awk '
        !part { # a definition: its name, its first and last line
            names[$3] = names[$3] " " $1
            last[$3] = $4
            next
        }
        { sub(/^ *\/\/.*/, "") }
        !/"/ { sub(/ *\/\/.*/, "") }
        part == "users" {
            see($0)
            next
        }
        FNR in last {
            first = FNR
            end = last[FNR]
        }
        FNR <= end { text[first] = text[first] $0 "\n" }
        FNR > end && !/^(#line|#error|#include "|[ \t]*$)/ { # neither a definition nor a comment
            text[FNR] = $0 "\n"
            is_needed[FNR] = 1
            see($0)
        }
        { lines = FNR }
        END {
            for (i = 1; i <= lines; i++) {
                if (i in last) text[i] = declared(text[i])
                if (i in last && (text[i] ~ /^#if/ || part != "users")) need(i)
            }
            do {
                more = 0
                for (i = 1; i <= lines; i++) if (!(i in is_needed) && is_seen(names[i])) need(i)
            } while (more)
            for (i = 1; i <= lines; i++) if (i in is_needed) printf "%s", text[i]
        }
        function need(i) {
            more = is_needed[i] = 1
            see(text[i])
        }
        function see(text,   count, words) {
            count = split(text, words, /[^A-Za-z_0-9]+/)
            for (; count > 0; count--) seen[words[count]]
        }
        function is_seen(names,   count, words) {
            count = split(names, words)
            for (; count > 0; count--) if (words[count] in seen) return 1
        }
        function declared(text,   head) {
            if (text ~ /^#if/ && text ~ /\n[^#]/ || text ~ /^template .*static/) return ""
            if (text ~ /^(#|typedef|using|struct|class|union|enum|constexpr|inline|template)/ ||
                text ~ /^__global__/) return text
            if (text ~ /^__device__/) return (text ~ /^__device__ inline/ ? "" : "inline ") text
            head = text
            while (gsub(/<[^<>]*>/, "", head)) continue
            if (head ~ /^(static|[^=(]*[A-Za-z_0-9]::[~A-Za-z_0-9]+\()/) return ""
            if (head ~ /^[^=]*[A-Za-z_0-9]\(/) { # a function
                sub(/ \{.*/, ";\n", text)
                return text
            }
            if (head ~ /^const [^*]*=/) return text
            if (head ~ /^auto [A-Za-z_]/) return "[[maybe_unused]] static " text
            if (sub(/^auto &/, "", head) && sub(/ .*/, "", head)) {
                sub(/^[^=]*= \*new /, "", text)
                sub(/;/, " \\&" head "&", text)
            } else sub(/( =|;).*/, ";\n", text)
            return "extern " text
        }' - part=file "$file" ${1:+part=users} "$@"
