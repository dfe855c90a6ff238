// Weight formats: how 16 bytes of a row become products with activations held in registers.
//
//   fp16   8 weights in 16 bytes
//   fp8   16 weights in 16 bytes: E5M2, the upper byte of a half
//   gf4   32 weights in 16 bytes: 4 words of 8; bits 0-7 of a word an E5M2 scale s, code c_i in bits 8+3i .. 10+3i,
//         weight = (c - 4) * s / -4
//
// Fast path (`dot`): two weights at a time in half2 inside the 16 bytes, float beyond. Activations come as half2 in
// the order `arrange` gives them. Instructions for 16 bytes of one row: fp16 4 HFMA2, fp8 8 PRMT + 8 HFMA2,
// gf4 12 PRMT + 16 LOP3 + 24 HFMA2 (+ 4 to reach float).
// Slow path (`weight_at`): one weight as float, any alignment; also the plain statement of each format.
#pragma once
#include "common.cuh"

enum Format { FP16 = 0, FP8 = 1, GF4 = 2 };

template <int F> struct Quant;

DEVICE __half2 as_half2(u32 v) { return *reinterpret_cast<__half2*>(&v); }
DEVICE u32 as_u32(__half2 v) { return *reinterpret_cast<u32*>(&v); }
DEVICE float sum2(__half2 v) { return __low2float(v) + __high2float(v); }
template <> struct Quant<FP16> {
  static constexpr int PER_CHUNK = 8;  // weights in 16 bytes
  static constexpr int X_REGS = 4;      // half2 of activations for them
  static constexpr int X_STRIDE = 4;    // registers they take once arranged
  static constexpr int X_EXPONENT = 2;  // the largest activation of a lane is scaled to [2^2, 2^3)
  static DEVICE void arrange(u32*, int) {}
  static DEVICE float dot(uint4 w, const u32* x) {
    __half2 s = __hmul2(as_half2(w.x), as_half2(x[0]));
    s = __hfma2(as_half2(w.y), as_half2(x[1]), s);
    s = __hfma2(as_half2(w.z), as_half2(x[2]), s);
    s = __hfma2(as_half2(w.w), as_half2(x[3]), s);
    return sum2(s);
  }
  static DEVICE float weight_at(const void* row, int i) { return __half2float(static_cast<const __half*>(row)[i]); }
};

template <> struct Quant<FP8> {
  static constexpr int PER_CHUNK = 16;
  static constexpr int X_REGS = 8, X_STRIDE = 8;
  static constexpr int X_EXPONENT = 2;  // activations are scaled to [4, 8) at most
  static DEVICE void arrange(u32*, int) {}
  static DEVICE float dot(uint4 w, const u32* x) {
    const u32 words[4] = {w.x, w.y, w.z, w.w};
    __half2 s = __half2half2(__ushort_as_half(0));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const __half2 lo = as_half2(__byte_perm(words[i], 0, 0x1404)), hi = as_half2(__byte_perm(words[i], 0, 0x3424));
      s = i == 0 ? __hmul2(lo, as_half2(x[0])) : __hfma2(lo, as_half2(x[2 * i]), s);
      s = __hfma2(hi, as_half2(x[2 * i + 1]), s);
    }
    return sum2(s);
  }
  static DEVICE float weight_at(const void* row, int i) {
    return __half2float(__ushort_as_half((u16)(static_cast<const u8*>(row)[i] << 8)));
  }
};

