// The consumer warps of the decode: scores, online softmax, values, and the result of a piece.
#pragma once
#include "include/mla_result.cuh"
#include "include/mla_tile.cuh"

namespace jitkern {

struct Place {  // of a consumer thread
  int lane, warp;
  int tile;    // the 16 rows whose scores it holds
  int group;   // the tokens whose scores it holds
  int row;     // lane / 4: it holds rows row and row + 8 of each tile
  int column;  // 2 (lane % 4): and columns column, column + 1 of each 8
};

using Scores = float[kGroupTiles][4];

JITKERN_DEVICE void load_query_step(u32 (&a)[4], const Shared& s, const Place& me, int step) {
  const int row = 16 * me.tile + me.lane % 16;
  load_matrices(a, shared_address(s.q) + row * kRowBytes + (me.lane / 16) * 16 + step * 32);
}

// scores[tile][element] = q . key, before scaling.
JITKERN_DEVICE void score(Scores& scores, const u32 (&held)[kHeld][4], const Shared& s, const Place& me, Ring ring) {
  constexpr int kChains = 4 / kGroupTiles;  // independent sums, to hide the instruction's latency
  float sum[kGroupTiles][kChains][4] = {};
  const int first_token = me.group * kGroupTiles * 8;
  const Ring mine = ahead(ring, first_token / kChunkTokens);
  barrier_wait(shared_address(&s.full[0][mine.slot]), mine.parity);
  const SharedAddress chunk = shared_address(s.chunk[mine.slot]);
  const int lane = me.lane;
  // One load brings 8 tokens x 32 columns where a warp has 8 tokens, else 16 tokens x 16 columns.
  const SharedAddress keys = kGroupTiles == 1
                                 ? chunk + (first_token % kChunkTokens + lane % 8) * kRowBytes + (lane / 8) * 16
                                 : chunk + (lane % 8 + 8 * (lane / 16)) * kRowBytes + (lane / 8 % 2) * 16;
#pragma unroll
  for (int step = 0; step < kSteps; step += 2) {
    u32 b[kGroupTiles][4];
    for (int i = 0; i < kGroupTiles; ++i) load_matrices(b[i], keys + (step + i) * 32);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      u32 a[4];
      if (step + i < kHeld) {
        for (int e = 0; e < 4; ++e) a[e] = held[step + i < kHeld ? step + i : 0][e];
      } else {
        load_query_step(a, s, me, step + i);
      }
      const int chain = (step + i) % kChains;
      if constexpr (kGroupTiles == 1) {
        multiply_add(sum[0][chain], a, b[0][2 * i], b[0][2 * i + 1], T{});
      } else {
        multiply_add(sum[0][chain], a, b[i][0], b[i][1], T{});
        multiply_add(sum[1][chain], a, b[i][2], b[i][3], T{});
      }
    }
  }
  for (int t = 0; t < kGroupTiles; ++t)
    for (int e = 0; e < 4; ++e) {
      float total = sum[t][0][e];
      for (int chain = 1; chain < kChains; ++chain) total += sum[t][chain][e];
      scores[t][e] = total;
    }
}

struct RowPair {  // what a thread knows of its rows `row` and `row + 8` of one tile
  float low, high;
};

// Per row, over all tiles of the thread's column of fragments: index 2 tile + (0: `row`, 1: `row + 8`).
using PerRow = float[2 * kTiles];

template <class Array>
JITKERN_DEVICE void gather_rows(PerRow& out, const Array& by_group, const Place& me, bool sum) {
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {
    const float* groups = by_group[8 * i + me.row];
    float value = groups[0];
#pragma unroll
    for (int g = 1; g < kGroups; ++g) value = sum ? value + groups[g] : fmaxf(value, groups[g]);
    out[i] = value;
  }
}

JITKERN_DEVICE void consumers_meet() { named_barrier(1, kConsumers); }

// Scales the scores, and sets those of keys that the row does not see to -inf. `visible_here` counts from the block.
JITKERN_DEVICE void mask(Scores& scores, const i32 (&visible_here)[2], const Shared& s, const Place& me, Ring ring,
                         float scale) {
  const int first = me.group * kGroupTiles * 8;
  const u32 reached = s.reached[ahead(ring, first / kChunkTokens).slot] >> (first % kChunkTokens);
#pragma unroll
  for (int t = 0; t < kGroupTiles; ++t)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int token = 8 * t + me.column + e % 2;
      const bool seen = (reached >> token & 1) && first + token < visible_here[e / 2];
      scores[t][e] = seen ? scores[t][e] * scale : kMinusInfinity;
    }
}

