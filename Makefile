# make run GPUS=2     trains; make help lists everything else.

# ----- Options of the program: passed on when set, otherwise the program takes its own ---------

# GPUS           number of devices
# NODES          processes, started by MPI, each with GPUS devices of its own
# HOSTS          file with the names of their machines, for mpirun; by default all run here
# MODEL          network: lenet, resnet18, lab_cnn
# BATCH          batch size over all devices together; in make sweep, of each device
# LR             learning rate
# EPOCHS         passes over the training data
# ALLREDUCE      sum by: naive, bucket, host, by_tensor, sharded, ring, tree, rebind, yours
# OVERLAP        1 exchanges the last layers' gradients while the first layers' are still computed
# KVSTORE        the lab's words for two of them: local (host), device (by_tensor)
# KERNELS        kernels of the convolution: plain, the formula; tiled; fast, by default on a GPU
# PRECISION      of what the fast kernels multiply: fp32; tf32, on tensor cores
# SPLIT          parts of a minibatch in this proportion, such as 3,1, for devices of unequal speed
# EVALUATE_ALL   1 computes test accuracy on all devices instead of gpu(0) alone
# SEED           seed of the parameters and of the order of the samples
# SHUFFLE        0 keeps the training samples in file order
# FIRST_CHECK    0 does not compare the first step with that of one device
# REPLICA_CHECK  0 does neither that nor compare the replicas: they may drift apart unseen
# STEPS          stop after this many training steps
# LIMIT          only the first so many training and test samples
# DATA           folder with the data set, by default data, where make data puts it
# INIT           folder with .npy files to start from
# SAVE           folder for the parameters after each epoch, as .npy files
# RESUME         1 goes on where the training in SAVE stands
# LOG            file for the epoch rows, by default build/log.csv
# VERBOSE        1 prints the device memory that was used
# BENCH          what make bench times: step (of training), allreduce, kernels, or all
# FABRIC         simulate nvlink, pcie, sockets, ethernet100, ethernet10, or '10,25': us, GB/s
# STEP_MS        milliseconds of a step on one device, for make scale; by default it is measured
# RUNS           logs that make plot draws, such as 'a.csv b.csv', by default LOG
# SWEEP_GPUS     numbers of devices that make sweep trains on, by default 1 2
# SWEEP_LR       learning rates that make sweep trains with, by default 0.05 0.1 0.2 0.4
# ARGS           more words for the program, such as ARGS=--help
# LANES          orders of warps and lanes for make lanes, by default forwards backwards 1 (a seed)
# T              words for the tests, such as T='-tc=allreduce*'

# GPUS=2 is passed on as --gpus '2', in quotes as typed: the program judges it, not the shell
with_value := GPUS MODEL BATCH LR EPOCHS ALLREDUCE KVSTORE KERNELS PRECISION SPLIT SEED \
    STEPS LIMIT DATA INIT SAVE LOG
# OVERLAP=1 is passed on as --overlap, SHUFFLE=0 as --no-shuffle
word_if_1 := OVERLAP EVALUATE_ALL RESUME VERBOSE
word_if_0 := SHUFFLE FIRST_CHECK REPLICA_CHECK

quote = '$(subst ','\'',$1)'
lower = $(shell echo $1 | tr A-Z_ a-z-)
valued = $(if $(value $1),--$(call lower,$1) $(call quote,$(value $1)))
switch = $(if $(filter-out 0 1,$($1)),$(error $1=$($1) is unknown: use 0 or 1),\
    $(if $(filter $2,$($1)),$3))
options = $(foreach x,$(with_value),$(call valued,$x)) \
    $(foreach x,$(word_if_1),$(call switch,$x,1,--$(call lower,$x))) \
    $(foreach x,$(word_if_0),$(call switch,$x,0,--no-$(call lower,$x))) $(value ARGS)

# ----- How to build ----------------------------------------------------------------------------

