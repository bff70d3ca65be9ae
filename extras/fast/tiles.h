// Which tile for which product, and how many slices.
// A large tile loads less for each product, but a GPU wants at least as many blocks as it has
// multiprocessors, and the columns of a tile that C has not are computed for nothing. The sizes
// were chosen by counts of instructions and of lines of L1 and shared memory.
// Gain: by the model; not priced alone. What it avoids: a tile of 64 columns computes 64 where
// LeNet's convolutions have 20 and 50, and where a tile is large, 132 multiprocessors share a few
// blocks.
// defines: product_slices, product

namespace fast {
static int multiprocessors(Device device) { // a CPU computes as an H200 does, for tests
    static std::map<int, int> counts;
    int &count = counts[physical(device)];
    if (on_cpu) return 132;
    if (count == 0)
        CUDA_CHECK(
            cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, physical(device)));
    return count;
}

// The number of slices, of 128 terms or more, with which the GPU is estimated to end first. A
// multiprocessor takes as long for 256 threads as for fewer, and the one with the most blocks ends
// last. Writing a slice takes as much time as some 40 terms, the launch that adds them as 130.
static int product_slices(int tiles, int terms, int threads, int multiprocessors) {
    const int at_once = 256 / threads; // blocks on each multiprocessor
    const int most = min(terms / 128, blocks(3 * at_once * multiprocessors, tiles));
    int slices = 1;
    double best = INFINITY; // in units of a term
    for (int i = 1; i <= most; i++) {
        const double rounds = max(1., 1. * blocks(tiles * i, multiprocessors) / at_once);
        const double time = rounds * (terms / i + 40) + (i > 1 ? 130 : 0);
        if (time < best) best = time, slices = i;
    }
    return slices;
}
template <class Tile, bool by_terms, bool by_columns>
static void product_tiles(const ProductOut &out, const float *A, const float *B, const Product &s,
                          Device device) {
    dim3 grid(blocks(s.rows(), Tile::TM), blocks(s.N, Tile::TN));
    grid.z = product_slices(grid.x * grid.y, s.K, Tile::threads, multiprocessors(device));
    in_slices(grid.z, out, s, device, [&](const ProductOut &out, const Product &s) {
        LAUNCH(product_kernel<Tile, by_terms, by_columns>
               <<<grid, Tile::threads, 0, stream_of(device)>>>(out, A, B, s));
    });
}
// Tiles by the number of C's columns, small ones if large ones would not fill a GPU. They were
// chosen by counts of instructions and of lines of L1 and shared memory. A CPU compiles only one
// kernel for each precision, for tests.
#if defined(__CUDACC__) || defined(MGPU_LANES)
template <class Tile, bool by_terms, bool by_columns = false>
constexpr auto tiles = product_tiles<Tile, by_terms, by_columns>;
struct Fp32 {
    typedef Fp32Tile<2, 5, 8, 4, 16> Small20; // for LeNet's 20 channels
    typedef Fp32Tile<2, 8, 16, 4, 16> Small;
    typedef Fp32Tile<8, 5, 16, 4, 16> Columns20;
    typedef Fp32Tile<8, 8, 16, 4, 16> Columns32;
    typedef Fp32Tile<8, 13, 32, 4, 8> Columns52;    // for LeNet's 50 channels, and 20 * 5 columns
    typedef Fp32Tile<8, 13, 16, 4, 8> Columns52Low; // of half the rows: 162 tiles for conv2
    typedef Fp32Tile<16, 8, 16, 8, 8> Columns64;
    typedef Fp32Tile<8, 16, 16, 8, 8> Columns128;
};
struct Tf32 {
    typedef Tf32Tile<32, 32, 16, 32, 16> Small20, Small;
    typedef Tf32Tile<128, 32, 64, 32, 16> Columns20, Columns32;
    typedef Tf32Tile<256, 64, 64, 64, 8> Columns52, Columns52Low, Columns64;
    typedef Tf32Tile<256, 128, 64, 64, 8> Columns128;
};
#else
template <class Tile, bool = false, bool = false>
constexpr auto tiles = product_tiles<Tile, false, false>;
template <class Tile> struct One {
    typedef Tile Small20, Small, Columns20, Columns32, Columns52, Columns52Low, Columns64,
        Columns128;
};
typedef One<Fp32Tile<8, 8, 16, 4, 16>> Fp32;
typedef One<Tf32Tile<32, 32, 16, 32, 16>> Tf32;
#endif
// by_terms if neighbouring terms are neighbours in A, as the windows of a weight gradient are. (A
// dense layer's are not: there each window is a sample, and neighbouring rows are neighbours.)
// by_columns if neighbouring columns are neighbours in B, as a dense layer's are.
template <class In>
static void product_in(const ProductOut &out, const float *A, const float *B, const Product &s,
                       Device device) {
    const int large = blocks(s.rows(), 128) * blocks(s.N, 64) * max(1, blocks(s.K, 128));
    auto run = [&](auto launch) { launch(out, A, B, s, device); };
    const bool dense = s.H * s.W == 1, small = s.rows() <= 32 || large < multiprocessors(device);
    const bool fits52 = blocks(s.N, 52) * 52 < blocks(s.N, 64) * 64; // fewer columns stay empty
    const bool by_columns = s.B_column.by_z == 1;
    if (small && s.N <= 20) run(tiles<typename In::Small20, true>);
    else if (small && s.weights && dense) run(tiles<typename In::Small, false, true>);
    else if (small && by_columns) run(tiles<typename In::Small, true, true>);
    else if (small) run(tiles<typename In::Small, true>);
    else if (s.N <= 20) run(tiles<typename In::Columns20, false>);
    else if (s.N <= 32) run(tiles<typename In::Columns32, false>);
    else if (fits52 && s.weights) run(tiles<typename In::Columns52, true>);
    else if (fits52 && by_columns) run(tiles<typename In::Columns52, false, true>);
    else if (fits52) run(tiles<typename In::Columns52Low, false>);
    else if (s.N <= 64 && s.weights) run(tiles<typename In::Columns64, true>);
    else if (s.N <= 64) run(tiles<typename In::Columns64, false>);
    else if (s.weights) run(tiles<typename In::Columns128, true>);
    else run(tiles<typename In::Columns128, false>);
}
static void product(Rung rung, const ProductOut &out, const Images &A, const Tensor &B,
                    const Product &s) {
    if (s.rows() == 0) return;
    if (rung == tiled) return tiled_product(out, A, B, s);
    const float *const a = A.ptr(), *const b = B.ptr();
    rung == tf32 ? product_in<Tf32>(out, a, b, s, B.device)
                 : product_in<Fp32>(out, a, b, s, B.device);
}
} // namespace fast
