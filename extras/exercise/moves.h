// Part of the judge: which operation brings whose numbers to a device. A message brings what it
// copies. A kernel that reads another device's memory brings what its own device has not had, which
// is counted like messages, one from each device that it reads.
//
// The algorithm runs twice, an operation at a time. First all numbers of device c are base^c: the
// digits of what is found somewhere tell whose numbers are in it. Then each number is another one,
// which tells their place among all.
// defines: Moves
#pragma once

class Moves {
public:
    std::vector<Trace> traces; // of these two runs
    const std::vector<wire::Row> &rows() const { return traces[0].answer.rows; }
    std::vector<std::vector<wire::Read>> reads; // of each row
    std::string problem;                        // the first one; empty: none

    // The digits have so many bits
    Moves(const std::string &name, int k, const std::vector<int> &sizes, int bits)
        : k(k), n(total(sizes)), bits(bits), had(k + 1, std::vector<std::vector<Sum>>(n)) {
        Request r;
        r.what = wire::trace, r.k = k, r.algorithm = name, r.sizes = sizes;
        r.numbers.assign(k, Flat(n));
        for (bool placed : {false, true}) {
            for (int c = 0; c < k; c++)
                for (int j = 0; j < n; j++)
                    r.numbers[c][j] = placed ? c % 8 * n + j + 1 : 1 << bits * c;
            traces.emplace_back(r);
        }
        const Answer &a = traces[0].answer, &b = traces[1].answer;
        if (a.rows.size() != b.rows.size() || a.blocks.size() != b.blocks.size())
            problem = name + ": what it enqueues depends on the numbers";
        reads.resize(rows().size());
        if (problem.empty()) find_moves(name);
    }

private:
    struct Sum { // of these devices' numbers j: a bit for each. It has been there since this row
        unsigned whose;
        int row;
    };
    int k, n, bits;
    std::vector<std::vector<std::vector<Sum>>> had; // on device d, number j: had[d + 1][j]
    std::map<int, unsigned> ever;                   // whose numbers a device has had

    // Whose numbers are in what is there after this row, and which ones.   ->   0: no such sum
    unsigned whose(int block, int place, int row, int &j) const {
        const float x = traces[0].after(block, place, row), y = traces[1].after(block, place, row);
        unsigned found = 0;
        long sum = y, parts = 0;
        if (!(x > 0 && x < 1 << 24 && y < 1 << 24) || x != std::floor(x)) return 0;
        for (unsigned c = 0, digits = x; digits; c++, digits >>= bits) {
            const unsigned digit = digits & ((1 << bits) - 1);
            if (digit > 1) return 0;
            found |= digit << c, parts += digit, sum -= digit * (c % 8 * n);
        }
        j = sum / parts - 1;
        return y == std::floor(y) && sum % parts == 0 && j >= 0 && j < n ? found : 0;
    }
    void arrives(int device, int j, unsigned sum, int row) {
        unsigned &all = ever[device];
        all |= sum;
        std::vector<Sum> &list = had[device + 1][j];
        for (const Sum &s : list)
            if (s.whose == sum) return;
        list.push_back({sum, row});
    }
    void add_read(int row, int src, int dst, bool into_tensor, int j, unsigned sum) {
        for (wire::Read &read : reads[row])
            if (read.src == src && read.dst == dst) return read.whose.push_back(sum);
        reads[row].push_back({src, dst, j, into_tensor, {sum}});
    }
    // A kernel has written this sum of numbers j: which devices' memory has it read?
    void find_sources(const Order &order, int row, int dst, bool into_tensor, int j, unsigned sum) {
        unsigned missing = sum;
        for (const Sum &s : had[dst + 1][j]) missing &= ~s.whose;
        while (missing) { // the most that another device has of it
            int src = 0;
            unsigned most = 0;
            while (!(missing >> src & 1)) src++;
            for (int d = k - 1; d >= -1; d--)
                for (const Sum &s : had[d + 1][j])
                    if (d != dst && !(s.whose & ~sum) && (s.whose & missing) && s.row < row &&
                        order.waits(row, s.row) &&
                        __builtin_popcount(s.whose) > __builtin_popcount(most))
                        most = s.whose, src = d;
            if (!most) most = 1u << src;
            add_read(row, src, dst, into_tensor, j, most);
            missing &= ~most;
        }
    }
    void find_moves(const std::string &name) {
        const Order order(rows());
        const std::vector<int> &blocks = traces[0].answer.blocks;
        for (int c = 0; c < k; c++)
            for (int j = 0; j < n; j++) arrives(c, j, 1u << c, c);
        std::map<int, std::set<std::array<int, 3>>> changes; // by operation: a block, begin, end
        for (const Trace &t : traces)
            for (size_t b = 0; b < t.pieces.size(); b++)
                for (const Trace::Piece &p : t.pieces[b])
                    changes[p.row].insert({(int)b, p.begin, p.end});
        for (const auto &[row, list] : changes)
            for (bool brought : {true, false}) // the host may add at once what a message brings
                for (const auto &[b, begin, end] : list) {
                    const wire::Row op = row < 0 ? wire::Row{} : rows()[row];
                    const bool is_target = op.is_message && op.to_block == b && op.from_block >= 0;
                    const int device = blocks[b];
                    for (int i = begin; i < end; i++) {
                        int j = 0;
                        const unsigned sum = whose(b, i, row, j);
                        if (!sum) continue;
                        const float x = traces[0].after(b, i, row);
                        auto source = [&](int after) {
                            return traces[0].after(op.from_block, op.from + i - op.to, after);
                        };
                        // (What a launch without LAUNCH has written is seen with what comes next)
                        const bool is_copy =
                            is_target && (source(row - 1) == x || source(row) == x);
                        if (brought && !is_copy) continue;
                        if (!brought && op.is_kernel && device >= 0) {
                            find_sources(order, row, op.device, b < k, j, sum);
                            arrives(op.device, j, sum, row);
                            if (device != op.device)
                                add_read(row, op.device, device, b < k, j, sum);
                        } else if (!brought && (sum & ~ever[device]) && problem.empty()) {
                            problem = format(
                                "%s: numbers come to %s without a message that was counted: use "
                                "copyto or send, or let LAUNCH start the kernel that reads them",
                                name.c_str(), gpu(device).c_str());
                        }
                        arrives(device, j, sum, row);
                    }
                }
    }
};
