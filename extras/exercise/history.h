// Part of the judge: how a wrong number came about. The algorithm runs once more for each device,
// an operation at a time, with 1 in place of that device's number and 0 everywhere else: what is
// then found in a place of memory is how often that number is in it. Runs with other numbers show
// what comes from other places, and from earlier calls.
// defines: Trace, history
#pragma once

// One such run. What the worker says may be anything: what becomes an index is checked.
struct Trace {
    struct Piece { // an operation has written numbers begin ... end - 1 of a block
        int row, begin, end;
        const float *x;
    };
    Answer answer;
    std::vector<Flat> first;                // of the gradients
    float nobodys;                          // what is in other memory
    std::vector<std::vector<Piece>> pieces; // of each block, in order
    explicit Trace(const Request &r)
        : answer(ask(r)), first(r.numbers), nobodys(r.keeps ? NAN : 0),
          pieces(answer.blocks.size()) {
        const int rows = answer.rows.size(), words = answer.words.size(), blocks = pieces.size();
        bool good = blocks >= r.k;
        auto within = [&](long i, long begin, long end) { good = good && i >= begin && i < end; };
        for (int i = 0; i < rows; i++) {
            const wire::Row &row = answer.rows[i];
            within(row.device, 0, limits::most_devices), within(row.lane, 0, std::min(rows, 1000));
            within(row.after, -1, i), within(row.name, 0, words), within(row.line, -1, words);
            within(row.from_block, -1, blocks), within(row.to_block, -1, blocks);
            for (int number : {row.from, row.to, row.numbers}) within(number, -1, 1 << 28);
        }
        rounds_of(answer);
        size_t at = 0;
        for (const wire::Change &c : answer.changes) {
            within(c.row, -1, rows), within(c.block, 0, blocks), within(c.begin, 0, 1 << 28);
            within(c.length, 0, (long)(answer.changed.size() - at) + 1);
            if (!good) break;
            pieces[c.block].push_back({c.row, c.begin, c.begin + c.length, &answer.changed[at]});
            at += c.length;
        }
        if (!good) throw Verdict("its reply is malformed");
    }
    const Piece *last_change(int block, int place, int row) const {
        const std::vector<Piece> &list = pieces[block];
        for (auto p = list.rbegin(); p != list.rend(); p++)
            if (p->row <= row && p->begin <= place && place < p->end) return &*p;
        return nullptr;
    }
    float after(int block, int place, int row) const { // what is there then
        const Piece *p = last_change(block, place, row);
        if (p) return p->x[place - p->begin];
        const bool gradient = block < (int)first.size() && place < (int)first[block].size();
        return gradient ? first[block][place] : nobodys;
    }
};

// Which operation comes after which one, by its stream and by waits
struct Order {
    const std::vector<wire::Row> &rows;
    std::vector<std::vector<int>> known; // the last operation of each lane before a row, or itself
    explicit Order(const std::vector<wire::Row> &rows) : rows(rows), known(rows.size()) {
        std::map<int, int> lasts;
        for (int r = 0; r < (int)rows.size(); r++) {
            std::vector<int> &clock = known[r];
            for (int before : {lasts.count(rows[r].lane) ? lasts[rows[r].lane] : -1, rows[r].after})
                for (size_t l = 0; before >= 0 && l < known[before].size(); l++) {
                    if (clock.size() <= l) clock.resize(l + 1, -1);
                    clock[l] = std::max(clock[l], known[before][l]);
                }
            if ((int)clock.size() <= rows[r].lane) clock.resize(rows[r].lane + 1, -1);
            clock[rows[r].lane] = lasts[rows[r].lane] = r;
        }
    }
    bool waits(int r, int other) const { // does r come after the other one?
        return other < 0 ||
               ((int)known[r].size() > rows[other].lane && known[r][rows[other].lane] >= other);
    }
};

