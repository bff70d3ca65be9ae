// Translation: to_cpp.sh knows where a function ends, whatever stands in it, and is soon done.
#include "tests.h"

// static is a device's within a kernel or a device function, up to its last brace, and nowhere else
// clang-format off
__global__ void nothing_kernel() {}
static int after_nothing = 1;
__global__ void braces_kernel(int *y) { { { { { { { static int n; *y = ++n; } } } } } } }
static int after_braces = 1;
__global__ void texts_kernel(char *y) { // }
    const char *text = "}}{", *raw = R"x(}" }} {)x"; /* } */ const int million = 1'000'000 + '{';
    static int n; y[n++] = *text; y[n++] = *raw; y[n++] = million == 1000000 + '{' ? '\'' : '"'; }
static int after_texts = 1;
template <class T = decltype(1)> __device__ T defaults(T x = T{}) { static T n; return x + ++n; }
static int after_defaults = 1;
struct Made {
    int a, b;
    __device__ Made(int x) : a{x}, b{x} { static int n; b += ++n; }
    __device__ Made &operator=(const Made &m) { static int n; a = m.a; b = ++n; return *this; }
    static int counted() { static int n; return ++n; }
};
#ifdef CUDA_CPU_NO_SUCH_NAME
__global__ void branches_kernel(int *y, int) {
#else
__global__ void branches_kernel(int *y) {
#endif
#if 0
    { {
#endif
    static int n;
    *y = ++n + defaults<int>() + Made(3).b;
}
static int after_branches = 1;
#define OF_MACRO(name) __global__ void name(int *y) { static int n; *y = ++n; }
OF_MACRO(macro_kernel)
static int after_macro = 1;
template <int N> __device__ std::enable_if_t<N == 2, int> enabled() { static int n; return ++n; }
static int after_enabled = 1;
extern "C" __global__ void __launch_bounds__(32 * (1 + 1)) heads_kernel(volatile int *y, int n = {})
{
    static /* not
    the host's */ int // of heads_kernel
        calls; *y = ++calls + n + enabled<2>();
}
__device__ int value_list[] = {1, 2}, more_values{3}, most = max(4, 5);
static int after_values = 1;
__device__
#if 1
int
#endif
of_lines(int x) { return x; }
__global__ void values_kernel(int *y) { *y = of_lines(value_list[1]) + more_values + most; }
TEST_CASE("static: of a device within its functions, of the host behind them") {
    CHECK(after_nothing++ + after_braces++ + after_texts++ + after_defaults++ + after_branches++ +
          after_macro++ + after_enabled++ + after_values++ == 8);
    const auto in_kernel = [] __device__ (int *y) { static int n; *y = ++n; };
    static std::vector<int> of_host(1, Made::counted());
    CHECK(of_host[0] == 1);
    static_assert(std::is_class<decltype(in_kernel)>(), "");
    auto y = device_copy(std::vector<int>(1));
    const auto twice = [&](auto kernel) {
        OK_LAUNCH(kernel<<<1, 1>>>(y.get()));
        OK_LAUNCH(kernel<<<1, 1>>>(y.get()));
        return fetch(y, 1)[0];
    };
    CHECK(twice(braces_kernel) == 2);
    CHECK(twice(branches_kernel) == 2 + 2 + 5);
    CHECK(twice(macro_kernel) == 2);
    CHECK(twice(values_kernel) == 2 + 3 + 5);
    OK_LAUNCH(heads_kernel<<<[] { int n = 1; return n; }(), dim3{dim3{dim3{1}}}>>>(y.get(), 7));
    CHECK(fetch(y, 1)[0] == 9);
}
// clang-format on

// to_cpp.sh takes time in proportion to a text, whatever that is: here 120 KB, in 0.3 s
TEST_CASE("to_cpp.sh: is soon done with long comments, strings and lines") {
    const std::string file = "build/long." + std::to_string(getpid());
    std::string of_launches, of_braces;
    while (of_launches.size() < 120000) of_launches += "<<<", of_braces += "{(\"'[;__device__ ";
    for (const std::string &text :
         {"/*" + of_launches + "*/", "// " + of_launches, "char s[] = \"" + of_launches + "\";",
          "char s[] = R\"x(" + of_launches + ")x\";", of_braces}) {
        std::ofstream(file) << text << "\nint last;\n";
        int status = 0;
        CAPTURE(text.substr(0, 20));
        CHECK(output_of_shell("timeout 60 sh extras/cpu/to_cpp.sh " + file + " | tail -n 1",
                              status) == "int last;\n");
    }
    unlink(file.c_str());
}
