#!/bin/bash
# What runs GPU kernels on a CPU seldom finds the mistakes that a GPU would punish. numba-cuda's
# simulator, warp on its device cpu, Triton's interpreter and PoCL run each mistake below, and most
# of them give numbers without a word: sometimes wrong ones, often those that the author hoped for.
# So a test that passes there says little about a GPU. A mistake that an interface cannot express,
# such as the use of memory after it was freed where an array frees itself, is left out. One may be
# surprised, too, that PoCL shows a device for each name in POCL_DEVICES.
#
# Seen on Linux, x86-64, with Python 3.11:
#
#     numba-cuda 0.30.4: an index beyond the array: IndexError
#     numba-cuda 0.30.4: a barrier is missing: no word, wrong numbers
#     numba-cuda 0.30.4: a counter without atomic.add: no word
#     numba-cuda 0.30.4: half of the threads at another barrier: no word
#     numba-cuda 0.30.4: memory that nothing has written to: no word
#     numba-cuda 0.30.4: the host reads device memory: no word
#     numba-cuda 0.30.4: devices: 1
#     warp 1.19.0: an index beyond the array: no word, another array's element is 1
#     warp 1.19.0: a counter without atomic_add: no word
#     warp 1.19.0: memory that nothing has written to: no word
#     warp 1.19.0: devices: 1
#     warp 1.19.0, debug: an index beyond the array: an assertion fails
#     triton 3.9.0: an index beyond the array: no word, another array's element is 1
#     triton 3.9.0: a counter without atomic_add: no word
#     pocl 3.0: an index beyond the array: no word, another array's element is 1
#     pocl 3.0: a barrier is missing: no word, wrong numbers
#     pocl 3.0: a counter without atomic_add: no word
#     pocl 3.0: half of the threads at another barrier: no word
#     pocl 3.0: memory that nothing has written to: no word
#     pocl 3.0: devices: 1
#     pocl 3.0: devices with POCL_DEVICES='basic basic': 2
set -euo pipefail
script=$(realpath "$0")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --no-deps \
    --target "$folder/packages" numpy==2.4.6 numba==0.68.1 llvmlite==0.50.0 numba-cuda==0.30.4 \
    cuda-bindings==13.5.0 cuda-core==1.2.2 cuda-pathfinder==1.9.1 packaging==26.4 \
    warp-lang==1.19.0 triton==3.9.0 pyopencl==2026.1.4 pocl-binary-distribution==3.0 \
    pytools==2026.1.1 platformdirs==4.14.8 siphash24==1.9 typing_extensions==4.16.0
export PYTHONPATH=$folder/packages NUMBA_ENABLE_CUDASIM=1 TRITON_INTERPRET=1
export POCL_CACHE_DIR=$folder/pocl OCL_ICD_VENDORS=$folder/packages/pyopencl/.libs

cat >"$folder/numba_rows.py" <<'END'
import _numba_cuda_redirector  # otherwise, numba.cuda is numba's own: --target ignores .pth files
import numpy
import numba_cuda
from numba import cuda


def row(what, kernel=None, n=64, blocks=1, threads=64, right=None):
    x = cuda.to_device(numpy.zeros(n, numpy.float32))
    said = "no word"
    try:
        if kernel:
            kernel[blocks, threads](x)
        else:
            cuda.device_array(n, numpy.float32).copy_to_host()
        if right is not None and x.copy_to_host().tolist() != right:
            said += ", wrong numbers"
    except Exception as error:
        said = type(error).__name__
    print(f"numba-cuda {numba_cuda.__version__}: {what}: {said}")


@cuda.jit
def beyond(x):
    x[cuda.threadIdx.x + 4] = 1


@cuda.jit
def reverse(x):
    shared = cuda.shared.array(64, numpy.float32)
    t = cuda.threadIdx.x
    shared[t] = t
    x[t] = shared[63 - t]


@cuda.jit
def count(x):
    x[0] += 1


@cuda.jit
def diverge(x):
    if cuda.threadIdx.x < 32:
        cuda.syncthreads()
    else:
        cuda.syncthreads()


row("an index beyond the array", beyond, 6, 1, 4)
row("a barrier is missing", reverse, right=[63.0 - i for i in range(64)])
row("a counter without atomic.add", count, 1, 4)
row("half of the threads at another barrier", diverge)
row("memory that nothing has written to")
x = cuda.to_device(numpy.ones(4))
said = "no word" if x[0] == 1 else "?"
print(f"numba-cuda {numba_cuda.__version__}: the host reads device memory: {said}")
print(f"numba-cuda {numba_cuda.__version__}: devices: {len(cuda.gpus)}")
END

cat >"$folder/warp_rows.py" <<'END'
import sys

import warp

warp.config.quiet = True
warp.config.mode = sys.argv[1]
warp.config.kernel_cache_dir = sys.argv[2]
name = f"warp {warp.config.version}" + (", debug" if sys.argv[1] == "debug" else "")


@warp.kernel
def beyond(x: warp.array(dtype=float)):
    x[warp.tid() + 4] = 1.0


