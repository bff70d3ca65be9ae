# make check. The Makefile includes this file where it is there.

.PHONY: edited check

# (GPUS is for the training: an allreduce must be right on any number of devices)
can_judge := $(and $(value ALLREDUCE)$(value KVSTORE),$(wildcard extras/exercise))
judged := $(if $(can_judge),build/cpu/judge $(dir)/worker)
check: backend $(dir)/check $(judged) data  ## find what is wrong in any part, from copies to epochs
	@$(dir)/check $(words)$(if $(judged), || failed=1; build/cpu/judge WORKER=$(dir)/worker \
	    $(filter-out 'GPUS=%,$(words_of_judge)) && [ -z "$$failed" ])
	@$(if $(kernels_edited),$(look_for_races))
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

# ----- Compiling -------------------------------------------------------------------------------

all: $(dir)/check
check_headers := $(wildcard extras/check/*.h) extras/reference.h
build/gpu/check: extras/check/check.cu $(check_headers) $(watched_gpu) $(watched_products:%=build/gpu/%)
	$(compile_watched_gpu) $< $(to)
build/cpu/check: build/cpp/extras/check/check.cu $(check_headers) $(call watched_cpu,cpu) \
    $(compiled_once) $(watched_products:%=build/cpu/%)
	$(call compile_watched_cpu,cpu) -x c++ $< $(to)

check_tests := $(if $(wildcard extras/check/tests.cu),check_tests) # a handout has none
tests += $(check_tests:%=$(dir)/%)
build/gpu/check_tests: extras/check/tests.cu extras/check/check.cu $(check_headers) $(tests_h) \
    $(watched_gpu) $(DOCTEST) $(watched_products:%=build/gpu/%)
	$(compile_watched_gpu) -isystem $(dir $(DOCTEST)) $< $(to)
build/cpu/check_tests build/asan/check_tests: build/%/check_tests: build/cpp/extras/check/tests.cu \
    build/cpp/extras/check/check.cu $(check_headers) $(tests_h:%=build/cpp/%) build/cpp/program.cu \
    build/cpp/untuned.cu $(needs_cpp) build/%/runtime.o build/%/doctest.o
	$(call compile_watched_cpu,$*) $(linked) -x c++ $< -x none build/$*/doctest.o $(to)
build/cpu/check_tests: $(compiled_once) $(watched_products:%=build/cpu/%)
