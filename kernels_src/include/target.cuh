// Where this text is being compiled, in one place.
//
// Three compilers read the same kernel files: NVRTC and nvcc for a GPU, the host compiler for the CPU. On a GPU a
// kernel is an ordinary __global__ function. On the CPU it is the same function body, called once for every thread
// of every block, with the blocks shared out among a few operating-system threads: "the grid becomes a parallel
// loop". A CPU kernel therefore cannot use shared memory or barriers; kernels are launched there with one thread a
// block, and a body that says `lane = threadIdx.x` then simply does the whole row.
//
// No system header is needed for a GPU, which is what makes a variant compile in a tenth of a second.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define JITKERN_ON_GPU 1
#define JITKERN_DEVICE __device__ __forceinline__
#define JITKERN_DEVICE_METHOD __device__ __forceinline__
#define JITKERN_UNROLL _Pragma("unroll")
#else
#define JITKERN_ON_GPU 0
#define JITKERN_DEVICE static inline __attribute__((always_inline))
#define JITKERN_DEVICE_METHOD inline __attribute__((always_inline))
#define JITKERN_UNROLL
#endif

// The entry symbol: a plain C name, so that profilers show it and no name mangling is ever looked up.
#ifndef JITKERN_ENTRY
#define JITKERN_ENTRY jitkern_unnamed
#endif

namespace jitkern {
using i32 = int;
using i64 = long long;
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

template <bool First, class A, class B>
struct Choose {
  using type = A;
};
template <class A, class B>
struct Choose<false, A, B> {
  using type = B;
};
template <class A, class B>
struct SameType {
  static constexpr bool value = false;
};
template <class A>
struct SameType<A, A> {
  static constexpr bool value = true;
};
static_assert(sizeof(i64) == 8 && sizeof(u32) == 4 && sizeof(u16) == 2, "the fixed-width names must mean what they say");
}  // namespace jitkern

#if JITKERN_ON_GPU

// JITKERN_KERNEL(Params, threads) { body }: the one way an entry is declared. The parameter block is called `p`.
#define JITKERN_KERNEL(Params, threads) \
  extern "C" __global__ void __launch_bounds__(threads) JITKERN_ENTRY(const __grid_constant__ Params p)

namespace jitkern {
JITKERN_DEVICE void block_barrier() { __syncthreads(); }

// Until everything before this kernel in its stream has finished and can be read. Every thread of every kernel that is
// launched early calls it before it reads or writes anything; it costs nothing where a kernel was launched in order.
JITKERN_DEVICE void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
}  // namespace jitkern

#if defined(JITKERN_EXPORT_FUNCTION)  // nvcc builds a shared object: let its loader ask for the driver's handle
#define JITKERN_EXPORT(Params)                                                     \
  extern "C" __global__ void JITKERN_ENTRY(const __grid_constant__ Params p);       \
  extern "C" __attribute__((visibility("default"))) int jitkern_function(void** f) { \
    return static_cast<int>(cudaGetFuncBySymbol(reinterpret_cast<cudaFunction_t*>(f), (const void*)JITKERN_ENTRY)); \
  }
#else
#define JITKERN_EXPORT(Params)
#endif

#else  // host

#include "include/host_grid.h"

#define JITKERN_KERNEL(Params, threads)                                                                         \
  static inline void jitkern_body(const Params& p, jitkern::Index3 blockIdx, jitkern::Index3 threadIdx,         \
                                  jitkern::Index3 blockDim, jitkern::Index3 gridDim);                           \
  extern "C" __attribute__((visibility("default"))) int JITKERN_ENTRY(const void* params,                       \
                                                                      const jitkern::HostLaunch* launch) {      \
    return jitkern::run_grid<Params, jitkern_body>(*static_cast<const Params*>(params), *launch);               \
  }                                                                                                             \
  static inline __attribute__((always_inline)) void jitkern_body(                                               \
      const Params& p, [[maybe_unused]] jitkern::Index3 blockIdx, [[maybe_unused]] jitkern::Index3 threadIdx,   \
      [[maybe_unused]] jitkern::Index3 blockDim, [[maybe_unused]] jitkern::Index3 gridDim)

#define JITKERN_EXPORT(Params)

namespace jitkern {
JITKERN_DEVICE void block_barrier() {}
JITKERN_DEVICE void wait_for_predecessor() {}
}  // namespace jitkern

#endif
