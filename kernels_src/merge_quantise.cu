// merge_quantise: merge two partial attention outputs into 8-bit floating point with a scale for each group of a token's
// elements: for a whole token, or for every 64, 128, ... adjacent ones of [heads x D].
//
//   scale = max(largest |O| of the group, 1e-10) / largest number of the 8-bit type      out = O / scale
//
// With UE8M0 the scale is rounded up to a power of two. The merge itself: include/merge.cuh. Tokens from `merged_tokens`
// on are copies of side b, quantised likewise. NaN stays NaN and does not count for the scale.
//
// Launch: one block a token, grid (tokens, further tokens). Two passes over the token: the first finds each group's
// largest element, in shared memory; the second merges once more, from the cache, and writes. Dynamic shared memory: 4
// bytes a group. On the CPU one thread does a token.
// Bytes moved: tokens * heads * (D (2 sizeof(T) + 1) + 12) + 4 tokens * groups.
//
// Holes (-D): JITKERN_ENTRY, JITKERN_T (inputs), JITKERN_PACK, JITKERN_D, JITKERN_OUT (jitkern::e4m3 or e5m2),
// JITKERN_STRIDE.
#include "include/merge.cuh"
#include "include/pack.cuh"

#ifndef JITKERN_D
#define JITKERN_D 128
#endif
#ifndef JITKERN_OUT
#define JITKERN_OUT jitkern::e4m3
#endif
#ifndef JITKERN_STRIDE
#define JITKERN_STRIDE 32
#endif

namespace jitkern {

using T = JITKERN_T;
using Out = JITKERN_OUT;
using Stride = Choose<JITKERN_STRIDE == 32, u32, u64>::type;

constexpr int kD = JITKERN_D;
constexpr int kPack = JITKERN_PACK;
constexpr int kThreads = 256;
static_assert(kD > 0 && kD % kPack == 0, "the head size must be a positive multiple of the pack");
static_assert(sizeof(Out) == 1, "the output is 8 bits wide");
constexpr float kLargest = SameType<Out, e4m3>::value ? 448.0f : 57344.0f;

struct QuantiseParams {
  Out* out;
  float* out_lse;  // may be null
  const T* a;
  const float* a_lse;
  const T* b;
  const float* b_lse;
  float* scale;
  i64 merged_tokens;
  Row2 out_stride, a_stride, b_stride;
  Row2 out_lse_stride, a_lse_stride, b_lse_stride;
  Row2 scale_stride;  // of token and group
  u32 tokens, heads;
  u32 group;   // elements of a group; a multiple of the pack that divides heads * D
  u32 groups;  // of a token
  float a_to_out, b_to_out, out_to_e, e_to_out;
  i32 power_of_two;
};

struct Row {
  Outcome outcome;
  Merge<float> factors;
  const T* a;
  const T* b;
  Out* out;
};

JITKERN_DEVICE float lse_a(const QuantiseParams& p, u32 t, u32 h) {
  return mul(p.a_lse[offset<Stride>(p.a_lse_stride, t, h)], p.a_to_out);
}
JITKERN_DEVICE float lse_b(const QuantiseParams& p, u32 t, u32 h) {
  return mul(p.b_lse[offset<Stride>(p.b_lse_stride, t, h)], p.b_to_out);
}
JITKERN_DEVICE Outcome outcome_of_row(const QuantiseParams& p, u32 t, float a, float b) {
  return static_cast<i64>(t) < p.merged_tokens ? outcome_of(a, b) : Outcome::copy_b;
}

JITKERN_DEVICE Row row_of(const QuantiseParams& p, u32 t, u32 h) {
  const float a = lse_a(p, t, h), b = lse_b(p, t, h);
  const auto w = weigh(a, b, p.out_to_e);
  return {outcome_of_row(p, t, a, b), {w.a, w.b}, p.a + offset<Stride>(p.a_stride, t, h),
          p.b + offset<Stride>(p.b_stride, t, h), p.out + offset<Stride>(p.out_stride, t, h)};
}

JITKERN_DEVICE float merged(const Row& row, float a, float b) {
  if (row.outcome == Outcome::copy_a) return a;
  if (row.outcome == Outcome::copy_b) return b;
  return row.outcome == Outcome::empty ? 0.0f : row.factors(a, b);
}

// |x|, where NaN counts for nothing and infinity for the largest float.
JITKERN_DEVICE float size_of(float x) {
  const u32 magnitude = bits_of(x) & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0.0f;
  return float_of(magnitude < 0x7f7fffffu ? magnitude : 0x7f7fffffu);
}

JITKERN_DEVICE float scale_of(float largest, bool power_of_two) {
  const float scale = (largest > 1e-10f ? largest : 1e-10f) / kLargest;
  if (!power_of_two) return scale;
  // Up to the next power of two: any mantissa bit carries into the exponent.
  return float_of((bits_of(scale) + 0x7fffffu) & 0x7f800000u);
}

JITKERN_DEVICE void write_lse(const QuantiseParams& p, u32 t, u32 h) {
  const float a = lse_a(p, t, h), b = lse_b(p, t, h);
  p.out_lse[offset<Stride>(p.out_lse_stride, t, h)] =
      lse_of(outcome_of_row(p, t, a, b), weigh(a, b, p.out_to_e), a, b, p.e_to_out);
}

#if JITKERN_ON_GPU
template <class From>
JITKERN_DEVICE void merged_pack(const Row& row, int at, float (&x)[kPack]) {
  float y[kPack];
  widen_pack(load_pack<From, kPack>(row.a + at), x);
  widen_pack(load_pack<From, kPack>(row.b + at), y);
  JITKERN_UNROLL
  for (int i = 0; i < kPack; ++i) x[i] = merged(row, x[i], y[i]);
}
#endif

}  // namespace jitkern

