// Sum in pairs, then in pairs of pairs, and send the sum back the same way.
// defines: allreduce_tree

//   messages 2(k-1)   busiest ceil(log2 k) b   rounds 2 ceil(log2 k)
//
//   k = 4          1 -> 0 and 3 -> 2, then 2 -> 0      back: 0 -> 2, then 0 -> 1 and 2 -> 3
static void allreduce_tree(const PerDevice &grads) {
    const std::vector<Tensor> flat = flatten(grads);
    const int k = flat.size();
    int distance = 1; // between sender and receiver
    while (distance < k) {
        std::vector<Message> messages;
        std::vector<Tensor> sums; // sums[m]: the tensor to which the receiver of message m adds
        for (int receiver = 0; receiver + distance < k; receiver += 2 * distance) {
            const Tensor part = flat[receiver + distance], sum = flat[receiver];
            messages.push_back({part, empty(part.shape, sum.device)});
            sums.push_back(sum);
        }
        send(messages);
        for (size_t m = 0; m < messages.size(); m++) {
            add_(sums[m], messages[m].dst);
        }
        distance *= 2;
    }
    while (distance > 1) {
        distance /= 2;
        std::vector<Message> messages;
        for (int sender = 0; sender + distance < k; sender += 2 * distance) {
            messages.push_back({flat[sender], flat[sender + distance]});
        }
        send(messages);
    }
}

static const bool tree_added = add_algorithm("tree", allreduce_tree);
