# SAVE, INIT and LOG: their tests.

files_tests := $(if $(wildcard extras/files/tests.cu),files_tests)
tests += $(files_tests:%=$(dir)/%)

build/gpu/files_tests: extras/files/tests.cu build/gpu/untuned.cu $(needs_gpu) $(tests_h) \
    $(DOCTEST) build/gpu/flags
	$(NVCC) $(nvcc_flags) -DPROGRAM='"../../build/gpu/untuned.cu"' -isystem $(dir $(DOCTEST)) $< $(to)

$(patsubst %,build/%/files_tests,cpu asan): build/%/files_tests: \
    build/cpp/extras/files/tests.cu build/cpp/untuned.cu $(needs_cpp) $(tests_h:%=build/cpp/%) \
    build/%/runtime.o build/%/doctest.o
	$(CXX) $(cpu_flags) $(flags_$*) -DPROGRAM='"../../untuned.cu"' $(once_$*) $(linked) -x c++ $< \
	    -x none build/$*/doctest.o $(to)
build/cpu/files_tests: $(compiled_once)

asan_tests += $(files_tests:%=build/asan/%)
asan: $(files_tests:%=build/asan/%)
