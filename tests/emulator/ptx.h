// PTX instructions, each a function of the same name: `bar.sync 1, %0;` of the text becomes `ptx::bar_sync(1,
// n)`. One that is not here does not compile, and is added here.
#pragma once
#include "runtime.h"

namespace ptx {

using namespace emulator;

template <class T, int N>
struct Registers {
  T* at[N];
};
template <class T, class... More>
Registers<T, 1 + sizeof...(More)> registers(T& first, More&... more) {
  return {{&first, &more...}};
}

// ---- the launch ---------------------------------------------------------------------------------
inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}
inline void setmaxnreg_inc_sync_aligned_u32(u32) {}
inline void setmaxnreg_dec_sync_aligned_u32(u32) {}
inline void trap() { fail("trap"); }

// ---- arithmetic ---------------------------------------------------------------------------------
inline float flush(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x; }
inline void ex2_approx_ftz_f32(float& y, float x) { y = flush(__builtin_exp2f(flush(x))); }
inline void lg2_approx_f32(float& y, float x) { y = __builtin_log2f(x); }
inline void rcp_approx_ftz_f32(float& y, float x) { y = flush(1.0f / flush(x)); }
inline void selp_u32(u32& y, u32 a, u32 b, bool first) { y = first ? a : b; }
inline void setp_ne_b32(bool& p, u32 a, u32 b) { p = a != b; }

inline u32 narrow_two(float high, float low, Element element, int bits) {
  return narrow(high, element) << bits | narrow(low, element);
}
inline void cvt_f32_f16(float& y, u16 x) { y = widen(x, Element::f16); }
inline void cvt_rn_f16_f32(u16& y, float x) { y = static_cast<u16>(narrow(x, Element::f16)); }
inline void cvt_rn_bf16_f32(u16& y, float x) { y = static_cast<u16>(narrow(x, Element::bf16)); }
inline void cvt_rn_bf16x2_f32(u32& y, float high, float low) { y = narrow_two(high, low, Element::bf16, 16); }
inline void cvt_rn_f16x2_f32(u32& y, float high, float low) { y = narrow_two(high, low, Element::f16, 16); }
inline void cvt_rn_satfinite_e4m3x2_f32(u16& y, float high, float low) {
  y = static_cast<u16>(narrow_two(high, low, Element::e4m3, 8));
}
inline void cvt_rn_satfinite_e5m2x2_f32(u16& y, float high, float low) {
  y = static_cast<u16>(narrow_two(high, low, Element::e5m2, 8));
}
inline void cvt_rn_f16x2_e4m3x2(u32& y, u16 x) {
  y = narrow_two(widen(x >> 8, Element::e4m3), widen(x & 0xff, Element::e4m3), Element::f16, 16);
}
inline void cvt_rn_f16x2_e5m2x2(u32& y, u16 x) {
  y = narrow_two(widen(x >> 8, Element::e5m2), widen(x & 0xff, Element::e5m2), Element::f16, 16);
}

// ---- shared memory and barriers -----------------------------------------------------------------
inline void cvta_to_shared_u64(u64& address, const void* pointer) { address = to_shared(pointer); }
template <class V>
void store_shared(u32 address, V value) {
  *reinterpret_cast<V*>(at_shared(address, sizeof(V))) = value;
  give_way();
}
inline void st_shared_u16(u32 address, u16 value) { store_shared(address, value); }
inline void st_shared_u32(u32 address, u32 value) { store_shared(address, value); }
inline void st_shared_v4_u32(u32 address, Registers<const u32, 4> v) {
  u8* to = at_shared(address, 16);
  for (int i = 0; i < 4; ++i) __builtin_memcpy(to + 4 * i, v.at[i], 4);
  give_way();
}
inline void st_shared_v4_u32(u32 address, Registers<u32, 4> v) {
  st_shared_v4_u32(address, Registers<const u32, 4>{{v.at[0], v.at[1], v.at[2], v.at[3]}});
}
inline void st_shared_v4_b32(u32 address, Registers<u32, 4> v) { st_shared_v4_u32(address, v); }
inline void ld_shared_u32(u32& value, u32 address) {
  give_way();
  value = *reinterpret_cast<u32*>(at_shared(address, 4));
}
inline void ld_shared_v4_u32(Registers<u32, 4> v, u32 address) {
  give_way();
  for (int i = 0; i < 4; ++i) __builtin_memcpy(v.at[i], at_shared(address, 16) + 4 * i, 4);
}
inline void ld_shared_v4_b32(Registers<u32, 4> v, u32 address) { ld_shared_v4_u32(v, address); }

