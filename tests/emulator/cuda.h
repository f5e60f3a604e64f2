// CUDA's words, for the GPU branch of a kernel's text on the emulator. Stands in front of the text.
#pragma once
#include "ptx.h"

#define __CUDACC_RTC__ 1
#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define __shared__ static __attribute__((section("emulated_shared")))
#define threadIdx (emulator::current->index)
#define blockIdx emulator::block_index
#define blockDim emulator::block_size
#define gridDim emulator::grid_size

// ---- vectors ------------------------------------------------------------------------------------
#define EMULATED_VECTORS(type, base)                                      \
  struct alignas(2 * sizeof(base)) type##2 { base x, y; };                \
  struct alignas(16) type##4 { base x, y, z, w; };                        \
  static inline type##2 make_##type##2(base x, base y) { return {x, y}; } \
  static inline type##4 make_##type##4(base x, base y, base z, base w) { return {x, y, z, w}; }
EMULATED_VECTORS(float, float)
EMULATED_VECTORS(int, int)
EMULATED_VECTORS(uint, unsigned)
struct alignas(16) double2 {
  double x, y;
};

// ---- arithmetic ---------------------------------------------------------------------------------
extern "C" {
double exp(double) noexcept;
double log(double) noexcept;
double log1p(double) noexcept;
float expf(float) noexcept;
float exp2f(float) noexcept;
float logf(float) noexcept;
float sqrtf(float) noexcept;
float rintf(float) noexcept;
}
static inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
static inline float fminf(float a, float b) { return __builtin_fminf(a, b); }
static inline float fabsf(float x) { return __builtin_fabsf(x); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline double __drcp_rn(double x) { return 1.0 / x; }
static inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
static inline int __float2int_rn(float x) { return static_cast<int>(rintf(x)); }
static inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
static inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
static inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
static inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const emulator::u64 bytes = static_cast<emulator::u64>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i)
    result |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}

// ---- blocks and warps ---------------------------------------------------------------------------
static inline void __syncthreads() { emulator::meet_at_barrier(0, 0); }
static inline int __syncthreads_or(int x) { return emulator::block_vote(x != 0, false) != 0; }
static inline int __syncthreads_and(int x) { return emulator::block_vote(x != 0, true) != 0; }
static inline int __syncthreads_count(int x) { return static_cast<int>(emulator::block_vote(x != 0, false)); }
static inline void __syncwarp(unsigned mask = ~0u) { emulator::synchronise_lanes(mask); }
static inline unsigned __ballot_sync(unsigned mask, int x) {
  return emulator::reduce(emulator::Reduce::ballot, mask, x != 0);
}
static inline int __any_sync(unsigned mask, int x) { return __ballot_sync(mask, x) != 0; }
static inline int __all_sync(unsigned mask, int x) { return __ballot_sync(mask, !x) == 0; }
static inline unsigned __reduce_add_sync(unsigned mask, unsigned x) {
  return emulator::reduce(emulator::Reduce::add, mask, x);
}
static inline int __reduce_max_sync(unsigned mask, int x) {
  return static_cast<int>(emulator::reduce(emulator::Reduce::smax, mask, static_cast<unsigned>(x)));
}
static inline unsigned __reduce_max_sync(unsigned mask, unsigned x) {
  return emulator::reduce(emulator::Reduce::max, mask, x);
}
template <class V>
V emulated_shuffle(emulator::Shuffle kind, unsigned mask, V x, int selector, int width) {
  static_assert(sizeof(V) == 4 || sizeof(V) == 8, "a shuffle moves 4 or 8 bytes");
  emulator::ShuffleOperands operands{0, 0, static_cast<unsigned>(selector), static_cast<unsigned>(width)};
  __builtin_memcpy(&operands.value, &x, sizeof(V));
  emulator::shuffle(kind, mask, operands);
  __builtin_memcpy(&x, &operands.result, sizeof(V));
  return x;
}
#define EMULATED_SHUFFLE(name, kind)                                            \
  template <class V>                                                            \
  V name(unsigned mask, V x, int selector, int width = 32) {                    \
    return emulated_shuffle(emulator::Shuffle::kind, mask, x, selector, width); \
  }
EMULATED_SHUFFLE(__shfl_sync, from)
EMULATED_SHUFFLE(__shfl_xor_sync, across)
EMULATED_SHUFFLE(__shfl_up_sync, up)
EMULATED_SHUFFLE(__shfl_down_sync, down)

// ---- memory -------------------------------------------------------------------------------------
template <class V>
V __ldg(const V* address) {
  return *address;
}
template <class V>
V __ldcs(const V* address) {
  return *address;
}
template <class V>
void __stcs(V* address, V value) {
  *address = value;
}
#define EMULATED_ATOMIC __attribute__((noinline, no_sanitize("thread")))
static inline void __threadfence() {}
static inline void __threadfence_block() {}
template <class V, class W>
EMULATED_ATOMIC V atomicAdd(V* address, W value) {  // one operating-system thread
  emulator::give_way();
  const V before = *address;
  *address = before + static_cast<V>(value);
  return before;
}
template <class V, class W>
EMULATED_ATOMIC V atomicMax(V* address, W value) {
  emulator::give_way();
  const V before = *address;
  if (before < static_cast<V>(value)) *address = static_cast<V>(value);
  return before;
}
