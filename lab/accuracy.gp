# Test accuracy and train loss over epochs, a line for each run:
# gnuplot -c lab/accuracy.gp 'build/log.csv other.csv' svg >build/plot.svg
size = ARG2 eq 'svg' ? '840,320' : '1680,640 fontscale 2 linewidth 2'
eval 'set terminal '.ARG2." noenhanced background 'white' size ".size
set datafile separator comma
set grid lc rgb '#dddddd'
set border 3 lc rgb '#888888'
set tics nomirror
set key below samplen 2
set xlabel 'epoch'
run(i) = word(ARG1, i)
last = 2 # at least: one epoch is a point, too
do for [i = 1:words(ARG1)] {
    stats run(i) using 1 every ::1 nooutput
    last = STATS_max > last ? STATS_max : last
}
set xrange [1:last]
if (last < 12) set xtics 1
set multiplot layout 1,2
set title 'test accuracy'
set yrange [0:1]
plot for [i = 1:words(ARG1)] run(i) using 'epoch':'test_acc' with linespoints lw 2 pt 7 ps 0.4 \
    title run(i)
set title 'train loss'
set yrange [0:*]
plot for [i = 1:words(ARG1)] run(i) using 'epoch':'loss' with linespoints lw 2 pt 7 ps 0.4 \
    title run(i)
