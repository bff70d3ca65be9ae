#!/bin/sh
# sh extras/exercise/judged.sh FILE: prints a copy of an mgpu.cu, in C++ or not, for the worker.
# own_code is where students write. What only nvcc would refuse, a kernel that is not marked, is an
# error here, too. Lines keep their numbers.
export LC_ALL=C
awk -f extras/definitions.awk "$1" |
    awk '
        !in_file {
            if ($1 == "allreduce_bucket") first = $4 + 1
            if ($1 == "allreduce_yours") last = $4
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
            print "int own_code[2] = {" (first && last ? first ", " last : "0, 1 << 30") "};"
        }
        { print }' - in_file=1 "$1"
