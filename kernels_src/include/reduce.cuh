// Sums and maxima over the threads of a block, for kernels in which a block works on one row.
//
// On a GPU: shuffles within a warp, then 32 floats of shared memory between warps; every thread gets the result, and all
// threads of the block must take part. The order of the additions depends on blockDim.x only, so a row's result does not
// depend on the grid. On the CPU a block must have one thread (`cpu_block=1`), which has already seen the whole row.
#pragma once
#include "include/target.cuh"

namespace jitkern {

#if JITKERN_ON_GPU
struct Sum {
  static JITKERN_DEVICE float identity() { return 0.0f; }
  static JITKERN_DEVICE float join(float a, float b) { return a + b; }
};
struct Max {
  static JITKERN_DEVICE float identity() { return __int_as_float(0xff800000); }
  static JITKERN_DEVICE float join(float a, float b) { return a < b || b != b ? b : a; }  // NaN wins
};

template <class Op>
JITKERN_DEVICE float warp_reduce(float x) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x = Op::join(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

template <class Op>
JITKERN_DEVICE float block_reduce(float x) {
  __shared__ float partial[32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (blockDim.x + 31) >> 5;
  x = warp_reduce<Op>(x);
  __syncthreads();  // an earlier reduction's values have been read
  if (lane == 0) partial[warp] = x;
  __syncthreads();
  return warp_reduce<Op>(lane < warps ? partial[lane] : Op::identity());
}

JITKERN_DEVICE float block_sum(float x) { return block_reduce<Sum>(x); }
JITKERN_DEVICE float block_max(float x) { return block_reduce<Max>(x); }
#else
JITKERN_DEVICE float block_sum(float x) { return x; }
JITKERN_DEVICE float block_max(float x) { return x; }
#endif

}  // namespace jitkern
