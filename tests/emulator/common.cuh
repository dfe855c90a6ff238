// kernels/common.cuh without its PTX. cp.async copies at once: what the kernel may assume is only that the data are
// there after the wait, so copies are also checked to be 16-byte aligned and inside shared memory.
#pragma once
#include <cuda_fp16.h>
#include <stdio.h>
#include <stdlib.h>

using u32 = unsigned int;
using u64 = unsigned long long;
using u16 = unsigned short;
using u8 = unsigned char;

#define DEVICE inline
#undef INFINITY
#define INFINITY __int_as_float(0x7F800000)
#define __CUDA_ARCH__ 900

constexpr float ACT_SCALE = 8.0f;
enum StateWord { ST_TOKEN = 0, ST_POS = 1, ST_SLOT = 2, ST_LEN = 3 };

inline u32 shared_bytes = 0;
inline void require(bool ok, const char* what) {
  if (!ok) {
    fprintf(stderr, "emulator: %s\n", what);
    abort();
  }
}
inline void pdl_trigger() {}
inline void pdl_wait() {}
inline void pdl_wait_only() {}
inline uint4 ld_v4(const void* p) {
  require((uintptr_t)p % 16 == 0, "misaligned 16-byte load");
  uint4 v;
  memcpy(&v, p, 16);
  return v;
}
inline float4 ld_f4(const float* p) {
  require((uintptr_t)p % 16 == 0, "misaligned 16-byte load");
  float4 v;
  memcpy(&v, p, 16);
  return v;
}
inline float2 ld_f2(const void* p) {
  require((uintptr_t)p % 8 == 0, "misaligned 8-byte load");
  float2 v;
  memcpy(&v, p, 8);
  return v;
}
inline float ld_f32(const float* p) { return *p; }
inline int ld_i32(const int* p) { return *p; }
inline float ld_half(const __half* p) { return __half2float(*p); }
inline u32 smem_addr(const void* p) { return (u32)((const u8*)p - emulator::dynamic_shared); }
inline void cp_async16(u32 dst, const void* src) {
  require((uintptr_t)src % 16 == 0 && dst % 16 == 0, "misaligned cp.async");
  require(dst + 16 <= shared_bytes, "cp.async past shared memory");
  memcpy(emulator::dynamic_shared + dst, src, 16);
}
inline void cp_async_commit() {}
template <int N> inline void cp_async_wait() {}
inline uint4 lds_v4(u32 addr) {
  require(addr % 16 == 0 && addr + 16 <= shared_bytes, "shared load out of range");
  uint4 v;
  memcpy(&v, emulator::dynamic_shared + addr, 16);
  return v;
}
inline u64 global_timer() { return 0; }
inline void stamp_start(u64*, u64&) {}
inline void stamp_end(u64*, u64) {}
