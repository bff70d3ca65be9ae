// Where a profiler begins and ends to look. The stand-in has none.
#pragma once
#include "cuda_runtime.h"
inline cudaError_t cudaProfilerStart() { return cudaSuccess; }
inline cudaError_t cudaProfilerStop() { return cudaSuccess; }
