// The state of a block under way, shared by the emulator's own files.
#pragma once
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "runtime.h"

namespace emulator {

constexpr u32 kArena = 256 * 1024, kFirstAddress = 1024;

enum class Timing { early, random, late };  // of asynchronous work

struct Clock {  // of what is ordered before: races.cpp
  std::vector<u32> seen, fenced;
};

struct Copy {
  bool arrival;  // `to` is then a barrier
  u32 group;     // committed groups before it
  u32 to, size, bytes;
  const void* from;
  Clock clock;  // of an arrival
};

struct Fiber : Thread {
  void* stack_pointer;
  const char* waits;  // for the report: a format for `about`
  u32 about[3];
  std::vector<Copy> copies;
  std::vector<u32> groups;  // of copies that have been committed: the last epoch of each
  Clock clock;
  u32 copies_epoch;
  u32 probed;  // the mbarrier that was last asked for its phase, and nothing done since
};

struct Meeting {  // of lanes
  const char* what;
  u32 mask, arrived;
  void* operands[32];
};

struct Accumulators {  // of one warp: an array in each lane's registers, away while instructions work on it
  float* home[32];
  u32 count, users;  // elements; instructions that have not been waited for
  std::vector<float> value;
};
struct Multiplication {
  WarpgroupOperands operands;
  Accumulators* into;
  bool done;
  u64 group;
};

struct Warp {
  u32 exists, runnable;  // bits by lane
  Meeting meetings[4];
  std::deque<Multiplication> multiplications;
  std::map<float*, Accumulators> accumulators;
  u64 group;
  bool fenced;
};

struct PhaseBarrier {  // an mbarrier
  u32 expected, pending;
  u64 phase;
  Clock gathering, opened;
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<Fiber*> copying;
  std::map<u32, PhaseBarrier> barriers;
  u32 live;
};

extern Block block;
extern Timing timing;
extern u32 shared_size;

u32 random_below(u32 n);
inline Fiber& self() { return *const_cast<Fiber*>(static_cast<const Fiber*>(current)); }
inline Warp& own_warp() { return block.warps[current->warp]; }

// Stops the running thread until another one wakes it.
void wait(const char* why, u32 a = 0, u32 b = 0, u32 c = 0);
inline void wake(Fiber& fiber) { block.warps[fiber.warp].runnable |= 1u << fiber.lane; }
void release_ended();  // barriers of all threads count those that have not ended

// Does some asynchronous work, or if `needed` the least that may let a thread go on; false: there is none.
bool advance_copies(bool needed);
void advance_multiplications(Warp& warp);
void finish_block();

void clear_shared();
void check_shared();
void access(const void* at, u32 bytes, bool write);  // by the kernel's text

void clear_clocks();
void release_to(Clock& to);
void acquire_from(const Clock& from);
Clock release_copies();
void acquire_copies(u32 epoch);
u32 end_copies_epoch();
void join_clocks(Clock& into, const Clock& from);
void acquire_matrices(u32 groups);
void note_shared_write(u32 address, u32 bytes);
void note_shared_read(u32 address, u32 bytes, u32 lane);
void note_copy(u32 address, u32 bytes);
void note_matrix_read(u32 address, u32 bytes, u64 group);

}  // namespace emulator