# BACKEND        where to run: cuda, cpu (the stand-in), auto: cuda where nvcc and a GPU are found
BACKEND ?= auto
# NVCC           CUDA compiler
NVCC ?= $(or $(shell command -v nvcc 2>/dev/null),$(wildcard /usr/local/cuda/bin/nvcc),nvcc)
# SM             GPU architectures, such as 75 or '75 90'; by default those of the GPUs, or 75
SM := $(or $(SM),$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
    sed -nE 's/^([0-9]+)\.([0-9]+)$$/\1\2/p' | sort -nu),75)
# CXX            C++ compiler of the stand-in: g++, or clang++ where there is no g++
CXX := $(if $(filter default,$(origin CXX)),$(notdir \
    $(shell command -v g++ || command -v clang++ || echo g++)),$(CXX))
# MARCH          processor of the stand-in; empty where the compiler does not know -march=native
MARCH ?= $(shell $(CXX) -march=native -x c++ -E /dev/null >/dev/null 2>&1 && echo -march=native)
# CPUFLAGS       compiler flags of the stand-in
# (wide: AVX-512 where there is one, which compilers avoid on some processors that have it)
wide := $(shell $(CXX) -mprefer-vector-width=512 -x c++ -E /dev/null >/dev/null 2>&1 && \
    echo -mprefer-vector-width=512)
# (g++: -Og compiles quickly; kernels get -O3 in cpu/cuda_runtime.h)
CPUFLAGS ?= -std=c++17 $(MARCH) $(wide) -fopenmp-simd -g1 -Wall -Wextra \
    $(if $(findstring clang,$(CXX)),-O3 -Wno-pass-failed,-Og)
# MPICXX         MPI's compiler, for NODES
MPICXX ?= mpicxx
# WERROR         1 turns warnings into errors
# DOCTEST        doctest's header: the system's, or the one that make brings
DOCTEST ?= $(firstword $(wildcard /usr/include/doctest/doctest.h \
    /usr/local/include/doctest/doctest.h) build/doctest/doctest.h)

# A variable on the command line is one of these, or misspelt
variables := $(shell sed -nE 's/^. ([A-Z_]+)  .*/\1/p' Makefile)
typed := $(foreach v,$(.VARIABLES),$(if $(filter command,$(origin $v)),$v))
misspelt := $(firstword $(filter-out $(variables) CC MAKE MAKEFLAGS SHELL,$(typed)))
ifneq ($(and $(misspelt),$(filter 0,$(MAKELEVEL))),)
  meant := $(shell printf '%s\n' $(variables) | awk -v typed=$(call quote,$(misspelt)) '{ \
      rest = $$0; alone = 0; \
      for (i = 1; i <= length(typed); i++) alone += !sub(toupper(substr(typed, i, 1)), "", rest); \
      print alone + length(rest), $$0 }' | sort -n | sed 's/.* //; q')
  $(error $(misspelt) is unknown: did you mean $(meant)? make help lists all)
endif

# ----- Which backend, and why ------------------------------------------------------------------

has_nvcc = $(shell command -v $(firstword $(NVCC)) 2>/dev/null)
has_gpu = $(shell nvidia-smi -L 2>/dev/null | grep '^GPU')

ifeq ($(BACKEND),cpu)
  why := cpu stand-in (BACKEND=cpu)
else ifeq ($(BACKEND),cuda)
  $(if $(has_nvcc),,$(error BACKEND=cuda needs nvcc: install CUDA, or set NVCC=/path/to/nvcc))
  why := cuda for SM $(SM) (BACKEND=cuda)
else ifneq ($(BACKEND),auto)
  $(error BACKEND=$(BACKEND) is unknown: use auto, cuda or cpu)
else ifeq ($(has_nvcc),)
  why := cpu stand-in (no nvcc found; NVCC=/path/to/nvcc if there is one)
else ifeq ($(has_gpu),)
  why := cpu stand-in (no GPU found; BACKEND=cuda to force)
else
  why := cuda for SM $(SM) (nvcc and a GPU found; BACKEND=cpu for the stand-in)
endif

