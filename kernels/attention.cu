// Attention of one new token over the KV cache, split over the context (flash decoding), on tensor cores.
//
//   out[h] = sum_t softmax_t(q[h] . k[t]) v[t],   t over the visible positions; q comes times log2(e) / sqrt(head_dim)
//
// Layout     K and V of one layer: [n_kv_heads][seq_len][HEAD_DIM], fp16 or E5M2 bytes. q: float [n_heads][HEAD_DIM];
//            out: half, the same shape.
// Launch     32 WARPS threads; block b takes split b % splits of head group b / splits. The grid is fixed; the visible
//            length is read from device memory, so that one graph serves every position.
// Idle       blocks without work (beyond the visible length, or there to make one block a multiprocessor) keep their
//            place until the blocks of the next kernel have found theirs: a multiprocessor that is free early would
//            take two of them, another none, and the kernels behind inherit that (NOTES.md, block placement).
// Sharing    up to 8 query heads of one kv head are computed from one read of its K and V.
// Bytes      2 * visible * n_kv_heads * HEAD_DIM * itemsize: K and V are read once.
// Why mma    not for its arithmetic: for its size. A warp takes 16 positions with about 100 instructions. A version with
//            one lane a channel needed 2,000 unrolled ones, and fetching them cold cost 5-12 us a layer on an H200.
// Precision  the 16 rows of a fragment are 8 heads twice: the half-precision value and what it leaves out. Scores
//            and weights are therefore good to 2^-22, although both are operands in half.
// Shared     a ring of STAGES tiles (16 keys, 16 values) that is private to a warp: the main loop has no block barrier.
// Order      everything is added in a fixed order: tiles, warps, splits. The last block of a head group to finish (an
//            integer counter) adds the splits' partial results in split order, so two runs give the same bits.
// PDL        K and V of earlier positions were written by earlier steps, so their copies start before the dependency
//            wait. Only the row written by this step (and the two sinks once the cache rolls) is copied after it.

#include "common.cuh"
#include "mma.cuh"
#include "state.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef HEADS  // query heads that share a block, at most 8
#define HEADS 4
#endif
#ifndef KV_FP8
#define KV_FP8 0
#endif
#ifndef PIECE  // bytes of one copy: 16, or 8 or 4 where rows are not multiples of 16
#define PIECE 16
#endif
#ifndef WARPS
#define WARPS 4
#endif
#ifndef STAGES
#define STAGES 2
#endif
#ifndef SINGLE  // 1: the short form, where one block takes all positions of its heads
#define SINGLE 0
#endif

constexpr int kThreads = 32 * WARPS;
constexpr int kItem = KV_FP8 ? 1 : 2;
constexpr int kDim = (HEAD_DIM + 15) / 16 * 16;  // padded with zeros to whole fragments
constexpr int kSteps = kDim / 16;
constexpr int kRowBytes = HEAD_DIM * kItem;
constexpr int kPitch = (kDim * kItem / 16 | 1) == kDim * kItem / 16 ? kDim * kItem : kDim * kItem + 16;  // odd in 16 bytes: no bank twice
constexpr int kRowPieces = kRowBytes / PIECE;
constexpr int kTokens = 16;
constexpr int kTileBytes = kTokens * kPitch;
constexpr int kWarpBytes = STAGES * 2 * kTileBytes;
// The short form sits beside the blocks of weight kernels: with many more than 128 registers it would not fit and wait
// (E5M2 with more than 96 channels spills at 136; so does sm_86 with fp16, where no kernel waits beside another anyway).
#if SINGLE && __CUDA_ARCH__ >= 900
#define ATTENTION_BOUNDS __maxnreg__(kDim > 128 ? 255 : KV_FP8 && kDim > 96 ? 160 : 136)
#else
#define ATTENTION_BOUNDS __launch_bounds__(kThreads, 1)
#endif
static_assert(HEADS <= 8 && kRowBytes % PIECE == 0 && HEAD_DIM % 2 == 0, "heads or rows");

