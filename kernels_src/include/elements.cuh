// N neighbouring elements that one memory access moves, for users' kernels: the same text on the GPU and on the CPU.
//
//   auto a = jitkern::load<PACK>(x + i);
//   for (int j = 0; j < PACK; ++j) a[j] = 2 * a[j];
//   jitkern::store(y + i, a);
//
// The address has to be a multiple of N elements, which `PACK` sees to for rows that begin at the tensors' own rows.
#pragma once
#include "include/number.cuh"

namespace jitkern {

template <class T, int N>
struct alignas(sizeof(T) * N) Elements {
  static_assert(N > 0 && (N & (N - 1)) == 0, "a pack holds a power of two of elements");
  static_assert(sizeof(T) * N <= 16, "one access moves at most 16 bytes");
  T element[N];
  JITKERN_MEMBER T& operator[](int i) { return element[i]; }
  JITKERN_MEMBER const T& operator[](int i) const { return element[i]; }
};

template <int N, class T>
JITKERN_DEVICE Elements<T, N> load(const T* address) {
  return *reinterpret_cast<const Elements<T, N>*>(address);
}
template <int N, class T>
JITKERN_DEVICE void store(T* address, const Elements<T, N>& value) {
  *reinterpret_cast<Elements<T, N>*>(address) = value;
}

}  // namespace jitkern
