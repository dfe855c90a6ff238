// y = W x for one token, W streamed once from memory: the shared core of every weight kernel of the decode step.
//
// Maths     y[r] = sum_k W[r, k] x[k], x = norm(residual) | attention output | FFN activation
// Layout    W row-major as in the .calm file, rows 16-byte aligned for the fast path (else WIDE)
// Launch    T threads; each block owns a contiguous range of rows, so it reads one contiguous piece of memory
// Bytes     rows * cols * bits / 8, once
//
// How it works. The columns of a row are spread over WK warps, NC chunks of 16 bytes a lane, and every row a warp group
// handles uses the SAME columns: a lane's activations stay in registers for the whole kernel. Nothing is staged in
// shared memory, and no barrier stands between the arrival of x and the first product. WK warps make a group; the
// T / 32 / WK groups of a block take its rows in turn.
// Weights come through a ring of cp.async slots private to the lane (S stages of RS rows): no barrier either, and the
// ring is filled before the dependency wait. Rows are summed over lanes RB at a time by a transposing exchange, over
// warps through shared memory, in a fixed order.
// A lane scales its own activations by a power of two before they become half operands: any finite float is safe.
//
// Mixture of experts (K_MOE): 1, gate and up: the rows are those of the chosen experts, one expert after another, and h
// is [n_active, hidden]; 2, down: one pass over the rows for each chosen expert, its weight on the sum. Every block
// chooses from the router's scores by itself, so nothing can be loaded before the wait.
//
// Compile-time keys: K_FORMAT, K_NORM, K_THREADS (T), K_WARPS_PER_ROW (WK), K_CHUNKS (NC), K_BATCH (RB), K_STAGE_ROWS (RS),
// K_STAGES (S), K_TILE (rows between two combines), K_PACE (stages in flight before the wait), K_MAX_REGISTERS,
// K_DELAY (1: copies begin after `delay` clock cycles), K_EXACT (a row is WK * 32 * NC chunks: no lane idles), K_WIDE;
// each .cu adds its own.
#pragma once
#include "order.cuh"
#include "quant.cuh"
#include "reduce.cuh"

// The arguments of every weight kernel; calmnb/engine/cuda_matvec.py mirrors it.
struct MatvecArgs {
  const u8* w0;            // qkv: rows of q, k, v one after another; gate; else the only matrix
  const u8* w1;            // up
  const __half* x16;       // input times in_scale (ACT_SCALE, or 1 for attention output)
  const float* x32;        // the same unscaled, or null: read by LayerNorm, WIDE, and where x16 overflowed
  const float* g;          // norm weight of this kernel's own norm, or null
  const float2* part;      // (sum x, sum x^2) of each block that produced x
  float* y32;
  __half* y16;             // ACT_SCALE * y32 (* g_next)
  const float* res;        // residual in; may be y32
  const float* g_next;     // weight of the norm that reads y, or null: y16 is not written
  float2* part_next;
  const float* bias;       // qkv, or null
  const float2* rope;      // (cos, sin) of this step's position, [rotary_dim / 2]
  void* kcache;            // [kv_head][seq_len][head_dim]
  void* vcache;
  const int* state;
  float4* best;            // per block: largest logit, its index as int bits, sum of exp(l - largest), 0; or null
  const float* router;     // [n_experts] router logits
  u64* stamp;
  int rows, cols, n_part, q_dim, kv_dim, head_dim, rotary_dim, seq_len, n_experts, n_active, delay;
  float eps, clip, q_scale, in_scale;
};

enum Norm { NORM_NONE = 0, NORM_RMS = 1, NORM_LAYER = 2 };

#ifndef K_WIDE
#define K_WIDE 0
#endif
#ifndef K_EXACT
#define K_EXACT 0
#endif
#ifndef K_PACE
#define K_PACE K_STAGES
#endif
#ifdef K_MAX_REGISTERS
#define BOUNDS __maxnreg__(K_MAX_REGISTERS)
#else
#define BOUNDS __launch_bounds__(K_THREADS)
#endif
#ifndef K_MOE
#define K_MOE 0
#endif
#ifndef K_DELAY
#define K_DELAY 0
#endif

