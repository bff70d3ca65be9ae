#!/bin/sh
# building.sh TARGET COMMAND: what make runs for a target below build/. The command writes the file
# $part and then gives it the target's name, so that nothing half-written has that name, not even if
# two makes run at once. On a terminal, a line every two seconds says what is still being built.
mkdir -p "$(dirname "$1")" 2>/dev/null
export part="$1.$$"
ticker=
trap 'rm -f "$part"; [ ! "$ticker" ] || kill $ticker 2>/dev/null' EXIT
trap 'exit 130' HUP INT TERM
if [ -t 2 ]; then
    # (It looks for this shell, because a kill that comes as it starts may be lost)
    (trap - EXIT; while sleep 2 2>/dev/null && kill -0 $$; do echo "building $1 ..."; done) >&2 &
    ticker=$!
fi
sh -c "$2"
