#     make run GPUS=2     train LeNet on two devices
#     make test           check that everything is right
#     make help           list all targets, variables and options
#
# GPUS=2 is an option of the program. make passes on each word NAME=value, except its own variables:

# BACKEND        where to run: cuda, cpu (emulated devices), or auto: cuda with nvcc and a GPU
BACKEND ?= auto
# NVCC           CUDA compiler
NVCC ?= $(or $(shell command -v nvcc 2>/dev/null),$(wildcard /usr/local/cuda/bin/nvcc),nvcc)
# SM             GPU architectures to compile for, such as 75 or '75 90'; by default the GPUs' own
# CXX            C++ compiler for BACKEND=cpu
# WERROR         1 turns warnings into errors
# T              options of the tests, such as T='-tc=allreduce*'
# BUILD          folder to copy this one to, and to build in, if this one cannot be written
own := BACKEND NVCC SM CXX WERROR T BUILD CUDA_%

# The words for the program, in single quotes for the shell
typed = $(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name)))
words = $(foreach name,$(filter-out $(own),$(typed)),'$(name)=$(subst ','\'',$(value $(name)))')

.SECONDEXPANSION: # see "Compiling"

ifneq ($(BUILD),)
.PHONY: $(MAKECMDGOALS)
$(or $(MAKECMDGOALS),usage):
	@sh data/copy.sh '$(BUILD)'
	@$(MAKE) --no-print-directory -C '$(BUILD)' BUILD= $@
else
$(if $(MAKELEVEL:0=),,$(shell sh data/stale.sh)) # times alone may lie
# On a terminal, say what is being built. (The shell runs this script, and the script the recipe.)
build/%: .SHELLFLAGS = data/building.sh $@
# Use all cores, but make several targets, such as `make clean run`, one after the other
MAKEFLAGS += $(if $(MAKELEVEL:0=)$(word 2,$(MAKECMDGOALS)),,-j$(shell nproc))

# ----- The backend, and why -----------------------------------------------------------------------
has_nvcc := $(shell command -v $(firstword $(NVCC)) 2>/dev/null)
has_gpu := $(shell nvidia-smi -L 2>/dev/null | grep '^GPU')
ifeq ($(filter auto cuda cpu,$(BACKEND)),)
  $(error BACKEND=$(BACKEND) is unknown: use auto, cuda or cpu)
else ifneq ($(BACKEND),auto)
  backend := $(BACKEND) (BACKEND=$(BACKEND)$(if $(filter cuda,$(BACKEND)$(has_gpu)),: no GPU found))
else ifeq ($(wildcard extras/cpu),)
  backend := cuda (extras/cpu is not here)
else ifeq ($(has_nvcc),)
  backend := cpu (no nvcc found; NVCC=/path/to/nvcc if there is one)
else ifeq ($(has_gpu),)
  backend := cpu (no GPU found; BACKEND=cuda to force)
else
  backend := cuda (nvcc and a GPU found)
endif
dir := build/$(if $(filter cuda,$(backend)),gpu,cpu)
ifeq ($(dir)$(has_nvcc),build/gpu)
  $(error the backend cuda needs nvcc: install CUDA, or set NVCC=/path/to/nvcc)
endif

