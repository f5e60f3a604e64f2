// The consumer warpgroup of the decode with up to 32 rows: scores, online softmax, values, and the result of a piece, all
// transposed: what a lane holds are tokens (later columns) of a few rows.
#pragma once
#include "include/mla_result.cuh"
#include "include/mla_tile_warpgroup.cuh"

namespace jitkern {

struct Place {  // of a consumer thread
  int lane, warp;
  int token;  // lane / 4: it holds tokens 16 warp + token and that + 8 (or columns, of each stripe)
  int row;    // 2 (lane % 4): and rows row, row + 1 of each 8
};

constexpr int kStripes = kDV / 64;          // of the result, 64 columns each
using Scores = float[kRows / 2];            // element 4 j + 2 half + e
using Result = float[kStripes][kRows / 2];  // likewise
using PerRow = float[kRows / 4];            // element 2 j + e: row 8 j + row + e

JITKERN_DEVICE void consumers_meet() {
  asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
}
JITKERN_DEVICE float across_tokens_max(float x) {
  for (int d = 4; d < 32; d *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
  return x;
}
JITKERN_DEVICE float across_tokens_sum(float x) {
  for (int d = 4; d < 32; d *= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

JITKERN_DEVICE void score(Scores& scores, const Shared& s, const Place& me, Ring ring) {
#pragma unroll
  for (int c = 0; c < kBlockChunks; ++c) barrier_wait(shared_address(&s.full[0][ring.slot + c]), ring.parity);
  order_writes_before_matrix_reads();
  const Matrix keys = swizzled_matrix(shared_address(s.keys[ring.slot / kBlockChunks]));
  const Matrix queries = swizzled_matrix(shared_address(s.q));
  warpgroup_begin();
#pragma unroll
  for (int step = 0; step < kD / 16; ++step) {
    const int panel = step / 4, within = step % 4 * 32;
    warpgroup_multiply_add<false, false>(scores, description(keys, panel * kPanelBytes + within),
                                  description(queries, panel * kQueryPanelBytes + within), step > 0, T{});
  }
  warpgroup_commit();
  warpgroup_wait<0>();
}

// Scales the scores, and sets those of keys that a row does not see to -inf.
JITKERN_DEVICE void mask(const DecodeParams& p, Scores& scores, const Shared& s, const Piece& piece, i32 first,
                         i32 block, const Place& me, Ring ring, float scale) {
  const u32 reached = s.reached[ring.slot + me.warp] >> me.token;
  const bool counts[2] = {(reached & 1) != 0, (reached >> 8 & 1) != 0};
  const i32 token = block * kBlockTokens + 16 * me.warp + me.token;
  const bool ragged = p.causal && (block + 1) * kBlockTokens > piece.length - p.q_len;  // rows differ in this block
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      i32 end = 0x7fffffff;
      if (ragged) {
        const i32 r = first + 8 * j + me.row + e;
        end = visible(p, piece.length, min_of(row_of(p, 0, r).token, p.q_len - 1));
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& score = scores[4 * j + 2 * half + e];
        score = counts[half] && token + 8 * half < end ? score * scale : kMinusInfinity;
      }
    }
}

struct Softmax {
  PerRow max;
  PerRow sum;  // of the weights that this thread has made
};

// Where the weight of a row and token goes: P^T as the instruction's B wants it, a line of 64 tokens for each row.
JITKERN_DEVICE u16* weight_place(Shared& s, int row, int token) {
  return reinterpret_cast<u16*>(s.weights + row * 128 + (((token / 8) ^ (row % 8)) * 16) + token % 8 * 2);
}

JITKERN_DEVICE void weigh(const Scores& scores, Softmax& softmax, PerRow& decay, Shared& s, const Place& me) {
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float max = across_tokens_max(fmaxf(scores[4 * j + e], scores[4 * j + 2 + e]));
      if (me.token == 0) s.maxima[8 * j + me.row + e][me.warp] = max;
    }
  consumers_meet();
  PerRow shift;
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float4 quarters = *reinterpret_cast<const float4*>(s.maxima[8 * j + me.row + e]);
      const int i = 2 * j + e;
      const float max = fmaxf(fmaxf(softmax.max[i], fmaxf(quarters.x, quarters.y)), fmaxf(quarters.z, quarters.w));
      shift[i] = max == kMinusInfinity ? 0.0f : max;
      decay[i] = exp2_fast(softmax.max[i] - shift[i]);
      softmax.max[i] = max;
    }
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int i = 2 * j + e;
      float sum = softmax.sum[i] * decay[i];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float weight = exp2_fast(scores[4 * j + 2 * half + e] - shift[i]);
        sum += weight;
        T narrowed;
        narrow(weight, narrowed);
        *weight_place(s, 8 * j + me.row + e, 16 * me.warp + 8 * half + me.token) = narrowed.bits;
      }
      softmax.sum[i] = sum;
    }
  order_writes_before_matrix_reads();
  consumers_meet();
}

JITKERN_DEVICE void rescale(Result& out, const PerRow& decay) {
  bool moved = false;
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) moved |= decay[i] != 1.0f;
  if (!__any_sync(~0u, moved)) return;
#pragma unroll
  for (int stripe = 0; stripe < kStripes; ++stripe)
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) out[stripe][i] *= decay[i / 4 * 2 + i % 2];
}

