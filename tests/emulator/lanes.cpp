// What the lanes of a warp do together: meeting, shuffles, votes and sums.
#include <cstring>

#include "state.h"

namespace emulator {
namespace {

void exchange(Shuffle kind, void* const* operands, u32 mask) {
  const auto at = [&](u32 lane) { return static_cast<ShuffleOperands*>(operands[lane]); };
  for (u32 lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    ShuffleOperands& own = *at(lane);
    const u32 first = lane / own.width * own.width, place = lane % own.width;
    u32 from = kind == Shuffle::from     ? own.selector % own.width
               : kind == Shuffle::across ? place ^ own.selector
               : kind == Shuffle::up     ? place - own.selector
                                         : place + own.selector;
    if (from >= own.width) from = place;  // past an end: the own value
    if (!(mask >> (first + from) & 1))
      fail("a shuffle reads lane %u, which is not in mask 0x%x", first + from, mask);
    own.result = at(first + from)->value;
  }
}

struct ReduceOperands {
  Reduce kind;
  u32 value, result;
};
u32 reduced(Reduce kind, u32 a, u32 b) {
  const int sa = static_cast<int>(a), sb = static_cast<int>(b);
  switch (kind) {
    case Reduce::add:
      return a + b;
    case Reduce::min:
      return a < b ? a : b;
    case Reduce::max:
      return a > b ? a : b;
    case Reduce::smin:
      return sa < sb ? a : b;
    case Reduce::smax:
      return sa > sb ? a : b;
    case Reduce::bits_and:
      return a & b;
    case Reduce::bits_xor:
      return a ^ b;
    default:
      return a | b;
  }
}
void reduce_all(void* const* operands, u32 mask) {
  u32 result = 0;
  bool first = true;
  for (u32 lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    const auto& own = *static_cast<ReduceOperands*>(operands[lane]);
    const u32 value = own.kind == Reduce::ballot ? (own.value ? 1u << lane : 0) : own.value;
    result = first ? value : reduced(own.kind, result, value);
    first = false;
  }
  for (u32 lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) static_cast<ReduceOperands*>(operands[lane])->result = result;
}

}  // namespace

void together(const char* what, u32 mask, void* operands, Work work) {
  Warp& warp = own_warp();
  mask &= warp.exists;
  const u32 own = 1u << current->lane;
  if (!(mask & own)) fail("%s: lane %u is not in its own mask 0x%x", what, current->lane, mask);
  Meeting* meeting = nullptr;
  for (Meeting& m : warp.meetings)
    if (m.arrived && m.mask == mask) meeting = &m;
  for (Meeting& m : warp.meetings)
    if (!meeting && !m.arrived) meeting = &m, m.mask = mask, m.what = what;
  if (!meeting) fail("%s: too many groups of lanes at once", what);
  if (std::strcmp(meeting->what, what)) fail("lanes of one warp are at %s and at %s", meeting->what, what);
  meeting->operands[current->lane] = operands;
  meeting->arrived |= own;
  if (meeting->arrived != mask) return wait("lanes of a warp, for those that are not here", current->warp);
  meeting->arrived = 0;
  work(meeting->operands, mask);
  warp.runnable |= mask;
  give_way();
}

void shuffle(Shuffle kind, u32 mask, ShuffleOperands& operands) {
  constexpr Work works[] = {[](void* const* o, u32 m) { exchange(Shuffle::from, o, m); },
                            [](void* const* o, u32 m) { exchange(Shuffle::across, o, m); },
                            [](void* const* o, u32 m) { exchange(Shuffle::up, o, m); },
                            [](void* const* o, u32 m) { exchange(Shuffle::down, o, m); }};
  constexpr const char* names[] = {"shfl", "shfl_xor", "shfl_up", "shfl_down"};
  together(names[static_cast<int>(kind)], mask, &operands, works[static_cast<int>(kind)]);
}
u32 reduce(Reduce kind, u32 mask, u32 value) {
  ReduceOperands operands{kind, value, 0};
  together(kind == Reduce::ballot ? "vote" : "reduce", mask, &operands, reduce_all);
  return operands.result;
}

}  // namespace emulator
