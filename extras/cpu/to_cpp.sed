# Puts into C++ what only nvcc understands, for g++: sh extras/cpu/to_cpp.sh mgpu.cu
#
#   in CUDA                            in C++, shortened
#   kernel<T><<<grid, block>>>(x, n)   configured(Launch("kernel<T>", grid, block), ...)(x, n)
#   __launch_bounds__(64) k() {        __launch_bounds__(64) k() { CUDA_CPU_LAUNCH_BOUNDS(64);
#   __shared__ T a[8][9], b[8];        auto &a = shared_memory<T[8][9]>(); auto &b = ...
#   extern __shared__ T a[];           T *a = dynamic_shared<T>();
#   __device__ T x[8] = {1};           T x_initial[8] = {1}; auto &x = device_variable(x_initial);
#   extern __device__ T x[8];          extern T x_initial[8]; extern decltype(x_initial) &x;
#
# cuda_runtime.h declares these functions. The text comes from to_cpp.awk, which says what it has
# marked: some definitions at a time, in which \n is a character like others, so that a launch may
# take several lines. Every rule leaves each \n in its place, so that errors and debuggers name the
# lines of the .cu file. Characters that no source file has mark what was found: \f here, \a and \v
# for launches. A byte-order mark says nothing.

# 1. A comment or a string is no code. Where it was, there is \x06 and its number.
/^\x05/b
s/^\xEF\xBB\xBF//

