# The other two chapters' networks. The Makefile includes this file where it is there.

# MODEL          also resnet18 and lab_cnn, see extras/networks/README.md

ifneq ($(wildcard extras/networks/tests.cu),) # a handout has none
programs += networks_tests
tests += networks_tests
asan_tests += networks_tests
lanes_tests += networks_tests
of_networks_tests = extras/networks/tests.cu $(call without_lesson,mgpu) $(tests_h)
options_networks_tests = $(options_tests) $(untuned) $(call declared,mgpu)
links_networks_tests = $(untuned_lesson)
endif
