// Arithmetic whose result is the same to the last bit on the CPU and on every GPU.
//
// Every operation is one IEEE 754 operation that is written out: multiply, add, fused multiply-add, reciprocal, all
// rounded to nearest, no contraction (the intrinsics forbid it on a GPU, -ffp-contract=off on the CPU) and no flush of
// denormals. exp and log1p are short polynomials over those operations instead of library calls, because libraries
// differ: then a result can be compared by value between machines, and a test on the CPU says something of the GPU.
#pragma once
#include "include/dtype.cuh"

namespace jitkern {

#if JITKERN_ON_GPU
JITKERN_DEVICE float mul(float a, float b) { return __fmul_rn(a, b); }
JITKERN_DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
JITKERN_DEVICE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
// 1 / x for 1 <= x < 2^126, rounded to nearest: one Newton step from the approximation, as the division's own fast path
// does it; without the slow path's branch and code. (A test compares every mantissa.)
JITKERN_DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return fma(y, fma(-x, y, 1.0f), y);
}
JITKERN_DEVICE double mul(double a, double b) { return __dmul_rn(a, b); }
JITKERN_DEVICE double add(double a, double b) { return __dadd_rn(a, b); }
JITKERN_DEVICE double fma(double a, double b, double c) { return __fma_rn(a, b, c); }
JITKERN_DEVICE double reciprocal(double x) { return __drcp_rn(x); }
JITKERN_DEVICE i32 round_to_int(float x) { return __float2int_rn(x); }
JITKERN_DEVICE double exp_nonpositive(double x) { return exp(x); }
JITKERN_DEVICE double log1p_unit(double x) { return log1p(x); }
#else
JITKERN_DEVICE float mul(float a, float b) { return a * b; }
JITKERN_DEVICE float add(float a, float b) { return a + b; }
JITKERN_DEVICE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
JITKERN_DEVICE float reciprocal(float x) { return 1.0f / x; }
JITKERN_DEVICE double mul(double a, double b) { return a * b; }
JITKERN_DEVICE double add(double a, double b) { return a + b; }
JITKERN_DEVICE double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
JITKERN_DEVICE double reciprocal(double x) { return 1.0 / x; }
// Adding 1.5 * 2^23 leaves the nearest integer in the low mantissa bits, for |x| < 2^22.
JITKERN_DEVICE i32 round_to_int(float x) { return static_cast<i32>(bits_of(x + 12582912.0f)) - 0x4b400000; }
JITKERN_DEVICE double exp_nonpositive(double x) { return __builtin_exp(x); }
JITKERN_DEVICE double log1p_unit(double x) { return __builtin_log1p(x); }
#endif

JITKERN_DEVICE bool is_infinite(float x) { return (bits_of(x) & 0x7fffffffu) == 0x7f800000u; }
JITKERN_DEVICE bool is_infinite(double x) {
  return (__builtin_bit_cast(u64, x) & 0x7fffffffffffffffull) == 0x7ff0000000000000ull;
}
template <class A>
JITKERN_DEVICE A largest_finite() {
  if constexpr (sizeof(A) == 8) return __builtin_bit_cast(A, 0x7fefffffffffffffull);
  else return __builtin_bit_cast(A, 0x7f7fffffu);
}
template <class A>
JITKERN_DEVICE A minus_infinity() {
  return static_cast<A>(float_of(0xff800000u));
}

// 2^k for -126 <= k <= 127.
JITKERN_DEVICE float exp2_of_int(i32 k) { return float_of(static_cast<u32>(k + 127) << 23); }

// exp(x) for x <= 0, within 1 ulp; 0 below -104; NaN stays NaN.
// x = k ln 2 + r with |r| <= ln(2) / 2, and exp(r) by a polynomial of degree 6 (minimax with the first two
// coefficients fixed at 1; relative error below 2^-28). The power
// of two is applied in two steps, so that a subnormal result is rounded once.
JITKERN_DEVICE float exp_nonpositive(float x) {
  const float clamped = x < -104.0f ? -104.0f : x;
  const i32 k = round_to_int(mul(clamped, 1.44269504f));
  const float kf = static_cast<float>(k);
  float r = fma(kf, -0.693145752f, clamped);   // ln 2, upper part: few enough bits that k times it is exact
  r = fma(kf, -1.42860677e-6f, r);             // ln 2, the rest
  float q = fma(r, 1.3814539e-3f, 8.368745e-3f);
  q = fma(q, r, 4.166839e-2f);
  q = fma(q, r, 1.6666521e-1f);
  q = fma(q, r, 4.9999994e-1f);
  q = fma(q, r, 1.0f);
  q = fma(q, r, 1.0f);
  const i32 half = k >> 1;
  const float y = mul(mul(q, exp2_of_int(half)), exp2_of_int(k - half));
  return x < -104.0f ? 0.0f : y;
}

// log(1 + x) for 0 <= x <= 1: 2 atanh(s) with s = x / (2 + x) <= 1/3, by its odd series; NaN stays NaN.
JITKERN_DEVICE float log1p_unit(float x) {
  const float s = mul(x, reciprocal(add(2.0f, x)));
  const float z = mul(s, s);
  float q = fma(z, 1.0f / 15, 1.0f / 13);
  q = fma(q, z, 1.0f / 11);
  q = fma(q, z, 1.0f / 9);
  q = fma(q, z, 1.0f / 7);
  q = fma(q, z, 1.0f / 5);
  q = fma(q, z, 1.0f / 3);
  const float twice = add(s, s);
  return fma(mul(twice, z), q, twice);
}

// log(x) for x >= 1: k ln 2 + log(1 + f) with x = 2^k (1 + f); NaN stays NaN.
JITKERN_DEVICE float log_from_one(float x) {
  const i32 k = static_cast<i32>(bits_of(x) >> 23) - 127;
  const float y = log1p_unit(add(mul(x, exp2_of_int(-k)), -1.0f));
  const float kf = static_cast<float>(k);
  return x == x ? fma(kf, 0.693145752f, fma(kf, 1.42860677e-6f, y)) : x;
}
#if JITKERN_ON_GPU
JITKERN_DEVICE double log_from_one(double x) { return log(x); }
#else
JITKERN_DEVICE double log_from_one(double x) { return __builtin_log(x); }
#endif

}  // namespace jitkern
