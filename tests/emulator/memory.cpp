// Shared memory, the barriers in it, and copies to it.
#include <algorithm>
#include <cstring>
#include <utility>

#include "state.h"

// The kernel's static __shared__ variables, as the linker gathers them.
extern "C" emulator::u8 __start_emulated_shared[] __attribute__((weak, visibility("hidden")));
extern "C" emulator::u8 __stop_emulated_shared[] __attribute__((weak, visibility("hidden")));

namespace emulator {
namespace {

alignas(1024) u8 arena[kArena];
u8 garbage_kind;

u32 static_size() { return static_cast<u32>(__stop_emulated_shared - __start_emulated_shared); }
u32 dynamic_address() { return (kFirstAddress + static_size() + 1023) / 1024 * 1024; }

// What no store has put there. Which values stand out depends on the code, so there are three kinds.
u8 garbage(u32 i) {
  return garbage_kind == 0 ? 0xff : garbage_kind == 1 ? 0x7f : static_cast<u8>(i * 167 >> 3);
}

struct Meet {
  u32 threads, arrived, votes, result;
  std::vector<Fiber*> waiting;
  Clock gathering, opened;
};
Meet meets[16];

void release(Meet& meet) {
  for (Fiber* fiber : meet.waiting) wake(*fiber);
  meet.result = meet.votes;
  meet.waiting.clear();
  meet.opened = std::move(meet.gathering);
  meet.gathering = Clock{};
  meet.arrived = meet.votes = 0;
}

PhaseBarrier& barrier_at(u32 address) {
  at_shared(address, 8);
  const auto found = block.barriers.find(address);
  if (found == block.barriers.end()) fail("shared address 0x%x is no initialised mbarrier", address);
  return found->second;
}

PhaseBarrier& used_barrier(u32 address) {
  PhaseBarrier& barrier = barrier_at(address);
  note_shared_read(address, 8, current->lane);
  return barrier;
}

void count_arrival(PhaseBarrier& barrier, u32 address) {
  if (--barrier.pending) return;
  barrier.opened = barrier.gathering;
  barrier.pending = barrier.expected;
  ++barrier.phase;
  for (Fiber& fiber : block.fibers)
    if (fiber.waits && fiber.about[0] == address && !std::strncmp(fiber.waits, "mbarrier", 8)) wake(fiber);
}

void land(const Copy& copy) {
  u8* to = at_shared(copy.to, copy.size);
  std::memcpy(to, copy.from, copy.bytes);
  std::memset(to + copy.bytes, 0, copy.size - copy.bytes);
}

void land_or_arrive(const Copy& copy) {
  if (!copy.arrival) return land(copy);
  PhaseBarrier& barrier = barrier_at(copy.to);
  join_clocks(barrier.gathering, copy.clock);
  count_arrival(barrier, copy.to);
}

void forget_if_idle(Fiber& fiber) {
  if (!fiber.copies.empty()) return;
  block.copying.erase(std::find(block.copying.begin(), block.copying.end(), &fiber));
}

// In any order, but for arrivals: those come behind the copies before them.
void advance_one(Fiber& fiber) {
  u32 at = random_below(std::min<u32>(static_cast<u32>(fiber.copies.size()), 64));
  if (fiber.copies[at].arrival) at = 0;
  land_or_arrive(fiber.copies[at]);
  fiber.copies.erase(fiber.copies.begin() + at);
  forget_if_idle(fiber);
}

void advance_to_arrival(Fiber& fiber) {
  u32 done = 0;
  while (done < fiber.copies.size()) {
    land_or_arrive(fiber.copies[done]);
    if (fiber.copies[done++].arrival) break;
  }
  fiber.copies.erase(fiber.copies.begin(), fiber.copies.begin() + done);
  forget_if_idle(fiber);
}

void issue(const Copy& copy) {
  Fiber& me = self();
  if (timing == Timing::early) return land_or_arrive(copy);
  if (me.copies.empty()) block.copying.push_back(&me);
  me.copies.push_back(copy);
}

}  // namespace

u8* dynamic_shared() { return arena; }

void clear_shared() {
  garbage_kind = static_cast<u8>(random_below(3));
  for (u32 i = 0; i < kArena; ++i) arena[i] = garbage(i);
  for (u32 i = 0; i < static_size(); ++i) __start_emulated_shared[i] = garbage(i);
  for (Meet& meet : meets) meet = Meet{};
  clear_clocks();
  if (dynamic_address() + shared_size > kArena) fail("%u bytes of shared memory are too many", shared_size);
}

void check_shared() {
  for (u32 i = shared_size; i < kArena; ++i)
    if (arena[i] != garbage(i)) fail("a write %u bytes behind the shared memory", i - shared_size);
}

u32 to_shared(const void* pointer) {
  const u8* p = static_cast<const u8*>(pointer);
  if (p >= arena && p <= arena + shared_size) return dynamic_address() + static_cast<u32>(p - arena);
  if (p >= __start_emulated_shared && p < __stop_emulated_shared)
    return kFirstAddress + static_cast<u32>(p - __start_emulated_shared);
  fail("a pointer that is not into shared memory was converted to a shared address");
}

u8* at_shared(u32 address, u32 bytes) {
  if (address % bytes) fail("shared address 0x%x is no multiple of %u", address, bytes);
  const u32 dynamic = dynamic_address();
  if (address >= dynamic && address + bytes <= dynamic + shared_size) return arena + (address - dynamic);
  if (address >= kFirstAddress && address + bytes <= kFirstAddress + static_size())
    return __start_emulated_shared + (address - kFirstAddress);
  fail("shared address 0x%x: %u bytes there are outside of the block's shared memory", address, bytes);
}

void access(const void* at, u32 bytes, bool write) {
  const u8* p = static_cast<const u8*>(at);
  const bool dynamic = p >= arena && p < arena + kArena;
  if (!dynamic && !(p >= __start_emulated_shared && p < __stop_emulated_shared)) return;
  if (random_below(16) == 0) give_way();
  const u32 address = to_shared(p);
  if (write)
    note_shared_write(address, bytes);
  else
    note_shared_read(address, bytes, current->lane);
}

void meet_at_barrier(u32 id, u32 threads) {
  if (id >= 16 || threads % 32) fail("bar.sync %u, %u", id, threads);
  Meet& meet = meets[id];
  if (meet.arrived && meet.threads != threads)
    fail("bar.sync %u: %u and %u threads", id, meet.threads, threads);
  meet.threads = threads;
  release_to(meet.gathering);
  if (++meet.arrived == (threads ? threads : block.live)) {
    release(meet);
    give_way();
  } else {
    meet.waiting.push_back(&self());
    wait("barrier %u of %u threads (0: all)", id, threads);
  }
  acquire_from(meet.opened);
}
void release_ended() {
  for (Meet& meet : meets)
    if (meet.arrived && meet.threads == 0 && meet.arrived == block.live) release(meet);
}
u32 block_vote(u32 value, bool all) {
  meets[0].votes += value != 0;
  const u32 threads = block.live;
  meet_at_barrier(0, 0);
  return all ? meets[0].result == threads : meets[0].result;
}

void barrier_init(u32 address, u32 arrivals) {
  note_shared_write(address, 8);
  at_shared(address, 8);
  block.barriers[address] = PhaseBarrier{arrivals, arrivals, 0, {}, {}};
}
void barrier_arrive(u32 address) {
  self().probed = 0;
  PhaseBarrier& barrier = used_barrier(address);
  release_to(barrier.gathering);
  count_arrival(barrier, address);
  give_way();
}
bool barrier_test(u32 address, u32 parity) {
  PhaseBarrier& barrier = used_barrier(address);
  const auto passed = [&] { return (barrier.phase & 1) != parity; };
  give_way();
  if (!passed())
    wait("mbarrier 0x%x, parity %u (phase %u)", address, parity, static_cast<u32>(barrier.phase));
  if (passed()) acquire_from(barrier.opened);
  return passed();
}

// Says no at once; but to ask again with nothing done in between is to wait.
bool barrier_probe(u32 address, u32 parity) {
  if (std::exchange(self().probed, 0) == address) return barrier_test(address, parity);
  PhaseBarrier& barrier = used_barrier(address);
  give_way();
  const bool passed = (barrier.phase & 1) != parity;
  self().probed = passed ? 0 : address;
  if (passed) acquire_from(barrier.opened);
  return passed;
}

void copy_async(u32 to, const void* from, u32 size, u32 bytes) {
  at_shared(to, size);
  if (bytes > size) fail("cp.async of %u bytes with %u real ones", size, bytes);
  if (bytes && reinterpret_cast<u64>(from) % size) fail("cp.async of %u bytes from %p", size, from);
  note_copy(to, size);
  issue(Copy{false, static_cast<u32>(self().groups.size()), to, size, bytes, from, {}});
  give_way();
}
void arrive_after_copies(u32 address, bool counted) {
  PhaseBarrier& barrier = used_barrier(address);
  if (!counted) ++barrier.pending;
  issue(Copy{true, static_cast<u32>(self().groups.size()), address, 0, 0, nullptr, release_copies()});
  give_way();
}
void finish_copies() {
  Fiber& me = self();
  while (!me.copies.empty()) advance_to_arrival(me);
  acquire_copies(end_copies_epoch());
}
void commit_copies() {
  self().groups.push_back(end_copies_epoch());
  give_way();
}
void wait_for_copies(u32 pending) {
  give_way();
  Fiber& me = self();
  if (me.groups.size() <= pending) return;
  const u32 done = static_cast<u32>(me.groups.size()) - pending;
  if (!me.copies.empty()) {
    const auto needed = std::stable_partition(me.copies.begin(), me.copies.end(),
                                              [&](const Copy& copy) { return copy.group < done; });
    std::for_each(me.copies.begin(), needed, land_or_arrive);
    me.copies.erase(me.copies.begin(), needed);
    forget_if_idle(me);
  }
  acquire_copies(me.groups[done - 1]);
}

bool advance_copies(bool needed) {
  if (timing == Timing::random)
    for (Warp& warp : block.warps)
      if (random_below(64) == 0) advance_multiplications(warp);
  if (block.copying.empty()) return false;
  if (timing == Timing::late && !needed) return false;
  Fiber& fiber = *block.copying[random_below(static_cast<u32>(block.copying.size()))];
  if (needed)
    advance_to_arrival(fiber);
  else if (random_below(2))
    advance_one(fiber);
  return true;
}

void finish_block() {
  while (!block.copying.empty()) advance_to_arrival(*block.copying.front());
  for (const Warp& warp : block.warps)
    if (!warp.multiplications.empty()) fail("a warp ended without waiting for its wgmma");
}

}  // namespace emulator
