// Runs the allreduces of a submission for the judge, which is another program: numbers come in
// through one pipe, what each device then holds and what was sent go out through another. It
// judges nothing, so that nothing in it is worth changing.
// defines: main. SUBMISSION is the file that is judged: an mgpu.cu. With WITH_ALGORITHMS those of
// extras/algorithms/ can be judged, too.
#define MGPU_NO_MAIN
#include "../watch/watch.h"
#include "../watch/calls.h"

std::vector<void (*)()> after_options; // algorithms add to them
extern int own_code[2]; // the first and last line that are the submission's own: see judged.sh
#ifndef SUBMISSION
#define SUBMISSION "../../mgpu.cu"
int own_code[2] = {0, 1 << 30};
#endif
#include SUBMISSION
// Nothing here trains, so hooks.cu is not needed, and the compiler can drop what only it calls.
#include "../hooks.h"
Experiment experiment;
Experiment chapter;
std::function<void(const PerDevice &grads)> exchange;
void (*after_gradient)(const Tensor &grad) = nullptr;
#if defined(WITH_ALGORITHMS) && !defined(ALGORITHMS)
#include "../algorithms/algorithms.cu"
#endif

#include "../watch/training_steps.h"
#include "judged_cases.h"
#include "judge_protocol.h"

#include <atomic>
#include <csignal>

#include <sys/resource.h>

// These replace libstdc++'s functions, which name a line of libstdc++. The handler of the signal,
// such as the stand-in's, names the line of the submission instead.
namespace std {
__attribute__((noreturn)) void __glibcxx_assert_fail(const char *, int, const char *,
                                                     const char *what) noexcept {
    if (!on_cpu) fprintf(stderr, "assertion failed: %s\n", what);
    abort();
}
void __throw_out_of_range_fmt(const char *, ...) { abort(); }
} // namespace std

namespace worker {

using watch::call_stack, watch::Stack;

// As backward says it of each gradient: a submission may exchange them while others are computed
static void gradients_are_written(const std::vector<Tensor> &grads) {
    for (size_t i = grads.size(); after_gradient && i-- > 0;) after_gradient(grads[i]);
}

static PerDevice zero_gradients(const wire::Request &r) {
    const PerDevice grads = make_grads(r.k, r.sizes);
    for (const std::vector<Tensor> &tensors : grads) gradients_are_written(tensors);
    return grads;
}

static std::set<void *> callers; // where the calls are that have enqueued something
static void note_callers() {
    const Stack stack = call_stack();
    callers.insert(stack.frames, stack.frames + stack.n);
}
// Return which of `algorithms`, beside the one that is judged, are among the callers, perhaps
// inlined (of which a GPU's program knows nothing), or are the same function under another name.
static std::vector<int> others_among_callers(const std::string &judged) {
    std::set<const void *> functions = {(const void *)find_algorithm(judged).run};
    std::set<std::string> names;
    watch::look_up({callers.begin(), callers.end()});
    for (void *at : callers) {
        functions.insert(_Unwind_FindEnclosingFunction((char *)at - 1));
        for (const watch::Frame &f : watch::calls_at[at])
            names.insert(f.function.substr(0, f.function.find_first_of("(\n")));
    }
    std::vector<int> others;
    for (size_t i = 0; i < algorithms.size(); i++) {
        const auto &[name, run, supports] = algorithms[i];
        const bool is_there =
            functions.count((const void *)run) || names.count(std::string("allreduce_") + name);
        if (name != judged && is_there) others.push_back(i);
    }
    return others;
}

static wire::Row row_of(const watch::Op &op) {
    const network::Message message = {op.src, op.dst, op.steps, op.bytes};
    wire::Row row = {op.src != -2, message, op.device, op.lane, op.after, -1};
    row.is_kernel = op.works() && !row.is_message && !op.from && strcmp(op.name, "host function");
    return row;
}
} // namespace worker

#include "whose_numbers.h"

