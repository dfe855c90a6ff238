// Attention of one new token over the KV cache, split over the context (flash decoding).
//
//   out[h] = sum_t softmax_t(q[h] . k[t]) v[t],   t over the visible positions; q comes times log2(e) / sqrt(head_dim)
//
// Layout     K and V of one layer: [n_kv_heads][seq_len][HEAD_DIM], fp16 or E5M2 bytes. q: float [n_heads][HEAD_DIM];
//            out: half, the same shape.
// Launch     grid (splits, n_kv_heads * head groups), THREADS threads. The grid is fixed; the visible length is read
//            from device memory and blocks beyond it leave at once, so that one graph serves every position.
// Sharing    HEADS query heads of one kv head are computed from one read of its K and V.
// Bytes      2 * visible * n_kv_heads * HEAD_DIM * itemsize: K and V are read once.
// Shared     THREADS * 2 * STAGES * UNROLL * LANE_BYTES: a ring of cp.async copies that is private to each lane (a lane
//            reads back only what it copied), so the main loop has no block barrier. The same bytes then hold the
//            warps' partial results.
// Order      everything is added in a fixed order: lane groups, warps, splits. The last block of a head group to finish
//            (an integer counter) adds the splits' partial results in split order, so two runs give the same bits.
// PDL        K and V of earlier positions were written by earlier steps, so their copies start before the dependency
//            wait. Only the row written by this step (and the two sinks once the cache rolls) is copied after it.

#include "common.cuh"
#include "state.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef HEADS  // query heads that share a block
#define HEADS 4
#endif
#ifndef KV_FP8
#define KV_FP8 0
#endif
#ifndef LANE_BYTES  // bytes of a row that one lane holds: 16; less for fp8 with many heads (registers) and for odd rows
#define LANE_BYTES 16
#endif
#ifndef UNROLL
#define UNROLL 3
#endif
#ifndef STAGES
#define STAGES 2
#endif
#ifndef THREADS
#define THREADS 128
#endif

constexpr int kItem = KV_FP8 ? 1 : 2;
constexpr int kRowBytes = HEAD_DIM * kItem;
constexpr int kVec = LANE_BYTES / kItem;            // channels a lane holds
constexpr int kUsedLanes = kRowBytes / LANE_BYTES;  // lanes that hold a row
constexpr int kLanes = kUsedLanes <= 1 ? 1 : kUsedLanes <= 2 ? 2 : kUsedLanes <= 4 ? 4 : kUsedLanes <= 8 ? 8 : kUsedLanes <= 16 ? 16 : 32;
constexpr int kGroups = 32 / kLanes;                // positions a warp copies with one instruction
constexpr int kWarps = THREADS / 32;
constexpr int kRows = kWarps * kGroups;             // positions a block copies with one instruction
constexpr int kTile = kRows * UNROLL;               // positions of one stage of the ring
static_assert(kUsedLanes <= 32 && kRowBytes % LANE_BYTES == 0, "LANE_BYTES does not suit HEAD_DIM");

struct AttentionArgs {
  const float* q;      // [n_heads][HEAD_DIM]
  const u8* k;         // this layer's keys
  const u8* v;         // this layer's values
  __half* out;         // [n_heads][HEAD_DIM]
  float* partial;      // [n_heads][splits][HEAD_DIM]
  float2* partial_ml;  // [n_heads][splits]: maximum in log2 units, sum
  u32* counters;       // [gridDim.y], zero between launches
  const int* state;
  u64* stamp;
  int seq_len;         // rows of one kv head
  int heads_per_kv;    // n_heads / n_kv_heads
  int groups_per_kv;   // ceil(heads_per_kv / HEADS)
  int window;          // sliding window in positions, 0 = none
  int min_chunk;       // fewest positions worth a block of their own
};

DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// LANE_BYTES from global to shared memory; zeros when not `valid`.
DEVICE void copy_async(u32 dst, const void* src, bool valid) {
#if LANE_BYTES == 16
  cp_async16(dst, src, valid);
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(dst), "l"(src), "r"(valid ? LANE_BYTES : 0), "n"(LANE_BYTES) : "memory");
#endif
}

