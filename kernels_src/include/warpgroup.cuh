// Hopper's warpgroup matrix instruction: D [64, N] float += A [64, 16] B [16, N], A and B in shared memory. sm_90a only.
#pragma once
#include "include/tensor_core.cuh"

#if JITKERN_ON_GPU
namespace jitkern {

// A matrix in shared memory whose rows are lines of 128 bytes, swizzled: 16-byte word w of line r is stored at w ^ (r % 8).
// Eight lines are 1024 bytes and follow each other. The lower half of its description is the address; `offset` bytes
// further lies another one, at the cost of one addition.
struct Matrix {
  u32 place;
};
JITKERN_DEVICE Matrix swizzled_matrix(SharedAddress address) {
  constexpr u32 kUnused = 1u << 16;
  return Matrix{kUnused | (address & 0x3ffff) >> 4};
}
JITKERN_DEVICE u64 description(Matrix matrix, int offset) {
  constexpr u32 kSwizzle128 = 1u << 30, kEightLines = 1024 >> 4;
  return static_cast<u64>(kSwizzle128 | kEightLines) << 32 | (matrix.place + (offset >> 4));
}

JITKERN_DEVICE void warpgroup_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
JITKERN_DEVICE void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending>
JITKERN_DEVICE void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
// Ordinary writes to shared memory before this are seen by matrix instructions after it.
JITKERN_DEVICE void order_writes_before_matrix_reads() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Type tag, N = 2 x registers. Transposed: the lines of A run along its 64 rows (a value matrix, token by token).
template <bool Transposed>
JITKERN_DEVICE void warpgroup_multiply_add(float (&d)[4], u64 a, u64 b, int accumulate, bf16) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %6, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3"
      "}, %4, %5, p, 1, 1, %7, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(a), "l"(b), "r"(accumulate), "n"(static_cast<int>(Transposed)));
}
template <bool Transposed>
JITKERN_DEVICE void warpgroup_multiply_add(float (&d)[4], u64 a, u64 b, int accumulate, f16) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %6, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {"
      "%0, %1, %2, %3"
      "}, %4, %5, p, 1, 1, %7, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(a), "l"(b), "r"(accumulate), "n"(static_cast<int>(Transposed)));
}
template <bool Transposed>
JITKERN_DEVICE void warpgroup_multiply_add(float (&d)[8], u64 a, u64 b, int accumulate, bf16) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %10, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7"
      "}, %8, %9, p, 1, 1, %11, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "l"(a), "l"(b), "r"(accumulate), "n"(static_cast<int>(Transposed)));
}
template <bool Transposed>
JITKERN_DEVICE void warpgroup_multiply_add(float (&d)[8], u64 a, u64 b, int accumulate, f16) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %10, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7"
      "}, %8, %9, p, 1, 1, %11, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "l"(a), "l"(b), "r"(accumulate), "n"(static_cast<int>(Transposed)));
}
template <bool Transposed>
JITKERN_DEVICE void warpgroup_multiply_add(float (&d)[16], u64 a, u64 b, int accumulate, bf16) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %18, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, %16, %17, p, 1, 1, %19, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b), "r"(accumulate), "n"(static_cast<int>(Transposed)));
}
template <bool Transposed>
JITKERN_DEVICE void warpgroup_multiply_add(float (&d)[16], u64 a, u64 b, int accumulate, f16) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %18, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, %16, %17, p, 1, 1, %19, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b), "r"(accumulate), "n"(static_cast<int>(Transposed)));
}
template <bool Transposed>
JITKERN_DEVICE void warpgroup_multiply_add(float (&d)[32], u64 a, u64 b, int accumulate, bf16) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
      "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, p, 1, 1, %35, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(accumulate), "n"(static_cast<int>(Transposed)));
}
template <bool Transposed>
JITKERN_DEVICE void warpgroup_multiply_add(float (&d)[32], u64 a, u64 b, int accumulate, f16) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
      "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, p, 1, 1, %35, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(accumulate), "n"(static_cast<int>(Transposed)));
}

}  // namespace jitkern
#endif
