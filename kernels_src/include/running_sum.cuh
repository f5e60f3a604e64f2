// The weighted sum of one row's partials while it is added up: a pack a thread on a GPU, the whole row on the
// CPU.
#pragma once
#include "include/partials.cuh"

namespace jitkern {

constexpr int kWidth = JITKERN_ON_GPU ? kPack : kD;  // elements that a thread adds up at a time

struct Running {  // O = sum / weight, with all weights relative to `top`, the highest L so far
  A sum[kWidth];
  A weight, top;
};

JITKERN_DEVICE void rescale(Running& r, A top, A out_to_e) {
  // Nothing yet: -inf minus a number is -inf, whose exponential is 0.
  const A factor = exp_nonpositive(mul(add(r.top, -top), out_to_e));
  r.weight = mul(r.weight, factor);
  for (int i = 0; i < kWidth; ++i) r.sum[i] = mul(r.sum[i], factor);
  r.top = top;
}

#if JITKERN_ON_GPU
using Slice = Pack<T, kPack>;  // of a partial's row, as it was loaded
JITKERN_DEVICE Slice load_slice(const T* row) { return load_pack<T, kPack>(row); }
JITKERN_DEVICE void store_slice(T* row, const Slice& slice) { store_pack<T, kPack>(row, slice); }
JITKERN_DEVICE void accumulate(Running& r, A weight, const Slice& slice) {
  A x[kPack];
  widen_pack(slice, x);
  JITKERN_UNROLL
  for (int i = 0; i < kPack; ++i) r.sum[i] = fma(weight, x[i], r.sum[i]);
}
JITKERN_DEVICE void store_sum(T* row, const Running& r) {
  A x[kPack];  // a copy: without it NVRTC 13.0 makes 2 % more instructions, with 8 registers fewer
  JITKERN_UNROLL
  for (int i = 0; i < kPack; ++i) x[i] = r.sum[i];
  store_slice(row, narrow_pack<T, kPack>(x));
}
#else
using Slice = const T*;  // the row itself
JITKERN_DEVICE Slice load_slice(const T* row) { return row; }
JITKERN_DEVICE void store_slice(T* row, Slice slice) { __builtin_memmove(row, slice, sizeof(T) * kD); }
JITKERN_DEVICE void accumulate(Running& r, A weight, Slice slice) {
  for (int i = 0; i < kD; ++i) r.sum[i] = fma(weight, widen(slice[i]), r.sum[i]);
}
JITKERN_DEVICE void store_sum(T* row, const Running& r) {
  for (int i = 0; i < kD; ++i) narrow(r.sum[i], row[i]);
}
#endif

}  // namespace jitkern
