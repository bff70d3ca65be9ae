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
#define PROGRAM "../mgpu.cu"
#endif
#include PROGRAM

#define OMPI_SKIP_MPICXX
#define MPICH_SKIP_MPICXX
#include <mpi.h>

static int nodes = 1, node = 0;       // this is node `node` of `nodes`
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

// grads, which hold the sums over this node's devices, become those over all nodes' devices. MPI is
// called by a function on device 0's stream: the host goes on, and with OVERLAP the devices compute
// meanwhile.
static void sum_over_nodes(const Grads &grads) {
    const std::vector<Tensor> flat = flatten(grads);
    const int n = size(flat[0]);
    const size_t bytes = n * sizeof(float);
    if (nodes == 1 || n == 0) return;
    float *host = pinned(1, n)[0];
    const Device root = flat[0].device;
    copy_on(root, host, flat[0].ptr(), bytes, cudaMemcpyDeviceToHost);
    call_on(stream(root), [=] {
        options.allreduce == "ring" ? ring_between_nodes(host, n) : mpi_between_nodes(host, n);
    });
    for (const Tensor &t : flat) {
        if (t.device.id != root.id) wait_for(t.device, root);
        copy_on(t.device, t.ptr(), host, bytes, cudaMemcpyHostToDevice);
        if (t.device.id != root.id) wait_for(root, t.device); // it writes to `host` again
    }
    unflatten(flat, grads);
}

// The host's own calls. By then no stream has one left.
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
    std::vector<Tensor> ls;
    for (size_t c = 0; c < devices.size(); c++)
        ls.push_back(loss(net(X_shards[c], device_params[c]), y_shards[c]));
    for (const Tensor &l : ls) backward(l);
    exchange(gradients(device_params));
    for (const auto &param : device_params)
        sgd(param, lr, X.shape[0]); // Here, we use a full-size batch
    return ls;
}

// Every node counts the right answers in its parts of the test minibatches. All devices use the
// running statistics of batch norm of node 0's device 0.
static float accuracy_on_nodes(std::vector<std::vector<Tensor>> params, DataIter &test_iter,
                               const std::vector<Device> &devices) {
    NoGrad guard;
    for (size_t i = 0; i < params[0].size(); i++) {
        if (params[0][i].requires_grad) continue;
        const Tensor host = copyto(params[0][i], cpu());
        from_node_0(host.ptr(), sizeof(float) * size(host));
        for (size_t c = 0; c < devices.size(); c++) params[c][i] = copyto(host, devices[c]);
    }
    std::vector<Tensor> corrects;
    for (Device d : devices) corrects.push_back(full({1}, 0, d));
    Tensor X, y;
    test_iter.reset();
    while (test_iter.next(X, y)) {
        stop_requested();
        auto [X_shards, y_shards] = split_over_nodes(X, y, devices);
        for (size_t c = 0; c < devices.size(); c++)
            count_correct(corrects[c], net(X_shards[c], params[c]), y_shards[c]);
    }
    double correct = 0;
    for (const Tensor &t : corrects) correct += to_host(t)[0];
    sum_over_nodes(&correct, 1);
    return correct / test_iter.X.shape[0];
}

// check_replicas, and every node must hold the bits of node 0.
static void check_nodes(const std::vector<std::vector<Tensor>> &device_params) {
    if (!options.replica_check) return;
    check_replicas(device_params);
    const std::vector<float> own = all_to_host(trained(device_params[0]));
    std::vector<float> other = own;
    from_node_0(other.data(), sizeof(float) * other.size());
    if (size_t j = first_difference(own, other); j < own.size())
        error("the replicas differ: %s is %.9g here, but %.9g on node 0: does each node get the "
              "same sum?",
              name_of(j).c_str(), own[j], other[j]);
}

// What decides the bits of a training: MPI adds more than two nodes' numbers in an order that
// depends on the size of a bucket.
static Lines options_of_nodes() {
    Lines lines = training_options();
    if (nodes > 1) lines["gpus"] += " on each of " + str(nodes) + " nodes";
    if (nodes > 2 && options.allreduce != "ring" && options.overlap)
        lines["allreduce"] += " overlapped";
    return lines;
}

// The chapter's train, from `begin` on. All nodes go through the epoch in the same order.
static void train_on_nodes(Position begin, float lr) {
    auto [train_iter, test_iter] = load_data_fashion_mnist(options.batch);
    const std::vector<Device> devices = first_devices(options.gpus);
    auto device_params = replicate(devices);
    Animator animator(devices, (train_iter.X.shape[0] + options.batch - 1) / options.batch);
    if (nodes > 1) animator.progress->bar = false; // mpirun gives even a pipe a terminal
    Timer timer;
    Tensor X, y;
    float acc = 0;
    int epoch = 0, steps = begin.steps;
    bool more = true;
    for (; epoch < begin.epoch; epoch++) train_iter.reset();
    for (; epoch < options.epochs && more; epoch++) {
        double samples = 0; // of this node
        timer.start();
        train_iter.reset();
        if (epoch == begin.epoch) train_iter.begin = begin.samples;
        while (more && train_iter.next(X, y)) {
            const auto ls = train_batch_on_nodes(X, y, device_params, devices, lr);
            if (steps == begin.steps && options.first_check)
                timer.exclude(
                    [&] { check_gradients(X, y, nodes * options.gpus, device_params, lr); });
            animator.step(ls);
            samples += total(sizes_of(ls));
            more = ++steps != options.steps;
        }
        const double mean = animator.finish(epoch); // of no samples: not a number
        double sums[] = {samples > 0 ? mean * samples : 0, samples};
        sum_over_nodes(sums, 2);
        timer.stop();
        check_nodes(device_params);
        acc = accuracy_on_nodes(device_params, test_iter,
                                first_devices(options.evaluate_all ? options.gpus : 1));
        animator.add(epoch + 1, sums[0] / sums[1], acc, timer.times.back());
        save_checkpoint(device_params[0], {epoch, train_iter.begin, steps}, options_of_nodes());
    }
    std::string where;
    for (int i = 0; i < nodes; i++)
        where += (i ? ", " : "") + str(devices) + (nodes > 1 ? " of node " + str(i) : "");
    printf("test acc: %.2f, %.1f sec/epoch on %s\n", acc, timer.avg(), where.c_str());
}

