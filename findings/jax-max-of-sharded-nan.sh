#!/bin/bash
# jax.numpy.max is numpy.max's implementation in JAX, and returns NaN if a number is NaN. But on CPU
# devices it does not if the array is split over several: the maximum of one device is NaN, and then
# XLA's allreduce drops it. min does the same, and so does the norm that clips gradients by their
# largest element. argmax still finds the NaN, and sum keeps it. Several CPU devices in one process
# are what JAX offers for testing code for several GPUs, and a test there may find no NaN in losses
# or gradients although there is one. Look for it with isnan(x).any().
#
# x is [1, nan, 3, 4], on one device and on four. Seen on Linux, x86-64, with Python 3.11,
# numpy 2.4.6, jax 0.10.2 and jaxlib 0.10.2:
#
#     max(x): nan and 4.0
#     min(x): nan and 1.0
#     norm(x, inf): nan and 4.0
#     isnan(max(x)): True and False
#     x[argmax(x)]: nan and nan
#     sum(x): nan and nan
#     isnan(x).any(): True and True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-deps \
    --target "$folder/packages" numpy==2.4.6 jax==0.10.2 jaxlib==0.10.2 ml_dtypes==0.6.0 \
    opt_einsum==3.4.0 scipy==1.17.1
export PYTHONPATH=$folder/packages JAX_PLATFORMS=cpu
export XLA_FLAGS=--xla_force_host_platform_device_count=4

cat >"$folder/reduce.py" <<'END'
import jax
import jax.numpy as jnp
import numpy
from jax.sharding import NamedSharding, PartitionSpec

one = jnp.array([1, numpy.nan, 3, 4])
mesh = jax.make_mesh((4,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
four = jax.device_put(one, NamedSharding(mesh, PartitionSpec("devices")))
functions = {
    "max(x)": jnp.max,
    "min(x)": jnp.min,
    "norm(x, inf)": lambda x: jnp.linalg.norm(x, jnp.inf),
    "isnan(max(x))": lambda x: jnp.isnan(jnp.max(x)),
    "x[argmax(x)]": lambda x: x[jnp.argmax(x)],
    "sum(x)": jnp.sum,
    "isnan(x).any()": lambda x: jnp.isnan(x).any(),
}
for name, function in functions.items():
    print(f"{name}: {function(one)} and {function(four)}")
END
python3 "$folder/reduce.py" >"$folder/seen"
cat "$folder/seen"

# The comment above is what to expect.
sed -n 's/^#     //p' "$0" | diff - "$folder/seen" || { echo 'not as stated'; exit 1; }
echo 'as stated'
