// By cost: the parts are shares of equal cost, and end at whole requests, or in the middle of some.
#pragma once
#include "include/mla_plan.cuh"

namespace jitkern {

struct Costs {     // of the requests that have keys, by rank
  i32* prefix;     // exclusive sums of blocks + request_cost
  i32* order;      // the requests
  Inside* inside;  // by request
  i32 requests, request_cost, total;
};
JITKERN_DEVICE i32 blocks_at(const Costs& costs, i32 rank) {
  return costs.prefix[rank + 1] - costs.prefix[rank] - costs.request_cost;
}

// Equal shares of the total: the k-th begins at floor(total * k / count).
struct Shares {
  i32 total, each, rest;
  Divisor count;
  f32 ratio;
};
JITKERN_DEVICE Shares shares_of(i32 total, Divisor count) {
  const i32 each = quotient(static_cast<u32>(total), count), n = static_cast<i32>(count.by);
  const f32 ratio = mul(static_cast<f32>(n), reciprocal(static_cast<f32>(total)));
  return Shares{total, each, total - each * n, count, ratio};
}
JITKERN_DEVICE i32 begin_of(const Shares& shares, i32 k) {
  return shares.each * k + quotient(static_cast<u32>(shares.rest * k), shares.count);
}
// Marks the shares that begin in [begin, end).
JITKERN_DEVICE void mark_shares(i32* marks, const Shares& shares, i32 begin, i32 end, i32 rank) {
  const i32 n = static_cast<i32>(shares.count.by);
  mark(marks, ceil_ratio(begin, n, shares.total, shares.ratio),
       ceil_ratio(end, n, shares.total, shares.ratio), rank);
}

// Fills `costs`, and marks the shares.
JITKERN_DEVICE void sum_costs(const PlanParams& p, PlanShared& s, const Step& step, const Costs& costs,
                              const Shares& shares, int thread) {
  i32 ranks = 0, sum = 0;
  int turn = 0;
#pragma unroll 1
  for (i32 start = 0; start < p.batch; start += kThreads, turn ^= 1) {
    const i32 i = start + thread;
    const i32 blocks = i < p.batch ? own_blocks(p, step, i) : 0;
    const u32 words[2] = {blocks > 0, blocks > 0 ? static_cast<u32>(blocks + p.request_cost) : 0};
    const Scan<2> scan = block_scan<kThreads>(words, thread, s.pairs[turn]);
    const i32 rank = ranks + static_cast<i32>(scan.before[0]), begin = sum + static_cast<i32>(scan.before[1]);
    if (i < p.batch) costs.inside[i] = Inside{0, 0};
    if (blocks > 0) {
      costs.prefix[rank] = begin;
      costs.order[rank] = p.order[rank] = i;
      mark_shares(s.marks, shares, begin, begin + static_cast<i32>(words[1]), rank);
    }
    ranks += static_cast<i32>(scan.total[0]);
    sum += static_cast<i32>(scan.total[1]);
  }
  if (thread == 0) costs.prefix[ranks] = sum;
  block_barrier();
}

// Where a share begins that begins at x, in this request.
JITKERN_DEVICE Cut cut_at(const Costs& costs, i32 rank, i32 x, i32 crumb, bool whole) {
  const i32 blocks = blocks_at(costs, rank);
  const i32 block = x - costs.prefix[rank] - costs.request_cost;
  if (whole) crumb = blocks;
  const bool short_head = block < crumb, short_tail = blocks - block < crumb;
  if (short_head && (!short_tail || 2 * block < blocks)) return Cut{rank, 0};
  if (short_tail) return Cut{rank + 1, 0};
  return Cut{rank, block};
}
JITKERN_DEVICE bool before(Cut a, Cut b) {
  return a.rank < b.rank || (a.rank == b.rank && a.block < b.block);
}

JITKERN_DEVICE void make_cuts(const PlanParams& p, PlanShared& s, const Costs& costs, const Shares& shares,
                              bool whole, int thread) {
  const i32 n = static_cast<i32>(shares.count.by);
#pragma unroll 1
  for (i32 start = 0; start <= p.parts; start += kThreads) {  // by whole warps
    const i32 k = start + thread;
    const i32 rank = latest_mark(k < n ? s.marks[k] : -1, lane_of(thread));
    if (k <= p.parts)
      s.cuts[k] = k < n ? cut_at(costs, rank, begin_of(shares, k), p.crumb, whole) : Cut{costs.requests, 0};
  }
  block_barrier();
}

JITKERN_DEVICE bool whole_is_level(const PlanParams& p, const PlanShared& s, const Costs& costs,
                                   Divisor by_parts, int thread) {
  bool level = true;
#pragma unroll 1
  for (i32 k = thread; k < p.parts; k += kThreads) {
    const i32 cost = costs.prefix[s.cuts[k + 1].rank] - costs.prefix[s.cuts[k].rank];
    level = level && level_enough(p, cost, costs.total, by_parts);
  }
  return block_all(level);
}

// Tells each request which cuts lie inside it.
JITKERN_DEVICE void find_inside(const PlanParams& p, const PlanShared& s, const Costs& costs, int thread) {
#pragma unroll 1
  for (i32 k = thread; k < p.parts; k += kThreads) {
    const Cut cut = s.cuts[k];
    if (cut.block == 0) continue;
    const Cut next = s.cuts[k + 1], previous = k > 0 ? s.cuts[k - 1] : Cut{-1, 0};
    Inside& inside = costs.inside[costs.order[cut.rank]];
    if (previous.rank != cut.rank || previous.block == 0) inside.first = static_cast<u16>(k);
    if (next.rank != cut.rank || next.block == 0) inside.end = static_cast<u16>(k + 1);
  }
  block_barrier();
}

JITKERN_DEVICE Record part_between(const Costs& costs, Cut begin, Cut end, i32 k) {
  const bool begins_inside = begin.block > 0, ends_inside = end.block > 0;
  const i32 last = ends_inside ? end.rank : end.rank - 1, request = costs.order[begin.rank];
  return Record{request,
                costs.order[last],
                begin.block,
                ends_inside ? end.block : blocks_at(costs, last),
                begins_inside ? k + 1 - costs.inside[request].first : 0,
                begins_inside,
                ends_inside,
                begin.rank};
}

JITKERN_DEVICE void write_parts(const PlanParams& p, const PlanShared& s, const Costs& costs, int thread) {
#pragma unroll 1
  for (i32 k = thread; k < p.all_parts; k += kThreads) {
    Record record = kNoRecord;
    if (k < p.parts && before(s.cuts[k], s.cuts[k + 1]))
      record = part_between(costs, s.cuts[k], s.cuts[k + 1], k);
    p.records[k] = record;
  }
}

// Whole requests: what there is to look up has no cuts in it.
JITKERN_DEVICE void write_whole(const PlanParams& p, const PlanShared& s, const Step& step,
                                const Costs& costs, int thread) {
  write_parts(p, s, costs, from_last_warp(thread));
#pragma unroll 1
  for (i32 i = thread; i < p.batch; i += kThreads)
    write_request(p, step, i, own_blocks(p, step, i) > 0, Place{0, 0, 0});
  write_rest(p, step, Place{step.requests, 0, 0}, from_middle(thread));
}

struct LevelCut {
  i32 pieces;
};
JITKERN_DEVICE void write_level(const PlanParams& p, PlanShared& s, const Step& step, const Costs& costs,
                                int thread) {
  find_inside(p, s, costs, thread);
  const auto cut_request = [&](i32 i, i32 blocks) {
    return LevelCut{blocks > 0 ? 1 + costs.inside[i].end - costs.inside[i].first : 0};
  };
  const Place all =
      number_pieces(p, s, step, p.parts, thread, cut_request, [](i32, const LevelCut&, const Place&) {});
  write_parts(p, s, costs, from_last_warp(thread));
  write_rest(p, step, all, from_middle(thread));
}

// Whole requests where there are more of them than parts and that is level enough, else level. `Cached`: the
// costs fit in shared memory.
template <bool Cached>
JITKERN_DEVICE void plan_by_cost(const PlanParams& p, PlanShared& s, const Step& step, Divisor by_parts,
                                 int thread) {
  Inside* inside = Cached ? s.inside : reinterpret_cast<Inside*>(p.scratch + p.capacity + 1);
  const i32 total = total_cost(p, step);
  const Costs costs{Cached ? s.prefix : p.scratch,
                    Cached ? s.order : p.order,
                    inside,
                    step.requests,
                    p.request_cost,
                    total};
#pragma unroll 1
  for (bool whole = step.requests > p.parts;; whole = false) {
    if (!whole) clear_marks(s.marks, p.parts, thread);
    const Shares shares = shares_of(total, whole ? by_parts : divisor(level_shares(p, total)));
    sum_costs(p, s, step, costs, shares, thread);
    make_cuts(p, s, costs, shares, whole, thread);
    if (!whole) return write_level(p, s, step, costs, thread);
    if (whole_is_level(p, s, costs, by_parts, thread)) return write_whole(p, s, step, costs, thread);
  }
}

}  // namespace jitkern
