// merge_attn_states: combine two partial attention outputs of the same queries. The formula is in include/merge.cuh.
//
// Layout: O [tokens, heads, D] with any token and head stride, last stride 1; L any [token, head] strides, f32.
// Where one side is empty the other comes out bit for bit, and the empty side's O is not used. Both empty: O = 0,
// L = -inf. NaN in L gives NaN. Tokens from `merged_tokens` on are copies of side b, whatever L says.
//
// Launch: block (kLanes, heads, tokens), grid (head tiles, token tiles, further token tiles). A row, that is one
// (token, head), belongs to kLanes threads of one block, each moving every kLanes-th pack. Therefore no index is ever
// divided, and a barrier between reading and writing L is all it takes to let output_lse be one of the inputs.
// The kernel may be launched before its predecessor has finished (programmatic stream serialization): it works out its
// addresses, then waits, and does not itself let a successor start early.
// Bytes moved: tokens * heads * (D (2 sizeof(T) + sizeof(Out)) + 12).
//
// Holes (-D): JITKERN_ENTRY, JITKERN_T (inputs), JITKERN_PACK, JITKERN_D (head size), and with defaults JITKERN_OUT
// (output, else T), JITKERN_DENSE (1: everything is contiguous, L [tokens, heads]; 2: L [heads, tokens]; 0: strides are
// read), JITKERN_STRIDE (32, or 64), JITKERN_CONTROL (1: the device says what happens to each token).
#include "include/merge.cuh"
#include "include/pack.cuh"
#if !JITKERN_ON_GPU
#include "include/host_half.h"
#include "include/host_stream.h"
#endif

#ifndef JITKERN_D
#define JITKERN_D 128
#endif
#ifndef JITKERN_OUT
#define JITKERN_OUT JITKERN_T
#endif
#ifndef JITKERN_STRIDE
#define JITKERN_STRIDE 32
#endif
#ifndef JITKERN_DENSE
#define JITKERN_DENSE 0
#endif
#ifndef JITKERN_CONTROL
#define JITKERN_CONTROL 0
#endif

