# Copies an mgpu.cu for the worker: awk -f extras/lab/judged.awk mgpu.cu. The tables of networks and
# options are empty. So nothing calls what trains, reads data or computes a network, and the compiler
# drops it, which takes a third off the time to compile the worker. Lines keep their numbers.
/^Net net = [a-z_]*;/ { sub(/ = .*;/, ";") }
/^static std::vector<Model> models = \{.*;/ { sub(/ = .*;/, ";") }
/^static std::vector<Option> option_table = \{$/ { sub(/ = .*/, ";"); print; in_table = 1; next }
in_table { in_table = !/^\};/; $0 = "" }
{ print }
