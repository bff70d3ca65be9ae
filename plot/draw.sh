#!/bin/sh
# sh plot/draw.sh NAME FILE.csv PICTURE.svg [ARGUMENT]: draws FILE.csv by plot/NAME.gp
command -v gnuplot >/dev/null || {
    echo "no picture of $2: gnuplot is missing (apt-get install gnuplot-nox)" >&2
    exit 1
}
grep -qs '^[0-9]' "$2" || { echo "no picture of $2: it has no rows (make run)" >&2; exit 1; }
mkdir -p "$(dirname "$3")" || exit 1
if gnuplot -c "plot/$1.gp" "$4" <"$2" >"$3.new"; then
    mv "$3.new" "$3" && echo "$3"
else
    rm -f "$3.new"
    exit 1
fi
