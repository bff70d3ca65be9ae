# The other two chapters' networks. The Makefile includes this file where it is there.

# MODEL          also resnet18 and lab_cnn, see extras/networks/README.md

networks_tests := $(if $(wildcard extras/networks/tests.cu),networks_tests) # a handout has none
tests += $(networks_tests:%=$(dir)/%)

build/gpu/networks_tests: extras/networks/tests.cu build/gpu/untuned.cu $(needs_gpu) $(tests_h) \
    $(DOCTEST) build/gpu/flags
	$(NVCC) $(nvcc_flags) -DPROGRAM='"../../build/gpu/untuned.cu"' -isystem $(dir $(DOCTEST)) $< $(to)

$(patsubst %,build/%/networks_tests,cpu asan race lanes lanes_asan): build/%/networks_tests: \
    build/cpp/extras/networks/tests.cu build/cpp/untuned.cu $(needs_cpp) $(tests_h:%=build/cpp/%) \
    build/%/runtime.o build/%/doctest.o
	$(CXX) $(cpu_flags) $(flags_$*) -DPROGRAM='"../../untuned.cu"' $(once_$*) $(linked) -x c++ $< \
	    -x none build/$*/doctest.o $(to)
build/cpu/networks_tests: $(compiled_once)

asan_tests += $(networks_tests:%=build/asan/%)
asan: $(networks_tests:%=build/asan/%)
lanes_tests += $(networks_tests:%=build/lanes/%)
lanes_asan_tests += $(if $(LANES),,$(networks_tests:%=build/lanes_asan/%))
lanes: $(networks_tests:%=build/lanes/%) $(if $(LANES),,$(networks_tests:%=build/lanes_asan/%))
