// 8-bit floating point: e4m3 (finite values and NaN only, up to 448) and e5m2 (up to 57344, with infinity and NaN).
//
// Narrowing rounds to nearest, ties to even, and saturates: what is too large, infinity included, becomes the largest
// finite value of its sign. NaN stays NaN (0x7f). The software path gives the very bits of the hardware's.
#pragma once
#include "include/dtype.cuh"

namespace jitkern {

struct e4m3 {
  u8 bits;
  static constexpr u32 kMantissaBits = 3, kBiasShift = 120, kLargest = 0x7e;
  static constexpr float kSubnormalRound = 16384.0f;  // 2^14: its last mantissa bit is worth 2^-9, the smallest e4m3
};
struct e5m2 {
  u8 bits;
  static constexpr u32 kMantissaBits = 2, kBiasShift = 112, kLargest = 0x7b;
  static constexpr float kSubnormalRound = 128.0f;  // 2^7: its last mantissa bit is worth 2^-16, the smallest e5m2
};

template <class F>
JITKERN_DEVICE F narrow_float8_in_software(float x) {
  constexpr u32 shift = 23 - F::kMantissaBits;
  const u32 u = bits_of(x);
  const u32 magnitude = u & 0x7fffffffu;
  const u32 half = (1u << (shift - 1)) - 1;
  const u32 normal = (magnitude + half + ((magnitude >> shift) & 1u) - (F::kBiasShift << 23)) >> shift;
  const u32 subnormal = bits_of(float_of(magnitude) + F::kSubnormalRound) - bits_of(F::kSubnormalRound);
  const bool is_small = magnitude < (F::kBiasShift + 1) << 23;
  u32 r = is_small ? subnormal : normal;
  // Beyond the largest exponent the subtraction above is still monotonic, so a comparison saturates.
  r = !is_small && (r > F::kLargest || magnitude >= 0x7f800000u) ? F::kLargest : r;
  return F{static_cast<u8>(magnitude > 0x7f800000u ? 0x7fu : (r | (u >> 24 & 0x80u)))};
}

JITKERN_DEVICE float widen(e4m3 x) {
  const u32 magnitude = x.bits & 0x7fu;
  const float y = float_of(magnitude << 20) * float_of(0x7b800000u);  // times 2^120
  return float_of((magnitude == 0x7fu ? 0x7fc00000u : bits_of(y)) | static_cast<u32>(x.bits & 0x80u) << 24);
}
JITKERN_DEVICE float widen(e5m2 x) {
  const u32 magnitude = x.bits & 0x7fu;
  const float y = float_of(magnitude << 21) * float_of(0x77800000u);  // times 2^112
  const u32 special = magnitude << 21 | 0x7f800000u;
  return float_of((magnitude >= 0x7cu ? special : bits_of(y)) | static_cast<u32>(x.bits & 0x80u) << 24);
}
JITKERN_DEVICE void narrow(float x, e4m3& y) { y = narrow_float8_in_software<e4m3>(x); }
JITKERN_DEVICE void narrow(float x, e5m2& y) { y = narrow_float8_in_software<e5m2>(x); }

#if JITKERN_ON_GPU
// Two at a time, the first one in the low byte.
template <class F>
JITKERN_DEVICE void widen_float8_pair(u16 pair, float& first, float& second) {
  first = widen(F{static_cast<u8>(pair)});
  second = widen(F{static_cast<u8>(pair >> 8)});
}
#if __CUDA_ARCH__ >= 890
template <>
JITKERN_DEVICE void widen_float8_pair<e4m3>(u16 pair, float& first, float& second) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
  widen_pair<f16>(halves, first, second);
}
#endif
template <class F>
JITKERN_DEVICE u16 narrow_float8_pair(float first, float second) {
  return static_cast<u16>(narrow_float8_in_software<F>(first).bits | narrow_float8_in_software<F>(second).bits << 8);
}
#if __CUDA_ARCH__ >= 890
template <>
JITKERN_DEVICE u16 narrow_float8_pair<e4m3>(float first, float second) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
}
template <>
JITKERN_DEVICE u16 narrow_float8_pair<e5m2>(float first, float second) {
  u16 pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
}
#endif
#endif

}  // namespace jitkern
