// SAVE, INIT and LOG: the parameters in a .safetensors file, after each epoch and to start from,
// and a table of the epochs. This part of the program comes after networks/, whose names it may
// need.
// defines: FILES, write_file, save_safetensors, load_safetensors, SAVE, INIT, LOG
#define FILES

#include <csignal>
#include <filesystem>
#include <set>
#include <utility>
#include <fcntl.h>
#include <sys/stat.h>

// Make the folder of a file. If that fails, so will opening the file.
static void make_folder(const std::string &path) {
    std::error_code ignored;
    std::filesystem::create_directories(std::filesystem::path(path).parent_path(), ignored);
}

// Return the path that a link stands for, even if there is no such file yet; or the path itself.
static std::string behind_links(std::filesystem::path path) {
    std::error_code ignored;
    for (int i = 0; i < 40 && std::filesystem::is_symlink(path, ignored); i++) {
        path = path.parent_path() / std::filesystem::read_symlink(path, ignored);
    }
    return path;
}

// While one exists, a signal that ends the program waits, so that no part of a file is left behind.
struct SignalsWait {
    static constexpr int number = 4, signals[number] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM};
    static inline volatile sig_atomic_t waiting = 0; // the last one that came
    struct sigaction before[number];

    SignalsWait() {
        struct sigaction wait = {};
        wait.sa_handler = [](int signal) { waiting = signal; };
        wait.sa_flags = SA_RESTART;
        for (int i = 0; i < number; i++) {
            sigaction(signals[i], nullptr, &before[i]);
            if (before[i].sa_handler != SIG_IGN) sigaction(signals[i], &wait, nullptr);
        }
    }
    ~SignalsWait() {
        for (int i = 0; i < number; i++) sigaction(signals[i], &before[i], nullptr);
        if (waiting) raise(std::exchange(waiting, 0));
    }
};

// Remove what a save of this file has left behind, if its process is gone: FILE.PID.part, and those
// of check_files, FILE.PID.test and FILE.PID.test.PID.part.
static void remove_left_behind(const std::filesystem::path &file) {
    namespace fs = std::filesystem;
    const std::string begin = file.filename().string() + ".";
    const fs::path folder = file.has_parent_path() ? file.parent_path() : ".";
    std::error_code ignored;
    for (fs::directory_iterator at(folder, ignored), end; at != end; at.increment(ignored)) {
        const std::string name = at->path().filename();
        if (name.compare(0, begin.size(), begin) != 0) continue;
        const std::string rest = name.substr(begin.size());
        const std::string pid = rest.substr(0, rest.find_first_not_of("0123456789"));
        const bool known = rest == pid + ".part" || rest == pid + ".test" ||
                           rest == pid + ".test." + pid + ".part";
        if (!known || pid.empty() || pid.size() > 9) continue;
        if (kill(std::stoi(pid), 0) != 0 && errno == ESRCH) fs::remove(at->path(), ignored);
    }
}

// Open a file of this name that was not there. What is there, such as a link or what a process of
// the same number has left, goes, but nothing that a link leads to.
static FILE *open_new(const std::string &path) {
    remove(path.c_str());
    const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    return file < 0 ? nullptr : fdopen(file, "wb");
}

// Write a new file completely, then rename it over the old one, so that a good file is never lost.
// It gets the old one's mode and owner, if this user may set them.
void write_file(const std::string &path, const std::string &bytes) {
    const SignalsWait until_renamed;
    const std::string target = behind_links(path);
    const std::string part = target + "." + std::to_string(getpid()) + ".part";
    make_folder(target);
    FILE *file = open_new(part);
    struct stat old;
    if (file && stat(target.c_str(), &old) == 0) {
        [[maybe_unused]] const int set = fchown(fileno(file), old.st_uid, old.st_gid);
        fchmod(fileno(file), old.st_mode & 07777);
    }
    bool written = file && fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size() &&
                   fflush(file) == 0 && fsync(fileno(file)) == 0;
    if (file) written = fclose(file) == 0 && written;
    if (written && rename(part.c_str(), target.c_str()) == 0) return;
    const int reason = errno;
    remove(part.c_str());
    error("cannot write %s: %s", path.c_str(), strerror(reason));
}

