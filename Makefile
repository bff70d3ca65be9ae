# make run GPUS=2     trains; make help lists everything else.

# ----- Options of the program: passed on when set, otherwise the program takes its own ---------

# GPUS           number of devices
# MODEL          network: lenet, resnet18, lab_cnn
# BATCH          batch size over all devices together; in make sweep, of each device
# LR             learning rate
# EPOCHS         passes over the training data
# ALLREDUCE      sum by: naive, bucket, host, by_tensor, sharded, ring, tree, rebind, yours
# OVERLAP        1 exchanges the last layers' gradients while the first layers' are still computed
# KVSTORE        the lab's words for ALLREDUCE=host and by_tensor: local, device
# SPLIT          parts of a minibatch in this proportion, such as 3,1, for devices of unequal speed
# EVALUATE_ALL   1 computes test accuracy on all devices instead of gpu(0) alone
# SEED           seed of the parameters and of the order of the samples
# SHUFFLE        0 keeps the training samples in file order
# FIRST_CHECK    0 does not compare the first step with that of one device
# REPLICA_CHECK  0 compares neither the first step nor the replicas: they may drift apart unseen
# STEPS          stop after this many training steps
# LIMIT          only the first so many training and test samples
# DATA           folder with the data set, by default data, where make data puts it
# INIT           folder with .npy files to start from
# SAVE           folder for the parameters after each epoch, as .npy files
# RESUME         1 goes on where the training in SAVE stands
# LOG            file for the epoch rows, by default build/log.csv
# VERBOSE        1 prints the device memory that was used
# ARGS           more words for the program, such as ARGS=--help
# LANES          orders of warps and lanes for make lanes, by default forwards backwards 1 (a seed)
# T              words for the tests, such as T='-tc=allreduce*'

# GPUS=2 is passed on as --gpus '2', in quotes as typed: the program judges it, not the shell
with_value := GPUS MODEL BATCH LR EPOCHS ALLREDUCE KVSTORE SPLIT SEED \
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
# SM             GPU architectures, such as 75 or '75 90'; by default the newest a GPU and nvcc know
SM := $(or $(SM),$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
    sed -nE 's/^([0-9]+)\.([0-9]+)$$/\1\2/p' | while read sm; do $(NVCC) --list-gpu-arch | awk -F_ \
    -v sm=$$sm '$$2 <= sm && $$2 > n { n = $$2 } END { print n ? n : sm }'; done | sort -nu),75)
# CXX            C++ compiler of the stand-in: g++, or clang++ where there is no g++
CXX := $(if $(filter default,$(origin CXX)),$(notdir \
    $(shell command -v g++ || command -v clang++ || echo g++)),$(CXX))
# MARCH          processor of the stand-in; empty where the compiler does not know -march=native
MARCH ?= $(shell $(CXX) -march=native -x c++ -E /dev/null >/dev/null 2>&1 && echo -march=native)
# CPUFLAGS       compiler flags of the stand-in
# (wide: AVX-512 where there is one, which compilers avoid on some processors that have it)
wide := $(shell $(CXX) -mprefer-vector-width=512 -x c++ -E /dev/null >/dev/null 2>&1 && \
    echo -mprefer-vector-width=512)
# (g++: -Og, and garbage of up to a GB, compile quickly; kernels get -O3 in cpu/cuda_runtime.h)
CPUFLAGS ?= -std=c++17 $(MARCH) $(wide) -fopenmp-simd -g1 -Wall -Wextra \
    $(if $(findstring clang,$(CXX)),-O3 -Wno-pass-failed -fstack-clash-protection,\
    -Og --param ggc-min-heapsize=1000000)
# WERROR         1 turns warnings into errors
# DOCTEST        doctest's header: the system's, or the one that make brings
DOCTEST ?= $(firstword $(wildcard /usr/include/doctest/doctest.h \
    /usr/local/include/doctest/doctest.h) build/doctest/doctest.h)

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
tests := $(if $(filter build/cpu,$(dir)),build/cpu/runtime_tests) $(dir)/tests

# ----- What you can make -----------------------------------------------------------------------

# The data set that DATA names; a folder of your own is used as it is
archives := $(sort $(filter %.gz,$(shell cat data/sha256)))
makefiles := Makefile $(wildcard */*.mk)
folder := $(patsubst ./%,%,$(patsubst %/,%,$(or $(value DATA),data)))
dataset := $(if $(filter data data/mnist,$(folder)),build/$(notdir $(folder)).ok)

.DEFAULT_GOAL := all
# What make run starts, and how; the source that other programs include
program := $(dir)/mgpu
start :=
source := mgpu.cu
# Each folder brings targets of its own; cpu/checks.mk: misspelt variables, what is compiled once,
# sanitizers
-include $(sort $(wildcard */*.mk))

.PHONY: all run test data clean help backend
.DELETE_ON_ERROR .SUFFIXES:

# Status 4 says that T matches no test case of a program: an error if it matches none at all
run_tests = set -f; ran=; failed=; for tests in $1; do $2 $$tests $(value T); \
    case $$? in 0) ran=yes ;; 4) ;; *) failed=yes ;; esac; done; [ "$$ran" ] && [ ! "$$failed" ]

all: $(dir)/mgpu $(tests)  ## build the program and the tests
run: backend $(program) $(dataset)  ## train: make run GPUS=2 BATCH=256 LR=0.2 EPOCHS=10
	@$(start) $(program) $(options)
