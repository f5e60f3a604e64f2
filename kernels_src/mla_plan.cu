// mla_plan: share the keys of one decode step out among `parts` workers.
//
// In: lengths [batch] and, if given, the real number of requests, both on the device; later requests are pads.
// Out, written whole on each call: records [all_parts], num_splits [capacity + 1], rows [capacity], order [capacity + 1],
// split [all_parts] (include/mla_schedule.cuh says what each means). Nothing is carried from one call to the next.
//
// Two ways to cut. Even: with at most one piece a part, each request is cut into ceil(blocks / L) equal pieces, L the
// smallest length (and at least `min_blocks`) for which the pieces fit; with more requests than parts, none is cut and
// the parts end at whole requests. Level: parts of equal cost, a request's cost being its blocks and a fixed
// `request_cost`; a cut that would leave less than `crumb` blocks of a request moves to its end. Level is taken where
// the longest even part is more than `slack` per cent (and `split_cost` blocks) longer than a level one.
// At most 2 (parts - 1) pieces belong to split requests, whatever the batch: that bounds the rows of partial results.
//
// Launch: one block of kThreads; loops over strides run once as a rule and are not unrolled, so that little code is read. Bytes moved: about 4 (batch + 3 capacity) + 36 parts.
//
// Holes (-D): JITKERN_ENTRY.
#include "include/block_scan.cuh"
#include "include/mla_schedule.cuh"

