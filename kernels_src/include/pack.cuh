// A pack: the elements that one memory access moves. 16 bytes where alignment allows, narrower otherwise.
#pragma once
#include "include/dtype.cuh"

#ifndef JITKERN_LOAD
#define JITKERN_LOAD(address) (*(address))
#endif
#ifndef JITKERN_STORE
#define JITKERN_STORE(address, value) (*(address) = (value))
#endif

namespace jitkern {

// N elements of T, aligned so that a GPU moves them with one instruction. N is a power of two.
template <class T, int N>
struct alignas(JITKERN_ON_GPU ? sizeof(T) * N : sizeof(T)) Pack {
  static_assert(N > 0 && (N & (N - 1)) == 0, "a pack holds a power of two of elements");
  static_assert(!JITKERN_ON_GPU || sizeof(T) * N <= 16, "one GPU access moves at most 16 bytes");
  T element[N];
};

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

template <class T, int N>
JITKERN_DEVICE Pack<T, N> load_pack(const T* address) {
  using Word = typename WordOf<sizeof(T) * N>::type;
  return __builtin_bit_cast(Pack<T, N>, JITKERN_LOAD(reinterpret_cast<const Word*>(address)));
}
template <class T, int N>
JITKERN_DEVICE void store_pack(T* address, const Pack<T, N>& pack) {
  using Word = typename WordOf<sizeof(T) * N>::type;
  JITKERN_STORE(reinterpret_cast<Word*>(address), __builtin_bit_cast(Word, pack));
}
#else
template <class T, int N>
JITKERN_DEVICE Pack<T, N> load_pack(const T* address) {
  Pack<T, N> pack;
  __builtin_memcpy(&pack, address, sizeof(pack));
  return pack;
}
template <class T, int N>
JITKERN_DEVICE void store_pack(T* address, const Pack<T, N>& pack) {
  __builtin_memcpy(address, &pack, sizeof(pack));
}
#endif

}  // namespace jitkern

#ifndef JITKERN_PACK
#define JITKERN_PACK 4
#endif