struct Softmax {
  PerRow max;    // of all rows that the thread holds results of
  float sum[2];  // of the weights this thread has made, for rows `row` and `row + 8` of its own tile
};

// Turns scores into weights in shared memory; `decay` is what the results so far have to be multiplied with.
JITKERN_DEVICE void weigh(const Scores& scores, Softmax& softmax, PerRow& decay, Shared& s, const Place& me) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float max = kMinusInfinity;
    for (int t = 0; t < kGroupTiles; ++t) max = fmaxf(max, fmaxf(scores[t][2 * half], scores[t][2 * half + 1]));
    max = quad_max(max);
    if (me.column == 0) s.maxima[16 * me.tile + 8 * half + me.row][me.group] = max;
  }
  consumers_meet();
  PerRow block_max;
  gather_rows(block_max, s.maxima, me, false);
  float own_shift[2] = {}, own_decay[2] = {};
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {
    const float max = fmaxf(softmax.max[i], block_max[i]);
    const float shift = max == kMinusInfinity ? 0.0f : max;
    decay[i] = exp2_fast(softmax.max[i] - shift);
    softmax.max[i] = max;
    if (i / 2 == me.tile) own_shift[i % 2] = shift, own_decay[i % 2] = decay[i];
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = softmax.sum[half] * own_decay[half];
    unsigned char* row = s.weights + (16 * me.tile + 8 * half + me.row) * kWeightBytes;
#pragma unroll
    for (int t = 0; t < kGroupTiles; ++t) {
      const float low = exp2_fast(scores[t][2 * half] - own_shift[half]);
      const float high = exp2_fast(scores[t][2 * half + 1] - own_shift[half]);
      sum += low + high;
      *reinterpret_cast<u32*>(row + 2 * (me.group * kGroupTiles * 8 + 8 * t + me.column)) =
          narrow_pair<T>(low, high);
    }
    softmax.sum[half] = sum;
  }
  consumers_meet();
}

using Result = float[kTiles][kStripeTiles][4];

JITKERN_DEVICE void rescale(Result& out, const PerRow& decay) {
  bool moved = false;
  for (int i = 0; i < 2 * kTiles; ++i) moved |= decay[i] != 1.0f;
  if (!__any_sync(~0u, moved)) return;
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int n = 0; n < kStripeTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[t][n][e] *= decay[2 * t + e / 2];
}

// out += weights . values, and hands the block's chunks back to the producer.
JITKERN_DEVICE void accumulate(Result& out, Shared& s, const Place& me, Ring& ring) {
  const SharedAddress weights = shared_address(s.weights) + me.lane % 16 * kWeightBytes + me.lane / 16 * 16;
  const int value_offset = me.lane % 16 * kRowBytes + 2 * (me.warp * kStripe + me.lane / 16 * 8);
#pragma unroll
  for (int c = 0; c < kBlockChunks; ++c) {
    u32 a[kTiles][4];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) load_matrices(a[t], weights + t * 16 * kWeightBytes + c * 32);
    barrier_wait(shared_address(&s.full[0][ring.slot]), ring.parity);
    const SharedAddress values = shared_address(s.chunk[ring.slot]) + value_offset;
#pragma unroll
    for (int n = 0; n < kStripeTiles; n += 2) {
      u32 b[4];
      load_matrices_transposed(b, values + n * 16);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        multiply_add(out[t][n], a[t], b[0], b[1], T{});
        multiply_add(out[t][n + 1], a[t], b[2], b[3], T{});
      }
    }
    __syncwarp();
    if (me.lane == 0) barrier_arrive(shared_address(&s.empty[ring.slot]));
    ring = ahead(ring, 1);
  }
}

