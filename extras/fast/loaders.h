// Where the terms of a tile lie in memory: a loader for each kind of matrix.
// A loader brings the rows of A, or the columns of B, that a block needs, TK terms at a time. Both
// are called rows here.
//     Rows      the same term of neighbouring rows lies in neighbouring places: 16 bytes a copy
//     Gather    neighbouring terms of a row do, as in a weight gradient; or no neighbours at all
//     Spaced    as Gather, if the terms of a row are spaced evenly, and none is outside of an image
//     Windows   rows are windows of an image: it goes over the taps, and over the channels of each
// find(first) works out where the terms from `first` on lie, and copy() copies them. A thread
// copies the same rows in every stage.
// Gain: Windows works out an address, and whether it is inside the image, once for all channels of
// a tap. With Gather in its place a step of ResNet-18 takes 1.03 times as long on an H100.
// defines: Rows, Gather, Spaced, Windows, arrange_kernel

namespace fast {
struct Place { // of a row or a term: its part of the address, and where it is outside of an image
    int offset;
    unsigned mask;
};
// Return the Place of row x. Past the last row it is that one again, whose sums are never stored.
template <bool of_A> __device__ __forceinline__ Place row_place(const Product &s, int x) {
    const Point p = of_A ? s.A_row(min(x, s.M - 1)) : s.B_column(min(x, s.N - 1));
    return {p.offset, of_A ? s.mask(p, !s.weights) : 1};
}
// A thread copies `own` numbers a stage: `each` fours of neighbours.
template <class Tile, bool of_A> struct Rows {
    static constexpr bool arranged = false; // whether B has passed through arrange_kernel
    static constexpr int width = of_A ? Tile::TM : Tile::TN, threads = Tile::threads;
    static constexpr int fours = width / 4 * Tile::TK, each = (fours + threads - 1) / threads;
    static constexpr int own = 4 * each;
    const float *const from;
    const int by, end, x0, count;
    const bool wide; // all fours lie at multiples of 16 bytes
    int first;
    __device__ __forceinline__ Rows(const float *from, const Product &s, const Range &range, int x0)
        : from(from), by(of_A ? s.A_term.distance() : s.B_term.distance()), end(range.end), x0(x0),
          count(of_A ? s.M : s.N),
          wide((of_A || Tile::adjoin) && by % 4 == 0 && count % 4 == 0 && (size_t)from % 16 == 0) {}
    __device__ __forceinline__ void find(int term) { first = term; }
    template <class Copier, class Terms>
    __device__ __forceinline__ void copy(Copier &copier, int i0, Terms &terms) {
        UNROLL_GPU
        for (int i = 0; i < each; i++) {
            const int four = threadIdx.x + i * threads, k = four / (width / 4);
            const int x = four % (width / 4) * 4, at = (first + k) * by + x0 + x;
            const int left = first + k < end ? count - x0 - x : 0; // numbers
            if (fours % threads > 0 && four >= fours) break;
            if (wide)
                copier.template copy<16>(i0 + 4 * i, terms.at(of_A, k, x), from, at, left > 0);
            UNROLL_GPU
            for (int q = 0; q < 4 && !wide; q++)
                copier.template copy<4>(i0 + 4 * i + q, terms.at(of_A, k, x + q), from, at + q,
                                        q < left);
        }
    }
};
// Eight threads copy an eight: eight neighbouring terms of a row. The four eights of a warp go to
// different banks of shared memory.
template <class Tile, bool of_A> struct Gather {
    static constexpr bool arranged = false;
    static constexpr int width = of_A ? Tile::TM : Tile::TN, at_once = Tile::threads / 8; // eights
    static constexpr int apart = at_once > width ? at_once / width : 1; // of them in the same row
    static constexpr int each = at_once > width ? 1 : (width + at_once - 1) / at_once;
    static constexpr int eights = Tile::TK / 8 / apart, own = each * eights;
    const float *const from;
    const Product &s;
    const int end, x0 = threadIdx.x / 8 % width, k0 = threadIdx.x % 8 + threadIdx.x / 8 / width * 8;
    Place row[each], term[eights];
    __device__ __forceinline__ Gather(const float *from, const Product &s, const Range &range,
                                      int begin)
        : from(from), s(s), end(range.end) {
        UNROLL_GPU
        for (int r = 0; r < each; r++) row[r] = row_place<of_A>(s, begin + x0 + r * at_once);
    }
    __device__ __forceinline__ void find(int first) {
        UNROLL_GPU
        for (int g = 0; g < eights; g++) {
            const int k = first + k0 + g * apart * 8;
            const Index i = s.A_term.split(k); // B's terms have the same indices
            const Point p = of_A ? s.A_term.at(i) : s.B_term.at(i);
            term[g] = {p.offset, k >= end ? ~0u : of_A ? s.mask(p, s.weights) : 1u << 31};
        }
    }
    template <class Copier, class Terms>
    __device__ __forceinline__ void copy(Copier &copier, int i0, Terms &terms) {
        UNROLL_GPU
        for (int i = 0; i < own; i++) {
            const int g = i / each, r = i % each, x = x0 + r * at_once;
            if (width % at_once == 0 || x < width)
                copier.template copy<4>(i0 + i, terms.at(of_A, k0 + g * apart * 8, x), from,
                                        row[r].offset + term[g].offset,
                                        !(row[r].mask & term[g].mask));
        }
    }
};
// Copies as Gather does, but has little to work out: term k lies at k times a distance, and no term
// is outside of an image. Dense layers and Winograd's gradient of the weights use it.
template <class Tile, bool of_A> struct Spaced : Gather<Tile, of_A> {
    typedef Gather<Tile, of_A> All;
    const int by;
    __device__ __forceinline__ Spaced(const float *from, const Product &s, const Range &range,
                                      int begin)
        : All(from, s, range, begin), by(of_A ? s.A_term.distance() : s.B_term.distance()) {
        for (Place &row : this->row) row.mask = 1; // a constant, which takes no register
    }
    __device__ __forceinline__ void find(int first) {
        UNROLL_GPU
        for (int g = 0; g < All::eights; g++) {
            const int k = first + this->k0 + g * All::apart * 8;
            this->term[g] = {k * by, k >= this->end ? ~0u : 0};
        }
    }
};
// Terms are (u,v,c), in the order of arrange_kernel, and TK divides the channels. Neighbouring
// threads have neighbouring rows.
template <class Tile, bool> struct Windows {
    static constexpr bool arranged = true;
    static constexpr int TM = Tile::TM, TK = Tile::TK, threads = Tile::threads;
    static constexpr int at_once = threads > TM ? threads / TM : 1; // terms
    static constexpr int each = threads < TM ? TM / threads : 1;    // rows
    static constexpr int own = TK / at_once * each;
    const float *const from;
    const Product &s;
    const int end, channels = s.A_term.P.d, KW = max(1, int(s.A_term.Q.d));
    int first_term, tap, c; // of this tap; the first channel to copy
    Place row[each];
    int at[each]; // where this tap's channels begin
    bool inside[each];
    __device__ __forceinline__ Windows(const float *from, const Product &s, const Range &range,
                                       int begin)
        : from(from), s(s), end(range.end), tap(range.begin / channels) {
        first_term = tap * channels;
        UNROLL_GPU
        for (int r = 0; r < each; r++)
            row[r] = row_place<true>(s, begin + threadIdx.x % TM + r * threads);
        find_tap();
    }
    __device__ __forceinline__ void find_tap() {
        const Point p = s.A_term.at({tap / KW, 0, tap % KW});
        const unsigned mask = first_term < end ? s.mask(p, false) : ~0u;
        UNROLL_GPU
        for (int r = 0; r < each; r++) {
            at[r] = row[r].offset + p.offset;
            inside[r] = !(row[r].mask & mask);
        }
    }
    __device__ __forceinline__ void find(int first) {
        if (first - first_term == channels) first_term = first, tap++, find_tap();
        c = first - first_term + threadIdx.x / TM;
    }
    template <class Copier, class Terms>
    __device__ __forceinline__ void copy(Copier &copier, int i0, Terms &terms) {
        UNROLL_GPU
        for (int i = 0; i < own; i++) {
            const int k = i / each * at_once, r = i % each;
            float *const to = terms.at(true, threadIdx.x / TM + k, threadIdx.x % TM + r * threads);
            copier.template copy<4>(i0 + i, to, from, at[r] + (c + k) * s.A_term.by_y, inside[r]);
        }
    }
};
// to[(u,v,c)*by_k + n*by_n] = B's term (u,c,v) of column n, perhaps rounded.
// One thread per pair of c and n, for all taps. Neighbouring threads store neighbours.
__global__ void arrange_kernel(float *to, int by_k, int by_n, const float *B, Product s,
                               Divisor count, bool rounds) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, slow = count(i), fast = i - slow * count.d;
    const int c = by_k == 1 ? fast : slow, n = by_k == 1 ? slow : fast;
    const int C = s.A_term.P.d, KW = s.A_term.Q.d;
    if (c >= C || n >= s.N) return;
    B += s.B_column(n).offset, to += n * by_n;
    for (int u = 0, k = c; k < s.K; u++)
        for (int v = 0; v < KW; v++, k += C) {
            const float x = B[s.B_term.at({u, c, v}).offset];
            to[k * by_k] = rounds ? to_tf32(x) : x;
        }
}
} // namespace fast
