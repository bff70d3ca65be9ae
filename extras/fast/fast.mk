# The tuned operators: the last part of the program.

fast_headers := $(wildcard extras/fast/*.h) extras/format.h
# These are included as copies (see below), and then fast.cu replaces their operators.
plain := mgpu.cu $(wildcard extras/networks/networks.cu)
# Operators that mgpu.cu no longer has as extras/fast/ knows them: yours run in their place
part_flags = -DEDITED='"$(shell sh extras/fast/checksum.sh)"'
needs_gpu += extras/fast/products.cu $(fast_headers) extras/fast/checksums $(plain:%=build/gpu/plain/%)
needs_cpp += $(patsubst %,build/cpp/%,extras/fast/products.cu $(fast_headers)) extras/fast/checksums $(plain:%=build/cpp/plain/%)
tests += $(if $(wildcard extras/networks),$(dir)/fast_tests) # they test the operators of both

build/gpu/program: part_flags += -DPRODUCTS_APART
build/gpu/program: build/gpu/products.o
build/gpu/fast_tests: extras/fast/tests.cu $(needs_gpu) $(parts) build/gpu/program.cu $(tests_h) \
    $(DOCTEST) build/gpu/flags build/gpu/products.o
	$(NVCC) $(nvcc_flags) -DPROGRAM='"../../build/gpu/program.cu"' $(apart_gpu) \
	    -isystem $(dir $(DOCTEST)) $< $(to)

# products.cu takes the longest to compile. Of mgpu.cu it includes a part, and is compiled again only
# if that changes. (Under a sanitizer fast.cu includes products.cu.)
apart_gpu := -DPRODUCTS_APART build/gpu/products.o
apart_cpu := -DPRODUCTS_APART build/cpu/products.o
vocabulary = sh extras/fast/vocabulary.sh $< >$$part && $(renew)
build/gpu/vocabulary.h build/cpp/vocabulary.h: mgpu.cu extras/fast/vocabulary.sh extras/definitions.awk
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

# Copies of mgpu.cu and networks.cu in which what fast.cu replaces has another name, or is left out
plain_needs := extras/fast/plain.sh extras/fast/operators extras/definitions.awk
build/gpu/plain/%: % $(plain_needs)
	@{ echo '#line 1 "$<"'; sh extras/fast/plain.sh $<; } >$$part && $(finish)
build/cpp/plain/%: build/cpp/% $(plain_needs)
	@sh extras/fast/plain.sh $< >$$part && $(finish)

# For a compiler of your own: write what the build generates
sources: build/gpu/program.cu $(plain:%=build/gpu/plain/%)

build/cpu/program build/asan/program build/race/program: $(needs_cpp)
build/cpu/program: part_flags += $(filter -D%,$(apart_cpu))
build/cpu/program: build/cpu/products.o
$(patsubst %,build/%/fast_tests,cpu asan lanes lanes_asan): build/%/fast_tests: \
    build/cpp/extras/fast/tests.cu build/cpp/program.cu $(needs_cpp) $(tests_h:%=build/cpp/%) \
    build/%/runtime.o build/%/doctest.o
	$(CXX) $(cpu_flags) $(flags_$*) -DPROGRAM='"../../program.cu"' $(once_$*) $(apart_$*) \
	    $(linked) -x c++ $< -x none build/$*/doctest.o $(to)
build/cpu/fast_tests: $(compiled_once) build/cpu/products.o

fast_tests := $(if $(wildcard extras/networks),fast_tests)
asan_tests += $(fast_tests:%=build/asan/%)
asan: $(fast_tests:%=build/asan/%)
lanes_tests += $(fast_tests:%=build/lanes/%)
lanes_asan_tests += $(if $(LANES),,$(fast_tests:%=build/lanes_asan/%))
lanes: $(fast_tests:%=build/lanes/%) $(if $(LANES),,$(fast_tests:%=build/lanes_asan/%))

.PHONY: checksum sources
checksum:  ## check that the tuned operators match mgpu.cu's
	@sh extras/fast/checksum.sh --check
