# The tuned operators: where this folder is, make run runs fast.cu, which includes mgpu.cu.

fast_headers := $(wildcard extras/fast/*.h)
lesson := mgpu.cu $(wildcard extras/networks/networks.cu)
networks_flag := $(if $(word 2,$(lesson)),-DNETWORKS)
# Operators that mgpu.cu no longer has as extras/fast/ knows them: yours run in their place
source_flags = $(networks_flag) -DEDITED='"$(shell sh extras/fast/checksum.sh)"'
source_needs := extras/fast/products.cu $(fast_headers) extras/fast/checksums $(lesson:%=build/gpu/plain/%)
source_needs_cpp := $(patsubst %,build/cpp/%,extras/fast/products.cu $(fast_headers)) extras/fast/checksums $(lesson:%=build/cpp/plain/%)
all: $(dir)/fast
tests += $(if $(networks_flag),$(dir)/fast_tests) # they test the operators of both

build/gpu/fast: extras/fast/fast.cu $(source_needs) mgpu.cu build/gpu/flags build/gpu/products.o
	$(NVCC) $(nvcc_flags) $(source_flags) $(apart_gpu) $< $(to)
build/gpu/fast_tests: extras/fast/tests.cu extras/fast/fast.cu $(source_needs) tests.cu mgpu.cu \
    $(DOCTEST) build/gpu/flags build/gpu/products.o
	$(NVCC) $(nvcc_flags) $(networks_flag) $(apart_gpu) -isystem $(dir $(DOCTEST)) $< $(to)

# products.cu takes the longest to compile. It includes section 1 of mgpu.cu and how section 8
# launches kernels, and is compiled again only if these change. (Under a sanitizer fast.cu includes
# products.cu.)
apart_gpu := -DPRODUCTS_APART build/gpu/products.o
apart_cpu := -DPRODUCTS_APART build/cpu/products.o
vocabulary = mkdir -p $(@D); \
    sed -n '1,\|^// 2\. |p; \|^// 8\. Kernels|,\|^// --- |p' mgpu.cu >$@.$$$$ && $(renew)
build/gpu/vocabulary.h build/cpp/vocabulary.h: mgpu.cu
	@$(vocabulary)
products_gpu := extras/fast/products.cu $(fast_headers) build/gpu/vocabulary.h build/gpu/flags
products_cpu := build/cpp/extras/fast/products.cu $(fast_headers:%=build/cpp/%) \
    build/cpp/vocabulary.h build/cpu/flags build/cpu/runtime.o
build/gpu/products.o: $(products_gpu)
	$(compile_products_gpu)
build/cpu/products.o: $(products_cpu)
	$(compile_products_cpu)
# For SM 90 they use wgmma, which is of SM 90 alone: its PTX has none.
comma := ,
of_90 := arch=compute_90$(comma)code=
with_wgmma = $(if $(filter 90,$(SM)),-DSM_90A) $(subst $(of_90)sm_90 ,$(wgmma_90) ,$(subst \
    $(of_90)[sm_90$(comma)compute_90],$(wgmma_90) -gencode $(of_90)compute_90,$(nvcc_flags)))
wgmma_90 := arch=compute_90a$(comma)code=sm_90a
# (The argument: more flags)
compile_products_gpu = $(NVCC) $(with_wgmma) $1 \
    -DVOCABULARY='"../../build/gpu/vocabulary.h"' -c $< $(to)
compile_products_cpu = $(CXX) $(cpu_flags) $1 -DVOCABULARY='"../../vocabulary.h"' -x c++ -c $< $(to)

# mgpu.cu and networks.cu with other names for their operators
build/gpu/plain/%: % extras/fast/plain.sed
	@mkdir -p $(@D); { echo '#line 1 "$<"' && LC_ALL=C sed -zEf extras/fast/plain.sed $<; } \
	    >$@.part && mv -f $@.part $@
build/cpp/plain/%: build/cpp/% extras/fast/plain.sed
	@mkdir -p $(@D); LC_ALL=C sed -zEf extras/fast/plain.sed $< >$@.part && mv -f $@.part $@

# For a compiler of your own: write what the build generates, and print the flags that go with it
sources: $(lesson:%=build/gpu/plain/%)
	@echo $(networks_flag)

# On a CPU each header passes through to_cpp.sed, too
build/cpp/extras/fast/%: extras/fast/% extras/cpu/to_cpp.sed
	@$(translate)
build/cpu/fast build/asan/fast build/race/fast: build/%/fast: build/cpp/extras/fast/fast.cu \
    $(source_needs_cpp) build/cpp/mgpu.cu build/%/runtime.o
	$(CXX) $(cpu_flags) $(flags_$*) $(source_flags) $(once_$*) $(apart_$*) -x c++ $< $(to)
$(patsubst %,build/%/fast_tests,cpu asan lanes lanes_asan): build/%/fast_tests: \
    build/cpp/extras/fast/tests.cu build/cpp/extras/fast/fast.cu $(source_needs_cpp) \
    build/cpp/tests.cu build/cpp/mgpu.cu build/%/runtime.o build/%/doctest.o
	$(CXX) $(cpu_flags) $(flags_$*) $(networks_flag) $(once_$*) $(apart_$*) $(linked) -x c++ $< \
	    -x none build/$*/doctest.o $(to)
build/cpu/fast build/cpu/fast_tests: $(compiled_once) build/cpu/products.o

fast_tests := $(if $(networks_flag),fast_tests)
asan_tests += $(fast_tests:%=build/asan/%)
asan: $(fast_tests:%=build/asan/%)
race_program := build/race/fast
lanes_tests += $(fast_tests:%=build/lanes/%)
lanes_asan_tests += $(if $(LANES),,$(fast_tests:%=build/lanes_asan/%))
lanes: $(fast_tests:%=build/lanes/%) $(if $(LANES),,$(fast_tests:%=build/lanes_asan/%))

.PHONY: checksum sources
checksum:  ## check that the tuned operators match mgpu.cu's
	@sh extras/fast/checksum.sh --check
