// Even: each request is cut into ceil(blocks / L) equal pieces, and a part has one piece at most.
#pragma once
#include "include/mla_plan.cuh"

namespace jitkern {

// The first candidate whose pieces are not more than `parts`, or kCandidates.
JITKERN_DEVICE int first_that_fits(const i32* pieces, i32 parts, [[maybe_unused]] int lane) {
#if JITKERN_ON_GPU
  const u32 fitting = __ballot_sync(~0u, lane < kCandidates && pieces[lane % kCandidates] <= parts);
  return fitting ? __ffs(static_cast<int>(fitting)) - 1 : kCandidates;
#else
  int fits = 0;
  while (fits < kCandidates && pieces[fits] > parts) ++fits;
  return fits;
#endif
}

// Pieces of all requests, counted by one warp.
JITKERN_DEVICE i32 pieces_of_all(const PlanParams& p, const Step& step, i32 length, int lane) {
  const f32 inverse = reciprocal(static_cast<f32>(length));
  i32 sum = 0;
#pragma unroll 1
  for (i32 i = lane; i < p.batch; i += kWarp)
    sum += ceil_ratio(counted_blocks(p, step.count, i, p.lengths[i]), 1, length, inverse);
  return warp_sum(sum);
}

JITKERN_DEVICE i32 longest_request(const PlanParams& p, PlanShared& s, const Step& step, int thread) {
  i32 longest = 0;
#pragma unroll 1
  for (i32 i = thread; i < p.batch; i += kThreads) longest = max_of(longest, own_blocks(p, step, i));
  return block_max<kThreads>(longest, thread, s.maxima);
}

// The smallest L at or above `low` with sum of ceil(blocks / L) <= parts, to within 1/32. All threads call
// it.
JITKERN_DEVICE i32 even_length(const PlanParams& p, PlanShared& s, const Step& step, i32 low, int thread) {
  const int lane = lane_of(thread);
  i32 high = max_of(low, longest_request(p, s, step, thread));
#pragma unroll 1
  for (int turn = 0;; turn ^= 1) {
    const i32 gap = ceil_div(high - low, kCandidates);
#pragma unroll 1
    for (int c = warp_of(thread); c < kCandidates; c += kWarps) {
      const i32 pieces = pieces_of_all(p, step, low + c * gap, lane);
      if (lane == 0) s.candidates[turn][c] = pieces;
    }
    block_barrier();
    const int fits = first_that_fits(s.candidates[turn], p.parts, lane);
    if (fits == 0 || gap == 0) return low;
    if (fits < kCandidates) high = min_of(high, low + fits * gap);
    low = low + (fits - 1) * gap + 1;
    if (high - low <= low / 32) return high;
  }
}

struct EvenCut {
  i32 pieces, each, longer;
};
JITKERN_DEVICE EvenCut even_cut(i32 blocks, i32 length, f32 inverse) {
  const i32 pieces = ceil_ratio(blocks, 1, length, inverse);
  const i32 each = static_cast<i32>(static_cast<u32>(blocks) / static_cast<u32>(max_of(pieces, 1)));
  return EvenCut{pieces, each, blocks - each * pieces};
}

// Writes and marks all but the records; the extra pieces are more than parts - requests where this length
// does not fit.
JITKERN_DEVICE Place cut_evenly(const PlanParams& p, PlanShared& s, const Step& step, i32 length,
                                int thread) {
  const f32 inverse = reciprocal(static_cast<f32>(length));
  const auto cut_request = [&](i32, i32 blocks) { return even_cut(blocks, length, inverse); };
  const auto visit = [&](i32 i, const EvenCut& cut, const Place& before) {
    const i32 first = before.rank + before.extra;
    s.even[before.rank] =
        EvenRequest{i, first, cut.each, static_cast<u16>(cut.pieces), static_cast<u16>(cut.longer)};
    mark(s.marks, first, first + cut.pieces, before.rank);
  };
  return number_pieces(p, s, step, p.parts - step.requests, thread, cut_request, visit);
}

JITKERN_DEVICE Record even_record(const EvenRequest& of, i32 k, i32 rank) {
  const i32 piece = k - of.first, begin = piece * of.each + min_of(piece, of.longer);
  const i32 end = begin + of.each + (piece < of.longer);
  return Record{of.request, of.request, begin, end, piece, piece > 0, piece + 1 < of.pieces, rank};
}

JITKERN_DEVICE void write_even_records(const PlanParams& p, const PlanShared& s, i32 pieces, int thread) {
#pragma unroll 1
  for (i32 start = 0; start < p.all_parts; start += kThreads) {  // by whole warps
    const i32 k = start + thread;
    const i32 rank = latest_mark(k < pieces ? s.marks[k] : -1, lane_of(thread));
    if (k < p.all_parts) p.records[k] = k < pieces ? even_record(s.even[rank], k, rank) : kNoRecord;
  }
}

// Returns false where level cuts are better; nothing that was written by then stays. The least length that
// may fit is tried at once: with equal requests it does as a rule.
JITKERN_DEVICE bool plan_evenly(const PlanParams& p, PlanShared& s, const Step& step, Divisor by_parts,
                                int thread) {
  i32 length = max_of(max_of(p.min_blocks, 1), ceil_quotient(step.blocks, by_parts));
  Place all;
#pragma unroll 1
  while (true) {
    if (step.requests > 0 && !level_enough(p, length + p.request_cost, total_cost(p, step), by_parts))
      return false;
    all = cut_evenly(p, s, step, length, thread);
    if (step.requests + all.extra <= p.parts) break;
    clear_marks(s.marks, p.parts, thread);
    length = even_length(p, s, step, length, thread);
  }
  write_even_records(p, s, step.requests + all.extra, from_last_warp(thread));
  write_rest(p, step, all, from_middle(thread));
  return true;
}

}  // namespace jitkern
