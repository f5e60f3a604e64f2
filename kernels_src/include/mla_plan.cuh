// What both ways of cutting share: the parameters, exact quotients, marks, and what is looked up by request.
#pragma once
#include "include/arithmetic.cuh"
#include "include/block_scan.cuh"
#include "include/mla_schedule.cuh"

namespace jitkern {

constexpr int kThreads = JITKERN_ON_GPU ? 256 : 1;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMaxParts = 1024;
constexpr int kCached = 1024;    // requests whose costs stay in shared memory
constexpr int kCandidates = 16;  // even lengths tried at once

struct PlanParams {
  const i32* lengths;
  const i32* count;  // may be null: all of the batch is real
  Record* records;
  i32* num_splits;
  i32* rows;
  i32* order;
  Split* split;
  i32* scratch;  // 2 (capacity + 1) words
  i32 batch, capacity;
  i32 parts, all_parts;  // workers of this step; rows of `records` and `split`
  i32 min_blocks, crumb, request_cost, split_cost, slack;
  i32 most_blocks;  // longer requests count as this long: sums of any lengths fit, last pieces have the rest
};

// ---- quotients: a division of integers takes longer than a barrier

// Of any two numbers, where the divisor is known long before the dividend.
struct Divisor {
  u32 by, inverse;
};
JITKERN_DEVICE Divisor divisor(i32 by) { return Divisor{static_cast<u32>(by), ~0u / static_cast<u32>(by)}; }
JITKERN_DEVICE i32 quotient(u32 x, Divisor d) {
  const u32 q = static_cast<u32>(static_cast<u64>(x) * d.inverse >> 32);  // at most one too small
  return static_cast<i32>(q + (x - q * d.by >= d.by));
}
JITKERN_DEVICE i32 ceil_quotient(i32 x, Divisor d) { return quotient(static_cast<u32>(x) + d.by - 1, d); }

// ceil(x * times / by) for results up to some thousands; `ratio` is times / by as nearly as a float can say
// it, so that the nearest integer is the result, or one too small.
JITKERN_DEVICE i32 ceil_ratio(i32 x, i32 times, i32 by, f32 ratio) {
  const u32 near = static_cast<u32>(static_cast<i32>(fma(static_cast<f32>(x), ratio, 0.5f)));
  const bool small =
      static_cast<u64>(near) * static_cast<u32>(by) < static_cast<u64>(static_cast<u32>(x)) * times;
  return static_cast<i32>(near + small);
}

// ---- marks: who owns a number of a row of numbers, without a search

// An owner marks its numbers [begin, end): the first, and the first in each warp of readers.
JITKERN_DEVICE void mark(i32* marks, i32 begin, i32 end, i32 owner) {
#pragma unroll 1
  for (i32 k = begin; k < end; k = (k / kWarp + 1) * kWarp) marks[k] = owner;
}
// The reader of number k, and its warp, bring marks[k], or -1: the latest mark is the owner's.
JITKERN_DEVICE i32 latest_mark(i32 mark, [[maybe_unused]] int lane) {
#if JITKERN_ON_GPU
  const u32 marked = __ballot_sync(~0u, mark >= 0) & ~0u >> (kWarp - 1 - lane);
  return __shfl_sync(~0u, mark, kWarp - 1 - __clz(static_cast<int>(marked)));
#else
  return mark;
#endif
}
JITKERN_DEVICE void clear_marks(i32* marks, i32 n, int thread) {
#pragma unroll 1
  for (i32 k = thread; k < n; k += kThreads) marks[k] = -1;
}

// ---- the step

struct alignas(16) EvenRequest {  // by rank: what the writers of its pieces' records need
  i32 request, first;             // number of its first piece among all
  i32 each;                       // blocks of a piece; the first `longer` of its pieces have one more
  u16 pieces, longer;
};
struct Cut {
  i32 rank, block;  // of the first block behind the cut; block 0 is a request's start
};
struct Inside {
  u16 first, end;  // numbers of the cuts in the middle of a request
};

struct PlanShared {
  WarpSums<kThreads, 1> sums;
  WarpSums<kThreads, 2> pairs[2];
  i32 maxima[kWarps], candidates[2][kCandidates];
  i32 marks[kMaxParts];
  EvenRequest even[kMaxParts];
  Cut cuts[kMaxParts + 1];
  i32 prefix[kCached + 1], order[kCached];
  Inside inside[kCached];
};

// Threads counted from other warps, for what may be written at the same time.
JITKERN_DEVICE int from_last_warp(int thread) {
  return (kWarps - 1 - warp_of(thread)) * kWarp + lane_of(thread);
}
JITKERN_DEVICE int from_middle(int thread) { return thread ^ kThreads / 2; }
static_assert((kThreads & (kThreads - 1)) == 0, "from_middle() must stay within the block");

// A batch that one warp holds: then each warp makes the plan, and none waits for another.
JITKERN_DEVICE bool is_few(const PlanParams& p) { return p.batch <= kWarp; }
// The request whose length a thread keeps; the others' are asked for again.
JITKERN_DEVICE int own_request(const PlanParams& p, int thread) {
  return is_few(p) ? lane_of(thread) : thread;
}

struct Loads {  // of every plan, on their way together
  i32 length, count;
};
JITKERN_DEVICE Loads ask(const PlanParams& p, int thread) {
  const i32 i = own_request(p, thread);
  return Loads{i < p.batch ? p.lengths[i] : 0, p.count ? *p.count : p.batch};
}

struct Step {
  i32 count, own;        // requests that are real; blocks of own_request()
  i32 requests, blocks;  // with keys; of all of them
};
JITKERN_DEVICE i32 counted_blocks(const PlanParams& p, i32 count, i32 i, i32 length) {
  return i < count ? min_of(blocks_of(length), p.most_blocks) : 0;
}
// Of a request of this thread, i = thread + n kThreads < batch.
JITKERN_DEVICE i32 own_blocks(const PlanParams& p, const Step& step, i32 i) {
  return i < kThreads ? step.own : counted_blocks(p, step.count, i, p.lengths[i]);
}

JITKERN_DEVICE Step add_up(const PlanParams& p, PlanShared& s, const Loads& loads, int thread) {
  const i32 count = max_of(min_of(loads.count, p.batch), 0);
  const i32 own = counted_blocks(p, count, own_request(p, thread), loads.length);
  u32 sums[2] = {own > 0, static_cast<u32>(own)};
#pragma unroll 1
  for (i32 i = thread + kThreads; i < p.batch; i += kThreads) {
    const i32 blocks = counted_blocks(p, count, i, p.lengths[i]);
    sums[0] += blocks > 0;
    sums[1] += static_cast<u32>(blocks);
  }
  if (is_few(p))
    warp_sums(sums);
  else
    block_sums<kThreads>(sums, thread, s.pairs[1]);
  return Step{count, own, static_cast<i32>(sums[0]), static_cast<i32>(sums[1])};
}

// ---- what is looked up by request

struct Place {  // how many come before a request, or in all
  i32 rank;     // requests with keys
  i32 extra;    // pieces behind their request's first
  i32 split;    // requests of several pieces
};
constexpr int kBits = 10;  // of each in a word of the scan
static_assert(kThreads < 1 << kBits && kMaxParts <= 1 << kBits, "one round's requests, all extra pieces");

JITKERN_DEVICE u32 packed(i32 pieces) {
  const u32 extra = static_cast<u32>(pieces - 1), split = pieces > 1;
  return pieces > 0 ? 1 + (extra << kBits) + (split << 2 * kBits) : 0;
}
JITKERN_DEVICE Place plus(const Place& a, u32 word) {
  constexpr u32 kMask = (1 << kBits) - 1;
  return Place{a.rank + static_cast<i32>(word & kMask), a.extra + static_cast<i32>(word >> kBits & kMask),
               a.split + static_cast<i32>(word >> 2 * kBits)};
}

JITKERN_DEVICE void write_request(const PlanParams& p, const Step& step, i32 i, i32 pieces,
                                  const Place& before) {
  const i32 row = before.extra + before.split;
  p.num_splits[i] = before.extra + min_of(i, step.count);
  p.rows[i] = pieces == 0 ? kEmpty : pieces == 1 ? kDirect : row;
  if (pieces > 1) p.split[before.split] = Split{i, row, pieces, 0};
}
// What lies behind the requests and the split ones.
JITKERN_DEVICE void write_rest(const PlanParams& p, const Step& step, const Place& all, int thread) {
#pragma unroll 1
  for (i32 i = thread; i <= p.capacity; i += kThreads) {
    if (i >= step.requests) p.order[i] = -1;
    if (i >= p.batch) p.num_splits[i] = all.extra + step.count;
    if (i >= p.batch && i < p.capacity) p.rows[i] = kEmpty;
  }
#pragma unroll 1
  for (i32 k = all.split + thread; k < p.all_parts; k += kThreads) p.split[k] = Split{-1, -1, -1, -1};
}

// Numbers the pieces: cut(i, blocks).pieces of each request, none of one without blocks; visit(i, cut,
// before) puts what the records need into shared memory, and a barrier comes before what nobody waits for.
// Returns what there is in all; gives up as soon as that is more than `most` extra pieces.
template <class CutRequest, class Visit>
JITKERN_DEVICE Place number_pieces(const PlanParams& p, PlanShared& s, const Step& step, i32 most, int thread,
                                   CutRequest cut_request, Visit visit) {
  Place all{0, 0, 0};
#pragma unroll 1
  for (i32 start = 0; start < p.batch && all.extra <= most; start += kThreads) {
    const i32 i = start + thread;
    const auto cut = cut_request(i, i < p.batch ? own_blocks(p, step, i) : 0);
    const u32 word[1] = {packed(cut.pieces)};
    const Scan<1> scan = block_scan<kThreads>(word, thread, s.sums);
    const Place before = plus(all, scan.before[0]);
    all = plus(all, scan.total[0]);
    const bool fits = all.extra <= most;
    if (fits && cut.pieces > 0) visit(i, cut, before);
    block_barrier();
    if (fits && i < p.batch) write_request(p, step, i, cut.pieces, before);
    if (fits && cut.pieces > 0) p.order[before.rank] = i;
  }
  return all;
}

// ---- even or level?

JITKERN_DEVICE i32 total_cost(const PlanParams& p, const Step& step) {
  return step.blocks + step.requests * p.request_cost;
}
JITKERN_DEVICE i32 level_shares(const PlanParams& p, i32 total) {
  return max_of(1, min_of(p.parts, total / max_of(1, 2 * p.crumb)));
}
// Whether a part of this cost is short enough to do without a level cut. What is so for as many shares as
// there are parts is so for fewer: that spares most plans two divisions.
JITKERN_DEVICE bool level_enough(const PlanParams& p, i32 cost, i32 total, Divisor by_parts) {
  const i64 mine = static_cast<i64>(cost) * 100, percent = 100 + p.slack;
  if (mine <= (ceil_quotient(total, by_parts) + p.split_cost) * percent) return true;
  return mine <= (ceil_div(total, level_shares(p, total)) + p.split_cost) * percent;
}

}  // namespace jitkern
