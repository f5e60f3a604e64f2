// How the producer warps fetch the keys of a cache of 8-bit codes, which become elements of T on the way.
//
// A warp copies the codes of its 16 keys into the upper half of the slot that their elements will fill, and then widens
// them in place, 128 columns at a time: group g of the codes waits in line 4 + g and goes to lines 2 g and 2 g + 1, so
// what is overwritten has always been read. While one chunk is widened the copies of the warp's next one are under way,
// if its slot is free by then.
#pragma once
// Included behind a tile header, which says where rows go.
#include "include/mla_ring.cuh"

#if JITKERN_CACHE
namespace jitkern {

constexpr int kWholeGroups = kCodes / kScaleGroup;
constexpr int kRest = kD - kWholeGroups * kScaleGroup;  // columns behind the whole groups
constexpr int kRestLine = 2 * kWholeGroups;
static_assert(kWholeGroups == 4 && (kRest == 0 || kRest == 64), "the lines that are widened in place are laid out for this");

struct Chunk {  // of keys whose codes are on their way
  int slot;     // or -1
  u32 reached;
  float scale[2];  // of key lane % 16 and its groups lane / 16 and that + 2
};

// 16 bytes to shared memory by accesses as wide as alignment allows; zeros where there is nothing to read.
JITKERN_DEVICE void copy_16_bytes(SharedAddress to, const u8* from, const u8* readable) {
  const bool real = from != nullptr;
  if constexpr (JITKERN_PACK == 1) {
    u32 word[4] = {};
    for (int i = 0; i < 16; ++i) word[i / 4] |= (real ? static_cast<u32>(from[i]) : 0u) << (i % 4 * 8);
    store_shared(to, word);
  } else {
    constexpr int kBytes = 2 * JITKERN_PACK;
#pragma unroll
    for (int i = 0; i < 16; i += kBytes) copy_async<kBytes>(to + i, (real ? from : readable) + i, real);
  }
}
JITKERN_DEVICE float load_float(const u8* from) {
  if constexpr (JITKERN_PACK > 1) return *reinterpret_cast<const float*>(from);
  u32 bits = 0;
  for (int i = 0; i < 4; ++i) bits |= static_cast<u32>(from[i]) << (8 * i);
  return float_of(bits);
}

// Starts the copies of the key at `offset` (that of lane % 16; negative: none) to a free slot. Eight lanes share a key.
JITKERN_DEVICE void start_codes(const DecodeParams& p, const Shared& s, Chunk& chunk, i64 offset, int lane) {
  const int byte = 16 * (lane % 8);
#pragma unroll (kRows > 32 ? 1 : 4)  // with 64 rows a producer has 72 registers
  for (int i = 0; i < 4; ++i) {
    const int row = 4 * i + lane / 8;
    const i64 mine = __shfl_sync(~0u, offset, row);
    const u8* from = mine >= 0 ? p.cache + mine + byte : nullptr;
#pragma unroll
    for (int group = 0; group < kWholeGroups; ++group)
      copy_16_bytes(key_place(s, chunk.slot, row, 4 + group, byte), from ? from + group * kScaleGroup : nullptr, p.cache);
    if constexpr (kCache == kTokens)
      copy_16_bytes(key_place(s, chunk.slot, row, kRestLine, byte), from ? from + kRopeByte : nullptr, p.cache);
    else if (byte < kRest)
      copy_16_bytes(key_place(s, chunk.slot, row, kRestLine, byte), from ? from + kWholeGroups * kScaleGroup : nullptr,
                    p.cache);
  }
  copies_commit();
  if constexpr (kCache == kTokens)
    for (int i = 0; i < 2; ++i)
      chunk.scale[i] = offset >= 0 ? load_float(p.cache + offset + kCodes + 4 * (lane / 16 + 2 * i)) : 0.0f;
}

// Four codes to four elements of T.
JITKERN_DEVICE void widen_codes(u32 codes, float scale, u32& low, u32& high) {
  float x[4];
  widen_float8_pair<e4m3>(static_cast<u16>(codes), x[0], x[1]);
  widen_float8_pair<e4m3>(static_cast<u16>(codes >> 16), x[2], x[3]);
  if constexpr (kCache == kTokens)
    for (int i = 0; i < 4; ++i) x[i] *= scale;
  low = narrow_pair<T>(x[0], x[1]);
  high = narrow_pair<T>(x[2], x[3]);
}

// 16 codes to a quarter of a line. Its halves take turns, or eight lanes would meet in half of the banks.
JITKERN_DEVICE void store_widened(const Shared& s, int slot, int row, int unit, const u32 (&codes)[4], float scale) {
  u32 half[2][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) widen_codes(codes[i], scale, half[i / 2][i % 2 * 2], half[i / 2][i % 2 * 2 + 1]);
  const bool second_first = unit / 4 % 2;
#pragma unroll
  for (int turn = 0; turn < 2; ++turn) {
    const bool second = second_first != (turn == 1);
    u32 word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = second ? half[1][i] : half[0][i];
    store_shared(key_place(s, slot, row, unit / 4, unit % 4 * 32 + (second ? 16 : 0)), word);
  }
}

// Widens the codes that wait in a line to columns 16 `first_unit` and on; `lanes` of eight have 16 codes of a key each.
JITKERN_DEVICE void widen_line(const Shared& s, int slot, int line, int first_unit, int lanes, float scale, int scale_lane,
                               int lane) {
  u32 codes[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (lane % 8 < lanes) load_shared(codes[i], key_place(s, slot, 4 * i + lane / 8, line, 16 * (lane % 8)));
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 4 * i + lane / 8;
    const float own = kCache == kTokens ? __shfl_sync(~0u, scale, scale_lane + row) : 1.0f;
    if (lane % 8 < lanes) store_widened(s, slot, row, first_unit + lane % 8, codes[i], own);
  }
}

// Waits for a chunk's copies, and not for those of the one behind it, and hands its keys to the consumers. A lane widens
// what it has copied itself; the consumers order what was stored before their matrix reads.
JITKERN_DEVICE void finish_codes(Shared& s, const Chunk& chunk, bool others_behind, int lane) {
  if (others_behind) copies_wait<1>();
  else copies_wait<0>();
#pragma unroll 1
  for (int group = 0; group < kWholeGroups; ++group)
    widen_line(s, chunk.slot, 4 + group, 8 * group, 8, group < 2 ? chunk.scale[0] : chunk.scale[1], 16 * (group % 2), lane);
  if constexpr (kCache == kScaled && kRest > 0)
    widen_line(s, chunk.slot, kRestLine, 8 * kWholeGroups, kRest / 16, 1.0f, 0, lane);
  if (lane == 0) s.reached[chunk.slot] = chunk.reached;
  for (int wave = 0; wave < kWaves; ++wave) {
    const SharedAddress full = shared_address(&s.full[wave][chunk.slot]);
    barrier_arrive(full);
    if (lane == 0) barrier_arrive(full);
  }
}

// All keys of a piece that are this warp's. `key_now()` gives that of lane % 16, `advance()` goes on to the next block. The
// last chunk is finished before the piece is left: the consumers cannot end the piece without it, and it may be their
// queries' end that the producer waits for next.
template <class KeyNow, class Advance>
JITKERN_DEVICE void fetch_piece(const DecodeParams& p, Shared& s, const Piece& piece, Ring& ring, int lane,
                                KeyNow&& key_now, Advance&& advance) {
  Chunk before{-1, 0, {}};
#pragma unroll 1
  for (i32 block = piece.begin; block <= piece.end; ++block) {
    const bool more = block < piece.end;
    const i64 offset = more ? key_now().offset : -1;
    if (more) advance();
    Chunk next{more ? ring.slot : -1, __ballot_sync(~0u, offset >= 0), {}};
    const SharedAddress empty = shared_address(&s.empty[ring.slot]);
    const bool at_once = more && (before.slot < 0 || __all_sync(~0u, barrier_passed(empty, ring.parity ^ 1)));
#pragma unroll 1
    for (int turn = at_once ? 0 : 1; turn < 3; ++turn) {  // start and finish, or finish and start
      if (turn == 1) {
        if (before.slot >= 0) finish_codes(s, before, at_once, lane);
      } else if (more && at_once == (turn == 0)) {
        barrier_wait(empty, ring.parity ^ 1);
        start_codes(p, s, next, offset, lane);
      }
    }
    before = next;
    if (more) ring = ahead(ring, kProducerWarps);
  }
}

}  // namespace jitkern
#endif
