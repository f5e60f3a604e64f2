// Sums and prefix sums over the threads of one block.
//
// On the CPU a block has one thread, so each of these is the identity: a kernel written with them, and with loops of
// the form `for (i = thread; i < n; i += kThreads)`, is the same algorithm on both.
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
JITKERN_DEVICE i32 warp_sum(i32 x) { return static_cast<i32>(__reduce_add_sync(~0u, static_cast<u32>(x))); }
JITKERN_DEVICE i32 warp_max(i32 x) { return __reduce_max_sync(~0u, x); }
#endif
JITKERN_DEVICE u64 warp_inclusive_sum(u64 x, int lane) {
  for (int d = 1; d < kWarp; d *= 2) {
    const u64 below = __shfl_up_sync(~0u, x, d);
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
JITKERN_DEVICE u64 warp_inclusive_sum(u64 x, int) { return x; }
#endif

struct ScanResult {
  u64 before;  // sum over the threads below this one
  u64 total;   // over all threads
};

// `scratch` holds one word a warp. Callable again at once: the second barrier protects the scratch.
template <int Threads>
JITKERN_DEVICE ScanResult block_exclusive_sum(u64 x, int thread, u64* scratch) {
  constexpr int kWarps = Threads / kWarp;
  static_assert(kWarps <= kWarp || kWarps == 1, "one warp must be able to scan the sums of all warps");
  const int lane = thread % kWarp, warp = thread / kWarp;
  const u64 inclusive = warp_inclusive_sum(x, lane);
  if (lane == kWarp - 1) scratch[warp] = inclusive;
  block_barrier();
  const u64 sums = warp_inclusive_sum(lane < kWarps ? scratch[lane] : 0, lane);
#if JITKERN_ON_GPU
  const u64 earlier = __shfl_sync(~0u, sums, warp > 0 ? warp - 1 : 0);
  const ScanResult result{(warp > 0 ? earlier : 0) + inclusive - x, __shfl_sync(~0u, sums, kWarps - 1)};
#else
  const ScanResult result{0, sums};
#endif
  block_barrier();
  return result;
}

template <int Threads>
JITKERN_DEVICE i32 block_max(i32 x, int thread, i32* scratch) {
  constexpr int kWarps = Threads / kWarp;
  const int lane = thread % kWarp;
  const i32 mine = warp_max(x);
  if (lane == 0) scratch[thread / kWarp] = mine;
  block_barrier();
  const i32 result = warp_max(scratch[lane < kWarps ? lane : 0]);
  block_barrier();
  return result;
}

}  // namespace jitkern
