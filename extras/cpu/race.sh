#!/bin/sh
# race.sh PROGRAM ...: runs it under ThreadSanitizer. The stand-in says each race in one line, which
# is shown once, whichever processes and devices find it; the reports themselves, of a hundred lines
# each, go to build/race/report. Status: the program's, or 66 if there was a race.
# The kernel may spread addresses too widely for ThreadSanitizer: setarch -R turns that off.
report=build/race/report
flat="setarch $(uname -m) -R"
$flat true 2>/dev/null || flat=
rm -f "$report" "$report".*
export TSAN_OPTIONS="halt_on_error=0 exitcode=66 log_path=$PWD/$report $TSAN_OPTIONS"
{ $flat "$@" 2>&1; echo $? >"$report.status"; } | awk '
    /^race on / { pair = $0; sub(/^race on [^:]*/, "", pair); if (seen[pair]++) next }
    { print; fflush() }'
status=$(cat "$report.status")
rm "$report.status"
cat "$report".* >"$report" 2>/dev/null && rm "$report".*
[ -s "$report" ] || { rm -f "$report"; exit "$status"; }
echo "race: ThreadSanitizer's full reports, with every stack, are in $report" >&2
exit 66
