// Element types and their conversions to and from float, with the same rounding and the same bits everywhere.
//
// f16 and bf16 are kept as plain 16-bit words: no CUDA header is included, so nothing has to be found or versioned.
// Narrowing rounds to nearest, ties to even; a NaN becomes the quiet NaN 0x7fff, as the GPU's own instructions do.
#pragma once
#include "include/target.cuh"

namespace jitkern {

struct f16 {
  u16 bits;
};
struct bf16 {
  u16 bits;
};
using f32 = float;
using f64 = double;

template <class T>
struct Accumulator {  // what arithmetic on T is done in
  using type = float;
};
template <>
struct Accumulator<f64> {
  using type = double;
};

JITKERN_DEVICE u32 bits_of(float x) { return __builtin_bit_cast(u32, x); }
JITKERN_DEVICE float float_of(u32 x) { return __builtin_bit_cast(float, x); }

JITKERN_DEVICE float widen(f32 x) { return x; }
JITKERN_DEVICE double widen(f64 x) { return x; }
JITKERN_DEVICE float widen(bf16 x) { return float_of(static_cast<u32>(x.bits) << 16); }

JITKERN_DEVICE bf16 narrow_bf16_in_software(float x) {
  const u32 u = bits_of(x);
  const u32 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
  return bf16{static_cast<u16>(nan ? 0x7fffu : rounded)};
}

#if JITKERN_ON_GPU

JITKERN_DEVICE float widen(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
JITKERN_DEVICE void narrow(float x, f16& y) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }
JITKERN_DEVICE void narrow(float x, bf16& y) {
#if __CUDA_ARCH__ >= 900
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#elif __CUDA_ARCH__ >= 800
  u32 pair;  // sm_80 converts two at a time only
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.0f), "f"(x));
  y.bits = static_cast<u16>(pair);
#else
  y = narrow_bf16_in_software(x);
#endif
}

// Two 16-bit elements in a word, the first one in the low half: converted together where the hardware can.
template <class T>
JITKERN_DEVICE void widen_pair(u32 word, float& first, float& second) {
  first = widen(T{static_cast<u16>(word)});
  second = widen(T{static_cast<u16>(word >> 16)});
}
template <>
JITKERN_DEVICE void widen_pair<bf16>(u32 word, float& first, float& second) {
  first = float_of(word << 16);
  second = float_of(word & 0xffff0000u);
}
template <class T>
JITKERN_DEVICE u32 narrow_pair(float first, float second) {
  T low, high;
  narrow(first, low);
  narrow(second, high);
  return static_cast<u32>(low.bits) | static_cast<u32>(high.bits) << 16;
}
#if __CUDA_ARCH__ >= 800
template <>
JITKERN_DEVICE u32 narrow_pair<bf16>(float first, float second) {
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}
template <>
JITKERN_DEVICE u32 narrow_pair<f16>(float first, float second) {
  u32 word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}
#endif

#else

// Exact in both directions; the compiler turns the loops that call these into vector code.
JITKERN_DEVICE float widen(f16 x) {
  const u32 sign = static_cast<u32>(x.bits & 0x8000u) << 16;
  const u32 magnitude = x.bits & 0x7fffu;
  // Multiplying by 2^112 moves the exponent bias from 15 to 127 and gives subnormals their true value.
  const float scaled = float_of(magnitude << 13) * float_of(0x77800000u);
  const u32 special = (magnitude << 13) | 0x7f800000u;  // infinity and NaN keep their mantissa
  return float_of((magnitude >= 0x7c00u ? special : bits_of(scaled)) | sign);
}
JITKERN_DEVICE void narrow(float x, f16& y) {
  const u32 u = bits_of(x);
  const u32 sign = (u >> 16) & 0x8000u;
  const u32 magnitude = u & 0x7fffffffu;
  const u32 normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  // Below 2^-14 the result is a subnormal: adding 0.5 puts its last bit at the bottom of the mantissa, rounded.
  const u32 subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  u32 r = magnitude < 0x38800000u ? subnormal : normal;
  r = magnitude >= 0x477ff000u ? 0x7c00u : r;  // 65520 and above round to infinity
  r = magnitude > 0x7f800000u ? 0x7fffu : r;
  y.bits = static_cast<u16>(magnitude > 0x7f800000u ? r : (r | sign));
}
JITKERN_DEVICE void narrow(float x, bf16& y) { y = narrow_bf16_in_software(x); }

#endif

JITKERN_DEVICE void narrow(float x, f32& y) { y = x; }
JITKERN_DEVICE void narrow(double x, f64& y) { y = x; }

}  // namespace jitkern

// The element type of a variant.
#ifndef JITKERN_T
#define JITKERN_T jitkern::f32
#endif
