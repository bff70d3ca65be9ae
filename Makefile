#     make run GPUS=2     train LeNet on two devices
#     make test           check that everything is right
#     make help           list more targets, variables and options
#
# GPUS=2 is an option of the program. make passes on each word NAME=value, except its own variables:

# BACKEND        where to run: cuda, cpu (emulated devices), or auto: cuda with nvcc and a GPU
BACKEND ?= auto
# NVCC           CUDA compiler
NVCC ?= $(or $(shell command -v nvcc 2>/dev/null),$(wildcard /usr/local/cuda/bin/nvcc),nvcc)
# SM             GPU architectures to compile for, such as 75 or '75 90'; by default the GPUs' own
# CXX            C++ compiler for BACKEND=cpu
# T              options of the tests, such as T='-tc=allreduce*'
# V              1 shows the compilers' commands
# WERROR         1 turns warnings into errors
own := BACKEND NVCC SM CXX T V WERROR CUDA_%
# (The words in single quotes for the shell)
typed = $(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name)))
words = $(foreach name,$(filter-out $(own),$(typed)),'$(name)=$(subst ','\'',$(value $(name)))')

# ----- What you can make --------------------------------------------------------------------------
# (make looks up what stands behind $$ when it gets to the target.)
.SECONDEXPANSION:
.PHONY: usage all run test say_tests data clean help backend FORCE
usage:
	@sed -n '1,/^$$/s/^#     //p' Makefile
run: backend $$(program) data  ### train: make run GPUS=2 BATCH=256 LR=0.2 EPOCHS=10
	@$(start) $(program) $(words)
test: backend say_tests $$(addprefix $$(dir)/,$$(tests)) data  ### run the tests: T='-tc=allreduce*'
	@$(call run_tests,$(dir),$(tests))
data:  ### download Fashion-MNIST, or prepare the data set in the folder DATA
	@sh data/unpack.sh $(words)
all: $$(addprefix $$(dir)/,$$(filter-out $$(not_in_all),$$(programs)))  ### build all programs
clean:  ### remove build/
	@said=$$(rm -rf build 2>&1) || { echo "$$said" | head -n 1 >&2; exit 1; }
backend:
	@echo 'backend: $(backend)$(if $(filter build/gpu,$(dir)), for SM $(SM))' >&2
.DELETE_ON_ERROR .SECONDARY .SUFFIXES:
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

# ----- How a .cu becomes a program ----------------------------------------------------------------
# Of each program NAME, of_NAME is its .cu file and those that this one includes, and headers_NAME
# what needs no translation for the stand-in. It is compiled with options_NAME to NAME.o, and this
# is linked with links_NAME. (In a rule $(*F) is NAME, and build/$(*D) is its folder.)
programs := mgpu tests
of_mgpu := mgpu.cu
options_mgpu = $(numbers_$(*D))
of_tests = tests.cu $(hooked) $(tests_h)
tests := tests
# extras/parts.mk has the other programs. extras/cpu/cpu.mk has the same two rules for g++.
include extras/parts.mk
$(patsubst %,build/gpu/%.o,$(programs) $(objects)): build/%.o: $$(of_$$(*F)) $$(headers_$$(*F)) \
    $$(if $$(is_test),$(DOCTEST)) build/gpu/flags
	$(begin)
	$(show)$(NVCC) -c $(nvcc_flags) -I. -Ibuild/gpu $(if $(is_test),-isystem $(dir $(DOCTEST))) \
	    $(options_$(*F)) $< $(to)
$(programs:%=build/gpu/%): build/%: $$(links_$$(*F)) build/%.o
	$(show)$(NVCC) $(nvcc_flags) $(filter %.o,$^) $(as_program)
