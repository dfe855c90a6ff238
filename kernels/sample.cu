// Choosing the next token on the device, so that decoding never waits for the host.
//
//   greedy: first maximum; otherwise the thresholds and the draw of calmnb/sampler.py, step by step
//
// Layout     logits: float32 [vocab]. `adjusted` holds them after the repetition penalty.
// Launch     sample_max: grid SAMPLE_BLOCKS x 256, a slice of the ids a block; the last block to finish reduces the slices.
//            sample_draw: one block of 1024, only in the graph of a random sampler.
// Order      maxima are compared as 64-bit keys (value, then lowest id); sums run in a fixed order; counters are integers.
// Hand-over  the chosen token goes to the step state (the next step reads it there), to the history and to a ring in pinned
//            host memory, whose entry is there once its `step` field says so.

#include "common.cuh"
#include "state.cuh"

struct SampleParams {          // in device memory: one graph serves every setting
  float temperature, inverse_temperature;  // the second is unused by the exact path
  float penalty;
  float min_p_offset;        // ln(min_p) * temperature, or -inf
  double top_p;
  int top_k;
  int greedy;
  int n_ids;                 // ids that may be chosen
  int penalty_range;         // tokens the penalty looks back at, 0 = none
  u64 rng;    // xorshift64* state
};

struct SampleScratch {         // results of sample_max for sample_draw
  u64 best;   // key of the penalised maximum
  float raw_top, raw_log_sum;
};

struct HostToken {             // one entry of the ring in pinned host memory
  int token;
  float logprob;
  int pos;                   // position the token will stand at
  int step;                  // 1 + number of tokens sampled before it
};

struct SampleArgs {
  const float* logits;
  float* adjusted;
  u64* block_best;  // [SAMPLE_BLOCKS]
  float2* block_sum;               // [SAMPLE_BLOCKS] raw maximum and sum of exp(l - maximum)
  u32* counter;
  SampleScratch* scratch;
  SampleParams* params;
  int* state;
  int* history;                    // [history_cap], token at position p in history[p % history_cap]
  HostToken* host_ring;            // [host_cap]
  int vocab, history_cap, host_cap;
  int write_adjusted;              // a draw follows
  u64* stamp;
};

DEVICE u32 order_key(float x) {
  const u32 u = __float_as_uint(x);
  if (x != x) return 0xffffffffu;  // NaN wins, so that it is noticed
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}
DEVICE float key_value(u32 k) {
  return __uint_as_float(k & 0x80000000u ? k & 0x7fffffffu : ~k);
}

// Fold exp-sums (maximum, sum) of two sets into one.
DEVICE float2 fold(float2 a, float2 b) {
  const float top = fmaxf(a.x, b.x);
  if (top == -kInfinity) return make_float2(top, 0.0f);
  return make_float2(top, a.y * __expf(a.x - top) + b.y * __expf(b.x - top));
}

// Where the sequence stands: read before the dependency wait, for it was written by an earlier step.
struct Place {
  int pos, step, rows;
};
DEVICE Place place(const int* state) { return {ld_i32(state + ST_POS), ld_i32(state + ST_STEP), ld_i32(state + ST_SEQ_LEN)}; }

// Make `token` the input of the next step and tell the host.
__device__ void finish(const SampleArgs& a, Place at, int token, float logprob) {
  const int pos = at.pos + 1;
  // One aligned store of 16 bytes reaches the host as a whole, so that no fence (a round trip to its memory) is needed.
  HostToken* entry = a.host_ring + at.step % a.host_cap;
  asm volatile("st.volatile.global.v4.s32 [%0], {%1,%2,%3,%4};" ::"l"(entry), "r"(token), "r"(__float_as_int(logprob)), "r"(pos), "r"(at.step + 1) : "memory");
  advance_state(a.state, at.rows, max(token, 0), pos);
  a.state[ST_STEP] = at.step + 1;
  a.history[pos % a.history_cap] = token;
}

