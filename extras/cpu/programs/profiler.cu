// Names for a profiler, in C and C++. The file begins with a byte-order mark, as editors of
// Windows write it.
// prints: 3 3
#include "check.h"
#include <cuda_profiler_api.h>
#include <nvtx3/nvToolsExt.h>
#include <nvtx3/nvtx3.hpp>

__global__ void count(int *x) { x[threadIdx.x] = threadIdx.x; }

static int copy_back(int *to, const int *from, size_t bytes) {
    NVTX3_FUNC_RANGE();
    const nvtxRangeId_t range = nvtxRangeStartA("copy");
    CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
    nvtxRangeEnd(range);
    return to[3];
}

int main() {
    int *x, got[4];
    CHECK(cudaMalloc(&x, sizeof got));
    CHECK(cudaProfilerStart());
    nvtxRangePush("kernel");
    nvtxEventAttributes_t green = {};
    green.version = NVTX_VERSION;
    green.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    green.colorType = NVTX_COLOR_ARGB;
    green.color = 0xff00ff00;
    green.messageType = NVTX_MESSAGE_TYPE_ASCII;
    green.message.ascii = "launch";
    nvtxRangePushEx(&green);
    nvtxMark("now");
    count<<<1, 4>>>(x);
    CHECK(cudaGetLastError());
    const int last = copy_back(got, x, sizeof got);
    {
        const nvtx3::scoped_range again("again");
        nvtx3::mark("once more");
        copy_back(got, x, sizeof got);
    }
    nvtxRangePop();
    nvtxRangePop();
    CHECK(cudaProfilerStop());
    printf("%d %d\n", last, got[3]);
}
