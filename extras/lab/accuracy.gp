# Test accuracy and train loss over epochs, a line for each run, which its log names: extras/lab/draw.sh
eval canvas(840, 320)
set xlabel 'epoch'
run(i) = word(ARG1, i)
# Its name, with what its columns say
about(i) = run(i).system('sh extras/lab/plot.sh --about '.run(i))
last = 2 # at least: one epoch is a point, too
do for [i = 1:words(ARG1)] {
    stats run(i) using 1 every ::1 nooutput
    last = STATS_max > last ? STATS_max : last
}
set xrange [1:last]
if (last < 12) set xtics 1
set multiplot layout 1,2
do for [loss = 0:1] {
    set title loss ? 'train loss' : 'test accuracy'
    set yrange [0:1]
    if (loss) { set yrange [0:*] }
    plot for [i = 1:words(ARG1)] run(i) using 'epoch':(column(loss ? 'loss' : 'test_acc')) \
        with linespoints lw 2 pt 7 ps 0.4 lc rgb word(colors, i % 8 + 1) title about(i)
}
