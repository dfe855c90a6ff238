"""Sixteen float32 at a time, inside Numba: the vector operations that the CPU kernels are written in.

Numba's auto-vectoriser decides differently from one LLVM to the next; a decode kernel that it leaves scalar runs 4 to
20 times slower. So the kernels name their vectors. `f32x16` and `i32x16` are Numba types that hold one LLVM vector;
every function here is an intrinsic that becomes one to a few instructions (one zmm, or two ymm, or four NEON registers).

Memory is addressed by int64 addresses, so that one compiled kernel serves every model, mapped or not, read-only or
not. No fast-math flag is set anywhere: results do not depend on what LLVM would like to reassociate, and subnormals
(which E5M2 weights have) are kept.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16

_F32, _I8, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_HALF = ir.HalfType()
_VF, _VI, _VH = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES), ir.VectorType(_HALF, LANES)
_VI8, _VI16, _VI1 = ir.VectorType(_I8, LANES), ir.VectorType(_I16, LANES), ir.VectorType(ir.IntType(1), LANES)


class _VectorType(types.Type):  # type: ignore[misc]
    """A Numba type for one LLVM vector of sixteen lanes."""


class F32x16(_VectorType):
    """Sixteen float32."""

    def __init__(self) -> None:
        super().__init__(name="f32x16")


class I32x16(_VectorType):
    """Sixteen int32."""

    def __init__(self) -> None:
        super().__init__(name="i32x16")


f32x16, i32x16 = F32x16(), I32x16()


@register_model(F32x16)
class _F32x16Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, _VF)


@register_model(I32x16)
class _I32x16Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, _VI)


def has_half_hardware() -> bool:
    """Whether this CPU converts between float16 and float32 in hardware (F16C, or any 64-bit ARM)."""
    if platform.machine().lower() in ("arm64", "aarch64"):
        return True
    features = binding.get_host_cpu_features()
    return bool(features.get("f16c")) and bool(features.get("avx2"))


def has_many_registers() -> bool:
    """Whether there are 32 registers of sixteen float32 (AVX-512)."""
    return bool(binding.get_host_cpu_features().get("avx512f"))


def _has_fma() -> bool:
    return platform.machine().lower() in ("arm64", "aarch64") or bool(binding.get_host_cpu_features().get("fma"))


# -- building blocks in IR -----------------------------------------------------------------------------------------------


def _pointer(builder: ir.IRBuilder, address: ir.Value, to: ir.Type) -> ir.Value:
    return builder.inttoptr(address, to.as_pointer())


def _load(builder: ir.IRBuilder, address: ir.Value, to: ir.Type, align: int) -> ir.Value:
    value = builder.load(_pointer(builder, address, to))
    value.align = align
    return value


def _splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    vector = ir.VectorType(scalar.type, LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, LANES), [ir.Constant(_I32, 0)] * LANES)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros)


def _const(vector: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(vector, [ir.Constant(vector.element, value)] * vector.count)


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, args: list[ir.Value]) -> ir.Value:
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, [a.type for a in args]), name)
    return builder.call(function, args)


def half_bits_to_float(builder: ir.IRBuilder, bits: ir.Value, hardware: bool) -> ir.Value:
    """Sixteen float16, given as i16 bits, to float32; exact, subnormals included."""
    if hardware:
        return builder.fpext(builder.bitcast(bits, _VH), _VF)
    # Exponent and mantissa, moved to their place in a float32, stand for the value times 2^-112, also when subnormal.
    # Infinity and NaN come out as 65536 times a mantissa; weights are checked to be finite.
    wide = builder.zext(bits, _VI)
    sign = builder.shl(builder.and_(wide, _const(_VI, 0x8000)), _const(_VI, 16))
    rest = builder.shl(builder.and_(wide, _const(_VI, 0x7FFF)), _const(_VI, 13))
    value = builder.fmul(builder.bitcast(rest, _VF), _const(_VF, 2.0**112))
    return builder.bitcast(builder.or_(builder.bitcast(value, _VI), sign), _VF)


# -- intrinsics: vectors -------------------------------------------------------------------------------------------------
# Numba calls each one with a typing context first and wants (signature, code generator) back.


@intrinsic
def vset(typingctx: Any, value: Any) -> Any:
    """All lanes equal to a float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _splat(builder, args[0])

    return f32x16(types.float32), codegen


@intrinsic
def vload(typingctx: Any, address: Any) -> Any:
    """Sixteen float32 from an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _load(builder, args[0], _VF, 4)

    return f32x16(types.int64), codegen


@intrinsic
def vstore(typingctx: Any, address: Any, value: Any) -> Any:
    """Store sixteen float32 at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], _pointer(builder, args[0], _VF), align=4)
        return context.get_dummy_value()

    return types.none(types.int64, f32x16), codegen


