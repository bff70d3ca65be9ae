# What exercise/, check/ and measure/ share: watch.h sees every CUDA call of the program that includes
# it. The Makefile includes this file where it is there.

# Programs that include watch.h, and then the program's source, with the tuned operators if they are
# there. (Under a sanitizer those would take a minute to compile.)
watch := $(wildcard extras/watch/*.h)
headers_watched := $(watch)
watched_rooms := check exercise measure watch
$(foreach x,$(watched_rooms),$(eval way_$x := watched))
options_watched = $(if $(filter asan race,$(*D)),$(untuned) $(filter-out -DPROGRAM%,$(tuned)),\
    $(if $(apart),-DPROGRAM='"program.h"',$(tuned)))
# With g++ they include declarations, and objects that are compiled with watch.h are linked. (What
# `static` hides in a part is not declared, nor what the parts include, but for two headers.)
of_watched = $(if $(apart),build/gpu/program.h extras/format.h,$(needs))
links_watched = $(call products_of,watched_) \
    $(if $(apart),$(patsubst %,build/$(*D)/watched_%.o,program lesson))
objects += $(patsubst %,watched_%,products winograd program lesson)
see := -include extras/watch/watch.h \
    $(patsubst %,-include %,$(wildcard extras/check/launches.h))
$(foreach x,products winograd program lesson,$(eval of_watched_$x = $$(of_$x))\
    $(eval headers_watched_$x = $(watch) $(wildcard extras/check/launches.h))\
    $(eval options_watched_$x = $$(see) $$(options_$x)))
options_watched_program += -DMGPU_NO_MAIN
build/cpp/program.h: $$(patsubst %,build/cpp/%,$$(firstword $$(in_program)) extras/hooks.h \
    $$(wordlist 2,9,$$(in_program)) \
    $$(wildcard extras/algorithms/overlap.h extras/fast/memory.h)) $(declarations_sh) \
    build/cpp/program.cu \
    $(wildcard $(foreach x,$(watched_rooms),extras/$x/*.cu extras/$x/*.h)) $(tests_h)
	@cat $(filter-out %/program.cu,$(filter build/%,$^)) >$(new).cu; sh extras/declarations.sh $(new).cu \
	    $(filter-out build/% $(declarations_sh),$^) >$(new); rm $(new).cu; $(renew)
