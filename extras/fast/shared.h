// KERNELS=fast: tiles in shared memory, which copies fill in stages.
// A block's threads multiply terms of its rows and columns that lie in shared memory. From SM 80 on
// cp.async copies the next ones there meanwhile: no thread waits for a load and no register holds
// one, so that twice as many warps fit a multiprocessor. Before SM 80 the loads of a stage pass
// through registers, while the threads multiply the stage before.
// One loop serves all products. Loaders (loaders.h) say where their terms lie in memory.
// Gain: with all files of this rung a step of LeNet takes 0.36 of the tiled kernels' time on an
// H100, of ResNet-18 0.21. With the loads in registers it takes 1.04 and 1.02 times as long as with
// cp.async. A CPU has no shared memory: there it is for tests.
// defines: Copied, Fp32Tile, Copier, store_tile, product_kernel

namespace fast {
__device__ __forceinline__ float to_tf32(float x) { // to the nearest, ties away from 0
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return __uint_as_float(bits);
#else
    const unsigned bits = __float_as_uint(x);
    const bool is_finite = (bits >> 23 & 255) < 255;
    return is_finite ? __uint_as_float((bits + 0x1000) & ~0x1fffu) : x;
#endif
}
// Says how the stages of a tile are copied from SM 80 on. There are `stages` of them. When add()
// returns, the sums of up to `behind` stages are still under way.
template <int stages_, int behind_> struct Copied {
    static constexpr int stages = stages_, behind = behind_;
    static constexpr int dynamic_bytes = 0; // of shared memory, if a kernel cannot declare it
    static constexpr bool lines = false;    // whether the terms of a row lie together there
    __device__ static void publish() {}     // what has been copied
    __device__ static void finish() {}      // wait for all sums
};
// A block's tile of TM x TN sums: which of them a thread has, and how the TK terms of a stage lie
// in shared memory. A warp has 8 * rows x 4 * columns sums, a thread rows x columns: its columns
// are neighbours, a slot, and of its rows four are, so that one load brings them. Of the warps,
// down * across have sums of their own; `sharing` of them share the terms of the same sums.
template <int rows_, int columns_, int down, int across, int TK_, int sharing = 1,
          bool rounds_ = false>
struct Fp32Tile : Copied<4, 0> {
    static constexpr bool rounds = rounds_; // factors, to TF32
    static constexpr int rows = rows_, columns = columns_, TK = TK_, height = 8 * rows;
    static constexpr int TM = height * down, TN = 4 * columns * across;
    static constexpr int of_terms = 32 * down * across, threads = of_terms * sharing;
    // Of a multiprocessor, so that sums and loads fit the registers
    static constexpr int blocks = (columns % 4 ? 384 : 512) / threads;
    static constexpr int run = rows < 4 ? rows : 4;     // neighbouring rows
    static constexpr double rate = 100;                 // products a clock of a multiprocessor
    static constexpr int pitch = (columns + 3) / 4 * 4; // from slot to slot
    static constexpr bool adjoin = pitch == columns;    // columns of different slots
    struct alignas(16) Terms { // padded by 4: neighbouring terms begin in different banks
        float a[TK][TM + 4], b[TK][4 * across * pitch + 4];
        __device__ float *at(bool of_A, int k, int x) { // row x of A, or column x of B
            return of_A ? &a[k][x] : &b[k][x + x / columns * (pitch - columns)];
        }
    };
    float sum[rows][columns] = {};
    __device__ static int share() { return threadIdx.x / of_terms; }
    __device__ static int warp() { return threadIdx.x % of_terms / 32; }
    __device__ static int first_row() { return warp() % down * height; }
    __device__ static int row(int i) { // of this warp's
        return threadIdx.x % 8 * run + i % run + i / run * 8 * run;
    }
    __device__ static int slot() { return threadIdx.x % 32 / 8; } // of this warp's 4
    __device__ static int column(int q, int slot) {
        return (warp() / down * 4 + slot) * columns + q;
    }
    __device__ static float factor(float x) { return rounds ? to_tf32(x) : x; }
    template <bool> __device__ __forceinline__ void add(Terms &terms) {
        const int m = first_row() + row(0), n = (warp() / down * 4 + slot()) * pitch;
        UNROLL
        for (int i_k = 0; i_k < TK / sharing; i_k++) {
            const int k = share() * (TK / sharing) + i_k;
            float x[rows], y[columns];
            UNROLL
            for (int i = 0; i < rows; i++)
                x[i] = factor(terms.a[k][m + i % run + i / run * 8 * run]);
            UNROLL
            for (int q = 0; q < columns; q++) y[q] = factor(terms.b[k][n + q]);
            UNROLL
            for (int i = 0; i < rows; i++) {
                UNROLL
                for (int q = 0; q < columns; q++) sum[i][q] += x[i] * y[q];
            }
        }
    }
    // Add up the sums of warps that share their terms, in a fixed order. The first of these warps
    // get the result, for the others it returns false.
    __device__ __forceinline__ bool join(float *memory) {
        for (int half = sharing / 2; half > 0; half /= 2) { // the second half gives to the first
            float *const other = memory + threadIdx.x % (half * of_terms);
            UNROLL_GPU
            for (int i = 0; i < rows * columns; i++)
                if (share() / half == 1) other[i * half * of_terms] = sum[i / columns][i % columns];
            __syncthreads();
            UNROLL_GPU
            for (int i = 0; i < rows * columns; i++)
                if (share() < half) sum[i / columns][i % columns] += other[i * half * of_terms];
            __syncthreads();
        }
        return share() == 0;
    }
};

// Makes a thread's copies of a stage from global to shared memory, of zeros where `there` is false.
// `ahead` is how many stages come before the one that is multiplied. From SM 80 on start() enqueues
// the copies, and wait() waits until at most `later` stages are on their way. Before, start() loads
// into registers, from number i on, and finish() stores these.
template <class Tile, class A, class B> struct Copier {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    static constexpr int stages = Tile::stages, ahead = stages - 1 - Tile::behind;
    template <int bytes>
    __device__ void copy(int, float *to, const float *from, int at, bool there) {
        const unsigned address = __cvta_generic_to_shared(to);
        if constexpr (bytes == 16) // past L1
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address),
                         "l"(from + at), "r"(there ? bytes : 0)
                         : "memory");
        else
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address),
                         "l"(from + at), "r"(there ? bytes : 0)
                         : "memory");
    }
    __device__ static void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
    template <int later> __device__ static void wait() {
        asm volatile("cp.async.wait_group %0;" ::"n"(later) : "memory");
    }
    template <class Terms>
    __device__ __forceinline__ void start(A &a, B &b, int first, Terms &terms) {
        if (first < a.end) {
            a.find(first), b.find(first);
            a.copy(*this, 0, terms), b.copy(*this, A::own, terms);
        }
        commit();
    }
    template <class Terms> __device__ void finish(A &, B &, Terms &) {}