@warp.kernel
def count(x: warp.array(dtype=int)):
    x[0] = x[0] + 1


whole = warp.zeros(100, dtype=float, device="cpu")
warp.launch(beyond, dim=4, inputs=[whole[:6]], device="cpu")
other = whole.numpy()[7]
print(f"{name}: an index beyond the array: no word, another array's element is {other:g}")
n = warp.zeros(1, dtype=int, device="cpu")
warp.launch(count, dim=256, inputs=[n], device="cpu")
print(f"{name}: a counter without atomic_add: no word")
warp.empty(4, dtype=float, device="cpu").numpy()
print(f"{name}: memory that nothing has written to: no word")
print(f"{name}: devices: {len(warp.get_devices())}")
END

cat >"$folder/triton_rows.py" <<'END'
import numpy
import triton
import triton.language as tl


class Array:  # what the interpreter asks of a tensor of PyTorch
    def __init__(self, x):
        self.x, self.dtype, self.device = x, str(x.dtype), "cpu"

    def data_ptr(self):
        return self.x.ctypes.data

    def new_empty(self, *_, **__):
        return Array(self.x)

    def cpu(self, *_):
        return self

    untyped_storage = set_ = copy_ = cpu

    def storage_offset(self):
        return 0

    def size(self):
        return self.x.shape

    def stride(self):
        return (1,)


@triton.jit
def beyond(x):
    tl.store(x + 4 + tl.arange(0, 4), 1.0)


@triton.jit
def count(x):
    tl.store(x, tl.load(x) + 1)


name = f"triton {triton.__version__}"
whole = numpy.zeros(100, numpy.float32)
beyond[(1,)](Array(whole[:6]))
print(f"{name}: an index beyond the array: no word, another array's element is {whole[7]:g}")
n = numpy.zeros(1, numpy.float32)
count[(256,)](Array(n))
print(f"{name}: a counter without atomic_add: no word" if n[0] == 256 else n)
END

cat >"$folder/pocl_rows.py" <<'END'
import os

import numpy
import pyopencl as cl

platform = cl.get_platforms()[0]
name = "pocl " + platform.version.split("PoCL ")[1].split("-")[0]
if "POCL_DEVICES" in os.environ:
    devices = len(platform.get_devices())
    print(f"{name}: devices with POCL_DEVICES='{os.environ['POCL_DEVICES']}': {devices}")
    raise SystemExit
context = cl.Context(platform.get_devices()[:1])
queue = cl.CommandQueue(context)
program = cl.Program(context, """
kernel void beyond(global float *x) { x[get_global_id(0) + 4] = 1; }
kernel void reverse(global float *x) {
    local float shared[64];
    int t = get_local_id(0);
    shared[t] = t;
    x[t] = shared[63 - t];
}
kernel void count(global float *x) { x[0] += 1; }
kernel void diverge(global float *x) {
    if (get_local_id(0) < 32) barrier(CLK_LOCAL_MEM_FENCE);
    else barrier(CLK_LOCAL_MEM_FENCE);
}
""").build()


def row(what, kernel=None, threads=64, local=64):
    x = cl.Buffer(context, cl.mem_flags.READ_WRITE, 400)
    part = x[:24] if kernel == "beyond" else x  # of another array of 100
    host = numpy.zeros(100, numpy.float32)
    if kernel:
        cl.enqueue_copy(queue, x, host)
        getattr(program, kernel)(queue, (threads,), (local,), part)
    cl.enqueue_copy(queue, host, x)
    queue.finish()
    said = "no word"
    if kernel == "beyond":
        said += f", another array's element is {host[7]:g}"
    if kernel == "reverse" and host[:64].tolist() != [63.0 - t for t in range(64)]:
        said += ", wrong numbers"
    print(f"{name}: {what}: {said}")


row("an index beyond the array", "beyond", 4, 4)
row("a barrier is missing", "reverse")
row("a counter without atomic_add", "count", 256)
row("half of the threads at another barrier", "diverge")
row("memory that nothing has written to")
print(f"{name}: devices: {len(platform.get_devices())}")
END

cd "$folder"
{
    python3 numba_rows.py
    python3 warp_rows.py release "$folder/release" | grep '^warp'
    # It ends the process, by an assertion, where the array's size is known to it
    python3 warp_rows.py debug "$folder/debug" >debug.out 2>&1 || true
    if grep -q '^Assertion failed' debug.out && ! grep -q ', debug' debug.out; then
        version=$(sed -n 's/^Warp \([0-9.]*\) initialized.*/\1/p' debug.out)
        echo "warp $version, debug: an index beyond the array: an assertion fails"
    fi
    python3 triton_rows.py
    python3 pocl_rows.py
    POCL_DEVICES='basic basic' python3 pocl_rows.py
} >seen 2>errors || { cat seen errors; exit 1; }
cat seen

# The comment above is what to expect.
sed -n 's/^#     //p' "$script" | diff - seen || { echo 'not as stated'; exit 1; }
echo 'as stated'
