// 16-bit elements that can be computed with: they become a float when read, and are rounded when written.
//
// This is what `T` is in a user's kernel for float16 and bfloat16, so that `y[i] = y[i] + a * x[i]` is one text for every
// element type. It has the layout and the rounding of the plain element, and goes wherever that goes.
#pragma once
#include "include/dtype.cuh"

#if JITKERN_ON_GPU
#define JITKERN_MEMBER __device__ __forceinline__
#else
#define JITKERN_MEMBER __attribute__((always_inline))
#endif

namespace jitkern {

template <class Element>
struct Number : Element {
  Number() = default;
  JITKERN_MEMBER Number(float x) { narrow(x, static_cast<Element&>(*this)); }
  JITKERN_MEMBER operator float() const { return widen(static_cast<const Element&>(*this)); }
  JITKERN_MEMBER Number& operator+=(float x) { return *this = Number(static_cast<float>(*this) + x); }
  JITKERN_MEMBER Number& operator-=(float x) { return *this = Number(static_cast<float>(*this) - x); }
  JITKERN_MEMBER Number& operator*=(float x) { return *this = Number(static_cast<float>(*this) * x); }
  JITKERN_MEMBER Number& operator/=(float x) { return *this = Number(static_cast<float>(*this) / x); }
};
static_assert(sizeof(Number<bf16>) == 2 && sizeof(Number<f16>) == 2, "a number takes no more room than its element");

}  // namespace jitkern
