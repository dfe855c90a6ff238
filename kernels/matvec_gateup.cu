// norm + gate and up projections + activation of the FFN, one token.
//
// Maths   h = act(W1 norm(x)) * (W3 norm(x)), act = SiLU or tanh GELU
// Layout  w0 = gate [hidden, dim], w1 = up [hidden, dim]: two matrices, as in the file; experts: [n_experts, hidden, dim]
// Unit    row i of gate and row i of up: local row 2i is gate's, 2i + 1 up's
// Keys    matvec.cuh's, and K_ACT (0 SiLU, 1 GELU)
#include "matvec.cuh"

DEVICE float activation(float z) {
#if K_ACT == 0
  return __fdividef(z, 1.f + __expf(-z));
#else
  return 0.5f * z * (1.f + tanhf(0.797884560802865f * (z + 0.044715f * z * z * z)));
#endif
}

struct GateUpRows {
  const MatvecArgs& a;
  int first;  // first unit
  size_t row_bytes;

  static constexpr bool EVEN = !K_MOE && GROUPS % 2 == 0;
  DEVICE size_t step() const { return GROUPS / 2 * row_bytes; }
  DEVICE const u8* row(int r, int) const {
    size_t at = first + r / 2;
#if K_MOE
    const int hidden = a.rows / 2 / a.n_active, slot = (int)at / hidden;
    at += (size_t)(expert_ids[slot] - slot) * hidden;
#endif
    return (r & 1 ? a.w1 : a.w0) + at * row_bytes;
  }
  DEVICE void constants() {}
  DEVICE void begin() {}
  template <class Sum> DEVICE void finish(int r0, int n, float scale, Sum sum) {
#pragma unroll 1
    for (int r = 2 * threadIdx.x; r < n; r += 2 * T) {
      const int i = first + (r0 + r) / 2;
      const float h = activation(sum(r) * scale) * (sum(r + 1) * scale);
      a.y32[i] = h;
      a.y16[i] = __float2half_rn(h * ACT_SCALE);
    }
  }
  DEVICE void end(float*, int) {}
};

extern "C" __global__ void BOUNDS matvec_gateup(const __grid_constant__ MatvecArgs a) {
  pdl_trigger();
  const int u0 = first_unit(a.rows / 2, blockIdx.x), u1 = first_unit(a.rows / 2, blockIdx.x + 1);
  GateUpRows rows{a, u0, row_bytes_of(a.cols)};
  matvec<K_NORM>(a, rows, 2 * (u1 - u0));
}
