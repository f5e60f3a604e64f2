// merge_states: combine any number of partial attention states of the same queries in one pass, accumulated
// in float. The formula and where the partials lie: include/partials.cuh.
//
// Partials come stacked in one tensor, as a list of separate ones (their addresses travel in the parameter
// block), or ragged, a varying number for each token. A partial whose L is +-inf does not count and its O is
// not used. One live partial comes out bit for bit. None: O = 0, L = -inf, or the sink's.
//
// Launch: as merge_attn_states, block (kLanes, heads, tokens), grid (head tiles, token tiles, further token
// tiles). Partials are added up kAtOnce at a time, the running maximum is brought up to date once for each
// such group. Where their number is compiled in, everything is loaded before anything is waited for; else a
// group is. The groups are the same either way, and so is every bit. Bytes moved: tokens * heads * ((partials
// + 1) (D sizeof(T) + 4)).
//
// Holes (-D): JITKERN_ENTRY, JITKERN_T, JITKERN_PACK, JITKERN_D, JITKERN_LIST (1: stacked or ragged; else the
// most tensors of a list), JITKERN_STRIDE (32, or 64), JITKERN_COUNT (partials of every token, a list's as
// many as it has room for and of the same strides; 0: the parameter block says).
#include "include/partials.cuh"
#include "include/running_sum.cuh"

