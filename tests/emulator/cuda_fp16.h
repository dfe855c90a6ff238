// CUDA's half type and the built-ins that the kernels use, on a CPU: each block runs as fibers, one a thread, that
// change places at every barrier and shuffle. For tests of what a kernel computes, not of how fast.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __align__(n) alignas(n)
#define __shared__ static
#define __maxnreg__(n)
#define __launch_bounds__(...)
using std::max;
using std::min;

struct dim3_ { unsigned x, y, z; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };

namespace emulator {
struct Fiber {
  ucontext_t context;
  bool done = false;
  dim3_ thread;
};
struct Barrier {
  unsigned waiting = 0, generation = 0;
};
inline std::vector<Fiber> fibers;
inline std::vector<char> stacks;
constexpr size_t STACK = 32 << 10;
inline ucontext_t scheduler;
inline unsigned current = 0, block_size = 0;
inline Barrier block_barrier;
inline std::vector<Barrier> warp_barriers;
inline std::vector<uint32_t> exchange;
inline dim3_ block_index, grid_size, block_dim;
inline unsigned char* dynamic_shared = nullptr;

inline void yield() { swapcontext(&fibers[current].context, &scheduler); }
inline void wait(Barrier& b, unsigned members) {
  const unsigned mine = b.generation;
  if (++b.waiting == members) {
    b.waiting = 0;
    b.generation++;
  } else {
    while (b.generation == mine) yield();
  }
}
inline unsigned lane() { return fibers[current].thread.x & 31; }
inline unsigned warp() { return fibers[current].thread.x >> 5; }
inline uint32_t shuffle_xor(uint32_t v, int mask) {
  exchange[current] = v;
  wait(warp_barriers[warp()], 32);
  const uint32_t r = exchange[warp() * 32 + (lane() ^ mask)];
  wait(warp_barriers[warp()], 32);
  return r;
}
template <class F> void run_block(unsigned threads, F body) {
  static void (*entry)() = nullptr;
  static F* f;
  f = &body;
  entry = [] {
    (*f)();
    fibers[current].done = true;
    yield();
  };
  fibers.assign(threads, Fiber{});
  if (stacks.size() < threads * STACK) stacks.resize(threads * STACK);
  block_size = threads;
  warp_barriers.assign((threads + 31) / 32, {});
  exchange.assign(threads, 0);
  block_barrier = {};
  for (unsigned i = 0; i < threads; i++) {
    fibers[i].thread = {i, 0, 0};
    getcontext(&fibers[i].context);
    fibers[i].context.uc_stack.ss_sp = stacks.data() + i * STACK;
    fibers[i].context.uc_stack.ss_size = STACK;
    fibers[i].context.uc_link = &scheduler;
    makecontext(&fibers[i].context, entry, 0);
  }
  for (bool any = true; any;) {
    any = false;
    for (current = 0; current < threads; current++)
      if (!fibers[current].done) {
        any = true;
        swapcontext(&scheduler, &fibers[current].context);
      }
  }
}
template <class To, class From> inline To bits(From v) {
  static_assert(sizeof(To) == sizeof(From), "size");
  To r;
  memcpy(&r, &v, sizeof r);
  return r;
}
inline double half_value(uint16_t h) {
  const int e = h >> 10 & 31, m = h & 1023;
  const double v = e == 31 ? (m ? NAN : INFINITY) : e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
  return h & 0x8000 ? -v : v;
}
inline uint16_t half_of(double v) {
  const uint16_t sign = signbit(v) ? 0x8000 : 0;
  v = fabs(v);
  if (v != v) return sign | 0x7E00;
  if (v >= 65520) return sign | 0x7C00;
  if (v < ldexp(1, -14)) return sign | (uint16_t)nearbyint(ldexp(v, 24));
  int e;
  frexp(v, &e);  // v in [2^(e-1), 2^e)
  const int m = (int)nearbyint(ldexp(v, 11 - e));  // 1024 ... 2048
  return sign | (uint16_t)(((e + 14) << 10) + (m - 1024));
}
}  // namespace emulator

#define threadIdx (emulator::fibers[emulator::current].thread)
#define blockIdx (emulator::block_index)
#define gridDim (emulator::grid_size)
#define blockDim (emulator::block_dim)

struct __half { uint16_t v; };
struct __half2 { uint16_t lo, hi; };
inline float __half2float(__half h) { return (float)emulator::half_value(h.v); }
inline __half __float2half_rn(float f) { return {emulator::half_of(f)}; }
inline __half2 __floats2half2_rn(float a, float b) { return {emulator::half_of(a), emulator::half_of(b)}; }
inline __half __ushort_as_half(uint16_t v) { return {v}; }
inline uint16_t __half_as_ushort(__half h) { return h.v; }
inline __half __low2half(__half2 h) { return {h.lo}; }
inline __half __high2half(__half2 h) { return {h.hi}; }
inline float __low2float(__half2 h) { return (float)emulator::half_value(h.lo); }
inline float __high2float(__half2 h) { return (float)emulator::half_value(h.hi); }
inline __half2 __half2half2(__half h) { return {h.v, h.v}; }
template <class F> inline __half2 half2_map(__half2 a, __half2 b, __half2 c, F f) {
  using emulator::half_of;
  using emulator::half_value;
  return {half_of(f(half_value(a.lo), half_value(b.lo), half_value(c.lo))),
          half_of(f(half_value(a.hi), half_value(b.hi), half_value(c.hi)))};
}
inline __half2 __hmul2(__half2 a, __half2 b) { return half2_map(a, b, a, [](double x, double y, double) { return x * y; }); }
inline __half2 __hadd2(__half2 a, __half2 b) { return half2_map(a, b, a, [](double x, double y, double) { return x + y; }); }
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) { return half2_map(a, b, c, [](double x, double y, double z) { return x * y + z; }); }
inline __half2 __hmax2(__half2 a, __half2 b) { return half2_map(a, b, a, [](double x, double y, double) { return fmax(x, y); }); }
inline __half __hmax(__half a, __half b) { return {emulator::half_of(fmax(emulator::half_value(a.v), emulator::half_value(b.v)))}; }
inline __half2 __habs2(__half2 a) { return {(uint16_t)(a.lo & 0x7FFF), (uint16_t)(a.hi & 0x7FFF)}; }

inline float __uint_as_float(unsigned v) { return emulator::bits<float>(v); }
inline unsigned __float_as_uint(float v) { return emulator::bits<unsigned>(v); }
inline float __int_as_float(int v) { return emulator::bits<float>(v); }
inline int __float_as_int(float v) { return emulator::bits<int>(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float v) { return expf(v); }
inline float rsqrtf(float v) { return 1.f / sqrtf(v); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t all = (uint64_t)b << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; i++) r |= (unsigned)(all >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return r;
}
inline void __syncthreads() { emulator::wait(emulator::block_barrier, emulator::block_size); }
inline void __syncwarp() { emulator::wait(emulator::warp_barriers[emulator::warp()], 32); }
inline float __shfl_xor_sync(unsigned, float v, int mask) {
  return emulator::bits<float>(emulator::shuffle_xor(emulator::bits<uint32_t>(v), mask));
}
inline int __shfl_xor_sync(unsigned, int v, int mask) { return (int)emulator::shuffle_xor((uint32_t)v, mask); }
