"""The arithmetic of the CPU engine beside its products: stored numbers, norms, activations, one Numba function each.

Everything takes int64 addresses and runtime sizes, so nothing is compiled per model. Sizes that are not multiples of
sixteen end in a scalar tail; no function reads past the data it is given.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from calmnb.engine.cpu_simd import (
    bits_float,
    float_bits,
    get_f32,
    get_u8,
    get_u16,
    set_f32,
    set_u8,
    set_u16,
    stay_call,
    vadd,
    vdiv,
    vexp2_scale,
    vfma,
    vload,
    vmax,
    vmin,
    vmul,
    vround,
    vset,
    vstore,
    vsub,
    vsum,
)

FP16, FP8, GF4 = 0, 1, 2

# The numpy error model leaves out checks for division by zero, which would need an exception path in every loop.
_njit = njit(nogil=True, error_model="numpy")

_F = np.float32
_ZERO, _ONE, _HALF = _F(0.0), _F(1.0), _F(0.5)
_LOWEST = _F(-3.0e38)
_UP112 = _F(2.0**112)
_LOG2E, _LN2_HIGH, _LN2_LOW = _F(1.4426950408889634), _F(-0.693359375), _F(2.1219444005469057e-4)
_GELU_A, _GELU_B = _F(-2 * 0.797885), _F(0.044715)


@_njit
def pad16(n):
    """Round up to a multiple of sixteen."""
    return (n + 15) // 16 * 16


@_njit
def half_value(bits):
    """One float16, given as uint16 bits, exactly."""
    b = np.uint32(bits)
    value = bits_float((b & np.uint32(0x7FFF)) << np.uint32(13)) * _UP112
    return bits_float(np.uint32(float_bits(value) | ((b & np.uint32(0x8000)) << np.uint32(16))))


@_njit
def stored_value(dtype, address, index):
    """One stored fp16 or fp8 number."""
    if dtype == FP16:
        return half_value(get_u16(address + 2 * index))
    return half_value(np.uint16(get_u8(address + index)) << np.uint16(8))


@_njit
def store_rounded(dtype, address, index, value):
    """Store a float32 as fp16 or fp8: nearest even, saturating at the largest finite value."""
    stay_call()
    bits = float_bits(value)
    sign = bits >> np.uint32(31)
    size = bits_float(np.uint32(bits & np.uint32(0x7FFFFFFF)))
    if dtype == FP16:
        size = min(size, _F(65504.0))
        if size < _F(6.103515625e-05):
            # Adding 0.5 leaves the subnormal's 2^-24 units in the low bits, rounded by the hardware.
            code = float_bits(size + _HALF) - float_bits(_HALF)
        else:
            b = float_bits(size)
            code = ((b + np.uint32(0xFFF) + ((b >> np.uint32(13)) & np.uint32(1))) >> np.uint32(13)) - np.uint32(0x1C000)
        set_u16(address + 2 * index, np.uint16(code | (sign << np.uint32(15))))
    else:
        size = min(size, _F(57344.0))
        if size < _F(6.103515625e-05):
            code = float_bits(size + _F(128.0)) - float_bits(_F(128.0))
        else:
            b = float_bits(size)
            code = ((b + np.uint32(0xFFFFF) + ((b >> np.uint32(21)) & np.uint32(1))) >> np.uint32(21)) - np.uint32(0x1C0)
        set_u8(address + index, np.uint8(code | (sign << np.uint32(7))))


# -- elementwise ---------------------------------------------------------------------------------------------------------


@_njit
def vexp(x):
    """exp of sixteen float32 to about one unit in the last place; arguments are clamped to [-87, 88]."""
    x = vmin(vmax(x, vset(_F(-87.0))), vset(_F(88.0)))
    n = vround(vmul(x, vset(_LOG2E)))
    r = vfma(n, vset(_LN2_LOW), vfma(n, vset(_LN2_HIGH), x))
    # Taylor to r^7: |r| <= 0.347, so what is left out is below 6e-9.
    p = vset(_F(1 / 5040))
    p = vfma(p, r, vset(_F(1 / 720)))
    p = vfma(p, r, vset(_F(1 / 120)))
    p = vfma(p, r, vset(_F(1 / 24)))
    p = vfma(p, r, vset(_F(1 / 6)))
    p = vfma(p, r, vset(_HALF))
    p = vfma(p, r, vset(_ONE))
    p = vfma(p, r, vset(_ONE))
    return vexp2_scale(p, n)


@_njit
def normalise(x, gain, n, eps, is_layer_norm, out):
    """RMS norm of x, or layer norm without bias."""
    stay_call()
    whole = n // 16 * 16
    mean = _ZERO
    if is_layer_norm:
        acc = vset(_ZERO)
        for i in range(0, whole, 16):
            acc = vadd(acc, vload(x + 4 * i))
        mean = vsum(acc)
        for i in range(whole, n):
            mean += get_f32(x + 4 * i)
        mean = _F(mean / _F(n))
    acc, shift = vset(_ZERO), vset(mean)
    for i in range(0, whole, 16):
        v = vsub(vload(x + 4 * i), shift)
        acc = vfma(v, v, acc)
    total = vsum(acc)
    for i in range(whole, n):
        d = get_f32(x + 4 * i) - mean
        total += d * d
    scale = _F(_ONE / math.sqrt(_F(total / _F(n)) + eps))
    factor = vset(scale)
    for i in range(0, whole, 16):
        v = vsub(vload(x + 4 * i), shift)
        vstore(out + 4 * i, vmul(vmul(v, factor), vload(gain + 4 * i)))
    for i in range(whole, n):
        set_f32(out + 4 * i, (get_f32(x + 4 * i) - mean) * scale * get_f32(gain + 4 * i))


@_njit
def gate(kind, a, b, first, last):
    """``a[i] = act(a[i]) * b[i]``; kind 0 is SiLU, 1 tanh GELU. `first` and the buffers are padded to sixteen."""
    stay_call()
    one = vset(_ONE)
    for i in range(first, last, 16):
        z = vload(a + 4 * i)
        if kind == 0:
            e = vexp(vsub(vset(_ZERO), z))
        else:  # z (1 + tanh u) / 2 = z / (1 + exp(-2 u))
            e = vexp(vmul(vset(_GELU_A), vfma(vmul(vset(_GELU_B), vmul(z, z)), z, z)))
        vstore(a + 4 * i, vmul(vdiv(z, vadd(one, e)), vload(b + 4 * i)))


@_njit
def add_scaled(x, y, weight, first, last):
    """``x[i] += weight * y[i]``."""
    stay_call()
    for i in range(first, last):
        set_f32(x + 4 * i, get_f32(x + 4 * i) + weight * get_f32(y + 4 * i))


@_njit
def rotate_pair(address, cos, sin):
    """Rotate two neighbouring float32."""
    a, b = get_f32(address), get_f32(address + 4)
    set_f32(address, a * cos - b * sin)
    set_f32(address + 4, a * sin + b * cos)


@_njit
def choose_experts(scores, n, k, chosen, weights):
    """Write the indices of the k largest scores to `chosen` (float32) and their softmax to `weights`. Ties: lower index."""
    stay_call()
    for j in range(k):
        best = -1
        for e in range(n):
            taken = False
            for i in range(j):
                if int(get_f32(chosen + 4 * i)) == e:
                    taken = True
            if not taken and (best < 0 or get_f32(scores + 4 * e) > get_f32(scores + 4 * best)):
                best = e
        set_f32(chosen + 4 * j, _F(best))
    top = get_f32(scores + 4 * int(get_f32(chosen)))
    total = _ZERO
    for j in range(k):
        w = _F(math.exp(get_f32(scores + 4 * int(get_f32(chosen + 4 * j))) - top))
        set_f32(weights + 4 * j, w)
        total += w
    for j in range(k):
        set_f32(weights + 4 * j, get_f32(weights + 4 * j) / total)