class History {
public:
    // `before`: the sizes of an earlier call. Number i of all is wrong on device d
    History(const Request &failing, const Flat &expected, const std::vector<int> &before, int d,
            int i)
        : failing(failing), expected(expected), k(failing.k), d(d), i(i), n(expected.size()) {
        Request r;
        r.algorithm = failing.algorithm, r.k = k;
        for (const std::vector<int> &earlier : {before, failing.sizes}) {
            r.what = wire::sums, r.sizes = earlier;
            r.numbers.assign(k, Flat(total(earlier), 1));
            if (!earlier.empty()) ask(r);
        }
        r.what = wire::trace, r.keeps = true;
        auto run = [&](auto number) {
            for (int c = 0; c < k; c++)
                for (int j = 0; j < n; j++) r.numbers[c][j] = number(c, j);
            traces.emplace_back(new Trace(r));
            r.keeps = false;
        };
        run([](int, int) { return 0; });
        for (int of = 0; of < k; of++) run([&](int c, int j) { return c == of && j == i; });
        for (int of : {1, 2}) run([&](int c, int j) { return j == i ? 0 : id(c, j, of); });
        rows = earlier().answer.rows;
        for (const auto &t : traces)
            if (t->answer.rows.size() != rows.size() || t->pieces.size() != earlier().pieces.size())
                throw Verdict("what it enqueues depends on the numbers");
        order.reset(new Order(rows));
        end = rows.size() - 1 - k; // the last k rows are what comes next on each device
        for (int c = 0; c < k; c++) tracked.insert({c, i});
        for (int c = 0; c < k; c++)
            for (size_t b = 0; b < own(c).pieces.size(); b++)
                for (const Trace::Piece &p : own(c).pieces[b])
                    for (int j = p.begin; j < p.end; j++)
                        if (p.x[j - p.begin] != 0) tracked.insert({(int)b, j});
    }
    // The cause, in a sentence, and a row for each operation that led to the number
    std::string cause, list;
    void tell() {
        const Whose last = whose(d, i, end);
        follow(d, i, end);
        if (is_sum(last)) find_wait();
        else if (!find_operation(last)) find_missing(last);
        if (mark >= 0) cause = line_of(mark) + name_of(mark) + ": " + why;
        else cause = why;
        const int many = steps.size(), shown = limits::shown_operations;
        int at = 0, marked = many - 1, width = 0;
        for (const auto &[s, reads] : steps) {
            width = std::max<int>(width, text_of(s).size());
            if (s.row == mark) marked = at;
            at++;
        }
        const int first = std::max(0, std::min(marked - shown / 2, many - shown));
        if (first > 0) list += format("    (%d operations before)\n", first);
        at = 0;
        for (const auto &[s, reads] : steps) {
            if (at >= first && at < first + shown)
                list += format("    %-*s   %s%s\n", width, text_of(s).c_str(),
                               words_of(whose(s.block, s.place, s.row)).c_str(),
                               s.row == mark ? "   <- here" : "");
            at++;
        }
        if (many > first + shown)
            list += format("    (%d operations after)\n", many - first - shown);
    }

private:
    typedef std::vector<float> Whose; // times of each device's number i; others, twice; earlier
    struct Step {                     // an operation that has written a number
        int row, block, place;
        bool operator<(const Step &s) const {
            return std::tie(row, block, place) < std::tie(s.row, s.block, s.place);
        }
    };
    typedef std::pair<int, int> Place; // of memory: a block, and where in it
    const Place none = {-1, 0};
    const Request &failing;
    const Flat &expected; // sums
    int k, d, i, n, end, mark = -1;
    std::string why;
    std::vector<std::unique_ptr<Trace>> traces;
    std::vector<wire::Row> rows;
    std::unique_ptr<Order> order;
    std::set<Place> tracked;                  // what ever has number i of a device in it
    std::map<Step, std::vector<Place>> steps; // with what each of them reads, as far as known

