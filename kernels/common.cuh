// What every kernel shares: dependent launch, ordered loads, cp.async, stamps, the words of the step state.
#pragma once
#include <cuda_fp16.h>

using u32 = unsigned int;
using u64 = unsigned long long;
using u16 = unsigned short;
using u8 = unsigned char;

#define DEVICE __device__ __forceinline__
#ifndef INFINITY
#define INFINITY __int_as_float(0x7F800000)
#endif

// Half activations are stored times this, so that small ones keep their bits; what overflows becomes Inf, and the
// consumer then takes the float copy instead.
constexpr float ACT_SCALE = 8.0f;

// Words of the step state (device memory): one graph serves every step because these change, not the arguments.
enum StateWord { ST_TOKEN = 0, ST_POS = 1, ST_SLOT = 2, ST_LEN = 3 };

// When a kernel ran, on the GPU's global timer. CALMNB_STAMPS=
//   0  nothing.
//   1  start of block 0, which is the first, and last block's end, by an integer maximum (does not depend on order).
//   2  start and end of block 0 alone.
//   3  start of block 0, and when its pdl_wait returned: the end of the kernel before, as this one saw it.
//   4  when its pdl_wait returned, alone.
// At a kernel's end all wait for the last block, so 3 and 4, which add nothing there, cost least: 0.03 to 0.3% of a step of
// Mistral-7B on an H200, where 1 costs 0.3 to 4%. They are of use where the next kernel starts before this one ends.
// One thread reads the timer, never a whole block: all warps of a GPU reading it at a kernel's start cost 2%. And no static
// shared memory: 16 bytes of it move the rings off their lines, which cost 14%.
#ifndef CALMNB_STAMPS
#define CALMNB_STAMPS 0
#endif
DEVICE u64 global_timer() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)::"memory");
  return t;
}
DEVICE u32 clock_cycles() {
  u32 t;
  asm volatile("mov.u32 %0, %clock;" : "=r"(t)::"memory");
  return t;
}
DEVICE bool is_first_thread() { return (blockIdx.x | blockIdx.y | threadIdx.x) == 0; }
DEVICE void stamp_start(u64* stamp, u64& begun) {
#if CALMNB_STAMPS >= 1 && CALMNB_STAMPS <= 3
  if (is_first_thread()) begun = global_timer();
#endif
}
// Call by all threads of the block. The start is written here too: the slots were reset by an earlier kernel, so
// they may be touched only after pdl_wait.
DEVICE void stamp_end(u64* stamp, u64 begun) {
#if CALMNB_STAMPS == 1
  __syncthreads();
  if (threadIdx.x == 0) {
    if (is_first_thread()) stamp[0] = begun;
    atomicMax(&stamp[1], global_timer());
  }
#elif CALMNB_STAMPS == 2
  if (blockIdx.x | blockIdx.y) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    stamp[0] = begun;
    stamp[1] = global_timer();
  }
#endif
}

// Programmatic dependent launch (sm_90+). pdl_trigger lets the next kernel's blocks start; pdl_wait returns once
// every earlier kernel has finished and its writes are visible. Without the launch attribute both do nothing.
DEVICE void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void pdl_wait_only() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#if CALMNB_STAMPS >= 3
DEVICE void pdl_wait_stamped(u64* stamp, u64 begun) {
  pdl_wait_only();
  if (is_first_thread()) {
    if (CALMNB_STAMPS == 3) stamp[0] = begun;
    stamp[1] = global_timer();
  }
}
// Kernels that stamp call their arguments `a` and their start `begun`.
#define pdl_wait() pdl_wait_stamped(a.stamp, begun)
#else
DEVICE void pdl_wait() { pdl_wait_only(); }
#endif

// Loads of what an earlier kernel wrote: never ld.global.nc, which the assembler may hoist above pdl_wait.
DEVICE uint4 ld_v4(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEVICE float4 ld_f4(const float* p) {
  float4 v;
  asm volatile("ld.global.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
  return v;
}
DEVICE float2 ld_f2(const void* p) {
  float2 v;
  asm volatile("ld.global.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
  return v;
}
DEVICE float ld_f32(const float* p) {
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
DEVICE int ld_i32(const int* p) {
  int v;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE float ld_half(const __half* p) {
  u16 v;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
  return __half2float(__ushort_as_half(v));
}

DEVICE u32 smem_addr(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// 16 bytes from global to shared memory, past L1.
DEVICE void cp_async16(u32 dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
// 4, 8 or 16 bytes; zeros when not `valid`, and then nothing is read.
template <int BYTES> DEVICE void cp_async_or_zero(u32 dst, const void* src, bool valid) {
  const int bytes = valid ? BYTES : 0;
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(dst), "l"(src), "r"(bytes), "n"(BYTES) : "memory");
  }
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
DEVICE uint4 lds_v4(u32 addr) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(addr) : "memory");
  return v;
}