struct AttentionArgs {
  const float* q;      // [n_heads][HEAD_DIM]
  const u8* k;         // this layer's keys
  const u8* v;         // this layer's values
  __half* out;         // [n_heads][HEAD_DIM]
  float* partial;      // [n_heads][splits][HEAD_DIM]
  float2* partial_ml;  // [n_heads][splits]: maximum in log2 units, sum
  u32* counters;       // [groups], zero between launches
  const int* state;
  u64* stamp;
  int seq_len;         // rows of one kv head
  int heads_per_kv;    // n_heads / n_kv_heads
  int groups_per_kv;   // ceil(heads_per_kv / HEADS)
  int window;          // sliding window in positions, 0 = none
  int single;          // up to so many positions one block is faster than several and adding their results
  int min_chunk;       // beyond, fewest positions of a block
  int splits;          // blocks a head group has
  int groups;          // n_kv_heads * groups_per_kv
  int hold_ns;         // how long an idle block stays once the kernel before is done
};

// One ldmatrix of E5M2 takes two fragments. Where a row has but one left, the other half of the lanes take it too: behind
// the row may lie a tile that is still being copied.
DEVICE constexpr bool is_last_of_odd(int d) { return KV_FP8 && d + 1 == kSteps; }

// Two channels of q as half, and what half leaves out.
DEVICE void split_pair(float x, float y, u32& high, u32& low) {
  const __half2 h = __floats2half2_rn(x, y);
  const float2 back = __half22float2(h);
  high = *reinterpret_cast<const u32*>(&h);
  low = pack_half2(x - back.x, y - back.y);
}

