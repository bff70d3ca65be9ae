# The tuned operators: where this folder is, make run runs fast/fast.cu, which includes mgpu.cu.

# KERNELS        operators: plain, mgpu.cu's; tiled; fast, on a GPU; by default your edits of mgpu.cu
# PRECISION      of what the fast kernels multiply: fp32; tf32, on tensor cores
with_value += KERNELS PRECISION

fast_headers := $(wildcard fast/*.h)
# Operators that mgpu.cu no longer has as fast/ knows them: yours run in their place
edited = -DEDITED='"$(shell sh fast/checksum.sh)"'

ifeq ($(program),$(dir)/mgpu) # not with NODES
  program := $(dir)/fast/mgpu
endif
tests += $(dir)/fast/tests
all: $(dir)/fast/mgpu

build/gpu/fast/mgpu: fast/fast.cu $(fast_headers) mgpu.cu fast/checksums build/gpu/flags
	@mkdir -p $(@D)
	$(NVCC) $(nvcc_flags) $(edited) $< -o $@
build/gpu/fast/tests: fast/tests.cu fast/fast.cu $(fast_headers) mgpu.cu $(DOCTEST) build/gpu/flags
	@mkdir -p $(@D)
	$(NVCC) $(nvcc_flags) $(doctest) $< -o $@

# On a CPU each header passes through to_cpp.sed, too
fast_cpu := $(fast_headers:%=build/cpu/%) build/cpu/mgpu.cu cpu/cuda_runtime.h
$(fast_headers:%=build/cpu/%): build/cpu/%.h: %.h cpu/to_cpp.sed
	@mkdir -p $(@D)
	@{ echo '#line 1 "$<"'; LC_ALL=C sed -zEf cpu/to_cpp.sed $<; } >$@
build/cpu/fast/fast.cu: fast/fast.cu
build/cpu/fast/tests.cu: fast/tests.cu
build/cpu/fast/mgpu build/asan/fast/mgpu build/race/fast/mgpu: build/%/fast/mgpu: \
    build/cpu/fast/fast.cu $(fast_cpu) fast/checksums build/%/flags
	@mkdir -p $(@D)
	$(CXX) $(cpu_flags) $(flags_$*) $(edited) $(once_$*) -x c++ $< -o $@
$(patsubst %,build/%/fast/tests,cpu asan race lanes lanes_asan): build/%/fast/tests: \
    build/cpu/fast/tests.cu build/cpu/fast/fast.cu $(fast_cpu) build/%/doctest.o build/%/flags
	@mkdir -p $(@D)
	$(CXX) $(cpu_flags) $(flags_$*) $(once_$*) $(linked) -x c++ $< -x none build/$*/doctest.o -o $@
build/cpu/fast/mgpu build/cpu/fast/tests: build/cpu/headers.h.gch build/cpu/cuda_runtime.o

.PHONY: checksum
checksum:  ## do the tuned operators know mgpu.cu's as they are?
	@sh fast/checksum.sh --check
