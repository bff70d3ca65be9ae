// Sum different parameters on different devices (kvstore='device' in MXNet), as the chapter's third
// exercise asks.
// defines: allreduce_by_tensor

// The device that sums a tensor is its owner. Tensors are assigned in order of decreasing size,
// each to the device that owns the fewest numbers so far. Let L be the most bytes, and M the most
// tensors, that one device owns.
//   messages 2(k-1)P   busiest (k-1)L + b-L   rounds 2M
static void allreduce_by_tensor(const PerDevice &grads) {
    const int k = grads.size(), P = grads[0].size();
    std::vector<int> largest_first(P);
    std::iota(largest_first.begin(), largest_first.end(), 0);
    std::stable_sort(largest_first.begin(), largest_first.end(),
                     [&](int i, int j) { return size(grads[0][i]) > size(grads[0][j]); });

    std::vector<int> owner(P);  // owner[i] sums tensor i
    std::vector<long> owned(k); // how many numbers each device owns
    for (int i : largest_first) {
        owner[i] = std::min_element(owned.begin(), owned.end()) - owned.begin();
        owned[owner[i]] += size(grads[0][i]);
    }

    // gather[m] takes a device's tensor to the owner, and broadcast[m] takes the sum back. Owner
    // c begins with device c + 1, so that not all owners read from device 0 first.
    std::vector<Message> gather, broadcast;
    for (int distance = 1; distance < k; distance++) {
        for (int i = 0; i < P; i++) {
            const int sender = (owner[i] + distance) % k;
            const Tensor part = grads[sender][i], sum = grads[owner[i]][i];
            gather.push_back({part, empty(sum.shape, sum.device)});
            broadcast.push_back({sum, part});
        }
    }
    send(gather);
    for (size_t m = 0; m < gather.size(); m++) { // both m-th messages are about the same tensor
        add_(broadcast[m].src, gather[m].dst);
    }
    send(broadcast);
}

static const bool by_tensor_added = add_algorithm("by_tensor", allreduce_by_tensor);
