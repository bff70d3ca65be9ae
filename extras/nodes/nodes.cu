// The same training on several machines: MPI starts this program several times, and each process, a
// node here, takes its part of every minibatch for devices of its own. Nothing in the chapter
// changes: an allreduce sums over a node's devices as in mgpu.cu, and then between the nodes, in
// host memory. What differs is the training loop below, to be read beside the chapter's.
//
//     make run NODES=2 GPUS=2 HOSTS=file     trains as GPUS=4 does
//     make exercise NODES=4                  judges ring_between_nodes, which is yours to rewrite
//
// defines: ring_between_nodes, sum_over_nodes, from_node_0, train_batch_on_nodes, train_on_nodes
#define MGPU_NO_MAIN
static int nodes = 1, node = 0; // this is node `node` of `nodes`

#include <csignal>
#include <sstream>
#include <thread>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#define isatty(file) (nodes == 1 && isatty(file)) // mpirun gives even a pipe a terminal
#include PROGRAM                                  // mgpu.cu and its parts, see the Makefile
#include "../format.h"

#define OMPI_SKIP_MPICXX
#define MPICH_SKIP_MPICXX
#include <mpi.h>

static int neighbours = 1, place = 0; // nodes on this machine, and which of them this is
constexpr int patience = 60;          // seconds, for the others to come

// ---------------------------------------------------------------------------------------------
// 1. Sums between the nodes

static long sent_messages = 0, sent_bytes = 0; // to other nodes

