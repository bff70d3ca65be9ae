// The same training on several machines: MPI starts this program several times, and each process, a
// node here, takes its part of every minibatch for devices of its own. Nothing in the chapter
// changes: `exchange` sums over a node's devices as in mgpu.cu, and then between the nodes, in host
// memory. What differs is the training loop below, to be read beside the chapter's.
//
//     make run NODES=2 GPUS=2 HOSTS=file     trains as GPUS=4 does
//     make exercise NODES=4                  judges ring_between_nodes, which is yours to rewrite
//
// defines: ring_between_nodes, sum_over_nodes, from_node_0, train_batch_on_nodes, train_on_nodes
#define MGPU_NO_MAIN
#ifndef PROGRAM
#define PROGRAM "../../mgpu.cu"
#endif
static int nodes = 1, node = 0; // this is node `node` of `nodes`
#include <thread>

#include <unistd.h>
#define isatty(file) (nodes == 1 && isatty(file)) // mpirun gives even a pipe a terminal
#include PROGRAM

#define OMPI_SKIP_MPICXX
#define MPICH_SKIP_MPICXX
#include <mpi.h>

static int neighbours = 1, place = 0; // nodes on this machine, and which of them this is
constexpr int patience = 60;          // seconds, for the others to come

// ---------------------------------------------------------------------------------------------
// 1. Sums between the nodes

static long sent_messages = 0, sent_bytes = 0; // to other nodes

// a[i] = the sum of all nodes' a[i], i < n, in host memory: a ring. In each step a node sends one
// of `nodes` chunks to its right neighbour; it adds what it receives for nodes-1 steps, and in as
// many more the sums go around. Each chunk is summed once: all nodes get the same bits.
// A node sends 2(nodes-1) messages of n/nodes numbers.
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
        for (int i = 0; i < n_in; i++)
            sum[i] = step < nodes - 1 ? sum[i] + received[i] : received[i];
    }
}
// The same by MPI. The standard does not promise that MPI_Allreduce gives all nodes the same bits,
// so one node gets the sum and sends it.
static void mpi_between_nodes(float *a, int n) {
    MPI_Reduce(node == 0 ? MPI_IN_PLACE : a, a, n, MPI_FLOAT, MPI_SUM, 0, MPI_COMM_WORLD);
    MPI_Bcast(a, n, MPI_FLOAT, 0, MPI_COMM_WORLD);
    sent_messages++; // at least: MPI decides
    sent_bytes += n * sizeof(float);
}