namespace worker {

// On the device, after all that it has been given. Reports of races have these names.
static void overwrite_sums(const Tensor &first, int n, int byte) {
    CUDA_CHECK(cudaMemsetAsync(first.ptr(), byte, n * sizeof(float), stream_of(first.device)));
}
static void write_gradients(const std::vector<Tensor> &grads, int n, const float *host) {
    const Tensor &first = grads[0];
    CUDA_CHECK(cudaMemcpyAsync(first.ptr(), host, n * sizeof(float), cudaMemcpyHostToDevice,
                               stream_of(first.device)));
    gradients_are_written(grads);
}
static void read_sums(const Tensor &first, int n, float *host) {
    CUDA_CHECK(cudaMemcpyAsync(host, first.ptr(), n * sizeof(float), cudaMemcpyDeviceToHost,
                               stream_of(first.device)));
}

// Return n floats on the host, pinned. All cases share them, since it takes longer to allocate such
// memory than to sum a case on a GPU.
static float *pinned(int n) {
    static Tensor memory = empty({0}, cpu());
    if (size(memory) < n) memory = empty({n}, cpu());
    return memory.ptr();
}

// Call the algorithm with the numbers on the devices, where tensors are contiguous, while one
// device is late, or each message. Then do at once what the contract allows: copy the sums, and
// overwrite their memory. Only CUDA is called here: the submission's own functions are judged.
static void sums(const wire::Request &r, wire::Answer &answer) {
    const int n = r.numbers[0].size();
    const PerDevice grads = make_grads(r.k, r.sizes);
    float *const inputs = pinned(2 * r.k * n), *const results = inputs + r.k * n; // of each device
    for (int c = 0; c < r.k; c++) {
        overwrite_sums(grads[c][0], n, 0xff); // NaN
        std::copy(r.numbers[c].begin(), r.numbers[c].end(), inputs + c * n);
    }
    std::fill_n(results, r.k * n, NAN);
    watch::wait_for_all();
    for (int c = 0; c < r.k; c++) {
        if (c == r.straggler) watch::pause(current_stream(gpu(c)).handle, limits::late_ms);
        write_gradients(grads[c], n, inputs + c * n);
    }
    watch::late_messages = r.straggler == r.k;
    fill_free_memory();
    if (r.what == wire::counts) {
        callers.clear();
        watch::on_record = note_callers;
        const watch::Recorder recorder(false);
        sum_with(r.algorithm, grads);
        watch::on_record = nullptr;
        for (const watch::Op &op : recorder.ops) answer.rows.push_back(row_of(op));
        answer.called = others_among_callers(r.algorithm);
    } else {
        sum_with(r.algorithm, grads);
    }
    watch::late_messages = false;
    for (int c = 0; c < r.k; c++) {
        read_sums(grads[c][0], n, results + c * n);
        overwrite_sums(grads[c][0], n, wire::poison_byte);
    }
    watch::wait_for_all();
    for (int c = 0; c < r.k; c++)
        answer.sums.push_back(wire::Flat(results + c * n, results + (c + 1) * n));
}

// Where the host is, while it waits
static Stack waiting;
static void note_where(int) { waiting = call_stack(); }
// Does it take longer while the devices cannot go on? They stand still until it has returned, or
// half a second. (A driver takes 1024 operations a stream before its host waits: few and small
// tensors.) A busy machine may be slow by chance, but not five times.
static void waits_on_host(const wire::Request &r, wire::Answer &answer) {
    const PerDevice grads = zero_gradients(r);
    sum_with(r.algorithm, grads); // what memory it needs is there from now on
    watch::wait_for_all();
    auto seconds = [&](auto before) {
        before();
        const double begin = watch::now();
        sum_with(r.algorithm, grads);
        return watch::now() - begin;
    };
    struct Gate {
        pthread_t host = pthread_self();
        int ms;
        std::atomic<bool> open{false}, given_up{false};
    };
    auto stand_still = [](void *data) {
        Gate &gate = *(Gate *)data;
        for (int ms = 0; !gate.open && !gate.given_up; ms++) {
            usleep(1000);
            if (ms == gate.ms) pthread_kill(gate.host, SIGUSR1);
            if (ms > limits::standstill_ms) gate.given_up = true;
        }
    };
    signal(SIGUSR1, note_where);
    answer.waited = true;
    for (int i = 0; answer.waited && i < 5; i++) {
        const double usual = seconds([] { watch::wait_for_all(); });
        Gate gate;
        gate.ms = limits::late_host_ms + 2e3 * usual;
        const double held = seconds([&] {
            watch::wait_for_all();
            for (int c = 0; c < r.k; c++)
                CUDA_CHECK(cudaLaunchHostFunc(current_stream(gpu(c)).handle, stand_still, &gate));
        });
        gate.open = true;
        answer.waited = 1e3 * held > gate.ms;
        watch::wait_for_all();
        if (gate.given_up) break;
    }
    if (!answer.waited) return;
    std::string callee;
    const std::string line = own_line(waiting, &callee);
    answer.words = {line, callee.find("worker::") ? callee : ""}; // not the handler of the signal
}

static void hello(wire::Answer &answer) {
    for (const Algorithm &a : algorithms) {
        int meant = 0;
        for (int k = 1; k <= limits::most_devices; k++)
            meant |= (!a.supports || a.supports(k)) << k;
        answer.names.push_back(a.name);
        answer.meant.push_back(meant);
    }
    answer.on_cpu = on_cpu;
#if defined(CUDA_CPU_TSAN) || defined(CUDA_CPU_ASAN)
    answer.slow = 30;
#endif
#ifdef CUDA_CPU_TSAN
    answer.races = true;
#endif
}
// Show the submission k devices, or as many as before: it may keep tensors from call to call, which
// need their devices. Another algorithm begins with none. New memory is fresh, as in a new process.
static void prepare_devices(int k, const std::string &algorithm) {
    static std::vector<DeviceState> hidden; // the next devices, in order
    static int devices = 0;
    static std::string before;
    if (k == devices && algorithm == before) return;
    empty_cache();
    if (algorithm != before) {
        hidden.insert(hidden.begin(), std::make_move_iterator(device_states.begin()),
                      std::make_move_iterator(device_states.end()));
        device_states.clear();
    }
    while ((int)device_states.size() < k && !hidden.empty()) {
        device_states.push_back(std::move(hidden.front()));
        hidden.erase(hidden.begin());
    }
    use_devices(k, false);
    devices = k, before = algorithm;
}

static wire::Answer answer_to(const wire::Request &r) {
    wire::Answer answer;
    prepare_devices(std::max(1, r.k), r.algorithm);
    if (r.what == wire::hello) hello(answer);
    else if (r.what == wire::waits) waits_on_host(r, answer);
    else if (r.what == wire::seconds)
        answer.seconds = time_allreduce(r.algorithm, zero_gradients(r));
    else if (r.what == wire::trace) traced(r, answer);
    else sums(r, answer);
    return answer;
}

// All of `bytes`, to or from a pipe. The judge is gone: so is the worker.
static void transfer(int file, char *bytes, size_t n, bool out) {
    while (n > 0) {
        const ssize_t moved = out ? write(file, bytes, n) : read(file, bytes, n);
        if (moved <= 0) _exit(0);
        bytes += moved, n -= moved;
    }
}

static void limit_memory([[maybe_unused]] int devices) {
#if defined(CUDA_CPU) && !defined(CUDA_CPU_TSAN) && !defined(CUDA_CPU_ASAN)
    const rlim_t bytes = limits::bytes_of_memory(devices);
    const rlimit most = {bytes, bytes};
    setrlimit(RLIMIT_DATA, &most);
#endif
    const rlimit no_core = {0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
}

} // namespace worker

// worker DEVICES: questions come through file 3, answers go through file 4.
int main(int argc, char **argv) {
    const int devices = argc > 1 ? atoi(argv[1]) : 1;
    std::string error;
    worker::limit_memory(devices);
    wire::keep_memory();
    setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
    // The stand-in shows as many devices as are wanted; one GPU stands for several
    if (on_cpu) setenv("CUDA_CPU_DEVICES", std::to_string(devices).c_str(), 0);
    else watch::show_devices(devices);
    while (true) {
        wire::Answer answer;
        size_t n = 0;
        std::string bytes;
        worker::transfer(3, (char *)&n, sizeof n, false);
        try {
            bytes.resize(n);
            worker::transfer(3, bytes.data(), n, false);
            answer = worker::answer_to(wire::unpacked<wire::Request>(bytes));
        } catch (const std::bad_alloc &) {
            answer.error = "the host is out of memory";
        } catch (const std::exception &e) {
            const std::string line = worker::own_line(watch::thrown_by);
            answer.error = line + (line.empty() ? "" : ": ") + e.what();
        }
        fflush(stdout);
        bytes = wire::packed(answer);
        worker::transfer(4, bytes.data(), bytes.size(), true);
        if (!answer.error.empty()) _exit(1); // what it has left enqueued is dropped
    }
}
