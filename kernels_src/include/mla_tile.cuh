// The decode of one (tile of rows, part, KV head) by one thread block with mma.sync.
//
// Four producer warps stream keys into a ring of chunks (16 tokens each), each warp every fourth chunk, and run ahead
// across requests; eight consumer warps work on 64 tokens at a time:
//   scores   each warp has its own few tokens and all of the head dimension, Q (partly) in registers;
//   softmax  row maxima meet in shared memory, the weights go there as T;
//   values   each warp owns kDV / 8 columns of the result; the values are the first kDV columns of the same chunk.
// A row of a chunk is padded by 16 bytes, which spreads the eight rows of a matrix over all banks.
#pragma once
#include "include/block_scan.cuh"
#include "include/mla_params.cuh"
#include "include/tensor_core.cuh"

#ifndef JITKERN_PACK
#define JITKERN_PACK 8
#endif
#ifndef JITKERN_ROWS
#define JITKERN_ROWS 16
#endif
#ifndef JITKERN_CHUNKS
#define JITKERN_CHUNKS (JITKERN_ROWS == 16 ? 11 : 10)
#endif
#ifndef JITKERN_HELD  // steps of Q that are kept in registers
#define JITKERN_HELD (JITKERN_ROWS == 16 ? 16 : 4)
#endif

namespace jitkern {

constexpr int kRows = JITKERN_ROWS;
constexpr int kTiles = kRows / 16;  // of the matrix instruction
static_assert(kTiles == 1 || kTiles == 2, "a tile is 16 or 32 rows");
constexpr int kConsumerWarps = 8;
constexpr int kConsumers = kConsumerWarps * 32;
constexpr int kChunkTokens = 16;
constexpr int kChunks = JITKERN_CHUNKS;
constexpr int kBlockChunks = kBlockTokens / kChunkTokens;
// One producer for each chunk of a block. With eight consumers they leave 168 registers a thread, as one would.
constexpr int kProducerWarps = kBlockChunks;
constexpr int kThreads = kConsumers + 32 * kProducerWarps;
static_assert(kChunks >= kBlockChunks, "the ring must hold one block");
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
  alignas(8) u64 full[kChunks], empty[kChunks], q_full, q_empty;
};

struct Ring {
  int slot;
  u32 parity;
  __device__ __forceinline__ void advance() {
    if (++slot == kChunks) {
      slot = 0;
      parity ^= 1;
    }
  }
};
JITKERN_DEVICE Ring ahead(Ring ring, int steps) {
  const int slot = ring.slot + steps;
  return slot >= kChunks ? Ring{slot - kChunks, ring.parity ^ 1} : Ring{slot, ring.parity};
}

}  // namespace jitkern
