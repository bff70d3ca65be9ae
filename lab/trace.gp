# What ran when, a lane for each device: gnuplot -c lab/trace.gp build/trace.dat >build/trace.svg
data = ARG1
rows(word) = sprintf("< sed -n 's/^%s //p' %s", word, data)
number(command) = system(command) + 0
low = number("awk '$1 != \"lane\" && $1 != \"title\" && $4 < m {m = $4} END {print m + 0}' ".data)
set terminal svg noenhanced size 860,(110 - (low > -6 ? 40 : 26) * low) background 'white' font 'Arial,12'
set title system("sed -n 's/^title //p' ".data." | fold -s -w 120") font ',11' offset 0,-0.4
set key below horizontal Left reverse samplen 1 width 1 font ',11'
set xlabel 'ms' offset 0,0.8
set xrange [0:*]
set autoscale xfixmax
set yrange [low - 0.1:0.1]
set border 1 lc rgb '#888888'
set tics nomirror out scale 0.5
set grid xtics lc rgb '#dddddd'
set ytics scale 0 textcolor rgb '#000000'
set ytics () textcolor rgb '#000000'
do for [lane in system("sed -n 's/^lane \\([^ ]*\\) /\\1:/p' ".data)] {
    colon = strstrt(lane, ':')
    set ytics add (lane[colon + 1:] lane[:colon - 1] + 0)
}
set style fill solid noborder
kinds = 'input forward backward sum message update critical'
colors = '#8c8c8c #7fb3e6 #2a5caa #f2a93b #d9363e #3a9d5d #000000'
used(kind) = number("grep -c '^".kind." ' ".data)
plot for [k = 1:7] used(word(kinds, k)) > 0 ? rows(word(kinds, k)) : NaN \
    using (($1 + $2) / 2):(($3 + $4) / 2):1:2:3:4 with boxxyerror lc rgb word(colors, k) \
    title word(kinds, k).(k == 7 ? ' path' : '')