constexpr int T = K_THREADS, WK = K_WARPS_PER_ROW, NC = K_CHUNKS, RB = K_BATCH, RS = K_STAGE_ROWS, S = K_STAGES, PACE = K_PACE;
constexpr bool WIDE = K_WIDE;
constexpr bool EXACT = K_EXACT;
using Q = Quant<K_FORMAT>;
DEVICE size_t row_bytes_of(int cols) { return (size_t)cols * 16 / Q::PER_CHUNK; }
constexpr int WARPS = T / 32;
constexpr int GROUPS = WARPS / WK;             // rows in flight side by side
constexpr int BATCH = GROUPS * RB;             // rows a block finishes together
constexpr int STAGES_PER_BATCH = RB / RS;
constexpr int TILE_BATCHES = (K_TILE + BATCH - 1) / BATCH;
constexpr int TILE_ROWS = TILE_BATCHES * BATCH;  // rows between two combines
constexpr int SLOT_BYTES = RS * NC * T * 16;
constexpr int RING_BYTES = WIDE ? 0 : S * SLOT_BYTES;
static_assert(WARPS % WK == 0 && RB % RS == 0, "groups and stages must divide");


extern __shared__ __align__(16) u8 shared[];
// Behind the ring: sums over lanes [2][WK][TILE_ROWS], squares [WARPS], scratch [2][WARPS], experts [2][MAX_ACTIVE].
constexpr int SUMS_BYTES = 2 * WK * TILE_ROWS * 4, MAX_ACTIVE = 64;
DEVICE float* behind_sums() { return reinterpret_cast<float*>(shared + RING_BYTES + SUMS_BYTES); }
#if K_MOE
#define expert_ids reinterpret_cast<int*>(behind_sums() + 3 * WARPS)
#define expert_weights (behind_sums() + 3 * WARPS + MAX_ACTIVE)
#endif

// Highest-scoring experts, lower index first on ties; softmax over the chosen. One warp, of which lane 0 alone writes; a barrier
// must follow. Keys differ from each other whatever the scores are, so that an id is always one of an expert.
DEVICE void choose_experts(const MatvecArgs& a, int* ids, float* weights) {
  const int lane = threadIdx.x & 31;
  u64 last = 0;
  float top = 0.f, total = 0.f;
  for (int n = 0; n < a.n_active; n++) {
    u64 best = 0;
    for (int e = lane; e < a.n_experts; e += 32) {
      const u64 key = best_key(ld_f32(a.router + e), e);
      if ((n == 0 || key < last) && key > best) best = key;
    }
#pragma unroll
    for (int d = 16; d; d >>= 1) {
      const u64 other = __shfl_xor_sync(~0u, best, d);
      best = other > best ? other : best;
    }
    last = best;
    if (n == 0) top = best_value(best);
    const float w = expf(best_value(best) - top);
    total += w;
    if (lane == 0) ids[n] = best_id(best), weights[n] = w;
  }
  if (lane == 0)
    for (int n = 0; n < a.n_active; n++) weights[n] /= total;
}

// Activations of one lane, and what undoes their scaling.
struct LaneX {
  u32 x[NC][Q::X_STRIDE];
  float undo;
};

DEVICE u32 pack_half2(float a, float b) { return as_u32(__floats2half2_rn(a, b)); }
DEVICE void wait_cycles(int n) {
  for (const u32 begin = clock_cycles(); clock_cycles() - begin < (u32)n;) {}
}
DEVICE float pow2(int e) { return __uint_as_float((u32)(127 + e) << 23); }

template <int NORM> DEVICE float4 load_x_float4(const MatvecArgs& a, const float* x32, int chunk, int i, int n_chunks, float mean) {
  float4 v = {0.f, 0.f, 0.f, 0.f};
  if (chunk < n_chunks) {
    v = ld_f4(x32 + (size_t)chunk * Q::PER_CHUNK + i);
    if (NORM != NORM_NONE) {
      const float4 g = *reinterpret_cast<const float4*>(a.g + (size_t)chunk * Q::PER_CHUNK + i);
      v = {(v.x - mean) * g.x, (v.y - mean) * g.y, (v.z - mean) * g.z, (v.w - mean) * g.w};
    }
  }
  return v;
}

