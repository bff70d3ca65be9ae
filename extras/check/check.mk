# make check. The Makefile includes this file where it is there.

.PHONY: edited check

# (GPUS is for the training: an allreduce must be right on any number of devices)
can_judge := $(and $(value ALLREDUCE)$(value KVSTORE),$(wildcard extras/exercise))
judged := $(if $(can_judge),build/cpu/judge $(dir)/worker)
check: backend $(dir)/check $(judged) data  ### find what is wrong in any part, from copies to epochs
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

programs += check
of_check = extras/check/check.cu $(watched)
headers_check = $(watch) $(wildcard extras/check/*.h) extras/reference.h
options_check = $(watching)
links_check = $(watched_objects)

ifneq ($(wildcard extras/check/tests.cu),) # a handout has none
programs += check_tests
tests += check_tests
of_check_tests = extras/check/tests.cu extras/check/check.cu $(watched) $(tests_h)
headers_check_tests = $(headers_check)
options_check_tests = $(options_tests) $(watching)
links_check_tests = $(watched_objects)
endif
