# What an allreduce takes, over its size and over the devices, of build/allreduce.csv on FABRIC ARG1
eval canvas(860, 400)
set logscale xy
set multiplot layout 1,2 title 'allreduce on '.ARG1.', simulated' font ',12'
names = system("sed 1d build/allreduce.csv | cut -d, -f2 | awk '!seen[$0]++'")
set format y '%.0s %cs'
k = strstrt(names, 'extras/nodes/') ? 64 : 8
set xlabel sprintf('%d devices: bytes on each', k)
set xtics ('4 KB' 4096, '64 KB' 65536, '1 MB' 1048576, '16 MB' 16777216, '256 MB' 268435456)
at(by) = strcol('by') eq by && column(fixed) == value ? column(over) : NaN
do for [over in 'bytes gpus'] {
    fixed = over eq 'bytes' ? 'gpus' : 'bytes'
    value = over eq 'bytes' ? k : 67108864
    if (over eq 'gpus') {
        set format x '%.0f'
        set logscale x 2
        set xtics autofreq
        set xlabel '64 MB: devices'
    }
    plot for [i = 1:words(names)] 'build/allreduce.csv' \
        using (at(word(names, i))):(column('us') / 1e6) with linespoints lw (i == 1 ? 5 : 2) \
        pt 7 ps 0.4 lc rgb colour(word(names, i)) title word(names, i)
}
