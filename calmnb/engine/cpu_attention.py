"""Attention of one token over the KV cache, in chunks whose partial results are joined afterwards (flash-decoding).

Keys of one kv head lie in blocks of sixteen positions, [slot // 16][channel][slot % 16], so that sixteen scores grow side
by side; values lie [slot][channel padded to 16]. Splitting the context into chunks of fixed size gives every thread work
even where there are few heads, and keeps the order of every sum independent of the number of threads.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from calmnb.engine.cpu_ops import FP16, pad16, vexp
from calmnb.engine.cpu_simd import (
    get_f32,
    prefetch,
    set_f32,
    stay_call,
    vadd,
    vfma,
    vload,
    vload_e5m2,
    vload_f16,
    vmax,
    vmaximum,
    vmul,
    vset,
    vstore,
    vsub,
    vsum,
)

#: Context positions that one task covers.
CHUNK = 64

_njit = njit(nogil=True, error_model="numpy")  # see cpu_ops

_F = np.float32
_ZERO, _ONE, _LOWEST = _F(0.0), _F(1.0), _F(-3.0e38)


@_njit
def vload_kv(dtype, address, index):
    """Sixteen cached numbers from element `index` on."""
    if dtype == FP16:
        return vload_f16(address + 2 * index)
    return vload_e5m2(address + index)


@_njit
def _scores4(dtype, keys, hd, q, q1, q2, q3, out, scale):
    """Scores of 32 positions (two blocks) for four heads; out has CHUNK float32 a head."""
    stay_call()
    a, b, c, d = vset(_ZERO), vset(_ZERO), vset(_ZERO), vset(_ZERO)
    e, f, g, h = vset(_ZERO), vset(_ZERO), vset(_ZERO), vset(_ZERO)
    second = 16 * hd
    for i in range(hd):
        k = vload_kv(dtype, keys, 16 * i)
        m = vload_kv(dtype, keys, second + 16 * i)
        v = vset(get_f32(q + 4 * i))
        a = vfma(k, v, a)
        e = vfma(m, v, e)
        v = vset(get_f32(q1 + 4 * i))
        b = vfma(k, v, b)
        f = vfma(m, v, f)
        v = vset(get_f32(q2 + 4 * i))
        c = vfma(k, v, c)
        g = vfma(m, v, g)
        v = vset(get_f32(q3 + 4 * i))
        d = vfma(k, v, d)
        h = vfma(m, v, h)
    vstore(out, vmul(a, scale))
    vstore(out + 64, vmul(e, scale))
    vstore(out + 4 * CHUNK, vmul(b, scale))
    vstore(out + 4 * CHUNK + 64, vmul(f, scale))
    vstore(out + 8 * CHUNK, vmul(c, scale))
    vstore(out + 8 * CHUNK + 64, vmul(g, scale))
    vstore(out + 12 * CHUNK, vmul(d, scale))
    vstore(out + 12 * CHUNK + 64, vmul(h, scale))


@_njit
def _scores1(dtype, keys, hd, q, out, scale):
    """Scores of 32 positions (two blocks) for one head."""
    stay_call()
    a, b, c, d = vset(_ZERO), vset(_ZERO), vset(_ZERO), vset(_ZERO)
    second = 16 * hd
    i = 0
    while i + 2 <= hd:
        v = vset(get_f32(q + 4 * i))
        a = vfma(vload_kv(dtype, keys, 16 * i), v, a)
        b = vfma(vload_kv(dtype, keys, second + 16 * i), v, b)
        v = vset(get_f32(q + 4 * i + 4))
        c = vfma(vload_kv(dtype, keys, 16 * i + 16), v, c)
        d = vfma(vload_kv(dtype, keys, second + 16 * i + 16), v, d)
        i += 2
    if i < hd:
        v = vset(get_f32(q + 4 * i))
        a = vfma(vload_kv(dtype, keys, 16 * i), v, a)
        b = vfma(vload_kv(dtype, keys, second + 16 * i), v, b)
    vstore(out, vmul(vadd(a, c), scale))
    vstore(out + 64, vmul(vadd(b, d), scale))


@_njit
def _mix4(dtype, values, hdp, p, first, last, out):
    """``out[h] = sum of p[h][t] * value[t]`` for four heads; p has CHUNK float32 a head, out hdp."""
    stay_call()
    for i in range(0, hdp, 16):
        a, b, c, d = vset(_ZERO), vset(_ZERO), vset(_ZERO), vset(_ZERO)
        e, f, g, h = vset(_ZERO), vset(_ZERO), vset(_ZERO), vset(_ZERO)
        t = first
        while t + 2 <= last:
            v = vload_kv(dtype, values, t * hdp + i)
            w = vload_kv(dtype, values, (t + 1) * hdp + i)
            s = p + 4 * t
            a = vfma(v, vset(get_f32(s)), a)
            b = vfma(v, vset(get_f32(s + 4 * CHUNK)), b)
            c = vfma(v, vset(get_f32(s + 8 * CHUNK)), c)
            d = vfma(v, vset(get_f32(s + 12 * CHUNK)), d)
            e = vfma(w, vset(get_f32(s + 4)), e)
            f = vfma(w, vset(get_f32(s + 4 * CHUNK + 4)), f)
            g = vfma(w, vset(get_f32(s + 8 * CHUNK + 4)), g)
            h = vfma(w, vset(get_f32(s + 12 * CHUNK + 4)), h)
            t += 2
        if t < last:
            v = vload_kv(dtype, values, t * hdp + i)
            a = vfma(v, vset(get_f32(p + 4 * t)), a)
            b = vfma(v, vset(get_f32(p + 4 * (CHUNK + t))), b)
            c = vfma(v, vset(get_f32(p + 4 * (2 * CHUNK + t))), c)
            d = vfma(v, vset(get_f32(p + 4 * (3 * CHUNK + t))), d)
        vstore(out + 4 * i, vadd(a, e))
        vstore(out + 4 * (hdp + i), vadd(b, f))
        vstore(out + 4 * (2 * hdp + i), vadd(c, g))
        vstore(out + 4 * (3 * hdp + i), vadd(d, h))


@_njit
def _mix1(dtype, values, hdp, p, first, last, out):
    """``out = sum of p[t] * value[t]``."""
    stay_call()
    for i in range(0, hdp, 16):
        a, b, c, d = vset(_ZERO), vset(_ZERO), vset(_ZERO), vset(_ZERO)
        t = first
        while t + 4 <= last:
            a = vfma(vload_kv(dtype, values, t * hdp + i), vset(get_f32(p + 4 * t)), a)
            b = vfma(vload_kv(dtype, values, (t + 1) * hdp + i), vset(get_f32(p + 4 * t + 4)), b)
            c = vfma(vload_kv(dtype, values, (t + 2) * hdp + i), vset(get_f32(p + 4 * t + 8)), c)
            d = vfma(vload_kv(dtype, values, (t + 3) * hdp + i), vset(get_f32(p + 4 * t + 12)), d)
            t += 4
        while t < last:
            a = vfma(vload_kv(dtype, values, t * hdp + i), vset(get_f32(p + 4 * t)), a)
            t += 1
        vstore(out + 4 * i, vadd(vadd(a, b), vadd(c, d)))


@_njit
def _softmax_chunk(p, first, last):
    """Exponentials of p[first:last] in place, zeros around them up to blocks of 32; returns maximum and sum."""
    stay_call()
    start, stop = first // 32 * 32, (last + 31) // 32 * 32
    for t in range(start, first):
        set_f32(p + 4 * t, _LOWEST)
    for t in range(last, stop):
        set_f32(p + 4 * t, _LOWEST)
    top = vset(_LOWEST)
    for t in range(start, stop, 16):
        top = vmax(vload(p + 4 * t), top)
    m = vmaximum(top)
    shift = vset(m)
    for t in range(start, stop, 16):
        vstore(p + 4 * t, vexp(vsub(vload(p + 4 * t), shift)))
    for t in range(start, first):
        set_f32(p + 4 * t, _ZERO)
    for t in range(last, stop):
        set_f32(p + 4 * t, _ZERO)
    total = vset(_ZERO)
    for t in range(start, stop, 16):
        total = vadd(total, vload(p + 4 * t))
    return m, vsum(total)


@_njit
def _ask(address, nbytes):
    for o in range(0, nbytes, 64):
        prefetch(address + o)


@_njit
def attend_chunk(dtype, keys, values, hd, q, n_heads, first, last, scratch, maxima, sums, mixed, stat_stride, mix_stride):
    """Softmax attention of `n_heads` queries over positions first to last - 1 of one chunk, not yet divided by its sum.

    Parameters
    ----------
    dtype
        KV storage, FP16 or FP8.
    keys, values
        Addresses of the chunk's first block and first position, for one kv head.
    hd
        head_dim; q is (n_heads, hd) float32.
    first, last
        Bounds within the chunk, ``0 <= first < last <= CHUNK``.
    scratch
        4 * CHUNK float32.
    maxima, sums, mixed
        Per head: the largest score, the sum of exponentials, the weighted values (hdp float32), at the given strides.
    """
    stay_call()
    hdp = pad16(hd)
    itemsize = 2 if dtype == FP16 else 1
    scale = vset(_F(_ONE / math.sqrt(_F(hd))))
    # The values are asked for while the scores are computed, the next chunk's keys while values are mixed.
    _ask(values + itemsize * first * hdp, itemsize * (last - first) * hdp)
    head = 0
    while head < n_heads:
        heads = min(n_heads - head, 4)
        q0 = q + 4 * hd * head
        for pair in range(first // 32, (last + 31) // 32):
            block, target = keys + itemsize * 32 * hd * pair, scratch + 128 * pair
            if heads == 1:
                _scores1(dtype, block, hd, q0, target, scale)
            else:  # fewer than four heads: the last one is computed again, and not looked at
                q1, q2, q3 = q0 + 4 * hd, q0 + 4 * hd * min(2, heads - 1), q0 + 4 * hd * (heads - 1)
                _scores4(dtype, block, hd, q0, q1, q2, q3, target, scale)
        for h in range(heads):
            m, total = _softmax_chunk(scratch + 4 * CHUNK * h, first, last)
            set_f32(maxima + (head + h) * stat_stride, m)
            set_f32(sums + (head + h) * stat_stride, total)
        if head == 0:
            _ask(keys + itemsize * CHUNK * hd, itemsize * CHUNK * hd)
        if heads == 1:
            _mix1(dtype, values, hdp, scratch, first, last, mixed + head * mix_stride)
        else:
            _mix4(dtype, values, hdp, scratch, first, last, scratch + 16 * CHUNK)
            for h in range(heads):
                for i in range(0, hdp, 16):
                    vstore(mixed + (head + h) * mix_stride + 4 * i, vload(scratch + 16 * CHUNK + 4 * (h * hdp + i)))
        head += heads


@_njit
def combine_chunks(maxima, sums, mixed, first, last, hd, weights, out):
    """Join the chunks first to last - 1 of one head: ``out = sum of e^(m_c - M) mixed_c / sum of e^(m_c - M) sum_c``."""
    stay_call()
    hdp = pad16(hd)
    top = get_f32(maxima + 4 * first)
    for c in range(first + 1, last):
        top = max(top, get_f32(maxima + 4 * c))
    total = _ZERO
    for c in range(first, last, 16):
        vstore(weights + 4 * (c - first), vexp(vsub(vload(maxima + 4 * c), vset(top))))
    for c in range(first, last):
        total += get_f32(weights + 4 * (c - first)) * get_f32(sums + 4 * c)
    share = vset(_F(_ONE / total))
    for i in range(0, hdp, 16):
        a = vset(_ZERO)
        for c in range(first, last):
            a = vfma(vload(mixed + 4 * (c * hdp + i)), vset(get_f32(weights + 4 * (c - first))), a)
        a = vmul(a, share)
        if i + 16 <= hd:
            vstore(out + 4 * i, a)
        else:
            vstore(weights, a)
            for j in range(i, hd):
                set_f32(out + 4 * j, get_f32(weights + 4 * (j - i)))


@_njit
def softmax_row(row, first, last, length, scale):
    """In place: softmax of ``scale * row[first:last]``; zeros elsewhere. `length` and the row are padded to sixteen."""
    stay_call()
    factor = vset(scale)
    start, stop = first // 16 * 16, (last + 15) // 16 * 16
    for t in range(start, first):
        set_f32(row + 4 * t, _LOWEST)
    for t in range(last, stop):
        set_f32(row + 4 * t, _LOWEST)
    top = vset(_LOWEST)
    for t in range(start, stop, 16):
        top = vmax(vload(row + 4 * t), top)
    shift = vset(vmaximum(top))
    for t in range(start, stop, 16):
        vstore(row + 4 * t, vexp(vmul(vsub(vload(row + 4 * t), shift), factor)))
    for t in range(start, first):
        set_f32(row + 4 * t, _ZERO)
    for t in range(last, stop):
        set_f32(row + 4 * t, _ZERO)
    acc = vset(_ZERO)
    for t in range(start, stop, 16):
        acc = vadd(acc, vload(row + 4 * t))
    share = vset(_F(_ONE / vsum(acc)))
    for t in range(start, stop, 16):
        vstore(row + 4 * t, vmul(vload(row + 4 * t), share))
    zero = vset(_ZERO)
    for t in range(0, start, 16):
        vstore(row + 4 * t, zero)
    for t in range(stop, length, 16):
        vstore(row + 4 * t, zero)
