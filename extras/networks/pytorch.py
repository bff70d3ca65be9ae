"""Compares five steps of training with PyTorch's in float64, from many starts:

    make && python3 extras/networks/pytorch.py          needs PyTorch (2.15 was used)

Prints a row for each start: the largest difference of any parameter, divided by the largest change of
any parameter, of each of our KERNELS and of PyTorch's own float32. Rounding alone gives some 1e-6. A
difference above 1e-5 comes from a ReLU whose input is nearly 0, or from two numbers of a max pooling
that are nearly equal: rounding decides on which side they fall, and from then on the two compute
different functions. So the last row counts such starts, for PyTorch's float32, too. Status 1 if one of
ours has such a start more often than PyTorch's float32 and 3 more.
"""
import os
import subprocess
import sys
import tempfile

import torch
from torch.nn import functional as F

BATCH, STEPS, SCALE, LR = 64, 5, 0.08, 0.2
SHAPES = {"W1": (20, 1, 3, 3), "b1": (20,), "W2": (50, 20, 5, 5), "b2": (50,),
          "W3": (800, 128), "b3": (128,), "W4": (128, 10), "b4": (10,)}
KERNELS = ("plain", "tiled", "fast")
# The lab's names for them
LAB = {"W1": "conv0.weight", "b1": "conv0.bias", "W2": "conv1.weight", "b2": "conv1.bias",
       "W3": "dense0.weight", "b3": "dense0.bias", "W4": "dense1.weight", "b4": "dense1.bias"}


def samples():
    """The first samples of Fashion-MNIST, in the file's order."""
    n = BATCH * STEPS
    with open("build/data/train-images-idx3-ubyte", "rb") as file:
        images = torch.frombuffer(bytearray(file.read(16 + n * 784)[16:]), dtype=torch.uint8)
    with open("build/data/train-labels-idx1-ubyte", "rb") as file:
        labels = torch.frombuffer(bytearray(file.read(8 + n)[8:]), dtype=torch.uint8)
    return images.reshape(n, 1, 28, 28), labels.long()


def trained(model, start, dtype):
    """The parameters after STEPS steps of SGD by PyTorch, in this type."""
    pool = F.max_pool2d if model == "lab_cnn" else F.avg_pool2d
    params = {name: tensor.to(dtype, copy=True).requires_grad_() for name, tensor in start.items()}
    images, labels = samples()
    for X, y in zip(images.split(BATCH), labels.split(BATCH)):
        h = X.to(torch.float32).div(255).to(dtype)
        for i in "12":
            h = pool(F.relu(F.conv2d(h, params["W" + i], params["b" + i])), 2)
        h = F.relu(h.flatten(1) @ params["W3"] + params["b3"])
        loss = F.cross_entropy(h @ params["W4"] + params["b4"], y)
        for p, grad in zip(params.values(), torch.autograd.grad(loss, list(params.values()))):
            p.data -= LR * grad
    return {name: p.detach().double() for name, p in params.items()}


def ours(model, start, kernels, folder):
    """The same by build/cpu/program."""
    from safetensors.torch import load_file, save_file
    init, save = os.path.join(folder, "init.safetensors"), os.path.join(folder, "out.safetensors")
    names = LAB if model == "lab_cnn" else {name: name for name in SHAPES}
    save_file({names[name]: tensor for name, tensor in start.items()}, init)
    subprocess.run(["build/cpu/program", f"MODEL={model}", f"INIT={init}", f"SAVE={save}",
                    f"KERNELS={kernels}", f"BATCH={BATCH}", f"LIMIT={BATCH * STEPS}", f"LR={LR}",
                    "EPOCHS=1", "SHUFFLE=0", "DATA=data", f"LOG={folder}/log"],
                   check=True, stdout=subprocess.DEVNULL)
    saved = load_file(save)
    return {name: saved[names[name]].double() for name in SHAPES}


def main():
    torch.set_num_threads(1)
    starts = [("lab_cnn", seed) for seed in range(14)] + [("lenet", seed) for seed in range(6)]
    columns = ("float32", *KERNELS)
    flipped = dict.fromkeys(columns, 0)
    print(f"{'model':8} {'seed':>4}" + "".join(f" {name:>9}" for name in columns))
    for model, seed in starts:
        torch.manual_seed(seed)
        start = {name: SCALE * torch.randn(shape) for name, shape in SHAPES.items()}
        want = trained(model, start, torch.float64)
        change = max((want[name] - start[name]).abs().max().item() for name in SHAPES)
        row = f"{model:8} {seed:4}"
        for column in columns:
            with tempfile.TemporaryDirectory() as folder:
                got = (trained(model, start, torch.float32) if column == "float32"
                       else ours(model, start, column, folder))
            error = max((got[name] - want[name]).abs().max().item() for name in SHAPES) / change
            flipped[column] += error > 1e-5
            row += f" {error:9.1e}"
        print(row, flush=True)
    print(f"{'above 1e-5':13}" + "".join(f" {flipped[name]:9}" for name in columns))
    sys.exit(any(flipped[name] > flipped["float32"] + 3 for name in KERNELS))


if __name__ == "__main__":
    main()
