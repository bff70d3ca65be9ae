#!/bin/sh
# sh extras/lab/draw.sh NAME 'FILE ...' PICTURE [ARGUMENT]: draws the files by extras/lab/NAME.gp, into an .svg
# (for light and dark pages) or a .png
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
# What all pictures have in common. In an .svg, colours without a meaning are classes of the page:
# gnuplot's own white, black and greys
case $3 in *.png) terminal='pngcairo fontscale 2 linewidth 2' x=2 ;; *) terminal=svg x=1 ;; esac
common="canvas(w, h) = sprintf(\"set terminal $terminal noenhanced background 'white' font \
'Arial,12' size %d,%d\", $x * w, $x * h);
set datafile separator comma;
set datafile missing NaN;
set grid lc rgb '#dddddd';
set border 3 lc rgb '#888888';
set tics nomirror textcolor rgb 'black';
set key below horizontal samplen 2 height 0.7 font ',11';
set xlabel offset 0,0.6;
colors = '#999999 #d9363e #e59a1e #8a6fc0 #c2549b #3b78d8 #3a9d5d #17a2a2 #9aa81e #a8714d';
names_of = 'optimum naive bucket host by_tensor sharded ring tree nodes/ring nodes/tree';
colour(name) = word(colors, 1 + sum [j = 2:10] (word(names_of, j) eq name) * (j - 1))"
dark='<style>@media (prefers-color-scheme: dark) {
rect[fill="#ffffff"] { fill: #0d1117 } text, [fill="black"] { fill: #e6e6e6 }
.gridline { stroke: #333b45 } [stroke="rgb(  1,   1,   1)"] { stroke: #fff } }</style>'
darken() {
    case $1 in *.svg) ;; *) return 0 ;; esac
    printf '%s\n' "$dark" >"$2.style" && sed -i "/<desc>/r $2.style" "$2"
}
# gnuplot does not notice a full disk
whole() { tail -c 12 "$1" | grep -aqE '</svg>|IEND'; }
if gnuplot -e "$common" -c "extras/lab/$1.gp" "${4:-$2}" >"$3.new" && whole "$3.new" &&
    darken "$3" "$3.new" && whole "$3.new"; then
    mv "$3.new" "$3" && echo "$3"
    rm -f "$3.new.style"
else
    rm -f "$3.new" "$3.new.style"
    echo "no picture of $2: it could not be written to $3" >&2
    exit 1
fi
