// KERNELS=fast: tiled through shared memory, with double buffering.
// A block loads 8 or 16 terms of its rows and columns into shared memory. While its threads
// multiply them, it loads the next ones into registers.
// Gain: LeNet's step at batch 256 on an H200, by the model: 0.41 ms tiled in registers, 0.21 so. A
// CPU has no shared memory: there it is for tests.
// defines: Fp32Tile, store_tile, Loader, product_kernel

namespace fast {
// A block's tile of TM x TN sums: which of them a thread has, and how TK terms at a time lie in
// shared memory. Threads of the same slot have the same columns. Here a thread has tm x tn sums;
// its rows are pairs of neighbours, so that one load brings two, and its columns begin at a
// multiple of four, so that one load brings four.
template <int tm, int tn, int tx, int ty, int TK_> struct Fp32Tile {
    static constexpr int TM = tx * tm, TN = ty * tn, TK = TK_, threads = tx * ty;
    static constexpr int rows = tm, columns = tn, own = 32 * TK / threads, slots = ty;
    static constexpr int pitch = (tn + 3) / 4 * 4; // from slot to slot
    struct alignas(16) Terms { // padded by 4: neighbouring terms begin in different banks
        float a[TK][TM + 4], b[TK][ty * pitch + 4];
        __device__ float &A(int k, int m) { return a[k][m]; }
        __device__ float &B(int k, int n) { return b[k][n + n / tn * (pitch - tn)]; }
        template <int n> __device__ void set_A(int k, int m, const float (&x)[n]) {
            UNROLL
            for (int i = 0; i < n; i++) a[k + i][m] = x[i];
        }
    };
    float sum[rows][columns] = {};
    __device__ int row(int i) const { return 2 * (threadIdx.x % tx) + i % 2 + i / 2 * 2 * tx; }
    __device__ int slot() const { return threadIdx.x / tx; }
    __device__ static int column(int q, int slot) { return slot * tn + q; }
    __device__ static float round(float x) { return x; }
    __device__ void add(Terms &terms) {
        UNROLL
        for (int k = 0; k < TK; k++) {
            float x[rows], y[columns];
            UNROLL
            for (int i = 0; i < rows; i++) x[i] = terms.A(k, row(i));
            UNROLL
            for (int q = 0; q < columns; q++) y[q] = terms.b[k][slot() * pitch + q];
            UNROLL
            for (int i = 0; i < rows; i++) {
                UNROLL
                for (int q = 0; q < columns; q++) sum[i][q] += x[i] * y[q];
            }
        }
    }
};
// Store the sums. They pass through shared memory, `staged`, a few columns at a time, so that a
// warp stores neighbours.
template <class Tile>
__device__ __forceinline__ void store_tile(const Tile &tile, float *staged, const ProductOut &out,
                                           const Product &s) {
    constexpr int TM = Tile::TM;
    constexpr int sweeps = TM > Tile::threads ? TM / Tile::threads : 1;  // over the rows
    constexpr int at_once = Tile::threads > TM ? Tile::threads / TM : 1; // columns
    constexpr int own_columns = Tile::slots / at_once;                   // of this thread
    const int m0 = blockIdx.x * TM, n0 = blockIdx.y * Tile::TN;
    float bias[Tile::columns] = {};
    if (out.bias) {
        UNROLL_GPU
        for (int q = 0; q < Tile::columns; q++)
            bias[q] = out.bias[min(n0 + Tile::column(q, tile.slot()), s.N - 1)];
    }
    int offset[sweeps];
    UNROLL_GPU
    for (int i = 0; i < sweeps; i++) {
        const int m = m0 + threadIdx.x % TM + i * Tile::threads;
        offset[i] = out.row(s, m);
    }
    UNROLL_GPU
    for (int q = 0; q < Tile::columns; q++) {
        UNROLL_GPU
        for (int i = 0; i < Tile::rows; i++)
            staged[tile.slot() * (TM + 8) + tile.row(i)] = tile.sum[i][q] + bias[q];
        __syncthreads();
        UNROLL_GPU
        for (int i = 0; i < sweeps; i++) {
            const int r = threadIdx.x % TM + i * Tile::threads, m = m0 + r;
            if (m >= s.rows()) break;
            int n[own_columns];
            float sum[own_columns];
            UNROLL_GPU
            for (int g = 0; g < own_columns; g++) {
                const int slot = threadIdx.x / TM + g * at_once;
                n[g] = n0 + Tile::column(q, slot);
                sum[g] = staged[slot * (TM + 8) + r];
            }
            out.store(s, m, offset[i], n, sum);
        }
        __syncthreads();
    }
}
// The offsets in A and masks of a block's rows and terms, and the terms' offsets in B. Terms lie
// in a ring buffer of 2*found: after every `found` terms, each thread finds one.
struct alignas(8) Place {
    int offset;
    unsigned mask;
};
template <class Tile> struct Places {
    static constexpr int found = Tile::threads;
    Place row[Tile::TM], term[2 * found];
    int B[2 * found]; // -1: there is no such term
};
// What a thread loads. Of A with by_terms: one term, of every A_step-th row from A_first on, so
// that a warp loads neighbouring terms; else: `own` terms from A_term on, of every 32nd row, so
// that a warp loads neighbouring rows. Of B: every threads-th element, neighbours being columns
// with by_columns, else terms.
template <class Tile, bool by_terms, bool by_columns> struct Loader {
    static constexpr int TK = Tile::TK, TN = Tile::TN, found = Places<Tile>::found;
    static constexpr int B_own = (TN * TK + Tile::threads - 1) / Tile::threads;
    static constexpr int own = by_terms ? 1 : Tile::own, A_step = by_terms ? found / TK : 32;
    static constexpr int parts = TK / own, rows = Tile::TM * TK / own / Tile::threads;
    const int warp = threadIdx.x / 32, m0 = blockIdx.x * Tile::TM, n0 = blockIdx.y * TN;
    const int A_term = by_terms ? threadIdx.x % TK : warp % parts * own;
    const int A_first = by_terms ? threadIdx.x / TK : warp / parts * 32 * rows + threadIdx.x % 32;
    const float *const A, *const B;
    const Product &s;
    const Range range;
    Places<Tile> &places;
    Place row[rows];
    float outside[rows]; // what A is where the masks meet: 1 in the additional row, else 0
    int column[B_own];
    float a[rows][own], b[B_own];

    __device__ __forceinline__ Loader(const float *A, const float *B, const Product &s, Range range,
                                      Places<Tile> &places)
        : A(A), B(B), s(s), range(range), places(places) {
        for (int r = threadIdx.x; r < Tile::TM; r += Tile::threads) {
            const int m = min(m0 + r, s.M - 1);
            const Point p = s.A_row(m);
            places.row[r] = {p.offset, m0 + r < s.M ? s.mask(p, !s.weights) : ~0u};
        }
        find_terms(range.begin);
        find_terms(range.begin + found);
        __syncthreads();
        UNROLL_GPU
        for (int r = 0; r < rows; r++) {
            row[r] = places.row[A_first + A_step * r];
            outside[r] = m0 + A_first + A_step * r == s.M;
        }
        UNROLL_GPU
        for (int q = 0; q < B_own; q++) // past the last column: that one again, never stored
            column[q] = s.B_column(min(n0 + B_column(q), s.N - 1)).offset;
    }
    __device__ static int B_term(int q) {
        const int term = (threadIdx.x + q * Tile::threads) / TN; // may lie beyond TK: not stored
        return by_columns ? min(term, TK - 1) : threadIdx.x % TK;
    }
    __device__ static int B_column(int q) {
        return by_columns ? (threadIdx.x + q * Tile::threads) % TN
                          : threadIdx.x / TK + q * (Tile::threads / TK);
    }
    __device__ __forceinline__ void find_terms(int first) {
        const int k = first + threadIdx.x, at = (k - range.begin) % (2 * found);
        const Point p = s.A_term(k);
        const bool there = k < range.end;
        places.term[at] = {p.offset, there ? s.mask(p, s.weights) : ~0u};
        places.B[at] = there ? s.B_term(k).offset : -1;
    }
    __device__ __forceinline__ void load(int first) {
        const int at = (first - range.begin) % (2 * found);
        UNROLL_GPU
        for (int i = 0; i < own; i++) {
            const Place term = places.term[at + A_term + i];
            UNROLL_GPU
            for (int r = 0; r < rows; r++) {
                const bool inside = !(row[r].mask & term.mask);
                const unsigned place = inside ? row[r].offset + term.offset : 0; // no branch
                const float x = A[place];
                a[r][i] = inside ? x : outside[r];
            }
        }
        UNROLL_GPU
        for (int q = 0; q < B_own; q++) {
            const int offset = places.B[at + B_term(q)];
            const unsigned place = max(0, offset) + column[q];
            const float x = B[place];
            b[q] = offset < 0 ? 0 : x;
        }
    }
    __device__ __forceinline__ void store(typename Tile::Terms &terms) const {
        UNROLL_GPU
        for (int r = 0; r < rows; r++) terms.set_A(A_term, A_first + A_step * r, a[r]);
        UNROLL_GPU
        for (int q = 0; q < B_own; q++)
            if (TN * TK % Tile::threads == 0 || threadIdx.x + q * Tile::threads < TN * TK)
                terms.B(B_term(q), B_column(q)) = Tile::round(b[q]);
    }
};
// A block computes one tile of C, or a slice of its terms (split-K).
template <class Tile, bool by_terms, bool by_columns>
__global__ void __launch_bounds__(Tile::threads)
    product_kernel(ProductOut out, const float *A, const float *B, Product s) {
    constexpr int TK = Tile::TK, found = Places<Tile>::found;
    __shared__ typename Tile::Terms terms[2];
    __shared__ Places<Tile> places;
    const int m0 = blockIdx.x * Tile::TM, last = min(m0 + Tile::TM, s.M) - 1;
    const Range range =
        slice_of(terms_inside(s, s.A_row(m0).h, s.A_row(last).h), TK); // row_first: h never falls
    const int begin = range.begin, end = range.end;
    Loader<Tile, by_terms, by_columns> loader(A, B, s, range, places);
    Tile tile;
    if (begin < end) {
        loader.load(begin);
        loader.store(terms[0]);
    }
    __syncthreads();
    for (int first = begin, half = 0; first < end; first += TK, half ^= 1) {
        if (first + TK < end) loader.load(first + TK);
        tile.add(terms[half]);
        if (first + TK < end) loader.store(terms[half ^ 1]);
        if (first > begin && (first - begin) % found == 0) loader.find_terms(first + found);
        __syncthreads();
    }
    store_tile(tile, (float *)terms, out, s);
}
} // namespace fast