// grads, which hold the sums over this node's devices, become those over all nodes' devices. The
// host waits for them; with OVERLAP the devices compute meanwhile.
static void sum_over_nodes(const PerDevice &grads) {
    static Tensor memory = empty({1}, cpu()); // kept: to free it is to wait for all streams
    const std::vector<Tensor> flat = flatten(grads);
    const Device root = flat[0].device;
    const int n = size(flat[0]);
    if (nodes == 1 || n == 0) return;
    if (size(memory) < n) memory = empty({n}, cpu());
    const Tensor host = rows(memory, 0, n);
    copyto(flat[0], host);
    options.allreduce == "ring" ? ring_between_nodes(host.ptr(), n)
                                : mpi_between_nodes(host.ptr(), n);
    for (const Tensor &t : flat) {
        copyto(host, t);
        if (t.device.id != root.id) make_wait(root, t.device); // root writes to `host` again
    }
}
static void sum_over_nodes(double *a, int n) {
    MPI_Allreduce(MPI_IN_PLACE, a, n, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
}
static void from_node_0(void *a, size_t bytes) { MPI_Bcast(a, bytes, MPI_BYTE, 0, MPI_COMM_WORLD); }

#include "exercise.h" // judges the ring

// ---------------------------------------------------------------------------------------------
// 2. Training

// split_batch of this node's part of a minibatch: the shards that its devices would have in one
// process with all devices.
static auto split_over_nodes(const Tensor &X, const Tensor &y, const std::vector<Device> &devices) {
    const std::vector<int> sizes = shard_sizes(X.shape[0], nodes * options.gpus);
    const auto own = sizes.begin() + node * options.gpus;
    const int first = std::accumulate(sizes.begin(), own, 0);
    const int last = std::accumulate(own, own + options.gpus, first);
    return split_batch(rows(X, first, last), rows(y, first, last), devices);
}

// The chapter's train_batch: X, y is the minibatch of all nodes.
static std::vector<Tensor> train_batch_on_nodes(const Tensor &X, const Tensor &y,
                                                std::vector<std::vector<Tensor>> &device_params,
                                                const std::vector<Device> &devices, float lr) {
    auto [X_shards, y_shards] = split_over_nodes(X, y, devices);
    std::vector<Tensor> losses;
    for (size_t c = 0; c < devices.size(); c++)
        losses.push_back(loss(net(X_shards[c], device_params[c]), y_shards[c]));
    for (const Tensor &l : losses) backward(l);
    exchange(gradients(device_params));
    for (const auto &param : device_params)
        sgd(param, lr, X.shape[0]); // Here, we use a full-size batch
    return losses;
}

// The chapter's evaluate_accuracy_gpus: every node counts the right answers in its parts of the
// test minibatches.
static float accuracy_on_nodes(const std::vector<std::vector<Tensor>> &device_params,
                               DataIter &test_iter, const std::vector<Device> &devices) {
    NoGrad guard;
    double correct = 0;
    for (auto [X, y] : test_iter.epoch()) {
        auto [X_shards, y_shards] = split_over_nodes(X, y, devices);
        std::vector<Tensor> y_hats;
        for (size_t c = 0; c < devices.size(); c++)
            y_hats.push_back(net(X_shards[c], device_params[c]));
        for (size_t c = 0; c < devices.size(); c++)
            correct += count_correct(y_hats[c], y_shards[c]);
    }
    sum_over_nodes(&correct, 1);
    return correct / test_iter.X.shape[0];
}

// check_first_minibatch, with this node's devices in the places of all nodes', and as many losses
static void check_first_on_nodes(DataIter &train_iter, const std::vector<Device> &devices,
                                 float lr) {
    if (!options.first_check) return;
    PerDevice device_params = replicate(devices), all;
    const auto [X, y] = train_iter.minibatch(0);
    const std::vector<Tensor> losses = train_batch_on_nodes(X, y, device_params, devices, lr);
    for (int i = 0; i < nodes; i++)
        all.insert(all.end(), device_params.begin(), device_params.end());
    double samples = 0;
    for (const Tensor &l : losses) samples += size(l);
    sum_over_nodes(&samples, 1);
    check_first_step(X, y, {full({(int)samples}, 0, cpu())}, all, lr);
}

// check_replicas, and every node must hold the bits of node 0.
static void check_nodes(const std::vector<std::vector<Tensor>> &device_params) {
    if (!options.replica_check) return;
    check_replicas(device_params);
    const Flat own = all_to_host(device_params[0]);
    Flat other = own;
    from_node_0(other.data(), sizeof(float) * other.size());
    for (size_t j = 0; j < own.size(); j++)
        if (memcmp(&own[j], &other[j], sizeof(float)) != 0)
            error("the replicas differ: %s is %.9g here, but %.9g on node 0: does each node get "
                  "the same sum?",
                  name_of(j).c_str(), own[j], other[j]);
}

// The chapter's train. All nodes go through the epoch in the same order.
static void train_on_nodes(float lr) {
    auto [train_iter, test_iter] = load_data_fashion_mnist(options.batch);
    const std::vector<Device> devices = first_devices(options.gpus);
    auto device_params = replicate(devices);
    const int num_epochs = number_of_epochs(train_iter);
    Animator animator(train_iter.steps());
    Timer timer;
    check_first_on_nodes(train_iter, devices, lr);
    for (int epoch = 0; epoch < num_epochs; epoch++) {
        timer.start();
        for (auto [X, y] : train_iter.epoch()) {
            const auto losses = train_batch_on_nodes(X, y, device_params, devices, lr);
            waitall();
            animator.add_losses(losses);
        }
        timer.stop();
        animator.count(); // what is not counted yet; then over all nodes
        double sums[] = {animator.loss, double(animator.samples)};
        sum_over_nodes(sums, 2);
        animator.loss = sums[0], animator.samples = sums[1];
        check_nodes(device_params);
#ifdef NETWORKS
        const int evaluating = evaluates_all() ? options.gpus : 1;
        const float acc = accuracy_on_nodes(device_params, test_iter, first_devices(evaluating));
        add_row(animator, epoch + 1, acc, timer.times.back());
#else
        const float acc = accuracy_on_nodes(device_params, test_iter, first_devices(1));
        animator.add(epoch + 1, acc, timer.times.back());
#endif
        save_params(device_params[0]);
    }
    std::string where;
    for (int i = 0; i < nodes; i++)
        where += (i ? ", " : "") + str(devices) + (nodes > 1 ? " of node " + str(i) : "");
    printf("test acc: %.2f, %.1f sec/epoch on %s\n", animator.Y.back(), timer.avg(), where.c_str());
}

// ---------------------------------------------------------------------------------------------
// 3. Program: how nodes start, meet and end

// For a signal's handler, which may have interrupted malloc
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
static void on_terminate(int signal) {
    if (node <= 1) // of several, these two are enough
        say("mgpu: mpirun ends this node: another one has stopped\n");
    _exit(128 + signal);
}
// mpirun -q would hide what MPI itself says
static void on_mpi_error(MPI_Comm *, int *code, ...) {
    char text[MPI_MAX_ERROR_STRING];
    int length;
    MPI_Error_string(*code, text, &length);
    say("mgpu: node %d: %s: do the counts and the ranks of the messages match?\n", node, text);
    MPI_Abort(MPI_COMM_WORLD, 1);
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
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine);
    MPI_Comm_size(machine, &neighbours);
    MPI_Comm_rank(machine, &place);
    MPI_Comm_free(&machine);
    if (node > 0 && !freopen("/dev/null", "w", stdout)) error("cannot write to /dev/null");
}

