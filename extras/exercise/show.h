// Part of the judge: writes what an allreduce does on 2 to 8 devices, beside the other algorithms,
// for show.html. What moved where and when comes from the worker (extras/exercise/whose_numbers.h);
// the times are those of its rounds, for as many bytes as MODEL's gradients have
// (extras/watch/network.h).
// defines: show
//
// build/show.txt has rows of words with a space between them. In a word %20 is a space and %3c is
// '<', as in a URL, so any text is one word and none ends the script that holds the rows.
//
//     model NAME BYTES                     its gradients have so many bytes
//     tensor NAME NUMBERS                  one of the tensors that are summed
//     fabric NAME                          one of the networks
//     run ALGORITHM DEVICES MESSAGES ROUNDS BUSIEST right|wrong
//                                          BUSIEST in numbers
//     ends US...                           when each round ends, a row for each network
//     op ROUND                             an operation of this run, or a wait
//     message SRC DST FROM TO NUMBERS      it is a message: devices and places, or -1
//     carried DEVICE BEGIN LENGTH CODE     it carries these numbers; CODE tells whose they are
//     changed DEVICE BEGIN LENGTH CODE     it has changed these numbers
//     failed ALGORITHM DEVICES ERROR       instead of a run
//     first ALGORITHM DEVICES              the page shows this run first
#pragma once

static std::string word_of(const std::string &text) {
    std::string word;
    for (unsigned char c : text)
        word += c <= ' ' || c == '<' || c == '%' ? format("%%%02x", c) : std::string(1, c);
    return word;
}

// Run an algorithm and write its rows.   ->   whether every device has the sum
static bool write_run(FILE *file, const std::string &name, int k,
                      const std::vector<network::Network> &networks, double scale) {
    const int n = total(limits::shown), sum = ((1L << 3 * k) - 1) / 7; // once each device's
    Moves moves(name, k, limits::shown, 3);
    Trace &trace = moves.traces[0];
    Answer &answer = trace.answer;
    answer.reads = moves.reads;
    const std::vector<int> rounds = rounds_of(answer);
    check_sums(answer, name, k, n);
    const bool right = answer.sums == std::vector<Flat>(k, Flat(n, sum));
    const network::Traffic t = traffic_of(answer);
    // A part that comes to the host, or from there, has the place that it had, or gets, on a device
    std::map<int, int> places; // of each block: of its first number
    for (int c = 0; c < k; c++) places[c] = 0;
    for (const wire::Row &row : answer.rows)
        if (row.is_message && row.message.dst < 0 && places.count(row.from_block))
            places.insert({row.to_block, places[row.from_block] + row.from - row.to});
    auto place_of = [&](int block, int place) {
        return places.count(block) ? places[block] + place : -1;
    };
    fprintf(file, "run %s %d %ld %ld %ld %s\n", word_of(name).c_str(), k, t.messages, t.rounds,
            t.busiest() / (long)sizeof(float), right ? "right" : "wrong");
    for (const network::Network &n : networks) {
        fputs("ends", file);
        for (double end : t.ends(n, scale)) fprintf(file, " %.4g", 1e6 * end);
        fputs("\n", file);
    }
    auto write = [&](const char *what, int device, int place, const Flat &x) {
        for (size_t i = 0, j; i < x.size(); i = j) { // numbers that have the same code
            for (j = i + 1; j < x.size() && x[j] == x[i]; j++) {}
            const bool is_code = x[i] >= 0 && x[i] < 1 << 24 && x[i] == std::floor(x[i]);
            fprintf(file, "%s %d %zu %zu %d\n", what, device, place + i, j - i,
                    is_code ? (int)x[i] : -1);
        }
    };
    for (int i = 0; i < (int)answer.rows.size(); i++) {
        const wire::Row &row = answer.rows[i];
        for (const wire::Read &read : answer.reads[i]) { // as if messages had brought it before
            const int m = read.whose.size();
            fprintf(file, "op %d\nmessage %d %d %d %d %d\n", rounds[i], read.src, read.dst,
                    read.begin, read.into_tensor ? read.begin : -1, m);
            Flat x(m);
            for (int c = 0; c < k; c++)
                for (int j = 0; j < m; j++) x[j] += (read.whose[j] >> c & 1) << 3 * c;
            write("carried", read.src, read.begin, x);
        }
        fprintf(file, "op %d\n", rounds[i]);
        if (row.is_message) {
            const int from = place_of(row.from_block, row.from);
            fprintf(file, "message %d %d %d %d %d\n", row.message.src, row.message.dst, from,
                    place_of(row.to_block, row.to), row.numbers);
            Flat x;
            for (int j = 0; j < std::min(row.numbers, n) && row.from_block >= 0; j++)
                x.push_back(trace.after(row.from_block, row.from + j, i - 1));
            write("carried", row.message.src, std::max(0, from), x);
        }
        for (const auto &[block, place] : places)
            for (const Trace::Piece &p : trace.pieces[block])
                if (p.row == i)
                    write("changed", block < k ? block : -1, place + p.begin,
                          Flat(p.x, p.x + p.end - p.begin));
    }
    return right;
}

