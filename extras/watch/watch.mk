# What exercise/, check/ and measure/ share: watch.h sees every CUDA call of the program that includes
# it. The Makefile includes this file where it is there.

# Programs that include watch.h, and then the program's source, with the tuned operators if they are
# there. (Under a sanitizer those would take a minute to compile.)
watch := $(wildcard extras/watch/*.h)
watching = $(if $(filter asan race,$(*D)),$(untuned) $(filter-out -DPROGRAM%,$(tuned)),$(tuned))

ifneq ($(wildcard extras/fast),)
objects += watched_products watched_winograd
of_watched_products = $(of_products)
of_watched_winograd = $(of_winograd)
headers_watched_products := extras/watch/watch.h
headers_watched_winograd := extras/watch/watch.h
options_watched_products = $(options_products) -include extras/watch/watch.h
options_watched_winograd = $(options_winograd) -include extras/watch/watch.h
watched_products = $(call products_of,watched_)
endif

ifneq ($(wildcard extras/watch/tests.cu),) # a handout has none
programs += watch_tests
tests += watch_tests
of_watch_tests = extras/watch/tests.cu $(needs) $(tests_h)
headers_watch_tests := $(watch)
options_watch_tests = $(options_tests) $(watching)
links_watch_tests = $(watched_products)
endif