// --- .safetensors
// A file has all tensors, in the format of https://github.com/huggingface/safetensors: the length
// of the header (8 bytes, little-endian), the header in JSON, and the numbers of all tensors.
// data_offsets [begin, end) says which bytes of these numbers belong to a tensor:
//   {"W1":{"dtype":"F32","shape":[20,1,3,3],"data_offsets":[0,720]},"W2":{...},...}

typedef std::map<std::string, Tensor> Named; // in alphabetical order

// Return the parameters by name, and batch norm's running statistics: those of `buffers`.
static Named named(const std::vector<Tensor> &params,
                   [[maybe_unused]] const std::vector<Tensor> *buffers) {
    Named tensors;
    for (size_t i = 0; i < params.size(); i++) {
        tensors[param_names[i]] = params[i];
    }
#ifdef NETWORKS
    for (size_t i = 0; buffers && i < buffers->size(); i++) {
        tensors[buffer_names[i]] = (*buffers)[i];
    }
#endif
    return tensors;
}

// Return sizes separated by commas.
template <class Size> static std::string with_commas(const std::vector<Size> &sizes) {
    std::string text;
    for (Size s : sizes) {
        text += (text.empty() ? "" : ",") + std::to_string(s);
    }
    return text;
}

// Write tensors to a file.
void save_safetensors(const std::string &path, const Named &tensors) {
    std::string header, numbers;
    for (const auto &[name, t] : tensors) {
        const size_t begin = numbers.size();
        numbers.append((const char *)to_host(t).data(), sizeof(float) * size(t));
        header += (begin ? ",\"" : "{\"") + name + "\":{\"dtype\":\"F32\",\"shape\":[" +
                  with_commas(t.shape) + "],\"data_offsets\":[" + std::to_string(begin) + "," +
                  std::to_string(numbers.size()) + "]}";
    }
    header += "}";
    header.resize((header.size() + 7) / 8 * 8, ' '); // so that the numbers are aligned
    const uint64_t length = header.size();
    write_file(path, std::string((const char *)&length, 8) + header + numbers);
}

// Where the header says that a tensor is
struct Entry {
    std::string type;
    std::vector<size_t> shape, offsets;
};

// The header, which is read from its begin to its end. Whatever the format does not allow there is
// an error. JSON's blanks may stand between all its parts.
struct Header {
    std::string path, text;
    size_t at = 0;

    [[noreturn]] void expected(const char *what) const {
        error("%s is not a .safetensors file: byte %zu of its header should be %s", path.c_str(),
              at, what);
    }
    char next() { // 0 at the end
        at = std::min(text.find_first_not_of(" \t\n\r", at), text.size());
        return text[at];
    }
    bool take(char c) {
        if (next() != c) return false;
        at++;
        return true;
    }
    void expect(char c) {
        if (!take(c)) expected(std::string({'a', ' ', c}).c_str());
    }

    // Read a string. Of its escaped characters, only ASCII's are decoded: our names have no others.
    std::string string() {
        std::string s;
        expect('"');
        while (text[at] != '"') {
            if ((unsigned char)text[at] < ' ') expected("a character of a string");
            s += text[at++];
            if (s.back() != '\\') continue;
            const char *const known = "\"\\/bfnrtu", *const found = strchr(known, text[at]);
            if (!found || !*found) expected("a character that may follow \\");
            at++;
            if (*found != 'u') {
                s.back() = "\"\\/\b\f\n\r\t"[found - known];
                continue;
            }
            const std::string digits = text.substr(at, 4);
            if (digits.find_first_not_of("0123456789abcdefABCDEF") < 4 || digits.size() < 4) {
                expected("four hexadecimal digits");
            }
            const int code = std::stoi(digits, nullptr, 16);
            if (code < 128) s.back() = code;
            else s += "u" + digits;
            at += 4;
        }
        at++;
        return s;
    }

    size_t number() {
        next();
        const std::string digits = text.substr(at, text.find_first_not_of("0123456789", at) - at);
        if (digits.empty() || digits.size() > 18 || (digits[0] == '0' && digits.size() > 1)) {
            expected("a whole number");
        }
        at += digits.size();
        return std::stoull(digits);
    }

