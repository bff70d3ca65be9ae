// Which tile for which product, and how many slices.
// A large tile loads less for each product, but a GPU wants at least as many blocks as it has
// multiprocessors, and the columns of a tile that C has not are computed for nothing. Large tiles
// have the sizes that were the fastest on an H100.
// Gain: without the small tiles a step of LeNet takes 1.16 times as long on an H100, of lab_cnn
// 1.20 times.
// defines: product_slices, product, phases

namespace fast {
static int multiprocessors(Device device) { // a CPU computes as an H200 does, for tests
    static std::map<int, int> counts;
    int &count = counts[cuda_device(device)];
    if (on_cpu) return 132;
    if (count == 0)
        CUDA_CHECK(
            cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, cuda_device(device)));
    return count;
}

// The number of slices with which a GPU is estimated to end first, in clocks. A multiprocessor with
// fewer blocks than it holds waits more. 4000: the launch that adds the slices.
template <class Tile>
static int product_slices(int tiles, int terms, double sums, int multiprocessors) {
    const double step = Tile::TM * Tile::TN * Tile::TK / Tile::rate;
    const int steps = blocks(terms, Tile::TK), most = min(256, steps / 4 + 1);
    int slices = 1;
    double best = INFINITY;
    for (int i = 1; i <= most; i++) {
        const int rounds = blocks(tiles * i, multiprocessors);
        const double waits = 1 + 0.3 * max(0, Tile::blocks - rounds);
        const double adding = i > 1 ? 4000 + i * sums / 175 : 0;
        const double time = rounds * waits * (blocks(steps, i) + 6) * step + adding;
        if (time < best) best = time, slices = i;
    }
    return slices;
}
template <class Tile, template <class, bool> class Of_A, template <class, bool> class Of_B,
          int count>
