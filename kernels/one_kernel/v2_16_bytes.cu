// Version 2: the same warp a row, 16 bytes a load instead of 2.
//
// Maths   y[r] = sum_c W[r, c] x[c]
// Layout  W [rows, cols] half, row-major; x [cols] half; y [rows] float. Any rows; cols a multiple of 8 (16 bytes)
// Launch  ceil(rows / 8) blocks of 256 threads (8 warps), no shared memory
// Bytes   2 rows cols, once
#include "quant.cuh"
#include "reduce.cuh"

DEVICE float dot2(u32 w, u32 x) {
  return __low2float(as_half2(w)) * __low2float(as_half2(x)) + __high2float(as_half2(w)) * __high2float(as_half2(x));
}

extern "C" __global__ void __launch_bounds__(256)
    bytes_16(const uint4* __restrict__ w, const uint4* __restrict__ x, float* y, int rows, int cols) {
  const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  // --- the idea ---
  const int chunks = cols / 8;  // of 16 bytes
  const uint4* const p = w + (size_t)row * chunks;
  float sum = 0.f;
#pragma unroll 1
  for (int c = lane; c < chunks; c += 32) {
    const uint4 a = p[c], b = x[c];
    sum += dot2(a.x, b.x) + dot2(a.y, b.y) + dot2(a.z, b.z) + dot2(a.w, b.w);
  }
  // --- end ---
  sum = warp_sum(sum);
  if (lane == 0) y[row] = sum;
}
