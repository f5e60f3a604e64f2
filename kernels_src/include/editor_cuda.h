// CUDA's words for an editor's language server where no toolkit is installed. No compiler of jitkern reads this file.
#pragma once
#if defined(__clang__) && defined(__CUDA__)
#define __CUDACC__ 1
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

typedef __SIZE_TYPE__ size_t;
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct jitkern_editor_index { unsigned x, y, z; };
extern const __device__ jitkern_editor_index threadIdx, blockIdx, blockDim, gridDim;

#define JITKERN_EDITOR(declaration) extern __device__ declaration;
JITKERN_EDITOR(void __syncthreads())
JITKERN_EDITOR(void __syncwarp(unsigned = ~0u))
JITKERN_EDITOR(float __fmul_rn(float, float))
JITKERN_EDITOR(float __fadd_rn(float, float))
JITKERN_EDITOR(float __fmaf_rn(float, float, float))
JITKERN_EDITOR(float __fdiv_rn(float, float))
JITKERN_EDITOR(double __dmul_rn(double, double))
JITKERN_EDITOR(double __dadd_rn(double, double))
JITKERN_EDITOR(double __fma_rn(double, double, double))
JITKERN_EDITOR(double __ddiv_rn(double, double))
JITKERN_EDITOR(int __float2int_rn(float))
JITKERN_EDITOR(float __int_as_float(int))
JITKERN_EDITOR(int __float_as_int(float))
JITKERN_EDITOR(float __uint_as_float(unsigned))
JITKERN_EDITOR(unsigned __float_as_uint(float))
JITKERN_EDITOR(double exp(double))
JITKERN_EDITOR(double log1p(double))
JITKERN_EDITOR(float expf(float))
JITKERN_EDITOR(float __expf(float))
JITKERN_EDITOR(float logf(float))
JITKERN_EDITOR(float sqrtf(float))
JITKERN_EDITOR(float rsqrtf(float))
JITKERN_EDITOR(float fmaxf(float, float))
JITKERN_EDITOR(float fminf(float, float))
JITKERN_EDITOR(float fabsf(float))
template <class V> extern __device__ V __shfl_sync(unsigned, V, int, int = 32);
template <class V> extern __device__ V __shfl_xor_sync(unsigned, V, int, int = 32);
template <class V> extern __device__ V __shfl_down_sync(unsigned, V, unsigned, int = 32);
template <class V> extern __device__ V __ldg(const V*);
template <class V> extern __device__ V __ldcs(const V*);
template <class V> extern __device__ void __stcs(V*, V);
template <class V> extern __device__ V atomicAdd(V*, V);
template <class A, class B> extern __device__ A min(A, B);
template <class A, class B> extern __device__ A max(A, B);
#endif
