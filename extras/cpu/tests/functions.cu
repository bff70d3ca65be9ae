// Device functions and vector types.
#include "tests.h"

#include <cuComplex.h>
#include <helper_cuda.h>
#include <helper_functions.h>

__global__ void vectors_kernel(float4 *y, const float4 *x, int2 i, double2 d) {
    const float4 v = x[threadIdx.x];
    y[threadIdx.x] = make_float4(v.w + i.x, v.z + i.y, v.y + d.x, v.x + d.y);
}
TEST_CASE("float4: four floats at once") {
    Floats x(8), want = {4, 4, 4, 4, 8, 8, 8, 8};
    for (int i = 0; i < 8; i++) x[i] = i;
    auto X = device_copy(x), Y = floats_on(0, 8);
    OK_LAUNCH(vectors_kernel<<<1, 2>>>((float4 *)Y.get(), (float4 *)X.get(), make_int2(1, 2),
                                       make_double2(3, 4)));
    CHECK(fetch(Y, 8) == want);
    CHECK(sizeof(float3) == 12);
    CHECK(alignof(float2) == 8);
    CHECK(alignof(int4) == 16);
    CHECK(make_uint4(1, 2, 3, 4).w + make_int3(1, 2, 3).z + make_float3(1, 2, 3).y == 9);
    CHECK(alignof(double4_16a) == 16);
    CHECK(alignof(ulonglong4_32a) == 32);
    CHECK(make_double4_32a(1, 2, 3, 4).w == 4);
}

__global__ void intrinsics_kernel(float *y, float x, long long *ticks) {
    const long long begin = clock64();
    y[0] = rsqrtf(x);
    y[1] = __logf(__expf(x)) + __sinf(0) + __cosf(0);
    y[2] = __powf(x, 2) + __fdividef(x, 2);
    y[3] = __fmaf_rn(x, x, 1) - fmaf(x, x, 2);
    y[4] = __saturatef(x) + __saturatef(-x) + __saturatef(0.5f) + __saturatef(NAN);
    y[5] = __int_as_float(__float_as_int(x));
    y[6] = min(7, blockDim.x) + max(0.5f, 1.0);
    y[7] = __umulhi(0x80000000u, blockDim.x * 6) + __umulhi(~0u, 1);
    __stcs(y + 8, __ldcs(y) + 1);
    *ticks = clock64() - begin;
}
TEST_CASE("rsqrtf, __expf, __saturatef, __int_as_float, ..., clock64") {
    auto y = floats_on(0, 9);
    auto ticks = pinned<long long>(1);
    OK_LAUNCH(intrinsics_kernel<<<1, 1>>>(y.get(), 4, ticks.get()));
    CHECK(fetch(y, 9) == Floats{0.5, 5, 18, -1, 1.5, 4, 2, 3, 1.5});
    CHECK(*ticks >= 0);
}

// As nvcc, which includes math.h: of a float, not of an int or a double
__global__ void math_kernel(int *y, float x) {
    y[0] = abs(x) > 0.25f;
    y[1] = isnan(x * NAN) + isinf(x * INFINITY) + isfinite(x);
    y[2] = signbit(x) != 0;
    y[3] = sizeof sqrt(x) + sizeof exp(x) + sizeof abs(2.0);
    y[4] = printf("%s%d%%%*d\n", "", 1, 2, 3) + printf("none\n");
}
TEST_CASE("abs, isnan, sqrt, printf: as in CUDA's headers") {
    auto y = pinned<int>(5);
    OK_LAUNCH(math_kernel<<<1, 1>>>(y.get(), -0.5f));
    OK(cudaDeviceSynchronize());
    const std::vector<int> got(y.get(), y.get() + 5), want = {1, 3, 1, 16, small_only ? 10 : 4};
    CHECK(got == want); // a sanitizer's printf is the host's
    CHECK(abs(-0.5f) == 0.5f);
}