# For each GPU here the newest architecture that it runs and nvcc knows; 75 where there is no GPU
gpus := $(if $(has_gpu),$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader | tr -d .))
known := $(and $(gpus),$(has_nvcc),$(shell $(NVCC) --list-gpu-arch | sed s/compute_// | sort -n))
native := $(if $(SM)$(filter-out $(known),$(gpus)),,$(gpus))
SM := $(or $(SM),$(shell for gpu in $(gpus); do newest=none; for sm in $(known); do \
    [ $$sm -gt $$gpu ] || newest=$$sm; done; echo $$newest; done | sort -nu),75)
$(and $(filter none,$(SM)),$(filter build/gpu,$(dir)),$(error this CUDA no longer knows a GPU \
    here ($(gpus)): use an older one, or BACKEND=cpu))

# ----- What you can make --------------------------------------------------------------------------
# The program is mgpu.cu or, if there are such parts below extras/, build/gpu/program.cu (on the
# stand-in build/cpp/program.cu), which includes mgpu.cu and then these parts, in this order.
parts := $(wildcard extras/algorithms/algorithms.cu extras/networks/networks.cu \
    extras/files/files.cu extras/fast/fast.cu)
program := $(dir)/$(if $(parts),program,mgpu)
programs := mgpu tests $(if $(parts),program)
tests := tests
# (The system's doctest if it is not too old: Debian 11's lacks this operator)
DOCTEST := $(or $(shell grep -ls 'operator+.const String *& *lhs' \
    /usr/include/doctest/doctest.h),build/doctest/doctest.h)
# Of each program NAME, of_NAME is its .cu file and those that this one includes, and headers_NAME
# what needs no translation for the stand-in. It is compiled with options_NAME to NAME.o, and this is
# linked with links_NAME. (make looks at what follows $$ when it gets to a target, whose name is then
# $(*F), in a folder build/$(*D).) Under "Compiling" are the rules for nvcc, in cpu.mk those for g++.
of_mgpu := mgpu.cu
options_mgpu = $(numbers_$(*D))
tests_h := extras/tests.h extras/reference.h extras/format.h
of_tests := tests.cu mgpu.cu $(tests_h)
options_tests = -isystem $(dir $(DOCTEST))
# What includes PROGRAM needs these, with the tuned operators or, as untuned.cu, without
needs = build/gpu/program.cu build/gpu/untuned.cu mgpu.cu $(parts) $(wildcard extras/algorithms/*.h)
of_program = $(needs)
options_program = $(numbers_$(*D)) $(tuned)
tuned = -DPROGRAM='"program.cu"'
untuned = -DPROGRAM='"untuned.cu"'
usage:
	@sed -n '1,/^$$/s/^#     //p' Makefile
# (cpu.mk compiles what the others name.)
-include $(filter-out extras/cpu/cpu.mk,$(sort $(wildcard extras/*/*.mk))) extras/cpu/cpu.mk
unexport $(filter-out $(own),$(typed)) # make would expand a $ in them
# In the environment, options such as DATA or SEED may be there for something else
options := $(shell sed -nE 's/^(\# |    \{")([A-Z_]+)("|  ).*/\2/p' Makefile extras/*/*.mk mgpu.cu \
    extras/*/*.cu extras/*/*.h 2>/dev/null | sort -u)
$(foreach x,$(filter-out $(own),$(options)),$(if $(findstring environment,$(origin $x)),\
    $(warning $x in the environment is ignored: write make run $x=...)$(eval undefine $x)))

.PHONY: usage all run test data clean help backend FORCE
.DELETE_ON_ERROR .SECONDARY .SUFFIXES:
all: $(dir)/mgpu $(tests:%=$(dir)/%)  ## build the program and the tests
run: backend $(program) data  ## train: make run GPUS=2 BATCH=256 LR=0.2 EPOCHS=10
	@$(start) $(program) $(words)
test: backend $(tests:%=$(dir)/%) data  ## run the tests: make test T='-tc=allreduce*'
	@$(call run_tests,$(tests:%=$(dir)/%))
data:  ## download Fashion-MNIST, or prepare the data set in the folder DATA
	@sh data/unpack.sh $(words)
clean:  ## remove build/
	@said=$$(rm -rf build 2>&1) || { echo "$$said" | head -n 1 >&2; exit 1; }
help:  ## print this list
	@echo 'make TARGET NAME=value ...'; echo
	@sed -nE 's/^([a-z_]+):.*  ## (.*)/\1\t\2/p' Makefile extras/*/*.mk 2>/dev/null | expand -t 15
	@echo; sed -nE 's/^# ([A-Z_]+  )/\1/p' Makefile extras/*/*.mk 2>/dev/null | awk '!seen[$$0]++'
	@echo; sed -nE 's/^    \{"([A-Z_]+)", [^"]*"(.*)".*\},$$/\1\t\2/p' mgpu.cu extras/*/*.cu extras/*/*.h \
	    2>/dev/null | expand -t 15
backend:
	@echo 'backend: $(backend)$(if $(filter build/gpu,$(dir)), for SM $(SM))' >&2

# Run each of these programs that has a test case that T matches, on the stand-in as many at once as
# there are cores. At least one must have one.
run_tests = set -f; matched=; for tests in $(1); do \
        $$tests $(T) --count 2>&1 | grep -q ' filters: 0$$' || matched="$$matched $$tests"; done; \
    [ "$$matched" ] || { echo no test case matches $(T) >&2; exit 1; }; \
    printf '%s\n' $$matched | WORDS='$(subst ','\'',$(T))' xargs -P $(at_once) -I TESTS sh -fc \
        'echo "running TESTS" >&2; eval "$(2) TESTS $$WORDS" >TESTS.out 2>&1; status=$$?; \
        cat TESTS.out; exit $$status'
at_once := $(if $(filter build/gpu,$(dir)),1,$(shell nproc))

# ----- Compiling ----------------------------------------------------------------------------------
# Code for each SM, on all cores if nvcc can, and PTX for others unless these are the GPUs' own
cores := $(if $(filter build/gpu,$(dir)),$(shell $(NVCC) --help | grep -oe '^--split-compile '))
nvcc_flags = -std=c++17 $(or $(level_$(*F)),-O3) -lineinfo -D_GLIBCXX_ASSERTIONS \
    -Xcompiler -Wall,-Wextra $(or $(sms_$(*F)),$(sms)) $(cores:%=%=0) \
    $(if $(WERROR),-Werror all-warnings -Xcompiler -Werror)
sms = $(foreach x,$(SM),-gencode arch=compute_$x,code=$(if $(native),sm_$x,[sm_$x,compute_$x]))

# What is half-written, because make was killed, must not count: it has another name until then
to = -o $$part && $(finish)
finish = mv -f $$part $@
renew = { cmp -s $$part $@ || $(finish); } # only if it differs

$(patsubst %,build/gpu/%.o,$(programs) $(objects)): build/%.o: $$(of_$$(*F)) $$(headers_$$(*F)) \
    $$(if $$(findstring tests,$$(*F)),$(DOCTEST)) build/gpu/flags
	$(NVCC) $(nvcc_flags) -I. -Ibuild/gpu $(options_$(*F)) -c $< $(to)
$(programs:%=build/gpu/%): build/%: $$(links_$$(*F)) build/%.o
	$(NVCC) $(nvcc_flags) $(filter %.o,$^) $(to)

# The source of the program, and one without the tuned operators. fast.cu wants copies of what it
# replaces: plain/mgpu.cu instead of mgpu.cu.
include_all = { printf '\043ifndef MGPU_NO_MAIN\n\043define MGPU_NO_MAIN\n\043define PROGRAM_MAIN\n'; \
    printf '\043endif\n'; printf '\043include "%s"\n' $1; printf '\043ifdef PROGRAM_MAIN\n'; \
    echo 'int main(int argc, char **argv) { return mgpu_main(argc, argv); }'; \
    printf '\043endif\n'; } >$$part && $(renew)
build/gpu/program.cu build/cpp/program.cu: FORCE
	@$(call include_all,$(foreach x,mgpu.cu $(parts),$(if $(filter $x,$(plain)),plain/$x,$x)))
build/gpu/untuned.cu build/cpp/untuned.cu: FORCE
	@$(call include_all,$(filter-out extras/fast/fast.cu,mgpu.cu $(parts)))
build/doctest/doctest.h: ; @sh data/fetch.sh doctest

# The flags of the last build. The file changes only if they do, and then all is built again.
build/gpu/flags: flags = $(NVCC) $(nvcc_flags)
build/%/flags: FORCE
	@{ echo '$(subst ','\'',$(flags))' >$$part; } 2>/dev/null || { \
	    echo 'build/ cannot be written, or is full: try make BUILD=folder' >&2; \
	    exit 1; }; $(renew)
endif
