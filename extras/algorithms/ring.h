// Let every device send only to its neighbour.
// defines: allreduce_ring

// Device c sends to device (c + 1) % k, so that every device sends and receives in every round.
//   messages 2k(k-1)   busiest 2(k-1)b/k   rounds 2(k-1)
//
//   k = 3          reduce-scatter             all-gather
//   gpu(0) sends   chunk 0, then chunk 2      chunk 1, then chunk 0
//   gpu(1) sends   chunk 1, then chunk 0      chunk 2, then chunk 1
//   gpu(2) sends   chunk 2, then chunk 1      chunk 0, then chunk 2
static void allreduce_ring(const PerDevice &grads) {
    const std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();

    // Reduce-scatter: each device sends a partial sum, which its neighbour adds to its own chunk.
    // After k-1 rounds, device c holds the complete sum of chunk (c + 1) % k.
    for (int round = 0; round < k - 1; round++) {
        std::vector<Message> messages;
        std::vector<Tensor> sums; // sums[sender]: the chunk to which the receiver adds
        for (int sender = 0; sender < k; sender++) {
            const int receiver = (sender + 1) % k;
            const int j = (sender - round + k) % k;
            const Tensor part = chunk(flat[sender], j, k);
            sums.push_back(chunk(flat[receiver], j, k));
            messages.push_back({part, empty(part.shape, flat[receiver].device)});
        }
        send(messages);
        for (int sender = 0; sender < k; sender++) {
            add_(sums[sender], messages[sender].dst);
        }
    }

    // All-gather: each device passes on the complete sum that it computed or received last.
    for (int round = 0; round < k - 1; round++) {
        std::vector<Message> messages;
        for (int sender = 0; sender < k; sender++) {
            const int receiver = (sender + 1) % k;
            const int j = (sender + 1 - round + k) % k;
            messages.push_back({chunk(flat[sender], j, k), chunk(flat[receiver], j, k)});
        }
        send(messages);
    }
}

static const bool ring_added = add_algorithm("ring", allreduce_ring);
