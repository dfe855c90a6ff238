// Work on the KV cache and on stored weights that is not part of every step.
//
// rotate_sinks     once the cache rolls, the keys of rows 0 and 1 are turned by one position before each step, so that
//                  their distance to the query stays the same (SPEC_calm.md 4.1). Grid (n_layers, n_kv_heads) x 128.
// fill_random      weights for benchmarks: uniform, zero mean, no two tensors alike. Any grid x 256.
// weight_peak      largest |weight| of a tensor, as float bits in an integer maximum. Any grid x 256.
// read_bytes       reads a buffer and does nothing else: what "measured peak" means. Grid = residency.
// collect_stamps   moves the stamps of a step into its row of the ring in host memory and resets them. Grid 1 x 256.
// hold_stream      keeps the stream busy until the host has queued what follows, but never for long. Grid 1 x 32.
// hold_time        runs for a time of the caller's choice and says how long it was: calibrates other clocks. Any grid x 256.

#include "common.cuh"
#include "quant.cuh"
#include "state.cuh"

struct SinkArgs {
  u8* cache;
  const double* frequencies;
  const int* state;
  u64* stamp;
  long long layer_bytes;  // from one layer's keys to the next layer's
  long long head_bytes;   // from one kv head to the next
  int head_dim;
  int half_rotary;
  int fp8;
};

DEVICE float load_kv(const u8* p, int fp8) {
  const u16 bits = fp8 ? static_cast<u16>(*p << 8) : *reinterpret_cast<const u16*>(p);
  return __half2float(__ushort_as_half(bits));
}
DEVICE void store_kv(u8* p, int fp8, float x) {
  if (!fp8) {
    *reinterpret_cast<__half*>(p) = __float2half_rn(fminf(fmaxf(x, -65504.0f), 65504.0f));
    return;
  }
  *p = encode_e5m2(x);
}

extern "C" __global__ void __launch_bounds__(128) rotate_sinks(const __grid_constant__ SinkArgs a) {
  pdl_trigger();
  u64 begun = 0;
  stamp_start(a.stamp, begun);
  const int sinks = ld_i32(a.state + ST_SINKS), item = a.fp8 ? 1 : 2;
  pdl_wait();
  u8* keys = a.cache + blockIdx.x * a.layer_bytes + blockIdx.y * a.head_bytes;
  for (int i = threadIdx.x; i < sinks * a.half_rotary; i += 128) {
    const int row = i / a.half_rotary, pair = i % a.half_rotary;
    double s, c;
    sincos(a.frequencies[pair], &s, &c);
    u8* at = keys + (row * a.head_dim + 2 * pair) * item;
    const float x = load_kv(at, a.fp8), y = load_kv(at + item, a.fp8), cf = static_cast<float>(c), sf = static_cast<float>(s);
    store_kv(at, a.fp8, x * cf - y * sf);
    store_kv(at + item, a.fp8, x * sf + y * cf);
  }
  stamp_end(a.stamp, begun);
}

DEVICE u32 mix(u32 x) {
  x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu; x ^= x >> 16;
  return x;
}

// bits: 16 fp16 and 8 E5M2: uniform in +-scale; 4: gf4 words with scales of both signs, magnitude up to 2 scale;
// 32: float in 1 +- 0.1 (norm weights). n counts 4-byte words.
extern "C" __global__ void __launch_bounds__(256) fill_random(u32* out, long long n, u32 seed, int bits, float scale) {
  for (long long i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll) {
    const u32 r = mix(static_cast<u32>(i) * 2654435761u ^ mix(seed + static_cast<u32>(i >> 32)));
    u32 word;
    if (bits == 32) {
      word = __float_as_uint(0.9f + 0.2f * (r >> 8) * (1.0f / 16777216.0f));
    } else if (bits == 16) {
      word = 0;
      for (int j = 0; j < 2; ++j) word |= static_cast<u32>(__half_as_ushort(__float2half_rn(((r >> 16 * j & 0xffff) - 32767.5f) / 32768.0f * scale))) << 16 * j;
    } else if (bits == 8) {
      word = 0;
      for (int j = 0; j < 4; ++j) {
        u8 byte;
        store_kv(&byte, 1, ((r >> 8 * j & 0xff) - 127.5f) / 128.0f * scale);
        word |= static_cast<u32>(byte) << 8 * j;
      }
    } else {
      u8 byte;
      store_kv(&byte, 1, (r & 1 ? -1.0f : 1.0f) * scale * (1.0f + (r >> 1 & 7) / 8.0f));
      word = (mix(r) & 0xffffff00u) | byte;
    }
    out[i] = word;
  }
}

