// One block of the decode with 64 rows, for one of its two warpgroups: scores, mask, maxima, weights, and what the two tell
// each other (mla_consumer_wide.cuh has the order of it all).
#pragma once
#include "include/mla_result.cuh"
#include "include/mla_tile_warpgroup.cuh"

namespace jitkern {

constexpr int kOwnColumns = kDV / 2;
static_assert(kOwnColumns == 256, "the result of a warpgroup is one instruction wide");
static_assert(kBlockTokens * 2 == 128, "the weights of a row are one line");
static_assert(kChunks == 2 * kBlockChunks, "a pair fills the ring: a warpgroup is not ahead of the other by more than it");
static_assert(kD == kDV || (kD - kDV) * kBlockTokens >= kRows * kBlockTokens, "weights fit over the keys beyond the values");

// Codes are widened in the slot that they go to, which takes as long as the rest: one slot is filled while the other is read.
constexpr int kTogether = kCache ? 1 : 2;

struct Place {  // of a consumer thread
  int lane, group, warp;  // warp within its warpgroup
  int row;                // 16 warp + lane / 4: it holds this row of the tile and the one 8 further
  int column;             // 2 (lane % 4): and columns (or tokens) column, column + 1 of each 8
};

using Scores = float[kBlockTokens / 2];  // element 4 j + 2 half + e
using Result = float[kOwnColumns / 2];   // likewise
using PerRow = float[2];                 // of rows `row` and `row + 8`

JITKERN_DEVICE void consumers_meet() { named_barrier(1, kConsumers); }
JITKERN_DEVICE void warpgroup_meet(const Place& me) { named_barrier(2 + me.group, 128); }
// The last thing of a block that the other warpgroup waits for, once all of this warpgroup have done it.
JITKERN_DEVICE void tell_other(Shared& s, const Place& me) {
  warpgroup_meet(me);
  if (me.warp == 0 && me.lane == 0) barrier_arrive(shared_address(&s.weighed[me.group]));
}
JITKERN_DEVICE void wait_for_other(const Shared& s, const Place& me, u32 parity) {
  barrier_wait(shared_address(&s.weighed[1 - me.group]), parity);
}

JITKERN_DEVICE void wait_for_keys(const Shared& s, Ring ring, int wave) {
#pragma unroll
  for (int c = 0; c < kBlockChunks; ++c) barrier_wait(shared_address(&s.full[wave][ring.slot + c]), ring.parity);
  order_writes_before_matrix_reads();
}

JITKERN_DEVICE void score(Scores& scores, const Shared& s, Ring ring) {
  constexpr int kWaveSteps = kD / 16 / kWaves;
  const Matrix queries = swizzled_matrix(shared_address(s.q));
  const Matrix keys = swizzled_matrix(shared_address(s.keys[ring.slot / kBlockChunks]));
#pragma unroll
  for (int step = 0; step < kD / 16; ++step) {
    if (step % kWaveSteps == 0) {
      wait_for_keys(s, ring, step / kWaveSteps);
      warpgroup_begin();
    }
    const int panel = step / 4, within = step % 4 * 32;
    warpgroup_multiply_add<false, false>(scores, description(queries, panel * kQueryPanelBytes + within),
                                         description(keys, panel * kPanelBytes + within), step > 0, T{});
  }
  warpgroup_commit();
  warpgroup_wait<0>();
  keep_behind_wait(scores);
}

// Scales the scores, and sets those of keys that a row does not see to -inf. `seen` counts from the block.
JITKERN_DEVICE void mask(Scores& scores, const Shared& s, const i32 (&seen)[2], const Place& me, Ring ring, float scale) {
  const u32* reached = &s.reached[ring.slot];
  const u32 own[2] = {((reached[0] & 0xffff) | reached[1] << 16), ((reached[2] & 0xffff) | reached[3] << 16)};
  const bool all = (own[0] & own[1]) == ~0u && min_of(seen[0], seen[1]) >= kBlockTokens;
  if (__all_sync(~0u, all)) {
#pragma unroll
    for (int i = 0; i < kBlockTokens / 2; ++i) scores[i] *= scale;
    return;
  }
#pragma unroll
  for (int i = 0; i < kBlockTokens / 2; ++i) {
    const int half = i / 2 % 2, token = i / 4 * 8 + i % 2;  // and `column` further
    const bool visible_here = (own[token / 32] >> me.column >> token % 32 & 1) && token + me.column < seen[half];
    scores[i] = visible_here ? scores[i] * scale : kMinusInfinity;
  }
}

struct Softmax {
  PerRow max;
  PerRow sum;  // of the weights that this thread has made
};

JITKERN_DEVICE float shift_of(float max) { return max == kMinusInfinity ? 0.0f : max; }

JITKERN_DEVICE void row_maxima(const Scores& scores, PerRow& max) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    max[half] = kMinusInfinity;
#pragma unroll
    for (int j = 0; j < kBlockTokens / 8; ++j)
      max[half] = fmaxf(max[half], fmaxf(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]));
    max[half] = quad_max(max[half]);
  }
}

