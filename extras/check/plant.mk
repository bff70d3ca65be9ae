# How good make check is: mistakes that are planted into copies. A handout lacks it.

# NAMES          mistakes that make plant tries: parts of their names; by default all
own += NAMES

.PHONY: plant
plant:  ## plant the mistakes of extras/check/mistakes.txt: do make run and make check explain them?
	@python3 extras/check/plant.py try $(NAMES)

# Copies of mgpu.cu and its parts with planted mistakes, and program.cu, which includes them. (Where
# extras/fast is there, it includes plain/mgpu.cu: `plain` is fast.mk's.)
planted = program.cu mgpu.cu $(filter-out extras/hooks.cu extras/fast/% extras/files/%,$(parts)) \
    $(wildcard extras/algorithms/*.h) $(or $(plain:%=plain/%),replaced/mgpu.cu)
build/plant/%/check: $$(addprefix build/cpp/build/plant/$$*/,$$(planted)) \
    build/cpp/extras/check/plant.cu build/cpp/extras/check/check.cu $$(headers_check) \
    build/cpu/check
	$(begin)
	$(show)$(CXX) $(cpu_flags) -w -iquote extras/check $(once_cpu) $(apart_cpu) \
	    $(if $(apart_cpu),build/cpu/watched_products.o build/cpu/watched_winograd.o) \
	    -DPROGRAM='"../../build/plant/$*/program.cu"' -x c++ build/cpp/extras/check/plant.cu $(dl) $(to)
