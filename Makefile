# make run GPUS=2     trains; make help lists everything else.

# ----- Options of the program: passed on when set, otherwise the program takes its own ---------

# Number of devices
GPUS ?=
# Network: lenet, resnet18, lab_cnn
MODEL ?=
# Batch size over all devices together; in make sweep, of each device
BATCH ?=
# Learning rate
LR ?=
# Passes over the training data
EPOCHS ?=
# How gradients are summed: naive, bucket, host, by_tensor, sharded, ring, tree, rebind, yours
ALLREDUCE ?=
# 1 exchanges the last layers' gradients while the first layers' are still computed
OVERLAP ?= 0
# The lab's words for two of them: local (host), device (by_tensor)
KVSTORE ?=
# Convolution: tiled kernels, or plain ones, which are the formula and nothing else
KERNELS ?=
# Parts of a minibatch in this proportion, such as 3,1, for devices of unequal speed
SPLIT ?=
# 1 computes test accuracy on all devices instead of gpu(0) alone
EVALUATE_ALL ?= 0
# Seed of the parameters and of the order of the samples
SEED ?=
# 0 keeps the training samples in file order
SHUFFLE ?= 1
# 0 lets the devices' parameters drift apart unseen
REPLICA_CHECK ?= 1
# Stop after this many training steps
STEPS ?=
# Only the first so many training and test samples
LIMIT ?=
# Folder with the data set, by default data/, where `make data` puts it
DATA ?=
# Folder with .npy files to start from
INIT ?=
# Folder for the trained parameters, as .npy files
SAVE ?=
# File for the epoch rows, by default build/log.csv
LOG ?=
# What make bench times: step (of training), allreduce, or all
BENCH ?= all
# Numbers of devices that make sweep trains on
SWEEP_GPUS ?= 1 2
# Learning rates that make sweep trains with
SWEEP_LR ?= 0.05 0.1 0.2 0.4
# 1 prints the device memory that was used
VERBOSE ?= 0
# More words for the program, such as ARGS=--help
ARGS ?=
# Words for the tests, such as T='-tc=allreduce*'
T ?=

# How an option is passed on: with its value, or as a word alone where it is 1, or 0
with_value := GPUS MODEL BATCH LR EPOCHS ALLREDUCE KVSTORE KERNELS SPLIT SEED STEPS LIMIT \
    DATA INIT SAVE LOG
word_if_1 := OVERLAP EVALUATE_ALL VERBOSE
word_if_0 := SHUFFLE REPLICA_CHECK

# A value stands in quotes as it was typed, so that the program, not the shell, judges it
quote = '$(subst ','\'',$1)'
lower = $(shell echo $1 | tr A-Z_ a-z-)
check_0_1 = $(if $(filter-out 0 1,$($1)),$(error $1=$($1) is unknown: use 0 or 1))
options = $(foreach x,$(word_if_1) $(word_if_0),$(call check_0_1,$x)) \
    $(foreach x,$(with_value),$(if $(value $x),--$(call lower,$x) $(call quote,$(value $x)))) \
    $(foreach x,$(word_if_1),$(if $(filter 1,$($x)),--$(call lower,$x))) \
    $(foreach x,$(word_if_0),$(if $(filter 0,$($x)),--no-$(call lower,$x))) $(value ARGS)

# ----- How to build ----------------------------------------------------------------------------

# Where to run: cuda, cpu (the stand-in), or auto: cuda where both nvcc and a GPU are found
BACKEND ?= auto
# CUDA compiler
NVCC ?= $(or $(shell command -v nvcc 2>/dev/null),$(wildcard /usr/local/cuda/bin/nvcc),nvcc)
# GPU architectures to compile for, such as 75 or '75 90': that of the first GPU, 75 without one
SM ?= $(or $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
    sed -nE '1s/^([0-9]+)\.([0-9]+)$$/\1\2/p'),75)
# C++ compiler of the CPU stand-in: g++, or clang++ where there is no g++
CXX := $(if $(filter default,$(origin CXX)),$(notdir \
    $(shell command -v g++ || command -v clang++ || echo g++)),$(CXX))
# Processor the stand-in is compiled for; empty where the compiler does not know `native`
MARCH ?= $(shell $(CXX) -march=native -x c++ -E /dev/null >/dev/null 2>&1 && echo -march=native)
# Compiler flags of the CPU stand-in
CPUFLAGS ?= -std=c++17 -O3 $(MARCH) -fopenmp-simd -g -Wall -Wextra \
    $(if $(findstring clang,$(CXX)),-Wno-pass-failed)
