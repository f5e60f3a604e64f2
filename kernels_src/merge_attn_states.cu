// merge_attn_states: combine two partial attention outputs of the same queries.
//
//   m = max(La, Lb)    e = exp(min(La, Lb) - m)    O = (O_max + e O_min) / (1 + e)    L = m + log(1 + e)
//
// (arXiv 2501.01005, section 2.2, in max-shift form: of the two weights one is exp(0), so one exponential suffices.)
// Layout: O [tokens, heads, D] with any token and head stride, last stride 1; L any [token, head] strides, f32.
// An L of +-inf means "this side saw no key": the other side comes out bit for bit and the empty side's O is not used.
// Both empty: O = 0, L = -inf. NaN in L gives NaN. Tokens from `merged_tokens` on are copies of side b.
// Logarithms of any base: each L is first brought to the output's base (a factor of exactly 1 where they agree).
//
// Launch: block (kLanes, heads, tokens), grid (head tiles, token tiles, further token tiles). A row, that is one (token, head), belongs to
// kLanes threads of one block, each moving every kLanes-th pack. Therefore no index is ever divided, and a barrier
// between reading and writing L is all it takes to let output_lse be one of the inputs.
// The kernel may be launched before its predecessor has finished (programmatic stream serialization): it works out its
// addresses, then waits, and does not itself let a successor start early.
// Bytes moved: tokens * heads * (3 D sizeof(T) + 12).
//
// Holes (-D): JITKERN_ENTRY, JITKERN_T, JITKERN_PACK, JITKERN_D (head size), JITKERN_STRIDE (32, or 64).
#include "include/arithmetic.cuh"
#include "include/pack.cuh"

#ifndef JITKERN_D
#define JITKERN_D 128
#endif
#ifndef JITKERN_STRIDE
#define JITKERN_STRIDE 32
#endif

