# The tuned operators: the last part of the program.

# Copies of mgpu.cu and networks.cu in which what fast.cu replaces has another name, too
plain := mgpu.cu $(wildcard extras/networks/networks.cu)
build/gpu/plain/%: % $(copied) extras/fast/fast.cu
	@$(copy)

# products.cu takes the longest to compile, on a CPU with winograd.cu beside it. Of mgpu.cu they
# include declarations, and are compiled again only if those change. (Under a sanitizer fast.cu
# includes products.cu.)
objects += products winograd
apart_gpu := -DPRODUCTS_APART
apart_cpu := -DPRODUCTS_APART
fast_headers := $(wildcard extras/fast/*.h) extras/format.h
included = extras/format.h $(addprefix extras/fast/,\
    $(shell sed -n 's/^\#include "\(.*\)"/\1/p' $1))
of_products := extras/fast/products.cu $(call included,extras/fast/products.cu) build/gpu/products.h
of_winograd := extras/fast/winograd.cu $(call included,extras/fast/winograd.cu) build/gpu/products.h
options_winograd = -DVOCABULARY='"products.h"' -DWINOGRAD_APART
options_products = $(if $(filter gpu,$(*D)),-DVOCABULARY='"products.h"',$(options_winograd))
build/gpu/products.h build/cpp/products.h: mgpu.cu $(filter extras/%,$(of_products)) \
    $(declarations_sh)
	@$(declare)
# For SM 90 they use wgmma, which is of SM 90 alone: its PTX has none.
comma := ,
of_90 := arch=compute_90$(comma)code=
wgmma_90 := arch=compute_90a$(comma)code=sm_90a
with_wgmma = $(if $(filter 90,$(SM)),-DSM_90A) $(subst $(of_90)sm_90 ,$(wgmma_90) ,$(subst \
    $(of_90)[sm_90$(comma)compute_90],$(wgmma_90) -gencode $(of_90)compute_90,$(sms)))
sms_products = $(with_wgmma)
sms_watched_products = $(with_wgmma)

# Operators that mgpu.cu no longer has as extras/fast/ knows them: yours run in their place
edited = $(shell sh extras/fast/checksum.sh)
tuned += $(or $(apart_$(*D)),-DEDITED='"$(edited)"')
objects += edited
of_edited := build/gpu/edited.cu
build/gpu/edited.cu: FORCE
	@mkdir -p $(@D); echo 'extern const char edited[] = "$(edited)";' >$(new) && $(renew)
needs += $(if $(apart_$(*D)),,$(of_products)) $(fast_headers) extras/fast/checksums \
    $(plain:%=build/gpu/plain/%)
products_gpu := products.o
products_cpu := winograd.o products.o
products_of = $(patsubst %,build/$(*D)/$1%,$(products_$(*D))) \
    $(if $(apart_$(*D)),build/$(*D)/edited.o)
products = $(call products_of)
of_tuned = $(call without_lesson,lesson)
options_tuned = $(tuned) $(call declared,lesson)
links_tuned = $(products) $(lesson)
links_program = $(links_tuned)

way_fast := tuned
untested += $(if $(wildcard extras/networks),,fast) # the tests have operators of both

.PHONY: checksum sources
# For a compiler of your own: write what the build generates, and print the options to find it
sources: build/gpu/program.cu $(hooked) $(plain:%=build/gpu/plain/%)
	@echo -I. -Ibuild/gpu
checksum:  ## check that the tuned operators match mgpu.cu's
	@sh extras/fast/checksum.sh --check
