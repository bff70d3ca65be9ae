#!/bin/sh
# T=OPTIONS sh extras/test.sh choose|say|run NAME...: the tests of make test, asan, race and lanes.
# `choose` prints those of these programs whose source has a test case that -tc=PATTERN in T picks,
# and `say` what they are. `run`, which gets their paths, runs them after the command $BEFORE,
# $AT_ONCE at a time, each with a heading. A last line has the sums. Status 1 if a case failed.
set -f
command=$1
shift
names=$*
eval "set -- $T"
regex='.*'
for word; do
    case $word in
    -tc=* | --test-case=*)
        regex=$(echo "${word#*=}" | sed 's/[][\.+(){}|^$]/\\&/g; s/\*/.*/g; s/?/./g; s/,/|/g') ;;
    [!-]*) names=${names%% *} ;; # the first program says what is wrong with it
    esac
done
cases() { # cases NAME: how many of its test cases the pattern picks
    case $1 in
    tests) source=tests.cu ;;
    runtime_tests) source='extras/cpu/tests.cu extras/cpu/tests' ;;
    *) source=extras/${1%_tests}/tests.cu ;;
    esac
    # shellcheck disable=SC2086
    grep -rhiE "^TEST_CASE\(\"($regex)\"" $source | wc -l
}
case $command in
choose)
    for name in $names; do [ "$(cases "$name")" = 0 ] || echo "$name"; done
    exit ;;
say)
    all=0
    for name in $names; do all=$((all + $(cases "$name"))); done
    time=
    [ "$T" ] || time=': 40 s on two cores, and a minute to compile them'
    [ "$all" = 0 ] || echo "test cases: $all, in $names$time" >&2
    exit ;;
esac

[ "$names" ] || { echo "no test case matches $T" >&2; exit 1; }
# shellcheck disable=SC2016,SC2086
printf '%s\n' $names | FIRST=${names%% *} xargs -P "${AT_ONCE:-1}" -I PATH sh -fc '
    [ "$1" = "$FIRST" ] || export TESTS_QUIET=1 # one of them says which devices there are
    eval "$BEFORE $1 $T" >"$1.out" 2>&1
    echo "status $?" >>"$1.out"
    echo "--- $1"
    sed "\$d" "$1.out"' run PATH

# The end of what each has printed, with its status, which is 4 where no test case matches:
#     [doctest] test cases:  67 |  55 passed | 0 failed | 12 skipped
# shellcheck disable=SC2046,SC2086
awk -v all="$T" '
    /^\[doctest\] test cases:/ {
        split($0, numbers, /[^0-9]+/)
        for (i = 2; i <= 5; i++) n[i] = numbers[i] # all, passed, failed, skipped
    }
    /^status / {
        if ($2 == 4) next
        programs++
        passed = passed (programs > 1 ? " + " : "") n[3] + 0
        if ($2 && !n[4]) n[4] = 1 # it has crashed, or a race was found
        failed += n[4]
        skipped += n[5]
        delete n
    }
    END {
        if (!programs) print "no test case matches " all >"/dev/stderr"
        else print passed " passed, " failed + 0 " failed" (all ? "" : ", " skipped " skipped")
        exit !programs || failed > 0
    }' $(printf '%s.out ' $names)
