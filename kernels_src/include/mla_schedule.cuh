// What a plan says, and how the kernels that follow it read it. Shared by the plan, the decode and the merge.
//
// A request's keys are cut into blocks of 64 tokens. A part is one worker's share of the step: a run of consecutive
// (request, block) pairs. A request that more than one part works on is split, and has one piece per part.
#pragma once
#include "include/target.cuh"

namespace jitkern {

// Lets the next kernel start early, up to its own wait_for_predecessor(). Nothing of ours is visible to it before.
JITKERN_DEVICE void let_next_kernel_start() {
#if JITKERN_ON_GPU && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

constexpr i32 kBlockTokens = 64;
constexpr i32 kDirect = -1;  // in `rows`: the request is one piece, its result goes straight to the output
constexpr i32 kEmpty = -2;   // in `rows`: no keys; the merge writes O = 0 and the L of an empty row
constexpr i32 kIdle = -1;    // in a record: the part has no work

// Eight words, the first seven with FlashMLA's meaning.
struct alignas(16) Record {
  i32 begin_request, end_request;  // both included; begin_request is kIdle where there is nothing to do
  i32 begin_block, end_block;      // of the first request, and (not included) of the last
  i32 begin_piece;                 // number of the first request's piece
  i32 begins_inside, ends_inside;  // whether the part starts, or stops, in the middle of a request
  i32 begin_rank;                  // place of begin_request in `order`
};
static_assert(sizeof(Record) == 32, "the host reads records as rows of eight words");
constexpr Record kNoRecord{kIdle, kIdle, 0, 0, 0, 0, 0, 0};

JITKERN_DEVICE i32 min_of(i32 a, i32 b) { return a < b ? a : b; }
JITKERN_DEVICE i32 max_of(i32 a, i32 b) { return a > b ? a : b; }
JITKERN_DEVICE i32 ceil_div(i32 a, i32 b) { return static_cast<i32>((static_cast<u32>(a) + b - 1) / b); }
JITKERN_DEVICE i32 blocks_of(i32 tokens) { return tokens > 0 ? ceil_div(tokens, kBlockTokens) : 0; }

struct alignas(16) Split {  // a request of several pieces; -1 in all words behind the last
  i32 request, first_row, pieces, unused;
};

struct PlanView {  // what the decode and the merge are given
  const Record* records;
  const i32* order;       // requests that have keys, ascending; then -1
  const i32* rows;        // first partial row of a split request, or kDirect, or kEmpty
  const i32* num_splits;  // prefix sums of the pieces; a request counts at least 1
  const Split* split;     // requests that are split, ascending
};

struct KeyRange {
  i32 length;              // keys of the request that can be reached
  i32 begin_block, end_block;  // this piece's share; nothing where end <= begin
};

// The share of `record` in `request`. Ends that are not cuts follow the present length, so that a plan made some
// tokens ago still covers every key once.
JITKERN_DEVICE KeyRange key_range(const Record& record, i32 request, i32 length, i32 reachable) {
  KeyRange range;
  range.length = max_of(min_of(length, reachable), 0);
  const i32 all = blocks_of(range.length);
  range.begin_block = request == record.begin_request ? record.begin_block : 0;
  range.end_block = request == record.end_request && record.ends_inside ? min_of(record.end_block, all) : all;
  return range;
}

}  // namespace jitkern
