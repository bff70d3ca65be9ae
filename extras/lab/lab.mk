# The laboratory's targets. The Makefile includes this file where it is there.

# FABRIC         another machine's network, such as ethernet100, see extras/lab/fabric.md
# PROFILE        times of kernels, for make trace with FABRIC, such as data/profile.csv
# TRACE_MS       width of make trace's picture in milliseconds, by default the time of the steps
# STEPS          steps that make trace and make profile record, by default 3
# STEP_MS        milliseconds of a step on one device, for make scale; by default it is measured
# RUNS           logs that make plot draws, such as 'a.csv b.csv', by default LOG
# SWEEP_GPUS     numbers of devices that make sweep trains on, by default 1 2
# SWEEP_LR       learning rates that make sweep trains with, by default 0.05 0.1 0.2 0.4
# SUBMISSION     an mgpu.cu whose allreduce make exercise judges, by default the one here
own += SUBMISSION

.PHONY: edited exercise show check bench summary trace profile scale plot pictures_venv sweep

worker := $(if $(SUBMISSION),build/submission,$(dir))/worker
ifeq ($(value NODES)$(value HOSTS),)
exercise: backend build/cpu/judge $(worker)  ## judge yours, or ALLREDUCE=name
	@build/cpu/judge WORKER=$(worker) $(words)
endif
show: backend build/cpu/judge $(worker)  ## show what yours, or ALLREDUCE=name, does
	@build/cpu/judge WORKER=$(worker) SHOW=build/show.txt $(words)
	@sed -e '/^@data$$/{r build/show.txt' -e 'd;}' extras/lab/show.html >build/show.html
	@echo build/show.html: open it in a browser