    int device_of(const Place &p) const { return earlier().answer.blocks[p.first]; }
    const Trace &earlier() const { return *traces[0]; }
    const Trace &own(int c) const { return *traces[1 + c]; }
    const Trace &others(int of) const { return *traces[k + of]; }
    float id(int c, int j, int of) const { // of a number: two, so that a sum is told from others
        const long id = (long)c * n + j + 1;
        return of == 1 ? id : id * 7919 % 1048573 + 1;
    }
    Whose whose(int block, int place, int row) const {
        Whose w;
        for (int c = 0; c < k; c++) w.push_back(own(c).after(block, place, row));
        for (const Trace *t : {&others(1), &others(2), &earlier()})
            w.push_back(t->after(block, place, row));
        return w;
    }
    bool is_right(const Whose &w) const { // it may become the sum
        for (int c = 0; c < k; c++)
            if (w[c] != 0 && w[c] != 1) return false;
        return w[k] == 0 && w[k + 1] == 0 && w[k + 2] == 0;
    }
    // Numbers of another place alone may become the sum there, but not here
    bool may_be_right(const Step &s, const Whose &w) const {
        const bool none = std::count(w.begin(), w.begin() + k, 0) == k && w[k + 2] == 0;
        return is_right(w) || (none && Place(s.block, s.place) != Place(d, i));
    }
    bool is_sum(const Whose &w) const {
        return is_right(w) && std::count(w.begin(), w.begin() + k, 1) == k;
    }
    // What else is in it than numbers i of this call
    std::vector<std::string> others_of(const Whose &w) const {
        std::vector<std::string> list;
        const float a = w[k], b = w[k + 1];
        if ((a != 0 || b != 0) && w[k + 2] == 0) {
            const bool is_id = a >= 1 && a <= (float)k * n && a == std::floor(a);
            const int c = is_id ? ((int)a - 1) / n : 0, j = is_id ? ((int)a - 1) % n : 0;
            double sum = 0, sum2 = 0; // of all devices' numbers j
            const double all_j = (a - (double)n * k * (k - 1) / 2) / k - 1;
            for (int c = 0; c < k; c++) sum += id(c, all_j, 1), sum2 += id(c, all_j, 2);
            if (is_id && id(c, j, 2) == b) list.push_back(gpu(c) + format("'s number %d", j));
            else if (sum == a && sum2 == b) list.push_back(format("the sum of number %g", all_j));
            else list.push_back("numbers of other places");
        }
        if (std::isnan(w[k + 2])) list.push_back("memory that nothing has written");
        else if (w[k + 2] != 0) list.push_back("what an earlier call has left");
        return list;
    }
    std::string number_of(int c) const { return gpu(c) + format("'s number %d", i); }
    std::string words_of(const Whose &w) const { // gpu(0) + 2 gpu(1)
        if (is_sum(w)) return "the sum";
        std::vector<std::string> list;
        for (int c = 0; c < k; c++)
            if (w[c] != 0) list.push_back((w[c] == 1 ? "" : format("%g ", w[c])) + gpu(c));
        for (const std::string &other : others_of(w)) list.push_back(other);
        std::string text;
        for (const std::string &word : list) text += (text.empty() ? "" : " + ") + word;
        return text.empty() ? "0" : text;
    }
    std::string line_of(int row) const { // or its number, without lines
        const int line = rows[row].line;
        const std::string &text = line < 0 ? "" : earlier().answer.words[line];
        return text.empty() ? format("operation %d, ", row - k + 1) : text + ", ";
    }
    std::string name_of(int row) const {
        const wire::Row &r = rows[row];
        if (row < k) return gpu(row) + "'s gradients";
        if (r.is_message) return "message " + gpu(r.message.src) + " to " + gpu(r.message.dst);
        return earlier().answer.words[r.name] + " on " + gpu(r.device);
    }
    std::string text_of(const Step &s) const {
        const int device = earlier().answer.blocks[s.block];
        return line_of(s.row) + name_of(s.row) + ", into " + gpu(device) +
               (s.block >= k   ? "'s other memory"
                : s.place == i ? "'s tensor"
                               : format("'s number %d of all", s.place));
    }
    static bool covers(const wire::Row &r, int block, int place) {
        return r.to_block == block && place >= r.to && place < r.to + r.numbers;
    }
    // The last operation up to this one that has written there, or -1
    int writer(int block, int place, int row) const {
        int last = block < k && place < n ? block : -1; // the streams' first row
        for (const auto &t : traces)
            if (const Trace::Piece *p = t->last_change(block, place, row))
                last = std::max(last, p->row);
        for (int r = row; r > last; r--)
            if (covers(rows[r], block, place)) return r;
        return last;
    }
    int next_writer(int block, int place, int row) const {
        for (int r = row + 1; r <= end; r++)
            if (writer(block, place, r) == r) return r;
        return -1;
    }
    // Find the operations that have led to what is there after this one.
    void follow(int block, int place, int row) {
        const int w = writer(block, place, row);
        if (w < k || steps.count({w, block, place})) return;
        std::vector<Place> reads;
        const Whose now = whose(block, place, w), before = whose(block, place, w - 1);
        if (covers(rows[w], block, place)) {
            if (rows[w].from_block >= 0)
                reads.push_back({rows[w].from_block, rows[w].from + place - rows[w].to});
        } else {
            Whose added = now; // a kernel: has it kept what was there?
            bool kept = true, is_new = true;
            for (size_t j = 0; j < now.size(); j++) {
                kept = kept && !(now[j] < before[j]);
                is_new = is_new && before[j] == 0;
            }
            for (size_t j = 0; kept && j < now.size(); j++) added[j] -= before[j];
            if (kept && !is_new) reads.push_back({block, place});
            // Of the places with this, on its device or on others, the one that was written last
            auto place_with = [&](const Whose &wanted, bool own, bool ordered = false) {
                Place source = none;
                for (const Place &p : tracked)
                    if (const int last = writer(p.first, p.second, w - 1);
                        p != Place(block, place) &&
                        (device_of(p) == device_of({block, place})) == own &&
                        whose(p.first, p.second, w - 1) == wanted &&
                        (!ordered || order->waits(w, last)) &&
                        (source == none || last > writer(source.first, source.second, w - 1)))
                        source = p;
                return source;
            };
            std::vector<Place> found = {place_with(added, true)};
            auto is_unknown = [&] { return std::count(found.begin(), found.end(), none) > 0; };
            // Else it reads other devices' memory: the same there, or all parts of it
            for (const Whose &wanted : {now, added})
                if (is_unknown()) found = {place_with(wanted, false, true)};
            if (is_unknown()) {
                found.clear();
                for (int c = 0; c < k; c++) {
                    Whose part(now.size());
                    part[c] = 1;
                    if (added[c] == 0) continue;
                    const Place own = place_with(part, true);
                    found.push_back(own != none ? own : place_with(part, false));
                }
            }
            for (const Whose &wanted : {now, added})
                if (is_unknown()) found = {place_with(wanted, false)};
            if (!is_unknown()) reads.insert(reads.end(), found.begin(), found.end());
        }
        steps[{w, block, place}] = reads;
        for (const Place &p : reads) follow(p.first, p.second, w - 1);
    }

