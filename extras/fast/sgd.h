// SGD of all parameters in one launch.
// A launch takes longer than the update of a small parameter, and a network has many small ones.
// Gain: with mgpu.cu's in its place a step of LeNet takes 1.07 times as long on an H100, of
// ResNet-18 1.01 times. On a CPU there is a launch for each parameter, because emulated threads
// copy their arguments.
// defines: sgd

namespace fast {
struct SgdList {
    static constexpr int most = warp_size > 1 ? 128 : 1;
    float *param[most];
    const float *grad[most];
    int n[most];
};
__global__ void sgd_kernel(SgdList list, float lr, float batch_size) {
    float *param = list.param[blockIdx.y];
    const float *grad = list.grad[blockIdx.y];
    const int n = list.n[blockIdx.y], all = gridDim.x * blockDim.x;
    constexpr int at_once = warp_size > 1 ? 4 : 1; // loads in flight
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += at_once * all) {
        float p[at_once], g[at_once];
        UNROLL
        for (int q = 0; q < at_once; q++) {
            const int j = min(i + q * all, n - 1);
            p[q] = param[j], g[q] = grad[j];
        }
        UNROLL
        for (int q = 0; q < at_once; q++)
            if (i + q * all < n) param[i + q * all] = p[q] - lr * g[q] / batch_size;
    }
}
static void sgd(const std::vector<Tensor> &params, float lr, int batch_size) {
    flush_all(); // what waits may read what was left out
    updates++;
    for (size_t next = 0; next < params.size();) {
        SgdList list = {};
        int count = 0, largest = 0;
        for (; next < params.size() && count < SgdList::most; next++) {
            const Tensor &p = params[next];
            check_inputs("sgd", true, "parameters", {params[0], p});
            list.param[count] = p.ptr();
            list.grad[count] = gradient(p).ptr();
            list.n[count++] = size(p);
            largest = std::max(largest, size(p));
        }
        const int most_blocks = warp_size > 1 ? 256 : INT_MAX; // a small parameter's have no work
        const dim3 grid(min(most_blocks, blocks(largest, 4 * threads)), count);
        if (largest > 0)
            LAUNCH(sgd_kernel<<<grid, threads, 0, stream_of(params[0].device)>>>(list, lr,
                                                                                 batch_size));
    }
}
} // namespace fast
