// The two consumer warpgroups of the decode with 64 rows: scores, online softmax, values, and the result of a piece.
// Warpgroup w scores the tokens 32 w ... 32 w + 31 of a block, for all rows, and owns the columns 256 w ... of the result.
#pragma once
#include "include/mla_result.cuh"
#include "include/mla_tile_warpgroup.cuh"

namespace jitkern {

constexpr int kOwnTokens = kBlockTokens / 2;
constexpr int kOwnColumns = kDV / 2;
static_assert(kOwnColumns == 256, "the result of a warpgroup is one instruction wide");

struct Place {  // of a consumer thread
  int lane, group, warp;  // warp within its warpgroup
  int row;                // 16 warp + lane / 4: it holds this row of the tile and the one 8 further
  int column;             // 2 (lane % 4): and columns (or tokens) column, column + 1 of each 8
};

using Scores = float[kOwnTokens / 2];   // element 4 j + 2 half + e
using Result = float[kOwnColumns / 2];  // likewise
using PerRow = float[2];                // of rows `row` and `row + 8`

JITKERN_DEVICE void consumers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory"); }
JITKERN_DEVICE void score(Scores& scores, const Shared& s, const Place& me, Ring ring) {
#pragma unroll
  for (int c = 0; c < kBlockChunks / 2; ++c) {  // this warpgroup's tokens only
    const int slot = ring.slot + me.group * (kBlockChunks / 2) + c;
    barrier_wait(shared_address(&s.full[slot]), ring.parity);
  }
  order_writes_before_matrix_reads();
  const Matrix queries = swizzled_matrix(shared_address(s.q));
  const Matrix keys = swizzled_matrix(shared_address(s.keys[ring.slot / kBlockChunks]) + me.group * kOwnTokens * 128);
  warpgroup_begin();
#pragma unroll
  for (int step = 0; step < kD / 16; ++step) {
    const int panel = step / 4, within = step % 4 * 32;
    warpgroup_multiply_add<false, false>(scores, description(queries, panel * kQueryPanelBytes + within),
                                         description(keys, panel * kPanelBytes + within), step > 0, T{});
  }
  warpgroup_commit();
  warpgroup_wait<0>();
}

// Scales the scores, and sets those of keys that a row does not see to -inf. `seen` counts from the block.
JITKERN_DEVICE void mask(Scores& scores, const Shared& s, const i32 (&seen)[2], const Place& me, Ring ring, float scale) {
  const int first_slot = ring.slot + me.group * (kBlockChunks / 2);
  const u32 reached = s.reached[first_slot] & 0xffff, reached_later = s.reached[first_slot + 1] << 16;
  const u32 own = (reached | reached_later) >> me.column;  // bit 8 j + e: token 8 j + column + e of this warpgroup's
  const int first = me.group * kOwnTokens + me.column;
#pragma unroll
  for (int i = 0; i < kOwnTokens / 2; ++i) {
    const int half = i / 2 % 2, token = i / 4 * 8 + i % 2;
    const bool visible_here = (own >> token & 1) && first + token < seen[half];
    scores[i] = visible_here ? scores[i] * scale : kMinusInfinity;
  }
}

struct Softmax {
  PerRow max;
  PerRow sum;  // of the weights that this thread has made
};

JITKERN_DEVICE void weigh(const Scores& scores, Softmax& softmax, PerRow& decay, Shared& s, const Place& me) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float max = kMinusInfinity;
#pragma unroll
    for (int j = 0; j < kOwnTokens / 8; ++j) max = fmaxf(max, fmaxf(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]));
    max = quad_max(max);
    if (me.column == 0) s.maxima[me.row + 8 * half][me.group] = max;
  }
  consumers_meet();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = me.row + 8 * half;
    const float2 both = *reinterpret_cast<const float2*>(s.maxima[row]);
    const float max = fmaxf(softmax.max[half], fmaxf(both.x, both.y));
    const float shift = max == kMinusInfinity ? 0.0f : max;
    decay[half] = exp2_fast(softmax.max[half] - shift);
    softmax.max[half] = max;
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kOwnTokens / 8; ++j) {
      const float low = exp2_fast(scores[4 * j + 2 * half] - shift), high = exp2_fast(scores[4 * j + 2 * half + 1] - shift);
      sum += low + high;
      const int word = me.group * (kOwnTokens / 8) + j;  // of 16 bytes, in the row's line
      *reinterpret_cast<u32*>(s.weights + row * 128 + ((word ^ (row % 8)) * 16) + 2 * me.column) =
          narrow_pair<T>(low, high);
    }
    softmax.sum[half] = softmax.sum[half] * decay[half] + sum;
  }
  order_writes_before_matrix_reads();
  consumers_meet();
}

JITKERN_DEVICE void rescale(Result& out, const PerRow& decay) {
  if (!__any_sync(~0u, decay[0] != 1.0f || decay[1] != 1.0f)) return;
#pragma unroll
  for (int i = 0; i < kOwnColumns / 2; ++i) out[i] *= decay[i / 2 % 2];
}

