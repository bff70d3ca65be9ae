// PRECISION=tf32: the products on tensor cores.
// Factors are rounded to TF32, with 10 bits of mantissa; sums stay FP32. From SM 80 on, tensor
// cores multiply; elsewhere FP32 units do, with the same rounding.
// Gain: on an H100 ResNet-18's step takes 0.95 of the time of fp32, where Winograd helps; with
// wgmma.h 0.79. LeNet and lab_cnn gain nothing.
// defines: Tf32Tile

namespace fast {
// A warp has WM x WN sums, in tiles of 16 x 8, four for each thread. The hardware says which of a
// tile's rows a thread has. Which row of C that is, is free: so four of a thread are neighbours.
template <int TM_, int TN_, int WM, int WN> struct Tf32Tile : Copied<4, 0> {
    static constexpr int TM = TM_, TN = TN_, TK = 8, threads = 32 * (TM / WM) * (TN / WN);
    static constexpr int rows = WM / 8, columns = WN / 4, height = WM;
    static constexpr int blocks = WM * WN > 2048 ? 256 / threads : 384 / threads;
    static constexpr double rate = 360;
    static constexpr bool adjoin = true, rounds = true;
    struct alignas(16) Terms { // padded by 8: 4 terms x 8 rows lie in different banks
        float a[TK][TM + 8], b[TK][TN + 8];
        __device__ float *at(bool of_A, int k, int x) { return of_A ? &a[k][x] : &b[k][x]; }
    };
    float sum[rows][columns] = {};
    __device__ static int first_row() { return threadIdx.x / 32 % (TM / WM) * WM; }
    __device__ static int warp_n() { return threadIdx.x / 32 / (TM / WM) * WN; }
    __device__ static int row(int i) { return threadIdx.x % 32 / 4 * 4 + i % 4 + i / 4 * 32; }
    __device__ static int slot() { return threadIdx.x % 4; }
    __device__ static int column(int q, int slot) {
        return warp_n() + q / 8 * 32 + slot * 8 + q % 8;
    }
    __device__ bool join(float *) { return true; }
    // Weights that have been arranged are already rounded.
    template <bool arranged> __device__ __forceinline__ void add(Terms &terms) {
        auto factor = [](float x) { return arranged ? x : to_tf32(x); }; // of B
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        const int t = threadIdx.x % 4, m = first_row() + row(0), n = warp_n() + row(0); // see PTX
        unsigned a[2][rows], b[2][WN / 8];
        UNROLL
        for (int h = 0; h < 2; h++) {
            UNROLL
            for (int i = 0; i < rows; i++)
                a[h][i] = __float_as_uint(to_tf32(terms.a[t + 4 * h][m + i % 4 + i / 4 * 32]));
            UNROLL
            for (int j = 0; j < WN / 8; j++)
                b[h][j] = __float_as_uint(factor(terms.b[t + 4 * h][n + j % 4 + j / 4 * 32]));
        }
        UNROLL
        for (int i = 0; i < rows; i += 2) {
            UNROLL
            for (int j = 0; j < WN / 8; j++) {
                const int q = j / 4 * 8 + j % 4;
                asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                    "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                    : "+f"(sum[i][q]), "+f"(sum[i][q + 4]), "+f"(sum[i + 1][q]),
                      "+f"(sum[i + 1][q + 4])
                    : "r"(a[0][i]), "r"(a[0][i + 1]), "r"(a[1][i]), "r"(a[1][i + 1]), "r"(b[0][j]),
                      "r"(b[1][j]));
            }
        }
#else
        for (int k = 0; k < TK; k++) {
            UNROLL
            for (int i = 0; i < rows; i++) {
                const float x = to_tf32(terms.a[k][first_row() + row(i)]);
                UNROLL
                for (int q = 0; q < columns; q++)
                    sum[i][q] += x * factor(terms.b[k][column(q, slot())]);
            }
        }
#endif
    }
};
} // namespace fast
