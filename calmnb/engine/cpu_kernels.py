"""What the threads of the CPU engine run: one compiled function, `enter`, that never holds the GIL.

Thread 0 is whoever calls the engine. It writes a job into the context, wakes the others, works on its own share and
returns when all are done, all inside one call: a Python signal (Ctrl-C) is only seen between calls, so it cannot strand
a thread at a barrier. Threads 1 and up stay in `enter` for the life of the engine and sleep on a condition variable
between jobs.

A decode step has five barriers a layer. The residual stream, q, the hidden vector and the partial attention results
are shared; each thread norms and lays out its own copy of what it reads (cheaper than a barrier). Work is split by rows
in multiples of 16 and each row is summed in a fixed order, so the thread count never changes a result.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from calmnb.engine.cpu_attention import CHUNK, attend_chunk, combine_chunks, softmax_row
from calmnb.engine.cpu_ops import (
    FP16,
    add_scaled,
    choose_experts,
    gate,
    normalise,
    pad16,
    rotate_pair,
    store_rounded,
    stored_value,
)
from calmnb.engine.cpu_products import decode_row, matvec, prepare, row_bytes
from calmnb.engine.cpu_simd import (
    atomic_add,
    atomic_get,
    clock_gettime,
    cond_broadcast,
    cond_init,
    cond_wait,
    field,
    get_f32,
    get_f64,
    get_i64,
    mutex_init,
    mutex_lock,
    mutex_unlock,
    sched_yield,
    set_f32,
    set_f64,
    spin_hint,
    stay_call,
    usleep,
    vadd,
    vload,
    vset,
    vstore,
)

# The numpy error model leaves out checks for division by zero, which would need an exception path in every loop.
_njit = njit(nogil=True, error_model="numpy")

_F = np.float32

# Fields of the context, an int64 array. Sizes and addresses are fixed when the engine opens; A0 to A5 belong to the job.
(
    JOB, THREADS, SYNC, CLOCK, DTYPE, KV_DTYPE, DIM, HIDDEN, HEAD_DIM, N_LAYERS, N_HEADS, N_KV_HEADS, VOCAB, SEQ_LEN,
    ROTARY_DIM, N_EXPERTS, N_ACTIVE, WINDOW, LAYER_NORM, PARALLEL, ACT, EPS, CLIP, ROPE_FACTOR, FREQS, TURN, EMBED, LAYERS,
    FINAL_NORM, OUTPUT, X, QKV, HIDDEN_A, HIDDEN_B, ROWS_OUT, LOGITS, ROPE, MAXIMA, SUMS, MIXED, STAT_STRIDE, PRIVATE,
    PRIVATE_SIZE, SCRATCH_SIZE, STAMPS, KV_BLOCKS, A0, A1, A2, A3, A4, A5, N_FIELDS,
) = range(53)  # fmt: skip

# Fields of a layer's row in the layer table.
L_NORM, L_Q, L_K, L_V, L_O, L_BIAS, L_MLP_NORM, L_GATE, L_W1, L_W2, L_W3, L_KEYS, L_VALUES, N_LAYER_FIELDS = range(14)

# Byte offsets in the synchronisation block: each on cache lines of its own.
S_GENERATION, S_ARRIVED, S_STOP, S_MUTEX, S_COND, SYNC_BYTES = 0, 128, 256, 384, 512, 1024

J_INIT, J_STEP, J_DECODE, J_NORM, J_ROPE, J_KV, J_SOFTMAX, J_GATE, J_READ = range(9)

#: Spins before a waiting thread offers its core to others: a busy neighbour would halve a pure spin. A few us.
_SPINS = 400
#: ... then it yields for about 100 us (threads that share memory finish that far apart; napping at once halved the speed),
#: and then sleeps: where other programs want the cores, the thread waited for may sit in
#: another core's queue, and only a core that goes idle will fetch it. Yielding alone made a step wait whole time slices.
_YIELDS = 300
_NAP_US = np.uint32(20)


@_njit
def share(n, unit, tid, n_threads):
    """First and last row of a thread's slice of n, in multiples of `unit`."""
    blocks = (n + unit - 1) // unit
    return min(n, blocks * tid // n_threads * unit), min(n, blocks * (tid + 1) // n_threads * unit)


@_njit
def now(ctx, private):
    """Seconds on the clock of time.perf_counter."""
    clock_gettime(np.int32(field(ctx, CLOCK)), private)
    return get_i64(private) + 1e-9 * get_i64(private + 8)


@_njit
def stamp(ctx, tid, private, index):
    """Thread 0 notes the time, if anyone records."""
    stay_call()
    if tid < 1:
        stamps = field(ctx, STAMPS)
        if stamps != 0:
            set_f64(stamps + 8 * index, now(ctx, private))


@_njit
def barrier(ctx):
    """Wait for all threads: the n-th group of arrivals completes when the counter reaches n * threads."""
    stay_call()
    n_threads = field(ctx, THREADS)
    if n_threads == 1:
        return
    counter = field(ctx, SYNC) + S_ARRIVED
    arrived = atomic_add(counter, 1) + 1
    target = (arrived + n_threads - 1) // n_threads * n_threads
    spins = 0
    while atomic_get(counter) < target:
        spins += 1
        if spins < _SPINS:
            spin_hint()
        elif spins < _SPINS + _YIELDS:
            sched_yield()
        else:
            usleep(_NAP_US)


# -- the decode step -----------------------------------------------------------------------------------------------------


@_njit
def finish_qkv(ctx, layer, first, last, qkv, rope, slot):
    """Rows first to last - 1 of q, k and v: bias, clamp, rotary embedding, and store k and v at `slot`."""
    stay_call()
    hd, n_heads, n_kv = field(ctx, HEAD_DIM), field(ctx, N_HEADS), field(ctx, N_KV_HEADS)
    half, kv_dtype = field(ctx, ROTARY_DIM) // 2, field(ctx, KV_DTYPE)
    bias, clip = get_i64(layer + 8 * L_BIAS), _F(get_f64(ctx + 8 * CLIP))
    keys, values = get_i64(layer + 8 * L_KEYS), get_i64(layer + 8 * L_VALUES)
    blocks, hdp = field(ctx, KV_BLOCKS), pad16(hd)
    if bias != 0:
        for r in range(first, last):
            set_f32(qkv + 4 * r, get_f32(qkv + 4 * r) + get_f32(bias + 4 * r))
    if clip < _F(3.0e38):
        for r in range(first, last):
            set_f32(qkv + 4 * r, min(max(get_f32(qkv + 4 * r), -clip), clip))
    q_dim, kv_dim = n_heads * hd, n_kv * hd
    d = first % hd
    for r in range(first, min(last, q_dim + kv_dim)):
        if d % 2 == 0 and d < 2 * half:
            rotate_pair(qkv + 4 * r, get_f32(rope + 2 * d), get_f32(rope + 4 * half + 2 * d))
        d = d + 1 if d + 1 < hd else 0
    head, d = max(first - q_dim, 0) // hd, max(first - q_dim, 0) % hd
    for r in range(max(first, q_dim), min(last, q_dim + kv_dim)):
        store_rounded(kv_dtype, keys, ((head * blocks + slot // 16) * hd + d) * 16 + slot % 16, get_f32(qkv + 4 * r))
        d += 1
        if d == hd:
            head, d = head + 1, 0
    head, d = max(first - q_dim - kv_dim, 0) // hd, max(first - q_dim - kv_dim, 0) % hd
    for r in range(max(first, q_dim + kv_dim), last):
        store_rounded(kv_dtype, values, (head * blocks * 16 + slot) * hdp + d, get_f32(qkv + 4 * r))
        d += 1
        if d == hd:
            head, d = head + 1, 0


@_njit
def turn_sinks(ctx, layer, private):
    """Rotate the keys in slots 0 and 1 by one position, in cache precision."""
    stay_call()
    hd, half, kv_dtype = field(ctx, HEAD_DIM), field(ctx, ROTARY_DIM) // 2, field(ctx, KV_DTYPE)
    keys, turn, blocks = get_i64(layer + 8 * L_KEYS), field(ctx, TURN), field(ctx, KV_BLOCKS)
    for head in range(field(ctx, N_KV_HEADS)):
        for slot in range(2):
            for j in range(half):
                base = (head * blocks * hd + 2 * j) * 16 + slot
                set_f32(private, stored_value(kv_dtype, keys, base))
                set_f32(private + 4, stored_value(kv_dtype, keys, base + 16))
                rotate_pair(private, get_f32(turn + 4 * j), get_f32(turn + 4 * (half + j)))
                store_rounded(kv_dtype, keys, base, get_f32(private))
                store_rounded(kv_dtype, keys, base + 16, get_f32(private + 4))


@_njit
def attention(ctx, layer, tid, first, last, private):
    """This thread's share of (kv head, chunk) pairs over positions first to last - 1."""
    stay_call()
    hd, n_kv, kv_dtype = field(ctx, HEAD_DIM), field(ctx, N_KV_HEADS), field(ctx, KV_DTYPE)
    group, blocks, hdp = field(ctx, N_HEADS) // n_kv, field(ctx, KV_BLOCKS), pad16(hd)
    itemsize = 2 if kv_dtype == FP16 else 1
    keys, values = get_i64(layer + 8 * L_KEYS), get_i64(layer + 8 * L_VALUES)
    q, stride = field(ctx, QKV), field(ctx, STAT_STRIDE)
    chunk0 = first // CHUNK
    n_chunks = (last + CHUNK - 1) // CHUNK - chunk0
    begin, end = share(n_kv * n_chunks, 1, tid, field(ctx, THREADS))
    for task in range(begin, end):
        head, chunk = task // n_chunks, chunk0 + task % n_chunks
        start = chunk * CHUNK
        h = head * group
        attend_chunk(
            kv_dtype,
            keys + itemsize * (head * blocks * 16 * hd + start * hd),
            values + itemsize * ((head * blocks * 16 + start) * hdp),
            hd, q + 4 * h * hd, group, max(first - start, 0), min(last - start, CHUNK), private,
            field(ctx, MAXIMA) + 4 * (h * stride + chunk), field(ctx, SUMS) + 4 * (h * stride + chunk),
            field(ctx, MIXED) + 4 * (h * stride + chunk) * hdp, 4 * stride, 4 * stride * hdp,
        )  # fmt: skip


@_njit
def step(ctx, tid, private):
    """Decode one token: A0 token, A1 pos, A2 slot, A3 kv length, A4 whether sinks turn, A5 whether logits are wanted."""
    stay_call()
    n_threads, dtype, dim, hidden = field(ctx, THREADS), field(ctx, DTYPE), field(ctx, DIM), field(ctx, HIDDEN)
    hd, n_heads, n_kv = field(ctx, HEAD_DIM), field(ctx, N_HEADS), field(ctx, N_KV_HEADS)
    half, parallel, n_experts = field(ctx, ROTARY_DIM) // 2, field(ctx, PARALLEL), field(ctx, N_EXPERTS)
    active = field(ctx, N_ACTIVE) if n_experts > 0 else 1
    eps, layer_norm, act = _F(get_f64(ctx + 8 * EPS)), field(ctx, LAYER_NORM) != 0, field(ctx, ACT)
    x, qkv, hidden_a, hidden_b = field(ctx, X), field(ctx, QKV), field(ctx, HIDDEN_A), field(ctx, HIDDEN_B)
    rows_out, rope, stride = field(ctx, ROWS_OUT), field(ctx, ROPE), field(ctx, STAT_STRIDE)
    q_dim, kv_dim, hdp, hidden_pad = n_heads * hd, n_kv * hd, pad16(hd), pad16(hidden)
    pos, slot, kv_len = field(ctx, A1), field(ctx, A2), field(ctx, A3)
    window = field(ctx, WINDOW)
    first = max(0, kv_len - window) if window > 0 else 0
    unit = 16 if hd % 16 == 0 else hd
    # Private memory: scratch for one thing at a time, the normalised input, and its gf4 planes.
    wide = max(dim, q_dim, hidden)
    xb = private + field(ctx, SCRATCH_SIZE)
    planes = xb + 4 * pad16(wide)

    stamp(ctx, tid, private, 0)
    if tid < 1:
        decode_row(dtype, field(ctx, EMBED) + field(ctx, A0) * row_bytes(dtype, dim), dim, x)
        factor = get_f64(ctx + 8 * ROPE_FACTOR)
        for j in range(half):
            angle = pos * get_f64(field(ctx, FREQS) + 8 * j)
            set_f32(rope + 4 * j, _F(math.cos(angle) * factor))
            set_f32(rope + 4 * (half + j), _F(math.sin(angle) * factor))
    barrier(ctx)
    stamp(ctx, tid, private, 1)

    for index in range(field(ctx, N_LAYERS)):
        layer = field(ctx, LAYERS) + 8 * N_LAYER_FIELDS * index
        # q, k, v
        normalise(x, get_i64(layer + 8 * L_NORM), dim, eps, layer_norm, xb)
        px = prepare(dtype, xb, dim, planes)
        lo, hi = share(q_dim + 2 * kv_dim, unit, tid, n_threads)
        matvec(dtype, get_i64(layer + 8 * L_Q), dim, px, min(lo, q_dim), min(hi, q_dim), qkv)
        a, b = max(lo - q_dim, 0), max(hi - q_dim, 0)
        matvec(dtype, get_i64(layer + 8 * L_K), dim, px, min(a, kv_dim), min(b, kv_dim), qkv + 4 * q_dim)
        a, b = max(a - kv_dim, 0), max(b - kv_dim, 0)
        matvec(dtype, get_i64(layer + 8 * L_V), dim, px, a, b, qkv + 4 * (q_dim + kv_dim))
        finish_qkv(ctx, layer, lo, hi, qkv, rope, slot)
        if field(ctx, A4) != 0 and tid == 0:
            turn_sinks(ctx, layer, private)
        barrier(ctx)
        stamp(ctx, tid, private, 5 * index + 2)
        # attention
        attention(ctx, layer, tid, first, kv_len, private)
        barrier(ctx)
        stamp(ctx, tid, private, 5 * index + 3)
        # back to the residual stream
        mixed = xb if parallel == 0 else planes + 4 * 9 * (pad16((wide + 7) // 8) + 16)
        for h in range(n_heads):
            combine_chunks(
                field(ctx, MAXIMA) + 4 * h * stride, field(ctx, SUMS) + 4 * h * stride,
                field(ctx, MIXED) + 4 * h * stride * hdp, first // CHUNK,
                (kv_len + CHUNK - 1) // CHUNK, hd, private, mixed + 4 * h * hd,
            )  # fmt: skip
        px = prepare(dtype, mixed, q_dim, planes)
        lo, hi = share(dim, 16, tid, n_threads)
        matvec(dtype, get_i64(layer + 8 * L_O), q_dim, px, lo, hi, rows_out)
        add_scaled(x, rows_out, _F(1.0), lo, hi)
        barrier(ctx)
        stamp(ctx, tid, private, 5 * index + 4)
        # feed forward, up
        if parallel == 0:
            normalise(x, get_i64(layer + 8 * L_MLP_NORM), dim, eps, layer_norm, xb)
        px = prepare(dtype, xb, dim, planes)
        chosen = private + 4 * pad16(max(n_experts, 1))
        weights = chosen + 4 * pad16(active)
        if n_experts > 0:
            matvec(dtype, get_i64(layer + 8 * L_GATE), dim, px, 0, n_experts, private)
            choose_experts(private, n_experts, active, chosen, weights)
        else:
            set_f32(chosen, _F(0.0))
            set_f32(weights, _F(1.0))
        lo, hi = share(hidden, 16, tid, n_threads)
        for e in range(active):
            skip = int(get_f32(chosen + 4 * e)) * hidden * row_bytes(dtype, dim)
            up, gated = hidden_b + 4 * hidden_pad * e, hidden_a + 4 * hidden_pad * e
            matvec(dtype, get_i64(layer + 8 * L_W1) + skip, dim, px, lo, hi, gated)
            matvec(dtype, get_i64(layer + 8 * L_W3) + skip, dim, px, lo, hi, up)
            gate(act, gated, up, lo, hi)
        barrier(ctx)
        stamp(ctx, tid, private, 5 * index + 5)
        # feed forward, down
        lo, hi = share(dim, 16, tid, n_threads)
        for e in range(active):
            skip = int(get_f32(chosen + 4 * e)) * dim * row_bytes(dtype, hidden)
            px = prepare(dtype, hidden_a + 4 * hidden_pad * e, hidden, planes)
            matvec(dtype, get_i64(layer + 8 * L_W2) + skip, hidden, px, lo, hi, rows_out)
            add_scaled(x, rows_out, get_f32(weights + 4 * e), lo, hi)
        barrier(ctx)
        stamp(ctx, tid, private, 5 * index + 6)

    if field(ctx, A5) != 0:
        normalise(x, field(ctx, FINAL_NORM), dim, eps, layer_norm, xb)
        px = prepare(dtype, xb, dim, planes)
        lo, hi = share(field(ctx, VOCAB), 16, tid, n_threads)
        matvec(dtype, field(ctx, OUTPUT), dim, px, lo, hi, field(ctx, LOGITS))


# -- jobs of a batch -----------------------------------------------------------------------------------------------------


@_njit
def decode_rows(ctx, tid):
    """A0 rows of A1 columns of storage A2 at A3 to float32 at A4."""
    stay_call()
    n, cols, dtype, source, target = field(ctx, A0), field(ctx, A1), field(ctx, A2), field(ctx, A3), field(ctx, A4)
    lo, hi = share(n, 1, tid, field(ctx, THREADS))
    for r in range(lo, hi):
        decode_row(dtype, source + r * row_bytes(dtype, cols), cols, target + 4 * r * cols)


@_njit
def norm_rows(ctx, tid):
    """A0 rows of the residual stream at A1, by the gain at A2, to A3."""
    stay_call()
    n, dim = field(ctx, A0), field(ctx, DIM)
    lo, hi = share(n, 1, tid, field(ctx, THREADS))
    eps, layer_norm = _F(get_f64(ctx + 8 * EPS)), field(ctx, LAYER_NORM) != 0
    for r in range(lo, hi):
        normalise(field(ctx, A1) + 4 * r * dim, field(ctx, A2), dim, eps, layer_norm, field(ctx, A3) + 4 * r * dim)


@_njit
def rope_rows(ctx, tid):
    """Finish A0 rows of q, k, v at A1 for the layer row A2, at slots from A3 on, with the rotary table A4."""
    stay_call()
    n, half = field(ctx, A0), field(ctx, ROTARY_DIM) // 2
    width = (field(ctx, N_HEADS) + 2 * field(ctx, N_KV_HEADS)) * field(ctx, HEAD_DIM)
    lo, hi = share(n, 1, tid, field(ctx, THREADS))
    for r in range(lo, hi):
        finish_qkv(
            ctx, field(ctx, A2), 0, width, field(ctx, A1) + 4 * r * width, field(ctx, A4) + 8 * half * r, field(ctx, A3) + r
        )


@_njit
def kv_rows(ctx, tid):
    """Decode the cache of kv head A0 of the layer row A1 for A2 blocks from block A3 on.

    Keys go to A4 as (head_dim, 16 * blocks), values to A5 as (16 * blocks, head_dim padded).
    """
    stay_call()
    head, layer, n_blocks, block0 = field(ctx, A0), field(ctx, A1), field(ctx, A2), field(ctx, A3)
    hd, kv_dtype, blocks = field(ctx, HEAD_DIM), field(ctx, KV_DTYPE), field(ctx, KV_BLOCKS)
    itemsize, hdp = 2 if kv_dtype == FP16 else 1, pad16(field(ctx, HEAD_DIM))
    keys = get_i64(layer + 8 * L_KEYS) + itemsize * (head * blocks + block0) * hd * 16
    values = get_i64(layer + 8 * L_VALUES) + itemsize * (head * blocks + block0) * 16 * hdp
    lo, hi = share(n_blocks, 1, tid, field(ctx, THREADS))
    for b in range(lo, hi):
        for d in range(hd):
            decode_row(kv_dtype, keys + itemsize * (b * hd + d) * 16, 16, field(ctx, A4) + 4 * (d * 16 * n_blocks + b * 16))
        decode_row(kv_dtype, values + itemsize * b * 16 * hdp, 16 * hdp, field(ctx, A5) + 4 * b * 16 * hdp)


@_njit
def softmax_rows(ctx, tid):
    """Causal softmax of A0 rows of A1 float32 at A2; row r belongs to the token at column A3 + r // A4."""
    stay_call()
    n, length, group, window = field(ctx, A0), field(ctx, A1), field(ctx, A4), field(ctx, WINDOW)
    scale = _F(1.0 / math.sqrt(_F(field(ctx, HEAD_DIM))))
    lo, hi = share(n, 1, tid, field(ctx, THREADS))
    for r in range(lo, hi):
        last = field(ctx, A3) + r // group + 1
        first = max(0, last - window) if window > 0 else 0
        softmax_row(field(ctx, A2) + 4 * r * length, first, last, length, scale)


@_njit
def gate_rows(ctx, tid):
    """Activate A0 float32 (a multiple of 16) at A1 and multiply by those at A2."""
    stay_call()
    lo, hi = share(field(ctx, A0), 16, tid, field(ctx, THREADS))
    gate(field(ctx, ACT), field(ctx, A1), field(ctx, A2), lo, hi)


@_njit
def read_rows(ctx, tid, private):
    """Read A0 bytes at A1 and do next to nothing with them: the ceiling of every stage here."""
    stay_call()
    lo, hi = share(field(ctx, A0), 4096, tid, field(ctx, THREADS))
    base = field(ctx, A1)
    a, b, c, d = vset(_F(0.0)), vset(_F(0.0)), vset(_F(0.0)), vset(_F(0.0))
    for i in range(lo, hi - 255, 256):
        a = vadd(a, vload(base + i))
        b = vadd(b, vload(base + i + 64))
        c = vadd(c, vload(base + i + 128))
        d = vadd(d, vload(base + i + 192))
    vstore(private, vadd(vadd(a, b), vadd(c, d)))


# -- threads -------------------------------------------------------------------------------------------------------------


@_njit
def work(ctx, tid):
    """This thread's share of the job in the context."""
    job, private = field(ctx, JOB), field(ctx, PRIVATE) + tid * field(ctx, PRIVATE_SIZE)
    if job == J_STEP:
        step(ctx, tid, private)
    elif job == J_DECODE:
        decode_rows(ctx, tid)
    elif job == J_NORM:
        norm_rows(ctx, tid)
    elif job == J_ROPE:
        rope_rows(ctx, tid)
    elif job == J_KV:
        kv_rows(ctx, tid)
    elif job == J_SOFTMAX:
        softmax_rows(ctx, tid)
    elif job == J_GATE:
        gate_rows(ctx, tid)
    elif job == J_READ:
        read_rows(ctx, tid, private)


def enter(ctx, tid):
    """Thread 0: run the job in the context with all threads, and return. Others: serve jobs until told to stop.

    Compiled by `calmnb.engine.cpu_compile`. `ctx` is the address of the context.
    """
    sync = field(ctx, SYNC)
    if tid < 1:
        job = field(ctx, JOB)
        if job == J_INIT:
            mutex_init(sync + S_MUTEX, 0)
            cond_init(sync + S_COND, 0)
            return
        if field(ctx, THREADS) > 1:
            mutex_lock(sync + S_MUTEX)
            atomic_add(sync + S_GENERATION, 1)
            cond_broadcast(sync + S_COND)
            mutex_unlock(sync + S_MUTEX)
        if get_i64(sync + S_STOP) != 0:
            return
        work(ctx, tid)
        barrier(ctx)
        if job == J_STEP and field(ctx, STAMPS) != 0:
            stamp(ctx, tid, field(ctx, PRIVATE), 5 * field(ctx, N_LAYERS) + 2)
        return
    seen = 0
    while True:
        spins = 0
        while atomic_get(sync + S_GENERATION) == seen and spins < _SPINS:
            spin_hint()
            spins += 1
        if atomic_get(sync + S_GENERATION) == seen:
            mutex_lock(sync + S_MUTEX)
            while atomic_get(sync + S_GENERATION) == seen:
                cond_wait(sync + S_COND, sync + S_MUTEX)
            mutex_unlock(sync + S_MUTEX)
        seen += 1
        if atomic_get(sync + S_STOP) != 0:
            return
        work(ctx, tid)
        barrier(ctx)
