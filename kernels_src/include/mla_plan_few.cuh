// Even, of a batch that one warp holds: each warp makes the same plan in its registers and writes its
// records, without a barrier of the block.
#pragma once
#include "include/mla_plan_length.cuh"

namespace jitkern {

JITKERN_DEVICE i32 from_lane(i32 x, [[maybe_unused]] i32 lane) {
#if JITKERN_ON_GPU
  return __shfl_sync(~0u, x, lane);
#else
  return x;
#endif
}
JITKERN_DEVICE void warp_barrier() {
#if JITKERN_ON_GPU
  __syncwarp();
#endif
}

// Records of the pieces of the lanes' requests. A warp marks only what it reads, and what it reads are the
// marks that clear_marks() had it clear.
JITKERN_DEVICE void write_few_records(const PlanParams& p, PlanShared& s, const EvenRequest& mine, i32 rank,
                                      i32 pieces, int thread) {
  const int lane = lane_of(thread);
  warp_barrier();  // behind clear_marks()
#pragma unroll 1
  for (i32 start = thread - lane; start < p.all_parts; start += kThreads) {
    const i32 k = start + lane, first = max_of(mine.first, start);
    if (first < min_of(mine.first + mine.pieces, start + kWarp)) s.marks[first] = lane;
    warp_barrier();
    const i32 owner = latest_mark(k < pieces ? s.marks[k] : -1, lane);
    const i32 counts = from_lane(mine.longer << 16 | mine.pieces, owner);
    const EvenRequest of{from_lane(mine.request, owner), from_lane(mine.first, owner),
                         from_lane(mine.each, owner), static_cast<u16>(counts),
                         static_cast<u16>(counts >> 16)};
    const i32 rank_of = from_lane(rank, owner);
    if (k < p.all_parts) p.records[k] = k < pieces ? even_record(of, k, rank_of) : kNoRecord;
  }
}

// False, with nothing written, where this length does not fit.
JITKERN_DEVICE bool plan_few(const PlanParams& p, PlanShared& s, const Step& step, i32 length, int thread) {
  const int lane = lane_of(thread), other = from_last_warp(thread);
  const EvenCut cut = even_cut(step.own, length, reciprocal(static_cast<f32>(length)));
  const u32 word = packed(cut.pieces), sum = warp_inclusive_sum(word, lane);
  const Place before = plus(Place{0, 0, 0}, sum - word);
  const Place all = plus(Place{0, 0, 0}, static_cast<u32>(from_lane(static_cast<i32>(sum), kWarp - 1)));
  const i32 pieces = all.rank + all.extra;
  if (pieces > p.parts) return false;
  write_few_records(p, s, even_request(lane, cut, before), before.rank, pieces, thread);
  // The last warp, which has the fewest records, holds request `other` too.
  if (other < p.batch) write_request(p, step, other, cut.pieces, before);
  if (other < p.batch && cut.pieces > 0) p.order[before.rank] = other;
  write_rest(p, step, all, from_middle(thread));
  return true;
}

}  // namespace jitkern