dir := $(if $(filter cpu,$(firstword $(why))),build/cpu,build/gpu)
# With NODES: how MPI starts the program. More processes than cores are allowed, and root.
no_mpi = $(foreach x,mpirun $(MPICXX),$(if $(shell command -v $x),,no $x: NODES wants MPI, in \
    Debian openmpi-bin and libopenmpi-dev))
need_mpi = $(if $(strip $(no_mpi)),$(error $(strip $(no_mpi))))
mpirun = mpirun $(if $(shell mpirun --version | grep 'Open MPI'),-q --oversubscribe --bind-to none \
    $(if $(filter 0,$(shell id -u)),--allow-run-as-root))
ifneq ($(value NODES)$(value HOSTS),)
  $(need_mpi)
  $(if $(filter $(or $(value NODES),1),$(shell seq 1024)),,\
    $(error NODES=$(value NODES): a number of processes, 1 to 1024, is wanted))
  start := $(mpirun) $(if $(value NODES),-n $(value NODES)) \
      $(if $(value HOSTS),--hostfile $(call quote,$(value HOSTS)))
  program := build/mpi/mgpu
  why += with $(if $(value NODES),$(value NODES) processes) on \
      $(or $(value HOSTS),$(shell nproc) cores)
endif
program := $(or $(program),$(dir)/mgpu)
# The stand-in has tests of its own
tests := $(dir)/tests $(if $(filter build/cpu,$(dir)),build/cpu/runtime_tests)

# ----- What you can make -----------------------------------------------------------------------

# The data set that DATA names; a folder of your own is used as it is
archives := $(sort $(filter %.gz,$(shell cat data/sha256)))
folder := $(patsubst ./%,%,$(patsubst %/,%,$(or $(value DATA),data)))
ifeq ($(folder),data)
  dataset := build/data.ok
else ifeq ($(folder),data/mnist)
  dataset := build/mnist.ok
endif

.PHONY: all run test exercise bench summary trace profile scale nodes nodes_asan nodes_race race \
    asan lanes sanitize plot sweep data clean help backend FORCE
.DELETE_ON_ERROR:
.SUFFIXES:

# Status 4 says that T matches no test case of a program: an error if it matches none at all
run_tests = set -f; ran=; failed=; for tests in $1; do $2 $$tests $(value T); \
    case $$? in 0) ran=yes ;; 4) ;; *) failed=yes ;; esac; done; [ "$$ran" ] && [ ! "$$failed" ]

all: $(dir)/mgpu $(tests)  ## build the program and the tests
run: backend $(program) $(dataset)  ## train: make run GPUS=2 BATCH=256 LR=0.2 EPOCHS=10
	@$(start) $(program) $(options)
test: backend $(tests) $(dataset)  ## run the tests: make test T='-tc=allreduce*'
	@$(call run_tests,$(tests))
exercise: backend $(program) build/simulate  ## judge your allreduce, or ALLREDUCE=name
	@$(start) $(program) --exercise $(options)
	@$(if $(start),,$(predict) $(dir)/mgpu $(options))
bench: backend $(dir)/mgpu build/simulate  ## time BENCH, into build/bench.csv; with FABRIC there
	@$(if $(value FABRIC),$(predict) $(dir)/mgpu $(options),\
	    $(dir)/mgpu --bench=$(call quote,$(or $(value BENCH),all)) $(options))
trace: backend $(dir)/mgpu build/simulate  ## three steps, what ran when: build/trace.json, .svg
	@$(dir)/mgpu --trace $(options) >build/trace.csv
	@build/simulate trace $(call quote,$(or $(value FABRIC),here)) build/trace.json build/trace.dat \
	    <build/trace.csv && echo build/trace.json: for https://ui.perfetto.dev or chrome://tracing
	@sh plot/draw.sh trace build/trace.dat build/trace.svg || true
profile: backend $(dir)/mgpu  ## where the time of a step goes: kernels and copies of each device
	@$(dir)/mgpu --profile $(options)
