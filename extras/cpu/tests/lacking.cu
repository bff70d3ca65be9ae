// What the stand-in lacks: the compiler says so, in the line that uses it.
#include "tests.h"

// A program's lines, and what the compiler says of those that use what is lacking.
struct Lacking {
    std::string line, says;
};
static const std::string unavailable = "is unavailable: the stand-in lacks it";
static const Lacking lacking[] = {
    {"#include <thrust/device_vector.h>", "thrust/device_vector.h: the stand-in lacks it"},
    {"#include <curand_kernel.h>", "curand_kernel.h: the stand-in lacks it"},
    {"#include <cupti.h>", "cupti.h: the stand-in lacks it"}, // also where g++ would find it
    {"#include <nppi_filtering_functions.h>", "nppi_filtering_functions.h: the stand-in lacks it"},
    {"#include <cuda/std/atomic>", "cuda/std/atomic: the stand-in lacks it"},
    {"#include <crt/host_defines.h>", ""},
    {"#include <texture_types.h>", ""},
    {"#include \"tests/../cuda/types.h\"", ""}, // a folder cuda/ of one's own
    {"#include <helper_functions.h>", ""},
    {"#include <cuda_runtime.h>", ""},
    {"#include <cuda.h>", ""},
    {"void module(CUmodule *m) { cuModuleLoad(m, \"a.ptx\"); }", unavailable},
    {"#include <device_launch_parameters.h>", ""},
    {"void graph() { cudaGraphCreate(nullptr, 0); }", unavailable},
    {"void captured(cudaGraph_t) { cudaStreamBeginCapture(0, cudaStreamCaptureModeGlobal); }", ""},
    {"void object(cudaTextureObject_t) {}", unavailable},
    {"float fetch() { return tex2D<float>(0, 1); }", unavailable},
    {"void volume() { cudaMalloc3D(nullptr, 3); }", unavailable},
    {"void ipc() { cudaIpcGetMemHandle(0, 1); }", unavailable},
    {"void lane() { \141sm volatile(\"exit;\"); }", "inline PTX: the stand-in lacks it"},
    {"__device__ float *several, *pointers;",
     "declare one __device__ or __constant__ variable per line"},
    {"struct A { __device__ A &operator=(const A &) = default; };", ""},
    {"static int before; __shared__ float late;",
     "outside of functions, a declaration of shared memory must begin a line"},
    {"__constant__ struct { float x; } no_name;", "of a type that has a name"},
    {"struct __align__(16) Four { float x[4]; };", ""},
    {"void CUDART_CB called(void *) {}", ""},
    {"void attributes(cudaFuncAttributes *a) {}", unavailable},
    {"__global__ void trap_kernel() { __trap(); }", unavailable},
    {"#include <math_constants.h>", ""},
    {"__global__ void __maxnreg__(32) limited_kernel(const __grid_constant__ int n) {}", ""},
    {"void group(cooperative_groups::grid_group) {}", unavailable},
    {"__global__ void smallest_kernel(long long *x) { atomicMin(x, atomicMax(x, 3)); }", ""},
    {"__global__ void dim_kernel(dim3 *x) { *x = blockIdx; uint3 y = blockDim; x->x = y.x; }", ""},
    {"ushort4 vector(char1 x) { return make_ushort4(x.x, 1, 2, make_longlong2(3, 4).y); }", ""},
    {"template <class F> __global__ void apply_kernel(float *x, F f) { *x = f(*x); }", ""},
    {"void pass(float (*f)(float)) { apply_kernel<<<1, 1>>>(nullptr, f); }",
     "a function pointer as a kernel's argument: the stand-in lacks it"},
    {"__global__ void reference_kernel(int *x, const int &n) { *x = n; }", ""},
    {"void refer(int *x) { reference_kernel<<<1, 1>>>(x, 1); }",
     "a kernel's parameter cannot be a reference"},
    {"template <class T> __global__ void reference_of_kernel(T &x) { x = 1; } "
     "void refer() { int x; reference_of_kernel<<<1, 1>>>(x); }",
     "is unavailable: a kernel's parameter cannot be a reference"},
    {"void odd(float *x) { apply_kernel<<<1, 2>>>; }", // the student's line:
     ": void odd(float *x) { apply_kernel<<<1, 2>>>; }\nbuild/lacking."},
    {"struct Queue { cudaStream_t x; } queue; struct Own { operator cudaStream_t() const; } own;",
     ""},
    {"void no_stream() { dim_kernel<<<1, 1, 0, queue>>>(nullptr); }",
     "fourth argument of a launch must be a cudaStream_t"},
    {"void no() { dim_kernel<<<1, 1, 0, own>>>(nullptr), dim_kernel<<<1, 1, 0, 0>>>(nullptr); }",
     ""},
    {"__device__ constexpr int n = 2, m = 3;", ""},
    {"__constant__ float several_arrays[n], of_floats[n][m];", ""},
    {"template <class T> __device__ T twice(T x, int y = 1) { return x + x + y; }", ""},
};
TEST_CASE("what the stand-in lacks is an error of the compiler's that says so") {
#if defined(__clang__)
    const std::string compiler = "clang++";
#else
    const std::string compiler = "g++";
#endif
#if defined(__clang__) || __GNUC__ >= 12
    const std::string file = "build/lacking." + std::to_string(getpid());
    {
        std::ofstream program(file);
        for (const Lacking &l : lacking) program << l.line << "\n";
    }
    const std::string command = "exec 2>&1; command -v " + compiler + " >/dev/null || exit 3; " +
                                "sh extras/cpu/to_cpp.sh " + file + " | LC_ALL=C " + compiler +
                                " -std=c++17 -Iextras/cpu -fsyntax-only -w -x c++ -";
    int status = 0;
    const std::string output = "\n" + output_of_shell(command, status);
    unlink(file.c_str());
    if (WEXITSTATUS(status) != 3) {
        for (size_t i = 0; i < std::size(lacking); i++) { // each is named by the line it stands in
            const std::string here = "\n<stdin>:" + std::to_string(i + 1) + ":";
            CAPTURE(lacking[i].line);
            CAPTURE(output);
            CHECK((output.find(here) != std::string::npos) == (lacking[i].says != ""));
            CHECK(output.find(lacking[i].says) != std::string::npos);
        }
        return;
    }
#endif
    MESSAGE("skipped: needs g++ 12 or clang++, not " << compiler);
}

