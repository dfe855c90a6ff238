// CUDA's half type and the built-ins that the kernels use, on a CPU: each block runs as fibers, one a thread, that
// change places at every barrier and shuffle. Blocks run one after another or, where a kernel's blocks wait for each other,
// side by side. For tests of what a kernel computes, not of how fast.
#pragma once
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static
#define __maxnreg__(n)
#define __launch_bounds__(...)
using std::max;
using std::min;

struct dim3_ { unsigned x, y, z; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulator {
struct Barrier {
  unsigned waiting = 0, generation = 0;
};
inline void require(bool ok, const char* what) {
  if (!ok) {
    fprintf(stderr, "emulator: %s\n", what);
    abort();
  }
}
// An asynchronous copy that nobody has waited for yet: it happens at the wait, as late as it may.
struct Copy {
  unsigned to;       // shared memory
  const void* from;  // null: zeros
  unsigned bytes;
};
struct Fiber {
  ucontext_t context;  // of its first entry; afterwards `place`, for swapcontext calls the kernel every time
  jmp_buf place;
  bool begun = false, done = false;
  const Barrier* waits_for = nullptr;
  unsigned generation = 0;  // of that barrier, when it began to wait
  dim3_ thread;
  std::vector<Copy> copies;
  std::vector<size_t> groups;  // copies before each commit
};
struct Block {
  dim3_ index;
  std::vector<Fiber> fibers;
  Barrier barrier;
  std::vector<Barrier> warp_barriers;
  std::vector<uint64_t> exchange;
  std::vector<std::array<uint32_t, 6>> wide;  // what lanes of a warp show each other for ldmatrix and mma
  std::vector<uint4> shared;
  std::vector<char> in_flight;  // a word of shared memory that a copy will be written to
};
inline std::unique_ptr<char[]> stacks;
inline size_t stacks_size = 0;
constexpr size_t STACK = 32 << 10;
inline jmp_buf scheduler;
inline Block* block = nullptr;
inline unsigned current = 0;
inline dim3_ grid_size, block_dim;
inline unsigned char* dynamic_shared = nullptr;

inline void yield() {
  if (!_setjmp(block->fibers[current].place)) _longjmp(scheduler, 1);
}
inline void wait(Barrier& b, unsigned members) {
  const unsigned mine = b.generation;
  if (++b.waiting == members) {
    b.waiting = 0;
    b.generation++;
  } else {
    Fiber& me = block->fibers[current];
    me.waits_for = &b;
    me.generation = mine;
    while (b.generation == mine) yield();
    me.waits_for = nullptr;
  }
}
inline unsigned lane() { return block->fibers[current].thread.x & 31; }
inline unsigned warp() { return block->fibers[current].thread.x >> 5; }
inline uint64_t exchange_with(uint64_t v, unsigned other) {
  block->exchange[current] = v;
  wait(block->warp_barriers[warp()], 32);
  const uint64_t r = block->exchange[warp() * 32 + other];
  wait(block->warp_barriers[warp()], 32);
  return r;
}
inline void (*entry)() = nullptr;
inline void enter_fiber(Fiber& f) {
  if (!_setjmp(scheduler)) {
    if (f.begun) _longjmp(f.place, 1);
    f.begun = true;
    setcontext(&f.context);
  }
}
inline bool run_once(Block& b, bool backwards) {
  bool any = false;
  block = &b;
  dynamic_shared = reinterpret_cast<unsigned char*>(b.shared.data());
  const unsigned n = (unsigned)b.fibers.size();
  for (unsigned i = 0; i < n; i++) {
    current = backwards ? n - 1 - i : i;
    Fiber& f = b.fibers[current];
    if (f.done) continue;
    any = true;
    if (f.waits_for == nullptr || f.waits_for->generation != f.generation) enter_fiber(f);
  }
  return any;
}
// Runs `body` in `columns` x `rows` blocks of `threads`, `resident` of them at a time. `order` changes who comes first.
template <class F>
void run_grid(unsigned columns, unsigned rows, unsigned threads, unsigned shared_bytes, unsigned resident, unsigned order, F body) {
  static F* f;
  f = &body;
  entry = [] {
    (*f)();
    block->fibers[current].done = true;
    _longjmp(scheduler, 1);
  };
  const unsigned grid = columns * rows;
  grid_size = {columns, rows, 1};
  block_dim = {threads, 1, 1};
  if (stacks_size < resident * threads * STACK) {
    stacks_size = resident * threads * STACK;
    stacks.reset(new char[stacks_size]);
  }
  std::vector<Block> blocks(resident);
  ucontext_t context;
  getcontext(&context);
  for (unsigned first = 0; first < grid; first += resident) {
    const unsigned n = min(resident, grid - first);
    for (unsigned j = 0; j < n; j++) {
      Block& b = blocks[j];
      const unsigned number = first + (j + order) % n;
      b.index = {number % columns, number / columns, 0};
      b.fibers.assign(threads, Fiber{});
      b.barrier = {};
      b.warp_barriers.assign((threads + 31) / 32, {});
      b.exchange.assign(threads, 0);
      b.wide.assign(threads, {});
      b.shared.resize(shared_bytes / 16 + 1);
      b.in_flight.assign(b.shared.size() * 4, false);
      memset(b.shared.data(), 0xFF, b.shared.size() * 16);
      for (unsigned i = 0; i < threads; i++) {
        Fiber& fiber = b.fibers[i];
        fiber.thread = {i, 0, 0};
        fiber.context = context;
        fiber.context.uc_stack.ss_sp = stacks.get() + (j * threads + i) * STACK;
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, entry, 0);
      }
    }
    for (bool any = true; any;) {
      any = false;
      for (unsigned j = 0; j < n; j++) any |= run_once(blocks[j], order & 1);
    }
  }
}
template <class To, class From> inline To bits(From v) {
  static_assert(sizeof(To) == sizeof(From), "size");
  To r;
  memcpy(&r, &v, sizeof r);
  return r;
}
inline const std::vector<double> half_values = [] {
  std::vector<double> all(1 << 16);
  for (unsigned h = 0; h < all.size(); h++) {
    const int e = h >> 10 & 31, m = h & 1023;
    const double v = e == 31 ? (m ? NAN : INFINITY) : e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
    all[h] = h & 0x8000 ? -v : v;
  }
  return all;
}();
inline double half_value(uint16_t h) { return half_values[h]; }
inline uint16_t half_of(double v) {
  const uint16_t sign = signbit(v) ? 0x8000 : 0;
  v = fabs(v);
  if (v != v) return sign | 0x7E00;
  if (v >= 65520) return sign | 0x7C00;
  if (v < 0x1p-14) return sign | (uint16_t)nearbyint(v * 0x1p24);
  uint64_t word = bits<uint64_t>(v);  // 42 bits more than a half has, an exponent that counts from 1023
  word += (1ull << 41) - 1 + (word >> 42 & 1);  // to the nearest, ties to even; it may carry into the exponent
  return sign | (uint16_t)((word >> 42) - ((1023 - 15) << 10));
}
}  // namespace emulator

