// merge_states: combine any number of partial attention states of the same queries in one pass, accumulated in float.
// The formula and where the partials lie: include/partials.cuh.
//
// Partials come stacked in one tensor, as a list of separate ones (their addresses travel in the parameter block), or
// ragged, a varying number for each token. A partial whose L is +-inf does not count and its O is not used. One live
// partial comes out bit for bit. None: O = 0, L = -inf, or the sink's.
//
// Launch: as merge_attn_states, block (kLanes, heads, tokens), grid (head tiles, token tiles, further token tiles). A
// thread owns a pack of the row and walks the partials kAtOnce at a time, so that as many loads are in flight; the
// running maximum is brought up to date once for each such group.
// Bytes moved: tokens * heads * ((partials + 1) (D sizeof(T) + 4)).
//
// Holes (-D): JITKERN_ENTRY, JITKERN_T, JITKERN_PACK, JITKERN_D, JITKERN_LIST (1: stacked or ragged; else the most
// tensors of a list), JITKERN_STRIDE (32, or 64).
#include "include/partials.cuh"

namespace jitkern {

constexpr int kMaxThreads = 128;
constexpr int kLanes = JITKERN_ON_GPU ? (kPacks < kMaxThreads ? kPacks : kMaxThreads) : 1;
constexpr int kAtOnce = 4;
constexpr int kWidth = JITKERN_ON_GPU ? kPack : kD;  // elements that a thread accumulates at a time

struct StatesParams {
  Partials partials;
  T* out;
  A* out_lse;         // may be null
  const float* sink;  // [heads], in units of the natural logarithm; may be null
  Rows rows;
  Row2 out_stride, out_lse_stride;
  u32 tokens, heads;
  A in_to_out;  // ln(base of the partials' L) / ln(base of the output's)
  A out_to_e;   // ln(base of the output)
  A e_to_out;
  i32 sink_in_lse;
  i32 lse_aliased;
};

#if JITKERN_ON_GPU
using Slice = Pack<T, kPack>;
JITKERN_DEVICE Slice load_slice(const T* row, int at) { return load_pack<T, kPack>(row + at); }
JITKERN_DEVICE void store_slice(T* row, int at, const Slice& slice) { store_pack<T, kPack>(row + at, slice); }
JITKERN_DEVICE void accumulate(A (&sum)[kWidth], A weight, const Slice& slice) {
  A x[kWidth];
  widen_pack(slice, x);
  JITKERN_UNROLL
  for (int i = 0; i < kWidth; ++i) sum[i] = fma(weight, x[i], sum[i]);
}
JITKERN_DEVICE void store_sum(T* row, int at, const A (&sum)[kWidth]) {
  store_pack<T, kPack>(row + at, narrow_pack<T, kPack>(sum));
}
#else
using Slice = const T*;  // the row itself
JITKERN_DEVICE Slice load_slice(const T* row, int) { return row; }
JITKERN_DEVICE void store_slice(T* row, int, Slice slice) { __builtin_memmove(row, slice, sizeof(T) * kD); }
JITKERN_DEVICE void accumulate(A (&sum)[kWidth], A weight, Slice slice) {
  for (int i = 0; i < kWidth; ++i) sum[i] = fma(weight, widen(slice[i]), sum[i]);
}
JITKERN_DEVICE void store_sum(T* row, int, const A (&sum)[kWidth]) {
  for (int i = 0; i < kWidth; ++i) narrow(sum[i], row[i]);
}
#endif

// Sum of the partials so far: O = sum / weight, with all weights relative to `top`.
struct Running {
  A sum[kWidth];
  A weight, top;
  u32 live;
  Slice last;  // the last live partial, as it is
};

JITKERN_DEVICE void rescale(Running& r, A top, A out_to_e) {
  // Nothing yet: -inf minus a number is -inf, whose exponential is 0.
  const A factor = exp_nonpositive(mul(add(r.top, -top), out_to_e));
  r.weight = mul(r.weight, factor);
  for (int i = 0; i < kWidth; ++i) r.sum[i] = mul(r.sum[i], factor);
  r.top = top;
}

JITKERN_DEVICE void add_group(Running& r, const StatesParams& p, const Range& range, u32 from, u32 t, u32 h, int at) {
  A lse[kAtOnce];
  Slice slice[kAtOnce];
  JITKERN_UNROLL
  for (int j = 0; j < kAtOnce; ++j) {
    lse[j] = minus_infinity<A>();
    slice[j] = Slice{};
    if (from + j < range.count) {  // the same for the whole row: no load waits for another
      lse[j] = *lse_cell(p.partials, p.rows, range.first + from + j, t, h);
      slice[j] = load_slice(value_row(p.partials, p.rows, range.first + from + j, t, h), at);
    }
  }
  A top = r.top;
  JITKERN_UNROLL
  for (int j = 0; j < kAtOnce; ++j) {
    lse[j] = normal_lse(lse[j], p.in_to_out);
    top = lse[j] > top ? lse[j] : top;
  }
  rescale(r, is_live(top) ? top : static_cast<A>(0), p.out_to_e);
  JITKERN_UNROLL
  for (int j = 0; j < kAtOnce; ++j) {
    if (!is_live(lse[j])) continue;
    const A weight = exp_nonpositive(mul(add(lse[j], -r.top), p.out_to_e));
    r.weight = add(r.weight, weight);
    accumulate(r.sum, weight, slice[j]);
    r.live += 1;
    r.last = slice[j];
  }
  if (!is_live(top)) r.top = top;
}

}  // namespace jitkern

