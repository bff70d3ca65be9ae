// Tests of SAVE, INIT and LOG.
//
//     make test T='-tc=load_safetensors*'
//
// defines: main

#define MGPU_NO_MAIN
#include PROGRAM

#include "../tests.h"

#include <sys/resource.h>
#include <sys/stat.h>

static int signal_in_fsync = 0; // comes while a file is written

// In place of libc's function
extern "C" int fsync(int file) {
    if (signal_in_fsync) raise(signal_in_fsync);
    return fdatasync(file);
}

TEST_CASE("write_file: all or nothing") {
    const TestFolder folder;
    const std::string path = folder.file("a/b/file");
    for (const std::string &text : {std::string("0\0\xff\n", 4), std::string("shorter")}) {
        write_file(path, text);
        CHECK(read_text(path) == text);
    }
    const auto before = folder.listing();
    REFUSED(write_file(folder.file("a/b"), ""), "a/b: Is a directory");
    REFUSED(write_file("/proc/none/file", ""), "cannot write /proc/none/file: ");
    // A disk that is full in the midst of it: here, a limit on the size of files
    rlimit limit;
    REQUIRE(getrlimit(RLIMIT_FSIZE, &limit) == 0);
    const rlimit small = {10000, limit.rlim_max};
    REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
    const std::string said = error_of([&] { write_file(path, std::string(100000, 'x')); });
    setrlimit(RLIMIT_FSIZE, &limit);
    CHECK(said == "cannot write " + path + ": File too large");
    CHECK(read_text(path) == "shorter");
    CHECK(folder.listing() == before);
}

TEST_CASE("write_file: links are followed, and the mode is kept") {
    const TestFolder folder;
    const std::string file = folder.file("a/file"), link = folder.file("link");
    std::filesystem::create_symlink("other", link);
    std::filesystem::create_symlink("a/file", folder.file("other"));
    const mode_t mask = umask(0), usual = 0666 & ~mask;
    umask(mask);
    for (mode_t mode : {usual, mode_t(0640), mode_t(0444)}) { // first a link to no file
        CAPTURE(mode);
        chmod(file.c_str(), mode);
        write_file(link, std::to_string(mode));
        CHECK(read_text(file) == std::to_string(mode));
        struct stat is;
        REQUIRE(stat(file.c_str(), &is) == 0);
        CHECK((is.st_mode & 07777) == mode);
    }
    CHECK(std::filesystem::is_symlink(link));
    CHECK(std::filesystem::is_symlink(folder.file("other")));
    CHECK(folder.listing() == std::set<std::string>{"a", "a/file", "link", "other"});
}

TEST_CASE("write_file: no link at the name of a part is followed") {
    const TestFolder folder;
    const std::string file = folder.file("file"), other = folder.file("other");
    write_text(other, "precious");
    std::filesystem::create_symlink("other", file + "." + std::to_string(getpid()) + ".part");
    write_file(file, "text");
    CHECK(read_text(other) == "precious");
    CHECK(read_text(file) == "text");
    CHECK(!std::filesystem::is_symlink(file));
    CHECK(folder.listing() == std::set<std::string>{"file", "other"});
}

TEST_CASE("SAVE: what a process that was killed has left is removed, and no link is followed") {
    const TestFolder folder;
    const pid_t child = fork();
    if (child == 0) _exit(0);
    REQUIRE(waitpid(child, nullptr, 0) == child); // its number is nobody's now
    const std::string gone = "s." + std::to_string(child), here = "s." + std::to_string(getpid());
    const std::string of_first = "s." + std::to_string(getppid()) + ".part";
    const std::set<std::string> others = {of_first,       gone + ".parts",     "s.part",
                                          "t" + gone + ".part", gone + ".test.7.part", "other"};
    for (const std::string &name : others) write_text(folder.file(name), "other");
    for (const char *end : {".part", ".test"}) write_text(folder.file(gone + end), "");
    write_text(folder.file(gone + ".test." + std::to_string(child) + ".part"), "");
    std::filesystem::create_symlink("other", folder.file(here + ".test"));
    Kept kept;
    set_option("SAVE=" + folder.file("s"));
    check_files();
    CHECK(folder.listing() == others);
    CHECK(read_text(folder.file("other")) == "other");
}

