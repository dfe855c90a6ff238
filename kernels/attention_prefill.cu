// Causal attention of a batch of prompt tokens over the KV cache, on tensor cores, tile by tile.
//
//   out[i, h] = sum_t softmax_t(q[i, h] . k[t]) v[t],   t <= pos0 + i (and within the sliding window)
//
// Layout     q: half [n][n_heads][HEAD_DIM], times log2(e) / sqrt(head_dim); K and V of one layer as in attention.cu,
//            the batch's own rows already stored; out: half like q. Row t of the cache is position t (nothing has rolled).
// Launch     grid (ceil(n / 64), n_heads) x 128: a warp takes 16 queries of one head, a block 64 of them.
// Shared     a tile of 64 keys and 64 values as half, rows padded by 16 bytes so that ldmatrix meets no bank twice.
// Order      key tiles from the first visible one up, sums in float: two runs give the same bits.

#include "common.cuh"
#include "mma.cuh"
#include "state.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef KV_FP8
#define KV_FP8 0
#endif

constexpr int kDim = (HEAD_DIM + 15) / 16 * 16;  // padded with zeros to whole matrix fragments
constexpr int kPitch = kDim + 8;
constexpr int kKeys = kDim > 128 ? 32 : 64;      // keys of a tile
constexpr int kQueries = 64;

struct PrefillAttentionArgs {
  const __half* q;
  const u8* k;
  const u8* v;
  __half* out;
  int n;             // tokens of the batch
  int pos0;          // position of the first
  int n_heads;
  int heads_per_kv;
  int seq_len;
  int window;        // 0 = none
};