namespace jitkern {

constexpr int kMaxThreads = 128;  // in a block
constexpr int kLanes = JITKERN_ON_GPU ? (kPacks < kMaxThreads ? kPacks : kMaxThreads) : 1;
constexpr u32 kAtOnce = 4;

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

// Where a thread is: a row, the partials that it has, and the first element of the thread's in it.
struct Place {
  u32 t, h;
  Range range;
  int at;
};

JITKERN_DEVICE const A* lse_at(const StatesParams& p, const Place& place, u32 i) {
  return lse_cell(p.partials, p.rows, i, place.t, place.h);
}
JITKERN_DEVICE const T* values_at(const StatesParams& p, const Place& place, u32 i) {
  return value_row(p.partials, p.rows, i, place.t, place.h) + place.at;
}

// Neighbouring partials as they were loaded.
template <u32 N>
struct Group {
  A lse[N];
  Slice slice[N];
};

// A stack is walked: a product for each partial would be most of a load's instructions.
template <u32 N>
JITKERN_DEVICE Group<N> load_group(const StatesParams& p, const Place& place, u32 from) {
  Group<N> g;
  const u32 first = place.range.first + from;
  const A* s = lse_at(p, place, first);
  const T* v = values_at(p, place, first);
  JITKERN_UNROLL
  for (u32 j = 0; j < N; ++j, s += p.rows.s_partial) {
    g.lse[j] = *(kList > 1 ? lse_at(p, place, first + j) : s);
  }
  JITKERN_UNROLL
  for (u32 j = 0; j < N; ++j, v += p.rows.v_partial) {
    g.slice[j] = load_slice(kList > 1 ? values_at(p, place, first + j) : v);
  }
  return g;
}

// Makes the highest of N new L the top; counts their weights in.
template <u32 N>
JITKERN_DEVICE void weigh_group(Running& r, const A (&lse)[N], A (&weight)[N], A out_to_e, bool first) {
  A top = r.top;
  JITKERN_UNROLL
  for (u32 j = 0; j < N; ++j) top = lse[j] > top ? lse[j] : top;
  const A base = top == minus_infinity<A>() ? static_cast<A>(0) : top;
  if (!first) rescale(r, base, out_to_e);
  JITKERN_UNROLL
  for (u32 j = 0; j < N; ++j) {
    weight[j] = exp_nonpositive(mul(add(lse[j], -base), out_to_e));  // of -inf: 0
    r.weight = add(r.weight, weight[j]);
  }
  r.top = top;
}

// Partials kFrom to kFrom + N of those loaded.
template <u32 N, u32 kFrom, u32 M>
JITKERN_DEVICE void add_group(Running& r, const StatesParams& p, const Group<M>& g, bool first) {
  A lse[N], weight[N];
  bool all_live = true;
  JITKERN_UNROLL
  for (u32 j = 0; j < N; ++j) {
    lse[j] = normal_lse(g.lse[kFrom + j], p.in_to_out);
    all_live = all_live && lse[j] != minus_infinity<A>();
  }
  weigh_group(r, lse, weight, p.out_to_e, first);
  // Twice, so that what is rare does not cost the rest a branch or a selection for each partial. (Behind a
  // branch alone the compiler also loads where it uses.)
  if (all_live) {
    JITKERN_UNROLL
    for (u32 j = 0; j < N; ++j) accumulate(r, weight[j], g.slice[kFrom + j]);
  } else {
    JITKERN_UNROLL
    for (u32 j = 0; j < N; ++j) {
      if (lse[j] != minus_infinity<A>()) accumulate(r, weight[j], g.slice[kFrom + j]);
    }
  }
}

template <u32 kFrom, u32 M>
JITKERN_DEVICE void add_groups(Running& r, const StatesParams& p, const Group<M>& g, bool first) {
  if constexpr (kFrom < M) {
    add_group<(M - kFrom < kAtOnce ? M - kFrom : kAtOnce), kFrom>(r, p, g, first);
    add_groups<kFrom + kAtOnce>(r, p, g, false);
  }
}

template <u32 N>
JITKERN_DEVICE void add_partials(Running& r, const StatesParams& p, const Place& place, u32 from) {
  add_groups<0>(r, p, load_group<N>(p, place, from), from == 0);
}

// What is left after the whole groups. Not one group with holes in it: what is absent would take as many
// instructions as what is there. (A switch: NVRTC's code for a chain of conditions is 2 % longer.)
JITKERN_DEVICE void add_tail(Running& r, const StatesParams& p, const Place& place, u32 from) {
  static_assert(kAtOnce == 4, "there is a case for each smaller number");
  switch (place.range.count - from) {
    case 1:
      return add_partials<1>(r, p, place, from);
    case 2:
      return add_partials<2>(r, p, place, from);
    case 3:
      return add_partials<3>(r, p, place, from);
  }
}

JITKERN_DEVICE Running sum_of_partials(const StatesParams& p, const Place& place) {
  Running r = {};
  r.top = minus_infinity<A>();
  if constexpr (kCount != 0) {
    add_partials<kCount>(r, p, place, 0);
  } else {
    u32 from = 0;
    for (; from + kAtOnce <= place.range.count; from += kAtOnce) add_partials<kAtOnce>(r, p, place, from);
    add_tail(r, p, place, from);
  }
  return r;
}

// How many partials are live, and the last such.
struct Live {
  u32 count, last;
  A lse;
};

JITKERN_DEVICE Live find_live(const StatesParams& p, const Place& place) {
  Live live = {};
  for (u32 j = 0; j < place.range.count; ++j) {
    const u32 i = place.range.first + j;
    const A lse = normal_lse(*lse_at(p, place, i), p.in_to_out);
    if (lse != minus_infinity<A>()) live = {live.count + 1, i, lse};
  }
  return live;
}

// Counts the sink in; returns the row's L with it.
JITKERN_DEVICE A add_sink(Running& r, const StatesParams& p, A sink) {
  if (sink == -minus_infinity<A>()) {
    r.weight = 1;
    for (int i = 0; i < kWidth; ++i) r.sum[i] = 0;
    return sink;
  }
  rescale(r, sink > r.top ? sink : r.top, p.out_to_e);
  r.weight = add(r.weight, exp_nonpositive(mul(add(sink, -r.top), p.out_to_e)));
  return add(r.top, mul(log_from_one(r.weight), p.e_to_out));
}

// A thread's part of a row; returns the row's L.
JITKERN_DEVICE A merge_row(const StatesParams& p, const Place& place, bool inside) {
  T* const out = p.out + offset<Stride>(p.out_stride, place.t, place.h) + place.at;
  const float logit = p.sink ? p.sink[place.h] : minus_infinity<float>();
  Running r = sum_of_partials(p, place);
  const A sink = mul(static_cast<A>(logit), p.e_to_out);  // not before: the partials' loads would wait for it
  const bool none = r.weight == 0, sunk = sink != minus_infinity<A>();
  // The largest weight is 1, so a larger sum is of at least two. Counting them is left to what is rare.
  if (!none && !sunk && !(r.weight > 1)) {
    const Live live = find_live(p, place);
    if (live.count == 1) {
      const Slice slice = load_slice(values_at(p, place, live.last));
      if (inside) store_slice(out, slice);
      return live.lse;
    }
  }
  A lse = none ? r.top : add(r.top, mul(log_from_one(r.weight), p.e_to_out));
  if (sunk) {
    const A all = add_sink(r, p, sink);
    if (p.sink_in_lse) lse = all;
  }
  const A share = none ? static_cast<A>(0) : reciprocal(r.weight);
  for (int i = 0; i < kWidth; ++i) r.sum[i] = mul(r.sum[i], share);
  if (inside) store_sum(out, r);
  return lse;
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

  Place place{t, h, range_of(p.rows, t), lane * kPack};
  const A lse = merge_row(p, place, inside);
  if constexpr (kPacks > kLanes && JITKERN_ON_GPU) {
    for (place.at += kLanes * kPack; place.at < kD; place.at += kLanes * kPack) merge_row(p, place, inside);
  }
  if (p.lse_aliased) block_barrier();
  if (inside && lane == 0 && p.out_lse) p.out_lse[offset<Stride>(p.out_lse_stride, t, h)] = lse;
}
