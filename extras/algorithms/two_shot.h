// Let a kernel on device c sum chunk c, and another one read the other chunks' sums.
// defines: allreduce_two_shot

// Reduce-scatter: x[c][i] += all other x[d][i], in the order of devices
//   x[d] (n), chunk c of device d   ->   x[c]
__global__ void reduce_scatter_kernel(float *sum, const __grid_constant__ Peers chunks, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float total = 0;
    for (int d = 0; d < chunks.k; d++) total += chunks.x[d][i];
    sum[i] = total; // nobody else reads this chunk on this device
}

// All-gather: y[i] = x[d][i - first], where the chunk of device d begins at first (see chunk())
//   x[d] (chunk d), on device d   ->   y (n), which has x[own]
__global__ void all_gather_kernel(float *y, const __grid_constant__ Peers chunks, int own, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const long d = ((i + 1L) * chunks.k - 1) / n;
    if (d != own) y[i] = chunks.x[d][i - n * d / chunks.k];
}

//   messages 2k(k-1)   busiest 2(k-1)b/k   rounds 2
static void allreduce_two_shot(const PerDevice &grads) {
    const Tensors flat = flatten(grads);
    const int k = flat.size(), n = size(flat[0]);
    Tensors sums;           // of chunk c on device c
    wait_for_each_other(k); // until every device has computed its gradients
    for (int c = 0; c < k; c++) {
        Tensors chunks;
        for (const Tensor &x : flat) chunks.push_back(chunk(x, c, k));
        const int m = size(chunks[c]);
        LAUNCH(reduce_scatter_kernel<<<blocks(m), threads, 0, stream_of(gpu(c))>>>(
            chunks[c].ptr(), Peers(chunks), m));
        sums.push_back(chunks[c]);
    }
    wait_for_each_other(k); // until every device has its sum
    for (int c = 0; c < k; c++) {
        LAUNCH(all_gather_kernel<<<blocks(n), threads, 0, stream_of(gpu(c))>>>(flat[c].ptr(),
                                                                               Peers(sums), c, n));
    }
    wait_for_each_other(k); // until every device has read the sums
}

static const bool two_shot_added =
    add_algorithm("two_shot", allreduce_two_shot, are_peers);