#else
    static constexpr int stages = 2, ahead = 1;
    alignas(16) float kept[A::own + B::own];
    bool store = false;
    template <int bytes>
    __device__ __forceinline__ void copy(int i, float *to, const float *from, int at, bool there) {
        typedef typename std::conditional<bytes == 16, float4, float>::type Floats;
        if (store) *(Floats *)to = (Floats &)kept[i];
        else (Floats &)kept[i] = there ? *(const Floats *)(from + at) : Floats{};
    }
    template <int> __device__ static void wait() {}
    template <class Terms> // without an if, behind which loads would wait for those before it
    __device__ __forceinline__ void start(A &a, B &b, int first, Terms &terms) {
        a.find(first), b.find(first);
        a.copy(*this, 0, terms), b.copy(*this, A::own, terms);
    }
    template <class Terms> __device__ __forceinline__ void finish(A &a, B &b, Terms &terms) {
        store = true;
        a.copy(*this, 0, terms), b.copy(*this, A::own, terms);
        store = false;
    }
#endif
};

// Store a warp's sums. They pass through its part of shared memory, a column of each slot at a
// time, so that the warp stores neighbours.
template <class Tile>
__device__ __forceinline__ void store_tile(const Tile &tile, float *memory, const ProductOut &out,
                                           const Product &s, int m0, int n0) {
    constexpr int height = Tile::height, pitch = height + 8;
    constexpr int sweeps = height > 32 ? height / 32 : 1;  // over the rows
    constexpr int at_once = height < 32 ? 32 / height : 1; // columns
    constexpr int own = sweeps * 4 / at_once;
    const int lane = threadIdx.x % 32;
    m0 += tile.first_row() + lane % height;
    float *const staged = memory + threadIdx.x / 32 * 4 * pitch;
    float bias[Tile::columns] = {};
    if (out.bias) {
        UNROLL_GPU
        for (int q = 0; q < Tile::columns; q++)
            bias[q] = out.bias[min(n0 + Tile::column(q, tile.slot()), s.N - 1)];
    }
    int first[sweeps];
    UNROLL_GPU
    for (int i = 0; i < sweeps; i++) first[i] = out.row(s, min(m0 + 32 * i, s.M - 1));
    UNROLL_GPU
    for (int q = 0; q < Tile::columns; q++) {
        UNROLL_GPU
        for (int i = 0; i < Tile::rows; i++)
            staged[tile.slot() * pitch + tile.row(i)] = tile.sum[i][q] + bias[q];
        __syncwarp();
        Vector<1> sum[own], mask[own] = {}, plus[own] = {}; // all loads come before the stores
        int at[own];                                        // negative: not in C
        UNROLL_GPU
        for (int g = 0; g < own; g++) {
            const int i = g % sweeps, slot = lane / height + g / sweeps * at_once;
            const int n = n0 + Tile::column(q, slot);
            sum[g].x[0] = staged[slot * pitch + lane % height + 32 * i];
            at[g] = n < s.N && m0 + 32 * i < s.M ? first[i] + n * s.C_column : -1;
            if (out.C.mask && at[g] >= 0) mask[g].x[0] = out.C.mask[at[g]];
            if (out.C.plus && at[g] >= 0) plus[g].x[0] = out.C.plus[at[g]];
        }
        UNROLL_GPU
        for (int g = 0; g < own; g++)
            if (at[g] >= 0) store(out.C, at[g], sum[g], mask[g], plus[g]);
        __syncwarp();
    }
}

