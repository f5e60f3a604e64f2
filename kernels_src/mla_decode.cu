// mla_decode: attention of a few query tokens over a paged latent cache, each request's keys in one or more pieces.
//
//   S = scale Q K^T    P = exp(S - max S)    O = P V / sum P    L = max S + log sum P    V = K[:, :kDV]
//
// Queries [batch, q_len, heads, kD], cache [pages, page size, KV heads, kD], result [batch, q_len, heads, kDV], L by
// (batch, head, token), each with any strides whose last one is 1. The block table [batch, columns] gives the page of
// every (1 << page_shift) tokens. A request's length counts its query tokens; with `causal` token t sees the keys before
// length - (q_len - 1 - t). Keys on a page outside [0, pages) do not exist. Table entries that no key needs are not read.
// A request in one piece gets O and L at once; else its pieces leave float partial results for mla_combine. Requests
// without keys are mla_combine's. The plan (mla_plan) says which part does what.
//
// Launch: grid (tiles of kRows rows, parts, KV heads), block kThreads, sizeof(Shared) bytes of shared memory. A block
// without work returns after one load.
// Bytes moved: those of a key (2 kD, kD or 656), once for each tile (the tiles of a part run side by side and share the L2), Q and O.
//
// Holes (-D): JITKERN_ENTRY, JITKERN_T, JITKERN_D, JITKERN_DV, JITKERN_CACHE (what a token of the cache is made of, see
// mla_cache.cuh), JITKERN_ROWS (of a tile); on a GPU also JITKERN_PACK (elements of T moved by one access to Q and the
// cache), JITKERN_CHUNKS (ring slots of 16 tokens) and JITKERN_WARPGROUP: 1 for warpgroup matrix instructions (sm_90a; 16,
// 32 or 64 rows), 0 for mma.sync (sm_80 and later; 16 or 32 rows).

// What the branches share comes first: a flattened text holds each header once.
#include "include/mla_params.cuh"

#ifndef JITKERN_WARPGROUP
#define JITKERN_WARPGROUP 0
#endif

#if JITKERN_ON_GPU && __CUDA_ARCH__ < 800
JITKERN_EXPORT(jitkern::DecodeParams)
// Older GPUs have neither the copies nor the matrix instructions; the host refuses them, and this text still compiles.
JITKERN_KERNEL(jitkern::DecodeParams, 32) { asm volatile("trap;"); }
#elif JITKERN_ON_GPU
#include "include/mla_result.cuh"
#if JITKERN_WARPGROUP
#include "include/mla_tile_warpgroup.cuh"
#if JITKERN_ROWS > 32
#include "include/mla_consumer_wide.cuh"
#else
#include "include/mla_consumer_narrow.cuh"
#endif
#else
#include "include/mla_consumer.cuh"
#endif
#include "include/mla_producer.cuh"

JITKERN_EXPORT(jitkern::DecodeParams)

// With one block a multiprocessor the compiler may use every register, and each role takes what it needs.
extern "C" __global__ void __launch_bounds__(jitkern::kThreads, 1)
    JITKERN_ENTRY(const __grid_constant__ jitkern::DecodeParams p) {
  using namespace jitkern;
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  Shared& s = *reinterpret_cast<Shared*>(dynamic_shared);
  const int thread = static_cast<int>(threadIdx.x), warp = uniform(thread / 32);
  const i32 head_k = static_cast<i32>(blockIdx.z);
  const i32 first = static_cast<i32>(blockIdx.x) * kRows;
  const i32 last = min_of(first + kRows, p.group * p.q_len) - 1;

  if (thread == 0) {
    for (int i = 0; i < kChunks; ++i) {
      for (int wave = 0; wave < kWaves; ++wave) barrier_init(shared_address(&s.full[wave][i]), kFetchArrivals);
      barrier_init(shared_address(&s.empty[i]), kConsumerWarps);
    }
    barrier_init(shared_address(&s.q_full), kFetchArrivals * kTiles);
    barrier_init(shared_address(&s.q_empty), kConsumerWarps);
#if JITKERN_WARPGROUP && JITKERN_ROWS == 64
    barrier_init(shared_address(&s.maxima_known), 1);
    for (int group = 0; group < 2; ++group) barrier_init(shared_address(&s.weighed[group]), 1);
#endif
  }
  wait_for_predecessor();
  let_next_kernel_start();
  const Record record = p.plan.records[blockIdx.y];
  if (record.begin_request == kIdle) return;
  block_barrier();
  if (warp >= kConsumerWarps) {
#if JITKERN_WARPGROUP && JITKERN_ROWS == 64
    asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
#endif
    produce(p, s, record, first, last, head_k, warp - kConsumerWarps, thread % 32);
  } else {
#if JITKERN_WARPGROUP && JITKERN_ROWS == 64
    asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
#endif
    consume(p, s, record, first, last, head_k, thread);
  }
}

#else
#include "include/mla_decode_cpu.cuh"

JITKERN_KERNEL(jitkern::DecodeParams, 1) {
  jitkern::decode_tile(p, static_cast<jitkern::i32>(blockIdx.x), static_cast<jitkern::i32>(blockIdx.y),
                       static_cast<jitkern::i32>(blockIdx.z));
}
#endif
