# Several machines: with NODES or HOSTS, make run and make exercise start nodes.cu by MPI.

# NODES          processes, started by MPI, each with GPUS devices of its own
# HOSTS          file with the names of their machines, for mpirun; by default all run here
# MPICXX         MPI's compiler, for NODES
MPICXX ?= mpicxx
own += NODES HOSTS MPICXX

no_mpi = $(foreach x,mpirun $(MPICXX),$(if $(shell command -v $x),,there is no $x: NODES needs \
    MPI, which Debian has in openmpi-bin and libopenmpi-dev))
need_mpi = $(if $(strip $(no_mpi)),$(error $(strip $(no_mpi))))
# More processes than cores are allowed, and root. (-q would hide what is wrong with HOSTS)
open_mpi = $(shell mpirun --version | grep 'Open MPI')
mpirun = mpirun $(if $(open_mpi),$(if $(value HOSTS),,-q) --oversubscribe --bind-to none \
    $(if $(filter 0,$(shell id -u)),--allow-run-as-root))

ifneq ($(value NODES)$(value HOSTS),)
  $(need_mpi)
  $(if $(findstring <$(or $(value NODES),1)>,$(patsubst %,<%>,$(shell seq 1024))),,\
    $(error NODES=$(value NODES): expected a number of processes from 1 to 1024))
  $(foreach x,$(filter show bench summary trace profile scale plot test race asan lanes \
    sanitize,$(MAKECMDGOALS)),$(error make $x works only in one process: leave NODES and HOSTS out))
  start := $(mpirun) $(if $(value NODES),-n $(value NODES)) \
      $(if $(value HOSTS),--hostfile '$(subst ','\'',$(value HOSTS))')
  program := $(dir)/nodes
  backend += with $(if $(value NODES),$(value NODES) processes) on \
      $(or $(subst ',,$(value HOSTS)),$(shell nproc) cores)
endif

# nodes.cu is compiled by MPI's compiler, which calls g++. (With CXX=mpicxx it would call itself for
# ever.) On a GPU nvcc calls it.
ifeq ($(findstring mpi,$(notdir $(CXX))),)
export OMPI_CXX = $(CXX)
export MPICH_CXX = $(CXX)
endif
programs += nodes
not_in_all += nodes
compiler_nodes = $(MPICXX)
of_nodes = extras/nodes/nodes.cu extras/nodes/exercise.h extras/format.h $(needs)
headers_nodes = build/mpi_version
options_nodes = $(need_mpi)$(tuned)
links_nodes = $(products)
# The compiler of another MPI, or of another version, may have the same name
build/mpi_version: FORCE
	@mkdir -p build; { $(MPICXX) -show; printf '\043include <mpi.h>\n' | $(MPICXX) -E -dM -x c++ - | \
	    grep -E '(OMPI|MPICH|I_MPI)_[A-Z_]*VERSION '; } >$(new) 2>/dev/null; $(renew)

ifneq ($(start),)
exercise: backend $(program)
	@$(start) $(program) exercise $(words)
endif

.PHONY: nodes nodes_asan nodes_race
nodes: backend $(program) $(dir)/nodes data  ## test NODES on this machine (needs MPI)
	@sh extras/nodes/test.sh $(program) $(dir)/nodes $(mpirun)
nodes_words := $(if $(wildcard extras/algorithms),OVERLAP=1) \
    $(if $(wildcard extras/files),LOG=build/nodes_log)
# MPI's own leaks and locks are suppressed by name
nodes_asan: build/asan/nodes data
	@ASAN_OPTIONS=fast_unwind_on_malloc=0 \
	    LSAN_OPTIONS=suppressions=extras/nodes/mpi.lsan:print_suppressions=0 \
	    $(mpirun) -n 2 $< GPUS=2 LIMIT=90 BATCH=40 EPOCHS=1 $(nodes_words)
nodes_race: build/race/nodes data
	@TSAN_OPTIONS=suppressions=extras/nodes/mpi.tsan $(tsan) $(mpirun) -n 2 $< \
	    GPUS=2 LIMIT=6 BATCH=4 EPOCHS=1 CHECKS=0 $(nodes_words)
