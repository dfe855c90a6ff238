// Version 6: weights travel through a ring in shared memory (cp.async), so that loads stay in flight while a row is summed.
//
// Maths   y[r] = sum_c W[r, c] x[c]
// Layout  W [rows, cols] in the format of K_FORMAT, row-major; x [cols] half, |x| < 1 (gf4); y [rows] float.
//         Any rows; cols a multiple of 16 bytes of weights, <= T NC such pieces
// Launch  as many blocks of T threads as fit the GPU at once; each takes a contiguous range of rows, R at a time
// Shared  ring [S][R][NC][T] of 16 bytes, then sums [2][T / 32][R] float
// Bytes   rows cols bits / 8, once
// Keys    K_FORMAT, K_PLAIN (gf4 decoded the plain way), K_THREADS (T), K_CHUNKS (NC), K_ROWS (R), K_STAGES (S)
#include "quant.cuh"
#include "reduce.cuh"

constexpr int T = K_THREADS, NC = K_CHUNKS, R = K_ROWS, S = K_STAGES, WARPS = T / 32;

// gf4 as its definition reads: shift, mask, integer to float, one multiplication a weight.
struct PlainGf4 {
  static constexpr int PER_CHUNK = 32, X_REGS = 16, X_STRIDE = 16;
  static DEVICE void arrange(u32*, int) {}
  // --- plain gf4 ---
  static DEVICE float dot(uint4 w, const u32* x) {
    const u32 words[4] = {w.x, w.y, w.z, w.w};
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float s = 0.f;
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const int lo = words[i] >> (8 + 3 * j) & 7, hi = words[i] >> (11 + 3 * j) & 7;
        s += (float)(lo - 4) * __low2float(as_half2(x[4 * i + j / 2]));
        s += (float)(hi - 4) * __high2float(as_half2(x[4 * i + j / 2]));
      }
      total += s * __half2float(__ushort_as_half((u16)(words[i] << 8)));
    }
    return total * -0.25f;
  }
  // --- end ---
};
#if K_PLAIN
using Q = PlainGf4;
#else
using Q = Quant<K_FORMAT>;
#endif

extern __shared__ __align__(16) u8 shared[];

extern "C" __global__ void __launch_bounds__(T) ring(const u8* __restrict__ w, const __half* __restrict__ x, float* y, int rows, int cols) {
  constexpr int SLOT = R * NC * T * 16;
  float* const sums = reinterpret_cast<float*>(shared + S * SLOT);  // [2][WARPS][R]
  const int chunks = cols / Q::PER_CHUNK, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = (long long)rows * blockIdx.x / gridDim.x, last = (long long)rows * (blockIdx.x + 1) / gridDim.x;
  const int passes = (last - first + R - 1) / R;
  // --- the idea ---
  const u32 mine = smem_addr(shared) + threadIdx.x * 16;  // a lane reads back only what it copied itself: no barrier
  auto ask = [&](int pass) {
    if (pass < passes) {
#pragma unroll
      for (int i = 0; i < R; i++) {
        const u8* const p = w + ((size_t)min(first + pass * R + i, last - 1) * chunks + threadIdx.x) * 16;
#pragma unroll
        for (int c = 0; c < NC; c++)
          if (c * T + threadIdx.x < chunks) cp_async16(mine + pass % S * SLOT + (i * NC + c) * T * 16, p + c * T * 16);
      }
    }
    cp_async_commit();
  };
#pragma unroll 1
  for (int s = 0; s < S; s++) ask(s);
  // --- end ---
  u32 xs[NC][Q::X_STRIDE];
#pragma unroll
  for (int c = 0; c < NC; c++) {
    const int chunk = c * T + threadIdx.x;
#pragma unroll
    for (int i = 0; i < Q::X_REGS; i += 4) {
      const uint4 b = chunk < chunks ? ld_v4(x + (size_t)chunk * Q::PER_CHUNK + 2 * i) : uint4{0, 0, 0, 0};
      xs[c][i] = b.x, xs[c][i + 1] = b.y, xs[c][i + 2] = b.z, xs[c][i + 3] = b.w;
    }
    Q::arrange(xs[c], 0);
    if (chunk >= chunks)  // lanes past the end of a row read zeros
      for (int s = 0; s < S * R; s++) *reinterpret_cast<uint4*>(shared + ((s * NC + c) * T + threadIdx.x) * 16) = {0, 0, 0, 0};
  }
  // --- the idea ---
#pragma unroll 1
  for (int pass = 0; pass < passes; pass++) {
    cp_async_wait<S - 1>();  // the oldest slot has landed, S - 1 are still on their way
    float sum[R] = {};
#pragma unroll
    for (int i = 0; i < R; i++)
#pragma unroll
      for (int c = 0; c < NC; c++) sum[i] += Q::dot(lds_v4(mine + pass % S * SLOT + (i * NC + c) * T * 16), xs[c]);
    ask(pass + S);  // the slot is free: fill it before the rows are summed
    const float s = warp_sum_many<R>(sum);
    float* const half = sums + (pass & 1) * WARPS * R;
    if (lane % (32 / R) == 0) half[warp * R + warp_sum_index<R>()] = s;
    __syncthreads();
    // --- end ---
    const int row = first + pass * R + threadIdx.x;
    if (threadIdx.x < R && row < last) {
      float total = 0.f;
      for (int v = 0; v < WARPS; v++) total += half[v * R + threadIdx.x];
      y[row] = total;
    }
  }
}
