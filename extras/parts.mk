# The parts of the program below extras/, and how the Makefile finds, builds and tests them.

# ----- The parts ----------------------------------------------------------------------------------

# The program is mgpu.cu or, if there are such parts, program.cu, which includes a copy of mgpu.cu and
# then these parts, in this order. In the copy the functions that a part replaces have other names.
parts := $(wildcard extras/algorithms/algorithms.cu extras/networks/networks.cu \
    extras/files/files.cu extras/fast/fast.cu)
program := $(dir)/mgpu
ifneq ($(parts),)
program := $(dir)/program
programs += program
endif
parts := extras/hooks.cu $(parts)
of_program = $(call without_lesson,parts)
options_program = $(numbers_$(*D)) $(tuned) $(call declared,parts)
links_program = $(lesson)
# What includes PROGRAM needs these, with the tuned operators or, as untuned.cu, without
needs = build/gpu/program.cu build/gpu/untuned.cu $(hooked) $(wordlist 2,9,$(parts)) \
    $(wildcard extras/algorithms/*.h)
hooked := build/gpu/replaced/mgpu.cu extras/hooks.cu extras/hooks.h
tuned = -DPROGRAM='"program.cu"'
untuned = -DPROGRAM='"untuned.cu"'
include_all = mkdir -p $(@D); { printf '\043ifndef MGPU_NO_MAIN\n\043define MGPU_NO_MAIN\n'; \
    printf '\043define PROGRAM_MAIN\n\043endif\n'; \
    printf '\043ifdef DECLARED\n\043include DECLARED\n\043else\n'; \
    printf '\043include "%s"\n' $(firstword $1); printf '\043endif\n'; \
    $(foreach x,$(wordlist 2,9,$1),printf '\043include "%s"\n' $x;) \
    printf '\043ifdef PROGRAM_MAIN\n'; \
    echo 'int main(int argc, char **argv) { return mgpu_main(argc, argv); }'; \
    printf '\043endif\n'; } >$(new) && $(renew)
copy_of = $(if $(filter $1,$(plain)),plain/$1,$(patsubst mgpu.cu,replaced/mgpu.cu,$1))
in_program = $(foreach x,mgpu.cu $(parts),$(call copy_of,$x))
build/gpu/program.cu: FORCE
	@$(call include_all,$(in_program))
build/gpu/untuned.cu: FORCE
	@$(call include_all,replaced/mgpu.cu $(filter-out extras/fast/fast.cu,$(parts)))
copied := extras/replaced.sh extras/definitions.awk extras/hooks.cu
build/gpu/replaced/mgpu.cu: mgpu.cu $(copied)
	@$(copy)
copy = mkdir -p $(@D); sh extras/replaced.sh $< $(filter %.cu %.h,$(wordlist 2,9,$^)) >$(new) && \
    $(finish)

# With g++, mgpu.cu is an object of its own. What else is in the program includes declarations of
# what it names there, parts.h. So an edit of mgpu.cu leaves the parts as they are. Tests of parts
# include lesson.h or, where nothing is tuned, mgpu.h, which have all.
objects += lesson untuned_lesson
# (program.cu is another one when parts come or go)
lesson_cu = build/gpu/$(call copy_of,mgpu.cu)
of_lesson = $(lesson_cu) build/gpu/program.cu
of_untuned_lesson := build/gpu/replaced/mgpu.cu
options_lesson = $(numbers_$(*D)) -DMGPU_NO_MAIN
options_untuned_lesson = $(options_lesson)
apart = $(filter cpu,$(*D))
lesson = $(if $(apart),build/$(*D)/lesson.o)
untuned_lesson = $(if $(apart),build/$(*D)/untuned_lesson.o)
declared = $(if $(apart),-DDECLARED='"$1.h"')
without_lesson = $(if $(apart),$(filter-out $(lesson_cu) $(of_untuned_lesson),$(needs)) \
    build/gpu/$1.h,$(needs))
declarations_sh := extras/declarations.sh extras/definitions.awk
build/cpp/parts.h: $$(call in_cpp,$$(of_lesson)) \
    $$(filter extras/%.cu extras/%.h,$$(needs)) $(declarations_sh)
	@$(declare)
build/cpp/lesson.h: $$(call in_cpp,$$(lesson_cu)) $(declarations_sh)
	@$(declare)
build/cpp/mgpu.h: build/cpp/replaced/mgpu.cu $(declarations_sh)
	@$(declare)
declare = mkdir -p $(@D); sh extras/declarations.sh $(filter %.cu %.h,$^) >$(new) && $(renew)

# ----- Tests --------------------------------------------------------------------------------------

# Those programs whose sources have a case that T matches. (On a GPU they run one after the other.)
in_shell = '$(subst ','\'',$1)'
chosen = $(if $(T),$(shell T=$(call in_shell,$(T)) sh extras/test.sh choose $1),$1)
say_tests:
	@T=$(call in_shell,$(T)) sh extras/test.sh say $(tests)
run_tests = T=$(call in_shell,$(T)) BEFORE=$(call in_shell,$3) \
    AT_ONCE=$(if $(filter build/gpu,$1),1,$$(($(shell nproc) + 1))) sh extras/test.sh run $(2:%=$1/%)
# (The system's doctest if it is not too old: Debian 11's lacks this operator)
DOCTEST := $(or $(shell grep -ls 'operator+.const String *& *lhs' \
    /usr/include/doctest/doctest.h),build/doctest/doctest.h)
build/doctest/doctest.h: ; @sh data/fetch.sh doctest

# ----- Packages of Python -------------------------------------------------------------------------

# Those that extras/ROOM/NAME.txt lists, in build/ROOM_venv
build/%.txt: extras/$$(subst _venv,,$$*).txt
	@mkdir -p build; python3 -m venv $(@D) >$(@D).log 2>&1 || \
	    { echo '$@: python3 has no venv: apt-get install python3-venv' >&2; exit 1; }
	@$(@D)/bin/python -m pip install -q -r $< >$(@D).log 2>&1 && cp $< $@ || \
	    { echo "pip cannot install $<: $$(tail -n 1 $(@D).log)" >&2; exit 1; }

# ----- The other folders --------------------------------------------------------------------------

tests_h := extras/tests.h extras/run_tests.h extras/reference.h extras/format.h
is_test = $(findstring tests,$(*F))
# A program of a folder includes the program in one of these ways: untuned, without fast/; tuned,
# which fast.mk has; or watched, which watch.mk has.
of_untuned = $(call without_lesson,mgpu)
options_untuned = $(untuned) $(call declared,mgpu)
links_untuned = $(untuned_lesson)
define add_program # NAME, WAY, FILE.cu and what it includes
programs += $1
of_$1 = $3 $$(of_$2)
headers_$1 = $$(headers_$2) $(wildcard $(dir $(firstword $3))*.h)
options_$1 = $$(options_$2)
links_$1 = $$(links_$2)
endef
include $(filter-out extras/cpu/cpu.mk,$(sort $(wildcard extras/*/*.mk)))
# extras/ROOM/tests.cu is the program ROOM_tests. (A handout has none.)
tested := $(patsubst extras/%/tests.cu,%,$(wildcard extras/*/tests.cu))
tested := $(filter-out cpu $(untested),$(tested))
longest := exercise check fast # they begin first
tested := $(filter $(longest),$(tested)) $(filter-out $(longest),$(tested))
$(foreach x,$(tested),$(eval $(call add_program,$x_tests,$(or $(way_$x),untuned),\
    extras/$x/tests.cu $(wildcard extras/$x/$x.cu) $(tests_h))))
tests += $(tested:%=%_tests)
-include extras/cpu/cpu.mk # compiles what the others name
tests := $(call chosen,$(tests))
unexport $(filter-out $(own),$(typed)) # make would expand a $ in them
# In the environment, options such as DATA or SEED may be there for something else
options := $(shell sed -nE 's/^(\# |    \{")([A-Z_]+)("|  ).*/\2/p' Makefile extras/*/*.mk mgpu.cu \
    extras/*/*.cu extras/*/*.h 2>/dev/null | sort -u)
$(foreach x,$(filter-out $(own),$(options)),$(if $(findstring environment,$(origin $x)),\
    $(warning $x in the environment is ignored: write make run $x=...)$(eval undefine $x)))

# ----- What is said -------------------------------------------------------------------------------

.PHONY: help
listed = sed -nE 's/^([a-z_]+):.*  $1 (.*)/\1\t\2/p' $2 2>/dev/null | expand -t 15
variables = cat $1 2>/dev/null | sed -nE 's/^\# ([A-Z_]+  )/\1/p'
own_options = sed -nE 's/^    \{"([A-Z_]+)", "[^"]*", "(.*)", "(.*)".*\},$$/\1\t\3 (\2)/p' $1 \
    2>/dev/null | expand -t 15
rooms := $(sort $(patsubst extras/%/,%,$(dir $(wildcard extras/*/*.cu extras/*/*.mk))))
# (Through cat, for a reader such as head may leave early)
help:  ### print this list
	@{ echo 'make TARGET NAME=value ...'; echo; \
	    $(call listed,\#\#\#,Makefile extras/*/*.mk extras/*.mk); echo; \
	    $(call own_options,mgpu.cu); echo; $(call variables,Makefile); \
	    $(if $(rooms),echo; echo 'More: make $(rooms:%=help_%)' | fold -sw 100); } | cat || :
.PHONY: $(rooms:%=help_%)
$(rooms:%=help_%): help_%:
	@{ $(call listed,\#\#\#?,extras/$*/*.mk); $(call variables,extras/$*/*.mk); \
	    $(call own_options,extras/$*/*.cu extras/$*/*.h); } | cat || :

# ----- Compiling ----------------------------------------------------------------------------------

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
# Code for each SM, on all cores if nvcc can, and PTX for others unless these are the GPUs' own
cores := $(if $(filter build/gpu,$(dir)),$(shell $(NVCC) --help | grep -oe '^--split-compile '))
nvcc_flags = -std=c++17 $(or $(level_$(*F)),-O3) -lineinfo -D_GLIBCXX_ASSERTIONS \
    -Xcompiler -Wall,-Wextra $(or $(sms_$(*F)),$(sms)) $(cores:%=%=0) \
    $(if $(WERROR),-Werror all-warnings -Xcompiler -Werror) $(compiler_$(*F):%=-ccbin %)
sms = $(foreach x,$(SM),-gencode arch=compute_$x,code=$(if $(native),sm_$x,[sm_$x,compute_$x]))

# What is compiled gets the date at which that began, so that an edit meanwhile is newer. All that is
# written gets its name when it is whole, since another make may be reading it, or this one be killed.
show := $(if $(V),,@)
silent := $(findstring s,$(firstword -$(MAKEFLAGS)))
begin = @mkdir -p $(@D) && touch $@.begun; $(if $(silent),,echo 'compiling $@$(takes)' >&2)
to = -o $(new) && touch -r $@.begun $(new) && $(finish)
as_program = -o $(new) && $(finish)
new = $@.$$$$
finish = mv -f $(new) $@
renew = if cmp -s $(new) $@; then rm $(new); else $(finish); fi # only if it differs

# The flags of the last build. The file changes only if they do, and then all is built again. (To an
# implicit rule's target FORCE would be newer than all that needs the flags.)
build/gpu/flags: flags = $(NVCC) $(nvcc_flags)
$(patsubst %,build/%/flags,$(sort gpu cpu cu $(variants))): build/%/flags: FORCE
	@{ mkdir -p $(@D) && echo $(call in_shell,$(flags)) >$(new); } 2>/dev/null || { \
	    echo 'build/ cannot be written, or is full' >&2; exit 1; }; $(renew)
# An edit would be older than what a wrong clock has dated in the future (by more than 2 s, for
# another make may be at work)
future := $(if $(MAKELEVEL:0=),,$(shell [ -d build ] && mark=$$(mktemp) && \
    touch -d "@$$(($$(date +%s) + 2))" $$mark 2>/dev/null && find build -name '*_venv' -prune -o \
    -type f -newer $$mark -print -exec touch -t 200001010000 {} + | sed -n 1p; rm -f $$mark))
$(if $(future),$(warning $(future) is dated in the future: what is so is built again))
