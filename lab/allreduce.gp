# What an allreduce takes: over its size on 8 devices, and of 64 MB over the devices.
# gnuplot -c lab/allreduce.gp FABRIC >build/allreduce.svg, from build/allreduce.csv
set terminal svg noenhanced size 860,380 background 'white' font 'Arial,12'
set datafile separator comma
set datafile missing NaN
set logscale xy
set grid lc rgb '#dddddd'
set border 3 lc rgb '#888888'
set tics nomirror
set key below horizontal samplen 2 width -2 font ',11'
set multiplot layout 1,2 title 'allreduce on '.ARG1.', simulated' font ',12'
names = system("sed 1d build/allreduce.csv | cut -d, -f2 | awk '!seen[$0]++'")
colors = '#bbbbbb #d9363e #f2a93b #8c8c8c #7d4fa3 #2a5caa #3a9d5d #000000 #7fb3e6'
set format y '%.0s %cs'
set xtics ('4 KB' 4096, '64 KB' 65536, '1 MB' 1048576, '16 MB' 16777216, '256 MB' 268435456)
set xlabel '8 devices: bytes on each'
plot for [i = 1:words(names)] 'build/allreduce.csv' \
    using (column('gpus') == 8 && strcol('by') eq word(names, i) ? column('bytes') : NaN): \
    (column('us') / 1e6) \
    with linespoints lw (i == 1 ? 5 : 2) pt 7 ps 0.4 lc rgb word(colors, i) title word(names, i)
set xtics autofreq
set format x '%.0f'
set logscale x 2
set xlabel '64 MB: devices'
plot for [i = 1:words(names)] 'build/allreduce.csv' \
    using (column('bytes') == 67108864 && strcol('by') eq word(names, i) ? column('gpus') : NaN): \
    (column('us') / 1e6) \
    with linespoints lw (i == 1 ? 5 : 2) pt 7 ps 0.4 lc rgb word(colors, i) title word(names, i)
