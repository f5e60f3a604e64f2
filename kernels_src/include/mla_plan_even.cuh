// Even: each request is cut into ceil(blocks / L) equal pieces, and a part has one piece at most.
#pragma once
#include "include/mla_plan_few.cuh"
#include "include/mla_plan_length.cuh"

namespace jitkern {

// Writes and marks all but the records; the extra pieces are more than parts - requests where this length
// does not fit.
JITKERN_DEVICE Place cut_evenly(const PlanParams& p, PlanShared& s, const Step& step, i32 length,
                                int thread) {
  const f32 inverse = reciprocal(static_cast<f32>(length));
  const auto cut_request = [&](i32, i32 blocks) { return even_cut(blocks, length, inverse); };
  const auto visit = [&](i32 i, const EvenCut& cut, const Place& before) {
    const EvenRequest request = even_request(i, cut, before);
    s.even[before.rank] = request;
    mark(s.marks, request.first, request.first + cut.pieces, before.rank);
  };
  return number_pieces(p, s, step, p.parts - step.requests, thread, cut_request, visit);
}

JITKERN_DEVICE void write_even_records(const PlanParams& p, const PlanShared& s, i32 pieces, int thread) {
#pragma unroll 1
  for (i32 start = 0; start < p.all_parts; start += kThreads) {  // by whole warps
    const i32 k = start + thread;
    const i32 rank = latest_mark(k < pieces ? s.marks[k] : -1, lane_of(thread));
    if (k < p.all_parts) p.records[k] = k < pieces ? even_record(s.even[rank], k, rank) : kNoRecord;
  }
}

// False, with the marks clear, where this length does not fit.
JITKERN_DEVICE bool plan_many(const PlanParams& p, PlanShared& s, const Step& step, i32 length, int thread) {
  const Place all = cut_evenly(p, s, step, length, thread);
  const i32 pieces = step.requests + all.extra;
  if (pieces > p.parts) {
    clear_marks(s.marks, p.parts, thread);
    return false;
  }
  write_even_records(p, s, pieces, from_last_warp(thread));
  write_rest(p, step, all, from_middle(thread));
  return true;
}

// Returns false where level cuts are better; nothing that was written by then stays. The least length that
// may fit is tried at once: with equal requests it does as a rule.
JITKERN_DEVICE bool plan_evenly(const PlanParams& p, PlanShared& s, const Step& step, Divisor by_parts,
                                int thread) {
  i32 length = max_of(max_of(p.min_blocks, 1), ceil_quotient(step.blocks, by_parts));
#pragma unroll 1
  while (step.requests == 0 || level_enough(p, length + p.request_cost, total_cost(p, step), by_parts)) {
    if (is_few(p) ? plan_few(p, s, step, length, thread) : plan_many(p, s, step, length, thread)) return true;
    length = even_length(p, s, step, length, thread);
  }
  return false;
}

}  // namespace jitkern