scale: backend $(dir)/mgpu build/simulate  ## predict a step on 1 to 1024 devices, on FABRIC
	@STEP_MS=$(call quote,$(value STEP_MS)) $(predict) $(dir)/mgpu $(options)
# What an exchange takes on other machines
predict = sh plot/predict.sh $@ $(call quote,$(or $(value FABRIC),$(if $(filter scale,$@),pcie))) \
    $(call quote,$(value ALLREDUCE)) $(call quote,$(value GPUS))
asan: build/asan/tests build/asan/runtime_tests $(dataset)  ## tests under AddressSanitizer, UBSan
	@$(call run_tests,build/asan/tests build/asan/runtime_tests)

summary: backend $(dir)/mgpu  ## the network's operators: shapes, parameters, FLOPs, memory
	@$(dir)/mgpu --summary $(options)
nodes: backend $(dir)/mgpu build/mpi/mgpu $(dataset)  ## tests of NODES on this machine (MPI)
	@sh cpu/nodes.sh $(dir)/mgpu build/mpi/mgpu $(mpirun)
# MPI's own leaks and locks are suppressed by name
nodes_asan: build/mpi_asan/mgpu $(dataset)
	@ASAN_OPTIONS=fast_unwind_on_malloc=0 LSAN_OPTIONS=suppressions=cpu/mpi.lsan:print_suppressions=0 \
	    $(mpirun) -n 2 $< --gpus 2 --limit 90 --batch 40 --epochs 1 --overlap --log build/nodes_log
nodes_race: build/mpi_race/mgpu $(dataset)
	@TSAN_OPTIONS="exitcode=66 suppressions=cpu/mpi.tsan" $(mpirun) -n 2 $(setarch) $< --gpus 2 \
	    --limit 6 --batch 4 --epochs 1 --no-first-check --overlap --log build/nodes_log

# The kernel may spread addresses too widely for ThreadSanitizer: setarch -R turns that off
tsan = TSAN_OPTIONS="halt_on_error=0 exitcode=66 $$TSAN_OPTIONS" $(setarch)
setarch = $(shell setarch $$(uname -m) -R true 2>/dev/null && echo setarch $$(uname -m) -R)
# With ALLREDUCE only what is about that one
race_tests := $(if $(value ALLREDUCE),,build/race/tests build/race/runtime_tests)
race: $(race_tests) build/race/mgpu $(dataset)  ## tests, exercise, training under ThreadSanitizer
	@$(if $(race_tests),$(call run_tests,$(race_tests),$(tsan)))
	@$(tsan) build/race/mgpu --exercise --gpus 3 $(options)
	@$(tsan) build/race/mgpu --gpus 2 --batch 8 --limit 12 --epochs 1 --no-first-check \
	    --log build/race/log $(options)

# All but what trains for long or is not about kernels, in each order of warps and lanes; what is
# about kernels alone under AddressSanitizer too
lanes: T = -tce='program*,exercise*,check_first*,*gpus gives*,train_batch: k*,train_batch: every*'
lanes_asan_T := $(if $(filter command,$(origin T)),$(value T), \
    -tc='conv*,linear*,*pool*,relu*,add*,batch_norm*,softmax*,allreduce*,train_batch: the same*')
lanes: build/lanes_asan/tests
lanes: build/lanes/tests build/cpu/runtime_tests $(dataset)  ## tests in a GPU's shape, lane by lane
	@for order in $(or $(LANES),forwards backwards 1); do echo "CUDA_CPU_LANES=$$order" >&2; \
	    ($(call run_tests,build/lanes/tests build/cpu/runtime_tests,env CUDA_CPU_LANES=$$order)) || \
	    exit 1; done
	@set -f; echo 'CUDA_CPU_LANES=2, AddressSanitizer' >&2; \
	    CUDA_CPU_LANES=2 build/lanes_asan/tests $(lanes_asan_T) || [ $$? = 4 ]

checker = $(or $(shell command -v compute-sanitizer 2>/dev/null),$(wildcard \
    /usr/local/cuda/bin/compute-sanitizer))
