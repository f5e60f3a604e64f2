// The few instructions the decode needs, as functions: matrix fragments, and copies that complete on a barrier.
// Shared memory is named by its 32-bit address in that space.
#pragma once
#include "include/dtype.cuh"

#if JITKERN_ON_GPU
namespace jitkern {

using SharedAddress = u32;

JITKERN_DEVICE SharedAddress shared_address(const void* pointer) {
  u64 address;
  asm("cvta.to.shared.u64 %0, %1;" : "=l"(address) : "l"(pointer));
  return static_cast<SharedAddress>(address);
}

// Four 8x8 matrices of 16-bit words; lane i names row i % 8 of matrix i / 8.
JITKERN_DEVICE void load_matrices(u32 (&r)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}
JITKERN_DEVICE void load_matrices_transposed(u32 (&r)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}

// c += a b for a 16x16, b 16x8, c 16x8 in float.
JITKERN_DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, bf16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
JITKERN_DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, f16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
JITKERN_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
JITKERN_DEVICE float log2_fast(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Barriers in shared memory. A phase ends when all arrivals and all announced bytes are in.
JITKERN_DEVICE void barrier_init(SharedAddress barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
JITKERN_DEVICE void barrier_arrive(SharedAddress barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}
// Whether the phase has ended by now, with no time spent on waiting.
JITKERN_DEVICE bool barrier_passed(SharedAddress barrier, u32 parity) {
  u32 done;
  asm volatile("{ .reg .pred d; mbarrier.test_wait.parity.shared.b64 d, [%1], %2; selp.u32 %0, 1, 0, d; }"
               : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
}
JITKERN_DEVICE bool barrier_test(SharedAddress barrier, u32 parity) {
#if __CUDA_ARCH__ >= 900  // waits a while in hardware before it says no
  u32 done;
  asm volatile("{ .reg .pred d; mbarrier.try_wait.parity.shared.b64 d, [%1], %2; selp.u32 %0, 1, 0, d; }"
               : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
#else
  return barrier_passed(barrier, parity);
#endif
}
JITKERN_DEVICE void barrier_wait(SharedAddress barrier, u32 parity) {
  while (!barrier_test(barrier, parity)) {
  }
}
JITKERN_DEVICE void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

JITKERN_DEVICE void store_shared(SharedAddress to, u32 word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}
JITKERN_DEVICE void store_shared(SharedAddress to, const u32 (&word)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
               : "memory");
}

JITKERN_DEVICE void load_shared(u32 (&word)[4], SharedAddress from) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3]) : "r"(from) : "memory");
}

// One thread's copy to shared memory by the load path: 16, 8 or 4 bytes; zeros, and no access to `from`, if not `real`.
template <int Bytes>
JITKERN_DEVICE void copy_async(SharedAddress to, const void* from, bool real) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "cp.async moves 4, 8 or 16 bytes");
  const int bytes = real ? Bytes : 0;
  if constexpr (Bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(Bytes), "r"(bytes)
                 : "memory");
}
// Arrives once this thread's earlier copy_async are done.
JITKERN_DEVICE void barrier_arrive_after_copies(SharedAddress barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Copies also complete in groups: what was copied since the last commit is one, and a wait leaves the latest ones pending.
JITKERN_DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Pending>
JITKERN_DEVICE void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

}  // namespace jitkern
#endif
