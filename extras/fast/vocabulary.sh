#!/bin/sh
# sh extras/fast/vocabulary.sh FILE: prints the part of mgpu.cu that products.cu needs: all above the
# definition of params, and of what stands below the definitions with these names. A function that
# is not inline is only declared.
needed='threads blocks ceil_div LAUNCH Stream CUDA_CHECK check_cuda check_launch'
needed="$needed current_stream stream_of cuda_device"
export LC_ALL=C
awk -f extras/definitions.awk "$1" |
    awk -v needed="$needed" '
        !in_file {
            if ($1 == "params") last = $2 - 1
            if (!index(" " needed " ", " " $1 " ")) next
            begin[$3]
            for (line = $3; line <= $4; line++) picked[line]
            next
        }
        function is_function() {
            return /^[A-Za-z_].*\(/ && !/^(inline|static|constexpr|typedef|template|__|struct)/
        }
        FNR <= last && is_function() { sub(/ \{.*/, ";") }
        FNR <= last { print }
        FNR <= last || !(FNR in picked) { next }
        FNR in begin {
            is_declared = 0
            declares = is_function()
        }
        !is_declared {
            is_declared = declares && sub(/ \{.*/, ";")
            print
        }
        END {
            if (last) exit
            print FILENAME ": params is not defined at the left margin" >"/dev/stderr"
            exit 1
        }' - in_file=1 "$1"
