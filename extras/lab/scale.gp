# Efficiency over devices, of build/scale.csv; ARG1 is the title
eval canvas(640, 360)
set datafile missing 'nan'
set title ARG1.', simulated' font ',12'
set logscale x 2; set yrange [0:105]
set format y '%.0f%%'
set xlabel 'devices'; set ylabel 'efficiency'
plot for [overlap = 0:1] for [which in 'strong weak'] 'build/scale.csv' \
    using (column('overlap') == overlap ? column('k') : NaN):(100 * column(which)) \
    with linespoints lw 2 pt 7 ps 0.4 dt 2 - overlap lc rgb word(colors, which eq 'weak' ? 6 : 2) \
    title which.(overlap ? ' with OVERLAP' : '')
