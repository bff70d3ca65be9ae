#!/bin/bash
# PyTorch's DTensor is documented as an abstraction like a single device, but some reductions of it
# return wrong results, and no error is raised. item() and float() of a sum, a maximum, a norm or a
# loss return what one process has reduced of its own part, so each process prints another loss.
# fill_(1) of a sum fills each process's part of it, which makes the sum 2 on two processes. And
# logsumexp with keepdim=True loses a part of its result if it reduces a dimension before the
# sharded one: the result is then said to be sharded as if keepdim were False. Write
# full_tensor().item(), torch.ones_like(x.sum()) and logsumexp(0).unsqueeze(0). PyTorch's issue
# 144054 calls the behaviour of item() intended, but the documentation of DTensor does not mention
# it.
#
# Two processes share x = [1, 2, 3, 4] and the columns of y = [[0, 1, 2, 3], [4, 5, 6, 7]]. The
# numbers are those of processes 0 and 1. Seen on Linux, x86-64, with Python 3.11, numpy 2.4.6 and
# torch 2.15.0 with gloo. It needs CUDA's libraries to start, 4 GB in all, but no GPU:
#
#     x.sum().full_tensor(): 10 and 10
#     x.sum().item(): 3 and 7
#     float(x.max()): 2 and 4
#     x.norm().full_tensor().item(): 5.477 and 5.477
#     x.norm().item(): 2.236 and 5
#     mse_loss(x, 0 * x).item(): 2.5 and 12.5
#     x.sum().fill_(1).full_tensor(): 2 and 2
#     torch.ones_like(x.sum()).full_tensor(): 1 and 1
#     y.logsumexp(0, keepdim=True): 4.018 5.018 and 4.018 5.018
#     y.logsumexp(0).unsqueeze(0): 4.018 5.018 6.018 7.018 and 4.018 5.018 6.018 7.018
#     y.sum(0, keepdim=True): 4 6 8 10 and 4 6 8 10
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-deps \
    --target "$folder/packages" torch==2.15.0 filelock==4.3.1 mpmath==1.3.0 networkx==3.6.1 \
    numpy==2.4.6 sympy==1.14.0 typing_extensions==4.16.0 nvidia-cublas==13.4.1.3 \
    nvidia-cuda-cupti==13.2.86 nvidia-cuda-nvrtc==13.2.86 nvidia-cuda-runtime==13.2.86 \
    nvidia-cudnn-cu13==9.26.0.51 nvidia-cufft==12.2.0.57 nvidia-cufile==1.17.1.22 \
    nvidia-cusparse==12.7.10.12 nvidia-cusparselt-cu13==0.8.1 nvidia-nccl-cu13==2.30.7 \
    nvidia-nvjitlink==13.5.37 nvidia-nvshmem-cu13==3.7.2
export PYTHONPATH=$folder/packages OMP_NUM_THREADS=1

cat >"$folder/reduce.py" <<'END'
import os

import torch
import torch.distributed
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.nn.functional import mse_loss

torch.distributed.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
names = {
    "torch": torch,
    "mse_loss": mse_loss,
    "x": distribute_tensor(torch.arange(1.0, 5.0), mesh, [Shard(0)]),
    "y": distribute_tensor(torch.arange(8.0).reshape(2, 4), mesh, [Shard(1)]),
}
for expression in [
    "x.sum().full_tensor()",
    "x.sum().item()",
    "float(x.max())",
    "x.norm().full_tensor().item()",
    "x.norm().item()",
    "mse_loss(x, 0 * x).item()",
    "x.sum().fill_(1).full_tensor()",
    "torch.ones_like(x.sum()).full_tensor()",
    "y.logsumexp(0, keepdim=True)",
    "y.logsumexp(0).unsqueeze(0)",
    "y.sum(0, keepdim=True)",
]:
    result = eval(expression, names)
    if isinstance(result, DTensor):
        result = result.full_tensor()
    numbers = torch.as_tensor(result).flatten().tolist()
    seen = [None, None]
    torch.distributed.all_gather_object(seen, " ".join(f"{number:.4g}" for number in numbers))
    if mesh.get_rank() == 0:
        print(f"{expression}: {seen[0]} and {seen[1]}", flush=True)
torch.distributed.barrier()
os._exit(0)  # because destroy_process_group or Python's end aborts now and then
END
python3 -m torch.distributed.run --standalone --nproc-per-node 2 "$folder/reduce.py" \
    >"$folder/seen" 2>"$folder/log" || { cat "$folder/log"; exit 1; }
cat "$folder/seen"

# The comment above is what to expect.
sed -n 's/^#     //p' "$0" | diff - "$folder/seen" || { echo 'not as stated'; exit 1; }
echo 'as stated'
