#!/bin/sh
# sh extras/replaced.sh FILE PART...: prints a copy of mgpu.cu or networks.cu in which each function that
# a PART replaces (it has a line "replaces: NAME ...") is called plain_NAME. What calls NAME then calls
# the part's own NAME. Lines keep their numbers.
export LC_ALL=C
file=$1
shift
awk -f extras/definitions.awk "$file" |
    awk -v replaced="$(sed -n 's/^\/\/ replaces: //p' "$@" | tr '\n' ' ')" '
        !in_file {
            for (line = $3; index(" " replaced " ", " " $1 " ") && line <= $4; line++) {
                if ($1 ~ /::/) empty[line] # the part has its own
                else name[line] = $1
            }
            next
        }
        FNR == 1 && !/^#line/ { print "#line 1 \"" FILENAME "\"" }
        FNR in empty { $0 = "" }
        # (a function of your own that has such a name, but another type, keeps it)
        FNR in name && $0 ~ "^(Tensor |void |bool |Stream &|std::shared_ptr<float> )" name[FNR] "\\(" {
            head = $0 # on one line, it declares the name for what comes before the part
            if (!sub(/ \{.*/, "; ", head)) head = ""
            sub(name[FNR] "\\(", "plain_&")
            $0 = head $0
        }
        { print }' - in_file=1 "$file"
