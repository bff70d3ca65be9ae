# The other allreduces and OVERLAP: their tests.

algorithms_tests := $(if $(wildcard extras/algorithms/tests.cu),algorithms_tests)
tests += $(algorithms_tests:%=$(dir)/%)

build/gpu/algorithms_tests: extras/algorithms/tests.cu build/gpu/untuned.cu $(needs_gpu) $(tests_h) \
    $(DOCTEST) build/gpu/flags
	$(NVCC) $(nvcc_flags) -DPROGRAM='"../../build/gpu/untuned.cu"' -isystem $(dir $(DOCTEST)) $< $(to)

$(patsubst %,build/%/algorithms_tests,cpu asan race): build/%/algorithms_tests: \
    build/cpp/extras/algorithms/tests.cu build/cpp/untuned.cu $(needs_cpp) $(tests_h:%=build/cpp/%) \
    build/%/runtime.o build/%/doctest.o
	$(CXX) $(cpu_flags) $(flags_$*) -DPROGRAM='"../../untuned.cu"' $(once_$*) $(linked) -x c++ $< \
	    -x none build/$*/doctest.o $(to)
build/cpu/algorithms_tests: $(compiled_once)

asan_tests += $(algorithms_tests:%=build/asan/%)
asan: $(algorithms_tests:%=build/asan/%)
race_tests += $(if $(value ALLREDUCE),,$(algorithms_tests:%=build/race/%))
race: $(if $(value ALLREDUCE),,$(algorithms_tests:%=build/race/%))