# 1 turns warnings into errors
WERROR ?=
# doctest's header: the system's, or the one that make brings
DOCTEST ?= $(firstword $(wildcard /usr/include/doctest/doctest.h \
    /usr/local/include/doctest/doctest.h) build/doctest/doctest.h)

# What `make asan` and `make race` add to CPUFLAGS
flags_asan := -O1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
flags_race := -O1 -fsanitize=thread

nvcc_flags = -std=c++17 -O3 -lineinfo \
    $(foreach sm,$(SM),-gencode arch=compute_$(sm),code=sm_$(sm)) \
    -Xcompiler -Wall,-Wextra $(if $(WERROR),-Werror all-warnings -Xcompiler -Werror)
cpu_flags = $(CPUFLAGS) $(if $(WERROR),-Werror) -pthread -Icpu

# ----- Which backend, and why ------------------------------------------------------------------

has_nvcc = $(shell command -v $(firstword $(NVCC)) 2>/dev/null)
has_gpu = $(shell nvidia-smi -L 2>/dev/null | grep '^GPU')

ifeq ($(BACKEND),cpu)
  dir := build/cpu
  why := cpu stand-in (BACKEND=cpu)
else ifeq ($(BACKEND),cuda)
  $(if $(has_nvcc),,$(error BACKEND=cuda needs nvcc: install the CUDA Toolkit or set \
    NVCC=/path/to/nvcc))
  dir := build/gpu
  SM := $(SM)
  why := cuda for SM $(SM) (BACKEND=cuda)
else ifneq ($(BACKEND),auto)
  $(error BACKEND=$(BACKEND) is unknown: use auto, cuda or cpu)
else ifeq ($(has_nvcc),)
  dir := build/cpu
  why := cpu stand-in (no nvcc found; NVCC=/path/to/nvcc if there is one)
else ifeq ($(has_gpu),)
  dir := build/cpu
  why := cpu stand-in (no GPU found; BACKEND=cuda to force)
else
  dir := build/gpu
  SM := $(SM)
  why := cuda for SM $(SM) (nvcc and a GPU found; BACKEND=cpu for the stand-in)
endif

# The data set that a training needs; a folder of your own is used as it is, data/mnist if complete
archives := train-images-idx3-ubyte.gz train-labels-idx1-ubyte.gz \
    t10k-images-idx3-ubyte.gz t10k-labels-idx1-ubyte.gz
mnist := $(addprefix data/mnist/,$(archives))
folder := $(patsubst ./%,%,$(patsubst %/,%,$(or $(value DATA),data)))
ifeq ($(folder),data)
  dataset := build/data.ok
else ifeq ($(folder),data/mnist)
  dataset := $(if $(filter-out $(wildcard $(mnist)),$(mnist)),build/mnist.ok)
endif

# ----- What you can make -----------------------------------------------------------------------

.PHONY: all run test exercise bench race asan sanitize plot sweep data clean help backend FORCE
.DELETE_ON_ERROR:
.SUFFIXES:

all: $(dir)/mgpu $(dir)/tests  ## build the program and the tests

run: backend $(dir)/mgpu $(dataset)  ## train: make run GPUS=2 BATCH=256 LR=0.2 EPOCHS=10
	@$(dir)/mgpu $(options)

test: backend $(dir)/tests $(dataset)  ## run the tests: make test T='-tc=allreduce*'
	@set -f; $(dir)/tests $(value T)

exercise: backend $(dir)/mgpu  ## judge your allreduce, or ALLREDUCE=name
	@$(dir)/mgpu --exercise $(options)

bench: backend $(dir)/mgpu  ## time BENCH, into build/bench.csv
	@$(dir)/mgpu --bench=$(call quote,$(value BENCH)) $(options)

asan: build/asan/tests $(dataset)  ## the tests under AddressSanitizer and UBSan (CPU stand-in)
	@set -f; build/asan/tests $(value T)

# The kernel may spread addresses too widely for ThreadSanitizer: setarch -R turns that off
tsan = TSAN_OPTIONS="halt_on_error=0 exitcode=66 $$TSAN_OPTIONS" \
    $(shell setarch $$(uname -m) -R true 2>/dev/null && echo setarch $$(uname -m) -R)

