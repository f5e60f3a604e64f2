// The ring of key chunks in shared memory between producer and consumer warps, whatever the layout of a chunk.
//
// A chunk is 16 tokens. It comes in one wave or a few, each some of its columns: barrier full[wave][slot] opens when a wave
// has arrived, empty[slot] when all consumers are done with the chunk.
#pragma once
#include "include/mla_params.cuh"
#include "include/tensor_core.cuh"

#ifndef JITKERN_PACK
#define JITKERN_PACK 8
#endif
#ifndef JITKERN_ROWS
#define JITKERN_ROWS 16
#endif
#ifndef JITKERN_CHUNKS
#define JITKERN_CHUNKS 8
#endif

namespace jitkern {

constexpr int kRows = JITKERN_ROWS;
static_assert(kRows % 16 == 0, "queries are fetched sixteen rows at a time");
constexpr int kTiles = kRows / 16;
constexpr int kChunkTokens = 16;
constexpr int kChunks = JITKERN_CHUNKS;
constexpr int kBlockChunks = kBlockTokens / kChunkTokens;
static_assert(kChunks >= kBlockChunks, "the ring must hold one block");
constexpr int kProducerWarps = kBlockChunks;  // each fetches its own chunk of every block
constexpr u32 kFetchArrivals = 33;  // for 16 rows: a warp's lanes when their copies are done, and one lane for `reached`

struct Ring {
  int slot;
  u32 parity;
};
JITKERN_DEVICE Ring ahead(Ring ring, int steps) {
  const int slot = ring.slot + steps;
  return slot >= kChunks ? Ring{slot - kChunks, ring.parity ^ 1} : Ring{slot, ring.parity};
}

}  // namespace jitkern