template <> struct Quant<GF4> {
  static constexpr int PER_CHUNK = 32;
  static constexpr int X_REGS = 16;
  static constexpr int X_STRIDE = 20;  // and -4 times the sum of each word's activations
  static constexpr int X_EXPONENT = -1;
  // A masked code at bit p of a half is the (sub)normal number c 2^(p - 24): no bias, no shift. Its activation is
  // multiplied by 2^(15 - p) beforehand, so that every product is c x 2^-9, and the sum of a word starts at
  // -4 sum(x) 2^-9. 13 instructions a word; decoding to (c - 4) first takes 16.
  // Pairs of codes that one mask takes out of a word: (0,3) at bits (0,1), (1,4) at (3,4), (2,5) at (6,7), (6,7) at (2,5).
  static __host__ __device__ constexpr u32 pair(u32 lo, u32 hi) { return lo | hi << 16; }
  // `late`: power of two (<= 0) that the scaling to [0.5, 1) still lacks.
  static DEVICE void arrange(u32* x, int late) {
    const u32 more = (u32)(late * 0x04000400);
    const u32 f0 = pair(0x7800, 0x7400) + more, f1 = pair(0x6C00, 0x6800) + more, f2 = pair(0x6000, 0x5C00) + more,
              f3 = pair(0x7000, 0x6400) + more, four = pair(0xA000, 0xA000) + more;  // 2^(15 - p); -2^-7
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 a = x[4 * i], b = x[4 * i + 1], c = x[4 * i + 2];
      const __half2 e03 = as_half2(__byte_perm(a, b, 0x7610)), e14 = as_half2(__byte_perm(a, c, 0x5432)),
                    e25 = as_half2(__byte_perm(b, c, 0x7610)), e67 = as_half2(x[4 * i + 3]);
      x[16 + i] = as_u32(__hmul2(__hadd2(__hadd2(e03, e14), __hadd2(e25, e67)), as_half2(four)));
      x[4 * i] = as_u32(__hmul2(e03, as_half2(f0)));
      x[4 * i + 1] = as_u32(__hmul2(e14, as_half2(f1)));
      x[4 * i + 2] = as_u32(__hmul2(e25, as_half2(f2)));
      x[4 * i + 3] = as_u32(__hmul2(e67, as_half2(f3)));
    }
  }
  static DEVICE float dot(uint4 w, const u32* x) {
    const u32 words[4] = {w.x, w.y, w.z, w.w};
    __half2 total;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 u = __byte_perm(words[i], 0, 0x3221), v = __byte_perm(words[i], 0, 0x4343);
      __half2 s = __hfma2(as_half2(u & 0x000E0007), as_half2(x[4 * i]), as_half2(x[16 + i]));
      s = __hfma2(as_half2(u & 0x00700038), as_half2(x[4 * i + 1]), s);
      s = __hfma2(as_half2(u & 0x038001C0), as_half2(x[4 * i + 2]), s);
      s = __hfma2(as_half2(v & 0x00E0001C), as_half2(x[4 * i + 3]), s);
      // -1/4 of the format times 2^9 of the products: -128, finite for |s| < 512.
      const __half2 scale = __hmul2(as_half2(__byte_perm(words[i], 0, 0x0404)), as_half2(0xD800D800));  // -128
      total = i == 0 ? __hmul2(s, scale) : __hfma2(s, scale, total);
    }
    return sum2(total);
  }
  static DEVICE float weight_at(const void* row, int i) {
    const u32 w = static_cast<const u32*>(row)[i >> 3];
    const float s = __half2float(__ushort_as_half((u16)(w << 8)));
    return (float)((int)(w >> (8 + 3 * (i & 7)) & 7) - 4) * (s * -0.25f);
  }
};

// E5M2 of the KV cache: nearest even, saturating at 57344; NaN stays NaN.
DEVICE u8 encode_e5m2(float x) {
  const u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80, mag = bits & 0x7FFFFFFF;
  if (mag > 0x7F800000u) return (u8)(sign | 0x7F);
  if (mag >= 0x47600000u) return (u8)(sign | 0x7B);                               // >= 57344
  if (mag < 0x38800000u) return (u8)(sign | (u32)rintf(__uint_as_float(mag) * 65536.0f));  // below 2^-14: units of 2^-16
  const u32 rounded = (mag + 0x000FFFFF + (mag >> 21 & 1)) >> 21;
  const u32 code = rounded - (112u << 2);
  return (u8)(sign | (code > 0x7B ? 0x7Bu : code));
}