// n counts 4-byte words; bits as above (4: the group scales, which bound the weights).
extern "C" __global__ void __launch_bounds__(256) weight_peak(const u32* in, long long n, int bits, u32* peak) {
  float top = 0.0f;
  for (long long i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll) {
    const u32 word = in[i];
    if (bits == 16) {
      top = fmaxf(top, fmaxf(fabsf(__half2float(__ushort_as_half(word & 0xffff))), fabsf(__half2float(__ushort_as_half(word >> 16)))));
    } else {
      for (int j = 0; j < (bits == 8 ? 4 : 1); ++j) top = fmaxf(top, fabsf(__half2float(__ushort_as_half(static_cast<u16>((word >> 8 * j & 0xff) << 8)))));
    }
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
  if (threadIdx.x % 32 == 0) atomicMax(peak, __float_as_uint(top));
}

extern "C" __global__ void __launch_bounds__(512) read_bytes(const uint4* in, long long n, u32* sink) {
  // Eight independent 16-byte loads a thread; n is a multiple of gridDim.x * 512 * 8.
  u32 sum = 0;
  for (long long base = blockIdx.x * 4096ll + threadIdx.x; base < n; base += gridDim.x * 4096ll) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w) : "l"(in + base + j * 512));
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (sum == 0x12345678u) *sink = sum;  // never, as good as; keeps the loads alive
}

struct CollectArgs {
  u64* stamps;     // [n][2] start, end of this step's kernels
  u64* ring;       // host memory, [rows][stride]: serial number, position, the stamps, then when this
                   // kernel ended for the step before and when it began for this one
  int* serial;     // steps collected so far; 8 bytes on, the time at which this kernel ended last
  const int* state;
  int n;
  int rows;
  int stride;
};

extern "C" __global__ void __launch_bounds__(256) collect_stamps(const __grid_constant__ CollectArgs a) {
  pdl_trigger();
  pdl_wait_only();
  const u64 begun = global_timer();
  u64* ended = reinterpret_cast<u64*>(a.serial + 2);
  const int serial = ld_i32(a.serial);
  volatile u64* row = a.ring + static_cast<long long>(serial % a.rows) * a.stride;
  for (int i = threadIdx.x; i < 2 * a.n; i += 256) {
    row[2 + i] = a.stamps[i];
    a.stamps[i] = i % 2 ? 0 : ~0ull;
  }
  if (threadIdx.x == 0) {
    row[1] = static_cast<u64>(ld_i32(a.state + ST_POS));
    row[2 + 2 * a.n] = *ended;
    row[3 + 2 * a.n] = begun;
  }
  // No fence, which would wait for the bus: the host takes a row when all of its times are newer than the last step's.
  __syncthreads();
  if (threadIdx.x == 0) {
    row[0] = static_cast<u64>(serial) + 1;
    *a.serial = serial + 1;
    *ended = global_timer();
  }
}

// flag is host memory; until it has reached `wanted` (counting round), or limit_ns have passed.
extern "C" __global__ void __launch_bounds__(32) hold_stream(const volatile u32* flag, u32 wanted, u64 limit_ns) {
  const u64 begun = global_timer();
  while (static_cast<int>(*flag - wanted) < 0 && global_timer() - begun < limit_ns) __nanosleep(100);
}

// stamp: first block's start, last block's end; largest and smallest number before.
extern "C" __global__ void __launch_bounds__(256) hold_time(u64 ns, u64* stamp) {
  const u64 begun = global_timer();
  while (global_timer() - begun < ns) {
  }
  if (threadIdx.x == 0) {
    atomicMin(&stamp[0], begun);
    atomicMax(&stamp[1], global_timer());
  }
}
