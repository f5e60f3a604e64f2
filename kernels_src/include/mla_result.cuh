// What the consumers of the decode share, whatever their layout: small reductions, and storing results.
#pragma once
#include "include/mla_ring.cuh"

namespace jitkern {

// Over the four lanes that hold the columns of a row of a matrix fragment.
JITKERN_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
JITKERN_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Two adjacent elements of a result; `out_aligned` says whether that may be one access.
JITKERN_DEVICE void store_pair(const DecodeParams& p, T* to, float low, float high) {
  const u32 pair = narrow_pair<T>(low, high);
  if (p.out_aligned) {
    *reinterpret_cast<u32*>(to) = pair;
  } else {
    to[0].bits = static_cast<u16>(pair);
    to[1].bits = static_cast<u16>(pair >> 16);
  }
}

}  // namespace jitkern
