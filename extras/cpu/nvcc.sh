#!/bin/sh
# nvcc.sh: compiles $CU_FILE for a GPU, without one, and shows what nvcc says of it: see cu.sh. Where
# there is no nvcc, wheels of PyPI bring one into build/nvcc_venv. Status 1 if nvcc refuses a file.
venv=build/nvcc_venv
in_venv() { ls $venv/lib/python*/site-packages/nvidia/cu*/bin/nvcc 2>/dev/null; }
nvcc=$(command -v "${NVCC:-nvcc}" || command -v /usr/local/cuda/bin/nvcc || in_venv) || {
    echo "no nvcc here: getting one into $venv" >&2
    python3 -m venv $venv && $venv/bin/pip install -q nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt \
        nvidia-cuda-runtime nvidia-cuda-cccl && nvcc=$(in_venv)
} || {
    rm -rf $venv
    echo 'make nvcc needs nvcc, or python3-venv and a network to get it' >&2
    exit 1
}
CU_ON=nvcc CU_COMPILE="$nvcc -std=c++17 -arch=sm_75 -rdc=true -I. -c" exec sh extras/cpu/cu.sh