sanitize:  ## tests (but whole trainings), a short training under compute-sanitizer (GPU)
	@$(if $(has_gpu),,echo 'make sanitize needs a GPU: none found' >&2; exit 1)
	@$(if $(checker),,echo 'make sanitize needs compute-sanitizer (CUDA Toolkit)' >&2; exit 1)
	@$(MAKE) --no-print-directory BACKEND=cuda build/gpu/mgpu build/gpu/tests $(dataset)
	@set -f; $(checker) --error-exitcode 1 build/gpu/tests $(if $T,$(value T),-tce=program*,train*)
	@set -e; for tool in memcheck racecheck initcheck synccheck; do \
	    echo "compute-sanitizer --tool $$tool"; \
	    $(checker) --tool $$tool --error-exitcode 1 build/gpu/mgpu --gpus 2 --batch 64 --limit 160 \
	        --epochs 1 --log build/gpu/log.csv $(options); done

plot: runs = $(or $(value RUNS),$(value LOG),build/log.csv)
plot:  ## draw train loss and test accuracy of RUNS, in build/plot.svg, .png; else as text
	@if command -v gnuplot >/dev/null; then \
	    sh plot/draw.sh accuracy $(call quote,$(runs)) build/plot.svg && \
	    sh plot/draw.sh accuracy $(call quote,$(runs)) build/plot.png; \
	else set -f; sh plot/text.sh $(runs); fi
sweep: backend $(dir)/mgpu $(dataset)  ## test acc by learning rates and devices, BATCH for each
	@sh plot/sweep.sh $(call quote,$(value SWEEP_GPUS)) $(call quote,$(value SWEEP_LR)) \
	    $(call quote,$(value BATCH)) $(dir)/mgpu $(options)
data: build/$(if $(filter %mnist,$(folder)),mnist,data).ok  ## fetch Fashion-MNIST, or DATA=mnist
clean:  ## remove build/ (data/ stays)
	rm -rf build
help:  ## this list
	@echo 'make TARGET [NAME=value ...]'; echo
	@sed -nE 's/^([a-z]+):.*  ## (.*)/\1\t\2/p' Makefile | expand -t 15; echo
	@sed -nE 's/^# ([A-Z_]+  )/\1/p' Makefile
backend:
	@echo 'backend: $(why)' >&2

# ----- Compiling -------------------------------------------------------------------------------

# (ASSERTIONS: an index beyond the end of a std::vector ends the program and is named)
# Code for each SM, and PTX for whatever else is there
oldest = $(shell printf '%s\n' $(SM) | sort -n | sed q)
nvcc_flags = -std=c++17 -O3 -lineinfo -D_GLIBCXX_ASSERTIONS \
    $(foreach sm,$(SM),-gencode arch=compute_$(sm),code=sm_$(sm)) \
    -gencode arch=compute_$(oldest),code=compute_$(oldest) \
    -Xcompiler -Wall,-Wextra $(if $(WERROR),-Werror all-warnings -Xcompiler -Werror)
cpu_flags = $(CPUFLAGS) -D_GLIBCXX_ASSERTIONS $(if $(WERROR),-Werror) -pthread -Icpu
# What make asan, make race and make lanes add to them
flags_asan := -Og -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
flags_race := -O1 -fsanitize=thread
flags_lanes := -DMGPU_LANES
flags_lanes_asan := $(flags_lanes) -Og -fsanitize=address
doctest = -I. -isystem $(dir $(DOCTEST)) # -I.: for plot/fabric.h

build/gpu/mgpu: mgpu.cu build/gpu/flags
	$(NVCC) $(nvcc_flags) $< -o $@
build/gpu/tests: tests.cu mgpu.cu plot/fabric.h plot/simulate.cc $(DOCTEST) build/gpu/flags
	$(NVCC) $(nvcc_flags) $(doctest) $< -o $@

build/cpu/mgpu build/asan/mgpu build/race/mgpu: build/%/mgpu: \
    build/cpu/mgpu.cu cpu/cuda_runtime.h build/%/flags
	$(CXX) $(cpu_flags) $(flags_$*) -x c++ $< -o $@
