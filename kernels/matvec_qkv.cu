// norm + q, k, v projections + bias + clip + rotary embedding + write of k and v into the cache, one token.
//
// Maths   [q k v] = W norm(x) + bias, clamped, channels (2i, 2i+1) of each q and k head rotated by pos * freq_i
// Layout  w0 [(n_heads + 2 n_kv_heads) * head_dim, dim], rows in the order q, k, v; cache [kv_head][seq_len][head_dim]
// Unit    two neighbouring rows, one rotated pair: head_dim is even
// Keys    matvec.cuh's, and K_KV_FORMAT (FP16 or FP8)
#include "matvec.cuh"

struct QkvRows {
  const MatvecArgs& a;
  int first;        // first row of this block
  size_t row_bytes;
  float2 bias;
  float2 turn;
  int slot;
  int turn_at;      // pair of the rope table that this thread's first unit uses, or -1

  DEVICE const u8* row(int r, int pass) const { return a.w0 + (first + r) * row_bytes; }
  DEVICE int channel(int row) const { return row < a.q_dim ? row % a.head_dim : (row - a.q_dim) % a.head_dim; }
  DEVICE float2 bias_of(int row) const {
    return a.bias == nullptr ? float2{0.f, 0.f} : *reinterpret_cast<const float2*>(a.bias + row);
  }
  DEVICE int turn_index(int row) const {
    const int c = channel(row);
    return row < a.q_dim + a.kv_dim && c < a.rotary_dim ? c / 2 : -1;
  }
  DEVICE float2 turn_of(int index) const { return index >= 0 ? ld_f2(a.rope + index) : float2{1.f, 0.f}; }
  DEVICE void constants() {
    const int row = first + 2 * threadIdx.x;
    bias = row < a.rows ? bias_of(row) : float2{0.f, 0.f};
    turn_at = row < a.rows ? turn_index(row) : -1;
  }
  DEVICE void begin() {
    turn = turn_of(turn_at);
    slot = ld_i32(a.state + ST_SLOT);
  }
  template <class Sum> DEVICE void finish(int r0, int n, float scale, Sum sum) {
    for (int r = 2 * threadIdx.x; r < n; r += 2 * T) {
      const int row = first + r0 + r;
      const bool prefetched = r0 == 0 && r < 2 * T;
      const float2 b = prefetched ? bias : bias_of(row), t = prefetched ? turn : turn_of(turn_index(row));
      const float u = fminf(fmaxf(sum(r) * scale + b.x, -a.clip), a.clip);
      const float v = fminf(fmaxf(sum(r + 1) * scale + b.y, -a.clip), a.clip);
      const float x = u * t.x - v * t.y, y = u * t.y + v * t.x;
      if (row < a.q_dim) {
        *reinterpret_cast<float2*>(a.y32 + row) = {x * a.q_scale, y * a.q_scale};
      } else {
        const bool is_v = row >= a.q_dim + a.kv_dim;
        const int i = row - a.q_dim - (is_v ? a.kv_dim : 0);
        const size_t at = ((size_t)(i / a.head_dim) * a.seq_len + slot) * a.head_dim + i % a.head_dim;
        void* const cache = is_v ? a.vcache : a.kcache;
#if K_KV_FORMAT == 0
        *reinterpret_cast<__half2*>(static_cast<__half*>(cache) + at) = __floats2half2_rn(x, y);
#else
        *reinterpret_cast<u16*>(static_cast<u8*>(cache) + at) = (u16)(encode_e5m2(x) | encode_e5m2(y) << 8);
#endif
      }
    }
  }
  DEVICE void end(float*, int) {}
};

extern "C" __global__ void BOUNDS matvec_qkv(const __grid_constant__ MatvecArgs a) {
  pdl_trigger();
  const int u0 = first_unit(a.rows / 2, blockIdx.x), u1 = first_unit(a.rows / 2, blockIdx.x + 1);
  QkvRows rows{a, 2 * u0, row_bytes_of(a.cols)};
  matvec<K_NORM>(a, rows, 2 * (u1 - u0));
}
