// The kernels between the matrix products of a batch of prompt tokens. n tokens, one row each; matrices are cuBLAS's.
//
// embed_rows   x[i] = embedding[token_i]                                     grid n x 256
// angles_rows  rope[i, j] = factor (cos, sin)((pos0 + i) f_j), in double      grid n x 128
// norm_rows    y[i] = half(norm(x[i]) g)                                     grid n x 256
// qkv_rows     bias, clip, rotation; q to half, k and v to the cache         grid n x 256
// gated_rows   h = half(act(gate) * up); *overflow |= 1 where half is short  grid (ceil(hidden / 256), n) x 256
// scaled_rows  the same with a power of two of each row's own: h = half(act(gate) * up / scale)     grid n x 256
// add_rows     x[i] += scale[i] y[i]                                         grid n x 256
// dequantise   stored weights to half                                        any grid x 256
// resume_row   a row of x as a decode step keeps it: x32, x16, part           grid as embed's without the angles

#include "common.cuh"
#include "quant.cuh"
#include "reduce.cuh"
#include "state.cuh"

#ifndef FORMAT
#define FORMAT 0
#endif
#ifndef KV_FP8
#define KV_FP8 0
#endif

constexpr int kBits = FORMAT == 0 ? 16 : FORMAT == 1 ? 8 : 4;

extern "C" __global__ void __launch_bounds__(256) embed_rows(const u8* embedding, const int* tokens, float* x, int dim) {
  const u8* row = embedding + static_cast<long long>(tokens[blockIdx.x]) * dim * kBits / 8;
  for (int i = threadIdx.x; i < dim; i += 256) x[static_cast<long long>(blockIdx.x) * dim + i] = Quant<FORMAT>::weight_at(row, i);
}

extern "C" __global__ void __launch_bounds__(128) angles_rows(const double* frequencies, float2* rope, int pos0, int half_rotary, float factor) {
  for (int j = threadIdx.x; j < half_rotary; j += 128) {
    double s, c;
    sincos((static_cast<double>(pos0) + blockIdx.x) * frequencies[j], &s, &c);
    rope[blockIdx.x * half_rotary + j] = make_float2(static_cast<float>(c) * factor, static_cast<float>(s) * factor);
  }
}

// Sum over the block, in a fixed order; every thread gets it.
DEVICE float block_sum(float v, float* scratch) {
  v = warp_sum(v);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < 8; ++w) total += scratch[w];
  return total;
}

extern "C" __global__ void __launch_bounds__(256) norm_rows(const float* x, const float* g, __half* y, int dim, float eps, int subtract_mean) {
  __shared__ float scratch[8];
  const float* row = x + static_cast<long long>(blockIdx.x) * dim;
  float mean = 0.0f, squares = 0.0f;
  if (subtract_mean) {
    for (int i = threadIdx.x; i < dim; i += 256) mean += row[i];
    mean = block_sum(mean, scratch) / dim;
  }
  for (int i = threadIdx.x; i < dim; i += 256) squares += (row[i] - mean) * (row[i] - mean);
  const float scale = rsqrtf(block_sum(squares, scratch) / dim + eps);
  for (int i = threadIdx.x; i < dim; i += 256) y[static_cast<long long>(blockIdx.x) * dim + i] = __float2half_rn((row[i] - mean) * scale * g[i]);
}

struct QkvRowsArgs {
  const float* qkv;   // [n][q_dim + 2 kv_dim]
  const float* bias;  // or null
  const float2* rope; // [n][rotary_dim / 2]
  __half* q;          // [n][q_dim], times q_scale
  u8* k;              // this layer's cache
  u8* v;
  int q_dim, kv_dim, head_dim, rotary_dim, seq_len, pos0;
  float clip, q_scale;
};

DEVICE void store_row(u8* base, long long at, float x) {
#if KV_FP8
  base[at] = encode_e5m2(x);
#else
  reinterpret_cast<__half*>(base)[at] = __float2half_rn(fminf(fmaxf(x, -65504.0f), 65504.0f));
#endif
}

