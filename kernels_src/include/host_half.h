// Eight f16 elements at a time with the processor's own conversions, where it has them (F16C). Read by the host compiler
// only. The same bits as dtype.cuh's conversions, which compilers do not turn into these instructions.
#pragma once
#include "include/dtype.cuh"

namespace jitkern {

#if defined(__F16C__) && defined(__AVX2__)
#define JITKERN_HOST_HALF 1
typedef float Floats8 __attribute__((vector_size(32)));
typedef int Ints8 __attribute__((vector_size(32)));
typedef short Halves8 __attribute__((vector_size(16)));

JITKERN_DEVICE Floats8 widen8(const f16* from) {
  Halves8 raw;
  __builtin_memcpy(&raw, from, sizeof(raw));
  return __builtin_ia32_vcvtph2ps256(raw);
}
JITKERN_DEVICE void narrow8(Floats8 x, f16* to) {
  constexpr int kNearest = 0;
  // A NaN keeps its payload in the instruction; everywhere else it becomes 0x7fff: give it one that does.
  const Ints8 nan = x != x;
  const Ints8 bits = __builtin_bit_cast(Ints8, x);
  x = __builtin_bit_cast(Floats8, (bits & ~nan) | (nan & 0x7fffffff));
  const Halves8 raw = __builtin_ia32_vcvtps2ph256(x, kNearest);
  __builtin_memcpy(to, &raw, sizeof(raw));
}
#else
#define JITKERN_HOST_HALF 0
#endif

}  // namespace jitkern
