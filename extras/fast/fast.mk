# The tuned operators: the last part of the program.

# Copies of mgpu.cu and networks.cu in which what fast.cu replaces has another name, too
plain := mgpu.cu $(wildcard extras/networks/networks.cu)
build/gpu/plain/%: % $(copied) extras/fast/fast.cu
	@$(copy)
build/cpp/plain/%: build/cpp/% $(copied) extras/fast/fast.cu
	@$(copy)

# products.cu takes the longest to compile. Of mgpu.cu it includes a part, and is compiled again only
# if that changes. (Under a sanitizer fast.cu includes products.cu.)
objects += products
apart_gpu := -DPRODUCTS_APART
apart_cpu := -DPRODUCTS_APART
fast_headers := $(wildcard extras/fast/*.h) extras/format.h
of_products := extras/fast/products.cu $(fast_headers) build/gpu/vocabulary.h
options_products = -DVOCABULARY='"vocabulary.h"'
build/gpu/vocabulary.h build/cpp/vocabulary.h: mgpu.cu extras/fast/vocabulary.sh extras/definitions.awk
	@mkdir -p $(@D); sh extras/fast/vocabulary.sh $< >$(new) && $(renew)
# For SM 90 they use wgmma, which is of SM 90 alone: its PTX has none.
comma := ,
of_90 := arch=compute_90$(comma)code=
wgmma_90 := arch=compute_90a$(comma)code=sm_90a
with_wgmma = $(if $(filter 90,$(SM)),-DSM_90A) $(subst $(of_90)sm_90 ,$(wgmma_90) ,$(subst \
    $(of_90)[sm_90$(comma)compute_90],$(wgmma_90) -gencode $(of_90)compute_90,$(sms)))
sms_products = $(with_wgmma)
sms_watched_products = $(with_wgmma)

# Operators that mgpu.cu no longer has as extras/fast/ knows them: yours run in their place
tuned += $(apart_$(*D)) -DEDITED='"$(shell sh extras/fast/checksum.sh)"'
needs += $(if $(apart_$(*D)),,$(of_products)) $(fast_headers) extras/fast/checksums \
    $(plain:%=build/gpu/plain/%)
products = $(if $(apart_$(*D)),build/$(*D)/products.o)
links_program = $(products)

ifneq ($(wildcard extras/networks),) # they test the operators of both
programs += fast_tests
tests += fast_tests
asan_tests += fast_tests
lanes_tests += fast_tests
of_fast_tests = extras/fast/tests.cu $(needs) $(tests_h)
options_fast_tests = $(options_tests) $(tuned)
links_fast_tests = $(products)
endif

.PHONY: checksum sources
# For a compiler of your own: write what the build generates
sources: build/gpu/program.cu $(hooked) $(plain:%=build/gpu/plain/%)
checksum:  ## check that the tuned operators match mgpu.cu's
	@sh extras/fast/checksum.sh --check
