// Drawing a token on the device: the thresholds and the draw of calmnb/sampler.py in one kernel of few blocks.
//
// Maths    w = exp((l - max) / T); keep l >= the k-th largest; keep w whose strictly greater ones sum to less than p * total;
//          keep l >= max + ln(min_p) T; take the first id whose running sum of kept w exceeds coin * sum
// Exact    weights are summed as integers, multiples of 2^-43: any order gives the same sum, so threads may add as they come
// Launch   grid a power of two, at most MOST_BLOCKS and the number of multiprocessors, x SAMPLE_THREADS
// Shared   DrawShared, then logits and weights of the block's slice (later of the list), then a bit per id of the slice
// Bytes    4 * vocab
//
// 1. Every block keeps its slice of the ids in shared memory. The maximum comes from the logits kernel or, with a penalty or
//    rows that are no ids, from a first round of all blocks.
// 2. For top-k or top-p: a histogram of all logits, of counts over the distance from the maximum or of weights over
//    themselves. All blocks add theirs up in memory, meet, and find the bin that holds the boundary.
// 3. Each block sums what lies surely above and lists what lies in that bin (with both rules: all down to it). The last block
//    to arrive finds the boundary in the list by finer histograms, then the slice that the coin falls into, then the id.
// Where the list is longer than LIST (equal logits, mostly), the last block takes its finer histograms over all logits: slow, but
// as exact.
#include "sample.cuh"

#ifndef SAMPLE_THREADS
#define SAMPLE_THREADS 256
#endif
#ifndef SAMPLE_LIST
#define SAMPLE_LIST 4096
#endif
constexpr int T = SAMPLE_THREADS, WARPS = T / 32, LIST = SAMPLE_LIST, EACH = BINS / T;
constexpr int BIN_BITS = 11;
static_assert(T % 32 == 0 && T >= MOST_BLOCKS && BINS % T == 0 && BINS == 1 << BIN_BITS, "threads and bins");
constexpr u32 ONE = 0x3f800000u;        // 1.0f
constexpr float FIXED = 8796093022208.0f;  // 2^43: a million weights of 1 stay below 2^63

struct DrawShared {
  u32 low[BINS], high[BINS];  // halves of 64-bit sums: shared memory has no 64-bit addition
  u64 slices[MOST_BLOCKS];
  u64 warp_sums[WARPS];
  Top tops[WARPS];
  u64 found_before;
  int found_bin;
  u32 least, most;            // of keys
  int offsets[MOST_BLOCKS + 1];
  u32 flag, listed;
  u8 owner[LIST];             // slice of a listed logit
};
static_assert(T != 256 || LIST != 4096 || sizeof(DrawShared) == 21472, "_DRAW_SHARED of calmnb/engine/cuda_ops.py");
static_assert(sizeof(DrawShared) % 16 == 0 && LIST >= 4 * T, "what follows takes 16-byte stores, 4 logits a thread");

DEVICE void add64(u32* low, u32* high, u64 v) {
  const u32 lo = static_cast<u32>(v), old = atomicAdd(low, lo);
  const u32 hi = static_cast<u32>(v >> 32) + (old + lo < lo ? 1u : 0u);
  if (hi) atomicAdd(high, hi);
}

// Sum of x over the threads before this one; `total` over all. A barrier must stand between two calls.
struct Scan {
  u64 before, total;
};
NOINLINE Scan scan(u64 x, u64* warp_sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u64 mine = x, before = 0, total = 0;
#pragma unroll 1
  for (int level = 0; level < 2; ++level) {
    u64 running = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const u64 other = __shfl_up_sync(~0u, running, d);
      if (lane >= d) running += other;
    }
    if (level == 1) {
      before += __shfl_sync(~0u, running - mine, warp);
      total = __shfl_sync(~0u, running, 31);
      break;
    }
    if (lane == 31) warp_sums[warp] = running;
    before = running - x;
    __syncthreads();
    mine = lane < WARPS ? warp_sums[lane] : 0;
  }
  return {before, total};
}

DEVICE u64 bin_sum(const DrawShared& s, int b) { return static_cast<u64>(s.high[b]) << 32 | s.low[b]; }
DEVICE void clear_bins(DrawShared& s) {
#pragma unroll 4
  for (int i = threadIdx.x; i < BINS; i += T) s.low[i] = s.high[i] = 0;
}

// The sum that has to be reached for a share p of `total`.
DEVICE u64 share(double p, u64 total) {
  const double reach = ceil(p * static_cast<double>(total));
  return reach < 1.0 ? 1 : min(static_cast<u64>(reach), total);
}

