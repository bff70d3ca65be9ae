// Tests of make bench, trace, profile, summary and scale.
//
//     make test T='-tc=measure*'
//
// defines: main

#define MEASURE_NO_MAIN
#include "measure.cu"

#include "../tests.h"

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

// ---------------------------------------------------------------------------------------------
// Networks and timelines

typedef network::Traffic Traffic;
TEST_CASE("traffic_of: an exchange without a message that is counted is none") {
    Kept kept;
    algorithms.push_back({"silent", [](const PerDevice &) {}});
    check_says(error_of([] { traffic_of("silent", make_grads(2, {3})); }),
               "ALLREDUCE=silent sends no message that make scale counts");
    algorithms.pop_back();
}
TEST_CASE("Traffic: the busiest device of each round counts, and no message takes no time") {
    const network::Network own = {"own", 1, 1};
    // gpu(0) gets 300 bytes in the first round; gpu(2) sends 70 in the second
    const Traffic t({{1, 0, 1, 100}, {2, 0, 1, 200}, {2, 1, 2, 30}, {2, 0, 2, 40}, {0, 1, 2, 50}});
    CHECK(t.longest == std::vector<long>{300, 80});
    CHECK(t.ends(own)[0] == doctest::Approx(1e-6 + 300e-9));
    CHECK(t.seconds(own) == doctest::Approx(2e-6 + 380e-9));
    CHECK(t.seconds(own, 3) == doctest::Approx(2e-6 + 3 * 380e-9));
    CHECK(Traffic({}).seconds(own) == 0);
    int who = -1;
    CHECK(t.busiest(&who) == 340);
    CHECK(who == 0);
    CHECK(t.busiest_link() == 240);
}
TEST_CASE("find_network: a name, or latency and bandwidth") {
    CHECK(network::find_network("nvlink").bandwidth == 450);
    CHECK(network::find_network("7.5,25").latency == 7.5);
    CHECK(network::find_network("7.5,25").bandwidth == 25);
    for (std::string wrong : {"", "nvlin", "1", "1,", "1,0", "-1,2", "1,2,3", "a,b"}) {
        CAPTURE(wrong);
        CHECK_THROWS_WITH_AS(network::find_network(wrong),
                             doctest::Contains("is unknown: choose one of nvlink, pcie"),
                             std::runtime_error);
    }
}

