// Tests of make bench, trace, profile, summary and scale.
//
//     make test T='-tc=simulate*'
//
// defines: main

#define MEASURE_NO_MAIN
#include "measure.cu"

#include "../watch/fabric.h"
#include "../tests.h"

typedef std::function<void(const PerDevice &grads)> Exchange;
static const std::vector<std::string> right_algorithms = {"naive",   "bucket", "host", "by_tensor",
                                                          "sharded", "ring",   "tree", "yours"};

#ifdef FAST // which tells them
TEST_CASE("Recorder: bytes of the tensors that a kernel names") {
    Kept kept;
    const Tensor X = on_device(random_floats(1000, 1), {10, 100}), Y = copyto(X, gpu(0));
    auto bytes_of = [&](const std::string &kernel, const std::function<void()> &call) {
        watch::Recorder r(false);
        call();
        double bytes = -1;
        for (const watch::Op &op : r.ops)
            if (watch::kernel_name(op.name) == kernel) bytes = op.bytes;
        return bytes;
    };
    CHECK(bytes_of("add_kernel", [&] { add_(X, Y); }) == 8000);
    CHECK(bytes_of("copy", [&] { copyto(X, Y); }) == 4000);
    CHECK(bytes_of("copy in", [&] { copyto(on_host(Floats(10), {10}), gpu(0)); }) == 40);
    CHECK(bytes_of("relu_kernel", [&] { relu(X); }) == 8000);
    CHECK(bytes_of("fill_kernel", [&] { full({7}, 1, gpu(0)); }) == 28);
    waitall();
}
#endif


// What the simulation needs of what is recorded.
static std::vector<fabric::Op> replayable(const std::deque<watch::Op> &ops) {
    std::vector<fabric::Op> result;
    int waited = -1;
    for (const watch::Op &op : ops) result.push_back(fabric::simulated(op, waited));
    return result;
}
static std::vector<fabric::Op> real_allreduce(const std::string &name, int k, const Ints &sizes) {
    const PerDevice grads = make_grads(k, sizes);
    watch::Recorder r(false);
    sum_gradients(name, grads);
    return replayable(r.ops);
}
static std::vector<fabric::Op> dry_allreduce(const std::string &name, int k, const Ints &sizes) {
    const DryRun devices(k);
    return real_allreduce(name, k, sizes);
}

TEST_CASE("DryRun: enqueues what a run on devices enqueues, and leaves nothing behind") {
    for (const std::string &name : right_algorithms)
        for (int k = 1; k <= 5; k++) {
            INFO(name, ", k ", k);
            const Ints sizes = {1000, 3, 0, 77};
            const size_t before = watch::taken_bytes;
            const auto dry = dry_allreduce(name, k, sizes);
            CHECK(watch::taken_bytes == before);
            const auto real = real_allreduce(name, k, sizes);
            REQUIRE(dry.size() == real.size());
            for (size_t i = 0; i < dry.size(); i++) {
                CAPTURE(i);
                const fabric::Op &a = dry[i], &b = real[i];
                CHECK((a.kind == b.kind && a.lane == b.lane && a.after == b.after));
                CHECK((a.src == b.src && a.dst == b.dst && a.bytes == b.bytes));
            }
            waitall();
        }
    check_exact_sums("ring", 3, {10, 20}); // on devices that are there, after all that
}

