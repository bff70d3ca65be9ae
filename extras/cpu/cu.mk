# A CUDA program of one's own: make cu compiles and starts it, on a GPU or on the stand-in.

# FILE           make cu: the program, a .cu file or several, such as FILE='own.cu kernels.cu'
# CHECK          make cu: asan, race or lanes looks for what make asan, make race, make lanes find

ifneq ($(filter cu,$(MAKECMDGOALS)),)
  $(if $(value FILE),,$(error make cu wants a program, such as make cu FILE=own.cu))
endif
$(if $(filter-out asan race lanes,$(CHECK)),\
    $(error CHECK=$(CHECK) is unknown: use asan, race or lanes))

# Warnings are nvcc's or, of the stand-in, none. As nvcc does, g++ includes the runtime's header by
# itself: compiled before, or, under a sanitizer, with all of its functions. -O2, since such
# a program often computes all once more on the host: 15 times as fast there as -Og.
cu_on := $(if $(CHECK),cpu,$(notdir $(dir)))
cu_flags = $(patsubst -Og,-O2,$(filter-out -Wall -Wextra -Werror,$(cpu_flags)))
cu_once := $(if $(filter asan race,$(CHECK)),,build/cu/headers.h.gch build/cu/cuda_runtime.o)
cu_needs := $(if $(CHECK),,backend) $(if $(filter cpu,$(cu_on)),$(cu_once))
cu_gpu = $(filter-out -Xcompiler -Wall$(comma)-Wextra -Werror all-warnings,$(nvcc_flags))
comma := ,
export_cu = CU_ON=$(cu_on) CU_COMPILE=$(call quote,$(if $(filter gpu,$(cu_on)),$(NVCC) $(cu_gpu),\
    $(CXX) $(cu_flags) $(flags_$(filter-out lanes,$(CHECK))) -iquote . \
    -include $(if $(cu_once),build/cu/headers.h,extras/cpu/cuda_runtime.h))) \
    CU_OBJECTS=$(filter %.o,$(cu_once)) \
    CU_SETARCH=$(call quote,$(if $(filter race,$(CHECK)),$(setarch))) \
    $(if $(GPUS),$(if $(CUDA_CPU_DEVICES),,CUDA_CPU_DEVICES=$(call quote,$(value GPUS))))

.PHONY: cu programs programs_nvcc
cu: $(cu_needs)  ## a program of your own: make cu FILE=own.cu
	@$(export_cu) sh extras/cpu/cu.sh $(value ARGS)

build/cu/headers.h: extras/cpu/cuda_runtime.h extras/cpu/split.awk
	@mkdir -p $(@D); $(split) >$@.$$$$ && mv $@.$$$$ $@
build/cu/headers.h.gch: build/cu/headers.h build/cpu/flags
	@{ $(CXX) $(cu_flags) -x c++-header $< -o $@.$$$$ && mv $@.$$$$ $@; } 2>/dev/null || : >$@

build/cu/cuda_runtime.o: build/cpu/functions.h build/cpu/flags
	@$(CXX) $(cu_flags) -include $< -x c++ -c /dev/null -o $@

# Small programs of a first course: each prints what its head says
programs: $(cu_needs)  ## run the programs of extras/cpu/programs
	@$(export_cu) sh extras/cpu/programs.sh extras/cpu/programs/*.cu
programs_nvcc:
	@mkdir -p build/cu; printf '%s\n' extras/cpu/programs/*.cu | xargs -P 2 -I FILE sh -c '$(NVCC) \
	    -std=c++17 -arch=sm_90 -c "$$1" -o "build/cu/$$(basename "$$1").o"' compile FILE
	@echo 'nvcc compiles all of extras/cpu/programs'