// Lane 0: a kernel of 5 s, then a message to lane 1, which was done with its own at 3
static Ops four_operations() {
    Ops ops(4, watch::operation("forward", "relu_kernel<<", 8));
    ops[1].device = ops[1].lane = ops[2].device = ops[2].lane = ops[3].device = ops[3].lane = 1;
    ops[0].end = 5, ops[1].end = 3;
    ops[2].kind = ops[2].name = "wait", ops[2].after = 0, ops[2].begin = 3, ops[2].end = 5;
    ops[3].kind = ops[3].name = "message", ops[3].src = 0, ops[3].dst = 1;
    ops[3].begin = 5, ops[3].end = 9, ops[3].bytes = 4;
    return ops;
}
TEST_CASE("critical_path: what the last operation has waited for") {
    CHECK(critical_path(four_operations()) == std::vector<bool>{true, false, false, true});
    CHECK(busy(four_operations(), [](auto &) { return true; }) == 9);
    CHECK(busy(four_operations(), is_message) == 4);
    CHECK(busy(four_operations(), [](auto &op) { return op.device == 1; }) == 7);
}
TEST_CASE("replay: streams in order, waits, and one message at a time at each end") {
    const network::Network own = {"own", 2e6, 1e-9}; // 2 s, 1 byte a second
    Ops ops = four_operations();
    ops[3].begin = ops[3].end = 0;
    for (int dst : {2, 1}) { // gpu(0) sends to gpu(2), and to gpu(1) again by another stream
        watch::Op next = ops[3];
        next.device = next.dst = dst, next.lane = 1 + dst, next.bytes = 10;
        ops.push_back(next);
    }
    replay(ops, own);
    CHECK(ops[0].end == 5);
    CHECK(ops[1].end == 3);
    CHECK(ops[2].end == 5);   // the wait
    CHECK(ops[3].begin == 5);
    CHECK(ops[3].end == 11);  // 2 + 4
    CHECK(ops[4].begin == 9); // when the bytes before it have left gpu(0)
    CHECK(ops[4].end == 21);
    CHECK(ops[5].begin == 19);
    ops = four_operations(); // with a kernel that reads 4 bytes and 6, as the message comes
    ops.push_back(ops[1]);
    ops[4].lane = 2, ops[4].end = 1;
    ops[4].reads = {{0, 4, nullptr}, {2, 6, nullptr}};
    replay(ops, own);
    CHECK(ops[3].end == 11);
    CHECK(ops[4].begin == 9);
    CHECK(ops[4].end == 21);
    std::vector<std::string> streams(3);
    add_reads(ops, streams);
    REQUIRE(ops.size() == 7);
    CHECK(streams == std::vector<std::string>{"", "", "", "from gpu(0)", "from gpu(2)"});
    CHECK(ops[6].src == 2);
    CHECK(ops[6].dst == 1);
    CHECK(ops[6].lane == 4);
    CHECK(ops[6].bytes == 6);
    CHECK(ops[6].begin == 9);
    CHECK(ops[6].end == 21);
}
TEST_CASE("read_profile: kernels by name and bytes; another takes as long as the shortest") {
    const TestFolder folder;
    std::ofstream(folder.file("profile"))
        << "# of a test\nname,bytes,us\nrelu_kernel,8,7.5\nrelu_kernel,9,1\n";
    Ops ops = four_operations();
    ops[1].bytes = 10;
    read_profile(folder.file("profile"), ops);
    CHECK(ops[0].end - ops[0].begin == doctest::Approx(7.5e-6));
    CHECK(ops[1].end - ops[1].begin == doctest::Approx(1e-6));
    CHECK(ops[3].end - ops[3].begin == 4);
    CHECK(
        contains(error_of([&] { read_profile(folder.file("none"), ops); }), "cannot read PROFILE"));
}
TEST_CASE("write_rows: times, the critical path, and what an operation has waited for") {
    const TestFolder folder;
    Ops ops = four_operations();
    for (watch::Op &op : ops) op.begin *= 1e-6, op.end *= 1e-6;
    const std::vector<std::string> streams = {"computation", "from gpu(0)"};
    write_rows(folder.file("rows"), "lenet", "a note", ops,
               {"relu_kernel", "relu_kernel", "wait", "W3"}, streams);
    CHECK(read_text(folder.file("rows")) ==
          "# lenet\n# a note\n"
          "device,lane,stream,kind,name,begin,end,src,dst,bytes,critical,cause\n"
          "0,0,computation,forward,relu_kernel,0,5000,-2,-2,8,1,-1\n"
          "1,1,from gpu(0),forward,relu_kernel,0,3000,-2,-2,8,0,-1\n"
          "1,1,from gpu(0),wait,wait,3000,5000,-2,-2,8,0,0\n"
          "1,1,from gpu(0),message,W3,5000,9000,0,1,4,1,0\n");
    CHECK(contains(error_of([&] {
                       write_rows("/dev/full", "", "", ops, {"", "", "", ""}, streams);
                   }),
                   "cannot write /dev/full"));
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
        if (!has_option("MODEL") && std::string(n.model) != "lenet") continue;
        CAPTURE(n.model);
        std::string text; // with single spaces
        const std::string model = has_option("MODEL") ? format(" MODEL=%s", n.model) : "";
        for (char c : output_of(folder, "summary BATCH=2" + model))
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
        double trained = 0, peak = 0;
        const std::string memory = "memory of a step on gpu(0): ";
        REQUIRE(contains(text, memory));
        sscanf(text.c_str() + text.find(memory) + memory.size(),
               "%lf MB for parameters and gradients, at most %lf", &trained, &peak);
        CHECK(std::fabs(trained - 2 * sizeof(float) * n.parameters / 1e6) < 0.06); // one digit
        CHECK(peak > trained);
    }
}
TEST_CASE("measure trace writes a row for each operation") {
    for (const std::string algorithm : {"bucket", "one_shot"}) {
        if (!works_here(algorithm)) continue;
        TestFolder folder;
        const std::string said =
            output_of(folder, "trace GPUS=2 BATCH=8 STEPS=2 ALLREDUCE=" + algorithm);
        check_parts(said, "lenet, batch 8, 2 devices, " + algorithm +
                              ": ... ms; the devices compute for ");
        std::istringstream lines(read_text(folder.file("build/trace.csv")));
        std::map<std::string, int> names, messages; // of them: what they move
        std::string line;
        for (int head = 0; head < 3; head++) std::getline(lines, line);
        CHECK(line == "device,lane,stream,kind,name,begin,end,src,dst,bytes,critical,cause");
        while (std::getline(lines, line)) {
            CHECK(std::count(line.begin(), line.end(), ',') == 11);
            std::istringstream columns(line);
            std::string kind, name;
            for (int c = 0; c < 4; c++) std::getline(columns, kind, ',');
            std::getline(columns, name, ',');
            (kind == "message" ? messages : names)[name]++;
        }
        CHECK(names["cross_entropy_kernel"] == 4);
        CHECK(names["gradient"] == 2 * 2 * 8);
        CHECK(names["copy in"] == 2 * 2 * 2); // X and y
        CHECK(messages == std::map<std::string, int>{{"W1-b4", 2 * 2}});
    }
}
TEST_CASE("measure trace FABRIC: as on another network") {
    TestFolder folder;
    const std::string words = "trace GPUS=2 BATCH=2 STEPS=1 FABRIC=";
    check_parts(output_of(folder, words + "1000000,1"), "naive on 1000000,1 (simulated): ... ms");
    double ms = 0; // sixteen messages, a second each
    const std::string said = output_of(folder, words + "1000000,1");
    REQUIRE(sscanf(said.c_str() + said.find("): ") + 3, "%lf", &ms) == 1);
    CHECK(ms >= 16000);
    CHECK(ms < 20000);
}
TEST_CASE("measure scale: a step on k devices is its part of the samples, and the exchange") {
    TestFolder folder;
    std::filesystem::create_directory(folder.file("build"));
    const std::string said = output_of(folder, "scale BATCH=8 STEP_MS=80 FABRIC=1000,1e9");
    check_parts(said, "lenet, batch 8, on 1000,1e9: a step on k devices ... as if it took 80 ms");
    std::istringstream rows(read_text(folder.file("build/scale.csv")));
    std::string line;
    std::getline(rows, line);
    CHECK(line == "k,strong_ms,strong,weak_ms,weak");
    for (int k : {1, 2, 4, 8}) {
        CAPTURE(k);
        double strong = 0, efficiency = 0, weak = 0, of_weak = 0;
        char comma;
        int devices = 0;
        rows >> devices >> comma >> strong >> comma >> efficiency >> comma >> weak >> comma >>
            of_weak;
        const double exchange = 2 * (k - 1) * 8; // naive: so many messages of 1 ms
        CHECK(devices == k);
        CHECK(weak == doctest::Approx(80 + exchange));
        CHECK(of_weak == doctest::Approx(80 / weak).epsilon(0.001));
        CHECK(strong >= 80.0 / k + exchange - 0.001); // at best a k-th of it
        CHECK(strong <= 80 + exchange + 0.001);
        CHECK(efficiency == doctest::Approx(80 / strong / k).epsilon(0.001));
    }
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
            CHECK(ms <= last); // of each step
            CHECK(calls >= 1);
            CHECK(calls == int(calls));
            last = ms;
            rows += percent;
        }
        CHECK(std::fabs(kinds - 100) < 0.4);
        CHECK(std::fabs(rows - 100) < 0.06 * count);
        CHECK(count > 12);
    }
    size_t row = std::string::npos; // of the convolutions' gradients: in registers, through shared
    for (const char *products : {"tiled_kernel", "product_kernel", "matmul_kernel"})
        row = std::min(row, out.find("backward  " + std::string(products)));
    REQUIRE(row != std::string::npos);
    double calls, ms, percent, gbs;
    REQUIRE(sscanf(out.c_str() + row + 48, "%lf %lf %lf %lf", &calls, &ms, &percent, &gbs) == 4);
    CHECK(calls >= 4);
    CHECK(contains(out, " GFLOP/s) backward "));
