// norm + projection to plain floats: the logits, or a router's scores, one token.
//
// Maths   y = W norm(x);  best[block] = its largest value, the lowest index that has it, sum of exp(y - largest)
// Layout  w0 [rows, dim]
// Unit    one row
// Keys    matvec.cuh's
#include "matvec.cuh"

struct PlainRows {
  const MatvecArgs& a;
  int first;
  size_t row_bytes;
  float top, sum;  // sum of exp(y - top): NaN if any y is
  int at;

  static constexpr bool EVEN = true;
  DEVICE size_t step() const { return GROUPS * row_bytes; }
  DEVICE const u8* row(int r, int pass) const { return a.w0 + (first + r) * row_bytes; }
  DEVICE void constants() {}
  DEVICE void begin() { top = -INFINITY, sum = 0.f, at = 0x7FFFFFFF; }
  // A value `v` at `i` together with others whose exponentials, over v's, sum to `s`.
  DEVICE void take(float v, int i, float s) {
    const float most = fmaxf(top, v);
    if (most > -INFINITY) sum = sum * __expf(top - most) + s * __expf(v - most);
    else sum += s;
    if (v > top || (v == top && i < at)) at = i;
    top = most;
  }
  template <class Sum> DEVICE void finish(int r0, int n, float scale, Sum sum) {
#pragma unroll 1
    for (int r = threadIdx.x; r < n; r += T) {
      const float y = sum(r) * scale;
      a.y32[first + r0 + r] = y;
      take(y, first + r0 + r, y == -INFINITY ? 0.f : 1.f + 0.f * y);  // NaN where y is no number
    }
  }
  DEVICE void end(float* scratch, int) {
    if (a.best == nullptr) return;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int d = 16; d; d >>= 1) {
      const float v = __shfl_xor_sync(~0u, top, d);
      const int i = __shfl_xor_sync(~0u, at, d);
      take(v, i, __shfl_xor_sync(~0u, sum, d));
    }
    __shared__ float sums[WARPS];
    if (lane == 0) scratch[warp] = top, scratch[WARPS + warp] = __int_as_float(at), sums[warp] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll 1
      for (int w = 1; w < WARPS; w++) take(scratch[w], __float_as_int(scratch[WARPS + w]), sums[w]);
      a.best[blockIdx.x] = {top, __int_as_float(at), sum, 0.f};
    }
  }
};

extern "C" __global__ void BOUNDS matvec_rows(const __grid_constant__ MatvecArgs a) {
  pdl_trigger();
  const int r0 = first_unit(a.rows, blockIdx.x), r1 = first_unit(a.rows, blockIdx.x + 1);
  PlainRows rows{a, r0, row_bytes_of(a.cols)};
  matvec<K_NORM>(a, rows, r1 - r0);
}