// A message of n bytes takes a + n/b by itself, a = L + o. Of m messages to a device, each of
// another one, the engines take as many at once as there are.
TEST_CASE("simulate: each algorithm takes what its formula says") {
    const double L = 4e-6, o = 6e-6, a = L + o, b = 1e9, host = 2e9, GB = 1e9, add = 2e-6;
    for (const int engines : {0, 1, 3})
        for (int k : {2, 3, 4, 8, 16, 32})
            for (long m : {240L, 960000L}) { // numbers of each of P tensors, which k * P divides
                const fabric::Fabric own = {"own",  L * 1e6, o * 1e6,  (double)engines,
                                            b / GB, 0,       b / GB,   host / GB,
                                            1e12,   0,       add * 1e6};
                const int P = 2 * k, all = k - 1;
                const double n = sizeof(float) * (double)(m * k) * P, part = n / P;
                const int rounds = std::ceil(std::log2(k));
                const auto waves = [=](int m) { return engines ? (m + engines - 1) / engines : 1; };
                // Of two tensors for a device the second follows the first on its pair's stream,
                // or, with one engine, is behind all first ones in its line
                const double two = engines == 1 && k > 2 ? 2 * all * o + L : 2 * a;
                std::map<std::string, double> formulas = {
                    {"naive", 2 * all * (P * a + n / b) + all * P * add},
                    {"bucket", 2 * all * (a + n / b) + all * add},
                    {"host", k * (a + n / b) + a + std::max(n / b, k * n / host)},
                    {"by_tensor", 2 * (two + 2 * all * part / b) + 2 * all * add},
                    {"sharded", 2 * (L + waves(all) * o + all * n / k / b) + all * add},
                    {"ring", 2 * all * (a + n / k / b) + all * add},
                    {"tree", 2 * rounds * (a + n / b) + rounds * add}};
                if (engines == 3 && k > 4) formulas.erase("by_tensor"); // waves of both tensors
                for (const auto &formula : formulas) {
                    const std::string name = formula.first;
                    const double want = formula.second;
                    INFO(name, ", k ", k, ", m ", m, ", engines ", engines);
                    auto ops = dry_allreduce(name, k, Ints(P, m * k));
                    const double got = fabric::simulate(ops, own);
                    CHECK(got == doctest::Approx(want).epsilon(0.01));
                    for (const fabric::Op &op : ops) // and all of them have run
                        CHECK((op.end >= op.begin && op.end <= got * (1 + 1e-9)));
                }
            }
}
// Two machines of four devices: inside, device 0's sum to the host, between, and to all devices.
TEST_CASE("sum_in_nodes: takes what its formula says") {
    const int k = 8, node = 4, numbers = 1 << 20;
    fabric::Fabric own = fabric::find_fabric("4x10,4+30,0.5,memory=1e12");
    own.host_port = 1, own.host_all = 2;
    const double n = sizeof(float) * numbers, a = 10e-6, A = 30e-6, b = 4e9, host = 1e9, B = 0.5e9;
    const double aside = a + n / host + a + node * n / (2 * host); // to the host and back
    const std::map<std::string, double> formulas = {
        {"ring", 2 * 3 * (a + n / node / b) + 2 * (A + n / 2 / B)},
        {"tree", 2 * 2 * (a + n / b) + 2 * (A + n / B)}};
    for (const auto &formula : formulas) {
        const std::string algorithm = formula.first;
        CAPTURE(algorithm);
        const DryRun devices(k);
        const PerDevice grads = make_grads(k, {numbers});
        watch::Recorder r(false);
        dry_algorithm = algorithm, dry_node = node;
        sum_in_nodes(grads);
        auto ops = replayable(r.ops);
        CHECK(fabric::simulate(ops, own) == doctest::Approx(formula.second + aside).epsilon(0.01));
        auto between = [=](const fabric::Op &op) {
            return op.kind == fabric::Op::message && op.src >= 0 && op.dst >= 0 &&
                   op.src / node != op.dst / node;
        };
        CHECK(std::count_if(ops.begin(), ops.end(), between) == (algorithm == "ring" ? 4 : 2));
    }
    dry_algorithm = "naive", dry_node = 1024;
}
// A slow host: what it enqueues, one after another, and the last one's time. A message between
// devices has four waits, with the records before them, of half a call; naive's and bucket's two.
TEST_CASE("simulate: one host thread enqueues for all devices, or each process has one") {
    const double h = 1e-3;
    for (int k : {2, 3, 4, 8, 16}) {
        const int P = 3, all = k - 1;
        const std::map<std::string, double> calls = {{"naive", P * all * (2 * 2 + 1)},
                                                     {"bucket", all * (2 * 2 + 1)},
                                                     {"host", 3 * k},
                                                     {"by_tensor", P * all * (2 * 3 + 1)},
                                                     {"sharded", k * all * (2 * 3 + 1)},
                                                     {"ring", k * all * (2 * 3 + 1)},
                                                     {"tree", all * (2 * 3 + 1)}};
        for (const auto &formula : calls) {
            INFO(formula.first, ", k ", k);
            auto ops = dry_allreduce(formula.first, k, Ints(P, 160 * k));
            fabric::Fabric own = fabric::find_fabric("1,25,host=1000");
            CHECK(fabric::simulate(ops, own) == doctest::Approx(formula.second * h).epsilon(0.01));
            // A process for each device: all hosts work at once, where all devices have as much
            own.node = 1, own.network = 25;
            const double each = fabric::simulate(ops, own), equal = formula.second * h / k;
            if (formula.first == "sharded" || formula.first == "ring")
                CHECK(each == doctest::Approx(equal).epsilon(0.01));
            CHECK(each > 0.99 * equal);
        }
    }
}
TEST_CASE("simulate: messages share links fairly, none is faster than its links") {
    const double GB = 1e9, n = 1e6;
    const fabric::Fabric own = {"own", 5, 0, 0, 1, 1.5, 1, 1, 1, 0, 0};
    auto message = [](int lane, int src, int dst, double bytes) {
        fabric::Op op;
        op.kind = fabric::Op::message;
        op.lane = lane, op.src = src, op.dst = dst, op.bytes = bytes;
        return op;
    };
    fabric::Fabric whole = own; // no halves
    whole.crossing = 0;
    const struct {
        const fabric::Fabric &network;
        std::vector<fabric::Op> ops;
        Doubles ms;
    } cases[] = {
        // from one device: the shorter one ends, then the other has all
        {whole, {message(0, 0, 1, n), message(1, 0, 2, 2 * n)}, {2, 3}},
        // both directions at once; what another link holds up leaves more to the others
        {whole,
         {message(0, 1, 0, n), message(1, 2, 0, n), message(2, 3, 0, n),
          message(3, 1, 4, 2 * n / 3), message(4, 0, 1, n)},
         {3, 3, 3, 1, 1}},
        // three between the halves of six devices share 1.5 GB/s, back is another way
        {own,
         {message(0, 0, 3, n), message(1, 1, 4, n), message(2, 2, 5, n), message(3, 3, 0, n)},
         {2, 2, 2, 1}}};
    for (auto c : cases) {
        CAPTURE(c.ms);
        fabric::simulate(c.ops, c.network);
        Floats ms;
        for (const fabric::Op &op : c.ops) ms.push_back((op.end - op.begin - 5e-6) * GB / n);
        check_close(ms, c.ms, 5e-6);
    }
    // Many at random: no link has moved more than it can
    std::mt19937 random(1);
    const int k = 6;
    std::vector<fabric::Op> ops;
    for (int i = 0; i < 300; i++) {
        const int src = random() % k, dst = (src + 1 + random() % (k - 1)) % k;
        ops.push_back(message(random() % 20, src, dst, 1 + random() % (1 << 20)));
        if (i % 3 == 0) { // and waits
            ops.push_back({fabric::Op::wait, (int)(random() % 20)});
            ops.back().after = random() % (ops.size() - 1);
        }
    }
    const double all = fabric::simulate(ops, own);
    for (int link = 0; link < 2 * k + 2; link++) {
        double bytes = 0, busy = 0, until = 0;
        std::vector<std::pair<double, double>> times;
        for (const fabric::Op &op : ops) {
            if (op.kind != fabric::Op::message) continue;
            CHECK(op.bytes <= GB * (op.end - op.begin - 5e-6) * (1 + 1e-6));
            CHECK(op.end <= all);
            const bool uses = link < k       ? op.src == link
                              : link < 2 * k ? op.dst == link - k
                                             : (op.src >= k / 2) != (op.dst >= k / 2) &&
                                                   (op.dst >= k / 2) == (link == 2 * k);
            if (!uses) continue;
            bytes += op.bytes;
            times.push_back({op.begin, op.end - 5e-6});
        }
        std::sort(times.begin(), times.end());
        for (const auto &[begin, end] : times) {
            busy += std::max(0.0, end - std::max(begin, until));
            until = std::max(until, end);
        }
        CAPTURE(link);
        CHECK(bytes <= busy * GB * (link < 2 * k ? 1 : 1.5) * (1 + 1e-6));
    }
}
TEST_CASE("simulate: a wait for what comes later, and kernels") {
    const fabric::Fabric own = {"own", 0, 0, 0, 1, 0, 1, 1, 2, 0, 0};
    std::vector<fabric::Op> ops(4);
    ops[0].kind = fabric::Op::kernel, ops[0].lane = 0, ops[0].bytes = 4e6; // 2 ms of memory
    ops[1].kind = fabric::Op::kernel, ops[1].lane = 1, ops[1].seconds = 0.005;
    ops[2].kind = fabric::Op::wait, ops[2].lane = 0, ops[2].after = 1;
    ops[3].kind = fabric::Op::kernel, ops[3].lane = 0, ops[3].seconds = 0.001;
    CHECK(fabric::simulate(ops, own) == doctest::Approx(0.006));
    CHECK((ops[0].end == doctest::Approx(0.002) && ops[2].begin == doctest::Approx(0.005)));
    CHECK((ops[2].end == doctest::Approx(0.005) && ops[3].begin == doctest::Approx(0.005)));
    CHECK(fabric::simulate(ops, own, 10) == doctest::Approx(0.021)); // the bytes, not the seconds
}
TEST_CASE("simulate: bytes that take no time") {
    auto ops = dry_allreduce("ring", 4, {1000});
    const fabric::Fabric own = {"own", 10, 0, 0, INFINITY, 0, 1, 1, INFINITY, 0, 0};
    CHECK(fabric::simulate(ops, own) == doctest::Approx(60e-6)); // 6 steps
}
TEST_CASE("simulate: 1024 devices" * doctest::skip(small_only)) {
    for (const char *name : {"naive", "bucket", "host", "by_tensor", "tree"}) {
        CAPTURE(std::string(name));
        auto ops = dry_allreduce(name, 1024, {5000, 1000, 77});
        const double t0 = Timer::now();
        for (const fabric::Fabric &f : fabric::fabrics) CHECK(fabric::simulate(ops, f) > 0);
        CHECK(Timer::now() - t0 < 10);
    }
    auto ops = dry_allreduce("ring", 256, {129068}); // chunks of 504 and 505 numbers
    const double t0 = Timer::now(), us = 1e6 * fabric::simulate(ops, fabric::find_fabric("pcie"));
    CHECK(Timer::now() - t0 < 10);
    // its one host enqueues seven calls of each two messages and their sum
    CHECK(us == doctest::Approx(256 * 255 * 7 * 2.5).epsilon(0.01));
}
TEST_CASE("find_fabric: a name, or latency and bandwidth") {
    CHECK(fabric::find_fabric("nvlink").port == 450);
    const fabric::Fabric own = fabric::find_fabric("7.5,25");
    CHECK((own.latency == 7.5 && own.port == 25 && own.host_port == 25 && own.host_all == 25));
    CHECK((own.host == 0 && own.overhead == 0 && own.engines == 0 && own.launch == 0));
    const fabric::Fabric more = fabric::find_fabric("7,25,host=2,overhead=1,engines=3,launch=4");
    CHECK((more.port == 25 && more.host == 2 && more.overhead == 1 && more.engines == 3));
    CHECK((more.launch == 4 && more.name == "7,25,host=2,overhead=1,engines=3,launch=4"));
    const fabric::Fabric one = fabric::find_fabric("nvlink,host=0");
    CHECK((one.port == 450 && one.host == 0 && one.engines == 3));
    const fabric::Fabric machines = fabric::find_fabric("8xnvlink+ethernet100,network=50");
    CHECK((machines.port == 450 && machines.node == 8 && machines.network == 50));
    CHECK((machines.network_latency == 12 && machines.network_overhead == 3));
    CHECK(fabric::find_fabric("2x7,25+30,1").network == 1);
    for (const char *wrong : {"",
                              "nvlin",
                              "7",
                              "7,",
                              "7,0",
                              "7,25,3",
                              "1,2,3,4,5,6",
                              "-1,25",
                              "7;25",
                              "7,25 GB",
                              "nvlink,hos=1",
                              "nvlink,host=",
                              "nvlink,host=-1",
                              "nvlink,host=1,",
                              "nvlink,port=0",
                              "host=1",
                              "8xnvlink",
                              "8xnvlink+",
                              "0xnvlink+pcie",
                              "8xethernet10+ethernet10",
                              "8x+ethernet10"}) {
        CAPTURE(std::string(wrong));
        CHECK_THROWS_AS(fabric::find_fabric(wrong), std::runtime_error);
    }
}
// The program that draws, in here.
namespace drawing {
#define main simulate_main
#include "simulate.cc"
#undef main
} // namespace drawing
static drawing::Recording drawn(std::string rows) {
    const std::unique_ptr<FILE, int (*)(FILE *)> file(fmemopen(&rows[0], rows.size(), "r"), fclose);
    return drawing::read(file.get(), true);
}

