// Fibers, in an order that follows from the seed; and the launch.
#include <execinfo.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "state.h"
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

extern "C" const char __ehdr_start[] __attribute__((visibility("hidden")));  // where this library lies

#if defined(__x86_64__)
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
.text
.hidden emulator_switch
.globl emulator_switch
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#endif

namespace emulator {

const Thread* current = nullptr;
Index3 block_index, block_size, grid_size;
Block block;
Timing timing;
u32 shared_size;

namespace {

constexpr u64 kStackBytes = 128 * 1024, kStackMark = 0x656d756c61746f72;
constexpr u64 kMostSwitches = 2'000'000'000;
void* main_context;
const void* parameters;
std::string failure;
u64 random_state, switches;
std::vector<u32> order;  // of warps, the most urgent first
u32 until_reorder;
u8* stacks;
u32 stacks_made;

// ---- switching ----------------------------------------------------------------------------------
#if defined(__x86_64__)
void* new_context(u8* top, void (*entry)()) {
  void** slot = reinterpret_cast<void**>(top) - 8;
  for (int i = 0; i < 8; ++i) slot[i] = nullptr;
  slot[6] = reinterpret_cast<void*>(entry);
  return slot;
}
#else
void emulator_switch(void** from, void* to) {
  ucontext_t here;  // lives on the stack that it describes
  *from = &here;
  swapcontext(&here, static_cast<ucontext_t*>(to));
}
void* new_context(u8* top, void (*entry)()) {
  auto* made = reinterpret_cast<ucontext_t*>(top - (sizeof(ucontext_t) + 63) / 64 * 64);
  getcontext(made);
  made->uc_stack.ss_sp = top - kStackBytes + 64;
  made->uc_stack.ss_size = reinterpret_cast<u8*>(made) - (top - kStackBytes) - 64;
  made->uc_link = nullptr;
  makecontext(made, entry, 0);
  return made;
}
#endif

[[noreturn]] void to_main() {
  void* nowhere;
  current = nullptr;
  emulator_switch(&nowhere, main_context);
  __builtin_unreachable();
}

void reorder() {
  for (u32 i = static_cast<u32>(order.size()); i > 1; --i) std::swap(order[i - 1], order[random_below(i)]);
  until_reorder = 1 + random_below(1u << (4 + random_below(9)));  // short turns and long ones
}

Fiber* next_fiber() {
  for (bool stuck = false;; stuck = true) {
    if (!advance_copies(stuck) && stuck) return nullptr;
    if (--until_reorder == 0) reorder();
    for (const u32 w : order)
      if (const u32 runnable = block.warps[w].runnable) {
        const u32 turn = random_below(32), turned = runnable >> turn | runnable << (32 - turn) % 32;
        return &block.fibers[32 * w + (turn + static_cast<u32>(__builtin_ctz(turned))) % 32];
      }
  }
}

std::string report() {
  std::map<std::string, std::string> threads;
  for (const Fiber& fiber : block.fibers) {
    if (!fiber.waits) continue;
    char why[200];
    snprintf(why, sizeof(why), fiber.waits, fiber.about[0], fiber.about[1], fiber.about[2]);
    threads[why] += " " + std::to_string(fiber.number);
  }
  std::string text;
  for (const auto& [why, numbers] : threads) text += "\n  " + why + ": threads" + numbers;
  return text;
}

// Where the thread is, as offsets into this library: emulate.py finds their lines.
std::string frames() {
  void* at[32];
  std::string text = "\nat";
  const int count = current ? backtrace(at, 32) : 0;
  const u8* base = reinterpret_cast<const u8*>(__ehdr_start);
  for (int i = 0; i < count; ++i) {
    char offset[32];
    snprintf(offset, sizeof(offset), " %#lx", static_cast<unsigned long>(static_cast<u8*>(at[i]) - base - 1));
    text += offset;
  }
  return text;
}

void go_on(Fiber* next) {
  if (++switches > kMostSwitches) fail("no end after %llu switches%s", switches, report().c_str());
  Fiber& me = self();
  if (next == &me) return;
  if (*reinterpret_cast<u64*>(stacks + me.number * kStackBytes) != kStackMark)
    fail("a thread's stack overflowed");
  current = next;
  emulator_switch(&me.stack_pointer, next->stack_pointer);
}

void thread_main() {
  enter(parameters);
  Fiber& me = self();
  block.warps[me.warp].runnable &= ~(1u << me.lane);
  if (--block.live == 0) to_main();
  release_ended();
  Fiber* next = next_fiber();
  if (!next) fail("deadlock%s", report().c_str());
  go_on(next);
  __builtin_unreachable();
}

void run_block() {
  const u32 threads = block_size.x * block_size.y * block_size.z;
  block = Block{};
  block.live = threads;
  block.fibers.resize(threads);
  block.warps.resize((threads + 31) / 32);
  order.clear();
  for (u32 w = 0; w < block.warps.size(); ++w) order.push_back(w);
  reorder();
  if (threads > stacks_made) {
    free(stacks);
    stacks = static_cast<u8*>(aligned_alloc(4096, threads * kStackBytes));
    stacks_made = threads;
  }
  for (u32 t = 0; t < threads; ++t) {
    Fiber& fiber = block.fibers[t];
    fiber.index = {t % block_size.x, t / block_size.x % block_size.y, t / block_size.x / block_size.y};
    fiber.number = t, fiber.warp = t / 32, fiber.lane = t % 32, fiber.waits = nullptr;
    u8* stack = stacks + t * kStackBytes;
    *reinterpret_cast<u64*>(stack) = kStackMark;
    fiber.stack_pointer = new_context(stack + kStackBytes, thread_main);
    block.warps[t / 32].exists |= 1u << t % 32;
    wake(fiber);
  }
  clear_shared();
  Fiber* first = next_fiber();
  current = first;
  emulator_switch(&main_context, first->stack_pointer);
  if (!failure.empty()) return;
  finish_block();
  check_shared();
}

}  // namespace

void fail(const char* format, ...) {
  if (failure.empty()) {
    char text[4000], where[120] = "";
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof(text), format, list);
    va_end(list);
    if (current)
      snprintf(where, sizeof(where), "block (%u, %u, %u), thread %u: ", block_index.x, block_index.y,
               block_index.z, current->number);
    failure = std::string(where) + text + frames();
  }
  if (current) to_main();
  throw 0;
}