    std::vector<size_t> numbers() {
        std::vector<size_t> list;
        expect('[');
        while (!take(']')) {
            if (!list.empty()) expect(',');
            list.push_back(number());
        }
        return list;
    }

    // Read {"key":value,...}, each value by a call. Return how many there are.
    size_t object(const std::function<void(const std::string &key)> &read_value) {
        std::set<std::string> keys;
        expect('{');
        while (!take('}')) {
            if (!keys.empty()) expect(',');
            const std::string key = string();
            if (!keys.insert(key).second) expected("another name: each may be there once");
            expect(':');
            read_value(key);
        }
        return keys.size();
    }

    std::map<std::string, Entry> entries() {
        std::map<std::string, Entry> all;
        if (text[0] != '{') expected("a {");
        object([&](const std::string &name) {
            if (name == "__metadata__") {
                object([&](const std::string &) { string(); });
                return;
            }
            Entry &entry = all[name];
            const size_t keys = object([&](const std::string &key) {
                if (key == "dtype") entry.type = string();
                else if (key == "shape") entry.shape = numbers();
                else if (key == "data_offsets") entry.offsets = numbers();
                else expected("dtype, shape or data_offsets");
            });
            if (keys != 3 || entry.offsets.size() != 2) {
                expected("after a dtype, a shape and two data_offsets");
            }
        });
        next();
        if (at < text.size()) expected("its end");
        return all;
    }
};

// Read the header of a file of this size. Fail unless the tensors, one after another, are all that
// comes after it.
static std::map<std::string, Entry> read_entries(std::ifstream &file, size_t size,
                                                 const std::string &path) {
    uint64_t length = 0;
    errno = 0;
    file.read((char *)&length, 8);
    if (!file && errno == EISDIR) error("cannot read %s: %s", path.c_str(), strerror(errno));
    if (!file || length > std::min<size_t>(size - 8, 100'000'000)) { // which the format allows
        error("%s is not a .safetensors file: it does not have the header that its 8 first bytes "
              "promise",
              path.c_str());
    }
    Header header = {path, std::string(length, ' ')};
    file.read(&header.text[0], length);
    const std::map<std::string, Entry> entries = header.entries();

    std::vector<std::vector<size_t>> places;
    for (const auto &[name, entry] : entries) places.push_back(entry.offsets);
    std::sort(places.begin(), places.end());
    places.push_back({size - 8 - length});
    size_t end = 0;
    for (const std::vector<size_t> &place : places) {
        if (place[0] != end || place.back() < end) {
            error("%s is damaged: its tensors do not fill the file without gaps or overlaps: what "
                  "is at data_offsets [%s] should begin at %zu",
                  path.c_str(), with_commas(place).c_str(), end);
        }
        end = place.back();
    }
    return entries;
}

// Return the names, as an error shows them.
template <class T> static std::string names_of(const std::map<std::string, T> &tensors) {
    std::string list;
    for (const auto &[name, t] : tensors) list += (list.empty() ? "" : ", ") + name;
    std::replace_if(list.begin(), list.end(), iscntrl, '?'); // in one line
    return list;
}

// Load each tensor, which is on the host, by its name.
void load_safetensors(const std::string &path, const Named &tensors) {
    std::ifstream file(path, std::ios::binary | std::ios::ate);
    if (!file) error("cannot read %s: %s", path.c_str(), strerror(errno));
    const size_t file_size = file.tellg();
    file.seekg(0);
    const std::map<std::string, Entry> entries = read_entries(file, file_size, path);
    const long numbers = file.tellg(); // where they begin

    for (const auto &[name, t] : tensors) {
        const std::string where = path + ": " + name;
        const auto at = entries.find(name);
        if (at == entries.end()) {
            error("%s is missing: %s needs %.300s. The file has %.500s", where.c_str(),
                  experiment.name.c_str(), names_of(tensors).c_str(),
                  entries.empty() ? "no tensors" : names_of(entries).c_str());
        }
        const Entry &entry = at->second;
        const std::string type = entry.type + " [" + with_commas(entry.shape) + "]";
        const std::string expected = "F32 [" + with_commas(t.shape) + "]";
        if (type != expected) {
            error("%s is %s, but %s needs %s", where.c_str(), type.c_str(), experiment.name.c_str(),
                  expected.c_str());
        }
        if (entry.offsets[1] - entry.offsets[0] != sizeof(float) * size(t)) {
            error("%s is %s, whose numbers are not at data_offsets [%s]", where.c_str(),
                  type.c_str(), with_commas(entry.offsets).c_str());
        }
        file.seekg(numbers + entry.offsets[0]);
        file.read((char *)t.ptr(), sizeof(float) * size(t));
        if (!file) error("cannot read %s: %s", path.c_str(), strerror(errno));
    }
}

