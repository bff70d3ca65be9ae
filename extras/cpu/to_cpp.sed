# Puts into C++ what only nvcc understands, for g++: LC_ALL=C sed -zEf extras/cpu/to_cpp.sed mgpu.cu
#
#   in CUDA                            in C++, shortened
#   kernel<T><<<grid, block>>>(x, n)   configured(Launch("kernel<T>", grid, block), ...)(x, n)
#   __shared__ T a[8][9], b[8];        auto &a = shared_memory<T[8][9]>(); auto &b = ...
#   extern __shared__ T a[];           T *a = dynamic_shared<T>();
#   __device__ T x[8] = {1};           T x_initial[8] = {1}; auto &x = device_variable(x_initial);
#   extern __device__ T x[8];          extern T x_initial[8]; extern decltype(x_initial) &x;
#
# cuda_runtime.h declares these functions. Because of -z the whole file is one text, in which \n
# is a character like others: a launch may take several lines. Every rule leaves each \n in its
# place, so that errors and debuggers name the lines of the .cu file. Characters that no source
# file has mark what was found: \f here, \a and \v for launches. A byte-order mark says nothing.
s/^\xEF\xBB\xBF//

# 1. Words in a "string", behind // or in a /* comment */ are no code. There <<< and __shared__ are
#    broken up, so that no rule below sees them: "<<" "<" is the same string as "<<<", and a comment
#    may say <<. <. So is /*, where it begins no comment.
:string
s~(^|\n)(([^"\n]|"([^"\\\n]|\\.)*")*"([^"\\\n]|\\.)*)(<<|__shared|__device|__constant|/)([ \t]*<|__|\*)~\1\2\6" "\7~g
t string
:comment
s~(^|\n)(([^"\n]|"([^"\\\n]|\\.)*")*(//[^\n]*|/))(<<|__shared|__device|__constant|/)([ \t]*<|__|\*)~\1\2\6. \7~g
t comment
:block_comment
s~(/\*([^*]|\*+[^*/])*)(<<|__shared|__device|__constant)([ \t]*<|__)~\1\3. \4~g
t block_comment

# 2. Shared memory. Several variables in a declaration get a declaration each. A type is one or
#    more words, each perhaps with <template arguments>.            \1 __shared__ type  \5 a[8][9]
#    What else may stand there: static says nothing new, and all variables are aligned
s/(__(shared|device|constant)__[ \t]+)(__align__|alignas)[ \t]*\(([^()]|\([^()]*\))*\)/\1/g
s/static[ \t]+((volatile[ \t]+)?__shared__)/\1/g
s/volatile[ \t]+((extern[ \t]+)?__shared__)/\1 volatile/g
:variables
s/(__shared__[ \t]+((\w|:)+(<[^<>;]*>)?[ \t]+)+)(\w+[ \t]*(\[[^];]+\][ \t]*)*),/\1\5; \1/g
t variables
#    Found: \f type \f name \f [8][9] \f
s/__shared__[ \t]+(((\w|:)+(<[^<>;]*>)?[ \t*]+)+)(\w+)[ \t]*(\[[^;\n]*\])?[ \t]*;/\f\1\f\5\f\6\f;/g
#    At the top of a file, at the beginning of a line: an object that finds the memory at each use
s/(^|\n)extern[ \t]+\f([^\f]+)\f([^\f]+)\f\[[ \t]*\]\f/\1static const ::cuda_cpu::SharedOfFile<\2[]> \3/g
s/(^|\n)\f([^\f]+)\f([^\f]+)\f([^\f]*)\f/\1struct \3_shared { static auto name() { return "\3"; } static auto file() { return __FILE__; } static auto line() { return __LINE__; } }; static const ::cuda_cpu::SharedOfFile<\2\4, \3_shared> \3/g
#    Dynamic: a pointer to it
s/extern[ \t]+\f([^\f]+)\f([^\f]+)\f\[[ \t]*\]\f/\1*\2 = ::cuda_cpu::dynamic_shared<\1>()/g
#    Static: a reference to it. A type of its own tells it from other variables of the same type.
s/\f([^\f]+)\f([^\f]+)\f([^\f]*)\f/struct \2_shared { static auto name() { return "\2"; } static auto file() { return __FILE__; } static auto line() { return __LINE__; } }; auto \&\2 = \f<\1\3, \2_shared>()/g
s/\f/::cuda_cpu::shared_memory/g
#    Pointers to what is volatile, which is mostly shared memory: see Volatile in cuda/blocks.h. A
#    variable that has a value, and a function's arguments     \1 volatile type *  \3 name
s/([;{}][ \t\n]*(const[ \t]+)?volatile[ \t]+[^][,;(){}*&=\n]*\*[ \t]*)(\w+)([ \t]*=[^;{}]*;)/\1\3_volatile\4 ::cuda_cpu::Volatile \3(\3_volatile);/g
:volatile_arguments
s/(__device__[^;{}()]*\([^;{}()]*volatile[^][,;(){}*&]*\*[ \t]*(__restrict__[ \t]*)?)(\w+)([ \t]*[,)][^;{}]*\{)/\1\f\3_volatile\4 ::cuda_cpu::Volatile \3(\3_volatile);/
t volatile_arguments
s/\f//g

# 3. Variables of a device. The compiler knows those that are constexpr. For the others each thread
#    of the operating system has a reference of its own, to what the device it works for has.
s/__device__[ \t]+__constant__|__constant__[ \t]+__device__/__constant__/g
:specifiers
s/([^[:alnum:]_])(static|inline|const|extern)([ \t]+)__(device|constant)__/\1__\4__\3\2/g
s/^(static|inline|const|extern)([ \t]+)__(device|constant)__/__\3__\2\1/
t specifiers
s/__(device|constant)__([ \t]+(\w+[ \t]+)*constexpr)/\2/g
s/(constexpr[ \t]+(\w+[ \t]+)*)__(device|constant)__/\1/g
#    operator= and operator[] are functions
s/operator[ \t]*[=[]/\f&/g
:device_variables
s/(__(device|constant)__[ \t]+((\w|:)+(<[^<>;]*>)?[ \t]+)+)(\w+[ \t]*(\[[^];]*\][ \t]*)*(=[^;,(){}]*)?),/\1\6; \1/g
t device_variables
#    \1 kind  \2 type  \6 name  \7 [8][9]  \9 = {1}. The reference is static if the variable is
s/__(device|constant)__[ \t]+(extern[ \t]+((\w|:)+(<[^<>;]*>)?[ \t*]+)+)(\w+)[ \t]*((\[[^];]*\][ \t]*)*);/\2\6_initial\7; extern thread_local decltype(\6_initial) \&\6;/g
s/__(device|constant)__[ \t]+(((\w|:)+(<[^<>;]*>)?[ \t*]+)+)(\w+)[ \t]*((\[[^];]*\][ \t]*)*)(=[^;]*|\{[^;]*\})?;/\2\6_initial\7\9; [[maybe_unused]] \a\2\vthread_local decltype(\6_initial) \&\6 = ::cuda_cpu::\1_variable(\6_initial, "\6", __FILE__, __LINE__); static const bool \6_on_start = ::cuda_cpu::add_on_start([] { (void)\&\6; });/g
s/\a([^\v]*[ \t])?(static|const)[ \t][^\v]*\v/static /g
s/\ainline[ \t][^\v]*\v/inline /g
s/\a[^\v]*\v//g
#    What is left are several pointers in a declaration, or what these rules do not understand
s/__(device|constant)__([ \t]+((\w|:)+(<[^<>;]*>)?[ \t*]+)+\w+[ \t]*[=,;[])/CUDA_CPU_NOT_UNDERSTOOD \2/g
s/__constant__/CUDA_CPU_NOT_UNDERSTOOD/g
s/\f//g
#    A macro of this name would break the C++ library's headers
s/([^([:alnum:]_])__noinline__/\1__attribute__((noinline))/g

# 4. What the stand-in lacks: headers, and inline PTX. Four headers are part of cuda_runtime.h, and
#    one has moved.
s/((^|\n)[ \t]*#[ \t]*include[ \t]*[<"])nvToolsExt\.h/\1nvtx3\/nvToolsExt.h/g
s/((^|\n)[ \t]*#[ \t]*include[ \t]*[<"])(device_launch_parameters|cuda_runtime_api|cooperative_groups(\/reduce)?)\.h/\1cuda_runtime.h/g
s/(^|\n)[ \t]*#[ \t]*include[ \t]*[<"]((cooperative_groups|cub\/|cublas|cuda\/|cuda_[bf][fp]|cudnn|cufft|curand|cusolver|cusparse|mma|nccl|nv([^t]|t[^x])|thrust\/)[^>"\n]*)[>"]/\1#error \2: the stand-in lacks it/g
#    A file is compiled once, for the host and the device: __CUDA_ARCH__ is not defined, but code for
#    newer GPUs is chosen, by this number of CUDA 13's oldest one
:architecture
s/((^|\n)[ \t]*#[ \t]*(el)?if[^\n]*[^[:alnum:]_])__CUDA_ARCH__([ \t]*[<>=!])/\1750\4/
t architecture
s/([^"[:alnum:]_])(asm|__asm__)([ \t\n]+(__)?volatile(__)?)?([ \t\n]*\()/\1CUDA_CPU_LACKS_ASSEMBLY \2\3\6/g

# 5. Launches. <<< and >>> become one character each, so that "all up to >>>" can be said. Some
#    editors write << < and >> >; so do declarations, of operator<< <T> and of vector<pair<T>> >(n).
s/(operator[ \t]*<<)[ \t]+</\1\f</g
s/<<[ \t]*</\a/g
s/\f/ /g
s/>>>/\v/g
s/(\a([^;\a\v>]|>[^>]|>>[ \t]*[^> \t])*)>>[ \t]+>([ \t\n]*\()/\1\v\3/g
#    A grid, block, ... have no ; and no { but those of dim3{1, 2}.  Found: \x01 grid, block, ... \f
s/(\s*)\a(([^;{}\a\v]|\{([^;{}\a\v]|\{[^;{}\a\v]*\})*\})+)\v(\s*)\(/\x01\1\2\f\5(/g
#    A kernel is a name, perhaps with template arguments that are nested at most once, or a pointer
#    to one: list[i], form.kernel                    Found: \x02 kernel \f grid, block, ... \f
s/((\w+(\[[^][;\n\x01]*\])?(\.|->))*(\w|:)+(\[[^][;\n\x01]*\]|[ \t]*<([^<>;\n\x01]|<[^<>;\n]*>)*>)?)\x01/\x02\1\f/g
#    What is left was no launch, or one that these rules do not understand: make then says so
s/\x01([^\f]*)\f/<<<\1>>>/g
s/\a/<<</g
s/\v/>>>/g
#    Now \a begins the launch, and \v the function that calls the kernel
s/\x02([^\f]*(\.|->|\])[^\f]*)\f([^\f]+)\f/(\a("\1", __FILE__, __LINE__, \3), [pointer = \1](auto... arguments) { pointer(arguments...); }))/g
s/\x02([^\f]+)\f([^\f]+)\f/(\a("\1", __FILE__, __LINE__, \2), \v { \1(arguments...); }))/g
s/\a/::cuda_cpu::configured(::cuda_cpu::Launch/g
s/\v/[=](auto... arguments)/g
