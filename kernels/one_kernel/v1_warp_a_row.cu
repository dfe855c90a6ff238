// Version 1: one warp computes one row; neighbouring lanes read neighbouring weights.
//
// Maths   y[r] = sum_c W[r, c] x[c]
// Layout  W [rows, cols] half, row-major; x [cols] half; y [rows] float. Any rows, any cols
// Launch  ceil(rows / 8) blocks of 256 threads (8 warps), no shared memory
// Bytes   2 rows cols, once
#include "reduce.cuh"

extern "C" __global__ void __launch_bounds__(256)
    warp_a_row(const __half* __restrict__ w, const __half* __restrict__ x, float* y, int rows, int cols) {
  // --- the idea ---
  const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  const __half* const p = w + (size_t)row * cols;
  float sum = 0.f;
#pragma unroll 4
  for (int c = lane; c < cols; c += 32) sum += __half2float(p[c]) * __half2float(x[c]);
  sum = warp_sum(sum);  // five exchanges between lanes
  if (lane == 0) y[row] = sum;
  // --- end ---
}
