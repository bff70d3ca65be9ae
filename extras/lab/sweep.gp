# Test accuracy over learning rates, a line for each number of devices, of build/sweep.csv
eval canvas(420, 300)
set xlabel 'learning rate'
set ylabel 'test acc'
set logscale x
set autoscale xfix
set yrange [0:*]
set offsets graph 0.05, graph 0.05
set xtics () rotate by -45 # only the rates that were tried: the first plot sets them
plot 'build/sweep.csv' using 'lr':(0):xticlabels(3) with dots notitle, \
    for [i = 1:words(ARG1)] '' using \
    'lr':(column('gpus') == word(ARG1, i) ? column('test_acc') : NaN) \
    with linespoints lw 2 pt 7 ps 0.4 lc rgb word(colors, i % 8 + 1) title 'GPUS='.word(ARG1, i)
