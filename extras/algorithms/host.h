// Sum on the host, as a parameter server does (kvstore='local' in MXNet).
// defines: allreduce_host

// The host waits for the devices: it receives each one's gradients, adds them, and sends the sum
// back.
//   messages 2k (0 if k = 1)   busiest kb, the host   rounds k+1
static void allreduce_host(const PerDevice &grads) {
    const std::vector<Tensor> flat = flatten(grads);
    if (flat.size() == 1) return;
    const Tensor sum = copyto(flat[0], cpu());
    const int n = size(sum);
    for (size_t c = 1; c < flat.size(); c++) {
        const Tensor received = copyto(flat[c], cpu());
        for (int j = 0; j < n; j++) {
            sum.ptr()[j] += received.ptr()[j];
        }
    }
    for (const Tensor &t : flat) {
        copyto(sum, t);
    }
}

static const bool host_added = add_algorithm("host", allreduce_host);