// The first bin at which the running sum of all bins reaches `reach` (0: the share p of their total, which then is returned);
// into s.found_bin, s.found_before. Barriers before and after.
NOINLINE u64 find_bin(DrawShared& s, u64 reach, double p) {
  u64 mine = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) mine += bin_sum(s, threadIdx.x * EACH + i);
  const Scan sums = scan(mine, s.warp_sums);
  if (reach == 0) reach = share(p, sums.total);
  if (sums.before < reach && sums.before + mine >= reach) {
    u64 before = sums.before;
    int b = threadIdx.x * EACH;
#pragma unroll 1
    for (;; ++b) {
      const u64 bin = bin_sum(s, b);
      if (before + bin >= reach) break;
      before += bin;
    }
    s.found_bin = b;
    s.found_before = before;
  }
  __syncthreads();
  return reach;
}

// A logit and its weight, in a list in shared memory or, where that is too long, among all.
struct Item {
  float l, w;
};
NOINLINE Item far_item(const float* x, int i, float top, float temperature) {
  const float l = ld_f32(x + i);
  return {l, expf(__fdiv_rn(l - top, temperature))};
}
struct Items {
  const float *l, *w;  // the list, or null
  const float* x;      // all logits
  float top, temperature;
  int n;
  DEVICE Item at(int i) const { return l ? Item{l[i], w[i]} : far_item(x, i, top, temperature); }
};
DEVICE u64 fixed(float w) { return static_cast<u64>(__float2ull_rn(w * FIXED)); }

// Top-k (`rule` 0): the largest key such that `reach` logits have it or a larger one. Top-p (1): the largest weight, as bits,
// such that those at or above it, of logits with keys from `lowest` on, sum to `reach`. By ever finer histograms; all must
// together reach it.
DEVICE u32 select(const Items& items, int rule, u32 lowest, u64 reach, DrawShared& s) {
  if (threadIdx.x == 0) s.least = ~0u, s.most = 0;
  __syncthreads();
  u32 least = 0, most = ~0u;
#pragma unroll 1
  for (int shift = 33; shift != 0;) {
    // The first time, the range of the keys; then the histogram of what is still in question.
    const bool is_first = shift == 33;
    if (!is_first) {
      shift = max(32 - __clz(most - least) - BIN_BITS, 0);
      clear_bins(s);
      __syncthreads();
    }
    u32 low = ~0u, high = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < items.n; i += T) {
      const Item item = items.at(i);
      const u32 order = order_key(item.l), key = rule == 0 ? order : __float_as_uint(item.w);
      if (key < least || key > most) continue;
      low = min(low, key), high = max(high, key);
      const u64 value = rule == 0 ? 1 : order >= lowest ? fixed(item.w) : 0;
      if (value && !is_first) add64(&s.low[(most - key) >> shift], &s.high[(most - key) >> shift], value);
    }
    if (is_first) {
      low = __reduce_min_sync(~0u, low), high = __reduce_max_sync(~0u, high);
      if (threadIdx.x % 32 == 0) atomicMin(&s.least, low), atomicMax(&s.most, high);
      __syncthreads();
      least = s.least, most = s.most;
      shift = 32;
      continue;
    }
    __syncthreads();
    find_bin(s, reach, 0.0);
    reach -= s.found_before;
    most -= static_cast<u32>(s.found_bin) << shift;
    const u32 width = (1u << shift) - 1;
    if (most - least > width) least = most - width;
  }
  return most;
}