// Weights are relative to a maximum of an earlier block for as long as they are not larger than 2^kHeadroom: they are as
// exact, and the result is rescaled less often.
constexpr float kHeadroom = 8.0f;

// Moves on to a maximum that is not lower; what was summed before has to be multiplied with `decay`.
JITKERN_DEVICE void raise(Softmax& softmax, const PerRow& max, PerRow& decay) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    decay[half] = exp2_fast(softmax.max[half] - shift_of(max[half]));
    softmax.max[half] = max[half];
    softmax.sum[half] *= decay[half];
  }
}
JITKERN_DEVICE void raise_for(Softmax& softmax, const PerRow& max, PerRow& decay) {
  PerRow raised;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    raised[half] = max[half] > softmax.max[half] + kHeadroom ? max[half] : softmax.max[half];
  raise(softmax, raised, decay);
}
// To what the other warpgroup has raised it to.
JITKERN_DEVICE void raise_to_other(Softmax& softmax, const Shared& s, const Place& me, PerRow& decay) {
  const int other = 1 - me.group;
  raise(softmax, {s.maxima[me.row][other], s.maxima[me.row + 8][other]}, decay);
}

// Where the weights of a block lie, a line for each row.
JITKERN_DEVICE SharedAddress weights_of(const Shared& s, Ring ring) {
  const int block = ring.slot / kBlockChunks;
  if constexpr (kD > kDV) return shared_address(s.keys[block]) + kDV / 64 * kPanelBytes;
  else return shared_address(s.weights) + block * kRows * 128;
}

// The maxima that the weights of this warpgroup's block are relative to, for the other one.
JITKERN_DEVICE void tell_maxima(const Softmax& softmax, Shared& s, const Place& me) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (me.column == 0) s.maxima[me.row + 8 * half][me.group] = softmax.max[half];
  warpgroup_meet(me);  // also: all warps have read the keys that the weights will lie over
  if (me.group == 0 && me.warp == 0 && me.lane == 0) barrier_arrive(shared_address(&s.maxima_known));
}

// The weights of this warpgroup's block, for both.
JITKERN_DEVICE void weigh(const Scores& scores, Softmax& softmax, Shared& s, const Place& me, Ring ring) {
  u32 weights[kBlockTokens / 4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float shift = shift_of(softmax.max[half]);
#pragma unroll
    for (int j = 0; j < kBlockTokens / 8; ++j) {
      const float low = exp2_fast(scores[4 * j + 2 * half] - shift), high = exp2_fast(scores[4 * j + 2 * half + 1] - shift);
      softmax.sum[half] += low + high;
      weights[2 * j + half] = narrow_pair<T>(low, high);
    }
  }
  const SharedAddress to = weights_of(s, ring);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = me.row + 8 * half;
#pragma unroll
    for (int j = 0; j < kBlockTokens / 8; ++j)
      store_shared(in_swizzled_line(to + row * 128, row, 16 * j + 2 * me.column), weights[2 * j + half]);
  }
  order_writes_before_matrix_reads();
  tell_other(s, me);
}

}  // namespace jitkern
