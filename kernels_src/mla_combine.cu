// mla_combine: join the pieces of split requests, and write the rows of requests that have no keys.
//
//   M = max L_i    L = M + log2 sum 2^(L_i - M)    O = sum 2^(L_i - L) O_i        (L_i = -inf: an empty piece)
//
// Requests of one piece were written by the decode and are left alone. A request without keys, a pad among them, gets
// O = 0 and L = `empty_lse`. The order of the sum is that of the keys, so the result is the same to the bit on each run.
//
// Launch: grid (slots * tiles), slots = min(batch, parts), tiles = ceil(heads * q_len / join_rows). Slot s joins the
// s-th split request and clears the pads s, s + slots, ... A block takes join_rows rows. With few pieces each of its warps
// joins whole rows by itself; with many, or a single row, its warps share the pieces of a row and meet in shared memory.
// Bytes moved: (4 kDV + 4) a piece and row of a split request, kDV sizeof(T) + 4 a row written.
//
// Holes (-D): JITKERN_ENTRY, JITKERN_T, JITKERN_D, JITKERN_DV.
#include "include/block_scan.cuh"
#include "include/mla_params.cuh"
#include "include/pack.cuh"
#include "include/tensor_core.cuh"

namespace jitkern {

constexpr int kPack = 4;
constexpr int kThreads = JITKERN_ON_GPU ? 256 : 1;
constexpr int kWarps = kThreads / kWarp;
constexpr int kLanePacks = kDV / (kPack * kWarp);  // of a row that one lane holds
constexpr int kAhead = JITKERN_ON_GPU ? 4 : 1;  // pieces of a warp whose loads are in flight together
constexpr int kFew = 4 * kAhead;                // pieces

#if !JITKERN_ON_GPU
JITKERN_DEVICE float exp2_fast(float x) { return __builtin_exp2f(x); }
JITKERN_DEVICE float log2_fast(float x) { return __builtin_log2f(x); }
#endif

JITKERN_DEVICE void store_quad(const DecodeParams& p, T* to, const float (&x)[kPack]) {
  Pack<T, kPack> pack;
  for (int e = 0; e < kPack; ++e) narrow(x[e], pack.element[e]);
  if (p.out_aligned) store_pack<T, kPack>(to, pack);
  else
    for (int e = 0; e < kPack; ++e) to[e] = pack.element[e];
}

JITKERN_DEVICE void write_empty(const DecodeParams& p, i32 request, Row row, int thread) {
  T* out = p.out + at(p.out_stride, request, row);
  const float zeros[kPack] = {};
  for (int c = thread * kPack; c < kDV; c += kThreads * kPack) store_quad(p, out + c, zeros);
  if (thread == 0) p.lse[at(p.lse_stride, request, row)] = p.empty_lse;
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
  Pack<f32, kPack> out[kAhead][kLanePacks];
  float lse[kAhead];
};
JITKERN_DEVICE void load_batch(Batch& batch, const Pieces& pieces, i32 first, i32 step, int lane) {
  for (int i = 0; i < kAhead; ++i) {
    if (first + i * step >= pieces.count) break;
    const i64 row = (first + i * step) * pieces.stride;
    batch.lse[i] = pieces.lse[row];
    for (int c = 0; c < kLanePacks; ++c)
      batch.out[i][c] = load_pack<f32, kPack>(pieces.out + row * kDV + (c * kWarp + lane) * kPack);
  }
}

using Columns = float[kLanePacks][kPack];  // a lane's columns: pack c is at (c kWarp + lane) kPack
using Sums = float[kWarps][kDV];

// Adds up the pieces first, first + step, ...; returns the joined L of all of them.
JITKERN_DEVICE float add_pieces(const Pieces& pieces, Columns& sum, i32 first, i32 step, int lane) {
  Batch batch;
  load_batch(batch, pieces, first, step, lane);  // before L is known: it does not wait for it
  const float lse = joined_lse(pieces, lane);
#pragma unroll 1
  for (i32 start = first; start < pieces.count; start += kAhead * step) {
    if (start > first) load_batch(batch, pieces, start, step, lane);
    for (int i = 0; i < kAhead; ++i) {
      if (start + i * step >= pieces.count) break;
      const float weight = lse == kMinusInfinity ? 0.0f : exp2_fast(batch.lse[i] - lse);
      for (int c = 0; c < kLanePacks; ++c)
        for (int e = 0; e < kPack; ++e) sum[c][e] += weight * batch.out[i][c].element[e];
    }
  }
  return lse;
}

JITKERN_DEVICE void store_lse(const DecodeParams& p, i32 request, Row row, float lse) {
  p.lse[at(p.lse_stride, request, row)] = lse == kMinusInfinity ? p.empty_lse : lse * p.lse_unit;
}

JITKERN_DEVICE void store_columns(const DecodeParams& p, T* out, const Columns& sum, int lane) {
  for (int c = 0; c < kLanePacks; ++c) store_quad(p, out + (c * kWarp + lane) * kPack, sum[c]);
}

// Adds up what the warps have and stores it.
JITKERN_DEVICE void meet_and_store(const DecodeParams& p, T* out, const Columns& sum, i32 count, Sums& sums, int thread) {
  const int warp = thread / kWarp, lane = thread % kWarp;
  for (int c = 0; c < kLanePacks; ++c)
    for (int e = 0; e < kPack; ++e) sums[warp][(c * kWarp + lane) * kPack + e] = sum[c][e];
  block_barrier();
  const int warps = min_of(kWarps, count);
  for (int c = thread * kPack; c < kDV; c += kThreads * kPack) {
    float total[kPack] = {};
    for (int w = 0; w < warps; ++w)
      for (int e = 0; e < kPack; ++e) total[e] += sums[w][c + e];
    store_quad(p, out + c, total);
  }
  block_barrier();  // before the sums are used for the next row
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
  const int thread = static_cast<int>(threadIdx.x);
  const i32 rows_k = p.group * p.q_len, rows = rows_k * p.heads_k;
  const i32 tiles = ceil_div(rows, p.join_rows);
  const i32 slot = static_cast<i32>(blockIdx.x / static_cast<u32>(tiles));
  const i32 slots = static_cast<i32>(gridDim.x / static_cast<u32>(tiles));
  const i32 first = (static_cast<i32>(blockIdx.x) - slot * tiles) * p.join_rows;
  const i32 last = min_of(first + p.join_rows, rows);
  const i32 split = p.plan.split[slot];
#pragma unroll 1
  for (i32 request = slot; request < p.batch; request += slots) {
    if (p.plan.rows[request] != kEmpty) continue;
#pragma unroll 1
    for (i32 row = first; row < last; ++row)
      write_empty(p, request, row_of(p, row / rows_k, row % rows_k), thread);
  }
  if (split < 0 || split >= p.batch) return;
  const i32 first_row = p.plan.rows[split];
  const i32 count = p.plan.num_splits[split + 1] - p.plan.num_splits[split];
  const bool by_warp = p.join_rows > 1 && count <= kFew;
  const int warp = thread / kWarp, lane = thread % kWarp;
#pragma unroll 1
  for (i32 row = first + (by_warp ? warp : 0); row < last; row += by_warp ? kWarps : 1) {
    const Row where = row_of(p, row / rows_k, row % rows_k);
    T* out = p.out + at(p.out_stride, split, where);
    Columns sum = {};
    const float lse = add_pieces(pieces_of(p, first_row, count, row), sum, by_warp ? 0 : warp, by_warp ? 1 : kWarps, lane);
    if (by_warp) store_columns(p, out, sum, lane);
    else meet_and_store(p, out, sum, count, sums, thread);
    if (lane == 0 && (by_warp || warp == 0)) store_lse(p, split, where, lse);
  }
}
