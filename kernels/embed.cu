// The first kernel of a step: the token's embedding row, and the cosines and sines of its position.
//
//   x = decode(embedding[token]);   x16 = 8 x g (g: weights of the first norm);   rope[i] = factor (cos, sin)(pos f_i)
//
// Layout     embedding: [vocab][DIM] as stored (fp16, E5M2, or gf4 words of 8 weights). x32: float [dim], x16: half [dim].
// Launch     grid n + 1 x 256: block b < n makes elements b*256.. and their partial sums; the last block makes the angles,
//            in double, because a float cannot hold pos * f_i to a useful fraction of a turn.
// Bytes      one row.

#include "common.cuh"
#include "quant.cuh"
#include "state.cuh"

#ifndef FORMAT  // FP16, FP8 or GF4 of quant.cuh
#define FORMAT 0
#endif

struct EmbedArgs {
  const u8* embedding;
  const float* g_next;      // norm weights of the first norm, or null: then no x16
  const double* frequencies;  // [rotary_dim / 2], radians per position
  float* x32;
  __half* x16;
  float2* part;             // [gridDim.x - 1] sums of x and x^2
  float2* rope;             // [rotary_dim / 2]
  const int* state;
  u64* stamp;
  int dim;
  int half_rotary;
  float factor;             // on cosines and sines (yarn)
};

constexpr int kBits = FORMAT == 0 ? 16 : FORMAT == 1 ? 8 : 4;

extern "C" __global__ void __launch_bounds__(256) embed(const __grid_constant__ EmbedArgs a) {
  pdl_trigger();
  u64 begun = 0;
  stamp_start(a.stamp, begun);
  const int token = ld_i32(a.state + ST_TOKEN), pos = ld_i32(a.state + ST_POS);
  const int tid = threadIdx.x;
  if (blockIdx.x == gridDim.x - 1) {
    pdl_wait();
    for (int i = tid; i < a.half_rotary; i += 256) {
      double s, c;
      sincos(static_cast<double>(pos) * a.frequencies[i], &s, &c);
      a.rope[i] = make_float2(static_cast<float>(c) * a.factor, static_cast<float>(s) * a.factor);
    }
  } else {
    __shared__ float2 warp_sum[8];
    const int i = blockIdx.x * 256 + tid;
    const float x = i < a.dim ? Quant<FORMAT>::weight_at(a.embedding + static_cast<long long>(token) * a.dim * kBits / 8, i) : 0.0f;
    pdl_wait();
    if (i < a.dim) {
      a.x32[i] = x;
      if (a.g_next) a.x16[i] = __float2half_rn(ACT_SCALE * x * a.g_next[i]);
    }
    float2 sum = make_float2(x, x * x);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
      sum.x += __shfl_xor_sync(0xffffffffu, sum.x, d);
      sum.y += __shfl_xor_sync(0xffffffffu, sum.y, d);
    }
    if (tid % 32 == 0) warp_sum[tid / 32] = sum;
    __syncthreads();
    if (tid == 0) {
      for (int w = 1; w < 8; ++w) {
        sum.x += warp_sum[w].x;
        sum.y += warp_sum[w].y;
      }
      a.part[blockIdx.x] = sum;
    }
  }
  stamp_end(a.stamp, begun);
}