extern "C" __global__ void __launch_bounds__(256, 1) sample_max(const __grid_constant__ SampleArgs a) {
  pdl_trigger();
  u64 begun = 0;
  stamp_start(a.stamp, begun);
  extern __shared__ u32 recent[];  // bit per id of this block's slice: seen within the penalty's range
  __shared__ u64 warp_best[8];
  __shared__ float2 warp_sum[8];
  __shared__ u32 arrived;
  const SampleParams p = *a.params;
  const Place at = place(a.state);
  const int tid = threadIdx.x;
  const int slice = ((a.vocab + gridDim.x - 1) / gridDim.x + 31) / 32 * 32;
  const int begin = blockIdx.x * slice, end = min(begin + slice, a.vocab), last = min(end, p.n_ids);
  const bool penalise = p.penalty != 1.0f && p.penalty_range != 0;
  if (penalise) {
    for (int i = tid; i < slice / 32; i += 256) recent[i] = 0;
    __syncthreads();
    const int pos = at.pos;  // the sequence so far is positions 0..pos
    const int reach = min(min(p.penalty_range < 0 ? pos + 1 : p.penalty_range, pos + 1), a.history_cap);
    for (int i = tid; i < reach; i += 256) {
      const int id = a.history[(pos - i) % a.history_cap] - begin;
      if (id >= 0 && id < end - begin) atomicOr(&recent[id / 32], 1u << (id % 32));
    }
    __syncthreads();
  }
  pdl_wait();

  u64 best = 0;
  float2 sum = make_float2(-kInfinity, 0.0f);
  for (int base = begin + tid; base < end; base += 1024) {
    float x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = base + j * 256 < last ? ld_f32(a.logits + base + j * 256) : -kInfinity;
    float top = sum.x;
#pragma unroll
    for (int j = 0; j < 4; ++j) top = fmaxf(top, x[j]);
    if (top > -kInfinity) {
      float s = sum.y * __expf(sum.x - top);
#pragma unroll
      for (int j = 0; j < 4; ++j) s += __expf(x[j] - top);
      sum = make_float2(top, s);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int id = base + j * 256;
      if (id >= last) continue;
      float l = x[j];
      if (penalise && (recent[(id - begin) / 32] >> ((id - begin) % 32) & 1)) l = l > 0.0f ? __fdiv_rn(l, p.penalty) : l * p.penalty;
      if (a.write_adjusted) a.adjusted[id] = l;
      const u64 key = static_cast<u64>(order_key(l)) << 32 | static_cast<u32>(~id);
      best = key > best ? key : best;
    }
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    const u64 other = __shfl_xor_sync(0xffffffffu, best, d);
    best = other > best ? other : best;
    sum = fold(sum, make_float2(__shfl_xor_sync(0xffffffffu, sum.x, d), __shfl_xor_sync(0xffffffffu, sum.y, d)));
  }
  if (tid % 32 == 0) {
    warp_best[tid / 32] = best;
    warp_sum[tid / 32] = sum;
  }
  __syncthreads();
  if (tid == 0) {
#pragma unroll
    for (int w = 1; w < 8; ++w) {
      best = warp_best[w] > best ? warp_best[w] : best;
      sum = fold(sum, warp_sum[w]);
    }
    a.block_best[blockIdx.x] = best;
    a.block_sum[blockIdx.x] = sum;
    __threadfence();
    arrived = atomicInc(a.counter, gridDim.x - 1);
  }
  __syncthreads();
  if (arrived == gridDim.x - 1 && tid < 32) {
    __threadfence();
    best = 0;
    sum = make_float2(-kInfinity, 0.0f);
    for (int b = tid; b < gridDim.x; b += 32) {
      const u64 key = __ldcg(a.block_best + b);
      best = key > best ? key : best;
      sum = fold(sum, __ldcg(a.block_sum + b));
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
      const u64 other = __shfl_xor_sync(0xffffffffu, best, d);
      best = other > best ? other : best;
      sum = fold(sum, make_float2(__shfl_xor_sync(0xffffffffu, sum.x, d), __shfl_xor_sync(0xffffffffu, sum.y, d)));
    }
    if (tid == 0) {
      const float top = key_value(static_cast<u32>(best >> 32));
      const int id = static_cast<int>(~static_cast<u32>(best));
      const float log_sum = sum.x + logf(sum.y);
      if (!(fabsf(top) < kInfinity)) {
        finish(a, at, -1 - id, top);  // the host turns this into an error
      } else if (p.greedy) {
        finish(a, at, id, ld_f32(a.logits + id) - log_sum);
      }
      *a.scratch = SampleScratch{best, sum.x, log_sum};
    }
  }
  stamp_end(a.stamp, begun);
}

// Sum of `x` over the block, the same in every thread; warps in order.
template <typename T>
__device__ T block_sum(T x, T* warps) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  T total = warps[0];
  for (int w = 1; w < 32; ++w) total += warps[w];
  return total;
}

