# The tuned operators: where this folder is, make run runs fast.cu, which includes mgpu.cu.

program := $(dir)/fast
source := extras/fast/fast.cu
fast_headers := $(wildcard extras/fast/*.h)
# Operators that mgpu.cu no longer has as extras/fast/ knows them: yours run in their place
source_flags = -DEDITED='"$(shell sh extras/fast/checksum.sh)"'
source_needs := $(fast_headers) extras/fast/checksums
source_needs_cpp := $(fast_headers:%=build/cpp/%) extras/fast/checksums
all: $(dir)/fast
tests += $(dir)/fast_tests

build/gpu/fast: extras/fast/fast.cu $(source_needs) mgpu.cu build/gpu/flags
	$(NVCC) $(nvcc_flags) $(source_flags) $< -o $@
build/gpu/fast_tests: extras/fast/tests.cu extras/fast/fast.cu $(source_needs) tests.cu mgpu.cu \
    $(DOCTEST) build/gpu/flags
	$(NVCC) $(nvcc_flags) -isystem $(dir $(DOCTEST)) $< -o $@

# On a CPU each header passes through to_cpp.sed, too
build/cpp/extras/fast/%: extras/fast/% extras/cpu/to_cpp.sed
	@$(translate)
build/cpu/fast build/asan/fast build/race/fast: build/%/fast: build/cpp/extras/fast/fast.cu \
    $(source_needs_cpp) build/cpp/mgpu.cu extras/cpu/cuda_runtime.h build/%/flags
	$(CXX) $(cpu_flags) $(flags_$*) $(source_flags) $(once_$*) -x c++ $< -o $@
$(patsubst %,build/%/fast_tests,cpu asan lanes lanes_asan): build/%/fast_tests: \
    build/cpp/extras/fast/tests.cu build/cpp/extras/fast/fast.cu $(source_needs_cpp) \
    build/cpp/tests.cu build/cpp/mgpu.cu extras/cpu/cuda_runtime.h build/%/doctest.o build/%/flags
	$(CXX) $(cpu_flags) $(flags_$*) $(once_$*) $(linked) -x c++ $< -x none build/$*/doctest.o -o $@
build/cpu/fast build/cpu/fast_tests: $(compiled_once)

asan_tests += build/asan/fast_tests
asan: build/asan/fast_tests
race_program := build/race/fast
lanes_tests += build/lanes/fast_tests
lanes_asan_tests += $(if $(LANES),,build/lanes_asan/fast_tests)
lanes: build/lanes/fast_tests $(if $(LANES),,build/lanes_asan/fast_tests)

.PHONY: checksum
checksum:  ## do the tuned operators know mgpu.cu's as they are?
	@sh extras/fast/checksum.sh --check