TEST_CASE("write_file: a signal waits until the file is there, and then ends the program") {
    for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
        CAPTURE(signal);
        const TestFolder folder;
        const pid_t child = fork();
        if (child == 0) {
            const rlimit no_core = {0, 0};
            setrlimit(RLIMIT_CORE, &no_core);
            std::signal(signal, SIG_DFL);
            signal_in_fsync = signal;
            write_file(folder.file("file"), "text");
            _exit(0);
        }
        int status = 0;
        REQUIRE(waitpid(child, &status, 0) == child);
        CHECK(WIFSIGNALED(status));
        CHECK(WTERMSIG(status) == signal);
        CHECK(folder.listing() == std::set<std::string>{"file"});
        CHECK(read_text(folder.file("file")) == "text");
    }
    // One that is ignored, as under nohup, stays so
    const TestFolder folder;
    const auto before = std::signal(SIGHUP, SIG_IGN);
    signal_in_fsync = SIGHUP;
    write_file(folder.file("file"), "text");
    signal_in_fsync = 0;
    const bool is_ignored = std::signal(SIGHUP, before) == SIG_IGN;
    CHECK(is_ignored);
}

// ---------------------------------------------------------------------------------------------
// .safetensors

static std::string safetensors(const std::string &header, const std::string &numbers) {
    return char(header.size()) + std::string(7, 0) + header + numbers;
}

// The numbers of the tensors a1 (2,3) and b (2) in these tests, and the header of a file with them
static const Floats a1_numbers = {-0.0f, INFINITY, 1e-45f, 4, 5, 6};
static const std::string header = R"({"a1":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
                                  R"("b":{"dtype":"F32","shape":[2],"data_offsets":[24,32]}})";

TEST_CASE("save_safetensors: the format's bytes") {
    const TestFolder folder;
    const std::string path = folder.file("a.safetensors");
    Floats b = {7, 0};
    memcpy(&b[1], "\x45\x23\xc1\xff", 4); // a NaN with bits of its own
    save_safetensors(path, {{"b", on_device(b, {2}, gpu(1))},
                            {"a1", on_device(a1_numbers, {2, 3}, gpu(1))}});
    const std::string padded = header + "       "; // its size is a multiple of 8
    CHECK(read_text(path) == safetensors(padded, bytes_of(a1_numbers) + bytes_of(b)));
}

// Load the tensors a1 and b from a file of these bytes. Return the bytes of b and a1, or the error.
static std::string loaded(const std::string &bytes) {
    const TestFolder folder;
    const Tensor b = full({2}, 0, cpu()), a1 = full({2, 3}, 0, cpu());
    write_text(folder.file("f"), bytes);
    const std::string error =
        error_of([&] { load_safetensors(folder.file("f"), {{"b", b}, {"a1", a1}}); });
    return error.empty() ? bytes_of(all_to_host({b, a1})) : error.substr(folder.file("f").size());
}

