#!/bin/sh
# sh extras/check/own_kernel.sh: a kernel that mgpu.cu does not come with is looked at by both
# sanitizers. It builds in build/own_kernel, from copies.
cd "$(dirname "$0")/../.." || exit 1
rm -rf build/own_kernel && mkdir -p build/own_kernel/extras build/own_kernel/build &&
    cp -a Makefile mgpu.cu data build/own_kernel && cp -a build/data build/own_kernel/build &&
    cp -a extras/*.* extras/cpu extras/check extras/watch build/own_kernel/extras &&
    cd build/own_kernel || exit 1
cp -a mgpu.cu before.cu
cat >look.mk <<'END'
include Makefile
look:
	@$(if $(own_kernels),$(call look_for_races))
	@$(if $(own_kernels),$(call look_at_memory))
END
# says WORDS CODE: a kernel with this code, which relu launches, is told with these words
says() {
    sed "s|^Tensor relu(.*{\$|__global__ void own_kernel(float *y, const float *X, int n) {\n\
    const int i = blockIdx.x * blockDim.x + threadIdx.x;\n    if (i < n) $2;\n}\n&|
        s|^    LAUNCH(relu_kernel.*|    const Tensor own = empty(X.shape, X.device);\n\
    LAUNCH(own_kernel<<<blocks(n), threads, 0, stream_of(X.device)>>>(own.ptr(), X.ptr(), n));\n&|" \
        before.cu >mgpu.cu
    make -s -f look.mk look BACKEND=cpu >out 2>&1
    grep "$1" out >/dev/null || { echo "not told: $1" >&2; cat out >&2; exit 1; }
}
says 'race on gpu(0): own_kernel enqueued at mgpu.cu:[0-9]*, between threads' 'y[0] = X[i]'
says 'mgpu.cu:[0-9]*: own_kernel leaves memory' 'y[i + 1] = X[i]'
says 'own_kernel .* reads .* nothing has been written' 'y[i] += X[i]'
cp before.cu mgpu.cu
make -s -f look.mk look BACKEND=cpu | grep . && exit 1
echo 'extras/check/own_kernel.sh: told'
