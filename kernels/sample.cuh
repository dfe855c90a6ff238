// What the kernels that choose a token share: their arguments, ordered keys, the penalty, the maximum of a block.
//
// Layout     logits: float32 [vocab], readable up to the next multiple of 4
// Order      maxima are compared as 64-bit keys (value, then lowest id); sums run in a fixed order or are integers
// Hand-over  the chosen token goes to the step state (the next step reads it there), to the history and to a ring in pinned
//            host memory, whose entry is there once its `step` field says so
#pragma once
#include "order.cuh"
#include "state.cuh"
#include "sync.cuh"

struct SampleParams {        // in device memory: one graph serves every setting
  float temperature;
  float penalty;
  float min_p_offset;        // ln(min_p) * temperature, or -inf
  int top_k;
  double top_p;
  int n_ids;                 // ids that may be chosen
  int penalty_range;         // tokens the penalty looks back at, -1 = all, 0 = none
  u64 rng;                   // xorshift64* state
};

constexpr int MOST_BLOCKS = 64, BINS = 2048;

struct SampleScratch {       // zeros before the first launch
  u64 bins[BINS];            // zeros between launches
  u64 block_best[MOST_BLOCKS];
  float2 block_sum[MOST_BLOCKS];  // raw maximum and sum of exp(l - maximum)
  u64 kept[MOST_BLOCKS];     // weight that each block surely keeps
  int listed[MOST_BLOCKS];   // logits that each block leaves to the last one
  u32 counter;               // sample_max's, back at 0 after each launch
  u32 arrivals;              // sample_draw's
  int padding[2];
};
static_assert(sizeof(SampleScratch) == 18192, "SAMPLE_SCRATCH_BYTES of calmnb/engine/cuda_ops.py");

struct HostToken {           // one entry of the ring in pinned host memory
  int token;
  float logprob;
  int pos;                   // position the token will stand at
  int step;                  // 1 + number of tokens sampled before it
};

struct SampleArgs {
  const float* logits;
  const float4* best;        // [n_best] of the logits kernel's blocks: maximum, its index as int bits, sum of exp(l - maximum)
  float* adjusted;           // [vocab] logits after the penalty, where there is one
  float* candidates;         // [vocab] a block's doubtful logits, from its first id on
  SampleScratch* scratch;
  SampleParams* params;
  int* state;
  int* history;              // [history_cap], token at position p in history[p % history_cap]
  HostToken* host_ring;      // [host_cap]
  int vocab, n_best, history_cap, host_cap;
  int rehearse;              // sample_max: run once on nothing before the wait, so that the instructions are at hand
  u64* stamp;
};

extern __shared__ __align__(16) u8 shared[];
#define NOINLINE __device__ __noinline__

// Whether the logits kernel has seen just what may be chosen, so that its maxima hold.
DEVICE bool is_penalised(const SampleParams& p) { return p.penalty != 1.0f && p.penalty_range != 0; }
DEVICE bool is_plain(const SampleArgs& a, const SampleParams& p) { return a.n_best > 0 && p.n_ids >= a.vocab && !is_penalised(p); }

// Ids a block looks at: a multiple of 32, so that the penalty's bits and groups of 4 divide it.
DEVICE int slice_of(const SampleArgs& a) { return (a.vocab / gridDim.x / 32 + 1) * 32; }

// Where the sequence stands: read before the dependency wait, for it was written by an earlier step's graph.
struct Place {
  int pos, step, rows;
};
DEVICE Place place(const int* state) { return {ld_i32(state + ST_POS), ld_i32(state + ST_STEP), ld_i32(state + ST_SEQ_LEN)}; }

// Make `token` the input of the next step and tell the host. One thread of the grid.
NOINLINE void finish(const SampleArgs& a, Place at, int token, float logprob) {
  const int pos = at.pos + 1;
  store_to_host(a.host_ring + at.step % a.host_cap, token, __float_as_int(logprob), pos, at.step + 1);
  advance_state(a.state, at.rows, max(token, 0), pos);
  a.state[ST_STEP] = at.step + 1;
  a.history[pos % a.history_cap] = token;
}

