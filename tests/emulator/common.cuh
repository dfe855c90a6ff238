// kernels/common.cuh without its PTX. cp.async copies when its thread waits for it, the latest that a GPU may: what is read
// before is NaN. Two copies on their way to one place are an error, as a copy out of line or out of shared memory is.
#pragma once
#include <cuda_fp16.h>

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

using emulator::require;
inline u32 shared_bytes = 0;
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
// Addresses of shared memory count from the dynamic part; those of static arrays lie beyond, counted from one of them.
inline u8 static_anchor[16];
constexpr u32 STATIC = 1u << 31, DYNAMIC_END = 1u << 20;
inline u32 smem_addr(const void* p) {
  const intptr_t offset = (const u8*)p - emulator::dynamic_shared;
  return offset >= 0 && offset < (intptr_t)DYNAMIC_END ? (u32)offset : STATIC + (u32)((const u8*)p - static_anchor);
}
inline u8* shared_at(u32 addr, u32 bytes) {
  if (addr >= DYNAMIC_END) return static_anchor + (int32_t)(addr - STATIC);
  require(addr + bytes <= shared_bytes, "shared memory beyond its end");
  return emulator::dynamic_shared + addr;
}
inline bool is_in_flight(u32 addr) { return addr < DYNAMIC_END && emulator::block->in_flight[addr / 4]; }
inline void copy_later(u32 dst, const void* src, u32 bytes) {
  require((uintptr_t)src % bytes == 0 && dst % bytes == 0, "misaligned cp.async");
  shared_at(dst, bytes);
  for (u32 i = 0; i < bytes; i += 4) {
    require(!is_in_flight(dst + i), "two copies are on their way to one place");
    emulator::block->in_flight[(dst + i) / 4] = true;
  }
  emulator::block->fibers[emulator::current].copies.push_back({dst, src, bytes});
}
inline void cp_async16(u32 dst, const void* src) { copy_later(dst, src, 16); }
template <int BYTES> inline void cp_async_or_zero(u32 dst, const void* src, bool valid) { copy_later(dst, valid ? src : nullptr, BYTES); }
inline void cp_async_commit() {
  emulator::Fiber& me = emulator::block->fibers[emulator::current];
  me.groups.push_back(me.copies.size());
}
template <int N> inline void cp_async_wait() {
  emulator::Fiber& me = emulator::block->fibers[emulator::current];
  if (me.groups.size() <= N) return;
  const size_t due = me.groups[me.groups.size() - N - 1];
  for (size_t i = 0; i < due; i++) {
    const emulator::Copy& one = me.copies[i];
    u8* const to = emulator::dynamic_shared + one.to;
    if (one.from) memcpy(to, one.from, one.bytes);
    else memset(to, 0, one.bytes);
    for (u32 j = 0; j < one.bytes; j += 4) emulator::block->in_flight[(one.to + j) / 4] = false;
  }
  me.copies.erase(me.copies.begin(), me.copies.begin() + due);
  me.groups.erase(me.groups.begin(), me.groups.end() - N);
  for (size_t& group : me.groups) group -= due;
}
inline uint4 lds_v4(u32 addr) {
  require(addr % 16 == 0, "misaligned shared load");
  uint4 v;
  memcpy(&v, shared_at(addr, 16), 16);
  for (u32 i = 0; i < 16; i += 4)
    if (is_in_flight(addr + i)) v.x = v.y = v.z = v.w = 0xFFFFFFFF;
  return v;
}
inline u64 global_timer() {  // moves on, so that who waits for a time gets there
  static u64 now = 0;
  return now += 100;
}
inline u32 clock_cycles() { return (u32)global_timer(); }
inline void stamp_start(u64*, u64&) {}
inline void stamp_end(u64*, u64) {}