JITKERN_DEVICE void accumulate(Result& out, Shared& s, const Place& me, Ring ring) {
  const Matrix values = swizzled_matrix(shared_address(s.keys[ring.slot / kBlockChunks]));
  const Matrix weights = swizzled_matrix(shared_address(s.weights));
  warpgroup_begin();
#pragma unroll
  for (int step = 0; step < kBlockTokens / 16; ++step)
#pragma unroll
    for (int stripe = 0; stripe < kStripes; ++stripe)
      warpgroup_multiply_add<true, false>(out[stripe], description(values, stripe * kPanelBytes + step * 16 * 128),
                                   description(weights, step * 32), 1, T{});
  warpgroup_commit();
  warpgroup_wait<0>();
  if (me.lane < kBlockChunks) barrier_arrive(shared_address(&s.empty[ring.slot + me.lane]));
}

// A row's columns lie across lanes; neighbours swap one element so that each stores two adjacent columns.
template <class Store>
JITKERN_DEVICE void for_each_pair(const Result& out, int i, const Place& me, Store&& store) {
  const bool odd = me.token % 2;
#pragma unroll
  for (int stripe = 0; stripe < kStripes; ++stripe) {
    const float low = out[stripe][4 * (i / 2) + i % 2], high = out[stripe][4 * (i / 2) + 2 + i % 2];
    const float other = __shfl_xor_sync(~0u, odd ? low : high, 4);
    const int column = 64 * stripe + 16 * me.warp + (odd ? 8 + me.token - 1 : me.token);
    store(column, odd ? other : low, odd ? high : other);
  }
}

JITKERN_DEVICE void store_row(const DecodeParams& p, const Piece& piece, i32 head_k, i32 r, bool real, float max,
                              float sum, const Result& out, int i, const Place& me) {
  const bool empty = sum == 0.0f;
  const float inverse = empty ? 0.0f : key_scale(p) / sum;
  const float lse = empty ? kMinusInfinity : max + log2_fast(sum);
  const bool writes_lse = real && me.warp == 0 && me.token == 0;
  if (piece.partial_row == kDirect) {
    const Row row = row_of(p, head_k, r);
    T* to = p.out + at(p.out_stride, piece.request, row);
    for_each_pair(out, i, me, [&](int column, float low, float high) {
      if (real) store_pair(p, to + column, low * inverse, high * inverse);
    });
    if (writes_lse) p.lse[at(p.lse_stride, piece.request, row)] = empty ? p.empty_lse : lse * p.lse_unit;
  } else {
    const i64 partial = partial_at(p, piece.partial_row, head_k, r);
    f32* to = p.partial_out + partial * kDV;
    for_each_pair(out, i, me, [&](int column, float low, float high) {
      if (real) *reinterpret_cast<float2*>(to + column) = make_float2(low * inverse, high * inverse);
    });
    if (writes_lse) p.partial_lse[partial] = lse;
  }
}

JITKERN_DEVICE void sum_over_tokens(PerRow& sums, const Softmax& softmax, Shared& s, const Place& me) {
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) {
    const float sum = across_tokens_sum(softmax.sum[i]);
    if (me.token == 0) s.sums[8 * (i / 2) + me.row + i % 2][me.warp] = sum;
  }
  consumers_meet();
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) {
    const float4 quarters = *reinterpret_cast<const float4*>(s.sums[8 * (i / 2) + me.row + i % 2]);
    sums[i] = (quarters.x + quarters.y) + (quarters.z + quarters.w);
  }
}

// One piece: all its blocks, then the result. A piece without blocks still writes its (empty) result.
JITKERN_DEVICE void consume_piece(const DecodeParams& p, Shared& s, const Piece& piece, i32 head_k, i32 first,
                                  const Place& me, Ring& ring, u32& q_parity) {
  Softmax softmax = {};
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) softmax.max[i] = kMinusInfinity;
  Result out = {};
  PerRow sums = {};
  if (piece.begin < piece.end) {
    barrier_wait(shared_address(&s.q_full), q_parity);
    q_parity ^= 1;
    const float scale = score_scale(p);
    for (i32 block = piece.begin; block < piece.end; ++block) {
      Scores scores;
      PerRow decay;
      score(scores, s, me, ring);
      if (block + 1 == piece.end && me.lane == 0) barrier_arrive(shared_address(&s.q_empty));
      mask(p, scores, s, piece, first, block, me, ring, scale);
      weigh(scores, softmax, decay, s, me);
      rescale(out, decay);
      accumulate(out, s, me, ring);
      ring = ahead(ring, kBlockChunks);
    }
    sum_over_tokens(sums, softmax, s, me);
  }
  const i32 rows = p.group * p.q_len;
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) {
    const i32 r = first + 8 * (i / 2) + me.row + i % 2;
    store_row(p, piece, head_k, min_of(r, rows - 1), r < rows, softmax.max[i], sums[i], out, i, me);
  }
}

JITKERN_DEVICE void consume(const DecodeParams& p, Shared& s, const Record& record, i32 first, i32 last, i32 head_k,
                            int thread) {
  Place me;
  me.lane = thread % 32;
  me.warp = uniform(thread / 32 % 4);
  me.token = me.lane / 4;
  me.row = 2 * (me.lane % 4);
  Ring ring{0, 0};
  u32 q_parity = 0;
  for_each_piece(p, record, last, [&](const Piece& piece) {
    consume_piece(p, s, piece, head_k, first, me, ring, q_parity);
  });
}

}  // namespace jitkern
