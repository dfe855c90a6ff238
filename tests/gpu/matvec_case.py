"""One random call of a weight kernel with its float64 answer: shared by the tests and the tuning script."""

from __future__ import annotations

from typing import Any

import numpy as np

from calmnb.engine.cuda_matvec import Geometry, MatvecArgs, MatvecPlan, plan_matvec
from tests.gpu.launcher import Launcher

ACT_SCALE = 8.0
GUARD = 64  # poisoned elements behind every output


def random_weights(rng: np.random.Generator, dtype: str, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """Stored weights, zero mean, and the same as float64."""
    if dtype == "fp16":
        w = (rng.standard_normal((rows, cols)) * 0.04).astype(np.float16)
        return w, w.astype(np.float64)
    if dtype == "fp8":
        high = ((rng.standard_normal((rows, cols)) * 0.04).astype(np.float16).view(np.uint16) >> 8).astype(np.uint8)
        return high, (high.astype(np.uint16) << 8).view(np.float16).astype(np.float64)
    scale = ((rng.standard_normal((rows, cols // 8)) * 0.08).astype(np.float16).view(np.uint16) >> 8).astype(np.uint32)
    codes = rng.integers(0, 8, (rows, cols // 8, 8), dtype=np.uint32)
    words = scale | (codes << (8 + 3 * np.arange(8, dtype=np.uint32))).sum(2, dtype=np.uint32)
    s = (scale.astype(np.uint16) << 8).view(np.float16).astype(np.float64)
    return words, ((codes.astype(np.float64) - 4) * (s[..., None] / -4)).reshape(rows, cols)


def encode_e5m2(x: np.ndarray) -> np.ndarray:
    """Nearest even, saturating (tests only; exact for floats that are halves)."""
    table = (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float64)
    codes = np.flatnonzero(np.isfinite(table) & (np.arange(256) < 128))
    values = table[codes]
    mag = np.abs(x.astype(np.float64))
    i = np.clip(np.searchsorted(values, mag), 1, len(values) - 1)
    low, high = values[i - 1], values[i]
    up = (mag - low > high - mag) | ((mag - low == high - mag) & (codes[i] % 2 == 0))
    return np.where(up, codes[i], codes[i - 1]).astype(np.uint8) | (np.signbit(x).astype(np.uint8) << 7)


class MatvecCase:
    """Inputs on the device, and `run` / `errors`."""

    def __init__(
        self,
        gpu: Launcher,
        kind: str,
        dtype: str,
        rows: int,
        cols: int,
        *,
        norm: int | None = None,
        kv_dtype: str = "fp16",
        gelu: bool = False,
        wide: bool = False,
        bias: bool = False,
        clip: float = np.inf,
        head_dim: int = 64,
        n_kv_heads: int = 1,
        rotary_dim: int | None = None,
        massive: float = 0.0,
        moe: tuple[int, int] | None = None,
        in_place: bool = True,
        geometry: Geometry | None = None,
        stamps: bool = False,
        seed: int = 0,
    ) -> None:
        cp = gpu.cupy
        rng = np.random.default_rng(seed)
        self.gpu, self.kind, self.dtype, self.rows, self.cols = gpu, kind, dtype, rows, cols
        self.norm = norm if norm is not None else int(kind in ("qkv", "gateup", "logits", "router"))
        self.plan: MatvecPlan = plan_matvec(
            kind, dtype, rows, cols, gpu.device, norm=self.norm, kv_dtype=kv_dtype, gelu=gelu, wide=wide, geometry=geometry,
            stamps=stamps, moe=moe is not None,
        )  # fmt: skip
        self.kv_dtype, self.gelu, self.bias, self.clip = kv_dtype, gelu, bias, clip
        # Experts: `rows` counts all active ones (gateup) or one (down); the weights are those of every expert.
        self.moe = moe
        experts, active = moe or (1, 1)
        per_expert = rows // active if kind == "gateup" else rows
        stored, w = random_weights(rng, dtype, experts * per_expert, cols)
        if moe:
            scores = rng.standard_normal(experts).astype(np.float32)
            if experts > 3:
                scores[3] = scores[1]  # a tie: the lower index wins
            chosen = np.argsort(-scores, kind="stable")[:active]
            share = np.exp(scores[chosen].astype(np.float64) - scores[chosen].max())
            self.share = share / share.sum()
            w = w.reshape(experts, per_expert, cols)[chosen]
            w = w.reshape(rows, cols) if kind == "gateup" else w
        self.w = w
        self.keep: dict[str, Any] = {}
        a = self.args = MatvecArgs(rows=rows, cols=cols, eps=1e-5, clip=clip, q_scale=1.0, in_scale=ACT_SCALE)

        def put(name: str, array: np.ndarray) -> None:
            self.keep[name] = cp.asarray(np.ascontiguousarray(array))
            setattr(a, name, self.keep[name].data.ptr)

        if moe:
            put("router", scores)
            a.n_experts, a.n_active = experts, active
        if kind == "gateup":
            put("w0", stored[0::2])
            put("w1", stored[1::2])
        else:
            put("w0", stored)
        n_x = cols * active if kind == "down" else cols
        x = (rng.standard_normal(n_x) * np.exp(rng.standard_normal(n_x) * 0.5)).astype(np.float32)
        if massive:
            x[rng.integers(0, cols, max(1, cols // 500))] = massive
        g = (1 + 0.3 * rng.standard_normal(cols)).astype(np.float32)
        pad = -cols % 64
        if kind in ("out", "down"):
            scale = 1.0 if kind == "out" else ACT_SCALE
            a.in_scale = scale
            self.x = x.astype(np.float64)
            if kind == "out":
                x = np.clip(x, -60000, 60000).astype(np.float16).astype(np.float32)
                self.x = x.astype(np.float64)
            else:
                put("x32", np.pad(x, (0, pad)))
            with np.errstate(over="ignore"):
                put("x16", np.pad((x * np.float32(scale)).astype(np.float16), (0, pad)))
        else:
            put("x32", np.pad(x, (0, pad)))
            put("g", np.pad(g, (0, pad)))
            with np.errstate(over="ignore"):
                put("x16", np.pad((x * g * np.float32(ACT_SCALE)).astype(np.float16), (0, pad)))
            parts = np.array_split(x.astype(np.float64), 37)
            put("part", np.array([(p.sum(), (p * p).sum()) for p in parts], np.float32))
            a.n_part = len(parts)
            x64, g64 = x.astype(np.float64), g.astype(np.float64)
            centred = x64 - x64.mean() if self.norm == 2 else x64
            self.x = centred / np.sqrt((centred**2).mean() + 1e-5) * g64
        self.x32 = x
        self.outputs: dict[str, tuple[Any, int]] = {}

        def out(name: str, n: int, dt: Any) -> None:
            array = cp.full((n + GUARD) * np.dtype(dt).itemsize, 0xFF, cp.uint8).view(dt)
            self.outputs[name] = (array, n)
            setattr(a, name, array.data.ptr)

        if kind == "qkv":
            self.head_dim, self.kv_dim = head_dim, n_kv_heads * head_dim
            self.q_dim = rows - 2 * self.kv_dim
            assert self.q_dim > 0
            assert self.q_dim % head_dim == 0
            self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
            self.seq_len, self.slot = 7, 5
            self.bias_values = rng.standard_normal(rows).astype(np.float32) if bias else np.zeros(rows, np.float32)
            if bias:
                put("bias", self.bias_values)
            self.angles = rng.uniform(0, 6.28, max(1, self.rotary_dim // 2))
            put("rope", np.stack([np.cos(self.angles), np.sin(self.angles)], 1).astype(np.float32))
            put("state", np.array([1, 5, self.slot, 6] + [0] * 12, np.int32))
            a.q_dim, a.kv_dim, a.head_dim, a.rotary_dim, a.seq_len = self.q_dim, self.kv_dim, head_dim, self.rotary_dim, 7
            a.q_scale = 0.125
            kv = np.float16 if kv_dtype == "fp16" else np.uint8
            out("y32", self.q_dim, np.float32)
            out("kcache", n_kv_heads * 7 * head_dim, kv)
            out("vcache", n_kv_heads * 7 * head_dim, kv)
        elif kind == "gateup":
            out("y32", rows // 2, np.float32)
            out("y16", rows // 2, np.float16)
        elif kind in ("out", "down"):
            self.res = rng.standard_normal(rows).astype(np.float32)
            self.g_next = (1 + 0.3 * rng.standard_normal(rows)).astype(np.float32)
            put("g_next", self.g_next)
            out("y32", rows, np.float32)
            out("y16", rows, np.float16)
            out("part_next", 2 * self.plan.grid, np.float32)
            self.in_place = in_place
            if in_place:
                a.res = a.y32
            else:
                put("res", self.res)
        else:
            out("y32", rows, np.float32)
            out("best", 4 * self.plan.grid, np.float32)
        self.stamp = cp.asarray(np.array([2**64 - 1, 0], np.uint64))
        a.stamp = self.stamp.data.ptr

    def run(self, *, pdl: bool = True) -> dict[str, np.ndarray]:
        cp = self.gpu.cupy
        for array, _ in self.outputs.values():
            array.view(cp.uint8).fill(0xFF)
        if self.kind in ("out", "down") and self.in_place:
            self.outputs["y32"][0][: self.rows] = cp.asarray(self.res)
        self.gpu.launch(self.plan, self.args, pdl=pdl)
        cp.cuda.Device().synchronize()
        result = {}
        for name, (array, n) in self.outputs.items():
            host = cp.asnumpy(array)
            assert (host[n:].view(np.uint8) == 0xFF).all(), f"{name}: written past its end"
            result[name] = host[:n]
        return result

    def errors(self, result: dict[str, np.ndarray]) -> dict[str, float]:
        """Relative error (norms) of every output against float64; inf for what was not written."""
        if self.moe and self.kind == "down":
            x = self.x.reshape(-1, self.cols)
            y = sum(s * (w @ xe) for s, w, xe in zip(self.share, self.w, x, strict=True))
        else:
            y = self.w @ self.x
        expected: dict[str, np.ndarray] = {}
        got = {name: value.astype(np.float64) for name, value in result.items() if name not in ("kcache", "vcache", "best")}
        if self.kind == "qkv":
            y = np.clip(y + self.bias_values, -self.clip, self.clip)
            pairs = y.reshape(-1, 2).copy()
            channel = np.arange(0, self.rows, 2)
            n_rot = self.q_dim + self.kv_dim
            head = np.where(channel < self.q_dim, channel % self.head_dim, (channel - self.q_dim) % self.head_dim)
            turn = (channel < n_rot) & (head < self.rotary_dim)
            c = np.cos(self.angles)[np.where(turn, head // 2, 0)]
            s = np.sin(self.angles)[np.where(turn, head // 2, 0)]
            rotated = np.stack([pairs[:, 0] * c - pairs[:, 1] * s, pairs[:, 0] * s + pairs[:, 1] * c], 1)
            y = np.where(turn[:, None], rotated, pairs).reshape(-1)
            expected["y32"] = y[: self.q_dim] * 0.125
            for name, lo in (("kcache", self.q_dim), ("vcache", self.q_dim + self.kv_dim)):
                cache = result[name].reshape(-1, self.seq_len, self.head_dim)
                others = np.delete(cache, self.slot, 1)
                assert (np.ascontiguousarray(others).view(np.uint8) == 0xFF).all(), f"{name}: wrote another position"
                row = np.ascontiguousarray(cache[:, self.slot]).reshape(-1)
                if self.kv_dtype == "fp8":
                    row = (row.astype(np.uint16) << 8).view(np.float16)
                got[name] = row.astype(np.float64)
                expected[name] = y[lo : lo + self.kv_dim]
        elif self.kind == "gateup":
            z, u = y[0::2], y[1::2]
            if self.gelu:
                act = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
            else:
                act = z / (1 + np.exp(-z))
            expected["y32"] = act * u
            expected["y16"] = act * u * ACT_SCALE
        elif self.kind in ("out", "down"):
            y = y + self.res
            expected["y32"] = y
            expected["y16"] = y * self.g_next * ACT_SCALE
            part = got.pop("part_next").reshape(-1, 2).sum(0)
            got["part_next"], expected["part_next"] = part[1:], np.array([(y * y).sum()])
            got["sum"], expected["sum"] = part[:1] / np.sqrt(len(y)) / y.std(), np.array([y.sum()]) / np.sqrt(len(y)) / y.std()
        else:
            expected["y32"] = y
            best = result["best"].reshape(-1, 4)
            values, index = best[:, 0], np.ascontiguousarray(best[:, 1]).view(np.int32)
            top = int(np.argmax(values))
            flat = result["y32"]
            assert values[top] == flat.max(), "best value"
            assert index[top] == int(np.argmax(flat)), "best index"
            shifted = float((best[:, 2] * np.exp(values - flat.max()).astype(np.float64)).sum())
            assert abs(shifted / np.exp(flat.astype(np.float64) - flat.max()).sum() - 1) < 1e-5, "sum of exponentials"
        errors = {}
        for name, e in expected.items():
            a = got[name]
            if name in ("y16",):
                ok = np.isfinite(a)
                assert (np.abs(e[~ok]) > 60000).all(), "y16 is not finite"
                a, e = a[ok], e[ok]
            norm = np.linalg.norm(e) or 1.0
            if name == "sum":
                norm = 1.0
            error = np.linalg.norm(a - e) / norm
            errors[name] = float(error) if np.isfinite(error) else float("inf")
        return errors
