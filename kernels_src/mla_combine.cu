// mla_combine: join the pieces of split requests, and write the rows of requests that have no keys.
//
//   M = max L_i    L = M + log2 sum 2^(L_i - M)    O = sum 2^(L_i - L) O_i        (L_i = -inf: an empty piece)
//
// Requests of one piece were written by the decode and are left alone. A request without keys, a pad among them, gets
// O = 0 and L = `empty_lse`. The order of the sum is that of the keys, so the result is the same to the bit on each run.
//
// Launch: grid (slots * tiles), slots = min(batch, parts), tiles = ceil(heads * q_len / kRowsPerBlock). Slot s joins the
// s-th split request and clears the pads s, s + slots, ... Block: kRowsPerBlock rows of kLanes threads.
// Bytes moved: (4 kDV + 4) a piece and row of a split request, kDV sizeof(T) + 4 a row written.
//
// Holes (-D): JITKERN_ENTRY, JITKERN_T, JITKERN_D, JITKERN_DV.
#include "include/block_scan.cuh"
#include "include/mla_params.cuh"
#include "include/pack.cuh"
#include "include/tensor_core.cuh"

namespace jitkern {

constexpr int kPack = 4;
constexpr int kLanes = JITKERN_ON_GPU ? kDV / kPack : 1;
constexpr int kRowsPerBlock = JITKERN_ON_GPU ? 2 : 1;
constexpr int kAhead = 8;  // pieces whose loads are in flight together

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

JITKERN_DEVICE void write_empty(const DecodeParams& p, i32 request, Row row, int lane) {
  T* out = p.out + at(p.out_stride, request, row);
  const float zeros[kPack] = {};
  for (int c = lane * kPack; c < kDV; c += kLanes * kPack) store_quad(p, out + c, zeros);
  if (lane == 0) p.lse[at(p.lse_stride, request, row)] = p.empty_lse;
}

struct Pieces {
  const f32* lse;
  const f32* out;
  i64 stride;  // from a piece to the next, in rows
  i32 count;
};

// The warp's lanes share the pieces out; every lane gets the result.
JITKERN_DEVICE float joined_lse(const Pieces& pieces, int lane) {
  float max = kMinusInfinity;
  for (i32 i = lane % kWarp; i < pieces.count; i += kWarp) {
    const float lse = pieces.lse[i * pieces.stride];
    max = lse > max ? lse : max;
  }
  max = warp_max(max);
  const float shift = max == kMinusInfinity ? 0.0f : max;
  float sum = 0.0f;
  for (i32 i = lane % kWarp; i < pieces.count; i += kWarp) sum += exp2_fast(pieces.lse[i * pieces.stride] - shift);
  sum = warp_sum(sum);
  return sum == 0.0f ? kMinusInfinity : shift + log2_fast(sum);
}

struct Batch {  // kAhead pieces' columns, loaded together
  Pack<f32, kPack> out[kAhead];
  float lse[kAhead];
};
JITKERN_DEVICE Batch load_batch(const Pieces& pieces, i32 start, int column) {
  Batch batch;
  for (int i = 0; i < kAhead; ++i) {
    const i64 row = min_of(start + i, pieces.count - 1) * pieces.stride;  // past the end: loaded, not used
    batch.out[i] = load_pack<f32, kPack>(pieces.out + row * kDV + column);
    batch.lse[i] = pieces.lse[row];
  }
  return batch;
}

JITKERN_DEVICE void join(const DecodeParams& p, i32 request, i32 head_k, i32 r, int lane) {
  const i64 first = partial_at(p, p.plan.rows[request], head_k, r);
  const Pieces pieces{p.partial_lse + first, p.partial_out + first * kDV,
                      static_cast<i64>(p.heads_k) * p.group * p.q_len,
                      p.plan.num_splits[request + 1] - p.plan.num_splits[request]};
  const Row row = row_of(p, head_k, r);
  const int first_column = lane * kPack;
  Batch batch = load_batch(pieces, 0, first_column);  // before L is known: it does not wait for it
  const float lse = joined_lse(pieces, lane);
  if (lse == kMinusInfinity) return write_empty(p, request, row, lane);
  T* out = p.out + at(p.out_stride, request, row);
  for (int c = first_column; c < kDV; c += kLanes * kPack) {
    float sum[kPack] = {};
    for (i32 start = 0; start < pieces.count; start += kAhead) {
      if (start > 0 || c > first_column) batch = load_batch(pieces, start, c);
      for (int i = 0; i < kAhead; ++i) {
        const float weight = start + i < pieces.count ? exp2_fast(batch.lse[i] - lse) : 0.0f;
        for (int e = 0; e < kPack; ++e) sum[e] += weight * batch.out[i].element[e];
      }
    }
    store_quad(p, out + c, sum);
  }
  if (lane == 0) p.lse[at(p.lse_stride, request, row)] = lse * p.lse_unit;
}

}  // namespace jitkern

JITKERN_EXPORT(jitkern::DecodeParams)

JITKERN_KERNEL(jitkern::DecodeParams, jitkern::kLanes* jitkern::kRowsPerBlock) {
  using namespace jitkern;
  const i32 rows_k = p.group * p.q_len;
  const i32 tiles = ceil_div(rows_k * p.heads_k, kRowsPerBlock);
  const i32 slot = static_cast<i32>(blockIdx.x / static_cast<u32>(tiles));
  const i32 slots = static_cast<i32>(gridDim.x / static_cast<u32>(tiles));
  const i32 row = (static_cast<i32>(blockIdx.x) - slot * tiles) * kRowsPerBlock + static_cast<i32>(threadIdx.x) / kLanes;
  if (row >= rows_k * p.heads_k) return;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const i32 head_k = row / rows_k, r = row - head_k * rows_k;

  const i32 split = slot < p.parts ? p.plan.split[slot] : -1;
  for (i32 request = slot; request < p.batch; request += slots)
    if (p.plan.rows[request] == kEmpty) write_empty(p, request, row_of(p, head_k, r), lane);
  if (split >= 0 && split < p.batch) join(p, split, head_k, r, lane);
}
