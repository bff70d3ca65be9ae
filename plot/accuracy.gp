# Test accuracy over epochs: gnuplot plot/accuracy.gp <build/log.csv >build/plot.svg
set terminal svg size 420,300 background 'white'
set datafile separator comma
set grid
unset key
set xlabel 'epoch'
set ylabel 'test acc'
plot '/dev/stdin' using 'epoch':'test_acc' with linespoints lw 2 pt 7 ps 0.4 lc rgb '#1f77b4'
