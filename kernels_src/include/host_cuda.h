// What a user's kernel finds on the CPU in place of CUDA's own words. Read by the host compiler only.
//
// A block's threads run one after the other, each to its end: there is nothing that a barrier could wait for, and no
// shared memory, shuffle or vote. Using one of them is an error at compile time that says so; text under
// `#if JITKERN_ON_GPU` is not looked at.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "include/target.cuh"

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define __shared__ jitkern_not_on_the_cpu__shared_memory
#define JITKERN_NOT_ON_THE_CPU(declaration, name) \
  __attribute__((error("jitkern_not_on_the_cpu__" name))) declaration
JITKERN_NOT_ON_THE_CPU(void __syncthreads(), "__syncthreads");
JITKERN_NOT_ON_THE_CPU(void __syncwarp(unsigned = ~0u), "__syncwarp");
JITKERN_NOT_ON_THE_CPU(int __syncthreads_or(int), "__syncthreads_or");
JITKERN_NOT_ON_THE_CPU(int __syncthreads_and(int), "__syncthreads_and");
JITKERN_NOT_ON_THE_CPU(int __syncthreads_count(int), "__syncthreads_count");
JITKERN_NOT_ON_THE_CPU(unsigned __ballot_sync(unsigned, int), "__ballot_sync");
JITKERN_NOT_ON_THE_CPU(int __any_sync(unsigned, int), "__any_sync");
JITKERN_NOT_ON_THE_CPU(int __all_sync(unsigned, int), "__all_sync");
template <class V>
JITKERN_NOT_ON_THE_CPU(V __shfl_sync(unsigned, V, int, int = 32), "__shfl_sync");
template <class V>
JITKERN_NOT_ON_THE_CPU(V __shfl_xor_sync(unsigned, V, int, int = 32), "__shfl_xor_sync");
template <class V>
JITKERN_NOT_ON_THE_CPU(V __shfl_down_sync(unsigned, V, unsigned, int = 32), "__shfl_down_sync");
template <class V>
JITKERN_NOT_ON_THE_CPU(V __shfl_up_sync(unsigned, V, unsigned, int = 32), "__shfl_up_sync");

#if JITKERN_HOST_INDICES  // a function other than the kernel asks which thread it is
static thread_local jitkern::Index3 threadIdx, blockIdx, blockDim, gridDim;
#endif

// ---- vectors ------------------------------------------------------------------------------------------------------
#define JITKERN_VECTORS(type, base)                                              \
  struct type##2 { base x, y; };                                                 \
  struct type##3 { base x, y, z; };                                              \
  struct type##4 { base x, y, z, w; };                                           \
  static inline type##2 make_##type##2(base x, base y) { return {x, y}; }         \
  static inline type##3 make_##type##3(base x, base y, base z) { return {x, y, z}; } \
  static inline type##4 make_##type##4(base x, base y, base z, base w) { return {x, y, z, w}; }
JITKERN_VECTORS(float, float)
JITKERN_VECTORS(double, double)
JITKERN_VECTORS(int, int)
JITKERN_VECTORS(uint, unsigned)

// ---- arithmetic ----------------------------------------------------------------------------------------------------
template <class A, class B>
static inline auto min(A a, B b) -> decltype(a + b) {
  return a < b ? a : b;
}
template <class A, class B>
static inline auto max(A a, B b) -> decltype(a + b) {
  return a < b ? b : a;
}
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
#define __expf expf  // as macros: the C library has functions of these names
#define __logf logf
#define __log2f log2f
#define __exp10f exp10f
#define __powf powf
#define __sinf sinf
#define __cosf cosf
#define __tanf tanf
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline float __saturatef(float x) { return x < 0.0f ? 0.0f : (x > 1.0f ? 1.0f : (x == x ? x : 0.0f)); }
static inline int __float2int_rn(float x) { return static_cast<int>(nearbyintf(x)); }
static inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
static inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
static inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
static inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }

// ---- memory --------------------------------------------------------------------------------------------------------
template <class V>
static inline V __ldg(const V* address) {
  return *address;
}
template <class V>
static inline V __ldcs(const V* address) {
  return *address;
}
template <class V>
static inline void __stcs(V* address, V value) {
  *address = value;
}
template <class V, class W>
static inline V atomicAdd(V* address, W value) {  // blocks run on several threads
  static_assert(sizeof(V) == 4 || sizeof(V) == 8, "atomicAdd takes 4 or 8 bytes");
  V before = *address, after;
  do {
    after = before + static_cast<V>(value);
  } while (!__atomic_compare_exchange(address, &before, &after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return before;
}
template <class V, class W>
static inline V atomicMax(V* address, W value) {
  V before = *address, after;
  do {
    after = before < static_cast<V>(value) ? static_cast<V>(value) : before;
  } while (!__atomic_compare_exchange(address, &before, &after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return before;
}
