#!/bin/sh
# sh extras/exercise/inlined.sh FILE OBJECT: prints a copy of an mgpu.cu, in C++, in which all
# functions are inline that the object does not call. The compiler then leaves out what nobody calls,
# which is most of it.
export LC_ALL=C
{
    nm -uC "$2"
    awk -f extras/definitions.awk "$1"
} | awk '
    !in_file && $1 == "U" { # U copyto(Tensor const&, Tensor const&)
        sub(/^ *U /, "")
        sub(/[[(].*/, "")
        called[$0]
        next
    }
    !in_file { # a name, its comment, first and last line
        if (!($1 in called)) name_at[$3] = $1
        next
    }
    FNR in name_at {
        at = index($0, name_at[FNR] "(")
        head = substr($0, 1, at)
        if (at && head !~ /^(static|inline|constexpr|extern|template|struct|__|\[|#)|=/) {
            if (before ~ /["#\\]/) {
                $0 = "inline " $0
            } else { # on the line before, so that warnings name the right columns
                sub(/\/\/.*/, "", before)
                before = before " inline"
            }
        }
    }
    FNR > 1 { print before }
    { before = $0 }
    END { print before }' - in_file=1 "$1"