# (GPUS is for the training: an allreduce must be right on any number of devices)
too := $(if $(value ALLREDUCE)$(value KVSTORE),build/cpu/judge $(worker))
check: backend $(dir)/check $(too) data  ## find what is wrong in any part, from copies to epochs
	@$(dir)/check $(words)
	@$(if $(kernels_edited),$(look_for_races))
	@$(if $(too),build/cpu/judge WORKER=$(worker) $(filter-out 'GPUS=%,$(words_of_judge)))
# Emulated threads run one after another, which hides races. A short training shows those of kernels
# that were edited, if the compiler has ThreadSanitizer.
kernels_edited = $(and $(filter build/cpu,$(dir)),$(wildcard extras/fast/checksum.sh),$(shell \
    sh extras/fast/checksum.sh))
race_log := $(if $(wildcard extras/files),LOG=build/race/log)
look_for_races = $(MAKE) -s build/race/mgpu 2>/dev/null || exit 0; CUDA_CPU_CORES=2 $(tsan) \
    build/race/mgpu GPUS=1 BATCH=4 LIMIT=4 EPOCHS=1 CHECKS=0 $(race_log) \
    >build/race/out || ! grep '^race' build/race/out
# Operators that were edited: make check knows more than a training
run: edited
edited:
	@$(if $(wildcard extras/fast/checksum.sh),[ -z "$$(sh extras/fast/checksum.sh)" ] || \
	    echo 'operators were edited: make check compares them with references in double' >&2)
bench: backend $(dir)/lab build/simulate  ## time BENCH to build/bench.csv, or simulate allreduce on FABRIC
	@$(if $(value FABRIC),sh extras/lab/predict.sh bench $(dir)/lab,$(dir)/lab bench) $(words)
trace: backend $(dir)/lab build/simulate  ## draw when the operations of three steps ran: build/trace.json, .svg
	@sh extras/lab/predict.sh trace $(dir)/lab $(words)
profile: backend $(dir)/lab  ## show where the time of a step goes: kernels and copies of each device
	@$(dir)/lab profile $(words)
scale: backend $(dir)/lab build/simulate  ## predict a step on 1 to 1024 devices, on FABRIC
	@sh extras/lab/predict.sh scale $(dir)/lab $(words)
summary: backend $(dir)/lab  ## list the network's operators: shapes, parameters, FLOPs, memory
	@$(dir)/lab summary $(words)
plot:  ## draw train loss and test acc of RUNS: build/plot.svg, .png; or print them
	@python3 extras/lab/pictures.py accuracy $(words)
pictures_venv: # for make plot and other pictures, where the system has no matplotlib
	python3 -m venv build/pictures_venv && build/pictures_venv/bin/pip install -q matplotlib
sweep: backend $(program) data  ## tabulate test acc by learning rates and devices, with BATCH for each
	@sh extras/lab/sweep.sh $(program) $(words)

# ----- Compiling -------------------------------------------------------------------------------

all: $(dir)/lab $(dir)/worker $(dir)/check build/cpu/judge build/simulate
lab_tests := $(if $(wildcard extras/lab/tests.cu),lab_tests) # a handout has none
tests += $(addprefix $(dir)/,$(lab_tests))
lab_headers := $(wildcard extras/lab/*.h)
wrong := $(wildcard extras/lab/wrong/*.cu)
host_program = $(CXX) -std=c++17 -O1 -Wall -Wextra $(if $(WERROR),-Werror)
build/cpu/judge: extras/lab/judge.cc $(wildcard extras/lab/*.h) build/cpu/flags
	$(host_program) $< $(to)
build/simulate: extras/lab/simulate.cc extras/lab/fabric.h build/cpu/flags
	$(host_program) $< $(to)

# lab, check and the tests include the program's source, with the tuned operators where they are
# there; a worker includes the submission alone, or mgpu.cu and the other algorithms
in_program = $(part_flags) -DPROGRAM='"$1"'
algorithms := $(wildcard extras/algorithms/*.cu extras/algorithms/*.h)
others := $(if $(algorithms),-DWITH_ALGORITHMS)
# These programs include watch.h, where a stream has another type: so they need other products
watched = $(subst products.o,watched_products.o,$(apart_$1))
ifneq ($(apart_cpu),)
build/gpu/watched_products.o: $(products_gpu) extras/lab/watch.h
	$(call compile_products_gpu,-include extras/lab/watch.h)
build/cpu/watched_products.o: $(products_cpu) extras/lab/watch.h
	$(call compile_products_cpu,-include extras/lab/watch.h)
$(dir)/lab $(dir)/check $(dir)/lab_tests: $(dir)/watched_products.o
endif
$(dir)/lab_tests build/asan/lab_tests: %/lab_tests: | %/wrong build/cpu/judge
program_gpu := build/gpu/program.cu $(needs_gpu) $(lab_headers) build/gpu/flags
build/gpu/lab build/gpu/check: build/gpu/%: extras/lab/%.cu $(program_gpu)
	$(NVCC) $(nvcc_flags) $(call in_program,../../build/gpu/program.cu) $(call watched,gpu) $< $(to)
build/gpu/worker: extras/lab/worker.cu build/gpu/judged/mgpu.cu $(algorithms) $(lab_headers) \
    build/gpu/flags
	$(worker_gpu) $(others) -DSUBMISSION='"../../build/gpu/judged/mgpu.cu"' $< $(to)
build/gpu/wrong: extras/lab/worker.cu build/gpu/wrong.cu $(wrong) mgpu.cu $(algorithms) \
    $(lab_headers) build/gpu/flags
	$(worker_gpu) -DALL_WRONG -DSUBMISSION='"../../build/gpu/wrong.cu"' $< $(to)
build/gpu/wrong.cu: $(wrong) extras/lab/lab.mk
	@mkdir -p $(@D); printf '#include "../../%s"\n' $(wrong) >$@.part && mv -f $@.part $@
build/gpu/lab_tests: extras/lab/tests.cu $(tests_h) $(program_gpu) extras/lab/lab.cu \
    extras/lab/check.cu extras/lab/simulate.cc $(DOCTEST)
	$(NVCC) $(nvcc_flags) $(call in_program,../../build/gpu/program.cu) $(call watched,gpu) \
	    -isystem $(dir $(DOCTEST)) $< $(to)

# On the stand-in, and under the sanitizers: first in C++, below build/cpp/. (Under a sanitizer tuned
# operators would take a minute to compile.)
source_cpu := program.cu
source_asan := untuned.cu
source_race := untuned.cu
lab_cpp = build/cpp/extras/lab/$1.cu $(lab_headers)
algorithms_cpp := $(algorithms:%=build/cpp/%)
define lab_programs
program_$1 := build/cpp/$(source_$1) $$(needs_cpp) build/$1/runtime.o
lab_flags_$1 = $$(cpu_flags) $$(flags_$1) -iquote extras/lab $$(once_$1)
build/$1/lab build/$1/check: build/$1/%: $$(call lab_cpp,%) $$(program_$1)
	$$(CXX) $$(lab_flags_$1) $$(call in_program,../../$(source_$1)) $$(call watched,$1) -x c++ $$< \
	    -o $$@
build/$1/worker: $$(call lab_cpp,worker) build/cpp/judged/mgpu.cu $$(algorithms_cpp) \
    build/$1/runtime.o
	$$(CXX) $$(lab_flags_$1) $$(worker_flags_$1) $$(others) -DSUBMISSION='"../../judged/mgpu.cu"' \
	    -x c++ $$< -o $$@
build/$1/wrong: $$(call lab_cpp,worker) $$(wrong:%=build/cpp/%) build/cpp/extras/lab/wrong/yours.h \
    build/cpp/extras/lab/wrong/all.cu build/cpp/mgpu.cu $$(algorithms_cpp) build/$1/runtime.o
	$$(CXX) $$(lab_flags_$1) $$(worker_flags_$1) -DALL_WRONG -DSUBMISSION='"wrong/all.cu"' \
	    -x c++ $$< -o $$@
build/$1/lab_tests: $$(call lab_cpp,tests) $$(program_$1) build/cpp/extras/lab/lab.cu \
    build/cpp/extras/lab/check.cu $(tests_h:%=build/cpp/%) extras/lab/simulate.cc build/$1/doctest.o
	$$(CXX) $$(lab_flags_$1) $$(call in_program,../../$(source_$1)) $$(call watched,$1) $$(linked) \
	    -x c++ $$< -x none build/$1/doctest.o -o $$@
endef
$(foreach x,cpu asan race,$(eval $(call lab_programs,$x)))
$(patsubst %,build/cpu/%,lab worker check wrong lab_tests): $(compiled_once)
build/cpp/extras/lab/wrong/all.cu: $(wrong) extras/lab/lab.mk
	@mkdir -p $(@D); printf '#include "%s"\n' $(notdir $(wrong)) >$@.part && mv -f $@.part $@

# A worker needs little of what it includes: in a copy nothing calls the rest, which is not compiled
judged_needs := extras/lab/judged.sh extras/definitions.awk
build/cpp/judged/mgpu.cu: build/cpp/mgpu.cu $(judged_needs)
	@mkdir -p $(@D); sh extras/lab/judged.sh $< >$@.part && mv -f $@.part $@
build/gpu/judged/mgpu.cu: mgpu.cu $(judged_needs)
	@mkdir -p $(@D); { echo '#line 1 "$<"'; sh extras/lab/judged.sh $<; } >$@.part && mv -f $@.part $@
whole := $(if $(findstring clang,$(CXX)),,-fwhole-program) -Wno-unused-function
worker_flags_cpu := $(whole)
compile_worker = $(CXX) $(cpu_flags) $(whole) -iquote extras/lab \
    -iquote build/cpp/extras/lab/wrong $(once_cpu)
# nvcc's host compiler takes half as long with -O1, and kernels are compiled as with -O3
worker_gpu = $(NVCC) $(subst -O3,-O1,$(nvcc_flags)) -Xcompiler -fwhole-program,-Wno-unused-function

# A submission from elsewhere is compiled each time, since its includes are unknown
ifeq ($(dir),build/gpu)
build/submission/worker: build/submission/mgpu.cu
	@$(worker_gpu) -I '$(dir $(abspath $(SUBMISSION)))' \
	    -DSUBMISSION='"../../build/submission/mgpu.cu"' extras/lab/worker.cu $(to)
build/submission/mgpu.cu: translated = cat $(submission)
else
build/submission/worker: build/submission/mgpu.cu $(call lab_cpp,worker) build/cpp/mgpu.cu \
    $(algorithms_cpp) build/cpp/extras/lab/wrong/yours.h $(compiled_once)
	@$(compile_worker) -DSUBMISSION='"../../../submission/mgpu.cu"' \
	    -x c++ build/cpp/extras/lab/worker.cu $(to)
build/submission/mgpu.cu: translated = LC_ALL=C sed -zEf extras/cpu/to_cpp.sed $(submission)
endif
build/submission/mgpu.cu: FORCE
	@[ -f $(submission) ] || { echo SUBMISSION=$(submission): no such file >&2; exit 1; }
	@grep -qE 'allreduce_yours|yours.h' $(submission) || { echo SUBMISSION=$(submission): \
	    expected a whole mgpu.cu with allreduce_yours >&2; exit 1; }
	@mkdir -p $(@D); $(translated) >$(@D)/whole.cu
	@{ echo '#line 1 "$(lastword $(subst /, ,$(SUBMISSION)))"'; \
	    sh extras/lab/judged.sh $(@D)/whole.cu; } >$@.part && mv -f $@.part $@
submission = '$(subst ','\'',$(value SUBMISSION))'

# ----- With sanitizers -------------------------------------------------------------------------

# The judge's tests under AddressSanitizer, which take a minute to compile: not in CI
asan_lab_tests := $(if $(CI),,$(addprefix build/asan/,$(lab_tests)))
asan_tests += $(asan_lab_tests)
asan: $(asan_lab_tests)
# `wrong` is a worker, too: its mgpu.cu is the one here
race_worker := build/race/$(if $(value ALLREDUCE),worker,wrong)
race_judges := $(if $(value ALLREDUCE),,$(addprefix build/cpu/,$(lab_tests)))
race: $(race_judges) $(race_worker) build/cpu/judge
# (a training shows of one allreduce no more than the judge does, but with OVERLAP)
race_trains := $(if $(value ALLREDUCE),$(filter 1,$(value OVERLAP)),yes)
race_more += $(tsan) build/cpu/judge WORKER=$(race_worker) $(if $(value GPUS),,GPUS=3) \
    $(words_of_judge);
words_of_judge = $(foreach name,GPUS ALLREDUCE KVSTORE MODEL SEED,$(if $(value $(name)),\
    '$(name)=$(subst ','\'',$(value $(name)))'))
race_more += $(if $(race_judges),RACE_WORKER=../../$(race_worker) $(tsan) $(race_judges) \
    -tc='*ThreadSanitizer*';)
