// kernels/sync.cuh without its PTX: a block that waits for others lets them run.
#pragma once
#include "common.cuh"

inline u32 arrivals_at_start(const u32* counter) { return *counter & ~(gridDim.x - 1); }
inline void wait_for_all_blocks(u32* counter, u32 begun, u32 round) {
  __syncthreads();
  if (threadIdx.x == 0) {
    ++*counter;
    while (*counter - begun < round * gridDim.x) emulator::yield();
  }
  __syncthreads();
}
inline bool is_last_block(u32* counter, u32 begun, u32 round, u32* flag) {
  __syncthreads();
  if (threadIdx.x == 0) *flag = (*counter)++ - begun == round * gridDim.x - 1;
  __syncthreads();
  return *flag;
}
inline void store_to_host(void* p, int x, int y, int z, int w) {
  require((uintptr_t)p % 16 == 0, "misaligned 16-byte store");
  const int v[4] = {x, y, z, w};
  memcpy(p, v, 16);
}
