// Which accesses to shared memory are ordered by barriers and which only by chance.
//
// Vector clocks: each thread counts its releases, and knows of every other one up to where it is ordered
// behind it. What works on a thread's behalf counts by itself: its copies, and a warp's wgmma. Each byte
// remembers its last write and some of the reads since. A second clock tells which writes a fence.proxy.async
// has shown to the asynchronous proxy. Of a warp's instructions only __syncwarp orders memory, as the PTX
// memory model has it.
#include <algorithm>
#include <cstring>

#include "state.h"

namespace emulator {
namespace {

constexpr u32 kIdBits = 12, kMostEpochs = 1u << (32 - kIdBits);

struct Cell {
  u32 write, reads[3];  // tags, 0: none
};
Cell cells[kArena];

u32 threads() { return static_cast<u32>(block.fibers.size()); }
u32 copies_id(u32 thread) { return threads() + thread; }
u32 matrices_id(u32 warp) { return 2 * threads() + warp; }
u32 tag_of(u32 id, u64 epoch) {
  if (epoch >= kMostEpochs) fail("too many steps for the race detector");
  return static_cast<u32>(epoch) << kIdBits | id;
}
bool ordered(u32 tag, const std::vector<u32>& clock) {
  return tag >> kIdBits <= clock[tag & ((1u << kIdBits) - 1)];
}

void join(std::vector<u32>& into, const std::vector<u32>& from) {
  u32* __restrict to = into.data();
  const u32* __restrict source = from.data();
  for (std::size_t i = 0; i < from.size(); ++i) to[i] = to[i] < source[i] ? source[i] : to[i];
}

std::string name_of(u32 tag) {
  const u32 id = tag & ((1u << kIdBits) - 1);
  if (id >= 2 * threads()) return "a wgmma of warp " + std::to_string(id - 2 * threads());
  if (id >= threads()) return "a cp.async of thread " + std::to_string(id - threads());
  return "thread " + std::to_string(id);
}

[[noreturn]] void race(u32 at, u32 tag, const char* does, u32 other, const char* did) {
  fail("race on shared byte 0x%x: %s %s it, %s %s it before, and no barrier is between them", at,
       name_of(tag).c_str(), does, name_of(other).c_str(), did);
}

void note_write(u32 at, u32 bytes, u32 tag, const Clock& clock) {
  for (u32 i = at; i < at + bytes; ++i) {
    Cell& cell = cells[i];
    if (cell.write && !ordered(cell.write, clock.seen)) race(i, tag, "writes", cell.write, "wrote");
    for (const u32 read : cell.reads)
      if (read && !ordered(read, clock.seen)) race(i, tag, "writes", read, "read");
    cell = Cell{tag, {}};
  }
}

// Of many reads some are forgotten, other ones with each seed.
void note_read(u32 at, u32 bytes, u32 tag, const Clock& clock, bool through_proxy) {
  for (u32 i = at; i < at + bytes; ++i) {
    Cell& cell = cells[i];
    if (!cell.write) fail("%s reads shared byte 0x%x, which nobody has written", name_of(tag).c_str(), i);
    if (!ordered(cell.write, clock.seen)) race(i, tag, "reads", cell.write, "wrote");
    if (through_proxy && !ordered(cell.write, clock.fenced))
      fail("%s reads shared byte 0x%x, and no fence.proxy.async is behind the write by %s",
           name_of(tag).c_str(), i, name_of(cell.write).c_str());
    u32* slot = std::find_if(cell.reads, cell.reads + 3, [&](u32 read) { return ordered(read, clock.seen); });
    *(slot == cell.reads + 3 ? cell.reads + random_below(3) : slot) = tag;
  }
}

u32 own_tag() { return tag_of(current->number, self().clock.seen[current->number]); }

}  // namespace

void clear_clocks() {
  std::memset(cells, 0, sizeof(cells));
  const u32 count = 2 * threads() + static_cast<u32>(block.warps.size());
  if (count > 1u << kIdBits) fail("a block has 1024 threads at most");
  for (Fiber& fiber : block.fibers) {
    fiber.clock.seen.assign(count, 0);
    fiber.clock.fenced.assign(count, 0);
    fiber.clock.seen[fiber.number] = fiber.copies_epoch = 1;
  }
}

void release_to(Clock& to) {
  Fiber& me = self();
  to.seen.resize(me.clock.seen.size());
  to.fenced.resize(me.clock.seen.size());
  join(to.seen, me.clock.seen);
  join(to.fenced, me.clock.fenced);
  ++me.clock.seen[me.number];
}
void acquire_from(const Clock& from) {
  join(self().clock.seen, from.seen);
  join(self().clock.fenced, from.fenced);
}
// What the thread knew and had copied when it asked for the arrival.
Clock release_copies() {
  Fiber& me = self();
  Clock clock = me.clock;
  clock.seen[copies_id(me.number)] = me.copies_epoch++;
  ++me.clock.seen[me.number];
  return clock;
}
u32 end_copies_epoch() { return self().copies_epoch++; }
void acquire_copies(u32 epoch) {
  u32& seen = self().clock.seen[copies_id(current->number)];
  seen = std::max(seen, epoch);
}
void join_clocks(Clock& into, const Clock& from) {
  into.seen.resize(from.seen.size());
  into.fenced.resize(from.seen.size());
  join(into.seen, from.seen);
  join(into.fenced, from.fenced);
}
void synchronise_lanes(u32 given) {
  together("syncwarp", given, nullptr, [](void* const*, u32 mask) {
    Clock all;
    Fiber* const lanes = &block.fibers[32 * current->warp];
    for (u32 lane = 0; lane < 32; ++lane)
      if (mask >> lane & 1) join_clocks(all, lanes[lane].clock);
    for (u32 lane = 0; lane < 32; ++lane)
      if (mask >> lane & 1) lanes[lane].clock = all, ++lanes[lane].clock.seen[lanes[lane].number];
  });
}
void fence_proxy() {
  Fiber& me = self();
  me.clock.fenced = me.clock.seen;
  ++me.clock.seen[me.number];
  give_way();
}
void acquire_matrices(u32 groups) {
  for (u32 lane = 0; lane < 32; ++lane)
    block.fibers[32 * current->warp + lane].clock.seen[matrices_id(current->warp)] = groups;
}

void note_shared_write(u32 address, u32 bytes) { note_write(address, bytes, own_tag(), self().clock); }
void note_shared_read(u32 address, u32 bytes, u32 lane) {
  const Fiber& reader = block.fibers[32 * current->warp + lane];
  note_read(address, bytes, tag_of(reader.number, reader.clock.seen[reader.number]), reader.clock, false);
}
void note_copy(u32 address, u32 bytes) {
  note_write(address, bytes, tag_of(copies_id(current->number), self().copies_epoch), self().clock);
}
void note_matrix_read(u32 address, u32 bytes, u64 group) {
  note_read(address, bytes, tag_of(matrices_id(current->warp), group + 1), self().clock, true);
}

}  // namespace emulator