// Values as CUDA's manual defines them
__global__ void rounding_kernel(double *y, float one) {
    int i = 0;
    for (int x : {__float2int_rn(2.5f * one), __float2int_ru(2.1f * one), __float2int_rd(-2.1f),
                  __float2int_rz(-2.9f * one), __float2int_rn(1e20f * one), __double2int_rz(NAN),
                  (int)__float2uint_rz(-5 * one), int(__double2ll_rn(-1e300) == LLONG_MIN)})
        y[i++] = x;
    y[i++] = __fadd_ru(one, 1e-10f) > 1;
    y[i++] = __int2float_ru(16777217 * (int)one) - __int2float_rz(16777217);
    y[i++] = rcbrtf(8) + sinpi(0.5) + normcdff(0) + norm3df(2, 3, 6) + rhypotf(3 * one, 4) * 5;
    y[i++] = __hiloint2double(__double2hiint(3.5), __double2loint(3.5));
}
__global__ void integers_kernel(unsigned *y, int one) {
    int i = 0, all = 0;
    y += 14 * threadIdx.x;
    for (unsigned x : {__brev(one), __byte_perm(0x33221100, 0x77665544, 0x5410),
                       __funnelshift_rc(1, 9, 40), __funnelshift_l(~0u, 1, 36),
                       (unsigned)__mul64hi(-1ll, one), (unsigned)__mul24(0x1000003, 5),
                       __sad(-3, 4, 10), (unsigned)__hadd(-3, 0),
                       (unsigned)__dp4a(0x01020304, 0x01010101, 5), __dp4a(255u, 255u, 0u)})
        y[i++] = x;
    y[i++] = __reduce_add_sync(~0u, threadIdx.x) + __reduce_max_sync(~0u, threadIdx.x);
    y[i++] = __match_any_sync(~0u, threadIdx.x % 2);
    y[i++] = __match_all_sync(~0u, one, &all) + all;
    y[i++] = atomicAdd_block(&y[0], 1);
}
__global__ void complex_kernel(cuFloatComplex *z) {
    const cuFloatComplex a = make_cuFloatComplex(1, 2), b = cuCmulf(a, a);
    *z = cuCaddf(cuCdivf(b, a), make_cuFloatComplex(cuCabsf(b), cuCrealf(cuConjf(b))));
}
TEST_CASE("rounding, bits, products, means, reductions, complex numbers") {
    auto y = pinned<double>(12);
    auto n = pinned<unsigned>(14 * 32);
    auto z = pinned<cuFloatComplex>(1);
    OK_LAUNCH(rounding_kernel<<<1, 1>>>(y.get(), 1));
    OK_LAUNCH(integers_kernel<<<1, 32>>>(n.get(), 1));
    OK_LAUNCH(complex_kernel<<<1, 1>>>(z.get()));
    OK(cudaDeviceSynchronize());
    CHECK(std::vector<double>(y.get(), y.get() + 12) ==
          std::vector<double>{3 - 1, 3, -3, -2, INT_MAX, 0, 0, 1, 1, 2, 10, 3.5});
    CHECK(std::vector<unsigned>(n.get(), n.get() + 14) ==
          std::vector<unsigned>{0x80000001, 0x55441100, 9, 31, ~0u, 15, 17, ~0u - 1, 15, 65025,
                                496 + 31, 0x55555555, 0, 0x80000000});
    CHECK(z->x == 6);
    CHECK(z->y == -1);
}

// Of every pair of types that CUDA has min and max for
template <class Result, class A, class B> static void check_min_max(A a, B b) { // a < b
    static_assert(std::is_same<decltype(min(a, b)), Result>::value, "");
    static_assert(std::is_same<decltype(max(b, a)), Result>::value, "");
    CHECK(min(a, b) == Result(a));
    CHECK(min(b, a) == Result(a));
    CHECK(max(a, b) == Result(b));
    CHECK(max(b, a) == Result(b));
}
template <class T> static void check_min_max_of() {
    typedef typename std::make_unsigned<T>::type Unsigned;
    check_min_max<T>(T(-3), T(2));
    check_min_max<Unsigned>(Unsigned(2), Unsigned(-1));
    check_min_max<Unsigned>(T(2), Unsigned(-1));
    check_min_max<Unsigned>(Unsigned(2), T(-1));
}
__global__ void relu_kernel(float *x) { x[threadIdx.x] = max(0.0, x[threadIdx.x]); }
TEST_CASE("min, max: of each pair of types, with NaN, and beside std's") {
    using namespace std;
    check_min_max_of<int>();
    check_min_max_of<long>();
    check_min_max_of<long long>();
    check_min_max<float>(-0.5f, 2.f);
    check_min_max<double>(-0.5, 2.0);
    check_min_max<double>(-0.5f, 2.0);
    check_min_max<double>(-0.5, 2.f);
    check_min_max<int>(short(-3), 'b');
    for (float number : {-1.f, 1.f}) {
        CHECK(min(number, NAN) == number);
        CHECK(min(NAN, number) == number);
        CHECK(max(number, NAN) == number);
        CHECK(max(NAN, number) == number);
    }
    auto x = device_copy(Floats{-1, 3});
    OK_LAUNCH(relu_kernel<<<1, 2>>>(x.get()));
    CHECK(fetch(x, 2) == Floats{0, 3});
}

