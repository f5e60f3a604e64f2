// Element types: exact to float, and from float to nearest with ties to even, by the rule and not by the
// kernels' tricks.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime.h"

namespace emulator {
namespace {

struct Format {
  int exponent_bits, mantissa_bits;
  bool infinity;  // else the largest exponent has numbers, and NaN is all ones
};
constexpr Format kFormats[] = {{8, 7, true}, {5, 10, true}, {4, 3, false}, {5, 2, true}};

float value_of(u32 bits, const Format& f) {
  const int bias = (1 << (f.exponent_bits - 1)) - 1, top = (1 << f.exponent_bits) - 1;
  const u32 mantissa = bits & ((1u << f.mantissa_bits) - 1);
  const int exponent = static_cast<int>(bits >> f.mantissa_bits) & top;
  const bool negative = bits >> (f.exponent_bits + f.mantissa_bits) & 1;
  float x;
  if (exponent == top && f.infinity)
    x = mantissa ? NAN : INFINITY;
  else if (exponent == top && mantissa == (1u << f.mantissa_bits) - 1)
    x = NAN;
  else if (exponent == 0)
    x = std::ldexp(static_cast<float>(mantissa), 1 - bias - f.mantissa_bits);
  else
    x = std::ldexp(static_cast<float>(mantissa | 1u << f.mantissa_bits), exponent - bias - f.mantissa_bits);
  return negative ? -x : x;
}

struct Table {
  float value[4][65536];
  u32 largest[4];  // the largest finite one, as bits
  Table() {
    for (int t = 0; t < 4; ++t) {
      for (u32 i = 0; i < (t < 2 ? 65536u : 256u); ++i) value[t][i] = value_of(i, kFormats[t]);
      largest[t] = (t < 2 ? 32768u : 128u) - 1;
      while (!std::isfinite(value[t][largest[t]])) --largest[t];
    }
  }
};
const Table& table() {
  static const Table made;
  return made;
}

}  // namespace

float widen(u32 bits, Element element) { return table().value[static_cast<int>(element)][bits]; }

u32 narrow(float x, Element element) {
  const Format& f = kFormats[static_cast<int>(element)];
  const bool saturates = element == Element::e4m3 || element == Element::e5m2;
  const u32 sign = 1u << (f.exponent_bits + f.mantissa_bits);
  if (std::isnan(x)) return sign - 1;
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  int exponent = -1000;
  if (x != 0) std::frexp(std::fabs(x), &exponent);
  const int unit = std::max(exponent - 1, 1 - bias) - f.mantissa_bits;  // log2 of the last bit's worth
  const u32 largest = table().largest[static_cast<int>(element)];
  const double magnitude = std::nearbyint(std::ldexp(static_cast<double>(std::fabs(x)), -unit));
  u32 bits;
  if (std::isinf(x) || std::ldexp(magnitude, unit) > widen(largest, element)) {
    bits = saturates ? largest : largest + 1;
  } else {  // a carry out of the mantissa goes into the exponent
    bits = static_cast<u32>(magnitude) +
           (static_cast<u32>(unit + f.mantissa_bits + bias - 1) << f.mantissa_bits);
  }
  return bits | (std::signbit(x) ? sign : 0);
}

}  // namespace emulator
