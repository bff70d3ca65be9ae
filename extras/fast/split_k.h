// Split-K: if C is small, several blocks share the terms of its sums, in slices.
// A weight gradient has few sums of very many terms: LeNet's conv2 has 501 x 50 sums of 20,736
// terms at batch 256, four tiles of 128 x 64 for a GPU of 132 multiprocessors. The slices are
// stored, then added in a fixed order: the same bits on every run, unlike with atomics.
// Gain: all multiprocessors work on such a product, not four. Without slices a step of LeNet takes
// 1.36 times as long on an H100, of ResNet-18 2.6 times. On a CPU a slice of a packed tile fits the
// second-level cache.
// defines: slice_of, product_sum, in_slices

namespace fast {
// This block's slice of a range, a multiple of `step` terms.
__device__ inline Range slice_of(Range all, int step, int batch = 1) {
    const int steps = (all.end - all.begin + step - 1) / step, slice = blockIdx.z / batch;
    const int slices = gridDim.z / batch;
    return {all.begin + int((long long)steps * slice / slices) * step,
            min(all.end, all.begin + int((long long)steps * (slice + 1) / slices) * step)};
}
// C is the sum of its slices, partial[slice][n][m], in a fixed order. blockDim.y threads add one
// element of C, each every blockDim.y-th slice.
__global__ void product_sum_kernel(ProductOut out, const float *partial, int slices, Divisor rows,
                                   Product s) {
    __shared__ float sums[threads];
    const int i = blockIdx.x * blockDim.x + threadIdx.x, count = rows.d * s.N * s.batch;
    const int n = rows(i), m = i - n * rows.d, part = threadIdx.y, parts = blockDim.y;
    const float *from = partial + part * count + i;
    const int step = parts * count;
    float sum = part == 0 && out.bias && i < count ? out.bias[n] : 0;
    int slice = i < count ? part : slices;
    for (; slice + 15 * parts < slices; slice += 16 * parts, from += 16 * step) {
        UNROLL
        for (int q = 0; q < 16; q++) sum += from[q * step]; // 16 loads are in flight
    }
    for (; slice < slices; slice += parts, from += step) sum += *from;
    if (parts > 1) {
        sums[part * blockDim.x + threadIdx.x] = sum;
        __syncthreads();
        for (int p = 1; p < parts && part == 0; p++) sum += sums[p * blockDim.x + threadIdx.x];
    }
    if (part > 0 || i >= count) return;
    if (m < s.M && out.C.data) out.C.store(out.row(s, m) + n * s.C_column, sum);
    if (m == s.M && out.sums.data) out.sums.store(out.row(s, m) + n * out.sums_by, sum);
}
static inline void product_sum(const ProductOut &out, const float *partial, int slices,
                               const Product &s, Device device) {
    const int n = s.rows() * s.N * s.batch, parts = slices < 64 ? 1 : 16;
    const dim3 block(threads / parts, parts);
    LAUNCH(product_sum_kernel<<<blocks(n, block.x), block, 0, stream_of(device)>>>(
        out, partial, slices, Divisor(s.rows()), s));
}
// compute(out, s) launches the kernel that computes C or, if there are several slices, these.
template <class Compute>
static void in_slices(int slices, const ProductOut &out, const Product &s, Device device,
                      Compute compute) {
    if (slices == 1) return compute(out, s);
    const Tensor partial = empty({slices, s.batch, s.N, s.rows()}, device);
    float *const C = partial.ptr();
    Product slice = s;
    slice.C_row = spaced(s.M, 1);
    slice.C_column = s.rows();
    compute({{C}, {C + s.M}, nullptr, s.rows(), s.rows() * s.N}, slice);
    product_sum(out, C, slices, s, device);
}
} // namespace fast
