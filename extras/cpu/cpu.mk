# The CPU stand-in; the tests under sanitizers and in other orders of lanes; programs of one's own.

# MARCH          processor of the stand-in; empty where the compiler does not know -march=native
# CPUFLAGS       compiler flags of the stand-in
# FILE           make cu: the program, one or more .cu files, such as FILE='own.cu kernels.cu'
# INCLUDE        make cu: folders with headers, such as INCLUDE='common ../samples/Common'
# ARGS           make cu: arguments of the program, quoted as in a shell
# CHECK          make cu: asan, race or lanes: run the program as make asan, race or lanes would
own += MARCH CPUFLAGS FILE INCLUDE ARGS CHECK
unexport FILE INCLUDE # make would expand a $ in them

# ----- The stand-in ---------------------------------------------------------------------------

CXX := $(if $(filter default,$(origin CXX)),$(notdir \
    $(shell command -v g++ || command -v clang++ || echo g++)),$(CXX))
clang := $(shell $(CXX) -dM -E -x c++ /dev/null 2>/dev/null | grep -ow __clang__)
# (On a processor with AVX10.1, g++ 14 and 15 warn of their own -march=native)
MARCH ?= $(shell said=$$($(CXX) -march=native -x c++ -E /dev/null 2>&1 >/dev/null) && \
    case $$said in (*avx10*) echo -march=x86-64-v4 -mtune=native ;; (*) echo -march=native ;; esac)
# AVX-512 where there is one: compilers avoid it on some processors that have it
wide := $(shell $(CXX) -mprefer-vector-width=512 -x c++ -E /dev/null >/dev/null 2>&1 && \
    echo -mprefer-vector-width=512)
# (g++: -Og, and garbage of up to a GB, compile quickly; kernels get -O3 in cuda/types.h. The two
# flags after -Og: g++ inlines a function early only if these agree with its caller's, also where
# one comes from a .gch and the other has `numbers`, below. Late is too late for vectors.)
CPUFLAGS ?= -std=c++17 $(MARCH) $(wide) -fopenmp-simd -g1 -Wall -Wextra -Wno-psabi \
    $(if $(clang),-O3 -Wno-pass-failed -Wno-unknown-warning-option -Wno-ignored-gch \
    -fstack-clash-protection,\
    -Og -fstrict-aliasing -fno-aggressive-loop-optimizations --param ggc-min-heapsize=1000000)
cpu_flags = $(CPUFLAGS) -D_GLIBCXX_ASSERTIONS $(if $(WERROR),-Werror) -pthread -Iextras/cpu

# Conversions and shifts whose results are others on a GPU are told: see checks.cc
numbers := $(foreach what,sanitize sanitize-recover,-f$(what)=float-cast-overflow,shift-exponent)
numbers_cpu := $(numbers)
# (Before glibc 2.34, dlsym, which watch/calls.h needs, is in a library of its own)
dl := -Wl,--no-as-needed -ldl

# What is built again when the compiler, its flags or, because of -march=native, the processor change
build/%/flags: flags = $(CXX) $(cpu_flags) $(flags_$*) $(processor)
processor := $(shell grep -sm1 -E "^(model name|CPU part)" /proc/cpuinfo)

ifeq ($(dir)$(shell echo | sed -z s/^/x/ 2>/dev/null),build/cpu)
  $(error the stand-in needs GNU sed: this sed has no option -z)
endif

# The .cu files and their headers in C++
to_cpp := $(wildcard extras/cpu/to_cpp.*)
build/cpp/%.cu: %.cu $(to_cpp)
	@$(translate)
build/cpp/%.h: %.h $(to_cpp)
	@$(translate)
build/cpp/%.cu: build/gpu/%.cu $(to_cpp)
	@$(translate)
translate = mkdir -p $(@D); { echo '\#line 1 "$<"'; sh extras/cpu/to_cpp.sh $<; } >$(new) && $(finish)
# The names of these
in_cpp = $(patsubst %,build/cpp/%,$(filter %.cu %.h,$(1:build/gpu/%=%))) $(filter-out %.cu %.h,$1)