// Products in one launch, of one A: the phases of a gradient, see products.cu
template <int count> struct Products {
    ProductOut out;
    const float *A, *B[count];
    Product s[count];
};
#ifndef __CUDACC__
#define __grid_constant__
#endif
// Return the block's shared memory for the stages.
template <class Tile, int stages> __device__ __forceinline__ typename Tile::Terms *shared_terms() {
    if constexpr (Tile::dynamic_bytes > 0) {
        extern __shared__ __align__(1024) float dynamic[];
        return (typename Tile::Terms *)dynamic;
    } else {
        __shared__ typename Tile::Terms terms[stages];
        return terms;
    }
}
// Blocks of a multiprocessor. Before SM 80 loads take registers, and so do several products.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
template <class Tile, int count>
constexpr int resident = count > 1 && Tile::blocks > 3 ? 3 : Tile::blocks;
#else
template <class Tile, int> constexpr int resident = Tile::blocks;
#endif
// A block computes a tile of C, or a slice of its terms (split-K), of a product of the batch. The
// phases of the same rows are neighbours: so a cache collects what they write to the same lines.
template <class Tile, template <class, bool> class Of_A, template <class, bool> class Of_B,
          int count>
__global__ void __launch_bounds__(Tile::threads, (resident<Tile, count>))
    product_kernel(const __grid_constant__ Products<count> all) {
    typedef Of_A<Tile, true> A;
    typedef Of_B<Tile, false> B;
    constexpr int TM = Tile::TM, TN = Tile::TN, TK = Tile::TK;
    constexpr int stages = Copier<Tile, A, B>::stages, ahead = Copier<Tile, A, B>::ahead;
    typename Tile::Terms *const terms = shared_terms<Tile, stages>();
    float *const memory = (float *)terms;
    const int which = blockIdx.x % count, m0 = blockIdx.x / count * TM, n0 = blockIdx.y * TN;
    const Product &s = all.s[which];
    if (count > 1 && m0 >= s.M) return;
    const int last = min(m0 + TM, s.M) - 1, element = blockIdx.z % s.batch;
    const Range range = slice_of(terms_inside(s, s.A_row(m0).h, s.A_row(last).h), TK,
                                 s.batch); // row_first: h never falls
    A a(all.A + (long)element * s.A_by, s, range, m0);
    B b(all.B[which] + (long)element * s.B_by, s, range, n0);
    // The sums of B's columns: each thread adds some terms of a column
    const bool sums = !A::arranged && s.weights && all.out.sums.data && blockIdx.x == 0;
    constexpr int parts = Tile::threads / TN;
    const int n = threadIdx.x % TN, part = threadIdx.x / TN;
    float column_sum = 0;
    Copier<Tile, A, B> copier;
    Tile tile;
    for (int i = 0; i < ahead; i++) {
        copier.start(a, b, range.begin + i * TK, terms[i]);
        copier.finish(a, b, terms[i]);
    }
    int now = 0; // the stage to be multiplied
    for (int first = range.begin; first < range.end; first += TK, now = (now + 1) % stages) {
        typename Tile::Terms &next = terms[(now + ahead) % stages];
        copier.template wait<ahead - 1>();
        tile.publish();
        __syncthreads();
        copier.start(a, b, first + ahead * TK, next);
        tile.template add<A::arranged>(terms[now]);
        for (int k = part; sums && k < TK && part < parts; k += parts)
            column_sum += *terms[now].at(false, k, n);
        copier.finish(a, b, next);
    }
    copier.template wait<0>();
    tile.finish();
    __syncthreads();
    if (sums) {
        memory[threadIdx.x] = column_sum;
        __syncthreads();
        for (int p = 1; p < parts && part == 0; p++) column_sum += memory[p * TN + n];
        const int column = n0 + n;
        if (part == 0 && column < s.N)
            all.out.sums.store(all.out.row(s, s.M) + column * all.out.sums_by, column_sum);
        __syncthreads();
    }
    if (all.out.C.data && tile.join(memory)) store_tile(tile, memory, all.out, s, m0, n0);
}
} // namespace fast
