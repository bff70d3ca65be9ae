#!/bin/sh
# nvcc.sh FILE ...: compiles the files for a GPU, without one, and shows what nvcc says of them.
# $CU_INCLUDE is a folder with headers. Where there is no nvcc, wheels of PyPI bring one into
# build/nvcc_venv. Status 1 if nvcc refuses a file.
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
status=0
for file; do
    if "$nvcc" -std=c++17 -arch=sm_75 -rdc=true -I. ${CU_INCLUDE:+-I "$CU_INCLUDE"} \
        -Xcompiler -fopenmp -c "$file" -o /dev/null; then
        echo "$file: nvcc compiles it for a GPU"
    else
        status=1
    fi
done
exit $status
