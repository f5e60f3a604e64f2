// The producer warps of the decode: they stream queries and keys into shared memory, ahead of the consumers.
//
// A warp copies 16 rows, 128 bytes of a few rows at a time, so that each access is a whole line. Rows that do not count
// (past the visible end, or on a page that does not exist) become zeros and are never read from memory: a weight of 0
// times a NaN would still be a NaN.
#pragma once
// Included behind a tile header (mla_tile.cuh or mla_tile_wgmma.cuh), which says where rows go.
#include "include/mla_producer_codes.cuh"
#include "include/mla_ring.cuh"

namespace jitkern {

constexpr int kLineElements = 64;
constexpr int kLines = kD / kLineElements;  // of 128 bytes in a row
constexpr int kCopy = JITKERN_PACK < 2 ? 2 : JITKERN_PACK;  // elements that a lane moves at once
constexpr int kLineLanes = kLineElements / kCopy;
constexpr int kRowsAtOnce = 32 / kLineLanes;
constexpr int kRowSteps = kChunkTokens / kRowsAtOnce;
static_assert(kD % kLineElements == 0, "a row is whole lines");

// kCopy elements from global to shared memory, or zeros.
JITKERN_DEVICE void fetch(SharedAddress to, const T* from, bool real) {
  if constexpr (JITKERN_PACK == 1) {  // nothing but single elements is aligned
    const u32 low = real ? from[0].bits : 0, high = real ? from[1].bits : 0;
    store_shared(to, low | high << 16);
  } else {
    copy_async<2 * kCopy>(to, from, real);
  }
}

// Fetches lines [begin, end) of 16 rows: `row_at(r)` gives row r in global memory, or null; `place(r, line, byte)` where it
// goes.
template <class RowAt, class Place>
JITKERN_DEVICE void fetch_rows(SharedAddress barrier, const T* readable, int begin, int end, int lane, RowAt&& row_at,
                               Place&& place) {
  const int in_line = lane % kLineLanes * kCopy;
#pragma unroll (kRowSteps <= 4 ? kRowSteps : 1)
  for (int step = 0; step < kRowSteps; ++step) {
    const int row = step * kRowsAtOnce + lane / kLineLanes;
    const T* found = row_at(row);
    const bool real = found != nullptr;
    const T* from = (real ? found : readable) + in_line;
#pragma unroll
    for (int line = begin; line < end; ++line) fetch(place(row, line, 2 * in_line), from + line * kLineElements, real);
  }
  if constexpr (JITKERN_PACK == 1) barrier_arrive(barrier);
  else barrier_arrive_after_copies(barrier);
}

JITKERN_DEVICE void fetch_queries(const DecodeParams& p, Shared& s, i32 request, i32 head_k, i32 first, int tile,
                                  int lane) {
  const SharedAddress barrier = shared_address(&s.q_full);
  const i32 rows = p.group * p.q_len;
  fetch_rows(
      barrier, p.q, 0, kLines, lane,
      [&](int row) -> const T* {
        const i32 r = first + 16 * tile + row;
        return r < rows ? p.q + at(p.q_stride, request, row_of(p, head_k, r)) : nullptr;
      },
      [&](int row, int line, int byte) { return query_place(s, tile, row, line, byte); });
  if (lane == 0) barrier_arrive(barrier);
}

// The page of token (lane % 16) of a chunk; -1 where there is none to read.
JITKERN_DEVICE i32 page_of(const DecodeParams& p, const Piece& piece, i32 token) {
  const bool some = token < piece.end * kBlockTokens && token < piece.limit;
  return some ? p.table[piece.request * p.table_stride + (token >> p.page_shift)] : -1;
}
// The page of a part's first block, asked for before its request's length is known: the plan says that it has keys. Only
// where a block lies on one page.
JITKERN_DEVICE i32 first_page_of(const DecodeParams& p, const Record& record) {
  const i32 column = static_cast<i32>(static_cast<i64>(record.begin_block) * kBlockTokens >> p.page_shift);
  const bool some = 1 << p.page_shift >= kBlockTokens && column < p.columns && record.begin_request < p.batch;
  return some ? p.table[record.begin_request * p.table_stride + column] : -1;
}

struct Key {
  bool real;   // or there is nothing to read
  i64 offset;  // in the cache; -1 if it is not real
};
JITKERN_DEVICE Key key_of(const DecodeParams& p, const Piece& piece, i32 head_k, i32 token, i32 page) {
  const bool real = token < piece.limit && static_cast<u32>(page) < static_cast<u32>(p.pages);
  const i64 slot = token & ((1 << p.page_shift) - 1);
  const i64 offset = real ? page * p.page_stride + slot * p.slot_stride + head_k * p.cache_head_stride : -1;
  return Key{real, offset};
}

#if !JITKERN_CACHE
JITKERN_DEVICE void fetch_keys(const DecodeParams& p, Shared& s, const Key& key, Ring ring, int lane) {
  const u32 reached = __ballot_sync(~0u, key.real);
  barrier_wait(shared_address(&s.empty[ring.slot]), ring.parity ^ 1);
#pragma unroll
  for (int wave = 0; wave < kWaves; ++wave) {
    const SharedAddress barrier = shared_address(&s.full[wave][ring.slot]);
    fetch_rows(
        barrier, p.cache, wave * (kLines / kWaves), (wave + 1) * (kLines / kWaves), lane,
        [&](int row) -> const T* {
          const i64 mine = __shfl_sync(~0u, key.offset, row);
          return mine >= 0 ? p.cache + mine : nullptr;
        },
        [&](int row, int line, int byte) { return key_place(s, ring.slot, row, line, byte); });
    if (lane == 0 && wave == 0) s.reached[ring.slot] = reached;
    if (lane == 0) barrier_arrive(barrier);
  }
}

template <class KeyNow, class Advance>
JITKERN_DEVICE void fetch_piece(const DecodeParams& p, Shared& s, const Piece& piece, Ring& ring, int lane,
                                KeyNow&& key_now, Advance&& advance) {
  for (i32 block = piece.begin; block < piece.end; ++block) {
    fetch_keys(p, s, key_now(), ring, lane);
    advance();
    ring = ahead(ring, kProducerWarps);
  }
}
#endif

JITKERN_DEVICE void produce(const DecodeParams& p, Shared& s, const Record& record, i32 first, i32 last, i32 head_k,
                            int warp, int lane) {
  Ring ring = ahead(Ring{0, 0}, warp);
  u32 q_parity = 0;
  i32 first_page = first_page_of(p, record);
  for_each_piece(p, record, last, [&](const Piece& piece) {
    if (piece.end <= piece.begin) return;
    i32 token = piece.begin * kBlockTokens + kChunkTokens * warp + lane % kChunkTokens;
    const bool known = first_page >= 0 && piece.request == record.begin_request;
    i32 page = known ? first_page : page_of(p, piece, token);
    if (warp < kTiles) {
      barrier_wait(shared_address(&s.q_empty), q_parity ^ 1);
      q_parity ^= 1;
      fetch_queries(p, s, piece.request, head_k, first, warp, lane);
    }
    i32 next = -1;
    const auto key_now = [&] {
      next = page_of(p, piece, token + kBlockTokens);  // in flight while this chunk is fetched
      return key_of(p, piece, head_k, token, page);
    };
    const auto advance = [&] {
      page = next;
      token += kBlockTokens;
    };
    fetch_piece(p, s, piece, ring, lane, key_now, advance);
  });
}

}  // namespace jitkern