JITKERN_DEVICE void store_row(const DecodeParams& p, const Piece& piece, i32 head_k, i32 r, const Place& me, float max,
                              float sum, const float (&out)[kStripeTiles][4], int half) {
  const bool empty = sum == 0.0f;
  const float inverse = empty ? 0.0f : key_scale(p) / sum;
  const float lse = empty ? kMinusInfinity : max + log2_fast(sum);
  const int column = me.warp * kStripe + me.column;
  const bool writes_lse = me.warp == 0 && me.column == 0;
  if (piece.partial_row == kDirect) {
    const Row row = row_of(p, head_k, r);
    T* to = p.out + at(p.out_stride, piece.request, row) + column;
#pragma unroll
    for (int n = 0; n < kStripeTiles; ++n)
      store_pair(p, to + 8 * n, out[n][2 * half] * inverse, out[n][2 * half + 1] * inverse);
    if (writes_lse) p.lse[at(p.lse_stride, piece.request, row)] = empty ? p.empty_lse : lse * p.lse_unit;
  } else {
    const i64 partial = partial_at(p, piece.partial_row, head_k, r);
    f32* to = p.partial_out + partial * kDV + column;
#pragma unroll
    for (int n = 0; n < kStripeTiles; ++n)
      *reinterpret_cast<float2*>(to + 8 * n) =
          make_float2(out[n][2 * half] * inverse, out[n][2 * half + 1] * inverse);
    if (writes_lse) p.partial_lse[partial] = lse;
  }
}

// One piece: all its blocks, then the result. A piece without blocks still writes its (empty) result.
JITKERN_DEVICE void consume_piece(const DecodeParams& p, Shared& s, const Piece& piece, i32 head_k, i32 first,
                                  const Place& me, Ring& ring, u32& q_parity) {
  const i32 rows = p.group * p.q_len;
  Softmax softmax{};
  for (int i = 0; i < 2 * kTiles; ++i) softmax.max[i] = kMinusInfinity;
  Result out = {};
  PerRow sums = {};
  if (piece.begin < piece.end) {
    barrier_wait(shared_address(&s.q_full), q_parity);
    q_parity ^= 1;
    u32 held[kHeld][4];
#pragma unroll
    for (int step = 0; step < kHeld; ++step) load_query_step(held[step], s, me, step);
    if (kHeld == kSteps) {
      __syncwarp();
      if (me.lane == 0) barrier_arrive(shared_address(&s.q_empty));
    }
    const float scale = score_scale(p);
    i32 seen[2];
    for (int half = 0; half < 2; ++half) {
      const i32 r = min_of(first + 16 * me.tile + 8 * half + me.row, rows - 1);
      seen[half] = visible(p, piece.length, row_of(p, head_k, r).token) - piece.begin * kBlockTokens;
    }
    for (i32 block = piece.begin; block < piece.end; ++block) {
      Scores scores;
      PerRow decay;
      score(scores, held, s, me, ring);
      mask(scores, seen, s, me, ring, scale);
      weigh(scores, softmax, decay, s, me);
      rescale(out, decay);
      accumulate(out, s, me, ring);
      for (int half = 0; half < 2; ++half) seen[half] -= kBlockTokens;
    }
    if (kHeld < kSteps) {
      __syncwarp();
      if (me.lane == 0) barrier_arrive(shared_address(&s.q_empty));
    }
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(softmax.sum[half]);
      if (me.column == 0) s.sums[16 * me.tile + 8 * half + me.row][me.group] = sum;
    }
    consumers_meet();
    gather_rows(sums, s.sums, me, true);
  }
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {
    const i32 r = first + 8 * i + me.row;
    if (r < rows) store_row(p, piece, head_k, r, me, softmax.max[i], sums[i], out[i / 2], i % 2);
  }
}

JITKERN_DEVICE void consume(const DecodeParams& p, Shared& s, const Record& record, i32 first, i32 last, i32 head_k,
                            int thread) {
  Place me;
  me.lane = thread % 32;
  me.warp = uniform(thread / 32);
  me.tile = me.warp / kGroups;
  me.group = me.warp % kGroups;
  me.row = me.lane / 4;
  me.column = 2 * (me.lane % 4);
  Ring ring{0, 0};
  u32 q_parity = 0;
  for_each_piece(p, record, last, [&](const Piece& piece) {
    consume_piece(p, s, piece, head_k, first, me, ring, q_parity);
  });
}

}  // namespace jitkern
