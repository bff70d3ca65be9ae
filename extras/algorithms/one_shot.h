// Let a kernel on each device read all other devices' memory and add.
// defines: allreduce_one_shot

// sum[i] = x[0][i] + x[1][i] + ... + x[k-1][i], in this order on every device: the same bits
//   x[c] (n), on device c   ->   sum (n)
__global__ void one_shot_kernel(float *sum, const __grid_constant__ Peers peers, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float total = 0;
    for (int c = 0; c < peers.k; c++) total += peers.x[c][i];
    sum[i] = total;
}

// Each device reads the others' gradients, so the sum waits in another tensor until all have read.
//   messages k(k-1)   busiest (k-1)b   rounds 1
static void allreduce_one_shot(const PerDevice &grads) {
    const Tensors flat = flatten(grads);
    const int k = flat.size(), n = size(flat[0]);
    Tensors sums;
    for (const Tensor &x : flat) sums.push_back(empty(x.shape, x.device));
    wait_for_each_other(k); // until every device has computed its gradients
    for (const Tensor &sum : sums) {
        LAUNCH(one_shot_kernel<<<blocks(n), threads, 0, stream_of(sum.device)>>>(sum.ptr(),
                                                                                 Peers(flat), n));
    }
    wait_for_each_other(k); // until every device has read them
    for (int c = 0; c < k; c++) copyto(sums[c], flat[c]);
}

static const bool one_shot_added =
    add_algorithm("one_shot", allreduce_one_shot, are_peers);
