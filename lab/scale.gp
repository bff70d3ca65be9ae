# Efficiency over devices: gnuplot -c lab/scale.gp TITLE >build/scale.svg, from build/scale.csv
set terminal svg noenhanced size 640,360 background 'white' font 'Arial,12'
set datafile separator comma
set datafile missing 'nan'
set title ARG1.', simulated' font ',12'
set logscale x 2
set yrange [0:105]
set format y '%.0f%%'
set grid lc rgb '#dddddd'
set border 3 lc rgb '#888888'
set tics nomirror
set key below horizontal samplen 2 font ',11'
set xlabel 'devices'
set ylabel 'efficiency'
column_of(i) = i % 2 ? 'strong' : 'weak'
overlaps(i) = i > 2
plot for [i = 1:4] 'build/scale.csv' \
    using (column('overlap') == overlaps(i) ? column('k') : NaN):(100 * column(column_of(i))) \
    with linespoints lw 2 pt 7 ps 0.4 dt 2 - overlaps(i) \
    lc rgb (i % 2 ? '#d9363e' : '#2a5caa') \
    title column_of(i).(overlaps(i) ? ' with OVERLAP' : '')
