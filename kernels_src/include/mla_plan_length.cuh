// Even cuts: what a length makes of a request, and the length for which the pieces of all requests fit.
#pragma once
#include "include/mla_plan.cuh"

namespace jitkern {

struct EvenCut {
  i32 pieces, each, longer;
};
JITKERN_DEVICE EvenCut even_cut(i32 blocks, i32 length, f32 inverse) {
  const i32 pieces = ceil_ratio(blocks, 1, length, inverse);
  const i32 each = static_cast<i32>(static_cast<u32>(blocks) / static_cast<u32>(max_of(pieces, 1)));
  return EvenCut{pieces, each, blocks - each * pieces};
}

JITKERN_DEVICE EvenRequest even_request(i32 request, const EvenCut& cut, const Place& before) {
  return EvenRequest{request, before.rank + before.extra, cut.each, static_cast<u16>(cut.pieces),
                     static_cast<u16>(cut.longer)};
}
JITKERN_DEVICE Record even_record(const EvenRequest& of, i32 k, i32 rank) {
  const i32 piece = k - of.first, begin = piece * of.each + min_of(piece, of.longer);
  const i32 end = begin + of.each + (piece < of.longer);
  return Record{of.request, of.request, begin, end, piece, piece > 0, piece + 1 < of.pieces, rank};
}

// ---- the search

constexpr int kTogether = kCandidates / kWarps;  // candidates of one warp, in one pass over the requests
static_assert(kCandidates % kWarps == 0, "each warp tries as many");

JITKERN_DEVICE i32 longest_request(const PlanParams& p, PlanShared& s, const Step& step, int thread) {
  i32 longest = 0;
#pragma unroll 1
  for (i32 i = thread; i < p.batch; i += kThreads) longest = max_of(longest, own_blocks(p, step, i));
  return block_max<kThreads>(longest, thread, s.maxima);
}

// Pieces of all requests at the lengths low, low + gap, ..., counted by one warp.
JITKERN_DEVICE void count_pieces(const PlanParams& p, const Step& step, i32 low, i32 gap, int lane,
                                 i32* counts) {
  f32 inverse[kTogether];
  i32 sums[kTogether] = {};
  for (int n = 0; n < kTogether; ++n) inverse[n] = reciprocal(static_cast<f32>(low + n * gap));
#pragma unroll 2
  for (i32 i = lane; i < p.batch; i += kWarp) {
    const i32 blocks = counted_blocks(p, step.count, i, p.lengths[i]);
    for (int n = 0; n < kTogether; ++n) sums[n] += ceil_ratio(blocks, 1, low + n * gap, inverse[n]);
  }
  for (int n = 0; n < kTogether; ++n) {
    const i32 sum = warp_sum(sums[n]);
    if (lane == 0) counts[n] = sum;
  }
}

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

// The smallest L above `low`, which does not fit, with sum of ceil(blocks / L) <= parts, to within 1/32. The
// longest request's length fits; where it is the next one, as it is with equal requests, nothing is tried.
JITKERN_DEVICE i32 even_length(const PlanParams& p, PlanShared& s, const Step& step, i32 low, int thread) {
  const int lane = lane_of(thread), mine = warp_of(thread) * kTogether;
  i32 high = longest_request(p, s, step, thread);
  if (high - low == 1) return high;
#pragma unroll 1
  for (int turn = 0;; turn ^= 1) {
    i32* const counts = s.candidates[turn];
    const i32 gap = ceil_div(high - low, kCandidates);
    count_pieces(p, step, low + mine * gap, gap, lane, counts + mine);
    block_barrier();
    const int fits = first_that_fits(counts, p.parts, lane);
    if (fits == 0) return low;
    if (fits < kCandidates) high = min_of(high, low + fits * gap);
    low = low + (fits - 1) * gap + 1;
    if (high - low <= low / 32) return high;
  }
}

}  // namespace jitkern