#define threadIdx (emulator::block->fibers[emulator::current].thread)
#define blockIdx (emulator::block->index)
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
inline float2 __half22float2(__half2 h) { return {__low2float(h), __high2float(h)}; }
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
inline void __syncthreads() { emulator::wait(emulator::block->barrier, (unsigned)emulator::block->fibers.size()); }
inline void __syncwarp() { emulator::wait(emulator::block->warp_barriers[emulator::warp()], 32); }
inline void __threadfence() {}
template <class V> inline V exchange_value(V v, unsigned other) {
  uint64_t word = 0;
  memcpy(&word, &v, sizeof v);
  word = emulator::exchange_with(word, other);
  memcpy(&v, &word, sizeof v);
  return v;
}
template <class V> inline V __shfl_xor_sync(unsigned, V v, int mask) { return exchange_value(v, emulator::lane() ^ mask); }
template <class V> inline V __shfl_sync(unsigned, V v, int from) { return exchange_value(v, from & 31); }
template <class V> inline V __shfl_up_sync(unsigned, V v, int d) {
  const unsigned lane = emulator::lane();
  return exchange_value(v, lane >= (unsigned)d ? lane - d : lane);
}
inline bool __any_sync(unsigned mask, bool v) {
  for (int d = 16; d; d /= 2) v |= __shfl_xor_sync(mask, v, d);
  return v;
}
inline void __nanosleep(unsigned) {}
inline unsigned __reduce_min_sync(unsigned mask, unsigned v) {
  for (int d = 16; d; d /= 2) v = min(v, __shfl_xor_sync(mask, v, d));
  return v;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned v) {
  for (int d = 16; d; d /= 2) v = max(v, __shfl_xor_sync(mask, v, d));
  return v;
}
inline int __clz(unsigned v) { return v ? __builtin_clz(v) : 32; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline unsigned long long __float2ull_rn(float v) { return (unsigned long long)llrintf(v); }
template <class V> inline V __ldcg(const V* p) { return *p; }
// No fiber runs while another is between two barriers, so plain operations are atomic.
template <class V, class F> inline V change(V* p, F f) {
  const V old = *p;
  *p = f(old);
  return old;
}
template <class V> inline V atomicAdd(V* p, V v) { return change(p, [v](V old) { return old + v; }); }
template <class V> inline V atomicOr(V* p, V v) { return change(p, [v](V old) { return old | v; }); }
template <class V> inline V atomicMin(V* p, V v) { return change(p, [v](V old) { return min(old, v); }); }
template <class V> inline V atomicMax(V* p, V v) { return change(p, [v](V old) { return max(old, v); }); }
inline unsigned atomicInc(unsigned* p, unsigned most) { return change(p, [most](unsigned old) { return old >= most ? 0 : old + 1; }); }