TEST_CASE("computes: a step of fewer samples, from two that were measured") {
    auto step = [](int batch, int us) { // 1 us a sample, and what a step takes at least
        const std::string end = std::to_string(1000 * us);
        return drawing::Step(drawn("# lenet, batch " + std::to_string(batch) +
                                   ", 1 device, naive, 4 bytes of gradients\n0,0,c,forward,x,0," +
                                   end + ",-2,-2,1,-1\n0,0,c,update,y," + end + "," + end +
                                   ",-2,-2,1,-1\n"));
    };
    const auto step256 = step(256, 276), step4 = step(4, 24), one = step(1, 21);
    for (int k : {1, 2, 4, 32})
        CHECK(drawing::computes(step256, step(32, 52), k) ==
              doctest::Approx((20 + 256.0 / k) * 1e-6));
    for (int k : {1, 2, 4}) // whose eighth is a quarter
        CHECK(drawing::computes(step4, one, k) == doctest::Approx((20 + 4.0 / k) * 1e-6));
    CHECK(drawing::computes(one, one, 1) == doctest::Approx(21e-6));
}
TEST_CASE("write_file: a disk that is full is an error") {
    for (size_t bytes : {1, 1000000}) { // which fails at the end; before
        auto print = [=](FILE *file) { fwrite(std::string(bytes, 'x').data(), 1, bytes, file); };
        CHECK_THROWS_AS(drawing::write_file("/dev/full", print), drawing::Error);
    }
}
TEST_CASE("critical_path: what the last operation has waited for") {
    const std::string header = "# a, 1 bytes\ndevice,lane,stream,kind,name,begin,end,src,dst,bytes,"
                               "after\n";
    // Lane 0: 0-5, then a message to lane 1, which was done with its own at 3; lane 2 ends early
    const std::string rows = header + "0,0,c,forward,x,0,5,-2,-2,1,-1\n"
                                      "1,1,c,forward,x,0,3,-2,-2,1,-1\n"
                                      "1,1,c,wait,wait,3,5,-2,-2,0,0\n"
                                      "1,1,c,message,message,5,7,0,1,1,-1\n"
                                      "2,2,c,forward,x,0,6,-2,-2,1,-1\n"
                                      "1,1,c,sum,x,7,9,-2,-2,1,-1\n";
    const drawing::Recording r = drawn(rows);
    CHECK((r.title == "a" && r.bytes == 1 && r.ops.size() == 6));
    CHECK(drawing::critical_path(r.ops) ==
          std::vector<bool>{true, false, false, true, false, true});
    CHECK(drawing::covered({{0, 2}, {5, 6}, {1, 3}, {5, 5.5}}) == 4);
    CHECK_THROWS_WITH(drawn(header + "0,0,c,wait,wait,0,0,-2,-2,0,1\n"),
                      "a row waits for a later one");
}
TEST_CASE("print_rows: times, the critical path, and what an operation has waited for") {
    TestFolder folder;
    const std::string header = "# lenet, batch 2, 2 devices, naive, 4 bytes of gradients\n";
    const drawing::Recording rows =
        drawn(header + "0,0,computation,backward,relu_kernel,0,5000,-2,-2,8,-1\n"
                       "1,1,computation,backward,relu_kernel,0,3000,-2,-2,8,-1\n"
                       "1,1,computation,wait,wait,3000,5000,-2,-2,0,0\n"
                       "1,1,computation,message,W3,5000,9000,0,1,4,-1\n");
    CHECK(printed([&] { drawing::print_rows(stdout, rows, "a note"); }) ==
          "# lenet, batch 2, 2 devices, naive\n# a note\n"
          "device,lane,stream,kind,name,begin,end,src,dst,bytes,critical,cause\n"
          "0,0,computation,backward,relu_kernel,0,5000,-2,-2,8,1,-1\n"
          "1,1,computation,backward,relu_kernel,0,3000,-2,-2,8,0,-1\n"
          "1,1,computation,wait,wait,3000,5000,-2,-2,0,0,0\n"
          "1,1,computation,message,W3,5000,9000,0,1,4,1,0\n");
    // What a profile does not name takes what its bytes take
    drawing::Recording r = rows;
    std::ofstream(folder.file("profile"))
        << "# of a test\nname,bytes,us\nrelu_kernel,8,7.5\nrelu_kernel,9,1\n";
    drawing::read_profile(folder.file("profile").c_str(), r);
    CHECK(r.ops[0].seconds == 7.5e-6);
    CHECK(r.ops[1].seconds == 7.5e-6);
    CHECK(r.ops[3].seconds == -1);
    CHECK_THROWS_AS(drawing::read_profile(folder.file("none").c_str(), r), drawing::Error);
}

