// A pack: the elements that one memory access moves. 16 bytes where alignment allows, narrower otherwise.
#pragma once
#include "include/float8.cuh"

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
  // What is converted at a time: two elements where there are two and they are small.
  static constexpr bool kPaired = sizeof(T) <= 2 && N >= 2;
  using Pair = typename Choose<sizeof(T) == 2, u32, u16>::type;
  using Unit = typename Choose<kPaired, Pair, T>::type;
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

// The elements of a pack in the accumulator's type.
template <class T, int N, class A>
JITKERN_DEVICE void widen_pack(const Pack<T, N>& pack, A (&x)[N]) {
  JITKERN_UNROLL
  for (int i = 0; i < Pack<T, N>::kUnits; ++i) {
    if constexpr (!Pack<T, N>::kPaired) {
      x[i] = widen(pack.unit[i]);
    } else if constexpr (sizeof(T) == 2) {
      widen_pair<T>(pack.unit[i], x[2 * i], x[2 * i + 1]);
    } else {
      x[2 * i] = widen(T{static_cast<u8>(pack.unit[i])});
      x[2 * i + 1] = widen(T{static_cast<u8>(pack.unit[i] >> 8)});
    }
  }
}

// The other way, each rounded once.
template <class T, int N, class A>
JITKERN_DEVICE Pack<T, N> narrow_pack(const A (&x)[N]) {
  Pack<T, N> pack;
  JITKERN_UNROLL
  for (int i = 0; i < Pack<T, N>::kUnits; ++i) {
    if constexpr (!Pack<T, N>::kPaired) {
      narrow(x[i], pack.unit[i]);
    } else if constexpr (sizeof(T) == 2) {
      pack.unit[i] = narrow_pair<T>(x[2 * i], x[2 * i + 1]);
    } else {
      pack.unit[i] = narrow_float8_pair<T>(x[2 * i], x[2 * i + 1]);
    }
  }
  return pack;
}
#else
// On the CPU a pack is an array: rows are walked element by element, and the compiler vectorises.
template <class T, int N>
struct Pack {
  T element[N];
};
#endif

}  // namespace jitkern

#ifndef JITKERN_PACK
#define JITKERN_PACK 4
#endif