namespace jitkern {

constexpr int kThreads = JITKERN_ON_GPU ? 512 : 1;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMaxParts = 1024;
constexpr int kCached = 2048;    // requests whose prefix sums stay in shared memory
constexpr int kCandidates = 16;  // lengths tried at once

struct PlanParams {
  const i32* lengths;
  const i32* count;  // may be null: all of the batch is real
  Record* records;
  i32* num_splits;
  i32* rows;
  i32* order;
  Split* split;
  i32* scratch;  // 3 (capacity + 1) words
  i32 batch, capacity;
  i32 parts, all_parts;  // workers of this step; rows of `records` and `split`
  i32 min_blocks, crumb, request_cost, split_cost, slack;
  i32 most_blocks;  // a longer request counts as this long, so that sums of any lengths fit; its last piece has the rest
};

struct Cut {
  i32 rank, block;  // of the first block behind the cut; block 0 is a request's start
};
JITKERN_DEVICE bool before(Cut a, Cut b) { return a.rank < b.rank || (a.rank == b.rank && a.block < b.block); }

struct Costs {  // of the requests that have keys, by rank
  const i32* prefix;  // exclusive sums of blocks + request_cost
  i32 requests, request_cost;
};
JITKERN_DEVICE i32 total_of(const Costs& costs) { return costs.prefix[costs.requests]; }
JITKERN_DEVICE i32 blocks_at(const Costs& costs, i32 rank) {
  return costs.prefix[rank + 1] - costs.prefix[rank] - costs.request_cost;
}

// The last i in [0, n) with prefix[i] <= x, for prefix[0] <= x.
JITKERN_DEVICE i32 last_not_above(const i32* prefix, i32 n, i32 x) {
  i32 low = 0, high = n;
  while (high - low > 1) {
    const i32 middle = (low + high) / 2;
    if (prefix[middle] <= x) low = middle;
    else high = middle;
  }
  return low;
}
// How many of the sorted cuts lie before `c`.
JITKERN_DEVICE i32 cuts_before(const Cut* cuts, i32 n, Cut c) {
  i32 low = 0, high = n;
  while (low < high) {
    const i32 middle = (low + high) / 2;
    if (before(cuts[middle], c)) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The first candidate whose pieces are not more than `parts`, or kCandidates.
JITKERN_DEVICE int first_that_fits(const i32* pieces, i32 parts, [[maybe_unused]] int thread) {
#if JITKERN_ON_GPU
  const int lane = thread % kWarp;
  const u32 fitting = __ballot_sync(~0u, lane < kCandidates && pieces[lane % kCandidates] <= parts);
  return fitting ? __ffs(static_cast<int>(fitting)) - 1 : kCandidates;
#else
  int fits = 0;
  while (fits < kCandidates && pieces[fits] > parts) ++fits;
  return fits;
#endif
}

// The smallest L at or above `low` with sum of ceil(blocks / L) <= parts, to within 1/32. All threads call it.
JITKERN_DEVICE i32 even_length(const Costs& costs, i32 low, i32 high, i32 parts, int thread, i32* pieces) {
  while (true) {
    const i32 step = ceil_div(high - low, kCandidates);
    for (int c = thread / kWarp; c < kCandidates; c += kWarps) {
      const i32 length = low + c * step;
      i32 sum = 0;
      for (i32 r = thread % kWarp; r < costs.requests; r += kWarp) sum += ceil_div(blocks_at(costs, r), length);
      sum = warp_sum(sum);
      if (thread % kWarp == 0) pieces[c] = sum;
    }
    block_barrier();
    const int fits = first_that_fits(pieces, parts, thread);
    block_barrier();
    if (fits == 0 || step == 0) return low;
    if (fits < kCandidates) high = min_of(high, low + fits * step);
    low = low + (fits - 1) * step + 1;
    if (high - low <= low / 32) return high;
  }
}

// Where the k-th of `parts` equal shares of the cost begins.
JITKERN_DEVICE Cut level_cut(const Costs& costs, i32 k, i32 parts, i32 crumb, bool whole) {
  const i32 total = total_of(costs);
  if (k >= parts) return Cut{costs.requests, 0};
  const i32 x = static_cast<i32>(static_cast<i64>(total) * k / parts);
  const i32 rank = last_not_above(costs.prefix, costs.requests, x);
  const i32 blocks = blocks_at(costs, rank);
  const i32 block = x - costs.prefix[rank] - costs.request_cost;
  if (whole) crumb = blocks;
  const bool short_head = block < crumb, short_tail = blocks - block < crumb;
  if (short_head && (!short_tail || 2 * block < blocks)) return Cut{rank, 0};
  if (short_tail) return Cut{rank + 1, 0};
  return Cut{rank, block};
}

}  // namespace jitkern

JITKERN_EXPORT(jitkern::PlanParams)

JITKERN_KERNEL(jitkern::PlanParams, jitkern::kThreads) {
  using namespace jitkern;
  JITKERN_SHARED u64 sums[kWarps];
  JITKERN_SHARED i32 maxima[kWarps], pieces_of[kCandidates];
  JITKERN_SHARED i32 cached_words[4][kCached + 1];
  JITKERN_SHARED Cut cuts[kMaxParts + 1];
  const int thread = static_cast<int>(threadIdx.x);
  wait_for_predecessor();
  let_next_kernel_start();
  const i32 count = p.count ? max_of(min_of(*p.count, p.batch), 0) : p.batch;

  // Ranks and costs. A word of the scan carries two sums: cost below bit 40, requests with keys above.
  const bool cached = p.batch <= kCached;
  const i32 stride = p.capacity + 1;
  i32* cost = cached ? cached_words[0] : p.scratch;
  i32* pieces = cached ? cached_words[1] : p.scratch + stride;
  i32* order = cached ? cached_words[2] : p.order;
  i32* ranks = cached ? cached_words[3] : p.scratch + 2 * stride;  // of the requests before it; ~rank if it has no keys
  u64 carry = 0;
  i32 longest = 0;
#pragma unroll 1
  for (i32 start = 0; start < p.batch; start += kThreads) {
    const i32 i = start + thread;
    const i32 blocks = i < count ? min_of(blocks_of(p.lengths[i]), p.most_blocks) : 0;
    longest = warp_max(max_of(longest, blocks));
    if (thread % kWarp == 0) maxima[thread / kWarp] = longest;  // the scan's barriers publish it
    const u64 word = blocks ? (1ull << 40) + static_cast<u64>(blocks + p.request_cost) : 0;
    const ScanResult sum = block_exclusive_sum<kThreads>(word, thread, sums);
    const u64 below = carry + sum.before;
    const i32 rank = static_cast<i32>(below >> 40);
    if (i < p.batch) ranks[i] = blocks ? rank : ~rank;
    if (blocks) {
      cost[rank] = static_cast<i32>(below);
      order[rank] = i;
      if (cached) p.order[rank] = i;
    }
    carry += sum.total;
  }
  const i32 requests = static_cast<i32>(carry >> 40);
  if (thread == 0) cost[requests] = static_cast<i32>(carry);
  block_barrier();
  longest = p.batch > 0 ? warp_max(maxima[thread % kWarp < kWarps ? thread % kWarp : 0]) : 0;
  const Costs costs{cost, requests, p.request_cost};
  const i32 blocks = total_of(costs) - requests * p.request_cost;

  // Even or level?
  const i32 level_parts = max_of(1, min_of(p.parts, total_of(costs) / max_of(1, 2 * p.crumb)));
  const i64 level_limit = static_cast<i64>(ceil_div(total_of(costs), level_parts) + p.split_cost) * (100 + p.slack);
  const bool one_piece_each = requests <= p.parts;
  bool even;
  i32 length = 1;
  if (one_piece_each) {
    const i32 low = max_of(max_of(p.min_blocks, 1), ceil_div(blocks, p.parts));
    length = requests ? even_length(costs, low, max_of(low, longest), p.parts, thread, pieces_of) : 1;
    even = static_cast<i64>(length + p.request_cost) * 100 <= level_limit;
  } else {
    for (i32 k = thread; k <= p.parts; k += kThreads) cuts[k] = level_cut(costs, k, p.parts, 0, true);
    block_barrier();
    i32 longest_part = 0;
    for (i32 k = thread; k < p.parts; k += kThreads)
      longest_part = max_of(longest_part, cost[cuts[k + 1].rank] - cost[cuts[k].rank]);
    even = static_cast<i64>(block_max<kThreads>(longest_part, thread, maxima)) * 100 <= level_limit;
  }
  const bool by_pieces = even && one_piece_each;
  if (!even) {
    for (i32 k = thread; k <= p.parts; k += kThreads)
      cuts[k] = level_cut(costs, k, level_parts, p.crumb, false);
    block_barrier();
  }

  // Pieces of each request. A word of the scan: pieces below bit 24, of split requests from there, split requests above.
  carry = 0;
#pragma unroll 1
  for (i32 start = 0; start < requests; start += kThreads) {
    const i32 rank = start + thread;
    u64 n = 0;
    if (rank < requests)
      n = by_pieces ? static_cast<u64>(ceil_div(blocks_at(costs, rank), length))
                    : 1ull + cuts_before(cuts, p.parts + 1, Cut{rank + 1, 0}) -
                          cuts_before(cuts, p.parts + 1, Cut{rank, 1});
    const u64 word = n < 2 ? n : n + (n << 24) + (1ull << 44);
    const ScanResult sum = block_exclusive_sum<kThreads>(word, thread, sums);
    const u64 below = carry + sum.before;
    if (rank < requests) {
      const i32 request = order[rank];
      pieces[rank] = static_cast<i32>(below & 0xffffff);
      p.rows[request] = n < 2 ? kDirect : static_cast<i32>((below >> 24) & 0xfffff);
      if (n >= 2)
        p.split[below >> 44] = Split{request, static_cast<i32>((below >> 24) & 0xfffff), static_cast<i32>(n), 0};
    }
    carry += sum.total;
  }
  const i32 all_pieces = static_cast<i32>(carry & 0xffffff);
  if (thread == 0) pieces[requests] = all_pieces;
#pragma unroll 1
  for (i32 s = static_cast<i32>(carry >> 44) + thread; s < p.all_parts; s += kThreads) p.split[s] = Split{-1, -1, -1, -1};
#pragma unroll 1
  for (i32 r = requests + thread; r <= p.capacity; r += kThreads) p.order[r] = -1;
  block_barrier();

#pragma unroll 1
  for (i32 i = thread; i <= p.capacity; i += kThreads) {
    const i32 word = i < p.batch ? ranks[i] : ~requests;
    const i32 rank = word < 0 ? ~word : word;
    p.num_splits[i] = pieces[rank] + min_of(i, count) - rank;
    if (i < p.capacity && word < 0) p.rows[i] = kEmpty;
  }

#pragma unroll 1
  for (i32 k = thread; k < p.all_parts; k += kThreads) {
    Record record{kIdle, kIdle, 0, 0, 0, 0, 0, 0};
    if (by_pieces && k < all_pieces) {
      const i32 rank = last_not_above(pieces, requests, k);
      const i32 request = order[rank], n = pieces[rank + 1] - pieces[rank], piece = k - pieces[rank];
      const i32 here = blocks_at(costs, rank), each = here / n, longer = here - each * n;  // the first `longer` have one more
      const i32 begin = piece * each + min_of(piece, longer);
      record = Record{request, request, begin, begin + each + (piece < longer), piece, piece > 0, piece + 1 < n, rank};
    } else if (!by_pieces && k < p.parts && before(cuts[k], cuts[k + 1])) {
      const Cut begin = cuts[k], end = cuts[k + 1];
      const bool inside = end.block > 0;
      const i32 last = inside ? end.rank : end.rank - 1;
      const i32 piece = begin.block ? k + 1 - cuts_before(cuts, p.parts + 1, Cut{begin.rank, 1}) : 0;
      record = Record{order[begin.rank], order[last],  begin.block, inside ? end.block : blocks_at(costs, last),
                      piece,               begin.block > 0, inside,      begin.rank};
    }
    p.records[k] = record;
  }
}
