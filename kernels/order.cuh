// Floats as integers of the same order, alone and with an id: the largest key is the first maximum.
#pragma once
#include "common.cuh"

// NaN above all, so that it is noticed, and -0 like 0.
DEVICE u32 order_key(float x) {
  const u32 u = __float_as_uint(x + 0.0f);
  if (x != x) return 0xffffffffu;
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}
DEVICE float key_value(u32 k) { return __uint_as_float(k & 0x80000000u ? k & 0x7fffffffu : ~k); }
DEVICE u64 best_key(float x, int id) { return static_cast<u64>(order_key(x)) << 32 | static_cast<u32>(~id); }
DEVICE int best_id(u64 key) { return static_cast<int>(~static_cast<u32>(key)); }
DEVICE float best_value(u64 key) { return key_value(static_cast<u32>(key >> 32)); }