extern "C" __global__ void ATTENTION_BOUNDS attention(const __grid_constant__ AttentionArgs a) {
  extern __shared__ __align__(16) u8 ring[];
  pdl_trigger();
  u64 begun = 0;
  stamp_start(a.stamp, begun);

  // The state was written before this graph began, so it can be read before the wait.
  const int len = ld_i32(a.state + ST_LEN), fresh = ld_i32(a.state + ST_SLOT), sinks = ld_i32(a.state + ST_SINKS);
  const int first = a.window > 0 && len > a.window ? len - a.window : 0;
  const int visible = len - first;
  // Not rounded to whole tiles: every block should have work, for one that leaves at once unbalances what follows.
  const int chunk = SINGLE || visible <= a.single ? visible : max((visible + a.splits - 1) / a.splits, a.min_chunk);
  const int active = SINGLE ? 1 : (visible + chunk - 1) / chunk;
  const int head_group = SINGLE ? blockIdx.x : blockIdx.x / a.splits, split = SINGLE ? 0 : blockIdx.x - head_group * a.splits;
#ifdef K_SMID  // diagnosis of block placement: stamp then points to one int a block
  if (threadIdx.x == 0) {
    int sm;
    asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
    reinterpret_cast<int*>(a.stamp)[blockIdx.x] = sm;
  }
#endif
  if (head_group >= a.groups || split >= active) {
    if (threadIdx.x == 0 && a.hold_ns > 0) {
      pdl_wait();
      const u64 until = global_timer() + a.hold_ns;
      while (global_timer() < until) __nanosleep(64);
    }
    return;
  }
  const int begin = first + split * chunk, end = min(begin + chunk, len);

  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, quad = lane % 4;
  const int kv_head = head_group / a.groups_per_kv, group = head_group % a.groups_per_kv;
  const int head0 = kv_head * a.heads_per_kv + group * HEADS;
  const int heads = min(HEADS, a.heads_per_kv - group * HEADS);
  const long long head_offset = static_cast<long long>(kv_head) * a.seq_len * kRowBytes;
  const u8* k = a.k + head_offset;
  const u8* v = a.v + head_offset;
  u8* my_ring = ring + warp * kWarpBytes;
  const u32 ring_addr = smem_addr(my_ring);
  const int tiles = (end - begin + kTokens - 1) / kTokens;
  const int mine = tiles > warp ? (tiles - warp + WARPS - 1) / WARPS : 0;  // tiles warp, warp + WARPS, ...

  if constexpr (HEAD_DIM % 16 != 0) {  // the padding is never copied, and must be zero
    constexpr int kPadding = (kDim * kItem - kRowBytes) / 4;
    for (int i = lane; i < STAGES * 2 * kTokens * kPadding; i += 32) {
      *reinterpret_cast<u32*>(my_ring + i / kPadding * kPitch + kRowBytes + i % kPadding * 4) = 0;
    }
    __syncwarp();
  }
  // Keys and values of this warp's tile i, rows below `limit`; the rest of the tile becomes zero (and is not read), but
  // position `skip` is left alone.
  auto copy_tile = [&](int i, int limit, int skip) {
    if (i < mine) {
      const int t0 = begin + (warp + i * WARPS) * kTokens;
      const u32 to = ring_addr + i % STAGES * (2 * kTileBytes);
      constexpr int kRows = 32 / kRowPieces;  // a warp's copies of one instruction
      if constexpr (32 % kRowPieces == 0 && kRows <= kTokens) {
        const int t = t0 + lane / kRowPieces, c = lane % kRowPieces * PIECE;
        const u32 at = to + lane / kRowPieces * kPitch + c;
        const long long from = static_cast<long long>(t) * kRowBytes + c;
        const u8 *from_k = k + from, *from_v = v + from;
#pragma unroll
        for (int r = 0; r < kTokens; r += kRows) {
          const bool valid = t + r < limit;
          if (t + r != skip) {
            cp_async_or_zero<PIECE>(at + r * kPitch, from_k + r * kRowBytes, valid);
            cp_async_or_zero<PIECE>(at + kTileBytes + r * kPitch, from_v + r * kRowBytes, valid);
          }
        }
      } else {
#pragma unroll 1
        for (int p = lane; p < kTokens * kRowPieces; p += 32) {
          const int r = p / kRowPieces, c = p % kRowPieces * PIECE;
          if (t0 + r == skip) continue;
          const long long from = static_cast<long long>(t0 + r) * kRowBytes + c;
          cp_async_or_zero<PIECE>(to + r * kPitch + c, k + from, t0 + r < limit);
          cp_async_or_zero<PIECE>(to + kTileBytes + r * kPitch + c, v + from, t0 + r < limit);
        }
      }
    }
    cp_async_commit();
  };
  // Before the wait: everything but the newest row. Once the cache rolls, that row and the sinks lie anywhere: then
  // nothing is copied early.
#pragma unroll 1
  for (int i = 0; i < STAGES; ++i) copy_tile(i, sinks ? 0 : min(end, fresh), sinks || fresh >= end ? -1 : fresh);

  pdl_wait();

  bool late = false;  // the newest row is on its way to this warp
  {
    if (sinks) {
      cp_async_wait<0>();  // the zero fills must have landed first
      __syncwarp();
#pragma unroll 1
      for (int i = 0; i < STAGES; ++i) copy_tile(i, end, -1);
    } else {
      const int behind = fresh - begin, tile = behind / kTokens, i = tile / WARPS;
      if (behind >= 0 && fresh < end && tile % WARPS == warp && i < STAGES) {
        const u32 to = ring_addr + i * (2 * kTileBytes) + behind % kTokens * kPitch;
#pragma unroll 1
        for (int p = lane; p < 2 * kRowPieces; p += 32) {
          const int c = p % kRowPieces * PIECE;
          cp_async_or_zero<PIECE>(to + (p < kRowPieces ? 0 : kTileBytes) + c, (p < kRowPieces ? k : v) + static_cast<long long>(fresh) * kRowBytes + c, true);
        }
        cp_async_commit();
        late = true;
      }
    }
  }
  // q as fragments: row h is head h in half, row h + 8 what half leaves out. E5M2 tiles come in another order of channels
  // (four neighbours a lane), which q follows.
  __shared__ __align__(16) __half staged[16][kDim + 8];
  constexpr int kPairs = 8 * (kDim / 2), kMine = (kPairs + kThreads - 1) / kThreads;
  float2 pair[kMine];  // all loads before the first use: one round trip to L2
#pragma unroll
  for (int j = 0; j < kMine; ++j) {
    const int i = tid + j * kThreads, h = i / (kDim / 2), c = i % (kDim / 2) * 2;
    pair[j] = make_float2(0.0f, 0.0f);
    if (h < heads && c < HEAD_DIM) pair[j] = ld_f2(a.q + (head0 + h) * HEAD_DIM + c);
  }
#pragma unroll
  for (int j = 0; j < kMine; ++j) {
    const int i = tid + j * kThreads, h = i / (kDim / 2), c = i % (kDim / 2) * 2;
    const int at = KV_FP8 ? c / 16 * 16 + c % 16 / 4 * 2 + c % 4 / 2 * 8 : c;
    if (kPairs % kThreads != 0 && i >= kPairs) break;
    u32 high, low;
    split_pair(pair[j].x, pair[j].y, high, low);
    *reinterpret_cast<u32*>(&staged[h][at]) = high;
    *reinterpret_cast<u32*>(&staged[h + 8][at]) = low;
  }
  if (late) cp_async_wait<0>();
  __syncthreads();
  u32 q[kSteps][4];
#pragma unroll
  for (int d = 0; d < kSteps; ++d) ldmatrix4(q[d], smem_addr(&staged[lane % 16][d * 16 + lane / 16 * 8]));

  float acc[2 * kSteps][4], m = -1e30f, l = 0.0f;  // finite, so that a warp without positions makes no NaN
#pragma unroll
  for (int d = 0; d < 2 * kSteps; ++d) acc[d][0] = acc[d][1] = acc[d][2] = acc[d][3] = 0.0f;

#pragma unroll 1
  for (int i = 0; i < mine; ++i) {
    cp_async_wait<STAGES - 1>();
    __syncwarp();
    const u32 tile = ring_addr + i % STAGES * (2 * kTileBytes);
    const u32 key = tile + (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 16;
    const u32 value = tile + kTileBytes + lane % 16 * kPitch + lane / 16 * 16;
    float s[2][4] = {};
#pragma unroll
    for (int d = 0; d < kSteps; d += KV_FP8 ? 2 : 1) {
      u32 b[4];
      ldmatrix4(b, key + d * 16 * kItem - (is_last_of_odd(d) ? lane / 8 % 2 * 16 : 0));
#if KV_FP8
      mma(s[0], q[d], __byte_perm(b[0], 0, 0x1404), __byte_perm(b[0], 0, 0x3424));
      mma(s[1], q[d], __byte_perm(b[2], 0, 0x1404), __byte_perm(b[2], 0, 0x3424));
      if (d + 1 < kSteps) {
        mma(s[0], q[d + 1], __byte_perm(b[1], 0, 0x1404), __byte_perm(b[1], 0, 0x3424));
        mma(s[1], q[d + 1], __byte_perm(b[3], 0, 0x1404), __byte_perm(b[3], 0, 0x3424));
      }
#else
      mma(s[0], q[d], b[0], b[1]);
      mma(s[1], q[d], b[2], b[3]);
#endif
    }
    // This lane's head is lane / 4; its positions are 2 quad, + 1, + 8, + 9 of the tile.
    const int t = begin + (warp + i * WARPS) * kTokens + 2 * quad;
    float p[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) p[j] = t + j / 2 * 8 + j % 2 < end ? s[j / 2][j % 2] + s[j / 2][j % 2 + 2] : -kInfinity;
    float top = fmaxf(fmaxf(fmaxf(p[0], p[1]), fmaxf(p[2], p[3])), m);
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    const float shrink = exp2_fast(m - top);
    m = top;
#pragma unroll
    for (int j = 0; j < 4; ++j) p[j] = exp2_fast(p[j] - top);
    l = l * shrink + ((p[0] + p[1]) + (p[2] + p[3]));
    if (__any_sync(0xffffffffu, shrink != 1.0f)) {
#pragma unroll
      for (int d = 0; d < 2 * kSteps; ++d) {
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[d][j] *= shrink;
      }
    }
    u32 w[4];
    split_pair(p[0], p[1], w[0], w[1]);
    split_pair(p[2], p[3], w[2], w[3]);
#pragma unroll
    for (int d = 0; d < kSteps; d += KV_FP8 ? 2 : 1) {
      u32 b[4];
      ldmatrix4_trans(b, value + d * 16 * kItem - (is_last_of_odd(d) ? lane / 16 * 16 : 0));
#if KV_FP8
      // A 16-bit column is two channels: the even ones make one fragment, the odd ones another.
      mma(acc[2 * d], w, __byte_perm(b[0], 0, 0x2404), __byte_perm(b[1], 0, 0x2404));
      mma(acc[2 * d + 1], w, __byte_perm(b[0], 0, 0x3414), __byte_perm(b[1], 0, 0x3414));
      if (d + 1 < kSteps) {
        mma(acc[2 * d + 2], w, __byte_perm(b[2], 0, 0x2404), __byte_perm(b[3], 0, 0x2404));
        mma(acc[2 * d + 3], w, __byte_perm(b[2], 0, 0x3414), __byte_perm(b[3], 0, 0x3414));
      }
#else
      mma(acc[2 * d], w, b[0], b[1]);
      mma(acc[2 * d + 1], w, b[2], b[3]);
#endif
    }
    __syncwarp();
    copy_tile(i + STAGES, end, -1);
  }
  cp_async_wait<0>();
  __syncwarp();

  // This warp's result into its own part of the ring, then all warps' together.
  __shared__ float warp_m[8][WARPS], warp_l[8][WARPS];
  __shared__ u32 arrived;
  l += __shfl_xor_sync(0xffffffffu, l, 1);
  l += __shfl_xor_sync(0xffffffffu, l, 2);
  if (quad == 0) {
    warp_m[lane / 4][warp] = m;
    warp_l[lane / 4][warp] = l;
  }
  if (mine > 0 && lane / 4 < heads) {
    float* mine_out = reinterpret_cast<float*>(my_ring) + lane / 4 * kDim;
#pragma unroll
    for (int d = 0; d < kSteps; ++d) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float x = acc[2 * d + j][0] + acc[2 * d + j][2], y = acc[2 * d + j][1] + acc[2 * d + j][3];
        if (KV_FP8) {
          mine_out[d * 16 + quad * 4 + j] = x;
          mine_out[d * 16 + quad * 4 + 2 + j] = y;
        } else {
          *reinterpret_cast<float2*>(mine_out + d * 16 + j * 8 + quad * 2) = make_float2(x, y);
        }
      }
    }
  }
  __syncthreads();
  const int splits = a.splits;
