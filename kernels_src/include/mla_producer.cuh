// The producer warp of the decode: it streams queries and keys into shared memory, ahead of the consumers.
//
// Each lane copies half a row. Rows that do not count (past the visible end, or on a page that does not exist) are
// filled with zeros and never read from memory: a weight of 0 times a NaN would still be a NaN.
#pragma once
#include "include/mla_tile.cuh"

namespace jitkern {

// Half a row (kD bytes) from global to shared memory, or zeros, and this lane's arrival on `barrier`.
JITKERN_DEVICE void fetch_half_row(SharedAddress to, const T* from, bool real, SharedAddress barrier) {
  if constexpr (kBulk) {
#if __CUDA_ARCH__ >= 900
    if (real) {
      barrier_arrive_expecting(barrier, kD);
      copy_bulk(to, from, kD, barrier);
      return;
    }
#endif
  } else if (real) {
    if constexpr (JITKERN_PACK == 1) {
      for (int c = 0; c < kD / 2; ++c)
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(to + 2 * c), "h"(from[c].bits) : "memory");
    } else {
      constexpr int kPackBytes = 2 * JITKERN_PACK;
      for (int at = 0; at < kD; at += kPackBytes)
        copy_async<kPackBytes>(to + at, reinterpret_cast<const unsigned char*>(from) + at);
    }
  }
  if (!real) {
    for (int at = 0; at < kD; at += 16)
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to + at), "r"(0) : "memory");
#if __CUDA_ARCH__ >= 900
    order_stores_before_bulk_copies();
#endif
  }
  barrier_arrive(barrier);
  if constexpr (!kBulk) barrier_arrive_after_copies(barrier);
}
constexpr u32 kFetchArrivals = kBulk ? 32 : 64;  // of the 32 lanes, for one group of 16 rows

JITKERN_DEVICE void fetch_queries(const DecodeParams& p, Shared& s, i32 request, i32 head_k, i32 first, int lane) {
  const SharedAddress barrier = shared_address(&s.q_full);
  const i32 rows = p.group * p.q_len;
  for (int t = 0; t < kTiles; ++t) {
    const int row = 16 * t + lane / 2, half = lane % 2;
    const i32 r = first + row;
    const bool real = r < rows;
    const T* from = p.q + at(p.q_stride, request, row_of(p, head_k, real ? r : 0)) + half * (kD / 2);
    fetch_half_row(shared_address(s.q + row * kRowBytes + half * kD), from, real, barrier);
  }
}

struct Pages {  // of the tokens 2 lane and 2 lane + 1 of a block; -1 where there is none to read
  i32 even, odd;
};
JITKERN_DEVICE Pages pages_of(const DecodeParams& p, const Piece& piece, i32 block, int lane) {
  const i32* row = p.table + piece.request * p.table_stride;
  const i32 token = block * kBlockTokens + 2 * lane;
  Pages pages{-1, -1};
  if (block < piece.end && token < piece.limit) {
    pages.even = row[token >> p.page_shift];
    pages.odd = pages.even;
    if (p.page_shift == 0) pages.odd = token + 1 < piece.limit ? row[token + 1] : -1;
  }
  return pages;
}

JITKERN_DEVICE void fetch_block(const DecodeParams& p, Shared& s, const Piece& piece, i32 head_k, i32 block,
                                Pages pages, Ring& ring, int lane) {
  const int half = lane % 2;
  for (int c = 0; c < kBlockChunks; ++c) {
    barrier_wait(shared_address(&s.empty[ring.slot]), ring.parity ^ 1);
    const int in_chunk = lane / 2, in_block = kChunkTokens * c + in_chunk;
    const i32 even = __shfl_sync(~0u, pages.even, in_block / 2), odd = __shfl_sync(~0u, pages.odd, in_block / 2);
    const i32 page = in_block % 2 ? odd : even;
    const i32 token = block * kBlockTokens + in_block;
    const bool real = token < piece.limit && static_cast<u32>(page) < static_cast<u32>(p.pages);
    const u32 reached = __ballot_sync(~0u, real);
    if (lane == 0) s.reached[ring.slot] = reached;
    const i64 offset = page * p.page_stride + (token & ((1 << p.page_shift) - 1)) * p.slot_stride +
                       head_k * p.cache_head_stride + half * (kD / 2);
    fetch_half_row(shared_address(s.chunk[ring.slot] + in_chunk * kRowBytes + half * kD), p.cache + offset, real,
                   shared_address(&s.full[ring.slot]));
    ring.advance();
  }
}

JITKERN_DEVICE void produce(const DecodeParams& p, Shared& s, const Record& record, i32 first, i32 last, i32 head_k,
                            int lane) {
  Ring ring{0, 0};
  u32 q_parity = 0;
  for_each_piece(p, record, last, [&](const Piece& piece) {
    if (piece.end <= piece.begin) return;
    Pages pages = pages_of(p, piece, piece.begin, lane);
    barrier_wait(shared_address(&s.q_empty), q_parity ^ 1);
    q_parity ^= 1;
    fetch_queries(p, s, piece.request, head_k, first, lane);
    for (i32 block = piece.begin; block < piece.end; ++block) {
      const Pages next = pages_of(p, piece, block + 1, lane);
      fetch_block(p, s, piece, head_k, block, pages, ring, lane);
      pages = next;
    }
  });
}

}  // namespace jitkern