static void launch_product(dim3 grid, const Products<count> &all, Device device) {
    const cudaStream_t stream = stream_of(device);
    constexpr int bytes = Tile::dynamic_bytes;
    if (bytes > 0)
        CUDA_CHECK(cudaFuncSetAttribute(product_kernel<Tile, Of_A, Of_B, count>,
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    LAUNCH(product_kernel<Tile, Of_A, Of_B, count><<<grid, Tile::threads, bytes, stream>>>(all));
}
template <class Tile, template <class, bool> class Of_A, template <class, bool> class Of_B>
static void product_tiles(const ProductOut &out, const float *A, const float *B, const Product &s,
                          Device device) {
    dim3 grid(blocks(s.M, Tile::TM), blocks(s.N, Tile::TN), s.batch);
    const int slices = product_slices<Tile>(grid.x * grid.y * s.batch, s.K,
                                            1. * s.rows() * s.N * s.batch, multiprocessors(device));
    grid.z *= slices;
    in_slices(slices, out, s, device, [&](const ProductOut &out, const Product &s) {
        launch_product<Tile, Of_A, Of_B>(grid, Products<1>{out, A, {B}, {s}}, device);
    });
}
// Tiles by the number of C's columns, small ones if large ones would not fill a GPU. A CPU compiles
// only one kernel for each precision, for tests.
#if defined(__CUDACC__) || defined(MGPU_LANES)
struct Fp32 {
    typedef Fp32Tile<2, 4, 1, 1, 64, 8> Small;  // few sums: 8 warps share the terms of 16 x 16,
    typedef Fp32Tile<4, 8, 1, 1, 32, 8> Medium; // or of 32 x 32
    typedef Fp32Tile<8, 5, 2, 1, 8> Columns20;  // for LeNet's 20 channels
    typedef Fp32Tile<8, 8, 1, 2, 8> Square64;
    typedef Fp32Tile<8, 8, 2, 2, 8> Columns64;
    typedef Fp32Tile<8, 8, 2, 4, 8> Columns128;
};
struct Tf32 {
    typedef Fp32Tile<2, 4, 1, 1, 64, 8, true> Small;
    typedef Fp32Tile<4, 8, 1, 1, 32, 8, true> Medium;
    typedef Tf32Tile<128, 32, 64, 32> Columns20;
    typedef Tf32Tile<128, 64, 64, 32> Columns64;
    typedef Tf32Tile<128, 128, 64, 64> Columns128;
};
struct Wgmma {
    typedef WgmmaTile<192, 64, 3, 2> Columns64;
    typedef WgmmaTile<192, 128, 5, 1> Columns128;
    typedef WgmmaTile<128, 256, 4, 1> Columns256; // for few rows
};
// Call run() with one of them.
template <class Run> static void with_wgmma(const Product &s, Run run) {
    if (s.N <= 64) run(Wgmma::Columns64());
    else if (s.weights ? s.N < 256 : s.N < 512) run(Wgmma::Columns128());
    else run(Wgmma::Columns256());
}
// Return whether it is a dense layer's product, which has no windows.
static bool is_dense(const Product &s) {
    const bool one_tap = s.weights ? s.A_term.of_x() : int(s.A_term.P.d) == s.K;
    return s.H * s.W == 1 && s.A_row.of_x() && s.A_term.Q.d == 1 && one_tap;
}
static bool is_small(const Product &s, Device device) {
    const int large = blocks(s.M, 128) * blocks(s.N, 64) * max(1, blocks(s.K, 128));
    return s.M <= 32 || large < multiprocessors(device);
}
template <class Tile> static bool fits_windows(const Product &s) {
    return !s.weights && !is_dense(s) && s.A_term.P.d % Tile::TK == 0;
}
// Arrange B for Windows or Lines, rounded if Tile rounds: s.B_term and s.B_column become the
// result's.
template <class Tile> static Tensor arrange(Product &s, const float *B, Device device) {
    const Tensor to = empty({s.K, s.N}, device);
    const int by_k = Tile::lines ? 1 : s.N, by_n = Tile::lines ? s.K : 1;
    const int channels = s.A_term.P.d, count = Tile::lines ? channels : s.N;
    if (s.K > 0)
        LAUNCH(arrange_kernel<<<blocks(channels * s.N), threads, 0, stream_of(device)>>>(
            to.ptr(), by_k, by_n, B, s, count, Tile::rounds));
    s.B_term = spaced(s.K, by_k), s.B_column = spaced(s.N, by_n);
    return to;
}
template <class Tile, template <class, bool> class Of_A, template <class, bool> class Of_B>
static void product_arranged(const ProductOut &out, const float *A, const float *B, Product s,
                             Device device) {
    const Tensor arranged = arrange<Tile>(s, B, device);
    product_tiles<Tile, Of_A, Of_B>(out, A, arranged.ptr(), s, device);
}
template <class In>
static void product_in(const ProductOut &out, const float *A, const float *B, const Product &s,
                       Device device) {
    typedef typename In::Small Small;
    typedef typename In::Medium Medium;
    typedef typename In::Columns64 Tile64;
    typedef typename In::Columns128 Tile128;
    auto run = [&](auto launch) { launch(out, A, B, s, device); };
    const bool small = is_small(s, device), dense = small && is_dense(s), to64 = s.N <= 64;
    const bool medium = blocks(s.M, 32) * blocks(s.N, 32) >= 96; // enough blocks
    if (dense && s.weights && medium) run(product_tiles<Medium, Rows, Rows>);
    else if (dense && s.weights) run(product_tiles<Small, Rows, Rows>);
    else if (dense && s.B_column.distance() == 1) run(product_tiles<Small, Spaced, Rows>);
    else if (dense && medium) run(product_tiles<Medium, Spaced, Spaced>);
    else if (dense) run(product_tiles<Small, Spaced, Spaced>);
    else if (small) run(product_tiles<Small, Gather, Gather>);
    else if (to64 && fits_windows<Tile64>(s)) run(product_arranged<Tile64, Windows, Rows>);
    else if (fits_windows<Tile128>(s)) run(product_arranged<Tile128, Windows, Rows>);
    else if (s.N <= 20) run(product_tiles<typename In::Columns20, Gather, Gather>);
    else if (to64) run(product_tiles<Tile64, Gather, Gather>);
    else run(product_tiles<Tile128, Gather, Gather>);
}
// Launch the four phases of a gradient of stride 2 (products.cu), those with the most terms first.
template <class Tile, template <class, bool> class Of_A, template <class, bool> class Of_B>
static void phases_in(const ProductOut &out, const float *A, const float *B,
                      std::vector<Product> list, Device device) {
    auto longer = [](const Product &a, const Product &b) { return a.K > b.K; };
    std::stable_sort(list.begin(), list.end(), longer);
    std::vector<Tensor> arranged;
    for (Product &s : list) arranged.push_back(arrange<Tile>(s, B, device));
    Products<4> all = {out, A, {}, {list[0], list[1], list[2], list[3]}};
    dim3 grid(0, blocks(list[0].N, Tile::TN));
    for (int p = 0; p < 4; p++) {
        all.B[p] = arranged[p].ptr();
        grid.x = max(grid.x, 4 * blocks(list[p].M, Tile::TM));
    }
    launch_product<Tile, Of_A, Of_B>(grid, all, device);
}
#else
struct Fp32 {
    typedef Fp32Tile<8, 8, 1, 1, 8> Tile;
};
struct Tf32 {
    typedef Tf32Tile<32, 32, 32, 32> Tile;
};
template <class In>
static void product_in(const ProductOut &out, const float *A, const float *B, const Product &s,
                       Device device) {
    product_tiles<typename In::Tile, Gather, Gather>(out, A, B, s, device);
}
#endif
static void product(Rung rung, const ProductOut &out, const Images &A, const Tensor &B,
                    const Product &s) {
    if (s.rows() == 0) return;
    if (rung == tiled) return tiled_product(out, A, B, s);
    const float *const a = A.ptr(), *const b = B.ptr();
#ifdef WGMMA
    if (rung == wgmma)
        return with_wgmma(s, [&](auto tile) {
            product_arranged<decltype(tile), Lines, Lines>(out, a, b, s, B.device);
        });
#endif
    rung == tf32 ? product_in<Tf32>(out, a, b, s, B.device)
                 : product_in<Fp32>(out, a, b, s, B.device);
}
// Enqueue products of the same A whose rows together are those of C.
static void phases(Rung rung, const ProductOut &out, const Images &A, const Tensor &B,
                   const std::vector<Product> &list) {
#if defined(__CUDACC__) || defined(MGPU_LANES)
    auto run = rung == tf32 ? phases_in<Tf32::Columns64, Windows, Rows>
                            : phases_in<Fp32::Columns64, Windows, Rows>;
    bool fits =
        rung != tiled && fits_windows<Fp32::Columns64>(list[0]) && !is_small(list[0], B.device);
#ifdef WGMMA
    if (rung == wgmma) {
        run = list[0].N <= 64 ? phases_in<Wgmma::Columns64, Lines, Lines>
                              : phases_in<Wgmma::Columns128, Lines, Lines>;
        fits = true;
    }
#endif
    if (list.size() == 4 && fits) return run(out, A.ptr(), B.ptr(), list, B.device);
#endif
    for (const Product &s : list) product(rung, out, A, B, s);
}
} // namespace fast