# With ALLREDUCE only what is about that one
race: $(if $(ALLREDUCE),,build/race/tests) build/race/mgpu $(dataset)  ## tests, exercise, training under ThreadSanitizer
	@set -f; $(if $(ALLREDUCE),,$(tsan) build/race/tests $(value T))
	@$(tsan) build/race/mgpu --exercise --gpus 3 $(options)
	@$(tsan) build/race/mgpu --gpus 2 --batch 8 --limit 20 --epochs 1 --log build/race/log.csv \
	    $(options)

memory_checker = $(or $(shell command -v compute-sanitizer 2>/dev/null),$(wildcard \
    /usr/local/cuda/bin/compute-sanitizer))

# All tests but those of whole trainings, and a short training with each of its tools
sanitize:  ## tests, a short training under compute-sanitizer (GPU)
	@$(if $(has_gpu),,echo 'make sanitize needs a GPU: none found' >&2; exit 1)
	@$(if $(memory_checker),,echo 'make sanitize needs compute-sanitizer (CUDA Toolkit)' >&2; exit 1)
	@$(MAKE) --no-print-directory BACKEND=cuda build/gpu/mgpu build/gpu/tests $(dataset)
	@set -f; $(memory_checker) --tool memcheck --error-exitcode 1 build/gpu/tests \
	    $(or $(value T),-tce=program*,train*,stand-in*)
	@for tool in memcheck racecheck initcheck synccheck; do \
	    echo "compute-sanitizer --tool $$tool"; \
	    $(memory_checker) --tool $$tool --error-exitcode 1 build/gpu/mgpu --gpus 2 --batch 64 \
	        --limit 160 --epochs 1 --log build/gpu/log.csv $(options) || exit 1; \
	done

plot: log = $(if $(LOG),$(call quote,$(value LOG)),build/log.csv)
plot:  ## draw build/log.csv, test accuracy over epochs, to build/plot.svg (gnuplot)
	@command -v gnuplot >/dev/null || { \
	    echo 'make plot needs gnuplot: apt-get install gnuplot-nox' >&2; exit 1; }
	@grep -qs '^[0-9]' $(log) || { echo 'make plot needs a training log: make run' >&2; exit 1; }
	@mkdir -p build
	@gnuplot -e "set terminal svg size 420,300 background 'white'; set grid; unset key; \
	    set xlabel 'epoch'; set ylabel 'test acc'; set datafile separator comma; \
	    plot '<cat' using 1:3 every ::1 with linespoints lw 2 pt 7 ps 0.4 lc rgb '#1f77b4'" \
	    <$(log) >build/plot.svg.new && mv build/plot.svg.new build/plot.svg
	@echo build/plot.svg

# A run that diverges is a result, nan; any other failure ends the sweep
sweep: backend $(dir)/mgpu $(dataset)  ## test acc by learning rates and devices, BATCH for each
	@mkdir -p build/sweep
	@echo 'gpus,batch,lr,test_acc' >build/sweep.csv
	@printf '%12s' lr; for k in $(SWEEP_GPUS); do printf '%12s' "GPUS=$$k"; done; echo
	@for lr in $(SWEEP_LR); do \
	    printf '%12s' $$lr; \
	    for k in $(SWEEP_GPUS); do \
	        batch=$$(($(or $(BATCH),256) * k)); log=build/sweep/gpus$$k-lr$$lr.csv; rm -f $$log; \
	        if $(dir)/mgpu $(options) --gpus $$k --batch $$batch --lr $$lr --log $$log \
	            >build/sweep/out 2>build/sweep/err; then acc=$$(tail -n 1 $$log | cut -d, -f3); \
	        elif grep -q 'the loss is' build/sweep/err; then acc=nan; \
	        else echo; cat build/sweep/err >&2; exit 1; fi; \
	        echo "$$k,$$batch,$$lr,$$acc" >>build/sweep.csv; \
	        printf '%12s' $$acc; \
	    done; \
	    echo; \
	done
	@if command -v gnuplot >/dev/null; then \
	    gnuplot -e "set terminal svg size 420,300 background 'white'; set grid; set key bottom; \
	        set xlabel 'learning rate'; set ylabel 'test acc'; set logscale x 2; \
	        set datafile separator comma; plot for [k in '$(SWEEP_GPUS)'] 'build/sweep.csv' \
	        using (column('gpus') == k ? column('lr') : NaN):'test_acc' with linespoints \
	        lw 2 pt 7 ps 0.4 title 'GPUS='.k" >build/sweep.svg && echo build/sweep.svg; \
	else echo 'no picture of build/sweep.csv: gnuplot is missing (apt-get install gnuplot-nox)'; fi

