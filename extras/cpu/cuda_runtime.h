// A stand-in for the CUDA runtime on machines without a GPU: the same .cu file, compiled by g++ or
// clang++ (C++17, Linux, no library), runs on emulated devices, with CUDA's own names and codes.
//
// It is stricter than a GPU. Every emulated device has its own memory, filled with NaN when fresh,
// and its own cores; every stream is a thread with an in-order queue, so devices and streams really
// run at the same time and a missing event is a real race. What a GPU turns into a crash, a hang or
// a wrong number is named here with the line that did it: pointers of another device or of the
// host, wrong device numbers, copies and accesses out of bounds, use after free, bad launch
// configurations, threads of a block that wait at different barriers, warp functions that only some
// lanes reach.
//
//   CUDA_CPU_DEVICES   number of devices to emulate   (default: 1)
//   CUDA_CPU_CORES     cores of each device           (default: the machine's, divided among them)
//   CUDA_CPU_SLOWDOWN  such as 1,3: kernels of device 1 take 3 times as long   (default: 1 each)
//   CUDA_CPU_MEMORY    memory of each device, in MiB  (default: the machine's, divided among them)
//   CUDA_CPU_PEERS     0: no device can access another's memory. Copies between devices then go
//                      through the host, which waits in the call, as it may on a real machine
//   CUDA_CPU_WATCHDOG  seconds after which a block that has not ended is reported, or a host that
//                      is still in the range that nvtxMarkA has named; 0: never (default: 10)
//   CUDA_CPU_LANES     forwards, backwards or a seed: every block runs warp by warp, its warps and
//                      lanes in this order, or shuffled; a right kernel does not depend on it
//                      (default: forwards, and only kernels that call a warp function)
//   CUDA_CPU_LAUNCHES  1 prints a line for each launch: kernel, grid, block, bytes of dynamic
//                      shared memory, warps
//
// kernel<<<grid, block, shared, stream>>>(args), __shared__, and __device__ and __constant__
// variables are not C++. extras/cpu/to_cpp.sed turns them into calls of functions in these headers:
// configured(), shared_memory(), device_variable() and constant_variable().
//
// The headers in cuda/ declare; only what a kernel's code must contain to be fast is defined there.
// runtime.cc has all the rest, to be compiled once and linked to each program:
//
//     g++ -std=c++17 -pthread -D__CUDACC__ -Iextras/cpu own.cc extras/cpu/runtime.cc
#ifndef CUDA_CPU
#define CUDA_CPU 1

#include "cuda/types.h"     // qualifiers, vector types, the variables of a thread
#include "cuda/errors.h"    // codes, and how a mistake is reported
#include "cuda/devices.h"   // how many there are, their properties, peers
#include "cuda/streams.h"   // streams, events, functions of the host
#include "cuda/graphs.h"    // what a stream is given, captured
#include "cuda/memory.h"    // allocations, copies, variables of a device
#include "cuda/blocks.h"    // __syncthreads(), shared memory
#include "cuda/warps.h"     // shuffles, votes, __syncwarp(), cooperative groups
#include "cuda/launches.h"  // kernel<<<grid, block>>>(arguments)
#include "cuda/atomics.h"   // atomicAdd, __threadfence(), ...
#include "cuda/functions.h" // rsqrtf, __expf, clock64, ...
#include "cuda/calls.h"     // each call knows its line
#include "cuda/lacking.h"   // what the stand-in lacks

#endif // CUDA_CPU
