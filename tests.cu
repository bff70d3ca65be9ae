// Tests of mgpu.cu, against plain loops in double and against what the tutorial promises.
//
//     make test                       all of them
//     make test T='-tc=allreduce*'    those of one function: a test's name starts with what it tests
//     make asan, make race            the same under AddressSanitizer and ThreadSanitizer
//
// The sections follow mgpu.cu's; the last two test the program as a whole and the CPU stand-in.

#define MGPU_NO_MAIN
#include "mgpu.cu"

#define DOCTEST_CONFIG_IMPLEMENT
#include "doctest.h"

// Under a sanitizer, which is up to 300 times slower, the larger cases are made smaller.
#if defined(CUDA_CPU_TSAN) || defined(CUDA_CPU_ASAN)
constexpr bool small_only = true;
#else
constexpr bool small_only = false;
#endif

// ---------------------------------------------------------------------------------------------
// What the tests share

typedef std::vector<float> Floats;
typedef std::vector<double> Doubles;

// Passes only if max|got - want| <= rel * max|want|; NaN fails. Prints the worst element.
template <class T> static void check_close(const Floats &got, const std::vector<T> &want, double rel) {
    REQUIRE(got.size() == want.size());
    double largest = 0, worst = -1;
    size_t at = 0;
    for (size_t i = 0; i < want.size(); i++) {
        largest = std::max(largest, std::fabs((double)want[i]));
        double difference = std::fabs(got[i] - (double)want[i]);
        if (!(difference <= worst)) {
            worst = difference;
            at = i;
            if (std::isnan(difference)) break;
        }
    }
    if (want.empty()) return;
    CAPTURE(at);
    CAPTURE(got[at]);
    CAPTURE(want[at]);
    CHECK(worst <= rel * largest);
}

// The text of the Error that `call` throws, or "" if it throws none.
static std::string error_of(const std::function<void()> &call) {
    try {
        call();
    } catch (const Error &e) {
        return e.what();
    }
    return "";
}

// Numbers from N(0, scale^2), the same for the same seed.
static Floats random_floats(size_t n, unsigned seed, float scale = 1) {
    std::mt19937 random(seed);
    std::normal_distribution<float> distribution(0, scale);
    Floats numbers(n);
    for (float &x : numbers) x = distribution(random);
    return numbers;
}

static Tensor on_host(const Floats &numbers, std::vector<int> shape) {
    Tensor t = empty(std::move(shape), cpu());
    REQUIRE((size_t)size(t) == numbers.size());
    std::copy(numbers.begin(), numbers.end(), t.data.get());
    return t;
}
static Tensor on_device(const Floats &numbers, std::vector<int> shape, Device device = gpu(0)) {
    return copyto(on_host(numbers, std::move(shape)), device);
}

constexpr int most_devices = 8; // the logical devices that the tests use: gpu(0) ... gpu(7)