# 2. A qualifier goes before all else of a declaration, but for template<>: \f keeps it behind that.
#    The ends of lines between its words go before it, too.
s/template[ \t\n]*<([^<>;{}]|<([^<>;{}]|<[^<>;{}]*>)*>)*>/&\f/g
s/(^|[;{}\n\f\x0f])([ \t]*)(((\w|::)+(<([^<>;]|<[^<>;]*>)*>)?[ \t*&]+)+)__(shared|device|constant)__/\1\2__\8__ \3/g
s/\f//g
:breaks
s/(^|[;{}\n\x0f])([ \t]*)(__(shared|device|constant)__[^;\n=(){}\\#]+)\n([ \t\n]*[^# \t\n])/\1\2\n\3 \5/
t breaks
#    A kernel has no more threads than it says
s/(__launch_bounds__[ \t]*\([ \t]*)(([^(),]|\(([^()]|\([^()]*\))*\))+)([^;\x0f]*\x0f)/\1\2\5 CUDA_CPU_LAUNCH_BOUNDS(\2);/g
#    The parameters of a kernel are copies
s/__global__([^;{}()]*(\(([^;{}()]|\([^;{}()]*\))*\)[^;{}()]*)?[[:alnum:]_][ \t\n]*\([^;{}()]*&[ \t]*\w+[ \t]*[,)])/CUDA_CPU_REFERENCE __global__\1/g
#    A kernel is inline by itself, but where it is instantiated
s/(template[ \t\n]+)__global__/\1/g
s/inline[ \t]+((\w+[ \t]+)*__global__)/\1/g
s/(__global__[ \t]+(\w+[ \t]+)*)inline[ \t]/\1/g

# 3. Shared memory. Several variables in a declaration get a declaration each, and a type without a
#    name gets one. A type is all up to a name that [8][9], a comma or a semicolon follows.
#    What else may stand there: static says nothing new, and all variables are aligned
s/(__(shared|device|constant)__[ \t]+((static|const|volatile|extern)[ \t]+)*)(__align__|alignas)[ \t]*\(([^()]|\([^()]*\))*\)/\1/g
s/(__shared__[ \t]+(\w+[ \t]+)*)static[ \t]+/\1/g
s/__shared__[ \t]+(volatile[ \t]+)?(struct|union)([ \t\n]*\{\x10[^\x11]*\x11)[ \t\n]*(\w+)/\2 \4_type\3; __shared__ \1\4_type \4/g
s/__shared__[ \t]+(volatile[ \t]+)?(struct|union)[ \t]+(\w+)([ \t\n]*\{\x10[^\x11]*\x11)[ \t\n]*(\w+)/\2 \3\4; __shared__ \1\3 \5/g
:variables
s/(__shared__[ \t]+([^][,;<>(){}=]|<([^<>;]|<([^<>;]|<[^<>;]*>)*>)*>|\(([^();]|\([^();]*\))*\))*[ \t>)*])(\w+[ \t]*(\[[^];]+\][ \t]*)*),/\1\6; \1/
t variables
#    Found: \f type \f name \f [8][9] \f
s/__shared__[ \t]+(([^][,;<>(){}=]|<([^<>;]|<([^<>;]|<[^<>;]*>)*>)*>|\(([^();]|\([^();]*\))*\))*[ \t>)*])(\w+)[ \t]*((\[[^];]*\][ \t]*)*);/\f\1\f\6\f\7\f;/g
#    At the top of a file, at the beginning of a line: an object that finds the memory at each use,
#    which *name is unless it is an array: to_cpp.sh puts that wherever \x0e name \x0e is used
s/(^|\n)\fextern[ \t]+([^\f]+)\f([^\f]+)\f(\[[ \t]*\])\f/\1static const ::cuda_cpu::SharedOfFile<\2[]> \3/g
s/(^|\n)\fextern[ \t]+([^\f]+)\f([^\f]+)\f\f/\1static const ::cuda_cpu::SharedOfFile<\2> \x0e\3\x0e/g
s/(^|\n)\f([^\f]+)\f([^\f]+)\f(\[[^\f]*)\f/\1\x02\3\x02 static const ::cuda_cpu::SharedOfFile<\2\4, \3_shared> \3/g
s/(^|\n)\f([^\f]+)\f([^\f]+)\f\f/\1\x02\3\x02 static const ::cuda_cpu::SharedOfFile<\2, \3_shared> \x0e\3\x0e/g
#    Dynamic: a pointer to it, or a reference
s/\fextern[ \t]+([^\f]+)\f([^\f]+)\f\[[ \t]*\]\f/\1*\2 = ::cuda_cpu::dynamic_shared<\1>()/g
s/\fextern[ \t]+([^\f]+)\f([^\f]+)\f\[[ \t]*\](\[[^\f]*)\f/auto *\2 = ::cuda_cpu::dynamic_shared<\1\3>()/g
s/\fextern[ \t]+([^\f]+)\f([^\f]+)\f\f/\1\&\2 = *::cuda_cpu::dynamic_shared<\1>()/g
#    Static: a reference to it. A type of its own tells it from other variables of the same type.
s/\f([^\f]+)\f([^\f]+)\f([^\f]*)\f/\x02\2\x02 static_assert(*__builtin_FUNCTION(), "outside of functions, a declaration of shared memory must begin a line"); auto \&\2 = ::cuda_cpu::shared_memory<\1\3, \2_shared>()/g
s/\x02(\w+)\x02/struct \1_shared { static auto name() { return "\1"; } static auto file() { return __FILE__; } static auto line() { return __LINE__; } };/g
#    Pointers to what is volatile: see Volatile in cuda/blocks.h. Casts, a variable that has a value,
#    and a function's arguments
s/([^[:alnum:]_])\(((const[ \t]+)?volatile[ \t][^][,;(){}*&=\n]*[^][,;(){}*&= \t\n])([ \t]*\*[ \t]*\))([ \t]*[[:alnum:]_(&*])/\1(::cuda_cpu::Volatile<\2>)(\2\4\5/g
s/((^|[;{}\x0f])([ \t\n]|\x06[0-9]+\x06)*(const[ \t]+)?volatile[ \t]+[^][,;(){}*&=\n]*\*[ \t]*(const[ \t]+)?)(\w+)([ \t]*=[^;{}]*;)/\1\6_volatile\7 ::cuda_cpu::Volatile \6(\6_volatile);/g
:volatile_arguments
s/(__(device|global)__[^;{}()]*\([^;{}()]*volatile[^][,;(){}*&]*\*[ \t]*((__restrict__|const)[ \t]+)?)(\w+)([ \t]*[,)][^;\x0f]*\x0f)/\1\f\5_volatile\6 ::cuda_cpu::Volatile \5(\5_volatile);/
t volatile_arguments
s/\f//g

# 4. Variables of a device. The compiler knows those that are constexpr. For the others each thread
#    of the operating system has a reference of its own, to what the device it works for has.
s/__device__[ \t]+__constant__|__constant__[ \t]+__device__/__constant__/g
s/__(device|constant)__([ \t]+(\w+[ \t]+)*constexpr)/\2/g
#    operator= and operator[] are functions
s/operator[ \t]*[=[]/\f&/g
:device_variables
s/(__(device|constant)__[ \t]+((\w|:)+(<[^<>;]*>)?[ \t]+)+)(\w+[ \t]*(\[[^];]*\][ \t]*)*((=|\{)[^;,]*)?),/\1\6; \1/g
t device_variables
#    \1 kind  \2 type  \6 name  \7 [8][9]  \9 = {1}. The reference is static if the variable is
s/__(device|constant)__[ \t]+(extern[ \t]+((\w|:)+(<[^<>;]*>)?[ \t*]+)+)(\w+)[ \t]*((\[[^];]*\][ \t]*)*);/\2\6_initial\7; extern thread_local ::cuda_cpu::Watched<decltype(\6_initial)> \&\6;/g
s/__(device|constant)__[ \t]+(((\w|:)+(<[^<>;]*>)?[ \t*]+)+)(\w+)[ \t]*((\[[^];]*\][ \t]*)*)(=[^;]*|\{[^;]*\})?;/\2\6_initial\7\9; [[maybe_unused]] \a\2\vthread_local ::cuda_cpu::Watched<decltype(\6_initial)> \&\6 = ::cuda_cpu::\1_variable(\6_initial, "\6", __FILE__, __LINE__); [[maybe_unused]] static const bool \6_on_start = ::cuda_cpu::add_on_start([] { (void)\&\6; });/g
s/\a([^\v]*[ \t])?(static|const)[ \t][^\v]*\v/static /g
s/\ainline[ \t][^\v]*\v/inline /g
s/\a[^\v]*\v//g
#    What is left are several pointers in a declaration, or what these rules do not understand
s/__(device|constant)__([ \t]+((\w|:)+(<[^<>;]*>)?[ \t*]+)+\w+[ \t]*[=,;[])/CUDA_CPU_NOT_UNDERSTOOD \2/g
s/__constant__/CUDA_CPU_NOT_UNDERSTOOD/g
s/\f//g
#    A macro of this name would break the C++ library's headers
s/([^([:alnum:]_])__noinline__/\1__attribute__((noinline))/g

# 5. What the stand-in lacks: headers, and inline PTX. Of CUDA's toolkit, some headers are part of
#    cuda_runtime.h, and one has moved; g++ must not find any other in its own path.
s/((^|\n)[ \t]*#[ \t]*include[ \t]*[<"])nvToolsExt\.h/\1nvtx3\/nvToolsExt.h/g
s/((^|\n)[ \t]*#[ \t]*include[ \t]*[<"])(nvtx3\/nv(ToolsExt\.h|tx3\.hpp))/\1\f\3/g
s/((^|\n)[ \t]*#[ \t]*include[ \t]*[<"])((crt\/)?(device_(launch_parameters|(double_)?functions|types|atomic_functions)|host_(defines|config)|math_(functions|constants)|sm_[0-9]+_(atomic_functions|intrinsics))|cuda_(runtime_api|device_runtime_api|stdint|(texture|surface)_types)|cooperative_groups(\/reduce)?|vector_(types|functions)|driver_(types|functions)|builtin_types|channel_descriptor|common_functions|(texture|surface)_(types|fetch_functions|functions|indirect_functions))\.hp?p?/\1cuda_runtime.h/g
s/(^|\n)[ \t]*#[ \t]*include[ \t]*[<"](((crt|cub|nvtx3|nccl_device|thrust|cooperative_groups|Openacc|Openmp)\/[^>"\n]*|cccl\/[^>"\n]*|(cuda|nv)\/[^.>"\n]*|(cublas(Lt|Xt|_api|_v2)?|cuda(Typedefs|(D3D[0-9]+|EGL|GL|Profiler|VDPAU)(Typedefs)?|_(awbarrier|pipeline)(_helpers|_primitives)?|_bf16|_fp[0-9]+|_(d3d[0-9]+|egl|gl|vdpau)_interop|_occupancy|libxt|rt_platform)|cudnn(_(adv|backend|cnn|graph|ops|version)(_infer|_train)?)?(_v[0-9]+)?|cufft(Xt|w)?|cufile|cupti(_\w+)?|curand(_(discrete2?|globals|kernel|lognormal|mrg32k3a|mtgp32\w*|normal(_static)?|philox4x32_x|poisson|precalc|uniform))?|cusolver(_common|(Dn|Mg|Rf|Sp)\w*)|cusparse(Lt|_v2)?|fatbinary_section|generated_\w+_meta|library_types|mma|nccl(_device|_net)?|npp(core|defs|version|[is](_\w+)?)?|nv(JitLink|PTXCompiler|_decode|blas|fatbin|graph|jpeg|ml|perf_\w+|rtc|shmemx?|vm)|nvToolsExt\w+)\.hp?p?))[>"]/\1#error \2: the stand-in lacks it/g
s/\f//g
#    A file is compiled once, for the host and the device: __CUDA_ARCH__ is not defined, but code for
#    newer GPUs is chosen, by this number of CUDA 13's oldest one
:architecture
s/((^|\n)[ \t]*#[ \t]*(el)?if[^\n]*[^[:alnum:]_])__CUDA_ARCH__([ \t]*[<>=!])/\1750\4/
t architecture
s/([^"[:alnum:]_])(asm|__asm__)([ \t\n]+(__)?volatile(__)?)?([ \t\n]*\()/\1CUDA_CPU_LACKS_ASSEMBLY \2\3\6/g

# 6. Launches. <<< and >>> become one character each, so that "all up to >>>" can be said. Some
#    editors write << < and >> >; so do declarations, of operator<< <T> and of vector<pair<T>> >(n).
s/(operator[ \t]*<<)[ \t]+</\1\f</g
s/<<[ \t]*</\a/g
s/\f/ /g
s/>>>/\v/g
s/(\a([^;\a\v>]|>[^>]|>>[ \t]*[^> \t])*)>>[ \t]+>([ \t\n]*\()/\1\v\3/g
#    A macro may end there: the arguments stand where it is used
s/((^|\n)[ \t]*#[ \t]*define[^\n]*\v)[ \t]*\n/\1(\x04\n/g
#    Found: \x01 grid, block, ... \f
s/(\s*)\a([^;{}\a\v]+)\v(\s*)\(/\x01\1\2\f\3(/g
#    A kernel is a name, perhaps with template arguments, in which all may stand between ( and ), or
#    a pointer to one: list[i], form.kernel, (*f)    Found: \x02 kernel \f grid, block, ... \f
:kernel_breaks
s/(<([^<>(){};\n\x01]|<[^<>;{}\n\x01]*>|\([^();\n]*\))*)\n(([^<>(){};\n\x01]|<[^<>;{}\n\x01]*>|\([^();\n]*\))*>[ \t]*\x01)/\1 \3\n/
t kernel_breaks
s/(^|[^][:alnum:]_>)])\([ \t]*((\w|:)+[ \t]*(<([^][<>();{}\n\x01]|<[^<>;{}\n]*>|\([^();{}\n]*\))*>)?)[ \t]*\)\x01/\1\2\x01/g
s/(((\w|:)+([ \t]*<([^][<>();{}\n\x01]|<[^<>;{}\n]*>|\(([^();\n]|\([^();\n]*\))*\))*>)?|\(([^();\n\x01]|\(([^();\n]|\([^();\n]*\))*\))*\))((\.|->)\w+|\[[^][;\n\x01]*\]|\(([^();\n\x01]|\([^();\n]*\))*\))*)\x01/\x02\1\f/g
#    What is left was no launch, or one that these rules do not understand: make then says so
s/\x01([^\f]*)\f/<<<\1>>>/g
s/\(\x04//g
s/\a/<<</g
s/\v/>>>/g
#    Now \a begins the launch, and \v the function that calls the kernel
#    (In kernel<V()>, V may be the parameter of a function around this one: g++ 13 wants no decltype;
#    in kernel<V>, a constant of it: clang++ 19 wants [=] before one)
s/\x02((\w|:)+[ \t]*<[^\f]*\(\)[^\f]*>)\f([^\f]+)\f/(\a("\1", __FILE__, __LINE__, \3), [=](auto... arguments) CUDA_CPU_CALLER { \1(arguments...); }, 0))/g
s/\x02((\w|:)+[ \t]*(<[^\f]*>)?)\f([^\f]+)\f/(\a("\1", __FILE__, __LINE__, \4), \v \1(arguments...); }, \x03\1)) { return {}; }))/g
s/\x02([^\f]+)\f([^\f]+)\f/(\a("\1", __FILE__, __LINE__, \2), [pointer = \1](auto... arguments) CUDA_CPU_CALLER { pointer(arguments...); }, \x03\1)) { return {}; }))/g
s/\a/::cuda_cpu::configured(::cuda_cpu::Launch/g
s/\v([^}]*); }/[=](auto... arguments) CUDA_CPU_CALLER -> decltype(\1) {\1; }/g
s/\x03/[=](auto z) -> decltype(::cuda_cpu::parameters(z, /g

# 7. The marks of to_cpp.awk
y/\x12\x13\x14\x15/{};,/
s/[\x0f-\x11]//g
