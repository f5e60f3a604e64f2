// The decode of one (tile of rows, part, KV head) on the CPU: the plain blocked form. One block of 64 keys at a time is
// widened to float, and each row makes one step of the online softmax over it.
#pragma once
#include "include/mla_params.cuh"

#ifndef JITKERN_ROWS
#define JITKERN_ROWS 32
#endif

namespace jitkern {

constexpr int kRows = JITKERN_ROWS;

struct RowState {
  float max, sum;  // max of the scores (in powers of two); sum of the weights relative to it
};

struct Workspace {
  alignas(64) float q[kRows][kD];
  alignas(64) float keys[kBlockTokens][kD];
  alignas(64) float out[kRows][kDV];
  RowState state[kRows];
  bool reached[kBlockTokens];
};

JITKERN_DEVICE void widen_row(const T* from, float* to) {
  for (int c = 0; c < kD; ++c) to[c] = widen(from[c]);
}

// A key as the GPU's matrix instructions get it. The one scale of a kScaled cache comes in later.
#if JITKERN_CACHE
JITKERN_DEVICE void widen_key(const u8* from, float* to) {
  for (int c = 0; c < kCodes; ++c) to[c] = widen(e4m3{from[c]});
  if constexpr (kCache == kTokens) {
    float scales[kCodes / kScaleGroup];
    __builtin_memcpy(scales, from + kCodes, sizeof(scales));
    for (int c = 0; c < kCodes; ++c) {
      T rounded;
      narrow(to[c] * scales[c / kScaleGroup], rounded);
      to[c] = widen(rounded);
    }
    for (int c = kCodes; c < kD; ++c) {
      T element;
      __builtin_memcpy(&element, from + kRopeByte + 2 * (c - kCodes), 2);
      to[c] = widen(element);
    }
  }
}
#else
JITKERN_DEVICE void widen_key(const T* from, float* to) { widen_row(from, to); }
#endif

JITKERN_DEVICE float dot(const float* a, const float* b) {
  constexpr int kLanes = 32;
  float lanes[kLanes] = {};
  for (int c = 0; c < kD; c += kLanes)
    for (int l = 0; l < kLanes; ++l) lanes[l] = __builtin_fmaf(a[c + l], b[c + l], lanes[l]);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  return lanes[0];
}

// Keys of one block; what is masked, or lies on a page that does not exist, is never read.
JITKERN_DEVICE void fetch_block(const DecodeParams& p, const Piece& piece, i32 head_k, i32 block, Workspace& w) {
  for (i32 j = 0; j < kBlockTokens; ++j) {
    const i32 token = block * kBlockTokens + j;
    w.reached[j] = false;
    if (token >= piece.limit) continue;
    const i32 page = p.table[piece.request * p.table_stride + (token >> p.page_shift)];
    if (page < 0 || page >= p.pages) continue;
    const i32 slot = token & ((1 << p.page_shift) - 1);
    widen_key(p.cache + page * p.page_stride + slot * p.slot_stride + head_k * p.cache_head_stride, w.keys[j]);
    w.reached[j] = true;
  }
}

JITKERN_DEVICE void step(float scale, const float* q, i32 visible_here, const Workspace& w, RowState& state,
                         float* out) {
  float weights[kBlockTokens];
  float max = state.max;
  const i32 n = min_of(visible_here, kBlockTokens);
  for (i32 j = 0; j < n; ++j) {
    weights[j] = w.reached[j] ? dot(q, w.keys[j]) * scale : kMinusInfinity;
    max = weights[j] > max ? weights[j] : max;
  }
  const float shift = max == kMinusInfinity ? 0.0f : max;
  const float decay = __builtin_exp2f(state.max - shift);
  float sum = state.sum * decay;
  for (int c = 0; c < kDV; ++c) out[c] *= decay;
  for (i32 j = 0; j < n; ++j) {
    if (!w.reached[j]) continue;
    const float weight = __builtin_exp2f(weights[j] - shift);
    sum += weight;
    for (int c = 0; c < kDV; ++c) out[c] = __builtin_fmaf(weight, w.keys[j][c], out[c]);
  }
  state = RowState{max, sum};
}

JITKERN_DEVICE void store_row(const DecodeParams& p, const Piece& piece, i32 head_k, i32 r, RowState state,
                              const float* out) {
  const bool empty = state.sum == 0.0f;
  const float inverse = empty ? 0.0f : key_scale(p) / state.sum;
  const float lse = empty ? kMinusInfinity : state.max + __builtin_log2f(state.sum);
  if (piece.partial_row == kDirect) {
    const Row row = row_of(p, head_k, r);
    T* to = p.out + at(p.out_stride, piece.request, row);
    for (int c = 0; c < kDV; ++c) narrow(out[c] * inverse, to[c]);
    p.lse[at(p.lse_stride, piece.request, row)] = empty ? p.empty_lse : lse * p.lse_unit;
  } else {
    const i64 partial = partial_at(p, piece.partial_row, head_k, r);
    for (int c = 0; c < kDV; ++c) p.partial_out[partial * kDV + c] = out[c] * inverse;
    p.partial_lse[partial] = lse;
  }
}

JITKERN_DEVICE void decode_tile(const DecodeParams& p, i32 tile, i32 part, i32 head_k) {
  static_assert(sizeof(Workspace) < (1 << 20), "the workspace lives on a thread's stack");
  Workspace w;
  const i32 first = tile * kRows;
  const i32 rows = min_of(kRows, p.group * p.q_len - first);
  const float scale = score_scale(p);
  for_each_piece(p, p.plan.records[part], first + rows - 1, [&](const Piece& piece) {
    for (i32 r = 0; r < rows; ++r) {
      widen_row(p.q + at(p.q_stride, piece.request, row_of(p, head_k, first + r)), w.q[r]);
      w.state[r] = RowState{kMinusInfinity, 0.0f};
      for (int c = 0; c < kDV; ++c) w.out[r][c] = 0.0f;
    }
    for (i32 block = piece.begin; block < piece.end; ++block) {
      fetch_block(p, piece, head_k, block, w);
      for (i32 r = 0; r < rows; ++r) {
        const i32 seen = visible(p, piece.length, row_of(p, head_k, first + r).token);
        step(scale, w.q[r], seen - block * kBlockTokens, w, w.state[r], w.out[r]);
      }
    }
    for (i32 r = 0; r < rows; ++r) store_row(p, piece, head_k, first + r, w.state[r], w.out[r]);
  });
}

}  // namespace jitkern
