// Sums and prefix sums over the threads of one block.
//
// On the CPU a block has one thread, so each of these is the identity: a kernel written with them, and with
// loops of the form `for (i = thread; i < n; i += kThreads)`, is the same algorithm on both.
#pragma once
#include "include/target.cuh"

namespace jitkern {

#if JITKERN_ON_GPU
#define JITKERN_SHARED __shared__
constexpr int kWarp = 32;

template <class A>
JITKERN_DEVICE A warp_sum(A x) {
  for (int d = kWarp / 2; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}
template <class A>
JITKERN_DEVICE A warp_max(A x) {
  for (int d = kWarp / 2; d > 0; d /= 2) {
    const A y = __shfl_xor_sync(~0u, x, d);
    x = x > y ? x : y;
  }
  return x;
}
#if __CUDA_ARCH__ >= 800  // integers have an instruction for it
JITKERN_DEVICE u32 warp_sum(u32 x) { return __reduce_add_sync(~0u, x); }
JITKERN_DEVICE i32 warp_sum(i32 x) { return static_cast<i32>(warp_sum(static_cast<u32>(x))); }
JITKERN_DEVICE i32 warp_max(i32 x) { return __reduce_max_sync(~0u, x); }
#endif
JITKERN_DEVICE u32 warp_inclusive_sum(u32 x, int lane) {
#pragma unroll
  for (int d = 1; d < kWarp; d *= 2) {
    const u32 below = __shfl_up_sync(~0u, x, d);
    if (lane >= d) x += below;
  }
  return x;
}
#else
#define JITKERN_SHARED
constexpr int kWarp = 1;

template <class A>
JITKERN_DEVICE A warp_sum(A x) {
  return x;
}
template <class A>
JITKERN_DEVICE A warp_max(A x) {
  return x;
}
JITKERN_DEVICE u32 warp_inclusive_sum(u32 x, int) { return x; }
#endif

template <int N>
JITKERN_DEVICE void warp_sums(u32 (&x)[N]) {
  for (int n = 0; n < N; ++n) x[n] = warp_sum(x[n]);
}

JITKERN_DEVICE int lane_of(int thread) { return thread & (kWarp - 1); }
JITKERN_DEVICE int warp_of(int thread) { return static_cast<int>(static_cast<u32>(thread) / kWarp); }

// The functions below have one barrier each. Their `scratch` may be written again behind one more: where that
// is not sure, callers take turns between two.
template <int Threads, int N>
using WarpSums = u32[Threads / kWarp][N];

// N sums over all threads.
template <int Threads, int N>
JITKERN_DEVICE void block_sums(u32 (&x)[N], int thread, WarpSums<Threads, N>& scratch) {
  const int lane = lane_of(thread);
  warp_sums(x);
  for (int n = 0; n < N; ++n)
    if (lane == 0) scratch[warp_of(thread)][n] = x[n];
  block_barrier();
  for (int n = 0; n < N; ++n) x[n] = lane < Threads / kWarp ? scratch[lane][n] : 0u;
  warp_sums(x);
}

template <int N>
struct Scan {
  u32 before[N];  // sums over the threads below this one
  u32 total[N];   // over all threads
};
template <int Threads, int N>
JITKERN_DEVICE Scan<N> block_scan(const u32 (&x)[N], int thread, WarpSums<Threads, N>& scratch) {
  static_assert(Threads / kWarp <= kWarp || kWarp == 1, "one warp must be able to add the sums of all warps");
  const int lane = lane_of(thread), warp = warp_of(thread);
  Scan<N> scan;
  for (int n = 0; n < N; ++n) {
    const u32 inclusive = warp_inclusive_sum(x[n], lane);
    if (lane == kWarp - 1) scratch[warp][n] = inclusive;
    scan.before[n] = inclusive - x[n];
  }
  block_barrier();
  for (int n = 0; n < N; ++n) {
    const u32 sum = lane < Threads / kWarp ? scratch[lane][n] : 0u;
    scan.before[n] += warp_sum(lane < warp ? sum : 0u);
    scan.total[n] = warp_sum(sum);
  }
  return scan;
}

template <int Threads>
JITKERN_DEVICE i32 block_max(i32 x, int thread, i32 (&scratch)[Threads / kWarp]) {
  const int lane = lane_of(thread);
  const i32 mine = warp_max(x);
  if (lane == 0) scratch[warp_of(thread)] = mine;
  block_barrier();
  return warp_max(scratch[lane < Threads / kWarp ? lane : 0]);
}

JITKERN_DEVICE bool block_all(bool x) {
#if JITKERN_ON_GPU
  return __syncthreads_and(x) != 0;
#else
  return x;
#endif
}

}  // namespace jitkern
