// Version 0: one thread computes one row.
//
// Maths   y[r] = sum_c W[r, c] x[c]
// Layout  W [rows, cols] half, row-major; x [cols] half; y [rows] float. Any rows, any cols
// Launch  ceil(rows / 128) blocks of 128 threads, no shared memory
// Bytes   2 rows cols, once
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128)
    thread_a_row(const __half* __restrict__ w, const __half* __restrict__ x, float* y, int rows, int cols) {
  // --- the idea ---
  const int row = blockIdx.x * 128 + threadIdx.x;
  if (row >= rows) return;
  const __half* const p = w + (size_t)row * cols;
  float sum = 0.f;
#pragma unroll 4
  for (int c = 0; c < cols; c++) sum += __half2float(p[c]) * __half2float(x[c]);
  y[row] = sum;
  // --- end ---
}
