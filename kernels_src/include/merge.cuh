// The arithmetic of a merge of two states, shared by the kernels that do one.
//
//   m = max(La, Lb)    e = exp(min(La, Lb) - m)    O = (O_max + e O_min) / (1 + e)    L = m + log(1 + e)
//
// (arXiv 2501.01005, section 2.2, in max-shift form: of the two weights one is exp(0), so one exponential suffices.)
// An L of +-inf means "this side saw no key". Logarithms of any base: each L is first brought to the output's base, a
// factor of exactly 1 where they agree.
#pragma once
#include "include/arithmetic.cuh"

namespace jitkern {

struct Row2 {  // strides in elements
  i64 token, head;
};

// Offsets are 64 bits wide in any case; only a stride of 2^32 elements or more needs 64 bits itself.
template <class Stride>
JITKERN_DEVICE u64 offset(const Row2& stride, u32 token, u32 head) {
  return static_cast<u64>(token) * static_cast<Stride>(stride.token) +
         static_cast<u64>(head) * static_cast<Stride>(stride.head);
}

enum class Outcome { merge, copy_a, copy_b, empty, skip };

// What `row_op` may ask for, token by token.
enum class RowOp : u8 { skip = 0, merge = 1, copy_b = 2, copy_a = 3 };

template <class A>
JITKERN_DEVICE Outcome outcome_of(A a_lse, A b_lse) {
  const bool a_empty = is_infinite(a_lse), b_empty = is_infinite(b_lse);
  if (a_empty) return b_empty ? Outcome::empty : Outcome::copy_b;
  return b_empty ? Outcome::copy_a : Outcome::merge;
}

template <class A>
struct Weights {
  A a, b;
  A larger_lse, e;  // L = larger_lse + log(1 + e), in the output's base
};

// Both L in the output's base; `out_to_e` is the natural logarithm of that base.
template <class A>
JITKERN_DEVICE Weights<A> weigh(A a_lse, A b_lse, A out_to_e) {
  Weights<A> w;
  const bool a_is_larger = a_lse >= b_lse;
  w.larger_lse = a_is_larger ? a_lse : b_lse;
  const A difference = add(a_is_larger ? b_lse : a_lse, -w.larger_lse);
  w.e = exp_nonpositive(mul(difference, out_to_e));
  const A larger = reciprocal(add(static_cast<A>(1), w.e));
  const A smaller = mul(w.e, larger);
  w.a = a_is_larger ? larger : smaller;
  w.b = a_is_larger ? smaller : larger;
  return w;
}

// L of the row; the sides' own where one of them is all there is.
template <class A>
JITKERN_DEVICE A lse_of(Outcome outcome, const Weights<A>& w, A a_lse, A b_lse, A e_to_out) {
  A lse = add(w.larger_lse, mul(log1p_unit(w.e), e_to_out));
  if (outcome == Outcome::copy_a) lse = a_lse;
  if (outcome == Outcome::copy_b) lse = b_lse;
  if (outcome == Outcome::empty) lse = minus_infinity<A>();
  return lse;
}

// One element. Two products and a sum, not a fused one: so that swapping a and b changes no bit.
template <class A>
struct Merge {
  A weight_a, weight_b;
  JITKERN_DEVICE_METHOD A operator()(A a, A b) const { return add(mul(a, weight_a), mul(b, weight_b)); }
};

}  // namespace jitkern