#pragma unroll 1
  for (int i = tid; i < heads * (HEAD_DIM / 2); i += kThreads) {
    const int h = i / (HEAD_DIM / 2), c = i % (HEAD_DIM / 2) * 2;
    float top = warp_m[h][0], total = 0.0f;
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int w = 1; w < WARPS; ++w) top = fmaxf(top, warp_m[h][w]);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      if (w >= tiles) break;  // a warp without positions has left nothing
      const float weight = exp2_fast(warp_m[h][w] - top);
      const float2 x = *reinterpret_cast<const float2*>(ring + w * kWarpBytes + (h * kDim + c) * 4);
      total = fmaf(warp_l[h][w], weight, total);
      sum.x = fmaf(x.x, weight, sum.x);
      sum.y = fmaf(x.y, weight, sum.y);
    }
    if (active == 1) {
      *reinterpret_cast<u32*>(a.out + (head0 + h) * HEAD_DIM + c) = pack_half2(sum.x / total, sum.y / total);
    } else {
      *reinterpret_cast<float2*>(a.partial + (static_cast<long long>(head0 + h) * splits + split) * HEAD_DIM + c) = sum;
      if (c == 0) a.partial_ml[(head0 + h) * splits + split] = make_float2(top, total);
    }
  }
  if (active > 1) {
    // The last block of this head group to get here adds all splits, in split order.
    __threadfence();
    __syncthreads();
    if (tid == 0) arrived = atomicInc(&a.counters[head_group], active - 1);
    __syncthreads();
    if (arrived == active - 1) {
      __threadfence();
      constexpr int kVector = HEAD_DIM % 4 == 0 ? 4 : 2, kBatch = 16;
      float* weight = reinterpret_cast<float*>(ring);  // [heads][padded]
      const int padded = (active + kBatch - 1) / kBatch * kBatch;
      const int pieces = heads * HEAD_DIM / kVector;
      // One round trip to L2: the first splits' results are asked for together with all maxima and sums. Everything is
      // then added in split order.
#pragma unroll 1
      for (int i0 = 0; i0 < pieces; i0 += kThreads) {
        const int i = min(i0 + tid, pieces - 1), h = i * kVector / HEAD_DIM, c = i * kVector % HEAD_DIM;
        const float* part = a.partial + static_cast<long long>(head0 + h) * splits * HEAD_DIM + c;
        float sum[kVector] = {};
#pragma unroll 1
        for (int p0 = 0; p0 < active; p0 += kBatch) {
          float x[kBatch][kVector];
#pragma unroll
          for (int j = 0; j < kBatch; ++j) {
            if constexpr (kVector == 4) {
              float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
              if (p0 + j < active) y = __ldcg(reinterpret_cast<const float4*>(part + (p0 + j) * HEAD_DIM));
              x[j][0] = y.x, x[j][1] = y.y, x[j][2] = y.z, x[j][3] = y.w;
            } else {
              float2 y = make_float2(0.0f, 0.0f);
              if (p0 + j < active) y = __ldcg(reinterpret_cast<const float2*>(part + (p0 + j) * HEAD_DIM));
              x[j][0] = y.x, x[j][1] = y.y;
            }
          }
          if (i0 == 0 && p0 == 0) {
#pragma unroll 1
            for (int g = warp; g < heads; g += WARPS) {
              const float2* ml = a.partial_ml + (head0 + g) * splits;
              float2 one = lane < active ? __ldcg(ml + lane) : make_float2(-kInfinity, 0.0f);
              float top = one.x, total = 0.0f;
              for (int p = lane + 32; p < active; p += 32) top = fmaxf(top, __ldcg(&ml[p].x));
#pragma unroll
              for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
              for (int p = lane; p < padded; p += 32) {
                if (p >= 32) one = p < active ? __ldcg(ml + p) : make_float2(-kInfinity, 0.0f);
                const float w = exp2_fast(one.x - top);  // 0 in the padding
                weight[g * padded + p] = w;
                total = fmaf(one.y, w, total);
              }
#pragma unroll
              for (int d = 16; d > 0; d /= 2) total += __shfl_xor_sync(0xffffffffu, total, d);
              if (lane == 0) warp_l[g][0] = 1.0f / total;
            }
            __syncthreads();
          }
#pragma unroll
          for (int j = 0; j < kBatch; ++j) {
            const float w = weight[h * padded + p0 + j];
#pragma unroll
            for (int n = 0; n < kVector; ++n) sum[n] = fmaf(x[j][n], w, sum[n]);
          }
        }
        if (i0 + tid < pieces) {
#pragma unroll
          for (int n = 0; n < kVector; n += 2) {
            *reinterpret_cast<u32*>(a.out + (head0 + h) * HEAD_DIM + c + n) = pack_half2(sum[n] * warp_l[h][0], sum[n + 1] * warp_l[h][0]);
          }
        }
      }
    }
  }
  stamp_end(a.stamp, begun);
}
