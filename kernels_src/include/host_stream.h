// Large results go past the caches: a store that does not first read the line it overwrites saves a quarter of a merge's
// traffic. Read by the host compiler only.
#pragma once
#include "include/target.cuh"

namespace jitkern {

constexpr u64 kStreamBytes = 8u << 20;  // smaller results are likely to be read again from the cache

#if defined(__AVX2__)
typedef long long Words4 __attribute__((vector_size(32)));

// Whether rows at `to`, `bytes` long, can be stored so.
JITKERN_DEVICE bool can_stream(const void* to, u64 bytes) {
  return (reinterpret_cast<u64>(to) | bytes) % sizeof(Words4) == 0;
}
JITKERN_DEVICE void stream_row(void* to, const void* from, u64 bytes) {
  auto* target = static_cast<Words4*>(to);
  const auto* source = static_cast<const Words4*>(from);
  for (u64 i = 0; i < bytes / sizeof(Words4); ++i) __builtin_ia32_movntdq256(target + i, source[i]);
}
#else
JITKERN_DEVICE bool can_stream(const void*, u64) { return false; }
JITKERN_DEVICE void stream_row(void*, const void*, u64) {}
#endif

}  // namespace jitkern
