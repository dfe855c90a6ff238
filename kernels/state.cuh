// The step state beyond the words in common.cuh, and how it moves on to the next position.
#pragma once
#include "common.cuh"

#define kInfinity __int_as_float(0x7f800000)

// Words 4.. of the state (calmnb/engine/cuda_ops.py mirrors them).
enum MoreStateWord {
  ST_SINKS = 4,    // leading rows that this step rewrites (2 once the cache rolls, else 0): not to be read before the wait
  ST_STEP = 5,     // tokens sampled so far by this state, modulo 2^31
  ST_SEQ_LEN = 6,  // rows of the cache
  ST_WORDS = 16
};

// Token `token` stands at position `pos` in the next step: row, length and sinks follow from the rolling rule (calm's:
// the first two rows stay, the others are a ring). `rows` is state[ST_SEQ_LEN].
DEVICE void advance_state(int* state, int rows, int token, int pos) {
  const int sinks = pos >= rows ? 2 : 0;
  state[ST_TOKEN] = token;
  state[ST_POS] = pos;
  state[ST_SLOT] = pos < rows ? pos : sinks + (pos - sinks) % (rows - sinks);
  state[ST_LEN] = pos < rows ? pos + 1 : rows;
  state[ST_SINKS] = sinks;
}
