#!/bin/sh
# sh extras/exercise/judged.sh FILE: prints a copy of an mgpu.cu, in C++ or not, for the worker, in
# which the table of options is empty. So nothing calls what trains, reads data or computes a network,
# and the compiler drops it, which takes a third off the time to compile the worker. Lines keep their numbers. OWN_CODE is where students write. What only nvcc
# would refuse, a kernel that is not marked, is an error here, too.
export LC_ALL=C
awk -f extras/definitions.awk "$1" |
    awk -v emptied=option_table '
        !in_file {
            if ($1 == "allreduce_bucket") first = $4 + 1
            if ($1 == "allreduce_yours") last = $4
            if (!index(" " emptied " ", " " $1 " ")) next
            begin[$3]
            for (line = $3 + 1; line <= $4; line++) rest[line]
            next
        }
        {
            code = $0
            sub(/\/\/.*/, "", code)
            text = text " " code
            for (rest_of = $0; match(rest_of, /cuda_cpu::Launch\("[a-z_0-9]+"|[a-z_0-9]+<<</);) {
                name = substr(rest_of, RSTART, RLENGTH)
                rest_of = substr(rest_of, RSTART + RLENGTH)
                gsub(/cuda_cpu::Launch|[("<]/, "", name)
                launched[name]
            }
        }
        END {
            for (name in launched)
                if (text ~ "void +" name " *\\(" && text !~ "__global__[^{};]*[ *]" name " *\\(")
                    print "#error " name " is launched, but its definition lacks __global__"
            if (first && last) print "#define OWN_CODE " first ", " last
        }
        FNR in begin { is_empty = sub(/ = [^=()]*$/, ";") }
        FNR in rest && is_empty { $0 = "" }
        { print }' - in_file=1 "$1"
