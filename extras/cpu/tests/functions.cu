// Device functions and vector types.
#include "tests.h"

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
    *ticks = clock64() - begin;
}
TEST_CASE("rsqrtf, __expf, __saturatef, __int_as_float, ..., clock64") {
    auto y = floats_on(0, 8);
    auto ticks = pinned<long long>(1);
    OK_LAUNCH(intrinsics_kernel<<<1, 1>>>(y.get(), 4, ticks.get()));
    CHECK(fetch(y, 8) == Floats{0.5, 5, 18, -1, 1.5, 4, 2, 3});
    CHECK(*ticks >= 0);
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
