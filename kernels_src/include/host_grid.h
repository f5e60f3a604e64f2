// The CPU's launch: run every block of a grid on a few threads. Read by the host compiler only.
//
// Threads are made for the call and joined before it returns. A pool would save some ten microseconds a call, but a
// pool does not survive fork(), and data loaders and serving engines fork. Small grids stay on the caller's thread.
#pragma once
#include <pthread.h>

namespace jitkern {

struct Index3 {
  unsigned x, y, z;
};

struct HostLaunch {
  Index3 grid, block;
  int threads;  // at most this many operating-system threads, the caller's included
};

constexpr int kMaxHostThreads = 64;

template <class Params>
struct HostSlice {
  const Params* params;
  const HostLaunch* launch;
  unsigned long long begin, end;  // linear block numbers, x fastest
};

template <class Params, void (*Body)(const Params&, Index3, Index3, Index3, Index3)>
void run_blocks(const Params& params, const HostLaunch& launch, unsigned long long begin, unsigned long long end) {
  const Index3 grid = launch.grid, block = launch.block;
  Index3 b{static_cast<unsigned>(begin % grid.x), static_cast<unsigned>(begin / grid.x % grid.y),
           static_cast<unsigned>(begin / grid.x / grid.y)};
  for (unsigned long long i = begin; i < end; ++i) {
    for (unsigned z = 0; z < block.z; ++z)
      for (unsigned y = 0; y < block.y; ++y)
        for (unsigned x = 0; x < block.x; ++x) Body(params, b, Index3{x, y, z}, block, grid);
    if (++b.x == grid.x) {
      b.x = 0;
      if (++b.y == grid.y) {
        b.y = 0;
        ++b.z;
      }
    }
  }
}

template <class Params, void (*Body)(const Params&, Index3, Index3, Index3, Index3)>
void* run_slice(void* argument) {
  const auto* slice = static_cast<const HostSlice<Params>*>(argument);
  run_blocks<Params, Body>(*slice->params, *slice->launch, slice->begin, slice->end);
#if defined(__SSE__)
  __builtin_ia32_sfence();  // stores past the caches are not ordered by joining the thread
#endif
  return nullptr;
}

// Returns 0. A thread that the system refuses to make is not an error: the caller's thread does its share.
template <class Params, void (*Body)(const Params&, Index3, Index3, Index3, Index3)>
int run_grid(const Params& params, const HostLaunch& launch) {
  const unsigned long long blocks = 1ull * launch.grid.x * launch.grid.y * launch.grid.z;
  int threads = launch.threads < 1 ? 1 : (launch.threads > kMaxHostThreads ? kMaxHostThreads : launch.threads);
  if (blocks < static_cast<unsigned long long>(threads)) threads = blocks ? static_cast<int>(blocks) : 1;
  pthread_t handles[kMaxHostThreads];
  HostSlice<Params> slices[kMaxHostThreads];
  bool running[kMaxHostThreads] = {};
  for (int t = 0; t < threads; ++t) {
    slices[t] = {&params, &launch, blocks * t / threads, blocks * (t + 1) / threads};
    if (t > 0) running[t] = pthread_create(&handles[t], nullptr, run_slice<Params, Body>, &slices[t]) == 0;
  }
  for (int t = 0; t < threads; ++t) {
    if (!running[t]) run_slice<Params, Body>(&slices[t]);
  }
  for (int t = 0; t < threads; ++t) {
    if (running[t]) pthread_join(handles[t], nullptr);
  }
  return 0;
}

}  // namespace jitkern
