# Test accuracy over learning rates, a line for each number of devices:
# gnuplot -c lab/sweep.gp '1 2' >build/sweep.svg, of build/sweep.csv
set terminal svg size 420,300 background 'white'
set datafile separator comma
set datafile missing NaN # a row of other devices is passed over and leaves no gap
set grid
set key above
set xlabel 'learning rate'
set ylabel 'test acc'
set logscale x
set autoscale xfix
set yrange [0:*]
set offsets graph 0.05, graph 0.05
set xtics () rotate by -45 # only the rates that were tried: the first plot sets them
plot 'build/sweep.csv' using 'lr':(0):xticlabels(3) with dots notitle, \
    for [k in ARG1] '' using 'lr':(column('gpus') == k ? column('test_acc') : NaN) \
    with linespoints lw 2 pt 7 ps 0.4 title 'GPUS='.k