// Where there is clang++, make cu tells what nvcc would refuse and g++ does not.
TEST_CASE("what nvcc refuses and g++ does not is told in its line") {
    static const Lacking lines[] = {
        {"#include <algorithm>", ""},
        {"float square(float x) { return x * x; }", ""},
        {"constexpr int twice(int x) { return 2 * x; }", ""},
        {"const int five = 5; float pi = 3.14f;", ""},
        {"__device__ float half_of(float x) { return x / five + std::sqrt(x) + max(x, 1.f); }", ""},
        {"template <class F> __global__ void right(float *x, F f) { *x = f(half_of(*x)); }", ""},
        {"__global__ void calls(float *x) { *x = square(*x); }", "the __host__ function 'square'"},
        {"__global__ void evaluates(float *x) { *x = twice(*x); }", "__host__ function 'twice'"},
        {"__global__ void greatest(float *x) { *x = std::max(*x, 1.f); }", "function 'max'"},
        {"__global__ void reads(float *x) { *x = pi; }", "__host__ variable 'pi'"},
        {"__global__ void throws(float *x) { if (*x > 1) throw 1; }", "cannot use 'throw'"},
        {"__global__ void list(float *x, int n) { int a[n]; *x = a[1]; }",
         "variable-length arrays"},
        {"void forgotten(float *x) { *x = 1; }", ""},
        {"int main() { float *x; cudaMalloc(&x, 4); forgotten<<<1, 1>>>(x); }",
         "call to non-global"},
    };
    const std::string file = "build/refused." + std::to_string(getpid()) + ".cu";
    {
        std::ofstream program(file);
        for (const Lacking &l : lines) program << l.line << "\n";
    }
    int status = 0;
    const std::string output = output_of_shell(
        "command -v clang++ >/dev/null || exit 3; CU_ON=cpu CU_FILE=" + file +
            " CU_COMPILE='g++ "
            "-std=c++17 -pthread -w -Iextras/cpu -include extras/cpu/cuda_runtime.h' "
            "CU_OBJECTS=build/cpu/runtime.o CHECK= sh extras/cpu/cu.sh 2>&1",
        status);
    unlink(file.c_str());
    CAPTURE(output);
    for (size_t i = 0; i < std::size(lines) && WEXITSTATUS(status) != 3; i++) {
        const std::string here =
            file + ":" + std::to_string(i + 1) + ": notice: nvcc would refuse ";
        CAPTURE(lines[i].line);
        CHECK((output.find(here) != std::string::npos) == (lines[i].says != ""));
        CHECK(output.find(lines[i].says) != std::string::npos);
    }
    if (WEXITSTATUS(status) == 3) MESSAGE("skipped: needs clang++");
    else CHECK(status == 0);
}

