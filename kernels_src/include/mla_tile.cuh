// The decode of one (tile of rows, part, KV head) by one thread block with mma.sync.
//
// Four producer warps stream keys into a ring of chunks (16 tokens each), each warp every fourth chunk, and run ahead
// across requests; eight consumer warps work on 64 tokens at a time:
//   scores   each warp has its own few tokens and all of the head dimension, Q (partly) in registers;
//   softmax  row maxima meet in shared memory, the weights go there as T;
//   values   each warp owns kDV / 8 columns of the result; the values are the first kDV columns of the same chunk.
// A row of a chunk is padded by 16 bytes, which spreads the eight rows of a matrix over all banks.
#pragma once
#include "include/mla_ring.cuh"

#ifndef JITKERN_HELD  // steps of Q that are kept in registers
#define JITKERN_HELD (JITKERN_ROWS == 16 ? 16 : 4)
#endif

namespace jitkern {

static_assert(kTiles == 1 || kTiles == 2, "a tile is 16 or 32 rows");
constexpr int kConsumerWarps = 8;
constexpr int kConsumers = kConsumerWarps * 32;
// With eight consumer warps, one to four producer warps leave 168 registers a thread.
constexpr int kThreads = kConsumers + 32 * kProducerWarps;
constexpr int kWaves = 1;  // of a chunk
constexpr int kRowBytes = 2 * kD + 16;
constexpr int kWeightBytes = 2 * kBlockTokens + 16;
constexpr int kGroups = kConsumerWarps / kTiles;      // of a block's tokens
constexpr int kGroupTiles = kBlockTokens / kGroups / 8;  // 8-token tiles that one warp scores
constexpr int kSteps = kD / 16;
constexpr int kHeld = JITKERN_HELD < kSteps ? JITKERN_HELD : kSteps;
static_assert(kHeld % 2 == 0, "steps are taken in pairs");
constexpr int kStripe = kDV / kConsumerWarps;  // columns of one warp
constexpr int kStripeTiles = kStripe / 8;
struct Shared {
  alignas(16) unsigned char q[kRows * kRowBytes];
  alignas(16) unsigned char chunk[kChunks][kChunkTokens * kRowBytes];
  alignas(16) unsigned char weights[kRows * kWeightBytes];
  alignas(16) float maxima[kRows][kGroups];
  alignas(16) float sums[kRows][kGroups];
  u32 reached[kChunks];  // bit t: token t of the chunk counts
  alignas(8) u64 full[kWaves][kChunks], empty[kChunks], q_full, q_empty;
};

// Where a row's 128-byte line `line` begins, given the row's place among 16; `byte` is the place within the line.
JITKERN_DEVICE SharedAddress query_place(const Shared& s, int tile, int row, int line, int byte) {
  return shared_address(s.q) + (16 * tile + row) * kRowBytes + line * 128 + byte;
}
JITKERN_DEVICE SharedAddress key_place(const Shared& s, int slot, int row, int line, int byte) {
  return shared_address(s.chunk[slot]) + row * kRowBytes + line * 128 + byte;
}

}  // namespace jitkern