// --- options

// Load the parameters that INIT names into `params`.
void load_init() {
    if (!given("INIT")) return;
    const std::vector<Tensor> *all_buffers = nullptr;
#ifdef NETWORKS
    all_buffers = &buffers;
    reset_buffers();
#endif
    load_safetensors(option_text("INIT"), named(params, all_buffers));
}

static std::ofstream log_stream;
static void write_log(const char *row) {
    log_stream << row;
    if (!log_stream.flush()) {
        error("cannot write %s: %s", option_text("LOG").c_str(), strerror(errno));
    }
}

// Begin a new LOG.
static void begin_log() {
    make_folder(option_text("LOG"));
    log_stream = std::ofstream(option_text("LOG"));
    write_log("epoch,loss,test_acc,seconds,model,gpus,allreduce,lr\n");
}

// Write the row of an epoch to LOG, and the parameters to SAVE.
static void write_epoch(const Animator &animator, const std::vector<Tensor> &device_params) {
    char row[200];
    snprintf(row, sizeof row, "%zu,%.6f,%.4f,%.4f,%s,%d,%s,%g\n", animator.Y.size(),
             animator.loss.back(), animator.Y.back(), animator.seconds.back(),
             experiment.name.c_str(), (int)option("GPUS"), option_text("ALLREDUCE").c_str(),
             option("LR"));
    write_log(row);
    if (!given("SAVE")) return;
    const std::vector<Tensor> *all_buffers = nullptr;
#ifdef NETWORKS
    all_buffers = &buffers_on(device_params[0].device);
#endif
    save_safetensors(option_text("SAVE"), named(device_params, all_buffers));
}

// Fail now, and not after an epoch, if a file cannot be written.
static void check_files() {
    if (!given("SAVE")) return;
    const std::string save = option_text("SAVE");
    struct stat old;
    const bool is_there = stat(save.c_str(), &old) == 0;
    if (is_there && !S_ISREG(old.st_mode)) {
        error("SAVE=%s is %s, not a file", save.c_str(),
              S_ISDIR(old.st_mode) ? "a folder" : "a device, a pipe or a socket");
    }
    if (is_there ? access(save.c_str(), W_OK) != 0 : errno != ENOENT) {
        error("cannot write %s: %s", save.c_str(), strerror(errno));
    }
    const SignalsWait until_removed;
    const std::string target = behind_links(save);
    const std::string probe = target + "." + std::to_string(getpid()) + ".test";
    remove_left_behind(target);
    remove(probe.c_str()); // a link there would be followed
    write_file(probe, "");
    remove(probe.c_str());
    // A file that is mounted, as containers do it, cannot be replaced, nor have a second name
    if (link(target.c_str(), probe.c_str()) == 0) remove(probe.c_str());
    else if (errno == EXDEV) {
        error("SAVE=%s is a mounted file, which cannot be replaced: mount its folder",
              save.c_str());
    }
}

static const std::vector<Option> file_options = {
    {"INIT", "text", "none", "start from the parameters in this .safetensors file"},
    {"SAVE", "text", "none", "write the parameters to this file after each epoch"},
    {"LOG", "text", "build/log.csv", "file with a row for each epoch"},
};
static const bool files_added = [] {
    signal(SIGXFSZ, SIG_IGN); // writing too large a file is an error, not a signal
    option_table.insert(option_table.end(), file_options.begin(), file_options.end());
    after_options.push_back([] {
        check_files();
        after_epoch = write_epoch;
        experiment.train = [train = experiment.train](int num_gpus, int batch_size, float lr) {
            begin_log();
            train(num_gpus, batch_size, lr);
        };
        experiment.init_params = [make_params = experiment.init_params] {
            make_params();
            load_init();
        };
    });
    return true;
}();
