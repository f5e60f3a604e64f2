// The parameter block of the decode and of the merge behind it, and the arithmetic of rows and pieces.
//
// A row is one (query token, query head) of a request. The heads that share a KV head are stacked token major, head
// minor: row r of KV head k is token r / group, head k group + r % group. A tile is kRows consecutive rows.
#pragma once
#include "include/mla_cache.cuh"
#include "include/mla_schedule.cuh"

#ifndef JITKERN_DV
#define JITKERN_DV 512
#endif

namespace jitkern {

using T = JITKERN_T;
constexpr int kD = JITKERN_D;    // a key
constexpr int kDV = JITKERN_DV;  // a value: the first kDV columns of the same key
constexpr float kMinusInfinity = __builtin_bit_cast(float, 0xff800000u);
static_assert(sizeof(T) == 2, "queries and results are bf16 or f16");
static_assert(kD % 32 == 0 && kDV % 64 == 0 && kDV <= kD, "columns are cut into steps of 32 and stripes of 64");

struct Stride3 {  // in elements
  i64 batch, token, head;
};

struct DecodeParams {
  T* out;
  f32* lse;
  const T* q;
  const CacheElement* cache;
  const i32* table;
  const i32* lengths;
  f32* partial_out;  // [row of a split request's piece, head and token, kDV]
  f32* partial_lse;  // in powers of two
  PlanView plan;
  Stride3 out_stride, lse_stride, q_stride;
  i64 page_stride, slot_stride, cache_head_stride, table_stride;
  i32 batch, q_len, heads_k, group;
  i32 columns, pages, page_shift, causal;
  i32 out_aligned;  // every row of `out` begins at a multiple of 8 bytes
  i32 parts;
  f32 scale;      // of the scores, times log2(e)
  f32 lse_unit;   // log(2) in the base of `lse`
  f32 empty_lse;  // L of a row that sees no key
  i32 join_units;  // stripes of rows that one block of the merge takes
  const f32* k_scale;  // of a kScaled cache; null: 1
  const f32* q_scale;  // likewise, of the queries
};

// The one scale of all keys, and so of all values.
JITKERN_DEVICE float key_scale(const DecodeParams& p) {
  if constexpr (kCache == kScaled) return p.k_scale != nullptr ? *p.k_scale : 1.0f;
  return 1.0f;
}
// What a product of a query and a key has to be multiplied with.
JITKERN_DEVICE float score_scale(const DecodeParams& p) {
  if constexpr (kCache == kScaled) return p.scale * key_scale(p) * (p.q_scale != nullptr ? *p.q_scale : 1.0f);
  return p.scale;
}

// A value that all lanes of a warp hold alike, told to the compiler: it then computes addresses and branches once a warp.
JITKERN_DEVICE i32 uniform(i32 x) {
#if JITKERN_ON_GPU
  return __shfl_sync(~0u, x, 0);
#else
  return x;
#endif
}

struct Row {
  i32 token, head;
};
JITKERN_DEVICE Row row_of(const DecodeParams& p, i32 head_k, i32 r) {
  const i32 token = static_cast<i32>(static_cast<u32>(r) / static_cast<u32>(p.group));
  return Row{token, head_k * p.group + (r - token * p.group)};
}
JITKERN_DEVICE i64 at(const Stride3& s, i32 request, Row row) {
  return request * s.batch + row.token * s.token + row.head * s.head;
}
JITKERN_DEVICE i64 partial_at(const DecodeParams& p, i32 partial_row, i32 head_k, i32 r) {
  const i64 rows = static_cast<i64>(p.group) * p.q_len;
  return (static_cast<i64>(partial_row) * p.heads_k + head_k) * rows + r;
}
// Keys that a query token sees: all of them, or all but those of later tokens (bottom-right mask).
JITKERN_DEVICE i32 visible(const DecodeParams& p, i32 length, i32 token) {
  return p.causal ? length - (p.q_len - 1 - token) : length;
}

struct Piece {
  i32 request;
  i32 begin, end;   // blocks; nothing where end <= begin
  i32 length;       // keys of the request
  i32 limit;        // keys that any row of the tile sees
  i32 partial_row;  // or kDirect
};

// Calls f(piece) for each request that `record` touches, for the tile whose last row is `last_row`.
template <class F>
JITKERN_DEVICE void for_each_piece(const DecodeParams& p, const Record& given, i32 last_row, F&& f) {
  Record record = given;
  record.begin_request = uniform(given.begin_request);
  record.end_request = uniform(given.end_request);
  record.begin_block = uniform(given.begin_block);
  record.end_block = uniform(given.end_block);
  record.begin_piece = uniform(given.begin_piece);
  record.ends_inside = uniform(given.ends_inside);
  record.begin_rank = uniform(given.begin_rank);
  const i64 reach = static_cast<i64>(p.columns) << p.page_shift;
  const i32 reachable = reach > 0x7fffffff ? 0x7fffffff : static_cast<i32>(reach);
  const i32 last_token = row_of(p, 0, last_row).token;
  i32 rank = record.begin_rank;
  i32 request = record.begin_request;
  while (request >= 0 && request < p.batch) {
    const i32 first_row = uniform(p.plan.rows[request]);
    const KeyRange keys = key_range(record, request, uniform(p.lengths[request]), reachable);
    Piece piece;
    piece.request = request;
    piece.length = keys.length;
    piece.limit = visible(p, keys.length, last_token);
    piece.begin = keys.begin_block;
    piece.end = min_of(keys.end_block, blocks_of(piece.limit));
    const i32 number = request == record.begin_request ? record.begin_piece : 0;
    piece.partial_row = first_row < 0 ? kDirect : first_row + number;
    f(piece);
    if (request == record.end_request) break;
    request = uniform(p.plan.order[++rank]);
  }
}

}  // namespace jitkern
