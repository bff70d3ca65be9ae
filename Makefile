# make run GPUS=2     trains; make help lists everything else.

# ----- Options of the program: passed on when set, otherwise the program takes its own ---------
# GPUS           number of devices
# MODEL          network: lenet, resnet18, lab_cnn
# BATCH          batch size over all devices together; in make sweep, of each device
# LR             learning rate
# EPOCHS         passes over the training data
# ALLREDUCE      sum by: naive, bucket, host, by_tensor, sharded, ring, tree, rebind, yours
# OVERLAP        1 exchanges the last layers' gradients while the first layers' are still computed
# KVSTORE        the lab's word for ALLREDUCE: local is host, device is by_tensor
# SPLIT          parts of a minibatch in this proportion, such as 3,1, for devices of unequal speed
# EVALUATE_ALL   1 computes test accuracy on all devices instead of gpu(0) alone
# SEED           seed of the parameters and of the order of the samples
# SHUFFLE        0 keeps the training samples in file order
# FIRST_CHECK    0 does not compare the first step with that of one device
# REPLICA_CHECK  0 compares neither the first step nor the replicas: they may drift apart unseen
# STEPS          stop after this many training steps
# LIMIT          only the first so many training and test samples
# DATA           folder with the data set, by default data, where make data puts it
# INIT           .safetensors file with the parameters to start from
# SAVE           .safetensors file that gets the parameters after each epoch
# RESUME         file that SAVE wrote: the training goes on after its last epoch
# LOG            file for the epoch rows, by default build/log.csv
# ARGS           more words for the program, such as ARGS=--help
# T              words for the tests, such as T='-tc=allreduce*'
# BUILD          folder to build in, where this one cannot be written
ifneq ($(BUILD),)
  .PHONY: $(MAKECMDGOALS)
  $(or $(MAKECMDGOALS),usage): ; @sh extras/cpu/elsewhere.sh '$(BUILD)' && \
    MAKELEVEL=0 $(MAKE) --no-print-directory -C '$(BUILD)' BUILD= $@
else
# GPUS=2 is passed on as --gpus '2', in quotes as typed: the program judges it, not the shell
with_value := GPUS MODEL BATCH LR EPOCHS ALLREDUCE SPLIT SEED STEPS LIMIT DATA INIT SAVE RESUME LOG
# OVERLAP=1 is passed on as --overlap, SHUFFLE=0 as --no-shuffle
word_if_1 := OVERLAP EVALUATE_ALL
word_if_0 := SHUFFLE FIRST_CHECK REPLICA_CHECK

quote = '$(subst ','\'',$1)'
lower = $(shell echo $1 | tr A-Z_ a-z-)
valued = $(if $(value $1),--$(or $2,$(call lower,$1)) $(call quote,$(value $1)))
switch = $(if $(filter-out 0 1,$($1)),$(error $1=$($1) is unknown: use 0 or 1),\
    $(if $(filter $2,$($1)),$3))
options = $(foreach x,$(with_value),$(call valued,$x)) $(call valued,KVSTORE,allreduce) \
    $(foreach x,$(word_if_1),$(call switch,$x,1,--$(call lower,$x))) \
    $(foreach x,$(word_if_0),$(call switch,$x,0,--no-$(call lower,$x))) $(value ARGS)
$(if $(and $(KVSTORE),$(ALLREDUCE)),$(error KVSTORE and ALLREDUCE: one of them is enough))

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
# WERROR         1 turns warnings into errors

# ----- Which backend, and why ------------------------------------------------------------------
has_nvcc = $(shell command -v $(firstword $(NVCC)) 2>/dev/null)
has_gpu = $(shell nvidia-smi -L 2>/dev/null | grep '^GPU')
none = $(if $(has_nvcc),$(if $(has_gpu),,no GPU found; BACKEND=cuda to force),\
    no nvcc found; NVCC=/path/to/nvcc if there is one)
ifeq ($(BACKEND),auto)
  why := $(if $(none),cpu stand-in ($(none)),cuda for SM $(SM) (nvcc and a GPU found))
else ifeq ($(BACKEND),cpu)
  why := cpu stand-in (BACKEND=cpu)
else ifeq ($(BACKEND),cuda)
  $(if $(has_nvcc),,$(error BACKEND=cuda needs nvcc: install CUDA, or set NVCC=/path/to/nvcc))
  why := cuda for SM $(SM) (BACKEND=cuda)
else
  $(error BACKEND=$(BACKEND) is unknown: use auto, cuda or cpu)
endif
dir := $(if $(filter cpu,$(firstword $(why))),build/cpu,build/gpu)
tests := $(if $(filter build/cpu,$(dir)),build/cpu/runtime_tests) $(dir)/tests