    // --- what is marked

    // After which operation can it not become right? The first that puts in what does not belong
    // there, or overwrites the last copy of what is missing.
    bool find_operation(const Whose &last) {
        Step lost = {end + 1, -1, 0};
        int whose_lost = -1;
        for (int c = 0; c < k; c++) {
            if (last[c] != 0) continue;
            Step gone = {-1, -1, 0}; // the operation that has overwritten the last one
            for (const auto &[b, p] : tracked) {
                if (own(c).after(b, p, end) != 0) gone.row = end + 1;
                for (const Trace::Piece &piece : own(c).pieces[b])
                    if (piece.begin <= p && p < piece.end && piece.x[p - piece.begin] == 0 &&
                        own(c).after(b, p, piece.row - 1) != 0 && piece.row > gone.row)
                        gone = {piece.row, b, p};
            }
            if (gone.block >= 0 && gone.row < lost.row) lost = gone, whose_lost = c;
        }
        for (const auto &[s, reads] : steps) {
            if (s.row >= lost.row) break;
            const Whose now = whose(s.block, s.place, s.row);
            if (may_be_right(s, now)) continue;
            mark = s.row;
            std::vector<std::string> words = others_of(now);
            for (int c = 0; c < k; c++)
                if (now[c] != 0 && now[c] != 1)
                    words.push_back(format("%g times ", now[c]) + gpu(c));
            why = "from here on it has " + listed(words);
            for (const auto &[b, p] : reads)
                if (const int w = writer(b, p, s.row - 1); w >= k && !order->waits(s.row, w))
                    why += ", as it reads what " + line_of(w) + name_of(w) + ", may have written";
            return true;
        }
        if (whose_lost >= 0) {
            mark = lost.row, steps[lost];
            why = "this overwrites " + words_of(whose(lost.block, lost.place, lost.row - 1)) +
                  ", the last with " + number_of(whose_lost) +
                  (came(whose_lost) >= 0 ? "" : ", which nothing has brought to " + gpu(d));
            return true;
        }
        // The tensor had more before; or what is read is complete only later
        for (auto s = steps.rbegin(); s != steps.rend(); s++)
            for (const auto &[b, p] : s->second) {
                const Whose then = whose(b, p, s->first.row - 1);
                for (int r = s->first.row; r <= end && !covers(rows[s->first.row], b, p); r++)
                    if (writer(b, p, r) == r && is_more(whose(b, p, r), then, last)) {
                        mark = s->first.row, steps[{r, b, p}];
                        why = "it reads this too early: what is missing comes with " + line_of(r) +
                              name_of(r);
                        return true;
                    }
            }
        for (int r = end; r >= k; r--)
            if (writer(d, i, r) == r && is_more(whose(d, i, r - 1), whose(d, i, r), last)) {
                mark = r, steps[{r, d, i}];
                why = "this overwrites " + words_of(whose(d, i, r - 1)) + " in the tensor";
                return true;
            }
        return false;
    }
    // Has `a` a device's number that `b` and the last one lack?
    bool is_more(const Whose &a, const Whose &b, const Whose &last) const {
        bool more = false;
        for (int c = 0; c < k; c++) more = more || (a[c] != 0 && b[c] == 0 && last[c] == 0);
        return is_right(a) && more;
    }
    // The first operation that has brought device c's number to device d, or -1
    int came(int c, bool follows = false) {
        if (c == d) return 0;
        for (int r = k; r <= end; r++)
            for (const auto &[b, p] : tracked)
                if (earlier().answer.blocks[b] == d && writer(b, p, r) == r &&
                    own(c).after(b, p, r) != 0) {
                    if (follows) follow(b, p, r);
                    return r;
                }
        return -1;
    }
    // A message from device c of what nothing in this call has written, or -1
    int reads_old(int c) const {
        for (int r = k; r <= end; r++)
            if (rows[r].is_message && rows[r].message.src == c && rows[r].from_block >= k &&
                rows[r].to_block >= 0 && writer(rows[r].from_block, rows[r].from, r - 1) < 0)
                return r;
        return -1;
    }
    // Nothing is wrong in what was done, so something is missing.
    void find_missing(const Whose &last) {
        for (const Place &p : tracked) // has the sum come to this device?
            if (earlier().answer.blocks[p.first] == d && p != Place(d, i))
                for (int r = k; r <= end; r++)
                    if (writer(p.first, p.second, r) == r && is_sum(whose(p.first, p.second, r))) {
                        follow(p.first, p.second, r);
                        why = "the sum comes to " + gpu(d) + " (" + line_of(r) + name_of(r) +
                              "), but nothing writes it into the tensor";
                        return;
                    }
        for (int e = 0; e < k; e++)
            if (is_sum(whose(e, i, end))) {
                follow(e, i, end);
                why = gpu(e) + " has the sum, but nothing brings it to " + gpu(d);
                return;
            }
        for (int c = 0; c < k; c++) {
            if (last[c] != 0) continue;
            why += why.empty() ? "" : "; ";
            if (const int r = came(c, true); r >= 0)
                why += number_of(c) + " comes to " + gpu(d) + " (" + line_of(r) + name_of(r) +
                       "), but nothing adds it";
            else if (const int r = reads_old(c); r >= 0) {
                mark = r, steps[{r, rows[r].to_block, rows[r].to}];
                why = "it reads memory of " + gpu(c) + " that this call has not written: is a " +
                      "tensor kept from an earlier call?";
                return;
            } else why += "nothing brings " + number_of(c) + " to " + gpu(d);
        }
    }
    // Is the failing case right as the first call of a process, each time?
    bool is_right_alone() const {
        bool right = true;
        for (int i = 0; i < 3 && right; i++) {
            worker.reset();
            const Answer again = ask(failing);
            for (const Flat &sum : again.sums) right = right && sum == expected;
        }
        return right;
    }
    // One operation after another it is right: which of them does not wait for another?
    void find_wait() {
        a_wait_is_missing = true;
        auto waits = [&](int r, int other) { return order->waits(r, other); };
        auto found = [&](int row, const std::string &what, int waiting, int other) {
            if (mark >= 0 && mark <= row) return;
            mark = row;
            const std::string one = gpu(rows[waiting].device), two = gpu(rows[other].device);
            why = what + ": " + (one == two ? "this stream of " + one : one) + " must wait for " +
                  (one == two ? "that one" : two) + " in between (make_wait)";
        };
        for (const auto &[s, reads] : steps) {
            const int device = rows[s.row].device, of = earlier().answer.blocks[s.block];
            if (rows[s.row].is_message || of < 0 || of == device) continue;
            mark = s.row;
            why = "it is on a stream of " + gpu(device) + ", but writes to memory of " + gpu(of);
            return;
        }
        for (const auto &[s, reads] : steps) {
            std::vector<Place> used = reads;
            used.push_back({s.block, s.place});
            for (const auto &[b, p] : used) {
                const int w = writer(b, p, s.row - 1);
                const int of = device_of({b, p});
                const bool is_far = rows[s.row].is_kernel && of != rows[s.row].device;
                if (!waits(s.row, w))
                    found(s.row,
                          "it " + (is_far ? "reads " + gpu(of) + "'s memory, but " : "") +
                              "does not wait for " + (w < k ? "" : line_of(w)) + name_of(w),
                          s.row, w);
            }
        }
        for (const auto &[s, reads] : steps)
            for (const auto &[b, p] : reads) {
                const int next = next_writer(b, p, s.row), after = end + 1 + b;
                const std::string reads_it = line_of(s.row) + name_of(s.row) + ", has read this";
                if (next >= 0 && !waits(next, s.row))
                    found(next, "it does not wait until " + reads_it, next, s.row);
                if (b < k && !waits(after, s.row))
                    found(s.row, "what comes after the allreduce does not wait for it", after,
                          s.row);
            }
        const int w = writer(d, i, end), after = end + 1 + d;
        if (!waits(after, w))
            found(w, "what comes after the allreduce does not wait for it", after, w);
        if (mark >= 0) return;
        a_wait_is_missing = !is_right_alone();
        if (!a_wait_is_missing)
            why = "it is right as the first call of a process, and wrong after other calls: does "
                  "something stay from an earlier call (static)?";
        else
            why = "with one operation after another it is right, and each waits for those before "
                  "it: does a kernel's block wait for another's, or depend on time?";
    }
};

// Why number i of all on device d is wrong: a sentence, then rows.
static std::pair<std::string, std::string> history(const Request &failing, const Flat &expected,
                                                   const std::vector<int> &before, int d, int i) {
    try {
        quiet = true;
        worker.reset();
        History h(failing, expected, before, d, i);
        h.tell();
        worker.reset();
        return {h.cause, h.list};
    } catch (const Verdict &v) {
        worker.reset();
        return {std::string("how it came about cannot be told: ") + v.what(), ""};
    }
}
