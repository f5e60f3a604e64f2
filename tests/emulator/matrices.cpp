// Matrix instructions: by the lanes of a warp, and by warpgroups on described shared memory.
#include <cstring>
#include <limits>

#include "state.h"

namespace emulator {
namespace {

void load_all(void* const* operands, u32) {
  const auto at = [&](u32 lane) -> Fragments& { return *static_cast<Fragments*>(operands[lane]); };
  for (u32 i = 0; i < at(0).count; ++i) {
    u16 matrix[8][8];
    for (u32 row = 0; row < 8; ++row) {
      const u32 lane = 8 * i + row;
      std::memcpy(matrix[row], at_shared(at(lane).address, 16), 16);
      note_shared_read(at(lane).address, 16, lane);
    }
    for (u32 lane = 0; lane < 32; ++lane) {
      const u32 row = lane / 4, column = 2 * (lane % 4);
      const bool turned = at(lane).transposed;
      const u32 low = turned ? matrix[column][row] : matrix[row][column];
      const u32 high = turned ? matrix[column + 1][row] : matrix[row][column + 1];
      at(lane).r[i] = low | high << 16;
    }
  }
}

u32 size_of(Element element) { return element == Element::bf16 || element == Element::f16 ? 2 : 1; }
float element_of(u32 word, u32 i, Element element) {
  return size_of(element) == 2 ? widen(word >> 16 * i & 0xffff, element)
                               : widen(word >> 8 * i & 0xff, element);
}

// Register `i` of A holds row lane / 4 (odd: + 8) and the columns from word lane % 4 (later two: + 4).
void multiply_all(void* const* operands, u32) {
  const auto at = [&](u32 lane) -> MultiplyOperands& {
    return *static_cast<MultiplyOperands*>(operands[lane]);
  };
  float a[16][32], b[8][32];
  const u32 each_a = 4 / size_of(at(0).element_a), each_b = 4 / size_of(at(0).element_b);
  for (u32 lane = 0; lane < 32; ++lane) {
    for (u32 i = 0; i < 4; ++i)
      for (u32 e = 0; e < each_a; ++e)
        a[lane / 4 + 8 * (i % 2)][(lane % 4 + 4 * (i / 2)) * each_a + e] =
            element_of(at(lane).a[i], e, at(0).element_a);
    for (u32 i = 0; i < 2; ++i)
      for (u32 e = 0; e < each_b; ++e)
        b[lane / 4][(lane % 4 + 4 * i) * each_b + e] = element_of(at(lane).b[i], e, at(0).element_b);
  }
  for (u32 lane = 0; lane < 32; ++lane)
    for (u32 i = 0; i < 4; ++i) {
      const u32 row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
      float sum = 0;
      for (u32 k = 0; k < 8 * each_a; ++k) sum += a[row][k] * b[column][k];
      *at(lane).c[i] += sum;
    }
}

// ---- warpgroups ---------------------------------------------------------------------------------

// Calls visit(line, step, address) for lines [from, from + count) of a described operand, of 32 bytes of the
// summed dimension each. `across`: the 128-byte lines run along the other dimension, each belongs to one step
// of the sum.
template <class Visit>
void for_each_element(u32 from, u32 count, u64 description, bool across, u32 size, Visit&& visit) {
  const u32 start = (description & 0x3fff) << 4, leading = (description >> 16 & 0x3fff) << 4;
  const u32 stride = (description >> 32 & 0x3fff) << 4;
  if (description >> 62 != 1 || (description >> 49 & 7)) fail("wgmma: only the 128-byte swizzle is emulated");
  for (u32 line = from; line < from + count; ++line)
    for (u32 k = 0; k < 32 / size; ++k) {
      const u32 place = across ? line / 64 * leading + line % 64 * 2 + k / 8 * stride + k % 8 * 128
                               : line / 8 * stride + line % 8 * 128 + k * size;
      const u32 address = start + place;
      visit(line, k, address ^ (address >> 7 & 7) << 4);
    }
}
template <class Visit>
void for_each_operand(const WarpgroupOperands& o, u32 warp, Visit&& visit) {
  const auto visit_a = [&](u32 line, u32 k, u32 address) { visit(false, line % 16, k, address); };
  const auto visit_b = [&](u32 line, u32 k, u32 address) { visit(true, line, k, address); };
  for_each_element(warp % 4 * 16, 16, o.a, o.across_a, size_of(o.element_a), visit_a);
  for_each_element(0, o.n, o.b, o.across_b, size_of(o.element_b), visit_b);
}

// D: lane / 4 (+ 8 in every second pair) is the row, 8 j + 2 (lane % 4) + e the column of element 4 j + 2
// half + e.
void run(const Multiplication& job, u32 warp) {
  static float a[16][32], b[256][32];
  const WarpgroupOperands& o = job.operands;
  const u32 size = size_of(o.element_a), each = o.n / 2;
  for_each_operand(o, warp, [&](bool is_b, u32 line, u32 k, u32 address) {
    u32 bits = 0;
    std::memcpy(&bits, at_shared(address, size), size);
    (is_b ? b : a)[line][k] = widen(bits, is_b ? o.element_b : o.element_a);
  });
  for (u32 row = 0; row < 16; ++row)
    for (u32 column = 0; column < o.n; ++column) {
      const u32 lane = row % 8 * 4 + column % 8 / 2, i = column / 8 * 4 + row / 8 * 2 + column % 2;
      float sum = 0;
      for (u32 k = 0; k < 32 / size; ++k) sum += a[row][k] * b[column][k];
      float& d = job.into->value[lane * each + i];
      d = o.accumulate ? d + sum : sum;
    }
}

// The registers are away until the wait: who reads them before gets NaN.
Accumulators& take_accumulators(Warp& warp, void* const* operands) {
  const auto& first = *static_cast<WarpgroupOperands*>(operands[0]);
  Accumulators& taken = warp.accumulators[first.d];
  if (taken.users++) return taken;
  if (!warp.fenced) fail("wgmma without wgmma.fence since its accumulators were last in use");
  taken.count = first.n / 2;
  taken.value.resize(32 * taken.count);
  for (u32 lane = 0; lane < 32; ++lane) {
    taken.home[lane] = static_cast<WarpgroupOperands*>(operands[lane])->d;
    std::memcpy(&taken.value[lane * taken.count], taken.home[lane], 4 * taken.count);
    for (u32 i = 0; i < taken.count; ++i) taken.home[lane][i] = std::numeric_limits<float>::quiet_NaN();
  }
  return taken;
}

void issue_all(void* const* operands, u32 mask) {
  if (mask != ~0u) fail("wgmma needs all lanes");
  const auto& first = *static_cast<WarpgroupOperands*>(operands[0]);
  for (u32 lane = 1; lane < 32; ++lane) {
    const auto& other = *static_cast<WarpgroupOperands*>(operands[lane]);
    if (other.a != first.a || other.b != first.b || other.accumulate != first.accumulate)
      fail("wgmma: lanes 0 and %u have different descriptions", lane);
  }
  Warp& warp = own_warp();
  Accumulators& into = take_accumulators(warp, operands);
  warp.multiplications.push_back(Multiplication{first, &into, false, warp.group});
  for_each_operand(first, current->warp, [&](bool, u32, u32, u32 address) {
    note_matrix_read(address, size_of(first.element_a), warp.group);
  });
  if (timing == Timing::early) advance_multiplications(warp);
}

void wait_all(void* const* operands, u32) {
  const u64 pending = *static_cast<const u32*>(operands[0]);
  Warp& warp = own_warp();
  auto& jobs = warp.multiplications;
  while (!jobs.empty() && jobs.front().group + pending < warp.group) {
    advance_multiplications(warp);
    if (!jobs.front().done) continue;
    Accumulators& into = *jobs.front().into;
    jobs.pop_front();
    if (--into.users) continue;
    for (u32 lane = 0; lane < 32; ++lane)
      std::memcpy(into.home[lane], &into.value[lane * into.count], 4 * into.count);
    warp.accumulators.erase(into.home[0]);
  }
  warp.fenced = false;
  if (pending < warp.group) acquire_matrices(static_cast<u32>(warp.group - pending));
}

}  // namespace

// The next one that has not read its operands yet.
void advance_multiplications(Warp& warp) {
  for (Multiplication& job : warp.multiplications) {
    if (job.done) continue;
    run(job, static_cast<u32>(&warp - block.warps.data()));
    job.done = true;
    return;
  }
}

void load_matrices(Fragments& operands) { together("ldmatrix", ~0u, &operands, load_all); }
void multiply(MultiplyOperands& operands) { together("mma", ~0u, &operands, multiply_all); }

void warpgroup_multiply(WarpgroupOperands& operands) { together("wgmma", ~0u, &operands, issue_all); }
void warpgroup_fence() {
  together("wgmma.fence", ~0u, nullptr, [](void* const*, u32) { own_warp().fenced = true; });
}
void warpgroup_commit() {
  together("wgmma.commit_group", ~0u, nullptr, [](void* const*, u32) { ++own_warp().group; });
}
void warpgroup_wait(u32 pending) { together("wgmma.wait_group", ~0u, &pending, wait_all); }

}  // namespace emulator
