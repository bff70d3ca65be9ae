// SAVE, INIT and LOG: the parameters in a .safetensors file, after each epoch and to start from,
// and a table of the epochs. This part of the program comes after networks/, whose names it may
// need.
// defines: FILES, write_file, save_safetensors, load_safetensors, SAVE, INIT, LOG
#define FILES

#include <csignal>
#include <filesystem>
#include <sstream>

// Make the folder of a file. If that fails, so will opening the file.
static void make_folder(const std::string &path) {
    std::error_code ignored;
    std::filesystem::create_directories(std::filesystem::path(path).parent_path(), ignored);
}

// Write a new file completely, then rename it over the old one, so that a good file is never lost.
void write_file(const std::string &path, const std::string &bytes) {
    const std::string part = path + "." + std::to_string(getpid()) + ".part";
    make_folder(path);
    FILE *file = fopen(part.c_str(), "wb");
    bool written = file && fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size() &&
                   fflush(file) == 0 && fsync(fileno(file)) == 0;
    if (file) written = fclose(file) == 0 && written;
    if (written && rename(part.c_str(), path.c_str()) == 0) return;
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
static std::string with_commas(const std::vector<int> &shape) {
    std::string text;
    for (int s : shape) {
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

// Return the text between `begin` and the next `end`, or nothing if `begin` is not there.
static std::string between(const std::string &text, const std::string &begin, char end) {
    const size_t at = text.find(begin), from = at + begin.size();
    return at == std::string::npos ? "" : text.substr(from, text.find(end, from) - from);
}

// Load each tensor, which is on the host, by its name. Spaces and key order may vary. JSON writes a
// quote inside a string as \", so a search finds "W1":{ only where an entry begins.
void load_safetensors(const std::string &path, const Named &tensors) {
    std::ifstream file(path, std::ios::binary);
    if (!file) error("cannot read %s: %s", path.c_str(), strerror(errno));
    uint64_t length = 0;
    file.read((char *)&length, 8);
    std::string header(file && length < 100'000'000 ? length : 0, ' ');
    if (header.empty() || !file.read(&header[0], length) || header[0] != '{') {
        error("%s is not a .safetensors file", path.c_str());
    }
    header.erase(std::remove_if(header.begin(), header.end(), isspace), header.end());

    std::string found, needed; // names
    for (size_t at = 1; (at = header.find("\":{\"", at)) != std::string::npos; at++) {
        const std::string name = header.substr(0, at).substr(header.rfind('"', at - 1) + 1);
        if (name != "__metadata__") found += (found.empty() ? "" : ", ") + name;
    }
    for (const auto &[name, t] : tensors) {
        needed += (needed.empty() ? "" : ", ") + name;
    }
    for (const auto &[name, t] : tensors) {
        const std::string where = path + ": " + name;
        const std::string entry = between(header, "\"" + name + "\":{", '}');
        if (entry.empty()) {
            error("%s is missing: %s needs %.300s. The file has %.500s", where.c_str(),
                  experiment.name.c_str(), needed.c_str(), found.c_str());
        }
        const std::string type =
            between(entry, "\"dtype\":\"", '"') + " [" + between(entry, "\"shape\":[", ']') + "]";
        const std::string expected = "F32 [" + with_commas(t.shape) + "]";
        if (type != expected) {
            error("%s is %s, but %s needs %s", where.c_str(), type.c_str(), experiment.name.c_str(),
                  expected.c_str());
        }
        const std::string offsets = between(entry, "\"data_offsets\":[", ']');
        const size_t bytes = sizeof(float) * size(t);
        size_t begin = 0, end = 0;
        sscanf(offsets.c_str(), "%zu,%zu", &begin, &end);
        file.seekg(8 + length + begin);
        if (end - begin != bytes || !file.read((char *)t.ptr(), bytes)) {
            error("%s: its %zu bytes are not at data_offsets [%s]", where.c_str(), bytes,
                  offsets.c_str());
        }
    }
}

// --- options

static std::string save, init, log_file = "build/log.csv"; // SAVE, INIT, LOG

// Load the parameters that INIT names into `params`.
void load_init() {
    if (init.empty()) return;
    const std::vector<Tensor> *all_buffers = nullptr;
#ifdef NETWORKS
    all_buffers = &buffers;
    reset_buffers();
#endif
    load_safetensors(init, named(params, all_buffers));
}

static std::ofstream log_stream;
static void write_log(const char *row) {
    log_stream << row;
    if (!log_stream.flush()) error("cannot write %s: %s", log_file.c_str(), strerror(errno));
}

// Begin a new LOG.
static void begin_log() {
    make_folder(log_file);
    log_stream = std::ofstream(log_file);
    write_log("epoch,loss,test_acc,seconds,model,gpus,allreduce,lr\n");
}

// Write the row of an epoch to LOG, and the parameters to SAVE.
static void write_epoch(const Animator &animator, const std::vector<Tensor> &device_params) {
    char row[200];
    snprintf(row, sizeof row, "%zu,%.6f,%.4f,%.4f,%s,%d,%s,%g\n", animator.Y.size(),
             animator.loss.back(), animator.Y.back(), animator.seconds.back(),
             experiment.name.c_str(), options.gpus, options.allreduce.c_str(), options.lr);
    write_log(row);
    if (save.empty()) return;
    const std::vector<Tensor> *all_buffers = nullptr;
#ifdef NETWORKS
    all_buffers = &buffers_on(device_params[0].device);
#endif
    save_safetensors(save, named(device_params, all_buffers));
}

// Fail now, and not after an epoch, if a file cannot be written.
static void check_files() {
    if (!save.empty()) {
        if (access((save + "/.").c_str(), F_OK) == 0) {
            error("SAVE=%s is a folder, not a file", save.c_str());
        }
        const std::string probe = save + "." + std::to_string(getpid()) + ".test";
        write_file(probe, "");
        remove(probe.c_str());
    }
}

static const std::vector<Option> file_options = {
    {"INIT", &init, "start from the parameters in this .safetensors file"},
    {"SAVE", &save, "write the parameters to this file after each epoch"},
    {"LOG", &log_file, "file with a row for each epoch (build/log.csv)"},
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