// ---- what the compiler puts in front of each access by the kernel's text (-fsanitize=thread) ----

#define EMULATED_ACCESS(bytes)                                                                   \
  extern "C" void __tsan_read##bytes(void* at) { emulator::access(at, bytes, false); }           \
  extern "C" void __tsan_write##bytes(void* at) { emulator::access(at, bytes, true); }           \
  extern "C" void __tsan_unaligned_read##bytes(void* at) { emulator::access(at, bytes, false); } \
  extern "C" void __tsan_unaligned_write##bytes(void* at) { emulator::access(at, bytes, true); } \
  extern "C" void __tsan_volatile_read##bytes(void* at) { emulator::access(at, bytes, false); }  \
  extern "C" void __tsan_volatile_write##bytes(void* at) { emulator::access(at, bytes, true); }
EMULATED_ACCESS(1)
EMULATED_ACCESS(2)
EMULATED_ACCESS(4)
EMULATED_ACCESS(8)
EMULATED_ACCESS(16)
extern "C" void __tsan_read_range(void* at, unsigned long bytes) {
  emulator::access(at, static_cast<unsigned>(bytes), false);
}
extern "C" void __tsan_write_range(void* at, unsigned long bytes) {
  emulator::access(at, static_cast<unsigned>(bytes), true);
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit(void*) {}

// A misaligned access, as -fsanitize=alignment reports it.
namespace {
struct Misaligned {
  const char* file;
  unsigned line, column;
  const void* type;
  unsigned char log2_alignment, kind;
};
}  // namespace
extern "C" void __ubsan_handle_type_mismatch_v1_abort(Misaligned* what, unsigned long pointer) {
  emulator::fail("%s:%u: an access to %#lx, which is no multiple of %u", what->file, what->line, pointer,
                 1u << what->log2_alignment);
}
