# SAVE, INIT and LOG: their tests.

ifneq ($(wildcard extras/files/tests.cu),)
programs += files_tests
tests += files_tests
asan_tests += files_tests
of_files_tests = extras/files/tests.cu $(needs) $(tests_h)
options_files_tests = $(options_tests) $(untuned)
endif
