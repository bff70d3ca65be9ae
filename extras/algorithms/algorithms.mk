# The other allreduces and OVERLAP: their tests.

ifneq ($(wildcard extras/algorithms/tests.cu),)
programs += algorithms_tests
tests += algorithms_tests
asan_tests += algorithms_tests
lanes_tests += algorithms_tests
race_tests += $(if $(value ALLREDUCE),,algorithms_tests)
of_algorithms_tests = extras/algorithms/tests.cu $(call without_lesson,mgpu) $(tests_h)
options_algorithms_tests = $(options_tests) $(untuned) $(call declared,mgpu)
links_algorithms_tests = $(untuned_lesson)
endif
