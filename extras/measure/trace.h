// make trace: what happens when, a row for each operation; extras/measure/simulate.cc reads such rows.
// A dry run has the same of devices that are not there.
// defines: moved, print_ops, trace, DryRun, sum_in_nodes, dry_run
#pragma once
#include "../watch/training_steps.h"

// W3, or W3-b4 of several: the gradients that a message moves, if it reads or writes some of these
static std::string moved(const watch::Op &op, const PerDevice &grads) {
    const std::vector<std::string> &names = param_names;
    for (const void *at : {op.from, op.to})
        for (const auto &list : grads) {
            const float *begin = (const float *)at, *end = begin + long(op.bytes / sizeof(float));
            int first = -1, last = -1;
            for (size_t i = 0; i < list.size(); i++)
                if (list[i].ptr() < end && begin < list[i].ptr() + size(list[i]))
                    last = i, first = first < 0 ? i : first;
            if (at && first >= 0) return names[first] + (last > first ? "-" + names[last] : "");
        }
    return watch::kernel_name(op.name);
}
static void print_ops(const watch::Recorder &r, const std::vector<int> &sizes = trained_sizes(),
                      const PerDevice &grads = {}) {
    std::vector<std::string> lanes(r.count, "another");
    auto named = [&](const Stream &s, const std::string &name) {
        if (s.handle.lane && s.handle.lane->number >= 0) lanes[s.handle.lane->number] = name;
    };
    for (const DeviceState &d : device_states) {
        named(d.stream, "computation");
        for (auto &[src, link] : d.links) named(link, "from " + str(gpu(src)));
    }
#ifdef ALGORITHMS
    for (const Stream &other : other_streams) named(other, "communication");
#endif
    size_t bytes = 0;
    for (int n : sizes) bytes += sizeof(float) * n;
    printf("# %s, %zu bytes of gradients\n"
           "device,lane,stream,kind,name,begin,end,src,dst,bytes,after\n",
           what_is_trained().c_str(), bytes);
    std::string text;
    for (const watch::Op &op : r.ops) {
        text += format("%d,%d,%s,%s,%s,%ld,%ld,%d,%d,%ld,%d\n", op.device, op.lane,
                       lanes[op.lane].c_str(), op.kind, moved(op, grads).c_str(),
                       std::lround(op.begin * 1e9), std::lround(op.end * 1e9), op.src, op.dst,
                       (long)op.bytes, op.after);
        if (text.size() < 1 << 20 && &op != &r.ops.back()) continue;
        fwrite(text.data(), 1, text.size(), stdout);
        text.clear();
    }
}
static int steps = 0; // STEPS, if it is given
// Some steps, on the devices
void trace() {
    const auto replicas = replicate(first_devices(options.gpus));
    const auto step = training_step(replicas, options.batch);
    for (int i = 0; i < 2; i++) step(); // they take what memory is needed
    watch::Recorder r(true);
    for (int i = 0; i < (steps ? steps : 3); i++) step();
    r.read_times();
    print_ops(r, trained_sizes(), gradients(replicas));
}
// ALLREDUCE=host without its additions, where the host's memory is not there, either
static void dry_host(const PerDevice &grads) {
    const std::vector<Tensor> flat = flatten(grads);
    if (flat.size() == 1) return;
    const Tensor sum = copyto(flat[0], cpu());
    for (size_t c = 1; c < flat.size(); c++) copyto(flat[c], cpu());
    for (const Tensor &t : flat) copyto(sum, t);
}
// k devices that are not there: what is enqueued on them is written down, and nothing else is done.
// What is made on them, tensors and events, must be gone before it.
struct DryRun {
    std::vector<DeviceState> devices;
    std::vector<Stream> others = {}; // OVERLAP's
    std::map<const float *, cudaEvent_t> events = {};
    const size_t lanes = watch::lanes.size();
    explicit DryRun(int k) : devices(k) {
        watch::dry = true;
        swap();
        for (int c = 0; c < k; c++) {
            device_states[c].physical = c;
            device_states[c].stream = new_stream(gpu(c));
        }
    }
    ~DryRun() {
        swap();
        watch::lanes.erase(watch::lanes.begin() + lanes, watch::lanes.end());
        watch::dry = false;
    }
    void swap() {
        static void (*run)(const PerDevice &grads) = nullptr; // host's; a handout lacks it
        device_states.swap(devices);
#ifdef ALGORITHMS
        other_streams.swap(others);
        written.swap(events);
#endif
        for (Algorithm &a : algorithms) {
            if (!run && std::string(a.name) == "host") run = a.run;
            if (a.run == run) a.run = dry_host;
            else if (a.run == dry_host) a.run = run;
        }
    }
};
// As extras/nodes/ sums over processes of `node` devices: in each by the algorithm; device 0's sum
// to the host; between hosts a ring (or else a tree), here the same messages of the devices 0; and
// back.
static int dry_node = 1024;
static std::string dry_algorithm = "naive"; // in each process
static void sum_in_nodes(const PerDevice &grads) {
    const int k = grads.size(), node = dry_node;
    const watch::Sum sum;
    const std::vector<Tensor> flat = flatten(grads);
    const Tensor host = empty(flat[0].shape, cpu());
    PerDevice roots;
    for (int c = 0; c < k; c += node) {
        const auto first = grads.begin() + c;
        run_allreduce(dry_algorithm, {first, first + std::min(node, k - c)});
        CUDA_CHECK(cudaMemcpyAsync(host.ptr(), flat[c].ptr(), sizeof(float) * size(host),
                                   cudaMemcpyDeviceToHost,
                                   stream_of(flat[c].device))); // copyto would wait
        roots.push_back(grads[c]);
    }
    auto is_tree = [](const Algorithm &a) { return a.name == std::string("tree"); };
    const bool has_tree = std::any_of(algorithms.begin(), algorithms.end(), is_tree);
    run_allreduce(dry_algorithm == "ring" ? "ring" : has_tree ? "tree" : "bucket", roots);
    for (int c = 0; c < k; c++) {
        if (c % node) make_wait(flat[c].device, flat[c - c % node].device);
        copyto(host, flat[c]);
    }
}
// An exchange of the model's gradients on k of them. The backward passes before it are a row for
// each gradient, when it is ready.
static int dry_devices = 8;
void dry_run() {
    const int k = dry_devices;
    const DryRun devices(k);
    std::vector<int> sizes = trained_sizes();
    const int rest = std::accumulate(sizes.begin(), sizes.end(), 0) % k;
    if (rest) sizes.back() += k - rest; // equal chunks, which stay so however large they are drawn
    const PerDevice grads = make_grads(k, sizes);
    watch::Recorder r(false);
    for (const auto &list : grads)
        for (size_t i = list.size(); i-- > 0;) after_gradient(list[i]);
    const std::string in_each = dry_algorithm = options.allreduce;
    if (dry_node < k) {
        algorithms.push_back({"nodes", sum_in_nodes});
        options.allreduce = "nodes";
        choose_exchange(true);
    }
    exchange(grads);
    options.allreduce = in_each;
    print_ops(r, sizes);
}