// kVec channels from shared memory, as float.
DEVICE void load_lane(const u8* p, float (&x)[kVec]) {
  u32 words[LANE_BYTES / 4];
#if LANE_BYTES == 16
  const uint4 w = *reinterpret_cast<const uint4*>(p);
  words[0] = w.x; words[1] = w.y; words[2] = w.z; words[3] = w.w;
#elif LANE_BYTES == 8
  const uint2 w = *reinterpret_cast<const uint2*>(p);
  words[0] = w.x; words[1] = w.y;
#else
  words[0] = *reinterpret_cast<const u32*>(p);
#endif
#pragma unroll
  for (int i = 0; i < LANE_BYTES / 4; ++i) {
#if KV_FP8
    // An E5M2 byte is the upper half of an fp16: put a zero below it.
    const u32 lo = __byte_perm(words[i], 0, 0x1404), hi = __byte_perm(words[i], 0, 0x3424);
    const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&lo));
    const float2 b = __half22float2(*reinterpret_cast<const __half2*>(&hi));
    x[4 * i] = a.x; x[4 * i + 1] = a.y; x[4 * i + 2] = b.x; x[4 * i + 3] = b.y;
#else
    const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
    x[2 * i] = a.x; x[2 * i + 1] = a.y;
#endif
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) attention(const __grid_constant__ AttentionArgs a) {
  extern __shared__ __align__(16) u8 ring[];
  pdl_trigger();
  u64 begun = 0;
  stamp_start(a.stamp, begun);

  // The state was written before this graph began, so it can be read before the wait.
  const int len = ld_i32(a.state + ST_LEN), fresh = ld_i32(a.state + ST_SLOT), sinks = ld_i32(a.state + ST_SINKS);
  const int first = a.window > 0 && len > a.window ? len - a.window : 0;
  const int visible = len - first;
  int chunk = (visible + gridDim.x - 1) / gridDim.x;
  chunk = max((chunk + kRows - 1) / kRows * kRows, a.min_chunk);
  const int active = (visible + chunk - 1) / chunk;
  const int split = blockIdx.x;
  if (split >= active) return;
  const int begin = first + split * chunk, end = min(begin + chunk, len);

  const int tid = threadIdx.x, lane = tid % kLanes, warp = tid / 32;
  const int row = warp * kGroups + (tid % 32) / kLanes;
  const int kv_head = blockIdx.y / a.groups_per_kv, group = blockIdx.y % a.groups_per_kv;
  const int head0 = kv_head * a.heads_per_kv + group * HEADS;
  const int heads = min(HEADS, a.heads_per_kv - group * HEADS);
  const bool lane_used = lane < kUsedLanes;
  const long long head_offset = static_cast<long long>(kv_head) * a.seq_len * kRowBytes + (lane_used ? lane * LANE_BYTES : 0);
  const u8* k = a.k + head_offset;
  const u8* v = a.v + head_offset;
  const u32 ring_addr = smem_addr(ring) + tid * LANE_BYTES;
  auto slot_of = [&](int stage, int which, int u) { return ((stage * 2 + which) * UNROLL + u) * (THREADS * LANE_BYTES); };
  auto is_fresh = [&](int t) { return t == fresh || t < sinks; };

  const int tiles = (end - begin + kTile - 1) / kTile;
  auto copy_tile = [&](int tile, int which, bool before_wait) {
    const u8* base = which ? v : k;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int t = begin + tile * kTile + u * kRows + row;
      const bool valid = t < end && lane_used && !(before_wait && is_fresh(t));
      copy_async(ring_addr + slot_of(tile % STAGES, which, u), base + static_cast<long long>(valid ? t : begin) * kRowBytes, valid);
    }
  };
