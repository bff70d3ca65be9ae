// PRECISION=tf32: the products on tensor cores.
// Factors are rounded to TF32, with 10 bits of mantissa; sums stay FP32. From SM 80 on, tensor
// cores multiply; elsewhere FP32 units do, with the same rounding.
// Gain: a step on an H200, by the model: LeNet at batch 256 0.76 of the time, ResNet-18 7.2 ms for
// 15.8. Cost: relative errors of some 2e-4 a product.
// defines: Tf32Tile

namespace fast {
// A warp has WM x WN sums, in tiles of 16 x 8, four for each thread.
template <int TM_, int TN_, int WM, int WN, int TK_> struct Tf32Tile {
    static constexpr int TM = TM_, TN = TN_, TK = TK_, warps = TM / WM * (TN / WN);
    static constexpr int threads = 32 * warps, rows = WM / 8, columns = WN / 4;
    static constexpr int own = TK / warps > 4 ? TK / warps : 4, slots = TN / WN * 4;
    struct alignas(16) Terms { // padded by 4: a load's 8 rows x 4 terms lie in different banks
        float a[TM][TK + 4], b[TN][TK + 4];
        __device__ float &A(int k, int m) { return a[m][k]; }
        __device__ float &B(int k, int n) { return b[n][k]; }
        template <int n> __device__ void set_A(int k, int m, const float (&x)[n]) {
            if (n == 1) a[m][k] = round(x[0]);
            UNROLL
            for (int i = 0; i < n / 4; i++) // four in one store
                ((float4 *)a[m])[k / 4 + i] = make_float4(round(x[4 * i]), round(x[4 * i + 1]),
                                                          round(x[4 * i + 2]), round(x[4 * i + 3]));
        }
    };
    float sum[rows][columns] = {};
    __device__ int row(int i) const {
        return threadIdx.x / 32 % (TM / WM) * WM + i * 8 + threadIdx.x % 32 / 4;
    }
    __device__ int slot() const { return threadIdx.x / 32 / (TM / WM) * 4 + threadIdx.x % 4; }
    __device__ static int column(int q, int slot) {
        return slot / 4 * WN + q / 2 * 8 + slot % 4 * 2 + q % 2;
    }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    __device__ static float round(float x) {
        unsigned bits;
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
        return __uint_as_float(bits);
    }
    __device__ void add(Terms &terms) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4; // see PTX on fragments
        UNROLL
        for (int k = t; k < TK; k += 8) {
            unsigned a[rows][2], b[WN / 8][2];
            UNROLL
            for (int i = 0; i < rows; i++) {
                UNROLL
                for (int j = 0; j < 2; j++) a[i][j] = __float_as_uint(terms.A(k + 4 * j, row(i)));
            }
            UNROLL
            for (int q = 0; q < WN / 8; q++) {
                UNROLL
                for (int j = 0; j < 2; j++)
                    b[q][j] = __float_as_uint(terms.B(k + 4 * j, column(2 * q, slot() - t) + g));
            }
            UNROLL
            for (int i = 0; i < rows; i += 2) {
                UNROLL
                for (int q = 0; q < WN / 8; q++)
                    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                        : "+f"(sum[i][2 * q]), "+f"(sum[i][2 * q + 1]), "+f"(sum[i + 1][2 * q]),
                          "+f"(sum[i + 1][2 * q + 1])
                        : "r"(a[i][0]), "r"(a[i + 1][0]), "r"(a[i][1]), "r"(a[i + 1][1]),
                          "r"(b[q][0]), "r"(b[q][1]));
            }
        }
    }
#else
    __device__ static float round(float x) { // to the nearest, ties away from 0
        return std::isfinite(x) ? __uint_as_float((__float_as_uint(x) + 0x1000) & ~0x1fffu) : x;
    }
    __device__ void add(Terms &terms) {
        for (int k = 0; k < TK; k++) {
            UNROLL
            for (int i = 0; i < rows; i++) {
                const float x = terms.A(k, row(i));
                UNROLL
                for (int q = 0; q < columns; q++) sum[i][q] += x * terms.B(k, column(q, slot()));
            }
        }
    }
#endif
};

} // namespace fast
