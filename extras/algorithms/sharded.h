// Sum chunk c of the one long tensor on device c.
// defines: allreduce_sharded

// The two rounds of messages are known as reduce-scatter and all-gather.
//   messages 2k(k-1)   busiest 2(k-1)b/k   rounds 2
static void allreduce_sharded(const PerDevice &grads) {
    const std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    std::vector<Message> gather, broadcast;
    for (int distance = 1; distance < k; distance++) {
        for (int owner = 0; owner < k; owner++) {
            const int sender = (owner + distance) % k;
            const Tensor part = chunk(flat[sender], owner, k), sum = chunk(flat[owner], owner, k);
            gather.push_back({part, empty(sum.shape, sum.device)});
            broadcast.push_back({sum, part});
        }
    }
    send(gather);
    for (size_t m = 0; m < gather.size(); m++) { // both m-th messages are about the same chunk
        add_(broadcast[m].src, gather[m].dst);
    }
    send(broadcast);
}

static const bool sharded_added = add_algorithm("sharded", allreduce_sharded);