// Results that C++ does not have, a GPU has, and a CPU has others
template <class T> __global__ void convert_kernel(T *y, float x) {
    WRONG_HERE(y[threadIdx.x] = (T)(x - 3 * (int)threadIdx.x));
}
__global__ void shift_kernel(unsigned *y, int bits) {
    y[0] = 1u << (bits - 1);
    WRONG_HERE(y[1] = ~0u >> bits);
}
__global__ void usual_numbers_kernel(int *y, float x, int bits) {
    y[0] = (unsigned char)(x + 300) + (short)x + (int)x + (unsigned)(x + 0.5f) + (1 << bits);
    y[1] = (unsigned char)(x * 1e6f);
}
static void usual_numbers() {
    auto y = pinned<int>(2);
    usual_numbers_kernel<<<1, 1>>>(y.get(), 0.25f, 31);
    OK(cudaDeviceSynchronize());
    expect(y.get()[0] == 44 + INT_MIN, "the sum", y.get()[0]);
    volatile float x = -51;
    expect((unsigned char)x == 205, "what the host has", (unsigned char)x);
}
template <class T> static void convert(float x) {
    auto y = pinned<T>(2);
    convert_kernel<<<1, 2>>>(y.get(), x);
    OK(cudaDeviceSynchronize());
    throw std::runtime_error("told, then went on");
}
static void shift() {
    auto y = pinned<unsigned>(2);
    shift_kernel<<<1, 1>>>(y.get(), 32);
    OK(cudaDeviceSynchronize());
    throw std::runtime_error("told, then went on");
}
static const bool right_functions = add(right_programs, {{"usual numbers", usual_numbers}});
static const bool wrong_functions = add(wrong_programs, {
    WRONG("conversion, of a negative number", convert<unsigned char>(-51),
          "notice: convert_kernel on device 0: a GPU converts -5", "to 'unsigned char' as 0"),
    WRONG("conversion, of NaN", convert<int>(NAN), "a GPU converts nan to 'int' as 0"),
    WRONG("conversion, of a large number", convert<int>(4e9f), "to 'int' as 2147483647, but this"),
    WRONG("conversion, of a large negative number", convert<long>(-1e30f),
          "as -9223372036854775808"),
    WRONG("shift, by 32", shift(), "shift_kernel on device 0: a GPU shifts by as many bits as"),
});

TEST_CASE("helper_functions.h: arguments, stopwatches, files of NVIDIA's samples") {
    const char *words[] = {"program", "-n=5", "--Size=2.5", "-verbose", "-n=7", "-file=a=b"};
    const int argc = std::size(words);
    CHECK(checkCmdLineFlag(argc, words, "n"));
    CHECK(checkCmdLineFlag(argc, words, "VERBOSE"));
    CHECK(!checkCmdLineFlag(argc, words, "verb"));
    CHECK(!checkCmdLineFlag(argc, words, "program"));
    CHECK(getCmdLineArgumentInt(argc, words, "n") == 7);
    CHECK(getCmdLineArgumentInt(argc, words, "m") == 0);
    CHECK(getCmdLineArgumentFloat(argc, words, "size=") == 2.5);
    char *file = nullptr;
    CHECK(getCmdLineArgumentString(argc, words, "file", &file));
    CHECK(file == std::string("a=b"));
    CHECK(!getCmdLineArgumentString(argc, words, "none", &file));
    CHECK(file == nullptr);
    const char *of_device[] = {"program", "-device=1"};
    CHECK(findCudaDevice(2, of_device) == 1);
    CHECK(findCudaDevice(1, of_device) == 0);
    char *path = sdkFindFilePath("extras/cpu/tests.cu", "");
    CHECK(path == std::string("extras/cpu/tests.cu"));
    free(path);

    StopWatchInterface *timer = nullptr;
    CHECK(!sdkStartTimer(&timer));
    CHECK(sdkCreateTimer(&timer));
    for (int i = 0; i < 2; i++) {
        sdkStartTimer(&timer);
        usleep(2000);
        sdkStopTimer(&timer);
    }
    CHECK(sdkGetTimerValue(&timer) >= 4);
    CHECK(sdkGetAverageTimerValue(&timer) == sdkGetTimerValue(&timer) / 2);
    sdkResetTimer(&timer);
    CHECK(sdkGetTimerValue(&timer) == 0);
    CHECK(sdkDeleteTimer(&timer));
    CHECK(timer == nullptr);
}
