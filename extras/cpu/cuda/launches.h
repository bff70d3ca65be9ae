// Launches: a kernel with its arguments, for the blocks of a grid.
#pragma once

#include "blocks.h"
#include "streams.h"

#include <initializer_list>

namespace cuda_cpu {

constexpr unsigned most_threads_x = INT_MAX - 1024; // of a grid

// The configuration of a launch: what stands between <<< and >>>, and where.
struct Launch {
    const char *name;
    Where where;
    dim3 grid, block;
    size_t shared;
    Stream *stream;
    Launch(const char *name, const char *file, int line, dim3 grid, dim3 block, size_t shared = 0,
           Stream *stream = nullptr, void *pc = here())
        : name(name), where{file, line, pc}, grid(grid), block(block), shared(shared),
          stream(stream) {}
    template <class S, class = std::enable_if_t<std::is_class<S>::value &&
                                                !std::is_convertible<const S &, Stream *>::value>>
    Launch(const char *, const char *, int, dim3, dim3, size_t, const S &) {
        static_assert(!std::is_class<S>::value,
                      "the fourth argument of a launch must be a cudaStream_t, not what has one: "
                      "stream_of(device), or the handle of a Stream");
    }
};

// Run the thread that threadIdx names; or, with `rest`, all of the block but thread 0, one after
// another: a kernel without barriers. One function for both, since kernels that are inlined are
// compiled for each. If a kernel calls nothing that is not inlined, no other code can see `me`.
// Then the compiler keeps it in registers, and turns the loop over x into vector instructions. For
// that it must also know that blockIdx.x * blockDim.x + threadIdx.x is an int: see check_launch().
template <class K>
CUDA_CPU_OPTIMIZED __attribute__((flatten)) void run_threads(const void *bytes, bool rest) {
#ifdef CUDA_CPU_TSAN // which would take the loop's thread-local variables for shared ones
    (void)rest;
    (*(const K *)bytes)();
#else
    // A copy that nothing else points to, unless its arguments would fill much of the stack
    std::conditional_t<(sizeof(K) > 4096), const K &, const K> kernel = *(const K *)bytes;
    Thread *const before = thread;
    const unsigned X = blockDim.x, Y = blockDim.y, Z = blockDim.z;
    const uint3 begin = rest ? uint3{1, 0, 0} : before->index;
    const uint3 end = rest ? uint3{X, Y, Z} : uint3{begin.x + 1, begin.y + 1, begin.z + 1};
    if (end.x > 1024 || blockIdx.x * X > most_threads_x) __builtin_unreachable();
    Thread me = {{0, 0, 0}, 0, false};
    thread = &me;
    unsigned x = begin.x;
    for (unsigned z = begin.z; z < end.z; z++)
        for (unsigned y = begin.y; y < end.y; y++, x = 0)
            for (; x < end.x; x++) {
                me.index = {x, y, z};
                me.number = x + X * (y + Y * z);
                kernel();
                if (me.stop) {
                    thread = before;
                    return;
                }
            }
    thread = before;
#endif
}

// An argument of a kernel. A pointer must point to memory of the device, or to pinned memory, which
// a GPU reads too. In a struct, words that are addresses of memory that is or was allocated on a
// device are taken for pointers; no others, because two numbers in a word, or what padding holds by
// chance, may look like one.
struct Argument {
    void *p;
    size_t bytes;
    bool is_pointer, is_struct;
};

struct Kernel;
// Return the kernel if it can be launched with these arguments, else null. Their pointers change.
Kernel *accept(const Launch &launch, std::initializer_list<Argument> arguments);
// Enqueue the kernel that accept() has returned: run_threads<K>, which calls the K of these bytes.
void enqueue(Kernel *accepted, const void *call, size_t bytes,
             void (*run)(const void *bytes, bool rest));

// The types of a kernel's parameters, where it has them before it is called: it is no template, or
// all template arguments are given. What is passed then becomes of these types, as in any call: 0,
// NULL, {1, 2}. The first argument delays the choice.
template <class... P> struct Parameters {};
template <class... P> Parameters<P...> parameters(void *, void (*)(P...));

// A number that is passed where a template has a pointer for a parameter: NULL
struct Null {
    long long value;
    template <class T> operator T() const { return (T)value; }
};
template <class T> std::conditional_t<std::is_integral<T>::value, Null, T> or_null(T x) {
    return {x};
}

template <class F> struct Configured {
    const Launch &launch;
    F f;
    Configured(const Launch &launch, F f) : launch(launch), f(f) {}
    template <class... A> static constexpr bool takes = std::is_invocable<const F &, A...>::value;
    template <class... A> void operator()(A... args) const {
        if constexpr (takes<A &...>) run(args...);
        else run(or_null(args)...);
    }
    template <class... A> void run(A... args) const {
        static_assert(!(std::is_function<std::remove_pointer_t<A>>::value || ...),
                      "a function pointer as a kernel's argument: the stand-in lacks it, but takes "
                      "a struct with an operator()");
        static_assert(!(std::is_reference<A>::value || ...), CUDA_CPU_REFERENCE_TEXT);
        Kernel *kernel = accept(launch, {{(void *)&args, sizeof args, std::is_pointer<A>::value,
                                          std::is_class<A>::value}...});
        if (!kernel) return;
        auto call = [f = f, args...]() CUDA_CPU_CALLER { f(args...); };
        using K = decltype(call);
        static_assert(std::is_trivially_copy_constructible<K>::value &&
                          std::is_trivially_destructible<K>::value && alignof(K) <= 16,
                      "a kernel's arguments must be copyable as bytes");
        enqueue(kernel, &call, sizeof call, run_threads<K>);
    }
};
// Of a kernel whose parameters are known: a call for the first of them if the others have defaults,
// and one for each more
template <class Base, class First, class... Rest> struct ConfiguredFor;
template <class Base, class... P> struct ConfiguredFor<Base, Parameters<P...>> : Base {
    using Base::Base;
    void operator()(P... args) const { this->template run<P...>(args...); }
};
template <class Base, class... P, class Next, class... Rest>
struct ConfiguredFor<Base, Parameters<P...>, Next, Rest...>
    : ConfiguredFor<Base, Parameters<P..., Next>, Rest...> {
    using More = ConfiguredFor<Base, Parameters<P..., Next>, Rest...>;
    using More::More;
    using More::operator();
    template <class B = Base>
    std::enable_if_t<B::template takes<P &...>> operator()(P... args) const {
        this->template run<P...>(args...);
    }
};
template <class F, class... P>
ConfiguredFor<Configured<F>, Parameters<>, P...> configured_for(const Launch &launch, F f,
                                                                Parameters<P...>) {
    return {launch, f};
}
template <class F, class Ask> auto configured(const Launch &launch, F f, Ask ask) {
    if constexpr (std::is_invocable<Ask, void *>::value)
        return configured_for(launch, f, decltype(ask((void *)0))());
    else return Configured<F>(launch, f);
}

} // namespace cuda_cpu

