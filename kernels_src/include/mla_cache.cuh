// What a token of the latent cache is made of.
//
//   kPlain   kD elements of T
//   kScaled  kD e4m3 codes, all times the one float32 at `k_scale`
//   kTokens  656 bytes: 512 e4m3 codes, four float32 scales (one for each 128 codes), 64 elements of T
//
// e4m3 fits into bf16 and f16 exactly. The one scale is left out of the keys and comes into the scores and the result; the
// scales of a token's own groups come into its keys, which are rounded to T.
#pragma once
#ifndef JITKERN_T
#define JITKERN_T jitkern::bf16
#endif
#include "include/float8.cuh"

#ifndef JITKERN_D
#define JITKERN_D 576
#endif
#ifndef JITKERN_CACHE
#define JITKERN_CACHE 0
#endif

namespace jitkern {

constexpr int kPlain = 0, kScaled = 1, kTokens = 2;
constexpr int kCache = JITKERN_CACHE;
static_assert(kCache == kPlain || kCache == kScaled || kCache == kTokens, "there are three kinds of cache");
static_assert(kCache != kTokens || JITKERN_D == 576, "a token of 656 bytes is 512 codes and 64 elements");

constexpr int kCodes = kCache == kTokens ? 512 : JITKERN_D;  // e4m3 in a token of a cache that has some
constexpr int kScaleGroup = 128;                             // codes that share a token's scale
constexpr int kRopeByte = kCodes + kCodes / kScaleGroup * 4;  // where a token's elements of T begin

using CacheElement = typename Choose<kCache == kPlain, JITKERN_T, u8>::type;

}  // namespace jitkern