TEST_CASE("load_safetensors: files of any writer") {
    const std::string b = bytes_of({7, 8}), a1 = bytes_of(a1_numbers), rest = header.substr(1);
    const std::pair<std::string, std::string> files[] = { // the header and the numbers
        {header + "   ", a1 + b},                         // padding
        {R"({"__metadata__":{"format":"pt","x":"{\"b\":{\"dtype\":\"F64\"}}"},)" + rest, a1 + b},
        {header.substr(0, header.size() - 1) + R"(,"__metadata__":{"b":"}{"}})", a1 + b},
        {R"({ "b" : { "data_offsets" : [ 0, 8 ], "shape" : [ 2 ], "dtype" : "F32" },)"
         "\n\t"
         R"("a1": {"shape": [2, 3], "dtype": "F32", "data_offsets": [8, 32]}})",
         b + a1},
        {R"({"\u0061\u0031":{"shape":[2,3],"dtype":"\u00463\u0032","data_offsets":[10,34]},)"
         R"("b ":{"shape":[2],"dtype":"I8","data_offsets":[0,2]},)" // another name
         R"("\/\\\"\n\u00e9":{"shape":[9,0],"dtype":"F32","data_offsets":[2,2]},)"
         R"("b":{"shape":[2],"dtype":"F32","data_offsets":[2,10]}})",
         "ab" + b + a1},
        {R"({"momentum":{"dtype":"F16","shape":[1],"data_offsets":[32,34]},)" + rest,
         a1 + b + "ab"}}; // a tensor more
    for (const auto &file : files) {
        CAPTURE(file.first);
        CHECK(loaded(safetensors(file.first, file.second)) == b + a1);
    }
    std::string many = "{"; // five megabytes of other tensors
    for (int i = 0; i < 100000; i++) {
        many += "\"" + std::to_string(i) + R"(":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},)";
    }
    many += rest;
    const std::string length = {char(many.size()), char(many.size() >> 8), char(many.size() >> 16)};
    CHECK(loaded(length + std::string(5, 0) + many + a1 + b) == b + a1);
}

TEST_CASE("load_safetensors: the error names the tensor") {
    const std::string numbers = bytes_of(a1_numbers) + bytes_of({7, 8});
    // A text of the header that becomes another one
    const std::array<std::string, 3> cases[] = {
        {"\"b\":", R"("__metadata__":{"x":"{\"b\":{\"y\":1}}"},"fc.bias":)",
         ": b is missing: lenet needs a1, b. The file has a1, fc.bias"},
        {"\"b\":", R"("b\n":)", ": b is missing: lenet needs a1, b. The file has a1, b?"},
        {"F32", "U32", ": a1 is U32 [2,3], but lenet needs F32 [2,3]"},
        {"[2,3]", "[3,2]", ": a1 is F32 [3,2], but lenet needs F32 [2,3]"},
        {"[2]", "[2,1]", ": b is F32 [2,1], but lenet needs F32 [2]"},
        {"F32\",\"shape\":[2]", "F64\",\"shape\":[]", ": b is F64 [], but lenet needs F32 [2]"}};
    for (const auto &[from, to, says] : cases) {
        std::string changed = header;
        CHECK(loaded(safetensors(changed.replace(changed.find(from), from.size(), to), numbers)) ==
              says);
    }
    CHECK(loaded(safetensors("{}", "")) ==
          ": a1 is missing: lenet needs a1, b. The file has no tensors");
    REFUSED(load_safetensors("none", {}), "cannot read none: No such file or directory");
}

