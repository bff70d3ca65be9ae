#!/bin/sh
# stale.sh: what is built must belong to the sources that are here. make compares times, which are
# wrong after an edit during a build, after `cp -r`, and where an older file takes the place of a
# newer one. So this script compares the sources' checksums with those of the last call, which are
# in build/sources. It touches each source that has changed, unless nothing below build/ is newer;
# where one is gone, it touches those beside it.
[ -d build ] || exit 0
now=build/sources.$$
trap 'rm -f "$now"' EXIT
# What a wrong clock has dated in the future would be newer than every edit
touch -d "@$(($(date +%s) + 2))" "$now" 2>/dev/null || exit 0 # build/ cannot be written: make says so
future=$(find build -name '*_venv' -prune -o -type f -newer "$now" -print \
    -exec touch -t 200001010000 {} + | sed -n 1p)
[ ! "$future" ] || echo "$future is dated in the future: what is so is built again" >&2
find Makefile ./*.cu extras data/*.sh -type f ! -name '*.pyc' -exec cksum {} + 2>/dev/null |
    LC_ALL=C sort 2>/dev/null >"$now" || exit 0
if [ -e build/sources ]; then
    LC_ALL=C comm -13 build/sources "$now" | cut -d ' ' -f 3- |
        while IFS= read -r file; do
            [ -z "$(find build -newer "$file" -type f ! -name 'sources*' -print -quit)" ] ||
                touch -c "$file"
        done
    LC_ALL=C comm -23 build/sources "$now" | cut -d ' ' -f 3- |
        while IFS= read -r file; do
            [ -e "$file" ] || find "$(dirname "$file")" -maxdepth 1 -type f -exec touch -c {} + 2>/dev/null
        done
elif [ "$(find build -name flags -print -quit)" ]; then # something was built, nobody knows of what
    cut -d ' ' -f 3- "$now" | while IFS= read -r file; do touch -c "$file"; done
fi
cmp -s "$now" build/sources || mv -f "$now" build/sources
