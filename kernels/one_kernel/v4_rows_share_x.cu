// Version 4: a warp takes four rows: four loads in flight a lane, and one load of x serves them all.
//
// Maths   y[r] = sum_c W[r, c] x[c]
// Layout  W [rows, cols] half, row-major; x [cols] half; y [rows] float. Any rows; cols a multiple of 8 (16 bytes)
// Launch  ceil(rows / 32) blocks of 256 threads (8 warps of 4 rows), no shared memory
// Bytes   2 rows cols, once
#include "quant.cuh"
#include "reduce.cuh"

constexpr int R = 4;

extern "C" __global__ void __launch_bounds__(256)
    rows_share_x(const uint4* __restrict__ w, const uint4* __restrict__ x, float* y, int rows, int cols) {
  const int row = (blockIdx.x * 8 + threadIdx.x / 32) * R, lane = threadIdx.x % 32;
  if (row >= rows) return;
  const int chunks = cols / 8;
  // --- the idea ---
  const uint4* p[R];
#pragma unroll
  for (int i = 0; i < R; i++) p[i] = w + (size_t)min(row + i, rows - 1) * chunks;  // past the end: the last row again
  float sum[R] = {};
#pragma unroll 1
  for (int c = lane; c < chunks; c += 32) {
    const uint4 b = x[c];
    const u32 xs[4] = {b.x, b.y, b.z, b.w};
    uint4 a[R];
#pragma unroll
    for (int i = 0; i < R; i++) a[i] = p[i][c];  // all four leave before the first is used
#pragma unroll
    for (int i = 0; i < R; i++) sum[i] += Quant<FP16>::dot(a[i], xs);
  }
  // --- end ---
#pragma unroll
  for (int i = 0; i < R; i++) {
    sum[i] = warp_sum(sum[i]);
    if (lane == 0 && row + i < rows) y[row + i] = sum[i];
  }
}