// Bit per id of a slice: seen within the penalty's range. Before the dependency wait; all threads.
DEVICE void mark_recent(const SampleArgs& a, const SampleParams& p, int pos, int begin, int slice, u32* recent) {
  for (int i = threadIdx.x; i < slice / 32; i += blockDim.x) recent[i] = 0;
  __syncthreads();
  // The sequence so far is positions 0..pos.
  const int reach = min(p.penalty_range < 0 ? pos + 1 : min(p.penalty_range, pos + 1), a.history_cap);
  for (int i = threadIdx.x; i < reach; i += blockDim.x) {
    const int id = ld_i32(a.history + (pos - i) % a.history_cap) - begin;
    if (id >= 0 && id < slice) atomicOr(&recent[id / 32], 1u << (id % 32));
  }
  __syncthreads();
}
DEVICE float penalised(float l, float penalty) { return l > 0.0f ? __fdiv_rn(l, penalty) : l * penalty; }

// The first maximum of a set of logits after the penalty, and the exp-sum of the raw ones.
struct Top {
  u64 best;
  float most, sum;           // raw maximum, sum of exp(l - maximum)
};
DEVICE float rescaled(float sum, float from, float to) { return to > -kInfinity ? sum * __expf(from - to) : sum; }
DEVICE float log_probability(const Top& t, float raw) { return (raw - t.most) - logf(t.sum); }
DEVICE Top no_top() { return {0, -kInfinity, 0.0f}; }
DEVICE void fold(Top& t, const Top& o) {
  const float most = fmaxf(t.most, o.most);
  t = {t.best > o.best ? t.best : o.best, most, rescaled(t.sum, t.most, most) + rescaled(o.sum, o.most, most)};
}
// Over a block of WARPS warps, the same in every thread. `warps` is [WARPS] in shared memory; a barrier must stand between two
// calls. Not inlined, as all that stands in several places: instructions are paid for at every launch.
template <int WARPS> NOINLINE Top block_top(Top t, Top* warps) {
#pragma unroll 1
  for (int level = 0; level < 2; ++level) {
    float most = t.most;
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
      const u64 other = __shfl_xor_sync(~0u, t.best, d);
      t.best = other > t.best ? other : t.best;
      most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
    }
    t.sum = rescaled(t.sum, t.most, most);
    t.most = most;
#pragma unroll
    for (int d = 16; d > 0; d /= 2) t.sum += __shfl_xor_sync(~0u, t.sum, d);
    if (level == 1) break;
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = t;
    __syncthreads();
    t = threadIdx.x % 32 < WARPS ? warps[threadIdx.x % 32] : no_top();
  }
  return t;
}

// What the logits kernel found: one entry a block of it. After the dependency wait.
DEVICE Top logits_top(const SampleArgs& a, int n_best) {
  Top t = no_top();
#pragma unroll 1
  for (int i = threadIdx.x; i < n_best; i += blockDim.x) {
    const float4 e = ld_f4(reinterpret_cast<const float*>(a.best + i));
    fold(t, Top{best_key(e.x, __float_as_int(e.y)), e.x, e.z});
  }
  return t;
}
// Whether a logit is not what a logit can be. Keys show it; of the logits kernel's maxima a NaN is none, but it spoils the sum.
DEVICE bool is_broken(const Top& t, bool by_sum) { return !(fabsf(best_value(t.best)) < kInfinity) || (by_sum && t.sum != t.sum); }

// The first NaN, or else the first maximum, of all that may be chosen, where a logit is not finite. One block.
template <int WARPS> NOINLINE void report_broken(const SampleArgs& a, const SampleParams& p, Place at, const float* x, Top* warps) {
  Top t = no_top();
  const int n = min(p.n_ids, a.vocab);
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    const u64 key = best_key(ld_f32(x + i), i);
    t.best = key > t.best ? key : t.best;
  }
  __syncthreads();
  t = block_top<WARPS>(t, warps);
  if (threadIdx.x == 0) finish(a, at, -1 - best_id(t.best), best_value(t.best));  // the host turns this into an error
}
