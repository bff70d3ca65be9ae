# The other two chapters' networks. The Makefile includes this file where it is there.

# MODEL          also resnet18 and lab_cnn, see extras/networks/README.md

networks_tests := $(if $(wildcard extras/networks/tests.cu),networks_tests) # a handout has none
tests += $(networks_tests:%=$(dir)/%)

build/gpu/networks: extras/networks/networks.cu mgpu.cu build/gpu/flags
	$(NVCC) $(nvcc_flags) $< $(to)
build/gpu/networks_tests: extras/networks/tests.cu extras/networks/networks.cu tests.cu mgpu.cu \
    $(DOCTEST) build/gpu/flags
	$(NVCC) $(nvcc_flags) -isystem $(dir $(DOCTEST)) $< $(to)

build/cpp/extras/networks/%: extras/networks/% extras/cpu/to_cpp.sed
	@$(translate)
build/cpu/networks build/asan/networks build/race/networks: build/%/networks: \
    build/cpp/extras/networks/networks.cu build/cpp/mgpu.cu build/%/runtime.o
	$(CXX) $(cpu_flags) $(flags_$*) $(once_$*) -x c++ $< $(to)
$(patsubst %,build/%/networks_tests,cpu asan race lanes lanes_asan): build/%/networks_tests: \
    build/cpp/extras/networks/tests.cu build/cpp/extras/networks/networks.cu build/cpp/tests.cu \
    build/cpp/mgpu.cu build/%/runtime.o build/%/doctest.o
	$(CXX) $(cpu_flags) $(flags_$*) $(once_$*) $(linked) -x c++ $< -x none build/$*/doctest.o $(to)
build/cpu/networks build/cpu/networks_tests: $(compiled_once)

asan_tests += $(networks_tests:%=build/asan/%)
asan: $(networks_tests:%=build/asan/%)
lanes_tests += $(networks_tests:%=build/lanes/%)
lanes_asan_tests += $(if $(LANES),,$(networks_tests:%=build/lanes_asan/%))
lanes: $(networks_tests:%=build/lanes/%) $(if $(LANES),,$(networks_tests:%=build/lanes_asan/%))
