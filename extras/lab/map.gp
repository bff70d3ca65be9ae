# The fastest allreduce on FABRIC ARG1 by devices and bytes, its time and lines of equal time, of
# build/map.dat: log2 of devices, log4 of the bytes over 4 KB, name, us
eval canvas(860, 430)
set title 'the fastest allreduce on '.ARG1.', simulated; lines: 10 us, 100 us, 1 ms ...' font ',12'
names = system("cut -d ' ' -f3 build/map.dat | awk 'NF && !seen[$0]++'")
set datafile separator whitespace
set contour base; set cntrparam levels incremental 1, 1, 9
unset surface
set table $lines
splot 'build/map.dat' using 1:2:(log10($4))
unset table
set xrange [0.5:10.5]; set yrange [-0.5:9.5]
unset grid
set xlabel 'devices'; set ylabel 'bytes on each'
set xtics ('2' 1, '4' 2, '8' 3, '16' 4, '32' 5, '64' 6, '128' 7, '256' 8, '512' 9, '1024' 10)
set ytics ('4 KB' 0, '16 KB' 1, '64 KB' 2, '256 KB' 3, '1 MB' 4, '4 MB' 5, '16 MB' 6, '64 MB' 7, \
    '256 MB' 8, '1 GB' 9)
set style fill solid 0.6 noborder
plot for [i = 1:words(names)] 'build/map.dat' \
    using 1:(strcol(3) eq word(names, i) ? $2 : NaN):(0.5):(0.5) with boxxyerror \
    lc rgb colour(word(names, i)) title word(names, i), \
    $lines using 1:2 with lines lw 1 lc rgb '#010101' notitle, \
    'build/map.dat' using 1:2:(gprintf('%.1s %cs', $4 / 1e6)) with labels font ',9' notitle