// A block may have more dynamic shared memory than 48 KiB if this has said so for its kernel.
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9
};
namespace cuda_cpu {
// Let a kernel have `bytes` of dynamic shared memory on the current device; "" is any kernel.
cudaError_t allow_shared(const char *kernel, int bytes, Where where);
template <class F>
cudaError_t set_attribute(const char *call, F &&, cudaFuncAttribute attribute, int value,
                          CUDA_CPU_WHERE) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    const bool named = std::is_function<std::remove_reference_t<F>>::value;
    return allow_shared(named ? call : "", value, where);
}
// Tell how many such blocks a core runs at once, and how large blocks may be.
cudaError_t active_blocks(int *blocks, int threads, size_t shared, Where where);
cudaError_t potential_block_size(int *blocks, int *threads, int most, Where where);
} // namespace cuda_cpu
#define cudaFuncSetAttribute(...) ::cuda_cpu::set_attribute(#__VA_ARGS__, __VA_ARGS__)
// A cache that no emulated device has
enum cudaFuncCache {
    cudaFuncCachePreferNone,
    cudaFuncCachePreferShared,
    cudaFuncCachePreferL1,
    cudaFuncCachePreferEqual
};
template <class F> cudaError_t cudaFuncSetCacheConfig(F &&, cudaFuncCache) { return cudaSuccess; }
inline cudaError_t cudaDeviceSetCacheConfig(cudaFuncCache) { return cudaSuccess; }

template <class F>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, F &&, int threads,
                                                          size_t shared, CUDA_CPU_WHERE) {
    return cuda_cpu::active_blocks(blocks, threads, shared, where);
}
template <class F>
cudaError_t cudaOccupancyMaxPotentialBlockSize(int *blocks, int *threads, F &&, size_t = 0,
                                               int most = 0, CUDA_CPU_WHERE) {
    return cuda_cpu::potential_block_size(blocks, threads, most, where);
}
