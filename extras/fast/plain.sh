#!/bin/sh
# sh extras/fast/plain.sh FILE: prints a copy of mgpu.cu or networks.cu in which the operators have
# other names, plain_relu and so on. What calls relu then calls the function of fast.cu with this name.
# So do current_stream and allocate.
# Lines keep their numbers.
export LC_ALL=C
renamed="$(sed '/^#/d; s/:.*//' extras/fast/operators | tr '\n' ' ') current_stream allocate"
left_out=Tensor::ptr # fast.cu has its own
awk -f extras/definitions.awk "$1" |
    awk -v renamed="$renamed" -v left_out="$left_out" '
        function is_in(list) { return index(" " list " ", " " $1 " ") }
        !in_file {
            for (line = $3; line <= $4; line++) {
                if (is_in(renamed)) name[line] = $1
                if (is_in(left_out)) empty[line]
            }
            next
        }
        FNR in empty { $0 = "" }
        # (a function of your own that has such a name, but another type, keeps it)
        FNR in name && $0 ~ "^(Tensor |void |Stream &|std::shared_ptr<float> )" name[FNR] "\\(" {
            head = $0 # on one line, it declares the name for what comes before fast.cu
            if (!sub(/ \{.*/, "; ", head)) head = ""
            sub(name[FNR] "\\(", "plain_&")
            $0 = head $0
        }
        { print }' - in_file=1 "$1"