extern "C" __global__ void __launch_bounds__(256) qkv_rows(const __grid_constant__ QkvRowsArgs a) {
  const int width = a.q_dim + 2 * a.kv_dim, half = a.rotary_dim / 2;
  const float* row = a.qkv + static_cast<long long>(blockIdx.x) * width;
  for (int i = 2 * threadIdx.x; i < width; i += 512) {
    float x = row[i], y = row[i + 1];
    if (a.bias) x += a.bias[i], y += a.bias[i + 1];
    x = fminf(fmaxf(x, -a.clip), a.clip);
    y = fminf(fmaxf(y, -a.clip), a.clip);
    const bool is_q = i < a.q_dim, is_v = i >= a.q_dim + a.kv_dim;
    const int within = is_q ? i : is_v ? i - a.q_dim - a.kv_dim : i - a.q_dim, c = within % a.head_dim;
    if (!is_v && c < a.rotary_dim) {
      const float2 turn = a.rope[blockIdx.x * half + c / 2];
      const float u = x * turn.x - y * turn.y;
      y = x * turn.y + y * turn.x;
      x = u;
    }
    if (is_q) {
      *reinterpret_cast<__half2*>(a.q + static_cast<long long>(blockIdx.x) * a.q_dim + i) = __floats2half2_rn(x * a.q_scale, y * a.q_scale);
    } else {
      u8* base = is_v ? a.v : a.k;
      const long long at = (static_cast<long long>(within / a.head_dim) * a.seq_len + a.pos0 + blockIdx.x) * a.head_dim + c;
      store_row(base, at, x);
      store_row(base, at + 1, y);
    }
  }
}

DEVICE float activated(float z, int gelu) {
  return gelu ? 0.5f * z * (1.0f + tanhf(0.797884560802865f * (z + 0.044715f * z * z * z))) : z / (1.0f + expf(-z));
}

extern "C" __global__ void __launch_bounds__(256) gated_rows(const float* gate, const float* up, __half* h, int hidden, int gelu, int* overflow) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= hidden) return;
  const long long at = static_cast<long long>(blockIdx.y) * hidden + i;
  const float x = activated(gate[at], gelu) * up[at];
  if (!(fabsf(x) <= 65504.0f)) atomicOr(overflow, 1);
  h[at] = __float2half_rn(x);
}

// What gated_rows cannot hold: massive activations of some models' first tokens. The products go where the gate was.
extern "C" __global__ void __launch_bounds__(256) scaled_rows(float* gate, const float* up, __half* h, float* scale, int hidden, int gelu) {
  __shared__ float scratch[8];
  const long long row = static_cast<long long>(blockIdx.x) * hidden;
  float most = 0.0f;
  for (int i = threadIdx.x; i < hidden; i += 256) {
    const float x = activated(gate[row + i], gelu) * up[row + i];
    gate[row + i] = x;
    most = fmaxf(most, fabsf(x));
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = most;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < 8; ++w) most = fmaxf(most, scratch[w]);
  // The exponent of the largest product becomes that of 2^14 at most.
  const int above = max(static_cast<int>(__float_as_uint(most) >> 23) - (127 + 14), 0);
  const float down = __uint_as_float(static_cast<u32>(127 - above) << 23);
  for (int i = threadIdx.x; i < hidden; i += 256) h[row + i] = __float2half_rn(gate[row + i] * down);
  if (threadIdx.x == 0) scale[blockIdx.x] = __uint_as_float(static_cast<u32>(127 + above) << 23);
}

extern "C" __global__ void __launch_bounds__(256) add_rows(float* x, const float* y, const float* scale, int dim) {
  const long long row = static_cast<long long>(blockIdx.x) * dim;
  for (int i = threadIdx.x; i < dim; i += 256) x[row + i] += scale[blockIdx.x] * y[row + i];
}

// n weights; 8 a thread, aligned.
extern "C" __global__ void __launch_bounds__(256) dequantise(const u8* in, __half* out, long long n) {
  for (long long i = (blockIdx.x * 256ll + threadIdx.x) * 8; i < n; i += gridDim.x * 2048ll) {
    const int count = n - i < 8 ? static_cast<int>(n - i) : 8;
    const u8* from = in + i * kBits / 8;
    __half v[8];
    for (int j = 0; j < count; ++j) v[j] = __float2half_rn(Quant<FORMAT>::weight_at(from, j));
    if (count == 8) {
      *reinterpret_cast<uint4*>(out + i) = *reinterpret_cast<const uint4*>(v);
    } else {
      for (int j = 0; j < count; ++j) out[i + j] = v[j];
    }
  }
}

extern "C" __global__ void __launch_bounds__(256) resume_row(const float* x, const float* g, float* x32, __half* x16, float2* part, int dim) {
  __shared__ float2 sums[8];
  const int i = blockIdx.x * 256 + threadIdx.x;
  const float v = i < dim ? x[i] : 0.0f;
  if (i < dim) {
    x32[i] = v;
    if (g) x16[i] = __float2half_rn(ACT_SCALE * v * g[i]);
  }
  const float s = warp_sum(v), ss = warp_sum(v * v);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = make_float2(s, ss);
  __syncthreads();
  if (threadIdx.x == 0) {
    float2 total = sums[0];
    for (int w = 1; w < 8; ++w) total.x += sums[w].x, total.y += sums[w].y;
    part[blockIdx.x] = total;
  }
}
