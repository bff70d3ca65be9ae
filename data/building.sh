#!/bin/sh
# building.sh TARGET COMMAND: what make runs for a target below build/. On a terminal, a line every
# two seconds says what is still being built.
[ -t 2 ] || exec sh -c "$2"
(while sleep 2; do echo "building $1 ..." >&2; done) &
ticker=$!
sh -c "$2"
status=$?
kill $ticker 2>/dev/null
exit $status
