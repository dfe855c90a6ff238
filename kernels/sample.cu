// Choosing the most likely token on the device, so that decoding never waits for the host.
//
// Maths   first maximum of the logits after the repetition penalty; log-probability l - log(sum exp)
// Launch  grid up to MOST_BLOCKS x 256; dynamic shared memory: a bit per id of a slice
//
// Without a penalty and where every row is an id, the logits kernel has the maxima and exp-sums of its blocks: block 0
// folds them and the others leave at once. Else a block takes a slice of the ids, and the last to finish folds the slices.
#include "sample.cuh"

constexpr int MAX_WARPS = 8;

DEVICE void choose(const SampleArgs& a, Place at, const Top& t) {
  const float top = best_value(t.best);
  const int id = best_id(t.best);
  if (!(fabsf(top) < kInfinity)) {
    finish(a, at, -1 - id, top);  // the host turns this into an error
  } else {
    finish(a, at, id, log_probability(t, ld_f32(a.logits + id)));
  }
}

extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS, 1) sample_max(const __grid_constant__ SampleArgs a) {
  pdl_trigger();
  u64 begun = 0;
  stamp_start(a.stamp, begun);
  __shared__ Top warps[MAX_WARPS];
  __shared__ u32 arrived;
  u32* const recent = reinterpret_cast<u32*>(shared);
  const SampleParams p = *a.params;
  const Place at = place(a.state);
  const int tid = threadIdx.x;
  if (is_plain(a, p)) {
    if (blockIdx.x != 0) return;
#pragma unroll 1
    for (int pass = a.rehearse ? 0 : 1; pass < 2; ++pass) {
      int real = pass;
      asm volatile("" : "+r"(real));  // one code for both
      if (real) pdl_wait();
      const Top t = block_top<MAX_WARPS>(logits_top(a, real ? a.n_best : 0), warps);
      if (!real) {
        __syncthreads();
      } else if (is_broken(t, true)) {
        report_broken<MAX_WARPS>(a, p, at, a.logits, warps);
      } else if (tid == 0) {
        finish(a, at, best_id(t.best), -logf(t.sum));
      }
    }
    stamp_end(a.stamp, begun);
    return;
  }
  const int slice = slice_of(a), begin = blockIdx.x * slice;
  const int count = min(slice, min(p.n_ids, a.vocab) - begin);
  const bool penalise = is_penalised(p);
  if (penalise) mark_recent(a, p, at.pos, begin, slice, recent);
  pdl_wait();

  Top t = no_top();
  for (int i = 4 * tid; i < count; i += 4 * blockDim.x) {
    const float4 v = ld_f4(a.logits + begin + i);
    const float x[4] = {v.x, i + 1 < count ? v.y : -kInfinity, i + 2 < count ? v.z : -kInfinity, i + 3 < count ? v.w : -kInfinity};
    Top four = {0, fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])), 0.0f};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (x[j] > -kInfinity) four.sum += __expf(x[j] - four.most);
      if (i + j >= count) continue;
      const bool seen = penalise && (recent[i / 32] >> (i % 32 + j) & 1);
      const u64 key = best_key(seen ? penalised(x[j], p.penalty) : x[j], begin + i + j);
      four.best = key > four.best ? key : four.best;
    }
    fold(t, four);
  }
  t = block_top<MAX_WARPS>(t, warps);
  SampleScratch* const scratch = a.scratch;
  if (tid == 0) {
    scratch->block_best[blockIdx.x] = t.best;
    scratch->block_sum[blockIdx.x] = make_float2(t.most, t.sum);
    __threadfence();
    arrived = atomicInc(&scratch->counter, gridDim.x - 1);
  }
  __syncthreads();
  if (arrived == gridDim.x - 1) {
    __threadfence();
    t = no_top();
    if (tid < gridDim.x) {
      const float2 sum = __ldcg(&scratch->block_sum[tid]);
      t = Top{__ldcg(&scratch->block_best[tid]), sum.x, sum.y};
    }
    t = block_top<MAX_WARPS>(t, warps);
    if (tid == 0) choose(a, at, t);
  }
  stamp_end(a.stamp, begun);
}