u32 random_below(u32 n) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return static_cast<u32>((random_state >> 32) * n >> 32);
}

void give_way() {
  if (random_below(8) == 0) go_on(next_fiber());
}

void wait(const char* why, u32 a, u32 b, u32 c) {
  Fiber& me = self();
  block.warps[me.warp].runnable &= ~(1u << me.lane);
  me.waits = why, me.about[0] = a, me.about[1] = b, me.about[2] = c;
  Fiber* next = next_fiber();
  if (!next) fail("deadlock%s", report().c_str());
  go_on(next);
  me.waits = nullptr;
}

void run_grid() {
  std::vector<Index3> blocks;
  for (u32 z = 0; z < grid_size.z; ++z)
    for (u32 y = 0; y < grid_size.y; ++y)
      for (u32 x = 0; x < grid_size.x; ++x) blocks.push_back({x, y, z});
  for (u32 i = static_cast<u32>(blocks.size()); i > 1; --i) std::swap(blocks[i - 1], blocks[random_below(i)]);
  for (u32 i = 0; i < blocks.size() && failure.empty(); ++i) {
    block_index = blocks[i];
    run_block();
  }
}

}  // namespace emulator

// launch: grid, block, dynamic shared memory in bytes, timing. Returns 0, or 1 with a message.
extern "C" __attribute__((visibility("default"))) int emulator_run(const void* params, const unsigned* launch,
                                                                   unsigned long long seed, char* message,
                                                                   int room) {
  using namespace emulator;
  parameters = params;
  grid_size = {launch[0], launch[1], launch[2]};
  block_size = {launch[3], launch[4], launch[5]};
  shared_size = launch[6];
  timing = static_cast<Timing>(launch[7]);
  random_state = (seed + 1) * 0x9e3779b97f4a7c15ull;
  for (int i = 0; i < 8; ++i) random_below(1);
  switches = 0, current = nullptr;
  failure.clear();
  try {
    run_grid();
  } catch (int) {
  }
  snprintf(message, static_cast<unsigned>(room), "%s", failure.c_str());
  return failure.empty() ? 0 : 1;
}
extern "C" __attribute__((visibility("default"))) unsigned emulator_params_size() {
  return emulator::params_size;
}
