// The two consumer warpgroups of the decode with 64 rows: scores, online softmax, values, and the result of a piece.
//
// Blocks are taken in pairs. Warpgroup 0 scores and weighs the first of a pair, warpgroup 1 the second, each for all rows,
// and each owns half of the columns of the result, so that it needs the weights of both blocks:
//
//   warpgroup 0   scores A   maxima A   weights A   values A   values B
//   warpgroup 1   scores B   maxima B   weights B   values A   values B
//   told to the other               m_A       P_A, P_B
//
// B arrives later than A, and one warpgroup's softmax runs beside the other's matrix instructions. Maxima go from A to B to
// the next pair's A, so that both halves of the result are scaled alike, as if one block came after the other. Weights lie
// over what nobody reads any more, the part of their block's keys that is no value.
#pragma once
#include "include/mla_weights_wide.cuh"

namespace jitkern {

JITKERN_DEVICE void rescale(Result& out, const PerRow& decay) {
  if (!__any_sync(~0u, decay[0] != 1.0f || decay[1] != 1.0f)) return;
#pragma unroll
  for (int i = 0; i < kOwnColumns / 2; ++i) out[i] *= decay[i / 2 % 2];
}

// Starts to add a block's values, times its weights. Who has its weights knows that its keys are there.
JITKERN_DEVICE void add_values(Result& out, const Shared& s, const Place& me, Ring ring) {
  const SharedAddress block = shared_address(s.keys[ring.slot / kBlockChunks]);
  const Matrix values = swizzled_matrix(block + me.group * (kOwnColumns / 64) * kPanelBytes, kPanelBytes);
  const Matrix weights = swizzled_matrix(weights_of(s, ring));
  order_writes_before_matrix_reads();
  warpgroup_begin();
#pragma unroll
  for (int step = 0; step < kBlockTokens / 16; ++step)
    warpgroup_multiply_add<false, true>(out, description(weights, step * 32), description(values, step * 16 * 128), 1, T{});
  warpgroup_commit();
}
JITKERN_DEVICE void finish_values(Result& out, Shared& s, const Place& me, Ring ring) {
  warpgroup_wait<0>();
  keep_behind_wait(out);
  if (me.lane < kBlockChunks) barrier_arrive(shared_address(&s.empty[ring.slot + me.lane]));
}

struct Pair {   // of blocks
  Ring ring;    // of the first
  u32 parity;   // of `maxima_known` and `weighed`
  bool both;    // or there is no second one
  bool last;    // of its piece
  i32 seen[2];  // keys that the thread's rows see, from the block that its warpgroup scores
  float scale;
};

// All lanes have seen that the queries are there: else one that looks late would take the next ones for them.
JITKERN_DEVICE void release_queries(Shared& s, const Pair& pair, const Place& me) {
  __syncwarp();
  if (pair.last && me.lane == 0) barrier_arrive(shared_address(&s.q_empty));
}

// One warpgroup's part in a pair: it scores the first block or the second, and adds the values of both.
JITKERN_DEVICE void consume_pair(Result& out, Softmax& softmax, Shared& s, const Pair& pair, const Place& me) {
  const bool is_first = me.group == 0, scores_one = is_first || pair.both;
  const Ring second = ahead(pair.ring, kBlockChunks), own = is_first ? pair.ring : second;
  Scores scores;
  PerRow max, decay, later_decay;  // of the result before the first block's values come to it, and the second's
  if (scores_one) score(scores, s, own);
  release_queries(s, pair, me);
  if (scores_one) {
    mask(scores, s, pair.seen, me, own, pair.scale);
    row_maxima(scores, max);
  }
  if (!is_first) {
    barrier_wait(shared_address(&s.maxima_known), pair.parity);
    raise_to_other(softmax, s, me, decay);
  }
  if (scores_one) {
    raise_for(softmax, max, later_decay);
    tell_maxima(softmax, s, me);
    weigh(scores, softmax, s, me, own);
  }
  if (!is_first) wait_for_other(s, me, pair.parity);
  if (!is_first && !pair.both) tell_other(s, me);  // that nobody waits for what comes next as if it were this
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (is_first) decay[half] = later_decay[half];
  rescale(out, decay);
  add_values(out, s, me, pair.ring);
  finish_values(out, s, me, pair.ring);
  if (is_first) wait_for_other(s, me, pair.parity);
  if (!pair.both) return;
  if (is_first) raise_to_other(softmax, s, me, later_decay);
  rescale(out, later_decay);
  add_values(out, s, me, second);
  finish_values(out, s, me, second);
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

// The sums of both warpgroups' weights.
JITKERN_DEVICE void whole_sums(PerRow& sums, const Softmax& softmax, Shared& s, const Place& me) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(softmax.sum[half]);
    if (me.column == 0) s.sums[me.row + 8 * half][me.group] = sum;
  }
  consumers_meet();
#pragma unroll
  for (int half = 0; half < 2; ++half) sums[half] = s.sums[me.row + 8 * half][0] + s.sums[me.row + 8 * half][1];
}

struct Turn {  // what goes on from piece to piece
  Ring ring;
  u32 q_parity, parity;
};

// One piece: all its blocks, then the result. A piece without blocks still writes its (empty) result.
JITKERN_DEVICE void consume_piece(const DecodeParams& p, Shared& s, const Piece& piece, i32 head_k, i32 first,
                                  const Place& me, Turn& turn) {
  const i32 rows = p.group * p.q_len;
  Softmax softmax{{kMinusInfinity, kMinusInfinity}, {0.0f, 0.0f}};
  Result out = {};
  PerRow sums = {};
  if (piece.begin < piece.end) {
    Pair pair;
    pair.scale = score_scale(p);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i32 r = min_of(first + me.row + 8 * half, rows - 1);
      pair.seen[half] = visible(p, piece.length, row_of(p, head_k, r).token) - (piece.begin + me.group) * kBlockTokens;
    }
    barrier_wait(shared_address(&s.q_full), turn.q_parity);
    turn.q_parity ^= 1;
    for (i32 block = piece.begin; block < piece.end; block += kTogether) {
      pair.ring = turn.ring;
      pair.parity = turn.parity;
      pair.both = kTogether == 2 && block + 1 < piece.end;
      pair.last = block + kTogether >= piece.end;
      consume_pair(out, softmax, s, pair, me);
      turn.ring = ahead(turn.ring, kBlockChunks);
      if (pair.both) turn.ring = ahead(turn.ring, kBlockChunks);
      turn.parity ^= 1;
      pair.seen[0] -= kTogether * kBlockTokens;
      pair.seen[1] -= kTogether * kBlockTokens;
    }
    whole_sums(sums, softmax, s, me);
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
  Turn turn{{0, 0}, 0, 0};
  for_each_piece(p, record, last, [&](const Piece& piece) { consume_piece(p, s, piece, head_k, first, me, turn); });
}

}  // namespace jitkern