// ---------------------------------------------------------------------------------------------
// The commands of the lab

#ifdef CUDA_CPU
TEST_CASE("measure summary counts parameters and FLOPs") {
    TestFolder folder;
    struct Network {
        const char *model;
        long parameters;
        double forward, backward; // MFLOP of an image
        const char *row;
    };
    // conv1 2*26*26*20*9, conv2 2*9*9*50*500, dense 2*800*128 + 2*128*10; the backward twice as
    // many but for conv1's dX. ResNet-18's parameters are the tutorial's, its FLOPs by its shapes.
    const double conv1 = 2 * 26 * 26 * 20 * 9 / 1e6, rest = (4050000 + 204800 + 2560) / 1e6;
    double first = 2 * 784 * 64 * 9 / 1e6, blocks = 4 * 2 * 784.0 * 64 * 576 / 1e6 + 5120 * 2 / 1e6;
    for (int C = 128, plane = 196; C <= 512; C *= 2, plane = plane == 196 ? 49 : 16)
        blocks += 2.0 * plane * C * (C / 2 * 9 + 3 * C * 9 + C / 2) / 1e6;
    for (const Network &n :
         {Network{"lenet", 129068, conv1 + rest, conv1 + 2 * rest, "relu (2,20,26,26) 0"},
          Network{"lab_cnn", 129068, conv1 + rest, conv1 + 2 * rest, "max_pool2d (2,50,4,4) 0"},
          Network{"resnet18", 11175818, first + blocks, first + 2 * blocks,
                  "batch_norm (2,512,4,4) 1024"}}) {
        if (small_only && n.parameters > 1000000) continue;
        CAPTURE(n.model);
        std::string text; // with single spaces
        for (char c : output_of(folder, "summary BATCH=2 MODEL=" + std::string(n.model)))
            if (c != ' ' || (!text.empty() && text.back() != ' ')) text += c;
        CHECK(contains(text, "\n" + std::string(n.row) + " "));
        const std::string total = "\n" + std::string(n.model) + " ";
        REQUIRE(contains(text, total));
        long parameters = 0;
        double forward = 0, backward = 0;
        sscanf(text.c_str() + text.find(total) + total.size(), "%ld %lf %lf", &parameters, &forward,
               &backward);
        CHECK(parameters == n.parameters);
        CHECK(std::fabs(forward - 2 * n.forward) < 0.001); // it has three digits
        CHECK(std::fabs(backward - 2 * n.backward) < 0.001);
    }
}
TEST_CASE("measure trace prints a row for each operation") {
    TestFolder folder;
    const std::string out = output_of(folder, "trace GPUS=2 BATCH=8 STEPS=2 ALLREDUCE=ring");
    const std::string head = "# lenet, batch 8, 2 devices, ring, 516272 bytes of gradients\n"
                             "device,lane,stream,kind,name,begin,end,src,dst,bytes,after\n";
    CHECK(out.compare(0, head.size(), head) == 0);
    std::istringstream lines(out.substr(head.size()));
    std::map<std::string, int> names, messages; // of them: what they move
    for (std::string line; std::getline(lines, line);) {
        CHECK(std::count(line.begin(), line.end(), ',') == 10);
        std::istringstream columns(line);
        std::string kind, name;
        for (int c = 0; c < 4; c++) std::getline(columns, kind, ',');
        std::getline(columns, name, ',');
        (kind == "message" ? messages : names)[name]++;
    }
    CHECK((names["cross_entropy_kernel"] == 4 && names["gradient"] == 2 * 2 * 8));
    CHECK(names["copy in"] == 2 * 2 * 2); // X and y
    CHECK((messages["W1-W3"] == 2 * 2 && messages["W3-b4"] == 2 * 2 && messages.size() == 2));
}
TEST_CASE("measure profile, whose shares add up to 100%") {
    TestFolder folder;
    const std::string out = output_of(folder, "profile GPUS=2 BATCH=2 STEPS=3");
    CHECK(out.rfind("lenet, batch 2, 2 devices, naive: ", 0) == 0);
    for (int c : {0, 1}) {
        const size_t at = out.find("gpu(" + std::to_string(c) + "): idle for ");
        REQUIRE(at != std::string::npos);
        std::istringstream lines(out.substr(at));
        std::string line, word;
        double kinds = 0, rows = 0, last = INFINITY;
        int count = 0;
        std::getline(lines, line);
        line = line.substr(line.find("of the rest"));
        for (size_t i = 0; (i = line.find('%', i)) != std::string::npos; i++)
            kinds += atof(line.c_str() + line.rfind(' ', i));
        std::getline(lines, line); // the head
        for (; std::getline(lines, line) && !line.empty(); count++) {
            double calls = 0, ms = 0, percent = 0;
            REQUIRE(line.size() > 60);
            CHECK(sscanf(line.c_str() + 48, "%lf %lf %lf", &calls, &ms, &percent) == 3);
            CHECK((ms <= last && calls >= 1 && calls == int(calls))); // of each step
            last = ms;
            rows += percent;
        }
        CHECK((std::fabs(kinds - 100) < 0.4 && std::fabs(rows - 100) < 0.06 * count));
        CHECK(count > 12);
    }
    size_t row = std::string::npos; // of the convolutions' gradients: in registers, through shared
    for (const char *products : {"tiled_kernel", "product_kernel", "matmul_kernel"})
        row = std::min(row, out.find("backward  " + std::string(products)));
    REQUIRE(row != std::string::npos);
    double calls, ms, percent, gbs;
    REQUIRE(sscanf(out.c_str() + row + 48, "%lf %lf %lf %lf", &calls, &ms, &percent, &gbs) == 4);
    CHECK((calls >= 4 && contains(out, " GFLOP/s) backward ")));
#ifdef FAST
    CHECK(gbs > 0);
#endif
}
TEST_CASE("measure dry-run prints the messages of devices that are not there") {
    TestFolder folder;
    const std::string out = output_of(folder, "dry-run DRY_GPUS=1024 ALLREDUCE=tree");
    // 129068 numbers, and 980 more: equal chunks
    CHECK(contains(out, "# lenet, batch 256, 1024 devices, tree, 520192 bytes of gradients\n"));
    size_t messages = 0;
    for (size_t at = 0; (at = out.find(",message,message,0,0,", at)) != std::string::npos; at++)
        messages++;
    CHECK(messages == 2 * 1023);
    check_says(run_in_shell(folder, "", "dry-run DRY_GPUS=1025").err,
               "DRY_GPUS=1025: expected a whole number from 1 to 1024");
}
TEST_CASE("measure bench BENCH=allreduce times every algorithm" * doctest::skip(small_only)) {
    TestFolder folder; // with 2 MiB a device the larger sizes are skipped
    std::filesystem::create_directory(folder.file("build"));
    const std::string out = output_of(folder, "bench BENCH=allreduce GPUS=2", "CUDA_CPU_MEMORY=2");
    const std::string csv = read_text(folder.file("build/bench.csv"));
    CHECK(csv.compare(0, 44, "what,model,by,gpus,batch,bytes,us,rate,unit\n") == 0);
    for (std::string name : {"naive", "bucket", "host", "by_tensor", "sharded", "ring", "tree"})
        for (int bytes : {4096, 16384, 65536, 262144}) {
            const std::string row = "\nallreduce,," + name + ",2,," + std::to_string(bytes) + ",";
            CAPTURE(row);
            const size_t at = csv.find(row);
            REQUIRE(at != std::string::npos);
            double us = 0, rate = 0;
            REQUIRE(sscanf(csv.c_str() + at + row.size(), "%lf,%lf,GB/s\n", &us, &rate) == 2);
            CHECK(std::fabs(rate - bytes / us / 1e3) < 0.01 * rate + 0.001); // 2(k-1)/k is 1
        }
    CHECK((!contains(csv, "rebind") && !contains(csv, "local") &&
           contains(out, "1048576 bytes and more: skipped")));
}
TEST_CASE("measure bench BENCH=kernels times the kernels of each rung" * doctest::skip(small_only)) {
    TestFolder folder;
    std::filesystem::create_directory(folder.file("build"));
    const bool tuned = find_option("KERNELS"); // extras/fast/ is there
    auto rows = [&](const std::string &more) {
        output_of(folder, "bench BENCH=kernels GPUS=1 BATCH=1 " + more);
        return read_text(folder.file("build/bench.csv"));
    };
    const std::string one = tuned ? "tiled" : "plain", csv = rows(tuned ? "KERNELS=tiled" : "");
    for (std::string layer : {"lenet conv2", "resnet18 3x3", "lenet dense1"})
        CHECK(contains(csv, "\nkernels," + layer + "," + one + ",1,1,,"));
    if (!tuned) return;
    CHECK((!contains(csv, "plain") && !contains(csv, "fast") && !contains(csv, "tf32")));
    const std::string tf32 = rows("PRECISION=tf32"), all = rows("");
    CHECK((contains(tf32, ",tf32,1,1,,") && !contains(tf32, "fast")));
    for (std::string rung : {"plain", "tiled", "fast", "tf32"})
        CHECK(contains(all, "\nkernels,lenet conv2," + rung + ",1,1,,"));
}
TEST_CASE("measure: what is wrong is said in a line") {
    TestFolder folder;
    for (const auto &[line, says] : std::vector<std::pair<std::string, std::string>>{
             {"bench BENCH=x", "BENCH=x is unknown: choose one of all, step, allreduce, kernels"},
             {"trace BENCH=step", "BENCH does not apply to trace"},
             {"profile DRY_GPUS=2", "DRY_GPUS=2 is not an option: "}}) {
        const Run run = run_in_shell(folder, "", line);
        CHECK(run.status == 1);
        check_says(run.err, "mgpu: " + says);
    }
    CHECK(contains(run_in_shell(folder, "", "fly").err, "measure: the first word must be one of "));
    CHECK(folder.listing().empty());
}
#endif

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--program") == 0) return measure_main(argc - 1, argv + 1);
    return tests_main(argc, argv);
}