// What all nodes must have in common: what decides the bits, how long they train, the data, the
// program. Whoever differs from node 0 ends all, and names the first word that is another one.
static size_t hash_of(const std::string &bytes) { return std::hash<std::string>()(bytes); }
static void meet_nodes() {
    size_t data = 0;
    for (const DataSet *set : {&train_set, &test_set})
        for (const auto *bytes : {&set->images, &set->labels})
            data = 31 * data + hash_of({bytes->begin(), bytes->end()});
    std::ifstream program("/proc/self/exe", std::ios::binary);
    const std::string text =
        format("MODEL=%s GPUS=%d BATCH=%d LR=%.8g EPOCHS=%d STEPS=%d SEED=%d SHUFFLE=%d LIMIT=%d "
               "ALLREDUCE=%s OVERLAP=%d REPLICA_CHECK=%d FIRST_CHECK=%d data=%zx program=%zx",
               options.model.c_str(), options.gpus, options.batch, options.lr, options.epochs,
               options.steps, options.seed, options.shuffle, options.limit,
               options.allreduce.c_str(), options.overlap, options.replica_check,
               options.first_check, data, hash_of({std::istreambuf_iterator<char>(program), {}}));
    char bytes[2000] = {};
    text.copy(bytes, sizeof bytes - 1);
    from_node_0(bytes, sizeof bytes);
    std::istringstream here(text), there(bytes);
    for (std::string own, other; here >> own;)
        if (!(there >> other) || own != other)
            error("its %s is not %s, as on node 0: all nodes must have the same", own.c_str(),
                  other.c_str());
    MPI_Barrier(MPI_COMM_WORLD); // all agree
    alarm(0);
}

static bool exercise = false; // the first word: judge ring_between_nodes
// The options, as mgpu.cu would complete them for the devices of all nodes together.
static bool parse_options_of_nodes(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "exercise")) exercise = true, argc--, argv++;
    Option *const gpus = find_option("GPUS"), *const split = find_option("SPLIT");
    gpus->field = Setter([gpus = *gpus](const std::string &value) mutable {
        set_option(gpus, value);
        options.gpus *= nodes;
    });
    if (nodes > 1)
        split->field =
            Setter([](auto) { error("SPLIT works only in one process: leave NODES out"); });
    options.gpus = nodes;
    if (!parse_options(argc, argv)) return false;
    options.gpus /= nodes;
    if (nodes > 1 && options.allreduce == "naive") options.allreduce = "bucket"; // its sums
    return true;
}

static void run_on_nodes() {
    if (node > 0) // node 0 reads, logs and saves
        options.init = options.save = "", options.log = "/dev/null";
#ifdef FAST
    printf("operators: %s\n", operators.name.c_str());
#endif
    const int cores = std::thread::hardware_concurrency() / neighbours / options.gpus;
    if (on_cpu) setenv("CUDA_CPU_CORES", str(std::max(1, cores)).c_str(), 0);
    if (nodes > 1)
        printf("%d nodes with %d device%s each\n", nodes, options.gpus,
               options.gpus > 1 ? "s" : "");
    set_up(options.gpus, false, place * options.gpus);
    meet_nodes();
    for (const Tensor &p : params) from_node_0(p.ptr(), sizeof(float) * size(p));
    const Exchange sum = [](const PerDevice &grads) {
        run_allreduce(options.allreduce, grads);
        sum_over_nodes(grads);
    };
    exchange = sum;
    if (options.overlap)
        exchange = [=](const PerDevice &grads) { sum_in_buckets(sum, grads); };
    find_model().demos(options.gpus);
    train_on_nodes(options.lr);
    params.clear();
}

int main(int argc, char **argv) {
    setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
    try {
        start_nodes(&argc, &argv);
        if (parse_options_of_nodes(argc, argv)) {
            if (nodes > 1) signal(SIGTERM, on_terminate);
            if (exercise) meet_nodes(), exercise_nodes();
            else run_on_nodes();
        }
        if (fflush(stdout) || ferror(stdout)) error("cannot write to stdout");
        MPI_Finalize();
        return 0;
    } catch (const std::exception &e) {
        const bool memory = dynamic_cast<const std::bad_alloc *>(&e);
        fflush(stdout);
        usleep(node * 100000); // what all nodes find wrong, node 0 says, and ends them
        fprintf(stderr, "mgpu: %s%s\n", node ? ("node " + str(node) + ": ").c_str() : "",
                memory ? "the host is out of memory" : e.what());
    }
    MPI_Abort(MPI_COMM_WORLD, 1);
    _exit(1);
}
