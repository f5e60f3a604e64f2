// mla_combine: join the pieces of split requests, and write the rows of requests that have no keys.
//
//   M = max L_i    L = M + log2 sum 2^(L_i - M)    O = sum 2^(L_i - L) O_i        (L_i = -inf: an empty piece)
//
// Requests of one piece were written by the decode and are left alone. A request without keys, a pad among them, gets
// O = 0 and L = `empty_lse`. The order of the sum is that of the keys, so the result is the same to the bit on each run.
//
// A unit is a stripe of 128 columns of one row. Launch: grid (slots * tiles), slots = min(batch, parts), tiles =
// ceil(units / join_units). Slot s joins the s-th split request and clears the pads s, s + slots, ... A block takes
// join_units units. With few pieces each of its warps joins units by itself; with many, or few units, its warps share the
// pieces of a unit and meet in shared memory.
// Bytes moved: (4 kDV + 16) a piece and row of a split request, kDV sizeof(T) + 4 a row written.
//
// Holes (-D): JITKERN_ENTRY, JITKERN_T, JITKERN_D, JITKERN_DV.
#include "include/block_scan.cuh"
#include "include/mla_params.cuh"
#include "include/pack.cuh"
#include "include/tensor_core.cuh"

namespace jitkern {

constexpr int kPack = JITKERN_ON_GPU ? 4 : kDV;
constexpr int kThreads = JITKERN_ON_GPU ? 256 : 1;
constexpr int kWarps = kThreads / kWarp;
constexpr int kStripe = kPack * kWarp;  // columns of a unit, a pack for each lane
constexpr int kStripes = kDV / kStripe;
constexpr int kAhead = JITKERN_ON_GPU ? 8 : 1;  // pieces of a warp whose loads are in flight together
constexpr int kFew = 3 * kAhead;

#if !JITKERN_ON_GPU
JITKERN_DEVICE float exp2_fast(float x) { return __builtin_exp2f(x); }
JITKERN_DEVICE float log2_fast(float x) { return __builtin_log2f(x); }
#endif

using Columns = float[kPack];  // of one lane

// Rounds and stores; `out_aligned` says whether that may be one access.
JITKERN_DEVICE void store_columns(const DecodeParams& p, T* to, const Columns& x) {
#if JITKERN_ON_GPU
  if (p.out_aligned) return store_pack<T, kPack>(to, narrow_pack<T, kPack>(x));
#endif
  for (int e = 0; e < kPack; ++e) narrow(x[e], to[e]);
}

JITKERN_DEVICE void load_columns(const f32* from, Columns& x) {
#if JITKERN_ON_GPU
  widen_pack(load_pack<f32, kPack>(from), x);
#else
  for (int e = 0; e < kPack; ++e) x[e] = from[e];
#endif
}

JITKERN_DEVICE void write_empty(const DecodeParams& p, i32 request, i32 rows_k, i32 unit, int lane) {
  const i32 r = unit / kStripes, column = unit % kStripes * kStripe + lane * kPack;
  const Row row = row_of(p, r / rows_k, r % rows_k);
  const Columns zeros = {};
  store_columns(p, p.out + at(p.out_stride, request, row) + column, zeros);
  if (column == 0) p.lse[at(p.lse_stride, request, row)] = p.empty_lse;
}

struct Pieces {
  const f32* lse;
  const f32* out;
  i64 stride;  // from a piece to the next, in rows
  i32 count;
};

// Every warp finds L by itself: the lanes share the pieces out.
JITKERN_DEVICE float joined_lse(const Pieces& pieces, int lane) {
  float max = kMinusInfinity;
  for (i32 i = lane; i < pieces.count; i += kWarp) {
    const float lse = pieces.lse[i * pieces.stride];
    max = lse > max ? lse : max;
  }
  max = warp_max(max);
  const float shift = max == kMinusInfinity ? 0.0f : max;
  float sum = 0.0f;
  for (i32 i = lane; i < pieces.count; i += kWarp) sum += exp2_fast(pieces.lse[i * pieces.stride] - shift);
  sum = warp_sum(sum);
  return sum == 0.0f ? kMinusInfinity : shift + log2_fast(sum);
}

struct Batch {  // a lane's columns of kAhead pieces, loaded together
  Columns out[kAhead];
  float lse[kAhead];
};
JITKERN_DEVICE void load_batch(Batch& batch, const Pieces& pieces, i32 first, i32 step, int column) {
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (first + i * step >= pieces.count) continue;
    const i64 row = (first + i * step) * pieces.stride;
    batch.lse[i] = pieces.lse[row];
    load_columns(pieces.out + row * kDV + column, batch.out[i]);
  }
}