namespace jitkern {

using T = JITKERN_T;
using A = Accumulator<T>::type;  // L has this type, too

constexpr int kD = JITKERN_D;
constexpr int kPack = JITKERN_PACK;
static_assert(kD % kPack == 0, "the head size must be a multiple of the pack");
constexpr int kPacks = kD / kPack;  // in a row
constexpr int kMaxThreads = 128;  // in a block
constexpr int kLanes = JITKERN_ON_GPU ? (kPacks < kMaxThreads ? kPacks : kMaxThreads) : 1;

static_assert(kD > 0, "the head size must be positive");

// Offsets are 64 bits wide in any case; only a stride of 2^32 elements or more needs 64 bits itself.
using Stride = Choose<JITKERN_STRIDE == 32, u32, u64>::type;

struct Row2 {  // strides in elements
  i64 token, head;
};

struct MergeParams {
  T* out;
  A* out_lse;  // may be null
  const T* a;
  const A* a_lse;
  const T* b;
  const A* b_lse;
  i64 merged_tokens;  // later ones are copied from b
  Row2 out_stride, a_stride, b_stride;
  Row2 out_lse_stride, a_lse_stride, b_lse_stride;
  u32 tokens, heads;
  A a_to_out;  // ln(base of a) / ln(base of the output)
  A b_to_out;
  A out_to_e;  // ln(base of the output)
  A e_to_out;
  i32 lse_aliased;  // out_lse is a_lse or b_lse
};

static_assert(sizeof(MergeParams) == (sizeof(A) == 4 ? 180 + 4 : 200), "jitkern/ops/merge.py packs this block");

enum class Outcome { merge, copy_a, copy_b, empty };

struct Weights {
  A a, b;
  A larger_lse, e;  // L = larger_lse + log(1 + e), in the output's base
};

JITKERN_DEVICE Outcome outcome_of(A a_lse, A b_lse) {
  const bool a_empty = is_infinite(a_lse), b_empty = is_infinite(b_lse);
  if (a_empty) return b_empty ? Outcome::empty : Outcome::copy_b;
  return b_empty ? Outcome::copy_a : Outcome::merge;
}

JITKERN_DEVICE Weights weigh(A a_lse, A b_lse, A out_to_e) {
  Weights w;
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

JITKERN_DEVICE A merged_lse(const Weights& w, A e_to_out) {
  return add(w.larger_lse, mul(log1p_unit(w.e), e_to_out));
}

// Two products and a sum, not a fused one: so that swapping a and b changes no bit.
struct Merge {
  A weight_a, weight_b;
  JITKERN_DEVICE_METHOD A operator()(A a, A b) const { return add(mul(a, weight_a), mul(b, weight_b)); }
};

JITKERN_DEVICE u64 offset(const Row2& stride, u32 token, u32 head) {
  return static_cast<u64>(token) * static_cast<Stride>(stride.token) +
         static_cast<u64>(head) * static_cast<Stride>(stride.head);
}

#if JITKERN_ON_GPU
using RowPack = Pack<T, kPack>;

JITKERN_DEVICE RowPack finish(Outcome outcome, const Weights& w, const RowPack& a, const RowPack& b) {
  RowPack out = combine<T, kPack>(a, b, Merge{w.a, w.b});
  if (outcome == Outcome::copy_a) out = a;
  if (outcome == Outcome::copy_b) out = b;
  if (outcome == Outcome::empty) out = RowPack{};
  return out;
}
#else
// Element by element, for the compiler to vectorise. An output that is an input is the same view of it, so that no
// iteration reads what another one wrote.
JITKERN_DEVICE void finish_row(Outcome outcome, const Weights& w, const T* a, const T* b, T* out) {
  if (outcome == Outcome::merge) {
    const Merge merge{w.a, w.b};
#pragma GCC ivdep
    for (int i = 0; i < kD; ++i) narrow(merge(widen(a[i]), widen(b[i])), out[i]);
  } else if (outcome == Outcome::empty) {
    for (int i = 0; i < kD; ++i) out[i] = T{};
  } else {
    __builtin_memmove(out, outcome == Outcome::copy_a ? a : b, sizeof(T) * kD);
  }
}
#endif

}  // namespace jitkern

JITKERN_EXPORT(jitkern::MergeParams)

JITKERN_KERNEL(jitkern::MergeParams, jitkern::kMaxThreads) {
  using namespace jitkern;
  const u32 token = (blockIdx.z * gridDim.y + blockIdx.y) * blockDim.z + threadIdx.z;
  const u32 head = blockIdx.x * blockDim.y + threadIdx.y;
  const bool inside = token < p.tokens && head < p.heads;
  const u32 t = inside ? token : 0;
  const u32 h = inside ? head : 0;
  wait_for_predecessor();

  A a_lse = p.a_lse[offset(p.a_lse_stride, t, h)];
  A b_lse = p.b_lse[offset(p.b_lse_stride, t, h)];
  const T* a = p.a + offset(p.a_stride, t, h);
  const T* b = p.b + offset(p.b_stride, t, h);
  T* out = p.out + offset(p.out_stride, t, h);
  const int lane = static_cast<int>(threadIdx.x);
#if JITKERN_ON_GPU
  // Both sides are loaded whatever L will say: waiting for L first would double the latency. What is not wanted is not
  // used.
  auto pack_a = load_pack<T, kPack>(a + lane * kPack);
  auto pack_b = load_pack<T, kPack>(b + lane * kPack);
#endif
  if (p.lse_aliased) block_barrier();
  if (!inside) return;

  a_lse = mul(a_lse, p.a_to_out);
  b_lse = mul(b_lse, p.b_to_out);
  const Outcome outcome = t < p.merged_tokens ? outcome_of(a_lse, b_lse) : Outcome::copy_b;
  const Weights w = weigh(a_lse, b_lse, p.out_to_e);
#if JITKERN_ON_GPU
  store_pack<T, kPack>(out + lane * kPack, finish(outcome, w, pack_a, pack_b));
  if constexpr (kPacks > kLanes) {
    for (int at = (lane + kLanes) * kPack; at < kD; at += kLanes * kPack) {
      pack_a = load_pack<T, kPack>(a + at);
      pack_b = load_pack<T, kPack>(b + at);
      store_pack<T, kPack>(out + at, finish(outcome, w, pack_a, pack_b));
    }
  }
#else
  finish_row(outcome, w, a, b, out);
#endif
  if (lane == 0 && p.out_lse) {
    A lse = merged_lse(w, p.e_to_out);
    if (outcome == Outcome::copy_a) lse = a_lse;
    if (outcome == Outcome::copy_b) lse = b_lse;
    if (outcome == Outcome::empty) lse = minus_infinity<A>();
    p.out_lse[offset(p.out_lse_stride, t, h)] = lse;
  }
}
