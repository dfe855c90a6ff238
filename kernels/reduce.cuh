// Sums over the lanes of a warp in a fixed order: the same bits on every run.
#pragma once
#include "common.cuh"

// Every lane gets the sum over the warp.
DEVICE float warp_sum(float v) {
#pragma unroll
  for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
  return v;
}

// Sums R values over the 32 lanes at once: lane l ends with the sum of value `warp_sum_index<R>(l)`. Halving the
// number of values at each exchange costs R - 1 + log2(32 / R) shuffles instead of 5 R.
template <int R> DEVICE float warp_sum_many(float (&v)[R]) {
  static_assert(R >= 1 && R <= 32 && (R & (R - 1)) == 0, "R must be a power of two");
  const int lane = threadIdx.x & 31;
  int d = 16;
#pragma unroll
  for (int n = R / 2; n >= 1; n >>= 1, d >>= 1) {
    const bool upper = lane & d;
#pragma unroll
    for (int i = 0; i < n; i++) {
      const float keep = upper ? v[i + n] : v[i];
      const float give = upper ? v[i] : v[i + n];
      v[i] = keep + __shfl_xor_sync(~0u, give, d);
    }
  }
#pragma unroll
  for (int e = 32 / R / 2; e; e >>= 1) v[0] += __shfl_xor_sync(~0u, v[0], e);
  return v[0];
}
// Which value lane l holds after warp_sum_many<R>; lanes with (l % (32 / R)) == 0 are one for each value.
template <int R> DEVICE int warp_sum_index() { return (threadIdx.x & 31) / (32 / R); }
