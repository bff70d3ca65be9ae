// PRECISION=tf32 on SM 90: a group of four warps multiplies, straight from shared memory.
// Each thread of the group calls the same instruction, wgmma, and the tensor cores then multiply 64
// rows by up to 128 columns. No factor passes through a register, and meanwhile the threads copy
// the next stages. The instruction wants neighbouring terms of a row together: layouts.h.
// Gain: on an H100 ResNet-18's step takes 0.83 of the time that it takes with tf32.h alone.
// defines: WgmmaTile, Lines

namespace fast {
// Each group of four warps multiplies 64 of the TM rows of A by all TN columns of B. A stage has 32
// terms of each row: 128 bytes, eight pieces of 16. Row x has piece p at place p ^ x % 8: so the
// same piece of eight rows lies in different banks of shared memory. wgmma knows this order. While
// add() issues a stage, the tensor cores may still read the one before.
template <int TM_, int TN_, int stages_, int blocks_> struct WgmmaTile : Copied<stages_, 1> {
    static constexpr int TM = TM_, TN = TN_, TK = 32, threads = 2 * TM, blocks = blocks_;
    static constexpr int rows = 2, columns = TN / 4, height = 16; // of a thread; of a warp
    static constexpr double rate = 700;
    static constexpr bool lines = true, adjoin = false, rounds = true;
    struct Terms {
        float a[TM][TK], b[TN][TK];
        __device__ float *at(bool of_A, int k, int x) {
            return (of_A ? a : b)[x] + (k / 4 ^ x % 8) * 4 + k % 4;
        }
    };
    static constexpr int dynamic_bytes = (on_cpu ? 2 : stages_) * sizeof(Terms);
    // Which sums a thread has is the hardware's choice.
    float sum[rows][columns] = {};
    __device__ static int first_row() { return threadIdx.x / 32 * height; }
    __device__ static int row(int i) { return threadIdx.x % 32 / 4 + 8 * i; }
    __device__ static int slot() { return threadIdx.x % 4; }
    __device__ static int column(int q, int slot) { return q / 2 * 8 + slot * 2 + q % 2; }
    __device__ bool join(float *) { return true; }
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    // Describe to wgmma the terms from p on: their address, the 1024 bytes from eight rows to the
    // next eight, and the order of the pieces. PTX's manual calls this a matrix descriptor.
    __device__ static unsigned long long matrix(const float *p) {
        const unsigned long long address = __cvta_generic_to_shared(p);
        return (address & 0x3ffff) >> 4 | 1ull << 16 | 1024ull >> 4 << 32 | 1ull << 62;
    }
    // What cp.async has written becomes visible to wgmma.
    __device__ static void publish() {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __device__ __forceinline__ void finish() {
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        UNROLL
        for (int i = 0; i < rows * columns; i++)
            asm volatile("" : "+f"(sum[i / columns][i % columns])::"memory"); // not read before
    }
    template <bool> __device__ __forceinline__ void add(Terms &terms) {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        UNROLL
        for (int k = 0; k < TK; k += 8) {
            const float *a = &terms.a[threadIdx.x / 128 * 64][k];
            if constexpr (TN == 64) multiply_64(matrix(a), matrix(&terms.b[0][k]));
            UNROLL
            for (int n = 0; n + 128 <= TN; n += 128)
                multiply_128(matrix(a), matrix(&terms.b[n][k]), n / 4);
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); // the stage before is read
    }
// The sums of 8 columns of B, of which a thread has two, q and q+1; and of 32 columns
#define SUMS(q) "+f"(sum[0][q]), "+f"(sum[0][(q) + 1]), "+f"(sum[1][q]), "+f"(sum[1][(q) + 1])
#define SUMS_OF_32(q) SUMS(q), SUMS((q) + 2), SUMS((q) + 4), SUMS((q) + 6)
    __device__ __forceinline__ void multiply_64(unsigned long long a, unsigned long long b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32 {%0, %1, %2, %3, %4, %5, "
                     "%6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
                     "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, 1, 1, 1;"
                     : SUMS_OF_32(0), SUMS_OF_32(8)
                     : "l"(a), "l"(b));
    }
    __device__ __forceinline__ void multiply_128(unsigned long long a, unsigned long long b,
                                                 int q) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 {%0, %1, %2, %3, %4, "
                     "%5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
                     "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "
                     "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, "
                     "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, "
                     "1, 1, 1;"
                     : SUMS_OF_32(q), SUMS_OF_32(q + 8), SUMS_OF_32(q + 16), SUMS_OF_32(q + 24)
                     : "l"(a), "l"(b));
    }
#undef SUMS
#undef SUMS_OF_32
#else // the same sums on other devices, for tests
    template <bool> __device__ __forceinline__ void add(Terms &terms) {
        for (int k = 0; k < TK; k++) {
            UNROLL_GPU
            for (int i = 0; i < rows; i++) {
                const float x = *terms.at(true, k, first_row() + row(i));
                UNROLL_GPU
                for (int q = 0; q < columns; q++)
                    sum[i][q] += x * *terms.at(false, k, column(q, slot()));
            }
        }
    }
#endif
};

// The loader for it: a copy has 16 bytes, four neighbouring terms of a row. Eight threads copy the
// 32 terms of a row. The terms of y and dX are (u,v,c), in the order of arrange_kernel.
template <class Tile, bool of_A> struct Lines {
    static constexpr bool arranged = false;
    static constexpr int width = of_A ? Tile::TM : Tile::TN, at_once = Tile::threads / 8; // rows
    static constexpr int each = (width + at_once - 1) / at_once, own = 4 * each;
    const float *const from;
    const Product &s;
    const int end, x0 = threadIdx.x / 8, k0 = threadIdx.x % 8 * 4;
    Place row[each], term;
    __device__ __forceinline__ Lines(const float *from, const Product &s, const Range &range,
                                     int begin)
        : from(from), s(s), end(range.end) {
        UNROLL_GPU
        for (int r = 0; r < each; r++) row[r] = row_place<of_A>(s, begin + x0 + r * at_once);
    }
    __device__ __forceinline__ Index index(int k) const { // of A's terms
        if (s.weights) return s.A_term.split(k);
        const int tap = s.A_term.P(k), u = s.A_term.Q(tap);
        return {u, k - tap * int(s.A_term.P.d), tap - u * int(s.A_term.Q.d)};
    }
    __device__ __forceinline__ void find(int first) {
        const int k = first + k0;
        const Point p = of_A ? s.A_term.at(index(k)) : Point{k, 0, 0};
        term = {p.offset, k >= end ? ~0u : of_A ? s.mask(p, s.weights) : 1u << 31};
    }
    template <class Copier, class Terms>
    __device__ __forceinline__ void copy(Copier &copier, int i0, Terms &terms) {
        UNROLL_GPU
        for (int r = 0; r < each; r++) {
            const int x = x0 + r * at_once;
            if (width % at_once == 0 || x < width)
                copier.template copy<16>(i0 + 4 * r, terms.at(of_A, k0, x), from,
                                         row[r].offset + term.offset, !(row[r].mask & term.mask));
        }
    }
};
} // namespace fast
