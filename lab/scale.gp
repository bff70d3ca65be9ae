# Efficiency over devices, of build/scale.csv; ARG1 is the title
eval canvas(640, 360)
set datafile missing 'nan'
set title ARG1.', simulated' font ',12'
set logscale x 2
set yrange [0:105]
set format y '%.0f%%'
set xlabel 'devices'
set ylabel 'efficiency'
column_of(i) = i % 2 ? 'strong' : 'weak'
overlaps(i) = i > 2
plot for [i = 1:4] 'build/scale.csv' \
    using (column('overlap') == overlaps(i) ? column('k') : NaN):(100 * column(column_of(i))) \
    with linespoints lw 2 pt 7 ps 0.4 dt 2 - overlaps(i) lc rgb word(colors, i % 2 ? 2 : 6) \
    title column_of(i).(overlaps(i) ? ' with OVERLAP' : '')
