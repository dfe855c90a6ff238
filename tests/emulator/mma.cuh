// kernels/mma.cuh without its PTX: the lanes of a warp show each other what they hold, and each takes its part.
#pragma once
#include "common.cuh"

namespace emulator {
// Calls `use` while all lanes of the warp show their `words`.
template <class Use> void together(const std::array<uint32_t, 6>& words, Use use) {
  block->wide[current] = words;
  wait(block->warp_barriers[warp()], 32);
  use(&block->wide[warp() * 32]);
  wait(block->warp_barriers[warp()], 32);
}
inline uint32_t element(const u32 address) {
  require(!is_in_flight(address), "a fragment of what is still on its way");
  uint16_t v;
  memcpy(&v, shared_at(address, 2), 2);
  return v;
}
}  // namespace emulator

inline void ldmatrix(u32 (&r)[4], u32 addr, bool is_transposed) {
  require(addr % 16 == 0, "misaligned ldmatrix");
  emulator::together({addr}, [&](const std::array<uint32_t, 6>* lanes) {
    const u32 g = emulator::lane() / 4, j = emulator::lane() % 4;
    for (u32 i = 0; i < 4; i++) {
      using emulator::element;
      const auto* rows = lanes + 8 * i;
      r[i] = is_transposed ? element(rows[2 * j][0] + 2 * g) | element(rows[2 * j + 1][0] + 2 * g) << 16
                           : element(rows[g][0] + 4 * j) | element(rows[g][0] + 4 * j + 2) << 16;
    }
  });
}
inline void ldmatrix4(u32 (&r)[4], u32 addr) { ldmatrix(r, addr, false); }
inline void ldmatrix4_trans(u32 (&r)[4], u32 addr) { ldmatrix(r, addr, true); }
inline void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  emulator::together({a[0], a[1], a[2], a[3], b0, b1}, [&](const std::array<uint32_t, 6>* lanes) {
    auto half_of_word = [](u32 word, u32 k) { return emulator::half_value((uint16_t)(word >> 16 * (k % 2))); };
    auto a_at = [&](u32 row, u32 k) { return half_of_word(lanes[row % 8 * 4 + k % 8 / 2][(k / 8) * 2 + row / 8], k); };
    auto b_at = [&](u32 k, u32 column) { return half_of_word(lanes[column * 4 + k % 8 / 2][4 + k / 8], k); };
    const u32 g = emulator::lane() / 4, j = emulator::lane() % 4;
    for (u32 i = 0; i < 4; i++) {
      double sum = c[i];
      for (u32 k = 0; k < 16; k++) sum += a_at(g + i / 2 * 8, k) * b_at(k, 2 * j + i % 2);
      c[i] = (float)sum;
    }
  });
}
inline u32 pack_half2(float x, float y) {
  const __half2 h = __floats2half2_rn(x, y);
  return *reinterpret_cast<const u32*>(&h);
}
inline float exp2_fast(float x) { return exp2f(x); }
