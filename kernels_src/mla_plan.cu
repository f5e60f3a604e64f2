// mla_plan: share the keys of one decode step out among `parts` workers.
//
// In: lengths [batch] and, if given, the real number of requests, both on the device; later requests are
// pads. Out, written whole on each call: records [all_parts], num_splits [capacity + 1], rows [capacity],
// order [capacity + 1], split [all_parts] (include/mla_schedule.cuh says what each means). Nothing is carried
// from one call to the next.
//
// Two ways to cut. Even: with at most one piece a part, each request is cut into ceil(blocks / L) equal
// pieces, L the smallest length (at least `min_blocks`, to within 1/32) for which the pieces fit; with more
// requests than parts, none is cut and the parts end at whole requests. Level: parts of equal cost, a
// request's cost being its blocks and a fixed `request_cost`; a cut that would leave less than `crumb` blocks
// of a request moves to its end. Level is taken where the longest even part is more than `slack` per cent
// (and `split_cost` blocks) longer than a level one. At most 2 (parts - 1) pieces belong to split requests,
// whatever the batch: that bounds the rows of partial results.
//
// Launch: one block of kThreads. A step waits for it, so what counts is latency: owners of parts and pieces
// are marked and not searched for, sums over the block are few, and loops over strides run once as a rule and
// are not unrolled, so that little code is read. Bytes moved: about 4 (batch + 3 capacity) + 48 all_parts.
//
// include/mla_plan.cuh has what all ways share, mla_plan_even.cuh the even one (mla_plan_length.cuh its L,
// mla_plan_few.cuh the batches of one warp), mla_plan_level.cuh whole requests and level.
// Reference: what tests/test_mla_plan.py checks of every plan, and this text on the CPU.
//
// Holes (-D): JITKERN_ENTRY.
#include "include/mla_plan_even.cuh"
#include "include/mla_plan_level.cuh"

JITKERN_EXPORT(jitkern::PlanParams)

JITKERN_KERNEL(jitkern::PlanParams, jitkern::kThreads) {
  using namespace jitkern;
  JITKERN_SHARED PlanShared s;
  const int thread = static_cast<int>(threadIdx.x);
  wait_for_predecessor();
  let_next_kernel_start();
  const Loads loads = ask(p, thread);
  clear_marks(s.marks, p.parts, thread);
  const Divisor by_parts = divisor(p.parts);
  const Step step = add_up(p, s, loads, thread);
  if (step.requests <= p.parts && plan_evenly(p, s, step, by_parts, thread)) return;
  if (p.batch <= kCached) return plan_by_cost<true>(p, s, step, by_parts, thread);
  plan_by_cost<false>(p, s, step, by_parts, thread);
}