// Rows first .. first + kKeys of the cache as half; rows from `end` on and channels from HEAD_DIM on are zero.
DEVICE void load_tile(__half* tile, const u8* base, int first, int end) {
  constexpr int kPieces = kDim / 8;
  for (int i = threadIdx.x; i < kKeys * kPieces; i += 128) {
    const int row = i / kPieces, c = i % kPieces * 8, t = first + row;
    __half* to = tile + row * kPitch + c;
    if constexpr (HEAD_DIM % 8 == 0) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (t < end && c < HEAD_DIM) {
#if KV_FP8
        const uint2 w = *reinterpret_cast<const uint2*>(base + static_cast<long long>(t) * HEAD_DIM + c);
        v = make_uint4(__byte_perm(w.x, 0, 0x1404), __byte_perm(w.x, 0, 0x3424), __byte_perm(w.y, 0, 0x1404), __byte_perm(w.y, 0, 0x3424));
#else
        v = *reinterpret_cast<const uint4*>(base + (static_cast<long long>(t) * HEAD_DIM + c) * 2);
#endif
      }
      *reinterpret_cast<uint4*>(to) = v;
    } else {
      for (int j = 0; j < 8; ++j) {
        u16 bits = 0;
        if (t < end && c + j < HEAD_DIM) {
          const long long at = static_cast<long long>(t) * HEAD_DIM + c + j;
          bits = KV_FP8 ? static_cast<u16>(base[at] << 8) : reinterpret_cast<const u16*>(base)[at];
        }
        to[j] = __ushort_as_half(bits);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(128) attention_prefill(const __grid_constant__ PrefillAttentionArgs a) {
  extern __shared__ __align__(16) u8 shared[];
  __half* keys = reinterpret_cast<__half*>(shared);
  __half* values = keys + kKeys * kPitch;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, head = blockIdx.y;
  const int block0 = blockIdx.x * kQueries, row0 = block0 + warp * 16;
  const long long head_offset = static_cast<long long>(head / a.heads_per_kv) * a.seq_len * HEAD_DIM * (KV_FP8 ? 1 : 2);
  const u8* k = a.k + head_offset;
  const u8* v = a.v + head_offset;

  // Query fragments: rows lane / 4 and lane / 4 + 8 of the warp's 16, channels 2 (lane % 4) of each 8.
  u32 q[kDim / 16][4];
#pragma unroll
  for (int s = 0; s < kDim / 16; ++s) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = row0 + lane / 4 + (j & 1) * 8, c = s * 16 + (j >> 1) * 8 + lane % 4 * 2;
      const __half* from = a.q + (static_cast<long long>(row) * a.n_heads + head) * HEAD_DIM + c;
      q[s][j] = 0;
      if (row < a.n && c < HEAD_DIM) q[s][j] = *reinterpret_cast<const u32*>(from);  // HEAD_DIM is even
    }
  }
  float out[kDim / 8][4];
#pragma unroll
  for (int d = 0; d < kDim / 8; ++d) out[d][0] = out[d][1] = out[d][2] = out[d][3] = 0.0f;
  float top[2] = {-1e30f, -1e30f}, sum[2] = {0.0f, 0.0f};

  const int last_query = min(block0 + kQueries, a.n) - 1;
  const int end = a.pos0 + last_query + 1;  // keys any query of the block sees
  const int first = a.window > 0 ? max(0, a.pos0 + block0 - a.window + 1) / kKeys * kKeys : 0;
  for (int t0 = first; t0 < end; t0 += kKeys) {
    __syncthreads();
    load_tile(keys, k, t0, end);
    load_tile(values, v, t0, end);
    __syncthreads();
    float s[kKeys / 8][4];
#pragma unroll
    for (int n = 0; n < kKeys / 8; n += 2) {
      s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
      s[n + 1][0] = s[n + 1][1] = s[n + 1][2] = s[n + 1][3] = 0.0f;
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) {
        // Four 8 x 8 pieces: keys n*8.. and +8 by channels d*16.. and +8.
        u32 b[4];
        const int row = n * 8 + lane / 16 * 8 + lane % 8, c = d * 16 + lane / 8 % 2 * 8;
        ldmatrix4(b, smem_addr(keys + row * kPitch + c));
        mma(s[n], q[d], b[0], b[1]);
        mma(s[n + 1], q[d], b[2], b[3]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = a.pos0 + row0 + lane / 4 + half * 8;
      const int lowest = a.window > 0 ? position - a.window + 1 : 0;
      float high = top[half];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int t = t0 + n * 8 + lane % 4 * 2 + j;
          float& x = s[n][half * 2 + j];
          x = t <= position && t >= lowest ? x : -kInfinity;
          high = fmaxf(high, x);
        }
      }
      high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 1));
      high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2));
      const float shrink = exp2_fast(top[half] - high);
      top[half] = high;
      float total = 0.0f;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& x = s[n][half * 2 + j];
          x = exp2_fast(x - high);
          total += x;
        }
      }
      sum[half] = sum[half] * shrink + total;
#pragma unroll
      for (int d = 0; d < kDim / 8; ++d) {
        out[d][half * 2] *= shrink;
        out[d][half * 2 + 1] *= shrink;
      }
    }
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      const u32 p[4] = {pack_half2(s[2 * n][0], s[2 * n][1]), pack_half2(s[2 * n][2], s[2 * n][3]), pack_half2(s[2 * n + 1][0], s[2 * n + 1][1]), pack_half2(s[2 * n + 1][2], s[2 * n + 1][3])};
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) {
        // Transposed pieces: values n*16.. and +8 by channels d*16.. and +8.
        u32 b[4];
        const int row = n * 16 + lane / 8 % 2 * 8 + lane % 8, c = d * 16 + lane / 16 * 8;
        ldmatrix4_trans(b, smem_addr(values + row * kPitch + c));
        mma(out[2 * d], p, b[0], b[1]);
        mma(out[2 * d + 1], p, b[2], b[3]);
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float total = sum[half];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    const float scale = 1.0f / total;
    const int row = row0 + lane / 4 + half * 8;
    if (row >= a.n) continue;
#pragma unroll
    for (int d = 0; d < kDim / 8; ++d) {
      const int c = d * 8 + lane % 4 * 2;
      if (c < HEAD_DIM) *reinterpret_cast<u32*>(a.out + (static_cast<long long>(row) * a.n_heads + head) * HEAD_DIM + c) = pack_half2(out[d][half * 2] * scale, out[d][half * 2 + 1] * scale);
    }
  }
}