namespace jitkern {

using T = JITKERN_T;
using Out = JITKERN_OUT;
using A = Accumulator<T>::type;  // L has this type, too
using Stride = Choose<JITKERN_STRIDE == 32, u32, u64>::type;

constexpr bool kDense = JITKERN_DENSE != 0;
constexpr int kD = JITKERN_D;
constexpr int kPack = JITKERN_PACK;
static_assert(kD > 0, "the head size must be positive");
static_assert(kD % kPack == 0, "the head size must be a multiple of the pack");
constexpr int kPacks = kD / kPack;  // in a row
constexpr int kMaxThreads = 128;    // in a block
constexpr int kLanes = JITKERN_ON_GPU ? (kPacks < kMaxThreads ? kPacks : kMaxThreads) : 1;
// With scales every element is multiplied; without, a copy is a copy of bits.
constexpr bool kScaledIn = sizeof(T) == 1, kScaledOut = sizeof(Out) == 1;
constexpr bool kSameType = SameType<T, Out>::value && !kScaledIn;

// What every launch needs comes first: a kernel that reads little of its parameter block starts sooner.
struct MergeParams {
  Out* out;
  A* out_lse;  // may be null
  const T* a;
  const A* a_lse;
  const T* b;
  const A* b_lse;
  i64 merged_tokens;  // later ones are copied from b
  u32 tokens, heads;
  A a_to_out;  // ln(base of a) / ln(base of the output)
  A b_to_out;
  A out_to_e;  // ln(base of the output)
  A e_to_out;
  i32 lse_aliased;     // out_lse is a_lse or b_lse
  i32 row_op_is_mask;  // any number but 0 means merge
  const float* out_scale;  // for 8-bit types: one number each, on the device
  const float* a_scale;
  const float* b_scale;
  const u8* row_op;                    // JITKERN_CONTROL: a RowOp for each token, or null
  const i32* merged_tokens_on_device;  // JITKERN_CONTROL: takes the place of merged_tokens, or null
  Row2 out_stride, a_stride, b_stride;  // these only where not JITKERN_DENSE
  Row2 out_lse_stride, a_lse_stride, b_lse_stride;
};
static_assert(sizeof(MergeParams) == (sizeof(A) == 4 ? 224 : 240), "jitkern/ops/pairwise.py packs this block");

// Offsets of a row in one of the operands.
JITKERN_DEVICE u64 value_offset(const MergeParams& p, const Row2& stride, u32 t, u32 h) {
  if constexpr (kDense) return (static_cast<u64>(t) * p.heads + h) * kD;
  return offset<Stride>(stride, t, h);
}
JITKERN_DEVICE u64 lse_offset(const MergeParams& p, const Row2& stride, u32 t, u32 h) {
  if constexpr (JITKERN_DENSE == 1) return static_cast<u64>(t) * p.heads + h;
  if constexpr (JITKERN_DENSE == 2) return static_cast<u64>(h) * p.tokens + t;
  return offset<Stride>(stride, t, h);
}

// What happens to a token before its L is looked at: `merge` leaves it to L.
JITKERN_DEVICE Outcome control(const MergeParams& p, u32 token) {
  i64 merged = p.merged_tokens;
#if JITKERN_CONTROL
  if (p.merged_tokens_on_device) merged = *p.merged_tokens_on_device;
  if (p.row_op) {
    const u8 op = p.row_op[token];
    if (op == static_cast<u8>(RowOp::skip)) return Outcome::skip;
    if (!p.row_op_is_mask && op == static_cast<u8>(RowOp::copy_a)) return Outcome::copy_a;
    if (!p.row_op_is_mask && op == static_cast<u8>(RowOp::copy_b)) return Outcome::copy_b;
  }
#endif
  return static_cast<i64>(token) < merged ? Outcome::merge : Outcome::copy_b;
}

// Factors of the two sides, the scales of 8-bit types worked in.
JITKERN_DEVICE Merge<A> factors(const MergeParams& p, const Weights<A>& w) {
  Merge<A> f{w.a, w.b};
  if constexpr (kScaledIn) {
    f.weight_a = mul(f.weight_a, static_cast<A>(*p.a_scale));
    f.weight_b = mul(f.weight_b, static_cast<A>(*p.b_scale));
  }
  return f;
}
JITKERN_DEVICE Weights<A> settle(Outcome outcome, Weights<A> w) {
  if (outcome == Outcome::copy_a) w.a = 1, w.b = 0;
  if (outcome == Outcome::copy_b) w.a = 0, w.b = 1;
  return w;
}

#if JITKERN_ON_GPU
// A pack of the result. Which sides count is settled by selection, never by a weight of 0: 0 times NaN is NaN.
template <class From, class To>
JITKERN_DEVICE Pack<To, kPack> finish(Outcome outcome, const Merge<A>& f, A quantise, const Pack<From, kPack>& a,
                                      const Pack<From, kPack>& b) {
  A x[kPack], y[kPack];
  widen_pack(a, x);
  widen_pack(b, y);
  JITKERN_UNROLL
  for (int i = 0; i < kPack; ++i) {
    A z = f(x[i], y[i]);
    if constexpr (!kSameType) {
      if (outcome == Outcome::copy_a) z = mul(x[i], f.weight_a);
      if (outcome == Outcome::copy_b) z = mul(y[i], f.weight_b);
      if (outcome == Outcome::empty) z = 0;
    }
    x[i] = z;
    if constexpr (kScaledOut) x[i] = mul(x[i], quantise);
  }
  auto out = narrow_pack<To, kPack>(x);
  if constexpr (SameType<From, To>::value && kSameType) {
    if (outcome == Outcome::copy_a) out = a;
    if (outcome == Outcome::copy_b) out = b;
    if (outcome == Outcome::empty) out = Pack<To, kPack>{};
  }
  return out;
}
#else
// Element by element, for the compiler to vectorise. An output that is an input is the same view of it, so that no
// iteration reads what another one wrote.
template <class From, class To>
JITKERN_DEVICE void finish_row(Outcome outcome, const Merge<A>& f, A quantise, const From* a, const From* b, To* out) {
  if (outcome == Outcome::merge) {
    int i = 0;
#if JITKERN_HOST_HALF
    if constexpr (SameType<From, f16>::value && SameType<To, f16>::value) {
      for (; i + 8 <= kD; i += 8) narrow8(widen8(a + i) * f.weight_a + widen8(b + i) * f.weight_b, out + i);
    }
#endif
#pragma GCC ivdep
    for (; i < kD; ++i) narrow(mul(f(widen(a[i]), widen(b[i])), quantise), out[i]);
  } else if (outcome == Outcome::empty) {
    for (int i = 0; i < kD; ++i) out[i] = To{};
  } else if constexpr (kSameType) {
    __builtin_memmove(out, outcome == Outcome::copy_a ? a : b, sizeof(From) * kD);
  } else {
    const From* from = outcome == Outcome::copy_a ? a : b;
    const A factor = outcome == Outcome::copy_a ? f.weight_a : f.weight_b;
    for (int i = 0; i < kD; ++i) narrow(mul(mul(widen(from[i]), factor), quantise), out[i]);
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
  const int lane = static_cast<int>(threadIdx.x);
  const A* const a_lse_at = p.a_lse + lse_offset(p, p.a_lse_stride, t, h);
  const A* const b_lse_at = p.b_lse + lse_offset(p, p.b_lse_stride, t, h);
  const T* const a = p.a + value_offset(p, p.a_stride, t, h);
  const T* const b = p.b + value_offset(p, p.b_stride, t, h);
  Out* const out = p.out + value_offset(p, p.out_stride, t, h);
  wait_for_predecessor();

  A a_lse = *a_lse_at;
  A b_lse = *b_lse_at;
#if JITKERN_ON_GPU
  // Both sides are loaded whatever L will say: waiting for L first would double the latency. What is not wanted is not
  // used.
  auto pack_a = load_pack<T, kPack>(a + lane * kPack);
  auto pack_b = load_pack<T, kPack>(b + lane * kPack);
#endif
  Outcome outcome = control(p, t);
  if (p.lse_aliased) block_barrier();
  if (!inside || outcome == Outcome::skip) return;

  a_lse = mul(a_lse, p.a_to_out);
  b_lse = mul(b_lse, p.b_to_out);
  if (outcome == Outcome::merge) outcome = outcome_of(a_lse, b_lse);
  const Weights<A> w = weigh(a_lse, b_lse, p.out_to_e);
  const Merge<A> f = factors(p, kSameType ? w : settle(outcome, w));
  const A quantise = kScaledOut ? static_cast<A>(1) / static_cast<A>(*p.out_scale) : static_cast<A>(1);
#if JITKERN_ON_GPU
  store_pack<Out, kPack>(out + lane * kPack, finish<T, Out>(outcome, f, quantise, pack_a, pack_b));
  if constexpr (kPacks > kLanes) {
    for (int at = (lane + kLanes) * kPack; at < kD; at += kLanes * kPack) {
      pack_a = load_pack<T, kPack>(a + at);
      pack_b = load_pack<T, kPack>(b + at);
      store_pack<Out, kPack>(out + at, finish<T, Out>(outcome, f, quantise, pack_a, pack_b));
    }
  }
#else
  constexpr u64 row_bytes = sizeof(Out) * kD;
  constexpr u64 buffered = row_bytes <= 16384 ? row_bytes : 1;  // a row that fits in the first cache
  if (buffered > 1 && p.heads * row_bytes * p.tokens >= kStreamBytes && can_stream(out, row_bytes)) {
    alignas(64) Out row[buffered / sizeof(Out) + 1];
    finish_row(outcome, f, quantise, a, b, row);
    stream_row(out, row, row_bytes);
  } else {
    finish_row(outcome, f, quantise, a, b, out);
  }
#endif
  if (lane == 0 && p.out_lse) {
    p.out_lse[lse_offset(p, p.out_lse_stride, t, h)] = lse_of(outcome, w, a_lse, b_lse, p.e_to_out);
  }
}