# Of NODES, on the backend: nvcc's host compiler is MPI's, which calls g++
export OMPI_CXX = $(CXX)
export MPICH_CXX = $(CXX)
mpi_gpu = $(NVCC) $(nvcc_flags) -ccbin $(MPICXX) -DMGPU_MPI
mpi_cpu = $(MPICXX) $(cpu_flags) $(flags_$1) -DMGPU_MPI -x c++
ifeq ($(dir),build/gpu)
build/mpi/mgpu: mgpu.cu build/mpi/flags
	$(need_mpi)$(mpi_gpu) $< -o $@
else
build/mpi/mgpu: build/cpu/mgpu.cu cpu/cuda_runtime.h build/mpi/flags
	$(need_mpi)$(call mpi_cpu) $< -o $@
endif
build/mpi_asan/mgpu build/mpi_race/mgpu: build/mpi_%/mgpu: \
    build/cpu/mgpu.cu cpu/cuda_runtime.h build/mpi_%/flags
	$(need_mpi)$(call mpi_cpu,$*) $< -o $@
$(patsubst %,build/%/tests,cpu asan race lanes lanes_asan): build/%/tests: \
    build/cpu/tests.cu build/cpu/mgpu.cu cpu/cuda_runtime.h plot/fabric.h plot/simulate.cc \
    $(DOCTEST) build/%/flags
	$(CXX) $(cpu_flags) $(flags_$*) $(doctest) -x c++ $< -o $@
build/cpu/runtime_tests build/asan/runtime_tests build/race/runtime_tests: build/%/runtime_tests: \
    build/cpu/runtime_tests.cu cpu/cuda_runtime.h $(DOCTEST) build/%/flags
	$(CXX) $(cpu_flags) $(flags_$*) -O0 $(doctest) -x c++ $< -o $@

build/simulate: plot/simulate.cc plot/fabric.h build/cpu/flags
	$(CXX) -std=c++17 -O2 -Wall -Wextra $(if $(WERROR),-Werror) $< -o $@

# The .cu files in C++
build/cpu/mgpu.cu: mgpu.cu
build/cpu/tests.cu: tests.cu
build/cpu/runtime_tests.cu: cpu/tests.cu
build/cpu/%.cu: cpu/to_cpp.sed
	@mkdir -p $(@D)
	@{ echo '#line 1 "$(filter %.cu,$^)"'; LC_ALL=C sed -zEf $< $(filter %.cu,$^); } >$@
	@! sed 1d $@ | grep -nE '<<<|__shared__' || \
	    { echo '$(filter %.cu,$^): $< does not understand the lines above' >&2; exit 1; }

# The flags of the last build, and the processor's name because of -march=native. The file is
# rewritten only when they change, and what depends on it is then rebuilt.
build/%/flags: flags = $(if $(filter gpu,$*),$(NVCC) $(nvcc_flags),$(CXX) $(cpu_flags) $(flags_$*))
build/mpi/flags: flags = $(mpi_$(notdir $(dir)))
build/mpi_asan/flags build/mpi_race/flags: flags = $(call mpi_cpu,$(*:mpi_%=%))
build/%/flags: FORCE
	@mkdir -p $(@D); { echo $(call quote,$(flags)); grep -m1 '^model name' /proc/cpuinfo; } >$@.new; \
	cmp -s $@.new $@ && rm $@.new || mv $@.new $@

# ----- What a build needs and the machine may lack: data/fetch.sh brings it --------------------

build/data.ok: data/sha256 $(archives:%=data/%)
build/mnist.ok: data/mnist.sha256 $(archives:%=data/mnist/%)
build/data.ok build/mnist.ok:
	@sh data/fetch.sh $(basename $(@F)) && mkdir -p build && touch $@
# An archive that is not there is no error yet: the rule above brings it
data/%.gz: ;

build/doctest/doctest.h:
	@sh data/fetch.sh doctest
