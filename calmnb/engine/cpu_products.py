"""Products of the CPU engine, out[r] = row r . x, one Numba function a storage type and number of rows.

Every row is one chain of fused multiply-adds in a fixed order whoever computes it, so results do not depend on threads
or timing. Addresses and sizes are as in `cpu_ops`.

Storage of a row of n weights: fp16, n little-endian halves; fp8, n E5M2 bytes (the high bytes of halves); gf4, n/8
words: a byte of E5M2 scale s, then eight 3-bit codes c standing for ``(c - 4) * s / -4`` (SPEC_calm.md 2.2).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from calmnb.engine.cpu_ops import FP8, FP16, GF4, half_value, pad16, stored_value
from calmnb.engine.cpu_simd import (
    get_f32,
    get_u32,
    has_many_registers,
    prefetch,
    set_f32,
    stay_call,
    vfma,
    vload,
    vload_e5m2,
    vload_f16,
    vload_i32,
    vload_i32_first,
    vmask_to_f32,
    vscale_gf4,
    vset,
    vshift_to_f32,
    vstore,
    vsum,
)

#: How far ahead weights are asked for, in bytes. Memory is asked for in one straight line although several rows are
#: computed together: with one prefetch stream a row, an AMD EPYC core read at 10 GB/s instead of 20. 2 to 12 KB do alike.
AHEAD = 6144
#: How far ahead a page is touched once, so that its address is translated before its lines are asked for. A mapped file has
#: small pages: an AMD EPYC core under a hypervisor read one at 36 GB/s without, 50 with (32 to 256 KB do alike).
PAGE_AHEAD, PAGE = 65536, 4096
#: Whether four rows of gf4 fit in vector registers (AVX-512 has 32, AVX2 has 16, each half as wide).
MANY_REGISTERS = has_many_registers()

_njit = njit(nogil=True, error_model="numpy")  # see cpu_ops

_F = np.float32
_ZERO, _QUARTER = _F(0.0), _F(-0.25)


@_njit
def prepare(dtype, x, n, out):
    """Lay x (n float32) out as the product of `dtype` wants it, and return where it is.

    fp16 and fp8 read x as it stands. gf4 wants eight planes of n/8 (padded to 16), plane j holding x[8 i + j] times
    ``-2^-(10 + 3 j)`` so that ``word & (7 << (8 + 3 j))`` needs no shift, then a plane of the sums of eight.
    """
    stay_call()
    if dtype != GF4:
        return x
    n_words = n // 8
    stride = 4 * pad16(n_words)
    for i in range(n_words):
        a = x + 32 * i
        x0, x1, x2, x3 = get_f32(a), get_f32(a + 4), get_f32(a + 8), get_f32(a + 12)
        x4, x5, x6, x7 = get_f32(a + 16), get_f32(a + 20), get_f32(a + 24), get_f32(a + 28)
        o = out + 4 * i
        set_f32(o, x0 * _F(-(2.0**-10)))
        set_f32(o + stride, x1 * _F(-(2.0**-13)))
        set_f32(o + 2 * stride, x2 * _F(-(2.0**-16)))
        set_f32(o + 3 * stride, x3 * _F(-(2.0**-19)))
        set_f32(o + 4 * stride, x4 * _F(-(2.0**-22)))
        set_f32(o + 5 * stride, x5 * _F(-(2.0**-25)))
        set_f32(o + 6 * stride, x6 * _F(-(2.0**-28)))
        set_f32(o + 7 * stride, x7 * _QUARTER)
        set_f32(o + 8 * stride, ((x0 + x1) + (x2 + x3)) + ((x4 + x5) + (x6 + x7)))
    for plane in range(9):
        for i in range(n_words, stride // 4):
            set_f32(out + plane * stride + 4 * i, _ZERO)
    return out


@_njit
def _tail(dtype, w, x, start, n):
    stay_call()
    total = _ZERO
    for i in range(start, n):
        total += stored_value(dtype, w, i) * get_f32(x + 4 * i)
    return total


@_njit
def _dot2_f16(w, row, x, n, out):
    stay_call()
    a, b = vset(_ZERO), vset(_ZERO)
    w1, ask = w + row, w + AHEAD
    i = 0
    while i + 32 <= n:
        o = 2 * i
        prefetch(ask)
        prefetch(ask + 64)
        ask += 128
        v = vload(x + 4 * i)
        a = vfma(vload_f16(w + o), v, a)
        b = vfma(vload_f16(w1 + o), v, b)
        v = vload(x + 4 * i + 64)
        a = vfma(vload_f16(w + o + 32), v, a)
        b = vfma(vload_f16(w1 + o + 32), v, b)
        i += 32
    while i + 16 <= n:
        v = vload(x + 4 * i)
        a = vfma(vload_f16(w + 2 * i), v, a)
        b = vfma(vload_f16(w1 + 2 * i), v, b)
        i += 16
    set_f32(out, vsum(a) + _tail(FP16, w, x, i, n))
    set_f32(out + 4, vsum(b) + _tail(FP16, w1, x, i, n))


@_njit
def _dot1_f16(w, x, n, out):
    stay_call()
    a = vset(_ZERO)
    i = 0
    while i + 16 <= n:
        a = vfma(vload_f16(w + 2 * i), vload(x + 4 * i), a)
        i += 16
    set_f32(out, vsum(a) + _tail(FP16, w, x, i, n))


@_njit
def _dot2_f8(w, row, x, n, out):
    stay_call()
    a, b = vset(_ZERO), vset(_ZERO)
    w1, ask = w + row, w + AHEAD
    i = 0
    while i + 64 <= n:
        prefetch(ask)
        prefetch(ask + 64)
        ask += 128
        v = vload(x + 4 * i)
        a = vfma(vload_e5m2(w + i), v, a)
        b = vfma(vload_e5m2(w1 + i), v, b)
        v = vload(x + 4 * i + 64)
        a = vfma(vload_e5m2(w + i + 16), v, a)
        b = vfma(vload_e5m2(w1 + i + 16), v, b)
        v = vload(x + 4 * i + 128)
        a = vfma(vload_e5m2(w + i + 32), v, a)
        b = vfma(vload_e5m2(w1 + i + 32), v, b)
        v = vload(x + 4 * i + 192)
        a = vfma(vload_e5m2(w + i + 48), v, a)
        b = vfma(vload_e5m2(w1 + i + 48), v, b)
        i += 64
    while i + 16 <= n:
        v = vload(x + 4 * i)
        a = vfma(vload_e5m2(w + i), v, a)
        b = vfma(vload_e5m2(w1 + i), v, b)
        i += 16
    set_f32(out, vsum(a) + _tail(FP8, w, x, i, n))
    set_f32(out + 4, vsum(b) + _tail(FP8, w1, x, i, n))


@_njit
def _dot1_f8(w, x, n, out):
    stay_call()
    a = vset(_ZERO)
    i = 0
    while i + 16 <= n:
        a = vfma(vload_e5m2(w + i), vload(x + 4 * i), a)
        i += 16
    set_f32(out, vsum(a) + _tail(FP8, w, x, i, n))


@_njit
def _words_gf4(words, planes, stride, acc):
    """Add the products of 128 weights (sixteen words) to `acc`."""
    s = vload(planes + 8 * stride)
    s = vfma(vmask_to_f32(words, 7 << 8), vload(planes), s)
    s = vfma(vmask_to_f32(words, 7 << 11), vload(planes + stride), s)
    s = vfma(vmask_to_f32(words, 7 << 14), vload(planes + 2 * stride), s)
    s = vfma(vmask_to_f32(words, 7 << 17), vload(planes + 3 * stride), s)
    s = vfma(vmask_to_f32(words, 7 << 20), vload(planes + 4 * stride), s)
    s = vfma(vmask_to_f32(words, 7 << 23), vload(planes + 5 * stride), s)
    s = vfma(vmask_to_f32(words, 7 << 26), vload(planes + 6 * stride), s)
    s = vfma(vshift_to_f32(words, 29), vload(planes + 7 * stride), s)
    return vfma(vscale_gf4(words), s, acc)


@_njit
def _dot4_gf4(w, row, planes, n, out):
    stay_call()
    a, b, c, d = vset(_ZERO), vset(_ZERO), vset(_ZERO), vset(_ZERO)
    n_words = n // 8
    stride = 4 * pad16(n_words)
    w1, w2, w3, ask = w + row, w + 2 * row, w + 3 * row, w + AHEAD
    i = 0
    while i + 16 <= n_words:
        o = 4 * i
        prefetch(ask)
        prefetch(ask + 64)
        prefetch(ask + 128)
        prefetch(ask + 192)
        ask += 256
        a = _words_gf4(vload_i32(w + o), planes + o, stride, a)
        b = _words_gf4(vload_i32(w1 + o), planes + o, stride, b)
        c = _words_gf4(vload_i32(w2 + o), planes + o, stride, c)
        d = _words_gf4(vload_i32(w3 + o), planes + o, stride, d)
        i += 16
    if i < n_words:
        o, left = 4 * i, n_words - i
        prefetch(ask)
        prefetch(ask + 64)
        a = _words_gf4(vload_i32_first(w + o, left), planes + o, stride, a)
        b = _words_gf4(vload_i32_first(w1 + o, left), planes + o, stride, b)
        c = _words_gf4(vload_i32_first(w2 + o, left), planes + o, stride, c)
        d = _words_gf4(vload_i32_first(w3 + o, left), planes + o, stride, d)
    set_f32(out, vsum(a))
    set_f32(out + 4, vsum(b))
    set_f32(out + 8, vsum(c))
    set_f32(out + 12, vsum(d))


@_njit
def _dot2_gf4(w, row, planes, n, out):
    stay_call()
    a, b = vset(_ZERO), vset(_ZERO)
    n_words = n // 8
    stride = 4 * pad16(n_words)
    w1, ask = w + row, w + AHEAD
    i = 0
    while i + 16 <= n_words:
        o = 4 * i
        prefetch(ask)
        prefetch(ask + 64)
        ask += 128
        a = _words_gf4(vload_i32(w + o), planes + o, stride, a)
        b = _words_gf4(vload_i32(w1 + o), planes + o, stride, b)
        i += 16
    if i < n_words:
        o, left = 4 * i, n_words - i
        a = _words_gf4(vload_i32_first(w + o, left), planes + o, stride, a)
        b = _words_gf4(vload_i32_first(w1 + o, left), planes + o, stride, b)
    set_f32(out, vsum(a))
    set_f32(out + 4, vsum(b))


@_njit
def _dot1_gf4(w, planes, n, out):
    stay_call()
    a = vset(_ZERO)
    n_words = n // 8
    stride = 4 * pad16(n_words)
    i = 0
    while i + 16 <= n_words:
        a = _words_gf4(vload_i32(w + 4 * i), planes + 4 * i, stride, a)
        i += 16
    if i < n_words:
        a = _words_gf4(vload_i32_first(w + 4 * i, n_words - i), planes + 4 * i, stride, a)
    set_f32(out, vsum(a))


@_njit
def row_bytes(dtype, n):
    """Bytes of a row of n weights."""
    if dtype == FP16:
        return 2 * n
    if dtype == FP8:
        return n
    return n // 2


@_njit
def touch_pages(address, n_bytes):
    """Have the pages translated that lie `PAGE_AHEAD` beyond those that begin in a range."""
    page = (address + PAGE - 1) & ~(PAGE - 1)
    while page < address + n_bytes:
        prefetch(page + PAGE_AHEAD)
        page += PAGE


@_njit
def matvec(dtype, w, n, x, first, last, out):
    """``out[r] = W[r] . x`` for rows first to last - 1 of a matrix with n columns; x from `prepare`."""
    stay_call()
    row = row_bytes(dtype, n)
    r = first
    if dtype == FP16:
        while r + 2 <= last:
            touch_pages(w + r * row, 2 * row)
            _dot2_f16(w + r * row, row, x, n, out + 4 * r)
            r += 2
        if r < last:
            _dot1_f16(w + r * row, x, n, out + 4 * r)
    elif dtype == FP8:
        while r + 2 <= last:
            touch_pages(w + r * row, 2 * row)
            _dot2_f8(w + r * row, row, x, n, out + 4 * r)
            r += 2
        if r < last:
            _dot1_f8(w + r * row, x, n, out + 4 * r)
    else:
        if MANY_REGISTERS:
            while r + 4 <= last:
                touch_pages(w + r * row, 4 * row)
                _dot4_gf4(w + r * row, row, x, n, out + 4 * r)
                r += 4
        while r + 2 <= last:
            touch_pages(w + r * row, 2 * row)
            _dot2_gf4(w + r * row, row, x, n, out + 4 * r)
            r += 2
        if r < last:
            _dot1_gf4(w + r * row, x, n, out + 4 * r)


@_njit
def decode_row(dtype, w, n, out):
    """Decode n stored weights to float32."""
    stay_call()
    if dtype == GF4:
        for i in range(n // 8):
            word = get_u32(w + 4 * i)
            scale = half_value(np.uint16((word & np.uint32(0xFF)) << np.uint32(8))) * _QUARTER
            o = out + 32 * i
            for j in range(8):
                code = np.int32((word >> np.uint32(8 + 3 * j)) & np.uint32(7)) - np.int32(4)
                set_f32(o + 4 * j, _F(code) * scale)
        return
    i = 0
    if dtype == FP16:
        while i + 16 <= n:
            vstore(out + 4 * i, vload_f16(w + 2 * i))
            i += 16
    else:
        while i + 16 <= n:
            vstore(out + 4 * i, vload_e5m2(w + i))
            i += 16
    while i < n:
        set_f32(out + 4 * i, stored_value(dtype, w, i))
        i += 1
