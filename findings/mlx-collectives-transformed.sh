#!/bin/bash
# MLX lets you differentiate its collectives and apply vmap to them, but some results are wrong, and
# nothing tells you so. The gradient of all_max and all_min is the whole gradient on every process,
# even on those that do not have the maximum. jvp of all_max returns the largest of the processes'
# tangents, not that of the process with the maximum, and jvp of all_min returns the smallest. vmap
# of all_gather concatenates the mapped axis, so the two examples below become four, where a loop
# over the examples returns two longer ones. The documentation names no exception. Write
# all_gather(x[None]).max(0) if you need its gradient, and all_gather(X.T).T instead of vmap.
#
# Processes 0 and 1 have x = 1 and 2, tangents 10 and 9, and two examples each: X = [[0, 1], [2, 3]]
# and X = [[10, 11], [12, 13]]. Seen on Linux, x86-64, with Python 3.11 and the ring backend of
# mlx 0.32.4:
#
#     gradient of all_max(x): 1 and 1
#     gradient of all_min(x): 1 and 1
#     gradient of all_gather(x[None]).max(0): 0 and 1
#     jvp of all_max(x): 10 and 10
#     jvp of all_min(x): 9 and 9
#     jvp of all_gather(x[None]).max(0): 9 and 9
#     vmap of all_gather: [[0, 1], [2, 3], [10, 11], [12, 13]]
#     a loop of all_gather: [[0, 1, 10, 11], [2, 3, 12, 13]]
#     all_gather(X.T).T: [[0, 1, 10, 11], [2, 3, 12, 13]]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-deps \
    --target "$folder/packages" mlx==0.32.4 mlx-cpu==0.32.4
export PYTHONPATH=$folder/packages

cat >"$folder/transform.py" <<'END'
import mlx.core as mx
from mlx.core.distributed import all_gather, all_max, all_min

world = mx.distributed.init(strict=True, backend="ring")
rank = world.rank()
x = mx.array(rank + 1.0)
tangent = mx.array(10.0 - rank)
X = mx.array([[0, 1], [2, 3]]) + 10 * rank


def row(what, y):
    seen = all_gather(y[None]).tolist()
    if rank == 0:
        print(f"{what}: {seen[0]:g} and {seen[1]:g}", flush=True)


functions = {
    "all_max(x)": all_max,
    "all_min(x)": all_min,
    "all_gather(x[None]).max(0)": lambda x: all_gather(x[None]).max(0),
}
for name, function in functions.items():
    row(f"gradient of {name}", mx.grad(function)(x))
for name, function in functions.items():
    row(f"jvp of {name}", mx.jvp(function, [x], [tangent])[1][0])
rows = {
    "vmap of all_gather": mx.vmap(all_gather)(X),
    "a loop of all_gather": mx.stack([all_gather(example) for example in X]),
    "all_gather(X.T).T": all_gather(X.T).T,
}
for name, gathered in rows.items():
    gathered = gathered.tolist()
    if rank == 0:
        print(f"{name}: {gathered}", flush=True)
END
"$folder/packages/bin/mlx.launch" -n 2 --backend ring "$(command -v python3)" \
    "$folder/transform.py" >"$folder/seen"
cat "$folder/seen"

# The comment above is what to expect.
sed -n 's/^#     //p' "$0" | diff - "$folder/seen" || { echo 'not as stated'; exit 1; }
echo 'as stated'
