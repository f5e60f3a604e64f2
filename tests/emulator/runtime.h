// What the emulated words of CUDA and PTX are made of. The kernel's text sees this file; it needs no system
// header.
//
// A block runs on one operating-system thread: each of its threads is a fiber, which gives way at the
// instructions below and nowhere else. Which fiber goes on, and when asynchronous work is done, follows from
// the seed alone.
#pragma once

namespace emulator {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct Index3 {
  unsigned x, y, z;
};
struct Thread {
  Index3 index;
  u32 number, warp, lane;
};
extern const Thread* current;  // the thread that runs
extern Index3 block_index, block_size, grid_size;

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
void give_way();  // often lets another thread run

// ---- shared memory, by its 32-bit address -------------------------------------------------------
u8* dynamic_shared();
u32 to_shared(const void* pointer);
u8* at_shared(u32 address, u32 bytes);  // checked: inside, and a multiple of `bytes`

// ---- barriers -----------------------------------------------------------------------------------
void meet_at_barrier(u32 id, u32 threads);  // 0 threads: all that have not ended
u32 block_vote(u32 value, bool all);        // __syncthreads_count, or whether all
void barrier_init(u32 address, u32 arrivals);
void barrier_arrive(u32 address);
bool barrier_test(u32 address, u32 parity);   // waits for the next phase before it says no
bool barrier_probe(u32 address, u32 parity);  // does not

// ---- copies -------------------------------------------------------------------------------------
void copy_async(u32 to, const void* from, u32 size, u32 bytes);  // `bytes` of them real, the rest zeros
void arrive_after_copies(u32 barrier, bool counted);  // counted: the barrier expects it already (.noinc)
void finish_copies();
void commit_copies();
void wait_for_copies(u32 pending);  // all groups but the latest `pending`

// ---- warps --------------------------------------------------------------------------------------
// All lanes of `mask` come with their operands; the last one does the work for all. `what` has to be the
// same.
using Work = void (*)(void* const* operands, u32 mask);
void together(const char* what, u32 mask, void* operands, Work work);

enum class Shuffle { from, across, up, down };
struct ShuffleOperands {
  u64 value, result;
  u32 selector, width;
};
void synchronise_lanes(u32 mask);  // __syncwarp
void shuffle(Shuffle kind, u32 mask, ShuffleOperands& operands);
enum class Reduce { ballot, add, min, max, smin, smax, bits_and, bits_or, bits_xor };
u32 reduce(Reduce kind, u32 mask, u32 value);

// ---- matrices -----------------------------------------------------------------------------------
enum class Element { bf16, f16, e4m3, e5m2 };
float widen(u32 bits, Element element);
u32 narrow(float x, Element element);  // to nearest, ties to even; 8-bit types saturate

struct Fragments {  // operands of one lane
  u32 *r, count;    // ldmatrix: where the matrices go, and how many
  u32 address, transposed;
};
void load_matrices(Fragments& operands);

struct MultiplyOperands {  // c [16, 8] += a [16, k] b [k, 8]
  float* c[4];
  u32 a[4], b[2];
  Element element_a, element_b;
};
void multiply(MultiplyOperands& operands);

struct WarpgroupOperands {  // d [64, n] (+)= a [64, 32 bytes] b [32 bytes, n], both described in shared
                            // memory
  float* d;
  u32 n;
  u64 a, b;
  bool accumulate, across_a, across_b;
  Element element_a, element_b;
};
void warpgroup_multiply(WarpgroupOperands& operands);
void warpgroup_fence();
void warpgroup_commit();
void warpgroup_wait(u32 pending);
void fence_proxy();  // what was written so far is seen by warpgroup_multiply

// ---- the kernel, as the text's last lines give it -----------------------------------------------
extern const u32 params_size;
void enter(const void* params);

template <class Params>
constexpr u32 size_of_params(void (*)(Params)) {
  return sizeof(Params);
}
template <class Params>
void call(void (*kernel)(Params), const void* params) {
  kernel(*static_cast<const Params*>(params));
}

}  // namespace emulator
