// Projection back into the residual stream: attention output (o) or FFN activation (down), one token.
//
// Maths   y = res + W x;  y16 = 8 y g_next for the next norm;  part_next[block] = (sum y, sum y^2) of the block's rows
// Layout  w0 [dim, cols]; experts: [n_experts, dim, cols]
// Unit    one row
// Keys    matvec.cuh's
#include "matvec.cuh"

struct ResidualRows {
  const MatvecArgs& a;
  int first;
  size_t row_bytes;
  float res, g;
  float s, ss;

  static constexpr bool EVEN = !K_MOE;
  DEVICE size_t step() const { return GROUPS * row_bytes; }
  DEVICE const u8* row(int r, int pass) const {
    size_t at = first + r;
#if K_MOE
    at += (size_t)expert_ids[pass] * a.rows;
#endif
    return a.w0 + at * row_bytes;
  }
  DEVICE void constants() {
    const int row = first + threadIdx.x;
    g = a.g_next != nullptr && row < a.rows ? a.g_next[row] : 0.f;
  }
  DEVICE void begin() {
    const int row = first + threadIdx.x;
    res = row < a.rows ? ld_f32(a.res + row) : 0.f;
    s = ss = 0.f;
  }
  template <class Sum> DEVICE void finish(int r0, int n, float, Sum sum) {
#pragma unroll 1
    for (int r = threadIdx.x; r < n; r += T) {
      const int row = first + r0 + r;
      const bool prefetched = r0 == 0 && r < T;
      const float y = (prefetched ? res : ld_f32(a.res + row)) + sum(r);
      a.y32[row] = y;
      if (a.g_next != nullptr) a.y16[row] = __float2half_rn(y * ACT_SCALE * (prefetched ? g : a.g_next[row]));
      s += y, ss += y * y;
    }
  }
  DEVICE void end(float* scratch, int n) {
    if (a.part_next == nullptr) return;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    s = warp_sum(s), ss = warp_sum(ss);
    if (n > 32) {  // rows beyond the first warp
      if (lane == 0) scratch[warp] = s, scratch[WARPS + warp] = ss;
      __syncthreads();
      if (threadIdx.x == 0)
        for (int w = 1; w < WARPS; w++) s += scratch[w], ss += scratch[WARPS + w];
    }
    if (threadIdx.x == 0) a.part_next[blockIdx.x] = {s, ss};
  }
};

extern "C" __global__ void BOUNDS matvec_residual(const __grid_constant__ MatvecArgs a) {
  pdl_trigger();
  const int r0 = first_unit(a.rows, blockIdx.x), r1 = first_unit(a.rows, blockIdx.x + 1);
  ResidualRows rows{a, r0, row_bytes_of(a.cols)};
  matvec<NORM_NONE>(a, rows, r1 - r0);
}