// Write the file options.show.
static void show() {
    options.gpus = limits::shown_devices;
    const Answer of = greet();
    std::vector<network::Network> networks = network::networks;
    networks.insert(networks.begin(), options.networks.begin(), options.networks.end());
    const size_t mine = index_of(options.allreduce, of);
    if (options.given == 1 || options.given > limits::shown_devices)
        throw Verdict(format("make show takes 2 to %d devices, not %d", limits::shown_devices,
                             options.given));
    std::vector<size_t> order = {mine}; // this one, then the others that are there
    for (const std::string &name : limits::shown_beside) {
        const size_t i = std::find(of.names.begin(), of.names.end(), name) - of.names.begin();
        if (i != mine && i < of.names.size()) order.push_back(i);
    }

    FILE *file = fopen(options.show.c_str(), "w");
    if (!file) throw Verdict("cannot write " + options.show);
    const long bytes = sizeof(float) * total(limits::gradients(options.model));
    const double scale = (double)bytes / (sizeof(float) * total(limits::shown));
    fprintf(file, "model %s %ld\n", options.model.c_str(), bytes);
    const char *const tensors[] = {"W1", "b1", "W2", "b2", "W3", "b3", "W4", "b4"};
    for (int i = 0; i < 8; i++) fprintf(file, "tensor %s %d\n", tensors[i], limits::shown[i]);
    for (const network::Network &n : networks)
        fprintf(file, "fabric %s\n", word_of(n.name).c_str());
    std::vector<int> right, wrong; // numbers of devices of the algorithm that is looked at
    for (size_t i : order) {
        const std::string &name = of.names[i];
        int late = 0;
        for (int k = 2; k <= limits::shown_devices; k++) {
            if (!(of.meant.at(i) >> k & 1) || late == 2) continue;
            bool is_right = false;
            try {
                is_right = write_run(file, name, k, networks, scale);
            } catch (const Verdict &v) {
                worker.reset();
                late += v.kind == timeout;
                quiet = true;
                fprintf(file, "failed %s %d %s\n", word_of(name).c_str(), k,
                        word_of(v.what()).c_str());
            }
            if (i == mine) (is_right ? right : wrong).push_back(k);
        }
    }
    const int usual = wrong.empty() ? 4 : wrong[0];
    fprintf(file, "first %s %d\n", word_of(options.allreduce).c_str(),
            options.given ? options.given : usual);
    if (ferror(file) | fclose(file)) throw Verdict("cannot write " + options.show);
    printf("%s, one operation after another: ", options.allreduce.c_str());
    if (!right.empty()) printf("right sums on %s", devices(right).c_str());
    if (!wrong.empty()) printf("%sWRONG on %s", right.empty() ? "" : ", ", devices(wrong).c_str());
    puts(wrong.empty() ? "; a missing wait does not show here, but in make race" : "");
}
