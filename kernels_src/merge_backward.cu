// merge_backward: the gradient of a merge of N partial states, with respect to every O and every L.
//
//   dO_i = w_i dO      dL_i = w_i ln(base) (<dO, O_i> - <dO, O>) + p_i dL
//
// with w_i the weights of include/partials.cuh, and p_i the weights without the sink where L leaves it out. An empty
// partial, whose O is undefined, gets zeros. Tokens from `merged_tokens` on are copies of partial 1 (merge_attn_states).
//
// Launch: block (32, rows), one warp a row, grid (rows of a token / block y, tokens, further tokens); on the CPU one
// thread a row. Sums over the head are taken by the warp in a fixed order.
// Bytes moved: tokens * heads * partials * D * 3 sizeof(T), roughly.
//
// Holes (-D): JITKERN_ENTRY, JITKERN_T, JITKERN_PACK, JITKERN_D, JITKERN_LIST (the most tensors of a list; 1: stacked or
// ragged), JITKERN_STRIDE.
#include "include/partials.cuh"

namespace jitkern {

constexpr int kRowsPerBlock = 4;
constexpr int kMaxThreads = 32 * kRowsPerBlock;
constexpr int kLanes = JITKERN_ON_GPU ? 32 : 1;

struct BackwardParams {
  Partials partials;
  PartialsOf<T, A> gradients;
  const T* grad_out;
  const A* grad_lse;  // may be null
  const float* sink;  // [heads]; may be null
  Rows rows, gradient_rows;
  Row2 grad_out_stride, grad_lse_stride;
  i64 merged_tokens;
  u32 tokens, heads;
  A in_to_out[2];  // of partial 0 and of the others
  A out_to_e, e_to_out;
  i32 sink_in_lse;
};

JITKERN_DEVICE A sum_of_lanes(A x) {
#if JITKERN_ON_GPU
  for (int distance = 16; distance > 0; distance /= 2) x = add(x, __shfl_xor_sync(0xffffffffu, x, distance));
#endif
  return x;
}

// <dO, O_i> of a row.
JITKERN_DEVICE A inner_product(const T* x, const T* y, int lane) {
  A sum = 0;
  for (int i = lane; i < kD; i += kLanes) sum = fma(widen(x[i]), widen(y[i]), sum);
  return sum_of_lanes(sum);
}

JITKERN_DEVICE A lse_in_out_base(const BackwardParams& p, u32 i, u32 t, u32 h) {
  return normal_lse(*lse_cell(p.partials, p.rows, i, t, h), p.in_to_out[i > 0]);
}

// exp(L_i - top) sums to `without`; w_i = exp(L_i - top) scale / with_sink.
struct Denominators {
  A top, without, scale, with_sink;
};

JITKERN_DEVICE A power(const BackwardParams& p, A difference) { return exp_nonpositive(mul(difference, p.out_to_e)); }

JITKERN_DEVICE Denominators denominators(const BackwardParams& p, const Range& range, u32 t, u32 h) {
  Denominators d{minus_infinity<A>(), 0, 1, 0};
  for (u32 i = 0; i < range.count; ++i) {
    const A lse = lse_in_out_base(p, range.first + i, t, h);
    d.top = lse > d.top ? lse : d.top;
  }
  for (u32 i = 0; i < range.count; ++i) {
    const A lse = lse_in_out_base(p, range.first + i, t, h);
    if (is_live(lse)) d.without = add(d.without, power(p, add(lse, -d.top)));
  }
  const A sink = p.sink ? mul(static_cast<A>(p.sink[h]), p.e_to_out) : minus_infinity<A>();
  // Both are taken relative to the larger of the two, so that neither overflows.
  d.scale = sink > d.top ? power(p, add(d.top, -sink)) : static_cast<A>(1);
  const A of_sink = sink > d.top ? static_cast<A>(1) : power(p, add(sink, -d.top));
  d.with_sink = sink == minus_infinity<A>() ? d.without : fma(d.without, d.scale, of_sink);
  return d;
}

JITKERN_DEVICE void write_scaled(T* to, const T* from, A factor, int lane) {
  for (int i = lane; i < kD; i += kLanes) narrow(factor == 0 ? static_cast<A>(0) : mul(factor, widen(from[i])), to[i]);
}

JITKERN_DEVICE void merged_row(const BackwardParams& p, const Range& range, u32 t, u32 h, int lane) {
  const T* grad_out = p.grad_out + offset<Stride>(p.grad_out_stride, t, h);
  const A grad_lse = p.grad_lse ? p.grad_lse[offset<Stride>(p.grad_lse_stride, t, h)] : static_cast<A>(0);
  const Denominators d = denominators(p, range, t, h);
  A mean = 0;  // <dO, O>
  for (u32 i = 0; i < range.count; ++i) {
    const A lse = lse_in_out_base(p, range.first + i, t, h);
    A product = 0;
    if (is_live(lse)) {
      product = inner_product(grad_out, value_row(p.partials, p.rows, range.first + i, t, h), lane);
      const A weight = mul(power(p, add(lse, -d.top)), d.scale) / d.with_sink;
      mean = fma(weight, product, mean);
    }
    // Kept in its place in the result until the mean is known.
    if (lane == 0) *lse_cell(p.gradients, p.gradient_rows, range.first + i, t, h) = product;
  }
  for (u32 i = 0; i < range.count; ++i) {
    const A lse = lse_in_out_base(p, range.first + i, t, h);
    const A term = is_live(lse) ? power(p, add(lse, -d.top)) : static_cast<A>(0);
    const A weight = is_live(lse) ? mul(term, d.scale) / d.with_sink : static_cast<A>(0);
    if (lane == 0) {
      A* cell = lse_cell(p.gradients, p.gradient_rows, range.first + i, t, h);
      const A share = is_live(lse) ? (p.sink_in_lse ? weight : term / d.without) : static_cast<A>(0);
      const A grad = fma(mul(weight, p.out_to_e), add(*cell, -mean), mul(share, grad_lse));
      *cell = is_live(lse) ? mul(grad, p.in_to_out[range.first + i > 0]) : static_cast<A>(0);
    }
    write_scaled(value_row(p.gradients, p.gradient_rows, range.first + i, t, h), grad_out, weight, lane);
  }
}

// A copied token: all of the gradient goes to partial 1.
JITKERN_DEVICE void copied_row(const BackwardParams& p, u32 t, u32 h, int lane) {
  const T* grad_out = p.grad_out + offset<Stride>(p.grad_out_stride, t, h);
  const A grad_lse = p.grad_lse ? p.grad_lse[offset<Stride>(p.grad_lse_stride, t, h)] : static_cast<A>(0);
  for (u32 i = 0; i < 2; ++i) {
    const A factor = static_cast<A>(i);
    write_scaled(value_row(p.gradients, p.gradient_rows, i, t, h), grad_out, factor, lane);
    if (lane == 0) *lse_cell(p.gradients, p.gradient_rows, i, t, h) = i ? mul(grad_lse, p.in_to_out[1]) : static_cast<A>(0);
  }
}

}  // namespace jitkern

JITKERN_EXPORT(jitkern::BackwardParams)

JITKERN_KERNEL(jitkern::BackwardParams, jitkern::kMaxThreads) {
  using namespace jitkern;
  const u32 t = blockIdx.z * gridDim.y + blockIdx.y;
  const u32 h = blockIdx.x * blockDim.y + threadIdx.y;
  const int lane = static_cast<int>(threadIdx.x);
  if (t >= p.tokens || h >= p.heads) return;  // whole warps, so that the sums below are of whole warps
  if (static_cast<i64>(t) < p.merged_tokens) {
    merged_row(p, range_of(p.rows, t), t, h, lane);
  } else {
    copied_row(p, t, h, lane);
  }
}