DEVICE void draw(const SampleArgs& a, u64 begun) {
  DrawShared& s = *reinterpret_cast<DrawShared*>(shared);
  const int tid = threadIdx.x;
  SampleScratch& scratch = *a.scratch;
  const SampleParams p = *a.params;
  const Place at = place(a.state);
  const u32 arrivals = arrivals_at_start(&scratch.arrivals);
  const int slice = slice_of(a), begin = blockIdx.x * slice, n = min(p.n_ids, a.vocab), room = max(slice, LIST);
  float* const values = reinterpret_cast<float*>(shared + sizeof(DrawShared));
  float* const weights = values + room;
  u32* const recent = reinterpret_cast<u32*>(weights + room);
  const bool plain = is_plain(a, p), penalise = is_penalised(p);
  const bool by_count = p.top_k > 0 && p.top_k < n, by_weight = p.top_p < 1.0;
  const float* const x = penalise ? a.adjusted : a.logits;  // what the last block reads again
  if (penalise) mark_recent(a, p, at.pos, begin, slice, recent);

  const int count = min(slice, n - begin);  // may be negative
  u32 round = 0;
  clear_bins(s);
  if (tid == 0) s.listed = 0, s.found_bin = 0, s.found_before = 0;
  pdl_wait();

  // 1. The slice, and the maximum.
  Top t = no_top();
  if (plain) t = logits_top(a, a.n_best);
#pragma unroll 1
  for (int i = 4 * tid; i < count; i += 8 * T) {
    const bool both = i + 4 * T < count;
    const float4 v = ld_f4(a.logits + begin + i), w = both ? ld_f4(a.logits + begin + i + 4 * T) : v;
    *reinterpret_cast<float4*>(values + i) = v;
    if (both) *reinterpret_cast<float4*>(values + i + 4 * T) = w;
  }
  if (!plain) {
    __syncthreads();
#pragma unroll 1
    for (int i = tid; i < count; i += T) {
      float l = values[i];
      Top one = {0, l, l > -kInfinity ? 1.0f : 0.0f};
      if (penalise) {
        if (recent[i / 32] >> (i % 32) & 1) l = penalised(l, p.penalty);
        values[i] = l;
        a.adjusted[begin + i] = l;
      }
      one.best = best_key(l, begin + i);
      fold(t, one);
    }
    t = block_top<WARPS>(t, s.tops);
    if (tid == 0) {
      scratch.block_best[blockIdx.x] = t.best;
      scratch.block_sum[blockIdx.x] = make_float2(t.most, t.sum);
    }
    wait_for_all_blocks(&scratch.arrivals, arrivals, ++round);
    t = no_top();
    if (tid < gridDim.x) {
      const float2 sum = __ldcg(&scratch.block_sum[tid]);
      t = Top{__ldcg(&scratch.block_best[tid]), sum.x, sum.y};
    }
    __syncthreads();
  }
  t = block_top<WARPS>(t, s.tops);
  const float top = best_value(t.best);
  if (is_broken(t, plain)) {
    if (is_last_block(&scratch.arrivals, arrivals, ++round, &s.flag)) report_broken<WARPS>(a, p, at, x, s.tops);
    return;
  }
  Items items = {nullptr, nullptr, x, top, p.temperature, n};
  auto weight = [&](float l) { return expf(__fdiv_rn(l - top, p.temperature)); };

  // 2. The bin of the boundary. The further, the wider: 256 bins to each doubling of 1 + distance, 64 to each halving of a
  // weight.
  auto bin_of = [&](float l, float w) {
    const u32 d = by_count ? (__float_as_uint((top - l) + 1.0f) - ONE) >> 15 : (ONE - __float_as_uint(w)) >> 17;
    return static_cast<int>(min(d, static_cast<u32>(BINS - 1)));
  };
  int first = BINS, last = BINS;  // bins ahead of `first` are surely kept, from there to `last` they go to the list
  u64 before = 0;                 // in the bins ahead of `last`: logits, or weight
  u64 reach = by_count ? p.top_k : 0;
#pragma unroll 1
  for (int i = tid; i < count; i += T) {
    const float l = values[i], w = weight(l);
    weights[i] = w;
    if (by_count || by_weight) {
      const u64 v = by_count ? 1 : fixed(w);
      const int b = bin_of(l, w);
      if (v) add64(&s.low[b], &s.high[b], v);
    }
  }
  if (by_count || by_weight) {
    __syncthreads();
#pragma unroll 1
    for (int b = tid; b < BINS; b += T) {
      const u64 v = bin_sum(s, b);
      if (v) atomicAdd(&scratch.bins[b], v);
    }
    wait_for_all_blocks(&scratch.arrivals, arrivals, ++round);
    u64 bins[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) bins[i] = __ldcg(&scratch.bins[tid * EACH + i]);
#pragma unroll
    for (int i = 0; i < EACH; ++i) s.low[tid * EACH + i] = static_cast<u32>(bins[i]), s.high[tid * EACH + i] = static_cast<u32>(bins[i] >> 32);
    reach = find_bin(s, reach, p.top_p);
    last = s.found_bin, before = s.found_before;
    first = by_count && by_weight ? 0 : last;
  }

  // 3. What is surely kept, and the list.
  u32 floor = min(order_key(top + p.min_p_offset), order_key(top));
  u64 kept = 0;
#pragma unroll 1
  for (int i = tid; i < count; i += T) {
    const float l = values[i], w = weights[i];
    const int b = last < BINS ? bin_of(l, w) : 0;
    if (b < first) {
      if (order_key(l) >= floor) kept += fixed(w);
    } else if (b <= last) {
      const u32 place = atomicAdd(&s.listed, 1u);
      a.candidates[begin + place] = l;
    }
  }
  __syncthreads();
  kept = scan(kept, s.warp_sums).total;
  if (tid == 0) {
    scratch.kept[blockIdx.x] = kept;
    scratch.listed[blockIdx.x] = s.listed;
  }
  if (!is_last_block(&scratch.arrivals, arrivals, ++round, &s.flag)) return;

  // The last block. `values` and `weights` now hold the list.
  if (tid < gridDim.x) s.slices[tid] = __ldcg(&scratch.kept[tid]);
  float least = 0.0f;
  if (by_count || by_weight) {
    const Scan lists = scan(tid < gridDim.x ? __ldcg(&scratch.listed[tid]) : 0, s.warp_sums);
    if (tid < gridDim.x) s.offsets[tid] = static_cast<int>(lists.before);
    const int listed = static_cast<int>(lists.total);
    const bool in_list = listed <= LIST;
    __syncthreads();
    if (in_list) {
      items.l = values, items.w = weights, items.n = listed;
#pragma unroll 1
      for (int i = tid; i < listed; i += T) {
        int b = 0;
        for (int step = gridDim.x / 2; step > 0; step /= 2)
          if (s.offsets[b + step] <= i) b += step;
        const float l = __ldcg(a.candidates + b * slice + i - s.offsets[b]);
        values[i] = l, weights[i] = weight(l), s.owner[i] = b;
      }
    }
    for (int b = tid; b < BINS; b += T) scratch.bins[b] = 0;
    __syncthreads();
    u32 lowest = 0, lightest = 0;  // key of the lowest logit that top-k keeps, of the lightest weight that top-p keeps
#pragma unroll 1
    for (int rule = by_count ? 0 : 1; rule < (by_weight ? 2 : 1); ++rule) {
      if (in_list && by_count != by_weight) {
        reach -= before;  // the list is the boundary's bin alone
      } else if (rule == 1) {
        u64 mine = 0;
#pragma unroll 1
        for (int i = tid; i < items.n; i += T) {
          const Item item = items.at(i);
          if (order_key(item.l) >= lowest) mine += fixed(item.w);
        }
        reach = share(p.top_p, scan(mine, s.warp_sums).total);
      }
      const u32 key = select(items, rule, lowest, reach, s);
      (rule == 0 ? lowest : lightest) = key;
    }
    floor = max(floor, lowest);
    least = __uint_as_float(lightest);
    clear_bins(s);
    __syncthreads();
#pragma unroll 1
    for (int i = tid; i < items.n; i += T) {
      const Item item = items.at(i);
      const int b = in_list ? s.owner[i] : i / slice;
      if (order_key(item.l) >= floor && item.w >= least) add64(&s.low[b], &s.high[b], fixed(item.w));
    }
    __syncthreads();
    if (tid < gridDim.x) s.slices[tid] = (in_list ? s.slices[tid] : 0) + bin_sum(s, tid);
  }

  // The slice, then the id, that the coin falls on.
  u64 rng = p.rng;
  rng ^= rng >> 12;
  rng ^= rng << 25;
  rng ^= rng >> 27;
  const u64 coin = (rng * 0x2545F4914F6CDD1Dull) >> 40;  // 24 bits
  u64 mine = tid < gridDim.x ? s.slices[tid] : 0;
  Scan sums = scan(mine, s.warp_sums);
  u64 r = coin * (sums.total >> 24) + (coin * (sums.total & 0xffffff) >> 24);  // coin * total / 2^24, rounded down
  if (sums.before <= r && r < sums.before + mine) s.found_bin = tid, s.found_before = r - sums.before;
  __syncthreads();
  const int from = s.found_bin * slice, end = min(from + slice, n);
  r = s.found_before;
#pragma unroll 1
  for (int base = from; base < end; base += 4 * T) {
    const int i = base + 4 * tid;
    float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
    if (i < end) v = ld_f4(x + i);
    *reinterpret_cast<float4*>(values + 4 * tid) = v;
    mine = 0;
#pragma unroll 1
    for (int j = 0; j < 4 && i + j < end; ++j) {
      const float l = values[4 * tid + j], w = weight(l);
      weights[4 * tid + j] = order_key(l) >= floor && w >= least ? w : 0.0f;
      mine += fixed(weights[4 * tid + j]);
    }
    sums = scan(mine, s.warp_sums);
    if (sums.before <= r && r < sums.before + mine) {
      int j = 0;
      for (u64 ahead = sums.before; r >= (ahead += fixed(weights[4 * tid + j]));) ++j;
      a.params->rng = rng;
      finish(a, at, i + j, log_probability(t, ld_f32(a.logits + i + j)));
    }
    if (r < sums.total) break;
    r -= sums.total;
    __syncthreads();
  }
}

extern "C" __global__ void __maxnreg__(96) sample_draw(const __grid_constant__ SampleArgs a) {
  pdl_trigger();
  u64 begun = 0;
  stamp_start(a.stamp, begun);
  draw(a, begun);
  stamp_end(a.stamp, begun);
}
