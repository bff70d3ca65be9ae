# The exercise: a judge for allreduce_yours. The Makefile includes this file where it is there.

# SUBMISSION     an mgpu.cu whose allreduce make exercise judges, by default the one here
# FABRIC         a network whose times make exercise and make show print, see extras/watch/network.h
own += SUBMISSION

.PHONY: exercise show

worker := $(if $(SUBMISSION),build/submission,$(dir))/worker
ifeq ($(value NODES)$(value HOSTS),)
exercise: backend build/cpu/judge $(worker)  ## judge yours, or ALLREDUCE=name
	@build/cpu/judge WORKER=$(worker) $(words)
endif
show: backend build/cpu/judge $(worker)  ## show what yours, or ALLREDUCE=name, does
	@build/cpu/judge WORKER=$(worker) SHOW=build/show.txt $(words)
	@sed -e '/^@data$$/{r build/show.txt' -e 'd;}' extras/exercise/show.html >build/show.html
	@echo build/show.html: open it in a browser
words_of_judge = $(foreach name,GPUS ALLREDUCE KVSTORE MODEL SEED,$(if $(value $(name)),\
    '$(name)=$(subst ','\'',$(value $(name)))'))

# ----- Compiling -------------------------------------------------------------------------------

all: $(dir)/worker build/cpu/judge
exercise_headers := $(watch) $(wildcard extras/exercise/*.h)
wrong := $(wildcard extras/exercise/wrong/*.cu)
build/cpu/judge: extras/exercise/judge.cc $(exercise_headers) build/cpu/flags
	$(CXX) -std=c++17 -O1 -Wall -Wextra $(if $(WERROR),-Werror) $< $(to)

# A worker includes the submission alone, or mgpu.cu and the other algorithms
algorithms := $(wildcard extras/algorithms/*.cu extras/algorithms/*.h)
others := $(if $(algorithms),-DWITH_ALGORITHMS)
build/gpu/worker: extras/exercise/worker.cu build/gpu/judged/mgpu.cu $(algorithms) \
    $(exercise_headers) build/gpu/flags
	$(worker_gpu) $(others) -DSUBMISSION='"../../build/gpu/judged/mgpu.cu"' $< $(to)
build/gpu/wrong: extras/exercise/worker.cu build/gpu/wrong.cu $(wrong) mgpu.cu $(algorithms) \
    $(exercise_headers) build/gpu/flags
	$(worker_gpu) -DALL_WRONG -DSUBMISSION='"../../build/gpu/wrong.cu"' $< $(to)
build/gpu/wrong.cu: $(wrong) extras/exercise/exercise.mk
	@printf '#include "../../%s"\n' $(wrong) >$$part && $(finish)

worker_cpp := build/cpp/extras/exercise/worker.cu $(exercise_headers)
algorithms_cpp := $(algorithms:%=build/cpp/%)
worker_cpu = $(CXX) $(cpu_flags) $(flags_$1) $(worker_flags_$1) $(dl) -iquote extras/exercise \
    $(once_$1)
build/cpu/worker build/race/worker: build/%/worker: $(worker_cpp) build/cpp/judged/mgpu.cu \
    $(algorithms_cpp) build/%/runtime.o
	$(call worker_cpu,$*) $(others) -DSUBMISSION='"../../judged/mgpu.cu"' -x c++ $< $(to)
$(patsubst %,build/%/wrong,cpu asan race): build/%/wrong: $(worker_cpp) $(wrong:%=build/cpp/%) \
    build/cpp/extras/exercise/wrong/yours.h build/cpp/extras/exercise/wrong/all.cu \
    build/cpp/mgpu.cu $(algorithms_cpp) build/%/runtime.o
	$(call worker_cpu,$*) -DALL_WRONG -DSUBMISSION='"wrong/all.cu"' -x c++ $< $(to)
build/cpu/worker build/cpu/wrong: $(compiled_once)
build/cpp/extras/exercise/wrong/all.cu: $(wrong) extras/exercise/exercise.mk
	@printf '#include "%s"\n' $(notdir $(wrong)) >$$part && $(finish)

# A worker needs little of what it includes: in a copy nothing calls the rest, which is not compiled
judged_needs := extras/exercise/judged.sh extras/definitions.awk
build/cpp/judged/mgpu.cu: build/cpp/mgpu.cu $(judged_needs)
	@sh extras/exercise/judged.sh $< >$$part && $(finish)
build/gpu/judged/mgpu.cu: mgpu.cu $(judged_needs)
	@{ echo '#line 1 "$<"'; sh extras/exercise/judged.sh $<; } >$$part && $(finish)
whole := $(if $(findstring clang,$(CXX)),,-fwhole-program) -Wno-unused-function
worker_flags_cpu := $(whole)
compile_worker = $(call worker_cpu,cpu) -iquote build/cpp/extras/exercise/wrong
# nvcc's host compiler takes half as long with -O1, and kernels are compiled as with -O3
worker_gpu = $(NVCC) $(subst -O3,-O1,$(nvcc_flags)) -Xcompiler -fwhole-program,-Wno-unused-function

# A submission from elsewhere is compiled each time, since its includes are unknown
ifeq ($(dir),build/gpu)
build/submission/worker: build/submission/mgpu.cu
	@$(worker_gpu) -I '$(dir $(abspath $(SUBMISSION)))' \
	    -DSUBMISSION='"../../build/submission/mgpu.cu"' extras/exercise/worker.cu $(to)
build/submission/mgpu.cu: translated = cat $(submission)
else
build/submission/worker: build/submission/mgpu.cu $(worker_cpp) build/cpp/mgpu.cu \
    $(algorithms_cpp) build/cpp/extras/exercise/wrong/yours.h $(compiled_once)
	@$(compile_worker) -DSUBMISSION='"../../../submission/mgpu.cu"' \
	    -x c++ build/cpp/extras/exercise/worker.cu $(to)
build/submission/mgpu.cu: translated = sh extras/cpu/to_cpp.sh $(submission)
endif
build/submission/mgpu.cu: FORCE
	@[ -f $(submission) ] || { echo SUBMISSION=$(submission): no such file >&2; exit 1; }
	@grep -qE 'allreduce_yours|yours.h' $(submission) || { echo SUBMISSION=$(submission): \
	    expected a whole mgpu.cu with allreduce_yours >&2; exit 1; }
	@$(translated) >$(@D)/whole.cu
	@{ echo '#line 1 "$(lastword $(subst /, ,$(SUBMISSION)))"'; \
	    sh extras/exercise/judged.sh $(@D)/whole.cu; } >$$part && $(finish)
submission = '$(subst ','\'',$(value SUBMISSION))'

# ----- Tests -----------------------------------------------------------------------------------

# (A handout has none, and submissions of theirs call other algorithms)
exercise_tests := $(and $(wildcard extras/exercise/tests.cu),$(algorithms),exercise_tests)
tests += $(exercise_tests:%=$(dir)/%)
$(dir)/exercise_tests build/asan/exercise_tests: %/exercise_tests: | %/wrong build/cpu/judge
build/gpu/exercise_tests: extras/exercise/tests.cu $(exercise_headers) $(tests_h) $(watched_gpu) \
    $(DOCTEST) $(watched_products:%=build/gpu/%)
	$(compile_watched_gpu) -isystem $(dir $(DOCTEST)) $< $(to)
build/cpu/exercise_tests build/asan/exercise_tests: build/%/exercise_tests: \
    build/cpp/extras/exercise/tests.cu $(exercise_headers) $(tests_h:%=build/cpp/%) \
    build/cpp/program.cu build/cpp/untuned.cu $(needs_cpp) build/%/runtime.o build/%/doctest.o
	$(call compile_watched_cpu,$*) $(linked) -x c++ $< -x none build/$*/doctest.o $(to)
build/cpu/exercise_tests: $(compiled_once) $(watched_products:%=build/cpu/%)

# Under ThreadSanitizer. `wrong` is a worker, too: its mgpu.cu is the one here
race_worker := build/race/$(if $(value ALLREDUCE)$(if $(exercise_tests),,alone),worker,wrong)
race_judges := $(if $(value ALLREDUCE),,$(addprefix build/cpu/,$(exercise_tests)))
race: $(race_judges) $(race_worker) build/cpu/judge
# (a training shows of one allreduce no more than the judge does, but with OVERLAP)
race_trains := $(if $(value ALLREDUCE),$(filter 1,$(value OVERLAP)),yes)
race_more += $(tsan) build/cpu/judge WORKER=$(race_worker) $(if $(value GPUS),,GPUS=3) \
    $(words_of_judge);
race_more += $(if $(race_judges),RACE_WORKER=../../$(race_worker) $(tsan) $(race_judges) \
    -tc='*ThreadSanitizer*';)