JITKERN_EXPORT(jitkern::QuantiseParams)

JITKERN_KERNEL(jitkern::QuantiseParams, jitkern::kThreads) {
  using namespace jitkern;
  const u32 t = blockIdx.y * gridDim.x + blockIdx.x;
  if (t >= p.tokens) return;
#if JITKERN_ON_GPU
  extern __shared__ u32 largest[];  // bits of a float that is not negative: they compare as integers
  constexpr u32 packs = kD / kPack;
  wait_for_predecessor();
  for (u32 g = threadIdx.x; g < p.groups; g += kThreads) largest[g] = 0;
  block_barrier();
  for (u32 i = threadIdx.x; i < p.heads * packs; i += kThreads) {
    float x[kPack], most = 0;
    merged_pack<T>(row_of(p, t, i / packs), static_cast<int>(i % packs) * kPack, x);
    for (int j = 0; j < kPack; ++j) most = fmaxf(most, size_of(x[j]));
    atomicMax(&largest[i * kPack / p.group], bits_of(most));
  }
  block_barrier();
  for (u32 i = threadIdx.x; i < p.heads * packs; i += kThreads) {
    const Row row = row_of(p, t, i / packs);
    const int at = static_cast<int>(i % packs) * kPack;
    const float quantise = 1.0f / scale_of(float_of(largest[i * kPack / p.group]), p.power_of_two);
    float x[kPack];
    merged_pack<T>(row, at, x);
    for (int j = 0; j < kPack; ++j) x[j] = mul(x[j], quantise);
    store_pack<Out, kPack>(row.out + at, narrow_pack<Out, kPack>(x));
  }
  for (u32 g = threadIdx.x; g < p.groups; g += kThreads) {
    p.scale[offset<Stride>(p.scale_stride, t, g)] = scale_of(float_of(largest[g]), p.power_of_two);
  }
  block_barrier();  // L may be overwritten only when the whole token has read it
  for (u32 h = threadIdx.x; p.out_lse && h < p.heads; h += kThreads) write_lse(p, t, h);
#else
  for (u32 g = 0; g < p.groups; ++g) {
    const u32 begin = g * p.group, end = begin + p.group;
    float most = 0, scale = 0;
    for (int pass = 0; pass < 2; ++pass) {
      for (u32 i = begin; i < end;) {  // head by head, since a group may be a part of one or several
        const Row row = row_of(p, t, i / kD);
        const u32 stop = (i / kD + 1) * kD < end ? (i / kD + 1) * kD : end;
        for (; i < stop; ++i) {
          const float x = merged(row, widen(row.a[i % kD]), widen(row.b[i % kD]));
          if (pass == 0) {
            const float size = size_of(x);
            most = size > most ? size : most;
          } else {
            narrow(mul(x, scale), row.out[i % kD]);
          }
        }
      }
      if (pass == 0) {
        p.scale[offset<Stride>(p.scale_stride, t, g)] = scale_of(most, p.power_of_two);
        scale = 1.0f / scale_of(most, p.power_of_two);
      }
    }
  }
  for (u32 h = 0; p.out_lse && h < p.heads; ++h) write_lse(p, t, h);
#endif
}