# ----- What you can make -----------------------------------------------------------------------
# The data set that DATA names; a folder of your own is used as it is
archives := $(sort $(filter %.gz,$(shell cat data/sha256)))
folder := $(patsubst ./%,%,$(patsubst %/,%,$(or $(value DATA),data)))
dataset := $(if $(filter data data/mnist,$(folder)),build/$(notdir $(folder)).ok)
# What make run starts, and how; the source that other programs include
program := $(dir)/mgpu
start :=
source := mgpu.cu
# Each folder brings targets of its own. extras/cpu/: misspelt variables, the stand-in, sanitizers
makefiles := Makefile $(wildcard extras/*/*.mk)
usage:
	@echo 'make run GPUS=2   trains on two devices'; echo 'make test         checks it'; \
	echo 'make help         lists the other targets and all variables'
-include $(sort $(wildcard extras/*/*.mk))

.PHONY: usage all run test data clean help backend
.DELETE_ON_ERROR .SUFFIXES:

# Status 4 says that T matches no test case of a program: an error if it matches none at all
run_tests = set -f; ran=; failed=; for tests in $1; do $2 $$tests $(value T); \
    case $$? in 0) ran=yes ;; 4) ;; *) failed=yes ;; esac; done; [ "$$ran" ] && [ ! "$$failed" ]
# What a crash is most often, in a line. 128 + the signal: SIGABRT, SIGFPE, SIGSEGV
crash = case $$? in 134) echo 'mgpu: stopped by what stands above (an index beyond its list?)' ;; \
    136) echo 'mgpu: a division by zero?' ;; \
    139) echo 'mgpu: an index beyond its list, a null pointer, endless recursion?' ;; \
    esac >&2; exit 1

all: $(dir)/mgpu $(tests)  ## build the program and the tests
run: backend $(program) $(dataset)  ## train: make run GPUS=2 BATCH=256 LR=0.2 EPOCHS=10
	@$(start) $(program) $(options) || { $(crash); }
test: backend $(tests) $(dataset)  ## run the tests: make test T='-tc=allreduce*'
	@$(call run_tests,$(tests))
data: build/$(if $(filter %mnist,$(folder)),mnist,data).ok  ## fetch Fashion-MNIST, or DATA=mnist
clean:  ## remove build/ (data/ stays)
	rm -rf build
help:  ## this list
	@echo 'make TARGET [NAME=value ...]'; echo
	@sed -nE 's/^([a-z]+):.*  ## (.*)/\1\t\2/p' $(makefiles) | expand -t 15; echo
	@sed -nE 's/^# ([A-Z_]+  )/\1/p' $(makefiles) | awk '!n[$$0]++'
backend: ; @echo $(call quote,backend: $(why)) >&2

# ----- Compiling -------------------------------------------------------------------------------
# Code for each SM, and PTX for others. (ASSERTIONS: an index beyond a std::vector's end is named)
oldest = $(shell printf '%s\n' $(SM) | sort -n | sed q)
nvcc_flags = -std=c++17 -O3 -lineinfo -D_GLIBCXX_ASSERTIONS \
    $(foreach sm,$(SM),-gencode arch=compute_$(sm),code=sm_$(sm)) \
    -gencode arch=compute_$(oldest),code=compute_$(oldest) \
    -Xcompiler -Wall,-Wextra $(if $(WERROR),-Werror all-warnings -Xcompiler -Werror)

build/gpu/mgpu: mgpu.cu build/gpu/flags
	$(NVCC) $(nvcc_flags) $< -o $@
build/gpu/tests: tests.cu mgpu.cu $(DOCTEST) build/gpu/flags
	$(NVCC) $(nvcc_flags) $(doctest) $< -o $@

# The flags of the last build, and the processor's name because of -march=native: rewritten only
# when they change, and what depends on it is then rebuilt
build/%/flags: flags = $(if $(filter gpu,$*),$(NVCC) $(nvcc_flags),$(CXX) $(cpu_flags) $(flags_$*))
build/%/flags: FORCE
	@mkdir -p $(@D) 2>/dev/null && [ -w $(@D) ] || \
	    { echo 'build/ cannot be written: try make BUILD=folder' >&2; exit 1; }; \
	{ echo $(call quote,$(flags)); grep -m1 '^model name' /proc/cpuinfo; } >$@.$$$$; \
	cmp -s $@.$$$$ $@ && rm $@.$$$$ || mv $@.$$$$ $@

# ----- What a build needs and the machine may lack: data/fetch.sh brings it --------------------
build/data.ok: data/sha256 $(archives:%=data/%)
build/mnist.ok: data/mnist.sha256 $(archives:%=data/mnist/%)
build/data.ok build/mnist.ok:
	@sh data/fetch.sh $(basename $(@F)) && mkdir -p build && touch $@
# An archive that is not there is no error yet: the rule above brings it
data/%.gz: ;
endif