def _half_loader(hardware: bool) -> Any:
    def loader(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return half_bits_to_float(builder, _load(builder, args[0], _VI16, 2), hardware)

        return f32x16(types.int64), codegen

    return intrinsic(loader)


def _e5m2_loader(hardware: bool) -> Any:
    def loader(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            wide = builder.zext(_load(builder, args[0], _VI8, 1), _VI16)
            return half_bits_to_float(builder, builder.shl(wide, _const(_VI16, 8)), hardware)

        return f32x16(types.int64), codegen

    return intrinsic(loader)


def _gf4_scaler(hardware: bool) -> Any:
    def scaler(typingctx: Any, words: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            low = builder.trunc(builder.shl(args[0], _const(_VI, 8)), _VI16)
            return half_bits_to_float(builder, low, hardware)

        return f32x16(i32x16), codegen

    return intrinsic(scaler)


_HARDWARE = has_half_hardware()
#: Sixteen float16, or E5M2 bytes, at an address; the E5M2 scales in the low bytes of sixteen gf4 words.
vload_f16, vload_e5m2, vscale_gf4 = _half_loader(_HARDWARE), _e5m2_loader(_HARDWARE), _gf4_scaler(_HARDWARE)
#: The same without conversion hardware, for old CPUs and for the test that both agree.
vload_f16_soft, vload_e5m2_soft, vscale_gf4_soft = _half_loader(False), _e5m2_loader(False), _gf4_scaler(False)


@intrinsic
def vload_i32(typingctx: Any, address: Any) -> Any:
    """Sixteen int32 from an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _load(builder, args[0], _VI, 4)

    return i32x16(types.int64), codegen


@intrinsic
def vload_i32_first(typingctx: Any, address: Any, count: Any) -> Any:
    """The first `count` of sixteen int32, zeros behind them; nothing past them is touched."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = ir.Constant(_VI, [ir.Constant(_I32, i) for i in range(LANES)])
        mask = builder.icmp_signed("<", lanes, _splat(builder, builder.trunc(args[1], _I32)))
        pointer = _pointer(builder, args[0], _VI)
        arguments = [pointer, ir.Constant(_I32, 4), mask, _const(_VI, 0)]
        return _call(builder, "llvm.masked.load.v16i32.p0", _VI, arguments)

    return i32x16(types.int64, types.int64), codegen


@intrinsic
def vmask_to_f32(typingctx: Any, words: Any, mask: Any) -> Any:
    """``float32(words & mask)``, as signed numbers."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        masked = builder.and_(args[0], _splat(builder, builder.trunc(args[1], _I32)))
        return builder.sitofp(masked, _VF)

    return f32x16(i32x16, types.int64), codegen


@intrinsic
def vshift_to_f32(typingctx: Any, words: Any, count: Any) -> Any:
    """``float32(words >> count)``, shifting in zeros."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        shifted = builder.lshr(args[0], _splat(builder, builder.trunc(args[1], _I32)))
        return builder.sitofp(shifted, _VF)

    return f32x16(i32x16, types.int64), codegen


@intrinsic
def vfma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c``, rounded once where the CPU has FMA."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _has_fma():
            return _call(builder, "llvm.fma.v16f32", _VF, list(args))
        return builder.fadd(builder.fmul(args[0], args[1]), args[2])

    return f32x16(f32x16, f32x16, f32x16), codegen


def _binary(name: str) -> Any:
    def operation(typingctx: Any, a: Any, b: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            if name in ("max", "min"):
                # A comparison and a choice: one vmaxps or vminps. NaN in `a` gives b.
                larger = builder.fcmp_ordered(">" if name == "max" else "<", args[0], args[1])
                return builder.select(larger, args[0], args[1])
            return getattr(builder, name)(args[0], args[1])

        return f32x16(f32x16, f32x16), codegen

    return intrinsic(operation)


vadd, vsub, vmul, vdiv, vmax, vmin = (_binary(n) for n in ("fadd", "fsub", "fmul", "fdiv", "max", "min"))


@intrinsic
def vexp2_scale(typingctx: Any, value: Any, exponent: Any) -> Any:
    """``value * 2 ** exponent`` for whole exponents in [-126, 127] held as float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole = builder.add(builder.fptosi(args[1], _VI), _const(_VI, 127))
        return builder.fmul(args[0], builder.bitcast(builder.shl(whole, _const(_VI, 23)), _VF))

    return f32x16(f32x16, f32x16), codegen


@intrinsic
def vround(typingctx: Any, value: Any) -> Any:
    """Nearest whole numbers, ties to even."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, "llvm.rint.v16f32", _VF, [args[0]])

    return f32x16(f32x16), codegen


def _reduction(name: str) -> Any:
    def operation(typingctx: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            vector, width = args[0], LANES
            while width > 1:  # fold the upper half onto the lower: a fixed order
                half = width // 2
                index = [ir.VectorType(_I32, half)([ir.Constant(_I32, i + o) for i in range(half)]) for o in (0, half)]
                undefined = ir.Constant(vector.type, ir.Undefined)
                low, high = (builder.shuffle_vector(vector, undefined, i) for i in index)
                if name == "max":
                    vector = builder.select(builder.fcmp_ordered(">", low, high), low, high)
                else:
                    vector = builder.fadd(low, high)
                width = half
            return builder.extract_element(vector, ir.Constant(_I32, 0))

        return types.float32(f32x16), codegen

    return intrinsic(operation)


vsum, vmaximum = _reduction("sum"), _reduction("max")


# -- intrinsics: scalars at addresses ------------------------------------------------------------------------------------


def _getter(numba_type: Any, llvm_type: ir.Type, size: int) -> Any:
    def getter(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _load(builder, args[0], llvm_type, size)

        return numba_type(types.int64), codegen

    return intrinsic(getter)


def _setter(numba_type: Any, llvm_type: ir.Type, size: int) -> Any:
    def setter(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.store(args[1], _pointer(builder, args[0], llvm_type), align=size)
            return context.get_dummy_value()

        return types.none(types.int64, numba_type), codegen

    return intrinsic(setter)


get_f32, get_f64, get_i64 = (
    _getter(types.float32, _F32, 4),
    _getter(types.float64, ir.DoubleType(), 8),
    _getter(types.int64, _I64, 8),
)
get_u8, get_u16, get_u32 = _getter(types.uint8, _I8, 1), _getter(types.uint16, _I16, 2), _getter(types.uint32, _I32, 4)
set_f32, set_f64, set_i64 = (
    _setter(types.float32, _F32, 4),
    _setter(types.float64, ir.DoubleType(), 8),
    _setter(types.int64, _I64, 8),
)
set_u8, set_u16 = _setter(types.uint8, _I8, 1), _setter(types.uint16, _I16, 2)


def _bitcast(to_numba: Any, to_llvm: ir.Type, from_numba: Any) -> Any:
    def cast(typingctx: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], to_llvm)

        return to_numba(from_numba), codegen

    return intrinsic(cast)


float_bits, bits_float = _bitcast(types.uint32, _I32, types.float32), _bitcast(types.float32, _F32, types.uint32)


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """Ask for the cache line at an address, which may lie anywhere. Into L2: into L1 it was a fifth slower on an AMD EPYC."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        flags = [ir.Constant(_I32, v) for v in (0, 2, 1)]  # read, keep in L2 and beyond, data
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), [_pointer(builder, args[0], _I8), *flags])
        return context.get_dummy_value()

    return types.none(types.int64), codegen


@intrinsic
def field(typingctx: Any, address: Any, index: Any) -> Any:
    """int64 number `index` of an array at an address. An intrinsic: a function would be compiled for every constant."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        offset = builder.shl(args[1], ir.Constant(_I64, 3))
        return _load(builder, builder.add(args[0], offset), _I64, 8)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def stay_call(typingctx: Any) -> Any:
    """Keep the function that says this out of its callers: big loops inlined everywhere tripled the compile time."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.none(), codegen


# -- intrinsics: threads and time ----------------------------------------------------------------------------------------


@intrinsic
def atomic_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Add to an int64 and return what it was before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, args[0], _I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_get(typingctx: Any, address: Any) -> Any:
    """Read an int64 that another thread may write; what it wrote before is seen too."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0], _I64), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def spin_hint(typingctx: Any) -> Any:
    """Tell the core that this is a spin loop."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        machine = platform.machine().lower()
        if machine in ("arm64", "aarch64"):
            _call(builder, "llvm.aarch64.hint", ir.VoidType(), [ir.Constant(_I32, 1)])
        elif machine in ("x86_64", "amd64"):
            _call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.none(), codegen


# Functions of the C library, found by name when the compiled kernel is loaded, so that it can be cached on disk.
sched_yield = types.ExternalFunction("sched_yield", types.int32())
usleep = types.ExternalFunction("usleep", types.int32(types.uint32))
clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))
mutex_lock = types.ExternalFunction("pthread_mutex_lock", types.int32(types.intp))
mutex_unlock = types.ExternalFunction("pthread_mutex_unlock", types.int32(types.intp))
mutex_init = types.ExternalFunction("pthread_mutex_init", types.int32(types.intp, types.intp))
cond_init = types.ExternalFunction("pthread_cond_init", types.int32(types.intp, types.intp))
cond_wait = types.ExternalFunction("pthread_cond_wait", types.int32(types.intp, types.intp))
cond_broadcast = types.ExternalFunction("pthread_cond_broadcast", types.int32(types.intp))