#ifdef FAST
    CHECK(gbs > 0);
#endif
}
TEST_CASE("measure bench BENCH=allreduce times every algorithm" * doctest::skip(small_only)) {
    TestFolder folder; // with 2 MiB a device the larger sizes are skipped
    std::filesystem::create_directory(folder.file("build"));
    const std::string out = output_of(folder, "bench BENCH=allreduce GPUS=2", "CUDA_CPU_MEMORY=2");
    const std::string csv = read_text(folder.file("build/bench.csv"));
    CHECK(csv.compare(0, 44, "what,model,by,gpus,batch,bytes,us,rate,unit\n") == 0);
    for (std::string name : {"naive", "bucket", "host", "by_tensor", "sharded", "ring", "tree",
                             "one_shot", "two_shot"})
        for (int bytes : {4096, 16384, 65536, 262144}) {
            if (!works_here(name)) continue;
            const std::string row = "\nallreduce,," + name + ",2,," + std::to_string(bytes) + ",";
            CAPTURE(row);
            const size_t at = csv.find(row);
            REQUIRE(at != std::string::npos);
            double us = 0, rate = 0;
            REQUIRE(sscanf(csv.c_str() + at + row.size(), "%lf,%lf,GB/s\n", &us, &rate) == 2);
            CHECK(std::fabs(rate - bytes / us / 1e3) < 0.01 * rate + 0.001); // 2(k-1)/k is 1
        }
    CHECK(!contains(csv, "rebind"));
    CHECK(!contains(csv, "local"));
    CHECK(contains(out, "1048576 bytes and more: skipped"));
}
TEST_CASE("measure bench BENCH=kernels times the kernels of each rung" *
          doctest::skip(small_only)) {
    TestFolder folder;
    std::filesystem::create_directory(folder.file("build"));
    const bool tuned = has_option("KERNELS"); // extras/fast/ is there
    auto rows = [&](const std::string &more) {
        output_of(folder, "bench BENCH=kernels GPUS=1 BATCH=1 " + more);
        return read_text(folder.file("build/bench.csv"));
    };
    const std::string one = tuned ? "tiled" : "plain", csv = rows(tuned ? "KERNELS=tiled" : "");
    for (std::string layer : {"lenet conv2", "resnet18 3x3", "lenet dense1"})
        if (has_option("MODEL") || contains(layer, "lenet"))
            CHECK(contains(csv, "\nkernels," + layer + "," + one + ",1,1,,"));
    if (!tuned) return;
    CHECK(!contains(csv, "plain"));
    CHECK(!contains(csv, "fast"));
    CHECK(!contains(csv, "tf32"));
    const std::string lenet = has_option("MODEL") ? " MODEL=lenet" : "";
    const std::string tf32 = rows("PRECISION=tf32" + lenet), all = rows(lenet);
    CHECK(contains(tf32, ",tf32,1,1,,"));
    CHECK(!contains(tf32, "fast"));
    CHECK(!contains(tf32, "resnet18"));
    for (std::string rung : {"plain", "tiled", "fast", "tf32"})
        CHECK(contains(all, "\nkernels,lenet conv2," + rung + ",1,1,,"));
}
TEST_CASE("measure: what is wrong is said in a line") {
    TestFolder folder;
    for (const auto &[line, says] : std::vector<std::pair<std::string, std::string>>{
             {"bench BENCH=x", "BENCH=x is unknown: choose one of all, step, allreduce, kernels"},
             {"trace BENCH=step", "BENCH does not apply to trace"},
             {"profile FABRIC=pcie", "FABRIC=pcie is not an option: "},
             {"scale STEP_MS=0", "STEP_MS=0: expected"},
             {"trace STEPS=0", "STEPS=0: expected"},
             {"trace PROFILE=profile.csv", "PROFILE is for FABRIC: give both"},
             {"trace FABRIC=no", "FABRIC=no is unknown: choose one of nvlink, pcie"}}) {
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