// The lane's part of x from the float copy: for LayerNorm, and where a half overflowed. Rolled loops: unrolled ones
// would take registers from the whole kernel for a path that is rare (a run-time register index becomes selects).
template <int NORM> DEVICE void load_x_float(LaneX& l, const MatvecArgs& a, const float* x32, int chunk0, int n_chunks, float mean) {
  constexpr int FOURS = Q::PER_CHUNK / 4;
  float most = 0.f;
#pragma unroll 1
  for (int j = 0; j < NC * FOURS; j++) {
    const float4 v = load_x_float4<NORM>(a, x32, chunk0 + j / FOURS * WK * 32, j % FOURS * 4, n_chunks, mean);
    most = fmaxf(most, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
  }
  int e = (int)(__float_as_uint(most) >> 23) - 127;  // most in [2^e, 2^(e+1))
  e = e < -100 ? -100 : e > 124 ? 124 : e;
  const float scale = pow2(Q::X_EXPONENT - e);
  l.undo = pow2(e - Q::X_EXPONENT);
#pragma unroll 1
  for (int j = 0; j < NC * FOURS; j++) {
    const float4 v = load_x_float4<NORM>(a, x32, chunk0 + j / FOURS * WK * 32, j % FOURS * 4, n_chunks, mean);
    const u32 lo = pack_half2(v.x * scale, v.y * scale), hi = pack_half2(v.z * scale, v.w * scale);
#pragma unroll
    for (int c = 0; c < NC; c++)
#pragma unroll
      for (int i = 0; i < FOURS; i++) {
        const bool here = j == c * FOURS + i;
        l.x[c][2 * i] = here ? lo : l.x[c][2 * i], l.x[c][2 * i + 1] = here ? hi : l.x[c][2 * i + 1];
      }
  }
}

// The lane's part of x as stored: every load is issued before the first use.
DEVICE void load_x(LaneX& l, const __half* x16, int chunk0, int n_chunks) {
#pragma unroll
  for (int c = 0; c < NC; c++) {
    const int chunk = chunk0 + c * WK * 32;
#pragma unroll
    for (int i = 0; i < Q::X_REGS; i += 4) {
      uint4 v = {0, 0, 0, 0};
      if (EXACT || chunk < n_chunks) v = ld_v4(x16 + (size_t)chunk * Q::PER_CHUNK + 2 * i);
      l.x[c][i] = v.x, l.x[c][i + 1] = v.y, l.x[c][i + 2] = v.z, l.x[c][i + 3] = v.w;
    }
  }
}

// Scales what load_x read, so that the largest is below 2^(X_EXPONENT + 1): small activations keep their bits, and
// products with |w| < 256 stay finite. Then puts it in the order of Quant::dot.
template <int NORM> DEVICE void prepare_x(LaneX& l, const MatvecArgs& a, const float* x32, int chunk0, int n_chunks, float mean) {
  int late = 0;
  if (NORM == NORM_LAYER) {
    load_x_float<NORM>(l, a, x32, chunk0, n_chunks, mean);
  } else {
    __half2 most = __habs2(as_half2(l.x[0][0]));
#pragma unroll
    for (int c = 0; c < NC; c++)
#pragma unroll
      for (int i = 0; i < Q::X_REGS; i++) most = __hmax2(most, __habs2(as_half2(l.x[c][i])));
    const u16 bits = __half_as_ushort(__hmax(__low2half(most), __high2half(most)));
    if (bits >= 0x7C00 && x32 != nullptr) {  // a massive activation: take the floats (rare)
      load_x_float<NORM>(l, a, x32, chunk0, n_chunks, 0.f);
    } else {
      const int k = min(Q::X_EXPONENT + 15 - (bits >> 10), 15), now = max(k, -14);  // half has 2^-14 ... 2^15
      late = k - now;
      const u32 scale = (u32)(15 + now) << 10;
      const __half2 scale2 = as_half2(scale | scale << 16);
#pragma unroll
      for (int c = 0; c < NC; c++)
#pragma unroll
        for (int i = 0; i < Q::X_REGS; i++) l.x[c][i] = as_u32(__hmul2(as_half2(l.x[c][i]), scale2));
      l.undo = __uint_as_float(((u32)(254 - k) << 23) - __float_as_uint(a.in_scale));  // 2^-k / in_scale, both powers of 2
    }
  }
#pragma unroll
  for (int c = 0; c < NC; c++) Q::arrange(l.x[c], late);
}

// One activation as float, for the WIDE path.
template <int NORM> DEVICE float wide_x(const MatvecArgs& a, size_t i, float mean) {
  if (NORM == NORM_NONE) return a.x32 != nullptr ? ld_f32(a.x32 + i) : ld_half(a.x16 + i) / a.in_scale;
  return (ld_f32(a.x32 + i) - mean) * a.g[i];
}

// The kernel body. `Rows` says where local row r of this block's range lies and what to do with finished rows:
//   const u8* row(int r, int pass)          address of its weights (valid for r < n)
//   EVEN, size_t step()                     whether rows r and r + GROUPS always lie step() bytes apart
//   void constants()                        before pdl_wait: read what no kernel writes (bias, norm weights)
//   void begin()                            after pdl_wait, before the products: read what finish() needs
//   void finish(int r0, int n, float scale, sum)  sum(r) * scale is row r0 + r; by all threads, after a barrier
//   void end(float* scratch, int n)         once, by all threads; scratch is 2 * WARPS floats of shared memory
// `n`: rows of this block. All of T threads call.
template <int NORM, class Rows> DEVICE void matvec(const MatvecArgs& a, Rows& rows, int n) {
#ifdef K_TRACE  // diagnosis: stamp points to 7 times and the multiprocessor of each block
  u64 times[7];
#define TRACE(i) times[i] = global_timer()
#else
#define TRACE(i)
#endif
  TRACE(0);
  u64 begun = 0;
  stamp_start(a.stamp, begun);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int kw = warp % WK, group = warp / WK;
  const int n_batches = (n + BATCH - 1) / BATCH;
  float* const sums = reinterpret_cast<float*>(shared + RING_BYTES);  // [2][WK][TILE_ROWS]
  float* const squares = behind_sums(), *const scratch = squares + WARPS;
  const int passes = K_MOE == 2 ? a.n_active : 1;
#if !K_WIDE
  const int n_chunks = a.cols / Q::PER_CHUNK;
  const int pass_stages = n_batches * STAGES_PER_BATCH;
  const int n_stages = passes * pass_stages;
  const int chunk0 = kw * 32 + lane;
  const u32 ring = smem_addr(shared) + threadIdx.x * 16;
  // Rows past the end are not loaded: whatever their slot holds, no one reads their sum. Lanes past the end of a row
  // keep zeros in their slots. `next` walks the rows of this group where they lie evenly.
  const int group_rows = (n - group + GROUPS - 1) / GROUPS;
  const u8* next = rows.row(Rows::EVEN ? group : 0, 0) + chunk0 * 16;
  const size_t step = rows.step();
  int asked = 0;
  auto issue = [&](int stage, u32 slot) {
    const int pass = K_MOE == 2 ? stage / pass_stages : 0;
#pragma unroll
    for (int i = 0; i < RS; i++) {
      const int j = Rows::EVEN ? asked + i : (stage - pass * pass_stages) * RS + i;
      if (j < group_rows) {
        const u8* const p = Rows::EVEN ? next : rows.row(j * GROUPS + group, pass) + chunk0 * 16;
#pragma unroll
        for (int c = 0; c < NC; c++)
          if (EXACT || chunk0 + c * WK * 32 < n_chunks) cp_async16(slot + (i * NC + c) * T * 16, p + c * WK * 512);
      }
      next += step;
    }
    asked += RS;
  };
  if (!EXACT) {
#pragma unroll
    for (int c = 0; c < NC; c++)
      if (chunk0 + c * WK * 32 >= n_chunks)
        for (int s = 0; s < S * RS; s++) *reinterpret_cast<uint4*>(shared + (s * NC + c) * T * 16 + threadIdx.x * 16) = {0, 0, 0, 0};
  }
  auto fill = [&] {
#pragma unroll 1  // small code: the instruction cache holds few kernels
    for (int s = 0; s < S; s++) {
      if (s < n_stages) issue(s, ring + s * SLOT_BYTES);
      cp_async_commit();
      if (s + 1 >= PACE && s + 1 < S) cp_async_wait<PACE - 1>();
    }
  };
  if (!K_MOE) {
    if (K_DELAY) wait_cycles(a.delay);  // the kernels before are short, and read their activations first
    fill();
  }
#endif
  rows.constants();
  TRACE(1);
  pdl_wait();
  TRACE(2);
#ifdef K_SMID  // diagnosis of block placement: stamp then points to one int a block
  if (threadIdx.x == 0) {
    int sm;
    asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
    reinterpret_cast<int*>(a.stamp)[blockIdx.x] = sm;
  }
#endif
#if !K_WIDE
  LaneX l;
  if (NORM != NORM_LAYER) load_x(l, a.x16, chunk0, n_chunks);
#endif
#if K_MOE
  if (warp == 0) choose_experts(a, expert_ids, expert_weights);
  __syncthreads();
#if !K_WIDE
  fill();
#endif
#endif
  float2 part = {0.f, 0.f};
  if (NORM != NORM_NONE) {
    if (threadIdx.x < a.n_part) part = ld_f2(a.part + threadIdx.x);
#pragma unroll 1
    for (int i = threadIdx.x + T; i < a.n_part; i += T) {
      const float2 p = ld_f2(a.part + i);
      part.x += p.x, part.y += p.y;
    }
  }
  rows.begin();
  float mean = 0.f;
  if (NORM == NORM_LAYER) {  // the mean first, then the squares of what is left of x
    const float s = warp_sum(part.x);
    if (lane == 0) scratch[warp] = s;
    __syncthreads();
    for (int w = 0; w < WARPS; w++) mean += scratch[w];
    mean /= a.cols;
    part.y = 0.f;
    for (int i = threadIdx.x; i < a.cols; i += T) {
      const float d = ld_f32(a.x32 + i) - mean;
      part.y += d * d;
    }
  }
#if !K_WIDE
  prepare_x<NORM>(l, a, a.x32, chunk0, n_chunks, mean);
#endif
#if defined(K_TRACE) && !K_WIDE
  if (l.undo != 12345.f) TRACE(3);
#endif
  float inverse_norm = 1.f;
  u32 slot_offset = 0;
  int stage = 0;
#pragma unroll 1
  for (int tile = 0; tile * TILE_BATCHES < n_batches || tile == 0; tile++) {
    float* const tile_sums = sums + (tile & 1) * WK * TILE_ROWS;
    const int batches = min(TILE_BATCHES, n_batches - tile * TILE_BATCHES);
#pragma unroll 1
    for (int pass = 0; pass < passes; pass++) {  // down of experts: all rows in one tile
#if K_MOE == 2 && !K_WIDE
    if (pass > 0) {
      load_x(l, a.x16 + (size_t)pass * a.cols, chunk0, n_chunks);
      prepare_x<NORM>(l, a, a.x32 + (size_t)pass * a.cols, chunk0, n_chunks, 0.f);
    }
    const float expert_weight = expert_weights[pass];
#elif K_MOE == 2
    const float expert_weight = expert_weights[pass];
#else
    constexpr float expert_weight = 1.f;
#endif
#pragma unroll 1
    for (int b = 0; b < batches; b++) {
      float acc[RB];
#if K_WIDE
#pragma unroll
      for (int i = 0; i < RB; i++) {
        acc[i] = 0.f;
        const int r = ((tile * TILE_BATCHES + b) * RB + i) * GROUPS + group;
        if (r < n) {
          const u8* p = rows.row(r, pass);
          for (int c = lane; c < a.cols; c += 32) acc[i] += Q::weight_at(p, c) * wide_x<NORM>(a, (size_t)pass * a.cols + c, mean);
        }
      }
#else
#pragma unroll
      for (int s = 0; s < STAGES_PER_BATCH; s++) {
        cp_async_wait<S - 1>();
        const u32 slot = ring + slot_offset;
#pragma unroll
        for (int i = 0; i < RS; i++) {
          float v = 0.f;
#pragma unroll
          for (int c = 0; c < NC; c++) v += Q::dot(lds_v4(slot + (i * NC + c) * T * 16), l.x[c]);
          acc[s * RS + i] = v * l.undo;
        }
        if (stage + S < n_stages) issue(stage + S, slot);
        cp_async_commit();
        stage++;
        slot_offset = slot_offset == (S - 1) * SLOT_BYTES ? 0 : slot_offset + SLOT_BYTES;
      }
#endif
      const float sum = warp_sum_many<RB>(acc) * expert_weight;
      if ((lane & (32 / RB - 1)) == 0) {
        float* const to = tile_sums + kw * TILE_ROWS + (b * RB + warp_sum_index<RB>()) * GROUPS + group;
        *to = pass == 0 ? sum : *to + sum;
      }
    }
    }
    TRACE(4);
    if (NORM != NORM_NONE && tile == 0) {
      const float ss = warp_sum(part.y);
      if (lane == 0) squares[warp] = ss;
    }
    __syncthreads();
    TRACE(5);
    if (NORM != NORM_NONE && tile == 0) {
      float ss = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) ss += squares[w];
      inverse_norm = rsqrtf(__fdividef(ss, (float)a.cols) + a.eps);
    }
    const int r0 = tile * TILE_ROWS;
    rows.finish(r0, min(TILE_ROWS, n - r0), inverse_norm, [&](int r) {
      float v = tile_sums[r];
#pragma unroll
      for (int w = 1; w < WK; w++) v += tile_sums[w * TILE_ROWS + r];
      return v;
    });
  }
  rows.end(scratch, n);
  TRACE(6);
#ifdef K_TRACE
  if (threadIdx.x == 0) {
    int sm;
    asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
    for (int i = 0; i < 7; i++) a.stamp[blockIdx.x * 8 + i] = times[i];
    a.stamp[blockIdx.x * 8 + 7] = sm;
  }
#endif
  stamp_end(a.stamp, begun);
}

// First of the rows (or pairs) of a block when `units` are spread over the grid as evenly as possible.
DEVICE int first_unit(int units, int block) {
  const u32 each = (u32)units / gridDim.x, more = (u32)units - each * gridDim.x;
  return (int)(block * each + min((u32)block, more));
}
