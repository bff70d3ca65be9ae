# What exercise/, check/ and measure/ share: watch.h sees every CUDA call of the program that includes
# it. The Makefile includes this file where it is there.

watch := $(wildcard extras/watch/*.h)

# Programs that include watch.h, and then the program's source, with the tuned operators if they are
# there. (Under a sanitizer those would take a minute to compile.)
source_cpu := program.cu
source_asan := untuned.cu
source_race := untuned.cu
in_program = $(part_flags) -DPROGRAM='"../../$(if $(filter gpu,$1),build/gpu/program.cu,$(source_$1))"'
watched_gpu := build/gpu/program.cu $(needs_gpu) $(watch) build/gpu/flags
watched_cpu = build/cpp/$(source_$1) $(needs_cpp) $(watch) build/$1/runtime.o
compile_watched_gpu = $(NVCC) $(nvcc_flags) $(call in_program,gpu) $(call apart_watched,gpu)
# (Before glibc 2.34, dlsym, which calls.h needs, is in a library of its own)
dl := -Wl,--no-as-needed -ldl
compile_watched_cpu = $(CXX) $(cpu_flags) $(flags_$1) $(dl) \
    -iquote $(patsubst build/cpp/%/,%,$(dir $<)) $(once_$1) $(call in_program,$1) $(call apart_watched,$1)
# A stream has another type there: so they need other products
apart_watched = $(subst products.o,watched_products.o,$(apart_$1))
ifneq ($(apart_cpu),)
build/gpu/watched_products.o: $(products_gpu) extras/watch/watch.h
	$(call compile_products_gpu,-include extras/watch/watch.h)
build/cpu/watched_products.o: $(products_cpu) extras/watch/watch.h
	$(call compile_products_cpu,-include extras/watch/watch.h)
watched_products := watched_products.o
endif

watch_tests := $(if $(wildcard extras/watch/tests.cu),watch_tests) # a handout has none
tests += $(watch_tests:%=$(dir)/%)
build/gpu/watch_tests: extras/watch/tests.cu $(tests_h) $(watched_gpu) $(DOCTEST) \
    $(watched_products:%=build/gpu/%)
	$(compile_watched_gpu) -isystem $(dir $(DOCTEST)) $< $(to)
build/cpu/watch_tests: build/cpp/extras/watch/tests.cu $(tests_h:%=build/cpp/%) \
    $(call watched_cpu,cpu) $(compiled_once) build/cpu/doctest.o $(watched_products:%=build/cpu/%)
	$(call compile_watched_cpu,cpu) $(linked) -x c++ $< -x none build/cpu/doctest.o $(to)