TEST_CASE("load_safetensors: what the format does not allow") {
    const std::string numbers = bytes_of(a1_numbers) + bytes_of({7, 8});
    const std::string wrong = " is not a .safetensors file: byte ", damaged = " is damaged: ";
    const std::array<std::string, 3> cases[] = {
        {"[24,32]", "[24,28]", damaged}, // too short, too long, overlap
        {"[24,32]", "[24,36]", damaged},
        {"[24,32]", "[20,28]", damaged},
        {"[24,32]", "[28,36]", damaged},
        {"[24,32]", "[24,16]", damaged},
        {"[24,32]", "[18446744073709551608,18446744073709551616]", wrong}, // 8 bytes modulo 2^64
        {"[24,32]", "[24]", wrong},
        {"[24,32]", "[24,32,40]", wrong},
        {"[24,32]", "[24 32]", wrong},
        {"[24,32]", "[24,32,]", wrong},
        {"[24,32]", "[-24,32]", wrong},
        {"[24,32]", "[024,32]", wrong},
        {"[24,32]", "[24,3.2e1]", wrong},
        {"[24,32]", "24,32", wrong},
        {"[24,32]}", "[24,32]", wrong}, // a bracket is missing
        {"{\"a1\":{", "{\"a1\":{{", wrong},
        {"\"b\"", "\"a1\"", wrong}, // a name twice
        {"\"b\"", "b", wrong},
        {"\"b\"", "\"b\n\"", wrong},
        {"\"b\"", "\"\\x62\"", wrong},
        {"\"b\"", "\"\\u62\"", wrong},
        {"\"b\"", "\"\\u006", wrong},
        {"\"shape\":[2],", "", wrong},
        {"\"shape\":[2]", "\"shape\":[2],\"shape\":[2]", wrong},
        {"\"shape\":[2]", "\"shape\":[2],\"stride\":[1]", wrong},
        {"{\"a1\"", " {\"a1\"", wrong},
        {"32]}}", "32]}}{", wrong},
        {"\"a1\"", R"("__metadata__":{"x":1},"a1")", wrong},
        {"\"a1\"", R"("__metadata__":{"x":"1","x":"2"},"a1")", wrong},
        {header, "", wrong},
        {header, "[]", wrong}};
    for (const auto &c : cases) { // (a lambda of C++17 may not capture structured bindings)
        const auto [from, to, says] = c;
        const std::string shown = to;
        CAPTURE(shown);
        std::string changed = header;
        changed.replace(changed.find(from), from.size(), to);
        check_says(loaded(safetensors(changed, numbers)), says);
    }
    check_says(loaded(safetensors(header, numbers + "x")), damaged);
    std::string shorter = header; // without a gap
    shorter.replace(shorter.find("24,32"), 5, "24,28");
    CHECK(loaded(safetensors(shorter, numbers.substr(0, 28))) ==
          ": b is F32 [2], whose numbers are not at data_offsets [24,28]");
    const std::string short_file = " is not a .safetensors file: it does not have the header";
    for (size_t size : {0, 7, 8, 20}) {
        check_says(loaded(safetensors(header, "").substr(0, size)), short_file);
    }
    check_says(loaded(std::string(8, -1) + header + numbers), short_file);
    const TestFolder folder; // which may be opened, but not read
    REFUSED(load_safetensors(folder.path, {}), "cannot read " + folder.path + ": Is a directory");
}

TEST_CASE("load_safetensors: of a damaged file, the right numbers, an error, or others; no crash") {
    const std::string numbers = bytes_of(a1_numbers) + bytes_of({7, 8});
    std::mt19937 random(1);
    for (int i = 0; i < 200; i++) {
        std::string bytes = safetensors(header, numbers);
        check_says(loaded(bytes.substr(0, 8 + random() % header.size())),
                   " is not a .safetensors file");
        bytes[random() % (8 + header.size())] = random();
        const std::string said = loaded(bytes); // b's and a1's 32 bytes, or a message
        if (said.size() != 32) CHECK(said.find_first_of(" :") == 0);
    }
}

// ---------------------------------------------------------------------------------------------
// The program

// Return the rows of build/log.csv or of another log: their fields.
static std::vector<std::vector<std::string>> rows_of(const std::string &path) {
    std::vector<std::vector<std::string>> rows;
    for (std::string line : lines_of(read_text(path))) {
        std::replace(line.begin(), line.end(), ',', ' ');
        rows.push_back(words_of(line));
    }
    return rows;
}