extern "C" __global__ void __launch_bounds__(1024, 1) sample_draw(const __grid_constant__ SampleArgs a) {
  pdl_trigger();
  u64 begun = 0;
  stamp_start(a.stamp, begun);
  pdl_wait();  // before reading the place: were the maximum not finite, sample_max would have moved on
  const Place at = place(a.state);
  __shared__ double warp_d[32];
  __shared__ int warp_i[32];
  __shared__ float warp_f[32];
  const SampleParams p = *a.params;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int n = min(p.n_ids, a.vocab);
  const u32 top_key = static_cast<u32>(__ldcg(&a.scratch->best) >> 32);
  const float top = key_value(top_key);
  if (!(fabsf(top) < kInfinity)) {  // sample_max has told the host
    stamp_end(a.stamp, begun);
    return;
  }
  const float* x = a.adjusted;
  auto weight = [&](float l) { return expf(__fdiv_rn(l - top, p.temperature)); };

  u32 lowest = 0;  // key of the lowest logit kept
  if (p.top_k > 0 && p.top_k < n) {
    // The largest key with at least top_k logits at or above it, bit by bit: that is the k-th largest logit.
    for (int bit = 31; bit >= 0; --bit) {
      const u32 candidate = lowest | 1u << bit;
      int count = 0;
      for (int i = tid; i < n; i += 1024) count += order_key(__ldcg(x + i)) >= candidate;
      if (block_sum(count, warp_i) >= p.top_k) lowest = candidate;
    }
  }
  if (p.top_p < 1.0) {
    double mine = 0.0;
    for (int i = tid; i < n; i += 1024) {
      const float l = __ldcg(x + i);
      if (order_key(l) >= lowest) mine += weight(l);
    }
    const double reach = p.top_p * block_sum(mine, warp_d);
    // The smallest key whose strictly greater logits weigh less than p * total: bit by bit, the largest key c such
    // that the logits at or above c still reach p * total.
    u32 key = 0;
    for (int bit = 31; bit >= 0; --bit) {
      const u32 candidate = key | 1u << bit;
      double above = 0.0;
      if (candidate <= top_key) {
        for (int i = tid; i < n; i += 1024) {
          const float l = __ldcg(x + i);
          const u32 k = order_key(l);
          if (k >= lowest && k >= candidate) above += weight(l);
        }
      }
      if (block_sum(above, warp_d) >= reach) key = candidate;
    }
    lowest = max(lowest, key);
  }
  if (p.min_p_offset > -kInfinity) lowest = max(lowest, order_key(top + p.min_p_offset));
  lowest = min(lowest, top_key);

  // Draw: every warp sums a contiguous range of ids; the range that crosses the coin is then walked in id order.
  const int range = ((n + 31) / 32 + 31) / 32 * 32;
  const int begin = warp * range, end = min(begin + range, n);
  float mine = 0.0f;
  for (int i = begin + lane; i < end; i += 32) {
    const float l = __ldcg(x + i);
    if (order_key(l) >= lowest) mine += weight(l);
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) mine += __shfl_xor_sync(0xffffffffu, mine, d);
  if (lane == 0) warp_f[warp] = mine;
  __syncthreads();
  if (warp == 0) {
    float total = 0.0f;
    for (int w = 0; w < 32; ++w) total += warp_f[w];
    u64 s = p.rng;
    s ^= s >> 12;
    s ^= s << 25;
    s ^= s >> 27;
    const u32 random = static_cast<u32>((s * 0x2545F4914F6CDD1Dull) >> 32);
    const float r = static_cast<float>(random >> 8) * (1.0f / 16777216.0f) * total;
    float before = 0.0f;
    int chosen = -1, last = -1;
    for (int w = 0; w < 32 && chosen < 0; ++w) {
      if (warp_f[w] == 0.0f) continue;
      const bool here = before + warp_f[w] > r;
      // The last range with anything in it is walked too: rounding may leave r at the very end.
      bool rest = false;
      for (int later = w + 1; later < 32; ++later) rest |= warp_f[later] != 0.0f;
      if (!here && rest) {
        before += warp_f[w];
        continue;
      }
      float running = before;
      const int w_end = min((w + 1) * range, n);
      for (int base = w * range; base < w_end && chosen < 0; base += 32) {
        const int i = base + lane;
        const float l = i < w_end ? __ldcg(x + i) : -kInfinity;
        const bool kept = i < w_end && order_key(l) >= lowest;
        float prefix = kept ? weight(l) : 0.0f;
        const u32 kept_lanes = __ballot_sync(0xffffffffu, kept);
        if (kept_lanes == 0) continue;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
          const float other = __shfl_up_sync(0xffffffffu, prefix, d);
          if (lane >= d) prefix += other;
        }
        const u32 over = __ballot_sync(0xffffffffu, kept && running + prefix > r);
        if (over) chosen = base + __ffs(over) - 1;
        last = base + 31 - __clz(kept_lanes);
        running += __shfl_sync(0xffffffffu, prefix, 31);
      }
      if (chosen < 0 && rest) before = running;  // rounding: the draw lies in a later range
    }
    if (chosen < 0) chosen = last;
    if (lane == 0) {
      a.params->rng = s;
      finish(a, at, chosen, ld_f32(a.logits + chosen) - __ldcg(&a.scratch->raw_log_sum));
    }
  }
  stamp_end(a.stamp, begun);
}