// Adds up the pieces first, first + step, ...; returns the joined L of all of them.
JITKERN_DEVICE float add_pieces(const Pieces& pieces, Columns& sum, i32 first, i32 step, int column, int lane) {
  Batch batch;
  load_batch(batch, pieces, first, step, column);  // before L is known: it does not wait for it
  const float lse = joined_lse(pieces, lane);
#pragma unroll 1
  for (i32 start = first; start < pieces.count; start += kAhead * step) {
    if (start > first) load_batch(batch, pieces, start, step, column);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (start + i * step >= pieces.count) continue;
      const float weight = lse == kMinusInfinity ? 0.0f : exp2_fast(batch.lse[i] - lse);
      for (int e = 0; e < kPack; ++e) sum[e] += weight * batch.out[i][e];
    }
  }
  return lse;
}

using Sums = float[kWarps][kStripe];

// Adds up what the warps have; the first warp gets it.
JITKERN_DEVICE void meet(Columns& sum, i32 count, Sums& sums, int warp, int lane) {
  for (int e = 0; e < kPack; ++e) sums[warp][lane * kPack + e] = sum[e];
  block_barrier();
  const int warps = warp == 0 ? min_of(kWarps, count) : 0;
  for (int w = 1; w < warps; ++w)
    for (int e = 0; e < kPack; ++e) sum[e] += sums[w][lane * kPack + e];
  block_barrier();  // before the sums are used for the next unit
}

JITKERN_DEVICE Pieces pieces_of(const DecodeParams& p, i32 first_row, i32 count, i32 row) {
  const i64 rows = static_cast<i64>(p.heads_k) * p.group * p.q_len;  // of one piece; KV head major, as `row` counts
  const i64 first = first_row * rows + row;
  return Pieces{p.partial_lse + first, p.partial_out + first * kDV, rows, count};
}

}  // namespace jitkern

JITKERN_EXPORT(jitkern::DecodeParams)

JITKERN_KERNEL(jitkern::DecodeParams, jitkern::kThreads) {
  using namespace jitkern;
  JITKERN_SHARED Sums sums;
  wait_for_predecessor();
  let_next_kernel_start();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const i32 rows_k = p.group * p.q_len, units = rows_k * p.heads_k * kStripes;
  const i32 tiles = ceil_div(units, p.join_units);
  const i32 slot = static_cast<i32>(blockIdx.x / static_cast<u32>(tiles));
  const i32 slots = static_cast<i32>(gridDim.x / static_cast<u32>(tiles));
  const i32 first = (static_cast<i32>(blockIdx.x) - slot * tiles) * p.join_units;
  const i32 last = min_of(first + p.join_units, units);
  const Split split = p.plan.split[slot];
#pragma unroll 1
  for (i32 request = slot; request < p.batch; request += slots) {
    if (p.plan.rows[request] != kEmpty) continue;
#pragma unroll 1
    for (i32 unit = first + warp; unit < last; unit += kWarps) write_empty(p, request, rows_k, unit, lane);
  }
  if (split.request < 0 || split.request >= p.batch) return;
  const bool by_warp = p.join_units >= kWarps && split.pieces <= kFew;
#pragma unroll 1
  for (i32 unit = first + (by_warp ? warp : 0); unit < last; unit += by_warp ? kWarps : 1) {
    const i32 r = unit / kStripes, column = unit % kStripes * kStripe + lane * kPack;
    const Pieces pieces = pieces_of(p, split.first_row, split.pieces, r);
    Columns sum = {};
    const float lse = add_pieces(pieces, sum, by_warp ? 0 : warp, by_warp ? 1 : kWarps, column, lane);
    if (!by_warp) meet(sum, split.pieces, sums, warp, lane);
    if (!by_warp && warp > 0) continue;
    const Row row = row_of(p, r / rows_k, r % rows_k);
    store_columns(p, p.out + at(p.out_stride, split.request, row) + column, sum);
    if (column == 0)
      p.lse[at(p.lse_stride, split.request, row)] = lse == kMinusInfinity ? p.empty_lse : lse * p.lse_unit;
  }
}
