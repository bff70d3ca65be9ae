#!/bin/sh
# sh data/copy.sh FOLDER: what `make BUILD=FOLDER` does first. Copies this folder there, without
# build/. A file with the same content keeps its date, so that nothing is compiled again, and another
# one gets today's, however old it is. What was copied before and is no longer here goes.
set -eu
folder=$1
mkdir -p "$folder"
list=$folder/.copied
find ./Makefile ./LICENSE ./*.md ./*.cu ./data ./extras -type f ! -path '*/.fetch.*' \
    ! -path '*/__pycache__/*' | LC_ALL=C sort >"$list.$$"
while IFS= read -r file; do
    cmp -s "$file" "$folder/$file" || { mkdir -p "$folder/${file%/*}" && cp -f "$file" "$folder/$file"; }
done <"$list.$$"
if [ -e "$list" ]; then
    LC_ALL=C comm -23 "$list" "$list.$$" | while IFS= read -r file; do
        rm -f "$folder/$file"
        (cd "$folder" && rmdir -p "${file%/*}" 2>/dev/null) || true # which others may need
    done
fi
mv -f "$list.$$" "$list"
