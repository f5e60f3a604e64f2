// N partial states of the same rows: where they lie, and their weights. Shared by the N-way merge and its gradient.
//
//   m = max L_i    w_i = exp(L_i - m) / sum_j exp(L_j - m)    O = sum w_i O_i    L = m + log(sum_j exp(L_j - m))
//
// (arXiv 2501.01005, section 2.2.) A sink is one more term of the denominator, without a value.
#pragma once
#include "include/merge.cuh"
#include "include/pack.cuh"

#ifndef JITKERN_D
#define JITKERN_D 128
#endif
#ifndef JITKERN_LIST
#define JITKERN_LIST 1
#endif
#ifndef JITKERN_STRIDE
#define JITKERN_STRIDE 32
#endif
#ifndef JITKERN_COUNT
#define JITKERN_COUNT 0
#endif

namespace jitkern {

using T = JITKERN_T;
using A = Accumulator<T>::type;  // L has this type, too
using Stride = Choose<JITKERN_STRIDE == 32, u32, u64>::type;

constexpr int kD = JITKERN_D;
constexpr int kPack = JITKERN_PACK;
constexpr int kList = JITKERN_LIST;  // tensors of a list that a parameter block has room for; 1: one stacked tensor
// How many partials every token has, of a list all that there is room for; 0: the parameter block says. Where it is
// known, a list's strides are all the same.
constexpr u32 kCount = JITKERN_COUNT != 0 && kList > 1 ? kList : JITKERN_COUNT;
constexpr int kStrides = kCount != 0 ? 1 : kList;
static_assert(kD > 0 && kD % kPack == 0, "the head size must be a positive multiple of the pack");
constexpr int kPacks = kD / kPack;  // in a row

template <class Value, class Lse>
struct PartialsOf {  // addresses; of a stack only the first
  Value* v[kList];
  Lse* s[kList];
};
using Partials = PartialsOf<const T, const A>;

// Which partials a token has.
struct Range {
  u32 first, count;
};

struct Rows {
  const i32* valid;          // partials of each token, the later ones are not read; or null: all
  const i32* indptr;         // ragged: token t has the rows indptr[t] to indptr[t + 1] of a stack; or null
  i64 v_partial, s_partial;  // strides between the partials of a stack
  u32 partials;              // of a token at most; ragged: rows of the stack
  Row2 v_stride[kStrides], s_stride[kStrides];
};

JITKERN_DEVICE u32 clamp(i32 x, u32 most) { return x < 0 ? 0 : (static_cast<u32>(x) > most ? most : x); }

JITKERN_DEVICE Range range_of(const Rows& rows, u32 token) {
  if constexpr (kCount != 0) return {0, kCount};
  if (rows.indptr) {
    const u32 first = clamp(rows.indptr[token], rows.partials), end = clamp(rows.indptr[token + 1], rows.partials);
    return {first, end > first ? end - first : 0};
  }
  return {0, rows.valid ? clamp(rows.valid[token], rows.partials) : rows.partials};
}

// Where a row lies in a partial, and where partial i of it is.
JITKERN_DEVICE u64 row_offset(const Rows& rows, const Row2& stride, u32 t, u32 h) {
  return offset<Stride>(stride, !kCount && rows.indptr ? 0 : t, h);
}
template <class Value, class Lse>
JITKERN_DEVICE Value* value_row(const PartialsOf<Value, Lse>& partials, const Rows& rows, u32 i, u32 t, u32 h) {
  const u32 at = kList > 1 ? i : 0;
  const u64 stacked = kList > 1 ? 0 : static_cast<u64>(i) * static_cast<u64>(rows.v_partial);
  return partials.v[at] + stacked + row_offset(rows, rows.v_stride[kStrides > 1 ? i : 0], t, h);
}
template <class Value, class Lse>
JITKERN_DEVICE Lse* lse_cell(const PartialsOf<Value, Lse>& partials, const Rows& rows, u32 i, u32 t, u32 h) {
  const u32 at = kList > 1 ? i : 0;
  const u64 stacked = kList > 1 ? 0 : static_cast<u64>(i) * static_cast<u64>(rows.s_partial);
  return partials.s[at] + stacked + row_offset(rows, rows.s_stride[kStrides > 1 ? i : 0], t, h);
}

// A partial's L in the output's base; +inf means "no keys" as -inf does. A finite L stays finite: one that is too large
// in the other base must not turn into "no keys".
JITKERN_DEVICE A normal_lse(A lse, A in_to_out) {
  const A most = largest_finite<A>(), y = mul(lse, in_to_out);
  const A not_below = y < -most ? -most : y;
  const A finite = not_below > most ? most : not_below;
  return is_infinite(lse) ? minus_infinity<A>() : finite;
}
JITKERN_DEVICE bool is_live(A lse) { return !is_infinite(lse); }  // NaN is live: it has to show

}  // namespace jitkern