inline void bar_sync(u32 id) { meet_at_barrier(id, 0); }
inline void bar_sync(u32 id, u32 threads) { meet_at_barrier(id, threads); }
inline void fence_proxy_async_shared__cta() { fence_proxy(); }
inline void mbarrier_init_shared_b64(u32 barrier, u32 arrivals) { barrier_init(barrier, arrivals); }
inline void mbarrier_arrive_shared_b64(u64&, u32 barrier) { barrier_arrive(barrier); }
inline void mbarrier_test_wait_parity_shared_b64(bool& done, u32 barrier, u32 parity) {
  done = barrier_probe(barrier, parity);
}
inline void mbarrier_try_wait_parity_shared_b64(bool& done, u32 barrier, u32 parity) {
  done = barrier_test(barrier, parity);
}
inline void cp_async_cg_shared_global(u32 to, const void* from, u32 size, u32 bytes) {
  copy_async(to, from, size, bytes);
}
inline void cp_async_ca_shared_global(u32 to, const void* from, u32 size, u32 bytes) {
  copy_async(to, from, size, bytes);
}
inline void cp_async_mbarrier_arrive_noinc_shared_b64(u32 barrier) { arrive_after_copies(barrier, true); }
inline void cp_async_mbarrier_arrive_shared_b64(u32 barrier) { arrive_after_copies(barrier, false); }
inline void cp_async_wait_all() { finish_copies(); }
inline void cp_async_commit_group() { commit_copies(); }
inline void cp_async_wait_group(u32 pending) { wait_for_copies(pending); }

// ---- matrices -----------------------------------------------------------------------------------
template <int N>
void load_fragments(Registers<u32, N> r, u32 address, u32 transposed) {
  u32 words[N];
  Fragments operands{words, N, address, transposed};
  load_matrices(operands);
  for (int i = 0; i < N; ++i) *r.at[i] = words[i];
}
inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(Registers<u32, 4> r, u32 row) {
  load_fragments(r, row, 0);
}
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(Registers<u32, 4> r, u32 row) {
  load_fragments(r, row, 1);
}
inline void ldmatrix_sync_aligned_m8n8_x2_shared_b16(Registers<u32, 2> r, u32 row) {
  load_fragments(r, row, 0);
}

template <class A, class B>
void multiply_as(Registers<float, 4> d, Registers<A, 4> a, Registers<B, 2> b, Element element) {
  MultiplyOperands operands{{d.at[0], d.at[1], d.at[2], d.at[3]}, {}, {*b.at[0], *b.at[1]}, element, element};
  for (int i = 0; i < 4; ++i) operands.a[i] = *a.at[i];
  multiply(operands);
}
#define EMULATED_MULTIPLY(shape, type, element)                                                      \
  template <class A, class B>                                                                        \
  void mma_sync_aligned_##shape##_row_col_f32_##type##_##type##_f32(Registers<float, 4> d, A a, B b, \
                                                                    Registers<float, 4> c) {         \
    if (d.at[0] != c.at[0]) fail("mma: only c += a b is emulated");                                  \
    multiply_as(d, a, b, Element::element);                                                          \
  }
EMULATED_MULTIPLY(m16n8k16, bf16, bf16)
EMULATED_MULTIPLY(m16n8k16, f16, f16)
EMULATED_MULTIPLY(m16n8k32, e4m3, e4m3)

inline void wgmma_fence_sync_aligned() { warpgroup_fence(); }
inline void wgmma_commit_group_sync_aligned() { warpgroup_commit(); }
inline void wgmma_wait_group_sync_aligned(u32 pending) { warpgroup_wait(pending); }

template <int N>
void warpgroup_multiply_as(const Registers<float, N / 2>& d, u64 a, u64 b, bool accumulate, int sign_a,
                           int sign_b, bool across_a, bool across_b, Element element) {
  for (int i = 0; i < N / 2; ++i)
    if (d.at[i] != d.at[0] + i) fail("wgmma: its accumulators have to be one array");
  if (sign_a != 1 || sign_b != 1) fail("wgmma: negated operands are not emulated");
  WarpgroupOperands operands{d.at[0], N, a, b, accumulate, across_a, across_b, element, element};
  warpgroup_multiply(operands);
}
#define EMULATED_WARPGROUP_16(n, type)                                                        \
  inline void wgmma_mma_async_sync_aligned_m64n##n##k16_f32_##type##_##type(                  \
      Registers<float, n / 2> d, u64 a, u64 b, bool p, int sign_a, int sign_b, bool across_a, \
      bool across_b) {                                                                        \
    warpgroup_multiply_as<n>(d, a, b, p, sign_a, sign_b, across_a, across_b, Element::type);  \
  }
#define EMULATED_WARPGROUP_8(n)                                                        \
  inline void wgmma_mma_async_sync_aligned_m64n##n##k32_f32_e4m3_e4m3(                 \
      Registers<float, n / 2> d, u64 a, u64 b, bool p, int sign_a, int sign_b) {       \
    warpgroup_multiply_as<n>(d, a, b, p, sign_a, sign_b, false, false, Element::e4m3); \
  }
#define EMULATED_WARPGROUP(n) \
  EMULATED_WARPGROUP_16(n, bf16) EMULATED_WARPGROUP_16(n, f16) EMULATED_WARPGROUP_8(n)
EMULATED_WARPGROUP(8)
EMULATED_WARPGROUP(16)
EMULATED_WARPGROUP(32)
EMULATED_WARPGROUP(64)
EMULATED_WARPGROUP(128)
EMULATED_WARPGROUP(256)

}  // namespace ptx
