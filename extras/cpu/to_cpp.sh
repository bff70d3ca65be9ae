#!/bin/sh
# to_cpp.sh FILE: prints the file in C++, as to_cpp.sed makes it. Status 1 if that leaves a launch or
# a shared variable as it was: then the lines of the file that are not understood go to stderr.
LC_ALL=C sed -zEf extras/cpu/to_cpp.sed "$1" | LC_ALL=C awk '
    BEGIN { file = ARGV[1]; ARGV[1] = "-" }
    { print; getline own <file }
    /<<<|__shared__/ { print file ":" NR ": " own >"/dev/stderr"; unknown = 1 }
    END {
        if (unknown) print file ": the stand-in does not understand the lines above: see " \
            "extras/cpu/to_cpp.sed" >"/dev/stderr"
        exit unknown
    }' "$1"
