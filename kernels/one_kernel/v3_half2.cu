// Version 3: two weights an instruction, and no conversion: half2 products inside the 16 bytes, float beyond.
//
// Maths   y[r] = sum_c W[r, c] x[c]
// Layout  W [rows, cols] half, row-major; x [cols] half; y [rows] float. Any rows; cols a multiple of 8 (16 bytes)
// Launch  ceil(rows / 8) blocks of 256 threads (8 warps), no shared memory
// Bytes   2 rows cols, once
#include "quant.cuh"
#include "reduce.cuh"

extern "C" __global__ void __launch_bounds__(256)
    half2_products(const uint4* __restrict__ w, const uint4* __restrict__ x, float* y, int rows, int cols) {
  const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  const int chunks = cols / 8;
  const uint4* const p = w + (size_t)row * chunks;
  float sum = 0.f;
#pragma unroll 1
  for (int c = lane; c < chunks; c += 32) {
    const uint4 a = p[c], b = x[c];
    // --- the idea ---
    __half2 s = __hmul2(as_half2(a.x), as_half2(b.x));
    s = __hfma2(as_half2(a.y), as_half2(b.y), s);
    s = __hfma2(as_half2(a.z), as_half2(b.z), s);
    s = __hfma2(as_half2(a.w), as_half2(b.w), s);
    sum += __low2float(s) + __high2float(s);
    // --- end ---
  }
  sum = warp_sum(sum);
  if (lane == 0) y[row] = sum;
}