JITKERN_DEVICE void accumulate(Result& out, Shared& s, const Place& me, Ring ring) {
#pragma unroll
  for (int c = 0; c < kBlockChunks; ++c) barrier_wait(shared_address(&s.full[ring.slot + c]), ring.parity);
  order_writes_before_matrix_reads();
  const SharedAddress block = shared_address(s.keys[ring.slot / kBlockChunks]);
  const Matrix values = swizzled_matrix(block + me.group * (kOwnColumns / 64) * kPanelBytes, kPanelBytes);
  const Matrix weights = swizzled_matrix(shared_address(s.weights));
  warpgroup_begin();
#pragma unroll
  for (int step = 0; step < kBlockTokens / 16; ++step)
    warpgroup_multiply_add<false, true>(out, description(weights, step * 32), description(values, step * 16 * 128), 1, T{});
  warpgroup_commit();
  warpgroup_wait<0>();
  if (me.lane < kBlockChunks) barrier_arrive(shared_address(&s.empty[ring.slot + me.lane]));
}

JITKERN_DEVICE void store_row(const DecodeParams& p, const Piece& piece, i32 head_k, i32 r, float max, float sum,
                              const Result& out, int half, const Place& me) {
  const bool empty = sum == 0.0f;
  const float inverse = empty ? 0.0f : key_scale(p) / sum;
  const float lse = empty ? kMinusInfinity : max + log2_fast(sum);
  const int column = me.group * kOwnColumns + me.column;
  const bool writes_lse = me.group == 0 && me.column == 0;
  if (piece.partial_row == kDirect) {
    const Row row = row_of(p, head_k, r);
    T* to = p.out + at(p.out_stride, piece.request, row) + column;
#pragma unroll
    for (int j = 0; j < kOwnColumns / 8; ++j)
      store_pair(p, to + 8 * j, out[4 * j + 2 * half] * inverse, out[4 * j + 2 * half + 1] * inverse);
    if (writes_lse) p.lse[at(p.lse_stride, piece.request, row)] = empty ? p.empty_lse : lse * p.lse_unit;
  } else {
    const i64 partial = partial_at(p, piece.partial_row, head_k, r);
    f32* to = p.partial_out + partial * kDV + column;
#pragma unroll
    for (int j = 0; j < kOwnColumns / 8; ++j)
      *reinterpret_cast<float2*>(to + 8 * j) =
          make_float2(out[4 * j + 2 * half] * inverse, out[4 * j + 2 * half + 1] * inverse);
    if (writes_lse) p.partial_lse[partial] = lse;
  }
}

// One piece: all its blocks, then the result. A piece without blocks still writes its (empty) result.
JITKERN_DEVICE void consume_piece(const DecodeParams& p, Shared& s, const Piece& piece, i32 head_k, i32 first,
                                  const Place& me, Ring& ring, u32& q_parity) {
  const i32 rows = p.group * p.q_len;
  Softmax softmax{{kMinusInfinity, kMinusInfinity}, {0.0f, 0.0f}};
  Result out = {};
  PerRow sums = {};
  if (piece.begin < piece.end) {
    const float scale = score_scale(p);
    i32 seen[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i32 r = min_of(first + me.row + 8 * half, rows - 1);
      seen[half] = visible(p, piece.length, row_of(p, head_k, r).token) - piece.begin * kBlockTokens;
    }
    barrier_wait(shared_address(&s.q_full), q_parity);
    q_parity ^= 1;
    for (i32 block = piece.begin; block < piece.end; ++block) {
      Scores scores;
      PerRow decay;
      score(scores, s, me, ring);
      if (block + 1 == piece.end && me.lane == 0) barrier_arrive(shared_address(&s.q_empty));
      mask(scores, s, seen, me, ring, scale);
      weigh(scores, softmax, decay, s, me);
      rescale(out, decay);
      accumulate(out, s, me, ring);
      ring = ahead(ring, kBlockChunks);
      seen[0] -= kBlockTokens;
      seen[1] -= kBlockTokens;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(softmax.sum[half]);
      if (me.column == 0) s.sums[me.row + 8 * half][me.group] = sum;
    }
    consumers_meet();
#pragma unroll
    for (int half = 0; half < 2; ++half) sums[half] = s.sums[me.row + 8 * half][0] + s.sums[me.row + 8 * half][1];
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const i32 r = first + me.row + 8 * half;
    if (r < rows) store_row(p, piece, head_k, r, softmax.max[half], sums[half], out, half, me);
  }
}

JITKERN_DEVICE void consume(const DecodeParams& p, Shared& s, const Record& record, i32 first, i32 last, i32 head_k,
                            int thread) {
  Place me;
  me.lane = thread % 32;
  me.group = uniform(thread / 128);
  me.warp = uniform(thread / 32 % 4);
  me.row = 16 * me.warp + me.lane / 4;
  me.column = 2 * (me.lane % 4);
  Ring ring{0, 0};
  u32 q_parity = 0;
  for_each_piece(p, record, last, [&](const Piece& piece) {
    consume_piece(p, s, piece, head_k, first, me, ring, q_parity);
  });
}

}  // namespace jitkern
