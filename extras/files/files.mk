# SAVE, INIT and LOG: their tests.

ifneq ($(wildcard extras/files/tests.cu),)
programs += files_tests
tests += files_tests
asan_tests += files_tests
of_files_tests = extras/files/tests.cu $(call without_lesson,mgpu) $(tests_h)
options_files_tests = $(options_tests) $(untuned) $(call declared,mgpu)
links_files_tests = $(untuned_lesson)
endif
