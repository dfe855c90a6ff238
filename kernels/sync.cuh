// How the blocks of a kernel wait for each other, and how a token reaches the host. tests/emulator has its own copy.
#pragma once
#include "common.cuh"

// A counter that blocks of one grid arrive at, and that is never reset. Its value is a multiple of the grid, a power of
// two, whenever no kernel runs; so the count at which a launch began can be told from any later one before a block's own
// arrival. Every block of a grid must be able to stand on the GPU at once: the next kernel's blocks start only after all
// of these have (pdl_trigger), so they cannot be in the way.
DEVICE u32 arrivals_at_start(const u32* counter) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory");
  return v & ~(gridDim.x - 1);
}
// Called by all threads: what any block wrote before is visible to all blocks after. `round` is 1 at the first call.
DEVICE void wait_for_all_blocks(u32* counter, u32 begun, u32 round) {
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
    u32 v;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory");
    } while (v - begun < round * gridDim.x);
  }
  __syncthreads();
}
// Called by all threads, once, last: true in the block that arrives after all others, which sees what they wrote.
DEVICE bool is_last_block(u32* counter, u32 begun, u32 round, u32* flag) {
  __syncthreads();
  if (threadIdx.x == 0) {
    u32 v;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(v) : "l"(counter) : "memory");
    *flag = v - begun == round * gridDim.x - 1;
  }
  __syncthreads();
  return *flag;
}

// One aligned store of 16 bytes reaches the host as a whole, so that no fence (a round trip to its memory) is needed.
DEVICE void store_to_host(void* p, int x, int y, int z, int w) {
  asm volatile("st.volatile.global.v4.s32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
