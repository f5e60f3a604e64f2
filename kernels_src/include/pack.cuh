// A pack: the elements that one memory access moves. 16 bytes where alignment allows, narrower otherwise.
#pragma once
#include "include/dtype.cuh"

namespace jitkern {

#if JITKERN_ON_GPU
template <int Bytes>
struct WordOf;
template <>
struct WordOf<16> {
  using type = uint4;
};
template <>
struct WordOf<8> {
  using type = uint2;
};
template <>
struct WordOf<4> {
  using type = u32;
};
template <>
struct WordOf<2> {
  using type = u16;
};
template <>
struct WordOf<1> {
  using type = u8;
};

// N elements of T in registers. N is a power of two.
template <class T, int N>
struct Pack {
  static constexpr int kBytes = sizeof(T) * N;
  static_assert(N > 0 && (N & (N - 1)) == 0, "a pack holds a power of two of elements");
  static_assert(kBytes <= 16, "one access moves at most 16 bytes");
  static constexpr bool kPaired = sizeof(T) == 2 && N >= 2;
  using Unit = typename Choose<kPaired, u32, T>::type;  // what is converted at a time
  static constexpr int kUnits = kBytes / sizeof(Unit);
  Unit unit[kUnits];
};

template <class T, int N>
JITKERN_DEVICE Pack<T, N> load_pack(const T* address) {
  using Word = typename WordOf<Pack<T, N>::kBytes>::type;
  return __builtin_bit_cast(Pack<T, N>, *reinterpret_cast<const Word*>(address));
}
template <class T, int N>
JITKERN_DEVICE void store_pack(T* address, const Pack<T, N>& pack) {
  using Word = typename WordOf<Pack<T, N>::kBytes>::type;
  *reinterpret_cast<Word*>(address) = __builtin_bit_cast(Word, pack);
}

// f(a, b) of every element, in the accumulator's type, rounded to T once.
template <class T, int N, class F>
JITKERN_DEVICE Pack<T, N> combine(const Pack<T, N>& a, const Pack<T, N>& b, F f) {
  Pack<T, N> out;
#pragma unroll
  for (int i = 0; i < Pack<T, N>::kUnits; ++i) {
    if constexpr (Pack<T, N>::kPaired) {
      float a0, a1, b0, b1;
      widen_pair<T>(a.unit[i], a0, a1);
      widen_pair<T>(b.unit[i], b0, b1);
      out.unit[i] = narrow_pair<T>(f(a0, b0), f(a1, b1));
    } else {
      narrow(f(widen(a.unit[i]), widen(b.unit[i])), out.unit[i]);
    }
  }
  return out;
}
#endif

}  // namespace jitkern

#ifndef JITKERN_PACK
#define JITKERN_PACK 4
#endif