# Each program of the Makefile and the other folders on the stand-in, and under the sanitizers
cpu_programs := $(programs) runtime_tests
of_runtime_tests := extras/cpu/tests.cu $(wildcard extras/cpu/tests/*) extras/run_tests.h
options_runtime_tests = -O0 $(if $(filter asan,$(*D)),$(loads)) $(numbers)
build/asan/runtime_tests build/race/runtime_tests: | build/cpu/runtime.o # for make cu
cuda_headers := $(wildcard extras/cpu/*.h extras/cpu/cuda/*.h extras/cpu/nvtx3/*)
runtime := extras/cpu/runtime.cc $(cuda_headers) $(wildcard extras/cpu/cuda/*.cc)
variants := cpu asan race lanes lanes_asan
$(foreach x,$(variants),$(patsubst %,build/$x/%.o,$(cpu_programs) $(objects))): build/%.o: \
    $$(call in_cpp,$$(of_$$(*F))) $$(headers_$$(*F)) $$(if $$(is_test),$(DOCTEST)) \
    $(cuda_headers) build/$$(*D)/flags
	$(begin)
	$(show)$(compiler) $(cpu_flags) $(flags_$(*D)) $(read_before) \
	    -iquote $(patsubst build/cpp/%/,%,$(dir $<)) -iquote build/cpp \
	    $(if $(is_test),-isystem $(dir $(DOCTEST)) -DDOCTEST_LINKED) $(options_$(*F)) \
	    -x c++ -c $< $(to)
# (That of nodes is MPI's.)
compiler = $(or $(compiler_$(*F)),$(CXX))
takes = $(if $(filter %winograd.o %program.o,$@), (about 8 s))
# The longest compilation begins first. The lesson is linked first, so that mgpu.cu's variables are
# initialized before the parts add to them. (Not with `numbers`: g++ would want a library)
$(foreach x,$(variants),$(cpu_programs:%=build/$x/%)): build/%: $$(firstword $$(links_$$(*F))) \
    build/%.o $$(links_$$(*F)) $$(if $$(is_test),build/$$(*D)/doctest.o) \
    build/$$(*D)/runtime.o
	$(show)$(compiler) $(cpu_flags) $(flags_$(*D)) $(filter %lesson.o,$^) \
	    $(filter-out %lesson.o,$(filter %.o,$^)) $(dl) $(as_program)
# What they share: the runtime, and doctest's own code
build/%/runtime.o: $(runtime) build/%/flags
	$(begin)
	@$(if $(findstring -fsanitize,$(flags_$*)),$(try_sanitizer))
	$(show)$(CXX) $(cpu_flags) $(flags_$*) -c $< $(to)
build/%/doctest.o: $(DOCTEST) build/%/flags
	$(begin)
	$(show)$(CXX) $(cpu_flags) -O0 $(flags_$*) -w -DDOCTEST_CONFIG_IMPLEMENT -x c++ -c $< $(to)

# What mgpu.cu includes takes g++ a second to read, but no time if a .gch fits the flags. If that
# does not work, an empty one is passed over.
readers := $(patsubst %,build/cpu/%.o,$(programs) $(objects))
$(readers): build/cpu/headers.h.gch
$(readers): read_before = -include build/cpu/headers.h
build/cpu/headers.h: mgpu.cu
	@mkdir -p $(@D); sed -n 's/^\(#include <[^>]*>\).*/\1/p' $< >$(new) && $(renew)
# (What the longest compilation waits for, too, comes first, or it would begin after the short ones)
build/cpu/headers.h.gch: build/cpu/headers.h $(cuda_headers) build/cpu/flags \
    | $(if $(filter program,$(programs)),build/cpp/parts.h $$(call in_cpp,$$(needs)))
	$(begin)
	@{ $(CXX) $(cpu_flags) -x c++-header $< $(to) && \
	    echo | $(CXX) $(cpu_flags) -include $< -fsyntax-only -x c++ -; } 2>/dev/null || : >$@
# What a program that is compiled and linked at once is given besides its source
once_cpu := -include build/cpu/headers.h build/cpu/runtime.o

# ----- Sanitizers and orders of lanes ---------------------------------------------------------

# The short trainings of race and sanitize have these options of their own
race sanitize: own += BATCH LIMIT EPOCHS LOG CHECKS
log := $(if $(wildcard extras/files),LOG=build/)
# What make asan, make race and make lanes add to them
flags_asan := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
# (g++: a call before each load, which tells what nothing has been written to: see checks.cc)
loads := $(if $(clang),,--param asan-instrumentation-with-call-threshold=0)
# (Volatile accesses call functions of races.cc, except from g++ 10)
flags_race = -fsanitize=thread $(if $(clang),-mllvm -tsan-distinguish-volatile \
    -Wno-unused-command-line-argument,$(shell \
    $(CXX) $(volatile) -x c++ -E /dev/null >/dev/null 2>&1 && echo $(volatile)))
volatile := --param tsan-distinguish-volatile=1
flags_lanes := -DMGPU_LANES
flags_lanes_asan := $(flags_lanes) -fsanitize=address
try_sanitizer = echo 'int main() {}' | $(CXX) $(flags_$*) -x c++ - -o $(new) 2>/dev/null && \
    rm $(new) || { \
    echo "$(firstword $(CXX)) cannot link with $(flags_$*): please install" >&2 \
        "$(if $(clang),libclang-rt-$$($(CXX) -dumpversion | cut -d. -f1)-dev,its sanitizers)"; \
    exit 1; }

.PHONY: asan race lanes limits sanitize
unwatched_tests := $(call chosen,$(filter-out $(watched_rooms:%=%_tests),$(tests)))
asan_tests := $(unwatched_tests) $(call chosen,runtime_tests)
asan: $(asan_tests:%=build/asan/%) data  ## tests under AddressSanitizer and UBSan
	@$(call run_tests,build/asan,$(asan_tests))
tsan = sh extras/cpu/race.sh
# With ALLREDUCE only what is about that one
race_tests := $(call chosen,$(if $(value ALLREDUCE),,$(filter tests algorithms_tests,$(tests)) \
    runtime_tests))
race_program := build/race/$(notdir $(program))
race_trains := yes
race: $(race_tests:%=build/race/%) data  ### tests and a training under ThreadSanitizer
	@$(if $(strip $(race_tests)),$(call run_tests,build/race,$(race_tests),$(tsan)))
	@set -e; $(race_more)
	@$(if $(race_trains),$(MAKE) --no-print-directory $(race_program))
	@$(if $(race_trains),$(tsan) $(race_program) CHECKS=0 $(log:%=%race/log) \
	    $(if $(value GPUS),,GPUS=2) BATCH=8 LIMIT=12 EPOCHS=1 $(words))
	@echo 'race: none found'

save := $(wildcard extras/files)
limits: $(if $(save),build/cpu/program) data  ## test kills, full disks and lack of memory
	@$(if $(save),bash extras/cpu/limits.sh,echo 'limits: skipped, SAVE is in extras/files')
# All but what trains for long or is not about kernels, in each order of warps and lanes; what is
# about kernels alone under AddressSanitizer too
lanes: T = -tce='program*,exercise*,check_first*,*gpus gives*,train_batch: k*,train_batch: every*'
lanes_asan_T := $(if $(filter command,$(origin T)),$(T), \
    -tc='conv*,matmul*,linear*,*pool*,relu*,add*,*norm*,softmax*,allreduce*,tuned*')
lanes_tests := $(filter-out files_tests,$(unwatched_tests))
lanes_asan_tests := $(lanes_tests:%=build/lanes_asan/%)
lanes: $(lanes_tests:%=build/lanes/%) build/cpu/runtime_tests $(lanes_asan_tests)
lanes: data  ## tests with a GPU's block shapes, lane by lane
	@for order in forwards backwards 1; do echo "CUDA_CPU_LANES=$$order" >&2; \
	    export order; $(call run_tests,build,$(lanes_tests:%=lanes/%) cpu/runtime_tests,\
	        env CUDA_CPU_LANES=$$order) || exit 1; done
	@set -f; echo 'CUDA_CPU_LANES=2, AddressSanitizer' >&2; for tests in $(lanes_asan_tests); do \
	    CUDA_CPU_LANES=2 $$tests $(lanes_asan_T) || [ $$? = 4 ] || exit 1; done

checker = $(or $(shell command -v compute-sanitizer 2>/dev/null),$(wildcard \
    /usr/local/cuda/bin/compute-sanitizer))
# CUDA may refuse what mgpu.cu only tries: a second access to a peer, the time between two GPUs
sanitized = build/gpu/$(notdir $(program))
sanitizer = $(checker) --report-api-errors no --error-exitcode 1
sanitize:  ## tests and a short training under compute-sanitizer (GPU)
	@$(if $(has_gpu),,echo 'make sanitize needs a GPU: none found' >&2; exit 1)
	@$(if $(checker),,echo 'make sanitize needs compute-sanitizer (CUDA Toolkit)' >&2; exit 1)
	@$(MAKE) --no-print-directory BACKEND=cuda $(sanitized) build/gpu/tests data
	@set -f; $(sanitizer) build/gpu/tests $(or $(T),-tce=program*,train*)
	@set -e; for tool in memcheck racecheck initcheck synccheck; do \
	    echo "compute-sanitizer --tool $$tool"; \
	    $(sanitizer) --tool $$tool $(sanitized) $(if $(value GPUS),,GPUS=2) BATCH=64 LIMIT=160 \
	        EPOCHS=1 $(log:%=%gpu/log.csv) $(if $(wildcard extras/fast),KERNELS=plain) $(words); done

# ----- Checks of the project ------------------------------------------------------------------

.PHONY: size release_checks machines
size:  ## count the lines of each part, and of its code, against their limits
	@sh extras/cpu/size.sh
release_checks:  ## for a release: .ci/run, and then all that it leaves out (an hour)
	@bash .ci/run && bash .ci/release
machines:  ## for a release: try other versions of Debian, compilers and CUDA (root)
	@bash extras/cpu/machines.sh

# ----- A program of one's own: make cu compiles and starts it, on a GPU or on the stand-in ------

# Warnings are nvcc's or, of the stand-in, of a printf's format and of if (a = b). As nvcc does, g++
# includes the runtime's header by itself. -O2, since such a program often computes all once more on
# the host: 15 times as fast there as -Og. In runtime.o it halves the time of a launch.
flags_cu := -O2
cu_on := $(if $(CHECK),cpu,$(notdir $(dir)))
cu_flags = $(filter-out -Wall -Wextra -Werror,$(cpu_flags)) $(flags_cu) -Wformat -Wparentheses \
    $(if $(clang),-Wno-undefined-inline)
cu_once := build/$(or $(filter asan race,$(CHECK)),cu)/runtime.o
cu_needs := $(if $(CHECK),,backend) $(if $(filter cpu,$(cu_on)),$(cu_once))
cu_gpu = $(filter-out -Xcompiler -Wall$(comma)-Wextra -Werror all-warnings,$(nvcc_flags))
comma := ,
cu_compile = $(if $(filter gpu,$(cu_on)),$(NVCC) $(cu_gpu),\
    $(CXX) $(cu_flags) $(flags_$(filter-out lanes,$(CHECK))) $(if $(filter asan,$(CHECK)),$(loads)) \
    -iquote . $(cu_macros) -include extras/cpu/cuda_runtime.h $(numbers))
# What nvcc defines
cu_macros := -D__NVCC__ -D__CUDACC__ -D__CUDACC_VER_MAJOR__=13 -D__CUDACC_VER_MINOR__=0
cu programs: export CU_ON = $(cu_on)
cu programs: export CU_GPUS = $(value GPUS)
cu nvcc: export CU_FILE = $(or $(value FILE),$(if $(filter nvcc,$@),mgpu.cu))
cu nvcc: export CU_INCLUDE = $(value INCLUDE)
cu programs: export CU_COMPILE = $(cu_compile)
cu programs: export CU_C = $(CXX) $(filter-out -std=%,$(cu_flags)) \
    $(flags_$(filter-out lanes,$(CHECK))) -iquote .
cu programs: export CU_OBJECTS = $(cu_once)

.PHONY: cu nvcc programs programs_nvcc
cu: $(cu_needs)  ## run a program of your own: make cu FILE=own.cu
	@sh extras/cpu/cu.sh $(value ARGS)

nvcc: export NVCC := $(NVCC)
nvcc:  ## compile mgpu.cu, or FILE=own.cu, for a GPU, without one
	@sh extras/cpu/nvcc.sh

# Small programs: each prints what its head says
programs: $(cu_needs)  ## run the programs of extras/cpu/programs
	@sh extras/cpu/programs.sh extras/cpu/programs/*.cu extras/cpu/programs/*/
programs_nvcc:
	@mkdir -p build/cu; find extras/cpu/programs -name '*.cu' | xargs -P 2 -I FILE sh -c '$(NVCC) \
	    -std=c++17 -arch=sm_90 -rdc=true -c "$$1" -o "build/cu/$$(basename "$$1").o"' compile FILE
	@echo 'nvcc compiles all of extras/cpu/programs'