#pragma unroll
  for (int s = 0; s < STAGES; ++s) {
    if (s < tiles) copy_tile(s, 0, true);
    cp_async_commit();
    if (s < tiles) copy_tile(s, 1, true);
    cp_async_commit();
  }

  pdl_wait();

  // What this step wrote, where it lies in a tile that was copied already.
  if ((fresh >= begin && fresh < min(end, begin + STAGES * kTile)) || begin < sinks) {
    bool late = false;
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        const int t = begin + s * kTile + u * kRows + row;
        if (t < end && is_fresh(t) && lane_used) {
          if (!late) cp_async_wait<0>();  // the zero fill of this place must have landed first
          late = true;
          copy_async(ring_addr + slot_of(s, 0, u), k + static_cast<long long>(t) * kRowBytes, true);
          copy_async(ring_addr + slot_of(s, 1, u), v + static_cast<long long>(t) * kRowBytes, true);
        }
      }
    }
  }
  float q[HEADS][kVec];
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    const bool used = h < heads && lane_used;
    const float* from = a.q + (head0 + (used ? h : 0)) * HEAD_DIM + (lane_used ? lane * kVec : 0);
    if constexpr (kVec % 4 == 0 && HEAD_DIM % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kVec; i += 4) {
        const float4 w = ld_f4(from + i);
        q[h][i] = used ? w.x : 0.0f; q[h][i + 1] = used ? w.y : 0.0f; q[h][i + 2] = used ? w.z : 0.0f; q[h][i + 3] = used ? w.w : 0.0f;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) q[h][i] = used ? ld_f32(from + i) : 0.0f;
    }
  }
  if ((fresh >= begin && fresh < min(end, begin + STAGES * kTile)) || begin < sinks) {
    cp_async_commit();
    cp_async_wait<0>();
  }

  float acc[HEADS][kVec], m[HEADS], l[HEADS];
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    m[h] = -1e30f;  // finite, so that a lane group without positions makes no NaN
    l[h] = 0.0f;
#pragma unroll
    for (int i = 0; i < kVec; ++i) acc[h][i] = 0.0f;
  }

  for (int tile = 0; tile < tiles; ++tile) {
    float s[UNROLL][HEADS];
    cp_async_wait<2 * STAGES - 1>();
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      float x[kVec];
      load_lane(ring + tid * LANE_BYTES + slot_of(tile % STAGES, 0, u), x);
#pragma unroll
      for (int h = 0; h < HEADS; ++h) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kVec; ++i) sum = fmaf(q[h][i], x[i], sum);
        s[u][h] = sum;
      }
    }
    if (tile + STAGES < tiles) copy_tile(tile + STAGES, 0, false);
    cp_async_commit();
#pragma unroll
    for (int d = kLanes / 2; d > 0; d /= 2) {
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
        for (int h = 0; h < HEADS; ++h) s[u][h] += __shfl_xor_sync(0xffffffffu, s[u][h], d);
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const bool valid = begin + tile * kTile + u * kRows + row < end;
#pragma unroll
      for (int h = 0; h < HEADS; ++h) s[u][h] = valid ? s[u][h] : -kInfinity;
    }
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      float top = m[h];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) top = fmaxf(top, s[u][h]);
      const float shrink = exp2_fast(m[h] - top);
      m[h] = top;
      l[h] *= shrink;
#pragma unroll
      for (int i = 0; i < kVec; ++i) acc[h][i] *= shrink;
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        s[u][h] = exp2_fast(s[u][h] - top);
        l[h] += s[u][h];
      }
    }
    cp_async_wait<2 * STAGES - 1>();
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      float x[kVec];
      load_lane(ring + tid * LANE_BYTES + slot_of(tile % STAGES, 1, u), x);
#pragma unroll
      for (int h = 0; h < HEADS; ++h) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) acc[h][i] = fmaf(s[u][h], x[i], acc[h][i]);
      }
    }
    if (tile + STAGES < tiles) copy_tile(tile + STAGES, 1, false);
    cp_async_commit();
  }
  cp_async_wait<0>();

  // Lane groups of a warp, by butterflies.