JITKERN_EXPORT(jitkern::StatesParams)

JITKERN_KERNEL(jitkern::StatesParams, jitkern::kMaxThreads) {
  using namespace jitkern;
  const u32 token = (blockIdx.z * gridDim.y + blockIdx.y) * blockDim.z + threadIdx.z;
  const u32 head = blockIdx.x * blockDim.y + threadIdx.y;
  const bool inside = token < p.tokens && head < p.heads;
  const u32 t = inside ? token : 0;
  const u32 h = inside ? head : 0;
  const int lane = static_cast<int>(threadIdx.x);
  wait_for_predecessor();

  const Range range = range_of(p.rows, t);
  const A sink = p.sink ? mul(static_cast<A>(p.sink[h]), p.e_to_out) : minus_infinity<A>();
  T* out = p.out + offset<Stride>(p.out_stride, t, h);
  A lse = minus_infinity<A>();
  for (int at = lane * kPack; inside && at < kD; at += JITKERN_ON_GPU ? kLanes * kPack : kD) {
    Running r = {};
    r.top = minus_infinity<A>();
    for (u32 from = 0; from < range.count; from += kAtOnce) add_group(r, p, range, from, t, h, at);
    const A own = r.live == 0 ? r.top : add(r.top, mul(log_from_one(r.weight), p.e_to_out));
    if (r.live == 1 && sink == minus_infinity<A>()) {
      store_slice(out, at, r.last);
      lse = r.top == r.top ? r.top : own;
      if (r.weight != r.weight) lse = r.weight;  // the one partial's L is NaN
      continue;
    }
    A all = own;
    if (sink != minus_infinity<A>()) {
      if (sink == -minus_infinity<A>()) {
        r.weight = 1;
        for (int i = 0; i < kWidth; ++i) r.sum[i] = 0;
        all = sink;
      } else {
        rescale(r, r.live == 0 || sink > r.top ? sink : r.top, p.out_to_e);
        r.weight = add(r.weight, exp_nonpositive(mul(add(sink, -r.top), p.out_to_e)));
        all = add(r.top, mul(log_from_one(r.weight), p.e_to_out));
      }
    }
    const A share = r.live == 0 ? static_cast<A>(0) : reciprocal(r.weight);
    for (int i = 0; i < kWidth; ++i) r.sum[i] = r.live == 0 ? static_cast<A>(0) : mul(r.sum[i], share);
    store_sum(out, at, r.sum);
    lse = p.sink_in_lse ? all : own;
  }
  if (p.lse_aliased) block_barrier();
  if (inside && lane == 0 && p.out_lse) p.out_lse[offset<Stride>(p.out_lse_stride, t, h)] = lse;
}
