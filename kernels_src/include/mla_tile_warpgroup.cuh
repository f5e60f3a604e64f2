// The decode of one (tile of rows, part, KV head) by one thread block with warpgroup matrix instructions.
//
// Two shapes. Up to 32 rows everything is transposed, so that the instruction's 64 rows are tokens, then value columns, and
// its N is the tile's rows; one warpgroup does it all (mla_consumer_narrow.cuh):
//   scores   S^T [64 tokens, rows] = K Q^T          K as it lies in memory, token by token
//   values   O^T [kDV, rows] += V^T P^T             V^T is the same K, read across its lines
// With 64 rows the tile's rows are the instruction's; of two warpgroups each scores every second block and owns half of the
// columns of the result (mla_consumer_wide.cuh):
//   scores   S [64 rows, 64 tokens] = Q K^T         values   O [64 rows, kDV] += P V
// Weights go from one to the other by shared memory, a line for each row of the tile.
// Keys and queries lie in lines of 128 bytes (64 columns), swizzled as the instruction wants them.
#pragma once
#include "include/mla_ring.cuh"
#include "include/warpgroup.cuh"

namespace jitkern {

static_assert(kRows == 16 || kRows == 32 || kRows == 64, "a tile is 16, 32 or 64 rows");
static_assert(kChunks % kBlockChunks == 0, "a block's chunks must follow each other");
constexpr int kWarpgroups = kRows > 32 ? 2 : 1;
constexpr int kConsumerWarps = 4 * kWarpgroups;
constexpr int kConsumers = 32 * kConsumerWarps;
constexpr int kThreads = kConsumers + 32 * kProducerWarps;
constexpr int kPanelBytes = kBlockTokens * 128;  // 64 columns of a block
constexpr int kPanels = kD / 64;
// With 64 rows the scores of a key's first columns begin while its last ones are on their way.
constexpr int kWaves = kRows < 64 ? 1 : kPanels % 3 == 0 ? 3 : 2;
static_assert(kPanels % kWaves == 0, "a wave is whole panels");
constexpr int kQueryPanelBytes = kRows * 128;
// With 64 rows weights lie over keys, or there are as many as blocks.
constexpr int kWeightLines = kRows < 64 ? kRows : kD > kDV ? 0 : kChunks / kBlockChunks * kRows;

struct Shared {
  alignas(1024) unsigned char keys[kChunks / kBlockChunks][kPanels * kPanelBytes];
  alignas(1024) unsigned char q[kPanels * kQueryPanelBytes];
  alignas(1024) unsigned char weights[kWeightLines > 0 ? kWeightLines * 128 : 16];
  alignas(16) float maxima[kRows][4];  // by 16 tokens of the block, or by warpgroup
  alignas(16) float sums[kRows][4];
  u32 reached[kChunks];  // bit t: token t of the chunk counts
  alignas(8) u64 full[kWaves][kChunks], empty[kChunks], q_full, q_empty;
  u64 maxima_known, weighed[2];  // with 64 rows: by warpgroup 0; by each
};

JITKERN_DEVICE SharedAddress in_swizzled_line(SharedAddress line, int number, int byte) {
  return line + (((byte / 16) ^ (number % 8)) * 16) + byte % 16;
}
// Where byte `byte` of the 128-byte line `line` of a row goes, given the row's place among 16.
JITKERN_DEVICE SharedAddress query_place(const Shared& s, int tile, int row, int line, int byte) {
  return in_swizzled_line(shared_address(s.q) + line * kQueryPanelBytes + (16 * tile + row) * 128, row, byte);
}
JITKERN_DEVICE SharedAddress key_place(const Shared& s, int slot, int row, int line, int byte) {
  const int token = slot % kBlockChunks * kChunkTokens + row;
  return in_swizzled_line(shared_address(s.keys[slot / kBlockChunks]) + line * kPanelBytes + token * 128, row, byte);
}

}  // namespace jitkern
