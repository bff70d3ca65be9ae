# make check. The Makefile includes this file where it is there.

.PHONY: edited check

# (GPUS is for the training: an allreduce must be right on any number of devices)
can_judge := $(and $(value ALLREDUCE)$(value KVSTORE),$(wildcard extras/exercise))
judged := $(if $(can_judge),build/cpu/judge $(dir)/worker)
check: backend $(dir)/check $(judged) data  ### find what is wrong in any part, from copies to epochs
	@$(dir)/check $(words)$(if $(judged), || failed=1; build/cpu/judge WORKER=$(dir)/worker \
	    $(filter-out 'GPUS=%,$(words_of_judge)) && [ -z "$$failed" ])
	@$(if $(kernels_edited),$(call look_for_races,$(value ALLREDUCE)))
	@$(if $(own_kernels),$(call look_at_memory,$(value ALLREDUCE)))
# Emulated threads run one after another, which hides races, and what lies behind a tensor may be
# memory, too. A step under each sanitizer that the compiler has shows both, of kernels that were
# edited or that are not in the list extras/check/kernels, of those that mgpu.cu comes with.
own_kernels = $(and $(filter build/cpu,$(dir)),$(shell sed -nE \
    's/^__global__ .*void ([A-Za-z_0-9]+)[^A-Za-z_0-9].*/\1/p' mgpu.cu | \
    grep -vxFf extras/check/kernels))
kernels_edited = $(or $(own_kernels),$(and $(filter build/cpu,$(dir)),$(wildcard \
    extras/fast/checksum.sh),$(shell sh extras/fast/checksum.sh)))
a_step = BATCH=2 LIMIT=2 EPOCHS=1 CHECKS=0 GPUS=$(if $1,2 ALLREDUCE='$1',1)
# (sanitizer, what runs it, which lines of what it says, ALLREDUCE)
look = $(MAKE) -s build/$1/mgpu 2>/dev/null || exit 0; $2 build/$1/mgpu $(call a_step,$4) \
    >build/$1/out 2>&1; ! sed -nE '$3' build/$1/out | grep .
look_for_races = $(call look,race,CUDA_CPU_CORES=2 $(tsan),/^race on/p,$1)
look_at_memory = $(call look,asan,ASAN_OPTIONS=detect_leaks=0,/notice: .*written/{p;q}; \
    s:^SUMMARY\: A[a-zA-Z]+\: [^ ]+ ([^ ]*/)?([^ ]+) in ([A-Za-z_0-9]+).*:\2\: \3 leaves memory:p,$1)
build/asan/mgpu.o: options_mgpu += $(loads)
# Operators that were edited: make check knows more than a training
run: edited
edited:
	@$(if $(wildcard extras/fast/checksum.sh),[ -z "$$(sh extras/fast/checksum.sh)" ] || \
	    echo 'operators were edited: make check compares them with references in double' >&2)

$(eval $(call add_program,check,watched,extras/check/check.cu))