TEST_CASE("every header of CUDA's toolkit is there or says that the stand-in lacks it") {
    int status = 0;
    const std::string output = output_of_shell(
        "nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc) 2>/dev/null || exit 3\n"
        "cd \"$(dirname \"$(readlink -f $nvcc)\")/../include\" 2>/dev/null || exit 3\n"
        "find -L . -maxdepth 2 -name '*.h*' -type f | sed 's,^./\\(.*\\),#include <\\1>,' |\n"
        "    LC_ALL=C sed -zEf \"$OLDPWD/extras/cpu/to_cpp.sed\" |\n"
        "    sed -n 's,^#include <\\(.*\\)>,\\1,p' | sort -u | while read -r header; do\n"
        "        [ -e \"$OLDPWD/extras/cpu/$header\" ] || echo \"$header\"\n"
        "    done",
        status);
    if (WEXITSTATUS(status) == 3) MESSAGE("skipped: needs nvcc");
    else CHECK(output == "");
}

TEST_CASE("make cu: a line for a name or a header that is not there") {
    const std::pair<std::string, std::string> programs[] = {
        {"int main() { cudaNoSuchCall(); }",
         ":1: cudaNoSuchCall: the stand-in lacks it, or CUDA has no such name\n"},
        {"\n#include <helper_none.h>",
         ":2: helper_none.h: the stand-in lacks it, or CUDA has no such name\n"},
        {"#include <none/mpi.h>\nint main() { own(); }", ""},
        {"extern \"C\" int MPI_Init(); int main() { MPI_Init(); }",
         "make cu: a program with MPI needs the compiler of MPI: CXX=mpicxx\n"},
        {"#include <cub/cub.cuh>\nint main() { cudaNoSuchCall(); }",
         "cub/cub.cuh: the stand-in lacks it"}};
    for (const auto &[text, says] : programs) {
        CAPTURE(text);
        const std::string file = "build/lacking." + std::to_string(getpid()) + ".cu";
        std::ofstream(file) << text << "\n";
        int status = 0;
        const std::string output = output_of_shell(
            "CU_ON=cpu CU_FILE=" + file +
                " CU_COMPILE='g++ -std=c++17 -pthread -w -Iextras/cpu "
                "-include extras/cpu/cuda_runtime.h' CU_OBJECTS=build/cpu/runtime.o CHECK= "
                "sh extras/cpu/cu.sh 2>&1",
            status);
        unlink(file.c_str());
        CAPTURE(output);
        CHECK(status != 0);
        CHECK(output.find(says) != std::string::npos);
        if (says.empty()) CHECK(output.find(" lacks it") == std::string::npos);
        CHECK(output.find("error:") == output.rfind("error:"));
    }
}