TEST_CASE("LOG: a row for each epoch, with what is on the screen, and with more digits" * trains) {
    DataFolder folder(few, few / 4);
    const std::string out = output_of(
        folder, "GPUS=3 ALLREDUCE=yours LR=0.5 BATCH=8 EPOCHS=2 LOG='new folder/l=1.csv'");
    const auto rows = rows_of(folder.file("new folder/l=1.csv"));
    const std::vector<std::string> lines = lines_of(out);
    const size_t table = std::find(lines.begin(), lines.end(),
                                   "epoch      loss  test acc   seconds") - lines.begin();
    REQUIRE(rows.size() == 3);
    REQUIRE(lines.size() == table + 4);
    CHECK(rows[0] == words_of("epoch loss test_acc seconds model gpus allreduce lr"));
    for (int epoch : {1, 2}) {
        CAPTURE(epoch);
        int printed_epoch;
        double loss, accuracy, seconds;
        REQUIRE(sscanf(lines[table + epoch].c_str(), "%d %lf %lf %lf", &printed_epoch, &loss,
                       &accuracy, &seconds) == 4);
        const std::vector<std::string> &row = rows[epoch];
        REQUIRE(row.size() == 8);
        CHECK(row[0] == std::to_string(epoch));
        CHECK(std::fabs(std::stod(row[1]) - loss) < 0.000051);
        CHECK(std::stod(row[2]) == accuracy);
        CHECK(std::fabs(std::stod(row[3]) - seconds) < 0.0051);
        CHECK(row[4] == "lenet");
        CHECK(row[5] == "3");
        CHECK(row[6] == "yours");
        CHECK(row[7] == "0.5");
    }
    output_of(folder, "BATCH=8 EPOCHS=1 LIMIT=8");
    CHECK(rows_of(folder.file("build/log.csv")).size() == 2); // the default
}

TEST_CASE("SAVE, INIT: the parameters after the last epoch; a training goes on with them" *
          trains) {
    DataFolder folder(few, few / 4);
    const std::string half = format("SHUFFLE=0 BATCH=%d ", few / 2); // of an epoch
    const Floats one = trained(folder, half + "EPOCHS=1 SAVE=new/one");
    const Floats two = trained(folder, half + "EPOCHS=2 SAVE=two");
    Named names;
    Kept kept;
    init_params();
    for (size_t i = 0; i < params.size(); i++) names[param_names[i]] = params[i];
    load_safetensors(folder.file("new/one"), names);
    check_close(all_to_host(params), one, 0);
    load_safetensors(folder.file("two"), names);
    check_close(all_to_host(params), two, 0);
    check_close(trained(folder, half + "EPOCHS=1 SEED=9 INIT=new/one"), two, 0);
    CHECK(one != two);
}

TEST_CASE("program: a mistake gives one line, status 1 and leaves nothing behind") {
    DataFolder folder(8, 4);
    write_text(folder.file("garbage"), "this is no file of parameters");
    write_text(folder.file("file"), "");
    REQUIRE(mkfifo(folder.file("pipe").c_str(), 0600) == 0);
    std::vector<std::pair<std::string, std::string>> cases = {
        {"SAVE=/proc/none/s", "cannot write /proc/none/s."},
        {"SAVE=file/s", "cannot write file/s: Not a directory"},
        {"SAVE=data", "SAVE=data is a folder, not a file"},
        {"SAVE=/dev/null", "SAVE=/dev/null is a device, a pipe or a socket, not a file"},
        {"SAVE=pipe", "SAVE=pipe is a device, a pipe or a socket, not a file"},
        {"LOG=data SAVE=s", "cannot write data: Is a directory"},
        {"INIT=garbage", "garbage is not a .safetensors file"},
        {"INIT=none", "cannot read none: No such file or directory"},
        {"DATA=missing SAVE=s", "cannot read missing" + train_images}};
    // The first step makes the parameters huge, the second their loss
    const std::string huge = "LOG=/dev/null BATCH=4 LR=1e30 CHECKS=0 SAVE=s";
    if (!no_training) cases.push_back({huge, "in epoch 1: use a smaller LR"});
    for (const auto &[arguments, says] : cases) {
        const auto before = folder.listing();
        fails(folder, arguments, "... " + says);
        CHECK(folder.listing() == before);
    }
    if (no_training) return;
    fails(folder, "BATCH=4 EPOCHS=1 LOG=/dev/full", "cannot write /dev/full: No space left");
}

int main(int argc, char **argv) { return tests_main(argc, argv); }