test: backend $(tests) $(dataset)  ## run the tests: make test T='-tc=allreduce*'
	@$(call run_tests,$(tests))
data: build/$(if $(filter %mnist,$(folder)),mnist,data).ok  ## fetch Fashion-MNIST, or DATA=mnist
clean:  ## remove build/ (data/ stays)
	rm -rf build
help:  ## this list
	@echo 'make TARGET [NAME=value ...]'; echo
	@sed -nE 's/^([a-z]+):.*  ## (.*)/\1\t\2/p' $(makefiles) | expand -t 15; echo
	@sed -nE 's/^# ([A-Z_]+  )/\1/p' $(makefiles)
backend: ; @echo $(call quote,backend: $(why)) >&2

# ----- Compiling -------------------------------------------------------------------------------

# (ASSERTIONS: an index beyond the end of a std::vector ends the program and is named)
# Code for each SM, and PTX for whatever else is there
oldest = $(shell printf '%s\n' $(SM) | sort -n | sed q)
nvcc_flags = -std=c++17 -O3 -lineinfo -D_GLIBCXX_ASSERTIONS \
    $(foreach sm,$(SM),-gencode arch=compute_$(sm),code=sm_$(sm)) \
    -gencode arch=compute_$(oldest),code=compute_$(oldest) \
    -Xcompiler -Wall,-Wextra $(if $(WERROR),-Werror all-warnings -Xcompiler -Werror)
cpu_flags = $(CPUFLAGS) -D_GLIBCXX_ASSERTIONS $(if $(WERROR),-Werror) -pthread -Icpu
doctest = -isystem $(dir $(DOCTEST))
linked = -DDOCTEST_LINKED $(doctest) # doctest's own code is compiled once, as doctest.o

build/gpu/mgpu: mgpu.cu build/gpu/flags
	$(NVCC) $(nvcc_flags) $< -o $@
build/gpu/tests: tests.cu mgpu.cu $(DOCTEST) build/gpu/flags
	$(NVCC) $(nvcc_flags) $(doctest) $< -o $@

build/cpu/mgpu build/asan/mgpu build/race/mgpu: build/%/mgpu: \
    build/cpp/mgpu.cu cpu/cuda_runtime.h build/%/flags
	$(CXX) $(cpu_flags) $(flags_$*) $(once_$*) -x c++ $< -o $@
$(patsubst %,build/%/tests,cpu asan race lanes lanes_asan): build/%/tests: \
    build/cpp/tests.cu build/cpp/mgpu.cu cpu/cuda_runtime.h build/%/doctest.o build/%/flags
	$(CXX) $(cpu_flags) $(flags_$*) $(once_$*) $(linked) -x c++ $< -x none build/$*/doctest.o -o $@
build/cpu/runtime_tests build/asan/runtime_tests build/race/runtime_tests: build/%/runtime_tests: \
    build/cpp/runtime_tests.cu cpu/cuda_runtime.h build/%/doctest.o build/%/flags
	$(CXX) $(cpu_flags) $(flags_$*) -O0 $(linked) -x c++ $< -x none build/$*/doctest.o -o $@
build/%/doctest.o: $(DOCTEST) build/%/flags
	$(CXX) $(cpu_flags) $(flags_$*) -O0 -w -DDOCTEST_CONFIG_IMPLEMENT -x c++ -c $< -o $@

# The .cu files in C++
build/cpp/mgpu.cu build/cpp/tests.cu: build/cpp/%: % cpu/to_cpp.sed
	@$(translate)
build/cpp/runtime_tests.cu: cpu/tests.cu cpu/to_cpp.sed
	@$(translate)
translate = mkdir -p $(@D); { echo '\#line 1 "$<"'; LC_ALL=C sed -zEf cpu/to_cpp.sed $<; } >$@; \
    ! sed 1d $@ | grep -nE '<<<|__shared__' || \
    { echo '$<: cpu/to_cpp.sed does not understand the lines above' >&2; exit 1; }

# What the programs of other folders include: rewritten only when that changes
build/source: FORCE
	@mkdir -p $(@D); echo $(call quote,$(source) $(source_flags)) >$@.$$$$; \
	cmp -s $@.$$$$ $@ && rm $@.$$$$ || mv $@.$$$$ $@

# The flags of the last build, and the processor's name because of -march=native. The file is
# rewritten only when they change, and what depends on it is then rebuilt.
build/%/flags: flags = $(if $(filter gpu,$*),$(NVCC) $(nvcc_flags),$(CXX) $(cpu_flags) $(flags_$*))
build/%/flags: FORCE
	@mkdir -p $(@D); { echo $(call quote,$(flags)); grep -m1 '^model name' /proc/cpuinfo; } >$@.$$$$; \
	cmp -s $@.$$$$ $@ && rm $@.$$$$ || mv $@.$$$$ $@

# ----- What a build needs and the machine may lack: data/fetch.sh brings it --------------------

build/data.ok: data/sha256 $(archives:%=data/%)
build/mnist.ok: data/mnist.sha256 $(archives:%=data/mnist/%)
build/data.ok build/mnist.ok:
	@sh data/fetch.sh $(basename $(@F)) && mkdir -p build && touch $@
# An archive that is not there is no error yet: the rule above brings it
data/%.gz: ;

build/doctest/doctest.h: ; @sh data/fetch.sh doctest