// Set a[i] to the sum of all nodes' a[i], i < n, in host memory, by a ring. In each step a node
// sends one of `nodes` chunks to its right neighbour. For nodes-1 steps it adds what it receives,
// and in as many more the sums go around. Each chunk is summed once, so all nodes get the same
// bits. A node sends 2(nodes-1) messages of n/nodes numbers.
static void ring_between_nodes(float *a, int n) {
    const int right = (node + 1) % nodes, left = (node + nodes - 1) % nodes;
    auto begin = [=](int chunk) { return int((long long)n * chunk / nodes); };
    std::vector<float> received(n / nodes + 1);
    for (int step = 0; step < 2 * (nodes - 1); step++) {
        const int out = (node - step + 2 * nodes) % nodes, in = (out + nodes - 1) % nodes;
        const int n_out = begin(out + 1) - begin(out), n_in = begin(in + 1) - begin(in);
        MPI_Sendrecv(a + begin(out), n_out, MPI_FLOAT, right, 0, received.data(), n_in, MPI_FLOAT,
                     left, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        sent_messages++;
        sent_bytes += n_out * sizeof(float);
        float *sum = a + begin(in);
        for (int i = 0; i < n_in; i++) {
            sum[i] = step < nodes - 1 ? sum[i] + received[i] : received[i];
        }
    }
}

// Do the same by MPI, which promises that all nodes get the same bits. How it adds depends on n: of
// three nodes or more, another n may round otherwise.
static void mpi_between_nodes(float *a, int n) {
    MPI_Allreduce(MPI_IN_PLACE, a, n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    sent_messages++; // at least: MPI decides
    sent_bytes += n * sizeof(float);
}

// Replace the sums over this node's devices by those over all nodes' devices. The host waits for
// them. With OVERLAP the devices compute meanwhile.
static void sum_over_nodes(const PerDevice &grads) {
    static Tensor memory = empty({1}, cpu()); // kept: to free it is to wait for all streams
    const std::vector<Tensor> flat = flatten(grads);
    const Device root = flat[0].device;
    const int n = size(flat[0]);
    if (nodes == 1 || n == 0) return;
    if (size(memory) < n) memory = empty({n}, cpu());
    const Tensor host = rows(memory, 0, n);
    copyto(flat[0], host);
    if (option_text("ALLREDUCE") == "ring") {
        ring_between_nodes(host.ptr(), n);
    } else {
        mpi_between_nodes(host.ptr(), n);
    }
    for (const Tensor &t : flat) {
        copyto(host, t);
        if (t.device.id != root.id) make_wait(root, t.device); // root writes to `host` again
    }
}

static void sum_over_nodes(double *a, int n) {
    MPI_Allreduce(MPI_IN_PLACE, a, n, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
}

static void from_node_0(void *a, size_t bytes) { MPI_Bcast(a, bytes, MPI_BYTE, 0, MPI_COMM_WORLD); }

// Give all nodes node 0's numbers, in host memory.
static void from_node_0(const std::vector<Tensor> &tensors) {
    for (const Tensor &t : tensors) from_node_0(t.ptr(), sizeof(float) * size(t));
}

// The algorithm that ALLREDUCE names. It sums over this node's devices.
static Algorithm within_node = {"", nullptr};

// Sum over the devices of all nodes.
static void allreduce_over_nodes(const PerDevice &grads) {
    within_node.run(grads);
    sum_over_nodes(grads);
}

#include "exercise.h" // judges the ring

// ---------------------------------------------------------------------------------------------
// 2. Training

// Return the first of n samples that device c gets, counted over all nodes. The shards are those of
// one process with all devices: as equal as can be, the larger ones first.
static int shard_begin(int n, int c) {
    const int k = nodes * option("GPUS");
    return c * (n / k) + std::min(c, n % k);
}

// Split this node's part of a minibatch into its devices' shards.
static auto split_over_nodes(const Tensor &X, const Tensor &y, const std::vector<Device> &devices) {
    const int k = option("GPUS"), n = X.shape[0];
    const int first = shard_begin(n, node * k), last = shard_begin(n, (node + 1) * k);
    return split_batch(rows(X, first, last), rows(y, first, last), devices);
}

// The chapter's train_batch: X, y is the minibatch of all nodes.
static std::vector<Tensor> train_batch_on_nodes(const Tensor &X, const Tensor &y,
                                                const PerDevice &device_params,
                                                const std::vector<Device> &devices, float lr) {
    auto [X_shards, y_shards] = split_over_nodes(X, y, devices);
    zero_grad(device_params);
    std::vector<Tensor> losses;
    for (size_t c = 0; c < devices.size(); c++) {
        losses.push_back(loss(net(X_shards[c], device_params[c]), y_shards[c]));
    }
    for (const Tensor &l : losses) {
        backward(l);
    }
    sum_gradients(gradients(device_params));
    for (const std::vector<Tensor> &param : device_params) {
        sgd(param, lr, X.shape[0]); // Here, we use a full-size batch
    }
    return losses;
}

// The chapter's evaluate_accuracy_gpus: every node counts the right answers in its parts of the
// test minibatches.
static float accuracy_on_nodes(const PerDevice &device_params, DataIter &test_iter,
                               const std::vector<Device> &devices) {
    NoGrad guard;
    double correct = 0;
    for (auto [X, y] : test_iter.epoch()) {
        auto [X_shards, y_shards] = split_over_nodes(X, y, devices);
        std::vector<Tensor> y_hats;
        for (size_t c = 0; c < devices.size(); c++) {
            y_hats.push_back(net(X_shards[c], device_params[c]));
        }
        for (size_t c = 0; c < devices.size(); c++) {
            correct += count_correct(y_hats[c], y_shards[c]);
        }
    }
    sum_over_nodes(&correct, 1);
    return correct / test_iter.X.shape[0];
}

// mgpu.cu's check_first_minibatch: gpu(0) computes the gradients of this node's shards, one by one,
// and the nodes sum them.
static void check_first_on_nodes(DataIter &train_iter, const std::vector<Device> &devices,
                                 float lr) {
    if (!option("CHECKS")) return;
    const auto [X, y] = train_iter.minibatch(0);
    const int n = X.shape[0], k = nodes * devices.size();
    const std::vector<float> before = all_to_host(params);
    std::vector<double> expected(before.size()), magnitude(before.size()); // sums of x and of |x|
    for (size_t c = 0; c < devices.size(); c++) {
        const int begin = shard_begin(n, node * devices.size() + c);
        const int end = shard_begin(n, node * devices.size() + c + 1);
        const std::vector<Tensor> copy = get_params(params, gpu(0));
        const Tensor X_shard = copyto(rows(X, begin, end), gpu(0));
        backward(loss(net(X_shard, copy), copyto(rows(y, begin, end), gpu(0))));
        const std::vector<float> part = all_to_host(gradients({copy})[0]);
        for (size_t j = 0; j < part.size(); j++) {
            expected[j] += part[j];
            magnitude[j] += std::fabs(part[j]);
        }
    }
    sum_over_nodes(expected.data(), expected.size());
    sum_over_nodes(magnitude.data(), magnitude.size());
    const PerDevice device_params = replicate(devices);
    train_batch_on_nodes(X, y, device_params, devices, lr);
    for (size_t c = 0; c < devices.size(); c++) {
        const std::vector<float> grad = all_to_host(gradients(device_params)[c]);
        const std::vector<float> after = all_to_host(device_params[c]);
        for (size_t j = 0; j < grad.size(); j++) {
            compare("gradient", j, c, grad[j], expected[j], 1.2e-7 * k * magnitude[j]);
            const float right = lr * grad[j] / n;
            const float rounding = 1e-5f * std::fabs(right) + 1e-6f * std::fabs(before[j]) + 1e-37f;
            compare("update", j, c, before[j] - after[j], right, rounding);
        }
    }
    printf("first minibatch: %d device%s with one\n", k, k > 1 ? "s agree" : " agrees");
}

// Fail unless the replicas are equal and every node holds the bits of node 0.
static void check_nodes(const PerDevice &device_params) {
    if (!option("CHECKS")) return;
    check_replicas(device_params);
    const std::vector<float> own = all_to_host(device_params[0]);
    std::vector<float> other = own;
    from_node_0(other.data(), sizeof(float) * other.size());
    for (size_t j = 0; j < own.size(); j++) {
        if (memcmp(&own[j], &other[j], sizeof(float)) != 0) {
            error("the replicas differ: %s is %.9g here, but %.9g on node 0: does each node get "
                  "the same sum?",
                  name_of(j).c_str(), own[j], other[j]);
        }
    }
}

// Replace this node's losses of an epoch by one number, their mean over all nodes.
static void average_losses(Animator &animator) {
    if (nodes == 1) return;
    double sums[] = {0, double(animator.done)};
    for (const Tensor &l : animator.pending) {
        for (float x : to_host(l)) sums[0] += x;
    }
    sum_over_nodes(sums, 2);
    animator.pending = {full({1}, sums[0] / sums[1], cpu())};
    animator.done = 1;
}

// Return how many devices compute the test accuracy. (networks/ has its own way.)
#ifdef NETWORKS
static int evaluating() { return evaluates_all() ? option("GPUS") : 1; }
#else
static int evaluating() { return 1; }
static void reset_buffers() {}
#endif

// The chapter's train. All nodes go through the epoch in the same order.
static void train_on_nodes(int num_gpus, int batch_size, float lr) {
    auto [train_iter, test_iter] = load_data_fashion_mnist(batch_size);
    const std::vector<Device> devices = first_devices(num_gpus);
    PerDevice device_params = replicate(devices);
    Animator animator = {train_iter.X.shape[0]};
    Timer timer;
    check_first_on_nodes(train_iter, devices, lr);
    reset_buffers(); // which the check has updated
    for (int epoch = 0; epoch < option("EPOCHS"); epoch++) {
        timer.start();
        for (auto [X, y] : train_iter.epoch()) {
            const std::vector<Tensor> losses =
                train_batch_on_nodes(X, y, device_params, devices, lr);
            waitall();
            animator.add_losses(losses);
        }
        timer.stop();
        average_losses(animator);
        check_nodes(device_params);
        const float acc = accuracy_on_nodes(device_params, test_iter, first_devices(evaluating()));
        animator.add(epoch + 1, acc, timer.times.back());
        if (after_epoch) after_epoch(animator, device_params[0]);
    }
    std::string where;
    for (int i = 0; i < nodes; i++) {
        where += (i ? ", " : "") + str(devices);
        if (nodes > 1) where += " of node " + std::to_string(i);
    }
    printf("test acc: %.2f, %.1f sec/epoch on %s\n", animator.Y.back(), timer.avg(), where.c_str());
}

// ---------------------------------------------------------------------------------------------
// 3. Program: how nodes start, meet and end

// Print to stderr, from a signal's handler, which may have interrupted malloc.
__attribute__((format(printf, 1, 2))) static void say(const char *format, ...) {
    char text[1000];
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (write(STDERR_FILENO, text, n) < n) return; // the program ends in any case
}

static void on_alarm(int) {
    say("mgpu: node %d has waited %d s for the others: does the network let them through, and does "
        "each send meet its receive?\n",
        node, patience);
    _exit(1); // mpirun ends the others
}

// The processes of a node: mpirun, or its daemon on this machine, starts the watcher, and that the
// node itself, whose end it sees.
static pid_t launcher, watched;
static volatile sig_atomic_t told = 0; // mpirun has told the watcher to end

static void on_terminate(int signal, siginfo_t *by, void *) {
    const bool by_mpirun = by->si_pid == getppid() || by->si_pid == launcher;
    if (by_mpirun && node <= 1) { // of several, these two are enough
        say("mgpu: mpirun ends this node: another one has stopped\n");
    }
    _exit(128 + signal);
}

// Start the node itself, which returns. The watcher stays here, and names a node that is killed:
// mpirun -q says nothing, and a killed process cannot.
static void watch_node() {
    launcher = getppid();
    struct sigaction tell = {};
    tell.sa_handler = [](int signal) {
        told = 1;
        kill(watched, signal);
    };
    sigset_t ends, before;
    sigemptyset(&ends);
    for (int signal : {SIGTERM, SIGINT, SIGHUP}) sigaddset(&ends, signal);
    sigprocmask(SIG_BLOCK, &ends, &before);
    watched = fork();
    if (watched == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        sigprocmask(SIG_SETMASK, &before, nullptr);
        return;
    }
    for (int signal : {SIGTERM, SIGINT, SIGHUP}) sigaction(signal, &tell, nullptr);
    sigprocmask(SIG_SETMASK, &before, nullptr);
    int status = 0;
    while (waitpid(watched, &status, 0) < 0 && errno == EINTR) {
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) != 128 + SIGTERM) _exit(WEXITSTATUS(status));
    const int signal = WIFSIGNALED(status) ? WTERMSIG(status) : SIGTERM;
    const char *rank = "";
    for (const char *variable : {"SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK"}) {
        if (getenv(variable)) rank = getenv(variable);
    }
    if (!told) {
        say("mgpu: node %s was killed by signal %d (%s)%s\n", rank, signal, strsignal(signal),
            signal == SIGKILL ? ": is its machine out of memory?" : "");
    }
    _exit(128 + signal);
}

// Print an error of MPI, whose own message mpirun -q would hide.
static void on_mpi_error(MPI_Comm *, int *code, ...) {
    char text[MPI_MAX_ERROR_STRING];
    int length;
    MPI_Error_string(*code, text, &length);
    say("mgpu: node %d: %s: do the counts and the ranks of the messages match?\n", node, text);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

// End the program if the launcher has started another number of processes than MPI knows of: under
// the mpirun of another MPI, each process would train alone.
static void check_launcher() {
    const std::pair<const char *, const char *> launchers[] = {
        // how many there are, and which
        {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"}, // by Open MPI's mpirun
        {"PMI_SIZE", "PMI_RANK"}, // by that of MPICH or Intel, or by srun --mpi=pmi2
        {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID"}};
    auto number = [](const char *variable) {
        const char *const text = getenv(variable);
        return text ? atoi(text) : 0;
    };
    for (const auto &[size, rank] : launchers) {
        if (!getenv(size)) continue;
        if (number(size) == nodes) return;
        char version[MPI_MAX_LIBRARY_VERSION_STRING];
        int length;
        MPI_Get_library_version(version, &length);
        std::replace(version, version + length, '\t', ' ');
        if (number(rank) > 0) {
            usleep(100000); // the first one tells
        } else {
            say("mgpu: %s=%d, but MPI knows of %d: this program was built with %.*s: start it by "
                "the mpirun of that MPI, or by srun --mpi=TYPE with a type that it knows\n",
                size, number(size), nodes, (int)strcspn(version, ",\n"), version);
        }
        MPI_Finalize();
        _exit(1);
    }
}

static void start_nodes(int *argc, char ***argv) {
    MPI_Errhandler handler;
    MPI_Comm machine;
    signal(SIGALRM, on_alarm);
    alarm(patience); // until meet_nodes
    MPI_Init(argc, argv);
    MPI_Comm_create_errhandler(on_mpi_error, &handler);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, handler);
    MPI_Comm_size(MPI_COMM_WORLD, &nodes);
    MPI_Comm_rank(MPI_COMM_WORLD, &node);
    check_launcher();
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine);
    MPI_Comm_size(machine, &neighbours);
    MPI_Comm_rank(machine, &place);
    MPI_Comm_free(&machine);
    if (node > 0 && !freopen("/dev/null", "w", stdout)) error("cannot write to /dev/null");
}

static size_t hash_of(const std::string &bytes) { return std::hash<std::string>()(bytes); }

// Fail on each node that differs from node 0 in what all must have in common: what decides the
// bits, how long they train, the data, the program. The error names the first word that is another
// one.
static void meet_nodes() {
    size_t data = 0;
    for (const DataSet *set : {&train_set, &test_set}) {
        for (const auto *bytes : {&set->images, &set->labels}) {
            data = 31 * data + hash_of({bytes->begin(), bytes->end()});
        }
    }
    std::ifstream program("/proc/self/exe", std::ios::binary);
    std::string text = "MODEL=" + experiment.name + " ALLREDUCE=" + option_text("ALLREDUCE");
    for (const char *name :
         {"OVERLAP", "GPUS", "BATCH", "LR", "EPOCHS", "SEED", "SHUFFLE", "LIMIT", "CHECKS"}) {
        if (has_option(name)) text += format(" %s=%.10g", name, option(name));
    }
    text += format(" data=%zx program=%zx", data,
                   hash_of({std::istreambuf_iterator<char>(program), {}}));
    char bytes[2000] = {};
    text.copy(bytes, sizeof bytes - 1);
    from_node_0(bytes, sizeof bytes);
    std::istringstream here(text), there(bytes);
    for (std::string own, other; here >> own;) {
        if (!(there >> other) || own != other) {
            error("its %s is not %s, as on node 0: all nodes must have the same", own.c_str(),
                  other.c_str());
        }
    }
    MPI_Barrier(MPI_COMM_WORLD); // all agree
    alarm(0);
}

// Called with the options that were given: complete them for the devices of all nodes together, and
// let node 0 alone read and write files.
static void options_of_nodes() {
    typed["GPUS"] = std::to_string(int(option("GPUS") * nodes));
#ifdef FILES
    if (node > 0) {
        typed.erase("INIT");
        typed.erase("SAVE");
        typed["LOG"] = "/dev/null";
    }
#endif
}

// Read the options. Return false if they ask for help, which is then printed.
static bool parse_options_of_nodes(int argc, char **argv) {
    after_options.insert(after_options.begin(), options_of_nodes);
    auto is_ring = [](const Algorithm &a) { return a.name == std::string("ring"); };
    if (std::none_of(algorithms.begin(), algorithms.end(), is_ring)) { // without algorithms/
        algorithms.push_back({"ring", allreduce_bucket});
    }
    if (!parse_options(argc, argv)) return false;
    typed["GPUS"] = std::to_string(int(option("GPUS") / nodes));
    if (nodes > 1 && option_text("ALLREDUCE") == "naive") typed["ALLREDUCE"] = "bucket"; // the same
    for (Algorithm &algorithm : algorithms) {
        if (algorithm.name != option_text("ALLREDUCE")) continue;
        within_node = algorithm;
        algorithm.run = allreduce_over_nodes;
    }
    return true;
}

// Create gpu(0) ... gpu(k-1). The nodes of a machine take its GPUs in turn.
static void use_devices_in_turn(int k) {
    int count = 0;
    use_devices(0, false); // fails if there is no GPU
    CUDA_CHECK(cudaGetDeviceCount(&count));
    for (int i = 0; i < k; i++) { // use_devices(k) keeps the devices that are there
        device_states.emplace_back().cuda_device = int(place * option("GPUS") + i) % count;
        device_states[i].stream = new_stream(gpu(i));
    }
    use_devices(k, true);
}

// mgpu.cu's run_program
static void run_on_nodes() {
#ifdef FAST
    printf("operators: %s\n", operators.name.c_str());
#endif
    const int k = option("GPUS"), shown = std::max(2, k); // the demos want two
    if (nodes > 1) printf("%d nodes with %d device%s each\n", nodes, k, k > 1 ? "s" : "");
    train_set = load_data(option_text("DATA"), "train");
    test_set = load_data(option_text("DATA"), "t10k");
    const int cores = std::thread::hardware_concurrency() / neighbours / k;
    if (on_cpu) {
        setenv("CUDA_CPU_DEVICES", std::to_string(shown).c_str(), 0);
        setenv("CUDA_CPU_CORES", std::to_string(std::max(1, cores)).c_str(), 0);
    }
    use_devices_in_turn(shown);
    rng.seed(option("SEED"));
    experiment.init_params();
    meet_nodes();
    from_node_0(params); // which may be those of INIT
#ifdef NETWORKS
    from_node_0(buffers);
    reset_buffers();
#endif
#ifdef FILES
    begin_log();
#endif
    experiment.demos(k);
    train_on_nodes(k, option("BATCH"), option("LR"));
    params.clear();
}

int main(int argc, char **argv) {
    watch_node();
    setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
    try {
        start_nodes(&argc, &argv);
        const bool exercise = argc > 1 && strcmp(argv[1], "exercise") == 0; // judge the ring
        if (parse_options_of_nodes(argc - exercise, argv + exercise)) {
            struct sigaction terminate = {};
            terminate.sa_sigaction = on_terminate;
            terminate.sa_flags = SA_SIGINFO;
            if (nodes > 1) sigaction(SIGTERM, &terminate, nullptr);
            if (exercise) {
                meet_nodes();
                exercise_nodes();
            } else {
                run_on_nodes();
            }
        }
        if (fflush(stdout) || ferror(stdout)) error("cannot write to stdout");
        MPI_Finalize();
        return 0;
    } catch (const std::exception &e) {
        const bool memory = dynamic_cast<const std::bad_alloc *>(&e);
        fflush(stdout);
        usleep(node * 100000); // what all nodes find wrong, node 0 says, and ends them
        fprintf(stderr, "mgpu: %s%s\n", node ? format("node %d: ", node).c_str() : "",
                memory ? "the host is out of memory" : e.what());
    }
    MPI_Abort(MPI_COMM_WORLD, 1);
    _exit(1);
}
