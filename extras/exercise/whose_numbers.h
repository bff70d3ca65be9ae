// What an allreduce does, one operation at a time: after each all memory is read, and what has
// changed is written down, with the line of the submission that enqueued the operation. The judge
// chooses the numbers, so that it can tell whose are where. Nothing is known here of any algorithm.
// Each operation ends before the next one is enqueued: a wait that is missing does no harm here.
// defines: worker::traced
#pragma once
#include <sys/uio.h>

namespace worker {

struct Block {  // of memory
    int device; // -1: the host's
    float *at;  // null: it has been freed
    Flat found; // what was last found there
};
static struct Trace { // of the run that is watched
    const watch::Recorder *recorder = nullptr;
    wire::Answer *answer;
    bool keeps;
    std::vector<Block> blocks;
    std::vector<Stack> calls; // of each operation
} tracing;

static void read_numbers(int device, const float *at, Flat &x) {
    const iovec to = {x.data(), x.size() * sizeof(float)}, from = {(void *)at, to.iov_len};
    if (device >= 0) CUDA_CHECK(cudaMemcpy(to.iov_base, at, to.iov_len, cudaMemcpyDeviceToHost));
    else if (process_vm_readv(getpid(), &to, 1, &from, 1, 0) < 0) return; // it has been freed
}
static int last_row() { return (int)tracing.answer->rows.size() - 1; }
static void add_change(int row, int block, const Flat &x, int begin, int end) {
    tracing.answer->changes.push_back({row, block, begin, end - begin});
    Flat &changed = tracing.answer->changed;
    changed.insert(changed.end(), x.begin() + begin, x.begin() + end);
}
static void note_changes(int row, bool of_host = false) {
    for (size_t b = 0; b < tracing.blocks.size(); b++) {
        Block &block = tracing.blocks[b];
        if (!block.at || (of_host && block.device >= 0)) continue;
        static Flat x;
        x.resize(block.found.size());
        if (block.device < 0) x = block.found; // should it have been freed
        read_numbers(block.device, block.at, x);
        const int n = x.size();
        if (memcmp(x.data(), block.found.data(), n * sizeof(float)) == 0) continue;
        auto same = [&](int i) { return watch::bits(x[i]) == watch::bits(block.found[i]); };
        for (int i = 0, j; i < n; i = j) {
            for (j = i + 1; j < n && same(j) == same(i); j++) {}
            if (!same(i)) add_change(row, b, x, i, j);
        }
        std::copy(x.begin(), x.end(), block.found.begin());
    }
}
// New memory has numbers that nobody has written.
static int add_block(int device, const void *at, size_t bytes, bool is_new = true) {
    const float nobodys = tracing.keeps ? NAN : 0;
    Block block = {device, (float *)at, Flat(bytes / sizeof(float), nobodys)};
    if (device >= 0 && (is_new || !tracing.keeps))
        CUDA_CHECK(cudaMemcpy(block.at, block.found.data(), bytes, cudaMemcpyHostToDevice));
    read_numbers(device, block.at, block.found);
    tracing.answer->blocks.push_back(device);
    tracing.blocks.push_back(block);
    return tracing.blocks.size() - 1;
}
static void find_place(const void *p, int device, int n, bool is_written, int &b, int &place) {
    const float *const at = (const float *)p;
    for (b = tracing.blocks.size() - 1; b >= 0; b--) {
        const Block &block = tracing.blocks[b];
        if (block.at && at >= block.at && at < block.at + block.found.size()) break;
    }
    if (b < 0 && device == -1) { // of the host, seen for the first time
        b = add_block(-1, p, n * sizeof(float), false);
        Flat &found = tracing.blocks[b].found;
        if (is_written) found.assign(n, NAN);
        else add_change(last_row(), b, found, 0, n);
    }
    place = b < 0 ? -1 : at - tracing.blocks[b].at;
}
// What the host's memory has changed in since the last operation is the host's work
static void before_operation() {
    note_changes(last_row(), true);
    tracing.calls.push_back(call_stack());
}
static void after_operation() {
    const watch::Op &op = tracing.recorder->ops.back();
    wire::Row row = row_of(op);
    if (op.works()) watch::wait_for_all(true);
    if (op.from) {
        row.numbers = op.bytes / sizeof(float);
        find_place(op.from, op.src, row.numbers, false, row.from_block, row.from);
        find_place(op.to, op.dst, row.numbers, true, row.to_block, row.to);
    }
    std::vector<std::string> &words = tracing.answer->words;
    row.name = words.size();
    words.push_back(watch::kernel_name(op.name));
    tracing.answer->rows.push_back(row);
    if (op.works()) note_changes(last_row());
}
static void note_allocation(const void *p, size_t bytes) { // 0 bytes: it is freed
    if (bytes > 0) add_block(watch::current, p, bytes);
    for (Block &block : tracing.blocks)
        if (bytes == 0 && block.at == p) block.at = nullptr;
}

// The innermost line of a stack that is the submission's own: in the file of the allreduce and, if
// that is a whole mgpu.cu, between the lines that own_code names. `callee`: what is called there.
static std::string own_line(const Stack &stack, std::string *callee = nullptr) {
    std::vector<watch::Frame> frames = watch::frames_of(stack);
    auto runs_it = [](const watch::Frame &f) { return f.function.find("run_allreduce") == 0; };
    const auto outermost = std::find_if(frames.begin(), frames.end(), runs_it);
    if (outermost == frames.begin() || outermost == frames.end()) return "";
    frames.erase(outermost, frames.end());
    size_t i = 0;
    auto is_own = [&](const watch::Frame &f) {
        return f.file == frames.back().file && f.line >= own_code[0] && f.line <= own_code[1];
    };
    while (i + 1 < frames.size() && !is_own(frames[i])) i++;
    size_t called = i; // but not by watch.h in its place
    while (called > 0 && !frames[--called].function.find("watch::")) {}
    const std::string name = i ? frames[called].function : "";
    const std::string plain = name.substr(0, name.find_first_of("(<\n"));
    const size_t begin = plain.find("cuda_cpu::") == 0 ? plain.rfind(':') + 1 : 0;
    if (callee) *callee = plain.substr(begin); // cudaFree of cuda_cpu::at::cudaFree
    const std::string &file = frames[i].file;
    return format("%s:%d", file.substr(file.rfind('/') + 1).c_str(), frames[i].line);
}

static void traced(const wire::Request &r, wire::Answer &answer) {
    const int n = r.numbers[0].size();
    empty_cache(); // so that each run takes the same memory, in the same order
    const PerDevice grads = make_grads(r.k, r.sizes);
    watch::wait_for_all();
    const watch::Recorder recorder(false);
    tracing = {&recorder, &answer, (bool)r.keeps, {}, {}};
    for (int c = 0; c < r.k; c++) {
        add_block(c, grads[c][0].ptr(), n * sizeof(float));
        tracing.blocks[c].found = r.numbers[c];
        CUDA_CHECK(cudaMemcpy(grads[c][0].ptr(), r.numbers[c].data(), n * sizeof(float),
                              cudaMemcpyHostToDevice));
    }
    for (const auto &[p, memory] : watch::allocations) {
        auto has = [p = p](const Block &block) { return block.at == p; };
        if (std::any_of(tracing.blocks.begin(), tracing.blocks.end(), has)) continue;
        const int b = add_block(memory.device, p, memory.bytes, false);
        const Flat x = tracing.blocks[b].found;
        if (r.keeps) add_change(-1, b, x, 0, x.size());
    }
    watch::on_record = before_operation, watch::on_enqueued = after_operation;
    watch::on_memory = note_allocation;
    auto mark_streams = [&] { // a row for each device: what is there before, and what comes next
        for (int c = 0; c < r.k; c++) watch::gradient_is_complete(stream_of(gpu(c)));
    };
    mark_streams();
    for (const std::vector<Tensor> &tensors : grads) gradients_are_written(tensors);
    sum_with(r.algorithm, grads);
    watch::wait_for_all(); // also for a launch without LAUNCH, which is no operation here
    note_changes(last_row());
    mark_streams();
    watch::on_record = watch::on_enqueued = nullptr, watch::on_memory = nullptr;
    watch::wait_for_all();
    for (int c = 0; c < r.k; c++) answer.sums.push_back(tracing.blocks[c].found);
    if (!r.keeps) return;
    std::vector<void *> addresses;
    for (const Stack &s : tracing.calls)
        addresses.insert(addresses.end(), s.frames, s.frames + s.n);
    watch::look_up(addresses);
    for (size_t i = 0; i < answer.rows.size(); i++) {
        if (answer.words[answer.rows[i].name] == "wait") continue;
        answer.rows[i].line = answer.words.size();
        answer.words.push_back(own_line(tracing.calls[i]));
    }
}

} // namespace worker
