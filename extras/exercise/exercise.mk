# The exercise: a judge for allreduce_yours. The Makefile includes this file where it is there.

# SUBMISSION     an mgpu.cu whose allreduce make exercise judges, by default the one here
own += SUBMISSION

.PHONY: exercise show

worker := $(if $(SUBMISSION),build/submission,$(dir))/worker
ifeq ($(value NODES)$(value HOSTS),)
exercise: backend $(worker) build/cpu/judge  ### judge yours, or ALLREDUCE=name
	@build/cpu/judge WORKER=$(worker) $(words)
	@$(if $(SUBMISSION),,$(if $(own_kernels),$(call look_for_races,$(of_exercise))))
	@$(if $(SUBMISSION),,$(if $(own_kernels),$(call look_at_memory,$(of_exercise))))
of_exercise = $(or $(value ALLREDUCE),yours)
endif
show: backend $(worker) build/cpu/judge  ### show what yours, or ALLREDUCE=name, does
	@build/cpu/judge WORKER=$(worker) SHOW=build/show.txt $(words)
	@sed -e '/^@data$$/{r build/show.txt' -e 'd;}' extras/exercise/show.html >build/show.html
	@echo build/show.html: open it in a browser
words_of_judge = $(foreach name,GPUS ALLREDUCE KVSTORE MODEL SEED,$(if $(value $(name)),\
    '$(name)=$(subst ','\'',$(value $(name)))'))

# ----- Compiling -------------------------------------------------------------------------------

all: build/cpu/judge
exercise_headers := $(wildcard extras/exercise/*.h extras/watch/*.h) extras/format.h
# (Not first: the worker waits for the headers)
build/cpu/judge: extras/exercise/judge.cc $(exercise_headers) build/cpu/flags \
    $(if $(filter build/cpu,$(dir)),| build/cpu/headers.h.gch)
	$(begin)
	$(show)$(CXX) -std=c++17 -O1 -Wall -Wextra $(if $(WERROR),-Werror) $< $(to)

# A worker includes the submission alone, or mgpu.cu and the other algorithms. It needs little of
# what it includes: nothing calls the rest, which is not compiled. With g++ mgpu.cu is an object of
# its own, of which the worker includes the declarations: an edit of mgpu.cu leaves it as it is.
# (nvcc's host compiler takes half as long with -O1, and kernels are compiled as with -O3)
algorithms := $(wildcard extras/algorithms/*.cu extras/algorithms/*.h)
programs += worker $(if $(algorithms),wrong) # some of which call other algorithms
objects += judged_lesson
judged := build/gpu/judged/mgpu.cu
includes_judged := extras/exercise/worker.cu extras/hooks.h $(algorithms)
of_worker = $(includes_judged) $(if $(apart),build/gpu/judged.h,$(judged))
headers_worker = $(exercise_headers)
options_worker = $(if $(algorithms),-DWITH_ALGORITHMS) \
    $(if $(apart),-Wno-unused-function,$(whole_$(*D))) \
    -DSUBMISSION='"$(if $(apart),judged.h,judged/mgpu.cu)"'
links_worker = $(if $(apart),build/$(*D)/judged_lesson.o)
level_worker := -O1
whole_cpu = $(if $(findstring clang,$(CXX)),,-fwhole-program) -Wno-unused-function
whole_gpu := -Xcompiler -fwhole-program,-Wno-unused-function
judged_needs := extras/exercise/judged.sh extras/definitions.awk
$(judged): mgpu.cu $(judged_needs)
	@mkdir -p $(@D); { echo '#line 1 "$<"'; sh extras/exercise/judged.sh $<; } >$(new) && $(finish)
build/cpp/judged.h: build/cpp/judged/mgpu.cu $(includes_judged) $(exercise_headers) \
    $(declarations_sh)
	@$(declare)
of_judged_lesson := build/gpu/judged.cu
headers_judged_lesson := extras/watch/watch.h
options_judged_lesson := -DMGPU_NO_MAIN -include extras/watch/watch.h \
    -fdebug-prefix-map=build/cpp/judged.cu=mgpu.cu
build/cpp/judged.cu: build/cpp/judged/mgpu.cu build/cpu/worker.o extras/exercise/inlined.sh
	@sh extras/exercise/inlined.sh $(wordlist 1,2,$^) >$(new) && $(finish)

# All wrong ones together, as one submission
wrong := $(wildcard extras/exercise/wrong/*.cu)
of_wrong = extras/exercise/worker.cu build/gpu/wrong.cu $(wrong) extras/exercise/wrong/yours.h \
    mgpu.cu extras/hooks.h $(algorithms)
headers_wrong = $(exercise_headers)
options_wrong = -DALL_WRONG -DSUBMISSION='"wrong.cu"' $(whole_$(*D))
level_wrong := -O1
build/gpu/wrong.cu: $(wrong) extras/exercise/exercise.mk
	@mkdir -p $(@D); { printf '#include "%s"\n' $(wrong); echo 'int own_code[2] = {0, 1 << 30};'; } \
	    >$(new) && $(finish)

# A submission from elsewhere is compiled each time, since its includes are unknown.
to_worker_gpu = $(NVCC) $(subst -O3,-O1,$(nvcc_flags)) $(whole_gpu) extras/exercise/worker.cu
to_worker_cpu = $(CXX) $(cpu_flags) $(whole_cpu) $(once_cpu) -iquote extras/exercise \
    -iquote build/cpp/extras/exercise/wrong -x c++ build/cpp/extras/exercise/worker.cu $(dl)
to_worker = $(to_worker_$(notdir $(dir)))
worker_needs := $(if $(filter build/cpu,$(dir)),build/cpu/headers.h.gch build/cpu/runtime.o \
    build/cpp/mgpu.cu build/cpp/extras/exercise/worker.cu build/cpp/extras/exercise/wrong/yours.h \
    build/cpp/extras/hooks.h $(algorithms:%=build/cpp/%))
build/submission/worker: build/submission/mgpu.cu $(worker_needs)
	$(begin)
	$(show)$(to_worker) -I '$(dir $(abspath $(SUBMISSION)))' -DSUBMISSION='"$(abspath $<)"' $(to)
translated := $(if $(filter build/cpu,$(dir)),sh extras/cpu/to_cpp.sh,cat)
build/submission/mgpu.cu: FORCE
	@[ -f $(submission) ] || { echo SUBMISSION=$(submission): no such file >&2; exit 1; }
	@grep -qE 'allreduce_yours|yours.h' $(submission) || { echo SUBMISSION=$(submission): \
	    expected a whole mgpu.cu with allreduce_yours >&2; exit 1; }
	@mkdir -p $(@D); $(translated) $(submission) >$(@D)/whole.cu
	@{ echo '#line 1 "$(lastword $(subst /, ,$(SUBMISSION)))"'; \
	    sh extras/exercise/judged.sh $(@D)/whole.cu; } >$(new) && $(finish)
submission = '$(subst ','\'',$(value SUBMISSION))'

# ----- Tests -----------------------------------------------------------------------------------

# (A handout has none, and submissions of theirs call other algorithms)
exercise_tests := $(if $(algorithms),$(wildcard extras/exercise/tests.cu))
untested += $(if $(exercise_tests),,exercise)
$(dir)/exercise_tests build/asan/exercise_tests: %/exercise_tests: | %/wrong build/cpu/judge
race_judges := $(if $(exercise_tests),$(if $(value ALLREDUCE),,build/cpu/exercise_tests))

# Under ThreadSanitizer. `wrong` is a worker, too: its mgpu.cu is the one here
race_worker := build/race/$(if $(value ALLREDUCE)$(if $(exercise_tests),,alone),worker,wrong)
race: $(race_judges) $(race_worker) build/cpu/judge
# (a training shows of one allreduce no more than the judge does, but with OVERLAP)
race_trains := $(if $(value ALLREDUCE),$(filter 1,$(value OVERLAP)),yes)
race_more += $(tsan) build/cpu/judge WORKER=$(race_worker) $(if $(value GPUS),,GPUS=3) \
    $(words_of_judge);
race_more += $(if $(race_judges),RACE_WORKER=../../$(race_worker) $(tsan) $(race_judges) \
    -tc='*ThreadSanitizer*';)