data: $(if $(filter mnist data/mnist,$(folder)),build/mnist.ok,build/data.ok)  ## fetch Fashion-MNIST; DATA=mnist: MNIST

clean:  ## remove build/ (data/ stays)
	rm -rf build

help:  ## this list
	@echo 'make TARGET [NAME=value ...]'; echo
	@sed -nE 's/^([a-z]+):.*  ## (.*)/\1\t\2/p' Makefile | expand -t 15
	@echo
	@sed -nE '/^# /{ h; n; /^[A-Z_]+ [?:]=/{ s/ .*//; G; s/\n# /\t/p } }' Makefile | expand -t 15

backend:
	@echo 'backend: $(why)' >&2

# ----- Compiling -------------------------------------------------------------------------------

build/gpu/mgpu: mgpu.cu build/gpu/flags
	$(NVCC) $(nvcc_flags) $< -o $@

build/gpu/tests: tests.cu mgpu.cu $(DOCTEST) build/gpu/flags
	$(NVCC) $(nvcc_flags) -isystem $(dir $(DOCTEST)) $< -o $@

build/cpu/mgpu build/asan/mgpu build/race/mgpu: build/%/mgpu: \
    build/cpu/mgpu.cu cpu/cuda_runtime.h build/%/flags
	$(CXX) $(cpu_flags) $(flags_$*) -x c++ $< -o $@

build/cpu/tests build/asan/tests build/race/tests: build/%/tests: \
    build/cpu/tests.cu build/cpu/mgpu.cu cpu/cuda_runtime.h $(DOCTEST) build/%/flags
	$(CXX) $(cpu_flags) $(flags_$*) -iquote build/cpu -isystem $(dir $(DOCTEST)) -x c++ $< -o $@

# build/*/flags holds the flags of the last build, and the processor's name because of
# -march=native. It is rewritten only when they change, and what depends on it is then rebuilt.
build/%/flags: command = $(if $(filter gpu,$*),$(NVCC) $(nvcc_flags),$(CXX) $(cpu_flags) $(flags_$*))
build/%/flags: FORCE
	@mkdir -p $(@D)
	@{ echo $(call quote,$(command)); grep -m1 '^model name' /proc/cpuinfo; } >$@.new; \
	cmp -s $@.new $@ && rm $@.new || mv $@.new $@
FORCE:

# The .cu files in C++. What is left of a launch is something that the sed script does not know.
build/cpu/%.cu: %.cu cpu/to_cpp.sed
	@mkdir -p $(@D)
	@{ echo '#line 1 "$<"'; LC_ALL=C sed -zEf cpu/to_cpp.sed $<; } >$@
	@left=$$(sed -n '1d; /<<<\|__shared__/{=;q}' $@); [ -z "$$left" ] || { \
	    echo "$<:$$((left - 1)): cpu/to_cpp.sed does not understand this:" \
	        "$$(sed -n "$$((left - 1))s/^ *//p" $<)" >&2; exit 1; }

# ----- What a build needs and the machine may lack ---------------------------------------------
# data/fetch.sh brings a file from the first source that has it; it counts if its sha256 is known

debian := https://deb.debian.org/debian/pool/main/d
fashion_sources := /usr/share/datasets/fashion-mnist \
    apt:dataset-fashion-mnist apt-update:dataset-fashion-mnist \
    $(debian)/dataset-fashion-mnist/dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb \
    https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion \
    http://fashion-mnist.s3-website.eu-central-1.amazonaws.com
mnist_sources := https://storage.googleapis.com/cvdf-datasets/mnist \
    https://ossci-datasets.s3.amazonaws.com/mnist
doctest_sources := apt:doctest-dev apt-update:doctest-dev \
    $(debian)/doctest/doctest-dev_2.4.9~ds-1_all.deb \
    https://raw.githubusercontent.com/doctest/doctest/v2.4.9/doctest

build/data.ok: data/sha256 $(addprefix data/,$(archives))
	@sh data/fetch.sh data $< '$(fashion_sources)' $(archives)
	@mkdir -p build && touch $@

build/mnist.ok: data/mnist.sha256 $(mnist)
	@sh data/fetch.sh data/mnist $< '$(mnist_sources)' $(archives)
	@mkdir -p build && touch $@

# An archive that is not there is no error yet: the rules above bring it
$(addprefix data/,$(archives)) $(mnist): ;

build/doctest/doctest.h:
	@sh data/fetch.sh $(@D) cpu/doctest.sha256 '$(doctest_sources)' doctest.h
