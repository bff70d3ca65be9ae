#!/bin/sh
# sh lab/draw.sh NAME 'FILE ...' PICTURE [ARGUMENT]: draws the files by lab/NAME.gp, into an .svg
# or a .png
command -v gnuplot >/dev/null || {
    echo "no picture of $2: gnuplot is missing (apt-get install gnuplot-nox)" >&2
    exit 1
}
for file in $2; do
    [ -r "$file" ] || { echo "no picture of $file: it cannot be read (make run)" >&2; exit 1; }
    sed -n 2p "$file" 2>/dev/null | grep -q . || {
        echo "no picture of $file: it has no rows (make run)" >&2
        exit 1
    }
done
mkdir -p "$(dirname "$3")" || exit 1
case $3 in *.png) terminal=pngcairo ;; *) terminal=svg ;; esac
# gnuplot does not notice a full disk
whole() { tail -c 12 "$1" | grep -aqE '</svg>|IEND'; }
if gnuplot -c "lab/$1.gp" "${4:-$2}" $terminal >"$3.new" && whole "$3.new"; then
    mv "$3.new" "$3" && echo "$3"
else
    rm -f "$3.new"
    echo "no picture of $2: it could not be written to $3" >&2
    exit 1
fi