// ---------------------------------------------------------------------------------------------
// 3. Program: how nodes start, meet and end

static void on_alarm(int) {
    say("mgpu: node %d has waited %d s for the others: does the network let them through, does "
        "each message meet its receive?\n",
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
    say("mgpu: node %d: %s: do the counts and the ranks of the messages fit?\n", node, text);
    MPI_Abort(MPI_COMM_WORLD, 1);
}
static void start_nodes(int *argc, char ***argv) {
    int level;
    MPI_Errhandler handler;
    MPI_Comm machine;
    signal(SIGALRM, on_alarm);
    alarm(patience); // until meet_nodes
    MPI_Init_thread(argc, argv, MPI_THREAD_SERIALIZED, &level);
    MPI_Comm_create_errhandler(on_mpi_error, &handler);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, handler);
    MPI_Comm_size(MPI_COMM_WORLD, &nodes);
    MPI_Comm_rank(MPI_COMM_WORLD, &node);
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine);
    MPI_Comm_size(machine, &neighbours);
    MPI_Comm_rank(machine, &place);
    MPI_Comm_free(&machine);
    if (level < MPI_THREAD_SERIALIZED) error("this MPI does not let another thread call it");
    if (node > 0 && !freopen("/dev/null", "w", stdout)) error("/dev/null cannot be written to");
}

// What all nodes must have in common: what decides the bits, how long they train, the data, the
// program. Whoever differs from node 0 ends all.
static void meet_nodes() {
    Lines lines = options_of_nodes();
    lines["epochs"] = str(options.epochs);
    lines["steps"] = str(options.steps);
    lines["overlap"] = str(options.overlap);
    lines["replica check"] = str(options.replica_check); // it sends
    std::ifstream program("/proc/self/exe", std::ios::binary);
    const std::string bytes(std::istreambuf_iterator<char>(program), {});
    lines["program"] = std::to_string(hash(bytes));
    for (const auto &[name, value] : lines) {
        size_t wanted = hash(value);
        from_node_0(&wanted, sizeof wanted);
        if (hash(value) != wanted)
            error("its %s (%s) is not node 0's: all nodes want the same", name.c_str(),
                  value.c_str());
    }
    MPI_Barrier(MPI_COMM_WORLD); // all agree
    alarm(0);
}

static bool exercise = false;
// The options, as mgpu.cu would complete them for the devices of all nodes together.
static bool parse_options_of_nodes(int argc, char **argv) {
    flags.insert(flags.end() - 1,
                 {"exercise", nullptr, "judge ring_between_nodes", yes(&exercise)});
    for (Flag &f : flags) {
        if (!strcmp(f.name, "gpus"))
            f.set = [set = f.set](const char *name, const char *value) {
                set(name, value);
                options.gpus *= nodes;
            };
        if (!strcmp(f.name, "split") && nodes > 1)
            f.set = [](auto...) { error("--split is for one process: leave NODES out"); };
    }
    options.gpus = nodes;
    if (!parse_options(argc, argv)) return false;
    options.gpus /= nodes;
    if (nodes > 1 && options.allreduce == "naive") options.allreduce = "bucket"; // its sums
    return true;
}

static void run_on_nodes() {
    const bool resumes = options.resume && node == 0;
    options.resume = false; // node 0 reads, logs and saves
    if (node > 0) options.init = options.save = "", options.log = "/dev/null";
    read_data();
    printf("operators: %s\n", operators.name.c_str());
    meet_nodes();
    const int cores = std::thread::hardware_concurrency() / neighbours / options.gpus;
    if (on_cpu) setenv("CUDA_CPU_CORES", str(std::max(1, cores)).c_str(), 0);
    if (nodes > 1)
        printf("%d nodes with %d device%s each\n", nodes, options.gpus,
               options.gpus > 1 ? "s" : "");
    set_up(options.gpus, false, place * options.gpus);
    if (resumes) resume(options.save, options_of_nodes());
    for (const Tensor &p : params) from_node_0(p.ptr(), sizeof(float) * size(p));
    Position begin = resumed;
    from_node_0(&begin, sizeof begin);
    const Exchange sum = [](const Grads &grads) {
        run_allreduce(options.allreduce, grads);
        sum_over_nodes(grads);
    };
    const bool buckets = options.overlap || options.allreduce == "ring";
    exchange = buckets ? in_buckets(sum, options.overlap) : sum;
    if (options.model == "resnet18") demos_resnet18(options.gpus);
    else if (options.model == "lab_cnn") demos_lab_cnn(options.gpus);
    else demos(options.gpus);
    train_on_nodes(begin, options.lr);
    params.clear();
    print_memory();
    if (options.verbose && nodes > 1)
        printf("node 0 sent %ld messages, %ld bytes to other nodes\n", sent_messages, sent_bytes);
}

int main(int argc, char **argv) {
    setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
    try {
        start_nodes(&argc, &argv);
        if (parse_options_of_nodes(argc, argv)) {
            catch_signals();
            if (nodes > 1) signal(SIGTERM, on_terminate);
            if (exercise) meet_nodes(), exercise_nodes();
            else run_on_nodes();
        }
        if (fflush(stdout) || ferror(stdout)) error("what is printed cannot be written to stdout");
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