#pragma unroll
  for (int d = kLanes; d < 32; d *= 2) {
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      const float other = __shfl_xor_sync(0xffffffffu, m[h], d), top = fmaxf(m[h], other);
      const float mine = exp2_fast(m[h] - top), theirs = exp2_fast(other - top);
      m[h] = top;
      l[h] = l[h] * mine + __shfl_xor_sync(0xffffffffu, l[h], d) * theirs;
#pragma unroll
      for (int i = 0; i < kVec; ++i) acc[h][i] = acc[h][i] * mine + __shfl_xor_sync(0xffffffffu, acc[h][i], d) * theirs;
    }
  }
  // Warps, through shared memory.
  __shared__ float warp_m[HEADS][kWarps], warp_l[HEADS][kWarps];
  __shared__ u32 arrived;
  float* warp_acc = reinterpret_cast<float*>(ring);  // [kWarps][HEADS][HEAD_DIM]
  __syncthreads();                                   // every lane has read its ring
  if (tid % 32 < kUsedLanes) {
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) warp_acc[(warp * HEADS + h) * HEAD_DIM + lane * kVec + i] = acc[h][i];
    }
  }
  if (tid % 32 == 0) {
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      warp_m[h][warp] = m[h];
      warp_l[h][warp] = l[h];
    }
  }
  __syncthreads();
  const int splits = gridDim.x;
  for (int i = tid; i < heads * HEAD_DIM; i += THREADS) {
    const int h = i / HEAD_DIM, c = i % HEAD_DIM;
    float top = warp_m[h][0], total = 0.0f, sum = 0.0f;
#pragma unroll
    for (int w = 1; w < kWarps; ++w) top = fmaxf(top, warp_m[h][w]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float weight = exp2_fast(warp_m[h][w] - top);
      total = fmaf(warp_l[h][w], weight, total);
      sum = fmaf(warp_acc[(w * HEADS + h) * HEAD_DIM + c], weight, sum);
    }
    if (active == 1) {
      a.out[(head0 + h) * HEAD_DIM + c] = __float2half_rn(sum / total);
    } else {
      a.partial[(static_cast<long long>(head0 + h) * splits + split) * HEAD_DIM + c] = sum;
      if (c == 0) a.partial_ml[(head0 + h) * splits + split] = make_float2(top, total);
    }
  }
  if (active > 1) {
    // The last block of this head group to get here adds all splits, in split order.
    __threadfence();
    __syncthreads();
    if (tid == 0) arrived = atomicInc(&a.counters[blockIdx.y], active - 1);
    __syncthreads();
    if (arrived == active - 1) {
      __threadfence();
      float* weight = reinterpret_cast<float*>(ring);  // [heads][active], and as many sums behind
      float* sums = weight + heads * active;
      for (int i = tid; i < heads * active; i += THREADS) {
        const float2 one = __ldcg(a.partial_ml + (head0 + i / active) * splits + i % active);
        weight[i] = one.x;
        sums[i] = one.y;
      }
      __syncthreads();
      for (int h = warp; h < heads; h += kWarps) {
        float top = -1e30f, total = 0.0f;
        for (int p = tid % 32; p < active; p += 32) top = fmaxf(top, weight[h * active + p]);
#pragma unroll
        for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
        for (int p = tid % 32; p < active; p += 32) {
          const float w = exp2_fast(weight[h * active + p] - top);
          weight[h * active + p] = w;
          total = fmaf(sums[h * active + p], w, total);
        }
#pragma unroll
        for (int d = 16; d > 0; d /= 2) total += __shfl_xor_sync(0xffffffffu, total, d);
        if (tid % 32 == 0) warp_l[h][0] = 1.0f / total;
      }
      __syncthreads();
      // Loads first, sums in split order: many in flight, for each costs a round trip to L2.
      constexpr int kPiece = HEAD_DIM % 4 == 0 ? 4 : 1;
      for (int i = tid; i < heads * HEAD_DIM / kPiece; i += THREADS) {
        const int h = i * kPiece / HEAD_DIM, c = i * kPiece % HEAD_DIM;
        const float* part = a.partial + static_cast<long long>(head0 + h) * splits * HEAD_DIM + c;
        float sum[kPiece] = {};
#pragma unroll 16
        for (int p = 0; p < active; ++p) {
          const float w = weight[h * active + p];
          if constexpr (kPiece == 4) {
            const float4 v = __ldcg(reinterpret_cast<const float4*>(part + p * HEAD_DIM));
            sum[0] = fmaf(v.x, w, sum[0]); sum[1] = fmaf(v.y, w, sum[1]); sum[2] = fmaf(v.z, w, sum[2]); sum[3] = fmaf(v.w, w, sum[3]);
          } else {
            sum[0] = fmaf(__ldcg(part + p * HEAD_DIM), w, sum[0]);
          }
        }
#pragma unroll
        for (int j = 0; j < kPiece; ++j) a.out[(head0 + h) * HEAD_DIM + c + j] = __float2half_rn(sum[j] * warp_l[h][0]);
      }
    }
  }
  stamp_end(a.stamp, begun);
}
