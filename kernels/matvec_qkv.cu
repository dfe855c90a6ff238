// norm + q, k, v projections + bias + clip + rotary embedding + write of k and v into the cache, one token.
//
// Maths   [q k v] = W norm(x) + bias, clamped, channels (2i, 2i+1) of each q and k head rotated by pos * freq_i
// Layout  w0 [(n_heads + 2 n_kv_heads) * head_dim, dim], rows in the order q, k, v; cache [kv_head][seq_len][head_dim]
// Unit    two neighbouring rows, one rotated pair: head_dim is even
// Keys    matvec.cuh's, and K_KV_FORMAT (FP16 or FP8)
#include "matvec.cuh"

// What becomes of a pair of rows; everything but the slot is known before the wait.
struct Target {
  float2 bias;
  int turn;     // its pair in the rope table, or -1
  int role;     // 0 q, 1 k, 2 v
  size_t at;    // of channel 0: index into q32, or into the cache without the slot
};

struct QkvRows {
  const MatvecArgs& a;
  int first;  // first row of this block
  size_t row_bytes;
  Target mine;
  float2 turn;
  int slot;

  static constexpr bool EVEN = true;
  DEVICE size_t step() const { return GROUPS * row_bytes; }
  DEVICE const u8* row(int r, int) const { return a.w0 + (first + r) * row_bytes; }
  DEVICE Target target(int row) const {
    Target t;
    t.bias = a.bias == nullptr ? float2{0.f, 0.f} : *reinterpret_cast<const float2*>(a.bias + row);
    t.role = row < a.q_dim ? 0 : row < a.q_dim + a.kv_dim ? 1 : 2;
    const int i = row - (t.role == 0 ? 0 : t.role == 1 ? a.q_dim : a.q_dim + a.kv_dim);
    const int head = i / a.head_dim, channel = i - head * a.head_dim;
    t.turn = t.role < 2 && channel < a.rotary_dim ? channel / 2 : -1;
    t.at = t.role == 0 ? i : (size_t)head * a.seq_len * a.head_dim + channel;
    return t;
  }
  DEVICE float2 turn_of(int index) const { return index >= 0 ? ld_f2(a.rope + index) : float2{1.f, 0.f}; }
  DEVICE void constants() { mine = target(min(first + 2 * (int)threadIdx.x, a.rows - 2)); }
  DEVICE void begin() {
    turn = turn_of(mine.turn);
    slot = ld_i32(a.state + ST_SLOT);
  }
  DEVICE void store(float u, float v, const Target& t, float2 turn) {
    u = fminf(fmaxf(u + t.bias.x, -a.clip), a.clip), v = fminf(fmaxf(v + t.bias.y, -a.clip), a.clip);
    const float x = u * turn.x - v * turn.y, y = u * turn.y + v * turn.x;
    if (t.role == 0) {
      *reinterpret_cast<float2*>(a.y32 + t.at) = {x * a.q_scale, y * a.q_scale};
    } else {
      const size_t at = t.at + (size_t)slot * a.head_dim;
      void* const cache = t.role == 2 ? a.vcache : a.kcache;
#if K_KV_FORMAT == 0
      constexpr float kMost = 65504.0f;  // what does not fit is stored as the largest half, as E5M2 is: Inf would spoil every later step
      *reinterpret_cast<__half2*>(static_cast<__half*>(cache) + at) =
          __floats2half2_rn(fminf(fmaxf(x, -kMost), kMost), fminf(fmaxf(y, -kMost), kMost));
#else
      *reinterpret_cast<u16*>(static_cast<u8*>(cache) + at) = (u16)(encode_e5m2(x) | encode_e5m2(y) << 8);
#endif
    }
  }
  template <class Sum> DEVICE void finish(int r0, int n, float scale, Sum sum) {
    int r = 2 * threadIdx.x;
    if (r0 == 0 && r < n) {
      store(sum(r) * scale, sum(r + 1) * scale, mine, turn);
      r += 2 * T;
    }
#pragma unroll 1
    for (; r < n; r += 2 * T) {
      const Target t = target(first + r0 + r);
      store(sum(r) * scale, sum(r + 1) * scale, t, turn_of(t.turn));
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
