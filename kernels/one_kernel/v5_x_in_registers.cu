// Version 5: blocks that stay. A lane owns the same columns of every row, so its part of x is read once, into registers.
//
// Maths   y[r] = sum_c W[r, c] x[c]
// Layout  W [rows, cols] half, row-major; x [cols] half; y [rows] float. Any rows; cols a multiple of 8, <= 8 T NC
// Launch  as many blocks of T threads as fit the GPU at once; each takes a contiguous range of rows, R at a time
// Bytes   2 rows cols, once
// Keys    K_THREADS (T), K_CHUNKS (NC: 16-byte pieces of a row a lane takes), K_ROWS (R), K_BLOCKS (blocks on a multiprocessor)
#include "quant.cuh"
#include "reduce.cuh"

constexpr int T = K_THREADS, NC = K_CHUNKS, R = K_ROWS, WARPS = T / 32;

extern "C" __global__ void __launch_bounds__(T, K_BLOCKS)
    x_in_registers(const uint4* __restrict__ w, const uint4* __restrict__ x, float* y, int rows, int cols) {
  __shared__ float sums[2][WARPS][R];
  const int chunks = cols / 8, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // --- the idea ---
  u32 xs[NC][4];
#pragma unroll
  for (int c = 0; c < NC; c++) {
    const int chunk = c * T + threadIdx.x;
    const uint4 b = chunk < chunks ? x[chunk] : uint4{0, 0, 0, 0};
    xs[c][0] = b.x, xs[c][1] = b.y, xs[c][2] = b.z, xs[c][3] = b.w;
  }
  const int first = (long long)rows * blockIdx.x / gridDim.x, last = (long long)rows * (blockIdx.x + 1) / gridDim.x;
#pragma unroll 1
  for (int row = first, half = 0; row < last; row += R, half ^= 1) {
    uint4 a[R][NC];
#pragma unroll
    for (int i = 0; i < R; i++)
#pragma unroll
      for (int c = 0; c < NC; c++) {
        const int chunk = c * T + threadIdx.x;
        a[i][c] = chunk < chunks ? w[(size_t)min(row + i, last - 1) * chunks + chunk] : uint4{0, 0, 0, 0};
      }
    float sum[R] = {};
#pragma unroll
    for (int i = 0; i < R; i++)
#pragma unroll
      for (int c = 0; c < NC; c++) sum[i] += Quant<FP16>::dot(a[i][c], xs[c]);
    // The price: a row now lies across the warps of the block.
    const float s = warp_sum_many<R>(sum);
    if (lane % (32 / R) == 0) sums[half][warp][warp_sum_index<R>()] = s;
    __syncthreads();  // one barrier a pass, because the two halves of `sums` take turns
    if (threadIdx.x < R && row + threadIdx.x < last) {
      float total = 0.f;
      for (int v = 0; v < WARPS; v++) total += sums[half][v][threadIdx.x];
      y[row + threadIdx.x] = total;
    }
  }
  // --- end ---
}
